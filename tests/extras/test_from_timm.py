"""`dali-train init --from-timm`: every argument of timm's train.py, and rates, optimizers and draws beside timm's."""

import inspect
import random
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from scipy.stats import ks_2samp
from timm.data import resolve_data_config
from timm.data.auto_augment import rand_augment_transform
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.loss._loss_factory import LOSS_TYPES, MULTI_LABEL_LOSS_TYPES
from timm.loss.class_weights import CLASS_WEIGHT_METHOD_KINDS
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import nn

from dali_train.cli import main
from dali_train.config import Config, LossConfig, load_config
from dali_train.data.loading.augment import OPERATORS
from dali_train.data.sampling.draws import draw_mixing
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.sampling.policy import policy_of
from dali_train.errors import ConfigError
from dali_train.extras.timm import timm_arguments
from dali_train.extras.timm.from_timm import _REASONS, SAME, Translation, config_text, write_translation
from dali_train.extras.timm.timm_arguments import DEFAULTS, EARLIER, read_arguments
from dali_train.training.optim import make_optimizer
from dali_train.training.schedule import learning_rate
from tests.convert.files import write_folder
from tests.sampling.test_sampling import rows_of

# The arguments of train.py in the repository at aa4b5850; timm's package does not hold the script.
NAMES = """
aa amp amp_dtype aug_repeats aug_splits batch_size bce_loss bce_pos_weight bce_sum bce_target_thresh bn_eps
bn_momentum channels_last checkpoint_hist class_map clip_grad clip_mode color_jitter color_jitter_prob config
cooldown_epochs crop_pct cutmix cutmix_minmax data data_dir dataset dataset_download dataset_trust_remote_code
decay_epochs decay_milestones decay_rate device device_modules dist_bn distill_loss_weight drop drop_block
drop_connect drop_path epoch_repeats epochs eval_metric experiment fast_norm fuser gaussian_blur_prob gp
grad_accum_steps grad_checkpointing grayscale_prob head_init_bias head_init_scale hflip img_size in_chans
initial_checkpoint input_img_mode input_key input_size interpolation jsd_loss kd_distill_type kd_loss_type
kd_model_name kd_student_feature_dim kd_teacher_feature_dim kd_temperature kd_token_distill_type layer_decay
layer_decay_min_scale layer_decay_no_opt_scale local_rank log_interval log_wandb lr lr_base lr_base_scale
lr_base_size lr_cycle_decay lr_cycle_limit lr_cycle_mul lr_k_decay lr_noise lr_noise_pct lr_noise_std mean min_lr
mixup mixup_mode mixup_off_epoch mixup_prob mixup_switch_prob model model_dtype model_ema model_ema_decay
model_ema_force_cpu model_ema_warmup model_kwargs momentum naflex_loader naflex_loss_scale naflex_max_seq_len
naflex_patch_size_probs naflex_patch_sizes naflex_patchify_channels_first naflex_train_seq_lens no_aug no_ddp_bb
no_prefetcher no_resume_opt num_classes opt opt_betas opt_eps opt_kwargs output patience_epochs pin_mem pretrained
pretrained_path ratio recount recovery_interval remode reprob resplit resume save_images scale sched
sched_on_updates seed smoothing split_bn start_epoch std sync_bn synchronize_step target_key task_loss_weight
torchcompile torchcompile_mode torchscript train_batch_sizes train_batches_per_epoch train_crop_mode train_img_sizes
train_interpolation train_num_samples train_size_probs train_size_random_mix train_size_schedule
train_size_schedule_spread train_split tta use_multi_epochs_loader val_interval val_num_samples val_split
validation_batch_size variable_batch_loss_scale vflip wandb_project wandb_resume_id wandb_tags warmup_epochs
warmup_lr warmup_prefix weight_decay worker_seeding workers
"""

# What 1.0.31 has added: by its release notes, and by the tests in its source distribution.
ADDED = """
class_stats loss loss_class_weight loss_pos_weight loss_weight_power lr_decay_fn lr_stable_timescale
multilabel_threshold poly_epsilon poly_gamma save_epochs stop_epoch target_format task
"""

# Published argument lists: RSB's procedure A2 and one with AGC as in its C, the examples in timm's documentation
# (training_script), its hyper-parameters for searching for better baselines (sbb) and for ResNets (ra2).
RSB_A2 = (
    "python -m torch.distributed.launch --nproc_per_node=4 train.py /imagenet --model resnet50 "
    "--aa rand-m7-mstd0.5-inc1 --mixup .1 --cutmix 1.0 --aug-repeats 3 --remode pixel --reprob 0.0 --crop-pct 0.95 "
    "--drop-path .05 --smoothing 0.0 --bce-loss --bce-target-thresh 0.2 --opt lamb --weight-decay .02 "
    "--sched cosine --epochs 300 --lr 5e-3 --warmup-lr 1e-4 -b 512 -j 16 --amp --channels-last"
)
AGC = (
    "torchrun --nproc-per-node 2 --nnodes 2 train.py --model resnet50 --lr 0.4 --weight-decay 5e-5 --clip-grad 0.02 "
    "--clip-mode agc --epochs 400 --mixup 0.2 --aa rand-m9-mstd0.5-inc1 --reprob 0.35 -b 256 --amp --min-lr 1e-6"
)
MOBILENET = (
    "./distributed_train.sh 2 /imagenet/ --model mobilenetv3_large_100 -b 512 --sched step --epochs 600 "
    "--decay-epochs 2.4 --decay-rate .973 --opt rmsproptf --opt-eps .001 -j 7 --warmup-lr 1e-6 --weight-decay 1e-5 "
    "--drop 0.2 --drop-connect 0.2 --model-ema --model-ema-decay 0.9999 --aa rand-m9-mstd0.5 --remode pixel "
    "--reprob 0.2 --amp --lr .064 --lr-noise 0.42 0.9"
)
JSD = (
    "./distributed_train.sh 2 --data-dir /imagenet -b 64 --model resnet50 --sched cosine --epochs 200 --lr 0.05 --amp "
    "--remode pixel --reprob 0.6 --aug-splits 3 --aa rand-m9-mstd0.5-inc1 --resplit --split-bn --jsd --dist-bn reduce"
)
RESNEXT = (
    "./distributed_train.sh 8 --data-dir /imagenet --model resnext50_32x4d --lr 0.6 --warmup-epochs 5 --epochs 240 "
    "--weight-decay 1e-4 --sched cosine --reprob 0.4 --recount 3 --remode pixel --aa rand-m7-mstd0.5-inc1 -b 192 --amp"
)
SBB = """
aa: rand-m8-inc1-mstd1.0-n4
amp: true
amp_impl: native
aug_repeats: 3.0
batch_size: 256
clip_grad: 5.0
color_jitter: null
cooldown_epochs: 10
crop_pct: 0.95
cutmix: 1.0
drop_path: 0.2
epochs: 600
img_size: 256
lr: null
lr_base: 0.0008
lr_base_scale: ''
lr_base_size: 512
min_lr: 5.0e-07
mixup: 0.8
model: vit_base_patch16_rope_reg1_gap_256
opt: nadamw
warmup_epochs: 5.0
"""
SBB_12K = """
aa: rand-m7-inc1-mstd1.0-n3
amp: true
batch_size: 256
bce_loss: true
bce_sum: true
bce_target_thresh: 0.2
clip_grad: 5.0
color_jitter: 0.3
color_jitter_prob: 0.2
cutmix: 1.0
dataset: tfds/imagenet12k
epochs: 150
gaussian_blur_prob: 0.05
grayscale_prob: 0.1
head_init_scale: 0.0
img_size: 256
lr_base: 0.0001
lr_base_size: 512
mixup: 0.2
model: vit_mediumd_patch16_reg4_gap_256
opt: nadamw
"""
RA2 = """
aa: rand-m9-mstd1.0-inc1
batch_size: 352
bn_tf: false
channels_last: true
cooldown_epochs: 10
decay_epochs: 1.0
decay_rate: 0.988
drop: 0.19
drop_path: 0.1
epochs: 700
gp: fast
img_size: 256
lr: 0.082
lr_noise: [0.4, 0.9]
mixup: 0.19
model: ecaresnet26t
model_ema: true
model_ema_decay: 0.999987
native_amp: true
opt: rmsproptf
opt_eps: 0.001
sched: step
"""

# Of MobileNetV4, as used by DTU-MLOPS-12/dtu_mlops_project, who adapted it from timm's author's gist f6705cb65c03.
RA4 = """
aa: rand-m8-inc1-mstd1.0
amp: true
amp_impl: native
batch_size: 128
channels_last: true
drop: 0.25
epochs: 2400
gaussian_blur_prob: 0.05
grayscale_prob: 0.1
lr: null
lr_base: 0.002
lr_base_size: 4096
model: mobilenetv4_conv_small
model_ema: true
model_ema_decay: 0.99995
model_ema_warmup: true
opt: adamw
opt_betas: [0.6, 0.995]
reprob: 0.25
sched_on_updates: true
warmup_lr: 0.0
warmup_prefix: true
weight_decay: 0.06
"""


# As train.py of 1.0.31 writes it, where the task decides smoothing and metric.
NEWEST = """
bce_loss: true
decay_epochs: null
epochs: 12
eval_metric: null
loss: bce
loss_class_weight: inv_freq
loss_pos_weight: '2.0'
lr: 0.1
lr_decay_fn: exp
resume: auto
save_epochs: [4, 8]
sched: wsd
smoothing: null
stop_epoch: 8
task: classification
"""


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        if not text.startswith("\n"):
            return text
        path = tmp_path / "args.yaml"
        path.write_text(text)
        return str(path)

    return write


def translated(source: str, tmp_path: Path, *, ranks: int | None = None) -> tuple[Config, dict[str, str], Namespace]:
    """Return the config that the written file holds, what is lost, and the arguments."""
    arguments, launched, unknown = read_arguments(source, ranks)
    translation = Translation(dict(arguments), launched or 1, lost=unknown)
    translation.translate()
    path = tmp_path / "translated.py"
    path.write_text(config_text(translation, "data", path))
    return load_config(path), translation.lost, Namespace(**arguments)


def test_every_argument_becomes_a_setting_or_has_a_reason_why_not() -> None:
    assert len(NAMES.split()) == 173
    assert set(DEFAULTS) == {*NAMES.split(), *ADDED.split(), *EARLIER.split()}
    text = inspect.getsource(Translation) + inspect.getsource(timm_arguments.read_arguments)
    together = {name for name in DEFAULTS if re.search(rf'self\.{name}\b|"{name}"|\)\[0\]\.{name}\b', text)}
    together |= {"data", "data_dir", "local_rank"}  # the dataset and the rank are those of our command
    assert {*SAME, *_REASONS} | together == set(DEFAULTS)
    assert not set(SAME) & set(_REASONS)
    assert not [name for name in set(_REASONS) & together if name != "train_crop_mode"]


def test_what_the_installed_timm_reads_is_known(tmp_path: Path) -> None:
    """Its functions take arguments by name, schedules and losses too; a new version with another one is noticed."""
    readers = "".join(map(inspect.getsource, (scheduler_kwargs, optimizer_kwargs, resolve_data_config)))
    read = set(re.findall(r"(?:\bcfg\.|getattr\(cfg, ')(\w+)|args\.get\('(\w+)'", readers))
    not_train = {"chans", "crop_mode", "opt_args", "opt_foreach"}  # train.py has no such arguments
    assert {name for names in read for name in names if name} - not_train <= set(DEFAULTS)
    for loss in LOSS_TYPES:
        config, lost, _ = translated(f"--lr 0.1 --loss {loss}", tmp_path)
        named = "" if loss in ("ce", "bce") else f"--loss {loss}"
        assert "".join(lost) == named and (config.loss.name == "binary-cross-entropy") == (loss == "bce")
        several = f"--lr 0.1 --task multilabel --loss {loss}"
        if loss not in MULTI_LABEL_LOSS_TYPES:
            with pytest.raises(ConfigError, match=f"--loss {loss} with --task multilabel"):
                translated(several, tmp_path)
            continue
        config, lost, _ = translated(several, tmp_path)
        assert config.loss.name in ("binary-cross-entropy", *LossConfig.TIMM_LOSSES) and not lost
    for method, kind in CLASS_WEIGHT_METHOD_KINDS.items():
        argument = f"--loss-{kind.replace('_', '-')} {method}"
        config, lost, _ = translated(f"--lr 0.1 --loss bce --class-stats counts.json {argument}", tmp_path)
        assert set(lost) == {"--class-stats counts.json"}
        assert "balanced" in (config.loss.positive_weight, config.loss.class_weights) or method == "effective_num"
    branches = re.findall(r"\bsched (?:==|!=|in) (.*?):\n", inspect.getsource(create_scheduler_v2))
    schedules = set(re.findall(r"'(\w+)'", " ".join(branches)))
    assert len(schedules) == 10
    for schedule in schedules:
        _, lost, _ = translated(f"--lr 0.1 --sched {schedule}", tmp_path)
        assert (f"--sched {schedule}" in lost) == (schedule in ("tanh", "plateau", "rsqrt"))


PUBLISHED = {
    "rsb-a2": (RSB_A2, {"--workers"}),
    "agc": (AGC, set()),
    "mobilenet": (MOBILENET, {"--workers", "--lr-noise", "--drop-connect"}),
    "jsd": (JSD, {"--aug-splits", "--jsd", "--resplit", "--split-bn"}),
    "resnext": (RESNEXT, {"--recount"}),
    "sbb": (SBB, {"amp_impl"}),
    "sbb-12k": (SBB_12K, {"--dataset", "--color-jitter", "--color-jitter-prob"}),
    "ra2": (RA2, {"--lr-noise"}),
    "ra4": (RA4, {"amp_impl"}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lists_translate_and_name_what_they_lose(name: str, source: Any, tmp_path: Path) -> None:
    text, lost = PUBLISHED[name]
    config, named, _ = translated(source(text), tmp_path)
    assert {said.partition(" ")[0] for said in named} == lost
    assert config.model.name in text and config.batch.micro_batch in (64, 128, 192, 256, 352, 512)


def test_what_a_list_becomes(source: Any, tmp_path: Path) -> None:
    a2, _, _ = translated(RSB_A2, tmp_path)
    ours = load_config("rsb-a2")  # from the paper: another threshold of weight decay, final rate, and fixed filter
    assert a2.batch.global_batch == ours.batch.global_batch == 2048 and a2.optimizer.lr == ours.optimizer.lr
    assert (a2.loss, a2.mixup, a2.data.augment, a2.data.repeats) == (
        ours.loss,
        ours.mixup,
        ours.data.augment,
        ours.data.repeats,
    )
    assert a2.data.interpolation == "random" and a2.data.eval_filter == "bicubic" and a2.data.normalise == "imagenet"
    assert a2.optimizer.clip_grad_norm == 1.0, "timm's LAMB clips by itself"
    sbb, _, _ = translated(source(SBB), tmp_path, ranks=8)
    assert sbb.data.color_jitter == 0 and sbb.data.eval_resized == 269 and sbb.batch.global_batch == 2048
    assert (sbb.run.epochs, sbb.schedule.decay_epochs, sbb.schedule.decay_from) == (610, 600, "start")
    ra4, _, _ = translated(source(RA4), tmp_path, ranks=32)
    assert (ra4.optimizer.name, ra4.optimizer.betas, ra4.optimizer.scale_lr) == ("adamw", (0.6, 0.995), "sqrt")
    assert ra4.optimizer.lr == pytest.approx(0.002 / 4) and ra4.ema.warmup and ra4.schedule.step_every == "step"
    assert (ra4.run.epochs, ra4.data.color_jitter, ra4.data.gaussian_blur) == (2405, 0, 0.05)
    large, _, _ = translated(source(SBB_12K), tmp_path)
    assert large.loss.sum_classes and large.model.head_scale == 0 and large.data.gaussian_blur == 0.05
    assert large.data.color_jitter == 0, "timm ignores it beside RandAugment"
    for line, jitter, ignored in (
        ("--aa rand-m9 --color-jitter 0.3", 0.0, {"--color-jitter 0.3"}),
        ("--aa rand-m9", 0.0, set()),
        ("--aa 3a --color-jitter 0.3", 0.3, set()),
    ):
        jittered, lost, _ = translated(f"train.py --lr 0.1 {line}", tmp_path)
        assert (jittered.data.color_jitter, set(lost)) == (jitter, ignored)
    plain, _, _ = translated("train.py --lr 0.1 --smoothing 0 --bce-loss --cooldown-epochs 3 --warmup-prefix", tmp_path)
    assert plain.data.color_jitter == 0.4 and plain.loss.name == "binary-cross-entropy" and plain.run.epochs == 308
    newest, lost, _ = translated(source(NEWEST), tmp_path)
    assert (
        (newest.loss.positive_weight, newest.loss.class_weights) == (2, "balanced")
        and newest.loss.label_smoothing == 0.1
        and newest.run.best_by == "top1"
    )
    assert set(lost) == {"--stop-epoch 8", "--save-epochs 4 8", "--lr-decay-fn exp"}
    teacher, lost, _ = translated(
        "--lr 0.1 --kd-model-name resnet18 --task-loss-weight 0.3 --opt lookahead_adamw --model-kwargs depth=3",
        tmp_path,
    )
    assert teacher.loss.distillation == "soft" and teacher.loss.distillation_weight == 0.7 and not lost
    assert teacher.ema.lookahead and teacher.optimizer.name == "adamw" and teacher.model.kwargs == {"depth": 3}


@pytest.mark.parametrize(
    "line",
    [
        "--sched cosine --warmup-epochs 3 --cooldown-epochs 2 --min-lr 1e-3",
        "--sched cosine --warmup-epochs 3 --warmup-prefix --sched-on-updates --cooldown-epochs 2",
        "--sched poly --decay-rate 1.5 --warmup-epochs 2 --sched-on-updates",
        "--sched step --decay-epochs 2.4 --decay-rate .9 --warmup-epochs 3",
        "--sched step --decay-epochs 4 --warmup-epochs 3 --warmup-prefix --sched-on-updates",
        "--sched multistep --decay-milestones 4 9 --warmup-epochs 2",
        "--sched multistep --decay-milestones 4 9 --warmup-epochs 2 --warmup-prefix",
        "--sched none",
        "--sched wsd --warmup-epochs 2 --min-lr 1e-3",
        "--sched wsd --warmup-epochs 2 --warmup-prefix --decay-epochs 3 --lr-decay-fn linear",
        "--sched wsd --warmup-epochs 2 --decay-epochs 0.3 --lr-decay-fn power --sched-on-updates",
    ],
)
@pytest.mark.parametrize("rate", ["--lr 0.3", "--lr-base 0.1 --lr-base-size 128", "--lr-base 0.1 --opt lamb"])
def test_rates_are_timms(line: str, rate: str, tmp_path: Path) -> None:
    """Of all steps of 12 epochs of 128 images in batches of 2 x 16."""
    config, _, arguments = translated(f"train.py --epochs 12 -b 16 {line} {rate}", tmp_path, ranks=2)
    if not arguments.lr:  # as in train.py
        ratio = 32 / arguments.lr_base_size
        arguments.lr = arguments.lr_base * (ratio**0.5 if arguments.opt == "lamb" else ratio)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=arguments.lr)
    scheduler, num_epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(arguments), updates_per_epoch=4)
    assert config.run.epochs == num_epochs
    for step in range(4 * num_epochs):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, step, 128) == pytest.approx(expected, rel=1e-9), step
        if scheduler is not None and arguments.sched_on_updates:
            scheduler.step_update(step + 1)
        elif scheduler is not None and (step + 1) % 4 == 0:
            scheduler.step((step + 1) // 4)


@pytest.mark.parametrize(
    "line",
    [
        "--opt sgd --weight-decay 1e-4",
        "--opt momentum --momentum 0.8",
        "--opt adamw --opt-betas 0.9 0.95 --weight-decay 0.05",
        "--opt nadamw --weight-decay 0.05 --opt-kwargs caution=True",
        "--opt lamb --weight-decay 0.02 --clip-grad 5",
        "--opt rmsproptf --opt-eps 0.001",
        "--opt lion",
        "--opt adan",
        "--opt muon --weight-decay 0.01",
        "--opt adafactorbv --opt-eps 1e-30",
        "--opt lars --layer-decay 0.7 --weight-decay 0.1",
    ],
)
def test_optimizers_are_timms(line: str, tmp_path: Path) -> None:
    """Their arguments, and the weight decay and the factor of the rate of every weight."""
    config, _, arguments = translated(f"train.py --model test_vit --lr 0.1 {line}", tmp_path)
    model = timm.create_model("test_vit", num_classes=5)
    ours = make_optimizer(model, config.optimizer)
    theirs = create_optimizer_v2(model, **optimizer_kwargs(arguments), **arguments.opt_kwargs)
    own = {"max_grad_norm"}  # the trainer clips
    groups = {
        id(parameter): {name: value for name, value in group.items() if name not in ("params", "param_names", *own)}
        for group in ours.param_groups
        for parameter in group["params"]
    }
    for group in theirs.param_groups:
        for parameter in group["params"]:
            for name, value in group.items():
                if name in groups[id(parameter)] and name != "use_fallback":  # of Muon, which spares the classifier
                    mine = groups[id(parameter)][name]
                    assert mine == value or mine == pytest.approx(value) or list(mine) == list(value), name


@pytest.mark.parametrize("name", ["rsb-a2", "sbb", "agc"])
def test_draws_have_the_distributions_of_timms_transforms(name: str, source: Any, tmp_path: Path) -> None:
    """Crops, angles and lambdas of 20 steps: Kolmogorov and Smirnov find no difference (p over 0.001, seeds fixed)."""
    config, _, arguments = translated(source(PUBLISHED[name][0]), tmp_path)
    config = config.replace({"batch.global_batch": 120, "batch.micro_batch": 120, "data.random_erasing_fill": "mean"})
    rows = rows_of(5000)
    rows["height"], rows["width"] = 375, 500
    micro_batches = MicroBatches(rows, config)
    drawn = [micro_batches(step, 0) for step in range(20)]
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)

    def same(ours: Any, theirs: Any) -> None:
        assert ks_2samp(np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)).pvalue > 1e-3

    crop = RandomResizedCropAndInterpolation(224, scale=arguments.scale, ratio=arguments.ratio)
    image = Image.new("RGB", (500, 375))
    theirs = np.array([crop.get_params(image, crop.scale, crop.ratio) for _ in range(2400)])
    boxes = np.concatenate([batch.boxes for batch in drawn])
    for column in range(4):
        same(boxes[:, column], theirs[:, column])
    same(boxes[:, 2] * boxes[:, 3], theirs[:, 2] * theirs[:, 3])
    same(np.concatenate([batch.filters for batch in drawn]).astype(int), np.random.randint(0, 2, 2400))

    policy = policy_of(config.data)
    operators, levels = (np.concatenate([getattr(b, n) for b in drawn]) for n in ("operators", "levels"))
    number = policy.names.index("Rotate")
    angles = OPERATORS["Rotate"].argument(levels[operators == number], 224)
    transform = rand_augment_transform(arguments.aa, {"translate_const": 100, "img_mean": (124, 116, 104)})
    seen: list[tuple[str, Any]] = []
    for op in transform.ops:
        op.aug_fn = lambda image, *args, op=op, **_: seen.append((op.name, args[0] if args else 0.0))
    for _ in range(2400):
        transform(image)
    theirs_angles = [value for name, value in seen if name == "Rotate"]
    same(angles, theirs_angles)
    assert abs(len(angles) - len(theirs_angles)) < 5 * (len(angles) + len(theirs_angles)) ** 0.5
    assert abs((operators != 0).sum() - len(seen)) < 0.05 * len(seen)

    mixup = Mixup(arguments.mixup, arguments.cutmix, switch_prob=arguments.mixup_switch_prob, num_classes=5)
    side, lambdas = config.data.train_size, []
    for _ in range(2000):
        share, cuts = mixup._params_per_batch()
        lambdas.append(cutmix_bbox_and_lam((2, 3, side, side), share)[1] if cuts else share)
    ours = (draw_mixing(config.mixup, 0, step=step, k=0, size=2, side=side) for step in range(2000))
    same([mixing.lambdas[0] for mixing in ours], lambdas)


MISTAKES = {
    "python main.py --model deit_small_patch16_224 --data-path x": "the command runs main.py, whose arguments",
    "train.py --model resnet50 --cuda 0": "--from-timm: --cuda: no argument of timm's train.py that is known here",
    "train.py --sync_bn --smothing 0": "--smothing: no argument of timm's train.py that is known here, use --sync-bn",
    "train.py --lr 0.1 --task segmentation": "--task segmentation: only classification and multilabel can be",
    "\nsmothing: 0.0\n": "args.yaml: smothing: no argument of timm's train.py that is known here, use smoothing or",
    "train.py --model nexception-t": "--model is 'nexception-t', which timm does not know",
    "train.py --opt nosuch": "--opt nosuch: timm has no such optimizer",
    "train.py --epochs many": "--from-timm: argument --epochs: invalid int value: 'many'",
    "train.py --in-chans 1": "--in-chans 1: images have 3 channels and are squares here",
    "train.py --input-size 3 224 256": "--input-size 3 224 256: images have 3 channels and are squares here",
    "train.py --lr-base-size 0": "--lr-base-size 0: use a batch of 1 or more",
    "train.py --kd-model-name resnet18 --task-loss-weight 0 --distill-loss-weight 0": "leaves no loss: use weights",
    "train.py --mean 0.5": "--mean 0.5: use three numbers",
    f"srun -n {'9' * 5000} train.py --lr 1": "which is no number here",
    "train.py --hflip 2": "data.horizontal_flip is 2.0: use a probability",
    "train.py 'x": "--from-timm: the command line cannot be split into words (No closing quotation)",
    "\nmodel_kwargs: {'a, b': 1}\n": "--from-timm: argument --model-kwargs: 'a, b' cannot be the name",
    "train.py --model-kwargs class=1": "--from-timm: argument --model-kwargs: 'class' cannot be the name",
    "train.py --opt-kwargs lr=1 is=2": "--from-timm: argument --opt-kwargs: 'is' cannot be the name",
    "train.py --model-kwargs drop_rate=1e999": "--from-timm: argument --model-kwargs: drop_rate=1e999: use",
    "train.py --model-kwargs scales=[1,[2,-1e999]]": "--from-timm: argument --model-kwargs: scales=[1,[2,-1e999]]: use",
    f"train.py --model-kwargs depth={'[' * 50}{']' * 50}": "--from-timm: argument --model-kwargs: depth=[[[[",
    f"train.py --model-kwargs depth={'-' * 5000}1": "--from-timm: argument --model-kwargs: a value is nested too",
    "train.py --model-kwargs size=0x" + "f" * 9999: "--from-timm: argument --model-kwargs: size=0xffff",
    "srun python train.py --lr 1": "--from-timm: srun does not say how many processes it starts: add --ranks N",
    "srun -N 2 --gpus-per-node 8 python train.py": "--from-timm: srun does not say",
    "accelerate launch train.py": "--from-timm: accelerate does not say",
    "deepspeed train.py": "--from-timm: deepspeed does not say",
    "aprun -n 8 python train.py": "--from-timm: aprun does not say",
    "torchrun --nnodes=$N --nproc-per-node 8 train.py": "--from-timm: torchrun has --nnodes $N, which is no number",
    "torchrun --nproc-per-node gpu train.py": "--from-timm: torchrun has --nproc-per-node gpu, which is no number",
    "mpirun -np $N python train.py": "--from-timm: mpirun has -np $N, which is no number",
    "./distributed_train.sh $N --lr 1": "--from-timm: torchrun has --nproc-per-node $N, which is no number",
    "\nmodel_kwargs: 3\n": "--from-timm: argument --model-kwargs",
    "\nlr: [1, 2]\n": "--from-timm: ",
    "\nepochs: {a: b}\n": "--from-timm: argument --epochs: ",
    "\namp: perhaps\n": "--from-timm: ",
    "\nbatch_size: null\n": "--from-timm: batch_size is null: use a value, or leave it out",
    "train.py --aug-repeats inf": "--from-timm: argument --aug-repeats: 'inf' is not a finite number",
    "\n- a list\n": "not arguments by name",
    "\n{\n": "cannot be read as timm's args.yaml",
    "nosuch.yaml": "cannot be read as timm's args.yaml",
}


def test_several_labels(tmp_path: Path) -> None:
    """Smoothing and the measure have other defaults there."""
    plain, lost, _ = translated("--lr 0.1 --task multilabel", tmp_path)
    assert (plain.loss.name, plain.run.best_by) == ("binary-cross-entropy", "mean-ap")
    assert (plain.loss.label_smoothing, plain.run.f1_threshold, lost) == (0, 0.5, {})
    more = "--lr 0.1 --task multilabel --loss asl --smoothing 0.1 --multilabel-threshold 0.3 --loss-pos-weight 2"
    config, lost, _ = translated(f"{more} --target-format multihot --poly-gamma 1 --eval-metric macro_f1", tmp_path)
    assert (config.loss.name, config.loss.positive_weight) == ("asymmetric", 2)
    assert (config.loss.label_smoothing, config.run.f1_threshold, config.run.best_by) == (0.1, 0.3, "top1")
    assert set(lost) == {"--target-format multihot", "--poly-gamma 1.0", "--eval-metric macro_f1"}
    config, _, _ = translated("--lr 0.1 --task multilabel --loss poly --poly-epsilon 1", tmp_path)
    assert config.loss.kwargs == {"epsilon": 1, "gamma": 0}


def test_a_complete_file_of_another_version_has_arguments_that_are_only_listed(source: Any, tmp_path: Path) -> None:
    """timm writes all of its arguments, so a name that is much like one of them is none of its slips."""
    given = {name: value for name, value in DEFAULTS.items() if name not in EARLIER.split()} | {"lr": 0.1}
    text = "\n" + yaml.safe_dump(given | {"aa": "rand-m9", "smothing": 0.0, "mixup_modes": "batch", "val_split": "val"})
    config, lost, _ = translated(source(text), tmp_path)
    assert config.loss.label_smoothing == 0.1
    assert {"smothing 0.0", "mixup_modes batch", "--val-split val"} == set(lost)


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("python", None),
        ("nohup srun -n16 python -u", 16),
        ("srun --ntasks=16 python", 16),
        ("srun -N 2 --ntasks-per-node=4 python", 8),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node=8", 16),
        ("accelerate launch --multi_gpu --num_processes 8", 8),
        ("mpirun -np 4 -x PATH python", 4),
        ("deepspeed --num_nodes 2 --num_gpus=8", 16),
        ("python -m torch.distributed.run --nproc-per-node=2", 2),
    ],
)
def test_a_launcher_says_how_many_gpus_there_are(launcher: str, ranks: int | None) -> None:
    assert read_arguments(f"{launcher} train.py -b 8 --lr 1")[1] == ranks
    assert read_arguments(f"{launcher} train.py -b 8 --lr 1", 3)[1] == 3


def test_ranks_stand_for_what_a_launcher_does_not_say() -> None:
    assert read_arguments("srun python train.py --lr 1", 12)[1] == 12


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_one_sentence(text: str, source: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_translation(source(text), "data", tmp_path / "out.py", None)
    assert MISTAKES[text] in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out.py").exists()


def test_init_writes_where_every_setting_comes_from(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    words = [
        "init",
        str(dataset),
        "--output",
        str(path),
        "--from-timm",
        "--lr 0.008 --sync-bn -b 32 --clip-grad 1",
    ]
    assert main([*words, "--ranks", "8"]) == 0
    assert "256 images per step are 32 x 8 GPUs (--ranks) x 1 accumulated" in (printed := capsys.readouterr().out)
    assert "--sync-bn: BatchNorm normalises by the micro-batch" in printed
    text = path.read_text()
    assert "lr=0.008,  # timm: --lr 0.008" in text and "clip_grad_norm=1.0,  # timm: --clip-grad 1" in text
    assert "#     --sync-bn: " in text
    assert load_config(path).batch.global_batch == 256
    assert main([*words, "--ranks", "8"]) == 2 and main(["init", "data", "--ranks", "2"]) == 2
    assert main([*words[:4], "--from-timm", "--model resnet50", "--gpu-memory", "16"]) == 2
    capsys.readouterr()
    nowhere = tmp_path / "nowhere"
    assert main(["init", str(nowhere), "--output", str(tmp_path / "no.py"), *words[4:]]) == 2
    assert f"{nowhere}: this directory does not exist" in capsys.readouterr().err and not (tmp_path / "no.py").exists()


def test_the_order_of_the_classes_is_compared_with_timms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "photos", {"1": 2, "2": 2, "10": 2})
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "three.pth")
    torch.save(timm.create_model("test_resnet", num_classes=4).state_dict(), tmp_path / "four.pth")

    def init(dataset: str, words: str) -> tuple[int, str]:
        (tmp_path / "c.py").unlink(missing_ok=True)
        line = f"--model test_resnet -b 8 {words}"
        status = main(["init", str(tmp_path / dataset), "--output", str(tmp_path / "c.py"), "--from-timm", line])
        return status, "".join(capsys.readouterr())

    for order in ("name", "natural"):
        words = ("--out", str(tmp_path / order), "--class-order", order)
        assert main(["data", "index", str(tmp_path / "photos"), *words]) == 0
    status, printed = init("name", "")
    assert status == 0 and "order of the classes: train.py numbers class folders in natural order" in printed
    status, printed = init("name", f"--initial-checkpoint {tmp_path}/three.pth")
    assert status == 2 and "from '10' on" in printed and "--class-order natural" in printed
    status, printed = init("name", f"--initial-checkpoint {tmp_path}/four.pth")
    assert status == 0 and "order of the classes" in printed
    for words in ("", f"--initial-checkpoint {tmp_path}/three.pth"):
        status, printed = init("natural", words)
        assert status == 0 and "order of the classes" not in printed
