"""Launching kernels that Triton has compiled before, at little cost to the host: a decode step waits for the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IS_HIP = torch.version.hip is not None
_LARGEST_INT32 = 2**31 - 1


class Launcher:
    """Launches a ``triton.jit`` kernel whose arguments are tensors, then numbers, then compile-time constants.

    Triton finds out at every launch what it may assume of the arguments, which takes longer than the launch. Here the
    same is found out with less: whether an integer is 1, a multiple of 16 or above int32, and which pointers are
    aligned. Not on AMD, where Triton also assumes of what it saw to be below 2 GB that it stays so.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names: list[str] = kernel.arg_names
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        num_programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        """Launch on the current stream.

        Args:
            num_programs: At least 1.
            tensors: The kernel's first arguments.
            numbers: The next ones.
            constants: The last ones, by name.
            options: Of the compiler: ``num_warps``, ``num_stages``.
        """
        values = [constants[name] for name in self._names[-len(constants) :]]
        key = (
            tensors[0].device,
            *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
            *[(number == 1, number % 16 == 0, number > _LARGEST_INT32) for number in numbers],
            *values,
            *options.values(),
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(num_programs, 1, 1)](*tensors, *numbers, *values)
            return
        compiled = self._kernel[(num_programs,)](*tensors, *numbers, **constants, **options)
        # The interpreter compiles nothing.
        if compiled is not None and not IS_HIP:
            self._compiled[key] = compiled
