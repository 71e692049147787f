"""On a real Slurm cluster: rank discovery, and the life of a job that is stopped in every way and loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.status import newest_step, read_status

from .conftest import REPOSITORY, Train, final_weights
from .helpers import samples
from .slurm_cluster import Cluster, reason_against

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(Path("/tmp") / f"slurm-{os.getpid()}")  # short: sockets have names of at most 107 characters
    yield cluster
    cluster.close()


def discovered(cluster: Cluster, directory: Path, *options: str) -> list[Launch]:
    """What each task of a step finds, by rank."""
    directory.mkdir()
    cluster.run("srun", *options, "bash", "-c", f"env -0 >{directory}/$SLURM_STEP_ID.$SLURM_PROCID")
    launches = []
    for path in directory.iterdir():
        variables = dict(entry.split("=", 1) for entry in path.read_text().split("\0") if "=" in entry)
        launches.append(
            discover(LaunchOptions(), {name: text for name, text in variables.items() if name.startswith("SLURM")})
        )
    return sorted(launches, key=lambda launch: launch.rank)


def places(launches: list[Launch]) -> list[tuple[int, int, int, int]]:
    assert len({(launch.host, launch.port) for launch in launches}) == 1
    assert {launch.host for launch in launches} == {"n1"} and {launch.launcher for launch in launches} == {"srun"}
    return [(launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) for launch in launches]


def test_ranks_are_found(cluster: Cluster, tmp_path: Path) -> None:
    block = discovered(cluster, tmp_path / "block", "-N2", "-n4", "--ntasks-per-node=2")
    assert places(block) == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    cyclic = discovered(cluster, tmp_path / "cyclic", "-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic")
    assert places(cyclic) == [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]
    uneven = discovered(cluster, tmp_path / "uneven", "-N2", "-n3")
    assert sorted(place[3] for place in places(uneven)) == [1, 2, 2]
    one_device_each = discovered(cluster, tmp_path / "device", "-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1")
    assert [place[2] for place in places(one_device_each)] == [0, 1, 0, 1]


def test_two_steps_of_a_job_use_two_ports(cluster: Cluster, tmp_path: Path) -> None:
    dump = f"env -0 >{tmp_path}/$SLURM_STEP_ID"
    cluster.run("salloc", "-n2", "bash", "-c", f"srun -n1 bash -c '{dump}' & srun -n1 bash -c '{dump}'; wait")
    ports = set()
    for path in tmp_path.iterdir():
        variables = dict(entry.split("=", 1) for entry in path.read_text().split("\0") if "=" in entry)
        ports.add(
            discover(LaunchOptions(), {name: text for name, text in variables.items() if name.startswith("SLURM")}).port
        )
    assert len(ports) == 2


@pytest.fixture
def config(tiny_config: Path, tmp_path: Path) -> Path:
    """The tiny recipe, 400 epochs of it, which ends at the step that the file `end` names."""
    text = tiny_config.read_text().replace(
        'RunConfig(dir="run", epochs=4, keep_checkpoints=100)',
        f"RunConfig(dir={str(tmp_path / 'run')!r}, epochs=4000, eval_every_epochs=None, checkpoint_every_steps=5, "
        f"max_steps=int(open({str(tmp_path / 'end')!r}).read()))",
    )
    assert "max_steps" in text
    (tmp_path / "end").write_text("6000")
    path = tmp_path / "recipe.py"
    path.write_text(text)
    return path


def test_colossalai_command_line(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    (tmp_path / "end").write_text("2")
    options = "--local_rank=$SLURM_PROCID --world_size=$SLURM_NPROCS --host=$HOST --port=29500"
    line = f"exec python -m dali_train train {options} --config={config}"
    output = cluster.run(
        "srun", "-N2", "--ntasks-per-node=2", "bash", "-c", line, environment={**ENVIRONMENT, "HOST": ""}
    )
    assert "2 accumulated x 4 ranks (srun)" in output
    status = read_status(tmp_path / "run")
    assert status is not None and (status.state, status.step) == ("finished", 2)


class Job:
    """The job of the test below, and what it says."""

    def __init__(self, cluster: Cluster, run: Path, *words: str) -> None:
        self._cluster, self._run = cluster, run
        self.log = run.parent / "job.log"
        words = ("sbatch", "--parsable", f"--output={self.log}", *words)
        self.number = cluster.run(*words, environment=ENVIRONMENT).split()[-1]

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 240  # on a busy machine a start takes a minute
        while not happened():
            if time.monotonic() > end:
                queue = self._cluster.run("squeue", check=False) + self._cluster.run(
                    "scontrol", "show", "job", self.number, check=False
                )
                raise AssertionError(f"{what} did not come:\n{self.text()}\n{queue}")
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def count(self, words: str) -> int:
        return self.text().count(words)

    def steps(self) -> int:
        """Steps logged so far. After a resume the lines that were not saved are gone, so the last one counts."""
        try:
            lines = (self._run / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
        except FileNotFoundError:
            return 0

    def trains_on(self, attempt: int) -> None:
        """Wait until this attempt (from 1) has saved something new."""
        self.until(f"the start of attempt {attempt}", lambda: self.count("directory  ") == attempt)
        start = newest_step(self._run) or 0
        self.until("a new checkpoint", lambda: (newest_step(self._run) or 0) > start)


def task_of_rank(rank: int) -> int:
    """The process id, here outside the cluster, of the trainer with this rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables, words = (path / "environ").read_text().split("\0"), (path / "cmdline").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if f"SLURM_PROCID={rank}" in variables and "dali_train" in words and Path(words[0]).name.startswith("python"):
            return int(path.name)
    raise AssertionError(f"no process of rank {rank}")


def test_the_life_of_a_job(cluster: Cluster, config: Path, tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    resources = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--partition=low")
    job = Job(cluster, run, *resources, "--time=1", "--signal=USR1@5", "slurm/train.sbatch", str(config))

    # The time limit comes near: USR1 to all tasks.
    job.until("the signal before the time limit", lambda: job.count("stopped after saving: signal USR1") == 1)
    job.until("the requeue", lambda: job.count("requeued") == 1)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")

    # A person, or a maintenance, requeues it.
    job.trains_on(2)
    cluster.run("scontrol", "requeue", job.number)
    job.until("the save on requeue", lambda: job.count("stopped after saving: signal TERM") == 1)

    # A job of a higher partition wants the nodes.
    job.trains_on(3)
    cluster.run("srun", "--partition=high", "--nodes=2", "--ntasks-per-node=8", "true")
    assert job.count("stopped after saving: signal TERM") == 2, job.text()

    # One task dies. The others end by themselves and say which one; the job has saved something new, so it is queued
    # again.
    job.trains_on(4)
    os.kill(task_of_rank(3), signal.SIGKILL)
    job.until("the report of the loss", lambda: "Missing or late: rank 3 on n2 (pid " in job.text())
    (tmp_path / "end").write_text(str(job.steps() + 100))

    # And in the end it is as if nothing had happened.
    job.until("the end", lambda: (status := read_status(run)) is not None and status.state == "finished")
    job.until("the end of the job", lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", job.number))
    assert job.count("directory  ") == 5, job.text()
    assert job.count("resuming from step") == 4
    train("undisturbed", ranks=4, config=config)
    undisturbed = tmp_path / "undisturbed"
    assert samples(run) == samples(undisturbed)
    ours, theirs = final_weights(run), final_weights(undisturbed)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_same_line_twice(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    """The second job refuses, and the first one's progress does not requeue it."""
    words = (
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        "slurm/train.sbatch",
        str(config),
    )
    first = Job(cluster, tmp_path / "run", *words)
    first.trains_on(1)
    (tmp_path / "second").mkdir()
    second = Job(cluster, tmp_path / "second" / "run", "--nodelist=n2", *words)
    second.until("the refusal", lambda: "FAILED" in cluster.run("scontrol", "show", "job", second.number))
    assert re.search(rf"run.dir \S+ is in use: pid \d+ on n1, Slurm job {first.number}, since", second.text()), (
        second.text()
    )
    assert "requeued" not in second.text()
    assert "is in use" not in first.text()
    cluster.run("scancel", first.number)


def test_a_job_that_fails_at_once_is_not_requeued(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)  # empty: no checkpoint is complete
    job = Job(
        cluster,
        tmp_path / "run",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        "slurm/train.sbatch",
        str(config),
    )
    job.until("the failure", lambda: "FAILED" in cluster.run("scontrol", "show", "job", job.number))
    assert "is complete: " in job.text()
    assert "failed with status 1 and no checkpoint after step 3; not requeued" in job.text()


def test_scripts_explain_themselves(cluster: Cluster) -> None:
    done = subprocess.run(["bash", "slurm/run.sh"], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 2 and "usage: sbatch slurm/train.sbatch CONFIG" in done.stderr
    environment = {name: text for name, text in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run(
        ["bash", "slurm/run.sh", "x.py"], capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment
    )
    assert done.returncode == 2 and "is not in a Slurm job: submit it with sbatch" in done.stderr
    environment |= {"SLURM_JOB_ID": "1", "PATH": "/usr/sbin:/usr/bin:/bin"}  # without the environment of the project
    done = subprocess.run(
        ["bash", str(REPOSITORY / "slurm" / "run.sh"), "x.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=environment,
    )
    assert done.returncode == 2 and re.search(
        r"python\S* .* has no dali_train: activate its environment", done.stderr
    ), done.stderr
    for script in (REPOSITORY / "slurm").iterdir():
        subprocess.run(["bash", "-n", script], check=True)
