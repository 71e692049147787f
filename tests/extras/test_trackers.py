"""Each tracker's own reader gives back what metrics.jsonl has; one that cannot work costs a warning and nothing
else."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dali_train.errors import ConfigError
from dali_train.extras.trackers import load_id
from dali_train.hooks import HookUnavailableError
from dali_train.hooks.hook_list import make_trackers
from tests.conftest import StartTraining, Train
from tests.helpers import extended

MISSING = """
import sys
for name in ("tensorboard", "wandb", "mlflow"):
    sys.modules[name] = None
"""
FAILING = """
class Fail(Hook):
    required = True

    def step(self, record):
        raise KeyError("enough")
"""
ALL = ("--hooks.trackers", "tensorboard", "wandb", "mlflow")

Scalars = dict[tuple[str, int], float]


@pytest.fixture
def installed() -> None:
    """Skip where a tracker's package is missing; importing one takes seconds."""
    for name in ALL[1:]:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture
def train(start_training: StartTraining) -> Train:
    """As `conftest.train`, in processes of their own: what is changed in packages and tables must not last."""

    def run(name: str, *words: str, status: int = 0, **more: Any) -> str:
        ranks = start_training(name, *words, **more)
        assert set(ranks.wait()) == {status}, ranks.log.read_text()
        return ranks.log.read_text()

    return run


def scalars_of_metrics(directory: Path) -> Scalars:
    scalars: Scalars = {}
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        if line["event"] in ("train", "eval"):
            kind = line.pop("event")
            step = line.pop("step")
            _ = line.pop("time")
            numbers = {name: value for name, value in line.items() if not isinstance(value, str)}
            scalars |= {(f"{kind}/{name}", step): value for name, value in numbers.items()}
    return scalars


def scalars_of_tensorboard(directory: Path) -> Scalars:
    from tensorboard.backend.event_processing import event_accumulator

    reader = event_accumulator.EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()
    assert tags["images"] == ["samples"] and tags["histograms"] == ["eval/class_accuracy"]
    events = [(name, event) for name in tags["scalars"] for event in reader.Scalars(name)]
    scalars = {(name, event.step): event.value for name, event in events}
    assert len(scalars) == len(events), "a step was logged twice"
    return scalars


def wandb_records(path: Path) -> list[Any]:
    """An offline run's file is a LevelDB log of protocol buffers, behind seven bytes of W&B's own."""
    from wandb.proto import wandb_internal_pb2

    block_size, header_size = 32768, 7
    data, position, whole, records = path.read_bytes(), header_size, b"", []
    while position + header_size <= len(data):
        left = block_size - position % block_size
        if left < header_size:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + header_size : position + header_size + length]
        position += header_size + length
        if kind in (1, 4):  # a complete record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def scalars_of_wandb(directory: Path) -> Scalars:
    scalars: Scalars = {}
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if name.startswith(("train/", "eval/")):
                    scalars[name, record.history.step.num] = json.loads(item.value_json)
    return scalars


def client_of_mlflow(store: Path) -> Any:
    import mlflow  # takes seconds

    return mlflow.MlflowClient(tracking_uri=f"file:{store}")


def scalars_of_mlflow(directory: Path, store: Path) -> Scalars:
    client = client_of_mlflow(store)
    run = client.get_run(json.loads((directory / "mlflow-id.json").read_text())["id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.01"
    metrics = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    scalars = {(metric.key, metric.step): metric.value for metric in metrics}
    assert len(scalars) == len(metrics), "a step was logged twice"
    return scalars


@pytest.mark.thorough
@pytest.mark.usefixtures("installed")
def test_trackers_have_what_the_metrics_have(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a resumed run: its second half resumes from step 4, and the first one had reached step 7."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for this test's own reading
    store = tmp_path / "mlruns"
    settings = {"WANDB_MODE": "offline", "WANDB_PROJECT": "ours", "MLFLOW_TRACKING_URI": str(store)}
    on = (*ALL, "--run.checkpoint_every_steps", "4")
    run = tmp_path / "run"
    first = train("run", *on, environment=settings)
    ids = [json.loads((run / f"{name}-id.json").read_text())["id"] for name in ("wandb", "mlflow")]
    for step in (5, 7):  # 5 was saved because it was evaluated
        (run / "checkpoints" / f"step-{step:08d}").rename(tmp_path / f"lost-{step}")
    second = train("run", *on, ranks=2, environment=settings)
    assert "resuming from step 4" in second
    assert "warning: hook" not in first + second
    assert ids == [json.loads((run / f"{name}-id.json").read_text())["id"] for name in ("wandb", "mlflow")]

    expected = scalars_of_metrics(run)
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6, 7}
    losses = {
        key: value
        for key, value in expected.items()
        if key[0].endswith(("/loss", "/top1", "/grad_norm", "/lr", "_max"))
    }
    assert len(losses) == 4 * 7 + 2 * 4 + 1
    assert scalars_of_tensorboard(run) == pytest.approx(expected, rel=1e-6)
    # The steps that were trained twice: W&B's server and MLflow keep what came first, whose times are others.
    recorded = scalars_of_mlflow(run, store)
    assert {key: recorded[key] for key in losses} == pytest.approx(losses, rel=1e-4)
    assert set(recorded) >= {key for key in expected if key[0] != "train/first_step_s"}
    offline = scalars_of_wandb(run)
    assert {key: offline[key] for key in losses} == pytest.approx(losses, rel=1e-9)
    files = list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.stem for path in files} == {f"run-{ids[0]}"}
    begin = next(record.run for record in wandb_records(files[0]) if record.WhichOneof("record_type") == "run")
    assert begin.project == "ours" and begin.run_id == ids[0]
    settings = {item.key: json.loads(item.value_json) for item in begin.config.update}
    assert settings["optimizer"]["lr"] == 0.01
    table = json.loads(max((run / "wandb").glob("offline-run-*/files/media/table/predictions_*.json")).read_text())
    assert table["columns"][:5] == ["id", "file", "image", "prediction", "truth"] and len(table["columns"]) == 5 + 5
    assert len(table["data"]) == 13 and all(sum(row[5:]) == pytest.approx(1, abs=1e-3) for row in table["data"])
    media = [path.name for path in (run / "wandb").glob("offline-run-*/files/media/**/*") if path.is_file()]
    assert any(name.startswith("samples") for name in media) and any(name.startswith("predictions") for name in media)


def test_a_missing_package_is_one_warning(train: Train, tiny_config: Path) -> None:
    printed = train("run", *ALL, "--run.max_steps", "1", config=extended(tiny_config, MISSING))
    for name in ALL[1:]:
        assert len(re.findall(rf"failed at start: hooks.trackers {name} .* 'dali-train\[{name}\]'", printed)) == 1
    assert printed.count("Training continues without it") == printed.count("warning: hook ") == 3


def test_a_name_that_no_tracker_has() -> None:
    with pytest.raises(ConfigError, match=r"hooks.trackers.*'Wandb'.*use wandb"):
        make_trackers(("tensorboard", "Wandb"))


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b'{"id": 7}', b"[" * 9999])
def test_an_id_that_no_tracker_wrote(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "wandb-id.json"
    assert load_id(path, "id") is None
    path.write_bytes(content)
    with pytest.raises(HookUnavailableError, match=r"wandb-id.json is not a tracker's id \(.*move it away"):
        load_id(path, "id")


@pytest.mark.thorough
@pytest.mark.usefixtures("installed")
def test_unreachable_servers(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """Port 9 (discard) refuses. The key must stay in the environment, whatever goes wrong."""
    key, nowhere = "0123456789abcdef" * 2 + "01234567", "http://127.0.0.1:9"
    impatient = "from dali_train.extras import trackers\ntrackers.REACH_TIMEOUT_S = 2\n"
    settings = {"WANDB_BASE_URL": nowhere, "WANDB_API_KEY": key, "MLFLOW_TRACKING_URI": nowhere, "HOME": str(tmp_path)}
    words = ("--hooks.trackers", "wandb", "mlflow")
    printed = train("run", *words, config=extended(tiny_config, impatient), environment=settings)
    assert printed.count("warning: hooks.trackers wandb: ") == 1
    assert re.search(rf"continues and records offline.*`wandb sync {tmp_path}/run/wandb/offline-run-\*`", printed)
    assert printed.count(f"hook MLflow failed at start: hooks.trackers mlflow: {nowhere} cannot be used (") == 1
    metrics = scalars_of_metrics(tmp_path / "run")
    offline = scalars_of_wandb(tmp_path / "run")
    assert offline == pytest.approx({key: metrics[key] for key in offline}) and len(offline) == len(metrics)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert key.encode() not in path.read_bytes(), f"the key is in {path}"


@pytest.mark.thorough
@pytest.mark.usefixtures("installed")
def test_a_failed_run_closes_its_trackers(
    train: Train, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline for want of a key."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "mlruns"
    no_key = {"WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path)}
    settings = {**no_key, "MLFLOW_TRACKING_URI": str(store)}
    printed = train("run", *ALL, config=extended(tiny_config, FAILING), status=1, environment=settings)
    assert re.search("warning: hooks.trackers wandb: .* records offline", printed)
    run_id = json.loads((tmp_path / "run" / "mlflow-id.json").read_text())["id"]
    assert client_of_mlflow(store).get_run(run_id).info.status == "FAILED"
    records = wandb_records(next((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")))
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
