"""Suggestions for unknown names of settings and values."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from dali_train.errors import ConfigError
from dali_train.text import printable, shortened

T = TypeVar("T")

# Names of settings in other trainers (timm, torchvision, Hugging Face, ColossalAI), without the section.
_ELSEWHERE = {
    "data.root": "data data_dir data_path dataset train_dir",
    "data.seed": "seed",
    "data.normalise": "mean std normalize",
    "data.num_threads": "workers num_workers threads dataloader_num_workers",
    "data.train_size": "img_size image_size input_size train_crop_size",
    "data.eval_size": "img_size image_size input_size val_crop_size",
    "data.eval_resize_to": "crop_pct val_resize_size",
    "data.horizontal_flip": "hflip",
    "data.crop": "train_crop_mode",
    "data.crop_area": "scale",
    "data.crop_aspect": "ratio",
    "data.augment": "aa auto_augment autoaugment randaugment augmentation",
    "data.random_erasing": "reprob random_erase",
    "data.random_erasing_fill": "remode",
    "data.repeats": "aug_repeats repeated_aug ra_sampler ra_reps epoch_repeats",
    "data.interpolation": "train_interpolation",
    "model.name": "model arch",
    "model.weights": "pretrained pretrained_path initial_checkpoint finetune",
    "model.kwargs.img_size": "img_size",
    "model.kwargs.global_pool": "gp",
    "model.kwargs.drop_rate": "drop dropout drop_rate",
    "model.kwargs.drop_path_rate": "drop_path drop_path_rate",
    "model.activation_checkpointing": "grad_checkpointing gradient_checkpointing",
    "model.compile": "torchcompile torch_compile",
    "model.compile cuda-graphs": "cuda_graphs",
    "optimizer.name": "opt optim optimizer",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.lr (at a global batch of 256, with optimizer.scale_lr)": "base_batch lr_base lr_base_size",
    "optimizer.scale_lr": "lr_base_scale",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "opt_eps adam_epsilon",
    "optimizer.kwargs.momentum": "momentum",
    "optimizer.kwargs.nesterov": "nesterov",
    "optimizer.kwargs.bias_correction": "bias_correction",
    "optimizer.kwargs": "opt_kwargs optim_args",
    "optimizer.betas": "opt_betas adam_beta1 adam_beta2",
    "optimizer.exclude_vectors": "norm_weight_decay bias_weight_decay",
    "optimizer.clip_grad_norm": "clip_grad max_grad_norm",
    "schedule.name": "schedule sched scheduler lr_scheduler lr_scheduler_type",
    "schedule.step_every": "sched_on_updates",
    "schedule.warmup_epochs": "warmup warmup_steps warmup_ratio lr_warmup_epochs num_warmup_steps",
    "schedule.decay_from": "warmup_prefix",
    "schedule.min_lr": "lr_min",
    "batch.global_batch (images per optimizer step)": "batch batch_size",
    "batch.micro_batch (images per rank and pass)": "batch batch_size per_device_train_batch_size",
    "batch.global_batch (accumulation follows from it, batch.micro_batch and the number of ranks)": (
        "accumulation grad_accum_steps gradient_accumulation_steps accumulate_grad_batches"
    ),
    "loss.name": "loss criterion",
    "loss.name binary-cross-entropy": "bce bce_loss",
    "loss.target_threshold": "bce_target_thresh",
    "loss.label_smoothing": "smoothing",
    "mixup.alpha": "mixup mixup_alpha",
    "mixup.cutmix_alpha": "cutmix",
    "mixup.alpha (0 for none: every micro-batch is mixed, and with both alphas by one of the two)": (
        "prob mixup_prob mixup_switch_prob switch_prob mixup_mode"
    ),
    "ema.decay": "ema model_ema model_ema_decay ema_decay",
    "ema.warmup": "model_ema_warmup",
    "precision.dtype": "amp amp_dtype fp16 bf16 precision",
    "run.dir": "output output_dir out save_dir log_dir",
    "run.epochs": "max_epochs num_epochs num_train_epochs",
    "run.max_steps": "steps",
    "run.keep_checkpoints": "checkpoint_hist save_total_limit",
    "run.checkpoint_every_steps": "recovery_interval save_steps save_freq",
    "run.device": "accelerator",
    "hooks.log_every_steps": "log_interval print_freq logging_steps log_every_n_steps",
    "hooks.stop_early": "patience patience_epochs early_stopping",
    "hooks.predictions": "sample_images save_images log_images",
    "hooks.trackers": "report_to logger",
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

_NOT_NEEDED = {
    "num_classes nb_classes": "the dataset decides it",
    "sync_bn dist_bn split_bn": "BatchNorm's running statistics are always means over the global batch",
    "pin_mem pin_memory no_prefetcher persistent_workers": "images are always read and decoded ahead of the step",
}
"""Names of settings in other trainers that have no counterpart -> why."""

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
    name = shortened(printable(name), 100)  # a config.json may be somebody else's
    written = name.replace("-", "_")
    last = written.rpartition(".")[2]
    for names, reason in _NOT_NEEDED.items():
        if last in names.split():
            return f"{prefix}{name} is not a setting: {reason}, leave it out"
    right = [setting for setting, names in _ELSEWHERE.items() if last in names.split() and setting != written]
    right = right or [each for each in known if each.rpartition(".")[2] == last and each != written]
    right = right or get_close_matches(written, known, n=2, cutoff=0.75)
    parts = {each.rpartition(".")[2] for each in known}
    close = get_close_matches(last, parts, n=2, cutoff=0.75)  # in another section only if it is much alike
    right = right or [each for each in known if each.rpartition(".")[2] in close]
    remedy = f"use {' or '.join(prefix + each for each in right)}" if right else "README and --help list the settings"
    return f"{prefix}{name} is not a setting: {remedy}"


def close_value(value: Any, known: Sequence[Any], every: str) -> str:
    """Return `every`, the list of allowed values, preceded by the `known` word closest to `value`, if any."""
    if not isinstance(value, str):
        return every
    other = _OTHER_VALUES.get(value.lower())
    close = [other] if other in known else get_close_matches(value.lower(), map(str, known), n=1)
    return f"{close[0]} (of {every})" if close else every


def lookup(table: Mapping[str, T], setting: str, name: str) -> T:
    """Return the row `name` of a table. Raises ConfigError: there is none, so `setting` names nothing."""
    if name not in table:
        known = list(table)
        raise ConfigError(f"{setting} is {name!r}: use {close_value(name, known, ', '.join(known))}")
    return table[name]
