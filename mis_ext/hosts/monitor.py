"""What a session watches while it runs: masks, other ranks' failures, and how much is rejected."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from mis_ext.correction.collectives import failed_rank
from mis_ext.correction.pipeline import Correction
from mis_ext.hosts.guards import MismatchWarning
from mis_ext.hosts.packing import check_mask, mask_extremes, refuse_extremes
from mis_ext.hosts.readback import AsyncReadback, is_capturing

_CALLS_PER_LOOK = 8
_SLOTS = 64


class RejectionMonitor:
    """Warns, once, when more is rejected than the user thought possible.

    Looks at one call in eight, from the first on, and is a call late: so it never waits for the device.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._readback = AsyncReadback()
        self._names: tuple[str, ...] = ()
        self._warned = False
        self._num_calls = 0

    def observe(self, correction: Correction) -> None:
        """Look at what was sent for if it has arrived, and send for this call's totals if it is their turn."""
        if self._warned or is_capturing(correction.totals_A):
            return
        self._num_calls += 1
        arrived = self._readback.receive()
        if arrived is not None:
            self._warn_above(dict(zip(self._names, arrived[:-1], strict=True)))
        if self._readback.is_empty and self._num_calls % _CALLS_PER_LOOK == 1:
            self._names = tuple(total.name for total in correction.plan.totals)
            self._readback.send(correction.totals_A)

    def _warn_above(self, totals: dict[str, float]) -> None:
        for what, kept, original in (
            ("tokens", totals["total_num_kept"], totals["total_num_response"]),
            ("sequences", totals["total_has_kept"], totals["total_has_response"]),
        ):
            share = 1.0 - kept / original if original else 0.0
            if share > self._max_fraction:
                self._warned = True
                warnings.warn(
                    f"{share:.1%} of the {what} of a micro-batch were rejected, more than mis_max_reject_fraction = "
                    f"{self._max_fraction:g}: the bounds are too tight for this mismatch (see "
                    "mis_kept_token_fraction and mis_kept_seq_fraction; this warning comes once)",
                    MismatchWarning,
                    stacklevel=5,
                )


class MaskMonitor:
    """Refuses masks that say neither yes nor no of a token.

    The first look waits for the device. Then it looks at one call in eight, and is a call late.
    """

    def __init__(self) -> None:
        self._readback = AsyncReadback()
        self._num_calls = 0

    def observe(self, mask: Tensor) -> None:
        """Look at what was sent for if it has arrived, and send for the extremes of this mask if it is its turn.

        Raises:
            ValueError: A value is below 0 or not finite.
        """
        if is_capturing(mask):
            return
        self._num_calls += 1
        if self._num_calls == 1:
            check_mask(mask)
            return
        arrived = self._readback.receive()
        if arrived is not None:
            refuse_extremes(arrived)
        if self._readback.is_empty and self._num_calls % _CALLS_PER_LOOK == 1:
            extremes = mask_extremes(mask)
            if extremes is not None:
                self._readback.send(extremes)


class StatusMonitor:
    """Raises when another rank failed: at once on a CPU and at the first call, else a call late without waiting."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        self._next = 0

    def observe(self, status: Tensor) -> None:
        """Raise if a rank has failed whose data a call of this session needed.

        Raises:
            RuntimeError: It names the rank, whose own error says why.
        """
        if is_capturing(status):
            return
        if self._slots is None:
            raise_if_failed(float(status))
        if not status.is_cuda:
            return
        if self._slots is None:
            self._slots = torch.full((_SLOTS,), torch.inf, pin_memory=True)
        # Four bytes arrive whole, now or later; a status that has not arrived yet is seen by a later call.
        raise_if_failed(float(self._slots.min()))
        self._slots[self._next].copy_(status, non_blocking=True)
        self._next = (self._next + 1) % _SLOTS


def raise_if_failed(status: float) -> None:
    """Raise an error if a status names a rank on which the correction failed.

    Raises:
        RuntimeError: It names the rank, whose own error says why.
    """
    rank = failed_rank(status)
    if rank is not None:
        raise RuntimeError(f"the correction failed on rank {rank}; the error of that rank says why")
