"""A dataset at a glance: counts and size histograms as text, and a sheet of images as a picture."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dali_train.data.draws import shuffled
from dali_train.data.index import Split
from dali_train.data.manifest import Manifest

_BAR_WIDTH = 40  # characters
_TILE, _GAP, _CAPTION, _MARGIN = 144, 8, 18, 20  # pixels
_PAPER, _INK, _FAINT, _BAR = "#ffffff", "#1f2328", "#6e7781", "#4c78a8"
_SHEET_STREAM = 0x5348_4545_54


def describe(manifest: Manifest, splits: Sequence[Split]) -> list[str]:
    """Lines of text: what the splits hold, and histograms of the images' sizes."""
    lines = []
    for split in splits:
        total = sum(shard.num_bytes for shard in split.shards)
        counts = np.bincount(split.rows["label"], minlength=manifest.num_classes)
        lines += [
            f"{split.name}: {len(split):,} images, {manifest.num_classes:,} classes, {len(split.shards):,} shards, "
            f"{total / 1e6:,.1f} MB" + (" (bare RGB pixels)" if manifest.encoding == "raw" else ""),
            f"  images a class: {counts.min():,} ({manifest.class_names[int(counts.argmin())]}), median {np.median(counts):,.0f}, "
            f"{counts.max():,} ({manifest.class_names[int(counts.argmax())]})",
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


def contact_sheet(split: Split, *, rows: int, columns: int, seed: int) -> Image.Image:
    """`rows` x `columns` images chosen by `seed`, each with its class, below the split's counts and histograms."""
    chosen = shuffled(np.random.Philox(key=[seed, _SHEET_STREAM]), len(split))[: rows * columns]
    rows = -(-len(chosen) // columns)
    header = 150
    width = 2 * _MARGIN + columns * (_TILE + _GAP) - _GAP
    height = 2 * _MARGIN + header + rows * (_TILE + _CAPTION + _GAP)
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _draw_header(draw, split, width, header)
    font = ImageFont.load_default(12)
    for place, image in enumerate(chosen.tolist()):
        left = _MARGIN + place % columns * (_TILE + _GAP)
        top = _MARGIN + header + place // columns * (_TILE + _CAPTION + _GAP)
        picture = _thumbnail(split, image)
        sheet.paste(picture, (left + (_TILE - picture.width) // 2, top + (_TILE - picture.height) // 2))
        name = split.manifest.class_names[int(split.rows[image]["label"])]
        draw.text((left + _TILE // 2, top + _TILE + 2), _shortened(draw, name, font), fill=_INK, font=font, anchor="ma")
    return sheet


def _thumbnail(split: Split, image: int) -> Image.Image:
    row = split.rows[image]
    content = split.encoded(image).tobytes()
    if split.manifest.encoding == "raw":
        picture = Image.frombytes("RGB", (int(row["width"]), int(row["height"])), content)
    else:
        picture = Image.open(io.BytesIO(content)).convert("RGB")
    scale = _TILE / max(picture.size)
    # Small images are enlarged without smoothing: what is stored shall be seen.
    method = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), method)


def _draw_header(draw: ImageDraw.ImageDraw, split: Split, width: int, height: int) -> None:
    """The split's name and counts, and three histograms side by side."""
    counts = np.bincount(split.rows["label"], minlength=split.num_classes)
    draw.text((_MARGIN, _MARGIN), f"{split.root.resolve().name}: {split.name}", fill=_INK, font=ImageFont.load_default(20))
    text = f"{len(split):,} images in {split.num_classes:,} classes, {counts.min():,} to {counts.max():,} a class"
    draw.text((_MARGIN, _MARGIN + 28), text, fill=_FAINT, font=ImageFont.load_default(13))
    panels = {
        "images a class": counts,
        "shorter side, pixels": np.minimum(split.rows["height"], split.rows["width"]),
        "stored image, bytes": split.rows["size"],
    }
    panel_width = (width - 2 * _MARGIN - (len(panels) - 1) * 3 * _GAP) // len(panels)
    for number, (title, values) in enumerate(panels.items()):
        left = _MARGIN + number * (panel_width + 3 * _GAP)
        _draw_histogram(draw, title, values, left=left, top=_MARGIN + 52, width=panel_width, height=height - 72)


def _draw_histogram(
    draw: ImageDraw.ImageDraw, title: str, values: NDArray[np.integer], *, left: int, top: int, width: int, height: int
) -> None:
    font = ImageFont.load_default(11)
    low, high = int(values.min()), int(values.max())
    draw.text((left, top), f"{title}, {low:,} to {high:,}" if low < high else f"{title}: all {low:,}", fill=_FAINT, font=font)
    bottom = top + height - 2
    draw.line((left, bottom, left + width, bottom), fill=_FAINT)
    counts = np.ones(1) if low == high else _bins(np.maximum(values, 1), num_bins=24)[1]
    step = width / len(counts)
    for number, count in enumerate(counts.tolist()):
        bar = round((height - 20) * count / counts.max())
        if count:
            x = left + round(number * step)
            draw.rectangle((x, bottom - max(1, bar), x + max(1, round(step) - 2), bottom - 1), fill=_BAR)


def _shortened(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """`text`, cut to the width of a tile."""
    if draw.textlength(text, font=font) <= _TILE:
        return text
    while text and draw.textlength(text + "...", font=font) > _TILE:
        text = text[:-1]
    return text + "..."
