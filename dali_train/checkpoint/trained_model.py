"""Loading a trained model from a run directory: settings, weights, classes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import nn

from dali_train.checkpoint.fingerprint import weights_digest
from dali_train.checkpoint.format import Checkpoint, CheckpointError, Probabilities, load_checkpoint, load_chosen
from dali_train.checkpoint.run_directory import RunDirectory, resolve_checkpoint
from dali_train.checkpoint.state import first_weights, restore_weights
from dali_train.config import Config, ModelConfig
from dali_train.data.dataset.index import read_manifest
from dali_train.errors import ConfigError
from dali_train.files import write_atomically
from dali_train.runtime.object_store import is_remote
from dali_train.training.model import build_model
from dali_train.training.model_arguments import is_model
from dali_train.training.pretrained import weights_that_fit
from dali_train.training.weight_files import Tensors

Weights = Literal["raw", "ema"]
"""The trained weights, or their moving average."""
MODEL_FILE = "model.safetensors"
"""The final weights in a run directory."""


def load_model(
    run_dir: Path | str,
    checkpoint: str | None = None,
    *,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the timm model of a run, in evaluation mode: see `load_trained`.

    It maps float32 images (n, 3, eval_size, eval_size), normalised as in the run's config, to float32 logits (n,
    classes). Its `pretrained_cfg` describes the preprocessing, so that ``timm.data.resolve_data_config({},
    model=model)`` matches the run's evaluation, and has the class names as ``label_names``.
    """
    return load_trained(Path(run_dir), checkpoint, weights).model.to(device)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    config: Config
    checkpoint: Checkpoint
    weights: Weights
    class_names: tuple[str, ...]
    applies_orientation: bool  # of the images that it was trained on, see `Manifest.applies_orientation`
    probabilities: Probabilities  # of logits
    model: nn.Module  # float32 on the CPU in evaluation mode, neither compiled nor checkpointed

    @property
    def record(self) -> dict[str, str]:
        """What ties the weights to the run: the fingerprint of its steps, and their own digest."""
        return record_of(self.checkpoint, self.weights)

    def describe(self, run: str | None = None) -> str:
        """Name weights and checkpoint; by the mirror `run`, if the checkpoint is a temporary copy of what is there."""
        which = "moving average of the weights" if self.weights == "ema" else "weights"
        source = run if run is not None and is_remote(run) else self.checkpoint.path
        return f"{which} of {source}, step {self.checkpoint.step}"


def load_trained(run_dir: Path, checkpoint: str | None = None, weights: Weights | None = None) -> TrainedModel:
    """Return the model of a run with its checkpoint and config.

    Args:
        checkpoint: ``best``, ``newest`` or a path; None: the best one, or the newest if none was evaluated.
        weights: ``raw`` or ``ema``; None: the moving average if the checkpoint has one.

    Raises:
        ConfigError, CheckpointError: no such run, no such checkpoint, no moving average in it, or a model that only the
            run's config file registers.
    """
    config = RunDirectory(run_dir).config
    check_registered(config.model, run_dir)
    loaded = load_chosen(resolve_checkpoint(run_dir, checkpoint))
    names = tuple(loaded.values.class_names or read_manifest(config.data).class_names)
    used: Weights = weights or ("ema" if "ema" in loaded.state else "raw")
    model: Any = model_from(loaded, with_plain_model(config), len(names), torch.device("cpu"), used)
    model.pretrained_cfg = input_config(model, config, names)
    model.applies_orientation = loaded.values.applies_orientation  # which timm's description cannot say
    model.probabilities = loaded.values.probabilities
    return TrainedModel(
        config=config,
        checkpoint=loaded,
        weights=used,
        class_names=names,
        applies_orientation=model.applies_orientation,
        probabilities=model.probabilities,
        model=model.float().eval(),
    )


def check_registered(model: ModelConfig, run_dir: Path) -> None:
    """Check that timm knows the model of a run. Code in a run directory is not executed unless the user asks for it.

    Raises:
        ConfigError: timm does not know it; the message names the file that may register it.
    """
    if not is_model(model.name) and (file := RunDirectory(run_dir).environment.get("config_file")):
        raise ConfigError(
            f"model.name is {model.name!r}, which timm does not know: if the run's config file registers it, "
            f"add --config {run_dir / str(file)}, or in Python call dali_train.load_config with that file first"
        )


def with_plain_model(config: Config) -> Config:
    """Return the config of the model without what only makes its training faster or smaller."""
    plain = replace(config.model, freeze=(), compile="none", activation_checkpointing=False, channels_last=False)
    return replace(config, model=plain)


def input_config(model: nn.Module, config: Config, class_names: tuple[str, ...]) -> dict[str, Any]:
    """Return timm's description of `model`, with the facts on layers from timm and those on images from `config`."""
    data = config.data
    of_layers = ("first_conv", "classifier", "pool_size", "fixed_input_size", "min_input_size")
    description = getattr(model, "pretrained_cfg", None) or {}  # a model of the user's own may have none
    return {name: description[name] for name in of_layers if name in description} | {
        "architecture": config.model.name.partition(".")[0],
        "num_classes": len(class_names),
        "label_names": list(class_names),
        "input_size": (3, data.eval_size, data.eval_size),
        "interpolation": data.eval_filter,
        "mean": tuple(value / 255 for value in data.mean),
        "std": tuple(value / 255 for value in data.std),
        "crop_pct": _crop_share(data.eval_size, data.eval_resized),
        "crop_mode": "squash" if data.eval_resize == "squash" else "center",
    }


def _crop_share(size: int, resized: int) -> float:
    """Return the share by which timm divides `size` and rounds down to get `resized`."""
    share = size / resized
    return share if math.floor(size / share) == resized else math.nextafter(share, 0)


def model_from(
    checkpoint: Checkpoint, config: Config, num_classes: int, device: torch.device, weights: Weights = "raw"
) -> nn.Module:
    """Return the model of `config` with the weights of `checkpoint`, or with ``ema`` their moving average.

    Raises:
        ConfigError: the weights do not fit the model.
    """
    section = "ema" if weights == "ema" else "model"
    if section not in checkpoint.state:
        raise ConfigError(f"{checkpoint.path} has no moving average of the weights: use raw, or train with ema.decay")
    model = build_model(config, num_classes, device)
    restore_weights(checkpoint, model, section)
    return model


def record_of(checkpoint: Checkpoint, weights: Weights) -> dict[str, str]:
    """Return the record of a checkpoint's steps, "" if the run has none, and the digest of one kind of its weights."""
    tensors = checkpoint.state["ema" if weights == "ema" else "model"]
    return {"record": checkpoint.values.record, "digest": weights_digest(tensors)}


def fitting_weights(model: ModelConfig, num_classes: int, class_names: Sequence[str] = ()) -> Tensors | None:
    """Return model.weights, which fit the model; None if there are none, or they are timm's: nothing is fetched.

    Args:
        class_names: of the dataset, where they are known, see `first_weights`.

    Raises:
        ConfigError, CheckpointError: they cannot be read, or do not fit.
    """
    if model.weights is None:
        return None
    tensors = first_weights(model, class_names)
    return weights_that_fit(
        model.name, model.weights, num_classes, model.kwargs, field="model.weights", tensors=tensors
    )


def write_model(run_dir: Path, step: int) -> Path:
    """Write ``model.safetensors``: the weights that the checkpoint of `step` holds, or their moving average if there is
    one.

    For other programs: ``timm.create_model(NAME, **KWARGS).load_state_dict(safetensors.torch.load_file(...))``, with
    name and arguments from config.json. Equal runs have equal files.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    path = run_dir / MODEL_FILE
    weights: Weights = "ema" if "ema" in checkpoint.state else "raw"
    tensors = checkpoint.state["ema" if weights == "ema" else "model"]
    metadata = {"format": "pt", "weights": weights, "step": str(step), **record_of(checkpoint, weights)}
    try:
        write_atomically(path, _in_order(save(tensors, metadata=metadata)))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}): check space and permissions, and start the same command again; "
            "nothing is trained twice"
        ) from error
    return path


def _in_order(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in alphabetical order, where safetensors has one of chance.

    The format is the header's size in 8 bytes, the header in JSON with spaces at its end, and the tensors.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    return b"".join([len(ordered).to_bytes(8, "little"), ordered, memoryview(content)[8 + size :]])
