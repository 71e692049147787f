"""The learning rate as a pure function of the optimizer step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dali_train.config import Config, ScheduleConfig
from dali_train.config.check import lookup

_SCALED_FROM = 256  # the global batch at which a scaled optimizer.lr is the peak


@dataclass(frozen=True, kw_only=True)
class Span:
    """A step's position in the decay. Times are optimizer steps, or epochs if the rate changes once per epoch."""

    elapsed: float  # since the start of the decay; less than `total`
    total: float
    decay: float | None  # schedule.decay_epochs
    milestones: tuple[float, ...]  # schedule.milestones, since the start of the decay


def _linear(settings: ScheduleConfig, peak: float, span: Span) -> float:
    return settings.min_lr + (peak - settings.min_lr) * (span.total - span.elapsed) / span.total


def _cosine(settings: ScheduleConfig, peak: float, span: Span) -> float:
    return settings.min_lr + 0.5 * (peak - settings.min_lr) * (1 + math.cos(math.pi * span.elapsed / span.total))


def _polynomial(settings: ScheduleConfig, peak: float, span: Span) -> float:
    return settings.min_lr + (peak - settings.min_lr) * (1 - span.elapsed / span.total) ** settings.power


def _step(settings: ScheduleConfig, peak: float, span: Span) -> float:
    assert span.decay is not None
    return max(settings.min_lr, peak * settings.decay_rate ** (span.elapsed // span.decay))


def _multistep(settings: ScheduleConfig, peak: float, span: Span) -> float:
    return max(settings.min_lr, peak * settings.decay_rate ** sum(time <= span.elapsed for time in span.milestones))


def _warmup_stable_decay(settings: ScheduleConfig, peak: float, span: Span) -> float:
    assert span.decay is not None
    left = min(1.0, (span.total - span.elapsed) / span.decay)
    return settings.min_lr + (peak - settings.min_lr) * left**settings.power


def _wsd(settings: ScheduleConfig, peak: float, span: Span) -> float:
    left = span.total - span.elapsed
    if span.decay is None or left >= span.decay:  # exactly the peak, so that branches share the trunk's rates
        return peak
    return settings.min_lr + (peak - settings.min_lr) * (1 - math.sqrt(1 - left / span.decay))


Schedule = Callable[[ScheduleConfig, float, Span], float]
SCHEDULES: dict[str, Schedule] = {
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "step": _step,
    "multistep": _multistep,
    "warmup-stable-decay": _warmup_stable_decay,
    "wsd": _wsd,
}
"""Each takes the settings, the peak rate and the position in the decay, and returns the rate after the warmup."""


def schedule_of(settings: ScheduleConfig) -> Schedule:
    """Return the row of `SCHEDULES` that schedule.name names.

    Raises:
        ConfigError: there is none.
    """
    return lookup(SCHEDULES, "schedule.name", settings.name)


def learning_rate(config: Config, step: int, num_images: int) -> float:
    """Return the learning rate of optimizer step number `step` (from 0).

    Let t be the step (or the epoch in which it begins, if the rate changes once per epoch) and W the length of the
    warmup. While t < W, the rate is (t + 1) / (W + 1) of the peak, or warmup_lr + (peak - warmup_lr) * t / W if
    schedule.warmup_lr is set. Then it follows one of `SCHEDULES`. The linear one, from W to the end T, is
    (T - t) / (T - W) of the peak, as in ColossalAI's LinearWarmupLR, which its ViT example steps once per epoch. T is
    the end of the run, or of a decay that schedule.decay_epochs makes shorter; from T on the rate is min_lr.
    """
    schedule = config.schedule
    peak = peak_learning_rate(config)
    now, warmup, total = _times(config, step, num_images)
    if now < warmup:
        if schedule.warmup_lr is None:
            return peak * (now + 1) / (warmup + 1)
        return schedule.warmup_lr + now * ((peak - schedule.warmup_lr) / warmup)
    start = warmup if schedule.decay_from == "warmup-end" else 0.0
    decay, milestones = schedule.decay_epochs, schedule.milestones
    if schedule.step_every == "step":
        decay = decay if decay is None else float(config.steps(decay, num_images))
        milestones = tuple(float(config.steps(epoch, num_images)) for epoch in milestones)
    if decay is not None and schedule.name in ("linear", "cosine", "polynomial"):
        total = min(total, start + decay)
    if now >= total and schedule.name not in ("step", "multistep"):
        return schedule.min_lr
    span = Span(elapsed=now - start, total=total - start, decay=decay, milestones=milestones)
    return schedule_of(schedule)(schedule, peak, span)


def peak_learning_rate(config: Config) -> float:
    """Return optimizer.lr, scaled with the global batch as optimizer.scale_lr says."""
    optimizer = config.optimizer
    ratio = config.batch.global_batch / _SCALED_FROM
    return optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.scale_lr]


def describe_peak(config: Config) -> str:
    """Return ``peak 0.025: optimizer.lr 0.1 is for a global batch of 256, scale_lr linear``, or ``peak 0.1``."""
    optimizer = config.optimizer
    peak = f"peak {peak_learning_rate(config):.4g}"
    if optimizer.scale_lr == "none":
        return peak
    return (
        f"{peak}: optimizer.lr {optimizer.lr:g} is for a global batch of {_SCALED_FROM}, scale_lr {optimizer.scale_lr}"
    )


def _times(config: Config, step: int, num_images: int) -> tuple[float, float, float]:
    """Return (now, warmup, total) in steps, or in epochs if the rate changes once per epoch."""
    schedule = config.schedule
    if schedule.step_every == "epoch":
        return float(step * config.batch.global_batch // num_images), schedule.warmup_epochs, config.run.epochs
    warmup, total = (float(config.steps(n, num_images)) for n in (schedule.warmup_epochs, config.run.epochs))
    return float(step), warmup, total
