"""How many reads a node's cache serves, for a run of 90 epochs: this project's rule beside LRU and FIFO.

    python -m tools.bench.cache --picture docs/cache.png

A simulation of one node of 1, 4, 16 and 64, with the order in which the trainer reads and images of one size. A small
dataset stands for a large one: shares do not depend on its size, only on the number of nodes.
"""

import argparse
from collections import OrderedDict
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.data.loading.cache import NextUse
from dali_train.data.sampling.order import SampleOrder
from tools.bench.turns import loading_config

NUM_IMAGES = 4096
EPOCHS = 90
NODES = (1, 4, 16, 64)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
MICRO_BATCH = 4
RULES = ("MIN", "LRU", "FIFO")
ORDERS = {
    "full": DataConfig(root="-"),
    "block": DataConfig(root="-", shuffle="block", block_images=8, window_blocks=4),
}


def simulate_cache(uses: NDArray[np.int32], sizes: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    """Return which of a node's `uses`, image numbers in order of time, hit a cache of `capacity` bytes, (uses,).

    The cache starts empty and evicts the image used furthest in the future (Belady's MIN); an image that would be
    evicted at once is not stored.
    """
    last: dict[int, int] = {}
    next_use = np.empty(len(uses), dtype=np.int64)
    for position in range(len(uses) - 1, -1, -1):
        image = int(uses[position])
        next_use[position] = last.get(image, len(uses))
        last[image] = position
    served = np.zeros(len(uses), dtype=np.bool_)
    held: dict[int, int] = {}  # image -> position of its next use
    latest: list[tuple[int, int]] = []
    total = 0
    for position, (image, then) in enumerate(zip(uses.tolist(), next_use.tolist(), strict=True)):
        if image in held:
            served[position] = True
        else:
            total += int(sizes[image])
        held[image] = then
        heappush(latest, (-then, image))
        while total > capacity:
            then, victim = heappop(latest)
            if held.get(victim) == -then:  # else it has been used since
                del held[victim]
                total -= int(sizes[victim])
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw shuffle full, as a PNG")
    options = parser.parse_args()
    print("| order | nodes | cache / dataset | " + " | ".join(RULES) + " |\n|---|---|---|" + "---|" * len(RULES))
    served: dict[tuple[str, int, str], list[float]] = {}
    for order, data in ORDERS.items():
        for num_nodes in NODES:
            uses = uses_of_a_node(data, num_nodes)
            for share in SHARES:
                capacity = int(share * NUM_IMAGES)
                shares = {rule: share_served(rule, uses, capacity) for rule in RULES}
                print(
                    f"| {order} | {num_nodes} | {share:.0%} | " + " | ".join(f"{s:.1%}" for s in shares.values()) + " |"
                )
                for rule, value in shares.items():
                    served.setdefault((order, num_nodes, rule), []).append(value)
    if options.picture is not None:
        draw(served, options.picture)


def uses_of_a_node(data: DataConfig, num_nodes: int) -> NDArray[np.int32]:
    """Return the images that the first of `num_nodes` reads in the run, in their order."""
    config = loading_config(data, micro_batch=MICRO_BATCH, global_batch=MICRO_BATCH * max(NODES))
    config = config.replace({"run.epochs": EPOCHS})
    labels = np.zeros(NUM_IMAGES, dtype=np.int32)
    next_use = NextUse(
        config, SampleOrder.of(config, labels), dp_size=num_nodes, coordinates=frozenset({0}), start_step=0
    )
    return next_use.uses(0, int(next_use.total_steps))[0]


def share_served(rule: str, uses: NDArray[np.int32], capacity: int) -> float:
    if rule == "MIN":
        return float(simulate_cache(uses, np.ones(NUM_IMAGES, dtype=np.int64), capacity).mean())
    held: OrderedDict[int, None] = OrderedDict()  # the next to be removed first
    hits = 0
    for image in uses.tolist():
        if image in held:
            hits += 1
            if rule == "LRU":
                held.move_to_end(image)
            continue
        held[image] = None
        if len(held) > capacity:
            held.popitem(last=False)
    return hits / len(uses)


def draw(served: dict[tuple[str, int, str], list[float]], path: Path) -> None:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, len(NODES), sharey=True)
    for ax, num_nodes in zip(axes, NODES, strict=True):
        for rule, style in zip(RULES, ("-", "--", ":"), strict=True):
            values = np.array(served["full", num_nodes, rule])
            ax.plot(100 * np.array(SHARES), 100 * values, style, label=rule, marker=".")
        ax.set_title(f"{num_nodes} node" + "s" * (num_nodes > 1))
        ax.set_xlabel("cache, % of the dataset")
        ax.set_ylim(0, 100)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(f"reads served, % of {EPOCHS} epochs")
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
