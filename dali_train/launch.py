"""Who am I among how many: torchrun, torch.distributed.launch, srun, by hand, or a single process.

What a launcher tells through the environment wins over the predecessor's options (``--local_rank``,
``--world_size``, ``--rank``, ``--host``, ``--port``), since torch.distributed.launch and Slurm scripts pass both.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dali_train.config import Config, ConfigError, RunConfig
from dali_train.status import RunError

MEETING_TIMEOUT = timedelta(seconds=55)  # a minute with the start of the program
# The watchdog ends a rank that waits for longer than parallel.timeout_s, with a report; collectives give up after it.
_AFTER_WATCHDOG = timedelta(seconds=15)


class LaunchError(RunError):
    """The ranks did not meet; the message says who waited where for whom."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The predecessor's command line options; None where they were not given."""

    local_rank: int | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # where rank 0 listens
    port: int
    launcher: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"{self.launcher}: found rank {self.rank} of world size {self.world_size}, expected a rank from 0 to the world "
                "size - 1"
            )
        if not 0 < self.port < 1 << 16 and self.world_size > 1:
            raise ConfigError(f"{self.launcher}: found port {self.port}, expected one from 1 to 65535")


def discover(options: LaunchOptions, environ: Mapping[str, str] = os.environ) -> Launch:
    """Find rank and world size.

    Raises:
        ConfigError: a launcher's variable is missing or no number, two launchers that contradict each other, or options
            that do not suffice.
    """
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, torch.distributed.run, torch.distributed.launch
        if "SLURM_STEP_ID" in environ:
            _check_torchrun_within_slurm(environ)
        return _from_variables("torchrun", environ)
    if "SLURM_STEP_ID" in environ:  # a batch script's own shell has SLURM_PROCID too, but no step
        return _from_slurm(options, environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:  # torchrun's variables, set by hand
        return _from_variables("RANK and WORLD_SIZE", environ)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {environ[name]}, so mpirun or mpiexec started this process, but neither is a launcher that is "
                "understood: expected torchrun or srun"
            )
    if options.world_size is not None and options.world_size > 1:
        launcher = "--world_size"
        rank = options.rank if options.rank is not None else options.local_rank
        if rank is None or not options.host or options.port is None:
            raise ConfigError(
                f"--world_size {options.world_size} without a launcher needs --rank, --host and --port too; "
                "or start the processes with torchrun or srun"
            )
        local_rank = options.local_rank if options.local_rank is not None else rank
        return Launch(
            rank=rank, world_size=options.world_size, local_rank=local_rank, local_world_size=options.world_size,
            host=options.host, port=options.port, launcher=launcher,
        )  # fmt: skip
    return Launch(
        rank=0, world_size=1, local_rank=options.local_rank or 0, local_world_size=1, host="localhost", port=0, launcher="none"
    )


def _from_variables(launcher: str, environ: Mapping[str, str]) -> Launch:
    return Launch(
        rank=_number(environ, "RANK", launcher),
        world_size=_number(environ, "WORLD_SIZE", launcher),
        local_rank=_number(environ, "LOCAL_RANK", launcher),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", launcher),
        host=_text(environ, "MASTER_ADDR", launcher),
        port=_number(environ, "MASTER_PORT", launcher),
        launcher=launcher,
    )


def _from_slurm(options: LaunchOptions, environ: Mapping[str, str]) -> Launch:
    """The place of a task of a Slurm step.

    Only address and port may come from elsewhere. The predecessor's --local_rank is the global rank, and 0 for all
    tasks where the batch shell expanded it; the rank and the device's number are Slurm's.
    """
    launcher = "srun"
    rank, world_size = _number(environ, "SLURM_PROCID", launcher), _number(environ, "SLURM_NTASKS", launcher)
    if options.world_size is not None and options.world_size != world_size:
        raise ConfigError(
            f"--world_size is {options.world_size}, but the Slurm step has SLURM_NTASKS {world_size} tasks: leave the option out"
        )
    for name, expected in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if name in environ and _number(environ, name, launcher) != expected:
            raise ConfigError(
                f"two launchers at once: {name} is {environ[name]}, but in the Slurm step it would be {expected} "
                f"(SLURM_PROCID {rank} of SLURM_NTASKS {world_size}); unset {name}, or start torchrun itself with srun"
            )
    job, step = _number(environ, "SLURM_JOB_ID", launcher), _number(environ, "SLURM_STEP_ID", launcher)
    # Batch scripts often export these two, and they know better than a guess.
    port = _number(environ, "MASTER_PORT", launcher) if "MASTER_PORT" in environ else None
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", launcher),
        local_world_size=tasks_on_node(
            _text(environ, "SLURM_STEP_TASKS_PER_NODE", launcher), _number(environ, "SLURM_NODEID", launcher)
        ),
        host=options.host or environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_STEP_NODELIST", launcher)),
        # Steps of one job run side by side, so the step counts too. Below the ports that Linux hands out itself.
        port=options.port or port or 20000 + (job * 37 + step) % 12000,
        launcher=launcher,
    )


def _check_torchrun_within_slurm(environ: Mapping[str, str]) -> None:
    """One torchrun a node that know of each other are fine; several that don't would train the same run several times."""
    tasks, agents = _number(environ, "SLURM_NTASKS", "srun"), _number(environ, "GROUP_WORLD_SIZE", "torchrun")
    if tasks > 1 and agents == 1:
        raise ConfigError(
            f"two launchers at once: srun started {tasks} tasks (SLURM_NTASKS) and in each a torchrun of its own "
            "(GROUP_WORLD_SIZE 1); start the trainer with srun alone, or torchrun with --nnodes and --rdzv-endpoint"
        )


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: ``n[03-05,7],m1`` gives ``n03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else nodelist


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks on node number `node` of Slurm's ``2(x3),1``: three nodes with two tasks, one with one.

    Raises:
        ConfigError: there is no such node.
    """
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(repeat or 1)
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node}, which has no node {node} (SLURM_NODEID)")
    return counts[node]


def choose_device(run: RunConfig, launch: Launch) -> torch.device:
    """The device of this process's model.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    num_gpus = torch.cuda.device_count()
    if run.device == "cuda" and not num_gpus:
        raise ConfigError("run.device is cuda, but torch finds no GPU on this host: check the driver, or set run.device cpu")
    if run.device == "cpu" or not num_gpus:
        return torch.device("cpu")
    # Where a launcher shows each process only its own GPU, the local rank is out of range: count round.
    return torch.device("cuda", launch.local_rank % num_gpus)


def cores_per_process(launch: Launch) -> int:
    """The cores that this process may use: its affinity mask, divided among the processes that share it."""
    cores = len(os.sched_getaffinity(0))
    # Slurm gives every task a mask of its own; torchrun's workers all have the whole node's.
    shared = launch.launcher != "srun" or cores >= (os.cpu_count() or 1)
    return max(1, cores // launch.local_world_size) if shared else cores


def stay_near(device: torch.device) -> int:
    """Keep this process, and the threads it will start, to the cores of its GPU's NUMA node; returns how many it has.

    A launcher's own binding stands where it leaves none of them, and on hosts that do not tell.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave the address out
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = allowed & near_cores(Path("/sys/bus/pci/devices") / address)
    if near:
        os.sched_setaffinity(0, near)
    return len(near or allowed)


def near_cores(pci_device: Path) -> set[int]:
    """The numbers of the cores next to a device, from Linux's description of it in /sys; none if it has none."""
    try:
        spans = (pci_device / "local_cpulist").read_text().split(",")
    except OSError:
        return set()
    ends = [(int(first), int(last or first)) for first, _, last in (span.strip().partition("-") for span in spans if span.strip())]
    return {core for first, last in ends for core in range(first, last + 1)}


@contextmanager
def process_group(launch: Launch, config: Config, device: torch.device) -> Iterator[Launch]:
    """The default process group, up and down. A single process has none.

    Gives the launch back, with the port of the store that the ranks share.

    Raises:
        LaunchError: the other ranks were not reached within a minute.
    """
    if launch.world_size == 1:
        yield launch
        return
    run, parallel = config.run, config.parallel
    backend = run.backend if run.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    os.environ.update(
        RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size), LOCAL_RANK=str(launch.local_rank),
        MASTER_ADDR=launch.host, MASTER_PORT=str(launch.port),
    )  # fmt: skip
    try:
        # Short while the ranks meet, longer while they work.
        store, port = _meet(launch)
        store.set_timeout(MEETING_TIMEOUT)
        dist.init_process_group(
            backend, store=dist.PrefixStore("default_pg", store), rank=launch.rank, world_size=launch.world_size,
            timeout=timedelta(seconds=parallel.timeout_s) + _AFTER_WATCHDOG,
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) did not reach all others through "
            f"{launch.host}:{launch.port} within {MEETING_TIMEOUT.seconds} s ({error}): check that every rank was started "
            "and that the address is reachable from each host"
        ) from error
    yield replace(launch, port=port)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def _meet(launch: Launch) -> tuple[dist.Store, int]:
    """A store that all ranks share, and its port on the launch's host."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=MEETING_TIMEOUT))
        return store, launch.port
    # An elastic agent's store outlives its workers, and after a restart they would find the addresses of the dead there
    # (torch 2.15: "Gloo connectFullMesh failed", again and again). So rank 0 opens a new one for each start, and the
    # agent's store only tells its port.
    agent = dist.TCPStore(launch.host, launch.port, is_master=False, timeout=MEETING_TIMEOUT)
    if launch.rank == 0:
        own = dist.TCPStore(launch.host, 0, is_master=True, wait_for_workers=False, timeout=MEETING_TIMEOUT)
        agent.set("dali_train/port", str(own.port))
        return own, own.port
    end = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    while True:
        port = int(agent.get("dali_train/port"))
        try:
            store = dist.TCPStore(launch.host, port, is_master=False, timeout=timedelta(seconds=2))
            if store.add(f"rank{launch.rank}", 1) == 1:
                return store, port
            reason = "the store found there is of an earlier start"
        except RuntimeError as error:  # of an earlier start too, or not reachable
            reason = str(error)
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0's store on port {port}: {reason}")
        time.sleep(0.2)


def host_group(launch: Launch, config: Config, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A new group of all ranks for talk between hosts, beside what devices exchange; None for a single process.

    Its collectives give up after `timeout`, by default when the watchdog would have ended this rank.
    """
    if launch.world_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timeout or timedelta(seconds=config.parallel.timeout_s) + _AFTER_WATCHDOG)
    assert isinstance(group, dist.ProcessGroup)  # a rank that is not in the group would get a number
    return group


def _text(environ: Mapping[str, str], name: str, launcher: str) -> str:
    try:
        return environ[name]
    except KeyError:
        raise ConfigError(f"started by {launcher}, but the environment variable {name} is missing") from None


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = _text(environ, name, launcher)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"started by {launcher}, but the environment variable {name} is {text!r}, not a number") from None
