"""The names of a dataset's images as files: in place, or before they were converted (image/filename)."""

from functools import cache

from dali_train.data.convert.sources import SourceError, printable_name
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import Storage
from dali_train.data.dataset.tfrecord import parse_example, walk_records


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
