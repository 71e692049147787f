"""A rank that hangs, dies or waits for its data: the log says which one, on which host, in which phase."""

import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from dali_train.checkpoint.format import CheckpointError
from dali_train.errors import DatasetError, RunError
from dali_train.runtime import watchdog as watchdog_module
from dali_train.runtime.launch import Launch
from dali_train.runtime.watchdog import Beat, Startup, Watchdog, name_missing
from tests.conftest import StartTraining
from tests.helpers import LONG, extended, wait_for_steps
from tests.ranks import FORK

HOST = platform.node()
TIMEOUT = ("--parallel.timeout_s", "12")
# Where ranks wait for one another: for gradients, or for the wish to stop that is asked with each step.
WAITING = re.compile(r"^phase (backward|all-reduce|logging), step \d+$", re.MULTILINE)
THREE = ("--batch.global_batch", "24", "--batch.micro_batch", "8")  # one for each of three ranks


@pytest.mark.thorough
def test_a_frozen_rank_is_named(start_training: StartTraining, tmp_path: Path) -> None:
    ranks = start_training("run", *LONG, *THREE, *TIMEOUT, ranks=3)
    wait_for_steps(ranks, tmp_path / "run", 3)
    frozen = ranks.pids()[1]
    os.kill(frozen, signal.SIGSTOP)
    while any(alive for rank, alive in enumerate(ranks.alive()) if rank != 1):
        time.sleep(0.1)
    os.kill(frozen, signal.SIGKILL)
    statuses = ranks.wait()
    output = ranks.log.read_text()
    assert 0 not in statuses and 75 not in statuses
    # Before the end, as a warning, and at the end.
    late = [line for line in output.splitlines() if line.startswith("rank 0: no progress for")]
    assert len(late) >= 2, output
    assert all(f"Missing or late: rank 1 on {HOST} (pid {frozen}): silent for" in line for line in late), output
    assert all("rank 2 on" not in line for line in late), output
    for rank in (0, 2):
        report = (tmp_path / "run" / "hang" / f"rank{rank}.txt").read_text()
        assert report.startswith(f"rank {rank} of 3 on {HOST}, pid {ranks.pids()[rank]}\nphase ")
        assert WAITING.search(report), report
        assert "(parallel.timeout_s is 12)" in report
        assert "in train" in report and "train.py" in report, report


class Clock:
    """Passes as the test says, and by `tick` seconds whenever it is looked at."""

    def __init__(self) -> None:
        self.now, self.tick = 1000.0, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def hold_store(connection: Connection) -> None:
    """Be the process of rank 0, which holds the store."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    time.sleep(600)


class Ranks:
    """The watchdogs of several ranks on one clock of the test's, with a real store in a process of its own."""

    def __init__(self, directory: Path, count: int) -> None:
        self.clock, self.directory, self._count = Clock(), directory, count
        here, there = FORK.Pipe()
        self.store = FORK.Process(target=hold_store, args=(there,))
        self.store.start()
        self._port = here.recv()
        self.dogs = [self._watchdog(rank) for rank in range(count)]
        self.pass_time(2, beating=range(count))

    def _watchdog(self, rank: int) -> Watchdog:
        launch = Launch(rank=rank, world_size=self._count, local_rank=rank, port=self._port, timeout_s=60.0)
        return Watchdog(launch, self.directory, self.clock)

    def enter(self, phase: str, *ranks: int) -> None:
        for rank in ranks:
            self.dogs[rank].watch(Startup(self.clock.now, step=5, phase=phase), "/data")

    def pass_time(self, seconds: float, beating: range | tuple[int, ...]) -> None:
        self.clock.now += seconds
        for rank in sorted(beating, reverse=True):  # rank 0 last, which asks for the others' beats
            assert self.dogs[rank].beat() if self._count > 1 else True


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(watchdog_module, "BEAT_S", 0.2)
    ranks = Ranks(tmp_path, 3)
    yield ranks
    ranks.store.kill()
    ranks.store.join()


def test_a_frozen_rank_0_is_named_by_the_others(three: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """It holds the store, so nobody gets an answer."""
    three.enter("backward", 1, 2)
    os.kill(three.store.pid or 0, signal.SIGSTOP)
    while any("State:\tT" not in task.read_text() for task in Path(f"/proc/{three.store.pid}/task").glob("*/status")):
        time.sleep(0.01)  # each of its threads stops when it next runs
    three.pass_time(40, beating=())
    assert not three.dogs[1].check() and not three.dogs[2].check()
    output = capfd.readouterr().err
    named = rf"rank 1: no answer from the store of rank 0. Missing or late: rank 0 on {HOST} \(pid {os.getpid()}\): sil"
    assert re.search(named, output) and "rank 2: " not in output, "one rank of each host says so"
    three.pass_time(40, beating=())
    assert three.dogs[1].check() and three.dogs[2].check(), "they end"
    report = (three.directory / "hang" / "rank2.txt").read_text()
    assert report.startswith(f"rank 2 of 3 on {HOST}, pid {os.getpid()}\nphase backward, step 5\nno progress for 80 s")
    with pytest.raises(RunError, match=r"the store of rank 0 on localhost:\d+ does not answer: rank 0 ended") as lost:
        three.dogs[1].__exit__(None, RuntimeError("store: timed out"), None)
    assert not lost.value.reported_elsewhere


def test_a_rank_lost_before_the_first_step_is_named(three: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    three.pass_time(40, beating=(0, 2))
    assert not three.dogs[0].check()
    output = capfd.readouterr().err
    assert (
        f"Missing or late: rank 1 on {HOST} (pid {os.getpid()}): silent for 40 s" in output and "rank 2" not in output
    )
    three.pass_time(40, beating=(0, 2))
    assert not three.dogs[0].check(), "the start may take long"


def test_the_first_to_end_is_named(three: Ranks) -> None:
    """Rank 2 was killed; ranks 0 and 1 lose touch with it."""
    three.enter("backward", 0, 1, 2)
    lost = RuntimeError("[/pytorch/gloo] Connection closed by peer")
    while_saving = CheckpointError(f"{lost}: could not save")
    while_saving.__cause__ = lost
    with pytest.raises(RunError) as left_to_rank_0:
        three.dogs[1].__exit__(None, while_saving, None)
    assert left_to_rank_0.value.reported_elsewhere
    three.clock.tick = 0.1
    cause = three.dogs[0].close(lost)
    said = rf"lost touch with other ranks. Missing or late: rank 2 on {HOST} \(pid \d+\): silent for \d s"
    assert re.match(said, cause) and "rank 1 on" not in cause
    for rank in (0, 1):
        report = (three.directory / "hang" / f"rank{rank}.txt").read_text()
        assert "lost touch with the other ranks: [/pytorch/gloo] Connection" in report


def test_a_rank_with_an_error_of_its_own_is_named(three: Ranks) -> None:
    three.dogs[2].close(DatasetError("bad image\nmore"))
    three.clock.tick = 0.1
    cause = three.dogs[0].close(RuntimeError("Connection reset"))
    assert re.search("Missing or late: rank 2 .* ended in phase .* with DatasetError: bad image", cause)


def test_of_ranks_with_the_same_error_one_says_it(three: Ranks) -> None:
    errors = [
        DatasetError("bad image"),
        CheckpointError("Restore one: no connection to /lustre"),
        DatasetError("bad image"),
    ]
    assert [three.dogs[rank].close(errors[rank]) for rank in (2, 1, 0)] == [""] * 3, "none is for want of another rank"
    assert [error.reported_elsewhere for error in errors] == [True, False, False]


def test_one_traceback_is_enough(three: Ranks) -> None:
    three.clock.tick = 0.1
    with pytest.raises(RunError, match="ValueError: GPU 0 is full") as later:
        for rank in (2, 0):
            three.dogs[rank].__exit__(None, ValueError(f"GPU {rank} is full"), None)
    assert later.value.reported_elsewhere
    three.dogs[1].__exit__(None, ValueError("another"), None)


def test_a_data_stall_is_called_one(three: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Several ranks end, so that the job can be started again; a single process waits: the data may come back."""
    three.enter("data", 1)
    three.enter("backward", 0, 2)
    three.pass_time(40, beating=(0, 1, 2))
    assert not any(dog.check() for dog in three.dogs)
    output = capfd.readouterr().err
    assert "rank 1: data stall: waiting for images of step 5 from /data for 40 s" in output
    assert re.search(r"rank 0: .*late: rank 1 .*in phase data of step 5 for 40 s, a data stall: it waits", output)
    three.pass_time(40, beating=(0, 1, 2))
    assert all(dog.check() for dog in three.dogs)
    assert "in test_a_data_stall_is_called_one" in (three.directory / "hang" / "rank1.txt").read_text()

    alone = Ranks(tmp_path / "alone", 1)
    alone.store.kill()
    alone.enter("data", 0)
    alone.pass_time(80, beating=())
    assert not alone.dogs[0].check()
    assert "rank 0: data stall: waiting for images of step 5 from /data for 80 s" in capfd.readouterr().err
    report = (alone.directory / "hang" / "rank0.txt").read_text()
    assert report.startswith(f"rank 0 of 1 on {HOST}, pid {os.getpid()}\nphase data, step 5\n")


CUT_SHORT = """
import os
from pathlib import Path

class CutShort(Hook):
    def start(self, record):
        self.shards = list(Path(record.config.data.root).glob("train/*"))

    def step(self, record):
        for path in self.shards:
            os.truncate(path, 0)
"""


def test_a_shard_cut_short_while_it_is_decoded_is_named(
    start_training: StartTraining, tiny_config: Path, dataset: Path, tmp_path: Path
) -> None:
    """Nothing can go on, since the decoder reads mapped memory; but the process does not end without a word."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    config = extended(tiny_config, CUT_SHORT)
    ranks = start_training("run", "--data.root", str(copy), "--data.read_ahead_mb", "0", config=config)
    assert ranks.wait() == [-signal.SIGBUS]
    output = ranks.log.read_text()
    assert f"bus error (SIGBUS): a mapped file could not be read. A shard of {copy} was truncated" in output


def beat(rank: int, *, step: int = 5, phase: str = "step", **others: object) -> Beat:
    return Beat(rank=rank, host=f"n{rank}", pid=100 + rank, step=step, phase=phase, age_s=40.0, count=9, **others)  # type: ignore[arg-type]


def test_names_those_that_the_others_wait_for() -> None:
    waiting = [(beat(rank), 1.0) for rank in (0, 1)]
    assert "equally far: rank 0 on n0 (pid 100): in phase step of step 5 for 40 s; rank 1" in name_missing(waiting, 2)
    slow = name_missing([*waiting, (beat(2, step=4), 0.5)], 3)
    assert slow == "Missing or late: rank 2 on n2 (pid 102): in phase step of step 4 for 40 s"
    failed = name_missing([*waiting, (beat(2, ended="DatasetError: bad image"), 9.0)], 3)
    assert (
        failed == "Missing or late: rank 2 on n2 (pid 102): ended in phase step of step 5 with DatasetError: bad image"
    )
    victim = (beat(1, ended="RuntimeError: Connection closed", lost_peer=True), 9.0)
    assert name_missing([(beat(0), 0.0), victim, (beat(2), 30.0)], 3).startswith(
        "Missing or late: rank 2 on n2 (pid 102): silent for 30 s"
    )
    assert name_missing(waiting, 3) == "Missing or late: rank 2: silent since the rendezvous"
    stalled = [(beat(rank, phase="data"), 1.0) for rank in (0, 1)]
    assert name_missing(stalled, 2).startswith("All ranks wait for images, a data stall: rank 0 on n0")
