"""Archives are read in place, and nothing in them is trusted."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from dali_train.data.convert import archive
from dali_train.data.convert.archive import Archive, Directory, SourceError
from tests.data.files import tar_bytes, write_tar

MEMBERS = [
    ("a.txt", b"12345"),
    ("folder/" + "x" * 100 + "/" + "y" * 60 + "/b.txt", b""),
    ("folder/c", bytes(100_000)),
    ("ü" * 90, b"u"),
]


def listed(path: Path) -> list[tuple[str, bytes]]:
    container = Archive(path)
    return [(member.name, container.read(member)) for member in container.members()]


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


def test_reads_an_archive_in_an_archive(tmp_path: Path) -> None:
    inner = {"1.jpg": b"one", "2.jpg": b"two"}
    path = write_tar(tmp_path / "outer.tar", [("./a.tar", tar_bytes(inner)), ("b.tar", tar_bytes({}))])
    container = Archive(path)
    found = {outer.name: {m.name: container.read(m) for m in container.members(outer)} for outer in container.members()}
    assert found == {"a.tar": inner, "b.tar": {}}


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (entry("../../etc/passwd"), "member '../../etc/passwd' points outside of the archive: refused"),
        (entry("a/../../b"), "member 'a/../../b' points outside of the archive: refused"),
        (entry("/etc/passwd"), "member '/etc/passwd' points outside of the archive: refused"),
        (
            entry("link", tarfile.SYMTYPE, linkname="/etc/passwd"),
            "member 'link' is a symbolic link: refused, only files are read",
        ),
        (entry("link", tarfile.LNKTYPE, linkname="a"), "member 'link' is a hard link: refused"),
        (entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3), "member 'null' is a device: refused"),
        (entry("disk", tarfile.BLKTYPE), "member 'disk' is a device: refused"),
        (entry("pipe", tarfile.FIFOTYPE), "member 'pipe' is a FIFO: refused"),
        (entry("odd", b"Z"), "member 'odd' is of type b'Z': refused"),
        (entry("huge", size=1 << 50), "member 'huge' has 1125899906842624 bytes, the archive"),
    ],
)
def test_untrusted_members_are_refused(tmp_path: Path, member: tarfile.TarInfo, message: str) -> None:
    path = tmp_path / "evil.tar"
    # GNU's format can say sizes that octal digits cannot.
    header = member.tobuf(tarfile.GNU_FORMAT) + bytes(tarfile.BLOCKSIZE * 4)
    path.write_bytes(tar_bytes({"good": b"g"})[: 2 * tarfile.BLOCKSIZE] + header)
    with pytest.raises(SourceError) as error:
        listed(path)
    assert message in str(error.value)
    assert f"{path}: at byte 1024: " in str(error.value)


def test_long_names_cannot_hide_a_bad_path(tmp_path: Path) -> None:
    for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / str(tar_format)
        with tarfile.open(path, "w", format=tar_format) as writer:
            writer.addfile(tarfile.TarInfo("../" * 60 + "etc/passwd"))
        with pytest.raises(SourceError, match="points outside of the archive: refused"):
            listed(path)


def test_a_huge_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "name.tar"
    path.write_bytes(entry("././@LongLink", b"L", size=3 << 20).tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20))
    with pytest.raises(SourceError, match="a name or header extension of 3145728 bytes: refused"):
        listed(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at byte 0: the archive ends without its closing blocks: cut off"),
        (tar_bytes({"a": b"1"})[:1024], "at byte 1024: the archive ends without its closing blocks: cut off"),
        (tar_bytes({"a": bytes(3000)})[:2000], "member 'a' has 3000 bytes, the archive 1488 more: cut off or forged"),
        (b"hello" * 1000, "at byte 0: no tar header (its checksum does not fit): not a tar archive, or damaged here"),
        (b"BZh9" + bytes(1000), "compressed with bzip2; unpack it to a plain tar or a directory first"),
        (b"PK\x03\x04" + bytes(1000), "compressed with zip; unpack it"),
        (gzip.compress(tar_bytes({"a": bytes(3000)}), mtime=0)[:-30], "damaged or cut off"),
    ],
)
def test_damaged_archives(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "archive"
    path.write_bytes(content)
    with pytest.raises(SourceError) as error:
        listed(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_flipped_bit_in_a_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    good = tar_bytes({"a": b"1", "b": b"2"})
    for bit in range(0, 512 * 8, 97):
        bad = bytearray(good)
        bad[1024 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(SourceError, match="at byte 1024"):
            listed(path)


def test_a_gzip_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MAX_UNPACKED_BYTES", 5_000_000)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(SourceError, match="over 5,000,000 bytes when unpacked: gunzip it first"):
        Archive(path)


def test_an_archive_that_shrinks_under_the_reader(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a", bytes(100_000))])
    container = Archive(path)
    (member,) = container.members()
    os.truncate(path, 50_000)
    with pytest.raises(SourceError, match="at byte 512: 100000 bytes expected, 49488 are there"):
        container.read(member)


def test_directories(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/x", ".hidden/y", "a/.hidden", "\udcff"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode(errors="surrogateescape"))
    container = Directory(tmp_path)
    assert [member.name for member in container.members()] == ["a/x", "b/10", "b/2", "\udcff"]
    member = next(container.members())
    (tmp_path / "a/x").write_bytes(b"longer")
    with pytest.raises(SourceError, match="has 6 bytes, 3 when the conversion began"):
        container.read(member)
    (tmp_path / "a/x").unlink()
    with pytest.raises(SourceError, match="vanished while converting"):
        container.read(member)
    (tmp_path / "dead").symlink_to("nowhere")
    with pytest.raises(SourceError, match="a link to a file that does not exist: remove or mend it"):
        list(container.members())
