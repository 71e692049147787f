"""``dali-train doctor``: checks before a long run that the environment of every rank, and its config, fit training.

Each check reports its finding and, on a failure, a remedy. Run the checks under the launcher of the training (torchrun
or srun), so that they see the same hosts, devices and network. Those of a config are a dry run of the pieces that
`train` uses. One runs in a process of its own, because some decoders crash it:

    python -m dali_train.extras.doctor.examine < (config, device), pickled
"""

import errno
import importlib.metadata
import io
import os
import pickle
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from dali_train.checkpoint.format import CheckpointError, ranks_without_shared_disk
from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.config import Config, DataConfig, HooksConfig, ParallelConfig, RunConfig
from dali_train.data.dataset.image_file import BadImageError, image_size
from dali_train.data.dataset.index import Split, open_split, sizes_of
from dali_train.data.dataset.storage import open_storage, read_stored
from dali_train.data.loading.dali import decode_repeatedly
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.errors import ConfigError, DatasetError, UserError
from dali_train.extras.cost.memory import Memory
from dali_train.extras.cost.speed import half_precision, measured_peak
from dali_train.extras.doctor.decoding import LOG_VARIABLE, decoder_in_log
from dali_train.extras.doctor.findings import Finding, table
from dali_train.extras.doctor.surroundings import home, network, temporary_files
from dali_train.extras.plan.forecast import describe_largest_micro_batch, forecast
from dali_train.files import NO_DIRECTORY_FSYNC, NO_SYMLINKS, NoLocksError, try_lock
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import DIMENSIONS, make_mesh
from dali_train.runtime.launch import Launch
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from dali_train.runtime.process import num_cores
from dali_train.runtime.process_group import host_group, on_rank_0
from dali_train.training.build import build_loader, fit_to_ranks, prepare
from dali_train.training.cost import data_sheet_peak, measure_largest_product
from dali_train.training.model import describe_parameters

SLOW_DISK_MB_S = 100.0  # ViT-B/16 with LAMB's moments is 1 GB: 10 s a checkpoint
_DECODING_LIMIT_S = 180
_NUM_PICTURES, _ROUNDS = 64, 100

NEEDED = {"torch": (2, 11), "timm": (1, 0, 28), "numpy": (1, 26)}
SKEW_S = 1.0  # beyond it, log lines and file times of several hosts no longer show the order of events


def examine(launch: Launch, device: torch.device, config: Config | None) -> bool:
    """Run all checks on all ranks together, print the table on rank 0, and return whether none failed."""
    differing = [] if config is None or launch.world_size == 1 else list(equal_ranks(launch, device, config))
    checked = config if not differing else None  # collectives depend on the config
    findings = [
        *versions(),
        home(),
        temporary_files(),
        *network(launch, device),
        *devices(launch, device),
        *matrix_product(device),
        *decoding(device),
        *communication(launch, device, checked),
        *clocks(launch),
        *differing,
    ]
    if checked is not None:
        of_model, memory = model_and_batch(checked, launch, device)
        findings += [*of_model, *splits(checked.data), *decoding_a_batch(checked, launch, device)]
        findings += run_directory(checked.run, launch, memory.checkpoint_bytes if memory is not None else 0)
    gathered: list[tuple[str, list[Finding]]] = [(f"rank {launch.rank} on {platform.node()}", findings)]
    if launch.world_size > 1:
        everyone: list[tuple[str, list[Finding]]] = [("", [])] * launch.world_size
        dist.all_gather_object(everyone, gathered[0])
        gathered = everyone
    if launch.rank == 0:
        for line in table(gathered):
            print(line)
        if config is None:
            print("dataset and run directory were not checked: name them with --config FILE")
    return all(finding.verdict != "fail" for _, findings in gathered for finding in findings)


def versions() -> Iterator[Finding]:
    for package, needed in NEEDED.items():
        version = importlib.metadata.version(package)
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        at_least = ".".join(map(str, needed))
        yield Finding(
            package,
            "pass" if numbers >= needed else "fail",
            version,
            "" if numbers >= needed else f"install {package}>={at_least}",
        )
    dalis = [
        name for d in importlib.metadata.distributions() if (name := d.metadata["Name"]).startswith("nvidia-dali-cuda")
    ]
    if len(dalis) != 1:
        yield Finding("dali", "fail", f"{len(dalis)} packages {dalis}", "install exactly one nvidia-dali-cuda package")
        return
    cuda = dalis[0].removeprefix("nvidia-dali-cuda")[:2]
    of_torch = (torch.version.cuda or "").split(".")[0]
    fits = not of_torch or cuda == of_torch
    text = f"{importlib.metadata.version(dalis[0])} for CUDA {cuda}, torch for CUDA {torch.version.cuda}"
    remedy = "" if fits else f"install nvidia-dali-cuda{of_torch}0, so that one driver serves both"
    yield Finding("dali", "pass" if fits else "warn", text, remedy)


def devices(launch: Launch, device: torch.device) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if device.type != "cuda":
        remedy = "fine for a test; for training check nvidia-smi, CUDA_VISIBLE_DEVICES and the job's request for GPUs"
        yield Finding("gpu", "warn", f"none, {num_cores()} CPU cores", remedy)
        return
    free, total = torch.cuda.mem_get_info(device)
    text = f"{count} visible, {torch.cuda.get_device_name(device)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if 1 < count < launch.local_world_size:
        yield Finding(
            "gpu", "fail", text, f"start at most {count} processes on this host, not {launch.local_world_size}"
        )
    elif free < 0.9 * total:
        yield Finding("gpu", "warn", text, "another process uses this GPU: find it with nvidia-smi")
    else:
        yield Finding("gpu", "pass", text)


def matrix_product(device: torch.device) -> Iterator[Finding]:
    """Compare a large product with the data sheet's peak, the reference of model FLOP utilisation."""
    if device.type != "cuda":
        return
    dtype = half_precision(torch.cuda.get_device_capability(device)) or "fp16"
    measured = measured_peak(dtype, device) / 1e12
    sheet = data_sheet_peak(torch.cuda.get_device_name(device), dtype, tf32=True)
    if sheet is None:
        yield Finding(
            "matrix product", "pass", f"{measured:.0f} TFLOP/s in {dtype}; this GPU's peak is not known here, so no MFU"
        )
        return
    share = measured * 1e12 / sheet.flops_per_second
    text = f"{measured:.0f} TFLOP/s in {dtype}, {share:.0%} of {sheet.source}"
    slow = share < 0.5
    remedy = "look at power limit, clocks and temperature with nvidia-smi -q, and for other processes" if slow else ""
    yield Finding("matrix product", "warn" if slow else "pass", text, remedy)


def decoding(device: torch.device) -> Iterator[Finding]:
    """Compare DALI with Pillow, which uses libjpeg-turbo, on generated pictures; nvJPEG's hardware decoder repeatedly.

    Without an error it has returned wrong pixels of some images of some batches on H100, while other kernels ran: it
    does not wait for its stream (meta-pytorch/torchcodec#1634). Here each batch is read before the next one is decoded,
    so a frame that is overwritten while a kernel has yet to read it does not show: tests/test_gpu.py looks for that.
    """
    pictures = [_picture(number) for number in range(_NUM_PICTURES)]
    yield _decoder("decode on CPU", pictures, None, rounds=1)
    if device.type == "cuda":
        device_id = device.index or 0
        yield _decoder("decode on GPU", pictures, device_id, rounds=1)
        yield _decoder("hw decoder", pictures, device_id, rounds=_ROUNDS, hw_decoder_load=1.0)


def _picture(number: int) -> NDArray[np.uint8]:
    """Return a JPEG without detail on which decoders could differ; each has its own size and colors."""
    height, width = 160 + 5 * number, 480 - 4 * number
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, 255 - down, np.full_like(down, 4 * number)], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.roll(pixels, number, axis=-1)).save(file, "JPEG", quality=95)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)


def _decoder(
    check: str, pictures: list[NDArray[np.uint8]], device_id: int | None, *, rounds: int, hw_decoder_load: float = 0.0
) -> Finding:
    expected = [
        np.asarray(Image.open(io.BytesIO(picture.tobytes()), formats=["JPEG"])).astype(float) for picture in pictures
    ]
    busy = None if device_id is None else torch.randn(4096, 4096, device=f"cuda:{device_id}")
    worst, first, changed = 0.0, None, set[int]()
    try:
        for images in decode_repeatedly(pictures, device_id, rounds=rounds, hw_decoder_load=hw_decoder_load):
            if busy is not None:
                torch.mm(busy, busy)  # the GPU computes while the next batch is decoded
            first = first or images
            changed |= {number for number, image in enumerate(images) if not np.array_equal(image, first[number])}
            worst = max(
                worst, *(float(np.abs(image - right).mean()) for image, right in zip(images, expected, strict=True))
            )
    except RuntimeError as error:
        return Finding(
            check, "fail", str(error).strip().splitlines()[-1], "check DALI's version against the driver (nvidia-smi)"
        )
    text = f"{len(pictures)} pictures, at most {worst:.2f} grey levels from libjpeg"
    if rounds > 1:
        repeated = "the same" if not changed else f"{len(changed)} of them not the same"
        text += f", {repeated} {rounds} times, each read before the next"
    remedy = "reinstall DALI: its decoder is wrong"
    if hw_decoder_load > 0:
        remedy = "set data.hw_decoder_load 0, so that JPEGs are decoded by CUDA's cores, or install another driver"
    wrong = worst > 2 or bool(changed)
    return Finding(check, "fail" if wrong else "pass", text, remedy if wrong else "")


def equal_ranks(launch: Launch, device: torch.device, config: Config) -> Iterator[Finding]:
    """Check that all ranks have the same config, dataset, weight files and code, as `train` does."""
    try:
        require_equal_ranks(config, device, host_group(launch))
    except ConfigError as error:
        yield Finding("equal ranks", "fail", str(error), "see the message; what depends on the config was not checked")
    except (UserError, OSError):
        pass  # the same on all ranks: `splits` reports it


def communication(launch: Launch, device: torch.device, config: Config | None) -> Iterator[Finding]:
    """Check all-reduces over all ranks, then along each dimension of the config's mesh, in all groups at once."""
    if launch.world_size == 1:
        return
    yield all_reduce("all-reduce", dist.group.WORLD, device)
    if config is None or not config.parallel.kind:
        return
    try:
        layout = Layout.from_config(launch, config.parallel)
    except ConfigError as error:
        yield Finding("layout", "fail", str(error), "see the message")
        return
    mesh = make_mesh(layout, device)
    yield Finding("layout", "pass", layout.describe())
    for name in DIMENSIONS:
        if 1 < mesh[name].size() < launch.world_size:
            yield all_reduce(name, mesh[name].get_group(), device)


def all_reduce(check: str, group: dist.ProcessGroup | None, device: torch.device) -> Finding:
    """Check the result of an all-reduce over the ranks of `group`, which call this together, and time it."""
    ranks = dist.get_process_group_ranks(group)
    megabytes, rounds = (256, 10) if device.type == "cuda" else (16, 3)
    values = torch.full((megabytes * 250_000,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values, group=group)  # establishes connections; not timed
    wrong = bool((values != sum(ranks) + len(ranks)).any())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(values, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / rounds
    # The bytes that each rank sends and receives in a ring, as in NCCL's own tests.
    bandwidth = 2 * (len(ranks) - 1) / len(ranks) * megabytes / 1e3 / seconds
    text = f"{dist.get_backend()}, {len(ranks)} ranks, {megabytes} MB in {seconds * 1e3:.1f} ms, {bandwidth:.2f} GB/s"
    if wrong:
        return Finding(check, "fail", f"{text}: wrong sum", "set NCCL_DEBUG=INFO and suspect the network or a device")
    return Finding(check, "pass", text if dist.get_rank() == 0 else "right sum")


def clocks(launch: Launch) -> Iterator[Finding]:
    if launch.world_size == 1:
        return
    dist.barrier()
    times: list[tuple[str, float]] = [("", 0.0)] * launch.world_size
    dist.all_gather_object(times, (platform.node(), time.time()))
    skew = max(times, key=lambda entry: entry[1])[1] - min(times, key=lambda entry: entry[1])[1]
    if skew < SKEW_S:
        yield Finding("clocks", "pass", f"all within {SKEW_S:g} s")
    else:
        early, late = min(times, key=lambda entry: entry[1])[0], max(times, key=lambda entry: entry[1])[0]
        yield Finding("clocks", "warn", f"{late} is {skew:.1f} s ahead of {early}", "start chrony or ntpd on both")


def model_and_batch(config: Config, launch: Launch, device: torch.device) -> tuple[list[Finding], Memory | None]:
    """Check model, image sizes and batch as `train` does, on the meta device, without computing anything.

    Returns:
        The findings, and the memory of the model.
    """
    findings, layout = [], None
    try:
        layout, batch = fit_to_ranks(config, launch), config.batch
        text = (
            f"{batch.global_batch:,} images per step: {batch.describe_accumulation(layout.data_size)} x "
            f"{batch.micro_batch} on each rank{layout.describe_idle(batch.num_micro_batches)}"
        )
        findings.append(Finding("batch", "pass", text))
    except ConfigError as error:
        findings.append(Finding("batch", "fail", str(error), "see the message"))
    num_classes = 1000
    with suppress(ConfigError, DatasetError, OSError):
        num_classes = open_split(config.data, "train").num_classes
    try:
        model, memory, ranks = forecast(config, layout, num_classes)
    except (ConfigError, CheckpointError) as error:
        return [*findings, Finding("model", "fail", str(error), "see the message")], None
    differences = differences_from_training(config, model, "train_size")
    name = (
        f"{config.model.name}: {describe_parameters(model)}, takes {config.data.train_size} and "
        f"{config.data.eval_size} px"
    )
    findings.append(Finding("model", "pass", name))
    findings += [Finding("model", "warn", *difference) for difference in differences]
    if device.type == "cuda" and layout is not None and config.batch.num_micro_batches >= layout.data_size:
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        mine = ranks[layout.pipeline_rank].memory
        fits, words = describe_largest_micro_batch(config.batch, mine, device_bytes, layout.data_size)
        remedy = "" if fits else "a smaller batch.micro_batch, or model.activation_checkpointing true"
        findings.append(Finding("memory", "pass" if fits else "warn", words, remedy))
    elif device.type == "cpu":
        findings += precision(config, model)
    return findings, memory


def precision(config: Config, model: nn.Module) -> Iterator[Finding]:
    """Compare precision.dtype with the other formats in the model's largest product on this processor."""
    try:
        product = measure_largest_product(config, model)
    except (RuntimeError, NotImplementedError):  # the model needs values, which the meta device does not have
        return
    dtype = config.precision.dtype
    text, warning = f"{dtype}: {product.describe()}", product.warning(dtype)
    yield Finding("precision", "pass" if warning is None else "warn", text, warning or "")


def _bucket(split: Split, data: DataConfig) -> Finding:
    """Measure the object store's latency and bandwidth for one process: one image at a time, and all at once."""
    storage = open_storage(split, data)
    images = np.random.default_rng(1).permutation(len(split))[:256]
    seconds = []
    try:
        for image in images[:5]:
            start = time.perf_counter()
            storage.read(image[None])
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        num_bytes = sum(len(content) for content in storage.read(images))
    except DatasetError as error:
        return Finding(f"bucket {split.name}", "fail", str(error), "see the message")
    rate = 1 / (time.perf_counter() - start)
    text = (
        f"{1000 * min(seconds):.0f} ms for one image; {num_bytes * rate / 1e6:.0f} MB/s, {len(images) * rate:,.0f} "
        "images/s for this process without a cache"
    )
    return Finding(f"bucket {split.name}", "pass", text)


def splits(data: DataConfig) -> Iterator[Finding]:
    for name in ("train", "validation"):
        try:
            split = open_split(data, name)  # compares index, manifest and shards' sizes
        except (DatasetError, OSError) as error:
            optional = name == "validation" and "has no validation split" in str(error)
            yield Finding(
                f"data {name}", "warn" if optional else "fail", str(error), "" if optional else "see the message"
            )
            continue
        images = np.random.default_rng(0).integers(0, len(split), size=64)
        if split.manifest.encoding == "image":
            strange = []
            stored = read_stored(open_storage(split, data), split, images)
            indexed = sizes_of(split.rows[images]).tolist()
            for image, content, size in zip(images.tolist(), stored, indexed, strict=True):
                try:
                    found = image_size(content.data)
                except BadImageError as error:
                    strange.append(f"{split.describe(image)} {error}")
                    continue
                if [*found] != size:
                    strange.append(
                        f"{split.describe(image)} has {found[1]} x {found[0]} pixels, the index says "
                        f"{size[1]} x {size[0]}"
                    )
            if strange:
                root = shlex.quote(str(split.root))
                remedy = f"dali-train data index {root}, or dali-train data verify {root} to see more"
                yield Finding(f"data {name}", "fail", strange[0], remedy)
                continue
        if split.url is not None:
            yield _bucket(split, data)
        yield Finding(
            f"data {name}", "pass", f"{len(split):,} images in {split.num_classes} classes, index fits its files"
        )


def decoding_a_batch(config: Config, launch: Launch, device: torch.device) -> Iterator[Finding]:
    """Run the training graph on a first micro-batch in a separate process, because some decoders crash the process.

    Each rank tries its own GPU. On the CPU one rank per host is enough.
    """
    if config.data.reader == "synthetic" or (device.type == "cpu" and launch.local_rank > 0):
        return
    # Without hooks, which may not pickle; a batch of 64 shows as much as a larger one. It leaves nothing in a cache.
    size, num_threads = min(config.batch.micro_batch, 64), min(4, config.data.num_threads or 4)
    small = replace(
        config,
        batch=replace(config.batch, global_batch=size, micro_batch=size),
        data=replace(config.data, num_threads=num_threads, cache=None, cache_gb=None, local_copy=None),
        parallel=ParallelConfig(),
        hooks=HooksConfig(),
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), LOG_VARIABLE: "4"}
    check = "decode a batch"
    try:
        child = subprocess.run(
            [sys.executable, "-m", "dali_train.extras.doctor.examine"],
            input=pickle.dumps((small, device)),
            capture_output=True,
            env=environment,
            timeout=_DECODING_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "check that the storage answers; if it does, set data.device cpu"
        yield Finding(check, "fail", f"not done after {_DECODING_LIMIT_S} s", remedy)
        return
    errors = child.stderr.decode(errors="replace")
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        text = f"the process was ended by {name} while decoding on {_decoding_device(config, device)}"
        yield Finding(
            check, "fail", text, "a bug in the decoder: install another version of DALI, or set data.device cpu"
        )
    elif child.returncode > 0:
        said = [line for line in errors.splitlines() if line.strip() and "nvimgcodec" not in line]
        yield Finding(check, "fail", child.stdout.decode().strip() or (said or ["no message"])[-1], "see the message")
    else:
        on_gpu = _decoding_device(config, device) == "the GPU"
        decoders = decoder_in_log(errors) if on_gpu else {}  # the library is named even where nothing uses it
        text = child.stdout.decode().strip() + "".join(f", {name} {value}" for name, value in decoders.items())
        silent = on_gpu and "nvJPEG" not in decoders
        remedy = (
            "the log names no nvJPEG, so JPEGs may be decoded on the CPU: install nvidia-nvjpeg beside "
            "nvidia-nvimgcodec"
        )
        yield Finding(check, "warn" if silent else "pass", text, remedy if silent else "")


def decode_first_batch() -> int:
    """Decode a first micro-batch, in a process of its own; print what came out, or the error. Returns the status."""
    config, device = pickle.load(sys.stdin.buffer)
    try:
        start = time.perf_counter()
        batch = build_loader(prepare(config, Launch(world_size=1, port=1), device)).next()
        mean = float(batch.images.float().mean())
    except (UserError, OSError) as error:
        print(error)
        return 1
    seconds = time.perf_counter() - start
    print(
        f"{len(batch.images)} images of {batch.images.shape[-1]} px as "
        f"{str(batch.images.dtype).removeprefix('torch.')} on {_decoding_device(config, device)}, mean {mean:.2f}, "
        f"first after {seconds:.1f} s"
    )
    return 0


def _decoding_device(config: Config, device: torch.device) -> str:
    return "the CPU" if pixel_format(config, device, num_threads=1).device_id is None else "the GPU"


_CAUSES = {
    errno.EROFS: "the file system is mounted read-only: mount it writable, or set run.dir to another",
    errno.ENOSPC: "the disk is full: free some space, or set run.dir to another",
    errno.EDQUOT: "this user's quota is used up: free some space, or set run.dir to another file system",
    errno.EACCES: "this user may not write there: change its permissions, or set run.dir to another directory",
    errno.EPERM: "this user may not write there: change its permissions, or set run.dir to another directory",
    errno.ENOTDIR: "a part of the path is a file: set run.dir to a directory that this user may write to",
}


def run_directory(run: RunConfig, launch: Launch, checkpoint_bytes: int) -> Iterator[Finding]:
    """Check speed, space, atomic replacement and links on rank 0, and that all ranks see the same directory.

    Leaves nothing behind.
    """
    directory, mark = Path(run.dir), uuid.uuid4().hex
    group = dist.group.WORLD if launch.world_size > 1 else None
    made: list[Path] = []
    try:
        made = on_rank_0(partial(_make_directories, directory), group)
        if launch.rank in ranks_without_shared_disk(directory, group) and run.mirror is None:
            remedy = "set run.mirror, or run.dir to a file system that all hosts share"
            words = f"{directory} is not rank 0's directory, and only rank 0's host has the checkpoints"
            yield Finding("run directory", "warn", words, remedy)
        if launch.rank == 0:
            yield from _files(directory, mark)
            yield _space(run, directory, checkpoint_bytes)
            if run.mirror is not None:
                yield _mirror(run.mirror)
    except OSError as error:
        if launch.rank == 0:
            yield _unusable(error)
    finally:
        if launch.rank == 0:
            for path in directory.glob(f".doctor-{mark}*"):
                path.unlink(missing_ok=True)
            for path in reversed(made):
                with suppress(OSError):  # in use by another process by now
                    path.rmdir()


def _make_directories(directory: Path) -> list[Path]:
    """Make a directory and return those that were not there before, outermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _unusable(error: OSError) -> Finding:
    remedy = _CAUSES.get(error.errno or 0, "set run.dir to a directory that this user may write to")
    return Finding("run directory", "fail", str(error), remedy)


def _files(directory: Path, mark: str) -> Iterator[Finding]:
    file, fresh, link = (directory / f".doctor-{mark}{kind}" for kind in ("", "-fresh", "-link"))
    file.touch()  # a checkpoint's files replace others
    block, count = os.urandom(1 << 20), 64
    start = time.perf_counter()
    with fresh.open("wb") as target:
        for _ in range(count):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    speed = count * len(block) / 1e6 / (time.perf_counter() - start)
    fresh.replace(file)
    lacking = _lacking(directory, file, link)
    works = (
        f"rename works; none of {', '.join(lacking)}, which a run does without" if lacking else "rename and links work"
    )
    text = f"{directory}: {speed:.0f} MB/s written and flushed, {works}"
    if file.stat().st_size != count * len(block):
        yield Finding(
            "run directory", "fail", f"{directory}: a renamed file is not what was written", "use another file system"
        )
    elif speed < SLOW_DISK_MB_S:
        yield Finding(
            "run directory", "warn", text, "checkpoints will take long: use a faster file system or save less often"
        )
    else:
        yield Finding("run directory", "pass", text)


def _lacking(directory: Path, file: Path, link: Path) -> list[str]:
    """Return what the file system of `directory` refuses of that for which there is something else, in words."""
    lacking = []
    try:
        link.symlink_to(file.name)
    except OSError as error:
        if error.errno not in NO_SYMLINKS:
            raise
        lacking.append("symbolic links")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_FSYNC:
            raise
        lacking.append("fsync of a directory")
    finally:
        os.close(descriptor)
    try:
        with file.open("rb+") as locked:
            try_lock(locked)
    except NoLocksError:
        lacking.append("flock")
    return lacking


def _space(run: RunConfig, directory: Path, checkpoint_bytes: int) -> Finding:
    """Check the space for checkpoints: run.keep_checkpoints, run.keep_best, one being written before the oldest is
    removed, and one being uploaded."""
    count = run.keep_checkpoints + run.keep_best + 1 + (run.mirror is not None)
    needed, free = count * checkpoint_bytes, shutil.disk_usage(directory).free
    text = f"{free / 1e9:,.1f} GB free, {count} checkpoints take {needed / 1e9:,.2f} GB"
    if free < needed:
        return Finding(
            "free space", "fail", text, "free some, set run.dir to another disk, or lower run.keep_checkpoints"
        )
    return Finding("free space", "pass", text)


def _mirror(url: str) -> Finding:
    bucket, name = Bucket(url), f".doctor-{uuid.uuid4().hex}"
    try:
        bucket.write(name, b"")
        bucket.delete(name)
    except ObjectStoreError as error:
        return Finding("mirror", "fail", str(error), "see the message")
    return Finding("mirror", "pass", f"{url} can be written")


if __name__ == "__main__":
    status = decode_first_batch()
    sys.stdout.flush()
    os._exit(status)  # freeing what was imported would take a second or two
