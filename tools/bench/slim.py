"""Zero what one kind of GPU does not run in shared libraries: they keep their layout, and compress to what is left.

    python3 slim.py 90 FOLDER

In each .so file under FOLDER, fat binaries with machine code for the compute capability, here 9.0, lose all other
entries: they begin where they did, which is what programs refer to, and end earlier. The tables of symbols that no
program reads are zeroed, too.
"""

import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC, ELF = 0xBA55ED50, 2  # of a fat binary; the kind of an entry with machine code (1: PTX)
Span = tuple[int, int]  # begin and end, in the file


def sections(data: mmap.mmap) -> Iterator[tuple[str, Span]]:
    """Yield name and span of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for name, kind, _, _, begin, length in rows:
        at = rows[names][4] + name
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            yield data[at : data.find(b"\0", at)].decode(), (begin, begin + length)


def fat_binaries(data: mmap.mmap | bytes, span: Span, arch: int) -> Iterator[tuple[Span, bytes]]:
    """Yield the span of each fat binary in `span` with machine code for `arch`, and its content without the rest."""
    at, end = span
    while at + 16 <= end:
        begin, (magic, version, header, length) = at, struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        entry, at, kept = at + header, at + header + length, b""
        while entry < at:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
            (its_arch,) = struct.unpack_from("<I", data, entry + 28)
            if kind == ELF and its_arch == arch:
                kept += data[entry : entry + header + length]
            entry += header + length
        if kept:
            yield (begin, at), struct.pack("<IHHQ", MAGIC, version, 16, len(kept)) + kept
        at = (at + 7) // 8 * 8


def slim(path: Path, arch: int) -> int:
    """Zero what is not used in the library `path`, and return how many bytes."""
    zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        if data[:5] != b"\x7fELF\x02":
            return 0
        for name, span in list(sections(data)):
            pieces = [(span, b"")] if name in (".symtab", ".strtab") else []
            if name in (".nv_fatbin", "__nv_relfatbin"):
                pieces = list(fat_binaries(data, span, arch))
            for (begin, end), content in pieces:
                data[begin:end] = content.ljust(end - begin, b"\0")
                zeroed += end - begin - len(content)
    return zeroed


def main() -> None:
    arch, folder = int(sys.argv[1]), Path(sys.argv[2])
    libraries = [path for path in sorted(folder.rglob("*.so*")) if path.is_file() and not path.is_symlink()]
    total = sum(slim(path, arch) for path in libraries)
    print(
        f"{len(libraries)} libraries: zeroed {total / 1e6:.0f} MB that a GPU of {arch // 10}.{arch % 10} does not read"
    )


if __name__ == "__main__":
    main()
