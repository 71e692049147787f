"""A conversion from start to end: give each image its shard and position, write, resume, and build the index.

One process does all of it, or several machines do the parts between `--plan` and `--finish`: each shard is a function
of the options and the source, so it does not matter which process writes it, when, or how often.

Meanwhile ``DATASET/.conversion`` holds the options and a note per finished shard; it is removed once all files have
been verified. ``dataset.json`` is written last. Shards and datasets get their names only when they are complete, so a
conversion may be killed at any moment and started again. On the way into an object store (`Upload`) each finished file
is uploaded and deleted locally, dataset.json last.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.datasets import STATE_DIRECTORY
from dali_train.data.convert.image import EncodingOptions
from dali_train.data.convert.shards import BadImage, ShardWriter, WrittenShard, write_shards
from dali_train.data.convert.sources import UNREADABLE_ARRAYS, Images
from dali_train.data.dataset.index import map_file
from dali_train.data.dataset.label_kind import LABEL_BASE
from dali_train.data.dataset.manifest import (
    CLASS_NAMES,
    SPLITS,
    Manifest,
    SplitName,
    cache_directory,
)
from dali_train.data.dataset.verify import verify_shards
from dali_train.data.dataset.write_index import map_shards, write_index
from dali_train.data.progress import SHORT_S, Progress
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError, RunError
from dali_train.files import (
    NO_SPACE,
    ForeignFileError,
    NoLocksError,
    is_still_open,
    read_json,
    remove_tree,
    rename_to_free,
    sync_directory,
    try_lock,
    write_atomically,
)
from dali_train.runtime.object_store import Bucket, MissingObjectError
from dali_train.text import plural, shortened

DOWNLOAD_DIRECTORY = "downloads"  # the one directory that may be in a new dataset's
OnBad = Literal["fail", "skip"]
DEFAULT_SHARDS: dict[SplitName, int] = {"train": 1024, "validation": 128}
_FEWEST_SHARDS: dict[SplitName, int] = {"train": 4, "validation": 1}
_BYTES_PER_SHARD = 16 << 20  # below this, more shards only mean more files
_SHARDS_STREAM = 0x5348_4152_4453  # apart from the streams that training draws from, whose keys are small numbers
_MOST_LISTED = 20
_DISCARDED = ".finished"  # after the name of a state directory that is being removed
_PARTS = "parts-"  # and their number: the name of an empty file in the state directory
_M_MMAP_THRESHOLD = -3  # from malloc.h


@dataclass(frozen=True)
class Part:
    """What one of `total` machines converts: shards `number` (from 1), `number` + `total`, ... of every split."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Return the part that "3/16" names. Raises DatasetError: it names none."""
        numbers = [int(number) for number in text.split("/") if number.isdecimal()]
        if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise DatasetError(f"--part is {text}: use I/N with I from 1 to N, such as 3/16")
        return cls(*numbers)


def class_order_of(options: Namespace, dataset: str) -> str | None:
    """Return how class folders were numbered, for ``dataset.json``: natural, or class-names for a list of them. None:
    by name, or there are no class folders."""
    if dataset != "folder":
        return None
    order: str = CLASS_NAMES if options.class_names is not None else options.class_order
    return None if order == "name" else order


def default_num_shards(split: SplitName, *, num_images: int, num_bytes: int) -> int:
    """Return the usual 1,024 and 128 for ImageNet, fewer for a set too small for them."""
    enough = max(_FEWEST_SHARDS[split], -(-num_bytes // _BYTES_PER_SHARD))
    return min(DEFAULT_SHARDS[split], enough, num_images)


def check_seed(seed: int) -> None:
    """Raises DatasetError: it is no seed."""
    if not 0 <= seed < 1 << 63:
        raise DatasetError(f"--seed is {shortened(str(seed), 30)}: use 0 to 2**63 - 1")


def shuffled_layout(num_images: int, num_shards: int, *, seed: int) -> list[NDArray[np.uint32]]:
    """Return the numbers of all images in random order, cut into shards that differ by at most one image."""
    order = shuffled(np.random.Philox(key=[seed, _SHARDS_STREAM]), num_images)
    return np.array_split(order, num_shards)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A source and its options, and the directory to convert it into."""

    name: str  # of the dataset, e.g. "imagenet"
    splits: Mapping[SplitName, Images]
    class_names: Sequence[str]
    out: Path
    upload: "Upload | None" = None  # whose `directory` `out` is; the files go to its URL
    encoding: EncodingOptions
    num_shards: Mapping[SplitName, int | None]  # None: by the amount of data
    seed: int
    workers: int
    on_bad: OnBad
    class_order: str | None = None  # see `class_order_of`

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for split, images in self.splits.items():
            num_images, num_shards = len(images.labels), self.num_shards.get(split)
            if num_images == 0:
                raise DatasetError(f"the {split} split has no images")
            if num_shards is not None and not 1 <= num_shards <= min(num_images, 99_999):
                raise DatasetError(
                    f"--{split}-shards is {num_shards}: use 1 to {min(num_images, 99_999)}, the split has "
                    f"{num_images} images"
                )

    @property
    def destination(self) -> str:
        """The directory or URL of the finished dataset."""
        return str(self.out) if self.upload is None else self.upload.url

    def shards_of(self, split: SplitName) -> int:
        images = self.splits[split]
        return self.num_shards.get(split) or default_num_shards(
            split, num_images=len(images.labels), num_bytes=images.num_bytes
        )

    def identity(self) -> dict[str, Any]:
        """Return everything that the bytes of the result depend on; a resumed run must repeat it."""
        return {
            "dataset": self.name,
            "seed": self.seed,
            **asdict(self.encoding),
            "num_classes": len(self.class_names),
            **({} if self.class_order is None else {"class_order": self.class_order}),
            **{f"{split}_shards": self.shards_of(split) for split in self.splits},
            **{f"{split}_source": images.identity() for split, images in self.splits.items()},
        }


def convert(conversion: Conversion, phase: str = "all") -> list[str]:
    """Make the missing parts of the dataset, and verify all files; return lines to print.

    Args:
        phase: plan: only claim `out`. 3/16 or the like: only make the shards of this part, beside other processes.
            finish: do what remains when all shards are there.

    Raises:
        DatasetError: `out` holds another conversion or other files, has no plan for this part, or lacks shards at
            --finish.
        RunError: bad images and ``on_bad`` is fail, the disk is full, or the disk gives back something
            else than what was written.
        SourceError: the source changed meanwhile.
    """
    out = conversion.out
    part = Part.parse(phase) if phase not in ("all", "plan", "finish") else None
    state = out / STATE_DIRECTORY
    _revalidate_nfs_directories(out, state)
    _remove_discarded(state)  # by a run that was killed in its last moment
    where = conversion.destination
    complete = [f"{where} is complete already: nothing to do. `dali-train data verify {shlex.quote(where)}` checks it"]
    if _is_complete(conversion, state):
        _remove_uploaded(conversion, state)
        return complete
    plans = phase in ("all", "plan")
    if not _is_claimed(conversion, state):
        _refuse_foreign(out, state, plans=plans)  # now, so that a refused conversion leaves nothing behind
    elif phase == "plan":  # parts may be writing, and hold the lock
        return _plan(conversion)
    _return_freed_memory()
    out.mkdir(parents=True, exist_ok=True)
    with locked(state, shared=part is not None) as discard, explain_full_disk(out):
        if _is_complete(conversion, state):  # another process has finished meanwhile
            return complete
        _claim(conversion, state, plans=plans, part=part)
        for images in conversion.splits.values() if part is None else ():  # parts would all write the same file
            images.keep()
        if phase == "plan":
            return _plan(conversion)
        if conversion.upload is not None:
            conversion.upload.claim(conversion.identity())
        asked = Part(1, 1) if phase == "all" else part
        read: set[str] = set()  # the names of shards of earlier starts, which this one has compared
        shards_of = {split: _convert_split(conversion, split, state, asked, read) for split in conversion.splits}
        if part is not None:
            num_bad = sum(len(shard.bad) for shards in shards_of.values() for shard in shards.values())
            bad = f"; {plural(num_bad, 'image')} in it cannot be decoded, see --finish" if num_bad else ""
            return [f"part {phase} is in {out}{bad}"]
        _refuse_missing(conversion, state, shards_of)
        counted = _write_index(conversion, shards_of)
        lines = _upload_or_verify(conversion, read)
        for directory, _, _ in os.walk(out):  # before the options are gone, by which the next start goes on
            sync_directory(Path(directory))
        discard()
    if conversion.upload is not None:
        remove_tree(out)
    return [*counted, *lines, f"{where} is ready"]


def _write_index(conversion: Conversion, shards_of: Mapping[SplitName, Mapping[int, WrittenShard]]) -> list[str]:
    """Write quarantine.jsonl, the index and dataset.json, and return what was counted, a line a kind. Raises RunError:
    bad images and ``on_bad`` is fail."""
    done = {split: [shards[number] for number in sorted(shards)] for split, shards in shards_of.items()}
    bad = {split: [image for shard in shards for image in shard.bad] for split, shards in done.items()}
    report_bad_images(conversion.out, bad, conversion.on_bad)
    report = {
        split: {
            **sum((shard.counts for shard in shards), Counter()),
            "left out, see quarantine.jsonl": len(bad[split]),
        }
        for split, shards in done.items()
    }
    write_index(
        conversion.out,
        {split: [shard.indexed for shard in shards] for split, shards in done.items()},
        label_base=LABEL_BASE,
        class_names=conversion.class_names,
        conversion={"options": conversion.identity(), "report": report},
        label_kind=next(iter(conversion.splits.values())).label_kind,
    )
    return [
        f"{split}: {plural(count, 'image')}: {kind}"
        for split, kinds in report.items()
        for kind, count in kinds.items()
        if count
    ]


def _revalidate_nfs_directories(out: Path, state: Path) -> None:
    """Open the directories, so that an NFS client drops its cache of missing files: for up to a minute it would not see
    what another machine has written."""
    for directory in (out.parent, out, state, *(out / split for split in SPLITS)):
        with suppress(OSError), os.scandir(directory):  # it may not be there
            pass


def _plan(conversion: Conversion) -> list[str]:
    return [
        *(
            f"{split}: {plural(len(images.labels), 'image')} in {plural(conversion.shards_of(split), 'shard')}"
            for split, images in conversion.splits.items()
        ),
        f"{conversion.out} is planned. Next: --part 1/N to --part N/N for any N, then --finish",
    ]


def _upload_or_verify(conversion: Conversion, read: Collection[str]) -> list[str]:
    """Upload what is left, or read all that was written and not `read` before; return what to say about it.

    Raises:
        RunError: the disk gave back something else than what was written.
    """
    if conversion.upload is not None:
        conversion.upload.complete()
        return []
    out = conversion.out
    findings = verify_shards(out, already=read, workers=conversion.workers)
    if findings.problems:
        # Nothing trains on it then, and the next start compares each shard with its checksum.
        (out / "dataset.json").unlink()
        faults = "\n  ".join(findings.problems)
        raise RunError(
            f"{out} is faulty:\n  {faults}\nStart the same command again: faulty shards are rewritten, or "
            "the part that has to be repeated is named. Check the disk"
        )
    return findings.summary()


def _is_complete(conversion: Conversion, state: Path) -> bool:
    """Return whether `conversion` was carried out before. Raises DatasetError: another one was, or is under way."""
    out, upload = conversion.out, conversion.upload
    if upload is None:
        complete = (out / "dataset.json").exists() and not (state / "options.json").exists()
        if complete:
            _refuse_other(conversion, Manifest.read(out).conversion.get("options", {}), out / "dataset.json")
            shutil.rmtree(state, ignore_errors=True)  # a lock that a process made which came too late
        return complete
    if claim := upload.find():
        _refuse_other(conversion, claim[1], claim[0])
    elif foreign := upload.foreign():
        raise DatasetError(f"{upload.url} holds {foreign[0]} but no conversion to resume: use an empty prefix")
    return upload.is_complete


def _remove_uploaded(conversion: Conversion, state: Path) -> None:
    """Remove what a process that was killed in its last moment left of a conversion that is uploaded."""
    if conversion.upload is None or not conversion.out.exists():
        return
    with suppress(DatasetError):  # that process lives, and removes it itself
        with locked(state, shared=False):
            conversion.upload.disclaim()
        remove_tree(conversion.out)


def report_bad_images(out: Path, bad: Mapping[SplitName, Sequence[BadImage]], on_bad: OnBad) -> None:
    """List them in quarantine.jsonl. Raises RunError: there are some, and `on_bad` is fail."""
    listed = [{"split": split, **asdict(image)} for split, images in bad.items() for image in images]
    if not listed:
        return
    quarantine = out / "quarantine.jsonl"
    write_atomically(quarantine, "".join(json.dumps(line) + "\n" for line in listed).encode())
    if on_bad == "fail":
        lines = [f"{image['file']} (at byte {image['position']}): {image['reason']}" for image in listed[:_MOST_LISTED]]
        if len(listed) > _MOST_LISTED:
            lines.append(f"and {len(listed) - _MOST_LISTED} more")
        raise RunError(
            "\n  ".join([f"{plural(len(listed), 'image')} cannot be decoded, listed in {quarantine}:", *lines])
            + "\nStart the same command again with --on-bad skip to leave them out. What is done is kept"
        )


def _convert_split(
    conversion: Conversion, split: SplitName, state: Path, part: Part | None, read: set[str]
) -> dict[int, WrittenShard]:
    """Return the shards of `part` of the split by their numbers, as converted now or before; without one, those that
    are there already. Add the names of the latter to `read`."""
    num_shards, directory = conversion.shards_of(split), conversion.out / split
    layout = shuffled_layout(len(conversion.splits[split].labels), num_shards, seed=conversion.seed)
    wanted = range(num_shards) if part is None else range(part.number - 1, num_shards, part.total)
    numbers = {directory / f"{split}-{number:05d}-of-{num_shards:05d}": number for number in wanted}

    def finish(path: Path, shard: WrittenShard) -> None:
        if conversion.upload is not None:
            conversion.upload.send(path)
        shard.save(_note(state, path))
        done[numbers[path]] = shard
        if conversion.upload is not None:
            path.unlink()

    done: dict[int, WrittenShard] = {}
    with Progress(f"{split}: reading finished shards", len(numbers), unit="shards", delay_s=SHORT_S) as progress:
        earlier = map_shards([*numbers], partial(_finished, conversion, state), workers=conversion.workers)
        for (path, number), shard in zip(numbers.items(), earlier, strict=True):
            if shard is not None:
                done[number] = shard
                read.add(path.name)
            progress.update(1)
    jobs = [(path, layout[number]) for path, number in numbers.items() if number not in done]
    if jobs and part is not None:
        directory.mkdir(exist_ok=True)
        num_images = sum(len(images) for _, images in jobs)
        with Progress(f"{split} ({len(jobs)} of {num_shards} shards)", total=num_images, unit="images") as progress:
            writer = ShardWriter(conversion.splits[split], conversion.encoding, conversion.class_names, progress)
            write_shards(jobs, writer, finish=finish, workers=conversion.workers)
        sync_directory(directory)
    return done


def _refuse_missing(
    conversion: Conversion, state: Path, finished: Mapping[SplitName, Mapping[int, WrittenShard]]
) -> None:
    """Raises DatasetError: there are shards that no part has made. RunError: one has no good image."""
    missing = [(s, number) for s in finished for number in range(conversion.shards_of(s)) if number not in finished[s]]
    if missing:
        total = max((int(path.name.removeprefix(_PARTS)) for path in state.glob(f"{_PARTS}*")), default=1)
        parts = sorted({number % total + 1 for _, number in missing})
        first = "{}-{:05d}-of-{:05d}".format(*missing[0], conversion.shards_of(missing[0][0]))
        raise DatasetError(
            f"{conversion.out}: {plural(len(missing), 'shard')} not there or damaged, {first} the first of them. Start "
            f"{', '.join(f'--part {part}/{total}' for part in parts[:_MOST_LISTED])}"
            f"{' and others' if len(parts) > _MOST_LISTED else ''}, then --finish again"
        )
    for split, shards in finished.items():
        empty = [shard.indexed.shard.name for shard in shards.values() if not shard.indexed.shard.num_records]
        if empty and conversion.on_bad == "skip":
            raise RunError(
                f"{split}: {min(empty)} has no good image: delete {conversion.out} and start with fewer "
                f"--{split}-shards than {conversion.shards_of(split)}"
            )


def _note(state: Path, shard: Path) -> Path:
    return state / f"{shard.name}.npz"


def _finished(conversion: Conversion, state: Path, path: Path) -> WrittenShard | None:
    """Return a shard of an earlier run. All of it is read: a bit may have flipped while the conversion was stopped."""
    try:
        shard = WrittenShard.load(_note(state, path))
    except UNREADABLE_ARRAYS:
        return None
    if conversion.upload is not None:
        return shard if conversion.upload.has(path, shard.indexed.shard.num_bytes) else None
    try:
        return shard if f"{crc32c(map_file(path)):08x}" == shard.indexed.shard.crc32c else None
    except OSError:  # it is gone
        return None


def _return_freed_memory() -> None:
    """Have the C library give every block of over 1 MB back to the system when it is freed.

    By itself glibc learns to keep blocks of up to 32 MB, for each thread apart: 32 threads that shrank photographs of
    48 megapixels held 3.1 GB of free memory.
    """
    with suppress(AttributeError):  # another C library, without that habit
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@contextmanager
def locked(state: Path, *, shared: bool) -> Iterator[Callable[[], None]]:
    """Only one process converts into a directory, or several that write parts. The lock dies with its process, however
    that dies. A file system without locks is a reason to warn: where a cluster has no other, data must go there.

    Yields a function that discards `state`: it is renamed at once, since half of it would look like somebody else's
    files, and removed when the lock in it is closed.
    """

    def discard() -> None:
        rename_to_free(state, (f"{state.name}{_DISCARDED}{number or ''}" for number in count()))

    state.mkdir(exist_ok=True)
    try:
        with (state / "lock").open("a+") as lock:  # some network file systems want the right to write, others to read
            try:
                is_ours = try_lock(lock, shared=shared)
            except NoLocksError as error:
                print(f"{error.fault}: start nothing else that writes into {state.parent} meanwhile", file=sys.stderr)
                is_ours = True
            if not is_ours:
                raise DatasetError(f"{state.parent}: another process is writing into this directory; wait for it")
            yield discard
    finally:
        _remove_discarded(state)


def _remove_discarded(state: Path) -> None:
    for rest in state.parent.glob(f"{state.name}{_DISCARDED}*"):
        if _is_discarded(rest, state):
            remove_tree(rest)


def _is_discarded(path: Path, state: Path) -> bool:
    return re.fullmatch(rf"{re.escape(state.name + _DISCARDED)}\d*", path.name) is not None


def is_own(path: Path, state: Path) -> bool:
    """Return whether `path`, beside `state`, is that, was discarded, or is a file that was replaced while open."""
    return path == state or _is_discarded(path, state) or is_still_open(path.name)


@contextmanager
def explain_full_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        if error.errno == errno.EFBIG:
            raise RunError(
                f"{out}: a file would be larger than `ulimit -f` or its file system allows ({error.strerror}). What is "
                "finished is kept: raise the limit and start the same command again, or convert into a new --out with "
                "more shards"
            ) from error
        raise RunError(
            f"{out}: cannot write any more ({error.strerror}). What is finished is kept: make space and start "
            "the same command again"
        ) from error


def _is_claimed(conversion: Conversion, state: Path) -> bool:
    """Return whether `out` is this conversion's.

    Raises:
        DatasetError: it belongs to another conversion, or its options cannot be read.
    """
    options = state / "options.json"
    try:
        recorded = read_json(options, MAX_OPTIONS_BYTES)
    except FileNotFoundError:
        return False
    except ForeignFileError as error:
        raise DatasetError(f"{error}: delete {conversion.out} and start again") from error
    _refuse_other(conversion, recorded, options)
    return True


def _refuse_foreign(out: Path, state: Path, *, plans: bool) -> None:
    """Raises DatasetError: an unclaimed `out` holds files, or only a plan may claim it and this is none."""
    foreign = (
        sorted(path.name for path in out.iterdir() if path.name != DOWNLOAD_DIRECTORY and not is_own(path, state))
        if out.exists()
        else []
    )
    if foreign:
        raise DatasetError(
            f"{out} holds {', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''} but no conversion to "
            "resume: use an empty directory for --out"
        )
    if not plans:
        raise DatasetError(f"{out} is not planned yet: start the same command with --plan once before any part")


def _claim(conversion: Conversion, state: Path, *, plans: bool, part: Part | None) -> None:
    """Claim `out` for this conversion, then remove what a killed run left unfinished (unless other parts are being
    written)."""
    out = conversion.out
    if not _is_claimed(conversion, state):  # again, now that no other process can claim it
        _refuse_foreign(out, state, plans=plans)
        write_atomically(state / "options.json", (json.dumps(conversion.identity(), indent=1) + "\n").encode())
        sync_directory(state)  # before anything else is there, or a power failure may leave only that
        sync_directory(out)
    if part is not None:
        (state / f"{_PARTS}{part.total}").touch()
        return
    for unfinished in out.rglob(".*.partial"):
        unfinished.unlink()


def _refuse_other(conversion: Conversion, recorded: Any, path: Path | str) -> None:
    """Raises DatasetError: `recorded`, as in the file `path`, are not the options of this conversion."""
    current = json.loads(json.dumps(conversion.identity()))  # as JSON gives it back
    if not isinstance(recorded, dict) or "dataset" not in recorded:
        raise DatasetError(
            f"{conversion.destination} holds a dataset that was not converted here ({path}): use another --out"
        )
    differences = _differences(recorded, current)
    if differences:
        raise DatasetError(
            f"{conversion.destination} holds a conversion with other options or another source ({path}): "
            f"{'; '.join(differences)}. Repeat those, or use another --out, or delete the directory"
        )


def _differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return what has changed between two `Conversion.identity`, in the words of the command."""
    texts = []
    for split in SPLITS:
        text = _source_difference(split, _source(recorded, split), _source(current, split))
        if text and text not in texts:  # once, if both splits have it
            texts.append(text)
    derived = {"num_classes", *(f"{split}_shards" for split in SPLITS)} if texts else set()  # from the sources
    for name in {**recorded, **current}:
        if name.endswith("_source") or name in derived:
            continue
        was = _as_given(recorded.get(name))
        now = _as_given(current.get(name))
        if was != now:
            option = name if name in ("dataset", "decode_check", "num_classes") else f"--{name.replace('_', '-')}"
            texts.append(f"{option} was {was}, now {now}")
    return texts


def _source(identity: Mapping[str, Any], split: SplitName) -> Mapping[str, Any] | None:
    """Return the source of a split in a `Conversion.identity`, which may come from somebody else's file."""
    source = identity.get(f"{split}_source")
    return source if isinstance(source, dict) else None


def _as_given(value: Any) -> Any:
    return "not given" if value is None else value


def _source_difference(split: SplitName, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    for name in ("validation_fraction", "group_by"):
        before = (was or {}).get(name)
        after = (now or {}).get(name)
        if before != after:
            return f"--{name.replace('_', '-')} was {_as_given(before)}, now {_as_given(after)}"
    if was == now:
        return ""
    if was is None or now is None:
        return (
            f"there was {'no' if was is None else 'a'} {split} split, now there is {'one' if was is None else 'none'}"
        )
    for field, text in (("name", "was called"), ("num_images", "had this number of images:")):
        if was.get(field) != now.get(field):
            return f"the {split} source {text} {was.get(field)}, now {now.get(field)}"
    return f"the {split} source has files, sizes or labels that it had not before"


MAX_OPTIONS_BYTES = 1 << 28  # of a file with a conversion's options: dataset.json may have a million class names
_CLAIM = ".conversion.json"  # what is being converted there


class Upload:
    """Where a conversion's files go. `directory`, on this machine, has what is not uploaded yet.

    Raises:
        ObjectStoreError: by any method: the store refuses, or does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.directory = cache_directory() / "conversions" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._bucket = Bucket(url)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """What an earlier start has uploaded."""
        return self._bucket.sizes("")

    def find(self) -> tuple[str, Mapping[str, Any]] | None:
        """Return the options of the conversion that is complete or under way there, and the file that has them."""
        for name, keys in (("dataset.json", ("conversion", "options")), (_CLAIM, ())):
            try:
                options: Any = read_json(self._bucket.read_all(name), MAX_OPTIONS_BYTES, name=f"{self.url}/{name}")
                for key in keys:
                    options = options[key]
            except MissingObjectError:
                continue
            except (ForeignFileError, TypeError, KeyError):  # another program's, or indexed from another's records
                options = {}
            return f"{self.url}/{name}", options if isinstance(options, dict) else {}
        return None

    @property
    def is_complete(self) -> bool:
        return "dataset.json" in self._sizes

    def foreign(self) -> list[str]:
        """Return the names of objects that are not from a conversion."""
        return [] if _CLAIM in self._sizes else sorted(self._sizes)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Record the conversion there. Raises ChangedObjectError: another process has just done so."""
        if _CLAIM not in self._sizes:
            self._bucket.write(_CLAIM, (json.dumps(identity, indent=1) + "\n").encode(), new=True)

    def has(self, path: Path, num_bytes: int) -> bool:
        """Return whether an earlier start has uploaded a shard."""
        return self._sizes.get(f"{path.parent.name}/{path.name}") == num_bytes

    def send(self, path: Path) -> None:
        """Upload a file of `directory`. It may be removed then."""
        self._bucket.upload(str(path.relative_to(self.directory)), path)

    def complete(self) -> None:
        """Upload the index and the like, and dataset.json last. Raises ChangedObjectError: there is one already."""
        for pattern in ("index/*", "idx_files/*/*", "quarantine.jsonl"):
            for path in sorted(self.directory.glob(pattern)):
                self.send(path)
        self._bucket.write("dataset.json", (self.directory / "dataset.json").read_bytes(), new=True)
        self.disclaim()

    def disclaim(self) -> None:
        """Remove the record of a conversion that is under way: it is complete."""
        self._bucket.delete(_CLAIM)


def destination(out: Path | str, phase: str = "all") -> tuple[Path, Upload | None]:
    """Return the directory in which a dataset for `out` is made, and where it goes from there if that is a URL.

    Raises:
        DatasetError: a server that is only read, or a phase of many machines.
    """
    if isinstance(out, Path):
        return out, None
    if out.startswith("http"):
        raise DatasetError(f"--out {out}: a server of this kind is only read; use s3://, gs:// or az://")
    if phase != "all":
        raise DatasetError(f"--out {out}: --plan, --part and --finish need a directory that all machines share")
    upload = Upload(out)
    return upload.directory, upload
