"""The settings that extras add to a section, which inherits from them: one row for each extra that has settings.

They are a dataclass in the `__init__.py` of the extra's folder, which imports no more than config/check.py, since the
config imports it. Its `CONFLICTS` are within the section, its `CONFLICTS_OF_RUN` in the whole config. Of an extra that
is not part of this installation the section has no settings, only what else in the program reads of them.
"""

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

    def _settings(name: str, base: type = object, **unset: Any) -> type:
        """Return the class, or one with these values if its extra is left out."""
        try:
            return Extra(f"dali_train.extras.{name}").load()
        except ConfigError:
            return type(name.partition(":")[2], (base,), unset)

    AuditSettings = _settings("audit:AuditSettings", audit_every_steps=None)
    ClassWeightSettings = _settings(
        "class_weights:ClassWeightSettings", class_weights="none", positive_weight=1.0, weights_classes=False
    )
    DistillationSettings = _settings("distillation:DistillationSettings", distillation="none")
    GridSettings = _settings("tensor_grids:GridSettings", OneDimension)
    LedgerSettings = _settings("ledger:LedgerSettings", ledger=False)
    MirrorSettings = _settings("mirror:MirrorSettings", mirror=None)
    MixtureSettings = _settings("mixture:MixtureSettings", OneDataset)
    LossOfSeveralSettings = _settings("several_labels:LossOfSeveralSettings", kwargs={}, FOR_SEVERAL_LABELS=())
    RunOfSeveralSettings = _settings("several_labels:RunOfSeveralSettings", f1_threshold=0.5)
