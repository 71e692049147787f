"""One run directory, one run at a time; and a dead run does not keep the next one waiting."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dali_train.errors import ConfigError
from dali_train.runtime import lock as run_lock
from dali_train.runtime.lock import FILE, RunLock, find_holder

from .conftest import REPOSITORY, StartTraining, Train
from .helpers import LONG, wait_for_steps

SILENT: list[str] = []


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of half a minute."""
    monkeypatch.setattr(run_lock, "STALE_S", 3.0)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.5)
    monkeypatch.setattr(run_lock, "_GRACE_S", 0.5)


def hold(directory: Path, **environ: str) -> RunLock:
    return RunLock(directory, SILENT.append, environ)


def pretend(directory: Path, **fields: object) -> None:
    """Change what the lock says about its holder."""
    path = directory / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_second_start_is_refused_on_all_ranks(start_training: StartTraining, train: Train, tmp_path: Path) -> None:
    first = start_training("run", *LONG)
    wait_for_steps(first, tmp_path / "run", 2)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    second = train("run", *LONG, ranks=2, status=2)
    refused = (
        rf"dali-train train: run.dir \S+ is in use: pid {first.pids()[0]} on \S+ trains there. Wait for it, end it"
    )
    assert len(re.findall(refused, second)) == 2, second
    assert first.running() and (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0] == metrics
    # After SIGKILL the same line starts at once, whoever has not reaped the dead one yet.
    os.kill(first.pids()[0], signal.SIGKILL)
    train("run", "--run.max_steps", "1")
    assert not (tmp_path / "run" / FILE).exists()


def test_a_dead_holder_on_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    script = "import sys, os; from pathlib import Path; from dali_train.runtime.lock import RunLock; "
    script += "RunLock(Path(sys.argv[1]), print); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, tmp_path], check=False, cwd=REPOSITORY)
    assert (tmp_path / FILE).exists() and find_holder(tmp_path) is None
    lock = hold(tmp_path)
    assert find_holder(tmp_path) == lock.holder
    # The process id is in use again, by somebody else.
    pretend(tmp_path, pid=os.getppid(), pid_start=1)
    assert find_holder(tmp_path) is None
    lock._closing.set()


def test_a_holder_elsewhere_is_known_by_its_signs_of_life(tmp_path: Path) -> None:
    lock = hold(tmp_path, SLURM_JOB_ID="7")
    lock._closing.set()
    lock._thread.join()
    pretend(tmp_path, host="n9", machine="boot9 pid:[9]", pid=4)
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.3):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(ConfigError, match=r"run.dir \S+ is in use: pid 4 on n9, Slurm job 7 trains there"):
        hold(tmp_path)
    alive.set()
    thread.join()
    SILENT.clear()
    hold(tmp_path, SLURM_JOB_ID="8").release()
    assert SILENT == ["run.dir was last used by pid 4 on n9, Slurm job 7: waiting up to 3 s for a sign of life"]


def test_a_requeued_job_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "STALE_S", 300.0)
    lock = hold(tmp_path, SLURM_JOB_ID="7")
    lock._closing.set()
    pretend(tmp_path, host="n9", machine="boot9 pid:[9]")
    hold(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").release()
    # Nor one whose host was started again.
    hold(tmp_path)._closing.set()
    pretend(tmp_path, machine="another-boot pid:[9]")
    hold(tmp_path).release()


def test_a_lock_that_names_nobody_is_stale_in_time(tmp_path: Path) -> None:
    for content in (b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 100_000):
        (tmp_path / FILE).write_bytes(content)
        os.utime(tmp_path / FILE, (0, 0))
        hold(tmp_path).release()


def test_of_many_starts_at_once_one_wins(tmp_path: Path) -> None:
    """Over a dead holder's lock, too."""
    hold(tmp_path)._closing.set()
    pretend(tmp_path, pid=2**22 + 1)
    script = "import sys, time; from pathlib import Path; from dali_train.runtime.lock import RunLock; "
    script += "RunLock(Path(sys.argv[1]), print); print('mine', flush=True); time.sleep(6)"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY
        )
        for _ in range(6)
    ]
    assert sorted(start.communicate()[0] for start in starts) == [b""] * 5 + [b"mine\n"]


def test_a_holder_that_was_taken_for_dead_ends(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from dali_train.runtime.lock import RunLock; "
    script += "RunLock(Path(sys.argv[1]), print); print('mine', flush=True); time.sleep(60)"
    frozen = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    assert frozen.stdout is not None and frozen.stderr is not None
    assert frozen.stdout.readline() == b"mine\n"
    frozen.send_signal(signal.SIGSTOP)
    pretend(tmp_path, machine="boot9 pid:[9]", host="n9")  # as seen from another host
    time.sleep(0.1)
    hold(tmp_path)._closing.set()
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(30) == 1
    assert b"was taken over by pid" in frozen.stderr.read()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir \S+ cannot be written \(.*\): choose another"):
        hold(tmp_path / "file" / "run")
