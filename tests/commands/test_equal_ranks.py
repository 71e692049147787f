"""Ranks with different recipes, datasets, weights or code end before the first step, and say what differs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import timm
import torch
from nvidia import dali
from nvidia.dali import backend_impl

import dali_train
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.config import Config, load_config
from dali_train.errors import ConfigError
from dali_train.hooks import Hook
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.process_group import host_group, process_group
from tests.helpers import in_ranks
from tests.ranks import POOL, command

CPU = torch.device("cpu")
DIFFERENT: dict[str, Any] = {
    "optimizer.lr": 0.2,
    "data.seed": 7,
    "batch.micro_batch": 8,
    "mixup.alpha": 0.3,
    "data.crop_area": (0.5, 1.0),
    "loss.label_smoothing": 0.25,
    "precision.dtype": "bf16",
    "model.kwargs.drop_path_rate": 0.3,
    "parallel.pipeline": 2,
    "parallel.tensor.size": 2,
    "data.local_copy": "/tmp/copy",
    "run.mirror": "s3://bucket/run",
    "run.eval_every_epochs": None,
    "run.accept_changed_recipe": True,
    "hooks.log_every_steps": 3,
    "hooks.user": (Hook,),
}


def compare(rank: int, path: Path, directory: Path) -> None:
    """Give rank 1 other values, one after the other."""
    with process_group(discover(LaunchOptions()), CPU) as launch, pytest.MonkeyPatch.context() as patch:
        config = load_config(path)
        group = host_group(launch)

        def fault(config: Config) -> str:
            try:
                require_equal_ranks(config, CPU, group)
            except ConfigError as error:
                return str(error)
            return ""

        def fault_of(changes: dict[str, Any]) -> str:
            return fault(config.replace(changes if rank == 1 else {}))

        where = {"data.root": str(directory / "copy"), "run.dir": "here", "data.num_threads": 2, "run.max_seconds": 9.0}
        assert fault_of(where) == "", "where the files are, and how fast the node is"
        for name, value in DIFFERENT.items():
            assert f"rank 1 on {os.uname().nodename}: {name} is " in fault_of({name: value}), name
        for other, part in (("permuted", "classes"), ("rewritten", "dataset")):
            assert f": the {part} is " in fault_of({"data.root": str(directory / other)})
        assert "files is" in fault_of({"data.root": str(directory / "missing")})
        assert "model.weights is" in fault(config.replace({"model.weights": str(directory / f"{rank}.pth")}))
        assert "the config file is" in fault(config.from_files({Path("config.py"): bytes(rank + 1)}))
        patch.setattr(dali_train, "__version__", f"0.{rank}")
        assert 'dali_train is "0.1, code' in fault_of({})
        for name, library in {"torch": torch, "timm": timm, "DALI": dali, "Pillow": PIL, "NumPy": np}.items():
            patch.setattr(library, "__version__", f"9.{rank}")
            assert f'{name} is "9.1", rank 0 has "9.0"' in fault_of({})
        patch.setattr(backend_impl, "GetNvimgcodecVersion", lambda: 800 + rank)
        assert 'nvImageCodec is "0.8.1", rank 0 has "0.8.0"' in fault_of({})


def test_what_must_be_equal(tiny_config: Path, dataset: Path, tmp_path: Path) -> None:
    for name in ("copy", "permuted", "rewritten"):
        shutil.copytree(dataset, tmp_path / name)
    manifest = json.loads((dataset / "dataset.json").read_text())
    names = manifest["class_names"]
    (tmp_path / "permuted" / "dataset.json").write_text(json.dumps({**manifest, "class_names": names[::-1]}))
    manifest["splits"]["validation"]["shards"][0]["crc32c"] = "00000000"
    (tmp_path / "rewritten" / "dataset.json").write_text(json.dumps(manifest))
    for rank in range(2):
        (tmp_path / f"{rank}.pth").write_bytes(bytes(rank + 1))
    in_ranks(2, compare, tiny_config, tmp_path)


def with_other_rate_on_rank_1(words: list[str]) -> int:
    return command([*words, *(["--optimizer.lr", "0.2"] if os.environ["RANK"] == "1" else [])])


def test_commands_compare_before_they_begin(tiny_config: Path, plain_run: Path, tmp_path: Path) -> None:
    """All ranks end, one of them says why, and nothing was written."""
    words = ["--config", str(tiny_config), "--run.dir", str(tmp_path / "run")]
    newest = str(plain_run / "checkpoints" / "newest")
    for name, more, status in (("train", [], 2), ("eval", ["--checkpoint", newest], 2), ("doctor", [], 1)):
        log = tmp_path / f"{name}.log"
        statuses = POOL.run(2, with_other_rate_on_rank_1, [name, *words, *more], log=log)
        assert statuses == [status, status], log.read_text()
        assert log.read_text().count(": optimizer.lr is 0.2, rank 0 has ") == 1, log.read_text()
    assert not (tmp_path / "run").exists()
