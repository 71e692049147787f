"""What the core names of extras in words: it is there, and of the type by which the core uses it."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from dali_train import cli
from dali_train.checkpoint import run_directory
from dali_train.commands import arguments, data, train
from dali_train.config import Config
from dali_train.config.check import Extra, rows_of_extras
from dali_train.data.convert import datasets, sources
from dali_train.data.dataset import index, manifest, verify
from dali_train.data.dataset.index import Split
from dali_train.data.loading import loader
from dali_train.extras import (
    completion,
    dali_reader,
    grouping,
    image_names,
    local_copy,
    num_processes,
    trackers,
)
from dali_train.extras.audit import audited_trainer
from dali_train.extras.class_weights import weights
from dali_train.extras.distillation import teacher
from dali_train.extras.formats import download
from dali_train.extras.mirror import mirror
from dali_train.extras.mixture import kind as mixture
from dali_train.extras.plan import auto_micro_batch
from dali_train.extras.predict import classify, mistakes
from dali_train.extras.several_labels import evaluation, judged, labels, losses, sets_of_classes
from dali_train.extras.several_labels.sets_of_classes import SetsOfClasses
from dali_train.extras.tensor_grids import grid_layouts
from dali_train.hooks import hook_list
from dali_train.parallel import tensor
from dali_train.training import build, loss, metrics

T = TypeVar("T")
MakeLoss = Callable[[Config, loss.TrainingClasses, dict[str, torch.Tensor], torch.device], loss.LabelsLoss]


def pair(extra: Extra[T], found: T) -> tuple[Extra[T], T]:
    """Return both; mypy checks that `found` has the type that the core expects."""
    return extra, found


EXTRAS: list[tuple[Extra[Any], Any]] = [
    pair(run_directory.MIRRORED_RUN, mirror.downloaded),
    pair(train.MIRROR, mirror.mirrored),
    pair(train.RUN_LOCALLY, num_processes.run_locally),
    pair(cli.COMPLETION, completion.answer_completion),
    pair(arguments.COMPLETED_SETTINGS, completion.add_settings_to_complete),
    pair(arguments.AUTO_MICRO_BATCH, auto_micro_batch.choose),
    pair(datasets.DOWNLOAD, download.download),
    pair(sources.GROUPED, grouping.held_out_groups),
    pair(index.CHECK_EXCLUDED, image_names.check_excluded),
    pair(verify.FILE_NAMES, image_names.file_names),
    pair(Extra[index.KindOfDataset]("dali_train.extras.mixture.kind"), mixture),
    pair(loader.DALI_READER, dali_reader.DaliReaderPipeline),
    pair(manifest.SETS_OF_CLASSES, SetsOfClasses),
    pair(sets_of_classes.MULTI_HOT, labels.MultiHot),
    pair(Extra[Callable[[Config, Split], None]](rows_of_extras("CHECKS_OF_SPLIT")[0].name), labels.check_labels),
    pair(Extra[MakeLoss](SetsOfClasses.loss.name), losses.SeveralLabelsLoss),
    pair(Extra[type[metrics.Evaluator]](SetsOfClasses.evaluator.name), evaluation.SeveralLabelsEvaluator),
    pair(build.LOCAL_COPY, local_copy.copied),
    pair(train.AUDITED, audited_trainer.audited),
    pair(loss.CLASS_WEIGHTS, weights.weights_of),
    pair(loss.DISTILLATION, teacher.Distillation),
    pair(classify.COMPARE_SEVERAL, judged.compare_several),
    pair(mistakes.JUDGE_SEVERAL, judged.judge_several),
    pair(tensor.GRIDS["2d"], grid_layouts.GRID_2D),
    pair(tensor.GRIDS["2.5d"], grid_layouts.GRID_2_5D),
    pair(tensor.GRIDS["3d"], grid_layouts.GRID_3D),
]


@pytest.mark.parametrize(("extra", "found"), EXTRAS, ids=[extra.name for extra, _ in EXTRAS])
def test_a_name_in_the_core_stands_for_what_is_in_extras(extra: Extra[Any], found: object) -> None:
    assert extra.load() is found


def test_tables_of_extras() -> None:
    for extra in (*cli.EXTRA_COMMANDS, *data.EXTRA_ACTIONS, *hook_list.EXTRA_HOOKS):
        assert callable(extra.load())
    assert hook_list.TRACKERS["wandb"] == Extra("dali_train.extras.trackers:WandB", "hooks.trackers wandb")
    assert [extra.load() for extra in hook_list.TRACKERS.values() if isinstance(extra, Extra)] == [
        trackers.TensorBoard,
        trackers.WandB,
        trackers.MLflow,
    ]
