"""How a vision transformer is cut into stages, what plan says of them, and which pipelines are refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dali_train.cli import main
from dali_train.commands.plan import RankPlan, describe_ranks
from dali_train.config import BatchConfig, Config, ModelConfig, ParallelConfig
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import local
from dali_train.parallel.parallelize import parallelize
from dali_train.parallel.stages import (
    Stream,
    bubble,
    check_micro_batches,
    cut,
    in_flight,
    joined,
    make_stages,
    stages_of_rank,
)
from dali_train.runtime.launch import Launch
from dali_train.training.memory import Memory
from dali_train.training.model import build_model, repeated_blocks

from .conftest import REPOSITORY
from .test_config import config

META = torch.device("meta")
SMALL = ModelConfig(
    name="vit_tiny_patch16_224", kwargs={"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 5, "num_heads": 2}
)


def layout(ranks: int, **parallel: Any) -> Layout:
    launch = Launch(
        rank=0, world_size=ranks, local_rank=0, local_world_size=ranks, host="localhost", port=1, launcher="torchrun"
    )
    return Layout.for_config(launch, ParallelConfig(**parallel))


def base(**parallel: Any) -> Config:
    return config(model=ModelConfig(name="vit_base_patch16_224"), parallel=ParallelConfig(**parallel))


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
    ranks = planned(2, base(pipeline=2))
    assert [rank.parameters for rank in ranks] == [(43_269_888,), (42_536_458,)]
    assert [rank.stages[0].describe() for rank in ranks] == ["patch embedding, blocks 0 to 5", "blocks 6 to 11, head"]
    # 1f1b: while the last stage has one micro-batch, the first one has two on their way, half of the blocks each.
    assert [rank.memory.activation_bytes for rank in ranks] == [1200, 600]
    assert [rank.parameters for rank in planned(4, base(pipeline=2, tensor={"size": 2}))] == [
        (22_020_096,),
        (21_286_666,),
    ]
    sharded = planned(8, base(pipeline=2, shard="full"))[0].memory
    assert sharded.weight_bytes == 4 * 43_269_888 / 4 and sharded.optimizer_bytes == 2 * sharded.weight_bytes


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"shard": "full"}),
        (8, {"pipeline": 2, "shard": "gradients", "shard_ranks": 2}),
        (4, {"pipeline": 2, "tensor": {"size": 2}}),
        (8, {"pipeline": 2, "tensor": {"size": 2}, "shard": "optimizer"}),
        (8, {"pipeline": 2, "tensor": {"mode": "2d", "size": 4}}),
        (8, {"tensor": {"mode": "3d", "size": 8}}),
    ],
)
def test_a_rank_has_the_weights_that_plan_says(ranks: int, parallel: dict[str, Any]) -> None:
    """torch's fake process group stands in for the other ranks: nothing is computed here."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("cpu")
    vit = ModelConfig(name="vit_tiny_patch16_224", kwargs={"num_heads": 4, "depth": 4})
    one = config(model=vit, parallel=parallel, batch=BatchConfig(global_batch=64, micro_batch=8))
    model, place = build_model(one, 10, device), layout(ranks, **parallel)
    expected = planned(ranks, one)[0].memory.weight_bytes
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        stream = Stream.of(model, one) if place.pipeline > 1 else None
        divided = parallelize(model, place, one.parallel, device, repeated_blocks(model), stream).model
        held = sum(local(parameter).numel() * 4 for parameter in divided.parameters())
    finally:
        dist.destroy_process_group()
    assert held == pytest.approx(expected, rel=0.05)


def test_the_stream_between_stages() -> None:
    one = config(model=ModelConfig(name="vit_base_patch16_224"))
    stream = Stream.of(build_model(one, 10, META), one)
    assert (128, *stream.training) == (128, 197, 768) and stream.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ({"pipeline": 2}, [[0, 1, 2], [3, 4]]),
        ({"pipeline": 2, "blocks_per_stage": (1, 4)}, [[0], [1, 2, 3, 4]]),
        ({"pipeline": 2, "schedule": "interleaved", "num_chunks": 2}, [[0, 1], [2], [3], [4]]),
    ],
)
def test_stages_have_the_models_names_and_compute_what_it_computes(
    values: dict[str, Any], blocks: list[list[int]]
) -> None:
    one = config(model=SMALL, parallel=ParallelConfig(**values))
    model = build_model(one, 5, torch.device("cpu")).eval()
    stages = make_stages(model, one.parallel)
    assert [list(stage.blocks) for stage in stages] == blocks
    parts = [cut(model, stage, torch.float32) for stage in stages]
    x = images = torch.randn(3, 3, 32, 32)
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(images))
    names: list[str] = []
    for rank in range(2):
        whole = joined([parts[stage.index] for stage in stages_of_rank(stages, rank, one.parallel)])
        names += whole.state_dict()
    assert sorted(names) == sorted(model.state_dict())


def test_pipelines_that_cannot_be() -> None:
    model = build_model(config(model=SMALL), 5, META)
    with pytest.raises(
        ConfigError, match=r"pipeline 3 x parallel.num_chunks 2 = 6 stages, but the model has 5 blocks: use at most 5"
    ):
        make_stages(model, ParallelConfig(pipeline=3, num_chunks=2, schedule="interleaved"))
    with pytest.raises(
        ConfigError, match=r"blocks_per_stage \(2, 2\) are 4 blocks, but the model has 5: let them add up to 5"
    ):
        make_stages(model, ParallelConfig(pipeline=2, blocks_per_stage=(2, 2)))
    resnet = build_model(config(model=ModelConfig(name="resnet18")), 5, META)
    with pytest.raises(
        ConfigError, match=r"pipeline is 2, but the model is timm's ResNet, which cannot be cut between blocks here"
    ):
        make_stages(resnet, ParallelConfig(pipeline=2))
    frozen = build_model(
        config(model=ModelConfig(**vars(SMALL) | {"freeze": ("patch_embed.*", "blocks.0.*", "*_*", "blocks.1.*")})),
        5,
        META,
    )
    with pytest.raises(
        ConfigError, match=r"model.freeze leaves nothing to train in stage 0 of 5 \(patch embedding, block 0\)"
    ):
        cut(frozen, make_stages(frozen, ParallelConfig(pipeline=5))[0], torch.float32)


def test_micro_batches_that_do_not_fill_the_pipeline() -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline is 4, but a step has 3 micro-batches per data-parallel rank, fewer than the"
    ):
        check_micro_batches(ParallelConfig(pipeline=4), 3)
    interleaved = ParallelConfig(pipeline=4, schedule="interleaved", num_chunks=2)
    with pytest.raises(
        ConfigError, match=r"the 9 micro-batches of a step .* do not divide into 2 rounds .* such as 8, or"
    ):
        check_micro_batches(interleaved, 9)
    check_micro_batches(interleaved, 10)
    assert bubble(ParallelConfig(pipeline=4), 9) == 0.25 and bubble(interleaved, 9) == 1 / 7
    assert [in_flight(ParallelConfig(pipeline=4), rank, 8) for rank in range(4)] == [4, 3, 2, 1]


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"6 ranks cannot be divided into pipeline 2 x shard 1 x tensor 2 = 4 ranks per copy"
    ):
        layout(6, pipeline=2, tensor={"size": 2})
    with pytest.raises(
        ConfigError, match=r"shard_ranks 3 does not divide the 4 data-parallel ranks \(8 ranks = pipeline 2 x data 4\)"
    ):
        layout(8, pipeline=2, shard="full", shard_ranks=3)
    assert layout(8, pipeline=2, shard="full").describe() == (
        "8 ranks = pipeline 2 x data 4, state divided among 4 data-parallel ranks"
    )


def test_plan_shows_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--config",
        str(REPOSITORY / "configs" / "vit-b16.py"),
        "--parallel.pipeline",
        "2",
        "--batch.micro_batch",
        "128",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ranks          2 ranks = pipeline 2 x data 1" in printed
    assert "stage 0      patch embedding, blocks 0 to 5: 43,269,888 parameters" in printed
    assert "between them (128, 197, 768) float32, 77.5 MB per micro-batch" in printed
    assert "ranks wait for each other during 0.4% of a step at least" in printed
    assert main([*words, "--world_size", "3"]) == 2
    assert "3 ranks cannot be divided into pipeline 2" in capsys.readouterr().err
    assert main([*words, "--batch.global_batch", "128"]) == 2
    assert "parallel.pipeline is 2, but a step has 1 micro-batch per" in capsys.readouterr().err
