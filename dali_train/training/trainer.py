"""One optimizer step: accumulate this rank's micro-batches, all-reduce gradients, clip, update. The host waits for
nothing."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dali_train.data.loading.loader import Loader
from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.parallel.parallelize import Parallel, without_weight
from dali_train.training.dropout import DropoutSeeding, seed_micro_batch
from dali_train.training.ema import Ema
from dali_train.training.loss import Objective, first_target_correct
from dali_train.training.metrics import TrainingMetrics, all_finite
from dali_train.training.precision import Precision
from dali_train.training.running_statistics import RunningStatistics
from dali_train.training.timing import PhaseClock

StepImages = tuple[tuple[MicroBatch, ...], Batch]
"""This rank's micro-batches of a step, and the last of them with its pixels."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a checkpoint restores: weights, optimizer state and loss scale. Built once; the tensors in it change."""

    model: nn.Module  # not wrapped for parallelism; in a pipeline this rank's stages
    parallel: Parallel
    optimizer: Optimizer
    precision: Precision
    dropout: DropoutSeeding  # as checkpoints note it


@dataclass(frozen=True, kw_only=True)
class Trainer(TrainState):
    """Everything that a step needs."""

    objective: Objective
    statistics: RunningStatistics
    metrics: TrainingMetrics
    clock: PhaseClock
    num_micro_batches: int  # per step, of all ranks
    clip_grad_norm: float | None
    # CUDA graphs replay kernels that write each gradient to a fixed address, so gradients are zeroed in place, not
    # freed.
    keep_gradients: bool = False
    ema: Ema | None = None

    def step(self, step: int, lr: float, loader: Loader) -> StepImages:
        """Do optimizer step number `step` (from 0) at learning rate `lr`."""
        self.clock.step = step
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # a layer's own share, with layer-wise decay
        micro_batches, batch = self.forward_backward(step, loader)
        self.parallel.finish_gradients()
        self.clock.enter("optimizer")
        layout = self.parallel.layout if self.parallel.layout.splits_model else None
        grad_norm = self.precision.step(self.optimizer, self.clip_grad_norm, layout)
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.metrics.finish_step(grad_norm, self.precision.loss_scale(), step=step)
        self.clock.enter("exchange")
        self.statistics.finish_step(self.num_micro_batches)
        if self.ema is not None:
            self.clock.enter("optimizer")
            self.ema.update(step)
        self.clock.enter("logging")
        self.clock.finish_step()
        return micro_batches, batch

    def forward_backward(self, step: int, loader: Loader) -> StepImages:
        """Leave the gradient of the mean loss over the step's micro-batches in the parameters: the seam for pipeline
        schedules."""
        micro_batches = []
        num_own = self.parallel.layout.num_own(self.num_micro_batches)
        num_passes = self.parallel.num_passes(self.num_micro_batches)
        for number in range(num_passes):
            last, counts = number == num_passes - 1, number < num_own
            if counts:
                self.clock.enter("data")
                batch = loader.next()
            self.clock.enter("forward")
            # Dropout belongs to the micro-batch. Blocks derive their own seeds from it (`seed_each_block`).
            seed_micro_batch(batch.micro_batch.dropout_seed, batch.images.device)
            with self.parallel.accumulating(last=last):
                with self.precision.autocast():
                    images = batch.images.to(self.precision.image_dtype)
                    output = self.parallel.model(images)
                    if counts:
                        loss, logits = self.objective(output, images, batch.targets, batch.lambdas)
                self.clock.enter("backward", exchange_follows=last)
                (self.scaled(loss) if counts else without_weight(output)).backward()
            if not counts:  # the last micro-batch once more, since other ranks wait in each pass: it leaves nothing
                break
            self.statistics.add_micro_batch()
            correct = first_target_correct(logits, batch.targets)
            self.metrics.add_micro_batch(loss, correct, num_images=len(batch.images), step=step, k=batch.micro_batch.k)
            micro_batches.append(batch.micro_batch)
        return tuple(micro_batches), batch

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean `loss` of one micro-batch for its backward pass: with its weight in the step, in float16's
        scale. DDP and FSDP take the mean over ranks, so what they leave is the mean over all micro-batches."""
        return self.precision.scaler.scale(loss / (self.num_micro_batches / self.parallel.layout.data_size))

    def forward_model(self) -> nn.Module:
        """Return the complete model for evaluation: a function of images, called by all ranks together where it is
        split."""
        return self.model

    def is_finite(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether weights and last loss are finite on all ranks of `group`, which call this together.

        Otherwise they are not worth saving. float16's overflows leave the weights as they were.
        """
        last_step = self.precision.scaler.is_enabled() or self.metrics.last_step_was_finite()
        finite = (all_finite(self.parallel.model.state_dict().values()).cpu() & last_step).to(torch.uint8)
        if group is not None:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
        return bool(finite)
