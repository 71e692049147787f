"""`dali_train.extras.torchrun`: torchrun that ends with the trainer's exit status."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dali_train.extras import torchrun
from dali_train.runtime.status import MISTAKE, START_AGAIN
from tests.ranks import FORK, POOL


@pytest.mark.parametrize(("action", "status"), [("os._exit(75)", 75), ("1 / 0", 2), ("os.kill(os.getpid(), 9)", 1)])
def test_torchrun_with_the_trainers_status(action: str, status: int, tmp_path: Path) -> None:
    config, log = tmp_path / "config.py", tmp_path / "log"
    config.write_text(f"import os\n{action}\n")
    words = ["--nproc-per-node=1", "-m", "dali_train", "train", f"--config={config}"]
    assert POOL.run(1, torchrun.main, words, log=log) == [status]
    said = log.read_text()
    assert ("ZeroDivisionError: division by zero" in said) == (status == MISTAKE)
    assert ("dali_train FAILED" in said) == (status != START_AGAIN)


@pytest.mark.parametrize(
    ("statuses", "status"), [((2, -15), 2), ((-15, 75), 75), ((1, 75), 1), ((1, 2), 2), ((-9, 1), 1), ((-15,), 1)]
)
def test_ranks_that_end_differently(statuses: tuple[int, ...], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the others with TERM once it sees that one has ended."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="<N/A>")
        for rank, code in enumerate(statuses)
    }

    def fail(_: object) -> None:
        raise ChildFailedError("dali_train", failures)

    monkeypatch.setattr(torchrun, "run", fail)
    assert torchrun.main(["-m", "dali_train", "train"]) == status


def test_term_reaches_the_ranks_and_starts_them_again(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        f"""
import os, signal
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (Path({str(tmp_path)!r}, "saved").touch(), os._exit(75)))
Path({str(tmp_path)!r}, "begun").touch()
signal.pause()
"""
    )
    words = ["--nproc-per-node=1", "-m", "dali_train", "train", f"--config={config}"]
    agent = FORK.Process(target=end_with_torchrun, args=(words,))
    agent.start()
    while not (tmp_path / "begun").exists():
        assert agent.is_alive()
        time.sleep(0.05)
    os.kill(agent.pid or 0, signal.SIGTERM)
    agent.join(60)
    assert agent.exitcode == START_AGAIN and (tmp_path / "saved").exists()


def end_with_torchrun(words: list[str]) -> None:
    os._exit(torchrun.main(words))
