"""Training images as the network sees them: cropped, mirrored, mixed, normalised, with their labels."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dali_train.config import DataConfig
from dali_train.data.loader import Batch
from dali_train.hooks.base import Hook, RunStart, StepRecord

_TILE, _CAPTION, _GAP, _FONT_SIZE = 224, 22, 10, 14  # pixels


def sample_images(batch: Batch, data: DataConfig, class_names: tuple[str, ...], count: int) -> list[tuple[NDArray[np.uint8], str]]:
    """The first `count` images of a batch, (height, width, 3) with the normalisation undone, and what they are."""
    pixels = batch.images[:count].float().permute(0, 2, 3, 1).cpu().numpy() * np.array(data.std) + np.array(data.mean)
    targets, lambdas = batch.targets[:count].tolist(), batch.lambdas[:count].tolist()
    captions = [_caption(classes, weight, class_names) for classes, weight in zip(targets, lambdas, strict=True)]
    return list(zip(pixels.round().clip(0, 255).astype(np.uint8), captions, strict=True))


def _caption(classes: list[int], weight: float, class_names: tuple[str, ...]) -> str:
    image, partner = (class_names[number] if number < len(class_names) else str(number) for number in classes)
    if image == partner or weight > 0.995:
        return image
    return f"{partner}" if weight < 0.005 else f"{weight:.0%} {image} + {1 - weight:.0%} {partner}"


def sheet(images: list[tuple[NDArray[np.uint8], str]], columns: int = 4) -> Image.Image:
    """All images with their captions below, on white."""
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _CAPTION + _GAP) + _GAP), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=_FONT_SIZE)
    for number, (pixels, caption) in enumerate(images):
        row, column = divmod(number, columns)
        left, top = _GAP + column * (_TILE + _GAP), _GAP + row * (_TILE + _CAPTION + _GAP)
        small = pixels.shape[0] < _TILE  # single pixels are shown as they are
        tile = Image.fromarray(pixels).resize((_TILE, _TILE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)
        page.paste(tile, (left, top))
        draw.text((left, top + _TILE + 2), _shortened(caption, font), fill="#222222", font=font)
    return page


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(text) <= _TILE:
        return text
    while font.getlength(text + "…") > _TILE:
        text = text[:-1]
    return text + "…"


class SampleImages(Hook):
    """``samples.png``: images of the first step that this process trained."""

    def __init__(self, count: int) -> None:
        self._count = count

    def start(self, record: RunStart) -> None:
        self._start = record

    def step(self, record: StepRecord) -> None:
        if record.step == self._start.start_step + 1:
            images = sample_images(record.batch, self._start.config.data, self._start.class_names, self._count)
            sheet(images).save(self._start.directory / "samples.png")
