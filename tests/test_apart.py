"""Hosts that do not share the run directory, here by their working directories: rank 0's has complete checkpoints."""

import os
import shutil
from pathlib import Path

import pytest

from dali_train.checkpoint import format as format_module
from tests.conftest import Train
from tests.helpers import FLOAT64_BOUND, largest_difference, samples
from tests.ranks import POOL, command

pytestmark = pytest.mark.thorough

OPTIONS = ["--precision.dtype", "fp64", "--run.eval_every_epochs", "1", "--parallel.shard", "full"]


def train_on_own_host(place: Path, arguments: list[str]) -> int:
    """The first rank is on one host, two are on another."""
    os.chdir(place / ("first" if os.environ["RANK"] == "0" else "second"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_module, "_VISIBILITY_TIMEOUT_S", 0.1)
        patch.setattr(format_module, "_CHUNK", 10_000)  # a file is sent in several
        return command(arguments)


def test_a_run_goes_on_where_one_host_is_new(tiny_config: Path, tmp_path: Path, train: Train) -> None:
    for steps in (4, 6):  # step 4 ends an epoch, so its checkpoint is evaluated, which the new host cannot see
        shutil.rmtree(tmp_path / "second", ignore_errors=True)
        for host in ("first", "second"):
            (tmp_path / host).mkdir(exist_ok=True)
        log = tmp_path / f"{steps}.log"
        words = ["train", "--config", str(tiny_config), "--run.dir", "run", "--run.max_steps", str(steps), *OPTIONS]
        assert POOL.run(3, train_on_own_host, tmp_path, words, log=log) == [0, 0, 0], log.read_text()
        assert "2 ranks of 3 send their part of each checkpoint to rank 0" in log.read_text()
    assert "resuming from step 4" in log.read_text()
    second = tmp_path / "second" / "run"
    assert list((second / "checkpoints").iterdir()) == [], "what was sent, or fetched to be read, is gone"
    for path in second.glob("samples.rank*.jsonl"):
        path.rename(tmp_path / "first" / "run" / path.name)
    train("one", "--run.max_steps", "6", *OPTIONS[:4])
    assert largest_difference(tmp_path / "first" / "run", tmp_path / "one") < FLOAT64_BOUND
    last = {key: images for key, images in samples(tmp_path / "one").items() if key[0] >= 4}
    assert {key: images for key, images in samples(tmp_path / "first" / "run").items() if key[0] >= 4} == last
