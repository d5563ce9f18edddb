"""Where the Triton kernels run in the tests: on a GPU if there is one, else in Triton's interpreter."""

import numpy as np
import torch

from mis_ext.correction.backend import triton_obstacle

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OBSTACLE = triton_obstacle(DEVICE.type)
"""Why they cannot run, or None."""


def dot_of_the_interpreter(self, a, b, d, input_precision, max_num_imprecise_acc):
    """``tl.dot`` in the interpreter, each element by itself: the terms are added in the order of k.

    The interpreter multiplies by ``numpy.matmul``, where the BLAS may round the rows of one tile differently. OpenBLAS
    0.3.29 does so in its kernels for Haswell, those of a CPU without AVX-512, not in those for SkylakeX.
    """
    a_data, b_data = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    total = np.zeros_like(d.data)
    for k in range(a_data.shape[-1]):
        total += a_data[..., :, k, None] * b_data[..., k, None, :]
    return type(d)(total + d.data, d.dtype.scalar)
