"""How fast images get to the GPU: this project's data path alone, with several shares of the JPEGs for the hardware
decoder.

    python -m tools.bench.gpu_data --data original=DATASET stored-256=DATASET

The cases take turns. A round ends when the GPU has finished its last batch. Images are decoded, cropped to 224,
antialiased, mirrored, normalised and mixed on the GPU; "decoded on the CPU" is the same with data.device cpu.
"""

import time
from typing import Any

import torch

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.dali import PREFETCH
from dali_train.data.loading.loader import TrainLoader
from dali_train.runtime.process import num_cores
from tools.bench.turns import Spread, alone, describe_machine, loading_config, parser_of, write_lines


def main() -> None:
    # as in training: all cores but three
    defaults = {"threads": max(1, num_cores() - 3), "batch": 256, "rounds": 3}
    parser = parser_of(__doc__, "--threads", "--batch", "--rounds", "--json", **defaults)
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=DATASET", help="training splits to read")
    loads = [0.0, 0.2, 0.4, 0.6, 0.85]
    parser.add_argument("--loads", nargs="+", type=float, default=loads, metavar="SHARE", help="data.hw_decoder_load")
    parser.add_argument("--batches", type=int, default=24, metavar="N", help="timed batches a round")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cpu: a rehearsal without a GPU")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    print(describe_machine(), flush=True)

    def loader_of(path: str, **settings: Any) -> TrainLoader:
        data = DataConfig(root=path, num_threads=options.threads, **settings)
        config = loading_config(data, micro_batch=options.batch, mixup_alpha=0.2)
        return TrainLoader.of_split(Split(path, "train"), config, alone(device, options.threads))

    loaders = {}
    for name, _, path in (word.partition("=") for word in options.data):
        raw = Split(path, "train").manifest.encoding == "raw"
        for load in [0.0] if raw else options.loads:
            loaders[f"{name}, {load:.0%} to the hardware decoder"] = loader_of(path, hw_decoder_load=load)
        loaders[f"{name}, decoded on the CPU"] = loader_of(path, device="cpu")

    def seconds_of(loader: TrainLoader, batches: int) -> float:
        start = time.perf_counter()
        for _ in range(batches):
            loader.next()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(1 + options.rounds):
        for name, loader in loaders.items():
            seconds_of(loader, PREFETCH + 2)  # batches prepared while the others ran
            rate = options.batches * options.batch / seconds_of(loader, options.batches)
            if number:  # the first round fills caches
                rates[name].append(rate)
        if options.json:
            lines = [{"contender": name, "images_per_second": values} for name, values in rates.items()]
            write_lines(options.json, [{"event": "rounds", **line} for line in lines])
    print(f"{'':<44}{'images/s':>10}{'low':>9}{'high':>9}")
    for name, values in rates.items():
        spread = Spread.of(values)
        print(f"{name:<44}{spread.median:>10,.0f}{spread.low:>9,.0f}{spread.high:>9,.0f}")


if __name__ == "__main__":
    main()
