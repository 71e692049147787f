"""A dataset at a glance: counts and size histograms as text, and a sheet of images as a picture."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.pictures import INK, PAPER, contact_sheet, font, picture
from dali_train.data.sampling.rng import shuffled

_BAR_WIDTH = 40  # characters
_TILE, _MARGIN, _HEADER, _PANEL_GAP, _LEAST_WIDTH = 144, 10, 160, 24, 640  # pixels
_FAINT, _BAR = "#6e7781", "#4c78a8"
_SHEET_STREAM = 0x5348_4545_54


def describe(manifest: Manifest, splits: Sequence[Split]) -> list[str]:
    """Lines of text: what the splits hold, and histograms of the images' sizes."""
    lines, names = [], manifest.class_names
    for split in splits:
        total = sum(shard.num_bytes for shard in split.shards)
        counts = np.bincount(split.rows["label"], minlength=manifest.num_classes)
        lines += [
            f"{split.name}: {len(split):,} images, {manifest.num_classes:,} classes, {len(split.shards):,} shards, "
            f"{total / 1e6:,.1f} MB" + (" (raw RGB pixels)" if manifest.encoding == "raw" else ""),
            f"  images per class: {counts.min():,} ({names[int(counts.argmin())]}), median {np.median(counts):,.0f}, "
            f"{counts.max():,} ({names[int(counts.argmax())]})",
            *_histogram("shorter side, pixels", np.minimum(split.rows["height"], split.rows["width"])),
            *_histogram("longer side, pixels", np.maximum(split.rows["height"], split.rows["width"])),
            *_histogram("stored image, bytes", split.rows["size"]),
        ]
    return lines


def _histogram(title: str, values: NDArray[np.unsignedinteger]) -> list[str]:
    """Bars over bins of equal ratio, since sizes spread over decades."""
    low, high = int(values.min()), int(values.max())
    if low == high:
        return [f"  {title}: all {low:,}"]
    edges, counts = _bins(values)
    digits = len(f"{high:,}")
    lines = [f"  {title}: {low:,} to {high:,}, median {np.median(values):,.0f}"]
    for start, count in zip(edges[:-1], counts, strict=True):
        bar = "#" * round(_BAR_WIDTH * count / counts.max()) or ("." if count else "")
        lines.append(f"    from {round(start):>{digits},} {count:>9,} {bar}")
    return lines


def _bins(values: NDArray[np.unsignedinteger], *, num_bins: int = 10) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(edges, counts) of `num_bins` bins whose edges have one ratio."""
    edges = np.geomspace(int(values.min()), int(values.max()) + 1, num_bins + 1)
    counts, _ = np.histogram(values, edges)
    return edges, counts


def overview(split: Split, *, rows: int, columns: int, seed: int) -> Image.Image:
    """`rows` x `columns` images chosen by `seed`, each with its class, below the split's counts and histograms.

    Raises:
        DatasetError: an image that cannot be decoded.
    """
    chosen = shuffled(np.random.Philox(key=[seed, _SHEET_STREAM]), len(split))[: rows * columns].tolist()
    names = split.manifest.class_names
    sheet = contact_sheet(
        [(picture(split, n), names[int(split.rows[n]["label"])]) for n in chosen], columns=columns, side=_TILE
    )
    page = Image.new("RGB", (max(sheet.width, _LEAST_WIDTH), _HEADER + sheet.height), PAPER)
    _draw_header(ImageDraw.Draw(page), split, page.width)
    page.paste(sheet, (0, _HEADER))
    return page


def _draw_header(draw: ImageDraw.ImageDraw, split: Split, width: int) -> None:
    """The split's name and counts, and three histograms side by side."""
    counts = np.bincount(split.rows["label"], minlength=split.num_classes)
    draw.text((_MARGIN, _MARGIN), f"{split.root.resolve().name}: {split.name}", fill=INK, font=font(18))
    text = f"{len(split):,} images in {split.num_classes:,} classes, {counts.min():,} to {counts.max():,} per class"
    draw.text((_MARGIN, _MARGIN + 28), text, fill=_FAINT, font=font(12))
    panels = {
        "images per class": counts,
        "shorter side, pixels": np.minimum(split.rows["height"], split.rows["width"]),
        "stored image, bytes": split.rows["size"],
    }
    panel_width = (width - 2 * _MARGIN - (len(panels) - 1) * _PANEL_GAP) // len(panels)
    for number, (title, values) in enumerate(panels.items()):
        left = _MARGIN + number * (panel_width + _PANEL_GAP)
        _draw_histogram(
            draw, title, values, left=left, top=_MARGIN + 52, width=panel_width, height=_HEADER - _MARGIN - 62
        )


def _draw_histogram(
    draw: ImageDraw.ImageDraw, title: str, values: NDArray[np.integer], *, left: int, top: int, width: int, height: int
) -> None:
    small = font(10)
    low, high = int(values.min()), int(values.max())
    draw.text(
        (left, top), f"{title}, {low:,} to {high:,}" if low < high else f"{title}: all {low:,}", fill=_FAINT, font=small
    )
    bottom = top + height - 2
    draw.line((left, bottom, left + width, bottom), fill=_FAINT)
    counts = np.ones(1) if low == high else _bins(np.maximum(values, 1), num_bins=24)[1]
    step = width / len(counts)
    for number, count in enumerate(counts.tolist()):
        bar = round((height - 20) * count / counts.max())
        if count:
            x = left + round(number * step)
            draw.rectangle((x, bottom - max(1, bar), x + max(1, round(step) - 2), bottom - 1), fill=_BAR)
