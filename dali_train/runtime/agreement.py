"""Agreement of all ranks to save or stop after the same step, since a rank that continued alone would hang in a
collective."""

import torch
import torch.distributed as dist

from dali_train.runtime.stop import StopReason, StopRequests


class StepAgreement:
    """An all-reduce per step, overlapped with it, of whether any rank wants to save or has a reason to stop.

    Args:
        group: all ranks, for host memory; None for a single process.
    """

    def __init__(self, requests: StopRequests, group: dist.ProcessGroup | None) -> None:
        self._requests = requests
        self._group = group
        self._largest = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def ask(self, *, save: bool) -> None:
        """Start the all-reduce at the start of a step; `save`: this rank wants a checkpoint after it."""
        self._largest.fill_(2 * int(self._requests.reason()) + save)
        if self._group is not None:
            self._pending = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> tuple[StopReason, bool]:
        """Return, at the end of the step, why all ranks stop now, or NONE, and whether to save without stopping."""
        if self._pending is not None:
            self._pending.wait()
        reason, save = divmod(int(self._largest), 2)  # a stop outranks a save, since stopping saves too
        return StopReason(reason), bool(save)
