"""Sample order and draws: coverage, independence of ranks and of resuming, what a block order gives to a disk, and the
numbers themselves."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from scipy import stats
from timm.data import auto_augment
from torchvision.transforms.autoaugment import AutoAugment, AutoAugmentPolicy

from dali_train.config import Config, MixupConfig, View
from dali_train.config.command_line import read_overrides
from dali_train.data.dataset.index import INDEX_DTYPE
from dali_train.data.sampling.draws import (
    DrawInput,
    Mixing,
    crop_boxes,
    draw_mixing,
    filters,
    flips,
    inception_boxes,
    padded_crops,
)
from dali_train.data.sampling.micro_batch import MicroBatches, Segment
from dali_train.data.sampling.order import BlockOrder, Blocks, SampleOrder
from dali_train.data.sampling.policy import erasing_noise, policy_of
from dali_train.data.sampling.rng import (
    DRAWS_VERSION,
    Purpose,
    beta,
    exponential,
    philox,
    philox_generator,
    shuffled,
    torch_seed,
)
from tests.config.test_config import PLAIN
from tests.conftest import REPOSITORY
from tests.convert.files import tool
from tests.helpers import in_tiers, without_vector_instructions


def words(*values: int) -> np.ndarray:
    return np.array([int(value) for value in values], dtype=np.uint64)


def test_philox_is_numpys() -> None:
    low = np.array([0, 5, 2**40, 2**64 - 1], dtype=np.uint64)
    high = np.array([3, 0, 9, 2**63], dtype=np.uint64)
    for seed, purpose, block in ((0, Purpose.CROP, 1), (2**64 - 1, Purpose.FLIP, 7), (12345, Purpose.MIXUP, 2**33)):
        rows = philox(seed, purpose, np.full_like(low, block), low, high)
        for row, a, b in zip(rows, low, high, strict=True):
            expected = np.random.Philox(key=words(seed, purpose), counter=words(block - 1, a, b, 0)).random_raw(4)
            np.testing.assert_array_equal(row, expected)


def cases(count: int) -> list[tuple[int, int, int, int, int]]:
    """(num_images, global_batch, micro_batch, world_size, resume_step), among them all kinds of misfits."""
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(count):
        micro_batch, num_micro_batches = int(generator.integers(1, 6)), int(generator.integers(1, 26))
        global_batch, world_size = micro_batch * num_micro_batches, int(generator.integers(1, num_micro_batches + 1))
        num_images = int(generator.integers(1, 3 * global_batch + 2))
        steps = -(-3 * num_images // global_batch)
        drawn.append((num_images, global_batch, micro_batch, world_size, int(generator.integers(0, steps + 1))))
    return drawn


def config_of(global_batch: int, micro_batch: int, **data: Any) -> Config:
    batch = {"batch.global_batch": global_batch, "batch.micro_batch": micro_batch}
    return PLAIN.replace({**batch, "mixup.alpha": 0.2 if micro_batch > 1 else 0}, data={"seed": 7, **data})


def rows_of(num_images: int) -> np.ndarray:
    rows = np.zeros(num_images, dtype=INDEX_DTYPE)
    rows["height"], rows["width"] = 40 + np.arange(num_images) % 7, 50
    return rows


def images_of(count: int, heights: Any = 1, widths: Any = 1, *, epoch: int = 0) -> DrawInput:
    """What the draws take: an epoch of `count` images of these sizes."""
    sizes = {"heights": np.broadcast_to(heights, count), "widths": np.broadcast_to(widths, count)}
    return DrawInput(numbers=np.arange(count), draw_numbers=np.full(count, epoch), **sizes)


@pytest.mark.parametrize("shuffle", ["full", "block"])
@pytest.mark.parametrize("case", in_tiers(cases(30), *cases(10)))
def test_each_image_once_an_epoch_on_any_number_of_ranks_and_after_resuming(
    case: tuple[int, ...], shuffle: str
) -> None:
    num_images, global_batch, micro_batch, world_size, resume_step = case
    # Blocks and windows from a single image to more than the dataset.
    sizes = {"block_images": 1 + num_images * resume_step % 13, "window_blocks": 1 + num_images % 5}
    config = config_of(global_batch, micro_batch, shuffle=shuffle, **sizes)
    steps = config.steps(3, num_images)
    micro_batches = MicroBatches(rows_of(num_images), config)
    single = {(s, k): micro_batches(s, k) for s in range(steps) for k in range(micro_batches.num_per_step)}

    # Each image once per epoch, in a different order each time where there is more than one.
    stream = np.concatenate([batch.images for batch in single.values()])
    epochs = [stream[e * num_images : (e + 1) * num_images] for e in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_images))
    if num_images > 20:
        assert not np.array_equal(epochs[0], epochs[1])

    # All ranks together, stopped at a step and resumed there, have the same micro-batches.
    together = {}
    for rank in range(world_size):
        for start, stop in ((0, resume_step), (resume_step, steps)):
            asked = MicroBatches(rows_of(num_images), config)
            for step, k in Segment(config=config, start_step=start, dp_rank=rank, dp_size=world_size):
                if step >= stop:
                    break
                together[step, k] = asked(step, k)
    assert together.keys() == single.keys()
    for step_and_k, batch in single.items():
        for name, value in vars(batch).items():
            np.testing.assert_array_equal(value, getattr(together[step_and_k], name))


LOOKS: list[dict[str, Any]] = [
    {},
    {"augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.3, "random_erasing": 0.5, "random_erasing_fill": "noise"},
    {"crop": "inception", "interpolation": "random", "vertical_flip": 0.5},
    {"crop_side": 32, "crop_padding": 4, "alternating_flip": True},
    {"progressive": ((2, 16),), "repeats": 2},
    {"shuffle": "balanced"},
]


@pytest.mark.parametrize("micro_batch", [2, 6, 300])
@pytest.mark.parametrize("views", [(), (View(size=24, n=2), View(size=16))], ids=["one", "three"])
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_micro_batches_are_the_same_whatever_they_are_drawn_beside(
    look: dict[str, Any], views: tuple[View, ...], micro_batch: int
) -> None:
    """A rank draws its next ones together; where it begins, and how many there are, depends on ranks and resumes."""
    config = config_of(2 * micro_batch, micro_batch, **look)
    micro_batches = MicroBatches(rows_of(97), config, views)
    wanted = list(itertools.islice(Segment(config=config, start_step=1, dp_rank=1, dp_size=2), 20))
    for together, (step, k) in zip(micro_batches.following(wanted), wanted, strict=True):
        alone = micro_batches(step, k)
        for one, other in zip((together, *together.views), (alone, *alone.views), strict=True):
            for name in vars(one).keys() - {"views"}:
                value = getattr(one, name)
                np.testing.assert_array_equal(value, getattr(other, name), strict=isinstance(value, np.ndarray))


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_segment_may_begin_within_a_step(num_done: int) -> None:
    """The coordinate has three of the five micro-batches of a step; what it has done of one is not done again, and
    the next steps are whole."""
    shared: dict[str, Any] = {"config": config_of(20, 4), "start_step": 3, "dp_rank": 0, "dp_size": 2}
    whole = list(itertools.islice(Segment(**shared), 9))
    assert whole[:4] == [(3, 0), (3, 2), (3, 4), (4, 0)]
    assert list(itertools.islice(Segment(**shared, num_done=num_done), 9 - num_done)) == whole[num_done:]


@pytest.mark.parametrize("repeats", [1, 3])
def test_every_class_comes_equally_often(repeats: int) -> None:
    """On any number of ranks, at any step: each epoch has N / C positions for each class and N / (C n) for an image,
    rounded; no two looks at an image draw the same; and epochs differ."""
    counts = {0: 3, 2: 40, 3: 57}  # none of class 1
    labels = np.random.default_rng(0).permutation(np.repeat([*counts], [*counts.values()]))
    order = SampleOrder(100, seed=7, shuffle=labels, repeats=repeats)
    positions = np.arange(5 * 100 * repeats)
    images, passes = order.images_at(positions)
    parts = np.array_split(np.random.default_rng(1).permutation(positions), 9)
    for part in parts:
        again = SampleOrder(100, seed=7, shuffle=labels, repeats=repeats).images_at(part)
        np.testing.assert_array_equal(again, (images[part], passes[part]))
    assert len(set(zip(images.tolist(), passes.tolist(), strict=True))) == len(images)
    epochs = images[::repeats].reshape(5, 100)
    assert not np.array_equal(epochs[0], epochs[1])
    for epoch in epochs:
        times = np.bincount(epoch, minlength=100)
        for number, count in counts.items():
            assert times[labels == number].sum() in (33, 34)
            assert set(times[labels == number]) <= {int(100 / 3 / count), int(100 / 3 / count) + 1}
    # What is left out in one epoch comes in another: in many of them every image of a class equally often.
    seen = np.bincount(order.images_at(np.arange(300 * 100) * repeats)[0], minlength=100)
    np.testing.assert_allclose(seen, [10_000 / counts[label] for label in labels], rtol=0.25)
    # And each class gets the position that remains after rounding equally often.
    np.testing.assert_allclose([seen[labels == number].sum() / 300 for number in counts], 100 / 3, atol=0.15)


def test_order_is_uniform() -> None:
    """Each image is equally likely everywhere: chi-square of 6 images over 6,000 epochs, 25 degrees of freedom."""
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        order = shuffled(philox_generator(3, Purpose.ORDER, low=0, high=epoch), 6)
        counts[np.arange(6), order] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 52.6  # exceeded by chance once in 1,000 seeds; the seed is fixed


def test_unshuffled_order_is_that_on_disk() -> None:
    images, epochs = SampleOrder(5, seed=0, shuffle="none").images_at(np.arange(12))
    assert images.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert epochs.tolist() == [0] * 5 + [1] * 5 + [2] * 2


def test_crop_boxes_are_uniform_in_area() -> None:
    boxes = crop_boxes(1, images_of(20_000, 300, 400), area=(0.25, 0.5), aspect=(0.75, 4 / 3))
    top, left, height, width = boxes.astype(float).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 300).all()
    assert (left + width <= 400).all()
    fraction = height * width / (300 * 400)
    aspect = width / height
    assert 0.245 < fraction.min() < 0.26
    assert 0.49 < fraction.max() < 0.505
    assert abs(fraction.mean() - 0.375) < 0.003  # uniform: 0.375 +- 0.0005
    assert 0.74 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.35
    assert abs(np.log(aspect).mean()) < 0.01  # log-uniform around 1


def test_crop_of_extreme_shapes_is_central() -> None:
    images = images_of(3, heights=[10, 1000, 1], widths=[1000, 10, 1])
    boxes = crop_boxes(0, images, area=(0.9, 1.0), aspect=(0.75, 4 / 3))
    assert boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10], [0, 0, 1, 1]]


def test_inception_boxes_are_uniform_in_height() -> None:
    squares = images_of(20_000, 1000, 1000)
    boxes = inception_boxes(1, squares, area=(0.05, 1.0), aspect=(1.0, 1.0))
    top, left, height, width = boxes.astype(float).T
    assert (height == width).all()
    assert (top + height <= 1000).all()
    assert (left + width <= 1000).all()
    quarters = np.quantile(height, [0, 0.25, 0.5, 0.75, 1])
    lowest = 1000 * 0.05**0.5
    assert np.allclose(quarters, np.linspace(lowest, 1000, 5), atol=12)
    assert np.corrcoef(top / np.maximum(1, 1000 - height), left / np.maximum(1, 1000 - height))[0, 1] < 0.05
    boxes = inception_boxes(1, squares, area=(0.05, 0.3), aspect=(0.75, 1.33)).astype(float)
    aspect = boxes[:, 3] / boxes[:, 2]
    fraction = boxes[:, 2] * boxes[:, 3] / 1000**2
    assert abs(aspect.mean() - (0.75 + 1.33) / 2) < 0.005
    assert fraction.min() >= 0.05
    assert fraction.max() <= 0.3


def test_inception_boxes_fit_images_of_any_shape() -> None:
    n = 5000
    heights, widths = np.random.default_rng(0).integers(1, 60, (2, n))
    boxes = inception_boxes(0, images_of(n, heights, widths), area=(0.3, 1.0), aspect=(0.75, 1.33))
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] > 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= heights).all()
    assert (boxes[:, 1] + boxes[:, 3] <= widths).all()
    long = widths > 10 * heights  # no allowed box covers enough of it
    assert long.any()
    assert np.array_equal(boxes[long, 2:], np.stack([heights, widths], axis=-1)[long])


def test_draws_of_an_image_change_from_epoch_to_epoch() -> None:
    n = 2000
    first, second = (flips(0, images_of(n, epoch=epoch), probability=0.5) for epoch in (0, 1))
    assert 0.45 < (first == second).mean() < 0.55
    assert 0.45 < first.mean() < 0.55
    assert not flips(0, images_of(n), probability=0).any()


def test_vertical_flips_leave_the_others_as_they_are() -> None:
    n = 4000
    for alternating in (False, True):
        first, second = (
            flips(0, images_of(n, epoch=e), probability=0.5, vertical=0.2, alternating=alternating) for e in (0, 1)
        )
        assert np.array_equal(first & 1, flips(0, images_of(n), probability=0.5, alternating=alternating))
        assert 0.18 < (first >> 1).mean() < 0.22 and abs(np.corrcoef(first & 1, first >> 1)[0, 1]) < 0.05
        assert 0.65 < ((first >> 1) == (second >> 1)).mean() < 0.71  # 0.2**2 + 0.8**2
    drawn = filters(0, images_of(n), "random")
    assert 0.47 < drawn.mean() < 0.53 and filters(0, images_of(n), "bicubic").size == 0


def test_alternating_flips_show_both_sides_of_an_image_in_two_epochs() -> None:
    n = 2000
    drawn = [flips(0, images_of(n, epoch=epoch), probability=0.3, alternating=True) for epoch in range(4)]
    assert np.array_equal(drawn[0], flips(0, images_of(n), probability=0.3)) and 0.25 < drawn[0].mean() < 0.35
    assert np.array_equal(drawn[1], 1 - drawn[0]) and np.array_equal(drawn[2:], drawn[:2])


def mixing(step: int = 0, k: int = 0, size: int = 64, side: int = 32, **settings: Any) -> Mixing:
    return draw_mixing(MixupConfig(**settings), 0, step=step, k=k, size=size, side=side)


def test_mixup_draws() -> None:
    one = mixing(step=3, k=1, alpha=0.2)
    assert sorted(one.partners.tolist()) == list(range(64))
    assert len(set(one.lambdas.tolist())) == 1
    assert not one.cuts.any()
    many = np.array([mixing(step=step, size=2, alpha=0.2).lambdas[0] for step in range(4000)])
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1))
    assert abs(many.mean() - 0.5) < 0.03
    assert abs(many.var() - 1 / (4 * 1.4)) < 0.01
    off = mixing(size=3)
    assert off.partners.tolist() == [0, 1, 2]
    assert off.lambdas.tolist() == [1, 1, 1]
    assert not off.cuts.any()


def test_some_micro_batches_are_mixed() -> None:
    plain = [mixing(step=step, size=2, side=64, alpha=0.8, cutmix_alpha=1.0) for step in range(1000)]
    some = [
        mixing(step=step, size=2, side=64, alpha=0.8, cutmix_alpha=1.0, probability=0.7, switch_probability=0.2)
        for step in range(1000)
    ]
    mixed = np.array([one.lambdas[0] < 1 for one in some])
    cut = np.array([one.cuts.any() for one in some])
    assert 0.65 < mixed.mean() < 0.75
    assert 0.15 < cut[mixed].mean() < 0.25
    assert all(one.partners.tolist() == [0, 1] for one in np.array(some)[~mixed])
    same = [index for index in np.flatnonzero(mixed) if cut[index] == plain[index].cuts.any()]
    assert len(same) > 400
    assert all(np.array_equal(some[i].lambdas, plain[i].lambdas) for i in same)


def test_mixing_ends_with_an_epoch() -> None:
    """At the first step that begins in it, whatever the rank."""
    config = config_of(24, 6).replace({"mixup.alpha": 0.8, "mixup.until_epoch": 2, "run.epochs": 9})
    micro_batches = MicroBatches(rows_of(97), config)
    assert [step for step in range(12) if micro_batches(step, 0).is_mixed] == list(range(9))  # 2 x 97 images are 8.08


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 1.01, 2.0, 40.0])
def test_lambdas_are_beta_distributed(alpha: float) -> None:
    drawn = [beta(philox_generator(3, Purpose.MIXUP, low=k, high=0), alpha) for k in range(2000)]
    assert all(0 <= one <= 1 for one in drawn)
    assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_lambdas_of_a_small_alpha_are_nearly_0_or_1() -> None:
    """Their powers underflow."""
    for alpha in (1e-6, 5e-324):
        drawn = np.array([beta(philox_generator(3, Purpose.MIXUP, low=k, high=0), alpha) for k in range(1000)])
        assert (np.minimum(drawn, 1 - drawn) < 1e-300).all() and 0.4 < drawn.mean() < 0.6


def test_exponential_is_accurate() -> None:
    values = np.concatenate([np.linspace(-700, 700, 10_001), np.linspace(-1, 1, 1001), [1e-300, -1e-17]])
    np.testing.assert_allclose(exponential(values), np.exp(values), rtol=1e-15)


def test_noise_is_that_of_normalised_pixels() -> None:
    data = PLAIN.data
    data = replace(
        data, train_size=224, random_erasing=1.0, random_erasing_fill="noise", normalise=((128,) * 3, (30, 40, 90))
    )
    pixels = erasing_noise(data, step=3, k=1)
    assert pixels.shape == (224, 224, 3)
    for channel, std in enumerate((30, 40, 90)):
        expected = np.clip(np.round(stats.norm(128, std).rvs(200_000, random_state=0)), 0, 255)
        assert stats.ks_2samp(pixels[..., channel].ravel(), expected).pvalue > 1e-3
    assert not np.array_equal(pixels[..., 0], pixels[..., 1])


def test_autoaugments_tables_are_timms_and_torchvisions() -> None:
    """Also in versions to come: a change there is to be looked at."""

    def table(policy: str) -> list[list[tuple[str, float, float]]]:
        (group,) = policy_of(replace(PLAIN.data, augment=policy)).groups
        return [[(step.operator, step.probability, step.level) for step in pair] for pair in group.alternatives]

    theirs = auto_augment.auto_augment_policy("original", hparams={})
    assert table("auto-imagenet") == [[(one.name, one.prob, one.magnitude / 10) for one in pair] for pair in theirs]
    suffixes = {"TranslateX": "Rel", "TranslateY": "Rel", "Posterize": "8"}
    suffixes |= dict.fromkeys(("Solarize", "Color", "Contrast", "Brightness", "Sharpness"), "Increasing")
    assert table("auto-cifar10") == [
        [(name + suffixes.get(name, ""), probability, (level or 0) / 9) for name, probability, level in pair]
        for pair in AutoAugment(AutoAugmentPolicy.CIFAR10).policies
    ]


def test_mixup_draws_are_those_of_earlier_versions() -> None:
    """Literal values: a run that began earlier with the same version of the draws goes on with the same mixtures."""
    drawn = mixing(step=7, k=2, size=4, alpha=0.2)
    assert drawn.partners.tolist() == [1, 3, 2, 0]
    np.testing.assert_array_equal(drawn.lambdas, np.full(4, 0.0003243651299271733, dtype=np.float32))


assert DRAWS_VERSION == 2, "other literals below: raise it with them, and only with them"
BITS = {  # settings -> the CRC32C of everything in some micro-batches
    "--data.shuffle full": "e298dca0",
    "--data.shuffle block --data.crop inception --data.augment rand-m9-mstd0.5-inc1": "97058cf5",
    "--data.shuffle balanced --data.crop_side 32 --data.crop_padding 4 --mixup.cutmix_alpha 1": "ef12f07d",
    "--data.repeats 2 --data.augment auto-imagenet-mstd0.5 --data.color_jitter .4 --data.random_erasing .5": "ab16edc5",
    "--data.shuffle block --data.repeats 3 --data.augment big-vision --mixup.cutmix_alpha 1": "418fdc73",
    "--data.augment auto-cifar10 --data.crop inception --data.crop_area 0.3 1 --data.crop_aspect 0.2 0.5": "4322892e",
    "--data.augment 3-augment --data.crop_area 0.8 1 --data.crop_aspect 1.2 2.5": "b24995c9",
    "--data.augment rand-m9 --data.color_jitter .4 --data.hue_jitter .1 --data.color_jitter_probability .8 "
    "--data.grayscale .2 --data.gaussian_blur .5 --data.vertical_flip .3 --data.interpolation random": "49e587a0",
    "--data.shuffle none --data.augment trivial --data.random_erasing 0.3 --data.random_erasing_fill noise": "cd6bda88",
}


def checksum(settings: str) -> str:
    config = config_of(24, 6, block_images=4, window_blocks=3).replace(read_overrides(settings.split()))
    rows = rows_of(97)
    rows["label"] = np.arange(97) ** 2 % 7
    micro_batches, found = MicroBatches(rows, config), 0
    for step, k in ((0, 0), (0, 3), (4, 0), (4, 1), (5, 2), (60, 2)):  # an epoch ends within micro-batch 0 of step 4
        for _, value in sorted(vars(micro_batches(step, k)).items()):
            found = crc32c(np.ascontiguousarray(value).tobytes(), found)
    return f"{found:08x}"


@pytest.mark.parametrize("settings", BITS)
def test_micro_batches_are_those_of_earlier_versions(settings: str) -> None:
    """Literal values again: other images, crops or augmentations are another version of the draws."""
    assert checksum(settings) == BITS[settings]


@pytest.mark.thorough
def test_draws_do_not_depend_on_instructions() -> None:
    code = "import json, tests.sampling.test_sampling as t; print(json.dumps({s: t.checksum(s) for s in t.BITS}))"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, env=without_vector_instructions())
    assert json.loads(output) == BITS


def test_cutmix_draws() -> None:
    drawn = [mixing(step=step, size=2, side=64, alpha=0.8, cutmix_alpha=1.0) for step in range(4000)]
    cuts = np.array([one.cuts[0] for one in drawn])
    lambdas = np.array([one.lambdas[0] for one in drawn])
    top, left, height, width = cuts.T
    cut = height > 0
    assert abs(cut.mean() - 0.5) < 0.03  # less the few boxes without a pixel
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 64).all()
    assert (left + width <= 64).all()
    np.testing.assert_allclose(lambdas[cut], 1 - (height * width / 64**2)[cut], rtol=1e-6)
    assert all((one.cuts == one.cuts[0]).all() and len(set(one.lambdas.tolist())) == 1 for one in drawn)
    assert abs(np.mean([mixing(step=step, size=2, cutmix_alpha=1.0).cuts.any() for step in range(400)]) - 1) < 0.05


def test_padded_crops_are_uniform() -> None:
    n = 12_000
    boxes, offsets = padded_crops(0, images_of(n, 32, 40), side=32, padding=4)
    starts = boxes[:, :2] - offsets
    assert starts.min(axis=0).tolist() == [-4, -4]
    assert starts.max(axis=0).tolist() == [4, 12]
    assert [len(np.unique(column)) for column in starts.T] == [9, 17]
    assert (np.bincount(starts[:, 0] + 4) > 0.9 * n / 9).all()
    assert (offsets + boxes[:, 2:] <= 32).all()
    assert (boxes[:, 2:] >= 28).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= (32, 40)).all()


@pytest.mark.parametrize(("side", "padding"), [(32, 4), (36, 4), (10, 9), (40, 9), (49, 9)])
def test_reflected_crops_have_the_same_squares_and_all_pixels_that_they_show(side: int, padding: int) -> None:
    images = images_of(500, 32, 40)
    black, at = padded_crops(0, images, side=side, padding=padding)
    boxes, offsets = padded_crops(0, images, side=side, padding=padding, reflect=True)
    assert np.array_equal(boxes[:, :2] - offsets, black[:, :2] - at)
    for axis, length in enumerate((32, 40)):
        shown = np.arange(side) + (boxes[:, axis] - offsets[:, axis])[:, None]  # (n, side), from outside of the image
        shown = np.where(shown < 0, -shown, np.where(shown >= length, 2 * length - 2 - shown, shown))
        assert np.array_equal(boxes[:, axis], shown.min(axis=1))
        assert np.array_equal(boxes[:, axis] + boxes[:, 2 + axis], shown.max(axis=1) + 1)


@pytest.mark.parametrize(("shuffle", "micro_batch"), [("full", 6), ("full", 4), ("none", 6), ("block", 6)])
def test_repeats_are_neighbours_with_draws_of_their_own(shuffle: str, micro_batch: int) -> None:
    data = {"repeats": 3, "block_images": 2, "window_blocks": 2}
    config = config_of(12, micro_batch, shuffle=shuffle, **data)
    micro_batches = MicroBatches(rows_of(10), config)
    drawn = [micro_batches(s, k) for s in range(5) for k in range(micro_batches.num_per_step)]
    images = np.concatenate([batch.images for batch in drawn])  # 60: two passes over 10 images
    groups = images.reshape(-1, 3)
    assert (groups == groups[:, :1]).all()
    boxes = np.concatenate([batch.boxes for batch in drawn])
    assert len({(image, *box) for image, box in zip(images.tolist(), boxes.tolist(), strict=True)}) == 60
    for start in (0, 10):
        assert sorted(groups[start : start + 10, 0].tolist()) == list(range(10))


def test_torch_seeds_differ() -> None:
    assert torch_seed(3, Purpose.INITIALISATION) == 821808408945751645
    seeds = {torch_seed(0, Purpose.DROPOUT, step=step, k=k) for step in range(50) for k in range(50)}
    assert len(seeds) == 2500 and all(0 <= seed < 1 << 63 for seed in seeds)


# The block order: what it must keep of a random order, and what it must give to a disk

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


@pytest.mark.parametrize("num_images", sorted({case.num_images for case in CASES}))
def test_every_epoch_of_a_block_order_has_each_image_once(num_images: int) -> None:
    positions = np.arange(3 * num_images)
    generator = np.random.default_rng(0)
    for case in (case for case in CASES if case.num_images == num_images):
        images, epochs = SampleOrder(num_images, seed=5, shuffle=case).images_at(positions)
        for epoch in range(3):
            np.testing.assert_array_equal(np.sort(images[epochs == epoch]), np.arange(num_images))
        # Nothing depends on what was asked before: any part from the middle, in any order, by one who begins there.
        for start in generator.integers(0, 3 * num_images, size=5):
            part = generator.permutation(positions[start : start + 37])
            np.testing.assert_array_equal(
                SampleOrder(num_images, seed=5, shuffle=case).images_at(part)[0], images[part]
            )


def test_a_block_order_changes_with_seed_and_epoch() -> None:
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


@pytest.mark.parametrize("shuffle", ["full", "none", "block", "balanced"])
def test_images_that_are_left_out_change_nothing_of_the_others(shuffle: str) -> None:
    """Each epoch has the others, as often as if the split had only them; their draws stay, and in an order of all
    images also their places among each other."""
    rows = rows_of(97)
    rows["label"] = np.arange(97) % 3
    kept = np.random.default_rng(0).random(97) < 0.7
    config = config_of(12, 4, shuffle=shuffle, block_images=5, window_blocks=3)
    left_out = config.replace({"data.exclude": "any"})
    every, left = (
        MicroBatches(rows, config),
        MicroBatches(rows, left_out, order=SampleOrder.of(left_out, rows["label"], kept)),
    )
    number = int(kept.sum())
    images, _ = left.order.images_at(np.arange(3 * number))
    assert kept[images].all() and left.order.num_images == number
    others, _ = every.order.images_at(np.arange(3 * 97))
    for epoch in range(3):
        own = images[epoch * number : (epoch + 1) * number]
        if shuffle == "balanced":
            assert all(abs(np.count_nonzero(own % 3 == label) - number / 3) < 1 for label in range(3))
        else:
            assert sorted(own) == np.flatnonzero(kept).tolist()
        whole = others[epoch * 97 : (epoch + 1) * 97]
        assert np.array_equal(own, whole[kept[whole]]) == (shuffle in ("full", "none"))
    if shuffle == "balanced":  # counts the looks at an image
        return
    looks = {}
    for batch in (every(step, k) for step in range(25) for k in range(3)):
        for image, position, box, flip in zip(batch.images, batch.positions, batch.boxes, batch.flips, strict=True):
            looks[int(image), int(position) // 97] = (*box, flip)
    for batch in (left(step, k) for step in range(15) for k in range(3)):
        for image, position, box, flip in zip(batch.images, batch.positions, batch.boxes, batch.flips, strict=True):
            assert looks[int(image), int(position) // number] == (*box, flip)
    windows = left.order.windows_at(np.arange(number))
    assert (windows is None) == (shuffle != "block")
    for window in windows or ():
        assert kept[left.order.images_in(*window)].all()
    with pytest.raises(AssertionError, match="must be known"):
        SampleOrder.of(left_out, rows["label"], None)


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
    for repeats, start in itertools.product((1, 3), range(0, 600, 4)):
        stream = SampleOrder(257, seed=0, shuffle=case, repeats=repeats)
        positions = np.arange(start, start + 4)
        windows = stream.windows_at(positions)
        assert windows is not None
        read = {(epoch, int(image)) for epoch, window in windows for image in stream.images_in(epoch, window)}
        images, epochs = stream.images_at(positions)
        assert set(zip((epochs // repeats).tolist(), images.tolist(), strict=True)) <= read
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
    full = rows["full"]
    block = rows["block, 4 of 16 images"]
    none = rows["none"]
    images_a_read, reads_an_image, by_class, shuffled, neighbours = range(4, 9)
    assert full[images_a_read] < 1.1
    assert 15 < block[images_a_read] < 18
    assert none[images_a_read] >= 64
    assert full[reads_an_image] == none[reads_an_image] == 1
    assert block[reads_an_image] < 1.1
    assert 1 < block[by_class] < none[by_class] / 5
    assert 0.8 < block[shuffled] < 1.2
    assert 0.98 < full[neighbours] < 1.02
    assert 0.5 < block[neighbours] < 0.95
