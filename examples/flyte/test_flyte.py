"""The Flyte tasks without a cluster: what runs again and what does not, retries, resumes, pages, and how they are
registered."""

import json
import os
import re
from pathlib import Path

import pytest

from dali_train.cli import main as dali_train
from dali_train.runtime.status import read_events
from tests.conftest import REPOSITORY, forked_launch, s3_of_module, s3_server  # noqa: F401

flyte = pytest.importorskip("flyte")
import workflow  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_launch")

CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="-", train_size=32, eval_size=32, eval_resize_to=32, horizontal_flip=0.0, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2), schedule=ScheduleConfig(warmup_epochs=0.5),
    batch=BatchConfig(global_batch=128, micro_batch=64), run=RunConfig(dir="run", epochs=2),
    hooks=HooksConfig(log_every_steps=1),
)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a config, a dataset of the digits in another order, and a home for Flyte's cache."""
    place = tmp_path_factory.mktemp("workflow")
    (place / "config.py").write_text(CONFIG)
    assert dali_train(["data", "convert", "digits", "--seed", "1", "--out", str(place / "digits-1")]) == 0
    os.environ["HOME"] = str(place)
    return place


def words(place: Path, *more: str, dataset: str = "digits", work: str = "work") -> list[str]:
    return ["--config", str(place / "config.py"), "--dataset", dataset, "--work", str(place / work), *more]


def starts(run: Path) -> list[int]:
    """The steps at which a run was started."""
    return [event["step"] for event in read_events(run / "metrics.jsonl") if event["event"] == "start"]


def trainings(work: Path) -> list[int]:
    """How often each run directory's training was started."""
    return sorted(len(starts(run)) for run in (work / "runs").iterdir())


def fingerprint(dataset: str, work: Path) -> str:
    """What the cache's key has of a dataset."""
    flyte.init()
    machine = workflow.Machine(work=str(work))
    prepared: workflow.Dataset = (
        flyte.with_runcontext(mode="local").run(workflow.data_task, dataset, machine).outputs()[0]
    )
    return prepared.fingerprint


def test_what_was_trained_is_not_trained_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A named dataset is made once, and read at each start: what is not what it says is not believed."""
    two, work = ("--num-processes", "2"), place / "work"
    assert workflow.main(words(place, *two)) == 0
    *_, run, accuracies, weights = capsys.readouterr().out.splitlines()
    first = [accuracies, weights]
    assert re.fullmatch(r"accuracies 0\.\d{4} 0\.\d{4}", first[0])
    model = Path(first[1].removeprefix("model "))
    assert json.loads((model.parent / "config.json").read_text())["run"]["epochs"] == 2
    assert "2 ranks" in (model.parent / "logs" / "rank0.log").read_text()
    # Neither the machine nor what only watches a run decides.
    assert workflow.main(words(place, "--num-processes", "1", "--hooks.log_every_steps", "5")) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == first and trainings(work) == [1]
    # A file that is gone is made again, from the run's last checkpoint.
    model.unlink()
    assert workflow.main(words(place)) == 0
    assert model.is_file() and trainings(work) == [2]
    page = next(Path(run.removeprefix("run ")).glob("*/report.html")).read_text()
    assert page.count("<tr><td><img src=") == 320 and "srcdoc=" in page and "score 9" in page

    assert fingerprint("digits", work) != fingerprint(str(place / "digits-1"), work)
    shard = next((work / "datasets" / "digits" / "train").iterdir())
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert workflow.main(words(place, *two)) == 1
    assert "data verify" in capsys.readouterr().err and trainings(work) == [2]


def test_each_file_that_decides_is_in_the_key(place: Path, tmp_path: Path) -> None:
    """By its content: the same path with something else in it is another training."""
    weights, checkpoint = tmp_path / "weights.safetensors", tmp_path / "step-00000003"
    checkpoint.mkdir()
    changes = [
        ("model.weights", str(weights), weights),
        ("loss.teacher_weights", str(weights), weights),
        ("run.resume", str(checkpoint), checkpoint / "manifest.json"),
    ]
    base = workflow.config_with(place / "config.py", ["--loss.distillation", "hard", "--loss.teacher", "x"], "test")
    keys = {workflow.hyperparameters(base.replace({"run.accept_changed_recipe": accept})) for accept in (False, True)}
    for name, value, file in changes:
        for content in (b"1", b"2", b"1"):
            file.write_bytes(content)
            keys.add(workflow.hyperparameters(base.replace({name: value})))
    assert len(keys) == 8


def test_retries(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A stop on request is one and continues; a mistake is none. Flyte's log has the traceback of neither."""
    dataset = str(place / "digits-1")
    # Several ranks may not have found each other after 0.1 s, and then stop before they train.
    more = ("--run.epochs", "4000", "--run.max_seconds", "0.1", "--run.eval_every_epochs", "None")
    assert workflow.main(words(place, "--num-processes", "1", *more, dataset=dataset, work="stopped")) == 1
    printed = "".join(capfd.readouterr())
    assert re.search(r"stopped after saving step \d+: a retry resumes", printed)
    assert "retrying" in printed and "Traceback" not in printed
    begun = starts(next((place / "stopped").glob("runs/*")))
    assert len(begun) == 3 and begun[0] == 0 < begun[1] < begun[2]

    assert workflow.main(words(place, "--data.eval_size", "24", dataset=dataset, work="mistake")) == 2
    printed = capfd.readouterr().err
    assert printed.splitlines()[-1].startswith("workflow.py: data.eval_size is 24")
    assert "Traceback" not in printed
    assert not list((place / "mistake").glob("runs/*/metrics.jsonl"))
    assert workflow.main(words(place, dataset="nowhere")) == 2
    assert "nowhere: neither a dataset's directory nor one of cifar10, " in capfd.readouterr().err


@pytest.mark.usefixtures("s3_server")
def test_a_retry_on_an_empty_disk_continues(place: Path, tmp_path: Path) -> None:
    """The task as a cluster calls it: its checkpoints are in the run's bucket."""
    from flyte._context import internal_ctx
    from flyte.io import Dir
    from flyte.models import ActionID, RawDataPath, TaskContext
    from flyte.report import Report

    flyte.init()
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    config = workflow.config_with(
        place / "config.py", ["--run.checkpoint_every_steps", "3", "--run.epochs", "1000"], "test"
    )

    def attempt(work: str, **changes: float) -> workflow.TrainingOutputs:
        settings = config.replace({f"run.{name}": value for name, value in changes.items()})
        context = TaskContext(
            action=ActionID(name="a0"),
            version="1",
            raw_data_path=RawDataPath(path=str(outputs)),
            output_path=str(outputs),
            run_base_dir="s3://bucket/metadata/run-1",
            report=Report("train"),
        )
        with internal_ctx().replace_task_context(context):
            return workflow.train_task.func(
                "recipe",
                "content",
                settings.to_json(),
                Dir(path=str(place / "digits-1")),
                workflow.Machine(work=str(tmp_path / work)),
            )

    for seconds in (0.1, 2.0, 20.0, 60.0):  # on a busy machine the first are over before training begins
        with pytest.raises(flyte.errors.RuntimeUserError, match="stopped") as stopped:
            attempt("first", max_seconds=seconds)
        if "before training began" not in str(stopped.value):
            break
    saved = re.search(r"stopped after saving step (\d+)", str(stopped.value))
    assert saved is not None, stopped.value
    result = attempt("second", max_steps=int(saved[1]) + 2)
    (run,) = (tmp_path / "second" / "runs").iterdir()
    assert starts(run) == [0, int(saved[1])]
    assert Path(result.model_state.path).is_file() and result.epoch_accuracies
    assert "best top-1" in (outputs / "report.html").read_text()


def test_what_a_cluster_is_told() -> None:
    from flyte._internal.runtime.task_serde import translate_task_to_wire
    from flyte.models import SerializationContext

    machine = workflow.Machine(gpus=2, memory="64Gi", disk="200Gi")
    task = workflow.train_task.override(resources=machine.resources(), secrets=[workflow.WANDB_KEY])
    template = translate_task_to_wire(task, SerializationContext(version="v1", root_dir=REPOSITORY)).task_template
    assert (
        template.metadata.retries.retries == 2
        and template.metadata.interruptible
        and template.metadata.generates_deck.value
    )
    assert template.metadata.discoverable and template.metadata.discovery_version == workflow.__version__
    assert set(template.metadata.cache_ignore_input_vars) == {"config", "files", "machine"}
    resources = template.container.resources
    requests, limits = (
        {entry.name: entry.value for entry in entries} for entries in (resources.requests, resources.limits)
    )
    assert sorted(requests.values()) == ["2", "200Gi", "4", "64Gi"] and sorted(limits.values()) == ["4", "64Gi"]
    assert template.extended_resources.shared_memory.size_limit == "8Gi"
    assert [secret.key for secret in template.security_context.secrets] == ["wandb-api-key"]
    image = str(workflow.ENVIRONMENT.image)
    assert "torch" in image and "obstore" in image and "wandb-api-key" not in image
