"""The commands: train, eval, plan, status, doctor.

Exit status: 0 finished, 2 a mistake in the command, the config or the dataset, 75 stopped on request after saving (start
it again), anything else a failure.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from dali_train.config import (
    BatchConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    load_config,
)
from dali_train.data.manifest import DatasetError
from dali_train.status import (
    FINISHED,
    MISTAKE,
    START_AGAIN,
    RunError,
    exit_status,
    newest_step,
    read_status,
    stopped_before_restart,
)
from dali_train.stop import StopReason, StopRequests


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # torch.distributed.launch puts --local-rank before the command, the predecessor's scripts put such options behind it.
    launch, argv = _launch_parser().parse_known_args(argv)
    options, overrides = _parser().parse_known_args(argv)
    options.launch = vars(launch)
    try:
        return int(options.run(options, overrides))
    except (ConfigError, DatasetError) as error:
        print(f"dali-train {options.command}: {error}", file=sys.stderr)
        return MISTAKE
    except RunError as error:
        print(f"dali-train {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dali-train", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, parents=[_launch_parser()], help=summary, description=summary, allow_abbrev=False, add_help=False,
            epilog="Every setting of the config can be overridden: --section.field value. "
            f"`dali-train {name} --config FILE --help` lists them all.",
        )  # fmt: skip
        command.set_defaults(run=run, help=command.print_help)
        command.add_argument("--config", metavar="FILE", help="a Python file that defines `config`; recipes are in configs/")
        return command

    add("train", _train, "Train a model, or go on with a run that was stopped.")
    evaluate = add("eval", _evaluate, "Evaluate a checkpoint on the validation split.")
    evaluate.add_argument("--checkpoint", metavar="PATH", required=True, help="a checkpoint directory, RUN/checkpoints/step-...")

    add("status", _status, "Say how far a run is; ends with the exit status that its trainer had, which torchrun does not hand on.")

    add("doctor", _doctor, "Check versions, devices, network, decoding, dataset and run directory on all ranks before a long run.")

    plan = add(
        "plan", _plan, "Show what a run would do: steps, accumulation, learning rate, memory. Needs no GPU and reads no data."
    )
    plan.add_argument("--num-images", type=int, help="training images (default: data.root's, or ImageNet's 1,281,167)")
    plan.add_argument("--picture", type=Path, metavar="FILE", help="draw learning rate and memory into this PNG file, too")

    report = commands.add_parser(
        "report", help="Draw runs into one HTML page.", description="Draw runs into one HTML page, several runs over one another."
    )
    report.set_defaults(run=_report)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run.dir")
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write the page and PNGs (default: report/ in the first RUN)"
    )
    return parser


def _launch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dali-train", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("the predecessor's options, for where no launcher tells")
    group.add_argument("--local_rank", "--local-rank", type=int, help="this process's number on its host")
    group.add_argument("--rank", type=int, help="this process's number")
    group.add_argument("--world_size", "--world-size", type=int, help="number of processes")
    group.add_argument("--host", help="where rank 0 listens")
    group.add_argument("--port", type=int, help="port of --host")
    return parser


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides)
    if stopped_before_restart(Path(config.run.dir)):
        return START_AGAIN
    stop_requests = StopRequests(config.run.max_seconds)
    # Imported here, not above: torch takes seconds, and --help should not.
    from dali_train.launch import LaunchOptions, choose_device, discover, process_group
    from dali_train.train import train

    launch = discover(LaunchOptions(**options.launch))
    with process_group(launch, config, choose_device(config.run, launch)) as launch:
        stopped = train(config, launch, sys.argv, stop_requests)
        stop_requests.ignore_further()
    if stopped == StopReason.NONE:
        return FINISHED
    if launch.rank == 0:
        print(f"stopped after saving: {stopped.describe()}. Start me again to go on", file=sys.stderr)
    return START_AGAIN


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides)
    from dali_train import checkpoint
    from dali_train.data.index import Split
    from dali_train.evaluate import Evaluator
    from dali_train.launch import LaunchOptions, choose_device, discover, process_group
    from dali_train.model import build_model
    from dali_train.precision import Precision
    from dali_train.train import configure_torch

    launch = discover(LaunchOptions(**options.launch))
    device = choose_device(config.run, launch)
    with process_group(launch, config, device):
        num_threads = configure_torch(config, launch, device)
        split = Split(config.data.root, "validation")
        loaded = checkpoint.load(Path(options.checkpoint))
        model = build_model(config, split.num_classes, device)
        model.load_state_dict(loaded.state["model"])
        evaluator = Evaluator(split, config, device, dp_rank=launch.rank, dp_size=launch.world_size, num_threads=num_threads)
        result = evaluator.run(model, Precision(config.precision, device).autocast())
    if launch.rank == 0:
        accuracy = f"top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}"
        print(f"step {loaded.step}: {accuracy}  ({result.num_images} images)")
    return 0


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    directory = Path(_config(options, overrides).run.dir)
    status = read_status(directory)
    reason = f" ({status.reason})" if status is not None and status.reason else ""
    print(
        f"{directory}: {status.state if status is not None else 'not started'}{reason}, newest checkpoint {newest_step(directory)}"
    )
    return exit_status(status)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides) if options.config is not None else None
    from dali_train.doctor import examine
    from dali_train.launch import LaunchOptions, choose_device, discover, process_group

    launch = discover(LaunchOptions(**options.launch))
    settings = config or Config(  # only for meeting the other ranks
        data=DataConfig(root=""), model=ModelConfig(name=""), optimizer=OptimizerConfig(lr=1), run=RunConfig(dir="", epochs=1),
        schedule=ScheduleConfig(warmup_epochs=0), batch=BatchConfig(global_batch=1, micro_batch=1),
    )  # fmt: skip
    device = choose_device(settings.run, launch)
    with process_group(launch, settings, device) as launch:
        return 0 if examine(launch, device, config) else 1


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides)
    from dali_train.plan import print_plan

    print_plan(config, world_size=options.launch["world_size"] or 1, num_images=options.num_images, picture=options.picture)
    return 0


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    from dali_train.report import write_report

    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: report knows only --output; `dali-train report --help` explains")
    print(write_report(options.runs, options.output or options.runs[0] / "report"))
    return 0


def _config(options: argparse.Namespace, overrides: list[str]) -> Config:
    """The config that the command line names.

    Raises:
        ConfigError: no file, or a value that does not fit.
        SystemExit: a setting that does not exist (status 2), or --help (status 0).
    """
    if options.config is None:
        if {"-h", "--help"} & set(overrides):
            options.help()
            raise SystemExit(0)
        raise ConfigError("--config FILE is missing; the recipes are in configs/")
    return config_with(options.config, overrides, f"dali-train {options.command}")


def config_with(path: Path | str, overrides: list[str], command: str) -> Config:
    """The config of a file with the changes of a `command`'s line, ``--section.field value``.

    Raises:
        ConfigError: no such file, or a value that does not fit.
        SystemExit: a setting that does not exist (status 2), or --help (status 0).
    """
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_boolean)
    with registry:
        return tyro.cli(
            Config,
            prog=f"{command} --config {path}",
            default=load_config(path),
            args=overrides,
            config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        )


def _boolean(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
    """Booleans as ``true`` and ``false`` in any case; tyro itself knows only Python's spelling."""
    if type_info.type is not bool:
        return None

    def parse(words: list[str]) -> bool:
        if words[0].lower() not in ("true", "false"):
            raise ValueError(f"{words[0]!r} is neither true nor false")
        return words[0].lower() == "true"

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )
