"""torchtitan's checkpoints, optimizers and schedules in a small loop, with the loader of dataloader.py.

    torchrun --nproc-per-node 2 examples/torchtitan/train.py DATASET

torchtitan's own Trainer needs GPUs and a language model; this loop builds the loader, and loads and saves, as that
does. The same command on another number of processes goes on behind the last step.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dataloader import ImageDataLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

MICRO_BATCHES = 6  # of a step, on all processes


class Progress:
    """The step, which torchtitan's Trainer has in its checkpoints, too."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--root", default="runs/torchtitan")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    config = ImageDataLoader.Config(
        dataset_path=options.dataset, global_batch=8 * MICRO_BATCHES, settings={"image_size": 64, "device": device}
    )
    dataloader = config.build(dp_rank=rank, dp_world_size=size, local_batch_size=8, tokenizer=None, seq_len=0)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 16, 16), nn.GELU(), nn.Flatten(), nn.Linear(512, dataloader.loader.num_classes)
    ).to(device)
    model = DistributedDataParallel(network)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[network])
    schedules = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=13)
    progress = Progress()
    policy = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False, keep_latest_k=0)
    checkpoints = policy.build(
        dataloader=dataloader,
        model_parts=[network],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=options.root,
    )
    checkpoints.load()
    batches = iter(dataloader)
    weight = size / MICRO_BATCHES  # of a micro-batch's loss: DDP averages over processes
    while progress.step < options.steps:
        ends_step = False
        while not ends_step:
            inputs, labels = next(batches)
            ends_step = dataloader.loader.ends_step
            model.require_backward_grad_sync = ends_step
            (F.cross_entropy(model(inputs["input"]), labels) * weight).backward()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        progress.step += 1
        checkpoints.save(progress.step, last_step=progress.step == options.steps)
    checkpoints.close()
    if rank == 0:
        print(f"step {progress.step}: epoch {dataloader.loader.epoch}, {dataloader.state_dict()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
