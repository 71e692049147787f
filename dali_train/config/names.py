"""Suggestions for unknown names of settings and values."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from dali_train.errors import ConfigError

T = TypeVar("T")

# Names of settings in other trainers, without the section.
_ELSEWHERE = {
    "data.root": "data data_dir data_path dataset",
    "data.seed": "seed",
    "data.normalise": "mean std normalize",
    "data.num_threads": "workers num_workers threads",
    "data.train_size": "img_size image_size input_size",
    "data.eval_size": "img_size image_size input_size",
    "data.eval_resize_to": "crop_pct",
    "data.horizontal_flip": "hflip",
    "data.crop_area": "scale",
    "data.crop_aspect": "ratio",
    "model.name": "model arch",
    "model.kwargs.img_size": "img_size",
    "model.kwargs.drop_rate": "drop dropout drop_rate",
    "model.kwargs.drop_path_rate": "drop_path drop_path_rate",
    "model.activation_checkpointing": "grad_checkpointing",
    "model.compile": "torchcompile",
    "model.compile cuda-graphs": "cuda_graphs",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "opt_eps",
    "optimizer.kwargs": "bias_correction",
    "optimizer.lr (at a global batch of 256)": "base_batch",
    "optimizer.betas": "opt_betas",
    "optimizer.clip_grad_norm": "clip_grad max_grad_norm",
    "schedule.warmup_epochs": "warmup warmup_steps",
    "batch.global_batch (images per optimizer step)": "batch_size",
    "batch.micro_batch (images per rank and pass)": "batch_size",
    "batch.global_batch (accumulation follows from it, batch.micro_batch and the number of ranks)": (
        "accumulation grad_accum_steps"
    ),
    "mixup.alpha": "mixup",
    "precision.dtype": "amp amp_dtype fp16 bf16 precision",
    "run.dir": "output output_dir out save_dir log_dir",
    "run.epochs": "max_epochs num_epochs",
    "run.max_steps": "steps",
    "hooks.log_every_steps": "log_interval",
    "hooks.trackers tensorboard": "tensorboard",
    "hooks.trackers wandb (more by WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY in the environment)": (
        "wandb log_wandb wandb_project wandb_entity"
    ),
    "hooks.trackers mlflow (more by MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME in the environment)": (
        "mlflow mlflow_experiment"
    ),
    "parallel.tensor.size (and parallel.tensor.mode)": "tensor tp",
    "parallel.pipeline": "pp",
    "parallel.shard": "zero fsdp",
    "parallel.grad_reduce_dtype": "exchange_dtype",
}

_OTHER_VALUES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "gpu": "cuda",
    "cuda": "gpu",
    "stream": "dali",
    "tfrecord": "dali",
}


def unknown_setting(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return the error message for an unknown setting, with the right name if it can be guessed.

    Args:
        prefix: the prefix of names in the source of `name`, such as --.
    """
    known = list(known)
    written = name.replace("-", "_")
    last = written.rpartition(".")[2]
    right = [setting for setting, names in _ELSEWHERE.items() if last in names.split() and setting != written]
    right = right or [each for each in known if each.rpartition(".")[2] == last and each != written]
    right = right or get_close_matches(written, known, n=2, cutoff=0.75)
    parts = {each.rpartition(".")[2] for each in known}
    right = right or [each for each in known if each.rpartition(".")[2] in get_close_matches(last, parts, n=2)]
    remedy = f"use {' or '.join(prefix + each for each in right)}" if right else "README and --help list the settings"
    return f"{prefix}{name} is not a setting: {remedy}"


def close_value(value: Any, known: Sequence[Any], every: str) -> str:
    """Return `every`, the list of allowed values, preceded by the `known` word closest to `value`, if any."""
    if not isinstance(value, str):
        return every
    other = _OTHER_VALUES.get(value.lower())
    close = [other] if other in known else get_close_matches(value.lower(), map(str, known), n=1)
    return f"{close[0]} (of {every})" if close else every


def row_of(table: Mapping[str, T], setting: str, name: str) -> T:
    """Return the row of a table that a setting names. Raises ConfigError: there is no such row."""
    if name not in table:
        known = list(table)
        raise ConfigError(f"{setting} is {name!r}: use {close_value(name, known, ', '.join(known))}")
    return table[name]
