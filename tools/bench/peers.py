"""The contenders of data.py: each yields batches without end, from the same images, cropped the same way.

All of them: RandomResizedCrop to 224 (area 0.08 to 1, aspect 3/4 to 4/3), mirrored with probability 0.5, (x - 127.5) /
127.5 in float32, shuffled; those named RandAugment apply one policy of timm's besides. This project and FFCV hand over
channels-last memory, the others channels-first. After the first round everything is in the page cache, so this project
reads nothing ahead, nor does FFCV.
"""

import io
import itertools
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dali_train.config import Config, DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import text_index_path
from dali_train.data.dataset.storage import MappedFiles, stored_image
from tools.bench.turns import alone, loading_config

# Without recipes' noise (mstd), with which timm may posterize to 0 bits, which Pillow 13 refuses.
RANDAUGMENT = "rand-m9-inc1"
MEAN = STD = 127.5
SIZE = 224


@dataclass(frozen=True, kw_only=True)
class Task:
    dataset: Path
    work: Path  # for copies in other formats
    batch: int
    threads: int

    @property
    def files(self) -> Path:
        return self.work / "files"

    @property
    def beton(self) -> Path:
        return self.work / "train.beton"

    @property
    def tar(self) -> Path:
        return self.work / "train-000000.tar"

    @property
    def turbo(self) -> Path:
        """Of JPEGs alone, since TurboLoader takes each member for one; or its own format, of raw pixels."""
        jpegs = self.work / "turbo.tar"
        return jpegs if jpegs.exists() else self.work / "turbo.tbl"

    @property
    def array_record(self) -> Path:
        return self.work / "train.array_record"


Contender = Callable[[Task], Iterator[Any]]


def export(task: Task) -> None:
    """Write the same bytes as image files, and in the formats of FFCV, WebDataset, Grain and TurboLoader if these are
    installed."""
    split = Split(task.dataset, "train")
    if split.manifest.encoding == "image":
        export_files(task)
        _export_webdataset(task, split)
        _export_array_record(task, split)
    _export_ffcv(task, split)
    _export_turboloader(task, split)


def export_files(task: Task) -> None:
    """Write the images as files, a folder for each class."""
    split = Split(task.dataset, "train")
    shards = MappedFiles(split)
    for image, row in enumerate(split.rows):
        folder = task.files / f"{row['label']:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{image:08d}.jpg").write_bytes(stored_image(shards, image).tobytes())


# ---------------------------------------------------------------------------------------------------------------
# This project
# ---------------------------------------------------------------------------------------------------------------


def _config(
    task: Task, *, antialias: bool = False, mixup: float = 0.0, reader: Any = "index", augment: str = "none"
) -> Config:
    data = DataConfig(
        root=str(task.dataset),
        antialias=antialias,
        num_threads=task.threads,
        reader=reader,
        read_ahead_mb=0,
        augment=augment,
    )
    return loading_config(data, micro_batch=task.batch, mixup_alpha=mixup, channels_last=True)


def _loader(task: Task, **settings: Any) -> Iterator[Any]:
    import torch

    from dali_train.data.loading.loader import TrainLoader

    split = Split(task.dataset, "train")
    loader = TrainLoader.of_split(split, _config(task, **settings), alone(torch.device("cpu"), task.threads))
    return iter(loader.next, None)


def _library(task: Task) -> Iterator[Any]:
    """As another trainer uses it: `_loader`'s settings as keywords, epoch after epoch, in a loop that is not ours."""
    from dali_train import TrainLoader

    settings = {name: getattr(_config(task).data, name) for name in ("antialias", "normalise", "read_ahead_mb")}
    settings |= {"num_threads": task.threads, "dp_rank": 0, "dp_size": 1}
    return for_ever(
        TrainLoader(task.dataset, batch_size=task.batch, image_size=SIZE, channels_last=True, device="cpu", **settings)
    )


def _dali_reader(task: Task) -> Iterator[Any]:
    if Split(task.dataset, "train").manifest.encoding == "raw":
        raise NotImplementedError("it reads encoded images, the dataset has raw pixels")
    return _loader(task, reader="dali")


def _stage(task: Task, *, stage: str) -> Iterator[Any]:
    """The first stages of this project's data path only, without the thread that hands batches over."""
    import torch
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import pipeline_def

    from dali_train.data.dataset.storage import open_storage
    from dali_train.data.loading.cpu import CpuTransform
    from dali_train.data.loading.dali import Feed, crop_graph, crop_inputs
    from dali_train.data.loading.loader_arguments import pixel_format
    from dali_train.data.sampling.micro_batch import MicroBatches

    split, config = Split(task.dataset, "train"), _config(task)
    if split.manifest.encoding == "raw":
        raise NotImplementedError("raw records have no decoding stage")
    micro_batches = MicroBatches(split.rows, config)
    steps = itertools.count()
    transform = CpuTransform(config.data, pixel_format(config, torch.device("cpu"), task.threads), size=task.batch)
    feed = Feed(crop_inputs(split, open_storage(split, config.data)), lambda: micro_batches(next(steps), 0))

    @pipeline_def(batch_size=task.batch, num_threads=task.threads, device_id=None)
    def reading_graph() -> Any:
        encoded = fn.external_source(source=lambda: feed()[0], batch=True, no_copy=True, dtype=types.UINT8, ndim=1)
        return fn.copy(encoded)  # into a DALI buffer, so that every byte is read

    pipe = reading_graph() if stage == "read" else crop_graph(feed, batch_size=task.batch, num_threads=task.threads)
    while True:
        (outputs,), flips = pipe.run(), feed.in_flight.popleft().flips
        if stage in ("read", "decode"):
            yield outputs
            continue
        crops = [np.asarray(crop) for crop in outputs]
        yield transform.resize(crops, flips) if stage == "resize" else transform(crops, flips, None)


# ---------------------------------------------------------------------------------------------------------------
# Peers
# ---------------------------------------------------------------------------------------------------------------


def data_loader(task: Task, dataset: Any) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset, batch_size=task.batch, shuffle=True, num_workers=task.threads, persistent_workers=True, drop_last=True
    )
    return for_ever(loader)


def for_ever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def need_files(task: Task) -> None:
    if not task.files.exists():
        raise NotImplementedError("it reads image files, the dataset has raw pixels")


def _rand_augment() -> list[Any]:
    """RANDAUGMENT for PIL images, as in timm's loader."""
    from timm.data.auto_augment import rand_augment_transform

    return [rand_augment_transform(RANDAUGMENT, {"img_mean": (128,) * 3, "interpolation": Image.Resampling.BILINEAR})]


def _pil_transform(augment: Sequence[Any] = ()) -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            *augment,
            transforms.ToTensor(),
            transforms.Normalize([MEAN / 255] * 3, [STD / 255] * 3),
        ]
    )


def _torchvision_pil(task: Task, augment: Sequence[Any] = ()) -> Iterator[Any]:
    from torchvision import datasets

    need_files(task)
    return data_loader(task, datasets.ImageFolder(str(task.files), _pil_transform(augment)))


def _v2_transform(augment: Sequence[Any] = ()) -> Any:
    """For decoded images, (3, height, width) uint8."""
    import torch
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            *([v2.ToPILImage(), *augment, v2.PILToTensor()] if augment else []),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([MEAN / 255] * 3, [STD / 255] * 3),
        ]
    )


def _torchvision_torchcodec(task: Task, augment: Sequence[Any] = ()) -> Iterator[Any]:
    """With the decoders that have replaced torchvision's own since 0.29."""
    from torchcodec.decoders import decode_image
    from torchvision import datasets

    need_files(task)
    return data_loader(task, datasets.ImageFolder(str(task.files), _v2_transform(augment), loader=decode_image))


def _spdl(task: Task) -> Iterator[Any]:
    """Threads instead of processes; torchcodec decodes, since SPDL's own FFmpeg takes 1.4 times as long in all."""
    import torch
    from spdl.dataloader import DataLoader
    from torchcodec.decoders import decode_image

    need_files(task)
    files, transform = sorted(task.files.glob("*/*.jpg")), _v2_transform()

    def shuffled() -> Iterator[Path]:
        while True:
            yield from (files[number] for number in torch.randperm(len(files)).tolist())

    def load(path: Path) -> Any:
        torch.set_num_threads(1)  # of this thread
        return transform(decode_image(path))

    return iter(
        DataLoader(
            shuffled(), preprocessor=load, batch_size=task.batch, aggregator=torch.stack, num_threads=task.threads
        )
    )


def _grain(task: Task) -> Iterator[Any]:
    """ArrayRecord files, as its documentation advises; the user chooses decoder and transforms."""
    import grain
    import torch
    from torchcodec.decoders import decode_image

    if not task.array_record.exists():
        raise NotImplementedError("it reads encoded images, the dataset has raw pixels")
    transform = _v2_transform()

    def load(record: bytes, generator: np.random.Generator) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(int(generator.integers(1 << 62)))
        return transform(decode_image(record)).numpy()

    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(task.array_record)]))
    batches = records.seed(0).shuffle().repeat().random_map(load).batch(task.batch, drop_remainder=True)
    workers = grain.MultiprocessingOptions(num_workers=task.threads)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(batches.to_iter_dataset(options).mp_prefetch(workers))


def _export_array_record(task: Task, split: Split) -> None:
    try:
        from array_record.python.array_record_module import ArrayRecordWriter
    except ImportError:
        return
    shards = MappedFiles(split)
    writer = ArrayRecordWriter(str(task.array_record), "group_size:1,uncompressed")
    for image in range(len(split)):
        writer.write(stored_image(shards, image).tobytes())
    writer.close()


def _timm(task: Task, augment: str | None = None) -> Iterator[Any]:
    from timm.data import create_dataset, create_loader

    need_files(task)
    loader = create_loader(
        create_dataset("", root=str(task.files)),
        input_size=(3, SIZE, SIZE),
        batch_size=task.batch,
        is_training=True,
        use_prefetcher=False,
        color_jitter=0.0,
        auto_augment=augment,
        interpolation="bilinear",
        mean=(MEAN / 255,) * 3,
        std=(STD / 255,) * 3,
        num_workers=task.threads,
        persistent_workers=True,
    )
    return for_ever(loader)


def _dali_tfrecord(task: Task, *, colossalai: bool) -> Iterator[Any]:
    """DALI's TFRecord reader: with its random-crop decoder, or as ColossalAI's example used it."""
    import torch
    from nvidia.dali import fn, tfrecord, types
    from nvidia.dali.pipeline import pipeline_def

    split = Split(task.dataset, "train")
    if split.manifest.encoding == "raw":
        raise NotImplementedError("raw records have no decoding stage")
    features = {
        "image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, ""),
        "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }
    index = [str(text_index_path(task.dataset, "train", shard.name)) for shard in split.shards]

    @pipeline_def(batch_size=task.batch, num_threads=task.threads, device_id=None)
    def graph() -> Any:
        record: Any = fn.readers.tfrecord(
            path=[str(path) for path in split.paths],
            index_path=index,
            features=features,
            random_shuffle=True,
            initial_fill=1000,
        )
        label = record["image/class/label"] - 1
        mirror = fn.random.coin_flip()
        if colossalai:
            images = fn.decoders.image(record["image/encoded"], output_type=types.RGB)
            images = fn.random_resized_crop(images, size=SIZE)
            return fn.flip(images, horizontal=mirror), label
        images = fn.decoders.image_random_crop(
            record["image/encoded"], output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=False)
        normalise = {"mean": [MEAN] * 3, "std": [STD] * 3, "dtype": types.FLOAT, "output_layout": "CHW"}
        return fn.crop_mirror_normalize(images, mirror=mirror, **normalise), label

    pipe = graph()
    pipe.build()
    while True:
        images, label = (torch.from_dlpack(output.as_tensor()) for output in pipe.run())
        yield (images.permute(0, 3, 1, 2).float() - MEAN) / STD if colossalai else images, label


def _ffcv(task: Task) -> Iterator[Any]:
    from ffcv.fields import RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    images = [
        RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
        RandomHorizontalFlip(),
        NormalizeImage(np.full(3, MEAN), np.full(3, STD), np.float32),
        ToTensor(),
        ToTorchImage(),
    ]
    loader = Loader(
        str(task.beton),
        batch_size=task.batch,
        num_workers=task.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": images, "label": [IntDecoder(), ToTensor(), Squeeze()]},
        custom_fields={"image": RGBImageField},
    )
    return for_ever(loader)


def _export_ffcv(task: Task, split: Split) -> None:
    """FFCV's format with the same bytes: FFCV's writer would decode and encode again."""
    try:
        from ffcv.fields import IntField, RGBImageField
        from ffcv.fields.rgb_image import IMAGE_MODES
        from ffcv.writer import DatasetWriter
    except ImportError:
        return
    mode = "jpg" if split.manifest.encoding == "image" else "raw"

    class StoredImage(RGBImageField):
        def encode(self, destination: Any, image: tuple[np.ndarray, int, int], malloc: Callable[[int], Any]) -> None:
            content, height, width = image
            destination["mode"], destination["height"], destination["width"] = IMAGE_MODES[mode], height, width
            destination["data_ptr"], storage = malloc(content.nbytes)
            storage[:] = content

    shards = MappedFiles(split)

    class Images:
        def __len__(self) -> int:
            return len(split)

        def __getitem__(self, image: int) -> tuple[Any, int]:
            row = split.rows[image]
            return (np.array(stored_image(shards, image)), int(row["height"]), int(row["width"])), int(row["label"])

    writer = DatasetWriter(str(task.beton), {"image": StoredImage(write_mode=mode), "label": IntField()}, num_workers=1)
    writer.from_indexed_dataset(Images())


def _webdataset(task: Task) -> Iterator[Any]:
    import webdataset

    need_files(task)
    dataset = (
        webdataset.WebDataset(str(task.tar), resampled=True, shardshuffle=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(_pil_transform())
        .batched(task.batch)
    )
    return for_ever(webdataset.WebLoader(dataset, batch_size=None, num_workers=task.threads, persistent_workers=True))


def _export_webdataset(task: Task, split: Split) -> None:
    try:
        import webdataset
    except ImportError:
        return
    shards = MappedFiles(split)
    with webdataset.TarWriter(str(task.tar)) as writer:
        for image, row in enumerate(split.rows):
            writer.write(
                {"__key__": f"{image:08d}", "jpg": bytes(stored_image(shards, image)), "cls": int(row["label"])}
            )


def _turboloader(task: Task) -> Iterator[Any]:
    """Its threads are as many as the machine's processors. Raw pixels take no normalisation but ImageNet's."""
    import turboloader

    is_raw = task.turbo.suffix == ".tbl"
    values = [MEAN / 255] * 3, [STD / 255] * 3
    loader = turboloader.DataLoader(
        str(task.turbo),
        batch_size=task.batch,
        num_workers=task.threads,
        shuffle=True,
        transform=turboloader.ImageNetNormalize() if is_raw else turboloader.Normalize(*values),
        image_size=SIZE,
        output_format="pytorch",
        drop_last=True,
        train_aug=True,
    )
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def _export_turboloader(task: Task, split: Split) -> None:
    """The same JPEGs; of raw pixels, its own format with squares as large as their short side, made of JPEGs."""
    try:
        import turboloader
    except ImportError:
        return
    shards, is_raw = MappedFiles(split), split.manifest.encoding == "raw"
    jpegs = task.work / "turbo.tar"
    with tarfile.open(jpegs, "w", format=tarfile.USTAR_FORMAT) as writer:
        for image, row in enumerate(split.rows):
            content = stored_image(shards, image)
            encoded = content.tobytes()
            if is_raw:
                buffer = io.BytesIO()
                pixels = content.reshape(int(row["height"]), int(row["width"]), 3)
                Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
                encoded = buffer.getvalue()
            member = tarfile.TarInfo(f"{image:08d}.jpg")
            member.size = len(encoded)
            writer.addfile(member, io.BytesIO(encoded))
    if is_raw:
        side = int(np.minimum(split.rows["height"], split.rows["width"]).min())
        turboloader.preprocess_to_tbl(str(jpegs), str(task.work / "turbo.tbl"), image_size=side)
        jpegs.unlink()


def _libjpeg_turbo(task: Task) -> Iterator[Any]:
    import simplejpeg

    split = Split(task.dataset, "train")
    if split.manifest.encoding == "raw":
        raise NotImplementedError("raw records have no decoding stage")
    shards = MappedFiles(split)
    contents = [stored_image(shards, image).tobytes() for image in range(len(split))]
    coming = itertools.cycle(contents)
    with ThreadPoolExecutor(task.threads) as pool:
        while True:
            yield list(pool.map(simplejpeg.decode_jpeg, itertools.islice(coming, task.batch)))


CONTENDERS: dict[str, Contender] = {
    "dali_train": _loader,
    "TrainLoader": _library,
    "dali_train antialiased": lambda task: _loader(task, antialias=True),
    "dali_train antialiased, Mixup": lambda task: _loader(task, antialias=True, mixup=0.2),
    "dali_train reader dali": _dali_reader,
    "ladder: read": lambda task: _stage(task, stage="read"),
    "ladder: read, decode": lambda task: _stage(task, stage="decode"),
    "ladder: read, decode, resize": lambda task: _stage(task, stage="resize"),
    "ladder: read to normalise": lambda task: _stage(task, stage="normalise"),
    "torchvision PIL": _torchvision_pil,
    "torchvision torchcodec": _torchvision_torchcodec,
    "spdl": _spdl,
    "grain": _grain,
    "timm": _timm,
    "RandAugment dali_train": lambda task: _loader(task, augment=RANDAUGMENT),
    "RandAugment dali_train antialiased": lambda task: _loader(task, antialias=True, augment=RANDAUGMENT),
    "RandAugment peer timm": lambda task: _timm(task, RANDAUGMENT),
    "RandAugment peer torchvision PIL": lambda task: _torchvision_pil(task, _rand_augment()),
    "RandAugment peer torchvision torchcodec": lambda task: _torchvision_torchcodec(task, _rand_augment()),
    "dali tfrecord reader": lambda task: _dali_tfrecord(task, colossalai=False),
    "colossalai": lambda task: _dali_tfrecord(task, colossalai=True),
    "ffcv": _ffcv,
    "webdataset": _webdataset,
    "turboloader": _turboloader,
    "synthetic": lambda task: _loader(task, reader="synthetic"),
    "libjpeg-turbo alone": _libjpeg_turbo,
}
