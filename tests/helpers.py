"""What several tests do with runs: long and fast ones, waiting for them, stopping them, and reading what they left."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import timm
import torch
from torch import nn

from dali_train.checkpoint.format import load_newest
from dali_train.config import Config, load_config
from dali_train.data.dataset.index import open_split
from dali_train.data.dataset.storage import Storage
from dali_train.data.loading.cache import Eviction
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.loader_arguments import Place
from dali_train.data.loading.pipelines import Batch
from dali_train.runtime.status import STEP_PHASES, read_events
from tests.conftest import REPOSITORY, StartTraining, final_weights, relative_differences
from tests.ranks import POOL, Ranks, patience

# Largest |difference| / |weight| of a tensor after 7 steps (4 epochs of 50 images in batches of 32), measured between 1
# and 2 ranks: 5e-6 in float32, 1e-14 in float64. Float64 resolves 2**29 = 5e8 times finer and the difference shrinks
# as much, so it is the rounding of sums made in another order and nothing else. The largest is always the bias of
# queries, keys and values: attention does not depend on the keys' bias, so its gradient is rounding alone, and LAMB
# scales even that to a full step. All other tensors stay below 5e-7. The bounds leave a factor of ten.
FLOAT32_BOUND, FLOAT64_BOUND = 3e-5, 1e-13

# With other seeds a bias of an MLP may have a gradient that nearly cancels in the first steps of a deep model. LAMB
# divides it by itself, with its rounding, and the tensor differs by up to 4e-13.
STEADY = ("--data.seed", "2")

# Every option of the step that works on a CPU, at once; without the compiler, which takes seconds per process.
FAST_UNCOMPILED = ("--model.activation_checkpointing", "true", "--model.channels_last", "true")
FAST = ("--model.compile", "blocks", *FAST_UNCOMPILED)
BF16_ALL_REDUCE = ("--parallel.grad_reduce_dtype", "bf16")

# Images 7 and 30 of `dataset`.
EXCLUDED = str(REPOSITORY / "tests" / "excluded.csv")

PIPELINE = ("--parallel.pipeline", "2")
TENSOR = ("--parallel.tensor.size", "2")
SHARDED = ("--parallel.shard", "full")

# Every run of the tests has these, see `TINY_CONFIG`.
REGULARISED = (
    *("--model.kwargs.pos_drop_rate", "0.1", "--model.kwargs.proj_drop_rate", "0.1"),
    *("--model.kwargs.drop_path_rate", "0.1", "--mixup.alpha", "0.2"),
    *("--optimizer.name", "lamb", "--optimizer.clip_grad_norm", "1"),
)


class Compared(NamedTuple):
    """A run of the tests, and what it is compared with. docs/exactness.md has a table of them, see
    test_exactness_table.py."""

    options: tuple[str, ...]
    ranks: int = 1
    layout: tuple[str, ...] = ()
    resumed: bool = False  # stopped or killed, it ends with the same bits
    bound: float | None = FLOAT64_BOUND  # of |difference| / |weight| to one process; None: not compared


# So long that no test sees its end unless it asks for it; a step has two micro-batches.
LONG = (
    *("--run.epochs", "400", "--run.checkpoint_every_steps", "100000", "--run.eval_every_epochs", "None"),
    *("--batch.micro_batch", "16"),
)

# Checkpoints so often that a run can be stopped and resumed between them; 11 steps in all.
OFTEN = ("--run.checkpoint_every_steps", "2", "--run.epochs", "7", "--schedule.warmup_epochs", "2")

# BatchNorm, and no arguments that a ViT takes.
CONVOLUTIONAL = """
config = replace(config, model=ModelConfig(name="test_resnet"))
"""

# A hook that lets no rank past step 6: a test can do something to the run there however slow the machine is.
PAUSE = """
import time

class Pause(Hook):
    def step(self, record):
        while record.step == 6:
            time.sleep(1)
"""


def in_tiers(values: Iterable[Any], *first: Any) -> list[Any]:
    """Return the parameters of a test, of which all but `first` are of the thorough tier."""
    return [value if value in first else pytest.param(value, marks=pytest.mark.thorough) for value in values]


def words(line: str) -> tuple[str, ...]:
    """Return the words of a command line."""
    return tuple(line.split())


def extended(config: Path, text: str) -> Path:
    """Write a config file that goes on with `text`, beside `config`, with the hooks whose classes are in it."""
    path = config.with_name("extended.py")
    imports = "from dataclasses import replace\nfrom dali_train.hooks import Hook\n"
    hooks = ", ".join(re.findall(r"^class (\w+)\(Hook\)", text, re.MULTILINE))
    user = f"\nconfig = replace(config, hooks=replace(config.hooks, user=({hooks},)))\n" if hooks else ""
    path.write_text(config.read_text() + imports + text + user)
    return path


def seeing_model(num_classes: int, images: torch.Tensor) -> nn.Module:
    """Return a network with random weights whose predictions for different images differ: its BatchNorms have the
    statistics of `images`, as after training."""
    torch.manual_seed(1)
    model: nn.Module = timm.create_model("test_efficientnet", num_classes=num_classes)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # averages, from nothing on
            layer.reset_running_stats()
    with torch.no_grad():
        model.train()(images)
    return model.eval()


def loader_of(
    config: Config, *, start_step: int = 0, rank: int = 0, ranks: int = 1, num_threads: int = 1, device: str = "cpu"
) -> TrainLoader:
    place = Place(dp_rank=rank, dp_size=ranks, device=torch.device(device), num_threads=num_threads)
    loader = TrainLoader.of_split(open_split(config.data, "train"), config, place, start_step=start_step)
    loader.prepare()
    return loader


def first_batches(config: Config, count: int, **options: Any) -> list[Batch]:
    loader = loader_of(config, **options)
    return [loader.next() for _ in range(count)]


def samples(directory: Path) -> dict[tuple[int, int], list[int]]:
    """(step, k) -> images, from all ranks' traces."""
    lines = [
        json.loads(line) for path in directory.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()
    ]
    traced = {(line["step"], line["k"]): line["images"] for line in lines}
    assert len(traced) == len(lines), "a micro-batch was computed twice"
    return traced


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are of this kind."""
    return [event for event in read_events(directory / "metrics.jsonl") if event["event"] == kind]


def losses(directory: Path) -> list[float]:
    return [event["loss"] for event in events(directory, "train")]


def largest_difference(a: Path, b: Path) -> float:
    differences = relative_differences(final_weights(a), final_weights(b))
    print("\n".join(f"{difference:.1e}  {name}" for name, difference in differences.items()))
    return max(differences.values())


def state_difference(a: Path, b: Path) -> float:
    """The largest |a - b| / |a| of a tensor in the newest checkpoints: weights, moving averages and the optimizer's
    state."""
    (one, _), (other, _) = (load_newest(path / "checkpoints") for path in (a, b))
    assert one is not None
    assert other is not None
    assert one.step == other.step
    assert one.state.keys() == other.state.keys()
    assert one.state["model"].keys() == other.state["model"].keys()
    differences = [relative_differences(one.state[name], other.state[name]) for name in one.state]
    return max(value for each in differences for value in each.values())


def wait_until(done: Callable[..., bool], *arguments: Any, seconds: float = 30) -> None:
    """Wait for what must come, at most `patience` of `seconds`."""
    end = time.monotonic() + patience(seconds)
    while not done(*arguments):
        assert time.monotonic() < end, f"{done} did not come in {patience(seconds):.0f} s"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """A killed process dies a moment later, and its parent, killed too, cannot ask for its status."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


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
    doomed = start_training(name, *overrides, config=extended(config, PAUSE), ranks=ranks)
    while not (config.parent / name / "checkpoints" / "step-00000004").exists():
        assert doomed.running(), doomed.log.read_text()
        time.sleep(0.01)
    doomed.kill()


def without_vector_instructions() -> dict[str, str]:
    """Return the environment of a process whose NumPy and torch use none that not every processor has."""
    try:
        from numpy._core import _multiarray_umath as numpys
    except ImportError:  # NumPy 1
        from numpy.core import _multiarray_umath as numpys
    chosen = " ".join(name for name in numpys.__cpu_dispatch__ if numpys.__cpu_features__[name])
    return {**os.environ, "NPY_DISABLE_CPU_FEATURES": chosen, "ATEN_CPU_CAPABILITY": "default"}


def in_ranks(number: int, target: Callable[..., None], *arguments: Any) -> None:
    """Call ``target(rank, *arguments)`` on `number` ranks of the pool at once, all of which must end well."""
    with tempfile.NamedTemporaryFile() as log:
        statuses = POOL.run(number, _with_rank, target, arguments, log=Path(log.name))
        assert statuses == [0] * number, f"{statuses}\n{log.read().decode()}"


def _with_rank(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    target(int(os.environ["RANK"]), *arguments)


def write_run(
    directory: Path,
    num_steps: int = 0,
    *,
    ended_at: int | None = None,
    events: Sequence[dict[str, Any]] = (),
    extra: dict[str, float] | None = None,
    environment: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """A run directory of made-up steps of 2.22 s and `events`, with configs/digits.py as changed by `changes`.

    Args:
        extra: what a hook measured at each step.
    """
    directory.mkdir(parents=True)
    times = {"step_s": 2.22, **dict.fromkeys(STEP_PHASES.values(), 2.22 / 6)}
    values = {"loss": 1.0, "lr": 0.1, "images_per_second": 9.0, "grad_norm": 1.0, "loss_scale": 1.0, **(extra or {})}
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0, "epoch": 0.0, "total_steps": 50, "startup_s": 2.0}]
    for step in range(1, num_steps + 1):
        first = {"first_step_s": 3.0} if step == 1 else {}
        lines.append({"event": "train", "step": step, "epoch": step / 10, **values, **times, **first})
    lines += events
    if ended_at is not None:
        end = {"seconds": {}, "error": None, "finished": ended_at == 50}
        lines.append({"event": "end", "step": ended_at, "epoch": ended_at / 10, **end})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(REPOSITORY / "configs" / "digits.py").replace({"run.dir": str(directory), **(changes or {})})
    (directory / "config.json").write_text(config.to_json())
    (directory / "environment.json").write_text(json.dumps(environment or {}))
    return directory


def read_in_rounds(
    images: Storage, order: np.ndarray, times: np.ndarray, eviction: Eviction, every: int = 1
) -> Iterator[None]:
    """Read images by their uses, and yield after each round of an eviction, one every so many micro-batches."""
    for now in np.unique(times).tolist():
        images.read(order[times == now].astype(np.int64))
        eviction._now = now
        if now % every == 0:
            eviction.remove_latest()
            yield
    eviction._stopped.set()
