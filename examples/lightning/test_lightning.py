"""A checkpoint from the middle of an epoch on one device, resumed on two, has the weights of the one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.cli import main

pytest.importorskip("lightning")
TRAIN = Path(__file__).with_name("train.py")


def train(dataset: Path, root: Path, *words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TRAIN.parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(TRAIN), str(dataset), "--accelerator", "cpu", "--root", str(root), *words]
    subprocess.run(command, env=environment, check=True)


def test_resumes_in_the_middle_of_an_epoch_on_other_devices(tmp_path: Path) -> None:
    for split, count in (("train", 200), ("val", 10)):
        for number in range(count):
            path = tmp_path / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            seed = number if split == "train" else 1000 + number
            pixels = np.random.default_rng(seed).integers(0, 256, (80, 70 + number % 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    dataset, folders = tmp_path / "dataset", [str(tmp_path / name) for name in ("train", "val")]
    words = ["data", "convert", "folder", "--train", folders[0], "--validation", folders[1], "--out", str(dataset)]
    assert main(words) == 0
    train(dataset, tmp_path / "one")
    (middle,) = (tmp_path / "one").glob("*-step=7.ckpt")  # an epoch has 4 or 5 steps
    train(dataset, tmp_path / "two", "--devices", "2", "--ckpt-path", str(middle))
    saved = [torch.load(tmp_path / name / "epoch=2-step=13.ckpt", weights_only=False) for name in ("one", "two")]
    assert not list((tmp_path / "two").glob("*-step=6.ckpt")), "it goes on behind step 7"
    loops = [each["loops"]["fit_loop"]["state_dict"]["combined_loader"] for each in saved]
    assert loops[0] == loops[1] and loops[0][0]["step"] == 13  # 600 images, 48 at a time
    for name, tensor in saved[0]["state_dict"].items():
        torch.testing.assert_close(saved[1]["state_dict"][name], tensor, rtol=1e-4, atol=1e-6)
