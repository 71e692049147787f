"""The DALI graphs against PIL: same boxes, same pixels, same mixtures."""

import gc
import io
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dali_train.config import Config, MixupConfig, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import index_path
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.loading import dali
from dali_train.data.loading.cpu import CpuTransform
from dali_train.data.loading.dali import PREFETCH
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import Batch, CpuPipeline, DaliPipeline, EvaluationPipeline
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.errors import DatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import TINY_CONFIG, encoded, jpeg, photograph, write_shard
from tests.helpers import first_batches, loader_of, wait_until
from tools.bench.generated import accept_index

CPU = torch.device("cpu")


@pytest.fixture
def unmixed(config: Config) -> Config:
    return replace(config, mixup=MixupConfig(alpha=0))


def grey_levels(images: torch.Tensor) -> np.ndarray:
    """(n, 3, h, w) normalised with 127.5 -> (n, h, w, 3) from 0 to 255."""
    return images.float().permute(0, 2, 3, 1).numpy() * 127.5 + 127.5


def pil_image(split: Split, image: int) -> Image.Image:
    return Image.open(io.BytesIO(stored_image(MappedFiles(split), image).tobytes())).convert("RGB")


def pil_crops(split: Split, batch: Batch, size: int, how: Image.Resampling = Image.Resampling.BILINEAR) -> np.ndarray:
    micro = batch.micro_batch
    crops = []
    drawn = [(Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)[number] for number in micro.filters]
    rows = zip(micro.images, micro.boxes, micro.flips, drawn or [how] * len(micro.images), strict=True)
    for image, (top, left, height, width), flip, resampling in rows:
        box = (left, top, left + width, top + height)
        crop = np.asarray(pil_image(split, image).crop(box).resize((size, size), resampling), dtype=np.float32)
        crop = crop[:, ::-1] if flip & 1 else crop
        crops.append(crop[::-1] if flip & 2 else crop)
    return np.stack(crops)


@pytest.mark.parametrize(("interpolation", "vertical"), [("bilinear", 0), ("bicubic", 0), ("random", 0.5)])
def test_training_pixels_are_those_of_pil(unmixed: Config, interpolation: str, vertical: float) -> None:
    unmixed = unmixed.replace({"data.interpolation": interpolation, "data.vertical_flip": vertical})
    split = Split(unmixed.data.root, "train")
    batches = first_batches(unmixed, 16)
    assert {int(flip) for batch in batches for flip in batch.micro_batch.flips} == (
        {0, 1, 2, 3} if vertical else {0, 1}
    )
    filters = {int(number) for batch in batches for number in batch.micro_batch.filters}
    assert filters == ({0, 1} if interpolation == "random" else set())
    how = Image.Resampling[interpolation.upper()] if interpolation != "random" else Image.Resampling.NEAREST
    differences = [np.abs(grey_levels(b.images) - pil_crops(split, b, 32, how)).mean(axis=(1, 2, 3)) for b in batches]
    assert np.concatenate(differences).mean() < 0.1


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1), (500, 2), (31, 33)])
@pytest.mark.parametrize("flip", [0, 1])
def test_crops_of_any_shape(config: Config, shape: tuple[int, int], flip: int) -> None:
    crop = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    transform = CpuTransform(config.data, pixel_format(config, CPU, 1), size=1)
    expected = np.asarray(Image.fromarray(crop).resize((32, 32), Image.Resampling.BILINEAR), dtype=np.float32)
    images = transform([crop], np.array([flip], dtype=np.int32), None)
    assert np.abs(grey_levels(images)[0] - (expected[:, ::-1] if flip else expected)).max() < 1.01


def test_number_of_threads_changes_nothing(config: Config, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(3)
    augmented = {"data.augment": "rand-m9-mstd0.5-inc1", "data.random_erasing": 0.25, "data.color_jitter": 0.3}
    one, many = (loader_of(config.replace(augmented), num_threads=number) for number in (1, 5))
    assert all(torch.equal(one.next().images, many.next().images) for _ in range(8))
    assert torch.get_num_threads() == 3, "torch's own are set to 1 and back meanwhile"


def test_memory_of_batches_is_used_again(config: Config) -> None:
    loader = loader_of(config)
    places = {loader.next().images.data_ptr() for _ in range(40)}
    assert len(places) <= PREFETCH + 3  # ready, in the making, and two in the caller's hands


def test_progressive_sizes_are_those_of_their_steps(config: Config) -> None:
    """2 ranks, 50 images, 32 per step: steps 0 to 1 until epoch 1, 2 to 3 until epoch 2. A resumed loader begins at its
    step's."""
    progressive = config.replace({"data.progressive": ((1, 16), (2, 24)), "mixup.cutmix_alpha": 1.0})
    threads = threading.active_count()
    for start_step in (0, 3):
        loader = loader_of(progressive, start_step=start_step, rank=1, ranks=2)
        for step in range(start_step, 6):
            size = (16, 16, 24, 24, 32, 32)[step]
            sized = config.replace({"data.train_size": size, "mixup.cutmix_alpha": 1.0})
            alone = loader_of(sized, start_step=step, rank=1, ranks=2)
            for _ in range(4):
                batch = loader.next()
                assert (batch.micro_batch.step, batch.micro_batch.size, batch.images.shape[-1]) == (step, size, size)
                assert torch.equal(batch.images, alone.next().images)
    del loader, alone
    # Each size's threads end with it, once what they were doing is done.
    wait_until(lambda: gc.collect() >= 0 and threading.active_count() <= threads)


def test_without_antialiasing_pixels_differ(unmixed: Config) -> None:
    """So that the test above could fail."""
    aliased = replace(unmixed, data=replace(unmixed.data, antialias=False))
    split = Split(aliased.data.root, "train")
    differences = [np.abs(grey_levels(b.images) - pil_crops(split, b, 32)).mean() for b in first_batches(aliased, 16)]
    assert np.mean(differences) > 0.5


@pytest.mark.parametrize("mode", ["short-side", "squash"])
def test_evaluation_pixels_are_those_of_torchvision(unmixed: Config, mode: str) -> None:
    data = replace(unmixed.data, eval_resize=mode)
    split = Split(data.root, "validation")
    batches = [np.arange(0, 6), np.arange(6, 12), np.arange(12, 13)]
    pipeline = EvaluationPipeline(split, batches, data, pixel_format(unmixed, CPU, 1))
    short_side = v2.Resize(36, interpolation=v2.InterpolationMode.BILINEAR)
    resize = v2.Compose([short_side if mode == "short-side" else v2.Resize((36, 36)), v2.CenterCrop(32)])
    for numbers in [*batches, *batches]:  # the second round: a pipeline evaluates again and again
        images, labels = pipeline.run()
        assert labels.tolist() == split.rows["label"][numbers].tolist()
        expected = np.stack([np.asarray(resize(pil_image(split, i)), dtype=np.float32) for i in numbers])
        assert np.abs(grey_levels(images) - expected).mean() < 0.5


def test_float16_and_channels_last_are_the_same_pixels(config: Config) -> None:
    changed = replace(
        config, model=replace(config.model, channels_last=True), precision=replace(config.precision, dtype="fp16")
    )
    for batch, plain in zip(first_batches(changed, 3), first_batches(config, 3), strict=True):
        assert batch.images.dtype == torch.float16
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch.images, plain.images.half())


def test_batches_do_not_change_after_they_were_handed_over(unmixed: Config) -> None:
    batches = first_batches(unmixed, 12)
    kept = [batch.images.clone() for batch in batches]
    first_batches(unmixed, 12)
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, kept, strict=True))


def test_synthetic_loader_has_the_same_face(config: Config) -> None:
    loader = loader_of(config.replace({"data.reader": "synthetic"}), rank=1, ranks=2)
    real = loader_of(config, rank=1, ranks=2)
    for _ in range(6):
        synthetic = loader.next()
        expected = real.next()
        places = [(batch.micro_batch.step, batch.micro_batch.k) for batch in (synthetic, expected)]
        assert places[0] == places[1]
        assert synthetic.images.shape == expected.images.shape
        assert synthetic.images.dtype == expected.images.dtype
        assert torch.equal(synthetic.targets, expected.targets)
        assert torch.equal(synthetic.lambdas, expected.lambdas)


def test_undecodable_image_is_named(tmp_path: Path) -> None:
    good = [(jpeg(photograph(i, 40, 40)), 1) for i in range(7)]
    shard = tmp_path / "train" / "train-00000-of-00001"
    write_shard(shard, [*good[:4], (good[4][0][:-40], 1), *good[5:]])
    build_index(tmp_path)
    (tmp_path / "config.py").write_text(TINY_CONFIG.format(root=str(tmp_path)))
    config = load_config(tmp_path / "config.py")
    offset = Split(tmp_path, "train").rows["offset"][4]
    with pytest.raises(
        DatasetError, match=rf"image 4 \({shard}, \d+ bytes at byte {offset}\) cannot be decoded: .*data verify"
    ):
        first_batches(config, 8)


SIZES = {"huge": (60_000, 30_000), "turned": (60, 40), "small": (24, 36)}
LIES = [(reader, name) for reader in ("cpu", "boxes", "complete images", "evaluation", "raw") for name in SIZES]
LIES.remove(("raw", "turned"))  # as many pixels; only `data verify` compares the record


@pytest.mark.parametrize(("reader", "name"), LIES)
def test_an_index_that_lies_about_a_size(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, name: str
) -> None:
    """With checksums that fit: no region of another image is used, and nothing is read beside one. "complete images" is
    the way of some GPUs."""
    raw = reader == "raw"
    features: dict[str, str | int] = {"image/format": "RAW", "image/height": 40, "image/width": 60} if raw else {}
    images = [photograph(seed, 40, 60) for seed in range(8)]
    write_shard(tmp_path / "train" / "a", [(i.tobytes() if raw else jpeg(i), 1) for i in images], **features)
    build_index(tmp_path)
    rows = np.load(index_path(tmp_path, "train"))
    rows["height"][4], rows["width"][4] = height, width = SIZES[name]
    np.save(index_path(tmp_path, "train"), rows)
    accept_index(tmp_path)
    monkeypatch.setattr(dali, "decodes_boxes", lambda pixels: reader == "boxes")
    with pytest.raises(DatasetError) as error:
        split, pixels = Split(tmp_path, "train"), pixel_format(config, CPU, 1)
        if reader == "evaluation":
            EvaluationPipeline(split, [np.arange(8)], config.data, pixels).run()
        else:
            changed = config.replace({"data.root": str(tmp_path), "batch.micro_batch": 8, "batch.global_batch": 8})
            micro_batches = MicroBatches(split.rows, changed)
            kind = CpuPipeline if reader == "cpu" else DaliPipeline
            kind(split, MappedFiles(split), lambda: micro_batches(0, 0), changed.data, pixels, size=8).run()
    if raw:
        assert f"row 4 (record 4 of a) has height {height}, which cannot be" in str(error.value)
    else:
        assert f"image 4 ({tmp_path}/train/a" in str(error.value)
        assert f"decoded to 60 x 40 pixels, where {width} x {height} were expected" in str(error.value)


def test_raw_records_give_the_pixels_of_their_images(config: Config, tmp_path: Path) -> None:
    """The same images once as PNG and once as raw pixels."""
    images = [photograph(i, 44, 52) for i in range(24)]
    features: dict[str, str | int] = {"image/format": "RAW", "image/height": 44, "image/width": 52}
    for split in ("train", "validation"):
        name = f"{split}/{split}-00000-of-00001"
        write_shard(tmp_path / "png" / name, [(encoded(image, "PNG"), 1) for image in images])
        write_shard(tmp_path / "raw" / name, [(image.tobytes(), 1) for image in images], **features)
    batches = []
    for kind in ("png", "raw"):
        build_index(tmp_path / kind)
        stored = replace(config, data=replace(config.data, root=str(tmp_path / kind)))
        pipeline = EvaluationPipeline(
            Split(tmp_path / kind, "validation"), [np.arange(24)], stored.data, pixel_format(config, CPU, 1)
        )
        batches.append([*(batch.images for batch in first_batches(stored, 8)), pipeline.run()[0]])
    assert all(torch.equal(png_batch, raw_batch) for png_batch, raw_batch in zip(*batches, strict=True))
