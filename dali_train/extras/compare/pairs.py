"""Pairs of runs that differ in nothing but what is compared.

With the same seed two recipes have the same images in the same order, the same crops and partners, and the same dropout
masks, as long as they say the same about these. What chance does is then common to both runs of a pair, and goes out of
their difference: its standard error is that of the differences, not that of two independent means
(docs/measurements/accuracy.md has the ratio of the two, measured).
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from dali_train.checkpoint.recipe import changes_of_result, recipe_settings
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands.train import run
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.data.dataset.sample_recipe import changes_between
from dali_train.errors import ConfigError
from dali_train.extras.pictures.predictions import write_table
from dali_train.runtime.status import decisive, read_status
from dali_train.runtime.stop import StopReason
from dali_train.text import aligned, plural, printable

_OF_SAMPLES = ("data.", "mixup.", "batch.")
_TENTH = 0.001  # of a point of accuracy, as a fraction: 0.1 %
# The quantiles of the normal distribution for a two-sided level of 5 % and a power of 80 %.
_QUANTILES = 1.960 + 0.842


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two recipes' accuracies, second less first, as fractions."""

    mean: float
    standard_error: float  # of the mean, from the differences of the pairs
    unpaired_error: float  # what it would be for independent runs
    num_pairs: int

    @classmethod
    def of(cls, first: list[float], second: list[float]) -> "Difference":
        """Return the difference of two lists with a number for each seed, two or more."""
        differences = [b - a for a, b in zip(first, second, strict=True)]
        number = len(differences)
        unpaired = statistics.variance(first) + statistics.variance(second)
        return cls(
            mean=statistics.mean(differences),
            standard_error=(statistics.variance(differences) / number) ** 0.5,
            unpaired_error=(unpaired / number) ** 0.5,
            num_pairs=number,
        )

    @property
    def num_needed(self) -> int:
        """Pairs with which a test at the level of 5 % finds a difference of 0.1 point with a probability of 80 %.

        That is ((z_0.975 + z_0.8) s / 0.1 point)**2 with the standard deviation s of a pair's difference
        (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.2.2).
        """
        deviation = self.standard_error * self.num_pairs**0.5
        return max(2, math.ceil((_QUANTILES * deviation / _TENTH) ** 2 - 1e-9))

    def describe(self) -> list[str]:
        lines = [
            f"difference {100 * self.mean:+.2f} points, with a standard error of {100 * self.standard_error:.2f} from "
            f"{plural(self.num_pairs, 'pair')}; independent runs would have {100 * self.unpaired_error:.2f}"
        ]
        if self.unpaired_error:
            ratio = (self.standard_error / self.unpaired_error) ** 2
            lines.append(f"pairs have {ratio:.2f} of the variance of independent runs")
        needed = plural(self.num_needed, "pair")
        return [*lines, f"to find a difference of 0.1 point (at a level of 5 %, four times in five) takes {needed}"]


def compare(first: str, second: str, overrides: list[str], *, num_seeds: int, out: Path) -> bool:
    """Train both recipes with seeds 0 to `num_seeds` - 1, and print the difference.

    Args:
        first, second: config files, or recipes by name.
        overrides: words of ``--section.field VALUE``, for both.
        out: the directory of the runs.

    Returns:
        Whether all runs are finished: False if one was stopped.

    Raises:
        ConfigError: a config cannot be used, or `out` has a run of other settings.
    """
    if num_seeds < 2:
        raise ConfigError(f"--seeds is {num_seeds}: a standard error needs 2 or more")
    configs = _named(first, second, overrides)
    names = list(configs)
    _print_differences(*configs.values())
    accuracies: dict[str, list[float]] = {name: [] for name in names}
    rows = []
    for seed in range(num_seeds):  # a pair after the other, so that an early end leaves complete ones
        for name, config in configs.items():
            directory = out / f"{name}-seed-{seed}"
            top1 = trained_accuracy(config.replace({"data.seed": seed, "run.dir": str(directory)}))
            if top1 is None:
                return False
            accuracies[name].append(top1)
        pair = [accuracies[name][-1] for name in names]
        rows.append([seed, *pair, pair[1] - pair[0]])
    write_table(out / "pairs.csv", ["seed", *names, "difference"], rows)
    shown = [["seed", *names, "difference"]]
    shown += [[str(seed), f"{a:.2%}", f"{b:.2%}", f"{100 * difference:+.2f}"] for seed, a, b, difference in rows]
    print("\n".join(aligned(shown)))
    print("\n".join(Difference.of(*accuracies.values()).describe()))
    return True


def _named(first: str, second: str, overrides: list[str]) -> dict[str, Config]:
    """Return both configs by the names of their files."""
    configs = {Path(path).stem: config_with(path, overrides, "dali-train compare") for path in (first, second)}
    if len(configs) < 2:
        raise ConfigError(f"{first} and {second} have one name: rename a file, runs are called after them")
    return configs


def _print_differences(first: Config, second: Config) -> None:
    """Print what the recipes differ in, and whether the pairs have the same samples."""
    changes = changes_between(recipe_settings(first), recipe_settings(second))
    for change in changes or ["the recipes are the same"]:
        print(f"  {printable(change)}")
    others = [change for change in changes if change.startswith(_OF_SAMPLES)]
    if others or first.data.root != second.data.root:
        print("these change the samples, so the runs of a pair have less in common")


def trained_accuracy(config: Config) -> float | None:
    """Return the last top-1 of a run, a fraction, which is trained unless it has finished; None: it was stopped.

    Raises:
        ConfigError: it has finished with other settings or another dataset than these, its checkpoints are gone, or it
            was not evaluated.
        CheckpointError: its newest checkpoint is damaged.
        DatasetError: the dataset is not here.
    """
    directory = Path(config.run.dir)
    status = read_status(directory)
    if status is not None and status.state == "finished":
        if changes := changes_of_result(RunDirectory(directory), config):
            raise ConfigError(
                f"{directory} has finished with another recipe or evaluation ({'; '.join(changes)}): use another "
                "directory of runs"
            )
    elif run(config).stopped != StopReason.NONE:
        return None
    evaluations = [event for event in RunDirectory(directory).events if event["event"] == "eval"]
    if not evaluations:
        raise ConfigError(f"{directory} was not evaluated: compare needs a validation split and run.eval_every_epochs")
    return decisive(evaluations[-1], "top1")
