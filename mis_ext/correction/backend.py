"""Which backend computes: Triton kernels on a GPU where Triton imports, PyTorch operations elsewhere.

``MIS_EXT_BACKEND=eager`` or ``triton`` decides instead; a choice that cannot be had is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from mis_ext.correction.eager import EagerBackend
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.passes import Backend, Streams
from mis_ext.correction.plan import Plan
from mis_ext.validation import check_choice

VARIABLE = "MIS_EXT_BACKEND"
BACKENDS = ("eager", "triton")
OLDEST_TRITON = (3, 4)

MakeBackend = Callable[[Streams, PackedLayout, Plan, Tensor], Backend]


def choose_backend(device: torch.device) -> MakeBackend:
    """The backend that runs the passes for tensors on ``device``: eager or Triton.

    Raises:
        ValueError: ``MIS_EXT_BACKEND`` is neither eager nor triton, or asks for Triton where it cannot run.
    """
    return _triton_backend() if wants_triton(device) else EagerBackend


def wants_triton(device: torch.device) -> bool:
    """Whether Triton kernels compute for tensors on ``device``.

    Raises:
        ValueError: ``MIS_EXT_BACKEND`` is neither eager nor triton, or asks for Triton where it cannot run.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        check_choice(VARIABLE, wanted, BACKENDS)
    if wanted == "eager" or (wanted is None and (device.type != "cuda" or torch.compiler.is_compiling())):
        return False
    return _can_run_triton(device.type, is_wanted=wanted == "triton")


@functools.cache
def _can_run_triton(device_type: str, *, is_wanted: bool) -> bool:
    obstacle = triton_obstacle(device_type)
    if obstacle is not None and is_wanted:
        raise ValueError(f"{VARIABLE}=triton: {obstacle}")
    return obstacle is None


@functools.cache
def _triton_backend() -> MakeBackend:
    # Imported when needed: importing mis_ext must not import Triton.
    from mis_ext.correction.triton.backend import TritonBackend

    return TritonBackend


def triton_obstacle(device_type: str) -> str | None:
    """Why Triton kernels cannot run on a type of device, or None."""
    try:
        import triton
    except ImportError as error:
        return f"Triton does not import ({error})"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the tensors are on {device_type}, not on a GPU (TRITON_INTERPRET=1 interprets the kernels on a CPU)"
    return None
