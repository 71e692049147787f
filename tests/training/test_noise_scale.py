"""The gradient noise scale: against its definition, and the same in every layout."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import Parallel
from dali_train.training.metrics import NOISE_EVERY_STEPS, NoiseScale
from tests.conftest import Train
from tests.helpers import events, words

CPU = torch.device("cpu")


def gradients_of_images(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of the loss of each image by parameter, (images, ...)."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    by_name: dict[str, torch.Tensor] = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    return by_name


def test_the_estimate_is_within_a_tenth_of_a_direct_one() -> None:
    """The median of 8 estimates, each over about 50 measurements, against tr(S) / |G|^2 of 2,000 images."""
    num_micro_batches, micro_batch = 8, 16
    torch.manual_seed(0)
    labels = torch.randint(5, (2000,))
    images = torch.randn(5, 12)[labels] / 2 + torch.randn(2000, 12)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 5))
    by_name = gradients_of_images(model, images, labels)
    rows = torch.cat([gradient.flatten(1) for gradient in by_name.values()], dim=1)
    true = rows.mean(0)
    direct = ((rows - true).square().sum(1).mean() / true.square().sum()).item()

    scale = torch.tensor(1024.0)  # float16's
    noise = NoiseScale(Parallel(model, Layout(rank=0), 0), num_micro_batches, micro_batch, CPU)
    estimates = []
    for measurement in range(1, 401):
        chosen = torch.randint(2000, (num_micro_batches * micro_batch,))
        noise.begin_step(measurement * NOISE_EVERY_STEPS, scale)
        for name, parameter in model.named_parameters():
            parameter.grad = by_name[name][chosen[:micro_batch]].mean(0) * scale / num_micro_batches
        noise.add_first_micro_batch(model)
        noise.finish_step(rows[chosen].mean(0).norm())
        if measurement % 50 == 0:
            estimate = noise.read()
            assert estimate is not None
            estimates.append(estimate)
    assert torch.tensor(estimates).median().item() == pytest.approx(direct, rel=0.1)


def test_an_overflow_is_not_averaged() -> None:
    model = nn.Linear(2, 1, bias=False)
    noise = NoiseScale(Parallel(model, Layout(rank=0), 0), 2, 4, CPU)
    for step, (small, large) in enumerate([(3.0, 2.0), (float("inf"), float("nan")), (3.0, 2.0)]):
        noise.begin_step(step * NOISE_EVERY_STEPS, torch.ones(()))
        model.weight.grad = torch.tensor([[small**0.5, 0.0]]) / 2
        noise.add_first_micro_batch(model)
        noise.finish_step(torch.tensor(large).sqrt())
    # Micro-batches of 4 images: tr(S) = 4 * (3 - 2) / (1 - 1/2) = 8, |G|^2 = (2 * 2 - 3) / (2 - 1) = 1.
    assert noise.read() == pytest.approx(8)


# With most other seeds these 32 images are too few to tell the gradient from the noise.
ONE_MEASUREMENT = words(
    "--run.max_steps 1 --precision.dtype fp64 --run.eval_every_epochs none --batch.micro_batch 16 --data.seed 5"
)


@pytest.mark.thorough
def test_it_does_not_depend_on_the_layout(train: Train, tmp_path: Path) -> None:
    def estimate(name: str, *options: str, ranks: int = 1) -> float | None:
        train(name, *ONE_MEASUREMENT, *options, ranks=ranks)
        (event,) = events(tmp_path / name, "train")
        value: float | None = event.get("noise_scale")
        return value

    one = estimate("one")
    assert one is not None and one > 0
    assert estimate("two", ranks=2) == pytest.approx(one, rel=1e-9)  # as many ranks as micro-batches
    assert estimate("pipeline", "--parallel.pipeline", "2", ranks=2) == pytest.approx(one, rel=1e-9)
    assert estimate("sharded", "--parallel.shard", "full", ranks=2) is None
    assert estimate("whole", "--batch.micro_batch", "32") is None
