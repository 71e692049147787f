"""A complete config, the conditions on settings of several sections, and loading one: from a Python file, from a recipe
that ships with the package, or from the config.json of a run."""

import importlib.util
import json
import math
import re
import sys
import traceback
import warnings
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self, get_type_hints

from dali_train.config.check import (
    Conflict,
    Mark,
    NotInRecipe,
    close_names,
    default_of,
    has_mark,
    require,
    rows_of_extras,
    section,
    splits_model,
    unknown_setting,
)
from dali_train.config.sections import (
    BatchConfig,
    DataConfig,
    EmaConfig,
    HooksConfig,
    LossConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from dali_train.errors import ConfigError
from dali_train.files import ForeignFileError, read_json, read_limited
from dali_train.text import printable

KWARGS = ("model.kwargs.", "optimizer.kwargs.", "loss.kwargs.")
"""The prefixes of arguments' names, as in ``model.kwargs.drop_path_rate``: each argument is a setting of its own."""


_SAMPLE_CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        names=("mixup.alpha", "mixup.cutmix_alpha", "batch.micro_batch"),
        when=lambda config: config.mixup.enabled and config.batch.micro_batch == 1,
        remedy="images are mixed within a micro-batch, so use at least 2 images, or 0 for both alphas",
    ),
)


@section("")
@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What decides the micro-batches, and all that a loader needs: which images, in which order, and their draws."""

    data: DataConfig
    batch: BatchConfig
    mixup: MixupConfig = field(default_factory=MixupConfig)

    def __post_init__(self) -> None:
        repeats = self.data.repeats
        micro_batch = self.batch.micro_batch
        require(
            self.data.shuffle != "block" or micro_batch % repeats == 0,
            f"data.repeats {repeats} does not divide batch.micro_batch {micro_batch}, and data.shuffle block keeps the "
            f"repeats of an image together: use a multiple of {repeats} such as "
            f"{max(1, round(micro_batch / repeats)) * repeats}, or data.shuffle full",
        )

    CONFLICTS = _SAMPLE_CONFLICTS

    def steps(self, epochs: float, num_images: int) -> int:
        """Return the optimizer steps for `epochs` passes over `num_images`, rounded up to complete the last pass."""
        return math.ceil(epochs * num_images / self.batch.global_batch - 1e-9)

    def total_steps(self, num_images: int) -> float:
        """Return the step at which training ends; infinite: that is for the user of a loader to say."""
        return math.inf

    def sizes_by_step(self, num_images: int) -> list[tuple[int, Self]]:
        """Return (first step, config) for each size of training images; the config's data.train_size is this size.

        Without progressive resizing there is one.
        """
        if not self.data.progressive:
            return [(0, self)]
        starts = [0, *(self.steps(until, num_images) for until, _ in self.data.progressive)]
        sizes = [*(size for _, size in self.data.progressive), self.data.train_size]
        return [(start, self.at_size(size)) for start, size in zip(starts, sizes, strict=True)]

    def by_step(self, num_images: int) -> Callable[[int], Self]:
        """Return a function from a step to the config at that step, one object per size of training images."""
        starts, configs = zip(*self.sizes_by_step(num_images), strict=True)
        return lambda step: configs[bisect(starts, step) - 1]

    def at_size(self, size: int) -> Self:
        """Return this config with training images of `size` pixels throughout."""
        return replace(self, data=replace(self.data, train_size=size, progressive=()))


def _clips_shards(config: "Config", name: str) -> bool:
    """Return whether clipping may need whole weights, and the setting `name` shards them."""
    return config.optimizer.clip_mode not in ("norm", "value") and splits_model(config, name)


_RUN_CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        names=("precision.dtype", "run.device"),
        when=lambda config: config.precision.dtype == "fp64" and config.run.device == "cuda",
        remedy="fp64 is for checks on the CPU: set run.device cpu",
    ),
    Conflict(
        names=("precision.autocast", "model.fast_norm"),
        when=lambda config: not config.precision.autocast and config.model.fast_norm,
        remedy="without autocast norms are in half precision anyway, set model.fast_norm false",
    ),
    Conflict(
        names=("precision.autocast", "model.compile"),
        when=lambda config: not config.precision.autocast and config.model.compile not in ("auto", "none"),
        remedy="the weights' copies are not compiled, set model.compile none, or precision.autocast true",
    ),
    Conflict(
        names=("run.deterministic", "model.compile"),
        when=lambda config: config.run.deterministic and config.model.compile == "autotune",
        remedy="it chooses kernels by timing, set model.compile blocks",
    ),
    Conflict(
        names=("model.compile", "run.device"),
        when=lambda config: config.model.compile == "cuda-graphs" and config.run.device == "cpu",
        remedy="CUDA graphs need a GPU, set model.compile model",
    ),
    Conflict(
        names=("model.compile", "data.progressive"),
        when=lambda config: config.model.compile == "cuda-graphs" and bool(config.data.progressive),
        remedy="a captured graph takes images of one size, set model.compile model",
    ),
    Conflict(
        names=("model.channels_last", "parallel.shard"),
        when=lambda config: config.model.channels_last and config.parallel.shard != "none",
        remedy="FSDP needs weights in torch's default memory format, set model.channels_last false",
    ),
    *(
        Conflict(
            names=("optimizer.clip_mode", name),
            when=partial(_clips_shards, name=name),
            remedy="it may need the norms of whole weights, set optimizer.clip_mode norm, or leave the other out",
        )
        for name in ("parallel.shard", "parallel.tensor.size")
    ),
    Conflict(
        names=("parallel.pipeline", "optimizer.layer_decay"),
        when=lambda config: config.parallel.pipeline > 1 and config.optimizer.layer_decay is not None,
        remedy="a stage does not know the layers of the others; set parallel.pipeline 1, the default",
    ),
)


@section("")
@dataclass(frozen=True, kw_only=True)
class Config(SampleConfig):
    """Every setting of a run: of its samples, and of what is trained on them."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    run: RunConfig
    loss: LossConfig = field(default_factory=LossConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: NotInRecipe[ParallelConfig] = field(default_factory=ParallelConfig)
    hooks: NotInRecipe[HooksConfig] = field(default_factory=HooksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.schedule.warmup_epochs <= self.run.epochs,
            f"schedule.warmup_epochs {self.schedule.warmup_epochs} exceeds run.epochs {self.run.epochs}: shorten the "
            "warmup",
        )
        decay_epochs = self.schedule.decay_epochs
        before = self.schedule.warmup_epochs if self.schedule.decay_from == "warmup-end" else 0
        require(
            self.schedule.name not in ("linear", "cosine", "polynomial", "warmup-stable-decay", "wsd")
            or decay_epochs is None
            or decay_epochs + before <= self.run.epochs,
            f"schedule.decay_epochs {decay_epochs} after schedule.warmup_epochs {before} exceeds run.epochs "
            f"{self.run.epochs}: shorten the decay or the warmup",
        )
        until = max((epoch for epoch, _ in self.data.progressive), default=0)
        require(
            until < self.run.epochs,
            f"data.progressive has smaller images until epoch {until:g}, but run.epochs is {self.run.epochs:g}: use "
            "epochs before the end of the run",
        )
        require(
            "://" in self.data.root or Path(self.data.root).resolve() != Path(self.run.dir).resolve(),
            f"run.dir and data.root are both {self.run.dir}: choose another run.dir, so that the run's files are not "
            "mixed with the dataset's",
        )
        require(
            self.hooks.stop_early is None or self.run.eval_every_epochs is not None,
            f"hooks.stop_early is {self.hooks.stop_early} with run.eval_every_epochs None: set how often to evaluate, "
            "or leave stop_early out",
        )
        self._check_parallel()
        self._check_dali_reader()

    def total_steps(self, num_images: int) -> int:
        """Return the step at which the run ends."""
        schedule_steps = self.steps(self.run.epochs, num_images)
        return min(schedule_steps, self.run.max_steps or schedule_steps)

    def _check_dali_reader(self) -> None:
        """Refuse settings that need to know in advance which image comes next, or need it on several ranks."""
        changed = [f"{name} {value}" for name, value in self.changed(Mark.NEEDS_INDEX)]
        if self.parallel.shares_images:
            changed.append(self.parallel.kind)
        if self.data.shuffle == "balanced":
            changed.append("data.shuffle balanced")
        if self.data.interpolation == "random":
            changed.append("data.interpolation random")
        require(
            self.data.reader != "dali" or not changed,
            f"data.reader is dali with {', '.join(changed)}, but only the index knows in advance which image comes "
            "next: set data.reader index, or leave these settings out",
        )

    def _check_parallel(self) -> None:
        """Refuse settings that conflict with a model that is split over ranks."""
        parallel = self.parallel
        require(
            not parallel.kind or not self.model.compiles_as_a_whole,
            f"model.compile is {self.model.compile} with {parallel.kind}, which splits the model over ranks: between "
            "its blocks it communicates, set model.compile blocks",
        )
        parallel.check_micro_batch(self.batch.micro_batch)
        require(
            not self.data.progressive or not parallel.shares_images,
            f"data.progressive with {parallel.kind}, whose activations have a fixed size: leave data.progressive out",
        )

    CONFLICTS = (*_RUN_CONFLICTS, *rows_of_extras("CONFLICTS_OF_RUN"))

    def changed(self, mark: Mark) -> Iterator[tuple[str, Any]]:
        """Yield name and value of the settings that have this mark and another value than their default."""
        for name, setting in SETTINGS.items():
            if has_mark(setting.hint, mark) and (value := attrgetter(name)(self)) != setting.default:
                yield name, value

    @property
    def files(self) -> Mapping[Path, bytes]:
        """The Python files that `load_config` executed for this config, with their content; the requested file is
        first."""
        return self.__dict__.get("_files", {})

    def from_files(self, files: Mapping[Path, bytes]) -> "Config":
        """Return this config with other `files`. They are not a setting: equal configs may have different files."""
        config = replace(self)
        object.__setattr__(config, "_files", dict(files))
        return config

    def replace(self, changes: Mapping[str, Any] | None = None, /, **sections: Mapping[str, Any]) -> "Config":
        """Return this config with some values changed: ``config.replace(batch=dict(global_batch=64, micro_batch=8))``.

        The result is checked once, after all changes, so that dependent fields can change together. ``model.kwargs``
        are changed one by one, None removing one; the name ``model.kwargs`` replaces all of them. ``optimizer.kwargs``
        are changed one by one only by full name, since another optimizer has others.

        Args:
            changes: values by full name: ``{"batch.global_batch": 64, "model.kwargs.drop_path_rate": 0.1}``.
            sections: values by section and field.

        Raises:
            ConfigError: there is no such setting, or a value is not valid.
        """
        changes = {**dict(_by_full_name(sections)), **(changes or {})}
        groups: dict[str, dict[str, Any]] = defaultdict(dict)
        for prefix in KWARGS:  # an argument such as model.kwargs.drop_path_rate joins those that the config has
            kwargs = {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}
            if kwargs:
                whole = prefix.removesuffix(".")
                group = prefix.partition(".")[0]
                arguments = {**changes.get(whole, getattr(self, group).kwargs), **kwargs}
                groups[group]["kwargs"] = {name: value for name, value in arguments.items() if value is not None}
        for name, value in changes.items():
            if name.startswith(KWARGS):
                continue
            if name not in SETTINGS:
                raise ConfigError(unknown_setting(name, SETTINGS))
            group, _, key = name.rpartition(".")
            groups[group].setdefault(key, value)
        for inner in [group for group in groups if "." in group]:  # a section within another
            outer, _, key = inner.partition(".")
            groups[outer][key] = replace(attrgetter(inner)(self), **groups.pop(inner))
        changed = {group: replace(getattr(self, group), **values) for group, values in groups.items()}
        return replace(self, **changed).from_files(self.files)

    def flat(self) -> dict[str, Any]:
        """Return the values as in `to_json` by full name, ``section.field``; those of model.kwargs one by one."""
        return dict(_leaves(json.loads(self.to_json())))

    def to_json(self) -> str:
        """Return the JSON of run.dir/config.json, which `load_config` reads. User hooks are written by name."""
        return json.dumps(asdict(self), indent=1, default=lambda hook: str(getattr(hook, "__qualname__", hook))) + "\n"


class Setting(NamedTuple):
    hint: Any
    """The field's type hint, including ``Annotated``."""
    default: Any
    """MISSING if there is none."""
    in_recipe: bool
    """Whether the setting is part of the recipe, see `NotInRecipe`."""


def _settings(cls: type, prefix: str = "", *, in_recipe: bool = True) -> Iterator[tuple[str, Setting]]:
    """Yield all settings of a section and of the sections in it; `in_recipe`: whether the section is in the recipe."""
    hints = get_type_hints(cls, include_extras=True)
    plain = get_type_hints(cls)
    for member in fields(cls):
        decides = in_recipe and not has_mark(hints[member.name], Mark.NOT_IN_RECIPE)
        if is_dataclass(plain[member.name]):
            yield from _settings(plain[member.name], f"{prefix}{member.name}.", in_recipe=decides)
        else:
            yield f"{prefix}{member.name}", Setting(hints[member.name], default_of(member), decides)


SETTINGS = dict(_settings(Config))
"""All settings by full name, ``section.field`` or ``section.section.field``."""


def _leaves(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in sections.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _by_full_name(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in sections.items():
        inside = f"{prefix}{name}."
        is_section = not prefix or inside == KWARGS[0] or any(setting.startswith(inside) for setting in SETTINGS)
        if isinstance(value, Mapping) and is_section:
            yield from _by_full_name(value, inside)
        else:
            yield prefix + name, value


_LARGEST_JSON = 10_000_000
_running: list[Path] = []  # the config files being executed, the innermost last
_files: dict[Path, bytes] = {}  # all files executed since the outermost began, in order

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "recipes"
RECIPES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
"""In a wheel dali_train/recipes; in the repository configs/, which setup.py installs there."""


def load_config(path: Path | str) -> Config:
    """Return the ``config`` that a Python file or the recipe of that name defines, or that a run's config.json holds.

    A Python file is executed, so load only files that you trust. Relative paths in it are relative to its directory:
    ``load_config("vit-b16.py")`` loads a file next to it. A config.json has only the names of user hooks, so these are
    left out, with a warning.

    Raises:
        ConfigError: there is no such file, it has an error, or it defines no Config named ``config``; the message names
            file and line.
    """
    name = str(path)
    path = Path(path)
    if _running:
        path = _running[-1].parent / path
    if not path.is_file():  # a directory of a recipe's name, such as the one that its run made, does not hide it
        path = find_recipe(name) or path
    if path.is_dir():
        raise ConfigError(
            f"--config {path}: this is a directory; use a file, for a run directory {path / 'config.json'}"
        )
    if not path.is_file():
        close = [path.stem] if find_recipe(path.stem) else close_names(path.stem, recipe_names())
        hint = f" (did you mean {close[0]}, which ships?)" if close else ""
        raise ConfigError(
            f"--config {name}: this file does not exist; use a file, or a recipe that `dali-train recipes` lists{hint}"
        )
    if path.suffix == ".json":
        try:
            return config_from_json(read_limited(path, _LARGEST_JSON), str(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read as a run's config.json: {error}") from None
    if path.suffix != ".py":
        raise ConfigError(
            f"--config {path}: not a Python file; its name must end in .py, or in .json for a run's config.json"
        )
    names = vars(_executed(path))
    config = names.get("config")
    if not isinstance(config, Config):
        raise ConfigError(f"--config {path}: the file must define `config = Config(...)`, found {config!r}")
    # as in ColossalAI's config files: parallel = dict(pipeline=2, tensor=dict(...))
    parallel = names.get("parallel")
    if isinstance(parallel, dict):
        try:
            config = replace(config, parallel=ParallelConfig(**parallel))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return config.from_files(_files)


def _executed(path: Path) -> ModuleType:
    # By path, not by module name: names like vit-b16.py are not identifiers.
    spec = importlib.util.spec_from_file_location(f"dali_train_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # timm's register_model, dataclasses and pickle look a function's or class's module up by its name.
    sys.modules[spec.name] = module
    if not _running:
        _files.clear()
    _running.append(path)
    try:
        _files[path.resolve()] = path.read_bytes()
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # SystemExit: its status would become the command's
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        location = f"{path}, line {lines[-1]}" if lines else str(path)
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{location}: {kind}{error}") from error
    finally:
        _running.pop()
    return module


def config_from_json(text: str | bytes, source: str) -> Config:
    """Return the config that `Config.to_json` wrote; `source` names the text in messages.

    Raises:
        ConfigError: the text is not such a config, or a value is not valid.
    """
    try:
        values = read_json(text.encode() if isinstance(text, str) else text, _LARGEST_JSON, name="it", non_finite=True)
        return _assembled(source, values)
    except ForeignFileError as error:
        raise ConfigError(f"{source} cannot be read as a run's config.json: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {printable(str(error))}") from None  # with values that may hold line breaks


def _assembled(source: str, values: dict[str, Any]) -> Config:
    if not all(isinstance(fields, dict) for fields in values.values()):
        raise ConfigError('expected an object of sections, {"data": {...}, "model": {...}, ...}, as a run writes it')
    sections = get_type_hints(Config)
    for name in values:
        if name not in sections:
            raise ConfigError(unknown_setting(name, sections))
    if hooks := values.get("hooks", {}).pop("user", None):
        warnings.warn(
            f"{source}: hooks.user {hooks} are left out, since only a Python config file can set them", stacklevel=4
        )
    return Config(**{name: sections[name](**fields) for name, fields in values.items()})


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.py"))


def find_recipe(name: str) -> Path | None:
    """Return the file of the recipe `name`, such as vit-b16; None if there is none."""
    return RECIPES / f"{name}.py" if name in recipe_names() else None


def recipe_table() -> list[tuple[str, ...]]:
    """Return name, description, target, source, cost and measurement of each recipe, from the README beside them."""
    rows = []
    for line in (RECIPES / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        rows += [(name, *cells[1:]) for name in re.findall(r"([\w-]+)\.py", cells[0]) if len(cells) == 6]
    return rows
