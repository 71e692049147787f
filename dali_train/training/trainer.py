"""One optimizer step, without making the host wait: accumulate this rank's micro-batches, all-reduce gradients, clip,
update."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.parallel.parallelize import Parallel, zero_loss
from dali_train.training.invariant import DropoutSeeding, RunningStatistics, seed_micro_batch
from dali_train.training.loss import Objective
from dali_train.training.metrics import NoiseScale, TrainingMetrics, all_finite
from dali_train.training.optim import Ema, GradientTransform
from dali_train.training.precision import Precision
from dali_train.training.timing import PhaseClock

StepImages = tuple[tuple[MicroBatch, ...], Batch]
"""This rank's micro-batches of a step, and the batch of the last one with its pixels."""


Observer = Callable[[Batch, torch.Tensor], None]
"""Gets a micro-batch and its logits, (n, classes), as the forward pass left them, in any float type and without a
gradient. Called where the logits are: in a pipeline on the ranks with the last stage. It must not wait for the
device."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The model, optimizer and everything else needed to compute steps; all are updated in place."""

    model: nn.Module  # not wrapped for parallelism; in a pipeline, this rank's stages
    parallel: Parallel
    optimizer: Optimizer
    precision: Precision
    dropout: DropoutSeeding  # recorded in checkpoints
    objective: Objective
    statistics: RunningStatistics
    metrics: TrainingMetrics
    clock: PhaseClock
    num_micro_batches: int  # per step, of all ranks
    clip: GradientTransform | None  # None: gradients stay as they are
    # Zero gradients in place instead of freeing them: CUDA graphs write each gradient to a fixed address.
    keep_gradients: bool = False
    ema: Ema | None = None
    noise: NoiseScale | None = None
    observers: list[Observer] = field(default_factory=list)  # hooks add theirs

    def begin_averages(self) -> None:
        """Begin all moving averages at the model's weights and statistics, after a checkpoint has replaced them."""
        self.statistics.begin()
        if self.ema is not None:
            self.ema.begin()

    def step(self, step: int, lr: float, loader: TrainLoader) -> StepImages:
        """Compute optimizer step number `step` (from 0) at learning rate `lr`."""
        self.clock.step = step
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # the layer's factor, with layer-wise decay
        if self.noise is not None:
            self.noise.begin_step(step, self.precision.loss_scale())
        micro_batches, batch = self.forward_backward(step, loader)
        self.parallel.finish_gradients()
        self.clock.enter("optimizer")
        layout = self.parallel.layout if self.parallel.layout.splits_model else None
        grad_norm = self.precision.step(self.optimizer, self.clip, layout)
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.metrics.finish_step(grad_norm, self.precision.loss_scale(), step=step)
        if self.noise is not None:
            self.noise.finish_step(grad_norm)
        self.clock.enter("all-reduce")
        self.statistics.finish_step(self.num_micro_batches)
        if self.ema is not None:
            self.clock.enter("optimizer")
            if self.ema.update(step):  # lookahead has replaced the running statistics
                self.statistics.begin()
        self.clock.enter("logging")
        self.clock.finish_step()
        return micro_batches, batch

    def forward_backward(self, step: int, loader: TrainLoader) -> StepImages:
        """Compute the gradient of the step's mean loss into each parameter's `grad`. Pipeline parallelism and audits
        override this."""
        micro_batches = []
        num_local_micro_batches = self.parallel.layout.num_local_micro_batches(self.num_micro_batches)
        num_passes = self.parallel.num_passes(self.num_micro_batches)
        for number in range(num_passes):
            is_last = number == num_passes - 1
            has_micro_batch = number < num_local_micro_batches
            # Where every pass has collectives, a coordinate with a micro-batch less computes its last one again, with a
            # loss of zero, while others have theirs. That is its last pass, and `batch` is still the one before.
            if has_micro_batch:
                self.clock.enter("data")
                batch = loader.next()
            self.clock.enter("forward")
            # Blocks derive their own dropout seeds from the micro-batch's (`seed_each_block`).
            seed_micro_batch(batch.micro_batch.dropout_seed, batch.images.device)
            with self.parallel.accumulating(last=is_last):
                with self.precision.autocast():
                    images = batch.images.to(self.precision.image_dtype)
                    output = self.parallel.model(images)
                    if has_micro_batch:
                        loss, logits = self.objective(output, images, batch.targets, batch.lambdas)
                self.clock.enter("backward", all_reduce_follows=is_last)
                self.backward(self.scaled(loss) if has_micro_batch else zero_loss(output), step, number, batch)
            if number == 0 and self.noise is not None:
                self.noise.add_first_micro_batch(self.model)
            if not has_micro_batch:
                break
            self.statistics.add_micro_batch()
            self.count_micro_batch(step, batch, loss, logits)
            micro_batches.append(batch.micro_batch)
        return tuple(micro_batches), batch

    def count_micro_batch(self, step: int, batch: Batch, loss: torch.Tensor, logits: torch.Tensor) -> None:
        """Add a micro-batch of `step` with its mean `loss` to the metrics, and show its `logits` to the observers."""
        correct = self.objective.count_correct(logits, batch.targets)
        self.metrics.add_micro_batch(loss, correct, num_images=len(batch.targets), step=step, k=batch.micro_batch.k)
        for observe in self.observers:
            observe(batch, logits.detach())

    def backward(self, loss: torch.Tensor, step: int, number: int, batch: Batch) -> None:
        """Compute the gradient of `loss`, of this rank's micro-batch `number` of `step`. Audits override this."""
        loss.backward()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the mean `loss` of one micro-batch by its weight in the step and by float16's loss scale. DDP, FSDP and
        `finish_gradients` average over ranks, so the result is the gradient of the mean over all micro-batches."""
        return self.precision.scaler.scale(loss / (self.num_micro_batches / self.parallel.layout.data_size))

    def forward_model(self) -> nn.Module:
        """Return the complete model for evaluation: a function of images; if it is split, all ranks call it
        together."""
        return self.model

    def is_finite(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether the weights and the last loss are finite on all ranks of `group`, which call this together.

        Otherwise no checkpoint is saved. With float16 the last loss may overflow, since such steps are skipped.
        """
        last_step = self.precision.scaler.is_enabled() or self.metrics.last_step_was_finite()
        finite = (all_finite(self.parallel.model.state_dict().values()).cpu() & last_step).to(torch.uint8)
        if group is not None:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
        return bool(finite)
