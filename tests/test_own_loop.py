"""The loop in docs/running.md trains as the trainer does."""

import os
import re
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file

from .conftest import REPOSITORY, Train, launcher_command

SAVE = """
if launch.rank == 0:
    from safetensors.torch import save_file

    save_file(trainer.model.state_dict(), "loop.safetensors")
"""


def test_the_loop_in_the_documentation(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "running.md").read_text()
    loop = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "trainer.step" in block)
    assert len(loop.splitlines()) <= 30
    (tmp_path / "loop.py").write_text(loop.replace("configs/digits.py", str(tiny_config)) + SAVE)
    launcher = launcher_command("torchrun", 2)[:-2]  # without "-m dali_train"
    done = subprocess.run(
        [*launcher, "loop.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    train("trainer", ranks=2)
    ours, theirs = (
        load_file(path) for path in (tmp_path / "loop.safetensors", tmp_path / "trainer" / "model.safetensors")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    top1 = float((tmp_path / "trainer" / "epoch_accuracies.json").read_text().strip("[]\n").split(",")[-1])
    assert f"top-1 {top1:.2%}" in done.stdout
