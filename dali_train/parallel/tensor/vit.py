"""Tensor parallelism of timm's VisionTransformer: its blocks are changed in place, everything around them stays as it
is.

Patch embedding, final norm and classifier are computed by all ranks alike. The first block takes the complete
activations and the last one gives them, so what lies before, after and between pipeline stages need not know.
"""

from typing import Any

import torch
from timm.layers import Attention, DropPath, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dali_train.config.parallel import TensorMode, batch_shards
from dali_train.errors import ConfigError
from dali_train.parallel.tensor.collectives import axes_of, enter, leave
from dali_train.parallel.tensor.layers import OnParts, ParallelDropout, ParallelDropPath, ParallelLinear
from dali_train.parallel.tensor.modes import FEATURES, IMAGES, Plan, make_plan


def tensor_parallel(model: nn.Module, grid: DeviceMesh, mode: TensorMode, *, sequence_parallel: bool = False) -> None:
    """Spread the blocks of `model` over the ranks of `grid`, in place.

    Every rank calls it with the same weights; it communicates nothing. Afterwards the linear layers of the blocks have
    DTensors for parameters, in the order of `TimmOrder`, and all other parameters are the plain tensors they were,
    equal on all ranks and with equal gradients. The masks of dropout are parts of those that one process draws.

    Args:
        model: timm's VisionTransformer, or a pipeline stage of one: `model.blocks` are the blocks of this process.
            Before it is compiled, wrapped or given an optimizer; the meta device is fine.
        grid: of `make_grid`.
        sequence_parallel: mode 1d only: split norms, dropout and residual additions by tokens.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    check_model(model, mode, tuple(grid.shape))
    plan = make_plan(mode, axes_of(grid), sequence_parallel=sequence_parallel)
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks:
        _change_block(block, plan, grid)
    if blocks and plan.stream:
        _enter_and_leave(blocks[0], blocks[-1], plan, batch_shards(mode, tuple(grid.shape)))


def check_model(model: nn.Module, mode: TensorMode, sizes: tuple[int, ...]) -> None:
    """
    Args:
        sizes: of the dimensions of the grid.

    Raises:
        ConfigError: `model` cannot be divided among such a mesh; the message names what does not fit.
    """
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"parallel.tensor divides timm's VisionTransformer, and the model is a {type(model).__name__}: leave "
            "parallel.tensor out, or choose a model.name such as vit_base_patch16_224"
        )
    heads = sizes[-1]
    features = heads**2 if mode == "3d" else heads
    for number, block in enumerate(model.blocks):
        where = f"parallel.tensor has mode {mode}, and block {number} of the model"
        kinds = ((block, Block), (getattr(block, "attn", None), Attention), (getattr(block, "mlp", None), Mlp))
        for found, kind in kinds:
            if type(found) is not kind:
                raise ConfigError(
                    f"{where} has a {type(found).__name__} where only {kind.__name__} can be divided: choose another "
                    "model.name, or leave parallel.tensor out"
                )
        _check_options(block, where)
        _check_sizes(block, where, heads, features, 1 if mode == "1d" else features)


def _check_options(block: Any, where: str) -> None:
    attention = block.attn
    if attention.attn_drop.p > 0:
        raise ConfigError(
            f"{where} has attn_drop_rate {attention.attn_drop.p}: fused attention draws these masks itself, and "
            "those of a part of the heads would be others; set model.kwargs.attn_drop_rate 0"
        )
    for part, name in ((attention.norm, "scale_attn_norm"), (block.mlp.norm, "scale_mlp_norm")):
        if not isinstance(part, nn.Identity):
            raise ConfigError(
                f"{where} has {name}, a norm over features that are divided: leave it out of model.kwargs"
            )
    if getattr(attention, "gate", None) is not None:
        raise ConfigError(f"{where} has gated attention, which is not divided: choose another model.name")


def _check_sizes(block: Any, where: str, heads: int, features: int, width: int) -> None:
    """The numbers of parts that heads, features within attention and MLP, and those of the residual stream are divided
    into."""
    for what, size, parts in (
        ("attention heads", block.attn.num_heads, heads),
        ("features within its attention", block.attn.proj.in_features, features),
        ("features within its MLP", block.mlp.fc1.out_features, features),
        ("features", block.attn.qkv.in_features, width),
    ):
        if size % parts:
            raise ConfigError(
                f"{where} has {size} {what}, which cannot be divided by {parts}: choose another parallel.tensor.size"
            )


def _change_block(block: Any, plan: Plan, mesh: DeviceMesh) -> None:
    attention, mlp = block.attn, block.mlp
    _replace(attention, "qkv", ParallelLinear(attention.qkv, plan.first, mesh, num_joined=3))
    _replace(attention, "proj", ParallelLinear(attention.proj, plan.second, mesh))
    _replace(mlp, "fc1", ParallelLinear(mlp.fc1, plan.first, mesh))
    _replace(mlp, "fc2", ParallelLinear(mlp.fc2, plan.second, mesh))
    attention.num_heads //= plan.heads
    attention.attn_dim //= plan.heads
    for name in ("q_norm", "k_norm"):
        _replace(attention, name, OnParts(getattr(attention, name), plan.axes))
    if plan.stream:
        features = tuple((0, axis) for dim, axis in plan.stream if dim == FEATURES)
        for name in ("norm1", "norm2"):
            norm = OnParts(getattr(block, name), plan.stream_copies, before=plan.norm_before, after=plan.norm_after)
            _replace(block, name, norm)
        for name in ("ls1", "ls2"):
            _replace(block, name, OnParts(getattr(block, name), plan.stream_copies, splits=features))
        for name in ("drop_path1", "drop_path2"):
            if isinstance(getattr(block, name), DropPath):
                _replace(block, name, ParallelDropPath(getattr(block, name), plan.stream, plan.sizes))
        for owner, name in ((attention, "proj_drop"), (mlp, "drop2")):
            _replace(owner, name, ParallelDropout(getattr(owner, name), plan.stream, plan.sizes))
    _replace(mlp, "drop1", ParallelDropout(mlp.drop1, plan.within, plan.sizes))


def _replace(owner: nn.Module, name: str, layer: nn.Module) -> None:
    """The hooks of what was there stay. What is not there in this model is not replaced."""
    old = getattr(owner, name)
    if isinstance(old, nn.Identity):
        return
    for store, hooks in vars(old).items():
        if store.startswith(("_forward_hooks", "_forward_pre_hooks")):
            setattr(layer, store, hooks)
    setattr(owner, name, layer)


def _enter_and_leave(first: nn.Module, last: nn.Module, plan: Plan, num_parts: int) -> None:
    """Hooks, so that the blocks keep their names."""

    def divide(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, *others = inputs
        if module.training and stream.shape[IMAGES] % num_parts:
            raise ConfigError(
                f"batch.micro_batch is {stream.shape[IMAGES]}, and parallel.tensor divides it into {num_parts} "
                f"parts: use a multiple of {num_parts}"
            )
        plan.sizes[:] = stream.shape
        return (enter(stream, plan.stream), *others)

    def join(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return leave(output, plan.stream, plan.sizes)

    first.register_forward_pre_hook(divide)
    last.register_forward_hook(join)
