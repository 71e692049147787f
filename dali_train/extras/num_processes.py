"""A run in `num_processes` new processes on this host; auto: one per GPU, or what its processor trains fastest with.

The cores of a processor can be the threads of one rank, or be shared by several ranks with fewer threads each: threads
that share one operator wait for each other, and ranks wait for the all-reduce. Which costs more depends on the model
and the machine, so it is measured. Samples do not depend on it, and weights only as on any other number of ranks
(docs/exactness.md).
"""

import os
import time
import warnings
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from dali_train.commands.equal_ranks import hook_names
from dali_train.commands.train import RunResult, run
from dali_train.config import Config, load_config
from dali_train.data.dataset.index import read_manifest
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.local_launch import launch_locally
from dali_train.extras.plan.forecast import forecast
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.process import num_cores
from dali_train.runtime.process_group import process_group
from dali_train.runtime.status import METRICS, read_events
from dali_train.text import duration, plural
from dali_train.training.build import fit_to_ranks
from dali_train.training.cost import flops_per_image
from dali_train.training.model import build_model
from dali_train.training.precision import Precision

_MOST = 8  # processes: each holds the model, its gradients and the optimizer's state
_USABLE = 0.5  # of the host's memory
_PASS_FLOPS = 2e10  # of a pass that is measured, at most: 0.2 s at 100 GFLOP/s
_FEWEST_ROUNDS, _SECONDS = 3, 1.0  # of measuring, with each number of processes


def run_locally(config: Config, num_processes: int | Literal["auto"]) -> RunResult:
    """Run in new processes on this host, see `run`."""
    if config.hooks.user and not config.files:
        raise ConfigError(
            "hooks.user with num_processes: the new processes find hooks only in a config file; define them there, "
            "or use torchrun"
        )
    if num_processes == "auto":
        num_processes = fastest_number(config)
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}: use at least 1, or auto")
    fit_to_ranks(config, Launch(world_size=num_processes, port=1))
    hooks = hook_names(config.hooks.user)
    config = config.replace({"hooks.user": ()})  # which may not pickle
    results = launch_locally(_run_or_mistake, config, hooks, num_processes=num_processes)
    for error in results.values():
        if isinstance(error, Exception):
            error.reported_elsewhere = False  # no rank has printed it
            raise error
    assert isinstance(results[0], RunResult)
    return results[0]


def _run_or_mistake(config: Config, hooks: list[str]) -> RunResult | ConfigError | DatasetError:
    """Run in a separate process, and return an error for the parent to raise, instead of printing a traceback.

    Args:
        hooks: names of the hooks.user that the config's file defines.
    """
    try:
        if config.files:
            path = next(iter(config.files))
            with warnings.catch_warnings(action="ignore"):  # the parent has shown them
                user = load_config(path).hooks.user  # also registers the user's models and losses in this process
            if hooks and hook_names(user) != hooks:
                raise ConfigError(
                    f"hooks.user is {', '.join(hooks)}, but {path} has {', '.join(hook_names(user)) or 'none'}: the "
                    "processes of num_processes have only those of the file; set hooks.user there, or use torchrun"
                )
            config = config.replace({"hooks.user": user if hooks else ()})
        return run(config)
    except (ConfigError, DatasetError) as error:
        return error


def fastest_number(config: Config) -> int:
    """Return how many processes to start on this host, and print what has been measured, if anything has.

    A run that goes on has as many as before, so that it ends with the same bits, if there are as many cores.

    Raises:
        ConfigError: the model cannot be built.
        DatasetError: data.root does not exist, or is damaged.
        RunError: a process that measured failed.
    """
    if config.run.device != "cpu" and (num_gpus := torch.cuda.device_count()):
        return num_gpus
    if config.parallel.smallest_world_size > 1 or config.parallel.shard != "none":
        return config.parallel.smallest_world_size
    cores, num_micro_batches = num_cores(), config.batch.num_micro_batches
    starts = [event for event in read_events(Path(config.run.dir) / METRICS) if event["event"] == "start"]
    if starts and 1 <= (before := starts[-1].get("ranks", 0)) <= min(cores, num_micro_batches):
        return int(before)
    num_classes = read_manifest(config.data).num_classes
    model, memory, _ = forecast(config, None, num_classes, checks_weights=False)
    fitting = _USABLE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    counts = [
        count
        for count in range(1, _MOST + 1)
        if cores % count == num_micro_batches % count == 0
        and (count == 1 or count * (memory.state_bytes + memory.step_bytes) <= fitting)
    ]
    if len(counts) == 1:
        return 1
    try:
        most = int(_PASS_FLOPS / flops_per_image(config, num_classes, model))
    except (RuntimeError, NotImplementedError):  # the model needs values, which the meta device does not have
        most = 1
    num_images = min(config.batch.micro_batch, max(2, most))  # batch statistics need two
    plain = config.replace({"hooks.user": (), "model.compile": "none"})  # which may not pickle; which takes a minute
    seconds = launch_locally(measure, plain, num_classes, counts, num_images, num_processes=counts[-1])[0]
    best, second = sorted(seconds, key=seconds.__getitem__)[:2]
    ratio, words = seconds[second] / seconds[best], [plural(_num_threads(count), "thread") for count in (best, second)]
    print(
        f"num_processes auto: {best} with {words[0]} each, {ratio:.2f} times as fast as {second} with {words[1]} "
        f"(forward, backward and all-reduce of a step: {duration(seconds[best])}, {duration(seconds[second])})",
        flush=True,
    )
    return best


def _num_threads(num_processes: int) -> int:
    """Return how many threads each of the processes will compute with, as `configure_torch` sets them."""
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else num_cores() // num_processes


def measure(config: Config, num_classes: int, counts: list[int], num_images: int) -> dict[int, float]:
    """Estimate the seconds of a step, without images and optimizer, by number of ranks. As many ranks as the largest of
    `counts` call this together, and compute in turns, because other programs disturb.

    Args:
        num_images: in the passes that are measured; a step is scaled to batch.global_batch.

    Returns:
        The least of several rounds; that of rank 0 counts, which sees the others in the all-reduce.
    """
    if config.files:
        load_config(next(iter(config.files)))  # registers the user's models
    device, size = torch.device("cpu"), config.data.train_size
    with process_group(discover(LaunchOptions()), device):
        groups = [dist.new_group(range(count)) for count in counts]
        model, precision = build_model(config, num_classes, device), Precision(config.precision, device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.zeros(sum(parameter.numel() for parameter in trained), dtype=trained[0].dtype)
        images = torch.randn(num_images, 3, size, size).to(precision.image_dtype)
        best = dict.fromkeys(counts, float("inf"))
        number, end = 0, time.perf_counter() + _SECONDS * len(counts)
        more = torch.tensor(True)
        while more:
            for count, group in zip(counts, groups, strict=True):
                dist.barrier()
                if not isinstance(group, dist.ProcessGroup):  # this rank is not in it
                    continue
                torch.set_num_threads(_num_threads(count))
                start = time.perf_counter()
                with precision.autocast():
                    outputs = model(images)
                    loss = (outputs[0] if isinstance(outputs, tuple) else outputs).float().sum()
                loss.backward()
                one_pass = time.perf_counter() - start
                dist.all_reduce(gradients, group=group)
                reduced = time.perf_counter() - start
                model.zero_grad()
                num_passes = config.batch.global_batch / num_images / count
                if number > 0:  # the first one prepares kernels
                    best[count] = min(best[count], (num_passes - 1) * one_pass + reduced)
            number += 1
            more = torch.tensor(number < _FEWEST_ROUNDS or time.perf_counter() < end)
            dist.broadcast(more, src=0)
    return best
