"""Mixtures of datasets: exact shares in every micro-batch, each dataset in its own epochs, on any number of ranks."""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dali_train import TrainLoader, cli
from dali_train.config import Config, load_config
from dali_train.config.command_line import read_overrides
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.dataset.manifest import fetched_metadata
from dali_train.data.loading import cache as cache_module
from dali_train.data.loading.cache import Eviction, NextUse
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches, Segment
from dali_train.errors import ConfigError
from dali_train.extras.local_copy import copied
from dali_train.extras.mixture.dataset import MixedSplit
from dali_train.extras.mixture.merge import MixedOrder, Shares
from dali_train.extras.mixture.mixed_images import MixedCache, MixedImages
from dali_train.extras.proof.prove import prove
from dali_train.runtime.launch import Launch
from tests.conftest import Train, jpeg, photograph
from tests.helpers import loader_of, read_in_rounds, samples, words
from tests.object_server import ObjectServer
from tools.bench.cache import simulate_cache

ALONE: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "device": "cpu", "num_threads": 1}
ART = {"class 1": 7, "drawing": 9, "print": 5}
"""The classes of a second dataset, of which `dataset` has the first, and their images."""


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index in place of 21 images of the classes `ART`."""
    directory = tmp_path_factory.mktemp("art")
    for number, (name, count) in enumerate(ART.items()):
        (directory / "files" / name).mkdir(parents=True)
        for image in range(count):
            content = jpeg(photograph(100 * number + image, 40 + image, 60 - image))
            (directory / "files" / name / f"{name}-{image}.jpg").write_bytes(content)
    assert cli.main(["data", "index", str(directory / "files"), "--out", str(directory / "index")]) == 0
    return directory / "index"


@pytest.fixture
def mixed(config: Config, art: Path) -> Config:
    return config.replace({"data.mix": (("photos", config.data.root, 3), ("art", str(art), 1))})


def micro_batches_of(config: Config) -> MicroBatches:
    return open_split(config.data, "train").micro_batches(config)


def stream(config: Config, steps: int) -> list[MicroBatch]:
    """All micro-batches of the first `steps`."""
    micro_batches = micro_batches_of(config)
    return [micro_batches(step, k) for step in range(steps) for k in range(micro_batches.num_per_step)]


def random_mixtures() -> list[tuple[tuple[int, ...], int]]:
    """A thousand with 3 to 12 sources."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 13, 1000).tolist()
    return [(tuple(rng.integers(1, 51, size).tolist()), int(rng.integers(1, 65))) for size in sizes]


def check_shares(weights: tuple[float, ...], size: int, number: int) -> None:
    shares = Shares(weights, size)
    before = np.stack([shares.before(each) for each in range(number + 1)])
    counts = np.diff(before, axis=0)
    assert (counts.sum(axis=1) == size).all()
    exact = [size * Fraction(repr(weight)) / sum(Fraction(repr(each)) for each in weights) for weight in weights]
    for source, share in enumerate(exact):
        assert counts[:, source].min() >= share - share % 1 and counts[:, source].max() < share + 1
        assert max(abs(int(count) - each * share) for each, count in enumerate(before[:, source])) < 1


@pytest.mark.thorough
def test_random_mixtures_have_their_shares() -> None:
    for weights, size in random_mixtures():
        check_shares(weights, size, 100)


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ((1,), 7),
        ((0.6, 0.4), 16),
        ((3, 1, 0), 10),
        ((0.1, 0.2, 0.7), 3),
        ((5, 0, 5, 5, 7, 4, 6), 31),  # needs more than the next deadline
        ((4, 6, 6, 9, 9, 4, 9), 31),
        ((30, 25, 30, 9, 9), 34),  # these three need more than the next two
        ((6, 2, 8, 6, 3, 9), 11),
        ((1, 2, 3, 3, 3, 3, 7, 7), 8),
        ((1_281_167, 50_000, 7), 256),
        ((1 / 3, 0.1, 2), 32),
    ],
)
def test_every_micro_batch_and_every_prefix_has_its_shares(weights: tuple[float, ...], size: int) -> None:
    check_shares(weights, size, 10_000)
    # From the middle, as after a resume, and behind a whole period.
    shares = Shares(weights, size)
    before = [shares.before(number) for number in (13, 7_777)]
    np.testing.assert_array_equal(Shares(weights, size).before(7_777), before[1])
    if shares.period < 1000:
        far = 10**9 * shares.period + 13
        exact = [Fraction(repr(weight)) / sum(Fraction(repr(each)) for each in weights) for weight in weights]
        assert [int(n) for n in shares.before(far) - before[0]] == [10**9 * shares.period * size * one for one in exact]


IN_BLOCKS = {"data.shuffle": "block", "data.block_images": 4, "data.window_blocks": 2}


@pytest.mark.parametrize("shuffle", ["full", "balanced", "none", "block"])
def test_one_dataset_is_as_without_a_mixture(shuffle: str, config: Config) -> None:
    config = config.replace({**IN_BLOCKS, "data.shuffle": shuffle, "data.repeats": 2, "data.augment": "rand"})
    alone = config.replace({"data.mix": (("photos", config.data.root, 0.7),)})
    for one, other in zip(stream(config, 5), stream(alone, 5), strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


@pytest.mark.parametrize("order", [{}, IN_BLOCKS], ids=["full", "block"])
def test_each_dataset_goes_through_its_own_epochs_as_it_does_alone(
    order: dict[str, Any], mixed: Config, art: Path
) -> None:
    mixed = mixed.replace(order)
    batches = stream(mixed, 20)
    roots = {"photos": mixed.data.root, "art": str(art)}
    first = 0
    for name, share in (("photos", 3), ("art", 1)):
        size = len(Split(roots[name], "train"))
        parts = [(batch, (first <= batch.images) & (batch.images < first + size)) for batch in batches]
        assert all(here.sum() == share for _, here in parts)  # of 4
        images = np.concatenate([batch.images[here] for batch, here in parts]) - first
        for epoch in range(len(images) // size):
            assert sorted(images[epoch * size : (epoch + 1) * size]) == list(range(size))
        alone = mixed.replace({"data.root": roots[name], "data.mix": (), "mixup.alpha": 0.0})
        alone = alone.replace({"batch.global_batch": 8 * share, "batch.micro_batch": share})
        for value in ("images", "boxes", "flips"):
            theirs = np.concatenate([getattr(batch, value) for batch in stream(alone, 20)])
            ours = np.concatenate([getattr(batch, value)[here] for batch, here in parts])
            np.testing.assert_array_equal(ours - first if value == "images" else ours, theirs)
        first += size
    assert first == 71 == open_split(mixed.data, "train").num_images


def test_four_three_and_one_coordinates_continue_each_other_across_a_change_of_weights(mixed: Config) -> None:
    config = mixed.replace({"data.mix_until": ((1.5, 0, 1), (3, 0.25, 0.75)), "data.epoch_images": 40})
    order = micro_batches_of(config).order
    assert isinstance(order, MixedOrder)
    assert [first for first, _, _ in order.spans] == [0, 2 * 8, 4 * 8]  # of 32 images, rounded up
    expected = {(batch.step, batch.k): batch for batch in stream(config, 6)}
    counts = [int((batch.images < 50).sum()) for batch in expected.values()]
    assert counts == [0] * 16 + [1] * 16 + [3] * 16
    seen = {}
    for start, stop, ranks in ((0, 1, 4), (1, 3, 3), (3, 6, 1)):
        for rank in range(ranks):
            micro_batches = micro_batches_of(config)  # each in a process of its own
            for step, k in Segment(config=config, start_step=start, dp_rank=rank, dp_size=ranks):
                if step >= stop:
                    break
                seen[step, k] = micro_batches(step, k)
    assert seen.keys() == expected.keys()
    for place, batch in expected.items():
        for name, value in vars(batch).items():
            np.testing.assert_array_equal(value, getattr(seen[place], name), err_msg=name)


def test_a_loader_of_two_datasets_has_the_trainers_tensors(mixed: Config, art: Path) -> None:
    mixed = mixed.replace({"mixup.alpha": 0.0, "data.mix": (("a", mixed.data.root, 0.6), ("b", str(art), 0.4))})
    trainers = loader_of(mixed)
    datasets = {mixed.data.root: 0.6, str(art): 0.4}
    own = TrainLoader(datasets, batch_size=4, global_batch=32, image_size=32, **ALONE)
    alone = [TrainLoader(root, batch_size=4, image_size=32, **ALONE) for root in datasets]
    assert own.num_classes == 5 + 2 and own.steps(1) == 3
    for number in range(3 * 8):
        batch = trainers.next()
        images, labels = next(iter(own))
        assert torch.equal(images, batch.images) and torch.equal(labels, batch.targets[:, 0])
        # They are those of each dataset alone, photographs first.
        assert own.micro_batch is not None
        is_art = own.micro_batch.images >= 50
        assert int(is_art.sum()) in (1, 2) and not is_art[:2].any()
        if number == 0:
            first = alone[0].next()
            assert torch.equal(first.images[: 4 - int(is_art.sum())], images[: 4 - int(is_art.sum())])
    state = own.state_dict()
    other = TrainLoader({mixed.data.root: 0.5, str(art): 0.5}, batch_size=4, global_batch=32, image_size=32, **ALONE)
    with pytest.raises(ConfigError, match=r"mix source-1 \(weight\) 0.6 -> 0.5; mix source-2"):
        other.load_state_dict(state)


@pytest.fixture(scope="module")
def art_in_shards(art: Path) -> Path:
    directory = art.parent / "shards"
    convert = ["data", "convert", "folder", "--train", str(art.parent / "files"), "--train-shards", "2"]
    assert cli.main([*convert, "--out", str(directory)]) == 0
    return directory


@pytest.fixture
def bucket(
    dataset: Path, art_in_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    """A store with `dataset` as photos/, and the images of `art` as art/."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "metadata"))
    fetched_metadata.cache_clear()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "photos").symlink_to(dataset)
    (tmp_path / "served" / "art").symlink_to(art_in_shards)
    with ObjectServer(tmp_path / "served") as server:
        yield server


def cached_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("user-*/train-*/*/*") if path.is_file()]


@pytest.mark.parametrize("shuffle", ["full", "balanced"])
def test_sources_in_a_bucket_give_the_tensors_of_those_on_a_disk(
    shuffle: str, bucket: ObjectServer, dataset: Path, art: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = dict(batch_size=8, image_size=32, shuffle=shuffle, **ALONE)
    on_disk = TrainLoader({dataset: 0.6, art: 0.4}, **settings)
    cache = {"cache": str(tmp_path / "cache")}
    loaders = [
        TrainLoader({f"{bucket.url}/photos": 0.6, art: 0.4}, **settings),
        TrainLoader({f"{bucket.url}/photos": 0.6, art: 0.4}, **cache, **settings),
    ]
    for _ in range(3 * 9):
        images, labels = on_disk._as_asked(on_disk.next())
        for loader in loaders:
            found, its_labels = loader._as_asked(loader.next())
            assert torch.equal(found, images) and torch.equal(its_labels, labels)
    kept = sorted(int(path.name) for path in cached_files(tmp_path / "cache"))
    assert kept == list(range(50)) if shuffle == "full" else set(kept) <= {*range(50)}
    assert on_disk.state_dict() == loaders[1].state_dict()


@pytest.mark.thorough
def test_the_sources_share_a_cache_whose_images_needed_latest_are_removed(
    mixed: Config, art: Path, bucket: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = (("photos", f"{bucket.url}/photos", 2), ("local", str(art), 1), ("art", f"{bucket.url}/art", 1))
    config = mixed.replace({"data.mix": mix, "data.mix_until": ((1, 1, 0, 2),), "run.epochs": 3})
    config = config.replace({"batch.global_batch": 8, "data.read_ahead_mb": 0})
    split = open_split(config.data, "train")
    assert isinstance(split, MixedSplit)
    cache = MixedCache(tmp_path, split)
    images = MixedImages(split, config.data, cache)
    uses, same_uses = (
        NextUse(config, split.order(config), dp_size=1, coordinates=frozenset({0}), start_step=0) for _ in range(2)
    )
    order, times = same_uses.uses(0, uses.total_steps)
    assert order.tolist() == [image for batch in stream(config, int(uses.total_steps)) for image in batch.images]
    limit = 25 * 4096
    monkeypatch.setattr(cache_module, "_LEAST_WAIT_S", 3600.0)  # its thread's rounds are made here
    eviction = Eviction(cache, uses, limit=limit, start_step=0, num_ahead=0)
    for _ in read_in_rounds(images, order, times, eviction):
        assert len(cached_files(tmp_path)) * 4096 <= limit
    in_buckets = (order < 50) | (order >= 71)
    served = simulate_cache(order, cache.file_sizes, limit)[in_buckets].sum()
    hits = [source.num_hits for source in cache.of_sources if source is not None]
    assert len(hits) == 2 and min(hits) > 0 and 0.9 * served < sum(hits) <= served


def test_classes_are_those_of_all_or_found_by_name(mixed: Config) -> None:
    names = open_split(mixed.data, "train").manifest.class_names
    assert names == (*Split(mixed.data.root, "train").manifest.class_names, "drawing", "print")
    validation = open_split(mixed.data, "validation")
    assert validation.manifest.class_names == names and len(validation) == 13
    labels = open_split(mixed.data, "train").rows["label"]
    assert np.bincount(labels[50:]).tolist() == [7 if name == "class 1" else 0 for name in names[:5]] + [9, 5]
    # Of an epoch's 71 images, 3 in 4 are photographs, as many of each class.
    counts = dict.fromkeys(names, 11) | {"class 1": 17, "drawing": 8, "print": 4}
    assert open_split(mixed.data, "train").class_counts.tolist() == list(counts.values())
    with pytest.raises(ConfigError, match=r"data.mix art: class 'drawing' of .* is not among the 5"):
        open_split(replace(mixed.data, mix_classes="by-name"), "train")
    given = replace(mixed.data, mix_classes={"art": {"drawing": "class 3", "print": "class 3"}})
    labels = open_split(given, "train").rows["label"]
    expected = [0, 0, 0, 0, 0]
    expected[names.index("class 1")] = 7
    expected[names.index("class 3")] = 14
    assert np.bincount(labels[50:], minlength=5).tolist() == expected
    in_order = replace(given, mix_classes={"art": ("class 1", "class 3", "class 3")})
    np.testing.assert_array_equal(open_split(in_order, "train").rows["label"], labels)
    for wrong, message in (
        ({"art": {"sketch": "class 3"}}, "art: .* has no class 'sketch'"),
        ({"art": {"drawing": "class 9", "print": "class 3"}}, "'drawing' .* takes for 'class 9', is not among"),
        ({"art": ("class 3",)}, "1 class for the 3 of"),
        ({"arts": ()}, "names 'arts', which is none of data.mix: use photos, art"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_split(replace(mixed.data, mix_classes=wrong), "train")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index in place whose images have several labels, of which "class 1" is also one of `art`."""
    directory = tmp_path_factory.mktemp("several")
    lines = ["file,label,split"]
    for number in range(16):
        (directory / f"{number}.jpg").write_bytes(jpeg(photograph(300 + number, 40, 50)))
        labels = [name for name, every in (("eel", 2), ("class 1", 3), ("fox", 5)) if number % every == 0]
        lines.append(f"{number}.jpg,{';'.join(labels)},{'train' if number < 12 else 'val'}")
    (directory / "labels.csv").write_text("\n".join(lines))
    table, out = str(directory / "labels.csv"), str(directory / "index")
    assert cli.main(["data", "index", table, "--label-separator", ";", "--out", out]) == 0
    return directory / "index"


def label_texts(split: Split) -> list[set[str]]:
    names = split.manifest.class_names
    return [{*split.label_text(int(label), names).split(", ")} - {"no class"} for label in split.rows["label"]]


@pytest.mark.parametrize("first", ["several", "art"])
def test_one_source_with_several_labels_gives_all_of_them_sets(
    first: str, mixed: Config, several: Path, art: Path, dataset: Path
) -> None:
    roots = {"several": several, "art": art} if first == "several" else {"art": art, "several": several}
    mix = tuple((name, str(path), 1) for name, path in roots.items())
    root = several if first == "several" else dataset  # the latter has one label an image
    data = mixed.replace({"data.root": str(root), "data.mix": mix}).data
    train = open_split(data, "train")
    expected = [text for path in roots.values() for text in label_texts(Split(path, "train"))]
    assert label_texts(train) == expected and {len(text) for text in expected} >= {0, 1, 2, 3}
    names = train.manifest.class_names
    expected_names = [*Split(root, "train").manifest.class_names, *ART]
    assert [*names] == [*dict.fromkeys([*expected_names, "class 1", "eel", "fox"])]
    validation = open_split(data, "validation")
    assert validation.manifest.class_names == names
    assert label_texts(validation) == label_texts(Split(root, "validation"))
    # Of the 33 images of an epoch, a half are of each.
    shares = [sum(name in text for text in expected) for name in names]
    assert train.class_counts[names.index("drawing")] == round(9 / 21 * 33 / 2) and (train.class_counts > 0).all() == (
        min(shares) > 0
    )
    for split, split_name in ((train, " + ".join(roots)), (validation, root.name)):
        with pytest.raises(ConfigError, match=re.escape(f"{split_name}: its images have several labels")):
            split.label_kind.require_class(split.dataset_name)


def test_a_mixture_with_several_labels_trains(mixed: Config, several: Path, art: Path, train: Train) -> None:
    mix = ("--data.mix", f"art,{art},1", f"several,{several},1", "--data.root", str(several))
    run = train("several", *mix, *words("--loss.name asymmetric --run.max_steps 1 --run.best_by mean-ap"), ranks=2)
    assert "mAP" in run
    loader = TrainLoader({str(several): 1, str(art): 1}, batch_size=8, image_size=32, **ALONE)
    _, targets = next(iter(loader))
    split = open_split(loader.config.data, "train")
    assert loader.micro_batch is not None and targets.shape == (8, 5)
    for image, row in zip(loader.micro_batch.images.tolist(), targets.tolist(), strict=True):
        names = {name for name, is_one in zip(split.manifest.class_names, row, strict=True) if is_one}
        assert names == label_texts(split)[image]


def test_a_moved_run_is_judged_by_the_labels_of_the_mixture(
    dataset: Path, several: Path, art: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not by those of data.root, which has one label an image and fewer classes."""
    root, moved = tmp_path / "photos", tmp_path / "moved"
    shutil.copytree(dataset, root)
    mix = ("--data.root", str(root), "--data.mix", f"photos,{root},1", f"several,{several},1", f"art,{art},1")
    options = words("--loss.name asymmetric --run.max_steps 2 --run.eval_every_epochs 0.01 --hooks.predictions 4")
    printed = train("run", *mix, *options)
    assert "mAP" in printed and "failed" not in printed
    run = tmp_path / "run"
    assert len((run / "predictions" / "step-00000002" / "classes.csv").read_text().splitlines()) == 1 + 9
    for more in ((), ("--mistakes", str(tmp_path / "mistakes.png"))):
        assert cli.main(["predict", str(run), *more]) == 0
        printed = capsys.readouterr().out
        assert "mAP" in printed and "nan" not in printed, printed
    root.rename(moved)
    assert cli.main(["prove", str(run), "--dataset", str(moved)]) == 0
    assert "DIFFERS" not in capsys.readouterr().out


def test_images_are_left_out_by_their_numbers_in_the_mixture(mixed: Config, tmp_path: Path) -> None:
    file = tmp_path / "excluded.csv"
    file.write_text("3\n52\n")
    without = mixed.replace({"data.exclude": str(file)})
    assert open_split(without.data, "train").num_images == 69
    images = np.concatenate([batch.images for batch in stream(without, 10)])
    assert not {3, 52} & {*images.tolist()}
    for first, last in ((0, 50), (50, 71)):
        own = images[(first <= images) & (images < last)]
        assert len({*own[: last - first - 1].tolist()}) == last - first - 1  # in the first epoch each other one once
    file.write_text("\n".join(map(str, range(50, 71))))
    with pytest.raises(ConfigError, match="leaves no image of art"):
        open_split(without.data, "train")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--data.mix a,x,3 b,s3://y,0.5", (("a", "x", 3), ("b", "s3://y", 0.5))),
        ("--data.mix_until 6,1,0 12,2,0.5", ((6, 1, 0), (12, 2, 0.5))),
        ("--data.mix_until 6,1,0", ((6, 1, 0),)),
        ("--data.mix_classes by-name", "by-name"),
        ("--data.mix_classes \"{'b': {'cats': 'cat'}}\"", {"b": {"cats": "cat"}}),
    ],
)
def test_values_as_people_type_them(words: str, value: Any) -> None:
    assert [*read_overrides(shlex.split(words)).values()] == [value]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.mix": (("a", "x", 1), ("a", "y", 1))}, "use each name once"),
        ({"data.mix": (("a", "x", 0), ("b", "y", 0))}, "at least one weight over 0"),
        ({"data.mix_until": ((1, 1),)}, "row 1,1: use an epoch and the weights of photos, art"),
        ({"data.mix_until": ((2, 1, 1), (1, 1, 0))}, "use increasing epochs"),
        ({"data.mix_until": ((2, 0, 0),)}, "at least one weight over 0 at any time"),
        ({"data.reader": "dali", "hooks.trace_samples": False}, "data.reader is dali with data.mix"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str, mixed: Config) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed.replace(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.mix_until": ((1, 1, 1),)}, "must be whole and stay the same"),
        ({"data.repeats": 2}, "share of batch.micro_batch 4 must be a multiple of data.repeats 2"),
        ({"batch.micro_batch": 2}, "share of batch.micro_batch 2 must be whole"),
    ],
)
def test_blocks_that_cannot_be_dealt_are_refused(changes: dict[str, Any], message: str, mixed: Config) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_batches_of(mixed.replace({**IN_BLOCKS, **changes}))


def test_whole_windows_are_read_ahead_once(mixed: Config) -> None:
    """All images of the windows of every micro-batch, which are those of its sources."""
    mixed = mixed.replace(IN_BLOCKS)
    order = micro_batches_of(mixed).order
    for batch in stream(mixed, 9):
        windows = order.windows_at(batch.positions)
        assert windows is not None and len({*windows}) == len(windows)
        assert {*batch.images.tolist()} <= {image for each in windows for image in order.images_in(*each).tolist()}
    loader = loader_of(mixed)
    split = open_split(mixed.data, "train")
    assert isinstance(split, MixedSplit) and MixedImages(split, mixed.data).keeps_windows
    for batch in stream(mixed, 3):
        assert loader.next().micro_batch.images.tolist() == batch.images.tolist()


def test_datasets_on_disks_are_copied(mixed: Config, art_in_shards: Path, bucket: ObjectServer, tmp_path: Path) -> None:
    mix = (("photos", mixed.data.root, 2), ("art", str(art_in_shards), 1), ("far", f"{bucket.url}/art", 1))
    config = mixed.replace({"data.mix": mix, "data.local_copy": str(tmp_path / "disk")})
    location = copied(config.data, Launch())
    assert len(location.in_use) == 2 and location.data.local_copy is None
    split = open_split(location.data, "train")
    assert isinstance(split, MixedSplit)
    assert [part.root.is_relative_to(tmp_path / "disk") for part in split.parts] == [True, True, False]
    there = MixedImages(split, config.data).read(np.arange(len(split)))
    original = open_split(config.data, "train")
    assert isinstance(original, MixedSplit)
    expected = MixedImages(original, config.data).read(np.arange(len(split)))
    assert [each.tobytes() for each in there] == [each.tobytes() for each in expected]
    np.testing.assert_array_equal(split.rows, original.rows)


@pytest.mark.thorough
def test_a_run_is_proven_resumed_and_a_change_is_named(
    mixed: Config, art: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], bucket: ObjectServer
) -> None:
    """It begins with a part of its images in a bucket."""
    root = mixed.data.root
    options = ("--data.mix", f"photos,{root},3", f"art,{art},1", *words("--data.mix_until 1,0,1 --hooks.ledger true"))
    cached = ("--data.cache", str(tmp_path / "cache"), "--data.cache_gb", "8e-5")
    far = ("--data.mix", f"photos,{bucket.url}/photos,3", f"art,{art},1", *cached)
    train("run", *options, *far, *words("--run.epochs 2 --run.max_steps 4"), ranks=2)
    assert cached_files(tmp_path / "cache")
    refused = train("run", *options, "--data.mix_until", "1,1,1", *words("--run.epochs 2"), status=2)
    assert "data.mix_until [[1, 0, 1]] -> [[1, 1, 1]]" in refused
    other = ("--data.mix", f"photos,{root},2", f"art,{root},1")
    refused = train("run", *options, *other, *words("--run.epochs 2"), status=2)
    assert "data.mix photos (weight) 3 -> 2" in refused and "data.mix art (dataset) 21 images" in refused
    train("run", *options, *words("--run.epochs 2"))
    run = tmp_path / "run"
    config = load_config(run / "config.json")
    assert samples(run) == {(batch.step, batch.k): batch.images.tolist() for batch in stream(config, 5)}
    capsys.readouterr()
    assert prove(run, dataset=None, all_draws=True)
    check_what_shows_it(run, capsys)
    assert cli.main(["predict", str(run), "--mistakes", str(tmp_path / "mistakes.png")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"drawing +- +of 0", printed) and "nan" not in printed
    for row, column, value, named in ((0, 2, 2, "photos (weight) 3 -> 2"), (1, 1, root, "art (dataset) 21 images")):
        settings = config.replace({"data.mix": [list(each) for each in config.data.mix]}).flat()["data.mix"]
        changed = [list(each) for each in settings]
        changed[row][column] = value
        (run / "config.json").write_text(config.replace({"data.mix": changed}).to_json())
        assert not prove(run, dataset=None, all_draws=False)
        assert f"data.mix {named}" in capsys.readouterr().out


def check_what_shows_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images and epochs of each dataset in the plan and in the report, and in the ledger; files of a step's images."""
    use = "photos: 0.0% from epoch 0, 75.0% from epoch 1; 48 images in 5 steps, 0.96 epochs of 50"
    assert cli.main(["plan", "--config", str(run / "config.json")]) == 0
    planned = capsys.readouterr().out
    assert f"sources        {use}\n               art: 100.0% from epoch 0, 25.0% from epoch 1; 112 images" in planned
    assert cli.main(["report", str(run)]) == 0
    assert use in (run / "report" / "index.html").read_text()
    assert cli.main(["blame", str(run), "--step", "4", "--images", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("photos:") for line in lines) == 24  # whose records have no names of files
    assert sum("art: drawing/drawing-" in line or "art: print/" in line or "art: class" in line for line in lines) == 8
    values = [np.load(path) for path in sorted((run / "ledger").glob("*.npy"))]
    assert [len(each) for each in values] == [71, 71, 71]
    known = np.isfinite(values[0]["loss"])
    assert not known[:50].any() and known[50:].all()
