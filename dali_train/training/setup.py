"""torch's global switches, set once per process before anything is built."""

import os

import torch

from dali_train.config import Config
from dali_train.runtime.launch import Launch
from dali_train.runtime.process import bind_to_numa_node, cores_per_process
from dali_train.training.precision import choose_tf32


def configure_torch(config: Config, launch: Launch, device: torch.device) -> int:
    """Bind this process to `device` and to cores near it, and return the number of its decoding threads."""
    cores = cores_per_process(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The training loop, autograd and DALI's feed need a core each, or the GPU waits for its next kernel.
        cores = max(1, min(cores, bind_to_numa_node(device)) - 3)
        choose_tf32(config.precision.tf32)
        torch.backends.cudnn.benchmark = not config.run.deterministic  # shapes are the same in every step
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
        # All of our memory is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return config.data.num_threads or cores
