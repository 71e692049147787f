"""All ranks stop after the same step: otherwise those that continue would wait for ever in a collective for one that
has left."""

import torch
import torch.distributed as dist

from dali_train.runtime.stop import StopReason, StopRequests


class StopAgreement:
    """Once per step, whether any rank has a reason to stop: the exchange starts when a step begins and is read when it
    ends.

    Args:
        group: of all ranks, for host memory; None for a single process.
    """

    def __init__(self, requests: StopRequests, group: dist.ProcessGroup | None) -> None:
        self._requests = requests
        self._group = group
        self._largest = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def ask(self) -> None:
        """When a step begins, on all ranks."""
        self._largest.fill_(int(self._requests.reason()))
        if self._group is not None:
            self._pending = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> StopReason:
        """When the step ends: the reason why all ranks stop now, or NONE."""
        if self._pending is not None:
            self._pending.wait()
        return StopReason(int(self._largest))
