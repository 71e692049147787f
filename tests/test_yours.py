"""tools/yours: this project's row of the table, and how images are counted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import FORK, TIMEOUT_S, launch_environments
from tools.yours import train_loader
from tools.yours.counting import KILLED_IN, NUM_IMAGES, Counts, Line, Start, count, kill, resume, write_images


class Forked:
    """A script on forked processes, which do not import torch and DALI for seconds each."""

    def __init__(self, script: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
        self._processes = [
            FORK.Process(target=_run, args=(environment, script, arguments))
            for environment in launch_environments(processes)
        ]
        for process in self._processes:
            process.start()

    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.wait()

    def wait(self) -> list[int | None]:
        for process in self._processes:
            process.join(TIMEOUT_S)
        return [process.exitcode for process in self._processes]


def _run(environment: dict[str, str], script: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    output = os.open(arguments[-1] / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    script(*arguments)


def test_no_image_twice_or_never_with_the_train_loader(tmp_path: Path) -> None:
    write_images(tmp_path / "images")

    def run(start: Start, work: Path) -> Forked:
        return Forked(train_loader.main, (tmp_path / "images", work), start.processes)

    killed = tmp_path / "killed"
    killed.mkdir()
    kill(run, killed)
    for processes in (2, 3):
        start = Start(processes, batch=8)
        assert resume(run, killed, tmp_path / f"on {processes}", start) == Counts(twice=0, never=0)


def trained(epoch: int, step: int, images: range) -> Line:
    return {"epoch": epoch, "step": step, "images": list(images)}


@pytest.mark.parametrize(
    ("resumed", "counts"),
    [
        ([trained(KILLED_IN, 3, range(96, NUM_IMAGES))], Counts(twice=0, never=0)),
        ([trained(KILLED_IN, 1, range(0, NUM_IMAGES))], Counts(twice=96, never=0)),
        ([trained(KILLED_IN, 3, range(144, NUM_IMAGES))], Counts(twice=0, never=48)),
        ([trained(KILLED_IN, 3, range(90, 500)), trained(KILLED_IN, 4, range(499, 570))], Counts(twice=7, never=6)),
        ([trained(KILLED_IN + 1, 1, range(0, NUM_IMAGES))], Counts(twice=0, never=NUM_IMAGES - 96)),
    ],
)
def test_counts_what_is_in_the_checkpoint_and_what_came_after_it(resumed: list[Line], counts: Counts) -> None:
    killed = [
        {"behind": None},
        trained(KILLED_IN - 1, 12, range(0, 48)),  # of another epoch
        trained(KILLED_IN, 1, range(0, 48)),
        trained(KILLED_IN, 2, range(48, 96)),
        trained(KILLED_IN, 3, range(96, 144)),  # lost
    ]
    assert count(killed, [{"behind": [KILLED_IN, 2]}, *resumed]) == counts
