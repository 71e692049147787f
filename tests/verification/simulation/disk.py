"""The file system of a simulated world: POSIX, with two states: what processes see, and what a power failure leaves.

What is between them is lost, kept or torn: bytes that were not flushed, and names (links, renames, removals) whose
directory was not. With `Disk.journaled` names survive in order, and any flush keeps all names before it, as on ext4 and
XFS; without it any subset of them survives, which is all that POSIX promises.

A `Disk.shared` one is a server's, as Linux's client sees it (NFS: nfs(5), "Data and metadata coherence", and
fs/nfs/dir.c). A machine may trust what it has once learned of a name, also that there was no such name, until the
attributes of the directory expire (at most acdirmax, 60 s), unless it has opened or changed the directory since
(`nfs_check_verifier`, `nfs_neg_need_reval`). A file that is opened is asked for at the server, but by its handle: one
that has got another name meanwhile is still found under the old one (`nfs_lookup_verify_inode`). Whether a new name
exists already the server decides, and it renames and links atomically. Bytes reach the others when a file is closed or
flushed (close-to-open). Left out: sizes and times of files that are remembered (acregmax), and requests that a server
carries out twice because its answer was lost, which NFS 4.1 excludes (RFC 8881, 2.10.6).
"""

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.verification.simulation.world import Machine, Process, World

ROOT = "/sim"  # where it is mounted
FIRST_FD = 1 << 20  # descriptors from here on are the world's
_UID = os.getuid()


class Node:
    """A file, directory or symbolic link."""

    __slots__ = ("data", "dirty", "entries", "kept", "kind", "mtime", "num_links", "number", "target", "writes")

    def __init__(self, kind: int, number: int, mtime: float) -> None:
        self.kind, self.number, self.mtime = kind, number, mtime
        self.data = bytearray()
        self.entries: dict[str, Node] = {}
        self.kept: Any = b"" if kind == stat.S_IFREG else {}  # bytes or entries that a power failure leaves
        self.writes: list[tuple[int, bytes] | int] = []  # not flushed: at an offset, or the size of a truncation
        self.target = ""
        self.num_links = 0  # of a shared disk
        self.dirty: dict[Machine, bytearray] = {}  # by machine, of a shared disk: not yet at the server

    @property
    def is_directory(self) -> bool:
        return self.kind == stat.S_IFDIR


@dataclass(eq=False)
class Handle:
    """An open file."""

    node: Node
    path: str
    process: "Process"
    writable: bool
    appends: bool
    position: int = 0


@dataclass(eq=False)
class Locked:
    """Who holds a file's flock."""

    handles: set[Handle]
    is_shared: bool


class Disk:
    """A file system mounted at `ROOT`."""

    def __init__(self, world: "World", *, shared: bool = False, journaled: bool = True) -> None:
        self.world, self.shared, self.journaled = world, shared, journaled
        self.root = Node(stat.S_IFDIR, 1, 0.0)
        self.num_nodes = 1
        self.journal: list[list[tuple[Node, str, Node | None]]] = []  # changes of names, not flushed
        self.full_until = -1.0
        self.handles: dict[int, Handle] = {}
        self.locks: dict[Node, Locked] = {}

    def change(self, *changes: tuple[Node, str, Node | None]) -> None:
        """Change names, atomically."""
        for directory, name, node in changes:
            replaced = directory.entries.pop(name, None)
            if replaced is not None:
                replaced.num_links -= 1
            if node is not None:
                directory.entries[name] = node
                node.num_links += 1
            directory.mtime = self.world.wall()
        self.journal.append([*changes])
        if self.shared:  # a server answers when it has them on its disk
            self._keep_names(None)

    def flush(self, node: Node) -> None:
        if node.kind == stat.S_IFREG:
            node.kept, node.writes = bytes(node.data), []
        if self.journaled:
            self._keep_names(None)
        elif node.kind == stat.S_IFDIR:
            self._keep_names(node)

    def _keep_names(self, directory: Node | None) -> None:
        left = []
        for changes in self.journal:
            if directory is None or any(changed is directory for changed, _, _ in changes):
                self._keep(changes)
            else:
                left.append(changes)
        self.journal = left

    def _keep(self, changes: list[tuple[Node, str, Node | None]]) -> None:
        for directory, name, node in changes:
            if node is None:
                directory.kept.pop(name, None)
            else:
                directory.kept[name] = node

    def lose_power(self, keep: str) -> None:
        """Forget what was not flushed; `keep`: none of it, all, or some."""
        random = self.world.random
        if keep == "all":
            survivors = self.journal
        elif keep == "none":
            survivors = []
        elif self.journaled:
            survivors = self.journal[: random.randrange(len(self.journal) + 1)]
        else:
            survivors = [changes for changes in self.journal if random.random() < 0.5]
        for changes in survivors:
            self._keep(changes)
        self.journal = []
        self._restore(self.root, keep)

    def _restore(self, node: Node, keep: str) -> None:
        if node.kind == stat.S_IFDIR:
            node.entries = dict(node.kept)
            for child in node.entries.values():
                self._restore(child, keep)
        elif node.kind == stat.S_IFREG:
            if keep != "all" and node.writes:
                node.data = bytearray(node.kept)
                for write in node.writes if keep == "some" else ():
                    if isinstance(write, int):
                        if self.world.random.random() < 0.5:
                            _resize(node.data, write)
                    else:
                        offset, content = write
                        torn = content[: self.world.random.randrange(len(content) + 1)]
                        _overwrite(
                            node.data, offset, self.world.random.choice((b"", torn, bytes(len(content)), content))
                        )
            node.kept, node.writes = bytes(node.data), []

    # System calls

    def entry(self, *names: str) -> Node | None:
        """Return what a path stands for now, without a call."""
        node: Node | None = self.root
        for name in names:
            node = node.entries.get(name) if node is not None else None
        return node

    def place(self, path: str, content: bytes) -> None:
        """Put a file there, flushed, without a call."""
        node, (*directories, name) = self.root, path.split("/")
        for directory in directories:
            if directory not in node.entries:
                node.entries[directory] = node.kept[directory] = self._new(stat.S_IFDIR)
            node = node.entries[directory]
        node.entries[name] = node.kept[name] = file = self._new(stat.S_IFREG)
        file.data, file.kept = bytearray(content), content

    def _find(self, path: str, *, follow: bool, opening: bool = False, depth: int = 0) -> tuple[Node, str, Node | None]:
        """Return the directory of a path, the name in it, and what the name stands for, if anything."""
        if depth > 8:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        node = self.root
        names = _names(path)
        if not names:
            return node, "", node
        for place, name in enumerate(names[:-1]):
            child = self._look_up(node, name, opening=False) if self.shared else node.entries.get(name)
            if child is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if child.kind == stat.S_IFLNK:
                _, _, child = self._find(_target(names[:place], child), follow=True, depth=depth + 1)
                if child is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if child.kind != stat.S_IFDIR:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            node = child
        name = names[-1]
        child = self._look_up(node, name, opening=opening) if self.shared else node.entries.get(name)
        if follow and child is not None and child.kind == stat.S_IFLNK:
            return self._find(_target(names[:-1], child), follow=True, opening=opening, depth=depth + 1)
        return node, name, child

    def _look_up(self, directory: Node, name: str, *, opening: bool) -> Node | None:
        """Return what a machine sees under a name on a server's disk."""
        remembered = self.world.process.machine.remembered.setdefault(directory, {})
        until, known = remembered.get(name, (-1.0, None))
        if until > self.world.now and (known is None or not opening or known.num_links):
            return known
        found = directory.entries.get(name)
        remembered[name] = self.world.now + self.world.random.choice((0.0, 0.0, 3.0, 30.0, 60.0)), found
        return found

    def _ask_server(self, *directories: Node) -> None:
        """Forget what a machine remembers of these: it has opened or changed them, and learned their state by that."""
        if self.shared:
            for directory in directories:
                self.world.process.machine.remembered.pop(directory, None)

    def _exists(self, directory: Node, name: str, path: str) -> FileExistsError:
        """Return the error of a name that is not new. A client then forgets what it remembered of it (`d_drop` in
        `nfs_create`, `nfs_mkdir` and `nfs_symlink`)."""
        if self.shared:
            self.world.process.machine.remembered.get(directory, {}).pop(name, None)
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _change(self, *changes: tuple[Node, str, Node | None]) -> None:
        self.change(*changes)
        self._ask_server(*(directory for directory, _, _ in changes))

    def _new(self, kind: int) -> Node:
        self.num_nodes += 1
        return Node(kind, self.num_nodes, self.world.wall())

    def _existing(self, path: str, *, follow: bool = True, opening: bool = False) -> Node:
        node = self._find(path, follow=follow, opening=opening)[2]
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def open(self, path: str, flags: int) -> int:
        self.world.call("open", path) if flags & (os.O_CREAT | os.O_TRUNC) else self.world.call("look", path)
        # A server decides whether a name is new, whatever a machine remembers.
        directory, name, node = self._find(path, follow=not flags & (os.O_NOFOLLOW | os.O_EXCL), opening=True)
        if flags & os.O_CREAT:
            node = directory.entries.get(name) if node is None else node
        if node is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = self._new(stat.S_IFREG)
            self._change((directory, name, node))
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise self._exists(directory, name, path)
        elif node.kind == stat.S_IFLNK:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        writable = bool(flags & (os.O_WRONLY | os.O_RDWR))
        if node.kind == stat.S_IFDIR and writable:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if flags & os.O_TRUNC and node.data:
            self._cut(node, 0)
        fd = FIRST_FD + self.world.number()
        self.handles[fd] = Handle(node, path, self.world.process, writable, bool(flags & os.O_APPEND))
        return fd

    def handle(self, fd: int) -> Handle:
        self.world.check_alive()
        if fd not in self.handles:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.handles[fd]

    def close(self, fd: int) -> None:
        self.world.check_alive()
        self._close(fd)

    def _close(self, fd: int) -> None:
        handle = self.handles.pop(fd, None)
        if handle is not None:
            self._unlock(handle)
            if self.shared and handle.writable:
                self._send(handle)

    def close_all(self, process: "Process") -> None:
        """Close what an ended process had open, and release its locks."""
        for fd in [fd for fd, handle in self.handles.items() if handle.process is process]:
            self._close(fd)

    def forget(self, machine: "Machine") -> None:
        """Forget what a machine has not sent to the server."""
        for node in {handle.node for handle in self.handles.values()}:
            node.dirty.pop(machine, None)

    def bytes_of(self, node: Node) -> bytearray:
        return node.dirty.get(self.world.process.machine, node.data) if node.dirty else node.data

    def _send(self, handle: Handle) -> None:
        """Close-to-open: a machine's bytes reach the server, which answers when it has them on its disk."""
        data = handle.node.dirty.pop(handle.process.machine, None)
        if data is not None:
            handle.node.data = data
            handle.node.kept, handle.node.writes = bytes(data), []

    def read(self, fd: int, size: int) -> bytes:
        handle = self.handle(fd)
        self.world.call("read", handle.path)
        if handle.node.kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), handle.path)
        content = bytes(self.bytes_of(handle.node)[handle.position : handle.position + size])
        handle.position += len(content)
        return content

    def write(self, fd: int, content: bytes) -> int:
        handle = self.handle(fd)
        self.world.call(
            "write", handle.path, lambda: self._store(handle, content[: self.world.random.randrange(len(content) + 1)])
        )
        self._store(handle, content)
        return len(content)

    def _store(self, handle: Handle, content: bytes) -> None:
        node = handle.node
        data = node.data
        if self.shared:
            data = node.dirty.setdefault(self.world.process.machine, bytearray(self.bytes_of(node)))
        offset = len(data) if handle.appends else handle.position
        _overwrite(data, offset, content)
        handle.position = offset + len(content)
        node.writes.append((offset, content))
        node.mtime = self.world.wall()

    def _cut(self, node: Node, size: int) -> None:
        _resize(node.data, size)
        node.writes.append(size)
        node.mtime = self.world.wall()
        if self.shared:
            node.dirty.pop(self.world.process.machine, None)
            node.kept, node.writes = bytes(node.data), []

    def truncate(self, fd: int, size: int) -> None:
        handle = self.handle(fd)
        self.world.call("write", handle.path)
        self._cut(handle.node, size)

    def fsync(self, fd: int) -> None:
        handle = self.handle(fd)
        self.world.call("flush", handle.path)
        if self.shared:
            self._send(handle)
        else:
            self.flush(handle.node)

    def status(self, node: Node) -> os.stat_result:
        size = len(self.bytes_of(node)) if node.kind == stat.S_IFREG else 0
        mtime = node.mtime
        whole, nanoseconds = int(mtime), int(mtime * 1e9)
        mode = node.kind | (0o644 if node.kind == stat.S_IFREG else 0o755)
        times = (whole, whole, whole, mtime, mtime, mtime, nanoseconds, nanoseconds, nanoseconds)
        return os.stat_result((mode, node.number, 1, 1, _UID, _UID, size, *times))

    def stat(self, path: str, *, follow: bool) -> os.stat_result:
        self.world.call("stat", path)
        return self.status(self._existing(path, follow=follow))

    def mkdir(self, path: str) -> None:
        self.world.call("mkdir", path)
        directory, name, node = self._find(path, follow=False)
        if directory.entries.get(name, node) is not None:
            raise self._exists(directory, name, path)
        self._change((directory, name, self._new(stat.S_IFDIR)))

    def unlink(self, path: str) -> None:
        self.world.call("unlink", path)
        directory, name, node = self._find(path, follow=False)
        node = directory.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if node.kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._change((directory, name, None))

    def rmdir(self, path: str) -> None:
        self.world.call("unlink", path)
        directory, name, _ = self._find(path, follow=False)
        node = directory.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if node.kind != stat.S_IFDIR:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if node.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._change((directory, name, None))

    def rename(self, source: str, target: str) -> None:
        self.world.call("rename", f"{source} {target}")
        directory, name, _ = self._find(source, follow=False)
        into, new_name, _ = self._find(target, follow=False)
        node, replaced = directory.entries.get(name), into.entries.get(new_name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if replaced is node:
            return
        if replaced is not None:
            if replaced.kind == stat.S_IFDIR and node.kind != stat.S_IFDIR:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
            if node.kind == stat.S_IFDIR and replaced.kind != stat.S_IFDIR:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
            if replaced.entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        self._change((directory, name, None), (into, new_name, node))

    def symlink(self, target: str, path: str) -> None:
        self.world.call("symlink", path)
        directory, name, _ = self._find(path, follow=False)
        if name in directory.entries:
            raise self._exists(directory, name, path)
        node = self._new(stat.S_IFLNK)
        node.target = target
        self._change((directory, name, node))

    def readlink(self, path: str) -> str:
        self.world.call("stat", path)
        node = self._existing(path, follow=False)
        if node.kind != stat.S_IFLNK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return node.target

    def scan(self, path: str) -> list[str]:
        self.world.call("scan", path)
        node = self._existing(path)
        if node.kind != stat.S_IFDIR:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self._ask_server(node)
        return [*node.entries]

    def utime(self, path: str) -> None:
        self.world.call("utime", path)
        self._existing(path).mtime = self.world.wall()

    def flock(self, fd: int, operation: int) -> None:
        handle = self.handle(fd)
        self.world.call("flock", handle.path)
        self._unlock(handle)
        if operation & fcntl.LOCK_UN:
            return
        is_shared = bool(operation & fcntl.LOCK_SH)
        held = self.locks.get(handle.node)
        if held is not None and held.handles and not (held.is_shared and is_shared):
            assert operation & fcntl.LOCK_NB
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), handle.path)
        if held is None or not held.handles:
            held = self.locks[handle.node] = Locked(set(), is_shared)
        held.handles.add(handle)

    def _unlock(self, handle: Handle) -> None:
        held = self.locks.get(handle.node)
        if held is not None:
            held.handles.discard(handle)


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _overwrite(data: bytearray, offset: int, content: bytes) -> None:
    if content:
        if offset > len(data):
            data.extend(bytes(offset - len(data)))
        data[offset : offset + len(content)] = content


@lru_cache(4096)
def _names(path: str) -> tuple[str, ...]:
    """Return the names in a path below `ROOT`."""
    names = tuple(name for name in path[len(ROOT) :].split("/") if name and name != ".")
    if ".." in names[:-1]:
        raise NotImplementedError(path)
    return names


def _target(directory: tuple[str, ...], link: Node) -> str:
    return link.target if link.target.startswith("/") else "/".join((ROOT, *directory, link.target))
