"""Building the CUDA runtime that needs no GPU, and the environment in which a process runs on it."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
DEVICES = 4
SOURCES = sorted(HERE.glob("*.cpp"))


def reason_to_skip() -> str | None:
    """Return why this machine cannot build or use it, in words; None if it can."""
    import torch

    if shutil.which("g++") is None:
        return "there is no g++ to build the CUDA runtime with"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not _headers():
        return "triton, whose wheel has CUDA's headers, is not installed"
    return None


def environment(files: Path) -> dict[str, str]:
    """Return the variables with which a new process runs on the fake, after building it if it is not built yet.

    Args:
        files: a folder that all ranks share, in which collectives leave their files.
    """
    library = build()
    return {
        "LD_PRELOAD": str(library),
        # Triton, cuDNN and DALI open the driver by its name.
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "FAKECUDA_DEVICES": str(DEVICES),
        "FAKECUDA_FILES": str(files),
        "OMP_NUM_THREADS": "1",
        # cuBLAS's own memory, of each thread that calls it, would be as large as a small model.
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "128",
    }


def build() -> Path:
    """Return the library, compiled once for these sources and this version of CUDA's headers: about ten seconds."""
    headers = _headers()
    content = [path.read_bytes() for path in [*SOURCES, HERE / "fakecuda.h", headers[0] / "cuda_runtime_api.h"]]
    digest = hashlib.sha256(b"".join(content)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dali-train-tests"
    library = cache / f"fakecuda-{digest}" / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # several test processes may build at once
            built = Path(folder) / library.name
            command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
            subprocess.run(
                [*command, *(f"-I{folder}" for folder in headers), "-o", built, *SOURCES, "-ldl", "-lpthread"],
                check=True,
            )
            built.replace(library)
    return library


def _headers() -> list[Path]:
    """Return the folders of CUDA's headers: of torch's own version, and in Triton's wheel, where they may be older."""
    import torch

    folders = []
    version = f"cu{(torch.version.cuda or '').partition('.')[0]}"
    for name, path in (("nvidia", (version, "include")), ("triton", ("backends", "nvidia", "include"))):
        with suppress(ImportError):
            folders += [Path(place, *path) for place in import_module(name).__path__]
    return [folder for folder in folders if (folder / "cuda_runtime_api.h").exists()]
