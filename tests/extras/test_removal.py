"""Each part of extras can be deleted: everything else is imported, and its commands are listed."""

import ast
import compileall
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dali_train.config.config import SETTINGS
from tests.conftest import REPOSITORY

EXTRAS = REPOSITORY / "dali_train" / "extras"
PARTS = sorted(path.name for path in EXTRAS.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
PARTS.remove("__init__.py")

# Imports the core without extras, and then, in a process that is forked for each copy of extras, all that is in it.
IMPORT_ALL = """
import ast, gc, importlib, json, os, pathlib, pkgutil, sys, traceback

import dali_train
from dali_train import cli, extras

def import_all(package):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)

import_all(dali_train)
assert not [module for module in sys.modules if module.startswith("dali_train.extras.")], "the core needs no extras"
cli.command_parser().format_help()

# What extras import from others takes most of the time, and once is enough.
for file in pathlib.Path(sys.argv[1]).rglob("*.py"):
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("dali_train"):
            importlib.import_module(node.module)
gc.freeze()

for copy in sys.argv[2:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            extras.__path__ = [copy]
            import_all(extras)
            answer = {"help": cli.command_parser().format_help()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        print(file.read().decode())
    os.wait()
"""


@functools.cache
def imports(part: str) -> set[str]:
    """Return the modules of extras that a file of `part` imports, by their names without what is in them."""
    path = EXTRAS / part
    found = set()
    for file in [path] if path.suffix else path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dali_train.extras."):
                found.add(str(node.module).split(".")[2])
    return found


def removed_with(part: str) -> set[str]:
    """Return `part` and all that builds on it, by the names of files and folders."""
    gone = {part}
    while more := {
        other for other in PARTS if other not in gone and imports(other) & {Path(name).stem for name in gone}
    }:
        gone |= more
    return gone


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By part: the help of the command line without it, or the error."""
    core = tmp_path_factory.mktemp("core")
    without = shutil.ignore_patterns("extras", "recipes")
    shutil.copytree(REPOSITORY / "dali_train", core / "dali_train", ignore=without)
    (core / "dali_train" / "extras").mkdir()
    (core / "dali_train" / "extras" / "__init__.py").touch()
    compiled = tmp_path_factory.mktemp("compiled")  # once: copies keep the times by which bytecode is known to be valid
    shutil.copytree(EXTRAS, compiled, dirs_exist_ok=True)
    compileall.compile_dir(compiled, quiet=1)
    copies = {part: tmp_path_factory.mktemp("copy") for part in PARTS}
    for part, copy in copies.items():
        shutil.copytree(compiled, copy, ignore=shutil.ignore_patterns(*removed_with(part)), dirs_exist_ok=True)
    command = [sys.executable, "-c", IMPORT_ALL, str(EXTRAS), *map(str, copies.values())]
    environment = {**os.environ, "PYTHONPATH": str(core)}
    done = subprocess.run(command, cwd=core, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(copies, lines, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_the_rest_works_without(part: str, answers: dict[str, dict[str, str]]) -> None:
    answer = answers[part]
    assert "error" not in answer, answer["error"]
    gone = removed_with(part)
    for command in ("plan", "doctor", "export", "init", "predict", "report"):
        assert (f"    {command} " in answer["help"]) == (command not in gone), command
    assert "    train " in answer["help"]


SETTINGS_OF = {
    "audit": {"run.audit_every_steps"},
    "class_weights": {"loss.class_weights", "loss.positive_weight"},
    "distillation": {
        *("loss.distillation", "loss.distillation_weight", "loss.temperature", "loss.teacher", "loss.teacher_weights")
    },
    "ledger": {"hooks.ledger"},
    "mirror": {"run.mirror"},
    "mixture": {"data.mix", "data.mix_until", "data.mix_classes", "data.epoch_images"},
    "several_labels": {"loss.kwargs", "run.f1_threshold"},
    "tensor_grids": {"parallel.tensor.mode", "parallel.tensor.depth"},
}
WHAT_IS_LEFT = """
import json
from dali_train.config.check import conflicts_in
from dali_train.config.config import SETTINGS, Config
from dali_train.config.sections import HooksConfig, LossConfig, RunConfig, TensorConfig
sections = {"hooks": HooksConfig, "loss": LossConfig, "run": RunConfig, "parallel.tensor": TensorConfig}
values = {f"{name}.{key}": getattr(cls, key) for name, cls in sections.items() for key in dir(cls) if key[0] != "_"}
values = {name: value for name, value in values.items() if isinstance(value, str | int | float | dict | None)}
print(json.dumps([[*SETTINGS], [name for row in conflicts_in(Config) for name in row.names], values]))
"""


def copy_without(folder: Path, *parts: str) -> dict[str, str]:
    """Copy the package without `parts` and all that builds on them, as removing them by git leaves it, and return an
    environment in which the copy is used."""
    gone = [name for part in parts for name in removed_with(part)]
    shutil.copytree(REPOSITORY / "dali_train", folder / "dali_train", ignore=shutil.ignore_patterns("recipes", *gone))
    for part in parts:
        (folder / "dali_train" / "extras" / part / "__pycache__").mkdir(parents=True)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.thorough
@pytest.mark.parametrize("part", SETTINGS_OF)
def test_settings_of_a_part_are_gone_with_it(part: str, tmp_path: Path) -> None:
    environment = copy_without(tmp_path, part)
    command = [sys.executable, "-c", WHAT_IS_LEFT]
    settings, in_conflicts, values = json.loads(subprocess.check_output(command, cwd=tmp_path, env=environment))
    gone = set().union(*(SETTINGS_OF.get(name, set()) for name in removed_with(part)))
    assert SETTINGS.keys() - {*settings} == gone >= SETTINGS_OF[part]
    assert {*in_conflicts} <= {*settings}
    for name in gone & values.keys():  # what the rest of the program reads
        assert values[name] == SETTINGS[name].default, name


@pytest.mark.thorough
@pytest.mark.parametrize("part", SETTINGS_OF)
def test_a_part_with_settings_can_be_imported_first(part: str) -> None:
    subprocess.run([sys.executable, "-c", f"import dali_train.extras.{part}"], cwd=REPOSITORY, check=True)


@pytest.mark.thorough
def test_a_run_without_the_parts_that_have_settings(tiny_config: Path, tmp_path: Path) -> None:
    environment = copy_without(tmp_path, *SETTINGS_OF)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dali_train", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    recipe = str(REPOSITORY / "configs" / "digits.py")
    printed = run("train", "--config", recipe, "--help", "data").stdout
    assert "  --data.root = " in printed and "mix" not in printed
    for setting in set().union(*SETTINGS_OF.values()):
        mistake = run("train", "--config", recipe, f"--{setting}", "1")
        assert mistake.returncode == 2 and f"--{setting} is not a setting" in mistake.stderr
    trained = run("train", "--config", str(tiny_config), "--run.max_steps", "1", "--run.dir", str(tmp_path / "run"))
    assert trained.returncode == 0, trained.stderr


@pytest.mark.parametrize("part", PARTS)
def test_each_part_says_what_it_is_for(part: str) -> None:
    path = EXTRAS / part if part.endswith(".py") else EXTRAS / part / "__init__.py"
    assert ast.get_docstring(ast.parse(path.read_text()))
