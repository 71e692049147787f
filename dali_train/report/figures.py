"""The pictures of a report: pure functions from runs to matplotlib figures, drawn to be read at half a screen's
width."""

import io
import warnings
from collections.abc import Callable, Iterable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from dali_train.report.runs import Run, read_table
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
    """``data_wait_s`` as people say it."""
    return field.removesuffix("_s").replace("_", " ")


def label(text: str, length: int) -> str:
    """The name of a run or a class as plain text for matplotlib, to which dollars mean a formula."""
    text = printable(text)
    text = f" {text}" if text.startswith("_") else text  # matplotlib leaves out what begins with an underscore
    return shortened(text, length).replace("$", r"\$")


def draw_all(runs: list[Run]) -> dict[str, bytes]:
    """The pictures for which there is data as PNG files, by name, in the order of the page."""
    drawings: dict[str, Callable[[list[Run]], Figure | None]] = {
        "accuracy": accuracy,
        "loss": loss,
        "throughput": lambda runs: curves(runs, "images_per_second", "Throughput", "images/s", from_zero=True),
        "step-time": step_time,
        "time": run_time,
        "learning-rate": lambda runs: curves(runs, "lr", "Learning rate", "", from_zero=True),
        "gradient-norm": lambda runs: curves(runs, "grad_norm", "Gradient norm before clipping", "2-norm", log=True),
        "loss-scale": loss_scale,
        "trust-ratio": trust_ratio,
        "memory": memory,
        "gpu": gpu,
        "confusion": confusion,
        "classes": classes,
    }
    installed = {font.name for font in fontManager.ttflist}
    fonts = [name for name in _FONTS if name in installed]
    pictures = {}
    with matplotlib.rc_context({**STYLE, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn in its place
        for name, draw in drawings.items():
            figure = draw(runs)
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
    runs: list[Run], field: str, title: str, unit: str, *, log: bool = False, from_zero: bool = False
) -> Figure | None:
    """One line per run over the epochs."""
    if not any(field in event for run in runs for event in run.train):
        return None
    figure, ax = axes(title, unit)
    for run, colour in zip(runs, _colours(runs), strict=True):
        _line(ax, run.train, field, colour, label(run.name, _LEGEND))
    if log:
        ax.set_yscale("log")
        _plain_log_labels(ax)
    elif from_zero:
        ax.set_ylim(0, 1.08 * ax.dataLim.ymax)
    _finish(ax, runs)
    return figure


def accuracy(runs: list[Run]) -> Figure | None:
    if not any(run.evaluations for run in runs):
        return None
    figure, ax = axes("Accuracy on the validation images" + (" (dashed: top-5)" if len(runs) > 1 else ""), "")
    for run, colour in zip(runs, _colours(runs), strict=True):
        _line(ax, run.evaluations, "top1", colour, _entry(runs, run, "top-1"), marker=True)
        _line(ax, run.evaluations, "top5", colour, _entry(runs, run, "top-5", main=False), dashed=True, marker=True)
    published = {run.config.get("run", {}).get("published_top1") for run in runs} - {None}
    for value in published:
        ax.axhline(value, color="#666666", linewidth=1, linestyle=":")
        ax.annotate(
            f"published top-1 {value:.1%}",
            (0.01, value),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            fontsize=9,
            color="#444444",
        )
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, runs, legend=True)
    return figure


def loss(runs: list[Run]) -> Figure | None:
    if not any(run.train for run in runs):
        return None
    figure, ax = axes("Training loss" + (" (dashed: evaluation)" if len(runs) > 1 else ""), "cross-entropy")
    for run, colour in zip(runs, _colours(runs), strict=True):
        _line(ax, run.train, "loss", colour, _entry(runs, run, "training"))
        _line(
            ax, run.evaluations, "loss", colour, _entry(runs, run, "evaluation", main=False), dashed=True, marker=True
        )
    _finish(ax, runs, legend=True)
    return figure


def step_time(runs: list[Run]) -> Figure | None:
    """One run: its phases over the epochs. Several, or a single point: a bar per run."""
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


def run_time(runs: list[Run]) -> Figure | None:
    if not any("forward_s" in event for run in runs for event in run.train):
        return None
    totals = {run: run.phase_seconds() for run in runs}
    unit, divisor = _time_unit(max(sum(seconds.values()) for seconds in totals.values()))
    return _bars(
        runs, "Where the complete run's time goes", ALL_FIELDS, lambda run, phase: totals[run][phase] / divisor, unit
    )


def loss_scale(runs: list[Run]) -> Figure | None:
    """Only where it moves: in fp16."""
    if len({event["loss_scale"] for run in runs for event in run.train if "loss_scale" in event}) < 2:
        return None
    return curves(runs, "loss_scale", "Loss scale", "", log=True)


def trust_ratio(runs: list[Run]) -> Figure | None:
    if not any("trust_ratio_median" in event for run in runs for event in run.train):
        return None
    figure, ax = axes("LAMB's trust ratio" + (", median" if len(runs) > 1 else "") + " over the layers", "|w| / |r|")
    for run, colour in zip(runs, _colours(runs), strict=True):
        events = [event for event in run.train if "trust_ratio_median" in event]
        epochs = [event["epoch"] for event in events]
        low, high = ([event[f"trust_ratio_{end}"] for event in events] for end in ("min", "max"))
        if len(runs) == 1:  # those of several runs would lie over one another
            ax.fill_between(
                epochs, low, high, color=colour, alpha=0.15, linewidth=0 if len(events) > 1 else 4, label="min to max"
            )
        _line(ax, events, "trust_ratio_median", colour, _entry(runs, run, "median"), marker=len(events) < 20)
    ax.set_yscale("log")
    _plain_log_labels(ax)
    _finish(ax, runs, legend=True)
    return figure


def memory(runs: list[Run]) -> Figure | None:
    fields = {
        "gpu_memory_gb": "GPU, peak",
        "gpu_memory_reserved_gb": "GPU, reserved",
        "process_memory_gb": "process on the host",
    }
    title = "Memory of rank 0" + (" (dashed: reserved, on the host)" if len(runs) > 1 else "")
    return _several(runs, fields, title, "GB")


def gpu(runs: list[Run]) -> Figure | None:
    return _several(runs, {"gpu_utilisation": "utilisation"}, "GPU utilisation", "", percent=True)


def confusion(runs: list[Run]) -> Figure | None:
    """Of the first run; up to 20 classes have a confusion.csv."""
    newest = runs[0].predictions()
    rows = read_table(newest / "confusion.csv") if newest is not None else []
    if not rows:
        return None
    names = [row["truth"] for row in rows]
    counts = np.array([[int(row[name]) for name in names] for row in rows])
    names = [label(name, 18) for name in names]
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


def classes(runs: list[Run]) -> Figure | None:
    """The classes with the lowest accuracy in the first run."""
    newest = runs[0].predictions()
    rows = [row for row in read_table(newest / "classes.csv") if row["images"] != "0"] if newest is not None else []
    if not rows:
        return None
    worst = sorted(rows, key=lambda row: float(row["accuracy"]))[:20]
    title = "Accuracy by class" if len(worst) == len(rows) else f"The {len(worst)} classes with the lowest accuracy"
    figure, ax = axes(_of(runs, title), "", (SIZE[0], 0.9 + 0.24 * len(worst)))
    names = [f"{label(row['class'], _CLASS)} ({row['images']})" for row in worst]
    places = range(len(worst))  # by place, not by name: two cut names may be the same
    bars = ax.barh(places, [float(row["accuracy"]) for row in worst], color=COLOURS[0], height=0.7)
    ax.bar_label(bars, [f"{float(row['accuracy']):.0%}" for row in worst], padding=3, fontsize=8)
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_ylabel("class (images)")
    return figure


def _several(runs: list[Run], fields: dict[str, str], title: str, unit: str, *, percent: bool = False) -> Figure | None:
    present = [field for field in fields if any(field in event for run in runs for event in run.train)]
    if not present:
        return None
    figure, ax = axes(title, unit)
    for run, colour in zip(runs, _colours(runs), strict=True):
        for number, field in enumerate(present):
            own = COLOURS[number] if len(runs) == 1 else colour
            name = _entry(runs, run, fields[field], main=number == 0)
            _line(ax, run.train, field, own, name, dashed=len(runs) > 1 and number > 0)
    ax.set_ylim(0, 1.15 * ax.dataLim.ymax)
    if percent:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, runs, legend=True)
    return figure


def _bars(runs: list[Run], title: str, phases: Iterable[str], value: Callable[[Run, str], float], unit: str) -> Figure:
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
    ax: Axes, events: list[Event], field: str, colour: str, entry: str, *, dashed: bool = False, marker: bool = False
) -> None:
    events = [event for event in events if field in event]
    stride = max(1, len(events) // 2000)  # more points than pixels show nothing more
    points = events[::stride]
    marked = len(points) == 1 or (marker and len(points) <= 40)
    ax.plot(
        [event["epoch"] for event in points],
        [event[field] for event in points],
        color=colour,
        label=entry,
        linestyle="--" if dashed else "-",
        marker="o" if marked else None,
        markersize=3.5,
    )


def _finish(ax: Axes, runs: list[Run], *, legend: bool = False) -> None:
    ax.set_xlabel("epoch")
    for run, colour in zip(runs, _colours(runs), strict=True):
        for epoch in run.resumed_at:
            ax.axvline(epoch, color=colour, linewidth=0.8, linestyle=":", alpha=0.7)
    if legend or len(runs) > 1:
        _legend_below(ax)
    if ax.get_yscale() == "linear" and not isinstance(ax.yaxis.get_major_formatter(), PercentFormatter):
        ax.yaxis.set_major_locator(MaxNLocator(6))


def _legend_below(ax: Axes) -> None:
    """Below the axes, where it covers no curve; the figure grows by its rows."""
    handles, entries = ax.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, min(len(handles), int(72 / (max(map(len, entries)) + 7))))  # a row holds about 72 characters
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.legend(handles, entries, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(handles) // columns))


def _entry(runs: Sequence[Run], run: Run, what: str, *, main: bool = True) -> str:
    """A line's entry in the legend: what it shows; with several runs the run's name, at its main line only."""
    if len(runs) == 1:
        return what
    return label(run.name, _LEGEND) if main else "_"  # matplotlib leaves out what begins with an underscore


def _plain_log_labels(ax: Axes) -> None:
    """0.1, 1, 10 instead of powers."""
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


def _of(runs: list[Run], title: str) -> str:
    return f"{title}: {label(runs[0].name, _LEGEND)}" if len(runs) > 1 else title


def _colours(runs: list[Run]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
