"""``run.lock``, which names the process that trains in a run directory, so that only one run at a time does.

No lock of the operating system is used: those are unreliable on shared file systems, and the question is whether the
*run* is alive, not its host. On the holder's own machine its process is looked up. From other machines the holder
counts as dead when the file's modification time has not changed for `STALE_S`, by the observer's own clock. A holder
whose lock is gone, names another process, or could not be refreshed for that long has lost it and ends. Nothing here
needs torch.
"""

import errno
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from dali_train.config.check import Rule, from_json
from dali_train.errors import ConfigError, UserError
from dali_train.files import open_regular, read_json, remove_partial_files
from dali_train.text import printable

BEAT_S = 3.0
STALE_S = 30.0
_GRACE_S = 4.0  # a process on this machine may be about to end, having just lost its launcher
_LARGEST_FILE = 4096
FILE = "run.lock"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that trains in a run directory: rank 0 of the run."""

    token: str  # unique
    host: str = ""  # where the system does not say
    machine: str  # boot and process id namespace, within which `pid` and `pid_start` identify a process
    pid: Annotated[int, Rule("a process id", 1, (1 << 31) - 1)]
    pid_start: int  # in clock ticks since boot, since process ids are used again
    since: str  # local time of the start, for people
    job: str = ""  # Slurm's job id
    job_restarts: int = 0

    @classmethod
    def this_process(cls, environ: Mapping[str, str] = os.environ) -> "Holder":
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            token=uuid.uuid4().hex,
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            pid_start=_pid_start(os.getpid()) or 0,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            job=environ.get("SLURM_JOB_ID", ""),
            job_restarts=int(restarts) if restarts.isdecimal() and len(restarts) < 10 else 0,
        )

    def describe(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return printable(f"pid {self.pid} on {self.host}{job}, since {self.since}")

    def is_gone(self, observer: "Holder") -> bool | None:
        """Return whether the process has ended, or None if `observer`'s machine cannot tell."""
        if self.job and self.job == observer.job and self.job_restarts < observer.job_restarts:
            return True  # Slurm ends a job before it starts it again
        if self.machine == observer.machine:
            return not _is_alive(self.pid, self.pid_start)
        # The same host after a reboot; with the same boot it is a container beside this one.
        return True if self.host == observer.host and self.machine.split()[:1] != observer.machine.split()[:1] else None


class RunLock:
    """Held from construction until `release`, or until the process ends in any way.

    Args:
        say: called with the reason if construction has to wait.

    Raises:
        ConfigError: another run trains in `directory`, or it is not writable.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._path = directory / FILE
        self.holder = Holder.this_process(environ)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._acquire(say)
        except OSError as error:
            raise ConfigError(
                f"run.dir {directory} cannot be written ({error}): choose another, or check its space and permissions"
            ) from error
        self._tidy()
        self._refreshed = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lock. This never raises, so that it does not hide why the run ended."""
        self._closing.set()
        self._thread.join()
        try:
            lock = _read(self._path)
            if lock is not None and lock[0] == self.holder:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            print(f"{self._path} could not be removed ({error}): the next start takes it over", file=sys.stderr)

    def _acquire(self, say: Callable[[str], None]) -> None:
        start = time.monotonic()
        first = None
        while not _create(self._path, self.holder):
            lock = _read(self._path)
            if lock is None:
                continue  # released just now
            holder, heartbeat = lock
            has_ended = holder.is_gone(self.holder) if holder is not None else None
            described = holder.describe() if holder is not None else "an unknown process"
            if first is None:
                first = lock
                if has_ended is None:
                    say(f"run.dir was last used by {described}: waiting up to {STALE_S:.0f} s for a heartbeat")
            decision = _decide(
                has_ended,
                is_another=holder != first[0],
                has_beaten=heartbeat != first[1],
                waited_s=time.monotonic() - start,
            )
            if decision == "refuse":
                raise ConfigError(
                    f"run.dir {self._path.parent} is in use: {described} trains there. Wait for it, stop it, or choose "
                    "another run.dir"
                )
            if decision == "wait":
                time.sleep(BEAT_S / 3)
            elif self._take_over(holder):
                return

    def _take_over(self, dead: Holder | None) -> bool:
        """Replace a dead holder by this process; return False if another process was faster.

        If two do so at once the last one wins, and the other finds the winner's name here or at its next heartbeat.
        """
        lock = _read(self._path)
        if lock is not None and lock[0] != dead:
            return False
        mine = self._path.with_name(f".{FILE}.{self.holder.token}")
        try:
            _create(mine, self.holder)
            mine.replace(self._path)
        except FileNotFoundError:  # the process that was faster has tidied up
            return False
        time.sleep(0.2)  # for another process that does the same
        lock = _read(self._path)
        return lock is not None and lock[0] == self.holder

    def _tidy(self) -> None:
        """Remove what processes have left that were killed in `_take_over` or while they wrote a file. One that is
        alive there is too late now; the other ranks of this run wait for the lock."""
        with suppress(OSError):  # the next start removes it
            for rest in self._path.parent.glob(f".{FILE}.{'[0-9a-f]' * 32}"):
                rest.unlink()
            remove_partial_files(self._path.parent, depth=2)  # also of checkpoints/STEP/evaluation.json

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            if loss := self._refresh():
                print(
                    f"{self._path} is lost: {loss}. This process ends, so that only one trains there; start again "
                    "to resume",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    def _refresh(self) -> str:
        """Send a heartbeat; return how the lock was lost, or an empty string."""
        try:
            lock = _read(self._path)
            if lock is None:
                return "the file is gone"
            if lock[0] != self.holder:
                return f"it names {lock[0].describe() if lock[0] is not None else 'nobody'}"
            if time.monotonic() - self._refreshed < STALE_S:
                os.utime(self._path)
                self._refreshed = time.monotonic()
        except OSError:
            pass  # the file server is away: a later beat may reach it
        silent_s = time.monotonic() - self._refreshed
        return f"it was not refreshed for {silent_s:.0f} s, so another run may own it" if silent_s >= STALE_S else ""


def _decide(
    has_ended: bool | None, *, is_another: bool, has_beaten: bool, waited_s: float
) -> Literal["take over", "wait", "refuse"]:
    """Return what to do about a lock that exists.

    | its holder                                   | the decision                              |
    |----------------------------------------------|-------------------------------------------|
    | has ended                                    | take over                                 |
    | is not the one of the first look             | refuse: another start was faster          |
    | runs on this machine                         | wait _GRACE_S for its end, then refuse    |
    | is on another machine, and sent a heartbeat  | refuse                                    |
    | is on another machine, and is silent         | wait STALE_S for a heartbeat, then take over |

    Args:
        has_ended: None: this machine cannot tell.
        is_another: than at the first look.
        has_beaten: since the first look.
    """
    if has_ended:
        return "take over"
    if is_another:
        return "refuse"
    if has_ended is False:
        return "wait" if waited_s < _GRACE_S else "refuse"
    if has_beaten:
        return "refuse"
    return "wait" if waited_s < STALE_S else "take over"


def find_holder(directory: Path) -> Holder | None:
    """Return the process that trains in `directory` now, or None.

    A holder on another machine counts if it sent a heartbeat recently.
    """
    try:
        holder, beat = _read(directory / FILE) or (None, 0.0)
    except OSError:
        return None
    gone = holder is None or holder.is_gone(Holder.this_process())
    return None if gone or (gone is None and time.time() - beat >= STALE_S) else holder


def _create(path: Path, holder: Holder) -> bool:
    """Write a lock; False if there is such a file already. O_EXCL is atomic on shared file systems, too."""
    try:
        with path.open("x") as file:
            json.dump(asdict(holder), file)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> tuple[Holder | None, float] | None:
    """Return the holder that a lock names, None if it names none, and the time of its last heartbeat; None: no lock.

    The file is opened, since NFS then asks the server instead of remembering.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    if path.is_symlink():
        raise OSError(errno.EINVAL, "is a link, not what a run writes", str(path))
    try:
        with open_regular(path) as file:
            beat = os.fstat(file.fileno()).st_mtime
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return None
    try:
        return from_json(Holder, read_json(content, _LARGEST_FILE, name=path)), beat
    except UserError:
        return None, beat


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return f"{platform.node()} ?"


def _pid_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None: it has ended, reaped or not."""
    try:
        # After the name, which may hold spaces and parentheses: state, parent, ...; the start is the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None


def _is_alive(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, which /proc may hide
        return _pid_start(pid) in (start, None)
    return _pid_start(pid) == start
