"""Values and reports on the fake device, in a process that runs on it.

No kernel of the fake computes anything. `OnHost` gives a training values nevertheless: it lets torch launch each
operation on the fake, which checks devices and sizes, allocates, queues copies and waits as on a GPU, and then computes
it on the host, in the same memory. `Watch` collects what made the host wait, by function of the package.
"""

import ctypes
import functools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dali_train

PACKAGE = Path(dali_train.__file__).parent
_aten = torch.ops.aten
_OnWait = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t)

# They make memory that has no value yet: NaN here.
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# They only make, move or give back memory, which the fake does.
_REAL = {
    _aten.is_pinned.default,
    _aten._pin_memory.default,
    _aten.record_stream.default,
    _aten.resize_.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten._local_scalar_dense.default,  # a copy to the host
}
# The size of their result is a value, for which torch waits, and which no kernel has computed.
_WAITING = {_aten.nonzero.default, _aten.masked_select.default, _aten.equal.default, _aten._unique2.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor}
_MASKS = (torch.bool, torch.uint8)
_ONLY_ON_CUDA = {_aten._fused_rms_norm.default, _aten._fused_rms_norm_backward.default}
# Between half-precision tensors CUDA keeps means in float32, and the CPU's kernel expects half precision.
_OTHER_DTYPES = {_aten.native_layer_norm_backward.default}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Wait(NamedTuple):
    what: str
    num_bytes: int
    where: str  # the innermost function of the package, such as "training/trainer.py step"; "" outside


class Watch:
    """Collects the waits of the host between `watching` and its end, and the faults of this process."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._num_old_faults = len(_faults())

    @property
    def faults(self) -> list[str]:
        return _faults()[self._num_old_faults :]

    @contextmanager
    def watching(self) -> Iterator[None]:
        callback = _OnWait(self.add)
        _fake().fake_on_wait(callback)
        try:
            yield
        finally:
            _fake().fake_on_wait(None)

    def add(self, what: bytes, num_bytes: int) -> None:
        self.waits.append(Wait(what.decode(), num_bytes, _where()))


def _where() -> str:
    for frame, _ in traceback.walk_stack(None):  # from the innermost
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)} {frame.f_code.co_name}"
    return ""


@functools.cache
def _fake() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.fake_faults.restype = ctypes.c_char_p
    library.fake_launches.restype = ctypes.c_size_t
    library.fake_complete.argtypes = [ctypes.c_void_p]
    library.fake_spoil.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def _faults() -> list[str]:
    return _fake().fake_faults().decode().splitlines()


@contextmanager
def without_values() -> Iterator[None]:
    """Nothing is computed, and what is in device memory is not even copied: real sizes fit into a small machine."""
    _fake().fake_moves(0)
    try:
        yield
    finally:
        _fake().fake_moves(1)


class OnHost(TorchDispatchMode):
    """A mode that computes on the host what is launched on the fake device."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        # The host's generator, for each state (seed, offset) that a device's generator has had.
        self._random: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, FakeTensor) for one in types):
            return func(*args, **kwargs)
        if any(one not in _PLAIN for one in types):
            return NotImplemented  # a DTensor calls again, with its part of the tensor
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        device = _device(args, kwargs)
        if func in _EMPTY:
            return _spoiled(func(*args, **kwargs))
        if device is None or func.is_view or func.namespace in ("c10d", "symm_mem"):
            return func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            args, kwargs = _mapped(_contiguous, args), _mapped(_contiguous, kwargs)
            return func(*args, **kwargs)
        if func in _REAL or _is_plain_copy(func, args, kwargs):
            return _without_kernels(func, args, kwargs)
        if func in (_aten.copy_.default, _aten._to_copy.default) and _leaves_device(func, args, kwargs):
            return _without_kernels(func, *self._staged(func, args, kwargs))
        if func in _WAITING or (func in _INDEXING and any(one.dtype in _MASKS for one in args[1] if one is not None)):
            self._watch.add(str(func).encode(), 0)
            _complete(device)
            return _on_device(_computed(func, args, kwargs), device)
        random = torch.Tag.nondeterministic_seeded in func.tags
        generator = torch.cuda.default_generators[_index(device)] if random else None
        before = _state(generator)
        result = func(*args, **kwargs)
        _complete(device)
        with self._drawing(before, generator):
            _copy_values(_computed(func, args, kwargs), result)
        return result

    def _staged(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a plain copy to the host, from a tensor of the target's layout and dtype.

        As torch does: a kernel makes that tensor on the device, and the copy, which may be late, is from there.
        """
        with self:
            if func is _aten.copy_.default:
                target, source, *others = args
                staged = torch.empty_like(target, device=source.device)
                return (target, staged.copy_(source), *others), kwargs
            staged = func(*args, **{**kwargs, "device": args[0].device, "non_blocking": False})
        return (staged,), {"device": kwargs["device"], "non_blocking": kwargs.get("non_blocking", False)}

    @contextmanager
    def _drawing(self, before: tuple[int, int], generator: torch.Generator | None) -> Iterator[None]:
        """Let the host's generator draw what belongs to the device's, which had the state `before`: after a seed the
        same numbers as on a CPU."""
        if generator is None:
            yield
            return
        kept = torch.default_generator.get_state()
        if before in self._random:
            torch.default_generator.set_state(self._random[before])
        else:
            torch.default_generator.manual_seed(before[0])
        yield
        self._random[_state(generator)] = torch.default_generator.get_state()
        while len(self._random) > 1000:
            self._random.popitem(last=False)
        torch.default_generator.set_state(kept)


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in lists, tuples and dictionaries. torch's pytree does so for any container, and takes longer."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from _leaves(one)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same containers with what `function` makes of each leaf."""
    if isinstance(value, dict):
        return {name: _mapped(function, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, one) for one in value])
    return function(value)


def _device(args: Any, kwargs: Any) -> torch.device | None:
    inputs = [*_leaves(args), *_leaves(kwargs)]
    for one in inputs:
        if isinstance(one, torch.Tensor) and one.is_cuda:
            return one.device
    for one in inputs:
        if isinstance(one, torch.device) and one.type == "cuda":
            return one
    return None


def _without_kernels(func: Any, args: Any, kwargs: Any) -> Any:
    """Call what the fake does itself. A kernel in it would leave its memory as it was, with any values."""
    before = _fake().fake_launches()
    result = func(*args, **kwargs)
    assert _fake().fake_launches() == before, f"{func} has launched a kernel, which nobody computes"
    return result


def _is_plain_copy(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this copies bytes between host and device, which the fake does, as late as CUDA may.

    Between other layouts or dtypes torch queues a kernel beside the copy, which nothing would compute.
    """
    if func is _aten.copy_.default:
        target, source = args[:2]
        same = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
        return same and _aten.is_non_overlapping_and_dense.default(source) and target.device.type != source.device.type
    if func is _aten._to_copy.default:
        source, device = args[0], torch.device(kwargs.get("device") or args[0].device)
        layout = kwargs.get("memory_format") or torch.preserve_format
        same = (kwargs.get("dtype") or source.dtype) == source.dtype
        same &= layout is torch.preserve_format or source.is_contiguous(memory_format=layout)
        return same and _aten.is_non_overlapping_and_dense.default(source) and device.type != source.device.type
    return False


def _leaves_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a copy is from the device to the host."""
    if func is _aten.copy_.default:
        return bool(args[1].is_cuda and args[0].is_cpu)
    return bool(args[0].is_cuda and torch.device(kwargs.get("device") or args[0].device).type == "cpu")


def _state(generator: torch.Generator | None) -> tuple[int, int]:
    return (generator.initial_seed(), generator.get_offset()) if generator is not None else (0, 0)


def _complete(device: torch.device) -> None:
    """Make the effects of what a kernel in the current stream may rely on, and no others."""
    _fake().fake_complete(_stream(device))


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(_index(device))


def _spoiled(fresh: torch.Tensor) -> torch.Tensor:
    """Fill memory that nothing has written yet with NaN, or -1, in stream order: who reads it must notice."""
    if type(fresh) in _PLAIN and fresh.is_cuda and fresh.numel():
        storage = fresh.untyped_storage()
        _fake().fake_spoil(storage.data_ptr(), storage.nbytes(), _stream(fresh.device))
    return fresh


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU in the memory of `tensor`, which is on the fake device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    bytes_on_host = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(bytes_on_host, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_host(one: Any) -> Any:
    if isinstance(one, torch.Tensor) and one.is_cuda:
        return memory_of(one)
    if isinstance(one, torch.device) and one.type == "cuda":
        return torch.device("cpu")
    if isinstance(one, torch.Generator) and one.device.type == "cuda":
        return torch.default_generator
    return one


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _mapped(_on_host, args), _mapped(_on_host, kwargs)
    if func in _ONLY_ON_CUDA or (func in _OTHER_DTYPES and args[1].dtype in (torch.bfloat16, torch.float16)):
        func = decomposition_table[func]
    return func(*args, **kwargs)


def _copy_values(computed: Any, result: Any) -> None:
    for ours, theirs in zip(_leaves(computed), _leaves(result), strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs, f"{ours} on the host, {theirs} on the device"
            continue
        target = memory_of(theirs) if theirs.is_cuda else theirs
        if not ours.numel() and theirs.numel():
            _spoiled(theirs)  # BatchNorm in eval mode returns no statistics on a CPU
        elif target.data_ptr() != ours.data_ptr():
            target.copy_(ours)


def _on_device(computed: Any, device: torch.device) -> Any:
    if not isinstance(computed, torch.Tensor):
        return tuple(_on_device(one, device) for one in computed) if isinstance(computed, tuple) else computed
    result = torch.empty_strided(computed.size(), computed.stride(), dtype=computed.dtype, device=device)
    memory_of(result).copy_(computed)
    return result


def _contiguous(one: Any) -> Any:
    """Return `one`; a tensor that is not contiguous, which a collective would copy by a kernel, is copied here."""
    if not (isinstance(one, torch.Tensor) and one.is_cuda and not one.is_contiguous()):
        return one
    result = torch.empty(one.size(), dtype=one.dtype, device=one.device)
    _complete(one.device)
    memory_of(result).copy_(memory_of(one))
    return result
