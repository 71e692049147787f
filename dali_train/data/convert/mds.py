"""MDS, the format of MosaicML Streaming: ``index.json`` and shards of samples with the same columns.

https://docs.mosaicml.com/projects/streaming, "MDS": a shard begins with uint32s, the number of samples, where each
begins and where the last one ends; a sample with a uint32 for each column of no fixed size, then the columns' values.
"""

import mmap
import struct
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from dali_train.config.check import Count, CountOr0, Rule, from_json, require
from dali_train.data.convert.archive import FileRanges, Member, SourceError
from dali_train.data.convert.listing import checked_label, find_column, sources_of
from dali_train.data.convert.packed import PackedImages, Unpacked, import_pyarrow
from dali_train.data.convert.sources import ImageFiles, Source, Sources
from dali_train.errors import ConfigError
from dali_train.files import ForeignFileError, read_json

_MAX_INDEX_BYTES = 1 << 28
_IMAGES = ("jpeg", "png", "bytes")
_LABELS = {"int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q"}  # encoding -> format of `struct`
_LABELS |= {f"u{name}": kind.upper() for name, kind in _LABELS.items() if name != "int"}
_CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy"}  # Streaming's name -> pyarrow's


@dataclass(frozen=True, kw_only=True)
class _File:
    basename: Annotated[
        str, Rule("a path below index.json", pattern=r"(?:[^./\0][^/\0]{0,254}/){0,15}[^./\0][^/\0]{0,254}")
    ]
    bytes: Annotated[int, Rule("a number of bytes up to 2**32", 0, 1 << 32)]


@dataclass(frozen=True, kw_only=True)
class _Shard:
    version: Literal[2]
    format: Literal["mds"]
    samples: CountOr0
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[Count | None, ...]
    raw_data: _File
    zip_data: _File | None = None
    compression: str | None = None

    def __post_init__(self) -> None:
        columns = (set(self.column_names), self.column_names, self.column_encodings, self.column_sizes)
        require(
            len(set(map(len, columns))) == 1, "column_names, column_encodings and column_sizes do not fit each other"
        )


@dataclass(frozen=True, kw_only=True)
class _Index:
    version: Literal[2]
    shards: tuple[_Shard, ...]


@dataclass(frozen=True)
class _Columns:
    """Where a shard's samples have what is read of them."""

    sizes: tuple[int | None, ...]  # bytes; None: each sample says
    image: int  # number of its column
    label: int
    label_format: str  # of `struct`


def mds(options: Namespace) -> Sources:
    """Return the splits and the class names; compressed shards are unpacked when they are read.

    Raises:
        SourceError: an index or a shard that is damaged, missing or of another format, or a label that cannot be.
    """
    unpacked = Unpacked(options.out)

    def list_index(path: Path) -> Iterator[Source]:
        above = [parent for parent in path.parent.parents if parent.is_relative_to(options.source)]
        if any((parent / path.name).exists() for parent in above):
            return  # Streaming's merge_index has put its shards into that one
        for shard in _read_index(path).shards:
            yield _list_shard(path, shard, _find_columns(path, shard, options), unpacked)

    return sources_of(options, "index.json", list_index)


def _read_index(path: Path) -> _Index:
    try:
        return from_json(_Index, read_json(path, _MAX_INDEX_BYTES))
    except ConfigError as error:
        raise SourceError(f"{path}: {error}: use the index.json of MDS version 2 that belongs to the shards") from error
    except (FileNotFoundError, ForeignFileError) as error:
        raise SourceError(f"{error}: fetch it again") from error


def _find_columns(path: Path, shard: _Shard, options: Namespace) -> _Columns:
    columns = dict(zip(shard.column_names, shard.column_encodings, strict=True))
    image = find_column(path, columns, "--image-key", options.image_key, ("x", "image"))
    label = find_column(path, columns, "--label-key", options.label_key, ("y", "label"))
    if columns[image] not in _IMAGES:
        raise SourceError(
            f"{path}: column {image} is {columns[image]}: name one of jpeg, png or bytes with --image-key"
        )
    number, kind = shard.column_names.index(label), _LABELS.get(columns[label])
    if kind is None or shard.column_sizes[number] != struct.calcsize(kind):
        raise SourceError(
            f"{path}: column {label} is {columns[label]} of size {shard.column_sizes[number]}: name one of int (8), "
            "uint8 (1) and the like with --label-key"
        )
    return _Columns(shard.column_sizes, shard.column_names.index(image), number, kind)


def _list_shard(index: Path, shard: _Shard, columns: _Columns, unpacked: Unpacked) -> Source:
    path = index.parent / shard.raw_data.basename
    if path.exists():
        _check_size(path, shard.raw_data)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            content.madvise(mmap.MADV_RANDOM)  # reading ahead of each label would read the entire shard
            found = _samples(path, content, shard, columns)
            members = ((Member(f"sample {n}", begin, size), label) for n, (begin, size, label) in enumerate(found))
            return ImageFiles(FileRanges(path), members)
    if shard.zip_data is None or not (path := index.parent / shard.zip_data.basename).exists():
        raise SourceError(f"{path}: is missing, and {index} names it: fetch it")
    samples = list(_samples(path, _unpack(path, shard), shard, columns))
    return PackedImages(
        path,
        "sample",
        np.array([label for _, _, label in samples], dtype=np.int32),
        partial(_images, path, shard, columns),
        unpacked,
        num_bytes=sum(size for _, size, _ in samples),
    )


def _check_size(path: Path, file: _File) -> None:
    size = path.stat().st_size
    if size != file.bytes or not size:
        raise SourceError(
            f"{path}: has {size:,} bytes, {file.bytes:,} by index.json: cut off or another's: fetch it again"
        )


def _samples(
    path: Path, content: bytes | mmap.mmap, shard: _Shard, columns: _Columns
) -> Iterator[tuple[int, int, int]]:
    """Yield where each image begins, its size and its label."""
    damaged = f"{path}: damaged, or not the shard that index.json describes: fetch both again"
    table = 4 * (shard.samples + 2)
    begins = struct.unpack_from(f"<{shard.samples + 1}I", content, 4) if table <= len(content) else ()
    if not begins or struct.unpack_from("<I", content) != (shard.samples,) or begins[0] < table:
        raise SourceError(damaged)
    own_sizes = struct.Struct(f"<{columns.sizes.count(None)}I")
    for number, (begin, end) in enumerate(pairwise(begins)):
        if not begin + own_sizes.size <= end <= len(content):
            raise SourceError(f"{damaged} (sample {number})")
        own = iter(own_sizes.unpack_from(content, begin))
        sizes = [next(own) if size is None else size for size in columns.sizes]
        places = [*accumulate(sizes, initial=begin + own_sizes.size)]
        if places[-1] != end:
            raise SourceError(f"{damaged} (sample {number})")
        (label,) = struct.unpack_from(columns.label_format, content, places[columns.label])
        yield places[columns.image], sizes[columns.image], checked_label(label, f"{path}:sample {number}")


def _images(path: Path, shard: _Shard, columns: _Columns) -> Iterator[bytes]:
    content = _unpack(path, shard)
    for begin, size, _ in _samples(path, content, shard, columns):
        yield content[begin : begin + size]


def _unpack(path: Path, shard: _Shard) -> bytes:
    """Raises SourceError: compressed in a way that is not read, or damaged."""
    assert shard.zip_data is not None
    _check_size(path, shard.zip_data)
    codec = _CODECS.get((shard.compression or "").partition(":")[0])
    if codec is None:
        raise SourceError(
            f"{path}: compression is {shard.compression}, and {', '.join(_CODECS)} are read: unpack each shard, this "
            f"one to {path.parent / Path(shard.raw_data.basename).name}"
        )
    pyarrow = import_pyarrow()
    try:
        size = shard.raw_data.bytes
        content: bytes = pyarrow.decompress(path.read_bytes(), decompressed_size=size, codec=codec, asbytes=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{path}: damaged ({error}): fetch it again") from error
    return content
