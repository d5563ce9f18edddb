# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang's CUDA kernel package on a machine without a GPU.

SGLang imports names from it at start-up but, with the settings of ``sglang_engine.py``, calls none of them. One that is
called after all raises an error with its name.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

# SGLang tells CUDA of the memory in which it keeps the experts, so that copies are faster: here nobody is to be told.
torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

# SGLang 0.5.17 asks for pinned memory in its place, which torch has for GPUs alone.
_zeros = torch.zeros
torch.zeros = lambda *sizes, pin_memory=False, **given: _zeros(*sizes, **given)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any public name is a function that refuses to run."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU (CPU stand-in)")

    return unavailable
