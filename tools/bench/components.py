"""Components against their publications, without training: crops, RandAugment, initial weights, Mixup and CutMix.

    python -m tools.bench.components --out docs/measurements

Prints a table for each, ours beside the published numbers with a p-value or a distance, and draws a picture. It takes a
few minutes of one core. The published spectra of RandAugment are in published_spectra.json.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from timm.data.mixup import rand_bbox
from torchvision.transforms import RandomResizedCrop

from dali_train.config import DataConfig, MixupConfig, ModelConfig
from dali_train.data.loading.augment import OPERATORS
from dali_train.data.sampling.draws import BOXES, DrawInput, draw_mixing
from dali_train.data.sampling.policy import draw_operators, policy_of
from dali_train.extras.models import SinCosVisionTransformer
from dali_train.training.model import initialising

Array = NDArray[Any]
Row = tuple[Any, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="of the pictures (default: here)")
    parser.add_argument("--draws", type=int, default=2_000_000, metavar="N", help="crops (default: %(default)s)")
    parser.add_argument("--images", type=int, default=40_000, metavar="N", help="augmented (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=20_000, metavar="N", help="mixed (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts (default: all)")
    options = parser.parse_args()
    for name in options.only:
        rows, figure = PARTS[name](options)
        print(f"\n{name}")
        for row in rows:
            print("| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
        path = options.out / f"{name}.png"
        figure.savefig(path, dpi=110)
        print(f"drawn: {path}", flush=True)


# ------------------------------------------------------------------------------------------------ crops

HEIGHT, WIDTH, AREA, ASPECT = 256, 512, (0.05, 1.0), (3 / 4, 4 / 3)
PUBLISHED_FAILURES = 14_340  # of 10,000,000 by torchvision, "almost"; none by TensorFlow. The README of EIFY/mup-vit
CENTRAL = (HEIGHT, round(HEIGHT * ASPECT[1]))  # what torchvision takes after ten failures


def crops(options: argparse.Namespace) -> tuple[list[Row], Figure]:
    """Count (height, width) of random crops of an image of 256 x 512 pixels."""
    counted = {kind: crop_counts(kind, options.draws) for kind in BOXES}
    sample = np.zeros((HEIGHT + 1, WIDTH + 1), dtype=np.int64)
    torch.manual_seed(0)
    blank = torch.empty(3, HEIGHT, WIDTH)
    for _ in range(options.draws // 20):
        _, _, height, width = RandomResizedCrop.get_params(blank, list(AREA), list(ASPECT))
        sample[height, width] += 1
    share, usual = counted["random-resized"][CENTRAL] / options.draws, PUBLISHED_FAILURES / 10_000_000
    error = (usual * (1 / options.draws + 1 / 10_000_000)) ** 0.5
    rows: list[Row] = [
        ("", "published", "ours", "z or p"),
        (
            "random-resized: central crops after ten failures, per million",
            usual * 1e6,
            share * 1e6,
            (share - usual) / error,
        ),
        ("inception: whole images after failures", 0, int(counted["inception"][HEIGHT, WIDTH]), ""),
        (
            f"random-resized against {int(sample.sum()):,} draws of torchvision here, by cells of 8 x 8",
            "",
            options.draws,
            same_cells(counted["random-resized"], sample),
        ),
        ("inception against the same, which must differ", "", options.draws, same_cells(counted["inception"], sample)),
    ]
    figure = Figure(figsize=(6.5, 6.2), layout="constrained")
    for axes, (kind, counts) in zip(figure.subplots(2, 1), counted.items(), strict=True):
        shown = axes.imshow(counts, cmap="gray", vmax=np.quantile(counts[counts > 0], 0.995), interpolation="nearest")
        axes.set(
            title=f"{kind}: {options.draws:,} crops of 256 x 512 pixels, area 5 to 100 %",
            xlabel="width",
            ylabel="height",
        )
        figure.colorbar(shown, ax=axes, label="crops")
    return rows, figure


def crop_counts(kind: str, draws: int) -> Array:
    counts = np.zeros((HEIGHT + 1) * (WIDTH + 1), dtype=np.int64)
    for start in range(0, draws, 500_000):
        numbers = np.arange(start, min(start + 500_000, draws))
        images = DrawInput(
            numbers=numbers,
            draw_numbers=np.zeros_like(numbers),
            heights=np.full_like(numbers, HEIGHT),
            widths=np.full_like(numbers, WIDTH),
        )
        boxes = BOXES[kind](0, images, area=AREA, aspect=ASPECT)
        counts += np.bincount(boxes[:, 2] * (WIDTH + 1) + boxes[:, 3], minlength=len(counts))
    return counts.reshape(HEIGHT + 1, WIDTH + 1)


def same_cells(first: Array, second: Array, side: int = 8) -> float:
    """Return the p-value of the chi-squared test that two tables of (height, width) have one distribution."""
    cells = []
    for counts in (first, second):
        padded = np.pad(counts, [(0, -size % side) for size in counts.shape])
        cells.append(padded.reshape(padded.shape[0] // side, side, -1, side).sum(axis=(1, 3)).ravel())
    table = np.stack(cells)
    frequent = table.sum(axis=0) * (table.sum(axis=1).min() / table.sum()) >= 5  # the test's approximation needs 5
    return float(stats.chi2_contingency(table[:, frequent]).pvalue)


# ------------------------------------------------------------------------------------------------ RandAugment

PUBLISHED_IMAGES = 100_000
SHOWN_LEVELS = (255, 0, 128, 240, 110, 127, 243, 66, 254, 15, 145, 98, 220, 45, 209)


def randaugment(options: argparse.Namespace) -> tuple[list[Row], Figure]:
    """Compare the grey levels of the calibration grid after two operators of big_vision's RandAugment at full
    strength."""
    published = json.loads(Path(__file__).with_name("published_spectra.json").read_text())
    spectra = {name: spectrum(published[name]) for name in ("torchvision", "big_vision", "replication")}
    ours, error = augmented_grid(options.images, seed=0)
    again, _ = augmented_grid(options.images, seed=1)
    rows: list[Row] = [("grey level", *spectra, "ours", "z to the replication")]
    for level in SHOWN_LEVELS:
        shares = [values[level] for values in spectra.values()]
        # The standard error of each sample follows from the number of its images.
        spread = max(error[level], 1e-9) * (1 + options.images / PUBLISHED_IMAGES) ** 0.5
        difference = (ours[level] - spectra["replication"][level]) / spread
        rows.append((level, *(f"{100 * share:.3f} %" for share in (*shares, ours[level])), float(difference)))
    others = (*spectra.values(), ours)
    rows.append(
        (
            "pixels to change for ours",
            *(distance(ours, each) for each in others),
            f"another seed: {distance(ours, again):.4g}",
        )
    )
    rows.append(("pixels to change for big_vision's", *(distance(spectra["big_vision"], each) for each in others), ""))
    rows.append(
        (
            "grey levels to move for ours, mean",
            *(movement(ours, each) for each in others),
            f"another seed: {movement(ours, again):.4g}",
        )
    )
    rows.append(
        ("grey levels to move for big_vision's", *(movement(spectra["big_vision"], each) for each in others), "")
    )
    figure = Figure(figsize=(10, 5), layout="constrained")
    shown = {**spectra, "ours": ours}
    titles = (
        "torchvision's RandAugment(2, 10), published",
        "big_vision's randaug(2, 10), published",
        "mup-vit's replication of it in torchvision, published",
        "ours, data.augment big-vision",
    )
    for axes, values, title in zip(figure.subplots(4, 1), shown.values(), titles, strict=True):
        sorted_levels = np.searchsorted(np.cumsum(values), (np.arange(2000) + 0.5) / 2000)
        axes.imshow(sorted_levels[None, :], cmap="gray", vmin=0, vmax=255, aspect="auto", extent=(0, 100, 0, 1))
        axes.set(title=title, yticks=[])
    axes.set_xlabel("% of the pixels, from black to white")
    return rows, figure


def spectrum(counts: dict[str, int]) -> Array:
    """Return the share of each grey level, (256,)."""
    values = np.zeros(256)
    values[[int(level) for level in counts]] = list(counts.values())
    return values / values.sum()


def distance(first: Array, second: Array) -> float:
    """Return the total variation distance: the share of pixels whose grey level must change."""
    return float(np.abs(first - second).sum() / 2)


def movement(first: Array, second: Array) -> float:
    """Return the earth mover's distance: by how many grey levels a pixel must change on average."""
    return float(np.abs(np.cumsum(first - second)).sum())


def augmented_grid(count: int, seed: int) -> tuple[Array, Array]:
    """Return the share of each grey level over `count` augmented grids, and its standard error, (256,) each."""
    square = np.kron(np.indices((4, 4)).sum(axis=0) % 2, np.ones((56, 56), dtype=np.int64)) * 255
    # Channels innermost, as the loader has images.
    grid = torch.from_numpy(square.astype(np.uint8))[..., None].expand(224, 224, 3).contiguous().permute(2, 0, 1)
    policy = policy_of(DataConfig(root=".", augment="big-vision"))
    numbers, side = np.arange(count), np.full(count, 224)
    chosen, levels = draw_operators(
        seed, policy, DrawInput(numbers=numbers, draw_numbers=np.zeros_like(numbers), heights=side, widths=side)
    )
    seen: dict[tuple[Any, ...], Array] = {}
    sums, squares = np.zeros(256), np.zeros(256)
    for operators, strengths in zip(chosen, levels, strict=True):
        names = [policy.names[number] for number in operators]
        arguments = [float(OPERATORS[name].argument(strengths[i : i + 1], 224)[0]) for i, name in enumerate(names)]
        key = (*names, *arguments)
        if key not in seen:
            image = grid
            for name, argument in zip(names, arguments, strict=True):
                image = OPERATORS[name].cpu(image, argument)
            assert torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])
            seen[key] = np.bincount(image[0].flatten().numpy(), minlength=256) / 224**2
        sums += seen[key]
        squares += seen[key] ** 2
    mean = sums / count
    return mean, np.sqrt(np.maximum(squares / count - mean**2, 0) / count)


# ------------------------------------------------------------------------------------------------ initial weights


def weights(options: argparse.Namespace) -> tuple[list[Row], Figure]:
    """Compare the initial weights of ViT-S/16 with the distributions that big_vision (Flax) draws from."""
    width, hidden, patch = 384, 1536, 3 * 16**2

    def uniform(limit: float) -> Any:
        return stats.uniform(-limit, 2 * limit)

    def truncated(variance: float) -> Any:  # at two standard deviations, of which it keeps 0.8796
        return stats.truncnorm(-2, 2, scale=variance**0.5 / 0.87962566103423978)

    expected: dict[str, tuple[str, Any]] = {
        "queries, keys, values": (r"attn\.qkv\.weight", uniform((3 / width) ** 0.5)),
        "attention's output": (r"attn\.proj\.weight", uniform((3 / width) ** 0.5)),
        "MLP": (r"mlp\.fc[12]\.weight", uniform((6 / (width + hidden)) ** 0.5)),
        "MLP, biases": (r"mlp\.fc[12]\.bias", stats.norm(scale=1e-6)),
        "patches": (r"patch_embed\.proj\.weight", truncated(1 / patch)),
        "layer before the classifier": (r"fc_norm\.0\.weight", truncated(1 / width)),
    }
    models = {init: made(init) for init in ("torch", "portable")}
    rows: list[Row] = [("", "weights", "std of the source's rule", "std, torch", "p", "std, portable", "p")]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    for axes, (name, (pattern, rule)) in zip(figure.subplots(2, 3).flat, expected.items(), strict=True):
        cells: list[Any] = []
        for init, model in models.items():
            values = matching(model, pattern)
            cells += [float(values.std()), float(stats.kstest(values, rule.cdf).pvalue)]
            axes.hist(values, bins=100, density=True, histtype="step", label=init)
        x = np.linspace(values.min() * 1.1, values.max() * 1.1, 1000)
        axes.plot(x, rule.pdf(x), "k--", linewidth=0.8, label="rule")
        axes.set(title=name, yticks=[])
        rows.append((name, len(values), float(rule.std()), *cells))
    axes.legend()
    zeros = [float(matching(model, r"^head\.(weight|bias)").std()) for model in models.values()]
    rows.append(("classifier", 385_000, 0.0, zeros[0], "", zeros[1], ""))
    return rows, figure


def made(init: Any) -> torch.nn.Module:
    with initialising(ModelConfig(name="dali_vit_small_patch16", init=init), 0):
        model = timm.create_model("dali_vit_small_patch16", num_classes=1000)
    assert isinstance(model, SinCosVisionTransformer)
    return model


def matching(model: torch.nn.Module, pattern: str) -> Array:
    found = [p.detach().flatten().numpy() for name, p in model.named_parameters() if re.search(pattern, name)]
    return np.concatenate(found).astype(np.float64)


# ------------------------------------------------------------------------------------------------ Mixup and CutMix


def mixing(options: argparse.Namespace) -> tuple[list[Row], Figure]:
    """Compare lambdas with Beta's distribution, and with timm's boxes, whose lambda is what is left of the image."""
    side, count = 224, options.batches
    mixup = {alpha: lambdas(MixupConfig(alpha=alpha), count, side) for alpha in (0.2, 0.8)}
    cutmix = lambdas(MixupConfig(cutmix_alpha=1.0), count, side)
    both = MixupConfig(alpha=0.8, cutmix_alpha=1.0)
    num_cut = sum(bool(draw_mixing(both, 0, step=step, k=0, size=2, side=side).cuts[0, 2]) for step in range(count))
    np.random.seed(0)
    theirs = np.array([timm_lambda(side) for _ in range(count)])
    rows: list[Row] = [("", "published", "ours", "p")]
    for alpha, values in mixup.items():
        rule = stats.beta(alpha, alpha)
        rows.append(
            (
                f"Mixup {alpha}: std of lambda",
                float(rule.std()),
                float(values.std()),
                below_one(values, rule),
            )
        )
    rows.append(
        (
            "CutMix 1.0: mean of lambda (timm's draws)",
            float(theirs.mean()),
            float(cutmix.mean()),
            float(stats.ks_2samp(theirs, cutmix).pvalue),
        )
    )
    rows.append(("both: share of CutMix", 0.5, num_cut / count, float(stats.binomtest(num_cut, count).pvalue)))
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for axes, (alpha, values) in zip((panels := figure.subplots(1, 3))[:2], mixup.items(), strict=True):
        axes.hist(values, bins=50, density=True, histtype="step", label="ours")
        x = np.linspace(0.005, 0.995, 500)
        axes.plot(x, stats.beta(alpha, alpha).pdf(x), "k--", linewidth=0.8, label=f"Beta({alpha}, {alpha})")
        axes.set(title=f"Mixup's lambda, alpha {alpha}", yscale="log")
        axes.legend()
    for values, label in ((cutmix, "ours"), (theirs, "timm")):
        panels[2].hist(values, bins=50, density=True, histtype="step", label=label)
    panels[2].set(title="CutMix's lambda, alpha 1")
    panels[2].legend()
    return rows, figure


def below_one(values: Array, rule: Any) -> float:
    """Return Kolmogorov and Smirnov's p-value for the values that are not rounded to 1, as 2 % are at alpha 0.2."""
    most = 1 - 2.0**-25
    return float(stats.kstest(values[values < 1], lambda x: rule.cdf(x) / rule.cdf(most)).pvalue)


def lambdas(config: MixupConfig, count: int, side: int) -> Array:
    draws = (draw_mixing(config, 0, step=step, k=0, size=2, side=side) for step in range(count))
    return np.array([mixed.lambdas[0] for mixed in draws], dtype=np.float64)


def timm_lambda(side: int) -> float:
    """Return timm's lambda of a CutMix at alpha 1: what its box leaves of the image."""
    top, bottom, left, right = rand_bbox((side, side), np.random.beta(1.0, 1.0))
    return float(1 - (bottom - top) * (right - left) / side**2)


PARTS: dict[str, Callable[[argparse.Namespace], tuple[list[Row], Figure]]] = {
    "crops": crops,
    "randaugment": randaugment,
    "weights": weights,
    "mixing": mixing,
}

if __name__ == "__main__":
    main()
