"""The commands of this folder: their arguments, and what they do with them."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import (
    Commands,
    add_choice_of_weights,
    add_launch_options,
    config_of,
    gigabytes,
    launch_options,
    load_user_extensions,
    on_runs,
    refuse_numbers,
    refuse_settings,
    with_config,
)
from dali_train.commands.boundary import importing
from dali_train.errors import ConfigError
from dali_train.runtime.launch import discover
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import FINISHED


def _add_doctor(commands: Commands) -> None:
    summary = "Check versions, devices, network, decoding, dataset and run directory on all ranks before a long run."
    with_config(commands, "doctor", summary, _doctor)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None and overrides and not {"-h", "--help"} & set(overrides):
        raise ConfigError(f"{' '.join(overrides)}: without --config FILE doctor takes no further arguments")
    config = config_of(options, overrides) if options.config is not None or overrides else None
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.doctor import examine
        from dali_train.runtime.process import choose_device
        from dali_train.runtime.process_group import process_group

    launch = discover(launch_options(options))
    device = choose_device(config.run.device if config is not None else "auto", launch)
    timeout = (config.parallel.timeout_s,) if config is not None else ()
    with process_group(launch, device, *timeout) as launch:
        return FINISHED if examine(launch, device, config) else 1


def _add_export(commands: Commands) -> None:
    summary = "Write a run's model for other programs, and check what was written."
    export = on_runs(commands, "export", summary, _export)
    export.add_argument("--format", choices=("timm", "onnx", "torch-export"), default="timm")
    export.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: RUN/export/FORMAT)")
    add_choice_of_weights(export)


def _export(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.export import export

    export(options.run_dir, options.format, options.output, options.checkpoint, options.weights)
    return FINISHED


def _add_predict(commands: Commands) -> None:
    summary = "Classify images; without any, compare DALI's and PIL's decoding on the validation split."
    predict = on_runs(commands, "predict", summary, _predict)
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
    add_choice_of_weights(predict)


def _predict(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.predict import print_predictions

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
    diff = on_runs(commands, "diff", summary, _diff, runs="+")
    diff.add_argument("--steps", type=int, default=100, help="steps whose samples are compared (default: 100)")


def _diff(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    if len(options.run_dir) != 2:
        raise ConfigError(f"{' '.join(map(str, options.run_dir))}: diff compares two runs, not {len(options.run_dir)}")
    from dali_train.extras.diff import diff

    return FINISHED if diff(*options.run_dir, steps=options.steps) else 1


def _add_prove(commands: Commands) -> None:
    summary = "Check a run's record of samples, draws and weights against its recipe. Exits with 1 if they differ."
    prove = on_runs(commands, "prove", summary, _prove)
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
    add_launch_options(prove)


def _prove(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.proof.prove import prove
        from dali_train.extras.proof.replay import replay

    run = options.run_dir
    if options.replay is None:
        return FINISHED if prove(run, dataset=options.dataset, all_draws=options.all_draws) else 1
    if is_remote(str(run)):
        raise ConfigError(f"{run}: --replay trains from a checkpoint in a run.dir; copy the run to this machine first")
    return FINISHED if replay(run, options.replay, dataset=options.dataset, options=launch_options(options)) else 1


def _add_report(commands: Commands) -> None:
    report = on_runs(commands, "report", "Show one or more runs as one HTML page.", _report, runs="+")
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
    refuse_settings(options, overrides)
    if options.serve:
        from dali_train.extras.report.serve import LOCALHOST, PORT, serve

        serve(options.run_dir, getattr(options, "host", LOCALHOST), getattr(options, "port", PORT))
        return FINISHED
    for name in ("host", "port"):
        if hasattr(options, name):
            raise ConfigError(f"--{name} without --serve: leave it out, or serve the pages")
    from dali_train.extras.report import write_report

    print(write_report(options.run_dir, options.output))
    return FINISHED


def _add_init(commands: Commands) -> None:
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
    from dali_train.extras.init import write_config

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


COMMANDS = (_add_doctor, _add_export, _add_predict, _add_diff, _add_prove, _add_report, _add_init)
