# SPDX-License-Identifier: Apache-2.0
"""Launching kernels with little CPU overhead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` of a kernel that is compiled only for its compile-time arguments and dtypes, not for values.

    Triton would recompile if an integer is 1 or a pointer is aligned. Both differ from call to call here.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=runtime)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """The context in which a kernel runs on the device of ``tensor``; Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


IS_HIP = torch.version.hip is not None
_LARGEST_INT32 = 2**31 - 1


class Launcher:
    """Launches a ``triton.jit`` kernel whose arguments are tensors, then numbers, then compile-time constants.

    At every launch, Triton checks its assumptions about the arguments. This takes longer than the launch. This class
    checks the same with less work: whether an integer is 1, a multiple of 16 or above int32, and whether pointers are
    aligned. It is not used on AMD, where Triton also assumes that tensors below 2 GB stay below 2 GB.
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
            num_programs: Number of programs; 0 launches nothing.
            tensors: The kernel's first arguments.
            numbers: The following arguments.
            constants: The last arguments, by name.
            options: Options of the compiler: ``num_warps``, ``num_stages``.
        """
        if num_programs == 0:
            return
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
