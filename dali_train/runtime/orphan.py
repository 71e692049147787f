"""Exit when torchrun is killed, since its orphaned workers would otherwise train next to a new run."""

import os
import sys
import threading
import time
from collections.abc import Mapping

CHECK_S = 1.0


def exit_if_launcher_dies(environ: Mapping[str, str] = os.environ) -> None:
    """Watch the parent from a thread, under torchrun or under `local_launch`, which uses torchrun's agent.

    With other parents the run should survive, e.g. under nohup or after its shell was closed. Linux's own signal for
    this (PR_SET_PDEATHSIG) is sent when the *thread* that started the process ends, so it is not used.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    print(
        f"rank {os.environ.get('RANK', '?')}: the launcher (pid {parent}) is gone, so this rank ends; start again to "
        "resume",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
