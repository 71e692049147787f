"""A run directory in which something is of another kind than the run writes: one sentence, no traceback, no waiting."""

import os
from pathlib import Path

import pytest

from dali_train.errors import ConfigError
from dali_train.runtime.status import read_status

from .conftest import Train


def test_a_directory_in_the_place_of_a_file(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.json").mkdir(parents=True)
    printed = train("run", "--run.max_steps", "1", status=1)
    assert (
        f"dali-train train: {tmp_path / 'run'}" in printed
        and "Is a directory" in printed
        and "Traceback" not in printed
    )


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(ConfigError, match=r"status.json is not the status of a run \(.*is not a regular file"):
        read_status(tmp_path)
