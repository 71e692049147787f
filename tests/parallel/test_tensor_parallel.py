"""Tensor parallelism: several ranks compute together what one process computes, with dropout and recomputation on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dali_train.config import OptimizerConfig, TensorConfig
from dali_train.data.sampling.rng import Purpose, torch_seed
from dali_train.errors import ConfigError
from dali_train.parallel.mesh import Shardwise, in_blocks, laid_out_like, local, reduce_partial_gradients
from dali_train.parallel.tensor import check_model, parameters_per_rank, tensor_parallel
from dali_train.training.invariant import seed_each_block
from dali_train.training.optim import make_optimizer
from dali_train.training.precision import compute_in
from tests.helpers import in_ranks

CPU = torch.device("cpu")
SEEDS = [torch_seed(1, Purpose.DROPOUT, step=0, k=k) for k in range(2)]
CASES = {
    "1d": TensorConfig(size=4),
    "1d by tokens": TensorConfig(size=4, sequence_parallel=True),
    "2d": TensorConfig(mode="2d", size=4),
    "2.5d": TensorConfig(mode="2.5d", size=8, depth=2),
    "3d": TensorConfig(mode="3d", size=8),
}


def vit(**kwargs: Any) -> Any:
    """A small ViT with everything that the modes treat differently; 17 tokens, which do not divide. Weights are all
    random."""
    torch.manual_seed(0)
    rates = {"drop_rate": 0.1, "pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "drop_path_rate": 0.3}
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    model = timm.create_model(
        "vit_tiny_patch16_224", **{**sizes, **rates, "init_values": 0.5, "qk_norm": True, **kwargs}
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, device=parameter.device))
    return model.double().train()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        blocks = in_blocks(tensor)  # torch 2.11 cannot gather strided shards
    return blocks.full_tensor() if isinstance(blocks, DTensor) else blocks


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def losses(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Of the forward passes of two micro-batches, one after the other, as a pipeline has them."""
    images = torch.randn(2, 8, 3, 32, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    found = []
    for k in range(2):
        torch.manual_seed(SEEDS[k] + (step << 32))
        found.append(F.cross_entropy(model(images[k]), torch.arange(8) % 5))
    return found


def train(model: nn.Module, steps: int) -> tuple[Any, list[torch.Tensor], list[float]]:
    """LAMB's state, the gradients of the first step, and the losses."""
    config = OptimizerConfig(name="lamb", lr=2e-3, weight_decay=0.1, kwargs={"bias_correction": False})
    optimizer, gradients, history = make_optimizer(model, config), [], []
    for step in range(steps):
        micro_batches = losses(model, step)
        for loss in micro_batches:
            loss.backward()
        reduce_partial_gradients(model.parameters())
        gradients = gradients or [whole(parameter.grad) for parameter in model.parameters()]
        with Shardwise():
            optimizer.step()
        optimizer.zero_grad()
        history.append(sum(loss.item() for loss in micro_batches))
    return optimizer.state, gradients, history


def compare(mesh: DeviceMesh, tensor: TensorConfig) -> dict[str, float]:
    """The largest differences to one process: logits of an evaluation, gradients, LAMB's weights and moments after
    two steps."""
    single, shared = vit(), vit()
    for model in (single, shared):
        seed_each_block(model, CPU)
    tensor_parallel([shared], mesh, tensor)
    shared.set_grad_checkpointing(True)
    found = {}
    pairs = list(zip(shared.named_parameters(), single.named_parameters(), strict=True))
    assert all(ours == theirs for (ours, _), (theirs, _) in pairs), "the names are timm's"
    for (_, ours), (_, theirs) in pairs:
        assert torch.equal(whole(ours), theirs)
        assert torch.equal(local(laid_out_like(ours, theirs.detach())), local(ours)), "what a checkpoint gives back"
        with Shardwise():
            saved = in_blocks(ours.data)
        assert torch.equal(whole(saved), theirs) and ours.requires_grad
        assert not isinstance(saved, DTensor) or all(type(p) in (Shard, Replicate) for p in saved.placements)

    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():  # three images do not divide
        found["evaluation"] = difference(shared.eval()(images), single.eval()(images))
    held = sum(local(parameter).numel() for parameter in shared.blocks.parameters())
    found["weights held"] = held / sum(parameter.numel() for parameter in single.blocks.parameters())
    found["weights planned"] = parameters_per_rank(single, tensor) - sum(local(p).numel() for p in shared.parameters())
    ours_state, our_gradients, ours_losses = train(shared.train(), 2)
    their_state, their_gradients, their_losses = train(single.train(), 2)
    largest = max(gradient.abs().max().item() for gradient in their_gradients)
    gradients = zip(our_gradients, their_gradients, strict=True)
    found["gradients"] = max((ours - theirs).abs().max().item() / largest for ours, theirs in gradients)
    found["losses"] = max(abs(a - b) / b for a, b in zip(ours_losses, their_losses, strict=True))
    found["weights"] = max(difference(whole(ours), theirs) for (_, ours), (_, theirs) in pairs)
    found["moments"] = 0.0
    # Relative to the largest of all: those of keys' biases are rounding and nothing else.
    for key in ("exp_avg", "exp_avg_sq"):
        largest = max(their_state[theirs][key].abs().max().item() for _, (_, theirs) in pairs)
        for (_, ours), (_, theirs) in pairs:
            moments = whole(ours_state[ours][key]) - their_state[theirs][key]
            found["moments"] = max(found["moments"], moments.abs().max().item() / largest)
    # In half precision: under autocast, but for grids of three dimensions, for which DTensor searches for seconds how
    # to shard an operation, anew for each type of number; and without it.
    with torch.no_grad():
        with Shardwise():
            shared.float()
        if mesh.size() == 4:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = (model.float().eval()(images.float()).float() for model in (shared, single))
                found["bf16"] = difference(*outputs)
        compute_in(shared, torch.bfloat16)
        found["pure bf16"] = difference(shared.eval()(images).double(), single.double().eval()(images))
    return found


def run_rank(rank: int, ranks: int, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
    results = {name: compare(mesh, tensor) for name, tensor in CASES.items() if tensor.size == ranks}
    if rank == 0:
        path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for ranks in (4, 8):
        path = tmp_path_factory.mktemp("ranks") / f"{ranks}.json"
        in_ranks(ranks, run_rank, ranks, path)
        results |= json.loads(path.read_text())
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(measured: dict[str, dict[str, float]], case: str) -> None:
    """In float64, where the rounding of sums in another order is all that may differ."""
    found = measured[case]
    assert found["evaluation"] < 1e-13 and found["gradients"] < 1e-14
    assert found["losses"] < 1e-13 and found["weights"] < 1e-11 and found["moments"] < 1e-13
    assert found["pure bf16"] < 0.05 and (CASES[case].size == 8 or found["bf16"] < 0.03)
    # But for vectors, the weights are sharded; and `plan` counts them as they are.
    sharded_by = 8 if case == "3d" else 4
    assert found["weights held"] == pytest.approx(1 / sharded_by, rel=0.25) and found["weights planned"] == 0


class OtherBlock(timm.models.vision_transformer.Block):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("make", "tensor", "message"),
    [
        (lambda: timm.create_model("resnet18"), TensorConfig(size=2), "parallel.tensor .*ResNet"),
        (lambda: vit(num_heads=2), TensorConfig(size=4), "mode 1d, and block 0 .* 2 attention heads.* 4 .*tensor.size"),
        (lambda: vit(mlp_ratio=0.53125), TensorConfig(mode="2d", size=4), "17 features in its MLP.* 2 .*tensor.size"),
        (lambda: vit(attn_drop_rate=0.1), TensorConfig(size=2), "attn_drop_rate 0.1.*model.kwargs.attn_drop_rate 0"),
        (lambda: vit(scale_attn_norm=True), TensorConfig(size=2), "scale_attn_norm.*model.kwargs"),
        (lambda: vit(scale_mlp_norm=True), TensorConfig(size=2), "scale_mlp_norm.*model.kwargs"),
        (lambda: vit(block_fn=OtherBlock), TensorConfig(size=2), "block 0 of the model has a OtherBlock.*Block"),
    ],
)
def test_models_that_cannot_be_sharded(make: Callable[[], nn.Module], tensor: TensorConfig, message: str) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(ConfigError, match=message):
        check_model(model, tensor)


def test_tokens_that_ranks_do_not_divide_need_torch_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.14.1"))
    with pytest.raises(ConfigError, match=r"sequence_parallel.* 4 ranks .* 17 tokens.*torch 2\.15"):
        check_model(vit(), TensorConfig(size=4, sequence_parallel=True))
    check_model(vit(class_token=False, global_pool="avg"), TensorConfig(size=4, sequence_parallel=True))
