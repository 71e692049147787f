"""The arguments of timm's train.py: their types and defaults, and reading them, from an args.yaml or a command line.

They are those of timm's train.py at aa4b5850 (August 2026), a few of earlier versions, and what 1.0.31 has added, as
far as its package tells. The script itself is in no package, but the release notes name its new arguments, the tests in
the source distribution use them, and the functions that make schedules and losses of them have their defaults.
"""

import argparse
import math
import shlex
from collections.abc import Container, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, NoReturn

from timm.utils import ParseKwargs

from dali_train.config.check import close_names
from dali_train.errors import ConfigError
from dali_train.extras.timm.launchers import num_processes
from dali_train.files import read_limited
from dali_train.text import printable, shortened

FLAGS = """
dataset_download dataset_trust_remote_code pretrained no_resume_opt channels_last grad_checkpointing fast_norm amp
torchscript no_ddp_bb synchronize_step sched_on_updates warmup_prefix no_aug jsd_loss bce_loss bce_sum resplit sync_bn
split_bn model_ema model_ema_force_cpu model_ema_warmup save_images pin_mem no_prefetcher use_multi_epochs_loader
log_wandb naflex_loader naflex_patchify_channels_first
"""
# A name without = has no default, one with nothing behind it an empty one.
TEXTS = """
config= data data_dir dataset= train_split=train val_split=validation class_map= input_img_mode input_key target_key
model=resnet50 pretrained_path initial_checkpoint= resume= gp interpolation= fuser= torchcompile torchcompile_mode
device=cuda amp_dtype=float16 model_dtype opt=sgd clip_mode=norm sched=cosine lr_base_scale= train_crop_mode aa
remode=pixel mixup_mode=batch train_interpolation=random dist_bn=reduce worker_seeding=all output= experiment=
eval_metric=top1 wandb_project wandb_resume_id= train_size_schedule=constant variable_batch_loss_scale=none
naflex_loss_scale=linear kd_model_name kd_distill_type=logit kd_loss_type=kl kd_token_distill_type=soft
task=classification target_format loss loss_pos_weight loss_class_weight class_stats lr_decay_fn
"""
INTEGERS = """
train_num_samples val_num_samples num_classes img_size in_chans batch_size=128 validation_batch_size grad_accum_steps=1
local_rank=0 lr_base_size=256 lr_cycle_limit=1 epochs=300 start_epoch warmup_epochs=5 cooldown_epochs=0
patience_epochs=10 aug_splits=0 recount=1 mixup_off_epoch=0 seed=42 log_interval=50 val_interval=1 recovery_interval=0
checkpoint_hist=10 workers=4 tta=0 train_batches_per_epoch naflex_max_seq_len=576 kd_student_feature_dim
kd_teacher_feature_dim stop_epoch
"""
NUMBERS = """
crop_pct head_init_scale head_init_bias opt_eps momentum=0.9 weight_decay=2e-5 clip_grad layer_decay
layer_decay_min_scale=0 layer_decay_no_opt_scale lr lr_base=0.1 lr_noise_pct=0.67 lr_noise_std=1 lr_cycle_mul=1
lr_cycle_decay=0.5 lr_k_decay=1 warmup_lr=1e-5 min_lr=0 epoch_repeats=0 decay_epochs decay_rate=0.1 hflip=0.5 vflip=0
color_jitter=0.4 color_jitter_prob grayscale_prob gaussian_blur_prob aug_repeats=0 bce_target_thresh bce_pos_weight
reprob=0 mixup=0 cutmix=0 mixup_prob=1 mixup_switch_prob=0.5 smoothing=0.1 drop=0 drop_connect drop_path drop_block
bn_momentum bn_eps model_ema_decay=0.9998 train_size_schedule_spread=0.65 train_size_random_mix=0.1 distill_loss_weight
task_loss_weight kd_temperature=4 lr_stable_timescale multilabel_threshold=0.5 loss_weight_power=1 poly_epsilon=2
poly_gamma=0
"""
LISTS: dict[str, tuple[type, list[Any] | None]] = {
    "input_size train_img_sizes train_batch_sizes naflex_patch_sizes save_epochs": (int, None),
    "mean std opt_betas lr_noise cutmix_minmax train_size_probs naflex_patch_size_probs": (float, None),
    "device_modules": (str, None),
    "wandb_tags": (str, []),
    "scale": (float, [0.08, 1.0]),
    "ratio": (float, [3 / 4, 4 / 3]),
    "decay_milestones": (int, [90, 180, 270]),
    "naflex_train_seq_lens": (int, [128, 256, 576, 784, 1024]),
}
DICTS = "model_kwargs opt_kwargs"
EARLIER = "native_amp apex_amp jsd bn_tf force_cpu"
"""Flags of earlier versions, whose args.yaml are still about."""


def _rows(table: str, kind: type) -> dict[str, tuple[type, Any]]:
    rows = (word.partition("=") for word in table.split())
    return {name: (kind, kind(default) if equals else None) for name, equals, default in rows}


_LIST_ROWS = {name: row for names, row in LISTS.items() for name in names.split()}
_TYPES: dict[str, tuple[type, Any]] = {
    **dict.fromkeys((FLAGS + EARLIER).split(), (bool, False)),
    **_rows(TEXTS, str),
    **_rows(INTEGERS, int),
    **_rows(NUMBERS, float),
    **_LIST_ROWS,
    **{name: (dict, {}) for name in DICTS.split()},
}
DEFAULTS = {name: default for name, (_, default) in _TYPES.items()}
_ALSO = {"batch_size": "-b", "workers": "-j", "validation_batch_size": "-vb", "decay_rate": "--dr", "config": "-c"}
_ALSO |= {"local_rank": "--local_rank", "train_batches_per_epoch": "--train-steps-per-epoch"}

_NOT_TIMMS = "no argument of timm's train.py that is known here"
# Null since 1.0.31, where the task decides them: `DEFAULTS` are of classification.
_OF_MULTILABEL: dict[str, Any] = {"smoothing": 0.0, "eval_metric": "map"}


class _KeyValues(ParseKwargs):
    """timm's, with an argparse error for a word without =, and for a value that a config file cannot state."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if wrong := [value for value in values if "=" not in value]:
            parser.error(f"argument {option_string}: {wrong[0]!r} is not of the form NAME=VALUE")
        try:
            super().__call__(parser, namespace, values, option_string)
        except (RecursionError, MemoryError):  # of Python's parser
            parser.error(f"argument {option_string}: a value is nested too deeply: use numbers or texts")
        for name, value in getattr(namespace, self.dest).items():
            if not name.isidentifier() or iskeyword(name):
                parser.error(f"argument {option_string}: {name!r} cannot be the name of a Python argument")
            if not _is_plain(value):
                parser.error(
                    f"argument {option_string}: {shortened(_as_typed(name, values), 60)}: use numbers of at most 1e30, "
                    "or texts, or lists of them"
                )


def _as_typed(name: str, values: Any) -> str:
    return printable(next(word for word in reversed(values) if word.startswith(f"{name}=")))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether Python reads the repr of `value` back as `value`: finite numbers, texts, nested a few times."""
    if isinstance(value, list | tuple):
        return depth < 3 and all(_is_plain(one, depth + 1) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _is_plain(list(value.values()), depth)
    if isinstance(value, int | float):
        return abs(value) <= 1e30  # nan is not
    return value is None or isinstance(value, str)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--from-timm: {message}")


def read_arguments(source: str, num_ranks: int | None = None) -> tuple[dict[str, Any], int | None, dict[str, str]]:
    """Return the arguments in an args.yaml, or on a command line with or without its launcher.

    Args:
        num_ranks: the number of processes, if the user says it; then the launcher is not asked.

    Returns:
        All arguments by name; the number of processes, None if there is no launcher; the unknown names in a file, with
        the reason why they are left out.

    Raises:
        ConfigError: the file cannot be read, a launcher does not say how many processes it starts, an argument on the
            command line is not timm's, one in the file is a slip for another, or one has a value that it does not take.
    """
    words = ["--config", source] if Path(source).suffix in (".yaml", ".yml") else _words(source)
    launcher, words = _without_launcher(words)
    if num_ranks is None:
        num_ranks = num_processes(launcher)
    parser = _parser()
    file, unknown = parser.parse_known_args(words)[0].config, {}
    if file:
        given = _read_yaml(Path(file))
        foreign = sorted(given.keys() - DEFAULTS.keys())
        for name in foreign:
            if close := _meant(name, given):
                raise ConfigError(f"--from-timm {file}: {printable(name)}: {_NOT_TIMMS}, use {close} or leave it out")
        unknown = {f"{name} {given.pop(name)}": _NOT_TIMMS for name in foreign}
        parser.set_defaults(**{name: _null(name) for name, value in given.items() if value is None})
        words = [*(word for name, value in given.items() for word in _as_words(name, value)), *words]
    arguments, more = parser.parse_known_args(words)
    if more:
        close = _meant(more[0].lstrip("-").partition("=")[0].replace("-", "_"), {})
        remedy = f"use --{close.replace('_', '-')} or leave it out" if close else "leave it out"
        raise ConfigError(f"--from-timm: {printable(shlex.join(more))}: {_NOT_TIMMS}, {remedy}")
    values = vars(arguments)
    for name, of_multilabel in _OF_MULTILABEL.items():
        if values[name] is None:
            values[name] = of_multilabel if arguments.task == "multilabel" else DEFAULTS[name]
    return values, num_ranks, unknown


def _meant(name: str, given: Container[str]) -> str | None:
    """Return the argument that an unknown name is a slip for, if any. One that is `given` itself was not meant: timm
    writes all of its arguments into args.yaml, and what is left over there is of another version."""
    close = close_names(name, [known for known in DEFAULTS if known not in given], cutoff=0.75)
    return close[0] if close else None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"--from-timm: the command line cannot be split into words ({error})") from None


def _without_launcher(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the arguments of train.py, and these."""
    scripts = [number for number, word in enumerate(words) if word.endswith((".py", "distributed_train.sh"))]
    if not scripts:
        return [], list(words)
    launcher, script, rest = list(words[: scripts[0]]), Path(words[scripts[0]]).name, list(words[scripts[0] + 1 :])
    if script == "distributed_train.sh":  # whose first argument is the number of processes of torchrun
        return ["torchrun", "--nproc-per-node", *rest[:1]], rest[1:]
    if script != "train.py":
        raise ConfigError(
            f"--from-timm: the command runs {script}, whose arguments have other defaults; only those of timm's "
            "train.py are known. `dali-train recipes` lists recipes of DeiT, ConvNeXt and others"
        )
    return launcher, rest


def _parser() -> _Parser:
    parser = _Parser(prog="train.py", add_help=False)
    parser.add_argument("data", nargs="?")
    for name, (kind, default) in _TYPES.items():
        options: dict[str, Any] = {"type": _number if kind is float else kind}
        if kind is bool:
            options = {"action": "store_true"}
        elif kind is dict:
            options = {"nargs": "*", "action": _KeyValues}
        elif name in _LIST_ROWS:
            options["nargs"] = "+"
        elif name == "torchcompile":
            options |= {"nargs": "?", "const": "inductor"}
        if name != "data":
            flags = [f"--{name.replace('_', '-')}", *([_ALSO[name]] if name in _ALSO else [])]
            parser.add_argument(*flags, dest=name, default=None if name in _OF_MULTILABEL else default, **options)
    return parser


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # timm needs it

    try:
        values = yaml.safe_load(read_limited(path, 1_000_000))
    except (OSError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"--from-timm {path}: cannot be read as timm's args.yaml: {reason}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"--from-timm {path}: not arguments by name, as timm's train.py writes them")
    return {name.replace("-", "_"): value for name, value in values.items()}


def _null(name: str) -> Any:
    """Return what null in a file means. Raises ConfigError: timm's train.py needs a value there."""
    kind, default = _TYPES[name]
    if name in ("color_jitter", "train_interpolation", *_OF_MULTILABEL):  # no jitter, the model's own filter
        return None
    if default is None or kind in (bool, dict) or default == "" or name in _LIST_ROWS:
        return default
    raise ConfigError(f"--from-timm: {name} is null: use a value, or leave it out")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _as_words(name: str, value: Any) -> list[str]:
    """Return an argument from a file as it stands on a command line, so that its value is checked the same way."""
    kind, _ = _TYPES[name]
    if value is None or (kind is bool and value is False) or value in ([], {}):
        return []
    flag = f"--{name.replace('_', '-')}"
    if kind is bool and value is True:
        return [flag]
    if kind is dict and isinstance(value, dict):
        return [flag, *(f"{key}={one}" for key, one in value.items())]
    if name in _LIST_ROWS and isinstance(value, list):
        return [flag, *map(str, value)]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    return [f"{flag}={value}"] if name != "data" else []
