"""What several tests do with runs: long and fast ones, waiting for them, stopping them, and reading what they left."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import FORK, Ranks, StartTraining, final_weights, relative_differences

# Largest |difference| / |weight| of a tensor after 7 steps (4 epochs of 50 images in batches of 32), measured between 1
# and 2 ranks: 5e-6 in float32, 1e-14 in float64. Float64 resolves 2**29 = 5e8 times finer and the difference shrinks
# as much, so it is the rounding of sums made in another order and nothing else. The largest is always the bias of
# queries, keys and values: attention does not depend on the keys' bias, so its gradient is rounding alone, and LAMB
# scales even that to a full step. All other tensors stay below 5e-7. The bounds leave a factor of ten.
FLOAT32_BOUND, FLOAT64_BOUND = 3e-5, 1e-13

# Every option of the step that works on a CPU, at once; without the compiler, which takes seconds per process.
FAST_UNCOMPILED = (
    "--model.activation_checkpointing",
    "true",
    "--model.channels_last",
    "true",
    "--parallel.static_graph",
    "true",
)
FAST = ("--model.compile", "blocks", *FAST_UNCOMPILED)
BF16_EXCHANGE = ("--parallel.exchange_dtype", "bf16")

# So long that no test sees its end unless it asks for it.
LONG = ("--run.epochs", "400", "--run.checkpoint_every_steps", "100000", "--run.eval_every_epochs", "None")

# A hook that lets no rank past step 6: a test can do something to the run there however slow the machine is.
PAUSE = """
import time
from dataclasses import replace
from dali_train.hooks import Hook

class Pause(Hook):
    def step(self, record):
        while record.step == 6:
            time.sleep(1)

config = replace(config, hooks=replace(config.hooks, user=(Pause,)))
"""


def samples(directory: Path) -> dict[tuple[int, int], list[int]]:
    """(step, k) -> images, from all ranks' traces."""
    lines = [
        json.loads(line) for path in directory.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()
    ]
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


def wait_for_steps(ranks: Ranks, directory: Path, count: int) -> None:
    while (
        not (directory / "metrics.jsonl").exists()
        or len((directory / "metrics.jsonl").read_text().splitlines()) < count
    ):
        assert ranks.running(), ranks.log.read_text()
        time.sleep(0.005)


def kill_after_step_4(start_training: StartTraining, config: Path, name: str, *overrides: str, ranks: int = 1) -> None:
    """Start a run that saves every 2 steps, and kill all its ranks between steps 4 and 7 with the checkpoint of step 4
    saved."""
    pausing = config.with_name("pausing.py")
    pausing.write_text(config.read_text() + PAUSE)
    doomed = start_training(name, *overrides, config=pausing, ranks=ranks)
    while not (config.parent / name / "checkpoints" / "step-00000004").exists():
        assert doomed.running(), doomed.log.read_text()
        time.sleep(0.01)
    doomed.kill()


def in_ranks(number: int, target: Callable[..., None], *arguments: Any, timeout_s: float = 240) -> None:
    """``target(rank, *arguments)`` in `number` processes at once, all of which must end well."""
    processes = [FORK.Process(target=target, args=(rank, *arguments)) for rank in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    assert [process.exitcode for process in processes] == [0] * number
