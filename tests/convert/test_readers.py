"""Other programs read what the converter writes: the tfrecord package, and DALI's own reader with the text index."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tfrecord import reader

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from tests.convert.files import convert, small_photograph, write_folder


@pytest.fixture(scope="module", params=["jpeg", "raw"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(f"readers-{request.param}")
    folder = write_folder(root / "images", {"ant": 10, "bee": 7})
    options = ("--train-shards", 3, "--format", request.param)
    assert convert("folder", "--train", folder, "--out", root / "out", *options) == 0
    return root / "out"


def test_the_tfrecord_package(dataset: Path) -> None:
    split = Split(dataset, "train")
    image = 0
    for path in split.paths:
        # It wants an index of its own, which has the columns of DALI's, and with one begins anywhere but for a given
        # share.
        index = dataset / "idx_files" / "train" / f"{path.name}.idx"
        for example in reader.tfrecord_loader(str(path), str(index), shard=(0, 1)):
            row = split.rows[image]
            assert bytes(example["image/encoded"]) == stored_image(MappedFiles(split), image).tobytes()
            assert example["image/class/label"][0] == row["label"] + 1
            assert bytes(example["image/class/synset"]).decode() == split.manifest.class_names[row["label"]]
            assert (example["image/height"][0], example["image/width"][0]) == (row["height"], row["width"])
            assert bytes(example["image/filename"]).decode().startswith(split.manifest.class_names[row["label"]] + "/")
            assert bytes(example["image/format"]) == (b"RAW" if split.manifest.encoding == "raw" else b"JPEG")
            image += 1
    assert image == len(split)


def test_dalis_own_reader_with_the_text_index(dataset: Path) -> None:
    from nvidia.dali import Pipeline, fn, tfrecord

    split = Split(dataset, "train")
    if split.manifest.encoding == "raw":
        pytest.skip("nothing to decode")
    pipeline: Any = Pipeline(batch_size=len(split), num_threads=1, device_id=None)
    with pipeline:
        features = fn.readers.tfrecord(
            path=[str(path) for path in split.paths],
            index_path=[str(dataset / "idx_files" / "train" / f"{path.name}.idx") for path in split.paths],
            features={
                "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
                "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
            },
        )
        pixels = fn.decoders.image(features["image/encoded"], device="cpu")
        pipeline.set_outputs(features["image/encoded"], features["image/class/label"], pixels)
    pipeline.build()
    encoded, labels, pixels = pipeline.run()
    found = Counter((bytes(np.array(encoded[i])), int(np.array(labels[i])[0])) for i in range(len(split)))
    shards = MappedFiles(split)
    expected = Counter((stored_image(shards, i).tobytes(), int(split.rows[i]["label"]) + 1) for i in range(len(split)))
    assert found == expected
    assert sorted({content for content, _ in found}) == sorted(small_photograph(seed) for seed in range(17))
    assert all(np.array(pixels[i]).shape[2] == 3 for i in range(len(split)))
