"""What the benchmarks stand on: generated datasets, parts that fail or hang, reports that grow, bounds that can be missed."""

import argparse
import io
import os
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest
from PIL import Image

from dali_train.data.index import Split

from .conftest import REPOSITORY


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/bench_gpu.py; the modules beside it can be imported too."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import bench_gpu

    return bench_gpu


def test_a_generated_dataset_is_always_the_same(bench: ModuleType, tmp_path: Path) -> None:
    from bench_images import generated_jpeg, write_dataset

    write_dataset(tmp_path, num_train=5, num_validation=3, num_classes=4)
    train, validation = Split(tmp_path, "train"), Split(tmp_path, "validation")
    assert train.rows["label"].tolist() == [0, 1, 2, 3, 0] and validation.rows["label"].tolist() == [1, 2, 3]
    assert train.encoded(3).tobytes() == generated_jpeg(3)
    assert 0.4 < np.mean(train.rows["size"] / (train.rows["height"].astype(float) * train.rows["width"])) < 0.8  # bytes a pixel


def test_an_index_of_full_size_points_at_images(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_startup

    monkeypatch.setattr(bench_startup, "FULL_SIZE", {"train": (1003, 5), "validation": (70, 2)})
    bench_startup.write_dataset_of_full_size(tmp_path)
    split = Split(tmp_path, "train")
    assert len(split) == 1003 and split.num_classes == 1000 and len(Split(tmp_path, "validation")) == 70
    assert np.bincount(split.rows["shard"]).tolist() == [201, 201, 201, 200, 200]
    for image in (0, 500, 1002):
        assert Image.open(io.BytesIO(split.encoded(image).tobytes())).size == (
            split.rows[image]["width"],
            split.rows[image]["height"],
        )


def part(bench: ModuleType, code: str, limit_s: int = 60) -> object:
    return bench.Part(name="a", title="something", words=["-c", code], limit_s=limit_s, rounds=True)


def test_a_part_of_the_report(bench: ModuleType, tmp_path: Path) -> None:
    code = "import sys; print('in', sys.argv[2]); open(sys.argv[2], 'w').write('{\"images\": 7}\\n')"
    result = bench.run_part(part(bench, code), tmp_path)
    assert (result["state"], result["output"], result["rounds"]) == ("done", "in a.jsonl", [{"images": 7}])


def test_a_part_that_fails_says_why(bench: ModuleType, tmp_path: Path) -> None:
    result = bench.run_part(part(bench, "print('so far'); raise SystemExit('no more')"), tmp_path)
    assert result["state"] == "FAILED with status 1" and "so far" in result["output"] and "no more" in result["output"]


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


def test_a_part_that_hangs_is_ended_with_all_that_it_started(bench: ModuleType, tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    result = bench.run_part(part(bench, code, limit_s=1), tmp_path)
    assert result["state"] == "FAILED: not done after 1 s"
    assert wait_for_end(int(result["output"]))


def test_a_report_grows(bench: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path, device="cpu", quick=True)
    first = {"part": "one", "title": "first", "command": "do it", "state": "done", "seconds": 1.0, "output": "42", "rounds": []}
    bench.write(options, {"one": first})
    (lines,) = tmp_path.glob("*.jsonl")
    assert bench.earlier(lines) == [first]
    bench.write(options, {"one": first, "two": {**first, "part": "two", "state": "FAILED with status 1"}})
    text = lines.with_suffix(".md").read_text()
    assert "| one | first | done | 1 |" in text and "| two | first | FAILED with status 1 | 1 |" in text and "    42" in text
    assert os.fspath(tmp_path) not in text


def test_a_ratio_beyond_its_bound_fails(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    from check_ratios import Bound, report

    speed, time = Bound(name="speed", usual=1.0, least=0.5), Bound(name="time", usual=1.0, most=2.0)
    assert report([(speed, 0.5), (time, 2.0)]) == 0
    assert report([(speed, 0.49), (time, 1.0)]) == 1
    assert report([(speed, 1.0), (time, 2.1)]) == 1
    assert "1 beyond the bound: time" in capsys.readouterr().out
