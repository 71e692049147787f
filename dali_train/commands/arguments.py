"""What the arguments of several commands share: a config with overrides, a run directory, a launcher's options."""

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dali_train.config import Config, load_config
from dali_train.config.check import Extra, close_names
from dali_train.config.command_line import config_with, is_completing, read_overrides
from dali_train.errors import ConfigError
from dali_train.runtime.launch import LaunchOptions, is_first, is_first_on_host
from dali_train.runtime.object_store import is_remote
from dali_train.text import printable

Run = Callable[[argparse.Namespace, list[str]], int]
"""A command: takes its parsed options and the words of ``--section.field VALUE``; returns the exit status."""

Commands = Any  # what argparse's add_subparsers returns, whose class is private

AUTO_MICRO_BATCH = Extra[Callable[[Config, dict[str, Any], argparse.Namespace], int]](
    "dali_train.extras.plan.auto_micro_batch:choose", "batch.micro_batch auto"
)
COMPLETED_SETTINGS = Extra[Callable[[argparse.ArgumentParser, argparse.Action], None]](
    "dali_train.extras.completion:add_settings_to_complete", "completion in a shell"
)

USERS_PARTS = "a config file that registers your own model; the settings are the run's"


class CommandParser(argparse.ArgumentParser):
    """A parser, and one for each of its commands, that knows what a mistyped choice was meant to be."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices and (close := close_names(value, action.choices)):
            raise argparse.ArgumentError(action, f"there is no {value!r}: did you mean {close[0]}?")
        super()._check_value(action, value)


def add_launch_options(parser: argparse.ArgumentParser, *, hidden: bool = False) -> None:
    group: Any = parser
    if not hidden:
        group = parser.add_argument_group(
            "ColossalAI's options, used if no launcher sets rank and world size in the environment"
        )

    def add(*names: str, text: str, kind: type) -> None:
        # No default, which would replace what stands before the command.
        group.add_argument(*names, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS if hidden else text)

    add("--local_rank", "--local-rank", kind=int, text="rank of this process on its host")
    add("--rank", kind=int, text="rank of this process")
    add("--world_size", "--world-size", kind=int, text="number of processes")
    add("--host", kind=str, text="address of rank 0")
    add("--port", kind=int, text="port of --host")


def launch_options(options: argparse.Namespace) -> LaunchOptions:
    names = ("local_rank", "rank", "world_size", "host", "port")
    return LaunchOptions(**{name: getattr(options, name, None) for name in names})


def with_config(commands: Commands, name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        allow_abbrev=False,
        add_help=False,  # with --config it lists the settings, see `config_of`
        epilog="Every setting of the config can be overridden: --section.field value. "
        f"`dali-train {name} --config FILE --help` lists them all.",
    )
    add_launch_options(command)
    command.set_defaults(run=run, parser=command)
    config = command.add_argument(
        "--config",
        metavar="FILE",
        help="a Python file that defines `config`, a recipe by name, or a run's config.json"
        + (f"; beside RUN {USERS_PARTS}" if name == "eval" else ""),
    )
    if is_completing():
        COMPLETED_SETTINGS.load()(command, config)
    return command


def config_of(options: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the config that the command line names.

    Raises:
        ConfigError: no file, a setting that does not exist, or a value that is not valid. All ranks find it; one per
            host prints it.
        SystemExit: --help, with status 0.
    """
    if options.config is None and {"-h", "--help"} & set(overrides):
        options.parser.print_help()
        raise SystemExit(0)
    own = [name.removeprefix("--") for name in own_options(options)]
    try:
        if options.config is None:
            read_overrides(overrides, own)  # --confg, if that is why
            raise ConfigError("--config FILE is missing; `dali-train recipes` lists those that ship")
        with warnings.catch_warnings(record=True) as doubts:
            config = config_with(
                options.config,
                overrides,
                f"dali-train {options.command}",
                own,
                lambda file, values: AUTO_MICRO_BATCH.load()(file, values, options),
            )
    except ConfigError as error:
        error.reported_elsewhere = not is_first_on_host(launch_options(options).local_rank)
        raise
    if is_first(launch_options(options).rank):
        for words in dict.fromkeys(str(doubt.message) for doubt in doubts):
            print(f"warning: {printable(words)}", file=sys.stderr)
    return config


def own_options(options: argparse.Namespace) -> list[str]:
    """Return the options of the command, such as --config, which are no settings."""
    actions = [action for action in options.parser._actions if action.help != argparse.SUPPRESS]
    return [option for action in actions for option in action.option_strings if option.startswith("--")]


def on_runs(
    commands: Commands, name: str, summary: str, run: Run, runs: int | str | None = None
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run, parser=command)
    kind, words = (path_or_url, "a run.dir, or the URL of a run.mirror") if runs is None else (Path, "a run.dir")
    command.add_argument("run_dir", nargs=runs, type=kind, metavar="RUN", help=words)
    return command


def gigabytes(text: str) -> float:
    """Return a number of gigabytes, which may stand with its unit: 80, 80GB, 80 GB."""
    number = re.fullmatch(r"\s*(.*?)\s*(?:g|gb)?\s*", text, re.IGNORECASE)
    try:
        return float(number[1]) if number else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of gigabytes: use one such as 80") from None


def path_or_url(text: str) -> Path | str:
    return text if is_remote(text) else Path(text)


def add_choice_of_weights(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help=USERS_PARTS)
    command.add_argument(
        "--checkpoint", metavar="best|newest|PATH", help="the checkpoint of RUN (default: best, or newest)"
    )
    command.add_argument(
        "--weights", choices=("raw", "ema"), help="trained weights or their moving average, if there is one"
    )


def load_user_extensions(options: argparse.Namespace) -> None:
    """Execute the file of --config for what it registers: models, storages and the like."""
    if options.config is None:
        return
    if Path(options.config).suffix == ".json":
        raise ConfigError(
            f"--config {options.config} with RUN, whose own settings are used: leave it out, or use the Python file "
            "that registers the run's own model"
        )
    load_config(options.config)


def refuse_settings(
    options: argparse.Namespace,
    overrides: list[str],
    reason: str = "uses the run's own settings and accepts no others",
) -> None:
    if overrides:
        close = close_names(overrides[0].partition("=")[0], own_options(options))
        remedy = f"did you mean {close[0]}?" if close else f"see `dali-train {options.command} --help`"
        raise ConfigError(f"{' '.join(overrides)}: {options.command} {reason}; {remedy}")


def refuse_numbers(options: argparse.Namespace, *names: str) -> None:
    """Refuse options that are not positive numbers of a sensible size."""
    for name in names:
        value = getattr(options, name, None)
        if value is not None and not 0 < value <= 1e15:  # nan is neither
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: use a number over 0, at most 1e15")
