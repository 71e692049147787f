"""Evaluation counts every image once, on any number of ranks."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dali_train.cli import main
from dali_train.config import load_config
from dali_train.data.dataset.index import Split, read_labels
from dali_train.data.dataset.storage import open_shards
from dali_train.data.dataset.tfrecord import write_records
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.parallel.layout import Layout
from dali_train.training.metrics import Evaluator, classes_ahead
from dali_train.training.precision import Precision
from tests.conftest import Train, run_in_pool
from tests.helpers import events, words

CPU = torch.device("cpu")


class FirstPixels(nn.Module):
    """Scores that depend on the image, with ties in none of them."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 3, 3:10]


def evaluator(config_path: Path, micro_batch: int, **data: Any) -> Evaluator:
    config = load_config(config_path).replace(data=data)
    object.__setattr__(config.batch, "micro_batch", micro_batch)  # of any size: the global batch does not matter here
    return Evaluator(Split(config.data.root, "validation"), config, CPU, Layout(rank=0), num_threads=1)


def test_result_is_that_of_one_pass_over_all_images(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    split = Split(config.data.root, "validation")
    images, labels = EvaluationPipeline(
        split, [torch.arange(13).numpy()], config.data, pixel_format(config, CPU, 1)
    ).run()
    logits = FirstPixels()(images)
    order = logits.argsort(dim=1, descending=True)
    for micro_batch in (1, 4, 12, 13, 50):  # last batches of 1, 1, 1, 13 and 13 images
        model = FirstPixels().train()
        result = evaluator(tiny_config, micro_batch).run(model, Precision(config.precision, CPU).autocast())
        assert result.num_images == 13
        assert model.training
        assert result.top1 == (order[:, 0] == labels).sum() / 13
        assert result.top5 == pytest.approx(float((order[:, :5] == labels[:, None]).any(dim=1).sum() / 13))
        by_class = [float((order[labels == number, 0] == number).double().mean()) for number in range(5)]
        assert result.balanced_top1 == pytest.approx(sum(by_class) / 5)
        assert result.balanced_top1 != result.top1
        assert result.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ties_infinities_and_nans_count_as_in_argmax(dtype: torch.dtype) -> None:
    """Scores from a few values, so that most images have ties, against Python's own sorting."""
    random = np.random.default_rng(0)
    values = np.array([-np.inf, -1.5, 0.0, -0.0, 1.0, 2.0, np.inf])
    for num_classes in (1, 3, 10):
        table = values[random.integers(0, len(values), (2_000, num_classes))]
        table[random.random(2_000) < 0.05, 0] = np.nan
        own = random.random((2_000, num_classes)) < 0.4
        own[np.arange(2_000), random.integers(0, num_classes, 2_000)] |= random.random(2_000) < 0.9
        expected = [
            num_classes + 5
            if np.isnan(row).any() or not mine.any()
            else next(
                ahead
                for ahead, number in enumerate(sorted(range(num_classes), key=lambda number: (-row[number], number)))
                if mine[number]
            )
            for row, mine in zip(table.tolist(), own, strict=True)
        ]
        scores = torch.tensor(table, dtype=dtype)
        found = classes_ahead(scores, torch.from_numpy(own))
        assert found.tolist() == expected
        finite = ~scores.isnan().any(dim=1)
        hits = torch.from_numpy(own).gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
        assert torch.equal((found == 0)[finite], hits[finite])


def test_a_network_that_knows_nothing_reaches_the_share_of_the_first_class(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    labels = Split(config.data.root, "validation").rows["label"]

    class Nothing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images[:, 0, 0, :5] * 0

    result = evaluator(tiny_config, 4).run(Nothing(), Precision(config.precision, CPU).autocast())
    assert result.top1 == np.mean(labels == 0) < 1
    assert result.balanced_top1 == pytest.approx(1 / 5)


@pytest.mark.parametrize(("views", "shifts"), [("mirrored", [0]), ("mirrored-and-shifted", [0, 1, -1])])
def test_the_logits_of_all_views_are_averaged(tiny_config: Path, views: str, shifts: list[int]) -> None:
    """Half of the weight is that of the images and their mirror images, as in airbench; a shift reflects the border."""
    config = load_config(tiny_config)
    split = Split(config.data.root, "validation")
    images, labels = EvaluationPipeline(split, [np.arange(13)], config.data, pixel_format(config, CPU, 1)).run()
    bordered = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), "reflect")
    size = images.shape[-1]
    logits = torch.zeros(13, 7, dtype=torch.float64)
    for shift in shifts:
        cut = slice(1 - shift, 1 - shift + size)
        view = torch.from_numpy(bordered[:, :, cut, cut].copy())
        weight = 1 / 2 if shifts == [0] else 1 / 4 if shift == 0 else 1 / 8
        logits += weight * (FirstPixels()(view) + FirstPixels()(view.flip(-1))).double()
    result = evaluator(tiny_config, 4, eval_views=views).run(FirstPixels(), Precision(config.precision, CPU).autocast())
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


def test_only_the_classes_of_a_set_compete_in_its_order(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    split = Split(config.data.root, "validation")
    classes = np.array([6, 0, 3, 2, 5])  # of the seven logits, those that are the set's classes
    images, labels = EvaluationPipeline(split, [np.arange(13)], config.data, pixel_format(config, CPU, 1)).run()
    logits = FirstPixels()(images)[:, classes]
    of_set = Evaluator(split, config, CPU, Layout(rank=0), num_threads=1, classes=classes)
    result = of_set.run(FirstPixels(), Precision(config.precision, CPU).autocast())
    assert result.top1 == (logits.argmax(1) == labels).sum() / 13
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


@pytest.fixture
def named(dataset: Path, tmp_path: Path) -> Path:
    """`dataset` with the names of ImageNet's validation files, which count backwards from 14."""
    root, split = tmp_path / "named", Split(dataset, "validation")
    shutil.copytree(dataset / "train", root / "train")
    images = zip(open_shards(split).read(np.arange(13)), split.rows["label"].tolist(), strict=True)
    records = (
        (image, {"image/class/label": 1 + label, "image/filename": f"n01/ILSVRC2012_val_{14 - number:08d}.JPEG"})
        for number, (image, label) in enumerate(images)
    )
    write_records(root / "validation" / "validation-00000-of-00001", records)
    build_index(root)
    return root


# Of the files 1 to 14 by their numbers, 1 is not in `named`.
LABELS = [[4], [0], [], [1, 2, 3], [0, 4], [], [2], [3, 0], [0, 1, 2, 3, 4], [1], [4, 1], [2, 4], [0], [3]]


def test_a_prediction_among_several_labels_is_right(named: Path, tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config).replace({"data.root": str(named)})
    path = tmp_path / "real.json"
    split = Split(named, "validation")
    path.write_text(json.dumps([one * 3 for one in LABELS]))  # a class that is given three times counts once
    labels = read_labels(path, split)
    assert [[one for one in row if one >= 0] for row in labels.tolist()] == LABELS[:0:-1]
    images, _ = EvaluationPipeline(split, [np.arange(13)], config.data, pixel_format(config, CPU, 1)).run()
    logits = FirstPixels()(images)
    kept = [number for number in range(13) if LABELS[13 - number]]
    right = [LABELS[13 - number] for number in kept]
    top5 = logits[kept].argsort(dim=1, descending=True)[:, :5].tolist()
    shares = logits.softmax(dim=1)[kept]
    result = Evaluator(split, config, CPU, Layout(rank=0), num_threads=1, labels=labels).run(
        FirstPixels(), Precision(config.precision, CPU).autocast()
    )
    assert result.num_images == len(kept) == 11
    assert result.top1 == sum(best[0] in own for best, own in zip(top5, right, strict=True)) / 11
    assert result.top5 == pytest.approx(sum(bool({*best} & {*own}) for best, own in zip(top5, right, strict=True)) / 11)
    losses = [-float(share[own].sum().log()) for share, own in zip(shares, right, strict=True)]
    assert result.loss == pytest.approx(sum(losses) / 11, rel=1e-6)


def test_labels_of_other_images_are_refused(named: Path, dataset: Path, tmp_path: Path) -> None:
    path, split = tmp_path / "real.json", Split(named, "validation")
    for content, message in (
        (json.dumps(LABELS[:9]), "has labels of ILSVRC2012_val_00000001 to 00000009, and the file of image 0 of"),
        (json.dumps([[5]] * 14), "has [5], which are not among 5 classes"),
        (json.dumps([[]] * 14), "has no label of an image of"),
        (json.dumps([[True]] * 14), "has [True], which are not among 5 classes"),
        (json.dumps([[1.0]] * 14), "has [1.0], which are not among 5 classes"),
        ("[[0], 1]", "has 1, which are not among 5 classes"),
        ('{"a": 1}', "labels is an object instead of an array"),
        ("[", "is not valid JSON"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError) as error:
            read_labels(path, split)
        assert message in str(error.value) and "\n" not in str(error.value)
    path.write_text(json.dumps(LABELS))
    with pytest.raises(DatasetError, match="the record has no image/filename"):
        read_labels(path, Split(dataset, "validation"))
    with pytest.raises(ConfigError, match=r"nowhere.json.* use a list of lists of labels"):
        read_labels(tmp_path / "nowhere.json", split)


def test_several_sets_are_evaluated_in_a_run_and_by_eval(
    train: Train, run_command: Train, dataset: Path, named: Path, tmp_path: Path
) -> None:
    assert main(["data", "subset", str(dataset), "--classes", "2", "--out", str(tmp_path / "two")]) == 0
    (tmp_path / "real.json").write_text(json.dumps(LABELS))
    more = ("--data.eval_sets", f"same,{dataset}", f"two-of-5,{tmp_path / 'two'}", f"real,{tmp_path / 'real.json'}")
    sets = ("--data.root", str(named), *more)
    twice = (*sets, "same,x")
    assert "use each name once" in run_command("plan", "--config", str(tmp_path / "tiny-config.py"), *twice, status=2)
    log = train("run", *sets, "--run.max_steps", "2", "--ema.decay", "0.5", ranks=2)
    event = events(tmp_path / "run", "eval")[-1]
    assert event["same_top1"] == event["ema_top1"]
    assert event["same_loss"] == pytest.approx(event["ema_loss"])
    assert 0 < event["two-of-5_num_images"] < event["same_num_images"] == 13
    assert event["real_num_images"] == 11
    assert f"  real {event['real_top1']:.2%}" in log
    assert f"  same {event['ema_top1']:.2%}  two-of-5 {event['two-of-5_top1']:.2%}" in log
    assert "Top-1 on data.eval_sets" in (tmp_path / "run" / "report" / "index.html").read_text()
    output = run_command("eval", str(tmp_path / "run"), *sets)
    assert f"real: top-1 {event['real_top1']:.2%}  top-5" in output
    assert "(11 images)" in output
    images = event["two-of-5_num_images"]
    top1 = event["two-of-5_top1"]
    assert re.search(rf"^two-of-5: top-1 {top1:.2%} .* \({images} images", output, re.MULTILINE), output
    manifest = tmp_path / "two" / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"class ', '"other '))
    assert "class 'other " in train("bad", *sets, "--run.max_steps", "1", status=2)
    names = json.loads(manifest.read_text())["class_names"]
    manifest.write_text(manifest.read_text().replace(json.dumps(names[1]), json.dumps(names[0])))
    assert f"are called alike, {names[0]!r} the first" in train("bad", *sets, "--run.max_steps", "1", status=2)


def test_scores_that_are_not_numbers_are_wrong(tiny_config: Path) -> None:
    class Dead(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.full((len(images), 5), float("nan"))

    config = load_config(tiny_config)
    split = Split(config.data.root, "validation")
    evaluates = Evaluator(split, config, CPU, Layout(rank=0), num_threads=1, num_shown=1)
    result = evaluates.run(Dead(), Precision(config.precision, CPU).autocast())
    assert (result.top1, result.top5, result.balanced_top1) == (0, 0, 0)
    assert evaluates.describe_classes(tuple("abcde"))[0] == "mean over classes 0.00%"


def test_every_number_of_ranks_counts_the_same(train: Train, tmp_path: Path) -> None:
    """Of two one has 13 images and the other none; test_parallel.py has ranks with some each."""
    words = ("--batch.micro_batch", "16", "--run.max_steps", "1", "--precision.dtype", "fp64")
    for ranks in (1, 2):
        train(str(ranks), *words, ranks=ranks)
    one, two = (events(tmp_path / name, "eval")[0] for name in "12")
    assert one["num_images"] == two["num_images"] == 13
    assert (one["top1"], one["top5"]) == (two["top1"], two["top5"])
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)


@pytest.mark.parametrize("words", [("--checkpoint", "nowhere"), ("--model.weights", "nowhere.safetensors")])
def test_a_mistake_is_printed_by_one_of_two_ranks(tiny_config: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    output = run_in_pool(["eval", "--config", str(tiny_config), *words], tmp_path / "log", ranks=2, status=2)
    assert output.count("dali-train eval: ") == 1 and words[-1] in output


def test_the_best_checkpoint_is_chosen_as_asked(train: Train, tmp_path: Path) -> None:
    options = "--run.best_by loss --run.keep_checkpoints 9 --run.epochs 4 --schedule.warmup_epochs 0 --optimizer.lr 0.3"
    output = train("run", *words(options))
    evaluations = events(tmp_path / "run", "eval")
    best = min(evaluations, key=lambda event: (event["loss"], -event["step"]))
    assert len(evaluations) == 4
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    assert f"best by loss, top-1 {best['top1']:.2%} at step {best['step']}: " in output
