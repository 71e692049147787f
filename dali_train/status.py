"""``status.json`` in the run directory: how the last attempt ended, for scripts that cannot see the exit status.

torchrun swallows the exit status of its workers, and a kill leaves none. Nothing here needs torch, so that a batch
script gets its answer at once.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dali_train.data.manifest import write_atomically

FINISHED, MISTAKE, START_AGAIN = 0, 2, 75  # exit statuses; 75 is EX_TEMPFAIL of sysexits.h. Anything else is a failure

STOPPED_BY_TERM = "signal TERM"
_FILE = "status.json"


class RunError(RuntimeError):
    """Nothing to change in the command or config, and the message says all: exit status 1, without a traceback."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far the last attempt came. "running" also after a kill, which leaves no time to say more."""

    state: Literal["running", "stopped", "finished", "failed"]
    step: int  # optimizer steps done
    reason: str = ""  # why it was stopped or failed

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / _FILE, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_status(run_directory: Path) -> RunStatus | None:
    """None: no attempt has got as far as its first step."""
    try:
        return RunStatus(**json.loads((run_directory / _FILE).read_text()))
    except FileNotFoundError:
        return None


def exit_status(status: RunStatus | None) -> int:
    """What the trainer of this status ended with: 0 finished, 75 start it again, 1 failed, killed or still running."""
    if status is None:
        return 1
    return {"finished": FINISHED, "stopped": START_AGAIN}.get(status.state, 1)


def stopped_before_restart(run_directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started this process again after a stop on request that was meant to last.

    torchrun takes the exit status 75 of its workers for a failure and restarts them. A TERM is another matter: that is
    how it stops workers itself, to go on with another number of them.
    """
    status = read_status(run_directory)
    restarted = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return restarted and status is not None and status.state == "stopped" and status.reason != STOPPED_BY_TERM


def newest_step(run_directory: Path) -> int | None:
    """Step of the newest checkpoint, None without one. Its content is not looked at."""
    steps = [int(path.name.removeprefix("step-")) for path in (run_directory / "checkpoints").glob("step-*") if path.is_dir()]
    return max(steps, default=None)
