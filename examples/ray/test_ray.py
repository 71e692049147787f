"""Training and conversion on a real Ray, whose second node comes and goes while a run is under way."""
# ruff: noqa: F811 (fixtures of another file)

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dali_train.cli import main as dali_train
from tests.conftest import REPOSITORY, Train, tiny_config, train  # noqa: F401
from tests.convert.files import files_of, write_folder
from tests.helpers import FLOAT64_BOUND, events, extended, largest_difference, samples

ray = pytest.importorskip("ray")
import on_ray  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """One node with one core, whose processes import the package from here."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


# A hook that holds a rank that is alone at step 4, and two ranks at step 6, until `released` is there or they are told
# to stop; `held-N` says that N ranks are there.
WAITS = """
import os, signal, time
from pathlib import Path

class Waits(Hook):
    def step(self, record):
        ranks, directory = int(os.environ["WORLD_SIZE"]), Path("DIRECTORY")
        stop_requests = signal.getsignal(signal.SIGTERM).__self__
        while record.step == 2 + 2 * ranks and not (directory / "released").exists() and not stop_requests.reason():
            (directory / f"held-{ranks}").touch()
            time.sleep(0.1)
"""
OPTIONS = ("--precision.dtype", "fp64", "--run.eval_every_epochs", "None", "--run.max_steps", "7")
DRIVER = "import sys; import on_ray; on_ray.RESIZE_S = 2; sys.exit(on_ray.main())"


def test_a_run_that_gets_a_second_node_and_loses_it(
    ray_cluster: Any, tiny_config: Path, tmp_path: Path, train: Train
) -> None:
    """It saves, stops and goes on with two ranks, then resumes on one; the samples are those of one process."""
    run, log = tmp_path / "run", tmp_path / "log"
    config = extended(tiny_config, WAITS.replace("DIRECTORY", str(tmp_path)))
    words = ["train", "--config", str(config), "--workers", "1:2", *OPTIONS]
    more = ["--run.dir", str(run), "--run.checkpoint_every_steps", "3"]
    with log.open("w") as file:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, *words, *more], stdout=file, stderr=file)

    def wait_until(name: str) -> None:
        while not (tmp_path / name).exists():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)

    try:
        wait_until("held-1")
        node = ray_cluster.add_node(**NODE)
        wait_until("held-2")
        ray_cluster.remove_node(node, allow_graceful=False)
        (tmp_path / "released").touch()
        assert driver.wait(500) == 0, log.read_text()
    finally:
        driver.kill()
    starts = events(run, "start")
    assert [event["ranks"] for event in starts] == [1, 2, 1], log.read_text()
    first, second, third = (event["step"] for event in starts)
    assert (first, second) == (0, events(run, "end")[0]["step"]) and 4 <= second < 7, log.read_text()
    assert second <= third <= 7  # the newest checkpoint when Ray noticed that the node was lost
    assert "stopped after saving: signal TERM" in log.read_text() and "2 ranks (dali-train)" in log.read_text()
    train("one", *OPTIONS)
    assert samples(run) == samples(tmp_path / "one")
    assert largest_difference(run, tmp_path / "one") < FLOAT64_BOUND


def test_parts_as_tasks_have_the_bytes_of_one_process(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_folder(tmp_path / "photos", {"ant": 6, "bee": 6})
    words = ["folder", "--train", str(photos), "--train-shards", "4", "--out"]
    assert dali_train(["data", "convert", *words, str(tmp_path / "one")]) == 0
    monkeypatch.chdir(tmp_path)
    assert on_ray.main(["convert", "--parts", "2", *words, "out"]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train --config nowhere.py --workers 2",
            "on_ray.py: --config nowhere.py: this file does not exist",
        ),
        ("train --config nowhere.py --workers 8:1", "argument --workers: 8:1: use a number from 1 on, or the least"),
    ],
)
def test_mistakes_need_no_cluster(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = on_ray.main(words.split())
    except SystemExit as end:  # argparse's
        status = int(end.code or 0)
    assert status == 2 and message in capsys.readouterr().err
