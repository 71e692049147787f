"""The fingerprint of a run, by which anyone can check it afterwards: see extras/proof and docs/exactness.md. Files and
messages call it the run's record.

The fingerprint of the first s steps is two numbers of 128 bits, written as 64 hexadecimal digits. The first is the
digest of dataset and recipe, plus the digests of which images were in each micro-batch of these steps; the second is
the sum of the digests of their draws, both modulo 2**128. Sums depend neither on the rank that computed a micro-batch,
nor on interruptions, nor on how often the fingerprint is written, and the difference of two is that of the steps
between them. A run adds up what its loader delivered; `prove` computes the same from the index alone (the invariant).

The weights have a digest for each checkpoint. It covers names, types, shapes and complete tensors, so it does not
depend on which ranks wrote which part. An evaluation has a digest of all its numbers.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import PIL
import timm
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from nvidia import dali

from dali_train.checkpoint.run_directory import LIBRARIES, RunDirectory
from dali_train.config import Config
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.dataset.sample_recipe import default_in_recipes
from dali_train.data.loading.decoders import nvimagecodec_version
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches
from dali_train.data.sampling.rng import DRAWS_VERSION
from dali_train.errors import ConfigError
from dali_train.runtime.process import device_name, processor_name
from dali_train.text import plural
from dali_train.training.build import RunPlan

WeightDigests = dict[str, dict[str, str]]
"""Step (in decimal, as JSON has it) -> section of the checkpoint, "model" or "ema" -> `weights_digest`."""

EvaluationDigests = dict[str, str]
"""Step -> `evaluation_digest`."""

_BITS = 128
_LIMB = 32
# Erased boxes' noise is as large as the image and follows from the seed; no run has views; the others are part of the
# order.
_NOT_DRAWN = {"step", "k", "positions", "images", "noise", "views"}
_DRAWN = sorted(one.name for one in fields(MicroBatch) if one.name not in _NOT_DRAWN)
_NOT_MEASURED = {"event", "epoch", "time", "seconds"}  # in the line of an evaluation


def order_digest(step: int, k: int, images: NDArray[np.int64]) -> int:
    """Return the digest of which images are in micro-batch `k` of `step`, in their order."""
    return _number(hashlib.sha256(f"{step} {k} ".encode() + images.astype("<i8").tobytes()))


def draws_digest(batch: MicroBatch) -> int:
    """Return the digest of everything that was drawn for a micro-batch, and of its labels and image size.

    What is zero or empty is left out, so that a kind of draws which later versions add changes nothing where it is off.
    """
    digest = hashlib.sha256(f"{batch.step} {batch.k}".encode())
    for name in _DRAWN:
        value = getattr(batch, name)
        if not np.any(value):
            continue
        if isinstance(value, np.ndarray):
            dtype = "<i4" if value.dtype.kind == "i" else "<f4"
            digest.update(f" {name} {value.shape} ".encode() + value.astype(dtype).tobytes())
        else:
            digest.update(f" {name} {value}".encode())
    return _number(digest)


def recipe_digest(recipe: dict[str, Any]) -> int:
    """Return the digest of a `recipe`, which includes the dataset's. Settings with their default are left out, so that
    one which later versions add changes nothing."""

    def is_default(name: str, value: Any) -> bool:
        default = default_in_recipes(name)
        return name in SETTINGS and value == (list(default) if isinstance(default, tuple) else default)

    decisive = {name: value for name, value in recipe.items() if not is_default(name, value)}
    return _number(hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()))


def _number(digest: Any) -> int:
    return int.from_bytes(digest.digest()[: _BITS // 8], "big")


def written(order: int, draws: int) -> str:
    """Return the two sums as the 64 digits of a fingerprint."""
    return f"{order % (1 << _BITS):032x}{draws % (1 << _BITS):032x}"


def parsed(fingerprint: str) -> tuple[int, int]:
    """Return the two sums, (order, draws), of a fingerprint's 64 digits."""
    return int(fingerprint[:32], 16), int(fingerprint[32:], 16)


def with_recipe(fingerprint: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the fingerprint of the same steps under the recipe `new`; `fingerprint`, which may be empty, has `old`."""
    if not fingerprint:
        return ""
    order, draws = parsed(fingerprint)
    return written(order - recipe_digest(old) + recipe_digest(new), draws)


def weights_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of complete `tensors` on the CPU by name, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def evaluation_digest(event: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the step and all numbers of an evaluation's line in metrics.jsonl, without its times."""
    numbers = {name: event[name] if name == "step" else float(event[name]) for name in event.keys() - _NOT_MEASURED}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def evaluations_digest(evaluations: EvaluationDigests) -> str:
    """Return the SHA-256 of the digests of several evaluations; empty if there are none."""
    lines = "".join(f"{step} {evaluations[step]}\n" for step in sorted(evaluations, key=int))
    return hashlib.sha256(lines.encode()).hexdigest() if lines else ""


def result_of(digests: dict[str, str]) -> str:
    """Return the digest of a checkpoint's resulting weights: of the moving average if there is one."""
    return digests.get("ema") or digests.get("model", "")


@dataclass(kw_only=True)
class Fingerprint:
    """The fingerprint of a run while it trains; every rank has one.

    Args:
        text: the fingerprint of `step` steps; empty: none is kept, because the samples do not follow from the index
            (data.reader dali), or because the run began with a version that kept none.
        adds_micro_batches: whether this rank does; of several ranks with the same micro-batches, only one does.
    """

    text: str
    step: int
    adds_micro_batches: bool
    _pending: list[int] = field(default_factory=lambda: [0, 0])  # sums of this rank's digests since `step`

    @classmethod
    def of(cls, plan: RunPlan, text: str, step: int = 0) -> "Fingerprint":
        """Return the fingerprint of this rank, which continues `text`, that of `step` steps."""
        return cls(text=text, step=step, adds_micro_batches=plan.layout.is_first_of_coordinate)

    def add(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Add what this rank's loader delivered for a step."""
        if self.text and self.adds_micro_batches:
            for batch in micro_batches:
                self._pending[0] += order_digest(batch.step, batch.k, batch.images)
                self._pending[1] += draws_digest(batch)

    def total(self, step: int, group: dist.ProcessGroup | None) -> str:
        """Return the fingerprint after `step` steps. All ranks of `group` call this together."""
        if not self.text or step == self.step:
            return self.text
        places = range(0, _BITS, _LIMB)
        limbs = [total >> place & ((1 << _LIMB) - 1) for total in self._pending for place in places]
        if group is not None:  # sums of up to 2**31 numbers of 32 bits
            sums = torch.tensor(limbs, dtype=torch.int64)
            dist.all_reduce(sums, group=group)
            limbs = sums.tolist()
        half = len(limbs) // 2
        added = [
            sum(limb << place for limb, place in zip(part, places, strict=True))
            for part in (limbs[:half], limbs[half:])
        ]
        self.text = written(*(one + other for one, other in zip(parsed(self.text), added, strict=True)))
        self.step = step
        self._pending = [0, 0]
        return self.text


# Environment variables with which a processor's libraries choose other kernels.
_KERNELS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")


def library_versions() -> dict[str, str]:
    """Return the versions of `LIBRARIES` by name. All ranks of a run must have the same."""
    versions = {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "DALI": dali.__version__,
        "nvImageCodec": nvimagecodec_version(),
        "Pillow": PIL.__version__,
        "NumPy": np.__version__,
    }
    return {name: versions[name] for name in LIBRARIES}


def libraries_elsewhere(machines: Iterable[str]) -> list[str]:
    """Return the libraries of another version than here in descriptions by `machine`: "Pillow 12.0 (here 13.0)"."""
    here = library_versions()
    found = []
    for part in dict.fromkeys(part for one in machines for part in one.split(", ")):
        name, _, version = part.rpartition(" ")
        if name in here and version != here[name]:
            found.append(f"{part} (here {here[name]})")
    return found


def machine(plan: RunPlan) -> str:
    """Describe everything besides the recipe that decides the last bits of a step (docs/exactness.md): rank 0's
    versions, processors and threads, and how many ranks there are."""
    where = device_name(plan.device) if plan.device.type == "cuda" else "CPU"
    parts = [
        *(f"{name} {version}" for name, version in library_versions().items()),
        where,
        processor_name(),
        f"{torch.backends.cpu.get_cpu_capability()}, {plural(torch.get_num_threads(), 'thread')}",
        plan.layout.describe(),
        *(f"{name}={os.environ[name]}" for name in _KERNELS if name in os.environ),
    ]
    return ", ".join([*parts, "deterministic"] if plan.config.run.deterministic else parts)


def require_draws(run: RunDirectory) -> None:
    """Raises ConfigError: the samples of `run` were drawn by another version, so they cannot be recomputed here."""
    version = run.environment.get("draws", 1)
    if run.environment and version != DRAWS_VERSION:
        raise ConfigError(
            f"{run.directory} has version {version} of the draws, and this dali_train draws version {DRAWS_VERSION}: "
            "use the dali_train that trained it"
        )


def samples_of(config: Config) -> tuple[Split, MicroBatches]:
    """Return the training split of a run, of which only the index is needed, and its micro-batches.

    Raises:
        ConfigError: its samples do not follow from its settings.
        DatasetError: the dataset is gone, or damaged.
    """
    if config.data.reader == "dali":
        raise ConfigError(
            f"{config.run.dir} used data.reader dali: its samples depend on the number of ranks and cannot be "
            "recomputed"
        )
    split = open_split(config.data, "train", local=False)
    return split, split.micro_batches(config)
