"""DALI's graphs for a GPU, on a machine without one: they are defined, and each operator is held against DALI's schema
of it. A schema says on which devices there is a kernel, where its inputs must be, and what arguments it takes; DALI
itself refuses inputs and arguments on the wrong device while a graph is defined, and everything else only on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def

from dali_train.config import DataConfig, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import open_storage
from dali_train.data.loading import decoders
from dali_train.data.loading.augment import OPERATORS
from dali_train.data.loading.dali import (
    Feed,
    _decoding_graph,
    evaluation_graph,
    graph_options,
    training_graph,
    training_inputs,
)
from dali_train.data.loading.decoders import PixelFormat
from dali_train.extras.dali_reader import DaliReaderPipeline

GPU = PixelFormat(device_id=0, num_threads=1, dtype=torch.bfloat16, channels_last=True, pinned=False)
PLAIN: dict[str, Any] = {}
LOOKS: dict[str, list[dict[str, Any]]] = {
    "plain": [PLAIN],
    "all operators": [{"augment": f"rand-t{'+'.join(OPERATORS)}"}],
    "policies": [{"augment": "auto-imagenet"}],
    "erased": [{"random_erasing": 0.5}],
    "noise": [{"random_erasing": 0.5, "random_erasing_fill": "noise"}],
    "square": [{"crop_side": 40, "crop_padding": 4}],
    "reflected": [{"crop_side": 40, "crop_padding": 4, "crop_padding_mode": "reflect"}],
    "turned": [{"vertical_flip": 0.5, "interpolation": "random"}],
    "views": [PLAIN, {"augment": "3-augment", "vertical_flip": 0.5}],
}


def faults(pipe: Pipeline) -> list[str]:
    """Return what DALI's schemas say against the operators of a graph."""
    pipe._build_graph()
    found = []
    for one in pipe._ops:
        operator, spec = one._op, one.spec
        schema, device = operator.schema, operator.device
        name = f"{schema.Name()} on {device}"
        if device not in schema.GetSupportedBackends():
            found.append(f"{name}: there is none")
        if not schema.MinNumInput() <= spec.NumRegularInput() <= schema.MaxNumInput():
            found.append(f"{name}: {spec.NumRegularInput()} inputs")
        for number in range(spec.NumRegularInput()):
            actual = spec.InputDevice(number)
            # A mixed operator takes the host's memory.
            expected = schema.GetInputDevice(number, actual, device).replace("mixed", "cpu")
            if actual != expected:
                found.append(f"{name}: input {number} is on {actual}, not on {expected}")
        schema.CheckArgs(spec)
    return found


def devices(pipe: Pipeline) -> list[str]:
    return [output.device for output in pipe._graph_outputs]


@contextmanager
def decoding(*, boxes: bool) -> Iterator[None]:
    """Let nvImageCodec be one that decodes boxes on a GPU, or one that does not."""
    with mock.patch.object(decoders, "_nvimagecodec_version", lambda: 800 if boxes else 900):
        yield


@pytest.fixture
def split(dataset: Path) -> Split:
    return Split(dataset, "train")


def as_raw(split: Split) -> Split:
    split.manifest = replace(split.manifest, encoding="raw")
    return split


def training(split: Split, data: DataConfig, looks: list[dict[str, Any]]) -> Pipeline:
    views = [replace(data, **look) for look in looks]
    feed = Feed(training_inputs(split, open_storage(split, data), views), lambda: pytest.fail("nothing is run"))
    return training_graph(feed, views, GPU, split, **graph_options(GPU, size=4))


@pytest.mark.parametrize(("looks", "boxes"), [*((name, False) for name in LOOKS), ("plain", True), ("views", True)])
def test_training(looks: str, boxes: bool, split: Split, tiny_config: Path) -> None:
    with decoding(boxes=boxes):
        pipe = training(split, load_config(tiny_config).data, LOOKS[looks])
    assert faults(pipe) == []
    assert devices(pipe) == ["gpu"] * (len(LOOKS[looks]) + 3)


def test_training_on_raw_images(split: Split, tiny_config: Path) -> None:
    pipe = training(as_raw(split), load_config(tiny_config).data, LOOKS["erased"])
    assert faults(pipe) == [] and devices(pipe) == ["gpu"] * 4


@pytest.mark.parametrize("raw", [False, True])
def test_evaluation(raw: bool, tiny_config: Path) -> None:
    data = load_config(tiny_config).data
    pipe = evaluation_graph(lambda: pytest.fail("nothing is run"), data, GPU, raw, **graph_options(GPU, size=4))
    assert faults(pipe) == [] and devices(pipe) == ["gpu", "gpu"]


@pytest.mark.parametrize("boxes", [False, True])
def test_dalis_own_reader(boxes: bool, split: Split, tiny_config: Path) -> None:
    data = load_config(tiny_config).data
    made: list[Pipeline] = []
    with decoding(boxes=boxes), mock.patch.object(Pipeline, "build", autospec=True, side_effect=made.append):
        DaliReaderPipeline(split, iter(()), data, GPU, size=4, num_per_step=1, start_step=0, shard=(0, 1))
    assert faults(made[0]) == []
    assert devices(made[0]) == ["gpu"] * 4


def test_decoding_whole_images() -> None:
    pipe = _decoding_graph([np.zeros(1, np.uint8)], 0.5, batch_size=1, num_threads=1, device_id=0)
    assert faults(pipe) == [] and devices(pipe) == ["gpu"]


@pipeline_def(batch_size=1, num_threads=1, device_id=0)
def _shape_of_encoded_images_on_a_gpu() -> Any:
    encoded = fn.external_source(source=lambda: None, batch=True, dtype=types.UINT8, ndim=1)
    return fn.peek_image_shape(encoded.gpu())


def test_an_operator_without_a_kernel_is_found() -> None:
    assert faults(_shape_of_encoded_images_on_a_gpu()) == ["PeekImageShape on gpu: there is none"]
