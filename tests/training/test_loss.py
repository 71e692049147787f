"""Losses against timm's pieces, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from dali_train.config import Config, ConfigError, DataConfig, LossConfig, ModelConfig
from dali_train.training.loss import LOSSES, Objective, balanced_weights, make_objective
from tests.config.test_config import config

CLASSES = 7
TEACHER: dict[str, Any] = {"distillation": "soft", "teacher": "resnet50"}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, targets, lambdas) in float64; some images are mixed with their own class."""
    torch.manual_seed(0)
    return (
        torch.randn(16, CLASSES, dtype=torch.float64) * 3,
        torch.randint(CLASSES, (16, 2)),
        torch.rand(16, dtype=torch.float64),
    )


def dense(targets: torch.Tensor, lambdas: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Targets (n, classes) as timm's Mixup makes them, whose partners are the batch in reverse order."""
    rows = []
    for (first, second), share in zip(targets.tolist(), lambdas.tolist(), strict=True):
        pair = torch.tensor([first, second])
        rows.append(mixup_target(pair, CLASSES, lam=share, smoothing=smoothing)[0].double())
    return torch.stack(rows)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_timms(smoothing: float) -> None:
    logits, targets, lambdas = batch()
    settings = LossConfig(label_smoothing=smoothing)
    loss = LOSSES["cross-entropy"](settings, logits, targets, lambdas)
    torch.testing.assert_close(
        loss, SoftTargetCrossEntropy()(logits, dense(targets, lambdas, smoothing)), rtol=1e-6, atol=0
    )
    alone = LOSSES["cross-entropy"](settings, logits, targets, torch.ones_like(lambdas))
    torch.testing.assert_close(alone, LabelSmoothingCrossEntropy(smoothing)(logits, targets[:, 0]))


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("sums", "positive"), [(False, 1.0), (True, 3.5)])
def test_binary_cross_entropy_is_timms(smoothing: float, threshold: float | None, sums: bool, positive: float) -> None:
    logits, targets, lambdas = batch()
    settings = LossConfig(
        name="binary-cross-entropy",
        label_smoothing=smoothing,
        target_threshold=threshold,
        sum_classes=sums,
        positive_weight=positive,
    )
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold, sum_classes=sums, pos_weight=positive)
    loss = LOSSES["binary-cross-entropy"](settings, logits, targets, lambdas)
    torch.testing.assert_close(loss, theirs(logits, dense(targets, lambdas, smoothing)), rtol=1e-6, atol=0)
    alone = LOSSES["binary-cross-entropy"](settings, logits, targets, torch.ones_like(lambdas))
    torch.testing.assert_close(alone, theirs(logits, targets[:, 0]))


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_logits_are_widened_first(name: str) -> None:
    logits, targets, lambdas = batch()
    half = logits.to(torch.bfloat16)
    loss = LOSSES[name](LossConfig(name=name, label_smoothing=0.1), half, targets, lambdas.float())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, LOSSES[name](LossConfig(name=name, label_smoothing=0.1), half.float(), targets, lambdas.float())
    )


def config_with(loss: LossConfig, size: int = 32) -> Config:
    return config(data=DataConfig(root="data", train_size=size), model=ModelConfig(name="test_vit"), loss=loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_torchs(smoothing: float) -> None:
    """But for the divisor, which is the number of images: the mean over micro-batches stays that of their sum."""
    counts = np.array([30, 0, 5] + [1] * (CLASSES - 3))
    weights = torch.from_numpy(balanced_weights(counts)).float()
    assert float((weights * torch.from_numpy(counts)).sum()) == pytest.approx(counts.sum())
    logits, targets = torch.randn(6, CLASSES), torch.randint(CLASSES, (6, 2))
    lambdas = torch.tensor([1.0, 0.3, 0.5, 0.9, 0.0, 1.0])
    settings = LossConfig(class_weights="balanced", label_smoothing=smoothing)
    objective = make_objective(config_with(settings), nn.Identity(), CLASSES, torch.device("cpu"), counts)
    ours, _ = objective(logits, logits, targets, lambdas)
    each = [
        F.cross_entropy(logits, targets[:, place], weights, label_smoothing=smoothing, reduction="none")
        for place in (0, 1)
    ]
    torch.testing.assert_close(ours, (lambdas * each[0] + (1 - lambdas) * each[1]).mean())
    with pytest.raises(ConfigError, match=r"loss\.class_weights is balanced with loss\.name binary-cross-entropy"):
        LossConfig(class_weights="balanced", name="binary-cross-entropy")


def test_without_a_teacher_the_objective_is_the_loss() -> None:
    logits, targets, lambdas = batch()
    loss, _ = Objective(LossConfig())(logits, torch.empty(0), targets, lambdas)
    assert torch.equal(loss, LOSSES["cross-entropy"](LossConfig(), logits, targets, lambdas))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"name": "binary-cross-entropy", "target_threshold": 1.5}, "target_threshold is 1.5"),
        ({"distillation": "hard"}, "distillation is hard with loss.teacher none: set loss.teacher"),
        ({"teacher": "resnet50"}, "teacher is resnet50 .*loss.distillation none: set it"),
        (TEACHER | {"distillation": "hard", "temperature": 3.0}, "temperature is 3 with loss.distillation hard"),
        (TEACHER | {"temperature": 0.0}, "temperature is 0.0"),
        (TEACHER | {"distillation_weight": 0.0}, "distillation_weight is 0.0"),
    ],
)
def test_losses_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)
