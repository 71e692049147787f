"""Examine this machine and cluster before a run: `dali-train doctor`."""

import argparse
from dataclasses import replace

from dali_train.commands.arguments import Commands, config_of, launch_options, with_config
from dali_train.commands.boundary import importing
from dali_train.errors import ConfigError
from dali_train.runtime.launch import discover
from dali_train.runtime.status import FINISHED


def add_doctor_command(commands: Commands) -> None:
    summary = "Check versions, devices, network, decoding, dataset and run directory on all ranks before a long run."
    with_config(commands, "doctor", summary, _doctor)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None and overrides and not {"-h", "--help"} & set(overrides):
        raise ConfigError(f"{' '.join(overrides)}: without --config FILE doctor takes no further arguments")
    config = config_of(options, overrides) if options.config is not None or overrides else None
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.doctor.examine import examine
        from dali_train.runtime.process import choose_device
        from dali_train.runtime.process_group import process_group

    launch = discover(launch_options(options))
    device = choose_device(config.run.device if config is not None else "auto", launch)
    if config is not None:
        launch = replace(launch, timeout_s=config.parallel.timeout_s)
    with process_group(launch, device) as launch:
        return FINISHED if examine(launch, device, config) else 1
