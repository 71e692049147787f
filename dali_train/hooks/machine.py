"""What the machine does: its load in each logging interval, and a torch profiler trace of chosen steps."""

import logging
import time
from collections.abc import Callable, Mapping

import psutil
import torch
from torch.profiler import ProfilerActivity

from dali_train.hooks import Hook
from dali_train.hooks.records import RunEnd, RunStart, StepRecord

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
