"""The ledger of a run: loss and margin of each training image in each epoch, in 4 bytes (`hooks.ledger`).

Both are of the image as it was trained, cropped and mixed, against its own label, as a softmax over the logits has
them, whatever the recipe's loss, its smoothing and its class weights are. In a mixed image the partner's class is right
too, so it does not compete: it is left out of the softmax and of the margin. How much of the image was to be seen, its
lambda, is not recorded, since it follows from the recipe (`shares`).

A rank keeps the values of its micro-batches on the device, where no host waits for them, copies them on logging steps,
and sends them to rank 0 before each checkpoint. Rank 0 writes each epoch as one file, complete or not at all. So a run
that resumes, on any number of ranks, finds what was trained before its checkpoint, and trains the rest again. A value
depends on the ranks as the weights do: by rounding alone, of which 16 bits show next to nothing.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray

from dali_train.config import HooksConfig
from dali_train.data.dataset.index import map_array
from dali_train.data.dataset.write_index import write_array
from dali_train.data.loading.pipelines import Batch, to_device_of
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches
from dali_train.errors import ConfigError
from dali_train.files import open_regular
from dali_train.hooks import Hook
from dali_train.hooks.records import RunStart, StepRecord
from dali_train.parallel.layout import Layout
from dali_train.training.loss import at_least_float32

LEDGER_DTYPE = np.dtype([("loss", "<f2"), ("margin", "<f2")])
"""Of each image of the training split: its cross-entropy, and its class's logit less the largest of another class. NaN:
the epoch does not have the image, or has not come to it. An image that an epoch has several times (data.repeats,
data.shuffle balanced) has its last values."""
_LARGEST = np.finfo(np.float16).max


def make_hooks(config: HooksConfig, layout: Layout) -> list[Hook]:
    return [Ledger()] if config.ledger else []


def losses_and_margins(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return loss and margin of each image against its own label, (n, 2) float16, see `LEDGER_DTYPE`; infinite where no
    class is left to compete, or where float16 is too small.

    Args:
        logits: (n, classes), of any float type.
        right: (n, 1) the label of each image, or (n, 2) with that of the partner mixed in, which does not compete.
    """
    logits = at_least_float32(logits)
    own = logits.gather(1, right[:, :1])
    others = logits.scatter(1, right, -torch.inf)
    losses = F.softplus(others.logsumexp(dim=1, keepdim=True) - own)  # log(exp(own) + sum of exp(others)) - own
    margins = own - others.amax(dim=1, keepdim=True)
    return torch.cat([losses, margins], dim=1).half()


def finite(values: NDArray[np.float16]) -> NDArray[np.float16]:
    """Return losses and margins, (n, 2), as the ledger has them: the largest number for an infinite one, and NaN for
    the margin where no class was left to compete."""
    values = np.clip(values, -_LARGEST, _LARGEST)
    margins = values[:, 1]
    margins[margins == _LARGEST] = np.nan
    return values


class Ledger(Hook):
    """Writes ``ledger/epoch-NNNNN.npy``, epochs counted from 0, each an array of `LEDGER_DTYPE`, (images,)."""

    def start(self, record: RunStart) -> None:
        self._num_images = record.num_images
        self._num_rows = len(record.split.rows)
        self._directory = record.directory / "ledger"
        self._writes = record.launch.rank == 0
        self._logits_are_reused = record.config.model.compile == "cuda-graphs"  # by the next micro-batch
        self._of_step: list[tuple[MicroBatch, torch.Tensor]] = []  # with its logits, (n, classes)
        self._on_device: list[torch.Tensor] = []  # of each step, (n, 2) float16
        self._on_host: list[NDArray[np.float16]] = []
        self._positions: list[NDArray[np.int64]] = []  # of each micro-batch in the training sequence, (n,)
        self._images: list[NDArray[np.int64]] = []
        self._epochs: dict[int, NDArray[np.void]] = {}  # of rank 0, those that are not complete
        self._done: int | None = record.start_step * record.config.batch.global_batch  # positions before this start
        record.observers.append(self._observe)

    def _observe(self, batch: Batch, logits: torch.Tensor) -> None:
        self._of_step.append((batch.micro_batch, logits.clone() if self._logits_are_reused else logits))

    def step(self, record: StepRecord) -> None:
        """Compute the values of all micro-batches at once: with small ones, starting operators takes most of the
        time."""
        if not self._of_step:
            return
        micro_batches, logits = zip(*self._of_step, strict=True)
        self._of_step.clear()
        right = [one.targets if one.is_mixed else one.targets[:, [0, 0]] for one in micro_batches]
        together = torch.cat(logits)
        self._on_device.append(losses_and_margins(together, to_device_of(together, np.concatenate(right))))
        self._positions += [one.positions for one in micro_batches]
        self._images += [one.images for one in micro_batches]

    def measure(self) -> Mapping[str, float]:
        """Copy to the host, which has waited for the device."""
        if self._on_device:
            self._on_host.append(finite(torch.cat(self._on_device).cpu().numpy()))
            self._on_device.clear()
        return {}

    def saving(self, step: int) -> None:
        self.measure()
        none = np.zeros(0, np.int64)
        own = (
            np.concatenate([none, *self._positions]),
            np.concatenate([none, *self._images]),
            np.concatenate([np.zeros((0, 2), np.float16), *self._on_host]),
        )
        self._positions.clear()
        self._images.clear()
        self._on_host.clear()
        parts = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            received: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float16]]] | None
            received = [own] * dist.get_world_size() if self._writes else None
            dist.gather_object(own, received)
            parts = received or []
        if self._writes:
            self._add(*map(np.concatenate, zip(*parts, strict=True)))

    def _add(self, positions: NDArray[np.int64], images: NDArray[np.int64], values: NDArray[np.float16]) -> None:
        if self._done is not None:
            self._remove_after(self._done)
            self._done = None
        order = np.argsort(positions, kind="stable")  # the last of an epoch stays
        epochs = positions[order] // self._num_images
        for epoch in np.unique(epochs).tolist():
            here = order[epochs == epoch]
            if epoch not in self._epochs:
                self._epochs[epoch] = self._found(epoch)
            self._epochs[epoch]["loss"][images[here]] = values[here, 0]
            self._epochs[epoch]["margin"][images[here]] = values[here, 1]
        for epoch, array in self._epochs.items():  # with what a full disk did not take the last time
            write_array(self._path(epoch), array)
        for complete in [epoch for epoch in self._epochs if epoch < epochs.max(initial=0)]:
            del self._epochs[complete]

    def _remove_after(self, done: int) -> None:
        """Remove the epochs that begin after the first `done` positions: they are from before a kill, or of a run that
        began again."""
        for epoch, path in ledger_files(self._directory.parent).items():
            if epoch * self._num_images >= done:
                path.unlink()

    def _found(self, epoch: int) -> NDArray[np.void]:
        """Return what an earlier start of the run has written of an epoch, or an empty one."""
        path = self._path(epoch)
        if path.exists():
            return np.array(read_epoch(path, self._num_rows))
        values = np.empty(self._num_rows, LEDGER_DTYPE)
        for name in LEDGER_DTYPE.names or ():
            values[name] = np.nan
        return values

    def _path(self, epoch: int) -> Path:
        return self._directory / f"epoch-{epoch:05d}.npy"


def ledger_files(run_dir: Path) -> dict[int, Path]:
    """Return the ledger's files in a run directory by their epochs, from 0, in order."""
    found = {}
    for path in (run_dir / "ledger").glob("epoch-*.npy"):
        if name := re.fullmatch(r"epoch-(\d{5,})\.npy", path.name):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def read_epoch(path: Path, num_images: int) -> NDArray[np.void]:
    """Map one file of a ledger, (num_images,) of `LEDGER_DTYPE`.

    Raises:
        ConfigError: it is none, or of another number of images.
    """
    try:
        open_regular(path).close()
        values = map_array(path)
    except Exception as error:  # numpy parses the header as Python, with whatever errors that has
        raise ConfigError(f"{path} cannot be read as a ledger ({type(error).__name__}): move it away") from None
    if values.dtype != LEDGER_DTYPE or values.shape != (num_images,):
        raise ConfigError(
            f"{path} is not the ledger of {num_images:,} images: it is of another dataset; move it away, or name the "
            "run's own with --dataset"
        )
    return values


def shares(
    micro_batches: MicroBatches,
    epoch: int,
    num_images: int,
    num_rows: int,
    progress: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float32]:
    """Return how much of each image was in its training image in an epoch, (num_rows,): lambda, 1 where nothing was
    mixed. Of several in an epoch the last one counts, as in the ledger.

    Args:
        num_images: positions of an epoch.
        num_rows: of the index.
        progress: called with the number of positions that are done.
    """
    result = np.ones(num_rows, np.float32)
    per_micro_batch = len(micro_batches.positions(0, 0))
    for number in range(epoch * num_images // per_micro_batch, -(-(epoch + 1) * num_images // per_micro_batch)):
        step, k = divmod(number, micro_batches.num_per_step)
        positions = micro_batches.positions(step, k)
        images, _ = micro_batches.order.images_at(positions)
        inside = positions // num_images == epoch
        result[images[inside]] = micro_batches.mixing(step, k).lambdas[inside]
        progress(int(inside.sum()))
    return result
