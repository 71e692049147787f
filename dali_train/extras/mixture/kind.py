"""A mixture as a kind of dataset, see `KindOfDataset`. Importing this registers its storage and its cache."""

from dataclasses import replace
from typing import Any

import numpy as np

from dali_train.config import DataConfig, SampleConfig
from dali_train.data.dataset.index import Split, kept_images
from dali_train.data.dataset.manifest import SplitName, dataset_content
from dali_train.data.dataset.sample_recipe import names_content
from dali_train.extras.mixture import mixed_images  # noqa: F401
from dali_train.extras.mixture.dataset import MixedSplit, num_bytes, read_manifest, source_manifests
from dali_train.extras.mixture.merge import mixed_order
from dali_train.text import plural


def open_split(data: DataConfig, name: SplitName, *, local: bool) -> Split:
    """Return the training split of a mixture, or the validation split of data.root with the classes of the mixture.

    Args:
        local: see `Split`.

    Raises:
        ConfigError: the datasets do not go together.
        DatasetError: see `Split`.
    """
    return MixedSplit(data, local=local) if name == "train" else _validation_split(data, name, local=local)


def _validation_split(data: DataConfig, name: SplitName, *, local: bool) -> Split:
    split = Split(data.root, name, local=local)
    mixed = read_manifest(data)  # the labels of data.root come first
    split.manifest = replace(
        split.manifest,
        num_classes=mixed.num_classes,
        class_names=mixed.class_names,
        **mixed.label_kind.manifest_fields(),
    )
    split.label_kind = mixed.label_kind
    split.dataset_bytes = num_bytes(mixed)
    return split


def describe_uses(config: SampleConfig, steps: int) -> list[str]:
    """Return a line for each source: its share with each of the weights, and what the first `steps` have of it.

    Raises:
        ConfigError, DatasetError: see `MixedSplit`, of which only the manifests are read.
    """
    data, batch = config.data, config.batch
    sources = [manifest.splits["train"].num_records for manifest in source_manifests(data)]
    kept = None if data.exclude is None else kept_images(data.exclude, sum(sources))
    order = mixed_order(config, sources, np.zeros(sum(sources), dtype=np.int64), kept)
    counts = order.counts_before(steps * batch.num_micro_batches).tolist()  # repeats included
    weights = data.mix_weights
    lines = []
    for number, (name, _, _) in enumerate(data.mix):
        shares = [f"{each[number] / sum(each):.1%} from epoch {epoch:g}" for epoch, each in weights]
        if len(weights) == 1:
            shares = [f"{weights[0][1][number] / sum(weights[0][1]):.1%}"]
        num_images = order.orders[number].num_images
        lines.append(
            f"{name}: {', '.join(shares)}; {plural(counts[number], 'image')} in {plural(steps, 'step')}, "
            f"{counts[number] / num_images:.2f} epochs of {num_images:,}"
        )
    return lines


def recipe_settings(data: DataConfig) -> dict[str, Any]:
    """Return what a recipe has of data.mix: the names in their order, and the weight and the content of each dataset.

    Raises DatasetError: see `source_manifests`.
    """
    fields: dict[str, Any] = {"data.mix": [name for name, _, _ in data.mix]}
    for (name, _, weight), manifest in zip(data.mix, source_manifests(data), strict=True):
        fields[f"data.mix {name} (weight)"] = weight
        fields[f"data.mix {name} (dataset)"] = f"{dataset_content(manifest)}, {names_content(manifest.class_names)}"
    return fields
