"""Settings on the command line: ``--section.field VALUE``.

The values are only parsed here; the config checks whether they are valid.
"""

import ast
import contextlib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dali_train.config.check import alternatives
from dali_train.config.config import KWARGS, SETTINGS, Config
from dali_train.config.config_file import load_config
from dali_train.config.names import unknown_setting
from dali_train.errors import ConfigError


def config_with(path: Path | str, overrides: list[str], command: str) -> Config:
    """Return the config of a file, changed by the options ``--section.field value`` of a `command`.

    Raises:
        ConfigError: there is no such file or setting, or a value is not valid.
        SystemExit: --help, with status 0.
    """
    config = load_config(path)
    if asked := {"-h", "--help"} & set(overrides):
        from dali_train.config.help import settings_help

        rest = overrides[overrides.index(asked.pop()) + 1 :]
        only = [word.removeprefix("--") for word in rest]
        print(settings_help(config, f"{command} --config {path}", only), end="")
        raise SystemExit(0)
    return config.replace(read_overrides(overrides))


def read_overrides(words: list[str]) -> dict[str, Any]:
    """Return values by full name; a later one replaces an earlier one.

    Raises:
        ConfigError: an unknown setting, a setting without a value, or a value without a setting.
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
    for prefix in KWARGS:
        if name.startswith(prefix) and name != prefix:
            return prefix + written[len(prefix) :]  # kept as typed
    if name not in SETTINGS:
        raise ConfigError(unknown_setting(written, SETTINGS, prefix="--"))
    return name


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def _value(name: str, words: list[str]) -> Any:
    """Parse `words` by the setting's type hint; return them as text if that fails."""
    hint = SETTINGS[name].hint if name in SETTINGS else Any
    kinds = list(alternatives(hint))
    if not words:
        raise ConfigError(f"--{name} has no value: write --{name} {'true' if kinds == [bool] else 'VALUE'}")
    text = " ".join(words)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if bool in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if hint is Any and text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if str in kinds:
        if len(words) > 1:
            raise ConfigError(f"--{name} takes one value, found {len(words)}: {text!r}; quote a value that has spaces")
        return text
    sequence = next((kind for kind in kinds if get_origin(kind) is tuple), None)
    if sequence is not None and _are_words(sequence):
        return tuple(text.replace(",", " ").split())
    value = _literal(words)
    if sequence is not None and Ellipsis in get_args(sequence) and value != text:  # one element needs no brackets
        is_nested = get_origin(get_args(sequence)[0]) is tuple
        if not isinstance(value, tuple) or (is_nested and value and not isinstance(value[0], tuple)):
            return (value,)
    return value


def _are_words(sequence: Any) -> bool:
    """Return whether the elements of a tuple are text or names."""
    return all(kind is str or get_origin(kind) is Literal for kind in alternatives(get_args(sequence)[0]))


def _literal(words: list[str]) -> Any:
    """Parse `words` as a Python value, such as 3, 0.9,0.98 or (0.9, 0.98), or several as a tuple.

    Return the text if that fails.
    """
    text = " ".join(words)
    # what literal_eval is documented to raise
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return tuple(map(ast.literal_eval, words)) if len(words) > 1 else text
    return text
