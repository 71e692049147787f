"""``dali-train prove RUN --replay STEP``: train a step again from the checkpoint before it, and compare.

Within one class of machine, loss, gradient norm and weights must be the recorded ones bit for bit. Elsewhere rounding
differs, and the same steps in float64 decide: what was recorded may be no farther from them than a small multiple of
what this machine is in the run's own precision (docs/exactness.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dali_train.checkpoint.fingerprint import (
    WeightDigests,
    libraries_elsewhere,
    machine,
    require_draws,
    weights_digest,
)
from dali_train.checkpoint.format import Checkpoint, CheckpointManifest, Tensors, load_checkpoint
from dali_train.checkpoint.recipe import keep_digests_of_lost_files, recipe, saved_recipe
from dali_train.checkpoint.run_directory import RunDirectory, checkpoint_paths, step_of
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.state import Start, capture_run
from dali_train.checkpoint.trained_model import check_registered, first_weights
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.commands.evaluate import joined_and_watched
from dali_train.commands.train import restored_trainer
from dali_train.config import Config
from dali_train.data.dataset.index import read_manifest
from dali_train.data.dataset.sample_recipe import changes_between
from dali_train.data.loading.loader import TrainLoader
from dali_train.errors import ConfigError
from dali_train.extras.proof.prove import with_dataset
from dali_train.files import temporary_directory
from dali_train.runtime.launch import Launch, LaunchOptions
from dali_train.runtime.process_group import host_group, on_rank_0
from dali_train.runtime.status import Event
from dali_train.text import plural, printable
from dali_train.training.build import RunPlan, build_loader, prepare, warm_up_trainer
from dali_train.training.metrics import TrainingSums
from dali_train.training.schedule import learning_rate
from dali_train.training.trainer import Trainer

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
    weights: dict[str, str]  # section -> digest, after `end` steps; empty: there was no checkpoint
    checkpoint: Path | None  # of `end` steps, if it is still there
    recipe: dict[str, Any]  # of the first checkpoint that has these steps; empty: there is none
    recipe_before: dict[str, Any]  # of the source

    @classmethod
    def of(cls, run: RunDirectory, step: int) -> "Recorded":
        """Find the steps to train again for `step`, counted from 1. Raises ConfigError: nothing to compare with."""
        require_draws(run)
        lines: dict[int, Event] = {}
        machines: dict[int, str] = {}
        means_since: dict[int, int] = {}
        machine_now = ""
        last_read = 0  # the step of the last line, after which the next line's means begin
        for event in run.events:
            if event["event"] == "start":
                machine_now = event.get("machine", "")
                last_read = event["step"]
            elif event["event"] == "train":
                at = event["step"]
                lines[at] = event
                machines[at] = machine_now
                means_since[at] = last_read
                last_read = at
        weights: WeightDigests = {}
        # No run writes a checkpoint of step 0: its initial weights follow from the recipe.
        paths = [path for path in checkpoint_paths(run.directory / "checkpoints") if step_of(path) > 0]
        recipes = {}
        for path in paths:
            values = CheckpointManifest.read(path).values
            weights |= values.weights
            recipes[step_of(path)] = saved_recipe(values, path)
        comparable = sorted({*lines, *map(int, weights)})
        ends = [at for at in comparable if at >= step]
        if step < 1 or not ends:
            last = comparable[-1] if comparable else 0
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
            means_since=means_since,
            machines={machines[at] for at in between} or {machine_now},
            weights=weights.get(str(end), {}),
            checkpoint=next((path for path in paths if step_of(path) == end), None),
            recipe=next((recipes[at] for at in sorted(recipes) if at >= end), {}),
            recipe_before=recipes.get(begin, {}),
        )

    def scalars(self, replayed: "Replayed") -> dict[str, list[tuple[int, float, float]]]:
        """Return (step, recorded, replayed) of each line, by name; without means that began before the checkpoint."""
        values: dict[str, list[tuple[int, float, float]]] = {}
        for at, line in self.lines.items():
            for subject, name in (("loss", "loss"), ("gradient", "grad_norm")):
                if name == "grad_norm" or self.means_since[at] >= self.begin:
                    was = line.get(name, math.nan)  # which no line of a run lacks
                    values.setdefault(subject, []).append((at, was, getattr(replayed.sums[at], name)))
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
    config = with_dataset(run.config, dataset)
    check_registered(config.model, run_dir)
    with joined_and_watched(options, config, run_dir) as (launch, device):
        group = host_group(launch)
        require_equal_ranks(config, device, group, recorded.source)
        check_same_recipe(recorded, config, step)
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
        print_classes(recorded.machines, here)
    lines = list(compared) or [("nothing", False, "there is neither a line nor a digest to compare with")]
    for subject, agrees, text in lines:
        print(f"{subject:8} {'' if agrees else 'DIFFERS: '}{text}")
    return all(agrees for _, agrees, _ in lines)


def train_again(
    config: Config, recorded: Recorded, launch: Launch, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[str, Replayed]:
    """Return the class of this machine, and the result of training the recorded steps again on all ranks."""
    plan = prepare(config, launch, device)
    trainer, loader = before(recorded, plan)
    sums = {}
    # Where lines end, and where a start began in between: reading begins new means.
    reads = recorded.lines.keys() | {recorded.means_since[at] for at in recorded.lines}
    for index in range(recorded.begin, recorded.end):
        trainer.step(index, learning_rate(config, index, plan.num_images), loader)
        if index + 1 in reads:
            sums[index + 1] = trainer.metrics.read()
    # A checkpoint has complete tensors under their names, whichever ranks hold them now.
    with temporary_directory() as own:
        directory = on_rank_0(lambda: own, group)
        writer_group = host_group(launch)
        writer = CheckpointWriter(directory, writer_group, keep=1, num_stages=plan.layout.pipeline)
        writer.prepare(recorded.begin)
        writer.save(recorded.end, *capture_run(trainer, group))
        writer.wait()
        state = load_checkpoint(checkpoint_paths(directory)[-1]).state if launch.rank == 0 else {}
    return machine(plan), Replayed(state=state, sums=sums)


def before(recorded: Recorded, plan: RunPlan) -> tuple[Trainer, TrainLoader]:
    """Return trainer and loader as they were before the recorded steps.

    Raises:
        CheckpointError: the checkpoint before them is damaged.
    """
    if recorded.source is None:
        start = Start(weights=first_weights(plan.config.model, plan.class_names))
    else:
        start = Start(checkpoint=load_checkpoint(recorded.source))
    trainer = restored_trainer(plan, start, evaluates=False)
    loader = build_loader(plan, start_step=recorded.begin)
    start.release()
    warm_up_trainer(trainer, plan.config, plan.device, plan.num_threads)
    return trainer, loader


def check_same_recipe(recorded: Recorded, config: Config, step: int) -> None:
    """Raises ConfigError: the steps were not trained with the settings and the dataset that config.json names now."""
    current = recipe(config, read_manifest(config.data))
    for saved, whose in ((recorded.recipe, "these steps had"), (recorded.recipe_before, "the checkpoint before has")):
        keep_digests_of_lost_files(saved, current)
        if saved and (changes := changes_between(saved, current)):
            raise ConfigError(
                f"--replay {step}: the recipe was changed during the run (run.accept_changed_recipe), and {whose} "
                f"another one than config.json and the dataset: {printable('; '.join(changes))}. Name a step that was "
                "trained from a checkpoint with the present recipe"
            )


def check_comparable(recorded: set[str], here: str, device: torch.device) -> None:
    """Raises ConfigError: steps of these classes have other pixels and dropout masks, not only other rounding."""
    if device.type != "cpu" or not all(", CPU, " in machine for machine in recorded):
        raise ConfigError(
            f"--replay: the step was computed on {printable(' and '.join(sorted(recorded)))}, and this is {here}. Only "
            "processors can be compared with each other: a GPU of another kind has other pixels and dropout masks. "
            "Replay on the same kind of GPU with the same versions and ranks"
        )


def print_classes(recorded: set[str], here: str) -> None:
    """Print which classes of machine are compared, and whether not only rounding may differ between them."""
    print(f"there    {printable(' and '.join(sorted(recorded)))}\nhere     {here}")
    if others := libraries_elsewhere(recorded):
        print(f"versions more than rounding may differ: the run had {printable(', '.join(others))}")


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
        found = []
        for (at, *two), (_, _, right) in zip(values, rights[subject], strict=True):
            was, now, exactly = torch.tensor([*two, right], dtype=torch.float64)
            if not any(map(math.isfinite, two)):  # both overflow, as float64 does not
                was = now = exactly
            found.append(distance(f"step {at}", was, now, exactly, SCALARS[precision]))
        yield _farthest(subject, found)
    if saved is not None:
        found = [
            distance(f"{section}.{name}", was, here.state[section][name], exact.state[section][name], _rounding(was))
            for section, name, was in _tensors(saved)
        ]
        yield _farthest("tensors", found)


# The unit roundoff of a loss and a gradient norm that are computed in each precision.dtype. Without a more exact result
# than the run's own, as in float64, it stands for the order of summation.
SCALARS = {"fp64": 2.0**-44, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def _rounding(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    return SCALARS["fp64"] if tensor.dtype == torch.float64 else torch.finfo(tensor.dtype).eps / 2


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far what was recorded is from the exact result."""

    name: str
    ratio: float  # in multiples of this machine's own distance
    unseen: float  # a change by less than this part of the exact result would not be seen


def distance(name: str, was: torch.Tensor, now: torch.Tensor, right: torch.Tensor, rounding: float) -> Distance:
    """Compare |was - right| with |now - right|, which counts as `rounding` of |right| at least, in the 2-norm."""
    was, now, right = was.double(), now.double(), right.double()
    far, own, size = (was - right).norm().item(), (now - right).norm().item(), right.norm().item()
    smallest = max(own, rounding * size)
    ratio = 0.0
    if far != 0:
        ratio = far / smallest if smallest > 0 and math.isfinite(far) else math.inf
    return Distance(name=name, ratio=ratio, unseen=LIMIT * smallest / size if size else 0.0)


def _farthest(subject: str, found: list[Distance]) -> Comparison:
    """Name the farthest, and how large a change is too small to be seen."""
    farthest = max(found, key=lambda distance: distance.ratio)
    # What a result is made of.
    weights = [distance for distance in found if distance.name.startswith("model.")] or found
    blindest = max(weights, key=lambda distance: distance.unseen)
    far = f"{farthest.ratio:.2g} times this machine's distance from float64 at most, limit {LIMIT:g}"
    half = median(distance.unseen for distance in weights)
    unseen = f"below {blindest.unseen:.1g} of {blindest.name}, and in half of them below {half:.1g}"
    return (
        subject,
        farthest.ratio <= LIMIT,
        f"{farthest.name}: {far} ({len(found)} compared); not seen are changes {unseen}",
    )


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, torch.Tensor]]:
    for section, tensors in checkpoint.state.items():
        yield from ((section, name, tensor) for name, tensor in tensors.items())
