"""Every setting of a run, as frozen dataclasses that check themselves, and loading them from ``configs/*.py``.

A config file is Python and ends with ``config = Config(...)``; every field can be overridden on the command line as
``--section.field value``. The config names the *global* batch; how it is spread over ranks is derived where the
number of ranks is known, never written down.
"""

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be used; the message names field, value, requirement and remedy."""


def _require(fulfilled: bool, message: str) -> None:
    if not fulfilled:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    root: str
    """Dataset directory with dataset.json (made by tools/make_tfrecords.py or tools/make_index.py)."""
    seed: int = 0
    """Seeds everything random: order, crops, flips, Mixup, dropout and the first weights."""
    shuffle: Literal["full", "block", "none"] = "full"
    """full: a new uniformly random order every epoch. block: shuffled blocks of neighbours, mixed within windows, for disks and
    parallel file systems that want long reads. none: the order on disk. For data.reader stream see data.shuffle_buffer."""
    block_images: int = 128
    """Images of a block. 128 ImageNet originals are 14 MB: a disk that seeks for 10 ms reads them at nine tenths of its speed."""
    window_blocks: int = 8
    """Blocks that are mixed with each other, for each micro-batch of a step its own; `dali-train plan` tells the memory for all."""
    read_ahead_mb: int = 256
    """Megabytes of coming images that a rank reads into the page cache before they are needed. 0: none."""
    local_copy: str | None = None
    """Directory on a disk of each host: the dataset is copied there once before training, and read from there."""
    reader: Literal["index", "stream", "synthetic"] = "index"
    """index: images are slices of memory-mapped shards. synthetic: noise, to see what data costs. stream: DALI's TFRecord
    reader, for storage that can only stream; samples then depend on the number of ranks, and a run can go on only with the same."""
    stream_url: str | None = None
    """Where data.reader stream finds train/SHARD: s3://BUCKET/PREFIX or a directory. None: in data.root, which holds all else."""
    shuffle_buffer: int = 1024
    """data.reader stream: records from which each rank draws its next image. More for a dataset that is sorted by class."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where images are decoded and augmented. auto: on the model's device."""
    num_threads: int | None = None
    """Decoding threads of one rank. None: this rank's share of the cores that the job may use."""
    prefetch: int = 2
    """Micro-batches that are prepared ahead. Two cover the worst: of 5,000 micro-batches of 256 ImageNet photographs the largest
    has 1.3 times the mean's pixels, of 32 photographs 2.3 times."""
    hw_decoder_load: float = 0.65
    """Share of the JPEGs that go to a GPU's hardware decoder, where it has one (A100, H100 and later). The best share depends
    on the number of threads: tools/bench_gpu_data.py tells."""
    train_size: int = 224
    """Side of the square training images, in pixels."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Random crops cover a fraction of the image's area between these two."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Random crops have a ratio of width to height between these two."""
    horizontal_flip: float = 0.5
    """Probability of mirroring a training image."""
    antialias: bool = True
    """Filter when shrinking, as PIL does. False is faster and aliases."""
    mean: tuple[float, float, float] = (127.5, 127.5, 127.5)
    """Subtracted from the RGB values 0 to 255."""
    std: tuple[float, float, float] = (127.5, 127.5, 127.5)
    """Divides the RGB values after the mean is subtracted."""
    eval_resize: Literal["short-side", "squash"] = "short-side"
    """How evaluation images become eval_resize_to: the short side, aspect kept; or both sides, which distorts."""
    eval_resize_to: int = 256
    """In pixels; the central eval_size square of the result is evaluated."""
    eval_size: int = 224
    """Side of the square evaluation images, in pixels."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 1 << 64, f"data.seed is {self.seed}: use a number from 0 to 2**64 - 1")
        _require(self.train_size > 0, f"data.train_size is {self.train_size}: use a positive number of pixels")
        low, high = self.crop_area
        _require(0 < low <= high <= 1, f"data.crop_area is {self.crop_area}: use two fractions with 0 < low <= high <= 1")
        low, high = self.crop_aspect
        _require(0 < low <= high, f"data.crop_aspect is {self.crop_aspect}: use two ratios with 0 < low <= high")
        _require(0 <= self.horizontal_flip <= 1, f"data.horizontal_flip is {self.horizontal_flip}: use a probability from 0 to 1")
        _require(min(self.std) > 0, f"data.std is {self.std}: each must be over 0")
        _require(
            0 < self.eval_size <= self.eval_resize_to,
            f"data.eval_size {self.eval_size} does not fit into data.eval_resize_to {self.eval_resize_to}: "
            "enlarge data.eval_resize_to",
        )
        _require(0 <= self.hw_decoder_load <= 1, f"data.hw_decoder_load is {self.hw_decoder_load}: use a share from 0 to 1")
        _require(self.block_images >= 1, f"data.block_images is {self.block_images}: use at least 1")
        _require(self.window_blocks >= 1, f"data.window_blocks is {self.window_blocks}: use at least 1")
        _require(self.read_ahead_mb >= 0, f"data.read_ahead_mb is {self.read_ahead_mb}: use 0 for no read-ahead, or more")
        _require(self.local_copy != "", "data.local_copy is empty: name a directory, or leave it out to read from data.root")
        _require(self.prefetch >= 1, f"data.prefetch is {self.prefetch}: use at least 1")
        _require(self.shuffle_buffer >= 1, f"data.shuffle_buffer is {self.shuffle_buffer}: use at least 1")
        _require(
            self.stream_url is None or self.reader != "index",
            f"data.stream_url is {self.stream_url}, but data.reader is index, which reads data.root: set data.reader stream, "
            "or leave data.stream_url out",
        )
        _require(
            self.local_copy is None or self.reader != "stream",
            f"data.local_copy is {self.local_copy}, but data.reader is stream, which leaves the shards where they are: "
            "set data.reader index to read a copy",
        )
        _require(
            self.num_threads is None or self.num_threads >= 1, f"data.num_threads is {self.num_threads}: use at least 1 or None"
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str
    """A timm model; `python -c "import timm; print(timm.list_models())"` lists them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to timm.create_model, e.g. drop rates. The number of classes is the dataset's."""
    channels_last: bool = False
    """Memory format of weights and images; convolutional models on GPUs are faster with it."""
    compile: Literal["none", "model", "blocks"] = "none"
    """torch.compile. model: all of it. blocks: each repeated block; alike blocks share the code, so the first step comes sooner.
    Dropout draws other numbers than without, which belong to the micro-batch all the same."""
    cuda_graphs: bool = False
    """Record the compiled model's kernels once and replay them: for models whose kernels take longer to launch than to run."""
    activation_checkpointing: bool = False
    """Compute each block's activations again in the backward pass instead of keeping them: less memory, a third more work."""

    def __post_init__(self) -> None:
        # The command line checks this itself; a config file may still say true or false, as it once was.
        _require(
            self.compile in ("none", "model", "blocks"), f"model.compile is {self.compile!r}: use none, model (all of it) or blocks"
        )
        _require(
            not self.cuda_graphs or self.compile == "model",
            f"model.cuda_graphs is true with model.compile {self.compile}: the compiler records the graphs, so set "
            "model.compile model",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """LAMB (You et al., arXiv 1904.00962), timm's implementation."""

    lr: float
    """Peak learning rate."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    bias_correction: bool = True
    """Correct the moments for their start at zero."""
    exclude_vectors: bool = True
    """No weight decay and no trust ratio on biases, norms and other vectors. False: both on all parameters."""
    clip_grad_norm: float | None = 1.0
    """Largest global 2-norm of the gradient; None does not clip."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"optimizer.lr is {self.lr}: use a number over 0")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay is {self.weight_decay}: use 0 or more")
        _require(all(0 <= b < 1 for b in self.betas), f"optimizer.betas is {self.betas}: each must be from 0 to under 1")
        _require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"optimizer.clip_grad_norm is {self.clip_grad_norm}: use a norm over 0, or None for no clipping",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warmup, then linear decay to 0 at the end of run.epochs."""

    warmup_epochs: float
    step_every: Literal["step", "epoch"] = "step"
    """Whether the rate moves at every optimizer step or only when an epoch begins."""

    def __post_init__(self) -> None:
        _require(self.warmup_epochs >= 0, f"schedule.warmup_epochs is {self.warmup_epochs}: use 0 or more")
        _require(
            self.step_every == "step" or float(self.warmup_epochs).is_integer(),
            f"schedule.warmup_epochs is {self.warmup_epochs}: with schedule.step_every epoch it must be a whole number",
        )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    global_batch: int
    """Images an optimizer step, over all ranks and all accumulated micro-batches."""
    micro_batch: int
    """Images of one forward and backward pass on one rank."""

    def __post_init__(self) -> None:
        _require(self.micro_batch >= 1, f"batch.micro_batch is {self.micro_batch}: use at least 1")
        _require(
            self.global_batch >= 1 and self.global_batch % self.micro_batch == 0,
            f"batch.global_batch {self.global_batch} is not a multiple of batch.micro_batch {self.micro_batch}; "
            f"use {max(1, round(self.global_batch / self.micro_batch)) * self.micro_batch}",
        )

    def accumulation(self, data_parallel_size: int) -> int:
        """Micro-batches that each of `data_parallel_size` ranks accumulates in a step.

        Raises:
            ConfigError: the global batch does not divide.
        """
        images = self.micro_batch * data_parallel_size
        _require(
            self.global_batch % images == 0,
            f"batch.global_batch {self.global_batch} is not divisible by batch.micro_batch {self.micro_batch} x "
            f"{data_parallel_size} ranks = {images}; use a multiple of {images}, or another micro_batch or number of ranks",
        )
        return self.global_batch // images


@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    alpha: float = 0.0
    """Lambda is drawn from Beta(alpha, alpha). 0 turns Mixup off."""
    per_image: bool = False
    """One lambda an image instead of one a micro-batch."""

    def __post_init__(self) -> None:
        _require(self.alpha >= 0, f"mixup.alpha is {self.alpha}: use 0 or more")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 are autocast over float32 weights, fp16 with a gradient scaler. fp64 shows what is rounding."""
    initial_scale: float = 65536.0
    """First loss scale of fp16."""
    growth_interval: int = 2000
    """Steps without an overflow after which fp16's loss scale doubles."""
    tf32: bool = True
    """On GPUs that have TensorFloat-32 compute float32 matrix products and convolutions in it: 10 bits of mantissa instead of
    23, sums in float32. Deterministic, but set it to false to compare with a CPU."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    bucket_mb: int = 25
    """Gradients are exchanged in buckets of this size, while the last backward pass of the step still runs."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters in the same order, so that it need not look each time."""
    exchange_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 halves what the ranks send. Each still accumulates in float32, but the mean is off by its rounding (0.3 % on 2 ranks,
    0.43 % on 4), another for each number of ranks; resuming on the same number stays bit-identical."""
    timeout_s: float = 600
    """A rank that others wait for longer than this ends the run."""

    def __post_init__(self) -> None:
        _require(self.bucket_mb >= 1, f"parallel.bucket_mb is {self.bucket_mb}: use at least 1")
        _require(self.timeout_s > 0, f"parallel.timeout_s is {self.timeout_s}: use a number of seconds over 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str
    """Run directory: config, metrics, checkpoints and what the hooks write."""
    epochs: float
    """Passes over the training split. The schedule spans them, rounded up to whole steps."""
    max_steps: int | None = None
    """Stop after this many steps; the schedule stays that of run.epochs."""
    eval_every_epochs: float | None = 1.0
    """Evaluate at the first step after each such span, and at the end. None: only at the end."""
    checkpoint_every_steps: int | None = None
    """Save after each such number of steps, and at the end. None: after each epoch."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_best_checkpoints: int = 1
    """Checkpoints with the best top-1 that are kept besides. A new best evaluation is always saved."""
    max_seconds: float | None = None
    """Save and stop with exit status 75 after this much wall-clock time. None: only for a signal or a Slurm job's end."""
    resume: str = "auto"
    """auto: go on from the newest whole checkpoint in run.dir, if any. never: start at step 0 in an empty run.dir. Or the path
    of a checkpoint: another run's is where this run begins, one of this run's own is gone back to."""
    accept_changed_recipe: bool = False
    """Go on although the config's recipe or the dataset is not that of the checkpoint; what changed is named."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: a GPU where there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication between ranks. auto: nccl on GPUs, gloo on CPUs."""
    deterministic: bool = False
    """Deterministic kernels: bit-identical resumes on GPUs too, at a cost in speed."""
    published_top1: float | None = None
    """Accuracy that the recipe's source published, a fraction: a line in the report to compare with."""
    max_nonfinite_steps: int = 50
    """So many steps in a row with a loss or gradient that is not finite end the run. FP16 needs about 10 to find its scale."""

    def __post_init__(self) -> None:
        _require(self.epochs > 0, f"run.epochs is {self.epochs}: use a number over 0")
        _require(self.max_steps is None or self.max_steps >= 1, f"run.max_steps is {self.max_steps}: use at least 1, or None")
        _require(
            self.eval_every_epochs is None or self.eval_every_epochs > 0,
            f"run.eval_every_epochs is {self.eval_every_epochs}: use a number over 0, or None to evaluate only at the end",
        )
        _require(
            self.checkpoint_every_steps is None or self.checkpoint_every_steps >= 1,
            f"run.checkpoint_every_steps is {self.checkpoint_every_steps}: use at least 1, or None for once an epoch",
        )
        _require(self.keep_checkpoints >= 1, f"run.keep_checkpoints is {self.keep_checkpoints}: use at least 1")
        _require(self.keep_best_checkpoints >= 1, f"run.keep_best_checkpoints is {self.keep_best_checkpoints}: use at least 1")
        _require(
            self.max_seconds is None or self.max_seconds > 0,
            f"run.max_seconds is {self.max_seconds}: use a number of seconds over 0, or None for no limit",
        )
        _require(self.max_nonfinite_steps >= 1, f"run.max_nonfinite_steps is {self.max_nonfinite_steps}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    log_every_steps: int = 10
    """Steps between two lines on the console and in metrics.jsonl; the host reads the loss only then."""
    trace_samples: bool = False
    """Write samples.rank{r}.jsonl: which images each micro-batch had."""
    detail_every_steps: int | None = 50
    """Steps between two looks at every layer: LAMB's trust ratios, and gradient histograms if they are on. None: never."""
    sample_images: int = 16
    """Images of the first step that are kept as the network sees them. 0: none."""
    predictions: int = 320
    """Validation images in the table of predictions; with it come confused classes and accuracy by class. 0: no tables."""
    profile: tuple[int, int] | None = None
    """First and last step of a torch profiler trace, counted from 1."""
    tensorboard: bool = False
    """Write TensorBoard event files to run.dir/tensorboard."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Record with Weights & Biases; the key comes from WANDB_API_KEY or `wandb login`."""
    wandb_project: str = "dali-train"
    wandb_entity: str | None = None
    mlflow: str | None = None
    """Record with MLflow: the URI of a tracking server or database, or a directory."""
    mlflow_experiment: str = "dali-train"
    gradient_histograms: bool = False
    """Histograms of each layer's gradient in TensorBoard and W&B, every detail_every_steps."""
    model_graph: bool = False
    """The model's graph in TensorBoard."""
    user: tuple[Callable[[], Any], ...] = ()
    """Hooks of your own: subclasses of dali_train.hooks.Hook, or functions that make one. Every rank makes its own."""

    def __post_init__(self) -> None:
        _require(self.log_every_steps >= 1, f"hooks.log_every_steps is {self.log_every_steps}: use at least 1")
        _require(
            self.detail_every_steps is None or self.detail_every_steps >= 1,
            f"hooks.detail_every_steps is {self.detail_every_steps}: use at least 1, or None",
        )
        _require(self.sample_images >= 0, f"hooks.sample_images is {self.sample_images}: use a number from 0 on")
        _require(self.predictions >= 0, f"hooks.predictions is {self.predictions}: use a number from 0 on")
        _require(
            self.profile is None or 1 <= self.profile[0] <= self.profile[1],
            f"hooks.profile is {self.profile}: use a first step from 1 on and a last step that is not before it",
        )
        _require(
            not self.gradient_histograms or self.tensorboard or self.wandb != "disabled",
            "hooks.gradient_histograms needs a place to go: set hooks.tensorboard true or hooks.wandb offline",
        )
        _require(not self.model_graph or self.tensorboard, "hooks.model_graph needs a place to go: set hooks.tensorboard true")
        for hook in self.user:
            _require(
                callable(hook), f"hooks.user has {hook!r}: name the class or a function that makes the hook, not a hook itself"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    batch: BatchConfig
    run: RunConfig
    mixup: MixupConfig = MixupConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    hooks: HooksConfig = HooksConfig()

    def __post_init__(self) -> None:
        _require(
            self.schedule.warmup_epochs <= self.run.epochs,
            f"schedule.warmup_epochs {self.schedule.warmup_epochs} exceeds run.epochs {self.run.epochs}: shorten the warmup",
        )
        _require(
            self.mixup.alpha == 0 or self.batch.micro_batch > 1,
            f"mixup.alpha is {self.mixup.alpha} with batch.micro_batch 1: partners are found within a micro-batch, "
            "so use at least 2 images or mixup.alpha 0",
        )
        _require(
            self.data.reader != "stream" or not self.hooks.trace_samples,
            "hooks.trace_samples is true with data.reader stream, which does not know the numbers of its images: "
            "set hooks.trace_samples false, or data.reader index",
        )
        _require(
            self.precision.dtype != "fp64" or self.run.device != "cuda",
            "precision.dtype fp64 is for checks on the CPU: set run.device cpu",
        )
        _require(
            not self.model.cuda_graphs or self.run.device != "cpu",
            "model.cuda_graphs is true with run.device cpu: CUDA graphs need a GPU, set model.cuda_graphs false",
        )

    def steps(self, epochs: float, num_images: int) -> int:
        """Optimizer steps that `epochs` passes over `num_images` take, rounded up so that the last pass is whole."""
        return math.ceil(epochs * num_images / self.batch.global_batch - 1e-9)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=_callable_name) + "\n"


def _callable_name(value: Any) -> str:
    """What stands in JSON for a user's hook."""
    return str(getattr(value, "__qualname__", value))


def load_config(path: Path | str) -> Config:
    """The ``config`` that a Python file defines. The file is run: use your own.

    Raises:
        ConfigError: no such file, or it defines no Config named ``config``.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"--config {path}: there is no such file; the recipes are in configs/")
    # By path, not by module name: names like vit-b16.py are no identifiers.
    spec = importlib.util.spec_from_file_location(f"dali_train_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = vars(module).get("config")
    if not isinstance(config, Config):
        raise ConfigError(f"--config {path}: the file must define `config = Config(...)`, found {config!r}")
    return config
