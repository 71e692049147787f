"""The GPU's data path against the CPU's, and training on a GPU. All of it is skipped where there is none.

With GPU_TESTS_ON=cpu a CPU stands in for the GPU: a rehearsal, which shows that the tests themselves run.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.config import Config, MixupConfig, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.dali import decode_repeatedly
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import Batch, DaliPipeline, EvaluationPipeline
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import TINY_CONFIG, Train, final_weights, jpeg, write_shard
from tests.helpers import loader_of, state_difference

KIND = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = pytest.mark.skipif(
    KIND == "cuda" and not torch.cuda.is_available(), reason="torch finds no GPU on this host"
)
only_on_gpu = pytest.mark.skipif(KIND != "cuda", reason="only a GPU can do this")

CPU = torch.device("cpu")
# Grey levels, mean of an image: JPEG decoders may differ by one in each step (ITU-T T.83). Color that is repeated where
# it should be interpolated makes three, a box, a flip or a partner that is wrong twenty and more.
CLOSE = 2.0


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if KIND == "cuda" else CPU


@pytest.fixture(autouse=True)
def ends_its_process_if_cuda_is_broken() -> Iterator[None]:
    """After an illegal access every call of CUDA in this process fails; xdist starts another for the next test."""
    yield
    if KIND == "cuda" and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(1)
            pytest.exit(f"CUDA is broken in this process: {error}")


def smooth_image(seed: int, height: int, width: int) -> Image.Image:
    """Blobs of some 16 pixels: no detail on which two decoders could differ, different everywhere."""
    pixels = np.random.default_rng(seed).integers(
        0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8
    )
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module", params=["JPEG", "RAW"])
def smooth_dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    for split in ("train", "validation"):
        path = root / split / f"{split}-00000-of-00001"
        if request.param == "JPEG":
            images = [smooth_image(i, 150 + 11 * (i % 9), 210 - 13 * (i % 11)) for i in range(24)]
            write_shard(path, [(jpeg(image), 1 + i % 5) for i, image in enumerate(images)])
        else:  # all of one size, which the features of the entire shard show
            images = [smooth_image(i, 150, 200) for i in range(24)]
            records = [(np.asarray(image).tobytes(), 1 + i % 5) for i, image in enumerate(images)]
            write_shard(path, records, **{"image/format": "RAW", "image/height": 150, "image/width": 200})
    build_index(root)
    return root


@pytest.fixture
def config(smooth_dataset: Path, tmp_path: Path) -> Config:
    path = tmp_path / "config.py"
    path.write_text(TINY_CONFIG.format(root=str(smooth_dataset)))
    return load_config(path)


def batches(config: Config, device: torch.device) -> list[Batch]:
    loader = loader_of(config, device=str(device), num_threads=2)
    kept = []
    for _ in range(6):
        batch = loader.next()
        assert batch.images.device == batch.targets.device == batch.lambdas.device == device
        kept.append(replace(batch, images=batch.images.clone()))  # its memory is used again
    return kept


def mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the image that differs most, in grey levels."""
    return float((a.cpu().float() - b.cpu().float()).abs().mean(dim=(1, 2, 3)).max()) * 127.5


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_training_images_are_those_of_the_cpu(config: Config, hw_decoder_load: float, alpha: float) -> None:
    config = replace(config, data=replace(config.data, hw_decoder_load=hw_decoder_load), mixup=MixupConfig(alpha=alpha))
    expected = batches(config, CPU)
    for ours, theirs in zip(batches(config, gpu()), expected, strict=True):
        assert mean_difference(ours.images, theirs.images) < CLOSE
        assert torch.equal(ours.targets.cpu(), theirs.targets)
        assert torch.equal(ours.lambdas.cpu(), theirs.lambdas)
        assert np.array_equal(ours.micro_batch.images, theirs.micro_batch.images)
    assert mean_difference(expected[0].images, expected[0].images.flip(3)) > 5 * CLOSE  # so that it could fail


@pytest.mark.parametrize(
    "settings",
    [
        {"data.augment": "rand-m9-mstd0.5-inc1", "data.color_jitter": 0.3},
        {"data.augment": "3-augment"},
        {"data.interpolation": "random", "data.vertical_flip": 0.5, "data.hue_jitter": 0.1, "data.gaussian_blur": 0.5},
        {"data.random_erasing": 1.0, "data.random_erasing_fill": "noise"},
        {"data.crop_side": 32, "data.crop_padding": 4},
        {"data.progressive": ((1, 16),), "model.kwargs.dynamic_img_size": True},
    ],
    ids=lambda settings: " ".join(str(value) for value in settings.values()),
)
def test_augmented_images_are_those_of_the_same_graph_on_the_cpu(
    config: Config, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI's operators, not PIL's, with which tests/loading/test_augment.py compares them: Equalize differs. One grey
    level in the decoded image may cross a threshold of Posterize or Solarize: a share of the pixels may."""
    config = config.replace(settings)
    monkeypatch.setattr("dali_train.data.loading.loader.CpuPipeline", DaliPipeline)
    for ours, theirs in zip(batches(config, gpu()), batches(config, CPU), strict=True):
        assert ours.images.shape == theirs.images.shape
        differences = (ours.images.cpu() - theirs.images).abs() * 127.5
        assert float((differences > 8).float().mean()) < 0.02 and float(differences.median()) < CLOSE


def test_float16_and_channels_last(config: Config) -> None:
    changed = replace(
        config, model=replace(config.model, channels_last=True), precision=replace(config.precision, dtype="fp16")
    )
    for ours, theirs in zip(batches(changed, gpu()), batches(config, gpu()), strict=True):
        assert ours.images.dtype == torch.float16
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert mean_difference(ours.images, theirs.images) < 0.1


def test_the_hardware_decoder_decodes_the_same_images_again_and_again() -> None:
    """Sizes from 32 to 600 pixels in one batch, while the GPU computes; without an error nvJPEG's hardware decoder has
    returned wrong pixels of some of them on H100 (meta-pytorch/torchcodec#1634)."""
    sizes = [(32 + 9 * number % 569, 600 - 9 * number) for number in range(64)]
    files = [np.frombuffer(jpeg(smooth_image(number, *size)), np.uint8) for number, size in enumerate(sizes)]
    (expected,) = decode_repeatedly(files, None, rounds=1)
    first, busy = None, torch.randn(4096 if KIND == "cuda" else 8, 512, device=gpu())
    rounds = 300 if KIND == "cuda" else 2
    for images in decode_repeatedly(files, gpu().index, rounds=rounds, hw_decoder_load=1.0):
        torch.mm(busy, busy.mT)
        if first is None:
            first = images
            pairs = zip(images, expected, strict=True)
            assert max(np.abs(image.astype(float) - on_cpu).mean() for image, on_cpu in pairs) < CLOSE
        assert all(np.array_equal(image, before) for image, before in zip(images, first, strict=True))


@pytest.mark.parametrize("hw_decoder_load", [0.0, 1.0])
def test_no_frame_is_overwritten_before_it_is_cut(tmp_path: Path, hw_decoder_load: float) -> None:
    """On H100 nvJPEG's hardware decoder writes at once, whatever its stream has still to do before
    (meta-pytorch/torchcodec#1634): a frame whose memory DALI gave to the next micro-batch too early would change before
    a busy GPU has cut and resized it. The micro-batches of a busy GPU are those of one that is waited for."""
    root, path = tmp_path / "large", tmp_path / "config.py"
    images = [smooth_image(seed, 400 + 3 * (seed % 50), 560 - 2 * (seed % 70)) for seed in range(96)]
    write_shard(root / "train" / "train-00000-of-00001", [(jpeg(image), 1) for image in images])
    build_index(root)
    path.write_text(TINY_CONFIG.format(root=str(root)))
    sizes = {"batch.micro_batch": 32, "batch.global_batch": 32, "data.train_size": 128}
    config = load_config(path).replace({"data.hw_decoder_load": hw_decoder_load, **sizes})
    side, rounds = (8192, 80) if KIND == "cuda" else (8, 3)
    matrix = torch.randn(side, side, device=gpu(), dtype=torch.bfloat16)

    def micro_batches(products: int) -> list[torch.Tensor]:
        loader, kept = loader_of(config, device=str(gpu()), num_threads=4), []
        for _ in range(rounds):
            for _ in range(products):  # of 1.4 ms each: every multiprocessor has something to do
                torch.mm(matrix, matrix)
            kept.append(loader.next().images.clone())
            if KIND == "cuda" and not products:
                torch.cuda.synchronize()
        return kept

    quiet = micro_batches(products=0)
    assert all(torch.equal(late, calm) for late, calm in zip(micro_batches(products=8), quiet, strict=True))
    assert not torch.equal(quiet[0], quiet[1])


def test_the_same_bits_again(config: Config) -> None:
    """What resuming bit for bit needs of the data path."""
    assert all(
        torch.equal(a.images, b.images) for a, b in zip(batches(config, gpu()), batches(config, gpu()), strict=True)
    )


def test_images_decoded_on_the_cpu_reach_the_gpu(config: Config) -> None:
    on_cpu = replace(config, data=replace(config.data, device="cpu"))
    for ours, theirs in zip(batches(on_cpu, gpu()), batches(on_cpu, CPU), strict=True):
        assert torch.equal(ours.images.cpu(), theirs.images)


@pytest.mark.parametrize("mode", ["short-side", "squash"])
def test_evaluation_images_are_those_of_the_cpu(config: Config, mode: str) -> None:
    split, data = Split(config.data.root, "validation"), replace(config.data, eval_resize=mode)
    numbers = [np.arange(0, 10), np.arange(10, 20), np.arange(20, 24)]
    ours, theirs = (
        EvaluationPipeline(split, numbers, data, pixel_format(config, device, 2)) for device in (gpu(), CPU)
    )
    for _ in [*numbers, *numbers]:
        (images, labels), (expected, expected_labels) = ours.run(), theirs.run()
        assert mean_difference(images, expected) < CLOSE
        assert torch.equal(labels.cpu(), expected_labels)


@pytest.mark.parametrize(
    "options",
    [
        "--precision.dtype fp32 --model.compile none",
        "--precision.dtype fp16 --model.compile none",
        "--precision.dtype bf16 --model.fast_norm true --ema.decay 0.9",
        pytest.param("--precision.dtype bf16 --model.compile cuda-graphs", marks=only_on_gpu),
        "--data.progressive 1,16 --model.kwargs.dynamic_img_size true --model.compile none",
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(train: Train, tmp_path: Path, options: str) -> None:
    settings = [*options.split(), "--run.device", KIND, "--run.deterministic", "true"]
    train("whole", *settings, "--run.max_steps", "4")
    train("parts", *settings, "--run.max_steps", "2")
    train("parts", *settings, "--run.max_steps", "4")
    whole, parts = final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(torch.isfinite(weight).all() for weight in whole.values())
    assert state_difference(tmp_path / "whole", tmp_path / "parts") == 0


def test_dalis_own_reader_trains(train: Train) -> None:
    settings = ["--data.reader", "dali", "--hooks.trace_samples", "false", "--run.device", KIND]
    assert "finished at step 3/" in train("run", *settings, "--run.max_steps", "3")


@only_on_gpu
def test_doctor_finds_the_gpu_in_order(run_command: Train, tiny_config: Path) -> None:
    output = run_command("doctor", "--config", str(tiny_config), "--run.device", "cuda")
    assert "pass  decode a batch" in output and "on the CPU, mean" not in output
