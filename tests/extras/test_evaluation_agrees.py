"""All that evaluate a run's weights see the same images, as timm's validate.py does: else an accuracy means nothing."""

import re
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
from dali_train.config import load_config
from dali_train.data.dataset.index import open_split
from dali_train.data.loading.loader import EvalLoader
from dali_train.extras.image_names import file_names
from dali_train.extras.predict.classify import ImagePredictions
from tests.conftest import TINY_CONFIG
from tests.helpers import seeing_model

NUM_IMAGES, NUM_CLASSES = 60, 5
# Largest difference of a logit, whose standard deviation is 1.6. The same pixels in other batches or another program:
# 1e-5. DALI's decoding and resizing against PIL's, which round otherwise: 0.10; resized to one pixel less: 4.4.
SAME_PIXELS, OTHER_DECODER = 1e-4, 0.2


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture(scope="module")
def run(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps the random weights that it began with, and evaluates with settings that are nobody's default."""
    place = tmp_path_factory.mktemp("run")
    assert main(["data", "index", str(photographs), "--out", str(place / "data")]) == 0
    (place / "config.py").write_text(TINY_CONFIG.format(root=str(place / "data")))
    settings = {
        "model.name": "test_efficientnet",
        "model.kwargs": {},
        "data.eval_size": 64,
        "data.eval_resize_to": 99,  # a share for which 64 / (64 / 99) is 98.99999999999999
        "data.normalise": "imagenet",
        "data.interpolation": "bicubic",
        "optimizer.lr": 1e-9,
        "batch.micro_batch": 8,
        "run.dir": str(place / "run"),
        "run.max_steps": 1,
    }
    config = load_config(place / "config.py").replace(settings)
    images = torch.cat([images for images, _ in EvalLoader.from_config(config, device="cpu")])
    save_file(seeing_model(NUM_CLASSES, images).state_dict(), place / "weights.safetensors")
    return dali_train.run(config.replace({"model.weights": str(place / "weights.safetensors")})).run_dir


@pytest.mark.thorough
def test_all_that_evaluate_agree(
    run: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eval`, `predict`, `EvalLoader` in a loop of one's own, the ONNX file, and timm's transform with PIL."""
    onnxruntime = pytest.importorskip("onnxruntime")
    for kind in ("onnx", "timm"):
        assert main(["export", str(run), "--format", kind, "--output", str(tmp_path / kind)]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    config = RunDirectory(run).config
    split = open_split(config.data, "validation")
    paths = [photographs / name for name in file_names(split, np.arange(len(split)))]
    settings = {name: getattr(config.data, name) for name in ("eval_resize_to", "normalise", "interpolation")}
    loader = EvalLoader(config.data.root, batch_size=7, image_size=64, device="cpu", **settings)
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
        tolerance = OTHER_DECODER if name == "timm" else SAME_PIXELS
        differences = (centred(logits) - centred(ours)).abs()
        is_clear = first - second > tolerance
        assert differences.max() < tolerance and is_clear.float().mean() > 0.5, name
        assert torch.equal(logits.argmax(dim=1)[is_clear], ours.argmax(dim=1)[is_clear]), name
    right = int((ours.argmax(dim=1) == labels).sum())
    unclear = int((first - second <= SAME_PIXELS).sum())
    assert abs(float(printed[1]) / 100 * len(split) - right) <= unclear + 0.01


def logits_of(predicted: ImagePredictions) -> torch.Tensor:
    """Return the logarithms of the probabilities, (n, classes) in the order of the classes."""
    logarithms = torch.from_numpy(predicted.probabilities).log()
    return torch.zeros_like(logarithms).scatter(1, torch.from_numpy(predicted.classes), logarithms)


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits without the mean of each image, which the probabilities do not tell."""
    return logits - logits.mean(dim=1, keepdim=True)
