"""All ranks stop at the same step: they compare wishes once a step, so that nobody waits in a collective for one that left."""

import torch
import torch.distributed as dist

from dali_train.stop import StopReason, StopRequests


class StopAgreement:
    """All ranks' wishes, compared once a step without making anyone wait: asked when a step begins, read when it ends.

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
