"""Everything that is to be measured on a GPU, in parts that survive one another: what `make bench-gpu` runs.

    python -m tools.bench.gpu --archive ILSVRC2012-sample.tar --out docs/measurements
    python -m tools.bench.gpu --minutes 9            # and again: each call continues where the last one ended
    python -m tools.bench.gpu --device cpu --quick   # a rehearsal without a GPU: does every part reach its table?

Each part is a command of its own under its own limit, at most 8 minutes. One that fails or crashes is reported, and the
next begins. Every round is written when it is done, so a part that is cut short keeps what it measured. Datasets are
made once, from --archive or from generated images, and kept in --work.

Writes DATE-gpu-NAME.jsonl (every round of every part) and DATE-gpu-NAME.md (goals beside what was seen, date, device,
driver, versions, commands and what they printed). Parts that are in the same .jsonl file already are not measured
again.

What the rehearsal cannot show, because only a GPU can fail at it:
  - decoding on the GPU: boxes, the hardware decoder, its share of the images (smoke, parity, data)
  - the decoder falling back to the CPU without a word: look for "nvJPEG version" and "num_hw_engines" in smoke's output
  - streams: that DALI's outputs are ready before torch reads them (parity)
  - CUDA graphs, cuDNN's attention kernels, Triton (model-*, step-*); fp16's loss scale on real gradients (train)
  - memory: a micro-batch that does not fit (step-b32-*: 1,024 images)
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
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dali_train.files import git_commit
from tools.bench.goals import Results, goal_table
from tools.bench.turns import describe_machine, write_lines

REPOSITORY = Path(__file__).parent.parent.parent
UNFINISHED = 75  # exit status: parts are left for another call
# How each dataset is made from the one archive; ImageNet's photographs have 468 x 401 pixels on average.
SETS = {
    "original": [],
    "stored-256": ["--short-side", "256", "--quality", "90"],
    "raw-256": ["--short-side", "256", "--format", "raw"],
}
QUICK_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="data", train_size=32, eval_resize_to=36, eval_size=32, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=16, micro_batch=8),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="run", epochs=4, device="cpu"),
)
"""
RESNET_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="data"),
    model=ModelConfig(name="resnet50", channels_last=True),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=8192, micro_batch=256),
    run=RunConfig(dir="run", epochs=90),
)
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    title: str
    words: list[str]  # after "python"
    limit_s: int
    expected_s: int = 60  # on an H100; with --minutes it is not begun with less than that left
    rounds: bool = False  # the tool appends its rounds as JSON lines to --json FILE
    environment: dict[str, str] = field(default_factory=dict)
    notable: str = ""  # lines of the error output that belong into the report, a pattern
    makes: Path | None = None  # what later parts read: made again if it is gone


def main() -> int:
    options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "tools.bench.gpu: torch finds no GPU; check the driver, or rehearse with --device cpu --quick",
            file=sys.stderr,
        )
        return 2
    begin, work = time.monotonic(), options.work
    work.mkdir(parents=True, exist_ok=True)
    results = {result["part"]: result for result in earlier(report_path(options).with_suffix(".jsonl"))}
    parts = [part for part in plan(options, work) if part.makes or begins(part.name, options.parts)]
    if not any(reads_images(part) for part in parts):
        parts = [part for part in parts if not part.makes]
    waiting = [part for part in parts if options.again or is_open(part, results.get(part.name))]
    left_over = []
    for number, part in enumerate(waiting, start=1):
        left = 60 * options.minutes - (time.monotonic() - begin) if options.minutes else float("inf")
        if left < part.expected_s:
            left_over.append(part.name)
            continue
        limit = int(min(part.limit_s, left))
        print(f"[{number}/{len(waiting)}] {part.name}: {part.title}, at most {limit} s", flush=True)
        results[part.name] = result = run_part(part, work, limit)
        if result["state"] == "cut short" and limit < part.limit_s:
            result["state"] = "cut short by --minutes"  # another call repeats it
        print(indented(result["output"]) + f"\n  {result['state']} after {result['seconds']:.0f} s", flush=True)
        write(options, results)  # what was measured is kept, whatever comes
    if left_over:
        print(f"\n{len(left_over)} parts are left: {', '.join(left_over)}. The same command continues with them")
        return UNFINISHED
    write(options, results)
    print("\n".join(["", *goal_table(results, rehearsal=options.quick), "", f"report: {report_path(options)}"]))
    return 0 if all(results[part.name]["state"] == "done" for part in parts) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETS:
        parser.add_argument(
            f"--{name}", type=Path, metavar="DATASET", help=f"the photographs, {name.replace('-', ' at ')}"
        )
    parser.add_argument(
        "--archive", type=Path, metavar="TAR", help="ImageNet's layout: makes the sets that are not given"
    )
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "docs" / "measurements", metavar="DIR", help="default: %(default)s"
    )
    work = Path(tempfile.gettempdir()) / "dali-train-bench-gpu"
    parser.add_argument(
        "--work", type=Path, default=work, metavar="DIR", help="keeps datasets and rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="WORD", help="only parts whose name begins with one of these words"
    )
    parser.add_argument("--again", action="store_true", help="also parts that the report has already")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin nothing that would not end in this time; exit status 75"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program out without a GPU"
    )
    parser.add_argument("--quick", action="store_true", help="few tiny images, models and rounds: does everything run?")
    return parser.parse_args()


def reads_images(part: Part) -> bool:
    return not part.makes and not part.name.startswith(("model-", "parity", "startup"))


def is_open(part: Part, result: dict[str, Any] | None) -> bool:
    """Whether it is still to be run."""
    if part.makes and not part.makes.exists():
        return True
    return result is None or result["state"] not in ("done", "cut short")


def begins(name: str, words: list[str] | None) -> bool:
    return not words or any(name.startswith(word) for word in words)


# ---------------------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------------------


def dataset_parts(options: argparse.Namespace, work: Path) -> tuple[dict[str, Path], list[Part]]:
    """The datasets by name, given or in `work`; and what makes those that are missing."""
    given = {name: getattr(options, name.replace("-", "_")) for name in SETS}
    images = 64 if options.quick else 512
    made_of = options.archive.name if options.archive else f"{images} generated images"
    folder = work / f"{images} generated images".replace(" ", "-")
    if options.archive:
        source = ["imagenet", "--train-archive", str(options.archive.resolve())]
    else:
        source = ["folder", "--train", str(folder), "--validation-fraction", "0.1"]
    sets, parts = {}, []
    for name, how in SETS.items():
        if given[name] is not None:
            sets[name] = given[name].resolve()
        elif options.archive or not any(given.values()):
            sets[name] = work / f"{name} of {made_of}".replace(" ", "-")
            words = ["tools/make_tfrecords.py", *source, *how, "--out", str(sets[name])]
            made, title = sets[name] / "dataset.json", f"{name} of {made_of}"
            parts.append(Part(name=f"make-{name}", title=title, words=words, limit_s=300, expected_s=20, makes=made))
    if parts and not options.archive:
        words = ["-m", "tools.bench.generated", str(folder), "--images", str(images)]
        parts.insert(0, Part(name="make-images", title=f"{images} JPEGs", words=words, limit_s=300, makes=folder))
    return sets, parts


def plan(options: argparse.Namespace, work: Path) -> list[Part]:
    """In the order of what is most worth knowing when the time is short."""
    sets, making = dataset_parts(options, work)
    original = sets.get("original", next(iter(sets.values())))
    smoke = smoke_parts(options, original)
    parts = [*model_parts(options, work), *making, smoke[0], *training_parts(options, original, work)]
    few = ["--loads", "0.65", "--batch", "8", "--batches", "4", "--rounds", "1"]
    for name, root in sets.items():
        words = [
            "-m",
            "tools.bench.gpu_data",
            "--device",
            options.device,
            *(few if options.quick else ["--rounds", "2"]),
        ]
        words += ["--data", f"{name}={root}"]
        title = f"the data path alone, images from {name}"
        parts.append(Part(name=f"data-{name}", title=title, words=words, limit_s=300, expected_s=140, rounds=True))
    parts += [*step_parts(options, sets, work), *smoke[1:]]
    startup = ["--rounds", "1"] if options.quick else ["--rounds", "2", "--model", "vit_base_patch16_224"]
    words = ["-m", "tools.bench.startup", *startup]
    parts.append(
        Part(name="startup", title="command to first step", limit_s=300, expected_s=120, words=words, rounds=True)
    )
    return parts


# What the model alone is measured with: a recipe and changes to it, in bf16 where they do not say otherwise.
_PLAIN = "--model.kwargs.proj_drop_rate 0 --model.kwargs.pos_drop_rate 0"
_FAST = f"{_PLAIN} --model.fast_norm true"
_MODELS = {
    "b16-recipe": ("vit-b16", ""),
    "b16": ("vit-b16", _PLAIN),
    "b16-fast": ("vit-b16", f"{_FAST} --profile"),
    "b16-eager": ("vit-b16", f"{_PLAIN} --model.compile none"),
    "b16-model": ("vit-b16", f"{_FAST} --model.compile model"),
    "b16-flash": ("vit-b16", f"{_FAST} --model.attention flash"),
    "b32": ("vit-b32", f"{_FAST} --batch.micro_batch 1024"),
    "r50": ("resnet50", ""),
    "r50-heuristics": ("resnet50", "--run.deterministic true"),  # cuDNN chooses without trying
    "b16-512": ("vit-b16", f"{_FAST} --batch.micro_batch 512"),
    "b16-fp16": ("vit-b16", "--precision.dtype fp16"),
    "b16-depth": ("vit-b16", f"{_FAST} --model.kwargs.drop_path_rate 0.1"),
    "r50-eager": ("resnet50", "--model.compile none"),
    "b16-autotune": ("vit-b16", f"{_FAST} --model.compile model"),
}


def model_parts(options: argparse.Namespace, work: Path) -> list[Part]:
    """Products, attention and models alone, without data and optimizer."""
    quick = ["--device", options.device, *(["--quick"] if options.quick else [])]
    words = ["-m", "tools.bench.kernels", *quick]
    parts = [Part(name="model-kernels", title="products and attention alone", words=words, limit_s=120, rounds=True)]
    for name, (config, changes) in _MODELS.items():
        words = ["-m", "tools.bench.model", *recipe(config, options, work), "--device", options.device]
        words += ["--precision.dtype", "bf16"]
        # The rehearsal's model has no dropout to leave out, and compiles in other parts.
        words += changes.split() if not options.quick else ["--model.compile", "none"]
        tuned = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"} if name == "b16-autotune" else {}
        title = f"{config} alone: {changes or 'as it is'}{', max_autotune' if tuned else ''}"
        parts.append(
            Part(
                name=f"model-{name}",
                title=title,
                words=words,
                limit_s=150,
                expected_s=45,
                rounds=True,
                environment=tuned,
            )
        )
    return parts


def smoke_parts(options: argparse.Namespace, original: Path) -> list[Part]:
    """Decoding, each kind in a process of its own, since a fault may end it."""
    parts = []
    for decode, load in (("whole", 0.65), ("box", 0.0), ("box", 0.65), ("box", 1.0)):
        name = f"smoke-{decode}" + (f"-{100 * load:.0f}" if decode == "box" else "")
        words = ["-m", "tools.bench.smoke", str(original), "--decode", decode, "--load", str(load)]
        words += ["--device", options.device]
        title = f"decoding {'whole images' if decode == 'whole' else f'boxes, {load:.0%} to the hardware decoder'}"
        log = {"DALI_NVIMGCODEC_LOG_LEVEL": "4"}
        notable = r"nvJPEG version|HW decoder|num_hw_engines|rror"
        parts.append(
            Part(name=name, title=title, words=words, limit_s=120, expected_s=40, environment=log, notable=notable)
        )
    return parts


def training_parts(options: argparse.Namespace, original: Path, work: Path) -> list[Part]:
    """Whether what trains on the CPU trains here: the data path's tests, doctor, a short training and its resume."""
    # One worker of xdist: it is started again after a test that ends it.
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-rs", "-n", "1", "-o", "addopts=-q", "tests/test_gpu.py"]
    train = [*recipe("vit-b16", options, work), "--data.root", str(original)]
    train += ["--run.dir", str(work / "run"), *([] if options.quick else ["--batch.global_batch", "1024"])]
    doctor = ["-m", "dali_train", "doctor", *train[:4], "--run.dir", str(work / "run-of-doctor")]
    # Each step of so large a batch is several epochs of a small dataset, and evaluations save.
    train = ["-m", "dali_train", "train", *train, "--run.eval_every_epochs", "None"]
    train += ["--hooks.log_every_steps", "2", "--run.checkpoint_every_steps", "6"]
    return [
        Part(
            name="parity",
            title="tests of the GPU's data path and of resuming",
            limit_s=300,
            expected_s=150,
            words=pytest,
        ),
        Part(name="doctor", title="doctor, ViT-B/16", limit_s=120, words=doctor),
        Part(
            name="train",
            title="12 steps of ViT-B/16 in FP16",
            limit_s=240,
            expected_s=120,
            words=[*train, "--run.max_steps", "12"],
        ),
        Part(name="resume", title="resumed to step 16", limit_s=150, words=[*train, "--run.max_steps", "16"]),
    ]


def step_parts(options: argparse.Namespace, sets: dict[str, Path], work: Path) -> list[Part]:
    """The product's complete loop, on real and on synthetic data."""
    original = sets.get("original", next(iter(sets.values())))
    stored = sets.get("stored-256", original)
    large = [] if options.quick else ["--batch.micro_batch", "1024"]
    scale = ["--rounds", "1"] if options.quick else ["--rounds", "2", "--model.fast_norm", "true"]
    parts = []
    for name, config, root, words in (
        ("b16", "vit-b16", original, ["--only", "trainer", "bare"]),
        ("b32-original", "vit-b32", original, ["--only", "trainer", *large]),
        ("b32-stored-256", "vit-b32", stored, ["--only", "trainer", *large]),
        ("r50-original", "resnet50", original, ["--only", "trainer"]),
    ):
        # Steps as with 8 GPUs; a rehearsal compiles once, which takes minutes on a CPU.
        batch = [] if options.quick else ["--batch.global_batch", "8192" if large and "b32" in name else "4096"]
        compiled = "none" if options.quick and name != "b16" else "blocks"
        words = ["tools/bench_step.py", *recipe(config, options, work), "--data.root", str(root), *words, *batch]
        words += ["--precision.dtype", "bf16", "--steps", "1", "--model.compile", compiled, *scale]
        parts.append(
            Part(
                name=f"step-{name}",
                title=f"{config} from {root.name}, compiled blocks",
                limit_s=300,
                expected_s=190,
                rounds=True,
                words=[*words],
            )
        )
    return parts


def recipe(name: str, options: argparse.Namespace, work: Path) -> list[str]:
    if name != "resnet50" and not options.quick:
        return ["--config", f"configs/{name}.py"]
    path = work / ("quick.py" if options.quick else f"{name}.py")
    path.write_text(QUICK_CONFIG if options.quick else RESNET_CONFIG)
    return ["--config", str(path)]


# ---------------------------------------------------------------------------------------------------------------
# Running, and the report
# ---------------------------------------------------------------------------------------------------------------


def run_part(part: Part, work: Path, limit_s: int | None = None) -> dict[str, Any]:
    """Run it and whatever it starts until its limit; what it printed, and its rounds."""
    rounds, limit_s = work / f"{part.name}.jsonl", limit_s or part.limit_s
    rounds.unlink(missing_ok=True)
    words = [*part.words, *(["--json", str(rounds)] if part.rounds else [])]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **part.environment}
    begin = time.monotonic()
    with (
        (work / f"{part.name}.out").open("w+") as out,
        (work / f"{part.name}.err").open("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPOSITORY, env=environment, stdout=out, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            ended = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            state = "done" if status == 0 else f"FAILED {ended}"
        except subprocess.TimeoutExpired:
            state = f"FAILED: not done after {limit_s} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        with suppress(ProcessLookupError):  # also what it may have left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        errors.seek(0)
        output, said = out.read(), errors.read().splitlines()
    if part.notable:
        plain = (re.sub(r"\x1b\[[\d;]*m", "", line) for line in said)
        output += "\n".join(dict.fromkeys(line for line in plain if re.search(part.notable, line)))
    if state != "done":
        output += "\n" + "\n".join(said[-40:])
    measured = [json.loads(line) for line in rounds.read_text().splitlines()] if rounds.exists() else []
    if state.startswith("FAILED: not done") and any("round" in line for line in measured):
        state = "cut short"
    command = shlex.join(["python", *words])
    return {
        "part": part.name,
        "title": part.title,
        "command": relative(command, work),
        "state": state,
        "seconds": round(time.monotonic() - begin, 1),
        "output": relative(output.strip(), work),
        "rounds": measured,
    }


def relative(text: str, work: Path) -> str:
    """Without the directories that only this machine has."""
    return text.replace(f"{work}/", "").replace(f"{REPOSITORY}/", "").replace(str(Path.home()), "~")


def earlier(path: Path) -> list[dict[str, Any]]:
    """The parts that an earlier call measured."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def write(options: argparse.Namespace, results: Results) -> None:
    path = report_path(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = describe(options)
    write_lines(path.with_suffix(".jsonl"), [{"header": header}, *results.values()])
    states = [f"| {name} | {r['title']} | {r['state']} | {r['seconds']:.0f} |" for name, r in results.items()]
    text = [f"# {device_name(options)}, {date.today().isoformat()}", header, "    make bench-gpu"]
    text += [
        "\n".join(goal_table(results, rehearsal=options.quick)),
        "\n".join(["| part | what | state | s |", "|---|---|---|---|", *states]),
    ]
    for name, result in results.items():
        text += [f"## {name}", indented(result["command"]), indented(result["output"])]
    path.write_text("\n\n".join(part for part in text if part.strip()) + "\n")


def describe(options: argparse.Namespace) -> str:
    facts = describe_machine()
    if options.device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
            "--format=csv,noheader",
        ]
        try:
            facts += (
                "\nGPU, driver, memory, power limit, highest clock: "
                + subprocess.check_output(query, text=True).strip()
            )
        except (OSError, subprocess.CalledProcessError) as error:
            facts += f"\nnvidia-smi says nothing: {error}"
        facts += (
            f"\nCUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} GPUs"
        )
    return (
        facts
        + f"\ncommit {git_commit(REPOSITORY) or 'unknown'}{', with --quick: no measurement' if options.quick else ''}"
    )


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
