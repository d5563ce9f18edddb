"""Launching kernels at little cost to the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` of a kernel that is compiled for its compile-time arguments and dtypes, whatever the values.

    Triton would compile anew where an integer is 1 or a pointer is aligned, which differs from call to call here.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=runtime)


class BoundKernel:
    """A kernel with its compile-time arguments.

    Triton looks at every argument of every launch to find the compiled kernel, which takes longer than the launch. Here
    the dtypes of ``varying`` tell compiled kernels apart; all other arguments always have the same dtypes.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel = kernel
        names = kernel.arg_names
        self._constants = tuple(constants[name] for name in names[len(names) - len(constants) :])
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, num_programs: int, *arguments: Any, varying: tuple[Any, ...] = ()) -> None:
        """Launch ``num_programs`` programs on the current stream."""
        if num_programs == 0:
            return
        key = (arguments[0].device, varying)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(num_programs, 1, 1)](*arguments, *self._constants)
            return
        compiled = self._kernel[(num_programs,)](*arguments, *self._constants)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled


def dtypes_of(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.dtype, ...]:
    """The dtypes that tell compiled kernels apart."""
    return tuple([tensor.dtype for tensor in tensors])


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which a kernel runs on the device of ``tensor``; Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
