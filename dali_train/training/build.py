"""Preparing a run, and building its parts: data, model, parallelism, optimizer, and the trainer that uses them.

The caller restores a checkpoint into the trainer; this package knows nothing of checkpoints.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dali_train.config import Config, DataConfig, ParallelConfig
from dali_train.config.check import Extra, require, rows_of_extras
from dali_train.data.dataset.index import Split, open_split, read_labels
from dali_train.data.dataset.manifest import Manifest, SplitName
from dali_train.data.dataset.storage import DatasetLocation, storage_of
from dali_train.data.loading.cache import Node, join_node
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.loader_arguments import Place, blank_images, decoding_threads, pixel_format
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import parallelize, warm_up
from dali_train.parallel.stages import StageActivations, check_micro_batches
from dali_train.runtime.launch import Launch
from dali_train.runtime.process import bind_to_numa_node, cores_per_process, explain_bus_errors
from dali_train.training.invariant import RunningStatistics, choose_seeding, drops, seed_each_block
from dali_train.training.loss import TrainingClasses, loss_of, make_objective
from dali_train.training.metrics import Evaluator, NoiseScale, TrainingMetrics
from dali_train.training.model import build_model, check_sizes, repeated_blocks
from dali_train.training.optim import (
    Ema,
    check_groups,
    check_shardwise,
    gradient_transform_of,
    make_clip,
    make_optimizer,
)
from dali_train.training.pipelined import PipelineTrainer, StageRunner
from dali_train.training.precision import Precision, choose_tf32, compute_in
from dali_train.training.schedule import schedule_of
from dali_train.training.timing import PhaseClock
from dali_train.training.trainer import Trainer
from dali_train.training.weight_files import Tensors

# What a run may do without, imported where it is asked for.
LOCAL_COPY = Extra[Callable[[DataConfig, Launch], DatasetLocation]](
    "dali_train.extras.local_copy:copied", "data.local_copy"
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run whose settings fit its ranks, before the model is built: where this rank computes, and what it reads.

    Hooks receive it too. In all records `step` is the number of completed optimizer steps, as in metrics.jsonl.
    """

    config: Config
    launch: Launch
    layout: Layout
    device: torch.device
    num_threads: int  # for decoding
    dataset: DatasetLocation  # held, so that a local copy in use is not removed
    node: Node | None  # the cache of this node
    split: Split  # to train on; of `eval` to evaluate

    @property
    def directory(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def num_images(self) -> int:
        return self.split.num_images

    @property
    def num_classes(self) -> int:
        return self.split.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.split.manifest.class_names

    @property
    def classes(self) -> TrainingClasses:
        return training_classes(self.split)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches of one rank per step; the maximum over the ranks, if they differ."""
        return self.config.batch.grad_accum_steps(self.layout.data_size)

    @property
    def total_steps(self) -> int:
        """The step at which the run ends."""
        return self.config.total_steps(self.num_images)


def training_classes(split: Split) -> TrainingClasses:
    names = split.manifest.class_names
    counts = split.class_counts
    return TrainingClasses(names=names, counts=counts, num_images=split.num_images, label_kind=split.label_kind)


def fit_to_ranks(config: Config, launch: Launch) -> Layout:
    """Return the layout of the ranks, after the cheap checks: names, batch and pipeline.

    Raises:
        ConfigError: there is no such schedule, change of gradients or loss, or the batch or pipeline does not fit the
            number of ranks.
    """
    schedule_of(config.schedule)
    gradient_transform_of(config.optimizer)
    if not config.loss.is_for_other_labels:
        loss_of(config.loss)
    layout = Layout.from_config(launch, config.parallel)
    check_micro_batches(config.parallel, config.batch.grad_accum_steps(layout.data_size))
    return layout


def prepare(config: Config, launch: Launch, device: torch.device, *, trains: bool = True) -> RunPlan:
    """Check the config against the number of ranks, configure torch for this process, and open the dataset.

    Args:
        trains: False to evaluate only: the complete model on every rank, and the validation split.

    Raises:
        ConfigError: see `fit_to_ranks`; or a setting does not fit the dataset's labels.
        DatasetError: the dataset does not exist, or is damaged.
    """
    layout = fit_to_ranks(config, launch) if trains else Layout.from_config(launch, ParallelConfig())
    num_threads = configure_torch(config, launch, device)
    dataset = find_dataset(config, launch) if trains else DatasetLocation(config.data)
    explain_bus_errors(dataset.data.roots)
    name: SplitName = "train" if trains else "validation"
    split = open_split(dataset.data, name)
    for check in rows_of_extras("CHECKS_OF_SPLIT"):
        check.load()(config, split)
    require(
        config.run.best_by.replace("-", "_") in evaluator_of(split).MEASURES,
        f"run.best_by is {config.run.best_by}, which evaluations of {config.data.root} do not measure: use top1, "
        "balanced-top1 or loss",
    )
    return RunPlan(
        config=config,
        launch=launch,
        layout=layout,
        device=device,
        num_threads=num_threads,
        dataset=dataset,
        split=split,
        node=join_node(config.data, launch, layout) if trains else None,
    )


def find_dataset(config: Config, launch: Launch) -> DatasetLocation:
    """Return where the dataset lies, with the copy that data.local_copy asks for. All ranks call this together.

    Raises:
        ConfigError: data.root is a URL whose scheme is unknown.
        DatasetError: on all ranks, if any host fails to make its copy.
    """
    storage_of(config.data.root)  # report an unknown scheme before looking for its directory
    if config.data.local_copy is None:
        return DatasetLocation(config.data)
    return LOCAL_COPY.load()(config.data, launch)


def configure_torch(config: Config, launch: Launch, device: torch.device) -> int:
    """Bind this process to `device` and to cores near it, and return the number of its decoding threads."""
    cores = cores_per_process(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        cores = min(cores, bind_to_numa_node(device))
        choose_tf32(config.precision.tf32)
        torch.backends.cudnn.benchmark = not config.run.deterministic  # shapes are the same in every step
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
        # All of our memory is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return config.data.num_threads or decoding_threads(cores, device)


def build_loader(plan: RunPlan, *, start_step: int = 0) -> TrainLoader:
    """Return the loader of this rank's micro-batches, from optimizer step `start_step` on."""
    layout = plan.layout
    place = Place(dp_rank=layout.data_rank, dp_size=layout.data_size, device=plan.device, num_threads=plan.num_threads)
    decodes = layout.pipeline_rank == 0
    loader = TrainLoader.of_split(
        plan.split, plan.config, place, node=plan.node, start_step=start_step, decodes=decodes
    )
    loader.prepare()
    return loader


def build_evaluator(plan: RunPlan, *, num_shown: int | None = None) -> Evaluator | None:
    """Return the evaluator of the validation split; None if the dataset has none.

    Args:
        num_shown: images in the tables of predictions; None: hooks.predictions.
    """
    if "validation" not in plan.split.manifest.splits:
        return None
    split = plan.split
    if split.name != "validation":
        split = open_split(plan.dataset.data, "validation")
    return evaluator_of(split)(
        split,
        plan.config,
        plan.device,
        plan.layout,
        num_threads=plan.num_threads,
        num_shown=plan.config.hooks.predictions if num_shown is None else num_shown,
        node=plan.node,
    )


def evaluator_of(split: Split) -> type[Evaluator]:
    """Return the class that evaluates splits with such labels."""
    own = split.label_kind.evaluator
    return Evaluator if own is None else own.load()


@dataclass(frozen=True, kw_only=True)
class Evaluators:
    """What a run is evaluated on: the validation split, and each of data.eval_sets by name."""

    validation: Evaluator
    sets: dict[str, Evaluator]


def build_evaluators(plan: RunPlan) -> Evaluators | None:
    """Return all evaluators of a run; None if its dataset has no validation split. Raises as `build_set_evaluators`."""
    validation = build_evaluator(plan)
    return Evaluators(validation=validation, sets=build_set_evaluators(plan)) if validation is not None else None


def build_set_evaluators(plan: RunPlan) -> dict[str, Evaluator]:
    """Return the evaluators of data.eval_sets by name: of their validation split, or of the only one that there is.

    Raises:
        ConfigError: one has a class that data.root lacks, or its labels are not those of the validation images.
        DatasetError: one does not exist, or is damaged.
    """
    evaluators = {}
    known = {name: number for number, name in enumerate(plan.class_names)}
    build = partial(Evaluator, config=plan.config, device=plan.device, layout=plan.layout, num_threads=plan.num_threads)
    for name, root in plan.config.data.eval_sets:
        if root.endswith(".json"):
            split = open_split(plan.dataset.data, "validation")
            split.label_kind.require_class(split.dataset_name)
            evaluators[name] = build(split, labels=read_labels(Path(root), split))
            continue
        splits = Manifest.read(root).splits
        split = Split(root, "validation" if "validation" in splits else "train")
        split.label_kind.require_class(split.dataset_name)
        for its_root, names in ((plan.config.data.root, plan.class_names), (root, split.manifest.class_names)):
            twice = [class_name for class_name, count in Counter(names).items() if count > 1]
            if twice:
                raise ConfigError(
                    f"data.eval_sets {name}: classes are matched by name, and {len(twice)} of {its_root} are called "
                    f"alike, {twice[0]!r} the first: give each another name, with --class-names"
                )
        unknown = [class_name for class_name in split.manifest.class_names if class_name not in known]
        if unknown or not split.manifest.class_names:
            what = f"class {unknown[0]!r} of {root}" if unknown else f"{root}, whose classes have no names,"
            raise ConfigError(
                f"data.eval_sets {name}: {what} is not among the {plan.num_classes} of {plan.config.data.root}: "
                "convert it with the same class names"
            )
        evaluators[name] = build(split, classes=np.array([known[one] for one in split.manifest.class_names]))
    return evaluators


def build_trainer(
    config: Config,
    layout: Layout,
    num_classes: int,
    device: torch.device,
    classes: TrainingClasses | None = None,
    *,
    evaluates: bool = True,
    resumes: bool = False,
    weights: Tensors | None = None,
    saved_seeding: str | None = None,
) -> Trainer:
    """Return the trainer of a model with its initial weights, split over the ranks of `layout`.

    Args:
        classes: for ema.power and the loss, see `make_objective`.
        evaluates: the model must accept images of data.eval_size too.
        resumes: a checkpoint will replace the weights, so model.weights is not read.
        weights: the tensors of model.weights, if that is a run or a checkpoint, which this package cannot read.
        saved_seeding: how the run of the checkpoint seeds dropout, see `choose_seeding`; None for a new run.

    Raises:
        ConfigError: model, optimizer or parallelism cannot be built as the config says.
    """
    model = build_model(
        config, num_classes, device, with_weights=not resumes, tensors=weights, on_host=layout.splits_model
    )
    seeding = choose_seeding(config.model, saved_seeding)
    if seeding == "block":
        seed_each_block(model, device)
    elif config.parallel.pipeline > 1 and drops(model):
        raise ConfigError(
            "the run to resume began with model.compile model or cuda-graphs, which seed dropout once per micro-batch; "
            f"with parallel.pipeline {config.parallel.pipeline} the stages cannot draw the same masks: set "
            "parallel.pipeline 1, or choose another run.dir to start from the beginning"
        )
    # The evaluation size is checked now, not after an epoch, and always with a pipeline, whose stages agree at the
    # start on the shapes of their activations.
    check_sizes(model, config, evaluates=evaluates or layout.pipeline > 1)
    check_groups(dict(model.named_parameters()), config.optimizer)
    check_shardwise(model, config.optimizer, layout)
    precision = Precision(config.precision, device)
    activations = StageActivations.from_model(model, config) if layout.pipeline > 1 else None
    halve = partial(compute_in, dtype=precision.pure_dtype) if precision.pure_dtype is not None else None
    blocks = repeated_blocks(model)
    parallel = parallelize(
        model, layout, config.parallel, device, blocks, activations, prepare=halve, half=precision.half
    )
    description = getattr(model, "pretrained_cfg", None)
    if layout.splits_model:
        model = parallel.model
    optimizer = make_optimizer(model, config.optimizer)  # after parallelism, which may replace parameters
    batch = config.batch
    # Of the schedule; without the number of images only ema.power would need it.
    num_steps = 0 if classes is None else config.steps(config.run.epochs, classes.num_images)
    # A sharded gradient, and a partial one of tensor parallelism, has no norm before it is reduced.
    has_noise = batch.num_micro_batches > 1 and not layout.shards_weights
    trainer = Trainer(
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        precision=precision,
        dropout=seeding,
        objective=make_objective(config, model, num_classes, device, classes),
        statistics=RunningStatistics(model),
        metrics=TrainingMetrics(device),
        clock=PhaseClock(device),
        ema=Ema(model, config.ema, num_steps) if config.ema.decay is not None else None,
        noise=NoiseScale(parallel, batch.num_micro_batches, batch.micro_batch, device) if has_noise else None,
        num_micro_batches=batch.num_micro_batches,
        clip=make_clip(optimizer, config.optimizer, description),
        keep_gradients=config.model.compile == "cuda-graphs",
    )
    if parallel.stages:
        return PipelineTrainer(**vars(trainer), pipeline=StageRunner(parallel, config, num_classes))
    return trainer


def warm_up_trainer(trainer: Trainer, config: Config, device: torch.device, num_threads: int) -> None:
    """Run warm-up passes without side effects, see `warm_up`, and let the clock time the gradient all-reduce.

    A pipeline needs no warm-up: its first step is like all others.
    """
    if trainer.parallel.stages:
        return
    trainer.model.train()
    precision = trainer.precision
    blank = blank_images(config, pixel_format(config, device, num_threads), device).to(precision.image_dtype)
    if device.type == "cpu" and config.model.compile in ("none", "auto"):  # auto compiles on a GPU only
        blank = blank[:2]  # nothing is compiled for the shape, and the passes take seconds; batch norm needs two images
    order = warm_up(trainer.parallel, blank, precision.autocast(), keep_gradients=trainer.keep_gradients)
    if trainer.parallel.layout.data_size > 1:
        trainer.clock.watch_all_reduce(order[-1])
