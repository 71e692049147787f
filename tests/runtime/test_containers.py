"""What containers lack: processors within a quota, a home directory, standard streams, docstrings, UTF-8, /dev/shm."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dali_train.data.dataset.manifest import Manifest, cache_directory
from dali_train.errors import explain
from dali_train.runtime.process import num_cores
from tests.conftest import REPOSITORY, jpeg, photograph

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


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module", params=["ASCII", "ISO-8859-1"])
def locale(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an encoding that is not UTF-8."""
    if request.param == "ASCII":
        return ASCII
    places = tmp_path_factory.mktemp("locales")
    words = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", places / "en_US.ISO-8859-1"]
    if shutil.which("localedef") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no source of locales")
    return {"LOCPATH": str(places), "LC_ALL": "en_US.ISO-8859-1"}


@pytest.mark.parametrize("python", ["-m dali_train", "-E -m dali_train"])
def test_names_are_utf8_in_every_locale(tmp_path: Path, locale: dict[str, str], python: str) -> None:
    def said(*words: str | bytes | Path) -> tuple[int, str]:
        command = [sys.executable, *python.split(), "data", *words]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **locale}
        ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, check=False)
        return ran.returncode, (ran.stdout + ran.stderr).decode()

    photographs, out, index = tmp_path / "größe", tmp_path / "däta", tmp_path / "ïndex"
    for number in range(8):
        path = photographs / ("über", "café")[number % 2] / f"ß{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(photograph(number, 40, 36)))
    assert said("convert", "folder", "--train", photographs, "--out", out, "--workers", "1")[0] == 0
    assert Manifest.read(out).class_names == ("café", "über")
    assert said("index", photographs, "--out", index, "--workers", "1")[0] == 0
    status, text = said("verify", index)
    assert status == 0 and "8 images" in text
    status, text = said("index", tmp_path / "fehlt-ö", "--out", index)
    assert status == 2 and f"{tmp_path}/fehlt-ö" in text
    photographs.rename(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    status, text = said("index", bytes(tmp_path) + b"/\xff", "--out", tmp_path / "other")
    assert status == 2 and "\\xff: this name is not UTF-8" in text


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "Read-only file system"),
        pytest.param(
            "mount -t tmpfs -o size=4k tmpfs /dev/shm; head -c 4096 /dev/zero > /dev/shm/full",
            "No space left on device",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_semaphores_need_shared_memory(prepare: str, reason: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts are not allowed")
    code = "from dali_train.extras.local_launch import launch_locally; launch_locally(int, num_processes=2)"
    script = f"{prepare} && exec {sys.executable} -c '{code}'"
    words = ["unshare", "-m", "sh", "-c", script]
    ran = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    line = ran.stderr.splitlines()[-1]
    assert all(word in line for word in ("ConfigError", "/dev/shm", reason, "--shm-size", "torchrun")), ran.stderr


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error (run with NCCL_DEBUG=INFO for details)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-JQlwBR (size 33030528), error: No space left on device (28)
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system (in test_an_error_without_a_file, "),
        (OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "set TMPDIR to"),
        (
            RuntimeError(NCCL),
            "/dev/shm/nccl-JQlwBR (size 33030528), error: No space left on device (28): give /dev/shm",
        ),
    ],
)
def test_an_error_without_a_file(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    monkeypatch.setattr("dali_train.errors._is_users", lambda file: False)  # as this file is
    with pytest.raises(type(error)) as raised:
        raise error
    explained = explain(raised.value)
    assert explained is not None and words in explained[0] and "\n" not in explained[0]
