"""What a checkpoint holds of a run, and whether it belongs to the run that wants to go on from it.

Tensors stand under the parameter's name, not the optimizer's number for it, so that they can be read whatever the
layout of ranks. Settings are not in it: they come from the config. What the config said about the training is, as a
fingerprint, so that going on with another recipe is a decision and not an accident.
"""

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dali_train.checkpoint import Checkpoint, Tensors
from dali_train.config import Config, ConfigError
from dali_train.data.index import Split
from dali_train.data.loader import Loader
from dali_train.precision import Precision

# Settings that a run may change on its way: they change how it is computed, watched or kept, not what is computed.
# A setting that is not listed belongs to the recipe.
_FREE_SECTIONS = {"hooks", "parallel"}
_FREE = {
    # Where it matters, with data.reader stream, data.shuffle_buffer is compared by the reader itself.
    "data": {
        "root", "device", "num_threads", "prefetch", "hw_decoder_load", "read_ahead_mb", "local_copy", "stream_url",
        "shuffle_buffer", "eval_resize", "eval_resize_to", "eval_size",
    },
    "model": {"channels_last", "compile", "cuda_graphs", "activation_checkpointing"},
    "precision": {"tf32"},
    "run": {
        "dir", "max_steps", "max_seconds", "eval_every_epochs", "checkpoint_every_steps", "keep_checkpoints",
        "keep_best_checkpoints", "resume", "accept_changed_recipe", "device", "backend", "deterministic",
        "max_nonfinite_steps",
    },
}  # fmt: skip


def capture(model: nn.Module, optimizer: Optimizer, precision: Precision) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """(tensors, plain values) of the run, as `restore` takes them."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"state.{names[parameter]}.{key}": value for parameter, values in optimizer.state.items() for key, value in values.items()
    }
    # LAMB counts its steps once a group, as a number or as a tensor, according to timm's version.
    steps = [float(group["step"]) if "step" in group else None for group in optimizer.param_groups]
    return {"model": model.state_dict(), "optimizer": moments}, {"group_steps": steps, "scaler": precision.scaler.state_dict()}


def capture_loader(loader: Loader, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Plain values, if the loader has any: {"loader": its state on each rank of `group`}. All ranks call this together."""
    state = loader.state()
    if not state:
        return {}
    states = [state]
    if group is not None:
        states *= dist.get_world_size(group)
        dist.all_gather_object(states, state, group=group)
    return {"loader": states}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
    """Put the weights, moments and counters of `checkpoint` in place. Rates and the like stay those of the config."""
    model.load_state_dict(checkpoint.state["model"])
    numbers = {parameter: number for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    by_name = {f"state.{name}": parameter for name, parameter in model.named_parameters() if parameter in numbers}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.state.get("optimizer", {}).items():
        prefix, _, key = name.rpartition(".")
        parameter = by_name[prefix]
        # In the parameter's memory format, as LAMB makes it itself: a norm's last bits depend on the order of its summands.
        moment = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)
        state.setdefault(numbers[parameter], {})[key] = moment
    groups = optimizer.state_dict()["param_groups"]
    for group, steps in zip(groups, checkpoint.values["group_steps"], strict=True):
        if steps is not None:
            group["step"] = int(steps)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    precision.scaler.load_state_dict(checkpoint.values["scaler"])


def recipe(config: Config, split: Split) -> dict[str, Any]:
    """Everything that decides what is computed, as plain JSON values by field name: the config's part and the dataset."""
    fields = {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section, values in asdict(config).items()
        if section not in _FREE_SECTIONS
        for name, value in values.items()
        if name not in _FREE.get(section, set())
    }
    if config.data.shuffle != "block":  # then they decide nothing, and older checkpoints know nothing of them
        del fields["data.block_images"], fields["data.window_blocks"]
    # Sizes and labels in the order of the index: what crops, targets and sample order follow from. Where the shards lie
    # and how they are cut does not matter.
    columns = hashlib.sha256()
    for name in ("label", "height", "width"):
        columns.update(np.ascontiguousarray(split.rows[name]).data)
    return {**fields, "dataset": f"{len(split)} images, labels and sizes {columns.hexdigest()[:16]}"}


def check_recipe(checkpoint: Checkpoint, current: dict[str, Any], *, accept: bool) -> list[str]:
    """Warnings about what changed since `checkpoint`, where that is accepted.

    Raises:
        ConfigError: the recipe differs and that is not accepted; the message names the difference.
    """
    saved = checkpoint.values["recipe"]
    absent = "absent"
    changes = [
        f"{name} {saved.get(name, absent)} -> {current.get(name, absent)}"
        for name in sorted({*saved, *current})
        if saved.get(name, absent) != current.get(name, absent)
    ]
    if not changes:
        return []
    difference = f"the recipe is not the one of {checkpoint.path}: " + "; ".join(changes)
    if not accept:
        raise ConfigError(
            f"{difference}. Set it back, choose another run.dir to start anew, or set run.accept_changed_recipe true to go on "
            "with the change"
        )
    return [f"{difference}; going on with the change as run.accept_changed_recipe says"]
