"""Loading a config from a Python file, from a recipe that ships with the package, or from the config.json of a run."""

import importlib.util
import re
import sys
import traceback
import warnings
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from dali_train.config.config import Config
from dali_train.config.names import unknown_setting
from dali_train.config.sections import ParallelConfig
from dali_train.errors import ConfigError
from dali_train.files import ForeignFileError, read_json, read_limited

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
    if not path.exists():
        path = find_recipe(name) or path
    if path.is_dir():
        raise ConfigError(
            f"--config {path}: this is a directory; use a file, for a run directory {path / 'config.json'}"
        )
    if not path.is_file():
        close = [path.stem] if find_recipe(path.stem) else get_close_matches(path.stem, recipe_names(), n=1)
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
        raise ConfigError(f"{source}: {error}") from None


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
    """Return name, description, target, source and measurement of each recipe, from the README beside them."""
    rows = []
    for line in (RECIPES / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        rows += [(name, *cells[1:]) for name in re.findall(r"([\w-]+)\.py", cells[0]) if len(cells) == 5]
    return rows
