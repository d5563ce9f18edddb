# SPDX-License-Identifier: Apache-2.0
"""Replaces SGLang's CUDA kernel package on a machine without a GPU.

SGLang imports names from it at startup, but with the settings of ``sglang_engine.py`` it calls none of them. A call
raises an error with the name.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

# SGLang registers the memory of the experts with CUDA for faster copies. This is not needed here.
torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

# SGLang 0.5.17 uses pinned memory instead, which torch has only for GPUs.
_zeros = torch.zeros
torch.zeros = lambda *sizes, pin_memory=False, **given: _zeros(*sizes, **given)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any public name is a function that refuses to run."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU (CPU stand-in)")

    return unavailable
