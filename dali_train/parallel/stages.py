"""The stages of a pipeline: the blocks of a vision transformer in each stage, and the pipeline's costs.

Weights keep timm's names, so checkpoints, hooks and optimizers need not know of stages. The first stage also has the
patch embedding, the last one the head.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from dali_train.config import Config, ParallelConfig
from dali_train.errors import ConfigError
from dali_train.text import plural

_HEAD = ("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Stage number `index` of `num_stages`, with the blocks of these numbers."""

    index: int
    num_stages: int
    blocks: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def describe(self) -> str:
        ends = [name for name, present in (("patch embedding", self.is_first), ("head", self.is_last)) if present]
        blocks = f"block {self.blocks[0]}" if len(self.blocks) == 1 else f"blocks {self.blocks[0]} to {self.blocks[-1]}"
        return ", ".join([*ends[:1], blocks, *ends[1:]]) if self.is_first else ", ".join([blocks, *ends])


def make_stages(model: nn.Module, parallel: ParallelConfig) -> list[Stage]:
    """Return all stages of `model`, in order, with equally many blocks, or one more in the first stages if these do not
    divide evenly. Rank r of a pipeline with P ranks has stages r, r + P, ...

    Raises:
        ConfigError: the model is not a vision transformer that can be split, or has too few blocks.
    """
    if (
        not isinstance(model, VisionTransformer)
        or type(model).forward_features is not VisionTransformer.forward_features
    ):
        raise ConfigError(
            f"parallel.pipeline is {parallel.pipeline}, but the model is timm's {type(model).__name__}, which cannot "
            "be split into stages: choose a VisionTransformer, such as vit_base_patch16_224, or set "
            "parallel.pipeline 1"
        )
    num_blocks = len(model.blocks)
    num_stages = parallel.num_stages
    if num_stages > num_blocks:
        raise ConfigError(
            f"parallel.pipeline {parallel.pipeline} x parallel.num_chunks {parallel.num_chunks} = {num_stages} "
            f"stages, but the model has {num_blocks} blocks: use at most {num_blocks} stages"
        )
    size, larger = divmod(num_blocks, num_stages)
    starts = [index * size + min(index, larger) for index in range(num_stages + 1)]
    return [
        Stage(index=index, num_stages=num_stages, blocks=range(start, end))
        for index, (start, end) in enumerate(pairwise(starts))
    ]


def check_micro_batches(parallel: ParallelConfig, grad_accum_steps: int) -> None:
    """Check that a step has as many micro-batches as the pipeline needs.

    Raises:
        ConfigError: too few micro-batches per rank and step for the pipeline, or a number that its schedule cannot
            divide.
    """
    pipeline = parallel.pipeline
    if grad_accum_steps < pipeline:
        raise ConfigError(
            f"parallel.pipeline is {pipeline}, but a step has {plural(grad_accum_steps, 'micro-batch')} per "
            f"data-parallel rank, fewer than the pipeline has ranks: use at least {pipeline} micro-batches, by a "
            "larger batch.global_batch, a smaller batch.micro_batch or fewer ranks"
        )
    rounds = max(1, grad_accum_steps // pipeline)
    if parallel.schedule == "interleaved" and grad_accum_steps % rounds:
        raise ConfigError(
            f"parallel.num_chunks is {parallel.num_chunks}, but the {grad_accum_steps} micro-batches of a step per "
            f"data-parallel rank do not divide into {rounds} rounds of the {pipeline} ranks in the pipeline: use a "
            f"multiple of {pipeline}, such as {rounds * pipeline}, or parallel.num_chunks 1"
        )


def bubble(parallel: ParallelConfig, grad_accum_steps: int) -> float:
    """Return the pipeline bubble: the fraction of a step in which a rank is idle, assuming equal stages and instant
    communication."""
    idle = parallel.pipeline - 1
    return idle / (grad_accum_steps * parallel.num_chunks + idle)


def in_flight(parallel: ParallelConfig, pipeline_rank: int, grad_accum_steps: int) -> int:
    """Return the maximum number of micro-batches whose activations a rank holds, counted once per stage."""
    later = parallel.pipeline - 1 - pipeline_rank
    if parallel.schedule == "1f1b":
        return min(grad_accum_steps, later + 1)
    return min(grad_accum_steps * parallel.num_chunks, (parallel.num_chunks - 1) * parallel.pipeline + 2 * later + 1)


class VitStage(nn.Module):
    """One stage of a VisionTransformer, made of its layers, which keep timm's names.

    It maps images, or the tokens (n, tokens, width) of the previous stage, to tokens of `dtype`, or in the last stage
    to logits.

    Raises:
        ConfigError: the stage has no trained parameters.
    """

    blocks: nn.Sequential
    norm: nn.Module
    forward_head: Callable[[torch.Tensor], torch.Tensor]
    no_weight_decay: Callable[[], Any]

    def __init__(self, model: nn.Module, stage: Stage, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage, self.dtype = stage, dtype
        # Attributes and methods that the embedding and the head use.
        for name, value in vars(model).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name in ("_pos_embed", "pool", "forward_head", "no_weight_decay"):
            setattr(self, name, MethodType(getattr(model, name).__func__, self))

        def if_in_stage(name: str, value: Any) -> Any:
            return value if (stage.is_last if name in _HEAD else stage.is_first) else None

        for name, layer in model._modules.items():
            self.register_module(name, if_in_stage(name, layer))
        for name, parameter in model._parameters.items():
            self.register_parameter(name, if_in_stage(name, parameter))
        blocks: dict[str, Any] = dict(model.get_submodule("blocks").named_children())
        self.blocks = nn.Sequential(OrderedDict((str(number), blocks[str(number)]) for number in stage.blocks))
        self.train(model.training)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ConfigError(
                f"model.freeze leaves nothing to train in stage {stage.index} of {stage.num_stages} "
                f"({stage.describe()}): freeze fewer weights, or use fewer stages"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage.is_first:
            x = embed(self, x)
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        if not self.stage.is_last:
            # Sending needs contiguous memory. Without a class token, the tokens are a transposed view of the embedding.
            return x.to(self.dtype).contiguous()
        return self.forward_head(self.norm(x))


def embed(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the tokens (n, tokens, width) of the first block, as in the model's own forward pass."""
    tokens: torch.Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    return tokens


def merge_stages(stages: Sequence[VitStage]) -> nn.Module:
    """Return all `stages` of a rank as one module that has their weights under timm's names and is never called."""
    if len(stages) == 1:
        return stages[0]
    merged = nn.Module()
    merged.blocks = nn.Sequential()
    merged.no_weight_decay = stages[0].no_weight_decay  # type: ignore[assignment]  # a method, not a layer
    for stage in stages:
        for name, parameter in stage.named_parameters(recurse=False):
            merged.register_parameter(name, parameter)
        for name, layer in stage.named_children():
            if name != "blocks":
                merged.add_module(name, layer)
        for name, block in stage.blocks.named_children():
            merged.blocks.add_module(name, block)
    return merged


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """Shape (tokens, width) per image and dtype of the activations sent between stages."""

    training: tuple[int, int]  # fewer tokens where some are dropped
    evaluation: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def from_model(cls, model: nn.Module, config: Config) -> "StageActivations":
        """Return the activations of a complete model.

        Raises:
            ConfigError: see `make_stages`.
        """
        make_stages(model, config.parallel)
        training = _token_shape(model.train(), config.data.train_size)
        evaluation = _token_shape(model.eval(), config.data.eval_size)
        model.train()
        return cls(training=training, evaluation=evaluation, dtype=_dtype(config))


@torch.no_grad()
def _token_shape(model: nn.Module, image_size: int) -> tuple[int, int]:
    parameter = next(model.parameters())
    _, tokens, width = embed(
        model, torch.zeros(1, 3, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
    ).shape
    return tokens, width


def _dtype(config: Config) -> torch.dtype:
    """Return the residual stream's dtype: float32 under autocast, unless model.fast_norm is set."""
    if config.precision.dtype == "fp64":
        return torch.float64
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    stays_half = config.model.fast_norm and config.precision.autocast
    return half.get(config.precision.dtype, torch.float32) if stays_half else torch.float32
