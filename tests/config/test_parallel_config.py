"""How parallelism is written in a config and on the command line, and which combinations are refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from dali_train.checkpoint.recipe import recipe_settings
from dali_train.config import Config, ParallelConfig, TensorConfig, load_config
from dali_train.config.command_line import config_with
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from tests.config.test_config import FILE, config
from tests.helpers import PIPELINE, SHARDED, TENSOR


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
    assert config_with(plain, words, "train").parallel == expected
    saved = write(tmp_path / "config.json", load_config(beside).to_json())
    assert {load_config(path).parallel for path in (beside, within, saved)} == {expected}
    words = ["--parallel.tensor.mode", "2.5d", "--parallel.tensor.size", "8", "--parallel.tensor.depth", "2"]
    words += ["--parallel.timeout_s", "60", "--batch.micro_batch", "8"]
    everything = config_with(beside, words, "train").parallel
    assert everything.tensor == TensorConfig(mode="2.5d", size=8, depth=2)
    assert (everything.pipeline, everything.timeout_s) == (2, 60)


def test_a_resume_may_change_it() -> None:
    assert not [name for name in recipe_settings(config()) if name.startswith("parallel")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard": "zero"}, "parallel.shard is 'zero'.*none, optimizer, gradients or full"),
        ({"exchange_dtype": "bf16"}, "parallel.exchange_dtype .*parallel.grad_reduce_dtype"),
        ({"tensor": {"sise": 2}}, "parallel.tensor.sise .*parallel.tensor.size"),
        ({"tensor": {"mode": "2d", "size": 6}}, "parallel.tensor.size is 6 with mode 2d.* 4 or 9"),
        ({"tensor": {"mode": "3d", "size": 9}}, "parallel.tensor.size is 9 with mode 3d.* 8 or 27"),
        ({"tensor": {"mode": "2.5d", "size": 8}}, "size is 8 with mode 2.5d.*parallel.tensor.depth"),
        ({"tensor": {"mode": "2.5d", "size": 6, "depth": 2}}, "size is 6 with mode 2.5d and depth 2.* 2 or 8"),
        (
            {"tensor": {"mode": "3d", "size": 27}},
            "batch.micro_batch is 2.*size 27 and parallel.tensor.mode 3d.*multiple of 9",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^.*{message}"):
        config(parallel=values)


# A layout, a setting that it refuses, what else that needs, and the message.
REFUSED: list[tuple[tuple[str, ...], tuple[str, str], dict[str, str], str]] = [
    (SHARDED, ("model.compile", "model"), {}, "model.compile is model .*shard full"),
    (SHARDED, ("model.compile", "cuda-graphs"), {}, "compile is cuda-graphs .*shard full"),
    (SHARDED, ("model.channels_last", "true"), {}, "model.channels_last .*shard full"),
    (PIPELINE, ("data.reader", "dali"), {}, "data.reader is dali .*pipeline 2"),
    (PIPELINE, ("loss.distillation", "hard"), {"loss.teacher": "resnet18"}, "pipeline is 2 .*loss.distillation hard"),
    (
        SHARDED,
        ("optimizer.clip_mode", "agc"),
        {},
        "clip_mode is agc .*parallel.shard full.* the norms of whole weights",
    ),
    (TENSOR, ("optimizer.clip_mode", "agc"), {}, "clip_mode is agc .*parallel.tensor.size 2.* the norms of whole"),
    (PIPELINE, ("data.progressive", "1,128"), {}, "data.progressive with parallel.pipeline 2"),
    (TENSOR, ("data.progressive", "1,128"), {}, "data.progressive with parallel.tensor"),
    (PIPELINE, ("optimizer.layer_decay", "0.7"), {}, "parallel.pipeline is 2 .*optimizer.layer_decay 0.7"),
    (PIPELINE, ("parallel.grad_reduce_dtype", "bf16"), {}, "grad_reduce_dtype is bf16 .*parallel.pipeline 2"),
]


@pytest.mark.parametrize(("layout", "setting", "companions", "message"), REFUSED)
def test_what_it_does_not_go_together_with(
    tmp_path: Path, layout: tuple[str, ...], setting: tuple[str, str], companions: dict[str, str], message: str
) -> None:
    name, value = setting
    options = [f"--{name}", value, *(f"--{key}={text}" for key, text in companions.items())]
    plain = write(tmp_path / "plain.py", FILE)
    with pytest.raises(ConfigError, match=message):
        config_with(plain, [*options, *layout], "train")
    assert isinstance(config_with(plain, options, "train"), Config)


def test_ranks_that_do_not_divide_a_step() -> None:
    two = ParallelConfig(tensor=TensorConfig(size=2))
    layouts = [Layout.from_config(Launch(rank=rank, world_size=8, port=1), two) for rank in range(0, 8, 2)]
    assert [layout.num_local_micro_batches(7) for layout in layouts] == [2, 2, 2, 1]
    assert layouts[0].describe_idle(8) == ""
    assert layouts[0].describe_idle(7) == ": 12.5% idle; 14 would have none"
    ranks = Layout.from_config(Launch(rank=0, world_size=57, port=1), ParallelConfig())
    assert ranks.describe_idle(128) == ": 25.1% idle; 64 would have none"


def test_ranks_are_numbered_by_stage_then_data_then_tensor() -> None:
    parallel = ParallelConfig(pipeline=2, tensor=TensorConfig(size=3), shard="full", shard_ranks=2)
    layouts = [Layout.from_config(Launch(rank=rank, world_size=24, port=1), parallel) for rank in range(24)]
    coordinates = [(one.pipeline_rank, one.data_rank, one.tensor_rank) for one in layouts]
    assert coordinates == list(itertools.product(range(2), range(4), range(3)))
    assert (layouts[0].replicas, layouts[0].shard) == (2, 2)
    # (splits the model, shards weights), for each dimension alone.
    for sizes, expected in (
        ({}, (False, False)),
        ({"replicas": 2}, (False, False)),
        ({"pipeline": 2}, (True, False)),
        ({"shard": 2}, (True, True)),
        ({"tensor": 2}, (True, True)),
    ):
        layout = Layout(rank=0, **sizes)
        assert (layout.splits_model, layout.shards_weights) == expected and layout.world_size == max(
            [1, *sizes.values()]
        )
    with pytest.raises(AssertionError):
        Layout(rank=2, shard=2)
