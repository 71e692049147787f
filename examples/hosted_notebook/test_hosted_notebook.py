"""The cells without what they install and start: what would be installed, and that the commands are understood."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dali_train.cli import command_parser

NOTEBOOK = Path(__file__).with_name("train.ipynb")
CELLS = {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]}


def executed(cell: str, names: dict[str, Any]) -> None:
    """Execute a cell without the lines that are IPython's."""
    exec(re.sub(r"^[%!].*", "", CELLS[cell], flags=re.MULTILINE), names)


def test_what_is_installed_leaves_torch_alone() -> None:
    names: dict[str, Any] = {}
    executed("install", names)
    packages = [re.split(r"[^\w-]", line)[0] for line in names["needed"]]
    assert "timm" in packages and "dali-train" not in packages
    of_the_machine = [name for name in packages if name.startswith(("torch", "nvidia"))]
    assert len(of_the_machine) == 1 and re.fullmatch(r"nvidia-dali-cuda1[23]0", of_the_machine[0])


def test_digits_become_class_folders_and_the_commands_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in ("photos-code", "fit"):
        executed(cell, names)
    assert sorted(path.name for path in tmp_path.glob("photos/*")) == list("0123456789")
    assert len(list(tmp_path.glob("photos/*/*.png"))) == 200
    lines = re.findall(r"^!dali-train (.*)", "\n".join(CELLS.values()), re.MULTILINE)
    options = [command_parser().parse_args(line.format(**names).split()) for line in lines]
    assert [each.command for each in options] == ["doctor", "fit"]
    assert options[1].source == "photos"
