"""Losses against timm's pieces, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.task import LogitDistillationTask
from torch import nn

from dali_train.config import Config, ConfigError, DataConfig, LossConfig, ModelConfig
from dali_train.extras.distillation import DISTILLATIONS, Teacher
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


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_distillation_is_timms(temperature: float) -> None:
    student, teacher = (timm.create_model("test_vit", num_classes=CLASSES).eval() for _ in range(2))
    student.pretrained_cfg = teacher.pretrained_cfg
    images, labels = torch.randn(4, 3, 160, 160), torch.tensor([0, 1, 2, 3])
    task = LogitDistillationTask(
        student, teacher, criterion=nn.CrossEntropyLoss(), task_loss_weight=0.3, temperature=temperature, verbose=False
    )
    expected = task.eval()(images, labels)["loss"]

    config = LossConfig(distillation="soft", distillation_weight=0.7, temperature=temperature, teacher="test_vit")
    with torch.no_grad():
        logits, answers = student(images), teacher(images)
    loss = 0.3 * F.cross_entropy(logits, labels) + 0.7 * DISTILLATIONS["soft"](config, logits, answers)
    torch.testing.assert_close(loss, expected)


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


@pytest.fixture
def teacher_file(tmp_path: Path) -> tuple[str, nn.Module]:
    """A safetensors file with a teacher's weights, and the teacher."""
    torch.manual_seed(1)
    teacher = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    path = tmp_path / "teacher.safetensors"
    save_file(teacher.state_dict(), path)
    return str(path), teacher


def test_the_teacher_sees_the_images_as_it_was_trained(teacher_file: tuple[str, nn.Module]) -> None:
    path, teacher = teacher_file
    settings = LossConfig(distillation="hard", distillation_weight=1.0, teacher="test_resnet", teacher_weights=path)
    ours = Teacher(config_with(settings), CLASSES, torch.device("cpu"))
    pixels = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(teacher.pretrained_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = teacher((pixels - mean) / std)
    answers = ours.logits((pixels * 255 - 127.5) / 127.5)
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)
    assert not answers.requires_grad

    logits = torch.randn(4, CLASSES)
    objective = make_objective(config_with(settings), nn.Identity(), CLASSES, torch.device("cpu"))
    nothing, ones = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4)
    loss, seen = objective(logits, (pixels * 255 - 127.5) / 127.5, nothing, ones)
    assert seen is logits
    torch.testing.assert_close(loss, F.cross_entropy(logits, expected.argmax(dim=1)))


def test_the_distillation_token_learns_from_the_teacher_and_the_class_token_from_the_labels(
    teacher_file: tuple[str, nn.Module],
) -> None:
    path, _ = teacher_file
    settings = LossConfig(distillation="hard", distillation_weight=0.25, teacher="test_resnet", teacher_weights=path)
    student = timm.create_model(
        "deit_tiny_distilled_patch16_224",
        num_classes=CLASSES,
        img_size=32,
        patch_size=16,
        embed_dim=16,
        depth=1,
        num_heads=1,
    )
    objective = make_objective(config_with(settings), student, CLASSES, torch.device("cpu"))
    images, targets = torch.randn(4, 3, 32, 32), torch.randint(CLASSES, (4, 2))
    output = student.train()(images)
    assert isinstance(output, tuple)
    loss, logits = objective(output, images, targets, torch.ones(4))
    answers = Teacher(config_with(settings), CLASSES, torch.device("cpu")).logits(images)
    assert logits is output[0]
    expected = 0.75 * F.cross_entropy(output[0], targets[:, 0]) + 0.25 * F.cross_entropy(
        output[1], answers.argmax(dim=1)
    )
    torch.testing.assert_close(loss, expected)


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
        (TEACHER | {"distillation": "hard", "temperature": 3.0}, "temperature is 3.0 with loss.distillation hard"),
        (TEACHER | {"temperature": 0.0}, "temperature is 0.0"),
        (TEACHER | {"distillation_weight": 0.0}, "distillation_weight is 0.0"),
    ],
)
def test_losses_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)


def test_teachers_that_cannot_teach_are_refused(teacher_file: tuple[str, nn.Module]) -> None:
    path, _ = teacher_file

    def teacher(num_classes: int = CLASSES, **settings: Any) -> Teacher:
        return Teacher(config_with(LossConfig(distillation="hard", **settings)), num_classes, torch.device("cpu"))

    with pytest.raises(
        ConfigError, match=r"loss.teacher is 'test_resent', which timm does not know; close: .*test_resnet"
    ):
        teacher(teacher="test_resent", teacher_weights=path)
    with pytest.raises(ConfigError, match=r"loss.teacher: there is no file /nowhere.safetensors"):
        teacher(teacher="test_resnet", teacher_weights="/nowhere.safetensors")
    with pytest.raises(ConfigError, match=r"has 7 classes, the dataset 5: use weights trained on these"):
        teacher(num_classes=5, teacher="test_resnet", teacher_weights=path)
    with pytest.raises(
        ConfigError, match=r"loss.teacher: .* does not fit test_vit with {}: .* more. Set loss.teacher to"
    ):
        teacher(teacher="test_vit", teacher_weights=path)


def test_a_teacher_takes_images_of_its_models_size(tmp_path: Path) -> None:
    """Not of the architecture's usual size."""
    model = timm.create_model("test_vit", num_classes=CLASSES, img_size=32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": "test_vit", "num_classes": CLASSES, "model_args": {"img_size": 32}}
    usual = {"input_size": [3, 160, 160], "fixed_input_size": True, "mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "config.json").write_text(json.dumps({**described, "pretrained_cfg": usual}))
    settings = LossConfig(distillation="hard", teacher=f"local-dir:{tmp_path}")
    Teacher(config_with(settings), CLASSES, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"loss.teacher \S+ takes images of 32 pixels, data.train_size is 160"):
        Teacher(config_with(settings, size=160), CLASSES, torch.device("cpu"))
