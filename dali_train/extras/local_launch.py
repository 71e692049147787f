"""Starting the ranks of a run on this host from one process, such as a notebook or `--num-processes`, without a command
line: `launch_locally`, by torchrun's agent."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dali_train.errors import SHARED_MEMORY_REMEDY, ConfigError, RunError
from dali_train.files import temporary_directory
from dali_train.runtime.launch import LOCAL, exit_if_launcher_dies
from dali_train.runtime.status import START_AGAIN
from dali_train.runtime.stop import StopReason

Result = TypeVar("Result")

_POLL_S = 0.2
_FIRST_POLL_S = 0.01  # until all processes are known: one may die at once
_AGENT_S = 3.0  # after a signal: the agent may be starting the processes, which then end by it
_LATER_S = 2.0  # the agent takes the failure with the earliest time, in seconds, as the cause
_FORWARDED = {signal.SIGINT: StopReason.INTERRUPT, signal.SIGTERM: StopReason.TERM, signal.SIGUSR1: StopReason.USR1}
_UNGUARDED = 87  # exit status of a new process that would start processes itself


def launch_locally(function: Callable[..., Result], *arguments: Any, num_processes: int) -> dict[int, Result]:
    """Call ``function(*arguments)`` in each of several new processes, which find each other as under torchrun.

    The processes are spawned, not forked, so this may be called when CUDA is already in use; `function`, `arguments`
    and results must be picklable. No process outlives this one. Their output appears in this process's output, for
    example in the cell of a notebook. If called in the main thread, SIGINT (Ctrl-C, a notebook's interrupt), SIGTERM
    and SIGUSR1 are forwarded to one rank once it handles SIGUSR1, and `function` must then end on all ranks; before
    that, and at a second SIGINT, all processes are killed.

    Returns:
        The result of each rank, by rank.

    Raises:
        ConfigError: /dev/shm is missing, full or not writable.
        RunError: a rank failed, and the others were ended.
        KeyboardInterrupt: a second SIGINT, or one that `function` does not handle.
        SystemExit: with status 75, after a signal before `function` handled it, or if it ended with that status.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # while it imports the script that called this
        os._exit(_UNGUARDED)
    _check_semaphores(num_processes)
    with temporary_directory() as logs, _semaphores_named(logs.parent.name), _quiet_agent():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=LOCAL + uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: one that is free
            local_addr="localhost",  # else this host's name, which only a name server may know, and not in a container
            max_restarts=0,
            start_method="spawn",
            monitor_interval=_POLL_S,
            logs_specs=DefaultLogsSpecs(str(logs), tee=Std.NONE if _inherit_output() else Std.ALL),
            log_line_prefix_template=" ",  # an empty one would become "[default0]:"
        )
        with _Ranks(num_processes) as ranks:
            # In the main thread the agent would install signal handlers that end all ranks at the first signal, and
            # never restore the old ones.
            launched: Future[dict[int, Result]] = Future()
            launch = elastic_launch(config, _work)
            # A daemon: if it never starts a process, this one can still end.
            start = threading.Thread(
                target=_start, args=(launched, launch, function, *arguments), name="agent", daemon=True
            )
            start.start()
            ranks.supervise(launched)
    error = launched.exception()
    if isinstance(error, ChildFailedError):
        ranks.raise_for(*error.get_first_failure())
    return launched.result()


def _check_semaphores(num_processes: int) -> None:
    """Make as many semaphores as torch is about to, without names, so that they go at once.

    Raises:
        ConfigError: they cannot be made. Python's own error names no file.
    """
    context = multiprocessing.get_context("fork")
    try:
        _ = context.Event(), [context.SimpleQueue() for _ in range(num_processes)]
    except OSError as error:
        raise ConfigError(
            f"num_processes is {num_processes}, and the semaphores of new processes cannot be made in /dev/shm "
            f"({error.strerror}): {SHARED_MEMORY_REMEDY}, or start the ranks with torchrun, which needs none"
        ) from error


def _start(launched: "Future[dict[int, Result]]", launch: Callable[..., dict[int, Result]], *arguments: Any) -> None:
    """Start the processes with signals blocked, which they inherit from this thread: a terminal sends Ctrl-C to them
    too, and in the seconds in which they import torch it would be a traceback."""
    try:
        resource_tracker.ensure_running()  # its start unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        launched.set_result(launch(*arguments))
    except BaseException as error:
        launched.set_exception(error)


def _work(function: Callable[..., Result], *arguments: Any) -> Result:
    # a terminal and a notebook send SIGINT to the process group: only the parent handles it, and forwards it
    os.setsid()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which drops one that is pending
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    exit_if_launcher_dies()
    try:
        return function(*arguments)
    except RunError as error:
        if error.reported_elsewhere:
            time.sleep(_LATER_S)
        raise RunError(str(error)) from error  # the parent recognises errors without a traceback by this class name
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None  # torch would wait for a result


class _Ranks:
    """The parent's view of the new processes: forwarded signals, and why they ended."""

    def __init__(self, count: int) -> None:
        self.num_interrupts, self._count = 0, count
        self._others = set(multiprocessing.active_children())
        self._processes: list[BaseProcess] = []  # by rank
        self._first_ended: set[int] = set()  # ranks; the agent ends the others then
        self._pending: list[int] = []  # signals to forward
        self._last_signal = 0.0
        self._has_begun = False  # rank 0 handles signals
        self._stopped = StopReason.NONE  # before that

    def __enter__(self) -> "_Ranks":
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in _FORWARDED} if in_main_thread else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.num_interrupts += number == signal.SIGINT
        self._pending.append(number)
        self._last_signal = time.monotonic()

    def supervise(self, launched: "Future[Any]") -> None:
        """Forward signals until all processes have ended.

        Raises:
            SystemExit: with status 75, a signal came and the agent started no process for `_AGENT_S` after it.
        """
        while not wait([launched], timeout=_POLL_S if len(self._processes) == self._count else _FIRST_POLL_S).done:
            if len(self._processes) < self._count:
                started = set(multiprocessing.active_children()) - self._others
                self._processes = sorted(started, key=lambda process: process.pid or 0)
                if self._pending and time.monotonic() - self._last_signal > _AGENT_S:
                    self._stopped = _FORWARDED[signal.Signals(self._pending[0])]
                    for process in self._processes:
                        process.kill()
                    self._say_stopped()
                    raise SystemExit(START_AGAIN)
                continue
            if not self._first_ended:  # without reaping: the agent waits for its children
                ended = connection.wait([process.sentinel for process in self._processes], timeout=0)
                self._first_ended = {rank for rank, process in enumerate(self._processes) if process.sentinel in ended}
            self._has_begun = self._has_begun or _handles_signals(self._processes[0])
            if self._pending and not self._has_begun:
                self._stopped = _FORWARDED[signal.Signals(self._pending[0])]
            if self.num_interrupts > 1 or self._stopped:
                for process in self._processes:
                    process.kill()
            elif self._pending:
                number = self._pending.pop(0)
                with suppress(ProcessLookupError):  # rank 0 has ended: there is nothing left to stop
                    os.kill(self._processes[0].pid or 0, number)

    def raise_for(self, rank: int, failure: ProcessFailure) -> NoReturn:
        """Raise what `launch_locally` says, when `rank` was the first to fail."""
        if self._stopped and self.num_interrupts < 2:
            self._say_stopped()
        if self._stopped or failure.exitcode == START_AGAIN:
            raise SystemExit(START_AGAIN)
        if self.num_interrupts:
            raise KeyboardInterrupt("ended without saving")
        if failure.exitcode == _UNGUARDED:
            raise ConfigError(
                "num_processes starts processes that import this script, whose call would start more: put the call "
                'under `if __name__ == "__main__":`'
            )
        raise RunError(self.explain(rank, failure))

    def _say_stopped(self) -> None:
        print(f"stopped before training began: {self._stopped.describe()}", file=sys.stderr, flush=True)

    def explain(self, rank: int, failure: ProcessFailure) -> str:
        """Describe why the first rank failed; or which rank was killed, since the others then fail in collectives."""
        ended = self._first_ended or range(len(self._processes))  # all, if the agent was faster
        killed = [r for r in ended if self._processes[r].exitcode == -signal.SIGKILL]
        if killed:
            return (
                f"rank {killed[0]} of {self._count} was killed (SIGKILL), perhaps for lack of memory: start again to "
                "resume"
            )
        message: Any = failure.message  # torch declares it as text
        if isinstance(message, str):  # the rank had no time to say anything
            return (
                f"rank {rank} of {self._count} ended with exit status {failure.exitcode} and no Python error: see "
                "what it printed"
            )
        said, trace = str(message["message"]), str(message["extraInfo"]["py_callstack"])
        text = said.removeprefix("RunError: ") if said.startswith("RunError: ") else trace.strip()
        return f"rank {rank} of {self._count} failed: {text}"


def _handles_signals(process: BaseProcess) -> bool:
    """Return whether a process has a handler for SIGUSR1, as its StopRequests install."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return False
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> signal.SIGUSR1 - 1 & 1)


def _inherit_output() -> bool:
    """Return whether the output of new processes goes where this process's does; not so in a notebook."""
    try:
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (AttributeError, OSError):
        return False


@contextmanager
def _semaphores_named(prefix: str) -> Iterator[None]:
    """Have the names of this process's semaphores, and of those that it starts, begin with `prefix`: if all of them are
    killed at once nobody removes the semaphores, and `temporary_directory` does later.

    They cannot be unlinked once all processes have opened them: Python does it at the end, and complains.
    """
    process: Any = multiprocessing.current_process()
    settings = process._config
    before = settings["semprefix"]
    settings["semprefix"] = f"/{prefix}"
    try:
        yield
    finally:
        settings["semprefix"] = before


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent: its log of failed ranks is in the exception, and its warning does not apply."""
    names = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(names)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
