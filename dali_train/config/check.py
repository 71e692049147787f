"""The base of all config sections: every value is checked once against its field's type hint, wherever it comes from.

A section is a frozen dataclass decorated with `section`. The type hint has all requirements on one value: its type, a
`Rule` in ``Annotated``, and whether it is `NotInRecipe`. Conditions on several fields are in ``__post_init__``, which
only sees values that match their hints. For unknown names of settings and values, messages suggest the right ones.
"""

import functools
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum, auto
from operator import attrgetter
from pkgutil import resolve_name
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dali_train.errors import ConfigError
from dali_train.text import has_credentials, printable, shortened

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A field's requirement beyond its type."""

    words: str  # completes "use ..." in messages
    low: float = -math.inf  # of numbers
    high: float = math.inf
    pattern: str | None = None  # a regular expression for all of a text

    def allows(self, value: Any) -> bool:
        if isinstance(value, int | float):
            return self.low <= value <= self.high
        return self.pattern is None or re.fullmatch(self.pattern, value) is not None


class Mark(Enum):
    """What a type hint says of its setting beside the values."""

    NOT_IN_RECIPE = auto()
    NEEDS_INDEX = auto()
    NEEDS_ONE_LABEL = auto()
    BY_CONTENT = auto()


NotInRecipe = Annotated[T, Mark.NOT_IN_RECIPE]
"""Affects the speed, location or monitoring of a run, but not its result: may change when a run is resumed. All
settings without this mark are in the recipe."""
NeedsIndex = Annotated[T, Mark.NEEDS_INDEX]
"""With another value than its default, needs to know in advance which image comes next; data.reader dali does not."""
NeedsOneLabel = Annotated[T, Mark.NEEDS_ONE_LABEL]
"""With another value than its default, is for datasets with one label an image."""
ByContent = Annotated[T, Mark.BY_CONTENT]
"""Names files or datasets whose content matters: their names may differ between nodes."""

OVER_0 = math.ulp(0.0)
UNDER_1 = math.nextafter(1.0, 0.0)
Count = Annotated[int, Rule("a whole number from 1 to 10**15", 1, 10**15)]
CountOr0 = Annotated[int, Rule("a whole number from 0 to 10**15", 0, 10**15)]
Pixels = Annotated[int, Rule("a number of pixels from 1 to 65,500", 1, 65_500)]  # the largest side of a JPEG
Positive = Annotated[float, Rule("a number over 0, at most 1e30", OVER_0, 1e30)]  # times a rate it fits into float32
NotNegative = Annotated[float, Rule("a number from 0 on, at most 1e30", 0, 1e30)]
Fraction = Annotated[float, Rule("a fraction from 0 to 1", 0, 1)]
Directory = Annotated[str, Rule("the name of a directory")]


_PREFIXES: dict[type, str] = {}  # section -> prefix of its settings' names


def require(fulfilled: bool, message: str) -> None:
    if not fulfilled:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Settings of a section, or of the complete config, that exclude each other. A class lists its rows in
    ``CONFLICTS``; they are checked in this order, after ``__post_init__``, those that it inherits first, and `--help
    SETTING` prints them."""

    names: tuple[str, ...]  # of the settings, in the section
    when: Callable[[Any], bool]  # whether they conflict in this section
    remedy: str  # {0} is the section

    def check(self, settings: Any) -> None:
        """Raises ConfigError, "NAME is VALUE with NAME VALUE: REMEDY": the settings conflict."""
        if not self.when(settings):
            return
        prefix = _PREFIXES[type(settings)]
        first, *others = [(prefix + name, as_typed(attrgetter(name)(settings))) for name in self.names]
        more = " and ".join(f"{name} {value}" for name, value in others)
        raise ConfigError(f"{first[0]} is {first[1]} with {more}: {self.remedy.format(settings)}")


def conflicts_of(settings: Any) -> list[tuple[tuple[str, ...], str]]:
    """Return the rows of a section: the full names of the settings that may conflict, and the remedy."""
    prefix = _PREFIXES[type(settings)]
    rows = conflicts_in(type(settings))
    return [(tuple(prefix + name for name in row.names), row.remedy.format(settings)) for row in rows]


def conflicts_in(section: type) -> list[Conflict]:
    return _rows_in(section, "CONFLICTS")


def rows_of_extras(table: str) -> list[Any]:
    """Return the rows of a table that the sections defined so far inherit from extras, see config/extra_settings.py."""
    return [row for section in _PREFIXES for row in _rows_in(section, table)]


def _rows_in(section: type, table: str) -> list[Any]:
    return [row for cls in reversed(section.__mro__) for row in vars(cls).get(table, ())]


def as_typed(value: Any) -> str:
    """Return a value of a setting as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        is_nested = any(isinstance(element, tuple) for element in value)
        return (" " if is_nested else ",").join(map(as_typed, value)) or "()"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")  # all digits: in a message about a change they may be what differs
    return str(getattr(value, "__qualname__", value))


def section(name: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator for a dataclass whose ``__init__`` refuses unknown, missing and invalid values.

    Messages call a value ``name.field``. A list is converted to a tuple and a path to a string if the field needs one.
    The class raises ConfigError.
    """

    def decorate(cls: type[T]) -> type[T]:
        members = vars(cls)["__dataclass_fields__"]  # their order is that of --help and of config.json
        for base in cls.__bases__:
            if is_dataclass(base) and base not in _PREFIXES:
                for member in fields(base):  # the settings of extras come last
                    members[member.name] = members.pop(member.name)
        of_all = get_type_hints(cls, include_extras=True)
        hints = {member.name: of_all[member.name] for member in fields(cls)}  # type: ignore[arg-type]  # a dataclass
        needed = {member.name for member in fields(cls) if default_of(member) is MISSING}  # type: ignore[arg-type]  # a dataclass
        prefix = _PREFIXES[cls] = f"{name}." if name else ""
        build = cls.__init__

        @functools.wraps(build)
        def checked_init(self: T, **values: Any) -> None:
            for given in values:
                if given not in hints:
                    raise ConfigError(unknown_setting(prefix + given, [prefix + known for known in hints]))
            for field in hints:
                if field in needed and field not in values:
                    raise ConfigError(f"{prefix}{field} is missing: {cls.__name__} has no default for it")
            build(self, **{field: checked(prefix + field, value, hints[field]) for field, value in values.items()})
            for conflict in conflicts_in(cls):
                conflict.check(self)

        cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def is_url(root: str) -> bool:
    """Return whether a dataset lies in another storage than a disk."""
    return "://" in root


def refuse_credentials(name: str, url: str) -> None:
    """Raise ConfigError, without showing them, if a URL has a user, a password or a query, which may be a signature.

    A run records its settings in many files, so a secret in one of them could not be kept."""
    require(
        not has_credentials(url),
        f"{name} is a URL with a user, a password or a query: leave them out, credentials belong in the environment "
        "(docs/datasets.md)",
    )


def default_of(field: Any) -> Any:
    """Return a dataclass field's default; MISSING if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def has_mark(hint: Any, mark: Mark) -> bool:
    return get_origin(hint) is Annotated and mark in get_args(hint)[1:]


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return `value` converted to the type `hint`.

    Raises:
        ConfigError: it is not valid; the message names the setting, the value and what to use.
    """
    try:
        return _validated(value, hint)
    except _InvalidValueError:
        text = "empty" if value == "" else repr(value)
        shown = text if len(text) <= 120 else f"{text[:117]}..."
        choices = [choice for kind in alternatives(hint) if get_origin(kind) is Literal for choice in get_args(kind)]
        if isinstance(value, str) and not _is_text(value):
            raise ConfigError(f"{name} is {shown}: use UTF-8 without null characters") from None
        raise ConfigError(f"{name} is {shown}: use {close_value(value, choices, allowed(hint))}") from None


def from_json(cls: type[T], values: Any) -> T:
    """Build a dataclass from an untrusted JSON object, checking each value against its field's hint.

    Unknown values, which come from other versions, are ignored.

    Raises:
        ConfigError: a value is missing or not valid.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"it is of type {type(values).__name__}: use an object")
    given = {}
    for name, hint, default in _fields(cls):  # type: ignore[arg-type]
        if name not in values:
            require(default is not MISSING, f"{name} is missing")
        elif values[name] != default:
            given[name] = checked(name, values[name], hint)
    return cls(**given)


@functools.cache  # a dataset has a thousand shards
def _fields(cls: type[Any]) -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(member.name, hints[member.name], default_of(member)) for member in fields(cls)]


def alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types that a type hint allows, without ``Annotated`` and ``|``."""
    if get_origin(hint) is Annotated:
        yield from alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for alternative in get_args(hint):
            yield from alternatives(alternative)
    else:
        yield hint


class _InvalidValueError(Exception):
    """A value that its type hint does not allow."""


def _validated(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`. Raises _InvalidValueError: it is none.

    | hint                      | accepted                        | becomes                                |
    |---------------------------|---------------------------------|----------------------------------------|
    | bool, int, float, str     | see `_IS_VALID`                 | itself; a path becomes text            |
    | Annotated[T, Rule]        | a T that the rule allows        | as T                                   |
    | A or B                    | an A, else a B                  | as the first that accepts it           |
    | Literal                   | one of its values and types     | itself                                 |
    | tuple                     | a tuple or list of that length  | a tuple of checked elements            |
    | dict                      | a dict                          | a dict of checked keys and values      |
    | Any, Callable, a class    | anything, a function, an object | itself                                 |
    | a dataclass, so a section | a dict                          | the section, which checks its values   |
    """
    if hint in _IS_VALID:
        if _IS_VALID[hint](value):
            return os.fspath(value) if hint is str else value
        raise _InvalidValueError
    origin = get_origin(hint)
    arguments = get_args(hint)
    is_unrestricted = hint is Any or (origin is Callable and callable(value))
    if origin is Annotated:
        value = _validated(value, arguments[0])
        if all(note.allows(value) for note in arguments[1:] if isinstance(note, Rule)):
            return value
    elif origin in (Union, types.UnionType):
        for alternative in arguments:
            try:
                return _validated(value, alternative)
            except _InvalidValueError:
                continue
    elif origin is Literal:
        for known in arguments:
            if value is known or (value == known and type(value) is type(known)):
                return value
    elif origin is tuple and isinstance(value, tuple | list):
        is_open = arguments[1:] == (Ellipsis,)  # of any length
        hints = arguments[:1] * len(value) if is_open else arguments
        if len(value) == len(hints):
            return tuple(map(_validated, value, hints))
    elif origin is dict and isinstance(value, dict):
        key_hint, item_hint = arguments
        return {_validated(key, key_hint): _validated(item, item_hint) for key, item in value.items()}
    elif is_unrestricted or (isinstance(hint, type) and isinstance(value, hint)):
        return value
    elif is_dataclass(hint) and isinstance(value, dict):
        # a section as dict(field=value), or what is in a file
        return hint(**value) if hint in _PREFIXES else from_json(hint, value)  # type: ignore[arg-type]
    raise _InvalidValueError


def _is_text(value: str) -> bool:
    """Return whether all readers and writers of files take `value`: a word of the command line may be any bytes."""
    return "\0" not in value and value.encode(errors="replace").decode() == value


# bool is a subclass of int in Python, but `epochs=True` is a mistake.
_IS_VALID: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ),
    str: lambda value: isinstance(value, str | os.PathLike) and value != "" and _is_text(str(value)),
    type(None): lambda value: value is None,
}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    type(None): "None",
    dict: "a dict, e.g. {'drop_path_rate': 0.1}",
    Callable: "a function or class",
}


def allowed(hint: Any) -> str:
    """Describe the values that a type hint allows, completing "use ..." in messages and help."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((note.words for note in arguments[1:] if isinstance(note, Rule)), allowed(arguments[0]))
    if origin in (Union, types.UnionType):
        return ", or ".join(map(allowed, arguments))
    if origin is Literal:
        return " or ".join([", ".join(map(str, arguments[:-1])), str(arguments[-1])]).removeprefix(" or ")
    if origin is tuple and Ellipsis in arguments:
        return f"a tuple, with a comma even for one: (VALUE,); each is {allowed(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} values, each {allowed(arguments[0])}"
    return _WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))


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
    "data.vertical_flip": "vflip",
    "data.color_jitter_probability": "color_jitter_prob",
    "data.grayscale": "grayscale_prob greyscale random_grayscale",
    "data.gaussian_blur": "gaussian_blur_prob",
    "data.hue_jitter": "hue",
    "data.eval_views": "tta lr_tta test_time_augmentation",
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
    "optimizer.lr": "lr learning_rate base_lr",
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
    "optimizer.clip_grad_norm": "clip_grad max_grad_norm clip_grad_value",
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
    "loss.sum_classes": "bce_sum",
    "loss.positive_weight": "bce_pos_weight pos_weight",
    "model.head_scale": "head_init_scale",
    "model.head_bias": "head_init_bias",
    "loss.label_smoothing": "smoothing",
    "mixup.alpha": "mixup mixup_alpha",
    "mixup.cutmix_alpha": "cutmix",
    "mixup.probability": "prob mixup_prob",
    "mixup.switch_probability": "mixup_switch_prob switch_prob",
    "mixup.until_epoch": "mixup_off_epoch",
    "mixup.alpha (a micro-batch has one lambda)": "mixup_mode",
    "ema.decay": "ema model_ema model_ema_decay ema_decay",
    "ema.warmup": "model_ema_warmup",
    "precision.dtype": "amp amp_dtype fp16 bf16 precision",
    "run.dir": "output output_dir out save_dir log_dir",
    "run.epochs": "max_epochs num_epochs num_train_epochs",
    "run.max_steps": "steps",
    "run.best_by": "eval_metric metric_for_best_model monitor",
    "run.keep_best": "checkpoint_hist save_top_k",
    "run.keep_checkpoints": "save_total_limit",
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


def close_names(name: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of the `known` names that `name` may be a slip for, the closest first.

    Upper and lower case count as the same: AdamW is adamw, and nothing else.
    """
    by_lower = {name.lower(): name for name in known}
    if name.lower() in by_lower:
        return [by_lower[name.lower()]]
    return [by_lower[close] for close in get_close_matches(name.lower(), by_lower, n=n, cutoff=cutoff)]


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
    right = right or close_names(written, known, n=2, cutoff=0.75)
    parts = {each.rpartition(".")[2] for each in known}
    close = close_names(last, parts, n=2, cutoff=0.75)  # in another section only if it is much alike
    right = right or [each for each in known if each.rpartition(".")[2] in close]
    remedy = (
        f"use {' or '.join(prefix + each for each in right)}"
        if right
        else "`dali-train train --config FILE --help` lists the settings"
    )
    return f"{prefix}{name} is not a setting: {remedy}"


def close_value(value: Any, known: Sequence[Any], every: str) -> str:
    """Return `every`, the list of allowed values, preceded by the `known` word closest to `value`, if any."""
    if not isinstance(value, str):
        return every
    other = _OTHER_VALUES.get(value.lower())
    close = [other] if other in known else close_names(value, map(str, known))
    return f"{close[0]} (of {every})" if close else every


def lookup(table: Mapping[str, "T | Extra[T]"], setting: str, name: str) -> T:
    """Return the row `name` of a table, whose extras are imported.

    Raises:
        ConfigError: there is none, so `setting` names nothing.
    """
    if name not in table:
        known = list(table)
        raise ConfigError(f"{setting} is {name!r}: use {close_value(name, known, ', '.join(known))}")
    row = table[name]
    return row.load() if isinstance(row, Extra) else row


@dataclass(frozen=True)
class Extra(Generic[T]):
    """What a run may do without: the core imports it only where it is asked for, so its module can be left out.

    T is the type of what `name` stands for; a test compares the two.
    """

    name: str  # package.module:name, or a module
    user: str = "dali-train"  # what asks for it, such as a setting, for the message

    def load(self) -> T:
        """Import it. Raises ConfigError: the module is not part of this installation."""
        module, _, name = self.name.partition(":")
        try:
            found: T = resolve_name(f"{module}:{name}")  # without the colon a missing module is an AttributeError
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
            raise ConfigError(
                f"{self.user} needs {module}, which is not installed: install dali-train with it"
            ) from None
        return found


def load_all(extras: Iterable[Extra[T]]) -> list[T]:
    """Import those extras whose modules are part of this installation."""
    loaded = []
    for extra in extras:
        with suppress(ConfigError):
            loaded.append(extra.load())
    return loaded


def splits_model(config: Any, name: str) -> bool:
    """Return whether a setting of the layout, such as parallel.pipeline or parallel.shard, splits the model over
    ranks."""
    return attrgetter(name)(config) not in (1, "none")


class OneDimension:
    """How the section parallel.tensor shards layers over its ranks. The settings of an extra that arranges these in
    another way inherit from this and override it."""

    size: int
    mode = "1d"

    @property
    def grid_sizes(self) -> tuple[int, ...]:
        """The sizes of the dimensions of the tensor-parallel mesh."""
        return (self.size,)

    @property
    def image_shards(self) -> int:
        """The number of shards of a micro-batch's images."""
        return 1


class OneDataset:
    """What the section data says of what is trained on as a whole. The settings of an extra that makes it another kind
    of dataset inherit from this and override it."""

    def __post_init__(self) -> None:
        """Raises ConfigError: settings of the section do not go together."""

    @property
    def kind(self) -> Extra[Any] | None:
        """The module of what stands for the dataset, a `KindOfDataset`; None: data.root is trained on as it is."""
        return None

    @property
    def sources(self) -> Mapping[str, str]:
        """Name -> directory or URL of the datasets that are trained on as one; empty: data.root alone."""
        return {}

    def moved_sources(self, places: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings that name `sources`, with other directories or URLs for some of them."""
        return {}
