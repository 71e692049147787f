"""Pictures of a dataset: thumbnails and contact sheets."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dali_train.data.dataset.image_file import BadImageError, decode_rgb
from dali_train.data.dataset.index import Split
from dali_train.errors import DatasetError
from dali_train.text import printable, shortened

PAPER, INK = "#ffffff", "#1f2328"
_GAP, _LINE, _FONT_SIZE = 10, 22, 13  # pixels


def picture(split: Split, number: int, stored: NDArray[np.uint8]) -> Image.Image:
    """Return image `number` of a split in RGB, given its `stored` bytes.

    Raises:
        DatasetError: it cannot be decoded; the message names its place.
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
    for place, (image, lines) in enumerate(images):
        left, top = _GAP + place % columns * (side + _GAP), _GAP + place // columns * height
        # Small images are enlarged without smoothing, to show what is stored.
        scale = side / max(image.size)
        method = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
        tile = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), method)
        sheet.paste(tile, (left + (side - tile.width) // 2, top + (side - tile.height) // 2))
        for line, text in enumerate(lines):
            text = shortened(printable(text), side, font.getlength)
            draw.text((left + side // 2, top + side + 2 + line * _LINE), text, fill=INK, font=font, anchor="ma")
    return sheet
