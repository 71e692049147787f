"""The protocols that are simulated: which processes run the package's code, and what must hold.

A protocol is a class whose object is one history: its constructor starts the processes, `watch` is called between two
calls, and `end` when nothing is left to do.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from dali_train.checkpoint import format as checkpoint_format
from dali_train.checkpoint import run_directory, save
from dali_train.checkpoint.format import CheckpointError, RunValues, find_checkpoint
from dali_train.checkpoint.run_directory import SCORE, step_of
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.config.sections import RunConfig
from dali_train.errors import ConfigError, UserError
from dali_train.extras.mirror import claim, mirror
from dali_train.files import sha256
from dali_train.runtime import lock, object_store, process_group, stop
from dali_train.runtime.lock import BEAT_S, FILE, STALE_S, RunLock
from dali_train.runtime.process_group import locked
from dali_train.runtime.status import METRICS
from dali_train.runtime.stop import StepAgreement, StopReason, StopRequests
from tests.verification.simulation.disk import ROOT, Node
from tests.verification.simulation.group import Group
from tests.verification.simulation.store import REPLACED, Store
from tests.verification.simulation.world import Clock, Machine, Process, ViolationError, World, current_world

RUN = Path(ROOT) / "run"


class Protocol:
    """One history of a protocol in `world`."""

    modules: ClassVar[tuple[ModuleType, ...]]  # whose clock and threads are simulated
    replaced: ClassVar[dict[str, Any]] = {}  # other names of those modules
    rates: ClassVar[dict[str, float]]

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        world.watch = self.watch

    def watch(self) -> None:
        """Raises ViolationError: an invariant does not hold between two calls."""

    def end(self) -> None:
        """Raises ViolationError: an invariant does not hold in the end."""

    def machines(self, most: int) -> list[Machine]:
        """Return one machine with its own disk, or several on a server's."""
        number = self.random.randint(1, most)
        self.world.disk.shared = number > 1
        self.world.disk.journaled = self.random.random() < 0.5
        return [Machine(f"n{number}", wall_offset=1.7e9 + self.random.uniform(-5, 5)) for number in range(number)]


class Lock(Protocol):
    """Starts of the same run, here and on other machines.

    A run that trains owns the lock; if it has lost the lock, even if nobody has it now, it ends at its next heartbeat.
    So two never train at once for longer than that. When all have ended, another start gets the lock in time, and
    leaves nothing behind.
    """

    modules = (lock,)
    rates = dict(switch=0.2, delay=0.01, freeze=0.02, kill=0.015, power=0.005, full=0.005, error=0.01, jump=0.01)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.training: dict[Process, bytes] = {}  # and the tokens in their locks
        self.lost: dict[Process, float] = {}  # those whose lock is another's or gone: until when they may train
        self.owner: Node | None = None  # the lock's file
        machines = self.machines(3)
        world.spawn(Machine("operator"), lambda: self._operate(machines), "operator")

    def _operate(self, machines: list[Machine]) -> int:
        """Start runs, wait for their ends, then start one more that must be able to."""
        world, random = self.world, self.random
        started = []
        for number in range(random.randint(2, 4)):
            started.append(
                world.spawn(random.choice(machines), lambda: self._train(random.randint(0, 2)), f"run {number}")
            )
            world.block(random.choice((0.0, 0.0, 0.3, 5.0, 40.0)) * random.random())
        for process in started:
            world.wait_for(process)
        world.stop_faults()
        began = world.now
        if world.wait_for(world.spawn(Machine("another"), lambda: self._train(0), "last run")) != 0:
            raise ViolationError("nobody trains, and another start does not get the lock")
        if world.now - began > STALE_S + BEAT_S:
            raise ViolationError(f"a start took {world.now - began:.1f} s, though nobody trains")
        directory = world.disk.entry("run")
        if directory is not None and directory.entries:
            raise ViolationError(f"nobody trains, but there is {', '.join(directory.entries)}")
        return 0

    def _train(self, num_steps: int) -> int:
        try:
            held = RunLock(RUN, lambda _: None, {})
        except ConfigError:
            return 2
        process = self.world.process
        self.training[process] = held.holder.token.encode()
        self._look()
        for _ in range(num_steps):
            Clock.sleep(self.random.choice((0.1, 2.0, 8.0)))
        del self.training[process]
        held.release()
        return 0

    def watch(self) -> None:
        if self.training and self.world.disk.entry("run", FILE) is not self.owner:
            self._look()
        for process, end in [*self.lost.items()]:
            if process.is_dead or process not in self.training:
                del self.lost[process]
            elif process.is_awake and self.world.now > max(end, process.awake_since + BEAT_S) + process.held_up_s + 1.0:
                raise ViolationError(f"{process.name} trains on without the lock")

    def _look(self) -> None:
        self.owner = self.world.disk.entry("run", FILE)
        content = bytes(self.owner.data) if self.owner is not None else b""
        for process, token in self.training.items():
            if token not in content:
                self.lost.setdefault(process, self.world.now + BEAT_S - process.held_up_s)


class Files:
    """In the place of DCP and its safetensors, which would take a thousand times as long: one small file per rank, of
    its tensors' names and values, flushed as DCP flushes its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[str, str] = {}

    @staticmethod
    def save(state: dict[str, torch.Tensor], *, storage_writer: "Files", process_group: Any, no_dist: bool) -> None:
        path = storage_writer.path / f"rank{current_world().process.rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        if state:
            with path.open("wb", buffering=0) as file:
                for name, tensor in state.items():
                    file.write(f"{name} {int(tensor)}\n".encode())
                os.fsync(file.fileno())
            storage_writer.digests = {path.name: sha256(path)}
        if not no_dist:  # DCP ends with a collective, which tells all ranks of an error of any
            process_group.take(process_group.give(None))

    @staticmethod
    def read(directory: Path, names: set[str], section: str = "") -> dict[str, Any]:
        if section:  # for the digests of the weights, whose values the protocol does not need
            return {"model.a": torch.zeros(1)} if section == "model" else {}
        lines = [line for name in sorted(names) for line in (directory / name).read_text().splitlines()]
        return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}


class Signals:
    """The module `signal`. Its handlers are called by `Run`, between two instructions of the main thread."""

    SIGUSR1, SIGTERM, SIGINT, SIG_IGN = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIG_IGN

    @staticmethod
    def getsignal(number: int) -> None:
        return None

    @staticmethod
    def signal(number: int, handler: Any) -> None:
        current_world().process.handlers[number] = handler

    @staticmethod
    def set_wakeup_fd(fd: int, warn_on_full_buffer: bool = False) -> int:
        return 1 << 19  # another's, which `StopRequests` leaves alone


def weights_after(step: int) -> int:
    """Return the weights after `step` steps: each step's depend on all before it."""
    while len(_WEIGHTS) <= step:
        digest = hashlib.sha256(f"{_WEIGHTS[-1]} {len(_WEIGHTS)}".encode()).hexdigest()
        _WEIGHTS.append(int(digest[:12], 16))
    return _WEIGHTS[step]


_WEIGHTS = [0]
_NUM_STEPS = 5
_START_S = 4.0  # from the lock to the first step, at least: imports, the model, the process group


class Run(Protocol):
    """A run of one process or several ranks: its lock, checkpoints, their links and retention, and the agreement to
    stop, over crashes, signals and starts on another number of ranks.

    What a rank has seen saved can be resumed from at any later time, and the last start finishes: its weights are those
    of all steps, each taken once. All ranks of a start stop after the same step.
    """

    modules = (lock, save, checkpoint_format, run_directory, process_group, stop)
    replaced: ClassVar[dict[str, Any]] = {
        "dcp": Files,
        "Writer": Files,
        "read_safetensors": Files.read,
        "signal": Signals,
    }
    rates = dict(switch=0.15, delay=0.002, freeze=0.004, kill=0.004, power=0.003, full=0.003, error=0.003, jump=0.002)
    most_ranks = 1

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.keep = self.random.randint(1, 3)
        self.saved = 0  # the newest step that is known to be saved
        self.stopped: dict[int, set[tuple[int, StopReason]]] = {}  # by start: after which step, and why
        self.is_finished = False
        machines = self.machines(2)
        world.spawn(Machine("operator"), lambda: self._operate(machines), "operator")

    def _operate(self, machines: list[Machine]) -> int:
        world, random = self.world, self.random
        for number in range(random.randint(1, 3)):
            ranks = self._start(number, machines)
            if random.random() < 0.5:
                world.block(_START_S + 8 * random.random())
                asked = random.choice(ranks)
                if not asked.is_dead and signal.SIGTERM in asked.handlers:
                    asked.handlers[signal.SIGTERM](signal.SIGTERM, None)
            if random.random() < 0.2:  # another start, while the first may be alive
                ranks += self._start(number + 10, machines)
            self._supervise(ranks)
        world.stop_faults()
        world.block(STALE_S + BEAT_S)
        statuses = self._supervise(self._start(100, machines))
        if world.script and -9 in statuses:  # the crash of the script came only now
            statuses = self._supervise(self._start(101, machines))
        if not self.is_finished or {*statuses} != {0}:
            raise ViolationError(f"the last start did not finish: {statuses}")
        self._check_links()
        return 0

    def _start(self, number: int, machines: list[Machine]) -> list[Process]:
        size = self.random.randint(1, self.most_ranks)
        groups = [Group(self.world, size) if size > 1 else None for _ in range(2)]  # of the main thread, of the writer
        first = self.random.choice(machines)
        hosts = [first, *(self.random.choice([first, *machines]) for _ in range(size - 1))]
        return [
            self.world.spawn(hosts[rank], self._rank_main(number, rank, *groups), f"{number}.{rank}")
            for rank in range(size)
        ]

    def _supervise(self, ranks: list[Process]) -> list[int]:
        """Wait for all ranks; once one has ended with an error, kill the others, as a launcher does."""
        statuses = []
        for process in ranks:
            statuses.append(self.world.wait_for(process))
            if statuses[-1] not in (0, 75):
                self.world.block(self.random.choice((0.0, 1.0, 30.0)))
                for other in ranks:
                    self.world.end(other, -9)
        return statuses

    def _rank_main(self, number: int, rank: int, group: Any, writers: Any) -> Callable[[], int]:
        def main() -> int:
            if group is not None:
                group.join(rank)
                writers.join(rank)
            try:
                return self._train(number, rank, group, writers)
            except (UserError, OSError, RuntimeError) as error:
                self.world.note(str(error))
                if isinstance(error, CheckpointError) and "no checkpoint" in str(error):
                    raise ViolationError(str(error)) from error
                return 2

        return main

    def _train(self, number: int, rank: int, group: Any, writers: Any) -> int:
        directory = RUN / "checkpoints"
        requests = StopRequests(None, {})
        agreement = StepAgreement(requests, group)
        with locked(RUN, group):
            Clock.sleep(_START_S)
            saved = self.saved
            found, _ = find_checkpoint("auto", directory, group)
            step = found.step if found is not None else 0
            if step < saved:
                raise ViolationError(f"step {saved} was saved, but the newest checkpoint is that of step {step}")
            if found is not None:
                values = set(found.state["model"].values())
                if values != {weights_after(step)} or len(found.state["model"]) != 2:
                    raise ViolationError(f"the checkpoint of step {step} has {found.state}")
            saver = CheckpointWriter(directory, writers, keep=self.keep)
            saver.prepare(step)
            try:
                return self._loop(number, rank, step, saver, agreement)
            finally:
                saver.join()

    def _loop(self, number: int, rank: int, step: int, saver: CheckpointWriter, agreement: StepAgreement) -> int:
        random, asked = self.random, 0
        while step < _NUM_STEPS:
            agreement.ask(save=random.random() < 0.3)
            Clock.sleep(1.0)
            step += 1
            stopping, is_saved = agreement.agreed()
            if is_saved or stopping or step == _NUM_STEPS:
                weights = torch.tensor(weights_after(step))
                saver.save(step, {"model": {"a": weights, "b": weights}}, RunValues())
                if rank == 0 and asked:
                    self._note_saved(asked)
                asked = step
                if step % 2:
                    saver.record_top1(step, (step * 7 % 5) / 5)
            if stopping:
                self.stopped.setdefault(number, set()).add((step, stopping))
                if len(self.stopped[number]) > 1:
                    raise ViolationError(f"ranks stop after different steps: {self.stopped[number]}")
                break
        saver.wait()
        if rank == 0 and asked:
            self._note_saved(asked)
        if step < _NUM_STEPS:
            return 75
        if rank == 0:
            self.is_finished = True
        return 0

    def _note_saved(self, step: int) -> None:
        self.saved = max(self.saved, step)

    def _check_links(self) -> None:
        """Compare the links of a finished run with its checkpoints."""
        entry = self.world.disk.entry
        directory = entry("run", "checkpoints")
        assert directory is not None
        names = sorted(name for name in directory.entries if step_of(Path(name)) >= 0)
        links = {name: directory.entries[name].target for name in ("newest", "best") if name in directory.entries}
        scores = {}
        for name in names:
            if (file := directory.entries[name].entries.get(SCORE)) is not None:
                scores[name] = json.loads(file.data)["top1"]
        if links.get("newest") != names[-1]:
            raise ViolationError(f"newest is {links.get('newest')}, not {names[-1]}")
        if scores and links.get("best") not in scores:
            raise ViolationError(f"best is {links.get('best')}, with the scores {scores}")
        if scores and scores[links["best"]] < max(scores.values()):
            raise ViolationError(f"best is {links['best']}, with the scores {scores}")


class Ranks(Run):
    """The same with up to four ranks, on up to two machines that share a disk."""

    most_ranks = 4


_RECIPE = {"optimizer.lr": 0.1}


class Quiet:
    """In the place of `Progress`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, *_: int, **__: int) -> None:
        pass


def _model_of(step: int) -> bytes:
    """Return a file of final weights, as far as the mirror reads it."""
    header = json.dumps({"__metadata__": {"step": str(step)}}).encode()
    return len(header).to_bytes(8, "little") + header


class Mirrored(Protocol):
    """A run on machines that share nothing but its mirror in an object store, each start on one of them.

    What ``mirror.json`` names is complete, and its newest checkpoint never goes back. Once a process has written to
    ``metrics.jsonl``, none does that had the mirror before. The last start, on a machine without anything, resumes from
    what is known to be mirrored, and finishes. A process that ended by itself did so with the status that it wanted.
    """

    modules = (lock, save, checkpoint_format, run_directory, process_group, mirror, claim, object_store)
    replaced: ClassVar[dict[str, Any]] = {
        **{"dcp": Files, "Writer": Files, "read_safetensors": Files.read},
        **REPLACED,
        "_open": lambda _: current_world().stores[0],
        "Progress": Quiet,
    }
    rates = dict(switch=0.1, delay=0.002, freeze=0.006, kill=0.003, full=0.002, error=0.006, jump=0.001)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.store = Store(world, self._look)
        world.stores.append(self.store)
        self.mirrored = 0  # the newest step that was known to be in the mirror
        self.is_finished = False
        self.newest = -1  # as mirror.json names it
        self.writers: list[str] = []  # the tokens of those that had the mirror
        self.last_writer = -1  # of metrics.jsonl
        world.spawn(Machine("operator"), self._operate, "operator")

    def _operate(self) -> int:
        world, random = self.world, self.random
        machines = [Machine(f"n{number}") for number in range(2)]
        for number in range(random.randint(1, 3)):
            ranks = [world.spawn(random.choice(machines), self._main, f"run {number}")]
            if random.random() < 0.5:
                world.block(random.choice((15.0, 60.0)) * random.random())
                ranks.append(world.spawn(random.choice(machines), self._main, f"run {number + 10}"))
            for process in ranks:
                if world.wait_for(process) == -6:
                    raise ViolationError(f"{process.name} is aborted at its end")
        world.stop_faults()
        world.block(claim.STALE_S)
        if (status := world.wait_for(world.spawn(Machine("new"), self._main, "last"))) != 0 or not self.is_finished:
            raise ViolationError(f"the last start ended with status {status}")
        return 0

    def _main(self) -> int:
        directory = Path(ROOT) / self.world.process.machine.name
        try:
            with locked(directory, None):
                Clock.sleep(_START_S)
                copy = mirror.Mirror(RunConfig(dir=str(directory), epochs=1, mirror="s3://bucket/run"))
                try:
                    return self._train(directory, copy)
                finally:
                    copy.close()
        except (UserError, OSError) as error:
            self.world.note(f"{type(error).__name__}: {error}")
            if isinstance(error, CheckpointError) and "no checkpoint" in str(error):
                raise ViolationError(str(error)) from error
            return 2

    def _train(self, directory: Path, copy: mirror.Mirror) -> int:
        random, mirrored = self.random, self.mirrored
        copy.restore(RunConfig(dir=str(directory), epochs=1, mirror="s3://bucket/run"), lambda: dict(_RECIPE))
        found, _ = find_checkpoint("auto", directory / "checkpoints")
        step = found.step if found is not None else 0
        if step < mirrored:
            raise ViolationError(f"step {mirrored} was mirrored, but this start found step {step}")
        if found is not None and {*found.state["model"].values()} != {weights_after(step)}:
            raise ViolationError(f"the checkpoint of step {step} has {found.state}")
        saver = CheckpointWriter(directory / "checkpoints", None, keep=1)
        saver.prepare(step)
        self._note(directory, copy)
        copy.start(saver.held)
        try:
            end = (
                min(_NUM_STEPS, step + random.randint(1, _NUM_STEPS))
                if self.world.process.name != "last"
                else _NUM_STEPS
            )
            while step < end:
                Clock.sleep(random.choice((0.5, 3.0, 20.0)))
                step += 1
                weights = torch.tensor(weights_after(step))
                saver.save(step, {"model": {"a": weights}}, RunValues(recipe=_RECIPE))
                self._note(directory, copy)
                if random.random() < 0.5:
                    saver.record_top1(step, (step * 7 % 5) / 5)
            saver.wait()
            if step == _NUM_STEPS:
                (directory / "model.safetensors").write_bytes(_model_of(step))
        finally:
            saver.join()
        copy.grace_s = None
        if missing := copy.finish():
            self.world.note(missing)
            return 1
        if not copy._claim.is_lost:
            self.mirrored = max(self.mirrored, step)
            if step == _NUM_STEPS and not any(name.endswith("/model.safetensors") for name in self.store.objects):
                raise ViolationError("the mirror of a finished run lacks its final weights")
        self.is_finished = step == _NUM_STEPS
        return 0

    def _note(self, directory: Path, copy: mirror.Mirror) -> None:
        with (directory / METRICS).open("a") as file:
            file.write(f"\n{copy._claim._holder.token}\n")

    def _look(self) -> None:
        """Compare mirror.json with the objects that are there."""
        objects = self.store.objects
        if claim.FILE not in objects:
            return
        holder, complete, _ = claim.parse_claim(objects[claim.FILE][0], "mirror")
        if holder is not None and holder.token not in self.writers:
            self.writers.append(holder.token)
        if METRICS in objects:
            lines = objects[METRICS][0].decode().split()
            writer = max(self.writers.index(line) for line in lines if len(line) == 32)  # others are torn
            if writer < self.last_writer:
                raise ViolationError(f"{METRICS} is written by a process that has lost the mirror")
            self.last_writer = writer
        for folder in complete:
            manifest = objects.get(f"checkpoints/{folder}/manifest.json")
            if manifest is None or hashlib.sha256(manifest[0]).hexdigest()[:16] != folder.rpartition("-")[2]:
                raise ViolationError(f"{claim.FILE} names {folder}, whose manifest is gone or another")
            for name, digest in json.loads(manifest[0])["files"].items():
                content = objects.get(f"checkpoints/{folder}/{name}")
                if content is None or hashlib.sha256(content[0]).hexdigest() != digest:
                    raise ViolationError(f"{claim.FILE} names {folder}, whose {name} is gone or another")
            model = objects.get(f"checkpoints/{folder}/model.safetensors")
            if model is not None and model[0] != _model_of(mirror._step(folder)):
                raise ViolationError(f"{folder} has the final weights of another checkpoint")
        newest = max((mirror._step(folder) for folder in complete), default=-1)
        if newest < self.newest:
            raise ViolationError(f"the newest checkpoint of the mirror goes back from {self.newest} to {newest}")
        self.newest = newest
