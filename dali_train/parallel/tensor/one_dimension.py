"""1D tensor parallelism: attention sharded by heads, the MLP by hidden units, and with sequence parallelism the rest by
tokens."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dali_train.parallel.tensor.styles import (
    OUT,
    TOKENS,
    LocalParallel,
    OneProcessMasks,
    fused_placements,
    fused_rows,
)

_HEADS = 1  # the dimension of queries (images, heads, tokens, features)


def parallelize_block(block: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
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
