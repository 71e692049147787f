"""A dataset at a glance: counts and sizes as text; histograms and a sheet of images as a picture."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.pictures import PAPER, contact_sheet, picture
from dali_train.data.dataset.storage import open_shards
from dali_train.data.sampling.rng import shuffled
from dali_train.text import span

_TILE, _HEADER, _LEAST_WIDTH, _DPI = 144, 180, 640, 100  # pixels, and pixels per inch
_SHEET_STREAM = 0x5348_4545_54


def describe(manifest: Manifest, splits: Sequence[Split]) -> list[str]:
    """Return lines of text: what the splits hold, and the images' sizes."""
    lines, names = [], manifest.class_names
    for split in splits:
        total = sum(shard.num_bytes for shard in split.shards)
        counts = np.bincount(split.rows["label"], minlength=manifest.num_classes)
        lines += [
            f"{split.name}: {len(split):,} images, {manifest.num_classes:,} classes, {len(split.shards):,} shards, "
            f"{total / 1e6:,.1f} MB" + (" (raw RGB pixels)" if manifest.encoding == "raw" else ""),
            f"  images per class: {counts.min():,} ({names[int(counts.argmin())]}), median {np.median(counts):,.0f}, "
            f"{counts.max():,} ({names[int(counts.argmax())]})",
        ]
        sizes = {
            "shorter side, pixels": np.minimum(split.rows["height"], split.rows["width"]),
            "longer side, pixels": np.maximum(split.rows["height"], split.rows["width"]),
            "stored image, bytes": split.rows["size"],
        }
        for title, values in sizes.items():
            lines.append(f"  {title}: {span(values.min(), values.max())}, median {np.median(values):,.0f}")
    return lines


def overview(split: Split, *, rows: int, columns: int, seed: int) -> Image.Image:
    """Draw `rows` x `columns` images chosen by `seed`, each with its class, below the split's counts and histograms.

    Raises:
        DatasetError: an image that cannot be decoded.
    """
    chosen = shuffled(np.random.Philox(key=[seed, _SHEET_STREAM]), len(split))[: rows * columns].tolist()
    names, stored = split.manifest.class_names, open_shards(split).read(np.array(chosen))
    pictures = [
        (picture(split, n, content), [names[int(split.rows[n]["label"])]])
        for n, content in zip(chosen, stored, strict=True)
    ]
    sheet = contact_sheet(pictures, columns=columns, side=_TILE)
    header = _header(split, max(sheet.width, _LEAST_WIDTH))
    page = Image.new("RGB", (header.width, header.height + sheet.height), PAPER)
    page.paste(header, (0, 0))
    page.paste(sheet, (0, header.height))
    return page


def _header(split: Split, width: int) -> Image.Image:
    """Draw the split's name and counts, and three histograms side by side, `width` pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a tenth of a second to import
    from matplotlib.figure import Figure

    counts = np.bincount(split.rows["label"], minlength=split.num_classes)
    panels = {
        "images per class": counts,
        "shorter side, pixels": np.minimum(split.rows["height"], split.rows["width"]),
        "stored image, bytes": split.rows["size"],
    }
    figure = Figure(figsize=(width / _DPI, _HEADER / _DPI), dpi=_DPI, facecolor=PAPER, layout="constrained")
    text = f"{len(split):,} images in {split.num_classes:,} classes, {span(counts.min(), counts.max())} per class"
    figure.suptitle(f"{split.dataset_name}: {split.name}, {text}", fontsize=10, parse_math=False)
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.hist(values, bins=24)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
