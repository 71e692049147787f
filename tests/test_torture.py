"""The hundred kills of tools/torture_resume.py, a few of them."""

import re
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tools import torture_resume


def test_kills_at_random_moments_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forkserver.ensure_running()  # with what tests/ranks.py has it import; the tool's list is for a server of its own
    monkeypatch.setattr(sys, "argv", ["torture_resume.py", "--kills", "4", "--directory", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        torture_resume.main()
    printed = capsys.readouterr().out
    assert end.value.code == 0, f"{printed}{end.value.code}"
    summary = re.search(r"4 kills of 2 ranks in a run of 25 steps, 8 epochs: (.*)", printed)
    assert summary and "after the end" not in summary[1], printed
    assert "final weights equal bit for bit; each image exactly once in every epoch" in printed
