"""The bytes of a rank: weights, gradients, optimizer state and activations, from shapes alone."""

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.layers import RmsNorm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dali_train.config import Config
from dali_train.training.loss import mixup_loss
from dali_train.training.optim import make_optimizer
from dali_train.training.precision import Precision, compute_in

# Not in the estimate: CUDA's context, cuDNN's and cuBLAS's workspaces, the decoder's buffers, and fragmentation in the
# allocator.
_UNSEEN_BYTES, _USABLE = 3e9, 0.95

IMAGES_ON_CPU = 32
"""Images per micro-batch without a GPU, whose memory would be the limit: enough to keep a CPU busy."""


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
        return largest_divisor(int(room * self.micro_batch / self.activation_bytes), global_batch, data_size)


def largest_divisor(most: int, global_batch: int, data_size: int) -> int | None:
    """Return the largest micro-batch of up to `most` images that `data_size` data-parallel ranks can use, preferably
    one that leaves none of them idle; None if there is none."""
    images_per_rank, rest = divmod(global_batch, data_size)
    multiple = global_batch if rest else images_per_rank
    return next((size for size in range(min(most, images_per_rank), 0, -1) if multiple % size == 0), None)


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
