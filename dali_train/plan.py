"""What a run would do, worked out without a GPU and without reading data: steps, accumulation, schedule, memory."""

import math
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dali_train.config import Config, ConfigError
from dali_train.data.manifest import Manifest
from dali_train.mixup import mixup_loss
from dali_train.model import build_model
from dali_train.optim import make_optimizer
from dali_train.precision import Precision
from dali_train.schedule import learning_rate

IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000  # ILSVRC 2012's training split
IMAGENET_IMAGE_BYTES = 110e3


def print_plan(config: Config, *, world_size: int, num_images: int | None, picture: Path | None) -> None:
    """Print the plan for `world_size` ranks, and draw it into `picture`.

    Raises:
        ConfigError: the batch does not divide among the ranks, or model or optimizer cannot be built, or
            matplotlib is missing for the picture.
    """
    num_classes, source, image_bytes = IMAGENET_CLASSES, "ImageNet-1k", IMAGENET_IMAGE_BYTES
    if num_images is not None:
        source = "--num-images"
        if num_images < 1:
            raise ConfigError(f"--num-images is {num_images}: use a positive number of training images")
    elif (Path(config.data.root) / "dataset.json").exists():
        manifest = Manifest.read(Path(config.data.root))
        split = manifest.splits["train"]
        num_images, num_classes, source = split.num_records, manifest.num_classes, config.data.root
        image_bytes = sum(shard.num_bytes for shard in split.shards) / num_images
    else:
        num_images = IMAGENET_IMAGES
    batch = config.batch
    accumulation = batch.accumulation(world_size)
    steps = config.steps(config.run.epochs, num_images)
    parameters, state_bytes, activation_bytes = estimate_memory(config, num_classes)

    print(f"images         {num_images:,} in {num_classes} classes ({source})")
    print(f"order          {describe_order(config, num_images, image_bytes)}")
    print(f"model          {config.model.name}: {parameters:,} parameters, precision {config.precision.dtype}")
    print(f"ranks          {world_size}")
    print(f"accumulation   {accumulation} micro-batches of {batch.micro_batch} a rank: {batch.global_batch:,} images a step")
    print(f"steps          {steps:,} in {config.run.epochs:g} epochs, {num_images / batch.global_batch:.2f} an epoch")
    if config.run.max_steps is not None and config.run.max_steps < steps:
        print(f"               stops after run.max_steps {config.run.max_steps:,}")
    state, activations = state_bytes / 1e9, activation_bytes / 1e9
    print(f"memory a rank  {state:.2f} GB weights, gradients and optimizer, about {activations:.2f} GB activations")
    print(f"learning rate  moves every {config.schedule.step_every}")
    for quarter in range(5):
        epoch = config.run.epochs * quarter / 4
        step = math.ceil(epoch * num_images / batch.global_batch - 1e-9)
        print(f"  epoch {epoch:>6g}  step {step:>7,}  {learning_rate(config, step, num_images):.6g}")
    if picture is not None:
        draw_plan(config, num_images, state_bytes, activation_bytes, picture)
        print(f"picture        {picture}")


def describe_order(config: Config, num_images: int, image_bytes: float) -> str:
    """data.shuffle in words, and what a block order asks of the page caches."""
    data = config.data
    if data.shuffle == "none":
        return "none: as on disk, the same every epoch"
    if data.shuffle == "full":
        return "full: any image may follow any other"
    lanes = config.batch.global_batch // config.batch.micro_batch
    pool = min(num_images, lanes * data.window_blocks * data.block_images)
    return (
        f"block: {data.window_blocks} blocks of {data.block_images} images are mixed in each of a step's {lanes} micro-batches; "
        f"about {pool * image_bytes / 1e9:.1f} GB in the page caches of all hosts together"
    )


def draw_plan(config: Config, num_images: int, state_bytes: int, activation_bytes: int, picture: Path) -> None:
    """The learning rate over the run, and what a rank's memory goes to.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(f"--picture draws with {error.name}, which is not there: pip install 'dali-train[report]'") from error
    steps = config.steps(config.run.epochs, num_images)
    shown = range(0, steps, max(1, steps // 2000))
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 4.6), dpi=150, layout="constrained")
        rate, memory = figure.subplots(2, 1, height_ratios=(4, 1))
        rate.plot(
            [step * config.batch.global_batch / num_images for step in shown], [learning_rate(config, s, num_images) for s in shown]
        )
        rate.set(
            title=f"Learning rate, {steps:,} steps",
            xlabel="epoch",
            ylim=(0, 1.08 * config.optimizer.lr),
            xlim=(0, config.run.epochs),
        )
        rate.grid(color="#e3e3e3")
        weight_bytes = state_bytes // 4  # weights, gradients and LAMB's two moments are of one size
        parts = {"weights": weight_bytes, "gradients": weight_bytes, "LAMB's moments": 2 * weight_bytes}
        parts["activations, about"] = activation_bytes
        left = 0.0
        for (name, size), colour in zip(parts.items(), ("#0072B2", "#56B4E9", "#009E73", "#E69F00"), strict=True):
            memory.barh([""], [size / 1e9], left=left, color=colour, label=f"{name} {size / 1e9:.2f} GB")
            left += size / 1e9
        micro_batch = config.batch.micro_batch
        memory.set(title=f"Memory of a rank, {left:.1f} GB with micro-batches of {micro_batch}", xlabel="GB")
        memory.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)


def estimate_memory(config: Config, num_classes: int) -> tuple[int, int, int]:
    """(parameters, bytes of weights, gradients and optimizer, bytes of activations) of one rank.

    Parameters come from the model on the meta device. The activations are the tensors that autograd would keep of one
    micro-batch, found by a forward pass with fake tensors, which computes shapes only. Workspaces and what a compiler
    fuses away are not in it.
    """
    model = build_model(config, num_classes, torch.device("meta"))
    make_optimizer(model, config.optimizer)  # checks its arguments; LAMB keeps two moments a weight
    num_parameters = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    kept: dict[int, torch.UntypedStorage] = {}  # the storages are held, or a freed one's address could come again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    size, batch = config.data.train_size, config.batch.micro_batch
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # autocast does nothing on the meta device
        precision = Precision(config.precision, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with precision.autocast():
                logits = model(torch.empty(batch, 3, size, size, dtype=precision.image_dtype))
            mixup_loss(logits, torch.zeros(batch, 2, dtype=torch.int64), torch.ones(batch))
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage()._cdata, None)
        activation_bytes = sum(storage.nbytes() for storage in kept.values())
    return num_parameters, 4 * weight_bytes, activation_bytes
