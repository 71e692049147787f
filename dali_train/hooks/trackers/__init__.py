"""Trackers, which send a run's scalars to a service. Each has one file and one row in TRACKERS."""

from dali_train.config.names import lookup
from dali_train.hooks.trackers.mlflow import MLflow
from dali_train.hooks.trackers.tensorboard import TensorBoard
from dali_train.hooks.trackers.tracker import Tracker
from dali_train.hooks.trackers.wandb import WandB

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""By their names in hooks.trackers. A config file can add a row."""


def make_trackers(names: tuple[str, ...]) -> list[Tracker]:
    """Return one tracker for each of `names`, the value of hooks.trackers.

    Raises:
        ConfigError: a name that is not in TRACKERS.
    """
    return [lookup(TRACKERS, "hooks.trackers", name)() for name in dict.fromkeys(names)]
