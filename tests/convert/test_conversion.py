"""Complete conversions: the same bytes in every way they can be made, nothing half done, and errors that say how to
continue."""

import fcntl
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_train.data.convert import conversion, shards
from dali_train.data.convert.conversion import default_num_shards, shuffled_layout
from dali_train.data.convert.sources import held_out
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.errors import RunError
from tests.conftest import REPOSITORY, encoded, photograph
from tests.convert.files import EPS, convert, files_of, small_photograph, write_folder, write_training_archive
from tests.ranks import FORK, patience

CLASSES = {"ant": 9, "bee": 12, "cat": 10, "dog": 6}
TOOL = [sys.executable, str(REPOSITORY / "tools" / "make_tfrecords.py")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", CLASSES)


def convert_folder(folder: Path, out: Path, *options: object) -> int:
    return convert("folder", "--train", folder, "--out", out, "--train-shards", 5, *options)


def images_of(out: Path, split: str = "train") -> list[bytes]:
    opened = Split(out, split)
    return [stored_image(MappedFiles(opened), image).tobytes() for image in range(len(opened))]


def test_same_bytes_for_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    results = []
    for number in (1, 2, 32):
        out = tmp_path / f"workers-{number}"
        assert convert_folder(folder, out, "--workers", number, "--validation-fraction", "0.2") == 0
        results.append(files_of(out))
    assert results[0] == results[1] == results[2]
    sizes = [shard.num_records for shard in Split(tmp_path / "workers-1", "train").manifest.splits["train"].shards]
    assert sum(sizes) + len(images_of(tmp_path / "workers-1", "validation")) == sum(CLASSES.values())
    assert max(sizes) - min(sizes) <= 1
    # All that is in the end is what the format names.
    assert {name.split("/")[0] for name in results[0]} == {"dataset.json", "index", "idx_files", "train", "validation"}


def test_images_are_shuffled_over_all_shards_by_the_seed(folder: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        assert convert_folder(folder, tmp_path / str(seed), "--seed", seed) == 0
    first, second = images_of(tmp_path / "0"), images_of(tmp_path / "1")
    assert first != second and sorted(first) == sorted(second)
    labels = Split(tmp_path / "0", "train").rows["label"]
    assert np.count_nonzero(np.diff(labels)) > 15  # classes are mixed


@pytest.mark.thorough
def test_killed_runs_end_with_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at a random moment of a run with decoding, re-encoding and a bad image to skip, again and again."""
    folder = write_folder(tmp_path / "images", {"ant": 16, "bee": 16, "cat": 16})
    (folder / "ant" / "bad.jpg").write_bytes(small_photograph(7)[:-50])
    (folder / "bee" / "cmyk.jpg").write_bytes(encoded(photograph(1, 64, 64).convert("CMYK"), "JPEG"))
    options = ["folder", "--train", str(folder), "--validation-fraction", "0.2", "--on-bad", "skip"]
    arguments = [*options, "--train-shards", "12", "--validation-shards", "3", "--workers", "2", "--out"]
    undisturbed = tmp_path / "undisturbed"
    assert end_of(start_convert([*arguments, str(undisturbed)])) == 0
    began = time.monotonic()
    assert end_of(start_convert([*arguments, str(tmp_path / "timed")])) == 0
    duration_s = time.monotonic() - began
    expected = files_of(undisturbed)
    assert "quarantine.jsonl" in expected

    moments = random.Random(0)
    kills = rounds = 0
    while kills < 10:
        out = tmp_path / f"killed-{rounds}"
        rounds += 1
        for _ in range(5):
            process = start_convert([*arguments, str(out)])
            process.join(moments.uniform(0, 1.1) * duration_s)
            process.kill()
            kills += end_of(process) == -signal.SIGKILL
        assert end_of(start_convert([*arguments, str(out)])) == 0
        assert files_of(out) == expected


def start_convert(
    arguments: list[str], log: Path = Path(os.devnull), prepare: Callable[[], None] | None = None
) -> multiprocessing.process.BaseProcess:
    """In a process of its own, forked from one that has imported everything already, in which `prepare` is called
    before."""
    process = FORK.Process(target=convert_into_log, args=(arguments, log, prepare))
    process.start()
    return process


def convert_into_log(arguments: list[str], log: Path, prepare: Callable[[], None] | None) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if prepare is not None:
        prepare()
    sys.exit(convert(*arguments))


def end_of(process: multiprocessing.process.BaseProcess) -> int | None:
    """The exit status; minus the signal that ended it."""
    process.join(100)
    return process.exitcode


def test_parts_have_the_bytes_of_one_process(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four, one killed and started again, one run twice at once, and one forgotten."""
    (folder / "ant" / "bad.jpg").write_bytes(small_photograph(7)[:-50])
    options = ["--train-shards", "12", "--validation-fraction", "0.2", "--validation-shards", "2", "--on-bad", "skip"]
    assert convert_folder(folder, tmp_path / "one", *options) == 0
    out = tmp_path / "out"
    arguments = ["folder", "--train", str(folder), "--out", str(out), *options]
    assert convert_folder(folder, out, *options, "--part", "1/4") == 2
    assert f"{out} is not planned yet: start the same command with --plan once" in capsys.readouterr().err
    assert convert_folder(folder, out, *options, "--plan") == 0
    planned = capsys.readouterr().out
    assert "train: 31 images in 12 shards\nvalidation: 7 images in 2 shards\n" in planned
    assert end_of(start_convert([*arguments, "--part", "2/4"], prepare=kill_at_third_shard)) == -signal.SIGKILL
    with (out / ".conversion" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # a part that is being written
        assert convert_folder(folder, out, *options, "--plan") == 0, "what each pod of a Kubernetes Job does first"
        assert capsys.readouterr().out == planned
    twins = [start_convert([*arguments, "--part", "3/4"]) for _ in range(2)]
    assert [end_of(twin) for twin in twins] == [0, 0]
    for part in ("4/4", "2/4"):
        assert convert_folder(folder, out, *options, "--part", part) == 0
    assert convert_folder(folder, out, *options, "--finish") == 2
    forgotten = "4 shards not there or damaged, train-00000-of-00012 the first of them. Start --part 1/4, then --finish"
    assert forgotten in capsys.readouterr().err
    assert convert_folder(folder, out, *options, "--part", "1/4") == 0
    assert convert_folder(folder, out, *options, "--finish") == 0
    assert files_of(out) == files_of(tmp_path / "one") and "quarantine.jsonl" in files_of(out)
    (out / ".conversion").mkdir()
    (out / ".conversion" / "lock").touch()  # of a process that was suspended until the others had finished
    assert convert_folder(folder, out, *options, "--part", "1/4") == 0
    assert "is complete already: nothing to do" in capsys.readouterr().out
    assert files_of(out) == files_of(tmp_path / "one")


def kill_at_third_shard() -> None:
    publish, published = shards.publish, list[Path]()

    def publish_or_die(path: Path) -> None:
        publish(path)
        published.append(path)
        if len(published) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    shards.publish, shards._FLUSHERS = publish_or_die, 1


def test_a_killed_run_is_not_begun_anew(folder: Path, tmp_path: Path) -> None:
    """What was converted before the kill is not converted again."""
    out = tmp_path / "out"
    arguments = ["folder", "--train", str(folder), "--out", str(out), "--train-shards", "5", "--workers", "1"]
    assert end_of(start_convert(arguments, prepare=kill_at_third_shard)) == -signal.SIGKILL
    assert len(list((out / ".conversion").glob("*.npz"))) == 2  # the third shard has no note: it is made again
    before = {path.name: path.stat().st_mtime_ns for path in (out / "train").iterdir() if not path.name.startswith(".")}
    assert len(before) == 3
    assert convert_folder(folder, out, "--workers", "1") == 0
    kept = [name for name, changed in before.items() if (out / "train" / name).stat().st_mtime_ns == changed]
    assert len(kept) == 2
    assert not list(out.rglob(".*"))


@pytest.mark.parametrize("complete", [True, False])
def test_other_options_or_another_source_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], complete: bool
) -> None:
    out = tmp_path / "out"
    options = ["--validation-fraction", "0.2", "--train-shards", "5", "--out", out, "--train"]
    assert convert("folder", *options, folder, *([] if complete else ["--plan"])) == 0

    def error(*arguments: object) -> str:
        capsys.readouterr()
        assert convert("folder", *options, *arguments) == 2
        text = capsys.readouterr().err
        assert f"{out} holds a conversion with other options" in text and "Repeat those, or use another --out" in text
        return text.partition("): ")[2].partition(". Repeat")[0]

    assert error(folder, "--seed", 1, "--quality", 90).endswith("--seed was 0, now 1; --quality was 95, now 90")
    assert error(folder, "--short-side", 400) == "--short-side was not given, now 400"
    assert error(folder, "--no-apply-orientation") == "--apply-orientation was True, now False"
    assert error(folder, "--validation-fraction", 0.3) == "--validation-fraction was 0.2, now 0.3"
    assert error(folder, "--group-by", "([0-9]).jpg") == "--group-by was not given, now ([0-9]).jpg"
    options = options[2:]
    assert error(folder) == "--validation-fraction was 0.2, now not given"
    validation = write_folder(tmp_path / "validation", {"ant": 1})
    assert error(folder, "--validation", validation) == "--validation-fraction was 0.2, now not given"
    options = ["--validation-fraction", "0.2", *options]
    changed = write_folder(tmp_path / "other" / "images", CLASSES, first_seed=1)
    assert error(changed) == (
        "the train source has files, sizes or labels that it had not before; "
        "the validation source has files, sizes or labels that it had not before"
    )
    (folder / "ant" / "new.jpg").write_bytes(small_photograph(5))
    assert error(folder).startswith("the train source had this number of images: 37, now 38")
    (folder / "ant" / "new.jpg").unlink()
    assert convert("folder", *options, folder, "--workers", 7) == 0
    assert "is complete already: nothing to do" in capsys.readouterr().out or not complete


def test_somebody_elses_record_of_a_conversion(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [tmp_path / "out", "--validation-fraction", 0.2]
    assert convert_folder(folder, *arguments) == 0
    path = tmp_path / "out" / "dataset.json"
    manifest = json.loads(path.read_text())
    recorded = manifest["conversion"]["options"]
    for wrong in ({"train_source": 3}, {"train_source": {"name": [1]}}):
        path.write_text(json.dumps(manifest | {"conversion": {"options": recorded | wrong}}))
        assert convert_folder(folder, *arguments) == 2
        assert "holds a conversion with other options or another source" in capsys.readouterr().err
    for options in ({}, 3, {"seed": 0}):
        path.write_text(json.dumps(manifest | {"conversion": {"options": options}}))
        assert convert_folder(folder, *arguments) == 2
        assert "holds a dataset that was not converted here" in capsys.readouterr().err


def test_what_is_refused_leaves_nothing_behind(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("all of it")
    (tmp_path / "work" / "link").symlink_to("nowhere")
    before = files_of(tmp_path)
    for out, message, *options in (
        (thesis.parent, "holds link, thesis.tex but no conversion to resume: use an empty directory for --out"),
        (folder, f"--out {folder}: lies in --train {folder}: name a directory outside of it"),
        (folder / "ant" / "new", f"lies in --train {folder}: name a directory outside of it"),
        (thesis, f"--out {thesis}: {thesis} is a file: name a new directory, or an empty one"),
        (thesis / "out", f"{thesis} is a file: name a new directory"),
        (tmp_path / "work" / "link", "link: is a link to what does not exist: remove it, or mend it"),
        (tmp_path / ("x" * 5000), "…: File name too long: name another directory"),
        (tmp_path / "out", "is not planned yet: start the same command with --plan", "--part", "1/2"),
        (tmp_path / "out", "--train-shards is 99: use 1 to 37", "--train-shards", 99),
    ):
        assert convert_folder(folder, out, *options) == 2
        assert message in capsys.readouterr().err
    assert files_of(tmp_path) == before and sorted(path.name for path in tmp_path.iterdir()) == ["images", "work"]


def test_a_place_that_is_closed_to_the_user(folder: Path, tmp_path: Path) -> None:
    closed, log = tmp_path / "closed", tmp_path / "log"
    closed.mkdir(mode=0o555)
    arguments = ["folder", "--train", str(folder), "--out", str(closed / "out")]
    assert end_of(start_convert(arguments, log, drop_privileges)) == 2
    assert "cannot be written to: name another directory, or allow it" in log.read_text()


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)


def test_two_at_a_time_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "out" / ".conversion"
    state.mkdir(parents=True)
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert convert_folder(folder, tmp_path / "out") == 2
    assert "another process is writing into this directory" in capsys.readouterr().err


BAD = {
    "ant/truncated.jpg": (lambda: small_photograph(3)[:-20], "cannot be decoded: image file is truncated"),
    "bee/empty.jpg": (lambda: b"", "not an image in a known format"),
    "bee/figure.jpg": (lambda: EPS, "not an image in a known format"),  # PIL would start Ghostscript
    "bee/page.jpg": (lambda: b"<html>gone</html>", "not an image in a known format"),
    "cat/short.png": (lambda: encoded(photograph(1, 40, 40), "PNG")[:500], "cannot be decoded"),
}


def test_bad_images_fail_when_all_are_known_then_can_be_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make: Callable[[], bytes]
    good_images = sorted(path.read_bytes() for path in folder.rglob("*.jpg"))
    for name, (make, _) in BAD.items():
        (folder / name).write_bytes(make())
    out = tmp_path / "out"
    assert convert_folder(folder, out) == 1
    error = capsys.readouterr().err
    assert "5 images cannot be decoded" in error and "Start the same command again with --on-bad skip" in error
    quarantine = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert {line["file"] for line in quarantine} == {str(folder / name) for name in BAD}
    for line in quarantine:
        _, reason = BAD[str(Path(line["file"]).relative_to(folder))]
        assert reason in line["reason"] and line["split"] == "train" and line["position"] == 0
        assert line["file"] in error
    assert not (out / "dataset.json").exists()

    assert convert_folder(folder, out, "--on-bad", "skip") == 0
    assert "5 images: left out, see quarantine.jsonl" in capsys.readouterr().out
    assert sorted(images_of(out)) == good_images
    # The detour over the failure leaves no trace.
    assert convert_folder(folder, tmp_path / "at-once", "--on-bad", "skip") == 0
    assert files_of(out) == files_of(tmp_path / "at-once")


def test_a_shard_without_good_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "images", {"ant": 4})
    (folder / "ant" / "bad.jpg").write_bytes(b"")
    assert convert_folder(folder, tmp_path / "out", "--on-bad", "skip") == 1
    assert re.search(
        "train-0000.-of-00005 has no good image: delete .*/out and start with fewer --train-shards than 5",
        capsys.readouterr().err,
    )


def test_without_decode_check_headers_still_count(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ant" / "truncated.jpg").write_bytes(small_photograph(3)[:-20])
    assert convert_folder(folder, tmp_path / "a", "--no-decode-check") == 0
    (folder / "ant" / "page.jpg").write_bytes(b"<html>gone</html>")
    assert convert_folder(folder, tmp_path / "b", "--no-decode-check") == 1
    assert "1 image cannot be decoded" in capsys.readouterr().err


def test_what_is_re_encoded_is_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ant" / "a.jpg").write_bytes(encoded(photograph(1, 40, 60).convert("CMYK"), "JPEG"))
    (folder / "ant" / "b.jpg").write_bytes(encoded(photograph(2, 40, 60), "PNG"))
    exif = Image.Exif()
    exif[0x0112] = 3
    (rotated := folder / "bee" / "c.jpg").write_bytes(encoded(photograph(3, 40, 60), "JPEG", exif=exif))
    assert convert_folder(folder, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    for line in (
        "1 image: re-encoded: CMYK JPEG",
        "1 image: re-encoded: RGB PNG",
        "1 image: turned upright, as their EXIF orientation says",
    ):
        assert f"train: {line}" in printed
    manifest = Split(tmp_path / "out", "train").manifest
    assert manifest.conversion["report"]["train"]["re-encoded: CMYK JPEG"] == 1
    assert manifest.applies_orientation and manifest.conversion["options"]["apply_orientation"]
    assert convert_folder(folder, tmp_path / "kept", "--no-apply-orientation") == 0
    assert "train: 1 image: EXIF orientation not upright" in capsys.readouterr().out
    assert not Split(tmp_path / "kept", "train").manifest.applies_orientation
    turned = [root for root in ("out", "kept") if rotated.read_bytes() not in images_of(tmp_path / root)]
    assert turned == ["out"]


def fill_disk() -> None:
    """The limit on a file's size stands in for the disk: the system refuses writes in the same way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_is_named_and_the_run_goes_on_after_space_is_made(folder: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = ["folder", "--train", str(folder), "--train-shards", "3", "--out", str(out)]
    assert end_of(start_convert(arguments, log, fill_disk)) == 1
    assert (
        "allows (File too large). What is finished is kept: raise the limit and start the same "
        "command again" in log.read_text()
    )
    assert "Traceback" not in log.read_text()
    assert not [path for path in (out / "train").iterdir() if not path.name.startswith(".")]
    for again in (out, tmp_path / "other"):
        assert convert_folder(folder, again, "--train-shards", "3") == 0
    assert files_of(out) == files_of(tmp_path / "other")


def test_ctrl_c_stops_cleanly(tmp_path: Path) -> None:
    archive = write_training_archive(tmp_path / "train.tar", num_images=200)
    arguments = ["imagenet", "--train-archive", str(archive), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(
        [*TOOL, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background jobs, such as tests, ignore it
    )
    while not list((tmp_path / "out").glob("train/.*.partial")):
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=patience(60))
    assert process.returncode == 130
    assert "stopped; start the same command again to resume" in error and "Traceback" not in error
    assert end_of(start_convert(arguments)) == 0


def test_a_spoilt_note_costs_only_its_shard(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def stop(*_: object, **__: object) -> None:
        raise RunError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_index", stop)
        assert convert_folder(folder, out) == 1
    notes = sorted((out / ".conversion").glob("*.npz"))
    assert len(notes) == 5
    (out / "idx_files" / "train").mkdir(parents=True)
    for place in (out, out / ".conversion", out / "train", out / "idx_files" / "train"):
        (place / ".x.1234.partial").write_text("what a killed run left")
    os.truncate(notes[0], 100)
    notes[1].write_bytes(b"")
    content = bytearray(notes[4].read_bytes())
    content[content.rindex(b"PK\1\2") + 10] ^= 64  # how zip's last file is compressed: by no method that is known
    notes[4].write_bytes(content)
    os.truncate(out / "train" / "train-00002-of-00005", 10)
    (out / "train" / "train-00003-of-00005").unlink()
    assert convert_folder(folder, out) == 0
    assert convert_folder(folder, tmp_path / "other") == 0
    assert files_of(out) == files_of(tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-shards", "38"], "--train-shards is 38: use 1 to 37, the split has 37 images"),
        (["--part", "5/4"], "--part is 5/4: use I/N with I from 1 to N, such as 3/16"),
        (["--part", "16"], "--part is 16: use I/N"),
        (["--seed", "-1"], "--seed is -1: use 0 to 2**63 - 1"),
        (["--seed", str(1 << 63)], "--seed is 9223372036854775808: use 0 to 2**63 - 1"),
        (["--quality", "0"], "--quality is 0: use 1 to 100"),
        (["--validation-fraction", "1.5"], "--validation-fraction is 1.5: use a fraction between 0 and 1"),
        (["--validation", "."], "the class folders must agree"),
    ],
)
def test_options_that_make_no_sense(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    if options[0] == "--validation":
        options = ["--validation", str(write_folder(tmp_path / "validation", {"elk": 1}))]
    assert convert_folder(folder, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("num_images", "num_shards"), [(1, 1), (10, 3), (1000, 7), (1024, 1024), (1281, 64)])
def test_every_image_once_and_sizes_level(num_images: int, num_shards: int) -> None:
    layout = shuffled_layout(num_images, num_shards, seed=3)
    sizes = [len(images) for images in layout]
    assert len(sizes) == num_shards
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.sort(np.concatenate(layout)), np.arange(num_images))


def test_default_number_of_shards() -> None:
    assert default_num_shards("train", num_images=1_281_167, num_bytes=140 * 10**9) == 1024
    assert default_num_shards("validation", num_images=50_000, num_bytes=6 * 10**9) == 128
    assert default_num_shards("train", num_images=1437, num_bytes=4 * 10**6) == 4
    assert default_num_shards("validation", num_images=360, num_bytes=10**6) == 1
    assert default_num_shards("train", num_images=3, num_bytes=10**9) == 3


def test_held_out_takes_the_fraction_of_each_class() -> None:
    labels = np.repeat(np.arange(4, dtype=np.int32), [1, 2, 10, 100])
    chosen = held_out(labels, 0.2, seed=5)
    assert np.bincount(labels[chosen], minlength=4).tolist() == [0, 1, 2, 20]
    assert not np.array_equal(chosen, held_out(labels, 0.2, seed=6))
