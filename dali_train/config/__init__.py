"""Every setting of a run, as frozen dataclasses that check themselves, and loading them from ``configs/*.py``.

A config file is Python and ends with ``config = Config(...)``; every field can be overridden on the command line as
``--section.field value``. The config sets the *global* batch; its distribution over ranks is derived when the number of
ranks is known.
"""

from dali_train.config.config import Config, SampleConfig, load_config
from dali_train.config.sections import (
    BatchConfig,
    DataConfig,
    EmaConfig,
    HooksConfig,
    LossConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TensorConfig,
    View,
)
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
    "SampleConfig",
    "ScheduleConfig",
    "TensorConfig",
    "View",
    "load_config",
]
