"""Building the CUDA runtime that needs no GPU, and the environment in which a process runs on it."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
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
    if _headers() is None:
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
    assert headers is not None
    content = [path.read_bytes() for path in [*SOURCES, HERE / "fakecuda.h", headers / "cuda.h"]]
    digest = hashlib.sha256(b"".join(content)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dali-train-tests"
    library = cache / f"fakecuda-{digest}" / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # several test processes may build at once
            built = Path(folder) / library.name
            command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{library.name}"]
            subprocess.run([*command, "-o", built, *SOURCES, "-ldl", "-lpthread"], check=True)
            built.replace(library)
    return library


def _headers() -> Path | None:
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    return headers if (headers / "cuda_runtime_api.h").exists() else None
