"""A run's newest evaluation by class and by image, as HTML."""

import numpy as np

from dali_train.report.markup import Markup, escape, folded, picture, table
from dali_train.report.runs import ReportedRun
from dali_train.text import plural, shortened

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
    return table((name, "images", "top-1", ""), cells, "wide")


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
        tiles.append(
            f"<div>{image}<b>{escape(row.truth)}</b>, taken for {escape(row.predicted)} ({row.score:.0%})</div>"
        )
    small = " pixels" if run.is_small() else ""
    return (
        f"<p>{len(wrong)} of {plural(len(rows), 'image')} in the table of predictions.</p>"
        f'<div class="wrong{small}">{"".join(tiles)}</div>'
    )


def _samples(run: ReportedRun) -> str:
    return picture(run.directory / "samples.png", "training images after augmentation", "samples")
