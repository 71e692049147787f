"""`doctor`'s checks of a config: the recipe, the dataset, decoding as in training, and the run directory."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from dali_train.checkpoint.storage import CheckpointError
from dali_train.checkpoint.transfer import ranks_apart
from dali_train.commands.plan import FINE_WHEN_DRAWN, describe_largest_micro_batch, forecast
from dali_train.config import Config, HooksConfig, RunConfig
from dali_train.data.dataset.image_file import BadImageError, image_size
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import open_storage, read_stored
from dali_train.data.loading.decoder import LOG_VARIABLE, decoder_in_log
from dali_train.data.loading.first_batch import decoding_device
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.launch import Launch
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from dali_train.runtime.process_group import on_rank_0
from dali_train.training.build import fit_to_ranks
from dali_train.training.memory import Memory
from dali_train.training.model import (
    compare_with_timm,
    describe_parameters,
)

Verdict = Literal["pass", "warn", "fail"]
SLOW_DISK_MB_S = 100.0  # ViT-B/16 with LAMB's moments is 1 GB: 10 s a checkpoint
_DECODING_LIMIT_S = 180


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def model_and_batch(config: Config, launch: Launch, device: torch.device) -> tuple[list[Finding], Memory | None]:
    """Check model, image sizes and batch as `train` does, on the meta device, without computing anything.

    Returns:
        The findings, and the memory of the model.
    """
    findings, layout = [], None
    try:
        layout, batch = fit_to_ranks(config, launch), config.batch
        found = (
            f"{batch.global_batch:,} images per step: {batch.describe_accumulation(layout.data_size)} x "
            f"{batch.micro_batch} on each rank{layout.describe_idle(batch.num_micro_batches)}"
        )
        findings.append(Finding("batch", "pass", found))
    except ConfigError as error:
        findings.append(Finding("batch", "fail", str(error), "see the message"))
    num_classes = 1000
    with suppress(ConfigError, DatasetError, OSError):
        num_classes = Split(config.data.root, "train").num_classes
    try:
        model, memory, ranks = forecast(config, layout, num_classes)
    except (ConfigError, CheckpointError) as error:
        return [*findings, Finding("model", "fail", str(error), "see the message")], None
    differences = compare_with_timm(model, config)
    name = (
        f"{config.model.name}: {describe_parameters(model)}, takes {config.data.train_size} and "
        f"{config.data.eval_size} px"
    )
    findings.append(Finding("model", "pass", name))
    findings += [Finding("model", "warn", difference, FINE_WHEN_DRAWN) for difference in differences]
    if device.type == "cuda" and layout is not None and config.batch.num_micro_batches >= layout.data_size:
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        mine = ranks[layout.pipeline_rank].memory
        fits, words = describe_largest_micro_batch(config, mine, device_bytes, layout.data_size)
        remedy = "" if fits else "a smaller batch.micro_batch, or model.activation_checkpointing true"
        findings.append(Finding("memory", "pass" if fits else "warn", words, remedy))
    return findings, memory


def _bucket(split: Split, config: Config) -> Finding:
    """Measure the object store's latency and bandwidth for one process: one image at a time, and all at once."""
    storage = open_storage(split, config.data)
    images = np.random.default_rng(1).permutation(len(split))[:256]
    seconds = []
    try:
        for image in images[:5]:
            start = time.perf_counter()
            storage.read(image[None])
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        num_bytes = sum(len(content) for content in storage.read(images))
    except DatasetError as error:
        return Finding(f"bucket {split.name}", "fail", str(error), "see the message")
    rate = 1 / (time.perf_counter() - start)
    found = (
        f"{1000 * min(seconds):.0f} ms for one image; {num_bytes * rate / 1e6:.0f} MB/s, {len(images) * rate:,.0f} "
        "images/s for this process without a cache"
    )
    return Finding(f"bucket {split.name}", "pass", found)


def splits(config: Config) -> Iterator[Finding]:
    for name in ("train", "validation"):
        try:
            split = Split(config.data.root, name)  # compares index, manifest and shards' sizes
        except (DatasetError, OSError) as error:
            optional = name == "validation" and "has no validation split" in str(error)
            yield Finding(
                f"data {name}", "warn" if optional else "fail", str(error), "" if optional else "see the message"
            )
            continue
        images = np.random.default_rng(0).integers(0, len(split), size=64)
        if split.manifest.encoding == "image":
            strange = []
            stored = read_stored(open_storage(split, config.data), split, images)
            for image, content in zip(images.tolist(), stored, strict=True):
                try:
                    image_size(content.data)
                except BadImageError as error:
                    strange.append(f"{split.describe(image)} {error}")
            if strange:
                remedy = f"dali-train data index {split.root}, or dali-train data verify {split.root} to see more"
                yield Finding(f"data {name}", "fail", strange[0], remedy)
                continue
        if split.url is not None:
            yield _bucket(split, config)
        yield Finding(
            f"data {name}", "pass", f"{len(split):,} images in {split.num_classes} classes, index fits its shards"
        )


def decoding_a_batch(config: Config, launch: Launch, device: torch.device) -> Iterator[Finding]:
    """Run the training graph on a first micro-batch in a separate process, because some decoders crash the process.

    Each rank tries its own GPU. On the CPU one rank per host is enough.
    """
    if config.data.reader == "synthetic" or (device.type == "cpu" and launch.local_rank > 0):
        return
    # Without hooks, which may not pickle; a batch of 64 shows as much as a larger one.
    size = min(config.batch.micro_batch, 64)
    small = replace(config, batch=replace(config.batch, global_batch=size, micro_batch=size), hooks=HooksConfig())
    small = replace(small, data=replace(small.data, num_threads=min(4, config.data.num_threads or 4)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), LOG_VARIABLE: "4"}
    check = "decode a batch"
    try:
        child = subprocess.run(
            [sys.executable, "-m", "dali_train.data.loading.first_batch"],
            input=pickle.dumps((small, device)),
            capture_output=True,
            env=environment,
            timeout=_DECODING_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "check that the storage answers; if it does, set data.device cpu"
        yield Finding(check, "fail", f"not done after {_DECODING_LIMIT_S} s", remedy)
        return
    errors = child.stderr.decode(errors="replace")
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        found = f"the process was ended by {name} while decoding on {decoding_device(config, device)}"
        yield Finding(
            check, "fail", found, "a bug in the decoder: install another version of DALI, or set data.device cpu"
        )
    elif child.returncode > 0:
        said = [line for line in errors.splitlines() if line.strip() and "nvimgcodec" not in line]
        yield Finding(check, "fail", child.stdout.decode().strip() or (said or ["no message"])[-1], "see the message")
    else:
        on_gpu = decoding_device(config, device) == "the GPU"
        decoders = decoder_in_log(errors) if on_gpu else {}  # the library is named even where nothing uses it
        found = child.stdout.decode().strip() + "".join(f", {name} {value}" for name, value in decoders.items())
        silent = on_gpu and "nvJPEG" not in decoders
        remedy = (
            "the log names no nvJPEG, so JPEGs may be decoded on the CPU: install nvidia-nvjpeg beside "
            "nvidia-nvimgcodec"
        )
        yield Finding(check, "warn" if silent else "pass", found, remedy if silent else "")


_CAUSES = {
    errno.EROFS: "the file system is mounted read-only: mount it writable, or set run.dir to another",
    errno.ENOSPC: "the disk is full: free some space, or set run.dir to another",
    errno.EDQUOT: "this user's quota is used up: free some space, or set run.dir to another file system",
    errno.EACCES: "this user may not write there: change its permissions, or set run.dir to another directory",
    errno.EPERM: "this user may not write there: change its permissions, or set run.dir to another directory",
    errno.ENOTDIR: "a part of the path is a file: set run.dir to a directory that this user may write to",
}


def run_directory(run: RunConfig, launch: Launch, checkpoint_bytes: int) -> Iterator[Finding]:
    """Check speed, space, atomic replacement and links on rank 0, and that all ranks see the same directory.

    Leaves nothing behind.
    """
    directory, mark = Path(run.dir), uuid.uuid4().hex
    group = dist.group.WORLD if launch.world_size > 1 else None
    made: list[Path] = []
    try:
        made = on_rank_0(partial(_make_directories, directory), group)
        if launch.rank in ranks_apart(directory, group) and run.mirror is None:
            remedy = "set run.mirror, or run.dir to a file system that all hosts share"
            words = f"{directory} is not rank 0's directory, and only rank 0's host has the checkpoints"
            yield Finding("run directory", "warn", words, remedy)
        if launch.rank == 0:
            yield from _files(directory, mark)
            yield _space(run, directory, checkpoint_bytes)
            if run.mirror is not None:
                yield _mirror(run.mirror)
    except OSError as error:
        if launch.rank == 0:
            yield _unusable(error)
    finally:
        if launch.rank == 0:
            for path in directory.glob(f".doctor-{mark}*"):
                path.unlink(missing_ok=True)
            for path in reversed(made):
                with suppress(OSError):  # in use by another process by now
                    path.rmdir()


def _make_directories(directory: Path) -> list[Path]:
    """Make a directory and return those that were not there before, outermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _unusable(error: OSError) -> Finding:
    remedy = _CAUSES.get(error.errno or 0, "set run.dir to a directory that this user may write to")
    return Finding("run directory", "fail", str(error), remedy)


def _files(directory: Path, mark: str) -> Iterator[Finding]:
    file, fresh, link = (directory / f".doctor-{mark}{kind}" for kind in ("", "-fresh", "-link"))
    file.touch()  # a checkpoint's files replace others
    block, count = os.urandom(1 << 20), 64
    start = time.perf_counter()
    with fresh.open("wb") as target:
        for _ in range(count):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    speed = count * len(block) / 1e6 / (time.perf_counter() - start)
    fresh.replace(file)
    link.symlink_to(file.name)
    found = f"{directory}: {speed:.0f} MB/s written and flushed, rename and links work"
    if link.stat().st_size != count * len(block):
        yield Finding(
            "run directory", "fail", f"{directory}: a renamed file is not what was written", "use another file system"
        )
    elif speed < SLOW_DISK_MB_S:
        yield Finding(
            "run directory", "warn", found, "checkpoints will take long: use a faster file system or save less often"
        )
    else:
        yield Finding("run directory", "pass", found)


def _space(run: RunConfig, directory: Path, checkpoint_bytes: int) -> Finding:
    """Check the space for checkpoints: run.keep_checkpoints, the best one, one being written before the oldest is
    removed, and one being uploaded."""
    count = run.keep_checkpoints + 2 + (run.mirror is not None)
    needed, free = count * checkpoint_bytes, shutil.disk_usage(directory).free
    found = f"{free / 1e9:,.1f} GB free, {count} checkpoints take {needed / 1e9:,.2f} GB"
    if free < needed:
        return Finding(
            "free space", "fail", found, "free some, set run.dir to another disk, or lower run.keep_checkpoints"
        )
    return Finding("free space", "pass", found)


def _mirror(url: str) -> Finding:
    bucket, name = Bucket(url), f".doctor-{uuid.uuid4().hex}"
    try:
        bucket.write(name, b"")
        bucket.delete(name)
    except ObjectStoreError as error:
        return Finding("mirror", "fail", str(error), "see the message")
    return Finding("mirror", "pass", f"{url} can be written")
