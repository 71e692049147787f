"""Fetching the published files of a small set, with their checksums: ``data convert ... --download``."""

import http.client
import socket
import sys
import urllib.error
from pathlib import Path

from dali_train.data.convert.datasets import Download
from dali_train.errors import RunError
from dali_train.files import sha256

_DOWNLOAD_TIMEOUT_S = 30


def download(files: Download, directory: Path, *, mirror: str | None = None) -> None:
    """Put `files` into `directory`, each under its name only when it is complete and has the right checksum.

    Raises:
        RunError: the server cannot be reached, breaks off, or sends something else.
    """
    address = mirror or files.address
    if not address.startswith(("http://", "https://")):
        raise RunError(f"--mirror {address}: use an address that begins with http:// or https://")
    directory.mkdir(parents=True, exist_ok=True)
    for name, expected in files.sha256.items():
        target = directory / name
        for leftover in directory.glob(f"{name}.*.partial"):  # as torch names it; of a download that was killed
            leftover.unlink()
        if not target.exists():
            _fetch(f"{address.rstrip('/')}/{name}", target, expected)
        elif sha256(target) != expected:
            raise RunError(
                f"{target}: its SHA-256 is not {expected}, as of the official file: delete it, then it is fetched again"
            )


def _fetch(url: str, target: Path, expected: str) -> None:
    from torch.hub import download_url_to_file  # takes seconds, which only a download should pay

    remedy = (
        "start the same command again, try another --mirror, or fetch the file elsewhere and name its directory with "
        "--source"
    )
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(
        _DOWNLOAD_TIMEOUT_S
    )  # torch sets none: a server that stops answering would block the command forever
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
