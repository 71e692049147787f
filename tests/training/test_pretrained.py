"""Trained weights to begin with, frozen weights, and the project's own small model."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from dali_train.checkpoint.state import first_weights
from dali_train.cli import main
from dali_train.config import Config, ConfigError, load_config
from dali_train.training.invariant import RunningStatistics
from dali_train.training.model import build_model
from dali_train.training.pretrained import match_classes
from tests.config.test_config import PLAIN
from tests.conftest import Train, final_weights
from tests.helpers import CONVOLUTIONAL, extended

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
CPU = torch.device("cpu")


def config(**model: Any) -> Config:
    return PLAIN.replace(model={"kwargs": VIT, **model})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A file of trained weights for 5 classes at 32 pixels, and what is in it."""
    torch.manual_seed(3)
    state = timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT).state_dict()
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(state, path)
    return str(path), state


def test_weights_come_from_a_file(weights: tuple[str, dict[str, torch.Tensor]]) -> None:
    path, expected = weights
    model = build_model(config(weights=path), 5, CPU, with_weights=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    without = build_model(config(weights=path), 5, CPU)  # whoever has a checkpoint needs no file
    assert not torch.equal(without.state_dict()["head.weight"], expected["head.weight"])


def test_other_classes_get_a_new_classifier(weights: tuple[str, dict[str, torch.Tensor]]) -> None:
    path, expected = weights
    first, second = (build_model(config(weights=path), 3, CPU, with_weights=True).state_dict() for _ in range(2))
    assert torch.equal(first["head.weight"], torch.zeros(3, 32)) and not first["head.bias"].any()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert torch.equal(first["blocks.0.attn.qkv.weight"], expected["blocks.0.attn.qkv.weight"])
    random = config(weights=path, head_scale=1.0)
    first, second = (build_model(random, 3, CPU, with_weights=True).state_dict() for _ in range(2))
    assert first["head.weight"].any() and torch.equal(first["head.weight"], second["head.weight"])
    assert build_model(config(), 3, CPU).state_dict()["head.weight"].any()  # without weights


def test_classes_are_matched_by_name(weights: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """A file beside timm's config.json knows its classes; the same ones in another order are reordered, or refused."""
    _, expected = weights
    file = tmp_path / "model.safetensors"
    save_file(expected, file)
    theirs, ours = ["1", "2", "10", "cat", "Owl"], ["1", "10", "2", "Owl", "cat"]
    model = config(weights=str(file)).model
    assert first_weights(model, ours) is None  # it does not know its classes
    (tmp_path / "config.json").write_text(json.dumps({"label_names": theirs}))
    for names in (theirs, ours):
        tensors = first_weights(model, names, evaluates=True)
        assert tensors is not None
        rows = [theirs.index(name) for name in names]
        assert torch.equal(tensors["head.weight"], expected["head.weight"][rows])
        assert torch.equal(tensors["head.bias"], expected["head.bias"][rows])
        assert torch.equal(tensors["pos_embed"], expected["pos_embed"])
    # Of other classes a head may be fine-tuned, and not be evaluated. Without common names nothing is known.
    others = [*ours[:4], "dog"]
    assert torch.equal(first_weights(model, others)["head.weight"], expected["head.weight"])
    with pytest.raises(ConfigError, match="its 5 classes are not those of the dataset, 'dog' is not among them"):
        first_weights(model, others, evaluates=True)
    assert first_weights(model, ["a", "b", "c", "d", "e"], evaluates=True) is not None
    with pytest.raises(ConfigError, match="have another order than the dataset's: use "):
        first_weights(config(weights=f"local-dir:{tmp_path}").model, ours)
    with pytest.raises(ConfigError, match="its classes have another order than the dataset's, and the classifier of"):
        match_classes(expected, "a_model_of_ones_own", theirs, ours, "model.weights")


def test_position_embeddings_are_fitted_to_another_resolution(weights: tuple[str, dict[str, torch.Tensor]]) -> None:
    path, expected = weights
    larger = build_model(config(weights=path, kwargs=VIT | {"img_size": 64}), 5, CPU, with_weights=True).state_dict()
    assert expected["pos_embed"].shape == (1, 17, 32) and larger["pos_embed"].shape == (1, 65, 32)
    torch.testing.assert_close(
        larger["pos_embed"][:, 1:].mean(), expected["pos_embed"][:, 1:].mean(), atol=1e-3, rtol=0
    )


def test_weights_that_do_not_fit_are_refused(weights: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, _ = weights
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    for settings, message in (
        ({"weights": "/nowhere.safetensors"}, "model.weights: there is no file /nowhere.safetensors"),
        ({"weights": str(tmp_path / "broken.safetensors")}, "broken.safetensors cannot be read as weights"),
        (
            {"weights": path, "kwargs": VIT | {"embed_dim": 64}},
            r"does not fit vit_tiny_patch16_224 with .*: cls_token \[1, 1, 32\] there, \[1, 1, 64\] here; .*\d more",
        ),
        (
            {"weights": "resnet50.a1_in1k"},
            "resnet50.a1_in1k are weights of another architecture than vit_tiny_patch16_224",
        ),
        ({"weights": "timm/resnet18.a1_in1k"}, "model.weights: there is no file timm/.*: use resnet18.a1_in1k, timm's"),
        ({"weights": "someone/vit"}, "model.weights: there is no file someone/vit. .* write hf-hub:someone/vit"),
        ({"weights": "vit_tinny"}, "model.weights is 'vit_tinny', which timm does not know"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(config(**settings), 5, CPU, with_weights=True)


def test_another_architecture_is_refused_with_three_names(weights: tuple[str, dict[str, torch.Tensor]]) -> None:
    """Whatever the number of classes: timm alone would load nothing for others, and say nothing."""
    for num_classes in (5, 3):
        settings = config(name="test_resnet", kwargs={}, weights=weights[0])
        message = r"has other names than timm's test_resnet \((\S+, ){3}\.\.\.\), and .*: set model.name"
        with pytest.raises(ConfigError, match=message):
            build_model(settings, num_classes, CPU, with_weights=True)


def test_weights_come_from_what_torch_saves(weights: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """A state dict, and a checkpoint of timm's trainer, whose average counts."""
    _, expected = weights
    others = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for name, content in (
        ("state.pth", expected),
        ("pytorch_model.bin", {"state_dict": others, "state_dict_ema": expected, "args": Namespace(lr=1), "epoch": 3}),
        ("wrapped.pt", {"model": {f"module.{name}": tensor for name, tensor in expected.items()}}),
    ):
        torch.save(content, tmp_path / name)
        model = build_model(config(weights=str(tmp_path / name)), 5, CPU, with_weights=True)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items()), name


def prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def test_weights_come_from_other_trainers(weights: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Below keys and prefixes of their own; a projection head is no classifier, which then comes from the seed."""
    _, expected = weights
    others = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    body = {name: tensor for name, tensor in expected.items() if not name.startswith("head.")}
    projection = {"head.0.weight": torch.ones(7, 32), "head.2.weight": torch.ones(7, 7)}
    average = {"n_averaged": torch.tensor(5), **prefixed("module.", expected)}
    moco = {**prefixed("module.base_encoder.", body | projection), **prefixed("module.momentum_encoder.", others)}
    dino = {**prefixed("backbone.", body), **prefixed("head.mlp.", projection)}
    whole = {"torchvision", "lightning", "kuangliu"}
    for trainer, content in {
        "torchvision": {"model": others, "model_ema": average, "epoch": 3},
        "lightning": {"state_dict": {"criterion.weight": torch.ones(5), **prefixed("model.", expected)}, "epoch": 3},
        "kuangliu": {"net": prefixed("module.", expected), "acc": 0.5, "epoch": 3},
        "moco": {"state_dict": moco, "optimizer": {"state": {0: {"step": torch.ones(())}}}, "arch": "vit"},
        "dino": {"teacher": dino, "epoch": 3, "dino_loss": {"center": torch.ones(1, 7)}},
        "body": body,
    }.items():
        torch.save(content, tmp_path / "weights.pth")
        settings = config(weights=str(tmp_path / "weights.pth"))
        model = build_model(settings, 5, CPU, with_weights=True).state_dict()
        assert all(torch.equal(model[name], tensor) for name, tensor in body.items()), trainer
        assert torch.equal(model["head.weight"], expected["head.weight"]) == (trainer in whole), trainer
        if trainer not in whole:
            with pytest.raises(ConfigError, match=r"model.weights: \S+weights.pth has no classifier"):
                build_model(settings, 5, CPU, with_weights=True, keep_classifier=True)
    torch.save({"student": prefixed("backbone.", body), "teacher": prefixed("backbone.", body)}, tmp_path / "two.pth")
    with pytest.raises(
        ConfigError, match=r"several times \(student backbone\.\*, teacher backbone\.\*\): save the one"
    ):
        build_model(config(weights=str(tmp_path / "two.pth")), 5, CPU, with_weights=True)
    torch.save(prefixed("net.", expected | {"blocks.2.norm1.weight": torch.ones(32)}), tmp_path / "deeper.pth")
    with pytest.raises(ConfigError, match=r"does not fit .*: blocks\.2\.norm1\.weight absent here\. Set model\.name"):
        build_model(config(weights=str(tmp_path / "deeper.pth")), 5, CPU, with_weights=True)


CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}


def as_facebook_names_it(name: str) -> str:
    """Of ConvNeXt: https://github.com/facebookresearch/ConvNeXt/blob/main/models/convnext.py."""
    name = re.sub(
        r"stages\.(\d)\.(?:downsample\.|blocks\.(\d))",
        lambda match: f"downsample_layers.{match[1]}." if match[2] is None else f"stages.{match[1]}.{match[2]}",
        name,
    )
    for ours, theirs in (("stem.", "downsample_layers.0."), ("conv_dw", "dwconv"), ("mlp.fc", "pwconv")):
        name = name.replace(ours, theirs)
    return name.replace("head.norm", "norm").replace("head.fc", "head")


def as_clip_names_it(name: str) -> str:
    """Of its vision transformer: https://github.com/openai/CLIP/blob/main/clip/model.py."""
    for ours, theirs in (
        ("cls_token", "class_embedding"),
        ("pos_embed", "positional_embedding"),
        ("patch_embed.proj", "conv1"),
        ("norm_pre", "ln_pre"),
        ("blocks.", "transformer.resblocks."),
        (".norm", ".ln_"),
        ("norm.", "ln_post."),
        ("attn.qkv.", "attn.in_proj_"),
        ("attn.proj", "attn.out_proj"),
        ("mlp.fc1", "mlp.c_fc"),
        ("mlp.fc2", "mlp.c_proj"),
    ):
        name = name.replace(ours, theirs)
    return f"visual.{name}"


def test_timm_translates_other_names(tmp_path: Path) -> None:
    """Whatever classes the file has, which are known only then; what timm cannot translate is refused."""
    torch.manual_seed(7)
    file = str(tmp_path / "weights.pth")
    convnext = timm.create_model("convnext_tiny", num_classes=7, **CONVNEXT).state_dict()
    torch.save({"model": {as_facebook_names_it(name): tensor for name, tensor in convnext.items()}}, file)
    settings = config(name="convnext_tiny", kwargs=CONVNEXT, weights=file)
    for num_classes in (7, 3):
        model = build_model(settings, num_classes, CPU, with_weights=True).state_dict()
        equal = {name for name, tensor in convnext.items() if torch.equal(model[name], tensor)}
        assert convnext.keys() - equal == (set() if num_classes == 7 else {"head.fc.weight", "head.fc.bias"})

    clip = timm.create_model("vit_base_patch32_clip_224", num_classes=0, **VIT).state_dict()
    visual = {as_clip_names_it(name): tensor for name, tensor in clip.items()}
    visual["visual.class_embedding"] = visual["visual.class_embedding"][0, 0]
    visual["visual.positional_embedding"] = visual["visual.positional_embedding"][0]
    text = {
        "visual.proj": torch.ones(32, 11),
        "token_embedding.weight": torch.ones(9, 9),
        "logit_scale": torch.ones(()),
    }
    torch.save(visual | text, file)
    settings = config(name="vit_base_patch32_clip_224", weights=file)
    model = build_model(settings, 3, CPU, with_weights=True).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in clip.items()) and not model["head.weight"].any()

    body = timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT).state_dict()
    decoder = {"mask_token": torch.ones(1, 1, 32), "decoder_blocks.0.norm1.weight": torch.ones(32)}
    torch.save({"model": body | decoder}, file)  # MAE's, of its pretraining
    model = build_model(config(weights=file), 3, CPU, with_weights=True).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in body.items())

    for name in ("swin_tiny_patch4_window7_224", "convnext_tiny", "efficientnet_b0"):  # torchvision's have such names
        torch.save(
            {"features.0.0.weight": torch.ones(8, 3, 4, 4), "features.1.0.block.3.weight": torch.ones(8, 8)}, file
        )
        with pytest.raises(ConfigError, match=rf"has other names than timm's {name} \(features\.0\.0\.weight, "):
            build_model(config(name=name, kwargs={}, weights=file), 3, CPU, with_weights=True)


def test_a_file_may_have_the_name_of_a_model(
    weights: tuple[str, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = weights
    monkeypatch.chdir(tmp_path)
    save_file(expected, "vit_tiny_patch16_224.safetensors")
    model = build_model(config(weights="vit_tiny_patch16_224.safetensors"), 5, CPU, with_weights=True)
    assert torch.equal(model.state_dict()["head.weight"], expected["head.weight"])


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("started"),)


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated", "ignore:Validating sparse"
)
def test_files_of_other_things_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    contents = {
        "code.pth": (Code(), r"it holds a (pathlib|builtins)\.\w+, and only tensors are read"),
        "numbers.pth": ({"epoch": 3}, "it has epoch, and not tensors by name"),
        "list.pth": ([1], ""),
        "quantized.pth": ({"head.weight": quantized}, "head.weight is of qint8"),
        "sparse.pth": ({"head.weight": torch.eye(3).to_sparse()}, "head.weight is of sparse_coo"),
        "expanded.pth": ({"head.weight": torch.ones(1).expand(10**12)}, r"shape \[1000000000000\], and fewer numbers"),
    }
    for name, (content, _) in contents.items():
        torch.save(content, name)
    Path("torn.pth").write_bytes(b"PK\x03\x04")
    Path("text.pth").write_bytes(b"no weights")
    Path("directory").mkdir()
    reasons = {name: reason for name, (_, reason) in contents.items()}
    for name, reason in (reasons | {"torn.pth": "", "text.pth": "it is no file of tensors", "directory": ""}).items():
        message = rf"model.weights: {name} (cannot be read as weights|is a directory).*{reason}"
        with pytest.raises(ConfigError, match=message) as refused:
            build_model(config(weights=name), 5, CPU, with_weights=True)
        assert "weights_only" not in str(refused.value), "torch's advice"
    assert not Path("started").exists()


def test_frozen_weights_stay(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """A linear probe, of a network whose BatchNorms would move."""
    probe = extended(tiny_config, CONVOLUTIONAL)
    train("probe", "--model.freeze", "all-but-head", "--run.max_steps", "2", ranks=2, config=probe)
    first = build_model(load_config(probe), 5, CPU).state_dict()
    last = final_weights(tmp_path / "probe")
    assert {name for name in first if not torch.equal(first[name], last[name])} == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("freeze", "still"),
    [(("bn1.*", "layer1.*"), ("bn1.", "layer1.")), (("batch-norm",), ("",))],
    ids=["by name", "all"],
)
def test_a_frozen_batch_norm_is_kept_still(freeze: tuple[str, ...], still: tuple[str, ...]) -> None:
    model = build_model(config(name="test_resnet", kwargs={}, freeze=freeze), 5, CPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    RunningStatistics(model)  # which takes the others' momentum
    model.train()
    model(torch.randn(2, 3, 32, 32))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    statistics = {name for name in before if "running" in name or "tracked" in name}
    assert moved == {name for name in statistics if not name.startswith(still)}
    assert model.get_submodule("bn1").momentum == 0.1
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "layer2.0.conv1.weight" in trained and "bn1.weight" not in trained


def test_patterns_freeze_what_they_match(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(config(freeze=("patch_embed.*", "blocks.0.*")), 5, CPU)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith(("patch_embed.", "blocks.0."))}
    assert main(["plan", "--config", str(tiny_config), "--model.freeze", "all-but-head"]) == 0
    assert "parameters, of which 165 are trained, precision fp32" in capsys.readouterr().out


def test_patterns_that_match_nothing_or_everything_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model.freeze: block.0.* matches no weight of the model; names are like blocks.0"
    ):
        build_model(config(freeze=("block.0.*",)), 5, CPU)
    with pytest.raises(ConfigError, match=r"leaves nothing to train"):
        build_model(config(freeze=("*",)), 5, CPU)
    with pytest.raises(ConfigError, match=r"model.freeze batch-norm: the model has no BatchNorm, leave it out"):
        build_model(config(freeze=("batch-norm",)), 5, CPU)


def test_lenet_is_a_timm_model() -> None:
    model = build_model(config(name="dali_lenet", kwargs={}), 10, CPU)
    shapes = [tuple(parameter.shape) for name, parameter in model.named_parameters() if name.endswith("weight")]
    assert shapes == [(20, 3, 5, 5), (50, 20, 5, 5), (500, 800), (10, 500)]
    assert model(torch.randn(2, 3, 28, 28)).shape == (2, 10)
    grey = build_model(config(name="dali_lenet", kwargs={"in_chans": 1, "img_size": 32}), 10, CPU)
    assert grey(torch.randn(2, 1, 32, 32)).shape == (2, 10)
