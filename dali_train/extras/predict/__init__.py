"""Classify images with a run's model: `dali-train predict`."""

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
from dali_train.errors import ConfigError
from dali_train.runtime.status import FINISHED


def add_predict_command(commands: Commands) -> None:
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
    predict.add_argument(
        "--mistakes",
        type=Path,
        metavar="FILE",
        help="print the accuracy by class on the validation split, and draw its five worst mistakes into this PNG "
        "file; with several labels an image, the average precision and the largest errors of a class's probability",
    )
    add_choice_of_weights(predict)


def _predict(options: argparse.Namespace, overrides: list[str]) -> int:
    if not any(word.startswith("-") for word in overrides):
        options.images += map(Path, overrides)  # argparse takes none behind an option that follows RUN
    else:
        refuse_settings(options, overrides)
    load_user_extensions(options)
    if options.mistakes is not None:
        if options.images or options.picture is not None or options.csv is not None or options.decoder != "dali":
            raise ConfigError(
                "--mistakes is of the validation split, as training decodes it: leave IMAGE and the other options out"
            )
        with importing(f"dali-train {options.command}"):
            from dali_train.extras.predict.mistakes import show_mistakes

        show_mistakes(options.run_dir, options.mistakes, options.checkpoint, options.weights)
        return FINISHED
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.predict.classify import print_predictions

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
