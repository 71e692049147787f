"""Hooks that measure and warn: the machine's load, and early warnings about a run that is going wrong."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

import psutil
import torch

from dali_train.config import HooksConfig
from dali_train.hooks import Hook
from dali_train.hooks.records import RunStart, StepRecord
from dali_train.parallel.layout import Layout

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
        own = self._process.memory_info()
        return {
            # Without mapped shards, which are in memory as long as the system has room for them.
            "process_memory_gb": (own.rss - own.shared) / 1e9,
            "host_memory_gb": (memory.total - memory.available) / 1e9,
            "disk_read_mb_per_s": rate / 1e6,
            **{name: value() for name, value in self._gpu.items()},
        }

    def _read_bytes(self) -> int:
        """Return the bytes read from storage for this process so far, page cache hits left out."""
        return int(self._process.io_counters().read_bytes)


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


def make_hooks(config: HooksConfig, layout: Layout) -> list[Hook]:
    return [SystemFacts(), Health()] if layout.rank == 0 else []
