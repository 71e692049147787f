"""Write a config file that fits a dataset and this machine: `dali-train init`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import Commands, gigabytes, refuse_numbers, refuse_settings
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
    from dali_train.extras.init.config_file import write_config

    refuse_numbers(options, "gpu_memory", "ranks")
    if options.from_timm is not None:
        from dali_train.extras.timm.from_timm import write_translation

        if options.gpu_memory is not None:
            raise ConfigError("--gpu-memory with --from-timm, whose batch is that of the arguments: leave it out")
        write_translation(options.from_timm, options.root, options.output, options.ranks)
        return FINISHED
    if options.ranks is not None:
        raise ConfigError("--ranks needs --from-timm: the number of GPUs is known when a run starts, leave it out")
    write_config(options.root, options.output, options.gpu_memory)
    return FINISHED
