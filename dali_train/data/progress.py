"""Progress of long work: a bar on a terminal, a plain line now and then in a log file or under Slurm."""

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from dali_train.text import printable

LINE_INTERVAL_S = 10.0
SHORT_S = 2.0
"""As `delay_s`, for work that is over by then unless there are very many images."""


class Progress:
    """Counts `total` units of work up on stderr with rate and remaining time, from any number of threads.

    With ``unit="B"`` the counts are scaled to kB, MB, ... Use as a context manager, or close it.

    Args:
        total: None: not known.
        delay_s: nothing is shown of what takes less than these seconds.
    """

    def __init__(self, title: str, total: int | None, unit: str, *, delay_s: float = 0.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._title = title = printable(title)
        self._last_line = time.monotonic()
        self._first_output = self._last_line + delay_s
        scaled = unit == "B"
        # In a log tqdm only keeps the count: its own output is off, plain lines are printed below.
        self._bar = tqdm(
            desc=title,
            total=total,
            unit=unit,
            unit_scale=scaled,
            unit_divisor=1000,
            **size_of_terminal(),
            miniters=1,  # tqdm's own is a share of the largest update: huge where much was done before this start
            delay=delay_s,
            file=sys.stderr if self._terminal else _Nowhere(),
            leave=True,
        )

    def update(self, amount: int, *, num_bytes: int = 0) -> None:
        """`amount` more units are done; `num_bytes` went with them, and are shown where any do."""
        with self._lock:
            if num_bytes:
                self._num_bytes += num_bytes
                self._bar.set_postfix_str(f"{self._num_bytes / 1e6:,.0f} MB", refresh=False)
            self._bar.update(amount)
            now = time.monotonic()
            if not self._terminal and now - self._last_line >= LINE_INTERVAL_S:
                self._last_line = now
                self._print_line()

    def close(self) -> None:
        if not self._terminal and time.monotonic() >= self._first_output:
            self._print_line()
        self._bar.close()

    def _print_line(self) -> None:
        line = tqdm.format_meter(**{**self._bar.format_dict, "ncols": 0, "prefix": ""})
        print(f"{self._title}: {line.strip()}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def size_of_terminal() -> dict[str, Any]:
    """Return the arguments of tqdm for the terminal on stderr, if it is one. A terminal may say that it has neither
    columns nor lines, as under `docker run -t`, and tqdm would print nothing."""
    if not sys.stderr.isatty() or all(os.get_terminal_size(sys.stderr.fileno())):
        return {"dynamic_ncols": True}
    return {"ncols": 80, "nrows": 24}


class _Nowhere:
    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...
