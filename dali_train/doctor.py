"""Checks before a long run: does this environment, on all the ranks that are to train, do what training needs?

Each check says what it found and, if that will not do, what to do about it. Run it the way the training will be run,
under torchrun or srun, so that it sees the same hosts, devices and network.
"""

import importlib.metadata
import os
import platform
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torchvision

from dali_train.config import Config, ConfigError
from dali_train.data.index import Split
from dali_train.data.loader import make_loader
from dali_train.data.manifest import DatasetError
from dali_train.data.pipeline import decode
from dali_train.launch import Launch
from dali_train.status import RunError

Verdict = Literal["pass", "warn", "fail"]
_WORST: dict[Verdict, int] = {"pass": 0, "warn": 1, "fail": 2}

NEEDED = {"torch": (2, 11), "timm": (1, 0, 22), "numpy": (1, 26)}
SLOW_DISK_MB_S = 100.0  # ViT-B/16 with LAMB's moments is 1 GB: 10 s a checkpoint
SKEW_S = 1.0  # beyond it, log lines and file times of several hosts no longer tell what came first


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(launch: Launch, device: torch.device, config: Config | None) -> bool:
    """Run all checks, on all ranks together, and print the table on rank 0. False if something failed."""
    findings = [*versions(), *devices(launch, device), *decoding(device), *communication(launch, device), *clocks(launch)]
    if config is not None:
        findings += [*dataset(config, launch, device), *run_directory(launch, Path(config.run.dir))]
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


def table(gathered: list[tuple[str, list[Finding]]]) -> Iterator[str]:
    """A line for each check; where ranks differ, one for each finding that is worse than a pass, saying whose it is."""
    names = list(dict.fromkeys(finding.check for _, findings in gathered for finding in findings))
    for name in names:
        owners: dict[Finding, list[str]] = {}
        for who, findings in gathered:
            for finding in findings:
                if finding.check == name:
                    owners.setdefault(finding, []).append(who)
        worst = max(_WORST[finding.verdict] for finding in owners)
        shown = [finding for finding in owners if _WORST[finding.verdict] > 0] if worst else list(owners)[:1]
        for finding in shown:
            whose = "" if len(owners[finding]) == len(gathered) or not worst else f" ({', '.join(owners[finding])})"
            yield f"{finding.verdict:<4}  {finding.check:<15} {finding.found}{whose}"
            if finding.remedy:
                yield f"      {'':<15} -> {finding.remedy}"


def versions() -> Iterator[Finding]:
    for package, needed in NEEDED.items():
        version = importlib.metadata.version(package)
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        at_least = ".".join(map(str, needed))
        yield Finding(
            package, "pass" if numbers >= needed else "fail", version, "" if numbers >= needed else f"install {package}>={at_least}"
        )
    dalis = [name for d in importlib.metadata.distributions() if (name := d.metadata["Name"]).startswith("nvidia-dali-cuda")]
    if len(dalis) != 1:
        yield Finding("dali", "fail", f"{len(dalis)} packages {dalis}", "install exactly one nvidia-dali-cuda package")
        return
    cuda = dalis[0].removeprefix("nvidia-dali-cuda")[:2]
    ours = (torch.version.cuda or "").split(".")[0]
    fits = not ours or cuda == ours
    found = f"{importlib.metadata.version(dalis[0])} for CUDA {cuda}, torch for CUDA {torch.version.cuda}"
    remedy = "" if fits else f"install nvidia-dali-cuda{ours}0, so that one driver serves both"
    yield Finding("dali", "pass" if fits else "warn", found, remedy)


def devices(launch: Launch, device: torch.device) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if device.type != "cuda":
        remedy = "fine for a test; for training check nvidia-smi, CUDA_VISIBLE_DEVICES and the job's request for GPUs"
        yield Finding("gpu", "warn", f"none, {os.cpu_count()} CPU cores", remedy)
        return
    free, total = torch.cuda.mem_get_info(device)
    found = f"{count} visible, {torch.cuda.get_device_name(device)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if 1 < count < launch.local_world_size:
        yield Finding("gpu", "fail", found, f"start at most {count} processes on this host, not {launch.local_world_size}")
    elif free < 0.9 * total:
        yield Finding("gpu", "warn", found, "another process uses this GPU: find it with nvidia-smi")
    else:
        yield Finding("gpu", "pass", found)


def decoding(device: torch.device) -> Iterator[Finding]:
    """DALI against libjpeg, on a picture made here."""
    ramp = torch.linspace(0, 255, 320)
    picture = torch.stack([ramp.expand(240, -1), ramp.flip(0).expand(240, -1), torch.full((240, 320), 99.0)]).to(torch.uint8)
    encoded = torchvision.io.encode_jpeg(picture, quality=95)
    expected = torchvision.io.decode_jpeg(encoded).permute(1, 2, 0).numpy()
    for name, device_id in (("decode on CPU", None), ("decode on GPU", device.index or 0)):
        if name == "decode on GPU" and device.type != "cuda":
            continue
        try:
            off = float(np.abs(decode(encoded.numpy(), device_id).astype(float) - expected).mean())
        except RuntimeError as error:
            yield Finding(name, "fail", str(error).strip().splitlines()[-1], "check DALI's version against the driver (nvidia-smi)")
            continue
        bad = off > 2
        yield Finding(
            name,
            "fail" if bad else "pass",
            f"{off:.2f} grey levels from libjpeg",
            "reinstall DALI: its decoder is wrong" if bad else "",
        )


def communication(launch: Launch, device: torch.device) -> Iterator[Finding]:
    if launch.world_size == 1:
        return
    megabytes, rounds = (256, 10) if device.type == "cuda" else (16, 3)
    values = torch.full((megabytes * 250_000,), float(launch.rank + 1), device=device)
    dist.all_reduce(values)  # connects; not timed
    expected = launch.world_size * (launch.world_size + 1) / 2
    wrong = bool((values != expected).any())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / rounds
    # What each rank sends and receives in a ring, as NCCL's own tests count it.
    bandwidth = 2 * (launch.world_size - 1) / launch.world_size * megabytes / 1e3 / seconds
    found = f"{dist.get_backend()}, {launch.world_size} ranks, {megabytes} MB in {seconds * 1e3:.1f} ms, {bandwidth:.2f} GB/s"
    if wrong:
        yield Finding("all-reduce", "fail", f"{found}: wrong sum", "set NCCL_DEBUG=INFO and suspect the network or a device")
    else:
        yield Finding("all-reduce", "pass", found if launch.rank == 0 else "right sum")


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


def dataset(config: Config, launch: Launch, device: torch.device) -> Iterator[Finding]:
    for name in ("train", "validation"):
        streamed = name == "train" and config.data.reader == "stream"
        try:
            # Compares index, manifest and shards' sizes.
            split = Split(config.data.root, name, local=not streamed or config.data.stream_url is None)
            if streamed:  # does the storage answer, and with this dataset?
                make_loader(
                    split, config, device, start_step=0, dp_rank=launch.rank, dp_size=launch.world_size, num_threads=1
                ).next()
                place = config.data.stream_url or split.root
                yield Finding(f"data {name}", "pass", f"{len(split):,} images in {split.num_classes} classes, read from {place}")
                continue
        except (ConfigError, DatasetError, OSError, RunError) as error:
            optional = name == "validation" and "has no validation split" in str(error)
            yield Finding(f"data {name}", "warn" if optional else "fail", str(error), "" if optional else "see the message")
            continue
        images = np.random.default_rng(0).integers(0, len(split), size=64)
        if split.manifest.encoding == "image":
            strange = [
                int(i) for i in images if not bytes(split.encoded(i)[:4]).startswith((b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF"))
            ]
            if strange:
                remedy = f"python tools/make_index.py {split.root}, or verify_dataset.py to see more"
                yield Finding(f"data {name}", "fail", f"{split.describe(strange[0])} is no image: index and shards differ", remedy)
                continue
        yield Finding(f"data {name}", "pass", f"{len(split):,} images in {split.num_classes} classes, index fits its shards")


def run_directory(launch: Launch, directory: Path) -> Iterator[Finding]:
    """Speed, atomic replacement and links on rank 0; that all ranks see the same directory."""
    mark = [uuid.uuid4().hex]
    try:
        if launch.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / ".doctor").write_text(mark[0])
    except OSError as error:
        yield Finding("run directory", "fail", str(error), "set run.dir to a directory that this user may write to")
    if launch.world_size > 1:
        dist.broadcast_object_list(mark, src=0)
        dist.barrier()
    try:
        shared = (directory / ".doctor").read_text() == mark[0]
    except OSError:
        shared = False
    if not shared:
        yield Finding(
            "run directory", "fail", f"{directory} is not the one of rank 0", "set run.dir to a file system that all hosts share"
        )
    if launch.world_size > 1:
        dist.barrier()
    if launch.rank != 0 or not shared:
        return
    try:
        file, link = directory / ".doctor", directory / ".doctor-link"
        fresh = directory / ".doctor-fresh"
        block, count = os.urandom(1 << 20), 64
        start = time.perf_counter()
        with fresh.open("wb") as target:
            for _ in range(count):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        speed = count * len(block) / 1e6 / (time.perf_counter() - start)
        fresh.replace(file)
        link.unlink(missing_ok=True)
        link.symlink_to(file.name)
        atomic = link.stat().st_size == count * len(block)
        link.unlink()
        file.unlink()
    except OSError as error:
        yield Finding("run directory", "fail", str(error), "set run.dir to a file system with atomic rename and symbolic links")
        return
    found = f"{directory}: {speed:.0f} MB/s written and flushed, rename and links work"
    if not atomic:
        yield Finding("run directory", "fail", f"{directory}: a renamed file is not what was written", "use another file system")
    elif speed < SLOW_DISK_MB_S:
        yield Finding("run directory", "warn", found, "checkpoints will take long: use a faster file system or save less often")
    else:
        yield Finding("run directory", "pass", found)
