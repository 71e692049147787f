"""Mutated files against the readers that meet them: no undeclared exception, no crash, no hang, no memory beyond 2 GB.

    python tools/fuzz.py --minutes 60 [--only tar checkpoint] [--seed 7]

Small real files are made first: a dataset of generated JPEGs, a tar of them, and the run of a tiny model with its
checkpoint. Then, target by target in turns, a copy is damaged in a way that follows from the seed and the case's
number, and read in a child process with a limit on memory and time. What may happen is in TARGETS: the reader accepts
the file, or raises an error that is declared. Anything else is printed with the case that shows it, kept in --keep, and
ends the campaign with status 1.

    python tools/fuzz.py --only tar --case 1234      # one case again, in this process, with its traceback
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402, F401  # before the children are forked: it takes seconds

from dali_train.checkpoint.load import load_checkpoint  # noqa: E402
from dali_train.config import load_config  # noqa: E402
from dali_train.data.convert.archive import Archive, SourceError  # noqa: E402
from dali_train.data.dataset.build_index import index_shard  # noqa: E402
from dali_train.data.dataset.image_file import BadImageError, parse_jpeg_header  # noqa: E402
from dali_train.data.dataset.index import Split  # noqa: E402
from dali_train.data.dataset.manifest import Manifest  # noqa: E402
from dali_train.data.dataset.storage import MappedFiles  # noqa: E402
from dali_train.data.dataset.tfrecord import TFRecordError  # noqa: E402
from dali_train.errors import ConfigError, DatasetError, RunError  # noqa: E402
from dali_train.runtime.status import newest_step, read_status  # noqa: E402
from tools.bench.generated import write_dataset  # noqa: E402

DECLARED: tuple[type[Exception], ...] = (ConfigError, DatasetError, RunError)  # with their subclasses
MEMORY_BYTES, CASE_S, CASES = 2 << 30, 20, 40  # of one case; of one case; in one child
CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size=32, eval_resize_to=36, eval_size=32, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=0),
    batch=BatchConfig(global_batch=8, micro_batch=8),
    run=RunConfig(dir={run!r}, epochs=1, max_steps=2, device="cpu"),
)
"""


@dataclass(frozen=True)
class Target:
    """Which files are damaged, and who reads them. A row in TARGETS is all that a new reader needs."""

    files: str  # below the directory of samples, a pattern; one of them is damaged
    copied: (
        str  # below the directory of samples: what is copied for a case, so that the reader finds all else beside it
    )
    read: Callable[[Path, Path], object]  # (the copied directory, the damaged file)
    declared: tuple[type[Exception], ...] = ()  # besides DECLARED


def read_split(directory: Path, damaged: Path) -> None:
    for name in ("train", "validation"):
        split = Split(directory, name)
        shards = MappedFiles(split)
        for image in range(min(len(split), 4)):
            bytes(shards.image(image))
            split.describe(image)


def read_archive(directory: Path, damaged: Path) -> None:
    archive = Archive(damaged)
    for member in archive.members():
        archive.read(member)


TARGETS = {
    "manifest": Target("dataset/dataset.json", "dataset", lambda directory, damaged: Manifest.read(directory)),
    "dataset": Target("dataset/dataset.json", "dataset", read_split),
    "index": Target("dataset/index/*.npy", "dataset", read_split),
    "shard": Target("dataset/train/train-*", "dataset", read_split),
    "tfrecord": Target(
        "dataset/train/train-*",
        "dataset",
        lambda directory, damaged: index_shard(damaged, check_crc=False),
        (TFRecordError,),
    ),
    "tar": Target("tar/images.tar", "tar", read_archive, (SourceError,)),
    "jpeg": Target(
        "images/*.jpg", "images", lambda directory, damaged: parse_jpeg_header(damaged.read_bytes()), (BadImageError,)
    ),
    "checkpoint": Target("run/checkpoints/step-*/*", "run", lambda directory, damaged: load_checkpoint(damaged.parent)),
    "status": Target(
        "run/status.json", "run", lambda directory, damaged: (read_status(directory), newest_step(directory))
    ),
    "config": Target("config/*.py", "config", lambda directory, damaged: load_config(damaged)),
}


def make_samples(directory: Path) -> None:
    """The files that are damaged, all of them real."""
    write_dataset(directory / "dataset", num_train=12, num_validation=4, num_classes=3)
    split = Split(directory / "dataset", "train")
    (directory / "images").mkdir()
    (directory / "tar").mkdir()
    with tarfile.open(directory / "tar" / "images.tar", "w") as archive:
        for image in range(4):
            path = directory / "images" / f"{image}.jpg"
            path.write_bytes(bytes(MappedFiles(split).image(image)))
            archive.add(path, arcname=f"n0000000{image}/{'a long directory name/' * 8}{image}.JPEG")
    (directory / "config").mkdir()
    config = directory / "config" / "config.py"
    config.write_text(CONFIG.format(root=str(directory / "dataset"), run=str(directory / "run")))
    command = [sys.executable, "-m", "dali_train", "train", "--config", str(config)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fuzz.py: cannot train the tiny model:\n{done.stdout}{done.stderr}")


# ---------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------


def damage(content: bytes, rng: random.Random) -> bytes:
    """One to three of the damages that files meet, and of those that somebody would try."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["flip", "flip", "number", "number", "word", "cut", "zeros", "double", "insert", "swap"])
        # Headers are where readers decide: half of the damages hit the first bytes.
        at = rng.randrange(min(len(data), 600) if rng.random() < 0.5 else len(data)) if data else 0
        size = rng.choice([1, 4, 8, 64, 512])
        if kind == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "number":
            numbers = list(re.finditer(rb"\d+", data[:200_000]))
            if numbers:
                found = rng.choice(numbers)
                odd = [
                    b"-1",
                    b"0",
                    b"1e999",
                    b"NaN",
                    b"null",
                    b"99999999999999999999",
                    b"2147483648",
                    b'"1"',
                    b"[]",
                    b"0.5",
                ]
                data[found.start() : found.end()] = rng.choice(odd)
        elif kind == "word":
            data[at : at + 8] = rng.choice([0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]).to_bytes(8, "little")
        elif kind == "cut":
            del data[rng.choice([at, len(data) - 1 if data else 0]) :]
        elif kind == "zeros":
            data[at : at + size] = bytes(size)
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "insert":
            data[at:at] = rng.randbytes(size)
        elif kind == "swap":
            other = rng.randrange(len(data)) if data else 0
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    return bytes(data)


def damaged_copy(name: str, seed: int, case: int, samples: Path, work: Path) -> tuple[Path, Path]:
    """(the copied directory, the damaged file), the same for the same samples, seed and case."""
    target, rng = TARGETS[name], random.Random(f"{seed} {name} {case}")
    copy = work / target.copied
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(samples / target.copied, copy, symlinks=True)
    path = rng.choice(sorted(path for path in work.glob(target.files) if path.is_file() and not path.is_symlink()))
    path.write_bytes(damage(path.read_bytes(), rng))
    return copy, path


def run_case(name: str, seed: int, case: int, samples: Path, work: Path) -> str:
    """Damage and read; what came of it. Undeclared errors pass."""
    target = TARGETS[name]
    copy, path = damaged_copy(name, seed, case, samples, work)
    try:
        target.read(copy, path)
    except DECLARED + target.declared as error:
        return type(error).__name__
    return "accepted"


# ---------------------------------------------------------------------------------------------------------------
# Children
# ---------------------------------------------------------------------------------------------------------------


def child(name: str, seed: int, first: int, samples: Path, work: Path, pipe: Connection) -> None:
    """CASES of one target; tells its parent which one begins and how it ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    used = next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line
    )
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for case in range(first, first + CASES):
        pipe.send(None)
        try:
            outcome, fault = run_case(name, seed, case, samples, work), ""
        except BaseException as error:
            places = []
            trace = error.__traceback__
            while trace is not None:
                places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
                trace = trace.tb_next
            message = " ".join(str(error).split())[:160]
            outcome, fault = "FAULT", f"{type(error).__name__} at {' < '.join(reversed(places[-4:]))}: {message}"
        pipe.send((outcome, fault))


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, tuple[int, str, int]] = field(default_factory=dict)  # by kind: (first case, what, how many)

    def add_fault(self, case: int, what: str) -> bool:
        """Whether it is of a new kind: another error, or from another place in the code."""
        kind = what.split(": ")[0]
        first, text, count = self.faults.get(kind, (case, what, 0))
        self.faults[kind] = (first, text, count + 1)
        self.outcomes["FAULT"] += 1
        return count == 0


def answers_in_time(pipe: Connection, pid: int) -> bool:
    """Whether the child answers within CASE_S, not counting the time in which it had no core to run on."""

    def without_core_s() -> float:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9

    end = time.monotonic() + CASE_S - without_core_s()
    while not pipe.poll(1):
        if time.monotonic() - without_core_s() > end:
            return False
    return True


def run_batch(name: str, seed: int, first: int, samples: Path, work: Path, tally: Tally, keep: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, seed, first, samples, work, theirs))
    process.start()
    theirs.close()
    case, running = first - 1, False

    def fault(what: str) -> None:
        if tally.add_fault(case, what):
            print(f"FAULT  {name}, case {case}: {what}", flush=True)
            damaged_copy(name, seed, case, samples, keep / f"{name}-{case}")

    try:
        while True:
            if not answers_in_time(ours, process.pid or 0):
                fault(f"no answer after {CASE_S} s")
                return
            answer = ours.recv()
            if answer is None:
                case, running = case + 1, True
                continue
            running = False
            outcome, what = answer
            if outcome == "FAULT":
                fault(what)
            else:
                tally.outcomes[outcome] += 1
    except EOFError:
        process.join(10)
        if running:
            status = process.exitcode or 0
            fault(
                f"the process was ended by {signal.Signals(-status).name}"
                if status < 0
                else f"the process ended with {status}"
            )
    finally:
        process.kill()
        process.join()
        ours.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="TARGET", help=", ".join(TARGETS)
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another campaign (default: %(default)s)")
    parser.add_argument("--case", type=int, metavar="N", help="this case of the one target in --only, in this process")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "fuzz-faults",
        metavar="DIR",
        help="damaged files (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        samples, work = Path(directory) / "samples", Path(directory) / "work"
        samples.mkdir()
        work.mkdir()
        make_samples(samples)
        if options.case is not None:
            print(run_case(options.only[0], options.seed, options.case, samples, work))
            return 0
        tallies = {name: Tally() for name in options.only}
        end, first = time.monotonic() + 60 * options.minutes, 0
        while time.monotonic() < end:
            for name, tally in tallies.items():
                run_batch(name, options.seed, first, samples, work, tally, options.keep)
            first += CASES
    print(f"\n{'target':<12}{'cases':>8}{'accepted':>10}{'refused':>9}{'faults':>8}  kinds")
    for name, tally in tallies.items():
        total, accepted, faults = tally.outcomes.total(), tally.outcomes["accepted"], tally.outcomes["FAULT"]
        print(f"{name:<12}{total:>8}{accepted:>10}{total - accepted - faults:>9}{faults:>8}  {len(tally.faults)}")
    if options.json:
        found = {
            name: {"outcomes": tally.outcomes, "faults": list(tally.faults.values())} for name, tally in tallies.items()
        }
        options.json.write_text(
            json.dumps({"seed": options.seed, "minutes": options.minutes, "targets": found}, indent=1) + "\n"
        )
    return 1 if any(tally.faults for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
