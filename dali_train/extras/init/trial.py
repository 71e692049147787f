"""How fast a config trains on this machine: a run of some steps and one evaluation, in a directory that is removed."""

import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands.train import run
from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.extras.cost.speed import seconds_per_image
from dali_train.files import temporary_directory
from dali_train.runtime.stop import StopReason
from dali_train.text import duration

MOST_EPOCHS = 10_000
_SHARE = 0.05  # of the time that a run may take
_SHORTEST_S, _LONGEST_S = 5.0, 60.0
_FEWEST_STEPS, _MOST_STEPS = 4, 200
_ENDLESS = 1e6  # epochs
_MARGIN = 1.1  # on steps and evaluations: those of a few seconds foretell the others only so well


@dataclass(frozen=True)
class Trial:
    """Wall-clock times, in seconds."""

    import_s: float  # of a command, before it begins
    start_s: float  # from there to the second step, and from the end of the last evaluation to that of the command
    step_s: float  # the median of the steps, with the wait for their images
    evaluation_s: float  # of the validation split, with the checkpoint that follows

    def run_s(self, num_steps: int, num_evaluations: int) -> float:
        """Return the time of `dali-train train`."""
        return self.import_s + self.start_s + num_steps * self.step_s + num_evaluations * self.evaluation_s

    @property
    def afterwards_s(self) -> float:
        """The time of `dali-train predict RUN` and `dali-train export RUN`."""
        return 2 * (self.import_s + self.start_s) + self.evaluation_s

    def probe_s(self, num_images: int, num_validation: int) -> float:
        """Return the time of `dali-train probe`, which computes the features of `num_images` to train on and of the
        `num_validation` images that `evaluation_s` is of."""
        passes_s = self.evaluation_s * (num_images + num_validation) / num_validation if num_validation else 0.0
        return self.import_s + self.start_s + passes_s

    def epochs_in(self, seconds: float, run_s: Callable[[float], float]) -> float:
        """Return how many epochs fit into `seconds`, with a margin: whole ones, or hundredths if it is less than one.

        Args:
            run_s: the time of a run by its epochs, see `run_s`.

        Raises:
            ConfigError: not even a hundredth of an epoch fits.
        """
        left_s = seconds - self.afterwards_s
        for unit in (1.0, 0.01):
            # Not by bisection: a run of more epochs may have fewer evaluations.
            fitting = [count for count in range(1, MOST_EPOCHS + 1) if _MARGIN * run_s(count * unit) <= left_s]
            if fitting:
                return fitting[-1] * unit
        needed_s = self.afterwards_s + _MARGIN * run_s(0.01)
        raise ConfigError(
            f"--for leaves {duration(max(seconds, 0.0))} after the trial, and a hundredth of an epoch alone takes "
            f"{duration(needed_s)} here, with the start, an evaluation, and predict and export of the result: allow "
            "more time, or take fewer images (`dali-train data subset`)"
        )


def measure(config: Config, split: Split, seconds: float, num_processes: int | None, import_s: float) -> Trial:
    """Train for about a twentieth of `seconds`, at most a minute, as `config` says, and evaluate once.

    Args:
        num_processes: as for `run`.
        import_s: see `Trial`.

    Raises:
        KeyboardInterrupt: the trial was asked to stop, with Ctrl-C or SIGTERM.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    passes_s = seconds_per_image(config, split.num_classes, device, config.batch.micro_batch)
    step_s = passes_s * config.batch.global_batch / (num_processes or 1)
    trial_s = min(max(_SHARE * seconds, _SHORTEST_S), _LONGEST_S)
    num_steps = min(max(round(trial_s / step_s), _FEWEST_STEPS), _MOST_STEPS)
    with temporary_directory() as directory:
        shortened = config.replace(
            {
                "run.dir": str(directory / "trial"),
                "run.epochs": _ENDLESS,  # how long the run will be is not known yet
                "run.max_steps": num_steps,
                "run.eval_every_epochs": _ENDLESS,  # once, at the end
                "run.checkpoint_every_steps": num_steps,
                "hooks.log_every_steps": 1,
                "hooks.predictions": 0,
            }
        )
        begin = time.perf_counter()
        # Without its files: new processes would look for the config's, which is not written yet.
        with redirect_stdout(io.StringIO()):
            result = run(shortened.from_files({}), num_processes=num_processes)
        if result.stopped != StopReason.NONE:
            raise KeyboardInterrupt("stopped, and no config was written")
        return _times(RunDirectory(Path(shortened.run.dir)), time.perf_counter() - begin, import_s)


def _times(trial: RunDirectory, total_s: float, import_s: float) -> Trial:
    steps = [event for event in trial.events if event["event"] == "train"]
    later = sorted(event["step_s"] for event in steps[len(steps) // 4 :])  # the first ones prepare kernels
    evaluation_s = trial.events[-1]["time"] - steps[-1]["time"]
    return Trial(
        import_s=import_s,
        start_s=total_s - evaluation_s - (steps[-1]["time"] - steps[0]["time"]),
        step_s=later[len(later) // 2],
        evaluation_s=evaluation_s,
    )
