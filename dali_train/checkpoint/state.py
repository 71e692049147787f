"""The state of a run in a checkpoint: starting a run from it, capturing it, and restoring model and optimizer.

Tensors are stored under the parameter's name, not the optimizer's number for it, so that any layout of ranks can read
them. Settings are not stored: they come from the config.

Weights go through torch's functions for distributed state, which handle wrappers and shards. The optimizer's state does
not: torch's function first takes a step with zero gradients, which is counted, requires state for every parameter, and
casts all of it to the parameter's dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from dali_train.checkpoint.fingerprint import (
    EvaluationDigests,
    Fingerprint,
    WeightDigests,
    evaluation_digest,
    recipe_digest,
    with_recipe,
    written,
)
from dali_train.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    OptimizerValues,
    RunValues,
    Tensors,
    find_checkpoint,
    load_checkpoint,
)
from dali_train.checkpoint.recipe import (
    check_recipe,
    is_branch,
    keep_digests_of_lost_files,
    recipe,
    saved_recipe,
)
from dali_train.checkpoint.run_directory import named_checkpoint, saved_top1
from dali_train.config import ModelConfig
from dali_train.errors import ConfigError
from dali_train.parallel.mesh import laid_out_like
from dali_train.parallel.parallelize import Parallel
from dali_train.runtime.process_group import on_rank_0
from dali_train.runtime.status import METRICS, read_events
from dali_train.training.build import RunPlan
from dali_train.training.precision import Precision
from dali_train.training.pretrained import (
    LOCAL_DIRECTORY,
    class_names_beside,
    is_path,
    match_classes,
    read_weights_of,
)
from dali_train.training.trainer import Trainer


@dataclass(kw_only=True)
class Progress:
    """How far a run is, and what is known of the steps done: read from the checkpoint, continued by the training loop,
    saved in the next checkpoint."""

    recipe: dict[str, Any]
    step: int = 0  # optimizer steps done
    saved_step: int = 0  # of the newest checkpoint
    fingerprint: Fingerprint  # of the steps done
    weights: WeightDigests = field(default_factory=dict)  # of the checkpoints so far; complete on rank 0
    accuracies: list[float] = field(default_factory=list)  # top-1 of the evaluations so far, in order, fractions
    evaluations: EvaluationDigests = field(default_factory=dict)
    evaluation_is_pending: bool = False  # the checkpoint has no accuracy yet, and may be due for evaluation

    @property
    def best_top1(self) -> float | None:
        """The best top-1 so far, a fraction; None: never evaluated."""
        return max(self.accuracies, default=None)


@dataclass(kw_only=True)
class Start:
    """Where the state of model and optimizer comes from: a checkpoint, model.weights, or neither."""

    checkpoint: Checkpoint | None = None  # with a copy of the weights in host memory; see `release`
    weights: Tensors | None = None  # at step 0, of the run or checkpoint that model.weights names
    warnings: list[str] = field(default_factory=list)

    @property
    def seeding(self) -> str | None:
        """The dropout seeding of the checkpoint's run; None without a checkpoint."""
        return self.checkpoint.values.dropout if self.checkpoint is not None else None

    def restore(self, trainer: Trainer) -> None:
        """Restore weights, optimizer state, loss scale and averages, if there is a checkpoint.

        Raises:
            ConfigError: the weights do not fit the model.
        """
        if self.checkpoint is None:
            return
        self.warnings += restore(self.checkpoint, trainer.model, trainer.optimizer, trainer.precision, trainer.parallel)
        trainer.begin_averages()
        if trainer.ema is not None and "ema" in self.checkpoint.state:
            trainer.ema.load(self.checkpoint.state["ema"])

    def release(self) -> None:
        """Free the memory of the checkpoint, once everything in it has been restored."""
        self.checkpoint = self.weights = None


def find_start(plan: RunPlan, group: dist.ProcessGroup | None) -> tuple[Start, Progress]:
    """Read the checkpoint that the run resumes from, if any. All ranks of `group` call this together.

    Raises:
        ConfigError: its recipe differs and run.accept_changed_recipe is false, or run.resume or model.weights is not a
            checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    config = plan.config
    current = recipe(config, plan.split.manifest)
    checkpoint, warnings = find_checkpoint(config.run.resume, plan.directory / "checkpoints", group)
    if checkpoint is None:
        weights = first_weights(config.model, plan.class_names)
        fingerprint = Fingerprint.of(plan, written(recipe_digest(current), 0) if config.data.reader != "dali" else "")
        return Start(weights=weights, warnings=warnings), Progress(recipe=current, fingerprint=fingerprint)
    # Other hosts may not see the checkpoint, and evaluate if it has no accuracy.
    read_evaluation = partial(own_evaluation, checkpoint, plan.directory)
    is_own, top1, evaluation = on_rank_0(read_evaluation, group)
    saved = saved_recipe(checkpoint.values, checkpoint.path)
    record = checkpoint.values.record
    keep_digests_of_lost_files(saved, current)
    if not is_own and is_branch(saved, current, config, step=checkpoint.step, num_images=plan.num_images):
        record = with_recipe(record, saved, current)  # these steps are also the first of a run with this recipe
    else:
        warnings += check_recipe(
            saved,
            current,
            source=str(checkpoint.path),
            remedy="choose another run.dir",
            accept=config.run.accept_changed_recipe,
        )
    progress = Progress(
        recipe=current,
        step=checkpoint.step,
        saved_step=checkpoint.step,
        fingerprint=Fingerprint.of(plan, record, checkpoint.step),
        weights=checkpoint.values.weights,
    )
    if is_own:
        progress.accuracies = [*checkpoint.values.epoch_accuracies, *([top1] if top1 is not None else [])]
        progress.evaluation_is_pending = top1 is None
        progress.evaluations = checkpoint.values.evaluations | evaluation
    return Start(checkpoint=checkpoint, warnings=warnings), progress


def own_evaluation(checkpoint: Checkpoint, run_dir: Path) -> tuple[bool, float | None, EvaluationDigests]:
    """Return whether `checkpoint` belongs to the run in `run_dir`, and if it does, its top-1 and the digest of its
    evaluation; None and {} if it was not evaluated."""
    directory = run_dir / "checkpoints"
    if checkpoint.path.resolve().parent != directory.resolve():  # however run.resume spells it
        return False, None, {}
    top1 = saved_top1(checkpoint.path)
    if top1 is None:
        return True, None, {}
    step = checkpoint.step
    lines = [event for event in read_events(run_dir / METRICS) if event["event"] == "eval" and event["step"] == step]
    return True, top1, {str(step): evaluation_digest(line) for line in lines}


def capture_run(trainer: Trainer, group: dist.ProcessGroup | None) -> tuple[dict[str, Tensors], RunValues]:
    """Return (tensors by section and name, plain values), for a checkpoint. All ranks of `group` call this together."""
    state, values = capture(trainer.model, trainer.optimizer, trainer.precision, trainer.parallel, group)
    if trainer.ema is not None:
        state["ema"] = trainer.ema.state()
    return state, dataclass_replace(values, dropout=trainer.dropout)


def first_weights(model: ModelConfig, class_names: Sequence[str], *, evaluates: bool = False) -> Tensors | None:
    """Return the weights, or their moving average, if model.weights is a run or a checkpoint, or a file that knows its
    class names; None for anything else, which `create_pretrained` reads.

    Args:
        class_names: of the dataset, see `match_classes`.
        evaluates: see there.

    Raises:
        ConfigError, CheckpointError: model.weights is another kind of directory, is damaged, or has other classes.
    """
    weights = model.weights
    if weights is not None and weights.startswith(LOCAL_DIRECTORY):
        file = str(Path(weights.removeprefix(LOCAL_DIRECTORY)) / "model.safetensors")
        theirs: Sequence[str] = class_names_beside(weights)
        if sorted(theirs) == sorted(class_names) and [*theirs] != [*class_names]:
            raise ConfigError(
                f"model.weights {weights}: its classes have another order than the dataset's: use {file}, whose "
                "classes are matched by name"
            )
    if weights is None or not is_path(weights):
        return None
    if Path(weights).is_dir():
        checkpoint = load_checkpoint(named_checkpoint(Path(weights), "model.weights"))
        tensors = checkpoint.state.get("ema") or checkpoint.state["model"]
        theirs = checkpoint.values.class_names
    else:
        theirs = class_names_beside(weights)
        if not theirs:
            return None
        tensors = read_weights_of(model.name, weights, len(theirs), model.kwargs, "model.weights")
    return match_classes(tensors, model.name, theirs, class_names, f"model.weights {weights}", evaluates=evaluates)


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    parallel: Parallel | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensors], RunValues]:
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
            if key not in optimizer.defaults and key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
    saved = OptimizerValues(kind=type(optimizer).__name__, groups=tuple(groups), numbers=numbers)
    weights: Tensors = get_model_state_dict(model)  # type: ignore[assignment]  # its other kinds of values are FSDP1's
    values = RunValues(optimizer=saved, scaler=precision.scaler.state_dict())
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
    scaler = checkpoint.values.scaler
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
    saved_shapes, shapes = ({name: list(tensor.shape) for name, tensor in t.items()} for t in (saved, current))
    if parallel is not None and parallel.shapes is not None:  # of the complete model
        shapes = parallel.shapes
    misfits = [
        f"{name} {saved_shapes.get(name, 'absent')} there, {shapes.get(name, 'absent')} here"
        for name in sorted(saved_shapes.keys() | shapes.keys())
        if saved_shapes.get(name) != shapes.get(name)
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
    saved = checkpoint.values.optimizer or OptimizerValues(kind="none")
    if saved.kind != type(optimizer).__name__:
        return [f"{checkpoint.path} holds the state of {saved.kind}: {type(optimizer).__name__} starts without one"]
    groups = optimizer.state_dict()["param_groups"]
    # If the parameters are grouped in another way, as when optimizer.exclude_vectors has changed, any group's counts
    # serve: those of all groups are equal.
    counters = saved.groups if len(saved.groups) == len(groups) else saved.groups[:1] * len(groups)
    for group, counter in zip(groups, counters, strict=False):
        group.update({key: value for key, value in counter.items() if key not in group})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})

    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter in group_of}
    weights = checkpoint.state["model"]
    for name, value in (*checkpoint.state.get("optimizer", {}).items(), *saved.numbers.items()):
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
