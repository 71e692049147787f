"""Image files, archives and datasets for the tests of the data rooms."""

import importlib.util
import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from tests.conftest import REPOSITORY, jpeg, photograph

SYNSETS = ("n01440764", "n01443537", "n02084071", "n02121808", "n03001627")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def small_photograph(seed: int) -> bytes:
    """A JPEG of some 40 x 50 pixels, another one for every seed."""
    return jpeg(photograph(seed, 32 + 2 * (seed % 9), 60 - 2 * (seed % 11)))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, mode: str = "w") -> Path:
    """A tar archive of (name, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def tar_bytes(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_training_archive(path: Path, *, num_images: int = 4, synsets: Iterable[str] = SYNSETS, first_seed: int = 0) -> Path:
    """ImageNet's layout: a tar of a tar a synset. `num_images` each, in an order that is not sorted."""
    seed = first_seed
    members = []
    for synset in sorted(synsets, reverse=True):
        images = {}
        for number in range(num_images):
            images[f"{synset}_{number}.JPEG"] = small_photograph(seed)
            seed += 1
        members.append((f"{synset}.tar", tar_bytes(images)))
    return write_tar(path, members)


def write_folder(root: Path, classes: Mapping[str, int], *, first_seed: int = 0) -> Path:
    """``root/CLASS/NUMBER.jpg``, so many images of each class."""
    seed = first_seed
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number:03d}.jpg").write_bytes(small_photograph(seed))
            seed += 1
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below `root` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def tool(name: str) -> ModuleType:
    """A file of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
