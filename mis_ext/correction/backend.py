"""What a backend does between the collectives, and which one computes.

Triton kernels on a GPU where Triton imports, PyTorch operations elsewhere. ``MIS_EXT_BACKEND=eager`` or ``triton``
decides instead; a choice that cannot be had is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mis_ext.correction.formula import NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import Streams, TokenRatios
from mis_ext.correction.normalization import WeightScale
from mis_ext.correction.plan import Plan
from mis_ext.validation import check_choice


class Sequences(Protocol):
    """What the pass over sequences found: numbers of each sequence, and totals of this call."""

    @property
    def totals_A(self) -> Tensor:
        """Totals of this call, in the order of the plan; behind them the status of the ranks."""

    @property
    def values(self) -> NamedValues:
        """Numbers of each sequence ``[S]``, by the names of the plan."""


class Outputs(NamedTuple):
    """What the last pass writes; neither weights nor a mask where nothing is corrected (``metrics_only``).

    ``weights_T``: ``[T]`` float32, 0 where a token has none. ``loss_mask_R``: ``[R]`` float32, the given mask where a
    token of the whole responses stays in the loss, else 0. ``token_metrics``: ``[T]`` by public name.
    """

    weights_T: Tensor | None
    loss_mask_R: Tensor | None
    token_metrics: dict[str, Tensor]


class Backend(Protocol):
    """One call's passes, in this order; between them :mod:`mis_ext.correction.pipeline` communicates."""

    streams: Streams
    layout: PackedLayout
    plan: Plan
    band_scales_N: Tensor

    @property
    def tokens(self) -> TokenRatios:
        """Log-ratios of the local tokens, computed once where the passes need them as tensors too."""

    def take_segments(self, segments_FT: Tensor) -> None:
        """The plan's ``segment_names`` of each local token; before any other pass, where there are some."""

    def token_statistics(self) -> Tensor:
        """``[F + 1, S]``, this rank's share of the plan's columns, and a row for the status: ``inf``, no failure."""

    def keep_bits(self) -> Tensor:
        """uint8, one bit per token of the whole responses: set where a local token passes the gates on tokens."""

    def sequences(self, gathered_WFS: Tensor) -> Sequences:
        """What follows for sequences from the shares of all context-parallel ranks."""

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """``[A]`` totals of all data-parallel ranks from those of each."""

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_A: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        token_metrics: bool,
    ) -> Outputs:
        """Weights, masks, and where asked for the metrics of each token's sequence."""

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """``[T]`` values times weights, 0 where the weight is 0, whatever the value; the gradient is the weight."""


VARIABLE = "MIS_EXT_BACKEND"
BACKENDS = ("eager", "triton")
OLDEST_TRITON = (3, 4)

MakeBackend = Callable[[Streams, PackedLayout, Plan, Tensor], Backend]


def choose_backend(device: torch.device) -> MakeBackend:
    """The backend that runs the passes for tensors on ``device``: eager or Triton.

    Raises:
        ValueError: ``MIS_EXT_BACKEND`` is neither eager nor triton, or asks for Triton where it cannot run.
    """
    # Imported when needed: importing mis_ext must not import Triton.
    if wants_triton(device):
        from mis_ext.correction.triton.backend import TritonBackend

        return TritonBackend
    from mis_ext.correction.eager import EagerBackend

    return EagerBackend


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
