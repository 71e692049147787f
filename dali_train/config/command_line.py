"""Settings on the command line: ``--section.field VALUE``, and ``--config FILE --help``.

Values are only parsed here; the config checks whether they are valid. The help has every setting by section, drawn from
the sections' own rules and docstrings.
"""

import ast
import contextlib
import inspect
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dali_train.config.check import allowed, alternatives, as_typed, conflicts_of, unknown_setting
from dali_train.config.config import KWARGS, SETTINGS, Config, load_config
from dali_train.errors import ConfigError


def config_with(
    path: Path | str,
    overrides: list[str],
    command: str,
    options: Sequence[str] = (),
    micro_batch: Callable[[Config, dict[str, Any]], int] | None = None,
) -> Config:
    """Return the config of a file, changed by the options ``--section.field value`` of a `command`.

    Args:
        options: the command's other options without --, for the remedy of one that is mistyped.
        micro_batch: returns the number for ``--batch.micro_batch auto``, from the file's config and the other values.

    Raises:
        ConfigError: there is no such file or setting, or a value is not valid.
        SystemExit: --help, with status 0.
    """
    config = load_config(path)
    if asked := {"-h", "--help"} & set(overrides):
        rest = overrides[overrides.index(asked.pop()) + 1 :]
        only = [word.removeprefix("--") for word in rest]
        print(settings_help(config, f"{command} --config {path}", only), end="")
        raise SystemExit(0)
    values = read_overrides(overrides, options)
    if micro_batch is not None and values.get("batch.micro_batch") == "auto":
        values["batch.micro_batch"] = micro_batch(config, values)
    changed = config.replace(values)
    if words := _describe_kept_rate(config, changed):
        warnings.warn(words, stacklevel=2)
    return changed


def _describe_kept_rate(before: Config, after: Config) -> str:
    """Return a sentence if another global batch keeps the learning rate of the file's; an empty text otherwise."""
    old, new, rate = before.batch.global_batch, after.batch.global_batch, after.optimizer.lr
    if old == new or rate != before.optimizer.lr or after.optimizer.scale_lr != "none":
        return ""
    return (
        f"batch.global_batch {old} -> {new} keeps optimizer.lr {rate:g}: the rule for SGD is --optimizer.lr "
        f"{rate * new / old:.3g} (linear), for LAMB and AdamW {rate * (new / old) ** 0.5:.3g} (square root)"
    )


def read_overrides(words: list[str], options: Sequence[str] = ()) -> dict[str, Any]:
    """Return values by full name; a later one replaces an earlier one.

    Args:
        options: as in `config_with`.

    Raises:
        ConfigError: an unknown setting, a setting without a value, or a value without a setting.
    """
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            written, equals, value = word.removeprefix("--").partition("=")
            current = values[_name(written, options)] = [value] if equals else []
        elif current is not None:
            current.append(word)
        elif re.fullmatch("-[a-zA-Z].*", word):
            meant = unknown_setting(_SHORT.get(word[:2], word[1:]), [*SETTINGS, *options], prefix="--")
            raise ConfigError(f"{word}: settings have no short names, and {meant}")
        else:
            name, equals, value = word.partition("=")
            remedy = f"--{name} {value}" if equals else "--section.field VALUE"
            raise ConfigError(f"{word!r} belongs to no setting: write {remedy}")
    return {name: _value(name, words) for name, words in values.items()}


_SHORT = {"-b": "batch-size", "-j": "workers", "-c": "config", "-a": "arch", "-e": "epochs", "-o": "output"}
"""Short options of other trainers -> their long names."""


def _name(written: str, options: Sequence[str]) -> str:
    name = written.replace("-", "_")
    for prefix in KWARGS:
        if name.startswith(prefix) and name != prefix:
            return prefix + written[len(prefix) :]  # kept as typed
    if name not in SETTINGS:
        raise ConfigError(unknown_setting(written, [*SETTINGS, *options], prefix="--"))
    return name


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def _value(name: str, words: list[str]) -> Any:
    """Parse `words` by the setting's type hint; return them as text if that fails.

    | hint                               | typed               | value                              |
    |------------------------------------|---------------------|------------------------------------|
    | ... or None                        | none, null          | None                               |
    | bool                               | yes, off, 1, ...    | True or False                      |
    | str, or a choice of words          | one word            | the word                           |
    | tuple of words                     | a,b or a b or none  | ("a", "b") or ()                   |
    | tuple of rows that begin with text | sketch,DIR v2,DIR   | (("sketch", "DIR"), ("v2", "DIR")) |
    | such rows, or something else       | balanced, 2         | the latter, without a comma        |
    | tuple of numbers                   | 0.9,0.98 or 0.9     | (0.9, 0.98) or (0.9,)              |
    | anything else                      | 3 or 1e-3 or {...}  | as in Python                       |
    """
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
    sequence = next((kind for kind in kinds if get_origin(kind) is tuple), None)
    if str in kinds and (sequence is None or "," not in text):
        if len(words) > 1:
            raise ConfigError(f"--{name} takes one value, found {len(words)}: {text!r}; quote a value that has spaces")
        return text
    if sequence is not None and _are_words(sequence):
        return () if text.lower() == "none" else tuple(text.replace(",", " ").split())
    columns = get_args(get_args(sequence)[0]) if sequence is not None else ()
    if columns and str in alternatives(columns[0]):
        if len(kinds) > 1 and "," not in text:
            return _literal(words)
        is_text = [str in alternatives(column) for column in columns]
        return tuple(_row(word, is_text) for word in words)
    value = _literal(words)
    if sequence is not None and Ellipsis in get_args(sequence) and value != text:  # one element needs no brackets
        is_nested = get_origin(get_args(sequence)[0]) is tuple
        if not isinstance(value, tuple) or (is_nested and value and not isinstance(value[0], tuple)):
            return (value,)
    return value


def _row(word: str, is_text: Sequence[bool]) -> tuple[Any, ...]:
    """Parse ``a,b,c``, whose columns are text or Python values; checks follow, so there may be too many or too few."""
    cells = word.split(",")
    return tuple(
        cell if number < len(is_text) and is_text[number] else _literal([cell]) for number, cell in enumerate(cells)
    )


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


_WIDEST = 110  # lines that are longer are hard to read


def settings_help(config: Config, command: str, only: Sequence[str] = ()) -> str:
    """Return the help of a command with the settings of its config: allowed values, value, default and explanation.

    Args:
        only: sections or settings; by default all.

    Raises:
        ConfigError: there is no such section or setting.
    """
    for name in only:
        if not any(f"{known}.".startswith(f"{name}.") for known in SETTINGS):
            sections = {known.partition(".")[0]: None for known in SETTINGS}
            raise ConfigError(unknown_setting(name, [*SETTINGS, *sections]))
    columns = min(_WIDEST, shutil.get_terminal_size().columns)
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    lines = [
        f"usage: {command} [--section.field VALUE ...]",
        "",
        *textwrap.wrap(
            "Each setting with its value in this config, and its default where it is another one. Several values are "
            "separated by commas or spaces, as in --optimizer.betas 0.9,0.98; none stands for None. `--help SECTION` "
            "or `--help SECTION.FIELD` prints only these.",
            columns,
        ),
    ]
    for title, section, words in _sections(config):
        shown_here = [
            row
            for row in _settings(title, section)
            if not only or any(f"{row[0]}.".startswith(f"{name}.") for name in only)
        ]
        if not shown_here:
            continue
        lines += ["", f"{bold}{title}{plain}", *textwrap.wrap(words, columns)]
        for name, value, text in shown_here:
            setting = SETTINGS[name]
            shown = f"  {bold}--{name}{plain} = {as_typed(value)}"
            if setting.default is not MISSING and value != setting.default:
                shown += f"  (default: {as_typed(setting.default)})"
            lines += ["", shown]
            if name + "." in KWARGS:
                lines += [f"  {bold}--{name}.{each}{plain} = {as_typed(argument)}" for each, argument in value.items()]
                lines.append(f"  {bold}--{name}.NAME{plain} VALUE")
            words_allowed = allowed(setting.hint)
            is_free = name + "." in KWARGS or words_allowed in ("text", "text, or None")
            excluded = [
                f"If it conflicts with {' and '.join(names[1:])}: {remedy}."
                for names, remedy in [*conflicts_of(section), *conflicts_of(config)]
                if names[0] == name
            ]
            for paragraph in [*([] if is_free else [f"Use {words_allowed}."]), text, *excluded]:
                lines += textwrap.wrap(paragraph, columns, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _sections(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield the prefix of each section's settings, the section and what it is about."""
    for member in fields(config):
        section = getattr(config, member.name)
        yield member.name, section, _description(type(section))
        for inner in fields(section):
            if is_dataclass(getattr(section, inner.name)):
                nested = getattr(section, inner.name)
                yield f"{member.name}.{inner.name}", nested, _description(type(nested))


def _description(section: type) -> str:
    return " ".join(inspect.getdoc(section).split())  # type: ignore[union-attr]  # every section has one


def _settings(prefix: str, section: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and explanation of the settings in a section, without those of sections in it."""
    texts = explanations(type(section))
    for member in fields(section):
        if not is_dataclass(getattr(section, member.name)):
            yield f"{prefix}.{member.name}", getattr(section, member.name), texts[member.name]


def explanations(section: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, also below those that it inherits, with what extras add."""
    texts = {name: text for cls in section.__mro__ if is_dataclass(cls) for name, text in _docstrings(cls)}
    for cls in section.__mro__:
        for name, more in vars(cls).get("EXPLANATIONS", {}).items():
            texts[name] += f" {more}"
    return texts


def _docstrings(cls: type) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    name = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield name, " ".join(str(statement.value.value).split())
            name = ""


def is_completing() -> bool:
    """Return whether a shell runs this process to complete a line."""
    return "_ARGCOMPLETE" in os.environ
