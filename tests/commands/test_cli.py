"""The commands as a user types them: overrides, ColossalAI's options, plan, eval, and what mistakes look like."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dali_train.cli import main
from dali_train.commands import boundary
from dali_train.commands.boundary import importing, run_command
from tests.conftest import REPOSITORY
from tests.ranks import patience

B16 = str(REPOSITORY / "configs" / "vit-b16.py")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Commands leave signals ignored at their end, which processes inherit."""
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", B16, "--world-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "accumulation   32 micro-batches of 256 per rank: 32,768 images per step" in printed
    assert "steps          11,730 in 300 epochs" in printed
    assert re.search(
        r"rank's memory +\d+\.\d\d GB weights, gradients and optimizer, about \d+\.\d\d GB activations", printed
    )
    rates = {float(epoch): float(rate) for epoch, rate in re.findall(r"epoch +(\S+) +step +\S+ +(\S+)", printed)}
    assert rates == {0: 0.000119205, 75: 0.0090596, 150: 0.018, 225: 0.009, 300: 0}


def test_plan_of_a_dataset_and_of_a_number(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = ["--loss.class_weights", "0,2", "3,0.5", "--loss.positive_weight", "balanced"]
    assert main(["plan", "--config", str(tiny_config), "--loss.name", "binary-cross-entropy", *weights]) == 0
    printed = capsys.readouterr().out
    assert "images         50 in 5 classes" in printed
    assert re.search(r"class weights .* 2 \(10 images\), .* 0\.5 \(10\), .* 1 \(10\)\npositives ", printed)
    assert printed.count(" 4 (10") == 5  # of 50 images 40 are of another class
    assert main(["plan", "--config", str(tiny_config), "--num-images", "320"]) == 0
    assert "steps          40 in 4 epochs, 10.00 per epoch" in capsys.readouterr().out
    assert main(["plan", "--config", str(tiny_config), "--num-images", "0"]) == 2
    assert "--num-images is 0: use a number over 0" in capsys.readouterr().err


def test_plan_shows_what_is_in_no_config(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """timm's arguments of the optimizer, the peak of a scaled rate, an epoch's time, and weights that do not exist."""
    words = ["--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--optimizer.scale_lr", "linear"]
    weights = ["--model.weights", "runs/tomorrow/model.safetensors"]
    assert main(["plan", "--config", str(tiny_config), *words, *weights]) == 0
    printed = capsys.readouterr().out
    assert "optimizer      sgd: lr 0.1, momentum 0.9," in printed and "nesterov true" in printed
    assert "peak 0.0125: optimizer.lr 0.1 is for a global batch of 256, scale_lr linear" in printed
    assert re.search(r"time +at least \d+.* per epoch, .* in all, on .* in fp32", printed)
    assert re.search(r"products +this machine's CPU takes fp32 [\d.]+ m?s, bf16 [\d.]+ m?s, fp16 [\d.]+ m?s", printed)
    assert "weights        runs/tomorrow/model.safetensors does not exist yet" in printed
    assert main(["plan", "--config", str(tiny_config), "--data.train_size", "64"]) == 2
    assert "set data.train_size 32, or build the model for 64 pixels with --model.kwargs.img_size 64" in (
        capsys.readouterr().err
    )


def test_plan_tells_the_order_and_idle_ranks_in_words(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(tiny_config), "--num-images", "1000000", "--data.shuffle"]
    assert main([*words, "full", "--world_size", "3"]) == 0
    printed = capsys.readouterr().out
    assert "order          full: any image may follow any other" in printed
    assert "ranks          3: 11.1% idle; 4 would have none" in printed
    assert "accumulation   3 or 2 micro-batches of 4 per rank: 32 images per step" in printed
    assert main([*words, "block"]) == 0  # 8 micro-batches x 8 x 128 images of 110 kB
    printed = capsys.readouterr().out
    assert (
        "order          block: 8 blocks of 128 images are mixed in each of a step's 8 micro-batches; about 0.9 GB"
        in printed
    )


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--help"], "Train image classifiers at large batch sizes"),
        (["predict", "--help"], "Classify images"),
        (["export", "--help"], "Write a run's model"),
        (["diff", "--help"], "Show where two runs differ"),
        (["prove", "--help"], "Check a run's record"),
        (["train", "--help"], "Every setting of the config can be overridden"),
        (["train", "--config", B16, "--help"], "Images per optimizer step, over all ranks"),
        (["eval", "--help"], "Evaluate a run's checkpoint"),
        (["doctor", "--help"], "usage: dali-train doctor"),
        (["--version"], "dali-train 0."),
        (["trian"], "there is no 'trian'"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == (2 if arguments == ["trian"] else 0)
        printed = capsys.readouterr()
        assert message in " ".join((printed.out + printed.err).replace("│", " ").split())


def raising(error: BaseException) -> Callable[[], int]:
    """A command that fails in the standard library, as with a fault of its input, rather than in the code of a user,
    which this file is to the boundary."""
    namespace = {"error": error}
    exec(compile("def work():\n    raise error", json.__file__, "exec"), namespace)
    return namespace["work"]  # type: ignore[return-value]


FAULTS: list[tuple[BaseException, int, str]] = [
    (OSError(28, "No space left on device", "/disk/file"), 1, "/disk/file: No space left on device"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
    (ConnectionError("the store answers 503"), 1, "the store answers 503"),
    (MemoryError(), 1, "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), 1, "for 4 bytes more"),
    (RecursionError("maximum recursion depth exceeded"), 1, "nested too deeply"),
    (UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "invalid"), 1, r"b'caf\xe9'"),
    (UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates"), 1, r"'caf\udce9'"),
    (KeyboardInterrupt(), 130, "stopped with Ctrl-C"),
    (KeyboardInterrupt("ended without saving"), 130, "ended without saving"),
]


@pytest.mark.parametrize(("error", "status", "message"), FAULTS, ids=[repr(error) for error, _, _ in FAULTS])
def test_a_fault_of_input_is_one_line(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("dali-train plan", raising(error)) == status
    printed = capsys.readouterr().err
    assert printed.startswith("dali-train plan: ") and message in printed and printed.count("\n") == 1


def test_a_bug_shows_its_traceback() -> None:
    def users_work() -> int:
        raise OSError("in the user's own code")

    with pytest.raises(OSError, match="own code"):
        run_command("dali-train train", users_work)
    with pytest.raises(OSError, match="Bad file descriptor"):
        run_command("dali-train train", raising(OSError(9, "Bad file descriptor")))
    with pytest.raises(ValueError, match="a bug"):
        run_command("dali-train train", raising(ValueError("a bug")))


def test_ctrl_c_that_a_library_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("the checkpoint is incomplete")
    error.__cause__ = KeyboardInterrupt()
    assert run_command("dali-train eval", raising(error)) == 130
    assert capsys.readouterr().err == "dali-train eval: stopped with Ctrl-C\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_torch_is_imported(number: signal.Signals, status: int, plain_run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dali_train", "export", plain_run], stderr=subprocess.PIPE, text=True
    )
    while "/libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, printed = process.communicate(timeout=patience(60))
    assert process.returncode == status
    (line,) = (line for line in printed.splitlines() if not line.startswith("importing"))  # for over ten seconds
    assert line.startswith("dali-train export: stopped with ")


@pytest.mark.parametrize(
    ("is_terminal", "local_rank", "expected"),
    [
        (True, "0", r"(\rimporting torch and DALI: 0 s)+\r +\r"),
        (False, "0", r"(importing torch and DALI: 0 s\n)+"),
        (False, "1", ""),
    ],
)
def test_imports_that_take_long_are_told(
    is_terminal: bool,
    local_rank: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(boundary, "TERMINAL_INTERVAL_S" if is_terminal else "LINE_INTERVAL_S", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with importing("dali-train train"):
        time.sleep(0.2)
    assert re.fullmatch(expected, capsys.readouterr().err)


def test_status_of_a_pattern_with_files(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("which run is which")
    assert main(["status", str(plain_run), str(plain_run), str(tmp_path / "notes.txt")]) == 0
    assert capsys.readouterr().out.count("finished") == 2
    assert main(["status", str(plain_run), str(tmp_path / "notes.txt")]) == 0


def test_nobody_reads_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As in `dali-train data show DATASET | head -1`; another pipe that breaks is a fault."""
    reader, writer = os.pipe()
    os.close(reader)

    def work() -> int:
        print("a line\n" * 100_000)
        return 0

    assert run_command("dali-train plan", raising(BrokenPipeError(32, "Broken pipe"))) == 1
    assert capfd.readouterr().err == "dali-train plan: Broken pipe\n"
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run_command("dali-train data show", work) == 1
    assert capfd.readouterr().err == ""


def test_help_and_mistakes_need_no_torch() -> None:
    """Which takes seconds to import."""
    script = """import sys
from dali_train.cli import main
for words in (["--help"], ["train", "--help"], ["train", "--config", "vit-b16", "--help"]):
    try:
        main(words)
    except SystemExit:
        print("torch" in sys.modules, file=sys.stderr)
main(["recipes"])
for root in ("ftp://host/data", "nowhere"):
    assert main(["train", "--config", "vit-b16", "--data.root", root]) == 2
print("torch" in sys.modules, file=sys.stderr)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert "there is no storage for ftp://" in printed and "nowhere: this directory does not exist" in printed
    assert [line for line in printed.splitlines() if ":" not in line] == ["False"] * 4


COMPLETIONS = {
    "dali-train tr": "train",
    "dali-train train --data.sh": "--data.shuffle",
    "dali-train train --data.shuffle b": "block balanced",
    "dali-train eval --config rsb": "rsb-a1 rsb-a2 rsb-a3",
    "dali-train data convert im": "imagenet imagenet21k",
}
TAB = """
    source <(dali-train completion bash)
    COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDS=($LINE) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_TYPE=9
    $(complete -p dali-train | sed 's/.*-F \\([^ ]*\\).*/\\1/') dali-train
    echo "${COMPREPLY[@]}"
"""


@pytest.mark.thorough
def test_completion(tmp_path: Path) -> None:
    program = tmp_path / "dali-train"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dali_train "$@"\n')
    program.chmod(0o755)
    for line, expected in COMPLETIONS.items():
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LINE": line}
        printed = subprocess.run(
            ["bash", "-c", TAB], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert sorted(printed.stdout.split()) == sorted(expected.split()), printed.stderr
