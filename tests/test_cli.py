"""The commands as a user types them: overrides, ColossalAI's options, plan, eval, and what mistakes look like."""

import json
import re
from pathlib import Path

import pytest

from dali_train.cli import main

from .conftest import REPOSITORY, Train

B16 = str(REPOSITORY / "configs" / "vit-b16.py")


@pytest.mark.parametrize("name", ["vit-b16", "vit-b32", "vit-l32"])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 128), (4, 32), (8, 16), (128, 1)])
def test_plan(name: str, ranks: int, accumulation: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(REPOSITORY / "configs" / f"{name}.py"), "--world-size", str(ranks)]) == 0
    printed = capsys.readouterr().out
    assert f"accumulation   {accumulation} micro-batches of 256 per rank: 32,768 images per step" in printed
    assert "steps          11,730 in 300 epochs" in printed
    assert re.search(
        r"rank's memory +\d+\.\d\d GB weights, gradients and optimizer, about \d+\.\d\d GB activations", printed
    )
    rates = {float(epoch): float(rate) for epoch, rate in re.findall(r"epoch +(\S+) +step +\S+ +(\S+)", printed)}
    assert rates == {0: 0.000119205, 75: 0.0090596, 150: 0.018, 225: 0.009, 300: 0}


def test_plan_that_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", B16, "--world_size", "6"]) == 2
    assert (
        "batch.global_batch 32768 is not divisible by batch.micro_batch 256 x 6 ranks = 1536" in capsys.readouterr().err
    )


def test_plan_of_a_dataset_and_of_a_number(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(tiny_config)]) == 0
    assert "images         50 in 5 classes" in capsys.readouterr().out
    assert main(["plan", "--config", str(tiny_config), "--num-images", "320"]) == 0
    assert "steps          40 in 4 epochs, 10.00 per epoch" in capsys.readouterr().out
    assert main(["plan", "--config", str(tiny_config), "--num-images", "0"]) == 2
    assert "--num-images is 0: use a positive number" in capsys.readouterr().err


def test_plan_tells_the_order_in_words(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(tiny_config), "--num-images", "1000000", "--data.shuffle"]
    assert main([*words, "full"]) == 0
    assert "order          full: any image may follow any other" in capsys.readouterr().out
    assert main([*words, "block"]) == 0  # 8 micro-batches x 8 x 128 images of 110 kB
    printed = capsys.readouterr().out
    assert (
        "order          block: 8 blocks of 128 images are mixed in each of a step's 8 micro-batches; about 0.9 GB"
        in printed
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--model.name", "vit_base_patch16_222"],
            "'vit_base_patch16_222', which timm does not know; close: vit_base_patch16_224",
        ),
        (["--model.name", "resnet18"], "do not fit model.name resnet18"),
    ],
)
def test_values_that_cannot_be(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", B16, *overrides]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_mistyped_words(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err + printed.out


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--help"], "Train image classifiers at large batch sizes"),
        (["predict", "--help"], "Classify images"),
        (["export", "--help"], "Write a run's model"),
        (["diff", "--help"], "Why two runs differ"),
        (["train", "--help"], "Every setting of the config can be overridden"),
        (["train", "--config", B16, "--help"], "Images per optimizer step, over all ranks"),
        (["eval", "--help"], "Evaluate a checkpoint"),
        (["doctor", "--help"], "usage: dali-train doctor"),
        (["--version"], "dali-train 0."),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        assert message in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_config_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "--config FILE is missing; the recipes are in configs/" in capsys.readouterr().err


def test_doctor_refuses_words_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "frobnicate"]) == 2
    assert "frobnicate: without --config FILE doctor takes no further arguments" in capsys.readouterr().err
    for words, message in (
        (["frobnicate"], "'frobnicate' belongs to no setting"),
        (["--run.epoch", "3"], "use --run.epochs"),
    ):
        assert main(["doctor", "--config", B16, *words]) == 2
        assert message in capsys.readouterr().err


def test_eval_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--config", B16]) == 2
    assert (
        "name the run, `dali-train eval RUN`, or a checkpoint, --checkpoint RUN/checkpoints/newest"
        in capsys.readouterr().err
    )


def test_dataset_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", B16, "--data.root", str(tmp_path / "nowhere")]) == 2
    assert "/nowhere: this directory does not exist; data.root names a dataset's directory" in capsys.readouterr().err


def test_eval_repeats_the_last_evaluation(
    train: Train, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run", "--run.max_steps", "3")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["event"] == "eval"][-1]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-00000003")
    assert main(["eval", "--config", str(tiny_config), "--checkpoint", str(checkpoint)]) == 0
    assert (
        f"step 3: top-1 {last['top1']:.2%}  top-5 {last['top5']:.2%}  loss {last['loss']:.4f}  (13 images)"
        in capsys.readouterr().out
    )
