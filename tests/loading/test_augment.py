"""Augmentation, mixing, decoding and storage: one definition each, and both devices' forms of it agree."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from PIL import Image
from timm.data.auto_augment import rand_augment_choices
from timm.data.mixup import Mixup

from dali_train.config import Config, DataConfig, MixupConfig
from dali_train.data.dataset import storage as storages
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.loading.augment import OPERATORS, Operator, slide
from dali_train.data.loading.decoders import COMMON_OPTIONS, decode_boxes, describe_decoder, hardware_share
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import CpuPipeline, DaliPipeline, IndexedPipeline, mix
from dali_train.data.sampling.draws import DrawInput, draw_mixing
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.sampling.policy import IDENTITY, draw_operators, erased_boxes, policy_of
from dali_train.data.sampling.rng import Purpose, beta, philox_generator, shuffled, uniforms
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.doctor.decoding import decoder_in_log
from tests.conftest import photograph
from tests.helpers import first_batches, loader_of

CPU = torch.device("cpu")
BIG_VISION = DataConfig(root="data", augment="big-vision")
SIMCLR = {  # timm's arguments after those of SimCLR, and what else it draws with them
    "color_jitter": 0.4,
    "hue_jitter": 0.1,
    "color_jitter_probability": 0.8,
    "grayscale": 0.2,
    "gaussian_blur": 0.5,
    "vertical_flip": 0.3,
    "interpolation": "random",
}
LEVELS = np.array([-1, -0.8, -0.3, -0.05, 0.05, 0.4, 0.9, 1], dtype=np.float32)


def smooth(seed: int) -> np.ndarray:
    """(96, 96, 3) uint8: a photograph's range of frequencies."""
    return np.asarray(photograph(seed, 24, 24).resize((96, 96), Image.Resampling.BICUBIC))


# ---------------------------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------------------------

# Mean difference between an operator's two forms, in grey levels, and why it is not 0. Seen on ImageNet's photographs
# at 224
# pixels: at most 0.55, with these exceptions: Equalize 5.1, Color 1.1, Contrast 1.0.
CLOSE = {
    "Equalize": 8.0,  # OpenCV's formula in DALI, PIL's in torch
    **dict.fromkeys(
        ["Contrast", "ContrastIncreasing", "ContrastWide", "ContrastBy"], 1.1
    ),  # around a rounded mean, or not
    **dict.fromkeys(["Color", "ColorIncreasing", "ColorWide", "ColorBy", "Grayscale"], 1.3),  # grey is rounded, or not
}


@pipeline_def(batch_size=len(LEVELS), num_threads=1, device_id=None)
def graph_of(operator: Operator, images: list[np.ndarray], arguments: np.ndarray):  # type: ignore[no-untyped-def]
    inputs = fn.external_source(
        source=lambda: (images, arguments),
        num_outputs=2,
        batch=True,
        dtype=[types.UINT8, types.FLOAT],
        ndim=[3, 0],
        layout=["HWC", ""],
    )
    return operator.dali(*inputs)


@pytest.mark.filterwarnings("ignore:The external source node")  # an operator without argument leaves it unused
@pytest.mark.parametrize("name", OPERATORS)
def test_both_forms_of_an_operator_agree(name: str) -> None:
    operator = OPERATORS[name]
    images = [smooth(seed) for seed in range(len(LEVELS))]
    arguments = operator.argument(LEVELS, 96).astype(np.float32)
    pipe = graph_of(operator, images, arguments)
    pipe.build()
    (by_dali,) = pipe.run()
    for number, (image, argument) in enumerate(zip(images, arguments.tolist(), strict=True)):
        by_torch = operator.cpu(torch.from_numpy(image.copy()).permute(2, 0, 1), argument).permute(1, 2, 0).numpy()
        difference = np.abs(np.asarray(by_dali[number]).astype(int) - by_torch.astype(int)).mean()
        assert difference < CLOSE.get(name, 0.8), f"level {LEVELS[number]}: {difference:.2f} grey levels"


@pytest.mark.parametrize(("augment", "increasing"), [("rand-m9", False), ("rand-m9-inc1", True)])
def test_rand_augments_operators_are_timms(augment: str, increasing: bool) -> None:
    """In its order, which decides the draws."""
    (group, *_) = policy_of(DataConfig(root="data", augment=augment)).groups
    names = [alternative[0].operator for alternative in group.alternatives]
    assert names == list(rand_augment_choices("", increasing=increasing))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ("Grayscale", "Solarize128", IDENTITY)])
def test_operators_are_timms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At timm's magnitudes, on PIL images, where timm has an operator of that name."""
    from timm.data import auto_augment as timm_augment

    if name not in timm_augment.NAME_TO_OP or name == "Desaturate":
        pytest.skip("timm has no such operator")
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: value)
    operator, to_argument = OPERATORS[name], timm_augment.LEVEL_TO_ARG[name]
    for level in (0.3, 0.5, 0.9, 1.0):
        image = Image.fromarray(smooth(3))
        arguments = to_argument(level * 10, dict(timm_augment._HPARAMS_DEFAULT)) if to_argument else ()
        if "Posterize" in name:
            arguments = (max(1, *arguments),)  # Pillow refuses 0 bits
        expected = timm_augment.NAME_TO_OP[name](
            image, *arguments, fillcolor=(128,) * 3, resample=Image.Resampling.BILINEAR
        )
        argument = float(operator.argument(np.array([level], dtype=np.float32), 96)[0])
        ours = operator.cpu(torch.from_numpy(np.array(image)).permute(2, 0, 1), argument).permute(1, 2, 0).numpy()
        assert np.abs(ours.astype(int) - np.asarray(expected).astype(int)).mean() < 1.0


@pytest.mark.parametrize("amount", [-100.0, -31.5, -7.9, -0.3, 0.0, 0.5, 30.3, 31.0, 95.8, 100.0])
def test_translation_is_pils(amount: float) -> None:
    image = Image.fromarray(smooth(3))
    for x, y in ((amount, 0.0), (0.0, amount)):
        expected = image.transform(
            image.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y), Image.Resampling.BILINEAR, fillcolor=(128,) * 3
        )
        assert np.abs(np.asarray(slide(image, x, y)).astype(int) - np.asarray(expected)).max() <= 1


def augmented(config: Config, augment: str, **data: object) -> Config:
    return replace(config, data=replace(config.data, augment=augment, **data))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            "randm-m9",
            r"data.augment is 'randm-m9': there is no such policy, did you mean rand\? There are none, rand, trivial",
        ),
        ("rand-m9-msd0.5", r"rand has no setting 'msd0.5', only m, n, p, mstd, mmax, inc, t"),
        ("trivial-m9", "trivial has no setting 'm9', and none at all"),
        ("randaugment", r"did you mean rand\?"),
        ("autoaugment", r"did you mean auto-imagenet\?"),
        ("rand-ninf", "rand has no setting 'ninf'"),
        ("rand-m11", "m is 11, over mmax 10"),
        ("rand-n0", "n is 0, use 1 to 8 operators per image"),
    ],
)
def test_augment_is_checked(augment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(root="data", augment=augment)


def test_unknown_operators_are_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="there is no operator Solarise; did you mean Solarize"):
        loader_of(augmented(config, "rand-tRotate+Solarise"))


def drawn_for(epochs: np.ndarray, images: np.ndarray) -> DrawInput:
    sides = np.ones(len(images), int)
    return DrawInput(numbers=images, draw_numbers=epochs, heights=sides, widths=sides)


def test_draws_are_pure_functions_of_image_and_epoch() -> None:
    policy = policy_of(DataConfig(root="data", augment="rand-m9-mstd0.5-inc1", color_jitter=0.3))
    images = np.arange(4000) % 2000
    epochs = np.arange(4000) // 2000
    operators, levels = draw_operators(3, policy, drawn_for(epochs, images))
    assert operators.shape == levels.shape == (4000, 2 + 3)
    some = np.random.default_rng(0).permutation(4000)[:100]
    again = draw_operators(3, policy, drawn_for(epochs[some], images[some]))
    assert np.array_equal(again[0], operators[some])
    assert np.array_equal(again[1], levels[some])
    assert not np.array_equal(operators[:2000], operators[2000:])
    counts = np.bincount(operators[:, 0], minlength=len(policy.names))[:16]
    assert abs(counts[0] - 2000) < 150
    assert (abs(counts[1:] - 2000 / 15) < 50).all()  # each of 15 with half of the probability
    strength = np.abs(levels[:, :2])
    assert abs(strength.mean() - 0.9) < 0.01
    assert 0.04 < strength.std() < 0.06
    assert strength.max() == 1
    assert abs((levels > 0).mean() - 0.5) < 0.02
    names = np.array(policy.names)[operators[:, 2:]]
    assert {tuple(sorted(row)) for row in names} == {("BrightnessBy", "ColorBy", "ContrastBy")}
    assert len({tuple(row) for row in names}) == 6
    assert np.abs(levels[:, 2:]).max() < 0.3


def test_jitter_grayscale_and_blur_come_as_often_as_asked() -> None:
    policy = policy_of(DataConfig(root="data", **SIMCLR))  # type: ignore[arg-type]
    operators, levels = draw_operators(0, policy, drawn_for(np.zeros(8000, int), np.arange(8000)))
    names = np.array(policy.names)[operators]
    jittered = names[:, 0] != IDENTITY
    assert abs(jittered.mean() - 0.8) < 0.02
    assert (names[~jittered, :4] == IDENTITY).all()
    orders, counts = np.unique(names[jittered, :4], axis=0, return_counts=True)
    assert len(orders) == 24
    assert counts.min() > 0.7 * jittered.sum() / 24
    hue = np.abs(levels[names == "HueBy"])
    assert abs(hue.mean() - 0.05) < 0.002
    assert hue.max() < 0.1
    gray = names[:, 4] == "Grayscale"
    blurred = names[:, 5] == "GaussianBlur"
    assert abs(gray.mean() - 0.2) < 0.02
    assert abs(blurred.mean() - 0.5) < 0.02
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.05 for a, b in ((jittered, gray), (gray, blurred), (jittered, blurred)))


def test_policies_draw_from_rows_of_the_table() -> None:
    for augment in (
        "trivial",
        "3-augment",
        "big-vision",
        "colossalai",
        "auto-imagenet-mstd0.5",
        "auto-cifar10",
        "rand-m6",
    ):
        policy = policy_of(DataConfig(root="data", augment=augment))
        assert set(policy.names) <= set(OPERATORS), augment
        operators, levels = draw_operators(0, policy, drawn_for(np.zeros(500, int), np.arange(500)))
        assert set(np.unique(operators)) == set(range(len(policy.names))) - (
            {0} if augment in ("3-augment", "big-vision") else set()
        )
        assert np.isfinite(levels).all() and np.abs(levels).max() <= 1


def test_big_visions_magnitudes() -> None:
    """randaug(2, 10) as its source computes them: degrees, bits, a threshold that overflows to 0, factors, pixels of
    224."""
    level = np.array([1], dtype=np.float32)
    strengths = {name: abs(float(OPERATORS[name].argument(level, 224)[0])) for name in policy_of(BIG_VISION).names}
    expected = {
        "Rotate": 30,
        "Posterize": 256 - 2**4,
        "SolarizeIncreasing": 0,
        "SolarizeAdd": 110,
        "Color": 1.9,
        "Contrast": 1.9,
        "Brightness": 1.9,
        "Sharpness": 1.9,
        "ShearX": 0.3,
        "ShearY": 0.3,
        "TranslateX100": 100,
        "TranslateY100": 100,
    }
    assert {name: pytest.approx(strength) for name, strength in strengths.items() if name in expected} == expected
    assert set(strengths) - set(expected) == {IDENTITY, "AutoContrast", "Equalize", "Invert", "Cutout40"}


def test_cutout_is_anywhere_in_the_image() -> None:
    levels = np.random.default_rng(0).uniform(-1, 1, 4000).astype(np.float32)
    rows, columns = np.divmod(OPERATORS["Cutout40"].argument(levels, 224), 4096)
    for places in (rows, columns):
        counts = np.histogram(places, bins=8, range=(0, 224))[0]
        assert places.min() >= 0
        assert places.max() <= 223
        assert (abs(counts - 500) < 90).all()
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.05
    image = OPERATORS["Cutout40"].cpu(torch.zeros(3, 224, 224, dtype=torch.uint8), 100 * 4096 + 10)
    assert (image[:, 60:140, :50] == 128).all()
    assert image.count_nonzero() == 3 * 80 * 50
    with pytest.raises(ConfigError, match=r"data.train_size is 5000: Cutout takes images of at most 4096 pixels"):
        OPERATORS["Cutout40"].argument(levels, 5000)


def test_erased_boxes() -> None:
    images = np.arange(3000)
    boxes = erased_boxes(0, drawn_for(np.zeros(3000, int), images), probability=0.25, size=64)
    erased = boxes[boxes[:, 2] > 0]
    assert 0.22 < len(erased) / 3000 < 0.28
    area = (erased[:, 2] * erased[:, 3]) / 64**2
    assert area.min() > 0.01
    assert area.max() < 0.36
    assert (erased[:, 0] + erased[:, 2] <= 64).all()
    assert (erased[:, 1] + erased[:, 3] <= 64).all()
    assert not erased_boxes(0, drawn_for(np.zeros(9, int), images[:9]), probability=0, size=64).any()


# ---------------------------------------------------------------------------------------------------------------
# Both devices' pipelines, on the CPU
# ---------------------------------------------------------------------------------------------------------------


def source_of(kind: type[IndexedPipeline], config: Config) -> IndexedPipeline:
    split = Split(config.data.root, "train")
    micro_batches, places = MicroBatches(split.rows, config), iter(range(100))
    return kind(
        split,
        MappedFiles(split),
        lambda: micro_batches(0, next(places)),
        config.data,
        pixel_format(config, CPU, 1),
        size=4,
    )


@pytest.mark.parametrize(
    ("augment", "dtype", "more"),
    [
        ("none", "fp32", {}),
        ("none", "bf16", {"interpolation": "random", "vertical_flip": 0.5}),
        ("rand-n2-p0.8-tInvert+Rotate+ShearY+TranslateXRel", "fp16", {}),
        ("none", "fp32", SIMCLR),
    ],
)
def test_both_pipelines_give_the_same_images(config: Config, augment: str, dtype: str, more: dict[str, Any]) -> None:
    """Which the one for a GPU does on DALI's CPU backend. Resizing differs a little (0.2 grey levels), and so does
    the edge of an image that is turned or moved (0.95 in all); a wrong operator, partner or box makes ten and more."""
    config = augmented(
        config,
        augment,
        random_erasing=0.5,
        normalise=((120.0, 115.0, 100.0), (60.0, 60.0, 60.0)),
        train_size=48,
        **more,
    )
    config = replace(
        config, precision=replace(config.precision, dtype=dtype), mixup=MixupConfig(alpha=0.4, cutmix_alpha=1.0)
    )  # type: ignore[arg-type]
    cpu, dali = (source_of(kind, config) for kind in (CpuPipeline, DaliPipeline))
    for _ in range(6):
        ours, theirs = cpu.run(), dali.run()
        images, others = ours.images, theirs.images
        assert (
            images.dtype
            == others.dtype
            == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        )
        assert images.shape == others.shape == (4, 3, 48, 48)
        assert (images.float() - others.float()).abs().mean() * 60 < (
            0.7 if augment == "none" and more is not SIMCLR else 1.5
        )
        assert torch.equal(ours.targets, theirs.targets) and torch.equal(ours.lambdas, theirs.lambdas)
        assert ours.micro_batch.k == theirs.micro_batch.k


def test_erasing_fills_with_the_mean(config: Config) -> None:
    config = augmented(
        replace(config, mixup=MixupConfig(alpha=0)),
        "none",
        random_erasing=1.0,
        normalise=((120.0, 115.0, 100.0), (60.0, 60.0, 60.0)),
    )
    for batch in first_batches(config, 4):
        for image, (top, left, height, width) in zip(batch.images, batch.micro_batch.erased.tolist(), strict=True):
            assert height and image[:, top : top + height, left : left + width].abs().max() < 1e-6


@pytest.mark.parametrize("cutmix_alpha", [0.0, 1.0])
def test_mixing_while_normalising_is_mixing(config: Config, cutmix_alpha: float) -> None:
    plain = replace(config, mixup=MixupConfig(alpha=0))
    config = replace(config, mixup=MixupConfig(alpha=0.4, cutmix_alpha=cutmix_alpha))
    for mixed, unmixed in zip(first_batches(config, 8), first_batches(plain, 8), strict=True):
        draws = mixed.micro_batch
        expected = mix(unmixed.images, torch.from_numpy(draws.partners), mixed.lambdas, torch.from_numpy(draws.cuts))
        torch.testing.assert_close(mixed.images, expected, rtol=0, atol=1e-5)
        assert mixed.targets.tolist() == np.stack([draws.labels, draws.labels[draws.partners]], axis=-1).tolist()
        assert mixed.lambdas.tolist() == draws.lambdas.tolist()
        assert len(set(draws.lambdas.tolist())) == 1


class FedNumpy:
    """NumPy for timm's Mixup, whose random numbers are the given ones."""

    def __init__(self, **draws: Any) -> None:
        self.random = SimpleNamespace(**{name: self._giving(values) for name, values in draws.items()})

    @staticmethod
    def _giving(values: list[Any]) -> Any:
        fed = iter(values)
        return lambda *_, **__: next(fed)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.mark.skipif(
    tuple(int(n) for n in timm.__version__.split(".")[:3]) < (1, 0, 31),
    reason="timm before 1.0.31 cuts boxes a pixel differently",
)
def test_mixup_and_cutmix_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed with the same draws; timm's partner is always the image at the same place from the other end."""
    images, labels, side, size = torch.randn(8, 3, 31, 31), torch.arange(8) % 5, 31, 8
    settings = MixupConfig(alpha=0.8, cutmix_alpha=1.0, switch_probability=0.4)
    theirs = Mixup(0.8, 1.0, switch_prob=0.4, label_smoothing=0, num_classes=5)
    seen = set()
    for step in range(20):
        drawn = draw_mixing(settings, 3, step=step, k=0, size=size, side=side)
        generator = philox_generator(3, Purpose.MIXUP, low=0, high=step)
        shuffled(generator, size)
        mixup = beta(generator, 0.8)
        more = philox_generator(3, Purpose.CUTMIX, low=0, high=step)
        switch, y, x = uniforms(more, 3)
        cutmix = beta(more, 1.0)
        fed = FedNumpy(
            rand=[0.0, switch],  # the first: whether to mix at all
            beta=[cutmix if switch < 0.4 else mixup],
            randint=[int(y * side), int(x * side)],
        )
        monkeypatch.setattr("timm.data.mixup.np", fed)
        expected, targets = theirs(images.clone(), labels)
        lambdas, cuts = torch.from_numpy(drawn.lambdas), torch.from_numpy(drawn.cuts)
        for channels_last in (False, True):
            ours = images.permute(0, 2, 3, 1).contiguous() if channels_last else images
            ours = mix(ours, torch.arange(size).flip(0), lambdas, cuts, channels_last=channels_last)
            torch.testing.assert_close(
                ours.permute(0, 3, 1, 2) if channels_last else ours, expected, rtol=1e-5, atol=1e-5
            )
        one_hot = torch.eye(5)[labels]
        torch.testing.assert_close(lambdas[:, None] * one_hot + (1 - lambdas[:, None]) * one_hot.flip(0), targets)
        seen |= {(bool(cut[2]), bool(weight < 1)) for cut, weight in zip(cuts, lambdas, strict=True)}
    assert seen == {(False, True), (True, True)}


@pytest.mark.parametrize("mode", ["black", "reflect"])
def test_padded_crops_are_torchvisions(config: Config, mode: str) -> None:
    """The stored image with a border, cropped at the drawn position; of all images a square of 24 pixels fits."""
    plain = config.replace(
        mixup=dict(alpha=0), data=dict(crop_side=30, crop_padding=8, crop_padding_mode=mode, train_size=30)
    )
    split = Split(config.data.root, "train")
    outside = False
    for kind in (CpuPipeline, DaliPipeline):
        source = source_of(kind, plain)
        for _ in range(8):
            made = source.run()
            images, batch = made.images, made.micro_batch
            for number in range(4):
                image = Image.open(
                    io.BytesIO(stored_image(MappedFiles(split), batch.images[number]).tobytes())
                ).convert("RGB")
                how: Any = {"black": "constant", "reflect": "reflect"}[mode]
                pixels = np.pad(np.asarray(image), ((8, 8), (8, 8), (0, 0)), how)
                top, left = batch.boxes[number, :2] - batch.offsets[number] + 8
                outside |= bool(batch.offsets[number].any())
                expected = pixels[top : top + 30, left : left + 30]
                expected = expected[:, ::-1] if batch.flips[number] else expected
                ours = images[number].permute(1, 2, 0).numpy() * 127.5 + 127.5
                assert np.abs(ours - expected).mean() < 0.3  # decoding
    assert outside


def test_a_crop_larger_than_an_image_is_refused(config: Config) -> None:
    with pytest.raises(
        ConfigError, match=r"data.crop_side is 60, .* a side of 30 pixels: use at most 34, or data.crop_padding 15"
    ):
        loader_of(replace(config, data=replace(config.data, crop_side=60, crop_padding=2)))


def test_erasing_with_noise_is_the_same_in_both_forms(config: Config) -> None:
    config = augmented(config, "none", random_erasing=1.0, random_erasing_fill="noise", train_size=64)
    config = replace(config, mixup=MixupConfig(alpha=0))
    cpu, dali = (source_of(kind, config) for kind in (CpuPipeline, DaliPipeline))
    shown = []
    for _ in range(8):
        ours, theirs = cpu.run(), dali.run()
        boxes = ours.micro_batch.erased.tolist()
        for image, other, (top, left, height, width) in zip(ours.images, theirs.images, boxes, strict=True):
            box = (slice(None), slice(top, top + height), slice(left, left + width))
            torch.testing.assert_close(image[box], other[box], rtol=0, atol=1e-5)
            assert len(image[box].unique()) > 10
            shown.append(image[box].flatten())
    values = torch.cat(shown)
    # A standard normal distribution limited to -1 to 1.
    assert abs(values.mean()) < 0.1 and abs(values.std() - 0.72) < 0.05 and values.abs().max() <= 1.01


# ---------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------


def test_slices_of_complete_images_are_boxes(config: Config) -> None:
    split = Split(config.data.root, "train")
    batch = MicroBatches(split.rows, replace(config, batch=replace(config.batch, micro_batch=32)))(0, 0)
    anchors, shapes = batch.corners
    files = [stored_image(MappedFiles(split), image) for image in batch.images]

    @pipeline_def(batch_size=32, num_threads=1, device_id=None)
    def graph(boxes: bool):  # type: ignore[no-untyped-def]
        fed = fn.external_source(
            source=lambda: (files, anchors, shapes),
            num_outputs=3,
            batch=True,
            dtype=[types.UINT8, types.INT32, types.INT32],
        )
        return decode_boxes(*fed, boxes=boxes, device="cpu", **COMMON_OPTIONS)

    one, other = graph(boxes=True), graph(boxes=False)
    one.build(), other.build()
    for a, b, shape in zip(one.run()[0], other.run()[0], shapes.tolist(), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)) and list(np.asarray(a).shape) == [*shape, 3]


def test_the_hardware_decoders_share() -> None:
    data = DataConfig(root="data")
    assert [round(hardware_share(data, threads), 2) for threads in (1, 13, 70)] == [0.96, 0.63, 0.24]
    assert hardware_share(replace(data, hw_decoder_load=0.3), 6) == 0.3


def test_the_decoder_is_described(config: Config) -> None:
    described = describe_decoder(config.data, pixel_format(config, CPU, 3))
    assert described.items() >= {"device": "cpu", "threads": 3, "decodes": "boxes"}.items()
    assert described["nvimagecodec"].count(".") == 2
    gpu = describe_decoder(config.data, replace(pixel_format(config, CPU, 6), device_id=1))
    assert gpu["device"] == "cuda:1" and gpu["hw_decoder_load"] == pytest.approx(0.79, abs=0.01)
    log = "[TRACE] nvJPEG version: 13.1.0\n[INFO] HW decoder available num_hw_engines=8 num_cores_per_hw_engine=1\n"
    assert decoder_in_log(log) == {"nvJPEG": "13.1.0", "hardware engines": 8}
    assert decoder_in_log("HW decoder not supported by this platform. Skip.") == {}


# ---------------------------------------------------------------------------------------------------------------
# Storage
# ---------------------------------------------------------------------------------------------------------------


def test_a_storage_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match=r"^ftp://host/data: there is no storage for ftp://, use one of file, "):
        storages.storage_of("ftp://host/data")


def test_commands_open_images_by_the_row_of_their_storage(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Split] = []

    def files(split: Split, *_: object) -> MappedFiles:
        opened.append(split)
        return MappedFiles(split)

    monkeypatch.setitem(storages.STORAGES, "file", files)
    split = Split(config.data.root, "train")
    assert stored_image(storages.open_shards(split), 0).size
    assert opened == [split]


def test_a_shard_that_becomes_shorter_is_named(config: Config, tmp_path: Path) -> None:
    """The map behind it would end the process by SIGBUS."""
    split = Split(config.data.root, "train")
    storage = MappedFiles(split)
    short = tmp_path / "short"
    short.write_bytes(split.paths[1].read_bytes()[:100])
    split.paths[1] = short
    storage.prefetch(np.arange(split.first_images[1]))
    with pytest.raises(
        DatasetError, match=rf"{short} was truncated while in use: it ends at byte 100, .*Restore the shard"
    ):
        storage.prefetch(np.arange(split.first_images[1], len(split)))
