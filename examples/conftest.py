"""What the examples' tests share: a small dataset, and programs that run as their READMEs start them."""

import os
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

Start = Callable[..., "subprocess.Popen[bytes]"]


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
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, *(launcher if processes else []), str(program), *map(str, words)]
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    return start


def load_program(path: Path) -> ModuleType:
    """Import a program under a name of its own, since several are called train.py."""
    specification = spec_from_file_location(f"example_{path.parent.name}", path)
    assert specification is not None and specification.loader is not None
    program = module_from_spec(specification)
    specification.loader.exec_module(program)
    return program
