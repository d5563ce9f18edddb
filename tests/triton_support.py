"""Where the Triton kernels run in the tests: on a GPU if there is one, else in Triton's interpreter."""

import torch

from mis_ext.backend import triton_obstacle

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OBSTACLE = triton_obstacle(DEVICE.type)
"""Why they cannot run, or None."""
