"""A separate process in which `doctor` decodes a first micro-batch. It starts quickly, since it imports no model.

python -m dali_train.data.loading.first_batch < (config, device), pickled
"""

import pickle
import sys
import time

import torch

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader import make_loader, pixel_format
from dali_train.errors import ConfigError, DatasetError, RunError


def decoding_device(config: Config, device: torch.device) -> str:
    return "the CPU" if pixel_format(config, device, num_threads=1).device_id is None else "the GPU"


def main() -> int:
    config, device = pickle.load(sys.stdin.buffer)
    try:
        split = Split(config.data.root, "train")
        start = time.perf_counter()
        loader = make_loader(
            split, config, device, start_step=0, dp_rank=0, dp_size=1, num_threads=config.data.num_threads
        )
        batch = loader.next()
        mean = float(batch.images.float().mean())
    except (ConfigError, DatasetError, RunError, OSError) as error:
        print(error)
        return 1
    seconds = time.perf_counter() - start
    print(
        f"{len(batch.images)} images of {batch.images.shape[-1]} px as "
        f"{str(batch.images.dtype).removeprefix('torch.')} on {decoding_device(config, device)}, mean {mean:.2f}, "
        f"first after {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
