"""TFRecords of others that have names for labels, and no numbers: ``dali-train data convert tfrecord``."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dali_train.data.convert.sources import Image, ImageFiles, Images, Sources
from dali_train.data.dataset.index import map_file
from dali_train.data.dataset.manifest import IMAGE_KEY
from dali_train.data.dataset.tfrecord import TFRecordError, parse_example, walk_records
from dali_train.data.dataset.write_index import TEXT_KEY
from dali_train.extras.formats.label_sets import LabelSets
from dali_train.extras.formats.listing import with_names
from dali_train.extras.indexing.foreign_shards import find_splits


def named_records(options: Namespace) -> Sources:
    """Return the splits, which are found as `data index` finds them, and the class names. Several names are several
    labels.

    Raises:
        DatasetError: no shards, or `class_names` lacks a name.
        TFRecordError: a record without an image or a name.
        SourceError: a name that cannot be.
    """
    sets = LabelSets(options.class_names)
    splits = {
        split: Images(ImageFiles(partial(_images, paths, options, sets)), options.source)
        for split, paths in find_splits(options.source).items()
    }
    return with_names(options, splits, (), sets.resolve)


def _images(paths: Sequence[Path], options: Namespace, sets: LabelSets) -> Iterator[Image]:
    image_key, label_key = options.image_key or IMAGE_KEY, options.label_key or TEXT_KEY
    for path in paths:
        content = memoryview(map_file(path))
        for number, record in enumerate(walk_records(content, path, check_payload=True)):
            features = parse_example(content, record, path)
            image, labels = (features[key].spans if key in features else () for key in (image_key, label_key))
            if len(image) != 1 or not labels:
                lacking = f"no text in {label_key}" if len(image) == 1 else f"not one image in {image_key}"
                raise TFRecordError(
                    path,
                    record.header,
                    f"has {lacking}; the record has {', '.join(sorted(features)) or 'none'}: name image and label with "
                    "--image-key and --label-key; `dali-train data index` reads labels that are numbers",
                )
            names = [bytes(content[slice(*span)]).decode(errors="backslashreplace") for span in labels]
            begin, end = image[0]
            name = f"record {number}"
            label = sets.stored_label(names[0] if len(names) == 1 else names, f"{path}:{name}")
            yield Image(str(path), name, begin, end - begin, label)
