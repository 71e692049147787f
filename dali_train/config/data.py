"""The dataset, and how its images are ordered, read, decoded and augmented."""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from dali_train.config.augment import parse_augment
from dali_train.config.check import (
    OVER_0,
    Directory,
    NotInRecipe,
    Pixels,
    Positive,
    Rule,
    refuse,
    refuse_credentials,
    require,
    section,
)

Triple = tuple[float, float, float]
"""Numbers for red, green and blue, for pixel values from 0 to 255."""

NORMALISATIONS: dict[str, tuple[Triple, Triple]] = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "inception": ((127.5, 127.5, 127.5), (127.5, 127.5, 127.5)),
    "cifar10": ((125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)),
    "mnist": ((255 * 0.1307,) * 3, (255 * 0.3081,) * 3),
}
"""Name -> mean and standard deviation of the pixels."""
Blocks = Annotated[int, Rule("a whole number from 1 to 16,777,216", 1, 1 << 24)]
Probability = Annotated[float, Rule("a probability from 0 to 1", 0, 1)]


@section("data")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    root: NotInRecipe[Annotated[str, Rule("the name or URL of a dataset's directory, which holds dataset.json")]]
    """Dataset directory with dataset.json (made by `dali-train data convert` or `dali-train data index`), or the URL of
    one in an object store: s3://, gs://, az:// or https://."""
    seed: Annotated[int, Rule("a whole number from 0 to 2**64 - 1", 0, (1 << 64) - 1)] = 0
    """Seeds everything random: order, crops, flips, Mixup, dropout and the initial weights."""
    shuffle: Literal["full", "block", "none", "balanced"] = "full"
    """full: a new uniformly random order every epoch. block: shuffled blocks of adjacent images, shuffled again in
    windows of blocks, for disks and parallel file systems that need long reads. none: the order on disk. balanced: a
    random order in which all classes are equally frequent: an epoch repeats images of rare classes and skips images of
    frequent ones. With data.reader dali and not none, each rank draws images from a shuffle buffer of block_images x
    window_blocks records."""
    block_images: Blocks = 128
    """Images per block. 128 ImageNet originals are 14 MB, which a disk with a seek time of 10 ms reads at nine tenths
    of its speed."""
    window_blocks: Blocks = 8
    """Number of consecutive blocks whose images are shuffled together (one window). Each micro-batch of a step draws
    from its own window; `dali-train plan` reports the memory that all windows take."""
    read_ahead_mb: NotInRecipe[Annotated[int, Rule("a whole number from 0 to 1,048,576 (1 TB)", 0, 1 << 20)]] = 256
    """Megabytes of images that a rank reads ahead, into the page cache. 0: no reading ahead."""
    local_copy: NotInRecipe[Directory | None] = None
    """Directory on a local disk of each host: the dataset is copied there once before training and read from there.
    None: read data.root directly."""
    cache: NotInRecipe[Directory | None] = None
    """Directory on a local disk of each host that caches images from an object store, shared by the host's ranks. The
    image needed furthest in the future is evicted first. None: every epoch fetches every image."""
    cache_gb: NotInRecipe[
        Annotated[float, Rule("a number of gigabytes up to 1,000,000 (1 PB)", OVER_0, 1e6)] | None
    ] = None
    """Largest size of data.cache, per host. None: the free space of its disk, less a twentieth."""
    reader: Literal["index", "dali", "synthetic"] = "index"
    """index: images are slices of memory-mapped shards. synthetic: noise, to measure the cost of loading data. dali:
    DALI's own TFRecord reader, which reads shards sequentially; samples then depend on the number of ranks, and a
    resumed run begins a new pass."""
    device: NotInRecipe[Literal["auto", "cpu", "gpu"]] = "auto"
    """Where images are decoded and augmented. auto: on the model's device."""
    num_threads: NotInRecipe[Annotated[int, Rule("a number of threads from 1 to 1024", 1, 1024)] | None] = None
    """Decoding threads per rank. None: this rank's share of the cores that the job may use."""
    hw_decoder_load: NotInRecipe[Annotated[float, Rule("a share from 0 to 1", 0, 1)] | None] = None
    """Fraction of the JPEGs for the GPU's hardware decoder, if it has one (A100, H100 and later). None: depends on the
    number of decoding threads, 0.66 with 6 and 0.14 with 70; `python -m tools.bench.gpu_data` finds the best."""
    train_size: Pixels = 224
    """Side of the square training images, in pixels."""
    progressive: Annotated[
        tuple[tuple[Positive, Pixels], ...], Rule("pairs of an epoch and a size in pixels, such as 6,128 12,160")
    ] = ()
    """Progressive resizing: smaller training images in the first epochs. 6,128 12,160 trains on images of 128 pixels
    until epoch 6, of 160 until epoch 12, and of train_size from then on. A step uses the size of the epoch in which it
    begins. For models that accept images of any size: a ViT does with --model.kwargs.dynamic_img_size true."""
    crop: Literal["random-resized", "inception"] = "random-resized"
    """How random crops are drawn. random-resized: uniform in area, as torchvision's RandomResizedCrop. inception:
    uniform in height, as TensorFlow's sample_distorted_bounding_box, which prefers smaller crops."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Random crops cover a fraction of the image's area between these two."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Random crops have a ratio of width to height between these two."""
    crop_side: Pixels | None = None
    """Crop a square of this many pixels anywhere in the stored image, as for CIFAR, and resize it to train_size. None:
    draw the area and aspect ratio from crop_area and crop_aspect."""
    crop_padding: Annotated[int, Rule("a number of pixels from 0 to 65,500", 0, 65_500)] = 0
    """With crop_side: black pixels on each side of the stored image, which the crop may include."""
    horizontal_flip: Probability = 0.5
    """Probability of mirroring a training image."""
    augment: str = "none"
    """Augmentation policy: none, rand (RandAugment, with timm's settings, as in rand-m9-mstd0.5-inc1), big-vision and
    colossalai (RandAugment as in these two, 2 operators at full strength), trivial (TrivialAugment), 3-augment (DeiT
    III), auto-imagenet or auto-cifar10 (AutoAugment)."""
    color_jitter: Annotated[float, Rule("a factor from 0 to 1", 0, 1)] = 0.0
    """Brightness, contrast and saturation are multiplied by up to 1 plus or minus this, in a random order. 0: none."""
    random_erasing: Probability = 0.0
    """Probability of filling a random box of a training image."""
    random_erasing_fill: Literal["mean", "noise"] = "mean"
    """The fill of erased boxes. mean: the mean color. noise: normally distributed pixels with the mean and standard
    deviation of data.normalise (timm's mode pixel), clipped to values from 0 to 255."""
    repeats: Annotated[int, Rule("a number of repeats from 1 to 64", 1, 64)] = 1
    """Repeated augmentation: this many adjacent positions have the same image, augmented differently. An epoch still
    has as many positions as the training split has images, so a pass over the split takes this many epochs. If it does
    not divide batch.micro_batch, the repeats of some images fall into two micro-batches."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How training and evaluation images are resized."""
    antialias: bool = True
    """Filter when shrinking, as PIL does. False is faster but aliases."""
    normalise: Annotated[
        Literal["imagenet", "inception", "cifar10", "mnist"] | tuple[Triple, Triple],
        Rule(f"{', '.join(NORMALISATIONS)}, or mean and standard deviation, e.g. 123.7,116.3,103.5 58.4,57.1,57.4"),
    ] = "inception"
    """Mean and standard deviation of red, green and blue, for pixel values from 0 to 255: the mean is subtracted and
    the result divided by the standard deviation. imagenet, cifar10, mnist: those of these datasets. inception: 127.5
    throughout, so that values go from -1 to 1. Or numbers: 123.7,116.3,103.5 58.4,57.1,57.4. A timm model's own are in
    its `default_cfg`, there for pixel values from 0 to 1."""
    eval_resize: NotInRecipe[Literal["short-side", "squash"]] = "short-side"
    """How evaluation images are resized to eval_resize_to. short-side: the short side, keeping the aspect ratio.
    squash: both sides, which distorts."""
    eval_resize_to: NotInRecipe[Pixels | None] = None
    """In pixels; the central eval_size square of the result is evaluated. None: eval_size * 256 / 224, the usual crop
    fraction."""
    eval_size: NotInRecipe[Pixels] = 224
    """Side of the square evaluation images, in pixels."""

    @property
    def train_sizes(self) -> list[int]:
        """All sizes of training images during a run, without duplicates."""
        return sorted({self.train_size, *(size for _, size in self.progressive)})

    @property
    def eval_resized(self) -> int:
        """Side of evaluation images before the central crop, in pixels: of both sides, or of the short one."""
        return round(self.eval_size * 256 / 224) if self.eval_resize_to is None else self.eval_resize_to

    @property
    def mean(self) -> Triple:
        """Subtracted from the RGB values 0 to 255."""
        return self._mean_and_std()[0]

    @property
    def std(self) -> Triple:
        """Divides the RGB values after the mean is subtracted."""
        return self._mean_and_std()[1]

    def _mean_and_std(self) -> tuple[Triple, Triple]:
        return NORMALISATIONS[self.normalise] if isinstance(self.normalise, str) else self.normalise

    def __post_init__(self) -> None:
        if "://" in self.root:
            refuse_credentials("data.root", self.root)
            require(
                self.reader != "dali",
                f"data.reader is dali, which reads files, and data.root is {self.root}: use data.reader index",
            )
        else:
            require(
                self.cache is None,
                f"data.cache is {self.cache}, but data.root {self.root} is not in an object store: use data.local_copy "
                "to copy it to a local disk",
            )
        low, high = self.crop_area
        require(
            0 < low <= high <= 1, f"data.crop_area is {self.crop_area}: use two fractions with 0 < low <= high <= 1"
        )
        low, high = self.crop_aspect
        require(OVER_0 <= low <= high, f"data.crop_aspect is {self.crop_aspect}: use two ratios with 0 < low <= high")
        # A mean of 0 and a standard deviation of 255 are sensible; numbers between 0 and 2 are meant for pixels from 0
        # to 1.
        require(
            all(mean == 0 or 2 <= mean <= 255 for mean in self.mean) and all(2 <= std <= 1000 for std in self.std),
            f"data.normalise is {self.normalise}: mean and standard deviation are for pixel values from 0 to 255, so "
            "multiply those for values from 0 to 1 by 255, or use imagenet or inception",
        )
        require(
            self.eval_size <= self.eval_resized,
            f"data.eval_size {self.eval_size} does not fit into data.eval_resize_to {self.eval_resize_to}: "
            "enlarge data.eval_resize_to",
        )
        if self.eval_size < 0.8 * self.eval_resized:
            warnings.warn(
                f"data.eval_size {self.eval_size} of data.eval_resize_to {self.eval_resize_to}: only the central "
                f"{(self.eval_size / self.eval_resized) ** 2:.0%} of each image are evaluated; leave "
                "data.eval_resize_to out for the usual 77 %",
                stacklevel=2,
            )
        require(
            all(first < then for (first, _), (then, _) in pairwise(self.progressive)),
            f"data.progressive is {self.progressive}: use increasing epochs, each the end of its size",
        )
        remedy = f"use sizes up to data.train_size {self.train_size}, which follows them"
        refuse(self.train_sizes[-1] != self.train_size, self, "progressive train_size", remedy)
        parse_augment(self.augment)
        side, padding = self.crop_side, self.crop_padding
        drawn = self.crop != "random-resized"
        refuse(drawn and side is not None, self, "crop crop_side", "leave one of them out")
        remedy = f"set data.crop_side, such as {self.train_size}"
        refuse(padding > 0 and side is None, self, "crop_padding crop_side", remedy)
        remedy = "use less than data.crop_side, or a crop could miss the image"
        refuse(side is not None and padding >= side, self, "crop_padding crop_side", remedy)
        filled, remedy = self.random_erasing_fill != "mean", "set data.random_erasing, such as 0.25"
        refuse(filled and self.random_erasing == 0, self, "random_erasing_fill random_erasing", remedy)
