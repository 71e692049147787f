"""``dali-train init --from-timm``: a config from the arguments of timm's train.py, each setting with its origin.

Each argument (timm_arguments.py) is in one of three places: it is one setting (`SAME`), it has no counterpart
(`WITHOUT`, with the reason), or it decides settings together with others, in the functions of `Translation`. What is
left at timm's default is written too if that is not the default here, since the run would be another.
"""

import inspect
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import timm
from timm.data import resolve_data_config
from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.config import Config, load_config
from dali_train.config.augment_spec import parse_augment
from dali_train.config.config import SETTINGS
from dali_train.config.sections import NORMALISATIONS
from dali_train.data.dataset.manifest import CLASS_NAMES, Manifest, order_classes
from dali_train.errors import ConfigError
from dali_train.extras.init.config_file import checked_output
from dali_train.extras.timm.timm_arguments import DEFAULTS, read_arguments
from dali_train.text import plural, printable
from dali_train.training.model_arguments import check_name
from dali_train.training.pretrained import num_classes_of, read_weights_of

SAME = {
    "seed": "data.seed",
    "scale": "data.crop_area",
    "ratio": "data.crop_aspect",
    "hflip": "data.horizontal_flip",
    "vflip": "data.vertical_flip",
    "grayscale_prob": "data.grayscale",
    "gaussian_blur_prob": "data.gaussian_blur",
    "model": "model.name",
    "drop": "model.kwargs.drop_rate",
    "drop_path": "model.kwargs.drop_path_rate",
    "drop_block": "model.kwargs.drop_block_rate",
    "gp": "model.kwargs.global_pool",
    "bn_momentum": "model.kwargs.bn_momentum",
    "bn_eps": "model.kwargs.bn_eps",
    "head_init_scale": "model.head_scale",
    "head_init_bias": "model.head_bias",
    "fast_norm": "model.fast_norm",
    "channels_last": "model.channels_last",
    "grad_checkpointing": "model.activation_checkpointing",
    "weight_decay": "optimizer.weight_decay",
    "layer_decay": "optimizer.layer_decay",
    "smoothing": "loss.label_smoothing",
    "mixup": "mixup.alpha",
    "cutmix": "mixup.cutmix_alpha",
    "batch_size": "batch.micro_batch",
    "val_interval": "run.eval_every_epochs",
    "checkpoint_hist": "run.keep_best",
    "log_interval": "hooks.log_every_steps",
}
"""Argument -> the setting of the same meaning."""

_DATASET = "not needed: the DATASET of init has its splits, classes and labels (dali-train data index, data convert)"
_AHEAD = "not needed: images are read and decoded ahead, in as many threads as there are cores"
WITHOUT = {
    "dataset train_split val_split dataset_download input_key target_key target_format": _DATASET,
    "class_map": "the order of the classes is that of the DATASET of init: index it with --class-names FILE, the "
    "names of the map in the order of their numbers",
    "dataset_trust_remote_code train_num_samples val_num_samples": _DATASET,
    "input_img_mode": "images are decoded to RGB, also grey ones",
    "num_classes": "the dataset decides it",
    "validation_batch_size": "evaluation takes batches of batch.micro_batch",
    "resume no_resume_opt start_epoch": "run.dir resumes by itself; weights of another run: model.weights",
    "fuser torchscript torchcompile torchcompile_mode": "model.compile auto compiles on a GPU",
    "pin_mem no_prefetcher use_multi_epochs_loader workers": _AHEAD,
    "no_ddp_bb synchronize_step device_modules model_ema_force_cpu force_cpu": "not needed",
    "worker_seeding": "every draw is a function of (seed, epoch, image)",
    "layer_decay_min_scale layer_decay_no_opt_scale": "layer decay has no minimum; model.freeze freezes layers",
    "lr_noise lr_noise_pct lr_noise_std": "the rate has no noise",
    "lr_cycle_mul lr_cycle_decay lr_cycle_limit lr_k_decay": "a schedule decays once; your own is one function",
    "patience_epochs": "only --sched plateau has it; hooks.stop_early ends a run that no longer improves",
    "epoch_repeats train_batches_per_epoch": "an epoch is a pass over the images; multiply run.epochs",
    "no_aug": "set data.crop_area (1, 1), data.horizontal_flip 0 and no data.augment",
    "train_crop_mode": "only random resized crops, inception and crops with padding (data.crop, data.crop_side)",
    "aug_splits jsd_loss jsd resplit split_bn": "no augmented splits of a batch, and no loss between them",
    "recount": "one box is erased, not several",
    "cutmix_minmax mixup_mode": "a micro-batch has one lambda, from Beta(alpha, alpha), as timm's mode batch",
    "sync_bn": "BatchNorm normalises by the micro-batch, or a sample would depend on the number of GPUs; its running "
    "statistics are means over the global batch",
    "dist_bn": "BatchNorm's running statistics are always means over the global batch",
    "bn_tf": "set model.kwargs.bn_momentum 0.01 and model.kwargs.bn_eps 0.001",
    "drop_connect": "timm ignores it: --drop-path",
    "save_images": "dali-train data show draws the images of any step",
    "tta": "data.eval_views averages views",
    "wandb_project wandb_tags wandb_resume_id": "WANDB_PROJECT, WANDB_TAGS, WANDB_RUN_ID in the environment",
    "train_img_sizes train_batch_sizes train_size_probs train_size_schedule train_size_schedule_spread "
    "train_size_random_mix variable_batch_loss_scale": "sizes change by epoch: data.progressive",
    "naflex_loader naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs "
    "naflex_loss_scale naflex_patchify_channels_first": "images are squares of one size, not sequences of patches",
    "kd_loss_type kd_student_feature_dim kd_teacher_feature_dim": "a teacher's logits are learned, not its features",
    "class_stats": "not needed: the classes are counted in the DATASET of init",
    "loss_weight_power": "weights by counts have no other exponent than 1",
    "lr_stable_timescale": "only --sched rsqrt has it",
    "stop_epoch": "run.max_steps ends a run without changing its schedule; it counts steps",
    "save_epochs": "run.checkpoint_every_steps and run.keep_checkpoints decide which checkpoints stay",
}
"""Arguments -> why they have no counterpart."""
_COOLDOWNS = {"1-sqrt": "wsd", "power": "wsd", "linear": "warmup-stable-decay"}
"""``--lr-decay-fn`` -> schedule.name. train.py cannot set the exponent of power, which by default makes it 1-sqrt."""
_CLASS_WEIGHTS = {"inv_freq": "balanced", "effective_num": "effective-0.999"}
"""``--loss-class-weight`` -> loss.class_weights; 0.999 is timm's own."""
_OF_SEVERAL = {
    "bce": "binary-cross-entropy",
    "asl": "asymmetric",
    "poly": "poly",
    "twoway": "two-way",
    "zlpr": "zlpr",
    "db": "distribution-balanced",
}
"""``--loss`` of ``--task multilabel`` -> loss.name."""
_WEIGHTS_BY_CLASS = "weights of single classes are loss.class_weights and loss.positive_weight CLASS,WEIGHT ..."
_REASONS = {name: reason for names, reason in WITHOUT.items() for name in names.split()}


@dataclass
class Translation:
    """The settings that a set of arguments becomes.

    Args:
        arguments: all arguments by name, as in args.yaml.
        num_ranks: GPUs, which no argument of train.py gives.
    """

    arguments: dict[str, Any]
    num_ranks: int
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Setting -> its value and its origin."""
    lost: dict[str, str] = field(default_factory=dict)
    """What the arguments say and no setting can -> why."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self, setting: str, value: Any, *names: str, note: str = "", own: str = "") -> None:
        """Set `setting`, unless it has this value by default and none of the arguments is given.

        Args:
            names: the arguments that decide it.
            note: what else explains it.
            own: whose default it is, if none of the arguments is given.
        """
        given = [name for name in names if self.arguments[name] != DEFAULTS[name]]
        if given or value != (SETTINGS[setting].default if setting in SETTINGS else None):
            shown = map(self.written, given if own else names)
            origin = [*shown, *([note] if note else []), *([own] if own and not given else [])]
            self.settings[setting] = value, ", ".join(origin)

    def lose(self, name: str, reason: str) -> None:
        self.lost[self.written(name)] = reason

    def written(self, name: str) -> str:
        """Return an argument as on a command line: ``--lr 0.008``, ``--amp``, or ``--hflip 0.5 (default)``."""
        value, word = self.arguments[name], f"--{name.replace('_', '-')}"
        if value is None or value is False:
            return f"no {word}"
        if isinstance(value, dict):
            value = [f"{key}={one}" for key, one in value.items()]
        shown = " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)
        return f"{word} {shown}".rstrip() + (" (default)" if value == DEFAULTS[name] else "")

    def translate(self) -> None:
        """
        Raises:
            ConfigError: an argument says something without which no config makes sense.
        """
        check_name(self.model, "--model")
        for name, setting in SAME.items():
            value = self.arguments[name]
            value = tuple(value) if isinstance(value, list) else value
            if value is not None and (value != DEFAULTS[name] or (setting in SETTINGS and SETTINGS[setting].in_recipe)):
                self.put(setting, value, name)
        self._images()
        self._augmentation()
        self._loss()
        self._network()
        self._optimizer()
        self._rate()
        self._run()
        for name, reason in _REASONS.items():
            if self.arguments[name] not in (DEFAULTS[name], "rrc", "auto"):  # what a crop mode and resume mean here
                self.lose(name, reason)

    def _images(self) -> None:
        for name in ("mean", "std", "input_size"):
            if self.arguments[name] is not None and len(self.arguments[name]) != 3:
                raise ConfigError(f"{self.written(name)}: use three numbers")
        cfg = timm.get_pretrained_cfg(self.model)
        images = resolve_data_config(self.arguments, pretrained_cfg=cfg.to_dict() if cfg is not None else {})
        channels, height, size = images["input_size"]
        if channels != 3 or height != size or self.in_chans not in (None, 3):
            name = "input_size" if self.in_chans in (None, 3) else "in_chans"
            raise ConfigError(f"{self.written(name)}: images have 3 channels and are squares here, leave it out")
        own = f"{self.model}'s own"
        for setting in ("data.train_size", "data.eval_size"):
            self.put(setting, size, "img_size", "input_size", own=own)
        resized = math.floor(size / images["crop_pct"])
        if resized != round(size * 256 / 224):
            self.put("data.eval_resize_to", resized, "crop_pct", note=f"{size} / {images['crop_pct']:g}", own=own)
        self.put("data.eval_resize", "squash" if images["crop_mode"] == "squash" else "short-side", own=own)
        pixels = np.round(255 * np.array([images["mean"], images["std"]]), 3)
        known = (name for name, pair in NORMALISATIONS.items() if np.abs(pixels - pair).max() < 0.01)
        numbers = tuple(map(tuple, pixels.tolist()))
        self.put("data.normalise", next(known, numbers), "mean", "std", own=own)
        trained = self._filter(self.train_interpolation or images["interpolation"], "train_interpolation")
        self.put("data.interpolation", trained, "train_interpolation")
        evaluated = self._filter(images["interpolation"], "interpolation")
        if evaluated != ("bicubic" if trained == "random" else trained):
            self.put("data.eval_interpolation", evaluated, "interpolation", own=own)

    def _filter(self, name: str, argument: str) -> str:
        if name in ("bilinear", "bicubic", "random"):
            return name
        self.lose(argument, "the filters are bilinear and bicubic; this config has bicubic")
        return "bicubic"

    def _augmentation(self) -> None:
        policy = re.sub("^original(?=$|-mstd)", "auto-imagenet", self.aa or "none")
        policy = "3-augment" if policy == "3a" else policy
        jitters = not self.aa or "3a" in self.aa
        try:
            parse_augment(policy)
            replaced = "" if jitters or not self.color_jitter else f"instead of {self.written('color_jitter')}"
            self.put("data.augment", policy, "aa", note=replaced)
        except ConfigError as error:
            self.lose("aa", str(error).partition(": ")[2])
        if jitters:
            self.put("data.color_jitter", self.color_jitter or 0.0, "color_jitter")
            if self.color_jitter and self.color_jitter_prob is not None:
                self.put("data.color_jitter_probability", self.color_jitter_prob, "color_jitter_prob")
        elif self.color_jitter:
            for name in ("color_jitter", "color_jitter_prob"):
                if self.arguments[name] != DEFAULTS[name]:
                    self.lose(name, "timm ignores it beside any --aa but 3a")
        self.put("data.repeats", max(1, int(self.aug_repeats)), "aug_repeats")
        self.put("data.random_erasing", self.reprob, "reprob")
        if self.reprob > 0 and self.remode == "rand":
            self.lose("remode", "a box is filled with noise or the mean; this config has noise")
        if self.reprob > 0:
            self.put("data.random_erasing_fill", "mean" if self.remode == "const" else "noise", "remode")

    def _loss(self) -> None:
        if self.task not in ("classification", "multilabel"):
            raise ConfigError(f"{self.written('task')}: only classification and multilabel can be translated")
        if self.mixup > 0 or self.cutmix > 0:
            self.put("mixup.probability", self.mixup_prob, "mixup_prob")
            if self.mixup > 0 and self.cutmix > 0:
                self.put("mixup.switch_probability", self.mixup_switch_prob, "mixup_switch_prob")
            if self.mixup_off_epoch:
                self.put("mixup.until_epoch", self.mixup_off_epoch, "mixup_off_epoch")
        loss = self.loss or ("bce" if self.bce_loss or self.task == "multilabel" else "ce")
        if self.task == "multilabel":
            self._several_labels(loss)
        else:
            self._one_label(loss)
        if loss == "bce":
            self.put("loss.target_threshold", self.bce_target_thresh, "bce_target_thresh")
            self.put("loss.sum_classes", self.bce_sum, "bce_sum")
        if loss == "bce" or (loss == "asl" and self.task == "multilabel"):
            self._weights()
        elif self.loss_class_weight or self.loss_pos_weight:
            self.lose("loss_class_weight" if self.loss_class_weight else "loss_pos_weight", "only --loss bce has it")
        if self.kd_model_name is not None:
            self._teacher()

    def _one_label(self, loss: str) -> None:
        if loss not in ("ce", "bce"):
            self.lose("loss", "a loss of your own is one function (docs/extending.md); this config has cross-entropy")
        if loss == "bce":
            self.put("loss.name", "binary-cross-entropy", "bce_loss" if self.bce_loss else "loss")
        for name in ("multilabel_threshold", "poly_epsilon", "poly_gamma"):
            if self.arguments[name] != DEFAULTS[name]:
                self.lose(name, "only --task multilabel has it here")

    def _several_labels(self, loss: str) -> None:
        if loss not in _OF_SEVERAL:
            raise ConfigError(
                f"{self.written('loss')} with --task multilabel, which train.py refuses too: use "
                f"{', '.join(_OF_SEVERAL)}"
            )
        self.put("loss.name", _OF_SEVERAL[loss], "task", "loss")
        self.put("run.f1_threshold", self.multilabel_threshold, "multilabel_threshold")
        for name in ("poly_epsilon", "poly_gamma"):
            if loss == "poly":
                self.put(f"loss.kwargs.{name.removeprefix('poly_')}", self.arguments[name], name)
            elif self.arguments[name] != DEFAULTS[name]:
                self.lose(name, "only --loss poly has it")

    def _weights(self) -> None:
        """Put what weighs the classes and the positives of binary cross-entropy."""
        name = "loss_pos_weight" if self.loss_pos_weight else "bce_pos_weight"
        if positive := self.arguments[name]:
            try:
                self.put("loss.positive_weight", "balanced" if positive == "neg_pos" else float(positive), name)
            except ValueError:
                self.lose(name, _WEIGHTS_BY_CLASS)
        if self.loss_class_weight in _CLASS_WEIGHTS:
            self.put("loss.class_weights", _CLASS_WEIGHTS[self.loss_class_weight], "loss_class_weight")
        elif self.loss_class_weight:
            self.lose("loss_class_weight", _WEIGHTS_BY_CLASS)

    def _teacher(self) -> None:
        if self.kd_distill_type == "feature":
            self.lose("kd_model_name", "a teacher's logits are learned, not its features")
            return
        kind = self.kd_token_distill_type if self.kd_distill_type == "token" else "soft"
        self.put("loss.distillation", kind, "kd_distill_type")
        self.put("loss.teacher", self.kd_model_name, "kd_model_name")
        if kind == "soft":
            self.put("loss.temperature", self.kd_temperature, "kd_temperature")
        task, teacher = self.task_loss_weight, self.distill_loss_weight
        teacher = (1.0 if task is None else 1.0 - task) if teacher is None else teacher
        task = 1.0 if task is None else task
        if task + teacher <= 0:
            raise ConfigError(f"{self.written('task_loss_weight')} leaves no loss: use weights over 0")
        self.put("loss.distillation_weight", teacher / (task + teacher), "distill_loss_weight", "task_loss_weight")
        if not math.isclose(task + teacher, 1):
            self.lose("distill_loss_weight", f"both losses' weights sum to 1 here, there to {task + teacher:g}")

    def _network(self) -> None:
        for name, value in self.model_kwargs.items():
            self.put(f"model.kwargs.{name}", value, "model_kwargs")
        if self.initial_checkpoint or self.pretrained_path:
            name = "initial_checkpoint" if self.initial_checkpoint else "pretrained_path"
            self.put("model.weights", self.arguments[name], name)
        elif self.pretrained:
            self.put("model.weights", self.model, "pretrained")
        if "model.weights" in self.settings and "model.head_scale" not in self.settings:
            self.put("model.head_scale", 1.0, note="timm's new classifiers are random")
        amp = next((name for name in ("amp", "native_amp", "apex_amp") if self.arguments[name]), None)
        if amp is not None:
            self.put("precision.dtype", "bf16" if self.amp_dtype == "bfloat16" else "fp16", amp, "amp_dtype")
        elif self.model_dtype in ("float16", "bfloat16"):
            self.put("precision.dtype", "bf16" if self.model_dtype == "bfloat16" else "fp16", "model_dtype")
            self.put("precision.autocast", False, "model_dtype")
            self.lose("model_dtype", "the weights themselves stay float32, only what is computed is half as wide")

    def _optimizer(self) -> None:
        name = self.opt.lower().removeprefix("fused").removeprefix("lookahead_")
        if name not in list_optimizers():
            raise ConfigError(
                f"--opt {printable(self.opt)}: timm has no such optimizer; timm.optim.list_optimizers() lists them"
            )
        self.put("optimizer.name", name, "opt")
        self._peak(name)
        if self.opt.lower().startswith("lookahead_"):
            self._lookahead()
        info = get_optimizer_info(name)
        parameters = inspect.signature(get_optimizer_class(name, bind_defaults=False).__init__).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()} | (info.defaults or {})
        self._eps_and_betas(name, defaults, has_two_betas=info.num_betas == 2)
        if info.has_momentum:
            self.put("optimizer.kwargs.momentum", self.momentum, "momentum")
        for key, value in self.opt_kwargs.items():
            setting = f"optimizer.{key}" if key in ("eps", "betas") else f"optimizer.kwargs.{key}"
            self.put(setting, value, "opt_kwargs")
        # All vectors, and what the model names, are free of weight decay there.
        self.put("optimizer.exclude_vectors", "and-tokens", note="as train.py does")
        self._clipping(name, defaults.get("max_grad_norm"))

    def _lookahead(self) -> None:
        if self.model_ema:
            self.lose("opt", "Lookahead is the moving average of the weights here, and the other needs it: left out")
            return
        note = "Lookahead: half of the way every 6 steps"
        for setting, value in (("decay", 0.5), ("every_steps", 6), ("lookahead", True)):
            self.put(f"ema.{setting}", value, "opt", note=note)

    def _eps_and_betas(self, optimizer: str, defaults: Mapping[str, Any], *, has_two_betas: bool) -> None:
        """Put what was given, or else the optimizer's own: its defaults differ from those of the config's."""
        for key, argument in (("eps", "opt_eps"), ("betas", "opt_betas")):
            given = self.arguments[argument]
            if isinstance(given, list):
                given = tuple(given)
            if key == "betas" and not has_two_betas:  # optimizer.betas has two
                self.put("optimizer.kwargs.betas", given, argument)
                continue
            wanted = defaults.get(key) if given is None else given
            if wanted is not None:
                self.put(f"optimizer.{key}", wanted, argument, own=f"{optimizer}'s own")
            elif key in defaults:
                self.lose(
                    "opt", f"its own {key} depends on the weights; this config has the default of optimizer.{key}"
                )

    def _clipping(self, optimizer: str, own_bound: float | None) -> None:
        """Put the bound of the gradient: of two by norm, train.py's and the optimizer's own, the smaller one."""
        bound = self.clip_grad or None
        names = [] if bound is None else ["clip_grad"]
        if self.opt_kwargs.get("max_grad_norm", own_bound) is None:  # switched off
            own_bound = None
        if own_bound is not None and bound is not None and self.clip_mode != "norm":
            self.lose("clip_mode", f"{optimizer} also clips by norm there, at {own_bound:g}: one of them is left out")
        elif own_bound is not None:
            bound = min(own_bound, bound or math.inf)
            names.append("opt")
        self.put("optimizer.clip_grad_norm", bound, *(names or ["clip_grad"]))
        if bound is not None and self.clip_mode != "norm" and self.clip_grad:
            self.put("optimizer.clip_mode", self.clip_mode, "clip_mode")

    def _peak(self, optimizer: str) -> None:
        if self.lr:
            self.put("optimizer.lr", self.lr, "lr")
            return
        if self.lr_base_size < 1:
            raise ConfigError(f"{self.written('lr_base_size')}: use a batch of 1 or more")
        root = any(part in optimizer for part in ("ada", "lamb"))
        scale = self.lr_base_scale or ("sqrt" if root else "linear")
        ratio = 256 / self.lr_base_size
        self.put("optimizer.lr", self.lr_base * (ratio**0.5 if scale == "sqrt" else ratio), "lr_base", "lr_base_size")
        self.put("optimizer.scale_lr", scale, "lr_base_scale", own=f"its rule for {optimizer}")

    def _wsd(self) -> None:
        """Put the schedule of which timm's warmup always is a prefix; --warmup-prefix adds it to --epochs."""
        kind = _COOLDOWNS.get(self.lr_decay_fn or "1-sqrt")
        if kind is None:
            self.lose("lr_decay_fn", "the rate falls by 1-sqrt or linearly; this config has 1-sqrt")
        self.put("schedule.name", kind or "wsd", "sched", "lr_decay_fn")
        before = self.warmup_epochs if self.warmup_prefix else 0
        self.put("run.epochs", self.epochs + before, "epochs", *(["warmup_epochs", "warmup_prefix"] if before else []))
        length = 0.2 if self.decay_epochs is None else self.decay_epochs
        if length < 1:  # a part of what follows the warmup
            length *= self.epochs + before - self.warmup_epochs
        length = length if self.sched_on_updates else float(round(length))
        self.put("schedule.decay_epochs", length, "decay_epochs", own="a fifth of the epochs after the warmup")
        self.put("schedule.min_lr", self.min_lr, "min_lr")
        self._warmup(self.warmup_epochs)
        if self.cooldown_epochs:
            self.lose("cooldown_epochs", "the decay ends with the run")

    def _warmup(self, length: int) -> None:
        if not self.sched_on_updates:
            self.put("schedule.step_every", "epoch", "sched_on_updates", note="its rate changes once per epoch")
        if length:
            self.put("schedule.warmup_epochs", length, "warmup_epochs")
            self.put("schedule.warmup_lr", self.warmup_lr, "warmup_lr")

    def _rate(self) -> None:
        if self.sched == "wsd":
            self._wsd()
            return
        names = {"poly": "polynomial", "step": "step", "multistep": "multistep", "constant": "step", "none": "step"}
        kind = names.get(self.sched, "cosine")
        if self.sched not in ("cosine", *names):
            reasons = {
                "plateau": "a rate is a function of the step, not of evaluations; ",
                "rsqrt": "a schedule of your own is one function (docs/extending.md); ",
            }
            why = reasons.get(self.sched, "")
            self.lose("sched", f"{why}this config has cosine")
        self.put("schedule.name", kind, "sched")
        warmup, prefix = 0 if self.sched == "none" else self.warmup_epochs, self.warmup_prefix
        cycles = kind in ("cosine", "polynomial")  # of which timm appends the cooldown
        before, after = warmup if prefix else 0, self.cooldown_epochs if cycles else 0
        parts = [*(["warmup_epochs", "warmup_prefix"] if before else []), *(["cooldown_epochs"] if after else [])]
        self.put("run.epochs", self.epochs + before + after, "epochs", *parts)
        self._warmup(warmup)
        if warmup and not prefix:
            self.put("schedule.decay_from", "start", "warmup_prefix")
        if cycles:
            self.put("schedule.min_lr", self.min_lr, "min_lr")
            if after:
                self.put("schedule.decay_epochs", self.epochs, "epochs", "cooldown_epochs")
        if kind == "polynomial":
            self.put("schedule.power", self.decay_rate, "decay_rate", note="its power")
        if kind == "step":
            constant = self.sched != "step"
            length = 90.0 if self.decay_epochs is None else self.decay_epochs
            self.put("schedule.decay_epochs", length, "decay_epochs", own="train.py's own")
            self.put("schedule.decay_rate", 1.0 if constant else self.decay_rate, "sched" if constant else "decay_rate")
        if kind == "multistep":
            early = 0 if self.sched_on_updates else 1  # timm's decays an epoch, or an update, before its milestones
            milestones = tuple(epoch - early for epoch in self.decay_milestones if epoch > early)
            self.put("schedule.milestones", milestones, "decay_milestones", note="it decays one earlier")
            self.put("schedule.decay_rate", self.decay_rate, "decay_rate")

    def _run(self) -> None:
        steps = max(1, self.grad_accum_steps)
        batch = self.batch_size * self.num_ranks * steps
        note = f"{plural(self.num_ranks, 'GPU')}, as the launcher or --ranks says"
        self.put("batch.global_batch", batch, "batch_size", "grad_accum_steps", note=note)
        metrics = {"top1": "top1", "loss": "loss"} | ({"map": "mean-ap"} if self.task == "multilabel" else {})
        if self.eval_metric in metrics:
            self.put("run.best_by", metrics[self.eval_metric], "eval_metric")
        else:
            self.lose("eval_metric", "the best checkpoint is chosen by top1, balanced-top1, loss or mean-ap")
        if self.model_ema:
            self.put("ema.decay", self.model_ema_decay, "model_ema", "model_ema_decay")
            self.put("ema.warmup", self.model_ema_warmup, "model_ema_warmup")
        if self.output or self.experiment:
            name = "/".join(part for part in (self.output or "output/train", self.experiment) if part)
            self.put("run.dir", name, "output", "experiment")
        if self.recovery_interval:
            self.put("run.checkpoint_every_steps", max(1, self.recovery_interval // steps), "recovery_interval")
        kind = self.device.partition(":")[0]
        if kind == "cpu":
            self.put("run.device", kind, "device")
        elif kind != "cuda":
            self.lose("device", "a CPU or CUDA; this config has the default")
        if self.log_wandb:
            self.put("hooks.trackers", ("wandb",), "log_wandb")


def write_translation(source: str, root: str, output: Path | None, num_ranks: int | None) -> None:
    """Write a config file for the dataset in `root`, and print what the arguments became and what they did not.

    Args:
        source: an args.yaml, or a command line.
        output: as for `write_config`.
        num_ranks: GPUs; None: as many as the launcher on the command line starts, or 1.

    Raises:
        ConfigError: see `checked_output`, `read_arguments`, `Translation.translate` and `compare_class_orders`; or the
            dataset is not for the task.
        DatasetError: the dataset does not exist, or is damaged.
    """
    output = checked_output(root, output)
    arguments, launched, unknown = read_arguments(source, num_ranks)
    translation = Translation(arguments, launched or 1, lost=unknown)
    translation.translate()
    text = config_text(translation, root, output)
    manifest = Manifest.read(root)
    several = not manifest.label_kind.is_class
    if several != (translation.task == "multilabel"):
        raise ConfigError(
            f"{translation.written('task')}, and {root} has {'several labels' if several else 'one label'} an image: "
            f"use --task {'multilabel' if several else 'classification'}, or another dataset"
        )
    note = compare_class_orders(manifest, translation)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    steps, batch = max(1, arguments["grad_accum_steps"]), translation.settings["batch.global_batch"][0]
    print(
        f"{output}: {len(translation.settings)} settings; {batch:,} images per step are {arguments['batch_size']} x "
        f"{plural(translation.num_ranks, 'GPU')} (--ranks) x {steps} accumulated"
    )
    if note:
        print(note)
    config = load_config(output)
    for difference in differences_from_training(config) if config.model.weights is not None else []:
        print(f"warning: {difference}")
    if translation.lost:
        print("not translated:")
    for said, reason in translation.lost.items():
        print(f"  {printable(said)}: {printable(reason)}")


def compare_class_orders(manifest: Manifest, translation: Translation) -> str:
    """Return a sentence if timm would number the classes of the dataset otherwise, and "" if it would not.

    Raises:
        ConfigError: and the classifier of the weights to start from has as many classes.
    """
    options = manifest.conversion.get("options")
    names = [*manifest.class_names]
    if translation.class_map or not isinstance(options, dict) or options.get("dataset") != "folder":
        return ""
    if options.get("class_order") == CLASS_NAMES:
        return ""
    if names == order_classes(names, "natural"):
        return ""
    first = next(one for one, other in zip(names, order_classes(names, "natural"), strict=True) if one != other)
    remedy = "index or convert it with --class-order natural"
    name = "initial_checkpoint" if translation.initial_checkpoint else "pretrained_path"
    weights = translation.arguments[name]
    if weights and Path(weights).is_file():
        tensors = read_weights_of(translation.model, weights, manifest.num_classes, {}, translation.written(name))
        trained = num_classes_of(translation.model, tensors)
        if trained in (manifest.num_classes, None):
            raise ConfigError(
                f"{translation.written(name)}: train.py numbers class folders in natural order, this dataset by name, "
                f"from {first!r} on: the weights would be of other classes; {remedy}"
            )
    return (
        f"order of the classes: train.py numbers class folders in natural order, this dataset by name, from {first!r} "
        f"on. Before weights that train.py has trained on these classes are used, {remedy}"
    )


def config_text(translation: Translation, root: str, output: Path) -> str:
    """Return the text of a config file.

    Raises:
        ConfigError: the settings are not valid together.
    """
    settings = {"data.root": (root, ""), **translation.settings}
    settings.setdefault("run.dir", (f"runs/{output.stem}", ""))
    sections: dict[str, Any] = {}
    for name, one in settings.items():
        section, *inner, last = name.split(".")
        place = sections.setdefault(section, {})
        for part in inner:  # kwargs
            place = place.setdefault(part, {})
        place[last] = one
    values: dict[str, Any] = {name: _values(own) for name, own in sections.items()}
    Config(**values)
    known = [name for name in get_type_hints(Config) if name in sections]
    body = "\n".join(_lines(f"{name.capitalize()}Config", name, sections[name], 4) for name in known)
    file = printable(shlex.quote(str(output)))
    head = ["# From arguments of timm's train.py.", "#", f"#     dali-train plan --config {file}"]
    head.append(f"#     dali-train train --config {file}")
    if translation.lost:
        lost = [f"#     {printable(said)}: {printable(reason)}" for said, reason in translation.lost.items()]
        head += ["#", "# Not translated:", "#", *lost]
    return "\n".join(head) + f"\n\nfrom dali_train.config import *\n\nconfig = Config(\n{body}\n)\n"


def _values(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _values(one) if isinstance(one, dict) else one[0] for name, one in own.items()}


def _lines(kind: str, name: str, own: Mapping[str, Any], indent: int) -> str:
    """Return the lines ``name=kind(...)`` of a section, or of the arguments in it."""
    space, lines = " " * indent, []
    for key, one in own.items():
        if isinstance(one, dict):
            lines.append(_lines("dict", key, one, indent + 4))
            continue
        value, origin = one
        written = json.dumps(value) if isinstance(value, str) else repr(value)
        lines.append(f"{space}    {key}={written}," + (f"  # timm: {printable(origin)}" if origin else ""))
    return "\n".join([f"{space}{name}={kind}(", *lines, f"{space}),"])
