"""The overview: right numbers, and a sheet on which each picture stands with its class."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.pipelines import Batch
from dali_train.extras.pictures.predictions import class_names, sample_images, sheet
from dali_train.extras.pictures.sheets import overview
from dali_train.hooks import RunStart
from tests.convert.files import convert, tool, write_folder

COLOURS = {"blue": (20, 40, 230), "green": (10, 200, 30), "red": (240, 20, 10)}


@pytest.mark.parametrize("stored_as", ["jpeg", "raw"])
def test_counts_histograms_and_sheets(tmp_path: Path, capsys: pytest.CaptureFixture[str], stored_as: str) -> None:
    for name, colour in COLOURS.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (30 + number, 20), colour).save(tmp_path / "images" / name / f"{number}.png")
    options = ("--format", stored_as, "--validation-fraction", 0.25)
    assert convert("folder", "--train", tmp_path / "images", "--out", tmp_path / "out", *options) == 0
    capsys.readouterr()
    assert tool("show_dataset").main([str(tmp_path / "out"), "--out", str(tmp_path / "sheets"), "--columns", "3"]) == 0
    printed = capsys.readouterr().out
    assert "train: 9 images, 3 classes, 4 shards" in printed
    assert "images per class: 3 (blue), median 3, 3 (blue)" in printed
    assert "shorter side, pixels: 20, median 20" in printed
    assert "longer side, pixels: 30 to 33" in printed
    assert str(tmp_path / "sheets" / "validation.png") in printed
    with Image.open(tmp_path / "sheets" / "train.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"), int).reshape(-1, 3)
    for colour in COLOURS.values():
        near = np.abs(pixels - colour).max(axis=1) < 12
        assert near.sum() > 3 * 144 * 80  # three large tiles of each class


def test_fewer_images_than_places(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a-class-with-a-name-that-is-far-too-long-for-one-tile": 2})
    assert convert("folder", "--train", folder, "--out", tmp_path / "out") == 0
    small = overview(Split(tmp_path / "out", "train"), rows=5, columns=8, seed=0)
    assert small.height < 500


def test_class_names_that_no_terminal_should_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "images", {"plain": 2})
    (folder / "bad\x1b[2J\n").mkdir()
    (folder / "bad\x1b[2J\n" / "same.jpg").write_bytes((folder / "plain" / "000.jpg").read_bytes())
    assert convert("folder", "--train", folder, "--out", tmp_path / "bad") == 0
    printed = capsys.readouterr().out
    assert "duplicates under two labels: " in printed and "(bad )" in printed and "\x1b" not in printed
    shutil.rmtree(folder / "bad\x1b[2J\n")
    assert convert("folder", "--train", folder, "--out", tmp_path / "out") == 0
    manifest = tmp_path / "out" / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"plain"', r'"a\u0001\u001b[2Jb"'))
    capsys.readouterr()
    assert tool("show_dataset").main([str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "images per class: 2 (a\ufffdb), median 2" in printed
    assert "\x1b" not in printed and "\1" not in printed


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("show_dataset", "verify_dataset"):
        assert tool(name).main([str(tmp_path)]) == 2
        assert "dataset.json is missing: nothing in the directory looks like a dataset" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool("show_dataset").main([str(tmp_path), "--rows", "0"])
    assert "argument --rows: 0: use at least 1" in capsys.readouterr().err


def test_samples_are_what_the_network_gets() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(3, 8, 8, 3), dtype=np.uint8)
    data = DataConfig(root="data", train_size=8, normalise=((123.0, 117.0, 104.0), (58.0, 57.0, 56.0)))
    normalised = (torch.from_numpy(pixels).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
    batch = Batch(
        normalised.permute(0, 3, 1, 2),
        torch.tensor([[0, 1], [1, 0], [1, 1]]),
        torch.tensor([0.7, 1.0, 0.2]),
        cast(Any, None),
    )
    shown = sample_images(batch, data, ("cat", "dog").__getitem__, 16)
    assert np.array_equal(np.stack([image for image, _ in shown]), pixels)
    assert [caption for _, caption in shown] == ["70% cat + 30% dog", "dog", "dog"]
    assert sheet(shown).size == (946, 266)


def test_class_names_are_words() -> None:
    def names(*stored: str) -> tuple[str, ...]:
        return class_names(cast(RunStart, SimpleNamespace(class_names=stored, num_classes=max(2, len(stored)))))

    assert names("n01440764", "n02012849", "n03126707") == ("tench", "crane (n02012849)", "crane (n03126707)")
    assert names("n01440764", "n99999999") == ("tench", "n99999999")
    assert names("n01440764", "cat") == ("n01440764", "cat")
    assert names() == ("0", "1")
