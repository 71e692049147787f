"""The invariant through the real trainer: the number of ranks decides only who computes a micro-batch."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from dali_train.checkpoint.format import load_newest
from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.extras.ledger.hook import ledger_files
from dali_train.extras.proof.prove import prove
from tests.conftest import StartTraining, Train, encoded, final_weights, relative_differences, write_shard
from tests.helpers import (
    BF16_ALL_REDUCE,
    CONVOLUTIONAL,
    EXCLUDED,
    FAST,
    FAST_UNCOMPILED,
    FLOAT32_BOUND,
    FLOAT64_BOUND,
    OFTEN,
    PIPELINE,
    REGULARISED,
    SHARDED,
    Compared,
    events,
    extended,
    in_tiers,
    kill_after_step_4,
    largest_difference,
    losses,
    samples,
    state_difference,
    words,
)

THREE_STEPS = words("--run.max_steps 3 --precision.dtype fp64 --run.eval_every_epochs none")


def first_moments(directory: Path) -> torch.Tensor:
    """LAMB's, of all weights; after one step a tenth of the gradient."""
    newest, _ = load_newest(directory / "checkpoints")
    assert newest is not None
    return torch.cat([t.flatten() for name, t in sorted(newest.state["optimizer"].items()) if name.endswith("exp_avg")])


@pytest.mark.thorough
def test_an_all_reduce_in_bf16_loses_no_more_than_its_rounding(train: Train, tmp_path: Path) -> None:
    """It rounds by 2**-8 at most: what a rank sends, and the sums over ranks."""
    first_step = ("--run.max_steps", "1", "--optimizer.clip_grad_norm", "None", "--batch.micro_batch", "2")
    train("one", *first_step, *BF16_ALL_REDUCE)
    train("four", *first_step, *BF16_ALL_REDUCE, ranks=4)
    one, four = (first_moments(tmp_path / name) for name in ("one", "four"))
    assert 0 < (one - four).norm() / one.norm() < 2**-8 * 4**0.5  # measured: 4.3e-3, and 3.0e-3 on 2 ranks


# Of a moving average, too, which averages the running statistics.
BATCH_NORM = words("--model.name test_resnet --ema.decay 0.5 --ema.lookahead true")
BATCH_NORM_ALONE = Compared(BATCH_NORM, resumed=True, bound=None)
# Convolutions and statistics round differently for another number of images: 1.1e-13 was seen, on an AMD EPYC.
BATCH_NORM_BOUND = 2e-13
BATCH_NORM_ON_SEVERAL = {
    "three": Compared(BATCH_NORM, 3, bound=BATCH_NORM_BOUND),
    "sharded": Compared(BATCH_NORM, 3, SHARDED, bound=BATCH_NORM_BOUND),
}


@pytest.mark.thorough
def test_batch_norm_does_not_depend_on_ranks(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """Nor on whether the model is sharded, which any can be, nor on a resume."""
    config, two_steps = extended(tiny_config, CONVOLUTIONAL), (*THREE_STEPS, "--run.max_steps", "2")
    two_steps += BATCH_NORM
    train("one", *two_steps, config=config)
    for num_steps in ("1", "2"):
        train("resumed", *two_steps, "--run.max_steps", num_steps, config=config)
    assert state_difference(tmp_path / "one", tmp_path / "resumed") == 0
    for name, (_, ranks, layout, _, _) in BATCH_NORM_ON_SEVERAL.items():
        train(name, *two_steps, *layout, ranks=ranks, config=config)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
        assert state_difference(tmp_path / "one", tmp_path / name) < BATCH_NORM_BOUND
    one, three = final_weights(tmp_path / "one"), final_weights(tmp_path / "three")
    running = [name for name in one if "running" in name]
    assert running and not torch.equal(one[running[0]], torch.zeros_like(one[running[0]]))
    differences = relative_differences(one, three)
    assert max(differences[name] for name in running) < BATCH_NORM_BOUND


# In which elements of a tensor gradient and update agree in sign decides the step of all of them. Without the keys'
# biases, whose gradients are rounding and nothing else, that is the same on any number of ranks.
SIGNS_COUNT = Compared((*REGULARISED, "--optimizer.name", "clamb", "--model.kwargs.qkv_bias", "false"), 3)


@pytest.mark.thorough
def test_a_cautious_optimizer_is_exact_where_every_weight_has_a_gradient(train: Train, tmp_path: Path) -> None:
    options, ranks, _, _, bound = SIGNS_COUNT
    train("one", *options, *THREE_STEPS)
    train("several", *options, *THREE_STEPS, ranks=ranks)
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    assert bound is not None and state_difference(tmp_path / "one", tmp_path / "several") < bound


def test_accumulation_equals_one_big_batch(train: Train, tmp_path: Path) -> None:
    # Mixup pairs images within a micro-batch and dropout is drawn for one, so both are off here.
    plain = ("--mixup.alpha", "0", *THREE_STEPS)
    off = tuple(f"--model.kwargs.{name}_rate=0" for name in ("pos_drop", "proj_drop", "drop_path"))
    train("accumulated", *plain, *off, "--batch.micro_batch", "2")
    train("whole", *plain, *off, "--batch.micro_batch", "32")
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12)
    assert largest_difference(tmp_path / "accumulated", tmp_path / "whole") < FLOAT64_BOUND


FOUR_STEPS = ("--run.max_steps", "4")


def assert_same_run(a: Path, b: Path, num_steps: int = 11) -> None:
    """Bit for bit: all that a checkpoint holds, samples, and the losses on the way."""
    assert state_difference(a, b) == 0
    assert samples(a) == samples(b) and len(samples(a)) == num_steps * 8
    assert losses(a) == losses(b)
    assert_same_ledger(a, b)


def assert_same_ledger(a: Path, b: Path) -> None:
    """The same files with the same bytes, which are 16 bits of each value: rounding in float64 does not reach them."""
    files, others = ledger_files(a), ledger_files(b)
    assert files.keys() == others.keys()
    for epoch, path in files.items():
        assert path.read_bytes() == others[epoch].read_bytes(), f"epoch {epoch}"


def assert_resumes(train: Train, undisturbed: Path, *options: str, ranks: int = 1, num_steps: int = 11) -> None:
    """Lose what a run has saved after step 4, as if the machine had gone then: it ends with the same bits again."""
    resumed = undisturbed.with_name("resumed")
    shutil.copytree(undisturbed, resumed, symlinks=True)
    for path in (resumed / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 4:
            shutil.rmtree(path)
    assert "resuming from step 4" in train("resumed", *options, ranks=ranks)
    assert_same_run(undisturbed, resumed, num_steps)


ALONE = Compared(REGULARISED, resumed=True, bound=None)


@pytest.mark.thorough
def test_a_run_that_goes_on_ends_with_the_same_bits(train: Train, tmp_path: Path) -> None:
    train("undisturbed", *ALONE.options, *OFTEN)
    train("resumed", *ALONE.options, *OFTEN, *FOUR_STEPS)
    assert "resuming from step 4" in train("resumed", *ALONE.options, *OFTEN)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "resumed")


IN_BF16 = Compared((*REGULARISED, *FAST_UNCOMPILED, *BF16_ALL_REDUCE), 4, resumed=True, bound=None)


@pytest.mark.thorough
def test_an_all_reduce_in_bf16_and_four_ranks_resume_with_the_same_bits(train: Train, tmp_path: Path) -> None:
    options, ranks = (*OFTEN, *IN_BF16.options), IN_BF16.ranks
    train("undisturbed", *options, ranks=ranks)
    assert_resumes(train, tmp_path / "undisturbed", *options, ranks=ranks)


FAST_ALONE = Compared(FAST, resumed=True, bound=None)
# FSDP takes no channels_last, which also sums in another order.
FAST_AND_SHARDED = Compared(FAST[:4], 2, SHARDED, bound=FLOAT32_BOUND)


@pytest.mark.thorough
def test_the_options_for_speed_resume_with_the_same_bits_and_do_not_depend_on_ranks(
    train: Train, tmp_path: Path
) -> None:
    steps = (*OFTEN, "--run.max_steps", "7")
    train("one", *FAST, *steps)
    assert_resumes(train, tmp_path / "one", *FAST, *steps, num_steps=7)
    # Compiled dropout draws other numbers than eager dropout, but they belong to the micro-batch all the same.
    several = (*FAST, *steps, "--run.eval_every_epochs", "None")
    train("replicated", *several, "--run.max_steps", "2", ranks=2)
    assert losses(tmp_path / "replicated") == pytest.approx(losses(tmp_path / "one")[:2], rel=1e-5)
    options, ranks, layout, _, bound = FAST_AND_SHARDED
    train("two", *options, *several[len(FAST) :], *layout, ranks=ranks)
    assert samples(tmp_path / "one") == samples(tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert bound is not None and largest_difference(tmp_path / "one", tmp_path / "two") < bound


# Options of the recipe, those that have nothing to do with each other in one run.
AUGMENTED = REGULARISED + words(
    "--data.augment rand-m9-mstd0.5-inc1 --data.color_jitter 0.3 --data.random_erasing 0.5 "
    "--data.random_erasing_fill noise --mixup.cutmix_alpha 1 "
    "--mixup.probability 0.8 --mixup.until_epoch 1 --loss.label_smoothing 0.1 --loss.class_weights balanced "
    "--optimizer.name adamw --optimizer.lr 1e-3 --schedule.name cosine --ema.decay 0.9 --model.init portable "
    "--data.alternating_flip true --optimizer.groups *.bias,2,0.5 --data.eval_views mirrored-and-shifted "
    "--data.vertical_flip 0.3 --data.hue_jitter 0.1 --data.color_jitter_probability 0.8 --data.grayscale 0.2 "
    "--data.gaussian_blur 0.2 --data.interpolation random --model.head_scale 0.5 --hooks.ledger true"
)
REPEATED = REGULARISED + words(
    "--data.shuffle balanced "
    "--data.repeats 2 --data.crop_side 30 --data.crop_padding 4 --data.crop_padding_mode reflect "
    "--data.interpolation bicubic --mixup.alpha 0 "
    "--mixup.cutmix_alpha 1 --loss.name binary-cross-entropy --loss.target_threshold 0.2 "
    "--loss.sum_classes true --loss.positive_weight 2 --model.head_bias -1 --run.best_by loss "
    "--optimizer.clip_mode agc --optimizer.clip_grad_norm 0.05 "
    "--optimizer.layer_decay 0.7 --schedule.name polynomial --schedule.power 2 "
    "--ema.decay 0.9 --ema.power 1 --ema.every_steps 2 --ema.lookahead true --hooks.ledger true"
)
BLOCK_ORDER = words("--data.shuffle block --data.block_images 4 --data.window_blocks 2")
IN_BLOCKS = (
    *REGULARISED,
    *BLOCK_ORDER,
    *words("--data.repeats 2 --data.crop inception --data.augment big-vision --model.kwargs.dynamic_img_size true"),
    *words("--data.progressive 0.5,16 1,24 --optimizer.clip_mode value --optimizer.clip_grad_norm 0.01"),
)
# Registers, rotary embeddings, normalised queries and keys, LayerScale.
VIT5_WITH_MUON = REGULARISED + words(
    "--model.name dali_vit5_small_patch16 --model.kwargs.init_values 0.1 --optimizer.exclude_vectors and-tokens "
    "--optimizer.name nmuon --optimizer.kwargs.fallback_lr_scale 0.1 "
    "--schedule.name warmup-stable-decay --schedule.decay_epochs 2"
)


# {root} is the dataset's: it is mixed with itself.
MIXED = (
    *REGULARISED,
    *("--data.mix", "1,{root},2", "2,{root},1", "3,{root},0.5", "--data.mix_until", "1,1,0,1"),
    *words("--data.epoch_images 64 --hooks.ledger true"),
)


# What is compared with one process: data parallelism, and a model that is split.
TABLE = {
    "augmented": [Compared(AUGMENTED, 7), Compared(AUGMENTED, 4, (*PIPELINE, *SHARDED))],
    "repeated": [Compared(REPEATED, 3)],
    "in-blocks": [Compared(IN_BLOCKS, 3), Compared(IN_BLOCKS, 2, SHARDED)],
    "mixed": [Compared(MIXED, 3)],
    "vit5-with-muon": [Compared(VIT5_WITH_MUON, 4), Compared(VIT5_WITH_MUON, 2, PIPELINE)],
}


@pytest.mark.parametrize("name", in_tiers(TABLE, "repeated"))
def test_what_differs_between_ranks_is_rounding(name: str, train: Train, dataset: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    train("one", *(option.format(root=dataset) for option in TABLE[name][0].options), *THREE_STEPS)
    assert len(samples(one)) == 3 * 8
    for number, (formats, ranks, layout, _, bound) in enumerate(TABLE[name]):
        options = [option.format(root=dataset) for option in formats]
        several = tmp_path / f"several-{number}"
        audits = () if layout else ("--run.audit_every_steps", "1")
        train(several.name, *options, *THREE_STEPS, *layout, *audits, ranks=ranks)
        assert samples(one) == samples(several)
        assert losses(several) == pytest.approx(losses(one), rel=1e-12)
        assert_same_ledger(one, several)
        assert bound is not None and state_difference(one, several) < bound
        assert prove(several, dataset=None, all_draws=True)


# A model without a product of matrices, which each class of processor sums in an order of its own. It looks at one
# pixel.
COLOURS = """
import torch
from timm.models import register_model

class Colours(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 3 * num_classes).reshape(num_classes, 3))
        self.bias = torch.nn.Parameter(torch.zeros(num_classes))

    def forward(self, images):
        return (images[:, None, :, 3, 3] * self.weight).sum(2) + self.bias

@register_model
def tests_colours(pretrained=False, num_classes=5, **kwargs):
    return Colours(num_classes)

config = replace(config, model=ModelConfig(name="tests_colours"))
"""
LITERAL = {
    "losses": [1.413334941576, 1.458455803152, 1.367746930200, 1.455779175152, 1.384772374325],
    "loss": 1.367945843854,
    "ema_loss": 1.374060612215,
    "top1": 6 / 13,
}


def test_a_run_has_the_numbers_of_earlier_versions(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """Literal values, on every machine: each image has one colour, which no decoder, resize or crop changes. A change
    that moves them gives every user's runs other results."""
    for split, count in (("train", 50), ("validation", 13)):
        colours = [(5 * i, 255 - 3 * i, 40 * (i % 5)) for i in range(count)]
        records = [(encoded(Image.new("RGB", (40, 36), one), "PNG"), 1 + i % 5) for i, one in enumerate(colours)]
        write_shard(tmp_path / "colours" / split / f"{split}-00000-of-00001", records)
    build_index(tmp_path / "colours")
    options = ("--data.root", str(tmp_path / "colours"), "--precision.dtype", "fp64", "--run.max_steps", "5")
    options += words("--ema.decay 0.9 --loss.label_smoothing 0.1 --optimizer.clip_grad_norm 0.3")
    train("run", *options, config=extended(tiny_config, COLOURS))
    result = events(tmp_path / "run", "eval")[-1]
    found = {"losses": losses(tmp_path / "run"), **{name: result[name] for name in ("loss", "ema_loss", "top1")}}
    for name, value in LITERAL.items():
        assert found[name] == pytest.approx(value, rel=1e-6), found  # float32 has the pixels, to 6e-8


KILLED = Compared(
    (
        *AUGMENTED,
        *words("--data.repeats 2 --data.progressive 2,16 4,24 --model.kwargs.dynamic_img_size true"),
        *("--data.exclude", EXCLUDED),
        *("--data.mix", "1,{root},2", "2,{root},1", "--data.mix_until", "1,1,0", "--data.epoch_images", "48"),
    ),
    2,
    resumed=True,
    bound=None,
)


def test_a_run_with_a_recipes_options_whose_ranks_were_killed_ends_with_the_same_bits(
    start_training: StartTraining, train: Train, dataset: Path, tiny_config: Path, tmp_path: Path
) -> None:
    ranks = KILLED.ranks
    options = (*(option.format(root=dataset) for option in KILLED.options), *OFTEN, "--run.max_steps", "7")
    train("undisturbed", *options, ranks=ranks)
    kill_after_step_4(start_training, tiny_config, "killed", *options, ranks=ranks)
    resumed = train("killed", *options, "--data.local_copy", str(tmp_path / "disk"), ranks=ranks)
    assert "resuming from step" in resumed and resumed.count("copying") == 1
    assert_same_run(tmp_path / "undisturbed", tmp_path / "killed", num_steps=7)
    assert prove(tmp_path / "killed", dataset=None, all_draws=True)


IN_BLOCK_ORDER = Compared(BLOCK_ORDER, 2, resumed=True, bound=None)


@pytest.mark.thorough
def test_block_order_read_ahead_and_local_copy_keep_the_bits(train: Train, tmp_path: Path) -> None:
    ranks = IN_BLOCK_ORDER.ranks
    train("plain", *BLOCK_ORDER, *OFTEN, "--data.read_ahead_mb", "0", ranks=ranks)
    copied = (*IN_BLOCK_ORDER.options, *OFTEN, "--data.read_ahead_mb", "1", "--data.local_copy", str(tmp_path / "disk"))
    copied += ("--run.audit_every_steps", "2")
    first = train("copied", *copied, *FOUR_STEPS, ranks=ranks)
    second = train("copied", *copied, ranks=ranks)
    assert first.count("copying") == 1 and "resuming from step 4" in second
    assert_same_run(tmp_path / "plain", tmp_path / "copied")
    # One process alone, asked for the same steps, names the same images: in each epoch every one once.
    config = load_config(tmp_path / "tiny-config.py")
    config = replace(config, data=replace(config.data, shuffle="block", block_images=4, window_blocks=2))
    micro_batches = MicroBatches(Split(config.data.root, "train").rows, config)
    named = {(s, k): micro_batches(s, k).images.tolist() for s in range(11) for k in range(8)}
    assert samples(tmp_path / "plain") == named
    stream = [image for images in named.values() for image in images]
    assert all(sorted(stream[epoch * 50 : (epoch + 1) * 50]) == list(range(50)) for epoch in range(7))
