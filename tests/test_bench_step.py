"""The benchmark of a step: the real command on a tiny model, and what it counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY


def test_it_runs_and_its_parts_add_up(tiny_config: Path, tmp_path: Path) -> None:
    words = ["--config", str(tiny_config), "--rounds", "2", "--steps", "2", "--only", "synthetic", "bare"]
    files = ["--profile", "--json", str(tmp_path / "rounds.jsonl"), "--plot", str(tmp_path / "rounds.png")]
    process = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "tools" / "bench_step.py"),
            *words,
            *files,
            "--model.activation_checkpointing",
            "true",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1].startswith("trainer, synthetic data")
    start, *rounds = (json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines())
    assert [(line["contender"], line["round"]) for line in rounds] == [
        (name, number) for number in range(3) for name in ("trainer, synthetic data", "bare loop")
    ], "in the order in which they were measured"
    for line in rounds[:6:2]:
        assert sum(line["phases"].values()) == pytest.approx(
            line["step_s"], rel=0.2
        )  # the round begins and ends outside of steps
    assert all(line["memory_gb"] > 0 for line in rounds)
    assert all(line["kernels"].get("matrix product", 0) > 0 for line in rounds[4:]), "the round with the profiler"
    assert (tmp_path / "rounds.png").stat().st_size > 0
    # Multiplications and additions of the tests' ViT, by hand: 17 tokens of 32, a depth of 2, MLPs of 128, 5 classes.
    # Backward is twice the forward pass, but for the patches: pixels need no gradient.
    patches, tokens, width = 16, 17, 32
    block = tokens * width * (3 * width + width + 2 * 4 * width) + 2 * tokens * tokens * width
    embedding = patches * 3 * 8 * 8 * width
    assert start["flops_per_image"] == 2 * (3 * (2 * block + width * 5) + 2 * embedding)


def test_a_mistake_is_told(tiny_config: Path, tmp_path: Path) -> None:
    words = ["--config", str(tiny_config), "--data.root", str(tmp_path)]
    process = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "bench_step.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=100,
    )
    assert process.returncode == 1 and "bench_step.py: " in process.stderr and "Traceback" not in process.stderr
