"""``dali-train predict``: classify images by a run's model, decoded by DALI as in training, or by PIL as in most
programs."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchvision.transforms import functional

from dali_train.checkpoint.format import Probabilities
from dali_train.checkpoint.run_directory import local_run
from dali_train.checkpoint.trained_model import TrainedModel, Weights, load_trained
from dali_train.config import DataConfig
from dali_train.config.check import Extra
from dali_train.data.convert.image import MAX_ENCODED_BYTES, as_png, upright
from dali_train.data.dataset.image_file import (
    IMAGE_SUFFIXES,
    BadImageError,
    decode_failures,
    decode_rgb,
    has_wide_samples,
    image_size,
)
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.dataset.passed_over import HIDDEN, PassedOver, is_hidden, warn_passed_over
from dali_train.data.dataset.storage import open_storage, read_stored
from dali_train.data.dataset.tfrecord import write_records
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.errors import ConfigError
from dali_train.extras.image_names import file_names
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.extras.pictures.predictions import write_table
from dali_train.extras.pictures.sheets import contact_sheet
from dali_train.files import read_limited, temporary_directory
from dali_train.text import plural, printable
from dali_train.training.metrics import VIEWS, ClassTables, views_of, weighted_mean
from dali_train.training.pretrained import image_settings

_BATCH, _AT_ONCE = 32, 128  # images in a pass through the model, and in memory
_TILE, _IN_PICTURE = 300, 100  # pixels of an image in a picture, and how many it shows
Scores = tuple[NDArray[np.int64], NDArray[np.float32]]
"""The classes of each image, most likely first, and their probabilities; both (n, classes)."""
Decoded = Mapping[str, Iterable[torch.Tensor]]
"""By the decoder's name all images of a split, in batches as for the model."""
COMPARE_SEVERAL = Extra[Callable[[TrainedModel, Split, Decoded], tuple[list[str], Scores]]](
    "dali_train.extras.several_labels.judged:compare_several", "a dataset with several labels an image"
)
_TOP, _IN_TABLE = 3, 5  # classes per image that are printed, and that are in a table
_MOST_HEARD = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class ImagePredictions:
    """The classes of each image, most likely first, and their probabilities; both (n, classes)."""

    images: tuple[Path, ...]  # n files
    classes: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    class_names: tuple[str, ...]  # by class
    unreadable: Mapping[Path, str]  # files that are not images, and why
    damaged: tuple[Path, ...] = ()  # files of which a decoder complains, and decodes a part; known to the command alone

    @property
    def names(self) -> list[str]:
        """The name of each image's most likely class."""
        return [self.class_names[number] for number in self.classes[:, 0]]


@dataclass(frozen=True, kw_only=True)
class _Classifier:
    """A model with all that decides what it sees of a file."""

    model: nn.Module
    data: DataConfig
    class_names: tuple[str, ...]
    applies_orientation: bool  # turns photographs upright, as those that it was trained on were
    decoder: str
    probabilities: Probabilities = "softmax"  # sigmoid: each class has one of its own
    hears_libraries: bool = False  # collects what decoders write to the standard error, which is all the process's

    def predict(self, images: Sequence[Path], keep: int | None = None) -> ImagePredictions:
        """Classify files and the image files in directories; keep only the top `keep` classes.

        Raises:
            ConfigError: not even one of them is an image.
        """
        files, unreadable = _image_files(images)
        parts, classified, damaged = [], list[Path](), list[Path]()
        for start in range(0, len(files), _AT_ONCE):
            contents = dict[Path, bytes]()
            for path in files[start : start + _AT_ONCE]:
                with self._listening() as heard:
                    try:
                        contents[path] = self._read(path)
                    except OSError as error:
                        unreadable[path] = f"cannot be read: {error.strerror}"
                    except BadImageError as error:
                        unreadable[path] = str(error)
                    if path in contents and b"Corrupt JPEG data" in heard():
                        damaged.append(path)
            if contents:
                with self._listening():
                    parts.append(self._classify(contents, keep))
                    gc.collect()  # ends the pipeline, which reads ahead
                classified += contents
        if not parts:
            raise ConfigError(_describe_unreadable(unreadable, len(unreadable)))
        return ImagePredictions(
            images=tuple(classified),
            classes=np.concatenate([classes for classes, _ in parts]),
            probabilities=np.concatenate([probabilities for _, probabilities in parts]),
            class_names=self.class_names,
            unreadable=unreadable,
            damaged=tuple(damaged),
        )

    def _listening(self) -> AbstractContextManager[Callable[[], bytes]]:
        return captured_errors() if self.hears_libraries else nullcontext(bytes)

    def _read(self, path: Path) -> bytes:
        """Return a file as the data path takes it. Raises OSError, BadImageError: it cannot be read or decoded."""
        content = read_limited(path, MAX_ENCODED_BYTES)
        if self.applies_orientation:  # as a conversion with --apply-orientation turns it
            content = upright(content)
        try:
            sizes = np.array([image_size(content)], np.int32)
            is_read = not (has_wide_samples(content) if self.decoder == "pil" else decode_failures([content], sizes))
        except BadImageError:
            is_read = False
        if not is_read:  # DALI refuses or misreads it, or it has 16 bits: what a conversion makes of it, by PIL
            content = as_png(content)
        if self.decoder == "pil":
            decode_rgb(content)
        return content

    def _classify(self, contents: Mapping[Path, bytes], keep: int | None) -> Scores:
        if self.decoder == "pil":
            names = [str(path) for path in contents]
            return _classify(
                self.model,
                _with_pil([partial(bytes, content) for content in contents.values()], names, self.data),
                self.data,
                keep,
                activation=self.probabilities,
            )
        with temporary_directory() as directory:
            batches = batches_of(_as_split(contents, directory), self.data)
            return _classify(self.model, batches, self.data, keep, activation=self.probabilities)


def predict(
    model: nn.Module | Path | str, images: Sequence[Path | str], *, decoder: Literal["dali", "pil"] = "dali"
) -> ImagePredictions:
    """Classify image files, resized, cropped and normalised as in the evaluation of the run.

    Args:
        model: a run directory, or a model from `load_model` or timm, whose `pretrained_cfg` sets the preprocessing.
        images: files, and directories of files; what is hidden in these, or has no image's suffix, is passed over with
            a warning. They are turned upright by their EXIF orientation if the images were that the model was trained
            on (`dali-train data convert --apply-orientation`).

    Returns:
        Predictions for all files that can be decoded; `unreadable` has the others.

    Raises:
        ConfigError: none of the files is an image, or there is no such run.
    """
    if not isinstance(model, nn.Module):
        classifier = _classifier_of(load_trained(Path(model)), decoder)
    else:
        settings: Any = model
        cfg = getattr(model, "pretrained_cfg", None) or {}
        count = int(getattr(model, "num_classes", 0) or cfg.get("num_classes") or 0)
        classifier = _Classifier(
            model=model,
            data=DataConfig(root=".", **image_settings(model)),
            class_names=tuple(cfg.get("label_names") or map(str, range(count))),
            applies_orientation=bool(getattr(settings, "applies_orientation", False)),
            decoder=decoder,
            probabilities="sigmoid" if getattr(settings, "probabilities", None) == "sigmoid" else "softmax",
        )
    return classifier.predict([*map(Path, images)])


@contextmanager
def captured_errors() -> Iterator[Callable[[], bytes]]:
    """Collect what libraries in C write to the standard error, and yield a function that returns it. What Python writes
    there is still seen."""
    shown = sys.stderr
    with TemporaryFile() as file, os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace") as kept:

        def heard() -> bytes:
            return os.pread(file.fileno(), _MOST_HEARD, 0)

        os.dup2(file.fileno(), 2)
        try:
            if _is_descriptor_2(shown):
                sys.stderr = kept
            yield heard
        finally:
            sys.stderr = shown
            os.dup2(kept.fileno(), 2)


def _is_descriptor_2(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2
    except (AttributeError, OSError):  # a notebook's
        return False


def _classifier_of(trained: TrainedModel, decoder: str, *, hears_libraries: bool = False) -> _Classifier:
    return _Classifier(
        model=trained.model,
        data=trained.config.data,
        class_names=trained.class_names,
        applies_orientation=trained.applies_orientation,
        decoder=decoder,
        probabilities=trained.probabilities,
        hears_libraries=hears_libraries,
    )


def _image_files(images: Sequence[Path]) -> tuple[list[Path], dict[Path, str]]:
    """Return the files, in directories all with an image's suffix, and why some of `images` give none."""
    files, unreadable = dict[Path, None](), dict[Path, str]()
    for path in images:
        if path.is_dir():
            inside, closed = _images_below(path)
            files |= dict.fromkeys(inside)
            unreadable |= closed
            if not inside and not closed:
                unreadable[path] = f"has no file with the suffix of an image ({', '.join(sorted(IMAGE_SUFFIXES))})"
        elif path.exists():
            files[path] = None
        else:
            unreadable[path] = "does not exist"
    return [*files], unreadable


def _images_below(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the image files below a directory in order, and the folders that cannot be read; warn of other files."""
    files, closed = list[Path](), dict[Path, str]()
    passed_over = Counter[PassedOver]()

    def note(error: OSError) -> None:
        closed[Path(error.filename)] = f"cannot be read: {error.strerror}"

    for folder, folders, names in os.walk(root, onerror=note):
        place = "" if Path(folder) == root else str(Path(folder).relative_to(root))
        passed_over[PassedOver(place, HIDDEN)] += sum(map(is_hidden, [*folders, *names]))
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        links = sum(Path(folder, name).is_symlink() for name in folders)  # which may lead around in a circle
        passed_over[PassedOver(place, "link to a folder")] += links
        for name in names:
            path = Path(folder, name)
            if is_hidden(name):
                continue
            if path.suffix.lower() in IMAGE_SUFFIXES:
                files.append(path)
            else:
                passed_over[PassedOver.by_suffix(place, name)] += 1
    warn_passed_over(root, +passed_over)
    return sorted(files), closed


def _describe_unreadable(unreadable: Mapping[Path, str], count: int) -> str:
    shown = [f"{path} {reason}" for path, reason in unreadable.items()][:3]
    more = f"; and {len(unreadable) - len(shown)} more" if len(unreadable) > len(shown) else ""
    return f"{len(unreadable)} of {plural(count, 'image')} cannot be classified: {'; '.join(shown)}{more}"


def print_predictions(
    run: Path | str,
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
        run: a run directory, or the URL of a run's mirror.
        images: files and directories.
        decoder: ``dali`` or ``pil``.
        picture: where to draw the images with their most likely classes.
        table: where to write a CSV file of the images, or of the validation split.
        checkpoint, weights: see `load_trained`.

    Raises:
        ConfigError: a file is missing or is not an image; after the others were classified.
        CheckpointError, DatasetError: see `load_trained`, `Split` and `EvaluationPipeline`.
    """
    with local_run(run, checkpoint) as run_dir:
        trained = load_trained(run_dir, checkpoint, weights)
    print(trained.describe(str(run)))
    if not images:
        if picture is not None:
            raise ConfigError("--picture needs images: name some files")
        compare_decoders(trained, table)
        return
    predictions = _classifier_of(trained, decoder, hears_libraries=True).predict(images, keep=_IN_TABLE)
    names = [printable(name) for name in trained.class_names]
    width = max(len(str(path)) for path in predictions.images)
    scores = zip(predictions.classes, predictions.probabilities, strict=True)
    for path, (classes, probabilities) in zip(predictions.images, scores, strict=True):
        best = "  ".join(f"{names[c]} {p:.1%}" for c, p in zip(classes[:_TOP], probabilities[:_TOP], strict=True))
        print(f"{printable(str(path)):<{width}}  {best}")
    if picture is not None:
        draw(picture, predictions, names, turns=trained.applies_orientation)
        print(picture)
    if table is not None:
        rows = [[os.fsencode(path).decode(errors="backslashreplace")] for path in predictions.images]
        _write_likeliest(table, ["image"], rows, (predictions.classes, predictions.probabilities), names)
        print(table)
    for path in predictions.damaged:
        print(
            f"warning: {printable(str(path))} is damaged: what could be decoded of it was classified", file=sys.stderr
        )
    if predictions.unreadable:
        for path, reason in predictions.unreadable.items():
            print(f"{printable(str(path))} {reason}", file=sys.stderr)
        count = len(predictions.images) + len(predictions.unreadable)
        raise ConfigError(f"{len(predictions.unreadable)} of {plural(count, 'image')} cannot be classified")


def _write_likeliest(
    path: Path, heads: list[str], firsts: list[list[Any]], scores: Scores, names: Sequence[str]
) -> None:
    """Write a row per image: the columns `firsts` with the headings `heads`, then its top classes with scores."""
    kept = min(_IN_TABLE, scores[0].shape[1])
    heads = heads + [f"{what} {rank}" for rank in range(1, kept + 1) for what in ("class", "score")]
    pairs = (
        [cell for c, p in zip(classes[:kept], values[:kept], strict=True) for cell in (names[c], round(float(p), 5))]
        for classes, values in zip(*scores, strict=True)
    )
    write_table(path, heads, (first + rest for first, rest in zip(firsts, pairs, strict=True)))


def compare_decoders(trained: TrainedModel, table: Path | None) -> None:
    """Print top-1 on the validation split, or mAP with several labels an image, decoded and resized by DALI and by PIL,
    and DALI's accuracy by class; write the top 5 classes that DALI's decoding gives into `table`."""
    data = trained.config.data
    split = open_split(data, "validation")
    if split.manifest.encoding == "raw":
        raise ConfigError(
            f"{data.root} holds raw pixels, so there are no decoders to compare: name image files to classify"
        )
    numbers = np.arange(len(split))
    storage = open_storage(split, data)
    encoded = [lambda number=number: read_stored(storage, split, number[None])[0].tobytes() for number in numbers]
    with_pil = _with_pil(encoded, [f"image {number}" for number in numbers], data)
    with_dali = batches_of(split, data, channels_last=trained.config.model.channels_last)
    decoded = {"DALI": with_dali, "PIL": with_pil}
    compare = _compare if split.label_kind.is_class else COMPARE_SEVERAL.load()
    lines, scores = compare(trained, split, decoded)
    print("\n".join(lines))
    names = trained.class_names
    if table is not None:
        labels = [split.label_text(label, names) for label in split.rows["label"].tolist()]
        firsts = list(map(list, zip(numbers.tolist(), file_names(split, numbers), labels, strict=True)))
        _write_likeliest(table, ["image", "file", "truth"], firsts, scores, names)
        print(table)


def _compare(trained: TrainedModel, split: Split, decoded: Decoded) -> tuple[list[str], Scores]:
    """Return lines on the accuracy with both decoders, and the scores with the first."""
    labels, names = split.rows["label"].astype(np.int64), trained.class_names
    scores = [_classify(trained.model, batches, trained.config.data, keep=_IN_TABLE) for batches in decoded.values()]
    predictions = [classes[:, 0] for classes, _ in scores]
    dali, pil = (float((classes == labels).mean()) for classes in predictions)
    changed = int((predictions[0] != predictions[1]).sum())
    line = (
        f"{len(split)} validation images of {trained.config.data.root}: top-1 {dali:.2%} decoded by DALI, {pil:.2%} by "
        f"PIL, a difference of {abs(dali - pil) * 100:.2f} points; {changed} images are classified differently"
    )
    return [line, *ClassTables(labels, predictions[0], len(names)).describe(names)], scores[0]


def draw(picture: Path, predictions: ImagePredictions, names: Sequence[str], *, turns: bool) -> None:
    """Draw a PNG with each image, at most `_IN_PICTURE`, above its most likely classes."""
    scores = zip(predictions.classes, predictions.probabilities, strict=True)
    tiles = []
    for path, (classes, probabilities) in islice(zip(predictions.images, scores, strict=True), _IN_PICTURE):
        caption = [f"{p:.0%} {names[c]}" for c, p in zip(classes[:_TOP], probabilities[:_TOP], strict=True)]
        tiles.append((decode_rgb(as_png(path.read_bytes(), turn=turns)), caption))
    contact_sheet(tiles, columns=min(4, len(tiles)), side=_TILE).save(picture, "PNG")


@torch.inference_mode()
def _classify(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    data: DataConfig,
    keep: int | None = None,
    *,
    activation: Probabilities = "softmax",
) -> Scores:
    """Return the classes, most likely first, and their probabilities, of `batches`, each (n, 3, size, size) float32 and
    normalised, over the views of data.eval_views; only the top `keep` classes.

    Args:
        activation: sigmoid: the probability of each class is that an image has it, whatever else it has.
    """
    probabilities, classes = [], []
    for images in batches:
        values = logits(model, images, data)
        of_each = values.sigmoid() if activation == "sigmoid" else values.softmax(dim=-1)
        scores, numbers = of_each.sort(dim=-1, descending=True, stable=True)
        probabilities.append(scores[:, :keep].clone())  # a view would hold the memory of all classes
        classes.append(numbers[:, :keep].clone())
    return torch.cat(classes).numpy(), torch.cat(probabilities).numpy()


def logits(model: nn.Module, images: torch.Tensor, data: DataConfig) -> torch.Tensor:
    """Return the mean logits, (n, classes), over the views of data.eval_views."""
    weights = VIEWS[data.eval_views]
    return weighted_mean([model(view) for view in views_of(images, len(weights))], weights)


def batches_of(
    split: Split, data: DataConfig, numbers: NDArray[np.int64] | None = None, *, channels_last: bool = False
) -> Iterator[torch.Tensor]:
    """Yield batches of the images of `split` with these `numbers`, (n,), or of all, exactly as an evaluation on the CPU
    sees them.

    Args:
        channels_last: as in the model's config: a CPU convolves such images in up to half the time.
    """
    numbers = np.arange(len(split)) if numbers is None else numbers
    batches = [numbers[start : start + _BATCH] for start in range(0, len(numbers), _BATCH)]
    pixels = PixelFormat(
        device_id=None,
        num_threads=data.num_threads or 2,
        dtype=torch.float32,
        channels_last=channels_last,
        pinned=False,
    )
    pipeline = EvaluationPipeline(split, batches, data, pixels)
    for _ in batches:
        images, _ = pipeline.run()
        yield images.clone()  # DALI reuses the memory


def _as_split(images: Mapping[Path, bytes], directory: Path) -> Split:
    """Make `images` the validation split of a dataset in `directory`, so that they go through the same code."""
    records: list[tuple[bytes, dict[str, bytes | str | int]]] = [
        (content, {"image/class/label": 1, "image/filename": os.fsencode(path)}) for path, content in images.items()
    ]
    write_records(directory / "validation" / "validation-00000-of-00001", records)
    build_index(directory, shows_progress=False)
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
        resized = functional.resize(rgb, sides, functional.InterpolationMode(data.eval_filter))
        return (functional.pil_to_tensor(functional.center_crop(resized, [data.eval_size])) - mean) / std

    for start in range(0, len(encoded), _BATCH):
        part = zip(encoded[start : start + _BATCH], names[start : start + _BATCH], strict=True)
        yield torch.stack([pixels(read, name) for read, name in part])
