"""Several labels an image, from a table to the measurements: against timm's losses and scikit-learn's measures."""

import copy
import csv
import io
import json
import shutil
import tarfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from timm.data.mixup import mixup_target
from torch import nn

from dali_train import EvalLoader, TrainLoader
from dali_train.cli import command_parser, main
from dali_train.config import ConfigError, LossConfig, MixupConfig, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.tfrecord import parse_example, walk_records
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.errors import DatasetError
from dali_train.extras.blame.step import blame
from dali_train.extras.fit.steps import Fit
from dali_train.extras.formats.tables import has_validation
from dali_train.extras.init.config_file import write_config
from dali_train.extras.proof.prove import prove
from dali_train.extras.several_labels import LOSSES_OF_SEVERAL
from dali_train.extras.several_labels.evaluation import SeveralLabelsEvaluator, average_precisions, f1_scores
from dali_train.extras.several_labels.judged import JudgedSeveral
from dali_train.extras.several_labels.labels import BINARY_TARGETS, MultiHot
from dali_train.extras.several_labels.sets_of_classes import SetsOfClasses
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch, LaunchOptions
from dali_train.runtime.process_group import joined
from dali_train.training.build import build_loader, build_trainer, prepare, training_classes
from dali_train.training.loss import TrainingClasses, make_objective
from dali_train.training.precision import Precision
from tests.config.test_config import config as config_of
from tests.conftest import TINY_CONFIG, Train, jpeg, photograph
from tests.convert.files import write_mds
from tests.helpers import Compared, events, in_ranks, losses, state_difference, words

NAMES = ("bear", "cat", "dog", "eel", "fox")
NUM_IMAGES = {"train": 50, "val": 13}
CPU = torch.device("cpu")


def classes_of(number: int) -> tuple[int, ...]:
    """Of an image: none, one, or several."""
    return tuple(one for one in range(5) if (number * 11 + one) % (3 + one) == 0)


def write_table(directory: Path) -> Path:
    """Images beside a table of all their labels; some have several rows."""
    directory.mkdir(parents=True)
    rows = [("file", "label", "split")]
    for split, count in NUM_IMAGES.items():
        for number in range(count):
            name = f"{split}-{number:03d}.jpg"
            (directory / name).write_bytes(jpeg(photograph(number, 30 + 7 * (number % 9), 80 - 5 * (number % 11))))
            own = [NAMES[one] for one in classes_of(number)]
            cells = own[:1], own[1:]
            rows += [(name, "; ".join(cell), split) for cell in (cells if number % 3 == 0 else (own,))]
    with (directory / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return directory / "labels.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "images")


@pytest.fixture(scope="module")
def several(table: Path) -> Path:
    """The index in place of the table."""
    out = table.parent.parent / "index"
    assert main(["data", "index", str(table), "--out", str(out), "--label-separator", ";"]) == 0
    return out


@pytest.fixture
def several_config(several: Path, tmp_path: Path) -> Path:
    path = tmp_path / "several.py"
    path.write_text(TINY_CONFIG.format(root=str(several)))
    return path


def labels_by_file(root: Path, splits: Sequence[str] = ("train", "validation")) -> dict[str, tuple[int, ...]]:
    labels = {}
    for name in splits:
        split = Split(root, name)  # type: ignore[arg-type]
        assert not split.label_kind.is_class
        for file, label in zip(split.file_names(), split.rows["label"].tolist(), strict=True):
            labels[Path(file).name] = split.label_kind.classes_of(label)
    return labels


EXPECTED_VAL = [classes_of(number) for number in range(NUM_IMAGES["val"])]
EXPECTED = {
    f"{split}-{number:03d}.jpg": classes_of(number) for split, count in NUM_IMAGES.items() for number in range(count)
}


def test_index_and_records_have_all_labels(several: Path, table: Path, tmp_path: Path) -> None:
    assert {len(classes) for classes in EXPECTED.values()} >= {0, 1, 2, 3}
    assert labels_by_file(several) == EXPECTED
    assert Manifest.read(several).class_names == NAMES
    counts = training_classes(Split(several, "train")).counts
    assert counts.tolist() == [sum(one in classes_of(n) for n in range(50)) for one in range(5)]
    converted = tmp_path / "converted"
    arguments = ["--source", str(table), "--out", str(converted), "--label-separator", ";"]
    assert main(["data", "convert", "table", *arguments]) == 0
    assert labels_by_file(converted) == EXPECTED
    assert main(["data", "verify", str(converted)]) == 0
    path = next((converted / "train").iterdir())
    content = memoryview(path.read_bytes())
    for record in walk_records(content, path, check_payload=True):
        features = parse_example(content, record, path)
        (name,) = (bytes(content[slice(*span)]).decode() for span in features["image/filename"].spans)
        assert features["image/class/labels"].integers == tuple(1 + one for one in EXPECTED[name])
        assert "image/class/label" not in features  # who expects one label must not find the number of a set


def test_a_column_for_each_class(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which one may have no images."""
    path = table.with_name("hot.csv")
    heads = ["id", "split", "fox", "cow", *NAMES[:4]]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(heads)
        for name, classes in EXPECTED.items():
            own = {NAMES[number] for number in classes}
            cells = ["1" if head in own else "-1" if number % 2 else "0" for number, head in enumerate(heads[2:])]
            rows.writerow([name, name.partition("-")[0], *cells])
    assert main(["data", "index", str(path), "--out", str(tmp_path / "index"), "--multi-hot"]) == 0
    assert Manifest.read(tmp_path / "index").class_names == tuple(heads[2:])
    numbers = {number: heads[2:].index(name) for number, name in enumerate(NAMES)}
    expected = {name: tuple(sorted(numbers[one] for one in classes)) for name, classes in EXPECTED.items()}
    assert labels_by_file(tmp_path / "index") == expected
    assert has_validation(path, multi_hot=True)
    (tmp_path / "names").write_text("cow\n")
    without_images = ["data", "subset", str(tmp_path / "index"), "--class-list", str(tmp_path / "names")]
    assert main([*without_images, "--out", str(tmp_path / "cows")]) != 0
    assert "the chosen classes have no images" in capsys.readouterr().err
    path.write_text(path.read_text().replace(",-1", ",2", 1))
    assert main(["data", "index", str(path), "--out", str(tmp_path / "wrong"), "--multi-hot"]) == 2
    path.unlink()


def test_tables_that_contradict_themselves_are_refused(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, separator, message in (
        (
            "file,label\n{0},cat\n{0},dog\n",
            None,
            "is in line 2 already: leave one out; where images have several labels",
        ),
        ("file,label,split\n{0},cat,train\n{0},dog,val\n", ";", "is in another split in line 2"),
        ("file,label\n{0},\n", ";", "no image has any label"),
        ("file,label\n{0},cat\n", "", "--label-separator is empty"),
    ):
        path = table.with_name("wrong.csv")
        path.write_text(text.format("train-000.jpg"))
        more = [] if separator is None else ["--label-separator", separator]
        assert main(["data", "index", str(path), "--out", str(tmp_path / "index"), *more]) == 2
        assert message in capsys.readouterr().err
        path.unlink()


def test_lists_of_webdataset_and_parquet(tmp_path: Path) -> None:
    lists = [[3, 0], [], 2, [1, 4]]  # a number is a list of one
    picture = jpeg(photograph(1, 40, 40))
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:
        for number, value in enumerate(lists):
            kinds = (
                ("jpg", picture),
                ("cls", json.dumps(value).encode()),
                ("json", b'{"all": %s}' % json.dumps(value).encode()),
            )
            for kind, content in kinds:
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    expected = sorted([(0, 3), (), (2,), (1, 4)])
    for name, more in (("cls", []), ("json", ["--label-key", "all"])):
        out = tmp_path / name
        assert main(["data", "index", str(tmp_path / "tars"), "--out", str(out), *more]) == 0
        assert sorted(sets_in(out)) == expected
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    values = [value if isinstance(value, list) else [value] for value in lists]
    columns = {"image": [{"bytes": picture}] * 4, "label": pyarrow.array(values, pyarrow.list_(pyarrow.int64()))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    arguments = ["--source", str(tmp_path / "train.parquet"), "--out", str(tmp_path / "parquet")]
    assert main(["data", "convert", "parquet", *arguments]) == 0
    assert sorted(sets_in(tmp_path / "parquet")) == expected


def test_lists_of_mds(tmp_path: Path) -> None:
    lists = [[3, 0], [], 2, [1, 4]]
    rows = [(jpeg(photograph(1, 40, 40)), json.dumps(value).encode()) for value in lists]
    write_mds(tmp_path / "mds", {"x": ("jpeg", None), "y": ("json", None)}, rows)
    assert main(["data", "index", str(tmp_path / "mds"), "--out", str(tmp_path / "index")]) == 0
    assert sorted(sets_in(tmp_path / "index")) == sorted([(0, 3), (), (2,), (1, 4)])


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Class folders, in which files are copies of others, or links."""
    folder = tmp_path / "photos"
    for number, name in enumerate(("cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/4.jpg", "eel/5.jpg")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg(photograph(number, 40, 40)))
    shutil.copy(folder / "cat" / "1.jpg", folder / "dog" / "copy.jpg")
    (folder / "eel" / "hard.jpg").hardlink_to(folder / "cat" / "1.jpg")
    (folder / "eel" / "link.jpg").symlink_to("../dog/3.jpg")
    shutil.copy(folder / "dog" / "4.jpg", folder / "dog" / "again.jpg")  # the same class twice
    return folder


def test_one_file_in_several_class_folders(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index, converted = tmp_path / "index", tmp_path / "converted"
    assert main(["data", "index", str(shared), "--out", str(index), "--several-labels"]) == 0
    expected = {"1.jpg": (0, 1, 2), "2.jpg": (0,), "3.jpg": (1, 2), "4.jpg": (1,), "5.jpg": (2,)}
    assert labels_by_file(index, ("train",)) == expected
    command = ["data", "convert", "folder", "--train", str(shared), "--out", str(converted), "--several-labels"]
    assert main([*command, "--validation-fraction", "0.4"]) == 0
    assert labels_by_file(converted) == expected
    assert main(["data", "index", str(shared), "--out", str(tmp_path / "plain")]) == 0
    assert len(Split(tmp_path / "plain", "train")) == 9
    # An image in both splits is refused, and folders that share none.
    both = tmp_path / "both"
    shutil.copytree(shared / "cat", both / "train" / "cat")
    shutil.copytree(shared / "dog", both / "train" / "dog")
    shutil.copytree(shared / "dog", both / "val" / "dog")
    capsys.readouterr()
    assert main(["data", "index", str(both), "--out", str(tmp_path / "no"), "--several-labels"]) == 2
    assert "is the same image as " in (error := capsys.readouterr().err) and "in another split" in error
    shutil.rmtree(both / "val")
    (both / "train" / "dog" / "copy.jpg").unlink()
    assert main(["data", "index", str(both / "train"), "--out", str(tmp_path / "no"), "--several-labels"]) == 2
    assert "no image is in two class folders" in capsys.readouterr().err


def sets_in(root: Path) -> list[tuple[int, ...]]:
    split = Split(root, "train")
    assert not split.label_kind.is_class
    return [split.label_kind.classes_of(label) for label in split.rows["label"].tolist()]


def test_what_needs_one_label_refuses_several(
    several: Path, several_config: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="its images have several labels, and this needs one"):
        Split(several, "train").label_kind.require_class("photos")
    damaged = tmp_path / "damaged"
    shutil.copytree(several, damaged)
    for label_sets, message in (
        ("0,5", "label_sets has class 5 of 5"),
        ("9" * 5000, "label_sets is '9"),
        ("0 1,2;", "label_sets is"),
    ):
        values = json.loads((several / "dataset.json").read_text())
        (damaged / "dataset.json").write_text(json.dumps(values | {"label_sets": label_sets}))
        with pytest.raises(DatasetError, match=message):
            Split(damaged, "train")
    for settings in ({"shuffle": "balanced"}, {"reader": "dali"}):
        with pytest.raises(ConfigError, match=r"(shuffle balanced|reader dali) is for one label an image"):
            TrainLoader(str(several), batch_size=4, **settings)
    subset = ["data", "subset", str(several), "--images-per-class", "2", "--out", str(tmp_path / "two")]
    assert main(subset) == 2
    assert "--images-per-class is for one label an image" in capsys.readouterr().err
    plain = load_config(several_config)
    binary = plain.replace({"loss.name": "binary-cross-entropy"})
    for config, message in (
        (
            plain,
            "loss.name cross-entropy is for one label an image, and .* has several: use binary-cross-entropy, asym",
        ),
        (binary.replace({"data.shuffle": "balanced"}), "data.shuffle balanced is for one label"),
        (binary.replace({"hooks.ledger": True}), "hooks.ledger true is for one label"),
        (binary.replace({"run.best_by": "balanced-top1"}), "run.best_by balanced-top1 is for .* use mean-ap"),
        (binary.replace({"loss.name": "zlpr", "mixup.alpha": 0.2}), "mixup.alpha, .* is for one label"),
        (binary.replace({"loss.name": "two-way", "loss.label_smoothing": 0.1}), "loss.label_smoothing is for one"),
        (plain.replace({"data.root": str(dataset), "loss.name": "poly"}), "loss.name is poly, which is for several"),
        (
            plain.replace({"data.root": str(dataset), "run.best_by": "mean-ap"}),
            "run.best_by is mean-ap, which evaluations of",
        ),
        (plain.replace({"data.root": str(dataset), "run.f1_threshold": 0.3}), "run.f1_threshold is 0.3, which is for"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(config, Launch(world_size=1, port=1), CPU)


def test_a_subset_has_the_chosen_classes_alone(several: Path, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("fox\ncat\n")
    subset = ["data", "subset", str(several), "--out"]
    assert main([*subset, str(tmp_path / "two"), "--class-list", str(tmp_path / "names")]) == 0
    assert Manifest.read(tmp_path / "two").class_names == ("cat", "fox")
    numbers = {1: 0, 4: 1}
    of_each = {file: tuple(numbers[one] for one in classes if one in numbers) for file, classes in EXPECTED.items()}
    assert labels_by_file(tmp_path / "two") == {file: classes for file, classes in of_each.items() if classes}
    assert main([*subset, str(tmp_path / "all")]) == 0
    assert labels_by_file(tmp_path / "all") == EXPECTED


def test_duplicates_show_all_labels(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "duplicates", str(several)]) == 0
    assert "near-duplicates" in capsys.readouterr().out


def logits_and_sets() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(8, 5) * 3
    targets = torch.stack([torch.arange(8), torch.arange(8).flip(0)], dim=1)  # partners in reverse order, as in timm
    return logits, targets, torch.full((8,), 0.7)


SETS = [(0, 1), (2,), (), (4, 0), (3,), (1, 4), (2, 3), (0,)]
CLASSES = TrainingClasses(names=NAMES, counts=np.array([4, 1, 3, 2, 5]), num_images=9, label_kind=SetsOfClasses(SETS))


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["binary-cross-entropy", *LossConfig.TIMM_LOSSES])
def test_losses_are_timms(name: str, smoothing: float, mixes: bool) -> None:
    """As timm's train.py builds them: with Mixup, that smooths the targets instead of the loss."""
    create = pytest.importorskip("timm.loss._loss_factory").create_classification_loss
    if name in BINARY_TARGETS and (smoothing or mixes):
        pytest.skip("timm refuses it too")
    kinds = {"binary-cross-entropy": "bce", "asymmetric": "asl", "two-way": "twoway", "distribution-balanced": "db"}
    more: dict[str, Any] = {"class_counts": CLASSES.counts.tolist(), "num_samples": 9} if name[0] == "d" else {}
    arguments: dict[str, Any] = {}
    if name == "asymmetric":
        arguments = {"gamma_neg": 3.0, "clip": 0.1}
        more = {"asl_gamma_neg": 3.0, "asl_clip": 0.1, "pos_weight": 2.0}
    theirs = create(kinds.get(name, name), multi_label=True, smoothing=smoothing, soft_targets=mixes, **more)
    logits, targets, lambdas = logits_and_sets()
    lambdas = lambdas if mixes else torch.ones(8)
    hot = torch.zeros(8, 5)
    for row, classes in enumerate(SETS):
        hot[row, list(classes)] = 1
    soft = mixup_target(hot, 5, lam=0.7, smoothing=smoothing, multi_label=True) if mixes else hot
    positive = 2.0 if name == "asymmetric" else 1.0
    loss = LossConfig(name=name, label_smoothing=smoothing, kwargs=arguments, positive_weight=positive)
    settings = config_of(loss=loss, mixup=MixupConfig(alpha=0.2 if mixes else 0.0))
    objective = make_objective(settings, nn.Identity(), 5, CPU, CLASSES)
    ours, _ = objective(logits, logits, targets, lambdas)
    torch.testing.assert_close(ours, theirs(logits, soft))
    right = sum(bool(hot[row, best]) for row, best in enumerate(logits.argmax(1).tolist()))
    assert int(objective.count_correct(logits, targets)) == right


def test_a_loss_of_ones_own(monkeypatch: pytest.MonkeyPatch, several_config: Path, dataset: Path) -> None:
    """Its targets are mixed and smoothed; it is refused with one label an image."""

    def focal(config: LossConfig, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return ((1 - (-entropy).exp()) ** 2 * entropy).mean()

    monkeypatch.setitem(LOSSES_OF_SEVERAL, "binary-focal", focal)
    logits, targets, lambdas = logits_and_sets()
    loss = LossConfig(name="binary-focal", label_smoothing=0.1)
    config = load_config(several_config).replace({"loss.name": "binary-focal", "loss.label_smoothing": 0.1})
    prepare(config, Launch(world_size=1, port=1), CPU)
    ours, _ = make_objective(config, nn.Identity(), 5, CPU, CLASSES)(logits, logits, targets, lambdas)
    rows = MultiHot(SetsOfClasses(SETS), 5, CPU)(targets)
    soft = 0.9 * (0.7 * rows[:, 0] + 0.3 * rows[:, 1]) + 0.05
    torch.testing.assert_close(ours, focal(loss, logits, soft))
    with pytest.raises(ConfigError, match=r"loss\.name is binary-focal, which is for several labels"):
        prepare(config.replace({"data.root": str(dataset)}), Launch(world_size=1, port=1), CPU)


def test_arguments_that_a_loss_does_not_take_are_named() -> None:
    settings = config_of(loss=LossConfig(name="poly", kwargs={"gama": 1}))
    with pytest.raises(
        ConfigError, match=r"loss\.kwargs: timm.loss.PolyBinaryCrossEntropy .* does not take them .*gama"
    ):
        make_objective(settings, nn.Identity(), 5, CPU, CLASSES)


def test_measures_are_scikit_learns() -> None:
    random = np.random.default_rng(0)
    own = random.random((300, 6)) < np.array([0.5, 0.1, 0.02, 0.9, 0.3, 0])
    scores = random.normal(size=(300, 6)) + own
    scores[:, 4] = scores[:, 4].round(1)  # equal scores
    theirs = average_precision_score(own[:, :5], scores[:, :5], average=None)
    np.testing.assert_allclose(average_precisions(scores, own)[:5], theirs, rtol=0, atol=1e-12)
    assert np.isnan(average_precisions(scores, own)[5])
    # What scikit-learn refuses: NaN is the lowest score, and equal infinities are ties, in whatever rows.
    lowest, infinite = (np.where(scores > 0.7, value, scores) for value in (-9.0, np.inf))
    broken = np.where(scores > 0.7, np.nan, scores)
    np.testing.assert_array_equal(average_precisions(broken, own), average_precisions(lowest, own))
    np.testing.assert_array_equal(average_precisions(infinite, own), average_precisions(infinite.clip(max=9), own))
    np.testing.assert_allclose(average_precisions(np.full((300, 6), np.nan), own)[:5], own[:, :5].mean(axis=0))
    for ours, average in zip(f1_scores(scores > 0, own), ("micro", "macro", "samples"), strict=True):
        assert ours == pytest.approx(f1_score(own, scores > 0, average=average, zero_division=0), abs=1e-12)


def test_a_split_without_labels_is_refused(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlabelled, index = table.parent / "unlabelled.csv", tmp_path / "index"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    unlabelled.write_text(
        "\n".join(",".join([file, "" if split == "val" else label, split]) for file, label, split in rows)
    )
    assert main(["data", "index", str(unlabelled), "--out", str(index), "--label-separator", ";"]) == 0
    path = tmp_path / "config.py"
    path.write_text(TINY_CONFIG.format(root=str(index)))
    assert main(["train", "--config", str(path), "--run.dir", str(tmp_path / "run"), "--loss.name", "asymmetric"]) == 2
    assert "images of the validation split of" in (printed := capsys.readouterr().err) and "has a label" in printed


def test_steps_are_those_of_a_plain_loop(several_config: Path, tmp_path: Path) -> None:
    """Of a few lines of torch, with the labels as they were written into the table."""
    still: dict[str, Any] = {
        f"model.kwargs.{name}": 0.0 for name in ("pos_drop_rate", "proj_drop_rate", "drop_path_rate")
    }
    settings = {"loss.name": "binary-cross-entropy", "optimizer.name": "sgd", "precision.dtype": "fp64"}
    still |= {"optimizer.weight_decay": 0.0, "optimizer.clip_grad_norm": None}
    config = load_config(several_config).replace(still | settings | {"run.dir": str(tmp_path / "run")})
    plan = prepare(config, Launch(world_size=1, port=1), CPU)
    trainer = build_trainer(config, plan.layout, plan.num_classes, CPU, plan.classes)
    model = copy.deepcopy(trainer.model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    labels = [EXPECTED[Path(name).name] for name in plan.split.file_names()]
    ours = build_loader(plan)
    theirs = build_loader(plan)
    for step in range(3):
        trainer.step(step, 0.1, ours)
        for _ in range(8):
            batch = theirs.next()
            hot = torch.tensor(
                [[float(one in labels[image]) for one in range(5)] for image in batch.micro_batch.images]
            )
            share = batch.lambdas[:, None]
            mixed = share * hot + (1 - share) * hot[batch.micro_batch.partners]
            loss = F.binary_cross_entropy_with_logits(model(batch.images.double()), mixed.double())
            (loss / 8).backward()
        plain.step()
        plain.zero_grad()
    reached = dict(model.named_parameters())
    differences = {name: (own - reached[name]).abs().max().item() for name, own in trainer.model.named_parameters()}
    assert max(differences.values()) < 1e-6, differences  # targets are mixed in float32 here


def test_loaders_have_the_trainers_targets(several: Path, several_config: Path) -> None:
    config = load_config(several_config).replace({"loss.name": "binary-cross-entropy", "mixup.cutmix_alpha": 1.0})
    objective = make_objective(config, nn.Identity(), 5, CPU, training_classes(Split(several, "train")))
    seen: list[torch.Tensor] = []
    objective._loss._dense = lambda logits, soft: seen.append(soft) or soft.sum()  # type: ignore[union-attr]
    plan = prepare(config, Launch(world_size=1, port=1), CPU)
    trainers = build_loader(plan)
    loader = TrainLoader.from_config(config, device="cpu")
    pairs = TrainLoader.from_config(config, device="cpu", targets="pairs")
    for (images, targets), (same, rows, lambdas), _ in zip(loader, pairs, range(3), strict=False):
        batch = trainers.next()
        objective(torch.zeros(len(images), 5), images, batch.targets, batch.lambdas)
        assert torch.equal(batch.images, images) and torch.equal(images, same)
        assert targets.dtype == torch.float32 and torch.equal(targets, seen[-1])
        share = lambdas[:, None]
        assert torch.equal(share * rows[:, 0] + (1 - share) * rows[:, 1], targets)
        assert (lambdas < 1).any()
    names = [Path(file).name for file in plan.split.file_names()]
    plain = TrainLoader(several, batch_size=4, image_size=32, device="cpu", views=2)
    _, targets = next(iter(plain))
    assert targets.tolist() == [hot(names[image]) for image in plain.micro_batch.images]
    evaluation = EvalLoader(several, batch_size=4, image_size=32, device="cpu")
    rows = torch.cat([labels for _, labels in evaluation])
    split = Split(several, "validation")
    assert rows.tolist() == [hot(Path(file).name) for file in split.file_names()]


def hot(name: str) -> list[float]:
    return [float(one in EXPECTED[name]) for one in range(5)]


class FirstPixels(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 3, 3:8] * 4


def _evaluate(rank: int, ranks: int, config_file: str, out: str) -> None:
    config = load_config(config_file).replace({"batch.micro_batch": 4, "run.f1_threshold": 0.6})
    split = Split(config.data.root, "validation")
    with joined(LaunchOptions(), config) as (launch, device):
        layout = Layout.from_config(launch, config.parallel)
        evaluator = SeveralLabelsEvaluator(split, config, device, layout, num_threads=1, num_shown=3)
        result = evaluator.run(FirstPixels(), Precision(config.precision, device).autocast())
    if rank == 0:
        values = {**vars(result), "seconds": 0.0}
        Path(out).write_text(json.dumps(values))


@pytest.mark.thorough
def test_an_evaluation_is_the_same_on_any_number_of_ranks(several_config: Path, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2, 3):
        out = tmp_path / f"{ranks}.json"
        in_ranks(ranks, _evaluate, ranks, str(several_config), str(out))
        results.append(json.loads(out.read_text()))
    config = load_config(several_config)
    split = Split(config.data.root, "validation")
    pipeline = EvaluationPipeline(split, [np.arange(13)], config.data, pixel_format(config, CPU, 1))
    images, _ = pipeline.run()
    scores = FirstPixels()(images).double().numpy()
    own = np.array([[one in EXPECTED[Path(file).name] for one in range(5)] for file in split.file_names()])
    present = own.any(axis=0)
    for result in results:
        theirs = average_precision_score(own[:, present], scores[:, present], average="macro")
        assert result["mean_ap"] == pytest.approx(theirs, abs=1e-12)
        predicted = 1 / (1 + np.exp(-scores)) > 0.6
        assert result["micro_f1"] == pytest.approx(f1_score(own, predicted, average="micro"), abs=1e-12)
        assert result["f1_threshold"] == 0.6
        labelled = own.any(axis=1)
        assert result["top1"] == own[labelled, scores[labelled].argmax(1)].mean()
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-12)
    assert len({result["mean_ap"] for result in results}) == 1


RUN = words(
    "--loss.name binary-cross-entropy --loss.label_smoothing 0.1 --loss.class_weights effective-0.9 "
    "--loss.positive_weight balanced --mixup.alpha 0.2 --mixup.cutmix_alpha 1 --run.best_by mean-ap --ema.decay 0.5 "
    "--precision.dtype fp64"
)
ON_SEVERAL = Compared(RUN, 3, resumed=True)
SHORT = words("--run.epochs 2 --schedule.warmup_epochs 1")


@pytest.mark.thorough
def test_a_run_does_not_depend_on_ranks_and_resumes_with_the_same_bits(
    several_config: Path, train: Train, run_command: Train, tmp_path: Path
) -> None:
    train("one", *RUN, *SHORT, config=several_config)
    train("three", *RUN, *SHORT, config=several_config, ranks=ON_SEVERAL.ranks)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    assert ON_SEVERAL.bound is not None
    assert state_difference(tmp_path / "one", tmp_path / "three") < ON_SEVERAL.bound
    train("resumed", *RUN, *SHORT, "--run.max_steps", "2", config=several_config)
    log = train("resumed", *RUN, *SHORT, config=several_config)
    assert "resuming from step 2" in log
    assert state_difference(tmp_path / "one", tmp_path / "resumed") == 0
    assert prove(tmp_path / "resumed", dataset=None, all_draws=True)
    first, last = events(tmp_path / "resumed", "eval")
    best = max((first, last), key=lambda event: (event["ema_mean_ap"], event["step"]))
    assert (tmp_path / "resumed" / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    assert f"mAP {last['mean_ap']:.2%}  F1 {last['micro_f1']:.2%} micro, {last['macro_f1']:.2%} macro" in log
    printed = run_command("eval", str(tmp_path / "resumed"), "--checkpoint", "newest")
    assert f"mAP {last['ema_mean_ap']:.2%}" in printed and "lowest average precision: " in printed
    rows = list(csv.DictReader((tmp_path / "resumed" / "predictions" / "step-00000004" / "classes.csv").open()))
    assert [row["class"] for row in rows] == [*NAMES]
    scores = [float(row["average precision"]) for row in rows]
    assert np.nanmean(scores) == pytest.approx(last["ema_mean_ap"])
    report = (tmp_path / "resumed" / "report" / "index.html").read_text()
    assert "Mean average precision" in report and f"mAP {best['ema_mean_ap']:.2%}" in report
    table, picture = tmp_path / "predictions.csv", tmp_path / "mistakes.png"
    newest = ("predict", str(tmp_path / "resumed"), "--checkpoint", "newest")
    printed = run_command(*newest, "--csv", str(table))
    assert f"mAP {last['ema_mean_ap']:.2%} decoded by DALI" in printed and "lowest average precision: " in printed
    rows = list(csv.DictReader(table.open()))
    truths = {Path(row["file"]).name: row["truth"] for row in rows}
    names = {file: [NAMES[one] for one in classes] for file, classes in EXPECTED.items() if file.startswith("val")}
    assert truths == {file: ", ".join(own) or "no class" for file, own in names.items()}
    assert float(rows[0]["score 1"]) >= float(rows[0]["score 2"])
    printed = run_command(*newest, "--mistakes", str(picture))
    lines = printed.splitlines()
    assert f"mAP {last['ema_mean_ap']:.2%} of 13 validation images" in printed
    assert any(
        line.split() == ["bear", f"{scores[0]:.1%}", "of", f"{sum(0 in c for c in EXPECTED_VAL)}"] for line in lines
    )
    assert sum(": is " in line or ": has no class" in line for line in lines) == 5 and picture.is_file()
    images = blame(tmp_path / "resumed", 3, dataset=None, count=2, picture=None)
    logged = next(event["loss"] for event in events(tmp_path / "one", "train") if event["step"] == 3)
    assert np.mean([image.loss for image in images]) == pytest.approx(logged, rel=1e-9)
    assert {image.caption for image in images[:2]} != {""}
    assert (
        f"mAP {best['ema_mean_ap']:.2%} of 13 validation images"
        in Fit(Namespace(out=tmp_path / "resumed"), [])._summary()
    )


def test_the_worst_mistakes_are_the_largest_errors_of_a_class() -> None:
    own = np.array([[True, False, False], [False, False, False], [True, True, True], [True, True, False]])
    scores = np.array([[3, -1, -2], [-1, 5, 1], [-2, 4, -6], [1, 4, -3]], dtype=np.float32)
    judged = JudgedSeveral(own, scores)
    assert judged.worst(5).tolist() == [2, 1]
    names = ("a", "b", "c")
    assert judged.captions(0, names) == ("is a: 95.3%", "taken for b: 26.9%")
    assert judged.captions(1, names) == ("has no class", "taken for b: 99.3%")
    assert judged.captions(2, names) == ("is c: 0.2%", "has all classes")


def test_init_and_fit_know_several_labels(several: Path, table: Path, tmp_path: Path) -> None:
    file = tmp_path / "several.py"
    write_config(str(several), file, model="resnet18", gpu_memory_gb=16)
    config = load_config(file)
    assert (config.loss.name, config.run.best_by) == ("binary-cross-entropy", "mean-ap")
    assert config.loss.label_smoothing == 0
    prepare(config.replace({"run.device": "cpu"}), Launch(world_size=1, port=1), CPU)
    parser = command_parser()
    for more in (["--label-separator", ";"], ["--multi-hot"]):
        options = parser.parse_args(["fit", str(table), "--out", str(tmp_path / "run"), *more])
        (index, *_) = Fit(options, [])._steps()
        assert "--validation-fraction" not in index.words, "the table has a column that says it"
        options = parser.parse_args(index.words)
        assert (options.label_separator, options.multi_hot) == ((";", False) if len(more) == 2 else (None, True))
    assert main(["fit", str(several), "--out", str(tmp_path / "run"), "--multi-hot"]) == 2
