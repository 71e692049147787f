"""How long a run takes to its first optimizer step, against what importing torch, timm and DALI costs.

    python -m tools.bench.startup

Writes a synthetic dataset of ImageNet's size into a temporary directory: an index of 1,281,167 training images in 1,024
shards and 50,000 validation images in 128; all shards are hard links to one small TFRecord file of generated JPEGs.
Then starts in turn a Python that imports torch, timm and DALI and nothing else, and `python -m dali_train train` with a
tiny ViT at 32 pixels (--model: with all weights of another). Both are timed from just before their process is started:
the imports until the last one is done, the trainer until the loss of its first optimizer step is read. The first round
warms
up: after it files are in the page cache.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from dali_train.data.dataset.manifest import SplitName
from dali_train.data.dataset.write_index import IndexedShard, index_shard, write_index
from tools.bench.generated import write_shard
from tools.bench.turns import Spread, describe_machine, parser_of, write_lines

REPOSITORY = Path(__file__).parent.parent.parent
# ImageNet-1k (Russakovsky et al., arXiv 1409.0575) in its usual TFRecords: images, shards.
FULL_SIZE: dict[SplitName, tuple[int, int]] = {"train": (1_281_167, 1024), "validation": (50_000, 128)}
NUM_CLASSES, NUM_FILES = 1000, 64  # files: different JPEGs
GOAL = 1.5
IMPORTS = "import torch, timm, nvidia.dali; import time; print(time.monotonic())"

# time.monotonic is one clock for all processes of a host.
CONFIG = """
import time

from dali_train.config import *

loaded = time.monotonic()


def first_step():
    from dali_train.hooks import Hook

    class FirstStep(Hook):
        def start(self, record):
            self.startup_s, self.started = record.startup_s, time.monotonic()

        def step(self, record):
            done = time.monotonic()
            begun = self.started - self.startup_s
            print("PARTS", loaded, begun, self.started, done, flush=True)

    return FirstStep()


config = Config(
    data=DataConfig(root={root!r}, train_size=32, eval_resize_to=36, eval_size=32),
    model=ModelConfig(name={model!r}, kwargs=dict(img_size=32, **{kwargs!r})),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=32, micro_batch=32),
    run=RunConfig(dir="run", epochs=90),
    hooks=HooksConfig(log_every_steps=1, user=(first_step,)),
)
"""
TINY = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
PARTS = ("interpreter, command, config", "imports", "building", "first step")


def main() -> None:
    parser = parser_of(__doc__, "--rounds", "--json")
    parser.add_argument(
        "--model", metavar="NAME", help="another ViT of timm's, at 32 pixels: all its weights have to be drawn"
    )
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as work:
        write_dataset_of_full_size(Path(work) / "dataset")
        rounds = measure(Path(work), options.rounds, options.model)
    print_table(rounds)
    if options.json:
        write_lines(options.json, rounds)
    print(
        f"\ncommand to first optimizer step: {ratio(rounds):.2f} x importing torch, timm and DALI (goal: at most "
        f"{GOAL})"
    )


def write_dataset_of_full_size(root: Path) -> None:
    """Write an index of ImageNet's size over a few images, repeated."""
    stored = root / "images"
    write_shard(stored, range(NUM_FILES), num_classes=NUM_CLASSES)
    part = index_shard(stored, check_crc=False)
    part.rows["label"] = part.labels - 1
    indexed: dict[SplitName, list[IndexedShard]] = {}
    for split, (num_images, num_shards) in FULL_SIZE.items():
        (root / split).mkdir()
        indexed[split] = []
        for number, images in enumerate(np.array_split(np.arange(num_images), num_shards)):
            shard = replace(part.shard, name=f"{split}-{number:05d}-of-{num_shards:05d}", num_records=len(images))
            os.link(stored, root / split / shard.name)
            indexed[split].append(replace(part, shard=shard, rows=part.rows[images % len(part.rows)], checksums=None))
    write_index(root, indexed, label_base=1, class_names=[f"class {n}" for n in range(NUM_CLASSES)], conversion={})


def measure(work: Path, num_rounds: int, model: str | None = None) -> list[dict[str, float]]:
    """Seconds, a line per round: "torch, timm, DALI", "first step in all", and the parts of the latter."""
    rounds = []
    config = work / "config.py"
    name, kwargs = (model, {}) if model is not None else ("vit_tiny_patch16_224", TINY)
    config.write_text(CONFIG.format(root=str(work / "dataset"), model=name, kwargs=kwargs))
    for number in range(num_rounds + 1):
        seconds = {"torch, timm, DALI": import_seconds(), **first_step_seconds(work / f"run-{number}", config)}
        if number:
            rounds.append(seconds)
        print(f"  round {number} of {num_rounds}", file=sys.stderr, flush=True)
    return rounds


def import_seconds() -> float:
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) - begin


def first_step_seconds(run: Path, config: Path) -> dict[str, float]:
    with run.with_suffix(".log").open("w+") as log:
        begin = time.monotonic()
        trainer = subprocess.Popen(
            [sys.executable, "-m", "dali_train", "train", "--config", str(config), "--run.dir", str(run)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line.startswith("PARTS"):
                break
        else:
            log.seek(0)
            sys.exit(f"the trainer ended with status {trainer.wait()} before its first step:\n{log.read()}")
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    borders = [begin, *map(float, line.split()[1:])]
    parts = dict(zip(PARTS, np.diff(borders).tolist(), strict=True))
    return {"first step in all": borders[-1] - begin, **parts}


def ratio(rounds: list[dict[str, float]]) -> float:
    return statistics.median(r["first step in all"] for r in rounds) / statistics.median(
        r["torch, timm, DALI"] for r in rounds
    )


def print_table(rounds: list[dict[str, float]]) -> None:
    print(f"\n{'seconds':<32}{'median':>8}{'low':>8}{'high':>8}")
    for name in rounds[0]:
        spread = Spread.of(seconds[name] for seconds in rounds)
        indent = "  " if name in PARTS else ""
        print(f"{indent + name:<32}{spread.median:>8.2f}{spread.low:>8.2f}{spread.high:>8.2f}")


if __name__ == "__main__":
    main()
