"""Runs as one HTML page, live pages, and where two runs differ: `dali-train report`, `dali-train diff`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import Commands, on_runs, refuse_settings
from dali_train.errors import ConfigError
from dali_train.runtime.status import FINISHED


def add_report_command(commands: Commands) -> None:
    report = on_runs(commands, "report", "Show one or more runs as one HTML page.", _report, runs="+")
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write it (default: RUN/report, comparison/ beside several)"
    )
    report.add_argument(
        "--serve", action="store_true", help="serve live pages of all runs in the RUN folders instead of writing a file"
    )
    report.add_argument(
        "--host", default=argparse.SUPPRESS, help="--serve: the address to listen on (default: only this machine)"
    )
    report.add_argument(
        "--port", type=int, default=argparse.SUPPRESS, help="--serve: the port (default: 7007; 0: any free port)"
    )


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    if options.serve:
        from dali_train.extras.report.serve import LOCALHOST, PORT, serve

        serve(options.run_dir, getattr(options, "host", LOCALHOST), getattr(options, "port", PORT))
        return FINISHED
    for name in ("host", "port"):
        if hasattr(options, name):
            raise ConfigError(f"--{name} without --serve: leave it out, or serve the pages")
    from dali_train.extras.report.page import write_report

    print(write_report(options.run_dir, options.output))
    return FINISHED


def add_diff_command(commands: Commands) -> None:
    summary = "Show where two runs differ: settings, first sample, first logged loss. Exits with 1 if they do."
    diff = on_runs(commands, "diff", summary, _diff, runs="+")
    diff.add_argument("--steps", type=int, default=100, help="steps whose samples are compared (default: 100)")


def _diff(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    if len(options.run_dir) != 2:
        raise ConfigError(f"{' '.join(map(str, options.run_dir))}: diff compares two runs, not {len(options.run_dir)}")
    from dali_train.extras.report.diff import diff

    return FINISHED if diff(*options.run_dir, steps=options.steps) else 1
