"""From TFRecords on disk to mixed, normalised micro-batches on the device."""
