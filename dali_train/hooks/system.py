"""The load of the host and the GPU in each logging interval, if it can be read."""

import logging
import time
from collections.abc import Callable, Mapping

import psutil
import torch

from dali_train.hooks.base import Hook
from dali_train.hooks.records import RunStart

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
