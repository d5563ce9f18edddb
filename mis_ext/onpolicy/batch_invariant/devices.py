"""Which module computes for tensors of a device, and the norm that engines call by name."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from mis_ext.correction.backend import triton_obstacle
from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing


class _Kernels(Protocol):
    """What there is for every type of device; ``cpu`` and the modules under ``cuda`` say what each returns."""

    def mm(self, a: Tensor, b: Tensor) -> Tensor: ...

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor) -> Tensor: ...

    def bmm(self, a: Tensor, b: Tensor) -> Tensor: ...

    def grouped_rows(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor: ...

    def grouped_sums(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor: ...

    def add_rows_(self, out: Tensor, index: Tensor, source: Tensor) -> None: ...

    def attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]: ...

    def attention_backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        packing: Packing,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def kernels_for(x: Tensor) -> _Kernels:
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


# Every product asks.
@cache
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x ** 2) + eps)).to(x.dtype)``: rounded before the weight, as in transformers' models.

    torch's own RMSNorm, which Megatron-Core's local layers use, rounds once, after the weight. A row has the same bits
    in any batch (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467).

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean square.
    """
    if x.is_cuda:
        from mis_ext.onpolicy.batch_invariant import cuda

        return cuda.rms_norm(x, weight, eps)
    normalized = x.float()
    normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)
