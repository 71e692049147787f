"""Faults to put into the trainer, of the kinds that only a GPU has, and how each is found."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import torch

from tests.helpers import TENSOR, words


class Fault(NamedTuple):
    """One place of the package, with other words in it."""

    where: str  # module:function
    old: str
    new: str
    found: str  # in what the ranks print; "values": in nothing but losses and weights, which differ from a CPU's
    ranks: int = 1
    options: tuple[str, ...] = ()
    convolutional: bool = False


_DEVICE, _CHANGED, _ORDER, _VALUES = "on the same device", "page-locked memory has changed", "NCCL: rank", "values"
_BACKWARDS_ON_RANK_1 = "[:: 1 - 2 * dist.get_rank()]"

FAULTS: dict[str, Fault] = {
    # A tensor on another device than those that it meets.
    "device: targets": Fault(
        "dali_train.data.loading.pipelines:Batch.to",
        "images, targets, lambdas, self",
        "images, self.targets, lambdas, self",
        _DEVICE,
    ),
    "device: sums of a step": Fault(
        "dali_train.training.metrics:TrainingMetrics.__init__",
        "torch.zeros(3, dtype=torch.float64, device=device)",
        "torch.zeros(3, dtype=torch.float64)",
        _DEVICE,
    ),
    "device: loss scale": Fault(
        "dali_train.training.precision:Precision.loss_scale",
        "torch.ones((), device=self._device)",
        "torch.ones(())",
        _DEVICE,
    ),
    "device: moving averages": Fault("dali_train.training.optim:_copies", "tensor.clone()", "tensor.cpu()", _DEVICE),
    "device: sums of an evaluation": Fault(
        "dali_train.training.metrics:Evaluator._zeros",
        "correct=torch.zeros(self._num_classes, dtype=torch.int64, device=self._device)",
        "correct=torch.zeros(self._num_classes, dtype=torch.int64)",
        _DEVICE,
    ),
    # Something is read before it is there.
    "wait: sums of a step": Fault(
        "dali_train.training.metrics:TrainingMetrics.read",
        "torch.cat([sums, last]).tolist()",
        "torch.cat([sums, last]).to('cpu', non_blocking=True).tolist()",
        "ValueError: cannot convert float NaN",
    ),
    "wait: result of an evaluation": Fault(
        "dali_train.training.metrics:Evaluator._result",
        "sums.tolist()",
        "sums.to('cpu', non_blocking=True).tolist()",
        "evaluated nan of 13 images",
    ),
    "wait: weights to save": Fault(
        "dali_train.checkpoint.save:CheckpointWriter._copy_to_host",
        "torch.cuda.current_stream().synchronize()",
        "pass",
        _VALUES,
    ),
    "wait: targets on another stream": Fault(
        "dali_train.data.loading.pipelines:Batch.to",
        "    views = tuple(",
        "    with torch.cuda.stream(torch.cuda.Stream()):\n"
        "        targets = without_waiting(self.targets, device)\n"
        "    views = tuple(",
        _VALUES,
    ),
    "wait: sums of all ranks": Fault(
        "dali_train.training.metrics:TrainingMetrics.read",
        "dist.all_reduce(sums)",
        "dist.all_reduce(sums, async_op=True)",
        _VALUES,
        ranks=2,
    ),
    # Page-locked memory that is written again while a copy from it, or to it, is under way.
    "reused: targets and lambdas": Fault(
        "dali_train.data.loading.pipelines:without_waiting",
        "tensor = tensor.pin_memory()",
        "tensor = reused(tensor)",
        _CHANGED,
    ),
    "reused: images": Fault(
        "dali_train.data.loading.cpu:_Batches.take",
        "torch.empty(self._shape, dtype=self._dtype, pin_memory=True)",
        "reused(torch.empty(self._shape, dtype=self._dtype))",
        _CHANGED,
    ),
    "reused: images, cleared too early": Fault(
        "dali_train.data.loading.pipelines:Batch.to",
        "    return Batch(",
        "    self.images.zero_()\n    return Batch(",
        _CHANGED,
    ),
    "reused: labels of an evaluation": Fault(
        "dali_train.data.loading.loader:without_waiting",
        "tensor = tensor.pin_memory()",
        "tensor = reused(tensor)",
        _CHANGED,
        options=words("--batch.micro_batch 4"),  # four batches, three of one size
    ),
    "reused: weights to save": Fault(
        "dali_train.checkpoint.save:CheckpointWriter._copy_to_host",
        "copy_(part, non_blocking=True)",
        "copy_(reused_for(part).copy_(part, non_blocking=True))",
        _VALUES,
    ),
    # Ranks call collectives in another order, or not all of them.
    "order: sums of a step": Fault(
        "dali_train.training.metrics:TrainingMetrics.read",
        "dist.all_reduce(sums)\n",
        "dist.all_reduce(streak if dist.get_rank() else sums)\n",
        _ORDER,
        ranks=2,
    ),
    "order: sums of an evaluation": Fault(
        "dali_train.training.metrics:Evaluator.run",
        "totals.predictions, totals.scores):",
        f"totals.predictions, totals.scores){_BACKWARDS_ON_RANK_1}:",
        _ORDER,
        ranks=2,
    ),
    "order: gradients, left out": Fault(
        "dali_train.training.trainer:Trainer.forward_backward",
        "self.parallel.accumulating(last=is_last)",
        "self.parallel.accumulating(last=is_last and dist.get_rank() == 0)",
        _ORDER,
        ranks=2,
    ),
    "order: gradients of a split model": Fault(
        "dali_train.parallel.parallelize:average_gradients",
        "if parameter.grad is not None]",
        "if parameter.grad is not None][:: -1 if dist.get_rank() == 1 else 1]",
        _ORDER,
        ranks=4,
        options=(*TENSOR, "--parallel.timeout_s", "20"),
    ),
    "order: statistics, left out": Fault(
        "dali_train.training.invariant:RunningStatistics.finish_step",
        "if dist.is_initialized():",
        "if dist.get_rank() == 0:",
        _ORDER,
        ranks=2,
        convolutional=True,
    ),
}


@contextmanager
def put_in(name: str) -> Iterator[None]:
    """Let one function of the package be another one, from its source with the words of the fault."""
    fault = FAULTS[name]
    module_name, _, path = fault.where.partition(":")
    *outer, function_name = path.split(".")
    owner = reduce(getattr, outer, import_module(module_name))
    function = inspect.unwrap(getattr(owner, function_name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) == 1, f"{fault.where} has not once {fault.old!r}"
    names = function.__globals__ | {"reused": _Reused(), "reused_for": _Reused().for_}
    made: dict[str, Callable[..., object]] = {}
    exec(compile(source.replace(fault.old, fault.new), fault.where, "exec"), names, made)
    with mock.patch.object(owner, function_name, made[function_name]):
        yield


class _Reused:
    """Page-locked memory, the same for all tensors of a shape and dtype."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it with the content of `tensor`."""
        return self.for_(tensor).copy_(tensor)

    def for_(self, tensor: torch.Tensor, **_: object) -> torch.Tensor:
        """Return it with any content."""
        key = tensor.shape, tensor.dtype
        if key not in self._memory:
            self._memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._memory[key]
