"""One part of every kind that docs/extending.md names, each in its one place, and a config that trains with most of
them. What a user would write outside of the package: `dali-train` takes it as ``--config``, and as a script it is
dali-train with one more dataset."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from nvidia.dali import fn
from timm.models import build_model_with_cfg, register_model

import dali_train
from dali_train.cli import main
from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    HooksConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from dali_train.data.convert.datasets import DATASETS, Converter
from dali_train.data.convert.sources import PixelSource, Sources
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import STORAGES, MappedFiles
from dali_train.data.loading.augment import OPERATORS, Operator, none
from dali_train.extras.trackers import Tracker
from dali_train.hooks import Hook, RunEnd, RunStart
from dali_train.hooks.hook_list import TRACKERS
from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import Parallel, parallelize
from dali_train.training import build
from dali_train.training.loss import LOSSES
from dali_train.training.optim import GRADIENT_TRANSFORMS
from dali_train.training.schedule import SCHEDULES

flipped: list[torch.Size] = []


def upside_down(image: torch.Tensor, _: float) -> torch.Tensor:
    flipped.append(image.shape)
    return image.flip(-2)


OPERATORS["UpsideDown"] = Operator(none, upside_down, lambda images, _: fn.flip(images, horizontal=0, vertical=1))


class Descent(torch.optim.Optimizer):
    """Steps along the gradient, with a count of them."""

    def __init__(self, params: object, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


dali_train.register_optimizer("descent", Descent)


class Patches(torch.nn.Module):
    """The mean of all patches of 8 pixels, after one layer."""

    def __init__(self, num_classes: int = 1000, in_chans: int = 3, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, 32
        self.patches = torch.nn.Conv2d(in_chans, 32, 8, stride=8)
        self.drop = torch.nn.Dropout(drop_rate)
        self.head = torch.nn.Linear(32, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.patches(images).relu()).mean(dim=(2, 3)))
        return logits


@register_model
def patches(pretrained: bool = False, **kwargs: Any) -> Patches:
    model: Patches = build_model_with_cfg(Patches, "patches", pretrained, **kwargs)
    return model


SCHEDULES["half"] = lambda settings, peak, span: peak / 2
LOSSES["three"] = lambda config, logits, targets, lambdas: ((logits - 3) ** 2).mean()


def centralise(parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
    """Let the gradients of an output's weights have the mean 0 (Yong et al., arXiv 2004.01461)."""
    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.grad -= parameter.grad.flatten(1).mean(1).reshape(-1, *[1] * (parameter.ndim - 1))


GRADIENT_TRANSFORMS["centralised"] = lambda optimizer, bound, cfg: centralise


class Flipped(Hook):
    def measure(self) -> dict[str, float]:
        return {"num_flipped": float(len(flipped))}


class OneFile(Tracker):
    def start(self, record: RunStart) -> None:
        super().start(record)
        self.scalars: dict[str, list[float]] = {}

    def log_scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.scalars.setdefault(name, []).append(value)

    def log_image(self, step: int, name: str, pixels: np.ndarray) -> None:
        assert pixels.ndim == 3

    def end(self, record: RunEnd) -> None:
        (self.run.directory / "tracked.json").write_text(json.dumps(self.scalars))


TRACKERS["one-file"] = OneFile


class Counted(MappedFiles):
    """Files, with a line in counted.txt for each that is opened."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        with (Path(split.root) / "counted.txt").open("a") as file:
            file.write(f"{split.name}\n")


STORAGES["counted"] = lambda split, *_: Counted(split)


def stripes(options: Namespace) -> Sources:
    """Images of 36 pixels with horizontal or vertical stripes."""
    pixels = np.zeros((options.images, 36, 36), np.uint8)
    pixels[::2, ::4], pixels[1::2, :, ::4] = 255, 255
    labels = np.arange(options.images, dtype=np.int32) % 2
    source = PixelSource(pixels, labels, title="stripes").images()
    return {"train": source, "validation": source}, ["horizontal", "vertical"]


DATASETS["stripes"] = Converter(
    help="Stripes in two directions.", load=stripes, arguments={"--images": {"type": int, "default": 50}}
)


class AllReduced(Parallel):
    """Data parallelism without DDP: the mean over the ranks, gradient by gradient, at the end of a step."""

    def finish_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.layout.data_size


def parallelize_by_hand(model: torch.nn.Module, layout: Layout, *others: Any, **options: Any) -> Parallel:
    if layout.data_size == 1:
        return parallelize(model, layout, *others, **options)
    print("gradients are averaged by hand")
    return AllReduced(model, layout, sum(parameter.numel() for parameter in model.parameters()))


build.parallelize = parallelize_by_hand

config = Config(
    data=DataConfig(root="counted://stripes", train_size=32, eval_size=32, eval_resize_to=36, num_threads=1),
    model=ModelConfig(name="patches", kwargs={"drop_rate": 0.1}),
    optimizer=OptimizerConfig(name="descent", lr=1e-2, clip_mode="centralised"),
    schedule=ScheduleConfig(name="half"),
    loss=LossConfig(name="three"),
    batch=BatchConfig(global_batch=32, micro_batch=4),
    run=RunConfig(dir="run", epochs=2),
    hooks=HooksConfig(user=(Flipped,), trackers=("one-file",), log_every_steps=1, trace_samples=True),
).replace({"data.augment": "rand-n1-p1-tUpsideDown"})

if __name__ == "__main__":
    sys.exit(main())
