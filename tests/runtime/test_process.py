"""The end of a process: nothing is lost but the time that freeing every object takes."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, ctypes, sys, threading, time
from dali_train.runtime.process import end

class Freed:
    def __del__(self):
        print("freed", end=" ")

freed = Freed()
atexit.register(print, "exit function", end=" ")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", end=" "))).start()
ctypes.CDLL(None).printf(b"library ")
end(7)
"""


@pytest.mark.parametrize("observer", [[], ["-m", "cProfile", "-o", "profile"]])
def test_threads_exit_functions_and_buffers_come_before_the_end(observer: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, *observer, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == (0 if observer else 7) and not ended.stderr  # cProfile keeps the status to itself
    assert {"library", "exit", "function", "thread"} <= {*ended.stdout.split()}
    assert ended.stdout.index("thread") < ended.stdout.index("exit function")
    assert ("freed" in ended.stdout.split()) == bool(observer)
    assert (tmp_path / "profile").exists() == bool(observer)
