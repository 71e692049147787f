"""Ranks for the tests: processes that a test may kill, and a pool of four that runs job after job.

Both are forked from a server that has imported torch and DALI once, which takes seconds.
"""

import atexit
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.preloaded"])


@functools.cache
def _slowness() -> float:
    """Return how many times as long as on a quiet core of an EPYC of 2026 a piece of work takes this process when it
    first asks, at least 1."""
    begin = time.perf_counter()
    sum(number * number for number in range(2_000_000))
    return max(1.0, (time.perf_counter() - begin) / 0.1)


def patience(seconds: float) -> float:
    """Return how long to wait for what must come, given how long that is on a quiet machine with a wide margin. A
    deadline in a test is one of these."""
    return seconds * _slowness()


TIMEOUT_S = patience(300)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def launch_environments(ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets, for each rank."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Forked:
    """A function on all ranks, in processes of their own; it gets the variables of its rank, and `arguments`."""

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
        self._processes = [
            FORK.Process(target=function, args=(environment, *arguments)) for environment in launch_environments(ranks)
        ]
        for process in self._processes:
            process.start()

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def alive(self) -> list[bool]:
        return [process.is_alive() for process in self._processes]

    def running(self) -> bool:
        return all(self.alive())

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.wait()

    def wait(self) -> list[int | None]:
        """Return the exit statuses."""
        for process in self._processes:
            process.join(TIMEOUT_S)
        return [process.exitcode for process in self._processes]


class Ranks(Forked):
    """All ranks of one command as processes of their own, which end with its exit status."""

    def __init__(self, arguments: list[str], ranks: int, log: Path, extra: dict[str, str] | None = None) -> None:
        self.log = log
        super().__init__(_rank, (extra or {}, arguments, log), ranks)


def _rank(environment: dict[str, str], extra: dict[str, str], arguments: list[str], log: Path) -> None:
    os.environ.update(environment | extra)
    print_into(log)
    sys.exit(command(arguments))


def in_environment(environment: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` with the variables of `environment` that this process lacks."""
    os.environ.update(environment | os.environ)
    return function(*arguments)


def print_into(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def command(arguments: list[str]) -> int:
    """Run ``dali-train ARGUMENTS`` in this process."""
    from dali_train.cli import main

    sys.argv = ["dali-train", *arguments]
    return main()


class Pool:
    """Processes that are handed one job after the other, which saves the start of each.

    A job is a function that the first ranks of the pool call at once, with the environment that torchrun would give
    them, and their output in a file. A rank that dies, fails, or leaves a process group behind is replaced before the
    next job. Between two jobs a rank undoes what a run leaves to the end of its process. Without a GPU torch.compile's
    backend is aot_eager: Inductor's code for CPUs takes minutes, and no run uses it unless it is asked to.
    """

    SIZE = 4  # jobs with more ranks start the others for themselves

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        atexit.register(self.close)  # later than multiprocessing's own, so it runs before: that waits for the workers

    def run(
        self, ranks: int, target: Callable[..., int | None], *arguments: Any, log: Path, timeout_s: float = TIMEOUT_S
    ) -> list[int | None]:
        """Call ``target(*arguments)`` on `ranks` ranks and return their exit statuses; None: not over in time.

        An exception is status 1, and its traceback is in `log`.
        """
        self._workers += [_Worker() for _ in range(ranks - len(self._workers))]
        workers, end = self._workers[:ranks], time.monotonic() + timeout_s
        try:
            for worker, environment in zip(workers, launch_environments(ranks), strict=True):
                worker.begin((target, arguments, environment, log))
            return [worker.finish(end) for worker in workers]
        finally:
            for worker in self._workers[:ranks]:
                if not worker.reusable or worker in self._workers[self.SIZE :]:
                    worker.kill()
                    self._workers.remove(worker)

    def close(self) -> None:
        while self._workers:
            self._workers.pop().kill()


class _Worker:
    """The parent's side of one process of the pool."""

    def __init__(self) -> None:
        self._jobs, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        self.reusable = True

    def begin(self, job: tuple[Any, ...]) -> None:
        self.reusable = False
        self._jobs.send(job)

    def finish(self, end: float) -> int | None:
        """The job's status, of a process that died its own."""
        if not self._jobs.poll(max(0.0, end - time.monotonic())):
            os.kill(self._process.pid or 0, signal.SIGUSR2)  # its stacks, into the log
            time.sleep(1)
            return None
        try:
            status, self.reusable = self._jobs.recv()
        except EOFError:
            self._process.join()
            return self._process.exitcode
        return int(status)

    def kill(self) -> None:
        self._jobs.close()
        self._process.kill()
        self._process.join()


def _serve(jobs: Connection) -> None:
    """The process's side: jobs until the parent is gone."""
    import torch

    if not torch.cuda.is_available():
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    faulthandler.register(signal.SIGUSR2)
    environment, directory, num_threads = dict(os.environ), Path.cwd(), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    while True:
        try:
            target, arguments, extra, log = jobs.recv()
        except EOFError:
            return
        os.environ.update(extra)
        print_into(log)
        status = _call(target, arguments)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if (listener := signal.set_wakeup_fd(-1)) != -1:  # the run's, whose thread ends with it
            os.close(listener)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)  # of a test's config, which would change the bits of later runs
        if torch.cuda.is_initialized():
            torch.cuda.set_device(0)  # it was that of the job's rank
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        # torch keeps a DeviceMesh's process groups, and DTensor's caches would name them to a later job.
        kept_groups = torch.distributed.is_initialized() or "pt_gloo_runloop" in _thread_names()
        reusable = status in (0, 2, 75) and not kept_groups
        jobs.send((status, reusable))


def _thread_names() -> set[str]:
    names = set()
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.add(thread.read_text().strip())
    return names


def _call(target: Callable[..., int | None], arguments: tuple[Any, ...]) -> int:
    """Call it as a process would, to its exit status."""
    try:
        with warnings.catch_warnings():  # which also lets each warning be shown again
            return target(*arguments) or 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        logging.captureWarnings(False)
        sys.stdout.flush()
        sys.stderr.flush()


POOL = Pool()
