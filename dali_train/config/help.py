"""The text of ``--config FILE --help``: every setting by section, drawn from the sections' own rules and docstrings."""

import ast
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from dali_train.config.check import allowed
from dali_train.config.config import KWARGS, SETTINGS, Config
from dali_train.config.names import unknown_setting
from dali_train.errors import ConfigError

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
            raise ConfigError(unknown_setting(name, SETTINGS))
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
            shown = f"  {bold}--{name}{plain} = {_written(value)}"
            if setting.default is not MISSING and value != setting.default:
                shown += f"  (default: {_written(setting.default)})"
            lines += ["", shown]
            if name + "." in KWARGS:
                lines += [f"  {bold}--{name}.{each}{plain} = {_written(one)}" for each, one in value.items()]
                lines.append(f"  {bold}--{name}.NAME{plain} VALUE")
            words_allowed = allowed(setting.hint)
            is_free = name + "." in KWARGS or words_allowed in ("text", "text, or None")
            for paragraph in [text] if is_free else [f"Use {words_allowed}.", text]:
                lines += textwrap.wrap(paragraph, columns, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _sections(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield the prefix of each section's settings, the section and what it is about."""
    for one in fields(config):
        section = getattr(config, one.name)
        yield one.name, section, _description(type(section))
        for inner in fields(section):
            if is_dataclass(getattr(section, inner.name)):
                nested = getattr(section, inner.name)
                yield f"{one.name}.{inner.name}", nested, _description(type(nested))


def _description(section: type) -> str:
    return " ".join(inspect.getdoc(section).split())  # type: ignore[union-attr]  # every section has one


def _settings(prefix: str, section: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and explanation of the settings in a section, without those of sections in it."""
    texts = explanations(type(section))
    for one in fields(section):
        if not is_dataclass(getattr(section, one.name)):
            yield f"{prefix}.{one.name}", getattr(section, one.name), texts[one.name]


def explanations(section: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    texts, name = {}, ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            texts[name], name = " ".join(str(statement.value.value).split()), ""
    return texts


def _written(value: Any) -> str:
    """Return a value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        inner = any(isinstance(one, tuple) for one in value)
        return (" " if inner else ",").join(map(_written, value)) or "()"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(getattr(value, "__qualname__", value))
