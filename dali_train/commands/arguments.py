"""The arguments of the command line: one parser for all commands, which cli.py runs."""

import argparse
from pathlib import Path
from typing import Any

from dali_train import __version__
from dali_train.commands import completion
from dali_train.commands.data import add_data_command
from dali_train.runtime.object_store import is_remote

_OWN_PARTS = "a config file that registers your own model; the settings are the run's"
Commands = Any  # what argparse's add_subparsers returns, whose class is private
SUMMARY = "Train image classifiers at large batch sizes, with the same samples on any number of GPUs."


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dali-train", description=SUMMARY)
    parser.add_argument("--version", action="version", version=f"dali-train {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_commands_with_config(commands)
    _add_commands_on_runs(commands)
    _add_init(commands)
    add_data_command(commands)
    return parser


def _add_commands_with_config(commands: Commands) -> None:
    """Add the commands that read a config, which ``--section.field value`` overrides."""

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            parents=[launch_parser()],
            help=summary,
            description=summary,
            allow_abbrev=False,
            add_help=False,  # with --config it lists the settings, see cli.py
            epilog="Every setting of the config can be overridden: --section.field value. "
            f"`dali-train {name} --config FILE --help` lists them all.",
        )
        command.set_defaults(help=command.print_help)
        config = command.add_argument(
            "--config",
            metavar="FILE",
            help="a Python file that defines `config`, a recipe by name, or a run's config.json"
            + (f"; beside RUN {_OWN_PARTS}" if name == "eval" else ""),
        )
        if completion.is_asked():
            completion.add_settings(command, config)
        return command

    train = add("train", "Train a model, or resume a run that was stopped.")
    train.add_argument(
        "--num-processes",
        metavar="N|auto",
        help="start N processes on this host, without a launcher; auto: one per GPU, or one without GPUs",
    )
    summary = "Evaluate a run's checkpoint, or any weights with --config FILE --model.weights FILE_OR_NAME."
    evaluate = add("eval", summary)
    evaluate.add_argument(
        "directory",
        nargs="?",
        type=_path_or_url,
        metavar="RUN",
        help="a run.dir, or the URL of a run.mirror, whose own settings are used",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="best|newest|PATH",
        help="the checkpoint of RUN (default: best, or newest if none was evaluated)",
    )
    summary = "Report the progress of a run; exits with the trainer's status, which torchrun hides."
    status = add("status", summary)
    status.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="a run directory, or several for a table (runs/*); or give --config instead",
    )
    summary = "Check versions, devices, network, decoding, dataset and run directory on all ranks before a long run."
    add("doctor", summary)
    summary = "Show what a run would do: settings, steps, learning rate, memory. Needs no GPU and reads no data."
    plan = add("plan", summary)
    plan.add_argument("--num-images", type=int, help="training images (default: data.root's, or ImageNet's 1,281,167)")
    plan.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of each rank's GPU: also report the largest micro-batch that fits",
    )
    plan.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="ranks per data.cache (default: 8)")
    plan.add_argument("--price-per-gb", type=float, metavar="X", help="price per GB read from data.root's bucket")
    plan.add_argument("--price-per-1000-requests", type=float, metavar="X", help="price of requests to that bucket")
    plan.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw learning rate and memory into this PNG file"
    )


def _add_commands_on_runs(commands: Commands) -> None:
    """Add the commands that use a run's own settings unchanged."""

    def add(name: str, summary: str, runs: int | str | None = None) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
        kind, words = (_path_or_url, "a run.dir, or the URL of a run.mirror") if runs is None else (Path, "a run.dir")
        command.add_argument("run_dir", nargs=runs, type=kind, metavar="RUN", help=words)
        return command

    export = add("export", "Write a run's model for other programs, and check what was written.")
    export.add_argument("--format", choices=("timm", "onnx", "torch-export"), default="timm")
    export.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: RUN/export/FORMAT)")
    summary = "Classify images; without any, compare DALI's and PIL's decoding on the validation split."
    predict = add("predict", summary)
    predict.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help="an image file, or a directory of them")
    predict.add_argument(
        "--decoder", choices=("dali", "pil"), default="dali", help="the library that decodes (default: dali)"
    )
    predict.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the images with their classes into this PNG file"
    )
    predict.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write a table of the images (default: of the validation split) with their top 5 classes",
    )
    for command in (export, predict):
        command.add_argument("--config", type=Path, metavar="FILE", help=_OWN_PARTS)
        command.add_argument(
            "--checkpoint", metavar="best|newest|PATH", help="the checkpoint of RUN (default: best, or newest)"
        )
        command.add_argument(
            "--weights", choices=("raw", "ema"), help="trained weights or their moving average, if there is one"
        )
    summary = "Show where two runs differ: settings, first sample, first logged loss. Exits with 1 if they do."
    diff = add("diff", summary, runs="+")
    diff.add_argument("--steps", type=int, default=100, help="steps whose samples are compared (default: 100)")
    report = add("report", "Show one or more runs as one HTML page.", runs="+")
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write it (default: RUN/report, comparison/ beside several)"
    )
    report.add_argument(
        "--serve",
        action="store_true",
        help="serve live pages of all runs in the RUN folders instead of writing a file",
    )
    # The values are parsed by `launch_parser`, which has the same options.
    report.add_argument("--host", help="--serve: the address to listen on (default: only this machine)")
    report.add_argument("--port", help="--serve: the port (default: 7007; 0: any free port)")


def _path_or_url(text: str) -> Path | str:
    return text if is_remote(text) else Path(text)


def _add_init(commands: Commands) -> None:
    summary = "List the recipes that ship, for --config NAME: source, target and what was measured."
    commands.add_parser("recipes", help=summary, description=summary)
    summary = "Print a script for your shell that completes commands, settings, choices and recipes."
    how = "bash, in ~/.bashrc: source <(dali-train completion bash). zsh: dali-train completion zsh >DIR/_dali-train, "
    how += "with DIR in $fpath. fish: dali-train completion fish >~/.config/fish/completions/dali-train.fish"
    completing = commands.add_parser("completion", help=summary, description=summary, epilog=how)
    completing.add_argument("shell", choices=completion.SHELLS)
    summary = "Write a config file that fits a dataset: sizes, network, batch."
    init = commands.add_parser("init", help=summary, description=summary)
    init.add_argument("root", metavar="DATASET", help="a dataset's directory, as `dali-train data convert` makes it")
    init.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: DATASET's name, .py)")
    init.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="memory of the GPU to train on (default: this machine's)"
    )


def launch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dali-train", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group(
        "ColossalAI's options, used if no launcher sets rank and world size in the environment"
    )
    group.add_argument("--local_rank", "--local-rank", type=int, help="rank of this process on its host")
    group.add_argument("--rank", type=int, help="rank of this process")
    group.add_argument("--world_size", "--world-size", type=int, help="number of processes")
    group.add_argument("--host", help="address of rank 0")
    group.add_argument("--port", type=int, help="port of --host")
    return parser
