"""One run directory, one run at a time; and a dead run does not keep the next one waiting."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dali_train.errors import ConfigError
from dali_train.runtime import lock as run_lock
from dali_train.runtime.lock import FILE, RunLock, find_holder
from tests.conftest import REPOSITORY, StartTraining, Train
from tests.helpers import LONG, wait_for_steps
from tests.ranks import patience


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of half a minute."""
    monkeypatch.setattr(run_lock, "STALE_S", 3.0)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.5)
    monkeypatch.setattr(run_lock, "_GRACE_S", 0.5)


def hold(directory: Path, say: Callable[[str], None] = print, **environ: str) -> RunLock:
    return RunLock(directory, say, environ)


def abandon(directory: Path, holder: dict[str, object], **environ: str) -> RunLock:
    """Leave a lock as a holder does that is killed at once; `holder`: what it says differently about itself."""
    lock = hold(directory, **environ)
    lock._closing.set()
    lock._thread.join()
    path = directory / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **holder}))
    return lock


def holder_process(directory: Path, *statements: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock, says "mine" and sleeps."""
    head = "import sys, os, time; from pathlib import Path; from dali_train.runtime import lock"
    body = ("lock.RunLock(Path(sys.argv[1]), print)", "print('mine', flush=True)", "time.sleep(60)")
    script = "; ".join((head, *statements, *body))
    return subprocess.Popen(
        [sys.executable, "-c", script, directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )


ELSEWHERE: dict[str, object] = {"host": "n9", "machine": "boot9 pid:[9]", "pid": 4}


def test_the_second_start_is_refused_on_all_ranks(start_training: StartTraining, train: Train, tmp_path: Path) -> None:
    first = start_training("run", *LONG)
    wait_for_steps(first, tmp_path / "run", 2)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    second = train("run", *LONG, ranks=2, status=2)
    refused = rf"run.dir \S+ is in use: pid {first.pids()[0]} on \S+, since 2\S+ \S+ trains there"
    assert len(re.findall(refused, second)) == 1, f"one rank says it: {second}"
    assert first.running() and (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0] == metrics
    # After SIGKILL the same line starts at once, though nobody has reaped the dead one yet.
    os.kill(first.pids()[0], signal.SIGKILL)
    train("run", "--run.max_steps", "1")
    assert not (tmp_path / "run" / FILE).exists()


def test_a_dead_holder_on_this_machine_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "STALE_S", 300.0)
    holder = holder_process(tmp_path)
    assert holder.stdout is not None and holder.stdout.readline() == "mine\n"
    holder.kill()
    holder.wait()
    assert (tmp_path / FILE).exists() and find_holder(tmp_path) is None
    killed, foreign = tmp_path / f".{FILE}.{'5e' * 16}", tmp_path / f".{FILE}.orig"  # the first, while taking over
    killed.touch()
    foreign.touch()
    lock = hold(tmp_path)
    assert find_holder(tmp_path) == lock.holder
    lock.release()
    assert [*tmp_path.iterdir()] == [foreign]
    for changed in (
        {"pid": os.getppid(), "pid_start": 1},  # its id is in use again, by another process
        {"machine": "another-boot pid:[9]"},  # this host was started again
    ):
        abandon(tmp_path, changed)
        assert find_holder(tmp_path) is None
        hold(tmp_path).release()
    # A requeued Slurm job, wherever it ran before.
    abandon(tmp_path, ELSEWHERE, SLURM_JOB_ID="7")
    hold(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").release()


@pytest.mark.thorough
def test_a_holder_elsewhere_is_known_by_its_signs_of_life(tmp_path: Path) -> None:
    abandon(tmp_path, ELSEWHERE, SLURM_JOB_ID="7")
    dead = threading.Event()

    def beat() -> None:
        while not dead.wait(0.3):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(ConfigError, match=r"run.dir \S+ is in use: pid 4 on n9, Slurm job 7, since \S+ \S+ trains"):
        hold(tmp_path)
    dead.set()
    thread.join()
    said: list[str] = []
    hold(tmp_path, said.append, SLURM_JOB_ID="8").release()
    assert len(said) == 1 and re.search("pid 4 on n9, Slurm job 7, since .* up to 3 s", said[0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 4000,
        b'{"pid": "x"}',
        b"\xff" * 100_000,
        ("pid", -1),
        ("pid", 2**70),
        ("job", "\x1b[2J"),
    ],
)
def test_odd_content_is_stale_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | tuple[str, object]
) -> None:
    monkeypatch.setattr(run_lock, "STALE_S", 0.5)
    if isinstance(content, bytes):
        (tmp_path / FILE).write_bytes(content)
    else:
        abandon(tmp_path, {**ELSEWHERE, content[0]: content[1]})
    said: list[str] = []
    hold(tmp_path, said.append).release()
    assert len(said) == 1 and said[0].isprintable()


def test_of_many_starts_at_once_one_wins(tmp_path: Path) -> None:
    """Over a dead holder's lock, too."""
    abandon(tmp_path, {"pid": 2**22 + 1})
    starts = [holder_process(tmp_path) for _ in range(6)]
    while sum(start.poll() is None for start in starts) > 1:
        time.sleep(0.1)
    for start in starts:
        start.kill()
    assert sorted(start.communicate()[0] for start in starts) == [""] * 5 + ["mine\n"]


@pytest.mark.thorough
@pytest.mark.parametrize("meanwhile", ["taken over", "finished", "nothing"])
def test_a_holder_that_was_frozen_for_too_long_ends(tmp_path: Path, meanwhile: str) -> None:
    """It neither trains beside the next run, nor takes the lock again when that has finished."""
    stale_s = 1.0 if meanwhile == "nothing" else 60.0
    frozen = holder_process(tmp_path, f"lock.STALE_S = {stale_s}", "lock.BEAT_S = 0.1")
    assert frozen.stdout is not None and frozen.stdout.readline() == "mine\n"
    frozen.send_signal(signal.SIGSTOP)
    if meanwhile == "nothing":
        time.sleep(1.2)
    else:
        path = tmp_path / FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **ELSEWHERE}))  # as another host sees it
        lock = hold(tmp_path)
        if meanwhile == "finished":
            lock.release()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    frozen.send_signal(signal.SIGCONT)
    output, errors = frozen.communicate(timeout=patience(30))
    assert frozen.returncode == 1 and not output
    reason = {"taken over": "it names pid", "finished": "the file is gone", "nothing": "it was not refreshed for"}
    assert f"run.lock is lost: {reason[meanwhile]}" in errors
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    if meanwhile == "taken over":
        lock.release()


@pytest.mark.parametrize("kind", ["file", "dangling link", "pipe"])
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "run"
    if kind == "file":
        directory.touch()
    else:
        directory.mkdir()
        os.mkfifo(directory / FILE) if kind == "pipe" else (directory / FILE).symlink_to("/nowhere")
    with pytest.raises(ConfigError, match=r"run.dir \S+/run cannot be written \(.*\): choose another"):
        hold(directory)
    assert find_holder(directory) is None
