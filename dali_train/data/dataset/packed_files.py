"""Packed files, which are not read in place: recognised by their first bytes, whatever they are called, and the command
that unpacks each."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from dali_train.files import open_regular

GZIP = b"\x1f\x8b"  # the first bytes of a file, which some readers here unpack themselves
_HEAD_BYTES = 512


class _Packing(NamedTuple):
    beginning: bytes  # a regular expression
    name: str
    command: str  # that unpacks FILE, or a filter
    suffixes: tuple[str, ...] = ()  # without which a filter's command does not take a file


_FROM_MEDMNIST = (
    "import numpy, sys; from pathlib import Path; from PIL import Image; arrays = numpy.load(sys.argv[1]); "
    "[(path.parent.mkdir(parents=True, exist_ok=True), Image.fromarray(image).save(path)) "
    'for split in ("train", "val", "test") '
    'for number, (image, label) in enumerate(zip(arrays[f"{split}_images"], arrays[f"{split}_labels"])) '
    'for path in [Path("images", split, str(label.ravel()[0]), f"{number}.png")]]'
)
_PACKINGS = (
    _Packing(re.escape(GZIP), "compressed with gzip", "gunzip", (".gz", ".tgz")),
    _Packing(rb"\x1f\x9d", "compressed with compress", "uncompress", (".Z",)),
    _Packing(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed with bzip2", "bunzip2", (".bz2", ".bz", ".tbz2", ".tbz")),
    _Packing(rb"\xfd7zXZ\0", "compressed with xz", "unxz", (".xz", ".txz")),
    _Packing(rb"\x5d\0\0..(\xff{8}|.{5}\0{3})", "compressed with lzma", "unlzma", (".lzma", ".tlz")),
    _Packing(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "compressed with zstd", "unzstd", (".zst", ".tzst")),
    _Packing(rb"\x04\x22\x4d\x18", "compressed with lz4", "unlz4 -m", (".lz4",)),
    _Packing(rb"LZIP\x01", "compressed with lzip", "lzip -d", (".lz", ".tlz")),
    _Packing(
        rb"PK\x03\x04.{26}(\[Content_Types\]\.xml|_rels/|docProps/|xl/|mimetypeapplication/vnd\.oasis)|\xd0\xcf\x11\xe0",
        "a workbook of Excel, or of another office program, which is not read: save its table as CSV",
        "libreoffice --headless --convert-to csv FILE",
    ),
    _Packing(
        rb"PK\x03\x04.{26}.{,200}?\.npy",
        "an archive of NumPy's arrays, which is not read: write its images as files (this is for MedMNIST's names)",
        f"python3 -c '{_FROM_MEDMNIST}' FILE",
    ),
    _Packing(rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive", "unzip FILE -d DIRECTORY"),
    _Packing(rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x FILE -oDIRECTORY"),
    _Packing(rb"Rar!\x1a\x07", "a RAR archive", "unrar x FILE DIRECTORY/"),
    _Packing(
        rb"ARROW1\0\0",
        "a table of Arrow (Feather), which is not read: write it as Parquet, or as CSV if it has paths of images",
        "python3 -c 'import pandas, sys; pandas.read_feather(sys.argv[1]).to_parquet(\"train.parquet\")' FILE",
    ),
)
_DATASETS = _Packing(
    rb"\xff{4}...\0\x10\0\0\0",  # a stream of Arrow, with the size of its schema
    "a table of the package datasets, which is not read: write its Parquet into a new directory",
    "python3 -c FILE",
)
# Its two bytes may also begin a text, or a name.
_ZLIB = _Packing(
    rb"\x78[\x01\x5e\x9c\xda]",
    "compressed with zlib",
    "python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))'",
)


# What `split` makes of an archive: images.tar.gz.001, images.zip.partab.
_PART = re.compile(
    r"((.+\.(?:tar|tgz|tbz2?|txz|zip|7z|gz|bz2|xz|zst))\.(?:part[-_.]?)?)(?:[a-d](?![rz])[a-z]|\d{2,4})", re.DOTALL
)


def how_packed(path: Path | str, head: bytes | None = None, *, or_zlib: bool = False) -> str | None:
    """Return, for a message, how a file is packed and the command that unpacks it, such as ``is compressed with gzip:
    unpack it: `gunzip photos.tar.gz```; None: it is not packed, or cannot be read.

    Args:
        head: the first bytes, where they do not lie at the beginning of the file `path`.
        or_zlib: a stream of zlib is possible, too, and a text is not.
    """
    if (part := how_joined(path)) is not None:
        return part
    if head is None:
        try:
            with open_regular(Path(path)) as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            return None
    for packing in (*_PACKINGS, _DATASETS, *((_ZLIB,) if or_zlib else ())):
        if re.match(packing.beginning, head[:_HEAD_BYTES], re.DOTALL):
            return f"is {packing.name}{'' if ':' in packing.name else ': unpack it'}: `{_command(packing, path)}`"
    return None


def how_joined(path: Path | str) -> str | None:
    """Return, for a message, that a file is by its name a part of another, and the command that joins the parts; None:
    it is not called as one."""
    if (part := _PART.fullmatch(str(path))) is None:
        return None
    return f"is a part of a file: join all of them: `cat {shlex.quote(part[1])}* > {shlex.quote(part[2])}`"


def _command(packing: _Packing, path: Path | str) -> str:
    file = shlex.quote(_to_parquet(Path(path)) if packing is _DATASETS else str(path))
    if "FILE" in packing.command:
        return packing.command.replace("FILE", file)
    return f"{packing.command} {file}" if str(path).endswith(packing.suffixes) else f"{packing.command} < {file} > NEW"


def _to_parquet(path: Path) -> str:
    """Return the Python that writes a file of the package datasets, or all that save_to_disk has saved with it."""
    directory = path.parent
    if (directory.parent / "dataset_dict.json").exists():
        splits = f"datasets.load_from_disk({_quoted(directory.parent.absolute())}).items()"
        return f'import datasets; [split.to_parquet(f"{{name}}.parquet") for name, split in {splits}]'
    if (directory / "state.json").exists():
        return f'import datasets; datasets.load_from_disk({_quoted(directory.absolute())}).to_parquet("train.parquet")'
    table = f"datasets.Dataset.from_file({_quoted(path.absolute())})"
    return f"import datasets; {table}.to_parquet({_quoted(f'{path.stem}.parquet')})"


def _quoted(text: Path | str) -> str:
    """Return the text in Python, between quotes that a shell's command in single ones may have in it."""
    return json.dumps(str(text), ensure_ascii=False)


def not_a_directory(path: Path, plain: str = "is a file, and not a directory") -> str:
    """Return, for a message, why `path` is no directory; `plain` is said of a file that is not packed."""
    return how_packed(path) or (plain if path.exists() else "this directory does not exist")
