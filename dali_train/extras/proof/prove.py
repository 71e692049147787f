"""``dali-train prove``: whether a run had the samples, draws, rates and weights that its recipe demands.

The record that a run keeps (checkpoint/fingerprint.py) is recomputed from the index, without images, on any machine,
whatever ranks trained. Weights and accuracies are compared with their recorded digests; replay.py trains a step, or
evaluates, again. A table in docs/exactness.md says what this proves, and what it does not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dali_train.checkpoint.fingerprint import (
    WeightDigests,
    draws_digest,
    libraries_elsewhere,
    order_digest,
    recipe_digest,
    require_draws,
    result_of,
    samples_of,
    weights_digest,
)
from dali_train.checkpoint.format import CheckpointError, load_checkpoint
from dali_train.checkpoint.recipe import keep_digests_of_lost_files, recipe
from dali_train.checkpoint.run_directory import RunDirectory, local_run, step_of
from dali_train.checkpoint.trained_model import MODEL_FILE
from dali_train.config import Config
from dali_train.data.dataset.sample_recipe import changes_between
from dali_train.data.progress import Progress
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.extras.proof.accuracies import check_accuracies
from dali_train.extras.proof.evidence import Evidence, Point
from dali_train.runtime.status import METRICS
from dali_train.text import plural, printable
from dali_train.training.schedule import learning_rate

MOST_DRAWS = 20_000
"""Micro-batches whose draws are recomputed if not all are asked for: a minute, at 2 to 4 ms each."""
LIMITS = (
    "This compares what the run wrote with what its recipe demands, and its files with each other. It does not prove "
    "that losses, gradient norms and weights were computed (--replay STEP trains a step again), that the accuracies "
    "are those of the weights (--replay eval evaluates again), the pixels (data verify), or the times; and nothing is "
    "signed. docs/exactness.md has the table."
)


def prove(run: Path | str, *, dataset: str | None, all_draws: bool) -> bool:
    """Print what of a run agrees with its recipe and dataset, and what differs.

    Args:
        run: its directory, or the URL of its mirror, of which the newest checkpoint's weights are checked.
        dataset: the dataset on this machine; None: where the run had it.
        all_draws: recompute all draws instead of those of about `MOST_DRAWS` micro-batches.

    Returns:
        Whether everything agrees.

    Raises:
        ConfigError, DatasetError: there is no such run, it has no record, or its dataset is not here.
        CheckpointError, ObjectStoreError: see `local_run`.
    """
    with local_run(run, "newest") as directory:
        return _prove(RunDirectory(directory), dataset=dataset, all_draws=all_draws)


def _prove(run: RunDirectory, *, dataset: str | None, all_draws: bool) -> bool:
    require_draws(run)
    config = with_dataset(run.config, dataset)
    split, micro_batches = samples_of(config)
    evidence = Evidence.of(run, run.config.steps(run.config.run.epochs, split.num_images))
    current = recipe(config, split.manifest)
    keep_digests_of_lost_files(evidence.recipe, current)
    points, last = evidence.points, evidence.points[-1].step
    sums = order_sums(micro_batches, {point.step for point in points})
    # What a record has beyond the recomputed order is the same number at every step: the recipe's digest.
    beyond = [(point.order - sums[point.step]) % (1 << 128) for point in points]
    num_steps, draws = check_draws(points, micro_batches, all_draws=all_draws)
    num_rates, rates = check_rates(evidence, split.num_images)
    num_weights, weights = check_weights(evidence)
    num_accuracies, accuracies = check_accuracies(evidence)
    subjects = {
        "recipe": (
            check_recipe(evidence, current, beyond[0]),
            "dataset and settings are those that the run began with",
        ),
        "order": (
            check_order(points, beyond) + check_complete(evidence),
            f"the images of {plural(last, 'step')} are those that the recipe demands",
        ),
        "draws": (draws, f"so is everything drawn for them, in {num_steps} of {plural(last, 'step')}"),
        "rates": (rates, f"and the learning rates in {plural(num_rates, 'line')}"),
        "weights": (weights, f"{plural(num_weights, 'set')} of weights with the recorded digest"),
        "accuracy": (
            accuracies,
            f"{plural(num_accuracies, 'evaluation')} as in their lines, in all files that have the accuracy",
        ),
    }
    for subject, (faults, agreement) in subjects.items():
        for line in [f"DIFFERS: {fault}" for fault in faults] or [agreement]:
            print(f"{subject:8} {printable(line)}")
    if others := libraries_elsewhere(event["machine"] for event in run.events if "machine" in event):
        text = f"the run had {', '.join(others)}: pixels and rounding may differ, samples and draws do not depend on it"
        print(f"machine  {printable(text)}")
    print(LIMITS)
    return not any(faults for faults, _ in subjects.values())


def with_dataset(config: Config, dataset: str | None) -> Config:
    """Return the settings of a run with the `dataset` on this machine, of which no copies are made."""
    data = config.data.moved({config.data.root: dataset or config.data.root})
    return replace(config, data=replace(data, local_copy=None, cache=None, cache_gb=None)).from_files(config.files)


def order_sums(micro_batches: MicroBatches, steps: set[int]) -> dict[int, int]:
    """Return the sum of the digests of the order of all steps before each of `steps`."""
    sums, total, last = {}, 0, max(steps)
    with Progress("order", last, "step") as progress:
        for step in range(last + 1):
            if step in steps:
                sums[step] = total
            if step < last:
                first = micro_batches.positions(step, 0)
                positions = first[0] + np.arange(len(first) * micro_batches.num_per_step)
                images, _ = micro_batches.order.images_at(positions)
                total += sum(order_digest(step, k, part) for k, part in enumerate(images.reshape(-1, len(first))))
                progress.update(1)
    return sums


def check_recipe(evidence: Evidence, current: dict[str, Any], root: int) -> list[str]:
    """Compare the `current` recipe with the newest checkpoint's and with the digest in the records, `root`."""
    changes = changes_between(evidence.recipe, current) if evidence.recipe else []
    difference = f"the newest checkpoint has another recipe than config.json and the dataset: {'; '.join(changes)}"
    faults = [difference] if changes else []
    if root != recipe_digest(current):
        steps = _steps(0, evidence.points[0].step)
        also = f", or other images in {steps}" if evidence.points[0].step else ""
        faults.append(f"the record began with another recipe or dataset{also}")
    faults += [
        f"{source} has a step that the config's {evidence.end} do not reach" for source in evidence.beyond_the_end[:1]
    ]
    return faults


def check_order(points: Sequence[Point], beyond: Sequence[int]) -> list[str]:
    """Name the first records whose order of images is not the recomputed one.

    Args:
        beyond: of each point, the difference to the recomputed order.
    """
    wrong = [point for point, number in zip(points, beyond, strict=True) if number != beyond[0]]
    if not wrong:
        return []
    first = wrong[0]
    if right := [point for point in points if point.step == first.step and point not in wrong]:
        return [f"{first.source} has another record of step {first.step} than {right[0].source}"]
    later = [point for point in points if point.step > first.step]
    num_wrong = sum(point in wrong for point in later)
    if later and not num_wrong:
        return [f"the record of step {first.step} was changed in {first.source}: all later ones agree"]
    before = max(point.step for point in points if point.step < first.step)
    return [
        f"{_steps(before, first.step)} had other images; {num_wrong} of {plural(len(later), 'later record')} differ too"
    ]


def check_complete(evidence: Evidence) -> list[str]:
    """Name steps of the run that no record covers."""
    faults = []
    events = evidence.run.events
    first = evidence.points[0].step
    # The run itself may have begun there, at a step of another run.
    begins_there = bool(events) and events[0]["event"] == "start" and events[0]["step"] == first
    if first > 0 and not begins_there:
        faults.append(f"{METRICS} lacks the record of {_steps(0, first)}")
    last = evidence.points[-1].step
    trained = max((event["step"] for event in events if event["event"] == "train"), default=0)
    status = evidence.status
    if status is not None and status.state in ("finished", "stopped"):
        trained = max(trained, status.step)
    if last < trained:
        faults.append(f"there is no record of {_steps(last, trained)}")
    return faults


def check_draws(points: Sequence[Point], micro_batches: MicroBatches, *, all_draws: bool) -> tuple[int, list[str]]:
    """Compare the differences of neighbouring records with the draws of the steps between them, from step 0 on.

    Returns:
        The number of these steps, and what differs first.
    """
    by_step = {0: Point(0, 0, 0, "")} | {point.step: point for point in reversed(points)}
    intervals = list(pairwise(sorted(by_step)))
    if not all_draws and intervals:
        longest = max(end - begin for begin, end in intervals) * micro_batches.num_per_step
        number = max(2, MOST_DRAWS // longest)
        if number < len(intervals):  # spread evenly, with the first and the last
            intervals = [intervals[i * (len(intervals) - 1) // (number - 1)] for i in range(number)]
    faults = [f"{point.source}: there are draws in step 0" for point in points if point.step == 0 and point.draws]
    num_steps = sum(end - begin for begin, end in intervals)
    with Progress("draws", num_steps, "step") as progress:
        for begin, end in intervals:
            total = 0
            for step in range(begin, end):
                total += sum(draws_digest(micro_batches(step, k)) for k in range(micro_batches.num_per_step))
                progress.update(1)
            if (by_step[end].draws - by_step[begin].draws - total) % (1 << 128):
                faults.append(f"{_steps(begin, end)} had other draws ({by_step[end].source})")
                break
    return num_steps, faults


def _steps(before: int, last: int) -> str:
    """Name the steps after `before`, counted from 1 as in metrics.jsonl."""
    return f"step {last}" if last - before == 1 else f"steps {before + 1} to {last}"


def check_rates(evidence: Evidence, num_images: int) -> tuple[int, list[str]]:
    """Compare the learning rate and the epoch in each line of a step with those that the config gives it.

    Returns:
        The number of lines, and what differs.
    """
    config = evidence.run.config
    lines = [event for event in evidence.run.events if event["event"] == "train" and 0 < event["step"] <= evidence.end]
    faults = []
    for line in lines:
        step = line["step"]
        right = {
            "lr": learning_rate(config, step - 1, num_images),
            "epoch": step * config.batch.global_batch / num_images,
        }
        # The last bit of a power or a cosine depends on the machine's library.
        wrong = [name for name in right if not math.isclose(line.get(name, math.nan), right[name], rel_tol=1e-12)]
        faults += [f"{METRICS}: {name} of step {step} is {line.get(name)}, not {right[name]}" for name in wrong]
    return len(lines), faults[:3]


def check_weights(evidence: Evidence) -> tuple[int, list[str]]:
    """Compare the weights in all checkpoints and in model.safetensors with the digests in all manifests.

    Returns:
        The number of sets of weights that are here, and what differs.
    """
    faults, number = [*evidence.damage], 0
    recorded: WeightDigests = {}
    for path, history in evidence.weights.items():
        for step, digests in history.items():
            if recorded.setdefault(step, digests) != digests:
                faults.append(f"{path.name} has another digest of the weights of step {step} than an older checkpoint")
        unknown = [older for older in evidence.weights if step_of(older) <= step_of(path)]
        faults += [
            f"{path.name} has no digest of the weights of step {step_of(older)}, which a run writes there"
            for older in unknown
            if str(step_of(older)) not in history
        ]
        if step_of(path) == 0:
            faults.append(f"{path.name}: no run writes a checkpoint of step 0")
    for path in evidence.weights:
        try:
            state = load_checkpoint(path).state
        except CheckpointError as error:
            faults.append(str(error))
            continue
        digests = recorded.get(str(step_of(path)), {})
        for section in _RESULTS & state.keys():
            number += 1
            if weights_digest(state[section]) != digests.get(section):
                faults.append(f"{path.name}: the weights of section {section} are not those that were saved")
    results, status = {step: result_of(digests) for step, digests in recorded.items()}, evidence.status
    if status is not None and status.weights and results.setdefault(str(status.step), status.weights) != status.weights:
        faults.append(f"status.json has another digest of the weights of step {status.step} than the checkpoints")
    if (model := evidence.run.directory / MODEL_FILE).exists():
        faults += _check_model(model, results)
    return number + model.exists(), faults


_RESULTS = {"model", "ema"}  # the sections of a checkpoint that have a digest


def _check_model(path: Path, results: dict[str, str]) -> Iterator[str]:
    try:
        with safe_open(path, "pt") as file:
            step = (file.metadata() or {}).get("step", "none")
            digest = weights_digest({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        yield f"{path.name} cannot be read ({error})"
        return
    if digest != results.get(step):
        yield f"{path.name} has other weights than those saved after step {step}"
