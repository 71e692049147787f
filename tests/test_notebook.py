"""A real notebook in a real kernel: the cells of README and docs/notebook.ipynb on two processes, training in it,
errors and interrupts in the cell."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from dali_train.config import load_config
from tests.conftest import REPOSITORY, finished_run
from tests.helpers import FLOAT32_BOUND, largest_difference, losses, samples
from tests.ranks import patience

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.thorough

# Interrupts as Jupyter does, with a signal for the kernel's process group, once the run has logged its fourth step.
INTERRUPT = """
import os, signal, threading, time
from pathlib import Path

def interrupt(metrics):
    while not metrics.exists() or '"step": 4' not in metrics.read_text():
        time.sleep(0.01)
    os.killpg(os.getpgrp(), signal.SIGINT)

def run_and_interrupt(name, **processes):
    changes = {"run.dir": str(folder / name), "run.epochs": 400, "run.eval_every_epochs": None}
    changes["run.checkpoint_every_steps"] = 100000
    threading.Thread(target=interrupt, args=(folder / name / "metrics.jsonl",)).start()
    return dali_train.run(config.replace(changes), **processes)
"""


def executed(cells: list[str], folder: Path) -> list[tuple[str, str]]:
    """What each cell printed and gave, and the error that it raised, "" without one."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    seconds = round(patience(240))
    client = nbclient.NotebookClient(notebook, timeout=seconds, kernel_name="python3", allow_errors=True)
    client.execute(cwd=str(folder))
    results = []
    for cell in notebook.cells:
        shown = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        errors = [f"{output.ename}: {output.evalue}" for output in cell.outputs if output.output_type == "error"]
        results.append(("".join(shown), "".join(errors)))
    return results


@pytest.fixture(scope="module", autouse=True)
def kernel_environment() -> None:
    """A kernel has the environment of who starts it; `dali-train` is beside this Python."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def on_two_ranks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of both tests, by torchrun."""
    return finished_run(tmp_path_factory.mktemp("two"), dataset, ranks=2)


def test_training_in_cells(on_two_ranks: Path, tiny_config: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    block = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "num_processes" in block)
    notebook = nbformat.read(REPOSITORY / "docs" / "notebook.ipynb", as_version=4)
    sources = [f"{cell.source}\n" for cell in notebook.cells if cell.cell_type == "code"]
    assert sources[0] == "%cd ..\n" and sources[1].removeprefix("!").strip() in text
    assert "".join(sources[2:]) == block
    readme = [cell.replace('"auto"', "2").replace('"digits"', repr(str(tiny_config))) for cell in sources[1:]]
    assert len(readme) == 4 and str(tiny_config) in readme[1]
    cells = [
        *readme,
        "type(model).__name__",
        "import json; from pathlib import Path; folder = Path.cwd()",
        "one = dali_train.run(config.replace({'run.dir': str(folder / 'one')})); "
        "print(json.dumps(one.epoch_accuracies))",
        "dali_train.run(config.replace({'data.eval_size': 28}))",
        INTERRUPT,
        "run_and_interrupt('stopped').stopped.describe()",
        "result = run_and_interrupt('stopped-2', num_processes=1); result.stopped.describe(), result.step",
    ]
    results = executed(cells, tmp_path)
    assert [error for number, (_, error) in enumerate(results) if number != 7] == [""] * 10
    _, _, (two, _), (accuracies, _), (model, _), _, (one, _), (_, mistake), _, (stopped, _), (stopped_2, _) = results

    assert (tmp_path / load_config(REPOSITORY / "configs" / "digits.py").data.root / "dataset.json").exists()
    two_dir = tmp_path / "runs" / "notebook"
    assert one.endswith((on_two_ranks / "epoch_accuracies.json").read_text())
    assert json.loads(accuracies) == json.loads((two_dir / "epoch_accuracies.json").read_text())
    assert "2 ranks" in two and "step 7/7" in two and "finished at step 7/7" in two and model == "'VisionTransformer'"
    assert samples(tmp_path / "one") == samples(two_dir) == samples(on_two_ranks)
    assert largest_difference(tmp_path / "one", two_dir) < FLOAT32_BOUND
    assert largest_difference(two_dir, on_two_ranks) == 0
    assert losses(two_dir) == losses(on_two_ranks)

    assert mistake.startswith("ConfigError: data.eval_size is 28")
    assert "'Ctrl-C'" in stopped and "stopped after saving: Ctrl-C" in stopped_2
    step = int(re.findall(r"\('Ctrl-C', (\d+)\)", stopped_2)[0])
    assert (tmp_path / "stopped-2" / "checkpoints" / f"step-{step:08d}").is_dir()
