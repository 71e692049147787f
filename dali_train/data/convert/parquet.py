"""Parquet files of images as the Hugging Face hub has them: https://huggingface.co/docs/datasets/image_dataset.

A column ``image`` of structs with the bytes of an image file, a column ``label`` of whole numbers, and the names of the
classes in the schema's metadata.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dali_train.data.convert.archive import SourceError
from dali_train.data.convert.listing import checked_label, find_column, sources_of
from dali_train.data.convert.packed import PackedImages, Unpacked, import_pyarrow
from dali_train.data.convert.sources import Sources
from dali_train.files import ForeignFileError, read_json

_ROWS = 16  # copied from pyarrow at one time; itself it holds a page, which may be a row group, packed and unpacked
_BUFFER_BYTES = 1 << 20
_MAX_METADATA_BYTES = 1 << 28


def parquet(options: Namespace) -> Sources:
    """Return the splits and the class names; row groups are unpacked when they are read.

    Raises:
        SourceError: a damaged file, one without these columns, a label that cannot be, or class names that differ.
    """
    unpacked = Unpacked(options.out)
    names: list[str] = []

    def list_file(path: Path) -> Iterator[PackedImages]:
        with _opened(path) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            image = find_column(path, columns, "--image-key", options.image_key, ("image",))
            label = find_column(path, columns, "--label-key", options.label_key, ("label",))
            own_names = _names(file.schema_arrow, label)
            if names and own_names != names:
                raise SourceError(
                    f"{path}: its class names are not those of the files before it: move it out of --source"
                )
            names[:] = own_names
            yield from _row_groups(path, file, image, label, unpacked)

    return sources_of(options, ".parquet", list_file, names)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile. Raises SourceError: there is no pyarrow, or what is read is damaged."""
    pyarrow = import_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{path}: damaged, cut off or not Parquet ({error}): fetch it again") from error


def _row_groups(path: Path, file: Any, image: str, label: str, unpacked: Unpacked) -> Iterator[PackedImages]:
    types = import_pyarrow().types
    kind, label_kind = (file.schema_arrow.field(name).type for name in (image, label))
    leaf = image
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        leaf, kind = f"{image}.bytes", kind.field("bytes").type
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise SourceError(f"{path}: column {image} is {kind}: name one of image files (binary) with --image-key")
    if not types.is_integer(label_kind):
        raise SourceError(f"{path}: column {label} is {label_kind}: name one of whole numbers with --label-key")
    labels = [
        checked_label(value, f"{path}:row {row}")
        for row, value in enumerate(file.read(columns=[label], use_threads=False)[label].to_pylist())
    ]
    first = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == leaf)
        yield PackedImages(
            path,
            "row",
            np.array(labels[first : first + group.num_rows], dtype=np.int32),
            partial(_images, path, image, leaf, number),
            unpacked,
            num_bytes=chunk.total_uncompressed_size,
            first=first,
            position=chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset,
        )
        first += group.num_rows


def _images(path: Path, image: str, leaf: str, group: int) -> Iterator[bytes]:
    with _opened(path) as file:
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[leaf], use_threads=False):
            for value in batch.column(image).to_pylist():
                yield (value["bytes"] if isinstance(value, dict) else value) or b""


def _names(schema: Any, label: str) -> list[str]:
    """Return the class names that the package ``datasets`` puts into a file's metadata, where there are any."""
    try:
        metadata = read_json(schema.metadata[b"huggingface"], _MAX_METADATA_BYTES, name="huggingface")
        return [*map(str, metadata["info"]["features"][label]["names"] or ())]
    except (KeyError, TypeError, ForeignFileError):
        return []
