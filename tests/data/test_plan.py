"""The layout of images over shards."""

import numpy as np
import pytest

from dali_train.data.convert.conversion import default_num_shards, shuffled_layout
from dali_train.data.convert.sources import held_out


@pytest.mark.parametrize(("num_images", "num_shards"), [(1, 1), (10, 3), (1000, 7), (1024, 1024), (1281, 64)])
def test_every_image_once_and_sizes_level(num_images: int, num_shards: int) -> None:
    layout = shuffled_layout(num_images, num_shards, seed=3)
    sizes = [len(images) for images in layout]
    assert len(sizes) == num_shards
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.sort(np.concatenate(layout)), np.arange(num_images))


def test_default_number_of_shards() -> None:
    assert default_num_shards("train", num_images=1_281_167, num_bytes=140 * 10**9) == 1024
    assert default_num_shards("validation", num_images=50_000, num_bytes=6 * 10**9) == 128
    assert default_num_shards("train", num_images=1437, num_bytes=4 * 10**6) == 4
    assert default_num_shards("validation", num_images=360, num_bytes=10**6) == 1
    assert default_num_shards("train", num_images=3, num_bytes=10**9) == 3


def test_held_out_takes_the_fraction_of_each_class() -> None:
    labels = np.repeat(np.arange(4, dtype=np.int32), [1, 2, 10, 100])
    chosen = held_out(labels, 0.2, seed=5)
    assert np.bincount(labels[chosen], minlength=4).tolist() == [0, 1, 2, 20]
    assert not np.array_equal(chosen, held_out(labels, 0.2, seed=6))
