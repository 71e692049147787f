"""Trackers: services outside of the run directory that can record a run. One file and one row here for each."""

from dali_train.hooks.trackers.base import Tracker
from dali_train.hooks.trackers.mlflow import MLflow
from dali_train.hooks.trackers.tensorboard import TensorBoard
from dali_train.hooks.trackers.wandb import WandB

TRACKERS: list[type[Tracker]] = [TensorBoard, WandB, MLflow]
