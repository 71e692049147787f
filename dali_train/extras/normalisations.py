"""Weights that do not tell their normalisation: a few images are evaluated with each usual one."""

import numpy as np
import torch
from torch import nn

from dali_train.checkpoint.trained_on import trained_on
from dali_train.config import Config
from dali_train.config.check import as_typed
from dali_train.config.sections import NORMALISATIONS, Triple
from dali_train.data.dataset.index import Split
from dali_train.parallel.layout import Layout
from dali_train.training.metrics import Evaluator
from dali_train.training.precision import Precision

_NUM_IMAGES = 100


def describe_accuracies(
    model: nn.Module, config: Config, split: Split, device: torch.device, layout: Layout, num_threads: int
) -> str:
    """Return a line with the accuracy of model.weights by normalisation: that of `config`, ImageNet's, timm's other
    usual one, and that of timm's own weights for this network; empty if the weights tell theirs. All ranks call this
    together.

    Args:
        model: with model.weights and their classifier.
        split: to evaluate.
    """
    data, weights = config.data, config.model.weights
    known = trained_on(config.model.name, weights, getattr(model, "pretrained_cfg", None))
    if not split.label_kind.is_class or (known is not None and not known.is_assumed):
        return ""
    usual: dict[tuple[Triple, Triple], str | tuple[Triple, Triple]] = {(data.mean, data.std): data.normalise}
    for name in ("imagenet", "inception"):
        usual.setdefault(NORMALISATIONS[name], name)
    if known is not None:
        usual.setdefault((known.mean, known.std), known.normalise)
    chosen = np.linspace(0, len(split) - 1, min(_NUM_IMAGES, len(split))).round().astype(np.int64)
    labels = np.full((len(split), 1), -1)  # the others are left out
    labels[chosen, 0] = split.rows["label"][chosen]
    autocast = Precision(config.precision, device).autocast
    shares = []
    for normalise in usual.values():
        tried = config.replace({"data.normalise": normalise})
        evaluator = Evaluator(split, tried, device, layout, num_threads=num_threads, labels=labels)
        shares.append(f"{evaluator.run(model, autocast()).top1:.0%} with {as_typed(normalise)}")
    shares[0] += " (data.normalise)"
    return f"{weights} does not tell its normalisation; top-1 of {len(chosen)} images is {', '.join(shares)}"
