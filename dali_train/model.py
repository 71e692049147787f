"""The network: any model that timm knows, with the same first weights on every rank."""

import difflib
from collections import defaultdict

import timm
import torch
from torch import nn

from dali_train.config import Config, ConfigError, ModelConfig
from dali_train.data.draws import Purpose, torch_seed


def build_model(config: Config, num_classes: int, device: torch.device) -> nn.Module:
    """The model on `device` in float32 (float64 with precision.dtype fp64), initialised from data.seed.

    On the meta device it is not compiled: nothing runs there.

    Raises:
        ConfigError: timm does not know the name, the model refuses the arguments, or cannot do what is asked of it.
    """
    name = config.model.name
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ConfigError(
            f"model.name is {name!r}, which timm does not know; "
            + (f"close: {', '.join(close)}" if close else "see timm.list_models()")
        )
    torch.manual_seed(torch_seed(config.data.seed, Purpose.INITIALISATION))
    try:
        with torch.device("meta" if device.type == "meta" else "cpu"):  # drawn on the CPU: the same on every kind of GPU
            model = timm.create_model(name, num_classes=num_classes, **config.model.kwargs)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"model.kwargs {config.model.kwargs} do not fit model.name {name}: {error}") from error
    model.to(
        device=device,
        dtype=torch.float64 if config.precision.dtype == "fp64" else torch.float32,
        memory_format=torch.channels_last if config.model.channels_last else torch.preserve_format,
    )
    if config.model.activation_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ConfigError(
                f"model.activation_checkpointing is true, but timm's {name} has none: set it to false, and use a smaller "
                "batch.micro_batch if memory is short"
            ) from error
    if device.type != "meta":
        _compile(model, config.model, device)
    return model


def _compile(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """In place, so that the weights keep their names; the compiler itself starts at the first call."""
    if config.cuda_graphs and device.type != "cuda":
        raise ConfigError("model.cuda_graphs is true, but the model runs on a CPU: CUDA graphs need a GPU, set it to false")
    if config.compile == "model":
        model.compile(mode="reduce-overhead" if config.cuda_graphs else None)
    elif config.compile == "blocks":
        blocks = repeated_blocks(model)
        if not blocks:
            raise ConfigError(
                f"model.compile is blocks, but {config.name} is not made of blocks that repeat: set model.compile model to compile "
                "all of it"
            )
        # Blocks share a cache. Those that differ in a number, such as stochastic depth's rate, need an entry each, for
        # training and for evaluation, with a full batch and with the last one; beyond the limit a block stays as it was.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
        for block in blocks:
            block.compile()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that the model consists of, such as a transformer's layers; empty if it is not made of such.

    They are found by structure: of all classes that stand side by side in an nn.Sequential or nn.ModuleList and together
    hold at least half of the weights, the one with the most instances. So it is blocks, not the stages around them.
    """
    kinds: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for container in model.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for child in container.children():
                if not isinstance(child, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
                    kinds[type(child)].append(child)
    half = sum(p.numel() for p in model.parameters()) / 2
    candidates = [
        blocks for blocks in kinds.values() if len(blocks) > 1 and sum(p.numel() for b in blocks for p in b.parameters()) >= half
    ]
    return max(candidates, key=len, default=[])
