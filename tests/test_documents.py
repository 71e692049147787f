"""The pages for those who begin: their commands and configs, run as they stand there."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dali_train.cli import main
from dali_train.config import load_config
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import REPOSITORY, Train, jpeg, photograph, write_shard
from tests.s3_server import S3Server
from tools.bench.finetune import published_weights

SMALL = ("--model.name", "test_resnet", "--batch.global_batch", "4", "--batch.micro_batch", "4", "--run.max_steps", "1")


def folder_of_photographs(height: int, width: int) -> None:
    """Write ``photos`` into the working directory: two classes of ten, whose heights grow from `height`."""
    for number in range(20):
        path = Path("photos") / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number, height + number, width).save(path)


def run_commands_of(page: str, expected: list[str]) -> None:
    """Run the commands in the first block of `page`, the `expected` ones, with a smaller network and without onnx."""
    commands = re.findall(r"^dali-train (.*)", page.partition("```")[2].partition("```")[0], flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == expected
    for command in commands:
        words = shlex.split(command.replace("--format onnx", "--format timm"))
        assert main([*words, *(SMALL if words[0] == "train" else ())]) == 0, command


@pytest.mark.thorough
def test_a_folder_becomes_an_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a smaller network, and without onnx, which tests/extras/test_export.py has."""
    monkeypatch.chdir(tmp_path)
    folder_of_photographs(40, 50)
    page = (REPOSITORY / "docs" / "own-images.md").read_text().partition("## Step by step")[2]
    run_commands_of(page, ["data", "init", "plan", "train", "eval", "report", "export"])
    output = capsys.readouterr().out
    assert "photos.py: 16 images to train on in 2 classes, 4 to validate; the median is 50 x" in output
    assert "step 1: top-1" in output and "Read back, its logits differ by" in output
    assert Path("runs/photos/configs/photos.py").read_text() == Path("photos.py").read_text()


@pytest.mark.thorough
def test_timms_arguments_become_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a smaller network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dali-train", "train", "--config", "photos.py"])
    folder_of_photographs(80, 70)
    page = (REPOSITORY / "docs" / "from-timm.md").read_text()
    run_commands_of(page, ["data", "init", "plan", "train", "export"])
    output = capsys.readouterr().out
    card = Path("runs/photos/export/timm/README.md").read_text()
    assert "\ndali-train train --config photos.py\n" in card and "| dataset | photos: " in card
    assert "8 images per step are 8 x 1 GPU (--ranks) x 1 accumulated" in output and "best top-1 of the EMA" in output
    assert "  --sync-bn: BatchNorm normalises by the micro-batch" in output
    lines = page.split("```")[3].strip().splitlines()
    assert len(lines) == 3 and all(f"        {line}\n" in Path("photos.py").read_text() for line in lines)


def fine_tuning() -> list[str]:
    section = (REPOSITORY / "docs" / "own-images.md").read_text().partition("## Fine-tuning")[2]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(2))
def test_configs_for_fine_tuning(number: int, dataset: Path, tmp_path: Path, run_command: Train) -> None:
    """Each is planned as it is, and trains with a smaller network."""
    text = fine_tuning()[number]
    assert len(fine_tuning()) == 2 and len(text.splitlines()) <= 12
    path, weights = tmp_path / "config.py", tmp_path / "weights.pth"
    path.write_text(text)
    assert main(["plan", "--config", str(path), "--data.root", str(dataset)]) == 0
    torch.save(timm.create_model("test_resnet", num_classes=10).state_dict(), weights)
    words = [
        "--data.root",
        str(dataset),
        "--data.train_size",
        "32",
        "--data.eval_size",
        "32",
        "--model.weights",
        str(weights),
    ]
    if number == 1:
        run_command("probe", "--config", str(path), *SMALL, *words, "--output", str(tmp_path / "probe"))
    output = run_command("train", "--config", str(path), *SMALL, *words, "--run.dir", str(tmp_path / "run"))
    assert "top-1" in output


@pytest.mark.thorough
def test_what_fine_tuning_reaches(tmp_path: Path, run_command: Train) -> None:
    """The page's linear probe and its config for a network with BatchNorms, with published weights of ImageNet."""
    images_of_digits(tmp_path / "photos")
    (tmp_path / "photos.py").write_text(fine_tuning()[1])
    size = ["--data.train_size", "64", "--data.eval_size", "64", "--data.normalise", "inception"]
    weights = ["--model.name", "tf_efficientnet_lite0", "--model.weights", str(published_weights(tmp_path))]
    length = ["--run.epochs", "10", "--run.eval_every_epochs", "10"]
    options = [
        "--config",
        str(tmp_path / "photos.py"),
        "--data.root",
        str(tmp_path / "index"),
        *size,
        *weights,
        *length,
    ]
    options += ["--batch.micro_batch", "32", "--run.dir", str(tmp_path / "run")]
    assert main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "index")]) == 0
    probed = run_command("probe", *options, "--output", str(tmp_path / "probe"))
    trained = run_command("train", *options)
    page = (REPOSITORY / "docs" / "own-images.md").read_text()
    promised = re.search(r"digits.* the probe reaches (\d+) % and training (\d+) %", page)
    assert promised is not None
    for output, top1 in zip((probed, trained), promised.groups(), strict=True):
        printed = re.search(r"top-1 ([\d.]+)%", output)
        assert printed is not None and abs(float(printed[1]) - float(top1)) <= 4, output


def images_of_digits(photos: Path) -> None:
    """Write scikit-learn's digits, of 64 x 64 pixels: 200 to train on, and the last 300 to validate."""
    digits = load_digits()
    for split, numbers in (("train", range(200)), ("val", range(len(digits.target) - 300, len(digits.target)))):
        for number in numbers:
            path = photos / split / str(digits.target[number]) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))  # 0 to 16
            image.resize((64, 64), Image.Resampling.BICUBIC).save(path)


def test_the_loaders_page(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its examples one after the other, on a CPU and on a small dataset; the last epoch of 90 alone."""
    monkeypatch.chdir(tmp_path)
    Path("imagenet").symlink_to(dataset)
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "loader.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 6
    text = "".join(blocks).replace('device="cuda"', 'device="cpu"').replace("range(train.epoch, 90)", "range(1)")
    smaller = {"batch_size=256": "batch_size=8", "batch_size=64": "batch_size=4", "global_batch=256": "global_batch=16"}
    for size, less in smaller.items():
        text = text.replace(size, less)
    names: dict[str, Any] = {}
    exec(text, names)
    assert len(names["views"]) == 10 and names["views"][9].shape == (4, 3, 96, 96)
    assert names["boxes"].shape == (4, 4) and names["state"]["step"] == 1


@pytest.mark.parametrize(
    ("size", "vary", "lines"),
    [
        (28, 0, "train_size=28 eval_size=28 crop_side=28 crop_padding=3 eval_resize_to=28 dali_resnet34_cifar"),
        (28, 9, "train_size=28 eval_size=28 crop_area=(0.35, dali_resnet34_cifar"),
        pytest.param(150, 0, "train_size=128 eval_size=128 resnet18", marks=pytest.mark.thorough),
        pytest.param(300, 5, "train_size=128 eval_size=128 resnet18", marks=pytest.mark.thorough),
    ],
)
def test_init_fits_what_lies_there(
    size: int, vary: int, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, path = tmp_path / "a {dataset}", tmp_path / "config.py"
    records = [(jpeg(photograph(i, size, size + 2 + vary * i)), 1 + i % 2) for i in range(4)]
    write_shard(root / "train" / "train-00000-of-00001", records)
    build_index(root)
    assert main(["init", str(root), "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "4 images to train on in 2 classes, none to validate" in printed
    assert re.search(r"about \d.* per epoch on this machine's CPU, \d.* for \d+ epochs, with a small", printed)
    text, faster = path.read_text(), r'\n    precision=PrecisionConfig\(dtype="bf16"\),  # [\d.]+ times as fast as fp32'
    assert all(part in text for part in lines.split())
    assert (load_config(path).precision.dtype == "bf16") == bool(re.search(faster, text))
    assert load_config(path).data.root == str(root) and load_config(path).batch.micro_batch == 32
    assert main(["init", str(root), "--output", str(path)]) == 2
    assert f"--output {path}: this file exists" in capsys.readouterr().err


@pytest.mark.thorough
def test_init_of_a_bucket(dataset: Path, s3_server: S3Server, tmp_path: Path) -> None:
    url, path = "s3://bucket/photos", tmp_path / "config.py"
    assert main(["data", "subset", str(dataset), "--classes", "3", "--out", url]) == 0
    assert main(["init", url, "--output", str(path)]) == 0
    assert load_config(path).data.root == url


def test_init_knows_the_gpu(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", str(dataset), "--output", str(tmp_path / "new" / "config.py"), "--gpu-memory"]
    assert main([*words, "2"]) == 2
    assert "--gpu-memory 2 GB is too small for a single image" in capsys.readouterr().err
    assert main([*words, "16"]) == 0
    config = load_config(tmp_path / "new" / "config.py")
    assert (config.batch.global_batch, config.batch.micro_batch, config.model.name) == (64, 64, "dali_resnet34_cifar")
    assert main(["init", str(dataset), "--output", str(tmp_path / "config.txt")]) == 2
    assert "not a Python file" in capsys.readouterr().err


def test_examples_follow_their_rules() -> None:
    rules = (REPOSITORY / "examples" / "README.md").read_text()
    folders = sorted(path for path in (REPOSITORY / "examples").iterdir() if (path / "README.md").exists())
    assert folders
    for folder in folders:
        assert f"| [{folder.name}]({folder.name}) |" in rules
        text = (folder / "README.md").read_text()
        assert "Last run: " in text and "Maintained by: " in text and list(folder.glob("test_*.py"))
        has_not_met = re.search(r"Not tried: (a cluster|\w+ itself)", text) is not None
        assert has_not_met == text.splitlines()[2].startswith("**Has not "), folder
        for file in [*folder.glob("*.yaml"), *folder.glob("Containerfile")] if has_not_met else []:
            assert file.read_text().startswith("# Never "), file
    for path in (REPOSITORY / "dali_train").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) examples\b", path.read_text(), flags=re.MULTILINE), path


PAGES = [
    path.relative_to(REPOSITORY).as_posix()
    for path in sorted(REPOSITORY.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_belongs_to_a_table(page: str) -> None:
    """A row after a paragraph is shown as text with bars."""
    lines = ["", *(REPOSITORY / page).read_text().splitlines(), ""]
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert [lines[i] for i in starts if not re.fullmatch(r"\|[-:| ]+\|", lines[i + 1])] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text())
    targets = [(path.parent / name if name else path, anchor) for name, anchor in links]
    assert [str(target) for target, _ in targets if not target.exists()] == []
    assert [anchor for target, anchor in targets if anchor and anchor not in anchors(target)] == []


def test_each_picture_is_shown() -> None:
    """Beside the page that shows it."""
    pictures = set((REPOSITORY / "docs").rglob("*.png"))
    shown = {
        (REPOSITORY / page).parent / name
        for page in PAGES
        for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", (REPOSITORY / page).read_text())
    }
    assert pictures == shown
