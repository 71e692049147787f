"""The command of train.yaml, as torchrun and the trainer read it."""

import re
import shlex
from pathlib import Path

import yaml
from torch.distributed.run import parse_args

from dali_train.config.command_line import config_with
from dali_train.runtime.status import START_AGAIN

FOLDER = Path(__file__).parent


def test_the_command_trains_on_the_nodes() -> None:
    task = yaml.safe_load((FOLDER / "train.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [START_AGAIN]
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {"HOME": "/root", "BUCKET": "s3://bucket", "SKYPILOT_NODE_RANK": "0"}
    variables |= {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    line = task["run"].replace('$(head -n1 <<<"$SKYPILOT_NODE_IPS")', "10.0.0.1").replace("\\\n", " ")
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: variables[name[1]], line))
    assert words[1:3] == ["-m", "dali_train.extras.torchrun"]
    launch = parse_args(words[3:])
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("1", 0, gpus)
    module, command, config, *settings = launch.training_script, *launch.training_script_args
    assert (module, command) == ("dali_train", "train")
    path = FOLDER.parent.parent / config.removeprefix("--config=")
    assert config_with(path, settings, "train").data.root == "s3://bucket/imagenet"
