"""docs/extending.md, tried: an operator, an optimizer and a tracker of one's own, each added in its one place."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dali_train
from dali_train.checkpoint.load import load_newest
from dali_train.data.loading.augment import OPERATORS, Operator, none
from dali_train.hooks.trackers import TRACKERS, Tracker

from .conftest import REPOSITORY, TINY_CONFIG


class SignDescent(torch.optim.Optimizer):
    """Steps of one length along the gradient's sign, with a count of them."""

    def __init__(self, params: object, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
                    self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


class Collected(Tracker):
    scalars: dict[str, list[float]] = {}

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.scalars.setdefault(name, []).append(value)

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        pass


def test_an_operator_an_optimizer_and_a_tracker(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def upside_down(image: torch.Tensor, _: float) -> torch.Tensor:
        seen.append(image.shape)
        return image.flip(-2)

    monkeypatch.setitem(OPERATORS, "UpsideDown", Operator(none, upside_down, lambda images, _: images))
    dali_train.register_optimizer("signdescent", SignDescent)
    monkeypatch.setattr(Collected, "scalars", {})
    monkeypatch.setitem(TRACKERS, "collected", Collected)

    path = tmp_path / "config.py"
    path.write_text(TINY_CONFIG.format(root=str(dataset)))
    config = dali_train.load_config(path).replace(
        {
            "run.dir": str(tmp_path / "run"),
            "run.max_steps": 2,
            "data.augment": "rand-n1-p1-tUpsideDown",
            "optimizer.name": "signdescent",
            "optimizer.lr": 1e-3,
            "hooks.trackers": ("collected",),
        }
    )
    dali_train.run(config)

    assert len(seen) >= 2 * 32 and set(seen) == {torch.Size([3, 32, 32])}
    newest, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.values["optimizer"]["class"] == "SignDescent"
    assert set(newest.values["optimizer"]["numbers"].values()) == {2}
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert Collected.scalars["train/loss"] == [event["loss"] for event in events if event["event"] == "train"]


def test_the_documents_name_files_that_exist() -> None:
    for document in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        missing = [link for link in links if not (document.parent / link).exists()]
        assert not missing, (document.name, missing)
    text = (REPOSITORY / "docs" / "extending.md").read_text()
    assert all((REPOSITORY / name).exists() for name in re.findall(r"tests/[\w/]+\.py", text))
