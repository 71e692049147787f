"""Mistakes of users, in one table: what they do, and what they are told, by setting or file, value and remedy.

A mistake is a command line, a config with other values by full name, or a config file with other text. Add a row here
for one that needs neither a dataset nor a run; settings that exclude each other are in tests/config/test_conflicts.py.
"""

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest

from dali_train.cli import command_parser, main
from dali_train.commands.arguments import gigabytes, own_options
from dali_train.config import Config, DataConfig
from dali_train.config.check import as_typed
from dali_train.config.command_line import config_with
from dali_train.errors import ConfigError
from dali_train.hooks import Hook

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
PLAIN = Config(
    data=dict(root="data"),  # type: ignore[arg-type]
    model=dict(name="vit_tiny_patch16_224"),  # type: ignore[arg-type]
    optimizer=dict(lr=1e-3),  # type: ignore[arg-type]
    schedule=dict(warmup_epochs=1),  # type: ignore[arg-type]
    batch=dict(global_batch=8, micro_batch=2),  # type: ignore[arg-type]
    run=dict(dir="run", epochs=3),  # type: ignore[arg-type]
)


Mistake = str | dict[str, Any] | tuple[str, str]
MISTAKES: list[tuple[Mistake, str]] = [
    # A value that a setting does not take
    ({"data.seed": -1}, "data.seed is ... a whole number from 0 to 2"),
    ({"data.train_size": 0}, "data.train_size is ... a number of pixels from 1 to 65,500"),
    ({"data.crop_area": (0, 1)}, "data.crop_area is ... two fractions"),
    ({"data.crop_aspect": (2, 1)}, "data.crop_aspect is ... two ratios"),
    ({"data.horizontal_flip": 1.5}, "data.horizontal_flip is ... a probability"),
    ({"data.normalise": ((0, 0, 0), (9, 0, 9))}, "data.normalise is ... mean and standard deviation are for"),
    ({"data.normalise": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}, "data.normalise is ... multiply ... by 255"),
    ({"data.block_images": 1 << 40}, "data.block_images is ... from 1 to 16,777,216"),
    ({"data.window_blocks": 0}, "data.window_blocks is ... from 1 to 16,777,216"),
    ({"data.read_ahead_mb": -1}, "data.read_ahead_mb is ... from 0 to 1,048,576"),
    ({"data.local_copy": ""}, "data.local_copy is ... the name of a directory"),
    ({"data.cache_gb": 1e300}, "data.cache_gb is ... up to 1,000,000"),
    ({"data.num_threads": 0}, "data.num_threads is ... a number of threads from 1"),
    ({"data.progressive": ((6.0, 16), (3.0, 24))}, "data.progressive is ... increasing epochs"),
    ({"data.alternating_flip": True, "data.reader": "dali"}, "data.reader is ... data.alternating_flip"),
    ({"data.augment": "rand-q3"}, "data.augment is ... has no setting 'q3'"),
    ({"optimizer.groups": (("*.bias", -1, 1),)}, "optimizer.groups is ... factors of lr and of weight_decay"),
    ("plan --config digits --optimizer.groups *.bias,2", "optimizer.groups is ... such as *.norm*.bias,64,0.015625"),
    ({"optimizer.lr": 0}, "optimizer.lr is ... a number over 0"),
    ({"optimizer.lr": float("nan")}, "optimizer.lr is ... a number over 0"),
    ({"optimizer.lr": 10**400}, "optimizer.lr is ... a number over 0"),
    ({"optimizer.lr": None}, "optimizer.lr is ... a number over 0"),
    ({"optimizer.lr": 1e300}, "optimizer.lr is ... a number over 0, at most 1e30"),
    ({"optimizer.weight_decay": -1}, "optimizer.weight_decay is ... from 0 on"),
    ({"optimizer.betas": (0.9, 1)}, "optimizer.betas is ... 2 values, each a number from 0 to under 1"),
    ({"optimizer.betas": 0.9}, "optimizer.betas is ... e.g. 0.9,0.999"),
    ({"optimizer.clip_grad_norm": 0}, "optimizer.clip_grad_norm is ... a norm over 0, or None"),
    ({"data.interpolation": "random", "data.reader": "dali"}, "data.reader is dali ... data.interpolation random"),
    ({"data.vertical_flip": 0.5, "data.reader": "dali"}, "data.reader is dali ... data.vertical_flip 0.5"),
    ({"optimizer.layer_decay": 0.0}, "optimizer.layer_decay is ... a factor over 0"),
    ({"schedule.warmup_epochs": -1}, "schedule.warmup_epochs is ... from 0 on"),
    ({"batch.micro_batch": 0}, "batch.micro_batch is ... from 1 to"),
    ({"mixup.alpha": -0.1}, "mixup.alpha is ... from 0 on"),
    ({"ema.decay": 1.0}, "ema.decay is ... a share between 0 and 1"),
    ({"model.compile": True}, "model.compile is ... auto, none, model, cuda-graphs, blocks or autotune"),
    ({"model.kwargs": [1]}, "model.kwargs is ... a dict, e.g. {'drop_path_rate': 0.1}"),
    ({"model.name": 3}, "model.name is ... text"),
    ({"parallel.timeout_s": 0}, "parallel.timeout_s is ... a number of seconds"),
    ({"run.epochs": 0}, "run.epochs is ... from 0.0001"),
    ({"run.max_steps": 0}, "run.max_steps is ... from 1 to ... , or None"),
    ({"run.eval_every_epochs": 0}, "run.eval_every_epochs is ... over 0"),
    ({"run.mirror": "https://host/run"}, "run.mirror is ... the URL of a writable bucket"),
    ({"hooks.log_every_steps": True}, "hooks.log_every_steps is ... a whole number from 1"),
    ({"hooks.log_every_steps": 10.0}, "hooks.log_every_steps is ... a whole number from 1"),
    ({"hooks.trace_samples": 1}, "hooks.trace_samples is ... true or false"),
    ({"hooks.user": DataConfig}, "hooks.user is ... (VALUE,)"),
    ({"hooks.user": (Hook(),)}, "hooks.user is ... not a hook itself"),
    ({"hooks.profile": (3, 2)}, "hooks.profile is ... a first step from 1 on"),
    # Values that do not fit together
    ({"precision.autocast": False, "precision.dtype": "fp32"}, "autocast is false with precision.dtype fp32"),
    ({"schedule.warmup_epochs": 5}, "schedule.warmup_epochs 5 exceeds run.epochs 3: shorten"),
    (
        {"batch.micro_batch": 3},
        "batch.global_batch 8 is not ... micro_batch 3: set batch.micro_batch 2, or batch.global_batch 9",
    ),
    ({"data.eval_size": 300, "data.eval_resize_to": 256}, "data.eval_size 300 ... data.eval_resize_to 256: enlarge"),
    ({"model.cuda_graphs": True}, "model.cuda_graphs is not a setting: use model.compile cuda-graphs"),
    ({"data.shuffle": "block", "data.repeats": 3}, "data.repeats 3 ... batch.micro_batch 2 ... a multiple of 3"),
    ({"data.shuffle": "balanced", "data.reader": "dali"}, "reader is dali with data.shuffle balanced, ... index"),
    ({"data.progressive": ((6, 128),), "run.epochs": 6}, "until epoch 6, but run.epochs is 6"),
    ({"run.dir": "./data"}, "run.dir and data.root are both ./data: ... another run.dir"),
    ({"run.epoch": 3}, "run.epoch is not a setting: use run.epochs"),
    # A config file: (what stands in FILE, what a user writes instead)
    (("epochs=3", 'epochs="90"'), "line 9: run.epochs is '90': use a number"),
    (("epochs=3", "epoch=3"), "line 9: run.epoch is not a setting: use run.epochs"),
    (("epochs=3", "epochs=3, seed=1"), "line 9: run.seed is not a setting: use data.seed"),
    ((", epochs=3", ""), "line 9: run.epochs is missing: RunConfig has no default for it"),
    (("lr=1e-3", "learning_rate=1"), "line 6: optimizer.learning_rate is not a setting: use optimizer.lr"),
    (('root="data"', 'root="data", shuffle="yes"'), "line 4: data.shuffle is 'yes': use full, block, none or balanced"),
    (('root="data"', 'root="data", reader="idx"'), "line 4: data.reader is 'idx': use index (of index, dali"),
    (('root="data"', 'root="data", mean=(0.5, 0.5, 0.5)'), "line 4: data.mean is not a setting: use data.normalise"),
    (("=1)", '=1, step_every="batch")'), "line 7: schedule.step_every is 'batch': use step or epoch"),
    (("lr=1e-3", 'lr=1e-3, clip_mode="nrom"'), "optimizer.clip_mode is 'nrom': use norm (of norm, value, agc)"),
    (("=1)", '=1, name="cosin")'), "schedule.name is 'cosin': use cosine (of linear, cosine, "),
    (
        ("Config(", 'Config(loss=LossConfig(name="cross-entropi"),'),
        "loss.name is 'cross-entropi': use cross-entropy (of cross-entropy, ",
    ),
    (("Config(", 'Config(precision=PrecisionConfig(dtype="float16"),'), "precision.dtype is 'float16': use fp16 (of "),
    (("Config(", "Config(hooks=HooksConfig(user=Hook),"), "hooks.user is <class 'dali_train.hooks.Hook'>: use "),
    (("Config(", "Config(hook=HooksConfig(),"), "line 3: hook is not a setting: use hooks"),
    (
        ("    batch=BatchConfig(global_batch=8, micro_batch=2),\n", ""),
        "line 3: batch is missing: Config has no default",
    ),
    (("Config(", "Config(mixup=0.2,"), "line 3: mixup is 0.2: use MixupConfig"),
    (("config = Config(", "confg = Config("), "the file must define `config = Config(...)`, found None"),
    (("epochs=3)", "epochs=3"), "line 3: '(' was never closed"),
    (("epochs=3", "epochs=1 / 0"), "line 9: ZeroDivisionError: division by zero"),
    (("epochs=3", "epochs=__import__('sys').exit(0)"), "line 9: SystemExit: 0"),
    (("import *", "import Nothing"), "line 1: ImportError: cannot import name 'Nothing'"),
    # Settings on the command line
    ("plan --config digits --run.epoch 3", "--run.epoch is not a setting: use --run.epochs"),
    (
        "plan --config digits --hooks.wandb offline",
        "--hooks.wandb is not a setting: use --hooks.trackers wandb (more by WANDB_MODE",
    ),
    ("plan --config digits --seed 3", "--seed is not a setting: use --data.seed"),
    ("plan --config digits --learning-rate 0.1", "--learning-rate is not a setting: use --optimizer.lr"),
    (
        "plan --config digits --batch-size 256",
        "use --batch.global_batch (images per optimizer step) or --batch.micro_batch (images",
    ),
    ("plan --config digits --epochs 90", "use --run.epochs"),
    ("plan --config digits --model resnet50", "use --model.name"),
    ("plan --config digits --drop-path 0.1", "use --model.kwargs.drop_path_rate"),
    ("plan --config digits --opt sgd", "--opt is not a setting: use --optimizer.name"),
    ("plan --config digits --ema 0.999", "--ema is not a setting: use --ema.decay"),
    ("plan --config digits --mixup.prob 0.5", "--mixup.prob is not a setting: use --mixup.probability"),
    ("plan --config digits --mixup-off-epoch 3", "use --mixup.until_epoch"),
    ("plan --config digits --model-ema-decay 0.9", "use --ema.decay"),
    ("plan --config digits --aa rand-m9", "use --data.augment"),
    ("plan --config digits --momentum 0.8", "use --optimizer.kwargs.momentum"),
    ("plan --config digits --num-classes 10", "--num-classes is not a setting: the dataset decides it, leave it out"),
    ("plan --config digits --hooks.sample_images 8", "--hooks.sample_images is not a setting: use --hooks.predictions"),
    ("plan --config digits --hooks.frobnicate_images 8", "train --config FILE --help` lists the settings"),
    ("plan --config digits --foo 1", "--foo is not a setting: `dali-train train --config FILE --help` lists"),
    ("train --config digits --help mixupp", "mixupp is not a setting: use mixup"),
    ("plan --config digits run.epochs=3", "'run.epochs=3' belongs to no setting: write --run.epochs 3"),
    ("plan --config digits --data.antialias", "--data.antialias has no value: write --data.antialias true"),
    ("plan --config digits --data.root my data", "--data.root takes one value, found 2: 'my data'; quote"),
    ("plan --config digits --hooks.trace_samples maybe", "hooks.trace_samples is 'maybe': use true or false"),
    ("plan --config digits --optimizer.betas 0.9,x", "optimizer.betas is '0.9,x': use 2 values"),
    ("plan --config digits --hooks.profile 3", "that is not before it, e.g. 20,25, or None"),
    (
        "plan --config digits --data.normalise 0.485,0.456,0.406 0.229,0.224,0.225",
        "so multiply those for values from 0 to 1 by 255",
    ),
    (
        "plan --config digits --data.normalise imagnet",
        "data.normalise is 'imagnet': use imagenet (of imagenet, inception, ",
    ),
    (
        "plan --config digits --precision.dtype bfloat16",
        "precision.dtype is 'bfloat16': use bf16 (of fp32, bf16, fp16 or fp64)",
    ),
    ("plan --config digits --run.device CUDA", "run.device is 'CUDA': use cuda (of auto, cpu or cuda)"),
    ("plan --config digits --optimizer.name AdamW", "optimizer.name is AdamW ... did you mean adamw?"),
    ("plan --config digits --optimizer.name LAMB", "optimizer.name is LAMB ... did you mean lamb?"),
    ("plan --config digits --model.name ResNet18", "model.name is 'ResNet18' ... close: resnet18"),
    ("plan --config digits --data.augment RandAugment", "data.augment is 'RandAugment' ... did you mean rand?"),
    ("plan --config VIT-B16", "did you mean vit-b16, which ships?"),
    ("plan --config digits --run.device gpu", "run.device is 'gpu': use cuda (of auto, cpu or cuda)"),
    ("plan --config digits --data.progressive 6,128,12", "use pairs of an epoch and a size in pixels, such"),
    ("plan --config digits --data.progressive 6,16", "16, but model.name vit_tiny_patch16_224 takes images of 32 p"),
    ("plan --config digits --run.dir ''", "run.dir is empty: use the name of a directory"),
    ("plan --config digits --run.epochs abc", "run.epochs is 'abc': use a number from"),
    ("plan --config digits --run.epochs inf", "run.epochs is 'inf': use a number from"),
    ("plan --config digits --data.seed 1e3", "data.seed is 1000.0: use a whole number"),
    ("plan --config digits --batch.micro_batch 99999999999999999999", "use a whole number from 1 to 65,536"),
    ("plan --config digits --batch.micro_batch 1000000000", "use a whole number from 1 to 65,536"),
    ("plan --config digits --data.cache_gb 1e300", "use a number of gigabytes up to 1,000,000"),
    (
        "plan --config digits --model.kwargs.in_chans 1",
        "model.kwargs has in_chans 1: leave it out, images have 3 channels, also grey ones",
    ),
    (
        "plan --config digits --model.kwargs.num_classes 10",
        "model.kwargs has num_classes 10: leave it out, the dataset decides it",
    ),
    (
        "plan --config digits --model.kwargs {[]:1}",
        "model.kwargs is '{[]:1}': use a dict, e.g. {'drop_path_rate': 0.1}",
    ),
    (
        "plan --config digits --model.kwargs.drop_rate",
        "--model.kwargs.drop_rate has no value: write --model.kwargs.drop_rate VALUE",
    ),
    ("plan --config digits --run.dir runs/\udcff", "run.dir is 'runs/\\udcff': use UTF-8"),
    # Commands
    (
        "data convert folder --train nowhere --out new",
        "--train nowhere does not exist: use a directory",
    ),
    ("plan --config digits --lr 1", "--lr is not a setting: use --optimizer.lr"),
    ("plan --config digits -b 8", "-b: settings have no short names, and --batch-size is not ... --batch.global_batch"),
    ("train", "--config FILE is missing; `dali-train recipes` lists"),
    ("train --confg digits", "--confg is not a setting: use --config"),
    ("train --config digits --num-process 2", "--num-process is not a setting: use --num-processes"),
    (
        "train --config vit-b16 --data.root nowhere",
        "nowhere: this directory does not exist: set data.root",
    ),
    (
        "plan --config vit-b16 --world_size 129",
        "batch.global_batch 32768 is 128 x batch.micro_batch 256, and 129 data-parallel ranks need at least",
    ),
    ("plan --config vit-b16 --model.name vit_base_patch16_222", "timm does not know; close: vit_base_patch16_224"),
    (
        "plan --config vit-b16 --model.name resnet18",
        "model.kwargs.pos_drop_rate is not an argument of resnet18: use model.kwargs.drop_rate",
    ),
    (
        "eval --config vit-b16",
        "name the run, `dali-train eval RUN`, a checkpoint, --checkpoint RUN/checkpoints/newest, or weights",
    ),
    ("train vit-b16 --data.root nowhere", "nowhere: this directory does not exist"),
    ("train photos.py", "--config photos.py: this file does not exist"),
    ("eval photos.py", "photos.py: eval takes a run directory; for a config write --config photos.py"),
    ("status photos.py", "photos.py: no such directory; use a run directory"),
    ("report .", ". is not a run directory: it has no config.json; use the run.dir of a run"),
    ("report . --run.dir x", "--run.dir x: report uses the run's own settings"),
    ("predict nowhere", "nowhere is not a run directory: no such directory; use the run.dir of a run"),
    ("diff . .", ". is not a run directory: it has no config.json"),
    ("status", "no run is named: `dali-train status RUN`, or --config FILE"),
    ("recipes vit", "vit: recipes takes no arguments"),
    ("report . --port 7008", "--port without --serve: leave it out"),
    (
        "plan --config digits --world-size 3 --parallel.pipeline 2",
        "the number of ranks, 3, is not a multiple of parallel.pipeline 2",
    ),
    (
        "init . --from-timm nowhere.yaml",
        "nowhere.yaml: cannot be read as timm's args.yaml: No such file or directory\n",
    ),
    (f"status {__file__}", "test_mistakes.py: a file; use a run directory"),
    (f"data index {'a/' * 2500}", "a/a/ ... File name too long: name another path"),
    ("plan --config vit-b16 --gpu-memory nan", "--gpu-memory is nan: use a number over 0"),
    ("plan --config vit-b16 --world_size -5", "--world-size is -5: use a number over 0"),
    ("init nowhere --gpu-memory inf", "--gpu-memory is inf: use a number over 0"),
    ("diff a b c", "a b c: diff compares two runs, not 3"),
    ("diff a", "a: diff compares two runs, not 1"),
    ("doctor frobnicate", "frobnicate: without --config FILE doctor takes no further arguments"),
    ("doctor --config vit-b16 frobnicate", "'frobnicate' belongs to no setting"),
    ("doctor --config vit-b16 --run.epoch 3", "use --run.epochs"),
]
"""(mistake, what is told: parts of the message in their order, separated by " ... ")."""


@pytest.mark.parametrize(("mistake", "told"), MISTAKES, ids=[f"{mistake!s:.50}" for mistake, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line_with_its_remedy(
    mistake: Mistake, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(mistake, dict):
        with pytest.raises(ConfigError) as error:
            PLAIN.replace(mistake)
        message = str(error.value)
        ((name, value), *_) = mistake.items()
        shown = str(value)[:20] in message or as_typed(value) in message
        assert shown or not told.startswith(f"{name} is ... ")
    else:
        if isinstance(mistake, tuple):
            assert mistake[0] in FILE
            Path("mine.py").write_text(FILE.replace(*mistake, 1))
            mistake = "plan --config mine.py"
        assert main(shlex.split(mistake)) == 2
        message = capsys.readouterr().err
        assert re.match(f"dali-train {mistake.split()[0]}( [a-z]+)*: ", message) and message.count("\n") == 1
    rest = message
    for part in told.split(" ... "):
        _, found, rest = rest.partition(part)
        assert found, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("trian --config digits", "argument COMMAND: there is no 'trian': did you mean train?"),
        ("data cnvert digits", "argument ACTION: there is no 'cnvert': did you mean convert?"),
        ("data convert foldr", "argument SOURCE: there is no 'foldr': did you mean folder?"),
        ("predict RUN --weights emma", "argument --weights: there is no 'emma': did you mean ema?"),
        (
            "plan --gpu-memory 80apples",
            "argument --gpu-memory: '80apples' is no number of gigabytes: use one such as 80",
        ),
    ],
)
def test_a_mistyped_choice_is_told_what_was_meant(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(line))
    assert told in capsys.readouterr().err


def test_gigabytes_may_have_a_unit() -> None:
    assert [gigabytes(text) for text in ("80", "80GB", " 79.5 gb", "24G")] == [80, 80, 79.5, 24]


def test_the_options_of_a_command_are_its_own() -> None:
    """Not what else stands in its usage, such as the metavariables of options or hidden ones."""
    options, _ = command_parser().parse_known_args(["plan"])
    assert {"--config", "--gpu-memory", "--world-size"} <= set(own_options(options))
    assert not {"--help", "--section.field", "--version"} & set(own_options(options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("", False),
        ("--batch.global_batch 256", True),
        ("--batch.global_batch 256 --optimizer.lr 0.03", False),
        ("--batch.global_batch 256 --optimizer.scale_lr sqrt", False),
    ],
)
def test_another_global_batch_with_the_same_rate_is_told(options: str, told: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config_with("digits", options.split(), "plan")
    expected = [
        "batch.global_batch 128 -> 256 keeps optimizer.lr 0.02: the rule for SGD is --optimizer.lr 0.04 (linear), for "
        "LAMB and AdamW 0.0283 (square root)"
    ]
    assert [str(one.message) for one in said] == (expected if told else [])


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_doubts_about_a_config_are_told_once_on_rank_0(
    rank: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads the config, and Python would show the warning on all of them with a path and a line of code."""
    monkeypatch.setenv("RANK", rank)
    assert main(["plan", "--config", "digits", "--batch.global_batch", "256", "--num-images", "1000"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "keeps optimizer.lr" in line]
    assert len(said) == lines and all(line.startswith("warning: batch.global_batch 128 -> 256") for line in said)
