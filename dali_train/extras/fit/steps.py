"""The steps of `dali-train fit`, each of which is another command, and what is kept so that it can go on.

``RUN/fit.json`` says what was asked for; a step is done when what it makes is there: ``RUN/dataset/dataset.json``,
``RUN/fit.py``, ``RUN/probe``, a run that has finished, ``RUN/mistakes.png``, ``RUN/export/timm``. If what it was made
of has changed since, that is an error. Whatever ends a step, the same command does it again, and each of them resumes.

A linear probe of pretrained weights says what training has to surpass. Training does not begin with the classifier of
the probe, from which it ends lower than from zeros: docs/measurements/accuracy.md.
"""

import argparse
import ctypes
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands.arguments import refuse_numbers
from dali_train.config.command_line import config_with, read_overrides
from dali_train.data.convert.archives import folders_in
from dali_train.data.convert.datasets import images_root, in_place
from dali_train.data.dataset.image_file import BadImageError
from dali_train.data.dataset.index import Split, read_manifest
from dali_train.data.dataset.manifest import CONTENT, Manifest, split_folders_among, splits_of_words
from dali_train.errors import ConfigError, NoDatasetError
from dali_train.extras.fit.large_photographs import SHORT_SIDE, saving
from dali_train.extras.formats.tables import has_validation
from dali_train.extras.probe import REPORT
from dali_train.files import ForeignFileError, read_json, sha256, write_atomically
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import FINISHED, MISTAKE, START_AGAIN, best_evaluation, decisive, read_status
from dali_train.text import duration, plural, printable, shell_command

_FRACTION = 0.2
_SHORTEST_S = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MISTAKES = "mistakes.png"  # in RUN
_LARGEST_NOTE = 1_000_000  # bytes
_FEW_IMAGES = 5_000
_OF_INDEX = ("validation_fraction", "group_by", "label_separator", "multi_hot", "several_labels")
"""Options that `data index` has too."""
_NOT_FOR_TRAIN = {
    "run.dir": "trains in --out: name the directory there",
    "data.root": "makes the dataset of SOURCE: name images, an index or a dataset there",
    "run.epochs": "chooses a warmup and evaluations to go with it: use --epochs",
    "model.weights": "also probes them: use --weights",
}
"""Settings that `fit` chooses itself, and what to use instead."""


@dataclass(frozen=True)
class Step:
    """A command of dali-train, and whether what it makes is there already."""

    words: list[str]
    is_done: Callable[[], bool]
    is_needed: bool = True  # else the others go on without what it makes
    advice: Callable[[], str | None] = lambda: None  # when it has been done


class Fit:
    """One call of `dali-train fit`."""

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str]) -> None:
        """
        Args:
            options: the parsed command line.
            overrides: words of ``--section.field VALUE``, for `train`.
        """
        self._options, self._overrides = options, list(overrides)
        self._out: Path = options.out
        self._started = time.time()

    @property
    def _of_index(self) -> dict[str, Any]:
        """The values of `_OF_INDEX`; None: not given, also of an option without a value."""
        given = {name: getattr(self._options, name) for name in _OF_INDEX}
        return {name: None if value is False else value for name, value in given.items()}

    def run(self) -> int:
        """Do all steps that are left, print what there is now, and return the exit status.

        Raises:
            ConfigError: the source does not exist, or --out holds something else.
            DatasetError: what the source holds is no dataset.
        """
        self._begin()
        steps = list(self._steps())
        for number, step in enumerate(steps, 1):
            is_done = step.is_done()
            words = step.words if is_done else self._as_of_now(step.words)
            print(f"[{number}/{len(steps)}] {_shown(words)}{'  (done before)' if is_done else ''}", flush=True)
            if is_done:
                continue
            status = _run(words)
            if status == MISTAKE and not step.is_needed:
                print("the next steps go on without it")
            elif status != FINISHED:
                return self._interrupted(status, words)
            if (advice := step.advice()) is not None:
                print(advice, flush=True)
        print(f"\n{self._summary()}")
        return FINISHED

    def _begin(self) -> None:
        """Write fit.json, or compare what it has of the steps that are done with the command. Raises ConfigError."""
        options = self._options
        refuse_numbers(options, "epochs")
        if options.seconds is not None and options.seconds < _SHORTEST_S:
            raise ConfigError(f"--for is {duration(options.seconds)}: use at least {duration(_SHORTEST_S)}")
        for name, value in self._of_index.items():
            if value is not None and _is_dataset(options.source):
                raise ConfigError(
                    f"{_option(name)} with {options.source}: a dataset has its splits and labels already, "
                    "so leave it out"
                )
        for name in read_overrides(self._overrides):
            if name in _NOT_FOR_TRAIN:
                raise ConfigError(f"--{name} with fit, which {_NOT_FOR_TRAIN[name]}")
        source = Path(options.source)
        is_table = source.is_file() and in_place(source) == "table"
        of_images = {
            "source": options.source if is_remote(options.source) else str(source.absolute()),
            "the table": f"{CONTENT}{sha256(source)[:16]}" if is_table else None,
            **{_option(name): value for name, value in self._of_index.items()},
        }
        of_config = {
            "--model": options.model,
            "--weights": options.weights,
            "--epochs": options.epochs,
            "--for": options.seconds,
        }
        of_training = {"settings": self._overrides}
        note = self._out / "fit.json"
        asked = of_images | of_config | of_training
        try:
            before = read_json(note, _LARGEST_NOTE)
        except FileNotFoundError:
            if self._out.exists() and not (self._out.is_dir() and not any(self._out.iterdir())):
                raise ConfigError(f"--out {self._out} holds something else: name a new directory") from None
            if not is_remote(options.source) and not Path(options.source).exists():
                raise ConfigError(f"{options.source}: there is no such file or directory") from None
            before = asked
        except ForeignFileError as error:
            raise ConfigError(f"{note} is damaged ({error}): name another directory with --out") from None
        if not source.exists() and not is_remote(options.source):  # it has done its work
            of_images["the table"] = asked["the table"] = before.get("the table")
        # What a step has used already cannot be changed; a mistake that ended a step can be mended.
        used: dict[str, Any] = {}
        if (self._out / "dataset" / "dataset.json").exists():
            used |= of_images
        if (self._out / "fit.py").exists():
            used |= of_images | of_config
        if (self._out / "config.json").exists():
            used |= of_training
        for name, value in used.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"--out {self._out} was begun with {name} {before.get(name)}, not {value}: undo the change, or "
                    "name another directory with --out"
                )
        write_atomically(note, (json.dumps(asked, indent=1) + "\n").encode())

    def _steps(self) -> Iterator[Step]:
        out, options = self._out, self._options
        dataset: Path | str = options.source
        if not _is_dataset(options.source):
            dataset = out / "dataset"
            words = ["data", "index", options.source, "--out", str(dataset), *self._indexed()]
            yield Step(words, partial(_is_indexed, dataset, options.source))
        config = out / "fit.py"
        processes = _num_processes()
        words = ["init", str(dataset), "--output", str(config), "--run-dir", str(out)]
        for option in ("model", "weights", "epochs"):
            if (value := getattr(options, option)) is not None:
                words += [f"--{option}", str(value)]
        if options.seconds is not None:
            words += ["--for", f"{options.seconds:.0f}s", *processes]
        yield Step(words, config.exists, advice=partial(self._storing, dataset))
        if self._is_probed:
            words = ["probe", "--config", str(config), "--output", str(self._probe), *self._overrides]
            yield Step(words, (self._probe / REPORT).exists, is_needed=False)
        yield Step(["train", "--config", str(config), *processes, *self._overrides], self._is_trained)
        mistakes = out / MISTAKES
        yield Step(["predict", str(out), "--mistakes", str(mistakes)], mistakes.exists, is_needed=False)
        yield Step(["export", str(out)], (out / "export" / "timm" / "README.md").exists)

    def _storing(self, dataset: Path | str) -> str | None:
        """Return what storing large photographs smaller would save, and the command, if they are read in place."""
        source = self._options.source
        if dataset == source or is_remote(source):
            return None
        kind, saved = in_place(Path(source)), None
        if kind is None or kind == "imagenet":
            return None
        with suppress(BadImageError):  # training will say so
            saved = saving(Split(dataset, "train"))
        if saved is None:
            return None
        taken = ["--train" if kind == "folder" else "--source", str(images_root(Path(source))), *self._indexed()]
        stored = f"{self._out}-{SHORT_SIDE}px"
        words = ["data", "convert", kind, *taken, "--short-side", str(SHORT_SIDE), "--out", stored]
        return f"{saved}:\n  {_shown(words)}\nthen use {printable(stored)} in place of {printable(source)}"

    def _indexed(self) -> list[str]:
        """Return the options that read the labels, and those that divide the source, unless its own splits are used."""
        fraction, source = self._options.validation_fraction, self._options.source
        words = []
        for name, value in self._of_index.items():
            if value is not None and name != "validation_fraction":
                words.append(_option(name) if value is True else f"{_option(name)}={value}")
        has_splits = not is_remote(source) and self._has_splits(Path(source))
        if fraction is None and has_splits:
            return words
        return [*words, "--validation-fraction", f"{_FRACTION if fraction is None else fraction:g}"]

    def _has_splits(self, source: Path) -> bool:
        """Return whether the source has a validation split of its own, by folders' names or in a table's column, or is
        of TFRecords, which are not divided."""
        kind = in_place(source)
        if kind is None:
            return True
        if not source.is_dir():
            return kind == "table" and has_validation(source, multi_hot=self._of_index["multi_hot"])
        folders = split_folders_among(folders_in(images_root(source)))
        return "validation" in splits_of_words([*folders.values()]).values()

    def _is_trained(self) -> bool:
        """Return whether the run has finished. Raises ConfigError: with other settings than fit.py has now."""
        status = None
        with suppress(OSError):
            status = read_status(self._out)
        if status is None or status.state != "finished":
            return False
        self._refuse_changes()
        return True

    def _refuse_changes(self) -> None:
        from dali_train.checkpoint.recipe import changes_of_result  # torch and timm take seconds

        run = RunDirectory(self._out)
        file, size = self._out / "fit.py", run.config.batch.micro_batch
        config = config_with(file, self._overrides, "dali-train fit", micro_batch=lambda *_: size)  # where it is auto
        if changes := changes_of_result(run, config):
            raise ConfigError(
                f"{self._out} has finished with another recipe or evaluation than {file} and the dataset have now "
                f"({'; '.join(changes)}): undo the change, or name another directory with --out"
            )

    @property
    def _probe(self) -> Path:
        return self._out / "probe"

    @property
    def _is_probed(self) -> bool:
        several_labels = any(self._of_index[name] for name in ("label_separator", "multi_hot", "several_labels"))
        return self._options.weights is not None and not several_labels

    def _as_of_now(self, words: list[str]) -> list[str]:
        """Return the command of a step with what is left of --for, which counts from the start of `fit`."""
        if words[0] != "init" or "--for" not in words:
            return words
        at = words.index("--for") + 1
        left_s = self._options.seconds - (time.time() - self._started)
        return [*words[:at], f"{max(1, round(left_s))}s", *words[at + 1 :]]

    def _interrupted(self, status: int, words: Sequence[str]) -> int:
        if status in (START_AGAIN, 128 + signal.SIGINT, 128 + signal.SIGTERM) or status < 0:
            print("stopped; the same `dali-train fit` goes on where it was", file=sys.stderr)
            return START_AGAIN if status < 0 else status
        print(
            f"dali-train fit: `{_shown(words)}` ended with status {status}, for the reason above; when it is "
            f"mended, `dali-train fit` with --out {printable(str(self._out))} goes on",
            file=sys.stderr,
        )
        return status

    def _summary(self) -> str:
        """Return the last screen: the accuracy, where everything is, and what can be done next."""
        run, out = RunDirectory(self._out), printable(str(self._out))
        lines = [f"trained {printable(run.config.model.name)} for {plural(run.config.run.epochs, 'epoch')}"]
        if (best := best_evaluation(run.events, run.config.run.best_by)) is not None:
            of = f"{best['num_images']:,} validation images"
            measure = f"top-1 {decisive(best, 'top1'):.2%}"
            if "mean_ap" in best:  # several labels an image
                measure = f"mAP {decisive(best, 'mean_ap'):.2%}"
            lines[0] += f": {measure} of {of} (step {best['step']})"
        if (self._probe / REPORT).exists():
            top1 = read_json(self._probe / REPORT, _LARGEST_NOTE)["top1"]
            lines[0] += f"; a linear probe of the weights that it began with: {top1:.2%}"
            if best is not None and decisive(best, "top1") < top1:
                lines.append(
                    f"that is better: {printable(str(self._probe))} has the network with its classifier; more --epochs "
                    "may surpass it"
                )
        table = {
            "model and card": f"{out}/export/timm",
            "mistakes": f"{out}/{MISTAKES}" if (self._out / MISTAKES).exists() else "none",
            "report": f"{out}/report/index.html",
            "settings": f"{out}/fit.py",
        }
        lines += [f"  {name:<15} {value}" for name, value in table.items()]
        lines += ["next:"]
        run_dir = printable(shlex.quote(str(self._out)))
        lines += [
            f"  dali-train {rest}"
            for rest in (f"predict {run_dir} IMAGE...", f"export {run_dir} --format onnx", f"prove {run_dir}")
        ]
        num_images = read_manifest(run.config.data).splits["train"].num_records
        if run.config.model.weights is None and num_images < _FEW_IMAGES:
            lines.append(
                f"{num_images:,} images are few for a network that begins with random weights: --weights FILE, or "
                "--weights resnet18.a1_in1k where the Hugging Face Hub can be reached, needs a tenth of the epochs and "
                "is far more accurate"
            )
        return "\n".join(lines)


def _is_indexed(dataset: Path, source: str) -> bool:
    """Return whether there is an index. Raises DatasetError: images were added to its source, or are missing there."""
    if not (dataset / "dataset.json").exists():
        return False
    if Path(source).exists():
        Split(dataset, "train")
    return True


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(words: Sequence[str]) -> str:
    return printable(shell_command(["dali-train", *words]))


def _is_dataset(source: str) -> bool:
    """Return whether there is an index already."""
    if not is_remote(source):
        return (Path(source) / "dataset.json").exists()
    try:
        Manifest.read(source)
    except NoDatasetError:
        return False
    return True


def _num_processes() -> list[str]:
    """Return the option that trains on all GPUs of this machine; none for one GPU, or none."""
    import torch  # takes seconds

    count = torch.cuda.device_count()
    return ["--num-processes", str(count)] if count > 1 else []


def _run(words: Sequence[str]) -> int:
    """Run a command of dali-train in a process of its own and return its exit status. It gets the signals that ask this
    process to stop; Ctrl-C reaches it by itself, since both are in the terminal's foreground."""
    process = subprocess.Popen([sys.executable, "-m", "dali_train", *words], preexec_fn=_end_with_parent)
    with _passing_on(process):
        return process.wait()


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when this process's parent ends, however it ends: a run then saves and stops."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _passing_on(process: "subprocess.Popen[Any]") -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
