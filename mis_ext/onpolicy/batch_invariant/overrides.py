# SPDX-License-Identifier: Apache-2.0
"""The mode's replacements of torch's functions and operators, and lists of those that pass or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from mis_ext.onpolicy.batch_invariant import cpu_rows, devices, mixtures
from mis_ext.onpolicy.batch_invariant.attention import scaled_dot_product_attention

aten = torch.ops.aten

# torch splits these into matmuls depending on the number of rows. With autograd only these matmuls arrive below.
_CHAINS = frozenset({"linalg_multi_dot", "chain_matmul", "tensordot", "inner"})


class FunctionOverrides(TorchFunctionMode):
    """Intercepts attention before torch selects a kernel, and functions that choose an order of matmuls."""

    @classmethod
    def is_on(cls) -> bool:
        """Return True if this mode intercepts functions that are called from here."""
        return any(isinstance(mode, cls) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        is_long = func is torch.einsum and sum(isinstance(x, Tensor) for x in tree_leaves(args)) > 2
        if is_long or name in _CHAINS:
            raise _refusal(name)
        return func(*args, **kwargs)


class OperatorOverrides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts matmuls and reductions below autograd, so also those of the backward pass."""

    supports_higher_order_operators = True

    @classmethod
    def is_on(cls) -> bool:
        """Return True if this mode intercepts operators that are called from here."""
        return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        # The fast path of a decode step. On a GPU elementwise functions do not depend on the position of a value.
        is_cuda = bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda
        if kind == "passes" or (is_cuda and kind in ("exact", "elementwise")):
            return func(*args, **kwargs)
        # Without autograd (inference mode) operators arrive before their decomposition. Use the kernel that other modes
        # use, because func.decompose prefers a Python version with different arithmetic.
        if kind == "composite":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        x = _first_number((*args, *kwargs.values()))
        if x is None:
            result = func(*args, **kwargs)
            # exp of integers also gives floating-point values.
            is_float = isinstance(result, Tensor) and result.is_floating_point() and result.is_cpu
            return cpu_rows.elementwise(func, *args, **kwargs) if kind == "elementwise" and is_float else result
        if kind == "refused" or x.is_complex():
            raise _refusal(func, "" if kind == "refused" else "of complex numbers ")
        if kind == "override":
            return _override_of(func)(func, *args, **kwargs)  # type: ignore[misc]
        if kind == "exact" and x.is_cpu:
            # 16-bit values times integers: torch rounds integers to 16 bits, except a single one.
            args = tuple(y.to(x.dtype) if isinstance(y, Tensor) and _is_integer(y) else y for y in args)
        # With a factor a sum is rounded twice, or once with a fused instruction.
        factor = kwargs.get("alpha", args[2] if func in _WITH_FACTOR and len(args) > 2 else 1)
        if not x.is_cpu or (kind == "exact" and factor == 1):
            return func(*args, **kwargs)
        if cpu_rows.functional(func) is None:
            raise _refusal(func)
        return cpu_rows.elementwise(func, *args, **kwargs)


def _first_number(values: Iterable[Any]) -> Tensor | None:
    """The first floating-point or complex tensor, also inside lists."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return value
        elif isinstance(value, (list, tuple)) and (found := _first_number(value)) is not None:
            return found
    return None


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.dtype == torch.bool)


def _refusal(func: Any, what: str = "") -> NotImplementedError:
    advice = "compute it outside of the mode, or from matmuls, sums and elementwise functions"
    if "attention" in str(func) and not FunctionOverrides.is_on():
        advice = (
            "torch hides this call of attention from the mode: around checkpoints use batch_invariant_forward(model)"
        )
    return NotImplementedError(f"{func} {what}has no batch-invariant form here: {advice}")


@cache
def _override_of(func: Any) -> Callable[..., Any] | None:
    return _OVERRIDES.get(func) or mixtures.OVERRIDES_OF_LIBRARIES.get(func.name())


def _mm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=2)
    return devices.kernels_on(a).mm(a, b)


def _bmm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=3)
    if b.shape[2] == 1 < a.shape[1] and a.shape[2] > 1:
        # An expert's matrix times its token: use the same arithmetic as for a token in a batch of rows.
        return devices.kernels_on(a).bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return devices.kernels_on(a).bmm(a, b)


def _plus_bias(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """``alpha`` times the product, plus ``beta`` times a bias of the same dtype that broadcasts to it."""

    def override(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        product = multiply(func, a, b)
        if bias.dtype != product.dtype:
            raise RuntimeError(f"a bias must have the dtype of the product, got {bias.dtype} and {product.dtype}")
        bias = bias.expand(product.shape)
        scaled = product if alpha == 1 else product * alpha
        # With beta 0 the bias is ignored, even if it is NaN.
        return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)

    return override


def _check_factors(a: Tensor, b: Tensor, *, num_dims: int) -> None:
    """Refuse the same operands as torch, with the same error class. For a TypeError ``a @ b`` blames the operator."""
    if (a.dtype, a.device) != (b.dtype, b.device):
        raise RuntimeError(
            f"the factors of a product must have the same dtype and device, got {a.dtype} on {a.device} and "
            f"{b.dtype} on {b.device}"
        )
    fit = a.dim() == b.dim() == num_dims and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fit:
        raise RuntimeError(f"shapes {[*a.shape]} and {[*b.shape]} cannot be multiplied")


# No score is as low. Masked scores are minus infinity or the lowest value of the dtype, -65,504 in float16.
_MASKED = -3e4


def refuse_masked_beginning(scores: Tensor) -> None:
    """Refuse attention scores ``[..., queries, keys]`` with a masked first key and a later key that is not masked.

    On CUDA the matmul of shares and values sums blocks that start at this masked key: padding on the left, the previous
    sequence of a pack, or a key outside of the window.
    """
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        # No value can be read during capture.
        return
    rows = scores[scores[..., 0] < _MASKED] if scores.shape[-1] > 1 else scores[..., :0]
    if rows.numel() and bool((rows.amax(-1) > _MASKED).any()):
        raise NotImplementedError(
            "softmax of scores whose first keys are masked (padding on the left, packs, sliding windows) has no "
            'batch-invariant form in eager attention on cuda: use attn_implementation="sdpa"; a model without it '
            "(GPT-OSS) is exact on a CPU, and on cuda with sequences no longer than its window, padded on the right"
        )


# The integer sum of a softmax has room for this many columns.
MOST_COLUMNS = 1 << 20


def _softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """``aten._softmax`` and ``aten._log_softmax`` of contiguous rows, so that strides change no bit."""
    is_log = func is aten._log_softmax.default
    if x.is_cuda and x.dim() > 2 and dim % x.dim() == x.dim() - 1 and not is_log:
        refuse_masked_beginning(x)
    if x.dim() == 0 or x.numel() == 0:
        return func(x, dim, half_to_float)
    if x.shape[dim] > MOST_COLUMNS:
        raise NotImplementedError(
            f"batch-invariant softmax supports at most {MOST_COLUMNS} columns, got {x.shape[dim]}"
        )
    softmax = devices.kernels_on(x).softmax
    out = softmax(x.movedim(dim, -1).contiguous(), torch.float32 if half_to_float else x.dtype, is_log=is_log)
    return out.movedim(-1, dim).contiguous()


def _sum(func: Any, x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """``aten.sum`` and ``aten.mean`` over the last dimension, or over dimensions that leave one before the last.

    Any other sum is over the batch, not per row. So a sum of ``[experts, tokens, width]`` over the experts is per
    token, but a sum over experts and tokens is not.
    """
    dims, last = sorted(axis % x.dim() for axis in dim or ()) if x.dim() else [], x.dim() - 1
    is_over_rows = bool(dims) and (dims == [last] or not {*range(last)} <= {*dims})
    if not is_over_rows or x.numel() == 0:
        return func(x, dim, keepdim, dtype=dtype)
    rows = x if dtype is None else x.to(dtype)
    rows = rows.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims)).contiguous()
    out = devices.kernels_on(rows).sum(rows, is_mean=func is aten.mean.dim)
    for axis in dims if keepdim else ():
        out = out.unsqueeze(axis)
    return out


def _logsumexp(func: Any, x: Tensor, dim: list[int], keepdim: bool = False) -> Any:
    elementwise = cpu_rows.elementwise if x.is_cpu else lambda function, y: function(y)
    wide = x if x.dtype == torch.float64 else x.float()
    highest = wide.amax(dim, keepdim=True)
    # Avoid the difference of two infinities.
    origin = torch.where(highest.isfinite(), highest, 0.0)
    total = _sum(aten.sum.dim_IntList, elementwise(aten.exp.default, wide - origin), dim, True)
    result = elementwise(aten.log.default, total) + origin
    return (result if keepdim else result.squeeze(tuple(dim))).to(x.dtype)


_OVERRIDES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _plus_bias(_mm),
    aten.baddbmm.default: _plus_bias(_bmm),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten.mean.dim: _sum,
    aten.sum.dim_IntList: _sum,
    aten.logsumexp.default: _logsumexp,
    **mixtures.OVERRIDES,
}


# --- the treatment of torch's operators: elementwise, passed or refused

Kind = Literal["override", "composite", "passes", "exact", "elementwise", "refused"]

_FAMILIES = {"aten", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized", "sparse"}
"""torch's own namespaces. Operators of other libraries (custom kernels) run unchanged."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# IEEE 754 defines their results, or they only select one of their operands.
_EXACT = _names("""
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign div eq floor
    fmax fmin frac ge gt hardtanh isfinite isinf isnan isneginf isposinf le leaky_relu logical_and logical_not
    logical_or logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg positive reciprocal relu round rsub
    sgn sign signbit sqrt square sub threshold trunc where
""")

_WITH_FACTOR = frozenset({aten.sub.Scalar, aten.rsub.Scalar, aten.add.Scalar, aten.add_.Scalar, aten.sub_.Scalar})

# Operators that move, select, count or sample values; that normalize each row separately on every device; or that are
# over the batch by definition (losses, sums over a batch). From models of transformers, Megatron-Core and SGLang.
_PASSING = _names("""
    _assert_async _chunk_cat _copy_from _functional_assert_async _is_all_true _is_any_true _local_scalar_dense
    _pin_memory _to_copy _unique2 _unsafe_index _unsafe_view all amax amin aminmax any argmax argmin bernoulli bincount
    block_diag bucketize cat clone constant_pad_nd copy count_nonzero cummax cummin cumsum detach embedding empty_like
    equal exponential fill flip full_like gather histc index index_copy index_fill index_select lift_fresh
    masked_scatter masked_select max min multinomial native_dropout native_layer_norm new_empty new_empty_strided
    new_full new_ones new_zeros nll_loss_forward nonzero nonzero_static normal ones_like rand_like randint_like
    randn_like random repeat repeat_interleave resize roll scatter searchsorted select_scatter set slice_scatter stack
    take tril triu uniform unique_consecutive unsafe_split unsafe_split_with_sizes zero zeros_like
""")


@cache
def kind_of(func: Any) -> Kind:
    """Return the treatment of an operator with floating-point inputs."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return "refused"
    if _override_of(func) is not None:
        return "override"
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return "composite"
    if func.overloadpacket.__name__.startswith("_foreach_"):
        return "passes" if func.overloadpacket.__name__ == "_foreach_copy_" else "refused"
    if func.namespace not in _FAMILIES or torch.Tag.inplace_view in func.tags or _returns_nothing_new(func):
        return "passes"
    name, form = func.overloadpacket.__name__.removesuffix("_"), func._overloadname
    # Gradients are not batch-invariant. Full means and sums are over the batch.
    if name.endswith(("_backward", "_backward_data")) or f"{name}.{form}" in ("mean.default", "sum.default"):
        return "passes"
    if name in _PASSING:
        return "refused" if "reduce" in form else "passes"
    if name in _EXACT and "mode" not in form:
        return "exact"
    is_elementwise = torch.Tag.pointwise in func.tags and cpu_rows.functional(func) is not None
    return "elementwise" if is_elementwise else "refused"


def _returns_nothing_new(func: Any) -> bool:
    """True if it returns no tensor, or only views of its inputs."""
    returned = [x for x in func._schema.returns if "Tensor" in str(x.type)]
    return all(x.alias_info is not None and not x.alias_info.is_write for x in returned)
