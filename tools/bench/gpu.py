"""Everything to be measured on a GPU, in parts that survive one another: what `make bench-gpu` runs.

    python -m tools.bench.gpu --archive ILSVRC2012_img_train.tar
    python -m tools.bench.gpu --minutes 15           # for a borrowed GPU; repeat while the exit status is 75
    python -m tools.bench.gpu --device cpu --quick   # a rehearsal without a GPU: does every part run?

Each part is a command with a time limit; if it fails, the next one runs anyway. DATE-gpu-NAME.jsonl receives the rounds
of every part, DATE-gpu-NAME.md the goals and the output. Parts that the .jsonl file has of the same commit are skipped.
With --minutes the newest report of such a GPU is continued, whatever its date; parts of other commits are measured
anew. A call starts no part that would not end within --seconds, and ends with status 75 while parts are left.
tools/README.md has the calls for 15 minutes. The parts model-* need no DALI, which tools/bench/pack_gpu.sh may
bring in the meantime.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dali_train.files import git_commit
from dali_train.runtime.process import num_cores
from tools.bench.compute import BARE, REAL, SYNTHETIC
from tools.bench.turns import REPOSITORY, describe_machine, python_environment, write_lines

MEASUREMENTS = REPOSITORY / "docs" / "measurements"
CALL_S = 540  # ten minutes, less the time for starting a call
UNFINISHED = 75
SETS = {"original": "", "stored-256": "--short-side 256 --quality 90", "raw-256": "--short-side 256 --format raw"}
NOTABLE = re.compile(r"nvJPEG version|HW decoder|num_hw_engines|rror")  # lines of DALI's log that the report shows
Results = dict[str, dict[str, Any]]  # lines of the report by part


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    command: str  # after "python"
    expected_s: int = 60  # an estimate, on an H100
    minutes: int = 99  # the shortest --minutes that includes it
    needs: str = ""  # the part that must have succeeded
    makes: Path | None = None  # made again if it is missing
    rounds: bool = False  # takes --json FILE, for its rounds

    @property
    def limit_s(self) -> int:
        return min(300, 60 + 2 * self.expected_s)

    def is_open(self, result: dict[str, Any] | None, commit: str) -> bool:
        is_missing = self.makes is not None and not self.makes.exists()
        return result is None or result["state"] == "no time left" or result.get("commit") != commit or is_missing


def plan(options: argparse.Namespace) -> list[Part]:
    """Return all parts, the most important first."""
    quick, work, device = options.quick, options.work, f"--device {options.device}"
    vit_b16, vit_b32 = "--config configs/vit-b16.py", "--config configs/vit-b32.py"
    resnet = "--config configs/resnet50-lars-57k.py --batch.micro_batch 256 --model.channels_last true"
    if quick:
        vit_b16 = vit_b32 = resnet = "--config configs/digits.py --batch.global_batch 16 --batch.micro_batch 8"

    def model(name: str, config: str, changes: str = "", expected_s: int = 45, minutes: int = 45) -> Part:
        changes = "--model.compile none" if quick else changes
        command = f"-m tools.bench.model {config} {device} --precision.dtype bf16 {changes}"
        return Part(name=f"model-{name}", command=command, expected_s=expected_s, minutes=minutes, rounds=True)

    plain = "--model.kwargs.proj_drop_rate 0 --model.kwargs.pos_drop_rate 0"
    fast = f"{plain} --model.fast_norm true"
    # After a test that crashes or hangs, xdist continues with the others; each is named as soon as it has ended.
    tests = "-m pytest -p no:cacheprovider -rs -o addopts=-v tests/test_gpu.py --dist worksteal --timeout 120"
    tests += f" --timeout-method thread -n {max(2, min(8, num_cores() // 2))} --durations 12 --session-timeout 200"
    parts = [
        Part(name="machine", command="-m dali_train doctor", expected_s=20, minutes=15),
        Part(name="parity", command=tests, expected_s=90, minutes=15),
        model("b16-fast", vit_b16, f"{fast} --profile", minutes=15),
        model("b16-recipe", vit_b16, minutes=30),
        model("b16", vit_b16, plain, minutes=30),
        model("b16-eager", vit_b16, f"{plain} --model.compile none", minutes=45),
        model("b16-model", vit_b16, f"{fast} --model.compile model", 75, minutes=30),
        model("b32", vit_b32, f"{fast} --batch.micro_batch 1024", minutes=30),
        model("r50", resnet, expected_s=75, minutes=30),
        model("b16-flash", vit_b16, f"{fast} --model.attention flash"),
        model("b16-512", vit_b16, f"{fast} --batch.micro_batch 512"),
        model("b16-fp16", vit_b16, "--precision.dtype fp16"),
        model("r50-heuristics", resnet, "--run.deterministic true", 75),  # cuDNN chooses without trying
    ]

    images, sets = 64 if quick else 512, {name: f"{work}/{name}" for name in SETS}
    source = f"imagenet --train-archive {shlex.quote(str(options.archive))}"
    if options.archive is None:
        source = f"folder --train {work}/images --validation-fraction 0.1"
        command = f"-m tools.bench.generated {work}/images --images {images}"
        parts.append(Part(name="make-images", command=command, expected_s=12, minutes=15, makes=work / "images"))
    for name, how in SETS.items():
        command = f"tools/make_tfrecords.py {source} {how} --out {sets[name]}"
        made, needs = Path(sets[name]) / "dataset.json", "" if options.archive else "make-images"
        parts.append(Part(name=f"make-{name}", command=command, expected_s=8, minutes=15, makes=made, needs=needs))

    # The seed's recipe in a size of which many steps fit: FP16, LAMB, Mixup, 32 accumulated micro-batches of 256.
    seed = vit_b16 if quick else f"{vit_b16} --model.name vit_small_patch16_224 --batch.global_batch 8192"
    train = f"-m dali_train train {vit_b16} --data.root {sets['original']} --run.dir {work}/run "
    train += "--run.eval_every_epochs None --hooks.log_every_steps 2 --run.checkpoint_every_steps 6"
    train += "" if quick else " --batch.global_batch 1024"
    forty = f"-m dali_train train {seed} --data.root {sets['original']} --run.dir {work}/forty "
    forty += "--run.eval_every_epochs None "
    forty += "--run.max_steps 4" if quick else "--run.epochs 6000 --run.max_steps 40 --hooks.log_every_steps 5"
    doctor = f"-m dali_train doctor {vit_b16} --data.root {sets['original']} --run.dir {work}/doctor"
    vit5 = "--config configs/digits.py --batch.global_batch 16 --batch.micro_batch 8"
    if not quick:
        vit5 = "--config configs/vit5-s.py --batch.micro_batch 256"  # nvSubquadratic: 4,849 images/s on one H100

    def step(
        name: str, config: str, images_of: str, batch: str, expected_s: int, minutes: int, *, also: str = ""
    ) -> Part:
        size = f"{batch} --model.compile blocks --rounds 2"
        if quick:
            size = "--model.compile none --rounds 1 --steps 1"
        command = f"tools/bench_step.py {config} --data.root {sets[images_of]} {size} {also}"
        if "--profile" in also and options.copy is not None:
            command += f" --traces {options.copy}/{name}"
        measured = Part(name=f"step-{name}", command=command, expected_s=expected_s, minutes=minutes, rounds=True)
        return replace(measured, needs=f"make-{images_of}")

    settings_of = {
        "4 threads": "--data.num_threads 4",
        "8 threads": "--data.num_threads 8",
        "all to the hardware": "--data.hw_decoder_load 1",
        "CUDA graphs": "--model.compile cuda-graphs",
        "CUDA graphs, 4 threads": "--model.compile cuda-graphs --data.num_threads 4",
        "micro-batches of 512": "--batch.micro_batch 512",
    }
    if quick:
        settings_of = {"1 thread": "--data.num_threads 1"}
    variants = " ".join(f"--variant '{name}' '{settings}'" for name, settings in settings_of.items())
    graphs = "" if quick else "--variant 'CUDA graphs' '--model.compile cuda-graphs'"
    scale = "--loads 0.65 --batch 8 --batches 4 --rounds 1" if quick else "--rounds 3"
    loads_of = {"original": "--loads 0 0.5 0.6 0.7 0.85 1", "raw-256": "", "stored-256": "--loads 0 0.4 0.8"}
    for name, expected_s in (("original", 30), ("raw-256", 12), ("stored-256", 20)):
        command = f"-m tools.bench.gpu_data {device} {loads_of[name]} {scale} --data {name}={sets[name]}"
        shared = Part(name=f"data-{name}", command=command, expected_s=expected_s, minutes=15, rounds=True)
        parts.append(replace(shared, needs=f"make-{name}"))
    parts += [
        step("s16", f"{seed} --only trainer bare", "original", "--steps 1", 120, 15, also="--profile"),
        step("vit5-s", f"{vit5} --only trainer", "original", "--steps 2", 90, 15, also=f"--profile {graphs}"),
        Part(name="forty", command=forty, expected_s=60, minutes=15, needs="make-original"),
    ]
    if options.cifar10 is not None:
        command = f"-m tools.bench.airbench {shlex.quote(str(options.cifar10))} {device} --work {work}/airbench"
        command += f" --program {shlex.quote(str(options.program))}" if options.program is not None else ""
        command += " --seeds 1 --images 300" if quick else " --seeds 6 --side-by-side 2"
        parts.append(Part(name="airbench", command=command, expected_s=120, minutes=15, rounds=True))
    parts += [
        Part(name="doctor", command=doctor, minutes=30, needs="make-original"),
        Part(name="train", command=f"{train} --run.max_steps 12", expected_s=90, minutes=30, needs="make-original"),
        Part(name="resume", command=f"{train} --run.max_steps 16", minutes=30, needs="train"),
    ]
    bf16, large = "--precision.dtype bf16 --steps 1", "--batch.global_batch 8192 --batch.micro_batch 1024"
    several = f"{bf16} --batch.global_batch 4096"
    parts += [
        # What makes DALI late while the model keeps the GPU busy: too many threads, CUDA's decoder, or the host?
        step("s16-variants", f"{seed} --only real", "original", "--steps 1", 150, 30, also=variants),
        step("b16", f"{vit_b16} --only trainer bare", "original", several, 150, 30),
        step("b32-stored-256", f"{vit_b32} --only trainer", "stored-256", f"{bf16} {large}", 150, 45),
        step("b32-original", f"{vit_b32} --only trainer", "original", f"{bf16} {large}", 150, 45),
        step("r50-original", f"{resnet} --only trainer", "original", several, 150, 45),
    ]
    startup = "-m tools.bench.startup " + ("--rounds 1" if quick else "--rounds 2 --model vit_base_patch16_224")
    return [
        *parts,
        model("b16-autotune", vit_b16, f"{fast} --model.compile autotune", 200),
        Part(name="startup", command=startup, expected_s=120, rounds=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, metavar="TAR", help="ImageNet's training images (default: generated)")
    parser.add_argument("--cifar10", type=Path, metavar="TAR", help="its images in train/CLASS/ and test/CLASS/")
    parser.add_argument("--program", type=Path, metavar="FILE", help="airbench94.py as published, to compare with")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, metavar="DIR")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="a second place for the report")
    parser.add_argument("--commit", default=git_commit(REPOSITORY), metavar="HASH", help="where this is no checkout")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "dali-train-bench-gpu", metavar="DIR"
    )
    parser.add_argument("--parts", nargs="+", default=[""], metavar="WORD", help="parts whose name begins with a WORD")
    parser.add_argument("--minutes", type=int, choices=[15, 30, 45], help="the most important parts, in calls")
    parser.add_argument("--seconds", type=int, default=CALL_S, metavar="N", help="of a call (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--quick", action="store_true", help="few tiny images, models and rounds: does everything run?")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: check the driver, or rehearse with --device cpu --quick")
    options.work.mkdir(parents=True, exist_ok=True)
    report, parts = report_path(options), plan(options)
    for word in options.parts:
        if not any(part.name.startswith(word) for part in parts):
            parser.error(
                f"--parts {word}: no part's name begins so, use some of {' '.join(part.name for part in parts)}"
            )
    return run_parts(options, parts, report, options.seconds if options.minutes else float("inf"))


def run_parts(options: argparse.Namespace, parts: list[Part], report: Path, call_s: float) -> int:
    """Run what is open of `parts` within `call_s` seconds; return the exit status."""
    begin = time.monotonic()
    places = [place / f"{report.stem}.jsonl" for place in (report.parent, MEASUREMENTS)]
    written = next((lines.read_text().splitlines()[1:] for lines in places if lines.exists()), [])
    results = {line["part"]: line for line in map(json.loads, written)}
    prefixes, minutes = tuple(options.parts), options.minutes or 99
    names = {part.name for part in parts if part.minutes <= minutes and part.name.startswith(prefixes)}
    for part in reversed(parts):  # also what they need, which comes before them
        names |= {part.needs} if part.name in names else set()
    chosen = [part for part in parts if part.name in names]
    still_open = [part for part in chosen if part.is_open(results.get(part.name), options.commit)]
    if not still_open:
        print(f"nothing is left to measure: the report has all {len(chosen)} parts of commit {options.commit}")
        write_report(options, report, results)
    left: list[str] = []
    result: dict[str, Any]
    for part in still_open:
        remaining_s = call_s - (time.monotonic() - begin)
        if remaining_s < part.expected_s or part.needs in left or not (part.name.startswith("model-") or has_dali()):
            left.append(part.name)
            continue
        limit_s = min(part.limit_s, remaining_s)
        print(f"{part.name}: at most {limit_s:.0f} s: {part.command}", flush=True)
        if part.needs and results.get(part.needs, {}).get("state") != "done":
            result = {"part": part.name, "state": f"FAILED: {part.needs} has not succeeded", "seconds": 0.0}
            result |= {"command": part.command, "output": "", "rounds": []}
            result |= {"date": date.today().isoformat(), "commit": options.commit}
        else:
            result = run_part(part, options, limit_s)
        if limit_s < part.limit_s and result["state"] == "FAILED: out of time":
            result["state"] = "no time left"
            left.append(part.name)
        results[part.name] = result
        print(f"{indented(result['output'])}\n  {result['state']} after {result['seconds']:.0f} s", flush=True)
        write_report(options, report, results)
    print("\n".join(["", *goal_table(results, rehearsal=options.quick), "", f"report: {report}"]))
    if left:
        print(f"{len(left)} parts are left: {' '.join(left)}. Run the same command again")
        return UNFINISHED
    return int(any(results[part.name]["state"] != "done" for part in chosen))


def has_dali() -> bool:
    with suppress(ModuleNotFoundError):  # of `nvidia`
        return find_spec("nvidia.dali") is not None
    return False


def run_part(part: Part, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a part, and end it with everything that it started; return its line of the report."""
    files = {suffix: options.work / f"{part.name}.{suffix}" for suffix in ("jsonl", "out", "err")}
    files["jsonl"].unlink(missing_ok=True)
    words = [*shlex.split(part.command), *(["--json", str(files["jsonl"])] if part.rounds else [])]
    environment = {**python_environment(), "GPU_TESTS_ON": options.device}
    if part.name in ("machine", "doctor"):  # they decode
        environment["DALI_NVIMGCODEC_LOG_LEVEL"] = "4"
    begin = time.monotonic()
    with files["out"].open("w") as out, files["err"].open("w") as errors:
        arguments: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=errors, **arguments)
        try:
            status = process.wait(limit_s)
            ended = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            state = "done" if status == 0 else f"FAILED {ended}"
        except subprocess.TimeoutExpired:
            state = "FAILED: out of time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = re.sub(r"\x1b\[[\d;]*m", "", files["err"].read_text(errors="replace")).splitlines()
    said = list(dict.fromkeys(filter(NOTABLE.search, said))) if state == "done" else said[-40:]
    rounds = [json.loads(line) for line in files["jsonl"].read_text().splitlines()] if files["jsonl"].exists() else []
    output = "\n".join([files["out"].read_text(errors="replace").strip(), *said]).strip()
    line: dict[str, Any] = {"part": part.name, "state": state, "seconds": round(time.monotonic() - begin, 1)}
    line |= {"command": part.command, "output": output}
    for directory in filter(None, (options.work, options.copy, REPOSITORY, Path(sys.prefix))):  # of this machine alone
        shortened = {name: line[name].replace(f"{directory}/", "") for name in ("command", "output")}
        line |= {name: text.replace(str(directory), ".") for name, text in shortened.items()}
    return {**line, "date": date.today().isoformat(), "commit": options.commit, "rounds": rounds}


def write_report(options: argparse.Namespace, report: Path, results: Results) -> None:
    report.parent.mkdir(parents=True, exist_ok=True)
    header = f"{describe_machine()}\ncommit {options.commit}{', a rehearsal' if options.quick else ''}"
    if options.device == "cuda":
        header += f"\n{_described_by_driver()}\nCUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    write_lines(report.with_suffix(".jsonl"), [{"header": header}, *results.values()])
    states = [
        f"| {name} | {line['state']} | {line['seconds']:.0f} | {line.get('date')}, {str(line.get('commit'))[:7]} |"
        for name, line in results.items()
    ]
    text = [f"# {report.stem}", header, "\n".join(goal_table(results, rehearsal=options.quick))]
    text.append("\n".join(["| part | state | s | |", "|---|---|---|---|", *states]))
    for name, line in results.items():
        text += [f"## {name}", indented(line["command"]), indented(line["output"])]
    report.write_text("\n\n".join(filter(None, text)) + "\n")
    if options.copy is not None:
        options.copy.mkdir(parents=True, exist_ok=True)
        for file in (report, report.with_suffix(".jsonl")):
            shutil.copy(file, options.copy)


def _described_by_driver() -> str:
    """Return name, driver, memory, power and clock of each GPU; in a container without nvidia-smi the name alone."""
    fields = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    if shutil.which("nvidia-smi") is None:
        return f"{torch.cuda.get_device_name()}, no nvidia-smi here"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def report_path(options: argparse.Namespace) -> Path:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")
    stem = f"{date.today().isoformat()}-gpu-{name}"
    if options.minutes:  # its parts are spread over days
        stem = max(
            (file.stem for place in (options.out, MEASUREMENTS) for file in place.glob(f"*-gpu-{name}.jsonl")),
            default=stem,
        )
    return Path(options.out / f"{stem}.md")


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


# ---------------------------------------------------------------------------------------------------------------- goals


def rate(results: Results, part: str, contender: str = REAL) -> float | None:
    """Return the images/s of a contender of tools/bench_step.py, by the median of its rounds."""
    rounds = results.get(part, {}).get("rounds", [])
    seconds = [line["step_s"] for line in rounds if line.get("contender") == contender and not line.get("kernels")]
    return rounds[0]["global_batch"] / median(seconds) if seconds else None


def goal_table(results: Results, *, rehearsal: bool) -> list[str]:
    """Return a table of what one H200 should reach beside what was measured, as lines of Markdown."""
    mfu = rate(results, "step-b16")
    if mfu is not None:
        start = results["step-b16"]["rounds"][0]
        mfu *= start["flops_per_image"] / start["peak_flops_per_second"]

    def lowest(of: str, to: str) -> float | None:
        pairs = [(rate(results, part, of), rate(results, part, to)) for part in results]
        return min((a / b for a, b in pairs if a is not None and b is not None), default=None)

    contenders = {str(line.get("contender")) for line in results.get("step-vit5-s", {}).get("rounds", [])}
    vit5 = [rate(results, "step-vit5-s", name) for name in contenders if name.startswith(REAL)]  # also with CUDA graphs

    goals = (
        ("ViT-B/16, share of the dense peak (MFU)", 0.5, mfu),
        ("ViT-5-S, images/s", 4_849, max(filter(None, vit5), default=None)),
        ("ViT-B/32, images/s from 256 px", 15_000, rate(results, "step-b32-stored-256")),
        ("ViT-B/32, images/s from originals", 8_000, rate(results, "step-b32-original")),
        # An estimate for torch's own kernels; MLPerf's submissions fuse convolutions with norms and reach 7,950.
        ("ResNet-50, images/s from originals", 3_400, rate(results, "step-r50-original")),
        ("images/s with real / synthetic data, the lowest", 0.98, lowest(REAL, SYNTHETIC)),
        # The inverse of step over compute step, of which nvSubquadratic's log has 1.13 to 1.72.
        ("images/s with real data / of a bare loop, the lowest", 1 / 1.1, lowest(REAL, BARE)),
    )
    lines = ["| goal | at least | measured | |", "|---|---|---|---|"]
    for name, least, value in goals:
        verdict = (
            "not measured" if value is None else "rehearsal" if rehearsal else "met" if value >= least else "not met"
        )
        lines.append(f"| {name} | {least:,g} | {'' if value is None else f'{value:,.4g}'} | {verdict} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
