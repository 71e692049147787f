"""One layer on several ranks: 1D, 2D, 2.5D and 3D tensor parallelism of a timm VisionTransformer."""

from dali_train.config.parallel import TensorMode, batch_shards, grid_sizes
from dali_train.parallel.tensor.count import parameters_per_rank
from dali_train.parallel.tensor.modes import make_grid
from dali_train.parallel.tensor.timm_order import TimmOrder
from dali_train.parallel.tensor.vit import check_model, tensor_parallel

__all__ = [
    "TensorMode",
    "TimmOrder",
    "batch_shards",
    "check_model",
    "grid_sizes",
    "make_grid",
    "parameters_per_rank",
    "tensor_parallel",
]
