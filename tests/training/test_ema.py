"""The moving average of the weights: timm's numbers. What runs do with it is shown with the recipes' options, split
models and exported runs."""

from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from dali_train.config import EmaConfig
from dali_train.training.invariant import RunningStatistics
from dali_train.training.optim import Ema, ema_decay


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"decay": 0.9}, {"decay": 0.9}), ({"decay": 0.8, "warmup": True}, {"decay": 0.8, "use_warmup": True})],
)
def test_the_average_is_timms(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    model = network()
    average, reference = Ema(model, EmaConfig(**ours), 12), ModelEmaV3(model, **theirs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(12):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        average.update(step)
        reference.update(model, step=step + 1)  # timm counts the steps that are done
        assert ema_decay(EmaConfig(**ours), step, 12) == reference.get_decay(step + 1)
    expected = reference.module.state_dict()
    assert average.state().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in average.state().items())
    assert not torch.equal(average.state()["0.weight"], model.state_dict()["0.weight"])


def test_a_model_has_the_averages_only_for_a_while() -> None:
    model = network()
    average = Ema(model, EmaConfig(decay=0.9), 12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    average.load({name: torch.ones_like(tensor) for name, tensor in before.items()})
    with pytest.raises(ZeroDivisionError), average.weights_in(model):
        assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    average.begin()
    assert all(torch.equal(tensor, before[name]) for name, tensor in average.state().items())


def test_lookahead_trains_on_from_the_average() -> None:
    """Zhang et al., arXiv 1907.08610, algorithm 1: every k steps the slow weights move towards the fast ones."""
    model = network()
    average = Ema(model, EmaConfig(decay=0.8, power=3, every_steps=2, lookahead=True), 10)
    statistics = RunningStatistics(model)
    slow = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        statistics.add_micro_batch()
        statistics.finish_step(1)
        fast = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert average.update(step) == (step % 2 == 1)
        if step % 2:
            decay = 0.8 * ((step + 1) / 10) ** 3
            slow = {name: tensor * decay + fast[name] * (1 - decay) for name, tensor in slow.items()}
            statistics.begin()
        expected = slow if step % 2 else fast
        torch.testing.assert_close(
            dict(model.named_parameters()), {n: expected[n] for n, _ in model.named_parameters()}
        )
        torch.testing.assert_close(model.state_dict()["1.running_var"], expected["1.running_var"])
        torch.testing.assert_close(average.state()["1.running_mean"], slow["1.running_mean"])
