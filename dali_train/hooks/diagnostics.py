"""Hooks that measure and warn: the machine's load, a profiler's trace, LAMB's trust ratios by layer, and early warnings
about a run that is going wrong."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
from timm.optim import Lamb
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity

from dali_train.hooks import Hook
from dali_train.hooks.jsonl import JsonLines
from dali_train.hooks.records import RunEnd, RunStart, StepRecord
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import Shardwise

logger = logging.getLogger("dali_train")


class SystemFacts(Hook):
    """Measures memory, disk reads, and the state of this rank's GPU as reported by NVML through torch."""

    def start(self, record: RunStart) -> None:
        self._process = psutil.Process()
        self._last_read = self._read_bytes()
        self._last_time = time.perf_counter()
        self._gpu: dict[str, Callable[[], float]] = {}
        if next(record.model.parameters()).device.type == "cuda":
            self._gpu = {
                "gpu_memory_gb": lambda: torch.cuda.max_memory_allocated() / 1e9,
                "gpu_memory_reserved_gb": lambda: torch.cuda.max_memory_reserved() / 1e9,
            }
            nvml: dict[str, Callable[[], float]] = {
                "gpu_utilisation": lambda: torch.cuda.utilization() / 100,
                "gpu_power_w": lambda: torch.cuda.power_draw() / 1000,
                "gpu_clock_mhz": lambda: float(torch.cuda.clock_rate()),
                "gpu_temperature_c": lambda: float(torch.cuda.temperature()),
            }
            for name, read in nvml.items():
                try:
                    read()
                except ImportError:
                    logger.warning("no GPU utilisation, power, clocks: pip install 'dali-train[nvml]' for nvidia-ml-py")
                    break
                # NVML's errors have no other base; a part of a GPU (MIG) has no utilisation, but power.
                except Exception as error:
                    logger.warning("no %s: NVML says %s; check `nvidia-smi` on this host", name, error)
                else:
                    self._gpu[name] = read

    def measure(self) -> Mapping[str, float]:
        now, read = time.perf_counter(), self._read_bytes()
        rate = (read - self._last_read) / (now - self._last_time)
        self._last_time, self._last_read = now, read
        memory = psutil.virtual_memory()
        return {
            # Mapped shards count as long as they are cached.
            "process_memory_gb": self._process.memory_info().rss / 1e9,
            "host_memory_gb": (memory.total - memory.available) / 1e9,
            "disk_read_mb_per_s": rate / 1e6,
            **{name: value() for name, value in self._gpu.items()},
        }

    def _read_bytes(self) -> int:
        """Return the bytes read from storage for this process so far, page cache hits left out."""
        return int(self._process.io_counters().read_bytes)


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


GRAD_NORM_FACTOR = 10.0
"""A gradient norm more than this many times the median of the last HISTORY ones is a jump."""
HISTORY = 20
SKIPPED_SHARE = 0.05
"""While all is well FP16's scaler skips about one step each time it doubles its scale, every 2,000 steps by default."""
SEARCH_STEPS = 50
"""At the start of a process the scaler searches for its scale, from 65,536 down, and skips a step for each halving."""
TRUST_RATIO_MAX = 100.0
"""An estimate: ratios of healthy layers are far smaller; a larger one means that the layer gets almost no gradient."""


class Health(Hook):
    """Checks the logged numbers. The terminal shows each kind of warning once, the log file shows all."""

    def start(self, record: RunStart) -> None:
        self._start_step, self._optimizer = record.start_step, record.config.optimizer
        self._grad_norms: deque[float] = deque(maxlen=HISTORY)
        self._skipped: deque[tuple[int, int]] = deque([(record.start_step + SEARCH_STEPS, 0)], maxlen=HISTORY)

    def step(self, record: StepRecord) -> None:
        train = record.train
        if train is None:
            return
        if len(self._grad_norms) == HISTORY and train.grad_norm > GRAD_NORM_FACTOR * (
            usual := statistics.median(self._grad_norms)
        ):
            logger.warning(
                f"gradient norm {train.grad_norm:.3g} at step {record.step}, usually {usual:.3g}: if the loss does "
                "not recover, resume from an earlier checkpoint with a lower optimizer.lr or a longer "
                "schedule.warmup_epochs"
            )
        self._grad_norms.append(train.grad_norm)
        self._check_overflows(record.step, train.skipped_steps)
        if train.loss_scale < 1:
            logger.warning(
                f"loss scale {train.loss_scale:.3g} at step {record.step}: below 1, float16 loses small gradients "
                "instead of preserving them: lower optimizer.lr if the gradients diverge, or use precision.dtype "
                "bf16"
            )
        if (largest := train.measured.get("trust_ratio_max", 0.0)) > TRUST_RATIO_MAX:
            logger.warning(
                f"largest trust ratio {largest:.3g} at step {record.step}: a layer whose gradient is nearly zero is "
                f"moved at full rate; lamb.jsonl names it. {self._remedy()}"
            )

    def _remedy(self) -> str:
        """Return the first remedy for a large trust ratio that the config does not apply already."""
        decay = self._optimizer.weight_decay
        if not self._optimizer.exclude_vectors:
            return "Exclude biases and norms from it: optimizer.exclude_vectors true"
        if decay < 1 / TRUST_RATIO_MAX:
            return f"Raise optimizer.weight_decay from {decay:g}: without a gradient the ratio is 1 / weight_decay"
        return "If the loss stops falling, lower optimizer.lr or lengthen schedule.warmup_epochs"

    def _check_overflows(self, step: int, skipped: int) -> None:
        if step <= self._start_step + SEARCH_STEPS:
            self._skipped[-1] = (step, skipped)
            return
        first_step, first_skipped = self._skipped[0]
        self._skipped.append((step, skipped))
        if step > first_step and (share := (skipped - first_skipped) / (step - first_step)) > SKIPPED_SHARE:
            logger.warning(
                f"{share:.0%} of the last {step - first_step} steps were skipped for gradients that were not finite "
                f"(step {step}): lower optimizer.lr, lengthen schedule.warmup_epochs, or use precision.dtype bf16"
            )
