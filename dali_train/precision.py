"""Autocast, the loss scale of float16, and optimizer steps that overflow without the host having to ask.

torch's own ``GradScaler.step`` reads on the host whether a gradient overflowed, which waits for the whole step.
Here the step is always made and, where a gradient was not finite, taken back on the device.
"""

import warnings

import torch
from torch.optim import Optimizer

from dali_train.config import PrecisionConfig

_AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_tf32(allowed: bool) -> None:
    """Whether GPUs compute float32 matrix products and convolutions in TensorFloat-32; for the whole process.

    Through torch's older interface: with the newer one, ``torch.backends.cuda.matmul.fp32_precision``, the compiler's
    readings of the older one fail (torch 2.15: ``_inductor/kernel/bmm.py``). Some versions recommend the newer one once.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


class Precision:
    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self._dtype = _AUTOCAST_DTYPE.get(config.dtype)
        self._device = device
        self.image_dtype = torch.float64 if config.dtype == "fp64" else None  # None: as they come
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=config.initial_scale, growth_interval=config.growth_interval, enabled=config.dtype == "fp16"
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def loss_scale(self) -> torch.Tensor:
        """The current scale, on the device where it lives (1 without a scaler)."""
        return self.scaler.scale(torch.ones((), device=self._device))

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> torch.Tensor:
        """Unscale, clip and step; in fp16 a step with gradients that are not finite changes nothing but the scale.

        (A correction of LAMB's bias, where it is on, counts such a step all the same: its counter is on the host.)

        Returns:
            The global 2-norm of the gradients before clipping, 0-dimensional, on the device; not finite if the
            step was skipped.
        """
        self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, norm)
        if not self.scaler.is_enabled():
            optimizer.step()
            return norm
        finite = norm.isfinite()
        changing = self._changing(optimizer)
        with torch.no_grad():
            # A copy of each in a few kernels: multiplied by one.
            before = dict(zip(changing, torch._foreach_mul(changing, 1.0), strict=True))
            optimizer.step()
            zero = torch.zeros((), device=self._device)  # the first step has made the moments: as good as zero before
            for tensor in self._changing(optimizer):
                torch.where(finite, tensor, before.get(tensor, zero), out=tensor)
        self.scaler.update()
        return norm

    @staticmethod
    def _changing(optimizer: Optimizer) -> list[torch.Tensor]:
        """What a step of `optimizer` writes to on the device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [*parameters, *(value for p in parameters for value in optimizer.state.get(p, {}).values())]
