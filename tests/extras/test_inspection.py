"""LAMB's trust ratios are those of its steps; a profile of steps that do not come."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from dali_train.config import OptimizerConfig
from dali_train.extras.inspection import LambView, Profile
from dali_train.hooks import RunEnd, RunStart
from dali_train.parallel.layout import Layout
from dali_train.training.optim import make_optimizer
from tests.conftest import (
    Train,
)
from tests.helpers import PIPELINE, events


@pytest.mark.parametrize(("first", "message"), [(8, "ends after step 7: no trace"), (4, "step 4 is done already")])
def test_a_profile_of_other_steps(first: int, message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    hook = Profile(first, 9)
    hook.start(cast(RunStart, SimpleNamespace(total_steps=7, start_step=4, directory=tmp_path)))
    hook.end(cast(RunEnd, None))
    assert f"hooks.profile is {first} 9" in caplog.text and message in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("exclude_vectors", [False, True])
def test_lambs_view_is_what_lamb_does(tmp_path: Path, bias_correction: bool, exclude_vectors: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    kwargs = {"bias_correction": bias_correction}
    config = OptimizerConfig(lr=0.1, weight_decay=0.01, kwargs=kwargs, exclude_vectors=exclude_vectors)
    optimizer, unwatched = make_optimizer(model, config), copy.deepcopy(model)
    other = make_optimizer(unwatched, config)
    hook = LambView(Layout(rank=0), every_steps=1)
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    for _ in range(3):
        images = torch.randn(8, 4, dtype=torch.float64)
        model(images).square().sum().backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        optimizer.step()
        optimizer.zero_grad()
        unwatched(images).square().sum().backward()
        other.step()
        other.zero_grad()
        assert all(map(torch.equal, model.parameters(), unwatched.parameters())), "it changes nothing"
        moved = {
            name: (parameter.detach() - before[name]).norm().item() for name, parameter in model.named_parameters()
        }
        measured = hook.measure()
        layers = json.loads((tmp_path / "lamb.jsonl").read_text().splitlines()[-1])["layers"]
        assert {name: update for name, (_, _, update, _) in layers.items()} == pytest.approx(moved)
        for name, (ratio, weight, update, _) in layers.items():
            adapted = not (exclude_vectors and name.endswith("bias"))
            assert (update == pytest.approx(0.1 * weight)) == adapted, (
                "LAMB moves an adapted layer by lr times its norm"
            )
            assert (ratio == 1) != adapted
        assert measured["clipped_grad_norm"] == pytest.approx(gradient)
        assert measured["weight_norm"] == pytest.approx(sum(w.square().sum().item() for w in before.values()) ** 0.5)
    assert hook.measure() == {}, "nothing new"


def test_a_layer_without_gradient_is_not_in_the_trust_ratios(tmp_path: Path) -> None:
    """As in the first step of a timm ResNet, whose last norm of each block begins with gamma 0."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=1e-4))
    hook = LambView(Layout(rank=0), every_steps=1)
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    measured = hook.measure()
    layers = json.loads((tmp_path / "lamb.jsonl").read_text())["layers"]
    assert layers["0.weight"][0] > 1000 and layers["0.weight"][3] == 0
    assert measured["trust_ratio_max"] < 100


def test_ranks_that_split_a_model_go_on_without_lambs_view(train: Train, tmp_path: Path) -> None:
    """They compute it together, also if rank 0 cannot write it."""
    (tmp_path / "run" / "lamb.jsonl").mkdir(parents=True)
    output = train("run", *PIPELINE, "--run.max_steps", "1", ranks=2)
    assert "lamb.jsonl cannot be written" in output
    assert all("trust_ratio_min" not in event for event in events(tmp_path / "run", "train"))


def test_a_model_without_lamb_has_no_trust_ratios(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    hook = LambView(Layout(rank=0), every_steps=1)
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert hook.measure() == {} and not (tmp_path / "lamb.jsonl").exists()
    hook.end(cast(RunEnd, None))
