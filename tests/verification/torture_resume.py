#!/usr/bin/env python
"""Kill a run over and over at random moments of its life, start it again each time, perhaps in another layout of ranks,
and compare it with an undisturbed one.

    python -m tests.verification.torture_resume --kills 100
    python -m tests.verification.torture_resume --kills 2000 --layouts all --stores --directory runs/torture \\
        --picture torture.png

Most kills are a SIGKILL to all ranks, in random order: at a random step, or at a random moment of the start, and so
while checkpoints are written, moved and removed. Before some, one rank is frozen for a while (SIGSTOP), so that the
others get ahead of it. Some starts meet a full disk instead: checkpoints do not fit any more, and the run must end by
itself. Most ranks are forked from a server that has imported everything. One start in a hundred is of new interpreters,
as a user starts them, and one of two torchrun agents: one is lost with its rank, the other goes on without it.

With --stores some starts read the dataset from an object store, through a cache of a fifth of it, and some keep a
mirror of the run in another one (`run.mirror`), from which it resumes where the run directory was lost. Now and then
the stores are frozen for a while, or a byte of a cached image is changed. After each kill there may be nothing but
images in the cache; those that are incomplete or changed are counted.

Every 50 kills the run stops by itself, and an undisturbed one makes the same steps, each on the same ranks in the same
layout. Weights and the optimizer's state must be equal bit for bit, the losses of all steps too, and the sample trace
must have each image exactly once per epoch. In the end `prove` must agree with the run. Whatever is not as it must be
ends the program, which names the attempt.

Ctrl-C or SIGTERM ends with a comparison too, and the same command with the same --directory continues. It has a line
for each start in attempts.jsonl. Uses a small dataset of noise that it makes itself.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from matplotlib.figure import Figure

from dali_train.checkpoint.fingerprint import weights_digest
from dali_train.checkpoint.format import load_newest
from dali_train.config import load_config
from dali_train.extras.proof.prove import prove
from dali_train.runtime.status import METRICS, newest_step, read_events
from tests.verification.torture import (
    CONFIG,
    NUM_IMAGES,
    Node,
    Ranks,
    Stores,
    compare,
    losses_of,
    make_dataset,
    prepare_server,
)

LAYOUTS: dict[str, tuple[str, ...]] = {
    "data": (),
    "optimizer": ("--parallel.shard", "optimizer"),
    "shard": ("--parallel.shard", "full"),
    "pipeline": ("--parallel.pipeline", "2"),
    "tensor": ("--parallel.tensor.size", "2"),
}
ALL = "data:1,data:2,data:3,data:4,optimizer:2,shard:2,pipeline:2,tensor:2"
STEPS_PER_KILL = 2
KILLS_PER_COMPARISON = 50
LAUNCHERS = {"forked": 98, "interpreters": 1, "torchrun": 1}  # in 100 starts
HANG_S = 1800.0  # without what must happen, on a busy machine
# Uploads are looked for every 5 s, and most attempts are shorter.
UPLOADS = "\nfrom dali_train.extras.mirror import mirror\n\nmirror._LOOK_S = 0.5\n"
KILLED = ("before the first save", "between saves", "while a checkpoint was written", "with a frozen rank")
KINDS = (*KILLED, "on a full disk", "a node was lost", "with the tool")
ENDED, STOPPED = "after the end", "stopped to be compared"


class FaultError(Exception):
    """Something is not as it must be."""


@dataclass(frozen=True)
class Settings:
    """What a directory is begun with."""

    kills: int
    layouts: list[str]
    shuffle: str
    stores: bool
    seed: int

    @property
    def epochs(self) -> int:
        return max(8, STEPS_PER_KILL * self.kills * 16 // NUM_IMAGES)


@dataclass(frozen=True)
class Attempt:
    """A line of attempts.jsonl: one start, and how it ended."""

    number: int
    began: float  # Unix time
    layout: str  # kind:ranks
    launcher: str = "forked"
    reads_store: bool = False
    keeps_mirror: bool = False
    lost_directory: bool = False  # before this start
    kind: str = ""  # how it ended, of `KINDS` and others
    step: int = 0  # of the newest checkpoint then
    seconds: float = 0.0
    cpu_s: float = 0.0  # of forked ranks, and of new interpreters, until shortly before their end
    starts: list[tuple[int, str]] = field(default_factory=list)  # after which step its ranks began, and their layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--layouts",
        default="data:2",
        metavar="KIND:RANKS[,KIND:RANKS...]",
        help=f"of the run, one of them for each start; kinds: {', '.join(LAYOUTS)}; all: {ALL} (default: %(default)s)",
    )
    parser.add_argument(
        "--shuffle", default="full", choices=("full", "block", "none"), help="order (default: %(default)s)"
    )
    parser.add_argument("--stores", action="store_true", help="read from an object store, and mirror the run in one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw failures and losses, as a PNG")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to work, kept (default: a temporary directory)"
    )
    options = parser.parse_args()
    layouts = (ALL if options.layouts == "all" else options.layouts).split(",")
    if wrong := [layout for layout in layouts if layout.partition(":")[0] not in LAYOUTS or not layout[-1].isdecimal()]:
        parser.error(f"--layouts has {', '.join(wrong)}: use KIND:RANKS with the kinds {', '.join(LAYOUTS)}")
    settings = Settings(options.kills, layouts, options.shuffle, options.stores, options.seed)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="torture-"))
    torture = Torture(directory, settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: torture.stopping.set())
    try:
        torture.run()
    except FaultError as error:
        sys.exit(f"PROBLEM: {error}; seed {settings.seed}, attempt {len(torture.attempts)}; kept: {directory}")
    finally:
        torture.close()
    print(describe(torture.attempts, torture.total_steps))
    print("every restart resumed; weights and losses equal bit for bit; each image exactly once in every epoch")
    if options.picture is not None:
        draw(torture.attempts, directory, options.picture)
    if options.directory is None:
        shutil.rmtree(directory)
    sys.exit(0)


class Torture:
    """The run that is killed, and the undisturbed one, in a directory that may have both already."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.stopping = threading.Event()
        self._directory, self._settings = directory, settings
        self._killed, self._undisturbed, self._lost = (directory / name for name in ("killed", "undisturbed", "lost"))
        self._log, self._unfinished = directory / "attempts.jsonl", directory / "attempt.json"
        prepare_server()
        self._prepare()
        self.total_steps = load_config(directory / "killed.py").steps(settings.epochs, NUM_IMAGES)
        self.attempts = [Attempt(**json.loads(line)) for line in self._log.open()] if self._log.exists() else []
        if newest_step(self._killed) is None and self._lost.exists():  # its mirror, in memory, has ended with the tool
            shutil.rmtree(self._killed)
            self._lost.rename(self._killed)
        if self._unfinished.exists():
            self._note(Attempt(**json.loads(self._unfinished.read_text())), "with the tool", None)
        self._stores = Stores(directory) if settings.stores else None
        self._is_mirrored = False  # up to the last comparison at least: the run directory may be lost
        self._first_step_s = deque([1.0], maxlen=20)  # the last times from a start to the first checkpoint

    def _prepare(self) -> None:
        begun = self._directory / "settings.json"
        if begun.exists():
            if json.loads(begun.read_text()) != asdict(self._settings):
                sys.exit(f"{self._directory} was begun with {begun.read_text()}: use the same options")
            return
        make_dataset(self._directory / "data")
        for run, more in ((self._killed, UPLOADS), (self._undisturbed, "")):
            text = CONFIG.format(
                root=str(self._directory / "data"),
                run=str(run),
                epochs=self._settings.epochs,
                shuffle=self._settings.shuffle,
            )
            run.with_suffix(".py").write_text(text + more)
        begun.write_text(json.dumps(asdict(self._settings)))

    def close(self) -> None:
        if self._stores is not None:
            self._stores.close()

    @property
    def num_kills(self) -> int:
        return sum(attempt.kind in KINDS for attempt in self.attempts)

    def run(self) -> None:
        """Kill until there were enough kills, or until it is asked to stop, and compare.

        Raises:
            FaultError: something is not as it must be.
        """
        if self._stores is not None:
            self._compare()  # which also fills the mirror, whose store begins empty
        compared = self.num_kills
        while self.num_kills < self._settings.kills and not self.stopping.is_set():
            self._attempt()
            if self.num_kills >= compared + KILLS_PER_COMPARISON:
                self._compare()
                compared = self.num_kills
        self._compare(to_the_end=self.num_kills >= self._settings.kills)
        if not prove(self._killed, dataset=str(self._directory / "data"), all_draws=True):
            raise FaultError("the killed run's record is not that of its recipe")
        if self._stores is not None:
            print("the stores: " + ", ".join(f"{count} {what}" for what, count in self._stores.disturbed.items()))

    def _attempt(self) -> None:
        """Start the run, and end it."""
        rng = random.Random(f"{self._settings.seed} {len(self.attempts)}")
        launcher = rng.choices([*LAUNCHERS], [*LAUNCHERS.values()])[0]
        event = rng.choices(("kill", "freeze", "full disk"), (6, 1, 1))[0]
        at_start = rng.random() < 0.25
        before = newest_step(self._killed) or 0
        # Kills keep pace with steps, and the last one is not later than nine tenths of the run.
        pace = 0.9 * self.total_steps * (self.num_kills + rng.random()) / self._settings.kills
        target = max(before + 1, round(pace))
        attempt, words = self._drawn(rng, launcher)
        if launcher == "torchrun":
            self._lose_node(attempt, words, before + 1, rng)
            return
        with self._start(attempt, words) as ranks:
            self._end(ranks, attempt, rng, event, None if at_start else target, before)

    def _end(
        self, ranks: Ranks, attempt: Attempt, rng: random.Random, event: str, target: int | None, before: int
    ) -> None:
        """End ranks that begin at step `before`: at step `target`, or while they start."""
        began = time.monotonic()
        if target is None:
            slower = 1 if attempt.launcher == "forked" else 10
            time.sleep(rng.uniform(0, 1.2 * slower * statistics.median(self._first_step_s)))
        else:
            self._wait(ranks, before + 1)
            self._first_step_s.append(time.monotonic() - began)
            self._wait(ranks, target)
            time.sleep(rng.uniform(0, 0.1 * statistics.median(self._first_step_s)))
        if not ranks.running():
            statuses = ranks.wait()
            if set(statuses) != {0}:  # it may have come to its end, but never to another
                raise FaultError(f"the ranks ended with {statuses} before they were killed: see killed.log")
            self._note(attempt, ENDED, ranks)
            return
        saved = sum(path.stat().st_size for path in self._killed.glob("checkpoints/newest/*.safetensors"))
        if event == "full disk" and saved and target is not None:
            ranks.limit_files(saved // ranks.num_ranks - 1)  # the largest of as many files is larger
            statuses = ranks.wait(HANG_S)
            if 0 in statuses or None in statuses:
                raise FaultError(f"with a full disk, the ranks ended with {statuses} (None: not at all)")
            self._note(attempt, "on a full disk", ranks)
            return
        if event == "freeze":
            ranks.freeze(rng)
            time.sleep(rng.uniform(0, 1))
        if self._stores is not None and (attempt.reads_store or attempt.keeps_mirror):
            self._stores.disturb(rng)
        is_writing = any(path.suffix in (".partial", ".removed") for path in self._killed.glob("checkpoints/.*"))
        ranks.running()
        ranks.kill(rng)
        kind = "while a checkpoint was written" if is_writing else "between saves"
        if (newest_step(self._killed) or 0) <= before:
            kind = "before the first save"
        self._note(attempt, "with a frozen rank" if event == "freeze" else kind, ranks)

    def _drawn(self, rng: random.Random, launcher: str) -> tuple[Attempt, list[str]]:
        """Return a start with its options; the run directory may be lost before it."""
        layout = rng.choice(self._settings.layouts)
        if self.attempts and rng.random() < 0.5:  # else the undisturbed run would have to start as often
            layout = self.attempts[-1].layout
        if launcher == "torchrun":
            layout = "data:2"
        attempt = Attempt(len(self.attempts), time.time(), layout, launcher)
        words = [*LAYOUTS[layout.partition(":")[0]]]
        if self._stores is not None:
            reads, keeps, loses = (rng.random() < share for share in (0.3, 0.4, 0.5))
            loses = loses and keeps and self._is_mirrored
            # After a loss, until a start has got as far as to download the checkpoint.
            keeps = keeps or (self._is_mirrored and newest_step(self._killed) is None)
            attempt = replace(attempt, reads_store=reads, keeps_mirror=keeps, lost_directory=loses)
            words += [*(self._stores.reading() if reads else ()), *(self._stores.mirroring() if keeps else ())]
            if loses:
                self._lose_directory()
        return attempt, words

    def _lose_directory(self) -> None:
        """Remove everything but the sample traces, which no mirror has."""
        if newest_step(self._killed) is not None:
            shutil.rmtree(self._lost, ignore_errors=True)
            self._killed.rename(self._lost)
        else:
            shutil.rmtree(self._killed)
        self._killed.mkdir()
        for path in self._lost.glob("samples.*.jsonl"):
            shutil.copy(path, self._killed)

    def _start(self, attempt: Attempt, words: list[str]) -> Ranks:
        self._unfinished.write_text(json.dumps(asdict(attempt)))
        return Ranks(
            *(self._killed.with_suffix(".py"), int(attempt.layout.partition(":")[2])),
            *(self._killed.with_suffix(".log"), words),
            are_forked=attempt.launcher == "forked",
        )

    def _wait(self, ranks: Ranks, step: int) -> None:
        """Wait until there is a checkpoint of `step`, or the ranks have ended."""
        end = time.monotonic() + HANG_S
        while (newest_step(self._killed) or 0) < step and ranks.running():
            if time.monotonic() > end:
                raise FaultError(f"no step {step} within {HANG_S:.0f} s of a start at {newest_step(self._killed)}")
            time.sleep(0.005)

    def _lose_node(self, attempt: Attempt, words: list[str], step: int, rng: random.Random) -> None:
        """Start two torchrun agents with a rank each, kill one after `step`, and both when the other has gone on."""
        self._unfinished.write_text(json.dumps(asdict(attempt)))
        rendezvous = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        config, log = self._killed.with_suffix(".py"), self._killed.with_suffix(".log")
        nodes = [Node(config, log, words, port=rendezvous.port, most_nodes=2) for _ in range(2)]
        end = time.monotonic() + HANG_S
        try:
            while (
                len(nodes) == 2
                or not any(begun[1] == "data:1" for begun in self._starts(attempt))
                or not ((newest_step(self._killed) or 0) >= step)
            ):
                if len(nodes) == 2 and (newest_step(self._killed) or 0) >= step:
                    nodes.pop(rng.randrange(2)).kill()
                    step = min((newest_step(self._killed) or 0) + 2, self.total_steps)
                if time.monotonic() > end or any(node.agent.poll() for node in nodes):
                    raise FaultError(f"the agents with a lost node have not gone on to step {step}: see killed.log")
                time.sleep(0.05)
        finally:
            for node in nodes:
                node.kill()
        self._note(attempt, "a node was lost", None)

    def _starts(self, attempt: Attempt) -> list[tuple[int, str]]:
        """Return where the ranks of an attempt began to train, and in which layout, as the run's metrics have it."""
        starts = (event for event in read_events(self._killed / METRICS) if event["event"] == "start")
        return [
            (event["step"], f"data:{event['ranks']}" if attempt.launcher == "torchrun" else attempt.layout)
            for event in starts
            if event["time"] >= attempt.began
        ]

    def _note(self, attempt: Attempt, kind: str, ranks: Ranks | None) -> None:
        """Append a line to attempts.jsonl, and look through the cache."""
        attempt = replace(
            attempt,
            kind=kind,
            step=newest_step(self._killed) or 0,
            seconds=round(time.time() - attempt.began, 3),
            cpu_s=round(ranks.cpu_s, 2) if ranks is not None else 0.0,
            starts=self._starts(attempt),
        )
        with self._log.open("a") as file:
            file.write(json.dumps(asdict(attempt)) + "\n")
        self._unfinished.unlink()
        self.attempts.append(attempt)
        print(
            f"{attempt.number}: {attempt.layout}, {attempt.launcher}, {kind}, step {attempt.step}, "
            f"{attempt.seconds:.1f} s, {attempt.cpu_s} s of processor time",
            flush=True,
        )
        if attempt.reads_store and self._stores is not None and (problems := self._stores.problems()):
            raise FaultError("; ".join(problems))

    def _compare(self, *, to_the_end: bool = False) -> None:
        """Let the run stop by itself, or go on to its end, and have the undisturbed one do what it did."""
        rng = random.Random(f"{self._settings.seed} {len(self.attempts)}")
        attempt = Attempt(len(self.attempts), time.time(), rng.choice(self._settings.layouts))
        words = [*LAYOUTS[attempt.layout.partition(":")[0]]]
        if self._stores is not None:
            attempt = replace(attempt, keeps_mirror=True)
            words += self._stores.mirroring()
        # The directory may be lost, and its mirror be as far as it was.
        newest = newest_step(self._killed) or newest_step(self._lost) or 0
        step = self.total_steps if to_the_end else min(newest + 1, self.total_steps)
        with self._start(attempt, [*words, "--run.max_steps", str(step)]) as ranks:
            if set(statuses := ranks.wait(HANG_S)) != {0}:
                raise FaultError(f"the ranks were to stop at step {step} and ended with {statuses}: see killed.log")
        self._note(attempt, STOPPED, ranks)
        self._is_mirrored = self._stores is not None
        done = newest_step(self._undisturbed) or 0
        for end, layout in committed((start for attempt in self.attempts for start in attempt.starts), step):
            if end > done:
                log = self._undisturbed.with_suffix(".log")
                kind, _, num_ranks = layout.partition(":")
                words = [*LAYOUTS[kind], "--run.max_steps", str(end)]
                with Ranks(self._undisturbed.with_suffix(".py"), int(num_ranks), log, words) as undisturbed:
                    if set(statuses := undisturbed.wait(HANG_S)) != {0}:
                        raise FaultError(f"the undisturbed run ended with {statuses}: see {log}")
        if problems := compare(self._undisturbed, self._killed, step):
            raise FaultError("; ".join(problems))
        digests = [final_weights(run) for run in (self._undisturbed, self._killed)]
        print(f"after {self.num_kills} kills, step {step}: weights {' and '.join(digests)}", flush=True)


def committed(starts: Iterable[tuple[int, str]], last_step: int) -> list[tuple[int, str]]:
    """Return how the steps were made that count: (up to this step, layout), as few as possible.

    Args:
        starts: (after this step, layout), in the order in which they happened. What was done after a step at which a
            later one starts does not count.
    """
    kept: list[tuple[int, str]] = []
    for begin, layout in starts:
        while kept and kept[-1][0] >= begin:
            kept.pop()
        if not kept or kept[-1][1] != layout:
            kept.append((begin, layout))
    ends = [begin for begin, _ in kept[1:]] + [last_step]
    return [(end, layout) for end, (begin, layout) in zip(ends, kept, strict=True) if begin < end]


def final_weights(run: Path) -> str:
    newest, _ = load_newest(run / "checkpoints")
    assert newest is not None
    return weights_digest(newest.state["model"])


def describe(attempts: list[Attempt], total_steps: int) -> str:
    """Return the kills by kind and by layout, and what they cost."""
    kills = [attempt for attempt in attempts if attempt.kind in KINDS]
    kinds, layouts, launchers = (
        ", ".join(f"{count} {what}" for what, count in Counter(one).most_common())
        for one in (
            (attempt.kind for attempt in kills),
            (attempt.layout for attempt in kills),
            (attempt.launcher for attempt in kills),
        )
    )
    starts = [start for attempt in attempts for start in attempt.starts]
    changes = sum(one[1] != other[1] for one, other in itertools.pairwise(starts))
    forked = [attempt.cpu_s for attempt in kills if attempt.launcher == "forked"]
    return (
        f"{len(kills)} kills in {attempts[-1].step} of {total_steps} steps: {kinds}\n"
        f"by layout: {layouts}\nby launcher: {launchers}\n"
        f"{changes} changes of layout; {sum(attempt.lost_directory for attempt in kills)} times the run directory was "
        f"lost, {sum(attempt.reads_store for attempt in kills)} starts read from a store, "
        f"{sum(attempt.keeps_mirror for attempt in kills)} kept a mirror\n"
        f"processor time of a forked start: {statistics.mean(forked or [0.0]):.2f} s on average"
    )


def draw(attempts: list[Attempt], directory: Path, path: Path) -> None:
    """Draw failures by kind, layouts and both losses over the steps."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    failures, layouts, loss = figure.subplots(3, 1, sharex=True, height_ratios=(4, 4, 5))
    kills = [attempt for attempt in attempts if attempt.kind in KINDS]
    rows = {kind: [attempt.step for attempt in kills if attempt.kind == kind] for kind in KINDS}
    rows["on an empty disk, from the mirror"] = [attempt.step for attempt in kills if attempt.lost_directory]
    rows = {kind: steps for kind, steps in rows.items() if steps}
    for row, steps in enumerate(rows.values()):
        failures.plot(steps, [row] * len(steps), "|", markersize=14, markeredgewidth=0.8, color=f"C{row}")
    failures.set_yticks(range(len(rows)), [f"{kind}: {len(steps)}" for kind, steps in rows.items()])
    failures.set(title=f"{len(kills)} failures in {attempts[-1].step} steps", ylim=(len(rows) - 0.4, -0.6))
    step, begin = attempts[-1].step, 0
    names = sorted({layout for attempt in attempts for _, layout in attempt.starts})
    for end, layout in committed((start for attempt in attempts for start in attempt.starts), step):
        layouts.plot([begin, end], [names.index(layout)] * 2, lw=5, color="#0072B2", solid_capstyle="butt")
        begin = end
    layouts.set_yticks(range(len(names)), names)
    layouts.set(ylabel="kind of parallelism: ranks", ylim=(-0.6, len(names) - 0.4))
    for run, style, name in (
        (directory / "undisturbed", {"lw": 4, "color": "#56B4E9"}, "undisturbed"),
        (directory / "killed", {"lw": 0.8, "color": "#D55E00"}, f"killed {len(kills)} times"),
    ):
        losses = losses_of(run)
        loss.plot([*losses], [*losses.values()], label=f"{name}: weights {final_weights(run)[:16]}...", **style)
    loss.set(ylabel="training loss", xlabel="step", xlim=(0, max(attempt.step for attempt in attempts) + 1))
    loss.legend(frameon=False)
    for axes in (failures, layouts, loss):
        axes.grid(color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
