"""Checkpoints in the older format, DCP's own: their tensors are read without running anything.

Their ``.metadata`` is a pickle, and a crafted pickle runs code wherever it gets hold of a real class or function. Here
it gets hold of none: each name in it becomes an inert class of our own that can only record what it is given. Which
names there are differs between versions of Python (in 3.11.2 an enum's value is a ``getattr``); only the few that
locate a tensor are looked at afterwards.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from dali_train.checkpoint.storage import CheckpointError, Tensors, read_regular

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 * 2**20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def read_tensors(directory: Path, names: set[str]) -> Tensors:
    """All tensors of a checkpoint whose files have these `names`, on the CPU.

    Raises:
        CheckpointError: there is something else than tensors in it, or a tensor is not what the metadata says.
    """
    content = io.BytesIO(read_regular(directory / METADATA, _MAX_METADATA_BYTES))
    metadata = _fields(_InertUnpickler(content).load())
    places = {_fields(index)["fqn"]: _fields(place) for index, place in metadata["storage_data"].items()}
    tensors: Tensors = {}
    for name, record in metadata["state_dict_metadata"].items():
        if type(record).__name__ != "TensorStorageMetadata":
            raise CheckpointError(f"{directory}: {name} is not a tensor, and nothing else is read from DCP's files")
        entry = _fields(record)
        file_name, offset, length = (places[name][field] for field in ("relative_path", "offset", "length"))
        if not isinstance(file_name, str) or file_name not in names - {METADATA}:
            raise CheckpointError(f"{directory / METADATA} names {str(file_name)[:200]}, which the manifest does not")
        with (directory / file_name).open("rb") as file:
            file.seek(offset)
            tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        (sizes,), dtype = entry["size"].arguments, entry["properties"].state[0]
        if type(tensor) is not torch.Tensor or (tuple(tensor.shape), tensor.dtype) != (
            sizes,
            _DTYPES.get(dtype.__name__),
        ):
            raise CheckpointError(f"{directory}: {name} is not the tensor that {METADATA} describes")
        tensors[name] = tensor
    return tensors


def modern_values(values: dict[str, Any]) -> dict[str, Any]:
    """The manifest's values as today's checkpoints have them."""
    steps = values.get("group_steps", [])
    groups = [{} if step is None else {"step": int(step)} for step in steps]
    rest = {name: value for name, value in values.items() if name != "group_steps"}
    return {**rest, "optimizer": {"class": "Lamb", "groups": groups, "numbers": {}}}


def _fields(record: object) -> dict[str, Any]:
    state = getattr(record, "state", None)
    if not isinstance(record, _Record) or not isinstance(state, dict):
        raise CheckpointError(f"{METADATA} is not the metadata of a checkpoint")
    return state


class _Inert(type):
    """A class whose attributes a pickle cannot set (its BUILD sets attributes on whatever object is on the stack)."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise CheckpointError(f"{METADATA} changes a class: refused, nothing was run")


class _Record(metaclass=_Inert):
    """Stands for every class and function; an instance records what the pickle gives it."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle._Unpickler):
    """Written in Python, unlike pickle.Unpickler, which allocates whatever memory an index in the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        return _Inert(name, (_Record,), {"__slots__": (), "__module__": module})
