"""Damaged files against the readers that meet them: no undeclared exception, crash, hang, or memory beyond 1 GB.

    python tests/verification/fuzz.py --minutes 60 [--only tar checkpoint] [--seed 7]
    python tests/verification/fuzz.py --cases 1000000 --only status mirror.json

Small real files are made first: a dataset of generated JPEGs, a tar of them, the files of a run, and the run of a tiny
model if a target needs one. Then a copy is damaged, target by target in turns, in a way that follows from the seed and
the case's number, and read in a child process with limits on memory and time. The reader may accept the file, or raise
an error that TARGETS declares. Anything else is printed with the case that shows it, and ends the campaign with status
1:

    python tests/verification/fuzz.py --only tar --case 1234      # one case again, in this process, with its traceback
"""

import argparse
import functools
import gc
import json
import math
import mmap
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

import timm  # noqa: E402  # before the children are forked: it takes seconds
import torch  # noqa: E402
from timm.models import register_model  # noqa: E402
from torch import nn  # noqa: E402

from dali_train.checkpoint.format import (  # noqa: E402
    CheckpointManifest,
    RunValues,
    load_checkpoint,
    parse_manifest,
)
from dali_train.checkpoint.run_directory import (  # noqa: E402
    RunDirectory,
    record_top1,
    saved_top1,
)
from dali_train.config import (  # noqa: E402
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    load_config,
)
from dali_train.config.check import from_json  # noqa: E402
from dali_train.data.convert.archives import Archive  # noqa: E402
from dali_train.data.convert.sources import SourceError  # noqa: E402
from dali_train.data.dataset.image_file import BadImageError, parse_jpeg_header  # noqa: E402
from dali_train.data.dataset.index import Split  # noqa: E402
from dali_train.data.dataset.manifest import Manifest, SplitName  # noqa: E402
from dali_train.data.dataset.storage import MappedFiles, stored_image  # noqa: E402
from dali_train.data.dataset.tfrecord import TFRecordError  # noqa: E402
from dali_train.data.dataset.write_index import index_shard  # noqa: E402
from dali_train.errors import ConfigError, UserError  # noqa: E402
from dali_train.extras.mirror.claim import parse_claim  # noqa: E402
from dali_train.runtime.lock import FILE, RunLock, find_holder  # noqa: E402
from dali_train.runtime.status import RunStatus, describe, goodput, read_events, read_status  # noqa: E402
from dali_train.training.model import build_model, check_sizes  # noqa: E402
from tools.bench.generated import accept_index, write_dataset  # noqa: E402

MEMORY_BYTES = 1 << 30  # that one child may use besides what it began with
WAIT_S, COMPUTE_S = 60, 5  # of one case: by the clock, for a reader that waits for ever; on the processor
CASES = 40  # of one target in its turn
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
    """What is damaged, and what reads it. A row in TARGETS is all that a new reader needs."""

    files: str  # pattern of files below the directory of samples, one of which is damaged
    read: Callable[[Path], object]  # called with the damaged file, which has all other files of its directory beside it
    declared: tuple[type[Exception], ...] = ()  # errors that it may raise besides UserError and OSError
    damage: Callable[[bytes, random.Random], bytes] | None = None  # None: `damaged_json` or `damaged_bytes`
    is_cheap: bool = False  # takes milliseconds, and needs no training


def read_splits(directory: Path, names: Sequence[SplitName] = ("train", "validation")) -> None:
    for name in names:
        split = Split(directory, name)
        images = MappedFiles(split)
        for image in range(min(len(split), 4)):
            bytes(stored_image(images, image))
            split.describe(image)


def read_index(path: Path) -> None:
    """Read a damaged index whose checksum fits."""
    accept_index(path.parent.parent)
    read_splits(path.parent.parent, ["train" if path.name.startswith("train") else "validation"])


def read_archive(path: Path) -> None:
    archive = Archive(path)
    for member in archive.list():
        archive.read(member)


def read_status_files(path: Path) -> None:
    read_status(path.parent)
    describe(path.parent)


def read_config_json(path: Path) -> None:
    run = RunDirectory(path.parent)
    assert run.config.to_json() and run.settings


def build_with_kwargs(path: Path) -> None:
    """Build the model of the file's name on the meta device, with the model.kwargs in it."""
    kwargs = eval(path.read_bytes(), {"nan": math.nan, "inf": math.inf})
    config = plain_config().replace(model={"name": path.name, "kwargs": kwargs})
    try:
        check_sizes(build_model(config, 5, torch.device("meta")), config)
    except ConfigError as error:
        assert "model.kwargs" in str(error), f"names no argument: {error}"
        raise


@functools.cache
def plain_config() -> Config:
    return Config(
        data=DataConfig(root="data", train_size=32, eval_size=32),
        model=ModelConfig(name="test_vit"),
        optimizer=OptimizerConfig(lr=0.1),
        schedule=ScheduleConfig(warmup_epochs=1),
        batch=BatchConfig(global_batch=8, micro_batch=8),
        run=RunConfig(dir="run", epochs=3),
    )


@register_model
def fuzz_vit(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL | kwargs)


@register_model
def fuzz_small_vit(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return timm.create_model("dali_vit_small_patch16", **SMALL | kwargs)


@register_model
def fuzz_lenet(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return timm.create_model("dali_lenet", **{"img_size": 32, "in_chans": 3} | kwargs)


SMALL = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
# Some arguments of models whose blocks are few, so that thousands are built a minute.
ARGUMENTS = {
    "fuzz_vit": (
        "img_size patch_size embed_dim depth num_heads mlp_ratio qkv_bias qk_norm init_values class_token global_pool "
        "drop_rate pos_drop_rate drop_path_rate patch_drop_rate weight_init act_layer norm_layer reg_tokens pos_embed"
    ),
    "fuzz_small_vit": "img_size embed_dim depth num_heads class_token global_pool",
    "fuzz_lenet": "img_size in_chans",
    "test_resnet": "layers channels block stem_width stem_type output_stride drop_rate act_layer norm_layer avg_down",
    "test_efficientnet": "depth_multiplier drop_rate act_layer in_chans round_chs_fn",
}
ANY_MODEL = "imgsize x device dtype pretrained cache_dir features_only out_indices scriptable model_cfg self variant"
VALUES: list[Any] = [
    *(-1, 0, 1, 2, 3, 5, 8, 32, 33, 65_535, 10**9, -(2**40), 2**63, 10**400),
    *(0.0, -0.5, 0.5, 1.5, 1e9, 1e308, math.inf, math.nan, None, True, False),
    *("", "x", "1", "avg", "map", "gelu", "batchnorm", "cuda", "\x00", "é" * 300),
    *([], [1, 2], (8, 8), [-1, 3], (0, 0, 0, 0), [10**6] * 3, (200,) * 4, {}, {"a": 1}, [[[]]]),
]


def drawn_kwargs(arguments: bytes, rng: random.Random) -> bytes:
    """Return one to three of `arguments`, or of any model's, with values that may fit or not."""
    kwargs: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice((arguments.decode() if rng.random() < 0.85 else ANY_MODEL).split())
        number = rng.choice((rng.randint(-100, 100), rng.uniform(-2, 2)))
        kwargs[name] = rng.choice(VALUES) if rng.random() < 0.8 else number
    return repr(kwargs).encode()


TARGETS = {
    "dataset.json": Target("dataset/dataset.json", lambda path: Manifest.read(path.parent), is_cheap=True),
    "index": Target("dataset/index/*.npy", read_index, is_cheap=True),
    "manifest.json": Target("run/manifest.json", lambda p: parse_manifest(p.read_bytes(), str(p)), is_cheap=True),
    "status": Target("run/status.json", read_status_files, is_cheap=True),
    "mirror.json": Target("run/mirror.json", lambda p: parse_claim(p.read_bytes(), "s3://bucket"), is_cheap=True),
    "run.lock": Target(f"run/{FILE}", lambda path: find_holder(path.parent), is_cheap=True),
    "metrics.jsonl": Target("run/metrics.jsonl", lambda path: goodput(read_events(path)), is_cheap=True),
    "config.json": Target("run/config.json", read_config_json, is_cheap=True),
    "environment.json": Target("run/environment.json", lambda p: RunDirectory(p.parent).environment, is_cheap=True),
    "evaluation.json": Target("run/evaluation.json", lambda path: saved_top1(path.parent), is_cheap=True),
    "model.kwargs": Target("kwargs/*", build_with_kwargs, damage=drawn_kwargs, is_cheap=True),
    "dataset": Target("dataset/dataset.json", lambda path: read_splits(path.parent)),
    "shard": Target("dataset/train/train-*", lambda path: read_splits(path.parent.parent)),
    "tfrecord": Target("dataset/train/train-*", lambda path: index_shard(path, check_crc=False), (TFRecordError,)),
    "tar": Target("tar/images.tar", read_archive, (SourceError,)),
    "jpeg": Target("images/*.jpg", lambda path: parse_jpeg_header(path.read_bytes()), (BadImageError,)),
    "checkpoint": Target("trained/checkpoints/step-*/*", lambda path: load_checkpoint(path.parent)),
    "config": Target("config/*.py", load_config),
}


def make_samples(directory: Path, names: list[str]) -> None:
    """Write the files that are damaged, all of them real."""
    write_dataset(directory / "dataset", num_train=12, num_validation=4, num_classes=3)
    config = directory / "config" / "config.py"
    config.parent.mkdir()
    config.write_text(CONFIG.format(root=str(directory / "dataset"), run=str(directory / "trained")))
    write_files_of_a_run(directory / "run", load_config(config).to_json())
    (directory / "kwargs").mkdir()
    for name, arguments in ARGUMENTS.items():
        (directory / "kwargs" / name).write_text(arguments)
    if {"tar", "jpeg"} & {*names}:
        split = Split(directory / "dataset", "train")
        (directory / "images").mkdir()
        (directory / "tar").mkdir()
        with tarfile.open(directory / "tar" / "images.tar", "w") as archive:
            for image in range(4):
                path = directory / "images" / f"{image}.jpg"
                path.write_bytes(bytes(stored_image(MappedFiles(split), image)))
                archive.add(path, arcname=f"n0000000{image}/{'a long directory name/' * 8}{image}.JPEG")
    if "checkpoint" in names:
        command = [sys.executable, "-m", "dali_train", "train", "--config", str(config)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"fuzz.py: cannot train the tiny model:\n{done.stdout}{done.stderr}")


def write_files_of_a_run(run: Path, config: str) -> None:
    """Write the files that the cheap targets read, without training."""
    run.mkdir()
    RunLock(run, print)._closing.set()  # the lock stays
    holder = json.loads((run / FILE).read_text())
    RunStatus(state="stopped", step=7, reason="Ctrl-C", total_steps=9, best_top1=0.5, lock_holder="pid 7").write(run)
    (run / "config.json").write_text(config)
    (run / "environment.json").write_text(json.dumps({"host_cores": 2, "world_size": 1, "versions": {"torch": "2.11"}}))
    folder = f"step-00000007-{'0f' * 8}"
    mirror = {"format": 1, "holder": holder, "count": 3, "checkpoints": {folder: 0.5}, "unfinished": [folder]}
    (run / "mirror.json").write_text(json.dumps(mirror))
    values = {
        "optimizer": {"kind": "AdamW", "groups": [{"step": 7}], "numbers": {"state.head.weight.step": 7.0}},
        "scaler": {"scale": 65536.0},
        "recipe": {"run.epochs": 3, "model.kwargs": {"img_size": 32}, "data.mean": [1.0, 2.0, 3.0]},
        "class_names": ["a", "b"],
        "epoch_accuracies": [0.25, 0.5],
        "dropout": "block",
    }
    CheckpointManifest(step=7, values=from_json(RunValues, values), files={"shard.safetensors": "0f" * 32}).write(run)
    record_top1(run, 0.5)
    facts = {"time": 1.5, "epoch": 0.5, "step_s": 0.1, "data_wait_s": 0.1, "loss": 2.5, "lr": 0.1, "images_per_s": 7.0}
    events = [
        {"event": "start", "step": 0, "total_steps": 9, "startup_s": 2.5, "ranks": 1, **facts},
        *({"event": "train", "step": step, **facts} for step in range(1, 8)),
        {"event": "end", "step": 7, "seconds": {"data": 1.5}, "finished": False, "error": None, **facts},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


# ---------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[\[\]{},:]')
_ODD = (
    *(b"-1", b"0", b"0.5", b"1e999", b"-0.0", b"1e308", b"NaN", b"-Infinity", b"null", b"true", b'""', b'"1"', b"[]"),
    *(b"{}", b"[null]", b"2147483648", b"9223372036854775808", b"99999999999999999999", b"1" + b"0" * 400),
    *(b"[" * 100_000, b'{"a":' * 500, b"[[[[[[[[1]]]]]]]]", b'{"a": 1, "a": 2}', b'"\\ud800"', b'"a\\u0000b"'),
    *(b'"../../x"', b'"/dev/zero"', b'"\\u001b[31m\\n"', b'"' + b"x" * 5000 + b'"', b'"\xff"', b'"\\"'),
)


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove, repeat or swap one or two tokens; at times damage bytes."""
    if rng.random() < 0.2:
        return damaged_bytes(content, rng)
    values, marks = _tokens(content)
    changes: dict[tuple[int, int], bytes] = {}
    for _ in range(rng.randint(1, 2)):
        start, end = rng.choice(values if rng.random() < 0.8 else marks)
        other = slice(*rng.choice(values))
        odd = rng.choice(_ODD)
        changes[start, end] = rng.choice([odd, odd, odd, b"", content[other], content[start:end] * 2])
    for (start, end), replacement in sorted(changes.items(), reverse=True):
        content = content[:start] + replacement + content[end:]
    return content


@functools.lru_cache(maxsize=8)
def _tokens(content: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return where names and values are, and where marks between them are."""
    tokens = [(token[0][0], token.span()) for token in _TOKEN.finditer(content)]
    return [span for byte, span in tokens if byte not in b"[]{},:"], [
        span for byte, span in tokens if byte in b"[]{},:"
    ]


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to three of the damages that files meet, and of those that somebody would try."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        # Headers are where readers decide: half of the damages hit the first bytes.
        at = rng.randrange(min(len(data), 600) if rng.random() < 0.5 else len(data)) if data else 0
        size = rng.choice([1, 4, 8, 64, 512])
        match rng.choice(["flip", "flip", "number", "number", "word", "cut", "zeros", "double", "insert", "swap"]):
            case "flip" if data:
                data[at] ^= 1 << rng.randrange(8)
            case "number":
                if numbers := list(re.finditer(rb"\d+", data[at : at + 4096])):
                    start, end = rng.choice(numbers).span()
                    data[at + start : at + end] = rng.choice(_ODD[:20])
            case "word":
                data[at : at + 8] = rng.choice([0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]).to_bytes(
                    8, "little"
                )
            case "cut":
                del data[rng.choice([at, max(0, len(data) - 1)]) :]
            case "zeros":
                data[at : at + size] = bytes(size)
            case "double":
                data[at:at] = data[at : at + size]
            case "insert":
                data[at:at] = rng.randbytes(size)
            case "swap" if data:
                other = rng.randrange(len(data))
                data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    return bytes(data)


class Samples:
    """The samples of one target, copied to `work`, where one file after another is damaged and repaired."""

    def __init__(self, name: str, samples: Path, work: Path) -> None:
        self.name, self.target = name, TARGETS[name]
        directory = self.target.files.partition("/")[0]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(samples / directory, work / directory, symlinks=True)
        files = (path for path in work.glob(self.target.files) if path.is_file() and not path.is_symlink())
        self.files = sorted((path, path.read_bytes()) for path in files)
        self._damaged = self.files[0]
        self._seen: set[int] = set()

    def run(self, seed: int, case: int) -> str:
        """Damage a file, read it unless it was read before, and return what came of it. Undeclared errors pass."""
        rng = random.Random(f"{seed} {self.name} {case}")
        declared: tuple[type[Exception], ...] = (UserError, OSError, *self.target.declared)
        path, content = rng.choice(self.files)
        is_json = path.suffix in (".json", ".jsonl", ".lock")
        damage = self.target.damage or (damaged_json if is_json else damaged_bytes)
        if path != self._damaged[0]:
            self._damaged[0].write_bytes(self._damaged[1])
            self._damaged = path, content
        damaged = damage(content, rng)
        # Small files and short lists of arguments are often damaged in the same way, and readers have no state.
        if (key := hash((path, damaged))) in self._seen:
            return "repeated"
        self._seen.add(key)
        path.write_bytes(damaged)
        try:
            self.target.read(path)
        except declared as error:
            message = str(error)
            assert "\n" not in message and len(message.encode()) < 20_000, f"not one line: {message[:200]!r}"
            return "OSError" if isinstance(error, OSError) else type(error).__name__
        return "accepted"


# ---------------------------------------------------------------------------------------------------------------
# Children
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, tuple[int, str, int]] = field(default_factory=dict)  # by kind: (first case, what, how many)

    def add_fault(self, name: str, case: int, what: str) -> None:
        kind = what.split(": ")[0]  # the error and its place in the code
        if kind not in self.faults:
            print(f"FAULT  {name}, case {case}: {what}", flush=True)
        first, text, count = self.faults.get(kind, (case, what, 0))
        self.faults[kind] = (first, text, count + 1)
        self.outcomes["FAULT"] += 1


def child(name: str, seed: int, cases: range, samples: Path, work: Path, current: mmap.mmap, pipe: Connection) -> None:
    """Run `cases` of one target; `current` has the number of the one that runs, should the process be killed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sampled = Samples(name, samples, work)
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outcomes: Counter[str] = Counter()
    faults = []
    for case in cases:
        current[:8] = case.to_bytes(8, "little")
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        signal.setitimer(signal.ITIMER_PROF, COMPUTE_S)
        try:
            outcomes[sampled.run(seed, case)] += 1
        except BaseException as error:
            frames = []
            trace = error.__traceback__
            while trace is not None:
                frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
                trace = trace.tb_next
            message = " ".join(str(error).split())[:160]
            faults.append((case, f"{type(error).__name__} at {' < '.join(reversed(frames[-4:]))}: {message}"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    pipe.send((outcomes, faults))


def run_batch(name: str, seed: int, cases: range, samples: Path, work: Path, tally: Tally) -> None:
    """Run `cases` in a child, and those after one that kills it in another."""
    context = multiprocessing.get_context("fork")
    current = mmap.mmap(-1, 8)
    while cases:
        receives, sends = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(name, seed, cases, samples, work, current, sends))
        process.start()
        sends.close()
        try:
            outcomes, faults = receives.recv()
            tally.outcomes += outcomes
            for case, what in faults:
                tally.add_fault(name, case, what)
            cases = range(0)
        except EOFError:
            process.join()
            case, status = int.from_bytes(current[:8], "little"), -(process.exitcode or 0)
            hung = status in (signal.SIGALRM, signal.SIGPROF)
            how = (
                f"no end after {COMPUTE_S} s"
                if hung
                else f"ended by {signal.Signals(status).name if status > 0 else status}"
            )
            tally.add_fault(name, case, how)
            tally.outcomes["not counted"] += case - cases.start
            cases = range(case + 1, cases.stop)
        finally:
            process.kill()
            process.join()
            receives.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.0, metavar="N", help="default: %(default)s")
    length.add_argument("--cases", type=int, metavar="N", help="of each target")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*TARGETS, "cheap"],
        default=list(TARGETS),
        metavar="TARGET",
        help=f"cheap: those that take milliseconds a case; or {', '.join(TARGETS)}",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another campaign (default: %(default)s)")
    parser.add_argument("--case", type=int, metavar="N", help="this case of the one target in --only, in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it")
    options = parser.parse_args()
    names = [name for name in TARGETS if name in options.only or ("cheap" in options.only and TARGETS[name].is_cheap)]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        samples, work = Path(directory) / "samples", Path(directory) / "work"
        samples.mkdir()
        make_samples(samples, names)
        gc.freeze()  # what was imported: the children's collections need not look at it, nor copy its pages
        if options.case is not None:
            print(Samples(names[0], samples, work).run(options.seed, options.case))
            return 0
        tallies = {name: Tally() for name in names}
        end = time.monotonic() + 60 * options.minutes
        first, count = 0, CASES if options.cases is None else min(options.cases, 100_000)
        while first < options.cases if options.cases is not None else time.monotonic() < end:
            cases = range(first, min(first + count, options.cases or sys.maxsize))
            for name, tally in tallies.items():
                run_batch(name, options.seed, cases, samples, work, tally)
            first = cases.stop
    columns = "".join(f"{column:>10}" for column in ("cases", "repeated", "accepted", "refused", "faults"))
    print(f"\n{'target':<18}{columns}  kinds")
    for name, tally in tallies.items():
        known = [tally.outcomes[key] for key in ("repeated", "accepted", "FAULT", "not counted")]
        total, (repeated, accepted, faults, _) = tally.outcomes.total(), known
        refused = total - sum(known)
        print(f"{name:<18}{total:>10}{repeated:>10}{accepted:>10}{refused:>10}{faults:>10}  {len(tally.faults)}")
    if options.json:
        results = {
            name: {"outcomes": tally.outcomes, "faults": list(tally.faults.values())} for name, tally in tallies.items()
        }
        options.json.write_text(json.dumps({"seed": options.seed, "targets": results}, indent=1) + "\n")
    return 1 if any(tally.faults for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
