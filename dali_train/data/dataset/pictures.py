"""Images of a dataset as people look at them: thumbnails and contact sheets."""

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
_GAP, _CAPTION, _FONT_SIZE = 10, 22, 13  # pixels


def picture(split: Split, number: int, stored: NDArray[np.uint8]) -> Image.Image:
    """Return image `number` of a split in RGB, of which these bytes are stored.

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


def thumbnail(image: Image.Image, side: int) -> Image.Image:
    """`image` with its longer side `side` pixels long. Small images are enlarged without smoothing: it shows what is
    stored."""
    scale = side / max(image.size)
    method = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), method)


def font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib's DejaVu Sans, `size` pixels high: PIL's own font has little beyond ASCII."""
    import matplotlib  # only when a picture is drawn: importing it takes a tenth of a second

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def contact_sheet(images: Sequence[tuple[Image.Image, str]], *, columns: int, side: int) -> Image.Image:
    """Thumbnails of `side` pixels in rows of `columns`, each with its caption below."""
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (side + _GAP) + _GAP, rows * (side + _CAPTION + _GAP) + _GAP), PAPER)
    draw, caption_font = ImageDraw.Draw(sheet), font(_FONT_SIZE)
    for place, (image, caption) in enumerate(images):
        left, top = _GAP + place % columns * (side + _GAP), _GAP + place // columns * (side + _CAPTION + _GAP)
        tile = thumbnail(image, side)
        sheet.paste(tile, (left + (side - tile.width) // 2, top + (side - tile.height) // 2))
        text = shortened(printable(caption), side, caption_font.getlength)
        draw.text((left + side // 2, top + side + 2), text, fill=INK, font=caption_font, anchor="ma")
    return sheet
