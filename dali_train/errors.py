"""The errors that users see: one or two sentences that name the field or file, the value, the requirement and the
remedy. `explain` is the boundary between these, which end a command with one line, and bugs, which show a traceback."""

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class UserError(Exception):
    """An error that the user can correct or should know of; the message is self-contained."""

    reported_elsewhere = False  # by another rank, with the same message


class ConfigError(UserError, ValueError):
    """A setting that cannot be used; the message names field, value, requirement and remedy."""


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used as it is; the message gives the remedy."""


class NoDatasetError(DatasetError):
    """A directory that is no dataset yet; a command says which files are there, and how to convert or index them."""

    def __init__(self, problem: str, root: Path, *, indexing: bool = False) -> None:
        """`indexing`: `data index` has looked there for TFRecords."""
        super().__init__(
            f"{problem}: `dali-train data convert --help` lists what can be converted, `dali-train data index` takes "
            "TFRecords"
        )
        self.problem, self.root, self.indexing = problem, root, indexing


class RunError(UserError, RuntimeError):
    """A failure that is not due to the command or config: exit status 1, and a message without a traceback."""

    status = 1


NCCL_SEGMENT = "/dev/shm/nccl-"  # begins the names of the files in which ranks of a host exchange data
SHARED_MEMORY_REMEDY = "give /dev/shm a writable tmpfs with room in it (docker run --shm-size=1g)"


def explain(error: BaseException) -> tuple[str, int] | None:
    """Return the one line and the exit status for a fault of input: a value, a file, a store, memory or a signal.

    None: a bug, ours or in the user's own code, which needs its traceback.
    """
    if isinstance(error, UserError):
        return str(error), error.status if isinstance(error, RunError) else 2
    for cause in _chain(error):  # libraries wrap it in errors of their own
        if isinstance(cause, KeyboardInterrupt):
            return str(cause) or "stopped with Ctrl-C", 130
        if isinstance(cause, RuntimeError) and NCCL_SEGMENT in str(cause):
            reason = next(line for line in str(cause).splitlines() if NCCL_SEGMENT in line)
            return f"{reason.strip()}: {SHARED_MEMORY_REMEDY}, or set NCCL_SHM_DISABLE=1, which is slower", 1
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):  # torch's, GPU and CPU
        tried = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        remedy = "reduce batch.micro_batch; `dali-train plan --gpu-memory GB` finds the largest that fits"
        return f"out of memory{f' for {tried[1]} more' if tried else ''}: {remedy}", 1
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any(map(_is_users, files)):
        return None
    if isinstance(error, OSError) and error.errno != errno.EBADF:  # a closed descriptor is a mistake of the program
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno == errno.ENAMETOOLONG:
            return f"{str(error.filename)[:100]}...: {reason}: name another path", 2
        return (_without_file(error, reason) if error.filename is None else f"{error.filename}: {reason}"), 1
    if isinstance(error, MemoryError):
        return (
            f"out of memory{f': {error}' if str(error) else ''}; reduce batch.micro_batch, or use a machine with more",
            1,
        )
    if isinstance(error, RecursionError) and not _is_ours(files[-1]):  # a parser's: json, ast, pickle
        return "a file or value is nested too deeply: simplify or regenerate it", 1
    if isinstance(error, UnicodeError):
        content = repr(error.object) if isinstance(error, UnicodeEncodeError | UnicodeDecodeError) else str(error)
        return f"text that is not UTF-8: {content[:120]}", 1
    return None


def _without_file(error: OSError, reason: str) -> str:
    """Return why a call failed that names no file, with the remedy or at least the place of the call."""
    if reason.startswith("No usable temporary directory"):  # Python's, with those that it tried
        return f"{reason}: set TMPDIR to a directory that this user may write to"
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone
        return reason
    call = traceback.extract_tb(error.__traceback__)[-1]
    return f"{reason} (in {call.name}, {Path(call.filename).name} line {call.lineno})"


def write_now(text: str) -> None:
    """Write `text` to the standard error without Python's buffers, which a signal handler may find in use. Where
    nothing can be written, because a disk is full or nobody reads on, nobody can be told."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


_PACKAGE = str(Path(__file__).parent) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_users(file: str) -> bool:
    """Return whether a file is the user's own code rather than the package's or a library's."""
    library = file.startswith(("<", _STANDARD_LIBRARY)) or {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not library and not _is_ours(file)
