"""``dali-train init``: write a config file that suits a dataset, with comments that explain the numbers."""

import json
from pathlib import Path

import numpy as np
import torch

from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.text import plural, printable
from dali_train.training.memory import estimate_memory

_SMALL = 96
"""Images with a shorter side than this, in pixels, get a network that keeps their resolution."""
_ON_CPU = 32
"""Images per micro-batch without a GPU, whose memory would be the limit."""


def write_config(root: str, output: Path, gpu_memory_gb: float | None) -> None:
    """Write a config file for the dataset in `root`, and print a description of the dataset.

    Args:
        output: a file that does not exist yet.
        gpu_memory_gb: memory of the GPU to train on; None: of this machine's GPU.

    Raises:
        ConfigError: the file exists, or not even one image fits into the memory.
        DatasetError: the dataset does not exist, or is damaged.
    """
    if output.suffix != ".py" or output.exists():
        reason = "this file exists" if output.exists() else "not a Python file, whose name ends in .py"
        raise ConfigError(f"--output {output}: {reason}; use another name")
    split = Split(root, "train")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_config_file(split, root, output, _ON_CPU, "enough to keep a CPU busy"))
    if gpu_memory_gb is None and torch.cuda.is_available():
        gpu_memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    if gpu_memory_gb is not None:
        config = load_config(output)
        memory = estimate_memory(config, split.num_classes)
        largest = memory.largest_micro_batch(gpu_memory_gb * 1e9, config.batch.global_batch)
        if largest is None:
            output.unlink()
            raise ConfigError(f"--gpu-memory is {gpu_memory_gb:g} GB, which does not fit one image: use a larger GPU")
        reason = f"the largest that fits into a GPU of {gpu_memory_gb:.0f} GB, as estimated by `dali-train plan`"
        output.write_text(_config_file(split, root, output, largest, reason))
    print(f"{output}: {_describe(split)}")


def _describe(split: Split) -> str:
    height, width = (int(np.median(split.rows[side])) for side in ("height", "width"))
    validation = split.manifest.splits.get("validation")
    measured = f"{validation.num_records:,} to validate" if validation is not None else "none to validate"
    return (
        f"{len(split):,} images to train on in {plural(split.num_classes, 'class')}, {measured}; the median "
        f"is {width} x {height} pixels"
    )


def _images(split: Split) -> tuple[list[str], bool]:
    """Return the lines of the section data on sizes and crops, and whether the images are small."""
    heights, widths = split.rows["height"], split.rows["width"]
    side = int(np.median(np.minimum(heights, widths)))
    if side >= _SMALL:
        size = min(224, side // 32 * 32)
        return [
            f"train_size={size},  # pixels; the shorter side of the images is {side}",
            f"eval_size={size},",
        ], False
    lines = [f"train_size={side},  # pixels, the size of the images", f"eval_size={side},"]
    if np.ptp(heights) == 0 and np.ptp(widths) == 0:
        lines.append(
            f"crop_side={side},  # random shifts of up to an eighth, instead of enlarging crops of small images"
        )
        return [*lines, f"crop_padding={side // 8},", f"eval_resize_to={side},  # the whole image"], True
    return [*lines, "crop_area=(0.35, 1.0),  # the usual minimum of 0.08 is too small a part of a small image"], True


def _config_file(split: Split, root: str, output: Path, micro_batch: int, reason: str) -> str:
    images, small = _images(split)
    network = (
        'name="dali_resnet34_cifar",  # ResNet-34 that keeps the resolution of small images; or any timm model'
        if small
        else 'name="resnet50",  # or any timm model\n'
        '        # weights="resnet50.a1_in1k",  # pretrained weights: use a tenth of rate and epochs'
    )
    batch = 256 if len(split) >= 50_000 else 128 if len(split) >= 5_000 else 64
    epochs = 90 if len(split) >= 200_000 else 200
    data = "\n        ".join(images)
    file, run = printable(str(output)), f"runs/{output.stem}"
    return f"""# {_describe(split)}.
#
#     dali-train plan --config {file}
#     dali-train train --config {file}
#     dali-train eval {printable(run)}
#
# Every setting is explained by `dali-train train --config {file} --help`.

from dali_train.config import *

config = Config(
    data=DataConfig(
        root={json.dumps(str(Path(root)))},
        {data}
        normalise="imagenet",
    ),
    model=ModelConfig(
        {network}
        channels_last=True,
    ),
    # The usual learning rate of ResNets for a batch of 256 images; it is scaled to the batch below.
    optimizer=OptimizerConfig(name="sgd", lr=0.1, scale_lr="linear", weight_decay=5e-4, clip_grad_norm=None),
    schedule=ScheduleConfig(name="cosine", warmup_epochs=5),
    loss=LossConfig(label_smoothing=0.1),
    # Images per step on all GPUs together, and per pass on one GPU: {reason}.
    batch=BatchConfig(global_batch={batch}, micro_batch={min(batch, micro_batch)}),
    # precision=PrecisionConfig(dtype="bf16"),  # faster on GPUs since Ampere
    run=RunConfig(
        dir={json.dumps(run)},
        epochs={epochs},  # enough steps for a network with random initial weights
    ),
)
"""
