"""All ranks save or stop after the same step: those that went on would wait for ever in a collective for the others."""

import torch
import torch.distributed as dist

from dali_train.runtime.stop import StopReason, StopRequests


class StepAgreement:
    """Once per step, whether any rank wants to save or has a reason to stop: an all-reduce that runs beside the step.

    Args:
        group: of all ranks, for host memory; None for a single process.
    """

    def __init__(self, requests: StopRequests, group: dist.ProcessGroup | None) -> None:
        self._requests = requests
        self._group = group
        self._largest = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def ask(self, *, save: bool) -> None:
        """Start to ask all ranks, when a step begins; `save`: this one wants a checkpoint after it."""
        self._largest.fill_(2 * int(self._requests.reason()) + save)
        if self._group is not None:
            self._pending = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> tuple[StopReason, bool]:
        """Return, when the step ends, why all ranks stop now, or NONE, and whether one that goes on wants to save."""
        if self._pending is not None:
            self._pending.wait()
        reason, save = divmod(int(self._largest), 2)  # of ranks that stop, which save anyway, the reason counts
        return StopReason(reason), bool(save)
