"""Files of weights that other programs have written: finding the model's tensors in them, by their names.

Trainers save a model under a key of their own and below a prefix of their own: torchvision's references as
``model_ema`` with the names ``module.conv1.weight``, Lightning as ``state_dict`` with ``model.conv1.weight``, DINO as
``teacher`` with ``backbone.blocks.0...``. What they share is that the rest of a name is the model's own name. So a file
is a set of groups, each a key of the file with a prefix, and the group that has most of the model's names is the model.
No code in a file is executed.
"""

import logging
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from timm.models import clean_state_dict

from dali_train.errors import ConfigError
from dali_train.text import printable

logger = logging.getLogger("dali_train")

Tensors = dict[str, torch.Tensor]
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
"""Of files of weights."""

_PREFERRED_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys of whole files, the moving average first, as in timm's load_state_dict (1.0.31)."""
_PREFERRED_PREFIXES = ("base_encoder.", "encoder_q.")
"""Of two encoders, the one that MoCo (v3; v1 and v2) evaluates: main_lincls.py in facebookresearch/moco-v3 and moco."""
_DEEPEST = 3  # dicts in dicts: a file may be somebody else's


@dataclass(frozen=True)
class _Group:
    """The tensors in a file below a key and a prefix, one of which may be the model."""

    key: str  # of the file, "" for the file itself; with dots if it lies deeper
    prefix: str  # of the names there
    tensors: Tensors

    def describe(self) -> str:
        return self.key + (f" {self.prefix}*" if self.prefix else "")


def read_weights(path: str, field: str, names: Collection[str], classifiers: Collection[str] = ()) -> Tensors:
    """Return the tensors of the model in a safetensors file, or in a file that torch.save has written, by name.

    Args:
        field: the setting, for messages.
        names: of the model's tensors.
        classifiers: the names of its classifier layers, which may be absent in the file, or others there.

    Returns:
        Tensors with the model's names, if the file has at least half of them below some prefix, without those of
        another classifier, such as a projection head; else all tensors of the file, as timm would read it.

    Raises:
        ConfigError: there is no such file, it holds something else, or the model several times.
    """
    if Path(path).is_dir():
        raise ConfigError(f"{field}: {path} is a directory; name a file of weights, such as its model.safetensors")
    if not Path(path).is_file():
        raise ConfigError(f"{field}: there is no file {path}{_hub_hint(path)}")
    try:
        content = _load(path)
        groups = list(_tensors_by_key(content))
        if not groups:
            listed = ", ".join(printable(str(name)) for name in list(content)[:3]) if isinstance(content, dict) else ""
            raise ValueError(f"it has {listed or 'nothing'}, and not tensors by name")
        chosen = _model_in(groups, names, classifiers)
        _check_plain(chosen.tensors)
    except _SeveralModelsError as error:
        first = error.groups[0]
        taken = f'["{first.key}"]' if first.key else ""
        raise ConfigError(
            f"{field}: {path} holds the model several times ({', '.join(group.describe() for group in error.groups)}): "
            f"save the one that you mean in a file of its own, as in torch.save(torch.load({path!r}){taken}, FILE)"
            + (f", with only its names that begin with {first.prefix}" if first.prefix else "")
        ) from None
    except (SafetensorError, OSError, RuntimeError, ValueError, AttributeError, EOFError, UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnpicklingError):  # torch advises to execute the file's code
            objects = _other_objects(path)
            reason = f"it holds a {objects[0]}, and only tensors are read" if objects else "it is no file of tensors"
        raise ConfigError(
            f"{field}: {path} cannot be read as weights ({reason}): use a safetensors file, or one written by "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    if where := chosen.describe().strip():
        logger.info("%s: %s of %s", field, where, path)
    return chosen.tensors


class _SeveralModelsError(Exception):
    def __init__(self, groups: list[_Group]) -> None:
        super().__init__()
        self.groups = groups


def _load(path: str) -> Any:
    if path.endswith(".safetensors"):
        return safetensors.torch.load_file(path)
    with torch.serialization.safe_globals([Namespace]):  # timm's checkpoints hold their arguments
        return torch.load(path, map_location="cpu", weights_only=True)


def _other_objects(path: str) -> list[str]:
    """Return the types and functions of a pickle that are no part of plain tensors; empty for another kind of file."""
    try:
        with torch.serialization.safe_globals([Namespace]):
            return [printable(name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
    except Exception:  # whatever a damaged file makes of the parser of pickles
        return []


def _tensors_by_key(content: Any, key: str = "", depth: int = 0) -> Iterator[_Group]:
    """Yield the dicts of tensors by name in a file: itself, or what lies in it; with preferred keys first."""
    if not isinstance(content, Mapping):
        return
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and torch.is_tensor(value)}
    others = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Mapping)}
    if tensors and len(tensors) == len(content):
        yield _Group(key, "", tensors)
    elif depth < _DEEPEST:
        for name in sorted(others, key=lambda name: _PREFERRED_KEYS.index(name) if name in _PREFERRED_KEYS else 9):
            yield from _tensors_by_key(others[name], f"{key}.{name}" if key else name, depth + 1)


def _model_in(groups: list[_Group], names: Collection[str], classifiers: Collection[str]) -> _Group:
    """Return the group that is the model. Raises _SeveralModelsError."""
    heads = tuple(f"{classifier}." for classifier in classifiers)
    needed = {name for name in names if not name.startswith(heads)}
    models = [model for group in groups for model in _below_prefixes(group, needed)]
    preferred = [model for model in models if model.key.partition(".")[0] in _PREFERRED_KEYS]
    models = [model for model in preferred if model.key == preferred[0].key] or models
    models = [model for model in models if model.prefix.endswith(_PREFERRED_PREFIXES)] or models
    if len(models) > 1:
        raise _SeveralModelsError(models)
    if not models:  # other names, which timm may know to translate
        return _Group("", "", clean_state_dict(groups[0].tensors))
    (model,) = models
    foreign = {name for name in model.tensors if name.startswith(heads) and name not in names}
    if foreign:  # a head with other layers, of which no part is the classifier
        kept = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(heads)}
        return _Group(model.key, model.prefix, kept)
    return model


def _below_prefixes(group: _Group, needed: Collection[str]) -> Iterator[_Group]:
    """Yield the parts of a group, without their prefix, that have at least half of the `needed` names."""
    counts: Counter[str] = Counter()
    for name in group.tensors:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in needed:
                counts[name.removesuffix(".".join(parts[start:]))] += 1
    for prefix, count in counts.items():
        if 2 * count >= len(needed):
            below = {
                name.removeprefix(prefix): value for name, value in group.tensors.items() if name.startswith(prefix)
            }
            yield _Group(group.key, prefix, below)


def _check_plain(tensors: Tensors) -> None:
    """Raise ValueError for tensors that are not of plain numbers, or larger than their file."""
    for name, tensor in tensors.items():
        if tensor.is_quantized or tensor.layout != torch.strided or tensor.is_complex():
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise ValueError(f"{name} is of {kind}, and not of plain numbers")
        # An expanded tensor repeats its numbers, and a small file could fill the memory with them.
        if tensor.numel() > 1 and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, and fewer numbers than that")


def _hub_hint(path: str) -> str:
    """Return the remedy for a name of the Hugging Face hub, OWNER/NAME, which looks like a path; or an empty text."""
    if is_timms_hub_name(path):
        return f": use {path.removeprefix('timm/')}, timm's name of these weights on the Hugging Face hub"
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    return (
        f". For a model on the Hugging Face hub write hf-hub:{path}" if is_name and not path.endswith(SUFFIXES) else ""
    )


def is_timms_hub_name(weights: str) -> bool:
    """Return whether `weights` is timm/NAME, as the Hugging Face hub calls what timm calls NAME."""
    return re.fullmatch(r"timm/[\w.-]+", weights) is not None and not Path(weights).exists()
