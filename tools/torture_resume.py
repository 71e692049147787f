#!/usr/bin/env python
"""Kill a run over and over at random moments of its life, start it again each time, and compare it with an undisturbed
one.

    python tools/torture_resume.py --kills 200
    python tools/torture_resume.py --kills 200 --ranks 2,1,4 --shuffle block
    python tools/torture_resume.py --kills 100 --ranks 2,1,4 --remote

Most kills are a SIGKILL to all ranks, in random order: at a random step, or at a random moment of the start, and so
while checkpoints are written, moved and removed. Before some, one rank is frozen for a while (SIGSTOP), so that the
others get ahead of it. Some starts meet a full disk instead: checkpoints do not fit any more, and the run must end by
itself. In the end the sample trace must have each image exactly once per epoch, and the weights must be equal bit for
bit to those of a run without kills, on the same number of ranks at each step, and `prove` must agree with it. Uses a
small dataset of noise that it makes itself.

With --remote the run that is killed reads the dataset from an object store through a cache of a fifth of it, the other
one from the disk. Now and then the store is frozen for a while, or a byte of a cached image is changed. After each kill
there may be nothing but images in the cache; those that are incomplete or changed are counted.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c
from PIL import Image

from dali_train.checkpoint.format import load_newest
from dali_train.commands.prove import prove
from dali_train.config import load_config
from dali_train.data.dataset.build_index import build_index
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.tfrecord import write_records
from dali_train.runtime.status import newest_step

NUM_IMAGES = 50
CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(
        root={root!r}, train_size=32, eval_resize_to=36, eval_size=32, num_threads=1,
        shuffle={shuffle!r}, block_images=4, window_blocks=3, {cache}
    ),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs=dict(
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_drop_rate=0.1, drop_path_rate=0.1
        ),
    ),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=16, micro_batch=4),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir={run!r}, epochs={epochs}, checkpoint_every_steps=1, device="cpu"),
    hooks=HooksConfig(trace_samples=True),
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[2],
        metavar="N[,N...]",
        help="of the run, chosen anew for each start if there are several (default: 2)",
    )
    parser.add_argument(
        "--shuffle", default="full", choices=("full", "block", "none"), help="order (default: %(default)s)"
    )
    parser.add_argument("--remote", action="store_true", help="read from an object store, through a cache")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to work, kept (default: a temporary directory)"
    )
    options = parser.parse_args()
    Attempt.context.set_forkserver_preload(["dali_train.commands.train", "dali_train.cli"])
    directory = options.directory or Path(tempfile.mkdtemp(prefix="torture-"))
    make_dataset(directory / "data")
    # Long enough that most kills fall between the first step and the last: about four steps for each.
    epochs = max(8, 4 * options.kills * 16 // NUM_IMAGES)
    store = Store(directory) if options.remote else None
    for name, roots in (
        ("undisturbed", {"root": str(directory / "data"), "cache": ""}),
        ("killed", store.settings() if store is not None else {"root": str(directory / "data"), "cache": ""}),
    ):
        text = CONFIG.format(run=str(directory / name), epochs=epochs, shuffle=options.shuffle, **roots)
        (directory / f"{name}.py").write_text(text)

    total_steps = load_config(directory / "undisturbed.py").steps(epochs, NUM_IMAGES)
    moments, starts = torture(directory, total_steps, options.kills, options.ranks, random.Random(options.seed), store)
    if store is not None:
        print("the store: " + store.close(), flush=True)
    for begin, end, num_ranks in layouts(starts, total_steps):
        print(f"undisturbed: steps {begin} to {end} on {num_ranks} ranks", flush=True)
        words = ["--run.max_steps", str(end)]
        statuses = Attempt(directory / "undisturbed.py", num_ranks, directory / "undisturbed.log", words).wait()
        if set(statuses) != {0}:
            sys.exit(f"the undisturbed run ended with {statuses}: see {directory / 'undisturbed.log'}")
    problems = compare(directory / "undisturbed", directory / "killed", total_steps)
    if not prove(directory / "killed", dataset=str(directory / "data"), all_draws=True):
        problems.append("the killed run's record is not that of its recipe")
    ranks = " or ".join(map(str, options.ranks))
    print(
        f"{sum(moments.values())} kills of {ranks} ranks in a run of {total_steps} steps, {epochs} epochs: "
        + ", ".join(f"{count} {moment}" for moment, count in moments.most_common())
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("every restart resumed; final weights equal bit for bit; each image exactly once in every epoch")
    if options.directory is None and not problems:
        shutil.rmtree(directory)
    sys.exit(1 if problems else 0)


def torture(
    directory: Path, total_steps: int, kills: int, ranks: list[int], rng: random.Random, store: "Store | None"
) -> tuple[Counter[str], list[tuple[int, int]]]:
    """Kill and start again, then let the run end.

    Returns:
        The kills, counted by what the run was doing, and of each start the step it began with and its number of ranks.
    """
    run, log, moments, starts = directory / "killed", directory / "killed.log", Counter[str](), list[tuple[int, int]]()

    def start() -> Attempt:
        starts.append((newest_step(run) or 0, rng.choice(ranks)))
        return Attempt(directory / "killed.py", starts[-1][1], log)

    # Where in the run's life: a step, or (a quarter of them) a moment of the start-up before it.
    steps = sorted(rng.randrange(total_steps) for _ in range(kills))
    for step in steps:
        attempt = start()
        started = time.monotonic()
        at_start = rng.random() < 0.25
        delay = rng.uniform(0, 1.5) if at_start else rng.uniform(0, 0.1)
        before = newest_step(run) or 0
        target = max(step, before + 1)
        while not at_start and (newest_step(run) or 0) < target and attempt.running():
            time.sleep(0.001)
        time.sleep(delay)
        if not attempt.running():
            statuses = attempt.wait()
            if set(statuses) != {0}:  # it may have come to its end, but never to another
                sys.exit(f"an attempt ended with {statuses} before it was killed: see {log}")
            moments["after the end"] += 1
            continue
        event = rng.choices(("kill", "freeze", "full disk"), (6, 1, 1))[0]
        saved = sum(path.stat().st_size for path in run.glob("checkpoints/newest/*.safetensors"))
        if event == "full disk" and saved and not at_start:
            attempt.limit_files(saved // attempt.num_ranks - 1)  # the largest of as many files is larger
            statuses = attempt.wait(timeout=120)
            if 0 in statuses or None in statuses:
                sys.exit(f"with a full disk, an attempt ended with {statuses} (None: not at all): see {log}")
            moments["on a full disk"] += 1
        else:
            if event == "freeze":
                attempt.freeze(rng)
                time.sleep(rng.uniform(0, 1))
            if store is not None:
                store.disturb(rng)
            writing = any((run / "checkpoints").glob(".*.partial")) or any((run / "checkpoints").glob(".*.removed"))
            attempt.kill(rng)
            if store is not None:
                store.check()
            progressed = (newest_step(run) or 0) > before
            if event == "freeze":
                moments["with a frozen rank"] += 1
            else:
                moments[
                    "while a checkpoint was written"
                    if writing
                    else "between"
                    if progressed
                    else "before the first save"
                ] += 1
        print(f"{event} {time.monotonic() - started:.2f} s after its start at step {newest_step(run) or 0}", flush=True)
    statuses = start().wait()
    if set(statuses) != {0}:
        sys.exit(f"the last attempt ended with {statuses}: see {log}")
    return moments, starts


def layouts(starts: list[tuple[int, int]], total_steps: int) -> list[tuple[int, int, int]]:
    """On how many ranks the steps were made that count: (after this step, up to this step, ranks), as few as
    possible."""
    merged: list[tuple[int, int, int]] = []
    ends = [begin for begin, _ in starts[1:]] + [total_steps]
    for (begin, ranks), end in zip(starts, ends, strict=True):
        if merged and merged[-1][2] == ranks:
            merged[-1] = (merged[-1][0], end, ranks)
        elif begin < end:
            merged.append((begin, end, ranks))
    return merged


def compare(undisturbed: Path, killed: Path, total_steps: int, *, bound: float = 0.0) -> list[str]:
    """What is not as it must be. Weights may differ by `bound`, relative to the largest of a tensor."""
    problems = []
    (a, warnings), (b, more) = (load_newest(run / "checkpoints") for run in (undisturbed, killed))
    if a is None or b is None or a.step != total_steps or b.step != total_steps or warnings or more:
        return [f"last checkpoints: {a and a.path} and {b and b.path}, expected step {total_steps}; {warnings} {more}"]
    for section, tensors in a.state.items():
        for name, tensor in tensors.items():
            difference = float((tensor - b.state[section][name]).abs().max() / tensor.abs().max().clamp(min=1e-300))
            if not difference <= bound:
                problems.append(f"{section} {name} differs by {difference:.2g}")
    lines = [json.loads(line) for path in killed.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()]
    traced = Counter((line["step"], line["k"]) for line in lines)
    if set(traced.values()) != {1} or len(traced) != total_steps * 4:
        problems.append(f"the trace has {len(lines)} lines for {total_steps * 4} micro-batches")
    lines.sort(key=lambda line: (line["step"], line["k"]))
    stream = [image for line in lines for image in line["images"]]
    for start in range(0, len(stream) - NUM_IMAGES + 1, NUM_IMAGES):
        if sorted(stream[start : start + NUM_IMAGES]) != list(range(NUM_IMAGES)):
            problems.append(f"epoch {start // NUM_IMAGES} does not have each image once")
    if re.search("resuming from .* instead", (killed.parent / "killed.log").read_text()):
        problems.append("a checkpoint was skipped: see killed.log")
    return problems


def make_dataset(root: Path) -> None:
    rng = np.random.default_rng(0)
    records = []
    for number in range(NUM_IMAGES):
        buffer = io.BytesIO()
        label = number % 5  # the brighter the image, so that there is something to learn
        Image.fromarray(rng.integers(25 * label, 156 + 25 * label, size=(40, 48, 3), dtype=np.uint8)).save(
            buffer, "JPEG"
        )
        records.append((buffer.getvalue(), {"image/class/label": 1 + label}))
    write_records(root / "train" / "train-00000-of-00001", records)
    build_index(root)


class Store:
    """A server of the dataset, and the cache of the run that reads from it."""

    LIMIT = 10 * 4096  # a fifth of the images, each of which takes a block of the disk

    def __init__(self, directory: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(directory / "metadata")
        script = Path(__file__).parents[1] / "tests" / "object_server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(script), str(directory / "data")], stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        self._url = self._server.stdout.readline().strip()
        self._cache = directory / "cache"
        self._checksums = Split(directory / "data", "train").checksums
        self._disturbed = Counter[str]()

    def settings(self) -> dict[str, str]:
        return {"root": self._url, "cache": f"cache={str(self._cache)!r}, cache_gb={self.LIMIT / 1e9}"}

    def files(self) -> list[Path]:
        return [path for path in self._cache.glob("user-*/train-*/*/*") if path.is_file()]

    def disturb(self, rng: random.Random) -> None:
        """Freeze the server for a while, or change a byte of a cached image, or neither."""
        event = rng.choice(("freeze", "byte", ""))
        if event == "freeze":
            self._server.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0, 1))
            self._server.send_signal(signal.SIGCONT)
            self._disturbed["times frozen"] += 1
        if event == "byte" and (files := self.files()):
            path = rng.choice(files)
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                content = bytearray(path.read_bytes())
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                path.write_bytes(content)
                self._disturbed["bytes changed in the cache"] += 1

    def check(self) -> None:
        """Compare the cache with the index, and end the program if there is something else in it."""
        assert self._checksums is not None
        files = self.files()
        if others := [path for path in files if not path.name.isdecimal()]:
            sys.exit(f"in the cache is no image: {others}")
        wrong = [path for path in files if crc32c(path.read_bytes()) != self._checksums[int(path.name)]]
        self._disturbed["incomplete or changed images found"] += len(wrong)

    def close(self) -> str:
        """End the server; return what was done to it and found."""
        self._server.kill()
        return ", ".join(f"{count} {what}" for what, count in self._disturbed.items())


class Attempt:
    """All ranks of one start, forked from a server that has imported everything: a start takes a second, not ten."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, config: Path, ranks: int, log: Path, words: Sequence[str] = ()) -> None:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = str(listener.getsockname()[1])
        self.num_ranks = ranks
        self._processes = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            process = self.context.Process(target=run_rank, args=(config, words, environment, log))
            process.start()
            self._processes.append(process)
        self._pids = [process.pid for process in self._processes if process.pid is not None]

    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self, rng: random.Random) -> None:
        for process in rng.sample(self._processes, len(self._processes)):
            process.kill()
        self.wait()

    def freeze(self, rng: random.Random) -> None:
        os.kill(rng.choice(self._pids), signal.SIGSTOP)

    def limit_files(self, num_bytes: int) -> None:
        """Let no rank write a larger file from now on, as if the disk were full."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def wait(self, timeout: float | None = None) -> list[int | None]:
        for process in self._processes:
            process.join(timeout)
        return [process.exitcode for process in self._processes]


def run_rank(config: Path, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from dali_train.cli import main

    sys.exit(main(["train", "--config", str(config), *words]))


if __name__ == "__main__":
    main()
