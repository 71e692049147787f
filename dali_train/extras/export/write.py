"""``dali-train export``: write a run's model for other programs, then read it back and compare its logits.

With --format timm it also writes a model card, so that the directory can be published on the Hugging Face Hub as it is.
"""

import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import timm
import torch
from huggingface_hub import EvalResult, ModelCardData
from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import nn

from dali_train.checkpoint.recipe import saved_recipe
from dali_train.checkpoint.run_directory import LIBRARIES, MANIFEST, RunDirectory, local_run
from dali_train.checkpoint.trained_model import TrainedModel, Weights, load_trained
from dali_train.errors import ConfigError, RunError
from dali_train.extras.plan.forecast import changed_settings
from dali_train.files import write_atomically
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import decisive
from dali_train.training.model import describe_parameters

TOLERANCE = 1e-4
"""The largest accepted difference of a logit, relative to the largest logit or 1."""

_OTHERS = ("checkpoints", "metrics.jsonl", MANIFEST, "dataset.json")  # beside a config.json that is no model's
_BATCH_SIZES = (1, 5)  # a traced graph may work for only one size
Logits = Callable[[torch.Tensor], torch.Tensor]


def export(
    run: Path | str, format_name: str, output: Path | None, checkpoint: str | None, weights: Weights | None
) -> None:
    """Write the model of `run` and ``preprocessing.json`` into a directory, and print where.

    Args:
        run: a run directory, or the URL of a run's mirror.
        format_name: one of `FORMATS`.
        output: the directory to write into; None: ``RUN/export/FORMAT``.
        checkpoint, weights: see `load_trained`.

    Raises:
        ConfigError, CheckpointError: see `load_trained`; or the format needs a package that is not installed, or
            `output` holds a run or a dataset.
        RunError: the logits of the written model differ, or it cannot be written, for example on a full disk.
    """
    if output is None and is_remote(str(run)):
        raise ConfigError(f"export {run}: a bucket is only read, so name a directory to write to, --output DIR")
    output = output or Path(run) / "export" / format_name
    _refuse_other(output)
    with local_run(run, checkpoint) as run_dir:
        trained = load_trained(run_dir, checkpoint, weights)
        card = model_card(trained, RunDirectory(run_dir)) if format_name == "timm" else None
    try:
        difference = _write(trained, format_name, output)
        if card is not None:
            write_atomically(output / "README.md", card.encode())
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"{output} cannot be written ({reason}): free some space there, or choose another directory with --output"
        ) from error
    print(
        f"{output}: {trained.describe(str(run))}. Read back, its logits differ by {difference:.1e} at most (batches of "
        f"{' and '.join(map(str, _BATCH_SIZES))})"
    )


def _refuse_other(output: Path) -> None:
    """Raises ConfigError: it holds what an export would destroy, whose files have the same names, or it is a file."""
    if os.path.lexists(output) and not output.is_dir():
        raise ConfigError(f"--output {output}: is not a directory: name one")
    found = [name for name in _OTHERS if (output / name).exists()]
    if found:
        raise ConfigError(
            f"--output {output}: holds {found[0]} of a run or a dataset, whose files an export would replace: name "
            "another directory"
        )


def _write(trained: TrainedModel, format_name: str, output: Path) -> float:
    """Write the model and ``preprocessing.json`` into `output`; return the largest relative difference of a logit.

    Raises:
        ConfigError, RunError: see `export`.
        OSError, SafetensorError: a file cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    exported = FORMATS[format_name](trained, output)
    size = trained.config.data.eval_size
    generator = torch.Generator().manual_seed(0)
    difference = 0.0
    for batch_size in _BATCH_SIZES:
        images = torch.randn(batch_size, 3, size, size, generator=generator)
        with torch.inference_mode():
            expected, actual = trained.model(images), exported(images)
        if expected.shape != actual.shape:
            raise RunError(
                f"{output}: the exported model gives logits {tuple(actual.shape)}, "
                f"the trained one {tuple(expected.shape)}"
            )
        difference = max(difference, float((expected - actual).abs().max() / expected.abs().max().clamp(min=1)))
    if not difference <= TOLERANCE:
        raise RunError(
            f"{output}: logits differ by {difference:.1e} from the trained model's, more than {TOLERANCE}: do not "
            "use it"
        )
    write_atomically(output / "preprocessing.json", (json.dumps(preprocessing(trained), indent=1) + "\n").encode())
    return difference


def preprocessing(trained: TrainedModel) -> dict[str, Any]:
    """Describe the preprocessing of images and the meaning of the outputs, as plain JSON values."""
    data = trained.config.data
    return {
        "apply_orientation": trained.applies_orientation,  # turn upright by the EXIF orientation
        "input": f"float32, (n, 3, {data.eval_size}, {data.eval_size}), RGB",
        "resize": data.eval_resize,
        "resize_to": data.eval_resized,
        "center_crop": data.eval_size,
        "interpolation": data.eval_filter,
        "antialias": data.antialias,
        "mean": list(data.mean),  # of 0 to 255
        "std": list(data.std),
        "output": "logits, (n, classes)",
        "probabilities": "sigmoid of each logit" if trained.probabilities == "sigmoid" else "softmax",
        "class_names": list(trained.class_names),
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.checkpoint.step,
        "weights": trained.weights,
        **trained.record,
    }


def model_card(trained: TrainedModel, run: RunDirectory) -> str:
    """Return a model card in Markdown, with the metadata that the Hugging Face Hub reads."""
    config, checkpoint, facts = trained.config, trained.checkpoint, run.environment
    name = PurePosixPath(config.run.dir).name
    dataset = " + ".join(config.data.sources) or PurePosixPath(config.data.root).name
    rows = {
        "model": f"`{config.model.name}`, {describe_parameters(trained.model)}",
        "classes": f"{len(trained.class_names)}",
        "images": f"{config.data.train_size} pixels to train, {config.data.eval_size} to evaluate",
        "dataset": f"{dataset}: {saved_recipe(checkpoint.values, checkpoint.path).get('dataset', 'unknown')}",
        "length": f"{checkpoint.step} steps of {config.batch.global_batch:,} images",
        "weights": f"{'moving average, ' if trained.weights == 'ema' else ''}digest {trained.record['digest']}",
        "record of the steps": trained.record["record"] or "none",
        "trained with": ", ".join(
            f"{key} {facts[key]}" for key in (*map(str.lower, LIBRARIES), "device") if key in facts
        ),
    }
    results = []
    for event in run.events:
        if event["event"] == "eval" and event["step"] == checkpoint.step:
            value_of = decisive if trained.weights == "ema" else dict.__getitem__
            names = {"accuracy": "top1", "top-5 accuracy": "top5"}
            if trained.probabilities == "sigmoid":
                names = {"mean average precision": "mean_ap", "micro F1": "micro_f1", "macro F1": "macro_f1"}
            shown = {name: value_of(event, field) for name, field in names.items()}
            rows |= {metric: f"{value:.2%} of {event['num_images']:,} images" for metric, value in shown.items()}
            if "f1_threshold" in event:
                rows["F1 counts probabilities over"] = f"{event['f1_threshold']:g}"
            results = [
                EvalResult("image-classification", dataset, dataset, metric, value) for metric, value in shown.items()
            ]
    data = ModelCardData(
        model_name=name,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "dali_train"],
        eval_results=results or None,
    )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    recipe = "\n".join(f"- {section}: {values}" for section, values in changed_settings(config).items())
    return f"""---
{data.to_yaml()}
---
# {name}

| | |
|---|---|
{table}

## Use

```python
import timm

model = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:DIRECTORY"
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=model))
# model(transform(image)[None]) are the logits; model.pretrained_cfg["label_names"] are the classes
```

## Recipe

Settings that differ from the defaults of dali_train:

{recipe}

```
{commands(run, checkpoint.step)}
```
"""


def commands(run: RunDirectory, step: int) -> str:
    """Return the command that began the run, and those by which it was resumed before `step`, if they are others."""
    starts: dict[int, str] = {}  # step -> command; of several starts at one step, the last led to what follows
    for event in run.events:
        if event["event"] == "start" and event["step"] < step and "command" in event:
            starts[event["step"]] = event["command"]
    lines: list[str] = []
    for command, group in groupby(starts, key=starts.__getitem__):
        begin = next(group)
        lines.append(f"{command}  # from step {begin}" if begin else command)
    return "\n".join(lines) or "unknown"


def _export_timm(trained: TrainedModel, output: Path) -> Logits:
    """Write what ``timm.create_model("local-dir:OUTPUT", pretrained=True)`` and model.weights read."""
    try:
        save_timm(trained.model, output, trained.config.model.kwargs, trained.class_names)
    except AttributeError as error:
        raise ConfigError(
            f"--format timm: timm cannot describe {trained.config.model.name}: {error}; set this attribute on the "
            "model, or use another --format"
        ) from error
    loaded: Logits = timm.create_model(f"local-dir:{output}", pretrained=True).eval()
    return loaded


def save_timm(model: nn.Module, output: Path, kwargs: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Write config.json and model.safetensors. Raises AttributeError: timm cannot describe the model."""
    described = {"label_names": list(class_names)}
    save_for_hf(model, output, safe_serialization=True, model_args=dict(kwargs), model_config=described)
    # safetensors writes a temporary file that only its owner may read, and renames it.
    shutil.copymode(output / "config.json", output / "model.safetensors")


def _export_onnx(trained: TrainedModel, output: Path) -> Logits:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--format onnx needs {', '.join(missing)}: pip install 'dali-train[export]'")
    import onnxruntime

    path = output / "model.onnx"
    torch.onnx.export(
        trained.model,
        (_example(trained),),
        path,
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _export_torch(trained: TrainedModel, output: Path) -> Logits:
    """Write what ``torch.export.load("model.pt2").module()`` reads, without this package or timm."""
    path = output / "model.pt2"
    program = torch.export.export(trained.model, (_example(trained),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = io.BytesIO()  # torch's own writer says nothing of the reason if the disk is full
    torch.export.save(program, content)
    write_atomically(path, content.getvalue())
    loaded: Logits = torch.export.load(path).module()
    return loaded


FORMATS: dict[str, Callable[[TrainedModel, Path], Logits]] = {
    "timm": _export_timm,
    "onnx": _export_onnx,
    "torch-export": _export_torch,
}
"""Each writes a model into a directory, reads it back, and returns it as a function from images to logits."""


def _example(trained: TrainedModel) -> torch.Tensor:
    """Return two images: a batch of one is traced as the constant 1."""
    return torch.zeros(2, 3, trained.config.data.eval_size, trained.config.data.eval_size)
