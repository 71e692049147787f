"""Dropout masks belong to the micro-batch and the block, whichever process computes the block, and however often."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from dali_train.config import ModelConfig, load_config
from dali_train.data.sampling.rng import Purpose, torch_seed
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.training.build import build_trainer
from dali_train.training.invariant import block_seed, choose_seeding, seed_each_block
from dali_train.training.model import compile_blocks, repeated_blocks

CPU = torch.device("cpu")
FIRST, SECOND = (torch_seed(1, Purpose.DROPOUT, step=3, k=k) for k in (0, 1))  # of two micro-batches
DROPS = {"drop_rate": 0.2, "pos_drop_rate": 0.2, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.2}


@pytest.mark.parametrize(
    ("seed", "number", "expected"),
    [
        (0, 1, 0x85EBCA77),
        (1 << 32, 1, 0x124234428),
        (1 << 32, 2, 0x1AA0F0E9F),
        (0x0123_4567_89AB_CDEF, 12, 0x1234567375F28CB),
        (0x7FFF_FFFF_FFFF_FFFF, 1000, 0x7FFFFFFF02D76727),
    ],
)
def test_seeds_of_blocks_stay_what_they_are(seed: int, number: int, expected: int) -> None:
    """Or all runs would draw other masks, and a resumed one would go on with others than it began with."""
    assert block_seed(seed, number) == expected


def vit(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5, **kwargs
    ).train()


def forward(model: nn.Module, inputs: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    outputs: torch.Tensor = model(inputs)
    return outputs


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_draws_its_masks_wherever_it_is(aot_eager: None, compiled: bool) -> None:
    """A pipeline's later stage has not drawn what comes before its first block."""
    model = vit(**DROPS)
    if compiled:
        compile_blocks(repeated_blocks(model))
    seed_each_block(model, CPU)
    between: list[torch.Tensor] = []  # what the blocks and the norm give
    handles = [
        m.register_forward_hook(lambda m, args, output: between.append(output)) for m in (*model.blocks, model.norm)
    ]
    logits = forward(model, torch.randn(4, 3, 32, 32), FIRST)
    for handle in handles:
        handle.remove()

    torch.rand(7)
    assert torch.equal(forward(model.blocks[2], between[1], FIRST), between[2])
    assert not torch.equal(forward(model.blocks[2], between[1], SECOND), between[2])
    torch.manual_seed(FIRST)
    assert torch.equal(model.forward_head(between[3]), logits), (
        "the dropout before the classifier has a seed of its own"
    )


def test_stochastic_depth_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has a rate of its own, as a tensor, so one graph serves all but the first, which drops nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    model = vit(drop_path_rate=0.9)
    rates = [getattr(block.drop_path1, "drop_prob", 0) for block in model.blocks]
    model.double()
    compile_blocks(repeated_blocks(model))
    branch = torch.randn(1, 17, 32, dtype=torch.float64).expand(2000, -1, -1)
    for block, rate in zip(model.blocks, rates, strict=True):
        kept = block.drop_path1(branch)
        assert float((kept != 0).all(dim=(1, 2)).double().mean()) == pytest.approx(1 - rate, abs=0.05)
        assert float(kept.mean()) == pytest.approx(float(branch.mean()), abs=0.05)
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).sum().backward()
    assert counter.frame_count == 2
    plain = vit(drop_path_rate=0.9).double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(model.eval()(images), plain(images))


def test_seeds_of_blocks_differ_where_the_generator_looks() -> None:
    """torch's generator on CPUs uses the lower 32 bits of its seed."""
    seeds = [torch_seed(1, Purpose.DROPOUT, step=step, k=k) for step in range(20) for k in range(20)]
    of_blocks = [[block_seed(seed, number) for number in range(1, 26)] for seed in seeds]
    assert len({seed & 0xFFFFFFFF for row in of_blocks for seed in row}) == 20 * 20 * 25
    assert all(block_seed(block_seed(seed, 7), 3) == block_seed(seed, 3) for seed in seeds)


def test_recomputing_draws_the_masks_of_its_own_micro_batch() -> None:
    """In a pipeline the next micro-batch's forward pass comes before this one's backward pass."""
    images = torch.randn(2, 4, 3, 32, 32)
    found = []
    for checkpointing in (False, True):
        model = vit(**DROPS)
        model.set_grad_checkpointing(checkpointing)
        seed_each_block(model, CPU)
        losses = [forward(model, images[i], seed).square().sum() for i, seed in enumerate((FIRST, SECOND))]
        for loss in losses:
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_that_drops_nothing_is_left_alone() -> None:
    for rates, hooked in (({}, 0), ({"proj_drop_rate": 0.1}, 3), ({"drop_rate": 0.1}, 4)):
        model = vit(**rates)
        seed_each_block(model, CPU)
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooked
    model.eval()
    state = torch.get_rng_state()
    model(torch.randn(1, 3, 32, 32, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state), "evaluation seeds nothing"


@pytest.mark.parametrize("name", ["efficientnet_b0", "crossvit_tiny_240"])
def test_models_of_other_kinds(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, drop_path_rate=0.3, drop_rate=0.3).train()
    seed_each_block(model, CPU)
    images = torch.randn(3, 3, 240, 240)
    with torch.no_grad():
        first = forward(model, images, FIRST)
        torch.rand(3)
        assert torch.equal(forward(model, images, FIRST), first)
        assert not torch.equal(forward(model, images, SECOND), first)


def test_a_run_seeds_as_it_began() -> None:
    """The masks of a run in progress do not change with model.compile."""
    plain = ModelConfig(name="vit")
    assert [choose_seeding(plain, saved) for saved in (None, "block", "micro-batch")] == [
        "block",
        "block",
        "micro-batch",
    ]
    for whole in (ModelConfig(name="vit", compile="model"), ModelConfig(name="vit", compile="cuda-graphs")):
        assert [choose_seeding(whole, saved) for saved in (None, "block")] == ["micro-batch"] * 2


def test_a_pipeline_cannot_seed_per_micro_batch(tiny_config: Path) -> None:
    config = load_config(tiny_config).replace({"parallel.pipeline": 2})
    with pytest.raises(ConfigError, match=r"model.compile model or cuda-graphs.*: set parallel.pipeline 1,"):
        build_trainer(config, Layout(rank=0, pipeline=2), 5, CPU, resumes=True, saved_seeding="micro-batch")
