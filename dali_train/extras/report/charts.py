"""The curves of a report as plain data; static/page.js draws them with uPlot."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dali_train.extras.report.runs import ReportedRun
from dali_train.runtime.status import OUTSIDE_PHASES, STEP_PHASES, TEXTS, Event
from dali_train.text import printable, shell_command, shortened

PHASE_NAMES = {field: phase for phase, field in (STEP_PHASES | OUTSIDE_PHASES).items()}
STEP_FIELDS, ALL_FIELDS = tuple(STEP_PHASES.values()), tuple(PHASE_NAMES)
_MOST_POINTS = 2000  # of a curve: more than a screen has pixels
_MOST_MEASURED = 48
_EVALUATED_WITH = "cross-entropy"  # whatever loss.name is
_EVALUATED_WITH_SEVERAL = "binary-cross-entropy"  # with several labels an image
_NAME = 60  # characters of a name in a legend


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One pair of axes, with the curves of every run that has them.

    Args:
        fields: ``train/FIELD`` or ``eval/FIELD`` -> its name in the legend.
        log: start with a logarithmic axis.
        from_zero: the linear axis starts at 0.
        mark: a value at which to draw a line, if it is within the axis.
    """

    title: str
    fields: dict[str, str]
    unit: str = ""
    log: bool = False
    percent: bool = False
    from_zero: bool = False
    mark: float | None = None


SECTIONS = {
    "Accuracy and loss": (
        Chart(
            title="Top-1 on the validation images",
            fields={
                "eval/decisive_top1": "top-1",
                "eval/decisive_balanced_top1": "mean over classes",
                "eval/top1_without_ema": "without EMA",
            },
            percent=True,
        ),
        Chart(
            title="Mean average precision on the validation images",
            fields={"eval/decisive_mean_ap": "mAP"},
            percent=True,
        ),
        Chart(
            title="F1 on the validation images",
            fields={
                "eval/decisive_micro_f1": "micro",
                "eval/decisive_macro_f1": "macro",
                "eval/decisive_sample_f1": "per image",
            },
            percent=True,
        ),
        Chart(
            title="Loss",
            fields={"train/loss": "training", "eval/loss": "evaluation", "eval/ema_loss": "evaluation of the EMA"},
        ),
        Chart(title="Top-5 on the validation images", fields={"eval/decisive_top5": "top-5"}, percent=True),
    ),
    "Speed": (
        Chart(title="Throughput", fields={"train/images_per_second": "images/s"}, unit="images/s", from_zero=True),
        Chart(
            title="Where a step's time goes",
            fields={f"train/{field}": PHASE_NAMES[field] for field in STEP_FIELDS},
            unit="s",
            from_zero=True,
        ),
        Chart(title="Model FLOP utilisation", fields={"train/mfu": "MFU"}, percent=True),
    ),
    "Optimization": (
        Chart(title="Learning rate", fields={"train/lr": "rate"}, from_zero=True),
        Chart(
            title="Gradient norm",
            fields={"train/grad_norm": "before clipping", "train/clipped_grad_norm": "after it"},
            log=True,
        ),
        Chart(
            title="Norms of the complete model",
            fields={"train/weight_norm": "weights", "train/update_norm": "update"},
            log=True,
        ),
        Chart(
            title="Gradient noise scale (critical batch)",
            fields={"train/noise_scale": "noise scale"},
            unit="images",
            log=True,
        ),
        Chart(title="Loss scale", fields={"train/loss_scale": "scale"}, log=True),
        Chart(
            title="LAMB's trust ratio",
            fields={f"train/trust_ratio_{name}": f"{name} of the layers" for name in ("median", "min", "max")},
            unit="|w| / |r|",
            log=True,
        ),
    ),
    "Machine": (
        Chart(
            title="Memory",
            fields={
                "train/gpu_memory_gb": "rank 0's GPU, peak",
                "train/gpu_memory_reserved_gb": "rank 0's GPU, reserved",
                "train/process_memory_gb": "rank 0 on the host",
                "train/host_memory_gb": "all on the host",
            },
            unit="GB",
            from_zero=True,
        ),
        Chart(title="Read from disk", fields={"train/disk_read_mb_per_s": "rank 0"}, unit="MB/s", from_zero=True),
        Chart(title="GPU utilisation", fields={"train/gpu_utilisation": "busy"}, percent=True),
        Chart(title="GPU power", fields={"train/gpu_power_w": "power"}, unit="W"),
        Chart(title="GPU clock", fields={"train/gpu_clock_mhz": "clock"}, unit="MHz"),
        Chart(title="GPU temperature", fields={"train/gpu_temperature_c": "temperature"}, unit="°C"),
    ),
}
"""The charts of every run that has their fields. Other fields in its training lines are measurements of hooks."""

_KNOWN = {
    *(field for charts in SECTIONS.values() for chart in charts for field in chart.fields),
    *(
        f"train/{field}"
        for field in ("event", "step", "epoch", "time", "top1", "skipped_steps", "step_s", "first_step_s", *TEXTS)
    ),
    *(f"train/{field}" for field in OUTSIDE_PHASES.values()),
}


def sections(runs: list[ReportedRun]) -> dict[str, list[Chart]]:
    """Return the charts that have data, by heading."""
    published = {run.config.run.published_top1 for run in runs} - {None}
    measured = dict.fromkeys(f"train/{field}" for run in runs for event in run.train for field in event)
    by_hooks = [field for field in measured if field not in _KNOWN][:_MOST_MEASURED]
    names = dict.fromkeys(name for run in runs for name, _ in run.config.data.eval_sets)
    fields = {f"eval/{name}_top1": name for name in names}
    of_sets = [Chart(title="Top-1 on data.eval_sets", fields=fields, percent=True)]
    if len(runs) > 1:  # curves of several sets and runs differ by dashes, which the legend does not show
        of_sets = [Chart(title=f"Top-1 on {name}", fields={key: name}, percent=True) for key, name in fields.items()]
    charts = {**SECTIONS, "Measured by hooks": tuple(_measured(field) for field in by_hooks)}
    charts["Accuracy and loss"] += tuple(of_sets)
    shown = {}
    for heading, candidates in charts.items():
        named = (_with_losses(chart, runs) for chart in candidates)
        present = [chart for chart in (_present(chart, runs) for chart in named) if chart.fields]
        if heading == "Accuracy and loss" and len(published) == 1 and present:
            (mark,) = published
            present[0] = replace(present[0], title=f"{present[0].title} (published {mark:.2%})", mark=mark)
        if present:
            shown[heading] = present
    return shown


def _with_losses(chart: Chart, runs: list[ReportedRun]) -> Chart:
    """Return `chart` with the names of the losses in its legend, if a run trains with another than the evaluation's."""
    trained_with = {run.config.loss.name for run in runs}
    has_several = any("mean_ap" in event for run in runs for event in run.evaluations)
    evaluated_with = _EVALUATED_WITH_SEVERAL if has_several else _EVALUATED_WITH
    if "train/loss" not in chart.fields or trained_with == {evaluated_with}:
        return chart
    losses = {"train/loss": printable(" or ".join(sorted(trained_with)))}
    fields = {key: f"{name} ({losses.get(key, evaluated_with)})" for key, name in chart.fields.items()}
    return replace(chart, fields=fields)


def _measured(field: str) -> Chart:
    name = printable(field.removeprefix("train/"))
    return Chart(title=shortened(name, _NAME), fields={field: "measured"})


def _present(chart: Chart, runs: list[ReportedRun]) -> Chart:
    """Leave out fields that no run has, a constant loss scale, a mean over classes that equals top-1, and the phases of
    several runs, which would be 6 curves for each."""
    fields = {key: name for key, name in chart.fields.items() if any(_series(run, key) for run in runs)}
    if "train/loss_scale" in fields:
        scales = {event["loss_scale"] for run in runs for event in run.train if "loss_scale" in event}
        fields = fields if len(scales) > 1 else {}
    same = all(
        math.isclose(event["decisive_balanced_top1"], event["decisive_top1"], abs_tol=5e-5)
        for run in runs
        for event in _series(run, "eval/decisive_balanced_top1")
    )
    if same:
        fields.pop("eval/decisive_balanced_top1", None)
    if len(runs) > 1 and f"train/{STEP_FIELDS[0]}" in fields:
        fields = {}
    return replace(chart, fields=fields)


def _series(run: ReportedRun, key: str) -> list[Event]:
    kind, _, field = key.partition("/")
    return [event for event in (run.train if kind == "train" else run.evaluations) if field in event]


def chart_data(runs: list[ReportedRun], charts: list[Chart]) -> dict[str, Any]:
    """Return the data for page.js, as plain values for JSON.

    Each run has the command that shows the images of a step, but for its ``--step N``. Under ``train`` and ``eval`` it
    has columns ``y`` by field over the columns ``x``: step, epoch and time.
    null: no value there; a text: not finite.
    """
    unit, divisor = time_unit(max((run.seconds_at(run.events[-1]["step"]) for run in runs), default=0.0))
    keys = [key for chart in charts for key in chart.fields]
    return {
        "time_unit": unit,
        "charts": [
            {
                **{name: getattr(chart, name) for name in ("title", "unit", "log", "percent", "from_zero", "mark")},
                "fields": [[*key.partition("/")[::2], name] for key, name in chart.fields.items()],
            }
            for chart in charts
        ],
        "runs": [
            {
                "name": shortened(run.name, _NAME),
                "blame": printable(shell_command(["dali-train", "blame", str(run.directory)])),
                "resumed": _columns(run, run.resumed, (), divisor),
                "train": _columns(run, run.train, _fields(keys, "train"), divisor),
                "eval": _columns(run, run.evaluations, _fields(keys, "eval"), divisor),
            }
            for run in runs
        ],
    }


def _fields(keys: list[str], kind: str) -> Iterator[str]:
    return (key.removeprefix(f"{kind}/") for key in keys if key.startswith(f"{kind}/"))


def _columns(run: ReportedRun, events: list[Event], fields: Iterable[str], divisor: float) -> dict[str, Any]:
    points = events[:: max(1, -(-len(events) // _MOST_POINTS))]
    columns = {field: [_rounded(event.get(field)) for event in points] for field in fields}
    return {
        "x": {
            "step": [event["step"] for event in points],
            "epoch": [_rounded(event["epoch"]) for event in points],
            "time": [_rounded(run.seconds_at(event["step"]) / divisor) for event in points],
        },
        "y": {field: column for field, column in columns.items() if any(value is not None for value in column)},
    }


def _rounded(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for this many seconds, and its length in seconds."""
    if seconds >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 120 else ("seconds", 1.0)
