"""Write a config file that fits a dataset and this machine: `dali-train init`."""

import argparse
import re
import time
from pathlib import Path

from dali_train.commands.arguments import Commands, gigabytes, refuse_numbers, refuse_settings
from dali_train.commands.boundary import importing
from dali_train.errors import ConfigError
from dali_train.runtime.status import FINISHED


def add_init_command(commands: Commands) -> None:
    summary = "Write a config file that fits a dataset and this machine: sizes, network, batch, epochs."
    init = commands.add_parser("init", help=summary, description=summary)
    init.set_defaults(run=_init, parser=init)
    text = "directory or URL of a dataset: what `dali-train data convert` wrote, or an index of `dali-train data index`"
    init.add_argument("root", metavar="DATASET", help=text)
    init.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: DATASET's name, .py)")
    init.add_argument(
        "--gpu-memory", type=gigabytes, metavar="GB", help="memory of the GPU to train on (default: this machine's)"
    )
    add_network_options(init)
    init.add_argument("--run-dir", metavar="DIR", help="the run.dir of the config (default: runs/NAME of the file)")
    init.add_argument(
        "--num-processes", type=int, metavar="N", help="with --for: the processes that will train (default: 1)"
    )
    init.add_argument(
        "--from-timm",
        metavar="ARGS",
        help="translate arguments of timm's train.py: an args.yaml, or the command line in quotes (docs/from-timm.md)",
    )
    init.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="with --from-timm: the GPUs that the arguments are for (default: what a launcher on the command line "
        "starts, or 1)",
    )


def _init(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides, "takes no settings, which stand in the file that it writes")
    begin = time.perf_counter()  # the imports that follow take as long in the commands that train and export
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.init.config_file import write_config

    refuse_numbers(options, "gpu_memory", "ranks", "epochs", "seconds", "num_processes")
    if options.from_timm is not None:
        from dali_train.extras.timm.from_timm import write_translation

        for name in ("gpu_memory", "model", "weights", "epochs", "seconds"):
            if getattr(options, name) is not None:
                option = {"gpu_memory": "--gpu-memory", "seconds": "--for"}.get(name, f"--{name}")
                raise ConfigError(f"{option} with --from-timm, whose arguments decide: leave it out")
        write_translation(options.from_timm, options.root, options.output, options.ranks)
        return FINISHED
    if options.ranks is not None:
        raise ConfigError("--ranks needs --from-timm: the number of GPUs is known when a run starts, leave it out")
    if options.gpu_memory is not None and options.seconds is not None:
        raise ConfigError(
            "--for with --gpu-memory, which is of another machine, while the time is measured on this one: leave "
            "--gpu-memory out"
        )
    write_config(
        options.root,
        options.output,
        gpu_memory_gb=options.gpu_memory,
        model=options.model,
        weights=options.weights,
        epochs=options.epochs,
        seconds=options.seconds,
        begin=begin,
        run_dir=options.run_dir,
        num_processes=options.num_processes,
    )
    return FINISHED


def add_network_options(command: argparse.ArgumentParser) -> None:
    """Add the options that choose the network, its weights and the length of the run; `fit` has them too."""
    command.add_argument(
        "--model", metavar="NAME", help="a timm model (default: by the weights, the images and the machine)"
    )
    command.add_argument(
        "--weights",
        metavar="FILE|RUN|NAME",
        help="pretrained weights: a file, a run directory, or a timm name such as resnet18.a1_in1k, which is fetched",
    )
    length = command.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=int, metavar="N", help="the length of the run (default: by the images and the machine)"
    )
    length.add_argument(
        "--for",
        dest="seconds",
        type=_seconds,
        metavar="TIME",
        help="how long this machine may take until the network is trained and exported, such as 30m or 1h30m: some "
        "steps are tried, and the epochs chosen so that the schedule ends in time",
    )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", "").lower())
    if match is None or not any(match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r}: use hours, minutes and seconds, such as 30m, 1h30m or 90s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(3600 * hours + 60 * minutes + seconds)
