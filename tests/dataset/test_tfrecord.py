"""The wire format against another implementation, and what damaged files say."""

import gzip
import zlib
from pathlib import Path

import pytest
from tfrecord import reader, writer

from dali_train.data.dataset.tfrecord import (
    FOOTER_SIZE,
    Buffer,
    RecordSpan,
    TFRecordError,
    encode_example,
    frame_record,
    parse_example,
    walk_records,
)

FEATURES: dict[str, bytes | str | int] = {
    "image/class/label": 1000,
    "image/class/synset": "n01440764",
    "negative": -3,
    "empty": b"",
    "large": 2**62,
}


def joined(pieces: tuple[Buffer, ...]) -> bytes:
    return b"".join(pieces)


def record(size: int = 300) -> bytes:
    return joined(frame_record(encode_example(bytes(range(256)) * (size // 256 + 1), FEATURES)))


def test_another_reader_understands_the_records(tmp_path: Path) -> None:
    path = tmp_path / "records"
    images = [b"", b"x", b"y" * 127, b"z" * 128, bytes(20_000)]
    path.write_bytes(b"".join(joined(frame_record(encode_example(image, FEATURES))) for image in images))
    read = list(reader.tfrecord_loader(str(path), None))
    assert [bytes(example["image/encoded"]) for example in read] == images
    assert int(read[0]["image/class/label"][0]) == 1000
    assert int(read[0]["negative"][0]) == -3
    assert int(read[0]["large"][0]) == 2**62
    assert bytes(read[0]["image/class/synset"]) == b"n01440764"


def test_reads_what_another_writer_wrote(tmp_path: Path) -> None:
    path = tmp_path / "records"
    other = writer.TFRecordWriter(str(path))
    other.write({"image/encoded": (b"abc" * 100, "byte"), "image/class/label": (7, "int"), "weight": (0.5, "float")})
    other.write({"image/encoded": (b"", "byte"), "image/class/label": (-1, "int"), "boxes": ([1, 2, 300], "int")})
    other.close()
    content = memoryview(path.read_bytes())
    first, second = walk_records(content, path, check_payload=True)
    features = parse_example(content, first, path)
    ((start, end),) = features["image/encoded"].spans
    assert bytes(content[start:end]) == b"abc" * 100
    assert features["image/class/label"].integers == (7,)
    assert features["weight"].kind == "float"
    features = parse_example(content, second, path)
    assert features["image/class/label"].integers == (-1,)
    assert features["boxes"].integers == (1, 2, 300)


def test_equal_input_gives_equal_bytes_and_the_image_is_not_copied() -> None:
    image = bytes(1000)
    head, middle, tail = encode_example(image, FEATURES)
    assert middle is image
    assert encode_example(image, FEATURES) == (head, image, tail)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r[:-1], "at byte 0: truncated record: its length is"),
        (lambda r: r[:7], "at byte 0: truncated record: 7 bytes are left, a record has at least 16"),
        (lambda r: r + r[:20], "truncated record: its length is"),
        (lambda r: b"\x01" + r[1:], "at byte 0: CRC mismatch of the record's length"),
        (lambda r: r[:100] + bytes([r[100] ^ 1]) + r[101:], "at byte 0: CRC mismatch of the record's"),
        (lambda r: r[:-1] + bytes([r[-1] ^ 1]), "bytes of data: the file is damaged"),
        (lambda r: b"GIF89a" * 20, "not a TFRecord file, or damaged here"),
        (gzip.compress, "at byte 0: the file is compressed with gzip: unpack it: `gunzip < FILE > NEW`"),
        (zlib.compress, "at byte 0: the file is compressed with zlib: unpack it: `python3 -c 'import sys, zlib; .*` *"),
        (lambda r: zlib.compress(b""), "at byte 0: the file is compressed with zlib"),
    ],
)
def test_damage_is_named_with_its_place(damage, message: str) -> None:
    with pytest.raises(TFRecordError, match=message):
        list(walk_records(memoryview(damage(record())), "FILE", check_payload=True))


def test_a_payload_that_is_no_example() -> None:
    payload = b"\xff" * 40
    content = memoryview(joined(frame_record([payload])))
    (span,) = walk_records(content, "FILE", check_payload=True)
    with pytest.raises(TFRecordError, match=r"FILE: at byte 0: the record's data is not a tf.train.Example"):
        parse_example(content, span, "FILE")


def test_a_field_that_claims_more_than_the_record_has() -> None:
    payload = b"\x0a" + b"\xff\xff\xff\xff\x0f" + b"abc"  # a field of 4 GB
    with pytest.raises(TFRecordError, match=r"not a tf.train.Example"):
        parse_example(memoryview(payload), RecordSpan(0, len(payload)), "FILE")


def test_walk_can_begin_at_any_record() -> None:
    content = memoryview(record(300) + record(900))
    spans = list(walk_records(content, "FILE", check_payload=True))
    assert list(walk_records(content, "FILE", check_payload=True, start_at=spans[0].end + FOOTER_SIZE)) == spans[1:]
