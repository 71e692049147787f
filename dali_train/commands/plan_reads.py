"""A forecast of a run's reads from an object store: hit rate of the cache, bytes, requests, cost."""

import math
from dataclasses import replace

import numpy as np

from dali_train.config import Config
from dali_train.data.dataset.storage import RUN_BYTES
from dali_train.data.loading.cache import simulate_cache
from dali_train.parallel.layout import Layout
from dali_train.text import plural

_SIMULATED_USES = 150_000  # takes a second; only fractions matter, so a small dataset stands for a large one


def served_shares(num_epochs: int, node_share: float, cached_share: float, seed: int = 0) -> list[float]:
    """Return the hit rate of a node's cache in each epoch.

    Args:
        node_share: the fraction of an epoch's images that the node reads.
        cached_share: the fraction of the dataset that its cache holds.
    """
    num_images = min(65_536, max(1024, round(_SIMULATED_USES / (num_epochs * node_share))))
    num_read = round(num_images * node_share)
    generator = np.random.default_rng(seed)
    uses = np.concatenate([generator.permutation(num_images)[:num_read] for _ in range(num_epochs)], dtype=np.int32)
    served = simulate_cache(uses, np.ones(num_images, dtype=np.int64), round(cached_share * num_images))
    return list(served.reshape(num_epochs, num_read).mean(1).tolist())


def describe_reads(
    config: Config,
    layout: Layout,
    num_images: int,
    image_bytes: float,
    ranks_per_node: int,
    price_per_gb: float | None,
    price_per_1000_requests: float | None,
) -> list[str]:
    """Return lines about the reads of a run whose data.root is a URL; prices in any currency."""
    ranks_per_node = min(ranks_per_node, layout.world_size)
    coordinates = len({replace(layout, rank=rank).data_rank for rank in range(ranks_per_node)})
    num_nodes = math.ceil(layout.data_size / coordinates)
    dataset_bytes = num_images * image_bytes
    num_epochs = math.ceil(config.run.epochs / config.data.repeats)
    lines, shares = [], [0.0] * num_epochs
    if config.data.cache_gb is not None:
        cached = min(1.0, config.data.cache_gb * 1e9 / dataset_bytes)
        shares = served_shares(num_epochs, coordinates / layout.data_size, cached)
        lines.append(
            f"cache          {config.data.cache_gb:g} GB hold {cached:.0%} of the dataset on each of "
            f"{plural(num_nodes, 'node')} and serve of its reads {_percentages(shares)}"
        )
    fetched = [dataset_bytes * (1 - share) for share in shares]
    num_requests = sum(fetched) / (RUN_BYTES if config.data.shuffle == "block" else min(image_bytes, RUN_BYTES))
    lines.append(
        f"bucket         {fetched[0] / 1e9:,.1f} GB in the first epoch, {fetched[-1] / 1e9:,.1f} GB in the last, "
        f"{sum(fetched) / 1e9:,.0f} GB in all, by {num_requests:,.0f} requests"
    )
    costs = []
    if price_per_gb is not None:
        costs.append(f"{sum(fetched) / 1e9 * price_per_gb:,.2f} for bytes")
    if price_per_1000_requests is not None:
        costs.append(f"{num_requests / 1000 * price_per_1000_requests:,.2f} for requests")
    return [*lines, f"cost           {', '.join(costs)}"] if costs else lines


def _percentages(shares: list[float]) -> str:
    """Format the fractions of some epochs, and of all."""
    shown = sorted({epoch for epoch in (1, 2, 5, 10, 20, 50, 100) if epoch < len(shares)} | {len(shares)})
    each = ", ".join(f"{shares[epoch - 1]:.0%} in epoch {epoch}" for epoch in shown)
    return f"{each}, {float(np.mean(shares)):.0%} in all"
