"""``dali-train eval``: accuracy on the validation split, of a run's checkpoint with the run's settings, or of any
weights."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dali_train.checkpoint.format import Checkpoint, load_chosen
from dali_train.checkpoint.recipe import recipe_settings
from dali_train.checkpoint.run_directory import resolve_checkpoint
from dali_train.checkpoint.state import restore_weights
from dali_train.checkpoint.trained_model import check_registered, first_weights, model_from
from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.config import Config
from dali_train.config.check import Extra, load_all
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.sample_recipe import changes_between
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch, LaunchOptions
from dali_train.runtime.process_group import host_group, joined
from dali_train.runtime.watchdog import Watchdog
from dali_train.training.build import RunPlan, build_evaluator, build_set_evaluators, prepare
from dali_train.training.cost import emulation_warning
from dali_train.training.metrics import EvaluationResult, Evaluator, evaluate_all
from dali_train.training.model import build_model, check_sizes
from dali_train.training.precision import Precision
from dali_train.training.pretrained import image_settings, is_path

BY_NORMALISATION = Extra[Callable[[nn.Module, Config, Split, torch.device, Layout, int], str]](
    "dali_train.extras.normalisations:describe_accuracies"
)
"""Of weights that do not tell theirs."""


def evaluate_checkpoint(
    config: Config, run_dir: Path | None, checkpoint: str | None, options: LaunchOptions, *, name: str = ""
) -> None:
    """Evaluate on all ranks together and print the result on rank 0.

    Args:
        run_dir: the run that the checkpoint belongs to; None: `checkpoint` is a path.
        name: what to call the checkpoint; empty: its path.
        checkpoint: ``best``, ``newest`` or a path; None: the best one, or the newest if none was evaluated.

    Raises:
        ConfigError: no checkpoint is named, or normalisation, model or class names of `config` differ from the run's.
        CheckpointError, DatasetError: see `load_chosen` and `Split`.
    """
    with joined_and_watched(options, config, run_dir or Path(config.run.dir)) as (launch, device):
        if run_dir is None and checkpoint is None:
            raise ConfigError(
                "name the run, `dali-train eval RUN`, a checkpoint, --checkpoint RUN/checkpoints/newest, or weights, "
                "--model.weights FILE_OR_NAME"
            )
        if run_dir is not None:
            check_registered(config.model, run_dir)
        path = resolve_checkpoint(run_dir or Path(config.run.dir), checkpoint)
        require_equal_ranks(config, device, host_group(launch), path)
        plan = prepare(config, launch, device, trains=False)
        loaded = load_chosen(path)
        warnings = differences_from_run(loaded, config, plan.split)
        model = model_from(loaded, config, plan.num_classes, device)
        check_sizes(model, config, trains=False)
        if launch.rank == 0 and (warning := emulation_warning(config, plan.num_classes, device)) is not None:
            print(f"warning: {warning}", flush=True)  # before the passes, which take long
        evaluator = _evaluator(plan)
        evaluators = {"": evaluator, **build_set_evaluators(plan)}
        autocast = Precision(config.precision, device).autocast
        results = evaluate_all(evaluators, model, autocast)
        averages = None
        if "ema" in loaded.state:
            restore_weights(loaded, model, "ema")
            averages = evaluate_all(evaluators, model, autocast)
    if launch.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}")
        print(f"{name or path}\nstep {loaded.step}: {_describe(results)}")
        if averages is not None:
            print(f"moving average of the weights: {_describe(averages)}")
            print("by class, of the moving average:")
        _print_classes(evaluator, plan.split)


def evaluate_weights(config: Config, chosen: Collection[str], options: LaunchOptions) -> None:
    """Evaluate model.weights without a run, on all ranks together; print the preprocessing and the result.

    A timm name brings its own architecture and preprocessing, as in timm's own validate.py; for a file, those of
    `config` are used.

    Args:
        chosen: names of settings that take precedence over timm's.

    Raises:
        ConfigError: the weights do not fit the model, or have other classes.
        CheckpointError, DatasetError: see `first_weights` and `Split`.
    """
    weights = config.model.weights
    assert weights is not None
    from_timm = not is_path(weights)
    if from_timm:
        config = _with_architecture(config, weights, chosen)
    with joined_and_watched(options, config, Path(config.run.dir)) as (launch, device):
        require_equal_ranks(config, device, host_group(launch))
        plan = prepare(config, launch, device, trains=False)
        tensors = first_weights(config.model, plan.class_names, evaluates=True)
        model = build_model(config, plan.num_classes, device, with_weights=True, tensors=tensors, keep_classifier=True)
        if from_timm:
            settings = image_settings(
                model, eval_size=config.data.eval_size if "data.eval_size" in chosen else None, for_tests=True
            )
            names = {f"data.{name}": value for name, value in settings.items()}
            config = config.replace({name: value for name, value in names.items() if name not in chosen})
        check_sizes(model, config, trains=False)
        evaluator = _evaluator(replace(plan, config=config))
        if launch.rank == 0:
            _print_preparation(model, config, "timm's for these weights" if from_timm else "the config's")
        for describe_accuracies in load_all([BY_NORMALISATION]):
            line = describe_accuracies(model, config, plan.split, device, plan.layout, plan.num_threads)
            if line and launch.rank == 0:
                print(line, flush=True)
        evaluators = {"": evaluator, **build_set_evaluators(replace(plan, config=config))}
        results = evaluate_all(evaluators, model, Precision(config.precision, device).autocast)
    if launch.rank == 0:
        print(f"{weights}: {_describe(results)}")
        _print_classes(evaluator, plan.split)


@contextmanager
def joined_and_watched(
    options: LaunchOptions, config: Config, directory: Path
) -> Iterator[tuple[Launch, torch.device]]:
    """Join the process group, see `joined`. If several ranks end with the same error, one of them prints it."""
    with joined(options, config) as (launch, device), ExitStack() as stack:
        # Only to handle errors at the end, without its threads.
        stack.push(Watchdog(launch, directory))
        yield launch, device


def _with_architecture(config: Config, weights: str, chosen: Collection[str]) -> Config:
    """Return `config` with timm's model of the name `weights`, keeping only the `chosen` model arguments."""
    name = weights.partition(".")[0] if ":" not in weights else config.model.name  # local-dir: says it itself
    kept = name == config.model.name and ":" not in weights
    arguments = {key: value for key, value in config.model.kwargs.items() if kept or f"model.kwargs.{key}" in chosen}
    changes = {"model.kwargs": arguments} | ({"model.name": name, "model.freeze": ()} if not kept else {})
    return config.replace({key: value for key, value in changes.items() if key not in chosen})


def _print_preparation(model: nn.Module, config: Config, whose: str) -> None:
    data = config.data
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (data.mean, data.std))
    cut = "of both sides" if data.eval_resize == "squash" else "of the short side"
    print(
        f"images: {data.eval_size} pixels {cut} at {data.eval_resized} (crop share "
        f"{data.eval_size / data.eval_resized:.3f}), {data.eval_filter}, mean {mean}, std {std} of 0 to 255; {whose}"
    )
    for difference in differences_from_training(config, model, "eval_size"):
        print(f"warning: {difference}")


def _evaluator(plan: RunPlan) -> Evaluator:
    evaluator = build_evaluator(plan, num_shown=1)  # for its predictions
    assert evaluator is not None  # `prepare` has opened the split
    return evaluator


def _print_classes(evaluator: Evaluator, split: Split) -> None:
    names = split.manifest.class_names or tuple(map(str, range(split.num_classes)))
    for line in evaluator.describe_classes(names):
        print(line)


def _describe(results: dict[str, EvaluationResult]) -> str:
    """Describe the result of the validation split, whose name is empty, and those of data.eval_sets, one a line."""
    return "\n".join(
        f"{name + ': ' if name else ''}top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}"
        f"{result.more}  ({result.num_images} images)"
        for name, result in results.items()
    )


# The evaluation size may differ from the run's; normalisation, model and classes may not.
_DECISIVE = ("model.name", "model.kwargs", "data.mean", "data.std")


def differences_from_run(checkpoint: Checkpoint, config: Config, split: Split) -> list[str]:
    """Return warnings about how `config` and the dataset differ from the run that wrote `checkpoint`, if accepted.

    Raises:
        ConfigError: there are such differences, and run.accept_changed_recipe is false.
    """
    saved = checkpoint.values.recipe
    current = recipe_settings(config)
    differences = changes_between({n: saved[n] for n in _DECISIVE if n in saved}, {n: current[n] for n in _DECISIVE})
    names = checkpoint.values.class_names
    if names and names != split.manifest.class_names:
        current_names = split.manifest.class_names
        number = next(
            (i for i, (a, b) in enumerate(zip(names, current_names, strict=False)) if a != b),
            min(len(names), len(current_names)),
        )
        differences.append(
            f"class {number} {[*names, None][number]} -> {[*current_names, None][number]} ({split.root})"
        )
    if not differences:
        return []
    message = f"not as in the run that wrote {checkpoint.path}: {'; '.join(differences)}"
    if not config.run.accept_changed_recipe:
        raise ConfigError(
            f"{message}. Evaluate with the run's own config, `dali-train eval RUN`, or set run.accept_changed_recipe "
            "true"
        )
    return [message]
