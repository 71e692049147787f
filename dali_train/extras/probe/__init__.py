"""Fit a linear classifier to a pretrained network's features: `dali-train probe`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import Commands, config_of, with_config
from dali_train.commands.boundary import importing
from dali_train.runtime.status import FINISHED

REPORT = "probe.json"  # in the directory that it writes: the accuracy


def add_probe_command(commands: Commands) -> None:
    summary = "Fit a linear classifier to the features of model.weights, in one pass, and print its accuracy."
    probe = with_config(commands, "probe", summary, _probe)
    text = "write the network with this classifier here, as `export` does: its model.safetensors is for model.weights"
    probe.add_argument("--output", type=Path, metavar="DIR", help=text)


def _probe(options: argparse.Namespace, overrides: list[str]) -> int:
    config = config_of(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.probe.classifier import probe

    print(probe(config, options.output), flush=True)
    return FINISHED
