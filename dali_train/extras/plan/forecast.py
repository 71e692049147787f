"""``dali-train plan``: a run's steps, accumulation, schedule and memory, computed without a GPU or data."""

import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn

from dali_train.checkpoint.trained_model import fitting_weights
from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.config import BatchConfig, Config, DataConfig
from dali_train.config.check import as_typed, close_names
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import kept_images, kind_of_dataset, open_split
from dali_train.data.dataset.manifest import Manifest, metadata_directory
from dali_train.errors import ConfigError
from dali_train.extras.class_weights.weights import describe_weights, weights_of
from dali_train.extras.cost.memory import Memory, estimate_memory
from dali_train.parallel.layout import Layout
from dali_train.parallel.stages import (
    Stage,
    StageActivations,
    VitStage,
    bubble,
    in_flight,
    make_stages,
)
from dali_train.parallel.tensor import check_model, parameters_per_rank
from dali_train.runtime.launch import Launch
from dali_train.runtime.status import METRICS, read_events
from dali_train.text import duration, plural, printable
from dali_train.training.build import fit_to_ranks, training_classes
from dali_train.training.cost import GPUS, Gpu, data_sheet_peak, flops_per_image, measure_largest_product
from dali_train.training.model import (
    build_model,
    check_sizes,
    describe_parameters,
    repeated_blocks,
)
from dali_train.training.optim import check_shardwise, make_optimizer, resolved_arguments
from dali_train.training.pretrained import is_missing_file
from dali_train.training.schedule import describe_peak, learning_rate

IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000  # ILSVRC 2012's training split
IMAGENET_IMAGE_BYTES = 110e3
NUM_IMAGES = "--num-images"


def print_plan(
    config: Config,
    *,
    world_size: int | None,
    num_images: int | None,
    picture: Path | None,
    gpu_memory_gb: float | None = None,
    gpu_name: str | None = None,
    price: float | None = None,
) -> None:
    """Print the plan for `world_size` ranks, and draw it into `picture`.

    Args:
        world_size: None for the smallest that the config's parallelism allows.
        gpu_memory_gb: memory of each rank's device, for advice on the micro-batch.
        gpu_name: the GPU of each rank, instead of this machine's processor.
        price: of an hour of a rank's GPU.

    Raises:
        ConfigError: there are more ranks than micro-batches, model or optimizer cannot be built, or the model does not
            accept images of the config's sizes.
    """
    gpu = find_gpu(gpu_name) if gpu_name is not None else None
    if gpu is not None and gpu_memory_gb is None:
        gpu_memory_gb = gpu.memory_gb
    num_images, num_classes, source, image_bytes = _images(config.data, num_images)
    batch = config.batch
    launch = Launch(world_size=world_size or config.parallel.smallest_world_size, port=1, launcher="plan")
    layout = fit_to_ranks(config, launch)
    grad_accum_steps = batch.grad_accum_steps(layout.data_size)
    steps = config.steps(config.run.epochs, num_images)
    weights_exist = not is_missing_file(config.model.weights)
    model, memory, ranks = forecast(config, layout, num_classes, checks_weights=weights_exist)
    fullest = max((rank.memory for rank in ranks), key=lambda memory: memory.state_bytes + memory.step_bytes)

    print(f"images         {num_images:,} in {num_classes} classes ({source})")
    for start, sized in config.sizes_by_step(num_images) if config.data.progressive else ():
        print(f"image size     {sized.data.train_size} pixels from step {start:,}")
    print(f"order          {describe_order(config, num_images, image_bytes)}")
    if (kind := kind_of_dataset(config.data)) is not None and source != NUM_IMAGES:
        for number, line in enumerate(kind.describe_uses(config, steps)):
            print(f"{'' if number else 'sources':<15}{line}")
    print(f"model          {config.model.name}: {describe_parameters(model)}, precision {config.precision.dtype}")
    for line in _class_weights(config):
        print(textwrap.fill(line, 120, subsequent_indent=" " * 15))
    for difference in differences_from_training(config, model, "train_size"):
        print(f"               {difference}")
    if not weights_exist:
        print(f"weights        {config.model.weights} does not exist yet, so nobody knows whether it fits the model")
    arguments = resolved_arguments(make_optimizer(model, config.optimizer))
    shown = ", ".join(f"{name} {as_typed(value)}" for name, value in arguments.items() if value is not None)
    print(textwrap.fill(f"optimizer      {config.optimizer.name}: {shown}", 120, subsequent_indent=" " * 15))
    idle = layout.describe_idle(batch.num_micro_batches)
    print(f"ranks          {layout.describe() if layout.splits_model else layout.world_size}{idle}")
    accumulated = batch.describe_accumulation(layout.data_size)
    print(
        f"accumulation   {accumulated} micro-batch{'es' * (accumulated != '1')} of {batch.micro_batch} per rank: "
        f"{batch.global_batch:,} images per step"
    )
    if (every := config.run.audit_every_steps) is not None and layout.data_size > 1:
        share = 1 / (every * (batch.num_micro_batches // layout.data_size))
        print(f"audit          every {every} steps one more micro-batch per rank: {share:.1%} of the computation")
    if layout.pipeline > 1:
        print_pipeline(model, config, layout, ranks, grad_accum_steps)
    print(f"steps          {steps:,} in {config.run.epochs:g} epochs, {num_images / batch.global_batch:.2f} per epoch")
    if config.run.max_steps is not None and config.run.max_steps < steps:
        print(f"               stops after run.max_steps {config.run.max_steps:,}")
    for name, line in describe_time(config, num_images, num_classes, layout.world_size, model, gpu, price):
        print(textwrap.fill(f"{name:<15}{line}", 120, subsequent_indent=" " * 15))
    print(f"rank's memory  {describe_memory(fullest)}")
    if gpu_memory_gb is not None:
        _, largest = describe_largest_micro_batch(batch, fullest, gpu_memory_gb * 1e9, layout.data_size)
        print(f"micro-batch    {largest}")
    print(f"checkpoint     {memory.checkpoint_bytes / 1e9:.2f} GB, weights and optimizer")
    print(f"learning rate  changes every {config.schedule.step_every}; {describe_peak(config)}")
    for quarter in range(5):
        epoch = config.run.epochs * quarter / 4
        step = math.ceil(epoch * num_images / batch.global_batch - 1e-9)
        print(f"  epoch {epoch:>6g}  step {step:>7,}  {learning_rate(config, step, num_images):.6g}")
    print_settings(config)
    if picture is not None:
        draw_plan(config, num_images, fullest, picture)
        print(f"picture        {picture}")


def forecast(
    config: Config, layout: Layout | None, num_classes: int, *, checks_weights: bool = True
) -> tuple[nn.Module, Memory, list["RankPlan"]]:
    """Return the model on the meta device, its memory, and the ranks by stage of the pipeline; nothing is computed.

    Args:
        layout: None leaves the ranks out.

    Raises:
        ConfigError, CheckpointError: all that `train` refuses in a model, its weights, image sizes and parallelism.
    """
    model = build_model(config, num_classes, torch.device("meta"))
    check_sizes(model, config)
    if checks_weights:
        fitting_weights(config.model, num_classes)
    memory = estimate_memory(config, model)
    return model, memory, describe_ranks(model, config, layout, memory) if layout is not None else []


def describe_time(
    config: Config,
    num_images: int,
    num_classes: int,
    world_size: int,
    model: nn.Module,
    gpu: Gpu | None = None,
    price: float | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the floating-point operations, the least time that an epoch takes, the price, and what this machine's
    processor computes fastest; nothing of what is not known.

    Args:
        model: on the meta device.
        gpu: of each rank; None: devices like this machine's.
        price: of an hour of a rank's device; None: of no interest.

    Raises:
        ConfigError: `gpu` does not compute in precision.dtype.
    """
    try:
        per_image = flops_per_image(config, num_classes, model)
        operations = per_image * num_images
        total = operations * config.run.epochs / 1e18
        yield "arithmetic", f"{per_image / 1e9:.3g} GFLOP per image and its gradient, {total:.3g} EFLOP in all"
        if gpu is not None:
            peak = gpu.peak(config.precision.dtype, tf32=config.precision.tf32)
            if peak is None:
                raise ConfigError(
                    f"precision.dtype is {config.precision.dtype}, for which {gpu.name} has no matrix units: set "
                    "precision.dtype fp16, or name another --gpu"
                )
            speed, where = peak.flops_per_second * world_size, f"{world_size} x {gpu.name} at its peak ({peak.source})"
        elif torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            peak = data_sheet_peak(name, config.precision.dtype, tf32=config.precision.tf32)
            if peak is None:
                return
            speed, where = peak.flops_per_second * world_size, f"{world_size} x {name} at the peak of its data sheet"
        else:
            product = measure_largest_product(config, model)
            speed = product.flops / product.seconds[config.precision.dtype]
            dtype = config.precision.dtype
            where = f"this machine's CPU, at {speed / 1e9:,.0f} GFLOP/s in {dtype} (for GPUs add --gpu, such as h100)"
            warning = product.warning(dtype)
            yield "products", product.describe() + (f"; {warning}" if warning is not None else "")
    except (RuntimeError, NotImplementedError):  # the model needs values, which the meta device does not have
        return
    seconds = operations / speed
    seconds_in_all = seconds * config.run.epochs
    yield "time", f"at least {duration(seconds)} per epoch, {duration(seconds_in_all)} in all, on {where}"
    if price is not None:
        is_on_gpus = gpu is not None or torch.cuda.is_available()
        least_hours = world_size * seconds_in_all / 3600 if is_on_gpus else None
        yield "price", describe_price(config, price, num_images, least_hours)


def describe_price(config: Config, price: float, num_images: int, least_hours: float | None) -> str:
    """Return what a run costs: by the speed of the run in run.dir, if that has begun, else at least.

    Args:
        price: of an hour of a rank's GPU.
        least_hours: of all ranks together, at the peak of their GPUs; None: there are none.
    """
    events = read_events(Path(config.run.dir) / METRICS)
    rates = [event["images_per_second"] for event in events if event["event"] == "train"]
    num_ranks = [event["ranks"] for event in events if event["event"] == "start" and "ranks" in event]
    if num_ranks and rates:
        rate = statistics.median(rates)
        hours = num_ranks[-1] * num_images * config.run.epochs / rate / 3600
        return (
            f"{price * hours:,.2f} for {hours:,.2f} rank-hours of training, by the {rate:,.0f} images/s that "
            f"{config.run.dir} has on {plural(num_ranks[-1], 'rank')}; evaluations, checkpoints and starts come on top"
        )
    if least_hours is None:
        return "not known: this machine has no GPU, and no run its speed; name one with --gpu, such as h100"
    return (
        f"at least {price * least_hours:,.2f} for {least_hours:,.2f} GPU-hours at that peak, which no run reaches; "
        f"once {config.run.dir} has begun, its speed counts"
    )


def print_settings(config: Config) -> None:
    print("settings       that differ from their defaults")
    for section, values in changed_settings(config).items():
        print(
            textwrap.fill(
                f"  {section:<13}{values}",
                120,
                subsequent_indent=" " * 15,
                break_on_hyphens=False,
                break_long_words=False,
            )
        )


def changed_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, after all inheritance, by section: "lr 0.1, name sgd"."""
    sections: dict[str, list[str]] = {}
    for name, known in SETTINGS.items():
        value = attrgetter(name)(config)
        if value != known.default:
            section, _, field = name.partition(".")
            arguments = value if name == "model.kwargs" else {}
            shown = [f"kwargs.{one} {arguments[one]}" for one in arguments] or [f"{field} {as_typed(value)}"]
            sections.setdefault(section, []).extend(shown)
    return {section: ", ".join(values) for section, values in sections.items()}


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The stages, parameters and memory of the ranks at one position in the pipeline."""

    stages: Sequence[Stage]
    parameters: tuple[int, ...]  # of each stage
    memory: Memory


def describe_ranks(model: nn.Module, config: Config, layout: Layout, memory: Memory) -> list[RankPlan]:
    """Describe the ranks at each position in the pipeline; one entry without a pipeline.

    Raises:
        ConfigError: the model cannot be split in this way.
    """
    parallel = config.parallel
    check_shardwise(model, config.optimizer, layout)
    check_model(model, parallel.tensor)
    num_blocks = max(1, len(repeated_blocks(model)))
    stages = make_stages(model, parallel) if layout.pipeline > 1 else []
    plans = []
    for rank in range(layout.pipeline):
        rank_stages = stages[rank :: layout.pipeline]
        modules: list[nn.Module] = [VitStage(model, stage, torch.float32) for stage in rank_stages] or [model]
        parameters = tuple(parameters_per_rank(module, parallel.tensor) for module in modules)
        blocks = sum(len(stage.blocks) for stage in rank_stages) or num_blocks
        rank_memory = memory.of_rank(
            parameters=sum(parameters),
            block_share=blocks / len(modules) / num_blocks,
            in_flight=in_flight(parallel, rank, config.batch.grad_accum_steps(layout.data_size)),
            level=parallel.shard,
            shard=layout.shard,
            num_blocks=blocks,
        )
        plans.append(RankPlan(stages=rank_stages, parameters=parameters, memory=rank_memory))
    return plans


def print_pipeline(
    model: nn.Module, config: Config, layout: Layout, ranks: Sequence[RankPlan], grad_accum_steps: int
) -> None:
    activations, parallel = StageActivations.from_model(model, config), config.parallel
    print(
        f"pipeline       {parallel.schedule}, {parallel.num_stages} stages; a bubble of "
        f"{bubble(parallel, grad_accum_steps):.1%} of a step at least"
    )
    each = " on each rank" if layout.tensor > 1 else ""
    for rank in ranks:
        for stage, parameters in zip(rank.stages, rank.parameters, strict=True):
            print(f"  stage {stage.index:<6} {stage.describe()}: {parameters:,} parameters{each}")
        print(f"               {describe_memory(rank.memory)}")
    shape = (config.batch.micro_batch, *activations.training)
    megabytes = math.prod(shape) * activations.dtype.itemsize / 1e6
    print(f"  between them {shape} {str(activations.dtype).removeprefix('torch.')}, {megabytes:.1f} MB per micro-batch")


def describe_memory(memory: Memory) -> str:
    kinds = "weights, gradients, optimizer and averages" if memory.average_bytes else "weights, gradients and optimizer"
    gathered = f" ({memory.weight_bytes / 1e9:.2f} GB weights between steps)" if memory.gathered_bytes else ""
    update = f"{memory.update_bytes / 1e9:.2f} GB for the optimizer's step, once these are freed"
    activations = f"about {memory.activation_bytes / 1e9:.2f} GB activations; {update}"
    return f"{memory.state_bytes / 1e9:.2f} GB {kinds}{gathered}, {activations}"


def _images(data: DataConfig, num_images: int | None) -> tuple[int, int, str, float]:
    """Return (training images, classes, the source of these numbers, mean bytes per image)."""
    if num_images is not None:
        if num_images < 1:
            raise ConfigError(f"--num-images is {num_images}: use a positive number of training images")
        return num_images, IMAGENET_CLASSES, NUM_IMAGES, IMAGENET_IMAGE_BYTES
    if data.kind is not None:
        whole = open_split(data, "train", local=False)
        return whole.num_images, whole.num_classes, whole.dataset_name, whole.num_bytes / len(whole)
    if (metadata_directory(data.root) / "dataset.json").exists():
        manifest = Manifest.read(data.root)
        split = manifest.splits["train"]
        num_images = split.num_records
        source = data.root
        if data.exclude is not None:
            num_images = int(kept_images(data.exclude, split.num_records).sum())
            source += f", without the {split.num_records - num_images:,} of data.exclude"
        return num_images, manifest.num_classes, source, split.num_bytes / split.num_records
    source = f"ImageNet-1k's: {data.root} has no dataset.json"
    return IMAGENET_IMAGES, IMAGENET_CLASSES, source, IMAGENET_IMAGE_BYTES


def _class_weights(config: Config) -> Iterator[str]:
    """Yield lines on loss.class_weights and loss.positive_weight, as far as they are set."""
    if not config.loss.weights_classes:
        return
    if not (metadata_directory(config.data.root) / "dataset.json").exists():
        yield f"class weights  {config.data.root} has no dataset.json, so they are not known yet"
        return
    split = open_split(config.data, "train", local=False)
    classes = training_classes(split)
    for kind, weights in weights_of(config.loss, classes).items():
        title = "class weights" if kind == "class_weights" else "positives"
        yield f"{title:<15}{describe_weights(weights, classes)}"


def describe_largest_micro_batch(
    batch: BatchConfig, memory: Memory, device_bytes: float, data_size: int
) -> tuple[bool, str]:
    """Return whether batch.micro_batch is estimated to fit into a device, and a sentence on the largest that does."""
    micro_batch, gigabytes = batch.micro_batch, device_bytes / 1e9
    largest = memory.largest_micro_batch(device_bytes, batch.global_batch, data_size)
    if largest is None:
        return (
            False,
            f"not even one image fits into {gigabytes:.0f} GB: use a smaller model, or model.activation_checkpointing "
            "true",
        )
    return (
        largest >= micro_batch,
        f"about {largest} is the largest that fits into {gigabytes:.0f} GB; batch.micro_batch is {micro_batch}",
    )


def describe_order(config: Config, num_images: int, image_bytes: float) -> str:
    """Describe data.shuffle, and the page cache that a block order needs."""
    data = config.data
    if data.shuffle == "none":
        return "none: as on disk, the same every epoch"
    if data.shuffle == "full":
        return "full: any image may follow any other"
    if data.shuffle == "balanced":
        return "balanced: any image may follow any other, and all classes are equally frequent"
    lanes = config.batch.num_micro_batches
    pool = min(num_images, lanes * data.window_blocks * data.block_images * max(1, len(data.sources)))
    of_each = "of each dataset " if data.sources else ""
    return (
        f"block: {data.window_blocks} blocks of {data.block_images} images {of_each}are mixed in each of a step's "
        f"{lanes} micro-batches; about {pool * image_bytes / 1e9:.1f} GB in the page caches of all hosts together"
    )


def draw_plan(config: Config, num_images: int, memory: Memory, picture: Path) -> None:
    """Draw the learning rate over the run, and a breakdown of each rank's memory."""
    import matplotlib  # only if a picture is wanted
    from matplotlib.figure import Figure

    steps = config.steps(config.run.epochs, num_images)
    shown = range(0, steps, max(1, steps // 2000))
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 4.6), dpi=150, layout="constrained")
        rate, bars = figure.subplots(2, 1, height_ratios=(4, 1))
        rate.plot(
            [step * config.batch.global_batch / num_images for step in shown],
            [learning_rate(config, s, num_images) for s in shown],
        )
        rate.set(
            title=f"Learning rate, {steps:,} steps",
            xlabel="epoch",
            ylim=(0, 1.08 * config.optimizer.lr),
            xlim=(0, config.run.epochs),
        )
        rate.grid(color="#e3e3e3")
        parts = {
            "weights": memory.weight_bytes,
            "gradients": memory.gradient_bytes,
            "optimizer": memory.optimizer_bytes,
        }
        parts["activations, about"] = memory.activation_bytes
        if memory.average_bytes:
            parts["averages"] = memory.average_bytes
        left, colours = 0.0, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")
        for (name, size), colour in zip(parts.items(), colours, strict=False):
            bars.barh([""], [size / 1e9], left=left, color=colour, label=f"{name} {size / 1e9:.2f} GB")
            left += size / 1e9
        micro_batch = config.batch.micro_batch
        bars.set(title=f"Memory of a rank, {left:.1f} GB with micro-batches of {micro_batch}", xlabel="GB")
        bars.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)


def find_gpu(text: str) -> Gpu:
    """Return the GPU that a user calls `text`, such as h100, H100-PCIe or rtx4090.

    Raises:
        ConfigError: the table has no such GPU.
    """
    by_name = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS}
    name = re.sub(r"[\s_-]", "", text.lower())
    if name not in by_name:
        close = close_names(name, by_name, n=3)
        remedy = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(by_name)}"
        raise ConfigError(f"--gpu {printable(text)}: no such GPU is known; {remedy}")
    return by_name[name]
