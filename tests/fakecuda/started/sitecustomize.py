"""What every Python imports that a benchmark starts on the fake: kernels that it can launch, see `jobs.kernels`."""

import torch

torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
