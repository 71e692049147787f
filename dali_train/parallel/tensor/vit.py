"""Tensor parallelism of timm's VisionTransformer: its blocks are sharded in place, everything else is unchanged.

All ranks compute patch embedding, final norm and classifier. The first block takes the complete activations and the
last one returns them, so the rest of the model, and pipeline stages, need not know of the sharding.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dali_train.config import TensorConfig
from dali_train.errors import ConfigError
from dali_train.parallel.tensor import grid, one_dimension
from dali_train.parallel.tensor.styles import IN, OUT, TOKENS


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
    if tensor.mode == "1d":
        residual: Sequence[Placement] = (Shard(TOKENS),) if tensor.sequence_parallel else ()
        num_heads = mesh.size()
    else:
        mesh, layout = grid.make_grid(mesh, tensor), grid.LAYOUTS[tensor.mode]
        residual, num_heads = layout.residual, tensor.grid_sizes[-1]
    for model in models:
        blocks: list[Any] = list(model.blocks)  # type: ignore[arg-type]
        for block in blocks:
            if tensor.mode == "1d":
                one_dimension.parallelize_block(block, mesh, sequence_parallel=tensor.sequence_parallel)
            else:
                grid.parallelize_block(block, mesh, layout)
            block.attn.num_heads //= num_heads
            block.attn.attn_dim //= num_heads
        if blocks and residual:
            _shard_residual_stream(blocks[0], blocks[-1], mesh, residual, tensor)


def parameters_per_rank(model: nn.Module, tensor: TensorConfig) -> int:
    """Return the number of parameters of `model`, or of a stage, on each rank. This needs no process group."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if tensor.size == 1:
        return count
    columns: tuple[Placement, ...] = (Shard(OUT),)
    rows: tuple[Placement, ...] = (Shard(IN),)
    if tensor.mode != "1d":
        columns, rows = grid.LAYOUTS[tensor.mode].first.weight, grid.LAYOUTS[tensor.mode].second.weight

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
    """Check that tensor parallelism can shard the complete `model`.

    Raises:
        ConfigError: it cannot; the message names what does not fit.
    """
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

    def gather(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if not isinstance(output, DTensor):
            output = DTensor.from_local(output, mesh, placements, run_check=False)
        complete: torch.Tensor = output.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        return complete[:num_images]

    first.register_forward_pre_hook(shard)
    last.register_forward_hook(gather)
