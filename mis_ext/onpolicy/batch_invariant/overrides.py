# SPDX-License-Identifier: Apache-2.0
"""What the mode puts in the place of torch's functions and operators, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import opt_einsum
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from mis_ext.onpolicy.batch_invariant import cpu_rows, devices, mixtures
from mis_ext.onpolicy.batch_invariant.attention import scaled_dot_product_attention

aten = torch.ops.aten

# Torch 2.11 has none yet.
_redispatch = getattr(torch.overrides, "redispatch_function", None)

_CALLERS_OF_ATTENTION = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad, F.multi_head_attention_forward}
)
"""Functions written in Python, for whose length torch takes the mode off: attention in them, also that of a checkpoint
which a backward pass computes again, would run unseen."""


_CHAINS = frozenset(
    {torch.linalg.multi_dot, torch.chain_matmul, torch.tensordot, torch.inner, Tensor.inner}
    | {aten.linalg_multi_dot, aten.chain_matmul, aten.tensordot, aten.inner}
)
"""Made of other operators, which torch chooses by the number of rows: with autograd only these arrive below."""

_SEEN = _CALLERS_OF_ATTENTION | _CHAINS | {F.scaled_dot_product_attention, torch.einsum}


class FunctionOverrides(TorchFunctionMode):
    """Catches attention before torch picks one of its kernels, and what chooses an order of products."""

    @classmethod
    def is_on(cls) -> bool:
        """Whether functions called from here arrive at one of these."""
        return any(isinstance(mode, cls) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", func) not in _SEEN:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        if func is torch.einsum:
            _check_order_of_einsum(args)
        elif func not in _CALLERS_OF_ATTENTION:
            _refuse_chain(func)
        elif _redispatch is not None:
            with self:
                return _redispatch(func, types, args, kwargs)
        return func(*args, **kwargs)


class OperatorOverrides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches products and reductions below autograd, so those of the backward pass too."""

    supports_higher_order_operators = True

    @classmethod
    def is_on(cls) -> bool:
        """Whether operators called from here arrive at one of these."""
        return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        where = _where_it_passes(func)
        if where == "anywhere" or (where == "on a GPU" and args and isinstance(args[0], Tensor) and args[0].is_cuda):
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise NotImplementedError(
                f"{func} hides operators from the batch-invariant mode: take scaled_dot_product_attention with a mask "
                "for flex_attention, and plain Python for control flow"
            )
        x = _first_of_numbers(args) if args else None
        x = _first_of_numbers(kwargs.values()) if x is None else x
        if x is not None:
            override = _override_of(func)
            if override is not None:
                devices.check_dtype(x)
                return override(func, *args, **kwargs)
        # Without autograd (inference mode) operators arrive here before they are taken apart: by the kernel of other
        # modes, because func.decompose prefers one in Python, which computes in another way.
        if _is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return _of_integers(func, args, kwargs) if x is None else _without_override(func, x, args, kwargs)


def _refuse_chain(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = getattr(func, "__name__", func)
    raise NotImplementedError(
        f"{name} has no batch-invariant form here, it picks its products by the number of rows: write them with @"
    )


def _check_order_of_einsum(args: tuple[Any, ...]) -> None:
    # Imported by name: torch 2.6 has no attribute opt_einsum before its first einsum.
    num_operands = sum(isinstance(x, Tensor) for x in tree_leaves(args))
    if num_operands > 2 and opt_einsum.is_available() and opt_einsum.enabled:
        raise NotImplementedError(
            f"einsum of {num_operands} operands has no batch-invariant form with opt_einsum, which picks an order of "
            "products by the number of rows: set torch.backends.opt_einsum.enabled = False"
        )


def _first_of_numbers(values: Iterable[Any]) -> Tensor | None:
    """The first tensor of floating-point or complex numbers, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return value
        elif isinstance(value, (list, tuple)) and (found := _first_of_numbers(value)) is not None:
            return found
    return None


def _without_override(func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind = kind_of(func, is_complex=x.is_complex())
    if kind == "refused":
        raise NotImplementedError(f"{func} has no batch-invariant form here{_advice(func)}")
    if x.device.type != "cpu" or kind == "passes":
        return func(*args, **kwargs)
    if kind == "one by one":
        return _one_by_one(func, args, kwargs)
    if kind == "passes contiguous":
        args, kwargs = tree_map_only(Tensor, _contiguous, (args, kwargs))
        return func(*args, **kwargs)
    if kind == "passes without integers":
        return func(args[0], _rounded(args[1], x), **kwargs)
    if kind == "passes without factor" and kwargs.get("alpha", args[2] if len(args) > 2 else 1) == 1:
        return func(*args, **kwargs)
    return cpu_rows.elementwise(func, *args, **kwargs)


def _of_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of integers too, functions as exp and logsumexp return floating-point numbers, and sums that are told to."""
    result = func(*args, **kwargs)
    first = result[0] if isinstance(result, list) and result else result
    if isinstance(first, Tensor) and first.device.type == "cpu" and first.is_floating_point():
        override = _override_of(func)
        if override is not None:
            return override(func, *args, **kwargs)
        kind = kind_of(func)
        if kind in ("elementwise", "passes without factor"):
            return cpu_rows.elementwise(func, *args, **kwargs)
        if kind == "one by one":
            return _one_by_one(func, args, kwargs)
    return result


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a CPU these call the function of one tensor for each, so that they arrive at the mode again."""
    with OperatorOverrides():  # type: ignore[no-untyped-call]
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _rounded(factor: Any, x: Tensor) -> Any:
    """Integers, also one that is alone, in the dtype in which ``x`` takes many of them."""
    are_integers = isinstance(factor, Tensor) and not (factor.is_floating_point() or factor.is_complex())
    return factor.to(x.dtype) if are_integers else factor


def _advice(func: Any) -> str:
    if func.namespace != "aten":
        return ": take the module whose weights are neither quantised nor packed"
    if func is aten.embedding_renorm_.default:
        return ", each call of max_norm rounds the table again: leave max_norm out, and scale the table before"
    if func._schema.is_mutable:
        return ": take the form that returns a new tensor"
    if "convolution" in func.name():
        return (
            ": compute it outside of the mode; one of each channel by itself, as in Mamba, is "
            "(x.unfold(-1, width, 1) * weight).sum(-1) of padded rows; why "
            "state-space models are refused: docs/guide/true_on_policy.md#state-space"
        )
    if "attention" in func.name() and not FunctionOverrides.is_on():
        return (
            ", and this torch hides the call of attention from the mode: in nn.MultiheadAttention call "
            "scaled_dot_product_attention instead, around checkpoints use batch_invariant_forward(model)"
        )
    return ": compute it outside of the mode, or from products, sums and elementwise functions"


@cache
def _where_it_passes(func: Any) -> Literal["anywhere", "on a GPU", "nowhere"]:
    """Where nothing of the arguments matters but their device: most of what a decode step waits for."""
    if isinstance(func, torch._ops.HigherOrderOperator) or _override_of(func) is not None or _is_composite(func):
        return "nowhere"
    # Of complex numbers fewer functions are exact.
    kind = kind_of(func, is_complex=True)
    if kind == "passes":
        return "anywhere"
    return "nowhere" if kind == "refused" else "on a GPU"


@cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@cache
def _override_of(func: Any) -> Callable[..., Any] | None:
    return _OVERRIDES.get(func) or mixtures.OVERRIDES_OF_LIBRARIES.get(func.name())


def _mm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=2)
    return devices.products_on(a).mm(a, b)


def _bmm(func: Any, a: Tensor, b: Tensor) -> Any:
    _check_factors(a, b, num_dims=3)
    if b.shape[2] == 1 < a.shape[1] and a.shape[2] > 1:
        # An expert's matrix times its token: the same products and sums as where the token is a row of a batch.
        return devices.products_on(a).bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return devices.products_on(a).bmm(a, b)


def _mv(func: Any, a: Tensor, b: Tensor) -> Any:
    return _mm(func, a, b.unsqueeze(-1)).squeeze(-1)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if alpha == beta == 1 and bias.dtype == a.dtype:
        _check_factors(a, b, num_dims=2)
        return devices.products_on(a).addmm(bias.expand(a.shape[0], b.shape[1]), a, b)
    return _plus_bias(_mm)(func, bias, a, b, beta=beta, alpha=alpha)


def _plus_bias(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The product times ``alpha``, and ``beta`` times a bias of its dtype that broadcasts to it."""

    def override(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        product = multiply(func, a, b)
        if bias.dtype != product.dtype:
            raise RuntimeError(f"a bias must have the dtype of the product, got {bias.dtype} and {product.dtype}")
        bias = bias.expand(product.shape)
        scaled = product if alpha == 1 else product * alpha
        # With beta 0 the bias counts for nothing, whatever it holds.
        return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)

    return override


def _outer(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 1 or b.dim() != 1 or a.dtype != b.dtype:
        pair = f"{[*a.shape]}, {a.dtype} and {[*b.shape]}, {b.dtype}"
        raise RuntimeError(f"addr takes two vectors of one dtype, got {pair}")
    return a.unsqueeze(1) * b.unsqueeze(0)


def _dist(func: Any, a: Tensor, b: Tensor, p: float = 2) -> Any:
    difference = a - b
    return cpu_rows.reduce(aten.linalg_vector_norm.default, difference, p, [*range(difference.dim())])


def _check_factors(a: Tensor, b: Tensor, *, num_dims: int) -> None:
    """Refuse what torch refuses, with its class of error; a TypeError would make ``a @ b`` blame the operator."""
    if a.is_complex() or b.is_complex():
        raise NotImplementedError(
            "a product of complex numbers has no batch-invariant form here: multiply real and imaginary parts"
        )
    if a.dtype != b.dtype:
        raise RuntimeError(f"the factors of a product must have one dtype, got {a.dtype} and {b.dtype}")
    fit = a.dim() == b.dim() == num_dims and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fit:
        raise RuntimeError(f"shapes {[*a.shape]} and {[*b.shape]} cannot be multiplied")


def _softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    if x.is_cuda and x.dim() > 2 and dim % x.dim() == x.dim() - 1:
        refuse_masked_beginning(x)
    return _row(cpu_rows.softmax, "softmax")(func, x, dim, half_to_float)


# No score is as low. Masks have minus infinity, or the least number of the dtype, 65,504 in float16.
_MASKED = -3e4


def refuse_masked_beginning(scores: Tensor) -> None:
    """Refuse attention scores ``[..., queries, keys]`` whose first key is masked where a later one is not.

    On CUDA the product of its shares and the values adds up blocks that start at that key: at padding on the left, at
    the sequence before in a pack, at a key that has left a window.
    """
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing may be read there.
        return
    rows = scores[scores[..., 0] < _MASKED] if scores.shape[-1] > 1 else scores[..., :0]
    if rows.numel() and bool((rows.amax(-1) > _MASKED).any()):
        raise NotImplementedError(
            "softmax of scores whose first keys are masked (padding on the left, packs, sliding windows) has no "
            'batch-invariant form in eager attention on cuda: take attn_implementation="sdpa"; a model without it '
            "(GPT-OSS) is exact on a CPU, and on cuda with sequences no longer than its window, padded on the right"
        )


def _dot(func: Any, a: Tensor, b: Tensor) -> Any:
    return _mm(func, a.unsqueeze(0), b.unsqueeze(-1)).view(())


def _row(on_cpu: Callable[..., Any], on_cuda: str) -> Callable[..., Any]:
    """What the function returns on a CPU, and the one of that name on CUDA."""

    def override(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_cuda:
            return on_cpu(func, x, *args, **kwargs)
        from mis_ext.onpolicy.batch_invariant import triton_reductions

        return getattr(triton_reductions, on_cuda)(x, *args, **kwargs)

    return override


def _sums(on_cuda: str) -> Callable[..., Any]:
    """Sums over the first dimension and others are over the batch, and no concern of a row."""
    reduce_rows = _row(cpu_rows.reduce, on_cuda)

    def override(func: Any, x: Tensor, dim: list[int] | None, *args: Any, **kwargs: Any) -> Any:
        return (reduce_rows if cpu_rows.is_over_rows(x, dim) else _plain)(func, x, dim, *args, **kwargs)

    return override


def _contiguous(x: Tensor) -> Tensor:
    """Not what has one dimension: weights, and statistics that are written."""
    return x.contiguous() if x.dim() > 1 else x


def _isin(func: Any, elements: Tensor, tests: Tensor, **kwargs: Any) -> Any:
    """By how many there are torch compares or sorts. Sorting misses numbers of two dtypes that round to one."""
    dtype = torch.result_type(elements, tests)
    return func(elements.to(dtype), tests.to(dtype), **kwargs)


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


_OVERRIDES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _plus_bias(_bmm),
    aten.addmv.default: _plus_bias(_mv),
    aten.addr.default: _plus_bias(_outer),
    aten.dist.default: _dist,
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _row(cpu_rows.softmax_backward, "softmax_backward"),
    aten._log_softmax.default: _row(cpu_rows.log_softmax, "log_softmax"),
    aten._log_softmax_backward_data.default: _row(_plain, "log_softmax_backward"),
    aten.mean.dim: _sums("mean"),
    aten.sum.dim_IntList: _sums("sum"),
    aten.logsumexp.default: _row(cpu_rows.reduce, "logsumexp"),
    aten.glu.default: cpu_rows.glu,
    aten.glu_backward.default: cpu_rows.glu_backward,
    aten.isin.Tensor_Tensor: _isin,
    # Without autograd.
    aten.linalg_multi_dot.default: _refuse_chain,
    aten.chain_matmul.default: _refuse_chain,
    aten.tensordot.default: _refuse_chain,
    aten.inner.default: _refuse_chain,
}
_OVERRIDES |= dict.fromkeys(
    (
        aten.linalg_vector_norm.default,
        aten.nansum.default,
        aten.norm.ScalarOpt_dim,
        aten.norm.ScalarOpt_dim_dtype,
        aten.prod.dim_int,
        aten.std.correction,
        aten.std_mean.correction,
        aten.var.correction,
        aten.var_mean.correction,
    ),
    cpu_rows.reduce,
)
_OVERRIDES |= mixtures.OVERRIDES


# --- which of torch's operators are computed elementwise, which are let through, and which are refused

Kind = Literal[
    "passes",
    "passes contiguous",
    "passes without factor",
    "passes without integers",
    "elementwise",
    "one by one",
    "refused",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FAMILIES = {"aten", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized", "sparse"}
"""Namespaces of torch's own. What others bring (a custom kernel) runs as it is."""

# IEEE 754 says what they return, or they only choose among their operands.
_EXACT = _names("""
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone copysign div eq
    floor fmax fmin frac ge gt hardtanh heaviside isfinite isinf isnan isneginf isposinf le leaky_relu logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg nextafter positive
    reciprocal relu round rsub sgn sign signbit sqrt square sub threshold threshold_backward trunc where
""")
_EXACT_OF_COMPLEX = _names("add clone eq logical_and logical_not logical_or logical_xor masked_fill ne sub where")
# With a factor they round twice, or once where the instruction does both.
_WITH_FACTOR = frozenset({"add", "sub", "rsub"})

# A 16-bit number times integers: torch rounds them to 16 bits, but on a CPU not one that is alone.
_WITH_INTEGERS = frozenset({"div", "mul"})

# Elementwise, though torch does not say so.
_UNTAGGED = _names("""
    _prelu_kernel _prelu_kernel_backward binary_cross_entropy_backward elu_backward floor_divide hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward huber_loss_backward leaky_relu_backward
    log_sigmoid_backward log_sigmoid_forward mse_loss_backward polar rrelu_with_noise_backward rsub
    smooth_l1_loss_backward soft_margin_loss_backward softplus_backward softshrink_backward
""")

# What moves, chooses, counts or draws numbers; what reduces or normalises a row by itself on every device; and what is
# about the batch by its meaning: losses, batch norms, sums over a batch.
_PASSING = _names("""
    _adaptive_avg_pool3d _aminmax _amp_foreach_non_finite_check_and_unscale _amp_update_scale _assert_async
    _batch_norm_with_update _batch_norm_with_update_functional _chunk_cat _conj_physical _copy_from
    _copy_from_and_resize _functional_assert_async _fused_adagrad _fused_adam _fused_adamw _fused_dropout _fused_sgd
    _has_compatible_shallow_copy_type _is_all_true _is_any_true _lazy_clone _local_scalar_dense _log_softmax
    _logcumsumexp _masked_scale _native_batch_norm_legit _native_batch_norm_legit_functional _pack_padded_sequence
    _pin_memory _resize_output _stack _to_copy _unique _unique2 _unsafe_index _unsafe_masked_index _unsafe_view
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_max_pool2d
    adaptive_max_pool3d all allclose amax amin aminmax any argmax argmin avg_pool2d avg_pool3d bernoulli
    binary_cross_entropy binary_cross_entropy_with_logits bincount block_diag bucketize cat cauchy channel_shuffle
    complex constant_pad_nd copy count_nonzero cummax cummin cumprod cumsum detach diag_embed embedding empty_like
    equal exponential fill flip full_like gather geometric histc huber_loss im2col index index_copy index_fill
    index_select is_same_size isin kthvalue lift lift_fresh linalg_cross linspace log_normal logcumsumexp logspace
    masked_scatter masked_select max max_pool2d_with_indices max_pool3d_with_indices median min mode mse_loss
    multi_margin_loss multilabel_margin_loss_forward multinomial nanmedian narrow_copy native_dropout native_layer_norm
    new_empty new_empty_strided new_full new_ones new_zeros nll_loss2d_forward nll_loss_forward nonzero nonzero_static
    normal normal_functional ones_like pixel_shuffle pixel_unshuffle poisson rand_like randint_like randn_like random
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d resize resize_as roll rot90 rrelu_with_noise scatter searchsorted segment_reduce select_scatter
    set set_data slice_scatter smooth_l1_loss soft_margin_loss stack take tensor_split tril triu uniform
    unique_consecutive unique_dim unique_dim_consecutive unsafe_split unsafe_split_with_sizes upsample_nearest1d
    upsample_nearest2d upsample_nearest3d zero zeros_like
""")

# Gradients that give a row to each place of a pool, a padding or a table, or normalise it by itself; and those of
# weights, which are sums over the batch.
_PASSING_GRADIENTS = _names("""
    _adaptive_avg_pool3d_backward _fused_rms_norm_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward diagonal_backward embedding_dense_backward
    masked_scatter_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    multi_margin_loss_backward multilabel_margin_loss_backward native_layer_norm_backward nll_loss2d_backward
    nll_loss_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward select_backward slice_backward
    unfold_backward
""")

# On a CPU torch computes channels that lie apart in another way.
_CONTIGUOUS = frozenset(
    f"{name}.default"
    for name in _names("""
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _batch_norm_no_update _native_batch_norm_legit_no_training
    batch_norm_backward native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward
""")
)


@cache
def kind_of(func: Any, *, is_complex: bool = False) -> Kind:
    """What the mode does with an operator of torch that gets floating-point or complex numbers.

    Only where the mode has no override of it, and it is not made of other operators.
    """
    if func.overloadpacket.__name__.startswith("_foreach_"):
        return "one by one"
    if func.namespace not in _FAMILIES or torch.Tag.inplace_view in func.tags or _returns_nothing_new(func):
        return "passes"
    name, form = func.overloadpacket.__name__.removesuffix("_"), func._overloadname
    if name in (_EXACT_OF_COMPLEX if is_complex else _EXACT) and "mode" not in form:
        if name in _WITH_INTEGERS:
            return "passes without integers"
        return "passes without factor" if name in _WITH_FACTOR else "passes"
    if name in _PASSING or name in _PASSING_GRADIENTS:
        return "passes"
    if f"{name}.{form}" in _CONTIGUOUS:
        return "passes contiguous"
    if torch.Tag.pointwise in func.tags or name in _UNTAGGED:
        return "elementwise"
    # Means and sums over everything are over the batch.
    return "passes" if name in ("mean", "sum") and form == "default" else "refused"


def _returns_nothing_new(func: Any) -> bool:
    """No tensor, or views of what it gets."""
    returned = [x for x in func._schema.returns if "Tensor" in str(x.type)]
    return all(x.alias_info is not None and not x.alias_info.is_write for x in returned)
