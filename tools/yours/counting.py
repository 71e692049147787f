"""Kills a script in the middle of an epoch, lets it go on, and counts images by what it logged.

Each image is a class of its own, so that a batch's labels say which images it has. Their number is a multiple of every
batch: no loader has to fill up or drop one at the end of an epoch, and what is counted is the resume alone.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from PIL import Image

NUM_IMAGES = 576
SIZE = 32
EPOCHS = 2
KILLED_IN = 1  # the second epoch: its order is not the one that a loader begins with
KILLED_AFTER = 7  # of its twelve steps
SAVE_EVERY = 3  # steps, so that the last checkpoint is that of step 6

Line = dict[str, Any]


class Start(NamedTuple):
    processes: int
    batch: int  # of each


FIRST = Start(2, 24)
RESUMES = {
    "2 processes": FIRST,
    "3, as many images a step": Start(3, 16),
    "3, the same command": Start(3, 24),
}


class Counts(NamedTuple):
    twice: int
    never: int

    def __str__(self) -> str:
        return f"{self.twice}, {self.never}"


def write_images(folder: Path) -> None:
    """Folders of classes with one image each: all of them to train on, and six to evaluate."""
    generator = np.random.default_rng(0)
    for split, number in [("train", image) for image in range(NUM_IMAGES)] + [("val", image) for image in range(6)]:
        path = folder / split / f"{number:03}" / "image.jpg"
        path.parent.mkdir(parents=True)
        Image.fromarray(generator.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(path)


class Log:
    """A process's log: the checkpoint that it starts from, and each of its batches."""

    def __init__(self, work: Path, *, behind: tuple[int, int] | None) -> None:
        """
        Args:
            behind: epoch and step of the checkpoint, the step counted from 1 in its epoch; None in a first start.
        """
        self._path = work / f"{'resumed' if behind else 'killed'}.{os.environ['RANK']}.jsonl"
        self._pauses = behind is None
        self._write(behind=behind)

    def trains(self, epoch: int, step: int, images: Iterable[Any]) -> None:
        """Call it with a batch before it is trained on. A first start comes to where it is killed, and no further."""
        while self._pauses and (epoch, step) > (KILLED_IN, KILLED_AFTER):
            self._path.with_suffix(".waits").touch()
            time.sleep(0.1)
        self._write(epoch=epoch, step=step, images=[int(image) for image in images])

    def _write(self, **values: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_log(work: Path, start: str) -> list[Line]:
    paths = sorted(work.glob(f"{start}.*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def count(killed: list[Line], resumed: list[Line]) -> Counts:
    """Count the images of the epoch that the final weights have been trained on more than once, or not at all.

    They were trained on what came up to the checkpoint that the resume starts from, and on what came after it.
    """
    behind = tuple(next(line["behind"] for line in resumed if "behind" in line))
    before = [line for line in killed if "images" in line and (line["epoch"], line["step"]) <= behind]
    after = [line for line in resumed if "images" in line]
    seen = Counter(image for line in before + after if line["epoch"] == KILLED_IN for image in line["images"])
    return Counts(twice=sum(times > 1 for times in seen.values()), never=NUM_IMAGES - len(seen))


class Processes(Protocol):
    """A script that runs on several processes."""

    def running(self) -> bool: ...

    def kill(self) -> None: ...

    def wait(self) -> list[int | None]:
        """Return the exit statuses."""
        ...


def kill(run: Callable[[Start, Path], Processes], work: Path) -> None:
    """Run a script until all processes have come to where they are killed, and kill them."""
    processes = run(FIRST, work)
    while len(list(work.glob("*.waits"))) < FIRST.processes:
        if not processes.running():
            raise RuntimeError(_error(work))
        time.sleep(0.05)
    processes.kill()


def resume(run: Callable[[Start, Path], Processes], killed: Path, work: Path, start: Start) -> Counts:
    """Let a copy of what was killed go on to its end."""
    shutil.copytree(killed, work)
    if any(run(start, work).wait()):
        raise RuntimeError(_error(work))
    return count(read_log(work, "killed"), read_log(work, "resumed"))


class Torchrun:
    """A script of this folder under torchrun, on CPUs."""

    def __init__(self, module: str, words: list[str], processes: int, output: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launcher, "-m", f"tools.yours.{module}", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with output.open("ab") as file:
            self._launcher = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def running(self) -> bool:
        return self._launcher.poll() is None

    def kill(self) -> None:
        """Kill the processes, their workers and the launcher, which outlives them, by SIGKILL."""
        launcher = psutil.Process(self._launcher.pid)
        for process in [*launcher.children(recursive=True), launcher]:
            process.kill()
        self._launcher.wait()

    def wait(self) -> list[int | None]:
        return [self._launcher.wait()]


def _error(work: Path) -> str:
    """Return the first error that a script printed, of those that are no consequence of another."""
    lines = (work / "output").read_text(errors="replace").splitlines()
    return next((line for line in lines if "Error: " in line), f"see {work / 'output'}")
