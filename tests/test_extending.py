"""docs/extending.md, followed row by row: tests/own_parts.py has one part of every kind, and the command line trains
with them."""

import ast
import importlib
import inspect
import json
import math
import re
import runpy
import sys
import warnings
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from dali_train.checkpoint.format import load_checkpoint, load_newest
from dali_train.checkpoint.run_directory import checkpoint_paths
from dali_train.cli import main
from tests.conftest import REPOSITORY, Train, photograph
from tests.helpers import FLOAT64_BOUND, extended, losses, samples, state_difference
from tests.ranks import FORK, TIMEOUT_S, Ranks

OWN_PARTS = REPOSITORY / "tests" / "own_parts.py"


@pytest.fixture(scope="module")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that only a converter of our own knows."""
    root = tmp_path_factory.mktemp("own") / "stripes"
    words = ["data", "convert", "stripes", "--images", "40", "--out", str(root)]
    # Not in the pool, whose next job would have these parts.
    process = FORK.Process(target=run_own_parts, args=(words,))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    return root


def run_own_parts(words: list[str]) -> None:
    """``python tests/own_parts.py WORDS``."""
    sys.argv = [str(OWN_PARTS), *words]
    runpy.run_path(str(OWN_PARTS), run_name="__main__")


def test_every_row_in_a_run(stripes: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):  # on two through a kind of parallelism of our own
        directory = ["--run.dir", str(tmp_path / f"{ranks}"), "--data.root", f"counted://{stripes}"]
        words = ["train", "--config", str(OWN_PARTS), *directory, "--precision.dtype", "fp64"]
        run = Ranks(words, ranks, tmp_path / "log")
        assert run.wait() == [0] * ranks, run.log.read_text()
    one, two = tmp_path / "1", tmp_path / "2"

    events = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    train = [event for event in events if event["event"] == "train"]
    assert [event["lr"] for event in train] == [0.005] * 3, "the schedule: half of the peak"
    assert 8 < train[0]["loss"] < 10 and train[-1]["loss"] < train[0]["loss"], "the loss: logits move from 0 to 3"
    assert train[-1]["num_flipped"] >= 3 * 32, "the operator, counted by the hook"
    tracked = json.loads((one / "tracked.json").read_text())
    assert tracked["train/loss"] == losses(one), "the tracker"
    newest, _ = load_newest(one / "checkpoints")
    assert newest is not None and newest.values.optimizer.kind == "Descent"
    assert set(newest.values.optimizer.numbers.values()) == {3}, "the optimizer's own count of its steps"
    checkpoints = [load_checkpoint(path) for path in checkpoint_paths(one / "checkpoints")]
    first, last = (checkpoints[index].state["model"]["patches.weight"].flatten(1) for index in (0, -1))
    assert torch.allclose(first.mean(1), last.mean(1)) and not torch.allclose(first, last), "the change of gradients"
    assert {"train", "validation"} >= set((stripes / "counted.txt").read_text().split()) >= {"train"}, "the storage"
    assert json.loads((one / "config.json").read_text())["data"]["root"] == f"counted://{stripes}"
    assert "gradients are averaged by hand" in run.log.read_text(), "the kind of parallelism, which keeps the invariant"
    assert (one / "configs" / "own_parts.py").read_bytes() == OWN_PARTS.read_bytes()
    assert samples(one) == samples(two) and losses(two) == pytest.approx(losses(one), rel=1e-12)
    assert state_difference(one, two) < FLOAT64_BOUND

    after = FORK.Process(target=after_the_run, args=(one,))
    after.start()
    after.join(TIMEOUT_S)
    assert after.exitcode == 0


def after_the_run(run: Path) -> None:
    """The model, in what follows a run: its file is run where that is asked for, and not otherwise."""
    warnings.filterwarnings("error", message=".*hooks.user")  # hooks are left out, and observe nothing here
    own, picture = ["--config", str(run / "configs" / "own_parts.py")], run / "picture.jpg"
    photograph(0, 40, 50).save(picture)
    for words, status, message in (
        (["predict", str(run), str(picture)], 2, f"registers it, add {' '.join(own)},"),
        (["eval", str(run)], 2, f"registers it, add {' '.join(own)},"),
        (["eval", str(run), *own], 0, "step 3: top-1"),
        (["predict", str(run), str(picture), *own], 0, "horizontal"),
        (["export", str(run), *own], 0, "Read back, its logits differ by"),
    ):
        with redirect_stdout(StringIO()) as output, redirect_stderr(output):
            assert main(words) == status, output.getvalue()
        assert message in output.getvalue()


def test_the_documents_loss_and_optimizer_train(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """As they stand in docs/extending.md, below one another in a config file; also on weights that are sharded."""
    examples = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)
    config = extended(tiny_config, "\n".join(examples))
    options = ("--loss.name", "focal", "--optimizer.name", "sign-descent", "--optimizer.kwargs.momentum", "0.8")
    options += ("--optimizer.lr", "1e-3", "--run.max_steps", "3")
    train("one", *options, config=config)
    train("two", *options, "--parallel.shard", "full", ranks=2, config=config)
    newest, _ = load_newest(tmp_path / "two" / "checkpoints")
    assert newest is not None and newest.values.optimizer.kind == "SignDescent"
    assert losses(tmp_path / "one")[0] == pytest.approx(0.8**2 * math.log(5), rel=0.05), "all classes are as likely"
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def private(name: str) -> bool:
    return re.search(r"(^|\.)_[a-z]", name, re.IGNORECASE) is not None or name == "nvidia.dali.backend_impl"


def overridden() -> set[tuple[str, str]]:
    """Private methods of classes of others that classes of the package define anew, with the package's module."""
    found = set()
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("dali_train."):
            continue
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module_name:
                continue
            theirs = [base for base in cls.__mro__[1:] if base.__module__.startswith(("torch.", "timm.", "nvidia."))]
            names = {name for name, value in vars(cls).items() if re.match("_[a-z]", name) and inspect.isroutine(value)}
            found |= {(name, module_name) for name in names if any(name in vars(base) for base in theirs)}
    return found


def test_the_table_of_private_interfaces_is_complete() -> None:
    """Names with an underscore that the package uses and does not define, or defines anew, and in which files."""
    trees = {path: ast.parse(path.read_text()) for path in (REPOSITORY / "dali_train").rglob("*.py")}
    defined, used = {"_exit", "_ActionsContainer"}, defaultdict(set)  # Python's
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                defined.add(node.attr)
    importlib.import_module("dali_train.parallel.tensor")
    for name, module in overridden():
        defined.discard(name)
        used[name].add(f"{module.removeprefix('dali_train.').replace('.', '/')}.py")
    for path, tree in trees.items():
        name = str(path.relative_to(REPOSITORY / "dali_train"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("dali_train"):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
                for each in imported:
                    if private(each) and each != "__future__":
                        used[each].add(name)
            elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                is_ours = node.attr in defined and ast.unparse(node.value) != "super()"
                if not is_ours:
                    used[node.attr].add(name)
    text = (REPOSITORY / "tests" / "private-interfaces.md").read_text()
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*?) \| (`.*?) \|", text, re.MULTILINE):
        names, files = (re.findall("`(.*?)`", cell) for cell in row)
        listed |= {name: set(files) for name in names}
    assert used.keys() == listed.keys()
    assert {name: files - listed[name] for name, files in used.items() if files - listed[name]} == {}


def test_the_page_names_tests_that_exist() -> None:
    text = (REPOSITORY / "docs" / "extending.md").read_text()
    assert all((REPOSITORY / name).exists() for name in re.findall(r"tests/[\w/]+\.py", text))
