"""What order and draws cost a rank at scale, and whether all ranks together see each image once: no processes, no
pixels.

    python -m tools.bench.simulate_scale [--shuffle block]

Prints a table for 1,024 ranks x 32 images = 32,768 images per step, on ImageNet-1k's 1,281,167 and ImageNet-21k's
14,197,122 training images, or for --images of your own.
"""

import argparse
import resource
import statistics
import time

import numpy as np

from dali_train.config import Config, DataConfig
from dali_train.data.dataset.index import INDEX_DTYPE
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.sampling.order import SampleOrder
from tools.bench.turns import cpu_name, loading_config

# Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", arXiv 1409.0575; image-net.org, fall 2011
# release.
DATASETS = {"ImageNet-1k": 1_281_167, "ImageNet-21k": 14_197_122}
SAMPLED_RANKS, SAMPLED_STEPS = 8, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--global-batch", type=int, default=32_768, metavar="N", help="images per step (default: %(default)s)"
    )
    parser.add_argument(
        "--images", type=int, nargs="+", metavar="N", help="sizes of datasets (default: ImageNet-1k's and 21k's)"
    )
    parser.add_argument(
        "--shuffle", choices=["full", "block"], default="full", help="data.shuffle (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.global_batch < 2 * options.ranks or options.global_batch % options.ranks:
        parser.error(
            f"--global-batch {options.global_batch} is not 2 or more images for each of {options.ranks} --ranks, the "
            "same for all"
        )
    if options.images and min(options.images) < 1:
        parser.error(f"--images {min(options.images)}: use positive numbers")
    datasets = {f"{number:,} images": number for number in options.images} if options.images else DATASETS
    print(f"{options.ranks} ranks, {options.global_batch} images per step, one core of {cpu_name()}")
    print(
        f"{'dataset':<13} {'images':>11} {'steps':>6} {'coverage':>22} {'ms/step':>10} {'s at an epoch':>14} "
        f"{'MB/rank':>10}"
    )
    for name, num_images in datasets.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = loading_config(
            DataConfig(root="data", shuffle=options.shuffle),
            global_batch=options.global_batch,
            micro_batch=options.global_batch // options.ranks,
            mixup_alpha=0.2,
        )
        coverage, steps = count_coverage(num_images, config, options.ranks)
        step_ms, epoch_s = measure(num_images, config, options.ranks)
        # Two epochs' orders where an epoch ends: 4 bytes per image, or 8 bytes per block; the index is mapped, shared
        # by a host.
        kept = 4 * num_images if options.shuffle == "full" else 8 * num_images / config.data.block_images
        megabytes = 2 * kept / 1e6
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        print(
            f"{name:<13} {num_images:>11,} {steps:>6} {coverage:>22} {step_ms:>10.2f} {epoch_s:>14.2f} "
            f"{megabytes:>10.1f}   (peak {peak:.0f} MB with this program's own counting)",
            flush=True,
        )


def count_coverage(num_images: int, config: Config, ranks: int) -> tuple[str, int]:
    """How often all ranks together see an image in two epochs, which no number of steps fits exactly; and those
    steps."""
    order = SampleOrder.of(config, np.zeros(num_images, np.int64))
    global_batch, size = config.batch.global_batch, config.batch.micro_batch
    seen = np.zeros((2, num_images), dtype=np.uint8)
    steps = -(-2 * num_images // global_batch)
    for step in range(steps):
        for rank in range(ranks):
            start = step * global_batch + rank * size
            images, epochs = order.images_at(np.arange(start, start + size, dtype=np.int64))
            for epoch in (0, 1):
                seen[epoch, images[epochs == epoch]] += 1
    least, most = int(seen.min()), int(seen.max())
    return (f"each {least} x an epoch" if least == most else f"{least} to {most} x an epoch"), steps


def measure(num_images: int, config: Config, ranks: int) -> tuple[float, float]:
    """(median ms of one rank's micro-batch, seconds when an epoch begins)."""
    rows = np.zeros(num_images, dtype=INDEX_DTYPE)
    rows["height"], rows["width"] = 400, 500
    micro_batches = MicroBatches(rows, config)
    start = time.perf_counter()
    micro_batches(0, 0)
    epoch_s = time.perf_counter() - start
    reference = SampleOrder.of(config, np.zeros(num_images, np.int64))
    times = []
    for step in range(SAMPLED_STEPS):
        for k in range(0, ranks, max(1, ranks // SAMPLED_RANKS)):
            start = time.perf_counter()
            batch = micro_batches(step, k)
            times.append(time.perf_counter() - start)
            # The same look-up as in the coverage: what was counted there is what ranks get.
            assert np.array_equal(batch.images, reference.images_at(micro_batches.positions(step, k))[0])
    return statistics.median(times) * 1e3, epoch_s


if __name__ == "__main__":
    main()
