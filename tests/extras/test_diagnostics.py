"""Warnings about a run that goes wrong."""

import dataclasses
import logging
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dali_train.config import OptimizerConfig
from dali_train.extras.diagnostics import HISTORY, Health, SystemFacts
from dali_train.hooks import RunStart, StepRecord, TrainRecord


def record(step: int, **fields: float) -> StepRecord:
    times = {f.name: 0.0 for f in dataclasses.fields(TrainRecord) if f.name.endswith("_s")}
    values = {
        "loss": 1.0,
        "top1": 0.5,
        "lr": 0.1,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "images_per_second": 1.0,
    }
    measured = {name: fields.pop(name) for name in list(fields) if name not in values}
    train = TrainRecord(**cast(Any, {**times, **values, **fields, "measured": measured}))
    return StepRecord(step=step, epoch=0.0, micro_batches=(), batch=cast(Any, None), train=train)


@pytest.mark.parametrize(
    ("last", "optimizer", "message"),
    [
        ({"grad_norm": 30.0}, {}, "gradient norm 30 at step 300, usually 1:"),
        ({"loss_scale": 0.5}, {}, "loss scale 0.5 at step 300: below 1, float16 loses small gradients"),
        ({"skipped_steps": 20}, {}, "of the last 200 steps were skipped for gradients that were not finite (step 300)"),
        ({}, {}, None),
        ({"trust_ratio_max": 500.0}, {}, "largest trust ratio 500 at step 300: a layer whose gradient is nearly zero"),
        # No advice that was followed already.
        ({"trust_ratio_max": 500.0}, {"exclude_vectors": False}, "Exclude biases and norms from it"),
        ({"trust_ratio_max": 500.0}, {"weight_decay": 1e-4}, "Raise optimizer.weight_decay from 0.0001"),
        ({"trust_ratio_max": 500.0}, {"weight_decay": 0.1}, "lower optimizer.lr or lengthen schedule.warmup_epochs"),
    ],
)
def test_health_warns(
    last: dict[str, float], optimizer: dict[str, Any], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health()
    config = SimpleNamespace(optimizer=OptimizerConfig(lr=0.1, **optimizer))
    health.start(cast(RunStart, SimpleNamespace(start_step=0, config=config)))
    with caplog.at_level(logging.WARNING, "dali_train"):
        for number in range(1, 30):
            health.step(record(10 * number, skipped_steps=3))  # while the scale is looked for
        assert not caplog.records and HISTORY < 29
        health.step(record(300, **{"skipped_steps": 3, **last}))
    assert len(caplog.records) == (message is not None)
    assert message is None or message in caplog.text


def test_mapped_shards_are_not_the_processs_memory(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "shard").write_bytes(bytes(size))
    facts = SystemFacts()
    facts.start(cast(RunStart, SimpleNamespace(model=torch.nn.Linear(1, 1))))
    before = facts.measure()["process_memory_gb"]
    with (tmp_path / "shard").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # every page is in memory now
        assert facts.measure()["process_memory_gb"] < before + size / 4e9
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own.write(bytes(size))
        assert facts.measure()["process_memory_gb"] > before + size / 2e9
