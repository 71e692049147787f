"""A conversion from beginning to end: plan, write, resume, refuse, and hand over to the index.

While it runs, ``DATASET/.conversion`` holds the options and a note per finished shard; the directory is removed when
all that was written has been read again. ``dataset.json`` appears last. Nothing that can be read as a finished shard or
dataset is ever half done, so a run may be killed at any moment and started again.
"""

import ctypes
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

from crc32c import crc32c

from dali_train.data.convert.image import EncodingOptions
from dali_train.data.convert.plan import default_num_shards, shuffled_layout
from dali_train.data.convert.shards import LABEL_BASE, ShardWriter, WrittenShard, write_shards
from dali_train.data.convert.sources import Source
from dali_train.data.dataset.build_index import map_shards, write_index
from dali_train.data.dataset.index import map_file
from dali_train.data.dataset.manifest import Manifest, SplitName
from dali_train.data.dataset.verify import verify
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError, RunError
from dali_train.files import NO_SPACE, sync_directory, try_lock, write_atomically

DOWNLOAD_DIRECTORY = "downloads"  # the one directory that may be in a new dataset's
OnBad = Literal["fail", "skip"]
_MOST_LISTED = 20
_M_MMAP_THRESHOLD = -3  # from malloc.h


class ConversionError(DatasetError):
    """A conversion that cannot begin as it was asked for; the message says what to do."""


class ConversionFailedError(RunError):
    """A conversion that came to a halt: bad images, a full disk, a result that is not right."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What to convert into which directory."""

    name: str  # of the dataset, e.g. "imagenet"
    sources: Mapping[SplitName, Source]
    class_names: Sequence[str]
    out: Path
    encoding: EncodingOptions
    num_shards: Mapping[SplitName, int | None]  # None: by the amount of data
    seed: int
    workers: int
    on_bad: OnBad

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConversionError(f"--workers is {self.workers}: use at least 1")
        if not 0 <= self.seed < 1 << 63:
            raise ConversionError(f"--seed is {self.seed}: use 0 to 2**63 - 1")
        for split, source in self.sources.items():
            num_images, num_shards = len(source.labels), self.num_shards.get(split)
            if num_images == 0:
                raise ConversionError(f"the {split} split has no images")
            if num_shards is not None and not 1 <= num_shards <= min(num_images, 99_999):
                raise ConversionError(
                    f"--{split}-shards is {num_shards}: use 1 to {min(num_images, 99_999)}, the split has "
                    f"{num_images} images"
                )

    def shards_of(self, split: SplitName) -> int:
        source = self.sources[split]
        return self.num_shards.get(split) or default_num_shards(
            split, num_images=len(source.labels), num_bytes=source.num_bytes
        )

    def identity(self) -> dict[str, Any]:
        """Return all that the bytes of the result depend on; a resumed run must repeat it."""
        return {
            "dataset": self.name,
            "seed": self.seed,
            **asdict(self.encoding),
            "num_classes": len(self.class_names),
            **{f"{split}_shards": self.shards_of(split) for split in self.sources},
            **{f"{split}_source": source.identity() for split, source in self.sources.items()},
        }


def convert(conversion: Conversion) -> list[str]:
    """Make what is missing of the dataset, and read all that was written; return what to say to the user.

    Raises:
        ConversionError: `out` holds another conversion or other files.
        ConversionFailedError: bad images and ``on_bad`` is fail, the disk is full, or the disk gives back something
            else than what was written.
        SourceError: the source changed meanwhile.
    """
    out = conversion.out
    out.mkdir(parents=True, exist_ok=True)
    state, finished = out / ".conversion", out / ".conversion.finished"
    shutil.rmtree(finished, ignore_errors=True)  # left by a run that was killed in its last moment
    if (out / "dataset.json").exists() and not state.exists():
        _refuse_other(conversion, Manifest.read(out).conversion.get("options", {}), out / "dataset.json")
        return [f"{out} is complete already: nothing to do. `dali-train data verify {out}` checks it"]
    _return_large_blocks()
    with _locked(state), _clear_when_full(out):
        _claim(conversion, state)
        done = {split: _convert_split(conversion, split, state) for split in conversion.sources}
        _report_bad_images(conversion, done)
        report = {
            split: {
                **sum((s.counts for s in shards), Counter()),
                "left out, see quarantine.jsonl": sum(len(s.bad) for s in shards),
            }
            for split, shards in done.items()
        }
        write_index(
            out,
            {split: [shard.indexed for shard in shards] for split, shards in done.items()},
            label_base=LABEL_BASE,
            class_names=conversion.class_names,
            conversion={"options": conversion.identity(), "report": report},
        )
        # What is stored was decoded before.
        findings = verify(out, decode=False, other_reader=False, workers=conversion.workers)
        if findings.problems:
            # Nothing trains on it then, and the next start compares each shard with its checksum.
            (out / "dataset.json").unlink()
            faults = "\n  ".join(findings.problems)
            raise ConversionFailedError(
                f"{out} is faulty:\n  {faults}\nStart the same command again: it writes faulty shards anew. Check "
                "the disk"
            )
        # Renamed first: half a state directory would look like somebody else's files.
        shutil.rmtree(state.rename(finished))
    counted = [
        f"{split}: {count:,} images: {kind}"
        for split, kinds in report.items()
        for kind, count in kinds.items()
        if count
    ]
    return [*counted, *findings.summary(), f"{out} is ready"]


def _report_bad_images(conversion: Conversion, done: Mapping[SplitName, Sequence[WrittenShard]]) -> None:
    """List them in quarantine.jsonl. Raises ConversionFailedError: there are some, and ``on_bad`` is fail."""
    bad = [
        {"split": split, "file": image.file, "position": image.position, "reason": image.reason}
        for split, shards in done.items()
        for shard in shards
        for image in shard.bad
    ]
    if not bad:
        return
    quarantine = conversion.out / "quarantine.jsonl"
    write_atomically(quarantine, "".join(json.dumps(line) + "\n" for line in bad).encode())
    if conversion.on_bad == "fail":
        lines = [f"{image['file']} (at byte {image['position']}): {image['reason']}" for image in bad[:_MOST_LISTED]]
        if len(bad) > _MOST_LISTED:
            lines.append(f"and {len(bad) - _MOST_LISTED} more")
        raise ConversionFailedError(
            "\n  ".join([f"{len(bad)} images cannot be decoded; all of them are listed in {quarantine}:", *lines])
            + "\nStart the same command again with --on-bad skip to leave them out. What is converted is kept"
        )


def _convert_split(conversion: Conversion, split: SplitName, state: Path) -> list[WrittenShard]:
    """Return every shard of the split, as converted now or by an earlier run."""
    num_shards, directory = conversion.shards_of(split), conversion.out / split
    paths = [directory / f"{split}-{number:05d}-of-{num_shards:05d}" for number in range(num_shards)]
    layout = shuffled_layout(len(conversion.sources[split].labels), num_shards, seed=conversion.seed)
    done: dict[Path, WrittenShard] = {}

    def note(path: Path) -> Path:
        return state / f"{path.name}.npz"

    def finish(path: Path, shard: WrittenShard) -> None:
        shard.save(note(path))
        done[path] = shard

    for path, shard in map_shards(paths, lambda path: _finished(path, note(path)), workers=conversion.workers):
        if shard is not None:
            done[path] = shard
    jobs = [(path, images) for path, images in zip(paths, layout, strict=True) if path not in done]
    if jobs:
        directory.mkdir(exist_ok=True)
        num_images = sum(len(images) for _, images in jobs)
        with Progress(f"{split} ({len(jobs)} of {num_shards} shards)", total=num_images, unit="images") as progress:
            writer = ShardWriter(conversion.sources[split], conversion.encoding, conversion.class_names, progress)
            write_shards(jobs, writer, finish=finish, workers=conversion.workers)
        sync_directory(directory)
    empty = [path.name for path in paths if not done[path].indexed.shard.num_records]
    if empty and conversion.on_bad == "skip":
        raise ConversionFailedError(f"{split}: {empty[0]} has no good image: start with fewer --{split}-shards")
    return [done[path] for path in paths]


def _finished(path: Path, note: Path) -> WrittenShard | None:
    """Return a shard of an earlier run. All of it is read: a bit may have flipped while the conversion was stopped."""
    try:
        shard = WrittenShard.load(note)
        return shard if f"{crc32c(map_file(path)):08x}" == shard.indexed.shard.crc32c else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # there is none, or a power failure has spoilt it
        return None


def _return_large_blocks() -> None:
    """Have the C library give every block of over 1 MB back to the system when it is freed.

    By itself glibc learns to keep blocks of up to 32 MB, for each thread apart: 32 threads that shrank photographs of
    48 megapixels held 3.1 GB of free memory.
    """
    with suppress(AttributeError):  # another C library, without that habit
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Only one process converts into a directory. The lock dies with the process, however it dies."""
    state.mkdir(exist_ok=True)
    with (state / "lock").open("w") as lock:
        if not try_lock(lock):
            raise ConversionError(f"{state.parent}: another process is converting into this directory; wait for it")
        yield


@contextmanager
def _clear_when_full(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise ConversionFailedError(
            f"{out}: cannot write any more ({error.strerror}). All finished shards are kept: make space and start "
            "the same command again"
        ) from error


def _claim(conversion: Conversion, state: Path) -> None:
    """Make `out` ours, or see that it is; then sweep up what a killed run left half done."""
    out, options = conversion.out, state / "options.json"
    if options.exists():
        try:
            theirs = json.loads(options.read_text())
        except ValueError as error:
            raise ConversionError(f"{options} cannot be read ({error}): delete {out} and start again") from error
        _refuse_other(conversion, theirs, options)
    else:
        foreign = sorted(path.name for path in out.iterdir() if path not in (state, out / DOWNLOAD_DIRECTORY))
        if foreign:
            raise ConversionError(
                f"{out} holds {', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''} but no conversion to "
                "resume: use an empty directory for --out"
            )
        write_atomically(options, (json.dumps(conversion.identity(), indent=1) + "\n").encode())
    for partial in out.rglob(".*.partial"):
        partial.unlink()


def _refuse_other(conversion: Conversion, theirs: Mapping[str, Any], path: Path) -> None:
    ours = json.loads(json.dumps(conversion.identity()))  # as JSON gives it back
    differences = [
        f"{name} was {theirs.get(name)!r}, now {ours.get(name)!r}"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    if differences:
        raise ConversionError(
            f"{conversion.out} holds a conversion with other options or another source ({path}): "
            f"{'; '.join(differences)}. Repeat those, or use another --out, or delete the directory"
        )
