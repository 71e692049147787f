"""From published datasets to TFRecords, and from these to mixed, normalised micro-batches on the device."""
