"""A checkpoint from the middle of an epoch on one device, resumed on two, has the weights of the one."""

from pathlib import Path

import pytest
import torch

from examples.conftest import Finish, Start

pytest.importorskip("lightning.pytorch")
TRAIN = Path(__file__).with_name("train.py")


def test_resumes_in_the_middle_of_an_epoch_on_other_devices(
    dataset: Path, tmp_path: Path, start: Start, finish: Finish
) -> None:
    words = (dataset, "--accelerator", "cpu", "--root")
    finish(TRAIN, *words, "one")
    (middle,) = (tmp_path / "one").glob("*-step=7.ckpt")  # an epoch has 4 or 5 steps
    assert start(TRAIN, *words, "two", "--devices", "2", "--ckpt-path", middle).wait() == 0
    saved = [torch.load(tmp_path / name / "epoch=2-step=13.ckpt", weights_only=False) for name in ("one", "two")]
    assert not list((tmp_path / "two").glob("*-step=6.ckpt")), "it goes on behind step 7"
    loops = [each["loops"]["fit_loop"]["state_dict"]["combined_loader"] for each in saved]
    assert loops[0] == loops[1] and loops[0][0]["step"] == 13  # 600 images, 48 at a time
    for name, tensor in saved[0]["state_dict"].items():
        torch.testing.assert_close(saved[1]["state_dict"][name], tensor, rtol=1e-4, atol=1e-6)
