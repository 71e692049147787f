"""The trainer's own promises: mixed precision, overflow, values that are not finite, resuming, files, exit status."""

import json
import re
from pathlib import Path

import pytest
import torch

from dali_train.config import load_config
from dali_train.files import git_commit
from dali_train.runtime.launch import Launch
from dali_train.training.build import build_loader, build_trainer, prepare
from dali_train.training.metrics import NonFiniteError, TrainingMetrics
from tests.conftest import REPOSITORY, Train, final_weights
from tests.helpers import events, losses, words

CPU = torch.device("cpu")


def test_it_learns_what_the_images_show(train: Train, dataset: Path, tmp_path: Path) -> None:
    """Fifty images, known by heart after a while: labels that were out of step with their images could not be."""
    plain = "--mixup.alpha 0 --data.crop_area 1 1 --data.crop_aspect 1 1 --data.horizontal_flip 0"
    fast = "--batch.micro_batch 32 --run.eval_every_epochs none"
    train("run", *words(f"{plain} {fast} --run.epochs 60 --schedule.warmup_epochs 5 --optimizer.lr 0.02"))
    assert events(tmp_path / "run", "train")[-1]["top1"] > 0.9


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [("fp16", "true"), ("bf16", "true"), pytest.param("fp16", "false", marks=pytest.mark.thorough)],
)
def test_mixed_precision_follows_float32(
    train: Train, plain_run: Path, tmp_path: Path, dtype: str, autocast: str
) -> None:
    options = f"--precision.dtype {dtype} --precision.autocast {autocast} --precision.initial_scale 256"
    train("mixed", *words(f"{options} --run.max_steps 4 --run.eval_every_epochs none"), ranks=2)
    mixed = events(tmp_path / "mixed", "train")
    assert not events(tmp_path / "mixed", "eval"), "which run.max_steps ended before the end of its epochs"
    assert losses(tmp_path / "mixed") == pytest.approx(losses(plain_run)[:4], rel=0.02)
    assert [line["loss_scale"] for line in mixed] == [256.0 if dtype == "fp16" else 1.0] * 4
    assert all(weight.dtype == torch.float32 for weight in final_weights(tmp_path / "mixed").values())


def test_the_loss_scale_goes_on_after_a_resume(train: Train, tmp_path: Path) -> None:
    """The first steps overflow, and each halves the scale."""
    options = words("--precision.dtype fp16 --precision.initial_scale 1e6 --run.eval_every_epochs none")
    options += words("--batch.micro_batch 16")
    train("undisturbed", *options)
    train("resumed", *options, "--run.max_seconds", "0.001", status=75)
    train("resumed", *options)
    scales = [event["loss_scale"] for event in events(tmp_path / "undisturbed", "train")]
    assert scales[:2] == [5e5, 2.5e5] and len(scales) == 7
    assert [event["loss_scale"] for event in events(tmp_path / "resumed", "train")] == scales


def test_a_rate_that_destroys_the_weights_ends_the_run(train: Train, tmp_path: Path) -> None:
    options = "--optimizer.lr 1e30 --optimizer.clip_grad_norm None --run.epochs 60 --schedule.warmup_epochs 0"
    options += " --run.eval_every_epochs none --batch.micro_batch 32"
    output = train("run", *words(f"{options} --run.checkpoint_every_steps 1"), status=1)
    assert "were not finite in 50 steps in a row, first in step" in output and "micro-batch" in output
    assert "lower optimizer.lr" in output
    (end,) = events(tmp_path / "run", "end")
    assert end["error"].startswith("NonFiniteError")
    assert all(weight.isfinite().all() for weight in final_weights(tmp_path / "run").values()), (
        "the last good one is kept"
    )


def test_the_first_place_that_was_not_finite_is_named() -> None:
    metrics = TrainingMetrics(CPU)
    nan, one, zero = torch.tensor(float("nan")), torch.tensor(1.0), torch.tensor(0)
    for step in range(53):
        for k in range(4):
            bad = (step, k) in {(1, 0), (3, 2), (3, 3)} or step > 3  # a single bad step is passed over
            metrics.add_micro_batch(nan if bad else one, zero, num_images=2, step=step, k=k)
        metrics.finish_step(one if step in (0, 2) else nan, one, step=step)
    assert not metrics.last_step_was_finite()
    with pytest.raises(NonFiniteError, match="not finite in 50 steps in a row, first in step 3, micro-batch 2"):
        metrics.read()


def test_losses_average_over_images() -> None:
    metrics = TrainingMetrics(CPU)
    metrics.add_micro_batch(torch.tensor(1.0), torch.tensor(3), num_images=6, step=0, k=0)
    metrics.add_micro_batch(torch.tensor(4.0), torch.tensor(0), num_images=2, step=0, k=1)
    metrics.finish_step(torch.tensor(0.5), torch.tensor(8.0), step=0)
    sums = metrics.read()
    assert (sums.loss, sums.top1, sums.grad_norm, sums.loss_scale) == (1.75, 0.375, 0.5, 8.0)


def test_run_directory_describes_itself(plain_run: Path) -> None:
    config = json.loads((plain_run / "config.json").read_text())
    assert config["run"]["epochs"] == 4 and config["batch"]["global_batch"] == 32
    environment = json.loads((plain_run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and "--run.dir" in environment["command"]
    assert environment["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert environment["compute_threads"] > 0 and environment["deterministic"] is False
    arguments = environment["optimizer"]  # those that are in no config, too
    assert arguments["trust_clip"] is False and arguments["betas"] == [0.9, 0.999]
    log = (plain_run / "logs" / "rank0.log").read_text()
    assert re.search(r"step 1/7 took .*: at most .* per epoch", log), log
    steps = events(plain_run, "train")
    assert [line["step"] for line in steps] == list(range(1, 8)) and steps[-1]["epoch"] == 7 * 32 / 50
    wanted = {"step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "images_per_second", "data_wait_s", "step_s"}
    assert wanted <= steps[0].keys()
    evaluations = events(plain_run, "eval")
    assert [line["step"] for line in evaluations] == [2, 4, 5, 7], "at the first steps after epochs of 1.56 steps"
    assert {"step", "epoch", "loss", "top1", "top5", "num_images"} <= evaluations[0].keys()
    assert evaluations[0]["num_images"] == 13
    (end,) = events(plain_run, "end")
    assert end["error"] is None


def test_max_steps_ends_a_run_and_deterministic_kernels_change_nothing(
    train: Train, plain_run: Path, tmp_path: Path
) -> None:
    """In a directory in which a kill interrupted the writing of a file."""
    (tmp_path / "short").mkdir()
    for name in (".status.json.4711.partial", ".mine.partial"):
        (tmp_path / "short" / name).touch()
    train("short", "--run.max_steps", "3", "--run.deterministic", "true")
    short, long = (events(run, "train") for run in (tmp_path / "short", plain_run))
    assert [(line["loss"], line["lr"]) for line in short] == [(line["loss"], line["lr"]) for line in long[:3]]
    assert [path.name for path in (tmp_path / "short").glob(".*.partial")] == [".mine.partial"]


def test_a_run_needs_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(REPOSITORY) is None


def test_a_step_applies_the_factors_of_the_groups(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config).replace(
        {"run.dir": str(tmp_path / "run"), "optimizer.groups": (("*.bias", 0.0, 1.0),)}
    )
    plan = prepare(config, Launch(world_size=1, port=1), CPU)
    trainer = build_trainer(config, plan.layout, plan.num_classes, CPU, plan.classes)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.step(0, 0.1, build_loader(plan))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.endswith(".bias"), name
