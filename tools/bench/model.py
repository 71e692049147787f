"""How long a model takes alone: forward and backward of one micro-batch of random images, as a recipe trains it.

    python -m tools.bench.model --config configs/vit-b16.py --precision.dtype bf16 --model.fast_norm true

The first thing to run on a GPU: it needs torch and timm, no DALI and no dataset. What it leaves out is the optimizer,
the all-reduce and the data path; tools/bench_step.py has them. "Host" is how long Python takes to launch one
micro-batch: the GPU waits where that is longer than the micro-batch.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from dali_train.config import Config
from dali_train.config.override import config_with
from dali_train.training.flops import Peak, flops_per_image
from dali_train.training.loss import mixup_loss
from dali_train.training.model import build_model
from dali_train.training.precision import choose_tf32
from tools.bench.compute import AUTOCAST, peak, time_by_class
from tools.bench.turns import describe_machine, write_lines

NUM_CLASSES = 1000
WARM_UP, TIMED, PROFILED = 6, 20, 3  # micro-batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="settings of it can be overridden")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", action="store_true", help="then time by class of kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a JSON line")
    options, overrides = parser.parse_known_args()
    config = config_with(options.config, overrides, "model.py")
    device = torch.device(options.device)
    choose_tf32(config.precision.tf32)
    torch.backends.cudnn.benchmark = not config.run.deterministic
    best = peak(config, device)
    figures, kernels = measure(config, device, best, profiled=options.profile)
    if options.json:
        write_lines(options.json, [{"event": "round", **figures, "kernels": kernels}])
    print(f"{describe_machine()}\npeak {best.source}")
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    for kind, milliseconds in sorted(kernels.items(), key=lambda row: -row[1]):
        print(f"{kind:<30}{milliseconds:>10.2f} ms")


def measure(
    config: Config, device: torch.device, best: Peak, *, profiled: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return figures of one micro-batch by name, medians; and, if `profiled`, its ms by class of kernel."""
    size, batch, half = config.data.train_size, config.batch.micro_batch, AUTOCAST.get(config.precision.dtype)
    model = build_model(config, NUM_CLASSES, device).train()
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    images = torch.randn(batch, 3, size, size, device=device, dtype=half).contiguous(memory_format=layout)
    targets = torch.randint(NUM_CLASSES, (batch, 2), device=device)
    lambdas = torch.rand(batch, device=device)

    def micro_batch() -> None:
        with torch.autocast(device.type, half, enabled=half is not None):
            loss = mixup_loss(model(images), targets, lambdas)
        loss.backward()

    def seconds() -> tuple[float, float]:
        """Of one micro-batch: until it is launched, until it is computed."""
        start = time.perf_counter()
        micro_batch()
        launched = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize()
        return launched, time.perf_counter() - start

    first_s = seconds()[1]
    for _ in range(WARM_UP):
        micro_batch()
    seconds()
    timed = [seconds() for _ in range(TIMED if device.type == "cuda" else 1)]
    launched, computed = (median(column) for column in zip(*timed, strict=True))
    flops = flops_per_image(config, NUM_CLASSES)
    figures = {
        "images_per_second": batch / computed,
        "utilisation": flops * batch / computed / best.flops_per_second,
        "ms": 1000 * computed,
        "host_ms": 1000 * launched,
        "first_call_s": first_s,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
    }
    if not profiled:
        return figures, {}
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            seconds()
    return figures, {kind: 1000 * spent / PROFILED for kind, spent in time_by_class(profiler, on_gpu).items()}


if __name__ == "__main__":
    main()
