"""WebDataset: tars in which the files of a sample, KEY.jpg, KEY.cls, KEY.json, ..., stand side by side.

https://github.com/webdataset/webdataset describes it: KEY ends at the first dot of the file's name.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from dali_train.data.convert.archive import Archive, Member, SourceError
from dali_train.data.convert.listing import checked_label, list_archive, sources_of
from dali_train.data.convert.sources import Sources
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.files import read_json
from dali_train.text import plural

_MAX_LABEL_BYTES = 1 << 20  # of a JSON file


def webdataset(options: Namespace) -> Sources:
    """Return the splits and the class names. With ``options.label_key``, that field of KEY.json is the label.

    Raises:
        SourceError: a damaged tar, a sample without image or label or with two, or a label that cannot be.
    """
    images = partial(_images, label_key=options.label_key)
    return sources_of(options, ".tar", lambda path: list_archive(path, images))


def _images(archive: Archive, label_key: str | None) -> Iterator[tuple[Member, int]]:
    ending = "cls" if label_key is None else "json"
    for key, members in groupby(archive.members(), key=lambda member: _key_and_ending(member)[0]):
        sample = [(member, _key_and_ending(member)[1]) for member in members]
        images = [member for member, kind in sample if f".{kind}" in IMAGE_SUFFIXES]
        labels = [member for member, kind in sample if kind == ending]
        if len(images) == len(labels) == 1:
            yield images[0], _label(archive, labels[0], label_key)
        elif images or (labels and label_key is None):
            raise SourceError(
                f"{archive.place(key)}: has {plural(len(images), 'image')} and {plural(len(labels), f'.{ending} file')}"
                f": one of each must stand side by side, as KEY.jpg and KEY.{ending}, where KEY has no dot; write the "
                "tar anew, or name the field of a KEY.json with --label-key"
            )


def _key_and_ending(member: Member) -> tuple[str, str]:
    directory, slash, name = member.name.rpartition("/")
    key, _, ending = name.partition(".")
    return directory + slash + key, ending.lower()


def _label(archive: Archive, member: Member, label_key: str | None) -> int:
    place = archive.place(member.name)
    if member.size > _MAX_LABEL_BYTES:
        raise SourceError(f"{place}: {member.size:,} bytes are no label: the limit is {_MAX_LABEL_BYTES:,}")
    text = archive.read(member).decode(errors="backslashreplace").strip()
    label: object = text
    try:
        label = int(text) if label_key is None else read_json(text.encode(), _MAX_LABEL_BYTES, name=place)[label_key]
    except (ValueError, LookupError):
        if label_key is not None:
            raise SourceError(f"{place}: has no field {label_key}: name another with --label-key") from None
    return checked_label(label, place)
