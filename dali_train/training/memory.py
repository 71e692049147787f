"""The memory of a rank, estimated from shapes alone, without a GPU, data or computation."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dali_train.config import Config
from dali_train.training.loss import mixup_loss
from dali_train.training.model import KEPT_RESULTS, build_model
from dali_train.training.optim import make_optimizer
from dali_train.training.precision import Precision

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
    activation_bytes: int  # kept for the backward pass: of one micro-batch; in a pipeline of all those in flight
    micro_batch: int  # images
    gathered_bytes: int = 0  # weights gathered from other ranks during a step
    keeps_copy: bool = False  # fp16: copies weights and optimizer state while the optimizer steps

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state: independent of the micro-batch."""
        return self.weight_bytes + self.gathered_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def step_bytes(self) -> int:
        """The peak on top of `state_bytes` in a step: activations, or, once they are freed, the copy."""
        return max(self.activation_bytes, self.weight_bytes + self.optimizer_bytes if self.keeps_copy else 0)

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
        weights, gradients, optimizer = (
            share * b for b in (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes)
        )
        shards = shard if level != "none" else 1
        # Level full gathers a block while the previous one is computed.
        gathered = 0.0 if shards == 1 else min(1.0, 2 / num_blocks) * weights if level == "full" else weights
        return replace(
            self,
            weight_bytes=round(weights / shards),
            gathered_bytes=round(gathered),
            gradient_bytes=round(gradients if level == "optimizer" else gradients / shards),
            optimizer_bytes=round(optimizer / shards),
            activation_bytes=round(self.activation_bytes * block_share * in_flight),
        )

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes

    def largest_micro_batch(self, device_bytes: float, global_batch: int, data_size: int = 1) -> int | None:
        """Return the largest micro-batch with which a step on `data_size` data-parallel ranks fits into `device_bytes`,
        preferably one that leaves no rank idle. None if not even one image fits."""
        room = _USABLE * device_bytes - _UNSEEN_BYTES - self.state_bytes
        if self.keeps_copy and room < self.weight_bytes + self.optimizer_bytes:
            return None
        fitting = int(room * self.micro_batch / self.activation_bytes)
        images_per_rank, rest = divmod(global_batch, data_size)
        multiple = global_batch if rest else images_per_rank
        return next((size for size in range(min(fitting, images_per_rank), 0, -1) if multiple % size == 0), None)


def estimate_memory(config: Config, num_classes: int) -> Memory:
    """Estimate the memory of an unsharded rank.

    Parameters come from the model on the meta device. The activations are the tensors that autograd would keep for one
    micro-batch, found by a forward pass with fake tensors, which computes only shapes. Workspaces, and savings by
    fusion in a compiler, are not included. (torch's MemTracker agrees within 0.002 % for ViT-B/16, and takes five times
    as long.)

    Raises:
        ConfigError: the model cannot be built.
    """
    model = build_model(config, num_classes, torch.device("meta"))
    weights = list(model.parameters())
    kept: dict[int, torch.UntypedStorage] = {}  # holds the storages, or a freed address could be reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    size, batch = config.data.train_size, config.batch.micro_batch
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        # torch 2.15 warns that selective checkpointing will pass to these hooks the tensors that `_Results` passes:
        # counting them twice is harmless.
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        model.to_empty(device="cpu")  # autocast does nothing on the meta device
        precision = Precision(config.precision, torch.device("cpu"))
        selective = config.model.activation_checkpointing == "selective"
        results = _Results(keep) if selective else nullcontext()  # keeps its results outside autograd
        with results, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with precision.autocast():
                logits = model(torch.empty(batch, 3, size, size, dtype=precision.image_dtype))
            mixup_loss(logits, torch.zeros(batch, 2, dtype=torch.int64), torch.ones(batch))
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage()._cdata, None)
        activation_bytes = sum(storage.nbytes() for storage in kept.values())
        optimizer_bytes = _optimizer_bytes(model, config)
    return Memory(
        num_parameters=sum(p.numel() for p in weights),
        weight_bytes=_num_bytes(weights),
        gradient_bytes=_num_bytes(p for p in weights if p.requires_grad),
        optimizer_bytes=optimizer_bytes,
        activation_bytes=activation_bytes,
        micro_batch=batch,
        keeps_copy=config.precision.dtype == "fp16",
    )


class _Results(TorchDispatchMode):
    """A mode that calls `keep` with the results of the operators in `KEPT_RESULTS`."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in KEPT_RESULTS:
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, torch.Tensor):
                    self._keep(output)
        return outputs


def _optimizer_bytes(model: nn.Module, config: Config) -> int:
    """Return the size of the optimizer's state after a first step with fake tensors, which computes nothing.

    Parameters of the same group and shape have states of the same size, so one of each takes the step.
    """
    optimizer = make_optimizer(model, config.optimizer)
    alike: dict[tuple[int, torch.Size], list[nn.Parameter]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                alike[number, parameter.shape].append(parameter)
    for first, *_ in alike.values():
        first.grad = torch.empty_like(first)
    optimizer.step()
    return sum(
        len(same) * _num_bytes(value for value in optimizer.state[same[0]].values() if isinstance(value, torch.Tensor))
        for same in alike.values()
    )


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
