"""`model.init portable`: the same initial weights with every instruction set, and with the distributions of torch's."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from torch import nn

from dali_train.config import ModelConfig
from dali_train.data.sampling.rng import logarithm, normal_quantile, normal_weights, uniform_weights
from dali_train.errors import ConfigError
from dali_train.extras.models import ViT5
from dali_train.training.model import initialising
from tests.conftest import REPOSITORY
from tests.helpers import without_vector_instructions

# Small models with the initialisers of all recipes: (truncated) normal, uniform, Xavier's, Kaiming's, and sine tables.
_VIT = {"img_size": 32, "embed_dim": 64, "depth": 1, "num_heads": 2}
MODELS = {
    "vit_tiny_patch16_224": {**_VIT, "weight_init": "moco"},
    "deit3_small_patch16_224": {**_VIT, "weight_init": "jax", "init_values": 1e-4},
    "vit_small_patch16_rope_mixed_224": _VIT,
    "dali_vit_small_patch16": _VIT,
    "dali_vit5_small_patch16": _VIT,
    "dali_lenet": {},
    "test_resnet": {},
    "test_convnext": {},
}


def made(name: str, init: str, seed: int = 0) -> nn.Module:
    with initialising(ModelConfig(name=name, init=init), seed):  # type: ignore[arg-type]
        return timm.create_model(name, num_classes=5, **MODELS[name])


def digests(num_threads: int) -> dict[str, str]:
    """Return the SHA-256 of the weights of all models, made with `num_threads`."""
    torch.set_num_threads(num_threads)
    return {
        name: hashlib.sha256(
            b"".join(t.numpy().tobytes() for t in made(name, "portable").state_dict().values())
        ).hexdigest()
        for name in MODELS
    }


@pytest.mark.thorough
def test_weights_do_not_depend_on_instructions_and_threads() -> None:
    assert issubclass(ViT5, nn.Module), "registered"
    code = "import json, sys, tests.training.test_initial_weights as t; print(json.dumps(t.digests(int(sys.argv[1]))))"
    started = [
        subprocess.Popen([sys.executable, "-c", code, threads], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE)
        for environment, threads in (
            (without_vector_instructions(), "1"),
            ({**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}, "2"),
        )
    ]
    here = digests(torch.get_num_threads())  # with the best instructions of this processor, such as AVX-512
    for process in started:
        output, _ = process.communicate()
        assert json.loads(output) == here
    assert len(set(here.values())) == len(MODELS)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "dali_vit5_small_patch16", "test_convnext"])
def test_the_distributions_are_torchs(name: str) -> None:
    portable, usual = (made(name, init).state_dict() for init in ("portable", "torch"))
    for key, weights in portable.items():
        other = usual[key]
        if weights.numel() >= 2000 and other.std() > 0:
            # The standard deviation of n normal numbers is estimated to 1 / sqrt(2 n) of itself.
            assert weights.std().item() == pytest.approx(other.std().item(), rel=5 / weights.numel() ** 0.5), key
            assert weights.mean().abs() < 5 * other.std() / weights.numel() ** 0.5, key
            assert not torch.equal(weights, other)
        elif other.std() == 0 or other.numel() == 1:
            assert torch.equal(weights, other), key
    assert any(
        not torch.equal(weights, made(name, "portable", seed=1).state_dict()[key]) for key, weights in portable.items()
    )


def test_random_numbers_and_functions_are_accurate() -> None:
    shares = np.concatenate([np.linspace(0.001, 0.999, 999), 10.0 ** -np.arange(3, 17), 1 - 10.0 ** -np.arange(3, 16)])
    expected = torch.special.ndtri(torch.from_numpy(shares)).numpy()
    np.testing.assert_allclose(normal_quantile(shares), expected, rtol=1e-14, atol=1e-15)
    values = 10.0 ** np.linspace(-300, 300, 1001)
    np.testing.assert_allclose(logarithm(values), np.log(values), rtol=1e-15)
    uniform = uniform_weights(3, 0, 100_000, -1, 1)
    normal = normal_weights(3, 1, 100_000, 1, 2)
    assert -1 < uniform.min() < -0.9999
    assert 0.9999 < uniform.max() < 1
    # Kolmogorov's statistic exceeds 1.95 / sqrt(n) once in a thousand samples.
    for sample, cumulated in (
        (uniform, (uniform + 1) / 2),
        (normal, torch.special.ndtr(torch.from_numpy((normal - 1) / 2)).numpy()),
    ):
        ranks = (np.arange(len(sample)) + 0.5) / len(sample)
        assert np.abs(np.sort(cumulated) - ranks).max() < 1.95 / len(sample) ** 0.5


def test_what_is_not_portable_is_refused() -> None:
    with initialising(ModelConfig(name="resnet18", init="portable"), 0):
        for draw in (lambda: nn.init.orthogonal_(torch.empty(3, 3)), lambda: torch.randperm(4)):
            with pytest.raises(ConfigError, match=r"set model\.init torch"):
                draw()
