"""Any of timm's optimizers: made from the config, resumed exactly, an overflow undone."""

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import model_parameters
from timm.optim import list_optimizers
from timm.utils import dispatch_clip_grad
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from dali_train.checkpoint.format import load_checkpoint
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.state import capture, restore
from dali_train.config import OptimizerConfig, PrecisionConfig
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import Shardwise
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.process_group import process_group
from dali_train.training.optim import check_groups, check_shardwise, make_clip, make_optimizer, register_optimizer
from dali_train.training.precision import Precision
from tests.helpers import in_ranks

# Counts of steps as tensors and numbers, in the group and not at all; moments in bfloat16, without a dimension, not
# there.
TIMM = ["lamb", "adamw", "sgd", "lars", "muon", "adan", "adafactorbv", "novograd", "nadam", "laprop", "madgrad", "lion"]


class Training:
    """Parameters of every shape, trained or not."""

    def __init__(self, config: OptimizerConfig, dtype: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
        self.model.to(memory_format=torch.channels_last)
        self.model.unused = nn.Parameter(torch.ones(3))
        self.model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.model.empty = nn.Parameter(torch.zeros(0, 2))
        self.model.scalar = nn.Parameter(torch.tensor(2.0))
        self.optimizer: Optimizer = make_optimizer(self.model, config)
        self.clip = make_clip(self.optimizer, config, None)
        self.precision = Precision(PrecisionConfig(dtype=dtype, initial_scale=16.0), torch.device("cpu"))

    def step(self, seed: int, *, scale: float = 1.0) -> None:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.precision.scaler.scale((self.model(images) * self.model.scalar).square().mean() * scale).backward()
        self.precision.step(self.optimizer, self.clip)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self) -> list[torch.Tensor]:
        """Parameters and what the optimizer keeps of them on the device; counts of steps on the host go on."""
        kept = [value for values in self.optimizer.state.values() for key, value in values.items() if key != "step"]
        return [*self.parameters(), *(value.clone() for value in kept if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [(name, {}) for name in TIMM] + [("sgd", {"momentum": 0.0, "nesterov": False}), ("adamw", {"fused": True})],
)
def test_every_optimizer_resumes_exactly(tmp_path: Path, name: str, kwargs: dict[str, Any], dtype: str) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, name=name, kwargs=kwargs)
    training = Training(config, dtype)
    overflow = float("inf")
    if dtype == "fp16":  # before the optimizer has any state
        before = training.parameters()
        training.step(0, scale=overflow)
        assert all(map(torch.equal, before, training.parameters()))
    training.step(1)
    training.step(2)
    if dtype == "fp16":
        before, scale = training.state(), training.precision.loss_scale().clone()
        training.step(0, scale=overflow)
        after = training.state()
        assert len(before) == len(after) and all(map(torch.equal, before, after))
        assert training.precision.loss_scale() == scale / 2
    writer = CheckpointWriter(tmp_path, None, keep=1)
    writer.prepare(0)
    writer.save(2, *capture(training.model, training.optimizer, training.precision))
    writer.wait()
    resumed = Training(config, dtype)
    warnings = restore(load_checkpoint(tmp_path / "step-00000002"), resumed.model, resumed.optimizer, resumed.precision)
    assert not warnings
    for seed in (3, 4):
        training.step(seed)
        resumed.step(seed)
    assert all(map(torch.equal, training.parameters(), resumed.parameters()))


@pytest.mark.parametrize(("mode", "bound"), [("norm", 0.5), ("value", 0.01), ("agc", 0.01)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gradients_are_clipped_as_by_timm(mode: str, bound: float, dtype: str) -> None:
    """With plain SGD, whose step is the clipped gradient; the classifier, which agc leaves alone, is timm's last."""
    ours = timm.create_model("test_resnet", num_classes=5)
    theirs = copy.deepcopy(ours)
    config = OptimizerConfig(
        lr=1.0, name="sgd", kwargs={"momentum": 0, "nesterov": False}, clip_mode=mode, clip_grad_norm=bound
    )
    optimizer = make_optimizer(ours, config)
    precision = Precision(PrecisionConfig(dtype=dtype, initial_scale=16.0), torch.device("cpu"))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for model, scale in ((ours, precision.loss_scale()), (theirs, 1.0)):
        (model(images).square().sum() * 10 * scale).backward()
    clipped = model_parameters(theirs, exclude_head=mode == "agc")
    dispatch_clip_grad(list(clipped), bound, mode)
    expected = [p.detach() - p.grad for p in theirs.parameters()]
    precision.step(optimizer, make_clip(optimizer, config, ours.pretrained_cfg))
    for parameter, target in zip(ours.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, target, rtol=1e-5, atol=1e-5)
    assert (theirs.fc.weight.grad.abs().max() > 1) == (mode == "agc")


PLACEMENTS = {(4, 6): Shard(0), (3, 4): Shard(1), (3,): Shard(0), (5,): Replicate()}  # by shape; 3 do not divide


def computing_on_shards() -> list[str]:
    """Return all optimizers of timm but those that are refused on shards, each by one message."""
    model, names = nn.Linear(32, 32), []
    for name in list_optimizers():
        with suppress(ConfigError):
            check_shardwise(model, OptimizerConfig(lr=1e-2, weight_decay=0.1, name=name), Layout(rank=0, shard=2))
            names.append(name)
    return names


def step_on_shards(rank: int) -> None:
    """Compare steps on the shards of two ranks with steps on entire weights."""
    with process_group(discover(LaunchOptions()), torch.device("cpu")):
        mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
        for name in computing_on_shards():
            config = OptimizerConfig(lr=1e-2, weight_decay=0.1, name=name)
            whole, sharded = nn.ParameterList(), nn.ParameterList()
            for shape, placement in PLACEMENTS.items():
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
                whole.append(value.clone())
                sharded.append(distribute_tensor(value, mesh, [placement], src_data_rank=None))
            theirs, ours = make_optimizer(whole, config), make_optimizer(sharded, config)
            for _ in range(3):
                for entire, shard in zip(whole, sharded, strict=True):
                    entire.grad = torch.randn(entire.shape, generator=generator, dtype=torch.float64)
                    grad = entire.grad.clone()  # some optimizers change it in place
                    shard.grad = distribute_tensor(grad, mesh, shard.placements, src_data_rank=None)
                theirs.step()
                with Shardwise():
                    ours.step()
            for entire, shard in zip(whole, sharded, strict=True):
                torch.testing.assert_close(shard.full_tensor(), entire.detach(), rtol=1e-14, atol=1e-15, msg=name)


@pytest.mark.thorough
def test_shards_step_as_entire_weights_do() -> None:
    assert {"lamb", "clamb", "lars", "adamw", "adan", "novograd", "madgrad", "lion", "sgd"} <= {*computing_on_shards()}
    in_ranks(2, step_on_shards)


REFUSED_ON_SHARDS = ["adafactor", "adamp", "muon"]


@pytest.mark.parametrize("name", REFUSED_ON_SHARDS)
def test_an_optimizer_of_entire_weights_is_refused_on_shards(name: str) -> None:
    model, config = nn.Linear(32, 32), OptimizerConfig(lr=1e-2, name=name)
    check_shardwise(model, config, Layout(rank=0, pipeline=2, replicas=2))
    for layout in (Layout(rank=0, shard=2), Layout(rank=0, tensor=2)):
        with pytest.raises(ConfigError, match=f"optimizer.name is {name}.*2 ranks.*lamb.*parallel.pipeline"):
            check_shardwise(model, config, layout)


def test_muon_keeps_rounding_small() -> None:
    """In bfloat16, as timm computes it, gradients that differ in rounding have updates that differ by 4e-3."""
    torch.manual_seed(0)
    start, gradient = torch.randn(96, 384), torch.randn(96, 384)
    weights = []
    for rounding in (0.0, 1e-7):
        weight = nn.Parameter(start.clone())
        weight.grad = gradient * (1 + rounding * torch.randn_like(gradient))
        make_optimizer(nn.ParameterList([weight]), OptimizerConfig(lr=1.0, name="muon")).step()
        weights.append(weight.detach())
    assert 0 < (weights[0] - weights[1]).norm() < 2e-5 * (weights[0] - start).norm()  # measured: 1e-6


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_muon_leaves_the_classifier_to_adamw(layer_decay: float | None) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2, num_classes=40)
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-2, name="nmuon", layer_decay=layer_decay))
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    by_muon = {name for name, parameter in model.named_parameters() if optimizer.state[parameter]["use_muon"]}
    matrices = {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    assert by_muon == {"patch_embed.proj.weight", *(f"blocks.0.{name}.weight" for name in matrices)}


def test_a_first_step_that_overflows_leaves_no_trace() -> None:
    """Momentum starts as the first gradient, not as zero."""
    config = OptimizerConfig(lr=1e-2, name="sgd", kwargs={"nesterov": False, "dampening": 0.5})
    one, other = Training(config, "fp16"), Training(config, "fp16")
    one.step(0, scale=float("inf"))
    one.model.load_state_dict(other.model.state_dict())  # BatchNorm's statistics have seen the images
    for training in (one, other):
        training.step(1)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamv"}, r"optimizer.name is adamv, which timm does not have: did you mean adam, "),
        ({"name": "adahessian"}, "needs second derivatives"),
        ({"name": "kron"}, "keeps rng_state"),
        ({"name": "lamb", "kwargs": {"momentum": 0.9}}, "optimizer.kwargs has momentum, which lamb does not take"),
        ({"name": "sgd", "kwargs": {"nestrov": True}}, "has nestrov, which sgd does not take: use nesterov"),
        ({"name": "adamw", "kwargs": {"lr": 1.0}}, "optimizer.kwargs has lr: set optimizer.lr instead"),
        (
            {"name": "adamw", "kwargs": {"betas": (0.9, 0.99)}},
            "optimizer.kwargs has betas: set optimizer.betas instead",
        ),
        ({"name": "sgd", "kwargs": {"momentum": "much"}}, "sgd cannot be created with optimizer.kwargs"),
        ({"name": "adamw", "kwargs": {"bias_correction": False}}, "bias_correction, which adamw does not take"),
        ({"name": "sgd", "betas": (0.8, 0.9)}, r"optimizer.betas is \(0.8, 0.9\), which sgd does not take"),
        ({"name": "lion", "eps": 1e-3}, r"optimizer.eps is 0.001, which lion does not take"),
        ({"name": "adan", "betas": (0.8, 0.9)}, r"optimizer.betas is .*, which adan takes 3: set .*optimizer.kwargs"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(nn.Linear(3, 2), OptimizerConfig(lr=0.1, **fields))


class Heavy(Optimizer):
    """Takes no weight decay, and has a momentum that is not timm's."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.5, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "scale": scale})


def test_a_registered_optimizer_gets_only_what_its_constructor_takes() -> None:
    register_optimizer("heavy", Heavy, defaults={"scale": 3.0})
    model = nn.Linear(2, 2)
    (group,) = make_optimizer(model, OptimizerConfig(name="heavy", lr=0.3)).param_groups
    assert (group["lr"], group["momentum"], group["scale"]) == (0.3, 0.5, 3.0)
    (group,) = make_optimizer(model, OptimizerConfig(name="heavy", lr=0.3, kwargs={"momentum": 0.2})).param_groups
    assert group["momentum"] == 0.2
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay is 0\.1, which heavy does not take"):
        make_optimizer(model, OptimizerConfig(name="heavy", lr=0.3, weight_decay=0.1))


def test_vectors_are_excluded_with_every_optimizer() -> None:
    for name in ("lamb", "adamw", "sgd"):
        optimizer = make_optimizer(nn.Linear(3, 2), OptimizerConfig(lr=0.1, weight_decay=0.1, name=name))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert name != "lamb" or not optimizer.param_groups[1]["always_adapt"]


def test_groups_have_their_own_rate_and_decay() -> None:
    """The first row that matches counts, also for vectors, which otherwise have no decay."""
    config = OptimizerConfig(
        lr=0.1, name="sgd", weight_decay=0.4, groups=(("0.bias", 8, 0.5), ("?.bias", 2, 0), ("3.weight", 0, 1))
    )
    optimizer = Training(config, "fp32").optimizer
    found = {
        name: (group["lr_scale"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {
        **dict.fromkeys(("0.weight", "empty"), (1, 0.4)),
        **dict.fromkeys(("1.weight", "unused", "scalar"), (1, 0)),
        "0.bias": (8, 0.2),
        **dict.fromkeys(("1.bias", "3.bias"), (2, 0)),
        "3.weight": (0, 0.4),
    }
    with pytest.raises(ConfigError, match=r"optimizer.groups: \*.gamma matches no weight of the model; names are like"):
        check_groups(found, OptimizerConfig(lr=0.1, groups=(("*.gamma", 1, 1),)))
