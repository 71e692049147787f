"""Kinds of image files that people have, made with Pillow, by hand, and where they are installed with ImageMagick
(``convert``), libtiff's ``tiffcp`` and libjpeg-turbo's ``cjpeg``."""

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from tests.conftest import encoded

SIZES = ((32, 32), (47, 32), (32, 45), (33, 32))
"""Width and height of the files of a kind. An evaluation at 32 pixels is their center, unscaled."""

Make = Callable[[Image.Image], bytes]


class Kind(NamedTuple):
    name: str
    make: Make
    tool: str | None = None  # a program that it needs

    @property
    def is_available(self) -> bool:
        return self.tool is None or is_installed(self.tool)

    def files(self) -> list[bytes]:
        """Return a file of each of `SIZES`."""
        return [self.make(picture(seed, *size)) for seed, size in enumerate(SIZES)]


@cache
def is_installed(tool: str) -> bool:
    if shutil.which(tool) is None:
        return False
    if tool != "convert":
        return True
    # Other programs have this name too.
    return "ImageMagick" in subprocess.run([tool, "-version"], capture_output=True, text=True).stdout


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Smooth colours over the whole range: kinds with coarser colour, and another reading of it, stay apart."""
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def saved(kind: str, mode: str = "RGB", **options: Any) -> Make:
    """Return a maker by Pillow."""
    return lambda image: encoded(image.convert(mode), kind, **options)


def changed(make: Make, change: Callable[[bytes], bytes]) -> Make:
    return lambda image: change(make(image))


SAVED_PNG, SAVED_PPM, SAVED_TIFF = saved("PNG"), saved("PPM"), saved("TIFF")


def by_program(*command: str, suffix: str, source: Make = SAVED_PNG, source_suffix: str = ".png") -> Make:
    """Return a maker by a program, whose IN and OUT are the files."""

    def make(image: Image.Image) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            files = {"IN": f"{directory}/in{source_suffix}", "OUT": f"{directory}/out{suffix}"}
            Path(files["IN"]).write_bytes(source(image))
            words = [word.replace("IN", files["IN"]).replace("OUT", files["OUT"]) for word in command]
            subprocess.run(words, check=True, capture_output=True)
            return Path(files["OUT"]).read_bytes()

    return make


def with_orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = number
    return exif


def segments(jpeg: bytes) -> tuple[list[bytes], bytes]:
    """Return the marker segments of a JPEG before its scan, and what follows them."""
    found, position = [], 2
    while jpeg[position + 1] != 0xDA:
        end = position + 2 + (jpeg[position + 2] << 8 | jpeg[position + 3])
        found.append(jpeg[position:end])
        position = end
    return found, jpeg[position:]


def without(marker: int, jpeg: bytes) -> bytes:
    """Return a JPEG without its segments of one kind."""
    found, rest = segments(jpeg)
    return b"".join([jpeg[:2], *(one for one in found if one[1] != marker), rest])


def adobe_behind_the_frame(jpeg: bytes) -> bytes:
    """Return a JPEG with Adobe's marker as the last segment before the scan."""
    found, rest = segments(jpeg)
    return b"".join([jpeg[:2], *sorted(found, key=lambda one: one[1] == 0xEE), rest])


def with_transform(number: int, jpeg: bytes) -> bytes:
    """Return a JPEG whose Adobe marker says another transform of colours: 0 none, 1 YCbCr, 2 YCCK."""
    place = jpeg.index(b"Adobe") + 11
    return jpeg[:place] + bytes([number]) + jpeg[place + 1 :]


def with_adobe(number: int, jpeg: bytes) -> bytes:
    """Return a JPEG with an Adobe marker of this transform put in front."""
    return jpeg[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([number]) + jpeg[2:]


def with_frame(process: int, bits: int, jpeg: bytes) -> bytes:
    """Return a JPEG whose frame header says another process and precision."""
    place = jpeg.index(b"\xff\xc0")
    return (
        jpeg[:place] + bytes([0xFF, 0xC0 + process]) + jpeg[place + 2 : place + 4] + bytes([bits]) + jpeg[place + 5 :]
    )


def tiff(
    pixels: np.ndarray, *, photometric: int = 2, sample_format: int = 1, bits: int = 0, order: str = "<", **more: Any
) -> bytes:
    """Return an uncompressed TIFF of (height, width, samples), with any tags in `more` as (type, value) by number."""
    height, width, samples = pixels.shape
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    bits = bits or 8 * pixels.dtype.itemsize
    tags: dict[int, tuple[int, Sequence[int]]] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits] * samples),
        259: (3, [1]),
        262: (3, [photometric]),
        273: (4, [8]),
        277: (3, [samples]),
        278: (4, [height]),
        279: (4, [len(data)]),
        339: (3, [sample_format] * samples),
        **{int(name[1:]): value for name, value in more.items()},
    }
    data += b"\0" * (len(data) % 2)
    place = 8 + len(data)
    entries, extra = b"", b""
    behind = place + 2 + 12 * len(tags) + 4
    for tag, (kind, values) in sorted(tags.items()):
        body = struct.pack(f"{order}{len(values)}{'H' if kind == 3 else 'I'}", *values)
        if len(body) > 4:
            offset = behind + len(extra)
            extra += body + b"\0" * (len(body) % 2)
            body = struct.pack(f"{order}I", offset)
        entries += struct.pack(f"{order}HHI", tag, kind, len(values)) + body.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, place)
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + b"\0" * 4 + extra


def array(image: Image.Image, mode: str = "RGB") -> np.ndarray:
    """Return the pixels of an image in a mode, (height, width, samples)."""
    return np.asarray(image.convert(mode)).reshape(image.height, image.width, -1)


def opaque_to_clear(image: Image.Image, mode: str = "RGBA") -> Image.Image:
    """Return an image with an alpha channel from 0 to 255."""
    image = image.convert(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def netpbm(magic: str, pixels: np.ndarray, largest: int) -> bytes:
    """Return a PPM or PGM, of 16 bits if `largest` is over 255; plain, in ASCII, with magic P2 and P3."""
    height, width = pixels.shape[:2]
    head = f"{magic}\n# a comment\n{width} {height}\n{largest}\n".encode()
    if magic in ("P2", "P3"):
        return head + " ".join(map(str, pixels.ravel().tolist())).encode() + b"\n"
    return head + pixels.astype(">u2" if largest > 255 else "u1").tobytes()


def sixteen(image: Image.Image, mode: str = "RGB") -> np.ndarray:
    """Return pixels of 16 bits, whose lower bytes are not the higher ones."""
    pixels = array(image, mode).astype(np.uint16)
    return pixels * 256 + (pixels * 7) % 256


def top_down(bmp: bytes) -> bytes:
    """Return a BMP whose negative height says that its first row is the upper one, and whose picture so is upside
    down."""
    (height,) = struct.unpack_from("<i", bmp, 22)
    return bmp[:22] + struct.pack("<i", -height) + bmp[26:]


def with_odd_chunk(image: Image.Image) -> bytes:
    """Return a WebP whose EXIF is behind a chunk of odd length, and the byte that pads it."""
    webp = encoded(image, "WEBP", lossless=True, exif=with_orientation(1))
    place = webp.index(b"EXIF")
    return b"".join([b"RIFF", struct.pack("<I", len(webp) + 2), webp[8:place], b"XMP \1\0\0\0 \0", webp[place:]])


def frames(kind: str, **options: Any) -> Make:
    """Return a maker of an animation, or of several pages, whose first one is the picture."""
    return lambda image: encoded(
        image, kind, save_all=True, append_images=[image.rotate(90).resize(image.size)], **options
    )


def magick(*options: str, suffix: str, prefix: str = "") -> Make:
    return by_program("convert", "IN", *options, f"{prefix}OUT", suffix=suffix)


TIFFCP = partial(by_program, suffix=".tif", source=SAVED_TIFF, source_suffix=".tif")
CJPEG = partial(by_program, suffix=".jpg", source=SAVED_PPM, source_suffix=".ppm")

KINDS = [
    Kind("JPEG, 4:2:0", saved("JPEG")),
    Kind("JPEG, 4:4:4", saved("JPEG", subsampling=0)),
    Kind("JPEG, 4:2:2", saved("JPEG", subsampling=1)),
    Kind("JPEG, 4:4:0", CJPEG("cjpeg", "-sample", "1x2", "-outfile", "OUT", "IN"), "cjpeg"),
    Kind("JPEG, 4:1:1", CJPEG("cjpeg", "-sample", "4x1", "-outfile", "OUT", "IN"), "cjpeg"),
    Kind("JPEG, progressive", saved("JPEG", progressive=True)),
    Kind("JPEG, restart markers", saved("JPEG", restart_marker_blocks=1)),
    Kind("JPEG, grey", saved("JPEG", "L")),
    Kind("JPEG, EXIF orientation 6", saved("JPEG", exif=with_orientation(6))),
    Kind("JPEG, EXIF orientation 3", saved("JPEG", exif=with_orientation(3))),
    Kind("JPEG, embedded ICC profile", lambda image: encoded(image, "JPEG", icc_profile=b"\0" * 200)),
    Kind("JPEG, RGB with Adobe's marker", saved("JPEG", keep_rgb=True)),
    Kind("JPEG, RGB by its component names", changed(saved("JPEG", keep_rgb=True), partial(without, 0xEE))),
    Kind("JPEG, YCbCr without any marker", changed(saved("JPEG"), partial(without, 0xE0))),
    Kind(
        "JPEG, YCbCr called RGB by Adobe's marker",
        changed(saved("JPEG"), lambda jpeg: with_adobe(0, without(0xE0, jpeg))),
    ),
    Kind("JPEG, JFIF and Adobe's marker at once", changed(saved("JPEG"), partial(with_adobe, 0))),
    Kind("JPEG, CMYK with Adobe's marker", saved("JPEG", "CMYK")),
    Kind("JPEG, CMYK with Adobe's marker behind the frame", changed(saved("JPEG", "CMYK"), adobe_behind_the_frame)),
    Kind("JPEG, YCCK", changed(saved("JPEG", "CMYK"), partial(with_transform, 2))),
    Kind("JPEG, CMYK without Adobe's marker", changed(saved("JPEG", "CMYK"), partial(without, 0xEE))),
    Kind("JPEG, arithmetic", CJPEG("cjpeg", "-arithmetic", "-outfile", "OUT", "IN"), "cjpeg"),
    Kind("JPEG, lossless", changed(saved("JPEG"), partial(with_frame, 3, 8))),
    Kind("JPEG, 12 bits", changed(saved("JPEG"), partial(with_frame, 1, 12))),
    Kind("JPEG, MPO of two pictures", frames("MPO")),
    Kind("PNG, RGB", SAVED_PNG),
    Kind("PNG, grey", saved("PNG", "L")),
    Kind("PNG, 1 bit", saved("PNG", "1")),
    Kind("PNG, grey, 2 bits", magick("-colorspace", "Gray", "-depth", "2", suffix=".png"), "convert"),
    Kind("PNG, palette", saved("PNG", "P")),
    Kind("PNG, palette of 4 bits", lambda image: encoded(image.quantize(16), "PNG", bits=4)),
    Kind("PNG, palette, transparent", lambda image: encoded(image.quantize(64), "PNG", transparency=3)),
    Kind("PNG, RGB, one colour transparent", saved("PNG", transparency=(1, 2, 3))),
    Kind("PNG, grey and alpha", lambda image: encoded(opaque_to_clear(image, "LA"), "PNG")),
    Kind("PNG, RGBA", lambda image: encoded(opaque_to_clear(image), "PNG")),
    Kind("PNG, grey, 16 bits", lambda image: encoded(Image.fromarray(sixteen(image, "L")[..., 0]), "PNG")),
    Kind("PNG, grey, 8 bits in 16", lambda image: encoded(Image.fromarray(sixteen(image, "L")[..., 0] // 256), "PNG")),
    Kind("PNG, grey, 16 bits, black", lambda image: encoded(Image.fromarray(0 * sixteen(image, "L")[..., 0]), "PNG")),
    Kind("PNG, RGB, 16 bits", magick("-gamma", "0.9", "-depth", "16", suffix=".png", prefix="PNG48:"), "convert"),
    Kind("PNG, RGBA, 16 bits", magick("-gamma", "0.9", "-depth", "16", suffix=".png", prefix="PNG64:"), "convert"),
    Kind("PNG, grey, one level transparent", saved("PNG", "L", transparency=3)),
    Kind("PNG, grey, 4 bits", magick("-colorspace", "Gray", "-depth", "4", suffix=".png"), "convert"),
    Kind(
        "PNG, grey and alpha, 16 bits",
        magick(
            "-colorspace",
            "Gray",
            "-alpha",
            "on",
            "-channel",
            "A",
            "-evaluate",
            "set",
            "50%",
            "-depth",
            "16",
            "-define",
            "png:color-type=4",
            suffix=".png",
        ),
        "convert",
    ),
    Kind("PNG, interlaced", magick("-interlace", "PNG", suffix=".png"), "convert"),
    Kind("PNG, gAMA of 1", magick("-set", "gamma", "1.0", suffix=".png"), "convert"),
    Kind("PNG, EXIF orientation 6", saved("PNG", exif=with_orientation(6))),
    Kind("PNG, animated", frames("PNG")),
    Kind("BMP, RGB", saved("BMP")),
    Kind("BMP, grey", saved("BMP", "L")),
    Kind("BMP, palette", saved("BMP", "P")),
    Kind("BMP, 1 bit", saved("BMP", "1")),
    Kind("BMP, 32 bits", lambda image: encoded(opaque_to_clear(image), "BMP")),
    Kind("BMP, rows from the top", changed(saved("BMP"), top_down)),
    Kind("BMP, 5-6-5 bits", magick("-define", "bmp:subtype=RGB565", suffix=".bmp"), "convert"),
    Kind("BMP, 5-5-5 bits", magick("-define", "bmp:subtype=RGB555", suffix=".bmp"), "convert"),
    Kind("BMP, palette of 4 bits", lambda image: encoded(image.quantize(16), "BMP", bits=4)),
    Kind(
        "BMP, version 4, alpha",
        magick("-alpha", "on", "-channel", "A", "-evaluate", "set", "50%", suffix=".bmp", prefix="BMP:"),
        "convert",
    ),
    Kind("BMP, OS/2", magick(suffix=".bmp", prefix="BMP2:"), "convert"),
    Kind("BMP, run lengths", magick("-colors", "64", "-compress", "RLE", suffix=".bmp", prefix="BMP3:"), "convert"),
    Kind("WebP, lossy", saved("WEBP")),
    Kind("WebP, lossless", saved("WEBP", lossless=True)),
    Kind("WebP, RGBA", lambda image: encoded(opaque_to_clear(image), "WEBP", lossless=True)),
    Kind("WebP, EXIF orientation 6", saved("WEBP", exif=with_orientation(6))),
    Kind("WebP, EXIF behind a chunk of odd length", with_odd_chunk),
    Kind("WebP, animated", frames("WEBP", lossless=True)),
    Kind("TIFF, RGB", SAVED_TIFF),
    Kind("TIFF, grey", saved("TIFF", "L")),
    Kind("TIFF, grey, white is 0", lambda image: tiff(array(image, "L"), photometric=0)),
    Kind("TIFF, 1 bit", saved("TIFF", "1")),
    Kind(
        "TIFF, 1 bit, LZW",
        by_program(
            "tiffcp",
            "-c",
            "lzw",
            "IN",
            "OUT",
            suffix=".tif",
            source=saved("TIFF", "1", compression="group4"),
            source_suffix=".tif",
        ),
        "tiffcp",
    ),
    Kind("TIFF, 1 bit, CCITT group 4", saved("TIFF", "1", compression="group4")),
    Kind("TIFF, palette", saved("TIFF", "P")),
    Kind("TIFF, LZW", saved("TIFF", compression="tiff_lzw")),
    Kind("TIFF, deflate", saved("TIFF", compression="tiff_adobe_deflate")),
    Kind("TIFF, PackBits", saved("TIFF", compression="packbits")),
    Kind("TIFF, JPEG", saved("TIFF", compression="jpeg")),
    Kind("TIFF, LZW of differences", TIFFCP("tiffcp", "-c", "lzw:2", "IN", "OUT"), "tiffcp"),
    Kind(
        "TIFF, deflate of differences, 16 bits",
        by_program(
            "tiffcp",
            "-c",
            "zip:2",
            "IN",
            "OUT",
            suffix=".tif",
            source=lambda image: tiff(sixteen(image)),
            source_suffix=".tif",
        ),
        "tiffcp",
    ),
    Kind("TIFF, JPEG, YCbCr", TIFFCP("tiffcp", "-c", "jpeg", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, JPEG, RGB", TIFFCP("tiffcp", "-c", "jpeg:r", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, JPEG, CMYK", saved("TIFF", "CMYK", compression="jpeg")),
    Kind("TIFF, 1 bit, CCITT group 3", saved("TIFF", "1", compression="group3")),
    Kind(
        "TIFF, 1 bit, white is 0",
        magick("-monochrome", "-define", "quantum:polarity=min-is-white", suffix=".tif"),
        "convert",
    ),
    Kind("TIFF, grey, 2 bits", magick("-colorspace", "Gray", "-depth", "2", suffix=".tif"), "convert"),
    Kind("TIFF, grey, 4 bits", magick("-colorspace", "Gray", "-depth", "4", suffix=".tif"), "convert"),
    Kind(
        "TIFF, palette of 4 bits", magick("-colors", "16", "-type", "Palette", "-depth", "4", suffix=".tif"), "convert"
    ),
    Kind(
        "TIFF, palette and alpha",
        magick("-colors", "64", "-type", "PaletteMatte", "-alpha", "on", suffix=".tif"),
        "convert",
    ),
    Kind(
        "TIFF, bits from the right", magick("-monochrome", "-define", "tiff:fill-order=lsb", suffix=".tif"), "convert"
    ),
    Kind("TIFF, grey, 16 bits, white is 0", lambda image: tiff(sixteen(image, "L"), photometric=0)),
    Kind("TIFF, RGBA, 16 bits", lambda image: tiff(sixteen(opaque_to_clear(image), "RGBA"), t338=(3, [2]))),
    Kind(
        "TIFF, RGBA, 16 bits, premultiplied", lambda image: tiff(sixteen(opaque_to_clear(image), "RGBA"), t338=(3, [1]))
    ),
    Kind("TIFF, CMYK, 16 bits", lambda image: tiff(sixteen(image, "CMYK"), photometric=5)),
    Kind("TIFF, RGB and one more channel", lambda image: tiff(array(opaque_to_clear(image), "RGBA"), t338=(3, [0]))),
    Kind(
        "TIFF, RGB and two more channels",
        lambda image: tiff(np.dstack([array(image), array(image)[..., :2]]), t338=(3, [0, 0])),
    ),
    Kind(
        "TIFF, grey, half precision",
        lambda image: tiff(array(image, "L").astype(np.float16), photometric=1, sample_format=3),
    ),
    Kind(
        "TIFF, grey, format of samples undefined", lambda image: tiff(array(image, "L"), photometric=1, sample_format=4)
    ),
    Kind("TIFF, grey, 12 bits", magick("-colorspace", "Gray", "-depth", "12", suffix=".tif"), "convert"),
    Kind("TIFF, zstd", saved("TIFF", compression="zstd")),
    Kind("TIFF, RGBA", lambda image: encoded(opaque_to_clear(image), "TIFF")),
    Kind(
        "TIFF, RGBA, premultiplied",
        lambda image: tiff(array(opaque_to_clear(image), "RGBA"), t338=(3, [1])),
    ),
    Kind("TIFF, grey and alpha", lambda image: encoded(opaque_to_clear(image, "LA"), "TIFF")),
    Kind("TIFF, CMYK", saved("TIFF", "CMYK")),
    Kind("TIFF, YCbCr", saved("TIFF", "YCbCr")),
    Kind("TIFF, LAB", saved("TIFF", "LAB")),
    Kind("TIFF, grey, 16 bits", lambda image: tiff(sixteen(image, "L"), photometric=1)),
    Kind("TIFF, RGB, 16 bits", lambda image: tiff(sixteen(image))),
    Kind(
        "TIFF, grey, 16 bits with sign",
        lambda image: tiff(sixteen(image, "L").view(np.int16), photometric=1, sample_format=2),
    ),
    Kind(
        "TIFF, grey, 8 bits with sign",
        lambda image: tiff(array(image, "L").view(np.int8), photometric=1, sample_format=2),
    ),
    Kind("TIFF, grey, 32 bits", lambda image: tiff(array(image, "L").astype(np.uint32), photometric=1)),
    Kind(
        "TIFF, grey, 32 bits with sign",
        lambda image: tiff(array(image, "L").astype(np.int32), photometric=1, sample_format=2),
    ),
    Kind(
        "TIFF, grey, float from 0 to 255",
        lambda image: tiff(array(image, "L").astype(np.float32), photometric=1, sample_format=3),
    ),
    Kind(
        "TIFF, grey, float from 0 to 1",
        lambda image: tiff(array(image, "L").astype(np.float32) / 255, photometric=1, sample_format=3),
    ),
    Kind("TIFF, RGB, float", lambda image: tiff(array(image).astype(np.float32), sample_format=3)),
    Kind(
        "TIFF, grey, double", lambda image: tiff(array(image, "L").astype(np.float64), photometric=1, sample_format=3)
    ),
    Kind("TIFF, big-endian", lambda image: tiff(array(image), order=">")),
    Kind("TIFF, RGB, big-endian, 16 bits", lambda image: tiff(sixteen(image), order=">")),
    *(Kind(f"TIFF, EXIF orientation {number}", saved("TIFF", exif=with_orientation(number))) for number in range(2, 9)),
    Kind("TIFF, RGB, 12 bits in 16", lambda image: tiff(sixteen(image) // 16)),
    Kind("TIFF, two pages", frames("TIFF")),
    Kind("TIFF, tiles", TIFFCP("tiffcp", "-t", "-w", "16", "-l", "16", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, a plane per colour", TIFFCP("tiffcp", "-p", "separate", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, BigTIFF", TIFFCP("tiffcp", "-8", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, strips of a row", TIFFCP("tiffcp", "-r", "1", "IN", "OUT"), "tiffcp"),
    Kind("TIFF, LZMA", TIFFCP("tiffcp", "-c", "lzma", "IN", "OUT"), "tiffcp"),
    Kind("PPM", SAVED_PPM),
    Kind("PGM", saved("PPM", "L")),
    Kind("PBM", saved("PPM", "1")),
    Kind("PPM, in ASCII", lambda image: netpbm("P3", array(image), 255)),
    Kind("PGM, in ASCII", lambda image: netpbm("P2", array(image, "L"), 255)),
    Kind("PPM, up to 100", lambda image: netpbm("P6", array(image) * 100 // 255, 100)),
    Kind("PGM, up to 100", lambda image: netpbm("P5", array(image, "L") * 100 // 255, 100)),
    Kind("PPM, 16 bits", lambda image: netpbm("P6", sixteen(image), 65535)),
    Kind("PGM, 16 bits", lambda image: netpbm("P5", sixteen(image, "L"), 65535)),
    Kind("PGM, up to 1023", lambda image: netpbm("P5", sixteen(image, "L") // 64, 1023)),
    Kind("PPM, up to 1023", lambda image: netpbm("P6", sixteen(image) // 64, 1023)),
    Kind("PGM, in ASCII, up to 1023", lambda image: netpbm("P2", sixteen(image, "L") // 64, 1023)),
    Kind("PPM, in ASCII, 16 bits", lambda image: netpbm("P3", sixteen(image), 65535)),
    Kind("PPM, 8 bits in 16", lambda image: netpbm("P6", sixteen(image) // 256, 65535)),
    Kind("PPM, up to 1", lambda image: netpbm("P6", array(image) // 128, 1)),
    Kind("PFM", lambda image: encoded(image.convert("F"), "PPM")),
    Kind("JPEG 2000, RGB", saved("JPEG2000")),
    Kind("JPEG 2000, RGB without container", saved("JPEG2000", no_jp2=True)),
    Kind("JPEG 2000, grey", saved("JPEG2000", "L")),
    Kind("JPEG 2000, grey without container", saved("JPEG2000", "L", no_jp2=True)),
    Kind("JPEG 2000, RGBA", lambda image: encoded(opaque_to_clear(image), "JPEG2000")),
    Kind("JPEG 2000, grey, 16 bits", lambda image: encoded(Image.fromarray(sixteen(image, "L")[..., 0]), "JPEG2000")),
    Kind(
        "JPEG 2000, grey, 12 bits in 16",
        lambda image: encoded(Image.fromarray(sixteen(image, "L")[..., 0] // 16), "JPEG2000"),
    ),
    Kind("JPEG 2000, grey and alpha", lambda image: encoded(opaque_to_clear(image, "LA"), "JPEG2000")),
    Kind("JPEG 2000, YCbCr", saved("JPEG2000", "YCbCr")),
    Kind("JPEG 2000, CMYK", saved("JPEG2000", "CMYK")),
    Kind("JPEG 2000, without transform of colours", saved("JPEG2000", mct=0)),
    Kind("JPEG 2000, signed", saved("JPEG2000", "L", signed=True)),
    Kind("JPEG 2000, RGB, 16 bits", magick("-depth", "16", "-gamma", "0.9", suffix=".jp2"), "convert"),
    Kind("JPEG 2000, palette", magick("-colors", "64", "-type", "Palette", suffix=".jp2"), "convert"),
    Kind("JPEG 2000, with an offset", saved("JPEG2000", offset=(1, 2), tile_offset=(0, 0), tile_size=(64, 64))),
    Kind("JPEG 2000, tiles", saved("JPEG2000", tile_size=(16, 16))),
    Kind("JPEG 2000, lossy", saved("JPEG2000", irreversible=True, quality_layers=[20])),
    Kind("GIF", saved("GIF", "P")),
    Kind("GIF, animated", frames("GIF")),
]
