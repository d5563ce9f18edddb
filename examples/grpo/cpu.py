# SPDX-License-Identifier: Apache-2.0
"""Run Megatron-Core without a GPU: redirect its CUDA calls to the CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _CudaCallsOnCpu(TorchFunctionMode):
    """Makes CPU tensors look like CUDA tensors.

    Factory calls for CUDA or pinned memory return plain CPU tensors, ``Tensor.cuda`` returns its tensor, and the type
    name that gradient clipping checks is that of CUDA.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class _NoRandomStates:
    """Replaces the states of CUDA's generators, which Megatron-Core's attention needs even for a dropout of 0."""

    def fork(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def megatron_device(device: torch.device) -> Iterator[None]:
    """Let Megatron-Core calls in this block use ``device``; on CUDA nothing changes.

    Megatron-Core 0.16 builds and trains a ``GPTModel`` on a CPU except for literal ``device="cuda"`` arguments and
    ``torch.cuda.current_device()`` in the rotary embedding, the gradient buffers, the schedule and gradient clipping,
    and for the generator states that its attention takes for dropout.
    """
    if device.type == "cuda":
        yield
        return
    with (
        patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", _NoRandomStates),
        _CudaCallsOnCpu(),
    ):
        yield
