"""The benchmarks: generated datasets, parts that fail or hang, reports that grow, bounds that can be missed, and a
step's on a tiny model."""

import argparse
import faulthandler
import importlib
import io
import json
import os
import runpy
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles
from tools.bench import gpu, simulate_scale, startup
from tools.bench.check_ratios import Bound, report
from tools.bench.generated import generated_jpeg, write_dataset
from tools.bench.goals import goal_table
from tools.bench.turns import take_turns

from .conftest import REPOSITORY
from .data.files import tool
from .helpers import words
from .ranks import POOL


def bench_step(arguments: list[str]) -> None:
    sys.argv = ["bench_step.py", *arguments]
    runpy.run_path(str(REPOSITORY / "tools" / "bench_step.py"), run_name="__main__")


def bench(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    importlib.import_module(f"tools.bench.{name}").main()


def test_a_generated_dataset_is_always_the_same(tmp_path: Path) -> None:
    write_dataset(tmp_path, num_train=5, num_validation=3, num_classes=4)
    train, validation = Split(tmp_path, "train"), Split(tmp_path, "validation")
    assert train.rows["label"].tolist() == [0, 1, 2, 3, 0] and validation.rows["label"].tolist() == [1, 2, 3]
    assert MappedFiles(train).image(3).tobytes() == generated_jpeg(3)
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
        assert Image.open(io.BytesIO(MappedFiles(split).image(image).tobytes())).size == (
            split.rows[image]["width"],
            split.rows[image]["height"],
        )


def part(code: str, limit_s: int = 60) -> object:
    return gpu.Part(name="a", title="something", words=["-c", code], limit_s=limit_s, rounds=True)


@pytest.mark.parametrize(
    ("code", "limit_s", "state", "output", "rounds"),
    [
        ("print('in', path); write('{\"images\": 7}')", 60, "done", "in a.jsonl", [{"images": 7}]),
        ("print('so far'); raise SystemExit('no more')", 60, "FAILED with status 1", "so far\nno more", []),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60, "FAILED by SIGSEGV", "", []),
        ("write('{\"round\": 0}'); time.sleep(60)", 2, "cut short", "", [{"round": 0}]),
    ],
    ids=["done", "fails", "crashes", "cut short"],
)
def test_a_part_of_the_report(
    tmp_path: Path, code: str, limit_s: int, state: str, output: str, rounds: list[dict[str, int]]
) -> None:
    """It takes no other with it, says why it failed, and keeps the rounds that it measured."""
    begin = "import os, signal, sys, time; path = sys.argv[2]; write = lambda text: print(text, file=open(path, 'w'));"
    result = gpu.run_part(part(f"{begin} {code}", limit_s), tmp_path)
    assert (result["state"], result["rounds"]) == (state, rounds)
    assert result["output"].split() == output.split()


def wait_for_end(pid: int) -> bool:
    """A process that was killed dies a moment later, and its parent, killed too, cannot ask for its status."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    result = gpu.run_part(part(code, limit_s=1), tmp_path)
    assert result["state"] == "FAILED: not done after 1 s"
    assert wait_for_end(int(result["output"]))


def test_a_report_grows(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path, device="cpu", quick=True)
    first = {"part": "one", "title": "first", "command": "do it", "state": "done"}
    first |= {"seconds": 1.0, "output": "42", "rounds": []}
    gpu.write(options, {"one": first})
    (lines,) = tmp_path.glob("*.jsonl")
    assert gpu.earlier(lines) == [first]
    gpu.write(options, {"one": first, "two": {**first, "part": "two", "state": "FAILED with status 1"}})
    text = lines.with_suffix(".md").read_text()
    assert "| one | first | done | 1 |" in text and "| two | first | FAILED with status 1 | 1 |" in text
    assert "    42" in text
    assert os.fspath(tmp_path) not in text


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


def test_goals_beside_what_was_seen() -> None:
    results = {
        "step-b16-blocks": measured(0.25),
        "step-b16-fast": measured(0.125),
        "step-b32-original": measured(0.2, 0.1),
    }
    table = goal_table({**results, "data-original": {"rounds": [{"contender": "x", "images_per_second": 7}]}})
    assert table[2:] == [
        "| ViT-B/16, share of the dense peak (MFU) | 50.0% | 80.0% | met |",
        "| ViT-B/32, images/s from 256 px | 15,000 |  | not measured |",
        "| ViT-B/32, images/s from originals | 8,000 | 5,000 | not met |",
        "| ResNet-50, images/s from originals (with MLPerf's fused kernels 7,950) | 3,400 |  | not measured |",
        "| step with real / synthetic data, the lowest | 0.980 | 0.500 | not met |",
    ]


def test_every_order_ends_in_its_time(tmp_path: Path) -> None:
    options = argparse.Namespace(
        device="cuda", quick=False, archive=None, **dict.fromkeys(("original", "stored_256", "raw_256"))
    )
    parts = gpu.plan(options, tmp_path)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) and all(part.expected_s <= part.limit_s <= 300 for part in parts)
    without_data = names.index("make-images")  # what needs torch and timm alone comes first
    assert all(name.startswith("model-") for name in names[:without_data]) and without_data > 10
    for minutes, order in gpu.ORDERS.items():
        assert set(gpu.ORDERS[30].split()) <= set(order.split()) <= set(names)
        expected_s = sum(part.expected_s for part in gpu.in_order(parts, order.split()))
        calls = 2 + expected_s // gpu.CALL_S
        assert 90 + 60 + 30 * calls + expected_s < 60 * minutes, "with the machine's start, the bundle, and uploads"


def test_a_second_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = words("gpu --device cpu --quick --minutes 30")
    options += ("--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"))
    monkeypatch.setattr(gpu, "plan", short_plan)
    monkeypatch.setattr(gpu, "ORDERS", {30: "last broken first after-broken"})
    begun = []
    for call_s, dali, more, status in (
        (1, True, [], 75),
        (60, False, [], 75),
        (60, True, ["--parts", "first"], 0),
        (60, True, [], 1),
        (60, True, [], 1),
        (60, True, ["--again", "--parts", "broken"], 1),
    ):
        monkeypatch.setattr(gpu, "CALL_S", call_s)
        monkeypatch.setattr(gpu, "has_dali", lambda dali=dali: dali)
        monkeypatch.setattr(sys, "argv", [*options, *more])
        assert gpu.main() == status
        lines = capsys.readouterr().out.splitlines()
        begun.append([line.split()[1].rstrip(":") for line in lines if line.startswith("[")])
    assert begun == [[], ["model-a"], ["make-x", "first"], ["last", "broken", "after-broken"], [], ["broken"]]
    (report,) = (tmp_path / "out").glob("*.md")
    assert "| after-broken | d | FAILED: not begun, since broken has not ended well | 0 |" in report.read_text()


def short_plan(options: argparse.Namespace, work: Path) -> list[gpu.Part]:
    """What needs a dataset, what needs that, and what cannot."""
    made = work / "made"
    rows = [
        ("model-a", "pass", ""),
        ("make-x", f"open({str(made)!r}, 'w')", ""),
        ("first", "pass", "make-x"),
        ("last", "pass", "first"),
        ("broken", "raise SystemExit(1)", "model-a"),
        ("after-broken", "pass", "broken"),
    ]
    return [
        gpu.Part(
            name=name,
            title="d",
            words=["-c", code],
            limit_s=60,
            expected_s=10,
            makes=made if name == "make-x" else None,
            needs=needs,
        )
        for name, code, needs in rows
    ]


def test_what_measures_a_gpu_runs_on_a_cpu(dataset: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name, options, last in (
        ("smoke", f"{dataset} --decode box --load 0 --batch 4", "at most 0.00 grey levels from the CPU, per image"),
        ("gpu_data", f"--data a={dataset} --loads 0.5 --batch 8 --batches 1 --rounds 1 --threads 1", "CPU decoding"),
    ):
        assert POOL.run(1, bench, name, [*options.split(), "--device", "cpu"], log=log) == [0], log.read_text()
        assert last in log.read_text().splitlines()[-1], log.read_text()
        log.unlink()


def test_orders_and_scale_of_small_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path, num_train=12, num_classes=3)
    orders, scale = tool("compare_orders").main, words("--ranks 2 --global-batch 8 --images 5")
    for main, options in ((orders, (str(tmp_path),)), (orders, ("--images", "9")), (simulate_scale.main, scale)):
        monkeypatch.setattr(sys, "argv", ["tool", *options])
        main()
        assert "images" in capsys.readouterr().out


def test_a_short_campaign_of_damaged_files(tmp_path: Path) -> None:
    """That faults are found and reported separately; which readers have faults is what tools/fuzz.py itself is for."""
    fuzz = tool("fuzz")
    (tmp_path / "samples" / "status").mkdir(parents=True)
    (tmp_path / "samples" / "status" / "status.json").write_text('{"step": 12}')
    faults = {
        "raises": lambda directory, damaged: 1 // 0,
        # Without a page of stacks.
        "crashes": lambda directory, damaged: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)),
        "eats": lambda directory, damaged: bytearray(3 << 30),
        "is fine": lambda directory, damaged: damaged.read_bytes(),
    }
    found = {}
    for name, read in faults.items():
        fuzz.TARGETS[name] = fuzz.Target("status/*.json", "status", read)
        tally = fuzz.Tally()
        fuzz.run_batch(name, 0, 0, tmp_path / "samples", tmp_path / "work", tally, tmp_path / "kept")
        found[name] = [what.split(":")[0] for _, what, _ in tally.faults.values()]
    assert found["is fine"] == [] and found["raises"][0].startswith("ZeroDivisionError at ")
    assert found["crashes"] == ["the process was ended by SIGSEGV"] and found["eats"][0].startswith("MemoryError")
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_a_ratio_beyond_its_bound_fails(capsys: pytest.CaptureFixture[str]) -> None:
    speed, time = Bound(name="speed", usual=1.0, least=0.5), Bound(name="time", usual=1.0, most=2.0)
    assert report([(speed, 0.5), (time, 2.0)]) == 0
    assert report([(speed, 0.49), (time, 1.0)]) == 1
    assert report([(speed, 1.0), (time, 2.1)]) == 1
    assert "1 beyond the bound: time" in capsys.readouterr().out


def test_the_parts_of_a_step_add_up(tiny_config: Path, tmp_path: Path) -> None:
    options = words("--rounds 1 --steps 2 --only synthetic bare --profile --model.activation_checkpointing true")
    files = ("--config", tiny_config, "--json", tmp_path / "rounds.jsonl", "--plot", tmp_path / "rounds.png")
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
    # Multiplications and additions of the tests' ViT, by hand: 17 tokens of 32, a depth of 2, MLPs of 128, 5 classes.
    # Backward is twice the forward pass, but for the patches: pixels need no gradient.
    patches, tokens, width = 16, 17, 32
    block = tokens * width * (3 * width + width + 2 * 4 * width) + 2 * tokens * tokens * width
    embedding = patches * 3 * 8 * 8 * width
    assert start["flops_per_image"] == 2 * (3 * (2 * block + width * 5) + 2 * embedding)


def test_a_mistake_is_told(tiny_config: Path, tmp_path: Path) -> None:
    arguments, log = ["--config", str(tiny_config), "--data.root", str(tmp_path)], tmp_path / "log"
    assert POOL.run(1, bench_step, arguments, log=log) == [1]
    assert "bench_step.py: " in log.read_text() and "Traceback" not in log.read_text()
