"""The ledger of a run: loss and margin of each training image in each epoch (`hooks.ledger`)."""

from dataclasses import dataclass

from dali_train.config.check import NeedsIndex, NeedsOneLabel


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """Whether the section hooks keeps a ledger."""

    ledger: NeedsIndex[NeedsOneLabel[bool]] = False
    """Write ledger/epoch-NNNNN.npy: loss and margin of each training image in each epoch, in 4 bytes, against the
    image's own label; `dali-train suspects` finds images with a wrong label by them."""
