"""How long a model takes alone: forward and backward of one micro-batch of random images, as a recipe trains it.

    python -m tools.bench.model --config configs/vit-b16.py --precision.dtype bf16 --model.fast_norm true

The first program to run on a GPU, since it needs neither DALI nor a dataset. It leaves out the optimizer, the
all-reduce and the data path, which tools/bench_step.py measures. `host_ms` is how long Python takes to launch a
micro-batch: where it exceeds `ms`, the GPU waits.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.training.cost import Peak, flops_per_image
from dali_train.training.loss import mixup_loss
from dali_train.training.model import build_model
from dali_train.training.precision import choose_tf32
from tools.bench.compute import AUTOCAST, peak, time_by_class
from tools.bench.turns import describe_machine, write_lines

NUM_CLASSES = 1000
WARM_UP, TIMED, PROFILED = 6, 20, 3  # micro-batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="its settings can be overridden")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", action="store_true", help="also measure time by class of kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a JSON line")
    options, overrides = parser.parse_known_args()
    config, device = config_with(options.config, overrides, "model.py"), torch.device(options.device)
    print(describe_machine())
    choose_tf32(config.precision.tf32)
    torch.backends.cudnn.benchmark = not config.run.deterministic
    best = peak(config, device)
    figures, kernels = measure(config, device, best, profiled=options.profile)
    if options.json:
        write_lines(options.json, [{"event": "round", **figures, "kernels": kernels}])
    print(f"peak {best.source}\n" + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    for kind, milliseconds in sorted(kernels.items(), key=lambda row: -row[1]):
        print(f"{kind:<30}{milliseconds:>10.2f} ms")


def seconds_of(call: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the seconds until `call` has returned, and until the device has finished."""
    start = time.perf_counter()
    call()
    launched = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return launched, time.perf_counter() - start


def measure(
    config: Config, device: torch.device, best: Peak, *, profiled: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of a micro-batch by name and, if `profiled`, its milliseconds by class of kernel."""
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

    first_s = seconds_of(micro_batch, device)[1]
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP if on_gpu else 1):
        seconds_of(micro_batch, device)
    timed = [seconds_of(micro_batch, device) for _ in range(TIMED if on_gpu else 1)]
    launched, computed = (median(column) for column in zip(*timed, strict=True))
    figures = {
        "images_per_second": batch / computed,
        "utilisation": flops_per_image(config, NUM_CLASSES) * batch / computed / best.flops_per_second,
        "ms": 1000 * computed,
        "host_ms": 1000 * launched,
        "first_call_s": first_s,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }
    if not profiled:
        return figures, {}
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            seconds_of(micro_batch, device)
    return figures, {kind: 1000 * spent / PROFILED for kind, spent in time_by_class(profiler, on_gpu).items()}


if __name__ == "__main__":
    main()
