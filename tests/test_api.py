"""The Python API, and evaluating a run by its directory."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dali_train
from dali_train.checkpoint.format import CheckpointError, load_newest
from dali_train.cli import main
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import TINY_CONFIG, jpeg, photograph, write_shard
from tests.helpers import events


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps."""
    place = tmp_path_factory.mktemp("api")
    text = TINY_CONFIG.format(root=str(dataset)).replace('dir="run"', f"dir={str(place / 'run')!r}, max_steps=2")
    (place / "config.py").write_text(text)
    result = dali_train.run(place / "config.py")
    assert (result.run_dir, result.step, result.total_steps, bool(result.stopped)) == (place / "run", 2, 2, False)
    assert result.best_top1 == events(result.run_dir, "eval")[0]["top1"]
    written = json.loads((result.run_dir / "epoch_accuracies.json").read_text())
    assert result.epoch_accuracies == [result.best_top1] == written
    return result.run_dir


def test_a_model_comes_back_with_its_weights(finished: Path) -> None:
    config = dali_train.load_config(finished.parent / "config.py")
    model = dali_train.load_model(finished)
    assert not model.training
    newest, _ = load_newest(finished / "checkpoints")
    assert newest is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, newest.state["model"][name])
    split = Split(config.data.root, "validation")
    images, labels = EvaluationPipeline(
        split, [torch.arange(13).numpy()], config.data, pixel_format(config, torch.device("cpu"), 1)
    ).run()
    with torch.inference_mode():
        top1 = (model(images).argmax(dim=1) == labels).double().mean()
    assert top1 == events(finished, "eval")[0]["top1"]


def test_the_package_lists_what_can_be_imported() -> None:
    assert {"run", "predict", "load_model", "load_config", "Hook", "RunResult", "register_optimizer"} <= set(
        dir(dali_train)
    )


def test_timm_prepares_images_for_a_loaded_model(finished: Path, tmp_path: Path) -> None:
    model = dali_train.load_model(finished)
    prepared = timm.data.resolve_data_config({}, model=model, use_test_size=True)
    assert prepared | {"mean": (0.5,) * 3, "std": (0.5,) * 3} == prepared
    assert prepared["input_size"] == (3, 32, 32)
    assert (prepared["interpolation"], prepared["crop_mode"]) == ("bilinear", "center")
    assert prepared["crop_pct"] == pytest.approx(32 / 36)
    assert model.pretrained_cfg["label_names"] == [f"class {number}" for number in range(5)]
    photographs = [tmp_path / f"{number}.jpg" for number in range(3)]
    for number, path in enumerate(photographs):
        path.write_bytes(jpeg(photograph(number, 50, 60)))
    by_run, by_model = (dali_train.predict(source, photographs) for source in (finished, model))
    np.testing.assert_array_equal(by_run.probabilities, by_model.probabilities)
    transform = timm.data.create_transform(**prepared)
    images = torch.stack([transform(Image.open(path)) for path in photographs])
    with torch.inference_mode():
        expected = model(images).softmax(dim=-1).sort(descending=True).values
    np.testing.assert_allclose(dali_train.predict(model, photographs, decoder="pil").probabilities, expected, atol=1e-2)


def test_accuracies_are_complete_and_weights_written_after_a_resume(finished: Path, tmp_path: Path) -> None:
    config = dali_train.load_config(finished.parent / "config.py")
    config = config.replace({"run.dir": str(tmp_path / "run"), "run.eval_every_epochs": 0.64})  # each step
    first = dali_train.run(config)
    assert first.model_file is not None and len(first.epoch_accuracies) == 2
    first.model_file.unlink()
    first.model_file.mkdir()  # a file cannot take its place
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors cannot be written .*: check space and permissions, .* nothing is trained twice",
    ):
        dali_train.run(config)
    first.model_file.rmdir()
    assert dali_train.run(config) == first and first.model_file.is_file()  # nothing is trained twice
    (tmp_path / "run" / "checkpoints" / "step-00000002").rename(tmp_path / "lost")
    assert dali_train.run(config) == first
    assert json.loads((tmp_path / "run" / "epoch_accuracies.json").read_text()) == first.epoch_accuracies


def test_eval_takes_the_settings_of_the_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top1 = events(finished, "eval")[0]["top1"]
    for words in (
        [str(finished)],
        [str(finished), "--checkpoint", "newest"],
        [str(finished), "--checkpoint", str(finished / "checkpoints" / "step-00000002")],
        ["--config", str(finished.parent / "config.py"), "--checkpoint", str(finished / "checkpoints" / "best")],
    ):
        assert main(["eval", *words]) == 0
        assert f"step 2: top-1 {top1:.2%}" in capsys.readouterr().out


def test_eval_names_what_differs_from_the_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(finished), "--data.normalise", "100,100,100", "127.5,127.5,127.5"]
    assert main(words) == 2
    assert "data.normalise (mean) [127.5, 127.5, 127.5] -> [100" in capsys.readouterr().err
    assert main([*words, "--run.accept_changed_recipe", "true"]) == 0
    assert "data.normalise (mean)" in capsys.readouterr().out

    write_shard(
        tmp_path / "validation" / "validation-00000-of-00001", [(jpeg(photograph(i, 40, 40)), 1 + i) for i in range(5)]
    )
    build_index(tmp_path)
    manifest = json.loads((tmp_path / "dataset.json").read_text())
    manifest["class_names"] = [manifest["class_names"][i] for i in (0, 2, 1, 3, 4)]
    (tmp_path / "dataset.json").write_text(json.dumps(manifest))
    assert main(["eval", str(finished), "--data.root", str(tmp_path)]) == 2
    assert "class 1 class 1 -> class 2" in capsys.readouterr().err


def test_another_model_does_not_fit_the_weights(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--model.kwargs.embed_dim", "64"], "do not fit the model of this config"),
        (["--data.eval_size", "16"], "data.eval_size is 16, but model.name vit_tiny_patch16_224 takes images of 32"),
    ):
        assert main(["eval", str(finished), *words, "--run.accept_changed_recipe", "true"]) == 2
        assert message in capsys.readouterr().err


def test_a_dataset_without_validation_is_mentioned(tmp_path: Path) -> None:
    records = [(jpeg(photograph(i, 40, 40)), 1 + i % 2) for i in range(32)]
    write_shard(tmp_path / "data" / "train" / "train-00000-of-00001", records)
    build_index(tmp_path / "data")
    (tmp_path / "config.py").write_text(TINY_CONFIG.format(root=str(tmp_path / "data")))
    config = dali_train.load_config(tmp_path / "config.py").replace(
        {"run.dir": str(tmp_path / "run"), "run.max_steps": 1}
    )
    result = dali_train.run(config)
    assert (result.step, result.best_top1) == (1, None)
    assert "has no validation split: nothing is evaluated" in (tmp_path / "run" / "logs" / "rank0.log").read_text()
