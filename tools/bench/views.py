"""The contenders of data.py that make several views of an image, as self-supervised training has them.

All of them: 2 views of 224 pixels with 0.32 to 1 of the area and 8 of 96 pixels with 0.05 to 0.32, each mirrored with
probability 0.5 and normalised, antialiased, in float32; no other augmentation, so that crops are compared and not
tables of operators. An image counts once, whatever its views. The peers decode an image once and cut all views from it.
"""

from collections.abc import Iterator
from typing import Any

from tools.bench.peers import MEAN, SIZE, STD, Contender, Task, data_loader, for_ever, need_files

LOCAL_SIZE, NUM_GLOBAL, NUM_LOCAL = 96, 2, 8
GLOBAL_AREA, LOCAL_AREA = (0.32, 1.0), (0.05, 0.32)


def _ours(task: Task) -> Iterator[Any]:
    from dali_train import TrainLoader, View

    views = (
        View(size=SIZE, n=NUM_GLOBAL, area=GLOBAL_AREA),
        View(size=LOCAL_SIZE, n=NUM_LOCAL, area=LOCAL_AREA),
    )
    place: Any = {"device": "cpu", "num_threads": task.threads, "dp_rank": 0, "dp_size": 1, "read_ahead_mb": 0}
    return for_ever(TrainLoader(task.dataset, batch_size=task.batch, views=views, channels_last=True, **place))


def _torchvision(task: Task) -> Iterator[Any]:
    """torchcodec's tensors and transforms.v2, the faster of torchvision's ways."""
    import torch
    from torchcodec.decoders import decode_image
    from torchvision import datasets
    from torchvision.transforms import v2

    need_files(task)

    def view(size: int, area: tuple[float, float]) -> Any:
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=area, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([MEAN / 255] * 3, [STD / 255] * 3),
            ]
        )

    transforms = [view(SIZE, GLOBAL_AREA)] * NUM_GLOBAL + [view(LOCAL_SIZE, LOCAL_AREA)] * NUM_LOCAL
    files = datasets.ImageFolder(
        str(task.files),
        transform=lambda image: [transform(image) for transform in transforms],
        loader=decode_image,
    )
    return data_loader(task, files)


def _lightly(task: Task) -> Iterator[Any]:
    """Its transform for DINO, without jitter, blur, greyscale and solarisation."""
    from lightly.transforms import DINOTransform
    from torchvision import datasets

    need_files(task)
    transform = DINOTransform(
        global_crop_size=SIZE,
        global_crop_scale=GLOBAL_AREA,
        local_crop_size=LOCAL_SIZE,
        local_crop_scale=LOCAL_AREA,
        n_local_views=NUM_LOCAL,
        cj_prob=0,
        random_gray_scale=0,
        gaussian_blur=(0, 0, 0),
        solarization_prob=0,
        normalize={"mean": [MEAN / 255] * 3, "std": [STD / 255] * 3},
    )
    return data_loader(task, datasets.ImageFolder(str(task.files), transform))


VIEWS: dict[str, Contender] = {
    "views dali_train": _ours,
    "views peer torchvision v2": _torchvision,
    "views peer lightly": _lightly,
}
