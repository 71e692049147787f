"""`data duplicates`: the copies that were planted are found, in groups, and nothing else."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_train import cli
from dali_train.data.dataset.index import kept_images
from dali_train.extras.duplicates.near_duplicates import MOST_DHASH, MOST_PHASH, groups_of
from tests.conftest import jpeg, photograph
from tests.convert.files import write_folder


def resized(source: Path, target: Path, side: int) -> None:
    image = Image.open(source).resize((side, side - 7), Image.Resampling.BICUBIC)
    image.save(target, "JPEG", quality=70)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of 40 photographs, three of which have copies: in the same class, in another, and in the other split."""
    root = tmp_path_factory.mktemp("duplicates")
    train = write_folder(root / "images" / "train", {"ant": 15, "bee": 15})
    val = write_folder(root / "images" / "val", {"ant": 5, "bee": 5}, first_seed=30)
    resized(train / "ant" / "003.jpg", train / "ant" / "copy-a.jpg", 90)
    resized(train / "ant" / "005.jpg", train / "bee" / "copy-b.jpg", 31)
    resized(val / "bee" / "002.jpg", train / "bee" / "copy-c.jpg", 50)
    shutil.copy(train / "bee" / "copy-c.jpg", train / "bee" / "copy-d.jpg")
    for name in ("white.png", "grey.png"):
        Image.new("RGB", (40, 40), name.partition(".")[0]).save(train / "ant" / name)
    assert cli.main(["data", "index", str(root / "images"), "--out", str(root / "index")]) == 0
    return root / "index"


def test_copies_are_found(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "twins.csv"
    capsys.readouterr()
    assert cli.main(["data", "duplicates", str(index), "--csv", str(table)]) == 0
    printed = capsys.readouterr().out
    summary = "3 groups of near-duplicates, 7 of 46 images: 1 in both splits, 1 under two labels"
    assert printed.startswith(f"2 images of nearly one colour: not compared\n{summary}\n"), printed
    assert "that is a large part" in printed
    groups = [{line.split()[-1] for line in group.splitlines()} for group in printed.split("\n\n")[1:]]
    assert groups[0] == {"val/bee/002.jpg", "train/bee/copy-c.jpg", "train/bee/copy-d.jpg"}, printed
    assert groups[1] == {"train/ant/005.jpg", "train/bee/copy-b.jpg"}, printed
    assert {"train/ant/003.jpg", "train/ant/copy-a.jpg"} <= groups[2], printed
    files = [line.split(",")[1] for line in table.read_text().splitlines()[1:]]
    assert {"train/bee/copy-c.jpg", "train/bee/copy-d.jpg"} <= set(files) and len(files) == 4, files
    assert (~kept_images(table, 36)).sum() == 4
    assert cli.main(["data", "duplicates", str(index), "--groups", "1"]) == 0
    assert "and 2 groups more" in capsys.readouterr().out


def test_a_damaged_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "images", {"ant": 4, "bee": 4})
    (folder / "bee" / "002.jpg").write_bytes(jpeg(photograph(1, 64, 64))[:700])
    options = ["--out", str(tmp_path / "index"), "--validation-fraction", "0.25", "--no-decode-check"]
    assert cli.main(["data", "index", str(folder), *options]) == 0
    assert cli.main(["data", "duplicates", str(tmp_path / "index")]) == 2
    assert "bee/002.jpg cannot be decoded" in capsys.readouterr().err


def test_pairs_are_those_of_a_comparison_of_all() -> None:
    """Random hashes with twins around both limits, and many that share a word."""
    random = np.random.default_rng(0)
    hashes = random.integers(0, 1 << 64, (600, 2), np.uint64)
    hashes[:200, 0] &= np.uint64(0xFFFF_FFFF_FFFF_0000)
    for twin in range(300):
        for kind, most in enumerate((MOST_PHASH, MOST_DHASH)):
            bits = random.choice(64, random.integers(most - 2, most + 2), replace=False)
            hashes[300 + twin, kind] = hashes[twin, kind] ^ np.bitwise_or.reduce(np.uint64(1) << bits.astype(np.uint64))
    near = np.ones((600, 600), bool)
    for kind, most in enumerate((MOST_PHASH, MOST_DHASH)):
        differing = hashes[:, None, kind] ^ hashes[None, :, kind]
        near &= np.unpackbits(differing.view(np.uint8).reshape(600, 600, 8), axis=-1).sum(-1) <= most
    expected = [
        np.flatnonzero(row).tolist() for number, row in enumerate(near) if row.sum() > 1 and row.argmax() == number
    ]
    found = groups_of(hashes)
    assert sorted(group.tolist() for group in found) == expected and 100 < len(expected) < 250
