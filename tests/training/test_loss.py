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
from dali_train.extras.class_weights.weights import describe_weights, weights_of
from dali_train.training.loss import LOSSES, Objective, TrainingClasses, make_objective
from tests.config.test_config import config

CLASSES = 7
# Class 4 is called 2.
COUNTED = TrainingClasses(
    names=("a", "b", "c", "3", "2", "e", "f"), counts=np.array([30, 0, 5] + [1] * (CLASSES - 3)), num_images=39
)
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
    weights = torch.from_numpy(weights_of(LossConfig(class_weights="balanced"), COUNTED)["class_weights"]).float()
    assert float((weights * torch.from_numpy(COUNTED.counts)).sum()) == pytest.approx(COUNTED.num_images)
    logits, targets = torch.randn(6, CLASSES), torch.randint(CLASSES, (6, 2))
    lambdas = torch.tensor([1.0, 0.3, 0.5, 0.9, 0.0, 1.0])
    settings = LossConfig(class_weights="balanced", label_smoothing=smoothing)
    objective = make_objective(config_with(settings), nn.Identity(), CLASSES, torch.device("cpu"), COUNTED)
    ours, _ = objective(logits, logits, targets, lambdas)
    each = [
        F.cross_entropy(logits, targets[:, place], weights, label_smoothing=smoothing, reduction="none")
        for place in (0, 1)
    ]
    torch.testing.assert_close(ours, (lambdas * each[0] + (1 - lambdas) * each[1]).mean())


BINARY = {"name": "binary-cross-entropy"}


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"class_weights": "balanced"}, "inv_freq"),
        ({"class_weights": "effective-0.9"}, "effective_num"),
        ({"positive_weight": "balanced"}, "neg_pos"),
    ],
)
def test_weights_from_counts_are_timms(settings: dict[str, Any], method: str) -> None:
    counts = np.array([1, 20, 7, 31, 2, 9, 30])
    classes = TrainingClasses(names=(), counts=counts, num_images=100)
    timms = pytest.importorskip("timm.loss.class_weights", reason="since timm 1.0.30")
    kind, theirs = timms.compute_class_weights(counts.tolist(), 100, method, beta=0.9)
    (ours,) = weights_of(LossConfig(**BINARY | settings), classes).values()
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    if kind == "class_weight":  # cross-entropy has other terms to take the mean over
        (scaled,) = weights_of(LossConfig(**settings), classes).values()
        np.testing.assert_allclose(scaled / scaled[0], ours / ours[0])
        assert (scaled * counts).sum() == pytest.approx(100)


def test_weights_by_class_and_their_description() -> None:
    """By name, and by number where no class has that name; a loss by halves of a batch is that of the batch."""
    settings = LossConfig(**BINARY, class_weights=(("c", 3), ("5", 0)), positive_weight=(("2", 4),))
    weights = weights_of(settings, COUNTED)
    assert weights["class_weights"].tolist() == [1, 1, 3, 1, 1, 0, 1]
    assert weights["positive_weights"].tolist() == [1, 1, 1, 1, 4, 1, 1]  # the class "2" is number 4
    assert describe_weights(weights["class_weights"], COUNTED).startswith("a 1 (30 images), b 1 (0), c 3 (5), 3 1 (1)")
    logits, targets, lambdas = batch()
    objective = make_objective(config_with(settings), nn.Identity(), CLASSES, torch.device("cpu"), COUNTED)
    whole, _ = objective(logits, logits, targets, lambdas)
    parts = [objective(logits[rows], logits, targets[rows], lambdas[rows])[0] for rows in (slice(8), slice(8, 16))]
    torch.testing.assert_close(whole, torch.stack(parts).mean(), rtol=1e-14, atol=0)
    tensors = {name: torch.from_numpy(values).float() for name, values in weights.items()}
    theirs = BinaryCrossEntropy(0, weight=tensors["class_weights"], pos_weight=tensors["positive_weights"])
    torch.testing.assert_close(whole, theirs(logits, dense(targets, lambdas, 0)), rtol=1e-6, atol=0)
    for wrong in ("cow", "7", "-1"):
        with pytest.raises(ConfigError, match=rf"loss\.class_weights names {wrong}, .* 7 classes"):
            weights_of(LossConfig(class_weights=((wrong, 2),)), COUNTED)
    with pytest.raises(ConfigError, match=r"loss\.class_weights names class 2 twice"):
        weights_of(LossConfig(class_weights=(("c", 2), ("c", 1))), COUNTED)


def test_without_a_teacher_the_objective_is_the_loss() -> None:
    logits, targets, lambdas = batch()
    loss, _ = Objective(LossConfig())(logits, torch.empty(0), targets, lambdas)
    assert torch.equal(loss, LOSSES["cross-entropy"](LossConfig(), logits, targets, lambdas))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"class_weights": "effective"}, "class_weights is 'effective': use none, balanced, effective-BETA such as"),
        ({"class_weights": (("cat", -1),)}, "class_weights .*: use .* or pairs such as"),
        ({"positive_weight": "cat"}, "positive_weight is 'cat': use a number over 0, .*balanced, or pairs"),
        ({"name": "binary-cross-entropy", "target_threshold": 1.5}, "target_threshold is 1.5"),
        (TEACHER | {"temperature": 0.0}, "temperature is 0.0"),
        (TEACHER | {"distillation_weight": 0.0}, "distillation_weight is 0.0"),
    ],
)
def test_losses_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)
