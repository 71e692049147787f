"""``config.json`` and ``environment.json``, which record how a run was made."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from nvidia import dali
from torch.optim import Optimizer

from dali_train.config import Config
from dali_train.data.loading.decoder import describe_decoder
from dali_train.data.loading.loader import pixel_format
from dali_train.files import git_commit, write_atomically
from dali_train.runtime.launch import Launch
from dali_train.text import plural, redacted
from dali_train.training.optim import resolved_arguments


def describe_run(
    directory: Path,
    config: Config,
    launch: Launch,
    device: torch.device,
    command: Sequence[str],
    num_threads: int,
    optimizer: Optimizer,
) -> None:
    """Write both files, and copies of the Python files that define the config."""
    environment: dict[str, Any] = {
        "command": [redacted(word) for word in command],
        "config_file": keep_files(directory, config.files),
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "dali": dali.__version__,
        "device": device_name(device),
        "host": platform.node(),
        "host_cores": len(os.sched_getaffinity(0)),
        "optimizer": resolved_arguments(optimizer),
        "decoding_threads": num_threads,
        "decoder": describe_decoder(config.data, pixel_format(config, device, num_threads)),
        "ranks_on_host": launch.local_world_size,
        "world_size": launch.world_size,
    }
    write_atomically(directory / "config.json", config.to_json().encode())
    write_atomically(directory / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def keep_files(directory: Path, files: Mapping[Path, bytes]) -> str | None:
    """Write `files` into ``configs/``, preserving their relative paths.

    Returns:
        The name of the first file, relative to `directory`; None if there are none.
    """
    top = os.path.commonpath([path.parent for path in files]) if files else ""
    copies = {Path("configs") / path.relative_to(top): content for path, content in files.items()}
    for name, content in copies.items():
        write_atomically(directory / name, content)
    return str(next(iter(copies))) if copies else None


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {plural(torch.get_num_threads(), 'thread')}"
    )
