"""Archives are read in place, all of them or not at all."""

import bz2
import gzip
import io
import os
import re
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from dali_train.data.convert import archives
from dali_train.data.convert.archives import Archive, Directory
from dali_train.data.convert.sources import SourceError
from tests.convert.files import tar_bytes, write_tar

MEMBERS = [
    ("a.txt", b"12345"),
    ("folder/" + "x" * 100 + "/" + "y" * 60 + "/b.txt", b""),
    ("folder/c", bytes(100_000)),
    ("ü" * 90, b"u"),
]


def listed(path: Path) -> list[tuple[str, bytes]]:
    container = Archive(path)
    return [(member.name, container.read(member)) for member in container.list()]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_lists_what_tarfile_wrote(tmp_path: Path, tar_format: int, mode: str) -> None:
    members = MEMBERS[:3] if tar_format == tarfile.USTAR_FORMAT else MEMBERS
    path = tmp_path / "archive"
    with tarfile.open(path, mode, format=tar_format) as writer:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        writer.addfile(folder)
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            writer.addfile(entry, io.BytesIO(content))
    assert listed(path) == members


def test_hidden_members_are_skipped_as_in_a_directory(tmp_path: Path) -> None:
    """macOS's tar adds them; WebDataset's library skips them, too."""
    hidden = [("./._a.jpg", b"1"), ("x/._b.jpg", b"2"), (".git/c.jpg", b"3"), ("x/.d/e.jpg", b"4"), ("...jpg", b"5")]
    shown = [("./a.jpg", b"6"), ("x/./b.jpg", b"7"), ("../c.jpg", b"8"), ("x/d._e.jpg", b"9")]
    write_tar(tmp_path / "a.tar", [*hidden, *shown])
    assert [content for _, content in listed(tmp_path / "a.tar")] == [content for _, content in shown]


def test_an_archive_without_an_end_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    for path in (tmp_path / "a.tar", Path("/dev/zero")):
        with pytest.raises(SourceError, match=r"cannot be opened \(is not a regular file\)"):
            Archive(path)


def test_an_archive_in_an_archive(tmp_path: Path) -> None:
    inner = {"1.jpg": b"one", "2.jpg": b"two"}
    path = write_tar(tmp_path / "outer.tar", [("./a.tar", tar_bytes(inner.items())), ("b.tar", tar_bytes({}))])
    container = Archive(path)
    found = {outer.name: {m.name: container.read(m) for m in container.list(outer)} for outer in container.list()}
    assert found == {"a.tar": inner, "b.tar": {}}
    # Truncated, the inner one must not continue with the members of the outer one.
    write_tar(path, [("a.tar", tar_bytes([("1", b"1")])[:1024]), ("b.jpg", b"2")])
    container = Archive(path)
    with pytest.raises(SourceError, match=r"outer.tar \(a.tar in it\): at byte 1536: .* truncated"):
        list(container.list(next(container.list())))


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (tarfile.LNKTYPE, "/etc/passwd", "a link to 'etc/passwd', which is no file of the archive: pack that file"),
        (tarfile.LNKTYPE, "x/odd", "a link to 'x/odd', which is no file"),
        (tarfile.SYMTYPE, "/good", "a link to '/good', which is no file of the archive"),
        (tarfile.SYMTYPE, "../good", "a link to '../good', which is no file of the archive"),
        (tarfile.SYMTYPE, "odd", "a link to 'odd', which is no file of the archive"),
        (tarfile.CHRTYPE, "", "a device: only files, and links to them, are read: leave it out"),
        (tarfile.FIFOTYPE, "", "a FIFO: only files"),
        (b"S", "", "a sparse file, which is not read: pack it without `tar --sparse`"),
        (b"M", "", "the rest of a file in another volume of the archive: join the volumes"),
        (b"Z", "", "of the unknown type b'Z': only files"),
    ],
)
def test_only_files_are_read(tmp_path: Path, kind: bytes, target: str, message: str) -> None:
    member = tarfile.TarInfo("odd")
    member.type, member.linkname = kind, target
    path = tmp_path / "odd.tar"
    path.write_bytes(tar_bytes([("good", b"g")])[:1024] + member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(SourceError, match=f"odd.tar: at byte 1024: member 'odd' is {re.escape(message)}"):
        listed(path)


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param("tar -cf t.tar a b; echo corrected > a/1; tar -rf t.tar ./a/1", id="a member twice"),
        pytest.param("tar -cf t.tar a/1 b a/1", id="a file named twice, which becomes a link to itself"),
        pytest.param("ln a/1 b/3; ln b/2 a/3; tar -cf t.tar b a", id="hard links"),
        pytest.param("ln -s ../a/1 b/3; ln -s ./3 b/4; tar -cf t.tar b a", id="links, one to the other"),
        pytest.param(
            "ln a/1 b/3; tar -cf t.tar a b; rm a/1; echo new > a/1; tar -rf t.tar a/1", id="a link to the old"
        ),
        pytest.param("ln -s ../a/1 b/3; tar -cf t.tar a b; echo new > a/1; tar -rf t.tar a/1", id="a link to the new"),
        pytest.param("ln -s 1 a/3; tar -cf t.tar a b; rm a/3; echo new > a/3; tar -rf t.tar a/3", id="a link replaced"),
        pytest.param("ln -s /x/a/1 b/3; tar -Pcf t.tar --transform 'flags=r;s,^,/x/,' b a", id="absolute names"),
        pytest.param("tar -cf t.tar ./b ././a a//1", id="other spellings of names"),
        pytest.param("tar -cf t.tar b/2 a/1", id="no folders"),
        pytest.param("tar -b 2048 -cf t.tar a b", id="records of a megabyte"),
        pytest.param("tar -cf t.tar a b; truncate -s 1G t.tar", id="a gigabyte of zeros"),
        pytest.param("tar -V tape -g snapshot -cf t.tar a b", id="an incremental dump with a label"),
        pytest.param("mkdir c; cp a/1 c/$(printf é%.0s $(seq 120)); tar -H pax -cf t.tar a c", id="pax, a long name"),
        pytest.param("cp a/1 a/$(printf 'b\\377'); tar -H gnu -cf t.tar a b", id="a name that is not UTF-8"),
    ],
)
def test_what_is_listed_is_what_unpacking_leaves(tmp_path: Path, commands: str) -> None:
    for name in ("a/1", "b/2"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    make = f"set -e; {commands}; mkdir out; tar -xf t.tar -C out"
    subprocess.run(["bash", "-c", make], cwd=tmp_path, check=True, capture_output=True)
    out = tmp_path / "out"
    if (out / "x/b/3").is_symlink():  # GNU tar unpacks absolute names here, and leaves what a link says
        (out / "x/b/3").unlink()
        (out / "x/b/3").symlink_to("../a/1")
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    found = listed(tmp_path / "t.tar")
    assert dict(found) == files and len(found) == len(files)


TWO = tar_bytes([("a", b"1"), ("b", b"x" * 3000)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at byte 0: .* damaged here"),
        (TWO[:1024], "at byte 1024: the archive ends without its closing blocks: truncated"),
        (TWO[:2500], "member 'b' has 3000 bytes, 964 are there: truncated"),
        (TWO[:1300], "at byte 1024: .* (truncated|damaged)"),
        (b"hello" * 1000, "at byte 0: .* not a plain or gzipped tar"),
        (b"BZh9" + bytes(1000), "not a plain or gzipped tar"),
        (gzip.compress(TWO, mtime=0)[:-30], "damaged or truncated"),
        (
            tar_bytes([("a", b"1")]) + TWO,
            "at byte 1024: the archive seems to end here, but .* bytes follow, which are not all zero: .*two archives",
        ),
        (TWO[:1024] + bytes(1024) + TWO[2048:], "at byte 1024: the archive seems to end here"),  # a hole
        (TWO[:1024] + bytes(3 << 20) + b"1", "at byte 1024: .* 3,145,729 bytes follow, .* an unfinished download"),
        (bz2.compress(TWO), "archive: at byte 0: is compressed with bzip2: unpack it: `bunzip2 < .*archive > NEW`"),
    ],
)
def test_damaged_and_unfinished_archives(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "archive"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as error:
        listed(path)
    assert str(path) in str(error.value)


def test_a_flipped_bit_in_a_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    good = tar_bytes([("a", b"1"), ("b", b"2")])
    for bit in range(0, 512 * 8, 97):
        bad = bytearray(good)
        bad[1024 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(SourceError, match="at byte 1024"):
            listed(path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a gzipped archive fills the disk with, and of the memory that a list takes: tarfile would keep it all."""
    path = tmp_path / "many.tar"
    headers = [tarfile.TarInfo(f"n01440764_{n}.JPEG").tobuf(tarfile.USTAR_FORMAT) for n in range(2_000)]
    path.write_bytes(b"".join(headers) + bytes(1024))
    tracemalloc.start()
    assert sum(1 for _ in Archive(path).list()) == 2_000
    assert tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()
    monkeypatch.setattr(archives, "_MAX_UNPACKED_BYTES", 5_000_000)
    path.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(SourceError, match="over 5,000,000 bytes when unpacked: gunzip it first"):
        Archive(path)


def test_an_archive_that_shrinks_under_the_reader(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a", bytes(100_000))])
    container = Archive(path)
    (member,) = container.list()
    os.truncate(path, 50_000)
    with pytest.raises(SourceError, match=r"a.tar:a: has 49488 bytes, 100000 when it was listed"):
        container.read(member)


def test_directories(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/x", ".hidden/y", "a/.hidden", "\udcff"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode(errors="surrogateescape"))
    container = Directory(tmp_path)
    assert [member.name for member in container.list()] == ["a/x", "b/10", "b/2", "\udcff"]
    member = next(container.list())
    (tmp_path / "a/x").write_bytes(b"longer")
    with pytest.raises(SourceError, match="has 6 bytes, 3 when it was listed"):
        container.read(member)
    (tmp_path / "a/x").unlink()
    with pytest.raises(SourceError, match="vanished since it was listed"):
        container.read(member)


def test_directories_with_what_is_no_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    odd = root / "a" / "b" / "odd"
    for target, message in (
        ("nowhere", "a link to a file that does not exist: remove or mend it"),
        ("/dev/zero", "a device, FIFO or socket, or a link to one, not a file: remove it"),
        *((above, "a link to a directory that it lies in: remove it") for above in (root / "a", root, tmp_path)),
    ):
        odd.symlink_to(target)
        with pytest.raises(SourceError, match=f"odd: {message}"):
            list(Directory(root).list())
        odd.unlink()
    os.mkfifo(odd)
    with pytest.raises(SourceError, match="odd: a device, FIFO or socket"):
        list(Directory(root).list())
