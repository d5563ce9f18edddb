"""Which backend scores: Triton kernels on a GPU where Triton imports, PyTorch operations elsewhere."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mis_ext.correction.backend import wants_triton
from mis_ext.scoring.eager import EagerBackend
from mis_ext.scoring.passes import Backend

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(logits: Tensor) -> Backend:
    """The backend for these logits; ``MIS_EXT_BACKEND`` decides as in the correction. float64 is eager.

    Raises:
        ValueError: ``MIS_EXT_BACKEND`` is neither eager nor triton, or asks for Triton where it cannot run.
    """
    return _triton_backend() if logits.dtype in FUSED_DTYPES and wants_triton(logits.device) else EagerBackend()


@functools.cache
def _triton_backend() -> Backend:
    # Imported when needed: importing mis_ext must not import Triton.
    from mis_ext.scoring.triton_backend import TritonBackend

    return TritonBackend()
