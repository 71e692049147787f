"""The normalisation and the filter of weights: what tells them, and who is told that a config has others."""

import json
import shutil
from pathlib import Path

import pytest

from dali_train.checkpoint.trained_on import trained_on
from dali_train.cli import main
from dali_train.config import load_config
from dali_train.extras.init.network import describe_weights
from tests.conftest import Train, finished_run

NAME = "vit_tiny_patch16_224"  # of timm's with 127.5
OTHERS = ("--data.normalise", "imagenet", "--data.interpolation", "bicubic")
SAID = (
    "warning: data.normalise is inception, and model.weights {0} was trained with imagenet, as {1} says: set "
    "data.normalise imagenet",
    "warning: data.interpolation is bilinear, and model.weights {0} was trained with bicubic, as {1} says: set "
    "data.interpolation bicubic",
)


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with other images than the config that it came from."""
    return finished_run(tmp_path_factory.mktemp("others"), dataset, *OTHERS, "--run.max_steps", "1")


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    return tmp_path / "exported"


def test_what_tells_the_images_of_weights(run: Path, exported: Path, tmp_path: Path) -> None:
    bare = shutil.copy(run / "model.safetensors", tmp_path / "bare.safetensors")
    theirs, usual = ("imagenet", "bicubic"), ("inception", "bicubic")
    for weights, images, source, is_assumed in (
        (str(run), theirs, "its run's recipe", False),
        (str(run / "checkpoints" / "newest"), theirs, "its run's recipe", False),
        (str(run / "model.safetensors"), theirs, "its run's config.json", False),
        (str(exported / "model.safetensors"), theirs, "its config.json", False),
        (f"local-dir:{exported}", theirs, "its config.json", False),
        ("vit_base_patch16_224.mae", theirs, "timm", False),
        (str(bare), usual, f"timm's {NAME}", True),
        ("hf-hub:somebody/vit", usual, f"timm's {NAME}", True),
        (str(tmp_path / "gone"), usual, f"timm's {NAME}", True),
        (None, usual, f"timm's {NAME}", True),
    ):
        known = trained_on(NAME, weights)
        assert known is not None
        assert ((known.normalise, known.interpolation), known.source) == (images, source), weights
        assert known.is_assumed == is_assumed, weights
    fetched = trained_on(NAME, "hf-hub:somebody/vit", {"source": "hf-hub", "mean": [0.0] * 3, "std": [1.0] * 3})
    assert fetched is not None and fetched.normalise == ((0, 0, 0), (255, 255, 255)) and not fetched.is_assumed
    assert trained_on("a_model_of_ones_own", None) is None
    for damage in ({"pretrained_cfg": {"mean": [1], "std": None}}, {"data": {"normalise": 3}}, {"data": {}}):
        (tmp_path / "config.json").write_text(json.dumps(damage))
        assert trained_on(NAME, str(bare)) == trained_on(NAME, None), damage


def test_a_config_with_other_images_is_told(
    run: Path, tiny_config: Path, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line a setting, by all that begin with weights."""
    said = [line.format(run, "its run's recipe") for line in SAID]
    short = ("--run.max_steps", "1", "--model.weights", str(run))
    assert [line for line in train("told", *short).splitlines() if "was trained with" in line] == said
    assert "was trained with" not in train("same", *short, *OTHERS)
    resumed = train("told", *short[2:], "--run.max_steps", "2")
    assert "resuming from step 1" in resumed and resumed.count("was trained with") == 2, "of the first start alone"
    words = ["--config", str(tiny_config), "--model.weights", str(run)]
    arguments = f"data --model {NAME} --initial-checkpoint {run}"
    root = str(load_config(tiny_config).data.root)
    for command in (
        ["eval", *words],
        ["plan", *words],
        ["doctor", *words, "--run.dir", str(tmp_path / "doctor")],
        ["probe", *words],
        ["init", root, "--from-timm", arguments, "--output", str(tmp_path / "translated.py")],
    ):
        main(command)
        printed = " ".join(capsys.readouterr().out.split())
        assert said[0].removeprefix("warning: ").rpartition(": ")[0] in printed, command


def test_a_new_config_follows(run: Path) -> None:
    for weights in (run, run / "model.safetensors", run / "checkpoints" / "newest"):
        found = describe_weights(str(weights), None)
        assert (found.model, found.normalise, found.interpolation) == (NAME, "imagenet", "bicubic"), weights
        assert found.kwargs["img_size"] == 32
