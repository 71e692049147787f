"""How fast a training step is: with real data, with synthetic data, and against loops written by hand around the same
model.

    python tools/bench_step.py --config FILE [--data.root DATASET] [--section.field value ...]

Contenders are processes of their own that take turns, round after round; printed are medians and spread over the
rounds. The trainer is the product's complete loop as `dali-train train` runs it, with its standard hooks, one logging
step per round, without evaluation and checkpoints. The bare loop has the same model, optimizer, precision and
accumulation on a fixed batch and nothing else; timm's is the loop of its train.py with its own parts. One process each,
on one GPU or the CPU.

Model FLOPs are those of torch's flop counter for a forward and a backward pass, without what is computed twice;
utilisation is against the data sheet's peak of a known GPU, else against the best large matrix product measured here.
"""

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.process import choose_device, device_name
from dali_train.training.build import configure_torch
from dali_train.training.cost import Peak, flops_per_image
from dali_train.training.timing import STEP_PHASES
from tools.bench.compute import BARE, REAL, SYNTHETIC, peak
from tools.bench.loops import CONTENDERS, Round, Task, contend
from tools.bench.turns import (
    Spread,
    chosen,
    describe_machine,
    parser_of,
    plot_bars,
    print_ratio,
    take_turns,
    write_lines,
)

# What the last lines compare, and the least that the median of each ratio of images/s should be.
RATIOS = [(SYNTHETIC, BARE, 0.98), (REAL, SYNTHETIC, 0.97)]


def main() -> None:
    options, overrides = parse_arguments()
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    multiprocessing.set_forkserver_preload(["tools.bench.loops"])  # torch and DALI, once for all contenders
    with tempfile.TemporaryDirectory(prefix="bench-step-") as work:
        variants = {f"{REAL}, {name}": words.split() for name, words in options.variant}
        task = Task(options.config.resolve(), overrides, Path(work), options.steps, options.traces, variants)
        try:
            config = task.load()
            num_classes = Split(config.data.root, "train").num_classes
            launch = discover(LaunchOptions())
            device = choose_device(config.run.device, launch)
            configure_torch(config, launch, device)
            flops = flops_per_image(config, num_classes)
            best = peak(config, device)
        except (ConfigError, DatasetError) as error:
            sys.exit(f"bench_step.py: {error}")
        heading = header(options, config, device, flops, best)
        print(heading)
        orders = [False] * (1 + options.rounds) + [True] * options.profile
        if options.json:
            facts = {"flops_per_image": flops, "peak_flops_per_second": best.flops_per_second}
            start = {
                "event": "start",
                "command": sys.argv,
                "header": heading,
                **facts,
                "global_batch": config.batch.global_batch,
            }
            write_lines(options.json, [start])
        names = [*chosen(CONTENDERS, options.only), *variants]
        answers = take_turns(names, contend, (task,), orders, lines=options.json)
    rounds = {name: results[: options.rounds] for name, results in answers.items() if results}
    images = config.batch.global_batch
    rates = {name: Spread.of(images / result.step_s for result in results) for name, results in rounds.items()}
    print_table(rounds, images, flops, best)
    for name, results in rounds.items():
        if results[0].phases:  # the trainer
            print_phases(name, results)
    if options.profile:
        print_kernels({name: results[-1].kernels for name, results in answers.items() if results}, device)
    if options.plot:
        plot_bars(
            options.plot, rates, f"{config.model.name}, {config.precision.dtype}, {device_name(device)}", ours="trainer"
        )
    print()
    for name, peer, goal in RATIOS:
        if name in rounds and peer in rounds:
            # Round by round, since a busy moment slows neighbouring rounds equally.
            pairs = zip(rounds[name], rounds[peer], strict=True)
            ratio = Spread.of(theirs.step_s / ours.step_s for ours, theirs in pairs)
            print_ratio(name, peer, ratio.median, goal=goal, rounds=ratio)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return (this tool's options, the config's)."""
    parser = parser_of(__doc__, "--rounds", "--json")
    parser.allow_abbrev = False
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the recipe; its settings can be overridden"
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="timed optimizer steps a round (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders whose name is one of these, or holds it")
    parser.add_argument(
        "--variant",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "SETTINGS"),
        help="another contender, the trainer with real data and these settings, such as "
        "'4 threads' '--data.num_threads 4'; again for more",
    )
    parser.add_argument(
        "--profile", action="store_true", help="one more round with a profiler: time by class of kernel"
    )
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="with --profile: also CONTENDER.json.gz, for Perfetto"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians as a PNG")
    return parser.parse_known_args()


def header(options: argparse.Namespace, config: Config, device: torch.device, flops: float, best: Peak) -> str:
    batch = config.batch
    return (
        f"{config.model.name}, {config.precision.dtype}, {batch.global_batch} images per step = {batch.micro_batch} "
        f"x {batch.grad_accum_steps(1)} accumulated, {config.data.root}: {options.rounds} rounds of {options.steps} "
        f"steps\n{device_name(device)}; {describe_machine()}\nmodel: {flops / 1e9:.4g} GFLOP an image, forward and "
        f"backward; peak {best.source}"
    )


def print_table(rounds: dict[str, list[Round]], images: int, flops: float, best: Peak) -> None:
    width = 2 + max(24, *map(len, rounds))
    columns = f"{'step ms':>10}{'low':>9}{'high':>9}{'images/s':>10}{'TFLOP/s':>9}{'of peak':>9}{'memory GB':>11}"
    print(f"\n{'':<{width}}{columns}")
    for name, results in rounds.items():
        step = Spread.of(result.step_s for result in results)
        rate = images / step.median
        print(
            f"{name:<{width}}{1000 * step.median:>10.1f}{1000 * step.low:>9.1f}{1000 * step.high:>9.1f}{rate:>10,.1f}"
            f"{rate * flops / 1e12:>9.3g}{rate * flops / best.flops_per_second:>9.1%}"
            f"{max(result.memory_gb for result in results):>11.2f}"
        )


def print_phases(name: str, results: list[Round]) -> None:
    """Print the trainer's phases by its own clock, beside the step as timed here."""
    means = {phase: sum(result.phases[phase] for result in results) / len(results) for phase in STEP_PHASES}
    step = sum(result.step_s for result in results) / len(results)
    print(
        f"\n{name}, ms per step, means: "
        + ", ".join(f"{phase} {1000 * seconds:.2f}" for phase, seconds in means.items())
    )
    print(f"  their sum {1000 * sum(means.values()):.2f}, the step {1000 * step:.2f}")


def print_kernels(kernels: dict[str, dict[str, float]], device: torch.device) -> None:
    """One column per contender: milliseconds per step by class of kernel, from the round with the profiler."""
    what = "kernels on the GPU" if device.type == "cuda" else "operators on the CPU"
    kinds = {kind for times in kernels.values() for kind in times}
    by_time = sorted(kinds, key=lambda kind: -median(times.get(kind, 0.0) for times in kernels.values()))
    print(f"\n{f'{what}, ms per step':<30}" + "".join(f"{name:>26}" for name in kernels))
    for kind in by_time:
        print(f"{kind:<30}" + "".join(f"{1000 * times.get(kind, 0.0):>26.2f}" for times in kernels.values()))
    print(f"{'sum':<30}" + "".join(f"{1000 * sum(times.values()):>26.2f}" for times in kernels.values()))


if __name__ == "__main__":
    main()
