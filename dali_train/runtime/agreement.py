"""Agreement of all ranks: before a run that they have the same recipe, and in each step whether to save or stop, since
a rank that continued alone would hang in a collective."""

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dali_train.errors import ConfigError
from dali_train.runtime.process_group import on_rank_0
from dali_train.runtime.stop import StopReason, StopRequests
from dali_train.text import plural, shortened


def compare_ranks(values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Compare JSON `values`, by name, of all ranks in `group` with rank 0's.

    Raises:
        ConfigError: on all ranks, if one differs; the message names the first such rank, its host and the values.
    """
    mine = {name: json.dumps(value) for name, value in values.items()}
    first = on_rank_0(lambda: mine, group)
    differences = [
        f"{name} is {shortened(mine.get(name, 'missing'), 200)}, rank 0 has {shortened(first.get(name, 'none'), 200)}"
        for name in first | mine
        if mine.get(name) != first.get(name)
    ]
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)  # of each rank: host, differences
    dist.all_gather_object(found, (platform.node(), "; ".join(differences)), group=group)
    differing = [rank for rank, (_, text) in enumerate(found) if text]
    if differing:
        host, text = found[differing[0]]
        others = f" ({plural(len(differing) - 1, 'more rank')} differ too)" if len(differing) > 1 else ""
        raise ConfigError(
            f"rank {differing[0]} on {host}: {text}{others}: start all ranks with the same command, files and version"
        )


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
