"""Several ranks from one process: they find each other, their errors arrive, and none outlives the process."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dali_train.errors import ConfigError, RunError
from dali_train.extras.local_launch import _Ranks, launch_locally
from dali_train.files import open_regular, temporary_directory
from dali_train.runtime.launch import LaunchOptions, discover

REPOSITORY = Path(__file__).parents[2]  # not conftest's: each rank imports this file, and DALI with it


def place(word: str) -> tuple[str, int, int]:
    found = discover(LaunchOptions())
    assert found.launcher == "dali-train"
    return word, found.rank, found.world_size


def fail_on_rank_1(error: Exception) -> None:
    if os.environ["RANK"] == "1":
        raise error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server of forks may be the child of a test that ignores it
    time.sleep(60)


def kill_rank_1() -> None:
    """The others then fail, too: their connections break."""
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(directory: Path) -> None:
    (directory / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(300)


@pytest.mark.usefixtures("forked_launch")
def test_results_come_by_rank_whatever_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever this host is called: in a container its name may be in no DNS."""
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "gpu-node-17.invalid")
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        assert launch_locally(place, "here", num_processes=2) == {0: ("here", 0, 2), 1: ("here", 1, 2)}


def start_sleeper(
    directory: Path, *, ranks: int = 1, guard: str = "if __name__ == '__main__': "
) -> subprocess.Popen[str]:
    """A script that starts ranks which sleep, in a process group of its own, like a terminal's."""
    script = "import sys; from pathlib import Path; from tests.extras.test_local_launch import sleep, launch_locally\n"
    script += f"{guard}launch_locally(sleep, Path(sys.argv[1]), num_processes={ranks})"
    (directory / "script.py").write_text(script)
    words, environment = (
        [sys.executable, directory / "script.py", directory],
        {**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment, **pipes, text=True, start_new_session=True)


@pytest.mark.thorough
def test_no_rank_outlives_the_process_and_the_next_start_removes_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent = start_sleeper(tmp_path)
    while not (tmp_path / "0").exists():
        assert parent.poll() is None
        time.sleep(0.1)
    (own,) = tmp_path.glob("dali-train-*")
    for path in Path(f"/proc/{parent.pid}/task").glob("*/children"):
        for pid in {*path.read_text().split()} - {(tmp_path / "0").read_text()}:
            os.kill(int(pid), signal.SIGKILL)  # the process that would unlink the semaphores
    parent.send_signal(signal.SIGKILL)
    parent.communicate()  # until the last process that has its output is gone
    semaphores = [*Path("/dev/shm").glob(f"sem.{own.name}-*")]
    assert semaphores and own.exists()

    (tmp_path / "dali-train-foreign").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_directory() as used, temporary_directory():
        assert used.exists() and not own.exists()
        assert not any(path.exists() for path in semaphores)
    assert [path.name for path in tmp_path.glob("dali-train-*")] == ["dali-train-foreign"]


@pytest.mark.parametrize("moment", ["before the directory is removed", "when the other one has opened its lock"])
def test_a_process_that_starts_when_another_one_ends_leaves_its_semaphores(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python unlinks them when the process ends, later than the directory goes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ending, changes = temporary_directory(), pytest.MonkeyPatch()
    used = ending.__enter__()
    semaphore = Path("/dev/shm", f"sem.{used.parent.name}-1")
    semaphore.touch()
    remove = tempfile.TemporaryDirectory.cleanup

    def start_first(directory: "tempfile.TemporaryDirectory[str]") -> None:
        changes.undo()
        with temporary_directory():
            pass
        remove(directory)

    def end_then(path: Path) -> Any:
        changes.undo()
        file = open_regular(path)
        ending.__exit__(None, None, None)
        return file

    if moment == "before the directory is removed":
        changes.setattr(tempfile.TemporaryDirectory, "cleanup", start_first)
        ending.__exit__(None, None, None)
    else:
        changes.setattr("dali_train.files.open_regular", end_then)
        with temporary_directory():
            pass
    found = semaphore.exists()
    semaphore.unlink(missing_ok=True)
    assert found and not any(tmp_path.iterdir())


@pytest.mark.thorough
def test_ctrl_c_while_the_processes_start(tmp_path: Path) -> None:
    """A terminal sends it to them too, in the middle of their imports."""
    parent = start_sleeper(tmp_path, ranks=2)
    children = Path(f"/proc/{parent.pid}/task")
    while sum(len(path.read_text().split()) for path in children.glob("*/children")) < 3:  # and multiprocessing's own
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.communicate() == ("", "stopped before training began: Ctrl-C\n")
    assert parent.returncode == 75


def test_ctrl_c_when_the_ranks_have_ended_but_not_yet_the_agent() -> None:
    """Nothing is left that could be stopped: the run is complete."""
    rank = multiprocessing.get_context("spawn").Process(target=int)
    rank.start()
    rank.join()
    ranks, launched = _Ranks(1), Future[None]()
    ranks._processes, ranks._has_begun = [rank], True
    threading.Timer(0.5, launched.set_result, (None,)).start()
    with ranks:
        os.kill(os.getpid(), signal.SIGINT)
        ranks.supervise(launched)
    assert ranks.num_interrupts == 1


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_while_the_agent_waits(tmp_path: Path, number: signal.Signals, name: str) -> None:
    """For another host's answer, or for memory: no process is started then that could handle it."""
    waiting = "import time; from dali_train.extras import local_launch\n"
    waiting += "def wait(*words): print('waits', flush=True), time.sleep(99)\n"
    waiting += "local_launch.elastic_launch = lambda config, work: wait\n"
    parent = start_sleeper(tmp_path, guard=waiting)
    assert parent.stdout is not None and parent.stdout.readline() == "waits\n"
    parent.send_signal(number)
    errors = parent.communicate()[1]
    assert parent.returncode == 75 and errors.startswith("stopped before training began: "), errors
    assert name in errors or "TERM" in errors


@pytest.mark.thorough
def test_a_script_without_a_guard(tmp_path: Path) -> None:
    parent = start_sleeper(tmp_path, guard="")
    errors = parent.communicate()[1]
    assert parent.returncode == 1
    assert errors.splitlines()[-1].endswith('put the call under `if __name__ == "__main__":`')
    assert errors.count("Traceback") == 1, "that of the script"


@pytest.mark.usefixtures("forked_launch")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such weather"), r".*fail_on_rank_1.*no such weather"),
        (RunError("the disk is full: make room"), "the disk is full: make room$"),
    ],
)
def test_the_first_to_fail_is_named(error: Exception, message: str) -> None:
    with pytest.raises(RunError, match=f"(?s)^rank 1 of 2 failed: {message}"):
        launch_locally(fail_on_rank_1, error, num_processes=2)


@pytest.mark.usefixtures("forked_launch")
def test_a_rank_that_was_killed_is_named() -> None:
    message = r"^rank 1 of 2 was killed \(SIGKILL\), perhaps for lack of memory: start again to resume$"
    with pytest.raises(RunError, match=message):
        launch_locally(kill_rank_1, num_processes=2)


HOOKS = """
class Marks(Hook):
    def step(self, record):
        print(f"step {record.step} was seen", flush=True)
"""


@pytest.mark.usefixtures("forked_launch")
def test_hooks_come_from_the_config_file(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A class that it defines is not found by other processes in another way."""
    from dali_train.commands.train import run
    from dali_train.config import load_config
    from dali_train.hooks import Hook
    from tests.helpers import extended

    monkeypatch.chdir(tiny_config.parent)
    config = load_config(extended(tiny_config, HOOKS)).replace({"run.max_steps": 1})
    assert run(config, num_processes=2).step == 1
    assert capfd.readouterr().out.count("step 1 was seen") == 2
    with pytest.raises(ConfigError, match=r"hooks.user is Hook, but .* has Marks.* set hooks.user there"):
        run(config.replace({"hooks.user": (Hook,)}), num_processes=2)
    with pytest.raises(ConfigError, match=r"hooks.user with num_processes.* only in a config file"):
        run(config.from_files({}), num_processes=2)


def test_auto_on_a_cpu_keeps_the_number_of_a_run_that_goes_on(tiny_config: Path, plain_run: Path) -> None:
    """And of a model that is split; anything else it measures, see test_quickstart.py."""
    from dali_train.config import load_config
    from dali_train.extras.num_processes import fastest_number

    config = load_config(tiny_config).replace({"run.device": "cpu"})
    assert fastest_number(config.replace({"run.dir": str(plain_run)})) == 1
    assert fastest_number(config.replace({"parallel.pipeline": 2})) == 2


def test_processes_that_do_not_fit_are_refused_before_they_start(tiny_config: Path) -> None:
    from dali_train.commands.train import run

    with pytest.raises(ConfigError, match="num_processes is 0: use at least 1"):
        run(tiny_config, num_processes=0)
    before = set(multiprocessing.active_children())  # ranks of other tests may wait for more work
    with pytest.raises(ConfigError, match="40 data-parallel ranks need at least one each: start at most 8"):
        run(tiny_config, num_processes=40)
    assert set(multiprocessing.active_children()) == before
