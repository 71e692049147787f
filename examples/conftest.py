"""What the examples' tests share: a small dataset, and programs that run as their READMEs start them, or as forked
processes, which do not import torch for seconds each."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from dali_train.cli import main
from tests.ranks import FORK, TIMEOUT_S, launch_environments

Start = Callable[..., "subprocess.Popen[bytes]"]

os.environ["OMP_NUM_THREADS"] = "1"  # of all that is started or forked here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that needs other people's trainers is of the thorough tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 images to train on and 10 to evaluate, in two classes."""
    root = tmp_path_factory.mktemp("examples")
    folders = []
    for split, count in (("train", 200), ("validation", 10)):
        folders += [f"--{split}", str(root / "photos" / split)]
        for number in range(count):
            path = root / "photos" / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            generator = np.random.default_rng([number, split == "train"])
            Image.fromarray(generator.integers(0, 256, (80, 70 + number % 30, 3), dtype=np.uint8)).save(path)
    assert main(["data", "convert", "folder", *folders, "--out", str(root / "dataset")]) == 0
    return root / "dataset"


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a program on a number of processes under torchrun, or on its own with 0, in the test's directory."""

    def start(program: Path, *words: object, processes: int = 0) -> "subprocess.Popen[bytes]":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        environment = {**os.environ}
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, *(launcher if processes else []), str(program), *map(str, words)]
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    return start


Finish = Callable[..., None]


@pytest.fixture
def finish(tmp_path: Path) -> Finish:
    """Run a program to its end on a number of forked processes with torchrun's variables, or on one without them with
    0, in the test's directory. Each has the environment of this process, and imports what the server of tests/ranks.py
    has not."""

    def finish(program: Path, *words: object, processes: int = 0) -> None:
        arguments = [str(program), *map(str, words)]
        ranks = [
            FORK.Process(target=_run_program, args=(arguments, tmp_path, {**os.environ, **environment}))
            for environment in (launch_environments(processes) if processes else [{}])
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(TIMEOUT_S)
        statuses = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
        assert set(statuses) == {0}, statuses

    return finish


def _run_program(arguments: list[str], directory: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def load_program(path: Path) -> ModuleType:
    """Import a program under a name of its own, since several are called train.py."""
    specification = spec_from_file_location(f"example_{path.parent.name}", path)
    assert specification is not None and specification.loader is not None
    program = module_from_spec(specification)
    specification.loader.exec_module(program)
    return program
