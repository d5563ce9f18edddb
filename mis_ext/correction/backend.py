# SPDX-License-Identifier: Apache-2.0
"""Which backend computes: one call's passes, between which :mod:`mis_ext.correction.pipeline` communicates.

Triton kernels on a GPU where Triton imports, PyTorch operations elsewhere. ``MIS_EXT_BACKEND=eager`` or ``triton``
decides instead; a choice that cannot be had is an error.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mis_ext.validation import check_choice

if TYPE_CHECKING:
    from mis_ext.correction.eager import EagerBackend, EagerSequences
    from mis_ext.correction.triton.fused import FusedSequences, TritonBackend

    Backend: TypeAlias = EagerBackend | TritonBackend
    Sequences: TypeAlias = EagerSequences | FusedSequences
else:
    # Importing mis_ext must not import Triton.
    Backend = Sequences = object


class Outputs(NamedTuple):
    """What the last pass writes; neither weights nor a mask where nothing is corrected (``metrics_only``).

    ``weights_T``: ``[T]`` float32, 0 where a token has none. ``loss_mask_R``: ``[R]`` float32, the given mask where a
    token of the whole responses stays in the loss, else 0. ``token_metrics``: ``[T]`` by public name.
    """

    weights_T: Tensor | None
    loss_mask_R: Tensor | None
    token_metrics: dict[str, Tensor]


VARIABLE = "MIS_EXT_BACKEND"
BACKENDS = ("eager", "triton")
OLDEST_TRITON = (3, 4)


def choose_backend(device: torch.device) -> type[Backend]:
    """The backend that runs the passes for tensors on ``device``: eager or Triton."""
    if wants_triton(device):
        from mis_ext.correction.triton.fused import TritonBackend

        return TritonBackend
    from mis_ext.correction.eager import EagerBackend

    return EagerBackend


def wants_triton(device: torch.device) -> bool:
    """Whether Triton kernels compute for tensors on ``device``."""
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
