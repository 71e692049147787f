"""Small real datasets and real runs for the tests."""

import functools
import gc
import io
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_train.runtime.process import importing_torch, uncollected

# For this process, so before torch is imported, and for every one that it starts: several share few cores, and threads
# that wait for their turn spin, which costs a small run twenty times its own work.
os.environ["OMP_NUM_THREADS"] = "1"

with importing_torch():
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from dali_train.checkpoint.format import load_newest
    from dali_train.config import Config, load_config
    from dali_train.data.dataset.tfrecord import write_records
    from dali_train.extras import local_launch
    from dali_train.extras.indexing.foreign_shards import build_index

from tests.ranks import POOL, Ranks, command, in_environment
from tests.s3_server import S3Server

REPOSITORY = Path(__file__).parent.parent

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # nor does each compile the package, for a second or two

# A ViT and a recipe with everything on that could depend on ranks: dropout, stochastic depth, Mixup, clipping.
TINY_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size=32, eval_size=32, eval_resize_to=36, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2,
                    pos_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1),
    ),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=32, micro_batch=4),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="run", epochs=4, keep_checkpoints=100),
    hooks=HooksConfig(log_every_steps=1, trace_samples=True),
)
"""


# Files that take longest, beside which all others run.
_LONG_FILES = {"test_slurm.py", "test_fuzz.py"}

# Many processes each, which leave nothing of two cores; and the file that judges by seconds of silence. One after the
# other.
_CROWDED_FILES = {"test_parallel.py", "test_tensor_parallel.py", "test_hang.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file to one process, which builds its module's fixtures once. xdist's own groups do not:
    pytest 9.2 ignores the names that xdist 3.8 gives to tests.

    With --dist worksteal it is xdist's own scheduler: after a crash that one goes on with the tests behind.
    """
    if config.option.dist != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return "crowded" if Path(path).name in _CROWDED_FILES else path

    config.option.loadscopereorder = False  # files begin in the order below, not by their number of tests
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what the tests import from garbage collection."""
    with uncollected():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def collected_once() -> Iterator[None]:
    """Exempt what a file of tests leaves, which is mostly what it has imported, from later garbage collections: each
    loader that is closed has one."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the files that take longest begin, so that others run beside them."""
    items.sort(key=lambda item: (item.path.name not in _LONG_FILES, item.path.name not in _CROWDED_FILES))


def photograph(seed: int, height: int, width: int) -> Image.Image:
    """Random blobs of two pixels: enough detail for a careless resize to show."""
    pixels = np.random.default_rng(seed).integers(0, 256, size=(height // 2, width // 2, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(image: Image.Image) -> bytes:
    return encoded(image, "JPEG", quality=90)


def write_shard(path: Path, records: list[tuple[bytes, int]], **features: str | int) -> None:
    """A TFRecord file of (encoded image, label as stored) records, with more `features` that they share."""
    write_records(path, ((content, {"image/class/label": label, **features}) for content, label in records))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 training images in 3 shards and 13 to validate, 5 classes, of all sizes."""
    root = tmp_path_factory.mktemp("dataset")
    for split, count, shards in (("train", 50, 3), ("validation", 13, 1)):
        records = [(jpeg(photograph(i, 30 + 7 * (i % 9), 80 - 5 * (i % 11))), 1 + i % 5) for i in range(count)]
        for shard in range(shards):
            write_shard(root / split / f"{split}-{shard:05d}-of-{shards:05d}", records[shard::shards])
    build_index(root)
    return root


@pytest.fixture(scope="module")
def s3_of_module() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3_server(s3_of_module: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The store of the module's tests, which the environment of this process names; without a fault."""
    for name, value in s3_of_module.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_of_module
    s3_of_module.fault = None


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces and differentiates but generates no code, for which Inductor takes a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def forked_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch_locally` forks ranks from the server of ranks.py, which has imported torch, instead of starting them."""

    def launch(config: LaunchConfig, work: Callable[..., Any]) -> Any:
        config.start_method = "forkserver"
        return functools.partial(elastic_launch(config, in_environment), dict(os.environ), work)

    monkeypatch.setattr(local_launch, "elastic_launch", launch)


@pytest.fixture
def tiny_config(dataset: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny-config.py"
    path.write_text(TINY_CONFIG.format(root=str(dataset)))
    return path


@pytest.fixture
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config)


@pytest.fixture(scope="session")
def plain_run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `TINY_CONFIG` on one rank: 7 steps of 8 micro-batches. It is only read."""
    return finished_run(tmp_path_factory.mktemp("plain"), dataset)


StartTraining = Callable[..., Ranks]
Train = Callable[..., str]


@pytest.fixture
def start_training(tiny_config: Path, tmp_path: Path) -> StartTraining:
    """``start_training("name", "--section.field", "value", ranks=2)`` starts a run in ``tmp_path/name``."""

    def start(
        name: str,
        *overrides: str,
        ranks: int = 1,
        config: Path = tiny_config,
        environment: dict[str, str] | None = None,
    ) -> Ranks:
        arguments = ["train", "--config", str(config), "--run.dir", str(tmp_path / name), *overrides]
        return Ranks(arguments, ranks, tmp_path / f"{name}.log", environment)

    return start


@pytest.fixture
def train(tiny_config: Path, tmp_path: Path) -> Train:
    """``train("name", "--section.field", "value", ranks=2)`` trains to the end in ``tmp_path/name``, where the status
    of every rank must be `status`; gives what the ranks printed."""

    def run(name: str, *overrides: str, ranks: int = 1, config: Path = tiny_config, status: int = 0) -> str:
        arguments = ["train", "--config", str(config), "--run.dir", str(tmp_path / name), *overrides]
        return run_in_pool(arguments, tmp_path / f"{name}.log", ranks=ranks, status=status)

    return run


@pytest.fixture
def run_command(tiny_config: Path, tmp_path: Path) -> Train:
    """``run_command("plan", ..., status=0)`` runs any command in one process; gives what it printed."""

    def run(*arguments: str, status: int = 0) -> str:
        log = tmp_path / f"{arguments[0]}.log"
        log.unlink(missing_ok=True)
        return run_in_pool(list(arguments), log, status=status)

    return run


def run_in_pool(arguments: list[str], log: Path, *, ranks: int = 1, status: int = 0) -> str:
    """Run ``dali-train ARGUMENTS`` on ranks of the pool, which must end with `status`; gives all that `log` has."""
    statuses = POOL.run(ranks, command, arguments, log=log)
    output = log.read_text()
    assert set(statuses) == {status}, f"{statuses}\n{output}"
    return output


def finished_run(directory: Path, dataset: Path, *overrides: str, ranks: int = 1) -> Path:
    """The directory of a run of `TINY_CONFIG`, ``directory/run``."""
    (directory / "config.py").write_text(TINY_CONFIG.format(root=str(dataset)))
    words = ["train", "--config", str(directory / "config.py"), "--run.dir", str(directory / "run"), *overrides]
    run_in_pool(words, directory / "log", ranks=ranks)
    return directory / "run"


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    newest, warnings = load_newest(directory / "checkpoints")
    assert newest is not None and not warnings
    return newest.state["model"]


def relative_differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """|a - b| / |a| in the 2-norm, for each tensor."""
    return {name: float((a[name].double() - b[name].double()).norm() / a[name].double().norm()) for name in a}
