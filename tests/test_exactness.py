"""The invariant through the real trainer: the number of ranks decides only who computes a micro-batch."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dali_train import checkpoint
from dali_train.config import load_config
from dali_train.data.index import Split
from dali_train.data.micro_batch import MicroBatches

from .conftest import REPOSITORY, Ranks, StartTraining, Train, final_weights, launcher_command, relative_differences

# Largest |difference| / |weight| of a tensor after 7 steps (4 epochs of 50 images in batches of 32), measured between 1
# and 2 ranks: 5e-6 in float32, 1e-14 in float64. Float64 resolves 2**29 = 5e8 times finer and the difference shrinks
# as much, so it is the rounding of sums made in another order and nothing else. The largest is always the bias of
# queries, keys and values: attention does not depend on the keys' bias, so its gradient is rounding alone, and LAMB
# scales even that to a full step. All other tensors stay below 5e-7. The bounds leave a factor of ten.
FLOAT32_BOUND, FLOAT64_BOUND = 3e-5, 1e-13

# Every option of the step that works on a CPU, at once; without the compiler, which takes seconds a process.
FAST_UNCOMPILED = (
    "--model.activation_checkpointing", "true", "--model.channels_last", "true", "--parallel.static_graph", "true",
)  # fmt: skip
FAST = ("--model.compile", "blocks", *FAST_UNCOMPILED)
BF16_EXCHANGE = ("--parallel.exchange_dtype", "bf16")


def samples(directory: Path) -> dict[tuple[int, int], list[int]]:
    """(step, k) -> images, from all ranks' traces."""
    lines = [json.loads(line) for path in directory.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()]
    traced = {(line["step"], line["k"]): line["images"] for line in lines}
    assert len(traced) == len(lines), "a micro-batch was computed twice"
    return traced


def losses(directory: Path) -> list[float]:
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


def largest_difference(a: Path, b: Path) -> float:
    differences = relative_differences(final_weights(a), final_weights(b))
    print("\n".join(f"{difference:.1e}  {name}" for name, difference in differences.items()))
    return max(differences.values())


def test_ranks_and_launchers_agree(tiny_config: Path, tmp_path: Path) -> None:
    for launcher, ranks in (("python", 1), ("torchrun", 2), ("launch", 2)):
        words = [*launcher_command(launcher, ranks), "train", "--config", str(tiny_config), "--run.dir", str(tmp_path / launcher)]
        process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=300)
        assert process.returncode == 0, process.stdout + process.stderr
    one, torchrun, launch = (tmp_path / name for name in ("python", "torchrun", "launch"))
    assert samples(one) == samples(torchrun) == samples(launch)
    assert len(samples(one)) == 7 * 8
    assert losses(torchrun) == pytest.approx(losses(one), rel=1e-5)
    assert largest_difference(one, torchrun) < FLOAT32_BOUND
    assert largest_difference(torchrun, launch) == 0


def test_what_differs_between_ranks_is_rounding(train: Train, tmp_path: Path) -> None:
    train("one", "--precision.dtype", "fp64")
    train("four", "--precision.dtype", "fp64", ranks=4)
    assert largest_difference(tmp_path / "one", tmp_path / "four") < FLOAT64_BOUND


def test_nor_do_the_options_for_speed_depend_on_ranks(train: Train, tmp_path: Path) -> None:
    train("one", *FAST)
    train("two", *FAST, ranks=2)
    assert samples(tmp_path / "one") == samples(tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert largest_difference(tmp_path / "one", tmp_path / "two") < FLOAT32_BOUND


def first_moments(directory: Path) -> torch.Tensor:
    """LAMB's, of all weights; after one step a tenth of the gradient."""
    newest, _ = checkpoint.newest(directory / "checkpoints")
    assert newest is not None
    return torch.cat([t.flatten() for name, t in sorted(newest.state["optimizer"].items()) if name.endswith("exp_avg")])


def test_an_exchange_in_bf16_loses_no_more_than_its_rounding(train: Train, tmp_path: Path) -> None:
    """It rounds by 2**-8 at most: what a rank sends, and the sums over ranks."""
    first_step = ("--run.max_steps", "1", "--optimizer.clip_grad_norm", "None", "--batch.micro_batch", "2")
    train("one", *first_step, *BF16_EXCHANGE)
    for ranks in (2, 4):
        train(f"{ranks}", *first_step, *BF16_EXCHANGE, ranks=ranks)
        one, several = (first_moments(tmp_path / name) for name in ("one", f"{ranks}"))
        assert 0 < (one - several).norm() / one.norm() < 2**-8 * ranks**0.5  # measured: 3.0e-3 on 2 ranks, 4.3e-3 on 4


def test_batch_norm_does_not_depend_on_ranks(train: Train, tmp_path: Path) -> None:
    overrides = ("--model.name", "test_resnet", "--precision.dtype", "fp64")
    config = tmp_path / "no-kwargs.py"
    text = (tmp_path / "tiny-config.py").read_text()
    start, end = text.index("kwargs=dict("), text.index("),\n    ),\n    optimizer")
    config.write_text(text[:start] + "kwargs=dict(" + text[end:])
    train("one", *overrides, config=config)
    train("two", *overrides, ranks=2, config=config)
    one, two = final_weights(tmp_path / "one"), final_weights(tmp_path / "two")
    running = [name for name in one if "running" in name]
    assert running and not torch.equal(one[running[0]], torch.zeros_like(one[running[0]]))
    differences = relative_differences(one, two)
    assert max(differences[name] for name in running) < FLOAT64_BOUND


def test_accumulation_equals_one_big_batch(train: Train, tmp_path: Path) -> None:
    # Mixup pairs images within a micro-batch and dropout is drawn for one, so both are off here.
    plain = ("--mixup.alpha", "0", "--precision.dtype", "fp64")
    off = tuple(f"--model.kwargs.{name}_rate=0" for name in ("pos_drop", "proj_drop", "drop_path"))
    train("accumulated", *plain, *off, "--batch.micro_batch", "2")
    train("whole", *plain, *off, "--batch.micro_batch", "32")
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12)
    assert largest_difference(tmp_path / "accumulated", tmp_path / "whole") < FLOAT64_BOUND


def kill_after_step_4(doomed: Ranks, checkpoints: Path) -> None:
    while not (checkpoints / "step-00000004").exists():
        assert doomed.running(), doomed.log.read_text()
        time.sleep(0.001)
    doomed.kill()
    assert not (checkpoints / "step-00000019").exists(), "the kill came too late to test anything"


@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (2, ()), (4, ()), (1, FAST), (4, (*FAST_UNCOMPILED, *BF16_EXCHANGE))])
def test_killed_run_ends_with_the_same_bits(
    start_training: StartTraining, train: Train, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    overrides = ("--run.checkpoint_every_steps", "2", "--run.epochs", "12", "--schedule.warmup_epochs", "2", *options)
    train("undisturbed", *overrides, ranks=ranks)
    doomed = start_training("killed", *overrides, ranks=ranks)
    kill_after_step_4(doomed, tmp_path / "killed" / "checkpoints")
    assert "going on from step" in train("killed", *overrides, ranks=ranks)
    assert largest_difference(tmp_path / "undisturbed", tmp_path / "killed") == 0
    assert samples(tmp_path / "killed") == samples(tmp_path / "undisturbed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")


def test_block_order_read_ahead_and_local_copy_keep_the_bits(start_training: StartTraining, train: Train, tmp_path: Path) -> None:
    block = ("--data.shuffle", "block", "--data.block_images", "4", "--data.window_blocks", "2")
    often = ("--run.checkpoint_every_steps", "2", "--run.epochs", "12", "--schedule.warmup_epochs", "2")
    train("plain", *block, *often, "--data.read_ahead_mb", "0", ranks=2)
    copied = (*block, *often, "--data.read_ahead_mb", "1", "--data.local_copy", str(tmp_path / "disk"))
    doomed = start_training("killed", *copied, ranks=2)
    kill_after_step_4(doomed, tmp_path / "killed" / "checkpoints")
    output = train("killed", *copied, ranks=2)
    assert "going on from step" in output and output.count("copying") == 1
    assert largest_difference(tmp_path / "plain", tmp_path / "killed") == 0
    assert samples(tmp_path / "killed") == samples(tmp_path / "plain")
    # One process alone, asked for the same steps, names the same images: in each epoch every one once.
    config = load_config(tmp_path / "tiny-config.py")
    config = replace(config, data=replace(config.data, shuffle="block", block_images=4, window_blocks=2))
    micro_batches = MicroBatches(Split(config.data.root, "train").rows, config)
    assert samples(tmp_path / "plain") == {(s, k): micro_batches(s, k).images.tolist() for s in range(19) for k in range(8)}
    stream = [image for s in range(19) for k in range(8) for image in micro_batches(s, k).images.tolist()]
    assert all(sorted(stream[epoch * 50 : (epoch + 1) * 50]) == list(range(50)) for epoch in range(12))
