"""Replicas: ranks that hold the same part of the weights and of the optimizer's state hold the same bits of it.

Each computes the update for itself, from gradients that were all-reduced, so nothing brings them together again once
one of them differs: by a bit that flipped in its memory, by a device that computes wrongly, or by code that changed
weights on one rank alone. Whatever is saved then is a mixture, since ranks share the writing. So they compare digests
before each save: a few bytes of each rank, for one more reading of memory that saving reads anyway.
"""

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dali_train.errors import RunError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import local
from dali_train.runtime.process import device_name
from dali_train.runtime.status import WRONG_RESULT
from dali_train.text import plural

_WORD = 8  # bytes
_ROW = 512  # words

Value = TypeVar("Value")
Part = tuple[object, ...]
"""What decides the bits that a rank holds: its kind of device, its stage, and its coordinate in each dimension of the
mesh that shards."""
Details = Mapping[Part, Mapping[str, tuple[int, ...]]]
"""Of each tensor by name."""


class HardwareFaultError(RunError):
    """Ranks have other bits where they must have the same; the message names the rank that is wrong."""

    status = WRONG_RESULT


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums of the bits of all elements, in their order, modulo 2^64: (2,) int64, on the tensor's device.

    The bits are read as 64-bit words in rows of 512. In one sum each word is weighted by its row, in the other by its
    column. Weights are odd, so another bit in one word always changes both; of two words that have changed places, the
    row or the column differs. Integers are summed exactly, so the order of summation, which differs between kernels,
    does not matter.
    """
    values = tensor.detach().contiguous().flatten()
    per_word = _WORD // values.element_size()
    missing = -values.numel() % per_word
    if missing or values.storage_offset() % per_word:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int64)
    num_rows = len(words) // _ROW
    rows = words[: num_rows * _ROW].view(num_rows, _ROW)
    rest = words[num_rows * _ROW :]
    by_row = torch.cat([rows.sum(1), rest.sum()[None]])
    by_column = rows.sum(0)
    by_column[: len(rest)] += rest
    return torch.stack([(sums * _odd(sums)).sum() for sums in (by_row, by_column)])


def _odd(like: torch.Tensor) -> torch.Tensor:
    """Return 1, 3, 5, ... as many as `like` has elements."""
    return torch.arange(1, 2 * len(like), 2, device=like.device)


def device_kind(device: torch.device) -> str:
    """Describe the hardware of this rank, as far as it decides the last bits of what it computes."""
    kind = device_name(device)
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else kind


def describe_rank(rank: int, device: torch.device) -> str:
    """Say where to find this rank: its host, device and process."""
    return f"rank {rank} on {platform.node()} ({device}, {device_kind(device)}, pid {os.getpid()})"


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The comparison of replicas; every rank has one.

    Args:
        group: all ranks, for host memory; None: a single process, which compares nothing.
        deterministic: a device repeats its own bits. Only then do tensor-parallel ranks hold the same, which compute
            the gradients of replicated weights each for itself.
    """

    layout: Layout
    device: torch.device
    group: dist.ProcessGroup | None
    deterministic: bool

    def compare(self, step: int, state: Mapping[str, Mapping[str, torch.Tensor]], numbers: object) -> None:
        """Compare `state`, tensors by section and name, and `numbers`, whose text has all digits. All ranks call this
        together; the host waits for the device.

        Ranks on other kinds of device are not compared, because their last bits differ.

        Raises:
            HardwareFaultError: on all ranks, if one has other bits than the others with its part.
        """
        if self.group is None:
            return
        names: dict[Part, list[str]] = {}
        sums: list[torch.Tensor] = []
        for section, tensors in state.items():
            for name, tensor in tensors.items():
                names.setdefault(self._part(tensor), []).append(f"{section}.{name}")
        for part_names in names.values():
            tensors_of_part = (state[section][name] for section, name in map(_split, part_names))
            sums.append(torch.stack([digest(local(tensor)).to(self.device) for tensor in tensors_of_part]))
        # One digest of the digests of each part: on the device, then read at once.
        wholes = torch.stack([digest(own) for own in sums]).tolist() if sums else []
        text = hashlib.sha256(repr(numbers).encode()).hexdigest()
        mine = {part: (*whole, text) for part, whole in zip(names, wholes, strict=True)}
        everyone = _gathered(mine, self.group)
        odd = {part: ranks for part in dict.fromkeys(chain(*everyone)) if (ranks := _odd_ranks(part, everyone))}
        if not odd:
            return
        details = {
            part: {name: tuple(values) for name, values in zip(part_names, own.tolist(), strict=True)}
            for (part, part_names), own in zip(names.items(), sums, strict=True)
        }
        self._accuse(step, odd, _gathered(details, self.group))

    def _part(self, tensor: torch.Tensor) -> Part:
        layout = self.layout
        shard: list[tuple[str, int]] = []
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            dimensions = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
            shard = [(name, coordinate) for name, coordinate, place in dimensions if not place.is_replicate()]
        tensor_rank = None if self.deterministic or self.device.type == "cpu" else layout.tensor_rank
        return device_kind(self.device), layout.pipeline_rank, tensor_rank, *shard

    def _accuse(self, step: int, odd: Mapping[Part, tuple[list[int], int]], details: Sequence[Details]) -> None:
        everyone = _gathered(describe_rank(self.layout.rank, self.device), self.group)
        ranks = sorted({rank for suspects, _ in odd.values() for rank in suspects})
        part, (suspects, num_replicas) = next(iter(odd.items()))
        names, num_tensors = _differing(part, details)
        where = f"{len(names)} of {plural(num_tensors, 'tensor')}, first {names[0]}" if names else "counts and scales"
        others = f"those of {plural(num_replicas - len(suspects), 'other replica')}"
        who = " and ".join(everyone[rank] for rank in ranks)
        cause = "That device or its memory is faulty"
        if len(suspects) == num_replicas:
            others = "each other"
            cause = "Either may be wrong: a third replica would tell which"
        raise HardwareFaultError(
            f"step {step} is not saved: weights or optimizer state of {who} differ from {others} in {where}. {cause}, "
            f"or code such as a hook changes weights on some ranks alone"
        )


def _split(name: str) -> tuple[str, str]:
    section, _, rest = name.partition(".")
    return section, rest


def _gathered(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Return the values of all ranks of `group`."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _odd_ranks(part: Part, everyone: Sequence[Mapping[Part, object]]) -> tuple[list[int], int] | None:
    """Return the ranks whose value is not that of the majority which holds the same `part`, or all of them if there is
    no majority, and how many hold it; None if all have the same value."""
    held = {rank: own[part] for rank, own in enumerate(everyone) if part in own}
    (usual, most), *others = Counter(held.values()).most_common()
    if not others:
        return None
    has_majority = 2 * most > len(held)
    return [rank for rank, value in held.items() if value != usual or not has_majority], len(held)


def _differing(part: Part, details: Sequence[Details]) -> tuple[list[str], int]:
    """Return the names of the tensors of `part` in which ranks differ, and how many it has."""
    first, *others = [own[part] for own in details if part in own]
    return [name for name in first if any(other[name] != first[name] for other in others)], len(first)
