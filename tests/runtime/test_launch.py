"""Rank discovery, from the environments that launchers make, and what is said when they are wrong.

The environments are those of torchrun 2.15 and Slurm 22.05; test_slurm.py checks the latter on a real cluster.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from dali_train.config import ParallelConfig, TensorConfig
from dali_train.errors import ConfigError, RunError
from dali_train.parallel.layout import Layout
from dali_train.runtime import launch as launch_module
from dali_train.runtime import process_group as group_module
from dali_train.runtime.launch import Launch, LaunchOptions, discover, first_host, tasks_on_node
from dali_train.runtime.process import choose_device, numa_node_cores
from dali_train.runtime.process_group import process_group
from dali_train.runtime.status import METRICS, goodput, read_events, read_status
from tests.conftest import REPOSITORY, Train
from tests.helpers import FLOAT32_BOUND, LONG, extended, in_ranks, largest_difference, samples
from tests.ranks import free_port, patience

NOTHING = LaunchOptions()
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
# The shell of salloc, as newer Slurms start it, and of `srun --pty bash`.
SALLOC = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
SALLOC |= {"SLURM_PTY_PORT": "39029", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
PTY = {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
ONE_OF_TORCHRUN = {**TORCHRUN, "GROUP_WORLD_SIZE": "1"}


def place(found: Launch) -> tuple[int, int, int, int, str]:
    return found.rank, found.world_size, found.local_rank, found.local_world_size, found.host


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (3, 4, 1, 2, "n1")),
        (SRUN, (3, 4, 1, 2, "n1")),
        # One torchrun per node, started by srun; torchrun knows better.
        ({**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", **TORCHRUN}, (3, 4, 1, 2, "n1")),
        ({}, (0, 1, 0, 1, "localhost")),
        # A batch script's own shell.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1, 0, 1, "localhost")),
        (SALLOC, (0, 1, 0, 1, "localhost")),
        ({**SALLOC, **ONE_OF_TORCHRUN}, (3, 4, 1, 2, "n1")),
        ({**PTY, **ONE_OF_TORCHRUN}, (3, 4, 1, 2, "n1")),
        # A step of fewer tasks than the job, whose variable older Slurms do not have.
        ({**SRUN, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4, 1, 2, "n1")),
        # srun in such a shell: its tasks inherit the port, and have no terminal.
        ({**SRUN, "SLURM_PTY_PORT": "39029"}, (3, 4, 1, 2, "n1")),
    ],
)
def test_places(environ: dict[str, str], expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_has_terminal", lambda: False)
    assert place(discover(NOTHING, environ)) == expected


@pytest.mark.thorough
def test_a_shell_with_a_terminal_is_no_task() -> None:
    """`srun --pty bash`: a session with a controlling terminal, whatever the output goes to."""
    code = "from tests.runtime.test_launch import *; print(*place(discover(NOTHING, PTY)))"
    child, terminal = os.forkpty()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    with os.fdopen(terminal, "rb", buffering=0) as output:
        said = b""
        with suppress(OSError):  # the end of a terminal's output
            while part := output.read(1000):
                said += part
    os.waitpid(child, 0)
    assert said.split() == b"0 1 0 1 localhost".split()


def test_colossalai_options() -> None:
    """There --local_rank is the global rank; an empty --host is the step's first host."""
    options = LaunchOptions(local_rank=3, world_size=4, host="", port=29500)
    assert place(discover(options, SRUN)) == (3, 4, 1, 2, "n1")
    assert discover(options, SRUN).port == 29500
    assert discover(LaunchOptions(local_rank=0, world_size=4, host="n2", port=29500), SRUN).host == "n2"
    by_hand = discover(LaunchOptions(local_rank=3, world_size=4, host="n1", port=29500), {})
    assert (by_hand.rank, by_hand.world_size, by_hand.host) == (3, 4, "n1")


def test_ports_of_two_steps_differ() -> None:
    """Of one job, and of jobs with adjacent numbers, such as an array's."""
    jobs = [{**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(7, 10) for step in range(9)]
    assert len({discover(NOTHING, variables).port for variables in jobs}) == len(jobs)
    exported = {**SRUN, "MASTER_ADDR": "n2", "MASTER_PORT": "4242"}
    assert (discover(NOTHING, exported).host, discover(NOTHING, exported).port) == ("n2", 4242)


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (NOTHING, {"RANK": "0"}, "RANK and WORLD_SIZE, but the environment variable WORLD_SIZE is missing: set it"),
        (NOTHING, {**TORCHRUN, "LOCAL_RANK": "first"}, "torchrun.*LOCAL_RANK is 'first'"),
        (NOTHING, {**TORCHRUN, "RANK": "4"}, "RANK is '4', .*less than WORLD_SIZE, which is 4: start all ranks with"),
        (NOTHING, {**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT is '99999', .*from 1 to 65535"),
        (NOTHING, {**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is '', no name: start all ranks with torchrun"),
        (NOTHING, {**TORCHRUN, "MASTER_ADDR": "a b\n"}, r"MASTER_ADDR is 'a b\\n', no name"),
        (NOTHING, {**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0', .*from 1 to"),
        (NOTHING, {**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is '2', .*less than LOCAL_WORLD_SIZE, which is 2"),
        (NOTHING, {**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9{40,80}…', not a whole number"),
        (NOTHING, {**TORCHRUN, "RANK": "-1"}, "RANK is '-1', not a whole number"),
        (NOTHING, {**SRUN, "SLURM_NTASKS": "0"}, "SLURM_NTASKS is '0', .*start all ranks with srun"),
        (NOTHING, {**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is ''"),
        (NOTHING, {**SRUN, "MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        (LaunchOptions(world_size=2, rank=2, host="n1", port=1), {}, "--rank is 2 with --world_size 2"),
        (LaunchOptions(world_size=2, rank=0, host="n1", port=0), {}, "--port is 0: use 1 to 65535"),
        (NOTHING, {**SRUN, "SLURM_PROCID": ""}, "srun.*SLURM_PROCID is ''"),
        (NOTHING, {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_STEP_TASKS_PER_NODE is 4.* no node 1"),
        (NOTHING, {**SRUN, "WORLD_SIZE": "8"}, "two launchers at once: WORLD_SIZE is 8.* 4"),
        (NOTHING, {**SRUN, "RANK": "0"}, "two launchers at once: RANK is 0.* 3"),
        (NOTHING, {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "4 tasks .* its own torchrun"),
        (LaunchOptions(world_size=8), SRUN, "--world_size is 8, but the Slurm step has SLURM_NTASKS 4 tasks"),
        (LaunchOptions(world_size=0), {}, "--world_size is 0: use at least 1"),
        (LaunchOptions(world_size=2, rank=0), {}, "needs --rank, --host and --port too"),
        (NOTHING, {"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4, so mpirun"),
    ],
)
def test_wrong_environments_are_explained(options: LaunchOptions, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        discover(options, environ)


def test_one_rank_reports_a_mistake_and_torchruns_table_has_it() -> None:
    """The other one waits to be ended, so that nothing in the table has a time to come."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dali_train", "train"]
    ended = subprocess.run([*words, "--config", "nowhere.py"], capture_output=True, text=True, cwd=REPOSITORY)
    mistake = "dali-train train: --config nowhere.py: this file does not exist"
    said, table = ended.stderr.split("Root Cause")
    assert ended.returncode == 1
    assert said.count(mistake) == 1 and table.count(mistake) == 1, ended.stderr
    times = re.findall(r"time +: ([\d:_-]+)", table)
    assert times and max(times) <= time.strftime("%Y-%m-%d_%H:%M:%S"), ended.stderr


def test_slurm_notation() -> None:
    assert first_host("n[1-2]") == "n1"
    assert first_host("n[03-05,7],m1") == "n03"
    assert first_host("rack1-[10-12]-gpu,x") == "rack1-10-gpu"
    assert first_host("login") == "login"
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_on_node("2(x999999999)", 7) == 2


def test_one_visible_device_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", discover(NOTHING, SRUN)) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_device("auto", discover(NOTHING, SRUN)) == torch.device("cuda", 1)


@pytest.mark.parametrize(("rank", "host"), [(1, "localhost"), (1, "no-such-host.invalid"), (0, "localhost")])
def test_a_rendezvous_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch, rank: int, host: str) -> None:
    monkeypatch.setattr(group_module, "RENDEZVOUS_TIMEOUT", timedelta(seconds=2))  # 50 in earnest
    alone = Launch(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, host=host, port=free_port(), launcher="srun"
    )
    found = rf"rank {rank} of 2 \(srun\) did not reach all others through {host}:{alone.port} within 2 s "
    found += {"localhost": r".*something listens|.*nobody listens"}.get(
        host, r".*cannot look up no-such-host.*MASTER_ADDR"
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    with pytest.raises(RunError, match=r"(?s)" + found), process_group(alone, torch.device("cpu")):
        pass


@pytest.mark.parametrize(
    ("host", "interfaces", "message"),
    [
        ("[::1]", None, r"MASTER_ADDR is \[::1\]: write ::1, without brackets"),
        ("a" * 70, None, r"MASTER_ADDR is a+, no host name"),
        ("localhost", "^lo,docker", r"GLOO_SOCKET_IFNAME is \^lo,docker, and \^lo is NCCL's notation: .*lo"),
        ("localhost", "lo,ib7", r"GLOO_SOCKET_IFNAME is lo,ib7, and ib7 is not an interface of .*lo"),
        ("localhost", "", r"GLOO_SOCKET_IFNAME is , and an empty name"),
    ],
)
def test_addresses_and_interfaces_that_are_none(
    monkeypatch: pytest.MonkeyPatch, host: str, interfaces: str | None, message: str
) -> None:
    if interfaces is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    launch = Launch(rank=0, world_size=2, host=host, port=free_port())
    with pytest.raises(ConfigError, match=message), process_group(launch, torch.device("cpu")):
        pass


def join_with_a_gpu_on_rank_1(rank: int, directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "RENDEZVOUS_TIMEOUT", timedelta(seconds=patience(200)))
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        if rank == 0:  # the later one: the other order ends when that rank's launcher ends it
            check = group_module._require_same_backend
            patch.setattr(
                group_module,
                "_require_same_backend",
                lambda store, backend: check(store, backend) if store.get("dali_train/backend") else None,
            )
        launch, device = discover(NOTHING), torch.device("cuda", 0) if rank else torch.device("cpu")
        with pytest.raises((RunError, ValueError)) as error, process_group(launch, device):
            pass
    (directory / type(error.value).__name__).write_text(str(error.value))


def test_a_host_without_its_gpu_is_named(tmp_path: Path) -> None:
    """The backends differ, and either would wait for the other: the later rank says so."""
    in_ranks(2, join_with_a_gpu_on_rank_1, tmp_path)
    host = os.uname().nodename
    message = (tmp_path / "ConfigError").read_text()
    assert re.search(rf"this rank uses (gloo|nccl) on {host}, another one (gloo|nccl) on {host}: .*run.device", message)


# A hook that gives nodes time to come and go, until there is a file.
SLOW = """
import time

class Pause(Hook):
    def start(self, record):
        self.quick = record.directory / "quick"

    def step(self, record):
        if not self.quick.exists():
            time.sleep(3)
"""


@pytest.mark.thorough
def test_nodes_come_and_go(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """One of one rank, which a second one joins, whose rank then dies: that costs the steps since the last checkpoint
    and nothing else. torch.distributed.launch is torchrun with one more word, --local-rank."""
    run, log = tmp_path / "run", tmp_path / "log"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf", "last_call_timeout=3"]
    options += ["--local-addr", "localhost", "--monitor-interval", "0.3"]
    length = [*LONG, "--run.checkpoint_every_seconds", "1", "--run.max_steps", "40"]
    arguments = ["train", "--config", str(extended(tiny_config, SLOW)), "--run.dir", str(run), *length]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as dali_train.extras.torchrun sets it

    def node(launcher: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", launcher, *options, "-m", "dali_train", *arguments]
        with log.open("ab") as file:
            return subprocess.Popen(words, stdout=file, stderr=file, cwd=REPOSITORY, env=environment)

    def wait_for(ranks: int, starts: int) -> None:
        """Wait until the latest start is one of so many `ranks`, and at least so many `starts` were made."""
        begun: list[int] = []
        while len(begun) < starts or begun[-1] != ranks:
            begun = [event["ranks"] for event in read_events(run / METRICS) if event["event"] == "start"]
            assert all(agent.poll() is None for agent in agents), log.read_text()
            time.sleep(0.05)

    agents = [node("torch.distributed.launch")]
    try:
        wait_for(1, 1)
        agents.append(node("dali_train.extras.torchrun"))
        wait_for(2, 2)
        children = Path(f"/proc/{agents[1].pid}/task").glob("*/children")
        os.kill(max(int(pid) for path in children for pid in path.read_text().split()), signal.SIGKILL)
        wait_for(2, 3)
        (run / "quick").touch()
        assert [agent.wait(240) for agent in agents] == [0, 0], log.read_text()
    finally:
        for agent in agents:
            agent.kill()
    text = log.read_text()
    assert "stopped after saving: signal TERM" in text, text
    assert "lost touch with other ranks" in text, text
    assert "leaked" not in text, "what an extension sees at the end of Python"
    status = read_status(run)
    assert status is not None and (status.state, status.step) == ("finished", 40)
    found = goodput(read_events(run / METRICS))
    assert found is not None and 0 < found.share < 1 and found.restarts >= 2 and found.away_s > 0
    train("undisturbed", *length, ranks=2)
    assert samples(run) == samples(tmp_path / "undisturbed") and len(samples(run)) == 40 * 2
    assert largest_difference(run, tmp_path / "undisturbed") < FLOAT32_BOUND


@pytest.mark.parametrize(
    "written, cores", [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), (None, set())]
)
def test_cores_next_to_a_device(tmp_path: Path, written: str | None, cores: set[int]) -> None:
    if written is not None:
        (tmp_path / "local_cpulist").write_text(written)
    assert numa_node_cores(tmp_path) == cores


def test_a_layout_divides_the_ranks() -> None:
    """Ranks with the same data coordinate compute the same micro-batches; the sizes' product is the number of ranks."""
    launches = [Launch(rank=r, world_size=16, port=1) for r in range(16)]
    layouts = [Layout.from_config(launch, ParallelConfig()) for launch in launches]
    assert [(layout.data_rank, layout.data_size) for layout in layouts] == [(rank, 16) for rank in range(16)]
    parallel = ParallelConfig(pipeline=2, shard="full", shard_ranks=2, tensor=TensorConfig(size=2))
    layouts = [Layout.from_config(launch, parallel) for launch in launches]
    assert {(layout.replicas, layout.data_size, layout.world_size) for layout in layouts} == {(2, 4, 16)}
    places = [(layout.pipeline_rank, layout.data_rank, layout.tensor_rank) for layout in layouts]
    assert places == [(pipeline, data, tensor) for pipeline in range(2) for data in range(4) for tensor in range(2)]
