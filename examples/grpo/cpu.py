"""Run Megatron-Core without a GPU: its calls that assume CUDA are sent to the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _CudaCallsOnCpu(TorchFunctionMode):
    """Makes CPU tensors pass for CUDA ones.

    Factory calls that ask for CUDA or pinned memory get plain CPU tensors, ``Tensor.cuda`` returns its tensor, and the
    type name that gradient clipping asserts is CUDA's.
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


@contextmanager
def megatron_device(device: torch.device) -> Iterator[None]:
    """Let Megatron-Core calls in this block use ``device``; on CUDA nothing changes.

    Megatron-Core 0.16 builds and trains a ``GPTModel`` on a CPU except for literal ``device="cuda"`` arguments and
    ``torch.cuda.current_device()`` in the rotary embedding, the gradient buffers, the schedule and gradient clipping.
    """
    if device.type == "cuda":
        yield
        return
    with patch("torch.cuda.current_device", lambda: torch.device("cpu")), _CudaCallsOnCpu():
        yield
