"""How fast the converter is, against bare decoding, bare copying and others' converters on the same images in the same
run.

A conversion includes reading back and verifying what was written.
Rounds of all measurements are interleaved, so that a busy moment of the machine hits all of them.

decode      the same number of threads decode the images to RGB with libjpeg-turbo, from memory, and do nothing else
            (simplejpeg, which wraps libjpeg-turbo with little around it: `pip install -e .[bench]`)
copy        the archive is copied to another file by the system (sendfile) and flushed to the disk

With --peers, the writers of FFCV, LitData, Streaming and WebDataset too, in as many processes as there are threads.
They read the images as files that were extracted before, and copy the original bytes (FFCV cannot), or store images of
at most 400 pixels as JPEGs of quality 90: FFCV by its own option, the others from PIL. None of them decodes what it
copies, reads back what it wrote, or flushes it to the disk.
"""

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dali_train.commands.boundary import run_command
from dali_train.data.convert.conversion import Conversion, convert
from dali_train.data.convert.image import EncodingOptions
from dali_train.data.dataset.image_file import is_jpeg
from dali_train.extras.formats.imagenet import imagenet
from tools.bench.turns import Spread, describe_machine, parser_of

Measurement = Callable[[Path], object]  # takes an empty directory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "--threads", "--rounds", rounds=5)
    parser.add_argument(
        "archive", type=Path, metavar="ARCHIVE", help="tar of ImageNet's layout, or of files SYNSET_name.JPEG"
    )
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="how often each image is taken (default: %(default)s)"
    )
    parser.add_argument("--shards", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="where the copies are written (default: the system's temporary directory)",
    )
    parser.add_argument("--peers", action="store_true", help="the converters of others, too")
    options = parser.parse_args(arguments)
    return run_command("bench_convert", lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    sources, class_names = imagenet(options.archive, None, None)
    once = sources["train"]
    # A thousand photographs are written in a tenth of a second, which would measure starting and stopping.
    source = once.part(np.tile(np.arange(len(once.labels)), options.repeat))
    contents = (once.read(image) for image in range(len(once.labels)))
    images = [content for content in contents if isinstance(content, bytes) and is_jpeg(content)] * options.repeat

    def conversion(out: Path, **encoding: Any) -> Conversion:
        return Conversion(
            name="imagenet",
            splits={"train": source},
            class_names=class_names,
            out=out,
            encoding=EncodingOptions(**encoding),
            num_shards={"train": options.shards},
            seed=0,
            workers=options.threads,
            on_bad="fail",
        )

    measurements: dict[str, Measurement] = {
        "decode": lambda _: _decode_all(images, options.threads),
        "convert": lambda out: convert(conversion(out)),
        "copy": lambda out: _copy(options.archive, out / "copy", options.repeat),
        "convert --no-decode-check": lambda out: convert(conversion(out, decode_check=False)),
    }
    extracted = tempfile.TemporaryDirectory(dir=options.work_dir)
    if options.peers:
        small = {"max_side": MAX_SIDE, "quality": QUALITY}
        measurements["convert to 400 px"] = lambda out: convert(conversion(out, **small))
        files = _extract(images[: len(images) // options.repeat], Path(extracted.name)) * options.repeat
        measurements |= _peers(files, options.threads)
    rates: dict[str, list[float]] = {name: [] for name in measurements}
    with extracted:
        for round_number in range(options.rounds + 1):
            for name, measure in measurements.items():
                with tempfile.TemporaryDirectory(dir=options.work_dir) as directory:
                    os.sync()
                    began = time.perf_counter()
                    measure(Path(directory))
                    if round_number:
                        rates[name].append(len(source.labels) / (time.perf_counter() - began))
            print(f"  round {round_number} of {options.rounds}", file=sys.stderr, flush=True)
    print(
        f"{len(source.labels)} images, {source.num_bytes / 1e6:.0f} MB, {options.threads} threads, {options.rounds} "
        f"rounds; decoder simplejpeg {version('simplejpeg')}\n{describe_machine()}"
    )
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    for name, rate in spreads.items():
        print(f"{name:26} {rate.median:8.0f} images/s  ({rate.low:.0f} to {rate.high:.0f})")
    pairs = [("convert", "decode"), ("convert --no-decode-check", "copy")]
    for name, end in (
        (("convert --no-decode-check", "copies"), ("convert to 400 px", "400 px")) if options.peers else ()
    ):
        others = [other for other in rates if other.endswith(f": {end}")]
        pairs.append((name, max(others, key=lambda other: spreads[other].median)))
    for name, peer in pairs:
        ratio = Spread.of(rate / other for rate, other in zip(rates[name], rates[peer], strict=True))
        medians = spreads[name].median / spreads[peer].median
        print(f"{name} / {peer}: {medians:.2f}  (rounds {ratio.low:.2f} to {ratio.high:.2f})")
    return 0


def _decode_all(images: list[bytes], threads: int) -> None:
    import simplejpeg

    def decode_part(part: int) -> None:
        for content in images[part::threads]:
            simplejpeg.decode_jpeg(content, colorspace="RGB")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode_part, range(threads)))


def _copy(source: Path, target: Path, repeat: int) -> None:
    size = source.stat().st_size
    with source.open("rb") as reading, target.open("wb") as writing:
        for _ in range(repeat):
            offset = 0
            while offset < size:
                offset += os.sendfile(writing.fileno(), reading.fileno(), offset, size - offset)
        os.fsync(writing.fileno())


# ---------------------------------------------------------------------------------------------------------------
# The converters of others
# ---------------------------------------------------------------------------------------------------------------

MAX_SIDE, QUALITY = 400, 90
SHARD_BYTES = 64_000_000  # LitData's and Streaming's usual size


def _extract(images: Sequence[bytes], directory: Path) -> list[Path]:
    """Write the images as files, and return their paths."""
    files = [directory / f"{number:06d}.jpg" for number in range(len(images))]
    for file, content in zip(files, images, strict=True):
        file.write_bytes(content)
    return files


def _peers(files: list[Path], threads: int) -> dict[str, Measurement]:
    """Return the writers that are installed, imported already; the others are named."""
    peers: dict[str, Measurement] = {}
    writers: dict[str, tuple[str, str, Callable[..., object]]] = {
        "WebDataset": ("webdataset", "webdataset", partial(_in_processes, _write_webdataset)),
        "Streaming": ("streaming", "mosaicml-streaming", partial(_in_processes, _write_streaming)),
        "LitData": ("litdata", "litdata", _litdata),
        "FFCV": ("ffcv.writer", "ffcv", _ffcv),
    }
    for name, (module, package, write) in writers.items():
        try:
            import_module(module)
        except ImportError as error:
            print(f"  {name} cannot be imported: {error}", file=sys.stderr)
            continue
        named = f"{name} {version(package)}"
        if name != "FFCV":
            peers[f"{named}: copies"] = partial(write, files, threads, _content)
        peers[f"{named}: 400 px"] = partial(write, files, threads, _small)
    return peers


def _content(file: Path) -> bytes:
    return file.read_bytes()


def _small(file: Path) -> bytes:
    """Return the image as a JPEG of at most MAX_SIDE pixels, by PIL's fastest way of the usual quality."""
    with Image.open(file) as image:
        pixels = image.convert("RGB")
    pixels.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    pixels.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


Encode = Callable[[Path], bytes]


def _in_processes(
    write: Callable[[Sequence[Path], Encode, Path], None], files: list[Path], count: int, encode: Encode, out: Path
) -> None:
    """Write the files in `count` parts, each by a process of its own, for writers that use one."""
    fork = multiprocessing.get_context("fork")  # imports nothing anew
    with ProcessPoolExecutor(count, fork) as pool:
        parts = [files[number::count] for number in range(count)]
        done = [pool.submit(write, part, encode, out / f"part-{number}") for number, part in enumerate(parts)]
        for future in done:
            future.result()


def _write_webdataset(files: Sequence[Path], encode: Encode, out: Path) -> None:
    from webdataset import ShardWriter

    out.mkdir()
    with ShardWriter(str(out / "%05d.tar"), maxsize=SHARD_BYTES, maxcount=1 << 30, verbose=0) as writer:
        for number, file in enumerate(files):
            writer.write({"__key__": f"{number:08d}", "jpg": encode(file), "cls": number})


def _write_streaming(files: Sequence[Path], encode: Encode, out: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(columns={"image": "bytes", "label": "int"}, out=str(out), size_limit=SHARD_BYTES) as writer:
        for number, file in enumerate(files):
            writer.write({"image": encode(file), "label": number})


def _litdata(files: list[Path], threads: int, encode: Encode, out: Path) -> None:
    from litdata import optimize

    optimize(
        partial(_litdata_sample, encode),
        [str(file) for file in files],
        str(out),
        chunk_bytes=SHARD_BYTES,
        num_workers=threads,
        start_method="fork",
        verbose=False,
    )


def _litdata_sample(encode: Encode, file: str) -> dict[str, object]:
    return {"image": encode(Path(file)), "label": 0}


def _ffcv(files: list[Path], threads: int, encode: Encode, out: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    class Images:
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, number: int) -> tuple[Any, int]:
            with Image.open(files[number]) as image:
                return image.convert("RGB"), number

    image = RGBImageField(write_mode="jpg", max_resolution=MAX_SIDE, jpeg_quality=QUALITY)
    writer = DatasetWriter(str(out / "train.beton"), {"image": image, "label": IntField()}, num_workers=threads)
    writer.from_indexed_dataset(Images())


if __name__ == "__main__":
    sys.exit(main())
