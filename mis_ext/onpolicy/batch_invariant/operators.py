"""Which of torch's operators the mode computes elementwise, which it lets through, and which it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

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
