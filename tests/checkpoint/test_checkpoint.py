"""Checkpoints: complete or not there, never read wrong, never running what a file asks for."""

import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dali_train.checkpoint.fingerprint import weights_digest
from dali_train.checkpoint.format import CheckpointError, RunValues, find_checkpoint, load_checkpoint, load_newest
from dali_train.checkpoint.recipe import (
    changes_between,
    is_branch,
    keep_digests_of_lost_files,
    recipe,
)
from dali_train.checkpoint.run_directory import (
    checkpoint_paths,
    resolve_checkpoint,
    saved_score,
    saved_top1,
    step_of,
)
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.trained_model import load_trained, write_model
from dali_train.config import Config, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.runtime.status import newest_step, read_status
from tests.conftest import Train, jpeg, photograph, write_shard
from tests.helpers import LONG, events, in_ranks

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


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
        writer.save(step, state(step), RunValues(scaler={"scale": step}))
        if top1 is not None:
            writer.record_top1(step, top1)
        writer.wait()


def same(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[section].keys() == b[section].keys()
        and all(torch.equal(a[section][name], b[section][name]) for name in a[section])
        for section in a
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Also by other programs: DCP by the names a model has, safetensors, sha256sum; "newest" is a stable name."""
    save(make_writer(tmp_path), 3, 4)
    loaded = load_checkpoint(tmp_path / "step-00000004")
    path = tmp_path / "newest"
    assert loaded.step == 4
    assert loaded.values.scaler == {"scale": 4}
    assert same(loaded.state, state(4))
    assert loaded.values.weights == {str(step): {"model": weights_digest(state(step)["model"])} for step in (3, 4)}
    assert loaded.state["optimizer"]["state.head.weight.exp_avg"].dtype == torch.float64
    weights = {"model": {"head.weight": torch.zeros(7, 5)}}
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for weight in (weights["model"]["head.weight"], load_file(path / TENSORS)["model.head.weight"]):
        assert torch.equal(weight, state(4)["model"]["head.weight"])
    assert path.resolve().name == "step-00000004"
    subprocess.run(["sha256sum", "--quiet", "-c", "manifest.json.sha256"], cwd=path, check=True)


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=2)
    for step, top1 in ((1, 0.2), (2, 0.7), (3, None), (4, 0.6), (5, 0.1), (6, None)):
        save(writer, step, top1=top1)
    assert names(tmp_path) == ["best", "newest", "step-00000002", "step-00000005", "step-00000006"]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    scored = make_writer(tmp_path / "scored", keep=1)  # by the negative loss, which is higher for a worse accuracy
    for step, top1, score in ((1, 0.2, -1.5), (2, 0.7, -2.5), (3, 0.1, -9.0)):
        save(scored, step)
        scored.record_top1(step, top1, score)
    assert names(tmp_path / "scored") == ["best", "newest", "step-00000001", "step-00000003"]
    assert (tmp_path / "scored" / "best").resolve().name == "step-00000001"
    several = make_writer(tmp_path / "several", keep=1, keep_best=2)
    for step, top1 in ((1, 0.5), (2, 0.7), (3, 0.6), (4, 0.1)):
        save(several, step, top1=top1)
    assert names(tmp_path / "several") == ["best", "newest", "step-00000002", "step-00000003", "step-00000004"]
    assert (tmp_path / "several" / "best").resolve().name == "step-00000002"
    writer.held.add("step-00000005")  # a mirror reads it
    save(writer, 7)
    assert (tmp_path / "step-00000005").exists()
    writer.held.clear()
    save(writer, 8)
    assert not (tmp_path / "step-00000005").exists()


def test_saving_waits_only_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    really_save = dcp.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert disk.wait(60)
        return really_save(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", slow)
    writer, live = make_writer(tmp_path), state(1)
    writer.save(1, live, RunValues())
    live["model"]["head.weight"].zero_()  # the next step changes the weights while the disk is still at it
    assert not (tmp_path / "step-00000001").exists()
    disk.set()
    writer.wait()
    assert same(load_checkpoint(tmp_path / "step-00000001").state, state(1))


def test_a_failed_save_is_an_error_at_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    writer = make_writer(directory)
    (directory / ".step-00000001.partial").write_text("in the way")
    writer.save(1, state(1), RunValues())
    with pytest.raises(CheckpointError, match=r"could not save a checkpoint in .*\.partial") as error:
        writer.save(2, state(2), RunValues())
    assert "MB are free" not in str(error.value) and load_newest(directory) == (None, [])


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
    path, complete = tmp_path / "step-00000002", tmp_path / "complete"
    path.rename(complete)
    rng = random.Random(how)
    hit: dict[str, int] = {}
    for number in range(100):
        shutil.copytree(complete, path)
        files = sorted(file for file in path.iterdir())
        # Every kind of file in turn: the tensors are most of the bytes, the others most of the trouble.
        file = damaged(path, [files[number % len(files)]] if number % 2 else files, rng, how)
        hit[file.name] = hit.get(file.name, 0) + 1
        with pytest.raises(CheckpointError, match="step-00000002"):
            load_checkpoint(path)
        found, (warning,) = load_newest(tmp_path)
        assert found is not None and same(found.state, state(1))
        assert "step-00000002" in warning and warning.endswith(f"resuming from {tmp_path / 'step-00000001'} instead")
        shutil.rmtree(path)
    assert set(hit) == {TENSORS, "manifest.json", "manifest.json.sha256"}, hit


def test_missing_files_and_nothing_complete(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1)
    for file in list((tmp_path / "step-00000001").iterdir()):
        file.unlink()
        with pytest.raises(
            CheckpointError, match=r"is complete: .*step-00000001.* choose another run.dir to start"
        ) as error:
            load_newest(tmp_path)
        assert "remove" not in str(error.value).lower(), "no message advises to delete checkpoints"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"format": 2}, "format is 2 and this version reads 1", id="a later format"),
        pytest.param({"format": None}, "format is None and this version reads 1", id="no format"),
        pytest.param({"files": {"/dev/zero": "0" * 64}}, "plain file name", id="an absolute file name"),
        pytest.param({"files": {"../elsewhere": "0" * 64}}, "plain file name", id="a name that leads out"),
        pytest.param({"files": {"fifo": "0" * 64}}, "fifo .*is not a regular file", id="a FIFO"),
        pytest.param({"files": {"link": "0" * 64}}, "link .*is not a regular file", id="a link to a device"),
        pytest.param(
            {"files": {"manifest.json": 7}}, "json is a whole number instead of text", id="a number for a checksum"
        ),
        pytest.param({"files": []}, "files is an array instead of an object", id="a list of files"),
        pytest.param({"files": {}}, "files has 0 names", id="no files"),
        pytest.param({"step": "1"}, "step is text instead of a whole number", id="a step as text"),
        pytest.param({"step": True}, "step is true or false", id="a step as bool"),
        pytest.param({"step": 10**18}, "step is 1000", id="a step of 19 digits"),
        pytest.param({"step": 10**400}, "the number 1000", id="a step of 401 digits"),
        pytest.param({"values": 3}, "values is a whole number", id="values as a number"),
        pytest.param(
            {"values": {"recipe": {"a": [[[]]] * 3 + [eval("[" * 40 + "]" * 40)]}}}, "levels deep", id="a deep recipe"
        ),
        pytest.param({"values": {"class_names": [1, 2]}}, "values: class_names is ", id="class names as numbers"),
        pytest.param({"values": {"optimizer": []}}, "values: optimizer is ", id="optimizer as a list"),
        pytest.param(
            {"values": {"optimizer": {"class": "Lamb", "groups": [{"step": "x"}], "numbers": {}}}},
            "values: groups is ",
            id="a group with text",
        ),
        pytest.param({"values": {"scaler": [1]}}, "values: scaler is ", id="scaler as a list"),
        pytest.param({"values": {"recipe": None}}, "values: recipe is ", id="no recipe"),
        pytest.param({"values": {"dropout": "layer"}}, "values: dropout is ", id="dropout of another kind"),
        *(
            pytest.param(text, r"manifest\.json cannot be read as the manifest", id=name)
            for name, text in {
                "a list": b"[]",
                "null": b"null",
                "100,000 brackets": b"[" * 100_000,
                "no UTF-8": b"\xff",
                "an empty object": b"{}",
            }.items()
        ),
    ],
)
def test_a_crafted_manifest_is_one_sentence(tmp_path: Path, fields: dict[str, Any] | bytes, message: str) -> None:
    """Its checksum fits, as whoever crafts a checkpoint would see to."""
    save(make_writer(tmp_path), 1)
    path = tmp_path / "step-00000001"
    os.mkfifo(path / "fifo")
    (path / "link").symlink_to("/dev/zero")
    manifest = path / "manifest.json"
    text = fields if isinstance(fields, bytes) else json.dumps(json.loads(manifest.read_text()) | fields).encode()
    manifest.write_bytes(text)
    (path / "manifest.json.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("score", ["", "[]", '{"top1": "good"}', '{"top1": NaN}', '{"top1": 1e999}', '{"top1": {}}'])
def test_a_crafted_score_is_none(tmp_path: Path, score: str) -> None:
    save(make_writer(tmp_path), 1, top1=0.5)
    (tmp_path / "step-00000001" / "evaluation.json").write_text(score)
    assert saved_top1(tmp_path / "step-00000001") is None and saved_score(tmp_path / "step-00000001") is None


def test_what_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the disk or Ctrl-C: the checkpoint is neither skipped, set aside nor removed."""
    writer = make_writer(tmp_path, keep=1)
    save(writer, 1, top1=0.9)
    save(writer, 2, top1=0.1)
    for name in (TENSORS, "manifest.json", "manifest.json.sha256"):
        file, kept = tmp_path / "step-00000002" / name, tmp_path / "kept"
        file.rename(kept)
        file.symlink_to("/proc/self/mem")  # a regular file, whose first bytes are an I/O error
        with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read .*Input/output error"):
            load_newest(tmp_path)
        kept.rename(file)
    score, kept = tmp_path / "step-00000001" / "evaluation.json", tmp_path / "kept"
    score.rename(kept)
    score.symlink_to("/proc/self/mem")
    save(writer, 3)
    assert {"step-00000001", "step-00000002", "step-00000003"} <= {*names(tmp_path)}
    assert "no checkpoint is removed, since the best one is not known: " in caplog.text
    kept.rename(score)

    class Interrupted(dcp.HuggingFaceStorageReader):
        def read_data(self, *_: Any) -> Any:
            raise KeyboardInterrupt  # which DCP wraps in an error of its own

    monkeypatch.setattr(dcp, "HuggingFaceStorageReader", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_newest(tmp_path)


def test_tensor_files_of_others_are_not_read(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1)
    path = tmp_path / "step-00000001"
    shutil.copy(path / TENSORS, path / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"shard-00009.* does not belong to this checkpoint"):
        load_checkpoint(path)


def save_shards(_rank: int, directory: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = state(1)["model"]["head.weight"]
    tensors = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "all": whole,
    }
    writer = CheckpointWriter(directory / "checkpoints", dist.group.WORLD, keep=2)
    writer.prepare(0)
    writer.save(1, {"model": tensors}, RunValues())
    writer.wait()
    dist.destroy_process_group()


def test_shards_are_saved_by_their_ranks_and_read_as_one(tmp_path: Path) -> None:
    in_ranks(2, save_shards, tmp_path)
    weights = load_checkpoint(tmp_path / "checkpoints" / "step-00000001").state["model"]
    assert weights.keys() == {"rows", "columns", "all"}
    assert all(torch.equal(weight, state(1)["model"]["head.weight"]) for weight in weights.values())


def test_foreign_things_are_left_alone(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "checkpoints"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    save(make_writer(directory), 1, 2)
    shutil.copytree(directory / "step-00000002", directory / "step-00000002.bak")
    (directory / "step-best").mkdir()
    (directory / ".step-mine.partial").mkdir()
    (directory / "step-00000001" / "notes.txt").write_text("mine")
    for name in ("step-00000003", "step-00000009", ".step-00000004.partial", ".step-00000001.removed"):
        (directory / name).symlink_to(elsewhere)
    (directory / ".step-00000005.partial").write_text("mine")
    for name in ("newest", "best"):
        (directory / name).unlink(missing_ok=True)
        shutil.copytree(directory / "step-00000001", directory / name)
    found, warnings = load_newest(directory)
    assert found is not None and found.step == 2 and not warnings
    writer = make_writer(directory, start_step=2, keep=1)
    save(writer, 3, 4, 5, top1=0.5)
    assert newest_step(tmp_path) == 5
    assert load_checkpoint(directory / "newest").step == 5 and (directory / "best").is_symlink()
    assert (elsewhere / "precious").read_text() == "mine"
    assert (directory / "set-aside-1-step-00000001" / "notes.txt").read_text() == "mine"
    assert names(directory) == [
        ".step-mine.partial",
        "best",
        "newest",
        "set-aside-1-.step-00000001.removed",
        "set-aside-1-.step-00000004.partial",
        "set-aside-1-.step-00000005.partial",
        "set-aside-1-best",
        "set-aside-1-newest",
        "set-aside-1-step-00000001",
        "set-aside-1-step-00000003",
        "step-00000002.bak",
        "step-00000005",
        "step-00000009",
        "step-best",
    ]


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path) -> None:
    save(make_writer(tmp_path), 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")
    found, (warning,) = load_newest(tmp_path)
    assert found is not None and found.step == 1 and "checkpoint of step 2 under another name" in warning
    shutil.copytree(tmp_path / "step-00000009", tmp_path / "my-favourite")
    assert load_checkpoint(tmp_path / "my-favourite").step == 2


def test_checkpoints_that_cannot_be_seen_are_not_none(train: Train, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    checkpoints.write_text("")
    with pytest.raises(ConfigError, match="cannot be listed"):
        load_newest(checkpoints)
    checkpoints.unlink()
    checkpoints.symlink_to(tmp_path / "not mounted")
    output = train("run", status=2, ranks=2)
    assert "which does not exist: make it available" in output and "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "config.json").exists()


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    save(writer, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))  # the largest file that this process may write
    try:
        writer.save(2, state(2), RunValues())
        with pytest.raises(
            CheckpointError, match=r"File too large.* needs 0.0 MB and [\d,.]+ MB are free.* same command again"
        ):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["newest", "step-00000001"], "what was half written is gone"
    save(make_writer(tmp_path, start_step=1), 2)
    assert load_newest(tmp_path)[0] is not None


def test_paths_that_are_not_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(make_writer(run / "checkpoints"), 1)
    for path, message in (
        (run, "did you mean .*run/checkpoints/newest"),
        (run / "checkpoints", "did you mean .*run/checkpoints/newest"),
        (run / "checkpoints" / "step-00000002", "step-00000002: no such directory"),
        (run / "checkpoints" / "newest" / "manifest.json", "is not a directory"),
    ):
        for read in (
            load_checkpoint,
            lambda path: resolve_checkpoint(run, str(path)),
            lambda path: find_checkpoint(str(path), run),
        ):
            with pytest.raises(ConfigError, match=message):
                read(path)
        with pytest.raises(ConfigError, match=message):  # a typing mistake counts although there are checkpoints
            find_checkpoint(str(path), run / "checkpoints")
    step = run / "checkpoints" / "step-00000001"
    assert [resolve_checkpoint(run, which) for which in ("newest", "step-00000001", str(step))] == [step] * 3
    with pytest.raises(ConfigError, match="has no best checkpoint: no evaluation was saved"):
        resolve_checkpoint(run, "best")
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        resolve_checkpoint(tmp_path / "nowhere", "newest")


def test_equal_weights_are_equal_files(plain_run: Path, tmp_path: Path) -> None:
    """safetensors writes its metadata in an order of chance."""
    run = shutil.copytree(plain_run, tmp_path / "run")
    (run / "model.safetensors").unlink()
    files = [write_model(run, step_of(checkpoint_paths(run / "checkpoints")[-1])).read_bytes() for _ in range(4)]
    assert {*files} == {(plain_run / "model.safetensors").read_bytes()}
    assert load_file(run / "model.safetensors").keys() == load_file(plain_run / "model.safetensors").keys()


def test_another_recipe_is_refused_unless_told(train: Train, plain_run: Path, tmp_path: Path) -> None:
    """And the weights of the start are not needed after it."""
    weights = shutil.copy(plain_run / "model.safetensors", tmp_path / "weights.safetensors")
    train("run", "--run.max_steps", "2", "--model.weights", str(weights))
    weights.unlink()
    changed = ("--model.weights", str(weights), "--optimizer.lr", "0.02", "--batch.micro_batch", "8")
    output = train("run", *changed, status=2)
    assert "batch.micro_batch 4 -> 8; optimizer.lr 0.01 -> 0.02" in output
    assert "run.accept_changed_recipe" in output
    output = train("run", *changed, "--run.max_steps", "3", "--run.accept_changed_recipe", "true")
    assert "resuming with the change" in output and "resuming from step 2" in output
    # What is computed is the same, whoever computes it and wherever it is kept.
    free = ["--data.num_threads", "2", "--data.read_ahead_mb", "0", "--data.block_images", "7"]
    train("run", *changed, *free, "--run.max_steps", "4", ranks=2)


WEIGHTS = [  # setting, its value, the file that is exchanged
    ("model.weights", "DIR/weights.safetensors", "weights.safetensors"),
    ("model.weights", "DIR/weights.pth", "weights.pth"),
    ("model.weights", "DIR/run", "run/checkpoints/step-00000001/manifest.json"),
    ("model.weights", "DIR/run/checkpoints/step-00000001", "run/checkpoints/step-00000001/manifest.json"),
    ("model.weights", "local-dir:DIR/hub", "hub/model.safetensors"),
    ("loss.teacher", "local-dir:DIR/hub", "hub/model.safetensors"),
    ("loss.teacher_weights", "DIR/weights.safetensors", "weights.safetensors"),
]
SHARDS = {"train/train-00000-of-00003": range(0, 50, 3), "validation/validation-00000-of-00001": range(13)}  # images


def test_each_file_that_decides_a_result_is_noticed(tiny_config: Path, dataset: Path, tmp_path: Path) -> None:
    """Exchanged in its place, it is another recipe, and lost it is not; what `dataset.json` does not fit is no
    dataset. A resumed checkpoint has digests of its own, see `test_damage_is_never_loaded`."""
    root = shutil.copytree(dataset, tmp_path / "data")
    save(make_writer(tmp_path / "run" / "checkpoints"), 1)
    (tmp_path / "hub").mkdir()
    config = load_config(tiny_config).replace({"loss.distillation": "hard", "loss.teacher": "test_resnet"})

    for setting, value, name in WEIGHTS:
        changed, file = config.replace({setting: value.replace("DIR", str(tmp_path))}), tmp_path / name
        found = []
        for _ in range(2):
            file.write_bytes((file.read_bytes() if file.exists() else b"") + b"other")
            found.append(recipe(changed, Manifest.read(root)))
        (change,) = changes_between(*found)
        assert re.fullmatch(rf"{setting} content (\w{{16}}) -> content (?!\1)\w{{16}}", change)
        place = (tmp_path / value.rpartition("DIR/")[2]).rename(tmp_path / "elsewhere")
        lost = recipe(changed, Manifest.read(root))
        keep_digests_of_lost_files(found[-1], lost)
        assert lost == found[-1]
        place.rename(tmp_path / value.rpartition("DIR/")[2])
    for name, numbers in SHARDS.items():
        before = recipe(config, Manifest.read(root))
        records = [(jpeg(photograph(100 + i, 30 + 7 * (i % 9), 80 - 5 * (i % 11))), 1 + i % 5) for i in numbers]
        write_shard(root / name, records)
        build_index(root)
        (change,) = changes_between(before, recipe(config, Manifest.read(root)))
        assert change.startswith("dataset 50 images, content ")
    manifest = json.loads((root / "dataset.json").read_text())
    manifest["class_names"].reverse()
    (root / "dataset.json").write_text(json.dumps(manifest))
    permuted = recipe(config, Manifest.read(root))
    (change,) = changes_between(recipe(config, Manifest.read(dataset)) | {"dataset": permuted["dataset"]}, permuted)
    assert re.fullmatch(r"class_names class 0, .* \(5 names, .*\w{16}\) -> class 4, class 3, .*\w{16}\)", change)
    for file in (root / "index" / "train.npy", root / min(SHARDS)):
        content = file.read_bytes()
        file.write_bytes(content[:-40] + bytes(40) + (b"" if file.suffix else b"more"))
        with pytest.raises(DatasetError, match=rf"{file} has (CRC32C|\d+ bytes)"):
            Split(root, "train")
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("branch", "last_step"),  # the last step at which a run may branch off
    [
        ({"schedule.milestones": (2.0, 5.0, 7.0)}, 12),
        ({"schedule.milestones": (2.0, 4.0, 6.0)}, 8),
        ({"run.epochs": 30}, 20),
        ({"run.epochs": 30, "ema.decay": 0.9, "ema.power": 1.0}, None),
        ({"optimizer.lr": 0.02}, None),
        ({"schedule.name": "wsd", "schedule.milestones": (), "schedule.decay_epochs": 3.0}, 4),
    ],
)
def test_a_run_branches_off_where_no_rate_before_differs(
    branch: dict[str, Any], last_step: int | None, config: Config, dataset: Path
) -> None:
    """Epochs of two steps, and of a checkpoint as JSON has it."""
    multistep = {"schedule.name": "multistep", "schedule.milestones": (2.0, 5.0, 6.0), "schedule.warmup_epochs": 0}
    trunk = config.replace({"run.epochs": 20, **multistep, **{name: branch[name] for name in branch if "ema" in name}})
    manifest = Manifest.read(dataset)
    saved = json.loads(json.dumps(recipe(trunk, manifest)))
    other = trunk.replace(branch)
    may = [is_branch(saved, recipe(other, manifest), other, step=step, num_images=64) for step in range(21)]
    assert may == [last_step is not None and step <= last_step for step in range(21)]


def test_begins_at_another_runs_checkpoint_only_once(train: Train, plain_run: Path, tmp_path: Path) -> None:
    resume = ("--run.resume", str(plain_run / "checkpoints" / "step-00000002"))
    assert "resuming from step 2" in train("second", *resume, "--run.max_steps", "3")
    again = train("second", *resume, "--run.max_steps", "5")
    assert "resuming from step 3" in again
    assert f"run.resume {resume[1]} is not used, because this run has checkpoints: resuming from its newest" in again
    # Its own earlier checkpoint is gone back to, however it is spelled, and what came after it is set aside.
    back = tmp_path / "second" / ".." / "second" / "checkpoints" / "step-00000003"
    assert "resuming from step 3" in train("second", "--run.resume", str(back), "--run.max_steps", "4")
    accuracies = [event["top1"] for event in events(tmp_path / "second", "eval")]
    assert (
        json.loads((tmp_path / "second" / "epoch_accuracies.json").read_text()) == accuracies and len(accuracies) == 2
    )
    assert (tmp_path / "second" / "checkpoints" / "set-aside-1-step-00000005").is_dir()
    assert (tmp_path / "second" / "checkpoints" / "newest").resolve().name == "step-00000004"
    output = train("third", "--run.resume", str(tmp_path / "nowhere"), status=2)
    assert f"{tmp_path / 'nowhere'}: no such directory" in output and "Traceback" not in output
    output = train("second", "--run.resume", "never", status=2)
    assert "run.resume is never, but" in output


def test_the_best_accuracy_outlives_its_checkpoint(train: Train, plain_run: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_run, tmp_path / "run", symlinks=True)
    for path in checkpoint_paths(tmp_path / "run" / "checkpoints")[:-1]:
        shutil.rmtree(path)
    train("run")
    status, accuracies = read_status(tmp_path / "run"), [event["top1"] for event in events(plain_run, "eval")]
    assert status is not None and status.best_top1 == max(accuracies) > accuracies[-1]


def test_all_ranks_fall_back_together(train: Train, tmp_path: Path) -> None:
    """Of checkpoints that were saved because the last one was old."""
    options = (*LONG, "--run.checkpoint_every_seconds", "0.001", "--run.max_steps", "3")
    train("run", *options, ranks=2)
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    damaged(newest, sorted(newest.glob("*.safetensors")), random.Random(0), "flipped")
    with pytest.raises(CheckpointError, match=f"{newest}/shard-.* choose another one with --checkpoint"):
        load_trained(tmp_path / "run", "newest")  # as eval, predict and export do
    output = train("run", *options, ranks=2)
    assert f"{newest}/shard-" in output and "is damaged: its SHA-256" in output
    assert f"resuming from {newest.with_name('step-00000002')} instead" in output
    assert "resuming from step 2" in output
    assert events(tmp_path / "run", "start")[-1]["lost_steps"] == 1


def test_a_changed_recipe_takes_over_what_fits(train: Train, plain_run: Path, tmp_path: Path) -> None:
    accept = ("--run.accept_changed_recipe", "true")
    resume = ("--run.resume", str(plain_run / "checkpoints" / "step-00000002"))
    train("run", *accept, *resume, "--run.max_steps", "3", "--precision.dtype", "fp16")
    train("run", *accept, "--run.max_steps", "4", "--optimizer.exclude_vectors", "false")
    train("run", *accept, "--run.max_steps", "5", "--optimizer.name", "adamw")
    train("run", *accept, "--run.max_steps", "6", "--optimizer.name", "adamw", "--precision.dtype", "fp64")
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "newest").values.optimizer.kind == "AdamW"
    for words, asked in (
        (("--run.max_steps", "4"), "run.max_steps 4 ends the run after 4 steps"),
        (("--run.epochs", "1"), "run.epochs 1 of 50 images with batch.global_batch 32 ends the run after 2 steps"),
        (("--batch.global_batch", "64"), "with batch.global_batch 64 ends the run after 4 steps"),
    ):
        output = train("run", *accept, *words, status=2)
        assert f"{asked}, but its newest checkpoint is of step 6" in output and "Traceback" not in output
    output = train("run", *accept, "--model.kwargs.embed_dim", "16", status=2)
    assert "do not fit the model of this config: blocks.0.attn.proj.bias [32] there, [16] here; " in output
    assert "Traceback" not in output
