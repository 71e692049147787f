"""From what a source holds to the bytes that are stored: checked as it stands, re-encoded, or refused.

A JPEG that is RGB or grey is stored as it stands, bit for bit. Everything else becomes an RGB (or grey) JPEG, or bare
pixels. What training decodes must be known to decode, so each JPEG that stays is decoded here by DALI itself: of 3,000
JPEGs damaged at random, DALI and PIL disagreed on 13, and DALI raises in the middle of an epoch.
"""

import io
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dali_train.data.jpeg import JpegError, is_jpeg, parse_jpeg_header

MAX_PIXELS = 100_000_000  # ImageNet's largest image has 61 million; a decompression bomb has more
MAX_SIDE = 65_500  # libjpeg's limit, and what the index can hold
MAX_ENCODED_BYTES = 100_000_000
# What PIL may open here. Its other formats are rare in datasets, and each is a parser for a stranger's bytes.
_PIL_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
_EXIF_ORIENTATION = 0x0112

Format = Literal["jpeg", "raw"]


class BadImageError(ValueError):
    """An image that cannot be stored; the message says why."""


class RecipeError(ValueError):
    """Options that make no sense; the message names option, value and what to use."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How images are stored. Other recipes give other bytes, so a resumed conversion must repeat it."""

    format: Format = "jpeg"
    max_side: int | None = None  # shrink images whose longer side exceeds this, in pixels
    short_side: int | None = None  # shrink images whose shorter side exceeds this, in pixels
    quality: int = 95  # JPEG quality of what is re-encoded
    decode_check: bool = True

    def __post_init__(self) -> None:
        for option, value in (("--max-side", self.max_side), ("--short-side", self.short_side)):
            if value is not None and not 1 <= value <= MAX_SIDE:
                raise RecipeError(f"{option} is {value}: use 1 to {MAX_SIDE} pixels")
        if self.max_side is not None and self.short_side is not None:
            raise RecipeError(f"--max-side {self.max_side} and --short-side {self.short_side} exclude each other: use one")
        if not 1 <= self.quality <= 100:
            raise RecipeError(f"--quality is {self.quality}: use 1 to 100, e.g. 90")


@dataclass(frozen=True, slots=True)
class StoredImage:
    """The bytes to store: an image file, or height * width * 3 bytes of RGB pixels, rows from the top."""

    content: bytes
    height: int
    width: int
    is_raw: bool = False
    reencoded: str | None = None  # what it was that could not stay, e.g. "CMYK JPEG"
    rotated: bool = False  # its EXIF orientation is not upright
    unchecked: bool = False  # stored as it stands, and nothing has decoded it yet

    @property
    def format(self) -> str:
        """What the record says in image/format."""
        if self.is_raw:
            return "RAW"
        return "JPEG" if is_jpeg(self.content) else "PNG" if self.content.startswith(b"\x89PNG") else "OTHER"


# What a source gives: an encoded file, pixels (HWC RGB or HW grey), or what another dataset stores already.
RawImage = bytes | NDArray[np.uint8] | StoredImage


class MemoryBudget:
    """What all workers together may hold in decoded images, so that memory does not grow with their number."""

    def __init__(self, num_bytes: int) -> None:
        self._total = self._free = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Wait until `num_bytes` are free, then hold them. One image larger than the whole budget gets all of it."""
        share = min(num_bytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()


def prepare(image: RawImage, recipe: Recipe, budget: MemoryBudget) -> StoredImage:
    """Raises BadImageError: not an image, damaged, or too large."""
    if isinstance(image, StoredImage):
        return image
    if isinstance(image, np.ndarray):
        # Pixels that were never a JPEG lose no colour resolution on becoming one.
        return _store(Image.fromarray(image), recipe, reencoded=None, orientation=1, chroma_subsampling=False)
    if len(image) > MAX_ENCODED_BYTES:
        raise BadImageError(f"{len(image):,} bytes: an image may have {MAX_ENCODED_BYTES:,}")
    if recipe.format == "jpeg" and is_jpeg(image):
        try:
            header = parse_jpeg_header(image)
        except JpegError as error:
            raise BadImageError(f"not a JPEG file that can be read: {error}") from error
        _check_size(header.width, header.height)
        if header.is_plain and _target_size(header.width, header.height, recipe) is None:
            return StoredImage(image, header.height, header.width, rotated=header.orientation != 1, unchecked=True)
    return reencode(image, recipe, budget)


def reencode(content: bytes, recipe: Recipe, budget: MemoryBudget) -> StoredImage:
    """Decode wholly with PIL and store anew. Raises BadImageError: PIL cannot decode it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's doubts about metadata, and about sizes that are checked here
            with Image.open(io.BytesIO(content), formats=_PIL_FORMATS) as image:
                _check_size(image.width, image.height)
                resized = _target_size(image.width, image.height, recipe) is not None
                # Bare pixels are decoded whatever they were: there is nothing to tell.
                kind = None if recipe.format == "raw" else "resized" if resized else f"{image.mode} {image.format}"
                orientation = int(image.getexif().get(_EXIF_ORIENTATION, 1))
                was_jpeg = image.format in ("JPEG", "MPO")
                # PIL takes 4 bytes a pixel, and again for a converted or smaller copy.
                with budget.held(8 * image.width * image.height):
                    pixels = _to_rgb_or_grey(image)
                    return _store(pixels, recipe, reencoded=kind, orientation=orientation, chroma_subsampling=was_jpeg)
    except UnidentifiedImageError as error:
        raise BadImageError(f"not an image in a known format; it begins with {content[:8]!r}") from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"more than {MAX_PIXELS:,} pixels: refused as a decompression bomb") from error
    except BadImageError:
        raise
    # PIL's parsers raise these on damaged files; OSError is by far the most common.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError) as error:
        raise BadImageError(f"cannot be decoded: {error}") from error


def _store(
    pixels: Image.Image, recipe: Recipe, *, reencoded: str | None, orientation: int, chroma_subsampling: bool
) -> StoredImage:
    target = _target_size(pixels.width, pixels.height, recipe)
    if target is not None:
        pixels = pixels.resize(target, Image.Resampling.LANCZOS)
    rotated = orientation in range(2, 9)
    if recipe.format == "raw":
        content = pixels.convert("RGB").tobytes()
    else:
        buffer = io.BytesIO()
        exif = Image.Exif()
        if rotated:
            exif[_EXIF_ORIENTATION] = orientation
        subsampling = "4:2:0" if chroma_subsampling else "4:4:4"
        pixels.save(buffer, "JPEG", quality=recipe.quality, subsampling=subsampling, exif=exif)
        content = buffer.getvalue()
    return StoredImage(content, pixels.height, pixels.width, recipe.format == "raw", reencoded, rotated)


def _to_rgb_or_grey(image: Image.Image) -> Image.Image:
    if image.mode in ("RGB", "L"):
        image.load()
        return image
    if image.mode.startswith("I"):  # 16 bits a pixel; PIL's own conversion clips at 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadImageError(f"mode {image.mode} with values from {values.min()} to {values.max()}: 16 bits are understood")
        return Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode == "F":
        raise BadImageError("floating-point pixels: convert it to 8 bits first")
    return image.convert("RGB")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width} x {height} pixels: over {MAX_PIXELS:,} are refused as a decompression bomb")
    if max(width, height) > MAX_SIDE:
        raise BadImageError(f"{width} x {height} pixels: a side may have {MAX_SIDE:,}")


def _target_size(width: int, height: int, recipe: Recipe) -> tuple[int, int] | None:
    """(width, height) to shrink to, None to leave it."""
    if recipe.max_side is not None:
        side, limit = max(width, height), recipe.max_side
    elif recipe.short_side is not None:
        side, limit = min(width, height), recipe.short_side
    else:
        return None
    if side <= limit:
        return None
    return max(1, round(width * limit / side)), max(1, round(height * limit / side))


class DecodeChecker:
    """Decodes JPEGs with DALI on one thread and says which of them fail.

    It asks for luminance only: all coefficients of all components are read and checked as for RGB, but colour is not
    computed, which is a quarter faster. On those 3,000 files both gave the same verdict each time.
    """

    BATCH = 16

    def __init__(self) -> None:
        from nvidia.dali import Pipeline, fn, types  # takes half a second: only who decodes pays

        pipeline: Any = Pipeline(batch_size=self.BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            encoded = fn.external_source(name="encoded", no_copy=True)
            pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=types.GRAY, adjust_orientation=False))
        pipeline.build()
        self._pipeline = pipeline

    def failures(self, images: Sequence[bytes]) -> list[int]:
        """Positions in `images` (at most ``BATCH``) of those that do not decode. DALI's log on stderr has details."""
        if self._decodes(images):
            return []
        # DALI names no sample of a failed batch, so each is tried alone. The pipeline goes on after an error.
        return [number for number, image in enumerate(images) if not self._decodes([image])]

    def _decodes(self, images: Sequence[bytes]) -> bool:
        try:
            self._pipeline.feed_input("encoded", [np.frombuffer(image, np.uint8) for image in images])
            self._pipeline.run()
        except RuntimeError:
            return False
        return True
