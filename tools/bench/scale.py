"""Every command at ImageNet's size: processor time, own memory and the longest silence of each.

    python -m tools.bench.scale WORK
    python -m tools.bench.scale WORK --images 20000          # all of it in some minutes
    python -m tools.bench.scale WORK --epochs 5 train

Makes archives of the official form in WORK, with 1,281,167 small training images and a validation split, and goes the
whole way with them: conversion by one process that is killed and by two parts, class folders and the archives in place,
verification, the loader, training that is killed and resumed, and what comes after it; at last a rank's start with 100
million images. Each step is done once: a second start of this program goes on with those that are missing, and prints
the table of all. By calculation, WORK takes 20 GB.

Own memory is what a process has beside mapped files, of its largest process; silence is the longest time without output
on a terminal.
"""

import argparse
import io
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from dali_train.data.dataset.manifest import Manifest
from tools.bench.turns import chosen, describe_machine, family, python_environment

NUM_IMAGES, NUM_CLASSES = 1_281_167, 1000
VARIANTS = 16  # different pictures of a class; each image has a comment of its own, so that no two files are equal
SAMPLE_S = 0.2  # between two looks at the memory
COMMAND = [sys.executable, "-m", "dali_train"]
TRAIN, VALIDATION, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"

CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size=32, eval_size=32, eval_resize_to=36, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(),
    batch=BatchConfig(global_batch=1024, micro_batch=256),
    run=RunConfig(dir={run!r}, epochs={epochs}, checkpoint_every_seconds=60),
    hooks=HooksConfig(ledger=True, trace_samples=True),
)
"""
# Time until the first batch; then processor time for an image, that of its own processes included, once what is read
# ahead at the start is there.
LOADER = """
import json, sys, time
import psutil
from tools.bench.turns import cpu_seconds, wait_until_idle
begun, process = time.monotonic(), psutil.Process()
from dali_train import TrainLoader
loader = TrainLoader(sys.argv[1], batch_size=256, image_size=32)
batches, num_images = iter(loader), 256 * int(sys.argv[2])
next(batches)
first_batch_s = time.monotonic() - begun
for _ in range(10):  # a disk may pause
    wait_until_idle(process, timeout_s=60)
start, cpu_s = time.monotonic(), cpu_seconds(process)
for _ in range(int(sys.argv[2])):
    next(batches)
print(json.dumps(dict(
    first_batch_s=round(first_batch_s, 1),
    cpu_us=round((cpu_seconds(process) - cpu_s) / num_images * 1e6),
    images_per_s=round(num_images / (time.monotonic() - start)),
)))
"""
# What a rank does before its first micro-batch, and at the end of an epoch.
ROWS = """
import sys
from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.sampling.micro_batch import MicroBatches
from tools.bench.turns import loading_config
split = Split(sys.argv[1], "train", local=False)
config = loading_config(DataConfig(root=sys.argv[1]), global_batch=4096, micro_batch=256)
micro_batches = MicroBatches(split.rows, config)
for step in (0, len(split) // 4096, len(split) // 4096 + 1):
    micro_batches(step, 0)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one command took."""

    step: str
    command: str
    wall_s: float
    cpu_s: float
    own_mb: int
    silence_s: float
    note: str = ""


def run(step: str, words: Sequence[str], *, until: Callable[[], bool] | None = None, status: int = 0) -> Row:
    """Run a command on a terminal of its own, and kill it as soon as `until` is true."""
    ours, theirs = pty.openpty()
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**python_environment(), "COLUMNS": "120"}
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    )
    os.close(theirs)
    lines, own, silence, heard, looked, killed = b"", 0, 0.0, begun, begun, False
    while True:
        ready, _, _ = select.select([ours], [], [], SAMPLE_S)
        now = time.monotonic()
        with suppress(OSError):  # the terminal of a process that has ended
            if ready and (output := os.read(ours, 1 << 16)):
                silence, heard, lines = max(silence, now - heard), now, (lines + output)[-4000:]
        if process.poll() is not None:
            break
        if now - looked > SAMPLE_S:
            looked, own = now, max(own, own_mb(process.pid))
            if until is not None and not killed and until():
                killed = True
                os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = lines.decode(errors="replace").replace("\r", "\n").strip().splitlines()
    if process.returncode != (-signal.SIGKILL if killed else status):
        raise SystemExit(f"{step}: status {process.returncode}\n" + "\n".join(said[-20:]))
    return Row(
        step=step,
        command=" ".join(words).replace(sys.executable, "python"),
        wall_s=round(now - begun, 1),
        cpu_s=round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        own_mb=own,
        silence_s=round(max(silence, now - heard), 1),
        note="killed" if killed else said[-1] if said else "",
    )


def own_mb(pid: int) -> int:
    """Return the memory of the largest process of a family, without mapped files."""
    largest = 0
    with suppress(psutil.NoSuchProcess):
        for member in family(psutil.Process(pid)):
            with suppress(psutil.NoSuchProcess):
                memory = member.memory_info()
                largest = max(largest, memory.rss - memory.shared)
    return largest >> 20


class Rehearsal:
    """The steps, in their order; each yields rows."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work, self.images, self.epochs, self.rows_count = work, options.images, options.epochs, options.rows
        self.archives, self.dataset, self.folders = work / "archives", work / "dataset", work / "folders" / "train"

    def steps(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {
            "convert": self.convert,
            "parts": self.parts,
            "verify": self.verify,
            "archives": self.archives_in_place,
            "folders": self.folders_in_place,
            "loader": self.loader,
            "moved": self.moved,
            "train": self.train,
            "after": self.after,
            "rows": self.rows,
        }

    def make(self) -> None:
        if not (self.archives / DEVKIT).exists():
            self.archives.mkdir(parents=True, exist_ok=True)
            write_archives(self.archives, self.images)

    def convert(self) -> Iterator[Row]:
        words = [*self._converting(self.dataset)]
        for share in (0.3, 0.6):
            yield run(f"convert, killed at {share:.0%}", words, until=partial(self._has_shards, share))
        yield run("convert, to its end", words)

    def _converting(self, out: Path) -> list[str]:
        files = ("--train-archive", TRAIN), ("--validation-archive", VALIDATION), ("--devkit", DEVKIT)
        named = [word for option, name in files for word in (option, str(self.archives / name))]
        return [*COMMAND, "data", "convert", "imagenet", *named, "--out", str(out)]

    def _has_shards(self, share: float) -> bool:
        shards = [*self.dataset.glob("train/train-*-of-*")]
        return bool(shards) and len(shards) >= share * int(shards[0].name.rpartition("-")[2])

    def parts(self) -> Iterator[Row]:
        words = self._converting(self.work / "parts")
        for phase in (["--plan"], ["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
            yield run(f"convert {' '.join(phase)}", [*words, *phase])
        one, other = (Manifest.read(root).splits for root in (self.dataset, self.work / "parts"))
        assert one == other, "the checksums of all files are the same, killed twice or in two parts"

    def verify(self) -> Iterator[Row]:
        yield run("verify", [*COMMAND, "data", "verify", str(self.dataset)])
        yield run("verify --sample 1000", [*COMMAND, "data", "verify", str(self.dataset), "--sample", "1000"])

    def archives_in_place(self) -> Iterator[Row]:
        out = self.work / "archives.index"
        yield run("index, archives", [*COMMAND, "data", "index", str(self.archives), "--out", str(out)])

    def folders_in_place(self) -> Iterator[Row]:
        unpack(self.archives / TRAIN, self.folders)
        out = self.work / "folders.index"
        words = [*COMMAND, "data", "index", str(self.folders), "--out", str(out)]
        portions = self.images // 2000
        yield run("index, folders, killed at 50%", words, until=lambda: len([*out.glob(".indexing/*.npz")]) > portions)
        yield run("index, folders, to its end", words)
        aside = self.folders.with_name("aside")
        self.folders.rename(aside)
        yield run("verify, the folders are gone", [*COMMAND, "data", "verify", str(out)], status=1)
        aside.rename(self.folders)

    def loader(self) -> Iterator[Row]:
        num_batches = min(400, self.images // 256 - 2)  # of the first epoch
        for name in ("dataset", "archives.index", "folders.index") * 2:
            yield run(f"loader, {name}", [sys.executable, "-c", LOADER, str(self.work / name), str(num_batches)])

    def moved(self) -> Iterator[Row]:
        words = [sys.executable, "-c", LOADER, str(self.work / "folders.index"), "1"]
        yield run("start, folders", words)
        for directory in [self.folders, *self.folders.iterdir()]:
            os.utime(directory)
        yield run("start, folders with another time", words)

    def train(self) -> Iterator[Row]:
        config, last = self.work / "config.py", self.images * self.epochs // 1024
        config.write_text(CONFIG.format(root=str(self.dataset), run=str(self.work / "run"), epochs=self.epochs))
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*ranks, "-m", "dali_train", "train", "--config", str(config)]
        yield run("train, 2 ranks, killed at 30%", words, until=lambda: self._trained() > 0.3 * last)
        yield run("train, 2 ranks, to its end", words)
        yield self._memory()

    def _events(self) -> list[dict[str, float]]:
        lines = (self.work / "run" / "metrics.jsonl").read_text().splitlines()
        return [event for line in lines if "process_memory_gb" in (event := json.loads(line))]

    def _trained(self) -> float:
        with suppress(OSError, ValueError):
            return max((event["step"] for event in self._events()), default=0)
        return 0

    def _memory(self) -> Row:
        """Return the own memory of rank 0 over the run, as it logged it."""
        events = self._events()
        last = max(event["step"] for event in events)
        by_tenth: dict[int, list[float]] = {}
        for event in events:
            by_tenth.setdefault(int(10 * (event["step"] - 1) / last), []).append(event["process_memory_gb"])
        text = ", ".join(f"{1000 * np.median(values):.0f}" for values in by_tenth.values())
        own = max(int(1000 * event["process_memory_gb"]) for event in events)
        return Row(
            step="memory of rank 0",
            command="",
            wall_s=0,
            cpu_s=0,
            own_mb=own,
            silence_s=0,
            note=f"medians of tenths: {text} MB",
        )

    def after(self) -> Iterator[Row]:
        directory = self.work / "run"
        yield Row(step="trace", command="", wall_s=0, cpu_s=0, own_mb=0, silence_s=0, note=self._trace())
        for words in (["prove"], ["suspects"], ["report"], ["status"]):
            yield run(words[0], [*COMMAND, *words, str(directory)])

    def _trace(self) -> str:
        """Return how often each image was trained in the first epoch."""
        drawn: dict[tuple[int, int], list[int]] = {}
        for path in sorted((self.work / "run").glob("samples.rank*.jsonl")):
            with path.open() as lines:
                for line in lines:
                    event = json.loads(line)
                    place = event["step"], event["k"]
                    assert drawn.setdefault(place, event["images"]) == event["images"], (
                        f"{place} was repeated otherwise"
                    )
        sequence = (image for place in sorted(drawn) for image in drawn[place])
        times = np.bincount([*islice(sequence, self.images)], minlength=self.images)
        assert (times == 1).all(), f"never {(times == 0).sum()}, more than once {(times > 1).sum()}"
        return f"all {self.images:,} images exactly once in the first epoch"

    def rows(self) -> Iterator[Row]:
        root = self.work / "rows"
        if not (root / "dataset.json").exists():
            write_rows(root, self.rows_count)
        yield run(f"a rank's start, {self.rows_count:,} images", [sys.executable, "-c", ROWS, str(root)])


def class_sizes(num_images: int) -> list[int]:
    """Return the number of images of each class: as in ImageNet, most have the largest number."""
    most = -(-1300 * num_images // NUM_IMAGES)
    sizes = np.full(NUM_CLASSES, most)
    lower = np.random.default_rng(0).permutation(NUM_CLASSES)[: NUM_CLASSES // 9]
    surplus = int(sizes.sum()) - num_images
    sizes[lower] -= surplus // len(lower)
    sizes[lower[: surplus % len(lower)]] -= 1
    return [int(size) for size in sizes]


def pictures(number: int) -> list[bytes]:
    """Return JPEGs of 64 to 128 pixels, alike within a class."""
    rng = np.random.default_rng(number)
    kind = rng.integers(0, 256, (6, 6, 3))
    encoded = []
    for _ in range(VARIANTS):
        pixels = (kind + rng.normal(0, 40, kind.shape)).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        size = [int(side) for side in rng.integers(64, 129, 2)]
        Image.fromarray(pixels).resize((size[0], size[1]), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
        encoded.append(buffer.getvalue())
    return encoded


def commented(jpeg: bytes, text: str) -> bytes:
    """Return a JPEG with a comment behind its first segment."""
    place = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:place] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text.encode() + jpeg[place:]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
    archive.members.clear()  # type: ignore[attr-defined]


def write_archives(out: Path, num_images: int) -> None:
    """Write the three official files with small images; the devkit last."""
    from scipy.io import savemat

    synsets = [f"n{1440764 + 7 * number:08d}" for number in range(NUM_CLASSES)]
    of_class = []
    with tarfile.open(out / TRAIN, "w") as outer:
        for number, (synset, size) in enumerate(zip(synsets, class_sizes(num_images), strict=True)):
            of_class.append(pictures(number))
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                for image in range(size):
                    name = f"{synset}_{image}.JPEG"
                    add(archive, name, commented(of_class[-1][image % VARIANTS], name))
            add(outer, f"{synset}.tar", inner.getvalue())
            if number % 100 == 99:
                print(f"{number + 1} of {NUM_CLASSES} classes are written", flush=True)
    num_validation = max(NUM_CLASSES, num_images // 26)
    labels = np.random.default_rng(1).integers(0, NUM_CLASSES, num_validation).tolist()
    with tarfile.open(out / VALIDATION, "w") as archive:
        for number, label in enumerate(labels, 1):
            name = f"ILSVRC2012_val_{number:08d}.JPEG"
            add(archive, name, commented(of_class[label][number % VARIANTS], name))
    fields = [(field, "O") for field in ("ILSVRC2012_ID", "WNID", "num_children")]
    table = np.zeros((NUM_CLASSES, 1), dtype=fields)
    for number, synset in enumerate(synsets):
        table[number, 0] = (float(number + 1), synset, 0.0)
    meta = io.BytesIO()
    savemat(meta, {"synsets": table})
    truth = "".join(f"{label + 1}\n" for label in labels).encode()
    partial = out / "devkit.partial"
    with tarfile.open(partial, "w:gz") as archive:
        add(archive, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(archive, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth)
    partial.rename(out / DEVKIT)


def unpack(train: Path, folders: Path) -> None:
    """Write the images of an archive of archives as class folders."""
    if folders.exists():
        return
    partial = folders.with_name("partial")
    with tarfile.open(train) as outer:
        for member in outer:
            folder = partial / member.name.removesuffix(".tar")
            folder.mkdir(parents=True, exist_ok=True)
            content = outer.extractfile(member)
            assert content is not None
            with tarfile.open(fileobj=content) as inner:
                for image in inner:
                    start = image.offset_data
                    content.seek(start)
                    (folder / image.name).write_bytes(content.read(image.size))
                    content.seek(start)
    partial.rename(folders)


def write_rows(root: Path, num_images: int) -> None:
    """Write the index of a dataset that has no images."""
    from crc32c import crc32c

    from dali_train.data.dataset.index import INDEX_DTYPE, map_file
    from dali_train.data.dataset.manifest import Shard, SplitManifest, index_path

    per_shard = 10_000
    sizes = [min(per_shard, num_images - first) for first in range(0, num_images, per_shard)]
    path = index_path(root, "train")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.lib.format.open_memmap(path, "w+", INDEX_DTYPE, (num_images,))
    rng = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        part = rows[number * per_shard :][:size]
        part["offset"], part["size"], part["shard"] = 10_000 * np.arange(size), 5000, number
        part["label"], part["height"], part["width"] = rng.integers(0, NUM_CLASSES, size), 400, 500
    rows.flush()
    shards = tuple(
        Shard(name=f"train-{number:05d}-of-{len(sizes):05d}", num_records=size, num_bytes=10_000 * size)
        for number, size in enumerate(sizes)
    )
    split = SplitManifest(num_records=num_images, shards=shards, index_crc32c=f"{crc32c(map_file(path)):08x}")
    names = tuple(f"class {number}" for number in range(NUM_CLASSES))
    Manifest(num_classes=NUM_CLASSES, class_names=names, label_base=1, splits={"train": split}, conversion={}).write(
        root
    )


def print_table(rows: Sequence[Row]) -> None:
    print(f"\n{describe_machine()}\n\n| | wall s | CPU s | own MB | silent s | |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.step} | {row.wall_s:g} | {row.cpu_s:g} | {row.own_mb} | {row.silence_s:g} | {row.note[:160]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="only those that contain these words")
    parser.add_argument("--images", type=int, default=NUM_IMAGES, metavar="N", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=100_000_000, metavar="N", help="without images (default: %(default)s)"
    )
    options = parser.parse_intermixed_args()
    rehearsal = Rehearsal(options.work.resolve(), options)
    rehearsal.make()
    for name in chosen(rehearsal.steps(), options.steps):
        record = options.work / f"{name}.jsonl"
        if record.exists():
            continue
        rows = []
        for row in rehearsal.steps()[name]():
            print(
                f"{row.step}: {row.wall_s:g} s, {row.own_mb} MB, silent for {row.silence_s:g} s: {row.note}", flush=True
            )
            rows.append(row)
        record.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    records = [options.work / f"{name}.jsonl" for name in rehearsal.steps()]
    lines = [line for record in records if record.exists() for line in record.read_text().splitlines()]
    print_table([Row(**json.loads(line)) for line in lines])


if __name__ == "__main__":
    main()
