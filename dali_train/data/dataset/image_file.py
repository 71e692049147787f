"""Whether training can decode an image of unknown origin, and its size: by its header, and by DALI itself.

A JPEG's header is parsed here because every image passes twice in a conversion: this takes 6 us where PIL's header
takes 70, with which converting ImageNet's photographs costs 8 % more CPU time, and 30 % more without the decode check.
Markers are those of ITU-T T.81, table B.1. An EXIF block, which few images have, is PIL's to read. Whether the rest
decodes is tried with DALI, since decoders disagree about damaged files.
"""

import io
import re
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from dali_train.text import plural

MAX_PIXELS = 100_000_000  # ImageNet's largest image has 61 million; much larger ones would exhaust memory
MAX_DRAFTED = 500_000_000  # of a JPEG that is decoded to fewer; phones make 200 million
MAX_SIDE = 65_500  # libjpeg's limit, and what the index can hold
# What DALI decodes, and all that PIL may open: by default it opens dozens more, and runs Ghostscript for an EPS.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000")
# What is taken for an image by its name, in small letters: what these formats, and GIF, are called.
IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".mpo", ".png", ".apng", ".bmp", ".dib", ".webp", ".gif"),
        *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    )
)
_JPEG_PROCESSES = (0, 1, 2)  # baseline, extended, progressive: the others are lossless, hierarchical or arithmetic

_START = b"\xff\xd8"
# Start-of-frame markers: C0 to CF but for DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset([0x01, *range(0xD0, 0xD8)])  # TEM and the restart markers
_APP1, _APP14, _START_OF_SCAN, _END_OF_IMAGE = 0xE1, 0xEE, 0xDA, 0xD9
_EXIF = b"Exif\x00\x00"
_ADOBE = b"Adobe"
_NO_JPEG = "is not a JPEG that can be read: "


class BadImageError(ValueError):
    """An image that cannot be used; the message gives the reason."""


def image_size(encoded: bytes | memoryview) -> tuple[int, int]:
    """Return (height, width) in pixels as DALI decodes an image: before any EXIF rotation.

    Raises:
        BadImageError: not an image that training can decode to the pixels that PIL gives, as far as its header shows;
            or too large.
    """
    if is_jpeg(encoded):
        header = parse_jpeg_header(encoded)
        if header.process not in _JPEG_PROCESSES or header.precision != 8:
            raise BadImageError(
                f"is a JPEG of process SOF{header.process} with {header.precision} bits, which decoders refuse"
            )
        if header.components == 4 and not header.is_adobes:
            raise BadImageError(f"is a CMYK JPEG without Adobe's marker{_MISREAD}")
        height, width = header.height, header.width
    else:
        image = open_image(encoded)
        kind = _misread_kind(image, encoded)
        if kind is not None:
            # Of these a conversion makes nothing either, see `wide_grey`.
            is_no_picture = image.mode == "F" or (image.format == "TIFF" and image.mode.startswith("I"))
            remedy = ": save it with 8 bits, or 16 from black to white" if is_no_picture else _MISREAD
            raise BadImageError(f"is a {image.format} {kind}{remedy}")
        height, width = image.height, image.width
    check_size(height, width)
    return height, width


_CONVERT = ": save it as PNG, or convert it with `dali-train data convert`"
_MISREAD = f", of which PIL and DALI make different pixels{_CONVERT}"


def _misread_kind(image: Image.Image, encoded: bytes | memoryview) -> str | None:
    """Return which kind of its format an image is if DALI does not decode it to PIL's pixels, None if it does.

    PIL's pixels are those of convert("RGB"), but for 16 bits, which DALI and a conversion scale. A kind that is not
    known to be equal, see tests/dataset/image-kinds.md, is refused.
    """
    find = _MISREAD_KINDS.get(str(image.format))
    return None if find is None else find(image, encoded)


def _misread_tiff(image: Any, encoded: bytes | memoryview) -> str | None:
    tags = image.tag_v2
    orientation, compression = tags.get(_ORIENTATION, 1), tags.get(_COMPRESSION, 1)
    bits, formats, extra = tags.get(_BITS, ()), tags.get(_SAMPLE_FORMAT, (1,)), tags.get(_EXTRA_SAMPLES, ())
    photometric = tags.get(_PHOTOMETRIC)
    if orientation != 1:
        return f"of orientation {orientation}"
    if set(formats) != {1}:
        return f"with {'floating-point' if 3 in formats else 'signed'} samples"
    if 1 in extra:
        return "with premultiplied alpha"
    same = set(bits)
    is_read = {
        0: bits in ((1,), (8,)),  # grey, white is 0
        1: bits in ((1,), (8,), (16,)),  # grey
        2: len(bits) >= 3 and same in ({8}, {16}),  # RGB
        3: bits in ((4,), (8,)),  # palette
        5: bits == (8, 8, 8, 8),  # CMYK
        6: bits == (8, 8, 8) and compression == 7,  # YCbCr, in a JPEG
    }
    if is_read.get(photometric, False):
        return None
    return f"of mode {image.mode} with {' + '.join(map(str, bits)) or 'no number of'} bits (photometric {photometric})"


def wide_grey(image: Image.Image) -> NDArray[np.int32]:
    """Return the values of an image of PIL's mode I or I;16, (height, width), from 0 to 65,535.

    Raises:
        BadImageError: grey of more than 8 bits that are not 16 from black to white.
    """
    if image.format == "TIFF":
        _check_grey_tiff(image)
    values = np.asarray(image).astype(np.int32)
    if values.min() < 0 or values.max() > _WHITE:
        raise BadImageError(
            f"mode {image.mode} with values from {values.min()} to {values.max()}: 16 bits are understood"
        )
    return values


def in_8_bits(values: NDArray[np.int32]) -> Image.Image:
    """Return grey of 16 bits, (height, width), as DALI scales it; PIL's own conversion clips it to white at 255."""
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _check_grey_tiff(image: Any) -> None:
    tags = image.tag_v2
    bits, formats, photometric = tags.get(_BITS), tags.get(_SAMPLE_FORMAT, (1,)), tags.get(_PHOTOMETRIC)
    if (bits, formats, photometric) != ((16,), (1,), 1):
        raise BadImageError(
            f"is a grey TIFF of {', '.join(map(str, bits or ()))} bits (sample format {formats[0]}, photometric "
            f"{photometric}), where 8, or 16 without sign from black to white, are understood: save it with these"
        )


def _misread_bmp(image: Any, encoded: bytes | memoryview) -> str | None:
    codec, _, _, arguments = image.tile[0]
    if codec != "raw":
        return "with run lengths"
    return f"with pixels as {arguments[0]}" if arguments[0] not in ("1", "L", "P", "BGR", "BGRX", "BGRA") else None


def _misread_ppm(image: Any, encoded: bytes | memoryview) -> str | None:
    arguments = image.tile[0][3]
    largest = 255 if isinstance(arguments, str) else arguments[1]
    if image.mode == "F":
        return "with floating-point samples"
    return f"with samples up to {largest}" if largest not in (255, 65_535) else None


def _misread_jpeg2000(image: Any, encoded: bytes | memoryview) -> str | None:
    content = bytes(encoded)
    try:
        (left, top), components = _codestream(content)
    except struct.error:
        return "without a header"
    # The container's: enumerated; an embedded profile is ignored by both.
    space = content.find(b"colr\x01", 0, max(content.find(_CODESTREAM), 0))
    if space >= 0 and content[space + 7 : space + 11] not in (b"\0\0\0\x10", b"\0\0\0\x11"):
        return "that is neither sRGB nor grey"
    if any(steps != [1, 1] for _, *steps in components) or left or top:
        return "with samples at other places than pixels"
    depths = [depth for depth, *_ in components]
    if len(components) == 1 and content.startswith(_CODESTREAM):
        return "that is grey, without the container of a .jp2 file"
    if depths in ([7], [7] * 3, [7] * 4, [15]):
        return None
    bits = ", ".join(str((depth & 127) + 1) for depth in depths)
    return f"of mode {image.mode} with {len(components)} components of {bits} bits"


_CODESTREAM = b"\xff\x4f\xff\x51"  # of JPEG 2000: its start, and the marker of image and tile size


def _codestream(content: bytes) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    """Read the image and tile size of a JPEG 2000 (ITU-T T.800, A.5.1).

    Returns:
        The image's offset, (left, top); and of each component the bits less 1, plus 128 for signed ones, and the steps
        between its samples.

    Raises:
        struct.error: there is no such segment, or it is cut off.
    """
    start = content.find(_CODESTREAM)
    *_, left, top, _, _, _, _, count = struct.unpack_from(">HH8IH", content, start + 4)
    return (left, top), [struct.unpack_from("BBB", content, start + 42 + 3 * number) for number in range(count)]


_ORIENTATION, _COMPRESSION, _PHOTOMETRIC = 274, 259, 262  # tags of TIFF 6.0
_BITS, _SAMPLES, _SAMPLE_FORMAT, _EXTRA_SAMPLES = 258, 277, 339, 338
_MISREAD_KINDS: dict[str, Callable[[Any, bytes | memoryview], str | None]] = {
    "TIFF": _misread_tiff,
    "BMP": _misread_bmp,
    "PPM": _misread_ppm,
    "JPEG2000": _misread_jpeg2000,
}


_NEVER_WIDE = (b"\xff\xd8", b"BM", b"RIFF", b"GIF8")  # how JPEG, BMP, WebP and GIF begin; a JPEG of 12 bits is refused
_PNG = b"\x89PNG"
_WHITE = 0xFFFF  # in 16 bits
DARK_LEVEL = 1 << 13  # of 16 bits: below, 8 bits leave 32 levels; values of 12 bits that were not scaled are


def has_wide_samples(encoded: bytes | memoryview) -> bool:
    """Return whether an image has more than 8 bits a sample, by its header. Raises BadImageError: as `open_image`."""
    begin = bytes(encoded[:25])
    if begin.startswith(_NEVER_WIDE):
        return False
    if begin.startswith(_PNG):
        return begin[24:] == b"\x10"
    image: Any = open_image(encoded)
    if image.format == "TIFF":
        return max(image.tag_v2.get(_BITS, (1,))) > 8
    if image.format == "JPEG2000":
        try:
            return any(depth & 127 > 7 for depth, *_ in _codestream(bytes(encoded))[1])
        except struct.error:
            return False
    arguments = image.tile[0][3]  # of a PPM
    return bool(image.mode == "I" or (not isinstance(arguments, str) and arguments[1] > 255))


def check_levels(lowest: int, highest: int) -> None:
    """Raises BadImageError: values of 16 bits, from `lowest` to `highest`, that are next to black in 8. Zeros alone may
    be meant so."""
    if 0 < highest < DARK_LEVEL:
        raise BadImageError(
            f"would be black: has values from {lowest:,} to {highest:,} in 16 bits, where {_WHITE:,} is white; "
            "multiply them so that they fill that range, or save it with 8 bits"
        )


def open_image(encoded: bytes | memoryview, formats: tuple[str, ...] = IMAGE_FORMATS) -> Image.Image:
    """Read an image's header with PIL. Its pixels are decoded when they are first asked for, and that may raise
    anything.

    Raises:
        BadImageError: another format, or a damaged header.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's doubts about metadata, and about sizes, which `check_size` judges
            if is_jpeg(encoded):  # `Image.open` refuses large ones, which can be decoded to fewer pixels
                return JpegImageFile(io.BytesIO(encoded))
            return Image.open(io.BytesIO(encoded), formats=formats)
    except Image.UnidentifiedImageError as error:
        begin = bytes(encoded[:8])
        if begin.startswith(b"GIF8"):
            raise BadImageError("is a GIF, which DALI does not decode" + _CONVERT) from error
        if bytes(encoded[:40]).startswith(b"version https://git-lfs"):
            raise BadImageError("is a pointer of git-lfs: fetch the files with `git lfs pull`") from error
        if begin.startswith(_TIFF):
            raise BadImageError(
                f"is a TIFF of a kind that is not read{_tiff_samples(encoded)}: save what is to be seen of it as grey "
                "or RGB, with 8 or 16 bits"
            ) from error
        raise BadImageError(
            f"is not an image in a known format ({', '.join(formats)}); it begins with {begin!r}"
        ) from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"has more pixels than PIL opens: {_TOO_MANY}") from error
    except Exception as error:  # PIL's parsers raise nearly any kind on damaged files
        raise BadImageError(f"is not an image that can be read ({type(error).__name__}: {error})") from error


_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how TIFF and BigTIFF begin


def _tiff_samples(encoded: bytes | memoryview) -> str:
    """Return how many bands a TIFF has, and of which numbers, as `` (13 bands of 16 bits, signed)``; nothing if it
    cannot be told."""
    with suppress(Exception), warnings.catch_warnings(action="ignore"):  # of PIL's parser, on damaged files
        file = io.BytesIO(encoded)
        tags = ImageFileDirectory_v2(file.read(16 if b"+" in bytes(encoded[2:4]) else 8))
        file.seek(tags.next)
        tags.load(file)
        bits = sorted({*tags[_BITS]})
        numbers = {2: ", signed", 3: ", floating-point"}.get(tags.get(_SAMPLE_FORMAT, (1,))[0], "")
        return f" ({plural(int(tags.get(_SAMPLES, 1)), 'band')} of {' and '.join(map(str, bits))} bits{numbers})"
    return ""


def decode_rgb(encoded: bytes | memoryview) -> Image.Image:
    """Decode an image with PIL to the pixels that training sees, without applying its EXIF rotation.

    Raises:
        BadImageError: it cannot be decoded.
    """
    try:
        image = open_image(encoded)
        check_size(image.height, image.width)
        return (in_8_bits(wide_grey(image)) if image.mode.startswith("I") else image).convert("RGB")
    except BadImageError:
        raise
    except Exception as error:  # PIL's decoders raise nearly any kind on damaged files
        raise BadImageError(f"cannot be decoded ({type(error).__name__}: {error})") from error


_TOO_MANY = (
    f"over {MAX_PIXELS:,} are refused as a decompression bomb; shrink it (`dali-train data convert` does, a JPEG of up "
    f"to {MAX_DRAFTED:,}, with --short-side or --max-side at half of its own or less), or remove it"
)


def check_size(height: int, width: int) -> None:
    """Raises BadImageError: no pixels, or too many."""
    if min(height, width) < 1:
        raise BadImageError(f"has {width} x {height} pixels: there is nothing to decode")
    if width * height > MAX_PIXELS:
        raise BadImageError(f"has {width} x {height} pixels: {_TOO_MANY}")
    if max(width, height) > MAX_SIDE:
        raise BadImageError(f"has {width} x {height} pixels: a side may have {MAX_SIDE:,}; shrink or remove it")


@dataclass(frozen=True, slots=True)
class JpegHeader:
    height: int  # pixels, before any EXIF rotation
    width: int
    components: int  # 1 grey, 3 YCbCr or RGB, 4 CMYK
    precision: int  # bits per component
    process: int  # of the start-of-frame marker: 0 baseline, 1 extended, 2 progressive, the others are rare
    orientation: int  # EXIF, 1 (upright) to 8; 1 where there is none
    is_adobes: bool = False  # has Adobe's marker, after which CMYK is stored inverted; only looked for in CMYK

    @property
    def is_plain(self) -> bool:
        """True if every common decoder reads it as RGB or grey in the same way, without choosing a conversion."""
        return (
            self.precision == 8
            and self.components in (1, 3)
            and self.process in _JPEG_PROCESSES
            and self.height > 0
            and self.width > 0
        )


def is_jpeg(content: bytes | memoryview) -> bool:
    return content[:2] == _START


def parse_jpeg_header(content: bytes | memoryview) -> JpegHeader:
    """Walk the segments up to the frame header.

    Raises:
        BadImageError: the segments end, or make no sense, before a frame header.
    """
    position, size, orientation = 2, len(content), 1
    has_adobe = False
    frame: JpegHeader | None = None  # of a CMYK JPEG, whose markers may also be behind it
    while position + 4 <= size:
        if content[position] != 0xFF:
            raise BadImageError(f"{_NO_JPEG}no marker at byte {position}")
        marker = content[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        if marker in _WITHOUT_LENGTH:
            position += 2
            continue
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            if frame is not None:
                return replace(frame, is_adobes=has_adobe)
            raise BadImageError(f"{_NO_JPEG}marker {marker:02X} at byte {position} before any frame header")
        length = content[position + 2] << 8 | content[position + 3]
        body, end = position + 4, position + 2 + length
        if length < 2 or end > size:
            segment = f"segment {marker:02X} at byte {position}"
            raise BadImageError(f"{_NO_JPEG}{segment} has length {length}, {size - position - 2} bytes are left")
        if marker in _FRAMES and frame is None:
            if length < 8:
                raise BadImageError(f"{_NO_JPEG}frame header of {length} bytes at byte {position}")
            precision, height, width, components = struct.unpack_from(">BHHB", content, body)
            frame = JpegHeader(height, width, components, precision, marker & 0x0F, orientation)
            if components != 4:
                return frame
        if marker == _APP14 and length >= 14 and content[body : body + len(_ADOBE)] == _ADOBE:
            has_adobe = True
        if marker == _APP1 and content[body : body + len(_EXIF)] == _EXIF:
            orientation = _exif_orientation(bytes(content[body:end]))
        position = end
    raise BadImageError(f"{_NO_JPEG}the file ends after {size} bytes without a frame header")


def _exif_orientation(block: bytes) -> int:
    """Return 1 to 8; a damaged EXIF block counts as upright, as it does for decoders."""
    exif = Image.Exif()
    try:
        with warnings.catch_warnings(action="ignore"):
            exif.load(block)
        orientation = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:  # of nearly any kind
        return 1
    return orientation if orientation in range(1, 9) else 1


_WEBP_EXIF = 8  # the flag in a VP8X chunk, which is byte 20 of the file


def for_dali(encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image file as DALI decodes it: itself, but for a WebP with EXIF, of which a copy does not say so.

    DALI does not skip the byte that pads a chunk of odd length, and fails when it looks for EXIF behind one. It is
    never asked for the orientation, so that it need not look.
    """
    if len(encoded) < 30 or encoded[0] != ord("R"):  # nearly all: to compare four letters would take five times longer
        return encoded
    if encoded[:4].tobytes() != b"RIFF" or encoded[12:16].tobytes() != b"VP8X" or not encoded[20] & _WEBP_EXIF:
        return encoded
    copy = encoded.copy()
    copy[20] &= ~_WEBP_EXIF & 0xFF
    return copy


BATCH_PIXELS = 8_000_000  # decoded together at most, but for a larger single image
_NOISE = re.compile(r"Current pipeline object|Critical error in pipeline|C\+\+ context|\[")


def _why_undecodable(encoded: bytes, error: RuntimeError) -> str:
    """Return why DALI failed on an image with `error`: PIL's message if PIL fails too, since DALI's says little; else
    what to do."""
    try:
        image_size(encoded)
        open_image(encoded).load()
    except BadImageError as fault:
        return f"it {fault}"
    except Exception as fault:  # PIL's decoders raise nearly any kind on damaged files
        return str(fault)
    reason = f"DALI says: {dali_reason(error)}, though PIL reads it"
    return f"{reason}: convert it with `dali-train data convert`, or save it as PNG"


def dali_reason(error: RuntimeError) -> str:
    """Return DALI's own message in `error`, without its traceback of the graph."""
    lines = str(error).rpartition("encountered:")[2].splitlines()
    words = " ".join(line.strip() for line in lines if line.strip() and not _NOISE.match(line))
    return words.strip(" :")


class DecodeChecker:
    """Decodes images with DALI on one thread and says which of them fail, or have another size than is known of them.

    It decodes only luminance: all coefficients of all components are read and checked as for RGB, but colour is not
    computed, which is a quarter faster. On 3,000 JPEGs damaged at random both always gave the same result.
    """

    BATCH = 16

    def __init__(self) -> None:
        from nvidia.dali import types  # takes half a second: imported only where something is decoded

        self._pipeline = _build_decoder(
            lambda images: images.shape(), batch_size=self.BATCH, output_type=types.GRAY, dtype=types.UINT8
        )

    @cached_property
    def _levels(self) -> Any:
        from nvidia.dali import fn, types

        return _build_decoder(
            lambda images: (fn.reductions.min(images), fn.reductions.max(images)),
            batch_size=1,
            output_type=types.RGB,
            dtype=types.UINT16,
        )

    def failures(self, images: Sequence[bytes | NDArray[np.uint8]], sizes: NDArray[np.int32]) -> dict[int, str]:
        """Return the position in `images` (at most ``BATCH``) of each that does not decode, or not to its size, and
        what is wrong with it: "cannot be decoded: ...".

        Args:
            sizes: height and width of each by its header or the index, (n, 2).
        """
        try:
            decoded = self._decode(images)
        except RuntimeError as error:
            if len(images) == 1:
                return {0: f"cannot be decoded: {_why_undecodable(bytes(images[0]), error)}"}
            # DALI names no sample of a failed batch, so each is tried alone. The pipeline works on after an error.
            alone = (self.failures([image], size[None]) for image, size in zip(images, sizes, strict=True))
            return {number: fault[0] for number, fault in enumerate(alone) if fault}
        others = np.flatnonzero((decoded != sizes).any(axis=1)).tolist()
        return {number: _describe_sizes(decoded[number], sizes[number]) for number in others}

    def levels(self, image: bytes | memoryview) -> tuple[int, int]:
        """Return the lowest and the highest value of an image in 16 bits, as RGB. Raises RuntimeError: DALI fails."""
        self._levels.feed_input("encoded", [np.frombuffer(image, np.uint8)])
        lowest, highest = self._levels.run()
        return int(np.array(lowest.at(0))), int(np.array(highest.at(0)))

    def _decode(self, images: Sequence[bytes | NDArray[np.uint8]]) -> NDArray[np.int64]:
        """Return the height and width to which each image decodes, (n, 2). Raises RuntimeError: one does not."""
        self._pipeline.feed_input("encoded", [for_dali(np.frombuffer(image, np.uint8)) for image in images])
        (shapes,) = self._pipeline.run()
        decoded: NDArray[np.int64] = np.array(shapes.as_array())[:, :2]  # a copy: DALI uses its memory again
        return decoded


def _build_decoder(results: Callable[[Any], Any], *, batch_size: int, **options: Any) -> Any:
    """Return a pipeline that decodes its input "encoded" on one thread and gives the `results`."""
    from nvidia.dali import Pipeline, fn

    pipeline: Any = Pipeline(batch_size=batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", no_copy=True)
        found = results(fn.decoders.image(encoded, device="cpu", adjust_orientation=False, **options))
        pipeline.set_outputs(*(found if isinstance(found, tuple) else (found,)))
    pipeline.build()
    return pipeline


def _describe_sizes(decoded: NDArray[np.int64], known: NDArray[np.int32]) -> str:
    return f"is decoded to {decoded[1]} x {decoded[0]} pixels, where {known[1]} x {known[0]} were expected"


_threads = threading.local()  # each thread's checker


def _own_checker() -> DecodeChecker:
    if not hasattr(_threads, "checker"):
        _threads.checker = DecodeChecker()
    checker: DecodeChecker = _threads.checker
    return checker


def wide_levels(encoded: bytes | memoryview) -> tuple[int, int] | None:
    """Return the lowest and the highest value in 16 bits, of the colours of an image with more than 8 bits a sample;
    None if DALI does not read it."""
    try:
        image_size(encoded)
        return _own_checker().levels(encoded)
    except (BadImageError, RuntimeError):
        return None


def decode_failures(images: Sequence[bytes | memoryview], sizes: NDArray[np.int32]) -> dict[int, str]:
    """Return the position of each of `images` that DALI does not decode to its size, or to black (see `check_levels`),
    and what is wrong with it.

    As many are decoded together as fit into memory, but at least one. For `sizes` see `DecodeChecker.failures`.
    """
    pixels = sizes.astype(np.int64).prod(axis=1)
    failures: dict[int, str] = {}
    first = 0
    while first < len(images):
        sums = np.cumsum(pixels[first : first + DecodeChecker.BATCH])
        end = first + max(1, int(np.searchsorted(sums, BATCH_PIXELS, side="right")))
        contents = [np.frombuffer(image, np.uint8) for image in images[first:end]]
        found = _own_checker().failures(contents, sizes[first:end])
        failures |= {first + number: reason for number, reason in found.items()}
        first = end
    for number, image in enumerate(images):
        if number not in failures and has_wide_samples(image) and (levels := wide_levels(image)) is not None:
            try:
                check_levels(*levels)
            except BadImageError as error:
                failures[number] = str(error)
    return failures
