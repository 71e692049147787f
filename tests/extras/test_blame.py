"""Wrong labels that were planted are found: by `dali-train blame` in a step, without a log of samples, and by
`dali-train suspects` in the ledger."""

import csv
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_train import cli
from dali_train.config import DataConfig, load_config
from dali_train.data.dataset.index import Split, open_split
from dali_train.errors import ConfigError
from dali_train.extras.blame.step import blame
from dali_train.extras.image_names import file_names
from tests.conftest import Train
from tests.helpers import losses, samples, words

CLASSES = {"dark": 40, "bright": 210}
WRONG = 3
# Every step has all images once. The rate is that of a network which learns brightness at once.
OPTIONS = words(
    "--batch.global_batch 24 --batch.micro_batch 4 --run.epochs 40 --run.checkpoint_every_steps 35 --mixup.alpha 0 "
    "--run.eval_every_epochs none --hooks.log_every_steps 1 --hooks.trace_samples false --optimizer.name adamw "
    "--optimizer.lr 3e-3 --schedule.warmup_epochs 0"
)


@pytest.fixture(scope="module")
def mislabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of 24 images, of which three bright ones are called dark."""
    directory = tmp_path_factory.mktemp("blame")
    generator = np.random.default_rng(0)
    for name, mean in CLASSES.items():
        for number in range(12):
            pixels = generator.normal(mean, 10, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            is_wrong = name == "bright" and number < WRONG
            folder = directory / "photos" / ("dark" if is_wrong else name)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{'wrong' if is_wrong else name}-{number:02}.jpg")
    assert cli.main(words(f"data index {directory / 'photos'} --out {directory / 'index'}")) == 0
    return directory / "index"


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "ledger"), [(1, "false"), (3, "true")])
def test_wrong_labels_are_found_first(
    ranks: int, ledger: str, mislabelled: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run", "--data.root", str(mislabelled), *OPTIONS, "--hooks.ledger", ledger, ranks=ranks)
    run = tmp_path / "run"
    assert not list(run.glob("samples.rank*.jsonl"))
    capsys.readouterr()
    step = 40
    images = blame(run, step, dataset=None, count=8, picture=None)
    split = Split(mislabelled, "train")
    names = [split.files.name(int(split.rows[one.image]["shard"])) for one in images[:WRONG]]  # type: ignore[union-attr]
    assert all("wrong" in name for name in names), names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert len(images) == 24 and len({one.image for one in images}) == 24
    # The step's loss is that which the run has recorded, up to rounding over the ranks.
    recorded = losses(run)[step - 1]
    assert sum(one.loss for one in images) / 24 == pytest.approx(recorded, rel=1e-4)
    assert sum(one.share or 0.0 for one in images) == pytest.approx(1)
    assert images[0].pixels.ndim == 3 and (run / "blame" / f"step-{step:08d}.png").stat().st_size > 1000
    if ledger == "true":
        check_suspects(run, set(names), train, capsys)
        return
    assert cli.main(["suspects", str(run)]) == 2
    assert "has no ledger: train with --hooks.ledger true" in capsys.readouterr().err


def check_suspects(run: Path, names: set[str], train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """They are the wrong labels, with what they should be; and a run leaves them out."""
    assert cli.main(["suspects", str(run), "--images", "2"]) == 0
    printed = capsys.readouterr().out
    table = run / "suspects" / "suspects.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["file"] for row in rows} == names
    assert {(row["label"], row["looks like"]) for row in rows} == {("dark", "bright")}
    assert all(float(row["margin"]) < 0 for row in rows), rows
    assert printed.startswith("3 of 24 images") and sum(name in printed for name in names) == 2
    assert (run / "suspects" / "suspects.png").stat().st_size > 1000
    root = load_config(run / "config.json").data.root
    without = ("--data.exclude", str(table), "--run.max_steps", "7", "--hooks.trace_samples", "true")
    train("without", "--data.root", root, *OPTIONS, *without)
    seen = [image for images in samples(run.with_name("without")).values() for image in images]
    assert len(seen) == 7 * 24 and len(set(seen)) == 21 and not {int(row["image"]) for row in rows} & set(seen)


@pytest.mark.thorough
@pytest.mark.parametrize("epochs", ["1", "3"])
def test_suspects_are_of_the_second_half_of_a_run(
    epochs: str, mislabelled: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step reaches into one more epoch, of which there are not all images."""
    more = ("--run.epochs", epochs, "--batch.global_batch", "20", "--hooks.ledger", "true")
    train("run", "--data.root", str(mislabelled), *OPTIONS, *more)
    capsys.readouterr()
    assert cli.main(["suspects", str(tmp_path / "run")]) == 0
    assert " of 24 images are suspect" in capsys.readouterr().out
    if epochs == "3":
        for number in (1, 2, 3):
            (tmp_path / "run" / "ledger" / f"epoch-{number:05d}.npy").unlink()
        assert cli.main(["suspects", str(tmp_path / "run")]) == 2
        assert "has a ledger of epochs up to 0 and was trained for 3.3" in capsys.readouterr().err


def test_a_list_of_another_dataset_is_refused(mislabelled: Path, tmp_path: Path) -> None:
    split = Split(mislabelled, "train")
    first, second = file_names(split, np.array([5, 20]))
    table = tmp_path / "list.csv"
    data = DataConfig(root=str(mislabelled), exclude=str(table))
    mixed = DataConfig(root=str(mislabelled), mix=(("photos", str(mislabelled), 1.0),), exclude=str(table))
    for header, names in {
        "image,file,label": (first, second),
        "image,label,file": ("dark", "dark"),  # a row without its last cell
        "image,note,file": ("?," + first, "?," + second),
        "image,file,more": (f"photos: {first}", f"photos: {second}"),
        "5,x,file": ("a", "b"),  # no heading
    }.items():
        table.write_text(f"{header}\n5,{names[0]}\n20,{names[1]}\n")
        assert open_split(data, "train").num_images == open_split(mixed, "train").num_images == 22
    table.write_text(f"image,file\n5,{second}\n20,{first}\n")
    assert open_split(data, "train", local=False).num_images == 22  # without the images
    for one in (data, mixed):
        with pytest.raises(
            ConfigError, match=r"in which image 5 is '.*, and here it is .*the list is of another dataset"
        ):
            open_split(one, "train")


def test_the_worst_step_is_found(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = losses(plain_run)
    rises = [after - before for before, after in pairwise(recorded)]
    picture = tmp_path / "step.png"
    status = cli.main(["blame", str(plain_run), "--picture", str(picture), "--images", "2"])
    printed = capsys.readouterr()
    if max(rises) <= 0:
        assert status == 2 and "--step" in printed.err
        return
    expected = rises.index(max(rises)) + 2
    assert status == 0 and f"\nstep {expected}: " in printed.out and picture.is_file()


def test_steps_that_are_not_there(plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["blame", str(plain_run), "--step", "10000"]) == 2
    assert "has recorded steps" in capsys.readouterr().err
    assert cli.main(["blame", str(plain_run), "--step", "0"]) == 2
