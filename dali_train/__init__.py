"""dali_train: large-batch ImageNet training whose samples do not depend on the number of ranks.

import dali_train

result = dali_train.run("configs/digits.py")
model = dali_train.load_model(result.run_dir)
predictions = dali_train.predict(model, ["photo.jpg"])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_train.checkpoint.trained_model import load_model
    from dali_train.commands.train import RunResult, run
    from dali_train.config import View, load_config
    from dali_train.data.loading.loader import EvalLoader, TrainLoader
    from dali_train.extras.predict.classify import predict
    from dali_train.hooks import Hook
    from dali_train.training.optim import register_optimizer

__version__ = "0.1.0"
__all__ = [
    "EvalLoader",
    "Hook",
    "RunResult",
    "TrainLoader",
    "View",
    "load_config",
    "load_model",
    "predict",
    "register_optimizer",
    "run",
]

# Imported on first use: torch takes seconds to import, and --help does not need it; __main__ hears Ctrl-C from here on.
_PLACES = {
    "EvalLoader": "data.loading.loader",
    "Hook": "hooks",
    "RunResult": "commands.train",
    "TrainLoader": "data.loading.loader",
    "View": "config",
    "load_config": "config",
    "load_model": "checkpoint.trained_model",
    "predict": "extras.predict.classify",
    "register_optimizer": "training.optim",
    "run": "commands.train",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
