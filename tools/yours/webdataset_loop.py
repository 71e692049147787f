"""WebDataset, split by node and worker, its shards shuffled by a seed.

A pipeline has no state, so the checkpoint has epoch and step, and a resumed run begins the epoch again. 36 shards of 16
images each.
"""

import sys
from functools import partial
from pathlib import Path

import webdataset

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import Plain, image_folder, written


def write(images: Path, path: Path) -> None:
    path.mkdir()
    with webdataset.ShardWriter(f"{path}/%02d.tar", maxcount=16, verbose=0) as shards:
        for number, (image, label) in enumerate(image_folder(images)):
            shards.write({"__key__": f"{number:03}", "image.pth": image, "label.cls": label})


def main(images: Path, work: Path, batch_size: int) -> None:
    plain = Plain(work)
    shards = sorted(str(path) for path in written(images.with_name("shards"), partial(write, images)).glob("*.tar"))
    dataset = webdataset.WebDataset(
        shards, shardshuffle=36, detshuffle=True, seed=0, nodesplitter=webdataset.split_by_node
    )
    batches = dataset.decode().to_tuple("image.pth", "label.cls").batched(batch_size)
    checkpoint = plain.load()
    log = Log(work, behind=checkpoint["behind"] if checkpoint else None)
    for epoch in range(checkpoint["behind"][0] if checkpoint else 0, EPOCHS):
        loader = webdataset.WebLoader(batches, batch_size=None, num_workers=2)
        for step, (batch, labels) in enumerate(loader, start=1):
            log.trains(epoch, step, labels)
            plain.train(batch, labels)
            if step % SAVE_EVERY == 0:
                plain.save(behind=(epoch, step))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
