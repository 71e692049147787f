"""What file systems lack: each command works without it, or says in one line which file needs what.

A preloaded library (tests/refusing.c) makes calls fail below one directory, as exFAT, SMB, NFS, FUSE and FAT do.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY, TINY_CONFIG, jpeg, photograph

pytestmark = pytest.mark.thorough

SOURCE = REPOSITORY / "tests" / "refusing.c"
ALL = "symlink fsync flock mmap times"  # for each of which there is something else


class Said(NamedTuple):
    status: int
    text: str


def drive(directory: Path) -> None:
    """Run every command below `directory`, where the file system lacks something; print what each said."""
    from dali_train.cli import main

    said: dict[str, Said] = {}

    def command(name: str, *words: str, without: str = ALL) -> None:
        os.environ["REFUSE"] = without
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main(list(words))
        said[name] = Said(status, output.getvalue())

    poor, photographs = directory / "poor", str(directory / "photographs")
    folder = ("data", "convert", "folder", "--train", photographs, "--workers", "1", "--out")
    train = ("train", "--config", str(directory / "config.py"), "--run.max_steps")
    run = ("--run.dir", str(poor / "run"))
    command("convert", *folder, str(poor / "converted"))
    command("index", "data", "index", photographs, "--workers", "1", "--out", str(poor / "index"))
    command("links", "data", "index", str(directory / "dataset"), "--out", str(poor / "linked"))
    command("train", *train, "2", *run, "--run.checkpoint_every_steps", "1")
    command("resume", *train, "3", *run)
    command("eval", "eval", str(poor / "run"), "--checkpoint", "newest")
    command("path", *train, "4", "--run.dir", str(poor / "next"), "--run.resume", f"{poor}/run/checkpoints/newest")
    command("local copy", *train, "1", "--run.dir", str(directory / "a"), "--data.local_copy", str(poor / "copies"))
    for number in (1, 2):
        copied = ("--run.dir", str(directory / f"copied{number}"), "--data.local_copy", str(poor / "copies"))
        command(f"copy {number}", *train, "1", *copied, without="times mmap fsync")
    command("doctor", "doctor", "--config", str(directory / "config.py"), "--run.dir", str(poor / "examined"))
    command("rename", *train, "1", "--run.dir", str(poor / "c"), without="rename")
    print(json.dumps(said))


@pytest.fixture(scope="module")
def said(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Said]]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for tests/refusing.c")
    directory = tmp_path_factory.mktemp("lacking")
    library = directory / "refusing.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    shutil.copytree(dataset, directory / "poor" / "dataset")
    (directory / "dataset").symlink_to(dataset)
    (directory / "config.py").write_text(TINY_CONFIG.format(root=str(directory / "poor" / "dataset")))
    for image in range(8):
        path = directory / "photographs" / f"class{image % 2}" / f"{image}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(photograph(image, 40, 36)))
    environment = {**os.environ, "LD_PRELOAD": str(library), "REFUSE_BELOW": str(directory / "poor"), "REFUSE": ALL}
    code = f"from pathlib import Path; from {__name__} import drive; drive(Path({str(directory)!r}))"
    words = [sys.executable, "-c", code]
    ran = subprocess.run(words, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    yield {name: Said(*values) for name, values in json.loads(ran.stdout.splitlines()[-1]).items()}
    shutil.rmtree(directory)


@pytest.mark.parametrize("name", ["convert", "index", "train", "resume", "eval", "path", "copy 1", "copy 2"])
def test_goes_on(said: dict[str, Said], name: str) -> None:
    assert said[name].status == 0, said[name].text


def test_a_conversion_without_locks_says_so(said: dict[str, Said]) -> None:
    for name in ("convert", "index"):
        assert "no locks (flock: No locks available)" in said[name].text


def test_checkpoints_are_found_without_links(said: dict[str, Said]) -> None:
    assert "step 2" in said["resume"].text
    assert "step-00000003" in said["eval"].text, said["eval"].text


def test_a_copy_with_coarse_times_is_a_copy(said: dict[str, Said]) -> None:
    assert "copying" in said["copy 1"].text
    assert "copying" not in said["copy 2"].text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("links", ("poor/linked", "symbolic links", "--out")),
        ("local copy", ("poor/copies", "no locks", "use a directory")),
        ("rename", ("poor/c/", "replace a file by a rename")),
    ],
)
def test_what_has_no_other_way_is_one_line(said: dict[str, Said], name: str, words: tuple[str, ...]) -> None:
    assert said[name].status in (1, 2)
    assert "Traceback" not in said[name].text
    line = said[name].text.splitlines()[-1]
    assert all(word in line for word in words), said[name].text


def test_doctor_says_what_is_missing(said: dict[str, Said]) -> None:
    (line,) = (line for line in said["doctor"].text.splitlines() if "run directory" in line)
    assert line.split()[0] != "fail", line
    assert "none of symbolic links, fsync of a directory, flock" in line
