"""Models that are split over ranks train as in one process: the same samples, and weights that differ by rounding
alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dali_train.config import load_config
from dali_train.data.sampling.rng import Purpose, torch_seed
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import in_blocks
from dali_train.runtime.launch import Launch
from dali_train.training.build import build_trainer
from dali_train.training.invariant import seed_micro_batch
from tests.conftest import StartTraining, Train, finished_run
from tests.helpers import (
    FLOAT64_BOUND,
    PIPELINE,
    REGULARISED,
    SHARDED,
    STEADY,
    TENSOR,
    Compared,
    events,
    in_ranks,
    in_tiers,
    kill_after_step_4,
    losses,
    samples,
    state_difference,
    words,
)

FP64 = ("--precision.dtype", "fp64")
DEEP = ("--model.kwargs.depth", "4")
FIVE = words("--batch.global_batch 20 --batch.micro_batch 4")  # micro-batches, which several coordinates do not divide
OPTIONS = (
    *REGULARISED,
    *words("--ema.decay 0.9 --ema.every_steps 2 --ema.lookahead true --optimizer.groups *.bias,2,0.5"),
    *words("--data.eval_views mirrored-and-shifted"),
)
WORDS = (*FP64, *DEEP, *FIVE, *OPTIONS, *STEADY, *words("--run.max_steps 5 --run.checkpoint_every_steps 2"))
INTERLEAVED = (*PIPELINE, "--parallel.num_chunks", "2")
# Older ones refuse tokens that ranks do not divide.
SEQUENCE = ("--parallel.tensor.sequence_parallel", "true") if torch.__version__ >= "2.15" else ()


@pytest.fixture(scope="module")
def one_process(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with `WORDS` in one process."""
    return finished_run(tmp_path_factory.mktemp("one"), dataset, *WORDS)


SPLIT = {
    "zero-3-and-copies": Compared(OPTIONS, 4, (*SHARDED, "--parallel.shard_ranks", "2")),
    "interleaved-sharded": Compared(OPTIONS, 4, (*INTERLEAVED, "--parallel.shard", "gradients")),
    "sharded-recomputing": Compared(
        (*OPTIONS, "--model.activation_checkpointing", "true"), 4, (*PIPELINE, *SHARDED), resumed=True
    ),
    "1d": Compared(OPTIONS, 2, TENSOR, resumed=True),
    "2x2x2": Compared(OPTIONS, 8, (*PIPELINE, *TENSOR, *SHARDED, *SEQUENCE)),
}


@pytest.mark.parametrize("case", in_tiers(SPLIT))
def test_split_models_train_as_one(
    start_training: StartTraining,
    train: Train,
    tiny_config: Path,
    one_process: Path,
    tmp_path: Path,
    case: str,
) -> None:
    """With dropout, stochastic depth, Mixup, clipping and a moving average, evaluated in between; and a run that was
    stopped or killed ends with the same bits."""
    options, ranks, layout, resumed, bound = SPLIT[case]
    options = (*WORDS, *options, *layout)
    train("several", *options, ranks=ranks)
    several = tmp_path / "several"
    assert samples(several) == samples(one_process)
    assert losses(several) == pytest.approx(losses(one_process), rel=1e-12)
    assert bound is not None and state_difference(one_process, several) < bound
    for ours, theirs in zip(events(several, "eval"), events(one_process, "eval"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12) and ours["ema_top1"] == theirs["ema_top1"]
    details, expected = ((each / "lamb.jsonl").read_text().splitlines() for each in (several, one_process))
    layers, their_layers = json.loads(details[0])["layers"], json.loads(expected[0])["layers"]
    assert layers.keys() == their_layers.keys()
    assert [row[1] for row in layers.values()] == pytest.approx([their_layers[name][1] for name in layers], rel=1e-12)
    if resumed:
        if case == "1d":
            train("resumed", *options, "--run.max_steps", "3", ranks=ranks)
        else:
            kill_after_step_4(start_training, tiny_config, "resumed", *options, "--run.max_steps", "7", ranks=ranks)
        assert "resuming from step" in train("resumed", *options, ranks=ranks)
        assert state_difference(several, tmp_path / "resumed") == 0
        assert losses(several) == losses(tmp_path / "resumed")


# Steps of one run, each in another layout.
FIVE_LAYOUTS = [
    Compared(OPTIONS, 4, (*PIPELINE, *TENSOR)),
    Compared(OPTIONS, 4, TENSOR),
    Compared(OPTIONS, 6, INTERLEAVED),
    Compared(OPTIONS, 1),
    Compared(OPTIONS, 3, ("--parallel.shard", "optimizer")),
]


@pytest.mark.thorough
def test_a_run_goes_through_five_layouts(train: Train, one_process: Path, tmp_path: Path) -> None:
    """A step on each; what one has written the next one reads."""
    for step, (_, ranks, layout, _, _) in enumerate(FIVE_LAYOUTS, 1):
        train("several", *WORDS, *layout, "--run.max_steps", f"{step}", ranks=ranks)
    assert samples(tmp_path / "several") == samples(one_process)
    assert state_difference(one_process, tmp_path / "several") < FLOAT64_BOUND


@pytest.mark.thorough
def test_all_ranks_skip_the_same_steps(train: Train, tmp_path: Path) -> None:
    """A loss scale that overflows for the first steps, wherever a gradient is: at the same scale as with DDP, as a
    loss is divided by the micro-batches per rank before it is scaled. One of two coordinates has one of a step's three,
    and computes it twice in a pipeline."""
    common = words(
        "--precision.dtype fp16 --precision.initial_scale 1e6 --run.max_steps 8 --run.eval_every_epochs none"
    )
    common += words("--batch.global_batch 24 --batch.micro_batch 8 --hooks.trace_samples false")
    train("plain", *common, ranks=2)
    train("pipeline", *common, *PIPELINE, *SHARDED, ranks=4)
    plain, pipelined = (events(tmp_path / name, "train") for name in ("plain", "pipeline"))
    skipped = [event["skipped_steps"] for event in plain]
    assert len(plain) == 8 and skipped[0] == 1 and 2 < skipped[-1] < 7
    assert [event["loss_scale"] for event in plain] == [1e6 / 2**number for number in skipped], "halved with each"
    assert len({event["lr"] for event in plain[:4]}) == 4, "a skipped step has consumed its images: the rate moves on"
    for name in ("skipped_steps", "loss_scale"):
        assert [event[name] for event in pipelined] == [event[name] for event in plain]
    # float16 resolves 2**-11, and sums in another order differ by its last bits.
    assert [event["loss"] for event in pipelined] == pytest.approx([event["loss"] for event in plain], rel=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "split"),
    [("--precision.autocast false", SHARDED), ("--model.fast_norm true", ())],
    ids=["pure-sharded", "fast-norm"],
)
def test_half_precision_between_stages(train: Train, tmp_path: Path, options: str, split: tuple[str, ...]) -> None:
    common = words(
        f"--precision.dtype bf16 {options} --run.max_steps 2 --run.eval_every_epochs none --batch.micro_batch 8"
    )
    train("one", *common)
    train("several", *common, *PIPELINE, *split, ranks=4 if split else 2)
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=2e-2)  # bfloat16 resolves 2**-8


@pytest.mark.parametrize("pooling", ["avg", "map"])
def test_a_pipeline_of_a_model_without_class_token(train: Train, tmp_path: Path, pooling: str) -> None:
    """Its tokens leave the patch embedding transposed, and what is sent between stages must be contiguous."""
    options = words(f"--model.kwargs.class_token false --model.kwargs.global_pool {pooling} --run.max_steps 2")
    train("one", *FP64, *options)
    train("several", *FP64, *options, *PIPELINE, ranks=2)
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    assert state_difference(tmp_path / "one", tmp_path / "several") < FLOAT64_BOUND


def gradients(rank: int, file: Path, changes: Mapping[str, Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model of the config in `file` with `changes`, and the gradients of one micro-batch on each of two data ranks,
    or of one on both."""
    config = load_config(file).replace(changes)
    layout = Layout.from_config(Launch(rank=rank, world_size=2, port=1), config.parallel)
    trainer = build_trainer(config, layout, 5, torch.device("cpu"))
    parallel, k = trainer.parallel, layout.data_rank
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(k))
    seed_micro_batch(torch_seed(1, Purpose.DROPOUT, step=0, k=k), images.device)
    with parallel.accumulating(last=True):
        with trainer.precision.autocast():
            loss = parallel.model(images).float().square().mean()
        loss.backward()
    parallel.finish_gradients()
    found = [in_blocks(parameter.grad) for parameter in trainer.model.parameters() if parameter.grad is not None]
    return trainer.model, [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def compare_compiled(rank: int, file: Path) -> None:
    dist.init_process_group("gloo")
    half = {"precision.dtype": "bf16", "model.kwargs": PLAIN}
    _, expected = gradients(rank, file, half)
    sharded, found = gradients(rank, file, {**half, "parallel.shard": "full", "model.compile": "blocks"})
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    gathered = {name for name, parameter in sharded.named_parameters() if parameter.dtype == torch.bfloat16}
    layers = {name for name, module in sharded.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    assert torch.__version__ < "2.15" or {name.rpartition(".")[0] for name in gathered} == layers

    masked = {"model.kwargs.drop_path_rate": 0.0, "parallel.tensor.size": 2}
    _, expected = gradients(rank, file, masked)
    _, found = gradients(rank, file, {**masked, "model.compile": "blocks"})
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"], counters
    dist.destroy_process_group()


PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.mark.thorough
def test_split_models_compile_to_one_graph_and_the_same_bits(tiny_config: Path) -> None:
    """With weights that travel in half precision, against complete ones on every rank; and with tensor parallelism,
    masks included."""
    in_ranks(2, compare_compiled, tiny_config)
