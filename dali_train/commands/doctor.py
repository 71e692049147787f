"""Checks before a long run that the environment of every rank meets the needs of training.

Each check reports its finding and, on a failure, a remedy. Run the checks under the launcher of the training (torchrun
or srun), so that they see the same hosts, devices and network.
"""

import importlib.metadata
import io
import os
import platform
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from dali_train.commands.doctor_run import Finding, Verdict, decoding_a_batch, model_and_batch, run_directory, splits
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.config import Config
from dali_train.data.loading.dali import decode
from dali_train.errors import ConfigError, UserError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import DIMENSIONS, make_mesh
from dali_train.runtime.launch import Launch
from dali_train.runtime.process_group import host_group
from dali_train.training.flops import data_sheet_peak, measured_peak

_WORST: dict[Verdict, int] = {"pass": 0, "warn": 1, "fail": 2}

NEEDED = {"torch": (2, 11), "timm": (1, 0, 26), "numpy": (1, 26)}
SKEW_S = 1.0  # beyond it, log lines and file times of several hosts no longer show the order of events


def examine(launch: Launch, device: torch.device, config: Config | None) -> bool:
    """Run all checks on all ranks together, print the table on rank 0, and return whether none failed."""
    differing = [] if config is None or launch.world_size == 1 else list(equal_ranks(launch, device, config))
    checked = config if not differing else None  # collectives depend on the config
    findings = [
        *versions(),
        *devices(launch, device),
        *matrix_product(device),
        *decoding(device),
        *communication(launch, device, checked),
        *clocks(launch),
        *differing,
    ]
    if checked is not None:
        of_model, memory = model_and_batch(checked, launch, device)
        findings += [*of_model, *splits(checked), *decoding_a_batch(checked, launch, device)]
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


def table(gathered: list[tuple[str, list[Finding]]]) -> Iterator[str]:
    """Yield a line for each check; if ranks differ, one line per finding worse than a pass, with its ranks."""
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
        yield Finding(
            "gpu", "fail", found, f"start at most {count} processes on this host, not {launch.local_world_size}"
        )
    elif free < 0.9 * total:
        yield Finding("gpu", "warn", found, "another process uses this GPU: find it with nvidia-smi")
    else:
        yield Finding("gpu", "pass", found)


def matrix_product(device: torch.device) -> Iterator[Finding]:
    """Compare a large product with the data sheet's peak, the reference of model FLOP utilisation."""
    if device.type != "cuda":
        return
    dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    measured = measured_peak(dtype, device) / 1e12
    sheet = data_sheet_peak(torch.cuda.get_device_name(device), dtype, tf32=True)
    if sheet is None:
        yield Finding(
            "matrix product", "pass", f"{measured:.0f} TFLOP/s in {dtype}; this GPU's peak is not known here, so no MFU"
        )
        return
    share = measured * 1e12 / sheet.flops_per_second
    found = f"{measured:.0f} TFLOP/s in {dtype}, {share:.0%} of {sheet.source}"
    slow = share < 0.5
    remedy = "look at power limit, clocks and temperature with nvidia-smi -q, and for other processes" if slow else ""
    yield Finding("matrix product", "warn" if slow else "pass", found, remedy)


def decoding(device: torch.device) -> Iterator[Finding]:
    """Compare DALI with Pillow, which uses libjpeg-turbo, on a generated picture."""
    ramp = np.linspace(0, 255, 320, dtype=np.float32)
    rows = [np.tile(channel, (240, 1)) for channel in (ramp, ramp[::-1], np.full(320, 99.0))]
    file = io.BytesIO()
    Image.fromarray(np.stack(rows, axis=-1).astype(np.uint8)).save(file, "JPEG", quality=95)
    encoded, expected = np.frombuffer(file.getvalue(), dtype=np.uint8), np.asarray(Image.open(file, formats=["JPEG"]))
    for name, device_id in (("decode on CPU", None), ("decode on GPU", device.index or 0)):
        if name == "decode on GPU" and device.type != "cuda":
            continue
        try:
            off = float(np.abs(decode(encoded, device_id).astype(float) - expected).mean())
        except RuntimeError as error:
            yield Finding(
                name,
                "fail",
                str(error).strip().splitlines()[-1],
                "check DALI's version against the driver (nvidia-smi)",
            )
            continue
        bad = off > 2
        yield Finding(
            name,
            "fail" if bad else "pass",
            f"{off:.2f} grey levels from libjpeg",
            "reinstall DALI: its decoder is wrong" if bad else "",
        )


def equal_ranks(launch: Launch, device: torch.device, config: Config) -> Iterator[Finding]:
    """Check that all ranks have the same config, dataset, weight files and code, as `train` does."""
    try:
        require_equal_ranks(config, device, host_group(launch, config))
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
    found = f"{dist.get_backend()}, {len(ranks)} ranks, {megabytes} MB in {seconds * 1e3:.1f} ms, {bandwidth:.2f} GB/s"
    if wrong:
        return Finding(check, "fail", f"{found}: wrong sum", "set NCCL_DEBUG=INFO and suspect the network or a device")
    return Finding(check, "pass", found if dist.get_rank() == 0 else "right sum")


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
