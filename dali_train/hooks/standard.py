"""Which hooks a config asks for, rank by rank."""

from dali_train.config import Config
from dali_train.hooks.base import Hook
from dali_train.hooks.console import Console
from dali_train.hooks.files import MetricsFile, SampleTrace
from dali_train.hooks.health import Health
from dali_train.hooks.lamb import LambView
from dali_train.hooks.logs import RunLogs
from dali_train.hooks.mlflow import MLflow
from dali_train.hooks.observers import Observers
from dali_train.hooks.predictions import Predictions
from dali_train.hooks.profile import Profile
from dali_train.hooks.samples import SampleImages
from dali_train.hooks.system import SystemFacts
from dali_train.hooks.tensorboard import TensorBoard
from dali_train.hooks.wandb import WandB
from dali_train.launch import Launch


def make_hooks(config: Config, launch: Launch) -> Observers:
    """Logs first, so that every other hook can say something; the user's own last, on every rank."""
    chosen = config.hooks
    hooks: list[Hook] = [RunLogs(), Console()]
    if launch.rank == 0:
        hooks += [MetricsFile(), SystemFacts(), Health()]
        if chosen.detail_every_steps is not None:
            hooks.append(LambView(chosen.detail_every_steps))
        if chosen.sample_images:
            hooks.append(SampleImages(chosen.sample_images))
        if chosen.predictions:
            hooks.append(Predictions())
        if chosen.profile is not None:
            hooks.append(Profile(*chosen.profile))
        if chosen.tensorboard:
            hooks.append(TensorBoard())
        if chosen.wandb != "disabled":
            hooks.append(WandB())
        if chosen.mlflow is not None:
            hooks.append(MLflow())
    if chosen.trace_samples:
        hooks.append(SampleTrace())
    return Observers([*hooks, *(make() for make in chosen.user)])
