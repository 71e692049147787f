"""The optimizer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dali_train.config.check import OVER_0, UNDER_1, NotNegative, Positive, Rule, section

Beta = Annotated[float, Rule("a number from 0 to under 1, e.g. 0.9,0.999", 0, UNDER_1)]


@section("optimizer")
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """One of timm's optimizers; by default LAMB (You et al., arXiv 1904.00962)."""

    lr: Positive
    """Peak learning rate, at a global batch of 256 if it is scaled."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of lr with batch.global_batch: by global_batch / 256, or by its square root."""
    name: str = "lamb"
    """An optimizer that timm knows (timm.optim.list_optimizers()): lamb, adamw, sgd, lars, muon, ..."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer's constructor, such as momentum or nesterov for sgd, bias_correction for lamb. On
    the command line each is a setting: --optimizer.kwargs.momentum 0.8 sets it, and none instead of 0.8 removes it."""
    weight_decay: NotNegative = 0.0
    """Weight decay, which LAMB adds to its update before the trust ratio."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: NotNegative = 1e-6
    """Added to the root of the second moment, so that the update stays finite."""
    exclude_vectors: bool = True
    """No weight decay and no trust ratio on biases, norms and other vectors. False: both on all parameters."""
    layer_decay: Annotated[float, Rule("a factor over 0 and up to 1", OVER_0, 1)] | None = None
    """Layer-wise decay of the learning rate, for fine-tuning: each layer has this times the rate of the next one, and
    the classifier the full rate. With exclude_vectors, parameters that the model declares as free of weight decay, such
    as position embeddings, have none either. None: one rate for all."""
    clip_grad_norm: Annotated[float, Rule("a norm over 0", OVER_0)] | None = 1.0
    """Largest global 2-norm of the gradient; None: no clipping."""
