"""How a vision transformer is split into stages, what plan says of them, and which pipelines are refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dali_train.cli import main
from dali_train.config import BatchConfig, Config, ModelConfig, ParallelConfig
from dali_train.errors import ConfigError
from dali_train.extras.cost.memory import Memory
from dali_train.extras.plan.forecast import RankPlan, describe_ranks
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import local
from dali_train.parallel.stages import (
    StageActivations,
    VitStage,
    bubble,
    check_micro_batches,
    in_flight,
    make_stages,
    merge_stages,
)
from dali_train.runtime.launch import Launch
from dali_train.training.build import build_trainer
from dali_train.training.model import build_model
from tests.config.test_config import config
from tests.conftest import REPOSITORY

META, CPU = torch.device("meta"), torch.device("cpu")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 5, "num_heads": 2}
INTERLEAVED = {"num_chunks": 2}


def small(freeze: tuple[str, ...] = (), **parallel: Any) -> Config:
    model = ModelConfig(name="vit_tiny_patch16_224", kwargs=SMALL, freeze=freeze)
    return config(model=model, parallel=ParallelConfig(**parallel))


def layout(ranks: int, rank: int = 0, **parallel: Any) -> Layout:
    return Layout.from_config(Launch(rank=rank, world_size=ranks, port=1), ParallelConfig(**parallel))


def planned(ranks: int, one: Config) -> list[RankPlan]:
    model = build_model(one, 10, META)
    size = sum(p.numel() for p in model.parameters())
    memory = Memory(
        num_parameters=size,
        weight_bytes=4 * size,
        gradient_bytes=4 * size,
        optimizer_bytes=8 * size,
        activation_bytes=1200,
        micro_batch=2,
    )
    return describe_ranks(model, one, layout(ranks, **vars(one.parallel)), memory)


def test_vit_base_in_two_stages() -> None:
    """Parameters counted by hand; with tensor parallelism half of the matrices and of the MLP's first bias remain."""
    model = ModelConfig(name="vit_base_patch16_224")
    ranks = planned(2, config(model=model, parallel=ParallelConfig(pipeline=2)))
    assert [rank.parameters for rank in ranks] == [(43_269_888,), (42_536_458,)]
    assert [rank.stages[0].describe() for rank in ranks] == ["patch embedding, blocks 0 to 5", "blocks 6 to 11, head"]
    # 1f1b: while the last stage has one micro-batch, the first one has two on their way, half of the blocks each.
    assert [rank.memory.activation_bytes for rank in ranks] == [1200, 600]
    halved = 6 * (12 * 768 * 768 + 4 * 768) // 2
    ranks = planned(4, config(model=model, parallel=ParallelConfig(pipeline=2, tensor={"size": 2})))
    assert [rank.parameters for rank in ranks] == [(43_269_888 - halved,), (42_536_458 - halved,)]
    activations = StageActivations.from_model(build_model(config(model=model), 10, META), config(model=model))
    assert activations.training == (197, 768) and activations.dtype == torch.float32


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"shard": "full"}),
        (8, {"pipeline": 2, "shard": "gradients", "shard_ranks": 2}),
        (8, {"pipeline": 2, "tensor": {"size": 2}, "shard": "optimizer"}),
        (8, {"pipeline": 2, "tensor": {"mode": "2d", "size": 4}}),
        (8, {"tensor": {"mode": "3d", "size": 8}}),
    ],
)
def test_a_rank_holds_what_plan_says(ranks: int, parallel: dict[str, Any]) -> None:
    """Weights and the optimizer's state of the first rank and the last; torch's fake process group stands in for the
    others."""
    vit = ModelConfig(name="vit_tiny_patch16_224", kwargs={"num_heads": 4, "depth": 4})
    one = config(model=vit, parallel=parallel, batch=BatchConfig(global_batch=64, micro_batch=8))
    plans = planned(ranks, one)
    for rank in (0, ranks - 1):
        place = layout(ranks, rank, **parallel)
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            trainer = build_trainer(one, place, 10, CPU, evaluates=False)
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            trainer.precision.step(trainer.optimizer, None, place)
        finally:
            dist.destroy_process_group()
        memory = plans[place.pipeline_rank].memory
        weights = sum(local(parameter).nbytes for parameter in trainer.model.parameters())
        kept = [value for values in trainer.optimizer.state.values() for value in values.values()]
        assert weights == pytest.approx(memory.weight_bytes, rel=0.05)
        assert sum(local(value).nbytes for value in kept) == pytest.approx(memory.optimizer_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("parallel", "blocks"),
    [({"pipeline": 2}, [[0, 1, 2], [3, 4]]), ({"pipeline": 2, **INTERLEAVED}, [[0, 1], [2], [3], [4]])],
)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"global_pool": "map"}),
        ("deit_tiny_distilled_patch16_224", {}),
    ],
)
def test_stages_have_the_models_names_and_compute_what_it_computes(
    parallel: dict[str, Any], blocks: list[list[int]], name: str, kwargs: dict[str, Any]
) -> None:
    one = config(model=ModelConfig(name=name, kwargs=SMALL | kwargs), parallel=ParallelConfig(**parallel))
    model = build_model(one, 5, CPU).eval()
    stages = make_stages(model, one.parallel)
    assert [list(stage.blocks) for stage in stages] == blocks
    modules = [VitStage(model, stage, torch.float32) for stage in stages]
    x = images = torch.randn(3, 3, 32, 32)
    for module in modules:
        x = module(x)
    assert torch.equal(x, model(images))
    names: list[str] = []
    for rank in range(2):
        names += merge_stages([modules[s.index] for s in stages[rank :: one.parallel.pipeline]]).state_dict()
    assert sorted(names) == sorted(model.state_dict())


def test_pipelines_that_cannot_be() -> None:
    model = build_model(small(), 5, META)
    with pytest.raises(ConfigError, match=r"pipeline 3 x .*num_chunks 2 = 6 stages.* 5 blocks"):
        make_stages(model, ParallelConfig(pipeline=3, **INTERLEAVED))
    with pytest.raises(ConfigError, match=r"parallel.pipeline is 2.*ResNet"):
        make_stages(build_model(config(model=ModelConfig(name="resnet18")), 5, META), ParallelConfig(pipeline=2))
    frozen = build_model(small(("patch_embed.*", "blocks.0.*", "*_*", "blocks.1.*")), 5, META)
    with pytest.raises(ConfigError, match=r"model.freeze .* stage 0 of 5 \(patch embedding, block 0\)"):
        VitStage(frozen, make_stages(frozen, ParallelConfig(pipeline=5))[0], torch.float32)


def test_micro_batches_that_do_not_fill_the_pipeline() -> None:
    plain, interleaved = ParallelConfig(pipeline=4), ParallelConfig(pipeline=4, **INTERLEAVED)
    with pytest.raises(ConfigError, match=r"parallel.pipeline is 4.* 3 micro-batches.*batch.global_batch"):
        check_micro_batches(plain, 3)
    with pytest.raises(ConfigError, match=r"parallel.num_chunks is 2.* 9 micro-batches .* 8"):
        check_micro_batches(interleaved, 9)
    check_micro_batches(interleaved, 10)
    assert bubble(plain, 9) == 0.25 and bubble(interleaved, 9) == 1 / 7
    assert [in_flight(plain, rank, 8) for rank in range(4)] == [4, 3, 2, 1]


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"ranks, 6, .*pipeline 2 x .*tensor.size 2 = 4 ranks"):
        layout(6, pipeline=2, tensor={"size": 2})
    with pytest.raises(ConfigError, match=r"shard_ranks 3 .* 4 data-parallel ranks \(8 ranks = pipeline 2 x data 4\)"):
        layout(8, pipeline=2, shard="full", shard_ranks=3)
    assert layout(8, pipeline=2, shard="full").describe() == (
        "8 ranks = pipeline 2 x data 4, state sharded over 4 data-parallel ranks"
    )


def test_plan_shows_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(REPOSITORY / "configs" / "vit-b16.py"), "--parallel.pipeline", "2"]
    words += ["--batch.micro_batch", "128"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ranks          2 ranks = pipeline 2 x data 1" in printed
    assert "stage 0      patch embedding, blocks 0 to 5: 43,269,888 parameters" in printed
    assert "between them (128, 197, 768) float32, 77.5 MB per micro-batch" in printed
    assert "bubble of 0.4%" in printed
    for more, message in (("--world_size", "3"), "pipeline 2"), (("--batch.global_batch", "128"), "1 micro-batch "):
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
