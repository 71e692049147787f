"""A run directory in which something is of another kind than the run writes: one sentence, no traceback, no waiting."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.cli import main
from dali_train.errors import ConfigError
from dali_train.extras.report.diff import compare_losses
from dali_train.extras.report.runs import ReportedRun
from dali_train.runtime.status import read_status
from tests.conftest import StartTraining, Train
from tests.helpers import extended, write_run


def test_a_directory_in_the_place_of_a_file(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.json").mkdir(parents=True)
    printed = train("run", "--run.max_steps", "1", status=1)
    assert (
        f"dali-train train: {tmp_path / 'run'}" in printed
        and "Is a directory" in printed
        and "Traceback" not in printed
    )


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _text(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def _link(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("nowhere")


DEEP, HUGE, ESCAPES = b"[" * 100_000, b"9" * 400, b"\\u001b[2J\\u0000"
TABLES = "predictions/step-00000001"
CRAFTED = [
    ("config.json", Path.unlink),
    ("config.json", _directory),
    ("config.json", _pipe),
    *(("config.json", _text(text)) for text in (b"", b"[1]", b"{}", b"\xff{", DEEP)),
    ("config.json", _text(b'{"data": {"root": 5}, "run": {}}')),
    ("config.json", _text(b'{"run": {"epochs": %s, "dir": "%s"}}' % (HUGE, ESCAPES))),
    ("environment.json", _directory),
    ("environment.json", _pipe),
    *(("environment.json", _text(text)) for text in (b"{", b"[]", DEEP, b'{"host_cores": "many"}')),
    ("metrics.jsonl", _directory),
    ("metrics.jsonl", _pipe),
    ("metrics.jsonl", _text(b'{"event": "train", "step": "1"}\n{"note": 1}\n{"event": "end", "st')),
    ("metrics.jsonl", _text(b'{"event": "train", "step": 1, "epoch": %s, "loss": 1, "step_s": 1}\n' % HUGE)),
    ("metrics.jsonl", _text(b'{"event": "end", "step": 1, "epoch": true, "seconds": [], "error": 0}\n' + DEEP)),
    ("metrics.jsonl", _text(b'{"event": "end", "step": 1, "epoch": 1, "seconds": {}, "error": "%s"}\0' % ESCAPES)),
    ("status.json", _pipe),
    *(("status.json", _text(text)) for text in (b"[]", DEEP, b'{"state": "finished", "step": "7"}')),
    ("status.json", _text(b'{"state": "failed", "step": 1, "reason": "%s"}' % ESCAPES)),
    ("status.json", _text(b'{"state": "stopped", "step": 1, "best_top1": %s}' % HUGE)),
    ("run.lock", _directory),
    ("run.lock", _pipe),
    ("run.lock", _link),
    ("checkpoints", _text(b"")),
    ("checkpoints", _link),
    ("checkpoints/newest", _link),
    ("checkpoints/newest/manifest.json", _text(b"{}")),
    ("checkpoints/step-99999999999999999999", _text(b"")),
    (f"{TABLES}/predictions.csv", _text(b"image,truth,prediction,score,score of truth\n../../x,a,b,1,1\n")),
    (f"{TABLES}/predictions.csv", _text(b"image,truth\n1\n")),
    (f"{TABLES}/classes.csv", _text(b"class,images,accuracy\na,\xff,1\n")),
    (f"{TABLES}/classes.csv", _text(b"class,images,accuracy\n%s,1,1\n" % (b"a" * 200_000))),
    (f"{TABLES}/confusion.csv", _text(b"truth,a,b\na,1,2\n")),
    (f"{TABLES}/confusion.csv", _text(b"truth,a\na,%s\n" % HUGE)),
    (f"{TABLES}/confused_pairs.csv", _text(b'truth,prediction,images\n"a\n')),
]
COMMANDS = [["status"], ["report"], ["diff"], ["eval"], ["predict"], ["export"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_a_run_did_not_write(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command on run directories with a foreign, torn or wrongly typed file: it does without, or refuses in one
    sentence that names the file; it neither waits nor ends in a traceback, and a terminal gets nothing but text."""
    assert len(CRAFTED) >= 40
    monkeypatch.chdir(tmp_path)  # here is no dataset, whose samples `diff` would recompute
    refused = {}
    for number, (name, craft) in enumerate(CRAFTED):
        run = write_run(tmp_path / str(number))
        craft(run / name)
        status = main([*command, str(run), *([str(run)] if command == ["diff"] else [])])
        printed = capsys.readouterr()
        assert status in (0, 1, 2) and (status == 2) <= len(printed.err.splitlines()) <= 1, printed.err
        assert "\x1b" not in printed.out + printed.err and "\0" not in printed.out + printed.err
        if status == 2 and (str(run / name) in printed.err or (Path(name).suffix and name in printed.err)):
            refused[number] = name
        shutil.rmtree(run)
    expected = {
        "status": {"status.json"},
        "diff": {"config.json", "environment.json"},
        "report": {
            "config.json",
            "environment.json",
            "metrics.jsonl",
            *(name for name, _ in CRAFTED if TABLES in name),
        },
    }
    expected |= {name: {"config.json", "checkpoints"} for name in ("eval", "predict", "export")}
    assert set(refused.values()) == expected.get(command[0], {"config.json"})


def test_a_dataset_beside_a_run_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings have paths as they were from where the run was started; and the run may be copied with its dataset."""
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("runs/a"), changes={"data.root": "data/photos"})
    Path("data/photos").mkdir(parents=True)
    assert RunDirectory(run).config.data.root == "data/photos"
    monkeypatch.chdir("/")
    assert RunDirectory(tmp_path / "runs" / "a").config.data.root == str(tmp_path / "data" / "photos")
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert RunDirectory(tmp_path / "copy/runs/a").config.data.root == str(tmp_path / "copy" / "data" / "photos")
    shutil.move(tmp_path / "runs", tmp_path / "experiments")
    assert RunDirectory(tmp_path / "experiments" / "a").config.data.root == "data/photos"


def test_what_is_no_status_is_called_so(tmp_path: Path) -> None:
    unknown = (b'"odd", "step": 1', b'[], "step": 1', b'"failed", "step": 1, "reason": 3', b'"running"')
    for content in (b"", b"{}", b"\xff", b" " * 200_000, *(b'{"state": %s}' % fields for fields in unknown)):
        (tmp_path / "status.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"status.json is not the status of a run \(.*\): move it away"):
            read_status(tmp_path)


def test_lines_that_no_run_wrote_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the report and from a comparison, in which NaN is NaN."""
    names = ("loss", "lr", "grad_norm", "images_per_second", "trust_ratio_median", "process_memory_gb", "own")
    nan = {"event": "train", "step": 1, "epoch": 0.4, "step_s": 1.0} | dict.fromkeys(names, float("nan"))
    run = write_run(tmp_path / "run", events=[nan])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "train", "step": 9}\n{"note": 1}\nnonsense\n\xff\n{"event": "eval", "epoch": "x"}\n')
    assert [event["step"] for event in RunDirectory(run).events] == [0, 1]
    assert main(["report", str(run)]) == 0
    assert compare_losses(ReportedRun(run), ReportedRun(run)) == ""


BROKEN_END = """
import ctypes
import os
import signal
import sys
from dali_train.errors import DatasetError

class Break(Hook):
    required = True

    def start(self, record):
        self.directory = record.directory
        self.is_last = record.launch.rank == record.launch.world_size - 1

    def step(self, record):
        if self.is_last:
            BREAK_DIRECTORY
            FIRST_CAUSE

    def end(self, record):
        SECOND_CAUSE
"""
IN_THE_WAY = """for name in ("status.json", "run.lock"):
                (self.directory / name).unlink()
                (self.directory / name).mkdir()"""
READ_ONLY = """for directory in (self.directory, self.directory / "checkpoints"):
                directory.chmod(0o555)
            no_privileges = (ctypes.c_uint32 * 6)()  # root's, for which no permission counts
            ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), no_privileges)"""
ERROR, MISTAKE = "raise ValueError('the first cause')", "raise DatasetError('the first cause')"
INTERRUPTS = "[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOST = r"dali-train train: lost touch with other ranks. Missing or late: rank 1 on .*"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "breaks", "first", "second", "statuses", "says"),
    [
        pytest.param(1, IN_THE_WAY, ERROR, "sys.exit(0)", [1], [r"ValueError: the first cause"], id="error"),
        pytest.param(
            2,
            IN_THE_WAY,
            ERROR,
            "os.stat('/0')",
            [1, 1],
            [r"ValueError: the first cause", LOST + "the first cause"],
            id="error-of-one-rank",
        ),
        pytest.param(
            2,
            IN_THE_WAY,
            MISTAKE,
            "pass",
            [1, 2],
            [r"dali-train train: the first cause", LOST + "the first cause"],
            id="mistake-of-one-rank",
        ),
        pytest.param(2, "pass", KILL, "sys.exit(0)", [1, -9], [LOST + "silent for"], id="killed"),
        pytest.param(
            1,
            IN_THE_WAY,
            "sys.exit(0)",
            "sys.exit(0)",
            [1],
            [r"dali-train train: \S+, line \d+, in step called sys.exit\(0\) during the run"],
            id="exit",
        ),
        pytest.param(
            1, IN_THE_WAY, INTERRUPTS, "os.stat('/0')", [130], ["dali-train train: ended without saving"], id="Ctrl-C"
        ),
        pytest.param(
            1,
            READ_ONLY,
            "pass",
            "os.stat('/0')",
            [1],
            [r"dali-train train: \S+/run/status.json: Permission denied"],
            id="read-only",
        ),
    ],
)
def test_the_first_cause_is_never_hidden(
    start_training: StartTraining,
    tiny_config: Path,
    tmp_path: Path,
    ranks: int,
    breaks: str,
    first: str,
    second: str,
    statuses: list[int],
    says: list[str],
) -> None:
    """Not by a status and a lock that cannot be written any more, a hook that fails at the end, or other ranks; and
    each is said once."""
    text = BROKEN_END.replace("BREAK_DIRECTORY", breaks).replace("FIRST_CAUSE", first).replace("SECOND_CAUSE", second)
    processes = start_training("run", "--run.max_steps", "1", config=extended(tiny_config, text), ranks=ranks)
    assert processes.wait() == statuses
    output = processes.log.read_text()
    errors = [line for line in output.splitlines() if re.match(r"\w+(Error|Exit|Interrupt)\b|dali-train train: ", line)]
    for expected in says:
        assert len([line for line in errors if re.match(expected, line)]) == 1, output
    assert len(errors) == len(says), output
    if "pass" not in (breaks, second):
        assert f"after the run had failed: {'SystemExit' if 'exit' in second else 'FileNotFoundError'}" in output
    if breaks == IN_THE_WAY:
        assert "after the run had failed: IsADirectoryError" in output
        assert ("run.lock could not be removed" in output) and (tmp_path / "run" / "run.lock").is_dir()
