"""``dali-train predict``: classify images by a run's model, decoded by DALI as in training, or by PIL as in most
programs."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchvision.transforms import functional

from dali_train.checkpoint.model import TrainedModel, Weights, load_trained
from dali_train.config import DataConfig
from dali_train.data.dataset.build_index import build_index
from dali_train.data.dataset.image_file import BadImageError, decode_rgb, open_image
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.pictures import contact_sheet
from dali_train.data.dataset.tfrecord import write_records
from dali_train.data.loading.decoder import PixelFormat
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.data.loading.storage import open_storage, read_stored
from dali_train.errors import ConfigError
from dali_train.hooks.predictions import write_table
from dali_train.text import printable
from dali_train.training.metrics import ClassTables
from dali_train.training.pretrained import image_settings

_BATCH, _TILE = 32, 300  # images at a time; pixels of one in a picture
_TOP, _IN_TABLE = 3, 5  # classes per image that are printed, and that are in a table


@dataclass(frozen=True, kw_only=True)
class ImagePredictions:
    """The classes of each image, most likely first, and their probabilities; both (n, classes)."""

    classes: NDArray[np.int64]
    probabilities: NDArray[np.float32]


def predict(
    model: nn.Module | Path | str, images: Sequence[Path | str], *, decoder: Literal["dali", "pil"] = "dali"
) -> ImagePredictions:
    """Classify image files, resized, cropped and normalised as in the evaluation of the run.

    Args:
        model: a run directory, or a model from `load_model` or timm, whose `pretrained_cfg` sets the preprocessing.
        images: files; EXIF rotation is ignored.

    Raises:
        ConfigError: a file is missing or is not an image, or there is no such run.
    """
    if not isinstance(model, nn.Module):
        trained = load_trained(Path(model))
        return _predict(trained.model, trained.config.data, [*map(Path, images)], decoder)
    return _predict(model, DataConfig(root=".", **image_settings(model)), [*map(Path, images)], decoder)


def _predict(model: nn.Module, data: DataConfig, images: Sequence[Path], decoder: str) -> ImagePredictions:
    missing = [path for path in images if not path.is_file()]
    if missing:
        raise ConfigError(f"{', '.join(map(str, missing))}: file not found")
    for path in images:
        try:
            open_image(path.read_bytes())
        except BadImageError as error:
            raise ConfigError(f"{path} {error}") from error
    if decoder == "pil":
        return _classify(model, _with_pil([path.read_bytes for path in images], [*map(str, images)], data))
    with tempfile.TemporaryDirectory() as directory:
        return _classify(model, _with_dali(_as_split(images, Path(directory)), data))


def print_predictions(
    run_dir: Path,
    images: Sequence[Path],
    *,
    decoder: str,
    picture: Path | None,
    table: Path | None,
    checkpoint: str | None,
    weights: Weights | None,
) -> None:
    """Print a table of `images`; without images, compare both decoders on the validation split of the run's dataset.

    Args:
        decoder: ``dali`` or ``pil``.
        picture: where to draw the images with their most likely classes.
        table: where to write a CSV file of the images, or of the validation split.
        checkpoint, weights: see `load_trained`.

    Raises:
        ConfigError: a file is missing or is not an image.
        CheckpointError, DatasetError: see `load_trained`, `Split` and `EvaluationPipeline`.
    """
    trained = load_trained(run_dir, checkpoint, weights)
    print(trained.describe())
    if not images:
        if picture is not None:
            raise ConfigError("--picture needs images: name some files")
        compare_decoders(trained, table)
        return
    predictions = _predict(trained.model, trained.config.data, images, decoder)
    names = [printable(name) for name in trained.class_names]
    width = max(len(str(path)) for path in images)
    for path, classes, probabilities in zip(images, predictions.classes, predictions.probabilities, strict=True):
        best = "  ".join(f"{names[c]} {p:.1%}" for c, p in zip(classes[:_TOP], probabilities[:_TOP], strict=True))
        print(f"{printable(str(path)):<{width}}  {best}")
    if picture is not None:
        draw(picture, images, predictions, names)
        print(picture)
    if table is not None:
        _write_likeliest(table, ["image"], [[str(path)] for path in images], predictions, names)
        print(table)


def _write_likeliest(
    path: Path, heads: list[str], firsts: list[list[Any]], predictions: ImagePredictions, names: Sequence[str]
) -> None:
    """Write a row per image: the columns `firsts` with the headings `heads`, then its top classes with scores."""
    kept = min(_IN_TABLE, predictions.classes.shape[1])
    heads = heads + [f"{what} {place}" for place in range(1, kept + 1) for what in ("class", "score")]
    pairs = (
        [cell for c, p in zip(classes[:kept], scores[:kept], strict=True) for cell in (names[c], round(float(p), 5))]
        for classes, scores in zip(predictions.classes, predictions.probabilities, strict=True)
    )
    write_table(path, heads, (first + rest for first, rest in zip(firsts, pairs, strict=True)))


def compare_decoders(trained: TrainedModel, table: Path | None) -> None:
    """Print top-1 on the validation split, decoded and resized by DALI and by PIL, and DALI's accuracy by class; write
    the top 5 classes that DALI's decoding gives into `table`."""
    data = trained.config.data
    split = Split(data.root, "validation")
    if split.manifest.encoding == "raw":
        raise ConfigError(
            f"{data.root} holds raw pixels, so there are no decoders to compare: name image files to classify"
        )
    labels = split.rows["label"].astype(np.int64)
    dali = _classify(trained.model, _with_dali(split, data), keep=_IN_TABLE)
    numbers = np.arange(len(split))
    storage = open_storage(split, data)
    encoded = [lambda number=number: read_stored(storage, split, number[None])[0].tobytes() for number in numbers]
    pil = _classify(trained.model, _with_pil(encoded, [f"image {number}" for number in numbers], data), keep=1)
    top1 = {name: float((p.classes[:, 0] == labels).mean()) for name, p in (("dali", dali), ("pil", pil))}
    changed = int((dali.classes[:, 0] != pil.classes[:, 0]).sum())
    print(
        f"{len(split)} validation images of {data.root}: top-1 {top1['dali']:.2%} decoded by DALI, {top1['pil']:.2%} "
        f"by PIL, a difference of {abs(top1['dali'] - top1['pil']) * 100:.2f} points; {changed} images are "
        "classified differently"
    )
    names = trained.class_names
    print("\n".join(ClassTables(labels, dali.classes[:, 0], len(names)).describe(names)))
    if table is not None:
        firsts = [[int(number), names[label]] for number, label in zip(numbers, labels, strict=True)]
        _write_likeliest(table, ["image", "truth"], firsts, dali, names)
        print(table)


def draw(picture: Path, images: Sequence[Path], predictions: ImagePredictions, names: Sequence[str]) -> None:
    """Draw a PNG with each image above its most likely classes."""
    captions = (
        [f"{p:.0%} {names[c]}" for c, p in zip(classes[:_TOP], probabilities[:_TOP], strict=True)]
        for classes, probabilities in zip(predictions.classes, predictions.probabilities, strict=True)
    )
    tiles = [(decode_rgb(path.read_bytes()), caption) for path, caption in zip(images, captions, strict=True)]
    contact_sheet(tiles, columns=min(4, len(images)), side=_TILE).save(picture, "PNG")


@torch.inference_mode()
def _classify(model: nn.Module, batches: Iterable[torch.Tensor], keep: int | None = None) -> ImagePredictions:
    """Classify `batches`, each (n, 3, size, size) float32 and normalised; keep only the top `keep` classes."""
    probabilities, classes = [], []
    for images in batches:
        scores, numbers = model(images).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        probabilities.append(scores[:, :keep].clone())  # a view would hold the memory of all classes
        classes.append(numbers[:, :keep].clone())
    return ImagePredictions(classes=torch.cat(classes).numpy(), probabilities=torch.cat(probabilities).numpy())


def _with_dali(split: Split, data: DataConfig) -> Iterator[torch.Tensor]:
    """Yield batches of all images of `split`, exactly as an evaluation on the CPU sees them."""
    numbers = np.arange(len(split))
    batches = [numbers[start : start + _BATCH] for start in range(0, len(numbers), _BATCH)]
    pixels = PixelFormat(
        device_id=None, num_threads=data.num_threads or 2, dtype=torch.float32, channels_last=False, pinned=False
    )
    pipeline = EvaluationPipeline(split, batches, data, pixels)
    for _ in batches:
        images, _ = pipeline.run()
        yield images.clone()  # DALI reuses the memory


def _as_split(images: Sequence[Path], directory: Path) -> Split:
    """Make `images` the validation split of a dataset in `directory`, so that they go through the same code."""
    records: list[tuple[bytes, dict[str, bytes | str | int]]] = [
        (path.read_bytes(), {"image/class/label": 1, "image/filename": str(path)}) for path in images
    ]
    write_records(directory / "validation" / "validation-00000-of-00001", records)
    build_index(directory)
    return Split(directory, "validation")


def _with_pil(encoded: Sequence[Callable[[], bytes]], names: Sequence[str], data: DataConfig) -> Iterator[torch.Tensor]:
    """Yield batches of images, resized and cropped by torchvision as in most programs; as with DALI, EXIF rotation is
    ignored."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))

    def pixels(read: Callable[[], bytes], name: str) -> torch.Tensor:
        try:
            rgb = decode_rgb(read())
        except BadImageError as error:
            raise ConfigError(f"{name} {error}") from error
        size = data.eval_resized
        sides = [size, size] if data.eval_resize == "squash" else [size]
        resized = functional.resize(rgb, sides, functional.InterpolationMode(data.interpolation))
        return (functional.pil_to_tensor(functional.center_crop(resized, [data.eval_size])) - mean) / std

    for start in range(0, len(encoded), _BATCH):
        part = zip(encoded[start : start + _BATCH], names[start : start + _BATCH], strict=True)
        yield torch.stack([pixels(read, name) for read, name in part])
