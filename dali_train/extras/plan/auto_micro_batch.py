"""`--batch.micro_batch auto`: the largest micro-batch that is estimated to fit, as a number that a run keeps.

Which images are mixed with each other, and what dropout draws, depends on the micro-batch: with another one it is
another run. So the number is chosen once, by the memory of the GPU and the number of ranks with which the run begins.
A run that has begun has it in its config.json, in the mirror's copy of that, or in the checkpoint that run.resume
names, and keeps it wherever it goes on.
"""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dali_train.checkpoint.format import CheckpointManifest
from dali_train.checkpoint.recipe import saved_recipe
from dali_train.checkpoint.run_directory import MANIFEST, RunDirectory, without_link
from dali_train.commands.arguments import launch_options
from dali_train.config import Config, RunConfig
from dali_train.config.config import config_from_json
from dali_train.data.dataset.index import open_split
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.cost.memory import IMAGES_ON_CPU, largest_divisor
from dali_train.extras.plan.forecast import IMAGENET_CLASSES, find_gpu, forecast
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch, discover
from dali_train.runtime.object_store import Bucket, MissingObjectError

_TRIED = 64  # images: the memory of others is in proportion


def choose(file: Config, values: dict[str, Any], options: Namespace) -> int:
    """Return the micro-batch of a run.

    Args:
        file: the config of the file.
        values: settings of the command line by full name, which go before the file's.
        options: of the command, which say how many ranks there will be, and for `plan` on which GPU.

    Raises:
        ConfigError: another setting is not valid, the model is split into a pipeline, or not even one image fits.
    """
    size = values.get("batch.global_batch", file.batch.global_batch)
    is_valid = isinstance(size, int) and size > 0
    tried = next(images for images in (*range(_TRIED, 1, -1), size) if size % images == 0) if is_valid else 1
    config = file.replace({**values, "batch.micro_batch": tried})
    recorded = _recorded(config.run)
    if recorded is not None:
        return recorded
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"batch.micro_batch is auto with parallel.pipeline {config.parallel.pipeline}, which many small "
            "micro-batches keep busy: set a number; `dali-train plan` shows its memory and idle time"
        )
    launch = Launch(world_size=_num_ranks(config, options), port=1, launcher="auto")
    layout = Layout.from_config(launch, config.parallel)
    device_bytes = _device_bytes(config.run, options)
    if device_bytes is None:
        return largest_divisor(IMAGES_ON_CPU, size, layout.data_size) or 1
    _, _, ranks = forecast(config, layout, _num_classes(config), checks_weights=False)
    memory = ranks[0].memory  # without a pipeline all have the same part
    largest = memory.largest_micro_batch(device_bytes, size, layout.data_size)
    if largest is None:
        raise ConfigError(
            f"batch.micro_batch is auto, but not even one image fits into {device_bytes / 1e9:.0f} GB: use a smaller "
            "model, or model.activation_checkpointing true"
        )
    return largest


def _recorded(run: RunConfig) -> int | None:
    """Return the micro-batch of a run that has begun, or of the checkpoint at which it will begin; None: of neither.

    Raises:
        ConfigError, CheckpointError, ObjectStoreError: what there is cannot be read.
    """
    directory = Path(run.dir)
    if (directory / "config.json").is_file():
        return RunDirectory(directory).config.batch.micro_batch
    if run.mirror is not None:
        with suppress(MissingObjectError):
            content = Bucket(run.mirror).read_all("config.json")
            return config_from_json(content, f"{run.mirror}/config.json").batch.micro_batch
    path = without_link(Path(run.resume))
    if run.resume not in ("auto", "never") and (path / MANIFEST).is_file():
        return int(saved_recipe(CheckpointManifest.read(path).values, path)["batch.micro_batch"])
    return None


def _num_ranks(config: Config, options: Namespace) -> int:
    """Return how many ranks there will be; `plan` is told, or takes as few as possible."""
    least = config.parallel.smallest_world_size
    if "gpu" in options:
        return launch_options(options).world_size or least
    num_processes = getattr(options, "num_processes", None)
    if num_processes == "auto":
        return max(least, torch.cuda.device_count())
    if num_processes is not None:  # what is no number is refused later
        return max(1, int(num_processes)) if num_processes.isdecimal() else least
    return discover(launch_options(options)).world_size


def _device_bytes(run: RunConfig, options: Namespace) -> float | None:
    """Return the memory of the smallest GPU here, or of that which `plan` plans for; None: without GPUs."""
    if getattr(options, "gpu_memory", None) is not None:
        return float(options.gpu_memory) * 1e9
    if getattr(options, "gpu", None) is not None:
        return find_gpu(options.gpu).memory_gb * 1e9
    if run.device == "cpu" or not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))


def _num_classes(config: Config) -> int:
    with suppress(ConfigError, DatasetError, OSError):
        return open_split(config.data, "train", local=False).num_classes
    return IMAGENET_CLASSES  # of a dataset that is not there yet, as `dali-train plan` has it
