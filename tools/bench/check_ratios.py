"""Has anything become much slower? Compares ratios of things measured in turn, never times, since machines differ.

    make check-ratios

On generated images, in about two minutes on two cores: the data path against torchvision's loader and bare
libjpeg-turbo (where they are installed), raw records against JPEGs, the trainer on synthetic data against a bare loop,
real against synthetic data, and the time to the first optimizer step against the imports. Each bound lies far from what
was measured, so that a busy machine passes; the benchmarks themselves say how it really stands. Ends with status 1 if a
ratio is beyond its bound.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dali_train import cli
from tools.bench import compute, data, loops, startup
from tools.bench.generated import write_dataset
from tools.bench.peers import Task, export
from tools.bench.turns import describe_machine, take_turns

ROUNDS = 3

CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size=112),
    model=ModelConfig(name="vit_tiny_patch16_224", kwargs=dict(img_size=112)),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(warmup_epochs=0),
    batch=BatchConfig(global_batch=16, micro_batch=8),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="run", epochs=1),
)
"""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Of a ratio. `usual` is what two cores of an AMD EPYC gave when the bound was set."""

    name: str
    usual: float
    least: float = 0.0
    most: float = float("inf")

    def holds(self, ratio: float) -> bool:
        return self.least <= ratio <= self.most


TORCHVISION = Bound(name="data path / torchvision's PIL loader, images/s", usual=2.6, least=1.8)
RANDAUGMENT = Bound(name="data path / torchvision's PIL loader, RandAugment, images/s", usual=2.3, least=1.5)
LIBJPEG = Bound(name="data path / libjpeg-turbo alone, images/s", usual=1.05, least=0.7)
RAW = Bound(name="data path, raw records / JPEGs, images/s", usual=3.0, least=2.0)
BARE = Bound(name="trainer on synthetic data / bare loop, steps/s", usual=0.96, least=0.6)
REAL = Bound(name="trainer on real / on synthetic data, steps/s", usual=0.94, least=0.55)
STARTUP = Bound(name="first optimizer step / importing torch, timm, DALI, seconds", usual=1.15, most=2.2)

Measured = tuple[Bound, float]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="check-ratios-") as directory:
        work = Path(directory)
        write_dataset(work / "dataset", num_train=200)
        measured = [*data_ratios(work), *step_ratios(work), *startup_ratios(work)]
    return report(measured)


def data_ratios(work: Path) -> Iterator[Measured]:
    task = Task(dataset=work / "dataset", work=work, batch=32, threads=2)
    export(task)
    ours, pil, libjpeg = "dali_train", "torchvision PIL", "libjpeg-turbo alone"
    augmented, augmented_pil = f"RandAugment {ours}", f"RandAugment peer {pil}"
    rates = image_rates(task, [ours, pil, libjpeg, augmented, augmented_pil])
    pairs = (TORCHVISION, ours, pil), (RANDAUGMENT, augmented, augmented_pil), (LIBJPEG, ours, libjpeg)
    for bound, name, peer in pairs:
        if peer in rates:
            yield bound, rates[name] / rates[peer]
    raw = ["--train", str(task.files), "--format", "raw", "--short-side", "256", "--out", str(work / "raw")]
    cli.main(["data", "convert", "folder", *raw])
    yield RAW, image_rates(replace(task, dataset=work / "raw"), [ours])[ours] / rates[ours]


def image_rates(task: Task, names: Sequence[str]) -> dict[str, float]:
    """Return the images/s of the contenders of these names that can run here."""
    answers = take_turns(names, data.contend, (task,), [12] * (1 + ROUNDS))
    return {name: median(result.images_per_second for result in results) for name, results in answers.items()}


def step_ratios(work: Path) -> Iterator[Measured]:
    config = work / "config.py"
    config.write_text(CONFIG.format(root=str(work / "dataset")))
    task = loops.Task(config, [], work, steps=2)
    names = [compute.REAL, compute.SYNTHETIC, compute.BARE]
    answers = take_turns(names, loops.contend, (task,), [False] * (1 + ROUNDS))
    seconds = {name: median(result.step_s for result in results) for name, results in answers.items()}
    yield BARE, seconds[compute.BARE] / seconds[compute.SYNTHETIC]
    yield REAL, seconds[compute.SYNTHETIC] / seconds[compute.REAL]


def startup_ratios(work: Path) -> Iterator[Measured]:
    startup.write_dataset_of_full_size(work / "startup" / "dataset")
    yield STARTUP, startup.ratio(startup.measure(work / "startup", 1))


def report(measured: Iterable[Measured]) -> int:
    """Print the table and return the exit status."""
    beyond = []
    print(f"\n{'ratio':<62}{'measured':>9}{'usual':>8}{'bound':>15}")
    for bound, ratio in measured:
        limit = f"at least {bound.least:.2f}" if bound.least else f"at most {bound.most:.2f}"
        print(f"{bound.name:<62}{ratio:>9.2f}{bound.usual:>8.2f}{limit:>15}{'' if bound.holds(ratio) else '  BEYOND'}")
        if not bound.holds(ratio):
            beyond.append(bound.name)
    if beyond:
        print(
            f"\n{len(beyond)} beyond the bound: {'; '.join(beyond)}. Run it again when nothing else runs; then look "
            "with"
        )
        print("tools/bench_data.py, tools/bench_step.py or python -m tools.bench.startup at where the time went")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
