"""The kernels that a ViT-B/16's time consists of, each alone: matrix products of its shapes, and attention by kernel.

    python -m tools.bench.kernels

Attention is compared with float64, forward and backward: cuDNN's backward has had faults on Hopper
(pytorch/pytorch#150700, #169849), and 197 tokens are no multiple of 128. Needs torch alone.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from tools.bench.turns import describe_machine, write_lines

WIDTH, HEADS, HEAD = 768, 12, 64  # ViT-B
TOKENS = {"B/16": (256, 197), "B/32": (1024, 50)}  # (images, tokens each): about 50,000 tokens
KERNELS = {
    "torch's choice": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="two images: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON lines")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    print(describe_machine())
    for model, (images, tokens) in TOKENS.items():
        shape = (2 if options.quick else images, tokens)
        for line in [*products(model, *shape, options.device), *attention(model, *shape, options.device)]:
            lines.append({"event": "round", **line})
            print("  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()))
            if options.json:
                write_lines(options.json, lines)


def milliseconds(statement: Any, device: str) -> float:
    timer = Timer("statement()", globals={"statement": statement})
    return 1000 * timer.blocked_autorange(min_run_time=0.5 if device == "cuda" else 0.01).median


def products(model: str, images: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """Each linear layer's three products, bfloat16, in TFLOP/s."""
    lines, rows = [], images * tokens
    for inputs, outputs in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)):
        x, w, g = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for name, multiply in (
            ("forward", lambda x=x, w=w: F.linear(x, w)),
            ("gradient of the input", lambda g=g, w=w: g @ w),
            ("gradient of the weight", lambda g=g, x=x: g.t() @ x),
        ):
            ms = milliseconds(multiply, device)
            what = f"{model} {inputs} to {outputs}, {name}, TFLOP/s"
            lines.append({"what": what, "value": 2e-9 * rows * inputs * outputs / ms})
    return lines


def attention(model: str, images: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """Each kernel's forward and backward in ms, and |x - float64's| / |float64's| of output and gradient."""
    qkv = torch.randn(images, tokens, 3, HEADS, HEAD, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(images, tokens, WIDTH, device=device, dtype=torch.bfloat16)
    few = 2

    def run(qkv: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        output = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        (of_qkv,) = torch.autograd.grad(output, qkv, gradient)
        return output.detach(), of_qkv

    with sdpa_kernel(SDPBackend.MATH):
        expected = run(qkv.detach()[:few].double().requires_grad_(), gradient[:few].double())
    lines = []
    for name, kernel in KERNELS.items():
        line: dict[str, Any] = {"what": f"{model} attention, {name}"}
        try:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                found = run(qkv, gradient)
                line["ms"] = milliseconds(lambda: run(qkv, gradient), device)
        except RuntimeError as error:
            lines.append(line | {"refused": str(error).splitlines()[0]})
            continue
        for part, ours, theirs in zip(("output", "gradient"), found, expected, strict=True):
            line[f"{part}_error"] = float((ours[:few].double() - theirs).norm() / theirs.norm())
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
