"""`plan`'s memory, from shapes on the host, against what torch's allocator counts on a fake GPU in steps of a recipe at
its real size, of which nothing is computed."""

import gc
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import Optimizer

from dali_train.config import Config, ParallelConfig, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader import TrainLoader
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from dali_train.training import precision
from dali_train.training.build import build_trainer
from dali_train.training.cost import estimate_memory
from dali_train.training.model import build_model
from tests.conftest import REPOSITORY
from tests.fakecuda.device import memory_of, without_values
from tests.fakecuda.jobs import kernels
from tests.ranks import POOL

NUM_CLASSES = 1000


def step_memory(recipe: str, dataset: Path, report: Path) -> None:
    """Write the bytes that `plan` foresees and that two steps of two micro-batches take into `report`."""
    config = load_config(REPOSITORY / "configs" / f"{recipe}.py")
    size = config.batch.micro_batch
    changed: dict[str, Any] = {"data.reader": "synthetic", "data.device": "cpu", "data.root": str(dataset)}
    changed |= {"run.device": "cuda", "model.compile": "none", "data.progressive": (), "batch.global_batch": 2 * size}
    config = config.replace(changed)
    foreseen = estimate_memory(config, build_model(config, NUM_CLASSES, torch.device("meta")))
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    with kernels(values=False), without_values(), _finite_steps():
        peak = _peak_of_a_step(config, device)
    gc.collect()
    torch.cuda.empty_cache()
    report.write_text(json.dumps([foreseen.state_bytes + foreseen.step_bytes, peak - before]))


def _peak_of_a_step(config: Config, device: torch.device) -> int:
    layout = Layout.from_config(Launch(rank=0, world_size=1, port=1), ParallelConfig())
    trainer = build_trainer(config, layout, NUM_CLASSES, device)
    split = Split(config.data.root, "train")
    loader = TrainLoader.of(split, config, device, start_step=0, dp_rank=0, dp_size=1, num_threads=1)
    for step in range(2):  # the first makes the optimizer's state
        torch.cuda.reset_peak_memory_stats(device)
        trainer.step(step, 1e-3, loader)
    loader.close()
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def _finite_steps() -> Iterator[None]:
    """Nothing computes whether gradients are finite, and a step with others would discard the optimizer's state."""
    step_or_undo = precision._step_or_undo

    def step(optimizer: Optimizer, shardwise: AbstractContextManager[Any], *, finite: torch.Tensor) -> None:
        memory_of(finite).fill_(True)
        step_or_undo(optimizer, shardwise, finite=finite)

    with mock.patch.object(precision, "_step_or_undo", step):
        yield


@pytest.mark.parametrize("recipe", ["deit-s", "vit-s16-90ep"])
def test_plan_foresees_the_memory_of_a_step(recipe: str, dataset: Path, tmp_path: Path) -> None:
    statuses = POOL.run(1, step_memory, recipe, dataset, tmp_path / "report", log=tmp_path / "log")
    assert statuses == [0], (tmp_path / "log").read_text()
    foreseen, taken = json.loads((tmp_path / "report").read_text())
    assert foreseen == pytest.approx(taken, rel=0.1)
