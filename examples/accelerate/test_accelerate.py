"""Left in the middle of an epoch and resumed on two processes, it has the weights of one process."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from examples.conftest import Finish, Start

pytest.importorskip("accelerate")
TRAIN = Path(__file__).with_name("train.py")


def test_resumes_on_other_processes(dataset: Path, tmp_path: Path, start: Start, finish: Finish) -> None:
    assert start(TRAIN, dataset, "--root", "one", "--stop-after", 6).wait() == 0  # an epoch has 4 or 5 steps
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    finish(TRAIN, dataset, "--root", "one")
    finish(TRAIN, dataset, "--root", "two", processes=2)
    one, two = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
    positions = [(tmp_path / name / "last" / "custom_checkpoint_0.pkl").read_bytes() for name in ("one", "two")]
    assert positions[0] == positions[1]
