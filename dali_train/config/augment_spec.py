"""The syntax of data.augment, which is timm's: the name of a policy, then its settings, as in rand-m9-mstd0.5-inc1."""

import re
from dataclasses import dataclass

from dali_train.config.check import close_names, require

POLICIES = {
    "none": "",
    "rand": "m n p mstd mmax inc t",
    "trivial": "",
    "3-augment": "",
    "big-vision": "",
    "colossalai": "",
    "auto-imagenet": "mstd",
    "auto-cifar10": "",
}
"""Name -> accepted settings."""

_FORM = "data.augment is {text!r}: "


@dataclass(frozen=True, kw_only=True)
class AugmentSpec:
    """The parsed value of data.augment. Magnitudes are timm's: 10 is the strong end of an operator's usual range."""

    policy: str
    magnitude: float = 10.0  # m
    num_layers: int = 2  # n: operators per image
    probability: float = 0.5  # p: of applying each of them
    magnitude_std: float = 0.0  # mstd: of normal noise on the magnitude; over 100: uniform from 0 to the magnitude
    magnitude_max: float = 10.0  # mmax
    increasing: bool = False  # inc: operators whose strength rises with the magnitude
    operators: tuple[str, ...] = ()  # t: names joined by +; empty: timm's


_FIELDS = {
    "m": "magnitude",
    "n": "num_layers",
    "p": "probability",
    "mstd": "magnitude_std",
    "mmax": "magnitude_max",
    "inc": "increasing",
}


def parse_augment(text: str) -> AugmentSpec:
    """
    Raises:
        ConfigError: an unknown policy or setting, or a value out of range.
    """
    name = next(
        (
            policy
            for policy in sorted(POLICIES, key=len, reverse=True)
            if text == policy or text.startswith(f"{policy}-")
        ),
        "",
    )
    close = (
        [policy for policy in POLICIES if text.lower().startswith(policy.split("-")[0])]  # randaugment, autoaugment
        or close_names(text.split("-")[0], POLICIES, cutoff=0.4)
        or close_names(text, POLICIES)
    )
    meant = f", did you mean {close[0]}?" if close else ":"
    require(name != "", f"{_FORM.format(text=text)}there is no such policy{meant} There are {', '.join(POLICIES)}")
    allowed = POLICIES[name].split()
    values: dict[str, float | int | bool | tuple[str, ...]] = {}
    for word in filter(None, text.removeprefix(name).split("-")):
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?|(?<=mstd)inf)", word)
        if "t" in allowed and match is None and word.startswith("t"):
            values["operators"] = tuple(word[1:].split("+"))
            continue
        require(
            match is not None and match[1] in allowed,
            f"{_FORM.format(text=text)}{name} has no setting {word!r}, "
            + (f"only {', '.join(allowed)} (as in {name}-{allowed[0]}9)" if allowed else "and none at all"),
        )
        assert match is not None
        field = _FIELDS[match[1]]
        value = float(match[2])
        values[field] = bool(value) if field == "increasing" else int(value) if field == "num_layers" else value
    spec = AugmentSpec(policy=name, **values)  # type: ignore[arg-type]
    require(
        1 <= spec.num_layers <= 8, f"{_FORM.format(text=text)}n is {spec.num_layers}, use 1 to 8 operators per image"
    )
    require(
        0 <= spec.probability <= 1, f"{_FORM.format(text=text)}p is {spec.probability:g}, use a probability from 0 to 1"
    )
    require(
        spec.magnitude <= spec.magnitude_max,
        f"{_FORM.format(text=text)}m is {spec.magnitude:g}, over mmax {spec.magnitude_max:g}",
    )
    return spec
