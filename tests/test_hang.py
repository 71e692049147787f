"""A rank that hangs, dies or waits for its data: the log says which one, on which host, in which phase."""

import os
import platform
import re
import signal
import sys
import time
from pathlib import Path

from dali_train.runtime.watchdog import Beat, name_missing

from .conftest import StartTraining
from .helpers import LONG, wait_for_steps
from .ranks import FORK, free_port

HOST = platform.node()
TIMEOUT = ("--parallel.timeout_s", "12")
# Where ranks wait for one another: for gradients, or for the wish to stop that is asked with each step.
WAITING = re.compile(r"^phase (backward|exchange|logging), step \d+$", re.MULTILINE)
THREE = ("--batch.global_batch", "24")  # divides among three ranks


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


def test_a_frozen_rank_0_is_named_by_the_others(start_training: StartTraining, tmp_path: Path) -> None:
    """It holds the store, so nobody gets an answer."""
    ranks = start_training("run", *LONG, *THREE, *TIMEOUT, ranks=3)
    wait_for_steps(ranks, tmp_path / "run", 3)
    frozen = ranks.pids()[0]
    os.kill(frozen, signal.SIGSTOP)
    while any(ranks.alive()[1:]):
        time.sleep(0.1)
    os.kill(frozen, signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL, 1, 1]
    output = ranks.log.read_text()
    named = [line for line in output.splitlines() if "no answer from the store of rank 0" in line]
    assert named and named[0].startswith("rank 1: "), output
    assert f"Missing or late: rank 0 on {HOST} (pid {frozen}): silent for" in named[0], output
    assert "ends after" in output[output.index("no answer from the store") :]


def test_a_rank_lost_before_the_first_step_is_named(start_training: StartTraining, tmp_path: Path) -> None:
    ranks = start_training("run", *LONG, *THREE, *TIMEOUT, ranks=3)
    while not (tmp_path / "run" / "run.lock").exists():  # then all have met
        time.sleep(0.01)
    lost = ranks.pids()[1]
    os.kill(lost, signal.SIGSTOP)
    while f"Missing or late: rank 1 on {HOST} (pid {lost}): silent for" not in ranks.log.read_text():
        assert all(ranks.alive()), ranks.log.read_text()
        time.sleep(0.1)
    ranks.kill()


def test_a_killed_rank_is_named(start_training: StartTraining, tmp_path: Path) -> None:
    ranks = start_training("run", *LONG, *THREE, ranks=3)
    wait_for_steps(ranks, tmp_path / "run", 3)
    os.kill(ranks.pids()[2], signal.SIGKILL)
    statuses = ranks.wait()
    assert statuses == [1, 1, -signal.SIGKILL]
    (line,) = [line for line in ranks.log.read_text().splitlines() if line.startswith("rank 0: lost touch")]
    assert f"Missing or late: rank 2 on {HOST} (pid {ranks.pids()[2]}): silent for" in line
    assert "rank 1 on" not in line
    report = (tmp_path / "run" / "hang" / "rank0.txt").read_text()
    assert "lost touch with the other ranks: " in report and WAITING.search(report), report


def _rank_whose_data_stops(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from dali_train.cli import main
    from dali_train.data.loading.storage import MappedFiles

    quick, reads = MappedFiles.read, []

    def stop_after_60(self: MappedFiles, shard: int, offset: int, size: int) -> object:
        reads.append(offset)
        if len(reads) > 60:
            time.sleep(3600)  # like a read from a file server that is gone
        return quick(self, shard, offset, size)

    if int(environment["RANK"]) == int(environment["WORLD_SIZE"]) - 1:
        MappedFiles.read = stop_after_60  # type: ignore[assignment,method-assign]
    sys.argv = ["dali-train", *arguments]
    sys.exit(main())


def start_with_stalling_data(config: Path, run: Path, ranks: int) -> list:
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        arguments = ["train", "--config", str(config), "--run.dir", str(run), *LONG, *TIMEOUT]
        processes.append(
            FORK.Process(target=_rank_whose_data_stops, args=(arguments, environment, run.with_suffix(".log")))
        )
        processes[-1].start()
    return processes


def test_a_data_stall_is_called_one(tiny_config: Path, tmp_path: Path) -> None:
    """Several ranks end, so that the job can be started again; a single process waits: the file server may come
    back."""
    two, one = tmp_path / "two", tmp_path / "one"
    processes = start_with_stalling_data(tiny_config, two, ranks=2)
    (alone,) = start_with_stalling_data(tiny_config, one, ranks=1)
    for process in processes:
        process.join(120)
    output = two.with_suffix(".log").read_text()
    assert [process.exitcode for process in processes] == [1, 1], output
    assert f"rank 1 on {HOST} (pid {processes[1].pid}): in phase data of step" in output
    assert "a data stall: it waits for images" in output
    assert "rank 1: data stall: waiting for images of step" in output
    assert "stop_after_60" in (two / "hang" / "rank1.txt").read_text()

    report = one / "hang" / "rank0.txt"
    while not report.exists() or "stop_after_60" not in report.read_text():
        assert alone.is_alive()
        time.sleep(0.1)
    alone.join(4)
    assert alone.is_alive()
    alone.kill()
    alone.join()
    assert "rank 0: data stall: waiting for images of step" in one.with_suffix(".log").read_text()
    assert report.read_text().startswith(f"rank 0 of 1 on {HOST}, pid {alone.pid}\nphase data, step ")


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
    assert name_missing(waiting, 3) == "Missing or late: rank 2: not heard of since the ranks met"
    stalled = [(beat(rank, phase="data"), 1.0) for rank in (0, 1)]
    assert name_missing(stalled, 2).startswith("All ranks wait for images, a data stall: rank 0 on n0")
