"""Every setting of a run, as frozen dataclasses that check themselves, and loading them from ``configs/*.py``.

A config file is Python and ends with ``config = Config(...)``; every field can be overridden on the command line as
``--section.field value``. The config sets the *global* batch; its distribution over ranks is derived when the number of
ranks is known.
"""

from dali_train.config.batch import BatchConfig
from dali_train.config.config import Config
from dali_train.config.data import DataConfig
from dali_train.config.ema import EmaConfig
from dali_train.config.hooks import HooksConfig
from dali_train.config.load import load_config
from dali_train.config.loss import LossConfig
from dali_train.config.mixup import MixupConfig
from dali_train.config.model import ModelConfig
from dali_train.config.optimizer import OptimizerConfig
from dali_train.config.parallel import ParallelConfig, TensorConfig
from dali_train.config.precision import PrecisionConfig
from dali_train.config.run import RunConfig
from dali_train.config.schedule import ScheduleConfig
from dali_train.errors import ConfigError

__all__ = [
    "BatchConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EmaConfig",
    "HooksConfig",
    "LossConfig",
    "MixupConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "TensorConfig",
    "load_config",
]
