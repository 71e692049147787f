"""Training and conversion on a Ray cluster, or with a Ray of its own on this machine.

    python examples/ray/on_ray.py train --config FILE --workers 1:8 [--section.field value ...]
    python examples/ray/on_ray.py convert [--parts N] SOURCE ... --out DATASET

Each Ray Train worker starts one rank, `dali-train train` in a separate process, as torchrun does. There are as many
workers as the cluster has room for; when that changes, all ranks save and stop, and the run resumes on the new number.
Checkpoints are in run.dir, not in Ray.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from dali_train.commands import data
from dali_train.commands.boundary import run_command
from dali_train.commands.data import data_parser
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.errors import RunError, write_now
from dali_train.runtime.launch import LOCAL
from dali_train.runtime.status import FINISHED, MISTAKE, START_AGAIN, newest_step

RESIZE_S = 60.0  # between two checks whether the cluster has room for another number of workers
_POLL_S, _STOP_S = 0.5, 60.0
_rank: subprocess.Popen[bytes] | None = None  # in a Ray worker: the process that it has started


class RanksBackend(Backend):
    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Have all ranks save and stop before Ray ends their workers, to continue with more or fewer."""
        worker_group.execute(stop_rank)


class Ranks(BackendConfig):
    backend_cls = RanksBackend


def stop_rank() -> None:
    if _rank is not None and _rank.poll() is None:
        _rank.terminate()
        try:
            _rank.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            _rank.kill()


def run_rank(words: Sequence[str], directory: Path, run_dir: Path, stop: Any) -> int:
    """Train as one rank, in a Ray worker; return the trainer's exit status.

    Args:
        words: the command line's, after `dali-train train`.
        directory: working directory of the command line.
        stop: the handle of an actor that is an Event.

    Raises:
        RunError: the rank failed after its run has saved something new, so Ray is to start all of them again.
    """
    global _rank
    context, before = get_context(), newest_step(run_dir)
    rank = context.get_world_rank()
    host, port, run_id = broadcast_from_rank_zero(_rendezvous_address() if rank == 0 else None)
    environment = {
        "TORCHELASTIC_RUN_ID": run_id,
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-u", "-m", "dali_train", "train", *words]
    _rank = subprocess.Popen(command, cwd=directory, env=os.environ | environment)
    while _rank.poll() is None:
        time.sleep(_POLL_S)
        if rank == 0 and ray.get(stop.is_set.remote()):
            _rank.send_signal(signal.SIGUSR1)
    status = _rank.returncode
    if status in (FINISHED, MISTAKE, START_AGAIN):
        return status
    if newest_step(run_dir) != before:
        raise RunError(f"rank {rank} ended with status {status}, after a new checkpoint: all ranks are started again")
    print(f"rank {rank} ended with status {status} and no new checkpoint: not started again", file=sys.stderr)
    return 1


def _rendezvous_address() -> tuple[str, int, str]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1], LOCAL + uuid.uuid4().hex


def train(config: Config, words: Sequence[str], workers: tuple[int, int]) -> int:
    """Train on between workers[0] and workers[1] ranks; return the trainer's exit status."""
    run_dir, device = Path(config.run.dir).absolute(), config.run.device
    stop = ray.remote(num_cpus=0)(Event).remote()  # an actor, which tells the workers of Ctrl-C
    trainer = DataParallelTrainer(
        partial(run_rank, words, Path.cwd(), run_dir, stop),
        backend_config=Ranks(),
        scaling_config=ScalingConfig(
            num_workers=workers if workers[0] < workers[1] else workers[0],
            use_gpu=device == "cuda" or (device == "auto" and "GPU" in ray.cluster_resources()),
            elastic_resize_monitor_interval_s=RESIZE_S,
        ),
        # Errors that a retry cannot fix are returned, so only lost nodes and failures after progress are retried.
        run_config=RunConfig(storage_path=str(run_dir / "ray"), failure_config=FailureConfig(max_failures=-1)),
    )

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        write_now("\nstopping after this step; Ctrl-C again ends at once, without saving\n")
        stop.set.remote()

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    try:  # not in the main thread, where Ray Train handles Ctrl-C by ending at once
        return int(ThreadPoolExecutor(1).submit(trainer.fit).result().return_value)
    except TrainingFailedError as error:
        raise RunError(f"Ray gave up: {error}") from error


def convert(words: Sequence[str], threads: int, parts: int | None) -> int:
    """Convert a dataset in parts, each a task of Ray's; return the exit status of `dali-train data convert`."""
    total = parts or max(1, int(ray.cluster_resources()["CPU"]) // threads)
    if status := data.main("convert", [*words, "--plan"]):
        return status
    task = ray.remote(num_cpus=threads)(convert_part)  # which Ray restarts, up to three times, if its node is lost
    statuses = ray.get([task.remote([*words, "--part", f"{i}/{total}"], Path.cwd()) for i in range(1, total + 1)])
    return max(statuses) or data.main("convert", [*words, "--finish"])


def convert_part(words: Sequence[str], directory: Path) -> int:
    os.chdir(directory)
    return data.main("convert", words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status, as `dali_train.cli.main` does."""
    parser = argparse.ArgumentParser(prog="on_ray.py", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|convert")
    text = "Train on as many ranks as there is room for; further words are those of `dali-train train`."
    command = commands.add_parser("train", help=text, description=text, allow_abbrev=False)
    command.add_argument("--config", required=True, metavar="FILE", help="each node finds it by this name")
    command.add_argument("--workers", type=_range, required=True, metavar="N|MIN:MAX", help="ranks, one for each GPU")
    text = "Convert a dataset in parts at once; further words are those of `dali-train data convert`."
    command = commands.add_parser("convert", help=text, description=text, allow_abbrev=False)
    command.add_argument("--parts", type=int, metavar="N", help="default: what the cluster has cores for")
    options, words = parser.parse_known_args(arguments)
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")

    def work() -> int:
        try:
            if options.command == "convert":
                if not any(word.partition("=")[0] == "--workers" for word in words):
                    words.extend(["--workers", "1"])  # a part has as many threads as its task has cores
                threads = data_parser().parse_args(["convert", *words]).workers
                with ray.init():
                    return convert(words, threads, options.parts)
            config = config_with(options.config, words, "on_ray.py train")
            with ray.init():  # the cluster that RAY_ADDRESS names, that of this machine, or one for this command
                return train(config, ["--config", options.config, *words], options.workers)
        except ray.exceptions.RayError as error:
            raise RunError(str(error)) from error

    return run_command("on_ray.py", work)


def _range(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text}: use a number from 1 on, or the least and the most, such as 1:8")
    return least, most


if __name__ == "__main__":
    import on_ray  # workers must find what they run by this name, not as __main__'s

    sys.exit(on_ray.main())
