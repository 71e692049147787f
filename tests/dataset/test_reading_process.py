"""Another process reads files, and is gone when it is not needed any more."""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dali_train.data.dataset import reading_process
from dali_train.data.dataset.reading_process import NUM_THREADS, ReadingProcess
from dali_train.errors import DatasetError
from tests.conftest import REPOSITORY
from tests.helpers import has_ended, wait_until


def bytes_read(reading: ReadingProcess) -> int:
    """By read calls of its process."""
    if reading.process is None:
        return 0
    fields = dict(line.split(": ") for line in Path(f"/proc/{reading.process.pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def test_ranges_are_read(tmp_path: Path) -> None:
    """Of files with any name, by several threads at once, and by files that are open."""
    paths = [tmp_path / name for name in ("one", 'a "name" in\ntwo lines', os.fsdecode(b"not UTF-8 \xff"))]
    for path in paths:
        path.write_bytes(bytes(5_000_000))
    reading = ReadingProcess()
    reading.read_into_page_cache({})
    before = bytes_read(reading)
    ranges = {str(path): [(0, 100), (1_000_000, 4_000_000), (4_999_999, 5_000_000)] for path in paths}
    threads = [threading.Thread(target=reading.read_into_page_cache, args=(ranges,)) for _ in range(2 * NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = len(threads) * len(paths) * 3_000_101
    requests = len(threads) * 1000
    assert expected <= bytes_read(reading) - before < expected + requests


def test_contents_come_in_one_piece(tmp_path: Path) -> None:
    """By several threads at once; None where a file cannot be read."""
    rng = np.random.default_rng(0)
    contents = {tmp_path / str(number): rng.bytes(1_500_000) for number in range(3)}
    for path, content in contents.items():
        path.write_bytes(content)
    ranges = [(str(path), begin, end) for path in contents for begin, end in ((5, 9), (0, 1_500_000), (7, 7))]
    expected = b"".join(contents[Path(path)][begin:end] for path, begin, end in ranges)
    reading = ReadingProcess()
    with ThreadPoolExecutor(2 * NUM_THREADS) as pool:
        assert all(found == expected for found in pool.map(reading.fetch, [ranges] * 20))
    assert reading.fetch([]) == b""
    os.mkfifo(tmp_path / "fifo")
    for wrong in (tmp_path / "none", tmp_path / "fifo", tmp_path):
        assert reading.fetch([*ranges, (str(wrong), 0, 10)]) is None
    assert reading.fetch([(ranges[0][0], 1_499_999, 1_500_001)]) is None, "the file ends before"
    assert reading.fetch(ranges) == expected


def test_an_interrupt_mixes_up_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the cell may end while an answer comes, and the loader goes on."""
    for number in range(2):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 3_000_000)
    reading = ReadingProcess()
    assert reading.fetch([(str(tmp_path / "0"), 0, 9)]) == bytes(9)
    receive = reading_process._not_empty

    def interrupted(received: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(reading_process, "_not_empty", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reading.fetch([(str(tmp_path / "0"), 0, 3_000_000)])
    monkeypatch.setattr(reading_process, "_not_empty", receive)
    answers = []
    for _ in range(2 * NUM_THREADS):
        with contextlib.suppress(OSError):  # of the connection that was interrupted
            answers.append(reading.fetch([(str(tmp_path / "1"), 0, 1000)]))
    assert answers == [b"\1" * 1000] * (2 * NUM_THREADS - 2)


def test_faults_are_named(tmp_path: Path) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    short.write_bytes(bytes(100))
    whole.write_bytes(bytes(200))
    reading = ReadingProcess()
    with pytest.raises(
        DatasetError, match=rf"{short} was truncated while in use: it ends at byte 100, .* at byte 40\."
    ):
        reading.read_into_page_cache({str(whole): [(0, 200)], str(short): [(0, 30), (40, 101)]})
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        reading.read_into_page_cache({str(tmp_path / "none"): [(0, 1)]})
    reading.read_into_page_cache({str(short): [(0, 100)]})  # it goes on
    assert reading.process is not None
    reading.process.kill()
    for _ in range(NUM_THREADS + 1):
        with pytest.raises(OSError, match="has ended") as raised:
            reading.read_into_page_cache({str(whole): [(0, 200)]})
        assert raised.value.errno == errno.EPIPE


def test_more_files_than_it_may_open(tmp_path: Path) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))  # which the process inherits
from dali_train.data.dataset.reading_process import ReadingProcess
reading = ReadingProcess()
for _ in range(2):
    reading.read_into_page_cache({{f"{tmp_path}/{{number}}": [(0, 10)] for number in range(50)}})
"""
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes(10))
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("end", ["del reading", "pass", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_with_its_owner(end: str) -> None:
    """Signals that are sent to all processes of a run do not end it."""
    program = f"""
import os, signal, sys, time
from dali_train.data.dataset.reading_process import ReadingProcess
reading = ReadingProcess()
reading.read_into_page_cache({{}})
print(reading.process.pid, flush=True)
sys.stdin.readline()
reading.read_into_page_cache({{}})
{end}
"""
    command = [sys.executable, "-c", program]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert owner.stdin is not None and owner.stdout is not None
    pid = int(owner.stdout.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    owner.communicate("\n")
    assert owner.returncode == {"raise SystemExit(3)": 3}.get(end, -signal.SIGKILL if "SIGKILL" in end else 0)
    wait_until(has_ended, pid)


def test_an_answer_that_finds_nobody_is_no_fault(tmp_path: Path) -> None:
    """A run may end while images are read ahead."""
    (tmp_path / "file").write_bytes(bytes(5_000_000))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-S", str(reading_process._PROGRAM), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    ours.sendall(json.dumps([[str(tmp_path / "file"), 0, 5_000_000]]).encode() + b"\n")
    ours.recv(10)
    ours.close()
    assert process.communicate() == (None, b"")
    assert process.returncode == 0


def test_it_ends_with_its_object() -> None:
    reading = ReadingProcess()
    reading.read_into_page_cache({})
    assert reading.process is not None
    pid = reading.process.pid
    del reading
    gc.collect()
    assert has_ended(pid)
