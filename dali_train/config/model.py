"""The network."""

from dataclasses import dataclass, field
from typing import Any, Literal

from dali_train.config.check import NotInRecipe, refuse, require, section


@section("model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str
    """A timm model; `python -c "import timm; print(timm.list_models())"` lists them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to timm.create_model, e.g. drop rates. The number of classes is the dataset's. On the command line each is
    a setting of its own: --model.kwargs.drop_path_rate 0.1 sets it, --model.kwargs.drop_path_rate none removes it."""
    weights: str | None = None
    """Pretrained weights: a file (.safetensors, or .pth, .bin and the like, of which torch.load reads tensors alone), a
    run directory or one of its checkpoints (the moving average of the weights where there is one), or where a hub can
    be reached a timm name with its tag. A classifier for other classes is initialised anew, position embeddings are
    fitted to another resolution. None: random."""
    freeze: tuple[str, ...] = ()
    """Names of weights that are not trained, with * for anything: patch_embed.* blocks.0.*; or all-but-head, which
    trains the classifier alone (a linear probe). BatchNorms without trained weights keep their running statistics and
    normalise with them."""
    channels_last: NotInRecipe[bool] = False
    """Memory format of weights and images; convolutional models on GPUs are faster with it."""
    compile: NotInRecipe[Literal["auto", "none", "model", "blocks"]] = "auto"
    """torch.compile. model: all of it. blocks: each repeated block; identical blocks share the code, so the first step
    comes sooner. auto: blocks on a GPU if the model has any, and not compiled, with a warning, if the compiler fails;
    none on a CPU, and where parallel divides the model among ranks.
    Dropout masks differ from those without it, but are still a function of the micro-batch."""
    attention: NotInRecipe[Literal["auto", "cudnn", "flash", "efficient", "math"]] = "auto"
    """Which attention kernel is tried first. auto: torch's own order. With run.deterministic a kernel that is not
    deterministic is passed over."""
    fast_norm: bool = False
    """With precision.dtype bf16 or fp16, keep the residual stream in that format and normalise in it. Less memory
    traffic, other
    rounding: part of the recipe. Without it both are float32, as autocast has it."""
    cuda_graphs: NotInRecipe[bool] = False
    """Record the compiled model's kernels once and replay them: for models whose kernels take longer to launch than to
    run."""
    activation_checkpointing: NotInRecipe[bool | Literal["selective"]] = False
    """Compute each block's activations again in the backward pass instead of keeping them: less memory, a third more
    work.
    selective: keep the results of matrix products and attention, and compute only the cheap rest again."""

    def __post_init__(self) -> None:
        require(
            "num_classes" not in self.kwargs,
            f"model.kwargs has num_classes {self.kwargs.get('num_classes')}: leave it out, the dataset decides it",
        )
        remedy = "the compiler records the graphs, so set model.compile model"
        refuse(self.cuda_graphs and self.compile != "model", self, "cuda_graphs compile", remedy)
