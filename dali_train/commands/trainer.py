"""Building what makes a step: model, parallelism, optimizer, and what a checkpoint says of them."""

from functools import partial
from typing import Any

import torch
from torch import nn

from dali_train.checkpoint.load import Checkpoint
from dali_train.checkpoint.state import from_timm_order, restore
from dali_train.config import Config
from dali_train.data.loading.loader import blank_images, pixel_format
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import parallelize, warm_up
from dali_train.parallel.stages import Stream
from dali_train.training.dropout import choose_seeding, drops, seed_each_block
from dali_train.training.ema import Ema
from dali_train.training.half import compute_in
from dali_train.training.loss import make_objective
from dali_train.training.metrics import TrainingMetrics
from dali_train.training.model import build_model, check_evaluation_size, check_training_size, repeated_blocks
from dali_train.training.optim import make_optimizer
from dali_train.training.pipelined import Pipeline, PipelineTrainer
from dali_train.training.precision import Precision
from dali_train.training.running_statistics import RunningStatistics
from dali_train.training.timing import PhaseClock
from dali_train.training.trainer import Trainer


def build_trainer(
    config: Config,
    layout: Layout,
    num_classes: int,
    device: torch.device,
    resumed: Checkpoint | None,
    *,
    evaluates: bool,
) -> tuple[Trainer, nn.Module, list[str]]:
    """The trainer, its model without wrappers, and warnings about what `resumed` could not give them."""
    model = build_model(config, num_classes, device, with_weights=resumed is None, on_host=layout.splits_model)
    dropout = choose_seeding(config.model, None if resumed is None else resumed.values["dropout"])
    if dropout == "block":
        seed_each_block(model, device)
    elif config.parallel.pipeline > 1 and drops(model):
        assert resumed is not None  # whoever compiles the complete model cannot have a pipeline
        raise ConfigError(
            f"{resumed.path} is of a run that began with model.compile model, whose dropout masks the stages of "
            f"parallel.pipeline {config.parallel.pipeline} cannot draw: set parallel.pipeline 1, or choose another "
            "run.dir to start anew"
        )
    check_training_size(model, config)
    if evaluates or layout.pipeline > 1:  # stages agree at the start on what they exchange
        check_evaluation_size(model, config)  # now, and not after an epoch
    precision = Precision(config.precision, device)
    stream = Stream.of(model, config) if layout.pipeline > 1 else None
    prepare = partial(compute_in, dtype=precision.pure_dtype) if precision.pure_dtype is not None else None
    parallel = parallelize(model, layout, config.parallel, device, repeated_blocks(model), stream, prepare)
    if layout.splits_model:
        model = parallel.model
    optimizer = make_optimizer(model, config.optimizer)  # after parallelism, which may replace parameters
    warnings = restore(resumed, model, optimizer, precision, parallel) if resumed is not None else []
    ema = Ema(model, config.ema) if config.ema.decay is not None else None
    if ema is not None and resumed is not None and "ema" in resumed.state:
        ema.load({name: from_timm_order(name, tensor, parallel.order) for name, tensor in resumed.state["ema"].items()})
    objective = make_objective(config, model, num_classes, device)
    grad_accum_steps = config.batch.grad_accum_steps(layout.data_size)
    settings = (
        parallel,
        optimizer,
        objective,
        precision,
        RunningStatistics(model),
        TrainingMetrics(device),
        PhaseClock(device),
    )
    more: dict[str, Any] = {
        "grad_accum_steps": grad_accum_steps,
        "clip_grad_norm": config.optimizer.clip_grad_norm,
        "keep_gradients": config.model.cuda_graphs,
        "ema": ema,
        "dropout": dropout,
    }
    if stream is None:
        return Trainer(*settings, **more), model, warnings
    return (
        PipelineTrainer(*settings, **more, pipeline=Pipeline(parallel, config, num_classes, grad_accum_steps)),
        model,
        warnings,
    )


def warm_up_trainer(trainer: Trainer, model: nn.Module, config: Config, device: torch.device, num_threads: int) -> None:
    """Passes that leave no trace, see `warm_up`. They show which gradient comes last: from there on exchange is
    timed."""
    model.train()
    precision = trainer.precision
    blank = blank_images(config, pixel_format(config, device, num_threads), device).to(precision.image_dtype)
    order = warm_up(trainer.parallel, blank, precision.autocast(), keep_gradients=config.model.cuda_graphs)
    if trainer.parallel.layout.data_size > 1:
        trainer.clock.watch_exchange(order[-1])
