"""The script itself is not in timm's package: TIMM_TRAIN=pytorch-image-models/train.py."""

import json
import os
from pathlib import Path

import pytest
import torch

from examples.conftest import Finish, Start

TRAIN = Path(__file__).with_name("train.py")
WORDS = ["--model", "test_resnet", "--num-classes", "2", "--img-size", "32", "-b", "8", "--aa", "rand-m6-inc1"]
WORDS += ["--mixup", "0.2", "--smoothing", "0.1"]
# What train.py asks of its loaders, on processes without a model: DistributedDataParallel has none for it on a CPU.
LOOP = """
import hashlib, json, os, sys
import torch, torch.distributed as dist
from timm.data import FastCollateMixup, create_dataset, create_loader

root, out, start_epoch = sys.argv[1], os.environ["OUT"], int(os.environ["START_EPOCH"])
dist.init_process_group("gloo")
datasets = [create_dataset("", root=root, split=split, is_training=split == "train") for split in ("train", "val")]
mixing = FastCollateMixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=2)
common = {"input_size": (3, 32, 32), "batch_size": 8, "device": torch.device("cpu"), "use_prefetcher": True}
train = create_loader(datasets[0], is_training=True, collate_fn=mixing, scale=[0.08, 1.0], **common)
for epoch in range(start_epoch, 2):
    train.dataset.set_epoch(epoch)
    length = len(train)  # which is that of the epoch to come
    for number, (images, targets) in enumerate(train):
        drawn = train.loader.micro_batch
        line = {"step": drawn.step, "k": drawn.k, "images": hashlib.sha256(images.numpy().tobytes()).hexdigest()}
        assert (targets.sum(dim=1) - 1).abs().max() < 1e-6 and targets.min() > 0.049
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\\n")
    assert number == length - 1
validation = create_loader(datasets[1], is_training=False, **common)
sizes = torch.tensor([len(labels) for _, labels in validation])
dist.all_reduce(sizes)  # as train.py after each batch: every process has as many
assert len(validation) == len(sizes)
"""


def lines(path: Path) -> list[dict[str, object]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: (line["step"], line["k"]))


def test_the_same_on_any_number_of_processes_and_after_a_resume(
    dataset: Path, tmp_path: Path, start: Start, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP)
    for processes, start_epoch in ((1, 0), (2, 1)):
        monkeypatch.setenv("OUT", f"{processes}.jsonl")
        monkeypatch.setenv("START_EPOCH", str(start_epoch))
        words = [*WORDS, "--seed", "7", "--epochs", "2", "--grad-accum-steps", 6 // processes]
        if processes == 1:
            assert start(TRAIN, loop, dataset, *words, processes=1).wait() == 0
        else:
            finish(TRAIN, loop, dataset, *words, processes=processes)
    one, two = (lines(tmp_path / f"{processes}.jsonl") for processes in (1, 2))
    assert len(one) == 54 and one[30:] == two  # steps of 48 images: 5 in the first epoch, 4 in the second


@pytest.mark.skipif("TIMM_TRAIN" not in os.environ, reason=str(__doc__))
def test_the_script_itself(dataset: Path, tmp_path: Path, start: Start) -> None:
    words = [os.environ["TIMM_TRAIN"], dataset, *WORDS, "--device", "cpu", "--grad-accum-steps", "6", "--lr", "0.01"]
    words += ["--output", "out", "--experiment"]
    assert start(TRAIN, *words, "one", "--epochs", "1").wait() == 0
    checkpoint = tmp_path / "out" / "one" / "checkpoint-0.pth.tar"
    assert start(TRAIN, *words, "two", "--epochs", "2", "--resume", checkpoint).wait() == 0
    assert torch.load(tmp_path / "out" / "two" / "last.pth.tar", weights_only=False)["epoch"] == 1
