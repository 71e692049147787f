"""The augmentation operators: one table, with one row per operator.

A row maps a level to the operator's argument (degrees, pixels, a factor), and has two forms: for one image on the CPU,
mostly by PIL, and for a batch in a DALI graph, meant for a GPU. A test compares the two on photographs. To add an
operator, add a row; `data.augment rand-tNAME+NAME` draws from any rows, and the policies are in
data/sampling/policy.py.

Ranges are timm's, so that magnitudes have the same meaning; names with Increasing are those of timm's `inc1`, names
with Wide those of TrivialAugment. All forms interpolate bilinearly and fill with 128.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.auto_aug import augmentations as dali_ops
from nvidia.dali.auto_aug.core import select
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from dali_train.config import DataConfig
from dali_train.config.check import close_names
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.data.sampling.policy import IDENTITY, Policy, policy_of
from dali_train.errors import ConfigError

Argument = Callable[[NDArray[np.float32], int], NDArray[np.floating[Any]]]
CpuForm = Callable[[torch.Tensor, float], torch.Tensor]
PilForm = Callable[[Image.Image, float], Image.Image]
DaliForm = Callable[[Any, Any], Any]

_FILL = 128
_ROW = 4096  # float32 has all whole numbers up to its square
_BLUR_WINDOW = 13  # pixels: three standard deviations of the strongest blur on each side
# NTSC's, FCC 47 CFR 73.682
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


@dataclass(frozen=True)
class Operator:
    """An augmentation operator in both forms.

    argument: signed levels, (n,), and the side of the images in pixels -> the arguments of the forms, (n,).
    cpu: a (3, h, w) uint8 image and its argument -> the augmented image.
    dali: a node of (h, w, 3) uint8 images and a node of float32 arguments -> a node of the augmented images.
    """

    argument: Argument
    cpu: CpuForm
    dali: DaliForm


def none(levels: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    return np.zeros_like(levels)


def signed(most: float) -> Argument:
    return lambda levels, side: levels * most


def between(low: float, high: float) -> Argument:
    return lambda levels, side: low + np.abs(levels) * (high - low)


def of_side(share: float) -> Argument:
    return lambda levels, side: levels * share * side


def around_one(most: float, least: float = 0.0) -> Argument:
    return lambda levels, side: np.maximum(least, 1 + levels * most)


def threshold(levels: NDArray[np.float32], side: int) -> NDArray[np.float64]:
    return np.minimum(256, np.floor(np.abs(levels) * 256))


def mask_of(bits: Callable[[NDArray[np.float32]], NDArray[np.floating[Any]]]) -> Argument:
    """Return the mask that keeps the `bits` highest bits, at least one as in DALI, since Pillow refuses zero bits."""
    return lambda levels, side: 256 - 2.0 ** (8 - np.clip(bits(np.abs(levels)), 1, 8))


def cutout_pixel(levels: NDArray[np.float32], side: int) -> NDArray[np.float64]:
    """Map uniform levels to uniformly distributed pixels: row * 4096 + column."""
    if side > _ROW:
        raise ConfigError(
            f"data.train_size is {side}: Cutout takes images of at most {_ROW} pixels, use a smaller size"
        )
    pixel = np.minimum(np.floor(np.abs(levels.astype(np.float64)) * side**2), side**2 - 1)
    return pixel // side * _ROW + pixel % side


def by_pil(operate: PilForm) -> CpuForm:
    """Return the CPU form of a PIL operator, as in timm; PIL takes half the time of torchvision (measured)."""

    def cpu(image: torch.Tensor, argument: float) -> torch.Tensor:
        pixels = image.permute(1, 2, 0).contiguous()  # no copy: images are channels-last here
        return torch.from_numpy(np.array(operate(Image.fromarray(pixels.numpy()), argument))).permute(2, 0, 1)

    return cpu


def _beside(argument: Any, images: Any) -> Any:
    return argument.gpu() if images.device == "gpu" else argument


def solarize(image: Image.Image, limit: float) -> Image.Image:
    return image.point([value if value < limit else 255 - value for value in range(256)] * 3)


def solarize_add(image: Image.Image, add: float) -> Image.Image:
    return image.point([min(255, value + int(add)) if value < 128 else value for value in range(256)] * 3)


def dali_sharpness(images: Any, factor: Any) -> Any:
    """Sharpen as PIL does, except for the outermost pixels, which PIL leaves unchanged."""
    smooth = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / 13
    sharp = np.zeros((3, 3), dtype=np.float32)
    sharp[1, 1] = 1
    kernel = types.Constant(smooth) + types.Constant(sharp - smooth) * factor
    return fn.filter(images, _beside(kernel, images))


def cutout(radius: int) -> tuple[CpuForm, DaliForm]:
    """Return the forms that fill a square of 2 * `radius` pixels around a pixel, clipped to the image."""

    def cpu(image: torch.Tensor, at: float) -> torch.Tensor:
        row, column = divmod(int(at), _ROW)
        image = image.clone()
        image[:, max(0, row - radius) : row + radius, max(0, column - radius) : column + radius] = _FILL
        return image

    def dali(images: Any, at: Any) -> Any:
        row = dali_math.floor(at / _ROW)
        corner = fn.stack(row, at - row * _ROW) - float(radius)
        return fn.erase(images, anchor=corner, shape=[2.0 * radius] * 2, axis_names="HW", fill_value=_FILL)

    return cpu, dali


def slide(image: Image.Image, x: float, y: float) -> Image.Image:
    """Translate: pixel (column, row) of the result is (column + x, row + y) of `image`, in a fifth of the time of PIL's
    `transform`.

    PIL's `resize` at a scale of 1 computes the same in fixed-point arithmetic, but only where both neighbours of each
    pixel exist. Within half a pixel of the border, `transform` repeats the outermost pixel.
    """
    width, height = image.size
    moved = Image.new(image.mode, image.size, (_FILL,) * 3)
    moved.paste(image, (-math.floor(x + 0.5), -math.floor(y + 0.5)))
    left, top = max(0, math.ceil(-x)), max(0, math.ceil(-y))
    right, bottom = min(width, math.floor(width - x)), min(height, math.floor(height - y))
    if left < right and top < bottom:
        box = (left + x, top + y, right + x, bottom + y)
        moved.paste(image.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box), (left, top))
    return moved


def moved(*, shear_x: int = 0, shear_y: int = 0, x: int = 0, y: int = 0) -> tuple[CpuForm, DaliForm]:
    """Return the forms of an affine map with argument a: pixel (px, py) of the result comes from
    (px + shear_x * a * py + x * a, py + shear_y * a * px + y * a)."""

    def pil(image: Image.Image, amount: float) -> Image.Image:
        if not (shear_x or shear_y):
            return slide(image, x * amount, y * amount)
        matrix = (1, shear_x * amount, x * amount, shear_y * amount, 1, y * amount)
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=(_FILL,) * 3
        )

    def dali(images: Any, amount: Any) -> Any:
        stay = types.Constant(np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32))
        matrix = stay + types.Constant(np.array([[0, shear_x, x], [shear_y, 0, y]], dtype=np.float32)) * amount
        return fn.warp_affine(images, matrix=matrix, fill_value=_FILL, interp_type=types.INTERP_LINEAR)

    return by_pil(pil), dali


def enhanced(kind: Callable[[Image.Image], Any], dali: DaliForm) -> tuple[CpuForm, DaliForm]:
    """Return the forms of one of PIL's `ImageEnhance` classes, given its DALI form."""
    return by_pil(lambda image, factor: kind(image).enhance(factor)), dali


def turned_hue(image: Image.Image, degrees: float) -> Image.Image:
    """Turn the colors in the chroma plane of YIQ, as DALI's `hue` does."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = np.array([[1, 0, 0], [0, cos, sin], [0, -sin, cos]])
    matrix = np.zeros((3, 4))  # of RGB, with an offset that is added
    matrix[:, :3] = np.linalg.inv(_TO_YIQ) @ turn @ _TO_YIQ
    return image.convert("RGB", tuple(matrix.ravel().tolist()))


_SHEAR_X = moved(shear_x=1)
_SHEAR_Y = moved(shear_y=1)
_MOVE_X = moved(x=1)
_MOVE_Y = moved(y=1)
_BRIGHTNESS = enhanced(ImageEnhance.Brightness, lambda images, factor: fn.brightness(images, brightness=factor))
_CONTRAST = enhanced(
    ImageEnhance.Contrast, lambda images, factor: dali_ops.contrast.op(images, _beside(factor, images))
)
_COLOR = enhanced(ImageEnhance.Color, lambda images, factor: fn.saturation(images, saturation=factor))
_SHARPNESS = enhanced(ImageEnhance.Sharpness, dali_sharpness)
_POSTERIZE: tuple[CpuForm, DaliForm] = (
    lambda image, mask: image & int(mask),
    lambda images, mask: images & _beside(fn.cast(mask, dtype=types.UINT8), images),
)
_SOLARIZE: tuple[CpuForm, DaliForm] = (
    by_pil(solarize),
    lambda images, limit: dali_ops.solarize.op(images, _beside(limit, images)),
)
_ROTATE: tuple[CpuForm, DaliForm] = (
    by_pil(lambda image, degrees: image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=(_FILL,) * 3)),
    lambda images, degrees: fn.rotate(
        images, angle=degrees, keep_size=True, fill_value=_FILL, interp_type=types.INTERP_LINEAR
    ),
)

OPERATORS: dict[str, Operator] = {
    IDENTITY: Operator(none, lambda image, _: image, lambda images, _: images),
    "AutoContrast": Operator(none, by_pil(lambda image, _: ImageOps.autocontrast(image)), dali_ops.auto_contrast.op),
    # PIL's histogram equalization on the CPU, OpenCV's in DALI: its lookup table is made by a slightly different
    # formula.
    "Equalize": Operator(none, by_pil(lambda image, _: ImageOps.equalize(image)), dali_ops.equalize.op),
    "Invert": Operator(none, lambda image, _: 255 - image, dali_ops.invert.op),
    "Grayscale": Operator(
        none,
        by_pil(lambda image, _: image.convert("L").convert("RGB")),
        lambda images, _: fn.saturation(images, saturation=0.0),
    ),
    "GaussianBlur": Operator(
        between(0.1, 2.0),
        by_pil(lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma))),
        lambda images, sigma: fn.gaussian_blur(images, sigma=sigma, window_size=_BLUR_WINDOW),
    ),
    "Rotate": Operator(signed(30), *_ROTATE),
    "RotateWide": Operator(signed(135), *_ROTATE),
    "ShearX": Operator(signed(0.3), *_SHEAR_X),
    "ShearY": Operator(signed(0.3), *_SHEAR_Y),
    "ShearXWide": Operator(signed(0.99), *_SHEAR_X),
    "ShearYWide": Operator(signed(0.99), *_SHEAR_Y),
    "TranslateXRel": Operator(of_side(0.45), *_MOVE_X),
    "TranslateYRel": Operator(of_side(0.45), *_MOVE_Y),
    "TranslateX100": Operator(signed(100), *_MOVE_X),
    "TranslateY100": Operator(signed(100), *_MOVE_Y),
    "TranslateX40": Operator(signed(40), *_MOVE_X),
    "TranslateY40": Operator(signed(40), *_MOVE_Y),
    "TranslateX32": Operator(signed(32), *_MOVE_X),
    "TranslateY32": Operator(signed(32), *_MOVE_Y),
    "Cutout40": Operator(cutout_pixel, *cutout(40)),
    "Posterize": Operator(mask_of(lambda level: np.floor(level * 4)), *_POSTERIZE),
    "PosterizeIncreasing": Operator(mask_of(lambda level: 4 - np.floor(level * 4)), *_POSTERIZE),
    "PosterizeOriginal": Operator(mask_of(lambda level: 4 + np.floor(level * 4)), *_POSTERIZE),
    "Posterize8": Operator(mask_of(lambda level: 8 - np.rint(level * 4)), *_POSTERIZE),
    "PosterizeWide": Operator(mask_of(lambda level: 8 - np.rint(level * 6)), *_POSTERIZE),
    "Solarize": Operator(threshold, *_SOLARIZE),
    "SolarizeIncreasing": Operator(lambda levels, side: 256 - threshold(levels, side), *_SOLARIZE),
    "Solarize128": Operator(between(128, 128), *_SOLARIZE),
    "Solarize200": Operator(between(200, 200), *_SOLARIZE),
    "SolarizeAdd": Operator(
        lambda levels, side: np.minimum(127, np.floor(np.abs(levels) * 110)),
        by_pil(solarize_add),
        lambda images, add: dali_ops.solarize_add.op(images, _beside(fn.cast(add, dtype=types.UINT8), images)),
    ),
    "Brightness": Operator(between(0.1, 1.9), *_BRIGHTNESS),
    "BrightnessIncreasing": Operator(around_one(0.9, least=0.1), *_BRIGHTNESS),
    "BrightnessWide": Operator(around_one(0.99), *_BRIGHTNESS),
    "BrightnessBy": Operator(around_one(1.0), *_BRIGHTNESS),
    "Contrast": Operator(between(0.1, 1.9), *_CONTRAST),
    "ContrastIncreasing": Operator(around_one(0.9, least=0.1), *_CONTRAST),
    "ContrastWide": Operator(around_one(0.99), *_CONTRAST),
    "ContrastBy": Operator(around_one(1.0), *_CONTRAST),
    "Color": Operator(between(0.1, 1.9), *_COLOR),
    "ColorIncreasing": Operator(around_one(0.9, least=0.1), *_COLOR),
    "ColorWide": Operator(around_one(0.99), *_COLOR),
    "ColorBy": Operator(around_one(1.0), *_COLOR),
    "HueBy": Operator(signed(360), by_pil(turned_hue), lambda images, degrees: fn.hue(images, hue=degrees)),
    "Sharpness": Operator(between(0.1, 1.9), *_SHARPNESS),
    "SharpnessIncreasing": Operator(around_one(0.9, least=0.1), *_SHARPNESS),
    "SharpnessWide": Operator(around_one(0.99), *_SHARPNESS),
}


class Augmentation:
    """A config's policy, which applies the draws of a micro-batch in either form.

    Raises:
        ConfigError: data.augment names an operator that is not in the table.
    """

    def __init__(self, policy: Policy, data: DataConfig) -> None:
        for name in policy.names:
            if name not in OPERATORS:
                close = close_names(name, OPERATORS)
                meant = f"; did you mean {close[0]}?" if close else f": use {', '.join(OPERATORS)}"
                raise ConfigError(f"data.augment is {data.augment!r}: there is no operator {name}{meant}")
        self.operators = [OPERATORS[name] for name in policy.names]
        self.num_steps = policy.num_steps
        self.shows_noise = data.random_erasing_fill == "noise"
        self.erases = data.random_erasing > 0 and not self.shows_noise  # in a graph; noise comes later (`show_noise`)
        self.fill = [round(value) for value in data.mean]
        self._side = data.train_size

    @classmethod
    def of(cls, data: DataConfig) -> "Augmentation | None":
        policy = policy_of(data)
        return cls(policy, data) if policy.groups or data.random_erasing > 0 else None

    def arguments(self, step: int, batch: MicroBatch) -> NDArray[np.float32]:
        """Return the arguments of the operators drawn for `step`, (n,)."""
        arguments = np.zeros(len(batch.levels), dtype=np.float32)
        for number in np.unique(batch.operators[:, step]):
            here = batch.operators[:, step] == number
            arguments[here] = self.operators[number].argument(batch.levels[here, step], self._side)
        return arguments

    def operations(self, batch: MicroBatch) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """Return the CPU's function for each image, which takes and returns a (3, h, w) uint8 image."""
        arguments = np.zeros_like(batch.levels)
        for step in range(self.num_steps):
            arguments[:, step] = self.arguments(step, batch)
        if self.shows_noise:
            fill = torch.from_numpy(batch.noise).permute(2, 0, 1)
        else:
            fill = torch.tensor(self.fill, dtype=torch.uint8)[:, None, None].expand(3, self._side, self._side)
        rows = zip(batch.operators.tolist(), arguments.tolist(), batch.erased.tolist(), strict=True)
        return [partial(self._operate, *row, fill) for row in rows]

    def _operate(
        self, numbers: list[int], arguments: list[float], box: list[int], fill: torch.Tensor, image: torch.Tensor
    ) -> torch.Tensor:
        for number, argument in zip(numbers, arguments, strict=True):
            if number:
                image = self.operators[number].cpu(image, argument)
        top, left, height, width = box
        if height:
            image = image.clone()
            where = (slice(None), slice(top, top + height), slice(left, left + width))
            image[where] = fill[where]
        return image

    def nodes(self, images: Any, steps: Sequence[tuple[Any, Any]], box: tuple[Any, Any] | None) -> Any:
        """Return a graph's node of augmented images. The graph needs conditionals.

        Args:
            steps: for each step the nodes of the operators' numbers, int32, and of their `arguments`, float32.
            box: the nodes of the erased boxes' corners and shapes, (2,) float32 each; None: the graph erases nothing.
        """
        forms = [operator.dali for operator in self.operators]
        for number, argument in steps:
            images = select(forms, number, images, argument)
        if box is not None:
            images = fn.erase(images, anchor=box[0], shape=box[1], axis_names="HW", fill_value=self.fill)
        return images
