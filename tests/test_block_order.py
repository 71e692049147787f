"""The block order: what it must keep of a random order, and what it must give to a disk."""

import sys

import numpy as np
import pytest

from dali_train.data.sampling.block_order import BlockOrder, Blocks
from dali_train.data.sampling.order import SampleOrder

from .data.files import tool

# Some divide evenly, most do not: a ragged last block, a ragged last window, steps that straddle epochs, lanes shorter
# than a window, a window larger than the dataset.
CASES = [
    Blocks(
        num_images=num_images,
        block_images=block_images,
        window_blocks=window_blocks,
        global_batch=lanes * 4,
        micro_batch=4,
    )
    for num_images in (1, 7, 64, 257, 1000)
    for block_images in (1, 5, 16, 300)
    for window_blocks in (1, 3, 100)
    for lanes in (1, 3, 8)
]


def epoch_of(case: Blocks, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return BlockOrder(case, seed=seed, epoch=epoch).images_at(np.arange(case.num_images))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_epoch_has_each_image_once(case: Blocks) -> None:
    num_images = case.num_images
    stream = SampleOrder(num_images, seed=5, shuffle=case)
    positions = np.arange(3 * num_images)
    images, epochs = stream.images_at(positions)
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(images[epochs == epoch]), np.arange(num_images))
    # Nothing depends on what was asked before: any part from the middle, in any order, by one who begins there.
    generator = np.random.default_rng(0)
    for start in generator.integers(0, 3 * num_images, size=5):
        part = generator.permutation(positions[start : start + 37])
        np.testing.assert_array_equal(SampleOrder(num_images, seed=5, shuffle=case).images_at(part)[0], images[part])


def test_order_changes_with_seed_and_epoch() -> None:
    case = Blocks(num_images=1000, block_images=16, window_blocks=4, global_batch=32, micro_batch=8)
    orders = [epoch_of(case), epoch_of(case, epoch=1), epoch_of(case, seed=1)]
    assert not any(np.array_equal(a, b) for a in orders for b in orders if a is not b)


def test_one_block_a_window_and_one_image_a_block_shuffle_all() -> None:
    """Chi-square of 6 images over 1,200 epochs, 25 degrees of freedom: all that is left is the permutation of
    blocks."""
    counts = np.zeros((6, 6))
    for epoch in range(1200):
        order = epoch_of(Blocks(num_images=6, block_images=1, window_blocks=1, global_batch=4, micro_batch=2), epoch)
        counts[np.arange(6), order] += 1
    assert ((counts - 200) ** 2 / 200).sum() < 52.6


def test_each_block_is_read_by_one_lane() -> None:
    """1,000 images in blocks of 10, windows of 2, 5 lanes of 200: each lane has 10 whole windows of 20 images."""
    case = Blocks(num_images=1000, block_images=10, window_blocks=2, global_batch=20, micro_batch=4)
    for epoch in range(4):
        order = BlockOrder(case, seed=1, epoch=epoch)
        images = order.images_at(np.arange(1000)).reshape(50, 5, 4)  # step, lane, image
        shift = order.images_in(0)[0] % 10  # where cutting begins
        blocks = ((images - shift) % 1000) // 10
        for lane in range(5):
            windows = blocks[:, lane].reshape(10, 20)
            assert all(len(np.unique(window)) == 2 for window in windows), "a window's images come from its two blocks"
            assert len(np.unique(blocks[:, lane])) == 20, "no other lane touches them"
        assert len(np.unique(blocks[0])) >= 5, "a step comes from all lanes' windows"


def test_windows_are_those_that_the_images_come_from() -> None:
    case = Blocks(num_images=257, block_images=5, window_blocks=3, global_batch=24, micro_batch=4)
    stream = SampleOrder(257, seed=0, shuffle=case)
    for start in range(0, 600, 4):
        positions = np.arange(start, start + 4)
        windows = stream.windows_at(positions)
        assert windows is not None
        read = {(epoch, int(image)) for epoch, window in windows for image in stream.images_in(epoch, window)}
        images, epochs = stream.images_at(positions)
        assert set(zip(epochs.tolist(), images.tolist(), strict=True)) <= read
        assert len(read) <= 3 * 15 * len(windows)


def test_blocks_are_cut_elsewhere_each_epoch() -> None:
    case = Blocks(num_images=160, block_images=16, window_blocks=1, global_batch=4, micro_batch=4)
    firsts = {int(BlockOrder(case, seed=0, epoch=epoch).images_in(0)[0]) % 16 for epoch in range(50)}
    assert len(firsts) > 10


def test_comparison_of_orders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tools/compare_orders.py: images in a block lie together, one host reads each, and shuffled storage mixes as well
    as full."""
    sizes = ["--images", "20000", "--classes", "10", "--global-batch", "512", "--micro-batch", "64", "--ranks", "4"]
    monkeypatch.setattr(sys, "argv", ["compare_orders.py", *sizes, "--block-images", "16", "--window-blocks", "4"])
    tool("compare_orders").main()
    lines = capsys.readouterr().out.splitlines()[3:]
    rows = {line[:26].strip(): [float(word) for word in line[26:].split()] for line in lines}
    full, block, none = rows["full"], rows["block, 4 of 16 images"], rows["none"]
    images_a_read, reads_an_image, by_class, shuffled, neighbours = range(4, 9)
    assert full[images_a_read] < 1.1 and 15 < block[images_a_read] < 18 and none[images_a_read] >= 64
    assert full[reads_an_image] == none[reads_an_image] == 1 and block[reads_an_image] < 1.1
    assert 1 < block[by_class] < none[by_class] / 5 and 0.8 < block[shuffled] < 1.2
    assert 0.98 < full[neighbours] < 1.02 and 0.5 < block[neighbours] < 0.95
