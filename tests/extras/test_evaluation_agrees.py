"""All that evaluate a run's weights see the same images, as timm's validate.py does: else an accuracy means nothing.

PHOTOGRAPHS=DIRECTORY has the published weights evaluate the images in it, in a folder for each of ImageNet's classes.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_data_config

import dali_train
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.cli import main
from dali_train.config import Config, load_config
from dali_train.data.dataset.index import open_split
from dali_train.data.loading.loader import EvalLoader
from dali_train.extras.image_names import file_names
from dali_train.extras.predict.classify import ImagePredictions
from tests.conftest import TINY_CONFIG
from tests.helpers import seeing_model
from tools.bench.finetune import published_weights

NUM_IMAGES, NUM_CLASSES = 60, 5


@dataclass
class Case:
    """A run that keeps the weights that it began with, and the images that it evaluates."""

    run: Path
    photographs: Path
    same_pixels: float
    """The largest difference of a logit for the same pixels in other batches or another program."""
    other_decoder: float
    """The largest for DALI's decoding and resizing against PIL's, which round otherwise."""
    other_classes: float = 0
    """The largest share of the images whose most probable class is another one for that reason."""


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts of scikit-learn's two photographs, of many sizes, in folders of classes."""
    root = tmp_path_factory.mktemp("photographs")
    random = np.random.default_rng(1)
    whole = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(NUM_IMAGES):
        image = whole[number % 2]
        width, height = (int(side) for side in random.integers(100, 420, size=2))
        left, top = (
            int(random.integers(0, side - size + 1)) for side, size in zip(image.size, (width, height), strict=True)
        )
        path = root / ("train", "val")[number % 3 > 0] / f"class {number % NUM_CLASSES}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.crop((left, top, left + width, top + height)).save(path, quality=92)
    return root


def config_of(photographs: Path, place: Path, *options: str) -> Config:
    assert main(["data", "index", str(photographs), "--out", str(place / "data"), *options]) == 0
    (place / "config.py").write_text(TINY_CONFIG.format(root=str(place / "data")))
    settings = {"optimizer.lr": 1e-9, "batch.micro_batch": 8, "run.dir": str(place / "run"), "run.max_steps": 1}
    return load_config(place / "config.py").replace({"model.kwargs": {}, **settings})


@pytest.fixture(scope="module")
def of_random_weights(crops: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """With settings that are nobody's default."""
    place = tmp_path_factory.mktemp("random")
    settings = {
        "model.name": "test_efficientnet",
        "data.eval_size": 64,
        "data.eval_resize_to": 99,  # a share for which 64 / (64 / 99) is 98.99999999999999
        "data.normalise": "imagenet",
        "data.interpolation": "bicubic",
    }
    config = config_of(crops, place).replace(settings)
    images = torch.cat([images for images, _ in EvalLoader.from_config(config, device="cpu")])
    save_file(seeing_model(NUM_CLASSES, images).state_dict(), place / "weights.safetensors")
    run = dali_train.run(config.replace({"model.weights": str(place / "weights.safetensors")})).run_dir
    # The logits' standard deviation is 1.6. Resized to one pixel less they differ by 4.4.
    return Case(run, crops, same_pixels=1e-4, other_decoder=0.2)


@pytest.fixture(scope="module")
def of_published_weights(crops: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """EfficientNet-Lite0 with the settings that `init` takes from timm's description of it."""
    place = tmp_path_factory.mktemp("published")
    (place / "classes.txt").write_text("".join(f"class {label}\n" for label in range(1000)))
    photographs, options = crops, ["--class-names", str(place / "classes.txt")]
    if given := os.environ.get("PHOTOGRAPHS"):
        photographs, options = place / "photographs", []
        photographs.mkdir()
        for split in ("train", "val"):
            (photographs / split).symlink_to(Path(given).absolute())
    weights = published_weights(place)
    config = config_of(photographs, place, *options)
    line = ["init", config.data.root, "--weights", str(weights), "--output", str(place / "init.py")]
    assert main([*line, "--gpu-memory", "16"]) == 0  # else it measures this machine's speed
    chosen = load_config(place / "init.py")
    kept = {"model.weights": str(weights), "model.freeze": ("batch-norm",)}
    fields = ("train_size", "eval_size", "eval_resize_to", "normalise", "interpolation")
    settings = {f"data.{name}": getattr(chosen.data, name) for name in fields}
    run = dali_train.run(config.replace({"model.name": chosen.model.name, **kept, **settings})).run_dir
    return Case(run, photographs, same_pixels=1e-4, other_decoder=0.45, other_classes=0.004 if given else 0.025)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["random", "published"])
def test_all_that_evaluate_agree(
    weights: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eval`, `predict`, `EvalLoader` in a loop of one's own, the ONNX file, and timm's transform with PIL."""
    case: Case = request.getfixturevalue(f"of_{weights}_weights")
    run = case.run
    onnxruntime = pytest.importorskip("onnxruntime")
    for kind in ("onnx", "timm"):
        assert main(["export", str(run), "--format", kind, "--output", str(tmp_path / kind)]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    config = RunDirectory(run).config
    split = open_split(config.data, "validation")
    paths = [case.photographs / name for name in file_names(split, np.arange(len(split)))]
    settings = {name: getattr(config.data, name) for name in ("eval_resize_to", "normalise", "interpolation")}
    size = config.data.eval_size
    loader = EvalLoader(config.data.root, batch_size=7, image_size=size, device="cpu", **settings)
    batches = list(loader)
    labels = torch.cat([labels for _, labels in batches])
    published = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=published))
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    printed = re.search(r"top-1 ([\d.]+)%.*\((\d+) images\)", capsys.readouterr().out)
    assert printed is not None and int(printed[2]) == len(split)
    predicted = dali_train.predict(run, paths)
    with torch.inference_mode():
        model = dali_train.load_model(run)
        ours = torch.cat([model(images) for images, _ in batches])
        others = {
            "onnx": torch.cat([torch.from_numpy(session.run(None, {"images": x.numpy()})[0]) for x, _ in batches]),
            "predict": logits_of(predicted),
            "timm": published(torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])),
        }
    first, second = ours.topk(2).values.unbind(dim=1)
    for name, logits in others.items():
        tolerance = case.other_decoder if name == "timm" else case.same_pixels
        differences = (centred(logits) - centred(ours)).abs()
        is_clear = first - second > tolerance
        assert differences.max() < tolerance and is_clear.float().mean() > 0.5, name
        is_other = logits.argmax(dim=1) != ours.argmax(dim=1)
        assert not is_other[is_clear].any(), name
        assert is_other.float().mean() <= (case.other_classes if name == "timm" else 0), name
    right = int((ours.argmax(dim=1) == labels).sum())
    unclear = int((first - second <= case.same_pixels).sum())
    assert abs(float(printed[1]) / 100 * len(split) - right) <= unclear + 0.01


def logits_of(predicted: ImagePredictions) -> torch.Tensor:
    """Return the logarithms of the probabilities, (n, classes) in the order of the classes."""
    logarithms = torch.from_numpy(predicted.probabilities).log()
    return torch.zeros_like(logarithms).scatter(1, torch.from_numpy(predicted.classes), logarithms)


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits without the mean of each image, which the probabilities do not tell."""
    return logits - logits.mean(dim=1, keepdim=True)
