"""Training on a mixture of datasets, with exact shares on any number of ranks: `data.mix`, and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

from dali_train.config.check import (
    ByContent,
    Conflict,
    Count,
    Extra,
    NeedsIndex,
    OneDataset,
    Rule,
    as_typed,
    is_url,
    refuse_credentials,
    require,
)

SourceName = Annotated[
    str, Rule("a name without spaces, commas and slashes that begins with no dot", pattern=r"[^\s,./][^\s,/]{0,99}")
]
Weight = Annotated[float, Rule("a weight from 0 to 1,000,000,000", 0, 1e9)]

_KIND = Extra[Any]("dali_train.extras.mixture.kind", "data.mix")


def _lacks_mix(data: "MixtureSettings", name: str) -> bool:
    return not data.mix and getattr(data, name) not in ((), "union", None)


@dataclass(frozen=True, kw_only=True)
class MixtureSettings(OneDataset):
    """Which datasets are trained on together, and how much of each."""

    mix: NeedsIndex[
        ByContent[
            Annotated[
                tuple[tuple[SourceName, str, Weight], ...],
                Rule("rows of a name, a dataset and a weight, such as photos,data/photos,3 art,data/art,1"),
            ]
        ]
    ] = ()
    """Train on several datasets at once: (name, directory or URL, weight) of each. Every micro-batch has each one's
    share of its images, rounded up or down, and each passes through epochs of its own. data.root, usually the first of
    them, has the validation split, and its classes come first. Empty: train on data.root."""
    mix_until: Annotated[
        tuple[tuple[Weight, ...], ...], Rule("rows of an epoch and a weight for each dataset, such as 6,1,0 12,2,1")
    ] = ()
    """Other weights for data.mix in the first epochs: 6,1,0 12,2,1 has the weights 1 and 0 until epoch 6, 2 and 1 until
    epoch 12, and those of data.mix from then on. A step uses the weights of the epoch in which it begins."""
    mix_classes: Literal["union", "by-name"] | dict[str, dict[str, str] | tuple[str, ...]] = "union"
    """The classes of data.mix. union: those of data.root, then those of the others in their order; the same name is the
    same class. by-name: those of data.root, which must have every class. Or by the names of datasets, the class of
    data.root for each of theirs, as a dict or in their order: {'art': {'drawn cat': 'cat'}}; the others by-name."""
    epoch_images: Count | None = None
    """With data.mix, the images of an epoch, by which run.epochs and all schedules count. None: as many as all its
    datasets have."""

    @property
    def kind(self) -> Extra[Any] | None:
        return _KIND if self.mix else super().kind

    @property
    def sources(self) -> Mapping[str, str]:
        return {name: root for name, root, _ in self.mix}

    def moved_sources(self, places: Mapping[str, str]) -> dict[str, Any]:
        return {"mix": tuple((name, places.get(root, root), weight) for name, root, weight in self.mix)}

    @property
    def mix_weights(self) -> list[tuple[float, tuple[float, ...]]]:
        """The epoch from which on data.mix has these weights, and the weights, (datasets,); the first epoch is 0."""
        starts = [0.0, *(until for until, *_ in self.mix_until)]
        weights = [*(tuple(row[1:]) for row in self.mix_until), tuple(weight for *_, weight in self.mix)]
        return list(zip(starts, weights, strict=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        for root in self.sources.values():
            if is_url(root):
                refuse_credentials("data.mix", root)
        names = [name for name, _, _ in self.mix]
        require(len({*names}) == len(names), f"data.mix has the names {', '.join(names)}: use each name once")
        for row in self.mix_until if self.mix else ():
            require(
                len(row) == 1 + len(self.mix),
                f"data.mix_until has a row {as_typed(row)}: use an epoch and the weights of {', '.join(names)}",
            )
        require(
            all(first[0] < then[0] for first, then in pairwise([(0.0,), *self.mix_until])),
            f"data.mix_until is {as_typed(self.mix_until)}: use increasing epochs over 0, each the end of its weights",
        )
        require(
            not self.mix or all(sum(weights) > 0 for _, weights in self.mix_weights),
            f"data.mix is {as_typed(self.mix)} with data.mix_until {as_typed(self.mix_until)}: use at least one weight "
            "over 0 at any time",
        )

    CONFLICTS = tuple(
        Conflict(
            names=(name, "mix"),
            when=partial(_lacks_mix, name=name),
            remedy="it belongs to a mixture of datasets; set data.mix, or leave it out",
        )
        for name in ("mix_until", "mix_classes", "epoch_images")
    )
