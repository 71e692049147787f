"""``dali-train eval``: a checkpoint's accuracy on the validation split, with the settings of the run that wrote it."""

from pathlib import Path

from dali_train.checkpoint.directory import resolve_checkpoint
from dali_train.checkpoint.load import Checkpoint, load_checkpoint
from dali_train.checkpoint.model import model_from
from dali_train.checkpoint.recipe import changes_between, recipe_settings
from dali_train.checkpoint.state import restore_weights
from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import LaunchOptions
from dali_train.runtime.process_group import joined
from dali_train.training.evaluation import EvaluationResult, Evaluator
from dali_train.training.precision import Precision
from dali_train.training.setup import configure_torch


def evaluate_checkpoint(
    config: Config, run_dir: Path | None, checkpoint: str | None, options: LaunchOptions
) -> EvaluationResult:
    """Evaluate on all ranks together and print the result on rank 0.

    Args:
        run_dir: the run whose checkpoint it is; None: `checkpoint` is a path.
        checkpoint: ``best``, ``newest`` or a path; None: the best one, or the newest where nothing was evaluated.

    Raises:
        ConfigError: no checkpoint is named, or `config` normalises, sizes or names classes differently from the run.
        CheckpointError, DatasetError: see `load_checkpoint` and `Split`.
    """
    if run_dir is None and checkpoint is None:
        raise ConfigError("name the run, `dali-train eval RUN`, or a checkpoint, --checkpoint RUN/checkpoints/newest")
    if checkpoint is None:
        checkpoint = "best" if run_dir is not None and (run_dir / "checkpoints" / "best").exists() else "newest"
    path = resolve_checkpoint(run_dir or Path(config.run.dir), checkpoint)
    with joined(options, config) as (launch, device):
        layout = Layout.from_sizes(launch)
        num_threads = configure_torch(config, launch, device)
        split = Split(config.data.root, "validation")
        loaded = load_checkpoint(path)
        warnings = differences_from_run(loaded, config, split)
        model = model_from(loaded, config, split.num_classes, device)
        evaluator = Evaluator(
            split, config, device, dp_rank=layout.data_rank, dp_size=layout.data_size, num_threads=num_threads
        )
        result, average = evaluator.run(model, Precision(config.precision, device).autocast()), None
        if "ema" in loaded.state:
            restore_weights(loaded, model, "ema")
            average = evaluator.run(model, Precision(config.precision, device).autocast())
    if launch.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}")
        accuracy = f"top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}"
        print(f"{path}\nstep {loaded.step}: {accuracy}  ({result.num_images} images)")
        if average is not None:
            print(
                f"moving average of the weights: top-1 {average.top1:.2%}  top-5 {average.top5:.2%}  loss "
                f"{average.loss:.4f}"
            )
    return result


# The evaluation size may differ from the run's; normalisation, model and classes may not.
_DECISIVE = ("model.name", "model.kwargs", "data.mean", "data.std")


def differences_from_run(checkpoint: Checkpoint, config: Config, split: Split) -> list[str]:
    """Return warnings about how `config` and the dataset differ from the run that wrote `checkpoint`, if accepted.

    Raises:
        ConfigError: there are such differences, and run.accept_changed_recipe is false.
    """
    saved, current = checkpoint.values["recipe"], recipe_settings(config)
    differences = changes_between({n: saved[n] for n in _DECISIVE if n in saved}, {n: current[n] for n in _DECISIVE})
    names = checkpoint.values.get("class_names")
    if names is not None and tuple(names) != split.manifest.class_names:
        ours = split.manifest.class_names
        place = next(
            (i for i, (a, b) in enumerate(zip(names, ours, strict=False)) if a != b), min(len(names), len(ours))
        )
        differences.append(f"class {place} {[*names, None][place]} -> {[*ours, None][place]} ({split.root})")
    if not differences:
        return []
    message = f"not as in the run that wrote {checkpoint.path}: {'; '.join(differences)}"
    if not config.run.accept_changed_recipe:
        raise ConfigError(
            f"{message}. Evaluate with the run's own config, `dali-train eval RUN`, or set run.accept_changed_recipe "
            "true"
        )
    return [message]
