"""The names of a dataset's images as files: in place, or before they were converted (image/filename)."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from dali_train.data.convert.sources import SourceError, printable_name
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import Storage, open_shards
from dali_train.data.dataset.tfrecord import parse_example, walk_records
from dali_train.errors import ConfigError
from dali_train.text import printable

_COMPARED = 8  # images of a list, and up to twice as many: another dataset's has none of them


class ImageNames:
    """Reads the names of single images from `shards`, the images of `split`.

    A name in place comes from the index; one in a record costs a read, or a request to the object store.
    """

    def __init__(self, split: Split, shards: Storage) -> None:
        self._split, self._shards = split, shards
        self._record_offsets = cache(split.record_offsets)  # a few kilobytes for each shard that is asked for

    def find(self, number: int) -> str | None:
        """Return the name of image `number`; None where its record has none.

        Of an image in place it is the file below the source, and where the image begins if it is a part of the file.

        Raises:
            DatasetError, SourceError, TFRecordError: the index has no such record, or the record is damaged.
        """
        row = self._split.rows[number]
        shard = int(row["shard"])
        if self._split.files is not None:
            name = printable_name(self._split.files.name(shard))
            return name if row["size"] == self._split.files.num_bytes[shard] else f"{name}:{row['offset']}"
        record = number - int(self._split.first_images[shard])
        offsets = [*self._record_offsets(shard)[record : record + 2].tolist(), self._split.shards[shard].num_bytes]
        content = self._shards.content(shard, offsets[0], offsets[1])
        location = f"{self._split.shard_location(shard)}, record {record} from byte {offsets[0]} on"
        span = next(walk_records(content, location, check_payload=True), None)
        if span is None:
            raise SourceError(f"{location}: no record, where its text index has one: index the dataset again")
        feature = parse_example(content, span, location).get("image/filename")
        if feature is None or len(feature.spans) != 1:
            return None
        return bytes(content[slice(*feature.spans[0])]).decode(errors="replace")


def file_names(split: Split, numbers: NDArray[np.int64]) -> list[str]:
    """Return the names of these images' files, see `ImageNames`; empty where a record has none, or is in an object
    store, where each name costs a request. In a mixture the name of the image's dataset stands before it."""
    names: dict[Split, ImageNames] = {}
    files = []
    for image in numbers.tolist():
        source, number = split.locate(image)
        file = ""
        if source.files is not None or source.is_on_disk:
            if source not in names:
                names[source] = ImageNames(source, open_shards(source))
            file = printable(names[source].find(number) or "")
        files.append(f"{source.source_name}: {file}" if source.source_name else file)
    return files


def check_excluded(split: Split, path: str, named: dict[int, str]) -> None:
    """Compare some of the files that a list for data.exclude names, by image, with the split's.

    Raises:
        ConfigError: an image has another file, so the list is of another dataset.
    """
    numbers = np.array(sorted(named), dtype=np.int64)[:: max(1, len(named) // _COMPARED)]
    for number, file in zip(numbers.tolist(), file_names(split, numbers), strict=True):
        # A list may be of one dataset of a mixture alone, or the other way round.
        own = file.removeprefix(f"{split.locate(number)[0].source_name}: ")
        if own and named[number] != own and not named[number].endswith(f": {own}"):
            raise ConfigError(
                f"data.exclude is {path}, in which image {number} is {printable(named[number])!r}, and here it is "
                f"{file!r}: the list is of another dataset. Use one that was made of this, or delete the column file"
            )
