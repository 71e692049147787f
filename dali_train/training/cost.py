"""What a model costs: the FLOPs of an image and the bytes of a rank, from shapes alone; and how fast this machine
computes matrix products, by measurement.

The FLOPs give model FLOP utilisation, the model's FLOP/s as a fraction of the device's peak:

    MFU = images/s x FLOPs per image / (devices x dense peak)

They are those of the model, counted once on the meta device; recomputation, in a kernel or by activation checkpointing,
does not count. The peak is that of dense matrix products.
"""

import copy
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.layers import RmsNorm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dali_train.config import Config
from dali_train.text import duration
from dali_train.training.devices import data_sheet_peak
from dali_train.training.loss import mixup_loss
from dali_train.training.model import build_model
from dali_train.training.optim import make_optimizer
from dali_train.training.precision import Precision, compute_in

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class ModelFlops:
    """Converts throughput into model FLOP utilisation. Created once per run."""

    per_image: dict[int, float]  # of one forward and backward pass, by the side of the images in pixels
    peak: float  # dense FLOP/s of all devices together

    def utilisation(self, images_per_second: float, size: int) -> float:
        """Return the fraction of the peak, 0 to 1.

        Args:
            images_per_second: over all ranks, without evaluation and checkpoints.
            size: the side of the images in pixels.
        """
        return images_per_second * self.per_image[size] / self.peak


def model_flops(config: Config, num_classes: int, device: torch.device, *, num_devices: int) -> ModelFlops | None:
    """Return the FLOPs of a run on `num_devices` devices like `device`.

    None if there is no peak to compare with (on a CPU, or on a GPU that is not in the table), or if the model cannot be
    counted on the meta device.
    """
    if device.type != "cuda":
        return None
    peak = data_sheet_peak(torch.cuda.get_device_name(device), config.precision.dtype, tf32=config.precision.tf32)
    if peak is None:
        return None
    try:
        per_image = {size: flops_per_image(config.at_size(size), num_classes) for size in config.data.train_sizes}
    except (RuntimeError, NotImplementedError):  # the model needs values, which the meta device does not have
        return None
    return ModelFlops(per_image, peak.flops_per_second * num_devices)


def flops_per_image(config: Config, num_classes: int, model: nn.Module | None = None) -> float:
    """Count one forward and backward pass at data.train_size: matrix products and convolutions.

    A multiplication and an addition are two operations, as in torch's FLOP counter; attention is two matrix products.

    Args:
        model: that of `config` on the meta device, if it is built. With activation checkpointing another one is built,
            since recomputation does not count.
    """
    if model is None or config.model.activation_checkpointing:
        plain = replace(config, model=replace(config.model, activation_checkpointing=False))
        model = build_model(plain, num_classes, torch.device("meta"))
    size = config.data.train_size
    dtype = next(model.parameters()).dtype
    corrected: Any = {torch.ops.aten.convolution_backward: _flops_of_convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=corrected) as counter:
        model(
            torch.empty(2, 3, size, size, device="meta", dtype=dtype)
        ).sum().backward()  # batch statistics need two images
    model.zero_grad()
    return counter.get_total_flops() / 2


def _flops_of_convolution_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *arguments: Any, **named: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass, from the shapes of its tensors and torch's other arguments:
    those of the forward pass for each of the gradients of `x` and of `weight` that is computed.

    torch's own formula (2.15) counts the gradient of the weight as if there were a single group: ConvNeXt-T, with
    depthwise convolutions, would have 2.9 times its FLOPs.
    """
    transposed, output_mask = arguments[4], arguments[7]
    pixels = x if transposed else grad
    return 2 * math.prod(weight) * pixels[0] * math.prod(pixels[2:]) * sum(output_mask[:2])


def measured_peak(dtype: str, device: torch.device, seconds: float = 2.0) -> float:
    """Measure FLOP/s: the fastest of several large square products in precision.dtype `dtype`."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(_DTYPES[dtype]) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best


_PRODUCT_FLOPS = 2e9  # of the product that is measured, at most: 40 ms at 50 GFLOP/s
FASTER = 1.2  # a ratio of two measured times that is more than their noise


@dataclass(frozen=True)
class Product:
    """A model's largest matrix product or convolution, as this machine's processor computes it."""

    flops: float
    seconds: dict[str, float]  # by precision.dtype

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    def speedup(self, dtype: str) -> float:
        """Return how many times as fast as fp32 `dtype` is; below 1 where the processor emulates it."""
        return self.seconds["fp32"] / self.seconds[dtype]

    def emulates(self, dtype: str) -> bool:
        """Return whether the processor has no instructions for `dtype`, fp32, bf16 or fp16, and is slower for it."""
        return self.speedup(dtype) < 1 / FASTER

    def warning(self, dtype: str) -> str | None:
        """Return what a user of precision.dtype `dtype` should know: by how much the processor is slower for it."""
        if dtype not in ("bf16", "fp16") or not self.emulates(dtype):
            return None
        return (
            f"precision.dtype is {dtype}, which this machine's CPU emulates: the model's largest product takes "
            f"{1 / self.speedup(dtype):.1f} times as long as in fp32. Set precision.dtype {self.fastest}"
        )

    def describe(self) -> str:
        times = ", ".join(f"{dtype} {duration(seconds)}" for dtype, seconds in self.seconds.items())
        words = f"this machine's CPU takes {times} for the model's largest product"
        if self.speedup(self.fastest) < FASTER:
            return words
        return f"{words}; {self.fastest} is {self.speedup(self.fastest):.1f} times as fast as fp32"


def emulation_warning(config: Config, num_classes: int, device: torch.device) -> str | None:
    """Return a warning where the processor emulates precision.dtype, which makes a run many times as long.

    None for other devices, where a format is not slower, and for models that the meta device cannot compute.
    """
    if device.type != "cpu" or config.precision.dtype not in ("bf16", "fp16"):
        return None
    try:
        product = measure_largest_product(config, build_model(config, num_classes, torch.device("meta")))
    except (RuntimeError, NotImplementedError):  # the model needs values
        return None
    return product.warning(config.precision.dtype)


def measure_largest_product(config: Config, model: nn.Module) -> Product:
    """Time the largest operator of a forward pass on this machine's processor, in fp32, bf16, fp16 and the dtype of
    `config`, for about a second in all.

    Whole models gain less: norms, activations and the optimizer are in float32 under autocast.

    Args:
        model: that of `config` on the meta device.

    Raises:
        RuntimeError, NotImplementedError: the model needs values, which the meta device does not have.
    """
    size, largest = config.data.train_size, _Largest()
    num_images, dtype = 2, next(model.parameters()).dtype  # batch statistics need two images
    for _ in range(2):
        with torch.no_grad(), largest:
            model(torch.empty(num_images, 3, size, size, device="meta", dtype=dtype))
        fitting = int(num_images * _PRODUCT_FLOPS / max(1.0, largest.flops))
        num_images = max(2, min(config.batch.micro_batch, fitting))
    assert largest.call is not None, "a model without a product"
    func, args, kwargs = largest.call
    best: dict[str, float] = dict.fromkeys(("fp32", "bf16", "fp16", config.precision.dtype), float("inf"))
    left, inputs = dict.fromkeys(best, 0.3), {}
    for name in best:
        like = partial(torch.empty_like, device="cpu", dtype=_DTYPES[name])
        inputs[name] = [like(one).normal_() if isinstance(one, torch.Tensor) else one for one in args]
        func(*inputs[name], **kwargs)  # the first call compiles a kernel
    while any(seconds > 0 for seconds in left.values()):
        for name in left:  # in turns, because other processes disturb
            if left[name] > 0:
                start = time.perf_counter()
                func(*inputs[name], **kwargs)
                seconds = time.perf_counter() - start
                best[name], left[name] = min(seconds, best[name]), left[name] - seconds
    return Product(largest.flops, best)


def seconds_per_image(config: Config, num_classes: int, device: torch.device, micro_batch: int) -> float:
    """Measure forward and backward passes of up to 32 random images on `device`, the fastest of three."""
    model, autocast = build_model(config, num_classes, device), Precision(config.precision, device).autocast
    size, num_images = config.data.train_size, max(2, min(micro_batch, 32))  # batch statistics need two
    images, seconds = torch.randn(num_images, 3, size, size, device=device), float("inf")
    for _ in range(3):  # the first one prepares kernels
        start = time.perf_counter()
        with autocast():
            logits = model(images)
        logits.float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds / num_images


def bf16_speedup(config: Config, model: nn.Module, num_classes: int) -> float:
    """Return how many times as fast forward and backward passes in bf16 are as those in fp32 on this processor; 1 where
    its largest product is not, since an emulated format takes minutes.

    In a small network casts can cost more than products gain: that of configs/digits.py took 41 ms in bf16 and 26 ms in
    fp32 where its largest product was 1.7 times as fast in bf16 (AMD EPYC with AVX512_BF16, one thread).

    Args:
        model: that of `config` on the meta device.
    """
    if measure_largest_product(config, model).speedup("bf16") < FASTER:
        return 1.0
    plain, half = (
        seconds_per_image(one, num_classes, torch.device("cpu"), config.batch.micro_batch)
        for one in (config.replace({"precision.dtype": dtype}) for dtype in ("fp32", "bf16"))
    )
    return plain / half


class _Largest(TorchDispatchMode):
    """A mode that remembers the call with the most FLOPs, by torch's FLOP counter."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.call = 0.0, None  # type: float, tuple[Any, Any, Any] | None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if count := flop_registry.get(func._overloadpacket):
            flops = count(*args, **kwargs, out_val=outputs)
            if flops > self.flops:
                self.flops, self.call = float(flops), (func, args, kwargs)
        return outputs


# Not in the estimate: CUDA's context, cuDNN's and cuBLAS's workspaces, the decoder's buffers, and fragmentation in the
# allocator.
_UNSEEN_BYTES, _USABLE = 3e9, 0.95


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank."""

    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    # The peak of a forward and backward pass, nearly all of it what the former keeps for the latter: of one micro-
    # batch; in a pipeline of all those in flight.
    activation_bytes: int
    micro_batch: int  # images
    average_bytes: int = 0  # moving averages of weights and buffers
    update_bytes: int = 0  # the peak of the optimizer's step; in fp16 also the copy by which it can be undone
    gathered_bytes: int = 0  # weights gathered from other ranks during a step

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, optimizer state and moving averages: independent of the micro-batch."""
        kept_between_steps = self.weight_bytes + self.optimizer_bytes + self.average_bytes
        return kept_between_steps + self.gathered_bytes + self.gradient_bytes

    @property
    def step_bytes(self) -> int:
        """The peak on top of `state_bytes` in a step: activations, or, once they are freed, the optimizer's step."""
        return max(self.activation_bytes, self.update_bytes)

    def of_rank(
        self,
        *,
        parameters: int,
        block_share: float,
        in_flight: float,
        level: str = "none",
        shard: int = 1,
        num_blocks: int = 1,
    ) -> "Memory":
        """Return the part of this memory that one rank holds.

        Args:
            parameters: the number of parameters in its stages.
            block_share: the fraction of the model's blocks in each of its stages.
            in_flight: micro-batches between their forward and backward pass, summed over its stages.
            level: parallel.shard, over `shard` ranks.
            num_blocks: the number of blocks in its stages, which are gathered one by one with level full.
        """
        share = parameters / self.num_parameters
        weights, gradients = share * self.weight_bytes, share * self.gradient_bytes
        shards = shard if level != "none" else 1
        share_of_shard = share / shards
        # Level full gathers a block while the previous one is computed.
        gathered = 0.0 if shards == 1 else min(1.0, 2 / num_blocks) * weights if level == "full" else weights
        return replace(
            self,
            weight_bytes=round(weights / shards),
            gathered_bytes=round(gathered),
            gradient_bytes=round(gradients if level == "optimizer" else gradients / shards),
            optimizer_bytes=round(self.optimizer_bytes * share_of_shard),
            average_bytes=round(self.average_bytes * share_of_shard),
            update_bytes=round(self.update_bytes * share_of_shard),
            activation_bytes=round(self.activation_bytes * block_share * in_flight),
        )

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes

    def largest_micro_batch(self, device_bytes: float, global_batch: int, data_size: int = 1) -> int | None:
        """Return the largest micro-batch with which a step on `data_size` data-parallel ranks fits into `device_bytes`,
        preferably one that leaves no rank idle. None if not even one image fits."""
        room = _USABLE * device_bytes - _UNSEEN_BYTES - self.state_bytes
        if room < self.update_bytes:
            return None
        fitting = int(room * self.micro_batch / self.activation_bytes)
        images_per_rank, rest = divmod(global_batch, data_size)
        multiple = global_batch if rest else images_per_rank
        return next((size for size in range(min(fitting, images_per_rank), 0, -1) if multiple % size == 0), None)


def estimate_memory(config: Config, model: nn.Module) -> Memory:
    """Estimate the memory of an unsharded rank on a GPU.

    It is that of one micro-batch's passes and of one optimizer step with fake tensors, which compute only shapes.
    Workspaces, and savings by fusion in a compiler, are not included. What torch's allocator counts for the recipes on
    a GPU without kernels (tests/fakecuda/test_memory.py) is within 10 % of it.

    Args:
        model: that of `config` on the meta device.
    """
    model = copy.deepcopy(model)  # which fake tensors replace
    weights = list(model.parameters())
    size, batch = config.data.train_size, config.batch.micro_batch
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # autocast does nothing on the meta device
        averaged = _num_bytes(model.state_dict().values()) if config.ema.decay is not None else 0
        optimizer = make_optimizer(model, config.optimizer)
        precision = Precision(config.precision, torch.device("cpu"))
        if precision.pure_dtype is not None:
            compute_in(model, precision.pure_dtype)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        _keep_as_on_gpu(model)
        with _Peak() as passes:
            images = torch.empty(batch, 3, size, size, dtype=precision.image_dtype or precision.half)
            with precision.autocast():
                logits = model(images)
                loss = mixup_loss(logits, torch.zeros(batch, 2, dtype=torch.int64), torch.ones(batch))
            loss.backward()
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None:  # not chosen, which on a GPU is all tensors at once
                group["foreach"] = True
        with _Peak() as update, _Halves():
            optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        optimizer_bytes = _num_bytes(value for value in kept if isinstance(value, torch.Tensor))
    update_bytes = update.peak - update.now  # the first step makes the state, and does the same besides
    if config.precision.dtype == "fp16":
        update_bytes += _num_bytes(weights) + optimizer_bytes
    return Memory(
        num_parameters=sum(p.numel() for p in weights),
        weight_bytes=_num_bytes(weights),
        gradient_bytes=_num_bytes(p for p in weights if p.requires_grad),
        optimizer_bytes=optimizer_bytes,
        activation_bytes=passes.peak,
        micro_batch=batch,
        average_bytes=averaged,
        update_bytes=update_bytes,
    )


class _Peak(TorchDispatchMode):
    """A mode that adds up the memory of all tensors that operations make in it, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0  # bytes
        self._alive: dict[int, int] = {}  # bytes, by the address of a storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                self._add(output.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._alive:
            self._alive[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, address).atexit = False

    def _remove(self, address: int) -> None:
        self.now -= self._alive.pop(address)


def _keep_as_on_gpu(model: nn.Module) -> None:
    """Let layers keep for the backward pass on a CPU what they keep on a GPU."""
    for layer in model.modules():
        if type(layer) is nn.Dropout:
            layer.forward = partial(_dropped, layer)  # type: ignore[method-assign]
        elif isinstance(layer, nn.LayerNorm | RmsNorm) and not getattr(layer, "_fast_norm", False):  # timm's
            layer.register_forward_pre_hook(_in_float32)
        if isinstance(layer, RmsNorm):
            layer.forward = partial(_RmsNorm.apply, layer.weight)


def _dropped(layer: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    """Keep the mask as bool; a CPU keeps it in the dtype of `x`."""
    if layer.p == 0 or not layer.training:
        return x
    dropped, _ = torch.native_dropout(x, layer.p, True)
    return dropped


def _in_float32(layer: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor | None:
    """Under autocast a GPU computes norms in float32."""
    (x,) = inputs
    return x.float() if torch.is_autocast_enabled("cpu") else None


class _RmsNorm(torch.autograd.Function):
    """torch's norm by the root of the mean square as the one kernel that it is on a GPU; without its values."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, x = ctx.saved_tensors
        return torch.empty_like(weight), torch.empty_like(x)


class _Halves(TorchDispatchMode):
    """A mode in which the number in any fake tensor is a half, or true: a step may read counts and norms, and what they
    are has no effect on the size of its state."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else True
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
