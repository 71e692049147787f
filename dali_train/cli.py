"""The command line: each command's arguments, and what it does with them through the modules of dali_train/commands.

Exit status: 0 finished, 2 a mistake in the command, the config or the dataset, 75 stopped on request after saving
(start it again), 76 a device computes wrongly (start it elsewhere), anything else a failure.

Every word is read once: ``--section.field VALUE`` by config/command_line.py, the others by argparse. torch takes
seconds to import, so commands that need it are imported where they run, to keep --help fast.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dali_train import __version__
from dali_train.checkpoint.run_directory import RunDirectory, local_run
from dali_train.commands.arguments import (
    CommandParser,
    Commands,
    add_launch_options,
    config_of,
    launch_options,
    load_user_extensions,
    path_or_url,
    refuse_settings,
    with_config,
)
from dali_train.commands.boundary import importing, run_command
from dali_train.commands.data import add_data_command
from dali_train.config.check import Extra, load_all
from dali_train.config.command_line import (
    is_completing,
    read_overrides,
)
from dali_train.config.config import find_recipe, recipe_table
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.launch import exit_if_launcher_dies, is_first_on_host, tell_torchrun
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import (
    FINISHED,
    START_AGAIN,
    describe,
    describe_all,
    exit_status,
    read_status,
    stopped_before_restart,
)
from dali_train.runtime.stop import StopReason, StopRequests
from dali_train.text import aligned, printable, shortened

EXTRA_COMMANDS: Sequence[Extra[Callable[[Commands], None]]] = (
    Extra("dali_train.extras.blame:add_blame_command"),
    Extra("dali_train.extras.compare:add_compare_command"),
    Extra("dali_train.extras.quickstart:add_quickstart_command"),
    Extra("dali_train.extras.fit:add_fit_command"),
    Extra("dali_train.extras.plan:add_plan_command"),
    Extra("dali_train.extras.doctor:add_doctor_command"),
    Extra("dali_train.extras.probe:add_probe_command"),
    Extra("dali_train.extras.export:add_export_command"),
    Extra("dali_train.extras.predict:add_predict_command"),
    Extra("dali_train.extras.report:add_diff_command"),
    Extra("dali_train.extras.proof:add_prove_command"),
    Extra("dali_train.extras.report:add_report_command"),
    Extra("dali_train.extras.suspects:add_suspects_command"),
    Extra("dali_train.extras.init:add_init_command"),
    Extra("dali_train.extras.completion:add_completion_command"),
)
"""Functions that add a command of dali_train/extras to the subparsers."""

COMPLETION = Extra[Callable[[argparse.ArgumentParser], None]](
    "dali_train.extras.completion:answer_completion", "completion in a shell"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = command_parser()
    if is_completing():
        COMPLETION.load()(parser)
    words, settings = _split_settings(list(sys.argv[1:] if argv is None else argv))
    options, unknown = parser.parse_known_args(words)
    if getattr(options, "config", "") is None and unknown and _is_config(unknown[0]):
        options.config = unknown.pop(0)
    return run_command(f"dali-train {options.command}", lambda: options.run(options, [*unknown, *settings]))


def _split_settings(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off ``--section.field`` with its values, which argparse would take for RUN; return (the rest, these)."""
    words: list[str] = []
    settings: list[str] = []
    current = words
    for word in argv:
        if word.startswith("--"):  # with a space it is a value: the arguments of --from-timm
            name = word.partition("=")[0]
            current = settings if "." in name and " " not in name else words
        current.append(word)
    return words, settings


def _is_config(word: str) -> bool:
    """Return whether a word without an option, as in `train photos.py`, can only mean --config."""
    return word.endswith((".py", ".json")) or find_recipe(word) is not None


def command_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="dali-train",
        description="Train image classifiers at large batch sizes, with the same samples on any number of GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dali-train {__version__}")
    add_launch_options(parser, hidden=True)  # torch.distributed.launch puts --local-rank before the command
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    own = (_add_train, _add_evaluate, _add_status, _add_recipes, add_data_command)
    for add_command in (*own, *load_all(EXTRA_COMMANDS)):
        add_command(commands)
    return parser


def _add_train(commands: Commands) -> None:
    train = with_config(commands, "train", "Train a model, or resume a run that was stopped.", _train)
    train.add_argument(
        "--num-processes",
        metavar="N|auto",
        help="start N processes on this host, without a launcher; auto: one per GPU, or the fastest number for a CPU",
    )


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    exit_if_launcher_dies()
    # c10d warns with C++ stacks when another rank is gone; the watchdog reports which one, and why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = config_of(options, overrides)
    if stopped_before_restart(Path(config.run.dir)):
        tell_torchrun("the run was stopped on request and is not restarted: start the same command again to resume")
        return START_AGAIN
    if not is_remote(config.data.root) and config.data.local_copy is None:
        from dali_train.data.dataset.storage import storage_of

        try:  # before torch is imported, which takes seconds
            storage_of(config.data.root)
            Manifest.read(config.data.root)
        except (ConfigError, DatasetError) as error:
            error.reported_elsewhere = not is_first_on_host(launch_options(options).local_rank)
            raise
    if options.num_processes is not None:
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run

        result = run(config, num_processes=_num_processes(options.num_processes))
    else:
        stop_requests = StopRequests(config.run.max_seconds)  # before torch: a signal during its import would kill
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run_rank

        try:
            result = run_rank(config, launch_options(options), stop_requests)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(stop_requests.last_words) from None
        finally:
            stop_requests.ignore_further()  # torchrun sends TERM as soon as another rank has ended
    return FINISHED if result.stopped == StopReason.NONE else START_AGAIN


def _num_processes(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--num-processes is {text}: use 1 or more, or auto")
    return int(text)


def _add_evaluate(commands: Commands) -> None:
    summary = "Evaluate a run's checkpoint, or any weights with --config FILE --model.weights FILE_OR_NAME."
    evaluate = with_config(commands, "eval", summary, _evaluate)
    evaluate.add_argument(
        "directory",
        nargs="?",
        type=path_or_url,
        metavar="RUN",
        help="a run.dir, or the URL of a run.mirror, whose own settings are used",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="best|newest|PATH",
        help="the checkpoint of RUN (default: best, or newest if none was evaluated)",
    )


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    if not isinstance(options.directory, str):
        return _evaluate_run(options, overrides)
    url = options.directory
    with local_run(url, options.checkpoint) as options.directory:
        return _evaluate_run(options, overrides, name=url)


def _evaluate_run(options: argparse.Namespace, overrides: list[str], *, name: str = "") -> int:
    if options.directory is not None and options.directory.suffix == ".py":
        raise ConfigError(
            f"{options.directory}: eval takes a run directory; for a config write --config {options.directory}"
        )
    if options.directory is not None:
        load_user_extensions(options)
        options.config = RunDirectory(options.directory).directory / "config.json"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*hooks.user")  # which observe training alone
        config = config_of(options, overrides)
    chosen = read_overrides(overrides)
    named = options.directory is not None or options.checkpoint is not None
    if named and "model.weights" in chosen:
        raise ConfigError(
            "--model.weights with a run or a checkpoint, which has its own weights: leave --model.weights out"
        )
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.evaluate import evaluate_checkpoint, evaluate_weights

    launch = launch_options(options)
    if not named and config.model.weights is not None:
        evaluate_weights(config, chosen, launch)
    else:
        evaluate_checkpoint(config, options.directory, options.checkpoint, launch, name=name)
    return FINISHED


def _add_status(commands: Commands) -> None:
    summary = "Report the progress of a run; exits with the trainer's status, which torchrun hides."
    status = with_config(commands, "status", summary, _status)
    status.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="a run directory, or several for a table (runs/*); or give --config instead",
    )


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    if not options.directories and options.config is None and not overrides:
        raise ConfigError("no run is named: `dali-train status RUN`, or --config FILE for its run.dir")
    directories = options.directories or [Path(config_of(options, overrides).run.dir)]
    for directory in options.directories:
        if not directory.exists() or (directory.is_file() and len(directories) == 1):
            reason = "a file" if directory.exists() else "no such directory"
            raise ConfigError(f"{directory}: {reason}; use a run directory")
    # A pattern such as runs/* also matches files, and other folders such as a comparison's.
    directories = [path for path in directories if not path.is_file()] or directories
    signs = ("config.json", "status.json", "run.lock")
    runs = [path for path in directories if any((path / sign).exists() for sign in signs)]
    if len(runs) > 1:
        lines, status = describe_all(runs)
        print("\n".join(lines))
        return status
    (directory,) = runs or directories[:1]
    print(printable(describe(directory)))
    return exit_status(read_status(directory))


def _add_recipes(commands: Commands) -> None:
    summary = "List the recipes that ship, for --config NAME: source, target, cost and what was measured."
    recipes = commands.add_parser("recipes", help=summary, description=summary)
    recipes.set_defaults(run=_recipes, parser=recipes)


def _recipes(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides, "takes no arguments")
    titles = ("--config", "recipe", "target", "source", "H100-hours (EFLOP)", "measured")
    rows = [[shortened(cell, 60) for cell in row] for row in [titles, *recipe_table()]]
    print("\n".join(aligned(rows)))
    return FINISHED
