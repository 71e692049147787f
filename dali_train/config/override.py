"""Settings on the command line: ``--section.field VALUE``.

The words are only read here, as far as they can be; whether a value fits is checked where all values are, in the
config.
"""

import ast
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import tyro

from dali_train.config.check import NotInRecipe
from dali_train.config.config import KWARGS, SETTINGS, Config
from dali_train.config.load import load_config
from dali_train.config.names import unknown_setting
from dali_train.errors import ConfigError


def config_with(path: Path | str, overrides: list[str], command: str) -> Config:
    """The config of a file with the changes of a `command`'s line, ``--section.field value``.

    Raises:
        ConfigError: no such file or setting, or a value that does not fit.
        SystemExit: --help, with status 0.
    """
    config = load_config(path)
    if {"-h", "--help"} & set(overrides):
        tyro.cli(
            Config,
            prog=f"{command} --config {path}",
            default=config,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        )
    return config.replace(read_overrides(overrides))


def read_overrides(words: list[str]) -> dict[str, Any]:
    """Values by full name; a later one replaces an earlier one.

    Raises:
        ConfigError: a name that no setting has, a setting without a value, or words that belong to none.
    """
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            written, equals, value = word.removeprefix("--").partition("=")
            current = values[_name(written)] = [value] if equals else []
        elif current is not None:
            current.append(word)
        else:
            name, equals, value = word.partition("=")
            remedy = f"--{name} {value}" if equals else "--section.field VALUE"
            raise ConfigError(f"{word!r} belongs to no setting: write {remedy}")
    return {name: _value(name, words) for name, words in values.items()}


def _name(written: str) -> str:
    name = written.replace("-", "_")
    if name.startswith(KWARGS) and name != KWARGS:
        return KWARGS + written[len(KWARGS) :]  # not ours to change
    if name not in SETTINGS:
        raise ConfigError(unknown_setting(written, SETTINGS, prefix="--"))
    return name


def _value(name: str, words: list[str]) -> Any:
    hint = SETTINGS[name].hint if name in SETTINGS else Any
    if not words:
        default = "true" if hint in (bool, NotInRecipe[bool]) else "VALUE"
        raise ConfigError(f"--{name} has no value: write --{name} {default}")
    value = _read(words, hint)
    if isinstance(value, str) and len(words) > 1 and _takes_text(hint):
        raise ConfigError(f"--{name} takes one value, found {len(words)}: {value!r}; quote a value that has spaces")
    return value


def _takes_text(hint: Any) -> bool:
    parts = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return hint is str or (get_origin(hint) in (Annotated, Union, types.UnionType) and any(map(_takes_text, parts)))


def _read(words: list[str], hint: Any) -> Any:
    """`words` as the type `hint` has them, or as text where they cannot be read so."""
    text = " ".join(words)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _read(words, arguments[0])
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", "null"):
            return None
        return next((value for each in arguments if not isinstance(value := _read(words, each), str)), text)
    if origin is tuple:
        return _numbers(text, arguments)
    if hint is bool:
        return _BOOLEANS.get(text.lower(), text)
    if hint is Any:
        if text.lower() in _CONSTANTS:
            return _CONSTANTS[text.lower()]
        text = ",".join(words)
    reader = ast.literal_eval if hint is Any or origin is dict else {int: int, float: float}.get(hint, str)
    try:
        return reader(text)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        MemoryError,
        RecursionError,
    ):  # what literal_eval is documented to raise
        return text


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def _numbers(text: str, hints: tuple[Any, ...]) -> Any:
    """A tuple from words however they are separated and bracketed; tuples in a tuple from as many words each."""
    words = "".join(" " if sign in "()[]," else sign for sign in text).split()
    if Ellipsis in hints:
        size = len(get_args(hints[0])) if get_origin(hints[0]) is tuple else 1
        if len(words) % size:
            return text
        return tuple(_read(words[start : start + size], hints[0]) for start in range(0, len(words), size))
    if len(words) % len(hints) or (any(get_origin(hint) is tuple for hint in hints) and len(words) == len(hints)):
        return text
    size = len(words) // len(hints)
    parts = [words[start : start + size] for start in range(0, len(words), size or 1)]
    values = tuple(_read(part, hint) for part, hint in zip(parts, hints, strict=False))
    return text if any(isinstance(value, str) for value in values) else values
