"""airbench94 on CIFAR-10: 94.01 % in 9.9 epochs, the mean of 1,000 published runs (Jordan, arXiv 2404.00498).

    dali-train data convert cifar10 --download --source downloads/cifar10 --out data/cifar10 --format raw
    python examples/airbench/airbench94.py --dataset data/cifar10 --seeds 6

The second command computes the whitening filters, trains one run per seed and prints the accuracies beside the
published one; started again, it goes on where it was. The file is also a config, for a single run:

    dali-train train --config examples/airbench/airbench94.py --run.dir runs/one --data.seed 7

Source: KellerJordan/cifar10-airbench f1c599c, legacy/airbench94.py. Its learning rate is for the sum of the losses of
1,024 images and decoupled from momentum; here it is for their mean: 11.5 / (1 + 1 / (1 - 0.85)) = 1.5. Two differences
are left: the source drops the last 848 images of every epoch, and here they are part of the next step; and the source
computes everything in float16 on a GPU, here autocast keeps the weights in float32. A run took 38 minutes on one busy
CPU core that multiplies in bfloat16 (AVX512_BF16); elsewhere use --dtype fp32.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

import dali_train
from dali_train.config import Config, DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import write_atomically

PUBLISHED = 0.9401  # n = 1,000, on CIFAR-10's original images
WIDTHS = (64, 256, 256)
NUM_FILTERS = 24  # 12 eigenvectors of 2 x 2 x 3 pixels, each with both signs


def convolution(num_in: int, num_out: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution whose first `num_in` filters pass their channel on unchanged."""
    layer = nn.Conv2d(num_in, num_out, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight[:num_in])
    return layer


def batch_norm(num_features: int) -> nn.BatchNorm2d:
    """Return a batch normalisation with a bias and no trained scale."""
    layer = nn.BatchNorm2d(num_features, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


class Group(nn.Module):
    """Two convolutions, the first of which halves the resolution."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(num_in, num_out), batch_norm(num_out)
        self.conv2, self.norm2 = convolution(num_out, num_out), batch_norm(num_out)
        self.pool, self.act = nn.MaxPool2d(2), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.pool(self.conv1(x))))
        return self.act(self.norm2(self.conv2(x)))


class Airbench94(nn.Module):
    """From images, (n, 3, 32, 32), to logits, (n, num_classes)."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, widths[-1]
        self.whiten = nn.Conv2d(in_chans, NUM_FILTERS, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        self.act, self.pool = nn.GELU(), nn.MaxPool2d(3)
        self.groups = nn.ModuleList(map(Group, (NUM_FILTERS, *widths), widths))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.whiten(x))
        for group in self.groups:
            x = group(x)
        return self.head(self.pool(x).flatten(1)) / 9


def with_initial_weights(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Complete `tensors`, which may be the whitening filters alone, by the initial weights of `model`."""
    return {**model.state_dict(), **tensors}


default_cfgs = generate_default_cfgs(
    {"airbench94": {"input_size": (3, 32, 32), "num_classes": 10, "first_conv": "whiten", "classifier": "head"}}
)


@register_model
def airbench94(pretrained: bool = False, **kwargs: Any) -> Airbench94:
    return build_model_with_cfg(
        Airbench94, "airbench94", pretrained, pretrained_filter_fn=with_initial_weights, **kwargs
    )


class WhiteningSGD(torch.optim.SGD):
    """SGD with Nesterov momentum that stops training the bias of the whitening layer after `bias_steps` steps."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.0, bias_steps: int = 3 * 48
    ) -> None:
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=True)
        self.bias_steps = bias_steps

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name == "whiten.bias" and group["num_steps"] > self.bias_steps:
                    parameter.grad = None
        return super().step(closure)


dali_train.register_optimizer("whitening-sgd", WhiteningSGD)

STEPS = 476  # 9.9 epochs of 48 steps
BATCH = 1024
LR = 11.5 / (1 + 1 / (1 - 0.85))

config = Config(
    data=dict(
        root="data/cifar10",
        train_size=32,
        crop_side=32,
        crop_padding=2,
        crop_padding_mode="reflect",
        alternating_flip=True,
        normalise=((125.307, 122.961, 113.8575), (62.985, 62.0925, 66.708)),
        eval_size=32,
        eval_resize_to=32,
        eval_views="mirrored-and-shifted",
    ),
    # Not compiled, as in the source, whose runs take four seconds each on an H200.
    model=dict(name="airbench94", weights="runs/airbench94/whitening.safetensors", channels_last=True, compile="none"),
    optimizer=dict(
        name="whitening-sgd",
        lr=LR,
        kwargs=dict(momentum=0.85),
        weight_decay=0.0153 / 11.5,
        exclude_vectors=False,
        groups=(("groups.*.norm?.bias", 64, 1 / 64),),
        clip_grad_norm=None,
    ),
    schedule=dict(name="linear", warmup_epochs=109 * BATCH / 50_000, warmup_lr=0.2 * LR, min_lr=0.07 * LR),
    ema=dict(decay=0.95**5, power=3, every_steps=5, lookahead=True),
    loss=dict(label_smoothing=0.2),
    batch=dict(global_batch=BATCH, micro_batch=BATCH),
    precision=dict(dtype="bf16"),
    run=dict(
        dir="runs/airbench94/seed-0",
        epochs=STEPS * BATCH / 50_000,
        eval_every_epochs=None,
        published_top1=PUBLISHED,
    ),
)


def whitening_filters(images: torch.Tensor, eps: float = 5e-4) -> torch.Tensor:
    """Return filters that whiten patches of 2 x 2 pixels: the eigenvectors of their covariance over `images`, divided
    by the roots of their eigenvalues, largest first, then all with the other sign.

    Args:
        images: (n, 3, h, w) float32, normalised.

    Returns:
        (24, 3, 2, 2) float32.
    """
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + eps).sqrt()).T.flip(0).reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters]).float().contiguous()


def sample_images(data: DataConfig, count: int = 5000) -> Iterator[torch.Tensor]:
    """Yield batches of `count` normalised training images, evenly spaced over the split."""
    split = Split(data.root, "train")
    batches = np.array_split(np.linspace(0, len(split) - 1, min(count, len(split))).astype(np.int64), 10)
    pixels = PixelFormat(device_id=None, num_threads=1, dtype=torch.float32, channels_last=False, pinned=False)
    pipeline = EvaluationPipeline(split, batches, data, pixels)
    for _ in batches:
        yield pipeline.run()[0].clone()  # DALI reuses the memory


def train(options: argparse.Namespace) -> dict[int, float]:
    """Train a run for each seed, or finish those that were interrupted, and return their accuracies as fractions.

    Raises:
        ConfigError, DatasetError: there is no such dataset, or the run cannot be trained on it.
        SystemExit: with status 75, if a run was stopped after saving.
    """
    filters = options.out / "whitening.safetensors"
    here = config.replace(
        {"data.root": options.dataset, "model.weights": str(filters), "precision.dtype": options.dtype}
    )
    if not filters.exists():
        whitening = whitening_filters(torch.cat(list(sample_images(here.data))))
        write_atomically(filters, save({"whiten.weight": whitening}))
    reached: dict[int, float] = {}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed in seeds:
        result = dali_train.run(here.replace({"data.seed": seed, "run.dir": str(options.out / f"seed-{seed}")}))
        if result.stopped:
            raise SystemExit(75)
        reached[seed] = result.epoch_accuracies[-1]
        print(f"seed {seed}: {reached[seed]:.2%}", flush=True)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default=config.data.root, help="CIFAR-10, converted (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/airbench94"), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=6, metavar="N", help="how many runs (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="default: %(default)s")
    options = parser.parse_args()

    try:
        reached = train(options)
    except (ConfigError, DatasetError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    spread = f" +- {stdev(reached.values()) / len(reached) ** 0.5:.2%} (standard error)" if len(reached) > 1 else ""
    print(f"reached: {mean(reached.values()):.2%}{spread}, n = {len(reached)}, six views")
    print(f"published: {PUBLISHED:.2%}, n = 1,000, six views, on the original images")


if __name__ == "__main__":
    main()
