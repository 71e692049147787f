"""`dali-train probe`: a classifier for pretrained features, as scikit-learn fits it, and what training makes of it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dali_train.cli import main
from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader import EvalLoader
from dali_train.extras.fit import steps as fit_steps
from dali_train.extras.probe import classifier
from tests.helpers import words
from tests.ranks import POOL, command

SIZE = 32
DISTILLED = "deit_tiny_distilled_patch16_224"  # which has two classifiers


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, or as many as a test asks for, of 30 images, which differ in brightness, and not always."""
    directory, generator = tmp_path_factory.mktemp("probe") / "photos", np.random.default_rng(0)
    for number in range(getattr(request, "param", 3)):
        (directory / f"class-{number}").mkdir(parents=True)
        for image in range(30):
            mean = generator.normal(100 + 30 * number, 20)
            pixels = generator.normal(mean, 40, (SIZE, SIZE, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(directory / f"class-{number}" / f"{image:02}.png")
    return directory


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "test_convnext.safetensors"
    save_file(timm.create_model("test_convnext", num_classes=10).state_dict(), path)
    return path


@pytest.fixture
def config_file(photos: Path, weights: Path, tmp_path: Path) -> Path:
    index, file = tmp_path / "index", tmp_path / "photos.py"
    assert main(words(f"data index {photos} --out {index} --validation-fraction 0.3")) == 0
    assert main(words(f"init {index} --output {file} --weights {weights} --gpu-memory 16")) == 0
    file.write_text(
        file.read_text() + f'\nconfig = config.replace({{"data.eval_size": {SIZE}, "run.device": "cpu"}})\n'
    )
    return file


@pytest.mark.parametrize("photos", [2, 3], indirect=True)
def test_its_accuracy_is_that_of_the_network_it_writes_and_of_scikit_learn(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classifier, "_STRENGTHS", np.array([0.1]))
    config, output = load_config(config_file), tmp_path / "probe"
    assert main(["probe", "--config", str(config_file), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    split = Split(config.data.root, "train")
    assert f"fitted to the features of {len(split)} of {len(split)} images: top-1 " in printed
    report = json.loads((output / "probe.json").read_text())
    model = timm.create_model(f"local-dir:{output}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == list(split.manifest.class_names)
    loader = EvalLoader.from_config(config, device="cpu")
    with torch.inference_mode():
        hits = torch.cat([model(images).argmax(dim=1) == labels for images, labels in loader])
    assert float(hits.float().mean()) == pytest.approx(report["top1"]) and len(hits) == report["num_images"]
    assert f"top-1 {report['top1']:.2%} of {len(hits)} validation images" in printed

    def features(name: str) -> tuple[np.ndarray, np.ndarray]:
        data = config.data
        settings = {"normalise": data.normalise, "interpolation": data.interpolation}
        every = EvalLoader(data.root, batch_size=8, split=name, image_size=SIZE, device="cpu", **settings)  # type: ignore[arg-type]
        with torch.inference_mode():
            parts = [(model.forward_head(model.forward_features(x), pre_logits=True), labels) for x, labels in every]
        values, labels = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
        return values, labels

    regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000)).fit(*features("train"))
    assert regression.score(*features("validation")) == pytest.approx(report["top1"])


def test_fit_compares_with_it(
    photos: Path,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, out = tmp_path / "log", tmp_path / "run"
    monkeypatch.setattr(fit_steps, "_run", lambda line: POOL.run(1, command, list(line), log=log)[0])
    options = f"--weights {weights} --epochs 1 --data.train_size {SIZE} --data.eval_size {SIZE} --optimizer.lr 1e-9"
    line = words(f"fit {photos} --out {out} {options}")
    assert main(line) == 0
    printed = capsys.readouterr().out
    found = re.search(r"top-1 (\S+)% of .*; a linear probe of the weights that it began with: (\S+)%", printed)
    assert found is not None, printed
    assert float(found[1]) < float(found[2]), "at such a rate nothing is learnt from zeros"
    assert f"that is better: {out}/probe has the network with its classifier; more --epochs" in printed
    (out / "probe" / "probe.json").write_text('{"top1": 0}')
    assert "(done before)" not in printed and main(line) == 0
    printed = capsys.readouterr().out
    assert re.search(r"dali-train probe .*\(done before\)", printed) and "that is better" not in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--model.weights None", "model.weights is None, and a probe is of"),
        (f"--model.name {DISTILLED} --model.weights deit.safetensors", f"model.name is {DISTILLED}, which has not one"),
    ],
)
def test_what_has_no_probe(
    settings: str,
    message: str,
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if DISTILLED in settings:
        save_file(timm.create_model(DISTILLED).state_dict(), "deit.safetensors")
    assert main(["probe", "--config", str(config_file), *words(settings)]) == 2
    assert message in capsys.readouterr().err


def test_images_that_take_no_part(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of data.exclude, and of many images all but a share of each class."""
    (tmp_path / "excluded").write_text("0\n5\n")
    split = Split(load_config(config_file).data.root, "train", exclude=str(tmp_path / "excluded"))
    assert len(classifier._chosen(split)) == len(split) - 2 and not {0, 5} & {*classifier._chosen(split).tolist()}
    monkeypatch.setattr(classifier, "_MOST_IMAGES", 12)
    line = words(f"probe --config {config_file} --data.exclude {tmp_path / 'excluded'}")
    assert main(line) == 0
    assert f"features of 12 of {len(split) - 2} images: top-1" in capsys.readouterr().out
    assert len(np.unique(split.rows["label"][classifier._chosen(split)])) == split.num_classes


def test_a_class_without_images_is_never_the_answer() -> None:
    labels = np.arange(40) % 2 * 2  # of 3 classes the second has none
    values = np.stack([labels, np.arange(40) % 5], axis=1).astype(np.float32)
    weight, bias = classifier._fit(classifier._Features(values, labels), 3, 0)
    assert ((values @ weight.T + bias).argmax(axis=1) == labels).all()


@pytest.mark.parametrize(
    ("counts", "num_fits"),
    [
        ([1, 1, 1], 0),  # nothing to choose by
        ([3, 3, 1], 6),  # three folds of two strengths
        ([40, 40], 10),
        ([40, 40, 0, 1], 10),
    ],
)
def test_the_strength_is_chosen_by_cross_validation(
    counts: list[int], num_fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier, "_STRENGTHS", np.array([1e-4, 10.0]))
    fits, fitted = [], classifier._regression
    monkeypatch.setattr(classifier, "_regression", lambda *arguments: fits.append(1) or fitted(*arguments))
    labels = np.repeat(np.arange(len(counts)), counts)
    values = np.random.default_rng(0).normal(labels[:, None], 0.3, (len(labels), 4)).astype(np.float32)
    strength = classifier._strength(values, labels, seed=(1 << 64) - 1)
    assert len(fits) == num_fits
    assert strength == (10.0 if num_fits else 1.0)
    monkeypatch.setattr(classifier, "_MOST_SCORES", 1)
    fits.clear()
    classifier._strength(values, labels, seed=0)
    assert len(fits) == (2 if num_fits else 0), "of many images one fold"
