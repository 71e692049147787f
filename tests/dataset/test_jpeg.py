"""What the header says, compared with PIL, and headers that make no sense."""

import io

import pytest
from PIL import Image

from dali_train.data.dataset.image_file import BadImageError, parse_jpeg_header
from tests.conftest import encoded, photograph


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"quality": 30, "subsampling": 2}, {"comment": b"x" * 5000}]
)
def test_header_agrees_with_pil(mode: str, options: dict) -> None:
    content = encoded(photograph(1, 34, 58).convert(mode), "JPEG", **options)
    header = parse_jpeg_header(content)
    image = Image.open(io.BytesIO(content))
    assert (header.width, header.height) == image.size
    assert header.components == len(image.getbands())
    assert header.precision == 8
    assert header.process == (2 if options.get("progressive") else 0)
    assert header.is_plain == (mode != "CMYK")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_exif_orientation(orientation: int, byte_order: str) -> None:
    exif = Image.Exif()
    exif.endian = byte_order
    exif[0x010F] = "a camera"
    exif[0x0112] = orientation
    assert parse_jpeg_header(encoded(photograph(1, 32, 32), "JPEG", exif=exif)).orientation == orientation


def test_damaged_exif_counts_as_upright() -> None:
    for exif in (
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0XX*\0\x08\0\0\0\0\0",
    ):
        assert parse_jpeg_header(encoded(photograph(1, 32, 32), "JPEG", exif=exif)).orientation == 1


def test_every_truncated_header_is_an_error() -> None:
    content = encoded(photograph(1, 32, 32), "JPEG")
    frame = content.index(b"\xff\xc0")
    for end in range(2, frame + 10):
        with pytest.raises(BadImageError):
            parse_jpeg_header(content[:end])


def test_twelve_bits_and_rare_processes_are_not_plain() -> None:
    content = bytearray(encoded(photograph(1, 32, 32), "JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 4] = 12
    assert not parse_jpeg_header(bytes(content)).is_plain
    content[frame + 4] = 8
    content[frame + 1] = 0xC9  # arithmetic coding
    assert not parse_jpeg_header(bytes(content)).is_plain
