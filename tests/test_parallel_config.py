"""How parallelism is written in a config and on the command line, and which combinations are refused."""

from pathlib import Path
from typing import Any

import pytest

from dali_train.checkpoint.recipe import recipe_settings
from dali_train.config import (
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TensorConfig,
    load_config,
)
from dali_train.config.override import config_with
from dali_train.errors import ConfigError

from .test_config import FILE, config


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_it_can_be_written_in_every_way(tmp_path: Path) -> None:
    expected = ParallelConfig(pipeline=2, tensor=TensorConfig(mode="1d", size=2))
    spelling = "parallel = dict(pipeline=2, tensor=dict(mode='1d', size=2))"
    plain = write(tmp_path / "plain.py", FILE)
    beside = write(tmp_path / "beside.py", FILE + spelling)
    within = write(tmp_path / "within.py", FILE.replace("run=RunConfig", f"{spelling},\n    run=RunConfig"))
    words = ["--parallel.pipeline", "2", "--parallel.tensor.size", "2"]
    assert (
        load_config(beside).parallel
        == load_config(within).parallel
        == config_with(plain, words, "train").parallel
        == expected
    )
    saved = write(tmp_path / "config.json", load_config(beside).to_json())
    assert load_config(saved).parallel == expected
    words = ["--parallel.tensor.mode", "2.5d", "--parallel.tensor.size", "8", "--parallel.tensor.depth", "2"]
    words += [
        "--parallel.pipeline",
        "2",
        "--parallel.blocks_per_stage",
        "5",
        "7",
        "--parallel.timeout_s",
        "60",
        "--batch.micro_batch",
        "8",
    ]
    everything = config_with(beside, words, "train").parallel
    assert everything.tensor == TensorConfig(mode="2.5d", size=8, depth=2)
    assert (everything.pipeline, everything.blocks_per_stage, everything.timeout_s) == (2, (5, 7), 60)


def test_a_resume_may_change_it() -> None:
    assert not [name for name in recipe_settings(config()) if name.startswith("parallel")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pipeline": 0}, "parallel.pipeline is 0: use at least 1"),
        ({"shard": "zero"}, "parallel.shard is 'zero': use none, optimizer, gradients or full"),
        ({"tensor": {"size": 0}}, "parallel.tensor.size is 0: use at least 1"),
        ({"tensor": {"sise": 2}}, "parallel.tensor.sise is not a setting: use parallel.tensor.size"),
        (
            {"tensor": {"mode": "2d", "size": 6}},
            "parallel.tensor.size is 6 with mode 2d, which needs q x q ranks: use 4 or 9",
        ),
        ({"tensor": {"mode": "3d", "size": 9}}, "size is 9 with mode 3d, which needs q x q x q ranks: use 8 or 27"),
        (
            {"tensor": {"mode": "2.5d", "size": 8}},
            "size is 8 with mode 2.5d, which needs a depth: set parallel.tensor.depth",
        ),
        (
            {"tensor": {"mode": "2.5d", "size": 6, "depth": 2}},
            "size is 6 with mode 2.5d and depth 2, which needs depth x q x q ranks: use 2 or 8",
        ),
        (
            {"tensor": {"size": 4, "depth": 2}},
            "parallel.tensor.depth is 2 with mode 1d: only mode 2.5d has a depth, leave it out",
        ),
        (
            {"schedule": "interleaved", "num_chunks": 2},
            "parallel.schedule is interleaved with parallel.pipeline 1: set parallel.pipeline to the number of ranks",
        ),
        (
            {"schedule": "interleaved", "pipeline": 2},
            "parallel.num_chunks is 1 with parallel.schedule interleaved: set it to at least 2",
        ),
        (
            {"pipeline": 2, "num_chunks": 2},
            "parallel.num_chunks is 2 with parallel.schedule 1f1b: set parallel.schedule interleaved, or leave it out",
        ),
        (
            {"pipeline": 2, "blocks_per_stage": (4, 4, 4)},
            r"blocks_per_stage has 3 numbers for parallel.pipeline 2 x parallel.num_chunks 1 = 2 stages: "
            "give one for each stage",
        ),
        ({"blocks_per_stage": (12,)}, r"parallel.blocks_per_stage is \(12,\) with parallel.pipeline 1: leave it out"),
        (
            {"tensor": {"mode": "2d", "size": 4, "sequence_parallel": True}},
            "parallel.tensor.sequence_parallel is true with mode 2d: only mode 1d takes it, the others divide the "
            "images",
        ),
        (
            {"tensor": {"mode": "2d", "size": 4}, "shard": "full"},
            "parallel.shard is full with parallel.tensor.mode 2d: only mode 1d can be sharded as well",
        ),
        (
            {"tensor": {"mode": "3d", "size": 27}},
            "size 27 with mode 3d divides the images of a micro-batch into 9 parts, but batch.micro_batch is 2: use "
            "a multiple",
        ),
        (
            {"shard_ranks": 2},
            "parallel.shard_ranks is 2 with parallel.shard none: set parallel.shard to what is divided",
        ),
        (
            {"shard": "full", "static_graph": True},
            "parallel.static_graph is true with parallel.shard full: it is a setting of DDP, which is not used there",
        ),
        (
            {"pipeline": 2, "exchange_dtype": "bf16"},
            "parallel.exchange_dtype is bf16 with parallel.pipeline 2: it is for DDP, which is not used there; set "
            "it to fp32",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^.*{message}"):
        config(parallel=values)


@pytest.mark.parametrize(
    ("parallel", "sections", "message"),
    [
        (
            {"shard": "full"},
            {"model": ModelConfig(name="vit_tiny_patch16_224", compile="model")},
            "model.compile is model with parallel.shard full, which divides the model among ranks: .*, set "
            "model.compile none",
        ),
        (
            {"pipeline": 2},
            {"data": DataConfig(root="data", reader="dali")},
            "data.reader is dali with parallel.pipeline 2, .*: set data.reader index",
        ),
        (
            {"pipeline": 2},
            {"loss": LossConfig(distillation="hard", teacher="resnet18")},
            "parallel.pipeline is 2 with loss.distillation hard: the last stage has no images to show the teacher",
        ),
        (
            {"pipeline": 2},
            {"optimizer": OptimizerConfig(lr=1e-3, layer_decay=0.7)},
            "parallel.pipeline is 2 with optimizer.layer_decay 0.7: a stage does not know the layers of the others",
        ),
    ],
)
def test_what_it_does_not_go_together_with(parallel: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(parallel=ParallelConfig(**parallel), **sections)
    assert isinstance(config(**sections), Config)
