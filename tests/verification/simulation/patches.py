"""What the package's code meets in a simulation instead of the system: `os`, `open`, `fcntl`, and in the modules under
test `time`, `threading` and `uuid`. Calls on other paths and descriptors than the world's reach the system."""

import builtins
import fcntl
import io
import os
import platform
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist

from tests.verification.simulation.disk import FIRST_FD, ROOT, Disk
from tests.verification.simulation.group import COLLECTIVES
from tests.verification.simulation.world import _WORLD, Clock, DeadError, Threading, World

_OPEN, _SYSTEM_OPEN = io.open, os.open
_BELOW = f"{ROOT}/"


def _path(path: Any, dir_fd: int | None = None) -> str | None:
    """Return a path of the world, None for another one."""
    if dir_fd is not None:
        if dir_fd < FIRST_FD:
            return None
        return f"{_WORLD[-1].disk.handle(dir_fd).path}/{path}"
    text = path if type(path) is str else os.fspath(path) if not isinstance(path, int) else ""
    return text if isinstance(text, str) and (text.startswith(_BELOW) or text == ROOT) and _WORLD else None


class _Uuid:
    """The module `uuid`."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=_WORLD[-1].random.getrandbits(128))


def _open_fd(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    ours = _path(path, dir_fd)
    return _SYSTEM_OPEN(path, flags, mode, dir_fd=dir_fd) if ours is None else _WORLD[-1].disk.open(ours, flags)


_FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
_FLAGS |= {"a": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}


def _open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    path = _path(file)
    if path is None and not (isinstance(file, int) and file >= FIRST_FD):
        if _WORLD and not isinstance(file, int) and (made := _made_up(file)) is not None:
            return io.StringIO(made) if "b" not in mode else io.BytesIO(made.encode())
        return _OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
    world = _WORLD[-1]
    kind = next(letter for letter in mode if letter in _FLAGS)
    flags = _FLAGS[kind]
    if "+" in mode:
        flags = flags & ~os.O_WRONLY | os.O_RDWR
    fd = file if path is None else world.disk.open(path, flags)
    handle = world.disk.handle(fd)
    if kind == "a":
        handle.position = len(handle.node.data)
    both = "+" in mode
    raw = _Raw(world.disk, fd, readable=both or kind == "r", writable=both or kind != "r", name=handle.path)
    if buffering == 0:
        return raw
    buffer: Any = io.BufferedRandom(raw) if both else io.BufferedReader(raw) if kind == "r" else io.BufferedWriter(raw)
    return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)


def _made_up(path: Any) -> str | None:
    """Return the content of a file in /proc."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text.startswith("/proc/") or _WORLD[-1]._current is None:
        return None
    world = _WORLD[-1]
    machine = world.process.machine
    if text == "/proc/sys/kernel/random/boot_id":
        return f"{machine.name}-boot-{machine.boot}\n"
    name = text.split("/")[2]
    for process in world.processes:
        if name.isdecimal() and process.pid == int(name) and process.machine is machine and not process.is_dead:
            return f"{name} (python) S {' '.join(['0'] * 18)} {int(process.started * 100)} 0\n"
    raise FileNotFoundError(2, "No such file or directory", text)


def _kill(pid: int, number: int) -> None:
    if not _WORLD or _WORLD[-1]._current is None:
        return _KILL(pid, number)
    world = _WORLD[-1]
    if not any(p.pid == pid and p.machine is world.process.machine and not p.is_dead for p in world.processes):
        raise ProcessLookupError(3, "No such process")
    return None


_KILL = os.kill


def _exit(status: int) -> None:
    _WORLD[-1].end(_WORLD[-1].process, status)
    raise DeadError


def _on_path(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    system = getattr(os, name)

    def either(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
        ours = _path(path, dir_fd)
        if ours is not None:
            return call(_WORLD[-1].disk, ours, *args, **options)
        if dir_fd is not None:
            options["dir_fd"] = dir_fd
        return system(path, *args, **options)

    return either


def _on_fd(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    system = getattr(os, name)

    def either(fd: int, *args: Any) -> Any:
        return call(_WORLD[-1].disk, fd, *args) if fd >= FIRST_FD else system(fd, *args)

    return either


def _on_two(name: str, call: Callable[[Disk, str, str], None]) -> Callable[..., Any]:
    system = getattr(os, name)

    def either(source: Any, target: Any, **options: Any) -> Any:
        first = _path(source)
        return system(source, target, **options) if first is None else call(_WORLD[-1].disk, first, os.fspath(target))

    return either


def _scan(path: Any = ".") -> Any:
    world = _WORLD[-1] if _WORLD else None
    if isinstance(path, int) and path >= FIRST_FD and world is not None:
        path = world.disk.handle(path).path
    ours = _path(path)
    if ours is None or world is None:
        return _SCAN(path)
    return _Scan([_Entry(world.disk, ours, name) for name in world.disk.scan(ours)])


_SCAN = os.scandir
_STAT = os.stat


def _stat_any(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    if isinstance(path, int) and path >= FIRST_FD:
        return _WORLD[-1].disk.status(_WORLD[-1].disk.handle(path).node)
    ours = _path(path, dir_fd)
    if ours is None:
        return _STAT(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    return _WORLD[-1].disk.stat(ours, follow=follow_symlinks)


def _flock(file: Any, operation: int) -> None:
    fd = file if isinstance(file, int) else file.fileno()
    if fd >= FIRST_FD:
        _WORLD[-1].disk.flock(fd, operation)
    else:
        _FLOCK(fd, operation)


_FLOCK = fcntl.flock


def _statvfs(path: Any) -> Any:
    if _path(path) is None:
        return _STATVFS(path)
    free = 0 if _WORLD[-1].disk.full_until > _WORLD[-1].now else 1 << 30
    return os.statvfs_result((4096, 4096, 1 << 20, free // 4096, free // 4096, 1 << 20, 1 << 20, 1 << 20, 0, 255))


_STATVFS = os.statvfs


def _readlink(path: Any, *, dir_fd: int | None = None) -> Any:
    if os.fspath(path) == "/proc/self/ns/pid" and _WORLD and _WORLD[-1]._current is not None:
        return "pid:[1]"
    ours = _path(path, dir_fd)
    return _READLINK(path, dir_fd=dir_fd) if ours is None else _WORLD[-1].disk.readlink(ours)


_READLINK = os.readlink


def _of_process(system: Callable[[], Any], ours: Callable[[World], Any]) -> Callable[[], Any]:
    return lambda: ours(_WORLD[-1]) if _WORLD and _WORLD[-1]._current is not None else system()


_OS: dict[str, Callable[..., Any]] = {
    "open": _open_fd,
    "scandir": _scan,
    "stat": _stat_any,
    "statvfs": _statvfs,
    "readlink": _readlink,
    "kill": _kill,
    "_exit": _exit,
    "listdir": _on_path("listdir", Disk.scan),
    "lstat": _on_path("lstat", lambda disk, path: disk.stat(path, follow=False)),
    "mkdir": _on_path("mkdir", lambda disk, path, mode=0o777: disk.mkdir(path)),
    "unlink": _on_path("unlink", Disk.unlink),
    "remove": _on_path("remove", Disk.unlink),
    "rmdir": _on_path("rmdir", Disk.rmdir),
    "utime": _on_path("utime", lambda disk, path, times=None, ns=None: disk.utime(path)),
    "chmod": _on_path("chmod", lambda disk, path, mode, follow_symlinks=True: disk.world.call("chmod", path)),
    "rename": _on_two("rename", Disk.rename),
    "replace": _on_two("replace", Disk.rename),
    "close": _on_fd("close", Disk.close),
    "read": _on_fd("read", Disk.read),
    "write": _on_fd("write", lambda disk, fd, content: disk.write(fd, bytes(content))),
    "writev": _on_fd("writev", lambda disk, fd, pieces: disk.write(fd, b"".join(pieces))),
    "fsync": _on_fd("fsync", Disk.fsync),
    "fstat": _on_fd("fstat", lambda disk, fd: disk.status(disk.handle(fd).node)),
    "getpid": _of_process(os.getpid, lambda world: world.process.pid),
}
_SYMLINK = os.symlink


def _symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    ours = _path(path, dir_fd)
    if ours is None:
        _SYMLINK(target, path, target_is_directory, dir_fd=dir_fd)
    else:
        _WORLD[-1].disk.symlink(os.fspath(target), ours)


class _Raw(io.RawIOBase):
    """An open file, below Python's buffers."""

    def __init__(self, disk: Disk, fd: int, *, readable: bool, writable: bool, name: str) -> None:
        self._disk, self._fd, self._readable, self._writable, self.name = disk, fd, readable, writable, name
        self.mode = "rb+" if writable else "rb"

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return self._readable

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._disk.read(self._fd, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def write(self, content: Any) -> int:
        handle = self._disk.handles.get(self._fd)
        if handle is None or handle.process.is_dead:  # what a dead process had in its buffers
            return len(content)
        return self._disk.write(self._fd, bytes(content))

    def seek(self, offset: int, whence: int = 0) -> int:
        handle = self._disk.handles.get(self._fd)
        if handle is None:
            return 0
        start = (0, handle.position, len(self._disk.bytes_of(handle.node)))[whence]
        handle.position = start + offset
        return handle.position

    def tell(self) -> int:
        return self.seek(0, 1)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        self._disk.truncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            if (handle := self._disk.handles.get(self._fd)) is not None and not handle.process.is_dead:
                self._disk._close(self._fd)


class _Entry:
    """`os.DirEntry`."""

    __slots__ = ("_disk", "name", "path")

    def __init__(self, disk: Disk, path: str, name: str) -> None:
        self._disk, self.path, self.name = disk, f"{path}/{name}", name

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._disk.stat(self.path, follow=follow_symlinks)

    def _is(self, kind: int, follow: bool) -> bool:
        try:
            node = self._disk._find(self.path, follow=follow)[2]
        except OSError:
            return False
        return node is not None and node.kind == kind

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_IFLNK, False)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _Scan:
    """What `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> "_Scan":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def close(self) -> None:
        pass


@contextmanager
def simulated(*modules: ModuleType, **others: Any) -> Iterator[None]:
    """Have the code of `modules` run in worlds: their clock, threads and system are those of the `current` one.

    Args:
        others: what else `modules` have under these names instead of their own.
    """
    names = {"time": Clock, "threading": Threading, "uuid": _Uuid} | others
    patches: list[tuple[Any, str, Any]] = [(os, name, call) for name, call in _OS.items()]
    patches += [(os, "symlink", _symlink), (io, "open", _open_file), (builtins, "open", _open_file)]
    patches += [(fcntl, "flock", _flock)]
    patches += [(socket, "gethostname", _of_process(socket.gethostname, lambda world: world.process.machine.name))]
    patches += [(dist, name, call) for name, call in COLLECTIVES.items()]
    patches += [(platform, "node", _of_process(platform.node, lambda world: world.process.machine.name))]
    patches += [(module, name, value) for module in modules for name, value in names.items() if hasattr(module, name)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def current(world: World) -> Iterator[World]:
    """Make `world` the one that patched calls reach."""
    _WORLD.append(world)
    try:
        yield world
    finally:
        _WORLD.pop()
