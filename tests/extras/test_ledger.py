"""`hooks.ledger`: loss and margin of each image in each epoch; test_exactness.py compares ranks and kills."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.errors import ConfigError
from dali_train.extras.ledger.hook import LEDGER_DTYPE, finite, ledger_files, losses_and_margins, read_epoch, shares
from tests.conftest import Train
from tests.helpers import events, words


def test_the_partners_class_does_not_compete() -> None:
    logits = torch.tensor([[2.0, 3.0, 1.0, 0.0]] * 3)
    everything = torch.logsumexp(logits[0], 0)
    without_1 = torch.logsumexp(logits[0, [0, 2, 3]], 0)
    without_2 = torch.logsumexp(logits[0, [0, 1, 3]], 0)
    alone = losses_and_margins(logits, torch.tensor([[0], [1], [3]]))
    expected = [[everything - 2, -1], [everything - 3, 1], [everything, -3]]
    np.testing.assert_allclose(finite(alone.numpy()).astype(float), np.array(expected, np.float64), atol=1e-3)
    mixed = losses_and_margins(logits, torch.tensor([[0, 1], [1, 2], [3, 3]]))
    expected = [[without_1 - 2, 1], [without_2 - 3, 1], [everything, -3]]
    np.testing.assert_allclose(finite(mixed.numpy()).astype(float), np.array(expected, np.float64), atol=1e-3)


def test_values_that_say_nothing() -> None:
    """Of two classes that are both right there is no margin; what float16 cannot hold is its largest number."""
    logits = torch.tensor([[1.0, 2.0], [0.0, 1e6], [math.nan, 0.0]])
    (mixed, far, broken) = finite(losses_and_margins(logits, torch.tensor([[0, 1], [0, 0], [0, 0]])).numpy())
    assert mixed[0] == 0 and np.isnan(mixed[1])
    assert far.tolist() == [65504, -65504]
    assert np.isnan(broken).all()


PLAIN = words(
    "--mixup.alpha 0 --precision.dtype fp64 --data.repeats 1 --hooks.ledger true --run.max_steps 3 "
    "--run.eval_every_epochs none --hooks.log_every_steps 2"
)


def test_it_is_what_the_steps_loss_is_made_of(train: Train, tmp_path: Path) -> None:
    """Without mixing and smoothing the mean over a step's images is the loss that the run reports, on three ranks too,
    one of which has fewer micro-batches; what has not been trained is not there."""
    train("run", *PLAIN, ranks=3)
    run = tmp_path / "run"
    config = load_config(run / "config.json")
    split = Split(config.data.root, "train")
    files = ledger_files(run)
    assert list(files) == [0, 1]
    ledger = np.stack([read_epoch(path, len(split)) for path in files.values()])
    assert ledger.dtype == LEDGER_DTYPE and files[0].stat().st_size == 128 + 4 * 50
    micro_batches = MicroBatches(split.rows, config)
    means = []
    for step in range(3):
        batches = [micro_batches(step, k) for k in range(8)]
        images = np.concatenate([batch.images for batch in batches])
        epochs = np.concatenate([batch.positions for batch in batches]) // 50
        means.append(float(ledger["loss"][epochs, images].astype(np.float64).mean()))
    reported = [event["loss"] for event in events(run, "train")]  # of steps 1 and 2 together, and of step 3
    assert [np.mean(means[:2]), means[2]] == pytest.approx(reported, abs=2e-3)
    assert not np.isnan(ledger["loss"][0]).any()
    assert np.isfinite(ledger["margin"][1]).sum() == 3 * 32 - 50 and np.isnan(ledger["loss"][1]).sum() == 2 * 50 - 96


def test_shares_are_those_of_the_micro_batches(plain_run: Path) -> None:
    """Each image's lambda in each epoch, from the recipe alone."""
    config = load_config(plain_run / "config.json")
    split = Split(config.data.root, "train")
    micro_batches = MicroBatches(split.rows, config)
    for epoch in range(2):
        expected = np.zeros(50, np.float32)
        for step in range(4):
            for batch in (micro_batches(step, k) for k in range(8)):
                inside = batch.positions // 50 == epoch
                expected[batch.images[inside]] = batch.lambdas[inside]
        found = shares(micro_batches, epoch, 50, 50)
        assert (found == expected).all() and 0 < found.min() < 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "epoch-00000.npy"
    np.save(path, np.zeros(50, np.float32))
    with pytest.raises(ConfigError, match="50 images"):
        read_epoch(path, 50)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_epoch(path, 50)
