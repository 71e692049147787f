"""dali-train doctor: what it says of a healthy environment, and of one where something is wrong."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dali_train import doctor
from dali_train.doctor import Finding, table
from dali_train.launch import LaunchOptions, discover

from .conftest import Ranks, Train


def test_a_healthy_environment(run_command: Train, tiny_config: Path, tmp_path: Path) -> None:
    output = run_command("doctor", "--config", str(tiny_config), "--run.dir", str(tmp_path / "run"))
    lines = {line[6:21].strip(): line[:4].strip() for line in output.splitlines() if re.match(r"(pass|warn|fail) ", line)}
    expected = {"torch", "timm", "numpy", "dali", "gpu", "decode on CPU", "data train", "data validation", "run directory"}
    if torch.cuda.is_available():
        expected.add("decode on GPU")
    assert set(lines) == expected, output
    assert {name for name, verdict in lines.items() if verdict != "pass"} <= {"gpu", "run directory"}, output
    assert "50 images in 5 classes, index fits its shards" in output
    assert not list((tmp_path / "run").iterdir())


def test_on_several_ranks(tiny_config: Path, tmp_path: Path) -> None:
    ranks = Ranks(["doctor", "--config", str(tiny_config), "--run.dir", str(tmp_path / "run")], 2, tmp_path / "log")
    assert ranks.wait() == [0, 0]
    output = (tmp_path / "log").read_text()
    assert re.search(r"pass  all-reduce +(gloo|nccl), 2 ranks, \d+ MB in [\d.]+ ms, [\d.]+ GB/s", output), output
    assert "pass  clocks          all within 1 s" in output
    assert output.count("decode on CPU") == 1


def test_without_a_config(run_command: Train) -> None:
    assert "dataset and run directory were not checked: name them with --config FILE" in run_command("doctor")


def test_a_dataset_that_changed_after_indexing(run_command: Train, tiny_config: Path, dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(dataset, root)
    shard = root / "train" / "train-00001-of-00003"
    shard.write_bytes(shard.read_bytes()[:-100])
    output = run_command("doctor", "--config", str(tiny_config), "--data.root", str(root), "--run.dir", str(tmp_path), status=1)
    assert re.search(r"fail  data train .*train-00001-of-00003", output), output
    assert "pass  data validation" in output


def test_an_unusable_run_directory(run_command: Train, tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = run_command("doctor", "--config", str(tiny_config), "--run.dir", str(tmp_path / "file" / "run"), status=1)
    assert re.search(r"fail  run directory .*file/run'", output), output
    assert "-> set run.dir to a directory that this user may write to" in output


def test_old_versions_and_a_wrong_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.NEEDED, "timm", (99,))
    verdicts = {finding.check: finding for finding in doctor.versions()}
    assert verdicts["timm"].verdict == "fail" and verdicts["timm"].remedy == "install timm>=99"
    assert verdicts["torch"].verdict == "pass"
    monkeypatch.setattr(doctor, "decode", lambda encoded, device_id: np.zeros((240, 320, 3), dtype=np.uint8))
    (finding,) = doctor.decoding(torch.device("cpu"))
    assert finding.verdict == "fail" and "grey levels from libjpeg" in finding.found


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "1",
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    (finding,) = doctor.devices(discover(LaunchOptions(), variables), torch.device("cuda", 0))
    assert finding.verdict == "fail" and finding.remedy == "start at most 2 processes on this host, not 4"


def test_the_table_says_whose_finding_it_is() -> None:
    good, bad = Finding("gpu", "pass", "8 visible"), Finding("gpu", "fail", "none", "ask for one")
    assert list(table([("rank 0 on n1", [good]), ("rank 1 on n2", [good])])) == ["pass  gpu             8 visible"]
    lines = list(table([("rank 0 on n1", [good]), ("rank 1 on n2", [bad])]))
    assert lines == ["fail  gpu             none (rank 1 on n2)", "                      -> ask for one"]
