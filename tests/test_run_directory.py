"""A run directory in which something is of another kind than the run writes: one sentence, no traceback, no waiting."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.cli import main
from dali_train.commands.diff import compare_losses
from dali_train.errors import ConfigError
from dali_train.runtime.status import read_status

from .conftest import StartTraining, Train
from .helpers import write_run


def test_a_directory_in_the_place_of_a_file(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.json").mkdir(parents=True)
    printed = train("run", "--run.max_steps", "1", status=1)
    assert (
        f"dali-train train: {tmp_path / 'run'}" in printed
        and "Is a directory" in printed
        and "Traceback" not in printed
    )


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(ConfigError, match=r"status.json is not the status of a run \(.*is not a regular file"):
        read_status(tmp_path)


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


TABLES = "predictions/step-00000001"
CRAFTED = [
    ("config.json", Path.unlink),
    ("config.json", _directory),
    ("config.json", _pipe),
    ("config.json", _text(b"[1]")),
    ("config.json", _text(b"\xff{")),
    ("config.json", _text(b"[" * 100_000)),
    ("config.json", _text(b'{"data": {"root": 5}, "run": {}}')),
    ("environment.json", _pipe),
    ("environment.json", _text(b'{"host_cores": "many"}')),
    ("environment.json", _text(b"{")),
    ("metrics.jsonl", _directory),
    ("metrics.jsonl", _pipe),
    ("metrics.jsonl", _text(b'{"event": "train", "step": "1"}\n{"note": 1}\n{"event": "end", "st')),
    ("metrics.jsonl", _text(b'{"event": "train", "step": 1, "epoch": 1%s, "loss": 1, "step_s": 1}\n' % (b"0" * 400))),
    ("status.json", _pipe),
    ("status.json", _text(b'{"state": "finished", "step": "7"}')),
    (f"{TABLES}/predictions.csv", _text(b"image,truth,guess,score,score of truth\n../../x,a,b,1,1\n")),
    (f"{TABLES}/predictions.csv", _text(b"image,truth\n1\n")),
    (f"{TABLES}/classes.csv", _text(b"class,images,accuracy\na,\xff,1\n")),
    (f"{TABLES}/confusion.csv", _text(b"truth,a,b\na,1,2\n")),
    (f"{TABLES}/confused_pairs.csv", _text(b'truth,guess,images\n"a\n')),
]
COMMANDS = [["status"], ["report"], ["diff"], ["eval"], ["predict"], ["export"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_a_run_did_not_write(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command on run directories with a foreign, torn or wrongly typed file: it does without, or refuses in one
    sentence that names the file; it neither waits nor ends in a traceback."""
    refused = {}
    for number, (name, craft) in enumerate(CRAFTED):
        run = write_run(tmp_path / str(number), 3, ended_at=3)
        craft(run / name)
        status = main([*command, str(run), *([str(run)] if command == ["diff"] else [])])
        error = capsys.readouterr().err
        assert status in (0, 1, 2) and len(error.splitlines()) == (status == 2), error
        if status == 2 and (name in error or str(run / name) in error):
            refused[number] = name
        shutil.rmtree(run)
    expected = {
        "status": {"status.json"},
        "report": {
            "config.json",
            "environment.json",
            "metrics.jsonl",
            *(name for name, _ in CRAFTED if TABLES in name),
        },
    }
    assert set(refused.values()) == expected.get(command[0], {"config.json"})


def test_lines_that_no_run_wrote_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the report and from a comparison, in which NaN is NaN."""
    names = ("loss", "lr", "grad_norm", "images_per_second", "trust_ratio_median", "process_memory_gb", "own")
    nan = {"event": "train", "step": 1, "epoch": 0.4, "step_s": 1.0} | dict.fromkeys(names, float("nan"))
    run = write_run(tmp_path / "run", events=[nan])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "train", "step": 9}\n{"note": 1}\nnonsense\n\xff\n{"event": "eval", "epoch": "x"}\n')
    assert [event["step"] for event in RunDirectory(run).events] == [0, 1]
    assert main(["report", str(run)]) == 0
    assert compare_losses(RunDirectory(run), RunDirectory(run)) == ""


BROKEN_END = """
from dataclasses import replace
from pathlib import Path
from dali_train.hooks import Hook

class Break(Hook):
    required = True

    def start(self, record):
        self.directory = record.directory
        self.rank = record.launch.rank

    def step(self, record):
        if self.rank == record.launch_size - 1:
            for name in ("status.json", "run.lock"):
                (self.directory / name).unlink()
                (self.directory / name).mkdir()
            raise ValueError("the first cause")

    def end(self, record):
        raise OSError("the second one")

config = replace(config, hooks=replace(config.hooks, user=(Break,)))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_cause_is_never_hidden(
    start_training: StartTraining, tiny_config: Path, tmp_path: Path, ranks: int
) -> None:
    """Not by a status and a lock that cannot be written any more, a hook that fails at the end, or other ranks."""
    config = tmp_path / "broken-end.py"
    config.write_text(tiny_config.read_text() + BROKEN_END.replace("record.launch_size", str(ranks)))
    processes = start_training("run", config=config, ranks=ranks)
    assert processes.wait() == [1] * ranks
    output = processes.log.read_text()
    errors = [line for line in output.splitlines() if re.match(r"\w*Error: |dali-train train: ", line)]
    assert "ValueError: the first cause" in errors
    assert all("the first cause" in line for line in errors), output
    assert "after the run had failed: OSError: the second one" in output
    assert "after the run had failed: IsADirectoryError" in output and "run.lock could not be removed" in output
    assert (tmp_path / "run" / "run.lock").is_dir()
