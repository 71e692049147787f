"""The command line: a thin layer over the commands in dali_train/commands.

Exit status: 0 finished, 2 a mistake in the command, the config or the dataset, 75 stopped on request after saving
(start it again), anything else a failure.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands import completion
from dali_train.commands.arguments import command_parser, launch_parser
from dali_train.commands.boundary import importing, run_command
from dali_train.config import Config, load_config
from dali_train.config.override import config_with, read_overrides
from dali_train.config.recipes import find_recipe, recipe_table
from dali_train.errors import ConfigError
from dali_train.runtime.launch import LaunchOptions, discover, is_first_on_host
from dali_train.runtime.orphan import exit_if_launcher_dies
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

Command = Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    if completion.is_asked():
        completion.answer(command_parser())
    argv = list(sys.argv[1:] if argv is None else argv)
    # torch.distributed.launch puts --local-rank before the command, ColossalAI's scripts put such options after it.
    launch, argv = launch_parser().parse_known_args(argv)
    words, settings = _split_settings(argv)
    options, unknown = command_parser().parse_known_args(words)
    options.launch = vars(launch)
    if getattr(options, "config", "") is None and unknown and _is_config(unknown[0]):
        options.config = unknown.pop(0)
    run = options.run if options.command == "data" else _COMMANDS[options.command]
    return run_command(f"dali-train {options.command}", lambda: run(options, [*unknown, *settings]))


def _is_config(word: str) -> bool:
    """Return whether a word without an option, as in `train photos.py`, can only mean --config."""
    return word.endswith((".py", ".json")) or find_recipe(word) is not None


def _split_settings(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off ``--section.field`` with its values, which argparse would take for RUN; return (the rest, these)."""
    words: list[str] = []
    settings: list[str] = []
    current = words
    for word in argv:
        if word.startswith("--"):
            current = settings if "." in word.partition("=")[0] else words
        current.append(word)
    return words, settings


# torch takes seconds to import, so commands that need it are imported where they run, to keep --help fast.


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    exit_if_launcher_dies()
    # c10d warns with C++ stacks when another rank is gone; the watchdog reports which one, and why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = _config(options, overrides)
    if stopped_before_restart(Path(config.run.dir)):
        return START_AGAIN
    if options.num_processes is not None:
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run

        result = run(config, num_processes=_num_processes(options.num_processes))
    else:
        stop_requests = StopRequests(config.run.max_seconds)  # before torch: a signal during its import would kill
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run_rank

        try:
            result = run_rank(config, LaunchOptions(**options.launch), stop_requests)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(stop_requests.last_words) from None
        finally:
            stop_requests.ignore_further()  # torchrun sends TERM as soon as another rank has ended
    return FINISHED if result.stopped == StopReason.NONE else START_AGAIN


def _num_processes(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--num-processes is {text}: use 1 or more, or auto for one per GPU")
    return int(text)


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    if not isinstance(options.directory, str):
        return _evaluate_run(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.checkpoint.mirror import local_run

    url = options.directory
    with local_run(url, options.checkpoint) as options.directory:
        return _evaluate_run(options, overrides, name=url)


def _evaluate_run(options: argparse.Namespace, overrides: list[str], *, name: str = "") -> int:
    if options.directory is not None and options.directory.suffix == ".py":
        raise ConfigError(
            f"{options.directory}: eval takes a run directory; for a config write --config {options.directory}"
        )
    if options.directory is not None:
        _run_own_parts(options)
        options.config = RunDirectory(options.directory).directory / "config.json"
    config = _config(options, overrides)
    chosen = read_overrides(overrides)
    named = options.directory is not None or options.checkpoint is not None
    if named and "model.weights" in chosen:
        raise ConfigError(
            "--model.weights with a run or a checkpoint, which has its own weights: leave one of them out"
        )
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.evaluate import evaluate_checkpoint, evaluate_weights

    launch = LaunchOptions(**options.launch)
    if not named and config.model.weights is not None:
        evaluate_weights(config, chosen, launch)
    else:
        evaluate_checkpoint(config, options.directory, options.checkpoint, launch, name=name)
    return FINISHED


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    directories = options.directories or [Path(_config(options, overrides).run.dir)]
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


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None and overrides and not {"-h", "--help"} & set(overrides):
        raise ConfigError(f"{' '.join(overrides)}: without --config FILE doctor takes no further arguments")
    config = _config(options, overrides) if options.config is not None or overrides else None
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.doctor import examine
        from dali_train.runtime.device import choose_device
        from dali_train.runtime.process_group import process_group

    launch = discover(LaunchOptions(**options.launch))
    device = choose_device(config.run.device if config is not None else "auto", launch)
    timeout = (config.parallel.timeout_s,) if config is not None else ()
    with process_group(launch, device, *timeout) as launch:
        return FINISHED if examine(launch, device, config) else 1


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.plan import print_plan

    _refuse_numbers(options, "num_images", "gpu_memory", "ranks_per_node", "price_per_gb", "price_per_1000_requests")
    print_plan(
        config,
        world_size=options.launch["world_size"],
        num_images=options.num_images,
        picture=options.picture,
        gpu_memory_gb=options.gpu_memory,
        ranks_per_node=options.ranks_per_node,
        price_per_gb=options.price_per_gb,
        price_per_1000_requests=options.price_per_1000_requests,
    )
    return FINISHED


def _init(options: argparse.Namespace, overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: init takes no settings; edit the file that it writes")
    from dali_train.commands.init import write_config

    _refuse_numbers(options, "gpu_memory")
    write_config(options.root, options.output, options.gpu_memory)
    return FINISHED


def _export(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    _run_own_parts(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.export import export

    export(options.run_dir, options.format, options.output, options.checkpoint, options.weights)
    return FINISHED


def _predict(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    _run_own_parts(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.predict import print_predictions

    print_predictions(
        options.run_dir,
        options.images,
        decoder=options.decoder,
        picture=options.picture,
        table=options.csv,
        checkpoint=options.checkpoint,
        weights=options.weights,
    )
    return FINISHED


def _diff(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    if len(options.run_dir) != 2:
        raise ConfigError(
            f"{' '.join(map(str, options.run_dir))}: diff compares two runs, but {len(options.run_dir)} are given"
        )
    from dali_train.commands.diff import diff

    return FINISHED if diff(*options.run_dir, steps=options.steps) else 1


def _recipes(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    titles = ("--config", "recipe", "target", "source", "measured")
    rows = [[shortened(cell, 60) for cell in row] for row in [titles, *recipe_table()]]
    print("\n".join(aligned(rows)))
    return FINISHED


def _completion(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    completion.print_script(options.shell)
    return FINISHED


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    if options.serve:
        from dali_train.report.serve import LOCALHOST, PORT, serve

        port = options.launch["port"]
        serve(options.run_dir, options.launch["host"] or LOCALHOST, PORT if port is None else port)
        return FINISHED
    from dali_train.report import write_report

    print(write_report(options.run_dir, options.output))
    return FINISHED


def _run_own_parts(options: argparse.Namespace) -> None:
    """Execute the file of --config for what it registers: models, storages and the like."""
    if options.config is None:
        return
    if Path(options.config).suffix == ".json":
        raise ConfigError(
            f"--config {options.config} with RUN, whose own settings are used: leave it out, or use the Python file "
            "that registers the run's own model"
        )
    load_config(options.config)


def _refuse_numbers(options: argparse.Namespace, *names: str) -> None:
    """Refuse options that are not positive numbers of a sensible size."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value <= 1e15:  # nan is neither
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: use a number over 0, at most 1e15")


def _refuse_settings(options: argparse.Namespace, overrides: list[str]) -> None:
    if overrides:
        raise ConfigError(
            f"{' '.join(overrides)}: {options.command} uses the run's own settings and accepts no others; "
            f"see `dali-train {options.command} --help`"
        )


def _config(options: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the config that the command line names.

    Raises:
        ConfigError: no file, a setting that does not exist, or a value that is not valid. All ranks find it; one per
            host prints it.
        SystemExit: --help, with status 0.
    """
    if options.config is None and {"-h", "--help"} & set(overrides):
        options.help()
        raise SystemExit(0)
    try:
        if options.config is None:
            raise ConfigError("--config FILE is missing; `dali-train recipes` lists those that ship")
        return config_with(options.config, overrides, f"dali-train {options.command}")
    except ConfigError as error:
        error.is_said = not is_first_on_host(options.launch["local_rank"])
        raise


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "eval": _evaluate,
    "status": _status,
    "doctor": _doctor,
    "plan": _plan,
    "init": _init,
    "export": _export,
    "predict": _predict,
    "diff": _diff,
    "recipes": _recipes,
    "completion": _completion,
    "report": _report,
}
