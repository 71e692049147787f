#!/usr/bin/env python
"""Change the nodes of an elastic run over and over, and compare it with an undisturbed one in one process.

    python -m tests.verification.torture_elastic --changes 20 --picture elastic.png

Each of up to four nodes is a torchrun agent of this machine with one rank. At steps spread over the run, a node is
killed with its rank, or added, or its rank is frozen (SIGSTOP) until the others end because of it. The rendezvous is
kept by this program, as by a node that stays. In the end the sample trace must have each image exactly once per epoch,
and the weights, in float64, must be those of the undisturbed run up to the order of summation. Printed are the changes
and the goodput; the picture has ranks and steps over time, and both curves of the loss. Uses a small dataset of noise
that it makes itself.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from matplotlib.figure import Figure
from safetensors.torch import load_file

from dali_train.checkpoint.trained_model import MODEL_FILE
from dali_train.config import load_config
from dali_train.runtime.status import METRICS, Event, goodput, read_events
from tests.verification.torture import CONFIG, NUM_IMAGES, Node, Ranks, compare, make_dataset, prepare_server

MOST_NODES = 4  # as many as a step has micro-batches
STEP_S = 0.5  # a step takes at least this, until all changes are made: a node needs time to come
SETTLED_S = 30.0  # after the last change
BOUND = 1e-11  # of weights and moments; summed in another order, they differ by rounding, which grows with the steps
OPTIONS = (
    *("--precision.dtype", "fp64", "--run.checkpoint_every_steps", "1000000", "--run.checkpoint_every_seconds", "2"),
    *("--run.eval_every_epochs", "none", "--parallel.timeout_s", "10", "--optimizer.lr", "2e-3"),
)
PACE = f"""
import time
from dataclasses import replace
from dali_train.hooks import Hook


class Pace(Hook):
    def start(self, record):
        self._changed = record.directory.parent / "changed"

    def step(self, record):
        if not self._changed.exists():
            time.sleep({STEP_S})


config = replace(config, hooks=replace(config.hooks, user=(Pace,)))
"""


@dataclass(frozen=True)
class Moment:
    """How far the run was, as far as its metrics say."""

    seconds: float  # since the first start
    step: int
    ranks: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the changes (default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the run, as a PNG")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to work, kept (default: a temporary directory)"
    )
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="elastic-"))
    make_dataset(directory / "data")
    epochs = max(2, 60 * (options.changes + 1) * 16 // NUM_IMAGES)  # 60 steps for each change
    for name, more in (("undisturbed", ""), ("killed", PACE)):
        text = CONFIG.format(run=str(directory / name), root=str(directory / "data"), epochs=epochs, shuffle="full")
        (directory / f"{name}.py").write_text(text + more)
    total_steps = load_config(directory / "undisturbed.py").steps(epochs, NUM_IMAGES)

    print(f"{total_steps} steps in one process", flush=True)
    prepare_server()
    with Ranks(directory / "undisturbed.py", 1, directory / "undisturbed.log", OPTIONS) as ranks:
        if ranks.wait() != [0]:
            sys.exit(f"the undisturbed run failed: see {directory / 'undisturbed.log'}")
    moments = list(elastic(directory, total_steps, options.changes, random.Random(options.seed)))

    events = read_events(directory / "killed" / METRICS)
    found = goodput(events)
    assert found is not None
    print(f"goodput {found.describe()}, of {events[-1]['time'] - events[0]['time']:.0f} s")
    problems = compare(directory / "undisturbed", directory / "killed", total_steps, bound=BOUND)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        weights, others = (load_file(directory / name / MODEL_FILE) for name in ("undisturbed", "killed"))
        largest = max(
            float((tensor - others[name]).abs().max() / tensor.abs().max()) for name, tensor in weights.items()
        )
        print(f"each image exactly once in every epoch; the weights differ by at most {largest:.1e} of their largest")
    if options.picture is not None:
        draw(moments, read_events(directory / "undisturbed" / METRICS), events, options.picture)
    print(f"kept: {directory}")
    sys.exit(1 if problems else 0)


def elastic(directory: Path, total_steps: int, changes: int, rng: random.Random) -> Iterator[Moment]:
    """Train with nodes that come and go, and yield now and then how far the run is."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    nodes = [new_node(directory, store.port), new_node(directory, store.port)]
    began, before, changed = time.time(), Moment(0, 0, 0), 0.0
    steps = [total_steps * (number + 1) // (changes + 1) for number in range(changes)]
    try:
        while any(node.agent.poll() is None for node in nodes):
            moment = look(directory / "killed", began)
            if (moment.step, moment.ranks) != (before.step, before.ranks):
                yield moment
                before = moment
            if steps and moment.step >= steps[0] and moment.ranks == len(nodes):
                steps.pop(0)
                what = change(nodes, directory, store.port, rng)
                print(f"{moment.seconds:.0f} s, step {moment.step}: {what}", flush=True)
                changed = time.monotonic()
            elif not steps and moment.ranks == len(nodes) and time.monotonic() - changed > SETTLED_S:
                (directory / "changed").touch()
            time.sleep(0.1)
    finally:
        for node in nodes:
            node.kill()
    if statuses := [node.agent.returncode for node in nodes if node.agent.returncode]:
        sys.exit(f"agents ended with {statuses}: see {directory / 'killed.log'}")


def look(run: Path, began: float) -> Moment:
    events = read_events(run / METRICS)
    ranks = [int(event["ranks"]) for event in events if event["event"] == "start"]
    return Moment(time.time() - began, events[-1]["step"] if events else 0, ranks[-1] if ranks else 0)


def change(nodes: list[Node], directory: Path, port: int, rng: random.Random) -> str:
    """Add a node, kill one, or freeze a rank; say what."""
    possible = ["add"] * (3 * (len(nodes) < MOST_NODES)) + (["kill", "kill", "freeze"] if len(nodes) > 1 else [])
    what = rng.choice(possible)
    if what == "add":
        nodes.append(new_node(directory, port))
        return f"a node comes, {len(nodes)}"
    if what == "kill":
        nodes.pop(rng.randrange(len(nodes))).kill()
        return f"a node is killed, {len(nodes)}"
    os.kill(rng.choice(nodes).workers()[0], signal.SIGSTOP)
    return "a rank is frozen"


def new_node(directory: Path, port: int) -> Node:
    return Node(directory / "killed.py", directory / "killed.log", OPTIONS, port=port, most_nodes=MOST_NODES)


def draw(moments: list[Moment], undisturbed: list[Event], killed: list[Event], path: Path) -> None:
    figure = Figure(figsize=(9, 8), layout="constrained")
    ranks, steps, loss = figure.subplots(3, 1)
    seconds = [moment.seconds for moment in moments]
    ranks.step(seconds, [moment.ranks for moment in moments], where="post", color="#0072B2")
    ranks.set(ylabel="ranks", ylim=(0, MOST_NODES + 0.5), xlim=(0, None))
    steps.plot(seconds, [moment.step for moment in moments], color="#0072B2")
    steps.set(ylabel="step", xlabel="seconds since the first start", xlim=(0, None), ylim=(0, None))
    for events, style, name in (
        (undisturbed, {"lw": 4, "color": "#56B4E9"}, "one process, undisturbed"),
        (killed, {"lw": 1, "color": "#D55E00"}, "nodes that come and go"),
    ):
        train = [event for event in events if event["event"] == "train"]
        loss.plot([event["step"] for event in train], [event["loss"] for event in train], label=name, **style)
    loss.set(ylabel="training loss", xlabel="step", xlim=(0, None))
    loss.legend(frameon=False)
    for axes in (ranks, steps, loss):
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
