"""Foreign files: what readers meet that is not what a run or a conversion wrote."""

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dali_train.errors import UserError
from dali_train.files import json_field, read_json
from tests.conftest import REPOSITORY
from tests.verification import fuzz

LIMIT = 1 << 20


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "Expecting value"),
        (b"[]", "an array instead of an object"),
        (b"7", "a whole number instead of an object"),
        (b'{"a": 1e400}', "the number 1e400"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": -Infinity}', "the number -Infinity"),
        (b'{"a": 1' + b"0" * 400 + b"}", "the number 10000"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "the number 10000"),
        (b'{"a": 18446744073709551616}', "the number 18446744073709551616"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
        (b'{"a": [' + b"[]," * 2_100_000 + b"[]]}", "objects and arrays"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a": "\\udc80"}', "not UTF-8"),
        (b'{"a": "' + b"x" * 9_000_000 + b'"}', "larger than 8,000,000 bytes"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_json_of_others_is_refused_in_one_line(content: bytes, what: str) -> None:
    with pytest.raises(UserError) as error:
        read_json(content, 8_000_000, name="its.json")
    assert str(error.value).startswith("its.json ") and what in str(error.value) and len(str(error.value)) < 200


def test_json_is_read_from_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "directory").mkdir()
    (tmp_path / "large").write_bytes(b" " * (LIMIT + 1))
    for name, what in {
        "fifo": "regular file",
        "device": "regular file",
        "directory": "directory",
        "large": "larger",
    }.items():
        with pytest.raises(UserError, match=rf"{tmp_path / name} .*{what}"):
            read_json(tmp_path / name, LIMIT)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none", LIMIT)


def test_fields_of_json_have_their_type() -> None:
    values = read_json(b'{"a": 1, "b": true, "c": "\\ud83d\\ude00", "d": NaN}', LIMIT, non_finite=True)
    assert json_field(values, "a", int) == json_field(values, "a", float) == 1 and json_field(values, "b", bool)
    assert json_field(values, "c", str) == "\U0001f600"
    for name, kind, what in (
        ("b", int, "true or false instead of a whole number"),
        ("c", dict, "text instead of an object"),
        ("e", str, "e is missing"),
    ):
        with pytest.raises(UserError, match=what):
            json_field(values, name, kind)


@pytest.mark.thorough
@pytest.mark.timeout(1800)  # some seconds of a core, which a busy machine gives late
def test_hundreds_of_damaged_files_of_each_kind_are_refused_or_read() -> None:
    command = [sys.executable, "tests/verification/fuzz.py", "--cases", "400", "--only", "cheap"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines() if " 400 " in line}
    assert rows.keys() == {name for name, target in fuzz.TARGETS.items() if target.is_cheap}


def test_faults_of_readers_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "status.json").write_text('{"step": 12}')
    monkeypatch.setattr(fuzz, "COMPUTE_S", 0.2)

    def spin(path: Path) -> None:
        while True:
            pass

    readers = {
        "raises": (lambda path: 1 // 0, "ZeroDivisionError at "),
        # Without a page of stacks.
        "crashes": (lambda path: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)), "ended by SIGSEGV"),
        "eats": (lambda path: bytearray(3 << 30), "MemoryError at "),
        "hangs": (spin, "no end after"),
        "is fine": (lambda path: path.read_bytes(), ""),
    }
    for name, (read, fault) in readers.items():
        monkeypatch.setitem(fuzz.TARGETS, name, fuzz.Target("status/*.json", read))
        tally = fuzz.Tally()
        fuzz.run_batch(name, 0, range(3), tmp_path, tmp_path / "work", tally)
        kinds = list(tally.faults)
        assert len(kinds) == bool(fault) and all(kind.startswith(fault) for kind in kinds), kinds
        assert tally.outcomes["FAULT"] == (3 if fault else 0)
