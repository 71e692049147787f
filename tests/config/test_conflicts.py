"""Settings that exclude each other: each row of ``CONFLICTS`` refuses its combination, and says so in one form."""

import re
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest

from dali_train.config import Config
from dali_train.config.check import conflicts_in
from dali_train.config.config import SETTINGS
from dali_train.errors import ConfigError
from tests.config.test_config import PLAIN

PIPELINE = {"parallel.pipeline": 2}
SHARDED = {"parallel.shard": "full"}
TENSOR = {"parallel.tensor.size": 2}
AUDITED = {"run.audit_every_steps": 5}

# One for each row.
_WITNESSES: list[dict[str, Any]] = [
    {"data.mix_until": ((6.0, 1.0, 0.0),)},
    {"data.mix_classes": "by-name"},
    {"data.epoch_images": 64},
    {"data.cache": "disk"},
    {"data.root": "s3://bucket/photos", "data.local_copy": "disk"},
    {"data.progressive": ((1, 256),)},
    {"data.crop": "inception", "data.crop_side": 32},
    {"data.crop_padding": 4},
    {"data.crop_side": 32, "data.crop_padding": 32},
    {"data.crop_padding_mode": "reflect"},
    {"data.alternating_flip": True, "data.horizontal_flip": 0},
    {"data.color_jitter_probability": 0.5},
    {"data.random_erasing_fill": "noise"},
    {"ema.warmup": True},
    {"ema.power": 1},
    {"ema.every_steps": 2},
    {"ema.lookahead": True},
    {"ema.decay": 0.9, "ema.warmup": True, "ema.power": 3},
    {"loss.target_threshold": 0.2},
    {"loss.sum_classes": True},
    {"loss.positive_weight": 2},
    {"loss.kwargs": {"gamma_neg": 4}},
    {"loss.name": "two-way", "loss.class_weights": "balanced"},
    {"loss.temperature": 2},
    {"loss.distillation": "hard"},
    {"loss.teacher": "resnet18"},
    {"mixup.probability": 0.5},
    {"mixup.until_epoch": 1},
    {"mixup.switch_probability": 0.1, "mixup.alpha": 1},
    {"mixup.alpha": 0.2, "batch.micro_batch": 1},
    {"optimizer.clip_mode": "agc", "optimizer.clip_grad_norm": None},
    {"optimizer.groups": (("*", 1, 1),), "optimizer.layer_decay": 0.7},
    {"parallel.num_chunks": 2},
    {"parallel.shard_ranks": 2},
    {**SHARDED, "parallel.tensor.size": 4, "parallel.tensor.mode": "2d"},
    {"parallel.tensor.size": 4, "parallel.tensor.depth": 2},
    {"parallel.tensor.size": 4, "parallel.tensor.mode": "2d", "parallel.tensor.sequence_parallel": True},
    {"schedule.warmup_epochs": 0.5, "schedule.step_every": "epoch"},
    {"schedule.name": "step"},
    {"schedule.name": "multistep"},
    {"schedule.milestones": (2,)},
    {"schedule.power": 2},
    {"schedule.decay_rate": 0.5},
    {"schedule.name": "multistep", "schedule.milestones": (2,), "schedule.decay_epochs": 2},
    {"precision.dtype": "fp64", "run.device": "cuda"},
    {"precision.autocast": False, "precision.dtype": "bf16", "model.fast_norm": True},
    {"precision.autocast": False, "precision.dtype": "bf16", "model.compile": "blocks"},
    {"run.deterministic": True, "model.compile": "autotune"},
    {"model.compile": "cuda-graphs", "run.device": "cpu"},
    {"model.compile": "cuda-graphs", "data.progressive": ((1, 128),)},
    {"model.channels_last": True, **SHARDED},
    {"optimizer.clip_mode": "agc", **SHARDED},
    {"optimizer.clip_mode": "agc", **TENSOR},
    {**PIPELINE, **AUDITED},
    {**SHARDED, **AUDITED},
    {**TENSOR, **AUDITED},
    {**PIPELINE, "loss.distillation": "hard", "loss.teacher": "resnet18"},
    {**PIPELINE, "optimizer.layer_decay": 0.7},
]
WITNESSES = [changes for changes in _WITNESSES if changes.keys() <= SETTINGS.keys()]  # an extra may be left out


def rows(section: type, prefix: str = "") -> list[tuple[tuple[str, ...], str]]:
    """The full names of the settings of each row of a section and of those in it, and its remedy up to a value."""
    found = []
    for conflict in conflicts_in(section):
        found.append((tuple(prefix + name for name in conflict.names), conflict.remedy.partition("{")[0]))
    for name, kind in get_type_hints(section).items():
        if is_dataclass(kind):
            found += rows(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


ROWS = rows(Config)


def test_each_row_refuses_its_combination_and_names_all_values_and_the_remedy() -> None:
    missing = list(ROWS)
    for changes in WITNESSES:
        with pytest.raises(ConfigError) as error:
            PLAIN.replace(changes)
        message = str(error.value)
        (row,) = (row for row in missing if matches(message, *row))
        missing.remove(row)
    assert not missing


def matches(message: str, names: tuple[str, ...], remedy: str) -> bool:
    """Return whether it reads "NAME is VALUE with NAME VALUE and NAME VALUE: REMEDY"."""
    first, *others = map(re.escape, names)
    values = " and ".join(rf"{name} \S.*" for name in others)
    return re.match(rf"{first} is \S.* with {values}: {re.escape(remedy)}", message) is not None
