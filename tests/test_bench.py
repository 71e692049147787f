"""The benchmarks: generated datasets, parts that fail or hang, bounds, and a step of a tiny model."""

import argparse
import dataclasses
import datetime
import gzip
import importlib
import io
import json
import os
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from tests.conftest import REPOSITORY
from tests.convert.files import tool
from tests.helpers import has_ended, wait_until, words
from tests.ranks import POOL
from tools.bench import gpu, simulate_scale, slim, startup
from tools.bench.check_ratios import Bound, report
from tools.bench.generated import generated_jpeg, write_dataset
from tools.bench.peers import CONTENDERS, Task, export_files
from tools.bench.turns import chosen, take_turns
from tools.bench.views import VIEWS


def bench_step(arguments: list[str]) -> None:
    sys.argv = ["bench_step.py", *arguments]
    runpy.run_path(str(REPOSITORY / "tools" / "bench_step.py"), run_name="__main__")


def bench(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    importlib.import_module(f"tools.bench.{name}").main()


def test_a_generated_dataset_is_always_the_same(tmp_path: Path) -> None:
    write_dataset(tmp_path, num_train=5, num_validation=3, num_classes=4)
    train = Split(tmp_path, "train")
    validation = Split(tmp_path, "validation")
    assert train.rows["label"].tolist() == [0, 1, 2, 3, 0]
    assert validation.rows["label"].tolist() == [1, 2, 3]
    assert stored_image(MappedFiles(train), 3).tobytes() == generated_jpeg(3)
    bytes_per_pixel = train.rows["size"] / (train.rows["height"].astype(float) * train.rows["width"])
    assert 0.4 < np.mean(bytes_per_pixel) < 0.8


def test_an_index_of_full_size_points_at_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FULL_SIZE", {"train": (1003, 5), "validation": (70, 2)})
    monkeypatch.setattr(startup, "NUM_FILES", 4)
    startup.write_dataset_of_full_size(tmp_path)
    split = Split(tmp_path, "train")
    assert len(split) == 1003 and split.num_classes == 1000 and len(Split(tmp_path, "validation")) == 70
    assert np.bincount(split.rows["shard"]).tolist() == [201, 201, 201, 200, 200]
    for image in (0, 500, 1002):
        assert Image.open(io.BytesIO(stored_image(MappedFiles(split), image).tobytes())).size == (
            split.rows[image]["width"],
            split.rows[image]["height"],
        )


def gpu_options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values = {"work": tmp_path, "out": tmp_path, "copy": None, "device": "cpu", "quick": True, "commit": "abc"}
    values |= {"archive": None, "cifar10": None, "program": None, "minutes": None, "parts": [""]}
    return argparse.Namespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("code", "limit_s", "state", "output", "rounds"),
    [
        ("print('in', path); write('{\"images\": 7}')", 60, "done", "in a.jsonl", [{"images": 7}]),
        ("print('so far'); raise SystemExit('no more')", 60, "FAILED with status 1", "so far\nno more", []),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60, "FAILED by SIGSEGV", "", []),
        ("write('{\"round\": 0}'); time.sleep(60)", 2, "FAILED: out of time", "", [{"round": 0}]),
    ],
    ids=["done", "fails", "crashes", "hangs"],
)
def test_a_part_of_the_gpu_report(
    tmp_path: Path, code: str, limit_s: int, state: str, output: str, rounds: list[dict[str, int]]
) -> None:
    """It takes no other with it, says why it failed, keeps its rounds, and ends with everything that it started."""
    begin = "import os, signal, subprocess, sys, time; path = sys.argv[2];"
    begin += "write = lambda text: print(text, file=open(path, 'w'));"
    begin += f"print(subprocess.Popen(['sleep', '60']).pid, file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True);"
    part = gpu.Part(name="a", command=shlex.join(["-c", f"{begin} {code}"]), rounds=True)
    result = gpu.run_part(part, gpu_options(tmp_path), limit_s)
    assert (result["state"], result["rounds"]) == (state, rounds)
    assert result["output"].split() == output.split()
    wait_until(has_ended, int((tmp_path / "pid").read_text()))


def leave(name: str, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    os._exit(3)


def test_a_contender_that_ends_is_named() -> None:
    with pytest.raises(SystemExit, match="one ended with an error, see above; leave it out with --only"):
        take_turns(["one"], leave, (), [None])


def measured(real_s: float, synthetic_s: float | None = None) -> dict[str, Any]:
    """A part as tools/bench_step.py leaves it: 1,000 images per step, 1 GFLOP per image, a peak of 10 TFLOP/s."""
    start = {"event": "start", "global_batch": 1000, "flops_per_image": 1e9, "peak_flops_per_second": 1e13}
    rounds = [{"contender": "trainer, real data", "step_s": real_s, "kernels": {}}] * 2
    rounds += [
        {"contender": "trainer, real data", "step_s": 100 * real_s, "kernels": {"attention": 1.0}}
    ]  # with the profiler
    rounds += [{"contender": "trainer, synthetic data", "step_s": synthetic_s}] if synthetic_s is not None else []
    return {"rounds": [start, *rounds]}


def test_goals_beside_what_was_measured() -> None:
    results = {"step-b16": measured(0.125), "step-b32-original": measured(0.2, 0.1)}
    table = gpu.goal_table(results, rehearsal=False)
    assert [line.split("|")[3:5] for line in table[2:]] == [
        [" 0.8 ", " met "],
        ["  ", " not measured "],
        ["  ", " not measured "],
        [" 5,000 ", " not met "],
        ["  ", " not measured "],
        [" 0.5 ", " not met "],
        ["  ", " not measured "],
    ]


@pytest.mark.parametrize("minutes", [15, 30, 45])
def test_the_parts_of_a_borrowed_gpu_fit_its_time(minutes: int, tmp_path: Path) -> None:
    parts = gpu.plan(gpu_options(tmp_path, quick=False, cifar10=tmp_path / "cifar10.tar"))
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    assert all(part.limit_s <= 300 for part in parts)
    assert all(not part.needs or part.needs in names[: names.index(part.name)] for part in parts)
    chosen = [part for part in parts if part.minutes <= minutes]
    assert {part.needs for part in chosen} <= {"", *(part.name for part in chosen)}
    expected_s = sum(part.expected_s for part in chosen)
    calls = 2 + expected_s // gpu.CALL_S
    assert 90 + 60 + 30 * calls + expected_s < 60 * minutes, "with the machine's start, the bundle, and uploads"


def test_another_day_continues_the_report_of_a_borrowed_gpu(tmp_path: Path) -> None:
    for name in ("2020-01-01-gpu-cpu", "2020-01-02-gpu-cpu", "2020-01-03-gpu-h200"):
        (tmp_path / f"{name}.jsonl").write_text("")
    assert gpu.report_path(gpu_options(tmp_path, minutes=15)).name == "2020-01-02-gpu-cpu.md"
    assert gpu.report_path(gpu_options(tmp_path)).stem.startswith(datetime.date.today().isoformat())


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """As in a library: machine code (2) or PTX (1) by compute capability."""
    heads = [struct.pack("<HHIQIIHHI32x", kind, 0, 64, 8, 0, 0, 0, 0, architecture) for kind, architecture in entries]
    body = b"".join(
        head + struct.pack("<Q", architecture) for head, (_, architecture) in zip(heads, entries, strict=True)
    )
    return struct.pack("<IHHQ", slim.MAGIC, 1, 16, len(body)) + body


def test_code_for_other_gpus_is_left_out() -> None:
    """Only of fat binaries that have some for this one: from PTX a driver compiles it."""
    whole, of_another = fat_binary((2, 80), (2, 90), (1, 90)), fat_binary((2, 80), (1, 80))
    content = bytes(8) + whole + of_another
    (found,) = slim.fat_binaries(content, (0, len(content)), 90)
    assert found == ((8, 8 + len(whole)), fat_binary((2, 90)))


def test_a_second_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    rows = (
        ("model-a", "pass", ""),
        ("make-x", f"open({str(made)!r}, 'w')", ""),
        ("first", "pass", "make-x"),
        ("broken", "raise SystemExit(1)", "model-a"),
        ("after-broken", "pass", "broken"),
    )
    parts = [
        gpu.Part(name=name, command=shlex.join(["-c", code]), expected_s=10, needs=needs) for name, code, needs in rows
    ]
    parts[1] = dataclasses.replace(parts[1], makes=made)
    begun = []
    for call_s, dali, more, status in (
        (1, True, {}, gpu.UNFINISHED),
        (60, False, {}, gpu.UNFINISHED),
        (60, True, {"parts": ["first"]}, 0),
        (60, True, {}, 1),
        (60, True, {}, 1),  # nothing is open
        (60, True, {"commit": "def", "parts": ["broken"]}, 1),
    ):
        monkeypatch.setattr(gpu, "has_dali", lambda dali=dali: dali)
        assert gpu.run_parts(gpu_options(tmp_path, **more), parts, tmp_path / "report.md", call_s) == status
        lines = capsys.readouterr().out.splitlines()
        begun.append([line.split(":")[0] for line in lines if ": at most " in line])
    assert begun == [[], ["model-a"], ["make-x", "first"], ["broken", "after-broken"], [], ["model-a", "broken"]]
    assert "| after-broken | FAILED: broken has not succeeded | 0 |" in (tmp_path / "report.md").read_text()


@pytest.mark.thorough
def test_the_calls_to_a_lent_gpu(tmp_path: Path) -> None:
    """A rehearsal of their first part: a machine without the bundle is noticed, what was measured comes back, is not
    measured again at the same commit, and is at another one."""
    (tmp_path / "packages").mkdir()
    for name in ("dali_train", "tools", "configs", "tests", "docs"):
        (tmp_path / "packages" / name).symlink_to(REPOSITORY / name)
    out, kept = tmp_path / "out", tmp_path / "dali-train-lent"
    environment = os.environ | {"TMPDIR": str(tmp_path), "OPTIONS": "--device cpu --quick --parts machine"}
    environment |= {"OUT": str(out), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def call(number: str, commit: str) -> tuple[int, str]:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        line = ["bash", str(REPOSITORY / "tools" / "bench" / "lent.sh"), number, commit]
        done = subprocess.run(line, cwd=tmp_path / "packages", env=environment, capture_output=True, check=False)
        return done.returncode, (out / f"call-{number}.log").read_text()

    status, printed = call("2", "abc")
    assert status == 2 and "begin with call 1" in printed and not kept.exists()
    (kept / "site").mkdir(parents=True)
    (kept / "site" / "packed.txt").touch()
    for number, commit, begins in (("1", "abc", True), ("2", "abc", False), ("2", "def", True)):
        status, printed = call(number, commit)
        assert status == 0, printed
        assert ("machine: at most" in printed) == begins, printed
        assert begins or "nothing is left to measure" in printed
        (report,) = out.glob("*-gpu-cpu.jsonl")
        header, line = map(json.loads, report.read_text().splitlines())
        assert f"commit {commit}, a rehearsal" in header["header"] and line["commit"] == commit
        assert (line["part"], line["state"]) == ("machine", "done") and str(REPOSITORY) not in report.read_text()


def test_what_measures_a_gpu_runs_on_a_cpu(dataset: Path, tmp_path: Path) -> None:
    log, options = tmp_path / "log", words("--loads 0.5 --batch 8 --batches 1 --rounds 1 --threads 1 --device cpu")
    assert POOL.run(1, bench, "gpu_data", ["--data", f"a={dataset}", *options], log=log) == [0], log.read_text()
    assert log.read_text().splitlines()[-1].startswith("a, decoded on the CPU"), log.read_text()


def test_orders_and_scale_of_small_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path, num_train=12, num_classes=3)
    orders, scale = tool("compare_orders").main, words("--ranks 2 --global-batch 8 --images 5")
    for main, options in ((orders, (str(tmp_path),)), (orders, ("--images", "9")), (simulate_scale.main, scale)):
        monkeypatch.setattr(sys, "argv", ["tool", *options])
        main()
        assert "images" in capsys.readouterr().out


def test_a_ratio_beyond_its_bound_fails(capsys: pytest.CaptureFixture[str]) -> None:
    speed = Bound(name="speed", usual=1.0, least=0.5)
    time = Bound(name="time", usual=1.0, most=2.0)
    assert report([(speed, 0.5), (time, 2.0)]) == 0
    assert report([(speed, 0.49), (time, 1.0)]) == 1
    assert report([(speed, 1.0), (time, 2.1)]) == 1
    assert "1 beyond the bound: time" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_parts_of_a_step_add_up(tiny_config: Path, tmp_path: Path) -> None:
    options = words("--rounds 1 --steps 2 --only synthetic bare --profile --model.activation_checkpointing true")
    files = ("--config", tiny_config, "--json", tmp_path / "rounds.jsonl", "--plot", tmp_path / "rounds.png")
    files += ("--traces", tmp_path / "traces")
    log = tmp_path / "log"
    assert POOL.run(1, bench_step, [*map(str, files), *options], log=log) == [0], log.read_text()
    assert log.read_text().splitlines()[-1].startswith("trainer, synthetic data")
    start, *rounds = (json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines())
    assert [(line["contender"], line["round"]) for line in rounds] == [
        (name, number) for number in range(2) for name in ("trainer, synthetic data", "bare loop")
    ], "in the order in which they were measured"
    for line in rounds[::2]:
        # The round begins and ends outside of steps.
        assert sum(line["phases"].values()) == pytest.approx(line["step_s"], rel=0.2)
    assert all(line["memory_gb"] > 0 for line in rounds)
    assert all(line["kernels"].get("matrix product", 0) > 0 for line in rounds[2:]), "the round with the profiler"
    assert (tmp_path / "rounds.png").stat().st_size > 0
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "trainer-synthetic-data.json.gz", "none of the bare loop"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    # Multiplications and additions of the tests' ViT, by hand: 17 tokens of 32, a depth of 2, MLPs of 128, 5 classes.
    # Backward is twice the forward pass, but for the patches: pixels need no gradient.
    patches, tokens, width = 16, 17, 32
    block = tokens * width * (3 * width + width + 2 * 4 * width) + 2 * tokens * tokens * width
    embedding = patches * 3 * 8 * 8 * width
    assert start["flops_per_image"] == 2 * (3 * (2 * block + width * 5) + 2 * embedding)


def test_a_mistake_is_one_line(tiny_config: Path, tmp_path: Path) -> None:
    arguments, log = ["--config", str(tiny_config), "--data.root", str(tmp_path)], tmp_path / "log"
    assert POOL.run(1, bench_step, arguments, log=log) == [1]
    assert "bench_step.py: " in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.thorough
def test_optimizers_are_compared_with_rates_from_held_out_images(
    tiny_config: Path,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = tmp_path / "runs"
    options = ["--tuning", dataset, "--final", dataset, "--config", tiny_config, "--batches", 16, "--micro-batch", 8]
    options += ["--optimizers", "lamb", "muon", "--factors", 0.1, 1, "--seeds", 2, "--epochs", 0.5]
    monkeypatch.setattr(sys, "argv", ["compare_optimizers.py", str(runs), *map(str, options)])
    tool("compare_optimizers").main()
    lines = capsys.readouterr().out.splitlines()
    names = sorted(path.name for path in runs.iterdir() if path.is_dir())
    assert len(names) == 8 and sum(name.endswith("tuning") for name in names) == 4
    rows = [line for line in lines if line.startswith("| 16 |")]
    assert sorted(" +- " in row for row in rows) == [False, True] and all(row.endswith(" | 2 |") for row in rows)
    assert Image.open(runs / "optimizers.png").width > 100
    tool("compare_optimizers").main()
    again = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("step ") for line in again) and [row in again for row in rows] == [True, True]


@pytest.mark.thorough
def test_components_are_compared_with_their_publications(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = words(f"--out {tmp_path} --draws 200000 --images 150 --batches 300 --only crops randaugment mixing")
    monkeypatch.setattr(sys, "argv", ["components.py", *small])
    importlib.import_module("tools.bench.components").main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    values = {cells[0]: cells[1:] for cells in rows}
    failures = values["random-resized: central crops after ten failures, per million"]
    assert abs(float(failures[2])) < 5, "standard errors"
    differences = values["pixels to change for big_vision's"]
    assert float(differences[3]) < 0.1 < 0.3 < float(differences[0])
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_contender_is_chosen_by_its_name_or_a_part() -> None:
    names = ["ours", "ours slower", "peer a", "peer b"]
    assert chosen(names, None) == names
    assert chosen(names, ["ours", "peer"]) == ["ours", "peer a", "peer b"]
    assert chosen(names, ["slow"]) == ["ours slower"]


def test_the_library_yields_what_the_trainer_does(dataset: Path, tmp_path: Path) -> None:
    """Else their speeds could not be compared."""
    task = Task(dataset=dataset, work=tmp_path, batch=8, threads=1)
    library, trainer = CONTENDERS["TrainLoader"](task), CONTENDERS["dali_train"](task)
    for _ in range(8):  # into the second epoch of 50 images
        (images, labels), batch = next(library), next(trainer)
        assert torch.equal(images, batch.images) and torch.equal(labels, batch.targets[:, 0])
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_all_contenders_make_the_same_views(dataset: Path, tmp_path: Path) -> None:
    task = Task(dataset=dataset, work=tmp_path, batch=2, threads=1)
    export_files(task)
    shapes = [(2, 3, 224, 224)] * 2 + [(2, 3, 96, 96)] * 8
    for name, contender in VIEWS.items():
        if name == "views peer lightly":
            pytest.importorskip("lightly")
        views, labels = next(contender(task))
        assert [tuple(view.shape) for view in views] == shapes and labels.shape == (2,), name
        assert -1.01 < views[9].min() < 0 < views[9].max() < 1.01
