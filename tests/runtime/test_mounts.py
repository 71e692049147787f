"""Real mounts of file systems in user space, which do as network file systems do: a removed file that is open stays
under another name, hosts have caches of their own, and a mount may go away.

bindfs shows a directory again; sshfs speaks SFTP with a server of this machine, and keeps attributes for seconds. Each
mount stands for a host of its own. docs/operating.md says what cannot be mounted here.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartTraining, Train, finished_run, run_in_pool
from tests.convert.files import convert, files_of, write_folder
from tests.helpers import PAUSE, extended, kill_after_step_4, state_difference, wait_until

pytestmark = pytest.mark.thorough

SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
Mount = Callable[[str], Path]
CLASSES = {"ant": 9, "bee": 12, "cat": 10}
OFTEN = ("--run.checkpoint_every_steps", "2")
NOT_EVALUATED = ("--run.eval_every_epochs", "none")
SLOW = """
import time

class Slow(Hook):
    def step(self, record):
        time.sleep(0.5)
"""


@pytest.fixture(params=["bindfs", "sshfs"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mount]:
    """``mount("a")`` mounts one disk, always the same, at ``tmp_path/a``."""
    disk, mounted = tmp_path / "disk", list[Path]()
    disk.mkdir()

    def mount_at(name: str) -> Path:
        point = tmp_path / name
        point.mkdir(exist_ok=True)
        words: list[str | Path] = ["bindfs", disk, point]
        if request.param == "sshfs":  # without the network: its server answers on a pipe
            server = tmp_path / "server.sh"
            server.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
            server.chmod(0o755)
            words = ["sshfs", f"host:{disk}", point, "-o", f"ssh_command={server}"]
        if shutil.which(str(words[0])) is None or (request.param == "sshfs" and not SFTP_SERVER.exists()):
            pytest.skip(f"no {words[0]}")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{words[0]} cannot mount here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount_at
    for point in mounted:
        subprocess.run(["umount", "-l", point], capture_output=True, check=False)


def leftovers(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob(".*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", CLASSES)


def test_datasets_are_made_there(mount: Mount, folder: Path, tmp_path: Path) -> None:
    here = mount("a")
    options = ("folder", "--train", folder, "--train-shards", 4)
    assert convert(*options, "--out", tmp_path / "local") == 0
    assert convert(*options, "--out", here / "converted") == 0
    assert leftovers(here) == []
    assert files_of(here / "converted") == files_of(tmp_path / "local")
    for words in (
        ["data", "index", str(folder), "--out", str(here / "index")],
        ["data", "subset", str(here / "converted"), "--images-per-class", "2", "--out", str(here / "subset")],
        ["data", "verify", str(here / "converted")],
        ["data", "verify", str(here / "index")],
    ):
        run_in_pool(words, tmp_path / "log")
    assert leftovers(here) == []


def test_hosts_convert_together(mount: Mount, folder: Path, tmp_path: Path) -> None:
    """Each has its own view of the disk, which may be some seconds old."""
    hosts = mount("a"), mount("b")
    options = ("folder", "--train", folder, "--train-shards", 6, "--out")
    assert convert(*options, tmp_path / "local") == 0
    assert [*(hosts[1].iterdir())] == []  # and remembers it
    assert convert(*options, hosts[0] / "out", "--plan") == 0
    for number, host in enumerate(hosts, 1):
        wait_until((host / "out").exists)
        assert convert(*options, host / "out", "--part", f"{number}/2") == 0
    assert convert(*options, hosts[0] / "out", "--finish") == 0
    assert files_of(hosts[0] / "out") == files_of(tmp_path / "local")


READER = """
import sys, time
from pathlib import Path
held = []
while not held:
    held += [path.open("rb") for path in Path(sys.argv[1]).glob("step-*/*.safetensors")]
print(len(held), flush=True)
time.sleep(600)
"""


def test_a_reader_of_an_old_checkpoint_ends_no_run(mount: Mount, train: Train, tiny_config: Path) -> None:
    here = mount("a")
    checkpoints, words = here / "run" / "checkpoints", (*OFTEN, "--run.keep_checkpoints", "1", *NOT_EVALUATED)
    slow = extended(tiny_config, SLOW)
    with subprocess.Popen([sys.executable, "-c", READER, checkpoints], stdout=subprocess.PIPE) as reader:
        try:
            said = train("a/run", *words, "--run.max_steps", "5", config=slow)
            assert "cannot be removed yet: a file in it is open" in said
            assert any(path.name.startswith(".step-") for path in checkpoints.iterdir())
            said = train("a/run", *words, "--run.max_steps", "6")
            assert "resuming from step 5" in said, "the reader is still there"
        finally:
            reader.kill()
    train("a/run", *words)
    assert leftovers(checkpoints) == []


def test_a_killed_run_goes_on_on_another_host(
    mount: Mount, start_training: StartTraining, train: Train, tiny_config: Path, plain_run: Path
) -> None:
    mount("a")
    mount("b")
    kill_after_step_4(start_training, tiny_config, "a/run", *OFTEN, ranks=2)
    assert "resuming from step " in train("b/run", *OFTEN, ranks=2)
    assert state_difference(plain_run, tiny_config.parent / "b" / "run") < 1e-5


def test_a_mount_that_goes_away_ends_the_run_and_loses_nothing(
    mount: Mount, start_training: StartTraining, train: Train, tiny_config: Path, plain_run: Path
) -> None:
    here = mount("a")
    running = start_training("a/run", *OFTEN, config=extended(tiny_config, PAUSE))
    wait_until((here / "run" / "checkpoints" / "step-00000004").exists)
    subprocess.run(["pkill", "-KILL", "-f", f"(sshfs|bindfs) .*{here}"], check=True)
    subprocess.run(["umount", "-l", here], check=True)
    running.kill()
    mount("a")
    assert "resuming from step 4" in train("a/run", *OFTEN)
    assert state_difference(plain_run, here / "run") == 0


def test_a_dataset_there_trains_as_here(mount: Mount, folder: Path, tmp_path: Path) -> None:
    here = mount("a")
    shutil.copytree(folder, here / "images")
    runs: list[Path] = []
    for images in (folder, here / "images"):
        index = images.with_name("index")
        run_in_pool(["data", "index", str(images), "--out", str(index)], tmp_path / f"{len(runs)}.log")
        place = tmp_path / f"run {len(runs)}"
        place.mkdir()
        runs.append(finished_run(place, index, "--run.max_steps", "2", *NOT_EVALUATED))
    assert state_difference(*runs) == 0
