"""Audits: a rank computes a micro-batch of another one again, which finds processors that compute wrongly."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from dali_train.config.check import Conflict, Count, NotInRecipe, splits_model


def _audits_a_split_model(config: Any, name: str) -> bool:
    """Return whether audits are asked for, and the setting `name` splits the model over ranks."""
    return config.run.audit_every_steps is not None and splits_model(config, name)


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How often the section run audits."""

    audit_every_steps: NotInRecipe[Count | None] = None
    """Every this many steps each data-parallel rank also computes a micro-batch of another one and compares all
    gradients bit for bit; a rank that computes wrongly is named and ends the run with exit status 76. On GPUs it needs
    run.deterministic. `plan` prints what it costs."""

    CONFLICTS_OF_RUN: ClassVar[tuple[Conflict, ...]] = tuple(
        Conflict(
            names=(name, "run.audit_every_steps"),
            when=partial(_audits_a_split_model, name=name),
            remedy="no other rank has the same part of the model, set run.audit_every_steps none",
        )
        for name in ("parallel.pipeline", "parallel.shard", "parallel.tensor.size")
    )
