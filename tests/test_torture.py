"""The hundred kills of tools/torture_resume.py, a few of them."""

import re
import subprocess
import sys
from pathlib import Path

from .conftest import REPOSITORY


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "tools/torture_resume.py", "--kills", "6", "--directory", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"6 kills of 2 ranks in a run of 25 steps, 8 epochs: (.*)", done.stdout)
    assert summary and "after the end" not in summary[1], done.stdout
    assert "final weights equal bit for bit; each image exactly once in every epoch" in done.stdout
