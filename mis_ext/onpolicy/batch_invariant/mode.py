"""The mode: inside it a row's bits depend on the row, and not on what else is in the batch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mis_ext.onpolicy.batch_invariant import kernels
from mis_ext.onpolicy.batch_invariant.attention import scaled_dot_product_attention

_MEGATRON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"

aten = torch.ops.aten


@contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """Make this thread's products, attention, softmax and row sums batch-invariant, on a CPU and on CUDA.

    Floating-point ``mm``, ``addmm``, ``bmm``, ``baddbmm`` and ``mv`` (so ``linear``, ``matmul`` and ``einsum``) use
    tiles of a fixed shape, ``scaled_dot_product_attention`` and ``softmax`` fixed blocks; on CUDA ``log_softmax``, and
    ``mean`` and ``sum`` over the last dimension, take one order per row. A product with a bias is rounded, then added
    to the bias and rounded again, so engines that fuse the addition and engines that do not agree. Gradients flow as
    always and are equal to the plain ones within rounding. The idea is that of He et al., "Defeating Nondeterminism in
    LLM Inference", Thinking Machines Lab, 2025.

    The mode belongs to the thread that entered it. It may be entered again inside itself, which changes nothing, and is
    gone after the block, however the block ends. For an engine with threads of its own use
    :func:`batch_invariant_forward`. Compiled code (``torch.compile``, captured graphs, Transformer Engine, other custom
    kernels) runs as it was compiled.

    Raises:
        RuntimeError: A CUDA device without usable Triton, or Megatron-Core's own batch-invariant mode is on; nothing is
            enabled then. Or the block ends in another thread than it began in.
        NotImplementedError: In the block, a product that has no batch-invariant form here, see ``REFUSED``.
    """
    if is_batch_invariant():
        yield
        return
    if torch.cuda.is_available():
        kernels.check_device_type("cuda")
    megatron = sys.modules.get(_MEGATRON_KERNELS)
    if megatron is not None and megatron.is_batch_invariant_mode_enabled():
        raise RuntimeError(
            "Megatron-Core's batch-invariant mode is on, and would override the same operators: turn it off"
        )
    thread = threading.get_ident()
    with ExitStack() as stack:
        stack.enter_context(_FunctionOverrides())
        stack.enter_context(_OperatorOverrides())  # type: ignore[no-untyped-call]
        _local.is_on = True
        try:
            yield
        finally:
            if threading.get_ident() != thread:
                # Popping would take a mode off this thread's stack that was never on it.
                stack.pop_all()
                raise RuntimeError("batch_invariant_mode must end in the thread that it began in")
            _local.is_on = False


def is_batch_invariant() -> bool:
    """Whether this thread is inside :func:`batch_invariant_mode`."""
    return getattr(_local, "is_on", False)


@contextmanager
def batch_invariant_forward(*modules: nn.Module) -> Iterator[None]:
    """Run the forwards of these modules in :func:`batch_invariant_mode`, in whichever thread they are called.

    Args:
        *modules: Each gets a wrapper around its ``forward``, and its own one back after the block.

    Raises:
        ValueError: A module is wrapped already.
    """
    for module in modules:
        if hasattr(module.forward, "__batch_invariant__"):
            raise ValueError(f"the forward of {type(module).__name__} is batch-invariant already")
    with ExitStack() as stack:
        for module in modules:
            stack.callback(_restore_forward, module, vars(module).get("forward"))
            module.forward = _in_mode(module.forward)
        yield


def _in_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with batch_invariant_mode():
            return forward(*args, **kwargs)

    wrapped.__batch_invariant__ = True  # type: ignore[attr-defined]
    return wrapped


def _restore_forward(module: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    if own_forward is None:
        del module.forward
    else:
        module.forward = own_forward


class _FunctionOverrides(TorchFunctionMode):
    """Catches attention before torch picks one of its kernels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _OperatorOverrides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches products and reductions below autograd, so those of the backward pass too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        override = _OVERRIDES.get(func)
        if override is not None and args[0].is_floating_point():
            kernels.check_dtype(args[0])
            return override(func, *args, **kwargs)
        if func in REFUSED:
            raise NotImplementedError(f"{func} has no batch-invariant form here")
        # Without autograd (inference mode) operators arrive here before they are taken apart.
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _mm(func: Any, a: Tensor, b: Tensor) -> Any:
    return kernels.of(a).mm(a, b)


def _bmm(func: Any, a: Tensor, b: Tensor) -> Any:
    return kernels.of(a).bmm(a, b)


def _mv(func: Any, a: Tensor, b: Tensor) -> Any:
    return kernels.of(a).mm(a, b.unsqueeze(1)).squeeze(1)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if a.is_cuda and alpha == beta == 1:
        from mis_ext.onpolicy.batch_invariant import cuda

        return cuda.addmm(bias, a, b)
    return _add(bias, kernels.of(a).mm(a, b), beta, alpha)


def _baddbmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return _add(bias, kernels.of(a).bmm(a, b), beta, alpha)


def _softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    return kernels.of(x).softmax(x, dim, half_to_float)


def _add(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    # With beta 0 the bias counts for nothing, whatever it holds.
    return scaled if beta == 0 else torch.add(scaled, bias, alpha=beta)


def _on_cuda(name: str) -> Callable[..., Any]:
    """On a CPU these reduce each row on its own already."""

    def override(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_cuda:
            return func(x, *args, **kwargs)
        from mis_ext.onpolicy.batch_invariant import cuda

        return getattr(cuda, name)(x, *args, **kwargs)

    return override


def _over_last_dimension(name: str) -> Callable[..., Any]:
    """Sums over other dimensions are over the batch, and no concern of a row."""
    reduce_row = _on_cuda(name)

    def override(func: Any, x: Tensor, dim: list[int] | None, *args: Any, **kwargs: Any) -> Any:
        is_row = dim is not None and [axis % max(x.dim(), 1) for axis in dim] == [x.dim() - 1]
        return (reduce_row if is_row else _plain)(func, x, dim, *args, **kwargs)

    return override


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


_local = threading.local()

_OVERRIDES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _on_cuda("softmax_backward"),
    aten._log_softmax.default: _on_cuda("log_softmax"),
    aten._log_softmax_backward_data.default: _on_cuda("log_softmax_backward"),
    aten.mean.dim: _over_last_dimension("mean"),
    aten.sum.dim_IntList: _over_last_dimension("sum"),
}

REFUSED = frozenset(
    {
        aten.addmv.default,
        aten.addbmm.default,
        aten.convolution.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Products and attention kernels that would run unchanged, and so are errors inside the mode."""
