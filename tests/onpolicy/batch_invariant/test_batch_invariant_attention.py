# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences, whatever else is in the pack and however it is fed."""

import math
from contextlib import nullcontext

import pytest
import torch
from batch_invariant_support import DTYPES, each_device, equal_bits, exact_attention, packed, randn, tolerance
from torch.autograd import forward_ad

from mis_ext.onpolicy.batch_invariant import attention, batch_invariant_mode


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_attention_is_right_for_every_sequence(dtype):
    lengths_q, lengths_k = [1, 70, 5, 0, 64], [129, 70, 65, 3, 64]
    query, key, value, bounds = packed(lengths_q, lengths_k, dtype=dtype)
    output = attention(query, key, value, **bounds)
    parts = zip(*(x.split(n) for x, n in ((query, lengths_q), (key, lengths_k), (value, lengths_k))), strict=True)
    expected = [exact_attention(q, k, v, offset=len(k) - len(q)) for q, k, v in parts]
    assert output.dtype == dtype
    assert (output.double() - torch.cat(expected)).abs().max() <= tolerance(dtype, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 130])
def test_decode_chunked_prefill_and_prefill_have_the_same_bits(length, dtype):
    query, key, value, bounds = packed([length], [length], dtype=dtype)
    whole = attention(query, key, value, **bounds)

    def chunk(start, stop):
        q, k, v = query[start:stop], key[:stop], value[:stop]
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (stop - start, stop))
        return attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=stop - start, max_seqlen_k=stop)

    for size in (1, 7, 64):
        pieces = [chunk(start, min(start + size, length)) for start in range(0, length, size)]
        assert equal_bits(torch.cat(pieces), whole)


def test_keys_may_lie_in_the_slots_of_a_paged_cache():
    query, key, value, bounds = packed([1, 20], [70, 20])
    slots = torch.randperm(97, generator=torch.Generator().manual_seed(0))
    table = slots[-1].repeat(2, 72).int()
    table[0, :70], table[1, :20] = slots[:70], slots[70:90]
    paged_key, paged_value = (torch.full((97, *x.shape[1:]), math.nan) for x in (key, value))
    paged_key[slots[:90]], paged_value[slots[:90]] = key, value
    paged = attention(query, paged_key, paged_value, **{**bounds, "max_seqlen_k": 72}, key_slots=table)
    assert equal_bits(paged, attention(query, key, value, **bounds))


def test_other_sequences_of_the_pack_change_no_bit_even_when_they_are_nan():
    lengths = [3, 70, 20]
    query, key, value, bounds = packed(lengths, lengths)
    alone, key_alone, value_alone = (x[3:73] for x in (query, key, value))
    one = torch.tensor([0, 70], dtype=torch.int32)
    expected = attention(alone, key_alone, value_alone, cu_seqlens_q=one, max_seqlen_q=70)
    for other in (slice(0, 3), slice(73, 93)):
        for x in (query, key, value):
            x[other] = math.nan
    assert equal_bits(attention(query, key, value, **bounds)[3:73], expected)


def test_rows_after_the_last_sequence_get_zeros():
    query, key, value, bounds = packed([5, 20], [5, 20])
    leaves = [torch.cat([x, randn(7, *x.shape[1:])]).requires_grad_() for x in (query, key, value)]
    # Fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        output = attention(*leaves, **bounds)
        grads = torch.autograd.grad(output.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal_bits(output[:25], attention(query, key, value, **bounds))
    for x in (output, *grads):
        assert torch.equal(x[25:], torch.zeros_like(x[25:]))


def test_autocast_does_not_reach_into_attention():
    query, key, value, bounds = packed([70], [70])
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected = attention(*leaves, **bounds)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*leaves, **bounds)
        grads = torch.autograd.grad(output.sum(), leaves)
    assert equal_bits(output, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert equal_bits(grad, expected_grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_differentiating_attention_forward_is_an_error_and_not_zero():
    query, key, value, bounds = packed([5], [5])
    with pytest.raises(RuntimeError, match="jvp function"), forward_ad.dual_level():
        attention(query, forward_ad.make_dual(key, key), value, **bounds)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jvp(lambda x: attention(x, key, value, **bounds), (query,), (query,))


def test_a_mask_comes_on_top_and_a_query_that_sees_nothing_gets_zeros():
    query, key, value, bounds = packed([5, 40], [9, 70])
    mask = torch.rand(2, 4, 40, 70, generator=torch.Generator().manual_seed(4)) > 0.4
    mask[1, :, 7] = False
    # Sees nothing in the first block of keys, but something in the second.
    mask[1, :, 39, :64] = False
    output = attention(query, key, value, mask=mask, **bounds)
    first = exact_attention(query[:5], key[:9], value[:9], offset=4, mask=mask[0, :, :5, :9])
    second = exact_attention(query[5:], key[9:], value[9:], offset=30, mask=mask[1, :, :40, :70])
    assert (output.double() - torch.cat([first, second])).abs().max() <= tolerance(torch.float32, 16)
    assert torch.equal(output[12], torch.zeros(4, 16))


@each_device
@pytest.mark.parametrize("in_mode", [False, True])
@pytest.mark.parametrize("mask_heads", [0, 1, 4])
@pytest.mark.parametrize(
    "lengths", [([5, 40], [9, 70]), ([30, 30], [30, 30]), ([30, 30], [40, 40]), ([7, 0, 9], [5, 6, 9]), ([6], [3])]
)
def test_gradients_of_attention_are_the_exact_ones(lengths, mask_heads, in_mode, device):
    lengths_q, lengths_k = lengths
    query, key, value, bounds = packed(lengths_q, lengths_k)
    shape = len(lengths_q), mask_heads, max(lengths_q), max(lengths_k)
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(4)) > 0.3 if mask_heads else None
    leaves, weights = [x.requires_grad_() for x in (query, key, value)], randn(len(query), 4, 16, seed=5)
    parts = zip(*(x.split(n) for x, n in ((query, lengths_q), (key, lengths_k), (value, lengths_k))), strict=True)
    exact = [
        exact_attention(
            # It scales by 16 ** -0.5.
            1.2 * q,
            k,
            v,
            offset=len(k) - len(q),
            mask=None if mask is None else mask[place, :, : len(q), : len(k)],
        )
        for place, (q, k, v) in enumerate(parts)
    ]
    exact = torch.autograd.grad((torch.cat(exact) * weights.double()).sum(), leaves)
    leaves = [x.detach().to(device).requires_grad_() for x in leaves]
    bounds = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in bounds.items()}
    with batch_invariant_mode() if in_mode else nullcontext():
        output = attention(*leaves, mask=None if mask is None else mask.to(device), scale=0.3, **bounds)
        ours = torch.autograd.grad((output * weights.to(device)).sum(), leaves)
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine.cpu() - theirs).abs().max() <= (1e-5 if device == "cpu" else 1e-4) * theirs.abs().max()


@each_device
def test_gradients_of_attention_in_16_bits_are_right(device):
    query, key, value, bounds = packed([30, 70], [30, 70], dtype=torch.bfloat16)
    leaves = [x.to(device).requires_grad_() for x in (query, key, value)]
    bounds = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in bounds.items()}
    ours = torch.autograd.grad(attention(*leaves, **bounds).float().square().sum(), leaves)
    wide = [x.float().requires_grad_() for x in (query, key, value)]
    bounds = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in bounds.items()}
    exact = torch.autograd.grad(attention(*wide, **bounds).square().sum(), wide)
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine.cpu().float() - theirs).abs().max() <= 3e-2 * theirs.abs().max()


@pytest.mark.parametrize("hidden", [(), (0, 2, 3, 4, 5, 9, 11, 13)])
def test_queries_before_the_first_key_have_no_gradient(hidden):
    num_q, num_k = (5, 3) if hidden else (150, 5)
    query, key, value, bounds = packed([num_q], [num_k])
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.ones(num_q * num_k, dtype=torch.bool).index_fill(0, torch.tensor(hidden, dtype=torch.long), False)
    output = attention(*leaves, **bounds, mask=mask.view(1, 1, num_q, num_k) if hidden else None)
    grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert torch.equal(grads[0][: num_q - num_k], torch.zeros(num_q - num_k, 4, 16))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(4, 8)}, ValueError, r"must be \[tokens, heads, dim\]"),
        ({"key": torch.zeros(4, 2, 8).bfloat16()}, TypeError, "must have one dtype"),
        ({"value": torch.zeros(5, 2, 8)}, ValueError, "the same shape"),
        ({"query": torch.zeros(4, 3, 8)}, ValueError, "3 query heads are not a multiple of 2 key heads"),
        ({name: torch.zeros(4, 0, 8) for name in ("key", "value")}, ValueError, "not a multiple of 0 key heads"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, ValueError, r"must be \[sequences \+ 1\]"),
        ({"scale": 0.0}, ValueError, "scale must be above 0, got 0.0"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, TypeError, "mask must be boolean, got torch.float32"),
        (
            {"mask": torch.ones(1, 4, 4).bool()},
            ValueError,
            r"\[1, 1, 4, 4\] or \[1, 4, 4, 4\], got \[1, 4, 4\]",
        ),
        ({"mask": torch.ones(1, 2, 4, 4).bool()}, ValueError, r"mask must be .*, got \[1, 2, 4, 4\]"),
        ({"cu_seqlens_q": [0, 4]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        ({"key_slots": torch.zeros(2, 4).long()}, ValueError, r"key_slots must be .* = \[1, 4\] .*, got \[2, 4\]"),
        ({"key_slots": torch.zeros(1, 4)}, ValueError, "int32 or int64, got .* torch.float32"),
        (
            {"key_slots": torch.zeros(1, 4).long(), "mask": torch.ones(1, 1, 4, 4).bool()},
            NotImplementedError,
            "supports no mask: gather the keys first",
        ),
        (
            {"key_slots": torch.zeros(1, 4).long(), "key": torch.zeros(4, 2, 8, requires_grad=True)},
            NotImplementedError,
            "no derivative: gather the keys first",
        ),
    ],
)
def test_inputs_of_attention_that_contradict_each_other_are_errors(change, error, message):
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    arguments = {
        "query": torch.zeros(4, 4, 8),
        "key": torch.zeros(4, 2, 8),
        "value": torch.zeros(4, 2, 8),
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds,
        "max_seqlen_q": 4,
    }
    attention(**arguments)
    with pytest.raises(error, match=message):
        attention(**(arguments | change))
