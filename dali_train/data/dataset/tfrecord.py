"""The TFRecord wire format: framing, CRCs and the few parts of tf.train.Example that image datasets use.

A record is ``length (uint64) | masked CRC32C of length (uint32) | payload | masked CRC32C of payload (uint32)``,
little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). The payload
is a serialised ``tf.train.Example``: a map from feature name to a list of bytes, floats or int64.

Records are read through a memory map and features are located, not copied: the index that training reads
needs the position of the encoded image inside the file, and a walk that skips image bytes never touches their pages.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from crc32c import crc32c

from dali_train.data.dataset.packed_files import how_packed
from dali_train.errors import RunError

HEADER_SIZE = 12  # length, CRC of length
FOOTER_SIZE = 4  # CRC of payload
_MASK_DELTA = 0xA282EAD8  # from the format's definition, see the module's docstring
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5  # protobuf wire types

Buffer = bytes | memoryview
FeatureKind = Literal["bytes", "float", "int64"]
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # tf.train.Feature: the field number of each kind of list


class TFRecordError(RunError):
    """A file that violates the format; the message names the file and the byte offset."""

    def __init__(self, path: Path | str, offset: int, problem: str) -> None:
        super().__init__(f"{path}: at byte {offset}: {problem}")


@dataclass(frozen=True, slots=True)
class RecordSpan:
    """Where a record's payload lies in its file, in bytes; the header starts ``HEADER_SIZE`` before it."""

    start: int
    end: int

    @property
    def header(self) -> int:
        return self.start - HEADER_SIZE


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature's kind and its values: int64 as numbers, bytes as (start, end) spans in the buffer."""

    kind: FeatureKind
    integers: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


def masked_crc32c(data: Buffer) -> int:
    """Return the CRC32C of `data`, rotated and shifted so that CRCs of data holding CRCs stay strong."""
    return _mask(crc32c(data))


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame_record(payload: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Return a record as in a TFRecord file. The pieces of the payload are not copied."""
    length = struct.pack("<Q", sum(map(len, payload)))
    crc = 0
    for piece in payload:
        crc = crc32c(piece, crc)
    return length + struct.pack("<I", masked_crc32c(length)), *payload, struct.pack("<I", _mask(crc))


def walk_records(
    buffer: memoryview, path: Path | str, *, check_payload: bool, start_at: int = 0
) -> Iterator[RecordSpan]:
    """Yield all records of a mapped file in order, from the one that begins at byte `start_at`.

    The CRC of every length is checked; that of the payload only with `check_payload`, since it reads all bytes.

    Raises:
        TFRecordError: a truncated record, or a CRC that does not match.
    """
    offset, size = start_at, len(buffer)
    while offset < size:
        if size - offset < HEADER_SIZE + FOOTER_SIZE:
            problem = f"truncated record: {size - offset} bytes are left, a record has at least 16"
            raise _no_record(buffer, path, offset, problem)
        length, length_crc = struct.unpack_from("<QI", buffer, offset)
        if masked_crc32c(buffer[offset : offset + 8]) != length_crc:
            problem = f"CRC mismatch of the record's length {length}: not a TFRecord file, or damaged here"
            raise _no_record(buffer, path, offset, problem)
        start = offset + HEADER_SIZE
        end = start + length
        if end + FOOTER_SIZE > size:
            raise TFRecordError(
                path,
                offset,
                f"truncated record: its length is {length} bytes, {max(0, size - start - FOOTER_SIZE)} are there: copy "
                "the file again",
            )
        if check_payload:
            (payload_crc,) = struct.unpack_from("<I", buffer, end)
            if masked_crc32c(buffer[start:end]) != payload_crc:
                raise TFRecordError(
                    path,
                    offset,
                    f"CRC mismatch of the record's {length} bytes of data: the file is damaged, copy it again",
                )
        yield RecordSpan(start, end)
        offset = end + FOOTER_SIZE


def _no_record(buffer: memoryview, path: Path | str, offset: int, problem: str) -> TFRecordError:
    if offset:
        return TFRecordError(path, offset, f"{problem}: copy the file again")
    packed = how_packed(path, bytes(buffer[:512]), or_zlib=True)
    begins = f"{problem}: it begins with {bytes(buffer[:8])!r}; move it away if it is no TFRecord file"
    return TFRecordError(path, 0, f"the file {packed}" if packed else begins)


Value = bytes | str | int | tuple[int, ...]
"""Of a feature that is written; a tuple is a list of numbers."""


def encode_example(image: Buffer, features: Mapping[str, Value]) -> tuple[bytes, Buffer, bytes]:
    """Encode a ``tf.train.Example`` of ``image/encoded`` and `features`, as (head, image, tail).

    The image, which is nearly all of it, comes back as it is, not copied. The order is fixed: the image, then
    `features` in the mapping's order, so that equal input gives equal bytes; protobuf libraries leave it open for maps.
    """
    tail = b"".join(_map_entry(name, value) for name, value in features.items())
    size = len(image)
    head = _prefix(1, size)  # BytesList.value
    head = _prefix(_BYTES_LIST, size + len(head)) + head  # Feature.bytes_list
    head = _IMAGE_KEY + _prefix(2, size + len(head)) + head  # key and value of the map's entry
    head = _prefix(1, size + len(head)) + head  # Features.feature
    head = _prefix(1, size + len(head) + len(tail)) + head  # Example.features
    return head, image, tail


def write_records(path: Path, records: Iterable[tuple[Buffer, Mapping[str, Value]]]) -> None:
    """Write a TFRecord file, and its directory, of Examples given as (image, features)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for image, features in records:
            file.writelines(frame_record(encode_example(image, features)))


@lru_cache(8192)  # labels, synsets and sizes recur: 5 us instead of 20 us per image
def _map_entry(name: str, value: Value) -> bytes:
    if isinstance(value, int | tuple):
        numbers = (value,) if isinstance(value, int) else value
        # Packed; negative numbers take ten bytes in two's complement.
        packed = b"".join(_varint(number & 0xFFFFFFFFFFFFFFFF) for number in numbers)
        feature = _delimited(_INT64_LIST, _delimited(1, packed))
    else:
        feature = _delimited(_BYTES_LIST, _delimited(1, value.encode() if isinstance(value, str) else value))
    return _delimited(1, _delimited(1, name.encode()) + _delimited(2, feature))


def parse_example(buffer: memoryview, record: RecordSpan, path: Path | str) -> dict[str, Feature]:
    """Locate the features of one record by name. Image bytes are located, not read.

    Raises:
        TFRecordError: the payload is not a ``tf.train.Example``.
    """
    features: dict[str, Feature] = {}
    try:
        for field, start, end in _fields(buffer, record.start, record.end):
            if field != 1:  # Example.features
                continue
            for _, entry_start, entry_end in _fields(buffer, start, end):
                parts = {number: (a, b) for number, a, b in _fields(buffer, entry_start, entry_end)}
                name = bytes(buffer[slice(*parts[1])]).decode()
                features[name] = _parse_feature(buffer, *parts[2]) if 2 in parts else Feature("bytes")
    except (_WireError, KeyError, UnicodeDecodeError) as error:
        raise TFRecordError(path, record.header, f"the record's data is not a tf.train.Example ({error})") from error
    return features


class _WireError(ValueError):
    pass


def _parse_feature(buffer: memoryview, start: int, end: int) -> Feature:
    for field, list_start, list_end in _fields(buffer, start, end):
        if field == _BYTES_LIST:
            return Feature("bytes", spans=tuple((a, b) for _, a, b in _fields(buffer, list_start, list_end)))
        if field == _INT64_LIST:
            return Feature("int64", integers=tuple(_integers(buffer, list_start, list_end)))
        if field == _FLOAT_LIST:
            return Feature("float")  # no feature that is read here holds floats: the kind is all an error needs
    return Feature("bytes")


def _integers(buffer: memoryview, start: int, end: int) -> Iterator[int]:
    while start < end:
        tag, start = _read_varint(buffer, start, end)
        if tag & 7 == _LENGTH_DELIMITED:  # packed
            length, start = _read_varint(buffer, start, end)
            stop = start + length
        else:
            stop = start + 1  # one unpacked number
        while start < stop:
            value, start = _read_varint(buffer, start, end)
            yield value - (1 << 64) if value >> 63 else value


def _fields(buffer: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of each length-delimited field; others are skipped."""
    while start < end:
        tag, start = _read_varint(buffer, start, end)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length, start = _read_varint(buffer, start, end)
            stop = start + length
            if stop <= end:
                yield tag >> 3, start, stop
        elif wire_type == _VARINT:
            _, stop = _read_varint(buffer, start, end)
        elif wire_type in (_FIXED64, _FIXED32):
            stop = start + (8 if wire_type == _FIXED64 else 4)
        else:
            raise _WireError(f"wire type {wire_type} at byte {start}")
        if stop > end:
            raise _WireError(f"a field that ends at byte {stop}, past {end}")
        start = stop


def _read_varint(buffer: memoryview, start: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if start >= end:
            raise _WireError(f"an unfinished number at byte {start}")
        byte = buffer[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, start
    raise _WireError(f"a number of over ten bytes at byte {start}")


def _varint(value: int) -> bytes:
    if value < 0x80:  # nearly always; a record has fifty of them
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def _prefix(field: int, size: int) -> bytes:
    """What stands before `size` bytes of a field; field numbers here are below 16, so that the tag is one byte."""
    return _ONE_BYTE[field << 3 | _LENGTH_DELIMITED] + _varint(size)


def _delimited(field: int, content: bytes) -> bytes:
    return _prefix(field, len(content)) + content


_IMAGE_KEY = _delimited(1, b"image/encoded")
