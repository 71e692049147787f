"""run.mirror: a run that goes on from a bucket is the undisturbed one, whatever is killed, damaged or away."""

import json
import os
import platform
import re
import shutil
import signal
import threading
import time
import uuid
from argparse import Namespace
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dali_train.checkpoint.format import CheckpointError, load_checkpoint
from dali_train.checkpoint.run_directory import checkpoint_paths, local_run, record_top1, saved_score, saved_top1
from dali_train.cli import main
from dali_train.config import load_config
from dali_train.config.sections import RunConfig
from dali_train.errors import ConfigError
from dali_train.extras.doctor.examine import run_directory
from dali_train.extras.mirror import claim, mirror
from dali_train.extras.mirror.claim import Claim
from dali_train.extras.mirror.mirror import Mirror, mirrored
from dali_train.extras.plan.auto_micro_batch import choose
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.lock import Holder
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from tests.conftest import StartTraining, Train, finished_run, jpeg, photograph
from tests.convert.files import files_of
from tests.helpers import OFTEN, PAUSE, events, extended, state_difference
from tests.ranks import FORK
from tests.s3_server import S3Server

URL = "s3://bucket/run"

# No rank past step 8, and checkpoints are uploaded at once.
PAUSE_AT_8 = (
    PAUSE.replace("== 6", "== 8")
    + """
from dali_train.extras.mirror import mirror

mirror._LOOK_S = 0.05
"""
)


pytestmark = pytest.mark.usefixtures("s3_server")


@pytest.fixture
def in_bucket(tiny_config: Path, s3_server: S3Server) -> Path:
    """`tiny_config`, for ranks: those of the pool were started with another environment."""
    path = tiny_config.with_name("in-bucket.py")
    path.write_text(f"{tiny_config.read_text()}\nimport os\nos.environ.update({s3_server.environment!r})\n")
    return path


def steps(url: str) -> list[int]:
    """The steps of the complete checkpoints."""
    content = json.loads(Bucket(url).read_version("mirror.json")[0])
    return [int(folder.split("-")[1]) for folder in content["checkpoints"]]


def folders(url: str) -> set[str]:
    return {name.split("/")[1] for name in Bucket(url).sizes("checkpoints/")}


def run(directory: Path, url: str = URL, **changes: object) -> RunConfig:
    return RunConfig(dir=str(directory), epochs=1.0, mirror=url, **changes)  # type: ignore[arg-type]


def upload(directory: Path, url: str, grace_s: float | None = None, **changes: object) -> None:
    mirror = Mirror(run(directory, url, **changes))
    mirror.grace_s = grace_s
    mirror.start(set())
    mirror.finish()
    mirror.close()


def restore(config: RunConfig, **changed: object) -> list[int]:
    """The steps that `run.dir` has after it, in a run of the mirror's recipe but for what is `changed`."""
    mirror = Mirror(config)
    folder = max(mirror._claim.checkpoints)
    try:
        mirror.restore(config, lambda: {**(mirror._saved_recipe(folder) or {}), **changed})
    finally:
        mirror.close()
    return [int(path.name.removeprefix("step-")) for path in checkpoint_paths(Path(config.dir) / "checkpoints")]


def test_a_run_goes_on_from_its_mirror(
    train: Train, start_training: StartTraining, in_bucket: Path, s3_server: S3Server, tmp_path: Path
) -> None:
    """Four steps with a store that refuses at times; two more on an empty disk, killed in the middle of an upload; the
    rest on another empty disk and on two ranks: the bits of a run that was only resumed."""
    options = (*OFTEN, "--run.keep_checkpoints", "1", "--run.eval_every_epochs", "None", "--hooks.ledger", "true")
    refusals = iter(["503 Slow Down"] * 4)
    s3_server.fault = lambda method, path: next(refusals, None) if "checkpoints/" in path else None
    train("run", *options, "--run.mirror", URL, "--run.max_steps", "4", config=in_bucket)
    directory = tmp_path / "run"
    shutil.copytree(directory, tmp_path / "kept", symlinks=True)
    names = set(Bucket(URL).sizes(""))
    assert names > {"mirror.json", "metrics.jsonl", "status.json", "config.json", "epoch_accuracies.json"}
    (folder,) = folders(URL)
    assert folder.startswith("step-00000004") and names > {
        "report/index.html",
        f"checkpoints/{folder}/model.safetensors",
    }
    assert json.loads(Bucket(URL).read_all("status.json"))["state"] == "finished"

    shutil.rmtree(directory)
    uploaded = threading.Event()

    def stuck(method: str, path: str) -> str | None:
        if method == "PUT" and "step-00000006" in path and path.endswith("manifest.json"):
            uploaded.set()
            time.sleep(60)
        return None

    s3_server.fault = stuck
    doomed = start_training("run", *options, "--run.mirror", URL, config=extended(in_bucket, PAUSE_AT_8))
    while not uploaded.wait(0.1):
        assert doomed.running(), doomed.log.read_text()
    doomed.kill()
    s3_server.fault = None
    assert 6 not in steps(URL) and any("step-00000006" in folder for folder in folders(URL))

    shutil.rmtree(directory)
    output = train("run", *options, "--run.mirror", URL, config=in_bucket, ranks=2)
    assert output.count("resuming from step 4") == 2
    train("kept", *options, ranks=2)
    assert state_difference(directory, tmp_path / "kept") == 0
    assert files_of(directory / "ledger") == files_of(tmp_path / "kept" / "ledger") != {}
    assert [event["step"] for event in events(directory, "train")] == list(range(1, 12))
    local = {path.name for path in checkpoint_paths(directory / "checkpoints")}
    assert {folder[:13] for folder in folders(URL)} <= local and steps(URL)[-1] == 11
    assert json.loads(Bucket(URL).read_all("mirror.json"))["holder"] is None


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoints of steps 3 to 6, of which that of step 5 is the best. It is only read."""
    settings = ("--run.checkpoint_every_steps", "1", "--run.max_steps", "6", "--run.eval_every_epochs", "None")
    settings += ("--hooks.ledger", "true")
    run = finished_run(tmp_path_factory.mktemp("finished"), dataset, *settings)
    for step, top1 in ((5, 0.5), (6, 0.25)):
        record_top1(run / "checkpoints" / f"step-{step:08d}", top1)
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    return run


@pytest.fixture
def url(finished: Path) -> str:
    """A mirror of `finished`, of its newest and its best checkpoint."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    upload(finished, url)
    assert steps(url) == [5, 6]
    return url


@pytest.mark.thorough
def test_commands_take_a_mirror(
    finished: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], photograph_file: Path
) -> None:
    """Of a run, by its URL: its best checkpoint, or another that the mirror has; nothing is left behind."""
    assert main(["eval", str(finished)]) == 0
    accuracy = capsys.readouterr().out.partition("step 5: ")[2]
    assert main(["eval", url]) == 0
    printed = capsys.readouterr().out
    assert f"{url}\nstep 5: {accuracy}" in printed
    assert main(["eval", url, "--checkpoint", "step-00000006"]) == 0 and "step 6: " in capsys.readouterr().out
    assert main(["export", url, "--output", str(tmp_path / "out")]) == 0
    assert f"weights of {url}, step 5" in capsys.readouterr().out and (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["predict", url, str(photograph_file), "--checkpoint", "newest"]) == 0
    assert f"weights of {url}, step 6" in capsys.readouterr().out
    assert main(["prove", url]) == 1  # the scores are the test's, of no evaluation
    printed = capsys.readouterr().out
    assert "1 set of weights with the recorded digest" in printed
    assert printed.count("DIFFERS") == 1 and "metrics.jsonl has no evaluation of step 6" in printed
    assert main(["prove", url, "--replay", "6"]) == 0
    assert "replayed 1 step from step-00000005 to step 6" in capsys.readouterr().out
    picture, table = tmp_path / "picture.png", tmp_path / "table.csv"
    for command in (
        ["blame", "--step", "6", "--picture", str(picture)],
        ["suspects", "--picture", str(picture), "--csv", str(table)],
    ):
        assert main([*command, str(finished)]) == 0
        of_directory = capsys.readouterr().out
        written = files_of(tmp_path)
        picture.unlink()
        assert main([*command, url]) == 0
        assert capsys.readouterr().out == of_directory and files_of(tmp_path) == written
    assert len(table.read_text().splitlines()) > 1
    for words, message in (
        (["blame", url], "so name a file to write, --picture FILE"),
        (["suspects", url, "--csv", str(table)], "so name the files to write, --picture FILE --csv FILE"),
        (["export", url], "so name a directory to write to, --output DIR"),
        (["eval", url, "--checkpoint", "step-00000003"], "has no step-00000003 checkpoint; it has: step-00000005"),
        (["eval", "s3://bucket/nothing"], "s3://bucket/nothing is not the mirror of a run: it has no mirror.json"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_mirror_keeps_the_micro_batch(url: str, tiny_config: Path, tmp_path: Path) -> None:
    """Which `--batch.micro_batch auto` chose once: on an empty disk the run goes on with it, here 4, not 32."""
    values = {"batch.micro_batch": "auto", "run.dir": str(tmp_path / "empty"), "run.mirror": url}
    assert choose(load_config(tiny_config), values, Namespace()) == 4
    assert choose(load_config(tiny_config), values | {"run.mirror": f"{url}/other"}, Namespace()) == 32


@pytest.fixture
def photograph_file(tmp_path: Path) -> Path:
    path = tmp_path / "photograph.jpg"
    path.write_bytes(jpeg(photograph(1, 50, 60)))
    return path


def test_damaged_checkpoints_are_passed_over(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert restore(run(tmp_path / "whole", url)) == [5, 6]
    links = {name: (tmp_path / "whole" / "checkpoints" / name).readlink().name for name in ("newest", "best")}
    assert links == {"newest": "step-00000006", "best": "step-00000005"}
    (folder,) = (name for name in folders(url) if name.startswith("step-00000006"))
    names = [name for name in Bucket(url).sizes(f"checkpoints/{folder}/") if name.endswith(".safetensors")]
    name = next(name for name in names if not name.endswith("/model.safetensors"))
    content = bytearray(Bucket(url).read_all(name))
    content[-5] ^= 1
    Bucket(url).write(name, bytes(content))
    assert restore(run(tmp_path / "before", url)) == [5]
    assert f"{url}/{folder} is damaged and skipped" in caplog.text
    assert load_checkpoint(tmp_path / "before" / "checkpoints" / "newest").step == 5
    Bucket(url).delete([name for name in Bucket(url).sizes("checkpoints/") if name.endswith("manifest.json")])
    with pytest.raises(CheckpointError, match=f"no checkpoint in {url} is complete: choose another prefix"):
        restore(run(tmp_path / "none", url))


def test_the_further_one_of_directory_and_mirror_is_taken(
    url: str, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind = tmp_path / "behind"
    shutil.copytree(finished, behind, symlinks=True)
    shutil.rmtree(behind / "checkpoints" / "step-00000005")
    assert restore(run(behind, url, resume="auto")) == [3, 4, 6] and "is ahead" not in caplog.text
    shutil.rmtree(behind / "checkpoints" / "step-00000006")
    chosen = str(behind / "checkpoints" / "step-00000003")
    assert restore(run(behind, url, resume=chosen)) == [3, 4]
    assert restore(run(behind, url)) == [3, 4, 5, 6]
    assert f"{url} is at step 6 and {behind} at step 4: resuming from the mirror" in caplog.text
    assert events(behind, "train") and (behind / "set-aside-1-metrics.jsonl").exists()
    # What the directory has no longer, the mirror need not have; what others put there is theirs.
    (folder,) = (name for name in folders(url) if name.startswith("step-00000006"))
    theirs = {"my-best-copy/manifest.json", "step-00000006-0123456789abcdef/manifest.json", f"{folder}/notes.txt"}
    for name in theirs:
        Bucket(url).write(f"checkpoints/{name}", b"")
    shutil.rmtree(behind / "checkpoints" / "step-00000006")
    upload(behind, url)
    assert steps(url) == [5]
    rest = {name.removeprefix("checkpoints/") for name in Bucket(url).sizes("checkpoints/")}
    assert theirs == {name for name in rest if not name.startswith("step-00000005")}


def restore_in(environment: dict[str, str], config: RunConfig) -> None:
    os.environ.update(environment)
    restore(config)


@pytest.mark.parametrize("asked", ["metrics.jsonl", "step-00000005", "step-00000006"])
def test_a_download_that_was_killed_is_completed(url: str, s3_server: S3Server, tmp_path: Path, asked: str) -> None:
    """Else what is missing is lost: the next upload replaces the mirror's metrics, and removes checkpoints that the
    directory does not have."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def stuck(method: str, path: str) -> None:
        if method == "GET" and f"/{asked}" in path:
            is_asked.set()
            may_answer.wait()

    s3_server.fault = stuck
    process = FORK.Process(target=restore_in, args=(s3_server.environment, run(tmp_path / "run", url)))
    process.start()
    assert is_asked.wait(60)
    process.kill()
    process.join()
    may_answer.set()
    assert restore(run(tmp_path / "run", url)) == [5, 6]
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [*range(1, 7)]
    links = {name: (tmp_path / "run" / "checkpoints" / name).readlink().name for name in ("newest", "best")}
    assert links == {"newest": "step-00000006", "best": "step-00000005"}


def test_a_mirror_has_the_best_few(url: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    record_top1(tmp_path / "copy" / "checkpoints" / "step-00000003", 0.4)
    upload(tmp_path / "copy", url, keep_best=2)
    assert steps(url) == [3, 5, 6]
    assert restore(run(tmp_path / "two", url, keep_best=2)) == [3, 5, 6]
    assert (tmp_path / "two" / "checkpoints" / "best").readlink().name == "step-00000005"
    assert restore(run(tmp_path / "one", url)) == [5, 6]


def test_a_mirror_ranks_as_the_run_does(url: str, finished: Path, tmp_path: Path) -> None:
    """By run.best_by: here by a score of which the checkpoint with the worst top-1 has the best."""
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    for step, top1, score in ((4, 0.1, -0.25), (5, 0.5, -0.5), (6, 0.25, -0.75)):
        record_top1(tmp_path / "copy" / "checkpoints" / f"step-{step:08d}", top1, score)
    upload(tmp_path / "copy", url, best_by="loss")
    assert steps(url) == [4, 5, 6], "what was there stays"
    assert restore(run(tmp_path / "fetched", url, best_by="loss")) == [4, 6]
    best = tmp_path / "fetched" / "checkpoints" / "best"
    assert best.readlink().name == "step-00000004"
    assert (saved_top1(best), saved_score(best)) == (0.1, -0.25)
    with local_run(url, "best") as directory:
        assert saved_score(directory / "checkpoints" / "best") == -0.25


def test_other_runs_are_refused(url: str, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run.resume is never, but run.mirror {url} has checkpoints"):
        restore(run(tmp_path, url, resume="never"))
    empty = tmp_path / "empty"
    refused = rf"differs from that of run.mirror {url}: data.seed 0 -> 7. Undo the change, choose another prefix as"
    with pytest.raises(ConfigError, match=refused):
        restore(run(empty, url), **{"data.seed": 7})
    assert not list(empty.glob("*/*")), "nothing is downloaded before"
    assert restore(run(empty, url, accept_changed_recipe=True), **{"data.seed": 7})[-1] == 6
    Bucket(f"{url}/x").write("photo.jpg", b"")
    with pytest.raises(ConfigError, match=f"run.mirror {url}/x has no mirror.json but other objects, such as photo"):
        restore(run(tmp_path, f"{url}/x"))


# Who writes there


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is one of another machine."""
    host = uuid.uuid4().hex
    holder = replace(Holder.this_process(), host=host, machine=host)
    monkeypatch.setattr(Holder, "this_process", lambda: replace(holder, token=uuid.uuid4().hex))


def test_a_mirror_in_use_is_refused(url: str, train: Train, in_bucket: Path) -> None:
    claimed = Claim(Bucket(url), say=print)
    said = f"run.mirror {url} is in use: pid {os.getpid()} on {platform.node()}, since .* writes there"
    assert re.search(said, train("other", "--run.mirror", url, config=in_bucket, ranks=2, status=2))
    claimed.release()


def test_one_of_several_takes_over_and_a_frozen_writer_completes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 0.1)
    monkeypatch.setattr(claim, "STALE_S", 0.5)
    frozen = Claim(Bucket(url), say=print)
    elsewhere(monkeypatch)
    # It gives signs of life.
    timer = threading.Timer(0.2, frozen.renew)
    timer.start()
    with pytest.raises(ConfigError, match=f"{url} is in use: pid {os.getpid()} on"):
        Claim(Bucket(url), say=print)
    timer.join()
    # Now it is frozen.
    taken: list[Claim] = []
    refused: list[str] = []

    def contend() -> None:
        try:
            taken.append(Claim(Bucket(url), say=print))
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 3 and all("is in use" in text for text in refused)
    before = Bucket(url).read_all("mirror.json")
    assert not frozen.renew({}) and Bucket(url).read_all("mirror.json") == before
    assert f"{url}/mirror.json was taken over by pid" in caplog.text
    frozen.release()
    assert Bucket(url).read_all("mirror.json") == before
    assert taken[0].renew()


def test_a_run_whose_mirror_was_taken_over_uploads_no_more(
    url: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    frozen = Mirror(run(tmp_path / "run", url))
    content = json.loads(Bucket(url).read_all("mirror.json"))
    Bucket(url).write("mirror.json", json.dumps(content | {"holder": None}).encode())
    taken = Claim(Bucket(url), say=print)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    frozen.start(set())
    frozen.finish()
    frozen.close()
    assert Bucket(url).size("metrics.jsonl") > 0 and taken.renew()


def test_a_writer_that_wakes_replaces_nothing_of_its_successor(
    url: str, finished: Path, s3_server: S3Server, tmp_path: Path
) -> None:
    for name in ("frozen", "next"):
        shutil.copytree(finished, tmp_path / name, symlinks=True)
    (tmp_path / "next" / "metrics.jsonl").write_text("{}\n")

    def freeze(method: str, path: str) -> str | None:
        """Let another run take over while the first one's metrics are on their way."""
        if method == "PUT" and path.endswith("metrics.jsonl"):
            s3_server.fault = None
            content = json.loads(Bucket(url).read_all("mirror.json"))
            Bucket(url).write("mirror.json", json.dumps(content | {"holder": None}).encode())
            upload(tmp_path / "next", url)
        return None

    s3_server.fault = freeze
    upload(tmp_path / "frozen", url)
    assert s3_server.fault is None and Bucket(url).read_all("metrics.jsonl") == b"{}\n"


def test_a_checkpoint_that_is_removed_during_its_upload_is_not_complete(
    finished: Path, s3_server: S3Server, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    url = f"s3://bucket/{uuid.uuid4().hex}"

    def remove(method: str, path: str) -> None:
        if method == "PUT" and "step-00000006" in path:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006", ignore_errors=True)

    s3_server.fault = remove
    upload(tmp_path / "run", url)
    assert steps(url) == [5]


def test_a_checkpoint_that_is_removed_while_the_directory_is_listed_is_replaced_by_the_newer_one(
    url: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    newest, newer = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (6, 7))
    folder = mirror._folder

    def replace_newest(path: Path, step: int) -> str:
        if newest.exists():
            newest.rename(newer)
        return folder(path, step)

    monkeypatch.setattr(mirror, "_folder", replace_newest)
    upload(tmp_path / "run", url)
    assert steps(url) == [5, 7]


def test_an_answer_that_is_lost_loses_no_claim(url: str, s3_server: S3Server) -> None:
    """The store has replaced mirror.json, and says so when it is too late: the request made again is refused."""
    claimed = Claim(Bucket(url), say=print)
    statuses = iter(["done, 500 Internal Server Error"])
    s3_server.fault = lambda method, path: next(statuses, None) if method == "PUT" else None
    assert claimed.renew({})
    assert claimed.renew() and steps(url) == []


# A store that is away


@pytest.mark.thorough
def test_a_store_that_is_away_ends_nothing(
    finished: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    monkeypatch.setattr(mirror, "_IMPATIENT_S", 0.2)
    monkeypatch.setattr(claim, "STALE_S", 0.2)
    monkeypatch.setattr(claim, "BEAT_S", 0.1)
    mirror_ = Mirror(run(finished, url))
    s3_server.fault = lambda method, path: "503 Slow Down"
    mirror_.start(set())
    mirror_.grace_s = 1.0
    missing = mirror_.finish()
    assert re.search(rf"{url} lacks \d+ parts of {finished}: checkpoint step-00000005, .*longer than 1 s.*503", missing)
    mirror_.close()
    assert "the run continues, and the upload is retried" in caplog.text
    wait(mirror_._tasks)
    with suppress(ObjectStoreError):  # `close` may have given up before its own release did
        mirror_._claim.release()
    s3_server.fault = None
    assert steps(url) == []
    elsewhere(monkeypatch)
    upload(finished, url)
    assert steps(url) == [5, 6]


def test_what_cannot_be_written_is_told_before_training(s3_server: S3Server, tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config).replace({"run.mirror": URL, "run.dir": str(tmp_path)})
    s3_server.fault = lambda method, path: "403 Forbidden" if method == "PUT" else None
    with (
        pytest.raises(ConfigError, match=f"run.mirror: {URL}/mirror.json is refused: .*set AWS_ACCESS_KEY_ID"),
        mirrored(config, discover(LaunchOptions())),
    ):
        pass
    s3_server.fault = lambda method, path: "301 Moved Permanently"
    with (
        pytest.raises(
            ConfigError, match=f"{URL}/mirror.json: .*: the bucket is in another region, set AWS_REGION to it"
        ),
        mirrored(config, discover(LaunchOptions())),
    ):
        pass
    s3_server.fault = lambda method, path: "403 Forbidden" if method == "PUT" else None
    findings = {finding.check: finding for finding in run_directory(config.run, discover(LaunchOptions()), 0)}
    assert findings["mirror"].verdict == "fail" and "is refused" in findings["mirror"].text


REFUSED = """
from dali_train.extras.mirror import mirror

mirror._STALLED_S, mirror._IMPATIENT_S = 2.0, 0.5
"""


@pytest.mark.thorough
def test_a_store_that_refuses_from_some_moment_on(
    start_training: StartTraining, train: Train, in_bucket: Path, s3_server: S3Server, tmp_path: Path
) -> None:
    """Credentials expire during the last upload: a finished run ends, says what is missing, and sends it when it is
    started again. Ctrl-C ends such an upload too."""

    def expired(method: str, path: str) -> str | None:
        return "403 Forbidden" if method == "PUT" and "checkpoints/" in path else None

    url, status = f"s3://bucket/{uuid.uuid4().hex}", tmp_path / "run" / "status.json"

    def ends(stalled_s: float, interrupted: bool) -> str:
        status.unlink(missing_ok=True)
        impatient = REFUSED.replace("2.0,", f"{stalled_s},")
        ranks = start_training("run", "--run.mirror", url, config=extended(in_bucket, impatient), ranks=2)
        while interrupted and not (status.exists() and json.loads(status.read_text())["state"] == "finished"):
            assert ranks.running(), ranks.log.read_text()
            time.sleep(0.1)
        if interrupted:
            time.sleep(1)
            for pid in ranks.pids():
                os.kill(pid, signal.SIGINT)
        assert set(ranks.wait()) == {1}, ranks.log.read_text()
        return ranks.log.read_text()

    s3_server.fault = expired
    output = ends(2.0, interrupted=False)
    assert re.search(
        rf"{url} lacks \d parts of .*: checkpoint step-0+\d, .*checkpoint step-0+7, .*no progress for 2 s .*refused",
        output,
    ), output
    assert "start the same command again to complete the mirror" in output and "Traceback" not in output
    output = ends(60.0, interrupted=True)
    assert "the run is saved, ending its upload" in output and "Ctrl-C ended the upload" in output
    assert "without saving" not in output and "Traceback" not in output
    s3_server.fault = None
    train("run", "--run.mirror", url, config=in_bucket)
    assert steps(url)[-1] == 7
