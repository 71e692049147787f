"""Datasets for measuring where no photographs are at hand: generated JPEGs, always the same, as costly to decode.

An image is noise whose amplitude grows with its wavelength, as in photographs. Sizes are those of 1,000 of ImageNet's:
201,729 pixels and 109,576 bytes on average. 761 of them have colour at full resolution (4:4:4), so all of these have.
"""

import argparse
import io
import json
from pathlib import Path

import numpy as np
from crc32c import crc32c
from PIL import Image

from dali_train.data.dataset.manifest import Manifest, SplitName, checksums_path, index_path
from dali_train.data.dataset.tfrecord import write_records
from dali_train.extras.indexing.foreign_shards import build_index


def generated_jpeg(seed: int) -> bytes:
    """A JPEG of 360 to 460 x 440 to 540 pixels and about 110 kB."""
    rng = np.random.default_rng(seed)
    height, width = int(rng.integers(360, 461)), int(rng.integers(440, 541))
    pixels = np.full((height, width, 3), 128, dtype=np.float32)
    for octave in range(8):
        shape = (max(2, height >> octave), max(2, width >> octave), 3)
        noise = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        pixels += (np.asarray(noise, dtype=np.float32) - 127.5) * (0.077 * 1.25**octave)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90, subsampling=0)
    return buffer.getvalue()


def write_shard(path: Path, seeds: range, *, num_classes: int) -> None:
    """A TFRecord file of generated images; the label follows from the seed."""
    write_records(path, ((generated_jpeg(seed), {"image/class/label": 1 + seed % num_classes}) for seed in seeds))


def write_dataset(root: Path, *, num_train: int, num_validation: int = 0, num_classes: int = 10) -> Manifest:
    """An indexed dataset of generated images, one shard a split."""
    splits: dict[SplitName, range] = {
        "train": range(num_train),
        "validation": range(num_train, num_train + num_validation),
    }
    for split, seeds in splits.items():
        if seeds:
            write_shard(root / split / f"{split}-00000-of-00001", seeds, num_classes=num_classes)
    return build_index(root, num_classes=num_classes)


def main() -> None:
    """Write generated JPEGs as a tree of eight classes, for a conversion."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--images", type=int, default=512, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    for seed in range(options.images):
        path = options.folder / f"class-{seed % 8}" / f"{seed:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generated_jpeg(seed))


def accept_index(root: Path) -> None:
    """Put the checksums of the index as it is now into dataset.json, so that its rows alone are judged."""
    path = root / "dataset.json"
    manifest = json.loads(path.read_text())
    for name, split in manifest["splits"].items():
        for field, file in (("index", index_path(root, name)), ("image_checksums", checksums_path(root, name))):
            split[f"{field}_crc32c"] = f"{crc32c(file.read_bytes()):08x}"
    path.write_text(json.dumps(manifest))


if __name__ == "__main__":
    main()
