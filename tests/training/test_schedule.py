"""Learning rates, value by value against timm's schedulers, big_vision's formula and the arithmetic itself."""

import math
from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler, WSDLRScheduler
from timm.scheduler.scheduler import Scheduler

from dali_train.config import Config, ConfigError
from dali_train.training.schedule import SCHEDULES, learning_rate, peak_learning_rate
from tests.config.test_config import PLAIN

IMAGES, BATCH, EPOCHS, PEAK = 1000, 100, 20, 5e-3
STEPS = 10  # per epoch


def config(optimizer: dict[str, Any] | None = None, batch: int = BATCH, **schedule: Any) -> Config:
    return PLAIN.replace(
        {"batch.global_batch": batch, "batch.micro_batch": 10, "run.epochs": EPOCHS},
        optimizer={"lr": PEAK, **(optimizer or {})},
        schedule={"warmup_epochs": 0, **schedule},
    )


def of_timm(kind: type[Scheduler], unit: str, **arguments: Any) -> list[float]:
    """The rates of all steps, from a real scheduler, stepped as timm's own training script does it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = kind(optimizer, t_in_epochs=unit == "epoch", **arguments)
    rates = []
    for step in range(EPOCHS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(step + 1)
        if (step + 1) % STEPS == 0:
            scheduler.step((step + 1) // STEPS)
    return rates


@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        (CosineLRScheduler, {"name": "cosine", "min_lr": 1e-6}, {"lr_min": 1e-6}),
        (PolyLRScheduler, {"name": "polynomial", "min_lr": 1e-5, "power": 2.0}, {"lr_min": 1e-5, "power": 2.0}),
        (PolyLRScheduler, {"name": "linear"}, {"power": 1.0}),
        (StepLRScheduler, {"name": "step", "decay_epochs": 4.0, "decay_rate": 0.3}, {"decay_t": 4, "decay_rate": 0.3}),
        (
            MultiStepLRScheduler,
            {"name": "multistep", "milestones": (4, 9, 11.0), "decay_rate": 0.3, "min_lr": 0.0},
            {"decay_t": [4, 9, 11], "decay_rate": 0.3},
        ),
        (WSDLRScheduler, {"name": "wsd", "decay_epochs": 6.0, "min_lr": 1e-5}, {"decay_t": 6, "lr_min": 1e-5}),
        (
            WSDLRScheduler,
            {"name": "warmup-stable-decay", "decay_epochs": 6.0, "min_lr": 1e-5},
            {"decay_t": 6, "lr_min": 1e-5, "decay_fn": "linear"},
        ),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else None,
)
def test_rates_are_those_of_timm(
    kind: type[Scheduler], ours: dict[str, Any], theirs: dict[str, Any], warmup: int, prefix: bool, unit: str
) -> None:
    scale = 1 if unit == "epoch" else STEPS
    arguments = dict(theirs, warmup_t=warmup * scale, warmup_lr_init=1e-6, warmup_prefix=prefix)
    if kind is MultiStepLRScheduler:  # which decays one of its units early
        arguments["decay_t"] = [time * scale + 1 for time in theirs["decay_t"]]
    elif "decay_t" in theirs:
        arguments["decay_t"] = theirs["decay_t"] * scale
    if kind is WSDLRScheduler:  # whose warmup always is a prefix
        del arguments["warmup_prefix"]
        arguments["t_initial"] = (EPOCHS - warmup) * scale
    elif "decay_t" not in theirs:  # timm's cycle begins after a warmup that is a prefix, so it is the rest of the run
        arguments["t_initial"] = (EPOCHS - (warmup if prefix else 0)) * scale
    settings = config(
        **ours, warmup_epochs=warmup, warmup_lr=1e-6, step_every=unit, decay_from="warmup-end" if prefix else "start"
    )
    rates = [learning_rate(settings, step, IMAGES) for step in range(EPOCHS * STEPS)]
    assert rates == pytest.approx(of_timm(kind, unit, **arguments), rel=1e-12)


def test_cosine_is_big_visions() -> None:
    warmup = 37
    total = EPOCHS * STEPS
    settings = config(name="cosine", warmup_epochs=warmup / STEPS, warmup_lr=0.0)
    for step in range(total):
        progress = min(max((step - warmup) / (total - warmup), 0), 1)
        expected = PEAK * 0.5 * (1 + math.cos(math.pi * progress)) * min(1, step / warmup)
        assert learning_rate(settings, step, IMAGES) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_linear_is_colossalais_to_the_last_bit() -> None:
    settings, warmup, total = config(warmup_epochs=3), 30, EPOCHS * STEPS
    for step in range(total):
        expected = PEAK * (step + 1) / (warmup + 1) if step < warmup else PEAK * (total - step) / (total - warmup)
        assert learning_rate(settings, step, IMAGES) == expected


def test_warmup_stable_decay() -> None:
    settings = config(name="warmup-stable-decay", warmup_epochs=2, decay_epochs=5.0, min_lr=1e-4)
    rates = [learning_rate(settings, step, IMAGES) for step in range(EPOCHS * STEPS + 1)]
    assert rates[19] < PEAK
    assert set(rates[20:151]) == {PEAK}
    assert rates[175] == pytest.approx((PEAK + 1e-4) / 2)
    assert rates[200] == 1e-4
    square = config(name="warmup-stable-decay", decay_epochs=5.0, power=2.0)
    assert learning_rate(square, 175, IMAGES) == pytest.approx(PEAK / 4)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_decay_that_ends_before_the_run(name: str, unit: str) -> None:
    """As if the run ended there, then at the minimum."""
    early = config(name=name, warmup_epochs=2, decay_epochs=8.0, min_lr=1e-4, step_every=unit)
    ending = early.replace({"run.epochs": 10, "schedule.decay_epochs": None})
    expected = [learning_rate(ending, step, IMAGES) for step in range(10 * STEPS)]
    rates = [learning_rate(early, step, IMAGES) for step in range(EPOCHS * STEPS)]
    assert rates == expected + [1e-4] * (10 * STEPS)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_every_schedule_starts_its_decay_at_the_peak_and_ends_above_its_minimum(name: str, unit: str) -> None:
    needed: dict[str, dict[str, Any]] = {name: {"decay_epochs": 4.0} for name in ("step", "warmup-stable-decay", "wsd")}
    more = (needed | {"multistep": {"milestones": (3, 9)}}).get(name, {})
    settings = config(name=name, warmup_epochs=2, min_lr=1e-5, step_every=unit, **more)
    rates = [learning_rate(settings, step, IMAGES) for step in range(EPOCHS * STEPS + 5)]
    assert rates[20] == pytest.approx(PEAK)
    assert min(rates[20:]) >= 1e-5
    assert rates[20:] == sorted(rates[20:], reverse=True)


@pytest.mark.parametrize(("scale", "factor"), [("none", 1), ("linear", 10), ("sqrt", 10**0.5)])
def test_the_peak_follows_the_batch_if_asked_to(scale: str, factor: float) -> None:
    settings = config({"scale_lr": scale}, batch=2560)
    assert peak_learning_rate(settings) == pytest.approx(factor * PEAK)
    assert learning_rate(settings, 0, IMAGES) == pytest.approx(factor * PEAK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_lr": -1e-6}, "warmup_lr is -1e-06: use a"),
        ({"min_lr": -1.0}, "min_lr is -1.0: use a"),
        ({"name": "polynomial", "power": 0.0}, "power is 0.0: use a"),
        (
            {"name": "step", "decay_epochs": 2.0, "decay_rate": 1.5},
            "decay_rate is 1.5: use a factor over 0 and up to 1",
        ),
        (
            {"name": "cosine", "decay_epochs": 19.0, "warmup_epochs": 2},
            "schedule.decay_epochs 19.0 after schedule.warmup_epochs 2 exceeds run.epochs 20: shorten",
        ),
        (
            {"name": "warmup-stable-decay", "decay_epochs": 18.0, "warmup_epochs": 3},
            "schedule.decay_epochs 18.0 after schedule.warmup_epochs 3 exceeds run.epochs 20: shorten",
        ),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)
