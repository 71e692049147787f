"""airbench94 on CIFAR-10: examples/airbench seed after seed and, on a GPU, the published program on the same images.

    python -m tools.bench.airbench cifar10-jpeg.tar.gz --work DIR --program legacy/airbench94.py --seeds 10

The archive has images in train/CLASS/ and test/CLASS/; they are stored as raw pixels. Several runs of ours share the
GPU, since one leaves it idle most of the time: seconds of a run are no measure of its speed.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.bench.turns import REPOSITORY, describe_machine, python_environment, write_lines

SEED = re.compile(r"^seed \d+: ([\d.]+)%", re.MULTILINE)
# The published main() returns one run's accuracy with six views; its own loop has 25 runs.
PUBLISHED = """
import sys, airbench94
airbench94.main("warmup")
for seed in range(int(sys.argv[1])):
    airbench94.torch.manual_seed(seed)
    print(f"seed {seed}: {airbench94.main(seed):.2%}", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--program", type=Path, metavar="FILE", help="airbench94.py of KellerJordan/cifar10-airbench")
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="runs of ours at once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--images", type=int, metavar="N", help="as few, of which a run has few steps: a rehearsal")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    images = options.work / "images"
    if not images.exists():
        extract(options.archive, images, options.images)
    programs = {"dali_train": ours}
    if options.program is not None and options.device == "cuda":
        programs = {"published program": published, **programs}
    lines = []
    for name, program in programs.items():
        reached = program(options, images)
        error = f" +- {stdev(reached) / len(reached) ** 0.5:.2f}" if len(reached) > 1 else ""
        print(f"{name}: {mean(reached):.2f}{error} %, n = {len(reached)}, six views: {reached}", flush=True)
        lines.append({"contender": name, "top1": reached})
        if options.json:
            write_lines(options.json, lines)


def extract(archive: Path, images: Path, most: int | None) -> None:
    """Extract all images, or about `most`, evenly spaced."""
    with tarfile.open(archive) as file:
        members = [member for member in file if member.isfile()]
        step = 1 if most is None else len(members) // most
        file.extractall(images, members[::step], filter="data")


def ours(options: argparse.Namespace, images: Path) -> list[float]:
    """Return the accuracies of our runs, in percent."""
    begin, dataset = time.monotonic(), options.work / "dataset"
    if not (dataset / "dataset.json").exists():
        words = ["--train", str(images / "train"), "--validation", str(images / "test"), "--format", "raw"]
        run(["-m", "dali_train", "data", "convert", "folder", *words, "--out", str(dataset)])
    print(f"converted after {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    borders = [options.seeds * number // options.side_by_side for number in range(options.side_by_side + 1)]
    shares = [range(*pair) for pair in pairwise(borders) if pair[0] < pair[1]]
    dtype = "bf16" if options.device == "cuda" else "fp32"  # many processors are slower in bf16

    def of(seeds: range) -> list[float]:
        words = ["--dataset", str(dataset), "--out", str(options.work / f"ours-{seeds[0]}"), "--dtype", dtype]
        words += ["--first-seed", str(seeds[0]), "--seeds", str(len(seeds))]
        return accuracies(run([str(REPOSITORY / "examples" / "airbench" / "airbench94.py"), *words]))

    with ThreadPoolExecutor(len(shares)) as pool:
        reached = [one for several in pool.map(of, shares) for one in several]
    print(f"ours took {time.monotonic() - begin:.0f} s", flush=True)
    return reached


def published(options: argparse.Namespace, images: Path) -> list[float]:
    """Return the accuracies of the published program, in percent. It reads tensors, in any order of the images."""
    folder = options.work / "published"
    (folder / "cifar10").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        paths = sorted((images / split).glob("*/*"))
        classes = sorted({path.parent.name for path in paths})
        # It makes its whitening filters of the first 5,000 images, so these are of all classes.
        paths = [paths[number] for number in np.random.default_rng(0).permutation(len(paths))]
        with ThreadPoolExecutor() as pool:
            pixels = np.stack(list(pool.map(lambda path: np.asarray(Image.open(path).convert("RGB")), paths)))
        labels = torch.tensor([classes.index(path.parent.name) for path in paths])
        tensors = {"images": torch.from_numpy(pixels), "labels": labels, "classes": classes}
        torch.save(tensors, folder / "cifar10" / f"{split}.pt")
    (folder / "airbench94.py").write_bytes(options.program.read_bytes())
    begin = time.monotonic()
    output = run(["-c", PUBLISHED, str(options.seeds)], cwd=folder)  # which is on the path of its modules
    print(f"the published program took {time.monotonic() - begin:.0f} s", flush=True)
    return accuracies(output)


def run(words: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run Python in the folder `cwd`, and return what it printed; how each seed ended is printed as it comes."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *words], env=python_environment(), cwd=cwd, **pipes)
    output = ""
    for line in process.stdout or ():
        output += line
        if SEED.match(line) or line.startswith("finished at step"):
            print(line, end="", flush=True)
    if process.wait() != 0:
        sys.exit(f"{' '.join(words)[-200:]} ended with {process.returncode}\n{output[-3000:]}")
    return output


def accuracies(output: str) -> list[float]:
    return [float(value) for value in SEED.findall(output)]


if __name__ == "__main__":
    main()
