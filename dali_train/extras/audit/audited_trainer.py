"""Audits: another rank computes a micro-batch again, and all gradients are compared bit for bit.

A processor that computes wrongly now and then rarely makes a loss infinite: 1.01 % of silent corruptions ended in
infinities or NaN (arXiv 2605.04213). Only a second computation shows the others. Which rank computes a micro-batch
makes no difference to its gradients, and on hardware of one class none to their bits (docs/exactness.md), so any rank
can check any other. In every audit each data-parallel coordinate r sends one of its micro-batches, with a digest of its
gradients, to coordinate r - d, and gets one of r + d. Which one, and d, change from audit to audit, so that all are
visited in turn.

Audited are the forward and backward pass. The images are sent as decoded: decoding is not repeated.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from dali_train.config import RunConfig
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.pipelines import Batch
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.training.invariant import seed_micro_batch
from dali_train.training.replicas import HardwareFaultError, describe_rank, device_kind, digest
from dali_train.training.trainer import StepImages, Trainer

logger = logging.getLogger("dali_train")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Images, targets and lambdas of a micro-batch as in `Batch`, and its dropout seed, (1,) int64."""


def audited_pass(audit: int, num_passes: int, data_size: int) -> tuple[int, int]:
    """Return which of a rank's `num_passes` micro-batches audit number `audit` repeats, and at which distance."""
    return audit % num_passes, 1 + audit // num_passes % (data_size - 1)


class Audit:
    """The audits of a run with data parallelism alone."""

    def __init__(self, model: nn.Module, layout: Layout, every: int, num_micro_batches: int, names: Sequence[str]):
        """Audit one in `every` steps of `num_micro_batches`; `names` say where each rank is."""
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._audited = [parameter for _, parameter in named]
        self._tensors, self._ranks = [name for name, _ in named], names
        self._rank, self._size, self._every = layout.data_rank, layout.data_size, every
        self._num_passes = num_micro_batches // layout.data_size  # that every rank has
        self._distance = 0
        self._inputs: Inputs | None = None
        self._digests = torch.zeros(len(named), 2, dtype=torch.int64, device=self._audited[0].device)

    @contextmanager
    def recording(self, step: int, number: int, batch: Batch) -> Iterator[None]:
        """Keep what the backward pass of this rank's micro-batch `number` of `step` yields, if it is to be audited.

        Gradients are read before they are accumulated and averaged. The hooks exist only now, so that a compiled model
        does not see them.
        """
        audit, rest = divmod(step + 1, self._every)
        audited, self._distance = audited_pass(audit - 1, self._num_passes, self._size)
        if rest or number != audited:
            yield
            return
        seed = torch.tensor([batch.micro_batch.dropout_seed], device=batch.images.device)
        # Copies, since the loader reuses the memory of the images.
        self._inputs = (batch.images.clone(), batch.targets.clone(), batch.lambdas.clone(), seed)
        self._digests.zero_()
        handles = [
            parameter.register_hook(partial(self._record, index)) for index, parameter in enumerate(self._audited)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, index: int, gradient: torch.Tensor) -> None:
        self._digests[index] = digest(gradient)

    def compare(self, step: int, trainer: Trainer) -> None:
        """Compute the micro-batch of another rank and compare, if one of this step was recorded: then the host waits
        for the device. All ranks call this together.

        Raises:
            HardwareFaultError: on all ranks, if one has computed something else than the others.
        """
        if self._inputs is None:
            return
        trainer.clock.enter("backward")  # which it repeats; it would count as communication
        inputs, self._inputs = self._inputs, None
        *theirs, expected = self._exchange([*inputs, self._digests])
        computed = self._compute(trainer, theirs)
        different = (computed != expected).any(1)
        found = self._gather(different)  # by auditor
        if found.any():
            auditor = int(found.any(1).nonzero()[0])
            names = [name for name, differs in zip(self._tensors, found[auditor].tolist(), strict=True) if differs]
            self._accuse(step, auditor, names, inputs, computed, trainer)

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send `tensors` to the rank that audits this one, and return those of the rank that this one audits."""
        source = (self._rank + self._distance) % self._size  # which this rank audits
        target = (self._rank - self._distance) % self._size  # which audits this rank
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.isend, tensor, target) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, source) for tensor in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [torch.empty_like(own).copy_(other) for own, other in zip(tensors, received, strict=True)]

    def _compute(self, trainer: Trainer, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the digests of all gradients of a micro-batch, as a pass of `forward_backward` adds them to the
        step's, (parameters, 2) int64. BatchNorm's statistics of it, which the forward pass leaves in the model, are
        overwritten at the end of the step."""
        images, targets, lambdas, seed = inputs
        seed_micro_batch(int(seed), images.device)
        with trainer.precision.autocast():
            images = images.to(trainer.precision.image_dtype)
            loss, _ = trainer.objective(trainer.model(images), images, targets, lambdas)
        gradients = torch.autograd.grad(trainer.scaled(loss), self._audited)
        return torch.stack([digest(gradient) for gradient in gradients])

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, (ranks, ...)."""
        gathered = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def _accuse(
        self,
        step: int,
        auditor: int,
        names: Sequence[str],
        inputs: Inputs,
        computed: torch.Tensor,
        trainer: Trainer,
    ) -> None:
        """Raise the error that names who is wrong. All ranks compute the disputed micro-batch again, and what most of
        them find, with the first results of the two, is right."""
        owner = (auditor + self._distance) % self._size
        shared = [tensor.contiguous() for tensor in inputs]
        for tensor in shared:
            dist.broadcast(tensor, owner)
        copies = [torch.empty_like(own).copy_(other) for own, other in zip(inputs, shared, strict=True)]
        again = self._compute(trainer, copies)
        first = {owner: self._digests, auditor: computed}.get(self._rank, again)
        votes = self._gather(torch.stack([first, again])).flatten(2).tolist()
        counts = Counter(tuple(vote) for both in votes for vote in both)
        (right, most), *others = counts.most_common(2)
        if others and others[0][1] == most:
            suspects = sorted((owner, auditor))
            cause = "One of these two devices or its memory is faulty; a third rank would tell which"
        else:
            suspects = [rank for rank, both in enumerate(votes) if any(tuple(vote) != right for vote in both)]
            cause = "This device or its memory is faulty"
        raise HardwareFaultError(
            f"step {step + 1}: {' or '.join(self._ranks[rank] for rank in suspects)} computed wrong gradients: those "
            f"of a micro-batch differ from another rank's in {len(names)} of {len(self._tensors)} weights, first in "
            f"the backward pass those of {names[-1]}. {cause}. The step was not taken: start the same command without "
            "this host, and the run resumes from its newest checkpoint"
        )


@dataclass(frozen=True, kw_only=True)
class AuditedTrainer(Trainer):
    audit: Audit

    def forward_backward(self, step: int, loader: TrainLoader) -> StepImages:
        images = super().forward_backward(step, loader)
        self.audit.compare(step, self)
        return images

    def backward(self, loss: torch.Tensor, step: int, number: int, batch: Batch) -> None:
        with self.audit.recording(step, number, batch):
            super().backward(loss, step, number, batch)


def audited(trainer: Trainer, run: RunConfig, device: torch.device) -> Trainer:
    """Return a trainer with the audits of run.audit_every_steps; or `trainer`, and log why there can be none on these
    ranks. All ranks call this together.

    Raises:
        ConfigError: the kernels are not deterministic.
    """
    every, layout = run.audit_every_steps, trainer.parallel.layout
    assert every is not None
    if device.type == "cuda" and not run.deterministic:
        raise ConfigError(
            f"run.audit_every_steps is {every}, but without run.deterministic a GPU does not repeat its own bits: set "
            "run.deterministic true, or leave run.audit_every_steps out"
        )
    if layout.data_size == 1:
        return _unaudited(trainer, every, "there is one data-parallel rank, and no other that could check it")
    mine = device_kind(device), describe_rank(layout.rank, device)
    ranks: list[tuple[str, str]] = [("", "")] * layout.data_size
    dist.all_gather_object(ranks, mine)
    kinds = sorted({kind for kind, _ in ranks})
    if len(kinds) > 1:
        return _unaudited(trainer, every, f"the ranks' devices differ, and so do their last bits: {'; '.join(kinds)}")
    audit = Audit(trainer.model, layout, every, trainer.num_micro_batches, [name for _, name in ranks])
    return AuditedTrainer(**vars(trainer), audit=audit)


def _unaudited(trainer: Trainer, every: int, reason: str) -> Trainer:
    if trainer.parallel.layout.rank == 0:
        logger.warning("run.audit_every_steps %d: nothing is audited, because %s", every, reason)
    return trainer
