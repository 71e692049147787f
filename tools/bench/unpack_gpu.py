"""Unpack what pack_gpu.sh has packed, on a machine without a package index, and import each package.

    python3 tools/bench/unpack_gpu.py PARTS SITE

It uses no program but Python: xz is not on every machine. One process imports everything, since torch alone takes many
seconds from a cold disk.
"""

import hashlib
import importlib
import io
import sys
import tarfile
import time
from pathlib import Path

MODULES = (
    "torch torchvision timm psutil pytest sklearn scipy.io nvidia.dali.plugin.pytorch nvidia.nvimgcodec crc32c xdist "
    "pytest_timeout dali_train.commands.train"
)


def unpack(parts: Path, site: Path) -> None:
    """Check the parts against their checksums, and unpack them into `site`."""
    files = []
    for line in (parts / "bundle.tar.xz.sha256").read_text().splitlines():
        checksum, name = line.split()
        files.append((parts / name).read_bytes())
        if hashlib.sha256(files[-1]).hexdigest() != checksum:
            sys.exit(f"{parts / name} is damaged: carry it again")
    site.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(files)), mode="r:xz") as archive:
        archive.extractall(site, filter="fully_trusted")


def fails_to_import(name: str) -> bool:
    begin = time.monotonic()
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a package may raise anything
        print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
        return True
    print(f"ok    {name} {getattr(module, '__version__', '')} {time.monotonic() - begin:.1f} s", flush=True)
    return False


def main() -> None:
    parts, site = map(Path, sys.argv[1:])
    begin = time.monotonic()
    unpack(parts, site)
    print(f"unpacked in {time.monotonic() - begin:.1f} s", flush=True)
    sys.path[:0] = [str(site), str(Path(__file__).parent.parent.parent)]
    failed = [name for name in MODULES.split() if fails_to_import(name)]
    sys.exit(len(failed))


if __name__ == "__main__":
    main()
