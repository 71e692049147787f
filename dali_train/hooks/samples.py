"""Pictures of training images as the network sees them: cropped, mirrored and mixed, with their labels."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dali_train.config import DataConfig
from dali_train.data.dataset.pictures import contact_sheet
from dali_train.data.loading.pipelines import Batch
from dali_train.hooks.base import Hook
from dali_train.hooks.class_names import class_names
from dali_train.hooks.records import RunStart, StepRecord
from dali_train.text import printable

_TILE = 224  # pixels


def sample_images(
    batch: Batch, data: DataConfig, names: tuple[str, ...], count: int
) -> list[tuple[NDArray[np.uint8], str]]:
    """Return the first `count` images of a batch, (height, width, 3) with the normalisation undone, and captions."""
    pixels = batch.images[:count].float().permute(0, 2, 3, 1).cpu().numpy() * np.array(data.std) + np.array(data.mean)
    targets, lambdas = batch.targets[:count].tolist(), batch.lambdas[:count].tolist()
    captions = [_caption(classes, weight, names) for classes, weight in zip(targets, lambdas, strict=True)]
    return list(zip(pixels.round().clip(0, 255).astype(np.uint8), captions, strict=True))


def _caption(classes: list[int], weight: float, names: tuple[str, ...]) -> str:
    image, partner = (printable(names[number]) for number in classes)
    if image == partner or weight > 0.995:
        return image
    return partner if weight < 0.005 else f"{weight:.0%} {image} + {1 - weight:.0%} {partner}"


def sheet(images: list[tuple[NDArray[np.uint8], str]]) -> Image.Image:
    """Return a picture of all images in rows of four with their captions below."""
    return contact_sheet([(Image.fromarray(pixels), [caption]) for pixels, caption in images], columns=4, side=_TILE)


NUM_SAMPLES = 16
"""Images of the first step that are kept as the network sees them."""


class SampleImages(Hook):
    """``samples.png``: images of the first step that this process trained."""

    def start(self, record: RunStart) -> None:
        self._start, self._names = record, class_names(record)

    def step(self, record: StepRecord) -> None:
        if record.step == self._start.start_step + 1:
            images = sample_images(record.batch, self._start.config.data, self._names, NUM_SAMPLES)
            sheet(images).save(self._start.directory / "samples.png")
