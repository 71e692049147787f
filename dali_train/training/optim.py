"""The optimizer with its parameter groups, and the moving average of the weights."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_class,
    get_optimizer_info,
    list_optimizers,
    muon,
    param_groups_layer_decay,
)
from timm.optim._optim_factory import OptimInfo, default_registry
from timm.utils.agc import adaptive_clip_grad
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from dali_train.config import EmaConfig, OptimizerConfig
from dali_train.config.check import close_names, lookup
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import Shardwise, laid_out_like, local
from dali_train.training.pretrained import classifiers, matching_names

GradientTransform = Callable[[Sequence[torch.Tensor], torch.Tensor], object]
"""Changes the gradients of an optimizer's parameters in place. It gets the parameters in the optimizer's order, and the
global 2-norm of their gradients, 0-dimensional."""


def _orthogonalise_in_own_dtype(optimizer: Optimizer) -> None:
    """Let the steps of this Muon compute orthogonal factors in the dtype of the update; timm's Muon stays as it is.

    timm's iteration computes in bfloat16. It multiplies small singular values by up to 500, and so it does the
    rounding of a gradient that other ranks have summed in another order: after 7 steps of a small ViT in float32 on 1
    and on 4 ranks, weights differ by 1.5e-2 in bfloat16, and by less than 2e-5 in float32.
    """
    iterate = muon.zeropower_via_newtonschulz
    step = optimizer.step

    def orthogonalise(update: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        return iterate(update, *arguments, **(named | {"dtype": update.dtype}))

    def step_with_it(closure: Any = None) -> Any:
        muon.zeropower_via_newtonschulz = orthogonalise  # timm offers no argument for it
        try:
            return step(closure)
        finally:
            muon.zeropower_via_newtonschulz = iterate

    optimizer.step = step_with_it  # type: ignore[method-assign]


_REGISTERED = set[str]()
"""Optimizers that timm lacks."""


def register_optimizer(
    name: str,
    optimizer_class: type[Optimizer],
    *,
    num_betas: int = 2,
    defaults: dict[str, Any] | None = None,
) -> None:
    """Make an optimizer that timm lacks available as optimizer.name `name`.

    Args:
        optimizer_class: takes parameter groups and lr, and weight_decay, betas and eps if its constructor has them.
            A step may change only parameters, and tensors or numbers in ``state`` and in the groups, whose
            ``param_names`` are the names of their parameters. On weights that
            are sharded over ranks it may only use the operations of `Shardwise`.
        num_betas: the number of `betas` it takes; optimizer.betas has two.
        defaults: more arguments of the constructor, which optimizer.kwargs override.
    """
    parameters = inspect.signature(optimizer_class.__init__).parameters
    _REGISTERED.add(name)
    default_registry.register(
        OptimInfo(
            name=name,
            opt_class=optimizer_class,
            has_eps="eps" in parameters,
            has_betas="betas" in parameters,
            has_momentum="momentum" in parameters,
            num_betas=num_betas,
            defaults=defaults,
        )
    )


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Return the optimizer that `config` names, for the parameters of `model`.

    Since 1.0.31 timm's LAMB uses a multi-tensor pass on GPUs, where torch has kernels for it, and updates tensor by
    tensor on a CPU, which is faster there (ViT-B/16 on 2 cores: 0.64 against 2.4 s). Earlier versions always update
    tensor by tensor.

    Muon is for matrices between layers; timm updates vectors and embeddings by AdamW, and so the classifier is here, as
    Muon's author advises (https://kellerjordan.github.io/posts/muon).

    Some timm optimizers clip by default; this is turned off, because the trainer clips. `always_adapt` applies the
    trust ratio to parameters without weight decay too, as the LAMB of the paper and of ColossalAI does; vectors that
    are excluded from weight decay get neither.

    Raises:
        ConfigError: timm has no such optimizer, or it cannot be created with these arguments.
    """
    try:
        arguments = _arguments(config)
        by_layer = config.layer_decay
        groups = _groups(model, config) if by_layer is None else _groups_by_layer(model, config, by_layer)
        if issubclass(get_optimizer_class(config.name, bind_defaults=False), muon.Muon):
            groups = _with_classifier_apart(model, groups)
        if "weight_decay" in _accepted(config.name):
            arguments["weight_decay"] = config.weight_decay
        if config.name in _REGISTERED:  # timm's factory passes weight_decay to every class, and a momentum of its own
            optimizer = get_optimizer_class(config.name)(groups, lr=config.lr, **arguments)
        else:
            optimizer = create_optimizer_v2(groups, config.name, lr=config.lr, **arguments)
        if isinstance(optimizer, muon.Muon):
            _orthogonalise_in_own_dtype(optimizer)
    except ConfigError:
        raise
    except (
        TypeError,
        ValueError,
        AssertionError,
        ImportError,
        RuntimeError,
    ) as error:  # timm's checks are of all these kinds
        raise ConfigError(
            f"optimizer.name {config.name} cannot be created with optimizer.kwargs {config.kwargs}: {error}"
        ) from error
    if more := optimizer.state_dict().keys() - {"state", "param_groups"}:  # Kron's random numbers
        raise ConfigError(
            f"optimizer.name is {config.name}, which keeps {min(more)}, and checkpoints cannot store that: choose "
            "another"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["param_names"] = [names[parameter] for parameter in group["params"]]
    return optimizer


def make_clip(optimizer: Optimizer, config: OptimizerConfig, cfg: dict[str, Any] | None) -> GradientTransform | None:
    """Return the function that clips, or changes otherwise, the gradients of the parameters of `optimizer`; None: they
    stay as they are.

    Args:
        cfg: timm's description of the model, which names the classifier; None: there is none.
    """
    if config.clip_grad_norm is None and config.clip_mode == "norm":
        return None
    return gradient_transform_of(config)(optimizer, config.clip_grad_norm, cfg)


def _clip_adaptively(optimizer: Optimizer, bound: float, cfg: dict[str, Any] | None) -> GradientTransform:
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    adapts = [name.rpartition(".")[0] not in classifiers(cfg) for name in names]
    return lambda parameters, norm: adaptive_clip_grad(compress(parameters, adapts), bound)


MakeTransform = Callable[[Optimizer, Any, dict[str, Any] | None], GradientTransform]
GRADIENT_TRANSFORMS: dict[str, MakeTransform] = {
    "norm": lambda optimizer, bound, cfg: lambda parameters, norm: clip_grads_with_norm_(parameters, bound, norm),
    "value": lambda optimizer, bound, cfg: lambda parameters, norm: clip_grad_value_(parameters, bound),
    "agc": _clip_adaptively,
}
"""What optimizer.clip_mode names: each makes the function that changes the gradients of every step, given the
optimizer, optimizer.clip_grad_norm (None only for rows of a config file), and timm's description of the model. A config
file can add a row."""


def gradient_transform_of(config: OptimizerConfig) -> MakeTransform:
    """Return the row of `GRADIENT_TRANSFORMS` that optimizer.clip_mode names.

    Raises:
        ConfigError: there is none.
    """
    return lookup(GRADIENT_TRANSFORMS, "optimizer.clip_mode", config.clip_mode)


def resolved_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments with which `optimizer` was created, timm's and its own defaults included, as JSON values.

    Some of timm's defaults decide the result and are in no config: for sgd momentum 0.9 and nesterov.
    """
    return {
        name: value if isinstance(value, bool | int | float | str | list | tuple | None) else str(value)
        for name, value in optimizer.defaults.items()
    }


def check_shardwise(model: nn.Module, config: OptimizerConfig, layout: Layout) -> None:
    """Check, by a trial step, that the optimizer supports weights of `model` that `layout` shards.

    Raises:
        ConfigError: it needs whole weights.
    """
    if not layout.shards_weights:
        return
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    shapes = {tuple(min(size, 256) for size in p.shape) for p in model.parameters() if p.requires_grad}
    shards = [
        DTensor.from_local(torch.zeros(shape), mesh, [Shard(0) if shape else Replicate()], run_check=False)
        for shape in shapes
    ]
    small = nn.ParameterList(shards)
    for parameter, gradient in zip(small, shards, strict=True):
        parameter.grad = gradient
    optimizer = make_optimizer(small, replace(config, layer_decay=None, groups=()))
    try:
        with Shardwise():
            optimizer.step()
    except NotImplementedError as error:
        raise ConfigError(
            f"optimizer.name is {config.name}, which needs whole weights ({error}), but the layout is "
            f"{layout.describe()}: choose lamb, adamw, sgd or another optimizer that uses only element-wise operations "
            "and norms, or split the model by parallel.pipeline alone"
        ) from error


def check_groups(names: Iterable[str], config: OptimizerConfig) -> None:
    """Check that each row of optimizer.groups matches one of the `names` of all parameters of the model.

    Raises:
        ConfigError: a row matches none.
    """
    known = list(names)
    for pattern, _, _ in config.groups:
        matching_names(known, pattern, "optimizer.groups")


def _groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return groups of parameters with the same factor of the learning rate, which the trainer multiplies by their
    lr_scale, and the same weight decay."""
    tokens = _without_decay(model) if config.exclude_vectors == "and-tokens" else frozenset[str]()
    decayed = (1.0, config.weight_decay)
    excluded = (1.0, 0.0)
    members: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list, {decayed: []})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_excluded = (config.exclude_vectors and parameter.ndim <= 1) or name in tokens
            kind = excluded if is_excluded else decayed
            row = next((row for row in config.groups if fnmatchcase(name, row[0])), None)
            if row is not None:
                kind = row[1], config.weight_decay * row[2]
            members[kind].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale}
        for (scale, decay), parameters in members.items()
    ]


def _without_decay(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that a timm model, or a stage of one, declares as free of weight decay."""
    timm_model: Any = model
    return frozenset(timm_model.no_weight_decay() if hasattr(model, "no_weight_decay") else ())


def _groups_by_layer(model: nn.Module, config: OptimizerConfig, layer_decay: float) -> list[dict[str, Any]]:
    """Return timm's groups; the trainer multiplies the learning rate by their lr_scale.

    Raises:
        ConfigError: the model does not declare its layers.
    """
    if not hasattr(model, "group_matcher"):
        raise ConfigError(
            f"optimizer.layer_decay is {layer_decay}, but the model ({type(model).__name__}) does not declare its "
            "layers: leave optimizer.layer_decay out, or choose a timm model with a group_matcher, such as a ViT or "
            "ResNet"
        )
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        model, config.weight_decay, _without_decay(model), layer_decay=layer_decay
    )
    return groups if config.exclude_vectors else [group | {"weight_decay": config.weight_decay} for group in groups]


def _with_classifier_apart(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `groups` with the classifiers' weights in groups of their own, which timm's Muon updates by AdamW."""
    prefixes = tuple(f"{name}." for name in classifiers(getattr(model, "pretrained_cfg", None)))
    of_classifier = {parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}
    return [
        group | {"params": parameters, "use_fallback": apart}
        for group in groups
        for apart in (False, True)
        if (parameters := [p for p in group["params"] if (p in of_classifier) == apart])
    ]


def _arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of the optimizer besides learning rate and weight decay.

    Raises:
        ConfigError: the optimizer does not exist, or does not take the arguments in the config.
    """
    known = list_optimizers()
    if config.name not in known:
        close = close_names(config.name, known, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.optim.list_optimizers() lists them"
        raise ConfigError(f"optimizer.name is {config.name}, which timm does not have: {hint}")
    info = get_optimizer_info(config.name)
    if info.second_order:
        raise ConfigError(
            f"optimizer.name is {config.name}, which needs second derivatives, which the trainer does not compute: "
            "choose another"
        )
    defaults: dict[str, Any] = {
        "betas": config.betas,
        "eps": config.eps,
        "always_adapt": not config.exclude_vectors,
        "max_grad_norm": None,
    }
    if info.num_betas != len(config.betas):  # from kwargs, or timm's defaults
        del defaults["betas"]
    accepted = _accepted(config.name)
    if config.weight_decay and "weight_decay" not in accepted:
        raise ConfigError(
            f"optimizer.weight_decay is {config.weight_decay:g}, which {config.name} does not take: leave it out"
        )
    for name in ("betas", "eps"):
        value = getattr(config, name)
        if value != getattr(OptimizerConfig, name) and (name not in accepted or name not in defaults):
            other = (
                f"takes {info.num_betas}: set them in optimizer.kwargs and" if name in accepted else "does not take:"
            )
            raise ConfigError(f"optimizer.{name} is {value}, which {config.name} {other} leave it out")
    for name in config.kwargs:
        if name not in accepted:
            close = close_names(name, accepted, n=3)
            remedy = f"use {', '.join(close)}" if close else "leave it out, as --optimizer.kwargs {} does"
            raise ConfigError(f"optimizer.kwargs has {name}, which {config.name} does not take: {remedy}")
        if name in ("lr", "weight_decay") or (name in ("betas", "eps") and name in defaults):
            raise ConfigError(f"optimizer.kwargs has {name}: set optimizer.{name} instead")
    return {name: value for name, value in defaults.items() if name in accepted} | config.kwargs


def _accepted(name: str) -> set[str]:
    """Return the names of the arguments of an optimizer's constructor."""
    return inspect.signature(get_optimizer_class(name, bind_defaults=False).__init__).parameters.keys() - {
        "self",
        "params",
    }


def ema_decay(config: EmaConfig, step: int, total_steps: int) -> float:
    """Return the decay applied at the end of optimizer step number `step` (from 0) of `total_steps`."""
    assert config.decay is not None
    if step == 0:
        return 0.0
    if config.warmup:
        return min(1 - (1 + step) ** (-2 / 3), config.decay)
    return config.decay if config.power == 0 else config.decay * ((1 + step) / total_steps) ** config.power


class Ema:
    """A moving average of everything in the model's state dict: weights and buffers. Integers are copied.

    It is a function of the step and of tensors that checkpoints hold. The averages have the placements of the model's
    tensors, for all kinds of parallelism. The update rule is that of timm's ModelEmaV3, which keeps a copy of the
    module instead.

    Args:
        model: not wrapped, on its device, with the weights that the run starts or resumes from.
        total_steps: of the run's schedule, for ema.power.
    """

    def __init__(self, model: nn.Module, config: EmaConfig, total_steps: int) -> None:
        self._config, self._total_steps = config, total_steps
        live = model.state_dict()  # the model's own tensors, which are only ever written in place
        self._averages = _copies(live)
        floats = [name for name, tensor in live.items() if tensor.is_floating_point()]
        others = [name for name in live if name not in set(floats)]
        self._live_floats, self._live_others = (
            [local(live[name]) for name in floats],
            [local(live[name]) for name in others],
        )
        averages = self._averages
        self._floats, self._others = (
            [local(averages[name]) for name in floats],
            [local(averages[name]) for name in others],
        )

    @torch.no_grad()
    def begin(self) -> None:
        """Begin the average at the weights that the model has."""
        for averages, live in ((self._floats, self._live_floats), (self._others, self._live_others)):
            if live:
                torch._foreach_copy_(averages, live)

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Update the average at the end of optimizer step number `step` (from 0), without making the host wait.

        Returns:
            Whether weights and buffers were replaced by their average.
        """
        if (step + 1) % self._config.every_steps:
            return False
        torch._foreach_lerp_(self._floats, self._live_floats, 1 - ema_decay(self._config, step, self._total_steps))
        if self._others:
            torch._foreach_copy_(self._others, self._live_others)
        if self._config.lookahead:
            torch._foreach_copy_(self._live_floats, self._floats)
        return self._config.lookahead

    @contextmanager
    def weights_in(self, model: nn.Module) -> Iterator[None]:
        """Swap the averages into the memory of the model's weights for the duration of the context, so that compiled
        code and CUDA graphs stay valid."""
        before = _copies(model.state_dict())
        _copy(self._averages, model)
        try:
            yield
        finally:
            _copy(before, model)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages by the names of the weights, for a checkpoint."""
        return self._averages

    @torch.no_grad()
    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Take `averages` from a checkpoint."""
        for name, tensor in self._averages.items():
            tensor.copy_(laid_out_like(tensor, averages[name]))


@torch.no_grad()
def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with Shardwise():
        return {name: tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    weights = model.state_dict()
    with Shardwise():
        for name, tensor in weights.items():
            tensor.copy_(tensors[name])
