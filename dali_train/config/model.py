"""The network."""

from dataclasses import dataclass, field
from typing import Any, Literal

from dali_train.config.check import NotInRecipe, require, section


@section("model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str
    """A timm model; `python -c "import timm; print(timm.list_models())"` lists them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of timm.create_model, e.g. drop rates. The number of classes is the dataset's. On the command line each
    is a setting: --model.kwargs.drop_path_rate 0.1 sets it, --model.kwargs.drop_path_rate none removes it."""
    weights: str | None = None
    """Pretrained weights: a file (.safetensors, or .pth, .bin and the like, from which only tensors are read), a run
    directory or one of its checkpoints (the moving average of the weights, if there is one), or, if a hub can be
    reached, a timm name with its tag. If the number of classes differs, the classifier is initialised from scratch; if
    the resolution differs, position embeddings are resampled. None: random weights."""
    freeze: tuple[str, ...] = ()
    """Names of weights that are not trained, where * matches anything: patch_embed.* blocks.0.*; or all-but-head, which
    trains only the classifier (a linear probe). BatchNorms without trained weights keep their running statistics and
    normalise with them."""
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
