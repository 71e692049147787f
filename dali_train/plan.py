"""What a run would do, worked out without a GPU and without reading data: steps, accumulation, schedule, memory."""

import math
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dali_train.config import Config, ConfigError
from dali_train.data.index import Manifest
from dali_train.mixup import mixup_loss
from dali_train.model import build_model
from dali_train.optim import make_optimizer
from dali_train.precision import Precision
from dali_train.schedule import learning_rate

IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000  # ILSVRC 2012's training split


def print_plan(config: Config, *, world_size: int, num_images: int | None) -> None:
    """Print the plan for `world_size` ranks.

    Raises:
        ConfigError: the batch does not divide among the ranks, or model or optimizer cannot be built.
    """
    num_classes, source = IMAGENET_CLASSES, "ImageNet-1k"
    if num_images is not None:
        source = "--num-images"
        if num_images < 1:
            raise ConfigError(f"--num-images is {num_images}: use a positive number of training images")
    elif (Path(config.data.root) / "dataset.json").exists():
        manifest = Manifest.read(Path(config.data.root))
        num_images, num_classes, source = manifest.splits["train"].num_records, manifest.num_classes, config.data.root
    else:
        num_images = IMAGENET_IMAGES
    batch = config.batch
    accumulation = batch.accumulation(world_size)
    steps = config.steps(config.run.epochs, num_images)
    parameters, state_bytes, activation_bytes = estimate_memory(config, num_classes)

    print(f"images         {num_images:,} in {num_classes} classes ({source})")
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
