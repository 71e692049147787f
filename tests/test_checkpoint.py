"""Checkpoints: whole or not there, never read wrong, never running what a file asks for."""

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dali_train import checkpoint, snapshot
from dali_train.checkpoint import CheckpointError, CheckpointWriter
from dali_train.config import load_config
from dali_train.data.index import Split
from dali_train.data.indexing import build_index

from .conftest import Train, final_weights, jpeg, photograph, relative_differences, write_shard
from .test_exactness import FLOAT32_BOUND, samples


def make_writer(directory: Path, *, keep: int = 100, keep_best: int = 1, start_step: int = 0) -> CheckpointWriter:
    writer = CheckpointWriter(directory, None, keep=keep, keep_best=keep_best)
    writer.prepare(start_step)
    return writer


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    model = {"head.weight": torch.randn(7, 5, generator=generator), "bn.num_batches_tracked": torch.tensor(step)}
    return {"model": model, "optimizer": {"state.head.weight.exp_avg": torch.randn(7, 5, generator=generator).double()}}


def save(writer: CheckpointWriter, *steps: int, top1: float | None = None) -> None:
    for step in steps:
        writer.save(step, state(step), {"group_steps": [step, None], "scaler": {}}, top1)
        writer.wait()


def same(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[section].keys() == b[section].keys() and all(torch.equal(a[section][name], b[section][name]) for name in a[section])
        for section in a
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 3)
    loaded = checkpoint.load(tmp_path / "step-00000003")
    assert loaded.step == 3
    assert loaded.values == {"group_steps": [3, None], "scaler": {}}
    assert same(loaded.state, state(3))
    assert loaded.state["optimizer"]["state.head.weight.exp_avg"].dtype == torch.float64


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    """DCP's own loader, by the names a model has; sha256sum; and a stable name for the newest."""
    save(make_writer(tmp_path), 3, 4)
    weights = {"model": {"head.weight": torch.zeros(7, 5)}}
    dcp.load(weights, checkpoint_id=tmp_path / "newest", no_dist=True)
    assert torch.equal(weights["model"]["head.weight"], state(4)["model"]["head.weight"])
    path = (tmp_path / "newest").resolve()
    assert path.name == "step-00000004"
    subprocess.run(["sha256sum", "--quiet", "-c", "manifest.json.sha256"], cwd=path, check=True)


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=2)
    for step, top1 in ((1, 0.2), (2, 0.7), (3, None), (4, 0.6), (5, 0.1), (6, None)):
        save(writer, step, top1=top1)
    assert names(tmp_path) == ["best", "newest", "step-00000002", "step-00000005", "step-00000006"]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert CheckpointWriter(tmp_path, None, keep=2, keep_best=1).prepare(6) == 0.7


def test_saving_waits_only_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    really_save = dcp.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert disk.wait(60)
        return really_save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", slow)
    writer, live = make_writer(tmp_path), state(1)
    writer.save(1, live, {}, None)
    live["model"]["head.weight"].zero_()  # the next step changes the weights while the disk is still at it
    assert not (tmp_path / "step-00000001").exists()
    disk.set()
    writer.wait()
    assert same(checkpoint.load(tmp_path / "step-00000001").state, state(1))


def test_a_failed_save_is_an_error_at_the_next(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    (tmp_path / ".step-00000001.partial").write_text("in the way")
    writer.save(1, state(1), {}, None)
    with pytest.raises(CheckpointError, match=r"could not save a checkpoint in .*\.partial"):
        writer.save(2, state(2), {}, None)
    assert checkpoint.newest(tmp_path) == (None, [])


def test_what_a_kill_left_half_done_is_removed_and_the_abandoned_set_aside(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1, 2, 3)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000004.partial")
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.removed")
    writer = make_writer(tmp_path, start_step=2)
    assert names(tmp_path) == ["newest", "set-aside-1-step-00000003", "step-00000002"]
    save(writer, 3)
    make_writer(tmp_path, start_step=2)
    assert "set-aside-2-step-00000003" in names(tmp_path)


def damaged(path: Path, files: list[Path], rng: random.Random, how: str) -> Path:
    """Damage one of `files` of a checkpoint at a random place, larger files more often; gives the damaged file."""
    file = rng.choices(files, weights=[file.stat().st_size for file in files])[0]
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content))
    if how == "truncated":
        del content[place:]
    else:
        content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_damage_is_never_loaded(tmp_path: Path, how: str) -> None:
    save(make_writer(tmp_path), 1, 2)
    path, whole = tmp_path / "step-00000002", tmp_path / "whole"
    path.rename(whole)
    rng = random.Random(how)
    hit: dict[str, int] = {}
    for number in range(100):
        shutil.copytree(whole, path)
        files = sorted(file for file in path.iterdir())
        # Every kind of file in turn: the tensors are most of the bytes, the others most of the trouble.
        file = damaged(path, [files[number % len(files)]] if number % 2 else files, rng, how)
        hit[file.name] = hit.get(file.name, 0) + 1
        with pytest.raises(CheckpointError, match="step-00000002"):
            checkpoint.load(path)
        found, (warning,) = checkpoint.newest(tmp_path)
        assert found is not None and same(found.state, state(1))
        assert "step-00000002" in warning and warning.endswith(f"going on from {tmp_path / 'step-00000001'} instead")
        shutil.rmtree(path)
    assert set(hit) == {".metadata", "__0_0.distcp", "manifest.json", "manifest.json.sha256"}, hit


def test_missing_files_and_nothing_whole(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1)
    for file in list((tmp_path / "step-00000001").iterdir()):
        file.unlink()
        with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*step-00000001.* to start at step 0"):
            checkpoint.newest(tmp_path)


def rewrite_metadata(path: Path, content: bytes) -> None:
    """Replace DCP's metadata and make all checksums fit, as whoever crafts a checkpoint would."""
    (path / ".metadata").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = hashlib.sha256(content).hexdigest()
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.json.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_crafted_checkpoint_runs_nothing(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1)
    path, mark = tmp_path / "step-00000001", tmp_path / "it ran"
    bomb = pickle.dumps(Bomb(mark))
    rewrite_metadata(path, bomb)
    with pytest.raises(CheckpointError, match=r"asks for posix.mkdir.*nothing was run"):
        checkpoint.load(path)
    assert not mark.exists()
    # The same file through the unpickler that DCP would use: the test's bomb is a real one.
    pickle.loads(bomb)
    assert mark.exists()


def test_only_tensors_are_read_from_dcp_files(tmp_path: Path) -> None:
    """DCP unpickles other objects without any restriction."""
    save(make_writer(tmp_path), 1)
    path, mark = tmp_path / "step-00000001", tmp_path / "it ran"
    dcp.save({"model": {"bomb": Bomb(mark)}}, checkpoint_id=tmp_path / "crafted", no_dist=True)
    metadata = pickle.loads((tmp_path / "crafted" / ".metadata").read_bytes())
    metadata.storage_meta = None
    rewrite_metadata(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"model.bomb is no tensor"):
        checkpoint.load(path)
    assert not mark.exists()
    metadata.state_dict_metadata.clear()
    for place in metadata.storage_data.values():
        object.__setattr__(place, "relative_path", "../../elsewhere")
    rewrite_metadata(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names \.\./\.\./elsewhere, which manifest.json does not"):
        checkpoint.load(path)


def test_another_recipe_is_refused_unless_told(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "2")
    changed = ("--optimizer.lr", "0.02", "--batch.micro_batch", "8")
    output = train("run", *changed, status=2)
    assert "batch.micro_batch 4 -> 8; optimizer.lr 0.01 -> 0.02" in output
    assert "set run.accept_changed_recipe true" in output
    output = train("run", *changed, "--run.max_steps", "3", "--run.accept_changed_recipe", "true")
    assert "going on with the change" in output and "going on from step 2" in output
    # What is computed is the same, whoever computes it and wherever it is kept.
    free = ("--parallel.bucket_mb", "1", "--data.num_threads", "2", "--data.read_ahead_mb", "0", "--data.block_images", "7")
    train("run", *changed, *free, ranks=2)


def test_blocks_belong_to_the_recipe_of_a_block_order_alone(tiny_config: Path, dataset: Path) -> None:
    config, split = load_config(tiny_config), Split(dataset, "train")
    block = snapshot.recipe(replace(config, data=replace(config.data, shuffle="block")), split)
    assert (block["data.block_images"], block["data.window_blocks"]) == (128, 8)
    assert block.keys() - snapshot.recipe(config, split).keys() == {"data.block_images", "data.window_blocks"}


def test_other_data_is_refused(train: Train, tmp_path: Path, dataset: Path) -> None:
    train("run", "--run.max_steps", "2")
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    write_shard(other / "train" / "train-00000-of-00003", [(jpeg(photograph(1, 40, 40)), 1)])
    build_index(other)
    output = train("run", "--data.root", str(other), status=2)
    assert "dataset 50 images, labels and sizes" in output and "-> 34 images" in output


def test_a_run_may_change_its_number_of_ranks(train: Train, tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        train(f"on-{ranks}", ranks=ranks)
    train("moving", "--run.max_steps", "2", ranks=4)
    assert "going on from step 2" in train("moving", "--run.max_steps", "4", ranks=1)
    assert "going on from step 4" in train("moving", ranks=2)
    reference = final_weights(tmp_path / "on-1")
    for name in ("on-2", "on-4", "moving"):
        assert samples(tmp_path / name) == samples(tmp_path / "on-1")
        differences = relative_differences(reference, final_weights(tmp_path / name))
        assert max(differences.values()) < FLOAT32_BOUND, differences


def test_begins_at_another_runs_checkpoint_only_once(train: Train, tmp_path: Path) -> None:
    train("first", "--run.max_steps", "2")
    resume = ("--run.resume", str(tmp_path / "first" / "checkpoints" / "newest"))
    assert "going on from step 2" in train("second", *resume, "--run.max_steps", "3")
    assert "going on from step 3" in train("second", *resume, "--run.max_steps", "5")
    # Its own earlier checkpoint is gone back to, and what came after it is set aside.
    back = tmp_path / "second" / "checkpoints" / "step-00000003"
    assert "going on from step 3" in train("second", "--run.resume", str(back), "--run.max_steps", "4")
    assert (tmp_path / "second" / "checkpoints" / "set-aside-1-step-00000005").is_dir()
    assert (tmp_path / "second" / "checkpoints" / "newest").resolve().name == "step-00000004"
    output = train("third", "--run.resume", str(tmp_path / "nowhere"), status=1)
    assert f"{tmp_path / 'nowhere'} is not a whole checkpoint" in output and "Traceback" not in output
    output = train("second", "--run.resume", "never", status=2)
    assert "run.resume is never, but" in output


def test_all_ranks_fall_back_together(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "4", "--run.checkpoint_every_steps", "2", ranks=2)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    damaged(newest, sorted(newest.glob("*.distcp")), random.Random(0), "flipped")
    output = train("run", ranks=2)
    assert f"{newest}/__" in output and "is damaged: its SHA-256" in output
    assert f"going on from {newest.with_name('step-00000002')} instead" in output
    assert "going on from step 2" in output
