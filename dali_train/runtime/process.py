"""This process: its import of torch, its device and cores, and what it says when a bus error kills it.

Importing this does not import torch, which takes seconds.
"""

import atexit
import ctypes
import gc
import math
import os
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dali_train.errors import ConfigError
from dali_train.runtime.launch import Launch
from dali_train.text import plural

if TYPE_CHECKING:
    import torch


def importing_torch() -> AbstractContextManager[None]:
    """Exempt the objects imported in this context from garbage collection: scanning half a million of them takes a
    fifth of the import time, and a third of a second in each later collection."""
    return nullcontext() if "torch" in sys.modules else uncollected()


@contextmanager
def uncollected() -> Iterator[None]:
    """Exempt the objects of this context, and all older ones, from garbage collection until the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end Triton's extension names everything that was not collected
        gc.enable()


def end(status: int) -> NoReturn:
    """End this process as the interpreter would, but without freeing every object, which takes 1.5 to 2 of the 6 to 8
    seconds of processor time of a short command that has imported torch, timm and DALI."""
    if not _is_observed():
        # Waits for threads that are no daemons. multiprocessing ends its processes by the same call.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what libraries printed
        os._exit(status)
    sys.exit(status)


def _is_observed() -> bool:
    """Return whether a debugger, profiler or coverage follows the program: it writes its results at the very end."""
    tools = [sys.gettrace(), sys.getprofile()]
    if sys.version_info >= (3, 12):
        tools += [sys.monitoring.get_tool(number) for number in range(6)]
    return any(tool is not None for tool in tools)


def choose_device(name: str, launch: Launch) -> "torch.device":
    """Return the device of this process's model, by its name in `run.device`.

    Raises:
        ConfigError: run.device is cuda and there is no GPU.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if name == "cuda" and not num_gpus:
        raise ConfigError(
            "run.device is cuda, but torch finds no GPU on this host: check the driver, or set run.device cpu"
        )
    if name == "cpu" or not num_gpus:
        return torch.device("cpu")
    # A launcher may show each process only its own GPU; the local rank, then out of range, wraps around.
    return torch.device("cuda", launch.local_rank % num_gpus)


def device_name(device: "torch.device") -> str:
    import torch

    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {plural(torch.get_num_threads(), 'thread')}"
    )


def processor_name() -> str:
    """Return this machine's processor, such as "AMD EPYC 25.17": its name, which virtual machines shorten, with family
    and model. Where Linux does not tell, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} {facts.get('cpu family', '')}.{facts.get('model', '')}"


def cores_per_process(launch: Launch) -> int:
    """Return how many cores this process may use: all that it has, split among the processes that share them."""
    # Slurm gives every task its own mask; torchrun's workers all have the whole node's.
    shared = launch.launcher != "srun" or len(os.sched_getaffinity(0)) >= (os.cpu_count() or 1)
    cores = num_cores()
    return max(1, cores // launch.local_world_size) if shared else cores


def num_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: those of its affinity mask, or a container's quota if that is less.

    A quota is processor time per period, in the cgroup (version 2 or 1) of this process or one above it. More threads
    than it pays for are stopped together until the next period. A part of a core counts as one.

    Args:
        root: below which Linux's /proc and /sys are found.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for directory in _cgroups(root) if (quota := _quota(directory)) is not None]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the directories of the cgroups that limit this process's processor time, inner ones first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # 0::/PATH for version 2, NUMBER:cpu,cpuacct:/PATH for version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [root / "sys/fs/cgroup" / name for name in (("cpu", controllers) if controllers else ("",))]
        # A container sees its own cgroup as the top, whatever its path is outside.
        inner = Path(path.lstrip("/"))
        yield from (mount / part for mount in mounts for part in (inner, *inner.parents))


def _quota(cgroup: Path) -> float | None:
    """Return the processors whose time a cgroup may use; None: there is no limit, or no such cgroup."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # "max"
        return None


def bind_to_numa_node(device: "torch.device") -> int:
    """Bind this process, and the threads it will start, to the cores of its GPU's NUMA node; return how many it has.

    The launcher's binding is kept if it allows none of those cores, or if the host does not list them.
    """
    import torch

    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave the address out
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = allowed & numa_node_cores(Path("/sys/bus/pci/devices") / address)
    if near:
        os.sched_setaffinity(0, near)
    return min(len(near or allowed), num_cores())


def numa_node_cores(pci_device: Path) -> set[int]:
    """Return the cores on a device's NUMA node, from Linux's description of it in /sys; none if it names none."""
    try:
        spans = (pci_device / "local_cpulist").read_text().split(",")
    except OSError:
        return set()
    ends = [
        (int(first), int(last or first))
        for first, _, last in (span.strip().partition("-") for span in spans if span.strip())
    ]
    return {core for first, last in ends for core in range(first, last + 1)}


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # ctypes frees callbacks without a reference


def explain_bus_errors(datasets: Sequence[str]) -> None:
    """Print one sentence before SIGBUS kills this process.

    Python's own handlers cannot do this: they run later on the main thread, while the failing instruction, mostly in a
    DALI thread, is retried at once. This handler runs in the failing thread, then lets the instruction fail again.
    """
    verify = " or ".join(f"`dali-train data verify {shlex.quote(one)}`" for one in datasets)
    text = (
        f"dali-train: bus error (SIGBUS): a mapped file could not be read. A shard of {' or '.join(datasets)} was "
        f"truncated or rewritten while in use, its disk failed, or /dev/shm is full: {verify} names the shard; restore "
        "it, and start again to resume\n"
    ).encode(errors="replace")
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def explain(number: int) -> None:
        os.write(2, text)
        libc.signal(number, None)  # SIG_DFL

    _installed[:] = [_Handler(explain)]
    libc.signal(signal.SIGBUS, ctypes.cast(_installed[0], ctypes.c_void_p))
