"""What `tools.bench.gpu` measures: the parts, what each needs, and the order for a time that is short."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

CALL_S = 540  # with --minutes a call begins nothing that would end later: ten minutes, less what is done before it
ORDERS = {
    30: (
        "model-kernels model-b16-recipe model-b16 model-b16-fast model-b16-eager model-b16-model model-b32 model-r50 "
        "smoke-whole parity doctor train resume data-original data-stored-256 step-b16 step-b32-stored-256"
    ),
    45: (
        "model-kernels model-b16-recipe model-b16 model-b16-fast model-b16-eager model-b16-model model-b32 model-r50 "
        "model-b16-flash model-b16-512 model-b16-fp16 model-b16-depth model-r50-heuristics "
        "smoke-whole parity doctor train resume data-original data-stored-256 step-b16 step-b32-stored-256 "
        "step-b32-original step-r50-original smoke-box-0 smoke-box-65 smoke-box-100 model-b16-autotune"
    ),
}
"""Names of parts by --minutes, in the order of what is most worth knowing. Their `expected_s` leave time for the start
of a machine, for uploads between calls and for tools/bench/pack_gpu.sh unpack."""

# How each dataset is made from the one archive; ImageNet's photographs have 468 x 401 pixels on average.
SETS = {
    "original": [],
    "stored-256": ["--short-side", "256", "--quality", "90"],
    "raw-256": ["--short-side", "256", "--format", "raw"],
}
QUICK_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="data", train_size=32, eval_resize_to=36, eval_size=32, num_threads=1),
    model=ModelConfig(
        name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=16, micro_batch=8),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="run", epochs=4, device="cpu"),
)
"""
RESNET_CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root="data"),
    model=ModelConfig(name="resnet50", channels_last=True),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(warmup_epochs=1),
    batch=BatchConfig(global_batch=8192, micro_batch=256),
    run=RunConfig(dir="run", epochs=90),
)
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    title: str
    words: list[str]  # after "python"
    limit_s: int
    expected_s: int = 60  # by estimate, on an H100; with --minutes it is not begun with less than that left
    rounds: bool = False  # the tool appends its rounds as JSON lines to --json FILE
    environment: dict[str, str] = field(default_factory=dict)
    notable: str = ""  # lines of the error output that belong into the report, a pattern
    makes: Path | None = None  # what later parts read: made again if it is gone
    needs: str = ""  # the part that must have ended well before

    @property
    def needs_data(self) -> bool:
        """Whether it needs DALI, what else reads images, or images."""
        return not self.name.startswith("model-")


def in_order(parts: list[Part], names: Iterable[str]) -> list[Part]:
    """The parts of these names, each after those that it needs."""
    by_name, ordered = {part.name: part for part in parts}, dict[str, Part]()

    def add(name: str) -> None:
        if name in by_name and name not in ordered:
            add(by_name[name].needs)
            ordered[name] = by_name[name]

    for name in names:
        add(name)
    return list(ordered.values())


def dataset_parts(options: argparse.Namespace, work: Path) -> tuple[dict[str, Path], list[Part]]:
    """The datasets by name, given or in `work`; and what makes those that are missing."""
    given = {name: getattr(options, name.replace("-", "_")) for name in SETS}
    images = 64 if options.quick else 512
    made_of = options.archive.name if options.archive else f"{images} generated images"
    folder = work / f"{images} generated images".replace(" ", "-")
    if options.archive:
        source = ["imagenet", "--train-archive", str(options.archive.resolve())]
    else:
        source = ["folder", "--train", str(folder), "--validation-fraction", "0.1"]
    sets, parts = {}, []
    for name, how in SETS.items():
        if given[name] is not None:
            sets[name] = given[name].resolve()
        elif options.archive or not any(given.values()):
            sets[name] = work / f"{name} of {made_of}".replace(" ", "-")
            parts.append(
                Part(
                    name=f"make-{name}",
                    title=f"{name} of {made_of}",
                    words=["tools/make_tfrecords.py", *source, *how, "--out", str(sets[name])],
                    limit_s=300,
                    expected_s=20,
                    makes=sets[name] / "dataset.json",
                    needs="" if options.archive else "make-images",
                )
            )
    if parts and not options.archive:
        words = ["-m", "tools.bench.generated", str(folder), "--images", str(images)]
        parts.insert(0, Part(name="make-images", title=f"{images} JPEGs", words=words, limit_s=300, makes=folder))
    return sets, parts


def plan(options: argparse.Namespace, work: Path) -> list[Part]:
    """All parts, in the order of what is most worth knowing."""
    sets, making = dataset_parts(options, work)
    original = "original" if "original" in sets else next(iter(sets))
    smoke = smoke_parts(options, sets, original)
    parts = [*model_parts(options, work), *making, smoke[0], *training_parts(options, sets, original, work)]
    scale = ["--loads", "0.65", "--batch", "8", "--batches", "4", "--rounds", "1"]
    scale = ["--device", options.device, *(scale if options.quick else ["--rounds", "2"])]
    for name, root in sets.items():
        words = ["-m", "tools.bench.gpu_data", *scale, "--data", f"{name}={root}"]
        title, needs = f"the data path alone, images from {name}", f"make-{name}"
        parts.append(
            Part(name=f"data-{name}", title=title, words=words, limit_s=300, expected_s=100, rounds=True, needs=needs)
        )
    parts += [*step_parts(options, sets, original, work), *smoke[1:]]
    startup = ["--rounds", "1"] if options.quick else ["--rounds", "2", "--model", "vit_base_patch16_224"]
    words = ["-m", "tools.bench.startup", *startup]
    parts.append(
        Part(name="startup", title="command to first step", limit_s=300, expected_s=120, words=words, rounds=True)
    )
    return parts


# What the model alone is measured with: a recipe and changes to it, in bf16 where they do not say otherwise.
_PLAIN = "--model.kwargs.proj_drop_rate 0 --model.kwargs.pos_drop_rate 0"
_FAST = f"{_PLAIN} --model.fast_norm true"
_MODELS = {
    "b16-recipe": ("vit-b16", ""),
    "b16": ("vit-b16", _PLAIN),
    "b16-fast": ("vit-b16", f"{_FAST} --profile"),
    "b16-eager": ("vit-b16", f"{_PLAIN} --model.compile none"),
    "b16-model": ("vit-b16", f"{_FAST} --model.compile model"),
    "b16-flash": ("vit-b16", f"{_FAST} --model.attention flash"),
    "b32": ("vit-b32", f"{_FAST} --batch.micro_batch 1024"),
    "r50": ("resnet50", ""),
    "r50-heuristics": ("resnet50", "--run.deterministic true"),  # cuDNN chooses without trying
    "b16-512": ("vit-b16", f"{_FAST} --batch.micro_batch 512"),
    "b16-fp16": ("vit-b16", "--precision.dtype fp16"),
    "b16-depth": ("vit-b16", f"{_FAST} --model.kwargs.drop_path_rate 0.1"),
    "r50-eager": ("resnet50", "--model.compile none"),
    "b16-autotune": ("vit-b16", f"{_FAST} --model.compile autotune"),
}


def model_parts(options: argparse.Namespace, work: Path) -> list[Part]:
    """Products, attention and models alone, without data and optimizer."""
    quick = ["--device", options.device, *(["--quick"] if options.quick else [])]
    words = ["-m", "tools.bench.kernels", *quick]
    parts = [Part(name="model-kernels", title="products and attention alone", words=words, limit_s=120, rounds=True)]
    for name, (config, changes) in _MODELS.items():
        words = ["-m", "tools.bench.model", *recipe(config, options, work), "--device", options.device]
        words += ["--precision.dtype", "bf16"]
        # The rehearsal's model has no dropout to leave out.
        words += changes.split() if not options.quick else ["--model.compile", "none"]
        tuned = "autotune" in changes
        parts.append(
            Part(
                name=f"model-{name}",
                title=f"{config} alone: {changes or 'as it is'}",
                words=words,
                limit_s=300 if tuned else 150,
                expected_s=200 if tuned else 75 if config == "resnet50" or "compile model" in changes else 45,
                rounds=True,
            )
        )
    return parts


def smoke_parts(options: argparse.Namespace, sets: dict[str, Path], original: str) -> list[Part]:
    """Decoding, each kind in a process of its own, since a fault may end it."""
    parts = []
    for decode, load in (("whole", 0.65), ("box", 0.0), ("box", 0.65), ("box", 1.0)):
        name = f"smoke-{decode}" + (f"-{100 * load:.0f}" if decode == "box" else "")
        words = ["-m", "tools.bench.smoke", str(sets[original]), "--decode", decode, "--load", str(load)]
        words += ["--device", options.device]
        title = f"decoding {'whole images' if decode == 'whole' else f'boxes, {load:.0%} to the hardware decoder'}"
        parts.append(
            Part(
                name=name,
                title=title,
                words=words,
                limit_s=120,
                expected_s=40,
                environment={"DALI_NVIMGCODEC_LOG_LEVEL": "4"},
                notable=r"nvJPEG version|HW decoder|num_hw_engines|rror",
                needs=f"make-{original}",
            )
        )
    return parts


def training_parts(options: argparse.Namespace, sets: dict[str, Path], original: str, work: Path) -> list[Part]:
    """Whether what trains on the CPU trains here: the data path's tests, doctor, a short training and its resume."""
    # A test that crashes, hangs or breaks CUDA takes its process with it, and xdist starts another for those behind.
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-rs", "-o", "addopts=-q", "tests/test_gpu.py"]
    pytest += ["-n", "3", "--dist", "worksteal", "--timeout", "90", "--timeout-method", "thread"]
    train = [*recipe("vit-b16", options, work), "--data.root", str(sets[original])]
    train += ["--run.dir", str(work / "run"), *([] if options.quick else ["--batch.global_batch", "1024"])]
    doctor = ["-m", "dali_train", "doctor", *train[:4], "--run.dir", str(work / "run-of-doctor")]
    # Each step of so large a batch is several epochs of a small dataset, and evaluations save.
    train = ["-m", "dali_train", "train", *train, "--run.eval_every_epochs", "None"]
    train += ["--hooks.log_every_steps", "2", "--run.checkpoint_every_steps", "6"]
    made = f"make-{original}"
    return [
        Part(
            name="parity",
            title="tests of the GPU's data path and of resuming",
            limit_s=300,
            expected_s=150,
            words=pytest,
            environment={} if options.device == "cuda" else {"GPU_TESTS_ON": options.device},
        ),
        Part(name="doctor", title="doctor, ViT-B/16", limit_s=120, words=doctor, needs=made),
        Part(
            name="train",
            title="12 steps of ViT-B/16 in FP16",
            limit_s=240,
            expected_s=90,
            words=[*train, "--run.max_steps", "12"],
            needs=made,
        ),
        Part(
            name="resume",
            title="resumed to step 16",
            limit_s=150,
            words=[*train, "--run.max_steps", "16"],
            needs="train",
        ),
    ]


def step_parts(options: argparse.Namespace, sets: dict[str, Path], original: str, work: Path) -> list[Part]:
    """The product's complete loop, on real and on synthetic data."""
    stored = "stored-256" if "stored-256" in sets else original
    large = [] if options.quick else ["--batch.micro_batch", "1024"]
    scale = ["--rounds", "1"] if options.quick else ["--rounds", "2", "--model.fast_norm", "true"]
    parts = []
    for name, config, images, words, expected_s in (
        ("b16", "vit-b16", original, ["--only", "trainer", "bare"], 190),
        ("b32-original", "vit-b32", original, ["--only", "trainer", *large], 150),
        ("b32-stored-256", "vit-b32", stored, ["--only", "trainer", *large], 150),
        ("r50-original", "resnet50", original, ["--only", "trainer"], 150),
    ):
        # Steps as with 8 GPUs; a rehearsal compiles nothing, which takes minutes on a CPU.
        batch = [] if options.quick else ["--batch.global_batch", "8192" if large and "b32" in name else "4096"]
        compiled = "none" if options.quick else "blocks"
        words = ["tools/bench_step.py", *recipe(config, options, work), "--data.root", str(sets[images]), *words]
        words += [*batch, "--precision.dtype", "bf16", "--steps", "1", "--model.compile", compiled, *scale]
        parts.append(
            Part(
                name=f"step-{name}",
                title=f"{config} from {sets[images].name}, compile {compiled}",
                limit_s=300,
                expected_s=expected_s,
                rounds=True,
                words=words,
                needs=f"make-{images}",
            )
        )
    return parts


def recipe(name: str, options: argparse.Namespace, work: Path) -> list[str]:
    if name != "resnet50" and not options.quick:
        return ["--config", f"configs/{name}.py"]
    path = work / ("quick.py" if options.quick else f"{name}.py")
    path.write_text(QUICK_CONFIG if options.quick else RESNET_CONFIG)
    return ["--config", str(path)]
