"""Settings from a file, the command line and Python: what is understood, and what mistakes are answered."""

import ast
import functools
import inspect
import json
import operator
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from dali_train.checkpoint.recipe import changes_between, recipe
from dali_train.cli import main
from dali_train.config import (
    BatchConfig,
    Config,
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
from dali_train.config.config import SETTINGS
from dali_train.config.override import read_overrides
from dali_train.data.dataset.index import Split
from dali_train.data.sampling.rng import Purpose, philox, philox_generator
from dali_train.errors import ConfigError
from dali_train.training.model import build_model

from .conftest import REPOSITORY

DIGITS = REPOSITORY / "configs" / "digits.py"
FILE = """from dali_train.config import *
from dali_train.hooks import Hook
config = Config(
    data=DataConfig(root="data"),
    model=ModelConfig(name="vit_tiny_patch16_224"),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=8, micro_batch=2),
    run=RunConfig(dir="run", epochs=3),
)
"""


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (DataConfig, {"root": "data", "seed": -1}, "data.seed is -1: use a number from 0"),
        (DataConfig, {"root": "data", "train_size": 0}, "data.train_size is 0: use a positive"),
        (DataConfig, {"root": "data", "crop_area": (0, 1)}, r"data.crop_area is \(0, 1\): use two fractions"),
        (DataConfig, {"root": "data", "crop_aspect": (2, 1)}, r"data.crop_aspect is \(2, 1\): use two ratios"),
        (DataConfig, {"root": "data", "horizontal_flip": 1.5}, "data.horizontal_flip is 1.5: use a probability"),
        (
            DataConfig,
            {"root": "data", "normalise": ((0, 0, 0), (9, 0, 9))},
            r"data.normalise is .*\(9, 0, 9\)\): mean and",
        ),
        (
            DataConfig,
            {"root": "data", "normalise": ((0.5,) * 3, (0.5,) * 3)},
            "pixel values from 0 to 255, so multiply .* by 255",
        ),
        (
            DataConfig,
            {"root": "data", "eval_size": 300},
            "data.eval_size 300 does not fit into data.eval_resize_to 256: enlarge",
        ),
        (DataConfig, {"root": "data", "prefetch": 0}, "data.prefetch is 0: use at least 1"),
        (DataConfig, {"root": "data", "block_images": 0}, "data.block_images is 0: use at least 1"),
        (DataConfig, {"root": "data", "window_blocks": 0}, "data.window_blocks is 0: use at least 1"),
        (
            DataConfig,
            {"root": "data", "block_images": 1 << 40},
            "block_images is 1099511627776: use at least 1 and at most 16,777",
        ),
        (
            DataConfig,
            {"root": "data", "window_blocks": 1 << 40},
            "window_blocks is 1099511627776: use at least 1 and at most",
        ),
        (
            DataConfig,
            {"root": "data", "read_ahead_mb": -1},
            "data.read_ahead_mb is -1: use 0 for no read-ahead, or more",
        ),
        (DataConfig, {"root": "data", "local_copy": ""}, "data.local_copy is empty: name a directory, or leave it out"),
        (DataConfig, {"root": "data", "num_threads": 0}, "data.num_threads is 0: use at least 1"),
        (OptimizerConfig, {"lr": 0}, "optimizer.lr is 0: use a number over 0"),
        (OptimizerConfig, {"lr": 1, "weight_decay": -1}, "optimizer.weight_decay is -1: use 0 or more"),
        (OptimizerConfig, {"lr": 1, "betas": (0.9, 1)}, r"optimizer.betas is \(0.9, 1\): each must be"),
        (OptimizerConfig, {"lr": 1, "clip_grad_norm": 0}, "optimizer.clip_grad_norm is 0: use a norm over 0, or None"),
        (ScheduleConfig, {"warmup_epochs": -1}, "schedule.warmup_epochs is -1: use 0 or more"),
        (
            ScheduleConfig,
            {"warmup_epochs": 0.5, "step_every": "epoch"},
            "with schedule.step_every epoch it must be a whole number",
        ),
        (BatchConfig, {"global_batch": 8, "micro_batch": 0}, "batch.micro_batch is 0: use at least 1"),
        (
            BatchConfig,
            {"global_batch": 100, "micro_batch": 32},
            "batch.global_batch 100 is not a multiple of .* 32; use 96",
        ),
        (MixupConfig, {"alpha": -0.1}, "mixup.alpha is -0.1: use 0 or more"),
        (ModelConfig, {"name": "vit", "compile": True}, "model.compile is True: use auto, none, model"),
        (ModelConfig, {"name": "vit", "cuda_graphs": True}, "with model.compile auto: .* set model.compile model"),
        (ParallelConfig, {"bucket_mb": 0}, "parallel.bucket_mb is 0: use at least 1"),
        (ParallelConfig, {"timeout_s": 0}, "parallel.timeout_s is 0: use a number of seconds"),
        (RunConfig, {"dir": "run", "epochs": 0}, "run.epochs is 0: use a number over 0"),
        (RunConfig, {"dir": "run", "epochs": 1, "max_steps": 0}, "run.max_steps is 0: use at least 1, or None"),
        (
            RunConfig,
            {"dir": "run", "epochs": 1, "eval_every_epochs": 0},
            "run.eval_every_epochs is 0: use a number over 0",
        ),
        (
            RunConfig,
            {"dir": "run", "epochs": 1, "checkpoint_every_steps": 0},
            "run.checkpoint_every_steps is 0: use at least 1",
        ),
        (RunConfig, {"dir": "run", "epochs": 1, "keep_checkpoints": 0}, "run.keep_checkpoints is 0: use at least 1"),
        (
            RunConfig,
            {"dir": "run", "epochs": 1, "max_nonfinite_steps": 0},
            "run.max_nonfinite_steps is 0: use at least 1",
        ),
        (HooksConfig, {"log_every_steps": 0}, "hooks.log_every_steps is 0: use at least 1"),
        (HooksConfig, {"log_every_steps": True}, "hooks.log_every_steps is True: use a whole number: at least 1"),
        (HooksConfig, {"log_every_steps": 10.0}, "hooks.log_every_steps is 10.0: use a whole number: at least 1"),
        (HooksConfig, {"trace_samples": 1}, "hooks.trace_samples is 1: use true or false"),
        (
            HooksConfig,
            {"user": MixupConfig},
            r"hooks.user is <class .*: use a tuple, with a comma .*: \(MixupConfig,\)",
        ),
        (
            ModelConfig,
            {"name": "vit", "kwargs": [1]},
            r"model.kwargs is \[1\]: use a dict, e.g. {'drop_path_rate': 0.1}",
        ),
        (OptimizerConfig, {"lr": 10**400}, "optimizer.lr is 10+...: use a number over 0"),
        (OptimizerConfig, {"lr": None}, "optimizer.lr is None: use a number over 0"),
        (OptimizerConfig, {"lr": 1, "betas": 0.9}, "optimizer.betas is 0.9: use 2 values, e.g. 0.9,0.999"),
        (RunConfig, {"dir": "run", "epoch": 3}, "run.epoch is not a setting: use run.epochs"),
        (RunConfig, {"dir": "run"}, "run.epochs is missing: RunConfig has no default for it"),
    ],
)
def test_fields_check_themselves(section: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**values)


def config(**sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "data": DataConfig(root="data"),
        "model": ModelConfig(name="vit_tiny_patch16_224"),
        "optimizer": OptimizerConfig(lr=1e-3),
        "schedule": ScheduleConfig(warmup_epochs=1),
        "batch": BatchConfig(global_batch=8, micro_batch=2),
        "run": RunConfig(dir="run", epochs=3),
    }
    return Config(**{**defaults, **sections})


def test_fields_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"schedule.warmup_epochs 5 exceeds run.epochs 3: shorten"):
        config(schedule=ScheduleConfig(warmup_epochs=5))
    with pytest.raises(
        ConfigError,
        match=r"mixup.alpha is 0.2 and mixup.cutmix_alpha 0.0 with batch.micro_batch 1: partners are found within",
    ):
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
    assert [batch.grad_accum_steps(ranks) for ranks in (1, 4, 8, 128)] == [128, 32, 16, 1]
    with pytest.raises(
        ConfigError,
        match=r"batch.global_batch 32768 is not divisible by batch.micro_batch 256 x 6 ranks = 1536; "
        "use a multiple of 1536",
    ):
        batch.grad_accum_steps(6)


def test_epochs_become_steps_once_and_whole() -> None:
    assert config().steps(3, 16) == 6
    assert config().steps(3, 17) == 7, "rounded up: the last epoch is whole"
    assert config().steps(0.1 * 3, 80) == 3, "no extra step for what is rounding: 0.1 * 3 > 0.3"


# What a user writes into a config file: (text in FILE, what stands there instead, the message).
FILE_MISTAKES = [
    ("epochs=3", 'epochs="90"', "line 9: run.epochs is '90': use a number over 0"),
    ("epochs=3", "epoch=3", "line 9: run.epoch is not a setting: use run.epochs"),
    ("epochs=3", "epochs=3, seed=1", "line 9: run.seed is not a setting: use data.seed"),
    (", epochs=3", "", "line 9: run.epochs is missing: RunConfig has no default for it"),
    ("lr=1e-3", "learning_rate=1", "line 6: optimizer.learning_rate is not a setting: use optimizer.lr"),
    ('root="data"', 'root="data", shuffle="yes"', "line 4: data.shuffle is 'yes': use full, block or none"),
    (
        'root="data"',
        'root="data", reader="idx"',
        "line 4: data.reader is 'idx': use index (of index, dali or synthetic)",
    ),
    (
        'root="data"',
        'root="data", mean=(0.485, 0.456, 0.406)',
        "line 4: data.mean is not a setting: use data.normalise",
    ),
    (
        "warmup_epochs=1",
        'warmup_epochs=1, step_every="batch"',
        "line 7: schedule.step_every is 'batch': use step or epoch",
    ),
    (
        "config = Config(",
        'config = Config(parallel=ParallelConfig(grad_reduce_dtype="fp16"),',
        "parallel.grad_reduce_dtype is 'fp16': use bf16 (of fp32 or bf16)",
    ),
    (
        "config = Config(",
        'config = Config(precision=PrecisionConfig(dtype="float16"),',
        "precision.dtype is 'float16': use fp16 (of fp32,",
    ),
    (
        "config = Config(",
        "config = Config(hooks=HooksConfig(user=Hook),",
        "hooks.user is <class 'dali_train.hooks.base.Hook'>: use a tuple",
    ),
    ("config = Config(", "config = Config(hook=HooksConfig(),", "line 3: hook is not a setting: use hooks"),
    (
        "    batch=BatchConfig(global_batch=8, micro_batch=2),\n",
        "",
        "line 3: batch is missing: Config has no default for it",
    ),
    ("config = Config(", "config = Config(mixup=0.2,", "line 3: mixup is 0.2: use MixupConfig"),
    ("config = Config(", "confg = Config(", "the file must define `config = Config(...)`, found None"),
    ("epochs=3)", "epochs=3", "line 3: '(' was never closed"),
    ("epochs=3", "epochs=1 / 0", "line 9: ZeroDivisionError: division by zero"),
    ("import *", "import Nothing", "line 1: ImportError: cannot import name 'Nothing'"),
]


@pytest.mark.parametrize(
    ("written", "mistake", "message"), FILE_MISTAKES, ids=[mistake for _, mistake, _ in FILE_MISTAKES]
)
def test_mistakes_in_a_file(
    written: str, mistake: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.py"
    assert written in FILE
    path.write_text(FILE.replace(written, mistake, 1))
    assert main(["plan", "--config", str(path)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and str(path) in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--run.epoch 3", "--run.epoch is not a setting: use --run.epochs"),
        ("--hooks.wandb offline", "--hooks.wandb is not a setting: use --hooks.trackers wandb (offline: WANDB_MODE=o"),
        ("--run.seed 3", "--run.seed is not a setting: use --data.seed"),
        ("--seed 3", "use --data.seed"),
        ("--lr 0.1", "--lr is not a setting: use --optimizer.lr"),
        ("--learning-rate 0.1", "--learning-rate is not a setting: use --optimizer.lr"),
        ("--batch-size 256", "use --batch.global_batch (images per optimizer step) or --batch.micro_batch (images"),
        ("--workers 8", "use --data.num_threads"),
        ("--output out", "use --run.dir"),
        ("--epochs 90", "use --run.epochs"),
        ("--model resnet50", "use --model.name"),
        ("--drop-path 0.1", "use --model.kwargs.drop_path_rate"),
        ("--foo 1", "--foo is not a setting: README and --help list the settings"),
        ("run.epochs=3", "'run.epochs=3' belongs to no setting: write --run.epochs 3"),
        ("--data.antialias", "--data.antialias has no value: write --data.antialias true"),
        ("--data.root my data", "--data.root takes one value, found 2: 'my data'; quote"),
        ("--hooks.trace_samples maybe", "hooks.trace_samples is 'maybe': use true or false"),
        ("--optimizer.betas 0.9", "optimizer.betas is '0.9': use 2 values, e.g. 0.9,0.999"),
        ("--optimizer.betas 0.9,x", "optimizer.betas is '0.9,x': use 2 values, e.g. 0.9,0.999"),
        ("--hooks.profile 3", "that is not before it, e.g. 20,25, or None"),
        ("--data.normalise 0.485,0.456,0.406 0.229,0.224,0.225", "so multiply those for values from 0 to 1 by 255"),
        ("--precision.dtype bfloat16", "precision.dtype is 'bfloat16': use bf16 (of fp32, bf16, fp16 or fp64)"),
        ("--run.device gpu", "run.device is 'gpu': use cuda (of auto, cpu or cuda)"),
        (
            "--data.progressive 6,128,12",
            "data.progressive is '6,128,12': use pairs of an epoch and a size in pixels, such",
        ),
        ("--data.progressive 6,16 3,24", "data.progressive is ((6.0, 16), (3.0, 24)): use growing epochs"),
        ("--data.progressive 6,128", "use sizes up to data.train_size 32, which follows them"),
        ("--data.progressive 6,16 --data.reader dali", "data.reader is dali with data.progressive"),
        (
            "--data.progressive 90,16",
            "smaller images until epoch 90, but run.epochs is 90: let them end before the run does",
        ),
        (
            "--data.progressive 6,16 --parallel.pipeline 2",
            "data.progressive with parallel.pipeline 2: what its ranks exchange",
        ),
        (
            "--data.progressive 6,16",
            "a size in data.progressive is 16, but model.name vit_tiny_patch16_224 takes images of 32 p",
        ),
        ("--run.dir ''", "run.dir is empty: name a directory"),
        ("--run.epochs -1", "run.epochs is -1.0: use a number over 0"),
        ("--run.epochs abc", "run.epochs is 'abc': use a number over 0"),
        ("--run.epochs inf", "run.epochs is inf: use a finite number over 0"),
        ("--run.epochs 1e-12", "run.epochs is 1e-12: use a number over 0, from 0.0001"),
        ("--optimizer.lr nan", "optimizer.lr is nan: use a finite number over 0"),
        ("--data.num_threads 100000", "data.num_threads is 100000: use at least 1 and at most 1024"),
        (
            "--data.prefetch 1000000",
            "data.prefetch is 1000000: use at least 1 and at most 64, since each takes the memory",
        ),
        ("--data.seed 18446744073709551616", "data.seed is 18446744073709551616: use a number from 0 to 2**64 - 1"),
        ("--data.seed 1e3", "data.seed is '1e3': use a whole number from 0 to 2**64 - 1"),
        ("--batch.micro_batch 99999999999999999999", "use at least 1, and at most 9,223,372,036,854,775,807"),
        ("--batch.global_batch 100", "batch.global_batch 100 is not a multiple of batch.micro_batch 32; use 96"),
        ("--model.kwargs.num_classes 10", "model.kwargs has num_classes 10: leave it out, the dataset decides it"),
        ("--model.kwargs {[]:1}", "model.kwargs is '{[]:1}': use a dict, e.g. {'drop_path_rate': 0.1}"),
        ("--model.kwargs.drop_rate", "--model.kwargs.drop_rate has no value: write --model.kwargs.drop_rate VALUE"),
    ],
)
def test_mistakes_on_the_command_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(DIGITS), *shlex.split(words)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_values_as_people_type_them() -> None:
    for words, value in (
        ("--data.progressive 6,128 12,160", ((6, 128), (12, 160))),
        ("--optimizer.betas 0.9,0.98", (0.9, 0.98)),
        ("--optimizer.betas 0.9 0.98", (0.9, 0.98)),
        ("--optimizer.betas '(0.9, 0.98)'", (0.9, 0.98)),
        ("--optimizer.betas=0.9,0.98", (0.9, 0.98)),
        ("--hooks.profile 3 5", (3, 5)),
        ("--hooks.profile none", None),
        ("--run.max_steps None", None),
        ("--run.max-steps 1_000", 1000),
        ("--data.local_copy none", None),
        ("--data.antialias 0", False),
        ("--data.antialias Yes", True),
        ("--data.antialias TRUE", True),
        ("--model.name none", "none"),
        ("--run.dir 1", "1"),
        ("--run.epochs 3 --run.epochs 4", 4.0),
        ("--data.seed 18446744073709551615", 2**64 - 1),
        ("--data.normalise imagenet", "imagenet"),
        ("--data.normalise 120,110,100 60,59,58", ((120.0, 110.0, 100.0), (60.0, 59.0, 58.0))),
        ("--data.normalise '((120,110,100),(60,59,58))'", ((120.0, 110.0, 100.0), (60.0, 59.0, 58.0))),
        ("--model.kwargs.drop_path_rate 0.1", 0.1),
        ("--model.kwargs.act_layer silu", "silu"),
        ("--model.kwargs.x_y none", None),
        ("--model.kwargs.img_size 96 128", (96, 128)),
        ("--model.kwargs.img_size '(96, 128)'", (96, 128)),
        ("--model.kwargs.qk_norm true", True),
        ("--model.kwargs \"{'depth': 2}\"", {"depth": 2}),
    ):
        (read,) = read_overrides(shlex.split(words)).values()
        assert (read, type(read)) == (value, type(value)), words


def test_keyword_arguments_of_the_model_are_added_and_removed() -> None:
    base = config(model=ModelConfig(name="vit_tiny_patch16_224", kwargs={"depth": 2, "drop_rate": 0.1}))
    changed = base.replace(read_overrides(["--model.kwargs.drop_path_rate", "0.2", "--model.kwargs.drop_rate", "none"]))
    assert changed.model.kwargs == {"depth": 2, "drop_path_rate": 0.2}
    assert base.replace({"model.kwargs": {"depth": 3}, "model.kwargs.drop_rate": 0}).model.kwargs == {
        "depth": 3,
        "drop_rate": 0,
    }


def test_settings_that_depend_on_each_other_change_together() -> None:
    changed = config().replace(
        {"batch.micro_batch": 3, "batch.global_batch": 6, "run.epochs": 1, "schedule.warmup_epochs": 0}
    )
    assert (changed.batch.global_batch, changed.batch.micro_batch, changed.run.epochs) == (6, 3, 1)
    with pytest.raises(ConfigError, match=r"batch.global_batch 8 is not a multiple of batch.micro_batch 3"):
        config().replace({"batch.micro_batch": 3})
    with pytest.raises(ConfigError, match=r"^run.epoch is not a setting: use run.epochs$"):
        config().replace({"run.epoch": 3})


def test_lists_paths_and_names_are_understood(tmp_path: Path) -> None:
    data = DataConfig(root=tmp_path, crop_area=[0.5, 1], normalise="imagenet")  # type: ignore[arg-type]
    assert (data.root, data.crop_area) == (str(tmp_path), (0.5, 1))
    assert (data.mean, data.std) == ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


def test_every_setting_explains_itself_and_its_default_fits(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(config().to_json())
    for name in SETTINGS:
        value = functools.reduce(operator.getitem, name.split("."), values)
        config().replace({name: value})
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DIGITS), "--help"])
    printed = capsys.readouterr().out
    # A dict has one option per key, and tyro shows no option for a tuple of functions.
    unlisted = {name for name in SETTINGS if f"--{name} " not in printed}
    assert unlisted == {"model.kwargs", "optimizer.kwargs", "loss.teacher_kwargs", "hooks.user"}
    for cls in get_type_hints(Config).values():
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, explanation in pairwise(definition.body):
            assert not isinstance(statement, ast.AnnAssign) or isinstance(explanation, ast.Expr), ast.unparse(statement)


def test_a_seed_is_an_exact_integer(tmp_path: Path) -> None:
    """Of 64 bits: neither JSON nor NumPy takes it for a float on its way."""
    seed = 2**64 - 1
    saved = tmp_path / "config.json"
    saved.write_text(config(data=DataConfig(root="data", seed=seed)).to_json())
    assert load_config(saved).data.seed == seed
    one = np.ones(1, dtype=np.uint64)
    draws = [
        philox_generator(each, Purpose.ORDER, low=1, high=1).random_raw(4).tolist() for each in (seed, seed - 1, 2**63)
    ]
    assert draws[0] == philox(seed, Purpose.ORDER, one, one, one)[0].tolist()
    assert len({tuple(each) for each in draws}) == 3


class TestHook:
    __test__ = False


def test_the_config_of_a_run_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    whole = config(
        optimizer=OptimizerConfig(lr=1, betas=(0.8, 0.9)), data=DataConfig(root="data", normalise=((9,) * 3, (8,) * 3))
    )
    path.write_text(whole.to_json())
    assert load_config(path) == whole
    path.write_text(config(hooks=HooksConfig(user=(TestHook,))).to_json())
    with pytest.warns(
        UserWarning, match=r"config.json: hooks.user \['TestHook'\] are left out, since only a config file in Python"
    ):
        assert load_config(path) == config()

    values = json.loads(config().to_json())
    for text, message in (
        ("{", "config.json cannot be read as a run's config.json: Expecting property name"),
        ("[" * 100_000, "config.json cannot be read as a run's config.json: "),
        ("[1]", "config.json: expected an object of sections"),
        ('{"data": 3}', "config.json: expected an object of sections"),
        (json.dumps({**values, "date": {}}), "config.json: date is not a setting: use data"),
        (
            json.dumps({**values, "run": {"dir": "run", "epochs": "90"}}),
            "config.json: run.epochs is '90': use a number over 0",
        ),
        (
            json.dumps({**values, "run": {"dir": "run", "epochs": float("nan")}}),
            "config.json: run.epochs is nan: use a finite number",
        ),
    ):
        path.write_text(text)
        assert main(["plan", "--config", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_loading_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none.py: this file does not exist; the recipes are in configs/"):
        load_config(tmp_path / "none.py")
    path = tmp_path / "with-hyphen.py"
    path.write_text("config = 3")
    with pytest.raises(ConfigError, match=r"the file must define `config = Config\(...\)`, found 3"):
        load_config(path)
    text = tmp_path / "config.txt"
    text.write_text("")
    with pytest.raises(ConfigError, match=r"not a Python file; its name must end in .py, or in .json for a run's"):
        load_config(text)
    with pytest.raises(ConfigError, match=r"this is a directory; name a file, for a run's directory .*config.json"):
        load_config(tmp_path)


def test_a_config_file_may_register_a_model(tmp_path: Path) -> None:
    """timm looks up the module that a function comes from."""
    path = tmp_path / "own-model.py"
    path.write_text(
        "import timm\n"
        "from timm.models import register_model\n"
        "@register_model\n"
        "def config_files_own_vit(pretrained=False, **kwargs):\n"
        "    return timm.create_model('vit_tiny_patch16_224', depth=1, **kwargs)\n"
        + FILE.replace("vit_tiny_patch16_224", "config_files_own_vit")
    )
    model = build_model(load_config(path), 5, torch.device("meta"))
    assert len(model.blocks) == 1  # type: ignore[arg-type]


def test_what_belongs_to_the_recipe(dataset: Path) -> None:
    """A setting that is not marked as the machine's does; one that a checkpoint lacks has its default."""
    split = Split(dataset, "train")
    current = json.loads(
        json.dumps(recipe(config(model=ModelConfig(name="vit", kwargs={"img_size": (32, 32)})), split))
    )
    assert current == recipe(config(model=ModelConfig(name="vit", kwargs={"img_size": (32, 32)})), split)
    assert {"data.seed", "data.mean", "optimizer.lr", "batch.micro_batch", "run.epochs", "mixup.alpha"} <= set(current)
    machine = {"data.root", "run.dir", "run.device", "run.published_top1", "hooks.trackers", "parallel.bucket_mb"}
    assert not machine & set(current)

    older = {
        name: value
        for name, value in current.items()
        if name not in ("data.antialias", "optimizer.betas", "mixup.per_image")
    }
    assert changes_between({**older, "run.published_top1": 0.7}, current) == []
    changed = recipe(config(optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.98))), split)
    assert changes_between(
        {**older, "model.name": "other"}, {**changed, "mixup.per_image": True, "dataset": "another"}
    ) == [
        f"dataset {current['dataset']} -> another",
        "mixup.per_image False -> True",
        "model.kwargs {'img_size': [32, 32]} -> {}",
        "model.name other -> vit_tiny_patch16_224",
        "optimizer.betas [0.9, 0.999] -> [0.9, 0.98]",
    ]
    imagenet = recipe(config().replace({"data.normalise": "imagenet"}), split)
    numbers = recipe(config().replace({"data.normalise": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))}), split)
    assert changes_between(imagenet, numbers) == []
