"""Completion in bash: of commands, settings, choices and recipes.

``dali-train completion bash`` prints a script for the shell, which runs the program at each Tab with
``_ARGCOMPLETE`` in the environment; it then answers instead of running a command.
"""

import argparse
from typing import Any, Literal, get_args, get_origin

from dali_train.commands.arguments import Commands, refuse_settings
from dali_train.config.check import alternatives
from dali_train.config.config import KWARGS, SETTINGS, recipe_names
from dali_train.runtime.status import FINISHED


def add_completion_command(commands: Commands) -> None:
    summary = "Print a script for bash that completes commands, settings, choices and recipes."
    how = "In ~/.bashrc: source <(dali-train completion bash)"
    command = commands.add_parser("completion", help=summary, description=summary, epilog=how)
    command.set_defaults(run=_completion, parser=command)
    command.add_argument("shell", choices=("bash",))


def _completion(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides, "takes the name of a shell and nothing else")
    import argcomplete

    print(argcomplete.shellcode(["dali-train"], shell=options.shell))
    return FINISHED


def answer_completion(parser: argparse.ArgumentParser) -> None:
    """Print how the shell's line may go on, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options="long")


def add_settings_to_complete(command: argparse.ArgumentParser, config: argparse.Action) -> None:
    """Add the settings to the options of a command; `config` is its --config, which also takes the name of a recipe."""
    from argcomplete.completers import FilesCompleter

    files = FilesCompleter((".py", ".json"))

    def complete(prefix: str, **details: Any) -> list[str]:
        return [*recipe_names(), *files(prefix, **details)]

    config.completer = complete  # type: ignore[attr-defined]  # where argcomplete looks for it
    for name, setting in SETTINGS.items():
        kinds = list(alternatives(setting.hint))
        choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        choices += ["true", "false"] if bool in kinds else []
        choices += ["none"] if type(None) in kinds else []
        is_closed = all(kind in (bool, type(None)) or get_origin(kind) is Literal for kind in kinds)
        command.add_argument(f"--{name}", choices=choices if is_closed else None)
    for prefix in KWARGS:
        command.add_argument(f"--{prefix}")
