"""One self-contained HTML page with data, scripts and pictures, which fetches nothing."""

import base64
import hashlib
import html
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from dali_train.checkpoint.run_directory import LIBRARIES
from dali_train.config import HooksConfig
from dali_train.data.dataset.index import kind_of_dataset
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.report.charts import ALL_FIELDS, PHASE_NAMES, STEP_FIELDS, Chart, chart_data, sections
from dali_train.extras.report.runs import ReportedRun, by_dataset, differences, find_runs, load_run
from dali_train.files import read_limited, write_atomically
from dali_train.hooks import Hook
from dali_train.parallel.layout import Layout
from dali_train.runtime.status import best_evaluation, decisive
from dali_train.runtime.status import goodput as goodput_of
from dali_train.text import duration, plural, printable, shortened
from dali_train.training.schedule import describe_peak

# ------------------------------------------------------------------------------------------------ pieces of HTML

_LARGEST_PICTURE = 20_000_000  # bytes; a run's have at most 3 MB


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def escape(value: Any, keep: str = "") -> str:
    """Escape `value` for HTML, between tags or in quotes, and remove control characters other than `keep`."""
    return value if isinstance(value, Markup) else html.escape(printable(str(value), keep=keep))


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """Return a table whose first column is a head, and which scrolls sideways if it is too wide; empty without rows."""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    if not body:
        return ""
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded(heading: str, content: str, *, is_open: bool = False) -> str:
    """Return `content` below a heading that opens and closes it; empty without content."""
    if not content:
        return ""
    return f"<details{' open' if is_open else ''}><summary>{escape(heading)}</summary>{content}</details>"


def live(identity: str, content: str) -> str:
    """Return a part that page.js updates if the page is served during the run."""
    return f'<div id="{identity}" data-live>{content}</div>'


def picture(path: Path, description: str, kind: str = "") -> str:
    """Return a PNG file as part of the page; empty if it is missing, unreadable or too large."""
    try:
        content = base64.b64encode(read_limited(path, _LARGEST_PICTURE)).decode()
    except OSError:
        return ""
    return f'<img class="{kind}" src="data:image/png;base64,{content}" alt="{escape(description)}">'


# ------------------------------------------------------------------------------------------------ the page

_STATIC = files("dali_train.extras.report") / "static"
_PHASE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
_FOLDED = ("Machine",)
_MOST_FOREIGN = 5  # lines of a metrics.jsonl that are named
logger = logging.getLogger("dali_train")
_CONTROLS = """
<div class="controls"><label>over <select id="x"><option>epoch</option><option>step</option><option>time</option>
</select></label> <label>smooth <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<span class="hint">Drag over a chart to zoom, double-click to see all; click a name to hide its curve.</span></div>
"""


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Write ``index.html`` into `output` and return its path: the page of one run, or a comparison of several.

    Args:
        directories: run directories, or folders of them.
        output: a directory; by default report/ in the run, or comparison/ next to several runs.

    Raises:
        ConfigError: a directory holds no run.
    """
    runs = [load_run(directory, name) for name, directory in find_runs(directories).items()]
    if output is None and len(runs) == 1:
        output = runs[0].directory / "report"
    elif output is None:
        output = Path(os.path.commonpath([run.directory.resolve().parent for run in runs])) / "comparison"
    for run in runs:
        for line in run.foreign_lines[:_MOST_FOREIGN]:
            logger.warning(line)
    write_atomically(output / "index.html", page(runs).encode())
    return output / "index.html"


def page(runs: list[ReportedRun], *, refresh_s: int = 0) -> str:
    """Return the page of one run, or of several, in the order of `by_dataset`.

    Args:
        refresh_s: seconds between refreshes of a served page; 0 for a file.
    """
    if len(runs) == 1:
        (run,) = runs
        parts = [live("bound", f'<p class="bound">{escape(what_bounds(run))}</p>'), live("facts", _facts_list(run))]
        return document(run.name, [run], parts, refresh_s)
    runs = [run for group in by_dataset(runs).values() for run in group]
    parts = [live("overview", overview(runs))]
    bounds = "".join(f'<p class="bound"><b>{escape(run.name)}:</b> {escape(what_bounds(run))}</p>' for run in runs)
    rows = ((name, *map(_plain, values)) for name, values in differences(runs))
    different = table(["setting", *(run.name for run in runs)], rows) or "<p>None.</p>"
    parts += [
        folded("What bounds them", live("bound", bounds)),
        folded("Settings that differ", different, is_open=True),
    ]
    return document(" · ".join(run.name for run in runs), runs, parts, refresh_s)


def document(
    title: str, runs: list[ReportedRun], head: list[str], refresh_s: int = 0, *, with_answers: bool = True
) -> str:
    """Return a page with `head`, then the charts of `runs`, then their tables of classes and images."""
    head = [*head, *(_foreign(run) for run in runs)]
    headed = sections(runs)
    charts = [chart for group in headed.values() for chart in group]
    parts = [f"<h1>{escape(shortened(title, 120))}</h1>", *head, _CONTROLS if charts else ""]
    for heading, group in headed.items():
        figures = f'<div class="row">{"".join(map(_figure, group))}</div>'
        shut = heading in _FOLDED or len(group) > 6
        parts.append(folded(heading, figures) if shut else f"<h2>{heading}</h2>{figures}")
        if heading == "Speed":
            parts.append(live("bars", _time_bars(runs)))
    for number, run in enumerate(runs if with_answers else []):
        texts = (run.config.to_json(), json.dumps(run.environment, indent=1))
        settings = "".join(f"<pre>{escape(text, keep=chr(10))}</pre>" for text in texts)
        tables = live(f"answers{number}", answers(run)) + folded("Config and environment", settings)
        parts.append(tables if len(runs) == 1 else folded(run.name, tables))
    parts.append(
        "<footer>Written by <code>dali-train report</code>. Dotted vertical lines: the run was resumed.</footer>"
    )
    # A script ends at the first "</script", also within a text; no other character of JSON has a meaning in HTML.
    data = json.dumps(chart_data(runs, charts)).replace("<", "\\u003c")
    scripts = [f"/*\n{_static('uPlot.LICENSE.txt')}*/\n{_static('uPlot.iife.min.js')}", _static("page.js")]
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; connect-src 'self'; script-src {allowed}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_static('uPlot.min.css')}{_static('page.css')}</style></head>\n"
        f'<body data-refresh="{refresh_s}">{chr(10).join(parts)}\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"{''.join(f'<script>{text}</script>' for text in scripts)}</body></html>\n"
    )


def _foreign(run: ReportedRun) -> str:
    """Name the damaged lines of a run's metrics, which no curve shows."""
    lines = run.foreign_lines
    more = f" (and {len(lines) - _MOST_FOREIGN:,} more)" if len(lines) > _MOST_FOREIGN else ""
    return f'<p class="bound">{escape("; ".join(lines[:_MOST_FOREIGN]))}{more}</p>' if lines else ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _figure(chart: Chart) -> str:
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)} <span>{escape(chart.unit)}</span>'
        '<label><input type="checkbox"> log</label></figcaption></figure>'
    )


# ------------------------------------------------------------------------------------------------ facts


def overview(runs: list[ReportedRun], name: Callable[[ReportedRun], str] = lambda run: run.name) -> str:
    """Return a table with a row per run; one table for each dataset.

    Args:
        name: what stands in a run's first cell.
    """
    heads = ("run", "best top-1", "at epoch", "top-5", "training loss", "epoch", "state", "images/s", "time", "model")
    tables = {
        root: table([*heads, "batch", "data"], ((name(run), *_overview_row(run)) for run in group), "wide")
        for root, group in by_dataset(runs).items()
    }
    if len(tables) == 1:
        return next(iter(tables.values()))
    return "".join(f"<h3>{escape(shortened(root, 120))}</h3>{text}" for root, text in tables.items())


def _overview_row(run: ReportedRun) -> list[str]:
    best, rate, last = (
        best_evaluation(run.events, run.config.run.best_by),
        run.median("images_per_second"),
        run.events[-1],
    )
    of_ema = " (EMA)" if best is not None and "ema_top1" in best else ""
    return [
        "-" if best is None else f"{decisive(best, 'top1'):.2%}{of_ema}",
        "-" if best is None else f"{best['epoch']:.2f}",
        "-" if best is None else f"{decisive(best, 'top5'):.2%}",
        f"{run.train[-1]['loss']:.4f}" if run.train else "-",
        _epochs(run),
        shortened(run.state, 60),
        "-" if rate is None else f"{rate:,.0f}",
        duration(run.seconds_at(last["step"])),
        run.config.model.name,
        str(run.config.batch.global_batch),
        shortened(run.config.data.root, 40),
    ]


def _facts_list(run: ReportedRun) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(run).items())
    return f'<dl class="facts">{rows}</dl>'


def _facts(run: ReportedRun) -> dict[str, str]:
    config, environment, last = run.config, run.environment, run.events[-1]
    throughput, step = run.median("images_per_second"), run.median("step_s")
    seconds, goodput = run.phase_seconds(), goodput_of(run.events)
    return {
        "state": f"{run.state} at epoch {_epochs(run)} (step {last['step']:,})",
        "best top-1": _best(run),
        "training loss": f"{run.train[-1]['loss']:.4f} at step {run.train[-1]['step']:,}" if run.train else "none yet",
        "throughput": "none yet"
        if throughput is None or step is None
        else f"{throughput:,.0f} images/s, {duration(step)} per step",
        "time": f"{duration(sum(seconds.values()))} (evaluation: {duration(seconds['evaluation_s'])}, checkpoints: "
        f"{duration(seconds['checkpoint_s'])})",
        "first step": _first_steps(run),
        "goodput": goodput.describe() if goodput is not None else "not known",
        **_energy(run),
        "model": f"{config.model.name}, {config.precision.dtype}",
        "learning rate": describe_peak(config),
        "optimizer": _optimizer(run),
        "batch": f"{config.batch.global_batch} images, micro-batches of {config.batch.micro_batch}",
        "data": _data(run),
        "hardware": f"{environment.get('world_size', 1)} x {environment.get('device', '?')}",
        "versions": ", ".join(
            f"{name} {environment[name]}" for name in ("python", *map(str.lower, LIBRARIES)) if name in environment
        ),
    }


def _energy(run: ReportedRun) -> dict[str, str]:
    """Return the energy of a run's GPUs as a fact; nothing where their power is not known."""
    gpu_w = run.median("gpu_power_w")
    if gpu_w is None:
        return {}
    ranks = int(run.environment.get("world_size", 1))
    kilowatt_hours = gpu_w * ranks * sum(run.phase_seconds().values()) / 3.6e6
    others = f", if all {ranks} do as that of rank 0" if ranks > 1 else ""
    text = f"about {kilowatt_hours:,.3g} kWh: by NVML the GPU draws {gpu_w:,.0f} W{others}"
    return {"energy": f"{text}; median, without the hosts"}


def _data(run: ReportedRun) -> str:
    """Name the dataset, or its sources with what the run has had of each, where they are here."""
    data = run.config.data
    with suppress(ConfigError, DatasetError, OSError):
        if (kind := kind_of_dataset(data)) is not None:
            return "; ".join(kind.describe_uses(run.config, run.events[-1]["step"]))
    return "; ".join(f"{name}: {root}" for name, root in data.sources.items()) or data.root


def _optimizer(run: ReportedRun) -> str:
    """Describe the optimizer with every argument that timm and its own defaults add; old runs recorded none."""
    arguments = run.environment.get("optimizer")
    shown = arguments.items() if isinstance(arguments, dict) else ()
    parts = [f"{name} {_plain(value)}" for name, value in shown if value is not None and name != "lr"]
    return f"{run.config.optimizer.name}{': ' if parts else ''}{', '.join(parts)}"


def _epochs(run: ReportedRun) -> str:
    """Return the progress of a run. The last step may go beyond the last epoch, since all steps have the same size."""
    return f"{min(run.events[-1]['epoch'], run.config.run.epochs):.2f} of {run.config.run.epochs:g}"


def _best(run: ReportedRun) -> str:
    """Describe the evaluation by which the best checkpoint is chosen: the moving average's, if the run has one."""
    best, published = best_evaluation(run.events, run.config.run.best_by), run.config.run.published_top1
    if best is None:
        return "no evaluation yet"
    which, raw = (
        (" of the EMA of the weights", f" (without EMA {best['top1']:.2%})") if "ema_top1" in best else ("", "")
    )
    balanced = decisive(best, "balanced_top1") if "balanced_top1" in best else decisive(best, "top1")
    num_views = best.get("num_views", 1)
    views = f", the mean of {num_views} views of each" if num_views > 1 else ""
    mean_ap = f", mAP {decisive(best, 'mean_ap'):.2%}" if "mean_ap" in best else ""
    mean = f", mean over classes {balanced:.2%}" if abs(balanced - decisive(best, "top1")) > 5e-5 else ""
    return (
        f"{decisive(best, 'top1'):.2%}{which} (top-5 {decisive(best, 'top5'):.2%}{mean}{mean_ap}) at epoch "
        f"{best['epoch']:.2f}{raw}, {plural(best['num_images'], 'image')}{views}"
        f"{f'; published {published:.2%}' if published is not None else ''}"
    )


def _first_steps(run: ReportedRun) -> str:
    """Describe the times that the means leave out: building, compiling, and the first step of each process."""
    startups = [event["startup_s"] for event in run.events if event["event"] == "start"]
    firsts = [event["first_step_s"] for event in run.train if "first_step_s" in event]
    if not startups or not firsts:
        return "none yet"
    times = f" (started {len(startups)} times, the last)" if len(startups) > 1 else ""
    compiling = " and compile" if run.config.model.compile != "none" else ""
    return f"{duration(firsts[-1])}, after {duration(startups[-1])} to build{compiling}{times}"


# ------------------------------------------------------------------------------------------------ bars of time


def _time_bars(runs: list[ReportedRun]) -> str:
    """Return a median step and the complete run as bars of their phases, a bar per run."""
    runs = [run for run in runs if run.median("forward_s") is not None]
    if not runs:
        return ""
    steps = _bars(runs, STEP_FIELDS, lambda run: {field: run.median(field) or 0.0 for field in STEP_FIELDS})
    complete = _bars(runs, ALL_FIELDS, ReportedRun.phase_seconds)
    return (
        f'<div class="row"><figure><figcaption>A step (median)</figcaption>{steps}</figure>'
        f"<figure><figcaption>The complete run</figcaption>{complete}</figure></div>"
    )


def _bars(runs: list[ReportedRun], fields: Sequence[str], seconds_of: Callable[[ReportedRun], dict[str, float]]) -> str:
    colours = dict(zip(ALL_FIELDS, _PHASE_COLOURS, strict=True))
    seconds = [seconds_of(run) for run in runs]
    longest = max(sum(each.values()) for each in seconds) or 1.0
    rows = []
    for run, each in zip(runs, seconds, strict=True):
        pieces = "".join(
            f'<i style="width: {100 * each[field] / longest:.2f}%; background: {colours[field]}" '
            f'title="{PHASE_NAMES[field]} {duration(each[field])}"></i>'
            for field in fields
        )
        name = shortened(run.name, 30) if len(runs) > 1 else ""
        total = duration(sum(each.values()))
        rows.append(f'<span>{escape(name)}</span><div class="bar">{pieces}</div><span>{total}</span>')
    shown = [field for field in fields if any(each[field] > 0.005 * longest for each in seconds)]
    key = "".join(f'<span><i style="background: {colours[field]}"></i>{PHASE_NAMES[field]}</span>' for field in shown)
    return f'<div class="bars">{"".join(rows)}</div><p class="key">{key}</p>'


# ------------------------------------------------------------------------------------------------ classes and images

NUM_WRONG, NUM_WORST, NUM_PAIRS = 24, 20, 20
"""How many wrong predictions, classes and pairs of classes the page shows."""
_NAME = 40  # characters of a class


def answers(run: ReportedRun) -> str:
    """Return the sections for which the run has tables."""
    side_by_side = "".join(f"<section>{part}</section>" for part in (_worst(run), _confusion(run), _pairs(run)) if part)
    return (
        folded("Classes", f'<div class="row">{side_by_side}</div>' if side_by_side else "", is_open=True)
        + folded("Wrong answers", _wrong(run))
        + folded("Training images as the network sees them", _samples(run))
    )


def _worst(run: ReportedRun) -> str:
    rows = [row for row in run.tables.classes if row.images]
    worst = sorted(rows, key=lambda row: row.accuracy)[:NUM_WORST]
    cells = (
        (
            shortened(row.name, _NAME),
            row.images,
            Markup(f'<span class="meter"><i style="width: {100 * row.accuracy:.1f}%"></i></span>'),
            f"{row.accuracy:.1%}",
        )
        for row in worst
    )
    name = "class" if len(worst) == len(rows) else f"{NUM_WORST} classes with the lowest accuracy"
    average = " of the EMA" if _of_average(run) else ""
    measure = "average precision" if any(row.measure == "average precision" for row in worst) else "top-1"
    return table((name, "images", f"{measure}{average}", ""), cells, "wide")


def _of_average(run: ReportedRun) -> bool:
    """Return whether the tables are of the moving average of the weights."""
    return any(row.weights == "moving average" for row in run.tables.classes)


def _confusion(run: ReportedRun) -> str:
    counts, names = run.tables.confusion, [shortened(name, _NAME) for name in run.tables.confusion_classes]
    if not names:
        return ""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(map(_cell, row.tolist(), row_shares.tolist()))}</tr>"
        for name, row, row_shares in zip(names, counts, shares, strict=True)
    )
    return (
        f'<div class="scroll"><table class="confusion"><thead><tr><th>truth, and the predictions</th>{heads}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(count: int, share: float) -> str:
    dark = ' class="dark"' if share > 0.55 else ""
    return f'<td{dark} style="--share: {share:.3f}">{count or ""}</td>'


def _pairs(run: ReportedRun) -> str:
    pairs = run.tables.pairs[:NUM_PAIRS]
    rows = ((pair.truth, pair.predicted, pair.images) for pair in pairs)
    return table(("most confused", "taken for", "images"), rows)


def _wrong(run: ReportedRun) -> str:
    rows = run.tables.predictions
    wrong = [row for row in rows if row.truth != row.predicted]
    if not wrong:
        return ""
    tiles = []
    for row in wrong[:NUM_WRONG]:
        image = picture(run.directory / "predictions" / "images" / f"{row.image}.png", f"validation image {row.image}")
        name = f"<br><small>{escape(shortened(row.file, _NAME))}</small>" if row.file else ""
        tiles.append(
            f"<div>{image}<b>{escape(row.truth)}</b>, taken for {escape(row.predicted)} ({row.score:.0%}){name}</div>"
        )
    small = " pixels" if run.is_small() else ""
    average = " by the EMA of the weights" if _of_average(run) else ""
    return (
        f"<p>{len(wrong)} of {plural(len(rows), 'image')} in the table of predictions{average}.</p>"
        f'<div class="wrong{small}">{"".join(tiles)}</div>'
    )


def _samples(run: ReportedRun) -> str:
    return picture(run.directory / "samples.png", "training images after augmentation", "samples")


# ------------------------------------------------------------------------------------------------ what bounds a run

LIMITS = {"data_wait_s": 0.10, "exchange_s": 0.15, "optimizer_s": 0.15, "logging_s": 0.03}
"""A phase other than computation with at least this fraction of a step is reported as the bottleneck."""


def what_bounds(run: ReportedRun) -> str:
    """Return a sentence on the bottleneck, from the medians of the logged phases."""
    step = run.median("step_s")
    if not step or run.median("forward_s") is None:
        return "The run has logged no phases yet."
    if all(event.get("first_step_s") == event["step_s"] for event in run.train):
        return "Only the process's first step is logged, in which caches fill: later steps will show the bottleneck."

    share = {phase: (run.median(phase) or 0.0) / step for phase in (*LIMITS, "forward_s", "backward_s")}
    worst = max(LIMITS, key=lambda phase: share[phase] / LIMITS[phase])
    if share[worst] < LIMITS[worst]:
        return (
            f"Computing bounds the run: forward and backward take {share['forward_s'] + share['backward_s']:.0%} of "
            f"the step, waiting for data {share['data_wait_s']:.0%}."
        )
    takes = f"takes {share[worst]:.0%} of the step"
    sentences = {
        "data_wait_s": f"Waiting for data {takes}: {_decoding(run)}",
        "exchange_s": f"The all-reduce of gradients {takes} that the backward pass does not hide: accumulate more "
        "(larger batch.global_batch), or look for a rank that is slower than the others in logs/rank*.log.",
        "optimizer_s": f"The optimizer {takes}: a larger batch.global_batch makes it rarer.",
        "logging_s": f"Logging {takes}: raise hooks.log_every_steps, or turn off hooks that are not needed.",
    }
    return sentences[worst]


def _decoding(run: ReportedRun) -> str:
    smaller = "store the images smaller (dali-train data convert)"
    if run.is_small():  # decoding such images costs little
        smaller = "read from faster storage"
    threads, cores = run.environment.get("decoding_threads"), run.environment.get("host_cores")
    if threads is None or cores is None:
        return f"raise data.num_threads, or {smaller}."
    ranks = max(1, run.environment.get("ranks_on_host", 1))
    here = f"{plural(threads, 'decoding thread')} {'per rank ' if ranks > 1 else ''}on {plural(cores, 'core')}"
    if threads * ranks < cores:
        return f"{here}; raise data.num_threads to {cores // ranks}, or {smaller}."
    return f"{here}, all in use; {smaller}, or give each rank more cores."


def make_hooks(config: HooksConfig, layout: Layout) -> list[Hook]:
    return [Report()] if layout.rank == 0 else []


class Report(Hook):
    """Writes a run's report when the run has ended."""

    def closed(self, directory: Path) -> None:
        write_report([directory])
