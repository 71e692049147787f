"""The pictures of a report: pure functions from runs to matplotlib figures, drawn to be read at half a screen's
width."""

import io
import warnings
from collections.abc import Callable, Iterable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from dali_train.report.runs import ReportedRun
from dali_train.text import printable, shortened
from dali_train.training.events import OUTSIDE_PHASES, STEP_PHASES, Event

# Okabe and Ito's palette, which colour-blind readers can distinguish too: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PHASE_COLOURS = ("#D55E00", "#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#E69F00", "#F0E442")
STEP_FIELDS, ALL_FIELDS = tuple(STEP_PHASES.values()), (*STEP_PHASES.values(), *OUTSIDE_PHASES.values())
PHASE_COLOURS = dict(zip(ALL_FIELDS, _PHASE_COLOURS, strict=True))
SIZE = (5.4, 3.3)  # inches: 10 pt is read well at 360 px and at 640 px of width
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
)
# Fields of training lines that have a picture of their own, or that say where a line belongs.
_SHOWN = {
    *("event", "step", "epoch", "loss", "top1", "lr", "grad_norm", "loss_scale", "skipped_steps", "images_per_second"),
    *("mfu", "step_s", "first_step_s", *ALL_FIELDS, "trust_ratio_min", "trust_ratio_median", "trust_ratio_max"),
    *("gpu_memory_gb", "gpu_memory_reserved_gb", "process_memory_gb", "gpu_utilisation"),
}
_MOST_MEASURED = 24
_STYLES = ("solid", "dashed", "dotted")
_TITLE, _LEGEND, _CLASS = 58, 30, 26  # characters that fit in a title, an entry of a legend, beside an axis
STYLE = {
    "font.size": 10,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 180,
    "figure.constrained_layout.use": True,
}


def phase_name(field: str) -> str:
    """Return ``data_wait_s`` as ``data wait``."""
    return field.removesuffix("_s").replace("_", " ")


def label(text: str, length: int) -> str:
    """Return the name of a run or a class as plain text for matplotlib, to which dollars mean a formula."""
    text = printable(text)
    text = f" {text}" if text.startswith("_") else text  # matplotlib leaves out what begins with an underscore
    return shortened(text, length).replace("$", r"\$")


def draw_all(runs: list[ReportedRun]) -> dict[str, bytes]:
    """Return the pictures for which there is data as PNG files, by name, in the order of the page."""
    losses = {"train/loss": "training", "eval/loss": "evaluation", "eval/ema_loss": "of the EMA"}
    ratios = {f"train/trust_ratio_{name}": f"{name} of the layers" for name in ("median", "min", "max")}
    memories = {
        "train/gpu_memory_gb": "GPU, peak",
        "train/gpu_memory_reserved_gb": "GPU, reserved",
        "train/process_memory_gb": "process on the host",
    }
    drawings: dict[str, Callable[[], Figure | None]] = {
        "accuracy": lambda: accuracy(runs),
        "loss": lambda: curves(runs, "Training loss", "cross-entropy", losses),
        "throughput": lambda: curves(runs, "Throughput", "images/s", {"train/images_per_second": ""}, from_zero=True),
        "step-time": lambda: step_time(runs),
        "time": lambda: run_time(runs),
        "learning-rate": lambda: curves(runs, "Learning rate", "", {"train/lr": ""}, from_zero=True),
        "gradient-norm": lambda: curves(
            runs, "Gradient norm before clipping", "2-norm", {"train/grad_norm": ""}, log=True
        ),
        "loss-scale": lambda: loss_scale(runs),
        "trust-ratio": lambda: curves(runs, "LAMB's trust ratio", "|w| / |r|", ratios, log=True),
        "memory": lambda: curves(runs, "Memory of rank 0", "GB", memories, from_zero=True),
        "gpu": lambda: curves(runs, "GPU utilisation", "", {"train/gpu_utilisation": ""}, percent=True),
        "measured": lambda: measured(runs),
        "confusion": lambda: confusion(runs),
        "classes": lambda: classes(runs),
    }
    installed = {font.name for font in fontManager.ttflist}
    fonts = [name for name in _FONTS if name in installed]
    pictures = {}
    with matplotlib.rc_context({**STYLE, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn in its place
        for name, draw in drawings.items():
            figure = draw()
            if figure is not None:
                pictures[name] = _png(figure)
    return pictures


def axes(title: str, unit: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    # Over the figure, not over the axes: beside wide labels those are too narrow for it.
    figure.suptitle(shortened(title, _TITLE), x=0.01, ha="left")
    ax = figure.add_subplot()
    ax.set_ylabel(unit)
    return figure, ax


def curves(
    runs: list[ReportedRun],
    title: str,
    unit: str,
    series: dict[str, str],
    *,
    log: bool = False,
    from_zero: bool = False,
    percent: bool = False,
) -> Figure | None:
    """Draw curves over the epochs: those of one run in a colour each, those of several runs in a colour per run.

    Args:
        series: ``train/FIELD`` or ``eval/FIELD`` -> its name in the legend; those that no run has are left out.
    """
    present = [key for key in series if any(run.series(key) for run in runs)]
    if not present:
        return None
    several = len(runs) > 1
    others = ", ".join(f"{word}: {series[key]}" for key, word in zip(present[1:], _STYLES[1:], strict=False))
    figure, ax = axes(f"{title} ({others})" if several and others else title, unit)
    for run, run_colour in zip(runs, _colours(runs), strict=True):
        for place, key in enumerate(present):
            colour = run_colour if several else COLOURS[place]
            entry = series[key] if not several else label(run.name, _LEGEND) if place == 0 else "_"
            style = _STYLES[place] if several else "solid"
            _line(ax, run.series(key), key.partition("/")[2], colour, entry, style, marker=key.startswith("eval/"))
    if log:
        ax.set_yscale("log")
        _plain_log_labels(ax)
    elif from_zero and np.isfinite(ax.dataLim.ymax):  # not so where a run has diverged
        ax.set_ylim(0, 1.1 * ax.dataLim.ymax)
    if percent:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, runs, legend=len(present) > 1)
    return figure


def accuracy(runs: list[ReportedRun]) -> Figure | None:
    """Draw the accuracies by which the best checkpoint is chosen, and what others were published with."""
    which = " of the EMA" if len(runs) == 1 and runs[0].has_ema else ""
    series = {"eval/decisive_top1": f"top-1{which}", "eval/decisive_top5": f"top-5{which}"}
    figure = curves(runs, "Validation accuracy", "", {**series, "eval/top1_without_ema": "without EMA"}, percent=True)
    for value in {run.config.run.published_top1 for run in runs}:
        if figure is not None and value is not None:
            ax = figure.axes[0]
            ax.axhline(value, color="#666666", linewidth=1, linestyle=":")
            place = ax.get_yaxis_transform()
            ax.text(0.01, value, f"published top-1 {value:.1%}", transform=place, va="bottom", fontsize=9)
    return figure


def step_time(runs: list[ReportedRun]) -> Figure | None:
    """Draw the phases of one run over the epochs; of several runs, or of a single point, as a bar each."""
    if not any("forward_s" in event for run in runs for event in run.train):
        return None
    longest = max(run.median("step_s") or 0.0 for run in runs)
    unit, factor = ("s per step", 1.0) if longest >= 1 else ("ms per step", 1000.0)
    events = [event for event in runs[0].train if "forward_s" in event]
    if len(runs) > 1 or len(events) == 1:
        return _bars(
            runs,
            "Where a step's time goes (median)",
            STEP_FIELDS,
            lambda run, phase: factor * (run.median(phase) or 0),
            unit,
        )
    figure, ax = axes("Where a step's time goes", unit)
    epochs = [event["epoch"] for event in events]
    heights = [[factor * event.get(phase, 0.0) for event in events] for phase in STEP_FIELDS]
    ax.stackplot(
        epochs,
        heights,
        colors=[PHASE_COLOURS[phase] for phase in STEP_FIELDS],
        labels=[phase_name(p) for p in STEP_FIELDS],
    )
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    _finish(ax, runs, legend=True)
    return figure


def run_time(runs: list[ReportedRun]) -> Figure | None:
    if not any("forward_s" in event for run in runs for event in run.train):
        return None
    totals = {run: run.phase_seconds() for run in runs}
    unit, divisor = _time_unit(max(sum(seconds.values()) for seconds in totals.values()))
    return _bars(
        runs, "Where the complete run's time goes", ALL_FIELDS, lambda run, phase: totals[run][phase] / divisor, unit
    )


def loss_scale(runs: list[ReportedRun]) -> Figure | None:
    """Draw the loss scale where it moves, which is in fp16."""
    if len({event["loss_scale"] for run in runs for event in run.train if "loss_scale" in event}) < 2:
        return None
    return curves(runs, "Loss scale", "", {"train/loss_scale": ""}, log=True)


def measured(runs: list[ReportedRun]) -> Figure | None:
    """Draw whatever hooks measured and no other picture shows, each number on axes of its own."""
    fields = dict.fromkeys(field for run in runs for event in run.train for field in event if field not in _SHOWN)
    names = list(fields)[:_MOST_MEASURED]
    if not names:
        return None
    figure = Figure(figsize=(SIZE[0], 0.6 + 1.3 * len(names)))
    figure.suptitle("Measured by hooks", x=0.01, ha="left")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        for run, colour in zip(runs, _colours(runs), strict=True):
            _line(panel, run.train, name, colour, label(run.name, _LEGEND))
        panel.set_title(label(name, _TITLE), loc="left", fontsize=9)
    panels[-1].set_xlabel("epoch")
    if len(runs) > 1:
        _legend_below(panels[0])
    return figure


def confusion(runs: list[ReportedRun]) -> Figure | None:
    """Draw the confusion matrix of the first run, which there is for up to 20 classes."""
    counts, names = runs[0].tables.confusion, [label(name, 18) for name in runs[0].tables.confusion_classes]
    if not names:
        return None
    size = max(3.4, 0.34 * len(names) + 1.2 + 0.07 * max(map(len, names)))
    figure, ax = axes(_of(runs, "Confusion matrix"), "truth", (size + 0.6, size))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ax.set_xlabel("guess")
    ax.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
    ax.set_yticks(range(len(names)), names)
    ax.grid(False)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = "white" if shares[row, column] > 0.55 else "#222222"
            ax.text(column, row, str(count), ha="center", va="center", fontsize=8, color=colour)
    return figure


def classes(runs: list[ReportedRun]) -> Figure | None:
    """Draw the classes with the lowest accuracy in the first run."""
    rows = [row for row in runs[0].tables.classes if row.images]
    if not rows:
        return None
    worst = sorted(rows, key=lambda row: row.accuracy)[:20]
    title = "Accuracy by class" if len(worst) == len(rows) else f"The {len(worst)} classes with the lowest accuracy"
    figure, ax = axes(_of(runs, title), "", (SIZE[0], 0.9 + 0.24 * len(worst)))
    names = [f"{label(row.name, _CLASS)} ({row.images})" for row in worst]
    places = range(len(worst))  # by place, not by name: two cut names may be the same
    bars = ax.barh(places, [row.accuracy for row in worst], color=COLOURS[0], height=0.7)
    ax.bar_label(bars, [f"{row.accuracy:.0%}" for row in worst], padding=3, fontsize=8)
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_ylabel("class (images)")
    return figure


def _bars(
    runs: list[ReportedRun], title: str, phases: Iterable[str], value: Callable[[ReportedRun, str], float], unit: str
) -> Figure:
    figure, ax = axes(title, "", (SIZE[0], 1.7 + 0.4 * len(runs)))
    left = np.zeros(len(runs))
    for phase in phases:
        widths = np.array([value(run, phase) for run in runs])
        ax.barh(range(len(runs)), widths, left=left, color=PHASE_COLOURS[phase], label=phase_name(phase), height=0.6)
        left += widths
    for row, total in enumerate(left):
        ax.annotate(f" {total:,.0f}" if total >= 100 else f" {total:.3g}", (total, row), va="center", fontsize=9)
    ax.set_yticks(range(len(runs)), [label(run.name, _CLASS) for run in runs] if len(runs) > 1 else [""])
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_xlim(0, left.max() * 1.14 or 1)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return figure


def _line(
    ax: Axes, events: list[Event], field: str, colour: str, entry: str, style: str = "solid", marker: bool = False
) -> None:
    events = [event for event in events if field in event]
    if not events:
        return
    stride = max(1, len(events) // 2000)  # more points than pixels show nothing more
    points = events[::stride]
    marked = len(points) == 1 or (marker and len(points) <= 40)
    ax.plot(
        [event["epoch"] for event in points],
        [event[field] for event in points],
        color=colour,
        label=entry,
        linestyle=style,
        marker="o" if marked else None,
        markersize=3.5,
    )


def _finish(ax: Axes, runs: list[ReportedRun], *, legend: bool = False) -> None:
    ax.set_xlabel("epoch")
    for run, colour in zip(runs, _colours(runs), strict=True):
        for epoch in run.resumed_at:
            ax.axvline(epoch, color=colour, linewidth=0.8, linestyle=":", alpha=0.7)
    if legend or len(runs) > 1:
        _legend_below(ax)
    if ax.get_yscale() == "linear" and not isinstance(ax.yaxis.get_major_formatter(), PercentFormatter):
        ax.yaxis.set_major_locator(MaxNLocator(6))


def _legend_below(ax: Axes) -> None:
    """Put the legend below the axes, where it covers no curve; the figure grows by its rows."""
    handles, entries = ax.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, min(len(handles), int(72 / (max(map(len, entries)) + 7))))  # a row holds about 72 characters
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.legend(handles, entries, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(handles) // columns))


def _plain_log_labels(ax: Axes) -> None:
    """Write 0.1, 1, 10 on a logarithmic axis instead of powers."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(plain)
    low, high = ax.get_ylim()
    ax.yaxis.set_minor_formatter(plain if high / low < 20 else FuncFormatter(lambda value, _: ""))
    ax.tick_params(axis="y", which="minor", labelsize=8)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 120 else ("seconds", 1.0)


def _of(runs: list[ReportedRun], title: str) -> str:
    return f"{title}: {label(runs[0].name, _LEGEND)}" if len(runs) > 1 else title


def _colours(runs: list[ReportedRun]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
