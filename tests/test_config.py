"""Mistakes in a config, each with an error that names field, value, requirement and remedy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dali_train.config import (
    BatchConfig,
    Config,
    ConfigError,
    DataConfig,
    HooksConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    load_config,
)
from dali_train.model import build_model


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        (DataConfig, {"root": "", "seed": -1}, "data.seed is -1: use a number from 0"),
        (DataConfig, {"root": "", "train_size": 0}, "data.train_size is 0: use a positive"),
        (DataConfig, {"root": "", "crop_area": (0, 1)}, r"data.crop_area is \(0, 1\): use two fractions"),
        (DataConfig, {"root": "", "crop_aspect": (2, 1)}, r"data.crop_aspect is \(2, 1\): use two ratios"),
        (DataConfig, {"root": "", "horizontal_flip": 1.5}, "data.horizontal_flip is 1.5: use a probability"),
        (DataConfig, {"root": "", "std": (1, 0, 1)}, r"data.std is \(1, 0, 1\): each must be over 0"),
        (DataConfig, {"root": "", "eval_size": 300}, "data.eval_size 300 does not fit into data.eval_resize_to 256: enlarge"),
        (DataConfig, {"root": "", "prefetch": 0}, "data.prefetch is 0: use at least 1"),
        (DataConfig, {"root": "", "block_images": 0}, "data.block_images is 0: use at least 1"),
        (DataConfig, {"root": "", "window_blocks": 0}, "data.window_blocks is 0: use at least 1"),
        (DataConfig, {"root": "", "read_ahead_mb": -1}, "data.read_ahead_mb is -1: use 0 for no read-ahead, or more"),
        (DataConfig, {"root": "", "local_copy": ""}, "data.local_copy is empty: name a directory, or leave it out"),
        (DataConfig, {"root": "", "num_threads": 0}, "data.num_threads is 0: use at least 1"),
        (OptimizerConfig, {"lr": 0}, "optimizer.lr is 0: use a number over 0"),
        (OptimizerConfig, {"lr": 1, "weight_decay": -1}, "optimizer.weight_decay is -1: use 0 or more"),
        (OptimizerConfig, {"lr": 1, "betas": (0.9, 1)}, r"optimizer.betas is \(0.9, 1\): each must be"),
        (OptimizerConfig, {"lr": 1, "clip_grad_norm": 0}, "optimizer.clip_grad_norm is 0: use a norm over 0, or None"),
        (ScheduleConfig, {"warmup_epochs": -1}, "schedule.warmup_epochs is -1: use 0 or more"),
        (ScheduleConfig, {"warmup_epochs": 0.5, "step_every": "epoch"}, "with schedule.step_every epoch it must be a whole number"),
        (BatchConfig, {"global_batch": 8, "micro_batch": 0}, "batch.micro_batch is 0: use at least 1"),
        (BatchConfig, {"global_batch": 100, "micro_batch": 32}, "batch.global_batch 100 is not a multiple of .* 32; use 96"),
        (MixupConfig, {"alpha": -0.1}, "mixup.alpha is -0.1: use 0 or more"),
        (ModelConfig, {"name": "", "compile": True}, "model.compile is True: use none, model"),
        (ModelConfig, {"name": "", "cuda_graphs": True}, "with model.compile none: .* set model.compile model"),
        (ParallelConfig, {"bucket_mb": 0}, "parallel.bucket_mb is 0: use at least 1"),
        (ParallelConfig, {"timeout_s": 0}, "parallel.timeout_s is 0: use a number of seconds"),
        (RunConfig, {"dir": "", "epochs": 0}, "run.epochs is 0: use a number over 0"),
        (RunConfig, {"dir": "", "epochs": 1, "max_steps": 0}, "run.max_steps is 0: use at least 1, or None"),
        (RunConfig, {"dir": "", "epochs": 1, "eval_every_epochs": 0}, "run.eval_every_epochs is 0: use a number over 0"),
        (RunConfig, {"dir": "", "epochs": 1, "checkpoint_every_steps": 0}, "run.checkpoint_every_steps is 0: use at least 1"),
        (RunConfig, {"dir": "", "epochs": 1, "keep_checkpoints": 0}, "run.keep_checkpoints is 0: use at least 1"),
        (RunConfig, {"dir": "", "epochs": 1, "max_nonfinite_steps": 0}, "run.max_nonfinite_steps is 0: use at least 1"),
        (HooksConfig, {"log_every_steps": 0}, "hooks.log_every_steps is 0: use at least 1"),
    ],
)  # fmt: skip
def test_fields_check_themselves(section: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**fields)


def config(**sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "data": DataConfig(root="data"), "model": ModelConfig(name="vit_tiny_patch16_224"), "optimizer": OptimizerConfig(lr=1e-3),
        "schedule": ScheduleConfig(warmup_epochs=1), "batch": BatchConfig(global_batch=8, micro_batch=2),
        "run": RunConfig(dir="run", epochs=3),
    }  # fmt: skip
    return Config(**{**defaults, **sections})


def test_fields_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"schedule.warmup_epochs 5 exceeds run.epochs 3: shorten"):
        config(schedule=ScheduleConfig(warmup_epochs=5))
    with pytest.raises(ConfigError, match=r"mixup.alpha is 0.2 with batch.micro_batch 1: partners are found within"):
        config(batch=BatchConfig(global_batch=8, micro_batch=1), mixup=MixupConfig(alpha=0.2))


def test_cuda_graphs_need_a_gpu() -> None:
    model = ModelConfig(name="vit_tiny_patch16_224", compile="model", cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"cuda_graphs is true with run.device cpu: CUDA graphs need a GPU"):
        config(model=model, run=RunConfig(dir="run", epochs=3, device="cpu"))
    with pytest.raises(ConfigError, match=r"cuda_graphs is true, but the model runs on a CPU: CUDA graphs need a GPU"):
        build_model(config(model=model), 5, torch.device("cpu"))


def test_models_that_cannot_do_what_is_asked() -> None:
    """vgg11 is one nn.Sequential of single layers; convit refuses checkpointing."""
    for fields, message in (
        ({"name": "vgg11", "compile": "blocks"}, r"vgg11 is not made of blocks that repeat: set model.compile model"),
        ({"name": "convit_tiny", "activation_checkpointing": True}, r"timm's convit_tiny has none: set it to false"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(config(model=ModelConfig(**fields)), 5, torch.device("cpu"))


def test_accumulation_is_derived() -> None:
    batch = BatchConfig(global_batch=32_768, micro_batch=256)
    assert [batch.accumulation(ranks) for ranks in (1, 4, 8, 128)] == [128, 32, 16, 1]
    with pytest.raises(
        ConfigError,
        match=r"batch.global_batch 32768 is not divisible by batch.micro_batch 256 x 6 ranks = 1536; use a multiple of 1536",
    ):
        batch.accumulation(6)


def test_epochs_become_steps_once_and_whole() -> None:
    assert config().steps(3, 16) == 6
    assert config().steps(3, 17) == 7, "rounded up: the last epoch is whole"
    assert config().steps(0.1 * 3, 80) == 3, "no extra step for what is rounding: 0.1 * 3 > 0.3"


def test_loading_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none.py: there is no such file; the recipes are in configs/"):
        load_config(tmp_path / "none.py")
    path = tmp_path / "with-hyphen.py"
    path.write_text("config = 3")
    with pytest.raises(ConfigError, match=r"the file must define `config = Config\(...\)`, found 3"):
        load_config(path)
    text = tmp_path / "config.txt"
    text.write_text("")
    with pytest.raises(ConfigError, match=r"not a Python file; its name must end in .py"):
        load_config(text)
