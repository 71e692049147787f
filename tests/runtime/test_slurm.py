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

from dali_train.cli import main
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.status import newest_step, read_status
from tests.conftest import REPOSITORY, Train, final_weights
from tests.convert.files import files_of, write_folder
from tests.helpers import extended, samples
from tests.ranks import patience
from tests.slurm_cluster import Cluster, reason_against

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = Path("/tmp") / f"slurm-{os.getpid()}"  # short: sockets have names of at most 107 characters
    cluster = Cluster(directory, patience)
    yield cluster
    cluster.close()


def dump_into(directory: Path) -> str:
    """What a task runs to leave its environment in `directory`, which `launches_of` reads."""
    return f"env -0 >{directory}/$SLURM_STEP_ID.$SLURM_PROCID"


def launches_of(directory: Path) -> list[Launch]:
    """What each task finds, by rank."""
    launches = []
    for path in directory.iterdir():
        variables = dict(entry.split("=", 1) for entry in path.read_text().split("\0") if "=" in entry)
        slurm = {name: text for name, text in variables.items() if name.startswith("SLURM")}
        launches.append(discover(LaunchOptions(), slurm))
    return sorted(launches, key=lambda launch: launch.rank)


def places(launches: list[Launch]) -> list[tuple[int, int, int, int]]:
    assert len({(launch.host, launch.port) for launch in launches}) == 1
    assert {launch.host for launch in launches} == {"n1"} and {launch.launcher for launch in launches} == {"srun"}
    return [(launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) for launch in launches]


def test_ranks_are_found(cluster: Cluster, tmp_path: Path) -> None:
    def found(name: str, *options: str) -> list[tuple[int, int, int, int]]:
        (tmp_path / name).mkdir()
        cluster.run("srun", "-N2", *options, "bash", "-c", dump_into(tmp_path / name))
        return places(launches_of(tmp_path / name))

    four = ("-n4", "--ntasks-per-node=2")
    assert found("block", *four) == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    assert found("cyclic", *four, "--distribution=cyclic") == [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]
    assert sorted(place[3] for place in found("uneven", "-n3")) == [1, 2, 2]
    assert [place[2] for place in found("device", *four, "--gpus-per-task=1")] == [0, 1, 0, 1]


@pytest.mark.thorough
def test_two_steps_of_a_job_use_two_ports(cluster: Cluster, tmp_path: Path) -> None:
    step = f"srun -n1 bash -c '{dump_into(tmp_path)}'"
    cluster.run("salloc", "-n2", "bash", "-c", f"{step} & {step}; wait")
    assert len({launch.port for launch in launches_of(tmp_path)}) == 2


# What the tasks of a job do in place of training where the script and Slurm are tested: it imports nothing heavy.
STAND_IN = """
import os, signal, sys
from pathlib import Path
from dali_train.runtime.status import RunStatus

directory = Path(RUN)
config = config.replace({"run.dir": RUN})

def save(step, job):
    (directory / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    RunStatus(state="failed", step=step, lock_holder=f"pid 1 on n9, Slurm job {job}, since today").write(directory)

if "train" in sys.argv:
"""


def stand_in(config: Path, run: Path, action: str) -> str:
    """Write a config file whose loading by the trainer is `action`, which ends it; sys.exit would be a mistake."""
    path = run.with_suffix(".py")
    indented = "".join(f"    {line}\n" for line in action.splitlines())
    path.write_text(config.read_text() + STAND_IN.replace("RUN", repr(str(run))) + indented)
    return str(path)


TRAIN = str(REPOSITORY / "slurm" / "train.sbatch")


class Job:
    """A job that a test submits from another directory than the repository and follows, and what it says."""

    def __init__(self, cluster: Cluster, run: Path, *words: str) -> None:
        self._cluster, self._run = cluster, run
        self.log = run.parent / "job.log"
        words = ("env", "-C", str(run.parent), "sbatch", "--parsable", f"--output={self.log}", *words)
        self.number = cluster.run(*words, environment=ENVIRONMENT).split()[-1]

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + patience(240)
        while not happened():
            if time.monotonic() > end:
                queue = self._cluster.run("squeue", check=False) + self._cluster.run(
                    "scontrol", "show", "job", self.number, check=False
                )
                raise AssertionError(f"{what} did not come:\n{self.text()}\n{queue}")
            time.sleep(0.3)  # many a question costs two processes

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


def one_per_node(nodes: int) -> tuple[str, ...]:
    return (f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")


def test_a_job_ends_or_is_queued_again(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """By the trainer's exit status and what this job has saved."""
    ends = {
        "mistake": ("os._exit(2)", 2, ""),
        "at once": ("os._exit(1)", 1, "failed with status 1 and no new checkpoint; not requeued"),
        "of another": ("save(3, 77); os._exit(1)", 1, "the checkpoint of step 3 is another job's; not requeued"),
        "end": ("os._exit(0)", 0, ""),
    }
    calls = [
        f"bash slurm/run.sh '{stand_in(tiny_config, tmp_path / name, action)}'; echo $?"
        for name, (action, _, _) in ends.items()
    ]
    printed = cluster.run("salloc", "-n1", "bash", "-c", "\n".join(calls), environment=ENVIRONMENT)
    assert re.findall(r"^\d+$", printed, re.MULTILINE) == [str(status) for _, status, _ in ends.values()], printed
    assert all(message in printed for _, _, message in ends.values()), printed
    assert printed.count("requeued") == printed.count("not requeued") == 2


UNTIL_TERM = """
print("begun", flush=True)
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(print("saved", flush=True) or 75))
if os.environ.get("SLURM_RESTART_COUNT") != "2":
    signal.pause()
os._exit(0)
"""


@pytest.mark.thorough
def test_slurm_takes_the_nodes_and_gives_them_back(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """The tasks have the time to save."""
    run = tmp_path / "run"
    job = Job(cluster, run, *one_per_node(2), "--partition=low", TRAIN, stand_in(tiny_config, run, UNTIL_TERM))
    # A person, or a maintenance, requeues it.
    job.until("the start", lambda: job.count("begun") == 2)
    cluster.run("scontrol", "requeue", job.number)
    job.until("the end of both tasks", lambda: job.count("saved") == 2)
    # A job of a higher partition wants the nodes.
    job.until("the second start", lambda: job.count("begun") == 4)
    cluster.run("srun", "--partition=high", "--nodes=2", "--ntasks-per-node=8", "true")
    assert job.count("saved") == 4, job.text()
    job.until("the end of the job", lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", job.number))
    assert job.count("begun") == 6, job.text()


ONCE_MORE = """
seed, run = sys.argv[sys.argv.index("--data.seed") + 1], sys.argv[sys.argv.index("--run.dir") + 1]
print(f"begun with seed {seed} in {run}.", flush=True)
os._exit(0 if "SLURM_RESTART_COUNT" in os.environ else 75)
"""


@pytest.mark.thorough
def test_each_task_of_an_array_has_its_seed_and_is_queued_again_alone(
    cluster: Cluster, tiny_config: Path, tmp_path: Path
) -> None:
    config = stand_in(tiny_config, tmp_path / "run", ONCE_MORE)
    words = ("--array=0-1", "--open-mode=append", *one_per_node(1), TRAIN, config)
    job = Job(cluster, tmp_path / "run", *words, "--data.seed", "%a", "--run.dir", f"{tmp_path}/run-%a")
    job.until("the end of all", lambda: job.number not in cluster.run("squeue", "--format=%A %F"))
    begun = [f"begun with seed {task} in {tmp_path}/run-{task}." for task in (0, 1)]
    assert [job.count(line) for line in begun] == [2, 2], job.text()
    assert all(job.count(f"job {job.number}_{task}: stopped on request") == 1 for task in (0, 1)), job.text()


@pytest.mark.thorough
def test_a_conversion_as_an_array_has_the_bytes_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"ant": 6, "bee": 6})
    words = ["folder", "--train", str(photos), "--train-shards", "4", "--out"]
    one, array = (str(tmp_path / name) for name in ("one", "array"))
    for more in ([one], [array, "--plan"]):
        assert main(["data", "convert", *words, *more]) == 0
    options = ("--wait", "--array=1-2", "--cpus-per-task=1", f"--output={tmp_path}/log-%a")
    cluster.run(*("sbatch", *options, "slurm/convert.sbatch", *words, array, "--part", "%a/2"), environment=ENVIRONMENT)
    assert "part 2/2 is in" in (tmp_path / "log-2").read_text()
    assert main(["data", "convert", *words, array, "--finish"]) == 0
    assert files_of(tmp_path / "array") == files_of(tmp_path / "one")


# Ends at the step that the file names. While that is empty there is time to do something to the run, and a step is
# mostly sleep: the cores are for what starts beside it.
ENDLESS = """
import time
from pathlib import Path

LAST = Path(END).read_text()

class Slow(Hook):
    def step(self, record):
        if not LAST:
            time.sleep(1)

config = config.replace({
    "run.dir": RUN, "run.epochs": 4000, "run.eval_every_epochs": None, "run.checkpoint_every_steps": 2,
    "run.max_steps": int(LAST or 6000),
})
"""


@pytest.mark.thorough
def test_the_life_of_a_run(cluster: Cluster, tiny_config: Path, tmp_path: Path, train: Train) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    end.touch()
    config = extended(tiny_config, ENDLESS.replace("END", repr(str(end))).replace("RUN", repr(str(run))))
    options = ("--partition=low", "--time=60", "--signal=USR1@600")
    job = Job(cluster, run, *one_per_node(2), *options, TRAIN, str(config))

    # The time limit comes near: USR1 to all tasks.
    job.trains_on(1)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.until("the signal before the time limit", lambda: job.count("stopped after saving: signal USR1") == 1)
    job.until("the requeue", lambda: job.count("stopped on request at step") == job.count("requeued") == 1)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")

    # One task dies. The other ends by itself and says which one; the job has saved something new, so it is queued
    # again.
    job.trains_on(2)
    os.kill(task_of_rank(1), signal.SIGKILL)
    job.until("the requeue", lambda: job.count("; requeued") == 1)
    assert "Missing or late: rank 1 on n2 (pid " in job.text() and "frame #" not in job.text()
    assert job.count("directory  ") == 2 and job.count("resuming from step") == 1, job.text()
    cluster.run("scancel", job.number)

    # ColossalAI's line brings it to its end, and it is as if nothing had happened.
    end.write_text(str(job.steps() + 2))
    launch = "--local_rank=$SLURM_PROCID --world_size=$SLURM_NPROCS --host=$HOST --port=29500"
    line = f"exec python -m dali_train train {launch} --config={config}"
    output = cluster.run("srun", "-N2", "-n2", "bash", "-c", line, environment={**ENVIRONMENT, "HOST": ""})
    assert "4 accumulated x 2 ranks (srun)" in output and "resuming from step" in output
    status = read_status(run)
    assert status is not None and (status.state, str(status.step)) == ("finished", end.read_text())
    train("undisturbed", ranks=2, config=config)
    undisturbed = tmp_path / "undisturbed"
    assert samples(run) == samples(undisturbed)
    ours, theirs = final_weights(run), final_weights(undisturbed)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_scripts_explain_themselves() -> None:
    script, outside = str(REPOSITORY / "slurm" / "run.sh"), {"SLURM_JOB_ID": ""}
    no_project = {"SLURM_JOB_ID": "1", "PATH": "/usr/sbin:/usr/bin:/bin", "PYTHONPATH": ""}
    for words, environment, message in (
        ([], outside, "usage: sbatch slurm/train.sbatch CONFIG"),
        (["x.py"], outside, "is not in a Slurm job: submit it with sbatch"),
        (["x.py"], no_project, r"python\S* .* has no dali_train: activate its environment"),
    ):
        line = ["bash", script, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd="/", env=os.environ | environment)
        assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    for path in (REPOSITORY / "slurm").iterdir():
        subprocess.run(["bash", "-n", path], check=True)
