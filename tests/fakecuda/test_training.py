"""Every setting that docs/exactness.md names, and every layout, on fake GPUs: what one process computes on a CPU, and
without a wait of the host inside a step."""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dali_train.cli import main
from dali_train.config import ParallelConfig
from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import parallelize
from dali_train.runtime.launch import Launch
from tests.conftest import TINY_CONFIG
from tests.extras.test_several_labels import ON_SEVERAL, write_table
from tests.fakecuda.conftest import FakeRun, RunOnFake
from tests.fakecuda.device import OnHost, Watch, without_values
from tests.fakecuda.jobs import kernels
from tests.helpers import (
    BF16_ALL_REDUCE,
    CONVOLUTIONAL,
    EXCLUDED,
    FAST_UNCOMPILED,
    FLOAT64_BOUND,
    PIPELINE,
    REGULARISED,
    SHARDED,
    STEADY,
    TENSOR,
    events,
    extended,
    final_weights,
    losses,
    samples,
    state_difference,
    words,
)
from tests.parallel.test_parallel import INTERLEAVED, OPTIONS, SEQUENCE
from tests.ranks import POOL
from tests.test_exactness import (
    AUGMENTED,
    BATCH_NORM,
    BLOCK_ORDER,
    IN_BLOCKS,
    MIXED,
    REPEATED,
    SIGNS_COUNT,
    VIT5_WITH_MUON,
)
from tests.test_exactness_table import COMPARED, settings
from tests.training.test_noise_scale import ONE_MEASUREMENT
from tests.training.test_optimizers import TIMM

OnCpu = Callable[..., Path]

THREE_STEPS = words("--run.max_steps 3 --batch.micro_batch 16 --precision.dtype fp64 --run.eval_every_epochs none")
# Two micro-batches a rank on four ranks, five of them, and evaluations of a moving average.
SPLIT = (
    *OPTIONS,
    *STEADY,
    *words("--precision.dtype fp64 --model.kwargs.depth 4 --run.max_steps 2 --batch.global_batch 20"),
)

ALONE = {
    "augmented": (*AUGMENTED, *THREE_STEPS),
    "repeated": (*REPEATED, *THREE_STEPS),
    "in-blocks": (*IN_BLOCKS, *THREE_STEPS),
    "vit5-with-muon": (*VIT5_WITH_MUON, *THREE_STEPS),
    "recomputing": (*REGULARISED, *FAST_UNCOMPILED, *BLOCK_ORDER, *BF16_ALL_REDUCE, *THREE_STEPS),
    "selective": (*THREE_STEPS, "--model.activation_checkpointing", "selective"),
    "rope": (*THREE_STEPS, *words("--model.name vit_small_patch16_rope_mixed_224")),
    # SGD: Adam divides a first gradient by its own size, which makes much of the rounding of a small one.
    "noise-scale": (*ONE_MEASUREMENT, *words("--optimizer.name sgd")),
    "images left out": (*THREE_STEPS, "--data.exclude", EXCLUDED),
    "signs-count": (*SIGNS_COUNT.options, *THREE_STEPS),
    "split": SPLIT,
} | {name: (*THREE_STEPS, "--optimizer.name", name) for name in TIMM}
# DDP reads its own timers, of its first ten all-reduces.
DDP = {"training/trainer.py forward_backward"}
AUDITS = DDP | {
    f"extras/audit/audited_trainer.py {name}" for name in ("backward", "_exchange", "compare", "_gather", "_compute")
}
# Ranks, options, and where the host may wait inside a step after the first.
LAYOUTS: dict[str, tuple[int, tuple[str, ...], Set[str]]] = {
    "ddp-2": (2, (), DDP),
    "ddp-4-audited": (4, words("--run.audit_every_steps 1 --run.deterministic true"), AUDITS),
    "optimizer-2": (2, words("--parallel.shard optimizer"), set()),
    "gradients-2": (2, words("--parallel.shard gradients"), set()),
    "full-2": (2, SHARDED, set()),
    "full-4-of-2": (4, (*SHARDED, *words("--parallel.shard_ranks 2")), set()),
    "tensor-2": (2, TENSOR, set()),
    "tensor-4-sequence": (4, (*TENSOR, *SEQUENCE), set()),
    "pipeline-2": (2, PIPELINE, set()),
    "interleaved-4-gradients": (4, (*INTERLEAVED, *words("--parallel.shard gradients")), set()),
    "pipeline-4-tensor": (4, (*PIPELINE, *TENSOR), set()),
}


def check(run: FakeRun, expected: Path, *, waits: Set[str] = frozenset(), signs: bool = False) -> None:
    """Compare with a run on the CPU.

    Args:
        waits: where the host may wait inside a step after the first.
        signs: the optimizer takes signs, or divides by norms, of gradients that are rounding alone, such as that of the
            bias of attention's keys.
    """
    assert not run.faults
    assert set(run.waits()) <= waits, "the host waited inside a step after the first"
    assert samples(run.directory) == samples(expected)
    assert losses(run.directory) == pytest.approx(losses(expected), rel=1e-12)
    assert noise_scales(run.directory) == pytest.approx(noise_scales(expected), rel=1e-9)
    assert signs or state_difference(expected, run.directory) < FLOAT64_BOUND


def noise_scales(directory: Path) -> list[float]:
    """Return those that are known: not of a step whose gradient is lost in the noise."""
    return [event["noise_scale"] for event in events(directory, "train") if event.get("noise_scale") is not None]


@pytest.mark.parametrize("name", ALONE)
def test_a_setting_computes_what_a_cpu_does(name: str, on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    run, expected = on_fake("run", *ALONE[name]), on_cpu(*ALONE[name])
    # timm's NovoGrad asks the device whether its state is still zero, for each parameter.
    waits = {"training/precision.py step"} if name == "novograd" else set[str]()
    check(run, expected, waits=waits, signs=name in ("lion", "novograd"))
    assert name != "noise-scale" or noise_scales(expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_process_does(name: str, on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    ranks, layout, waits = LAYOUTS[name]
    run = on_fake("run", *SPLIT, *layout, ranks=ranks)
    check(run, on_cpu(*SPLIT), waits=waits)
    for ours, theirs in zip(events(run.directory, "eval"), events(on_cpu(*SPLIT), "eval"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12) and ours["ema_top1"] == theirs["ema_top1"]


def test_a_mixture_computes_what_a_cpu_does(on_fake: RunOnFake, on_cpu: OnCpu, dataset: Path) -> None:
    options = (*(option.format(root=dataset) for option in MIXED), *THREE_STEPS)
    check(on_fake("run", *options), on_cpu(*options))


SEVERAL_LABELS = (*ON_SEVERAL.options, *words("--run.epochs 2 --schedule.warmup_epochs 1"))


def test_several_labels_compute_what_a_cpu_does(on_fake: RunOnFake, on_cpu: OnCpu, tmp_path: Path) -> None:
    table, index, config = write_table(tmp_path / "images"), tmp_path / "index", tmp_path / "several.py"
    assert main(["data", "index", str(table), "--out", str(index), "--label-separator", ";"]) == 0
    config.write_text(TINY_CONFIG.format(root=str(index)))
    run, expected = on_fake("run", *SEVERAL_LABELS, config=config), on_cpu(*SEVERAL_LABELS, config=config)
    check(run, expected)
    for ours, theirs in zip(events(run.directory, "eval"), events(expected, "eval"), strict=True):
        assert ours["ema_mean_ap"] == pytest.approx(theirs["ema_mean_ap"], rel=1e-12)


CONVOLUTIONS = {
    "alone": (1, BATCH_NORM),
    "ddp-2": (2, BATCH_NORM),
    "blurred": (1, words("--model.name dali_resnet50_blur --model.kwargs.layers [1,1,1,1] --run.max_steps 1")),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, on_fake: RunOnFake, on_cpu: OnCpu, config_file: Path) -> None:
    ranks, model = CONVOLUTIONS[name]
    options, config = (*THREE_STEPS, *model), extended(config_file, CONVOLUTIONAL)
    run = on_fake("run", *options, ranks=ranks, config=config)
    check(run, on_cpu(*options, config=config), waits=DDP if ranks > 1 else frozenset())


# Ranks, options, and the largest difference of a loss to the CPU's, which rounds elsewhere.
PRECISIONS = {
    "fp32": (1, "--precision.dtype fp32", 1e-5),
    "fp16": (1, "--precision.dtype fp16 --precision.initial_scale 1e6", 1e-3),
    "bf16": (1, "--precision.dtype bf16 --model.fast_norm true --model.channels_last true", 1e-3),
    "bf16-tensor": (2, "--precision.dtype bf16 --parallel.tensor.size 2", 1e-3),
    "pure-bf16": (1, "--precision.dtype bf16 --precision.autocast false", 5e-3),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision(name: str, on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    """Also fp16's first steps, which overflow and are undone on the device."""
    ranks, precision, bound = PRECISIONS[name]
    options = words(f"{precision} --run.max_steps 4 --run.eval_every_epochs none --run.checkpoint_every_steps 9")
    run, expected = on_fake("run", *options, ranks=ranks), on_cpu(*options, ranks=ranks)
    ours, theirs = events(run.directory, "train"), events(expected, "train")
    # The state that an overflow in the first steps has made is discarded, for which the host asks.
    assert not run.faults and set(run.waits()) <= ({"training/precision.py _step_or_undo"} if name == "fp16" else set())
    assert [event["loss"] for event in ours] == pytest.approx([event["loss"] for event in theirs], rel=bound)
    assert [event["skipped_steps"] for event in ours] == [event["skipped_steps"] for event in theirs]
    assert name != "fp16" or ours[-1]["skipped_steps"] > 0


def test_a_run_goes_on_across_devices(on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    """What one device has saved the other reads, bit for bit, and goes on as if it had been there all the time."""
    options = (*OPTIONS, *words("--precision.dtype fp64 --run.checkpoint_every_steps 1 --run.eval_every_epochs none"))
    first = on_fake("run", *options, *words("--run.max_steps 1"))
    weights = final_weights(first.directory)
    second = on_fake("run", *options, *words("--run.max_steps 2 --run.device cpu"))
    third = on_fake("run", *options, *words("--run.max_steps 3"), ranks=2)
    assert "resuming from step 1" in second.output and "resuming from step 2" in third.output
    check(third, on_cpu(*options, *words("--run.max_steps 3")), waits=DDP)
    kept = Path(third.directory) / "checkpoints" / "step-00000001"
    assert kept.exists() and weights.keys() == final_weights(third.directory).keys()


def test_evaluation_waits_only_where_it_reads_its_result(on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    """Not once a batch: of two batches of images, 98 kB each, and no more often than once for each of its results."""
    options = words("--precision.dtype fp32 --run.max_steps 2 --batch.micro_batch 8 --run.eval_every_epochs 1")
    run = on_fake("run", *options)
    waits = run.waits("evaluate")
    # Predictions, scores, sums and counts by class, each copied and awaited.
    assert set(waits) == {"training/metrics.py _result"} and waits.total() <= 4 * 2
    assert not run.faults
    ours, theirs = (events(directory, "eval") for directory in (run.directory, on_cpu(*options)))
    assert [event["loss"] for event in ours] == pytest.approx([event["loss"] for event in theirs], rel=1e-4)


def pass_through_ddp(num_passes: int) -> None:
    dist.init_process_group("nccl")
    layout = Layout.from_config(
        Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), port=1), ParallelConfig()
    )
    device, watch = torch.device("cuda", dist.get_rank()), Watch()
    torch.cuda.set_device(device)
    with watch.watching(), OnHost(watch):
        model = parallelize(nn.Linear(2, 2).to(device), layout, ParallelConfig(), device, []).model
        images = torch.ones(1, 2, device=device)
        for number in range(num_passes):
            before = len(watch.waits)
            model(images).sum().backward()
            assert number < 20 or watch.waits[before:] == [], number
    assert not watch.faults
    dist.destroy_process_group()


def test_ddp_reads_its_timers_in_its_first_passes_only(tmp_path: Path) -> None:
    """By default also those of each hundredth pass, for which the host waits."""
    statuses = POOL.run(2, pass_through_ddp, 203, log=tmp_path / "log")
    assert statuses == [0, 0], (tmp_path / "log").read_text()


# What is called while a graph is captured, and what is said of it.
CAPTURED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nothing": (lambda loss: None, ""),
    "a value read": (torch.Tensor.item, "cudaStreamSynchronize while a graph is captured"),
    "the device awaited": (lambda loss: torch.cuda.synchronize(), "cudaDeviceSynchronize while a graph is captured"),
    "a copy to pageable memory": (torch.Tensor.cpu, "Cannot copy between CPU and CUDA tensors during CUDA graph"),
}


def capture(name: str) -> None:
    device, watch = torch.device("cuda", 0), Watch()
    with kernels(values=False), without_values():
        model = nn.Linear(2, 2).to(device)
        images = torch.ones(1, 2, device=device)
        model(images).sum().backward()  # cuBLAS's handle, and the gradients
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            loss = model(images).sum()
            loss.backward()
            CAPTURED[name][0](loss)
    assert not watch.faults


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_is_captured_by_cudas_rules(name: str, tmp_path: Path) -> None:
    statuses = POOL.run(1, capture, name, log=tmp_path / "log")
    refused = CAPTURED[name][1]
    assert statuses == [int(bool(refused))] and refused in (tmp_path / "log").read_text()


def test_all_settings_of_the_table_are_here() -> None:
    here = [(*BATCH_NORM, *words("--model.compile blocks"))]
    here += [MIXED, SEVERAL_LABELS, *ALONE.values(), *((*SPLIT, *layout) for _, layout, _ in LAYOUTS.values())]
    known = {setting for options in here for setting in settings(options)}
    table = {setting for compared in COMPARED for setting in settings(compared.options)}
    table.discard("views")  # an argument of the loader, which no run of the trainer has
    assert table <= known, table - known
