"""A dataset and a training as Flyte tasks: on this machine, or with ``--remote`` on a cluster, which nobody has tried.

    python examples/flyte/workflow.py           the MNIST tutorial: 10 epochs, 128 images per process
    python examples/flyte/workflow.py --config FILE --dataset NAME|DIRECTORY [--gpus N] [--section.field value ...]

Nothing is trained twice: the cache key is the recipe, the length of the run, the evaluation settings, this package's
version, and the content of the dataset and of initial weights and checkpoints. Training that was killed resumes:
locally from its run directory, and on a cluster, where a retry starts on an empty disk, from `run.mirror`, which is in
Flyte's bucket unless it is set.
"""

import argparse
import base64
import csv
import hashlib
import html
import importlib.metadata
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import flyte
import flyte.errors
import flyte.report
from flyte.io import Dir, File

from dali_train import __version__
from dali_train.checkpoint.recipe import result_settings
from dali_train.checkpoint.run_directory import MANIFEST
from dali_train.commands import data
from dali_train.commands.boundary import run_command
from dali_train.commands.train import run
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.config.config import config_from_json
from dali_train.data.convert import datasets
from dali_train.errors import ConfigError, DatasetError, RunError, UserError
from dali_train.extras.report.page import write_report
from dali_train.files import sha256
from dali_train.runtime.status import FINISHED, MISTAKE, START_AGAIN

DATASETS = {
    name: ["--download"] if row.download else []
    for name, row in datasets.DATASETS.items()
    if row.download or not row.arguments
}
"""Datasets that are made without files from the user, with the options of ``dali-train data convert``."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of a training task, as requests and limits; they are not part of the cache key."""

    num_processes: int | None = None  # None: one per GPU, without GPUs as many as are fastest
    gpus: int = 0
    cpu: int = 4
    memory: str = "16Gi"
    disk: str = "50Gi"  # ephemeral storage
    shared_memory: str = "8Gi"
    interruptible: bool = True  # may run on nodes that can be taken away
    work: str = "runs/workflow"  # datasets and run directories

    def resources(self) -> flyte.Resources:
        return flyte.Resources(
            cpu=(self.cpu, self.cpu),
            memory=(self.memory, self.memory),
            gpu=self.gpus or None,
            disk=self.disk,
            shm=self.shared_memory,
        )


@dataclass(frozen=True, kw_only=True)
class Dataset:
    files: Dir
    fingerprint: str  # of dataset.json, which has the checksums of all files


@dataclass(frozen=True, kw_only=True)
class TrainingOutputs:
    epoch_accuracies: list[float]  # fractions
    model_state: File  # safetensors


def _requirements() -> list[str]:
    """Return what the image needs: the package's own dependencies. Its code comes with the run."""
    try:
        wanted = importlib.metadata.requires("dali-train") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    split = [text.partition(";") for text in wanted]
    extras = ("", "extra == 'wandb'", "extra == 'remote'")
    return [name.strip() for name, _, marker in split if marker.strip().replace('"', "'") in extras]


CACHE = flyte.Cache(behavior="auto", version_override=__version__, ignored_inputs=("config", "files", "machine"))
ENVIRONMENT = flyte.TaskEnvironment(
    name="dali_train",
    image=flyte.Image.from_debian_base(name="dali-train").with_pip_packages(*_requirements()),
    resources=Machine().resources(),
)
TRACKER_VARIABLES = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
"""Variables of this machine's environment that a cluster's tasks get too; API keys are passed as secrets instead."""
WANDB_KEY = flyte.Secret(key="wandb-api-key", as_env_var="WANDB_API_KEY")


@ENVIRONMENT.task(retries=2)
def data_task(dataset: str, machine: Machine) -> Dataset:
    """Download and convert a dataset unless that is done, or take the one in a directory, and verify it before any rank
    starts. Not cached, so that the files are read again at each start."""
    directory = Path(dataset)
    if dataset in DATASETS:
        directory = Path(machine.work).absolute() / "datasets" / dataset
        _data("convert", dataset, *DATASETS[dataset], "--out", str(directory))
    elif not (directory / "dataset.json").is_file():
        raise _never_again(
            ConfigError(f"--dataset {dataset}: neither a dataset's directory nor one of {', '.join(DATASETS)}")
        )
    _data("verify", str(directory))
    files = Dir(path=str(directory.absolute())) if _is_local() else Dir.from_local_sync(directory)
    return Dataset(files=files, fingerprint=sha256(directory / "dataset.json")[:16])


@ENVIRONMENT.task(cache=CACHE, retries=2, report=True, interruptible=True)
def train_task(hyperparameters: str, fingerprint: str, config: str, files: Dir, machine: Machine) -> TrainingOutputs:
    """Train, or resume from what an earlier attempt saved.

    Args:
        hyperparameters: everything that decides the outputs, as JSON; with `fingerprint`, the cache key.
        fingerprint: of the dataset.
        config: all settings, as in a run's config.json.
    """
    work = Path(machine.work).absolute()
    key = hashlib.sha256(f"{hyperparameters} {fingerprint} {__version__}".encode()).hexdigest()[:16]
    directory, root = work / "runs" / key, Path(files.path)
    settings = config_from_json(config, "the task's config")
    if not _is_local():
        root = Path(files.download_sync(work / "datasets" / fingerprint))
        if settings.run.mirror is None:  # a retry starts on an empty disk
            settings = settings.replace({"run.mirror": f"{flyte.ctx().run_base_dir}/{key}"})
    try:
        result = run(
            settings.replace({"data.root": str(root), "run.dir": str(directory)}),
            num_processes=machine.num_processes or "auto",
        )
    except (ConfigError, DatasetError) as error:
        raise _never_again(error) from error
    except SystemExit as stop:  # Flyte would wait for ever for a thread that ends like this
        raise flyte.errors.RuntimeUserError("Stopped", "stopped before training began: a retry resumes") from stop
    if result.stopped:
        raise flyte.errors.RuntimeUserError("Stopped", f"stopped after saving step {result.step}: a retry resumes")
    assert result.model_file is not None
    _show(directory)
    model = str(result.model_file)
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=File(path=model) if _is_local() else File.from_local_sync(model),
    )


@ENVIRONMENT.task
def train_workflow(dataset: str, config: str, machine: Machine) -> TrainingOutputs:
    """Prepare the dataset, then train on it, unless the cache has the outputs for the same content."""
    settings = config_from_json(config, "the task's config")
    prepared = data_task(dataset, machine)
    online = "wandb" in settings.hooks.trackers and os.environ.get("WANDB_MODE", "online") == "online"
    secrets = [WANDB_KEY] if online and not _is_local() else None
    training = train_task.override(resources=machine.resources(), interruptible=machine.interruptible, secrets=secrets)
    arguments = (hyperparameters(settings), prepared.fingerprint, config, prepared.files, machine)
    outputs: TrainingOutputs = training(*arguments)
    if _is_local() and not Path(outputs.model_state.path).exists():  # from the cache, and deleted since
        outputs = training.override(cache=replace(CACHE, behavior="override"))(*arguments)
    return outputs


def hyperparameters(config: Config) -> str:
    """Return what decides a training's outputs besides the dataset, as JSON: settings and digests of their files."""
    run = config.run
    manifest = Path(run.resume) / MANIFEST  # of the checkpoint to begin with, which has the digests of its files
    began_with = [run.resume, run.accept_changed_recipe, sha256(manifest) if manifest.is_file() else None]
    return json.dumps([result_settings(config), began_with], sort_keys=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status, as `dali_train.cli.main` does."""
    parser = argparse.ArgumentParser(prog="workflow.py", allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=Path("configs/mnist.py"), metavar="FILE")
    parser.add_argument(
        "--dataset", default="mnist", metavar="NAME|DIRECTORY", help=f"one of {', '.join(DATASETS)}, or where one is"
    )
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="default: one per GPU, without GPUs as many as are fastest"
    )
    parser.add_argument(
        "--batch-per-process", type=int, metavar="N", help="default: 128 for the tutorial, else as the config says"
    )
    parser.add_argument("--gpus", type=int, default=0, metavar="N")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/workflow"), metavar="DIR", help="datasets, run directories, pages"
    )
    on_cluster = "on the cluster that this machine's Flyte config names; no cluster has been tried"
    parser.add_argument("--remote", action="store_true", help=on_cluster)
    options, overrides = parser.parse_known_args(arguments)

    def work() -> int:
        try:
            config = config_with(options.config, overrides, "workflow")
            machine = Machine(num_processes=options.num_processes, gpus=options.gpus, work=str(options.work))
            outputs = _run(options, _with_batch(config, options, machine), machine)
        except flyte.errors.BaseRuntimeError as error:  # also an error from a task, with the name of its class
            is_mistake = error.code in (ConfigError.__name__, DatasetError.__name__)
            raise (ConfigError if is_mistake else RunError)(str(error)) from error
        except KeyboardInterrupt:
            ranks = multiprocessing.active_children()
            for rank in ranks:  # they save and stop, and Flyte's thread waits for them
                rank.terminate()
            for rank in ranks:
                rank.join()
            print("workflow.py: stopped; start it again to resume", file=sys.stderr, flush=True)
            os._exit(START_AGAIN)  # Flyte would take the stop for a failure and retry
        accuracies = " ".join(f"{value:.4f}" for value in outputs.epoch_accuracies)
        print(f"accuracies {accuracies}\nmodel {outputs.model_state.path}")
        return FINISHED

    return run_command("workflow.py", work)


def _run(options: argparse.Namespace, config: Config, machine: Machine) -> TrainingOutputs:
    if config.hooks.user:
        raise ConfigError("hooks.user cannot be handed to a task: leave it out of the config, or train with dali-train")
    if options.remote:
        flyte.init_from_config()
    else:
        machine = replace(machine, work=str(options.work.absolute()))
        flyte.init()
    logging.getLogger("flyte").addFilter(_shows_more)
    trackers = {name: os.environ[name] for name in TRACKER_VARIABLES if name in os.environ}
    context = flyte.with_runcontext(mode="remote" if options.remote else "local", env_vars=trackers)
    action = context.run(train_workflow, options.dataset, config.to_json(), machine)
    print(f"run {action.url}", flush=True)
    if options.remote:
        action.wait()
    outputs: TrainingOutputs = action.outputs()[0]
    return outputs


def _shows_more(record: logging.LogRecord) -> bool:
    """Return whether Flyte's log has more than the line with which `main` ends: it shows 25 lines of traceback for each
    attempt and each task around it, which only a bug needs."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | flyte.errors.BaseRuntimeError)


def _with_batch(config: Config, options: argparse.Namespace, machine: Machine) -> Config:
    per_process = options.batch_per_process or (128 if options.config == Path("configs/mnist.py") else None)
    if per_process is None:
        return config
    total = per_process * (machine.num_processes or max(1, machine.gpus))
    return config.replace(
        {"batch.global_batch": total, "batch.micro_batch": min(per_process, config.batch.micro_batch)}
    )


def _data(action: str, *words: str) -> None:
    status = data.main(action, words)
    if status:
        text = f"dali-train data {action} {' '.join(words)} ended with status {status}: its own line says why"
        raise _never_again(DatasetError(text)) if status == MISTAKE else flyte.errors.RuntimeUserError("Data", text)


def _never_again(error: Exception) -> flyte.errors.NonRecoverableError:
    """Mark an error that a retry would run into again."""
    return flyte.errors.NonRecoverableError(str(error), type(error).__name__)


def _is_local() -> bool:
    context = flyte.ctx()
    return context is None or context.mode == "local"


def _show(directory: Path) -> None:
    """Write the task's page: the run's report with curves and confusion, and the table of predictions."""
    page = write_report([directory]).read_text(encoding="utf-8")
    frame = f'<iframe style="width: 100%; height: 90vh; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    flyte.report.get_tab("report").replace(frame)
    tables = sorted((directory / "predictions").glob("step-*/predictions.csv"))
    if tables:
        with tables[-1].open(newline="", encoding="utf-8") as file:
            columns, *rows = csv.reader(file)
        images = directory / "predictions" / "images"
        rows = [[_picture(images / f"{int(row[0])}.png"), *map(html.escape, row)] for row in rows]
        lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in [["", *map(html.escape, columns)], *rows]]
        flyte.report.get_tab("predictions").replace(f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>")
    flyte.report.flush()


def _picture(path: Path) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">' if path.is_file() else ""


if __name__ == "__main__":
    import workflow  # tasks must be known by this name, not as __main__'s

    sys.exit(workflow.main())
