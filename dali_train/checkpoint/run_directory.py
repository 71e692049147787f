"""Reading a run directory, whose files may be torn or foreign and are checked before use. This needs no torch."""

import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.config import Config
from dali_train.config.config_file import config_from_json
from dali_train.errors import ConfigError
from dali_train.files import read_limited
from dali_train.runtime.status import METRICS, Event, read_events

_LARGEST_FILE = 10_000_000
_COUNTS = ("host_cores", "decoding_threads", "ranks_on_host", "world_size")


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """The files of a run, parsed, each read on first use.

    Raises:
        ConfigError: there is no such run, or a file is not what a run writes; the message names the file and a remedy.
    """

    directory: Path

    def __post_init__(self) -> None:
        if not (self.directory / "config.json").exists():
            reason = "it has no config.json" if self.directory.is_dir() else "no such directory"
            raise ConfigError(f"{self.directory} is not a run directory: {reason}; use the run.dir of a run")

    @cached_property
    def config(self) -> Config:
        """The run's settings, without user hooks, which are not needed any more."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*hooks.user")
            return config_from_json(self._read("config.json"), str(self.directory / "config.json"))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json, with checked types; empty if there is no such file."""
        path = self.directory / "environment.json"
        if not path.exists():
            return {}
        try:
            facts = json.loads(self._read(path.name))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not what a run writes ({error}): move it away") from None
        if not isinstance(facts, dict) or any(type(facts.get(name, 1)) is not int for name in _COUNTS):
            raise ConfigError(f"{path} is not what a run writes ({', '.join(_COUNTS)} are numbers): move it away")
        return facts

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of metrics.jsonl, without foreign lines; empty if there is no such file."""
        try:
            return tuple(read_events(self.directory / METRICS, self.foreign_lines))
        except OSError as error:
            raise ConfigError(f"{self.directory / 'metrics.jsonl'} cannot be read: {error.strerror}") from None

    @cached_property
    def foreign_lines(self) -> list[str]:
        """A sentence on each line of metrics.jsonl that is damaged, once `events` are read."""
        return []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config as plain values by full name, ``section.field``."""
        return dict(_by_full_name(json.loads(self.config.to_json())))

    def _read(self, name: str) -> bytes:
        path = self.directory / name
        try:
            return read_limited(path, _LARGEST_FILE)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; put the run's own file there") from None


def _by_full_name(values: dict[str, Any], prefix: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _by_full_name(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
