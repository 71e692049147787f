"""Buckets: S3, Google Cloud Storage, Azure Blob Storage, and read-only HTTP servers, through obstore.

Credentials and endpoints come from the environment, as for each cloud's own tools (docs/datasets.md); they are never
printed or saved.
"""

import atexit
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from dali_train.config.check import refuse_credentials
from dali_train.errors import RunError
from dali_train.files import open_regular
from dali_train.text import redacted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("dali_train")
T = TypeVar("T")
Item = TypeVar("Item")
Version = Mapping[str, Any]
"""The version of an object: its ETag and, in some stores, its version number."""

SCHEMES = ("s3", "gs", "az", "http", "https")
RETRY_S = 300.0
"""Seconds for which a request is retried before it fails, so that runs survive a restarting server."""
_FIRST_ANSWER_S = 20.0  # of a store that has never answered
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
_WARN_AFTER_S, _WARN_EVERY_S = 5.0, 30.0
_CONNECT_S, _REQUEST_S = 5, 30
_NUM_THREADS = 64  # requests in flight per process: at 50 ms each, 1,280 per second
_END_S = 5.0  # how long a program that ends waits for requests in flight
_PIECE_BYTES = 8 << 20  # of a whole object: it has obstore's limit of time per request
_NUM_UPLOADED_PIECES = 4  # under way: at 1 MB/s they stay within that limit
_SMALL_BYTES = 1 << 20  # of an object that is replaced by compare-and-swap
_ACCOUNT_FIELDS = ("client_email", "private_key", "private_key_id")
_JITTER = random.Random()  # nothing that a run computes depends on it
_METADATA_SERVICES = ("/latest/api/token", "/computeMetadata/", "/metadata/identity/")  # AWS, Google Cloud, Azure
_ENDPOINTS = {  # environment variables that name one
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
}
_requested_by: list[int] = []  # the process that has made requests


class ObjectStoreError(RunError):
    """A failed request to a bucket; the message names the object, the cause and the remedy."""


class MissingObjectError(ObjectStoreError):
    """There is no such object."""


class ChangedObjectError(ObjectStoreError):
    """An object has changed since it was first read, or already exists where a new one was to be created."""


class StoredObject(NamedTuple):
    """What a listing says about an object."""

    num_bytes: int
    etag: str | None  # as `plain_etag` returns it; None: this store has none
    modified: str  # when it was last written, ISO 8601


def plain_etag(etag: str | None) -> str | None:
    """Return an ETag without its quotes and the mark of a weak one. Azure's listings have no quotes, its answers do."""
    return None if etag is None else etag.removeprefix("W/").strip('"')


def is_remote(name: str) -> bool:
    """Return whether `name` is the URL of an object store, not the path of a directory."""
    return name.partition("://")[0] in SCHEMES and "://" in name


class Bucket:
    """The objects below a URL. Opened by the first request; its methods may be called from several threads at once.

    Args:
        url: such as ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix`` or
            ``https://host/prefix``.

    Raises:
        ConfigError: the URL has credentials.
        ObjectStoreError: by any method: the store refuses, or does not answer for `retry_s`.
    """

    def __init__(self, url: str) -> None:
        refuse_credentials(redacted(url), url)
        self.url = url.rstrip("/")
        self._opening = threading.Lock()
        self._opened: ObjectStore | None = None
        self.retry_s = RETRY_S
        self._answered: set[str] = set()  # the kinds of requests that were
        self._warned = 0.0  # no warning before this, in monotonic seconds, and a few more

    def read(self, name: str, start: int, stop: int, etag: str | None = None) -> tuple[memoryview, str | None, int]:
        """Return (bytes `start` to `stop` of an object, its ETag, its size in bytes).

        Args:
            etag: the one that the object must still have.

        Raises:
            MissingObjectError: no such object.
            ChangedObjectError: it has another ETag, or ends before `stop`.
        """

        def request(store: "ObjectStore") -> tuple[memoryview, str | None, int]:
            found = store.get(name, options={"range": (start, stop), **({"if_match": etag} if etag else {})})
            content = memoryview(found.bytes())
            if len(content) < min(stop, found.meta["size"]) - start:  # with some servers a lost connection is no error
                raise TimeoutError(f"{len(content)} of {stop - start} bytes were received")
            return content, found.meta["e_tag"], found.meta["size"]

        content, found_etag, size = self._ask(f"{self.url}/{name}", request)
        if size < stop:
            raise ChangedObjectError(f"{self.url}/{name} has {size} bytes, but byte {stop - 1} was requested")
        return content, found_etag, size

    def read_all(self, name: str, max_bytes: float = math.inf) -> bytes:
        """Return a whole object. Raises MissingObjectError; ObjectStoreError: it is larger than `max_bytes`."""
        size = self.size(name)
        if size > max_bytes:
            raise ObjectStoreError(f"{self.url}/{name} has {size:,} bytes, more than {max_bytes:,}: another file")
        pieces: list[memoryview] = []
        etag: str | None = None
        for start in range(0, size, _PIECE_BYTES):
            piece, etag, _ = self.read(name, start, min(start + _PIECE_BYTES, size), etag)
            pieces.append(piece)
        return b"".join(pieces)

    def read_version(self, name: str) -> tuple[bytes, Version]:
        """Return a small object and its version. Raises MissingObjectError."""

        def request(store: "ObjectStore") -> tuple[bytes, Version]:
            answer = store.get(name)
            if answer.meta["size"] > _SMALL_BYTES:
                raise ObjectStoreError(f"{self.url}/{name} has {answer.meta['size']:,} bytes: this is another file")
            return bytes(answer.bytes()), _version(answer.meta)

        return self._ask(f"{self.url}/{name}", request)

    def download(
        self,
        name: str,
        path: Path,
        size: int,
        report: Callable[[int], None] = lambda size: None,
        *,
        etag: str | None = None,
    ) -> None:
        """Download an object of `size` bytes to a new file, in concurrent pieces of one version.

        Args:
            report: called with the size of each piece.
            etag: the object's, as `listing` returns it; None: any version.

        Raises:
            MissingObjectError: it is not there.
            ChangedObjectError: it is shorter, has another ETag, or was replaced during the download.
            OSError: the file cannot be written.
        """
        path.touch(exist_ok=False)

        def fetch(start: int) -> str | None:
            content, found, _ = self.read(name, start, min(start + _PIECE_BYTES, size))
            with path.open("r+b") as file:
                file.seek(start)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            report(len(content))
            return plain_etag(found)

        found_etags = {*self.map(fetch, range(0, size, _PIECE_BYTES))}
        expected = found_etags if etag is None else {etag}
        if len(found_etags) > 1 or not found_etags <= expected:
            raise ChangedObjectError(f"{self.url}/{name} has been replaced while it was in use")

    def size(self, name: str) -> int:
        """Return an object's size in bytes. Raises MissingObjectError."""
        return int(self._ask(f"{self.url}/{name}", lambda store: store.head(name))["size"])

    def version(self, name: str) -> Version | None:
        """Return an object's version; None if there is no such object."""
        try:
            return _version(self._ask(f"{self.url}/{name}", lambda store: store.head(name)))
        except MissingObjectError:
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the names below `prefix` and their sizes in bytes, as `listing`."""
        return {name: found.num_bytes for name, found in self.listing(prefix).items()}

    def listing(self, prefix: str) -> dict[str, StoredObject]:
        """Return the names below `prefix`, such as ``train/``, and what a listing says about each object. Not for HTTP
        servers."""

        def request(store: "ObjectStore") -> dict[str, StoredObject]:
            return {
                entry["path"]: StoredObject(
                    entry["size"], plain_etag(entry["e_tag"]), entry["last_modified"].isoformat()
                )
                for entries in store.list(prefix)
                for entry in entries
            }

        return self._ask(f"{self.url}/{prefix}", request)

    def write(self, name: str, content: Any, *, new: bool = False, replaced: Version | None = None) -> Version:
        """Write an object: bytes, a path's content, or an open file. Return its version.

        Args:
            new: there must be none yet.
            replaced: it must be this version that is replaced.

        Raises:
            ChangedObjectError: with `new`, there is one; with `replaced`, it is another version.
        """
        mode: Any = "create" if new else replaced or "overwrite"
        return _version(self._ask(f"{self.url}/{name}", lambda store: store.put(name, content, mode=mode), "write"))

    def upload(self, name: str, path: Path, report: Callable[[int], None] = lambda size: None) -> None:
        """Write a file's content as an object, with few pieces of it in memory.

        Args:
            report: called with the number of bytes before each piece is sent, from 0 again if the upload begins again;
                what it raises ends the upload.

        Raises:
            OSError: the file cannot be read.
        """
        with open_regular(path) as file:

            def pieces() -> Iterator[bytes]:
                file.seek(0)
                while piece := file.read(_PIECE_BYTES):
                    report(file.tell() - len(piece))
                    yield piece

            def request(store: "ObjectStore") -> object:
                if os.fstat(file.fileno()).st_size <= _PIECE_BYTES:
                    return store.put(name, b"".join(pieces()))
                return store.put(name, pieces(), chunk_size=_PIECE_BYTES, max_concurrency=_NUM_UPLOADED_PIECES)

            self._ask(f"{self.url}/{name}", request, "write")

    def delete(self, names: str | list[str]) -> None:
        """Delete these objects; those that are missing are no error."""
        self._ask(self.url, lambda store: store.delete(names), "write")

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Call `task` on one of the threads that all buckets share."""
        self._store()  # refuses a forked process, which has no threads
        return _THREADS.submit(task)

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Return ``function(item)`` of each item, in order. Calls run side by side, as `submit` calls them."""
        futures = [self.submit(partial(function, item)) for item in items]
        return (future.result() for future in futures)

    def _store(self) -> "ObjectStore":
        if not _requested_by:
            _requested_by.append(os.getpid())
        elif os.getpid() != _requested_by[0]:  # its threads do not exist here, and the request would never return
            raise ObjectStoreError(
                f"{self.url} is used in a process that was forked from one that had used an object store: start "
                "processes with spawn or forkserver, or make the first request after the fork"
            )
        with self._opening:
            if self._opened is None:
                self._opened = _open(self.url)
            return self._opened

    def _ask(self, what: str, request: Callable[["ObjectStore"], T], kind: Literal["read", "write"] = "read") -> T:
        """Return the result of `request`, retrying with growing, random pauses while that may help."""
        from obstore import exceptions

        store, began = self._store(), time.monotonic()
        for pause in _pauses():
            limit_s = self.retry_s if kind in self._answered else min(self.retry_s, _FIRST_ANSWER_S)
            seconds_left = began + limit_s - time.monotonic()
            try:
                answer = request(store)
            except FileNotFoundError as error:
                if hint := _hopeless(error, what):
                    raise ObjectStoreError(f"{what}{hint}") from error
                raise MissingObjectError(f"{what} does not exist") from error
            except exceptions.PreconditionError as error:
                raise ChangedObjectError(f"{what} has been replaced while it was in use") from error
            except exceptions.AlreadyExistsError as error:
                raise ChangedObjectError(f"{what} exists already") from error
            except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as error:
                # Credentials that worked may be renewed.
                if kind not in self._answered or seconds_left < 0:
                    raise ObjectStoreError(f"{what} is refused: {_reason(error)}; {_credentials(self.url)}") from error
                cause: Exception = error
            except (exceptions.BaseError, OSError, ValueError) as error:
                if kind not in self._answered and any(service in str(error) for service in _METADATA_SERVICES):
                    raise ObjectStoreError(f"{what}: no credentials were found; {_credentials(self.url)}") from error
                hint = _hopeless(error, what)
                if hint or seconds_left < 0:
                    if not hint and kind not in self._answered:
                        hint = f": no answer in {limit_s:.0f} s, check the URL, the endpoint and the network"
                    raise ObjectStoreError(f"{what}: {_reason(error)}{hint}") from error
                cause = error
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of obstore's Rust, where something is very wrong
                    raise
                raise ObjectStoreError(f"{what}: {_reason(error)}; check URL, endpoint and credentials") from error
            else:
                self._answered.add(kind)
                return answer
            if time.monotonic() - max(began, self._warned) > _WARN_AFTER_S:
                self._warned = time.monotonic() + _WARN_EVERY_S
                logger.warning("%s: %s; trying for %.0f s more", what, _reason(cause), seconds_left)
            if _THREADS.ending.wait(pause):
                raise ObjectStoreError(f"{what}: {_reason(cause)}") from cause
        raise AssertionError


class _Threads:
    """Threads for requests. An executor's threads would keep a program from ending while they wait for an unreachable
    store, and threads inside obstore when the interpreter ends could not unwind."""

    def __init__(self) -> None:
        self.ending = threading.Event()
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        atexit.register(self._end)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        with self._starting:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._work, name=f"object-store-{number}", daemon=True)
                    for number in range(_NUM_THREADS)
                ]
                for thread in self._threads:
                    thread.start()
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def _work(self) -> None:
        while (work := self._tasks.get()) is not None:
            future, task = work
            if self.ending.is_set():
                future.cancel()
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    def _end(self) -> None:
        self.ending.set()
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


_THREADS = _Threads()


def _pauses() -> Iterator[float]:
    """Yield seconds to wait: full jitter over a doubling range, so that thousands of ranks do not retry at once."""
    longest = _FIRST_WAIT_S
    while True:
        yield _JITTER.uniform(0, longest)
        longest = min(2 * longest, _LONGEST_WAIT_S)


def _open(url: str) -> "ObjectStore":
    try:
        from obstore.store import from_url
    except ImportError:
        raise ObjectStoreError(f"{url} needs the package obstore: pip install 'dali-train[remote]'") from None
    options: dict[str, Any] = {
        # http:// is used only where a URL or an endpoint in the environment says so.
        "client_options": {"allow_http": True, "connect_timeout": f"{_CONNECT_S}s", "timeout": f"{_REQUEST_S}s"},
        "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=_REQUEST_S)},  # Bucket does more of it
    }
    scheme, _, rest = url.partition("://")
    for name in _ENDPOINTS.get(scheme, ()):
        _check_endpoint(name)
    if scheme == "gs" and "STORAGE_EMULATOR_HOST" in os.environ:
        account = {"gcs_base_url": os.environ["STORAGE_EMULATOR_HOST"], "disable_oauth": True}
        options["service_account_key"] = json.dumps(account | dict.fromkeys(_ACCOUNT_FIELDS, ""))
    try:
        if scheme == "s3" and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
        if scheme == "az":  # obstore's own az:// begins with the account, which the environment has
            from obstore.store import AzureStore

            container, _, prefix = rest.partition("/")
            return AzureStore(container, prefix=prefix or None, **options)
        return from_url(url, **options)
    except Exception as error:  # of obstore, boto3 or their parsers
        raise ObjectStoreError(f"{url} cannot be opened: {_reason(error)}; {_credentials(url)}") from error


def _check_endpoint(name: str) -> None:
    """Raise ObjectStoreError if an environment variable is no address: obstore would panic."""
    value = os.environ.get(name)
    if value is None:
        return
    try:
        address = urlsplit(value)
        valid = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ObjectStoreError(
            f"{name} is {redacted(value)!r} in the environment: use a URL such as https://HOST or http://HOST:PORT, or "
            "unset it"
        )


def _version(answer: Mapping[str, Any]) -> Version:
    return {name: answer[name] for name in ("e_tag", "version") if answer[name] is not None}


def _reason(error: BaseException) -> str:
    """Return the first line of what the store said, `redacted`."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return redacted(" ".join(lines[0].split())) if lines else ""


def _hopeless(error: Exception, url: str) -> str:
    """Return a remedy if repeating the request cannot help, else an empty string."""
    text = str(error)
    if any(code in text for code in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
        return ": there is no such bucket"
    if url.startswith("s3:") and any(word in text for word in ("redirect", "Redirect", "AuthorizationHeaderMalformed")):
        return ": the bucket is in another region, set AWS_REGION to it"
    if "not supported by" in text and "Range request" in text:
        return ": the server must support byte ranges; copy the dataset to one that does, or to a bucket or a disk"
    if isinstance(error, ValueError):
        return ": check the URL"
    return ""


def _credentials(url: str) -> str:
    """Describe where credentials for this kind of store come from."""
    variables = {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role; "
        "AWS_SKIP_SIGNATURE=true reads a public bucket",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; "
        "GOOGLE_SKIP_SIGNATURE=true reads a public bucket",
        "az": "set AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    }
    return variables.get(urlsplit(url).scheme, "the server asks for credentials, which are not sent")
