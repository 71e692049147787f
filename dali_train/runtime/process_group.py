"""The rendezvous of the ranks, and their process groups."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dali_train.config import Config
from dali_train.errors import RunError
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.lock import Holder, RunLock
from dali_train.runtime.process import choose_device
from dali_train.runtime.status import START_AGAIN
from dali_train.runtime.stop import StopRequests

Value = TypeVar("Value")

MEETING_TIMEOUT = timedelta(seconds=50)  # a minute with the start of the program
# The watchdog ends a rank that waits for longer than parallel.timeout_s, with a report; collectives give up after it.
_AFTER_WATCHDOG = timedelta(seconds=15)
_SILENCE_S = 10


@contextmanager
def process_group(
    launch: Launch, device: torch.device, timeout_s: float = 600, stop: StopRequests | None = None
) -> Iterator[Launch]:
    """Within, have the default process group: NCCL on GPUs, Gloo on CPUs. A single process has none.

    Gives the launch back, with the port of the store that the ranks share.

    Its collectives give up a little later than `timeout_s`, parallel.timeout_s, after which the watchdog ends a rank.
    A rank that is asked to stop while it waits for the others ends with status 75.

    Raises:
        RunError: the other ranks were not reached within a minute.
    """
    if device.type == "cuda":
        # Before NCCL starts: its object collectives use the current device, else all of them cuda:0.
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        yield launch
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        MASTER_ADDR=launch.host,
        MASTER_PORT=str(launch.port),
    )
    met = threading.Event()
    threading.Thread(target=_end_meeting, args=(launch, met, stop), name="meeting", daemon=True).start()
    try:
        # Short while the ranks meet, longer while they work.
        store, port = _meet(launch)
        store.set_timeout(MEETING_TIMEOUT)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s) + _AFTER_WATCHDOG,
            device_id=device if backend == "nccl" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        _end_if_asked(launch, stop)  # as another rank was, which has gone
        raise RunError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) did not reach all others through "
            f"{launch.host}:{launch.port} within {MEETING_TIMEOUT.seconds} s ({str(error).splitlines()[0]}): check "
            "that every rank was started and that the address is reachable from each host"
        ) from error
    finally:
        met.set()
    yield replace(launch, port=port)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


@contextmanager
def joined(
    options: LaunchOptions, config: Config, stop: StopRequests | None = None
) -> Iterator[tuple[Launch, torch.device]]:
    """Find this process's rank and device, and within, be a member of the default process group.

    Raises:
        ConfigError: the launcher's variables contradict each other, or there is no device run.device.
        RunError: see `process_group`.
    """
    launch = discover(options)
    device = choose_device(config.run.device, launch)
    with process_group(launch, device, config.parallel.timeout_s, stop) as launch:
        yield launch, device


def _end_meeting(launch: Launch, met: threading.Event, stop: StopRequests | None) -> None:
    """End this process if it is asked to stop before the ranks have met, or if nobody answers: the main thread waits
    outside Python. torch (2.15) waits without end for what listens on the port and never answers, another program; its
    own limit comes first in all other cases, though some seconds late."""
    end = time.monotonic() + MEETING_TIMEOUT.total_seconds() + _SILENCE_S
    while not met.wait(0.2):
        _end_if_asked(launch, stop)
        if time.monotonic() > end:
            _give_up(launch)


def _end_if_asked(launch: Launch, stop: StopRequests | None) -> None:
    if stop is not None and (reason := stop.reason()):
        if launch.rank == 0:
            print(f"stopped before training began: {reason.describe()}", file=sys.stderr, flush=True)
        os._exit(START_AGAIN)


def _give_up(launch: Launch) -> None:
    print(
        f"rank {launch.rank} of {launch.world_size} ({launch.launcher}): what listens on {launch.host}:{launch.port} "
        f"gave no answer within {MEETING_TIMEOUT.seconds} s, so it is not rank 0 of this run: choose another port",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _meet(launch: Launch) -> tuple[dist.Store, int]:
    """Return a store that all ranks share, and its port on the launch's host."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=MEETING_TIMEOUT))
        return store, launch.port
    # An elastic agent's store outlives its workers, and after a restart they would find the addresses of the dead there
    # (torch 2.15: "Gloo connectFullMesh failed", again and again). So rank 0 opens a new one for each start, and the
    # agent's store only holds its port.
    agent = dist.TCPStore(launch.host, launch.port, is_master=False, timeout=MEETING_TIMEOUT)
    if launch.rank == 0:
        own = dist.TCPStore(launch.host, 0, is_master=True, wait_for_workers=False, timeout=MEETING_TIMEOUT)
        agent.set("dali_train/port", str(own.port))
        return own, own.port
    end = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    while True:
        port = int(agent.get("dali_train/port"))
        try:
            socket.create_connection((launch.host, port), 2).close()  # torch would print C++ stacks if nobody listens
            store = dist.TCPStore(launch.host, port, is_master=False, timeout=timedelta(seconds=2))
            if store.add(f"rank{launch.rank}", 1) == 1:
                return store, port
            reason = "the store found there is of an earlier start"
        except (OSError, RuntimeError) as error:  # of an earlier start too, or not reachable
            reason = str(error)
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0's store on port {port}: {reason}")
        time.sleep(0.2)


def host_group(launch: Launch, config: Config, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return a new group of all ranks for communication in host memory; None for a single process.

    Its collectives give up after `timeout`, by default when the watchdog would have ended this rank.
    """
    if launch.world_size == 1:
        return None
    group = dist.new_group(
        backend="gloo", timeout=timeout or timedelta(seconds=config.parallel.timeout_s) + _AFTER_WATCHDOG
    )
    assert isinstance(group, dist.ProcessGroup)  # a rank that is not in the group would get a number
    return group


def on_rank_0(function: Callable[[], Value], group: dist.ProcessGroup | None) -> Value:
    """Call `function` only on rank 0; return its value, or raise its error, on all ranks of `group`."""
    if group is None:
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    value, fault = outcome
    if fault is not None:
        dist.barrier(group)  # rank 0 must not leave before all know
        raise fault
    return value


def first_fault(fault: str, group: dist.ProcessGroup | None) -> tuple[str, int]:
    """Return the first non-empty `fault` of the ranks in `group`, and its rank, on all of them; or empty."""
    if group is None:
        return fault, 0
    faults = [""] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    return next(((text, rank) for rank, text in enumerate(faults) if text), ("", 0))


@contextmanager
def locked(directory: Path, group: dist.ProcessGroup | None) -> Iterator[Holder | None]:
    """Keep other runs out of the run directory. Rank 0 holds the lock, and only it gets the holder.

    Raises:
        ConfigError: on all ranks, if another run trains there or the directory is not writable.
    """
    locks: list[RunLock] = []
    try:
        on_rank_0(lambda: locks.append(RunLock(directory, say=partial(print, file=sys.stderr, flush=True))), group)
        yield locks[0].holder if locks else None
    finally:
        for lock in locks:
            lock.release()
