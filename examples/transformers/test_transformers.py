"""A checkpoint from the middle of an epoch, resumed on two processes, has the weights of one process."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from examples.conftest import Finish, Start

pytest.importorskip("transformers.trainer")
pytest.importorskip("accelerate")
TRAIN = Path(__file__).with_name("train.py")


def test_resumes_on_other_processes(dataset: Path, tmp_path: Path, start: Start, finish: Finish) -> None:
    assert start(TRAIN, dataset, "--root", "one").wait() == 0
    middle = tmp_path / "one" / "checkpoint-7"  # an epoch has 4 or 5 steps
    finish(TRAIN, dataset, "--root", "two", "--resume", middle, processes=2)
    assert not (tmp_path / "two" / "checkpoint-7").exists(), "it goes on behind step 7"
    last = [tmp_path / name / "checkpoint-13" for name in ("one", "two")]  # 600 images, 48 at a time
    assert (last[0] / "loader.json").read_text() == (last[1] / "loader.json").read_text()
    one, two = (load_file(folder / "model.safetensors") for folder in last)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
