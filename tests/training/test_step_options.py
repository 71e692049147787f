"""Compiled models and recomputed activations: the same numbers for a micro-batch, whatever ran before."""

import contextvars
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import is_fast_norm
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.flop_counter import FlopCounterMode

from dali_train.cli import main
from dali_train.config import BatchConfig, Config, ModelConfig, OptimizerConfig, PrecisionConfig, load_config
from dali_train.errors import ConfigError
from dali_train.extras.cost.memory import Memory, estimate_memory
from dali_train.training.cost import (
    ModelFlops,
    Product,
    data_sheet_peak,
    flops_per_image,
    measure_largest_product,
    model_flops,
)
from dali_train.training.model import (
    build_model,
    check_sizes,
    compile_blocks,
    repeated_blocks,
    resample_position_embedding,
)
from dali_train.training.optim import make_clip, make_optimizer
from dali_train.training.precision import Precision, choose_tf32, compute_in

CPU = torch.device("cpu")


def model(config: Path, **fields: Any) -> nn.Module:
    """The tests' ViT: dropout, stochastic depth."""
    loaded = load_config(config)
    return build_model(replace(loaded, model=ModelConfig(**{**vars(loaded.model), **fields})), 5, CPU).train()


def gradients(model: nn.Module, images: torch.Tensor, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(images).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"compile": "model"}, marks=pytest.mark.thorough),
        {"compile": "blocks", "activation_checkpointing": True},
    ],
    ids=str,
)
def test_dropout_belongs_to_the_micro_batch(tiny_config: Path, aot_eager: None, fields: dict[str, Any]) -> None:
    compiled = model(tiny_config, **fields)
    images = torch.randn(4, 3, 32, 32)
    first = gradients(compiled, images, seed=1)
    assert not equal(first, gradients(compiled, images, seed=2)), "dropout is on"
    # What an evaluation does, with last batches of several sizes.
    graphs = []
    for sizes in ((4, 4, 3), (4, 1), (5, 2), (6,), (7, 3)):
        with torch.inference_mode():
            compiled.eval()
            for size in sizes:
                compiled(torch.randn(size, 3, 32, 32))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[2:] == graphs[2:3] * 3, "no graph for each batch size"
    compiled.train()
    torch.rand(17)
    assert equal(first, gradients(compiled, images, seed=1))
    assert graphs[-1] == counters["stats"]["unique_graphs"], "nor anew for training"
    assert [name for name, _ in compiled.named_parameters()] == [
        name for name, _ in model(tiny_config).named_parameters()
    ]


def test_recomputed_activations_change_no_gradient(tiny_config: Path) -> None:
    images = torch.randn(4, 3, 32, 32)
    kept = [0, 0, 0]
    found = []
    for number, checkpointing in enumerate((False, "selective", True)):

        def keep(tensor: torch.Tensor, number: int = number) -> torch.Tensor:
            kept[number] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(gradients(model(tiny_config, activation_checkpointing=checkpointing), images, seed=1))
    assert equal(found[0], found[1]) and equal(found[0], found[2])
    assert kept[2] < kept[0] / 2 and kept[1] < kept[0] / 2  # selective keeps its results elsewhere: see the next test


def test_selective_recomputation_lies_between(tiny_config: Path) -> None:
    """Without products and attention to compute again it keeps more than full recomputation, less than none."""
    config = load_config(tiny_config).replace({"model.kwargs.depth": 8, "batch.micro_batch": 32})
    options: list[bool | str] = [False, "selective", True]
    settings = [replace(config.model, activation_checkpointing=option) for option in options]
    counts, bytes_kept = [], []
    for setting in settings:
        built = build_model(replace(config, model=setting), 5, CPU).train()
        with FlopCounterMode(display=False) as counter:
            gradients(built, torch.randn(4, 3, 32, 32), seed=1)
        counts.append(counter.get_total_flops())
        bytes_kept.append(memory_of(replace(config, model=setting)).activation_bytes)
    assert counts[0] == counts[1] < counts[2]
    assert bytes_kept[2] < bytes_kept[1] < 0.75 * bytes_kept[0]
    with pytest.raises(ConfigError, match="selective, but vgg11 has no repeated blocks: set it to true or false"):
        build_model(
            replace(config, model=ModelConfig(name="vgg11", activation_checkpointing="selective")),
            5,
            torch.device("meta"),
        )


@pytest.mark.parametrize(
    ("name", "block", "count"),
    [
        ("vit_tiny_patch16_224", "Block", 12),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),  # not the four stages
        ("convnext_tiny", "ConvNeXtBlock", 18),
        ("resnet50", "Bottleneck", 16),
        ("mixer_b16_224", "MixerBlock", 12),
        ("vgg11", "", 0),
    ],
)
def test_blocks_are_found_by_structure(name: str, block: str, count: int) -> None:
    with torch.device("meta"):
        blocks = repeated_blocks(timm.create_model(name))
    assert len(blocks) == count and {type(found).__name__ for found in blocks} <= {block}


def test_auto_compiles_nothing_on_a_cpu(tiny_config: Path) -> None:
    assert all(
        module._compiled_call_impl is None and "forward" not in vars(module) for module in model(tiny_config).modules()
    )


def test_autotuned_blocks_are_compiled(tiny_config: Path) -> None:
    """torch looks the mode up at once, and compiles at the first call."""
    assert all("forward" in vars(block) for block in repeated_blocks(model(tiny_config, compile="autotune")))


def test_without_the_compiler_where_it_fails(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What `auto` does on a GPU."""

    def fail(*_: Any) -> None:
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    images = torch.randn(2, 3, 32, 32)
    expected = model(tiny_config, kwargs=PLAIN)
    broken = model(tiny_config, kwargs=PLAIN)
    compile_blocks(repeated_blocks(broken), fall_back=True)
    for _ in range(2):
        assert torch.equal(broken(images), expected(images))
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "dali_train")
    assert warning.startswith("model.compile auto: the compiler failed (") and "Set model.compile none" in warning


PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def test_fast_norm_keeps_the_stream_in_half_precision(tiny_config: Path) -> None:
    images = torch.randn(4, 3, 32, 32)
    seen, outputs = [], []
    for fast in (False, True):
        # LayerScale's factors are float32, and would make the stream float32 again after the first block
        built = model(tiny_config, kwargs={**PLAIN, "init_values": 0.1}, fast_norm=fast)
        for block in repeated_blocks(built):
            block.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(built(images).float())
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert not torch.equal(*outputs) and (outputs[0] - outputs[1]).abs().max() < 0.1 * outputs[0].abs().max()
    float32 = [model(tiny_config, kwargs=PLAIN, fast_norm=fast)(images) for fast in (False, True)]
    assert torch.equal(*float32), "nothing changes without autocast"
    config = load_config(tiny_config)
    fast_config = replace(config, model=replace(config.model, fast_norm=True))
    assert flops_per_image(fast_config, 5) == flops_per_image(config, 5) and memory_of(fast_config), (
        "on the meta device"
    )
    assert not is_fast_norm(), "nor for the next model"


def test_the_order_of_attention_kernels(tiny_config: Path) -> None:
    before = _cur_sdpa_kernel_backends(with_priority=True)
    model(tiny_config, attention="efficient")
    assert _cur_sdpa_kernel_backends(with_priority=True)[0] == SDPBackend.EFFICIENT_ATTENTION
    contextvars.copy_context().run(model, tiny_config)  # as in a notebook's next cell. auto: torch's own order
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_position_embeddings_of_another_size_are_timms(tiny_config: Path) -> None:
    """Without the operator that has no deterministic backward pass on a GPU."""
    built = model(tiny_config, kwargs={**PLAIN, "dynamic_img_size": True})
    found, expected = (
        (
            value := resample(built.pos_embed, (3, 5), (4, 4), 1),
            *torch.autograd.grad(value.square().sum(), built.pos_embed),
        )
        for resample in (resample_position_embedding, timm.layers.resample_abs_pos_embed)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    output = built(torch.randn(2, 3, 24, 40))
    seen, queue = set(), [output.grad_fn]
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += [before for before, _ in node.next_functions if before is not None]
    names = {node.name() for node in seen}
    assert "AddmmBackward0" in names and not any("Upsample" in name for name in names)


def test_images_of_a_wrong_size_are_found_at_once(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    wrong = replace(config, data=replace(config.data, eval_size=36))
    for device in (CPU, torch.device("meta")):
        built = build_model(config, 5, device).train()
        check_sizes(built, config)
        with pytest.raises(
            ConfigError, match=r"data.eval_size is 36, but .* takes images of 32 pixels .*: set data.eval_size 32"
        ):
            check_sizes(built, wrong)
        assert built.training
    resnet = replace(wrong, model=ModelConfig(name="resnet18"))
    check_sizes(build_model(resnet, 5, torch.device("meta")), resnet)  # takes any


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", True, 989.4),
        ("NVIDIA H100 PCIe", "fp16", True, 756.5),
        ("NVIDIA H200", "fp32", True, 494.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", True, 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA L40S", "fp16", True, 362),
        ("NVIDIA L40", "fp16", True, 181),
        ("NVIDIA GeForce RTX 4090", "bf16", True, 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", True, 125),
        ("Tesla V100-SXM2-16GB", "bf16", True, None),
        ("NVIDIA B200", "bf16", True, 2250),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", True, None),
        ("NVIDIA A1000", "bf16", True, None),
        ("NVIDIA H200", "fp64", True, None),
    ],
)
def test_dense_peaks(name: str, dtype: str, tf32: bool, teraflops: float | None) -> None:
    peak = data_sheet_peak(name, dtype, tf32=tf32)
    assert (peak.flops_per_second / 1e12 if peak is not None else None) == (
        pytest.approx(teraflops) if teraflops else None
    )


def memory_of(config: Config) -> Memory:
    return estimate_memory(config, build_model(config, 5, torch.device("meta")))


def test_utilisation(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    assert model_flops(config, 5, CPU, num_devices=1) is None
    flops = flops_per_image(config, 5)
    # 8 H200 at 1 % of their peak.
    assert ModelFlops({32: flops}, 8 * 989.4e12).utilisation(8 * 989.4e10 / flops, 32) == pytest.approx(0.01)


def test_the_largest_product_is_measured_in_each_format(tiny_config: Path) -> None:
    config = load_config(tiny_config).replace({"precision.dtype": "fp64", "batch.micro_batch": 4})
    model = build_model(config, 5, torch.device("meta"))
    product = measure_largest_product(config, model)
    assert product.flops == 2 * 4 * model.patch_embed.num_patches * model.patch_embed.proj.weight.numel()
    assert product.seconds.keys() == {"fp32", "bf16", "fp16", "fp64"} and 0 < min(product.seconds.values()) < 1
    emulated = Product(1e9, {"fp32": 0.04, "bf16": 0.1})
    assert (
        emulated.fastest == "fp32"
        and emulated.speedup("bf16") == pytest.approx(0.4)
        and "times as fast" not in emulated.describe()
    )
    assert "takes 2.5 times as long as in fp32. Set precision.dtype fp32" in str(emulated.warning("bf16"))
    even = Product(1e9, {"fp32": 0.04, "bf16": 0.045, "fp64": 0.2})
    assert even.warning("bf16") is None and even.warning("fp64") is None and even.warning("fp32") is None
    assert "bf16 is 2.5 times as fast as fp32" in Product(1e9, {"fp32": 0.1, "bf16": 0.04}).describe()


def test_memory_and_the_largest_micro_batch(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    memory = memory_of(config)
    assert memory.optimizer_bytes == 2 * memory.weight_bytes == 2 * 4 * memory.num_parameters  # LAMB
    many, twice_as_many = (
        memory_of(replace(config, batch=BatchConfig(global_batch=1024, micro_batch=size))) for size in (512, 1024)
    )
    assert twice_as_many.activation_bytes == pytest.approx(2 * many.activation_bytes, rel=0.01)
    one_image = memory.activation_bytes / memory.micro_batch
    room = (3e9 + memory.state_bytes + 100.5 * one_image) / 0.95
    assert memory.largest_micro_batch(room, 8192) == 64 and memory.largest_micro_batch(room, 100) == 100
    assert memory.largest_micro_batch(room, 100, 4) == 25 and memory.largest_micro_batch(room, 100, 3) == 25
    assert memory.largest_micro_batch(room, 96, 8) == 12 and memory.largest_micro_batch(1e9, 8192) is None


def test_memory_counts_averages_masks_and_the_optimizers_step(tiny_config: Path) -> None:
    """Not only weights and activations."""
    config = load_config(tiny_config).replace({"model.kwargs.proj_drop_rate": 0.0, "model.kwargs.pos_drop_rate": 0.0})
    plain = memory_of(config)
    averaged = memory_of(config.replace({"ema.decay": 0.9}))
    assert averaged.average_bytes == plain.weight_bytes and averaged.state_bytes > plain.state_bytes
    masked = memory_of(config.replace({"model.kwargs.pos_drop_rate": 0.1}))
    mask = config.batch.micro_batch * 17 * 32  # bool, of (images, 16 patches and the class token, width)
    assert mask <= masked.activation_bytes - plain.activation_bytes <= 2 * 4 * mask
    # LAMB's step on all tensors at once has copies of them; float16's keeps one of weights and state besides.
    assert plain.weight_bytes < plain.update_bytes < 3 * plain.weight_bytes
    undone = memory_of(config.replace({"precision.dtype": "fp16"}))
    assert undone.update_bytes == plain.update_bytes + plain.weight_bytes + plain.optimizer_bytes


@pytest.mark.thorough
def test_the_state_of_an_optimizer_that_reads_numbers_of_tensors_is_foreseen(tiny_config: Path) -> None:
    """Such as a count or a norm, which tensors without data do not have."""
    config = load_config(tiny_config)
    model = build_model(config, 5, CPU)
    for name in ("adafactor", "adamp", "nadam", "nadamuon", "nmuon", "novograd", "sgdp"):
        named = config.replace({"optimizer.name": name})
        optimizer = make_optimizer(model, named.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        num_bytes = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
        assert memory_of(named).optimizer_bytes == num_bytes, name


@pytest.mark.thorough
def test_a_plan_says_what_fits(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["plan", "--config", str(tiny_config)]
    assert main([*config, "--gpu-memory", "16", "--world-size", "2"]) == 0
    assert (
        "micro-batch    about 16 is the largest that fits into 16 GB; batch.micro_batch is 4" in capsys.readouterr().out
    )
    assert main([*config, "--gpu-memory", "1"]) == 0
    assert "not even one image fits into 1 GB" in capsys.readouterr().out
    assert main([*config, "--gpu", "H100", "--world-size", "2", "--precision.dtype", "bf16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "largest that fits into 80 GB" in printed and "on 2 x H100 at its peak (989.4 TFLOP/s: " in printed
    assert re.search(r"arithmetic [\d.]+ GFLOP per image .*, [\d.e-]+ EFLOP in all", printed) and "CPU" not in printed
    for words, message in (
        (["--gpu", "h1000"], "--gpu h1000: no such GPU is known; did you mean h100"),
        (["--gpu", "v100", "--precision.dtype", "bf16"], "precision.dtype is bf16, for which V100 has no"),
    ):
        assert main([*config, *words]) == 2 and message in capsys.readouterr().err
    assert main([*config, "--data.normalise", "127.5,127.5,127.5", "50,50,50"]) == 0
    printed = capsys.readouterr().out
    different = (
        "data.normalise is 127.5,127.5,127.5 50,50,50, and timm's vit_tiny_patch16_224 was trained with inception"
    )
    assert f"{different}: fine for random initial weights, wrong for pretrained ones" in printed
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}))
    words = ["--data.normalise", "127.5,127.5,127.5", "50,50,50", "--model.weights", str(tmp_path / "w.safetensors")]
    save_file(build_model(load_config(tiny_config), 5, torch.device("cpu")).state_dict(), words[-1])
    assert main([*config, *words]) == 0
    assert f"model.weights {words[-1]} was trained with 127.5,127.5,127.5 63.75,63.75,63.75" in capsys.readouterr().out


def test_pure_half_precision_has_no_exceptions(tiny_config: Path) -> None:
    """Every layer takes and gives float16, the weights and their gradients are float32, also where activations are
    recomputed."""
    images = torch.randn(4, 3, 32, 32)
    kwargs = {**load_config(tiny_config).model.kwargs, "init_values": 0.1, "pos_drop_rate": 0.0, "proj_drop_rate": 0.0}
    kwargs["drop_path_rate"] = 0.0
    exact = gradients(model(tiny_config, kwargs=kwargs), images, seed=1)
    for checkpointing in (False, True, "selective"):
        pure = model(tiny_config, kwargs=kwargs, activation_checkpointing=checkpointing)
        compute_in(pure, torch.float16)
        dtypes: set[torch.dtype] = set()

        def note(module: nn.Module, inputs: Any, output: Any, dtypes: set[torch.dtype] = dtypes) -> None:
            dtypes.update((inputs[0].dtype, output.dtype))

        for module in pure.children():
            for layer in module.modules():
                layer.register_forward_hook(note)
        found = gradients(pure, images, seed=1)
        assert dtypes == {torch.float16} and pure(images).dtype == torch.float32
        assert (
            {parameter.dtype for parameter in pure.parameters()}
            == {gradient.dtype for gradient in found}
            == {torch.float32}
        )
        largest = max(gradient.abs().max() for gradient in exact)
        assert all((a - b).abs().max() < 0.02 * largest for a, b in zip(found, exact, strict=True))
        with pytest.raises(RuntimeError):
            pure(torch.randn(4, 7, 32, 32))
        assert {parameter.dtype for parameter in pure.parameters()} == {torch.float32}, "also after an error"


@pytest.mark.parametrize(
    ("dtype", "autocast", "product", "pure"),
    [
        ("fp32", True, torch.float32, None),
        ("bf16", True, torch.bfloat16, None),
        ("fp16", True, torch.float16, None),
        ("bf16", False, torch.float32, torch.bfloat16),
    ],
)
def test_what_a_precision_computes_in(
    dtype: str, autocast: bool, product: torch.dtype, pure: torch.dtype | None
) -> None:
    precision = Precision(PrecisionConfig(dtype=dtype, autocast=autocast), CPU)
    layer = nn.Linear(3, 1)
    with precision.autocast():
        assert layer(torch.randn(2, 3)).dtype == product
    assert precision.pure_dtype == pure
    embedding = nn.Embedding(4, 3)
    compute_in(embedding, torch.float16)
    assert embedding(torch.arange(4)).dtype == torch.float32, "whole numbers stay what they are"


def test_gradients_are_clipped_to_the_norm() -> None:
    for clip, moved in ((None, 5.0), (2.0, 2.0), (7.0, 5.0)):
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer = torch.optim.SGD([weight], lr=1.0)
        clip_function = make_clip(optimizer, OptimizerConfig(lr=1.0, clip_grad_norm=clip), None)
        norm = Precision(PrecisionConfig(), CPU).step(optimizer, clip_function)
        assert norm == 5 and weight.detach().norm() == pytest.approx(moved, rel=1e-5)


def test_tf32_is_a_choice(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(choose_tf32, torch.backends.cudnn.allow_tf32))
    for allowed in (True, False):
        choose_tf32(allowed)
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == allowed
