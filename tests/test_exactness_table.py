"""The table in docs/exactness.md of what the tests find exact in which layouts, made from their own parameters:

python -m tests.test_exactness_table
"""

from collections import defaultdict
from collections.abc import Iterator

from tests import test_exactness
from tests.config import test_parallel_config
from tests.conftest import REPOSITORY
from tests.extras import test_several_labels
from tests.helpers import FLOAT64_BOUND, Compared
from tests.loading import test_loader
from tests.parallel import test_parallel
from tests.training import test_optimizers

DOCUMENT = REPOSITORY / "docs" / "exactness.md"
COLUMNS = {
    "one process": "",
    "data parallel": "",
    "sharded": "--parallel.shard",
    "pipeline": "--parallel.pipeline",
    "tensor": "--parallel.tensor.size",
    "changing": "",
}
COMPARED = [
    test_exactness.ALONE,
    test_exactness.FAST_ALONE,
    test_exactness.FAST_AND_SHARDED,
    test_exactness.IN_BF16,
    test_exactness.KILLED,
    test_exactness.IN_BLOCK_ORDER,
    test_exactness.SIGNS_COUNT,
    test_exactness.BATCH_NORM_ALONE,
    test_loader.VIEWS_ON_SEVERAL,
    *test_exactness.BATCH_NORM_ON_SEVERAL.values(),
    *(compared for row in test_exactness.TABLE.values() for compared in row),
    test_several_labels.ON_SEVERAL,
    *test_parallel.SPLIT.values(),
    *(Compared(("--optimizer.name", name), resumed=True, bound=None) for name in test_optimizers.TIMM),
]
REFUSED = [(layout, f"{name} {value}") for layout, (name, value), _, _ in test_parallel_config.REFUSED]
REFUSED += [
    (layout, f"optimizer.name {name}")
    for layout in (test_parallel.SHARDED, test_parallel.TENSOR)
    for name in test_optimizers.REFUSED_ON_SHARDS
]
BITS, NO = "=", "refused"


def settings(options: tuple[str, ...]) -> Iterator[str]:
    """Yield the settings in `options`, each with its value if that is a name."""
    values = (text.partition(" ") for text in " ".join(options).removeprefix("--").split(" --"))
    for name, value in {name: value for name, _, value in values}.items():  # the last one counts
        yield name if value in ("true", "false") or not value[:1].isalpha() else f"{name} {value}"


def columns(layout: tuple[str, ...], ranks: int = 2) -> list[str]:
    """Return the columns of a layout: of each dimension in which it splits the model."""
    split = [name for name, option in COLUMNS.items() if option and option in layout]
    return split or ["one process" if ranks == 1 else "data parallel"]


def table() -> str:
    """Return the table in Markdown, settings with the same cells in one row."""
    cells: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for options, ranks, layout, resumed, bound in COMPARED:
        compared = "" if bound is None else f"{bound:g}".replace("e-0", "e-") + ("" if bound < 1e-6 else " (fp32)")
        for setting in settings(options):
            for column in columns(layout, ranks):
                cells[setting][column] |= {BITS if resumed else "", compared} - {""}
    for options, *_ in test_parallel.FIVE_LAYOUTS:
        for setting in settings(options):
            cells[setting]["changing"].add(f"{FLOAT64_BOUND:g}")
    for layout, setting in REFUSED:
        for column in columns(layout):
            cells[next(settings((f"--{setting}",)))][column].add(NO)
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for setting, by_column in sorted(cells.items()):
        rows[tuple(", ".join(sorted(by_column[column], reverse=True)) for column in COLUMNS)].append(f"`{setting}`")
    lines = [("settings", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    lines += [(", ".join(names), *row) for row, names in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def regenerated(document: str) -> str:
    start = document.index("| settings | one process |")
    return document[:start] + table() + document[document.index("\n\n", start) + 1 :]


def test_the_document_has_this_table() -> None:
    document = DOCUMENT.read_text()
    assert regenerated(document) == document, "run python -m tests.test_exactness_table"


if __name__ == "__main__":
    DOCUMENT.write_text(regenerated(DOCUMENT.read_text()))
