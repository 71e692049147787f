"""Finding rank and world size under torchrun, torch.distributed.launch, srun, by hand, or as a single process.

A launcher's environment variables override ColossalAI's options (``--local_rank``, ``--world_size``, ``--rank``,
``--host``, ``--port``), because torch.distributed.launch and Slurm scripts pass both.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dali_train.errors import ConfigError
from dali_train.text import shortened

_PATIENCE_S = 10.0  # ranks start up to some seconds apart
_CHECK_S = 1.0
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # Slurm's numbers for what is no step of srun: 0xFFFFFFFA is an interactive shell
_LARGEST_PORT = (1 << 16) - 1
_REMEDIES = {
    "torchrun": "start all ranks with torchrun, or unset TORCHELASTIC_RUN_ID for a single process",
    "RANK and WORLD_SIZE": "set it for every rank as torchrun does, or unset RANK and WORLD_SIZE for a single process",
    "srun": "start all ranks with srun, or unset SLURM_STEP_ID for a single process",
}
LOCAL = "dali-train-"  # how the run id of `launch_locally` begins, which sets torchrun's variables


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
    """This process's ranks among all processes of the run, and how long they wait for each other."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = "localhost"  # where rank 0 listens
    port: int = 0
    launcher: str = "none"
    timeout_s: float = 600.0  # parallel.timeout_s, after which the watchdog ends a rank; collectives time out later


def discover(options: LaunchOptions, environ: Mapping[str, str] = os.environ) -> Launch:
    """Find rank and world size.

    Raises:
        ConfigError: a launcher's variable is missing or not a number, two launchers contradict each other, or an option
            is missing.
    """
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, torch.distributed.run, torch.distributed.launch
        if environ["TORCHELASTIC_RUN_ID"].startswith(LOCAL):
            return _from_variables("dali-train", environ)
        if _is_task(environ) and "SLURM_PTY_PORT" not in environ:
            _check_torchrun_within_slurm(environ)
        return _from_variables("torchrun", environ)
    if _is_task(environ):
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
        if rank is not None and not 0 <= rank < options.world_size:
            raise ConfigError(f"--rank is {rank} with --world_size {options.world_size}: use 0 to world_size - 1")
        if options.port is not None and not 0 < options.port <= _LARGEST_PORT:
            raise ConfigError(f"--port is {options.port}: use 1 to {_LARGEST_PORT}")
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


def is_first_on_host(local_rank: int | None = None) -> bool:
    """Return whether this process is the first one of the run on its host, as far as the launcher tells.

    Args:
        local_rank: ColossalAI's option.
    """
    return _first_known(os.environ.get("LOCAL_RANK"), os.environ.get("SLURM_LOCALID"), local_rank) == "0"


def is_first(rank: int | None = None) -> bool:
    """Return whether this process is rank 0, as far as the launcher tells.

    Args:
        rank: ColossalAI's option.
    """
    return _first_known(os.environ.get("RANK"), os.environ.get("SLURM_PROCID"), rank) == "0"


def _first_known(*numbers: str | int | None) -> str:
    return next((str(number) for number in numbers if number is not None), "0")


def tell_torchrun(message: str) -> None:
    """Make torchrun show `message` in its table of failed ranks, at the end of the output."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def leave_to_torchrun() -> None:
    """Wait, when another rank reports the error, for torchrun to end this one: it ends all ranks as soon as one has
    ended, also the one that is about to report, and takes the earliest failure as the root cause."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE_S)
        tell_torchrun("another rank reports the error")


def _from_variables(launcher: str, environ: Mapping[str, str]) -> Launch:
    variables = _Variables(environ, launcher)
    world_size = variables.number("WORLD_SIZE", least=1)
    local_world_size = variables.number("LOCAL_WORLD_SIZE", least=1)
    return Launch(
        rank=variables.number("RANK", below=("WORLD_SIZE", world_size)),
        world_size=world_size,
        local_rank=variables.number("LOCAL_RANK", below=("LOCAL_WORLD_SIZE", local_world_size)),
        local_world_size=local_world_size,
        host=variables.text("MASTER_ADDR"),
        port=variables.number("MASTER_PORT", least=1, most=_LARGEST_PORT),
        launcher=launcher,
    )


def _from_slurm(options: LaunchOptions, environ: Mapping[str, str]) -> Launch:
    """Return the ranks of a task of a Slurm step.

    Only address and port may come from elsewhere. ColossalAI's --local_rank is the global rank, or 0 for all tasks if
    the batch shell expanded it, so global and local rank are Slurm's.
    """
    variables = _Variables(environ, "srun")
    tasks = _name_of_tasks(environ)
    world_size = variables.number(tasks, least=1)
    rank = variables.number("SLURM_PROCID", below=(tasks, world_size))
    if options.world_size is not None and options.world_size != world_size:
        raise ConfigError(
            f"--world_size is {options.world_size}, but the Slurm step has {tasks} {world_size} tasks: leave "
            "the option out"
        )
    for name, expected in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if name in environ and variables.number(name) != expected:
            raise ConfigError(
                f"two launchers at once: {name} is {environ[name]}, but in the Slurm step it would be {expected} "
                f"(SLURM_PROCID {rank} of {tasks} {world_size}); unset {name}, or start torchrun itself with srun"
            )
    # If a batch script exports these two, they are better than a guess.
    host = options.host or (variables.text("MASTER_ADDR") if environ.get("MASTER_ADDR") else None)
    port = variables.number("MASTER_PORT", least=1, most=_LARGEST_PORT) if "MASTER_PORT" in environ else None
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=variables.number("SLURM_LOCALID"),
        local_world_size=tasks_on_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), variables.number("SLURM_NODEID")),
        host=host or first_host(variables.text("SLURM_STEP_NODELIST")),
        port=options.port or port or step_port(variables.number("SLURM_JOB_ID"), variables.number("SLURM_STEP_ID")),
        launcher="srun",
    )


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of a step's tasks. What is started by hand in a shell of Slurm's
    stands alone, although it has a task's variables. These shells are a batch script's, which has no step; salloc's,
    whose step has a number from `_FIRST_SPECIAL_STEP` on; and that of ``srun --pty``, which has a terminal. Tasks that
    srun starts from there inherit SLURM_PTY_PORT, but not the terminal.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or ("SLURM_PTY_PORT" in environ and _has_terminal()):
        return False
    return not (step.isascii() and step.isdecimal() and len(step) < 12 and int(step) >= _FIRST_SPECIAL_STEP)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, wherever its output goes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _name_of_tasks(environ: Mapping[str, str]) -> str:
    """Return the variable with the number of tasks: the step's, else that of older Slurms, which may be the job's."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def step_port(job: int, step: int) -> int:
    """Return the port of a Slurm step, below those that Linux hands out itself. Steps of one job run side by side, and
    so do jobs with adjacent numbers: each job has 37 ports of its own before the next one's begin."""
    return 20000 + (job * 37 + step) % 12000


def _check_torchrun_within_slurm(environ: Mapping[str, str]) -> None:
    """Refuse several independent torchruns, each of which would train the same run."""
    name = _name_of_tasks(environ)
    tasks = _Variables(environ, "srun").number(name, least=1)
    agents = _Variables(environ, "torchrun").number("GROUP_WORLD_SIZE", least=1)
    if tasks > 1 and agents == 1:
        raise ConfigError(
            f"two launchers at once: srun started {tasks} tasks ({name}), each with its own torchrun "
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
    first = 0
    for count, repeat in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", tasks_per_node):
        first += int(repeat or 1)
        if node < first and int(count) > 0:
            return int(count)
    raise ConfigError(
        f"SLURM_STEP_TASKS_PER_NODE is {shortened(tasks_per_node, 80)}, which has no node {node} (SLURM_NODEID): "
        f"{_REMEDIES['srun']}"
    )


class _Variables:
    """A launcher's environment variables, whose values are checked as they are read.

    Raises:
        ConfigError: a variable is missing, or not what a launcher sets; the message names it, its value and the remedy.
    """

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self._environ, self._launcher = environ, launcher

    def text(self, name: str) -> str:
        text = self._environ.get(name)
        if text is None:
            raise self._error(name, "missing")
        if not text.isprintable() or not text or " " in text:
            raise self._error(name, f"{shortened(text, 80)!r}, no name")
        return text

    def number(self, name: str, *, least: int = 0, most: int = 1 << 31, below: tuple[str, int] | None = None) -> int:
        """Return a whole number from `least` to `most`, or less than another variable, by its name and value."""
        text = self._environ.get(name)
        if text is None:
            raise self._error(name, "missing")
        most = most if below is None else below[1] - 1
        if text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most:
            return int(text)
        expected = f"less than {below[0]}, which is {below[1]}" if below is not None else f"from {least} to {most}"
        raise self._error(name, f"{shortened(text, 80)!r}, not a whole number {expected}")

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(
            f"started by {self._launcher}, but the environment variable {name} is {problem}: "
            f"{_REMEDIES.get(self._launcher, _REMEDIES['torchrun'])}"
        )


def exit_if_launcher_dies() -> None:
    """Watch the parent from a thread, under torchrun or under `launch_locally`, which uses torchrun's agent.

    With other parents the run should survive, e.g. under nohup or after its shell was closed. Linux's own signal for
    this (PR_SET_PDEATHSIG) is sent when the *thread* that started the process ends, so it is not used.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch_launcher(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    print(
        f"rank {os.environ.get('RANK', '?')}: the launcher (pid {parent}) is gone, so this rank ends; start again to "
        "resume",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
