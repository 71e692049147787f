"""What becomes of a finished run: exported models, predictions, and the question why two runs differ."""

import csv
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import ExifTags, Image, ImageOps
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config

import dali_train
from dali_train.checkpoint.recipe import recipe_settings
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.checkpoint.trained_model import input_config, load_trained
from dali_train.cli import main
from dali_train.data.convert.image import upright
from dali_train.errors import ConfigError
from dali_train.extras.doctor.examine import model_and_batch
from dali_train.extras.export.write import commands
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.status import read_events
from dali_train.text import shell_command
from dali_train.training.model import build_model
from dali_train.training.pretrained import image_settings
from tests.config.test_config import PLAIN
from tests.conftest import REPOSITORY, TINY_CONFIG, jpeg, photograph
from tests.convert.files import EPS
from tests.helpers import events, write_run


@pytest.fixture(scope="module")
def make_run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_run((old, new), ...)``: the directory of a run of three steps with an EMA, its config changed so."""

    def make(*changes: tuple[str, str]) -> Path:
        place = tmp_path_factory.mktemp("run")
        text = TINY_CONFIG.format(root=str(dataset)).replace('dir="run"', f"dir={str(place / 'run')!r}, max_steps=3")
        text = text.replace("    run=RunConfig", "    ema=EmaConfig(decay=0.5),\n    run=RunConfig")
        text = text.replace("micro_batch=4", "micro_batch=16")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (place / "config.py").write_text(text)
        return dali_train.run(place / "config.py").run_dir

    return make


@pytest.fixture(scope="module")
def finished(make_run: Callable[..., Path]) -> Path:
    return make_run()


def logits_of(model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(images)


def test_timm_reads_what_was_exported(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(finished), "--output", str(tmp_path / "out"), "--weights", "raw"]) == 0
    assert "its logits differ by" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(logits_of(model, images), logits_of(load_trained(finished, weights="raw").model, images))
    assert model.pretrained_cfg["label_names"] == ["class 0", "class 1", "class 2", "class 3", "class 4"]
    assert model.pretrained_cfg["mean"] == [0.5, 0.5, 0.5] and model.pretrained_cfg["crop_pct"] == pytest.approx(
        32 / 36
    )
    card = ModelCard.load(tmp_path / "out" / "README.md")
    events = [event for event in read_events(finished / "metrics.jsonl") if event["event"] == "eval"]
    best = max(events, key=lambda event: (event["ema_top1"], event["step"]))
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results or []] == [
        ("accuracy", best["top1"]),
        ("top-5 accuracy", best["top5"]),
    ]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes) == {*("config.json", "model.safetensors", "preprocessing.json", "README.md")}
    assert len(set(modes.values())) == 1, modes
    assert card.data.library_name == "timm" and f"{best['step']} steps of " in card.text and "lr 0.01" in card.text
    record = load_trained(finished, weights="raw").record
    assert record["digest"] in card.text and record["record"] in card.text
    preprocessing = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert (preprocessing["resize_to"], preprocessing["center_crop"], preprocessing["weights"]) == (36, 32, "raw")
    assert preprocessing["class_names"] == model.pretrained_cfg["label_names"]


def test_timm_resizes_to_the_same_size() -> None:
    """It divides by the crop share and rounds down: 224 / (224 / 354) is 353.99999999999994."""
    for size, resized in ((224, 256), (224, 224), (64, 99), (224, 354), (256, 372)):
        config = PLAIN.replace({"data.eval_size": size, "data.eval_resize_to": resized})
        model: Any = timm.create_model("test_resnet")
        model.pretrained_cfg = input_config(model, config, ("a",))
        assert image_settings(model)["eval_resize_to"] == resized
        resize = create_transform(**resolve_data_config({}, model=model)).transforms[0]
        assert resize.size == resized


def test_a_card_has_the_commands_that_led_to_its_weights(tmp_path: Path) -> None:
    """A start that ended before its first checkpoint led to nothing, nor has one after the weights were saved."""
    starts = [(0, "a killed one"), (0, "train"), (7, "train"), (9, "train --more"), (11, "train"), (20, "too late")]
    lines = [{"event": "start", "epoch": 0.0, "startup_s": 1.0, "step": step, "command": name} for step, name in starts]
    run = RunDirectory(write_run(tmp_path / "run", events=lines))
    assert commands(run, 20).splitlines() == ["train", "train --more  # from step 9", "train  # from step 11"]
    assert commands(run, 9) == "train" and shell_command(["/x/dali_train/__main__.py", "a b"]) == "dali-train 'a b'"
    assert shell_command(["/home/me/mine.py", "s3://me:SECRET@host"]) == "python mine.py 's3://***@host'"


def test_a_run_begins_with_another_runs_weights(finished: Path, make_run: Callable[..., Path]) -> None:
    """With the moving average, of the checkpoint that `load_model` would take."""
    tuned = make_run(
        ('name="vit_tiny_patch16_224",', f'name="vit_tiny_patch16_224", weights={str(finished)!r},'),
        ("lr=1e-2", "lr=1e-9"),
    )
    first, second = (load_trained(run).model.state_dict() for run in (finished, tuned))
    raw = load_trained(finished, weights="raw").model.state_dict()
    average, written = load_trained(finished, "newest").model.state_dict(), load_file(finished / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in average.items())
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-6)
        assert not torch.equal(tensor, raw[name])
    began_with = load_trained(tuned).checkpoint.values.recipe["model.weights"]
    config = load_trained(tuned).config
    for path in (finished, finished / "checkpoints" / "best"):
        assert recipe_settings(config.replace({"model.weights": str(path)}))["model.weights"] == began_with
    other = config.replace({"model.weights": str(tuned)})
    assert re.fullmatch(r"content \w{16}", began_with) and recipe_settings(other)["model.weights"] != began_with


def loss_of(output: str) -> str:
    return output.rpartition("  loss ")[2].split()[0]


def test_weights_are_evaluated_without_a_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, a file, and what timm knows by name, which brings its architecture and its images with it."""
    assert main(["export", str(finished), "--output", str(tmp_path / "out")]) == 0
    assert main(["eval", str(finished)]) == 0
    expected = loss_of(capsys.readouterr().out)  # of the average
    words = ["eval", "--config", str(finished.parent / "config.py"), "--model.weights"]
    for weights in (str(finished), str(finished / "model.safetensors")):
        assert main([*words, weights]) == 0
        output = capsys.readouterr().out
        assert (
            "images: 32 pixels of the short side at 36 (crop share 0.889), bilinear, mean 127.5, 127.5, 127.5" in output
        )
        assert "warning: data." not in output and loss_of(output) == expected
    digits = ["eval", "--config", str(REPOSITORY / "configs" / "digits.py")]
    digits += ["--data.root", load_trained(finished).config.data.root]
    digits += ["--model.weights", f"local-dir:{tmp_path / 'out'}", "--precision.dtype", "fp32"]
    assert main(digits) == 0
    output = capsys.readouterr().out
    assert "at 36 (crop share 0.889), bilinear" in output and "timm's for these weights" in output
    assert loss_of(output) == expected
    assert main([*digits, "--data.eval_resize_to", "40", "--data.normalise", "imagenet"]) == 0
    assert "32 pixels of the short side at 40 (crop share 0.800), bilinear, mean 123.675" in capsys.readouterr().out


def test_weights_to_evaluate_name_what_does_not_fit(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--config", str(finished.parent / "config.py"), "--model.weights"]
    torch.save(timm.create_model("test_resnet", num_classes=4).state_dict(), tmp_path / "four.pth")
    for arguments, message in (
        ([str(tmp_path)], f"model.weights: {tmp_path} has no newest checkpoint"),
        ([str(tmp_path / "four.pth")], "four.pth has other names than timm's vit_tiny_patch16_224"),
        (
            [str(tmp_path / "four.pth"), "--model.name", "test_resnet", "--model.kwargs", "{}"],
            "four.pth has 4 classes, the dataset 5: use weights trained on these",
        ),
        (["resnet50.a1_in1k"], "resnet50.a1_in1k has 1000 classes, the dataset 5: use weights trained on these"),
        ([str(finished), "--checkpoint", "best"], "--model.weights with a run or a checkpoint"),
    ):
        assert main([*words, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", str(finished), "--output", str(tmp_path / "out")]) == 0
    deeper = load_trained(finished).config.replace(
        {"model.kwargs.depth": 3, "model.weights": f"local-dir:{tmp_path / 'out'}"}
    )
    for num_classes in (5, 4):  # of which timm alone would accept the second
        with pytest.raises(ConfigError, match=r"does not fit .*: (blocks.2.\S+ absent there; ){2}.* and 9 more"):
            build_model(deeper, num_classes, torch.device("cpu"), with_weights=True)
    assert main(["plan", *words[1:], str(tmp_path / "four.pth")]) == 2
    assert "four.pth has other names than timm's vit_tiny_patch16_224" in capsys.readouterr().err
    config = load_trained(finished).config.replace({"model.weights": str(tmp_path / "four.pth")})
    findings, _ = model_and_batch(config, discover(LaunchOptions()), torch.device("cpu"))  # of the doctor
    assert (
        findings[-1].verdict == "fail"
        and "four.pth has other names than timm's vit_tiny_patch16_224" in findings[-1].text
    )


def test_torch_reads_what_was_exported(finished: Path) -> None:
    assert main(["export", str(finished), "--format", "torch-export"]) == 0
    model = torch.export.load(finished / "export" / "torch-export" / "model.pt2").module()
    images = torch.randn(7, 3, 32, 32)
    torch.testing.assert_close(
        logits_of(model, images), logits_of(load_trained(finished).model, images), atol=1e-4, rtol=1e-4
    )


def test_onnxruntime_reads_what_was_exported(finished: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(finished), "--format", "onnx"]) == 0
    session = onnxruntime.InferenceSession(
        finished / "export" / "onnx" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    for size in (1, 6):
        images = torch.randn(size, 3, 32, 32)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        np.testing.assert_allclose(logits, logits_of(load_trained(finished).model, images).numpy(), atol=1e-4)


@pytest.mark.thorough
def test_the_documents_example_is_what_predict_does(finished: Path, tmp_path: Path) -> None:
    """On odd photographs: of odd sides, turned, grey, CMYK, with alpha; whether or not the run turns them."""
    pytest.importorskip("onnxruntime")
    page = (REPOSITORY / "docs" / "own-images.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0].replace("runs/photos/export/onnx", str(tmp_path))
    assert main(["export", str(finished), "--format", "onnx", "--output", str(tmp_path)]) == 0
    described = json.loads((tmp_path / "preprocessing.json").read_text())
    paths, exif = [], Image.Exif()
    for number, (height, width) in enumerate([(41, 77), (97, 51), (39, 39), (47, 211), (57, 85), (66, 43)]):
        exif[ExifTags.Base.Orientation] = 1 + number % 2 * 5
        image = photograph(number, height, width).convert(("RGB", "L", "CMYK")[number % 3])
        image.save(tmp_path / f"{number}.jpg", exif=exif)
        paths.append(tmp_path / f"{number}.jpg")
    photograph(9, 63, 45).convert("RGBA").save(tmp_path / "alpha.png")
    paths.append(tmp_path / "alpha.png")
    model: Any = dali_train.load_model(finished)
    for applies, resize in ((True, "short-side"), (False, "squash")):
        described |= {"apply_orientation": applies, "resize": resize}
        (tmp_path / "preprocessing.json").write_text(json.dumps(described))
        model.applies_orientation = applies
        model.pretrained_cfg["crop_mode"] = "squash" if resize == "squash" else "center"
        for decoder, bound in (("pil", 1e-4), ("dali", 0.02)):  # DALI resizes with other rounding
            predicted = dali_train.predict(model, paths, decoder=decoder)
            for row, path in enumerate(paths):
                names: dict[str, Any] = {}
                exec(example.replace("photo.jpg", str(path)), names)
                expected = np.empty_like(names["logits"][0])
                expected[predicted.classes[row]] = np.log(predicted.probabilities[row])
                found = names["logits"][0]
                assert np.abs((found - found.mean()) - (expected - expected.mean())).max() < bound, (path, decoder)


def test_onnx_without_its_packages_says_what_to_install(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["export", str(finished), "--format", "onnx"]) == 2
    assert (
        "--format onnx needs onnx, onnxscript, onnxruntime: pip install 'dali-train[export]'" in capsys.readouterr().err
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["timm", "torch-export", "onnx"])
def test_export_on_a_full_disk_is_one_line(
    finished: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # the largest file that this process may write
    try:
        assert main(["export", str(finished), "--format", kind, "--output", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    printed = capsys.readouterr().err
    assert re.search(r"out cannot be written \(.*File too large.*\): free some space there, or .* --output", printed)
    assert len(printed.splitlines()) == 1, printed


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("photographs")
    paths = [place / f"{number}.{kind}" for number, kind in enumerate(("jpg", "png", "jpg"))]
    for number, path in enumerate(paths):
        photograph(number, 60 + number, 90).save(path)
    return paths


@pytest.mark.parametrize("decoder", ["dali", "pil"])
def test_predictions_of_files(
    finished: Path, photographs: list[Path], decoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, table = tmp_path / "picture.png", tmp_path / "table.csv"
    files = ["--picture", str(picture), "--csv", str(table)]
    assert main(["predict", str(finished), *map(str, photographs), "--decoder", decoder, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("moving average of the weights of")
    for path, line in zip(photographs, lines[1:], strict=False):
        assert path.name in table.read_text() and re.fullmatch(
            rf"{re.escape(str(path))} +(class \d \d+\.\d%( +|$)){{3}}", line
        ), line
    with Image.open(picture) as image:
        assert image.size[0] > 500


def test_a_table_goes_into_a_pipe_and_options_stand_anywhere(
    finished: Path, photographs: list[Path], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(pipe.read_text)
        assert main(["predict", str(finished), "--csv", str(pipe), *map(str, photographs)]) == 0
        assert len(reading.result().splitlines()) == 4
    assert pipe.is_fifo()


def test_both_decoders_are_compared_on_the_validation_split(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(finished), "--csv", str(tmp_path / "table.csv")]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"13 validation images .* top-1 (\S+)% decoded by DALI, (\S+)% by PIL", printed)
    assert found is not None
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = [row["truth"] == row["class 1"] for row in rows]
    assert [row["image"] for row in rows] == [*map(str, range(13))]
    assert set(rows[0]) >= {"score 1", "class 5"}
    assert float(found[1]) == pytest.approx(100 * np.mean(right), abs=0.01)
    by_class = [
        np.mean([hit for hit, row in zip(right, rows, strict=True) if row["truth"] == f"class {n}"]) for n in range(5)
    ]
    assert f"mean over classes {np.mean(by_class):.2%}" in printed
    assert "lowest: class" in printed
    last = events(finished, "eval")[-1]
    assert {"ema_loss", "ema_top5", "top1"} <= last.keys()
    assert last["ema_loss"] != last["loss"]
    assert last["ema_balanced_top1"] == pytest.approx(np.mean(by_class), abs=1e-6)
    assert float(found[1]) == pytest.approx(100 * events(finished, "eval")[-1]["ema_top1"], abs=0.01)


def test_tables_of_predictions_are_the_averages(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the accuracy that is reported, the classes that `eval` prints, and what `predict` says of the same images."""
    assert main(["predict", str(finished), "--csv", str(tmp_path / "table.csv")]) == 0
    best = max(events(finished, "eval"), key=lambda event: (event["ema_top1"], event["step"]))
    tables = finished / "predictions" / f"step-{best['step']:08d}"
    predicted, shown, by_class = (
        list(csv.DictReader(path.read_text().splitlines()))
        for path in (tmp_path / "table.csv", tables / "predictions.csv", tables / "classes.csv")
    )
    for row, own in zip(predicted, shown, strict=True):
        assert (row["image"], row["class 1"]) == (own["image"], own["prediction"])
        assert float(row["score 1"]) == pytest.approx(float(own[f"score {own['prediction']}"]), abs=2e-4)
    assert {row["weights"] for row in by_class} == {"moving average"}
    capsys.readouterr()
    assert main(["eval", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert "by class, of the moving average" in printed
    worst = min(by_class, key=lambda row: float(row["accuracy"]))
    assert f"lowest: {worst['class']} ({float(worst['accuracy']):.1%} of {worst['images']})" in printed


class FlatteningModel(torch.nn.Module):
    """Views its images as vectors, which torch refuses of images with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 3
        self.pretrained_cfg = {"input_size": (3, 32, 32)}
        self.head = torch.nn.Linear(3 * 32 * 32, self.num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.view(len(images), -1))


@pytest.mark.parametrize("decoder", ["dali", "pil"])
def test_a_model_of_the_users_gets_contiguous_images(decoder: Any, photographs: list[Path]) -> None:
    predictions = dali_train.predict(FlatteningModel().eval(), photographs, decoder=decoder)
    assert predictions.classes.shape == (len(photographs), 3)


def test_predictions_are_the_mean_over_the_views_of_the_evaluation(
    finished: Path, photographs: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    settings = json.loads((copy / "config.json").read_text())
    settings["data"]["eval_views"] = "mirrored"
    (copy / "config.json").write_text(json.dumps(settings))
    plain = dali_train.predict(finished, photographs)
    both = dali_train.predict(copy, photographs)
    mirrored = []
    for path in photographs:
        with Image.open(path) as image:
            mirrored.append(tmp_path / f"mirrored-{path.stem}.png")
            ImageOps.mirror(image.convert("RGB")).save(mirrored[-1])
    other = dali_train.predict(finished, mirrored)
    for row in range(len(photographs)):
        one, two, mean = (
            np.log(found.probabilities[row][np.argsort(found.classes[row])]) for found in (plain, other, both)
        )
        expected = np.exp((one + two) / 2)
        np.testing.assert_allclose(np.exp(mean), expected / expected.sum(), rtol=2e-2)  # a JPEG and its pixels differ


def test_predict_goes_on_past_files_that_are_none(
    finished: Path,
    photographs: list[Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a directory, and below it, in one line each, without what libraries write; the API has names, and says which
    files it left out."""
    folder = photographs[0].parent
    (tmp_path / "more" / "inner").mkdir(parents=True)
    truncated, text = tmp_path / "more" / "inner" / "truncated.jpg", tmp_path / "text.jpg"
    truncated.write_bytes(photographs[0].read_bytes()[:-200])
    noisy = tmp_path / "noisy.jpg"  # DALI decodes it, and libjpeg says "Corrupt JPEG data"
    content = jpeg(photograph(1, 300, 240))
    noisy.write_bytes(content[:2000] + bytes(byte ^ 0x5A for byte in content[2000:2200]) + content[2200:])
    (tmp_path / "more" / "notes.txt").write_text("ignored")
    text.write_text("no image")
    os.mkfifo(tmp_path / "pipe.jpg")
    broken = [text, tmp_path / "pipe.jpg", tmp_path / "nowhere.jpg", tmp_path / "more"]
    faults = [tmp_path / "nowhere.jpg", text, tmp_path / "pipe.jpg", truncated]
    for decoder in ("dali", "pil"):
        assert main(["predict", str(finished), *map(str, broken), str(folder), "--decoder", decoder]) == 2
        printed = capfd.readouterr()
        assert [line.split()[0] for line in printed.out.splitlines()[1:]] == [str(path) for path in sorted(photographs)]
        *lines, last = printed.err.splitlines()
        assert f"{tmp_path / 'more'}: 1 file passed over: 1 .txt" in caplog.text
        assert sorted(line.split()[0] for line in lines) == sorted(map(str, faults))
        assert last == "dali-train predict: 4 of 7 images cannot be classified"
    assert main(["predict", str(finished), str(noisy)]) == 0
    assert capfd.readouterr().err == f"warning: {noisy} is damaged: what could be decoded of it was classified\n"
    predictions = dali_train.predict(finished, [text, *photographs, tmp_path / "more"])
    assert predictions.images == tuple(photographs) and predictions.class_names[1] == "class 1"
    assert predictions.names == [f"class {number}" for number in predictions.classes[:, 0]]
    assert "is not an image in a known format" in predictions.unreadable[text]
    assert "cannot be decoded" in predictions.unreadable[truncated]


def test_predict_takes_of_a_directory_what_a_conversion_takes(
    finished: Path,
    photographs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = photographs[0].read_bytes()
    classified = ["1.jpg", "a/2.JFIF", "a/b/3.jp2"]
    hidden = ["._1.jpg", ".ipynb_checkpoints/1.jpg", ".Trash-1000/files/1.jpg", "__MACOSX/._1.jpg", "a/@eaDir/1.jpg"]
    for name in [*classified, *hidden, "a/2.heic", "b/notes"]:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    assert main(["predict", str(finished), str(tmp_path / "photos"), "--picture", str(tmp_path / "picture.png")]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert lines == [str(tmp_path / "photos" / name) for name in classified]
    counts = "5 hidden (a), 1 link to a folder, 1 .heic (a), 1 without suffix (b)"
    assert f"photos: 8 files passed over: {counts}" in caplog.text


def test_predict_shrinks_what_is_too_large_to_decode(finished: Path, tmp_path: Path) -> None:
    for name, image in {
        "large": Image.linear_gradient("L").resize((10_400, 9_700)),
        "small": Image.linear_gradient("L").resize((104, 97)),
    }.items():
        image.save(tmp_path / f"{name}.jpg", quality=100)
    found = dali_train.predict(finished, [tmp_path / "large.jpg", tmp_path / "small.jpg"])
    np.testing.assert_allclose(*found.probabilities, atol=0.02)


def test_a_name_that_is_no_text(finished: Path, photographs: list[Path], tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jpg")
    path.write_bytes(photographs[0].read_bytes())
    table = tmp_path / "table.csv"
    picture = tmp_path / "picture.png"
    assert main(["predict", str(finished), str(path), "--csv", str(table), "--picture", str(picture)]) == 0
    assert table.read_text(encoding="utf-8").splitlines()[1].startswith(f"{tmp_path}/\\xff.jpg,")
    assert picture.exists()


def test_an_export_replaces_no_run(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose config.json has the name of a model's."""
    before = (finished / "config.json").read_bytes()
    checkpoint = finished / "checkpoints" / "newest"
    for output, name in ((finished, "checkpoints"), (checkpoint, "manifest.json")):
        assert main(["export", str(finished), "--output", str(output)]) == 2
        assert f"--output {output}: holds {name} of a run or a dataset" in capsys.readouterr().err
    assert (finished / "config.json").read_bytes() == before
    assert main(["export", str(finished), "--output", str(finished / "config.json")]) == 2


@pytest.mark.thorough
def test_photographs_are_turned_as_those_of_the_training_set(
    finished: Path, make_run: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image, paths = photograph(7, 60, 100), {name: tmp_path / f"{name}.jpg" for name in ("sideways", "untagged", "up")}
    image.save(paths["sideways"], quality=95, exif=exif)
    image.save(paths["untagged"], quality=95)
    paths["up"].write_bytes(upright(paths["sideways"].read_bytes()))
    with Image.open(paths["up"]) as turned:
        assert turned.size == (60, 100)
    shutil.copytree(dataset, tmp_path / "data")
    manifest = json.loads((dataset / "dataset.json").read_text())
    manifest["conversion"] = {"options": {"apply_orientation": True}}
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(manifest))
    turning = make_run((repr(str(dataset)), repr(str(tmp_path / "data"))))
    for model, like in ((finished, "untagged"), (turning, "up"), (dali_train.load_model(turning), "up")):
        for decoder in ("dali", "pil"):
            predictions = dali_train.predict(model, [paths["sideways"], paths[like]], decoder=decoder)
            np.testing.assert_array_equal(*predictions.probabilities)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "/nowhere.jpg"], "/nowhere.jpg does not exist"),
        (["RUN", "--picture", "x.png"], "--picture needs images"),
        (["RUN", "TEXT", "--decoder", "pil"], "TEXT is not an image in a known format"),
        (["RUN", "TEXT"], "TEXT is not an image in a known format"),
        (["RUN", "--data.train_size", "1"], "predict uses the run's own settings and accepts no others"),
        (["RUN", "--checkpiont", "newest"], "accepts no others; did you mean --checkpoint?"),
    ],
)
def test_predict_names_mistakes(
    finished: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "TEXT").write_text("no image")
    places = {"RUN": str(finished), "TEXT": str(tmp_path / "TEXT")}
    assert main(["predict", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_predict_starts_no_other_program(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PIL opens an EPS with Ghostscript, whatever its name."""
    ghostscript, figure = tmp_path / "bin" / "gs", tmp_path / "photo.jpg"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    figure.write_bytes(EPS)
    assert main(["predict", str(finished), str(figure), "--decoder", "pil"]) == 2
    assert "photo.jpg is not an image in a known format (JPEG, PNG" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


def diff_of(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    status = main(["diff", *map(str, words)])
    return status, capsys.readouterr().out


def test_a_run_does_not_differ_from_itself(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = diff_of(capsys, finished, finished)
    assert status == 0
    assert output.count("the same") == 5


@pytest.mark.thorough
def test_diff_names_the_first_draw_that_differs(
    finished: Path, make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flips = make_run(("num_threads=1", "num_threads=1, horizontal_flip=1.0"))
    status, output = diff_of(capsys, finished, flips)
    assert status == 1
    assert "data.horizontal_flip: 0.5 | 1\n" in output
    assert re.search(
        r"first difference: step 0, micro-batch 0, position \d \(image (\d+) \| \1\), flips: 0 \| 1", output
    ), output
    assert re.search(r"losses\n  first difference: step 1, \S+ \| \S+ \(\S+ relative\)", output), output

    seeds = make_run(("num_threads=1", "num_threads=1, seed=1"))
    _, output = diff_of(capsys, finished, seeds)
    assert re.search(r"step 0, micro-batch 0, position 0 \(image \d+ \| \d+\), images: \d+ \| \d+", output), output


def test_diff_tells_another_rate_from_another_sample(
    finished: Path, make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    faster = make_run(("lr=1e-2", "lr=2e-2"))
    status, output = diff_of(capsys, finished, faster)
    assert status == 1
    assert "optimizer.lr: 0.01 | 0.02" in output
    assert "samples\n  the same" in output
    assert "losses\n  first difference: step 2," in output  # the first step's loss comes before its update
