"""Parallelizing a model: DDP, or a composition of pipeline stages, tensor parallelism and FSDP2.

The trainer gets a model to call, a data-parallel coordinate, and gradients averaged over the step's micro-batches on
all ranks.

Sharded data parallelism (ZeRO 1 to 3) is torch's FSDP2: each rank keeps a shard of weights and optimizer state. A
block's weights are gathered before they are needed, and gradients are reduce-scattered. Between steps every parameter
is a DTensor with its usual name.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dali_train.config import ParallelConfig
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import average_gradients, make_mesh, reduce_partial_gradients
from dali_train.parallel.stages import StageActivations, VitStage, make_stages, merge_stages
from dali_train.parallel.tensor import check_model, tensor_parallel

Level = Literal["optimizer", "gradients", "full"]

_NEVER = 2**31 - 1  # steps

# Layers whose weights autocast casts. Subclasses may use them in float32 first, for example to standardise them.
_COMPUTE_IN_HALF = (nn.Linear, nn.Conv2d)


def shard_model(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, level: Level, half: torch.dtype | None = None
) -> None:
    """Shard the parameters of `model` over the mesh's dimension "shard", in place. Those on the host move to the mesh's
    device block by block, so that no device ever holds all of them.

    Args:
        half: the half-precision dtype that linear layers and convolutions compute in, if any. Their parameters are then
            cast before the all-gather instead of after it, which halves its bytes and changes no bit of the result.
            All others, and gradients, travel in their own dtype. Without effect before torch 2.15, where FSDP has one
            dtype for all parameters of a block.

    Raises:
        ConfigError: weights that tensor parallelism has sharded already are not divisible by the number of ranks.
    """
    data = mesh["replicas", "shard"] if mesh["replicas"].size() > 1 else mesh["shard"]
    placement_of = partial(_placement, num_shards=mesh["shard"].size())
    policy = MixedPrecisionPolicy()
    if half is not None and hasattr(policy, "param_dtype_override_fn"):
        layers = [layer for layer in model.modules() if type(layer) in _COMPUTE_IN_HALF]
        # Not the parameters themselves: each is freed when it is sharded.
        cast = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        chosen: dict[str, Any] = {  # not keywords, which a type checker refuses where torch is older
            "param_dtype_override_fn": lambda parameter: half if id(parameter) in cast else parameter.dtype
        }
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False, **chosen)
    for module in (*blocks, model):
        fully_shard(
            module, mesh=data, reshard_after_forward=level == "full", shard_placement_fn=placement_of, mp_policy=policy
        )


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Return the first dimension that divides evenly; None if none does, so that FSDP pads the first one.

    Always sharding the first one would put position embeddings, (1, tokens, width), on a single rank."""
    if not isinstance(parameter, DTensor):
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_shards == 0), None)
    if not any(isinstance(placement, _StridedShard) for placement in parameter.placements):
        return None
    if parameter.shape[1] % num_shards:  # rows of a strided shard cannot be sharded again
        raise ConfigError(
            f"parallel.shard has {num_shards} ranks to shard the model's {parameter.shape[1]} features, as tensor "
            "parallelism has the rows of its weights, and they do not divide them: set parallel.shard_ranks to a "
            f"divisor of {parameter.shape[1]}"
        )
    return Shard(1)


def prepare_backward(model: nn.Module, level: Level, *, last: bool) -> None:
    """Set whether a backward pass reshards weights and gradients; after the `last` of a step, all are sharded."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or level != "optimizer")
    model.set_reshard_after_backward(last or level == "full")


Prepare = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Parallel:
    """The model as the trainer calls it, and how it is parallelized."""

    model: nn.Module
    layout: Layout
    num_parameters: int  # of the complete model
    mesh: DeviceMesh | None = None  # where the model is split over ranks
    level: Level | None = None  # how far it is sharded
    stages: Sequence[VitStage] = ()  # of a pipeline, those of this rank; `model` has the weights of all
    activations: StageActivations | None = None  # sent between them
    shapes: dict[str, list[int]] | None = None  # of the complete model's weights and buffers, by name

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of forward and backward: gradients are reduced only after a step's last micro-batch."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        self.prepare_backward(self.model, last=last)
        return nullcontext()

    def prepare_backward(self, module: nn.Module, *, last: bool) -> None:
        """Prepare a backward pass through `module`, the model or a stage of it; `last`: of the step."""
        if self.level is not None:
            prepare_backward(module, self.level, last=last)

    def num_passes(self, num_micro_batches: int) -> int:
        """Return how many forward and backward passes this rank makes in a step with `num_micro_batches` on all ranks.

        It is one per micro-batch of its own. If every pass has collectives (sharded gradients), or in a pipeline, whose
        schedule must be the same on all ranks, it is the maximum over the ranks.
        """
        if self.stages or self.level in ("gradients", "full"):
            return -(-num_micro_batches // self.layout.data_size)
        return self.layout.num_local_micro_batches(num_micro_batches)

    def finish_gradients(self) -> None:
        """Complete the gradients after the last backward pass of a step, if DDP or FSDP has not: all-reduce the Partial
        ones of tensor parallelism, and average over the data-parallel ranks."""
        if self.mesh is None or self.level is not None:
            return
        reduce_partial_gradients(self.model.parameters())
        if self.layout.data_size > 1:
            average_gradients(self.model.parameters(), self.mesh["replicas"].get_group())


def parallelize(
    model: nn.Module,
    layout: Layout,
    config: ParallelConfig,
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    activations: StageActivations | None = None,
    prepare: Prepare | None = None,
    half: torch.dtype | None = None,
) -> Parallel:
    """Parallelize `model` over the ranks: by DDP if there is only data parallelism; a single process needs nothing.

    Args:
        model: on `device`, or in host memory if the layout splits it.
        blocks: the repeated blocks of the model, which are gathered one by one if it is sharded.
        activations: sent between the stages of a pipeline.
        prepare: called for the model, or each of its stages, before it is wrapped.
        half: see `shard_model`.

    Raises:
        ConfigError: the model cannot be split in this way.
    """
    if layout.splits_model:
        return _split(model, layout, config, device, blocks, activations, prepare, half)
    if prepare is not None:
        prepare(model)
    if layout.data_size > 1:
        with warnings.catch_warnings():
            # torch 2.15 renames the option, earlier versions know only this name.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # Buffers are not broadcast, which would overwrite them with rank 0's; RunningStatistics keeps them equal.
            model = DistributedDataParallel(
                model,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
            # DDP times each hundredth step by default, and makes the host wait for the step before to read its timers.
            model._set_ddp_runtime_logging_sample_rate(_NEVER)
        if config.grad_reduce_dtype == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Parallel(model, layout, num_parameters)


def _split(
    model: nn.Module,
    layout: Layout,
    config: ParallelConfig,
    device: torch.device,
    blocks: Sequence[nn.Module],
    activations: StageActivations | None,
    prepare: Prepare | None,
    half: torch.dtype | None,
) -> Parallel:
    mesh = make_mesh(layout, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    check_model(model, config.tensor)
    stages: Sequence[VitStage] = ()
    if activations is not None:
        local_stages = make_stages(model, config)[layout.pipeline_rank :: layout.pipeline]
        stages = [VitStage(model, stage, activations.dtype) for stage in local_stages]
    modules: Sequence[nn.Module] = stages or (model,)
    if layout.tensor > 1:
        tensor_parallel(modules, mesh["tensor"], config.tensor)
    level = config.shard if layout.shard > 1 and config.shard != "none" else None
    for module in modules:
        if prepare is not None:
            prepare(module)
        if level is not None:
            inside = set(module.modules())
            shard_model(module, [block for block in blocks if block in inside], mesh, level, half)
        else:
            module.to(device)
    return Parallel(
        merge_stages(stages) if stages else model,
        layout,
        num_parameters,
        mesh=mesh,
        level=level,
        stages=stages,
        activations=activations,
        shapes=shapes,
    )


def warm_up(
    parallel: Parallel, images: torch.Tensor, autocast: AbstractContextManager[None], *, keep_gradients: bool = False
) -> list[nn.Parameter]:
    """Run forward and backward passes without side effects, so that the first step sums in the usual order.

    DDP reorders its gradient buckets after the first backward pass, and with three or more ranks the order of summation
    depends on a gradient's position in its bucket. Without these passes a resumed run would sum its first step
    differently from a run that was never stopped.

    Args:
        images: blank, in the format of the loader's images, so that a compiled model is compiled for it.
        keep_gradients: leave gradients of zero instead of None.

    Returns:
        The parameters in the order in which the last backward pass reached them.

    Raises:
        ConfigError: the model has parameters without a gradient, or buffers whose values would depend on the number of
            ranks.
    """
    model = parallel.model
    if keep_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    order: list[nn.Parameter] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(order.append)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    with autocast:
        output = model(images)
    zero_loss(output).backward()
    _refuse_unused_parameters(model, order)
    model.zero_grad(set_to_none=not keep_gradients)
    for handle in handles:
        handle.remove()
    _refuse_foreign_buffers(model, before)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return order


def zero_loss(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a loss of a model's `output` whose gradient with respect to every parameter is zero.

    With non-finite activations the gradient is NaN, which changes nothing if the micro-batch has already counted, since
    its own loss had the same activations.
    """
    outputs = output if isinstance(output, tuple) else (output,)  # a second one is a distillation token's
    return torch.stack([output.float().sum() for output in outputs]).sum() * 0


def _refuse_unused_parameters(model: nn.Module, reached: list[nn.Parameter]) -> None:
    """Refuse parameters without a gradient, which DDP would wait for, so that one rank would work but two would not."""
    used = {id(parameter) for parameter in reached}
    unused = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in used]
    if unused:
        raise ConfigError(
            f"the model does not use {_names(unused)}: they get no gradient, and data parallelism waits for all "
            "gradients. Remove these layers with model.kwargs, or choose another model.name"
        )


def _refuse_foreign_buffers(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Refuse buffers that a forward pass changes; only BatchNorm's are synchronised (`RunningStatistics`)."""
    handled = {
        id(buffer)
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.momentum is not None
        for buffer in layer.buffers(recurse=False)
    }
    changed = [
        name
        for name, buffer in model.named_buffers()
        if id(buffer) not in handled and not torch.equal(buffer, before[name])
    ]
    if changed:
        raise ConfigError(
            f"a forward pass changes the model's {_names(changed)}, which would depend on the number of ranks: only "
            "the running statistics of BatchNorm layers with a momentum are handled. Choose other layers "
            "(model.kwargs) or another model.name"
        )


def _names(names: list[str]) -> str:
    names = [name.removeprefix("module.") for name in names]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
