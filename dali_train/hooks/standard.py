"""The hooks of each rank."""

import inspect
from collections.abc import Callable
from typing import Any

from dali_train.config import Config
from dali_train.errors import ConfigError
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
        ConfigError: hooks.trackers has an unknown name, or hooks.user something that is no hook; on every rank.
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
    return Observers([*hooks, *map(_make_user_hook, chosen.user)])


def _make_user_hook(make: Callable[[], Any]) -> Hook:
    """Raises ConfigError: `make` needs arguments, or makes something else. An error inside it is the user's to see."""
    name = getattr(make, "__name__", repr(make))
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"hooks.user: {name} cannot be called without arguments ({error}): name a function that returns the hook, "
            f"such as lambda: {name}(...)"
        ) from None
    except ValueError:  # some classes in C have no signature
        pass
    hook = make()
    if not isinstance(hook, Hook):
        raise ConfigError(
            f"hooks.user: {name} makes {type(hook).__name__}, which is not a hook: use a subclass of dali_train.Hook"
        )
    return hook
