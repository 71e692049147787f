"""Hooks that look into a run: a profiler's trace of some steps, and LAMB's trust ratios by layer."""

import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import Lamb
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity

from dali_train.config import HooksConfig
from dali_train.hooks import Hook
from dali_train.hooks.jsonl import JsonLines
from dali_train.hooks.records import RunEnd, RunStart, StepRecord
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import Shardwise

logger = logging.getLogger("dali_train")


def make_hooks(config: HooksConfig, layout: Layout) -> list[Hook]:
    hooks: list[Hook] = []
    # No rank has all layers of a split model, so all ranks compute its norms together.
    if layout.rank == 0 or layout.splits_model:
        hooks.append(LambView(layout))
    if layout.rank == 0 and config.profile is not None:
        hooks.append(Profile(*config.profile))
    return hooks


class Profile(Hook):
    """Traces the steps `first` to `last` (counted from 1, as on the console) of this rank.

    ``profile/steps-A-B.rank0.json.gz`` opens in https://ui.perfetto.dev; ``profile/steps-A-B.txt`` lists the most
    expensive operators. The same phases are NVTX ranges for Nsight Systems.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profiler: torch.profiler.profile | None = None

    def start(self, record: RunStart) -> None:
        self._start = record
        asked = f"hooks.profile is {self._first} {self._last}, but"
        if self._first > record.total_steps:
            logger.warning(
                f"{asked} the run ends after step {record.total_steps}: no trace is written; choose earlier steps"
            )
        elif self._first <= record.start_step:
            logger.warning(f"{asked} step {record.start_step} is done already: no trace is written; choose later steps")
        elif self._last > record.total_steps:
            logger.warning(f"{asked} the run ends after step {record.total_steps}: the trace ends there too")
        if record.start_step + 1 == self._first:
            self._begin()

    def step(self, record: StepRecord) -> None:
        if record.step + 1 == self._first:
            self._begin()
        elif record.step == self._last:
            self._finish()

    def end(self, record: RunEnd) -> None:
        self._finish()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # acc_events: torch 2.15 warns that events of earlier cycles are dropped otherwise; there is only one cycle.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._start.clock.annotate(True)

    def _finish(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._start.clock.annotate(False)
        profiler.stop()
        directory = self._start.directory / "profile"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first}-{self._last}"
        trace = directory / f"{name}.rank{self._start.launch.rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (directory / f"{name}.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=40))
        logger.info(f"profile of steps {self._first} to {self._last}: {trace} (opens in https://ui.perfetto.dev)")


EVERY_STEPS = 50


class LambView(Hook):
    """Trust ratios, weight norms and update norms of the first step and every `EVERY_STEPS`, computed just before LAMB
    steps.

    LAMB moves a weight w by lr * |w| / |r| * r, with r = m / (sqrt(v) + eps) + weight_decay * w; |w| / |r| is the trust
    ratio. LAMB stores neither, so r is computed from the gradient and the moments before the step, layer by layer,
    without copying weights. This never waits for the device: `measure` reads after the loop has waited. All layers are
    written to ``lamb.jsonl``; the scalars are minimum, median and maximum over the layers with a gradient. Without a
    gradient, as behind the zero gammas at the start of timm's ResNets, the ratio is 1 / weight_decay and meaningless.
    With other optimizers, which have no trust ratio, the hook does nothing.
    """

    def __init__(self, layout: Layout, every_steps: int = EVERY_STEPS) -> None:
        self._layout, self._every_steps = layout, every_steps

    def start(self, record: RunStart) -> None:
        self._pending: tuple[int, list[str], torch.Tensor] | None = None
        self._file: JsonLines | None = None
        if not isinstance(record.optimizer, Lamb):
            return
        self._names = {parameter: name for name, parameter in record.model.named_parameters()}
        if self._layout.rank == 0:
            path = record.directory / "lamb.jsonl"
            try:
                self._file = JsonLines(path, record.start_step)
            except OSError as error:  # computed all the same, with the other ranks
                logger.warning(
                    f"{path} cannot be written ({error.strerror}): trust ratios are not recorded. Training continues; "
                    "move it away or free some space, and start again to record them"
                )
        self._step = record.start_step
        record.optimizer.register_step_pre_hook(self._before_step)

    def measure(self) -> Mapping[str, float]:
        if self._pending is None:
            return {}
        (step, names, values), self._pending = self._pending, None
        layers = dict(zip(names, values.tolist(), strict=True))
        if self._layout.pipeline > 1:
            stages: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
            dist.all_gather_object(stages, layers)
            layers = {name: row for stage in stages for name, row in stage.items()}
        if self._file is None:  # rank 0 writes
            return {}
        if not all(math.isfinite(value) for row in layers.values() for value in row):
            return {}  # the step was skipped for an overflow, there is nothing to see
        self._file.write({"step": step, "layers": layers})
        ratios, weights, updates, gradients = zip(*layers.values(), strict=True)
        reached = [ratio for ratio, gradient in zip(ratios, gradients, strict=True) if gradient > 0] or ratios
        return {
            "trust_ratio_min": min(reached),
            "trust_ratio_median": statistics.median(reached),
            "trust_ratio_max": max(reached),
            "weight_norm": _norm(weights),
            "update_norm": _norm(updates),
            "clipped_grad_norm": _norm(gradients),
        }

    def end(self, record: RunEnd) -> None:
        if self._file is not None:
            self._file.close()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        if self._step % self._every_steps and self._step != 1:
            return
        names, rows = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    names.append(self._names[parameter])
                    with Shardwise():
                        rows.append(_layer(parameter, optimizer.state.get(parameter, {}), group))
        self._pending = self._step, names, torch.stack(rows)


def _layer(parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
    """Return (trust ratio, norm of the weight, of its update, of its gradient) of one parameter in the coming step."""
    gradient, step = parameter.grad, int(group.get("step", 0)) + 1  # LAMB's own count is on the host
    assert gradient is not None
    beta1, beta2 = group["betas"]
    first = gradient * (1 - beta1)
    second = gradient.square() * (1 - beta2)
    if state:
        first.add_(state["exp_avg"], alpha=beta1)
        second.add_(state["exp_avg_sq"], alpha=beta2)
    if group["bias_correction"]:
        first.div_(1 - beta1**step)
        second.div_(1 - beta2**step)
    direction = first.div_(second.sqrt_().add_(group["eps"]))
    direction.add_(parameter, alpha=group["weight_decay"])
    weight_norm, direction_norm, gradient_norm = parameter.norm(), direction.norm(), gradient.norm()
    ratio = torch.ones_like(weight_norm)
    if group["weight_decay"] != 0 or group["always_adapt"]:
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, ratio)
    return torch.stack([ratio, weight_norm, group["lr"] * ratio * direction_norm, gradient_norm]).double()


def _norm(norms: tuple[float, ...]) -> float:
    return sum(norm * norm for norm in norms) ** 0.5
