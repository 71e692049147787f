"""dali-train doctor: what it says of a healthy environment, and of one where something is wrong."""

import pwd
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dali_train.config import load_config
from dali_train.extras.doctor import examine as doctor
from dali_train.extras.doctor.findings import Finding, table
from dali_train.extras.doctor.surroundings import home, nccl_interfaces, network, temporary_files
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.runtime.launch import LaunchOptions, discover
from tests.conftest import Train, encoded, jpeg, photograph, run_in_pool, write_shard
from tools.bench.generated import accept_index

ALONE = discover(LaunchOptions(), {})


@pytest.mark.thorough
def test_a_healthy_environment(run_command: Train, tiny_config: Path, tmp_path: Path) -> None:
    output = run_command("doctor", "--config", str(tiny_config), "--run.dir", str(tmp_path / "run"))
    lines = {
        line[6:21].strip(): line[:4].strip() for line in output.splitlines() if re.match(r"(pass|warn|fail) ", line)
    }
    names = "torch, timm, numpy, dali, home, temporary files, network, gpu, decode on CPU, batch, model, data train"
    names += ", data validation, decode a batch"
    expected = {*names.split(", "), "run directory", "free space"}
    if torch.cuda.is_available():
        expected |= {"decode on GPU", "hw decoder", "matrix product", "memory"}
    else:
        expected |= {"precision"}
    assert set(lines) == expected, output
    assert {name for name, verdict in lines.items() if verdict != "pass"} <= {"gpu", "run directory"}, output
    assert "50 images in 5 classes, index fits its files" in output
    assert re.search(r"decode a batch  4 images of 32 px as float32 on the [CG]PU, mean -?[\d.]+", output), output
    assert not (tmp_path / "run").exists(), "it leaves nothing behind, not even the directory"


@pytest.mark.thorough
def test_each_dimension_of_the_mesh(tiny_config: Path, tmp_path: Path) -> None:
    words = ["--config", str(tiny_config), "--run.dir", str(tmp_path / "run")]
    words += ["--parallel.pipeline", "2", "--parallel.shard", "full"]
    words += ["--data.normalise", "123,116,103", "127.5,127.5,127.5"]
    output = run_in_pool(["doctor", *words], tmp_path / "log", ranks=4)
    for name, ranks in (("all-reduce", 4), ("pipeline", 2), ("shard", 2)):
        measured = rf"pass  {name} +(gloo|nccl), {ranks} ranks, \d+ MB in [\d.]+ ms, [\d.]+ GB/s"
        assert re.search(measured, output), output
    assert "pass  clocks          all within 1 s" in output
    assert output.count("decode on CPU") == output.count("decode a batch") == 1
    assert "pass  layout          4 ranks = pipeline 2 x data 2, state sharded over 2 data-parallel ranks" in output
    assert "32 images per step: 4 x 4 on each rank" in output
    # A model that timm gives other images than the config.
    assert "data.normalise is 123,116,103 127.5,127.5,127.5, and timm's vit_tiny_patch16_224 was trained with" in output
    assert "fine for random initial weights, wrong for pretrained ones" in output


@pytest.mark.thorough
def test_what_training_would_refuse(tiny_config: Path, tmp_path: Path) -> None:
    """Images that cannot be decoded, a shard that changed after indexing, a batch for fewer ranks, sizes that
    the model does not take, and a run directory that cannot be made."""
    root = tmp_path / "data"
    for split, kept in (("train", -200), ("validation", None)):
        records = [(jpeg(photograph(image, 40, 40))[:kept], 1) for image in range(8)]
        write_shard(root / split / f"{split}-00000-of-00001", records)
    build_index(root)
    shard = root / "validation" / "validation-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:-100])
    (tmp_path / "file").write_text("")
    words = ["--config", str(tiny_config), "--data.root", str(root), "--run.dir", str(tmp_path / "file" / "run")]
    words += ["--data.eval_size", "28", "--batch.global_batch", "4"]
    output = run_in_pool(["doctor", *words], tmp_path / "log", ranks=2, status=1)
    for expected in (
        r"fail  batch +batch.global_batch 4 is 1 x batch.micro_batch 4, and 2 data-parallel ranks .*micro_batch 2",
        r"fail  model +data.eval_size is 28, but model.name vit_tiny_patch16_224 takes images of 32 pixels",
        r"set data.eval_size 32",
        r"pass  data train",
        r"fail  data validation .*validation-00000-of-00001",
        r"fail  decode a batch .*cannot be decoded.* \(rank 0 on ",
        r"fail  run directory .*file/run'",
        r"-> a part of the path is a file: set run.dir to a directory that this user may write to",
    ):
        assert re.search(expected, output), output


def test_stored_bytes_are_looked_at(tiny_config: Path, tmp_path: Path) -> None:
    """Of any format that training decodes; what is none is named."""
    shard = tmp_path / "train" / "a"
    write_shard(shard, [(encoded(photograph(1, 40, 40), "TIFF"), 1)])
    build_index(tmp_path)
    config = load_config(tiny_config).replace({"data.root": str(tmp_path)})
    assert next(doctor.splits(config.data)).verdict == "pass"
    rows = np.load(tmp_path / "index" / "train.npy")
    for width, verdict in ((41, "fail"), (40, "pass")):
        rows["width"] = width
        np.save(tmp_path / "index" / "train.npy", rows)
        accept_index(tmp_path)
        finding = next(doctor.splits(config.data))
        assert finding.verdict == verdict
        assert "has 40 x 40 pixels, the index says 41 x 40" in finding.text or verdict == "pass"
    shard.write_bytes(shard.read_bytes().replace(b"II*\0", b"hello"[:4]))
    finding = next(doctor.splits(config.data))
    assert finding.verdict == "fail" and "is not an image in a known format" in finding.text


def test_a_decoder_that_crashes(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    (finding,) = doctor.decoding_a_batch(load_config(tiny_config), ALONE, torch.device("cpu"))
    assert finding.verdict == "fail" and finding.text == "the process was ended by SIGSEGV while decoding on the CPU"
    assert finding.remedy == "a bug in the decoder: install another version of DALI, or set data.device cpu"


def test_too_little_space(tiny_config: Path, tmp_path: Path) -> None:
    run = replace(load_config(tiny_config).run, dir=str(tmp_path / "run"))
    findings = {finding.check: finding for finding in doctor.run_directory(run, ALONE, 10**18)}
    assert findings["free space"].verdict == "fail" and "102 checkpoints take" in findings["free space"].text
    assert findings["run directory"].verdict != "fail" and not (tmp_path / "run").exists()


def test_a_directory_that_nobody_may_write_to(tiny_config: Path) -> None:
    run = replace(load_config(tiny_config).run, dir="/sys/dali_train")
    (finding,) = doctor.run_directory(run, ALONE, 0)
    assert finding.verdict == "fail"
    assert re.search(
        "mounted read-only: mount it writable|this user may not write there: change its permissions", finding.remedy
    )


def test_without_a_config(run_command: Train) -> None:
    assert "dataset and run directory were not checked: name them with --config FILE" in run_command("doctor")


def test_old_versions_and_a_wrong_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.NEEDED, "timm", (99,))
    verdicts = {finding.check: finding for finding in doctor.versions()}
    assert verdicts["timm"].verdict == "fail" and verdicts["timm"].remedy == "install timm>=99"
    assert verdicts["torch"].verdict == "pass"
    right = doctor.decode_repeatedly

    def sometimes_wrong(*arguments: Any, rounds: int, **named: Any) -> Iterator[Any]:
        for number, images in enumerate(right(*arguments, rounds=rounds, **named)):
            yield [*images[:-1], images[-1] + 9 * (number > 1)]

    monkeypatch.setattr(doctor, "decode_repeatedly", sometimes_wrong)
    (finding,) = doctor.decoding(torch.device("cpu"))
    assert finding.verdict == "pass" and "grey levels from libjpeg" in finding.text
    finding = doctor._decoder("hw decoder", [doctor._picture(1), doctor._picture(2)], None, rounds=3)
    assert finding.verdict == "fail" and finding.text.endswith(
        "libjpeg, 1 of them not the same 3 times, each read before the next"
    )


@pytest.mark.parametrize("directory", [None, "/", "/proc/none"])
def test_a_home_that_is_none(directory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # a user id that is in no /etc/passwd
    if directory is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", directory)
    finding = home()
    assert finding.verdict == "warn" and "XDG_CACHE_HOME" in finding.remedy
    assert (directory or "is not set") in finding.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert home().verdict == "pass" and not (tmp_path / "not").exists()


def test_a_directory_for_temporary_files_that_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", None)
    finding = temporary_files()
    assert finding.verdict == "warn" and finding.text.startswith(f"TMPDIR is {tmp_path}/none, ")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert temporary_files().verdict == "pass" and str(tmp_path) in temporary_files().text


def test_interfaces_that_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Gloo's notation, full names, and in NCCL's: prefixes, = for full names, ^ for all but these."""
    names = ["lo", "eth0", "eth1", "ib0", "docker0"]
    assert nccl_interfaces("eth", names) == ["eth0", "eth1"]
    assert nccl_interfaces("=eth0,ib0", names) == ["eth0", "ib0"]
    assert nccl_interfaces("^docker,lo", names) == ["eth0", "eth1", "ib0"]
    assert nccl_interfaces("^=eth0", names) == ["lo", "eth1", "ib0", "docker0"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    (finding,) = network(ALONE, torch.device("cpu"))
    assert finding.verdict == "pass" and "lo 127.0.0.1" in finding.text
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "none")
    assert [finding.verdict for finding in network(ALONE, torch.device("cpu"))] == ["pass", "warn"]
    (_, finding) = network(ALONE, torch.device("cuda", 0))
    assert finding.verdict == "fail" and "NCCL_SOCKET_IFNAME is none" in finding.text
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    (_, finding) = network(ALONE, torch.device("cpu"))
    assert finding.verdict == "fail" and "GLOO_SOCKET_IFNAME is ^lo" in finding.text


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=1"
    variables = dict(word.split("=") for word in words.split())
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
