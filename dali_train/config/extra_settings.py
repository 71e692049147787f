"""The settings that extras add to a section, which inherits from them.

Each class is a dataclass in the `__init__.py` of its extra's folder, which may import only config/check.py, since the
config imports it. `CONFLICTS` are within the section, `CONFLICTS_OF_RUN` in the whole config; `CHECKS_OF_SPLIT` are
functions of config and `Split`, called before a run begins; `EXPLANATIONS` are appended to those of the section's
other settings. Without the folder the settings do not exist, and the section has only the values that the rest of the
program reads.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dali_train.config.check import Extra, OneDataset, OneDimension
from dali_train.errors import ConfigError

if TYPE_CHECKING:
    from dali_train.extras.audit import AuditSettings
    from dali_train.extras.class_weights import ClassWeightSettings
    from dali_train.extras.distillation import DistillationSettings
    from dali_train.extras.ledger import LedgerSettings
    from dali_train.extras.mirror import MirrorSettings
    from dali_train.extras.mixture import MixtureSettings
    from dali_train.extras.several_labels import LossOfSeveralSettings, RunOfSeveralSettings
    from dali_train.extras.tensor_grids import GridSettings
else:

    def _settings(extra: str, name: str, base: type = object, **values: Any) -> type:
        """Return the class, or one with these values if the extra is left out."""
        with suppress(ConfigError):
            module = Extra(f"dali_train.extras.{extra}").load()
            if module.__file__ is not None:  # more is left of the folder than __pycache__
                return getattr(module, name)
        return type(name, (base,), values)

    AuditSettings = _settings("audit", "AuditSettings", audit_every_steps=None)
    ClassWeightSettings = _settings(
        "class_weights", "ClassWeightSettings", class_weights="none", positive_weight=1.0, weights_classes=False
    )
    DistillationSettings = _settings("distillation", "DistillationSettings", distillation="none")
    GridSettings = _settings("tensor_grids", "GridSettings", OneDimension)
    LedgerSettings = _settings("ledger", "LedgerSettings", ledger=False)
    MirrorSettings = _settings("mirror", "MirrorSettings", mirror=None)
    MixtureSettings = _settings("mixture", "MixtureSettings", OneDataset)
    LossOfSeveralSettings = _settings(
        "several_labels", "LossOfSeveralSettings", is_for_other_labels=False, TIMM_LOSSES=()
    )
    RunOfSeveralSettings = _settings("several_labels", "RunOfSeveralSettings", f1_threshold=0.5)
