"""What the mode puts in the place of torch's functions and operators, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mis_ext.onpolicy.batch_invariant import accumulation, grouped, kernels, ties
from mis_ext.onpolicy.batch_invariant.sdpa import scaled_dot_product_attention

aten = torch.ops.aten

# Torch 2.11 has none yet.
_redispatch = getattr(torch.overrides, "redispatch_function", None)

_CALLERS_OF_ATTENTION = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad, F.multi_head_attention_forward}
)
"""Functions written in Python, for whose length torch takes the mode off: attention in them, also that of a checkpoint
which a backward pass computes again, would run unseen."""


class FunctionOverrides(TorchFunctionMode):
    """Catches attention before torch picks one of its kernels."""

    @classmethod
    def is_on(cls) -> bool:
        """Whether functions called from here arrive at one of these."""
        return any(isinstance(mode, cls) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        if func in _CALLERS_OF_ATTENTION and _redispatch is not None:
            with self:
                return _redispatch(func, types, args, kwargs)
        return func(*args, **kwargs)


class OperatorOverrides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches products and reductions below autograd, so those of the backward pass too."""

    @classmethod
    def is_on(cls) -> bool:
        """Whether operators called from here arrive at one of these."""
        return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        override = _override_of(func)
        if override is not None and args[0].is_floating_point():
            kernels.check_dtype(args[0])
            return override(func, *args, **kwargs)
        if func in REFUSED and args[0].is_floating_point():
            raise NotImplementedError(f"{func} has no batch-invariant form here{_advice(func)}")
        # Without autograd (inference mode) operators arrive here before they are taken apart.
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _advice(func: Any) -> str:
    if "attention" not in func.name() or FunctionOverrides.is_on():
        return ""
    return (
        ", and this torch hides the call of attention from the mode: in nn.MultiheadAttention call "
        "scaled_dot_product_attention instead, around checkpoints use batch_invariant_forward(model)"
    )


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


@cache
def _override_of(func: Any) -> Callable[..., Any] | None:
    return _OVERRIDES.get(func) or grouped.OVERRIDES_OF_LIBRARIES.get(func.name())


def _mm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=2)
    return kernels.of(a).mm(a, b)


def _bmm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=3)
    if b.shape[2] == 1 < a.shape[1]:
        # An expert's matrix times its token: the same products and sums as where the token is a row of a batch.
        return kernels.of(a).bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return kernels.of(a).bmm(a, b)


def _mv(func: Any, a: Tensor, b: Tensor) -> Any:
    return _mm(func, a, b.unsqueeze(-1)).squeeze(-1)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if a.is_cuda and alpha == beta == 1:
        from mis_ext.onpolicy.batch_invariant import cuda

        _check_factors(a, b, num_dims=2)
        return cuda.addmm(_expanded(bias, a, b), a, b)
    return _sum(_mm(func, a, b), _expanded(bias, a, b), beta, alpha)


def _baddbmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return _sum(_bmm(func, a, b), _expanded(bias, a, b), beta, alpha)


def _sum(product: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    # With beta 0 the bias counts for nothing, whatever it holds.
    return scaled if beta == 0 else torch.add(scaled, bias, alpha=beta)


def _check_factors(a: Tensor, b: Tensor, *, num_dims: int) -> None:
    """Refuse what torch refuses, with its class of error; a TypeError would make ``a @ b`` blame the operator."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"the factors of a product must have one dtype, got {a.dtype} and {b.dtype}")
    fit = a.dim() == b.dim() == num_dims and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fit:
        raise RuntimeError(f"shapes {[*a.shape]} and {[*b.shape]} cannot be multiplied")


def _expanded(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The bias in the shape of the product; an error where it has another dtype or does not broadcast to it."""
    if bias.dtype != a.dtype:
        raise RuntimeError(f"a bias must have the dtype of the product, got {bias.dtype} and {a.dtype}")
    return bias.expand(*a.shape[:-1], b.shape[-1])


def _softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    return kernels.of(x).softmax(x, dim, half_to_float)


def _on_cuda(name: str) -> Callable[..., Any]:
    """On a CPU these reduce each row on its own already."""

    def override(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_cuda:
            return func(x, *args, **kwargs)
        from mis_ext.onpolicy.batch_invariant import cuda

        return getattr(cuda, name)(x, *args, **kwargs)

    return override


def _over_a_row(name: str) -> Callable[..., Any]:
    """Sums over the first dimension are over the batch, and no concern of a row, unless there is no other."""
    reduce_row = _on_cuda(name)

    def override(func: Any, x: Tensor, dim: list[int] | None, *args: Any, **kwargs: Any) -> Any:
        axes = {axis % max(x.dim(), 1) for axis in dim or ()}
        is_row = bool(axes) and (0 not in axes or x.dim() == 1)
        return (reduce_row if is_row else _plain)(func, x, dim, *args, **kwargs)

    return override


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


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
    aten.mean.dim: _over_a_row("mean"),
    aten.sum.dim_IntList: _over_a_row("sum"),
}
_OVERRIDES |= grouped.OVERRIDES | accumulation.OVERRIDES | ties.OVERRIDES

_WITHOUT_A_FORM = (
    "_addmm_activation",
    "_cdist_forward",
    "_cudnn_attention_forward",
    "_cudnn_rnn",
    "_efficient_attention_forward",
    "_euclidean_dist",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_native_multi_head_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_transformer_encoder_layer_fwd",
    "_trilinear",
    "_unsafe_masked_index_put_accumulate",
    "addbmm",
    "addbmm_",
    "addmm_",
    "addmv",
    "addmv_",
    "baddbmm_",
    "convolution",
    "linear",
    "log_softmax",
    "miopen_rnn",
    "mkldnn_rnn_layer",
    "softmax",
)


def _overloads(packets: Iterable[Any]) -> Iterator[Any]:
    for packet in packets:
        overloads = (getattr(packet, name) for name in packet.overloads())
        # The rest belong to TorchScript alone.
        yield from (func for func in overloads if torch._C._dispatch_has_kernel(func.name()))


# Not every version of torch has them all. What is composite arrives once more as its parts.
_packets = {func.overloadpacket for func in _OVERRIDES} | {
    getattr(aten, name) for name in _WITHOUT_A_FORM if hasattr(aten, name)
}
# Without a reduction it adds nothing.
_packets -= {aten.scatter, aten.scatter_}
# Means and sums over everything are over the batch.
_allowed = _OVERRIDES.keys() | {aten.mean.default, aten.sum.default}
REFUSED = frozenset(func for func in _overloads(_packets) if func not in _allowed and not _is_composite(func))
"""Products and attention kernels that would run unchanged, and so are errors inside the mode: of operators without a
batch-invariant form all overloads, of the others those that write into a given tensor or return another dtype."""
