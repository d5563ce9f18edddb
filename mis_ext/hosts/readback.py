"""Numbers that are read when they have arrived on the host, so that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AsyncReadback:
    """One tensor on its way from the device to the host, which the host takes without waiting once it has arrived."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, torch.cuda.Event | None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way."""
        return self._sent is None

    def send(self, values: Tensor) -> None:
        """Send ``values`` to the host, in place of what is on its way."""
        if not values.is_cuda:
            self._sent = (values, None)
            return
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._sent = (on_host, copied)

    def receive(self) -> list[float] | None:
        """The numbers, once; None while there are none."""
        if self._sent is None:
            return None
        values, copied = self._sent
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            return None
        self._sent = None
        numbers: list[float] = values.tolist()
        return numbers


class RunningReadback:
    """What several calls have counted together. The first look waits for the device, later ones read what is there."""

    def __init__(self, merge: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._merge = merge
        self._counted: Tensor | None = None
        self._readback = AsyncReadback()

    def add(self, counted: Tensor) -> list[float] | None:
        """Everything that was counted until now, or on a device until a while ago; None while nothing has arrived."""
        is_first = self._counted is None
        self._counted = counted if self._counted is None else self._merge(self._counted, counted)
        if is_first or not counted.is_cuda:
            numbers: list[float] = self._counted.tolist()
            return numbers
        arrived = self._readback.receive()
        if self._readback.is_empty:
            self._readback.send(self._counted)
        return arrived


def is_capturing(values: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be sent."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()
