"""Datasets as people have them: every line of docs/your-dataset.md, and tables of every dialect."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dali_train import cli
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import DatasetError
from dali_train.extras.formats.tables import has_validation
from tests.conftest import REPOSITORY
from tests.convert.files import (
    SYNSETS,
    small_photograph,
    tar_bytes,
    write_devkit,
    write_tar,
    write_training_archive,
    write_validation_archive,
)
from tests.dataset.test_index import write_records

PAGE = (REPOSITORY / "docs" / "your-dataset.md").read_text()
CLASSES = ("n01440764", "n01443537")
Labels = dict[str, str]  # an image's name -> its class, or its classes with a comma between


def put(root: Path, images: Iterable[str], files: dict[str, Any] | None = None) -> None:
    """Write another photograph for each image, and files of text or bytes."""
    for path in images:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(small_photograph(sum(map(ord, path)) * 31 + len(path)))
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def in_parquet(**columns: list[Any]) -> bytes:
    content = BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()


def of_classes(pattern: str, classes: Iterable[str] = CLASSES, count: int = 2) -> list[str]:
    return [pattern.format(c=name, n=number) for name in classes for number in range(count)]


def labels(out: Path, split: str) -> Labels:
    """Return the class of each image of a split, by the name of its file."""
    opened = Split(out, split)  # type: ignore[arg-type]
    names = opened.manifest.class_names
    numbers = opened.rows["label"].tolist()
    texts = [",".join(names[one] for one in opened.label_kind.classes_of(number)) for number in numbers]
    return {re.split("[/:]", name)[-1]: text for name, text in zip(opened.file_names(), texts, strict=True)}


def imagenet_archives(root: Path) -> None:
    write_training_archive(root / "imagenet" / "ILSVRC2012_img_train.tar", num_images=1)
    write_validation_archive(root / "imagenet" / "ILSVRC2012_img_val.tar", 2)
    write_devkit(root / "imagenet" / "ILSVRC2012_devkit_t12.tar.gz", [*SYNSETS[:2]])


def imagenet_folders(root: Path) -> None:
    put(root / "imagenet", [*of_classes("train/{c}/{c}_{n}.JPEG"), *of_classes("val/{c}/val_{c}_{n}.JPEG")])


def imagenet_of_kaggle(root: Path) -> None:
    inner = root / "imagenet" / "ILSVRC" / "Data" / "CLS-LOC"
    names = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 4)]
    put(inner, [*of_classes("train/{c}/{c}_{n}.JPEG"), *(f"val/{name}.JPEG" for name in names), "test/t_1.JPEG"])
    rows = [f"{name},{CLASSES[n % 2]} 85 1 499 272 {CLASSES[n % 2]} 1 2 3 4\n" for n, name in enumerate(names)]
    lists = {"ImageSets/CLS-LOC/val.txt": "ILSVRC2012_val_00000001 1\n", "Annotations/CLS-LOC/train/a.xml": ""}
    put(root / "imagenet" / "ILSVRC", [], lists)
    solution = "ImageId,PredictionString\n" + "".join(rows)
    mapping = "".join(f"{name} fish, a fish\n" for name in CLASSES)
    files = {"LOC_val_solution.csv": solution, "LOC_synset_mapping.txt": mapping}
    put(root / "imagenet", [], files | {"LOC_sample_submission.csv": f"ImageId,PredictionString\nt_1,{CLASSES[0]}\n"})


def imagenet_in_parquet(root: Path) -> None:
    feature = {"image": {"_type": "Image"}, "label": {"names": [*CLASSES], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": feature}})}
    (root / "imagenet-1k" / "data").mkdir(parents=True)
    for split, numbers in (("train", range(4)), ("validation", range(4, 6)), ("test", range(6, 7))):
        images = [{"bytes": small_photograph(number), "path": f"{split}_{number}.JPEG"} for number in numbers]
        content = pyarrow.table({"image": images, "label": [-1 if split == "test" else n % 2 for n in numbers]})
        path = root / "imagenet-1k" / "data" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(content.replace_schema_metadata(metadata), path)


def imagenet_in_webdataset(root: Path) -> None:
    for split, name, numbers in (("train", "0000", range(4)), ("validation", "00", range(4, 6))):
        members = [
            (f"{CLASSES[number % 2]}_{number}.{ending}", content)
            for number in numbers
            for ending, content in (
                ("cls", str(number % 2).encode()),
                ("jpg", small_photograph(number)),
                ("json", json.dumps({"label": number % 2, "class_name": CLASSES[number % 2]}).encode()),
            )
        ]
        write_tar(root / "imagenet-1k-wds" / f"imagenet1k-{split}-{name}.tar", members)


def imagenet_v2(root: Path) -> None:
    put(root, of_classes("imagenetv2/{c}/{n}.jpeg", "01"), {"synsets.txt": "".join(f"{name}\n" for name in CLASSES)})


def imagenet_a(root: Path) -> None:
    put(root / "imagenet-a", of_classes("{c}/0.0_{n}.jpg"), {"README.txt": f"{CLASSES[0]} 0.0_0.jpg\n"})


def imagenet_21k(root: Path) -> None:
    for name in CLASSES:
        members = [(f"{name}_{number}.JPEG", small_photograph(number + int(name[-1]))) for number in range(2)]
        (root / "winter21_whole").mkdir(exist_ok=True)
        (root / "winter21_whole" / f"{name}.tar").write_bytes(tar_bytes(members))


def tiny_imagenet(root: Path) -> None:
    root = root / "tiny-imagenet-200"
    validation = [f"val_{number}.JPEG" for number in range(3)]
    notes = "".join(f"{name}\t{CLASSES[n % 2]}\t0\t32\t44\t62\n" for n, name in enumerate(validation))
    boxes = {f"train/{name}/{name}_boxes.txt": f"{name}_0.JPEG\t0\t10\t63\t58\n" for name in CLASSES}
    lists = {"wnids.txt": "\n".join(CLASSES), "words.txt": f"{CLASSES[0]}\ttench\n", "val/val_annotations.txt": notes}
    put(root, of_classes("train/{c}/images/{c}_{n}.JPEG"), boxes | lists)
    put(root, [*(f"val/images/{name}" for name in validation), "test/images/test_0.JPEG"])


def imagenette(root: Path) -> None:
    put(root / "imagenette2-320", [*of_classes("train/{c}/{c}_{n}.JPEG"), *of_classes("val/{c}/{c}_v{n}.JPEG")])
    noisy = f"path,noisy_labels_0,is_valid\ntrain/{CLASSES[0]}/{CLASSES[0]}_0.JPEG,{CLASSES[1]},False\n"
    put(root / "imagenette2-320", [], {"noisy_imagenette.csv": noisy})


def cifar(root: Path) -> None:
    put(root / "cifar10", [*of_classes("train/{c}/{c}{n}.png"), *of_classes("test/{c}/{c}_t{n}.png")])


def places(root: Path) -> None:
    images = [*of_classes("train/{c}/{c}{n}.jpg"), *of_classes("val/{c}/{c}_v{n}.jpg")]
    lists = {"train.txt": f"train/{CLASSES[0]}/{CLASSES[0]}0.jpg 0\n", "val.txt": f"val/{CLASSES[0]}/x.jpg 0\n"}
    put(root / "places365_standard", images, lists)


def inaturalist(root: Path) -> None:
    images = [*of_classes("train/{c}/{c}{n}.jpg"), *of_classes("val/{c}/{c}_v{n}.jpg")]
    put(root / "inat2021", images, {"train.json": '{"images": []}', "val.json": '{"images": []}'})


def inaturalist_2018(root: Path) -> None:
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES)]
    for split, first, count in (("train", 0, 4), ("val", 4, 2)):
        names = [f"train_val2018/Insecta/{n % 2}/i{n}.jpg" for n in range(first, first + count)]
        put(root / "inat2018", names)
        content = {
            "images": [{"id": 7 + n, "file_name": name} for n, name in enumerate(names)],
            "annotations": [{"image_id": 7 + n, "category_id": n % 2, "id": n} for n in range(count)],
            "categories": categories,
        }
        put(root / "inat2018", [], {f"{split}2018.json": json.dumps(content)})


def openimages(root: Path) -> None:
    for split, word in (("train", "train"), ("validation", "val")):
        names = [f"{number:016x}" for number in (range(3) if word == "train" else range(3, 5))]
        put(root / "openimages", [f"{split}/{name}.jpg" for name in names])
        rows = [f"{name},verification,/m/{label},{n % 2 or label}" for n, name in enumerate(names) for label in (0, 1)]
        text = "\n".join(["ImageID,Source,LabelName,Confidence", *rows, ""])
        put(root / "openimages", [], {f"oidv7-{word}-annotations-human-imagelabels.csv": text})


def kaggles_competition(root: Path) -> None:
    put(root / "cassava", [f"train_images/{number}.jpg" for number in range(4)] + ["test_images/0.jpg"])
    rows = "".join(f"{number}.jpg,{number % 2}\n" for number in range(4))
    put(
        root / "cassava",
        [],
        {"train.csv": f"image_id,label\n{rows}", "sample_submission.csv": "image_id,label\n0.jpg,4\n"},
    )


def ham10000(root: Path) -> None:
    put(root / "ham10000", [f"HAM10000_images_part_{1 + n // 2}/ISIC_{n}.jpg" for n in range(4)])
    rows = "".join(f"HAM_{n},ISIC_{n},{'bkl' if n % 2 else 'mel'},histo,80.0\n" for n in range(4))
    put(root / "ham10000", [], {"HAM10000_metadata.csv": f"lesion_id,image_id,dx,dx_type,age\n{rows}"})


def pets(root: Path) -> None:
    put(root / "pets", [f"images/Abyssinian_{n}.jpg" for n in range(4)])
    put(root / "pets", [], {"trainval.txt": "".join(f"Abyssinian_{n} {1 + n % 2} 1 1\n" for n in range(4))})


def food(root: Path) -> None:
    put(root / "food-101", of_classes("images/{c}/{c}{n}.jpg", count=3))
    lists = {"train": of_classes("{c}/{c}{n}\n"), "test": [f"{name}/{name}2\n" for name in CLASSES]}
    put(root / "food-101", [], {f"{split}.txt": "".join(lines) for split, lines in lists.items()})


def textures(root: Path) -> None:
    put(root / "dtd", of_classes("images/{c}/{c} {n}.jpg", count=3))
    for number, split in enumerate(("train", "val", "test")):
        put(root / "dtd", [], {f"{split}1.txt": "".join(f"{name}/{name} {number}.jpg\n" for name in CLASSES)})


def birds(root: Path) -> None:
    root = root / "CUB_200_2011"
    images = of_classes("{c}/{c}{n}.jpg")
    put(root / "images", images)
    rows = [(f"{number} {name}\n", f"{number} {number % 2}\n") for number, name in enumerate(images, 1)]
    put(root, [], {"images.txt": "".join(row for row, _ in rows)})
    put(root, [], {"train_test_split.txt": "".join(row for _, row in reversed(rows))})  # another order is right, too
    run_script("birds.csv", root)


def run_script(output: str, root: Path) -> None:
    """Run the block of the page that writes such a file."""
    (script,) = (block for block in re.findall("```bash\n(.*?)```", PAGE, re.DOTALL) if output in block)
    subprocess.run(["bash", "-ec", script], cwd=root, check=True)


def celeba(root: Path) -> None:
    put(root / "img_align_celeba", [f"{n:06d}.jpg" for n in range(1, 5)])
    rows = "".join(f"{n:06d}.jpg -1  1 {'-1' if n % 2 else ' 1'}\n" for n in range(1, 5))
    parts = "".join(f"{n:06d}.jpg {max(0, n - 2)}\n" for n in range(1, 5))
    lists = {"list_attr_celeba.txt": f"4\nBald Hat Young \n{rows}", "list_eval_partition.txt": parts}
    put(root, [], lists)
    run_script("attributes.csv", root)


def tensorflow_datasets(root: Path) -> None:
    root = root / "cifar10" / "3.0.2"
    for split, count in (("train", 4), ("test", 2)):
        images = [{"image": (small_photograph(n), "byte"), "label": (n % 2, "int")} for n in range(count)]
        write_records(root / f"cifar10-{split}.tfrecord-00000-of-00001", images)
    put(root, [], {"label.labels.txt": "airplane\nautomobile\n", "dataset_info.json": "{}"})


def hubs_image_folder(root: Path) -> None:
    put(root / "photos", [f"{split}/{n:04d}.jpg" for split in ("train", "test") for n in range(3)])
    rows = [(f"{n:04d}.jpg", CLASSES[n % 2]) for n in range(3)]
    lines = "".join(json.dumps({"file_name": name, "label": label}) + "\n" for name, label in rows)
    text = "".join(f"{name},{label}\n" for name, label in rows)
    put(root / "photos", [], {"train/metadata.csv": f"file_name,label\n{text}", "test/metadata.jsonl": lines})


def fastais_table(root: Path) -> None:
    put(root / "mnist_sample", [f"train/{n}.png" for n in range(5)])
    rows = "".join(f"train/{n}.png,{3 + 4 * (n % 2)},{n > 2}\n" for n in range(5))
    put(root / "mnist_sample", [], {"labels.csv": f"name,label,is_valid\n{rows}"})


# The first word of a line of the page -> what makes its files, the images of each split, and some that must be there.
DATASETS: dict[str, tuple[Callable[[Path], None], dict[str, int], dict[str, Labels]]] = {
    "ImageNet, official archives": (imagenet_archives, {"train": 5, "validation": 2}, {}),
    "ImageNet, class folders": (imagenet_folders, {"train": 4, "validation": 4}, {}),
    "ImageNet, Kaggle": (
        imagenet_of_kaggle,
        {"train": 4, "validation": 3},
        {
            "train": {f"{CLASSES[1]}_0.JPEG": CLASSES[1]},
            "validation": {f"ILSVRC2012_val_{n + 1:08d}.JPEG": CLASSES[n % 2] for n in range(3)},
        },
    ),
    "ImageNet, Hub, Parquet": (imagenet_in_parquet, {"train": 4, "validation": 2}, {}),
    "ImageNet, Hub, WebDataset": (imagenet_in_webdataset, {"train": 4, "validation": 2}, {}),
    "ImageNet-V2": (imagenet_v2, {"train": 4}, {}),
    "ImageNet-A": (imagenet_a, {"train": 4}, {}),
    "ImageNet-21k": (imagenet_21k, {"train": 2, "validation": 2}, {}),
    "Tiny ImageNet": (
        tiny_imagenet,
        {"train": 4, "validation": 3},
        {"validation": {f"val_{n}.JPEG": CLASSES[n % 2] for n in range(3)}},
    ),
    "Imagenette": (imagenette, {"train": 4, "validation": 4}, {"train": {f"{CLASSES[0]}_0.JPEG": CLASSES[0]}}),
    "CIFAR as folders": (cifar, {"train": 4, "validation": 4}, {}),
    "Places365": (places, {"train": 4, "validation": 4}, {}),
    "iNaturalist 2021": (inaturalist, {"train": 4, "validation": 4}, {}),
    "iNaturalist 2017": (
        inaturalist_2018,
        {"train": 4, "validation": 2},
        {"train": {"i1.jpg": CLASSES[1]}, "validation": {"i4.jpg": CLASSES[0], "i5.jpg": CLASSES[1]}},
    ),
    "OpenImages": (
        openimages,
        {"train": 3, "validation": 2},
        {"train": {f"{n:016x}.jpg": "/m/0,/m/1" if n % 2 else "/m/1" for n in range(3)}},
    ),
    "A Kaggle competition": (kaggles_competition, {"train": 2, "validation": 2}, {}),
    "HAM10000": (ham10000, {"train": 4}, {"train": {f"ISIC_{n}.jpg": "bkl" if n % 2 else "mel" for n in range(4)}}),
    "Oxford Pets": (pets, {"train": 4}, {"train": {f"Abyssinian_{n}.jpg": str(1 + n % 2) for n in range(4)}}),
    "Food-101": (food, {"train": 4, "validation": 2}, {"validation": {f"{name}2.jpg": name for name in CLASSES}}),
    "DTD": (textures, {"train": 2, "validation": 2}, {"validation": {f"{name} 1.jpg": name for name in CLASSES}}),
    "CUB-200": (birds, {"train": 2, "validation": 2}, {"train": {f"{name}0.jpg": name for name in CLASSES}}),
    "CelebA": (
        celeba,
        {"train": 2, "validation": 1},
        {"train": {"000001.jpg": "Hat", "000002.jpg": "Hat,Young"}, "validation": {"000003.jpg": "Hat"}},
    ),
    "TensorFlow Datasets": (tensorflow_datasets, {"train": 4, "validation": 2}, {}),
    "An image folder of the Hub": (
        hubs_image_folder,
        {"train": 3, "validation": 3},
        {split: {f"{n:04d}.jpg": CLASSES[n % 2] for n in range(3)} for split in ("train", "validation")},
    ),
    "fastai's tables": (fastais_table, {"train": 3, "validation": 2}, {"validation": {"3.png": "7", "4.png": "3"}}),
}
LINES = [line.split(" | ") for line in PAGE.splitlines()[6:]]
LINES = LINES[: next(number for number, line in enumerate(LINES) if len(line) < 3)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0].strip("| ")[:25])
def test_each_line_of_the_page(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = [name for name in DATASETS if line[0].removeprefix("| ").startswith(name)]
    make, counts, expected = DATASETS[name]
    make(tmp_path)
    command = re.findall("`([^`]+)`", line[2])[0]
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
    out = Path(command.split()[-1])
    assert {split: facts.num_records for split, facts in Manifest.read(out).splits.items()} == counts
    for split, images in expected.items():
        found = labels(out, split)
        assert {image: found[image] for image in images} == images
    if command.startswith("data index"):
        assert cli.main(["data", "verify", str(out)]) == 0, capsys.readouterr().err


def test_the_page_has_every_dataset() -> None:
    assert len(LINES) == len(DATASETS)


DAY = date(2024, 2, 29)
CATS = {"a.jpg": "cat", "b.JPEG": "dog", "é.png": "cat"}
ROWS = "a.jpg,cat\nb.JPEG,dog\né.png,cat\n"
TSV, SEMICOLONS, BARS, SPACES = (ROWS.replace(",", separator) for separator in "\t;| ")
IDS = "a,cat\nB,dog\nE\u0301,cat\n"  # in another case, and another Unicode form
OBJECTS = [{"file_name": name, "label": label, "box": [1, 2]} for name, label in CATS.items()]
COCO = {
    "images": [{"id": n, "file_name": name} for n, name in enumerate(CATS)],
    "annotations": [{"image_id": n, "category_id": label == "dog"} for n, label in enumerate(CATS.values())],
    "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
}
JSON_LINES = "\n".join(map(json.dumps, OBJECTS))
SPLITS = "file,label,{}\na.jpg,cat,{}\nb.JPEG,dog,{}\né.png,cat,{}\n"
# Name of the table, its text, more options, the right answer: the labels (of training and of validation images, if
# there are two), or a part of the message.
Answer = Labels | tuple[Labels, Labels] | str
DIALECTS: dict[str, tuple[str, str | bytes, str, Answer]] = {
    "Parquet": ("metadata.parquet", in_parquet(file_name=[*CATS], label=[*CATS.values()], day=[DAY] * 3), "", CATS),
    "Parquet with images": (
        "metadata.parquet",
        in_parquet(file=["a"], label=["b"], image=[b"1"]),
        "",
        "cannot be read as",
    ),
    "commas": ("t.csv", f"file,label\n{ROWS}", "", CATS),
    "a byte order mark": ("t.csv", f"file,label\n{ROWS}".encode("utf-8-sig"), "", CATS),
    "UTF-16 of Excel": ("t.txt", f"file\tlabel\n{TSV}".encode("utf-16"), "", CATS),
    "Latin-1": ("t.csv", f"file,label\n{ROWS}".encode("latin-1"), "", "use CSV in UTF-8"),
    "semicolons": ("t.csv", f"file;label\n{SEMICOLONS}", "", CATS),
    "sep=": ("t.csv", f"sep=;\nfile;label\n{SEMICOLONS}", "", CATS),
    "tabs": ("t.tsv", f"file\tlabel\n{TSV}", "", CATS),
    "tabs in .csv": ("t.csv", f"file\tlabel\n{TSV}", "", CATS),
    "bars": ("t.txt", f"file|label\n{BARS}", "", CATS),
    "Windows' lines": ("t.csv", f"file,label\r\n{ROWS}".replace("\n", "\r\n").replace("\r\r", "\r"), "", CATS),
    "quotes": ("t.csv", 'file,label\n"a.jpg","cat"\n"b.JPEG","dog"\n"é.png",cat\n', "", CATS),
    "a quoted comma": (
        "t.csv",
        'file,label\na.jpg,"cat, tabby"\nb.JPEG,dog\n',
        "",
        {"a.jpg": "cat, tabby", "b.JPEG": "dog"},
    ),
    "spaces in headings": ("t.csv", f" File Name , Label \n{ROWS}", "", CATS),
    "blank lines": ("t.csv", f"\nfile,label\n\n{ROWS}\n\n", "", CATS),
    "no heading": ("t.csv", ROWS, "", CATS),
    "no heading, a key": ("t.csv", "a.jpg,7,cat\nb.JPEG,8,dog\n", "--label-key 3", {"a.jpg": "cat", "b.JPEG": "dog"}),
    "no heading, a name for a key": ("t.csv", ROWS, "--label-key breed", "--label-key is breed, and the table has no"),
    "MXNet's list": ("t.tsv", "0\t1\ta.jpg\n1\t2\tb.JPEG\n", "", "labels with --label-key, 1 to 2"),
    "MXNet's list, a key": ("t.tsv", "0\t1\ta.jpg\n1\t2\tb.JPEG\n", "--label-key 2", {"a.jpg": "1", "b.JPEG": "2"}),
    "a list whose labels have spaces": (
        "t.txt",
        "a.jpg red fox\nb.JPEG red wolf\n",
        "",
        {"a.jpg": "red fox", "b.JPEG": "red wolf"},
    ),
    "another machine's paths": (
        "t.csv",
        "path,label\n/home/ana/x/a.jpg,cat\nC:\\x\\b.JPEG,dog\n",
        "",
        {"a.jpg": "cat", "b.JPEG": "dog"},
    ),
    "nan": ("t.csv", "file,label\na.jpg,nan\n", "", "has no label"),
    "StyleGAN's": ("t.json", '{"labels": [["a.jpg", 3], ["b.JPEG", 1]]}', "", {"a.jpg": "3", "b.JPEG": "1"}),
    "FiftyOne's": ("t.json", '{"samples": [{"filepath": "a.jpg"}]}', "", "has no objects with a file and a label"),
    "an object as a label": (
        "t.json",
        '[{"file": "a.jpg", "label": {"name": "cat"}}]',
        "",
        "is an object, and no label",
    ),
    "a list": ("t.txt", SPACES, "", CATS),
    "a list with a slash": ("t.txt", f"/{SPACES}".replace("\n", "\n/")[:-1], "", CATS),
    "the label first": ("t.csv", "cat,a.jpg\ndog,b.JPEG\n", "", {"a.jpg": "cat", "b.JPEG": "dog"}),
    "pandas' index": (
        "t.csv",
        "," + "file,label\n" + "".join(f"{n},{row}\n" for n, row in enumerate(ROWS.split())),
        "",
        CATS,
    ),
    "pandas' numbers": (
        "t.csv",
        "file,label\na.jpg,0.0\nb.JPEG,10.0\né.png,2.0\n",
        "",
        {"a.jpg": "0", "b.JPEG": "10", "é.png": "2"},
    ),
    "ids": ("t.csv", f"id,breed\n{IDS}", "", CATS),
    "backslashes": ("t.csv", "file,label\n.\\a.jpg,cat\nsub\\c.jpg,dog\n", "", {"a.jpg": "cat", "c.jpg": "dog"}),
    "a folder that is not named": ("t.csv", "file,label\na.jpg,cat\nc.jpg,dog\n", "", {"a.jpg": "cat", "c.jpg": "dog"}),
    "two folders": (
        "t.csv",
        "file,label\na.jpg,cat\nd.jpg,dog\n",
        "",
        "'d.jpg' may be other/d.jpg or sub/d.jpg: put the table beside the images",
    ),
    "elsewhere": ("t.csv", "file,label\n../a.jpg,cat\n", "", "does not lie below"),
    "JSON lines": ("t.jsonl", JSON_LINES, "", CATS),
    "JSON lines called JSON": ("t.json", JSON_LINES, "", CATS),
    "one object a file": ("t.jsonl", json.dumps(OBJECTS[0]), "", {"a.jpg": "cat"}),
    "a list of objects": ("t.json", json.dumps(OBJECTS, indent=1), "", CATS),
    "an object of labels": ("t.json", json.dumps(CATS), "", CATS),
    "COCO": ("t.json", json.dumps(COCO), "", CATS),
    "JSON that is none": ("t.json", '{"images": 3}', "", "cannot be read as a table"),
    "a key that is missing": ("t.jsonl", JSON_LINES + '\n{"file_name": "a.jpg"}', "", "line 4: has not all of"),
    "is_valid": (
        "t.csv",
        SPLITS.format("is_valid", True, False, "False"),
        "",
        ({"b.JPEG": "dog", "é.png": "cat"}, {"a.jpg": "cat"}),
    ),
    "is_valid, 0 and 1": (
        "t.csv",
        SPLITS.format("Is Valid", 0, 1, 0),
        "",
        ({"a.jpg": "cat", "é.png": "cat"}, {"b.JPEG": "dog"}),
    ),
    "is_train": (
        "t.csv",
        SPLITS.format("is_training_image", 1, 0, 1),
        "",
        ({"a.jpg": "cat", "é.png": "cat"}, {"b.JPEG": "dog"}),
    ),
    "is_test": (
        "t.csv",
        SPLITS.format("is_test", False, True, False),
        "",
        ({"a.jpg": "cat", "é.png": "cat"}, {"b.JPEG": "dog"}),
    ),
    "neither yes nor no": (
        "t.csv",
        SPLITS.format("is_train", 1, 0, "maybe"),
        "",
        "under is_train is no split: use True",
    ),
    "set": ("t.csv", SPLITS.format("Set", "Training", "valid", "test"), "", ({"a.jpg": "cat"}, {"b.JPEG": "dog"})),
    "a split of another name": ("t.csv", SPLITS.format("split", "train", "later", "val"), "", "is no split"),
    "a fold": ("t.csv", SPLITS.format("fold", 0, 1, 2), "", CATS),
    "columns of other names": ("t.csv", f"x,y z\n{ROWS}", "--image-key x --label-key 'y z'", CATS),
    "no such column": ("t.csv", f"x,y\n{ROWS}", "--image-key z", "has no column z, but x, y"),
    "a list of labels": (
        "t.csv",
        "file,label\na.jpg,\"['cat', 'dog']\"\nb.JPEG,[]\n",
        "--label-separator ,",
        {"a.jpg": "cat,dog", "b.JPEG": ""},
    ),
    "a vector of classes": (
        "t.jsonl",
        '{"file": "a.jpg", "label": [0, 0, 1]}',
        "--label-separator ,",
        "looks like a vector with a number for each class",
    ),
    "a list where one label is": ("t.jsonl", '{"file": "a.jpg", "label": ["cat", "dog"]}', "", "--label-separator"),
    "--multi-hot": (
        "t.csv",
        "file,cat,dog,is_valid\na.jpg,1,1,0\nb.JPEG,0,1,1\n",
        "--multi-hot",
        ({"a.jpg": "cat,dog"}, {"b.JPEG": "dog"}),
    ),
    "one in each row": (
        "t.csv",
        "image,dog,cat,wolf\na,0.0,1.0,0.0\nb,1.0,0.0,0.0\né,0.0,1.0,0.0\n",
        "",
        CATS,
    ),
    "one in each row, with splits": (
        "t.csv",
        "file,cat,dog,is_valid\na.jpg,1,0,0\nb.JPEG,0,1,1\n",
        "",
        ({"a.jpg": "cat"}, {"b.JPEG": "dog"}),
    ),
    "one in each row, of pandas": (
        "t.csv",
        "file,cat,dog\na.jpg,True,False\nb.JPEG,False,True\né.png,True,False\n",
        "",
        CATS,
    ),
    "two spellings": (
        "t.csv",
        "file,label\na.jpg,Cat\nb.JPEG,cat\n",
        "",
        {"a.jpg": "Cat", "b.JPEG": "cat"},
    ),
    "two spellings of a number": ("t.csv", "file,label\na.jpg,01\nb.JPEG,1\n", "", {"a.jpg": "01", "b.JPEG": "1"}),
    "several in a row": (
        "t.csv",
        "file,cat,dog\na.jpg,1,1\nb.JPEG,0,1\n",
        "",
        "--multi-hot if each class has a column",
    ),
    "none in a row": ("t.csv", "file,cat,dog\na.jpg,1,0\nb.JPEG,0,0\n", "", "--multi-hot if each class has"),
    "--multi-hot with a fold": ("t.csv", "file,cat,fold\na.jpg,1,1\n", "--multi-hot", "the column fold is no class"),
    "--multi-hot with pandas' index": (
        "t.csv",
        ",file,cat\n0,a.jpg,1\n",
        "--multi-hot",
        "column without a name is no class",
    ),
    "a label for each image": (
        "t.csv",
        "file,label\n" + "".join(f"many/{n}.jpg,{n}\n" for n in range(12)),
        "",
        "has a label of its own",
    ),
    "files in folders": ("t.txt", "sub/c.jpg\nother/d.jpg\n", "", {"c.jpg": "sub", "d.jpg": "other"}),
    "files in folders, with splits": (
        "t.csv",
        "file,split\nsub/c.jpg,train\nsub/d.jpg,val\n many/0.jpg,train\n",
        "",
        ({"c.jpg": "sub", "0.jpg": "many"}, {"d.jpg": "sub"}),
    ),
    "files in no folder": ("t.csv", "file,split\na.jpg,train\nsub/d.jpg,val\n", "", "not all of its files lie in"),
    "names of files alone": ("t.txt", "c.jpg\n0.jpg\n1.jpg\n", "", {"c.jpg": "sub", "0.jpg": "many", "1.jpg": "many"}),
    "files of one folder": ("t.txt", "many/0.jpg\nmany/1.jpg\n", "", "not all of its files lie in class folders"),
    "files elsewhere": ("t.txt", "many/0.jpg\nmany/99\n", "", "put the table into the directory that holds them"),
    "a word under a class": (
        "t.csv",
        "file,sex\na.jpg,male\n",
        "--multi-hot",
        "'male' under sex, which is a class: use",
    ),
    "files alone, and --multi-hot": ("t.csv", "file\nmany/0.jpg\n", "--multi-hot", "has only files"),
    "boxes behind the file": ("t.csv", "a.jpg,39,116,14\nb.JPEG,36,8,3\n", "", "the first with numbers: name that of"),
    "splits without a heading": (
        "t.csv",
        "TRAIN,a.jpg,cat\nVALIDATION,b.JPEG,dog\nTEST,é.png,cat\n",
        "",
        ({"a.jpg": "cat"}, {"b.JPEG": "dog"}),
    ),
    "a list elsewhere": ("t.txt", "2008_000000 -1\n", "", "put the table into the directory that holds the images"),
    "a quote that ends in another row": (
        "t.csv",
        'file,label\na.jpg,"cat\nb.JPEG,dog"\né.png,cat\n',
        "",
        "has a label of several lines",
    ),
    "a quote in a word": ("t.tsv", 'file\tlabel\na.jpg\t"big" dog\n', "", "line 2: cannot be read"),
    "some numbers of pandas": ("t.csv", "file,label\na.jpg,1\nb.JPEG,1.0\n", "", {"a.jpg": "1", "b.JPEG": "1"}),
    "MXNet's numbers": (
        "t.tsv",
        "0\t1.000000\ta.jpg\n1\t2.000000\tb.JPEG\n",
        "--label-key 2",
        {"a.jpg": "1", "b.JPEG": "2"},
    ),
    "R's quotes": (
        "t.txt",
        '"file" "label"\n"a.jpg" "cat"\n"b.JPEG" "big dog"\n',
        "",
        {"a.jpg": "cat", "b.JPEG": "big dog"},
    ),
    "JSON lines with lists": ("t.jsonl", '{"images": ["a.jpg"], "label": "cat"}\n' * 2, "", "has no column file"),
    "JSON of other keys": (
        "t.json",
        '{"images": [{"image_id": 1}], "annotations": [{"label_id": 5}]}',
        "",
        "an entry has no 'id'",
    ),
    "images as text": ("t.csv", f"image,label\n{'9j/' + 'A' * 300}/x,cat\n", "", "there is no file 9j/AAAA"),
    "an id of another kind of image": ("t.csv", "id,label\nthesis,cat\n", "", "thesis.avif is no image that is read"),
    "a spreadsheet": ("t.xlsx", b"PK\3\4" + bytes(99), "", "save its table as CSV"),
    "an old spreadsheet": ("t.xls", b"\xd0\xcf\x11\xe0" + bytes(99), "", "save its table as CSV"),
    "nothing": ("t.csv", "", "", "has no rows"),
    "a readme": ("t.txt", "Please cite us.\n", "", "has no column"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(dialect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    name, content, options, answer = DIALECTS[dialect]
    put(tmp_path, [*CATS, "sub/c.jpg", "sub/d.jpg", "other/d.jpg", *(f"many/{n}.jpg" for n in range(12))])
    put(tmp_path, [], {"sub/thesis.avif": b""})
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out = tmp_path / "index"
    status = cli.main(["data", "index", str(tmp_path / name), "--out", str(out), *shlex.split(options)])
    printed = capsys.readouterr().err
    if isinstance(answer, str):
        assert status == 2 and answer in printed
        return
    assert status == 0, printed
    expected = answer if isinstance(answer, tuple) else (answer,)
    splits = ("train", "validation")
    assert [labels(out, split) for split in splits[: len(expected)]] == [*expected]
    assert len(Manifest.read(out).splits) == len(expected)
    has_several = any(word in options for word in ("--multi-hot", "--label-separator"))
    assert (Manifest.read(out).label_sets is not None) == has_several
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"{name}: ")]
    assert "files from" in line and (dialect != "a fold" or "not used: fold" in line)
    assert ("are two classes: if they are one" in caplog.text) == dialect.startswith("two spellings")
    assert ("one in each row: its label" in line) == (
        "one in each row" in dialect or dialect == "one in each row, with splits"
    )


def numbered(pattern: str, *numbers: int) -> list[str]:
    return [pattern.format(n=number, c=("cat", "dog")[number % 2]) for number in numbers]


ALL = range(6)
BUT_4 = (0, 1, 2, 3, 5)
# The images, the table's name, how it names the images 0 to 5, cats and dogs in turn, and the right answer: the images,
# or a part of the message. None of the images that are there in the place of a missing one may be taken for it.
MEANT: dict[str, tuple[list[str], str, str, list[str] | str]] = {
    "images and masks by ids": (
        [*numbered("images/{n}.tif", *ALL), *numbered("masks/{n}.png", *ALL)],
        "labels.csv",
        "{n}",
        "'0' may be images/0.tif or masks/0.png: put the table beside the images",
    ),
    "capitals in suffixes": (
        [*numbered("images/{n}.JPG", *ALL), *numbered("masks/{n}.png", *ALL)],
        "labels.csv",
        "{n}",
        "'0' may be images/0.JPG or masks/0.png",
    ),
    "two suffixes": ([*numbered("{n}.jpg", *ALL), "0.png"], "labels.csv", "{n}", "may be 0.jpg or 0.png: write its su"),
    "splits by ids": (
        [*numbered("train/{n}.tif", *ALL), *numbered("test/{n}.png", *ALL)],
        "train.csv",
        "{n}",
        numbered("train/{n}.tif", *ALL),
    ),
    "an id that only masks have": (
        [*numbered("images/{n}.jpg", *BUT_4), *numbered("masks/{n}.png", 4, 6, 7, 8)],
        "labels.csv",
        "{n}",
        "there is no such file in images/, where 5 others are, but masks/4.png: restore the file",
    ),
    "a name that only another folder has": (
        [*numbered("train/{n}.jpg", *BUT_4), *numbered("unlabeled/{n}.jpg", *ALL)],
        "train.csv",
        "{n}.jpg",
        "line 6: there is no such file in train/, where 5 others are, but unlabeled/4.jpg",
    ),
    "a name that only the other split has": (
        [*numbered("train/{n}.jpg", *BUT_4), "test/4.jpg"],
        "train.csv",
        "{n}.jpg",
        "there is no such file in train/, where 5 others are, but test/4.jpg",
    ),
    "a name that is not beside the table": (
        [*numbered("{n}.jpg", *BUT_4), *numbered("old/{n}.jpg", 4, 6, 7, 8)],
        "labels.csv",
        "{n}.jpg",
        "there is no such file beside the table, where 5 others are, but old/4.jpg",
    ),
    "parts of a download": (
        [*numbered("part_1/{n}.jpg", *BUT_4), *numbered("part_2/{n}.jpg", 4, 6, 7, 8)],
        "labels.csv",
        "{n}",
        [*numbered("part_1/{n}.jpg", *BUT_4), "part_2/4.jpg"],
    ),
    "class folders": (
        [*numbered("Cat/{n}.jpg", 0, 2, 4), *numbered("Dog/{n}.jpg", 1, 3, 5, 7, 9, 11, 13)],
        "labels.csv",
        "{n}.jpg",
        [*numbered("Cat/{n}.jpg", 0, 2, 4), *numbered("Dog/{n}.jpg", 1, 3, 5)],
    ),
    "many folders": (
        [f"class_{number}/{number}.jpg" for number in range(30)],
        "labels.csv",
        "{n}.jpg",
        numbered("class_{n}/{n}.jpg", *ALL),
    ),
    "two of many folders": (
        [*(f"class_{number}/{number}.jpg" for number in range(30)), "class_7/0.jpg"],
        "labels.csv",
        "{n}.jpg",
        "'0.jpg' may be class_0/0.jpg or class_7/0.jpg: put the table beside the images",
    ),
    "another machine's": (
        numbered("{c}/{n}.jpg", *ALL),
        "labels.csv",
        "/a/b/{c}/{n}.jpg",
        numbered("{c}/{n}.jpg", *ALL),
    ),
    "another machine's, one missing": (
        [*numbered("{c}/{n}.jpg", *BUT_4), "rejected/4.jpg"],
        "labels.csv",
        "/content/drive/photos/{c}/{n}.jpg",
        "there is no file cat/4.jpg",
    ),
    "another machine's, another split": (
        numbered("test/{n}.jpg", *ALL),
        "labels.csv",
        "/kaggle/input/train/{n}.jpg",
        "there is no file kaggle/input/train/0.jpg",
    ),
    "another machine's, masks": (
        numbered("masks/{n}.png", *ALL),
        "labels.csv",
        r"D:\data\images\{n}.png",
        "there is no file D:/data/images/0.png",
    ),
    "another machine's, the first elsewhere": (
        [*numbered("{c}/{n}.jpg", 1, 2, 3, 4, 5), "0.jpg"],
        "labels.csv",
        "/a/b/{c}/{n}.jpg",
        "'/a/b/dog/1.jpg' would be dog/1.jpg here, and '/a/b/cat/0.jpg' 0.jpg, which cannot both be right",
    ),
}


@pytest.mark.parametrize("case", MEANT)
def test_which_images_a_table_means(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, table, name, answer = MEANT[case]
    put(tmp_path, images, {table: "\n".join(["id,label", *numbered(f"{name},{{c}}", *ALL)])})
    status = cli.main(["data", "index", str(tmp_path / table), "--out", str(tmp_path / "index")])
    if isinstance(answer, str):
        assert status == 2 and answer in capsys.readouterr().err
        return
    assert status == 0, capsys.readouterr().err
    assert sorted(Split(tmp_path / "index", "train").file_names()) == sorted(answer)
    labelled = labels(tmp_path / "index", "train")
    assert all(label == ("cat", "dog")[int(Path(name).stem) % 2] for name, label in labelled.items())


def test_a_class_for_each_column_by_name_and_by_directory(tmp_path: Path) -> None:
    """The classes have the same numbers, and one without an image is none."""
    root = tmp_path / "images"
    put(root, ["a.jpg", "b.JPEG"], {"labels.csv": "image,dog,cat,wolf\na.jpg,0,1,0\nb.JPEG,1,0,0\n"})
    for number, source in enumerate((root, root / "labels.csv")):
        assert cli.main(["data", "index", str(source), "--out", str(tmp_path / f"index{number}")]) == 0
        assert Manifest.read(tmp_path / f"index{number}").class_names == ("cat", "dog")


# The images, and the right answer: a part of what is said, as a warning or as a refusal.
SAID: dict[str, tuple[list[str], bool, str]] = {
    "all images in one folder": (["jpg/1.jpg", "jpg/2.jpg"], True, "all images are of one class, jpg; if a table"),
    "a test folder with a number": (["train/cat.0.jpg", "test1/1.jpg"], False, "an image outside of a class folder"),
    "a split in parts": (
        ["train.X1/a/1.jpg", "train.X2/b/2.jpg", "val.X/a/3.jpg", "val.X/b/4.jpg"],
        False,
        "train.X1 and train.X2 are one split: keep one of them, or put the class folders of all into one",
    ),
    "folders in class folders": (
        ["a/airfield/1.jpg", "a/cabin/2.jpg", "b/bakery/shop/3.jpg"],
        True,
        "2 folders in class folders are no classes, and their images are of the folders above: a/airfield, a/cabin",
    ),
    "a split beside class folders": (["cat/1.jpg", "dog/2.jpg", "val/cat/3.jpg"], False, "val is called as a split"),
    "a copy of all in a folder beside it": (
        ["Plants/a/1.jpg", "Plants/b/2.jpg", "plants/Plants/a/3.jpg", "plants/Plants/b/4.jpg"],
        False,
        "has Plants, and in another folder plants/Plants: if that is its copy, name ",
    ),
    "images and masks in each class": (
        [f"{name}/{kind}/{n}.jpg" for n, name in enumerate("ab") for kind in ("images", "masks")],
        False,
        "if not, move away what is not to be classified, such as masks, and list the classes in a file",
    ),
    "a split beside another folder": (
        ["trainval/a/1.jpg", "trainval/b/2.jpg", "test/a/3.jpg"],
        False,
        "test is called as a split, what is beside it is not (trainval): call trainval train if it has the training",
    ),
    "splits in class folders": (
        [f"{name}/{split}/{n}.jpg" for n, name in enumerate("ab") for split in ("train", "val")],
        False,
        "turn it round, such as train/a instead of a/train",
    ),
    "Places365": (["data_256/a/1.jpg", "data_256/b/2.jpg", "val_256/3.jpg"], False, "val_256 is called as a split"),
    "folders called as classes": (["cat/1.jpg", "dog/2.jpg", "augmented/cat/3.jpg"], True, "augmented/cat"),
    "too deep": (
        ["data/data/train/cat/1.jpg", "data/data/train/dog/2.jpg"],
        False,
        "has one class folder, data, and all images in",
    ),
    "parts of a download": (
        ["images_001/1.jpg", "images_002/2.jpg"],
        True,
        "its 2 class folders are called as the parts of one download",
    ),
    "all classes again": (
        ["cat/1.jpg", "dog/2.jpg", "old/cat/3.jpg", "old/dog/4.jpg"],
        True,
        "old is a class, and has folders called as all the others: move it away",
    ),
    "classes that differ in capitals": (["Cat/1.jpg", "cat/2.jpg"], True, "'Cat' and 'cat' are two classes"),
    "seven folders deep": (
        ["a/b/c/d/e/f/cat/1.jpg", "a/b/c/d/e/f/dog/2.jpg"],
        False,
        "has one class folder, a, and all images in",
    ),
    "images between splits and classes": (
        ["train/images/cat/1.jpg", "train/images/dog/2.jpg", "val/images/cat/3.jpg", "val/images/dog/4.jpg"],
        True,
        "the class folders are those in train/images, val/images",
    ),
    "splits in folders of their own name": (
        [
            *("seg_train/seg_train/cat/1.jpg", "seg_train/seg_train/dog/2.jpg"),
            *("seg_test/seg_test/cat/3.jpg", "seg_test/seg_test/dog/4.jpg"),
        ],
        True,
        "the class folders are those in seg_test/seg_test, seg_train/seg_train",
    ),
    "of one split alone": (
        ["train/Images/cat/1.jpg", "train/Images/dog/2.jpg", "val/cat/3.jpg", "val/dog/4.jpg"],
        True,
        "the class folders are those in train/Images",
    ),
    "names that look alike": (
        ["Caf\u00e9/1.jpg", "Cafe\u0301/2.jpg"],
        False,
        "the classes 'Cafe\\u0301' and 'Caf\\xe9' look alike, and are not spelt alike",
    ),
    "names with a space at the end": (["tea/1.jpg", "tea /2.jpg"], False, "the classes 'tea' and 'tea ' look alike"),
    "spelt otherwise in a split": (
        ["train/Caf\u00e9/1.jpg", "train/tea/2.jpg", "val/Cafe\u0301/3.jpg", "val/tea/4.jpg"],
        False,
        "look alike, and are not spelt alike",
    ),
    "classes a level deeper": (
        ["images/cat/1.jpg", "images/dog/2.jpg", "parts/parts.txt"],
        False,
        "photos/images instead (of an archive",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_folders_that_may_be_meant_otherwise(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    images, is_read, message = SAID[case]
    put(tmp_path / "photos", [path for path in images if path.endswith(".jpg")])
    status = cli.main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "index")])
    assert status == (0 if is_read else 2)
    assert message in (caplog.text if is_read else capsys.readouterr().err)
    if "class folders are those in" in message:
        assert labels(tmp_path / "index", "train") == {"1.jpg": "cat", "2.jpg": "dog"}
        assert labels(tmp_path / "index", "validation") == {"3.jpg": "cat", "4.jpg": "dog"}


FLAT = [f"val/{n}.jpg" for n in range(3)]
TRAIN = of_classes("train/{c}/t{n}.jpg", ("cat", "dog"))
ANSWERS = "file,label\n0.jpg,cat\n1.jpg,dog\n2.jpg,cat\n"
RIGHT = {"0.jpg": "cat", "1.jpg": "dog", "2.jpg": "cat"}
# The images, the tables, and the right answer: the labels of the validation split, or a part of the message.
FOLDERS: dict[str, tuple[list[str], dict[str, Any], Labels | str]] = {
    "in the split": ([*TRAIN, *FLAT], {"val/labels.csv": ANSWERS}, RIGHT),
    "as the Hub has it": (
        [*TRAIN, *FLAT],
        {"val/metadata.parquet": in_parquet(file_name=[*RIGHT], label=[*RIGHT.values()])},
        RIGHT,
    ),
    "beside the split": ([*TRAIN, *FLAT], {"val.csv": ANSWERS}, RIGHT),
    "of the training split": ([*TRAIN, *FLAT], {"train.csv": ANSWERS}, "an image outside of a class folder"),
    "a sample of a submission": (
        [*TRAIN, *FLAT],
        {"val_submission.csv": ANSWERS},
        "an image outside of a class folder",
    ),
    "other classes": (
        [*TRAIN, *FLAT],
        {"val.csv": ANSWERS.replace("dog", "owl")},
        "has the label 'owl' for an image in",
    ),
    "numbers": ([*TRAIN, *FLAT], {"val.txt": "0.jpg 0\n1.jpg 1\n2.jpg 2\n"}, "has the label '0' for an image in"),
    "named with their folder": ([*TRAIN, *FLAT], {"labels.csv": ANSWERS.replace("\n", "\nval/")[:-4]}, RIGHT),
    "in another folder": (
        [*TRAIN, *FLAT],
        {"labels.csv": ANSWERS.replace("\n", "\nother/")[:-6]},
        "an image outside of a class folder",
    ),
    "an image too many": ([*TRAIN, *FLAT, "val/3.jpg"], {"val.csv": ANSWERS}, "val/3.jpg: has no row in"),
    "two that agree": ([*TRAIN, *FLAT], {"val/a.csv": ANSWERS, "val/b.csv": ANSWERS}, RIGHT),
    "two that do not": (
        [*TRAIN, *FLAT],
        {"val/a.csv": ANSWERS, "val/b.csv": ANSWERS.replace("1.jpg,dog", "1.jpg,cat")},
        "have different labels for the images",
    ),
    "one table for both": (
        [*FLAT, *(f"train/{n}.jpg" for n in range(3))],
        {"labels.csv": ANSWERS},
        "may be an image of either split",
    ),
    "a column for each class": (
        [*TRAIN, *FLAT],
        {"val/_classes.csv": "filename, cat, dog\n0.jpg, 1, 0\n1.jpg, 0, 1\n2.jpg, 1, 0\n"},
        RIGHT,
    ),
    "numbers and a table of the training split": (
        [*FLAT, *(f"train/{n}.jpg" for n in range(3))],
        {"trainLabels.csv": ANSWERS, "train/trainLabels.csv": ANSWERS},
        "an image outside of a class folder",
    ),
    "several of these": (
        [*TRAIN, *FLAT],
        {"val/_classes.csv": "filename, cat, dog\n0.jpg, 1, 1\n1.jpg, 0, 1\n2.jpg, 1, 0\n"},
        "an image outside of a class folder",
    ),
    "numbers that are no classes": (
        [*TRAIN, *FLAT],
        {"val/boxes.csv": "filename,left,top\n0.jpg,0,1\n1.jpg,3,1\n2.jpg,5,0\n"},
        "an image outside of a class folder",
    ),
    "one table for both, with slashes": (
        [*FLAT, *(f"train/{n}.jpg" for n in range(3))],
        {"labels.csv": ANSWERS.replace("\n", "\n/")[:-1]},
        "may be an image of either split",
    ),
    "one table for both, with paths": (
        [*FLAT, *(f"train/{n}.jpg" for n in range(3))],
        {"labels.csv": ANSWERS.replace("\n", "\nval/")[:-4] + "\n" + ANSWERS.replace("\n", "\ntrain/")[11:-6]},
        RIGHT,
    ),
    "deeper": (
        [*TRAIN, *(f"val/data/images/{n}.jpg" for n in range(3))],
        {"val/data/labels.csv": ANSWERS},
        RIGHT,
    ),
    "class folders and a table": (
        [*TRAIN, "val/cat/0.jpg", "val/dog/1.jpg"],
        {"val.csv": ANSWERS},
        {"0.jpg": "cat", "1.jpg": "dog"},
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_labels_beside_the_images_of_a_split(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    images, tables, answer = FOLDERS[case]
    put(tmp_path / "photos", images, tables)
    status = cli.main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "index")])
    printed = capsys.readouterr().err
    if isinstance(answer, str):
        assert status == 2 and answer in printed
        return
    assert status == 0, printed
    assert labels(tmp_path / "index", "validation") == answer
    assert ("labels of 3 images from" in caplog.text) == ("class folders" not in case)


def test_several_labels_in_a_table_for_each_split(tmp_path: Path, caplog: Any) -> None:
    """As Roboflow writes them: the commands that are said join them."""
    pytest.importorskip("pandas")
    rows = {"train": "0.jpg, 1, 1\n1.jpg, 0, 1\n", "valid": "0.jpg, 1, 0\n", "test": "2.jpg, 1, 1\n"}
    tables = {f"{split}/_classes.csv": f"filename, cat, dog\n{text}" for split, text in rows.items()}
    put(tmp_path / "it's", ["train/0.jpg", "train/1.jpg", "valid/0.jpg", "test/2.jpg"], tables)
    assert cli.main(["data", "index", str(tmp_path / "it's"), "--out", str(tmp_path / "no")]) == 2
    _, join, _, index, *_ = caplog.records[0].getMessage().split("`")
    subprocess.run(join.replace("python3", sys.executable, 1), shell=True, check=True)
    assert cli.main([*shlex.split(index)[1:-1], str(tmp_path / "index")]) == 0
    assert labels(tmp_path / "index", "train") == {"0.jpg": "cat,dog", "1.jpg": "dog"}
    assert labels(tmp_path / "index", "validation") == {"0.jpg": "cat"}


def test_splits_of_the_folders_that_a_table_names(tmp_path: Path, caplog: Any) -> None:
    put(tmp_path, files := ["train/0.jpg", "train/1.jpg", "val/0.jpg"])
    rows = "".join(f"{file},{label}\n" for file, label in zip(files, ("cat", "dog", "cat"), strict=True))
    (tmp_path / "labels.csv").write_text(f"file,label\n{rows}")
    words = ["data", "index", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "index")]
    assert has_validation(tmp_path / "labels.csv") and cli.main(words) == 0
    assert labels(tmp_path / "index", "train") == {"0.jpg": "cat", "1.jpg": "dog"}
    assert labels(tmp_path / "index", "validation") == {"0.jpg": "cat"}
    assert "labels.csv: splits from the folders train, val" in caplog.text


def test_two_tables_of_the_validation_split_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = {f"{name}.csv": f"file,label\n{name}.jpg,cat\n" for name in ("train", "val", "valid")}
    put(tmp_path, ["train.jpg", "val.jpg", "valid.jpg"], tables)
    words = ["data", "index", str(tmp_path / "train.csv"), "--out", str(tmp_path / "index")]
    assert cli.main(words) == 2
    assert "val.csv and valid.csv beside it may both have the validation images: move one" in capsys.readouterr().err


PARTS = ["images_001/0.jpg", "images_001/1.jpg", "images_002/2.jpg"]
# The images, a table beside their folders, and a part of the warning.
BESIDE_FOLDERS = {
    "parts of a download": (
        PARTS,
        "labels.csv",
        "0.jpg,sick\n1.jpg,well\n2.jpg,sick\n",
        "such as sick and well in images_001",
    ),
    "with their paths": (
        PARTS,
        "all.csv",
        "".join(f"{path},{n % 2}\n" for n, path in enumerate(PARTS)),
        "such as 0 and 1 in",
    ),
    "in splits": (
        [f"{split}/{path}" for split in ("train", "val") for path in PARTS],
        "labels.csv",
        "".join(f"{split}/{path},{n % 2}\n" for split in ("train", "val") for n, path in enumerate(PARTS)),
        "such as 0 and 1 in images_001",
    ),
    "ids": (["images_001/0.jpg", "images_001/1.jpg", "images_002/2.jpg"], "ids.csv", "0.jpg,1\n1.jpg,2\n2.jpg,3\n", ""),
    "the same labels, numbered": (PARTS, "labels.csv", "0.jpg,7\n1.jpg,7\n2.jpg,8\n", ""),
    "a list of splits": (
        ["images/0.jpg", "images/1.jpg"],
        "list_eval_partition.txt",
        "0.jpg 0\n1.jpg 1\n",
        "all images are of one class, images",
    ),
    "other images": (PARTS, "labels.csv", "7.jpg,sick\n8.jpg,well\n", ""),
}


@pytest.mark.parametrize("case", BESIDE_FOLDERS)
def test_tables_beside_class_folders(case: str, tmp_path: Path, caplog: Any) -> None:
    images, name, rows, message = BESIDE_FOLDERS[case]
    put(tmp_path / "photos", images, {name: rows if name.endswith(".txt") else f"file,label\n{rows}"})
    assert cli.main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "index")]) == 0
    assert message in caplog.text
    assert ("has other labels than the class folders" in caplog.text) == ("such as" in message)


def test_tables_of_other_splits_are_named(tmp_path: Path, caplog: Any) -> None:
    tables = {f"{name}.csv": f"file,label\n{name}.jpg,cat\n" for name in ("train", "val", "test")}
    put(tmp_path, ["train.jpg", "val.jpg", "test.jpg"], tables)
    put(tmp_path, [], {"list_eval_partition.csv": "file,partition\ntrain.jpg,0\n"})
    words = ["data", "index", str(tmp_path / "train.csv"), "--out", str(tmp_path / "index")]
    assert cli.main(words) == 0
    assert labels(tmp_path / "index", "validation") == {"val.jpg": "cat"}
    assert "train.csv: beside it, and not read: list_eval_partition.csv, test.csv" in caplog.text


def test_a_directory_without_splits_takes_a_table_of_training_images(tmp_path: Path) -> None:
    """ISIC's."""
    put(tmp_path / "isic", [f"Training_Input/Input/{n}.jpg" for n in range(2)])
    put(tmp_path / "isic", [], {"Training_Truth.csv": "image,mole,wart\n0,1.0,0.0\n1,0.0,1.0\n"})
    put(tmp_path / "isic", [], {"Training_Patients.csv": "image,age\n0,55\n1,70\n"})
    assert cli.main(["data", "index", str(tmp_path / "isic"), "--out", str(tmp_path / "index")]) == 0
    assert labels(tmp_path / "index", "train") == {"0.jpg": "mole", "1.jpg": "wart"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dogs/Images", "divided by test_list.mat, train_list.mat: docs"),
        ("food-101", "divided by food-101/test.txt, food-101/train.txt: docs"),
        ("food-101/images", "divided by test.txt, train.txt: docs"),
        ("CUB_200_2011", "divided by CUB_200_2011/train_test_split.txt: docs"),
    ],
)
def test_lists_that_may_divide_a_directory_are_named(source: str, message: str, tmp_path: Path, caplog: Any) -> None:
    food(tmp_path)
    birds(tmp_path)
    put(tmp_path / "dogs", of_classes("Images/{c}/{n}.jpg"), {"train_list.mat": "", "test_list.mat": ""})
    cli.main(["data", "index", str(tmp_path / source), "--out", str(tmp_path / "index")])
    assert message in caplog.text


def test_a_date_after_2262_is_one(tmp_path: Path) -> None:
    """In nanoseconds it has more than 63 bits; clocks go wrong."""
    put(tmp_path / "photos", ["cat/1.jpg", "dog/2.jpg"])
    os.utime(tmp_path / "photos" / "cat" / "1.jpg", (13569465600, 13569465600))
    out = str(tmp_path / "index")
    assert cli.main(["data", "index", str(tmp_path / "photos"), "--out", out]) == 0
    assert cli.main(["data", "verify", out]) == 0


def test_a_list_of_files_has_a_validation_split_in_test(tmp_path: Path) -> None:
    food(tmp_path)
    assert has_validation(tmp_path / "food-101" / "train.txt")
    (tmp_path / "food-101" / "test.txt").unlink()
    assert not has_validation(tmp_path / "food-101" / "train.txt")


NAMED = "file,label\na.jpg,cat\nb.jpg,dog\n"
# The images, the tables, what is indexed, and the table in which a label is corrected later.
CORRECTED = {
    "the table that is named": (["a.jpg", "b.jpg"], {"train.csv": NAMED}, "train.csv", "train.csv"),
    "one beside it": (
        ["a.jpg", "b.jpg", "0.jpg", "1.jpg", "2.jpg"],
        {"train.csv": NAMED, "val.csv": ANSWERS},
        "train.csv",
        "val.csv",
    ),
    "one in a split": ([*TRAIN, *FLAT], {"val/labels.csv": ANSWERS}, ".", "val/labels.csv"),
    "one above what is named": (
        [f"deep/{path}" for path in (*TRAIN, *FLAT)],
        {"val.csv": ANSWERS},
        "deep",
        "val.csv",
    ),
}


@pytest.mark.parametrize("case", CORRECTED)
def test_labels_that_are_corrected_after_the_index(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """Neither a run nor `verify` goes on with the old ones; where the table is gone, the index has its labels."""
    images, tables, source, name = CORRECTED[case]
    root, out = tmp_path / "photos", tmp_path / "index"
    put(root, images, tables)
    words = ["data", "index", str(root / source), "--out", str(out)]
    assert cli.main(words) == 0 and cli.main(["data", "verify", str(out)]) == 0
    before = labels(out, "train")
    (root / name).write_text(tables[name].replace("cat", "dog", 1))
    with pytest.raises(DatasetError, match=f"{name} has changed since the labels were read from it: restore it, or"):
        Split(out, "train")
    capsys.readouterr()
    assert cli.main(["data", "verify", str(out)]) == 1
    assert f"{name} has changed since the labels were read from it" in capsys.readouterr().out
    assert cli.main(words) == 0 and cli.main(["data", "verify", str(out)]) == 0
    (root / name).unlink()
    caplog.clear()
    assert cli.main(["data", "verify", str(out)]) == 0
    assert f"{root / name}: the labels were read from it, and cannot be compared (No such file" in caplog.text
    assert (labels(out, "train") == before) == (name != "train.csv")
