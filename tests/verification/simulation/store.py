"""An object store of a simulated world, in the place of obstore's.

Requests take effect one after the other, on the way or back they may be lost, and a list may be that of a moment ago.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from obstore import exceptions

from dali_train.runtime import object_store
from tests.verification.simulation.threads import Future, Queue, wait
from tests.verification.simulation.world import ViolationError, World, current_world

Names = str | list[str]
_EPOCH = datetime.fromtimestamp(0, UTC)
_OLD_S = 3.0  # how old a list may be


class Store:
    """The objects below a URL.

    Args:
        changed: called after each change.
    """

    def __init__(self, world: World, changed: Callable[[], None]) -> None:
        self.world, self.changed = world, changed
        self.objects: dict[str, tuple[bytes, int]] = {}  # content and version
        self._lists: list[tuple[float, dict[str, tuple[int, int]]]] = [(0.0, {})]  # since when, sizes and versions

    def _request(self, name: str, act: Callable[[], Any]) -> Any:
        """Do something while the calling thread is outside Python."""
        thread = self.world.thread
        thread.is_outside = True
        try:
            self.world.call("request", name)
            self.world.block(0.02 * self.world.random.random())
            answer = act()
            self.world.call("answer", name)
            return answer
        finally:
            thread.is_outside = False

    def _has_changed(self) -> None:
        listed = {name: (len(content), version) for name, (content, version) in self.objects.items()}
        self._lists.append((self.world.now, listed))
        try:
            self.changed()
        except ViolationError as error:  # which the package's code may take for a failed request
            self.world.violation = error
            raise

    def _found(self, name: str) -> tuple[bytes, int]:
        if name not in self.objects:
            raise FileNotFoundError(f"{name} not found")
        return self.objects[name]

    def get(self, name: str, options: dict[str, Any] | None = None) -> "_Answer":
        return self._request(f"get {name}", lambda: _Answer(*self._found(name), **(options or {})))

    def head(self, name: str) -> dict[str, Any]:
        return self._request(f"head {name}", lambda: _Answer(*self._found(name)).meta)

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        def look() -> list[dict[str, Any]]:
            at = self.world.now - _OLD_S * self.world.random.choice((0, 0, self.world.random.random()))
            listed = [listed for since, listed in self._lists if since <= at][-1]
            return [
                {"path": name, "size": size, "e_tag": str(version), "last_modified": _EPOCH}
                for name, (size, version) in listed.items()
                if name.startswith(prefix)
            ]

        return iter([self._request(f"list {prefix}", look)])

    def put(self, name: str, content: bytes | Iterable[bytes], mode: Any = "overwrite", **_: Any) -> dict[str, Any]:
        whole = content if isinstance(content, bytes) else b"".join(content)

        def change() -> dict[str, Any]:
            before = self.objects.get(name)
            if mode == "create" and before is not None:
                raise exceptions.AlreadyExistsError(name)
            if isinstance(mode, dict) and (before is None or mode["e_tag"] != str(before[1])):
                raise exceptions.PreconditionError(name)
            self.objects[name] = whole, self.world.number()
            self._has_changed()
            return {"e_tag": str(self.objects[name][1]), "version": None}

        return self._request(f"put {name}", change)

    def delete(self, names: Names) -> None:
        def change() -> None:
            for name in [names] if isinstance(names, str) else names:
                self.objects.pop(name, None)
            self._has_changed()

        self._request(f"delete {names}", change)


class _Answer:
    def __init__(self, content: bytes, version: int, range: tuple[int, int] | None = None, **_: Any) -> None:
        self.meta = {"size": len(content), "e_tag": str(version), "version": None}
        self._content = content if range is None else content[range[0] : range[1]]

    def bytes(self) -> bytes:
        return self._content


class _OfProcess:
    """A process's own object of `object_store`, which in reality has one in each process."""

    def __getattr__(self, name: str) -> Any:
        process = current_world().process
        if "threads" not in process.own:
            process.own["threads"] = object_store._Threads()
        return getattr(process.own["threads"], name)


class _Requesting(list[int]):
    """The id of the process that makes requests: any, since none is forked here."""

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, _: Any) -> Any:
        return os.getpid()


class _AtExit:
    """The module `atexit`."""

    @staticmethod
    def register(function: Callable[[], Any]) -> None:
        current_world().process.at_exit.append(function)


class _Jitter:
    @staticmethod
    def uniform(low: float, high: float) -> float:
        return current_world().random.uniform(low, high)


REPLACED: dict[str, Any] = {
    "Future": Future,
    "wait": wait,
    "SimpleQueue": Queue,
    "_THREADS": _OfProcess(),
    "_requested_by": _Requesting(),
    "atexit": _AtExit,
    "_JITTER": _Jitter,
    "_NUM_THREADS": 3,
}
"""What `object_store` and `mirror` have instead."""
