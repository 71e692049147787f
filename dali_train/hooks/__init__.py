"""Hooks observe a run; the loop acts. A hook gets frozen records and may measure, log or trace, nothing else."""

from dali_train.hooks.base import EvaluationRecord, Hook, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord

__all__ = ["EvaluationRecord", "Hook", "RunEnd", "RunPlan", "RunStart", "StepRecord", "TrainRecord"]
