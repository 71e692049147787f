"""Streaming: every image once a pass on any number of ranks, a position that is kept, and DALI's traps closed."""

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.config import BatchConfig, Config, DataConfig, MixupConfig, load_config
from dali_train.data.dataset.build_index import build_index
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.tfrecord import encode_example, frame_record
from dali_train.data.loading.loader import Batch, Loader, make_loader
from dali_train.data.loading.stream import check_shards
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.errors import ConfigError, DatasetError, RunError

from .conftest import TINY_CONFIG, StartTraining, Train, final_weights, jpeg, photograph, png, write_shard
from .ranks import free_port

NUM_IMAGES = 53
CPU = torch.device("cpu")
STREAM = ("--data.reader", "stream", "--hooks.trace_samples", "false")


def grey_of(label: np.ndarray) -> np.ndarray:
    """The grey level of every pixel of the image with this label, as the network sees it."""
    return (20 + 4 * label - 127.5) / 127.5


def solid_image(label: int) -> bytes:
    return png(Image.new("RGB", (40, 32), (20 + 4 * label,) * 3))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 53 images in 5 shards of different length, each of a class and a grey level of its own."""
    root = tmp_path_factory.mktemp("numbered")
    bounds = [0, 4, 21, 22, 40, NUM_IMAGES]
    records = [(solid_image(label), 1 + label) for label in np.random.default_rng(0).permutation(NUM_IMAGES).tolist()]
    for split in ("train", "validation"):
        for shard, (start, end) in enumerate(itertools.pairwise(bounds)):
            write_shard(root / split / f"{split}-{shard:05d}-of-00005", records[start:end])
    build_index(root)
    return root


@pytest.fixture
def config(numbered: Path, tmp_path: Path) -> Config:
    """Micro-batches of 4, so that passes end within them; a buffer of 7, shorter than a rank's part."""
    path = tmp_path / "config.py"
    path.write_text(TINY_CONFIG.format(root=str(numbered)))
    config = load_config(path)
    return replace(
        config,
        data=replace(config.data, reader="stream", shuffle_buffer=7),
        mixup=MixupConfig(alpha=0),
        hooks=replace(config.hooks, trace_samples=False),
    )


def loader_of(config: Config, rank: int = 0, num_ranks: int = 1, *, size: int = 4, **going_on: Any) -> Loader:
    """With one micro-batch per rank and step."""
    config = replace(config, batch=BatchConfig(global_batch=size * num_ranks, micro_batch=size))
    split = Split(config.data.root, "train", local=config.data.stream_url is None)
    return make_loader(
        split, config, CPU, **{"start_step": 0, **going_on}, dp_rank=rank, dp_size=num_ranks, num_threads=1
    )


def take(loader: Loader, count: int) -> list[Batch]:
    return [loader.next() for _ in range(count)]


def labels_of(batches: list[Batch]) -> list[int]:
    return [label for batch in batches for label in batch.targets[:, 0].tolist()]


@pytest.mark.parametrize("shuffle", ["full", "none"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_pass_has_every_image_once(config: Config, num_ranks: int, shuffle: str) -> None:
    config = replace(config, data=replace(config.data, shuffle=shuffle))
    parts = [NUM_IMAGES * rank // num_ranks for rank in range(num_ranks + 1)]
    sizes = [end - start for start, end in itertools.pairwise(parts)]
    passes: list[list[int]] = [[], [], []]
    for rank in range(num_ranks):
        batches = take(loader_of(config, rank, num_ranks), 45 // num_ranks)
        labels = labels_of(batches)
        for number, pass_ in enumerate(passes):
            # In order, parts go round from pass to pass; shuffled, each pass is cut anew in the same places.
            size = sizes[rank if shuffle == "full" else (rank + number) % num_ranks]
            pass_ += labels[:size]
            del labels[:size]
        for batch in batches:  # a label that belongs to another image shows
            np.testing.assert_allclose(
                batch.images,
                np.broadcast_to(grey_of(batch.targets[:, :1, None, None].numpy()), batch.images.shape),
                atol=1e-4,
            )
    assert [sorted(pass_) for pass_ in passes] == [list(range(NUM_IMAGES))] * 3
    in_order = [int(label) for label in Split(config.data.root, "train").rows["label"]]
    assert (passes[0] == in_order) == (shuffle == "none")
    assert (passes[0] == passes[1]) == (shuffle == "none" and num_ranks == 1)


def test_the_order_follows_the_seed(config: Config) -> None:
    orders = [
        labels_of(take(loader_of(replace(config, data=replace(config.data, seed=seed))), 13)) for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_crops_and_flips_follow_the_config(config: Config, dataset: Path) -> None:
    data = replace(
        config.data, root=str(dataset), crop_area=(1, 1), crop_aspect=(1e-3, 1e3), horizontal_flip=0, shuffle="none"
    )
    whole = take(loader_of(replace(config, data=data)), 4)
    mirrored = take(loader_of(replace(config, data=replace(data, horizontal_flip=1))), 4)
    cropped = take(loader_of(replace(config, data=replace(data, crop_area=(0.1, 0.2)))), 4)
    for straight, mirror, crop in zip(whole, mirrored, cropped, strict=True):
        assert straight.targets.tolist() == mirror.targets.tolist() == crop.targets.tolist()
        assert torch.equal(straight.images, mirror.images.flip(-1))
        assert not torch.equal(straight.images, crop.images)


def test_mixup_and_dropout_stay_pure_functions(config: Config) -> None:
    """The same partners, lambdas and seeds as with the index, for each (step, k), and they are what is mixed."""
    config = replace(
        config, mixup=MixupConfig(alpha=0.4, per_image=True), batch=BatchConfig(global_batch=8, micro_batch=4)
    )
    split = Split(config.data.root, "train")
    micro_batches = MicroBatches(split.rows, config)
    for rank in range(2):
        loader = make_loader(split, config, CPU, start_step=0, dp_rank=rank, dp_size=2, num_threads=1)
        for step in range(4):
            batch, expected = loader.next(), micro_batches(step, rank)
            draws = batch.micro_batch
            assert (draws.step, draws.k, draws.dropout_seed) == (step, rank, expected.dropout_seed)
            assert draws.partners.tolist() == expected.partners.tolist()
            assert batch.lambdas.tolist() == draws.lambdas.tolist() == expected.lambdas.tolist()
            own, partners = batch.targets.numpy().T
            assert partners.tolist() == own[draws.partners].tolist()
            grey = draws.lambdas * grey_of(own) + (1 - draws.lambdas) * grey_of(partners)
            assert batch.images.mean(dim=(1, 2, 3)).numpy() == pytest.approx(grey, abs=1e-4)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("shuffle", ["full", "none"])
def test_the_position_is_that_of_the_last_batch(config: Config, dataset: Path, shuffle: str, size: int) -> None:
    """Also where a pass ends, between batches or within one, and whatever was prefetched. Photographs and Mixup, so
    that a crop that differs shows."""
    data = replace(config.data, root=str(dataset), shuffle=shuffle, prefetch=3)
    config = replace(config, data=data, mixup=MixupConfig(alpha=0.2))
    loader = loader_of(config, 1, 2, size=size)  # 25 images a pass
    batches, states = [], []
    for _ in range(24):
        batches.append(loader.next())
        states.append(loader.state())
    for done in (1, 4, 5, 6, 7, 10, 12, 15, 18):
        again = loader_of(
            config, 1, 2, size=size, start_step=done, saved_states=[{"basis": states[0]["basis"]}, states[done - 1]]
        )
        for expected, batch in zip(batches[done : done + 6], take(again, 6), strict=True):
            assert torch.equal(batch.images, expected.images) and torch.equal(batch.targets, expected.targets)
            assert batch.micro_batch.step == expected.micro_batch.step


def test_a_run_goes_on_bit_for_bit(train: Train, tmp_path: Path) -> None:
    two = {"ranks": 2}
    output = train("whole", *STREAM, "--run.max_steps", "5", **two)
    assert (
        "the samples depend on the number of ranks, 2, and the run can be resumed only with the same number" in output
    )
    train("stopped", *STREAM, "--run.max_steps", "3", **two)

    refused = train("stopped", *STREAM, ranks=1, status=2)
    assert (
        "the checkpoint of step 3 cannot be resumed: ranks 2 -> 1. Set it back; or set run.accept_changed_recipe"
        in refused
    )
    bigger = train("stopped", *STREAM, "--data.shuffle_buffer", "9", status=2, **two)
    assert "data.shuffle_buffer 1024 -> 9" in bigger

    shutil.copytree(tmp_path / "stopped", tmp_path / "accepted", symlinks=True)
    accepted = train("accepted", *STREAM, "--run.max_steps", "4", "--run.accept_changed_recipe", "true")
    assert "the place in the data cannot be kept (ranks 2 -> 1): a new pass begins at step 3" in accepted

    train("stopped", *STREAM, "--run.max_steps", "5", **two)
    whole, again = final_weights(tmp_path / "whole"), final_weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_from_the_index_to_the_stream(train: Train) -> None:
    train("run", "--run.max_steps", "2")
    assert "data.reader index -> stream" in train("run", *STREAM, status=2)
    output = train("run", *STREAM, "--run.max_steps", "3", "--run.accept_changed_recipe", "true")
    assert "the place in the data cannot be kept (it holds no place in a stream)" in output


# ---------------------------------------------------------------------------------------------------------------
# Shards that lie elsewhere
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def away(dataset: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(data.root without training shards, the directory that has them)."""
    root, place = tmp_path / "root", tmp_path / "away"
    shutil.copytree(dataset, root)
    place.mkdir()
    shutil.move(root / "train", place / "train")
    return root, place


def test_shards_in_another_directory(train: Train, away: tuple[Path, Path], tmp_path: Path) -> None:
    train("here", *STREAM, "--run.max_steps", "2")
    train("away", *STREAM, "--run.max_steps", "2", "--data.root", str(away[0]), "--data.stream_url", str(away[1]))
    here, there = final_weights(tmp_path / "here"), final_weights(tmp_path / "away")
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_shards_that_are_not_those_of_the_index(config: Config, away: tuple[Path, Path]) -> None:
    root, place = away
    config = replace(config, data=replace(config.data, root=str(root), stream_url=str(place), shuffle="none"))
    shard = place / "train" / "train-00000-of-00003"
    content = shard.read_bytes()
    shard.write_bytes(content[:-20])
    with pytest.raises(RunError, match=rf"cannot read what lies beside {shard}: .*Error reading from a file"):
        take(loader_of(config), 20)
    shard.write_bytes(content)
    write_shard(shard, [(jpeg(photograph(0, 30, 80)), 4)])
    with pytest.raises(
        DatasetError, match=r"the first record has the label 4, the index of .* 1: data.stream_url must hold copies"
    ):
        loader_of(config)
    shard.write_bytes(b"")
    with pytest.raises(DatasetError, match=rf"{shard} is missing or empty"):
        loader_of(config)


@contextmanager
def object_store(bucket: str, content: Path) -> Iterator[dict[str, str]]:
    """An S3 server with the files below `content` in a bucket; gives the environment that leads there."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    access = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    port = free_port()
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    try:
        url = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        client.create_bucket(Bucket=bucket)
        for path in sorted(path for path in content.rglob("*") if path.is_file()):
            client.upload_file(str(path), bucket, f"some/prefix/{path.relative_to(content)}")
        yield {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true", **access}
    finally:
        running.stop()


def test_shards_in_an_object_store(
    start_training: StartTraining, train: Train, away: tuple[Path, Path], tmp_path: Path
) -> None:
    """The same weights as from files, also after a stop and a new start. Needs moto[server] and boto3."""
    root, place = away
    short = ("--run.max_steps", "3")
    with object_store("bucket", place) as environment:
        there = {"ranks": 2, "environment": environment}
        remote = (*STREAM, "--data.root", str(root), "--data.stream_url", "s3://bucket/some/prefix")
        train("remote", *remote, "--run.max_steps", "2", **there)
        train("remote", *remote, *short, **there)
        output = train(
            "nowhere", *STREAM, "--data.root", str(root), "--data.stream_url", "s3://bucket/wrong", status=1, **there
        )
        assert (
            "data.reader stream cannot read what lies beside s3://bucket/wrong/train/train-00000-of-00003: S3 Object"
            in output
        )
    train("local", *STREAM, *short, ranks=2)
    remote_weights, local_weights = final_weights(tmp_path / "remote"), final_weights(tmp_path / "local")
    assert all(torch.equal(remote_weights[name], local_weights[name]) for name in local_weights)


# ---------------------------------------------------------------------------------------------------------------
# Traps
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(numbered: Path, tmp_path: Path) -> Path:
    """A copy of the dataset to damage."""
    root = tmp_path / "own"
    shutil.copytree(numbered, root)
    return root


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda lines: lines[:-1],
            r"00001-of-00005.idx has 16 records, dataset.json says 17: run `dali-train data index",
        ),
        (lambda lines: [*lines[:3], "abc", *lines[3:]], r"is not a list of offsets and sizes \(.*'abc'"),
        (lambda lines: [lines[0], lines[0], *lines[2:]], "goes from byte 0 to .* with or without gaps"),
        (lambda lines: [*lines[:-1], "9 9"], "goes from byte 0 to 18 with or without gaps, its shard has"),
        (lambda lines: None, "00001-of-00005.idx is missing, the stream reader needs it"),
    ],
)
def test_a_text_index_that_does_not_cover_its_shard(own: Path, damage: Any, message: str) -> None:
    index = own / "idx_files" / "train" / "train-00001-of-00005.idx"
    lines = damage(index.read_text().splitlines())
    index.unlink()
    if lines is not None:
        index.write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=message):
        check_shards(Split(own, "train"), DataConfig(root=str(own), reader="stream"), 1)


def test_fewer_records_than_ranks(numbered: Path) -> None:
    split = Split(numbered, "train")
    check_shards(split, DataConfig(root=str(numbered)), NUM_IMAGES)
    with pytest.raises(ConfigError, match=r"has 53 train images for 54 ranks: .* use at most 53 ranks"):
        check_shards(split, DataConfig(root=str(numbered)), NUM_IMAGES + 1)


def test_raw_records_are_refused(tmp_path: Path) -> None:
    features: dict[str, str | int] = {"image/format": "RAW", "image/height": 8, "image/width": 8}
    write_shard(tmp_path / "train" / "train-00000-of-00001", [(bytes(8 * 8 * 3), 1)] * 4, **features)
    build_index(tmp_path)
    with pytest.raises(
        ConfigError, match=r"holds raw pixels: only encoded images can be streamed; set data.reader index"
    ):
        check_shards(Split(tmp_path, "train"), DataConfig(root=str(tmp_path)), 1)


def with_record(root: Path, place: int, features: dict[str, Any], image: bytes | None = None) -> None:
    """Put another record into the second shard, in the text index, too, behind the back of the columnar index."""
    shard = root / "train" / "train-00001-of-00005"
    index = root / "idx_files" / "train" / f"{shard.name}.idx"
    content, spans = shard.read_bytes(), [tuple(map(int, line.split())) for line in index.read_text().splitlines()]
    records = [content[start : start + size] for start, size in spans]
    records[place] = b"".join(map(bytes, frame_record(encode_example(image or solid_image(0), features))))
    starts = np.cumsum([0, *map(len, records)]).tolist()
    shard.write_bytes(b"".join(records))
    index.write_text("".join(f"{start} {len(record)}\n" for start, record in zip(starts, records, strict=False)))
    manifest = root / "dataset.json"
    manifest.write_text(manifest.read_text().replace(f'"num_bytes": {len(content)}', f'"num_bytes": {starts[-1]}'))
    os.utime(root / "index" / "train.npy")


@pytest.mark.parametrize("places", [[9], range(17)])
@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image/class/lable": 3}, "record"),
        ({"image/class/label": "3"}, "a record has more or less than one integer in image/class/label"),
    ],
)
def test_a_record_without_its_label(config: Config, own: Path, features: Any, places: Any, message: str) -> None:
    """Wherever it stands: the first batch is checked, and every later one."""
    for place in places:
        with_record(own, place, features)
    data = replace(config.data, root=str(own), shuffle="none")
    with pytest.raises(DatasetError, match=rf"{message}.*data verify"):
        take(loader_of(replace(config, data=data)), 10)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"image/class/lable": 3},
            "feature image/class/label is missing; the record has image/class/lable, image/encoded. ",
        ),
        ({"image/class/label": "3"}, "feature image/class/label is a list of bytes, expected int64. "),
    ],
)
def test_the_first_record_is_looked_at(numbered: Path, tmp_path: Path, features: Any, message: str) -> None:
    place = tmp_path / "away" / "train"
    shutil.copytree(numbered / "train", place)
    record = b"".join(map(bytes, frame_record(encode_example(solid_image(0), features))))
    shard = place / "train-00000-of-00005"
    shard.write_bytes(record + shard.read_bytes())
    data = DataConfig(root=str(numbered), reader="stream", stream_url=str(tmp_path / "away"))
    with pytest.raises(DatasetError, match=re.escape(message)):
        check_shards(Split(numbered, "train"), data, 1)


def test_an_undecodable_image_is_named(config: Config, own: Path) -> None:
    with_record(own, 9, {"image/class/label": 1}, jpeg(photograph(0, 40, 40))[:-40])
    data = replace(config.data, root=str(own), crop_area=(1, 1), crop_aspect=(1, 1), shuffle="none")
    shard = own / "train" / "train-00001-of-00005"
    with pytest.raises(
        DatasetError, match=rf"an image cannot be decoded \(.*{shard} at index \d+\). Run .*data verify"
    ):
        take(loader_of(replace(config, data=data)), 10)


def test_settings_that_do_not_fit(config: Config) -> None:
    with pytest.raises(
        ConfigError, match=r"hooks.trace_samples is true with data.reader stream, .*: set hooks.trace_samples false"
    ):
        replace(config, hooks=replace(config.hooks, trace_samples=True))
    with pytest.raises(
        ConfigError, match=r"data.stream_url is s3://b, but data.reader is index.*: set data.reader stream"
    ):
        DataConfig(root="data", stream_url="s3://b")
    with pytest.raises(
        ConfigError, match=r"data.local_copy is /scratch, but data.reader is stream.*: set data.reader index"
    ):
        DataConfig(root="data", reader="stream", local_copy="/scratch")
    with pytest.raises(ConfigError, match=r"data.shuffle_buffer is 0: use at least 1"):
        DataConfig(root="data", shuffle_buffer=0)


def test_doctor_reads_from_the_storage(
    run_command: Train, tiny_config: Path, away: tuple[Path, Path], tmp_path: Path
) -> None:
    root, place = away
    words = (
        "doctor",
        "--config",
        str(tiny_config),
        "--run.dir",
        str(tmp_path / "run"),
        "--data.root",
        str(root),
        *STREAM,
    )
    output = run_command(*words, "--data.stream_url", str(place))
    assert re.search(rf"pass  data train +50 images in 5 classes, read from {place}", output), output
    output = run_command(*words, "--data.stream_url", str(tmp_path), status=1)
    assert re.search(r"fail  data train .*train-00000-of-00003 is missing or empty", output), output
