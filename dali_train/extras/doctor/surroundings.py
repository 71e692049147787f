"""What a container or a cluster may lack around a run: a home directory, room for temporary files, a network."""

import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dali_train.errors import ConfigError
from dali_train.extras.doctor.findings import Finding
from dali_train.runtime.launch import Launch
from dali_train.runtime.process_group import check_interfaces
from dali_train.text import printable

LEAST_TEMPORARY_GB = 1.0  # a compiled model's kernels, and what a mirror or a bucket is unpacked to, take less
_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface (linux/sockios.h)


def home() -> Finding:
    """Look for a directory that keeps what is downloaded from one run to the next."""
    named, remedy = os.environ.get("XDG_CACHE_HOME"), ""
    try:
        place, whose = (Path(named), "XDG_CACHE_HOME") if named else (Path.home(), "HOME")
    except RuntimeError:
        place, whose = Path("/"), "HOME is not set, and this user id is in no /etc/passwd"
    if place == Path("/") or not _can_write(place):
        remedy = (
            "set XDG_CACHE_HOME to a directory that this user may write to, for timm's weights and datasets at URLs"
        )
        reason = "" if "not set" in whose else f" is {printable(str(place))}, no directory of this user's"
        return Finding("home", "warn", f"{whose}{reason}", remedy)
    return Finding("home", "pass", f"{printable(str(place))} ({whose})")


def _can_write(directory: Path) -> bool:
    """Return whether `directory`, or the nearest of its parents that exists, takes a file; leaves nothing behind."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        return False
    return True


def temporary_files() -> Finding:
    """Compare the directory for temporary files with the one that is asked for, and look at its space."""
    check = "temporary files"
    named = os.environ.get("TMPDIR")
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding(check, "fail", str(error.strerror), "set TMPDIR to a directory that this user may write to")
    if named and Path(named) != Path(place):
        text = f"TMPDIR is {printable(named)}, where nothing can be written, so {place} is used"
        return Finding(check, "warn", text, f"make it, allow this user to write there, or set TMPDIR {place}")
    free = shutil.disk_usage(place).free / 1e9
    text = f"{printable(place)}, {free:,.1f} GB free"
    if free < LEAST_TEMPORARY_GB:
        return Finding(check, "warn", text, "free some, or set TMPDIR to another disk")
    return Finding(check, "pass", text)


def network(launch: Launch, device: torch.device) -> Iterator[Finding]:
    """List the interfaces, and hold what variables and the host's own name say against them."""
    names = [name for _, name in socket.if_nameindex()]
    addresses = [f"{name} {_address(name)}".rstrip() for name in names]
    yield Finding("network", "pass", ", ".join(addresses) or "no interface")
    try:
        check_interfaces()
    except ConfigError as error:
        yield Finding("network", "fail", str(error))
    value = os.environ.get("NCCL_SOCKET_IFNAME")
    if value and not nccl_interfaces(value, names):
        text = f"NCCL_SOCKET_IFNAME is {printable(value)}, which leaves none of these interfaces"
        remedy = "use the beginning of a name, =NAME for one alone, or ^NAME for all but this, or unset it"
        yield Finding("network", "fail" if device.type == "cuda" else "warn", text, remedy)
    if launch.world_size > launch.local_world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        yield from _own_name()


def _own_name() -> Iterator[Finding]:
    """Say where Gloo would listen at an address that other hosts cannot reach: that of this host's own name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"  # Gloo's choice then
    if address.startswith("127."):
        text = f"this host's name, {printable(name)}, leads to {address}, which other hosts cannot reach"
        yield Finding("network", "warn", text, "set GLOO_SOCKET_IFNAME to the interface that leads to them")


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface, empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def nccl_interfaces(value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME leaves (NCCL's manual, "Environment variables"): those that begin
    with one of the words in `value`, after = those of exactly these names, after ^ all others."""
    excludes, words = value.startswith("^"), value.removeprefix("^")
    is_exact, words = words.startswith("="), words.removeprefix("=")
    listed = [word for word in words.split(",") if word]
    matches = {name: name in listed if is_exact else any(name.startswith(word) for word in listed) for name in names}
    return [name for name in names if matches[name] != excludes]
