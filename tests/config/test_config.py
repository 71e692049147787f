"""Settings from a file, the command line and Python: what is understood, and what mistakes are answered."""

import functools
import json
import operator
import re
import shlex
import warnings
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from dali_train.checkpoint.recipe import changes_between, recipe
from dali_train.cli import main
from dali_train.config import BatchConfig, Config, DataConfig, ModelConfig, load_config
from dali_train.config.check import conflicts_of
from dali_train.config.command_line import explanations, read_overrides
from dali_train.config.config import RECIPES, SETTINGS
from dali_train.data.dataset.index import Split
from dali_train.data.sampling.rng import Purpose, philox, philox_generator
from dali_train.errors import ConfigError
from dali_train.training.model import build_model
from tests.commands.test_mistakes import FILE, PLAIN
from tests.conftest import REPOSITORY

DIGITS = REPOSITORY / "configs" / "digits.py"


def config(**sections: Any) -> Config:
    return replace(PLAIN, **sections)


@pytest.mark.parametrize("name", ["data.root", "run.mirror"])
@pytest.mark.parametrize("url", ["s3://user:SECRET@bucket/x", "s3://KEY:SEC/RET@bucket/x", "az://bucket/x?sig=SECRET"])
def test_credentials_in_a_url_are_refused_and_not_shown(name: str, url: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a URL with .* a query: leave them out, .* environment") as error:
        PLAIN.replace({name: url, "data.reader": "dali"})
    assert "SEC" not in str(error.value)


def test_models_that_cannot_do_what_is_asked() -> None:
    """vgg11 is one nn.Sequential of single layers; convit refuses checkpointing; a CPU has no CUDA graphs."""
    for changed, message in (
        ({"name": "vgg11", "compile": "blocks"}, r"vgg11 has no repeated blocks: set model.compile model"),
        ({"name": "convit_tiny", "activation_checkpointing": True}, r"convit_tiny does not support it: set it to"),
        ({"compile": "cuda-graphs"}, r"model.compile is cuda-graphs, but the model runs on a CPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(PLAIN.replace(model=changed), 5, torch.device("cpu"))


def test_evaluation_images_are_resized_in_proportion() -> None:
    def resized(**fields: Any) -> int:
        return PLAIN.replace(data=fields).data.eval_resized

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (resized(), resized(eval_size=192), resized(eval_size=64)) == (256, 219, 73)
        assert resized(eval_size=224, eval_resize_to=280) == 280
    with pytest.warns(UserWarning, match=r"data.eval_size 64 of data.eval_resize_to 256: only the central 6% of each"):
        resized(eval_size=64, eval_resize_to=256)


def test_accumulation_and_steps_are_derived() -> None:
    batch = BatchConfig(global_batch=32_768, micro_batch=256)
    assert [batch.grad_accum_steps(ranks) for ranks in (1, 4, 6, 8, 128)] == [128, 32, 22, 16, 1]
    assert [batch.describe_accumulation(ranks) for ranks in (6, 8)] == ["22 or 21", "16"]
    too_many = (
        r"global_batch 32768 is 128 x batch.micro_batch 256, and 129 .* at most 128, or set batch.micro_batch 128$"
    )
    with pytest.raises(ConfigError, match=too_many):
        batch.grad_accum_steps(129)
    with pytest.raises(ConfigError, match=r"global_batch 4 is 2 x batch.micro_batch 2, and 5 .*: start at most 2$"):
        BatchConfig(global_batch=4, micro_batch=2).grad_accum_steps(5)
    assert PLAIN.steps(3, 16) == 6
    assert PLAIN.steps(3, 17) == 7, "rounded up: the last epoch is whole"
    assert PLAIN.steps(0.1 * 3, 80) == 3, "no extra step for what is rounding: 0.1 * 3 > 0.3"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--data.progressive 6,128 12,160", ((6, 128), (12, 160))),
        ("--data.progressive 6,128", ((6, 128),)),
        ("--model.freeze norm.*", ("norm.*",)),
        ("--optimizer.betas 0.9,0.98", (0.9, 0.98)),
        ("--optimizer.betas 0.9 0.98", (0.9, 0.98)),
        ("--optimizer.betas '(0.9, 0.98)'", (0.9, 0.98)),
        ("--optimizer.betas=0.9,0.98", (0.9, 0.98)),
        ("--hooks.profile 3 5", (3, 5)),
        ("--hooks.profile none", None),
        ("--hooks.trackers wandb,mlflow", ("wandb", "mlflow")),
        ("--hooks.trackers wandb mlflow", ("wandb", "mlflow")),
        ("--hooks.trackers none", ()),
        ("--run.max_steps None", None),
        ("--run.max-steps 1_000", 1000),
        ("--data.local_copy none", None),
        ("--data.shuffle none", "none"),
        ("--data.antialias 0", False),
        ("--data.antialias TRUE", True),
        ("--model.activation_checkpointing selective", "selective"),
        ("--run.dir 1", "1"),
        ("--run.epochs 3 --run.epochs 4.5", 4.5),
        ("--data.seed 18446744073709551615", 2**64 - 1),
        ("--data.normalise imagenet", "imagenet"),
        ("--data.normalise 120,110,100 60,59,58", ((120, 110, 100), (60, 59, 58))),
        ("--data.normalise '((120,110,100),(60,59,58))'", ((120, 110, 100), (60, 59, 58))),
        ("--model.freeze patch_embed.* blocks.0.*", ("patch_embed.*", "blocks.0.*")),
        ("--optimizer.groups *.bias,2,0.5 head.weight,1,0", (("*.bias", 2, 0.5), ("head.weight", 1, 0))),
        ("--model.kwargs.drop_path_rate 0.1", 0.1),
        ("--optimizer.kwargs.trust_clip true", True),
        ("--model.kwargs.act_layer silu", "silu"),
        ("--model.kwargs.x_y none", None),
        ("--model.kwargs.img_size 96 128", (96, 128)),
        ("--model.kwargs.qk_norm true", True),
        ("--model.kwargs \"{'depth': 2}\"", {"depth": 2}),
    ],
)
def test_values_as_people_type_them(words: str, value: Any) -> None:
    (read,) = read_overrides(shlex.split(words)).values()
    assert (read, type(read)) == (value, type(value))


def test_settings_change_together_by_name_or_by_section() -> None:
    changed = PLAIN.replace(
        {"batch.micro_batch": 3, "batch.global_batch": 6}, run=dict(epochs=1), schedule=dict(warmup_epochs=0)
    )
    assert (changed.batch.global_batch, changed.batch.micro_batch, changed.run.epochs) == (6, 3, 1)
    base = PLAIN.replace(model=dict(kwargs=dict(depth=2, drop_rate=0.1)))
    words = ["--model.kwargs.drop_path_rate", "0.2", "--model.kwargs.drop_rate", "none"]
    for one in (
        base.replace(read_overrides(words)),
        base.replace(model=dict(kwargs=dict(drop_path_rate=0.2, drop_rate=None))),
    ):
        assert one.model.kwargs == {"depth": 2, "drop_path_rate": 0.2}
    sgd = PLAIN.replace(optimizer=dict(name="sgd", kwargs=dict(momentum=0.5, nesterov=True)))
    words = ["--optimizer.kwargs.momentum", "0.8", "--optimizer.kwargs.nesterov", "none"]
    assert sgd.replace(read_overrides(words)).optimizer.kwargs == {"momentum": 0.8}
    whole = base.replace({"model.kwargs": {"depth": 3}, "model.kwargs.drop_rate": 0})
    assert whole.model.kwargs == {"depth": 3, "drop_rate": 0}


def test_lists_and_paths_are_understood(tmp_path: Path) -> None:
    data = DataConfig(root=tmp_path, crop_area=[0.5, 1], normalise="imagenet")  # type: ignore[arg-type]
    assert (data.root, data.crop_area) == (str(tmp_path), (0.5, 1))
    assert (data.mean, data.std) == ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


def test_every_setting_explains_itself_and_its_default_fits(capsys: pytest.CaptureFixture[str]) -> None:
    # The last 22: other evaluation sets, the threshold of F1, audits, what recipes for timm's train.py draw, clip,
    # start from and keep, the ledger, the images to leave out, and mixtures of datasets.
    assert len(SETTINGS) <= 146
    values = json.loads(PLAIN.to_json())
    for name in SETTINGS:
        value = functools.reduce(operator.getitem, name.split("."), values)
        PLAIN.replace({name: value})
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DIGITS), "--help"])
    printed = capsys.readouterr().out
    assert {name for name in SETTINGS if f"  --{name} = " not in printed} == set()
    for line in (
        "--data.shuffle = full\n      Use full, block, none or balanced.\n",
        "--data.crop_area = 0.5,1  (default: 0.08,1)\n",
        "--optimizer.kwargs.bias_correction = false\n  --optimizer.kwargs.NAME VALUE\n",
        "--model.kwargs.NAME VALUE\n",
        "mixup\nMixup and CutMix, drawn once per micro-batch",
        "--schedule.warmup_epochs = ",
    ):
        assert line in printed
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DIGITS), "--help", "ema", "run.epochs"])
    assert re.findall("  --([a-z._]+) = ", capsys.readouterr().out) == [
        "run.epochs",
        *(f"ema.{name}" for name in ("decay", "warmup", "power", "every_steps", "lookahead")),
    ]
    assert main(["plan", "--config", str(DIGITS), "--help", "run.epoch"]) == 2
    assert "run.epoch is not a setting: use run.epochs" in capsys.readouterr().err
    for cls in get_type_hints(Config).values():
        assert explanations(cls).keys() >= {member.name for member in fields(cls)}


def test_conflicts_name_settings_and_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    sections = [PLAIN, *vars(PLAIN).values(), PLAIN.parallel.tensor]
    rows = [row for section in sections if is_dataclass(section) for row in conflicts_of(section)]
    assert len(rows) > 40
    for names, remedy in rows:
        assert len(names) > 1 and set(names) <= SETTINGS.keys(), names
        assert remedy and not remedy.endswith("."), names
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DIGITS), "--help", "ema.warmup", "model.compile"])
    words = " ".join(capsys.readouterr().out.split())
    assert "If it conflicts with ema.power:" in words and "If it conflicts with run.device:" in words


def test_every_setting_is_in_a_document_or_a_recipe() -> None:
    documents = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    recipes = (*(REPOSITORY / "configs").glob("*.py"), *(REPOSITORY / "examples").glob("*/*.py"))
    text = "".join(path.read_text() for path in (*documents, *recipes))
    fields = {name: name.rpartition(".")[2] for name in SETTINGS}
    assert [name for name, field in fields.items() if name not in text and not re.search(rf"\b{field}=", text)] == []


def test_a_seed_is_an_exact_integer(tmp_path: Path) -> None:
    """Of 64 bits: neither JSON nor NumPy takes it for a float on its way."""
    seed = 2**64 - 1
    saved = tmp_path / "config.json"
    saved.write_text(PLAIN.replace(data=dict(seed=seed)).to_json())
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
    whole = PLAIN.replace(optimizer=dict(betas=(0.8, 0.9)), data=dict(normalise=((9,) * 3, (8,) * 3)))
    path.write_text(whole.to_json())
    assert load_config(path) == whole
    path.write_text(PLAIN.replace(hooks=dict(user=(TestHook,))).to_json())
    with pytest.warns(UserWarning, match=r"config.json: hooks.user \['TestHook'\] are left out"):
        assert load_config(path) == PLAIN

    values = json.loads(PLAIN.to_json())
    for text, message in (
        ("{", "cannot be read as a run's config.json: it is not valid JSON: Expecting property name"),
        ("[" * 100_000, "cannot be read as a run's config.json: "),
        ("[1]", "cannot be read as a run's config.json: it is not valid JSON: an array instead of an object"),
        (
            '{"data": {"root": "a"}, "data": {}}',
            "cannot be read as a run's config.json: it is not valid JSON: 'data' ap",
        ),
        ('{"data": 3}', "expected an object of sections"),
        (json.dumps({**values, "date": {}}), "date is not a setting: use data"),
        (json.dumps({**values, "run": {"dir": "run", "epochs": "90"}}), "run.epochs is '90': use a number"),
        (json.dumps({**values, "run": {"dir": "run", "epochs": float("nan")}}), "run.epochs is nan: use a number"),
    ):
        path.write_text(text)
        assert main(["plan", "--config", str(path)]) == 2
        assert f"config.json: {message}" in capsys.readouterr().err.replace("config.json cannot", "config.json: cannot")


def test_loading_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none.py: this file does not exist; use a file, or a recipe"):
        load_config(tmp_path / "none.py")
    path = tmp_path / "with-hyphen.py"
    path.write_text("config = 3")
    with pytest.raises(ConfigError, match=r"the file must define `config = Config\(...\)`, found 3"):
        load_config(path)
    text = tmp_path / "config.txt"
    text.write_text("")
    with pytest.raises(ConfigError, match=r"not a Python file; its name must end in .py, or in .json for a run's"):
        load_config(text)
    with pytest.raises(ConfigError, match=r"this is a directory; use a file, for a run directory .*config.json"):
        load_config(tmp_path)


def test_a_directory_does_not_hide_the_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_config("digits").model.name == load_config(RECIPES / "digits.py").model.name
    with pytest.raises(ConfigError, match=r"--config digits: this is a directory"):
        load_config("./digits")


def test_a_config_file_finds_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.py").write_text(FILE)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dali_train.config import load_config\nconfig = load_config('base.py').replace(run=dict(epochs=7))\n"
    )
    monkeypatch.chdir("/")
    assert (load_config(mine).run.epochs, load_config(mine).batch.global_batch) == (7, 8)


def test_a_config_file_may_add_a_model_a_loss_and_a_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """timm looks up the module that a function comes from."""
    path = tmp_path / "own-model.py"
    path.write_text(
        "import timm\n"
        "from timm.models import register_model\n"
        "from dali_train.training.loss import LOSSES\n"
        "from dali_train.training.schedule import SCHEDULES\n"
        "@register_model\n"
        "def config_files_own_vit(pretrained=False, **kwargs):\n"
        "    return timm.create_model('vit_tiny_patch16_224', depth=1, **kwargs)\n"
        "LOSSES['config-files-own'] = LOSSES['cross-entropy']\n"
        "SCHEDULES['config-files-own'] = lambda settings, peak, span: 0.5 * peak\n"
        + FILE.replace("vit_tiny_patch16_224", "config_files_own_vit").replace(
            "=1)", "=1, name='config-files-own'), loss=LossConfig(name='config-files-own')"
        )
    )
    assert len(build_model(load_config(path), 5, torch.device("meta")).blocks) == 1  # type: ignore[arg-type]
    assert main(["plan", "--config", str(path), "--num-images", "800"]) == 0
    assert "0.0005" in capsys.readouterr().out


def test_what_belongs_to_the_recipe(dataset: Path) -> None:
    """Every setting that is not marked NotInRecipe; one that a checkpoint lacks has its default."""
    split = Split(dataset, "train")
    model = ModelConfig(name="vit", kwargs={"img_size": (32, 32)})
    current = json.loads(json.dumps(recipe(replace(PLAIN, model=model), split.manifest)))
    assert current == recipe(replace(PLAIN, model=model), split.manifest)
    assert {"data.seed", "data.mean", "optimizer.lr", "batch.micro_batch", "run.epochs", "mixup.alpha"} <= set(current)
    assert not {"data.root", "run.dir", "run.device", "run.published_top1", "hooks.trackers"} & set(current)

    older = {name: value for name, value in current.items() if name not in ("data.antialias", "optimizer.betas")}
    assert changes_between({**older, "run.published_top1": 0.7}, current) == []
    changed = recipe(PLAIN.replace(optimizer=dict(betas=(0.9, 0.98))), split.manifest)
    assert changes_between({**older, "model.name": "other"}, {**changed, "dataset": "another"}) == [
        f"dataset {current['dataset']} -> another",
        "model.kwargs {'img_size': [32, 32]} -> {}",
        "model.name other -> vit_tiny_patch16_224",
        "optimizer.betas [0.9, 0.999] -> [0.9, 0.98]",
    ]
    assert changes_between({"optimizer.nesterov": False}, {"optimizer.nesterov": None}) == [
        "optimizer.nesterov false -> none"
    ]
    block = recipe(PLAIN.replace({"data.shuffle": "block"}), split.manifest)
    assert block.keys() - current.keys() == {"data.block_images", "data.window_blocks"}, "elsewhere they decide nothing"
    imagenet = recipe(PLAIN.replace({"data.normalise": "imagenet"}), split.manifest)
    numbers = recipe(
        PLAIN.replace({"data.normalise": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))}), split.manifest
    )
    assert changes_between(imagenet, numbers) == []


def test_a_mirror_goes_with_any_ranking_of_checkpoints(config: Config) -> None:
    changed = config.replace({"run.best_by": "loss", "run.mirror": "s3://bucket/run"})
    assert (changed.run.best_by, changed.run.mirror) == ("loss", "s3://bucket/run")
