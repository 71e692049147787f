"""A linear probe: logistic regression on the features of a network whose weights stay as they are.

It takes one pass over the images, without augmentation, and is what fine-tuning has to surpass (Kornblith et al.,
arXiv 1805.08974).
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import nn

from dali_train.checkpoint.trained_model import fitting_weights, input_config, with_plain_model
from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.config import Config, ParallelConfig
from dali_train.data.convert.sources import held_out
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.loading.loader import EvalLoader
from dali_train.data.loading.loader_arguments import Place
from dali_train.data.progress import Progress
from dali_train.errors import ConfigError, RunError
from dali_train.extras.export.write import save_timm
from dali_train.extras.normalisations import describe_accuracies
from dali_train.extras.probe import REPORT
from dali_train.files import write_atomically
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from dali_train.runtime.process import choose_device
from dali_train.text import plural, printable
from dali_train.training.model import build_model
from dali_train.training.pretrained import classifiers, num_classes_of

_MOST_IMAGES = 20_000  # to fit to: more take the regression minutes
_STRENGTHS = 10.0 ** np.arange(-4, 3)  # C of scikit-learn, for features of variance 1
_NUM_FOLDS = 5
_MOST_SCORES = 30_000
"""Images times classes. If there are more, one fold of the cross-validation is enough, and five would take minutes."""
_FOR_THREADS = 1e9
"""Multiplications in a pass over the features. With fewer, the threads of NumPy's and SciPy's BLAS libraries wait for
each other most of the time: a regression on 600 images takes 0.7 s with two, and 0.1 s with one."""
_MOST_STEPS = 1000  # of L-BFGS


class _Features(NamedTuple):
    values: NDArray[np.float32]  # (images, width)
    labels: NDArray[np.int64]


def probe(config: Config, output: Path | None) -> str:
    """Fit the classifier, write the network with it into `output`, and return what to print.

    Raises:
        ConfigError: there are no model.weights, they do not fit, the images have several labels each or are of one
            class, or the network has not one linear classifier.
        DatasetError: there is no validation split.
        RunError: `output` cannot be written.
    """
    if config.model.weights is None:
        raise ConfigError(
            "model.weights is None, and a probe is of pretrained weights: name them, --model.weights FILE"
        )
    train = open_split(config.data, "train")
    train.label_kind.require_class(train.dataset_name)
    validation = open_split(config.data, "validation")
    chosen = _chosen(train)
    if len(np.unique(train.rows["label"][chosen])) < 2:
        raise ConfigError("all training images are of one class: a classifier needs two")
    place = Place.find(0, 1, None, choose_device(config.run.device, Launch()), config.data.num_threads)
    tensors = fitting_weights(config.model, train.num_classes, train.manifest.class_names)
    plain = with_plain_model(config).replace({"precision.dtype": "fp32"})
    model = build_model(plain, train.num_classes, place.device, with_weights=True, tensors=tensors).eval()
    # Of the images alone: convolutions are as fast, and weights in another layout could not be written.
    config = plain.replace({"model.channels_last": config.model.channels_last})
    for difference in differences_from_training(config, model):
        print(f"warning: {difference}", flush=True)  # before the pass, which takes long
    layer = _classifier(model, config.model.name)
    if tensors is not None and num_classes_of(config.model.name, tensors) == train.num_classes:
        layout = Layout.from_config(Launch(), ParallelConfig())
        if line := describe_accuracies(model, config, validation, place.device, layout, place.num_threads):
            print(line, flush=True)
    fitted = _features(model, layer, EvalLoader.of_split(train, config, place, images=chosen), "train")
    weight, bias = _fit(fitted, train.num_classes, config.data.seed)
    images = _features(model, layer, EvalLoader.of_split(validation, config, place), "validation")
    top1 = float(np.mean((images.values @ weight.T + bias).argmax(axis=1) == images.labels))
    text = f"a linear classifier, fitted to the features of {len(chosen):,} of {plural(train.num_images, 'image')}: "
    text += f"top-1 {top1:.2%} of {plural(len(validation), 'validation image')}"
    if output is None:
        return text
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(bias))
    _write(model, config, train, output, {"top1": top1, "num_images": len(validation), "num_fitted": len(chosen)})
    return f"{text}\n{printable(str(output))}: the network with this classifier"


def _classifier(model: nn.Module, name: str) -> nn.Linear:
    """Return the layer of the classes. Raises ConfigError: the network has not one linear layer for them."""
    names = classifiers(getattr(model, "pretrained_cfg", None))
    layer = model.get_submodule(names[0]) if len(names) == 1 else None
    if not isinstance(layer, nn.Linear) or layer.bias is None:
        raise ConfigError(f"model.name is {name}, which has not one linear classifier with a bias: use another network")
    return layer


def _chosen(split: Split) -> NDArray[np.int64]:
    """Return the images to fit to: all that take part in training, or of each class as large a share of them."""
    images = np.arange(len(split)) if split.kept is None else np.flatnonzero(split.kept)
    if len(images) <= _MOST_IMAGES:
        return images
    return images[held_out(split.rows["label"][images], _MOST_IMAGES / len(images), seed=0)]


def _features(model: nn.Module, layer: nn.Linear, loader: EvalLoader, name: str) -> _Features:
    """Return what the classifier gets for the images of a loader, of the split `name`."""
    values: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.int64]] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: values.append(inputs[0].cpu().numpy()))
    num_images = sum(map(len, loader.batches))
    with hook, torch.inference_mode(), Progress(f"features of {name}", total=num_images, unit="images") as progress:
        for images, numbers in loader:
            model(images)
            labels.append(numbers.cpu().numpy())
            progress.update(len(numbers))
    return _Features(np.concatenate(values), np.concatenate(labels))


def _fit(fitted: _Features, num_classes: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the classifier's weights (classes, width) and biases (classes,)."""
    scaler = StandardScaler().fit(fitted.values)
    values, labels = scaler.transform(fitted.values), fitted.labels
    num_threads = 1 if values.size * num_classes < _FOR_THREADS else None
    with threadpool_limits(num_threads, user_api="blas"):
        regression = _regression(values, labels, _strength(values, labels, seed))
    coefficients, intercepts = regression.coef_, regression.intercept_
    if len(regression.classes_) == 2:  # of which scikit-learn has the second one's
        coefficients, intercepts = (np.concatenate([-each, each]) / 2 for each in (coefficients, intercepts))
    weight = np.zeros((num_classes, values.shape[1]), dtype=np.float32)
    bias = np.full(num_classes, intercepts.min(), dtype=np.float32)  # of classes without an image
    weight[regression.classes_] = coefficients / scaler.scale_
    bias[regression.classes_] = intercepts - (coefficients * (scaler.mean_ / scaler.scale_)).sum(axis=1)
    return weight, bias


def _strength(values: NDArray[np.float32], labels: NDArray[np.int64], seed: int) -> float:
    """Return the regularisation with the best accuracy in cross-validation; 1, scikit-learn's default, where there are
    too few images for it."""
    counts = np.bincount(labels)
    num_folds = min(_NUM_FOLDS, int(counts.max()))
    if num_folds < 2:
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of classes with fewer images than folds
        folds = [*StratifiedKFold(num_folds, shuffle=True, random_state=seed % (1 << 32)).split(values, labels)]
    folds = [(rest, fold) for rest, fold in folds if len(np.unique(labels[rest])) > 1]
    if not folds:
        return 1.0
    if len(labels) * np.count_nonzero(counts) > _MOST_SCORES:
        del folds[1:]
    num_correct = {
        strength: sum(
            np.count_nonzero(_regression(values[rest], labels[rest], strength).predict(values[fold]) == labels[fold])
            for rest, fold in folds
        )
        for strength in _STRENGTHS.tolist()
    }
    return max(num_correct, key=num_correct.__getitem__)


def _regression(values: NDArray[np.float32], labels: NDArray[np.int64], strength: float) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of those nearly without regularisation
        return LogisticRegression(C=strength, max_iter=_MOST_STEPS).fit(values, labels)


def _write(model: Any, config: Config, split: Split, output: Path, report: Mapping[str, float]) -> None:
    class_names = split.manifest.class_names
    model.pretrained_cfg = input_config(model, config, class_names)
    try:
        save_timm(model, output, config.model.kwargs, class_names)
        write_atomically(output / REPORT, (json.dumps(report) + "\n").encode())  # last: without it nothing is there
    except (OSError, SafetensorError) as error:
        raise RunError(f"{output} cannot be written ({error}): name another directory with --output") from error
