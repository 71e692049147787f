"""Initial weights: by torch's generator, or the same on every machine (`model.init`)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dali_train.config import ModelConfig
from dali_train.data.sampling.rng import Purpose, torch_seed
from dali_train.data.sampling.weights import inverse_erf, normal_weights, uniform_weights
from dali_train.errors import ConfigError

_aten = torch.ops.aten
_INEXACT = {_aten.linalg_qr.default}  # orthogonal matrices: LAPACK sums in another order on each processor
# For fixed position embeddings. Their last bits differ too, and those of float64 vanish when it is rounded to float32,
# but for about one number in 10**8.
_ROUNDED = {_aten.linspace.default, _aten.pow.Scalar, _aten.sin.default, _aten.cos.default}


def initialising(config: ModelConfig, seed: int) -> AbstractContextManager[Any]:
    """Return the context in which a model is created, and seed torch's generator for it.

    Args:
        seed: data.seed.
    """
    torch.manual_seed(torch_seed(seed, Purpose.INITIALISATION))
    return PortableInitialisation(seed) if config.init == "portable" else nullcontext()


class PortableInitialisation(TorchDispatchMode):
    """A context in which tensors on the CPU are filled with random numbers of our own, see
    dali_train/data/sampling/weights.py.

    Each tensor that torch or timm fills is a draw, and draws are numbered in the order in which the model makes them.
    All of their initialisers (normal, truncated normal, uniform, Xavier's, Kaiming's and their variants) come down to
    the few operators here; truncated normals are made by the inverse of the error function. What they do with the
    numbers is scaling and clipping, which is exact.

    Raises:
        ConfigError: the model draws in another way.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_draws = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (_aten.rand.default, _aten.randn.default):
            empty = torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
            return self._fill(empty, normal=function is _aten.randn.default, bounds=(0.0, 1.0))
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):  # the meta device has no numbers
            return function(*args, **kwargs)
        if function in (_aten.normal_.default, _aten.uniform_.default):
            # (mean, standard deviation) or (low, high), as positional arguments
            bounds = (*args[1:3], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], normal=function is _aten.normal_.default, bounds=bounds)
        if function is _aten.erfinv_.default:
            return args[0].copy_(torch.from_numpy(inverse_erf(args[0].float().numpy())))
        if function in _ROUNDED:
            return _in_float64(function, args, kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags or function in _INEXACT:
            raise ConfigError(
                f"model.init is portable, but the model draws its initial weights with torch's {function}, whose "
                "result depends on the processor: set model.init torch"
            )
        return function(*args, **kwargs)

    def _fill(self, tensor: torch.Tensor, *, normal: bool, bounds: tuple[float, float]) -> torch.Tensor:
        if tensor.device.type == "cpu":
            draw = normal_weights if normal else uniform_weights
            values = draw(self._seed, self._num_draws, tensor.numel(), *bounds)
            self._num_draws += 1
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))
        return tensor


def _in_float64(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return what `function` returns, computed in float64 and then rounded."""
    wide = [argument.double() if isinstance(argument, torch.Tensor) else argument for argument in args]
    meant: torch.dtype = function(*args, **kwargs).dtype
    if function is _aten.linspace.default:
        kwargs = {**kwargs, "dtype": torch.float64}
    result: torch.Tensor = function(*wide, **kwargs).to(meant)
    return result
