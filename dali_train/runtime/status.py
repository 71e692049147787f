"""``status.json`` in the run directory: how the last start ended, for scripts that cannot see the exit status.

torchrun hides the exit status of its workers, and a kill leaves none. Nothing here needs torch, so that a batch script
gets its answer at once.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from dali_train.config.check import CountOr0, Fraction, from_json
from dali_train.errors import ConfigError, UserError
from dali_train.files import read_json, write_atomically
from dali_train.runtime.events import METRICS, goodput, read_events
from dali_train.runtime.lock import find_holder
from dali_train.text import aligned

FINISHED, MISTAKE, START_AGAIN = 0, 2, 75  # exit statuses; 75 is EX_TEMPFAIL of sysexits.h. Anything else is a failure

STOPPED_BY_TERM = "signal TERM"
_FILE, _LARGEST_FILE = "status.json", 100_000


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The progress and the end of the last start."""

    state: Literal["running", "stopped", "finished", "failed", "killed"]  # killed is never written, only inferred
    step: CountOr0  # optimizer steps done
    reason: str = ""  # why it was stopped or failed
    total_steps: CountOr0 | None = None  # at which the run ends
    best_top1: Fraction | None = None  # of the evaluations so far, a fraction
    ema: bool = False  # best_top1 is that of the moving average of the weights
    lock_holder: str = ""  # which process trained: `Holder.describe`

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / _FILE, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_status(run_directory: Path) -> RunStatus | None:
    """Read the status of a run; None if no start has begun training. A status of running is checked against run.lock.

    Raises:
        ConfigError: status.json is not what a run writes.
    """
    path = run_directory / _FILE
    try:
        status = from_json(RunStatus, read_json(path, _LARGEST_FILE))
    except FileNotFoundError:
        return None
    except UserError as error:
        raise ConfigError(
            f"{path} is not the status of a run ({error}): move it away, checkpoints do not need it"
        ) from error
    if status.state == "running" and find_holder(run_directory) is None:
        return replace(status, state="killed", reason="it ended without a message, as after SIGKILL or a power failure")
    return status


def describe(run_directory: Path) -> str:
    """Return the line that `dali-train status` prints of one run. Raises ConfigError: see `read_status`."""
    status = read_status(run_directory)
    newest = newest_step(run_directory)
    if status is None:
        holder = find_holder(run_directory)
        state = f"starting ({holder.describe()})" if holder is not None else "not started"
        return f"{run_directory}: {state}, newest checkpoint {newest}"
    state = status.state + (f" ({status.reason})" if status.reason else "")
    best = (
        f", best top-1{' of the EMA' if status.ema else ''} {status.best_top1:.2%}"
        if status.best_top1 is not None
        else ""
    )
    holder_text = f", last trained by {status.lock_holder}" if status.lock_holder else ""
    progress = _progress(status, newest)
    with suppress(OSError):  # then without it
        if (found := goodput(read_events(run_directory / METRICS))) is not None:
            holder_text += f", goodput {found.describe()}"
    return f"{run_directory}: {state}, step {progress}{best}, newest checkpoint {newest}{holder_text}"


def describe_all(run_directories: Sequence[Path]) -> tuple[list[str], int]:
    """Return the table that `dali-train status` prints for several runs, and the exit status: 0 if all are finished, 75
    if some should be started again, 1 otherwise."""
    rows = [["run", "state", "step", "best top-1", "checkpoint", "reason, or process"]]
    statuses = set()
    for directory in run_directories:
        try:
            status, newest = read_status(directory), newest_step(directory)
        except ConfigError as error:
            rows.append([str(directory), "not readable", "", "", "", str(error)])
            statuses.add(1)
            continue
        statuses.add(exit_status(status))
        holder = find_holder(directory) if status is None else None
        if status is None:
            note = holder.describe() if holder is not None else ""
            cells = ["not started" if holder is None else "starting", "", "", f"{newest}", note]
        else:
            best = "-" if status.best_top1 is None else f"{status.best_top1:.2%}{' (EMA)' if status.ema else ''}"
            cells = [status.state, _progress(status, newest), best, f"{newest}", status.reason or status.lock_holder]
        rows.append([str(directory), *cells])
    return aligned(rows), 1 if 1 in statuses else max(statuses)


def _progress(status: RunStatus, newest: int | None) -> str:
    step = max(status.step, newest or 0) if status.state in ("running", "killed") else status.step
    return f"{step}{f' of {status.total_steps}' if status.total_steps is not None else ''}"


def exit_status(status: RunStatus | None) -> int:
    """Return the exit status for a run: 0 finished, 75 should be started again, 1 failed, killed or still running."""
    if status is None:
        return 1
    return {"finished": FINISHED, "stopped": START_AGAIN}.get(status.state, 1)


def stopped_before_restart(run_directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has restarted this process after a stop on request that was meant to last.

    torchrun treats exit status 75 of its workers as a failure and restarts them. A stop by SIGTERM is different:
    torchrun itself stops workers by it, to continue with another number of them.
    """
    status = read_status(run_directory)
    restarted = environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    return restarted and status is not None and status.state == "stopped" and status.reason != STOPPED_BY_TERM


def newest_step(run_directory: Path) -> int | None:
    """Return the step of the newest checkpoint, or None, without reading its content."""
    paths = [path for path in (run_directory / "checkpoints").glob("step-*") if path.is_dir() and not path.is_symlink()]
    steps = [path.name.removeprefix("step-") for path in paths]
    return max((int(step) for step in steps if step.isdecimal()), default=None)
