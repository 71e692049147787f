"""Write a run's model for other programs: `dali-train export`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import (
    Commands,
    add_choice_of_weights,
    load_user_extensions,
    on_runs,
    refuse_settings,
)
from dali_train.commands.boundary import importing
from dali_train.runtime.status import FINISHED


def add_export_command(commands: Commands) -> None:
    summary = "Write a run's model for other programs, and check what was written."
    export = on_runs(commands, "export", summary, _export)
    export.add_argument("--format", choices=("timm", "onnx", "torch-export"), default="timm")
    export.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: RUN/export/FORMAT)")
    add_choice_of_weights(export)


def _export(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.export.write import export

    export(options.run_dir, options.format, options.output, options.checkpoint, options.weights)
    return FINISHED
