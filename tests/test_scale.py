"""What a million images, files or classes would make slow or large, counted with thousands: bytes an image, files
that are looked at, headers that are read. tools/bench/scale.py measures the same at ImageNet's size."""

import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dali_train.cli import main
from dali_train.data.dataset import files_in_place, index, verify
from dali_train.data.dataset.files_in_place import SourceFiles, make_table
from dali_train.data.dataset.index import INDEX_DTYPE, Split
from dali_train.data.dataset.manifest import Manifest, Shard, SplitManifest, index_path
from dali_train.data.dataset.reading_process import NUM_THREADS
from dali_train.data.dataset.storage import FileRanges, RangedImages
from dali_train.data.dataset.write_index import write_array
from dali_train.data.sampling.rng import shuffled
from tests.convert.files import (
    SYNSETS,
    convert,
    files_of,
    write_devkit,
    write_folder,
    write_training_archive,
    write_validation_archive,
)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that Python and NumPy allocate at one time during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 class folders with 100 files each, which are links to the same two images."""
    root = tmp_path_factory.mktemp("folders")
    few = write_folder(root / "few", {"ant": 2})
    images = sorted((few / "ant").iterdir())
    for number in range(40):
        folder = root / "many" / f"class {number:02d}"
        folder.mkdir(parents=True)
        for image in range(100):
            os.link(images[image % 2], folder / f"{image:03d}.jpg")
    return root / "many"


def names_below(folders: Path) -> list[str]:
    return [str(path.relative_to(folders)) for path in sorted(folders.rglob("*.jpg"))]


def test_directories_with_another_time_cost_a_few_bytes_an_image(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_in_place, "_ROWS_AT_ONCE", 100)
    names = names_below(folders)
    table = make_table(str(folders), names, None)
    assert [os.fsdecode(name) for name in table["name"].tolist()][:4000] == names
    assert table["time"][-1] == (folders / "class 39").stat().st_mtime_ns
    for folder in (folders, *folders.iterdir()):
        os.utime(folder)
    checked = SourceFiles(str(folders), table, len(names), "")
    assert peak_bytes(checked._check_directories) < 60 * len(names)


def test_a_table_of_files_is_made_in_pieces(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_in_place, "_ROWS_AT_ONCE", 100)
    names = names_below(folders)
    assert peak_bytes(lambda: make_table(str(folders), names, None)) < 150 * len(names)


def test_small_files_come_in_one_piece(tmp_path: Path, folders: Path) -> None:
    """From another process: each is opened, read and closed there, and none stays open here."""
    assert main(["data", "index", str(folders), "--out", str(tmp_path), "--no-decode-check"]) == 0
    images, before = RangedImages(Split(tmp_path, "train")), len([*Path("/proc/self/fd").iterdir()])
    contents = images.read(np.arange(500))
    assert len({id(content.base.obj) for content in contents if content.base is not None}) == 1
    process = cast(FileRanges, images.ranges)._reading.process
    assert process is not None
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + NUM_THREADS
    process.kill()
    again = images.read(np.arange(500))  # read here, then
    assert all((one == other).all() for one, other in zip(contents, again, strict=True))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A dataset of 200,000 images in 20 shards, without images."""
    per_shard, num_shards = 10_000, 20
    rows = np.zeros(per_shard * num_shards, INDEX_DTYPE)
    rows["offset"], rows["size"] = np.tile(10 * np.arange(per_shard), num_shards), 5
    rows["shard"] = np.repeat(np.arange(num_shards), per_shard)
    rows["height"], rows["width"] = 4, 5
    shards = tuple(
        Shard(name=f"train-{number:05d}-of-{num_shards:05d}", num_records=per_shard, num_bytes=10 * per_shard)
        for number in range(num_shards)
    )
    index_crc32c = write_array(index_path(tmp_path, "train"), rows)
    splits = {"train": SplitManifest(num_records=len(rows), shards=shards, index_crc32c=index_crc32c)}
    Manifest(num_classes=1, class_names=("a",), label_base=1, splits=splits, conversion={}).write(tmp_path)
    return tmp_path


def test_an_index_is_checked_in_pieces(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_ROWS_AT_ONCE", 1000)
    split = Split(rows, "train", local=False, strict=False)
    assert peak_bytes(split._check_rows) < 2 * 200_000


@pytest.mark.parametrize("column", ["shard", "label", "offset", "size", "height", "width"])
def test_a_wrong_row_is_named_in_every_piece(rows: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    monkeypatch.setattr(index, "_ROWS_AT_ONCE", 1000)
    array = np.load(index_path(rows, "train"))
    array[column][123_456] = {"shard": 3, "label": 1, "offset": 200_000, "size": 0, "height": 0, "width": 0}[column]
    wrong = write_array(index_path(rows, "train"), array)
    manifest = rows / "dataset.json"
    split = Manifest.read(rows).splits["train"]
    manifest.write_text(manifest.read_text().replace(str(split.index_crc32c), wrong))
    message = f"row 123456 .record 3456 of train-00012-of-00020. has {column} {array[column][123_456]}, which cannot be"
    with pytest.raises(index.DatasetError, match=message):
        Split(rows, "train", local=False)


def test_an_order_takes_little_more_than_its_keys() -> None:
    """8 bytes an image while they are sorted, then 4."""
    count = 1 << 20
    order: list[Any] = []
    assert peak_bytes(lambda: order.append(shuffled(np.random.Philox(key=[1, 2]), count))) < 9 * count
    assert order[0].nbytes == 4 * count and np.array_equal(np.sort(order[0]), np.arange(count))


@pytest.fixture
def imagenet(tmp_path: Path) -> tuple[str | Path, ...]:
    """Words that convert official archives."""
    write_training_archive(tmp_path / "train.tar")
    write_validation_archive(tmp_path / "val.tar", 6)
    write_devkit(tmp_path / "devkit.tar.gz", [SYNSETS[n % 5] for n in range(6)])
    validation = ("--validation-archive", tmp_path / "val.tar", "--devkit", tmp_path / "devkit.tar.gz")
    return "imagenet", "--train-archive", tmp_path / "train.tar", *validation


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of all members whose headers are read."""
    names: list[str] = []
    following = tarfile.TarFile.next

    def counted(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        member = following(archive)
        names.append(member.name if member is not None else "the end")
        return member

    monkeypatch.setattr(tarfile.TarFile, "next", counted)
    yield names


def test_an_archive_is_listed_once_for_all_parts(
    tmp_path: Path, imagenet: tuple[str | Path, ...], headers: list[str]
) -> None:
    assert convert(*imagenet, "--out", tmp_path / "one") == 0
    headers.clear()
    words = (*imagenet, "--out", tmp_path / "out")
    for phase in (["--plan"], ["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
        assert convert(*words, *phase) == 0
        images = {name for name in headers if name.endswith(".JPEG")}
        assert len(images) == (26 if phase == ["--plan"] else 0), "20 for training and 6 for validation, once"
        headers.clear()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


def test_a_listing_that_is_damaged_or_of_another_archive_is_not_used(
    tmp_path: Path, imagenet: tuple[str | Path, ...], headers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*imagenet, "--out", tmp_path / "out")
    assert convert(*words, "--plan") == 0
    for kept in (tmp_path / "out" / ".conversion").glob("listing-*"):
        os.truncate(kept, 200)
    headers.clear()
    assert convert(*words, "--part", "1/1") == 0
    assert len({name for name in headers if name.endswith(".JPEG")}) == 26
    write_training_archive(tmp_path / "train.tar", num_images=3)
    assert convert(*words, "--finish") == 2
    assert "the train source had this number of images: 20, now 15" in capsys.readouterr().err


def test_a_listing_of_which_a_part_is_held_out_is_kept_whole(
    tmp_path: Path, imagenet: tuple[str | Path, ...], headers: list[str]
) -> None:
    words = ("imagenet21k", "--source", imagenet[2], "--validation-fraction", "0.25", "--out")
    assert convert(*words, tmp_path / "one") == 0
    for phase in (["--plan"], ["--part", "1/1"], ["--finish"]):
        headers.clear()
        assert convert(*words, tmp_path / "out", *phase) == 0
    assert not [name for name in headers if name.endswith(".JPEG")]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


def test_finished_shards_are_read_once(
    tmp_path: Path, imagenet: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dali_train.data.convert import conversion

    words = (*imagenet, "--out", tmp_path / "out", "--train-shards", 3)
    for phase in (["--plan"], ["--part", "1/1"]):
        assert convert(*words, *phase) == 0
    read: list[str] = []
    for module in (conversion, verify):

        def counted(path: Path, map_file: Any = module.map_file) -> Any:
            read.append(path.name)
            return map_file(path)

        monkeypatch.setattr(module, "map_file", counted)
    assert convert(*words, "--finish") == 0
    assert sorted(read) == [*(f"train-0000{number}-of-00003" for number in range(3)), "validation-00000-of-00001"]


def test_verifying_an_index_whose_files_are_gone_ends_soon(
    tmp_path: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index"
    assert main(["data", "index", str(folders), "--out", str(out), "--no-decode-check"]) == 0
    capsys.readouterr()
    moved = folders.rename(folders.with_name("moved"))
    try:
        assert main(["data", "verify", str(out)]) == 1
    finally:
        moved.rename(folders)
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert 100 <= len(faults) < 1000 and " is missing, the index names it" in faults[0]
    assert "train: so many faults that the other 3,7" in faults[-1] and "images were not checked" in faults[-1]
