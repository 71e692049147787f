"""The hooks of each rank."""

from dali_train.config import Config
from dali_train.hooks.base import Hook
from dali_train.hooks.console import Console
from dali_train.hooks.health import Health
from dali_train.hooks.jsonl import MetricsFile, SampleTrace
from dali_train.hooks.lamb import LambView
from dali_train.hooks.logs import RunLogs
from dali_train.hooks.observers import Observers
from dali_train.hooks.predictions import PredictionFiles
from dali_train.hooks.profile import Profile
from dali_train.hooks.samples import SampleImages
from dali_train.hooks.system import SystemFacts
from dali_train.hooks.trackers import make_trackers
from dali_train.parallel.layout import Layout


def make_hooks(config: Config, layout: Layout) -> Observers:
    """Return the hooks of this rank: logs first, so that every other hook can log, and the user's own last.

    Raises:
        ConfigError: hooks.trackers has an unknown name; on every rank.
    """
    chosen, trackers = config.hooks, make_trackers(config.hooks.trackers)
    hooks: list[Hook] = [RunLogs(), Console()]
    if layout.rank == 0:
        hooks += [MetricsFile(), SystemFacts(), Health()]
    # No rank has all layers of a split model, so all ranks compute its norms together.
    if layout.rank == 0 or layout.splits_model:
        hooks.append(LambView(layout))
    if layout.rank == 0:
        hooks.append(SampleImages())
        if chosen.predictions:
            hooks.append(PredictionFiles())
        if chosen.profile is not None:
            hooks.append(Profile(*chosen.profile))
        hooks += trackers
    if chosen.trace_samples:
        hooks.append(SampleTrace(writes=layout.pipeline_rank == 0 and layout.tensor_rank == 0))  # once per micro-batch
    return Observers([*hooks, *(make() for make in chosen.user)])
