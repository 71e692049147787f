"""Compare optimizers at several batch sizes, with the same budget of tuning for each.

    dali-train data convert folder --train cifar/train --validation-fraction 0.1 --format raw --out data/cifar-tuning
    dali-train data convert folder --train cifar/train --validation cifar/test --format raw --out data/cifar
    python -m tools.compare_optimizers runs/optimizers --tuning data/cifar-tuning --final data/cifar

For each optimizer and batch, every one of --factors times a rate of the optimizer's is tried with seed 0, on the
dataset --tuning, whose validation images are a part of the training images. The rate with the best top-1 there trains
--seeds seeds on the dataset --final, whose test images choose nothing. Rates grow with the root of the batch; all else
is that of --config, and all optimizers see the same images, crops and flips, so their runs are pairs, and are compared
as `dali-train compare` does it. Start the same command again to continue: finished runs are read, and one that was
interrupted resumes. At the end it prints a table and draws the curves.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.config import Config, load_config
from dali_train.extras.compare.pairs import Difference, trained_accuracy

# A peak rate at a batch of 512 that --factors surround, and what else an optimizer needs; the same betas where it has
# two.
OPTIMIZERS: dict[str, dict[str, object]] = {
    "lamb": {"lr": 1.2e-2, "betas": (0.9, 0.95), "eps": 1e-6},
    "lars": {"lr": 2.0, "kwargs": {"momentum": 0.9, "nesterov": False}},
    "adamw": {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8},
    "muon": {"lr": 1.5e-2},
}
BASE_BATCH = 512


@dataclass(frozen=True)
class Point:
    """One run."""

    optimizer: str
    batch: int
    factor: float  # of the optimizer's rate in OPTIMIZERS
    seed: int
    tunes: bool

    @property
    def rate(self) -> float:
        rate = OPTIMIZERS[self.optimizer]["lr"]
        assert isinstance(rate, float)
        return float(f"{rate * self.factor * (self.batch / BASE_BATCH) ** 0.5:.3g}")

    @property
    def name(self) -> str:
        kind = "tuning" if self.tunes else f"seed-{self.seed}"
        return f"{self.optimizer}-{self.batch}-{self.rate:g}-{kind}"


class Comparison:
    """The runs of a grid in one directory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._base = load_config(options.config)

    def config(self, point: Point) -> Config:
        options = self._options
        settings = {"name": point.optimizer, **OPTIMIZERS[point.optimizer], "lr": point.rate}
        defaults = {"betas": (0.9, 0.999), "eps": 1e-6, "kwargs": {}}  # not those of --config's optimizer
        return self._base.replace(
            data={"root": str(options.tuning if point.tunes else options.final), "seed": point.seed},
            optimizer={**defaults, **settings},
            batch={"global_batch": point.batch, "micro_batch": min(options.micro_batch, point.batch)},
            model={"init": "portable"},
            run={
                "dir": str(self._options.directory / point.name),
                "epochs": options.tuning_epochs if point.tunes else options.epochs,
                "eval_every_epochs": None if point.tunes else options.epochs / 10,
                "keep_checkpoints": 1,
            },
            schedule={"warmup_epochs": options.epochs * 0.1},
            hooks={"predictions": 0, "log_every_steps": 4},
        )

    def top1(self, point: Point) -> float:
        """Return the accuracy at the end of a run, a fraction, which is trained unless it has finished."""
        top1 = trained_accuracy(self.config(point))
        if top1 is None:
            sys.exit(f"{point.name} was stopped: start the same command again to continue")
        return top1

    def tuning(self, optimizer: str, batch: int) -> list[Point]:
        return [Point(optimizer, batch, factor, 0, tunes=True) for factor in sorted(self._options.factors)]

    def final(self, optimizer: str, batch: int) -> list[Point]:
        """Return the runs at the best rate."""
        factor = max(self.tuning(optimizer, batch), key=self.top1).factor
        return [Point(optimizer, batch, factor, seed, tunes=False) for seed in range(self._options.seeds)]

    def table(self) -> list[str]:
        """Return the lines of a table: the tuned rates with their accuracies, the final accuracy, and how far it is
        from the best optimizer's of the batch, with the standard error of the pairs."""
        lines = [
            "| batch | optimizer | rates: top-1 of the held-out images | rate | test top-1 | from the best | n |",
            "|---|---|---|---|---|---|---|",
        ]
        factors = self._options.factors
        for batch in self._options.batches:
            finals = {name: self.final(name, batch) for name in self._options.optimizers}
            top1s = {name: [self.top1(point) for point in points] for name, points in finals.items()}
            means = {name: statistics.mean(values) for name, values in top1s.items()}
            best = max(means, key=means.__getitem__)
            for name, (first, *_) in finals.items():
                tried = ", ".join(f"{point.rate:g}: {self.top1(point):.2%}" for point in self.tuning(name, batch))
                is_at_edge = first.factor in (min(factors), max(factors)) and len(factors) > 1
                rate = f"{first.rate:g}" + (" (at the edge)" if is_at_edge else "")
                difference = "-"
                if name != best and len(top1s[best]) > 1:
                    pairs = Difference.of(top1s[best], top1s[name])
                    difference = f"{100 * pairs.mean:+.2f} +- {100 * pairs.standard_error:.2f}"
                cells = (batch, name, tried, rate, f"{means[name]:.2%}", difference, len(top1s[name]))
                lines.append(f"| {' | '.join(map(str, cells))} |")
        return lines

    def draw(self, path: Path) -> None:
        """Draw test accuracy over images seen, a panel for each batch, and the gradient noise scale below it."""
        batches: Sequence[int] = self._options.batches
        figure = Figure(figsize=(4 * len(batches), 6), layout="constrained")
        panels = figure.subplots(2, len(batches), sharey="row", squeeze=False)
        for column, batch in enumerate(batches):
            above, below = panels[:, column]
            for number, optimizer in enumerate(self._options.optimizers):
                for point in self.final(optimizer, batch):
                    label = optimizer if point.seed == 0 else None
                    run = RunDirectory(Path(self.config(point).run.dir))
                    curves = ((above, "eval", "top1", 100.0), (below, "train", "noise_scale", 1.0))
                    for axes, kind, field, factor in curves:
                        events = [event for event in run.events if event["event"] == kind and field in event]
                        seen = [event["step"] * batch for event in events]
                        values = [factor * event[field] for event in events]
                        axes.plot(seen, values, color=f"C{number}", label=label, linewidth=1, alpha=0.8)
            above.set(title=f"batch {batch:,}")
            below.axhline(batch, color="black", linestyle="--", linewidth=0.8, label="the batch")
            below.set(xlabel="images seen", yscale="log")
        panels[0, 0].set(ylabel="top-1 of the test images, %")
        panels[1, 0].set(ylabel="gradient noise scale, images")
        panels[1, 0].legend(fontsize=8)
        figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="of the runs")
    parser.add_argument("--tuning", type=Path, required=True, metavar="DATASET", help="with held-out training images")
    parser.add_argument("--final", type=Path, required=True, metavar="DATASET", help="with the test images")
    parser.add_argument("--config", default="configs/small-vit-cifar10-adamw.py", metavar="FILE", help="of all else")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 2048, 8192], metavar="N")
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1 / 9, 1 / 3, 1, 3], metavar="F", help="of the rate"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of each final point")
    parser.add_argument("--epochs", type=float, default=100, metavar="N", help="of a final run")
    parser.add_argument("--tuning-epochs", type=float, metavar="N", help="of a rate's run (default: --epochs)")
    parser.add_argument(
        "--micro-batch", type=int, default=256, metavar="N", help="of all runs: the noise scale needs 2"
    )
    options = parser.parse_args()
    options.tuning_epochs = options.tuning_epochs or options.epochs
    comparison = Comparison(options)
    print("\n".join(comparison.table()))
    comparison.draw(options.directory / "optimizers.png")
    print(f"drawn: {options.directory / 'optimizers.png'}")


if __name__ == "__main__":
    main()
