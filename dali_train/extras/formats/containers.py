"""Datasets as other libraries store them: WebDataset, Parquet files of the Hugging Face hub, MosaicML Streaming's MDS.

WebDataset (https://github.com/webdataset/webdataset): tars in which the files of a sample, KEY.jpg, KEY.cls, KEY.json,
..., are side by side; KEY ends at the first dot of the file's name, whatever dots its directories have
(webdataset.tariterators.base_plus_ext).

Parquet (https://huggingface.co/docs/datasets/image_dataset): a column ``image`` of structs with the bytes of an image
file, a column ``label`` of whole numbers, and the names of the classes in the schema's metadata.

MDS (https://docs.mosaicml.com/projects/streaming): ``index.json`` and shards of samples with the same columns. A shard
begins with uint32s, the number of samples, where each begins and where the last one ends; a sample with a uint32 for
each column of no fixed size, then the columns' values.
"""

import math
import mmap
import os
import re
import shlex
import struct
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from dali_train.config.check import Count, CountOr0, Rule, from_json, require
from dali_train.data.convert.archives import Archive
from dali_train.data.convert.image import RawImage
from dali_train.data.convert.sources import Image, SourceError, Sources, printable_name
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES, BadImageError
from dali_train.data.dataset.manifest import SplitWord, split_word
from dali_train.data.dataset.packed_files import how_packed
from dali_train.data.dataset.passed_over import PassedOver
from dali_train.errors import ConfigError
from dali_train.extras.formats.label_sets import LabelSets
from dali_train.extras.formats.listing import (
    Listed,
    PackedBlocks,
    Within,
    find_column,
    import_pyarrow,
    open_plain,
    sources_of,
    warn_columns,
    where_it_lies,
)
from dali_train.extras.formats.table_reader import SPLIT_COLUMNS, YES_OR_NO_COLUMNS, plain_name
from dali_train.files import ForeignFileError, read_json
from dali_train.text import plural, shortened

# WebDataset

_MAX_LABEL_BYTES = 1 << 20  # of a JSON file
_KINDS = " ".join(sorted(IMAGE_SUFFIXES))


def webdataset(options: Namespace, within: Within = where_it_lies) -> Sources:
    """Return the splits and the class names. With ``options.label_key``, that field of KEY.json is the label.

    A label is a number or a name, and a list of these is several labels. With ``options.class_names`` KEY.txt has the
    label where there is no KEY.cls; else it is taken for a caption.

    Raises:
        SourceError: a damaged tar, a sample without image or label or with two, or a label that cannot be.
    """
    sets = LabelSets(options.class_names)
    first: dict[str, Path] = {}  # directory of the files of a name with the word of a split
    endings = [".cls"] if options.label_key is None else [".json"]
    if options.label_key is None and options.class_names is not None:
        endings.append(".txt")

    def list_tar(path: Path) -> Listed:
        if split_word(path.name) is not None:
            _refuse_two_directories(options.source, first.setdefault(path.name, path.parent), path.parent)
        return _samples_of_tar(open_plain(path), endings, options.label_key, sets)

    return sources_of(options, ".tar", lambda path: within(path, list_tar), resolve=sets.resolve)


def _samples_of_tar(
    archive: Archive, endings: Sequence[str], label_key: str | None, sets: LabelSets
) -> Iterator[Image | PassedOver]:
    """Yield the samples, and each file that belongs to none; the first of the `endings` that is there has the label.

    WebDataset's key ends at the first dot, and ``KEY.seg.png`` beside ``KEY.jpg`` is one more file of the sample. Of
    keys that have dots themselves, such as ``2020.01.02-a.jpg``, an image and a label with the same name up to the
    last dot make a sample; where a key has no others, also ``KEY.image.jpg`` and ``KEY.label.cls``. An image or a label
    that then has no other is an error.
    """
    passed_over: list[PassedOver] = []

    def files() -> Iterator[Image]:
        for entry in archive.walk():
            if isinstance(entry, PassedOver):
                passed_over.append(entry)
            else:
                yield entry

    for key, group in groupby(files(), key=_webdataset_key):
        by_stem: dict[str, list[Image]] = {}
        members = [*group]
        for file in members:
            by_stem.setdefault(_stem(file), []).append(file)
        there = {_suffix(file) for file in members}
        has_image = not there.isdisjoint(IMAGE_SUFFIXES)  # else KEY.txt is a readme
        ending = next((ending for ending in endings if has_image and ending in there), endings[0])
        parts = [file for file in members if _suffix(file) in (*IMAGE_SUFFIXES, ending)]
        if len(parts) == 2 and all(_PART.fullmatch(_stem(file).removeprefix(key)) for file in parts):
            by_stem = {key: members}
        yield from _samples_of_key(archive, key, by_stem, ending, label_key, sets)
    yield from passed_over


def _samples_of_key(
    archive: Archive, key: str, by_stem: dict[str, list[Image]], ending: str, label_key: str | None, sets: LabelSets
) -> Iterator[Image | PassedOver]:
    """Yield the samples among files with one WebDataset key, which are given by their names up to the last dot.

    Args: ending: of the files that have the labels.
    """
    images = {stem: [file for file in files if _suffix(file) in IMAGE_SUFFIXES] for stem, files in by_stem.items()}
    labels = {stem: [file for file in files if _suffix(file) == ending] for stem, files in by_stem.items()}
    has_sample = bool(images.get(key) and labels.get(key))
    for stem, files in by_stem.items():
        rest = files
        if len(images[stem]) == len(labels[stem]) == 1:
            yield images[stem][0]._replace(label=_label(archive, labels[stem][0], label_key, sets))
            rest = [file for file in files if file not in (images[stem][0], labels[stem][0])]
        elif (images[stem] or labels[stem]) and (stem == key or not has_sample):
            there = f"{plural(len(images[stem]), 'image')} and {plural(len(labels[stem]), f'{ending} file')}"
            others = ", ".join(sorted({_suffix(file) or printable_name(file.name) for file in files} - {ending}))
            raise SourceError(
                f"{printable_name(f'{archive.path}:{stem}')}: has {there}: there must be one of each side by side, as "
                f"KEY.jpg and KEY{ending} (there is {others or 'nothing else'}, and images are {_KINDS}); write the "
                "tar anew, or name the field of a KEY.json with --label-key, or a file of the names in KEY.txt with "
                "--class-names; of class folders, unpack it with `tar xf` and name their directory; if it is unpacked "
                "already, move it away"
            )
        start = len(key) if has_sample else len(stem)
        for file in rest:
            yield PassedOver(archive.path.name, file.name[start:].lower() or "without suffix")


# Of a name, between the key and the suffix: what has digits may be a part of the key, such as a date.
_PART = re.compile(r"(\.[a-z_]+)?", re.IGNORECASE)


def _webdataset_key(file: Image) -> str:
    directory, slash, name = file.name.rpartition("/")
    return directory + slash + name.partition(".")[0]


def _stem(file: Image) -> str:
    return file.name.removesuffix(PurePosixPath(file.name).suffix)


def _suffix(file: Image) -> str:
    return PurePosixPath(file.name).suffix.lower()


_WHOLE_NUMBER = re.compile("[+-]?[0-9]{1,20}")  # Python's int() takes 1_0 for ten, and digits of any script


def _label(archive: Archive, file: Image, label_key: str | None, sets: LabelSets) -> int:
    location = file.location
    if file.size > _MAX_LABEL_BYTES:
        raise SourceError(f"{location}: {file.size:,} bytes are no label: the limit is {_MAX_LABEL_BYTES:,}")
    text = archive.read(file).decode(errors="backslashreplace").strip()
    label: object = text
    try:
        if label_key is not None:
            label = read_json(text.encode(), _MAX_LABEL_BYTES, name=location)[label_key]
        elif _WHOLE_NUMBER.fullmatch(text):
            label = int(text)
        elif text.startswith("["):
            label = read_json(b'{"labels": ' + text.encode() + b"}", 2 * _MAX_LABEL_BYTES, name=location)["labels"]
    except (ValueError, LookupError):
        wrong = "is no list of labels: correct it, or name a field of KEY.json with --label-key"
        if label_key is not None:
            wrong = f"has no field {label_key}: name another with --label-key"
        raise SourceError(f"{location}: {wrong}") from None
    return sets.stored_label(label, location)


# Parquet

_ROWS = 16  # copied from pyarrow at one time; itself it holds a page, which may be a row group, packed and unpacked
_BUFFER_BYTES = 1 << 20
_MAX_METADATA_BYTES = 1 << 28
_SMALLEST_IMAGE = 16  # bytes; no file of any format has fewer
_EMPTY_COLUMN = 1024  # bytes of a row group's column without values, at most, with the headers of its pages


def parquet(options: Namespace) -> Sources:
    """Return the splits and the class names; row groups are unpacked when they are read. Lists are several labels.

    Raises:
        SourceError: a damaged file, one without these columns, a label that cannot be, or class names that differ.
    """
    if (options.source / "_delta_log").is_dir():
        code = (
            f'import deltalake; deltalake.DeltaTable({str(options.source)!r}).to_pandas().to_parquet("train.parquet")'
        )
        raise SourceError(
            f"{options.source}: is a table of Delta Lake, whose log says which of its files are valid: in a "
            f"new directory, `python3 -c {shlex.quote(code)}` writes these as Parquet"
        )
    blocks = PackedBlocks(options.out)
    names: list[str] = []
    sets = LabelSets(options.class_names)
    said = set[str]()
    in_columns: dict[SplitWord | None, set[tuple[str, str]]] = {}  # what columns of splits hold in each split's files
    directories: dict[SplitWord | None, Path] = {}  # that each split's files lie in

    def list_file(path: Path) -> Listed:
        word = split_word(str(path.relative_to(options.source)))
        directory, in_folders = _without_partitions(path, options.source)
        _refuse_two_directories(options.source, directories.setdefault(word, directory), directory)
        with _opened(path) as file:
            own = {field.name: str(field.type) for field in file.schema_arrow}
            columns = own | dict.fromkeys(in_folders, "in the folder's name")
            image = find_column(path, own, "--image-key", options.image_key, ("image",))
            label = find_column(path, columns, "--label-key", options.label_key, ("label",))
            warn_columns(options.source, columns, image, label, said)
            if label in in_folders:
                _refuse_partitions(options.source, path, label, in_folders)
            in_column = in_columns.setdefault(word, set())
            in_column |= {(name, repr(value)) for name, value in in_folders.items() if _is_of_splits(name)}
            _refuse_column_of_splits(path, file, in_column, used=(image, label))
            names_here = _class_names(file.schema_arrow, label)
            if names and names_here != names:
                raise SourceError(
                    f"{path}: its class names are not those of the files before it: move it out of --source"
                )
            names[:] = names_here
            yield from _row_groups(path, file, image, label, blocks, sets)

    return sources_of(options, ".parquet", list_file, names, blocks.read, sets.resolve)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile. Raises SourceError: there is no pyarrow, or what is read is damaged."""
    pyarrow = import_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        problem = how_packed(path) or f"damaged, truncated or not Parquet ({error}): fetch it again"
        if isinstance(error, PermissionError):
            problem = "cannot be read (Permission denied): allow it"
        raise SourceError(f"{path}: {problem}") from error


def _without_partitions(path: Path, source: Path) -> tuple[Path, dict[str, str]]:
    """Return the directory of a file without the folders COLUMN=VALUE of Hive, pandas and others, whose
    files have this value in all rows, and these columns."""
    parts = path.relative_to(source).parts[:-1]
    columns = dict(part.split("=", 1) for part in parts if "=" in part)
    return source.joinpath(*(part for part in parts if "=" not in part)), columns


def _refuse_partitions(source: Path, path: Path, label: str, in_folders: Mapping[str, str]) -> NoReturn:
    kind = ".astype(int)" if _WHOLE_NUMBER.fullmatch(in_folders[label]) else ".astype(str)"
    splits = next(filter(_is_of_splits, in_folders), None)
    write = 'rows.to_parquet("train.parquet")'
    if splits is not None:
        write = f'[part.to_parquet(f"{{name}}.parquet") for name, part in rows.groupby({splits!r}, observed=True)]'
    read = f"import pandas; rows = pandas.read_parquet({str(source.absolute())!r})"
    code = f"{read}; rows[{label!r}] = rows[{label!r}]{kind}; {write}"
    raise SourceError(
        f"{path}: column {label} is in the folders' names (Hive's partitions), and labels are read from files: in a "
        f"new directory, `python3 -c {shlex.quote(code)}` writes files that have it"
    )


def _refuse_two_directories(source: Path, one: Path, other: Path) -> None:
    """Raises SourceError: the directories, with files of one split, are two: those of configurations have the same
    images, or some."""
    if one == other:
        return
    common = Path(os.path.commonpath([one, other]))
    places = [common.joinpath(*path.relative_to(common).parts[:1]) for path in (one, other)]
    deepest = max(places, key=lambda place: len(place.parts))  # a directory and one in it are not two to choose from
    raise SourceError(
        f"{source}: {places[0]} and {places[1]} both have files of one split, as configurations of a repository on the "
        f"Hub do, and an image of both would count twice: name one (--source {shlex.quote(str(deepest))}), or put the "
        "files of one dataset into one directory"
    )


def _refuse_column_of_splits(path: Path, file: Any, found: set[tuple[str, str]], *, used: tuple[str, str]) -> None:
    """Raises SourceError: a column that is called so divides the rows, of this file or of it and those before.

    Args:
        found: columns with the values before, and in the folders' names; those here are added.
        used: columns of another use.
    """
    for field in file.schema_arrow:
        if not _is_of_splits(field.name) or field.name in used or import_pyarrow().types.is_nested(field.type):
            continue
        for group in range(file.metadata.num_row_groups):
            column = file.read_row_group(group, columns=[field.name], use_threads=False)[field.name]
            found |= {(field.name, repr(value)) for value in column.to_pylist()}
    _refuse_several(
        path, found, "rows, and a split here is a file: write a file for each, such as train.parquet and test.parquet"
    )


def _refuse_several(path: Path, found: Collection[tuple[str, str]], otherwise: str) -> None:
    """Raises SourceError: a column has several of these values."""
    for column in sorted({name for name, _ in found}):
        values = sorted({value for name, value in found if name == column})
        if len(values) > 1:
            raise SourceError(
                f"{path}: column {column} ({', '.join(values[:3])}{', ...' if values[3:] else ''}) divides the "
                f"{otherwise}, or leave the column out"
            )


def _is_of_splits(column: str) -> bool:
    """Return whether a column is called as one that divides the rows into splits."""
    return plain_name(column) in (*SPLIT_COLUMNS, *YES_OR_NO_COLUMNS)


def _row_groups(
    path: Path, file: Any, image: str, label: str, blocks: PackedBlocks, sets: LabelSets
) -> Iterator[Image]:
    leaf = _leaf_of_images(path, file, image)
    types = import_pyarrow().types
    label_kind = file.schema_arrow.field(label).type
    is_list = any(is_kind(label_kind) for is_kind in _list_types(types))
    kind = label_kind.value_type if is_list else label_kind
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not types.is_integer(kind) and not _is_text(types, kind):
        raise SourceError(
            f"{path}: column {label} is {label_kind}: name one of whole numbers or of names, or of lists of them, with "
            "--label-key, or write the classes as numbers from 0 and name them with --class-names"
        )
    labels = [
        sets.stored_label(value, f"{path}:row {row}")
        for row, value in enumerate(file.read(columns=[label], use_threads=False)[label].to_pylist())
    ]
    chunks = [*_chunks(file, leaf)]
    num_bytes = sum(chunk.total_uncompressed_size for _, chunk in chunks)
    if labels and num_bytes < _SMALLEST_IMAGE * len(labels) + _EMPTY_COLUMN * len(chunks):
        _refuse_without_images(path, file, image, leaf)
    first = 0
    for number, (group, chunk) in enumerate(chunks):
        size = chunk.total_uncompressed_size // max(1, group.num_rows)  # on average: the metadata knows no more
        yield from blocks.add(
            path,
            "row",
            labels[first : first + group.num_rows],
            partial(_column, path, image, leaf, number),
            [size] * group.num_rows,
            first=first,
            position=chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset,
        )
        first += group.num_rows


def _leaf_of_images(path: Path, file: Any, image: str) -> str:
    """Return the column of the images' bytes, with its parent. Raises SourceError: it is none of bytes."""
    types = import_pyarrow().types
    kind = file.schema_arrow.field(image).type
    leaf = image
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        leaf, kind = f"{image}.bytes", kind.field("bytes").type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary, types.is_binary_view)):
        return leaf
    paths = kind.field("path").type if types.is_struct(kind) and kind.get_field_index("path") >= 0 else kind
    if _is_text(types, paths):
        raise SourceError(f"{path}: column {image} is {kind}, which may hold base64 text, or {_ONLY_PATHS}")
    raise SourceError(f"{path}: column {image} is {kind}: name one of image files (binary) with --image-key")


_ONLY_PATHS = (
    "paths of images, which are not in this file: write it again with the images embedded (in the package datasets, "
    "map datasets.table.embed_table_storage), or put paths and labels into a CSV and name it to `dali-train data "
    "convert table`; --image-key names another column"
)


def _is_text(types: Any, kind: Any) -> bool:
    return any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_string_view))


def _list_types(types: Any) -> tuple[Callable[[Any], bool], ...]:
    return types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view


def _chunks(file: Any, leaf: str) -> Iterator[tuple[Any, Any]]:
    """Yield the metadata of each row group, and of its part of the column `leaf`."""
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        yield group, next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == leaf)


def _refuse_without_images(path: Path, file: Any, image: str, leaf: str) -> None:
    """Raises SourceError: no row has an image; the column is known to be small."""
    if any(any(_column(path, image, leaf, group)) for group in range(file.metadata.num_row_groups)):
        return
    kind = file.schema_arrow.field(image).type
    if leaf != image and kind.get_field_index("path") >= 0:
        raise SourceError(f"{path}: {leaf} is empty in all rows, and {image}.path has {_ONLY_PATHS}")
    raise SourceError(f"{path}: {leaf} is empty in all rows: name the column of the images with --image-key")


def _column(path: Path, image: str, leaf: str, group: int) -> Iterator[bytes]:
    with _opened(path) as file:
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[leaf], use_threads=False):
            for value in batch.column(image).to_pylist():
                yield (value["bytes"] if isinstance(value, dict) else value) or b""


def _class_names(schema: Any, label: str) -> list[str]:
    """Return the class names that the package ``datasets`` puts into a file's metadata, where there are any."""
    try:
        metadata = read_json(schema.metadata[b"huggingface"], _MAX_METADATA_BYTES, name="huggingface")
        feature = metadata["info"]["features"][label]
        return [*map(str, feature.get("feature", feature)["names"] or ())]  # of a list those of its elements
    except (KeyError, TypeError, AttributeError, ForeignFileError):
        return []


# MDS

_MAX_INDEX_BYTES = 1 << 28
_IMAGES = ("jpeg", "jpegarray", "png", "bytes", "pil")
_PIL_HEADER = struct.Struct("<3I")  # width, height, the length of the mode's name; this and the pixels follow
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
    """Positions of the columns we read within a shard's samples."""

    sizes: tuple[int | None, ...]  # bytes; None: each sample says
    image: int  # number of its column
    is_pil: bool  # of which kind it is
    label: int
    decoded_label: Callable[[bytes, str], object]  # from its bytes, and where it is for messages
    sets: LabelSets
    splits: Mapping[int, str | None]  # number of each column of splits -> its format; None: text
    names: tuple[str, ...]
    in_splits: set[tuple[str, str]]  # what is in these columns of the shard, as `repr` shows it


def mds(options: Namespace, within: Within = where_it_lies) -> Sources:
    """Return the splits and the class names; compressed shards are unpacked when they are read. Lists in a column of
    JSON are several labels.

    Raises:
        SourceError: an index or a shard that is damaged, missing or of another format, or a label that cannot be.
    """
    blocks = PackedBlocks(options.out)
    sets = LabelSets(options.class_names)
    said = set[str]()
    in_columns: dict[SplitWord | None, set[tuple[str, str]]] = {}
    with_pixels = set[str]()

    def list_index(path: Path) -> Iterator[Image | PassedOver]:
        above = [parent for parent in path.parent.parents if parent.is_relative_to(options.source)]
        if any((parent / path.name).exists() for parent in above):
            return  # Streaming's merge_index has put its shards into that one
        read = {path}
        in_column = in_columns.setdefault(split_word(str(path.relative_to(options.source))), set())
        for shard in _read_index(path).shards:
            columns, file = _find_columns(path, shard, options, sets), _file_of(path, shard)
            image, label = (shard.column_names[number] for number in (columns.image, columns.label))
            warn_columns(options.source, shard.column_names, image, label, said)
            list_shard = partial(_list_shard, shard=shard, columns=columns, blocks=blocks)
            read.add(file)
            if columns.is_pil:
                with_pixels.add(str(file))
            for entry in within(file, list_shard):
                if isinstance(entry, PassedOver):
                    in_column.add((entry.place, entry.reason))
                else:
                    yield entry
            otherwise = "samples, and a split here is a directory: write one for each, such as train and test"
            _refuse_several(path, in_column, otherwise)
        unread = [file for file in sorted(path.parent.iterdir()) if file.is_file() and file not in read]
        for file in unread:
            is_shard = ".mds" in file.name
            place = path.parent.name
            yield (
                PassedOver(place, "shard that index.json does not use")
                if is_shard
                else PassedOver.by_suffix(place, file.name)
            )

    def read_image(image: Image) -> RawImage:
        content = blocks.read(image)
        return _pixels(content) if image.file in with_pixels else content

    return sources_of(options, "index.json", list_index, read=read_image, resolve=sets.resolve)


def _pixels(content: bytes) -> NDArray[np.uint8]:
    """Return the pixels in a column of the encoding pil. Raises BadImageError: they are of another mode, or cut off."""
    if len(content) < _PIL_HEADER.size:
        raise BadImageError("is cut off")
    width, height, num_letters = _PIL_HEADER.unpack_from(content)
    begin = _PIL_HEADER.size + num_letters
    mode = content[_PIL_HEADER.size : begin].decode(errors="backslashreplace")
    shape = {"RGB": (height, width, 3), "L": (height, width)}.get(mode)
    if shape is None:
        raise BadImageError(f"has pixels of the mode {shortened(mode, 20)}, and RGB and L are read")
    if math.prod(shape) != len(content) - begin:
        raise BadImageError(
            f"has {len(content) - begin} bytes of pixels, and {width} x {height} are {math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def _read_index(path: Path) -> _Index:
    try:
        return from_json(_Index, read_json(path, _MAX_INDEX_BYTES))
    except ConfigError as error:
        raise SourceError(f"{path}: {error}: use the index.json of MDS version 2 that belongs to the shards") from error
    except (FileNotFoundError, ForeignFileError) as error:
        raise SourceError(f"{error}: fetch it again") from error


def _find_columns(path: Path, shard: _Shard, options: Namespace, sets: LabelSets) -> _Columns:
    columns = dict(zip(shard.column_names, shard.column_encodings, strict=True))
    image = find_column(path, columns, "--image-key", options.image_key, ("x", "image"))
    label = find_column(path, columns, "--label-key", options.label_key, ("y", "label"))
    if columns[image].partition(":")[0] not in _IMAGES:  # jpeg:90 has the quality
        raise SourceError(
            f"{path}: column {image} is {columns[image]}: name one of jpeg, png, pil or bytes with --image-key, or "
            "write the shards again with one"
        )
    number, kind = shard.column_names.index(label), _LABELS.get(columns[label])
    decoded = partial(_number_in, kind) if kind is not None else _TEXT_LABELS.get(columns[label])
    if decoded is None or shard.column_sizes[number] != (None if kind is None else struct.calcsize(kind)):
        raise SourceError(
            f"{path}: column {label} is {columns[label]} of size {shard.column_sizes[number]}: name one of int (8), "
            "uint8 (1) and the like, of str or str_int, or of json with labels or lists of them, with --label-key, or "
            "write the shards again with one"
        )
    splits = {
        shard.column_names.index(name): _LABELS.get(encoding)
        for name, encoding in columns.items()
        if _is_of_splits(name) and name not in (image, label) and encoding in (*_LABELS, *_TEXT_LABELS)
    }
    image_number = shard.column_names.index(image)
    is_pil = columns[image] == "pil"
    return _Columns(shard.column_sizes, image_number, is_pil, number, decoded, sets, splits, shard.column_names, set())


def _file_of(index: Path, shard: _Shard) -> Path:
    """Return a shard's file, or else the compressed one. Raises SourceError: there is neither."""
    for file in (shard.raw_data, shard.zip_data):
        if file is not None and (path := index.parent / file.basename).exists():
            return path
    raise SourceError(
        f"{index.parent / (shard.zip_data or shard.raw_data).basename}: is missing, and {index} names it: fetch it"
    )


def _list_shard(path: Path, shard: _Shard, columns: _Columns, blocks: PackedBlocks) -> Iterator[Image | PassedOver]:
    """Yield the images, and what columns of splits hold as `PassedOver`: with them it is kept, if indexing a bucket is
    interrupted."""
    if path.name == Path(shard.raw_data.basename).name:
        _check_size(path, shard.raw_data)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as content,
        ):
            content.madvise(mmap.MADV_RANDOM)  # reading ahead of each label would read the entire shard
            for number, (begin, size, label) in enumerate(_samples(path, content, shard, columns)):
                yield Image(str(path), f"sample {number}", begin, size, label, is_packed=columns.is_pil)
    else:
        samples = list(_samples(path, _unpack(path, shard), shard, columns))
        labels, sizes = [label for _, _, label in samples], [size for _, size, _ in samples]
        yield from blocks.add(path, "sample", labels, partial(_unpacked_images, path, shard, columns), sizes)
    yield from (PassedOver(column, value) for column, value in sorted(columns.in_splits))


def _check_size(path: Path, file: _File) -> None:
    size = path.stat().st_size
    if size != file.bytes or not size:
        raise SourceError(
            f"{path}: has {size:,} bytes, {file.bytes:,} by index.json: truncated, or another shard's: fetch it again"
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
    sizes_stored = struct.Struct(f"<{columns.sizes.count(None)}I")
    for number, (begin, end) in enumerate(pairwise(begins)):
        if not begin + sizes_stored.size <= end <= len(content):
            raise SourceError(f"{damaged} (sample {number})")
        stored = iter(sizes_stored.unpack_from(content, begin))
        sizes = [next(stored) if size is None else size for size in columns.sizes]
        begins_of = [*accumulate(sizes, initial=begin + sizes_stored.size)]
        if begins_of[-1] != end:
            raise SourceError(f"{damaged} (sample {number})")
        location, at = f"{path}:sample {number}", begins_of[columns.label]
        label = columns.decoded_label(content[at : at + sizes[columns.label]], location)
        for column, kind in columns.splits.items():
            value = content[begins_of[column] : begins_of[column] + sizes[column]]
            known = value.decode(errors="backslashreplace") if kind is None else struct.unpack(kind, value)[0]
            columns.in_splits.add((columns.names[column], repr(known)))
        yield begins_of[columns.image], sizes[columns.image], columns.sets.stored_label(label, location)


def _number_in(kind: str, content: bytes, location: str) -> object:
    return struct.unpack(kind, content)[0]


def _text_in(content: bytes, location: str) -> object:
    return content.decode(errors="backslashreplace").strip()


def _number_in_text(content: bytes, location: str) -> object:
    """Raises SourceError: it is none."""
    text = content.decode(errors="backslashreplace")
    if not _WHOLE_NUMBER.fullmatch(text):
        raise SourceError(
            f"{location}: its label is {shortened(text, 60)!r}, and str_int are whole numbers: correct it"
        )
    return int(text)


def _in_json(content: bytes, location: str) -> object:
    """Raises SourceError: it is no label in JSON."""
    try:
        return read_json(b'{"labels": ' + content + b"}", 2 * _MAX_LABEL_BYTES, name=location)["labels"]
    except (ValueError, LookupError):
        raise SourceError(f"{location}: is no label in JSON: name another column with --label-key") from None


_TEXT_LABELS = {"json": _in_json, "str": _text_in, "str_int": _number_in_text}  # encoding -> what decodes it


def _unpacked_images(path: Path, shard: _Shard, columns: _Columns) -> Iterator[bytes]:
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
