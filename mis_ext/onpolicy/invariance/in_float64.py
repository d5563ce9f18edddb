"""The same computation in float64, without changing the function or module that performs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operator computes in float64 (complex128), whatever the dtype of its arguments.

    Parameters, closed-over tensors and explicit casts (``x.float()`` in a norm, ``.to(torch.bfloat16)`` after it) are
    widened operator by operator, which ``module.double()`` would not do. A kernel that is no operator at all (Triton's,
    called directly) is not reached.

    Raises:
        TypeError: An operator writes into a tensor of lower precision, which rounds, or is not PyTorch's own, so that
            nobody knows how precisely it computes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            raise TypeError(f"{func} is not known to compute in float64")
        # Without autograd (inference mode) casts arrive here before they are taken apart.
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        aliased = [argument for argument in func._schema.arguments if argument.alias_info is not None]
        if (aliased and not func._schema.is_mutable) or func is torch.ops.aten.clone.default:
            # A view or a copy stays what it is; whatever computes with it widens it.
            return func(*args, **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in aliased:
            value = given.get(argument.name)
            if isinstance(value, Tensor) and _is_narrow(value.dtype):
                raise TypeError(f"{func} writes into a tensor of {value.dtype}")
        # Outputs too: a factory without a dtype makes the default one.
        return tree_map(_widen, func(*tree_map(_widen, args), **tree_map(_widen, kwargs)))


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and _is_narrow(value.dtype):
        return value.to(_wide(value.dtype))
    if isinstance(value, torch.dtype) and _is_narrow(value):
        return _wide(value)
    return value


def _is_narrow(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype != _wide(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
