"""1D, 2D, 2.5D and 3D tensor parallelism of a timm VisionTransformer."""
