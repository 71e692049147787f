"""All ranks stop after the same step: those that went on would wait for ever in a collective for one that has left."""

import torch
import torch.distributed as dist

from dali_train.runtime.stop import StopReason, StopRequests


class StopAgreement:
    """Once per step, whether any rank has a reason to stop: an all-reduce that runs beside the step.

    Args:
        group: of all ranks, for host memory; None for a single process.
    """

    def __init__(self, requests: StopRequests, group: dist.ProcessGroup | None) -> None:
        self._requests = requests
        self._group = group
        self._largest = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def ask(self) -> None:
        """Start to ask all ranks, when a step begins."""
        self._largest.fill_(int(self._requests.reason()))
        if self._group is not None:
            self._pending = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> StopReason:
        """Return, when the step ends, the reason why all ranks stop now, or NONE."""
        if self._pending is not None:
            self._pending.wait()
        return StopReason(int(self._largest))
