"""`--group-by`: no group is on both sides of a split, and each class has about its fraction."""

from pathlib import Path

import numpy as np
import pytest

from dali_train import cli
from dali_train.data.dataset.index import Split
from tests.conftest import jpeg, photograph

PATTERN = r"patient(\d+)_"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 30 patients, 1 to 5 of each; some have some of both classes."""
    root = tmp_path_factory.mktemp("groups") / "images"
    random = np.random.default_rng(0)
    for patient in range(30):
        for picture in range(random.integers(1, 6)):
            name = ("ill", "well")[int(random.random() < (0.1, 0.5, 0.9)[patient % 3])]
            (root / name).mkdir(parents=True, exist_ok=True)
            path = root / name / f"patient{patient}_{picture}.jpg"
            path.write_bytes(jpeg(photograph(100 * patient + picture, 24, 24)))
    return root


def index(folder: Path, out: Path, *options: str) -> int:
    return cli.main(["data", "index", str(folder), "--out", str(out), "--validation-fraction", "0.25", *options])


def patients(out: Path, split: str) -> list[str]:
    return [name.rpartition("patient")[2].partition("_")[0] for name in Split(out, split).file_names()]


def test_a_group_stays_on_one_side(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(folder, tmp_path / "plain") == 0
    plain = [set(patients(tmp_path / "plain", split)) for split in ("train", "validation")]
    assert plain[0] & plain[1], "without groups a patient is on both sides"
    capsys.readouterr()
    assert index(folder, tmp_path / "grouped", "--group-by", PATTERN) == 0
    printed = capsys.readouterr().out
    train, validation = (patients(tmp_path / "grouped", split) for split in ("train", "validation"))
    assert not set(train) & set(validation) and len({*train, *validation}) == 30
    held_out = f"{len(set(validation))} are held out, {len(validation)} of {len(train) + len(validation)} images"
    assert f"--group-by: 30 groups of 1 to 5 images; {held_out}\n" in printed
    labels = [np.bincount(Split(tmp_path / "grouped", split).rows["label"]) for split in ("train", "validation")]
    assert (np.abs(labels[1] - 0.25 * (labels[0] + labels[1])) <= 3).all(), labels
    assert index(folder, tmp_path / "seed", "--group-by", PATTERN, "--seed", "1") == 0
    assert set(patients(tmp_path / "seed", "validation")) != set(validation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--group-by", "film(.)"), "does not match"),
        (("--group-by", "patient"), "images are one group, 'patient'"),
        (("--group-by", "ill|well"), "all of a class"),
        (("--group-by", "("), "is no regular expression"),
    ],
)
def test_patterns_that_make_no_groups(
    folder: Path, tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert index(folder, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_groups_need_a_fraction(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "index", str(folder), "--out", str(tmp_path / "out"), "--group-by", PATTERN]) == 2
    assert "says how --validation-fraction divides: give that as well" in capsys.readouterr().err


def test_a_conversion_divides_in_the_same_way(folder: Path, tmp_path: Path) -> None:
    assert index(folder, tmp_path / "index", "--group-by", PATTERN) == 0
    convert = ["data", "convert", "folder", "--train", str(folder), "--out", str(tmp_path / "out")]
    assert cli.main([*convert, "--validation-fraction", "0.25", "--group-by", PATTERN]) == 0
    assert patients(tmp_path / "out", "validation") == patients(tmp_path / "index", "validation")
