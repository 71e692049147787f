"""How fast a config trains on this machine: a run of some steps and one evaluation, in a directory that is removed."""

import io
import math
from bisect import bisect_right
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


@dataclass(frozen=True)
class Trial:
    """Wall-clock times, in seconds."""

    start_s: float  # to the first step
    step_s: float  # the median of the steps, with the wait for their images
    evaluation_s: float  # of the validation split, with the checkpoint that follows
    total_s: float  # of the trial

    def run_s(self, config: Config, num_images: int, epochs: float) -> float:
        """Return the time of a run of `epochs` that evaluates and saves as `config` says."""
        num_evaluations = math.ceil(epochs / (config.run.eval_every_epochs or epochs))
        return self.start_s + config.steps(epochs, num_images) * self.step_s + num_evaluations * self.evaluation_s

    def epochs_in(self, config: Config, num_images: int, seconds: float) -> float:
        """Return how many epochs fit into `seconds` after the trial: whole ones, or hundredths if it is less than one.

        Raises:
            ConfigError: not even a hundredth of an epoch fits.
        """
        left_s = seconds - self.total_s
        for unit in (1.0, 0.01):

            def needed_for(count: int, unit: float = unit) -> float:
                return self.run_s(config, num_images, count * unit)

            fitting = bisect_right(range(1, MOST_EPOCHS + 1), left_s, key=needed_for)
            if fitting:
                return fitting * unit
        needed_s = self.total_s + self.run_s(config, num_images, 0.01)
        raise ConfigError(
            f"--for is {duration(seconds)}, and a hundredth of an epoch alone takes {duration(needed_s)} here, with "
            "the start and an evaluation: allow more time, or take fewer images (`dali-train data subset`)"
        )


def measure(config: Config, split: Split, seconds: float, num_processes: int | None) -> Trial:
    """Train for about a twentieth of `seconds`, at most a minute, as `config` says, and evaluate once.

    Args:
        num_processes: as for `run`.

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
        # Without its files: new processes would look for the config's, which is not written yet.
        with redirect_stdout(io.StringIO()):
            result = run(shortened.from_files({}), num_processes=num_processes)
        if result.stopped != StopReason.NONE:
            raise KeyboardInterrupt("stopped, and no config was written")
        return _times(RunDirectory(Path(shortened.run.dir)))


def _times(trial: RunDirectory) -> Trial:
    started, *others = trial.events
    steps = [event for event in others if event["event"] == "train"]
    later = sorted(event["step_s"] for event in steps[len(steps) // 4 :])  # the first ones prepare kernels
    start_s = steps[0]["time"] - started["time"] + started["startup_s"]
    return Trial(
        start_s=start_s,
        step_s=later[len(later) // 2],
        evaluation_s=others[-1]["time"] - steps[-1]["time"],
        total_s=others[-1]["time"] - started["time"] + started["startup_s"],
    )
