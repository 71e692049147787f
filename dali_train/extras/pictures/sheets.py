"""Pictures of a dataset: thumbnails, contact sheets, and an overview with counts and histograms, also as text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dali_train.data.dataset.image_file import BadImageError, decode_rgb
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.storage import open_shards
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError
from dali_train.text import plural, printable, shortened, span

PAPER, INK = "#ffffff", "#1f2328"
_GAP, _LINE, _FONT_SIZE = 10, 22, 13  # pixels


def picture(split: Split, number: int, stored: NDArray[np.uint8]) -> Image.Image:
    """Return image `number` of a split in RGB, given its `stored` bytes.

    Raises:
        DatasetError: it cannot be decoded; the message names its location.
    """
    row, content = split.rows[number], stored.tobytes()
    if split.manifest.encoding == "raw":
        return Image.frombytes("RGB", (int(row["width"]), int(row["height"])), content)
    try:
        return decode_rgb(content)
    except BadImageError as error:
        raise DatasetError(f"{split.describe(number)} {error}") from error


def contact_sheet(images: Sequence[tuple[Image.Image, Sequence[str]]], *, columns: int, side: int) -> Image.Image:
    """Return thumbnails, the longer side `side` pixels long, in rows of `columns`, each above its lines of text."""
    import matplotlib  # takes a tenth of a second

    # PIL's own font has little beyond ASCII.
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", _FONT_SIZE)
    rows, height = -(-len(images) // columns), side + _LINE * max(len(lines) for _, lines in images) + _GAP
    sheet = Image.new("RGB", (columns * (side + _GAP) + _GAP, rows * height + _GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for cell, (image, lines) in enumerate(images):
        left, top = _GAP + cell % columns * (side + _GAP), _GAP + cell // columns * height
        # Small images are enlarged without smoothing, to show what is stored.
        scale = side / max(image.size)
        method = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
        tile = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), method)
        sheet.paste(tile, (left + (side - tile.width) // 2, top + (side - tile.height) // 2))
        for line, text in enumerate(lines):
            text = shortened(printable(text), side, font.getlength)
            draw.text((left + side // 2, top + side + 2 + line * _LINE), text, fill=INK, font=font, anchor="ma")
    return sheet


_TILE, _HEADER, _LEAST_WIDTH, _DPI = 144, 180, 640, 100  # pixels, and pixels per inch
_SHEET_STREAM = 0x5348_4545_54


def describe(manifest: Manifest, splits: Sequence[Split]) -> list[str]:
    """Return lines of text: what the splits hold, and the images' sizes."""
    lines, names = [], manifest.class_names
    for split in splits:
        counts = split.count_classes(split.rows["label"])
        files = plural(len(split.shards), "shard") if split.files is None else plural(len(split.files), "file")
        lines += [
            f"{split.name}: {len(split):,} images, {manifest.num_classes:,} classes, {files}, "
            f"{split.num_bytes / 1e6:,.1f} MB" + (" (raw RGB pixels)" if manifest.encoding == "raw" else ""),
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
    stored = open_shards(split).read(np.array(chosen))
    pictures = [
        (picture(split, n, content), [split.label_text(int(split.rows[n]["label"]))])
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

    counts = split.count_classes(split.rows["label"])
    panels = {
        "images per class": counts,
        "shorter side, pixels": np.minimum(split.rows["height"], split.rows["width"]),
        "stored image, bytes": split.rows["size"],
    }
    figure = Figure(figsize=(width / _DPI, _HEADER / _DPI), dpi=_DPI, facecolor=PAPER, layout="constrained")
    text = f"{len(split):,} images in {split.num_classes:,} classes, {span(counts.min(), counts.max())} per class"
    figure.suptitle(printable(f"{split.dataset_name}: {split.name}, {text}"), fontsize=10, parse_math=False)
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.hist(values, bins=24)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
