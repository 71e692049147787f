"""Faults that are put into the trainer on purpose are found: four kinds, each at five places."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.fakecuda.conftest import FakeRun, RunOnFake
from tests.fakecuda.faults import FAULTS, put_in
from tests.helpers import CONVOLUTIONAL, FLOAT64_BOUND, extended, losses, state_difference, words
from tests.test_exactness import BATCH_NORM

OnCpu = Callable[..., Path]
# Two steps, an evaluation and a checkpoint of everything.
OPTIONS = words(
    "--precision.dtype fp64 --batch.micro_batch 8 --ema.decay 0.9 --run.max_steps 2 --run.eval_every_epochs 1"
)


def agrees(run: FakeRun, expected: Path) -> bool:
    return losses(run.directory) == pytest.approx(losses(expected), rel=1e-12) and (
        state_difference(expected, run.directory) < FLOAT64_BOUND
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_found_without_a_fault(ranks: int, on_fake: RunOnFake, on_cpu: OnCpu) -> None:
    run = on_fake("run", *OPTIONS, ranks=ranks)
    assert not run.faults and agrees(run, on_cpu(*OPTIONS))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, on_fake: RunOnFake, on_cpu: OnCpu, config_file: Path) -> None:
    fault = FAULTS[name]
    options, config = OPTIONS, config_file
    if fault.convolutional:
        options, config = (*OPTIONS, *BATCH_NORM), extended(config_file, CONVOLUTIONAL)
    run = on_fake(
        "run", *options, *fault.options, ranks=fault.ranks, config=config, patch=partial(put_in, name), succeeds=False
    )
    if fault.found == "values":
        assert set(run.statuses) == {0} and not run.faults
        assert not agrees(run, on_cpu(*options))
    else:
        assert fault.found in run.output, run.output


def test_each_kind_of_fault_is_at_five_places() -> None:
    kinds = Counter(name.partition(":")[0] for name in FAULTS)
    assert kinds == {"device": 5, "wait": 5, "reused": 5, "order": 5}
    assert len({(fault.where, fault.old, fault.new) for fault in FAULTS.values()}) == 20
