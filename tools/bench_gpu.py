"""Everything that is to be measured on a GPU, in one command, with a report: what `make bench-gpu` runs.

    python tools/bench_gpu.py --archive ILSVRC2012-sample.tar --out docs/measurements
    make bench-gpu DATA_ORIGINAL=DATASET DATA_256=DATASET

Parts, each a command of its own under its own time limit; one that fails is reported, and the next begins: the tests of
the GPU's data path against the CPU's; a short training; the data path alone, from images as they came, stored at 400 and
at 256 pixels, and raw, with several loads of the hardware decoder; the trainer's step for ViT-B/16 and ViT-B/32, compiled
or not, against a bare loop, with the time by class of kernel; real against synthetic data; startup. About 20 minutes.

Writes DATE-gpu-NAME.jsonl (every round of every part) and DATE-gpu-NAME.md (date, device, driver, versions, commands and
what they printed). Parts that were measured before, in the same .jsonl file, stay in the report: so --parts lets one
report grow in several sittings. Without datasets it makes them, from --archive or from generated images.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from bench_images import generated_jpeg
from bench_report import describe_machine, write_lines

from dali_train.train import git_commit

REPOSITORY = Path(__file__).parent.parent
# How each dataset is made from the one archive; ImageNet's photographs have 468 x 401 pixels on average.
SETS = {
    "original": [],
    "stored-400": ["--max-side", "400", "--quality", "90"],
    "stored-256": ["--short-side", "256", "--quality", "90"],
    "raw-256": ["--short-side", "256", "--format", "raw"],
}
QUICK_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="", train_size=32, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=16, micro_batch=8),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="", epochs=4, device="cpu"),
)
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    title: str
    words: list[str]  # after "python"
    limit_s: int
    rounds: bool = False  # the tool writes its rounds as JSON lines with --json FILE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETS:
        parser.add_argument(f"--{name}", type=Path, metavar="DATASET", help=f"the photographs, {name.replace('-', ' at ')}")
    parser.add_argument("--archive", type=Path, metavar="TAR", help="ImageNet's layout: makes the sets that are not given")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "docs" / "measurements", metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--parts", nargs="+", metavar="WORD", help="only parts whose name begins with one of these words")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program out without a GPU")
    parser.add_argument("--quick", action="store_true", help="few tiny images, models and rounds: does everything run?")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "bench_gpu.py: torch finds no GPU; check the driver, or try the program out with --device cpu --quick", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as directory:
        work = Path(directory)
        results = {result["part"]: result for result in earlier(report_path(options).with_suffix(".jsonl"))}
        sets, results["datasets"] = prepare(options, work)
        parts = [part for part in plan(options, sets, work) if begins(part.name, options.parts)]
        for number, part in enumerate(parts, start=1):
            print(f"[{number}/{len(parts)}] {part.name}: {part.title}, at most {part.limit_s} s", flush=True)
            results[part.name] = result = run_part(part, work)
            print(indented(result["output"]) + f"\n  {result['state']} after {result['seconds']:.0f} s", flush=True)
            write(options, results)  # what was measured is kept, whatever comes
    print(f"\nreport: {report_path(options)}")
    return 0 if all(results[part.name]["state"] == "done" for part in parts) else 1


def begins(name: str, words: list[str] | None) -> bool:
    return not words or any(name.startswith(word) for word in words)


# ---------------------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, work: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """The datasets by name, given or made, and how."""
    begin, commands, output = time.monotonic(), [], ""
    given = {name: getattr(options, name.replace("-", "_")) for name in SETS}
    sets = {}
    for name, path in given.items():
        if path is not None:
            sets[name] = work / name  # by this name in the report
            sets[name].symlink_to(path.resolve(), target_is_directory=True)
    if not sets or options.archive:
        if options.archive:
            archive = work / options.archive.name
            archive.symlink_to(options.archive.resolve())
            source = ["imagenet", "--train-archive", str(archive)]
        else:
            folder = work / "images"
            for seed in range(64 if options.quick else 512):
                path = folder / f"class-{seed % 8}" / f"{seed:05d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(generated_jpeg(seed))
            source = ["folder", "--train", str(folder)]
        for name, how in SETS.items():
            if name not in sets:
                sets[name] = work / name
                part = Part(
                    name=name, title="", words=["tools/make_tfrecords.py", *source, *how, "--out", str(sets[name])], limit_s=300
                )
                result = run_part(part, work)
                commands.append(result["command"])
                output += result["output"] + "\n"
                if result["state"] != "done":
                    sys.exit(f"bench_gpu.py: cannot make the dataset {name}: {result['state']}\n{result['output']}")
    kind = "given" if not commands else f"made from {options.archive.name if options.archive else 'generated images'}"
    return {name: sets[name] for name in SETS if name in sets}, {
        "part": "datasets", "title": f"{', '.join(sets)}: {kind}", "command": "\n".join(commands), "state": "done",
        "seconds": time.monotonic() - begin, "output": output, "rounds": [],
    }  # fmt: skip


def plan(options: argparse.Namespace, sets: dict[str, Path], work: Path) -> list[Part]:
    quick, one = options.quick, next(iter(sets.values()))
    original, small = sets.get("original", one), sets.get("stored-256", one)
    # One checkpoint: each step of so large a batch is several epochs of a small dataset.
    short = ["--hooks.log_every_steps", "5", "--run.max_steps", "20", "--run.checkpoint_every_steps", "20"]
    short += ["--run.dir", str(work / "run")]
    few = ["--loads", "0.65", "--batch", "8", "--batches", "4", "--rounds", "1"]
    parts = [
        Part(
            name="parity", title="tests of the GPU's data path and of resuming", limit_s=300,
            words=["-m", "pytest", "-p", "no:cacheprovider", "-rs", "-o", "addopts=-q", "tests/test_gpu.py"],
        ),
        Part(
            name="train", title="a short training, ViT-B/16 in FP16", limit_s=180,
            words=["-m", "dali_train", "train", *recipe("vit-b16", quick, work), "--data.root", str(original), *short,
                   *([] if quick else ["--batch.global_batch", "1024"])],
        ),
        Part(
            name="data", title="the data path alone", limit_s=540, rounds=True,
            words=["tools/bench_gpu_data.py", "--device", options.device, *(few if quick else []),
                   "--data", *(f"{name}={path}" for name, path in sets.items())],
        ),
    ]  # fmt: skip

    # 32 micro-batches of 256: as with 4 GPUs, of the recipe's 32,768 images a step.
    scale = ["--rounds", "1", "--steps", "1"] if quick else ["--rounds", "3", "--steps", "2", "--batch.global_batch", "8192"]

    def step(name: str, title: str, config: str, root: Path, *words: str, limit_s: int) -> None:
        parts.append(
            Part(
                name=f"step-{name}", title=title, limit_s=limit_s, rounds=True,
                words=["tools/bench_step.py", *recipe(config, quick, work), "--data.root", str(root), *scale, *words],
            )
        )  # fmt: skip

    for dtype in ("bf16", "fp16"):
        title = f"ViT-B/16, {dtype}, micro-batches of 256, 32 accumulated; time by class of kernel"
        step(f"b16-{dtype}", title, "vit-b16", original, "--precision.dtype", dtype, "--profile", limit_s=400)
    for compiled in ("blocks", "model"):
        title = f"ViT-B/16, bf16, model.compile {compiled}, 32 accumulated; time by class of kernel"
        words = ["--precision.dtype", "bf16", "--model.compile", compiled, "--profile", "--only", "trainer", "bare"]
        step(f"b16-compile-{compiled}", title, "vit-b16", original, *words, limit_s=400)
    for name, root in (("original", original), ("stored-256", small)):
        title = f"ViT-B/32, bf16, model.compile blocks, images from {name}"
        words = ["--precision.dtype", "bf16", "--model.compile", "blocks", "--only", "trainer"]
        step(f"b32-{name}", title, "vit-b32", root, *words, limit_s=240)
    startup = ["--rounds", "1"] if quick else ["--rounds", "2", "--model", "vit_base_patch16_224"]
    parts.append(
        Part(name="startup", title="command to first step", limit_s=240, words=["tools/bench_startup.py", *startup], rounds=True)
    )
    return parts


def recipe(name: str, quick: bool, work: Path) -> list[str]:
    if not quick:
        return ["--config", f"configs/{name}.py"]
    path = work / "quick.py"
    path.write_text(QUICK_CONFIG)
    return ["--config", str(path)]


# ---------------------------------------------------------------------------------------------------------------
# Running, and the report
# ---------------------------------------------------------------------------------------------------------------


def run_part(part: Part, work: Path) -> dict[str, Any]:
    """Run it and whatever it starts until its limit; what it printed, and its rounds."""
    rounds = work / f"{part.name}.jsonl"
    words = [*part.words, *(["--json", str(rounds)] if part.rounds else [])]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    begin = time.monotonic()
    with (work / f"{part.name}.out").open("w+") as out, (work / f"{part.name}.err").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=out, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(part.limit_s)
            state = "done" if status == 0 else f"FAILED with status {status}"
        except subprocess.TimeoutExpired:
            state = f"FAILED: not done after {part.limit_s} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        with suppress(ProcessLookupError):  # also what it may have left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        errors.seek(0)
        output = out.read()
        if state != "done":
            output += "\n" + "\n".join(errors.read().splitlines()[-40:])
    command = shlex.join(["python", *words])
    return {
        "part": part.name, "title": part.title, "command": relative(command, work), "state": state,
        "seconds": round(time.monotonic() - begin, 1), "output": relative(output.strip(), work),
        "rounds": [json.loads(line) for line in rounds.read_text().splitlines()] if rounds.exists() else [],
    }  # fmt: skip


def relative(text: str, work: Path) -> str:
    """Without the directories that only this machine has."""
    return text.replace(f"{work}/", "").replace(f"{REPOSITORY}/", "").replace(str(Path.home()), "~")


def earlier(path: Path) -> list[dict[str, Any]]:
    """The parts that an earlier sitting measured."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def write(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    path = report_path(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = describe(options)
    write_lines(path.with_suffix(".jsonl"), [{"header": header}, *results.values()])
    states = [f"| {name} | {r['title']} | {r['state']} | {r['seconds']:.0f} |" for name, r in results.items()]
    text = [f"# {device_name(options)}, {date.today().isoformat()}", header, "    make bench-gpu"]
    text.append("\n".join(["| part | what | state | s |", "|---|---|---|---|", *states]))
    for name, result in results.items():
        text += [f"## {name}", indented(result["command"]), indented(result["output"])]
    path.write_text("\n\n".join(part for part in text if part.strip()) + "\n")


def describe(options: argparse.Namespace) -> str:
    facts = describe_machine()
    if options.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm", "--format=csv,noheader"]
        try:
            facts += "\nGPU, driver, memory, power limit, highest clock: " + subprocess.check_output(query, text=True).strip()
        except (OSError, subprocess.CalledProcessError) as error:
            facts += f"\nnvidia-smi says nothing: {error}"
        facts += f"\nCUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} GPUs"
    return facts + f"\ncommit {git_commit(REPOSITORY) or 'unknown'}{', with --quick: no measurement' if options.quick else ''}"


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "CPU"


def report_path(options: argparse.Namespace) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(options).lower().removeprefix("nvidia ")).strip("-")
    return Path(options.out / f"{date.today().isoformat()}-gpu-{name}.md")


def indented(text: str) -> str:
    """As a code block."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
