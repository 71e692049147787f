"""Kill a trainer or loader in the middle of an epoch, resume it, and count the images that it saw twice or never.

    python -m tools.yours                   # every script whose package is installed
    python -m tools.yours train_loader "accelerate_loop seedable"

Two processes with 24 images each train on 576 images, save a checkpoint every 3 steps, and are killed by SIGKILL after
step 7 of the second epoch's twelve. They are resumed by each tool's own means on 2 processes; on 3 with 16 images each,
so that a step has as many images as before; and on 3 by the same command, with 24 each. timm's script is no part of its
package: --timm-train names it.
"""

import argparse
import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from tools.yours.counting import RESUMES, Start, Torchrun, kill, resume, write_images


class Tool(NamedTuple):
    """A row of the table: a script, the packages it needs, and more words of its command line."""

    module: str
    packages: tuple[str, ...]
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.module, *self.words))


TOOLS = (
    Tool("train_loader", ("dali-train",)),
    Tool("accelerate_loop", ("accelerate",)),
    Tool("accelerate_loop", ("accelerate",), ("seedable",)),
    Tool("accelerate_loop", ("accelerate", "torchdata"), ("stateful",)),
    Tool("accelerate_loop", ("accelerate", "torchdata"), ("seedable", "stateful")),
    Tool("torchdata_stateful", ("torchdata",)),
    Tool("transformers_trainer", ("transformers", "accelerate")),
    Tool("lightning_fit", ("lightning",)),
    Tool("lightning_fit", ("lightning", "torchdata"), ("stateful",)),
    Tool("timm_train", ("timm",), ("last",)),
    Tool("timm_train", ("timm",), ("recovery",)),
    Tool("torchvision_reference", ("torchvision",)),
    Tool("litdata_streaming", ("litdata",)),
    Tool("webdataset_loop", ("webdataset",)),
)


def missing(tool: Tool) -> list[str]:
    absent = []
    for package in tool.packages:
        try:
            version(package)
        except PackageNotFoundError:
            absent.append(package)
    return absent


def measure(tool: Tool, images: Path, root: Path, more: list[str]) -> list[str]:
    """Return a cell of the table for each way to resume: images seen twice and never, or the error it ended with."""

    def run(start: Start, work: Path) -> Torchrun:
        words = [str(images), str(work), str(start.batch), *tool.words, *more]
        return Torchrun(tool.module, words, start.processes, work / "output")

    killed = root / str(tool) / "killed"
    killed.mkdir(parents=True)
    try:
        kill(run, killed)
    except RuntimeError as error:
        return [str(error)] * len(RESUMES)
    cells = []
    for name, start in RESUMES.items():
        try:
            cells.append(str(resume(run, killed, killed.with_name(name), start)))
        except RuntimeError as error:
            cells.append(str(error))
    return cells


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scripts",
        nargs="*",
        metavar="SCRIPT",
        help="scripts of tools/yours, or rows such as 'lightning_fit stateful'; without any, all",
    )
    parser.add_argument("--timm-train", type=Path, help="train.py of a clone of huggingface/pytorch-image-models")
    options = parser.parse_args()
    wanted, known = {*options.scripts}, {name: None for tool in TOOLS for name in (tool.module, str(tool))}
    if unknown := wanted - known.keys():
        parser.error(f"there is no script {', '.join(sorted(unknown))}: use {', '.join(known)}")
    row("script", "version", *(f"{name}: twice, never" for name in RESUMES))
    row(*["---"] * (len(RESUMES) + 2))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "images")
        (root / "tmp").mkdir()
        os.environ["TMPDIR"] = str(root / "tmp")  # processes that are killed leave theirs
        asked = [tool for tool in TOOLS if not wanted or {tool.module, str(tool)} & wanted]
        for number, tool in enumerate(asked, 1):
            print(f"{number} of {len(asked)}: {tool}, about a minute", file=sys.stderr, flush=True)
            if absent := missing(tool):
                row(str(tool), f"not installed: pip install {' '.join(absent)}", *[""] * len(RESUMES))
            elif tool.module == "timm_train" and options.timm_train is None:
                row(str(tool), "not run: --timm-train FILE", *[""] * len(RESUMES))
            else:
                more = [str(options.timm_train.resolve())] if tool.module == "timm_train" else []
                row(str(tool), version(tool.packages[0]), *measure(tool, root / "images", root, more))


if __name__ == "__main__":
    main()
