"""data.reader dali: every image once a pass on any number of ranks, the micro-batch's own draws, one warning."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.config import Config, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import TINY_CONFIG, Train, encoded, jpeg, photograph, write_shard
from tests.helpers import events, first_batches

NUM_IMAGES = 53


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """53 images in 5 shards of different length, each of a class and a grey level of its own."""
    labels = np.random.default_rng(0).permutation(NUM_IMAGES).tolist()
    records = [(encoded(Image.new("RGB", (40, 32), (20 + 4 * label,) * 3), "PNG"), 1 + label) for label in labels]
    for shard, (start, end) in enumerate(itertools.pairwise([0, 4, 21, 22, 40, NUM_IMAGES])):
        write_shard(tmp_path / "data" / "train" / f"train-{shard:05d}-of-00005", records[start:end])
    build_index(tmp_path / "data")
    (tmp_path / "config.py").write_text(TINY_CONFIG.format(root=str(tmp_path / "data")))
    buffer = {"data.block_images": 7, "data.window_blocks": 1}  # shorter than a rank's part
    return load_config(tmp_path / "config.py").replace(
        {"data.reader": "dali", "hooks.trace_samples": False, "mixup.alpha": 0.0, "batch.global_batch": 8, **buffer}
    )


def take(config: Config, count: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
    return first_batches(config.replace({"batch.global_batch": 4 * ranks}), count, rank=rank, ranks=ranks)


def grey_of(labels: np.ndarray) -> np.ndarray:
    return (20 + 4 * labels - 127.5) / 127.5


@pytest.mark.parametrize("shuffle", ["block", "none"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_pass_has_every_image_once(config: Config, num_ranks: int, shuffle: str) -> None:
    config = config.replace({"data.shuffle": shuffle})
    parts = [NUM_IMAGES * (rank + 1) // num_ranks - NUM_IMAGES * rank // num_ranks for rank in range(num_ranks)]
    passes: list[list[int]] = [[], []]
    for rank in range(num_ranks):
        batches = take(config, 30 // num_ranks, rank, num_ranks)
        labels = [label for batch in batches for label in batch.targets[:, 0].tolist()]
        for number, images in enumerate(passes):  # in order, the parts go round from pass to pass
            size = parts[rank if shuffle == "block" else (rank + number) % num_ranks]
            images += labels[:size]
            del labels[:size]
    assert [sorted(images) for images in passes] == [list(range(NUM_IMAGES))] * 2
    in_order = Split(config.data.root, "train").rows["label"].tolist()
    assert (passes[0] == in_order) == (shuffle == "none")


def test_what_does_not_depend_on_the_image_is_the_micro_batchs(config: Config) -> None:
    config = config.replace({"mixup.alpha": 0.4, "batch.global_batch": 4})
    expected = MicroBatches(Split(config.data.root, "train").rows, config)
    for step, batch in enumerate(take(config, 4)):
        draws = batch.micro_batch
        ours = expected(step, 0)
        assert (draws.step, draws.dropout_seed, set(draws.images)) == (step, ours.dropout_seed, {-1})
        assert np.array_equal(draws.flips, ours.flips)
        assert batch.lambdas.tolist() == ours.lambdas.tolist()
        own, partners = batch.targets.numpy().T
        assert partners.tolist() == own[ours.partners].tolist()
        grey = ours.lambdas * grey_of(own) + (1 - ours.lambdas) * grey_of(partners)
        assert batch.images.mean(dim=(1, 2, 3)).numpy() == pytest.approx(grey, abs=1e-4)  # each with its own label


def test_flips_and_crops_follow_the_config(config: Config, dataset: Path) -> None:
    whole = {"data.root": str(dataset), "data.crop_area": (1, 1), "data.crop_aspect": (1e-3, 1e3)}
    config = config.replace({**whole, "data.shuffle": "none", "data.horizontal_flip": 0.0})
    straight, mirrored, cropped = (
        take(config.replace(change), 1)[0]
        for change in ({}, {"data.horizontal_flip": 1.0}, {"data.crop_area": (0.1, 0.2)})
    )
    assert torch.equal(straight.images, mirrored.images.flip(-1))
    assert not torch.equal(straight.images, cropped.images) and torch.equal(straight.targets, cropped.targets)


def test_resuming_begins_a_new_pass_with_one_warning(train: Train, tmp_path: Path) -> None:
    words = ("--data.reader", "dali", "--hooks.trace_samples", "false", "--run.max_steps")
    first, second = train("run", *words, "2", ranks=3), train("run", *words, "3")
    assert "new pass" not in first and first.count("3 ranks do not divide the 8 micro-batches") == 1
    assert second.count("data.reader is dali, which keeps no position: a new pass") == 1
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [1, 2, 3]


def test_what_it_cannot_do_is_refused(config: Config, tmp_path: Path) -> None:
    changes = {"data.augment": "trivial", "data.repeats": 2, "hooks.trace_samples": True, "parallel.pipeline": 2}
    with pytest.raises(ConfigError, match=r"dali with data.augment trivial, data.repeats 2, hooks.trace_samples True"):
        config.replace(changes)
    with pytest.raises(ConfigError, match=r"data.reader is 'stream': use dali"):
        config.replace({"data.reader": "stream"})
    with pytest.raises(ConfigError, match=r"53 records \(image\) in .* for 54 ranks"):
        take(config, 0, 0, NUM_IMAGES + 1)
    text_index = tmp_path / "data" / "idx_files" / "train" / "train-00001-of-00005.idx"
    text_index.write_text(text_index.read_text().rpartition(" ")[0])
    with pytest.raises(DatasetError, match=r"00001-of-00005.idx .* dataset.json says 17"):
        take(config, 0)


def test_an_image_that_does_not_decode_is_named(config: Config, tmp_path: Path) -> None:
    write_shard(tmp_path / "data" / "train" / "train-00002-of-00005", [(jpeg(photograph(0, 40, 40))[:-40], 1)])
    build_index(tmp_path / "data")
    with pytest.raises(DatasetError, match=r"train-00002-of-00005 at index .*data verify"):
        take(config.replace({"data.shuffle": "none"}), 10)
