"""What the tools that kill runs share: the small run, the processes of one start, the stores, and the comparison with a
run that nothing disturbed."""

import contextlib
import ctypes
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c
from PIL import Image

from dali_train.checkpoint.format import load_newest
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.tfrecord import write_records
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.runtime.status import METRICS, read_events

NUM_IMAGES = 50
NUM_MICRO_BATCHES = 4  # of a step
CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(
        root={root!r}, train_size=32, eval_resize_to=36, eval_size=32, num_threads=1,
        shuffle={shuffle!r}, block_images=4, window_blocks=3,
    ),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs=dict(
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_drop_rate=0.1, drop_path_rate=0.1
        ),
    ),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=16, micro_batch=4),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir={run!r}, epochs={epochs}, checkpoint_every_steps=1, device="cpu"),
    hooks=HooksConfig(trace_samples=True, log_every_steps=1),
)
"""
FORK = multiprocessing.get_context("forkserver")
_PORTS = itertools.cycle(random.sample(range(20_000, 32_000), 2000))  # below those that the kernel gives to others
_PR_SET_PDEATHSIG = 1


def prepare_server() -> None:
    """Have the server of processes import everything once. Call this before the first start."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads that wait for their turn spin
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each new interpreter compiles the package
    FORK.set_forkserver_preload(
        [
            "__main__",
            *(
                "dali_train.cli",
                "dali_train.commands.train",
                "dali_train.extras.predict.classify",
                "dali_train.extras.report",
            ),
            *(
                "torch.distributed.checkpoint.state_dict",
                "torch.distributed.pipelining",
                "matplotlib.figure",
                "obstore",
            ),
        ]
    )


def make_dataset(root: Path) -> None:
    """Write images of noise, the brighter the higher their label, so that there is something to learn."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(NUM_IMAGES):
        buffer = io.BytesIO()
        label = number % 5
        Image.fromarray(rng.integers(25 * label, 156 + 25 * label, size=(40, 48, 3), dtype=np.uint8)).save(
            buffer, "JPEG"
        )
        records.append((buffer.getvalue(), {"image/class/label": 1 + label}))
    write_records(root / "train" / "train-00000-of-00001", records)
    build_index(root)


class Ranks:
    """All ranks of one start: forked from a server that has imported everything, which takes a tenth of the time, or
    new interpreters, as a user starts them. Those that still run at the end of its context are killed then."""

    def __init__(
        self, config: Path, num_ranks: int, log: Path, words: Sequence[str] = (), *, are_forked: bool = True
    ) -> None:
        self.num_ranks = num_ranks
        self.cpu_s = 0.0
        arguments = ["train", "--config", str(config), *words]
        self._processes: list[_Forked | _Interpreter] = []
        port = free_port()
        for rank in range(num_ranks):
            environment = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                **{"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)},
                **{"MASTER_ADDR": "localhost", "MASTER_PORT": port},
            }
            self._processes.append((_Forked if are_forked else _Interpreter)(arguments, environment, log))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.status() is None:
                os.kill(process.pid, signal.SIGKILL)
        self.wait()

    def running(self) -> bool:
        """Return whether all still run, and note their processor time."""
        self.cpu_s = max(self.cpu_s, sum(processor_time(process.pid) for process in self._processes))
        return all(process.status() is None for process in self._processes)

    def kill(self, rng: random.Random) -> None:
        for process in rng.sample(self._processes, len(self._processes)):
            os.kill(process.pid, signal.SIGKILL)
        self.wait()

    def freeze(self, rng: random.Random) -> None:
        os.kill(rng.choice(self._processes).pid, signal.SIGSTOP)

    def limit_files(self, num_bytes: int) -> None:
        """Let no rank write a larger file from now on, as if the disk were full."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def wait(self, timeout_s: float | None = None) -> list[int | None]:
        """Wait for all to end, and return their exit statuses. None: it did not in time."""
        end = time.monotonic() + (timeout_s or float("inf"))
        while any(process.status() is None for process in self._processes) and time.monotonic() < end:
            self.running()
            time.sleep(0.01)
        return [process.status() for process in self._processes]


class _Forked:
    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self._process = FORK.Process(target=_train, args=(arguments, environment, log))
        self._process.start()
        self.pid = self._process.pid or 0

    def status(self) -> int | None:
        return self._process.exitcode


def _train(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    end_with_parent()  # the server of processes, which ends with the tool
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from dali_train.cli import main

    sys.exit(main(arguments))


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Interpreter:
    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dali_train", *arguments],
                env=os.environ | environment,
                stdout=file,
                stderr=file,
                preexec_fn=end_with_parent,
            )
        self.pid = self._process.pid

    def status(self) -> int | None:
        return self._process.poll()


class Node:
    """A torchrun agent of an elastic run with its rank, both of new interpreters."""

    def __init__(self, config: Path, log: Path, words: Sequence[str], *, port: int, most_nodes: int) -> None:
        agent = [
            *("--nnodes", f"1:{most_nodes}", "--nproc-per-node", "1", "--max-restarts", "1000"),
            *("--rdzv-id", "elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
            *("--rdzv-conf", "is_host=0,last_call_timeout=3", "--local-addr", "localhost", "--monitor-interval", "0.5"),
        ]
        with log.open("ab") as file:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dali_train.extras.torchrun", *agent),
                    *("-m", "dali_train", "train", "--config", str(config), *words),
                ],
                stdout=file,
                stderr=file,
                preexec_fn=end_with_parent,
            )

    def workers(self) -> list[int]:
        """Return the process ids of its ranks."""
        children = Path(f"/proc/{self.agent.pid}/task").glob("*/children")
        return [int(pid) for path in children for pid in path.read_text().split()]

    def kill(self) -> None:
        """End everything of it at once, as a power failure does."""
        if self.agent.poll() is None:
            workers = self.workers()
            self.agent.kill()
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agent.wait()


def free_port() -> str:
    for port in _PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port))
            return str(port)
    raise AssertionError


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Stores:
    """An object store with the dataset, the cache of the run that reads from it, and another store for its mirror."""

    LIMIT = 10 * 4096  # a fifth of the images, each of which takes a block of the disk

    def __init__(self, directory: Path) -> None:
        from tests.s3_server import S3Server

        os.environ["XDG_CACHE_HOME"] = str(directory / "metadata")
        script = Path(__file__).parents[1] / "object_server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(script), str(directory / "data")],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        assert self._server.stdout is not None
        self._url = self._server.stdout.readline().strip()
        self._bucket = S3Server()
        os.environ.update(self._bucket.environment)
        self._thawed = threading.Event()
        self._thawed.set()
        self._bucket.fault = self._answered_as_usual
        self._cache = directory / "cache"
        self._checksums = Split(directory / "data", "train").checksums
        self.disturbed = Counter[str]()

    def _answered_as_usual(self, *_: str) -> None:
        self._thawed.wait()

    def reading(self) -> list[str]:
        cache = ["--data.cache", str(self._cache), "--data.cache_gb", str(self.LIMIT / 1e9)]
        return ["--data.root", self._url, *cache]

    def mirroring(self) -> list[str]:
        return ["--run.mirror", "s3://bucket/killed"]

    def files(self) -> list[Path]:
        return [path for path in self._cache.glob("user-*/train-*/*/*") if path.is_file()]

    def disturb(self, rng: random.Random) -> None:
        """Freeze both stores for a while, or change a byte of a cached image, or neither."""
        event = rng.choice(("freeze", "byte", ""))
        if event == "freeze":
            self._server.send_signal(signal.SIGSTOP)
            self._thawed.clear()
            time.sleep(rng.uniform(0, 1))
            self._thawed.set()
            self._server.send_signal(signal.SIGCONT)
            self.disturbed["times frozen"] += 1
        if event == "byte" and (files := self.files()):
            path = rng.choice(files)
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                if not (content := bytearray(path.read_bytes())):  # it is just being written
                    return
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                path.write_bytes(content)
                self.disturbed["bytes changed in the cache"] += 1

    def problems(self) -> list[str]:
        """Compare the cache with the index; count incomplete or changed images, and return what is none."""
        assert self._checksums is not None
        files = self.files()
        wrong = [
            path
            for path in files
            if path.name.isdecimal() and crc32c(path.read_bytes()) != self._checksums[int(path.name)]
        ]
        self.disturbed["incomplete or changed images found"] += len(wrong)
        return [f"in the cache is no image: {path}" for path in files if not path.name.isdecimal()]

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._bucket.close()


def compare(undisturbed: Path, killed: Path, step: int, *, bound: float = 0.0) -> list[str]:
    """Return what is not as it must be after `step` steps. Weights may differ by `bound`, relative to the largest of a
    tensor; if it is 0, the losses of all steps must be equal, too."""
    problems = []
    (a, warnings), (b, more) = (load_newest(run / "checkpoints") for run in (undisturbed, killed))
    if a is None or b is None or a.step != step or b.step != step or warnings or more:
        return [f"last checkpoints: {a and a.path} and {b and b.path}, expected step {step}; {warnings} {more}"]
    for section, tensors in a.state.items():
        for name, tensor in tensors.items():
            difference = float((tensor - b.state[section][name]).abs().max() / tensor.abs().max().clamp(min=1e-300))
            if not difference <= bound:
                problems.append(f"{section} {name} differs by {difference:.2g}")
    if bound == 0:
        expected, losses = losses_of(undisturbed), losses_of(killed)
        problems += [
            f"the loss of step {at} is {losses.get(at)} and {expected.get(at)}"
            for at in sorted(losses.keys() | expected.keys())
            if losses.get(at) != expected.get(at)
        ]
    lines = [json.loads(line) for path in killed.glob("samples.rank*.jsonl") for line in path.read_text().splitlines()]
    traced = Counter((line["step"], line["k"]) for line in lines)
    if set(traced.values()) != {1} or len(traced) != step * NUM_MICRO_BATCHES:
        problems.append(f"the trace has {len(lines)} lines for {step * NUM_MICRO_BATCHES} micro-batches")
    lines.sort(key=lambda line: (line["step"], line["k"]))
    stream = [image for line in lines for image in line["images"]]
    for start in range(0, len(stream) - NUM_IMAGES + 1, NUM_IMAGES):
        if sorted(stream[start : start + NUM_IMAGES]) != list(range(NUM_IMAGES)):
            problems.append(f"epoch {start // NUM_IMAGES} does not have each image once")
    if re.search("resuming from .* instead", (killed.parent / "killed.log").read_text()):
        problems.append("a checkpoint was skipped: see killed.log")
    return problems


def losses_of(run: Path) -> dict[int, float]:
    """Return the loss of each logged step."""
    return {event["step"]: event["loss"] for event in read_events(run / METRICS) if event["event"] == "train"}
