"""The report of real runs, and what it says bounds a run."""

import base64
import hashlib
import json
import os
import re
import socket
import struct
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.cli import main
from dali_train.extras.report import runs as report_runs
from dali_train.extras.report.charts import sections
from dali_train.extras.report.page import what_bounds
from dali_train.extras.report.runs import ReportedRun, differences, load_run
from dali_train.extras.report.serve import make_server
from dali_train.runtime.status import STEP_PHASES, best_evaluation, decisive
from dali_train.text import duration, plural, printable, redacted
from tests.conftest import REPOSITORY, TINY_CONFIG, run_in_pool
from tests.helpers import EXCLUDED, extended, write_run
from tests.ranks import patience

MEASURING = """
class BiasNorm(Hook):
    def start(self, record):
        self.bias = record.model.head.bias

    def measure(self):
        return {"head_bias_norm": self.bias.norm().item()}
"""


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One run with a hook that measures; one with EMA, resumed on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.py").write_text(TINY_CONFIG.format(root=str(dataset)))
    config = extended(folder / "config.py", MEASURING)

    def train(name: str, *words: str, ranks: int = 1) -> None:
        arguments = ["train", "--config", str(config), "--run.dir", str(folder / name), "--batch.micro_batch", "16"]
        arguments += words
        run_in_pool(arguments, folder / f"{name}.log", ranks=ranks)

    train("plain")
    faster = ("--optimizer.lr", "0.02", "--run.published_top1", "0.727", "--ema.decay", "0.9")
    train("faster", *faster, "--run.max_steps", "4")
    train("faster", *faster, ranks=2)
    return [folder / "plain", folder / "faster"]


def charts_of(page: str) -> dict[str, Any]:
    """Return what the script in a page draws, after a look at what the page may do: run its own scripts, and fetch
    nothing from elsewhere."""
    assert not re.search(r'\b(src|href)="(?!data:image/png;base64,|/run/)', page), "something is fetched"
    library, drawing = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert page.count("<script") == 3 and "Permission is hereby granted" in library and "uPlot" in drawing
    for text in (library, drawing):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(data))


def columns(page: str, title: str, run: int = 0) -> dict[str, list[float]]:
    """Return the columns of one chart, by ``kind/field``."""
    data = charts_of(page)
    chart = next(chart for chart in data["charts"] if chart["title"] == title)
    return {f"{kind}/{field}": data["runs"][run][kind]["y"].get(field, []) for kind, field, _ in chart["fields"]}


def test_report_of_runs(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Written at the end of a run; of several in one page, the best first, without a change to their own."""
    own = (runs[0] / "report" / "index.html").read_bytes()
    assert main(["report", *map(str, runs)]) == 0
    comparison = runs[0].parent / "comparison" / "index.html"
    assert capsys.readouterr().out.strip() == str(comparison)
    assert (runs[0] / "report" / "index.html").read_bytes() == own
    page, both = own.decode(), comparison.read_text()
    events = load_run(runs[0]).train
    assert columns(page, "Loss")["train/loss"] == pytest.approx([event["loss"] for event in events], rel=1e-6)
    assert columns(page, "head_bias_norm")["train/head_bias_norm"] == pytest.approx(
        [event["head_bias_norm"] for event in events], rel=1e-6
    )
    assert "peak 0.01" in page and "trust_clip false" in page  # of a rate that may be scaled, and timm's own argument
    titles = [chart["title"] for chart in charts_of(page)["charts"]]
    for name in ("Top-1 on", "Throughput", "Where a step", "Learning rate", "Gradient norm", "LAMB's", "Memory"):
        assert any(title.startswith(name) for title in titles), name
    data = charts_of(both)["runs"]
    assert charts_of(page)["runs"][0]["blame"] == f"dali-train blame {runs[0]}"
    best = {run.name: best_evaluation(load_run(run).events) for run in runs}
    tops = [decisive(best[run["name"]], "top1") for run in data]
    assert tops == sorted(tops, reverse=True) and {run["name"] for run in data} == {"plain", "faster"}
    (faster,) = (run for run in data if run["name"] == "faster")
    assert faster["resumed"]["x"]["epoch"] == [4 * 32 / 50]
    assert all(earlier <= later for earlier, later in pairwise(faster["train"]["x"]["time"]))
    assert (
        "<th>optimizer.lr</th>" in both
        and "Wrong answers" in both
        and "(started 2 times, the last)" in ((runs[1] / "report" / "index.html").read_text())
    )


def test_runs_are_served_while_they_train(runs: list[Path], tmp_path: Path) -> None:
    """An index, a page per run, several together; the same answer costs nothing; nothing else is handed out."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for run in runs:
        (folder / run.name).symlink_to(run)
    started = write_run(folder / "just <started>", 0)
    (started / "metrics.jsonl").write_bytes(b"")
    torn = write_run(folder / "torn", 3)
    (torn / "config.json").write_text("{")
    with make_server([folder, runs[0]], "127.0.0.1", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def get(target: str, **headers: str) -> tuple[int, str, str]:
            connection = HTTPConnection(*server.server_address[:2], timeout=patience(30))
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers.get("ETag", "")

        status, index, tag = get("/")
        assert status == 200 and "just &lt;started&gt;" in index and "has no line yet" in index
        assert f"{torn}/config.json" in index and get("/run/torn")[0] == 200
        links = re.findall(r'href="(/run/[^"]*)"', index)
        assert len(links) == 2 and len(charts_of(index)["runs"]) == 2
        assert get("/", **{"If-None-Match": tag})[0] == 304
        pages = [get(link) for link in links]
        assert [status for status, _, _ in pages] == [200, 200]
        assert 'data-refresh="5"' in pages[0][1] and {len(charts_of(page)["runs"]) for _, page, _ in pages} == {1}
        status, both, _ = get("/compare?run=plain&run=faster")
        assert status == 200 and "Settings that differ" in both
        for target in ("/run/../plain", "/run/", "/compare?run=../plain", "/compare", f"/run/{runs[0]}", "/x"):
            assert get(target)[0] == 404, target
        assert get("/", Host="elsewhere.example:80")[0] == 404
        assert get("/", Host="[")[0] == 404 and get("//[")[0] == 404
        with (started / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": "start", "step": 0, "epoch": 0.0, "startup_s": 1.0}) + "\n")
        status, index, _ = get("/", **{"If-None-Match": tag})
        assert status == 200 and len(re.findall('href="/run/', index)) == 3
        server.shutdown()


def test_a_closed_tab_leaves_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 3)
    with make_server([run], "127.0.0.1", 0) as server:
        server.daemon_threads = False  # so that closing the server waits for the answers
        Thread(target=server.serve_forever, daemon=True).start()
        for _ in range(3):
            with socket.create_connection(server.server_address[:2]) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, do not wait
        server.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_runs_on_different_data_are_not_ranked_together(tmp_path: Path) -> None:
    def run(name: str, data: str, top1: float) -> None:
        facts = {"loss": 1.0, "top1": top1, "top5": 1.0, "num_images": 9}
        evaluation = {"event": "eval", "step": 1, "epoch": 0.1, **facts}
        write_run(tmp_path / name, 1, events=[evaluation], changes={"data.root": data})

    run("flowers-1", "data/flowers", 0.5)
    run("digits", "data/digits", 0.9)
    run("flowers-2", "data/flowers", 0.7)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "comparison" / "index.html").read_text()
    assert [run["name"] for run in charts_of(page)["runs"]] == ["digits", "flowers-2", "flowers-1"]
    overview = page.partition('id="overview"')[2].partition("What bounds")[0]
    assert re.findall("<h3>(.*?)</h3>", overview) == ["data/digits", "data/flowers"]
    assert overview.count("<th>data</th>") == 2 and overview.count("<td>data/flowers</td>") == 2


def test_foreign_lines_are_named_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path / "run", 3)
    path = run / "metrics.jsonl"
    foreign = {
        2: b"{torn",
        3: b"\xff\xfe",
        4: b"[" * 100_000,
        5: b'{"event": "train", "step": %s}' % (b"9" * 5000),
        6: b'{"event": "eval", "step": 1, "epoch": 0.1}',
        7: b'{"note": "' + b"x" * 2_000_000 + b'"}',
    }
    first, *others = path.read_bytes().splitlines()
    mine = b'{"note": "of another program"}'
    path.write_bytes(b"\n".join([first, *foreign.values(), mine, *others, b'{"event": "tra']))
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert len(columns(page, "Loss")["train/loss"]) == 3
    assert [int(number) for number in re.findall(r"metrics.jsonl, line (\d+): ", caplog.text)] == [2, 3, 4, 5, 6]
    assert f"{path}, line 6: a field of event &#x27;eval&#x27; is missing" in page and "(and 1 more)" in page


def test_a_metrics_file_of_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not taken for a run's that has no line yet."""
    run = write_run(tmp_path / "run", 3)
    path = run / "metrics.jsonl"
    path.write_bytes(bytes(range(256)))
    assert main(["report", str(run)]) == 2
    assert f"{path} is not what a run writes ({path}, line 1: " in capsys.readouterr().err
    path.unlink()
    os.mkfifo(path)
    assert main(["report", str(run)]) == 2
    assert f"{path} is not what a run writes ({path} is not a regular file)" in capsys.readouterr().err


def test_no_secret_of_a_url_is_in_a_page(tmp_path: Path) -> None:
    url = "https://me:SECRET@host/x?sig=SECRET"
    run = write_run(tmp_path / "run", 2, environment={"command": ["--data.root", url], "device": url})
    with (run / "metrics.jsonl").open("a") as file:
        end = {"event": "end", "step": 2, "epoch": 0.2, "seconds": {}, "finished": False, "error": f"no answer: {url}"}
        file.write(json.dumps(end) + "\n")
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert "SECRET" not in page and page.count("https://***@host/x?***") >= 3


def test_one_best_accuracy(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Console, status, checkpoint, epoch_accuracies.json and report give the same one, and say that it is the EMA's."""
    run = load_run(runs[1])
    best = best_evaluation(run.events)
    assert best is not None and best["ema_top1"] == max(event["ema_top1"] for event in run.evaluations)
    text = f"{best['ema_top1']:.2%}"
    log = (runs[1].parent / "faster.log").read_text()
    assert f"best top-1 of the EMA {text} at step {best['step']}: {runs[1]}/checkpoints/step-0" in log
    assert (runs[1] / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    assert max(json.loads((runs[1] / "epoch_accuracies.json").read_text())) == best["ema_top1"]
    assert main(["status", str(runs[1])]) == 0 and f"best top-1 of the EMA {text}" in capsys.readouterr().out
    folder = runs[0].parent / "no-run"
    folder.mkdir()
    assert main(["status", *map(str, runs), str(folder)]) == 0
    head, plain, faster = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "step"] and re.search(r"plain +finished +7 of 7 +\d", plain)
    assert re.search(rf"faster +finished +7 of 7 +{text} \(EMA\) +7 ", faster)
    page = (runs[1] / "report" / "index.html").read_text()
    drawn = columns(page, "Top-1 on the validation images (published 72.70%)")["eval/decisive_top1"]
    assert max(drawn) == pytest.approx(best["ema_top1"], rel=1e-6)
    assert f"{text} of the EMA of the weights" in page and f"(without EMA {best['top1']:.2%})" in page
    assert "published 72.70%" in page


def test_what_differs_and_what_is_resumed(runs: list[Path]) -> None:
    plain, faster = (load_run(path) for path in runs)
    assert dict(differences([plain, faster])) == {
        "optimizer.lr": [0.01, 0.02],
        "run.published_top1": [None, 0.727],
        "ema.decay": [None, 0.9],
    }
    assert plain.resumed == [] and [event["epoch"] for event in faster.resumed] == [4 * 32 / 50]
    assert plain.seconds_at(plain.events[-1]["step"]) == pytest.approx(sum(plain.phase_seconds().values()))
    end = next(event for event in plain.events if event["event"] == "end")
    logged, whole = plain.phase_seconds(), end["seconds"]
    assert logged["forward_s"] == pytest.approx(whole["forward"], rel=1e-6)
    assert logged["data_wait_s"] == pytest.approx(whole["data"], rel=1e-6)


@pytest.mark.parametrize(
    ("environment", "phases", "sentence"),
    [
        (
            {"decoding_threads": 2, "host_cores": 16},
            {"data_wait_s": 0.38, "forward_s": 0.2, "backward_s": 0.42},
            "Waiting for data takes 38% of the step: 2 decoding threads on 16 cores; raise data.num_threads to 16, "
            "or store the images smaller (dali-train data convert).",
        ),
        (
            {"decoding_threads": 4, "host_cores": 16, "ranks_on_host": 4},
            {"data_wait_s": 0.5, "forward_s": 0.5},
            "Waiting for data takes 50% of the step: 4 decoding threads per rank on 16 cores, all in use; store the "
            "images smaller (dali-train data convert), or give each rank more cores.",
        ),
        ({}, {"forward_s": 0.3, "exchange_s": 0.3, "data_wait_s": 0.05}, "The all-reduce of gradients takes 46%"),
        ({}, {"forward_s": 0.3, "optimizer_s": 0.3}, "The optimizer takes 50% of the step"),
        ({}, {"forward_s": 0.9, "logging_s": 0.1}, "Logging takes 10% of the step: raise hooks.log_every_steps"),
        ({}, {"forward_s": 0.3, "backward_s": 0.6, "data_wait_s": 0.1 - 1e-9}, "Computing bounds the run: forward and"),
    ],
)
def test_what_bounds_a_run(
    tmp_path: Path, environment: dict[str, Any], phases: dict[str, float], sentence: str
) -> None:
    times = dict.fromkeys(STEP_PHASES.values(), 0.0) | phases
    event = {"event": "train", "step": 10, "epoch": 1.0, "step_s": sum(times.values()), "loss": 1.0, **times}
    sizes = ("data.train_size", "data.eval_size", "data.eval_resize_to")
    for size in (224, 32):
        changes = dict.fromkeys(sizes, size)
        run = ReportedRun(write_run(tmp_path / str(size), environment=environment, events=[event], changes=changes))
        if size == 224:
            assert what_bounds(run).startswith(sentence)
        else:  # images of 32 pixels cannot be stored smaller
            assert "smaller" not in what_bounds(run)


@pytest.mark.thorough
def test_picture_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    config = str(REPOSITORY / "configs" / "vit-b32.py")
    assert main(["plan", "--config", config, "--world_size", "4", "--picture", str(picture)]) == 0
    assert f"picture        {picture}" in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.width > 900 and np.asarray(image.convert("L")).std() > 10


def test_the_energy_of_a_run(tmp_path: Path) -> None:
    on_gpus = "by NVML the GPU draws 300 W, if all 4 do as that of rank 0"
    for power, energy in (
        ({"gpu_power_w": 300.0}, f"about 0.00814 kWh: {on_gpus}; median, without the hosts<"),
        ({}, ""),
    ):
        run = write_run(tmp_path / str(len(power)), 11, extra=power, environment={"world_size": 4})
        assert main(["report", str(run)]) == 0
        page = (run / "report" / "index.html").read_text()
        assert energy in page and ("kWh" in page) == bool(energy)


@pytest.mark.thorough
def test_the_price_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the peak of the GPUs, and by the speed of the run once there is one."""

    def price(*options: str) -> str:
        place = ["--run.dir", str(tmp_path / "run"), "--run.epochs", "200", "--num-images", "360"]
        words = ["--config", str(REPOSITORY / "configs" / "vit-b32.py"), "--price", "2.5", *place]
        assert main(["plan", *words, *options]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        return printed.partition(" price ")[2].partition(" rank's memory ")[0]

    assert price("--gpu", "h100").startswith("at least 0.0")
    if not torch.cuda.is_available():
        assert price().startswith("not known: this machine has no GPU")
    write_run(
        tmp_path / "run",
        11,
        events=[{"event": "start", "step": 11, "epoch": 1.1, "total_steps": 50, "startup_s": 1.0, "ranks": 3}],
    )
    rate = load_run(tmp_path / "run").train[0]["images_per_second"]
    hours = 3 * 72_000 / rate / 3600
    assert price("--gpu", "h100").startswith(
        f"{2.5 * hours:,.2f} for {hours:,.2f} rank-hours of training, by the {rate:,.0f} images/s"
    )


def test_a_plan_without_the_images_that_are_left_out(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(tiny_config), "--data.exclude", EXCLUDED]) == 0
    printed = capsys.readouterr().out
    assert "48 in 5 classes" in printed and "without the 2 of data.exclude" in printed
    assert "6 in 4 epochs, 1.50 per epoch" in printed


def test_the_state_of_a_run(tmp_path: Path) -> None:
    """Under way with half a line at the end; stopped, in a directory that a formula would stumble over; finished."""
    states = {end: write_run(tmp_path / f"$\\frac {end}", 11, ended_at=end) for end in (None, 11, 50)}
    with (states[None] / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')
    assert [load_run(run).state for run in states.values()] == ["running, or killed", "stopped", "finished"]
    pages = {}
    for end, run in states.items():
        assert main(["report", str(run)]) == 0
        pages[end] = (run / "report" / "index.html").read_text()
    assert "no evaluation yet" in pages[None] and "running, or killed" in pages[None]
    assert "stopped at epoch 1.10" in pages[11] and "(step 11)" in pages[11]
    assert "2.22 s per step" in pages[11] and "3 s, after 2 s to build" in pages[11]
    assert main(["report", str(write_run(tmp_path / "beyond", ended_at=901))]) == 0
    assert "at epoch 90.00 of 90 (step 901)" in (tmp_path / "beyond" / "report" / "index.html").read_text()


def test_nothing_in_a_page_is_markup_of_its_own(tmp_path: Path) -> None:
    """Quotes and tags in every column, and in the names of a run, a setting and a measurement."""
    bad = """"'><script>alert(1)</script>"""
    run = write_run(tmp_path / "run <script>", 2, ended_at=2, extra={bad: 1.0}, changes={"data.root": bad})
    tables = run / "predictions" / "step-00000001"
    tables.mkdir(parents=True)
    quoted = '"' + bad.replace('"', '""') + '"'
    (tables / "predictions.csv").write_text(f"image,truth,prediction,score,score of truth\n3,{quoted},other,0.5,0.1\n")
    (tables / "classes.csv").write_text(f"class,images,accuracy\n{quoted},4,0.5\n")
    (tables / "confusion.csv").write_text(f"truth,{quoted}\n{quoted},4\n")
    (tables / "confused_pairs.csv").write_text(f"truth,prediction,images\n{quoted},{quoted},4\n")
    (run / "environment.json").write_text('{"device": "<script>"}')
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert bad not in page and "<script>alert" not in page and "<script> " not in page
    assert "<b>&quot;" in page and "<td>&quot;" in page
    assert bad in [chart["title"] for chart in charts_of(page)["charts"]]
    assert not re.search(r"<img[^>]*'", page)


def test_many_points_and_runs_of_one_name(tmp_path: Path) -> None:
    """A curve has as many points as one can see; two runs of one name are told apart; a gap is no number."""
    ended = {"event": "train", "step": 2501, "epoch": 250.1, "step_s": 1.0, "loss": float("nan")}
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "run-1", 2500 if folder == "a" else 3, events=[ended])
    assert main(["report", str(tmp_path)]) == 0
    data = charts_of((tmp_path / "comparison" / "index.html").read_text())["runs"]
    assert [run["name"] for run in data] == ["a/run-1", "b/run-1"]
    assert 1000 < len(data[0]["train"]["y"]["loss"]) <= 2000
    assert data[1]["train"]["y"]["loss"] == [1.0, 1.0, 1.0, "nan"]
    assert data[1]["train"]["y"]["lr"] == [0.1, 0.1, 0.1, None]


def test_links_out_of_a_run_directory_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of a run that someone else made may be passed on."""
    (tmp_path / "secret.json").write_text('{"password": "hunter2"}')
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    for name, target in (("environment.json", "secret.json"), ("samples.png", "secret.png"), ("predictions", "..")):
        run = write_run(tmp_path / name.partition(".")[0], 3)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / target)
        assert main(["report", str(run)]) == 2
        assert f"{run / name} is a link to {tmp_path / target}, outside" in capsys.readouterr().err
        (run / name).unlink()
        (run / "own").write_text("{}")
        (run / name).symlink_to("own")
        assert main(["report", str(run)]) == 0, "a link within is the run's own"


def test_many_lines_are_thinned_out_and_a_sparse_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 2500)
    size = (run / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(report_runs, "_METRICS_READ", size // 10)
    assert 200 <= len(load_run(run).train) <= 250 and len(RunDirectory(run).events) >= 2500
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(3 << 30)
    assert main(["report", str(run)]) == 2
    assert "no run writes as many" in capsys.readouterr().err


def test_losses_of_two_kinds_have_their_names(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    (chart,) = (chart for chart in sections([load_run(run)])["Accuracy and loss"] if chart.title == "Loss")
    assert chart.fields["train/loss"] == "training"
    settings = json.loads((run / "config.json").read_text())
    settings["loss"] = {**settings.get("loss", {}), "name": "binary-cross-entropy"}
    (run / "config.json").write_text(json.dumps(settings))
    (chart,) = (chart for chart in sections([load_run(run)])["Accuracy and loss"] if chart.title == "Loss")
    assert chart.fields["train/loss"] == "training (binary-cross-entropy)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0853, "85.3 ms"),
        (0.9999, "1 s"),
        (2.222, "2.22 s"),
        (59.97, "1 min"),
        (185, "3 min 5 s"),
        (7199.9, "2 h"),
        (282_888, "78 h 35 min"),
        (5_926_320, "1,646 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:SECRET@host:80/x?sig=SECRET: no", "https://***@host:80/x?***: no"),
        ("s3://KEY:SEC/RET+@bucket/a, b", "s3://***@bucket/a, b"),
        ('{"root": "az://c/p?sv=1&sig=SECRET"}', '{"root": "az://c/p?***"}'),
        ("http://host/#SECRET HTTPS://SECRET@host", "http://host/#*** HTTPS://***@host"),
        *[(same, same) for same in ("http://[::1]:9000/x@y", "is it s3://bucket/x?", "a?b@c", "s3://" * 100_000)],
    ],
    ids=range(8),
)
def test_urls_are_shown_without_secrets(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert "SECRET" not in printable(text)


def test_text_is_safe_for_a_terminal() -> None:
    assert printable("a\nb\tc\x1b[31mred\x1b[0m\x1b]0;title\x07d\x08\u202e") == "a b cred" + "d\ufffd\ufffd"
    assert (
        printable("crème brûlée, собака, 猫", keep="\n") == "crème brûlée, собака, 猫"
        and printable("a\nb", keep="\n") == "a\nb"
    )
    assert [plural(count, "class") for count in (0, 1, 1000)] == ["0 classes", "1 class", "1,000 classes"]
    assert [plural(count, "epoch") for count in (0.5, 1, 200)] == ["0.5 epochs", "1 epoch", "200 epochs"]


def test_each_evaluation_set_of_several_runs_has_a_chart(tmp_path: Path) -> None:
    event = {"event": "eval", "step": 2, "epoch": 1.0, "loss": 1.0, "top1": 0.5, "top5": 0.9, "num_images": 9}
    event |= {"seconds": 1.0, "v2_top1": 0.4, "real_top1": 0.6}
    changes = {"data.eval_sets": (("v2", "data/v2"), ("real", "real.json"))}
    runs = [write_run(tmp_path / name, 2, events=[event], changes=changes) for name in ("one", "two")]
    for count, titles in ((1, ["Top-1 on data.eval_sets"]), (2, ["Top-1 on v2", "Top-1 on real"])):
        charts = sections([load_run(path) for path in runs[:count]])["Accuracy and loss"]
        assert [chart.title for chart in charts if "validation" not in chart.title and chart.percent] == titles
