"""Encoded images from unknown sources: which ones training can decode, and how large they are, from their headers
alone."""

import io
import warnings

from PIL import Image

from dali_train.data.dataset.jpeg import JpegError, is_jpeg, parse_jpeg_header

MAX_PIXELS = (
    100_000_000  # ImageNet's largest image has 61 million; decoding many more would stop a run for want of memory
)
MAX_SIDE = 65_500  # libjpeg's limit, and what the index can hold
# What DALI decodes, and all that PIL may open: of itself it opens dozens more, and runs Ghostscript for an EPS.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000")
_JPEG_PROCESSES = (0, 1, 2)  # baseline, extended, progressive: the others are lossless, hierarchical or arithmetic


class BadImageError(ValueError):
    """An image that cannot be used; the message says why."""


def image_size(encoded: bytes | memoryview) -> tuple[int, int]:
    """Return (height, width) in pixels, before any EXIF rotation.

    Raises:
        BadImageError: not an image that training can decode, as far as its header shows, or too large.
    """
    if is_jpeg(encoded):
        try:
            header = parse_jpeg_header(encoded)
        except JpegError as error:
            raise BadImageError(f"is not a JPEG that can be read: {error}") from error
        if header.process not in _JPEG_PROCESSES or header.precision != 8:
            raise BadImageError(
                f"is a JPEG of process SOF{header.process} with {header.precision} bits, which decoders refuse"
            )
        height, width = header.height, header.width
    else:
        image = open_image(encoded)
        height, width = image.height, image.width
    check_size(height, width)
    return height, width


def open_image(encoded: bytes | memoryview, formats: tuple[str, ...] = IMAGE_FORMATS) -> Image.Image:
    """Read an image's header with PIL. Its pixels are decoded when they are first asked for, and that may raise
    anything.

    Raises:
        BadImageError: another format, or a damaged header.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's doubts about metadata, and about sizes, which `check_size` judges
            return Image.open(io.BytesIO(encoded), formats=formats)
    except Image.UnidentifiedImageError as error:
        begin = bytes(encoded[:8])
        raise BadImageError(
            f"is not an image in a known format ({', '.join(formats)}); it begins with {begin!r}"
        ) from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"has more than {MAX_PIXELS:,} pixels: refused as a decompression bomb") from error
    except Exception as error:  # PIL's parsers raise nearly any kind on damaged files
        raise BadImageError(f"is not an image that can be read ({type(error).__name__}: {error})") from error


def decode_rgb(encoded: bytes | memoryview) -> Image.Image:
    """Decode an image with PIL, without applying its EXIF rotation. Raises BadImageError: it cannot be decoded."""
    try:
        image = open_image(encoded)
        check_size(image.height, image.width)
        return image.convert("RGB")
    except BadImageError:
        raise
    except Exception as error:  # PIL's decoders raise nearly any kind on damaged files
        raise BadImageError(f"cannot be decoded ({type(error).__name__}: {error})") from error


def check_size(height: int, width: int) -> None:
    """Raises BadImageError: no pixels, or too many."""
    if min(height, width) < 1:
        raise BadImageError(f"has {width} x {height} pixels: there is nothing to decode")
    if width * height > MAX_PIXELS:
        raise BadImageError(
            f"has {width} x {height} pixels: over {MAX_PIXELS:,} are refused as a decompression bomb; shrink or "
            "remove it"
        )
    if max(width, height) > MAX_SIDE:
        raise BadImageError(f"has {width} x {height} pixels: a side may have {MAX_SIDE:,}; shrink or remove it")
