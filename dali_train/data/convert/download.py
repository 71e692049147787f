"""Fetching the official files of the small datasets: once, and only what has the published checksum."""

import http.client
import socket
import sys
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dali_train.files import sha256

_TIMEOUT_S = 30


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
    """Put `files` into `directory`, each under its name only when it is complete and has the right checksum.

    Raises:
        DownloadError: the server cannot be reached, breaks off, or sends something else.
    """
    address = mirror or files.address
    if not address.startswith(("http://", "https://")):
        raise DownloadError(f"--mirror {address}: use an address that begins with http:// or https://")
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("*.partial"):  # of a download that was killed
        leftover.unlink()
    for name, expected in files.sha256.items():
        target = directory / name
        if not target.exists():
            _fetch(f"{address.rstrip('/')}/{name}", target, expected)
        elif sha256(target) != expected:
            raise DownloadError(
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
        raise DownloadError(f"{url}: the server answers {error.code} {error.reason}: {remedy}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise DownloadError(f"{url}: cannot be fetched ({error}): {remedy}") from error
    except RuntimeError as error:  # torch's word for another checksum, which a connection that broke off gives as well
        raise DownloadError(f"{url}: broke off, or is not the official file ({error}): {remedy}") from error
    finally:
        socket.setdefaulttimeout(timeout)
