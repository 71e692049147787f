"""``logs/rank{r}.log`` of every rank, and the terminal, with rank 0's messages and all ranks' warnings, each once."""

import hashlib
import logging
import re
import sys
from pathlib import Path
from typing import ClassVar, TextIO

import torch.distributed as dist
from tqdm import tqdm

from dali_train.hooks.base import Hook
from dali_train.hooks.records import RunEnd, RunPlan
from dali_train.text import printable

logger = logging.getLogger("dali_train")
_WATCHED = ("dali_train", "py.warnings")


class RunLogs(Hook):
    """Installs the log handlers for the duration of the run. Must be the first hook."""

    _handlers: ClassVar[list[logging.Handler]] = []  # the loggers are the process's, too

    def announce(self, record: RunPlan) -> None:
        rank = record.launch.rank
        self._close()  # handlers of an earlier run in this process that ended before its first step
        self._handlers.append(_Terminal(rank))
        try:
            self._handlers.append(_RankFile(record.directory / "logs" / f"rank{rank}.log", rank))
        finally:
            logging.captureWarnings(True)
            for name in _WATCHED:
                watched = logging.getLogger(name)
                watched.propagate = False
                for handler in self._handlers:
                    watched.addHandler(handler)
            logger.setLevel(logging.DEBUG)

    def end(self, record: RunEnd) -> None:
        if record.error is not None:
            logger.debug("the run ended with an error", exc_info=record.error)
        self._close()

    def _close(self) -> None:
        for name in _WATCHED:
            watched = logging.getLogger(name)
            watched.propagate = True
            for handler in self._handlers:
                watched.removeHandler(handler)
        logging.captureWarnings(False)
        for handler in self._handlers:
            handler.close()
        self._handlers.clear()


class _RankFile(logging.FileHandler):
    """Writes all messages with time and rank; a resumed run appends to the same file."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
        self._failed = False

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not self._failed:
            self._failed = True  # before the warning, which comes here too
            logger.warning(
                "%s cannot be written (%s). Training continues; free some space, log lines until then are lost",
                self.baseFilename,
                sys.exc_info()[1],
            )


class _Terminal(logging.Handler):
    """Writes rank 0's lines to stdout and all ranks' warnings to stderr, repeated ones only once."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._rank = rank
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        message = printable(record.getMessage(), keep="\n")
        if record.levelno < logging.WARNING:
            _write(message, sys.stdout)
        elif self._is_new(message):
            if record.name == "py.warnings":
                message = message.splitlines()[0]
            _write(f"warning: {f'[rank {self._rank}] ' if self._rank else ''}{message}", sys.stderr)

    def _is_new(self, message: str) -> bool:
        """Return True if no rank has shown it yet. Numbers (steps, ranks, sizes) do not make a message new."""
        key = hashlib.sha256(re.sub(r"\d+", "#", message).encode()).hexdigest()
        if key in self._seen:
            return False
        self._seen.add(key)
        if not dist.is_initialized():
            return True
        try:
            return dist.distributed_c10d._get_default_store().add(f"warning/{key}", 1) == 1
        except dist.DistError:
            return True  # rank 0, which holds the store, is gone: better shown twice than not at all


def _write(text: str, stream: TextIO) -> None:
    tqdm.write(text, file=stream)  # around the progress bar, if there is one
    stream.flush()
