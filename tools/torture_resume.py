#!/usr/bin/env python
"""Kill a run over and over at random moments of its life, start it again each time, and compare it with one left in peace.

    python tools/torture_resume.py --kills 100

Every kill is a SIGKILL to all ranks, in random order: at a random step, or at a random moment of the start, and so
while checkpoints are written, moved and removed. In the end the weights must be equal bit for bit, and the sample
trace must have each image exactly once an epoch. Uses a small dataset of noise that it makes itself.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dali_train import checkpoint
from dali_train.data.indexing import build_index
from dali_train.data.tfrecord import write_records
from dali_train.status import newest_step, read_status

NUM_IMAGES = 50
CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size=32, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_drop_rate=0.1, drop_path_rate=0.1),
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
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: %(default)s)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where to work, kept (default: a temporary directory)")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="torture-"))
    make_dataset(directory / "data")
    # Long enough that most kills fall between the first step and the last: about four steps for each.
    epochs = max(8, 4 * options.kills * 16 // NUM_IMAGES)
    for name in ("undisturbed", "killed"):
        text = CONFIG.format(root=str(directory / "data"), run=str(directory / name), epochs=epochs)
        (directory / f"{name}.py").write_text(text)

    peace = Attempt(directory / "undisturbed.py", options.ranks, directory / "undisturbed.log")
    if (statuses := peace.wait()) != [0] * options.ranks:
        sys.exit(f"the undisturbed run ended with {statuses}: see {directory / 'undisturbed.log'}")
    status = read_status(directory / "undisturbed")
    assert status is not None
    moments = torture(directory, status.step, options.kills, options.ranks, random.Random(options.seed))
    problems = compare(directory / "undisturbed", directory / "killed", status.step)
    print(f"{sum(moments.values())} kills of {options.ranks} ranks in a run of {status.step} steps, {epochs} epochs: " + ", ".join(
        f"{count} {moment}" for moment, count in moments.most_common()
    ))  # fmt: skip
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("every restart went on; final weights equal bit for bit; each image exactly once in every epoch")
    if options.directory is None and not problems:
        shutil.rmtree(directory)
    sys.exit(1 if problems else 0)


def torture(directory: Path, total_steps: int, kills: int, ranks: int, rng: random.Random) -> Counter[str]:
    """Kill and start again, then let the run end. Counts the kills by what the run was doing."""
    run, moments = directory / "killed", Counter[str]()
    # Where in the run's life: a step, or (a quarter of them) a moment of the start-up before it.
    steps = sorted(rng.randrange(total_steps) for _ in range(kills))
    for step in steps:
        attempt = Attempt(directory / "killed.py", ranks, directory / "killed.log")
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
            if statuses != [0] * ranks:  # it may have come to its end, but never to another
                sys.exit(f"an attempt ended with {statuses} by itself: see {directory / 'killed.log'}")
            moments["after the end"] += 1
            continue
        writing = any((run / "checkpoints").glob(".*.partial")) or any((run / "checkpoints").glob(".*.removed"))
        attempt.kill(rng)
        progressed = (newest_step(run) or 0) > before
        moments["while a checkpoint was written" if writing else "between" if progressed else "before the first save"] += 1
        print(f"killed {time.monotonic() - started:.2f} s after its start at step {newest_step(run) or 0}", flush=True)
    statuses = Attempt(directory / "killed.py", ranks, directory / "killed.log").wait()
    if statuses != [0] * ranks:
        sys.exit(f"the last attempt ended with {statuses}: see {directory / 'killed.log'}")
    return moments


def compare(undisturbed: Path, killed: Path, total_steps: int) -> list[str]:
    """What is not as it must be."""
    problems = []
    (a, warnings), (b, more) = (checkpoint.newest(run / "checkpoints") for run in (undisturbed, killed))
    if a is None or b is None or a.step != total_steps or b.step != total_steps or warnings or more:
        return [f"last checkpoints: {a and a.path} and {b and b.path}, expected step {total_steps}; {warnings} {more}"]
    for section, tensors in a.state.items():
        problems += [
            f"{section} {name} differs" for name, tensor in tensors.items() if not torch.equal(tensor, b.state[section][name])
        ]
    lines = [json.loads(line) for path in killed.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()]
    traced = Counter((line["step"], line["k"]) for line in lines)
    if set(traced.values()) != {1} or len(traced) != total_steps * 4:
        problems.append(f"the trace has {len(lines)} lines for {total_steps * 4} micro-batches")
    lines.sort(key=lambda line: (line["step"], line["k"]))
    stream = [image for line in lines for image in line["images"]]
    for start in range(0, len(stream) - NUM_IMAGES + 1, NUM_IMAGES):
        if sorted(stream[start : start + NUM_IMAGES]) != list(range(NUM_IMAGES)):
            problems.append(f"epoch {start // NUM_IMAGES} does not have each image once")
    if "warning" in (killed.parent / "killed.log").read_text():
        problems.append("a checkpoint was passed over: see killed.log")
    return problems


def make_dataset(root: Path) -> None:
    rng = np.random.default_rng(0)
    records = []
    for number in range(NUM_IMAGES):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, size=(40, 48, 3), dtype=np.uint8)).save(buffer, "JPEG")
        records.append((buffer.getvalue(), {"image/class/label": 1 + number % 5}))
    write_records(root / "train" / "train-00000-of-00001", records)
    build_index(root)


class Attempt:
    """All ranks of one start, forked from a server that has imported everything: a start takes a second, not ten."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["dali_train.train", "dali_train.cli"])

    def __init__(self, config: Path, ranks: int, log: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = str(listener.getsockname()[1])
        self._processes = []
        for rank in range(ranks):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            process = self._context.Process(target=run_rank, args=(config, environment, log))
            process.start()
            self._processes.append(process)

    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self, rng: random.Random) -> None:
        for process in rng.sample(self._processes, len(self._processes)):
            process.kill()
        self.wait()

    def wait(self) -> list[int | None]:
        for process in self._processes:
            process.join()
        return [process.exitcode for process in self._processes]


def run_rank(config: Path, environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from dali_train.cli import main

    sys.exit(main(["train", "--config", str(config)]))


if __name__ == "__main__":
    main()
