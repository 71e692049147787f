"""Weights that do not tell their normalisation."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dali_train.cli import main
from dali_train.config import load_config
from dali_train.data.loading.loader import EvalLoader
from tests.helpers import seeing_model


@pytest.mark.thorough
def test_each_usual_normalisation_is_evaluated(
    plain_run: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the whole split is with it, which has fewer than a hundred images; in `eval`, and in `probe`, where the
    classifier is for the dataset's classes. Weights of a run tell theirs."""
    config = load_config(tiny_config)
    images = torch.cat([images for images, _ in EvalLoader.from_config(config, device="cpu")])
    for name, num_classes in (("bare", 5), ("seven", 7)):
        save_file(seeing_model(num_classes, images).state_dict(), tmp_path / f"{name}.safetensors")
    bare = tmp_path / "bare.safetensors"

    def printed(command: str, weights: object, *words: str) -> str:
        own = () if weights == plain_run else ("--model.name", "test_efficientnet", "--model.kwargs", "{}")
        assert main([command, "--config", str(tiny_config), "--model.weights", str(weights), *own, *words]) == 0
        return capsys.readouterr().out

    names = ("mnist", "imagenet", "inception")
    outputs = {name: printed("eval", bare, "--data.normalise", name) for name in names}
    whole = {name: re.findall(r"bare.safetensors: top-1 ([\d.]+)%", output)[0] for name, output in outputs.items()}
    for first, output in outputs.items():
        assert "does not tell its normalisation; top-1 of 13 images is" in output
        shares = re.findall(r"(\d+)% with (\w+)", output)
        assert [name for _, name in shares] == [first, *(name for name in names[1:] if name != first)]
        assert all(share == f"{float(whole[name]):.0f}" for share, name in shares)
    assert len({*whole.values()}) > 1, "else this shows nothing"
    assert "normalisation;" not in printed("eval", plain_run)

    assert "top-1 of 13 images is" in printed("probe", bare)
    for weights in (plain_run, tmp_path / "seven.safetensors"):
        assert "normalisation;" not in printed("probe", weights)
