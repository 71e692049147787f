"""Fetching the official files of the small datasets: once, resumable, and only what has the published checksum."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dali_train.progress import Progress

_TIMEOUT_S = 30
_CHUNK = 1 << 16
_MAX_BYTES = 1 << 30


class DownloadError(ValueError):
    """A file that could not be fetched; the message says whether starting again helps."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """Files below one address."""

    address: str
    sha256: Mapping[str, str]  # file name -> checksum of its content


# SHA-256 sums of the official files as several public repositories quote them.
DOWNLOADS = {
    "cifar10": Download(
        address="https://www.cs.toronto.edu/~kriz/",
        sha256={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
    "mnist": Download(
        address="https://storage.googleapis.com/cvdf-datasets/mnist/",
        sha256={
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": Download(
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        sha256={
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}


def download(files: Download, directory: Path, *, mirror: str | None = None) -> None:
    """Put `files` into `directory`, each under its name only when whole and of the right checksum.

    Raises:
        DownloadError: the server cannot be reached, breaks off, or sends something else.
    """
    address = mirror or files.address
    if not address.startswith(("http://", "https://")):
        raise DownloadError(f"--mirror {address}: use an address that begins with http:// or https://")
    directory.mkdir(parents=True, exist_ok=True)
    for name, sha256 in files.sha256.items():
        target = directory / name
        if not target.exists():
            _fetch(f"{address.rstrip('/')}/{name}", target, sha256)
        elif _sha256(target) != sha256:
            raise DownloadError(
                f"{target}: its SHA-256 is not {sha256}, as of the official file: delete it, then it is fetched again"
            )


def _fetch(url: str, target: Path, sha256: str) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        _append(url, partial)
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{url}: the server answers {error.code} {error.reason}: try another --mirror") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        there = partial.stat().st_size if partial.exists() else 0
        raise DownloadError(
            f"{url}: broke off after {there:,} bytes ({error}): start the same command again to go on from there"
        ) from error
    found = _sha256(partial)
    if found != sha256:
        partial.unlink()
        raise DownloadError(
            f"{url}: has SHA-256 {found}, the official file {sha256}: not the same file, or damaged on its way; deleted"
        )
    partial.replace(target)


def _append(url: str, partial: Path) -> None:
    """Fetch what `partial` lacks, or all where the server cannot begin in the middle."""
    there = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and there:
            return  # nothing is left to fetch; the checksum tells whether it is right
        raise
    with response:
        goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if goes_on and not response.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
            raise DownloadError(f"{url}: asked to go on at byte {there}, the server sends {response.headers.get('Content-Range')}")
        begin = there if goes_on else 0
        length = response.headers.get("Content-Length")
        total = begin + int(length) if length else _MAX_BYTES
        if total > _MAX_BYTES:
            raise DownloadError(f"{url}: {total:,} bytes: far more than the official file")
        with partial.open("ab" if goes_on else "wb") as file, Progress(partial.name[1:-8], total=total, unit="B") as progress:
            progress.update(begin)
            while chunk := response.read(_CHUNK):
                begin += len(chunk)
                if begin > _MAX_BYTES:
                    raise DownloadError(f"{url}: over {_MAX_BYTES:,} bytes: far more than the official file")
                file.write(chunk)
                progress.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        if length and begin < total:
            raise http.client.IncompleteRead(b"", total - begin)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
