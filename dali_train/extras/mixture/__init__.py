"""Training on a mixture of datasets, with exact shares on any number of ranks: `data.mix`."""

from dali_train.extras.mixture import mixed_images  # noqa: F401  registers the storage and the cache of a mixture
