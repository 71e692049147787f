"""Optimizer steps and evaluation through a pipeline.

The micro-batches that would otherwise be accumulated pass through the pipeline. torch's schedules decide what each
stage computes when, and send activations and gradients. This module adds the rest of a micro-batch: its images, which
only the first stage decodes, its labels and lambdas, from the index and the draws, its dropout seed, and the clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from dali_train.config import Config
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.loader_arguments import blank_images, pixel_format
from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.parallel.parallelize import Parallel, zero_loss
from dali_train.parallel.stages import VitStage
from dali_train.training.invariant import seed_micro_batch
from dali_train.training.trainer import Trainer

_LOGITS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # autocast's


_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}  # torch's names


class StageRunner:
    """torch's schedule over the stages of this rank."""

    def __init__(self, parallel: Parallel, config: Config, num_classes: int) -> None:
        assert parallel.mesh is not None and parallel.activations is not None
        self._has_last = any(module.stage.is_last for module in parallel.stages)
        self._num_passes = parallel.num_passes(config.batch.num_micro_batches)
        self._passes: _Passes | None = None
        self._group = parallel.mesh["pipeline"].get_group()
        # The exact inputs and outputs of stages: torch 2.11 checks each micro-batch against them.
        batch = config.batch.micro_batch
        device = next(parallel.model.parameters()).device
        pixels = pixel_format(config, device, num_threads=1)
        images = blank_images(config, pixels, torch.device("meta"))
        if config.precision.dtype == "fp64":
            images = images.double()
        shape, dtype = parallel.activations.training, parallel.activations.dtype
        tokens = torch.empty(batch, *shape, dtype=dtype, device="meta", requires_grad=True)
        logits_dtype = _LOGITS.get(config.precision.dtype, dtype) if config.precision.autocast else dtype
        logits = torch.empty(batch, num_classes, dtype=logits_dtype, device="meta")
        stages = []
        for module in parallel.stages:
            inputs, outputs = images if module.stage.is_first else tokens, logits if module.stage.is_last else tokens
            stages.append(_PipelineStage(self, module, device, self._group, inputs, outputs))
        schedule: Any = get_schedule_class(_SCHEDULES[config.parallel.schedule])
        self._schedule = schedule(
            stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages,
            self._num_passes,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def run(self, passes: "_Passes") -> None:
        """Run all forward and backward passes of a step, on all stages together."""
        self._passes = passes
        # The last stage's targets are the numbers of the micro-batches, by which `_loss` finds their labels.
        target = torch.arange(self._num_passes) if self._has_last else None
        self._schedule.step(target=target, return_outputs=False)
        self._passes = None

    @property
    def passes(self) -> "_Passes":
        assert self._passes is not None
        return self._passes

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.passes.loss(output, int(number))


class _PipelineStage(PipelineStage):
    """A stage that prepares each micro-batch before it is computed."""

    def __init__(
        self,
        pipeline: StageRunner,
        module: VitStage,
        device: torch.device,
        group: dist.ProcessGroup,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        stage = module.stage
        super().__init__(
            _Wrapped(module), stage.index, stage.num_stages, device, input_args=inputs, output_args=outputs, group=group
        )
        self._pipeline, self._module = pipeline, module

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **named: Any) -> Any:
        with self._pipeline.passes.forward(fwd_chunk_id) as images:
            return super().forward_one_chunk(fwd_chunk_id, (images,) if self.is_first else args, *more, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *more: Any, **named: Any) -> Any:
        with self._pipeline.passes.backward(bwd_chunk_id, self._module):
            return super().backward_one_chunk(bwd_chunk_id, *more, **named)


class _Wrapped(nn.Module):
    """Hides a sharded module from torch's schedules: `Parallel` decides when gradients are reduced."""

    def __init__(self, module: VitStage) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output


@dataclass(frozen=True, kw_only=True)
class PipelineTrainer(Trainer):
    """A trainer of one rank's stages."""

    pipeline: StageRunner

    def forward_backward(self, step: int, loader: TrainLoader) -> tuple[tuple[MicroBatch, ...], Batch]:
        """Do the same as `Trainer.forward_backward`; on ranks without the first stage the batch has no images."""
        passes = _Passes(self, step, loader)
        self.pipeline.run(passes)
        return tuple(batch.micro_batch for batch in passes.batches), passes.batches[-1]

    def forward_model(self) -> nn.Module:
        """Return the forward pass through all stages, as `Trainer.forward_model`."""
        return PipelineForward(self.parallel)


class _Passes:
    """The passes of one step on this rank; a micro-batch is loaded when its first pass needs it."""

    def __init__(self, trainer: PipelineTrainer, step: int, loader: TrainLoader) -> None:
        self._trainer, self._step, self._loader = trainer, step, loader
        self._num_local_micro_batches = trainer.parallel.layout.num_local_micro_batches(trainer.num_micro_batches)
        self._num_passes = trainer.parallel.num_passes(trainer.num_micro_batches)
        self.batches: list[Batch] = []

    @contextmanager
    def forward(self, number: int) -> Iterator[torch.Tensor]:
        """Wrap the forward pass of micro-batch `number` in one stage, and yield its images."""
        trainer = self._trainer
        if number == len(self.batches) < self._num_local_micro_batches:
            trainer.clock.enter("data")
            if self.batches:  # images are kept where the backward pass needs them, and the last ones for hooks
                self.batches[-1] = replace(self.batches[-1], images=self.batches[-1].images[:0].clone())
            self.batches.append(self._loader.next())
        batch = self.batches[
            min(number, self._num_local_micro_batches - 1)
        ]  # the last one again if other ranks have more
        trainer.clock.enter("forward")
        seed_micro_batch(batch.micro_batch.dropout_seed, batch.images.device)
        with trainer.precision.autocast():
            # A copy: the next micro-batch may be decoded into the same memory before this one's backward pass.
            yield batch.images.to(trainer.precision.image_dtype, copy=True)
        trainer.clock.enter("all-reduce")

    @contextmanager
    def backward(self, number: int, module: VitStage) -> Iterator[None]:
        """Wrap the backward pass of micro-batch `number` in the stage `module`."""
        trainer = self._trainer
        trainer.clock.enter("backward")
        trainer.parallel.prepare_backward(module, last=number == self._num_passes - 1)
        yield
        if number == 0 and trainer.noise is not None:
            trainer.noise.add_first_micro_batch(module)
        trainer.clock.enter("all-reduce")

    def loss(self, output: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of micro-batch `number`, scaled for its backward pass."""
        if number >= self._num_local_micro_batches:
            return zero_loss(output)
        trainer = self._trainer
        batch = self.batches[number]
        with trainer.precision.autocast():
            loss, logits = trainer.objective(output, batch.images, batch.targets, batch.lambdas)
        trainer.count_micro_batch(self._step, batch, loss, logits)
        return trainer.scaled(loss)


class PipelineForward(nn.Module):
    """The forward pass through all stages, for evaluation: a stage starts the next batch while later stages compute
    this one."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        assert parallel.mesh is not None and parallel.activations is not None
        self._stages = [module.stage for module in parallel.stages]
        self.stages = nn.ModuleList(parallel.stages)
        self._activations = parallel.activations
        self._group = parallel.mesh["pipeline"].get_group()
        self._sending: list[tuple[Any, torch.Tensor]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor | None:
        """Return logits (n, classes) on the rank with the last stage, None elsewhere.

        Args:
            images: (n, 3, size, size) on the rank with the first stage; elsewhere only n and the device count.
        """
        ranks = dist.get_world_size(self._group)
        result = None
        for stage, module in zip(self._stages, self.stages, strict=True):
            x = images
            if not stage.is_first:
                shape, dtype = self._activations.evaluation, self._activations.dtype
                x = torch.empty(len(images), *shape, dtype=dtype, device=images.device)
                dist.recv(x, group=self._group, group_src=(stage.index - 1) % ranks)
            x = module(x)
            if stage.is_last:
                result = x
            else:
                work = dist.isend(x, group=self._group, group_dst=(stage.index + 1) % ranks)
                self._sending.append((work, x))
        while len(self._sending) > 2 * len(self._stages):
            self._sending.pop(0)[0].wait()
        return result
