"""A checkpoint of torchtitan's from the middle of an epoch, resumed on two processes, has the weights of one."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing import assert_close

from examples.conftest import Start

for package in ("torchtitan.components.dataloader", "torchtitan.components.checkpointer.dcp"):
    pytest.importorskip(package, reason="torchtitan is not installed, see README.md", exc_type=ImportError)
TRAIN = Path(__file__).with_name("train.py")


def test_resumes_on_other_processes(dataset: Path, tmp_path: Path, start: Start) -> None:
    assert start(TRAIN, dataset, "--root", "one", processes=1).wait() == 0
    middle, two = (tmp_path / name / "checkpoint" / "step-7" for name in ("one", "two"))  # an epoch has 4 or 5 steps
    shutil.copytree(middle, two)
    assert start(TRAIN, dataset, "--root", "two", processes=2).wait() == 0
    assert not (two.parent / "step-6").exists(), "it goes on behind step 7"
    saved = []
    for name in ("one", "two"):
        file = tmp_path / f"{name}.pt"
        dcp_to_torch_save(tmp_path / name / "checkpoint" / "step-13", file)  # 600 images, 48 at a time
        saved.append(torch.load(file, weights_only=False))
    assert saved[0]["dataloader"] == saved[1]["dataloader"] and saved[0]["dataloader"]["step"] == 13
    weights = [name for name, value in saved[0].items() if isinstance(value, torch.Tensor)]
    assert weights
    for name in weights:
        assert_close(saved[1][name], saved[0][name], rtol=1e-4, atol=1e-6)
