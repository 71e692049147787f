"""tools/yours: this project's row of the table, and how images are counted."""

import os
from pathlib import Path

import pytest

from tests.ranks import Forked, print_into
from tools.yours import train_loader
from tools.yours.counting import KILLED_IN, NUM_IMAGES, Counts, Line, Start, count, kill, resume, write_images


def _script(environment: dict[str, str], images: Path, work: Path) -> None:
    os.environ.update(environment)
    print_into(work / "output")
    train_loader.main(images, work)


def test_no_image_twice_or_never_with_the_train_loader(tmp_path: Path) -> None:
    """The script's processes are forked, which saves them importing torch and DALI for seconds each."""
    write_images(tmp_path / "images")

    def run(start: Start, work: Path) -> Forked:
        return Forked(_script, (tmp_path / "images", work), start.processes)

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
