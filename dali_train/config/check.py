"""What the sections have in common: each value is checked once against its field's type hint, wherever it comes from.

A section is a frozen dataclass under `section`. A type hint says all that is required of one value: its type, a `Range`
or words in ``Annotated``, and whether it is `NotInRecipe`. What concerns several fields stands in
``__post_init__``, which sees only values that fit their hints.
"""

import functools
import math
import os
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dali_train.config.names import close_value, unknown_setting
from dali_train.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The least and the greatest number that a field takes; `words` name the range in a message, after "use"."""

    low: float
    high: float
    words: str


@dataclass(frozen=True)
class Remedy:
    """What a message says to do instead of "use TYPE"."""

    words: str


class _NotInRecipe:
    """Marks a setting that decides how fast, where or how closely watched a run is, but not its result."""


NotInRecipe = Annotated[T, _NotInRecipe()]
"""May change when a run is resumed: not part of the recipe, to which every setting without this mark belongs."""

OVER_0 = math.ulp(0.0)
UNDER_1 = math.nextafter(1.0, 0.0)
MOST = (1 << 63) - 1
Count = Annotated[int, Range(1, MOST, "at least 1")]
CountOr0 = Annotated[int, Range(0, MOST, "a number from 0 on")]
Pixels = Annotated[int, Range(1, 65_500, "a positive number of pixels, at most 65,500")]  # the largest side of a JPEG
Positive = Annotated[float, Range(OVER_0, math.inf, "a number over 0")]
NotNegative = Annotated[float, Range(0, math.inf, "0 or more")]
Fraction = Annotated[float, Range(0, 1, "a fraction from 0 to 1")]
Directory = Annotated[str, Remedy("name a directory")]


def require(fulfilled: bool, message: str) -> None:
    if not fulfilled:
        raise ConfigError(message)


def section(name: str) -> Callable[[type[T]], type[T]]:
    """A decorator for a dataclass: its ``__init__`` refuses unknown, missing and unfit values, named as ``name.field``.

    A list becomes a tuple and a path a string where the field asks for one. The class raises ConfigError.
    """

    def decorate(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls, include_extras=True)
        defaults = {field.name: default_of(field) for field in fields(cls)}  # type: ignore[arg-type]  # it is a dataclass
        prefix = f"{name}." if name else ""
        build = cls.__init__

        @functools.wraps(build)
        def checked_init(self: T, **values: Any) -> None:
            for given in values:
                if given not in hints:
                    raise ConfigError(unknown_setting(prefix + given, [prefix + known for known in hints]))
            for field, default in defaults.items():
                if field not in values and default is MISSING:
                    raise ConfigError(f"{prefix}{field} is missing: {cls.__name__} has no default for it")
            build(
                self,
                **{
                    field: checked(prefix + field, value, hints[field], defaults[field])
                    for field, value in values.items()
                },
            )

        cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def default_of(field: Any) -> Any:
    """A dataclass field's default; MISSING if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def is_in_recipe(hint: Any) -> bool:
    """Return whether a setting with this type hint decides the result of a run."""
    return not any(isinstance(note, _NotInRecipe) for note in get_args(hint)[1:])


def checked(name: str, value: Any, hint: Any, default: Any = None) -> Any:
    """`value` as the type `hint` has it.

    Raises:
        ConfigError: it does not fit; the message names the setting, the value and what to use, with `default` as an
            example.
    """
    try:
        return _fitted(value, hint)
    except _UnfitError as unfit:
        example = ",".join(map(str, default)) if isinstance(default, tuple) and default else None
        raise ConfigError(f"{name} is {_shown(value)}: {unfit}{f', e.g. {example}' if example else ''}") from None


class _UnfitError(Exception):
    """A value does not fit its hint; the text is the remedy."""


def _shown(value: Any) -> str:
    text = "empty" if value == "" else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _fitted(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(value, *arguments)
    if origin in (Union, types.UnionType):
        return _any_of(value, arguments)
    if origin is Literal:
        if not any(value is known or (value == known and type(value) is type(known)) for known in arguments):
            raise _UnfitError(close_value(value, arguments))
        return value
    if origin is tuple:
        return _tuple(value, arguments)
    if hint is Any or (hint in _FITS and _FITS[hint](value)):
        return os.fspath(value) if hint is str else value
    if (origin is dict and isinstance(value, dict)) or (origin is Callable and callable(value)):
        return value
    if isinstance(hint, type) and hint not in _FITS and isinstance(value, hint):
        return value
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):  # a section as dict(field=value)
        return hint(**value)
    if isinstance(value, float) and hint in (int, float) and not math.isfinite(value):
        raise _UnfitError("use a finite number")
    raise _UnfitError(f"use {_WORDS.get(origin or hint, getattr(hint, '__name__', hint))}")


# bool is an int to Python, and not to us: `epochs=True` is a mistake.
_FITS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ),
    str: lambda value: isinstance(value, str | os.PathLike) and value != "",
    type(None): lambda value: value is None,
}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "None",
    dict: "a dict, e.g. {'drop_path_rate': 0.1}",
    Callable: "a function or class",
}


def _annotated(value: Any, hint: Any, *notes: Any) -> Any:
    words = next((note.words for note in notes if isinstance(note, Range | Remedy)), None)
    try:
        value = _fitted(value, hint)
    except _UnfitError as unfit:
        if words is None:
            raise
        if any(isinstance(note, Remedy) for note in notes):
            raise _UnfitError(words) from None
        if words.startswith("a number"):
            raise _UnfitError(f"{unfit}{words.removeprefix('a number')}") from None
        raise _UnfitError(f"use {words}" if words.startswith("a ") else f"{unfit}: {words}") from None
    for note in notes:
        if isinstance(note, Range) and not note.low <= value <= note.high:
            beyond = f", and at most {note.high:,}" if value > note.high == MOST else ""
            raise _UnfitError(f"use {note.words}{beyond}")
    return value


def _any_of(value: Any, hints: tuple[Any, ...]) -> Any:
    remedies = []
    for hint in hints:
        try:
            return _fitted(value, hint)
        except _UnfitError as unfit:
            remedies.append(str(unfit))
    none = "leave it out" if value == "" else "None"
    others = (none if remedy == "use None" else remedy.removeprefix("use ") for remedy in remedies[1:])
    raise _UnfitError(", or ".join([remedies[0], *others]))


def _tuple(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(hints) == 2 and hints[1] is Ellipsis:
        if not isinstance(value, tuple | list):
            name = getattr(value, "__name__", "VALUE")
            raise _UnfitError(f"use a tuple, with a comma even for one: ({name},)")
        hints = hints[:1] * len(value)
    elif not isinstance(value, tuple | list) or len(value) != len(hints):
        raise _UnfitError(f"use {len(hints)} values")
    try:
        return tuple(_fitted(one, hint) for one, hint in zip(value, hints, strict=True))
    except _UnfitError as unfit:
        remedy = str(unfit)
        raise _UnfitError(
            f"each must be {remedy.removeprefix('use ')}" if remedy.startswith("use ") else remedy
        ) from None
