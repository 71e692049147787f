"""Which part of a vision transformer each stage of a pipeline computes.

A stage is the timm model itself without the parts of other stages, so its weights keep their names: checkpoints, hooks
and optimizers need not know of stages. The first stage also has the embedding of patches, the last one the head.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Number `index` of `num_stages`, with the blocks of these numbers."""

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
    """All stages of `model`, in order.

    Raises:
        ConfigError: the model is no vision transformer that can be cut, or has other blocks than `parallel` says.
    """
    if (
        not isinstance(model, VisionTransformer)
        or type(model).forward_features is not VisionTransformer.forward_features
    ):
        raise ConfigError(
            f"parallel.pipeline is {parallel.pipeline}, but the model is timm's {type(model).__name__}, which cannot "
            "be cut between blocks here: choose a VisionTransformer, such as vit_base_patch16_224, or set "
            "parallel.pipeline 1"
        )
    num_blocks, num_stages = len(model.blocks), parallel.num_stages
    if num_stages > num_blocks:
        raise ConfigError(
            f"parallel.pipeline {parallel.pipeline} x parallel.num_chunks {parallel.num_chunks} = {num_stages} "
            f"stages, but the model has {num_blocks} blocks: use at most {num_blocks} stages"
        )
    sizes = parallel.blocks_per_stage or tuple(
        num_blocks // num_stages + (index < num_blocks % num_stages) for index in range(num_stages)
    )
    if sum(sizes) != num_blocks:
        raise ConfigError(
            f"parallel.blocks_per_stage {sizes} are {sum(sizes)} blocks, but the model has {num_blocks}: let them "
            f"add up to {num_blocks}"
        )
    starts = [sum(sizes[:index]) for index in range(num_stages)]
    return [
        Stage(index=index, num_stages=num_stages, blocks=range(start, start + size))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def stages_of_rank(stages: Sequence[Stage], pipeline_rank: int, parallel: ParallelConfig) -> list[Stage]:
    """Rank r of P has the stages r, r + P, ..."""
    return list(stages[pipeline_rank :: parallel.pipeline])


def check_micro_batches(parallel: ParallelConfig, grad_accum_steps: int) -> None:
    """
    Raises:
        ConfigError: too few micro-batches per rank and step for the pipeline, or a number that its schedule cannot
            divide.
    """
    pipeline = parallel.pipeline
    if grad_accum_steps < pipeline:
        raise ConfigError(
            f"parallel.pipeline is {pipeline}, but a step has {plural(grad_accum_steps, 'micro-batch')} per "
            f"data-parallel rank, fewer than the pipeline has ranks: use at least {pipeline}, by a larger "
            "batch.global_batch, a smaller batch.micro_batch or fewer ranks"
        )
    rounds = max(1, grad_accum_steps // pipeline)
    if parallel.schedule == "interleaved" and grad_accum_steps % rounds:
        raise ConfigError(
            f"parallel.schedule is interleaved, but the {grad_accum_steps} micro-batches of a step per data-parallel "
            f"rank do not divide into {rounds} rounds of the {pipeline} ranks in the pipeline: use a multiple of "
            f"{pipeline}, such as {rounds * pipeline}, or parallel.schedule 1f1b"
        )


def bubble(parallel: ParallelConfig, grad_accum_steps: int) -> float:
    """The share of a step in which a rank waits for others, if all stages take equally long and sending takes no
    time."""
    waiting = parallel.pipeline - 1
    return waiting / (grad_accum_steps * parallel.num_chunks + waiting)


def in_flight(parallel: ParallelConfig, pipeline_rank: int, grad_accum_steps: int) -> int:
    """The most micro-batches that are on their way through the stages of a rank, counted once for each stage."""
    later = parallel.pipeline - 1 - pipeline_rank
    if parallel.schedule == "1f1b":
        return min(grad_accum_steps, later + 1)
    return min(grad_accum_steps * parallel.num_chunks, (parallel.num_chunks - 1) * parallel.pipeline + 2 * later + 1)


def cut(model: nn.Module, stage: Stage, dtype: torch.dtype) -> nn.Module:
    """A model that shares its parts with `model`, has only those of `stage`, and computes only them.

    It maps images, or the tokens (n, tokens, width) of the stage before, to tokens of `dtype`, or in the last stage to
    logits.
    """
    part: Any = _copy(model)
    for store in ("_modules", "_parameters", "_buffers"):
        kept = {
            name: value if (stage.is_last if name in _HEAD else stage.is_first) else None
            for name, value in getattr(model, store).items()
        }
        object.__setattr__(part, store, kept)
    part.blocks = nn.Sequential()
    for number, (name, block) in enumerate(model.get_submodule("blocks").named_children()):
        if number in stage.blocks:
            part.blocks.add_module(name, block)
    part.__class__ = type(f"{type(model).__name__}Part", (_Part, type(model)), {"stage": stage, "stream_dtype": dtype})
    if not any(parameter.requires_grad for parameter in part.parameters()):
        raise ConfigError(
            f"model.freeze leaves nothing to train in stage {stage.index} of {stage.num_stages} "
            f"({stage.describe()}): freeze fewer weights, or use fewer stages"
        )
    result: nn.Module = part
    return result


def _copy(model: nn.Module) -> Any:
    """The same parts and settings, with its own place for hooks."""
    copied = copy.copy(model)
    for name, value in vars(model).items():
        if isinstance(value, dict):
            copied.__dict__[name] = value.copy()
    return copied


class _Part:
    """The forward pass of a part of a VisionTransformer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.stage.is_first:
            x = embed(self, x)
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        return self.forward_head(self.norm(x)) if self.stage.is_last else x.to(self.stream_dtype)


def embed(model: Any, images: torch.Tensor) -> torch.Tensor:
    """(n, tokens, width) of the first block, as in the model's own forward pass."""
    tokens: torch.Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    return tokens


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """All `parts` of a rank as one model, for whoever asks for names and weights: it shares them and is never
    called."""
    if len(parts) == 1:
        return parts[0]
    whole: Any = _copy(parts[0])
    for store in ("_modules", "_parameters", "_buffers"):
        names = getattr(parts[0], store)
        kept = {
            name: next((v for part in parts if (v := getattr(part, store)[name]) is not None), None) for name in names
        }
        object.__setattr__(whole, store, kept)
    whole.blocks = nn.Sequential()
    for part in parts:
        for name, block in part.get_submodule("blocks").named_children():
            whole.blocks.add_module(name, block)
    result: nn.Module = whole
    return result


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What the stages hand on for each image: (tokens, width), of one dtype."""

    training: tuple[int, int]  # fewer tokens where some are dropped
    evaluation: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, config: Config) -> "Stream":
        """Of a complete model.

        Raises:
            ConfigError: see `make_stages`.
        """
        make_stages(model, config.parallel)
        training = _token_shape(model.train(), config.data.train_size)
        evaluation = _token_shape(model.eval(), config.data.eval_size)
        model.train()
        return cls(training=training, evaluation=evaluation, dtype=_stream_dtype(config))


@torch.no_grad()
def _token_shape(model: nn.Module, image_size: int) -> tuple[int, int]:
    parameter = next(model.parameters())
    _, tokens, width = embed(
        model, torch.zeros(1, 3, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
    ).shape
    return tokens, width


def _stream_dtype(config: Config) -> torch.dtype:
    """Of the tokens between stages: autocast leaves them in float32 unless model.fast_norm says otherwise."""
    if config.precision.dtype == "fp64":
        return torch.float64
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    stays_half = config.model.fast_norm and not config.precision.pure
    return half.get(config.precision.dtype, torch.float32) if stays_half else torch.float32
