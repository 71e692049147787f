"""The network: any timm model, with the same initial weights on every rank.

`build_model` makes it from the config; below it, in this order: normalisation in half precision, attention kernels,
compilation (with stochastic depth that compiles once), recomputed activations, position embeddings for other sizes,
checks of image sizes, what a model says of itself, and initial weights that are the same on every machine.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath, PatchEmbed, is_fast_norm, resample_abs_pos_embed, set_fast_norm
from timm.models.vision_transformer import LayerScale
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dali_train.config import Config, ModelConfig
from dali_train.config.check import require
from dali_train.data.sampling.rng import Purpose, inverse_erf, normal_weights, torch_seed, uniform_weights
from dali_train.errors import ConfigError
from dali_train.training.model_arguments import (
    argument_names,
    build_on_meta,
    check_host_memory,
    check_name,
    is_timms,
)
from dali_train.training.pretrained import create_pretrained, freeze, initialise_classifier
from dali_train.training.weight_files import Tensors

logger = logging.getLogger("dali_train")

_RESAMPLE = resample_abs_pos_embed.__name__
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_torchs_order: list[int] = []  # torch's own order of attention kernels, while another one is in force
_aten = torch.ops.aten
# Most of a block's arithmetic and about a third of its activations. Everything else is cheap to compute again.
_KEPT_RESULTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def build_model(
    config: Config,
    num_classes: int,
    device: torch.device,
    *,
    with_weights: bool = False,
    tensors: Tensors | None = None,
    keep_classifier: bool = False,
    on_host: bool = False,
) -> nn.Module:
    """Return the model on `device` in float32 (float64 with precision.dtype fp64), initialised from data.seed.

    On the meta device it is not compiled.

    Args:
        on_host: leave the weights in host memory, to be sharded over the devices of several ranks.
        with_weights: start from model.weights; not needed if a checkpoint replaces them.
        tensors, keep_classifier: for model.weights, see `create_pretrained`.

    Raises:
        ConfigError: timm does not know the name, the model cannot be built with the arguments or does not fit into
            memory, or it does not support a setting.
    """
    name = config.model.name
    check_name(name, "model.name")
    on_meta = build_on_meta(name, num_classes, config.model.kwargs)
    if device.type != "meta":
        check_host_memory(on_meta, name, config.model.kwargs)
    # On the meta device autocast cannot be queried for its dtype (torch 2.11 raises), and there is nothing to gain.
    fast_norm = config.model.fast_norm and device.type != "meta"
    # Drawn on the CPU: the same on every kind of GPU.
    kind = "meta" if device.type == "meta" else "cpu"
    is_new = False
    with initialising(config.model, config.data.seed), torch.device(kind), _normalising(fast=fast_norm):
        if with_weights and config.model.weights is not None:
            model, is_new = create_pretrained(
                name,
                config.model.weights,
                num_classes,
                config.model.kwargs,
                field="model.weights",
                keep_classifier=keep_classifier,
                tensors=tensors,
            )
        elif device.type == "meta":
            model = on_meta
        else:
            model = timm.create_model(name, num_classes=num_classes, **config.model.kwargs)
    scale = config.model.head_scale
    if scale is None:
        scale = 0.0 if is_new else 1.0
    initialise_classifier(model, scale=scale, bias=config.model.head_bias)
    if config.model.constant_drop_path:
        make_drop_path_constant(repeated_blocks(model), config.model.kwargs["drop_path_rate"])
    model.to(
        device="cpu" if on_host else device,
        dtype=torch.float64 if config.precision.dtype == "fp64" else torch.float32,
        memory_format=torch.channels_last if config.model.channels_last else torch.preserve_format,
    )
    _resample_by_products(model)
    if device.type == "cuda":
        embed_patches_by_products(model)
    if fast_norm:
        _keep_stream_in_half_precision(model)
    freeze(model, config.model.freeze)
    _recompute_activations(model, repeated_blocks(model), config.model)
    if device.type != "meta":
        _choose_attention(config.model.attention, device)
        if config.precision.autocast:
            _compile(model, config.model, device)
    return model


def make_drop_path_constant(blocks: Iterable[nn.Module], rate: float) -> None:
    """Give all `blocks` the same rate of stochastic depth; timm's grows from 0 in the first block."""
    for block in blocks:
        for name, _ in list(block.named_children()):
            if name.startswith("drop_path"):
                setattr(block, name, DropPath(rate) if rate > 0 else nn.Identity())


@contextmanager
def _normalising(*, fast: bool) -> Iterator[None]:
    """Let timm's layers created in this context normalise in half precision or not; they check only at creation."""
    before = is_fast_norm()
    set_fast_norm(fast)
    try:
        yield
    finally:
        set_fast_norm(before)


def _keep_stream_in_half_precision(model: nn.Module) -> None:
    """Under autocast, cast the residual stream to half precision before the first block, and the outputs of LayerScale.

    The class token, the position embeddings and LayerScale's factors are float32, and would promote it to float32.
    """

    def halved(x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    for block in repeated_blocks(model)[:1]:
        block.register_forward_pre_hook(lambda module, inputs: (halved(inputs[0]), *inputs[1:]))
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.register_forward_hook(lambda module, inputs, output: halved(output))


def _choose_attention(first: str, device: torch.device) -> None:
    """Put the kernel `first` at the head of torch's order for the whole process, before the compiler reads the order.

    auto: torch's own order, which depends on the GPU and on known bugs of cuDNN's kernel (pytorch/pytorch#169849).
    """
    if first == "auto" and not _torchs_order:
        return
    if device.type == "cuda":  # torch sets its own order when it is first read, and discards any earlier setting
        query = torch.empty(1, 1, 8, 64, device=device, dtype=torch.float16)
        torch._fused_sdp_choice(query, query, query)
    if not _torchs_order:
        _torchs_order.extend(torch._C._get_sdp_priority_order())
    order = _torchs_order
    if first != "auto":
        order = [_KERNELS[first].value, *(number for number in order if number != _KERNELS[first].value)]
    torch._C._set_sdp_priority_order(order)  # sdpa_kernel() can be left only in the context that entered it


def _compile(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Compile in place, so that the weights keep their names; compilation happens at the first call."""
    graphs = config.compile == "cuda-graphs"
    if graphs and device.type != "cuda":
        raise ConfigError(
            "model.compile is cuda-graphs, but the model runs on a CPU: CUDA graphs need a GPU, set model.compile model"
        )
    if config.compiles_as_a_whole:
        model.compile(mode="reduce-overhead" if graphs else None)
    elif config.compile in ("blocks", "autotune"):
        blocks = repeated_blocks(model)
        if not blocks:
            raise ConfigError(
                f"model.compile is {config.compile}, but {config.name} has no repeated blocks: set model.compile "
                "model to compile the whole model"
            )
        compile_blocks(blocks, mode="max-autotune-no-cudagraphs" if config.compile == "autotune" else None)
    elif config.compile == "auto" and device.type == "cuda" and (blocks := repeated_blocks(model)):
        logger.info(
            f"model.compile auto: {len(blocks)} blocks of {config.name} are compiled, which delays the first step"
        )
        compile_blocks(blocks, fall_back=True)


def compile_blocks(blocks: list[nn.Module], *, mode: str | None = None, fall_back: bool = False) -> None:
    """Compile the forward pass of each block in place, without hooks on the block itself, such as FSDP's.

    Args:
        mode: torch.compile's.
        fall_back: if the compiler fails for one block, run all of them uncompiled, with a warning.
    """
    # Blocks share a cache. Those that differ in a number need separate entries, for training and for evaluation, with a
    # full batch and with the last one; beyond the limit a block runs eagerly.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
    eager = [block.forward for block in blocks]
    for number, block in enumerate(blocks):
        _share_graphs(block)
        compiled = torch.compile(block.forward, mode=mode)
        block.forward = _falling_back(compiled, number, blocks, eager) if fall_back else compiled


def _falling_back(
    compiled: Callable[..., Any], number: int, blocks: list[nn.Module], eager: list[Callable[..., Any]]
) -> Callable[..., Any]:
    """Return `compiled`, of block `number`, which falls back to the `eager` forward passes if the compiler fails; it
    fails before anything runs."""

    def call(*inputs: Any, **named: Any) -> Any:
        try:
            return compiled(*inputs, **named)
        except torch._dynamo.exc.TorchDynamoException as error:
            if blocks[number].forward is not eager[number]:
                reason = str(error).strip().splitlines()[0]
                logger.warning(
                    f"model.compile auto: the compiler failed ({type(error).__name__}: {reason}); continuing without "
                    "it, which is slower. Set model.compile none to silence this, or blocks to see the full error"
                )
            for block, forward in zip(blocks, eager, strict=True):
                block.forward = forward
            return eager[number](*inputs, **named)

    return call


class TensorRateDropPath(nn.Module):
    """timm's `DropPath`: drop each sample's residual branch with probability `drop_prob` in training.

    timm's rate is a Python number, for which torch.compile makes one graph per block. The masks differ from timm's,
    which are drawn by another operator.
    """

    keep_prob: torch.Tensor  # (), float32

    def __init__(self, replaced: DropPath, device: torch.device) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = replaced.drop_prob, replaced.scale_by_keep
        self.register_buffer("keep_prob", torch.tensor(1 - replaced.drop_prob, device=device), persistent=False)
        self.train(replaced.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < self.keep_prob
        scale = kept / self.keep_prob if self.scale_by_keep else kept
        return x * scale.to(x.dtype)


def _share_graphs(block: nn.Module) -> None:
    """Replace the stochastic depth of a block by one that compiles to the same code for every rate."""
    device = next(block.parameters()).device
    for module in list(block.modules()):
        for name, child in module.named_children():
            if isinstance(child, DropPath):
                setattr(module, name, TensorRateDropPath(child, device))


def _recompute_activations(model: nn.Module, blocks: list[nn.Module], config: ModelConfig) -> None:
    """Apply model.activation_checkpointing to `model`. Call this before the model is compiled.

    Args:
        blocks: the repeated blocks of the model.

    Raises:
        ConfigError: the model does not support it.
    """
    setting = config.activation_checkpointing
    if setting == "selective":
        if not blocks:
            raise ConfigError(
                f"model.activation_checkpointing is selective, but {config.name} has no repeated blocks: set it to "
                "true or false"
            )
        for block in blocks:
            block.forward = partial(_selectively, block, block.forward)
    elif setting:
        timm_model: Any = model
        try:
            timm_model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ConfigError(
                f"model.activation_checkpointing is true, but timm's {config.name} does not support it: set it to "
                "false, and use a smaller batch.micro_batch if memory is short"
            ) from error


def _selectively(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    contexts = partial(
        create_selective_checkpoint_contexts, _KEPT_RESULTS if _draws_nothing_in_attention(block) else _KEPT_RESULTS[:3]
    )
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _draws_nothing_in_attention(block: nn.Module) -> bool:
    """Return whether attention draws no dropout, which a kept result would not redraw, shifting all later draws."""
    dropout = getattr(getattr(block, "attn", None), "attn_drop", None)
    return getattr(dropout, "p", 0) == 0


def resample_position_embedding(
    embedding: torch.Tensor,
    new_size: Sequence[int],
    old_size: Sequence[int] | None = None,
    num_prefix_tokens: int = 1,
    **options: Any,
) -> torch.Tensor:
    """Return `embedding`, (1, prefix + height * width, dim), for another grid of patches, in the same dtype.

    timm does this in each forward pass with `torch.nn.functional.interpolate`, always in float32, and CUDA has no
    deterministic backward pass for that. Interpolation is linear, so a product with the interpolated identity matrix
    gives the same values, and is deterministic. It is computed in float64: the product is small, and neither autocast
    nor TF32 rounds it.

    Args:
        new_size, old_size: (height, width) in patches.
        num_prefix_tokens: the first tokens, which stand for no patch, stay as they are.
        options: timm's, which it gives when weights are loaded, not in a forward pass; then it resamples itself.
    """
    if options or old_size is None:
        return resample_abs_pos_embed(embedding, new_size, old_size, num_prefix_tokens, **options)
    if tuple(new_size) == tuple(old_size):
        return embedding
    num_patches = old_size[0] * old_size[1]
    identity = torch.eye(num_patches, dtype=torch.float64, device=embedding.device).view(1, num_patches, *old_size)
    weights = F.interpolate(identity, size=tuple(new_size), mode="bicubic", antialias=True).flatten(2).mT
    resampled = weights @ embedding[:, num_prefix_tokens:].double()
    return torch.cat([embedding[:, :num_prefix_tokens], resampled.to(embedding.dtype)], dim=1)


def _resample_by_products(model: nn.Module) -> None:
    """Let `model`, and no other one, resample its position embeddings by `resample_position_embedding`.

    timm's ``_pos_embed`` calls the function of its own module. The model gets a copy of that method with other globals,
    without ``__name__``, by which the compiler would look the function up in timm's module again.
    """
    for module in model.modules():
        method = getattr(type(module), "_pos_embed", None)
        if not isinstance(method, FunctionType) or method.__globals__.get(_RESAMPLE) is not resample_abs_pos_embed:
            continue
        names = {name: value for name, value in method.__globals__.items() if name != "__name__"}
        names[_RESAMPLE] = resample_position_embedding
        copy = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
        module._pos_embed = MethodType(copy, module)  # type: ignore[assignment]


def embed_patches_by_products(model: nn.Module) -> None:
    """Let the patch embeddings of `model` be computed as matrix products of their patches, with the same weights.

    cuDNN's convolutions of 16 x 16 pixels take 4.9 of ViT-B/16's 72 ms on an H200; the product makes it 69 (measured,
    256 images in bf16).
    """
    for layer in (module.proj for module in model.modules() if isinstance(module, PatchEmbed)):
        if isinstance(layer, nn.Conv2d) and layer.stride == layer.kernel_size and layer.padding == (0, 0):
            layer.forward = MethodType(_embedded_patches, layer)  # type: ignore[method-assign]


def _embedded_patches(layer: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    """Return what `layer` returns, a convolution whose patches do not overlap: (n, channels, rows, columns).

    Pixels beyond the last whole patch are left out.
    """
    height, width = layer.kernel_size
    rows, columns = images.shape[2] // height, images.shape[3] // width
    whole = images[:, :, : rows * height, : columns * width]
    patches = whole.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    embedded = F.linear(patches.flatten(3).flatten(1, 2), layer.weight.flatten(1), layer.bias)
    return embedded.transpose(1, 2).unflatten(2, (rows, columns))


def check_sizes(model: nn.Module, config: Config, *, trains: bool = True, evaluates: bool = True) -> None:
    """Check that `model` accepts images of data.train_size, data.progressive and data.eval_size, by passing it a blank
    image of each in eval mode, uncompiled. On the meta device this computes nothing.

    Raises:
        ConfigError: the model does not accept images of one of these sizes, or of 3 channels.
    """
    require(
        (channels := config.model.kwargs.get("in_chans", 3)) == 3,
        f"model.kwargs has in_chans {channels}: leave it out, images have 3 channels, also grey ones",
    )
    any_size = "choose a model that takes images of any size; a ViT does with --model.kwargs.dynamic_img_size true"
    if trains:
        _check_size(model, config.model, config.data.train_size, "data.train_size")
        for _, size in config.data.progressive:
            _check_size(model, config.model, size, "a size in data.progressive", any_size)
    if evaluates and not (trains and config.data.eval_size == config.data.train_size):
        _check_size(model, config.model, config.data.eval_size, "data.eval_size")
    if trains and config.batch.micro_batch == 1:
        for size in config.data.train_sizes:
            _check_batch_norms(model, config.model, size)


def _check_batch_norms(model: nn.Module, config: ModelConfig, size: int) -> None:
    """Check that each trained BatchNorm sees several values per channel in one image, as a micro-batch of 1 needs.

    Raises:
        ConfigError: one sees a single pixel, which has no variance.
    """
    alone: list[str] = []

    def look(name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        _, num_channels, *_ = inputs[0].shape
        if inputs[0].numel() == num_channels:
            alone.append(name)

    trained = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
    hooks = [layer.register_forward_pre_hook(partial(look, name)) for name, layer in trained.items()]
    try:
        _logits_of_a_blank_image(model, size)
    finally:
        for hook in hooks:
            hook.remove()
    if alone:
        raise ConfigError(
            f"batch.micro_batch is 1, but BatchNorm {alone[0]} of model.name {config.name} sees one pixel of an image "
            f"of {size}, which has no variance: set batch.micro_batch to at least 2"
        )


def _check_size(model: nn.Module, config: ModelConfig, size: int, setting: str, remedy: str | None = None) -> None:
    try:
        output = _logits_of_a_blank_image(model, size)
    except Exception as error:
        if not isinstance(error, AssertionError | RuntimeError | ValueError) and not is_timms(model):
            raise  # a mistake in the user's own model
        own = input_size(model)
        if own is not None and own != size and _takes(model, own):
            problem = f"takes images of {own} pixels"
            advice = f"set {setting} {own}"
            if "img_size" in config.kwargs or "img_size" in argument_names(type(model)):
                advice += f", or build the model for {size} pixels with --model.kwargs.img_size {size}"
        else:
            kwargs = config.kwargs
            problem = f"{f'with model.kwargs {kwargs} ' if kwargs else ''}does not take such images"
            advice = f"choose another size{', or other values in model.kwargs' if kwargs else ''}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{setting} is {size}, but model.name {config.name} {problem} ({reason}): {remedy or advice}"
        ) from error
    num_classes = getattr(model, "num_classes", None)
    if is_timms(model) and getattr(output, "shape", None) != (1, num_classes):
        raise ConfigError(
            f"model.name {config.name} with model.kwargs {config.kwargs} returns no logits, one for each "
            "class: leave out what changes its output, such as features_only or global_pool"
        )


def _takes(model: nn.Module, size: int) -> bool:
    try:
        _logits_of_a_blank_image(model, size)
    except Exception:
        return False
    return True


def _logits_of_a_blank_image(model: nn.Module, size: int) -> Any:
    parameter = next(model.parameters())
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return model(torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype))
    finally:
        model.train(training)


def input_size(model: nn.Module) -> int | None:
    """Return the side of the images that the model is built for, in pixels; None if it has no such attribute."""
    embedding = getattr(model, "patch_embed", None)
    sizes = getattr(embedding, "img_size", None) or (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    return int(sizes[-1]) if sizes else None


def describe_parameters(model: nn.Module) -> str:
    """Return the number of parameters of `model`, and if some are frozen, the number trained."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" + (f", of which {trained:,} are trained" if trained < total else "")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, such as the layers of a transformer; empty if it has none.

    They are found by structure: among all classes whose instances are in an nn.Sequential or nn.ModuleList and together
    hold at least half of the weights, the class with the most instances. This finds the blocks, not the stages that
    contain them.
    """
    kinds: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for container in model.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for child in container.children():
                if not isinstance(child, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
                    kinds[type(child)].append(child)
    half = sum(p.numel() for p in model.parameters()) / 2
    candidates = [
        blocks
        for blocks in kinds.values()
        if len(blocks) > 1 and sum(p.numel() for b in blocks for p in b.parameters()) >= half
    ]
    return max(candidates, key=len, default=[])


_INEXACT = {_aten.linalg_qr.default}  # orthogonal matrices: LAPACK sums in another order on each processor
# For fixed position embeddings. Their last bits differ too, and those of float64 vanish when it is rounded to float32,
# but for about one number in 10**8.
_ROUNDED = {_aten.linspace.default, _aten.pow.Scalar, _aten.sin.default, _aten.cos.default}


def initialising(config: ModelConfig, seed: int) -> AbstractContextManager[Any]:
    """Return the context in which a model is created, and seed torch's generator for it.

    Args:
        seed: data.seed.
    """
    torch.manual_seed(torch_seed(seed, Purpose.INITIALISATION))
    return PortableInitialisation(seed) if config.init == "portable" else nullcontext()


class PortableInitialisation(TorchDispatchMode):
    """A context in which tensors on the CPU are filled with the random numbers of
    dali_train/data/sampling/rng.py.

    Each tensor that torch or timm fills is a draw, and draws are numbered in the order in which the model makes them.
    All of their initialisers (normal, truncated normal, uniform, Xavier's, Kaiming's and their variants) come down to
    the few operators here; truncated normals are made by the inverse of the error function. What they do with the
    numbers is scaling and clipping, which is exact.

    Raises:
        ConfigError: the model draws in another way.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_draws = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (_aten.rand.default, _aten.randn.default):
            empty = torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
            return self._fill(empty, normal=function is _aten.randn.default, bounds=(0.0, 1.0))
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):  # the meta device has no numbers
            return function(*args, **kwargs)
        if function in (_aten.normal_.default, _aten.uniform_.default):
            # (mean, standard deviation) or (low, high), as positional arguments
            bounds = (*args[1:3], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], normal=function is _aten.normal_.default, bounds=bounds)
        if function is _aten.erfinv_.default:
            return args[0].copy_(torch.from_numpy(inverse_erf(args[0].float().numpy())))
        if function in _ROUNDED:
            return _in_float64(function, args, kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags or function in _INEXACT:
            raise ConfigError(
                f"model.init is portable, but the model draws its initial weights with torch's {function}, whose "
                "result depends on the processor: set model.init torch"
            )
        return function(*args, **kwargs)

    def _fill(self, tensor: torch.Tensor, *, normal: bool, bounds: tuple[float, float]) -> torch.Tensor:
        if tensor.device.type == "cpu":
            draw = normal_weights if normal else uniform_weights
            values = draw(self._seed, self._num_draws, tensor.numel(), *bounds)
            self._num_draws += 1
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))
        return tensor


def _in_float64(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return what `function` returns, computed in float64 and then rounded."""
    wide = [argument.double() if isinstance(argument, torch.Tensor) else argument for argument in args]
    meant: torch.dtype = function(*args, **kwargs).dtype
    if function is _aten.linspace.default:
        kwargs = {**kwargs, "dtype": torch.float64}
    result: torch.Tensor = function(*wide, **kwargs).to(meant)
    return result
