"""Finding rank and world size under torchrun, torch.distributed.launch, srun, by hand, or as a single process.

A launcher's environment variables override ColossalAI's options (``--local_rank``, ``--world_size``, ``--rank``,
``--host``, ``--port``), because torch.distributed.launch and Slurm scripts pass both.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dali_train.errors import ConfigError

LOCAL = "dali-train-"  # how the run id of `local_launch` begins, which sets torchrun's variables


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """ColossalAI's command line options; None where they were not given."""

    local_rank: int | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's ranks among all processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = "localhost"  # where rank 0 listens
    port: int = 0
    launcher: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"{self.launcher}: found rank {self.rank} of world size {self.world_size}, expected a rank from 0 to "
                "the world size - 1"
            )
        if not 0 < self.port < 1 << 16 and self.world_size > 1:
            raise ConfigError(f"{self.launcher}: found port {self.port}, expected one from 1 to 65535")


def discover(options: LaunchOptions, environ: Mapping[str, str] = os.environ) -> Launch:
    """Find rank and world size.

    Raises:
        ConfigError: a launcher's variable is missing or not a number, two launchers contradict each other, or an option
            is missing.
    """
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, torch.distributed.run, torch.distributed.launch
        if environ["TORCHELASTIC_RUN_ID"].startswith(LOCAL):
            return _from_variables("dali-train", environ)
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
                f"{name} is {environ[name]}, so mpirun or mpiexec started this process, but neither is supported: use "
                "torchrun or srun"
            )
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world_size is {options.world_size}: use at least 1, or leave it out")
    if options.world_size is not None and options.world_size > 1:
        rank = options.rank if options.rank is not None else options.local_rank
        if rank is None or not options.host or options.port is None:
            raise ConfigError(
                f"--world_size {options.world_size} without a launcher needs --rank, --host and --port too; "
                "or start the processes with torchrun or srun"
            )
        local_rank = options.local_rank if options.local_rank is not None else rank
        return Launch(
            rank=rank,
            world_size=options.world_size,
            local_rank=local_rank,
            local_world_size=options.world_size,
            host=options.host,
            port=options.port,
            launcher="--world_size",
        )
    return Launch(local_rank=options.local_rank or 0)


def is_first_on_host(local_rank: int | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the first one of the run on its host, as far as the launcher tells.

    Args:
        local_rank: ColossalAI's option.
    """
    numbers = (environ.get("LOCAL_RANK"), environ.get("SLURM_LOCALID"), local_rank, 0)
    return next(str(number) for number in numbers if number is not None) == "0"


def tell_torchrun(message: str, *, is_said: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Make torchrun show `message` in its table of failed ranks, at the end of the output.

    Args:
        is_said: another rank prints the same. Torchrun takes the earliest failure as the root cause, so this one is
            dated later than that rank's, even if it happens some seconds before.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = "as another rank says" if is_said else message
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + 60 * is_said)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


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
    """Return the ranks of a task of a Slurm step.

    Only address and port may come from elsewhere. ColossalAI's --local_rank is the global rank, or 0 for all tasks if
    the batch shell expanded it, so global and local rank are Slurm's.
    """
    launcher = "srun"
    rank, world_size = _number(environ, "SLURM_PROCID", launcher), _number(environ, "SLURM_NTASKS", launcher)
    if options.world_size is not None and options.world_size != world_size:
        raise ConfigError(
            f"--world_size is {options.world_size}, but the Slurm step has SLURM_NTASKS {world_size} tasks: leave "
            "the option out"
        )
    for name, expected in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if name in environ and _number(environ, name, launcher) != expected:
            raise ConfigError(
                f"two launchers at once: {name} is {environ[name]}, but in the Slurm step it would be {expected} "
                f"(SLURM_PROCID {rank} of SLURM_NTASKS {world_size}); unset {name}, or start torchrun itself with srun"
            )
    job, step = _number(environ, "SLURM_JOB_ID", launcher), _number(environ, "SLURM_STEP_ID", launcher)
    # Batch scripts often export these two, which is better than a guess.
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
    """Refuse several independent torchruns, each of which would train the same run."""
    tasks, agents = _number(environ, "SLURM_NTASKS", "srun"), _number(environ, "GROUP_WORLD_SIZE", "torchrun")
    if tasks > 1 and agents == 1:
        raise ConfigError(
            f"two launchers at once: srun started {tasks} tasks (SLURM_NTASKS), each with its own torchrun "
            "(GROUP_WORLD_SIZE 1); start the trainer with srun alone, or torchrun with --nnodes and --rdzv-endpoint"
        )


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm node list: ``n[03-05,7],m1`` gives ``n03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else nodelist


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Return how many tasks are on node number `node` of Slurm's ``2(x3),1``: three nodes with two tasks, one with one.

    Raises:
        ConfigError: the node does not exist.
    """
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(repeat or 1)
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node}, which has no node {node} (SLURM_NODEID)")
    return counts[node]


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
        raise ConfigError(
            f"started by {launcher}, but the environment variable {name} is {text!r}, not a number"
        ) from None
