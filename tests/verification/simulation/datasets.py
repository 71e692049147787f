"""The protocols of a dataset that are simulated: its conversion by one or several machines, and a node's cache."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import Config, DataConfig, SampleConfig
from dali_train.config.sections import BatchConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from dali_train.data.convert import conversion, shards
from dali_train.data.convert.conversion import Conversion
from dali_train.data.convert.image import EncodingOptions, StoredImage
from dali_train.data.convert.sources import Image, Images
from dali_train.data.dataset import storage, write_index
from dali_train.data.dataset.index import INDEX_DTYPE
from dali_train.data.dataset.manifest import Shard, SplitManifest, SplitName
from dali_train.data.dataset.storage import RangedImages
from dali_train.data.loading import cache
from dali_train.data.sampling.order import SampleOrder
from dali_train.errors import ConfigError, DatasetError, UserError
from dali_train.parallel.layout import Layout
from dali_train.runtime import object_store
from dali_train.runtime.launch import Launch
from tests.verification.simulation.disk import ROOT, Node
from tests.verification.simulation.group import Group
from tests.verification.simulation.patches import current
from tests.verification.simulation.protocols import Protocol, Quiet
from tests.verification.simulation.store import REPLACED, Store
from tests.verification.simulation.threads import Executor, Future, wait
from tests.verification.simulation.world import Clock, Machine, Process, Thread, ViolationError, World, current_world

OUT = Path(ROOT) / "dataset"


class Source:
    """Images of one raw pixel, which has the image's number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def list(self) -> Iterator[Image]:
        return (Image("source", f"{number}", number, 3, number % 2) for number in range(self._size))

    @staticmethod
    def read(image: Image) -> StoredImage:
        return StoredImage(image.offset.to_bytes(3, "big"), 1, 1, is_raw=True)


_IMAGES: dict[SplitName, Images] = {"train": Images(Source(11), "source"), "validation": Images(Source(2), "source")}


class Converted(Protocol):
    """A conversion by one process after another, or in parts by several machines that share a disk, which are killed
    and start again.

    Whoever finishes leaves the dataset that an undisturbed conversion makes, byte for byte, and nothing else. When
    nothing fails any more, the same commands finish.
    """

    modules = (conversion, shards, write_index)
    replaced: ClassVar[dict[str, Any]] = {
        "ThreadPoolExecutor": Executor,
        "wait": wait,
        "Progress": Quiet,
        "map_file": Path.read_bytes,  # nothing is mapped here
        "verify_shards": lambda *_, **__: SimpleNamespace(problems=[], summary=list),  # the history compares every byte
        "_return_freed_memory": lambda: None,
    }
    rates = dict(switch=0.1, delay=0.002, freeze=0.002, kill=0.006, power=0.003, full=0.002, error=0.003)
    undisturbed: ClassVar[dict[str, bytes]] = {}  # the files of the dataset

    def __init__(self, world: World) -> None:
        super().__init__(world)
        if not self.undisturbed:
            alone = World(0, {"switch": 0.0})
            with current(alone):
                alone.spawn(Machine("alone"), lambda: self._convert("all"), "alone")
                alone.run()
            self.undisturbed.update(files_below(alone.disk.entry(OUT.name)))
        self.machines_of_run = self.machines(3)
        total = self.random.randint(1, 3) if len(self.machines_of_run) > 1 else 0
        self.parts = [f"{number}/{total}" for number in range(1, total + 1)]
        world.spawn(Machine("operator"), self._operate, "operator")

    def _operate(self) -> int:
        world, random = self.world, self.random
        for _ in range(random.randint(1, 2)):
            if not self.parts:
                self._wait([self._start("all") for _ in range(random.choice((1, 1, 2)))])
                continue
            self._wait([self._start("plan")])
            started = [self._start(part) for part in self.parts if random.random() < 0.8]
            if random.random() < 0.3:  # of a part, or too early
                started.append(self._start(random.choice([*self.parts, "finish"])))
            self._wait(started)
            if random.random() < 0.5:
                self._wait([self._start("finish")])
        world.stop_faults()
        for phase in ("plan", *self.parts, "finish") if self.parts else ("all",):
            if status := self._wait([self._start(phase)])[0]:
                raise ViolationError(f"nothing fails any more, but {phase} ends with status {status}")
        self._check()
        return 0

    def _start(self, phase: str) -> Process:
        self.world.block(self.random.choice((0.0, 0.0, 0.05)) * self.random.random())
        return self.world.spawn(self.random.choice(self.machines_of_run), lambda: self._main(phase), phase)

    def _wait(self, started: list[Process]) -> list[int]:
        return [self.world.wait_for(process) for process in started]

    def _main(self, phase: str) -> int:
        try:
            self._convert(phase)
        except (UserError, OSError) as error:
            self.world.note(f"{type(error).__name__}: {error}")
            return 2
        if phase in ("all", "finish"):
            self._check()
        return 0

    @staticmethod
    def _convert(phase: str) -> None:
        options = Conversion(
            name="simulated",
            splits=_IMAGES,
            class_names=["a", "b"],
            out=OUT,
            encoding=EncodingOptions(format="raw"),
            num_shards={"train": 4, "validation": 1},
            seed=0,
            workers=2,
            on_bad="fail",
        )
        conversion.convert(options, phase)

    def _check(self) -> None:
        found = files_below(self.world.disk.entry(OUT.name))
        for name in sorted(found.keys() | self.undisturbed.keys()):
            if found.get(name) != self.undisturbed.get(name):
                how = "is missing" if name not in found else "is left" if name not in self.undisturbed else "differs"
                raise ViolationError(f"the dataset is finished, but {name} {how}")


_SIZES = np.array([100 + number * 2_711 % 9_000 for number in range(24)])  # bytes of the images, of 1 to 3 blocks
_STARTS = np.cumsum(_SIZES) - _SIZES
_SHARD = np.random.default_rng(0).integers(0, 256, int(_SIZES.sum()), np.uint8).tobytes()
_ROWS = np.zeros(len(_SIZES), INDEX_DTYPE)
_ROWS["offset"], _ROWS["size"], _ROWS["label"] = _STARTS, _SIZES, np.arange(len(_SIZES)) % 2


def _image(number: int) -> bytes:
    return _SHARD[_STARTS[number] : _STARTS[number] + _SIZES[number]]


@dataclass(frozen=True)
class TrainingSplit:
    """In the place of `Split`, whose files are not under test: a dataset of one shard in the store."""

    name = "train"
    url = "s3://bucket/train"
    files = None
    rows = _ROWS
    checksums = np.array([crc32c(_image(number)) for number in range(len(_SIZES))], np.uint32)
    shards = (Shard(name="shard", num_records=len(_SIZES), num_bytes=len(_SHARD)),)
    num_bytes = dataset_bytes = len(_SHARD)
    num_images = len(_SIZES)
    is_on_disk = False
    manifest = SimpleNamespace(
        splits={
            "train": SplitManifest(
                num_records=len(_SIZES), shards=shards, index_crc32c="01234567", image_checksums_crc32c="0123abcd"
            )
        }
    )

    def order(self, config: SampleConfig) -> SampleOrder:
        return SampleOrder.of(config, _ROWS["label"])


_SPLIT: Any = TrainingSplit()
_LIMIT = 100_000  # bytes of the cache; all images take 143,360
_CONFIG = Config(
    data=DataConfig(root="s3://bucket", cache=f"{ROOT}/cache", cache_gb=_LIMIT / 1e9),
    batch=BatchConfig(global_batch=3, micro_batch=1),
    run=RunConfig(dir="run", epochs=3),
    model=ModelConfig(name="any"),
    optimizer=OptimizerConfig(lr=0.1),
    schedule=ScheduleConfig(),
)
_NUM_STEPS = 24
_ORDER = SampleOrder.of(_CONFIG, _ROWS["label"])


def _images_at(step: int, k: int) -> NDArray[np.int64]:
    return _ORDER.images_at(np.array([3 * step + k]))[0]


_OF_USER = f"cache/user-{os.getuid()}"
_OTHERS = {  # files that no cache has written, by their paths
    f"{_OF_USER}/notes.txt": b"mine",
    f"{_OF_USER}/train-24-89abcdef/0/7": b"without the mark of a cache",
    f"{_OF_USER}/train-24-0123abcd/0/7.jpg": b"no number",
    f"{_OF_USER}/train-24-0123abcd/photos/7": b"not in a directory of its",
    f"{_OF_USER}/train-9-fedcba98/readme": b"among the images of another dataset",
}
_OF_ANOTHER_DATASET = {f"{_OF_USER}/train-9-fedcba98/{name}": b"" for name in (".dali-train-cache", "0/3", "0/4")}


class Cached(Protocol):
    """One to three ranks of a node that train from a bucket through the node's cache, over and over, perhaps two runs
    at once.

    Every image is that of the bucket. No fault of the disk ends a run. One process evicts at a time, and removes
    nothing but images of a cache. When nothing fails any more, the cache is within its limit.
    """

    modules = (cache, storage, object_store)
    replaced: ClassVar[dict[str, Any]] = {
        **REPLACED,
        "Future": Future,
        "_open": lambda _: current_world().stores[0],
        "gc": SimpleNamespace(collect=lambda: None),
        "host_group": lambda *_: current_world().process.own.get("group"),
        "_LEAST_WAIT_S": 0.2,  # rounds of eviction are all that happens in most of the time
    }
    rates = dict(switch=0.1, delay=0.004, freeze=0.002, kill=0.004, power=0.002, full=0.006, error=0.004)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.node = self.machines(1)[0]
        self.evicting: list[Process] = []
        world.stores.append(Store(world, lambda: None))
        world.stores[0].objects["shard"] = _SHARD, 1
        for path, content in (_OTHERS | _OF_ANOTHER_DATASET).items():
            world.disk.place(path, content)
        world.spawn(Machine("operator"), self._operate, "operator")

    def _operate(self) -> int:
        world, random = self.world, self.random
        for number in range(random.randint(1, 2)):
            ranks = self._start(number, random.randrange(_NUM_STEPS), random.randint(1, 4))
            if random.random() < 0.2:
                world.block(3 * random.random())
                ranks += self._start(number + 10, random.randrange(_NUM_STEPS), 1)
            for process in ranks:
                if world.wait_for(process) == -9:
                    world.block(random.choice((0.0, 5.0)))
                    for other in ranks:
                        world.end(other, -9)
        world.stop_faults()
        if statuses := {world.wait_for(process) for process in self._start(100, 0, _NUM_STEPS)} - {0}:
            raise ViolationError(f"nothing fails any more, but a rank ends with status {statuses}")
        self._check()
        return 0

    def _start(self, number: int, step: int, num_steps: int) -> list[Process]:
        size = self.random.randint(1, 3)
        group = Group(self.world, size) if size > 1 else None
        return [
            self.world.spawn(self.node, self._rank_main(rank, size, group, step, num_steps), f"{number}.{rank}")
            for rank in range(size)
        ]

    def _rank_main(self, rank: int, size: int, group: Any, step: int, num_steps: int) -> Callable[[], int]:
        def main() -> int:
            if group is not None:
                group.join(rank)
                self.world.process.own["group"] = group
            try:
                self._train(rank, size, group, step, min(_NUM_STEPS, step + num_steps))
            except (ConfigError, DatasetError, RuntimeError) as error:
                self.world.note(f"{type(error).__name__}: {error}")
                return 2
            return 0

        return main

    def _train(self, rank: int, size: int, group: Any, start: int, end: int) -> None:
        node = cache.join_node(_CONFIG.data, Launch(rank=rank, world_size=size), Layout(rank=rank, replicas=size))
        assert node is not None
        if node.lock is not None:
            self.evicting = [process for process in self.evicting if not process.is_dead]
            self.evicting.append(self.world.process)
            if len(self.evicting) > 1:
                raise ViolationError(f"{' and '.join(process.name for process in self.evicting)} evict")
        images = RangedImages(_SPLIT, node.cache(_SPLIT), staged_bytes=20_000)
        eviction = node.eviction(_SPLIT, _CONFIG, start_step=start, num_ahead=1)
        turns: Any = (SimpleNamespace(step=step, k=k) for step in range(start, end) for k in range(rank, 3, size))
        for turn in turns if eviction is None else eviction.follow(turns):
            if turn.k == rank and group is not None:  # as all ranks wait for one another in a step
                group.take(group.give(None))
            ahead = Thread(target=images.prefetch, args=(_images_at(turn.step, turn.k),), name="ahead", daemon=True)
            ahead.start()
            Clock.sleep(0.1 * self.random.random())
            wanted = _images_at(turn.step, turn.k)
            for image, content in zip(wanted.tolist(), images.read(wanted), strict=True):
                if content.tobytes() != _image(image):
                    raise ViolationError(f"image {image} is not that of the bucket")
            if (turn.step, turn.k + size) >= (end - 1, 3):
                Clock.sleep(2.0)  # for the last rounds of eviction
        self.evicting = [process for process in self.evicting if process is not self.world.process]

    def _check(self) -> None:
        found = {f"cache/{path}": content for path, content in files_below(self.world.disk.entry("cache")).items()}
        for path, content in _OTHERS.items():
            if found.get(path) != content:
                raise ViolationError(f"{path}, which is another's, is {found.get(path)!r}")
        if left := _OF_ANOTHER_DATASET.keys() & found.keys():
            raise ViolationError(f"{min(left)} of another dataset is left")
        images = f"{_OF_USER}/train-24-0123abcd/0/"
        numbers = [int(path.removeprefix(images)) for path in found if path.startswith(images) and path[-4:] != ".jpg"]
        used = sum(-(-_SIZES[number] // 4096) * 4096 for number in numbers)
        if used > _LIMIT:
            raise ViolationError(f"the cache has {used} bytes")


def files_below(directory: Node | None, prefix: str = "") -> dict[str, bytes]:
    """Return the content of all files by their relative paths, and of directories without any by theirs and a slash."""
    found: dict[str, bytes] = {}
    for name, node in directory.entries.items() if directory is not None else ():
        path = f"{prefix}{name}"
        if node.is_directory:
            found |= files_below(node, f"{path}/") or {f"{path}/": b""}
        else:
            found[path] = bytes(node.data)
    return found
