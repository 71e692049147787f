"""Tensor parallelism: what several ranks compute together is what one process computes, with dropout and recomputation
on."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dali_train.config import OptimizerConfig
from dali_train.data.sampling.rng import Purpose, torch_seed
from dali_train.errors import ConfigError
from dali_train.parallel.tensor import TensorMode, TimmOrder, batch_shards, check_model, make_grid, tensor_parallel
from dali_train.training.dropout import seed_each_block
from dali_train.training.half import compute_in
from dali_train.training.optim import make_optimizer

from .helpers import in_ranks
from .ranks import free_port

CPU = torch.device("cpu")
SEEDS = [torch_seed(1, Purpose.DROPOUT, step=0, k=k) for k in range(2)]
# (mode, ranks, depth, whether tokens are split)
FOUR: list[tuple[TensorMode, int | None, bool]] = [("1d", None, False), ("1d", None, True), ("2d", None, False)]
EIGHT: list[tuple[TensorMode, int | None, bool]] = [("2.5d", 2, False), ("3d", None, False)]


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
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


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


def train(model: nn.Module, steps: int) -> tuple[Any, list[float]]:
    """LAMB's state and the losses."""
    config = OptimizerConfig(name="lamb", lr=2e-3, weight_decay=0.1, bias_correction=False)
    optimizer, history = make_optimizer(model, config), []
    for step in range(steps):
        micro_batches = losses(model, step)
        for loss in micro_batches:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(sum(loss.item() for loss in micro_batches))
    return optimizer.state, history


def compare(mode: TensorMode, grid: DeviceMesh, *, sequence_parallel: bool) -> dict[str, Any]:
    """The largest differences to one process: logits of an evaluation, gradients, LAMB's weights and moments after
    three steps."""
    single, shared = vit(), vit()
    for model in (single, shared):
        seed_each_block(model, CPU)
    tensor_parallel(shared, grid, mode, sequence_parallel=sequence_parallel)
    shared.set_grad_checkpointing(True)
    order, found = TimmOrder(shared), {}
    pairs = list(zip(shared.named_parameters(), single.named_parameters(), strict=True))
    assert all(ours == theirs for (ours, _), (theirs, _) in pairs), "the names are timm's"
    for (name, ours), (_, theirs) in pairs:
        assert torch.equal(order.to_timm(name, whole(ours)), theirs)
        if isinstance(ours, DTensor):
            regrouped = order.from_timm(name, theirs.detach())
            placed = distribute_tensor(regrouped, ours.device_mesh, ours.placements, src_data_rank=None)
            assert torch.equal(placed.to_local(), ours.to_local()), "what a checkpoint gives back"

    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        found["evaluation"] = difference(shared.eval()(images), single.eval()(images))
    for model in (single.train(), shared.train()):
        torch.stack(losses(model, 0)).sum().backward()
    largest = max(parameter.grad.abs().max().item() for parameter in single.parameters())
    found["gradients"] = max(
        (order.to_timm(name, whole(ours.grad)) - theirs.grad).abs().max().item() / largest
        for (name, ours), (_, theirs) in pairs
    )
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in shared.blocks.parameters()]
    found["weights held"] = sum(part.numel() for part in parts) / sum(p.numel() for p in single.blocks.parameters())
    for model in (single, shared):
        model.zero_grad()
    (ours_state, ours_losses), (their_state, their_losses) = train(shared, 3), train(single, 3)
    found["losses"] = max(abs(a - b) / b for a, b in zip(ours_losses, their_losses, strict=True))
    found["weights"] = max(difference(order.to_timm(name, whole(ours)), theirs) for (name, ours), (_, theirs) in pairs)
    found["moments"] = 0.0
    for key in (
        "exp_avg",
        "exp_avg_sq",
    ):  # relative to the largest of all: those of keys' biases are rounding and nothing else
        largest = max(their_state[theirs][key].abs().max().item() for _, (_, theirs) in pairs)
        for (name, ours), (_, theirs) in pairs:
            moments = order.to_timm(name, whole(ours_state[ours][key])), their_state[theirs][key]
            found["moments"] = max(found["moments"], (moments[0] - moments[1]).abs().max().item() / largest)
    if batch_shards(mode, tuple(grid.shape)) > 1:
        with pytest.raises(ConfigError) as error:
            shared(images)
        found["error"] = str(error.value)
    # In half precision: under autocast, and without it.
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found["bf16"] = difference(
            shared.float().eval()(images.float()).float(), single.float().eval()(images.float()).float()
        )
    pure = vit().float()
    compute_in(pure, torch.bfloat16)
    tensor_parallel(pure, grid, mode, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        found["pure bf16"] = difference(pure.eval()(images.float()), vit().float().eval()(images.float()))
    return found


def run_rank(rank: int, ranks: int, port: int, cases: list[tuple[TensorMode, int | None, bool]], path: Path) -> None:
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
    results = {}
    for mode, depth, split in cases:
        results[f"{mode}{' by tokens' * split}"] = compare(mode, make_grid(mesh, mode, depth), sequence_parallel=split)
    if rank == 0:
        path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for ranks, cases in ((4, FOUR), (8, EIGHT)):
        path, port = tmp_path_factory.mktemp("ranks") / f"{ranks}.json", free_port()
        in_ranks(ranks, run_rank, ranks, port, cases, path)
        results |= json.loads(path.read_text())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1d", "1d by tokens", "2d", "2.5d", "3d"])
def test_ranks_compute_what_one_process_computes(measured: dict[str, dict[str, Any]], case: str) -> None:
    """In float64, where the rounding of sums in another order is all that may differ."""
    found = measured[case]
    assert found["evaluation"] < 1e-13 and found["gradients"] < 1e-14
    assert found["losses"] < 1e-13 and found["weights"] < 1e-11 and found["moments"] < 1e-13
    assert found["bf16"] < 0.03 and found["pure bf16"] < 0.05


@pytest.mark.slow
def test_weights_are_divided(measured: dict[str, dict[str, Any]]) -> None:
    """But for vectors, which every rank has."""
    held = {case: found["weights held"] for case, found in measured.items()}
    parts = {"1d": 4, "1d by tokens": 4, "2d": 4, "2.5d": 4, "3d": 8}
    assert held == pytest.approx({case: 1 / number for case, number in parts.items()}, rel=0.2)


@pytest.mark.slow
def test_a_micro_batch_that_does_not_divide(measured: dict[str, dict[str, Any]]) -> None:
    errors = {case: found["error"] for case, found in measured.items() if "error" in found}
    assert errors == {
        case: f"batch.micro_batch is 3, and parallel.tensor divides it into {parts} parts: use a multiple of {parts}"
        for case, parts in (("2d", 2), ("2.5d", 4), ("3d", 4))
    }


@contextmanager
def fake_ranks(number: int) -> Iterator[DeviceMesh]:
    """A process group that communicates nothing, seen from rank 0."""
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (number,), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


def test_parameters_of_vit_base_on_two_stages_of_two_ranks() -> None:
    """Counted by hand."""
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", num_classes=10)
    ends = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(("blocks", "norm", "head")))
    head = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("norm", "head")))
    with fake_ranks(2) as mesh:
        tensor_parallel(model, make_grid(mesh, "1d"), "1d")
        blocks = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.blocks[:6].parameters())
    assert (ends + blocks, blocks + head) == (22_020_096, 21_286_666)


class OtherBlock(timm.models.vision_transformer.Block):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("make", "mode", "sizes", "message"),
    [
        (
            lambda: timm.create_model("resnet18"),
            "1d",
            (2,),
            r"divides timm's VisionTransformer, and the model is a ResNet: leave par",
        ),
        (
            lambda: vit(num_heads=2),
            "1d",
            (4,),
            r"mode 1d, and block 0 of the model has 2 attention heads, which cannot be divided by",
        ),
        (
            lambda: vit(mlp_ratio=0.53125),
            "2d",
            (2, 2),
            r"17 features within its MLP, which cannot be divided by 2: choose another p",
        ),
        (
            lambda: vit(attn_drop_rate=0.1),
            "1d",
            (2,),
            r"attn_drop_rate 0.1: fused attention draws .* model.kwargs.attn_drop_rate 0",
        ),
        (
            lambda: vit(scale_attn_norm=True),
            "1d",
            (2,),
            r"has scale_attn_norm, a norm over features that are divided: leave it out",
        ),
        (lambda: vit(scale_mlp_norm=True), "1d", (2,), r"has scale_mlp_norm"),
        (
            lambda: vit(block_fn=OtherBlock),
            "1d",
            (2,),
            r"block 0 of the model has a OtherBlock where only Block can be divided",
        ),
    ],
)
def test_models_that_cannot_be_divided(
    make: Callable[[], nn.Module], mode: TensorMode, sizes: tuple[int, ...], message: str
) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(ConfigError, match=message):
        check_model(model, mode, sizes)


def test_only_1d_splits_tokens() -> None:
    with (
        fake_ranks(4) as mesh,
        pytest.raises(ConfigError, match=r"sequence_parallel with mode 2d: only mode 1d takes it"),
    ):
        tensor_parallel(vit(), make_grid(mesh, "2d"), "2d", sequence_parallel=True)
