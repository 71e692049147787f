"""What training on one H200 should reach, beside what the parts of `tools.bench.gpu` saw."""

from collections.abc import Callable
from statistics import median
from typing import Any

# Contenders of tools/bench/step.py.
REAL, SYNTHETIC, BARE = "trainer, real data", "trainer, synthetic data", "bare loop"
Results = dict[str, dict[str, Any]]


def images_per_second(results: Results, part: str, contender: str = REAL) -> float | None:
    rounds = results.get(part, {}).get("rounds", [])
    start = next((line for line in rounds if line.get("event") == "start"), None)
    # The first of two rounds of a profiled part has no profiler.
    seconds = [line["step_s"] for line in rounds if line.get("contender") == contender and not line.get("kernels")]
    return start["global_batch"] / median(seconds) if start is not None and seconds else None


def utilisation(results: Results, part: str) -> float | None:
    rate = images_per_second(results, part)
    start = next((line for line in results.get(part, {}).get("rounds", []) if line.get("event") == "start"), None)
    return (
        rate * start["flops_per_image"] / start["peak_flops_per_second"]
        if rate is not None and start is not None
        else None
    )


def best(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def real_against_synthetic(results: Results) -> float | None:
    """Of the step that the data slow down most."""
    ratios = []
    for part in results:
        real, synthetic = images_per_second(results, part), images_per_second(results, part, SYNTHETIC)
        if real is not None and synthetic is not None:
            ratios.append(real / synthetic)
    return min(ratios, default=None)


# What is measured, the least that it should be, and how it is written.
GOALS: list[tuple[str, float, str, Callable[[Results], float | None]]] = [
    (
        "ViT-B/16, share of the dense peak (MFU)",
        0.5,
        "{:.1%}",
        lambda results: best([utilisation(results, part) for part in results if part.startswith("step-b16")]),
    ),
    (
        "ViT-B/32, images/s from 256 px",
        15_000,
        "{:,.0f}",
        lambda results: images_per_second(results, "step-b32-stored-256"),
    ),
    (
        "ViT-B/32, images/s from originals",
        8_000,
        "{:,.0f}",
        lambda results: images_per_second(results, "step-b32-original"),
    ),
    (
        # torch's own kernels, by estimate; MLPerf's submissions fuse convolutions with norms.
        "ResNet-50, images/s from originals (with MLPerf's fused kernels 7,950)",
        3_400,
        "{:,.0f}",
        lambda results: images_per_second(results, "step-r50-original"),
    ),
    ("step with real / synthetic data, the lowest", 0.98, "{:.3f}", real_against_synthetic),
]


def goal_table(results: Results, *, rehearsal: bool = False) -> list[str]:
    """Lines of Markdown. A rehearsal's tiny models meet or miss nothing."""
    lines = ["| goal | at least | seen | |", "|---|---|---|---|"]
    for name, least, form, measure in GOALS:
        seen = measure(results)
        verdict = (
            "not measured" if seen is None else "rehearsal" if rehearsal else "met" if seen >= least else "not met"
        )
        lines.append(f"| {name} | {form.format(least)} | {'' if seen is None else form.format(seen)} | {verdict} |")
    return lines
