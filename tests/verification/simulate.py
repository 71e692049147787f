#!/usr/bin/env python
"""Run the package's protocols in a simulated world, over and over with other seeds, until an invariant is violated.

    python -m tests.verification.simulate --histories 1000000 --seed 7 --only lock

One generator decides which process goes on after each system call, and where one is killed or frozen, a machine loses
power, a disk is full or fails, and a clock jumps (`simulation/world.py`). What must hold is in
`simulation/protocols.py` and `simulation/datasets.py`. A violation is printed with the last calls of each process and
the command that repeats it:

    python -m tests.verification.simulate --only lock --seed 4711 --histories 1 --trace

With --everywhere a history without faults is repeated with a crash at each of its calls, in turn: a kill, and power
failures that keep none, all or some of what was not flushed:

    python -m tests.verification.simulate --only checkpoint --histories 2 --everywhere
"""

import argparse
import contextlib
import gc
import io
import os
import sys
import time
import traceback
from random import Random

from tests.verification.simulation.datasets import Cached, Converted
from tests.verification.simulation.patches import current, simulated
from tests.verification.simulation.protocols import Lock, Mirrored, Protocol, Ranks, Run
from tests.verification.simulation.world import FAULTS, ViolationError, World

PROTOCOLS: dict[str, type[Protocol]] = {
    **{"lock": Lock, "checkpoint": Run, "ranks": Ranks, "mirror": Mirrored},
    **{"cache": Cached, "conversion": Converted},
}
_SHOWN = 60


def run_history(
    protocol: type[Protocol], seed: int, *, traced: bool = False, script: dict[int, str] | None = None, keep: str = ""
) -> tuple[World, Exception | None]:
    """Run one history, within `simulated`; return its world, and the violation or error that ended it.

    Args:
        script: what happens at which call, instead of chance.
        keep: what of the unflushed a power failure keeps: none, all, some; by chance if empty.
    """
    world = World(seed, some_of(protocol.rates, seed), script=script)
    world.keep = keep or None
    if traced:
        world.trace = []
    gc.disable()  # finalizers at any moment would make a history depend on more than its seed
    with current(world):
        try:
            history = protocol(world)
            world.run()
            history.end()
        except Exception as error:
            return world, error
        finally:
            gc.enable()
    return world, None


def some_of(rates: dict[str, float], seed: int) -> dict[str, float]:
    """Leave out each kind of fault in half of the histories: some faults hide others (A. Groce et al., "Swarm testing",
    ISSTA 2012)."""
    random = Random(~seed)
    return {name: rate * random.choice((0, 0, 1, 3) if name in FAULTS else (0.3, 1, 2)) for name, rate in rates.items()}


def first_failure(protocol: type[Protocol], seeds: range) -> tuple[int, Exception] | None:
    """Run histories until one fails; return its seed and error."""
    with simulated(*protocol.modules, **protocol.replaced), contextlib.redirect_stderr(io.StringIO()):
        for seed in seeds:
            _, error = run_history(protocol, seed)
            if error is not None:
                return seed, error
    return None


def crash_everywhere(protocol: type[Protocol], seed: int, stride: int = 1) -> str | None:
    """Repeat one history with a crash at every `stride`-th call: a kill, and power failures that keep none, all or some
    of what was not flushed. Return the first failure, in words."""
    with simulated(*protocol.modules, **protocol.replaced), contextlib.redirect_stderr(io.StringIO()):
        whole, error = run_history(protocol, seed, script={})
        last = whole.calls if whole.calls_with_faults is None else whole.calls_with_faults
        for call in range(1, last + 1, stride) if error is None else ():
            for kind, keep in (("kill", ""), ("power", "none"), ("power", "all"), ("power", "some")):
                _, error = run_history(protocol, seed, script={call: kind}, keep=keep)
                if error is not None:
                    return f"seed {seed}, {kind} {keep} at call {call} of {last}: {error}"
    return None if error is None else f"seed {seed}, without a crash: {error}"


def explain(protocol: type[Protocol], seed: int) -> str:
    """Run a history once more, and describe it."""
    with simulated(*protocol.modules, **protocol.replaced), contextlib.redirect_stderr(io.StringIO()):
        world, error = run_history(protocol, seed, traced=True)
    assert world.trace is not None
    lines = [f"{at:10.4f} s  {process:10} {thread:14} {what}" for at, process, thread, what in world.trace]
    if error is not None and not isinstance(error, ViolationError):
        lines += traceback.format_exception(error)
    return "\n".join([*lines[-_SHOWN:], f"{type(error).__name__}: {error}" if error is not None else "no violation"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=100_000, help="of all protocols together")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--only", nargs="+", choices=PROTOCOLS, default=[*PROTOCOLS])
    parser.add_argument("--trace", action="store_true", help="print the calls of the last history")
    parser.add_argument("--everywhere", action="store_true", help="crash each history at each of its calls, in turn")
    arguments = parser.parse_args()
    if arguments.everywhere:
        for name in arguments.only:
            for seed in range(arguments.seed, arguments.seed + arguments.histories):
                failure = crash_everywhere(PROTOCOLS[name], seed)
                print(f"{name}: {failure or f'seed {seed}: survives a crash at every call'}", flush=True)
        return
    each = -(-arguments.histories // len(arguments.only))
    failed = False
    for name in arguments.only:
        began, done = time.process_time(), 0
        while done < each:
            seeds = range(arguments.seed + done, arguments.seed + min(done + 5_000, each))
            failed_at = first_failure(PROTOCOLS[name], seeds)
            done += len(seeds)
            if failed_at is not None:
                seed, error = failed_at
                print(f"{name}: after {seed - arguments.seed + 1:,} histories, seed {seed}: {error}")
                print(explain(PROTOCOLS[name], seed))
                print(f"again: python -m tests.verification.simulate --only {name} --seed {seed} --histories 1 --trace")
                failed = True
                break
            rate = done / (time.process_time() - began)
            if sys.stderr.isatty():
                print(f"\r{name}: {done:,} of {each:,} histories, {rate:,.0f}/s", end="", file=sys.stderr, flush=True)
        else:
            seconds = time.process_time() - began
            print(
                f"\r{name}: {done:,} histories from seed {arguments.seed}, {seconds:.1f} CPU s, {done / seconds:,.0f}/s"
            )
            if arguments.trace:
                print(explain(PROTOCOLS[name], arguments.seed + each - 1))
    sys.exit(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a history
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.verification.simulate", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    main()
