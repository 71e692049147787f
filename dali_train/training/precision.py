"""Autocast or pure half precision, float16's loss scale, and skipping overflowed steps without waiting on the host.

torch's own ``GradScaler.step`` reads on the host whether a gradient overflowed, which waits for the whole step.
Here the step is always taken and, if a gradient was not finite, undone on the device.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dali_train.config import PrecisionConfig
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import Shardwise, local, total_norm
from dali_train.training.optim import GradientTransform

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_tf32(allowed: bool) -> None:
    """Set whether GPUs compute float32 matrix products and convolutions in TensorFloat-32, for the whole process.

    This uses torch's older interface: after a call of the newer one, ``torch.backends.cuda.matmul.fp32_precision``, the
    compiler fails when it reads the older one (torch 2.15: ``_inductor/kernel/bmm.py``). Some versions warn once and
    recommend the newer one.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


class Precision:
    """The number formats of a run, and optimizer steps in them."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.half = _HALF.get(config.dtype)  # the dtype of matrix products and convolutions, if it is not the weights'
        self._dtype = self.half if config.autocast else None  # autocast's
        self.pure_dtype = None if config.autocast else self.half  # what the model casts to itself, see `compute_in`
        self._device = device
        self.image_dtype = torch.float64 if config.dtype == "fp64" else None  # None: as the loader returns them
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.initial_scale,
            enabled=config.dtype == "fp16",
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def loss_scale(self) -> torch.Tensor:
        """Return the current scale, on the device where it lives (1 without a scaler)."""
        return self.scaler.scale(torch.ones((), device=self._device))

    def step(self, optimizer: Optimizer, clip: GradientTransform | None, layout: Layout | None = None) -> torch.Tensor:
        """Unscale, clip and step; in fp16 a step with non-finite gradients changes only the scale.

        (Step counters on the host, which some optimizers use for bias correction, count such a step as well.)

        Args:
            layout: the layout of a model that is split over ranks, which all call this together; None: every rank has
                all gradients.

        Returns:
            The global 2-norm of the gradients before clipping, 0-dimensional, on the device; not finite if the
            step was skipped.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if layout is not None:
            norm = self._unscale_split(parameters, layout)
            parameters = list(map(_shard, parameters))
        else:
            self.scaler.unscale_(optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip is not None:
            clip(parameters, norm)
        shardwise = Shardwise() if layout is not None and layout.shards_weights else nullcontext()
        if self.scaler.is_enabled():
            _step_or_undo(optimizer, shardwise, finite=norm.isfinite())
            self.scaler.update()
        else:
            with shardwise:
                optimizer.step()
        return norm

    def _unscale_split(self, parameters: list[torch.Tensor], layout: Layout) -> torch.Tensor:
        """Unscale the gradients of `parameters`, split over the ranks of `layout`, and return the norm of all of them.

        All ranks call this together. A norm that is not finite on one of them is not finite on any, and makes the
        scaler of each see an overflow, so that all skip the same steps and keep the same scale.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        # A GradScaler expects an optimizer. It unscales the local shards, which share the gradients' memory.
        local_optimizer: Any = SimpleNamespace(param_groups=[{"params": list(map(_shard, parameters))}])
        # It is initialised by the first loss that it scales: only the last stage of a pipeline has one.
        self.loss_scale()
        self.scaler.unscale_(local_optimizer)
        norm = total_norm(gradients, layout, self._device)
        if self.scaler.is_enabled():
            for overflowed in self.scaler._found_inf_per_device(local_optimizer).values():
                overflowed.copy_(~norm.isfinite())
        return norm


@torch.no_grad()
def _step_or_undo(optimizer: Optimizer, shardwise: AbstractContextManager[Any], *, finite: torch.Tensor) -> None:
    """Take a step in the context `shardwise`, and undo it unless `finite`, 0-dimensional bool on the device, without
    making the host wait.

    The optimizer itself would have to skip the update otherwise, which only torch's fused ones do (found_inf), none of
    timm's.
    """
    written = _written_by(optimizer)
    # Copies, made in a few kernels by multiplying by one; `plan` counts them.
    before = dict(zip(written, torch._foreach_mul(list(written.values()), 1), strict=True))
    have_state = {parameter for parameter, values in optimizer.state.items() if values}
    with shardwise:
        optimizer.step()
    for key, tensor in _written_by(optimizer).items():
        if key in before:
            torch.where(finite, tensor, before[key], out=tensor)
    # New optimizer state starts differently in each optimizer, so it is discarded and created again. The host waits for
    # the device only here: in the first step, and until one step was finite.
    made = [parameter for parameter, values in optimizer.state.items() if values and parameter not in have_state]
    if made and not finite:
        for parameter in made:
            del optimizer.state[parameter]


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `parameter` with its gradient, in the same memory."""
    shard = local(parameter).detach()
    shard.grad = local(parameter.grad) if parameter.grad is not None else None
    return shard


def _written_by(optimizer: Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Return this rank's device tensors that a step of `optimizer` writes to: parameters, and their state by its
    key."""
    parameters = {(id(p), ""): local(p) for group in optimizer.param_groups for p in group["params"]}
    state = {
        (id(p), key): local(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.device == p.device
    }
    return parameters | state


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype` from its first layer to its logits, which it returns as float32.

    This is ColossalAI's NAIVE mode: everything in half precision, without autocast's exceptions. The parameters stay
    float32 for the optimizer, checkpoints and moving averages, and gradients accumulate in float32; while a module
    computes, its parameters are replaced by half-precision copies. Batch normalisation keeps its float32 parameters and
    statistics. Call this before the model is sharded or wrapped.
    """
    for module in model.modules():
        if module._parameters and not isinstance(module, _BatchNorm):
            _compute_with_copies(module, dtype)
    model.register_forward_pre_hook(lambda module, inputs: tuple(_cast(value, dtype) for value in inputs))
    model.register_forward_hook(lambda module, inputs, output: _cast(output, torch.float32))


def _compute_with_copies(module: nn.Module, dtype: torch.dtype) -> None:
    kept: list[dict[str, Any]] = []

    def put_copies(module: nn.Module, inputs: Any) -> None:
        kept.append(module._parameters)
        module._parameters = {name: _cast(parameter, dtype) for name, parameter in module._parameters.items()}

    def take_back(module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters = kept.pop()

    module.register_forward_pre_hook(put_copies)
    module.register_forward_hook(take_back, always_call=True)  # also after an error


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
