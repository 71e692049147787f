"""``dali-train init``: a config file that fits a dataset, with the reasons beside the numbers."""

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
"""Images per micro-batch where there is no GPU whose memory would be the limit."""


def write_config(root: str, output: Path, gpu_memory_gb: float | None) -> None:
    """Write a config file for the dataset in `root`, and print what was found.

    Args:
        output: a file that does not exist yet.
        gpu_memory_gb: of the GPU to train on; None: of the one that is here.

    Raises:
        ConfigError: the file exists, or not one image fits into the memory.
        DatasetError: there is no such dataset, or it is damaged.
    """
    if output.suffix != ".py" or output.exists():
        reason = "this file exists" if output.exists() else "not a Python file, whose name ends in .py"
        raise ConfigError(f"--output {output}: {reason}; name another")
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
            raise ConfigError(f"not one image fits into {gpu_memory_gb:g} GB: name a larger GPU with --gpu-memory")
        reason = f"the most that fits into a GPU of {gpu_memory_gb:.0f} GB, by the estimate of `dali-train plan`"
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
            f"train_size={size},  # pixels; the images have {side} on their shorter side",
            f"eval_size={size},",
        ], False
    lines = [f"train_size={side},  # pixels, as the images have", f"eval_size={side},"]
    if np.ptp(heights) == 0 and np.ptp(widths) == 0:
        lines.append(f"crop_side={side},  # shifted by up to an eighth, rather than enlarged parts of small images")
        return [*lines, f"crop_padding={side // 8},", f"eval_resize_to={side},  # all of each image"], True
    return [*lines, "crop_area=(0.35, 1.0),  # not down to the usual 0.08 of images that are small already"], True


def _config_file(split: Split, root: str, output: Path, micro_batch: int, reason: str) -> str:
    images, small = _images(split)
    network = (
        'name="dali_resnet34_cifar",  # ResNet-34 that keeps the resolution of small images; or any model of timm'
        if small
        else 'name="resnet50",  # or any model of timm\n'
        '        # weights="resnet50.a1_in1k",  # begin with trained weights: a tenth of the rate and of the epochs do'
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
    # The rate that is usual for ResNets, at a batch of 256 images; it is scaled to the batch below.
    optimizer=OptimizerConfig(name="sgd", lr=0.1, scale_lr="linear", weight_decay=5e-4, clip_grad_norm=None),
    schedule=ScheduleConfig(name="cosine", warmup_epochs=5),
    loss=LossConfig(label_smoothing=0.1),
    # Of a step, on all GPUs together, and of a pass on one: {reason}.
    batch=BatchConfig(global_batch={batch}, micro_batch={min(batch, micro_batch)}),
    # precision=PrecisionConfig(dtype="bf16"),  # faster on GPUs since Ampere
    run=RunConfig(
        dir={json.dumps(run)},
        epochs={epochs},  # as many steps as a network needs that begins with random weights
    ),
)
"""
