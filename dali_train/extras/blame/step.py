"""Which images made the loss of a step, from a run directory and the dataset alone.

The order, the crops and the partners of every step follow from the recipe, so a step can be looked at long after the
run, on another number of ranks: the steps from the checkpoint before it are trained again, in this process, and the
step's micro-batches are passed through the network as it was then.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.checkpoint.trained_model import check_registered
from dali_train.commands.evaluate import joined_and_watched
from dali_train.config import Config, ParallelConfig
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.pipelines import Batch
from dali_train.data.progress import Progress
from dali_train.errors import ConfigError
from dali_train.extras.image_names import file_names
from dali_train.extras.pictures.predictions import sample_images, sheet
from dali_train.extras.proof.prove import with_dataset
from dali_train.extras.proof.replay import Recorded, before, check_same_recipe
from dali_train.runtime.launch import LaunchOptions
from dali_train.text import aligned, plural
from dali_train.training.build import RunPlan, prepare
from dali_train.training.invariant import seed_micro_batch
from dali_train.training.schedule import learning_rate
from dali_train.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Blamed:
    """One image of a step, as the network saw it."""

    image: int  # row of the training split's index
    label: int  # of the index
    loss: float  # of this image, of whose mean the step's loss is made
    share: float | None  # of the norms of the images' gradients for the classifier; None: its gradient is unknown
    k: int  # micro-batch
    number: int  # in it
    pixels: NDArray[np.uint8]  # (height, width, 3), cropped, mirrored and mixed
    caption: str  # its classes


def blame(run_dir: Path, step: int | None, *, dataset: str | None, count: int, picture: Path | None) -> list[Blamed]:
    """Print the images of a step by their loss, and draw the first `count`.

    Args:
        step: counted from 1; None: that with the largest loss in the line of metrics.jsonl where the loss rises most.
        dataset: where the run's dataset is now; None: at its data.root.
        picture: a PNG file; None: in the run directory.

    Raises:
        ConfigError, CheckpointError, DatasetError: the step cannot be trained again here, or there is no jump to find.
    """
    run = RunDirectory(run_dir)
    config = with_dataset(run.config, dataset)
    # Samples do not depend on the layout of ranks, and weights only by rounding.
    config = replace(config, parallel=ParallelConfig(grad_reduce_dtype=config.parallel.grad_reduce_dtype))
    check_registered(config.model, run_dir)
    with joined_and_watched(LaunchOptions(), config, run_dir) as (launch, device):
        plan = prepare(config, launch, device)
        if step is None:
            step = _worst_step(run, plan)
        images = _look_at(run, plan, step, count)
    _print(images, step, count, plan)
    path = picture or run_dir / "blame" / f"step-{step:08d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet([(image.pixels, f"{image.loss:.2f}: {image.caption}") for image in images[:count]]).save(path)
    print(path)
    return images


def _worst_step(run: RunDirectory, plan: RunPlan) -> int:
    """Return the step with the largest loss, counted from 1, in the line where the mean loss rises most."""
    # Steps that were repeated after a resume count as they were the last time.
    by_step = {event["step"]: _size(event["loss"]) for event in run.events if event["event"] == "train"}
    rises = [(by_step[last] - by_step[first], first, last) for first, last in pairwise(sorted(by_step))]
    rise, first, last = max((window for window in rises if window[0] > 0), default=(0.0, 0, 0))
    if not rise:
        raise ConfigError(f"{run.directory}: its loss rises in no line of metrics.jsonl: name a step with --step")
    print(f"the loss rises most, by {rise:.4f}, between step {first} and step {last}")
    if last == first + 1:
        return last
    trainer, loader, begin = _before(run, plan, first + 1)
    losses = {}
    for index in _training(trainer, loader, plan, begin, last):
        if index >= first:
            losses[index + 1] = _size(trainer.metrics.read().loss)
    return max(losses, key=lambda step: losses[step])


def _size(loss: float) -> float:
    """Return a number to compare: a loss that is not finite is larger than any other."""
    return loss if math.isfinite(loss) else math.inf


def _before(run: RunDirectory, plan: RunPlan, step: int) -> tuple[Trainer, TrainLoader, int]:
    """Return trainer and loader as at the last checkpoint before `step` (from 1), and the steps done there."""
    recorded = Recorded.of(run, step)
    check_same_recipe(recorded, plan.config, step)
    return *before(recorded, plan), recorded.begin


def _training(trainer: Trainer, loader: TrainLoader, plan: RunPlan, begin: int, end: int) -> Iterator[int]:
    """Train the steps `begin` to `end`, counted from 0; yield the number of each when it is done."""
    with Progress(f"training from step {begin}", total=end - begin, unit="steps") as progress:
        for index in range(begin, end):
            trainer.step(index, learning_rate(plan.config, index, plan.num_images), loader)
            progress.update(1)
            yield index


def _look_at(run: RunDirectory, plan: RunPlan, step: int, count: int) -> list[Blamed]:
    """Return the images of `step` (from 1), largest loss first; those after the first `count` without pixels."""
    if plan.config.loss.name == "two-way":
        raise ConfigError(
            f"{run.directory}: loss.name two-way compares the images of a micro-batch, so that none has a loss of its "
            "own: blame takes runs with any other loss"
        )
    trainer, loader, begin = _before(run, plan, step)
    for _ in _training(trainer, loader, plan, begin, step - 1):
        pass
    names = partial(plan.split.label_text, names=tuple(plan.class_names or map(str, range(plan.num_classes))))
    images: list[Blamed] = []
    for _ in range(trainer.num_micro_batches):
        images += _passed(trainer, loader.next(), plan.config, names)
        images.sort(key=lambda image: (-_size(image.loss), image.k, image.number))
        images[count:] = [replace(image, pixels=np.zeros((0, 0, 3), np.uint8)) for image in images[count:]]
    if any(image.share is None for image in images):
        return images
    total = sum(image.share or 0.0 for image in images)
    return [replace(image, share=(image.share or 0.0) / total if total else 0.0) for image in images]


def _passed(trainer: Trainer, batch: Batch, config: Config, names: Callable[[int], str]) -> list[Blamed]:
    """Return the images of a micro-batch with the norms of their gradients as shares, not yet divided by the sum."""
    seed_micro_batch(batch.micro_batch.dropout_seed, batch.images.device)
    with _input_of_classifier(trainer.model) as features, torch.no_grad(), trainer.precision.autocast():
        images = batch.images.to(trainer.precision.image_dtype)
        output = trainer.parallel.model(images)
    losses, slopes = _losses(trainer, output, images, batch)
    norms: list[float] | list[None] = [None] * len(images)
    if slopes is not None and features:
        # The gradient of a linear layer for one image is the outer product of the slope and (features, 1 for the bias).
        sizes = features[0].double().square().sum(dim=1) + 1
        norms = (slopes.double().norm(dim=1) * sizes.sqrt()).tolist()
    drawn = sample_images(batch, config.data, names, len(images))
    part = batch.micro_batch
    return [
        Blamed(
            image=int(part.images[number]),
            label=int(part.labels[number]),
            loss=losses[number],
            share=norms[number],
            k=part.k,
            number=number,
            pixels=pixels,
            caption=caption,
        )
        for number, (pixels, caption) in enumerate(drawn)
    ]


def _losses(
    trainer: Trainer, output: Any, images: torch.Tensor, batch: Batch
) -> tuple[list[float], torch.Tensor | None]:
    """Return the loss of each image, and its derivative by the image's logits, (n, classes); None: the model also has a
    distillation token, whose logits count too."""
    parts = output if isinstance(output, tuple) else (output,)
    parts = tuple(part.detach().requires_grad_() for part in parts)
    losses = []
    for number in range(len(images)):
        own = slice(number, number + 1)
        cut = tuple(part[own] for part in parts)
        single = cut if isinstance(output, tuple) else cut[0]
        with trainer.precision.autocast():
            loss, _ = trainer.objective(single, images[own], batch.targets[own], batch.lambdas[own])
        losses.append(loss)
    (slopes,) = torch.autograd.grad(torch.stack(losses).sum(), parts[:1])
    return [float(loss.detach()) for loss in losses], slopes if len(parts) == 1 else None


@contextmanager
def _input_of_classifier(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what the classifier of a timm model gets, (n, features), if it is one linear layer."""
    seen: list[torch.Tensor] = []
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    if not isinstance(classifier, nn.Linear):
        yield seen
        return

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].dim() == 2:
            seen.append(inputs[0].detach())

    handle = classifier.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def _print(images: list[Blamed], step: int, count: int, plan: RunPlan) -> None:
    shown = images[:count]
    numbers = np.array([blamed.image for blamed in shown])
    known = bool((numbers >= 0).all())  # with data.reader dali only DALI knows them
    files = file_names(plan.split, numbers) if known else [""] * len(shown)
    mean = sum(image.loss for image in images) / len(images)
    print(f"step {step}: {plural(len(images), 'image')}, mean loss {mean:.4f}")
    rows = [("loss", "share", "image", "classes as trained", "file")]
    for blamed, file in zip(shown, files, strict=True):
        share = "" if blamed.share is None else f"{blamed.share:.1%}"
        rows.append((f"{blamed.loss:.4f}", share, f"{blamed.image:,}", blamed.caption, file))
    print("\n".join(aligned(rows)))
    if shown and shown[0].share is not None:
        print("share: of the sum of the images' gradient norms, for the weights of the classifier", file=sys.stderr)
