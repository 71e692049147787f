"""Killed on two processes and resumed on three, the loop has the weights of one process that was not disturbed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from dali_train.cli import main

LOOP = Path(__file__).with_name("loop.py")


def start(dataset: Path, checkpoint: Path, processes: int) -> "subprocess.Popen[bytes]":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(LOOP.parents[2])}
    words = [sys.executable, *launcher, str(LOOP), str(dataset), str(checkpoint)]
    return subprocess.Popen(words, env=environment)


def test_killed_and_resumed_on_other_processes(tmp_path: Path) -> None:
    for number in range(200):
        path = tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (80, 70 + number % 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    dataset = tmp_path / "dataset"
    assert (
        main(["data", "convert", "folder", "--train", str(tmp_path / "photos" / "train"), "--out", str(dataset)]) == 0
    )
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    alone, doomed = start(dataset, whole, 1), start(dataset, killed, 2)
    while not killed.exists() and doomed.poll() is None:
        time.sleep(0.001)
    for process in psutil.Process(doomed.pid).children(recursive=True):  # the processes first: torchrun outlives them
        process.kill()
    doomed.kill()
    doomed.wait()
    assert alone.wait() == 0
    left_at = torch.load(killed)["train"]["step"]
    assert 1 <= left_at < torch.load(whole)["train"]["step"] == 13  # of 600 images, 48 at a time
    assert start(dataset, killed, 3).wait() == 0
    one, three = torch.load(whole), torch.load(killed)
    assert one["train"] == three["train"]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(three["model"][name], tensor, rtol=1e-4, atol=1e-6)
