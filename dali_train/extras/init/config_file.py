"""``dali-train init``: write a config file that suits a dataset and the machine, with comments that explain it."""

import json
import math
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dali_train.config import Config, load_config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.extras.cost.memory import IMAGES_ON_CPU, estimate_memory
from dali_train.extras.cost.speed import bf16_speedup, half_precision, seconds_per_image
from dali_train.extras.init.network import Pretrained, describe_weights
from dali_train.extras.init.trial import measure
from dali_train.files import temporary_directory, write_atomically
from dali_train.runtime.object_store import is_remote
from dali_train.text import duration, plural, printable
from dali_train.training.cost import FASTER
from dali_train.training.model import build_model
from dali_train.training.pretrained import classifiers

_SMALL = 96
"""Images with a shorter side than this, in pixels, get a network that keeps their resolution."""
_HOURS_ON_CPU = 1.0
"""A run without a GPU gets as many epochs as fit into about this time, at least `_FEWEST_EPOCHS`."""
_FEWEST_EPOCHS = 10
_FEW_STEPS = 50
"""In fewer a classifier that begins with zeros stays behind at the rate of the pretrained layers, since a step of Adam
moves a weight by about the rate."""
_STEPS_PER_EVALUATION = 50
"""An epoch of a few images is shorter than its evaluation and its checkpoint: there are at least so many steps between
two evaluations, or a fifth of the run."""


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What the file says, by the dataset, the machine and the user."""

    split: Split
    root: str
    output: Path
    run_dir: str
    on_cpu: bool
    network: str | None  # the user's choice, or that of the weights; None: by the dataset and the machine
    pretrained: Pretrained | None
    epochs: float
    epochs_reason: str
    has_batch_norm: bool = False
    classifiers: tuple[str, ...] = ()  # their names, as timm knows them
    micro_batch: int = IMAGES_ON_CPU
    reason: str = "enough to keep a CPU busy"  # for the micro-batch
    dtype: str | None = None  # None: fp32, and the reason is for bf16
    dtype_reason: str = "faster on GPUs since Ampere"

    @property
    def keeps_statistics(self) -> bool:
        """Whether BatchNorms keep the statistics of pretrained weights. The settings of this case are measured:
        docs/measurements/accuracy.md."""
        return self.has_batch_norm and self.pretrained is not None

    @property
    def global_batch(self) -> int:
        if len(self.split) >= 50_000:
            return 256
        return 64 if len(self.split) < 5_000 or self.keeps_statistics else 128

    @property
    def steps_per_epoch(self) -> float:
        return len(self.split) / self.global_batch

    @property
    def num_validation(self) -> int:
        validation = self.split.manifest.splits.get("validation")
        return 0 if validation is None else validation.num_records

    def config(self) -> Config:
        with temporary_directory() as directory:
            path = directory / "config.py"
            path.write_text(_text(self), encoding="utf-8")
            return load_config(path)


def write_config(
    root: str,
    output: Path | None,
    *,
    gpu_memory_gb: float | None = None,
    model: str | None = None,
    weights: str | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    begin: float | None = None,
    run_dir: str | None = None,
    num_processes: int | None = None,
) -> None:
    """Write a config file for the dataset in `root`, and print a description of the dataset.

    Args:
        output: a file that does not exist yet; None: the dataset's name, in the current directory.
        gpu_memory_gb: memory of the GPU to train on; None: of this machine's GPU.
        model: timm's name of the network; None: by the weights, or the images and the machine.
        weights: pretrained weights, as for model.weights.
        epochs: of the run; None: by `seconds`, the images and the machine.
        seconds: how long this machine may take from `begin` until the network is trained and exported, by a trial;
            None: long enough for a good accuracy, and on a CPU at most an hour.
        begin: when the command began, by `time.perf_counter`; None: now.
        run_dir: of the run; None: runs/NAME of the file.
        num_processes: on this machine, where `seconds` are measured; None: one.

    Raises:
        ConfigError: the file exists, nothing tells which network the weights are for, not even one image fits into the
            memory, or nothing can be trained in `seconds`.
        DatasetError: the dataset does not exist, or is damaged.
    """
    begin = begin or time.perf_counter()
    import_s = time.perf_counter() - begin
    if not is_remote(root):
        root = str(Path(root))
    output = checked_output(root, output)
    split = Split(root, "train")
    pretrained = describe_weights(weights, model) if weights is not None else None
    is_here = gpu_memory_gb is None  # the machine to train on is this one
    if is_here and torch.cuda.is_available():
        gpu_memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    enough = f"enough steps for {'pretrained weights' if pretrained else 'a network with random initial weights'}"
    choice = _Choice(
        split=split,
        root=root,
        output=output,
        run_dir=run_dir or f"runs/{output.stem}",
        on_cpu=gpu_memory_gb is None,
        network=pretrained.model if pretrained else model,
        pretrained=pretrained,
        epochs=epochs or _usual_epochs(split, pretrained),
        epochs_reason="as asked for" if epochs else enough,
    )
    choice = _with_network(choice, gpu_memory_gb, is_here=is_here)
    message = f"{output}: {_describe(split)}"
    if seconds is not None:
        choice, length = _in_time(choice, seconds, begin, import_s, num_processes)
        message += length
    elif is_here:
        choice, length = _estimated(choice, is_free=epochs is None)
        message += length
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, _text(choice).encode())
    print(message)


def _with_network(choice: _Choice, gpu_memory_gb: float | None, *, is_here: bool) -> _Choice:
    """Return the choice that suits the network: the settings of its optimizer, its images at once, its precision."""
    if is_here and gpu_memory_gb and (dtype := half_precision(torch.cuda.get_device_capability(0))) is not None:
        choice = replace(choice, dtype=dtype, dtype_reason=f"{torch.cuda.get_device_name(0)} has units for it")
    num_classes = choice.split.num_classes
    network = build_model(choice.config(), num_classes, torch.device("meta"))
    has_batch_norm = any(isinstance(layer, _BatchNorm) for layer in network.modules())
    named = tuple(classifiers(getattr(network, "pretrained_cfg", None)))
    choice = replace(choice, has_batch_norm=has_batch_norm, classifiers=named)
    config = choice.config()
    if gpu_memory_gb is None:
        if (speedup := bf16_speedup(config, network, num_classes)) < FASTER:
            return choice
        return replace(choice, dtype="bf16", dtype_reason=f"{speedup:.1f} times as fast as fp32 on this CPU")
    largest = estimate_memory(config, network).largest_micro_batch(gpu_memory_gb * 1e9, choice.global_batch)
    if largest is None:
        raise ConfigError(f"--gpu-memory {gpu_memory_gb:g} GB is too small for a single image: use a larger GPU")
    reason = f"the largest that fits into a GPU of {gpu_memory_gb:.0f} GB, as estimated by `dali-train plan`"
    return replace(choice, micro_batch=largest, reason=reason)


def _in_time(
    choice: _Choice, seconds: float, begin: float, import_s: float, num_processes: int | None
) -> tuple[_Choice, str]:
    """Return the choice with as many epochs as end in time by a trial, and a line on what they take."""
    config = choice.config()
    trial = measure(config, choice.split, seconds, num_processes, import_s)

    def run_s(epochs: float) -> float:
        every, _ = _evaluate_every(choice, epochs)
        return trial.run_s(config.steps(epochs, len(choice.split)), math.ceil(epochs / every))

    others = f"predict and export {duration(trial.afterwards_s)}"
    probe_s = 0.0
    if choice.pretrained is not None:
        probe_s = trial.probe_s(len(choice.split), choice.num_validation)
        others += f", and a linear probe {duration(probe_s)}"
    left_s = seconds - (time.perf_counter() - begin) - probe_s
    fitting = min(trial.epochs_in(left_s, run_s), 5 * choice.epochs)
    needed = duration(run_s(fitting))
    return replace(choice, epochs=fitting, epochs_reason=f"about {needed} on this machine, as tried"), (
        f"\n{plural(fitting, 'epoch')} will take about {needed}, {choice.global_batch / trial.step_s:,.0f} images/s, "
        f"and {others}"
    )


def _estimated(choice: _Choice, *, is_free: bool) -> tuple[_Choice, str]:
    """Return the choice with fewer epochs if it `is_free` and they take too long, and a line on what they take."""
    split, most = choice.split, choice.epochs
    device = torch.device("cpu" if choice.on_cpu else "cuda")
    epoch_s = len(split) * seconds_per_image(choice.config(), split.num_classes, device, choice.micro_batch)
    if choice.on_cpu and is_free:
        fitting = max(_FEWEST_EPOCHS, int(_HOURS_ON_CPU * 3600 / epoch_s))
        if fitting < most:
            reason = f"about {duration(fitting * epoch_s)} here; {most} are better"
            choice = replace(choice, epochs=fitting, epochs_reason=reason)
    hint = ", with a small network; for a larger one and a GPU, add --gpu-memory GB" if choice.on_cpu else ""
    return choice, (
        f"\nabout {duration(epoch_s)} per epoch on this machine's {'CPU' if choice.on_cpu else 'GPU'}, "
        f"{duration(choice.epochs * epoch_s)} for {plural(choice.epochs, 'epoch')}{hint}"
    )


def _usual_epochs(split: Split, pretrained: Pretrained | None) -> int:
    epochs = 90 if len(split) >= 200_000 else 200
    return epochs // 10 if pretrained else epochs


def checked_output(root: str, output: Path | None) -> Path:
    """Return the config file to write: `output`, or one with the name of the dataset in `root`.

    Raises:
        ConfigError: the file exists, or its name is no Python file's.
    """
    if output is None:
        name = PurePosixPath(root.partition("://")[2]).name if is_remote(root) else Path(root).resolve().name
        output = Path(f"{name or 'config'}.py")
    if output.suffix != ".py" or output.exists():
        reason = "this file exists" if output.exists() else "not a Python file, whose name ends in .py"
        raise ConfigError(f"--output {output}: {reason}; use another name")
    return output


def _describe(split: Split) -> str:
    height, width = (int(np.median(split.rows[side])) for side in ("height", "width"))
    validation = split.manifest.splits.get("validation")
    measured = f"{validation.num_records:,} to validate" if validation is not None else "none to validate"
    return (
        f"{len(split):,} images to train on in {plural(split.num_classes, 'class')}, {measured}; the median "
        f"is {width} x {height} pixels"
    )


def _images(choice: _Choice) -> tuple[list[str], bool]:
    """Return the lines of the section data on sizes and crops, and whether the images are small."""
    heights, widths = choice.split.rows["height"], choice.split.rows["width"]
    side = int(np.median(np.minimum(heights, widths)))
    # Features of weights that were trained at 224 pixels are worse at 128, see docs/measurements/accuracy.md.
    largest = 128 if choice.on_cpu and choice.pretrained is None else 224
    if choice.network is not None:  # which is made for photographs: small images are enlarged
        return [
            f"train_size={largest},  # pixels; the shorter side of the images is {side}",
            f"eval_size={largest},",
        ], False
    if side >= _SMALL:
        size = min(largest, side // 32 * 32)
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


_NETWORKS = {
    (False, False): 'name="resnet50",  # or any timm model\n'
    '        # weights="resnet50.a1_in1k",  # pretrained weights: use a tenth of rate and epochs',
    (False, True): 'name="resnet18",  # small, for a CPU; or any timm model\n'
    '        # weights="resnet18.a1_in1k",  # pretrained weights: use a tenth of rate and epochs',
    (
        True,
        False,
    ): 'name="dali_resnet34_cifar",  # ResNet-34 that keeps the resolution of small images; or any timm model',
    (True, True): 'name="dali_resnet34_cifar",  # keeps the resolution of small images; or any timm model\n'
    "        kwargs=dict(layers=(1, 1, 1, 1), channels=(32, 64, 128, 256)),  # ResNet-10 of half the width, for a CPU",
}
"""(small images, on a CPU) -> lines of the section model."""


def _network(choice: _Choice, small: bool) -> str:
    """Return the lines of the section model on the network and its weights."""
    if choice.network is None:
        return _NETWORKS[small, choice.on_cpu]
    lines = [f"name={json.dumps(choice.network)},"]
    if choice.pretrained is not None:
        lines.append(f"weights={json.dumps(choice.pretrained.weights)},")
        lines += [f"kwargs={choice.pretrained.kwargs!r},"] if choice.pretrained.kwargs else []
        if choice.keeps_statistics:
            lines.append('freeze=("batch-norm",),  # their statistics are of more images than these')
    return "\n        ".join(lines)


def _optimizer(choice: _Choice) -> str:
    """Return the line of the section optimizer, with a comment above it."""
    if choice.keeps_statistics:
        groups, comment = "", "The best of those tried with few images"
        if choice.classifiers and choice.epochs * choice.steps_per_epoch < _FEW_STEPS:
            rows = tuple((f"{name}.*", 10, 1) for name in choice.classifiers)
            groups, comment = f", groups={rows!r}", f"{comment} and few steps"
        return f"""# {comment}: docs/measurements/accuracy.md.
    optimizer=OptimizerConfig(name="adamw", lr=3e-4, weight_decay=0.05{groups}),"""
    if choice.has_batch_norm:
        return """# The usual learning rate of ResNets for a batch of 256 images; it is scaled to the batch below.
    optimizer=OptimizerConfig(name="sgd", lr=0.1, scale_lr="linear", weight_decay=5e-4, clip_grad_norm=None),"""
    if choice.pretrained is not None:
        return """# The usual learning rate of fine-tuning transformers, lower for earlier layers.
    optimizer=OptimizerConfig(name="adamw", lr=5e-4, weight_decay=0.05, layer_decay=0.7),"""
    return """# A usual learning rate of networks without BatchNorm; it is scaled to the batch below.
    optimizer=OptimizerConfig(name="adamw", lr=5e-4, scale_lr="sqrt", weight_decay=0.05),"""


def _loss(split: Split) -> str:
    if split.label_kind.is_class:
        return "LossConfig(label_smoothing=0.1)"
    return """LossConfig(
        name="binary-cross-entropy",  # timm's own for several labels an image; or asymmetric, ...
    )"""


def _best_by(split: Split) -> str:
    if split.label_kind.is_class or "validation" not in split.manifest.splits:
        return ""
    return '\n        best_by="mean-ap",  # several labels an image'


def _evaluate_every(choice: _Choice, epochs: float) -> tuple[int, str]:
    """Return the epochs between two evaluations, and the reason if they are more than one.

    See `_STEPS_PER_EVALUATION`. Besides, evaluations take at most about a quarter of the time: a backward pass takes
    twice as long as a forward pass, so an evaluation of as many images as an epoch has takes a third of the epoch's.
    """
    by_steps = max(1, min(math.ceil(_STEPS_PER_EVALUATION / choice.steps_per_epoch), int(epochs) // 5))
    by_images = round(choice.num_validation / len(choice.split))
    if by_images > by_steps:
        return by_images, f"an evaluation has {choice.num_validation:,} images, an epoch {len(choice.split):,}"
    return by_steps, f"an epoch has only {plural(math.ceil(choice.steps_per_epoch), 'step')}"


def _text(choice: _Choice) -> str:
    split = choice.split
    images, small = _images(choice)
    pretrained = choice.pretrained
    normalise = json.dumps(pretrained.normalise) if pretrained else '"imagenet"'
    if pretrained is not None:
        images.append(f'interpolation="{pretrained.interpolation}",')
    network = _network(choice, small)
    batch = choice.global_batch
    data = "\n        ".join(images)
    file = printable(shlex.quote(str(choice.output)))
    every, reason = _evaluate_every(choice, choice.epochs)
    warmup = min(5 if pretrained is None else 1, choice.epochs // 5)
    length = f"epochs={choice.epochs:g},  # {choice.epochs_reason}"
    if every > 1:
        length += f"\n        eval_every_epochs={every},  # {reason}"
        length += f"\n        checkpoint_every_steps={math.ceil(every * choice.steps_per_epoch)},"
    return f"""# {_describe(split)}.
#
#     dali-train plan --config {file}
#     dali-train train --config {file}
#     dali-train eval {printable(shlex.quote(choice.run_dir))}
#
# Every setting is explained by `dali-train train --config {file} --help`.

from dali_train.config import *

config = Config(
    data=DataConfig(
        root={json.dumps(choice.root)},
        {data}
        normalise={normalise},
    ),
    model=ModelConfig(
        {network}
        init="portable",  # the same initial weights on every machine
        channels_last=True,
    ),
    {_optimizer(choice)}
    schedule=ScheduleConfig(name="cosine", warmup_epochs={warmup:g}),
    loss={_loss(split)},
    # Images per step on all GPUs together, and per pass on one GPU: {choice.reason}.
    batch=BatchConfig(global_batch={batch}, micro_batch={min(batch, choice.micro_batch)}),
    {"" if choice.dtype else "# "}precision=PrecisionConfig(dtype="{choice.dtype or "bf16"}"),  # {choice.dtype_reason}
    run=RunConfig(
        dir={json.dumps(choice.run_dir)},
        {length}{_best_by(split)}
    ),
)
"""
