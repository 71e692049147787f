"""What the arguments of a loader mean: where it stands among all processes, its pixels, and its settings, in the words
of `TrainLoader` and `EvalLoader` or of a run's config."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self, get_type_hints

import torch
import torch.distributed as dist

from dali_train.config import Config, DataConfig, MixupConfig, SampleConfig, View
from dali_train.config.check import checked, close_value, require
from dali_train.data.loading.cache import Node, join_node
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.sampling.micro_batch import view_configs
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.process import choose_device, cores_per_process
from dali_train.text import plural

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The training loop, autograd and DALI's feed need a core each, or a GPU waits for its next kernel.
_CORES_FOR_OTHERS = 3


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a loader stands: its data-parallel coordinate, the device that needs its images, its decoding threads."""

    dp_rank: int
    dp_size: int
    device: torch.device
    num_threads: int

    @classmethod
    def find(
        cls,
        dp_rank: int | None,
        dp_size: int | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        num_threads: int | None,
    ) -> Self:
        """Find what is None: the coordinate in the process group or the launcher's environment, a GPU if there is
        one, this process's share of the cores."""
        is_given = dp_rank is not None or dp_size is not None
        has_group = dist.is_available() and (group is not None or dist.is_initialized())
        try:
            launch = discover(LaunchOptions())
        except ConfigError:
            if not is_given and not has_group:
                raise
            launch = Launch()
        rank, size = launch.rank, launch.world_size
        if is_given:
            rank = -1 if dp_rank is None else dp_rank
            size = dp_size or 0
        elif has_group:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
        require(0 <= rank < size, f"dp_rank is {rank} with dp_size {size}: use both, with 0 <= dp_rank < dp_size")
        device = choose_device("auto", launch) if device is None else _device(device)
        threads = num_threads or decoding_threads(cores_per_process(launch), device)
        return cls(dp_rank=rank, dp_size=size, device=device, num_threads=threads)

    def node(self, data: DataConfig) -> Node | None:
        """Return this process's view of the cache of its node, None without data.cache; all coordinates together."""
        if data.cache is None:
            return None
        require(
            self.dp_size == 1 or (dist.is_initialized() and dist.get_world_size() == self.dp_size),
            f"data.cache is {data.cache} with dp_size {self.dp_size}: its processes find each other in torch's default "
            "process group, which must have that size: call torch.distributed.init_process_group first, or leave the "
            "cache out",
        )
        launch = Launch(rank=self.dp_rank, world_size=self.dp_size)
        return join_node(data, launch, Layout(rank=self.dp_rank, replicas=self.dp_size))


def pixel_format(config: Config, device: torch.device, num_threads: int) -> PixelFormat:
    """Return how images are decoded for a model on `device`."""
    # Autocast would cast to this dtype in the first layer anyway; casting here halves the memory traffic.
    dtype = _DTYPES.get(config.precision.dtype, torch.float32)
    return pixels_for(config.data, device, num_threads, dtype, channels_last=config.model.channels_last)


def pixels_for(
    data: DataConfig, device: torch.device, num_threads: int, dtype: torch.dtype, *, channels_last: bool
) -> PixelFormat:
    on_gpu = data.device == "gpu" or (data.device == "auto" and device.type == "cuda")
    return PixelFormat(
        device_id=(device.index or 0) if on_gpu else None,
        num_threads=num_threads,
        dtype=dtype,
        channels_last=channels_last,
        pinned=not on_gpu and device.type == "cuda",
    )


def decoding_threads(num_cores: int, device: torch.device) -> int:
    """Return how many of a process's cores decode."""
    return max(1, num_cores - _CORES_FOR_OTHERS) if device.type == "cuda" else num_cores


def blank_images(config: SampleConfig, pixels: PixelFormat, device: torch.device) -> torch.Tensor:
    """Return zeros in the shape and format of a loader's images, (n, 3, size, size)."""
    size = config.data.train_size
    return torch.zeros(config.batch.micro_batch, 3, size, size, device=device, dtype=pixels.dtype).to(
        memory_format=torch.channels_last if pixels.channels_last else torch.preserve_format
    )


_KEYWORDS = {"root": "the dataset", "train_size": "image_size", "eval_size": "image_size", "device": "decode_device"}


@contextmanager
def in_keywords() -> Iterator[None]:
    """Name settings in errors as the keywords of a loader: augment for data.augment, batch_size for
    batch.micro_batch."""
    names = {f"data.{one.name}": _KEYWORDS.get(one.name, one.name) for one in fields(DataConfig)}
    names |= {"batch.micro_batch": "batch_size", "batch.global_batch": "global_batch"}
    names |= {f"mixup.{one.name}": f"mixup {one.name}" for one in fields(MixupConfig)}
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"\b(?:data|batch|mixup)\.\w+", lambda found: names.get(found[0], found[0]), str(error))
        raise ConfigError(message.removeprefix("data.")) from None


def data_config(
    dataset: str | os.PathLike[str] | Mapping[str, float],
    size: str,
    image_size: int,
    decode_device: str,
    settings: dict[str, Any],
) -> DataConfig:
    """Return the settings of a loader's keywords; `size` is the setting that image_size stands for."""
    require(size not in settings, f"{size} is {settings.get(size)}: use image_size")
    for name in ("root", "device", "num_threads"):
        require(name not in settings, f"{name} is no keyword in **settings")
    if isinstance(dataset, Mapping):
        rows = tuple((f"source-{number}", root, weight) for number, (root, weight) in enumerate(dataset.items(), 1))
        require(
            bool(rows) and "mix" not in settings, "the dataset is a dict: use one or more datasets in it, and no mix"
        )
        settings = {"mix": rows, **settings}
        dataset = rows[0][1]
    config = DataConfig(root=os.fspath(dataset), **{"device": decode_device, size: image_size, **settings})
    refuse_copy(config)
    return config


def _device(name: torch.device | str) -> torch.device:
    """Return the device of this name, with a number if it is a GPU."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: use cpu, cuda or cuda:0, or leave it out") from None
    if device.type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    require(
        (device.index or 0) < num_gpus,
        f"device is {name}, but torch finds {plural(num_gpus, 'GPU')} on this host: use another or cpu, leave it out, "
        "or check the driver",
    )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def refuse_copy(data: DataConfig) -> None:
    require(
        data.local_copy is None,
        f"data.local_copy is {data.local_copy}: a loader reads a dataset where it lies; copy it there and give that "
        "directory",
    )


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known is None or known not in _DTYPES.values():
        raise ConfigError(f"dtype is {dtype!r}: use {close_value(dtype, list(_DTYPES), ', '.join(_DTYPES))}")
    return known


def checked_views(views: int | Sequence[View], config: SampleConfig) -> tuple[View, ...]:
    """Raises ConfigError: a view, or a setting that needs to know of only one."""
    if isinstance(views, int):
        views = (
            View(
                size=config.data.train_size, n=checked("views", views, get_type_hints(View, include_extras=True)["n"])
            ),
        )
    require(all(isinstance(one, View) for one in views), f"views is {views!r}: use a number, or dali_train.View(...)")
    conflicts = {
        "mixup": config.mixup.enabled,
        "crop_side": config.data.crop_side is not None,
        "progressive": bool(config.data.progressive),
        "alternating_flip": config.data.alternating_flip,
        f"reader {config.data.reader}": config.data.reader != "index",
    }
    for name in (name for name in conflicts if conflicts[name] and views):
        raise ConfigError(
            f"views with {name}, which goes with a single view of an image: leave {name} or the views out"
        )
    view_configs(config, views)  # checks sizes and areas
    return tuple(views)
