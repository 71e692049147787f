"""The command line: each command's arguments, and what it does with them through the modules of dali_train/commands.

Exit status: 0 finished, 2 a mistake in the command, the config or the dataset, 75 stopped on request after saving
(start it again), 76 a device computes wrongly (start it elsewhere), anything else a failure.

Every word is read once: ``--section.field VALUE`` by config/command_line.py, the others by argparse. torch takes
seconds to import, so commands that need it are imported where they run, to keep --help fast.
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from dali_train import __version__
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands.boundary import importing, run_command
from dali_train.commands.data import add_data_command
from dali_train.config import Config, load_config
from dali_train.config.command_line import (
    SHELLS,
    add_settings_to_complete,
    answer_completion,
    config_with,
    is_completing,
    print_completion_script,
    read_overrides,
)
from dali_train.config.config import find_recipe, recipe_table
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.launch import LaunchOptions, discover, exit_if_launcher_dies, is_first_on_host
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import (
    FINISHED,
    START_AGAIN,
    describe,
    describe_all,
    exit_status,
    read_status,
    stopped_before_restart,
)
from dali_train.runtime.stop import StopReason, StopRequests
from dali_train.text import aligned, printable, shortened

Run = Callable[[argparse.Namespace, list[str]], int]
"""A command: takes its parsed options and the words of ``--section.field VALUE``; returns the exit status."""

Commands = Any  # what argparse's add_subparsers returns, whose class is private


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = command_parser()
    if is_completing():
        answer_completion(parser)
    words, settings = _split_settings(list(sys.argv[1:] if argv is None else argv))
    options, unknown = parser.parse_known_args(words)
    if getattr(options, "config", "") is None and unknown and _is_config(unknown[0]):
        options.config = unknown.pop(0)
    return run_command(f"dali-train {options.command}", lambda: options.run(options, [*unknown, *settings]))


def _split_settings(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off ``--section.field`` with its values, which argparse would take for RUN; return (the rest, these)."""
    words: list[str] = []
    settings: list[str] = []
    current = words
    for word in argv:
        if word.startswith("--"):  # with a space it is a value: the arguments of --from-timm
            name = word.partition("=")[0]
            current = settings if "." in name and " " not in name else words
        current.append(word)
    return words, settings


def _is_config(word: str) -> bool:
    """Return whether a word without an option, as in `train photos.py`, can only mean --config."""
    return word.endswith((".py", ".json")) or find_recipe(word) is not None


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dali-train",
        description="Train image classifiers at large batch sizes, with the same samples on any number of GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dali-train {__version__}")
    _add_launch_options(parser, hidden=True)  # torch.distributed.launch puts --local-rank before the command
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        *(_add_train, _add_evaluate, _add_status, _add_doctor, _add_plan, _add_export, _add_predict, _add_diff),
        *(_add_prove, _add_report, _add_recipes, _add_completion, _add_init, add_data_command),
    ):
        add(commands)
    return parser


def _add_launch_options(parser: argparse.ArgumentParser, *, hidden: bool = False) -> None:
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


def _launch_options(options: argparse.Namespace) -> LaunchOptions:
    names = ("local_rank", "rank", "world_size", "host", "port")
    return LaunchOptions(**{name: getattr(options, name, None) for name in names})


# ----------------------------------------------------------------------------------------------------------------------
# Commands that read a config, which --section.field VALUE overrides
# ----------------------------------------------------------------------------------------------------------------------

_USERS_PARTS = "a config file that registers your own model; the settings are the run's"


def _with_config(commands: Commands, name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        allow_abbrev=False,
        add_help=False,  # with --config it lists the settings, see `_config`
        epilog="Every setting of the config can be overridden: --section.field value. "
        f"`dali-train {name} --config FILE --help` lists them all.",
    )
    _add_launch_options(command)
    command.set_defaults(run=run, parser=command)
    config = command.add_argument(
        "--config",
        metavar="FILE",
        help="a Python file that defines `config`, a recipe by name, or a run's config.json"
        + (f"; beside RUN {_USERS_PARTS}" if name == "eval" else ""),
    )
    if is_completing():
        add_settings_to_complete(command, config)
    return command


def _config(options: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the config that the command line names.

    Raises:
        ConfigError: no file, a setting that does not exist, or a value that is not valid. All ranks find it; one per
            host prints it.
        SystemExit: --help, with status 0.
    """
    if options.config is None and {"-h", "--help"} & set(overrides):
        options.parser.print_help()
        raise SystemExit(0)
    own_options = [name.removeprefix("--") for name in _own_options(options)]
    try:
        if options.config is None:
            read_overrides(overrides, own_options)  # --confg, if that is why
            raise ConfigError("--config FILE is missing; `dali-train recipes` lists those that ship")
        return config_with(options.config, overrides, f"dali-train {options.command}", own_options)
    except ConfigError as error:
        error.reported_elsewhere = not is_first_on_host(_launch_options(options).local_rank)
        raise


def _own_options(options: argparse.Namespace) -> list[str]:
    """Return the options of the command, such as --config, which are no settings."""
    return re.findall(r"--[\w-]+", options.parser.format_usage())


def _add_train(commands: Commands) -> None:
    train = _with_config(commands, "train", "Train a model, or resume a run that was stopped.", _train)
    train.add_argument(
        "--num-processes",
        metavar="N|auto",
        help="start N processes on this host, without a launcher; auto: one per GPU, or the fastest number for a CPU",
    )


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    exit_if_launcher_dies()
    # c10d warns with C++ stacks when another rank is gone; the watchdog reports which one, and why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = _config(options, overrides)
    if stopped_before_restart(Path(config.run.dir)):
        return START_AGAIN
    if not is_remote(config.data.root) and config.data.local_copy is None:
        from dali_train.data.dataset.storage import storage_of

        try:  # before torch is imported, which takes seconds
            storage_of(config.data)
            Manifest.read(config.data.root)
        except (ConfigError, DatasetError) as error:
            error.reported_elsewhere = not is_first_on_host(_launch_options(options).local_rank)
            raise
    if options.num_processes is not None:
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run

        result = run(config, num_processes=_num_processes(options.num_processes))
    else:
        stop_requests = StopRequests(config.run.max_seconds)  # before torch: a signal during its import would kill
        with importing(f"dali-train {options.command}"):
            from dali_train.commands.train import run_rank

        try:
            result = run_rank(config, _launch_options(options), stop_requests)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(stop_requests.last_words) from None
        finally:
            stop_requests.ignore_further()  # torchrun sends TERM as soon as another rank has ended
    return FINISHED if result.stopped == StopReason.NONE else START_AGAIN


def _num_processes(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--num-processes is {text}: use 1 or more, or auto")
    return int(text)


def _add_evaluate(commands: Commands) -> None:
    summary = "Evaluate a run's checkpoint, or any weights with --config FILE --model.weights FILE_OR_NAME."
    evaluate = _with_config(commands, "eval", summary, _evaluate)
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


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    if not isinstance(options.directory, str):
        return _evaluate_run(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.checkpoint.mirror import local_run

    url = options.directory
    with local_run(url, options.checkpoint) as options.directory:
        return _evaluate_run(options, overrides, name=url)


def _evaluate_run(options: argparse.Namespace, overrides: list[str], *, name: str = "") -> int:
    if options.directory is not None and options.directory.suffix == ".py":
        raise ConfigError(
            f"{options.directory}: eval takes a run directory; for a config write --config {options.directory}"
        )
    if options.directory is not None:
        _load_user_extensions(options)
        options.config = RunDirectory(options.directory).directory / "config.json"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*hooks.user")  # which observe training alone
        config = _config(options, overrides)
    chosen = read_overrides(overrides)
    named = options.directory is not None or options.checkpoint is not None
    if named and "model.weights" in chosen:
        raise ConfigError(
            "--model.weights with a run or a checkpoint, which has its own weights: leave one of them out"
        )
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.evaluate import evaluate_checkpoint, evaluate_weights

    launch = _launch_options(options)
    if not named and config.model.weights is not None:
        evaluate_weights(config, chosen, launch)
    else:
        evaluate_checkpoint(config, options.directory, options.checkpoint, launch, name=name)
    return FINISHED


def _add_status(commands: Commands) -> None:
    summary = "Report the progress of a run; exits with the trainer's status, which torchrun hides."
    status = _with_config(commands, "status", summary, _status)
    status.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="a run directory, or several for a table (runs/*); or give --config instead",
    )


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    if not options.directories and options.config is None and not overrides:
        raise ConfigError("no run is named: `dali-train status RUN`, or --config FILE for its run.dir")
    directories = options.directories or [Path(_config(options, overrides).run.dir)]
    for directory in options.directories:
        if not directory.exists() or (directory.is_file() and len(directories) == 1):
            reason = "a file" if directory.exists() else "no such directory"
            raise ConfigError(f"{directory}: {reason}; use a run directory")
    # A pattern such as runs/* also matches files, and other folders such as a comparison's.
    directories = [path for path in directories if not path.is_file()] or directories
    signs = ("config.json", "status.json", "run.lock")
    runs = [path for path in directories if any((path / sign).exists() for sign in signs)]
    if len(runs) > 1:
        lines, status = describe_all(runs)
        print("\n".join(lines))
        return status
    (directory,) = runs or directories[:1]
    print(printable(describe(directory)))
    return exit_status(read_status(directory))


def _add_doctor(commands: Commands) -> None:
    summary = "Check versions, devices, network, decoding, dataset and run directory on all ranks before a long run."
    _with_config(commands, "doctor", summary, _doctor)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None and overrides and not {"-h", "--help"} & set(overrides):
        raise ConfigError(f"{' '.join(overrides)}: without --config FILE doctor takes no further arguments")
    config = _config(options, overrides) if options.config is not None or overrides else None
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.doctor import examine
        from dali_train.runtime.process import choose_device
        from dali_train.runtime.process_group import process_group

    launch = discover(_launch_options(options))
    device = choose_device(config.run.device if config is not None else "auto", launch)
    timeout = (config.parallel.timeout_s,) if config is not None else ()
    with process_group(launch, device, *timeout) as launch:
        return FINISHED if examine(launch, device, config) else 1


def _add_plan(commands: Commands) -> None:
    summary = "Show what a run would do: settings, steps, learning rate, memory. Needs no GPU and reads no data."
    plan = _with_config(commands, "plan", summary, _plan)
    plan.add_argument("--num-images", type=int, help="training images (default: data.root's, or ImageNet's 1,281,167)")
    plan.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of each rank's GPU: also report the largest micro-batch that fits",
    )
    plan.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw learning rate and memory into this PNG file"
    )


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.plan import print_plan

    _refuse_numbers(options, "world_size", "num_images", "gpu_memory")
    print_plan(
        config,
        world_size=_launch_options(options).world_size,
        num_images=options.num_images,
        picture=options.picture,
        gpu_memory_gb=options.gpu_memory,
    )
    return FINISHED


# ----------------------------------------------------------------------------------------------------------------------
# Commands that use a run's own settings
# ----------------------------------------------------------------------------------------------------------------------


def _on_runs(
    commands: Commands, name: str, summary: str, run: Run, runs: int | str | None = None
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run, parser=command)
    kind, words = (_path_or_url, "a run.dir, or the URL of a run.mirror") if runs is None else (Path, "a run.dir")
    command.add_argument("run_dir", nargs=runs, type=kind, metavar="RUN", help=words)
    return command


def _path_or_url(text: str) -> Path | str:
    return text if is_remote(text) else Path(text)


def _add_choice_of_weights(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help=_USERS_PARTS)
    command.add_argument(
        "--checkpoint", metavar="best|newest|PATH", help="the checkpoint of RUN (default: best, or newest)"
    )
    command.add_argument(
        "--weights", choices=("raw", "ema"), help="trained weights or their moving average, if there is one"
    )


def _load_user_extensions(options: argparse.Namespace) -> None:
    """Execute the file of --config for what it registers: models, storages and the like."""
    if options.config is None:
        return
    if Path(options.config).suffix == ".json":
        raise ConfigError(
            f"--config {options.config} with RUN, whose own settings are used: leave it out, or use the Python file "
            "that registers the run's own model"
        )
    load_config(options.config)


def _refuse_settings(
    options: argparse.Namespace,
    overrides: list[str],
    reason: str = "uses the run's own settings and accepts no others",
) -> None:
    if overrides:
        close = get_close_matches(overrides[0].partition("=")[0], _own_options(options), n=1)
        remedy = f"did you mean {close[0]}?" if close else f"see `dali-train {options.command} --help`"
        raise ConfigError(f"{' '.join(overrides)}: {options.command} {reason}; {remedy}")


def _add_export(commands: Commands) -> None:
    summary = "Write a run's model for other programs, and check what was written."
    export = _on_runs(commands, "export", summary, _export)
    export.add_argument("--format", choices=("timm", "onnx", "torch-export"), default="timm")
    export.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: RUN/export/FORMAT)")
    _add_choice_of_weights(export)


def _export(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    _load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.export import export

    export(options.run_dir, options.format, options.output, options.checkpoint, options.weights)
    return FINISHED


def _add_predict(commands: Commands) -> None:
    summary = "Classify images; without any, compare DALI's and PIL's decoding on the validation split."
    predict = _on_runs(commands, "predict", summary, _predict)
    predict.add_argument(
        "images", nargs="*", default=[], type=Path, metavar="IMAGE", help="an image file, or a directory of them"
    )
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
    _add_choice_of_weights(predict)


def _predict(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    _load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.predict import print_predictions

    print_predictions(
        options.run_dir,
        options.images,
        decoder=options.decoder,
        picture=options.picture,
        table=options.csv,
        checkpoint=options.checkpoint,
        weights=options.weights,
    )
    return FINISHED


def _add_diff(commands: Commands) -> None:
    summary = "Show where two runs differ: settings, first sample, first logged loss. Exits with 1 if they do."
    diff = _on_runs(commands, "diff", summary, _diff, runs="+")
    diff.add_argument("--steps", type=int, default=100, help="steps whose samples are compared (default: 100)")


def _diff(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    if len(options.run_dir) != 2:
        raise ConfigError(f"{' '.join(map(str, options.run_dir))}: diff compares two runs, not {len(options.run_dir)}")
    from dali_train.commands.diff import diff

    return FINISHED if diff(*options.run_dir, steps=options.steps) else 1


def _add_prove(commands: Commands) -> None:
    summary = "Check a run's record of samples, draws and weights against its recipe. Exits with 1 if they differ."
    prove = _on_runs(commands, "prove", summary, _prove)
    prove.add_argument(
        "--dataset", metavar="DIR", help="the dataset, of which only dataset.json and the index are read"
    )
    prove.add_argument("--all-draws", action="store_true", help="check the draws of all steps, not of a part of them")
    prove.add_argument(
        "--replay",
        type=int,
        metavar="STEP",
        help="instead, train this step again (counted from 1) from the checkpoint before it and compare; to get the "
        "same bits, start as many processes as the run had",
    )
    _add_launch_options(prove)


def _prove(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.commands.prove import prove
        from dali_train.commands.replay import replay

    run = options.run_dir
    if options.replay is None:
        return FINISHED if prove(run, dataset=options.dataset, all_draws=options.all_draws) else 1
    if is_remote(str(run)):
        raise ConfigError(f"{run}: --replay trains from a checkpoint in a run.dir; copy the run to this machine first")
    return FINISHED if replay(run, options.replay, dataset=options.dataset, options=_launch_options(options)) else 1


def _add_report(commands: Commands) -> None:
    report = _on_runs(commands, "report", "Show one or more runs as one HTML page.", _report, runs="+")
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write it (default: RUN/report, comparison/ beside several)"
    )
    report.add_argument(
        "--serve",
        action="store_true",
        help="serve live pages of all runs in the RUN folders instead of writing a file",
    )
    report.add_argument(
        "--host", default=argparse.SUPPRESS, help="--serve: the address to listen on (default: only this machine)"
    )
    report.add_argument(
        "--port", type=int, default=argparse.SUPPRESS, help="--serve: the port (default: 7007; 0: any free port)"
    )


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides)
    if options.serve:
        from dali_train.report.serve import LOCALHOST, PORT, serve

        serve(options.run_dir, getattr(options, "host", LOCALHOST), getattr(options, "port", PORT))
        return FINISHED
    for name in ("host", "port"):
        if hasattr(options, name):
            raise ConfigError(f"--{name} without --serve: leave it out, or serve the pages")
    from dali_train.report import write_report

    print(write_report(options.run_dir, options.output))
    return FINISHED


# ----------------------------------------------------------------------------------------------------------------------
# Commands without a run
# ----------------------------------------------------------------------------------------------------------------------


def _add_recipes(commands: Commands) -> None:
    summary = "List the recipes that ship, for --config NAME: source, target and what was measured."
    recipes = commands.add_parser("recipes", help=summary, description=summary)
    recipes.set_defaults(run=_recipes, parser=recipes)


def _recipes(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides, "takes no arguments")
    titles = ("--config", "recipe", "target", "source", "measured")
    rows = [[shortened(cell, 60) for cell in row] for row in [titles, *recipe_table()]]
    print("\n".join(aligned(rows)))
    return FINISHED


def _add_completion(commands: Commands) -> None:
    summary = "Print a script for your shell that completes commands, settings, choices and recipes."
    how = "bash, in ~/.bashrc: source <(dali-train completion bash). zsh: dali-train completion zsh >DIR/_dali-train, "
    how += "with DIR in $fpath. fish: dali-train completion fish >~/.config/fish/completions/dali-train.fish"
    command = commands.add_parser("completion", help=summary, description=summary, epilog=how)
    command.set_defaults(run=_completion, parser=command)
    command.add_argument("shell", choices=SHELLS)


def _completion(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_settings(options, overrides, "takes the name of a shell and nothing else")
    print_completion_script(options.shell)
    return FINISHED


def _add_init(commands: Commands) -> None:
    summary = "Write a config file that fits a dataset and this machine: sizes, network, batch, epochs."
    init = commands.add_parser("init", help=summary, description=summary)
    init.set_defaults(run=_init, parser=init)
    text = "directory or URL of a dataset: what `dali-train data convert` wrote, or an index of `dali-train data index`"
    init.add_argument("root", metavar="DATASET", help=text)
    init.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: DATASET's name, .py)")
    init.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="memory of the GPU to train on (default: this machine's)"
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
    _refuse_settings(options, overrides, "takes no settings, which stand in the file that it writes")
    from dali_train.commands.init import write_config

    _refuse_numbers(options, "gpu_memory", "ranks")
    if options.from_timm is not None:
        from dali_train.commands.from_timm import write_translation

        if options.gpu_memory is not None:
            raise ConfigError("--gpu-memory with --from-timm, whose batch is that of the arguments: leave it out")
        write_translation(options.from_timm, options.root, options.output, options.ranks)
        return FINISHED
    if options.ranks is not None:
        raise ConfigError("--ranks needs --from-timm: the number of GPUs is known when a run starts, leave it out")
    write_config(options.root, options.output, options.gpu_memory)
    return FINISHED


def _refuse_numbers(options: argparse.Namespace, *names: str) -> None:
    """Refuse options that are not positive numbers of a sensible size."""
    for name in names:
        value = getattr(options, name, None)
        if value is not None and not 0 < value <= 1e15:  # nan is neither
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: use a number over 0, at most 1e15")
