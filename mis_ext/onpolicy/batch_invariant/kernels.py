"""Which module computes for tensors of a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mis_ext.correction.backend import triton_obstacle
from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.onpolicy.batch_invariant.packing import Packing


class Kernels(Protocol):
    """What there is for every type of device; ``cpu`` says what each returns."""

    def mm(self, a: Tensor, b: Tensor) -> Tensor: ...  # noqa: D102

    def bmm(self, a: Tensor, b: Tensor) -> Tensor: ...  # noqa: D102

    def attention_forward(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
    ) -> tuple[Tensor, Tensor]: ...

    def attention_backward(  # noqa: D102
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        packing: Packing,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def of(x: Tensor) -> Kernels:
    """The module of kernels, for a CPU or for CUDA, that the device of ``x`` needs.

    Raises:
        RuntimeError: There is none.
    """
    if x.device.type == "cpu":
        return cpu
    check_device_type(x.device.type)
    from mis_ext.onpolicy.batch_invariant import cuda

    return cuda


def check_dtype(x: Tensor) -> None:
    """Refuse float64 on CUDA, for which there are no kernels.

    Raises:
        NotImplementedError: So it is. ``a @ b`` would take a TypeError for a refusal of the operand.
    """
    if x.is_cuda and x.dtype == torch.float64:
        raise NotImplementedError(
            "no batch-invariant execution of float64 on cuda: take float32, bfloat16 or float16, or leave the mode"
        )


def check_device_type(device_type: str) -> None:
    """Refuse a type of device that has no batch-invariant kernels.

    Raises:
        RuntimeError: It has none, or Triton is missing or too old.
    """
    if device_type == "cpu":
        return
    problem = triton_obstacle(device_type) if device_type == "cuda" else "only cpu and cuda have kernels"
    if problem is not None:
        raise RuntimeError(f"no batch-invariant execution on {device_type}: {problem}")
