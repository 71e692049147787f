"""How images leave the data path."""

from dataclasses import dataclass

import torch
from nvidia.dali import types


@dataclass(frozen=True, kw_only=True)
class PixelFormat:
    """How images leave the data path: always (n, 3, size, size), normalised."""

    device_id: int | None  # GPU on which images are decoded; None: on the CPU
    num_threads: int
    dtype: torch.dtype  # float32, float16 or bfloat16
    channels_last: bool  # memory format
    pinned: bool  # decoded on the CPU for a model on a GPU: page-locked memory, which is copied without waiting

    @property
    def dali_dtype(self) -> types.DALIDataType:
        """What DALI's graph ends with; it has no bfloat16, so that is made of float16, which has more digits."""
        return types.FLOAT if self.dtype == torch.float32 else types.FLOAT16
