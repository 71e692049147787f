"""From published datasets to TFRecords, and from these to mixed, normalised micro-batches on the device."""

# Its table of converters is what errors about a missing dataset advise, whichever room they come from.
from dali_train.data.convert import datasets as datasets
