"""Tensor parallelism of timm's VisionTransformer: its blocks are sharded in place.

Everything else is unchanged. All ranks compute patch embedding, final norm and classifier. The first block takes the
complete activations and the last one returns them, so the rest of the model, and pipeline stages, need not know of the
sharding.

Attention is sharded by heads, the MLP by hidden units, and with sequence parallelism the rest by tokens. Two- and
three-dimensional shards are in extras/tensor_grids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from dali_train.config import TensorConfig
from dali_train.config.check import Extra
from dali_train.errors import ConfigError
from dali_train.parallel.mesh import Shardwise

IMAGES, TOKENS, FEATURES = range(3)  # the dimensions of an activation
OUT, IN = range(2)  # the dimensions of a weight
NUM_FUSED = 3  # queries, keys and values, which timm fuses in the rows of attn.qkv

LocalMap = Callable[[str, torch.Tensor], torch.Tensor]


class LocalParallel(ParallelStyle):
    """Keep a layer's parameters as DTensors and compute it on plain tensors, this rank's shards.

    Where a parameter is replicated, each rank's gradient is a summand of the total (Partial).

    Args:
        placements: of each parameter, by name.
        prepare_parameter: maps the local shard of a parameter to the tensor that the layer uses.
        prepare_input, prepare_output: map the layer's input and output.
    """

    def __init__(
        self,
        placements: Mapping[str, Sequence[Placement]],
        *,
        prepare_parameter: LocalMap | None = None,
        prepare_input: Callable[[Any], torch.Tensor] | None = None,
        prepare_output: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.placements = placements
        self.prepare_parameter = prepare_parameter
        self.prepare_input, self.prepare_output = prepare_input, prepare_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), device_mesh, self.placements[name], src_data_rank=None)
            with Shardwise():
                module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        compute = module.forward

        def forward(x: Any) -> torch.Tensor:
            parameters = module._parameters
            try:
                module._parameters = {name: self._local(name, parameter) for name, parameter in parameters.items()}
                output: torch.Tensor = compute(x if self.prepare_input is None else self.prepare_input(x))
            finally:  # recomputation may stop in the middle of a layer
                module._parameters = parameters
            return output if self.prepare_output is None else self.prepare_output(output)

        module.forward = forward
        return module

    def _local(self, name: str, parameter: Any) -> Any:
        if parameter is None:
            return None
        gradients = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
        shard: torch.Tensor = parameter.to_local(grad_placements=gradients)
        return shard if self.prepare_parameter is None else self.prepare_parameter(name, shard)


def fused_placements(weight: Sequence[Placement]) -> dict[str, Sequence[Placement]]:
    """Return the placements of attn.qkv's parameters, given those of an unfused `weight`.

    A rank gets its heads' rows of queries, keys and values. The bias stays replicated: FSDP can shard a vector only
    along its rows, which DTensor cannot combine with this placement.
    """
    strided = _StridedShard(OUT, split_factor=NUM_FUSED)
    return {
        "weight": [strided if placement.is_shard(OUT) else placement for placement in weight],
        "bias": [Replicate()] * len(weight),
    }


def fused_rows(bias: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the rows of attn.qkv's complete bias for this rank's heads along `axis`."""
    by_rank = bias.unflatten(0, (NUM_FUSED, axis.size(), -1))
    return by_rank[:, axis.get_local_rank()].flatten()


class OneProcessMasks(ParallelStyle):
    """Dropout or stochastic depth of a sharded activation, with the same masks as in a single process.

    Every rank draws the complete mask from the same seed, and uses its shard of it.

    Args:
        placements: of an activation given as a plain tensor, with shards of equal size; a DTensor has its own.
    """

    def __init__(self, placements: Sequence[Placement] = ()) -> None:
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        draw = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return x
            placed = x
            if not isinstance(placed, DTensor):
                placed = DTensor.from_local(x.detach(), device_mesh, self.placements, run_check=False)
            dims = range(x.ndim) if isinstance(module, nn.Dropout) else (IMAGES,)
            shape = [size if dim in dims else 1 for dim, size in enumerate(placed.shape)]
            complete = draw(torch.ones(shape, dtype=x.dtype, device=x.device))
            placements = [p if any(map(p.is_shard, dims)) else Replicate() for p in placed.placements]
            # Not by `distribute_tensor`, which the compiler cannot trace.
            replicated = DTensor.from_local(complete, placed.device_mesh, run_check=False)
            mask = replicated.redistribute(placements=placements)
            return x * (mask if placed is x else mask.to_local())

        module.forward = forward
        return module


_HEADS = 1  # the dimension of queries (images, heads, tokens, features)


def _shard_along_one_dimension(block: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard timm's `block` over the ranks of `mesh`, in place. Its weights must be equal on all ranks.

    Args:
        sequence_parallel: the block takes and returns DTensors sharded by tokens, otherwise plain tensors.
    """
    stream: Placement = Shard(TOKENS) if sequence_parallel else Replicate()
    to_stream = partial(RowwiseParallel, output_layouts=stream, use_local_output=not sequence_parallel)

    def complete(x: Any) -> Any:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [stream], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    plan: dict[str, ParallelStyle] = {
        "attn.qkv": LocalParallel(
            fused_placements([Shard(OUT)]),
            prepare_parameter=lambda name, shard: fused_rows(shard, mesh) if name == "bias" else shard,
            prepare_input=complete,
        ),
        "attn.q_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True),
        "attn.k_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True),
        "attn.proj": to_stream(),
        "mlp.fc1": ColwiseParallel(input_layouts=stream, use_local_output=False),
        "mlp.drop1": OneProcessMasks(),
        "mlp.fc2": to_stream(),
    }
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2", "ls1", "ls2")}
        plan |= {name: OneProcessMasks() for name in ("attn.proj_drop", "mlp.drop2", "drop_path1", "drop_path2")}
    trained = {name: parameter.requires_grad for name, parameter in block.named_parameters()}
    present = {name: style for name, style in plan.items() if not isinstance(block.get_submodule(name), nn.Identity)}
    parallelize_module(block, mesh, present, src_data_rank=None)
    for name, parameter in block.named_parameters():  # SequenceParallel unfreezes all parameters
        parameter.requires_grad_(trained[name])


GRIDS: dict[str, Extra[Any]] = {
    "2d": Extra("dali_train.extras.tensor_grids.grid_layouts:GRID_2D", "parallel.tensor.mode 2d"),
    "2.5d": Extra("dali_train.extras.tensor_grids.grid_layouts:GRID_2_5D", "parallel.tensor.mode 2.5d"),
    "3d": Extra("dali_train.extras.tensor_grids.grid_layouts:GRID_3D", "parallel.tensor.mode 3d"),
}


def grid_layout(tensor: TensorConfig) -> Any:
    """Return the `GridLayout` of a mode with several dimensions; None for 1d."""
    return None if tensor.mode == "1d" else GRIDS[tensor.mode].load()


def tensor_parallel(models: Sequence[nn.Module], mesh: DeviceMesh, tensor: TensorConfig) -> None:
    """Shard the blocks of `models` over the ranks of `mesh`, in place. All ranks call this together.

    The sharded parameters become DTensors, whose `full_tensor()` is timm's weight; all others are equal on all ranks
    and get equal gradients. Gradients of replicated DTensors are Partial until `Parallel.finish_gradients`. Dropout
    masks are shards of the masks that a single process draws.

    Args:
        models: timm's VisionTransformer, or pipeline stages of one, with the same weights on every rank, after
            `check_model`, and before compiling, wrapping or making an optimizer. The meta device is allowed.
        mesh: with one dimension.
    """
    grid = grid_layout(tensor)
    if grid is None:
        residual: Sequence[Placement] = (Shard(TOKENS),) if tensor.sequence_parallel else ()
        num_heads = mesh.size()
    else:
        mesh = grid.make_mesh(mesh, tensor)
        residual = grid.residual
        num_heads = tensor.grid_sizes[-1]
    for model in models:
        blocks: list[Any] = list(model.blocks)  # type: ignore[arg-type]
        for block in blocks:
            if grid is None:
                _shard_along_one_dimension(block, mesh, sequence_parallel=tensor.sequence_parallel)
            else:
                grid.shard(block, mesh)
            block.attn.num_heads //= num_heads
            block.attn.attn_dim //= num_heads
        if blocks and residual:
            _shard_residual_stream(blocks[0], blocks[-1], mesh, residual, tensor)


def parameters_per_rank(model: nn.Module, tensor: TensorConfig) -> int:
    """Return the number of parameters of `model`, or of a stage, on each rank. This needs no process group."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if tensor.size == 1:
        return count
    grid = grid_layout(tensor)
    columns: tuple[Placement, ...] = (Shard(OUT),) if grid is None else grid.first.weight
    rows: tuple[Placement, ...] = (Shard(IN),) if grid is None else grid.second.weight

    def elsewhere(parameter: Any, placements: Sequence[Placement], dims: tuple[int, ...]) -> int:
        sizes = zip(tensor.grid_sizes, placements, strict=True)
        shards = math.prod(size for size, placement in sizes if any(map(placement.is_shard, dims)))
        return 0 if parameter is None else parameter.numel() - parameter.numel() // shards

    blocks: Any = model.get_submodule("blocks").children()
    for block in blocks:
        count -= elsewhere(block.attn.qkv.weight, columns, (OUT, IN))  # its bias is replicated
        for linear, placements in ((block.mlp.fc1, columns), (block.attn.proj, rows), (block.mlp.fc2, rows)):
            count -= elsewhere(linear.weight, placements, (OUT, IN)) + elsewhere(linear.bias, placements, (OUT,))
    return count


def check_model(model: nn.Module, tensor: TensorConfig) -> None:
    """Check that the layers of the complete `model` can be sharded, if there is more than one tensor-parallel rank.

    Raises:
        ConfigError: it cannot; the message names what does not fit.
    """
    if tensor.size == 1:
        return
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"parallel.tensor supports timm's VisionTransformer, but the model is a {type(model).__name__}: leave "
            "parallel.tensor out, or choose a model.name such as vit_base_patch16_224"
        )
    for number, block in enumerate(model.blocks):
        where = f"parallel.tensor has mode {tensor.mode}, and block {number} of the model"
        kinds = ((block, Block), (getattr(block, "attn", None), Attention), (getattr(block, "mlp", None), Mlp))
        for layer, kind in kinds:
            if type(layer) is not kind:
                raise ConfigError(
                    f"{where} has a {type(layer).__name__}, but only {kind.__name__} can be sharded: choose another "
                    "model.name, or leave parallel.tensor out"
                )
        _check_options(block, where)
        _check_sizes(block, where, tensor)
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    # torch's version is not a plain string: it compares numerically, so 2.9 is before 2.15.
    if tensor.sequence_parallel and tokens % tensor.size and torch.__version__ < "2.15":
        # Its gradients of gathered shards of unequal size are not contiguous (seen with 2.11).
        raise ConfigError(
            f"parallel.tensor.sequence_parallel is true, but {tensor.size} ranks do not divide the model's {tokens} "
            f"tokens, which torch {torch.__version__} does not support: install torch 2.15 or later, or set it to false"
        )


def _check_options(block: Any, where: str) -> None:
    attention = block.attn
    if attention.attn_drop.p > 0:
        raise ConfigError(
            f"{where} has attn_drop_rate {attention.attn_drop.p}: fused attention draws these masks itself, so they "
            "would differ from those of a single process; set model.kwargs.attn_drop_rate 0"
        )
    for norm, name in ((attention.norm, "scale_attn_norm"), (block.mlp.norm, "scale_mlp_norm")):
        if not isinstance(norm, nn.Identity):
            raise ConfigError(f"{where} has {name}, a norm over sharded features: leave it out of model.kwargs")
    if getattr(attention, "gate", None) is not None:
        raise ConfigError(f"{where} has gated attention, which cannot be sharded: choose another model.name")


def _check_sizes(block: Any, where: str, tensor: TensorConfig) -> None:
    heads = tensor.grid_sizes[-1]
    features = heads**2 if tensor.mode == "3d" else heads
    for what, size, shards in (
        ("attention heads", block.attn.num_heads, heads),
        ("features in its attention", block.attn.proj.in_features, features),
        ("features in its MLP", block.mlp.fc1.out_features, features),
        ("features", block.attn.qkv.in_features, 1 if tensor.mode == "1d" else features),
    ):
        if size % shards:
            raise ConfigError(
                f"{where} has {size} {what}, which {shards} does not divide: choose another parallel.tensor.size"
            )


def _shard_residual_stream(
    first: nn.Module, last: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement], tensor: TensorConfig
) -> None:
    """Make `first` take and `last` return the complete activations; the blocks keep their names.

    Between them, shards of images and features are plain tensors. Shards of tokens, which may differ in size, are
    DTensors.
    """
    num_images = 0

    def shard(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal num_images
        x, *others = inputs
        num_images = len(x)
        x = F.pad(x, (0, 0, 0, 0, 0, -num_images % tensor.image_shards))  # an evaluation batch may not be divisible
        replicated = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        sharded = replicated.redistribute(placements=placements)
        return (sharded if tensor.mode == "1d" else sharded.to_local(), *others)

    def complete(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if not isinstance(output, DTensor):
            output = DTensor.from_local(output, mesh, placements, run_check=False)
        whole: torch.Tensor = output.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        return whole[:num_images]

    first.register_forward_pre_hook(shard)
    last.register_forward_hook(complete)
