"""The pictures of a report: pure functions from runs to matplotlib figures, drawn to be read at half a screen's width."""

from collections.abc import Callable, Iterable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from dali_train.report.runs import OUTSIDE_PHASES, STEP_PHASES, Event, Run, read_table

# Okabe and Ito's palette, told apart by colour-blind readers too: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PHASE_COLOURS = ("#D55E00", "#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#E69F00", "#F0E442")
PHASE_COLOURS = dict(zip((*STEP_PHASES, *OUTSIDE_PHASES), _PHASE_COLOURS, strict=True))
SIZE = (5.4, 3.3)  # inches: 10 pt is read well at 360 px and at 640 px of width
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
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


def draw_all(runs: list[Run]) -> dict[str, Figure]:
    """The pictures for which there is data, by name, in the order of the page."""
    drawings: dict[str, Callable[[list[Run]], Figure | None]] = {
        "accuracy": accuracy,
        "loss": loss,
        "throughput": lambda runs: curves(runs, "images_per_second", "Throughput", "images/s", from_zero=True),
        "step-time": step_time,
        "time": whole_time,
        "learning-rate": lambda runs: curves(runs, "lr", "Learning rate", "", from_zero=True),
        "gradient-norm": lambda runs: curves(runs, "grad_norm", "Gradient norm before clipping", "2-norm", log=True),
        "loss-scale": loss_scale,
        "trust-ratio": trust_ratio,
        "memory": memory,
        "gpu": gpu,
        "confusion": confusion,
        "classes": classes,
    }
    with matplotlib.rc_context(STYLE):
        figures = {name: draw(runs) for name, draw in drawings.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def axes(title: str, label: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    ax = figure.add_subplot()
    ax.set_title(title)
    ax.set_ylabel(label)
    return figure, ax


def curves(runs: list[Run], field: str, title: str, label: str, *, log: bool = False, from_zero: bool = False) -> Figure | None:
    """One line a run over the epochs."""
    if not any(field in event for run in runs for event in run.train):
        return None
    figure, ax = axes(title, label)
    for run, colour in zip(runs, _colours(runs), strict=True):
        _line(ax, run.train, field, colour, run.name)
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
    figure, ax = axes("Accuracy on the validation images", "")
    for run, colour in zip(runs, _colours(runs), strict=True):
        suffix = f", {run.name}" if len(runs) > 1 else ""
        _line(ax, run.evaluations, "top1", colour, f"top-1{suffix}", marker=True)
        _line(ax, run.evaluations, "top5", colour, f"top-5{suffix}", dashed=True, marker=True)
    published = {run.config.get("run", {}).get("published_top1") for run in runs} - {None}
    for value in published:
        ax.axhline(value, color="#666666", linewidth=1, linestyle=":")
        ax.annotate(f"published top-1 {value:.1%}", (0.01, value), xycoords=("axes fraction", "data"), ha="left", va="bottom",
                    fontsize=9, color="#444444")  # fmt: skip
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, runs, legend=True)
    return figure


def loss(runs: list[Run]) -> Figure | None:
    if not any(run.train for run in runs):
        return None
    figure, ax = axes("Loss", "cross-entropy")
    for run, colour in zip(runs, _colours(runs), strict=True):
        suffix = f", {run.name}" if len(runs) > 1 else ""
        _line(ax, run.train, "loss", colour, f"training{suffix}")
        _line(ax, run.evaluations, "loss", colour, f"evaluation{suffix}", dashed=True, marker=True)
    _finish(ax, runs, legend=True)
    return figure


def step_time(runs: list[Run]) -> Figure | None:
    """One run: its phases over the epochs. Several: a bar each."""
    if not any("forward_s" in event for run in runs for event in run.train):
        return None
    if len(runs) > 1:
        return _bars(
            runs, "Where a step's time goes, median", STEP_PHASES, lambda run, phase: 1000 * (run.median(phase) or 0), "ms a step"
        )
    figure, ax = axes("Where a step's time goes", "ms a step")
    events = [event for event in runs[0].train if "forward_s" in event]
    epochs = [event["epoch"] for event in events]
    heights = [[1000 * event[phase] for event in events] for phase in STEP_PHASES]
    ax.stackplot(
        epochs, heights, colors=[PHASE_COLOURS[phase] for phase in STEP_PHASES], labels=[phase_name(p) for p in STEP_PHASES]
    )
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    _finish(ax, runs)
    _legend_beside(ax)
    return figure


def whole_time(runs: list[Run]) -> Figure | None:
    if not any("forward_s" in event for run in runs for event in run.train):
        return None
    totals = {run: run.phase_seconds() for run in runs}
    unit, divisor = _time_unit(max(sum(seconds.values()) for seconds in totals.values()))
    phases = (*STEP_PHASES, *OUTSIDE_PHASES)
    return _bars(runs, "The whole run's time", phases, lambda run, phase: totals[run][phase] / divisor, unit)


def loss_scale(runs: list[Run]) -> Figure | None:
    """Only where it moves: in fp16."""
    if len({event["loss_scale"] for run in runs for event in run.train}) < 2:
        return None
    return curves(runs, "loss_scale", "Loss scale", "", log=True)


def trust_ratio(runs: list[Run]) -> Figure | None:
    if not any("trust_ratio_median" in event for run in runs for event in run.train):
        return None
    figure, ax = axes("LAMB's trust ratio over the layers", "|w| / |r|")
    for run, colour in zip(runs, _colours(runs), strict=True):
        events = [event for event in run.train if "trust_ratio_median" in event]
        epochs = [event["epoch"] for event in events]
        low, high = ([event[f"trust_ratio_{end}"] for event in events] for end in ("min", "max"))
        ax.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0, label=None if len(runs) > 1 else "min to max")
        _line(ax, events, "trust_ratio_median", colour, run.name if len(runs) > 1 else "median", marker=len(events) < 20)
    ax.set_yscale("log")
    _finish(ax, runs, legend=True)
    return figure


def memory(runs: list[Run]) -> Figure | None:
    fields = {"gpu_memory_gb": "GPU, peak", "gpu_memory_reserved_gb": "GPU, reserved", "process_memory_gb": "process on the host"}
    return _several(runs, fields, "Memory of rank 0", "GB")


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
    size = max(3.4, 0.34 * len(names) + 1.2)
    figure, ax = axes(_of(runs, "Confusion matrix, newest evaluation"), "truth", (size + 0.6, size))
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
    names = [f"{row['class'][:28]} ({row['images']})" for row in worst]
    bars = ax.barh(names, [float(row["accuracy"]) for row in worst], color=COLOURS[0], height=0.7)
    ax.bar_label(bars, [f"{float(row['accuracy']):.0%}" for row in worst], padding=3, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.08)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_ylabel("class (images)")
    return figure


def _several(runs: list[Run], fields: dict[str, str], title: str, label: str, *, percent: bool = False) -> Figure | None:
    present = [field for field in fields if any(field in event for run in runs for event in run.train)]
    if not present:
        return None
    figure, ax = axes(title, label)
    for run, colour in zip(runs, _colours(runs), strict=True):
        for number, field in enumerate(present):
            own = COLOURS[number] if len(runs) == 1 else colour
            name = fields[field] + (f", {run.name}" if len(runs) > 1 else "")
            _line(ax, run.train, field, own, name, dashed=len(runs) > 1 and number > 0)
    ax.set_ylim(0, 1.15 * ax.dataLim.ymax)
    if percent:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, runs, legend=True)
    return figure


def _bars(runs: list[Run], title: str, phases: Iterable[str], value: Callable[[Run, str], float], label: str) -> Figure:
    figure, ax = axes(title, "", (SIZE[0], 1.7 + 0.4 * len(runs)))
    left = np.zeros(len(runs))
    for phase in phases:
        widths = np.array([value(run, phase) for run in runs])
        ax.barh([run.name for run in runs], widths, left=left, color=PHASE_COLOURS[phase], label=phase_name(phase), height=0.6)
        left += widths
    for row, total in enumerate(left):
        ax.annotate(f" {total:,.3g}", (total, row), va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(label)
    ax.set_xlim(0, left.max() * 1.12)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return figure


def _line(
    ax: Axes, events: list[Event], field: str, colour: str, label: str, *, dashed: bool = False, marker: bool = False
) -> None:
    events = [event for event in events if field in event]
    stride = max(1, len(events) // 2000)  # more points than pixels tell nothing
    points = events[::stride]
    ax.plot(
        [event["epoch"] for event in points], [event[field] for event in points], color=colour, label=label,
        linestyle="--" if dashed else "-", marker="o" if marker and len(points) <= 40 else None, markersize=3.5,
    )  # fmt: skip


def _finish(ax: Axes, runs: list[Run], *, legend: bool = False) -> None:
    ax.set_xlabel("epoch")
    for run, colour in zip(runs, _colours(runs), strict=True):
        for epoch in run.resumed_at:
            ax.axvline(epoch, color=colour, linewidth=0.8, linestyle=":", alpha=0.7)
    if legend or len(runs) > 1:
        ax.legend()
    if ax.get_yscale() == "linear" and not isinstance(ax.yaxis.get_major_formatter(), PercentFormatter):
        ax.yaxis.set_major_locator(MaxNLocator(6))


def _legend_beside(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)


def _plain_log_labels(ax: Axes) -> None:
    """0.1, 1, 10 instead of powers."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(plain)
    low, high = ax.get_ylim()
    ax.yaxis.set_minor_formatter(plain if high / low < 20 else FuncFormatter(lambda value, _: ""))
    ax.tick_params(axis="y", which="minor", labelsize=8)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 120 else ("seconds", 1.0)


def _of(runs: list[Run], title: str) -> str:
    return f"{title}: {runs[0].name}" if len(runs) > 1 else title


def _colours(runs: list[Run]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
