"""What containers lack: processors within a quota, a home directory, standard streams, docstrings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dali_train.data.dataset.manifest import cache_directory
from dali_train.runtime.process import num_cores
from tests.conftest import REPOSITORY

V2, V1 = "0::/pod/one\n", "3:memory:/pod\n2:cpu,cpuacct:/pod/one\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (V2, {"pod/one/cpu.max": "200000 100000\n"}, 2),
        (V2, {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "250000 100000\n"}, 3),  # a part of one counts
        (V2, {"cpu.max": "50000 100000\n"}, 1),  # as a container sees its own
        (V2, {"pod/one/cpu.max": "max 100000\n"}, 8),
        (V2, {"pod/one/cpu.max": "nonsense\n"}, 8),
        (V2, {"pod/one/cpu.max": "6400000 100000\n"}, 8),
        (V1, {"cpu/pod/one/cpu.cfs_quota_us": "300000\n", "cpu/pod/one/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        (None, {}, 8),
    ],
)
def test_a_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str | None, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    if cgroup is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert num_cores(tmp_path) == cores


def _nobody(*_: object) -> None:
    raise KeyError("uid not found")


@pytest.mark.parametrize("home", [None, "/proc"])  # in which nobody can write, as in / for most users
def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.setattr("pwd.getpwuid", _nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert cache_directory() == tmp_path / "dali_train" / f"user-{os.getuid()}"
    assert cache_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "named"))
    assert cache_directory() == tmp_path / "named" / "dali_train"


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    script = f"exec {sys.executable} {command}"
    return subprocess.run(["sh", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("recipes >&-", 0),
        ("recipes 2>&-", 0),
        ("recipes <&- >&- 2>&-", 0),
        ("recipes nonsense 2>&-", 2),
        ("recipes nonsense >&- 2>&-", 2),
        ("recipes nonsense 2>/dev/full", 2),
        ("status . >/dev/full", 1),
    ],
)
def test_streams_that_are_closed_or_full_change_no_status(command: str, status: int) -> None:
    ran = _shell(f"-m dali_train {command}")
    assert ran.returncode == status and "Traceback" not in ran.stderr, ran.stderr


def test_a_closed_stream_is_no_other_file() -> None:
    """Whatever is opened next would get the descriptor, and what libraries print with it."""
    code = (
        "import os; from dali_train.__main__ import _open_missing_streams as f; f(); print(os.open('setup.py', 0) > 2)"
    )
    assert _shell(f"-c \"{code}; os.write(1, b'')\" 2>&-").stdout == "True\n"


def test_without_docstrings() -> None:
    ran = _shell("-OO -m dali_train recipes")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "PYTHONOPTIMIZE" in line and "DALI" in line
