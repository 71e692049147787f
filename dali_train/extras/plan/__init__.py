"""Forecast a run: `dali-train plan`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import (
    Commands,
    config_of,
    gigabytes,
    launch_options,
    refuse_numbers,
    with_config,
)
from dali_train.commands.boundary import importing
from dali_train.runtime.status import FINISHED


def add_plan_command(commands: Commands) -> None:
    summary = "Show what a run would do: settings, steps, learning rate, memory. Needs no GPU and reads no data."
    plan = with_config(commands, "plan", summary, _plan)
    plan.add_argument("--num-images", type=int, help="training images (default: data.root's, or ImageNet's 1,281,167)")
    plan.add_argument(
        "--gpu-memory",
        type=gigabytes,
        metavar="GB",
        help="memory of each rank's GPU: also report the largest micro-batch that fits",
    )
    plan.add_argument(
        "--gpu", metavar="NAME", help="plan for such GPUs instead of this machine: h100, a100, ... (their data sheets)"
    )
    plan.add_argument(
        "--price", type=float, metavar="P", help="of a GPU-hour, in any currency: also say what the run costs"
    )
    plan.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw learning rate and memory into this PNG file"
    )


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    config = config_of(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.plan.forecast import print_plan

    refuse_numbers(options, "world_size", "num_images", "gpu_memory", "price")
    print_plan(
        config,
        world_size=launch_options(options).world_size,
        num_images=options.num_images,
        picture=options.picture,
        gpu_memory_gb=options.gpu_memory,
        gpu_name=options.gpu,
        price=options.price,
    )
    return FINISHED
