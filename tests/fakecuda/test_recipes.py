"""Steps of the recipes at their real size on a fake GPU, of which nothing is computed: their memory, as torch's
allocator counts it, is what `plan` foresees from shapes on the host, and the host does not wait."""

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
from dali_train.data.loading.loader_arguments import Place
from dali_train.extras.cost.memory import estimate_memory
from dali_train.parallel import parallelize
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from dali_train.training import precision
from dali_train.training.build import build_trainer
from dali_train.training.model import build_model
from tests.conftest import REPOSITORY
from tests.fakecuda.device import Watch, memory_of, without_values
from tests.fakecuda.jobs import kernels
from tests.helpers import words
from tests.ranks import POOL

NUM_CLASSES = 1000
RECIPES = words(
    "algoperf-vit-s16 convnext-t deit-s deit3-l ffcv-resnet50-16ep mnist resnet34-cifar10 resnet50-lars-57k"
    " rope-deit3-s rsb-a3 vit-b16 vit-b16-32k vit-b16-cifar10 vit-l32 vit-s16-90ep vit-s16-90ep-muon vit5-s"
)


def steps(recipe: str, dataset: Path, report: Path) -> None:
    """Write the bytes that `plan` foresees, those that two steps of two micro-batches take, and the waits of the second
    one into `report`."""
    config = load_config(REPOSITORY / "configs" / f"{recipe}.py")
    size = config.batch.micro_batch
    changed: dict[str, Any] = {"data.reader": "synthetic", "data.device": "cpu", "data.root": str(dataset)}
    changed |= {
        "model.weights": None,
        "run.device": "cuda",
        "model.compile": "none",
        "data.progressive": (),
        "batch.global_batch": 2 * size,
    }
    config = config.replace(changed)
    foreseen = estimate_memory(config, build_model(config, NUM_CLASSES, torch.device("meta")))
    device, watch = torch.device("cuda", 0), Watch()
    before = torch.cuda.memory_allocated(device)
    with kernels(values=False), without_values(), _accepted_values(), watch.watching():
        peak = _peak_of_a_step(config, device, watch)
    gc.collect()
    torch.cuda.empty_cache()
    taken = {"bytes": peak - before, "waits": [wait.where or wait.what for wait in watch.waits]}
    report.write_text(json.dumps({"foreseen": foreseen.state_bytes + foreseen.step_bytes, **taken}))


def _peak_of_a_step(config: Config, device: torch.device, watch: Watch) -> int:
    layout = Layout.from_config(Launch(rank=0, world_size=1, port=1), ParallelConfig())
    trainer = build_trainer(config, layout, NUM_CLASSES, device)
    split = Split(config.data.root, "train")
    loader = TrainLoader.of_split(split, config, Place(dp_rank=0, dp_size=1, device=device, num_threads=1))
    for step in range(2):  # the first makes the optimizer's state
        torch.cuda.reset_peak_memory_stats(device)
        watch.waits.clear()
        trainer.step(step, 1e-3, loader)
    loader.close()
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def _accepted_values() -> Iterator[None]:
    """Nothing computes whether gradients are finite, and a step with others would discard the optimizer's state; nor
    whether buffers have changed, as those of another model than BatchNorm's must not."""
    step_or_undo = precision._step_or_undo

    def step(optimizer: Optimizer, shardwise: AbstractContextManager[Any], *, finite: torch.Tensor) -> None:
        memory_of(finite).fill_(True)
        step_or_undo(optimizer, shardwise, finite=finite)

    with (
        mock.patch.object(precision, "_step_or_undo", step),
        mock.patch.object(parallelize, "_refuse_foreign_buffers"),
    ):
        yield


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_the_memory_that_plan_foresees_and_does_not_wait(
    recipe: str, dataset: Path, tmp_path: Path
) -> None:
    statuses = POOL.run(1, steps, recipe, dataset, tmp_path / "report", log=tmp_path / "log")
    assert statuses == [0], (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "report").read_text())
    assert found["waits"] == []
    assert found["foreseen"] == pytest.approx(found["bytes"], rel=0.05, abs=10e6)
