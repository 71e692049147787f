"""What becomes of each kind of image: kept bit for bit, re-encoded and counted, or refused with a reason."""

import io
import struct
import threading
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from dali_train.data.convert.image import EncodingOptions, MemoryBudget, StoredImage, prepare
from dali_train.data.dataset.image_file import BadImageError, DecodeChecker, image_size
from dali_train.errors import DatasetError
from tests.conftest import encoded, photograph
from tests.convert.files import small_photograph
from tests.dataset.image_kinds import netpbm, tiff

BUDGET = MemoryBudget(10**8)
SIZE = np.array([[40, 60]], np.int32)  # height and width


def prepared(content: bytes, **encoding: Any) -> StoredImage:
    return prepare(content, EncodingOptions(**encoding), BUDGET)


def opened(stored: StoredImage) -> Image.Image:
    return Image.open(io.BytesIO(stored.content))


def dark(highest: int) -> list[bytes]:
    """Return images of 16 bits whose values end at `highest`."""
    grey = np.linspace(0, highest, 64).astype(np.uint16).reshape(8, 8)
    rgb = np.dstack([grey] * 3)
    alpha = np.full_like(grey, 0xFFFF)
    return [
        encoded(Image.fromarray(grey), "PNG"),
        encoded(Image.fromarray(grey), "JPEG2000"),
        tiff(grey[..., None], photometric=1),
        tiff(rgb),
        tiff(np.dstack([rgb, alpha]), t338=(3, [2])),
        netpbm("P2", grey, 0xFFFF),
        netpbm("P5", grey, 0xFFFF),
        netpbm("P6", rgb, 0xFFFF),
    ]


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be large and is 100 bytes long."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


@pytest.mark.parametrize(
    ("mode", "options"),
    [("RGB", {}), ("L", {}), ("RGB", {"progressive": True}), ("RGB", {"subsampling": 0}), ("RGB", {"keep_rgb": True})],
)
def test_plain_jpegs_stay_bit_for_bit(mode: str, options: dict) -> None:
    content = encoded(photograph(1, 40, 60).convert(mode), "JPEG", **options)
    stored = prepared(content)
    assert stored.content == content
    assert (stored.height, stored.width) == (40, 60)
    assert stored.unchecked and stored.reencoded is None
    assert DecodeChecker().failures([content], SIZE) == {}


@pytest.mark.parametrize(
    ("mode", "kind", "name"),
    [
        ("CMYK", "JPEG", "CMYK JPEG"),
        ("RGB", "PNG", "RGB PNG"),
        ("RGBA", "PNG", "RGBA PNG"),
        ("LA", "PNG", "LA PNG"),
        ("1", "PNG", "1 PNG"),
        ("P", "PNG", "P PNG"),
        ("P", "GIF", "P GIF"),
        ("RGB", "BMP", "RGB BMP"),
        ("RGB", "WEBP", "RGB WEBP"),
        ("CMYK", "TIFF", "CMYK TIFF"),
        ("RGB", "PPM", "RGB PPM"),
    ],
)
def test_what_is_no_plain_jpeg_becomes_one(mode: str, kind: str, name: str) -> None:
    content = encoded(photograph(1, 40, 60).convert(mode), kind)
    stored = prepared(content)
    assert stored.reencoded == name
    image = opened(stored)
    assert image.format == "JPEG" and image.mode in ("RGB", "L") and image.size == (60, 40)
    assert (stored.height, stored.width) == (40, 60)
    same = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), float)
    # JPEGs keep their halved colour resolution, which blobs of two pixels do not survive.
    assert np.abs(np.asarray(image.convert("RGB"), float) - same).mean() < (20 if kind == "JPEG" else 8)
    assert DecodeChecker().failures([stored.content], SIZE) == {}


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 60 * 40).reshape(40, 60).astype(np.uint16)
    stored = prepared(encoded(Image.fromarray(values), "PNG"))
    assert stored.reencoded is not None and stored.reencoded.startswith("I;16")
    assert np.abs(np.asarray(opened(stored), float) - values / 257).max() < 6


def sideways(orientation: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """A photograph whose colours tell how it is turned, with this EXIF orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(photograph(1, 40, 60).resize((6, 4)).resize((60, 40)).convert(mode), kind, exif=exif)


def test_exif_orientation_stays_and_is_counted() -> None:
    kept = prepared(content := sideways(6))
    assert kept.rotated and (kept.height, kept.width, kept.content) == (40, 60, content)
    remade = prepared(sideways(6, mode="CMYK"))
    assert remade.rotated and (remade.height, remade.width) == (40, 60)
    assert opened(remade).getexif()[ExifTags.Base.Orientation] == 6
    assert not prepared(small_photograph(1)).rotated
    # PIL turns a TIFF whatever one does, so that nothing may say that it still has to be.
    assert not prepared(sideways(6, "TIFF")).rotated


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "CMYK"])
def test_exif_orientation_is_applied_as_pil_does(kind: str) -> None:
    for orientation in range(1, 9):
        content = sideways(orientation, *(("JPEG", "CMYK") if kind == "CMYK" else (kind,)))
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        for options in ({}, {"format": "raw"}, {"max_side": 30}):
            stored = prepared(content, apply_orientation=True, **options)
            size = upright.size if "max_side" not in options else tuple(side // 2 for side in upright.size)
            assert (stored.width, stored.height) == size and not stored.rotated
            assert stored.turned == (orientation != 1 and kind != "TIFF")
            if "format" in options:
                image = Image.frombytes("RGB", size, stored.content)
            else:
                image = opened(stored)
                assert image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            assert np.abs(np.asarray(image, float) - np.asarray(upright.resize(size), float)).mean() < 6
    assert prepared(sideways(1), apply_orientation=True).unchecked, "upright ones keep their bytes"


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ({"max_side": 30}, (30, 20)),
        ({"short_side": 20}, (30, 20)),
        ({"max_side": 60}, None),
        ({"short_side": 64}, None),
    ],
)
def test_large_images_shrink_and_small_ones_stay(limits: dict, size: tuple[int, int] | None) -> None:
    content = encoded(photograph(1, 40, 60), "JPEG")
    stored = prepared(content, **limits)
    if size is None:
        assert stored.content == content
    else:
        assert stored.reencoded == "resized"
        assert opened(stored).size == size == (stored.width, stored.height)


@pytest.mark.parametrize("size", [(12_000, 9_000), (16_320, 12_240)])
@pytest.mark.parametrize("options", [{"short_side": 90}, {"max_side": 120, "format": "raw"}])
def test_photographs_too_large_to_decode_shrink(size: tuple[int, int], options: dict[str, Any]) -> None:
    content = encoded(Image.linear_gradient("L").resize(size), "JPEG", progressive=size[0] == 12_000)
    before = Image.MAX_IMAGE_PIXELS
    stored = prepared(content, **options)
    assert before == Image.MAX_IMAGE_PIXELS, "PIL's settings are the user's"
    assert (stored.width, stored.height) == (120, 90)
    pixels = np.frombuffer(stored.content, np.uint8) if stored.is_raw else np.asarray(opened(stored).convert("RGB"))
    expected = np.asarray(Image.linear_gradient("L").resize((120, 90)).convert("RGB"), float)
    assert np.abs(pixels.reshape(expected.shape) - expected).max() < 8
    for other in ({}, {"max_side": size[0] - 1}):
        with pytest.raises(BadImageError, match=f"{size[0]} x {size[1]} pixels: .* convert` does, .* --short-side or"):
            prepared(content, **other)


def test_quality_decides_the_size() -> None:
    image = encoded(photograph(1, 100, 120), "PNG")
    assert len(prepared(image, quality=50).content) < len(prepared(image, quality=95).content) / 2


def test_raw_pixels_are_those_of_the_image() -> None:
    original = photograph(1, 40, 60)
    stored = prepared(encoded(original, "PNG"), format="raw")
    assert stored.format == "RAW"
    assert np.array_equal(np.frombuffer(stored.content, np.uint8).reshape(40, 60, 3), np.asarray(original))
    grey = prepare(np.asarray(original.convert("L")), EncodingOptions(format="raw"), BUDGET)
    assert len(grey.content) == 40 * 60 * 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not an image in a known format (JPEG, PNG, BMP, WEBP, TIFF, PPM, JPEG2000, GIF); it begins with b''"),
        (b"<html>404</html>", "GIF); it begins with b'<html>40'"),
        (b"\xff\xd8\xff\xe0", "is not a JPEG that can be read: the file ends after 4 bytes without a frame header"),
        (encoded(photograph(1, 40, 60), "PNG")[:-2000], "cannot be decoded"),
        (encoded(photograph(1, 40, 60).convert("CMYK"), "JPEG")[:-200], "cannot be decoded: image file is truncated"),
        (png_header(100_000, 100_000), "refused as a decompression bomb"),
        (png_header(12_000, 12_000), "12000 x 12000 pixels: over 100,000,000 are refused as a decompression bomb"),
        (png_header(65_501, 10), "65501 x 10 pixels: a side may have 65,500"),
        (
            encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
            "floating-point pixels: convert it to 8 bits first",
        ),
        *(
            (content, f"would be black: has values from 0 to {highest} in 16 bits, where 65,535 is white; multiply")
            for number, highest in ((255, "255"), (4095, "4,095"))
            for content in dark(number)
        ),
    ],
)
def test_bad_images_say_why(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as error:
        prepared(content)
    assert reason in str(error.value)


def test_a_jpeg_that_claims_to_be_huge_is_refused_by_its_header() -> None:
    content = bytearray(small_photograph(1))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 65_000, 65_000)
    with pytest.raises(
        BadImageError, match="65000 x 65000 pixels: over 100,000,000 are refused as a decompression bomb"
    ):
        prepared(bytes(content))


def test_dali_finds_the_damaged_ones_of_a_batch_and_goes_on() -> None:
    checker = DecodeChecker()
    images = [small_photograph(seed) for seed in range(checker.BATCH)]
    damaged = list(images)
    damaged[3] = images[3][:-2]
    damaged[15] = images[15][: len(images[15]) // 2]
    sizes = np.array([image_size(image) for image in images], np.int32)
    assert list(checker.failures(damaged, sizes)) == [3, 15]
    assert checker.failures(damaged, sizes)[15].startswith("cannot be decoded: image file is truncated")
    assert checker.failures(images, sizes) == {}
    assert checker.failures(images[:1], sizes[:1]) == {}
    height, width = sizes[2]
    sizes[2] = width, height
    assert checker.failures(images, sizes) == {
        2: f"is decoded to {width} x {height} pixels, where {height} x {width} were expected"
    }


def test_luminance_alone_finds_what_rgb_finds() -> None:
    """The checker decodes luminance only. Damaged files must get the verdict that training's RGB decoder gives."""
    from nvidia.dali import Pipeline, fn, types

    pipeline: Any = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        pipeline.set_outputs(
            fn.decoders.image(fn.external_source(name="image", no_copy=True), device="cpu", output_type=types.RGB)
        )
    pipeline.build()

    def decodes_to_rgb(content: bytes) -> bool:
        pipeline.feed_input("image", [np.frombuffer(content, np.uint8)])
        try:
            pipeline.run()
        except RuntimeError:
            return False
        return True

    checker = DecodeChecker()
    random = np.random.default_rng(0)
    verdicts = []
    for seed in range(60):
        content = bytearray(small_photograph(seed))
        if seed % 2:
            del content[int(random.integers(2, len(content))) :]
        else:
            content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
        verdicts.append(decodes_to_rgb(bytes(content)))
        faults = checker.failures([bytes(content)], np.array([image_size(small_photograph(seed))], np.int32))
        assert ("cannot be decoded" not in "".join(faults.values())) == verdicts[-1]
    assert 10 < sum(verdicts) < 50


def test_budget_holds_workers_back() -> None:
    budget = MemoryBudget(100)
    order = []

    def work() -> None:
        with budget.held(1000):  # more than there is: all of it
            order.append("second")

    with budget.held(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_side": 0}, "--max-side is 0: use 1 to 65500 pixels"),
        ({"quality": 101}, "--quality is 101: use 1 to 100, e.g. 90"),
    ],
)
def test_recipes_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        EncodingOptions(**options)
