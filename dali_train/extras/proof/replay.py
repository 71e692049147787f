"""``dali-train prove RUN --replay STEP``: train a step again from the checkpoint before it, and compare.

Within one class of machine, loss, gradient norm and weights must be the recorded ones bit for bit. Elsewhere rounding
differs, and the same steps in float64 decide: what was recorded may be no farther from them than a small multiple of
what this machine is in the run's own precision (docs/exactness.md).
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dali_train.checkpoint.format import Checkpoint, CheckpointManifest, Tensors, load_checkpoint
from dali_train.checkpoint.record import WeightsRecord, machine, weights_digest
from dali_train.checkpoint.run_directory import RunDirectory, checkpoint_paths, step_of
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.state import Start, capture_run
from dali_train.checkpoint.trained_model import check_registered, first_weights
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.commands.evaluate import joined_and_watched
from dali_train.commands.train import restored_trainer
from dali_train.config import Config
from dali_train.errors import ConfigError
from dali_train.extras.proof.prove import with_dataset
from dali_train.runtime.launch import Launch, LaunchOptions
from dali_train.runtime.process_group import host_group, on_rank_0
from dali_train.text import plural, printable
from dali_train.training.build import build_loader, prepare, warm_up_trainer
from dali_train.training.metrics import TrainingSums
from dali_train.training.schedule import learning_rate

LIMIT = 16.0
"""The largest accepted distance from the float64 result, in multiples of this machine's own; see docs/exactness.md."""

Comparison = tuple[str, bool, str]
"""What was compared, whether it agrees, and a few words on it."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run has recorded of the steps after a checkpoint, up to the first at or after the one asked for."""

    source: Path | None  # the checkpoint; None: the run's initial weights
    begin: int  # steps done there
    end: int
    lines: dict[int, dict[str, Any]]  # the train events of these steps
    means_since: dict[int, int]  # the step after which the means in a line begin
    machines: set[str]  # which computed them
    weights: dict[str, str]  # section -> digest, after `end` steps; empty: not recorded
    checkpoint: Path | None  # of `end` steps, if it is still there

    @classmethod
    def of(cls, run: RunDirectory, step: int) -> "Recorded":
        """Find the steps to train again for `step`, counted from 1. Raises ConfigError: nothing to compare with."""
        lines, machines, since, weights = {}, {}, {}, WeightsRecord()
        now, before = "", 0
        for event in run.events:
            if event["event"] == "start":
                now, before = event.get("machine", ""), event["step"]
            elif event["event"] == "train":
                at = event["step"]
                lines[at], machines[at], since[at], before = event, now, before, at
        paths = checkpoint_paths(run.directory / "checkpoints")
        for path in paths:
            weights |= CheckpointManifest.read(path).values.weights
        ends = sorted(at for at in {*lines, *map(int, weights)} if at >= step)
        if step < 1 or not ends:
            last = max({*lines, *map(int, weights)}, default=0)
            raise ConfigError(f"--replay {step}: {run.directory} has recorded steps 1 to {last}: name one of them")
        end = ends[0]
        source = max((path for path in paths if step_of(path) < step), key=step_of, default=None)
        begin = step_of(source) if source is not None else 0
        between = [at for at in lines if begin < at <= end]
        return cls(
            source=source,
            begin=begin,
            end=end,
            lines={at: lines[at] for at in between},
            means_since=since,
            machines={machines[at] for at in between} or {now},
            weights=weights.get(str(end), {}),
            checkpoint=next((path for path in paths if step_of(path) == end), None),
        )

    def scalars(self, replayed: "Replayed") -> dict[str, list[tuple[int, float, float]]]:
        """Return (step, recorded, replayed) of each line, by name; without means that began before the checkpoint."""
        values: dict[str, list[tuple[int, float, float]]] = {}
        for at, line in self.lines.items():
            for subject, name in (("loss", "loss"), ("gradient", "grad_norm")):
                if name == "grad_norm" or self.means_since[at] >= self.begin:
                    values.setdefault(subject, []).append((at, line[name], getattr(replayed.sums[at], name)))
        return values


@dataclass(frozen=True, kw_only=True)
class Replayed:
    state: dict[str, Tensors]  # as in a checkpoint; on rank 0, empty elsewhere
    sums: dict[int, TrainingSums]  # of the recorded lines at least, by step


def replay(run_dir: Path, step: int, *, dataset: str | None, options: LaunchOptions) -> bool:
    """Train `step` again on this launcher's ranks, and print how the result compares with what was recorded.

    Returns:
        Whether it agrees.

    Raises:
        ConfigError, CheckpointError, DatasetError: the step cannot be trained or compared here.
    """
    run = RunDirectory(run_dir)
    recorded = Recorded.of(run, step)
    config = with_dataset(run.config, dataset).replace({"run.audit_every_steps": None})
    check_registered(config.model, run_dir)
    with joined_and_watched(options, config, run_dir) as (launch, device):
        group = host_group(launch, config.parallel)
        require_equal_ranks(config, device, group, recorded.source)
        here, replayed = train_again(config, recorded, launch, device, group)
        same_class = recorded.machines == {here}
        exact = None
        if not same_class:
            check_comparable(recorded.machines, here, device)
            exact = replayed
            if config.precision.dtype != "fp64":
                in_float64 = config.replace({"precision.dtype": "fp64"})
                _, exact = train_again(in_float64, recorded, launch, device, group)
        if launch.rank:
            return True
    saved = load_checkpoint(recorded.checkpoint) if recorded.checkpoint is not None else None
    compared = (
        bits(recorded, replayed, saved)
        if exact is None
        else distances(recorded, replayed, exact, saved, config.precision.dtype)
    )
    begin = recorded.source.name if recorded.source is not None else "the initial weights"
    print(f"replayed {plural(recorded.end - recorded.begin, 'step')} from {begin} to step {recorded.end}")
    if not same_class:
        print(f"there    {printable(' and '.join(sorted(recorded.machines)))}\nhere     {here}")
    lines = list(compared)
    for subject, agrees, text in lines:
        print(f"{subject:8} {'' if agrees else 'DIFFERS: '}{text}")
    return all(agrees for _, agrees, _ in lines)


def train_again(
    config: Config, recorded: Recorded, launch: Launch, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[str, Replayed]:
    """Return the class of this machine, and the result of training the recorded steps again on all ranks."""
    plan = prepare(config, launch, device)
    if recorded.source is None:
        start = Start(recipe={}, checkpoint=None, warnings=[], weights=first_weights(config.model, plan.class_names))
    else:
        start = Start(recipe={}, checkpoint=load_checkpoint(recorded.source), warnings=[], step=recorded.begin)
    trainer = restored_trainer(plan, start, evaluates=False)
    loader = build_loader(plan, start_step=recorded.begin)
    start.release()
    warm_up_trainer(trainer, config, device, plan.num_threads)
    sums = {}
    # Where lines end, and where a start began in between: reading begins new means.
    reads = recorded.lines.keys() | {recorded.means_since[at] for at in recorded.lines}
    for index in range(recorded.begin, recorded.end):
        trainer.step(index, learning_rate(config, index, plan.num_images), loader)
        if index + 1 in reads:
            sums[index + 1] = trainer.metrics.read()
    # A checkpoint has complete tensors under their names, whichever ranks hold them now.
    with tempfile.TemporaryDirectory(prefix="dali-train-") as own:
        directory = Path(on_rank_0(lambda: own, group))
        writer_group = host_group(launch, config.parallel)
        writer = CheckpointWriter(directory, writer_group, keep=1, num_stages=plan.layout.pipeline)
        writer.prepare(recorded.begin)
        writer.save(recorded.end, *capture_run(trainer, group))
        writer.wait()
        state = load_checkpoint(checkpoint_paths(directory)[-1]).state if launch.rank == 0 else {}
    return machine(plan), Replayed(state=state, sums=sums)


def check_comparable(recorded: set[str], here: str, device: torch.device) -> None:
    """Raises ConfigError: steps of these classes have other pixels and dropout masks, not only other rounding."""
    if device.type != "cpu" or not all(", CPU, " in one for one in recorded):
        raise ConfigError(
            f"--replay: the step was computed on {printable(' and '.join(sorted(recorded)))}, and this is {here}. Only "
            "processors can be compared with each other: a GPU of another kind has other pixels and dropout masks. "
            "Replay on the same kind of GPU with the same versions and ranks"
        )


def bits(recorded: Recorded, here: Replayed, saved: Checkpoint | None) -> Iterator[Comparison]:
    """Compare what was recorded with what was trained `here`, for equality."""
    for subject, values in recorded.scalars(here).items():
        differing = (value for value in values if value[1] != value[2] and not all(map(math.isnan, value[1:])))
        wrong = next((f"step {at}: recorded {was!r}, here {now!r}" for at, was, now in differing), "")
        yield subject, not wrong, wrong or f"the same bits in {plural(len(values), 'line')}"
    wrong_sections = [
        section for section, digest in recorded.weights.items() if weights_digest(here.state[section]) != digest
    ]
    if recorded.weights:
        yield "weights", not wrong_sections, f"the digest of {' and '.join(wrong_sections or recorded.weights)}"
    if saved is not None:
        pairs = {name: (was, here.state[section][name]) for section, name, was in _tensors(saved)}
        wrong_names = [name for name, (was, now) in pairs.items() if not torch.equal(was, now)]
        some = f"{', '.join(wrong_names[:3])}" + (f" and {len(wrong_names) - 3} more" if wrong_names[3:] else "")
        yield (
            "tensors",
            not wrong_names,
            some or f"the same bits in {plural(len(pairs), 'tensor')} of {saved.path.name}",
        )


def distances(
    recorded: Recorded, here: Replayed, exact: Replayed, saved: Checkpoint | None, precision: str
) -> Iterator[Comparison]:
    """Compare how far what was recorded and what was trained `here` in `precision` are from the `exact` result."""
    rights = recorded.scalars(exact)
    for subject, values in recorded.scalars(here).items():
        ratios = []
        for (at, *two), (_, _, right) in zip(values, rights[subject], strict=True):
            was, now, exactly = torch.tensor([*two, right], dtype=torch.float64)
            overflows = not any(map(math.isfinite, two))  # in both, as float64 does not
            ratios.append((0.0 if overflows else _ratio(was, now, exactly, _SCALARS[precision]), f"step {at}"))
        yield _farthest(subject, ratios)
    if saved is not None:
        ratios = [
            (_ratio(was, here.state[section][name], exact.state[section][name], _rounding(was)), name)
            for section, name, was in _tensors(saved)
        ]
        yield _farthest("tensors", ratios)


# The unit roundoff of a loss and a gradient norm that are computed in each precision.dtype. Without a more exact result
# than the run's own, as in float64, it stands for the order of summation.
_SCALARS = {"fp64": 2.0**-44, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def _rounding(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    return _SCALARS["fp64"] if tensor.dtype == torch.float64 else torch.finfo(tensor.dtype).eps / 2


def _ratio(was: torch.Tensor, now: torch.Tensor, right: torch.Tensor, rounding: float) -> float:
    """Return |was - right| / |now - right| in the 2-norm, the latter at least `rounding` of |right|."""
    was, now, right = was.double(), now.double(), right.double()
    distance, own = (was - right).norm().item(), (now - right).norm().item()
    if distance == 0:
        return 0.0
    smallest = max(own, rounding * right.norm().item())
    return distance / smallest if smallest > 0 and math.isfinite(distance) else math.inf


def _farthest(subject: str, ratios: list[tuple[float, str]]) -> Comparison:
    ratio, name = max(ratios)
    far = f"{ratio:.2g} times this machine's distance from float64 at most, limit {LIMIT:g}"
    return subject, ratio <= LIMIT, f"{name}: {far} ({len(ratios)} compared)"


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, torch.Tensor]]:
    for section, tensors in checkpoint.state.items():
        yield from ((section, name, tensor) for name, tensor in tensors.items())
