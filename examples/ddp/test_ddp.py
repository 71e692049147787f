"""Killed on two processes and resumed on three, the loop has the weights of one process that was not disturbed."""

import time
from pathlib import Path

import psutil
import torch

from examples.conftest import Finish, Start

LOOP = Path(__file__).with_name("loop.py")


def test_killed_and_resumed_on_other_processes(dataset: Path, tmp_path: Path, start: Start, finish: Finish) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    doomed = start(LOOP, dataset, killed, processes=2)
    while not killed.exists() and doomed.poll() is None:
        time.sleep(0.001)
    for process in psutil.Process(doomed.pid).children(recursive=True):  # the processes first: torchrun outlives them
        process.kill()
    doomed.kill()
    doomed.wait()
    finish(LOOP, dataset, whole, processes=1)
    left_at = torch.load(killed)["train"]["step"]
    assert 1 <= left_at < torch.load(whole)["train"]["step"] == 13  # of 600 images, 48 at a time
    finish(LOOP, dataset, killed, processes=3)
    one, three = torch.load(whole), torch.load(killed)
    assert one["train"] == three["train"]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(three["model"][name], tensor, rtol=1e-4, atol=1e-6)
