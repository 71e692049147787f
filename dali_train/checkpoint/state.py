"""Capturing and restoring the state of model and optimizer.

Tensors are stored under the parameter's name, not the optimizer's number for it, so that any layout of ranks can read
them. Settings are not stored: they come from the config.

Weights go through torch's functions for distributed state, which handle wrappers and shards. The optimizer's state does
not: torch's function first takes a step with zero gradients, which is counted, requires state for every parameter, and
casts all of it to the parameter's dtype.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from dali_train.checkpoint.load import Checkpoint
from dali_train.checkpoint.storage import CheckpointError, Tensors
from dali_train.errors import ConfigError
from dali_train.parallel.mesh import laid_out_like
from dali_train.parallel.parallelize import Parallel
from dali_train.training.precision import Precision


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    parallel: Parallel | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return (tensors, plain values) of the run, as `restore` takes them. All ranks call this together.

    Args:
        parallel: how the model is parallelized; None: not at all.
        group: all ranks, for host memory; needed if the model is parallelized.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: Tensors = {}
    numbers: dict[str, float] = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state.{names[parameter]}.{key}"] = value
            elif value is not None:
                numbers[f"state.{names[parameter]}.{key}"] = value
    if parallel is not None and parallel.stages:  # each has its own
        everyone = [numbers] * dist.get_world_size(group)
        dist.all_gather_object(everyone, numbers, group=group)
        numbers = {name: number for part in everyone for name, number in part.items()}
    # What an optimizer keeps in a group besides its settings, such as LAMB's count of steps.
    groups = [
        {
            key: float(value) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in optimizer.defaults and key != "params"
        }
        for group in optimizer.param_groups
    ]
    saved = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
    weights: Tensors = get_model_state_dict(model)  # type: ignore[assignment]  # its other kinds of values are FSDP1's
    values = {"optimizer": saved, "scaler": precision.scaler.state_dict()}
    return {"model": weights, "optimizer": tensors}, values


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    parallel: Parallel | None = None,
) -> list[str]:
    """Restore the weights, optimizer state and counters of `checkpoint`; learning rates stay those of the config.

    Return warnings about state of another optimizer or precision, which cannot be restored.

    Raises:
        ConfigError: the weights do not fit the model.
        CheckpointError: the state is not that of a run.
    """
    restore_weights(checkpoint, model, parallel=parallel)
    warnings = _restore_optimizer(checkpoint, model, optimizer)
    scaler = checkpoint.values.get("scaler")
    if scaler and precision.scaler.is_enabled():
        if missing := precision.scaler.state_dict().keys() - scaler.keys():
            raise CheckpointError(f"{checkpoint.path}: values.scaler has no {min(missing)}, as that of a run has")
        precision.scaler.load_state_dict(scaler)
    return warnings


def restore_weights(
    checkpoint: Checkpoint, model: nn.Module, section: str = "model", *, parallel: Parallel | None = None
) -> None:
    """Restore the weights in `section` of a checkpoint: "model", or "ema" for their moving average.

    Raises:
        ConfigError: the weights do not fit the model.
    """
    current: Mapping[str, torch.Tensor] = get_model_state_dict(model)  # type: ignore[assignment]
    saved = checkpoint.state.get(section, {})
    theirs, ours = ({name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (saved, current))
    if parallel is not None and parallel.shapes is not None:  # of the complete model
        ours = parallel.shapes
    misfits = [
        f"{name} {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if misfits:
        more = f" and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise ConfigError(
            f"the weights of {checkpoint.path} do not fit the model of this config: {'; '.join(misfits[:3])}{more}. "
            "Set model.name and model.kwargs as they were, or choose another run.dir to start at step 0"
        )
    weights: dict[str, Any] = {name: laid_out_like(tensor, saved[name]) for name, tensor in current.items()}
    set_model_state_dict(model, weights)


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> list[str]:
    saved = checkpoint.values.get("optimizer", {"class": "none", "groups": [], "numbers": {}})
    if saved["class"] != type(optimizer).__name__:
        return [f"{checkpoint.path} holds the state of {saved['class']}: {type(optimizer).__name__} starts without one"]
    groups = optimizer.state_dict()["param_groups"]
    # Another grouping of the parameters, as with optimizer.exclude_vectors changed: the counts of all groups are equal.
    counters = saved["groups"] if len(saved["groups"]) == len(groups) else saved["groups"][:1] * len(groups)
    for group, counter in zip(groups, counters, strict=False):
        group.update({key: value for key, value in counter.items() if key not in group})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})

    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter in group_of}
    weights = checkpoint.state["model"]
    for name, value in (*checkpoint.state.get("optimizer", {}).items(), *saved["numbers"].items()):
        owner, _, key = name.removeprefix("state.").rpartition(".")
        if owner not in parameters:  # it is not trained any more
            continue
        parameter = parameters[owner]
        group = group_of[parameter]
        if isinstance(value, torch.Tensor):
            # As torch does: counts of steps stay on the host, unless the kernels read them on the device.
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            if not on_host:
                value = laid_out_like(parameter, value).to(parameter.device)
            if key != "step" and value.dtype == weights[owner].dtype:  # another precision.dtype than the checkpoint's
                value = value.to(parameter.dtype)
        optimizer.state[parameter][key] = value
    return []
