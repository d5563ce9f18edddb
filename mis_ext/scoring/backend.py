# SPDX-License-Identifier: Apache-2.0
"""Selection of Triton kernels or PyTorch operations for a device.

Triton kernels run on a GPU if Triton can be imported. ``MIS_EXT_BACKEND=eager`` or ``triton`` overrides this. A backend
that is not available is an error.
"""

from __future__ import annotations

import functools
import os

import torch

from mis_ext.validation import check_choice

VARIABLE = "MIS_EXT_BACKEND"
BACKENDS = ("eager", "triton")
OLDEST_TRITON = (3, 4)


def wants_triton(device: torch.device) -> bool:
    """True if Triton kernels are used for tensors on ``device``."""
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


def triton_obstacle(device_type: str) -> str | None:
    """The reason why Triton kernels cannot run on a type of device, or None."""
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
