"""Stopping on request: all ranks at the same step, after saving, whoever was asked and however often."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from dali_train.status import RunStatus, exit_status, newest_step, read_status, stopped_before_restart
from dali_train.stop import StopReason, job_end

from .conftest import Ranks, StartTraining, Train, final_weights
from .test_exactness import samples

# So long that no test sees its end unless it asks for it.
LONG = ("--run.epochs", "400", "--run.checkpoint_every_steps", "100000", "--run.eval_every_epochs", "None")


def wait_for_steps(ranks: Ranks, directory: Path, count: int) -> None:
    while not (directory / "metrics.jsonl").exists() or len((directory / "metrics.jsonl").read_text().splitlines()) < count:
        assert ranks.running(), ranks.log.read_text()
        time.sleep(0.005)


def send(ranks: Ranks, rank: int, *signals: signal.Signals) -> None:
    for number in signals:
        pid = ranks.pids()[rank]
        os.kill(pid, number)


def same_weights(a: Path, b: Path) -> bool:
    first, second = final_weights(a), final_weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("rank", "signals", "reason"),
    [
        (0, [signal.SIGUSR1], "signal USR1"),
        (0, [signal.SIGINT], "Ctrl-C"),
        (2, [signal.SIGTERM], "signal TERM"),
        (1, [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], "signal TERM"),
    ],
)
def test_any_rank_stops_all(
    start_training: StartTraining, train: Train, tmp_path: Path, rank: int, signals: list[signal.Signals], reason: str
) -> None:
    ranks = start_training("run", *LONG, ranks=4)
    run = tmp_path / "run"
    wait_for_steps(ranks, run, 3)
    send(ranks, rank, *signals)
    assert ranks.wait() == [75] * 4, ranks.log.read_text()
    assert f"stopped after saving: {reason}. Start me again to go on" in ranks.log.read_text()
    status = read_status(run)
    assert status is not None and (status.state, status.reason) == ("stopped", reason)
    assert exit_status(status) == 75
    # Nothing that was computed is lost: the one checkpoint is of the last step that any rank made.
    step = newest_step(run)
    assert step == status.step == max(step for step, _ in samples(run)) + 1 >= 3
    # And the run goes on as if nothing had been.
    end = ("--run.max_steps", str(step + 2))
    assert f"going on from step {step}" in train("run", *LONG, *end, ranks=4)
    train("undisturbed", *LONG, *end, ranks=4)
    assert same_weights(run, tmp_path / "undisturbed")
    assert samples(run) == samples(tmp_path / "undisturbed")
    finished = read_status(run)
    assert finished == RunStatus(state="finished", step=step + 2) and exit_status(finished) == 0


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


def test_stops_after_max_seconds(train: Train, tmp_path: Path) -> None:
    output = train("run", *LONG, "--run.max_seconds", "1", status=75, ranks=2)
    assert "stopped after saving: run.max_seconds is over" in output
    assert newest_step(tmp_path / "run")


def test_a_stop_at_the_last_step_is_the_end(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "1", "--run.max_seconds", "0.001")
    assert read_status(tmp_path / "run") == RunStatus(state="finished", step=1)


def test_the_end_of_a_slurm_job_is_seen_coming() -> None:
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1300"}) == 1270
    assert job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + 24 * 3600)}) == 1000 + 24 * 3600 - 120
    assert job_end({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "NONE"}) is None


def test_stops_before_the_job_ends(train: Train, monkeypatch: pytest.MonkeyPatch, start_training: StartTraining) -> None:
    now = int(time.time())
    environment = {"SLURM_JOB_START_TIME": str(now - 1000), "SLURM_JOB_END_TIME": str(now + 60)}
    ranks = start_training("run", *LONG, environment=environment)
    assert ranks.wait() == [75]
    assert "stopped after saving: the job's time limit is near" in ranks.log.read_text()


def test_a_restart_by_torchrun_does_not_undo_a_stop(tmp_path: Path) -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not stopped_before_restart(tmp_path, restarted)
    RunStatus(state="stopped", step=3, reason=StopReason.MAX_SECONDS.describe()).write(tmp_path)
    assert stopped_before_restart(tmp_path, restarted)
    assert not stopped_before_restart(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"})
    # torchrun's own way to restart all when their number changes
    RunStatus(state="stopped", step=3, reason=StopReason.TERM.describe()).write(tmp_path)
    assert not stopped_before_restart(tmp_path, restarted)


def test_status_tells_what_the_trainer_ended_with(train: Train, run_command: Train, tmp_path: Path) -> None:
    arguments = ("status", "--config", str(tmp_path / "tiny-config.py"), "--run.dir", str(tmp_path / "run"))
    assert re.search(r"run: not started, newest checkpoint None", run_command(*arguments, status=1))
    train("run", *LONG, "--run.max_seconds", "0.001", status=75)
    assert "run: stopped (run.max_seconds is over), newest checkpoint 1" in run_command(*arguments, status=75)
    train("run", *LONG, "--run.max_steps", "2")
    assert "run: finished, newest checkpoint 2" in run_command(*arguments)
