"""Everything that is to be measured on a GPU, in parts that survive one another: what `make bench-gpu` runs.

    python -m tools.bench.gpu --archive ILSVRC2012_img_train.tar
    python -m tools.bench.gpu --minutes 30           # and again, while the exit status is 75
    python -m tools.bench.gpu --device cpu --quick   # a rehearsal without a GPU: does every part reach its table?

Each part is a command of its own under its own limit, at most 5 minutes. One that fails or crashes is reported, and the
next begins. Every round is written when it is done, so a part that is cut short keeps what it measured. Datasets are
made once, from --archive or from generated images, and kept in --work.

--minutes 30 and --minutes 45 are for a GPU that is borrowed for so long: what is most worth knowing, in calls of at
most ten minutes. A call begins no part that would not end in it; its exit status is 75 while parts are left. What the
model alone is measured with comes first, since it needs no DALI: tools/bench/pack_gpu.sh's bundle may arrive meanwhile.

Writes DATE-gpu-NAME.jsonl (every round of every part) and DATE-gpu-NAME.md (goals beside what was seen, date, device,
driver, versions, commands and what they printed). Parts that are in the same .jsonl file already, failed ones included,
are not run again without --again.

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
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dali_train.files import git_commit
from tools.bench.goals import Results, goal_table
from tools.bench.gpu_plan import CALL_S, ORDERS, SETS, Part, in_order, plan
from tools.bench.turns import describe_machine, write_lines

REPOSITORY = Path(__file__).parent.parent.parent
UNFINISHED = 75  # exit status: parts are left for another call
CUT = "cut short by --minutes"  # another call repeats it


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
    parts = chosen_parts(options, work)
    again = tuple(options.parts or [""]) if options.again else ()
    waiting = [part for part in parts if part.name.startswith(again) or is_open(part, results.get(part.name))]
    names, left_over = {part.name for part in parts}, list[str]()
    for number, part in enumerate(waiting, start=1):
        left = CALL_S - (time.monotonic() - begin) if options.minutes else float("inf")
        if left < part.expected_s or part.needs in left_over or (part.needs_data and not has_dali()):
            left_over.append(part.name)
            continue
        limit = int(min(part.limit_s, left))
        print(f"[{number}/{len(waiting)}] {part.name}: {part.title}, at most {limit} s", flush=True)
        if part.needs in names and results[part.needs]["state"] != "done":
            result = record(part, work, f"FAILED: not begun, since {part.needs} has not ended well")
        else:
            result = run_part(part, work, limit)
        if limit < part.limit_s and result["state"].startswith(("cut short", "FAILED: not done")):
            result["state"] = CUT
            left_over.append(part.name)
        results[part.name] = result
        print(indented(result["output"]) + f"\n  {result['state']} after {result['seconds']:.0f} s", flush=True)
        write(options, results)  # what was measured is kept, whatever comes
    write(options, results)
    print("\n".join(["", *goal_table(results, rehearsal=options.quick), "", f"report: {report_path(options)}"]))
    if left_over:
        without = "" if has_dali() else "; DALI cannot be imported yet, which all but model-* need"
        print(f"{len(left_over)} parts are left: {', '.join(left_over)}. The same command continues with them{without}")
        return UNFINISHED
    failed = [part.name for part in parts if results[part.name]["state"] != "done"]
    if failed:
        print(f"not done: {', '.join(failed)}. To repeat them: --again --parts {' '.join(failed)}")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETS:
        parser.add_argument(
            f"--{name}", type=Path, metavar="DATASET", help=f"the photographs, {name.replace('-', ' at ')}"
        )
    parser.add_argument(
        "--archive", type=Path, metavar="TAR", help="of ImageNet's training images: makes the sets that are not given"
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
        "--minutes", type=int, choices=list(ORDERS), help="of a GPU in all, in calls of at most ten minutes"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program out without a GPU"
    )
    parser.add_argument("--quick", action="store_true", help="few tiny images, models and rounds: does everything run?")
    return parser.parse_args()


def chosen_parts(options: argparse.Namespace, work: Path) -> list[Part]:
    """What --parts and --minutes ask for, in order, and what that needs."""
    parts = plan(options, work)
    if options.parts:
        return in_order(parts, [part.name for part in parts if part.name.startswith(tuple(options.parts))])
    return in_order(parts, ORDERS[options.minutes].split() if options.minutes else [part.name for part in parts])


def is_open(part: Part, result: dict[str, Any] | None) -> bool:
    """Whether it is still to be run."""
    return result is None or result["state"] == CUT or (part.makes is not None and not part.makes.exists())


def has_dali() -> bool:
    try:
        return find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


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
    seconds = time.monotonic() - begin
    return record(part, work, state, seconds=seconds, output=output, rounds=measured)


def record(
    part: Part, work: Path, state: str, *, seconds: float = 0.0, output: str = "", rounds: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a part's line of the report."""
    return {
        "part": part.name,
        "title": part.title,
        "command": relative(shlex.join(["python", *part.words]), work),
        "state": state,
        "seconds": round(seconds, 1),
        "output": relative(output.strip(), work),
        "rounds": list(rounds),
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
    text = [f"# {device_name(options)}, {date.today().isoformat()}", header, "    python -m tools.bench.gpu"]
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
