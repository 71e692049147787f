"""How well each order mixes and how well it reads: full, block and none, over one epoch. No pixels are read.

    python tools/compare_orders.py                      # as many images as ImageNet has
    python tools/compare_orders.py DATASET              # its own index

The table's columns:

    blocks, shards   of the dataset that have an image in a step, and in a micro-batch
    images per read  mean number of images that lie together in what a rank reads ahead
    reads per image  how many of the ranks read an image, on average: 1 if no two hosts read the same
    sorted, shuffled variance of a class's count in a step over that of a random order, for images that lie
                     sorted by class (the worst case) and for images shuffled when they were converted; 1 is as good as
                     random
    neighbours       mean distance on disk of two images that follow each other in a micro-batch, over that of a random
    order
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.index import Split
from dali_train.data.sampling.order import Blocks, SampleOrder

Images = NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, nargs="?", metavar="DATASET", help="directory with dataset.json")
    imagined = parser.add_argument_group("without DATASET")
    imagined.add_argument(
        "--images", type=int, default=1_281_167, metavar="N", help="sorted by class (default: %(default)s)"
    )
    imagined.add_argument("--classes", type=int, default=1000, metavar="N", help="of equal size (default: %(default)s)")
    imagined.add_argument(
        "--shards", type=int, default=1024, metavar="N", help="of equal length (default: %(default)s)"
    )
    step = parser.add_argument_group("a step; by default smaller where the dataset is small")
    step.add_argument("--global-batch", type=int, metavar="N", help="images (default: 32768)")
    step.add_argument("--micro-batch", type=int, metavar="N", help="images (default: 256)")
    step.add_argument("--ranks", type=int, metavar="N", help="that share its micro-batches (default: 16)")
    orders = parser.add_argument_group("orders")
    orders.add_argument(
        "--block-images", type=int, nargs="+", default=[128], metavar="N", help="data.block_images (default: 128)"
    )
    orders.add_argument(
        "--window-blocks", type=int, nargs="+", default=[8], metavar="N", help="data.window_blocks (default: 8)"
    )
    orders.add_argument(
        "--ahead",
        type=int,
        default=9,
        metavar="N",
        help="micro-batches read at a time without windows (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.dataset is not None:
        rows = Split(options.dataset, "train").rows
        labels, shards = rows["label"].astype(np.int64), rows["shard"].astype(np.int64)
    else:
        numbers = np.arange(options.images)
        labels, shards = numbers * options.classes // options.images, numbers * options.shards // options.images
    count = len(labels)
    if count < 8:
        parser.error(f"{count} images are too few to compare orders: take a dataset of at least 8")
    fit_step(options, count)
    global_batch, micro_batch = options.global_batch, options.micro_batch
    if count < global_batch:
        parser.error(f"--global-batch {global_batch} exceeds the {count} images: name a smaller one")
    if global_batch % (micro_batch * options.ranks):
        parser.error(
            f"--global-batch {global_batch} is not divisible by --micro-batch {micro_batch} x --ranks {options.ranks}"
        )
    sorted_labels = np.sort(labels)
    shuffled_labels = np.random.default_rng(0).permutation(labels)

    print(
        f"{count:,} images in {shards.max() + 1:,} shards, {labels.max() + 1:,} classes; {count // global_batch} "
        f"steps of {global_batch:,}, micro-batches of {micro_batch}, {options.ranks} ranks"
    )
    print(f"{'':<26}{'per step':^16}{'per micro-batch':^16}{'images':>8}{'reads':>9}{'class variance':^19}{'':>11}")
    columns = f"{'order':<26}{'blocks':>8}{'shards':>8}{'blocks':>8}{'shards':>8}{'per read':>9}{'per img':>8}"
    print(f"{columns}{'sorted':>10}{'shuffled':>9}{'neighbours':>11}")
    compared = {"full": SampleOrder(count, seed=0, shuffle="full")}
    for block_images in options.block_images:
        for window_blocks in options.window_blocks:
            blocks = Blocks(
                num_images=count,
                block_images=block_images,
                window_blocks=window_blocks,
                global_batch=global_batch,
                micro_batch=micro_batch,
            )
            compared[f"block, {window_blocks} of {block_images} images"] = SampleOrder(count, seed=0, shuffle=blocks)
    compared["none"] = SampleOrder(count, seed=0, shuffle="none")
    random_variance: tuple[float, float] | None = None
    for name, order in compared.items():
        block_images = order.shuffle.block_images if isinstance(order.shuffle, Blocks) else options.block_images[0]
        steps = order.images_at(np.arange(count // global_batch * global_batch))[0].reshape(-1, global_batch)
        micro_batches = steps.reshape(-1, micro_batch)
        variance = class_variance(steps, sorted_labels), class_variance(steps, shuffled_labels)
        random_variance = random_variance or variance
        read = [list(reads(order, steps.shape[0], rank, options)) for rank in range(options.ranks)]
        num_read = sum(len(images) for portions in read for images in portions)
        num_runs = sum(int((np.diff(np.sort(images)) > 1).sum()) + 1 for portions in read for images in portions)
        # Two random numbers below n are n / 3 apart.
        distance = np.abs(np.diff(micro_batches, axis=1)).mean() / (count / 3)
        print(
            f"{name:<26}{distinct(steps // block_images):>8.0f}{distinct(shards[steps]):>8.0f}"
            f"{distinct(micro_batches // block_images):>8.1f}{distinct(shards[micro_batches]):>8.1f}"
            f"{num_read / num_runs:>8.1f}{num_read / steps.size:>9.2f}"
            f"{variance[0] / random_variance[0]:>10.2f}{variance[1] / random_variance[1]:>9.2f}{distance:>11.3f}",
            flush=True,
        )


def fit_step(options: argparse.Namespace, count: int) -> None:
    """Choose the sizes that were not named: those of the recipes, or powers of two with four steps or more in an
    epoch."""
    options.global_batch = options.global_batch or min(32_768, 1 << (count // 4).bit_length() - 1)
    options.micro_batch = options.micro_batch or max(2, min(256, options.global_batch // 4))
    options.ranks = options.ranks or max(1, min(16, options.global_batch // options.micro_batch))


def distinct(batches: Images) -> float:
    """Mean number of different values in a row."""
    return float((np.diff(np.sort(batches, axis=1), axis=1) > 0).sum(axis=1).mean() + 1)


def class_variance(steps: Images, labels: Images) -> float:
    """Mean over steps and classes of the squared difference between a class's count and what its share would be."""
    frequencies = np.bincount(labels) / len(labels)
    counts = np.stack([np.bincount(labels[step], minlength=len(frequencies)) for step in steps])
    return float(((counts - steps.shape[1] * frequencies) ** 2).mean())


def reads(order: SampleOrder, num_steps: int, rank: int, options: argparse.Namespace) -> Iterator[Images]:
    """What `rank` reads at a time: each window once; without windows the images of the next micro-batches."""
    size = options.micro_batch
    starts = np.arange(rank * size, num_steps * options.global_batch, options.ranks * size)
    positions = (starts[:, None] + np.arange(size)).ravel()
    windows = order.windows_at(positions)
    if windows is not None:
        for window in windows:
            yield order.images_in(*window)
        return
    for start in range(0, len(positions), options.ahead * size):
        yield order.images_at(positions[start : start + options.ahead * size])[0]


if __name__ == "__main__":
    main()
