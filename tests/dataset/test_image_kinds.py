"""What every kind of image file becomes in every reader: the table in image-kinds.md, made from these outcomes.

python -m tests.dataset.test_image_kinds
"""

import io
import json
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dali_train
from dali_train.cli import main
from dali_train.config import DataConfig
from dali_train.data.convert.image import EncodingOptions, MemoryBudget, prepare
from dali_train.data.dataset.image_file import IMAGE_FORMATS, IMAGE_SUFFIXES, BadImageError, decode_rgb
from dali_train.data.dataset.index import Split, sizes_of
from dali_train.data.dataset.storage import open_storage
from dali_train.data.loading.dali import Feed, crop_graph, crop_inputs, decode_repeatedly
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.loading.pipelines import EvaluationPipeline
from tests.conftest import REPOSITORY, encoded
from tests.dataset.image_kinds import KINDS, SIZES, Kind, picture

DOCUMENT = REPOSITORY / "tests" / "dataset" / "image-kinds.md"
NORMALISE = ((0, 0, 0), (255, 255, 255))
READERS = ("convert", "in place", "evaluation", "predict")
PREDICTS: tuple[tuple[str, Literal["dali", "pil"]], ...] = (("predict", "dali"), ("predict by PIL", "pil"))
SIDE = 32  # of evaluated images; as long as the short side of each file
BATCH = 16
AVAILABLE = [kind for kind in KINDS if kind.is_available]
Outcomes = dict[str, dict[str, set[str]]]  # kind -> reader, or "reason" -> what was found of its files


class File(NamedTuple):
    kind: Kind
    path: Path
    pixels: np.ndarray | None  # that it should have, (height, width, 3) uint8; None: PIL cannot decode it


def expected_pixels(content: bytes) -> np.ndarray | None:
    """Return PIL's pixels; where it has 16 bits and would clip them at 255, scaled."""
    try:
        image = Image.open(io.BytesIO(content))
        if image.mode.startswith("I"):
            grey = np.rint(np.asarray(image).astype(np.float64) / 257).astype(np.uint8)
            return np.dstack([grey] * 3)
        return np.asarray(image.convert("RGB"))
    except Exception:  # PIL's decoders raise nearly any kind
        return None


def grey_levels(images: torch.Tensor) -> np.ndarray:
    """(n, 3, h, w) normalised by `NORMALISE` -> (n, h, w, 3) uint8."""
    return (255 * images).permute(0, 2, 3, 1).round().byte().numpy()


def describe_difference(found: np.ndarray, file: File) -> str:
    expected = file.pixels
    assert expected is not None, f"{file.kind.name}: decoded, which PIL does not"
    assert found.shape == expected.shape, f"{file.kind.name}: {found.shape}, {expected.shape} expected"
    difference = np.abs(found.astype(int) - expected.astype(int)).max()
    return "equal" if difference == 0 else "within 1" if difference == 1 else f"differs by {difference}"


def centers(file: File) -> File:
    """Return a file with only the pixels that an evaluation sees."""
    if file.pixels is None:
        return file
    height, width = file.pixels.shape[:2]
    top, left = round((height - SIDE) / 2), round((width - SIDE) / 2)
    return file._replace(pixels=file.pixels[top : top + SIDE, left : left + SIDE])


def converted(file: File) -> str:
    content, budget = file.path.read_bytes(), MemoryBudget(10**8)
    try:
        stored = prepare(content, EncodingOptions(), budget)
        if stored.content == content:
            (pixels,) = next(decode_repeatedly([np.frombuffer(content, np.uint8)], None, rounds=1))
            return f"kept, {describe_difference(pixels, file)}"
        raw = prepare(content, EncodingOptions(format="raw"), budget)
    except BadImageError:
        return "refused"
    found = np.frombuffer(raw.content, np.uint8).reshape(raw.height, raw.width, 3)
    return f"re-encoded, {describe_difference(found, file)}"


def trained(split: Split) -> Iterator[np.ndarray]:
    """Yield what training sees of each image of a split, whole."""
    storage = open_storage(split, DataConfig(root=str(split.root)))
    batches = []
    for first in range(0, len(split), BATCH):
        images = np.arange(first, min(first + BATCH, len(split)))
        sizes = sizes_of(split.rows[images])
        batches.append(SimpleNamespace(images=images, corners=(np.zeros_like(sizes), sizes)))
    cycle = iter([*batches, *batches])  # the graph reads ahead
    pipe = crop_graph(Feed(crop_inputs(split, storage), lambda: next(cycle)), batch_size=BATCH, num_threads=1)
    pipe.build()
    for _ in batches:
        (crops,) = pipe.run()
        yield from (np.array(crop) for crop in crops)


def evaluated(split: Split) -> Iterator[np.ndarray]:
    """Yield what an evaluation sees of each image of a split, (32, 32, 3)."""
    data = DataConfig(root=str(split.root), eval_size=SIDE, eval_resize_to=SIDE, normalise=NORMALISE)
    batches = [np.arange(first, min(first + BATCH, len(split))) for first in range(0, len(split), BATCH)]
    pixels = PixelFormat(device_id=None, num_threads=1, dtype=torch.float32, channels_last=False, pinned=False)
    pipeline = EvaluationPipeline(split, batches, data, pixels)
    for _ in batches:
        images, _ = pipeline.run()
        yield from grey_levels(images)


class Seen(nn.Module):
    """Keeps the images that it is given, from 0 to 255."""

    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.images: list[np.ndarray] = []
        size = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0, "interpolation": "bilinear"}
        self.pretrained_cfg = {**size, "mean": (0.0, 0.0, 0.0), "std": (1.0,) * 3, "num_classes": 2}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images += [*grey_levels(images)]
        return torch.zeros(len(images), 2)


def written(directory: Path) -> list[File]:
    """Write the files of all kinds that can be made here into class folders."""
    files = []
    for number, kind in enumerate(AVAILABLE):
        for variant, content in enumerate(kind.files()):
            path = directory / "photos" / f"class {variant % 2}" / f"{number:03d}-{variant}.png"  # whatever it is
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            files.append(File(kind, path, expected_pixels(content)))
    return files


def find_outcomes(directory: Path) -> Outcomes:
    files = written(directory)
    by_name = {file.path.name: file for file in files}
    found: Outcomes = defaultdict(lambda: defaultdict(set))
    for file in files:
        found[file.kind.name]["convert"].add(converted(file))
    out = directory / "index"
    assert main(["data", "index", str(directory / "photos"), "--out", str(out), "--on-bad", "skip"]) == 0
    for line in (out / "quarantine.jsonl").read_text().splitlines():
        bad = json.loads(line)
        kind = by_name[Path(bad["file"]).name].kind
        found[kind.name]["in place"].add("refused")
        found[kind.name]["evaluation"].add("refused")
        found[kind.name]["reason"].add(re.split("[:;]|, of which", bad["reason"])[0])
    split = Split(out, "train")
    indexed = [by_name[Path(name).name] for name in split.file_names()]
    for file, pixels, center in zip(indexed, trained(split), evaluated(split), strict=True):
        found[file.kind.name]["in place"].add(describe_difference(pixels, file))
        found[file.kind.name]["evaluation"].add(describe_difference(center, centers(file)))
        by_pil = np.asarray(decode_rgb(file.path.read_bytes()))
        found[file.kind.name]["pictures"].add(describe_difference(by_pil, file))
    for reader, decoder in PREDICTS:
        seen = Seen()
        predictions = dali_train.predict(seen, [file.path for file in files], decoder=decoder)
        for path in predictions.unreadable:
            found[by_name[path.name].kind.name][reader].add("refused")
        for path, pixels in zip(predictions.images, seen.images, strict=True):
            found[by_name[path.name].kind.name][reader].add(describe_difference(pixels, centers(by_name[path.name])))
    return found


def row(name: str, cells: dict[str, set[str]]) -> str:
    """Return a kind's row of the table in Markdown."""
    columns = [name, *(" or ".join(sorted(cells[reader])) for reader in READERS), "; ".join(sorted(cells["reason"]))]
    return f"| {' | '.join(columns)} |\n"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return find_outcomes(tmp_path_factory.mktemp("kinds"))


def test_pixels_are_pils_or_the_file_is_refused(outcomes: Outcomes) -> None:
    """In every reader, and with a reason."""
    assert len(outcomes) == len(AVAILABLE) >= 40
    assert 4 * len(AVAILABLE) >= 200
    allowed = {"equal", "within 1", "refused"}
    for name, cells in outcomes.items():
        assert cells["in place"] | cells["evaluation"] | cells["predict"] <= allowed, (name, dict(cells))
        assert {cell.split(", ")[-1] for cell in cells["convert"]} <= allowed, (name, dict(cells))
        assert cells["in place"] == cells["evaluation"], (name, dict(cells))
        assert cells["pictures"] | cells["predict by PIL"] <= allowed, (name, dict(cells))
        assert ("refused" in cells["predict by PIL"]) == ("refused" in cells["predict"]), (name, dict(cells))
        assert bool(cells["reason"]) == ("refused" in cells["in place"]), (name, dict(cells))
        assert "within 1" not in cells["in place"] or "16 bits" in name or "palette" in name, (name, dict(cells))
        if "refused" not in cells["convert"]:
            assert "refused" not in cells["predict"], (name, "what a conversion reads is predicted")


def test_the_document_has_these_rows(outcomes: Outcomes) -> None:
    """Without the programs that make some kinds, the rows of the others."""
    document = DOCUMENT.read_text()
    for name, cells in outcomes.items():
        assert row(name, cells) in document, f"{row(name, cells)}run python -m tests.dataset.test_image_kinds"
    if len(AVAILABLE) == len(KINDS):
        assert document.count("\n| ") == len(KINDS) + 1


def test_files_are_found_by_every_suffix_of_these_kinds(tmp_path: Path) -> None:
    read = {*IMAGE_FORMATS, "GIF", "MPO", "DIB"}
    registered = {suffix for suffix, name in Image.registered_extensions().items() if name in read}
    assert registered - IMAGE_SUFFIXES == {".pfm"}, "floating-point samples alone"
    for number, suffix in enumerate([*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES), ".heic", ".pfm"]):
        path = tmp_path / "photos" / f"class {number % 2}" / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number, *SIZES[0]), "JPEG"))
    assert main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "index")]) == 0
    assert len(Split(tmp_path / "index", "train")) == 2 * len(IMAGE_SUFFIXES)


if __name__ == "__main__":
    if len(AVAILABLE) < len(KINDS):
        sys.exit("install ImageMagick, libtiff's tools and libjpeg-turbo's first: without them, rows are missing")
    scratch = Path(tempfile.mkdtemp())
    rows = [row(name, cells) for name, cells in find_outcomes(scratch).items()]
    shutil.rmtree(scratch)
    text = DOCUMENT.read_text()
    start = text.index("| kind |")
    heads = f"| kind | {' | '.join(READERS)} | why it is refused in place |\n" + "|---" * (len(READERS) + 2) + "|\n"
    DOCUMENT.write_text(text[:start] + heads + "".join(rows))
