"""Images that are read where they lie give the run of the converted dataset, or an error that names the file."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tfrecord import writer

from dali_train.cli import main
from dali_train.config import Config
from dali_train.data.convert.image import RawImage
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest, fetched_metadata
from dali_train.data.dataset.storage import open_shards
from dali_train.data.loading.pipelines import Batch
from dali_train.errors import DatasetError
from dali_train.extras.indexing import in_place as index_in_place
from dali_train.runtime import object_store
from dali_train.runtime.object_store import Bucket
from tests.conftest import REPOSITORY, StartTraining, Train, encoded, photograph
from tests.convert.files import files_of, small_photograph, write_mds, write_tar
from tests.helpers import extended, first_batches, kill_after_step_4, losses, state_difference
from tests.s3_server import S3Server

CLASSES = ("ant", "bee", "cat")
PER_CLASS = {"train": 20, "val": 5}
FORMS = ("folder", "tars", "mds")
Sample = tuple[str, bytes, int]  # class and name, image, label


def data(*words: object, status: int = 0) -> None:
    assert main(["data", *map(str, words)]) == status


def write_tars(directory: Path, samples: list[Sample], num_tars: int, split: str) -> None:
    """The first sample of each is corrected at its end, as `tar -r` does it."""
    for number in range(num_tars):
        part = samples[number * len(samples) // num_tars : (number + 1) * len(samples) // num_tars]
        members = [
            (f"{key}.{ending}", content)
            for key, image, label in part
            for ending, content in (("cls", str(label).encode()), ("jpg", image))
        ]
        wrong = [(name, b"9") for name, _ in members[:2]]
        write_tar(directory / f"{split}-{number}.tar", [*wrong, *members[2:], *members[:2]])


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """75 images in class folders, tars and MDS of the same order; FORM.index of each, and what `convert` makes of the
    folders. Each index has its source by a relative path, so that the directory can be copied."""
    root, seed = tmp_path_factory.mktemp("forms"), 0
    for split, count in PER_CLASS.items():
        samples = []
        for label, name in enumerate(CLASSES):
            (root / "folder" / split / name).mkdir(parents=True)
            for number in range(count):
                image, seed = small_photograph(seed), seed + 1
                (root / "folder" / split / name / f"{number:03d}.jpg").write_bytes(image)
                samples.append((f"{name}/{number:03d}", image, label))
        write_tars(root / "tars", samples, 2, split)
        rows = [(image, struct.pack("<q", label)) for _, image, label in samples]
        write_mds(root / "mds" / split, {"x": ("jpeg", None), "y": ("int", 8)}, rows, 2)
    (root / "names").write_text("".join(f"{name}\n" for name in CLASSES))
    data("convert", "folder", "--train", root / "folder", "--out", root / "converted")
    for form in FORMS:
        names = () if form == "folder" else ("--class-names", root / "names")
        data("index", root / form, "--out", root / f"{form}.index", *names)
        manifest = root / f"{form}.index" / "dataset.json"
        manifest.write_text(manifest.read_text().replace(json.dumps(str(root / form)), json.dumps(f"../{form}")))
    return root


@pytest.fixture
def in_bucket(forms: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL below which the bucket has tars, MDS and single images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched_metadata.cache_clear()
    url = "s3://bucket/forms"
    for form in ("tars", "mds"):
        for name, content in files_of(forms / form).items():
            Bucket(url).write(f"{form}/{name}", content)
    Bucket(url).write("images/ant/1.jpg", b"")
    return url


def contents(root: Path | str, split: str) -> list[tuple[bytes, int]]:
    opened = Split(root, split)
    images = open_shards(opened).read(np.arange(len(opened)))
    return [(image.tobytes(), label) for image, label in zip(images, opened.rows["label"].tolist(), strict=True)]


def test_every_form_has_the_images_of_the_conversion_in_its_order(forms: Path, config: Config) -> None:
    def batches(root: Path) -> list[Batch]:
        return first_batches(replace(config, data=replace(config.data, root=str(root))), 3)

    expected = batches(forms / "converted")
    for form in FORMS:
        index = forms / f"{form}.index"
        for split in ("train", "validation"):
            assert contents(index, split) == contents(forms / "converted", split)
        assert Manifest.read(index).class_names == CLASSES
        assert {path.suffix for path in index.rglob("*") if path.is_file()} == {".json", ".npy"}, "no image is copied"
        data("verify", index)
        data("verify", index, "--sample", 5)
        for one, other in zip(expected, batches(index), strict=True):
            assert (one.images == other.images).all() and (one.targets == other.targets).all()
    data("index", forms / "tars", "--out", forms / "as-it-lies", "--class-names", forms / "names", "--keep-order")
    rows = Split(forms / "as-it-lies", "train").rows
    assert (np.diff(rows["shard"].astype(np.int64) * 10**9 + rows["offset"].astype(np.int64)) > 0).all()
    data("subset", forms / "folder.index", "--classes", 2, "--out", forms / "subset")
    assert len(Split(forms / "subset", "train")) == 40


@pytest.mark.thorough
def test_runs_are_equal_to_the_bit_on_any_form_killed_and_resumed(
    forms: Path,
    train: Train,
    start_training: StartTraining,
    tiny_config: Path,
    tmp_path: Path,
    s3_server: S3Server,
    in_bucket: str,
) -> None:
    """TFRecords are those of another writer, with other names of features and labels from 0, and no index."""
    for split in ("train", "validation"):
        (tmp_path / "foreign" / split).mkdir(parents=True)
        other = writer.TFRecordWriter(str(tmp_path / "foreign" / split / f"{split}.tfrecord"))
        for image, label in contents(forms / "converted", split):
            other.write({"label": (label, "int"), "jpeg": (image, "byte")})
        other.close()
    keys = ("--image-key", "jpeg", "--label-key", "label", "--label-base", 0)
    data("index", tmp_path / "foreign", *keys, "--class-names", forms / "names")
    data("index", f"{in_bucket}/tars", "--out", tmp_path / "remote.index", "--class-names", forms / "names")
    roots = {form: str(forms / f"{form}.index") for form in FORMS}
    roots |= {"bucket": str(tmp_path / "remote.index"), "tfrecords": str(tmp_path / "foreign")}
    extended(tiny_config, f"import os\nos.environ.update({s3_server.environment!r})\n").rename(tiny_config)
    steps = ("--batch.global_batch", "12", "--run.epochs", "5", "--run.checkpoint_every_steps", "4")
    steps += ("--run.eval_every_epochs", "None")
    for ranks, names in ((1, ("folder", "tfrecords")), (3, ("bucket", "mds"))):
        train(f"converted-{ranks}", *steps, "--data.root", str(forms / "converted"), ranks=ranks)
        expected = losses(tmp_path / f"converted-{ranks}")
        assert len(expected) == 25
        for name in names:
            run, place = f"{name}-{ranks}", (*steps, "--data.root", roots[name])
            kill_after_step_4(start_training, tiny_config, run, *place, ranks=ranks)
            assert "resuming from step" in train(run, *place, ranks=ranks)
            assert losses(tmp_path / run) == expected, run
            assert state_difference(tmp_path / run, tmp_path / f"converted-{ranks}") == 0


def test_objects_of_a_bucket_are_indexed_in_place(
    forms: Path, tmp_path: Path, in_bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is fetched once, whatever happens; the index may be in the bucket, too."""
    fetched: list[str] = []
    monkeypatch.setattr(object_store, "RETRY_S", 0.2)

    def lost(method: str, path: str) -> str | None:
        if method == "GET" and path.endswith((".tar", ".mds")):
            fetched.append(path.rpartition("/")[2])
        return "503 Slow Down" if path.endswith("train-1.tar") and method == "GET" and not answers else None

    for form, answers in (("tars", []), ("mds", [True])):
        words = ("index", f"{in_bucket}/{form}", "--out", f"{in_bucket}/{form}.index")
        s3_server.fault = lost
        if not answers:
            data(*words, "--class-names", forms / "names", status=1)
            answers.append(True)
        data(*words, "--class-names", forms / "names")
        s3_server.fault = None
        for split in ("train", "validation"):
            assert contents(f"{in_bucket}/{form}.index", split) == contents(forms / "converted", split)
        data("verify", f"{in_bucket}/{form}.index")
    assert not [path for path in (tmp_path / "cache" / "indexes").rglob("*") if path.is_file()]
    data("index", f"{in_bucket}/tars", "--out", "https://host/index", status=2)
    assert fetched.count("train-0.tar") == fetched.count("shard.00001.mds") - 1 == 1, "of two splits"
    Bucket(in_bucket).write("tars/val-0.tar", b"x" * Bucket(in_bucket).size("tars/val-0.tar"))
    data("verify", f"{in_bucket}/tars.index", status=1)
    with pytest.raises(DatasetError, match=r"tars/val-0.tar has been replaced since it was indexed"):
        contents(f"{in_bucket}/tars.index", "validation")
    Bucket(in_bucket).delete("tars/train-1.tar")
    with pytest.raises(DatasetError, match=r"tars/train-1.tar does not exist, dataset.json names it: index "):
        contents(f"{in_bucket}/tars.index", "train")


def test_a_column_of_splits_is_seen_after_an_interruption(
    in_bucket: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(object_store, "RETRY_S", 0.2)
    rows = [(small_photograph(n), struct.pack("<q", n % 2), b"val" if n > 1 else b"train") for n in range(4)]
    write_mds(tmp_path / "mds", {"x": ("jpeg", None), "y": ("int", 8), "split": ("str", None)}, rows, 2)
    url = f"{in_bucket}/divided"
    for name, content in files_of(tmp_path / "mds").items():
        Bucket(url).write(name, content)
    words = ("index", url, "--out", tmp_path / "index")
    s3_server.fault = lambda method, path: "503" if method == "GET" and path.endswith("shard.00001.mds") else None
    data(*words, status=1)
    s3_server.fault = None
    capsys.readouterr()
    data(*words, status=2)
    assert "column split ('train', 'val') divides the samples" in capsys.readouterr().err


Damage = Callable[[Path], Any]
FIRST, TAR, SHARD = "folder/train/bee/007.jpg", "tars/train-1.tar", "mds/train/shard.00001.mds"


def flip(name: str, *, place: float = 0.5, keep_time: bool) -> Damage:
    def change(root: Path) -> None:
        path, status = root / name, (root / name).stat()
        content = bytearray(path.read_bytes())
        content[int(len(content) * place)] ^= 1
        path.write_bytes(content)
        if keep_time:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return change


def exchange(name: str, other: str) -> Damage:
    def change(root: Path) -> None:
        (root / name).rename(root / "aside")
        (root / other).rename(root / name)
        (root / "aside").rename(root / other)

    return change


def without_times(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path)


CASES: list[tuple[str, Damage, str]] = [
    ("folder", lambda root: (root / FIRST).unlink(), f"{FIRST} is missing"),
    ("folder", lambda root: os.truncate(root / FIRST, 100), f"{FIRST} has 100 bytes, the index was made for"),
    ("folder", lambda root: (root / FIRST).write_bytes(b""), f"{FIRST} has 0 bytes, the index was made for"),
    ("folder", flip(FIRST, keep_time=False), f"{FIRST} has changed since it was indexed: restore it"),
    ("folder", flip(FIRST, keep_time=True), f"/{FIRST} has CRC32C"),
    ("folder", exchange(FIRST, "folder/train/bee/008.jpg"), "folder/train/bee/007.jpg has "),
    ("folder", lambda root: shutil.copy(root / FIRST, root / "folder/train/bee/new.jpg"), "bee/new.jpg is not in the"),
    ("folder", lambda root: (root / FIRST).rename(root / "folder/train/bee/x.jpg"), "bee/x.jpg is not in the index"),
    ("folder", lambda root: shutil.copytree(root / "folder/train/bee", root / "folder/train/cow"), "train/cow is not"),
    ("folder", lambda root: shutil.rmtree(root / "folder/train/bee"), "folder/train/bee is missing, the index names"),
    ("folder", lambda root: shutil.rmtree(root / "folder"), "/folder cannot be read (No such file or directory)"),
    ("folder", lambda root: (root / "folder/train/bee/notes.txt").touch(), ""),
    ("folder", without_times, ""),
    ("tars", lambda root: (root / TAR).unlink(), f"{TAR[5:]} is missing"),
    ("tars", lambda root: os.truncate(root / TAR, 5000), f"{TAR} has 5000 bytes, the index was made for"),
    ("tars", flip(TAR, place=0.5, keep_time=True), f"{TAR}, ... bytes at byte ... has CRC32C"),
    ("tars", lambda root: shutil.copy(root / TAR, root / "tars/train-2.tar"), "train-2.tar is not in the index"),
    ("tars", exchange(TAR, "tars/train-0.tar"), "tars/train-0.tar has changed since it was indexed"),
    ("tars", without_times, ""),
    ("mds", lambda root: os.truncate(root / SHARD, 5000), f"{SHARD} has 5000 bytes, the index was made for"),
    ("mds", lambda root: (root / SHARD).unlink(), "train/shard.00001.mds is missing"),
    ("mds", flip(SHARD, keep_time=True), f"{SHARD}, ... bytes at byte ... has CRC32C"),
    ("mds", flip("mds.index/index/files.npy", place=0.9, keep_time=True), "files.npy has CRC32C"),
    ("mds", lambda root: os.truncate(root / "mds.index/index/files.npy", 200), "files.npy cannot be read"),
    (
        "mds",
        lambda root: shutil.copy(root / "tars.index/index/train.npy", root / "mds.index/index"),
        "train.npy has CRC",
    ),
]


@pytest.mark.parametrize(("form", "damage", "message"), CASES)
def test_what_has_changed_is_found(
    forms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, damage: Damage, message: str
) -> None:
    """At the start, or when it is read; what has only been copied, or does not concern the images, is no fault."""
    for name in (form, f"{form}.index", "tars.index"):
        shutil.copytree(forms / name, tmp_path / name, dirs_exist_ok=True)
    damage(tmp_path)
    if not message:
        assert contents(tmp_path / f"{form}.index", "train") == contents(forms / "converted", "train")
        return
    with pytest.raises(DatasetError) as error:
        contents(tmp_path / f"{form}.index", "train")
    found = str(error.value)
    assert all(part in found for part in message.split("... ")) and "\n" not in found and "again" in found
    assert found.startswith(f"{tmp_path}/") or form != "folder", "an image that is a file has no number"
    data("verify", tmp_path / f"{form}.index", status=2 if "cannot be read (" in message and form == "mds" else 1)
    files = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert len(set(files)) == len(files) or form != "folder", "each is counted once"


def relabelled(tar: bytes) -> bytes:
    """Return a tar of the same size with other labels."""
    changed = bytearray(tar)
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            if member.name.endswith(".cls"):
                place = member.offset_data
                changed[place] = ord("0") + (changed[place] - ord("0") + 1) % len(CLASSES)
    return bytes(changed)


def test_labels_that_change_in_a_bucket_are_read_again_or_refused(
    forms: Path,
    tmp_path: Path,
    in_bucket: str,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A resumed index reads a replaced object again, though its size is the same; a finished one refuses it."""
    monkeypatch.setattr(object_store, "RETRY_S", 0.2)
    bucket, out = Bucket(in_bucket), tmp_path / "index"
    words = ("index", f"{in_bucket}/tars", "--out", out, "--class-names", forms / "names")
    s3_server.fault = lambda method, path: "503 Slow Down" if method == "GET" and path.endswith("val-0.tar") else None
    data(*words, status=1)
    s3_server.fault = None

    def relabel(name: str) -> None:
        bucket.write(name, relabelled(bucket.read_all(name)))

    relabel("tars/train-0.tar")
    data(*words)
    shutil.copytree(forms / "tars", tmp_path / "tars")
    (tmp_path / "tars/train-0.tar").write_bytes(bucket.read_all("tars/train-0.tar"))
    data("index", tmp_path / "tars", "--out", tmp_path / "fresh", "--class-names", forms / "names")
    assert contents(out, "train") == contents(tmp_path / "fresh", "train")

    bucket.write("tars/train-0.tar", (forms / "tars/train-0.tar").read_bytes())
    with pytest.raises(DatasetError, match=r"tars/train-0.tar has been replaced since it was indexed .* index s3://"):
        contents(out, "train")
    data("verify", out, "--sample", 1, status=1)
    assert "fault: s3://bucket/forms/tars/train-0.tar has been replaced" in capsys.readouterr().out
    data(*words)
    assert contents(out, "train") == contents(forms / "tars.index", "train")

    def replace_when_it_is_fetched(method: str, path: str) -> None:
        if method == "GET" and path.endswith("val-1.tar"):
            s3_server.fault = None
            relabel("tars/val-1.tar")

    s3_server.fault = replace_when_it_is_fetched
    data(*words, status=1)
    assert f"{in_bucket}/tars/val-1.tar has been replaced while it was in use" in capsys.readouterr().err


def test_a_warning_says_that_labels_of_a_changed_tar_are_not_compared(
    forms: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tars", "tars.index", "folder", "folder.index"):
        shutil.copytree(forms / name, tmp_path / name)
    Split(tmp_path / "tars.index", "train")
    without_times(tmp_path / "folder")
    Split(tmp_path / "folder.index", "train")  # where labels are the names of folders
    assert not caplog.messages
    (tmp_path / TAR).write_bytes(relabelled((tmp_path / TAR).read_bytes()))
    Split(tmp_path / "tars.index", "train")
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / TAR} has another time of change") and f"index {tmp_path}/tars" in message


def test_a_file_that_cannot_be_opened_hides_no_other_fault(
    forms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("folder", "folder.index"):
        shutil.copytree(forms / name, tmp_path / name)
    closed, damaged = tmp_path / FIRST, "folder/train/bee/008.jpg"
    closed.unlink()
    closed.symlink_to(closed.name)  # to itself: root is refused nothing by permissions
    flip(damaged, keep_time=True)(tmp_path)
    data("verify", tmp_path / "folder.index", status=1)
    printed = capsys.readouterr().out
    assert f"fault: {closed} cannot be read (Too many levels of symbolic links)" in printed
    assert f"fault: {tmp_path}/{damaged} has CRC32C" in printed


def test_what_changes_during_a_run_is_found(forms: Path, tmp_path: Path) -> None:
    for form, name in (("folder", FIRST), ("tars", TAR)):
        for part in (form, f"{form}.index"):
            shutil.copytree(forms / part, tmp_path / part)
        split = Split(tmp_path / f"{form}.index", "train")
        storage = open_shards(split)
        os.truncate(tmp_path / name, 50)
        with pytest.raises(DatasetError, match=f"{name} has 50 bytes, the index has an image at byte"):
            storage.read(np.arange(len(split)))
        (tmp_path / name).unlink()
        with pytest.raises(DatasetError, match=f"{name} is missing"):
            open_shards(split).prefetch(np.arange(len(split)))


def test_a_file_that_vanishes_is_named_and_nothing_is_left(
    forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(forms / "tars", tmp_path / "tars")
    make_table = index_in_place.make_table

    def too_late(*words: Any) -> Any:
        (tmp_path / "tars" / "val-0.tar").unlink()
        return make_table(*words)

    monkeypatch.setattr(index_in_place, "make_table", too_late)
    data("index", tmp_path / "tars", "--out", tmp_path / "out", "--class-names", forms / "names", status=2)
    assert f"{tmp_path}/tars/val-0.tar: cannot be read any more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_index_resumes_and_lists_what_cannot_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "photos", tmp_path / "out"
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(8):
            (root / name / f"{number}.jpg").write_bytes(small_photograph(8 * label + number))
    (root / "ant" / "cmyk.jpg").write_bytes(encoded(photograph(1, 40, 40).convert("CMYK"), "JPEG"))
    (root / "ant" / "lossless.png").write_bytes(encoded(photograph(2, 40, 40), "PNG"))
    exif = Image.Exif()
    exif[0x0112] = 6
    (root / "bee" / "sideways.jpg").write_bytes(encoded(photograph(3, 40, 60), "JPEG", exif=exif))
    (root / "cat" / "cut.jpg").write_bytes(small_photograph(99)[:-300])
    (root / "cat" / "text.jpg").write_text("no image")
    monkeypatch.setattr(index_in_place, "_PORTION", 10)
    measure, begun = index_in_place.measure, []

    def interrupted(read: Callable[[int], RawImage], numbers: range, *, decode: bool) -> index_in_place.Measured:
        begun.append(numbers.start)
        if begun == [0, 10]:
            raise KeyboardInterrupt
        return measure(read, numbers, decode=decode)

    words = ("index", root, "--out", out, "--workers", 1)
    monkeypatch.setattr(index_in_place, "measure", interrupted)
    data(*words, status=130)
    assert not (out / "dataset.json").exists()
    data(*words, status=1)
    assert sorted(begun) == [0, 10, 10, 20]
    printed = capsys.readouterr().err
    assert f"2 images cannot be decoded, listed in {out}/quarantine.jsonl" in printed
    assert f"{root}/cat/cut.jpg (at byte 0): " in printed and f"{root}/cat/text.jpg (at byte 0): " in printed
    (root / "ant" / "0.jpg").write_bytes(small_photograph(50))
    data(*words, status=1)
    assert len(begun) == 7, "of other files nothing is known"
    capsys.readouterr()
    data(*words, "--on-bad", "skip")
    assert len(begun) == 7, "nothing is read again"
    printed = capsys.readouterr().out
    for kind in ("CMYK JPEG", "PNG", "EXIF orientation not upright"):
        assert f"train: 1 image: {kind}" in printed
    assert "train: 2 images: left out, see quarantine.jsonl" in printed and "train: 27 images in 3 classes" in printed
    assert f"{out} indexes 27 files in" in printed
    assert len(contents(out, "train")) == 27 and {path.name for path in out.iterdir()} == {
        *("dataset.json", "index", "quarantine.jsonl")
    }
    data("convert", "folder", "--train", root, "--out", tmp_path / "rest", "--no-apply-orientation", "--on-bad", "skip")
    ours, theirs = (contents(place, "train") for place in (out, tmp_path / "rest"))
    assert [label for _, label in ours] == [label for _, label in theirs]
    assert sum(one != other for one, other in zip(ours, theirs, strict=True)) == 2, "CMYK and PNG, re-encoded there"


def test_what_cannot_be_indexed_in_place(
    forms: Path, in_bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compressed = REPOSITORY / "tests" / "convert" / "mds" / "val"
    write_tar(tmp_path / "packed" / "a.tar", [("1.jpg", small_photograph(1)), ("1.cls", b"0")], mode="w:gz")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with zipfile.ZipFile(other / "photos.zip", "w") as photos:
        photos.writestr("ant/1.jpg", b"")
    (tmp_path / "parts").mkdir()
    part = tmp_path / "parts" / "images.tar.gz.001"
    part.write_bytes((tmp_path / "packed" / "a.tar").read_bytes()[:300])
    (tmp_path / "nothing").mkdir()
    nameless = tmp_path / "nameless" / "train" / "ant" / "1"
    nameless.parent.mkdir(parents=True)
    nameless.write_bytes(small_photograph(1))
    write_tar(tmp_path / "shards" / "a.tar", [("1.jpg", small_photograph(1)), ("1.cls", b"0")])
    write_tar(tmp_path / "shards" / "b.tar.gz", [("2.jpg", small_photograph(2)), ("2.cls", b"1")], mode="w:gz")
    for name in ("repository/data/train-00000.parquet", "phone/beach/1.HEIC"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet" / "train-00000.parquet").touch()
    (tmp_path / "arrow").mkdir()
    (tmp_path / "arrow" / "0.arrow").write_bytes(b"\xff\xff\xff\xff\xb0\1\0\0\x10\0\0\0")
    out, fraction = ("--out", tmp_path / "out"), ("--validation-fraction", 0.2)
    for words, message in (
        ((forms / "folder",), "its images are read in place (folder): name a directory for the index with --out"),
        ((forms / "folder", "--out", forms / "folder" / "index"), "lies in DATASET"),
        ((forms / "folder", "--out", forms / "converted"), "holds a dataset with shards of its own"),
        ((forms / "folder", "--out", "/proc/index"), "--out /proc/index: cannot be made (No such file or directory)"),
        ((forms / "folder", "--out", other), "holds photos.zip, thesis.tex: name a new directory"),
        ((forms / "folder", *out, "--seed", 10**30), "--seed is 1"),
        ((forms / "folder", *out, "--label-base", 0), "--label-base: has no effect on images that are read in place"),
        ((forms / "converted", "--keep-order"), "--keep-order: has no effect on TFRecords"),
        ((compressed, *out), "is packed, and an image must be a range of bytes of a file"),
        (
            (tmp_path / "packed", *out),
            "a.tar: images are read in place, and it is compressed with gzip: unpack it: `gun",
        ),
        ((other / "photos.zip", *out), "photos.zip: is a zip archive: unpack it: `unzip "),
        ((other / "thesis.tex", *out), "thesis.tex: is a file that is not indexed: name a directory, a tar (.tar) or"),
        ((f"{in_bucket}/images", *out), "holds single images, and a request for each would be slow"),
        ((other, *out), "photos.zip is a zip archive: unpack it: `unzip "),
        ((tmp_path / "shards", *out), "b.tar.gz: is compressed with gzip: unpack it: `gunzip "),
        ((tmp_path / "repository", *out), "it holds files of parquet: run `dali-train data convert parquet --source "),
        ((tmp_path / "phone", *out), "nothing in the directory, with files .heic, looks like a dataset"),
        ((tmp_path / "arrow", *out), "0.arrow is a table of the package datasets, which is not read: write its Parqu"),
        ((tmp_path / "arrow" / "0.arrow", *out), "0.arrow: is a table of the package datasets, which is not read"),
        ((tmp_path / "nothing", *out), "nothing in the directory looks like a dataset"),
        ((tmp_path / "nameless", *out), "train/ant/1 is an image, and its name does not say so: add .jpg"),
        ((other / "photos.zip", *out, *fraction), "photos.zip: is a zip archive: unpack it: `unzip "),
        ((other, *out, *fraction), "photos.zip is a zip archive: unpack it: `unzip "),
        ((part.parent, *out), f"001 is a part of a file: join all of them: `cat {part.parent}/images.tar.gz.* > "),
        ((part, *out), "001: is a part of a file: join all of them: `cat "),
        ((tmp_path / "parquet", *out, *fraction), "it holds files of parquet: run `dali-train data convert parquet"),
        ((tmp_path / "nothing", *out, *fraction), "nothing in the directory looks like a dataset"),
        ((forms / "converted", *fraction), "--validation-fraction: has no effect on TFRecords, which are indexed"),
        ((f"{in_bucket}/nothing", *out, *fraction), "only WebDataset's tars and MDS are indexed in place there"),
    ):
        data("index", *words, status=2)
        assert message in capfd.readouterr().err
    assert main(["fit", str(tmp_path / "parquet"), "--out", str(tmp_path / "run")]) == 2
    assert "it holds files of parquet" in capfd.readouterr().err
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_indexing_again_without_a_validation_split_leaves_nothing_of_it(tmp_path: Path) -> None:
    samples = [(f"{number}", small_photograph(number), number % 2) for number in range(6)]
    write_tars(tmp_path / "tars", samples, 1, "train")
    words = ("index", tmp_path / "tars", "--out", tmp_path / "index")
    data(*words, "--validation-fraction", 0.34)
    assert (tmp_path / "index/index/validation.npy").exists()
    data(*words)
    names = {path.name for path in (tmp_path / "index/index").iterdir()}
    assert names == {"files.npy", "train.npy", "train.crc.npy"}


def test_medmnists_arrays_become_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command that is printed."""
    monkeypatch.chdir(tmp_path)
    Path("med").mkdir()
    arrays = {f"{split}_images": np.zeros((3, 28, 28, 3), np.uint8) for split in ("train", "val", "test")}
    arrays |= {f"{split}_labels": np.array([[0], [1], [1]]) for split in ("train", "val", "test")}
    np.savez("med/bloodmnist.npz", **arrays)
    data("index", "med", "--out", "index", status=2)
    printed = capfd.readouterr().err
    assert "bloodmnist.npz is an archive of NumPy's arrays, which is not read: write its images as files" in printed
    command = printed[printed.index("`python3 ") + 1 : printed.rindex("`")].replace("python3", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    data("index", "images", "--out", "index")
    assert Split(Path("index"), "validation").class_counts.tolist() == [1, 2]
