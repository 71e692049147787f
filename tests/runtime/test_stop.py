"""Stopping on request: all ranks at the same step, after saving, whoever was asked and however often."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dali_train.config import load_config
from dali_train.errors import ConfigError
from dali_train.extras.report.runs import load_run
from dali_train.runtime.status import RunStatus, exit_status, newest_step, read_status, stopped_before_restart
from dali_train.runtime.stop import StopReason, job_end
from tests.conftest import REPOSITORY, StartTraining, Train, final_weights
from tests.helpers import LONG, events, samples, wait_for_steps, words
from tests.ranks import Ranks


def send(ranks: Ranks, rank: int, *signals: signal.Signals) -> None:
    for number in signals:
        pid = ranks.pids()[rank]
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("rank", "signals", "reason"),
    [
        (0, [signal.SIGUSR1], "signal USR1"),
        (0, [signal.SIGINT], "Ctrl-C"),
        (1, [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], "signal TERM"),
    ],
)
def test_any_rank_stops_all(
    start_training: StartTraining, train: Train, tmp_path: Path, rank: int, signals: list[signal.Signals], reason: str
) -> None:
    ranks = start_training("run", *LONG, ranks=2)
    run = tmp_path / "run"
    wait_for_steps(ranks, run, 3)
    send(ranks, rank, *signals)
    assert ranks.wait() == [75] * 2, ranks.log.read_text()
    assert f"stopped after saving: {reason}. Start the same command again to resume" in ranks.log.read_text()
    status = read_status(run)
    assert status is not None and (status.state, status.reason) == ("stopped", reason)
    assert exit_status(status) == 75
    # Nothing that was computed is lost: the one checkpoint is of the last step that any rank made.
    step = newest_step(run)
    assert step == status.step == max(step for step, _ in samples(run)) + 1 >= 3
    if len(signals) == 1:
        return
    # And the run resumes as if it had not been stopped.
    end = ("--run.max_steps", str(step + 2))
    assert f"resuming from step {step}" in train("run", *LONG, *end, ranks=2)
    train("undisturbed", *LONG, *end, ranks=2)
    first, second = final_weights(run), final_weights(tmp_path / "undisturbed")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert samples(run) == samples(tmp_path / "undisturbed")
    finished = read_status(run)
    assert finished is not None and (finished.state, finished.step, finished.total_steps) == (
        "finished",
        step + 2,
        step + 2,
    )
    assert exit_status(finished) == 0


def test_signals_during_the_save_do_not_hurt(start_training: StartTraining, tmp_path: Path) -> None:
    ranks = start_training("run", *LONG, ranks=2)
    wait_for_steps(ranks, tmp_path / "run", 2)
    count = 0
    while any(ranks.alive()):  # before, during and after the save
        for rank in (0, 1):
            try:
                send(ranks, rank, signal.SIGTERM, signal.SIGUSR1)
            except ProcessLookupError:
                break
            count += 1
        time.sleep(0.0005)
    assert ranks.wait() == [75, 75], ranks.log.read_text()
    assert count > 2
    assert final_weights(tmp_path / "run")
    assert read_status(tmp_path / "run") is not None


def test_ranks_that_wait_for_another_stop_at_once(tiny_config: Path, tmp_path: Path) -> None:
    """The main thread is in the rendezvous, outside Python, where it would stay for most of a minute."""
    arguments = ["train", "--config", str(tiny_config), "--run.dir", str(tmp_path / "run")]
    ranks = Ranks(arguments, 2, tmp_path / "log", {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    for pid in ranks.pids():
        while not signals_heard(pid) >> (signal.SIGTERM - 1) & 1:
            time.sleep(0.05)
    time.sleep(1)
    for pid in ranks.pids():
        os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == [75, 75]
    assert (tmp_path / "log").read_text().count("stopped before training began: signal TERM") == 1


def signals_heard(pid: int) -> int:
    """The signals that have a handler, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))


def test_the_end_of_a_slurm_job_is_seen_coming() -> None:
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1300"}) == 1270
    assert (
        job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + 24 * 3600)}) == 1000 + 24 * 3600 - 120
    )
    assert job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "NONE"}) is None


def test_stops_before_the_job_ends(start_training: StartTraining, tmp_path: Path) -> None:
    """Which torchrun takes for a failure: what it shows of that rank, below a traceback of its own, says what it is."""
    now = int(time.time())
    environment = {"SLURM_JOB_START_TIME": str(now - 1000), "SLURM_JOB_END_TIME": str(now + 60)}
    environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    ranks = start_training("run", *LONG, environment=environment)
    assert ranks.wait() == [75]
    said = "stopped after saving: the job's time limit is near. Start the same command again to resume"
    assert said in ranks.log.read_text()
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == said


def test_a_restart_by_torchrun_does_not_undo_a_stop(tmp_path: Path) -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not stopped_before_restart(tmp_path, restarted)
    RunStatus(state="stopped", step=3, reason=StopReason.MAX_SECONDS.describe()).write(tmp_path)
    assert stopped_before_restart(tmp_path, restarted)
    assert not stopped_before_restart(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"})
    # torchrun's own way to restart all when their number changes
    RunStatus(state="stopped", step=3, reason=StopReason.TERM.describe()).write(tmp_path)
    assert not stopped_before_restart(tmp_path, restarted)


def test_status_tells_what_the_trainer_ended_with(
    start_training: StartTraining, train: Train, run_command: Train, tmp_path: Path
) -> None:
    def status(status: int, expected: str) -> None:
        words = ("status", "--config", str(tmp_path / "tiny-config.py"), "--run.dir", str(tmp_path / "run"))
        printed = run_command(*words, status=status)
        assert re.search(f"run: {expected}", printed), printed

    status(1, "not started, no checkpoint")
    train("run", *LONG, "--run.max_seconds", "0.001", status=75)
    status(75, r"stopped \(run.max_seconds is over\), step 1 of \d+, newest checkpoint 1, last trained by pid \d+ on ")
    train("run", *LONG, "--run.max_steps", "2", "--run.max_seconds", "0.001")  # a stop at the last step is the end
    status(0, r"finished, step 2 of 2, newest checkpoint 2,")
    ranks = start_training("run", *LONG)
    while "running" not in (tmp_path / "run" / "status.json").read_text():
        assert ranks.running(), ranks.log.read_text()
        time.sleep(0.01)
    status(1, rf"running, step 2 of \d+, .*newest checkpoint 2, last trained by pid {ranks.pids()[0]} on ")
    ranks.kill()
    status(1, r"killed \(.*SIGKILL.*\), step 2 of")


@pytest.mark.thorough
@pytest.mark.parametrize("times", [2, 3])
def test_ctrl_c_is_heard_while_the_main_thread_is_busy_outside_python(times: int) -> None:
    """As while kernels are compiled: the second ends the process in seconds, the third at once, and no traceback is
    printed."""
    script = """if True:
        import ctypes
        from dali_train.runtime.stop import StopRequests
        StopRequests(None)
        print("ready", flush=True)
        mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)  # a deadlock
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(60) == 130
    expected = b"\nstopping after this step; Ctrl-C again ends at once, without saving\nended without saving\n"
    assert process.stderr.read() == expected


@pytest.mark.thorough
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, under_torchrun: bool) -> None:
    """torchrun that is killed leaves no rank behind; what a shell has started stays when the shell goes."""
    rank = "from dali_train.runtime.launch import exit_if_launcher_dies; import os, time; exit_if_launcher_dies(); "
    rank += "print(os.getpid(), flush=True); time.sleep(6)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment |= {"TORCHELASTIC_RUN_ID": "none"} if under_torchrun else {}
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=file, cwd=REPOSITORY, env=environment
        )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.read()  # until the rank has ended, too
    assert (b"is gone, so this rank ends" in log.read_bytes()) == under_torchrun


def test_the_end_of_a_part_does_not_use_up_patience(train: Train, tmp_path: Path) -> None:
    """run.max_steps ends with an evaluation between two of the run's own: here after steps 2, 3, 4, 5, 7, ..."""
    stuck = words("--optimizer.lr 1e-12 --run.epochs 9 --hooks.predictions 0 --hooks.stop_early 2")
    train("run", *stuck, "--run.max_steps", "3")
    assert "finished at step 5/15" in train("run", *stuck)


def test_a_run_that_gets_no_better_ends(train: Train, tmp_path: Path) -> None:
    """Finished, with its weights, when hooks.stop_early says so; a second start has nothing to do, and more patience
    goes on."""
    stuck = words("--optimizer.lr 1e-12 --run.epochs 9 --run.checkpoint_every_steps 100 --hooks.predictions 0")
    printed = train("run", *stuck, "--hooks.stop_early", "2", ranks=2)
    run = tmp_path / "run"
    assert len(events(run, "eval")) == 3 and "finished at step 5/15" in printed
    status = read_status(run)
    assert status is not None and (status.state, status.step, exit_status(status)) == ("finished", 5, 0)
    assert status.reason == "no better top-1 for 2 epochs" and (run / "model.safetensors").is_file()
    assert load_run(run).state == "finished"
    assert "finished at step 5/15" in train("run", *stuck, "--hooks.stop_early", "2").rpartition("resuming")[2]
    assert len(events(run, "eval")) == 3
    train("run", *stuck, "--hooks.stop_early", "3")
    assert len(events(run, "eval")) == 4
    with pytest.raises(ConfigError, match=r"hooks.stop_early is 2.* run.eval_every_epochs None"):
        load_config(REPOSITORY / "configs" / "digits.py").replace(
            {"hooks.stop_early": 2.0, "run.eval_every_epochs": None}
        )
