"""The sections of a config, one class each, with every setting's type, range, default and explanation.

A rule about one value stands in its type hint; what several values of a section exclude stands in its ``CONFLICTS``,
other rules about them in ``__post_init__``; rules about several sections are in config.py. ``--help`` prints what
stands here.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

from dali_train.config.augment_spec import parse_augment
from dali_train.config.check import (
    OVER_0,
    UNDER_1,
    ByContent,
    Conflict,
    Count,
    CountOr0,
    Directory,
    Fraction,
    NeedsIndex,
    NotInRecipe,
    NotNegative,
    Pixels,
    Positive,
    Rule,
    is_url,
    refuse_credentials,
    require,
    section,
)
from dali_train.config.extra_settings import (
    AuditSettings,
    ClassWeightSettings,
    DistillationSettings,
    GridSettings,
    LedgerSettings,
    LossOfSeveralSettings,
    MirrorSettings,
    MixtureSettings,
    RunOfSeveralSettings,
)
from dali_train.errors import ConfigError

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

SetName = Annotated[
    str, Rule("a name of small letters, digits and -, other than ema", pattern=r"(?!ema$)[a-z][a-z0-9-]*")
]


@section("data")
@dataclass(frozen=True, kw_only=True)
class DataConfig(MixtureSettings):
    """The dataset, and how its images are ordered, read, decoded and augmented."""

    root: NotInRecipe[
        ByContent[Annotated[str, Rule("the name or URL of a dataset's directory, which holds dataset.json")]]
    ]
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
    """index: images are found through the index. synthetic: noise, to measure the cost of loading data. dali:
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
    progressive: NeedsIndex[
        Annotated[
            tuple[tuple[Positive, Pixels], ...], Rule("pairs of an epoch and a size in pixels, such as 6,128 12,160")
        ]
    ] = ()
    """Progressive resizing: smaller training images in the first epochs. 6,128 12,160 trains on images of 128 pixels
    until epoch 6, of 160 until epoch 12, and of train_size from then on. A step uses the size of the epoch in which it
    begins. For models that accept images of any size: a ViT does with --model.kwargs.dynamic_img_size true."""
    crop: NeedsIndex[Literal["random-resized", "inception"]] = "random-resized"
    """How random crops are drawn. random-resized: uniform in area, as torchvision's RandomResizedCrop. inception:
    uniform in height, as TensorFlow's sample_distorted_bounding_box, which prefers smaller crops."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Random crops cover a fraction of the image's area between these two."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Random crops have a ratio of width to height between these two."""
    crop_side: NeedsIndex[Pixels | None] = None
    """Crop a square of this many pixels anywhere in the stored image, as for CIFAR, and resize it to train_size. None:
    draw the area and aspect ratio from crop_area and crop_aspect."""
    crop_padding: Annotated[int, Rule("a number of pixels from 0 to 65,500", 0, 65_500)] = 0
    """With crop_side: pixels added on each side of the stored image, which the crop may include."""
    crop_padding_mode: Literal["black", "reflect"] = "black"
    """The pixels of crop_padding. reflect: the image mirrored at its border, without repeating the outermost pixels, as
    reflect in torchvision's RandomCrop."""
    horizontal_flip: Probability = 0.5
    """Probability of mirroring a training image."""
    vertical_flip: NeedsIndex[Probability] = 0.0
    """Probability of turning a training image upside down (timm's --vflip), for images without an up, such as those of
    satellites and microscopes."""
    alternating_flip: NeedsIndex[bool] = False
    """Mirror in the first epoch with the probability horizontal_flip, and in every later epoch exactly the images that
    were not mirrored in the one before (Jordan, arXiv 2404.00498), so that two epochs show both sides of each image."""
    augment: NeedsIndex[str] = "none"
    """Augmentation policy: none, rand (RandAugment, with timm's settings, as in rand-m9-mstd0.5-inc1), big-vision and
    colossalai (RandAugment as in these two, 2 operators at full strength), trivial (TrivialAugment), 3-augment (DeiT
    III), auto-imagenet or auto-cifar10 (AutoAugment)."""
    color_jitter: NeedsIndex[Annotated[float, Rule("a factor from 0 to 1", 0, 1)]] = 0.0
    """Brightness, contrast and saturation are multiplied by up to 1 plus or minus this, in a random order. 0: none.
    timm's train.py has 0.4, and none with an --aa other than 3a."""
    hue_jitter: NeedsIndex[Annotated[float, Rule("a part of a turn from 0 to 0.5", 0, 0.5)]] = 0.0
    """Colors are turned by up to this part of a circle, either way, in the random order of data.color_jitter. As DALI
    does it, in YIQ; torchvision's ColorJitter turns HSV's hue instead."""
    color_jitter_probability: Probability = 1.0
    """Probability that a training image gets data.color_jitter and data.hue_jitter at all (timm's
    --color-jitter-prob)."""
    grayscale: NeedsIndex[Probability] = 0.0
    """Probability that a training image loses its colors, after data.augment and data.color_jitter (timm's
    --grayscale-prob)."""
    gaussian_blur: NeedsIndex[Probability] = 0.0
    """Probability of blurring a training image, after data.grayscale, with a standard deviation from 0.1 to 2 pixels
    (timm's --gaussian-blur-prob)."""
    random_erasing: NeedsIndex[Probability] = 0.0
    """Probability of filling a random box of a training image."""
    random_erasing_fill: Literal["mean", "noise"] = "mean"
    """The fill of erased boxes. mean: the mean color. noise: normally distributed pixels with the mean and standard
    deviation of data.normalise (timm's mode pixel), clipped to values from 0 to 255."""
    exclude: NeedsIndex[ByContent[Annotated[str, Rule("the name of a file with the numbers of images")] | None]] = None
    """A file with the training images to leave out, by their numbers: one a line, or in the first column of a CSV file,
    as `dali-train suspects` writes them. If it has a column file, the list must be of this dataset. An epoch has only
    the other images. All their draws stay the same, and with shuffle full or none so does their order; the other orders
    are made of the images that are left."""
    repeats: NeedsIndex[Annotated[int, Rule("a number of repeats from 1 to 64", 1, 64)]] = 1
    """Repeated augmentation: this many adjacent positions have the same image, augmented differently. An epoch still
    has as many positions as the training split has images, so a pass over the split takes this many epochs. If it does
    not divide batch.micro_batch, the repeats of some images fall into two micro-batches."""
    interpolation: Literal["bilinear", "bicubic", "random"] = "bilinear"
    """How training and evaluation images are resized. random: each training image by one of the two, as with timm's
    --train-interpolation random, its default."""
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
    eval_interpolation: NotInRecipe[Literal["bilinear", "bicubic"] | None] = None
    """How evaluation images are resized (timm's --interpolation). None: as data.interpolation says, and bicubic if that
    is random."""
    eval_sets: NotInRecipe[
        Annotated[tuple[tuple[SetName, str], ...], Rule("pairs of a name and a dataset, such as v2,data/imagenet-v2")]
    ] = ()
    """More datasets that every evaluation measures, such as ImageNet-V2, -A, -R and -Sketch: (name, directory or URL).
    Their classes are found by name among those of data.root, and only these compete, as is usual for -A and -R. They
    are shown and recorded by their names; the validation split of data.root decides which checkpoint is best. A file
    that ends in .json instead of a dataset has other labels of the same validation split, such as ReaL's real.json
    (several right classes an image): real,real.json."""
    eval_views: NotInRecipe[Literal["one", "mirrored", "mirrored-and-shifted"]] = "one"
    """Views of each evaluation image whose logits are averaged (test-time augmentation). mirrored: the image and its
    mirror image, as FFCV's lr_tta. mirrored-and-shifted: these two, and both shifted by one pixel up and left and down
    and right, six passes; the shifted ones share half of the weight, as in airbench."""

    @property
    def train_sizes(self) -> list[int]:
        """All sizes of training images during a run, without duplicates."""
        return sorted({self.train_size, *(size for _, size in self.progressive)})

    @property
    def roots(self) -> list[str]:
        """data.root and the datasets that are trained on, each once."""
        return list(dict.fromkeys([self.root, *self.sources.values()]))

    def moved(self, places: Mapping[str, str]) -> "DataConfig":
        """Return these settings with other directories or URLs for some of `roots`."""
        return replace(self, root=places.get(self.root, self.root), **self.moved_sources(places))

    @property
    def eval_resized(self) -> int:
        """Side of evaluation images before the central crop, in pixels: of both sides, or of the short one."""
        return round(self.eval_size * 256 / 224) if self.eval_resize_to is None else self.eval_resize_to

    @property
    def eval_filter(self) -> Literal["bilinear", "bicubic"]:
        """The filter by which evaluation images are resized."""
        if self.eval_interpolation is not None:
            return self.eval_interpolation
        return "bicubic" if self.interpolation == "random" else self.interpolation

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
        super().__post_init__()
        for _, root in self.eval_sets:
            if is_url(root):
                refuse_credentials("data.eval_sets", root)
        require(
            len(dict(self.eval_sets)) == len(self.eval_sets),
            f"data.eval_sets has the names {', '.join(name for name, _ in self.eval_sets)}: use each name once",
        )
        if is_url(self.root):
            refuse_credentials("data.root", self.root)
            require(
                self.reader != "dali",
                f"data.reader is dali, which reads files, and data.root is {self.root}: use data.reader index",
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
        parse_augment(self.augment)

    CONFLICTS = (
        Conflict(
            names=("cache", "root"),
            when=lambda data: data.cache is not None and not any(map(is_url, data.roots)),
            remedy="no dataset of the run is in an object store; use data.local_copy to copy it to a local disk",
        ),
        Conflict(
            names=("local_copy", "root"),
            when=lambda data: data.local_copy is not None and all(map(is_url, data.roots)),
            remedy="it copies from file systems; use data.cache for an object store",
        ),
        Conflict(
            names=("progressive", "train_size"),
            when=lambda data: data.train_sizes[-1] != data.train_size,
            remedy="use sizes up to data.train_size {0.train_size}, which follows them",
        ),
        Conflict(
            names=("crop", "crop_side"),
            when=lambda data: data.crop != "random-resized" and data.crop_side is not None,
            remedy="it has its own size, so leave data.crop_side out",
        ),
        Conflict(
            names=("crop_padding", "crop_side"),
            when=lambda data: data.crop_padding > 0 and data.crop_side is None,
            remedy="set data.crop_side, such as {0.train_size}",
        ),
        Conflict(
            names=("crop_padding", "crop_side"),
            when=lambda data: data.crop_side is not None and data.crop_padding >= data.crop_side,
            remedy="use less than data.crop_side, or a crop could miss the image",
        ),
        Conflict(
            names=("crop_padding_mode", "crop_padding"),
            when=lambda data: data.crop_padding_mode == "reflect" and data.crop_padding == 0,
            remedy="set data.crop_padding, such as 4",
        ),
        Conflict(
            names=("alternating_flip", "horizontal_flip"),
            when=lambda data: data.alternating_flip and data.horizontal_flip == 0,
            remedy="set data.horizontal_flip, such as 0.5",
        ),
        Conflict(
            names=("color_jitter_probability", "color_jitter"),
            when=lambda data: data.color_jitter_probability != 1 and data.color_jitter == data.hue_jitter == 0,
            remedy="set data.color_jitter, such as 0.4",
        ),
        Conflict(
            names=("random_erasing_fill", "random_erasing"),
            when=lambda data: data.random_erasing_fill != "mean" and data.random_erasing == 0,
            remedy="set data.random_erasing, such as 0.25",
        ),
    )


@section("View")
@dataclass(frozen=True, kw_only=True)
class View:
    """Views of every training image for self-supervised learning, each with draws of its own."""

    size: Pixels = 224
    """Side of the views, in pixels."""
    n: Annotated[int, Rule("a number of views from 1 to 64", 1, 64)] = 1
    """How many of them."""
    area: tuple[float, float] | None = None
    """Their crops cover a fraction of the image's area between these two. None: as data.crop_area says."""


@section("model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: str
    """A timm model; `python -c "import timm; print(timm.list_models())"` lists them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of timm.create_model, e.g. drop rates. The number of classes is the dataset's. On the command line each
    is a setting: --model.kwargs.drop_path_rate 0.1 sets it, --model.kwargs.drop_path_rate none removes it."""
    weights: ByContent[str | None] = None
    """Pretrained weights: a file (.safetensors, or .pth, .bin and the like, from which only tensors are read), a run
    directory or one of its checkpoints (the moving average of the weights, if there is one), or, if a hub can be
    reached, a timm name with its tag. If the number of classes differs, the classifier is a new one, see head_scale;
    if the resolution differs, position embeddings are resampled. None: random weights."""
    init: Literal["torch", "portable"] = "torch"
    """The generator of random initial weights. torch: torch's, whose weights depend on the processor's vector
    instructions. portable: our own, whose weights are the same on every machine."""
    head_scale: NotNegative | None = None
    """Factor of the classifier's initial weights and biases (timm's --head-init-scale); 0: all logits begin at 0. None:
    0 for a new classifier on pretrained weights, whose features its noise would drown out, else 1."""
    head_bias: float | None = None
    """Initial bias of the classifier (timm's --head-init-bias). With binary-cross-entropy, -log(classes) begins with
    the right share of positives; 1,000 classes: -6.9. None: the model's own."""
    freeze: tuple[str, ...] = ()
    """Names of weights that are not trained, where * matches anything: patch_embed.* blocks.0.*; or all-but-head, which
    trains only the classifier (a linear probe); or batch-norm, all BatchNorms. BatchNorms without trained weights keep
    their running statistics and normalise with them."""
    constant_drop_path: bool = False
    """Drop paths at the rate model.kwargs.drop_path_rate in all blocks, as DeiT III does. False: at timm's rates, which
    grow from 0 in the first block to that rate in the last, so that they are half of it on average."""
    channels_last: NotInRecipe[bool] = False
    """Memory format of weights and images, with which convolutional models are faster on GPUs."""
    compile: NotInRecipe[Literal["auto", "none", "model", "cuda-graphs", "blocks", "autotune"]] = "auto"
    """torch.compile. model: the whole model. cuda-graphs: the same, with its kernels captured once and replayed, for
    models whose kernels take longer to launch than to run. blocks: each repeated block; identical blocks share code, so
    the first step starts sooner. autotune: the blocks, with the fastest of several kernels for each matrix product,
    some of which include bias and activation; timing them takes minutes at the first start, and may choose others at
    the next. auto: on a GPU, the blocks if the model has any, falling back to none with a warning if the compiler
    fails; none on a CPU.
    A model that is split over ranks can be compiled by blocks only.
    Dropout masks differ from those of uncompiled code, but are still a function of the micro-batch."""
    attention: NotInRecipe[Literal["auto", "cudnn", "flash", "efficient", "math"]] = "auto"
    """The attention kernel to try first. auto: torch's own order. With run.deterministic, kernels that are not
    deterministic are skipped."""
    fast_norm: bool = False
    """With precision.dtype bf16 or fp16, keep the residual stream in that format and normalise in it. This saves memory
    traffic and changes the rounding, so it is part of the recipe. Without it both are float32, as under autocast."""
    activation_checkpointing: NotInRecipe[bool | Literal["selective"]] = False
    """Recompute each block's activations in the backward pass instead of keeping them: less memory, a third more
    compute. selective: keep the results of matrix products and attention, and recompute only the cheap rest."""

    @property
    def compiles_as_a_whole(self) -> bool:
        """Whether the model is compiled as a whole, not by blocks or not at all."""
        return self.compile in ("model", "cuda-graphs")

    def __post_init__(self) -> None:
        require(
            "num_classes" not in self.kwargs,
            f"model.kwargs has num_classes {self.kwargs.get('num_classes')}: leave it out, the dataset decides it",
        )
        require(
            not self.constant_drop_path or "drop_path_rate" in self.kwargs,
            "model.constant_drop_path is true, but model.kwargs has no drop_path_rate: set it, such as 0.1",
        )


Beta = Annotated[float, Rule("a number from 0 to under 1, e.g. 0.9,0.999", 0, UNDER_1)]


@section("optimizer")
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """One of timm's optimizers; by default LAMB (You et al., arXiv 1904.00962)."""

    lr: Positive
    """Peak learning rate, at a global batch of 256 if it is scaled."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of lr with batch.global_batch: by global_batch / 256, or by its square root."""
    name: str = "lamb"
    """An optimizer that timm knows (timm.optim.list_optimizers()): lamb, adamw, sgd, lars, muon, ... Muon and its
    variants update vectors, embeddings and the classifier by AdamW, at optimizer.kwargs.fallback_lr_scale times lr."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer's constructor, such as momentum or nesterov for sgd, bias_correction for lamb. On
    the command line each is a setting: --optimizer.kwargs.momentum 0.8 sets it, and none instead of 0.8 removes it."""
    weight_decay: NotNegative = 0.0
    """Weight decay, which LAMB adds to its update before the trust ratio."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: NotNegative = 1e-6
    """Added to the root of the second moment, so that the update stays finite."""
    exclude_vectors: bool | Literal["and-tokens"] = True
    """No weight decay and no trust ratio on biases, norms and other vectors. and-tokens: nor on position embeddings,
    class tokens, registers and whatever else the model declares as free of weight decay, as in timm's train.py. False:
    both on all parameters."""
    layer_decay: Annotated[float, Rule("a factor over 0 and up to 1", OVER_0, 1)] | None = None
    """Layer-wise decay of the learning rate, for fine-tuning: each layer has this times the rate of the next one, and
    the classifier the full rate. With exclude_vectors, parameters that the model declares as free of weight decay, such
    as position embeddings, have none either. None: one rate for all."""
    groups: Annotated[
        tuple[tuple[str, NotNegative, NotNegative], ...],
        Rule("names of weights with factors of lr and of weight_decay, such as *.norm*.bias,64,0.015625"),
    ] = ()
    """Weights with another learning rate or weight decay: each row is a name, where * matches anything, a factor of lr
    and a factor of weight_decay. The first row that matches counts; a factor of weight_decay also applies to weights
    that exclude_vectors would exempt."""
    clip_grad_norm: Annotated[float, Rule("a norm over 0", OVER_0)] | None = 1.0
    """Largest global 2-norm of the gradient, or what clip_mode says (timm's --clip-grad); None: no clipping."""
    clip_mode: str = "norm"
    """What clip_grad_norm bounds, as timm's --clip-mode. norm: the 2-norm of all gradients together. value: each
    element. agc: the ratio of the 2-norms of gradient and weight, of each output of a layer and of each vector, but for
    the classifier (adaptive gradient clipping, Brock et al., arXiv 2102.06171, there 0.01). Or one that the config file
    adds to dali_train.training.optim.GRADIENT_TRANSFORMS, which takes the place of clipping."""

    CONFLICTS = (
        Conflict(
            names=("clip_mode", "clip_grad_norm"),
            when=lambda optimizer: optimizer.clip_mode in ("value", "agc") and optimizer.clip_grad_norm is None,
            remedy="set optimizer.clip_grad_norm, such as 0.01 for agc",
        ),
        Conflict(
            names=("layer_decay", "groups"),
            when=lambda optimizer: optimizer.layer_decay is not None and bool(optimizer.groups),
            remedy="each sets the factors of lr; leave optimizer.groups out unless you know them by name",
        ),
    )


_USES = {  # the decays that have a use for a setting; what a decay of the user's own uses is not known
    "milestones": ("multistep",),
    "power": ("polynomial", "warmup-stable-decay"),
    "decay_rate": ("step", "multistep"),
    "decay_epochs": ("step", "warmup-stable-decay", "wsd", "linear", "cosine", "polynomial"),
}
_DECAYS = {decay for decays in _USES.values() for decay in decays}


def _is_unused(schedule: "ScheduleConfig", name: str) -> bool:
    """Return whether a setting of the schedule is set, and the decay has no use for it."""
    is_set = getattr(schedule, name) != getattr(ScheduleConfig, name)
    return is_set and schedule.name in _DECAYS and schedule.name not in _USES[name]


@section("schedule")
@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A linear warmup to the peak rate (optimizer.lr, scaled by optimizer.scale_lr), then a decay."""

    name: str = "linear"
    """How the rate decays until run.epochs: linear, cosine, polynomial, step (times decay_rate every decay_epochs),
    multistep (times decay_rate at each of milestones), warmup-stable-decay (constant until decay_epochs before the
    end), wsd (likewise, by 1 - sqrt of the decay's part that has passed, as in timm), or a row that the config file
    adds to dali_train.training.schedule.SCHEDULES."""
    warmup_epochs: NotNegative = 0.0
    """Passes over the training split during which the rate rises."""
    warmup_lr: NotNegative | None = None
    """Rate of the first warmup step, from which it rises by (peak - warmup_lr) / warmup per step, as in timm; 0 as in
    big_vision. None: step t has (t + 1) / (warmup + 1) of the peak, as in ColossalAI."""
    decay_from: Literal["warmup-end", "start"] = "warmup-end"
    """Where the decay starts. start: at step 0, so that the warmup replaces its first part, as in timm by default, DeiT
    and ResNet strikes back; the rate then drops slightly at the end of the warmup."""
    min_lr: NotNegative = 0.0
    """Final rate, and the minimum after the warmup. It is not scaled with the batch."""
    power: Positive = 1.0
    """Exponent of polynomial, and of the decay of warmup-stable-decay."""
    decay_epochs: Positive | None = None
    """step: epochs between two decays. warmup-stable-decay, wsd: length of the decay; None with wsd: the rate stays (a
    trunk, from whose checkpoints other runs branch off and decay). linear, cosine, polynomial: length of the decay,
    after which the rate is min_lr; None: until run.epochs."""
    decay_rate: Annotated[float, Rule("a factor over 0 and up to 1", OVER_0, 1)] = 0.1
    """Factor of each decay of step and multistep."""
    milestones: tuple[Positive, ...] = ()
    """multistep: the epochs from which on the rate is multiplied by decay_rate once more, as torch's MultiStepLR counts
    them; from the end of the warmup on with decay_from warmup-end. timm's decays an epoch earlier."""
    step_every: Literal["step", "epoch"] = "step"
    """Whether the rate changes at every optimizer step or only at the start of an epoch."""

    CONFLICTS = (
        Conflict(
            names=("warmup_epochs", "step_every"),
            when=lambda schedule: schedule.step_every == "epoch" and schedule.warmup_epochs % 1 != 0,
            remedy="it must be a whole number there",
        ),
        Conflict(
            names=("name", "decay_epochs"),
            when=lambda schedule: schedule.name in ("step", "warmup-stable-decay") and schedule.decay_epochs is None,
            remedy="set schedule.decay_epochs",
        ),
        Conflict(
            names=("name", "milestones"),
            when=lambda schedule: schedule.name == "multistep" and not schedule.milestones,
            remedy="set schedule.milestones, such as 30,60,80",
        ),
        *(
            Conflict(
                names=(name, "name"),
                when=partial(_is_unused, name=name),
                remedy=f"it has no effect there; leave it out, or use {' or '.join(decays)}",
            )
            for name, decays in _USES.items()
        ),
    )


@section("batch")
@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The global batch and its micro-batches."""

    global_batch: Annotated[int, Rule("a whole number from 1 to 16,777,216", 1, 1 << 24)]
    """Images per optimizer step, over all ranks and all accumulated micro-batches."""
    micro_batch: Annotated[int, Rule("a whole number from 1 to 65,536", 1, 1 << 16)]
    """Images per forward and backward pass on one rank. auto, on the command line: the largest that fits, which the run
    then keeps wherever it goes on."""

    def __post_init__(self) -> None:
        if self.global_batch % self.micro_batch == 0:
            return
        multiple = max(1, round(self.global_batch / self.micro_batch)) * self.micro_batch
        divisors = (size for size in range(1, self.micro_batch + 256) if self.global_batch % size == 0)
        nearest = min(divisors, key=lambda size: abs(size - self.micro_batch))
        raise ConfigError(
            f"batch.global_batch {self.global_batch} is not a multiple of batch.micro_batch {self.micro_batch}: set "
            f"batch.micro_batch {nearest}, or batch.global_batch {multiple}"
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step, over all ranks."""
        return self.global_batch // self.micro_batch

    def grad_accum_steps(self, data_parallel_size: int) -> int:
        """Return the micro-batches that each of `data_parallel_size` ranks accumulates per step; if they do not divide
        evenly, some ranks accumulate one less.

        Raises:
            ConfigError: there are more ranks than micro-batches.
        """
        most = self.num_micro_batches
        if data_parallel_size > most:
            fitting = range(self.global_batch // data_parallel_size, 0, -1)
            smaller = next((size for size in fitting if self.global_batch % size == 0), None)
            raise ConfigError(
                f"batch.global_batch {self.global_batch} is {most} x batch.micro_batch {self.micro_batch}, and "
                f"{data_parallel_size} data-parallel ranks need at least one each: start at most {most}"
                + (f", or set batch.micro_batch {smaller}" if smaller is not None else "")
            )
        return -(-most // data_parallel_size)

    def describe_accumulation(self, data_parallel_size: int) -> str:
        """Format `grad_accum_steps`: "4", or "4 or 3" if the micro-batches do not divide evenly among the ranks."""
        steps = self.grad_accum_steps(data_parallel_size)
        return f"{steps} or {steps - 1}" if self.num_micro_batches % data_parallel_size else f"{steps}"


@section("loss")
@dataclass(frozen=True, kw_only=True)
class LossConfig(DistillationSettings, ClassWeightSettings, LossOfSeveralSettings):
    """The training loss."""

    name: str = "cross-entropy"
    """cross-entropy, binary-cross-entropy (one binary classification per class, as in ResNet strikes back), or a row
    that the config file adds to dali_train.training.loss.LOSSES."""
    label_smoothing: Annotated[float, Rule("a share from 0 to under 1", 0, UNDER_1)] = 0.0
    """Share of the target that is spread evenly over all classes."""
    target_threshold: Annotated[float, Rule("a number from 0 to under 1", 0, UNDER_1)] | None = None
    """binary-cross-entropy: targets above it count as 1 and others as 0, so that a mixture has both classes. None:
    targets are used as they are."""
    sum_classes: bool = False
    """binary-cross-entropy: the sum over the classes, as big_vision's sigmoid loss, instead of their mean (timm's
    --bce-sum); with C classes, loss and gradient are C times as large."""

    CONFLICTS = (
        Conflict(
            names=("target_threshold", "name"),
            when=lambda loss: loss.target_threshold is not None and loss.name in ("cross-entropy", *loss.TIMM_LOSSES),
            remedy="leave it out, or use binary-cross-entropy",
        ),
        Conflict(
            names=("sum_classes", "name"),
            when=lambda loss: loss.sum_classes and loss.name in ("cross-entropy", *loss.TIMM_LOSSES),
            remedy="leave it out, or use binary-cross-entropy",
        ),
    )


@section("ema")
@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average (EMA) of weights and buffers, as timm's ModelEmaV3 computes it. It is evaluated
    beside the weights, saved in checkpoints, and decides which checkpoint is the best."""

    decay: Annotated[float, Rule("a share between 0 and 1, such as 0.999", OVER_0, UNDER_1)] | None = None
    """Weight of the old average at each optimizer step. The average spans about 1 / (1 - decay) steps, so choose it by
    the number of steps, not epochs: 300 epochs of ImageNet are 11,730 steps in batches of 32,768. None: no average."""
    warmup: bool = False
    """Let the decay rise to its value: 1 - (1 + step) ** (-2 / 3)."""
    power: NotNegative = 0.0
    """Let the decay rise to its value at the end of the run: decay x (step / steps) ** power. 0: a constant decay."""
    every_steps: Count = 1
    """Optimizer steps between two updates of the average."""
    lookahead: bool = False
    """Continue training from the average after each update of it (Zhang et al., arXiv 1907.08610), whose alpha and k
    are 1 - decay and every_steps."""

    CONFLICTS = (
        Conflict(
            names=("warmup", "decay"),
            when=lambda ema: ema.warmup and ema.decay is None,
            remedy="set ema.decay, such as 0.999",
        ),
        Conflict(
            names=("power", "decay"),
            when=lambda ema: ema.power != 0 and ema.decay is None,
            remedy="set ema.decay, such as 0.999",
        ),
        Conflict(
            names=("every_steps", "decay"),
            when=lambda ema: ema.every_steps != 1 and ema.decay is None,
            remedy="set ema.decay, such as 0.999",
        ),
        Conflict(
            names=("lookahead", "decay"),
            when=lambda ema: ema.lookahead and ema.decay is None,
            remedy="set ema.decay, such as 0.999",
        ),
        Conflict(
            names=("warmup", "power"),
            when=lambda ema: ema.warmup and ema.power > 0,
            remedy="each is a way for the decay to rise; ema.warmup is timm's and the usual one, so leave ema.power "
            "out",
        ),
    )


@section("mixup")
@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Mixup and CutMix, drawn once per micro-batch, with timm's meaning of alpha. If both are on, each micro-batch uses
    one of them."""

    alpha: NotNegative = 0.0
    """Mixup's lambda is drawn from Beta(alpha, alpha). 0 turns Mixup off."""
    cutmix_alpha: NotNegative = 0.0
    """CutMix: a box of the partner covers a fraction 1 - lambda of the image, with lambda from Beta(cutmix_alpha,
    cutmix_alpha). 0 turns CutMix off. Only with data.reader index."""
    probability: Probability = 1.0
    """Probability that a micro-batch is mixed at all."""
    switch_probability: Probability = 0.5
    """If both are on: probability that a mixed micro-batch uses CutMix."""
    until_epoch: Positive | None = None
    """Mix nothing from this epoch on. A step belongs to the epoch in which it begins. None: mix until the end."""

    @property
    def enabled(self) -> bool:
        return self.alpha > 0 or self.cutmix_alpha > 0

    CONFLICTS = (
        Conflict(
            names=("probability", "alpha", "cutmix_alpha"),
            when=lambda mixup: mixup.probability != 1 and not mixup.enabled,
            remedy="nothing is mixed; set mixup.alpha, such as 0.2, or leave it out",
        ),
        Conflict(
            names=("until_epoch", "alpha", "cutmix_alpha"),
            when=lambda mixup: mixup.until_epoch is not None and not mixup.enabled,
            remedy="nothing is mixed; set mixup.alpha, such as 0.2, or leave it out",
        ),
        Conflict(
            names=("switch_probability", "alpha", "cutmix_alpha"),
            when=lambda mixup: mixup.switch_probability != 0.5 and 0 in (mixup.alpha, mixup.cutmix_alpha),
            remedy="it needs both; set both, or leave it out",
        ),
    )


@section("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16: autocast with float32 weights, fp16 also with a gradient scaler. fp64: for checks on the CPU, to
    show which differences are rounding."""
    autocast: bool = True
    """With fp16 or bf16, torch's autocast keeps norms, softmax and the residual stream in float32. False: compute
    everything in dtype, with float32 master weights and gradients, and without compiling."""
    initial_scale: Positive = 65536.0
    """Initial loss scale of fp16; it doubles after 2,000 steps without an overflow."""
    tf32: NotInRecipe[bool] = True
    """Compute float32 matrix products and convolutions in TensorFloat-32 on GPUs that have it: 10 bits of mantissa
    instead of 23, accumulated in float32. It is deterministic, but set it to false to compare with a CPU."""

    def __post_init__(self) -> None:
        require(
            self.autocast or self.dtype in ("fp16", "bf16"),
            f"precision.autocast is false with precision.dtype {self.dtype}, but needs fp16 or bf16: set it to true",
        )


@section("parallel.tensor")
@dataclass(frozen=True, kw_only=True)
class TensorConfig(GridSettings):
    """Tensor parallelism: each linear layer is sharded over ranks, which compute the same micro-batches."""

    size: Count = 1
    """Ranks that each layer is sharded over. 1: no tensor parallelism."""
    sequence_parallel: bool = False
    """With mode 1d, also shard norms, dropout and residual additions by tokens: less memory."""


@section("parallel")
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks = pipeline x tensor.size x data; the number of data-parallel ranks follows."""

    pipeline: Count = 1
    """Ranks of the pipeline: each has one or more stages (groups of blocks), and the micro-batches of a step pass
    through all stages."""
    num_chunks: Count = 1
    """Stages per rank. 1: the 1F1B schedule (one forward, one backward). More: interleaved 1F1B, with a smaller
    pipeline bubble."""
    shard: Literal["none", "optimizer", "gradients", "full"] = "none"
    """State that is sharded over data-parallel ranks instead of replicated. optimizer: the optimizer's state, and the
    weights between steps (ZeRO 1). gradients: gradients too (ZeRO 2). full: weights are gathered block by block when
    they are needed (ZeRO 3)."""
    shard_ranks: Count | None = None
    """Ranks that one copy of the state is sharded over. None: all data-parallel ranks."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Tensor parallelism: parallel.tensor.mode, size and depth."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of DDP's all-reduce. bf16 halves the traffic. Ranks still accumulate in float32, but the mean has rounding
    errors (0.3 % on 2 ranks, 0.43 % on 4) that depend on the number of ranks; resuming on the same number stays
    bit-identical."""
    timeout_s: Annotated[float, Rule("a number of seconds over 0, at most 30 days", OVER_0, 30 * 86_400)] = 600
    """The run ends if a collective waits longer than this for a rank."""

    @property
    def schedule(self) -> Literal["1f1b", "interleaved"]:
        """The pipeline schedule."""
        return "interleaved" if self.num_chunks > 1 else "1f1b"

    @property
    def num_stages(self) -> int:
        """The number of stages, over all ranks of the pipeline."""
        return self.pipeline * self.num_chunks

    @property
    def kind(self) -> str:
        """The first setting that splits the model over ranks, with its value; empty if none does."""
        kinds = {"pipeline": (self.pipeline, 1), "tensor.size": (self.tensor.size, 1), "shard": (self.shard, "none")}
        return next((f"parallel.{name} {value}" for name, (value, off) in kinds.items() if value != off), "")

    @property
    def shares_images(self) -> bool:
        """True if several ranks compute the same micro-batches."""
        return self.pipeline * self.tensor.size > 1

    @property
    def smallest_world_size(self) -> int:
        return self.pipeline * self.tensor.size * (self.shard_ranks or 1)

    def check_micro_batch(self, num_images: int) -> None:
        """Check that a micro-batch of `num_images` can be split.

        Raises:
            ConfigError: tensor parallelism shards the images, but their number is not divisible.
        """
        shards = self.tensor.image_shards
        require(
            num_images % shards == 0,
            f"batch.micro_batch is {num_images} with parallel.tensor.size {self.tensor.size} and parallel.tensor.mode "
            f"{self.tensor.mode}: its images are split into {shards} shards, use a multiple of {shards}",
        )

    def __post_init__(self) -> None:
        require(
            not self.kind or self.grad_reduce_dtype == "fp32",
            f"parallel.grad_reduce_dtype is {self.grad_reduce_dtype} with {self.kind}, which does not use DDP: set it "
            "to fp32",
        )

    CONFLICTS = (
        Conflict(
            names=("num_chunks", "pipeline"),
            when=lambda parallel: parallel.num_chunks > 1 and parallel.pipeline == 1,
            remedy="set parallel.pipeline to the number of ranks in the pipeline, at least 2",
        ),
        Conflict(
            names=("shard_ranks", "shard"),
            when=lambda parallel: parallel.shard_ranks is not None and parallel.shard == "none",
            remedy="set parallel.shard to the state to shard, or leave it out",
        ),
    )


@section("run")
@dataclass(frozen=True, kw_only=True)
class RunConfig(MirrorSettings, AuditSettings, RunOfSeveralSettings):
    """Length, directory, checkpoints and device of a run."""

    dir: NotInRecipe[Directory]
    """Run directory, for config, metrics, checkpoints and the output of hooks."""
    epochs: Annotated[float, Rule("a number from 0.0001 to 1,000,000,000", 1e-4, 1e9)]
    """Passes over the training split. The schedule spans them, rounded up to complete steps."""
    max_steps: NotInRecipe[Count | None] = None
    """Stop after this many steps; the schedule stays that of run.epochs."""
    eval_every_epochs: NotInRecipe[Positive | None] = 1.0
    """Epochs between evaluations; the last one is at the end. None: only at the end of run.epochs, and not where
    run.max_steps ends the run."""
    checkpoint_every_steps: NotInRecipe[Count | None] = None
    """Save every this many steps, before each evaluation, and at the end. None: after each epoch."""
    checkpoint_every_seconds: NotInRecipe[Annotated[float, Rule("a number of seconds over 0", OVER_0)] | None] = None
    """Also save when the last checkpoint is this old, which bounds the loss if a node dies."""
    keep_checkpoints: NotInRecipe[Count] = 2
    """How many of the newest checkpoints to keep, besides the best ones."""
    keep_best: NotInRecipe[Count] = 1
    """How many of the best checkpoints to keep, by run.best_by (timm's --checkpoint-hist)."""
    best_by: Literal["top1", "balanced-top1", "loss", "mean-ap"] = "top1"
    """The measurement on the validation split by which the best checkpoint is chosen (timm's --eval-metric); of the
    moving average of the weights, if there is one. balanced-top1: the mean of the classes' accuracies."""
    max_seconds: NotInRecipe[Annotated[float, Rule("a number of seconds over 0", OVER_0)] | None] = None
    """Save and stop with exit status 75 after this much wall-clock time. None: only on a signal or before the end of a
    Slurm job."""
    resume: NotInRecipe[Annotated[str, Rule("auto, never or the path of a checkpoint")]] = "auto"
    """auto: resume from the newest complete checkpoint in run.dir, if there is one. never: start at step 0, in an empty
    run.dir. Or the path of a checkpoint of another run, to start from it, or of this run, to go back to it. A run that
    starts from another's may have another schedule if no step before the checkpoint had another rate."""
    accept_changed_recipe: NotInRecipe[bool] = False
    """Resume even if the recipe or the dataset differs from the checkpoint's; the differences are printed."""
    device: NotInRecipe[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where the model runs. auto: on a GPU if there is one."""
    deterministic: NotInRecipe[bool] = False
    """Deterministic kernels: bit-identical resumes on GPUs too, at a cost in speed."""
    published_top1: NotInRecipe[Fraction | None] = None
    """Published accuracy of the recipe's source, a fraction, drawn as a line in the report."""


Factory = Annotated[Callable[[], Any], Rule("a class or a function that makes a hook, not a hook itself")]
STEPS = "a first step from 1 on and a last step that is not before it"


@section("hooks")
@dataclass(frozen=True, kw_only=True)
class HooksConfig(LedgerSettings):
    """Logging, tables, traces, trackers and user hooks."""

    log_every_steps: Count = 10
    """Steps between two lines on the console and in metrics.jsonl; the host reads the loss only then."""
    trace_samples: NeedsIndex[bool] = False
    """Write samples.rank{r}.jsonl: which images each micro-batch had, in 13 bytes an image."""
    predictions: CountOr0 = 320
    """Validation images in the table of predictions, which comes with tables of confused classes and accuracy by class.
    0: no tables."""
    profile: Annotated[tuple[Count, Count], Rule(f"{STEPS}, e.g. 20,25")] | None = None
    """First and last step of a torch profiler trace, counted from 1, e.g. 20,25."""
    stop_early: Positive | None = None
    """Finish the run after this many epochs without a better top-1. None: train for all of run.epochs."""
    trackers: tuple[str, ...] = ()
    """Services that also record the run: tensorboard, wandb, mlflow. Each has its own environment variables:
    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""
    user: tuple[Factory, ...] = ()
    """Your own hooks: subclasses of dali_train.hooks.Hook, or functions that return one, called on every rank. They can
    be set only in a config file."""

    def __post_init__(self) -> None:
        require(
            self.profile is None or self.profile[0] <= self.profile[1],
            f"hooks.profile is {self.profile}: use {STEPS}",
        )
