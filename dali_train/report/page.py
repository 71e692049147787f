"""One self-contained HTML page: pictures inline, no script, nothing fetched."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dali_train.report.bound import what_bounds
from dali_train.report.figures import draw_all
from dali_train.report.runs import ReportedRun, differences, load_run
from dali_train.text import duration, plural, printable
from dali_train.training.events import best_evaluation, decisive

NUM_WRONG = 24
"""Wrong answers that the page shows."""
_SECTIONS = {
    "Accuracy and loss": ("accuracy", "loss"),
    "Time": ("throughput", "step-time", "time"),
    "Optimization": ("learning-rate", "gradient-norm", "loss-scale", "trust-ratio"),
    "Memory and GPU": ("memory", "gpu"),
    "Measured by hooks": ("measured",),
    "Classes": ("confusion", "classes"),
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; max-width: 1280px;
       padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; border-bottom: 1px solid #ddd; }
.bound { background: #f2f6fa; border-left: 4px solid #0072B2; padding: .6rem .9rem; margin: .6rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 1.2rem;
           align-items: start; }
.figures img { width: 100%; max-width: 640px; } .samples { width: 100%; max-width: 946px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
tbody th { font-weight: normal; color: #555; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; } thead + tbody td { min-width: 9rem; }
.wrong { display: grid; grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); gap: .8rem;
  font-size: .8rem; line-height: 1.3; }
.wrong img { width: 96px; height: 96px; object-fit: contain; image-rendering: auto; background: #f6f6f6;
             display: block; }
.pixels img { image-rendering: pixelated; } pre { font-size: .8rem; overflow-x: auto; } details { margin: 1rem 0; }
footer { color: #777; font-size: .85rem; margin: 2rem 0; }
"""


def write_report(directories: Sequence[Path], output: Path) -> Path:
    """Write ``output/index.html`` and the pictures beside it; returns the page.

    Raises:
        ConfigError: a directory holds no run.
    """
    runs = [load_run(directory) for directory in directories]
    output.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, str] = {}
    for name, png in draw_all(runs).items():
        (output / f"{name}.png").write_bytes(png)
        pictures[name] = _inline(png)
    page = output / "index.html"
    page.write_text(_page(runs, pictures))
    return page


def _page(runs: list[ReportedRun], pictures: dict[str, str]) -> str:
    title = " · ".join(run.name for run in runs)
    parts = [f"<h1>{_escape(title)}</h1>"]
    for run in runs:
        name = f"<b>{_escape(run.name)}:</b> " if len(runs) > 1 else ""
        parts.append(f'<p class="bound">{name}{_escape(what_bounds(run))}</p>')
    parts.append(_facts_table(runs))
    for heading, names in _SECTIONS.items():
        shown = [name for name in names if name in pictures]
        if shown:
            images = "".join(f'<img src="{pictures[name]}" alt="{name.replace("-", " ")}">' for name in shown)
            parts.append(f'<h2>{heading}</h2><div class="figures">{images}</div>')
    if len(runs) > 1:
        parts.append("<h2>Settings that differ</h2>" + _differences_table(runs))
    for run in runs:
        suffix = f": {_escape(run.name)}" if len(runs) > 1 else ""
        parts += _confused(run, suffix) + _wrong_answers(run, suffix) + _samples(run, suffix)
    for run in runs:
        config, environment = _escape(run.config.to_json(), "\n"), _escape(json.dumps(run.environment, indent=1), "\n")
        parts.append(
            f"<details><summary>Config and environment of {_escape(run.name)}</summary>"
            f"<pre>{config}</pre><pre>{environment}</pre></details>"
        )
    parts.append(
        "<footer>Written by <code>dali-train report</code>. Dotted vertical lines: the run was resumed.</footer>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{chr(10).join(parts)}</body></html>\n"
    )


def _facts_table(runs: list[ReportedRun]) -> str:
    facts = [_facts(run) for run in runs]
    heads = [run.name for run in runs] if len(runs) > 1 else []
    return _table(heads, ((name, [fact[name] for fact in facts]) for name in facts[0]))


def _facts(run: ReportedRun) -> dict[str, str]:
    config, environment, last = run.config, run.environment, run.events[-1]
    throughput, step = run.median("images_per_second"), run.median("step_s")
    seconds = run.phase_seconds()
    epoch = min(last["epoch"], config.run.epochs)  # the last step may go beyond: all steps have the same size
    return {
        "state": f"{run.state} at epoch {epoch:.2f} of {config.run.epochs:g} (step {last['step']:,})",
        "best top-1": _best(run),
        "last training loss": f"{run.train[-1]['loss']:.4f}" if run.train else "none yet",
        "throughput": "none yet"
        if throughput is None or step is None
        else f"{throughput:,.0f} images/s, {duration(step)} per step",
        "time": f"{duration(sum(seconds.values()))}, of it evaluation {duration(seconds['evaluation_s'])}, "
        f"checkpoints {duration(seconds['checkpoint_s'])}",
        "first step": _first_steps(run),
        "model": f"{config.model.name}, {config.precision.dtype}",
        "batch": f"{config.batch.global_batch} images, micro-batches of {config.batch.micro_batch}",
        "data": config.data.root,
        "hardware": f"{environment.get('world_size', 1)} x {environment.get('device', '?')}",
        "versions": ", ".join(
            f"{name} {environment[name]}" for name in ("python", "torch", "dali", "timm") if name in environment
        ),
    }


def _best(run: ReportedRun) -> str:
    """Describe the evaluation by which the best checkpoint is chosen; with a moving average of the weights, its own."""
    best, published = best_evaluation(run.events), run.config.run.published_top1
    if best is None:
        return "no evaluation yet"
    which, raw = (
        (" of the EMA of the weights", f" (without EMA {best['top1']:.2%})") if "ema_top1" in best else ("", "")
    )
    return (
        f"{decisive(best, 'top1'):.2%}{which} (top-5 {decisive(best, 'top5'):.2%}) at epoch {best['epoch']:.2f}{raw}, "
        f"{plural(best['num_images'], 'image')}{f'; published {published:.2%}' if published is not None else ''}"
    )


def _first_steps(run: ReportedRun) -> str:
    """Describe what the means leave out: building, compiling, and the first step of each process."""
    startups = [event["startup_s"] for event in run.events if event["event"] == "start"]
    firsts = [event["first_step_s"] for event in run.train if "first_step_s" in event]
    if not startups or not firsts:
        return "none yet"
    times = f" (started {len(startups)} times, the last)" if len(startups) > 1 else ""
    compiling = " and compile" if run.config.model.compile != "none" else ""
    return f"{duration(firsts[-1])}, after {duration(startups[-1])} to build{compiling}{times}"


def _differences_table(runs: list[ReportedRun]) -> str:
    rows = ((name, [json.dumps(value) for value in values]) for name, values in differences(runs))
    return _table([run.name for run in runs], rows) or "<p>None.</p>"


def _confused(run: ReportedRun, suffix: str) -> list[str]:
    pairs = run.tables.pairs[:20]
    if not pairs:
        return []
    rows = ((f"{pair.truth} taken for {pair.guess}", [pair.images]) for pair in pairs)
    return [f"<h2>Most confused classes{suffix}</h2>", _table(["images"], rows)]


def _wrong_answers(run: ReportedRun, suffix: str) -> list[str]:
    rows = run.tables.predictions
    wrong = [row for row in rows if row.truth != row.guess]
    if not wrong:
        return []
    tiles = []
    for row in wrong[:NUM_WRONG]:
        path = run.directory / "predictions" / "images" / f"{row.image}.png"
        image = f'<img src="{_inline(path.read_bytes())}" alt="validation image {row.image}">' if path.is_file() else ""
        truth, guess = _escape(row.truth), _escape(row.guess)
        tiles.append(f"<div>{image}<b>{truth}</b>, guessed {guess} ({row.score:.0%})</div>")
    heading = (
        f"<h2>Wrong answers{suffix}</h2><p>{len(wrong)} of {plural(len(rows), 'image')} in the table of "
        "predictions.</p>"
    )
    small = " pixels" if run.is_small() else ""
    return [heading, f'<div class="wrong{small}">{"".join(tiles)}</div>']


def _samples(run: ReportedRun, suffix: str) -> list[str]:
    path = run.directory / "samples.png"
    if not path.is_file():
        return []
    heading = f"<h2>Training images as the network sees them{suffix}</h2>"
    return [
        heading,
        f'<img class="samples" src="{_inline(path.read_bytes())}" alt="training images after augmentation">',
    ]


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> str:
    body = "".join(
        f"<tr><th>{_escape(name)}</th>" + "".join(f"<td>{_escape(str(value))}</td>" for value in values) + "</tr>"
        for name, values in rows
    )
    head = f"<thead><tr><th></th>{''.join(f'<th>{_escape(text)}</th>' for text in heads)}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>' if body else ""


def _escape(text: str, keep: str = "") -> str:
    return html.escape(printable(text, keep=keep))


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
