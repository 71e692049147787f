"""The device and the cores of this process."""

import os
from pathlib import Path
from typing import Any

import torch

from dali_train.errors import ConfigError
from dali_train.runtime.launch import Launch


def choose_device(name: str, launch: Launch) -> torch.device:
    """Return the device of this process's model, by its name in `run.device`.

    Raises:
        ConfigError: run.device is cuda and there is no GPU.
    """
    num_gpus = torch.cuda.device_count()
    if name == "cuda" and not num_gpus:
        raise ConfigError(
            "run.device is cuda, but torch finds no GPU on this host: check the driver, or set run.device cpu"
        )
    if name == "cpu" or not num_gpus:
        return torch.device("cpu")
    # Where a launcher shows each process only its own GPU, the local rank is out of range, so it wraps around.
    return torch.device("cuda", launch.local_rank % num_gpus)


def cores_per_process(launch: Launch) -> int:
    """Return how many cores this process may use: its affinity mask, split among the processes that share it."""
    cores = len(os.sched_getaffinity(0))
    # Slurm gives every task its own mask; torchrun's workers all have the whole node's.
    shared = launch.launcher != "srun" or cores >= (os.cpu_count() or 1)
    return max(1, cores // launch.local_world_size) if shared else cores


def bind_to_numa_node(device: torch.device) -> int:
    """Bind this process, and the threads it will start, to the cores of its GPU's NUMA node; return how many it has.

    The launcher's binding is kept if it allows none of those cores, or if the host does not list them.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave the address out
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = allowed & numa_node_cores(Path("/sys/bus/pci/devices") / address)
    if near:
        os.sched_setaffinity(0, near)
    return len(near or allowed)


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
