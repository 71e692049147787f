"""Training on a mixture of datasets, with exact shares on any number of ranks: `data.mix`."""

from types import SimpleNamespace

from dali_train.extras.mixture import mixed_images  # noqa: F401  registers the storage and the cache of a mixture
from dali_train.extras.mixture.dataset import mixed_manifest, mixed_recipe, open_mixed

MIXTURE = SimpleNamespace(open=open_mixed, manifest=mixed_manifest, recipe=mixed_recipe)
"""What the core asks for where data.mix is set: `Mixture` in data/dataset/index.py."""
