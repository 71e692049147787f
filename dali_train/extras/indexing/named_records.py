"""TFRecords of others that have names for labels, or are to be divided: ``dali-train data convert tfrecord``."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dali_train.data.convert.sources import Image, ImageFiles, Images, Sources
from dali_train.data.dataset.index import map_file
from dali_train.data.dataset.manifest import IMAGE_KEY, SplitName
from dali_train.data.dataset.tfrecord import TFRecordError, parse_example, walk_records
from dali_train.data.dataset.write_index import TEXT_KEY
from dali_train.extras.formats.label_sets import LabelSets
from dali_train.extras.formats.listing import with_names
from dali_train.extras.indexing.foreign_shards import find_splits


def named_records(options: Namespace) -> Sources:
    """Return the splits, which are found as `data index` finds them, and the class names, if there are any. Several
    names or numbers are several labels. A single file is a training split.

    Raises:
        DatasetError: no shards, or `class_names` lacks a name.
        TFRecordError: a record without an image or a label.
        SourceError: a name that cannot be.
    """
    sets = LabelSets(options.class_names)
    source: Path = options.source
    shards: dict[SplitName, list[Path]] = {"train": [source]} if source.is_file() else find_splits(source)
    splits = {
        split: Images(ImageFiles(partial(_images, paths, options, sets)), source) for split, paths in shards.items()
    }
    return with_names(options, splits, (), sets.resolve)


def _images(paths: Sequence[Path], options: Namespace, sets: LabelSets) -> Iterator[Image]:
    image_key, label_key = options.image_key or IMAGE_KEY, options.label_key or TEXT_KEY
    for path in paths:
        content = memoryview(map_file(path))
        for number, record in enumerate(walk_records(content, path, check_payload=True)):
            features = parse_example(content, record, path)
            image = features[image_key].spans if image_key in features else ()
            label = features.get(label_key)
            if len(image) != 1 or label is None or not (label.spans or label.integers):
                lacking = f"no label in {label_key}" if len(image) == 1 else f"not one image in {image_key}"
                raise TFRecordError(
                    path,
                    record.header,
                    f"has {lacking}; the record has {', '.join(sorted(features)) or 'none'}: name image and label with "
                    "--image-key and --label-key; `dali-train data index` reads labels that are numbers",
                )
            names = [bytes(content[slice(*span)]).decode(errors="backslashreplace") for span in label.spans]
            values: list[int] | list[str] = names or [*label.integers]
            begin, end = image[0]
            name = f"record {number}"
            stored = sets.stored_label(values[0] if len(values) == 1 else values, f"{path}:{name}")
            yield Image(str(path), name, begin, end - begin, stored)
