"""Names that people try: what a setting is called here."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# What other trainers, and this one's earlier versions, call a setting; by the last part of the name.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "seed": ("data.seed",),
    "mean": ("data.normalise",),
    "std": ("data.normalise",),
    "normalize": ("data.normalise",),
    "data": ("data.root",),
    "data_dir": ("data.root",),
    "data_path": ("data.root",),
    "dataset": ("data.root",),
    "workers": ("data.num_threads",),
    "num_workers": ("data.num_threads",),
    "threads": ("data.num_threads",),
    "img_size": ("data.train_size", "data.eval_size", "model.kwargs.img_size"),
    "image_size": ("data.train_size", "data.eval_size"),
    "input_size": ("data.train_size", "data.eval_size"),
    "crop_pct": ("data.eval_resize_to",),
    "hflip": ("data.horizontal_flip",),
    "scale": ("data.crop_area",),
    "ratio": ("data.crop_aspect",),
    "model": ("model.name",),
    "arch": ("model.name",),
    "drop": ("model.kwargs.drop_rate",),
    "dropout": ("model.kwargs.drop_rate",),
    "drop_rate": ("model.kwargs.drop_rate",),
    "drop_path": ("model.kwargs.drop_path_rate",),
    "drop_path_rate": ("model.kwargs.drop_path_rate",),
    "grad_checkpointing": ("model.activation_checkpointing",),
    "torchcompile": ("model.compile",),
    "learning_rate": ("optimizer.lr",),
    "base_lr": ("optimizer.lr",),
    "wd": ("optimizer.weight_decay",),
    "opt_eps": ("optimizer.eps",),
    "opt_betas": ("optimizer.betas",),
    "clip_grad": ("optimizer.clip_grad_norm",),
    "max_grad_norm": ("optimizer.clip_grad_norm",),
    "warmup": ("schedule.warmup_epochs",),
    "batch_size": ("batch.global_batch (images per optimizer step)", "batch.micro_batch (images per rank and pass)"),
    "accumulation": ("batch.global_batch (accumulation follows from it, batch.micro_batch and the number of ranks)",),
    "grad_accum_steps": (
        "batch.global_batch (accumulation follows from it, batch.micro_batch and the number of ranks)",
    ),
    "mixup": ("mixup.alpha",),
    "amp": ("precision.dtype",),
    "amp_dtype": ("precision.dtype",),
    "fp16": ("precision.dtype",),
    "bf16": ("precision.dtype",),
    "precision": ("precision.dtype",),
    "output": ("run.dir",),
    "output_dir": ("run.dir",),
    "out": ("run.dir",),
    "save_dir": ("run.dir",),
    "log_dir": ("run.dir",),
    "max_epochs": ("run.epochs",),
    "num_epochs": ("run.epochs",),
    "steps": ("run.max_steps",),
    "log_interval": ("hooks.log_every_steps",),
    "log_wandb": ("hooks.trackers wandb",),
    "tensorboard": ("hooks.trackers tensorboard",),
    "wandb": ("hooks.trackers wandb (offline: WANDB_MODE=offline in the environment)",),
    "wandb_project": ("hooks.trackers wandb (its project: WANDB_PROJECT in the environment)",),
    "wandb_entity": ("hooks.trackers wandb (its entity: WANDB_ENTITY in the environment)",),
    "mlflow": ("hooks.trackers mlflow (where: MLFLOW_TRACKING_URI in the environment)",),
    "mlflow_experiment": ("hooks.trackers mlflow (its experiment: MLFLOW_EXPERIMENT_NAME in the environment)",),
    "tensor": ("parallel.tensor.size (and parallel.tensor.mode)",),
    "tp": ("parallel.tensor.size",),
    "exchange_dtype": ("parallel.grad_reduce_dtype",),
    "pp": ("parallel.pipeline",),
    "zero": ("parallel.shard",),
    "fsdp": ("parallel.shard",),
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
    """The message for a `name` that no setting has, with the right one where it can be guessed; `prefix` is how names
    begin."""
    known = list(known)
    written = name.replace("-", "_")
    last = written.rpartition(".")[2]
    right = _ELSEWHERE.get(last) if written not in _ELSEWHERE.get(last, ()) else None
    right = right or tuple(each for each in known if each.rpartition(".")[2] == last and each != written)
    right = right or tuple(get_close_matches(written, known, n=2, cutoff=0.75))
    right = right or tuple(
        each for each in known if each.rpartition(".")[2] in get_close_matches(last, _last_parts(known), n=2)
    )
    remedy = f"use {' or '.join(prefix + each for each in right)}" if right else "README and --help list the settings"
    return f"{prefix}{name} is not a setting: {remedy}"


def _last_parts(names: list[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]


def close_value(value: Any, known: tuple[Any, ...]) -> str:
    """The remedy for a `value` that is none of the `known` words."""
    every = f"{', '.join(map(str, known[:-1]))} or {known[-1]}" if len(known) > 1 else str(known[0])
    if not isinstance(value, str):
        return f"use {every}"
    other = _OTHER_VALUES.get(value.lower())
    close = [other] if other in known else get_close_matches(value.lower(), map(str, known), n=1)
    return f"use {close[0]} (of {every})" if close else f"use {every}"
