"""Commands for a machine with GPUs, on a fake one, where nothing of DALI runs on a GPU: they say so, and go on."""

import json
import os
from functools import partial
from pathlib import Path

from dali_train.config import load_config
from dali_train.extras.cost.speed import half_precision
from dali_train.extras.quickstart.train_digits import precision_of
from tests.fakecuda import jobs
from tests.fakecuda.conftest import RunOnFake
from tests.helpers import words
from tests.ranks import POOL
from tests.test_bench import gpu_options
from tools.bench import gpu

STARTED = Path(__file__).parent / "started"


def test_doctor_finds_the_gpu_and_what_dali_lacks(config_file: Path, tmp_path: Path) -> None:
    words = ["doctor", "--config", str(config_file), "--run.dir", str(tmp_path / "run"), "--data.device", "cpu"]
    doctor = partial(jobs.watched, values=False)
    assert POOL.run(1, doctor, words, tmp_path / "report", log=tmp_path / "log") == [1]
    output = (tmp_path / "log").read_text()
    findings = {line[6:22].strip(): line[:4] for line in output.splitlines() if line[:4] in ("pass", "warn", "fail")}
    assert {name for name, verdict in findings.items() if verdict == "fail"} == {"decode on GPU", "hw decoder"}, output
    assert findings["gpu"] == findings["matrix product"] == findings["memory"] == "pass"
    assert "NVIDIA H100 80GB HBM3, 80 of 80 GiB free" in output
    assert json.loads((tmp_path / "report" / "rank0.json").read_text())["faults"] == []


def test_training_names_a_driver_that_does_not_suit_dali(on_fake: RunOnFake) -> None:
    run = on_fake("old", "--data.device", "gpu", succeeds=False)
    assert run.statuses == [1]
    (line,) = [line for line in run.output.splitlines() if "DALI cannot use GPU 0" in line]
    assert "installed CUDA driver" in line and "data.device cpu" in line
    assert "Traceback" not in run.output


def test_init_chooses_what_suits_the_gpu(dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "digits.py"
    words = ["init", str(dataset), "--output", str(path)]
    init = partial(jobs.watched, values=False)
    assert POOL.run(1, init, words, tmp_path / "report", log=tmp_path / "log") == [0], (tmp_path / "log").read_text()
    config = load_config(path)
    assert config.precision.dtype == "bf16" and config.batch.micro_batch == config.batch.global_batch
    assert "NVIDIA H100 80GB HBM3 has units for it" in path.read_text()
    assert [half_precision(capability) for capability in ((7, 5), (6, 1))] == ["fp16", None]


def quickstart(path: Path) -> int:
    path.write_text(precision_of(1))
    return 0


def test_quickstart_chooses_it_too(tmp_path: Path) -> None:
    assert POOL.run(1, quickstart, tmp_path / "dtype", log=tmp_path / "log") == [0], (tmp_path / "log").read_text()
    assert (tmp_path / "dtype").read_text() == "bf16"
    assert "[2/3] 1 GPU: bf16" in (tmp_path / "log").read_text()


def test_auto_is_the_largest_micro_batch_that_fits(on_fake: RunOnFake) -> None:
    run = on_fake("auto", *words("--batch.global_batch 64 --batch.micro_batch auto --run.max_steps 1"))
    assert load_config(run.directory / "config.json").batch.micro_batch == 64


def bench(work: Path) -> int:
    """Run a part without DALI, one that needs DALI on a GPU, and those that make its images."""
    os.environ["PYTHONPATH"] = str(STARTED)
    options = gpu_options(work, device="cuda", parts=["model-b16-fast", "data-original"])
    return gpu.run_parts(options, gpu.plan(options), work / "report.md", call_s=300)


def test_a_benchmark_measures_what_it_can(tmp_path: Path) -> None:
    assert POOL.run(1, bench, tmp_path, log=tmp_path / "log") == [1]
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()[1:]]
    parts = {line["part"]: line for line in lines}
    states = {name: line["state"] for name, line in parts.items()}
    made = {"model-b16-fast": "done", "make-images": "done", "make-original": "done"}
    assert states == made | {"data-original": "FAILED with status 1"}
    assert parts["model-b16-fast"]["rounds"][0]["memory_gb"] > 0
    assert "installed CUDA driver" in parts["data-original"]["output"]
    assert "NVIDIA H100 80GB HBM3" in (tmp_path / "report.md").read_text()
