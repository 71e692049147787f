"""How fast the converter is, against bare decoding and bare copying of the same images in the same run.

A conversion includes reading back and verifying what was written.
Rounds of all measurements are interleaved, so that a busy moment of the machine hits all of them. The peers:

decode      the same number of threads decode the images to RGB with libjpeg-turbo, from memory, and do nothing else
            (simplejpeg where it is installed, else torchvision, whichever wraps libjpeg-turbo with less around it)
copy        the archive is copied to another file by the system (sendfile) and flushed to the disk
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dali_train.commands.boundary import run_command
from dali_train.data.convert.conversion import Conversion, convert
from dali_train.data.convert.image import EncodingOptions
from dali_train.data.convert.imagenet import imagenet
from dali_train.data.dataset.image_file import is_jpeg
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
    options = parser.parse_args(arguments)
    return run_command("bench_convert", lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    sources, class_names = imagenet(options.archive, None, None)
    once = sources["train"]
    # A thousand photographs are written in a tenth of a second, which would measure starting and stopping.
    source = once.part(np.tile(np.arange(len(once.labels)), options.repeat))
    contents = (once.read(image) for image in range(len(once.labels)))
    images = [content for content in contents if isinstance(content, bytes) and is_jpeg(content)] * options.repeat

    def conversion(out: Path, *, decode_check: bool) -> Conversion:
        return Conversion(
            name="imagenet",
            splits={"train": source},
            class_names=class_names,
            out=out,
            encoding=EncodingOptions(decode_check=decode_check),
            num_shards={"train": options.shards},
            seed=0,
            workers=options.threads,
            on_bad="fail",
        )

    decoder, decode = _bare_decoder()
    measurements: dict[str, Measurement] = {
        "decode": lambda _: _decode_all(images, decode, options.threads),
        "convert": lambda out: convert(conversion(out, decode_check=True)),
        "copy": lambda out: _copy(options.archive, out / "copy", options.repeat),
        "convert --no-decode-check": lambda out: convert(conversion(out, decode_check=False)),
    }
    rates: dict[str, list[float]] = {name: [] for name in measurements}
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
        f"rounds; decoder {decoder}\n{describe_machine()}"
    )
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    for name, rate in spreads.items():
        print(f"{name:26} {rate.median:8.0f} images/s  ({rate.low:.0f} to {rate.high:.0f})")
    for name, peer in (("convert", "decode"), ("convert --no-decode-check", "copy")):
        ratio = Spread.of(rate / other for rate, other in zip(rates[name], rates[peer], strict=True))
        medians = spreads[name].median / spreads[peer].median
        print(f"{name} / {peer}: {medians:.2f}  (rounds {ratio.low:.2f} to {ratio.high:.2f})")
    return 0


def _bare_decoder() -> tuple[str, Callable[[bytes], object]]:
    try:
        import simplejpeg
    except ImportError:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        return f"torchvision {version('torchvision')}", lambda content: decode_jpeg(
            torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB
        )
    return f"simplejpeg {version('simplejpeg')}", lambda content: simplejpeg.decode_jpeg(content, colorspace="RGB")


def _decode_all(images: list[bytes], decode: Callable[[bytes], object], threads: int) -> None:
    def decode_part(part: int) -> None:
        for content in images[part::threads]:
            decode(content)

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


if __name__ == "__main__":
    sys.exit(main())
