"""One layer on several ranks: 1D, 2D, 2.5D and 3D tensor parallelism of a timm VisionTransformer."""

from dali_train.parallel.tensor.vit import check_model, parameters_per_rank, tensor_parallel

__all__ = ["check_model", "parameters_per_rank", "tensor_parallel"]
