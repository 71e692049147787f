"""One run directory, one run at a time: ``run.lock`` names who trains there, and its modification time is a sign of
life.

No lock of the operating system is used: those are unreliable on shared file systems, and what counts is whether the
*run* lives, not its host. On the holder's own machine its process is looked up; from elsewhere the file's modification
time decides. A holder that finds another's name in the file (it was frozen for so long that it was taken for dead)
ends. Nothing here needs torch.
"""

import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dali_train.errors import ConfigError
from dali_train.files import open_regular

BEAT_S = 3.0
STALE_S = 30.0  # without a sign of life for so long, a holder on another machine is dead
_GRACE_S = 4.0  # a process of this machine may be about to end: it has just lost its launcher
_LARGEST_FILE = 10_000
FILE = "run.lock"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that trains in a run directory: rank 0 of the run."""

    token: str  # unique
    host: str
    machine: str  # boot and process id namespace, within which `pid` and `pid_start` identify a process
    pid: int
    pid_start: int  # in clock ticks since boot, since process ids are used again
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
            job=environ.get("SLURM_JOB_ID", ""),
            job_restarts=int(restarts) if restarts.isdigit() else 0,
        )

    def describe(self) -> str:
        return f"pid {self.pid} on {self.host}" + (f", Slurm job {self.job}" if self.job else "")

    def is_gone(self, observer: "Holder") -> bool | None:
        """Whether the process has ended, as far as `observer`'s machine can see; None: it cannot."""
        if self.job and self.job == observer.job and self.job_restarts < observer.job_restarts:
            return True  # Slurm ends a job before it starts it again
        if self.machine == observer.machine:
            return not _is_alive(self.pid, self.pid_start)
        # The same host after a reboot; with the same boot it is a container beside this one.
        return True if self.host == observer.host and self.machine.split()[0] != observer.machine.split()[0] else None


class RunLock:
    """Held from construction until `release`, or until the process ends in whatever way.

    Args:
        say: called with the reason why construction takes long.

    Raises:
        ConfigError: another run trains in `directory`, or it cannot be written.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._path = directory / FILE
        self.holder = Holder.this_process(environ)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._acquire(say)
        except OSError as error:
            raise ConfigError(
                f"run.dir {directory} cannot be written ({error}): choose another, or make room and permission there"
            ) from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """The run has ended."""
        self._closing.set()
        self._thread.join()
        found = _read(self._path)
        if found is not None and found[0] is not None and found[0].token == self.holder.token:
            self._path.unlink(missing_ok=True)

    def _acquire(self, say: Callable[[str], None]) -> None:
        first: tuple[str, float] | None = None  # the other holder, and its sign of life when first seen
        start, said = time.monotonic(), False
        while not _create(self._path, self.holder):
            found = _read(self._path)
            if found is None:
                continue  # released just now
            other, beat = found
            gone = other.is_gone(self.holder) if other is not None else None
            if gone or (gone is None and (self._file_clock() - beat >= STALE_S or time.monotonic() - start >= STALE_S)):
                if self._take_over(other):
                    return
                continue
            who = other.describe() if other is not None else "an unknown process"
            first = first or (who, beat)
            waited_s = time.monotonic() - start
            if first[0] != who or (beat != first[1] and gone is None) or (gone is False and waited_s >= _GRACE_S):
                raise ConfigError(
                    f"run.dir {self._path.parent} is in use: {who} trains there. Wait for it, end it, or choose "
                    "another run.dir"
                )
            if gone is None and not said:
                said = True
                say(f"run.dir was last used by {who}: waiting up to {STALE_S:.0f} s for a sign of life")
            time.sleep(1.0)

    def _take_over(self, dead: Holder | None) -> bool:
        """Put this process's name in the place of a dead one's; whether it is still there a moment later.

        Of two that do so at once the last wins, and the other finds the winner's name here or with its next beat.
        """
        found = _read(self._path)
        if found is not None and found[0] != dead:
            return False
        own = self._path.with_name(f".{FILE}.{self.holder.token}")
        _create(own, self.holder)
        own.replace(self._path)
        time.sleep(0.2)
        found = _read(self._path)
        return found is not None and found[0] == self.holder

    def _file_clock(self) -> float:
        """The time by the clock that also dates the lock: a file server's, perhaps."""
        probe = self._path.with_name(f".{FILE}.{self.holder.token}")
        try:
            with probe.open("wb") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            try:
                found = _read(self._path)
                if found is None:
                    _create(self._path, self.holder)
                elif found[0] is not None and found[0].token != self.holder.token:
                    print(
                        f"{self._path.parent} was taken over by {found[0].describe()}, since this process gave no "
                        "sign of life for long: it ends, so that not two train there",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)
                else:
                    os.utime(self._path)
            except OSError:
                continue  # the file server is away: a later beat may reach it


def find_holder(directory: Path) -> Holder | None:
    """Who trains in `directory` now; None: nobody. A holder on another machine counts if it gave a sign of life
    lately."""
    holder, beat = _read(directory / FILE) or (None, 0.0)
    if holder is None:
        return None
    gone = holder.is_gone(Holder.this_process())
    return None if gone or (gone is None and time.time() - beat >= STALE_S) else holder


def _create(path: Path, holder: Holder) -> bool:
    """False if there is such a file already. O_EXCL is atomic on shared file systems, too."""
    try:
        with path.open("x") as file:
            json.dump(asdict(holder), file)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> tuple[Holder | None, float] | None:
    """The holder that a lock names (None: it names none) and when it was last seen; None without a lock.

    The file is opened, since NFS then asks the server instead of remembering.
    """
    try:
        with open_regular(path) as file:
            beat = os.fstat(file.fileno()).st_mtime
            content = file.read(_LARGEST_FILE)
    except FileNotFoundError:
        return None
    try:
        holder = Holder(**json.loads(content))
        types = {name: type(value) for name, value in asdict(Holder.this_process()).items()}
        return (holder if all(type(value) is types[name] for name, value in asdict(holder).items()) else None), beat
    except (ValueError, TypeError):
        return None, beat


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return f"{platform.node()} ?"


def _pid_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: there is none, or it has ended and nobody has reaped
    it."""
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
