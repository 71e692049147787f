"""A teacher as a second source of targets."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.task import LogitDistillationTask
from torch import nn

from dali_train.config import ConfigError, LossConfig
from dali_train.extras.distillation.teacher import DISTILLATIONS, Teacher, check_classes
from dali_train.training.loss import make_objective
from tests.training.test_loss import CLASSES, config_with


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


@pytest.fixture
def teacher_file(tmp_path: Path) -> tuple[str, nn.Module]:
    """A safetensors file with a teacher's weights, and the teacher."""
    torch.manual_seed(1)
    teacher = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    path = tmp_path / "teacher.safetensors"
    save_file(teacher.state_dict(), path)
    return str(path), teacher


def test_a_teacher_of_other_classes_is_refused(teacher_file: tuple[str, nn.Module]) -> None:
    """A file beside timm's config.json knows its classes; without common names nothing is known."""
    path, _ = teacher_file
    theirs = ["1", "2", "10", "cat", "Owl"]
    Path(path).with_name("config.json").write_text(json.dumps({"label_names": theirs}))
    settings = LossConfig(distillation="hard", teacher="test_resnet", teacher_weights=path)
    for names in (theirs, ["a", "b", "c", "d", "e"], []):
        check_classes(settings, names)
    refusal = r"loss\.teacher_weights .*: its classes, from '1' to 'Owl', are not those of"
    with pytest.raises(ConfigError, match=refusal):
        check_classes(settings, ["1", "10", "2", "Owl", "cat"])


@pytest.mark.parametrize("described_by", ["timm", "export", "run"])
def test_the_teacher_sees_the_images_as_it_was_trained(teacher_file: tuple[str, nn.Module], described_by: str) -> None:
    """As timm's model was, or as the config.json beside its weights says."""
    path, teacher = teacher_file
    if described_by != "timm":
        own = {"mean": [0.5, 0.25, 0.75], "std": [0.1, 0.2, 0.3]}
        teacher.pretrained_cfg.update(own)
        pixels = tuple(tuple(255 * value for value in own[name]) for name in ("mean", "std"))
        run = config_with(LossConfig()).replace({"data.normalise": pixels})
        described = run.to_json() if described_by == "run" else json.dumps({"pretrained_cfg": own})
        Path(path).with_name("config.json").write_text(described)
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
        ConfigError, match=r"loss.teacher: .* has other names than timm's test_vit .*: set loss.teacher to"
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
