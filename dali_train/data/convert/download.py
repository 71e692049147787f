"""Downloading the official files of a dataset, once, verified by their published checksums."""

import http.client
import socket
import sys
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dali_train.errors import RunError
from dali_train.files import sha256

_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Download:
    """Files below one address."""

    address: str
    sha256: Mapping[str, str]  # file name -> checksum of its content


def download(files: Download, directory: Path, *, mirror: str | None = None) -> None:
    """Put `files` into `directory`, each under its name only when it is complete and has the right checksum.

    Raises:
        RunError: the server cannot be reached, breaks off, or sends something else.
    """
    address = mirror or files.address
    if not address.startswith(("http://", "https://")):
        raise RunError(f"--mirror {address}: use an address that begins with http:// or https://")
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("*.partial"):  # of a download that was killed
        leftover.unlink()
    for name, expected in files.sha256.items():
        target = directory / name
        if not target.exists():
            _fetch(f"{address.rstrip('/')}/{name}", target, expected)
        elif sha256(target) != expected:
            raise RunError(
                f"{target}: its SHA-256 is not {expected}, as of the official file: delete it, then it is fetched again"
            )


def _fetch(url: str, target: Path, expected: str) -> None:
    from torch.hub import download_url_to_file  # takes seconds: only who downloads pays

    remedy = (
        "start the same command again, try another --mirror, or fetch the file elsewhere and name its directory with "
        "--source"
    )
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torch names none: a server that falls silent would hold the command for ever
    try:
        download_url_to_file(url, str(target), hash_prefix=expected, progress=sys.stderr.isatty())
    except urllib.error.HTTPError as error:
        raise RunError(f"{url}: the server answers {error.code} {error.reason}: {remedy}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise RunError(f"{url}: cannot be fetched ({error}): {remedy}") from error
    except RuntimeError as error:  # torch's word for another checksum, which a connection that broke off gives as well
        raise RunError(f"{url}: broke off, or is not the official file ({error}): {remedy}") from error
    finally:
        socket.setdefaulttimeout(timeout)
