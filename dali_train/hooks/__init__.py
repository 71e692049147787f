"""Hooks observe a run; the loop acts. A hook gets frozen records and may only measure, log or trace."""

from typing import TYPE_CHECKING, Any

from dali_train.hooks.base import Hook

if TYPE_CHECKING:
    from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord

__all__ = ["EvaluationRecord", "Hook", "RunEnd", "RunPlan", "RunStart", "StepRecord", "TrainRecord"]


def __getattr__(name: str) -> Any:
    """Import the records on first use, since they import torch and DALI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dali_train.hooks import records

    return getattr(records, name)
