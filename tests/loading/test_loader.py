"""The loader of other people's loops: the trainer's micro-batches, on any number of coordinates, through any resume."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import dali_train
from dali_train import EvalLoader, TrainLoader, View
from dali_train.config import Config, load_config
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles
from dali_train.data.loading.pipelines import Batch, DaliPipeline
from dali_train.data.sampling.micro_batch import view_configs
from dali_train.errors import ConfigError, RunError
from dali_train.runtime.launch import Launch
from dali_train.training.build import build_loader, prepare
from tests.conftest import REPOSITORY
from tests.helpers import EXCLUDED, Compared, in_ranks, in_tiers, wait_until
from tests.ranks import patience

CPU = torch.device("cpu")
ALONE: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "device": "cpu", "num_threads": 1}
DRAWS = ("positions", "images", "labels", "boxes", "flips", "operators", "levels", "erased", "partners", "lambdas")

# Of the trainer, and the keywords that say the same.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixup": ({}, {"mixup": {"alpha": 0.2}}),
    "vision-transformer": (
        {
            "data.augment": "rand-m9-mstd0.5-inc1",
            "data.random_erasing": 0.5,
            "data.random_erasing_fill": "noise",
            "data.interpolation": "random",
            "mixup.alpha": 0.8,
            "mixup.cutmix_alpha": 1.0,
            "mixup.until_epoch": 1,
            "data.exclude": EXCLUDED,
        },
        {
            "augment": "rand-m9-mstd0.5-inc1",
            "random_erasing": 0.5,
            "random_erasing_fill": "noise",
            "interpolation": "random",
            "mixup": {"alpha": 0.8, "cutmix_alpha": 1.0, "until_epoch": 1},
            "exclude": EXCLUDED,
        },
    ),
    "progressive": (
        {"data.progressive": ((1, 16), (2, 24)), "data.crop": "inception", "mixup.alpha": 0.0},
        {"progressive": ((1, 16), (2, 24)), "crop": "inception"},
    ),
    "blocks": (
        {"data.shuffle": "block", "data.block_images": 4, "data.window_blocks": 2, "data.repeats": 2, "data.seed": 7},
        {
            "shuffle": "block",
            "block_images": 4,
            "window_blocks": 2,
            "repeats": 2,
            "seed": 7,
            "mixup": {"alpha": 0.2},
        },
    ),
    "half": (
        {
            "data.shuffle": "balanced",
            "data.color_jitter": 0.4,
            "data.normalise": "imagenet",
            "model.channels_last": True,
            "precision.dtype": "bf16",
        },
        {
            "shuffle": "balanced",
            "color_jitter": 0.4,
            "normalise": "imagenet",
            "channels_last": True,
            "dtype": "bf16",
            "mixup": {"alpha": 0.2},
        },
    ),
}
NUM_STEPS = 5  # of 8 micro-batches; an epoch has 50 images, a step 32


def place(batch: Batch) -> tuple[int, int]:
    return batch.micro_batch.step, batch.micro_batch.k


def equal(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same draws and the same bits."""
    draws = all(np.array_equal(getattr(one.micro_batch, n), getattr(other.micro_batch, n)) for n in DRAWS)
    tensors = all(torch.equal(getattr(one, n), getattr(other, n)) for n in ("images", "targets", "lambdas"))
    return draws and tensors and one.images.dtype == other.images.dtype and one.images.stride() == other.images.stride()


@pytest.mark.parametrize("recipe", in_tiers(RECIPES, "mixup"))
def test_equals_the_trainers_on_any_number_of_coordinates(recipe: str, config: Config) -> None:
    """And through a resume from 4 coordinates on 3 and on 1."""
    changes, keywords = RECIPES[recipe]
    config = config.replace(changes)
    trainers = build_loader(prepare(config, Launch(), CPU))
    expected = {place(batch): batch for batch in (trainers.next() for _ in range(8 * NUM_STEPS))}

    def loader_of(rank: int, size: int) -> TrainLoader:
        shared: dict[str, Any] = {"batch_size": 4, "global_batch": 32, "image_size": 32, "num_threads": 1}
        return TrainLoader(config.data.root, dp_rank=rank, dp_size=size, device="cpu", **shared, **keywords)

    def take(loaders: list[TrainLoader], steps: int) -> Iterator[tuple[int, int]]:
        for loader in loaders:
            last = loader.step + steps
            while loader.step < last:
                batch = loader.next()
                assert equal(batch, expected[place(batch)]), place(batch)
                yield place(batch)

    for size in (1, 2, 3, 5):
        assert sorted(take([loader_of(rank, size) for rank in range(size)], NUM_STEPS)) == sorted(expected)
    states, seen = [{}] * 4, []
    for size, steps in ((4, 2), (3, 2), (1, 1)):
        loaders = [loader_of(rank, size) for rank in range(size)]
        if seen:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(states[0])))
        seen += list(take(loaders, steps))
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
    assert sorted(seen) == sorted(expected)


def test_epochs_have_every_image_once(dataset: Path) -> None:
    """On three coordinates, which a step's 4 micro-batches do not divide; targets are soft, or the pair and lambda."""
    images: list[list[int]] = [[], [], []]
    for rank in range(3):
        options: dict[str, Any] = {**ALONE, "dp_rank": rank, "dp_size": 3, "batch_size": 4, "global_batch": 16}
        loader = TrainLoader(dataset, image_size=32, mixup={"alpha": 0.2}, **options)
        pairs = TrainLoader(dataset, image_size=32, mixup={"alpha": 0.2}, targets="pairs", **options)
        ends = []
        for epoch in range(loader.epoch, 3):
            count, length = 0, len(loader)
            for (pixels, targets), (same, both, lambdas) in zip(loader, pairs, strict=True):
                assert loader.micro_batch is not None
                assert pixels.shape == (4, 3, 32, 32) and torch.equal(pixels, same)
                soft = torch.zeros(4, 5)
                for row in range(4):
                    soft[row, both[row, 0]] += lambdas[row]
                    soft[row, both[row, 1]] += 1 - lambdas[row]
                assert torch.equal(targets, soft)
                images[epoch] += loader.micro_batch.images.tolist()
                ends.append(loader.ends_step)
                count += 1
            assert count == length and loader.epoch == epoch + 1
        assert ends == ([False, True] * 10 if rank == 0 else [True] * 10)
    whole = np.concatenate([np.array(epoch) for epoch in images])
    assert len(whole) == 160 and [len(epoch) for epoch in images] == [64, 48, 48]
    counts = np.bincount(whole)
    assert len(counts) == 50 and counts.sum() == 160 and set(counts.tolist()) == {3, 4}, "three epochs and 10 images"


def test_the_rest_of_an_epoch(dataset: Path) -> None:
    """After a break, an interrupt in the middle of a step, and a resume; without mixup, targets are classes."""
    options: dict[str, Any] = {**ALONE, "batch_size": 4, "global_batch": 16, "image_size": 32}
    whole = TrainLoader(dataset, **options)
    expected = [(images, targets) for images, targets in whole]
    assert len(expected) == len(TrainLoader(dataset, **options)) == 16
    assert all(targets.dtype == torch.int64 for _, targets in expected)
    loader, seen = TrainLoader(dataset, **options), []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 6:
            break
    assert loader.state_dict()["step"] == 1 and not loader.ends_step

    def interrupted() -> Batch:
        raise KeyboardInterrupt

    loader._run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    del loader._run  # type: ignore[method-assign]
    assert loader._pipeline is None
    seen.append(next(iter(loader)))
    assert loader._pipeline is not None
    loader._pipeline.run()  # a micro-batch that an interrupt took between the pipeline and the caller
    seen += list(loader)
    assert len(seen) == 16
    for (images, targets), (others, labels) in zip(expected, seen, strict=True):
        assert torch.equal(images, others) and torch.equal(targets, labels)
    assert loader.epoch == 1
    resumed = TrainLoader(dataset, **options)
    resumed.load_state_dict({**whole.state_dict(), "step": 2})
    assert len(resumed) == 16 and len(list(resumed)) == 8
    resumed.set_epoch(1)
    assert resumed.step == 4, "it is there already"
    resumed.set_epoch(0)
    assert torch.equal(next(iter(resumed))[0], expected[0][0])
    images, targets = resumed.at(3, 1)
    assert torch.equal(images, expected[13][0]) and torch.equal(targets, expected[13][1]) and resumed.step == 0
    assert torch.equal(next(iter(resumed))[0], expected[1][0])


def test_global_batch_is_that_of_the_state(dataset: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "image_size": 32, "device": "cpu", "num_threads": 1}
    four = TrainLoader(dataset, dp_rank=0, dp_size=4, **options)
    next(iter(four))
    assert four.ends_step and four.state_dict()["global_batch"] == 16
    two = TrainLoader(dataset, dp_rank=1, dp_size=2, **options)
    two.load_state_dict(four.state_dict())
    assert [two.ends_step for _ in zip(two, range(4), strict=False)][:4] == [False, True, False, True]
    with pytest.raises(ConfigError, match=r"global_batch 16 and this loader 8: use global_batch=16"):
        TrainLoader(dataset, dp_rank=1, dp_size=2, global_batch=8, **options).load_state_dict(four.state_dict())
    with pytest.raises(ConfigError, match=r"global_batch 16 is 4 x batch_size 4, and 5 .*: start at most 4"):
        TrainLoader(dataset, dp_rank=1, dp_size=5, **options).load_state_dict(four.state_dict())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"crop_area": (2, 3)}, "crop_area is (2, 3): use two fractions with 0 < low <= high <= 1"),
        ({"hflip": 0.5}, "hflip is not a setting: use horizontal_flip"),
        ({"image_size": 0}, "image_size is 0: use a number of pixels from 1 to 65,500"),
        ({"batch_size": "8"}, "batch_size is '8': use a whole number from 1 to 65,536"),
        ({"batch_size": 3}, "global_batch 32 is not a multiple of batch_size 3: set batch_size 2, or global_batch 33"),
        ({"mixup": {"alpha": -1}}, "mixup alpha is -1: use a number from 0 on"),
        ({"dtype": "half"}, "dtype is 'half': use fp16 (of fp32, fp16, bf16)"),
        ({"device": "gpu"}, "device is 'gpu': use cpu, cuda or cuda:0, or leave it out"),
        ({"device": "cuda:99"}, "device is cuda:99, but torch finds "),
        ({"targets": "soft"}, "targets is 'soft': use classes or pairs"),
        ({"dp_size": None}, "dp_rank is 0 with dp_size 0: use both"),
        ({"dp_size": 9}, "global_batch 32 is 8 x batch_size 4, and 9 data-parallel ranks need at least one each"),
        ({"train_size": 32}, "train_size is 32: use image_size"),
        ({"local_copy": "/tmp"}, "local_copy is /tmp: a loader reads a dataset where it lies"),
        ({"augment": "rand-m9-xy"}, "augment is 'rand-m9-xy'"),
    ],
)
def test_mistakes_name_keyword_value_and_remedy(keywords: dict[str, Any], message: str, dataset: Path) -> None:
    with pytest.raises(ConfigError) as found:
        TrainLoader(dataset, **{"batch_size": 4, "global_batch": 32, **ALONE, **keywords})
    assert str(found.value).startswith(message)


# Each setting that decides samples, with another value than the state's: keywords of both loaders, and of the second.
OTHER_SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data.mix_until": ({}, {"mix_until": ((2, 1),)}),
    "data.mix_classes": ({}, {"mix_classes": "by-name"}),
    "data.epoch_images": ({}, {"epoch_images": 40}),
    "data.seed": ({}, {"seed": 1}),
    "data.shuffle": ({}, {"shuffle": "balanced"}),
    "data.block_images": ({"shuffle": "block", "block_images": 4}, {"block_images": 8}),
    "data.window_blocks": ({"shuffle": "block", "window_blocks": 4}, {"window_blocks": 2}),
    "data.reader": ({}, {"reader": "synthetic"}),
    "data.train_size": ({}, {"image_size": 40}),
    "data.progressive": ({}, {"progressive": ((2, 16),)}),
    "data.crop": ({}, {"crop": "inception"}),
    "data.crop_area": ({}, {"crop_area": (0.5, 1)}),
    "data.crop_aspect": ({}, {"crop_aspect": (1, 1)}),
    "data.crop_side": ({}, {"crop_side": 20}),
    "data.crop_padding": ({"crop_side": 20}, {"crop_padding": 2}),
    "data.crop_padding_mode": ({"crop_side": 20, "crop_padding": 2}, {"crop_padding_mode": "reflect"}),
    "data.horizontal_flip": ({}, {"horizontal_flip": 0.1}),
    "data.vertical_flip": ({}, {"vertical_flip": 0.1}),
    "data.alternating_flip": ({}, {"alternating_flip": True}),
    "data.augment": ({}, {"augment": "trivial"}),
    "data.color_jitter": ({}, {"color_jitter": 0.4}),
    "data.hue_jitter": ({}, {"hue_jitter": 0.1}),
    "data.color_jitter_probability": ({"color_jitter": 0.4}, {"color_jitter_probability": 0.5}),
    "data.grayscale": ({}, {"grayscale": 0.5}),
    "data.gaussian_blur": ({}, {"gaussian_blur": 0.5}),
    "data.random_erasing": ({}, {"random_erasing": 0.5}),
    "data.random_erasing_fill": ({"random_erasing": 0.5}, {"random_erasing_fill": "noise"}),
    "data.exclude": ({}, {"exclude": EXCLUDED}),
    "data.repeats": ({}, {"repeats": 2}),
    "data.interpolation": ({}, {"interpolation": "bicubic"}),
    "data.antialias": ({}, {"antialias": False}),
    "data.normalise": ({}, {"normalise": "imagenet"}),
    "batch.micro_batch": ({}, {"batch_size": 2}),
    "mixup.alpha": ({}, {"mixup": {"alpha": 0.2}}),
    "mixup.cutmix_alpha": ({}, {"mixup": {"cutmix_alpha": 1}}),
    "mixup.probability": ({"mixup": {"alpha": 0.2}}, {"mixup": {"alpha": 0.2, "probability": 0.5}}),
    "mixup.switch_probability": (
        {"mixup": {"alpha": 0.2, "cutmix_alpha": 1}},
        {"mixup": {"alpha": 0.2, "cutmix_alpha": 1, "switch_probability": 0.1}},
    ),
    "mixup.until_epoch": ({"mixup": {"alpha": 0.2}}, {"mixup": {"alpha": 0.2, "until_epoch": 1}}),
    "views": ({}, {"views": 2}),
    "split": ({}, {"split": "validation"}),
}
SAME_SAMPLES: dict[str, Any] = {
    "data.read_ahead_mb": 0,
    "data.cache_gb": 1.0,
    "data.hw_decoder_load": 0.5,
    "data.eval_resize": "squash",
    "data.eval_resize_to": 300,
    "data.eval_size": 32,
    "data.eval_interpolation": "bicubic",
    "data.eval_sets": (("more", "elsewhere"),),
    "data.eval_views": "mirrored",
}
# Other keywords of a loader. What its data.cache and data.device give is compared elsewhere.
NO_SETTINGS = {"data.root", "data.mix", "data.local_copy", "data.num_threads", "data.cache", "data.device"}


def test_a_state_of_other_samples_is_refused(dataset: Path) -> None:
    of_samples = {name for name in SETTINGS if name.startswith(("data.", "batch.", "mixup."))}
    assert of_samples - OTHER_SAMPLES.keys() - SAME_SAMPLES.keys() - NO_SETTINGS == {"batch.global_batch"}
    for name, (both, other) in OTHER_SAMPLES.items():
        options: dict[str, Any] = {**ALONE, "batch_size": 4, "global_batch": 8, "image_size": 32, **both}
        source = {dataset: 1} if name in ("data.mix_until", "data.mix_classes", "data.epoch_images") else dataset
        state = json.loads(json.dumps(TrainLoader(source, **options).state_dict()))
        TrainLoader(source, **options).load_state_dict(state)
        changed = TrainLoader(source, **options | other)
        keyword = {"data.train_size": "image_size", "batch.micro_batch": "batch_size"}.get(name, name)
        keyword = keyword.removeprefix("data.").replace(".", " ")
        with pytest.raises(ConfigError, match=f"other samples than this loader's:.*{keyword}"):
            changed.load_state_dict({**state, "step": 1})
        changed.load_state_dict({**changed.state_dict(), "step": 1})
        assert changed.step == 1


def test_a_state_is_of_a_mixtures_classes_too(dataset: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(dataset, renamed)
    manifest = json.loads((renamed / "dataset.json").read_text())
    manifest["class_names"][1] = "another"
    (renamed / "dataset.json").write_text(json.dumps(manifest))
    state = TrainLoader({dataset: 1}, batch_size=4, **ALONE).state_dict()
    with pytest.raises(ConfigError, match=r"class_names .*another"):
        TrainLoader({renamed: 1}, batch_size=4, **ALONE).load_state_dict(state)


@pytest.mark.parametrize("name", SAME_SAMPLES)
def test_a_state_does_not_depend_on_what_decides_no_samples(name: str, dataset: Path) -> None:
    options: dict[str, Any] = {**ALONE, "batch_size": 4, "image_size": 32}
    first = TrainLoader(dataset, **options)
    second = TrainLoader(dataset, **{**options, name.removeprefix("data."): SAME_SAMPLES[name]})
    first.next()
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.next().images, second.next().images)


def test_a_state_of_something_else_is_refused(dataset: Path) -> None:
    options: dict[str, Any] = {**ALONE, "batch_size": 4, "image_size": 32}
    loader = TrainLoader(dataset, **options)
    state = loader.state_dict()
    for name, value in {"step": "0", "global_batch": None, "samples": "50 images"}.items():
        with pytest.raises(ConfigError, match=f"the state to load has {name} {value!r}: use a state of this version"):
            loader.load_state_dict({**state, name: value})
    with pytest.raises(ConfigError, match="global_batch is 64, more than an epoch's 50 images: use at most that"):
        next(iter(TrainLoader(dataset, global_batch=64, **options)))


def test_one_iteration_and_one_thread_at_a_time(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    val = EvalLoader(dataset, batch_size=4, image_size=32, **ALONE)
    with pytest.raises(RunError, match="another iteration of this loader has begun"):
        for _ in zip(val, val, strict=True):
            pass
    assert sum(len(labels) for _, labels in val) == len(Split(dataset, "validation"))
    first = iter(val)
    for _ in val.batches:
        next(first)
    next(iter(val))
    with pytest.raises(RunError, match="another iteration of this loader has begun"):  # at its end, too
        next(first)
    assert sum(len(labels) for _, labels in val) == len(Split(dataset, "validation"))
    EvalLoader(dataset, batch_size=4, image_size=32, exclude=None, mix=(), **ALONE)
    for wrong, message in (
        ({"dataset": {dataset: 1}}, "an EvalLoader has one dataset: use its directory or URL"),
        ({"mix": (("a", str(dataset), 1),)}, "an EvalLoader has one dataset: use its directory or URL"),
        ({"exclude": EXCLUDED}, r"exclude is .*excluded.csv, a list of images for a TrainLoader: leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvalLoader(**{"dataset": dataset, "batch_size": 4, **ALONE, **wrong})

    train = TrainLoader(dataset, batch_size=4, image_size=32, **ALONE)
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def wait() -> Batch:
        is_waiting.set()
        assert may_go_on.wait(60)
        return take()

    take = train._next
    monkeypatch.setattr(train, "_next", wait)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(train.next)
        assert is_waiting.wait(60)
        with pytest.raises(RunError, match="two threads take micro-batches from one loader at the same time"):
            train.next()
        may_go_on.set()
        assert torch.equal(
            first.result().images, TrainLoader(dataset, batch_size=4, image_size=32, **ALONE).next().images
        )
    monkeypatch.undo()
    assert train.next().micro_batch.step == 1  # one after the other, of whichever thread
    with pytest.raises(ConfigError, match=r"set_epoch\(-1\): use a number from 0 on"):
        train.set_epoch(-1)


@pytest.mark.thorough
def test_what_it_imports(dataset: Path) -> None:
    """No trainer, timm, optimizer or extra but its settings; and a single process needs no process group."""
    script = f"""
import sys, dali_train
train = dali_train.TrainLoader({str(dataset)!r}, batch_size=4, image_size=32, augment="rand-m9-mstd0.5-inc1",
                               mixup=dict(alpha=0.2), device="cpu")
val = dali_train.EvalLoader({str(dataset)!r}, batch_size=4, image_size=32, device="cpu")
print(next(iter(train))[1].shape, sum(len(labels) for _, labels in val))
rooms = ("training", "checkpoint", "hooks", "commands")
print([name for name in sys.modules if name == "timm" or name.startswith(tuple(f"dali_train.{{r}}" for r in rooms))])
extras = [name.split(".")[3:] for name in sys.modules if name.startswith("dali_train.extras.")]
print([name for name in extras if name not in ([], ["settings"])])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "torch.Size([4, 5]) 13\n[]\n[]\n"), done.stderr


def test_a_fork_is_refused(dataset: Path) -> None:
    loader = TrainLoader(dataset, batch_size=4, image_size=32, **ALONE)
    val = EvalLoader(dataset, batch_size=4, image_size=32, **ALONE)
    next(iter(loader)), next(iter(val))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for one in (loader, val):
            try:
                next(iter(one))
            except RunError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    assert len(lines) == 2 and all(f"made in process {os.getpid()} and is used in" in line for line in lines)


@pytest.mark.thorough
def test_a_dropped_loader_leaves_nothing(dataset: Path) -> None:
    """In the middle of an epoch: no thread, no descriptor, no memory; and two at once do not disturb each other."""
    process = psutil.Process()

    def use() -> tuple[int, int]:
        one = TrainLoader(dataset, batch_size=16, image_size=224, **ALONE)
        two = TrainLoader(dataset, batch_size=16, image_size=224, seed=1, **ALONE)
        val = EvalLoader(dataset, batch_size=4, image_size=32, **ALONE)
        assert not torch.equal(next(iter(one))[0], next(iter(two))[0])
        assert torch.equal(next(iter(one))[0], one.at(1)[0])
        next(iter(val))
        return process.num_fds(), threading.active_count()

    use()
    gc.collect()
    descriptors, threads, memory = process.num_fds(), threading.active_count(), []
    for _ in range(8):
        threads_before = threading.active_count()
        used = use()
        wait_until(lambda: process.num_fds() <= descriptors and threading.active_count() <= threads)
        memory.append(process.memory_info().rss)
        assert used[1] > threads_before
    assert memory[-1] - memory[2] < 150_000_000, "each has some 40 MB of batches"


INTERRUPTED = """
import os, signal, sys, threading
from dali_train import TrainLoader

loader = TrainLoader(sys.argv[1], batch_size=2, image_size=64, augment="rand-m9-mstd0.5-inc1", dp_rank=0, dp_size=1,
                     device="cpu", num_threads=2)
seen, is_looping, num_interrupts = [], False, 0

def interrupt(number, frame):
    if is_looping:  # later it would end the process
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
while loader.epoch < 3:
    before = loader.step
    delay = 0.02 + num_interrupts * 0.037 % 0.3  # also while a pipeline is being built
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        is_looping = True
        for _ in loader:
            assert loader.micro_batch.step == loader.step - 1
            seen.append(loader.micro_batch.step)
    except KeyboardInterrupt:
        num_interrupts += 1
    is_looping = False
    timer.cancel()
    timer.join()
    seen += [step for step in range(before, loader.step) if step not in seen]  # handed over as the signal came
assert seen == list(range(75)), seen
assert num_interrupts > 0
"""


@pytest.mark.thorough
def test_interrupted_from_outside(dataset: Path) -> None:
    """A notebook's interrupt anywhere in the loop loses and repeats nothing, and the process ends."""
    command = [sys.executable, "-c", INTERRUPTED, str(dataset)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=patience(300))
    assert done.returncode == 0, done.stderr


def _in_a_group(rank: int, dataset: str) -> None:
    from dali_train.runtime.launch import LaunchOptions, discover
    from dali_train.runtime.process_group import process_group

    before = TrainLoader(dataset, batch_size=4, image_size=32, device="cpu", num_threads=1)
    with process_group(discover(LaunchOptions()), CPU):
        loader = TrainLoader(dataset, batch_size=4, image_size=32, device="cpu", num_threads=1)
        val = EvalLoader(dataset, batch_size=4, image_size=32, device="cpu", num_threads=1)
        numbers: list[Any] = [None, None]
        next(iter(loader))
        assert loader.micro_batch is not None
        mine = (loader.micro_batch.k, [number for _ in val for number in val.indices.tolist()])
        dist.all_gather_object(numbers, mine)
        assert [k for k, _ in numbers] == [0, 1]
        assert sorted(number for _, indices in numbers for number in indices) == list(range(13))
        assert loader.state_dict()["global_batch"] == before.state_dict()["global_batch"] == 8


def test_the_coordinate_is_the_process_groups(dataset: Path) -> None:
    """Before there is a group, the launcher's."""
    in_ranks(2, _in_a_group, str(dataset))


def test_evaluation(config: Config) -> None:
    """Every image once, in the trainer's pixels, again after an evaluation that was left in the middle."""
    split = Split(config.data.root, "validation")
    loaders = [EvalLoader.from_config(config, dp_rank=rank, dp_size=3, device="cpu") for rank in range(3)]
    own = EvalLoader(config.data.root, batch_size=13, image_size=32, eval_resize_to=36, **ALONE)
    ((whole, labels),) = list(own)
    assert labels.tolist() == split.rows["label"].tolist() and own.num_classes == 5
    for _ in range(2):
        indices: list[int] = []
        for loader in loaders:
            assert len(loader) == len(list(loader)) == len(loader.batches)
            for images, classes in loader:
                assert torch.equal(images, whole[loader.indices]) and torch.equal(classes, labels[loader.indices])
                indices += loader.indices.tolist()
            for _ in loader:
                break
        assert sorted(indices) == list(range(13))
    with pytest.raises(ConfigError, match="image_size 48 does not fit into eval_resize_to 36: enlarge eval_resize_to"):
        EvalLoader(config.data.root, batch_size=2, image_size=48, eval_resize_to=36, **ALONE)


def test_is_named_by_the_package(tiny_config: Path) -> None:
    assert {"TrainLoader", "EvalLoader"} <= set(dir(dali_train))
    loader = TrainLoader.from_config(load_config(tiny_config))
    assert loader.steps(1) == 2


VIEWS = (View(size=32, n=2, area=(0.32, 1)), View(size=16, n=3, area=(0.05, 0.32)))
VIEWS_ON_SEVERAL = Compared(("--views", "2"), 3, resumed=True, bound=None)
AUGMENTED: dict[str, Any] = {
    "augment": "rand-m9-mstd0.5-inc1",
    "grayscale": 0.2,
    "gaussian_blur": 0.5,
    "random_erasing": 0.5,
    "random_erasing_fill": "noise",
}


def all_views(dataset: Path, size: int, **options: Any) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Every view of the first two steps' 4 micro-batches, from loaders of `size` coordinates that are resumed once."""
    found = {}
    options = {"image_size": 32, "views": VIEWS, "device": "cpu", "num_threads": 1, **AUGMENTED, **options}
    for rank in range(size):
        loader = TrainLoader(dataset, batch_size=5, global_batch=20, dp_rank=rank, dp_size=size, **options)
        for images, labels in loader:
            micro_batch = loader.micro_batch
            assert micro_batch is not None and labels.tolist() == micro_batch.labels.tolist()
            assert [len(view) for view in images] == [5] * 5
            found[micro_batch.step, micro_batch.k] = images
            if loader.step == 1 and loader.ends_step:
                loader.load_state_dict(loader.state_dict())
            if loader.step == 2:
                break
    return found


def test_views_are_pure(dataset: Path) -> None:
    """Of one decoded box, and equal on 1, 2 and 3 coordinates and through a resume; each with draws of its own."""
    one = all_views(dataset, 1)
    assert sorted(one) == [(step, k) for step in range(2) for k in range(4)]
    for size in (2, 3):
        other = all_views(dataset, size)
        assert sorted(other) == sorted(one)
        for place, images in one.items():
            assert all(torch.equal(*pair) for pair in zip(images, other[place], strict=True)), place
    loader = TrainLoader(dataset, batch_size=5, image_size=32, views=VIEWS, **ALONE, **AUGMENTED)
    micro_batch = loader.next().micro_batch
    rows = Split(dataset, "train").rows[micro_batch.images]
    for number, view in enumerate(micro_batch.views):
        assert view.size == (32, 32, 16, 16, 16)[number] and np.array_equal(view.images, micro_batch.images)
        shares = view.boxes[:, 2].astype(float) * view.boxes[:, 3] / rows["height"] / rows["width"]
        assert ((shares > 0.3) if number < 2 else (shares < 0.5)).all()
    assert len({view.boxes.tobytes() for view in micro_batch.views}) == 5
    assert len({view.levels.tobytes() for view in micro_batch.views}) == 5


def test_a_view_has_the_pixels_of_its_crop_alone(dataset: Path) -> None:
    """Cut from the box around all views, on both devices' paths, it is what a loader of this crop alone decodes."""
    options: dict[str, Any] = {**ALONE, "batch_size": 5, "image_size": 32}
    several = TrainLoader(dataset, views=VIEWS, **options)
    views, _ = next(iter(several))
    assert several.micro_batch is not None
    for view, images in zip(several.micro_batch.views, views, strict=True):
        alone = TrainLoader(dataset, **{**options, "image_size": view.size})
        pipeline = alone._pipeline_of(alone._segment_at(0), itertools.repeat(replace(view, views=())))
        assert torch.equal(pipeline.run().images, images)
        pipeline.close()
    segment = several._segment_at(0)
    data = [one.data for one in view_configs(several.config, VIEWS)]
    storage, batches = MappedFiles(several._split), itertools.repeat(several.micro_batch)
    dali = DaliPipeline(
        several._split, storage, batches.__next__, segment.config.data, several._pixels, size=5, views=data
    )
    for by_dali, images in zip(dali.run().views, views, strict=True):
        assert by_dali.shape == images.shape and (by_dali - images).abs().mean() < 0.02
    dali.close()
    single = TrainLoader(dataset, views=1, **options)
    assert torch.equal(next(iter(single))[0][0], next(iter(TrainLoader(dataset, **options)))[0]), "as without views"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"views": 0}, "views is 0: use a number of views from 1 to 64"),
        ({"views": (2,)}, "views is (2,): use a number, or dali_train.View(...)"),
        ({"views": (View(area=(0.5, 0.1)),)}, "crop_area is (0.5, 0.1): use two fractions"),
        ({"views": 2, "mixup": {"alpha": 0.2}}, "views with mixup, which goes with a single view"),
        ({"views": 2, "crop_side": 28}, "views with crop_side, which goes with a single view"),
    ],
)
def test_views_that_cannot_be(keywords: dict[str, Any], message: str, dataset: Path) -> None:
    with pytest.raises(ConfigError) as found:
        TrainLoader(dataset, batch_size=4, **ALONE, **keywords)
    assert str(found.value).startswith(message)
