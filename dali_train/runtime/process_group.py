"""The rendezvous of the ranks, and their process groups."""

import os
import platform
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
from dali_train.errors import NCCL_SEGMENT, ConfigError, RunError
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.lock import Holder, RunLock
from dali_train.runtime.process import choose_device
from dali_train.runtime.status import START_AGAIN
from dali_train.runtime.stop import StopRequests
from dali_train.text import printable

Value = TypeVar("Value")

RENDEZVOUS_TIMEOUT = timedelta(seconds=50)  # a minute with the start of the program
# The watchdog ends a rank that waits for longer than parallel.timeout_s, with a report; collectives give up after it.
_AFTER_WATCHDOG = timedelta(seconds=15)
_LATE_S = 10


@contextmanager
def process_group(launch: Launch, device: torch.device, stop: StopRequests | None = None) -> Iterator[Launch]:
    """Initialise the default process group (NCCL on GPUs, Gloo on CPUs) for the duration of the block. A single process
    gets none. Yields `launch` with the port of the shared store.

    A rank that is asked to stop while it waits for the others ends with status 75.

    Raises:
        ConfigError: some ranks found a GPU and others did not; the address of rank 0 is none; GLOO_SOCKET_IFNAME names
            no network interface of this host.
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
    _check_address(launch)
    check_interfaces()
    done = threading.Event()
    threading.Thread(target=_watch_rendezvous, args=(launch, done, stop), name="rendezvous", daemon=True).start()
    try:
        # A short timeout for the rendezvous, a longer one for the work.
        store, port = _rendezvous(launch)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        _require_same_backend(store, backend)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_timeout(launch),
            device_id=device if backend == "nccl" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        _end_if_asked(launch, stop)  # another rank was too, and is gone
        if NCCL_SEGMENT in str(error):  # all were reached: `explain` has the remedy
            raise
        raise RunError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) did not reach all others through "
            f"{launch.host}:{launch.port} within {RENDEZVOUS_TIMEOUT.seconds} s ({str(error).splitlines()[0]}): "
            f"{_reason_for_silence(launch)}"
        ) from error
    finally:
        done.set()
    yield replace(launch, port=port)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


@contextmanager
def joined(
    options: LaunchOptions, config: Config, stop: StopRequests | None = None
) -> Iterator[tuple[Launch, torch.device]]:
    """Determine rank and device, and join the default process group for the duration of the context.

    Raises:
        ConfigError: the launcher's variables contradict each other, or there is no device run.device.
        RunError: see `process_group`.
    """
    launch = replace(discover(options), timeout_s=config.parallel.timeout_s)
    device = choose_device(config.run.device, launch)
    with process_group(launch, device, stop) as launch:
        yield launch, device


def _check_address(launch: Launch) -> None:
    """Raises ConfigError: the address of rank 0 is written wrongly. A name that no server knows may be a pod's that is
    about to start, so torch goes on asking for it."""
    bare = launch.host.strip("[]")
    if bare != launch.host:
        raise ConfigError(f"MASTER_ADDR is {printable(launch.host)}: write {printable(bare)}, without brackets")
    try:
        socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise ConfigError(
            f"MASTER_ADDR is {printable(launch.host)}, no host name: use rank 0's name or number"
        ) from None
    except OSError:
        pass


def check_interfaces() -> None:
    """Raises ConfigError: GLOO_SOCKET_IFNAME does not name network interfaces. Gloo's own error does not name it."""
    value = os.environ.get("GLOO_SOCKET_IFNAME")
    if value is None:
        return
    here = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in value.split(",") if name not in here]:
        reason = "NCCL's notation" if value[:1] in ("^", "=") else f"not an interface of {platform.node()}"
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME is {printable(value)}, and {printable(missing[0]) or 'an empty name'} is {reason}: "
            f"use full names separated by commas, of {', '.join(here)}, or unset it"
        )


def _require_same_backend(store: dist.Store, backend: str) -> None:
    """Refuse a mixture of backends, whose ranks would wait for each other without an error."""
    mine = f"{backend} on {platform.node()}"
    first = store.compare_set("dali_train/backend", "", mine).decode()
    if first.split()[0] != backend:
        raise ConfigError(
            f"this rank uses {mine}, another one {first}: NCCL is for GPUs, and torch finds none on a host with gloo. "
            "Check its driver, or set run.device cpu for all ranks"
        )


def _watch_rendezvous(launch: Launch, done: threading.Event, stop: StopRequests | None) -> None:
    """End this process if it is asked to stop during the rendezvous, while the main thread waits outside Python, or if
    nothing answers: torch (2.15) waits forever if another program holds the port and never answers. In every other case
    torch's own timeout fires first, a few seconds late."""
    end = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds() + _LATE_S
    while not done.wait(0.2):
        _end_if_asked(launch, stop)
        if time.monotonic() > end:
            print(
                f"rank {launch.rank} of {launch.world_size} ({launch.launcher}): no answer from "
                f"{launch.host}:{launch.port} within {RENDEZVOUS_TIMEOUT.seconds} s: {_reason_for_silence(launch)}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def _reason_for_silence(launch: Launch) -> str:
    """Return why rank 0 does not answer, as far as this host can tell, and the remedy."""
    try:
        socket.create_connection((launch.host, launch.port), 2).close()
    except socket.gaierror as error:
        return (
            f"{platform.node()} cannot look up {printable(launch.host)} ({error.strerror}). Use a name that it knows, "
            "or a number, as MASTER_ADDR"
        )
    except OSError as error:
        return f"nobody listens there ({error.strerror or error}). Check that rank 0 was started and can be reached"
    return (
        "something listens there. Check that every rank was started; if that is not rank 0 of this run, choose another "
        "port"
    )


def _end_if_asked(launch: Launch, stop: StopRequests | None) -> None:
    if stop is not None and (reason := stop.reason()):
        if launch.rank == 0:
            print(f"stopped before training began: {reason.describe()}", file=sys.stderr, flush=True)
        os._exit(START_AGAIN)


def _rendezvous(launch: Launch) -> tuple[dist.Store, int]:
    """Return a store that all ranks share, and its port on the launch's host."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=RENDEZVOUS_TIMEOUT))
        return store, launch.port
    # An elastic agent's store outlives its workers. After a restart they would find the addresses of dead ranks there
    # (torch 2.15: "Gloo connectFullMesh failed", again and again). So rank 0 opens a new store for each start, and the
    # agent's store only holds its port.
    agents_store = dist.TCPStore(launch.host, launch.port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    if launch.rank == 0:
        store = dist.TCPStore(launch.host, 0, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
        agents_store.set("dali_train/port", str(store.port))
        return store, store.port
    end = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while True:
        port = int(agents_store.get("dali_train/port"))  # perhaps still that of an earlier start
        try:
            socket.create_connection((launch.host, port), 2).close()  # torch would print C++ stacks if nobody listens
            store = dist.TCPStore(launch.host, port, is_master=False, timeout=timedelta(seconds=2))
            if store.add(f"rank{launch.rank}", 1) == 1:
                return store, port
            reason = "the store belongs to an earlier start"
        except (OSError, RuntimeError) as error:  # an earlier start's, or not reachable
            reason = str(error)
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0's store on port {port}: {reason}")
        time.sleep(0.2)


def host_group(launch: Launch, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return a new group of all ranks for communication in host memory; None for a single process.

    Its collectives give up after `timeout`, by default when the watchdog would have ended this rank.
    """
    if launch.world_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timeout or _timeout(launch))
    assert isinstance(group, dist.ProcessGroup)  # it is a number on ranks outside the group
    return group


def _timeout(launch: Launch) -> timedelta:
    return timedelta(seconds=launch.timeout_s) + _AFTER_WATCHDOG


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
        dist.barrier(group)  # rank 0 must not leave before all have received the error
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
