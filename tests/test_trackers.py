"""Each tracker's own reader gives back what metrics.jsonl has; one that cannot work costs a warning and nothing
else."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Train

mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

# A tracker of one's own: one file with the class, one row in TRACKERS, here both in the config.
OWN_TRACKER = """
import json
from pathlib import Path
from dali_train.hooks import trackers

class Lines(trackers.Tracker):
    off = "nothing"

    @classmethod
    def wanted(cls, hooks):
        return hooks.log_every_steps == 1

    def start(self, record):
        super().start(record)
        self.file = (record.directory / "lines.jsonl").open("w")

    def log_scalars(self, step, scalars):
        self.file.write(json.dumps([step, scalars]) + "\\n")

    def log_image(self, step, name, pixels):
        self.file.write(json.dumps([step, {"image": pixels.shape[2]}]) + "\\n")

    def log_histograms(self, step, values):
        self.file.write(json.dumps([step, {"histograms": len(values)}]) + "\\n")

    def end(self, record):
        self.file.close()

trackers.TRACKERS.append(Lines)
"""

Scalars = dict[tuple[str, int], float]


def scalars_of_metrics(directory: Path) -> Scalars:
    scalars: Scalars = {}
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        if line["event"] in ("train", "eval"):
            kind, step = line.pop("event"), line.pop("step")
            scalars |= {(f"{kind}/{name}", step): value for name, value in line.items()}
    return scalars


def scalars_of_tensorboard(directory: Path) -> Scalars:
    reader = event_accumulator.EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()
    assert tags["images"] == ["samples"] and tags["graph"] and "gradients/head.weight" in tags["histograms"]
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


def scalars_of_mlflow(directory: Path, store: Path) -> Scalars:
    client = mlflow.MlflowClient(tracking_uri=f"file:{store}")
    run = client.get_run(json.loads((directory / "mlflow-id.json").read_text())["id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.01"
    metrics = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    scalars = {(metric.key, metric.step): metric.value for metric in metrics}
    assert len(scalars) == len(metrics), "a step was logged twice"
    return scalars


def test_trackers_have_what_the_metrics_have(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a resumed run: its second half resumes from step 4, and the first one had reached step 7."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for this test's own reading
    store = tmp_path / "mlruns"
    on = (
        "--hooks.tensorboard",
        "true",
        "--hooks.wandb",
        "offline",
        "--hooks.mlflow",
        str(store),
        "--hooks.detail_every_steps",
        "2",
        "--hooks.gradient_histograms",
        "true",
        "--hooks.model_graph",
        "true",
        "--hooks.wandb_project",
        "ours",
        "--run.checkpoint_every_steps",
        "4",
    )
    run = tmp_path / "run"
    first = train("run", *on)
    ids = [json.loads((run / f"{name}-id.json").read_text())["id"] for name in ("wandb", "mlflow")]
    for step in (5, 7):  # 5 was saved because it was evaluated
        (run / "checkpoints" / f"step-{step:08d}").rename(tmp_path / f"lost-{step}")
    second = train("run", *on, ranks=2)
    assert "resuming from step 4" in second
    assert "warning: hook" not in first + second
    assert ids == [json.loads((run / f"{name}-id.json").read_text())["id"] for name in ("wandb", "mlflow")]

    expected = scalars_of_metrics(run)
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6, 7}
    losses = {
        place: value
        for place, value in expected.items()
        if place[0].endswith(("/loss", "/top1", "/grad_norm", "/lr", "_max"))
    }
    assert len(losses) == 4 * 7 + 2 * 4 + 4
    assert scalars_of_tensorboard(run) == pytest.approx(expected, rel=1e-6)
    # The steps that were trained twice: W&B's server and MLflow keep what came first, whose times are others.
    recorded = scalars_of_mlflow(run, store)
    assert {place: recorded[place] for place in losses} == pytest.approx(losses, rel=1e-4)
    assert set(recorded) >= {place for place in expected if place[0] != "train/first_step_s"}
    offline = scalars_of_wandb(run)
    assert {place: offline[place] for place in losses} == pytest.approx(losses, rel=1e-9)
    files = list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.stem for path in files} == {f"run-{ids[0]}"}
    begin = next(record.run for record in wandb_records(files[0]) if record.WhichOneof("record_type") == "run")
    assert begin.project == "ours" and begin.run_id == ids[0]
    settings = {item.key: json.loads(item.value_json) for item in begin.config.update}
    assert settings["optimizer"]["lr"] == 0.01
    table = json.loads(max((run / "wandb").glob("offline-run-*/files/media/table/predictions_*.json")).read_text())
    assert table["columns"][:4] == ["id", "image", "guess", "truth"] and len(table["columns"]) == 4 + 5
    assert len(table["data"]) == 13 and all(sum(row[4:]) == pytest.approx(1, abs=1e-3) for row in table["data"])
    media = [path.name for path in (run / "wandb").glob("offline-run-*/files/media/**/*") if path.is_file()]
    assert any(name.startswith("samples") for name in media) and any(name.startswith("predictions") for name in media)


def extended(config: Path, text: str) -> Path:
    path = config.with_name("extended.py")
    path.write_text(config.read_text() + text)
    return path


def test_a_tracker_is_one_file_and_one_row(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    on = ("--hooks.tensorboard", "true", "--hooks.gradient_histograms", "true", "--hooks.detail_every_steps", "3")
    printed = train("run", *on, config=extended(tiny_config, OWN_TRACKER))
    assert "warning: hook" not in printed
    lines = [json.loads(line) for line in (tmp_path / "run" / "lines.jsonl").read_text().splitlines()]
    scalars = {(name, step): value for step, values in lines for name, value in values.items() if "/" in name}
    assert scalars == scalars_of_metrics(tmp_path / "run")
    assert [line for line in lines if "image" in line[1]] == [[1, {"image": 3}]]
    assert [step for step, values in lines if values.get("histograms")] == [3, 6]


def test_missing_packages(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    gone = "import sys\nfor name in ('tensorboard', 'wandb', 'mlflow'):\n    sys.modules[name] = None\n"
    on = ("--hooks.tensorboard", "true", "--hooks.wandb", "offline", "--hooks.mlflow", str(tmp_path / "store"))
    printed = train("run", *on, config=extended(tiny_config, gone))
    for hook, name in (("TensorBoard", "tensorboard"), ("WandB", "wandb"), ("MLflow", "mlflow")):
        message = (
            f"hook {hook} failed at start: hooks.{name} needs a package that is not there: pip install "
            f"'dali-train[{name}]', or"
        )
        assert printed.count(message) == 1
    assert printed.count("Training continues without it") == 3
    assert {step for _, step in scalars_of_metrics(tmp_path / "run")} == set(range(1, 8))


def test_unreachable_servers(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """Port 9 (discard) refuses. The key must stay in the environment, whatever goes wrong."""
    key = "0123456789abcdef" * 2 + "01234567"
    nowhere = (
        "import os\nfrom dali_train.hooks.trackers import wandb\nwandb.REACH_TIMEOUT_S = 2\n"
        f"os.environ.update(WANDB_BASE_URL='http://127.0.0.1:9', WANDB_API_KEY='{key}', HOME={str(tmp_path)!r})\n"
    )
    config = extended(tiny_config, nowhere)
    printed = train("run", "--hooks.wandb", "online", "--hooks.mlflow", "http://127.0.0.1:9", config=config)
    assert printed.count("warning: hooks.wandb online: ") == 1
    assert (
        f"Training continues and records offline; `wandb sync {tmp_path}/run/wandb/offline-run-*` uploads it later"
        in printed
    )
    assert printed.count("hook MLflow failed at start: hooks.mlflow http://127.0.0.1:9 cannot be used (") == 1
    metrics = scalars_of_metrics(tmp_path / "run")
    offline = scalars_of_wandb(tmp_path / "run")
    assert offline == pytest.approx({place: metrics[place] for place in offline}) and len(offline) == len(metrics)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != config:
            assert key.encode() not in path.read_bytes(), f"the key is in {path}"


def test_no_key(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    alone = (
        "import os\nos.environ.pop('WANDB_API_KEY', None)\nos.environ['HOME'] = os.environ['NETRC'] = "
        f"{str(tmp_path)!r}\n"
    )
    printed = train("run", "--hooks.wandb", "online", "--run.max_steps", "1", config=extended(tiny_config, alone))
    assert "hooks.wandb online: " in printed and "records offline" in printed
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_failed_run_closes_its_trackers(
    train: Train, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    failing = (
        "from dataclasses import replace\nfrom dali_train.hooks import Hook\n"
        "class Fail(Hook):\n    required = True\n    def step(self, record):\n        raise KeyError('enough')\n"
        "config = replace(config, hooks=replace(config.hooks, user=(Fail,)))\n"
    )
    store = tmp_path / "mlruns"
    on = ("--hooks.wandb", "offline", "--hooks.mlflow", str(store), "--hooks.tensorboard", "true")
    train("run", *on, config=extended(tiny_config, failing), status=1)
    run_id = json.loads((tmp_path / "run" / "mlflow-id.json").read_text())["id"]
    assert mlflow.MlflowClient(tracking_uri=f"file:{store}").get_run(run_id).info.status == "FAILED"
    records = wandb_records(next((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")))
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
