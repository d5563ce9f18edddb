import asyncio
import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mis_ext.onpolicy.batch_invariant import (
    attention,
    batch_invariant_forward,
    batch_invariant_mode,
    is_batch_invariant,
    overrides,
    rms_norm,
)
from mis_ext.onpolicy.batch_invariant.operators import kind_of
from mis_ext.onpolicy.bits import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def equal_bits(a, b):
    return bool(same_bits(a, b).all())


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype, terms):
    """Of numbers relative to the largest: 16-bit ones are rounded once or twice, from sums in float32."""
    is_narrow = torch.finfo(dtype).bits == 16
    return torch.finfo(dtype).eps * (2 if is_narrow else 4 * math.sqrt(terms))


PRODUCTS = {
    "linear": lambda x, w, bias: F.linear(x, w, bias),
    "linear without bias": lambda x, w, bias: F.linear(x, w),
    "matmul of a batch of sequences": lambda x, w, bias: (x.unsqueeze(1) @ w.t()).squeeze(1),
    "a long sum": lambda x, w, bias: F.linear(x.repeat(1, 12), w.repeat(1, 12)),
    "einsum": lambda x, w, bias: torch.einsum("tk,nk->tn", x, w),
    "addmm with factors": lambda x, w, bias: torch.addmm(bias, x, w.t(), beta=0.5, alpha=2.0),
    "baddbmm": lambda x, w, bias: torch.baddbmm(bias.expand(1, 1, -1), x.unsqueeze(0), w.t().unsqueeze(0)).squeeze(0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_in_any_batch_and_is_right(name, dtype):
    product = PRODUCTS[name]
    x, w, bias = randn(37, 100, dtype=dtype), randn(70, 100, dtype=dtype, seed=1), randn(70, dtype=dtype, seed=2)
    with batch_invariant_mode():
        together = product(x, w, bias)
        for size in (1, 2, 3, 16, 17):
            assert equal_bits(torch.cat([product(part, w, bias) for part in x.split(size)]), together)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(3))
        assert equal_bits(product(x[order], w, bias), together[order])
        beside_nan = torch.cat([x, torch.full_like(x, math.nan)])
        assert equal_bits(product(beside_nan, w, bias)[:37], together)
    exact = product(x.double(), w.double(), bias.double())
    assert (together.double() - exact).abs().max() <= tolerance(dtype, 100) * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_rounded_once_at_the_end(dtype):
    x, w = randn(20, 1200, dtype=dtype), randn(70, 1200, dtype=dtype, seed=1)
    query, key, value, bounds = packed([70], [70], dtype=dtype)
    with batch_invariant_mode():
        product = F.linear(x, w)
        attended = attention(query, key, value, **bounds)
    for output, exact in (
        (product, x.double() @ w.double().t()),
        (attended, exact_attention(query, key, value, offset=0)),
    ):
        assert (output == exact.to(dtype)).float().mean() > 0.99


def test_the_number_of_threads_changes_no_bit():
    x, w = randn(33, 3000), randn(40, 3000, seed=1)
    query, key, value, bounds = packed([70, 3], [70, 90])
    num_threads, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with batch_invariant_mode():
                results.append((F.linear(x, w), F.linear(x[:1], w), attention(query, key, value, **bounds)))
    finally:
        torch.set_num_threads(num_threads)
    for product, first_row, attended in results:
        assert equal_bits(product, results[0][0])
        assert equal_bits(first_row, product[:1])
        assert equal_bits(attended, results[0][2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_and_separate_projections_agree_whatever_the_strides_of_the_weight(dtype):
    x, w = randn(20, 1024, dtype=dtype), randn(300, 1024, dtype=dtype, seed=1)
    with batch_invariant_mode():
        fused = F.linear(x, w)
        assert equal_bits(torch.cat([F.linear(x, part) for part in w.split([1, 7, 292])], dim=-1), fused)
        assert equal_bits(x @ w.t().contiguous(), fused)


def test_adding_the_bias_in_the_product_or_after_it_is_the_same():
    x, w, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((9, 64), (32, 64), (32,)))
    with batch_invariant_mode():
        assert equal_bits(F.linear(x, w, bias), F.linear(x, w) + bias)


def test_a_bias_with_factor_zero_counts_for_nothing():
    x, w = randn(5, 8), randn(8, 6, seed=1)
    with batch_invariant_mode():
        assert torch.equal(torch.addmm(torch.full((6,), math.nan), x, w, beta=0), x @ w)


def test_a_matrix_times_a_vector_is_a_product_with_one_column():
    a, b = randn(33, 40), randn(40, seed=1)
    with batch_invariant_mode():
        assert equal_bits(torch.mv(a, b), (a @ b.unsqueeze(1)).squeeze(1))


def test_integers_and_empty_batches_pass():
    integers = torch.arange(6).reshape(2, 3)
    large = torch.tensor([[2**40 + 1]])
    with batch_invariant_mode():
        assert torch.equal(integers @ integers.t(), torch.tensor([[5, 14], [14, 50]]))
        assert torch.equal(large @ torch.tensor([[1]]), large)
        assert F.linear(torch.zeros(0, 8), randn(4, 8)).shape == (0, 4)
        assert torch.bmm(torch.zeros(3, 0, 8), torch.zeros(3, 8, 5)).shape == (3, 0, 5)
        assert torch.equal(torch.zeros(4, 0) @ torch.zeros(0, 3), torch.zeros(4, 3))


NOT_PRODUCTS = {
    "mm": lambda: randn(2, 64) @ randn(128, 5),
    "Linear": lambda: torch.nn.Linear(128, 64)(randn(4, 64)),
    "bmm": lambda: torch.bmm(randn(2, 3, 16), randn(2, 32, 5)),
    "bmm of other batches": lambda: torch.bmm(randn(2, 3, 4), randn(4, 4, 128)),
    "mv": lambda: torch.mv(randn(2, 3), randn(4)),
    "bfloat16 times float32": lambda: randn(2, 3).bfloat16() @ randn(3, 5),
    "float32 times complex": lambda: randn(2, 3) @ randn(3, 5).to(torch.complex64),
    "mv of two dtypes": lambda: torch.mv(randn(2, 3), randn(3).bfloat16()),
    "a bias of another dtype": lambda: F.linear(randn(2, 3), randn(5, 3), randn(5).bfloat16()),
    "a bias with more rows": lambda: torch.addmm(randn(10, 4), randn(1, 3), randn(3, 4)),
    "a bias with more dimensions": lambda: torch.addmm(randn(2, 1, 4), randn(2, 3), randn(3, 4)),
    "a bias with factor zero": lambda: torch.addmm(randn(7, 9), randn(2, 3), randn(3, 4), beta=0),
    "a bias of more products": lambda: torch.baddbmm(randn(5, 2, 4), randn(1, 2, 3), randn(1, 3, 4)),
    "a product as large as the bias": lambda: torch.baddbmm(randn(1, 2, 4), randn(1, 2, 3), randn(1, 5, 4)),
}


@pytest.mark.parametrize("name", NOT_PRODUCTS)
def test_what_torch_does_not_multiply_is_an_error_in_the_mode_too(name):
    with pytest.raises(RuntimeError):
        NOT_PRODUCTS[name]()
    with pytest.raises(RuntimeError), batch_invariant_mode():
        NOT_PRODUCTS[name]()


def test_a_softmax_of_one_number_is_one():
    with batch_invariant_mode():
        assert torch.softmax(torch.tensor(3.0), 0) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_plain_ones_within_rounding(dtype):
    x, w, bias = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(40, 64), (24, 64), (24,)]))
    leaves = [tensor.requires_grad_() for tensor in (x, w, bias)]

    def gradients():
        return torch.autograd.grad(F.linear(x, w, bias).float().square().sum(), leaves)

    plain = gradients()
    with batch_invariant_mode():
        ours = gradients()
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine - theirs).abs().max() <= 4 * tolerance(dtype, 64) * theirs.abs().max()


def packed(lengths_q, lengths_k, *, heads=4, groups=2, dim=16, dtype=torch.float32):
    query = randn(sum(lengths_q), heads, dim, dtype=dtype)
    key, value = (randn(sum(lengths_k), groups, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    bounds = {
        "cu_seqlens_q": torch.tensor([0, *lengths_q]).cumsum(0).int(),
        "cu_seqlens_k": torch.tensor([0, *lengths_k]).cumsum(0).int(),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return query, key, value, bounds


def exact_attention(query, key, value, *, offset, mask=None):
    """Of one sequence, in float64; ``offset`` keys come before the first query."""
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) for x in (key, value))
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(offset)
    if mask is not None:
        seen = seen & mask
    scores = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(0, 1)


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
        output, lse = torch.ops.mis_ext.attention_forward(
            *leaves, bounds["cu_seqlens_q"], bounds["cu_seqlens_k"], 20, 20, 0.25, True, None, None
        )
        grads = torch.autograd.grad(output.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal_bits(output[:25], attention(query, key, value, **bounds))
    for x in (output, lse.t(), *grads):
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


def test_attention_compiles_into_one_graph():
    query, key, value, bounds = packed([5, 20], [9, 20])
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def doubled(*tensors):
        return 2 * attention(*tensors, **bounds)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    output, expected = compiled(*leaves), doubled(*leaves)
    assert equal_bits(output, expected)
    compiled_grads, grads = (torch.autograd.grad(x.sum(), leaves) for x in (output, expected))
    for compiled_grad, grad in zip(compiled_grads, grads, strict=True):
        assert equal_bits(compiled_grad, grad)


# torch writes the formulas of its own operators in it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_differentiating_attention_forward_is_an_error_and_not_zero():
    query, key, value, bounds = packed([5], [5])
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"), forward_ad.dual_level():
        attention(query, forward_ad.make_dual(key, key), value, **bounds)
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
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


@pytest.mark.parametrize("with_mask", [False, True])
def test_gradients_of_attention_are_the_exact_ones(with_mask):
    query, key, value, bounds = packed([5, 40], [9, 70])
    mask = torch.rand(2, 1, 40, 70, generator=torch.Generator().manual_seed(4)) > 0.3 if with_mask else None
    leaves = [x.requires_grad_() for x in (query, key, value)]
    weights = randn(45, 4, 16, seed=5)
    ours = torch.autograd.grad((attention(*leaves, mask=mask, **bounds) * weights).sum(), leaves)
    masks = (None, None) if mask is None else (mask[0, :, :5, :9], mask[1, :, :40, :70])
    first = exact_attention(query[:5], key[:9], value[:9], offset=4, mask=masks[0])
    second = exact_attention(query[5:], key[9:], value[9:], offset=30, mask=masks[1])
    exact = torch.autograd.grad((torch.cat([first, second]) * weights.double()).sum(), leaves)
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


SDPA_CASES = {
    "causal": ((2, 4, 70, 16), (2, 4, 70, 16), {"is_causal": True}),
    "causal, fewer queries: aligned with the first key": ((2, 4, 3, 16), (2, 4, 70, 16), {"is_causal": True}),
    "causal, more queries than keys": ((2, 4, 70, 16), (2, 4, 3, 16), {"is_causal": True}),
    "grouped queries": ((2, 4, 7, 16), (2, 2, 70, 16), {"enable_gqa": True}),
    "no batch of heads": ((3, 7, 16), (3, 9, 16), {"scale": 0.3}),
    "a mask for all": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (7, 9)}),
    "a mask per sequence": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (2, 1, 7, 9)}),
    "a mask per head": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (4, 7, 9)}),
    "a mask per sequence without heads": ((3, 7, 16), (3, 9, 16), {"attn_mask": (3, 7, 9)}),
    "five dimensions": ((2, 3, 4, 7, 16), (2, 3, 4, 9, 16), {"attn_mask": (3, 1, 7, 9)}),
}


@pytest.mark.parametrize("case", SDPA_CASES)
def test_torch_attention_keeps_its_meaning_in_the_mode(case):
    shape_q, shape_k, settings_ = SDPA_CASES[case]
    query, key, value = randn(*shape_q), randn(*shape_k, seed=1), randn(*shape_k, seed=2)
    settings_ = dict(settings_)
    if "attn_mask" in settings_:
        mask = torch.rand(settings_["attn_mask"], generator=torch.Generator().manual_seed(3)) > 0.3
        settings_["attn_mask"] = mask | torch.eye(*mask.shape[-2:], dtype=torch.bool)
    plain = F.scaled_dot_product_attention(query, key, value, **settings_)
    with batch_invariant_mode():
        ours = F.scaled_dot_product_attention(query, key, value, **settings_)
        if "attn_mask" not in settings_:
            assert equal_bits(F.scaled_dot_product_attention(query[:1], key[:1], value[:1], **settings_), ours[:1])
    assert ours.shape == plain.shape
    assert (ours - plain).abs().max() <= 1e-6
    # Not the plain kernel under another name.
    assert plain.numel() < 100 or not equal_bits(ours, plain)


SDPA_SHAPES = {
    "one query sequence for all": ((1, 2, 4, 8), (3, 2, 5, 8), (3, 2, 5, 8)),
    "one sequence of keys for all": ((3, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    "one value for all": ((3, 2, 4, 8), (3, 2, 5, 8), (1, 1, 5, 8)),
    "one head of keys for all": ((3, 2, 4, 8), (3, 1, 5, 8), (3, 1, 5, 8)),
    "two dimensions": ((4, 8), (5, 8), (5, 8)),
    "fewer dimensions of keys": ((3, 2, 4, 8), (2, 5, 8), (2, 5, 8)),
    "shorter values": ((2, 2, 4, 8), (2, 2, 70, 8), (2, 2, 70, 6)),
    "longer values": ((2, 2, 4, 8), (2, 2, 70, 8), (2, 2, 70, 12)),
    "no keys": ((1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "no queries": ((1, 2, 0, 8), (1, 2, 3, 8), (1, 2, 3, 8)),
    "no sequences": ((0, 2, 4, 8), (0, 2, 3, 8), (0, 2, 3, 8)),
}


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("case", SDPA_SHAPES)
def test_torch_attention_in_the_mode_takes_the_shapes_that_it_takes_outside(case, with_mask):
    leaves = [randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(SDPA_SHAPES[case])]
    length_q, length_k = leaves[0].shape[-2], leaves[1].shape[-2]
    mask = torch.ones(length_q, length_k, dtype=torch.bool).tril(1) if with_mask else None

    def attend():
        output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    plain = attend()
    with batch_invariant_mode():
        ours = attend()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_torch_attention_takes_a_mask_or_the_causal_flag():
    query, mask = randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="attn_mask or is_causal=True, not both"), batch_invariant_mode():
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("narrow", [(), (2,), (0, 1, 2)])
def test_torch_attention_under_autocast_is_in_the_dtype_of_autocast(narrow):
    tensors = [randn(1, 2, 70, 16, seed=seed) for seed in range(3)]
    mixed = [x.bfloat16() if i in narrow else x for i, x in enumerate(tensors)]
    with batch_invariant_mode():
        expected = F.scaled_dot_product_attention(*(x.bfloat16() for x in tensors))
        with torch.autocast("cpu", torch.bfloat16):
            assert equal_bits(F.scaled_dot_product_attention(*mixed), expected)
            wide = [x.double() for x in tensors]
            assert F.scaled_dot_product_attention(*wide).dtype == torch.float64


def test_decode_through_torch_attention_equals_prefill_in_the_mode_and_not_outside():
    query, key, value = (randn(1, 4, 128, 32, seed=seed) for seed in range(3))

    def num_differing():
        whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        steps = [
            F.scaled_dot_product_attention(query[:, :, p : p + 1], key[:, :, : p + 1], value[:, :, : p + 1])
            for p in range(128)
        ]
        return int((~same_bits(torch.cat(steps, dim=2), whole)).any(-1).any(1).sum())

    assert num_differing() > 0
    with batch_invariant_mode():
        assert num_differing() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_is_blind_to_masked_keys_after_the_query(dtype):
    query, key, value = (randn(4, 130, 32, dtype=dtype, seed=seed) for seed in range(3))

    def attend(start, stop):
        scores = query[:, start:stop] @ key[:, :stop].transpose(1, 2)
        seen = torch.ones(stop, stop, dtype=torch.bool).tril()[start:stop]
        return scores.masked_fill(~seen, -math.inf).softmax(-1, dtype=torch.float32).to(dtype) @ value[:, :stop]

    def decoded(size):
        return torch.cat([attend(start, min(start + size, 130)) for start in range(0, 130, size)], dim=1)

    assert dtype != torch.float32 or not equal_bits(decoded(1), attend(0, 130))
    with batch_invariant_mode():
        whole = attend(0, 130)
        assert equal_bits(decoded(1), whole)
        assert equal_bits(decoded(33), whole)
        columns = randn(5, 70)
        assert equal_bits(columns.softmax(0), torch.softmax(columns, 0))
        assert (columns.softmax(-1) - columns.double().softmax(-1)).abs().max() < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight(dtype):
    x, weight = randn(7, 100, dtype=dtype) * 3, randn(100, dtype=dtype, seed=1)
    x.requires_grad_()
    normalized = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = weight.double() * normalized.to(dtype).double()
    output = rms_norm(x, weight, 1e-6)
    assert (output.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    if dtype == torch.bfloat16:
        late = (weight.double() * normalized).to(dtype)
        assert (output == expected.to(dtype)).float().mean() > 0.99 > (late == expected.to(dtype)).float().mean()
    output.sum().backward()
    assert x.grad.isfinite().all()


def test_float64_on_cuda_is_an_error_that_names_the_dtypes_with_kernels():
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match="float64 on cuda: take float32"), batch_invariant_mode():
        x @ x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_everything_are_no_concern_of_a_row(dtype):
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=dtype, device="cuda")
    with batch_invariant_mode():
        assert x.sum().dtype == x.mean().dtype == dtype


def test_what_has_no_invariant_form_is_an_error_and_the_mode_is_gone_after_it():
    linear, x = torch.nn.Linear(8, 4), randn(2, 8)
    before = linear(x)
    with pytest.raises(NotImplementedError, match="convolution"), batch_invariant_mode():
        torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.1"), batch_invariant_mode():
        F.scaled_dot_product_attention(*[randn(1, 2, 4, 8)] * 3, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match=r"boolean masks, got torch\.float32"), batch_invariant_mode():
        F.scaled_dot_product_attention(*[randn(1, 2, 4, 8)] * 3, attn_mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="query has 4 heads, key 2: pass enable_gqa=True"), batch_invariant_mode():
        F.scaled_dot_product_attention(randn(1, 4, 4, 8), *[randn(1, 2, 4, 8)] * 2)
    assert not is_batch_invariant()
    assert equal_bits(linear(x), before)
    torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))


def refused():
    a, b, vector, out = randn(2, 3), randn(3, 4), randn(3), randn(2, 4)
    a3, b3, out3 = a[None], b[None], out[None]
    return {
        "mm.out": lambda: torch.mm(a, b, out=out),
        "mm.out of matmul": lambda: torch.matmul(a, b, out=out),
        "bmm.out": lambda: torch.bmm(a3, b3, out=out3),
        "addmm.out": lambda: torch.addmm(out, a, b, out=out),
        "addmm_.default": lambda: out.addmm_(a, b),
        "baddbmm.out": lambda: torch.baddbmm(out3, a3, b3, out=out3),
        "baddbmm_.default": lambda: out3.baddbmm_(a3, b3),
        "addbmm.default": lambda: torch.addbmm(out, a3, b3),
        "addbmm.out": lambda: torch.addbmm(out, a3, b3, out=out),
        "addbmm_.default": lambda: out.addbmm_(a3, b3),
        "mv.out": lambda: torch.mv(a, vector, out=randn(2)),
        "addmv.default": lambda: torch.addmv(randn(2), a, vector),
        "addmv_.default": lambda: randn(2).addmv_(a, vector),
        "linear.out": lambda: torch.ops.aten.linear.out(a, b.t(), out=out),
        "softmax.int_out": lambda: torch.softmax(a, 1, out=a),
        "_trilinear.default": lambda: F.bilinear(a, a, randn(4, 3, 3)),
        "_cdist_forward.default": lambda: torch.cdist(a, a),
        "_euclidean_dist.default": lambda: torch.cdist(randn(64, 3), randn(64, 3)),
        "mkldnn_rnn_layer.default": lambda: torch.nn.LSTM(3, 4)(a3),
    }


@pytest.mark.parametrize("name", refused())
def test_an_operator_that_would_run_unchanged_is_an_error_in_any_of_its_forms(name):
    with pytest.raises(NotImplementedError, match=name.split()[0]), torch.no_grad(), batch_invariant_mode():
        refused()[name]()


def test_products_of_other_dtypes_and_the_kernels_of_attention_are_refused_where_torch_has_them():
    names = ["_flash_attention_forward", "_efficient_attention_forward", "_scaled_grouped_mm"]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    products = [getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm")]
    expected = {packet.default for packet in packets} | {x.dtype for x in products if "dtype" in x.overloads()}
    assert {kind_of(func) for func in expected} == {"refused"}


def test_integers_may_be_multiplied_in_any_form():
    a, out = torch.arange(4).reshape(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    with batch_invariant_mode():
        assert torch.equal(torch.mm(a, a, out=out), a @ a)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(torch.nn.Module):
    """Layers that a backward pass calls again, unless ``use_reentrant`` is None."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Attention() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            again = self.use_reentrant
            x = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
        return x


in_either_kind_of_checkpoint = pytest.mark.parametrize("use_reentrant", [True, False])


@pytest.mark.skipif(overrides._redispatch is None, reason="attention in a backward pass is hidden from the mode")
@in_either_kind_of_checkpoint
@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
def test_what_a_backward_pass_in_the_mode_computes_again_is_what_the_forward_computed(use_reentrant, backward):
    x = randn(2, 70, 64)

    def gradients(model):
        leaf = x.clone().requires_grad_()
        with batch_invariant_mode():
            backward(model(leaf).square().sum())
            assert is_batch_invariant()
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    for mine, theirs in zip(gradients(Checkpointed(use_reentrant)), gradients(Checkpointed(None)), strict=True):
        assert equal_bits(mine, theirs)
    assert not is_batch_invariant()


def wrapped_gradients(model, x, *, in_mode):
    leaf = x.clone().requires_grad_()
    with batch_invariant_forward(model):
        loss = model(leaf).square().sum()
        if in_mode:
            with batch_invariant_mode():
                loss.backward()
        else:
            loss.backward()
    return [leaf.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("hides_attention", [False, True])
@pytest.mark.parametrize("in_mode", [False, True])
@in_either_kind_of_checkpoint
def test_what_a_backward_pass_of_a_wrapped_model_computes_again_is_what_the_forward_computed(
    use_reentrant, in_mode, hides_attention, monkeypatch
):
    if hides_attention:
        monkeypatch.setattr(overrides, "_redispatch", None)
    x = randn(2, 70, 64)
    ours = wrapped_gradients(Checkpointed(use_reentrant), x, in_mode=in_mode)
    expected = wrapped_gradients(Checkpointed(None), x, in_mode=in_mode)
    for mine, theirs in zip(ours, expected, strict=True):
        assert equal_bits(mine, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@in_either_kind_of_checkpoint
def test_a_thread_of_autograd_computes_again_what_the_forward_computed(use_reentrant):
    x = randn(2, 70, 64).cuda()
    ours = wrapped_gradients(Checkpointed(use_reentrant).cuda(), x, in_mode=False)
    expected = wrapped_gradients(Checkpointed(None).cuda(), x, in_mode=False)
    for mine, theirs in zip(ours, expected, strict=True):
        assert equal_bits(mine, theirs)


def test_attention_that_torch_hides_from_the_mode_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(overrides, "_redispatch", None)
    model, x = Checkpointed(True), randn(2, 70, 64).requires_grad_()
    with batch_invariant_mode():
        loss = model(x).sum()
        with pytest.raises(NotImplementedError, match=r"around checkpoints use batch_invariant_forward\(model\)"):
            loss.backward()
        assert is_batch_invariant()


@pytest.mark.skipif(overrides._redispatch is None, reason="attention in this module is hidden from the mode")
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_torchs_own_transformer_layer_is_invariant_in_the_mode(context):
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).eval()
    x = randn(3, 70, 64)
    with context(), batch_invariant_mode():
        whole = layer(x)
        assert equal_bits(torch.cat([layer(row) for row in x.split(1)]), whole)
        y = layer.self_attn(x, x, x, need_weights=False)[0]
        assert equal_bits(layer.self_attn(x[:1], x[:1], x[:1], need_weights=False)[0], y[:1])
    torch.testing.assert_close(whole, layer(x), rtol=0, atol=1e-5)


def test_the_mode_ends_with_the_last_of_the_blocks_that_coroutines_of_a_thread_have_open():
    states = []

    async def first(entered, leave):
        with batch_invariant_mode():
            entered.set()
            await leave.wait()

    async def second(entered, leave):
        await entered.wait()
        with batch_invariant_mode():
            leave.set()
            while len(asyncio.all_tasks()) > 2:
                await asyncio.sleep(0)
            states.append(is_batch_invariant())
        states.append(is_batch_invariant())

    async def both():
        entered, leave = asyncio.Event(), asyncio.Event()
        await asyncio.gather(first(entered, leave), second(entered, leave))

    asyncio.run(both())
    assert states == [True, False]


def test_the_mode_may_be_entered_again_and_ends_with_the_outermost_block():
    x, w = randn(3, 100), randn(70, 100, seed=1)
    with batch_invariant_mode():
        once = F.linear(x, w)
        with batch_invariant_mode():
            assert is_batch_invariant()
            assert equal_bits(F.linear(x, w), once)
        with pytest.raises(KeyError), batch_invariant_mode():
            raise KeyError("inner")
        assert is_batch_invariant()
        assert equal_bits(F.linear(x, w), once)
    assert not is_batch_invariant()
    torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))


def test_inference_mode_does_not_hide_products_from_the_mode():
    x, w, bias = randn(37, 1024), randn(70, 1024, seed=1), randn(70, seed=2)
    with batch_invariant_mode():
        expected = F.linear(x, w, bias)
        with torch.inference_mode():
            assert equal_bits(torch.cat([F.linear(row, w, bias) for row in x.split(1)]), expected)


def test_another_thread_is_not_in_the_mode():
    states = []
    with batch_invariant_mode():
        thread = threading.Thread(target=lambda: states.append(is_batch_invariant()))
        thread.start()
        thread.join()
        assert is_batch_invariant()
    assert states == [False]


def test_ending_the_mode_in_another_thread_is_an_error():
    mode = batch_invariant_mode()
    errors = []

    def begin_and_leave():
        mode.__enter__()

    thread = threading.Thread(target=begin_and_leave)
    thread.start()
    thread.join()
    try:
        mode.__exit__(None, None, None)
    except RuntimeError as error:
        errors.append(str(error))
    assert errors == ["batch_invariant_mode must end in the thread that it began in"]
    assert not is_batch_invariant()


def test_a_wrapped_forward_is_invariant_in_every_thread_and_restored():
    model = torch.nn.Sequential(torch.nn.Linear(100, 70), torch.nn.Tanh(), torch.nn.Linear(70, 30))
    x = randn(37, 100)
    with batch_invariant_mode():
        expected = model(x)
    outputs = []
    with batch_invariant_forward(model):
        thread = threading.Thread(target=lambda: outputs.append(torch.cat([model(row) for row in x.split(1)])))
        thread.start()
        thread.join()
        assert equal_bits(outputs[0], expected)
        with pytest.raises(ValueError, match="Sequential is batch-invariant already"), batch_invariant_forward(model):
            pass
    assert "forward" not in vars(model)
    with pytest.raises(KeyError), batch_invariant_forward(model):
        raise KeyError("in the block")
    assert "forward" not in vars(model)


def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights():
    model, x = torch.nn.Linear(4, 4), randn(3, 4)
    with batch_invariant_forward(model):
        twin = copy.deepcopy(model)
        torch.nn.init.zeros_(twin.weight)
        torch.nn.init.zeros_(twin.bias)
        assert torch.equal(twin(x), torch.zeros(3, 4))
        assert not torch.equal(model(x), torch.zeros(3, 4))


def test_a_forward_of_the_instance_comes_back():
    model = torch.nn.Linear(4, 4)
    own = lambda x: x + 1  # noqa: E731
    model.forward = own
    with batch_invariant_forward(model):
        assert torch.equal(model(torch.zeros(2)), torch.ones(2))
    assert vars(model)["forward"] is own


def test_megatrons_own_mode_excludes_ours():
    kernels = pytest.importorskip("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    kernels._batch_invariant_MODE = True
    try:
        assert kernels.is_batch_invariant_mode_enabled()
        with pytest.raises(RuntimeError, match="Megatron-Core's batch-invariant mode is on"), batch_invariant_mode():
            pass
        assert not is_batch_invariant()
    finally:
        kernels._batch_invariant_MODE = False


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(4, 8)}, ValueError, r"takes \[tokens, heads, dim\]"),
        ({"key": torch.zeros(4, 2, 8).bfloat16()}, TypeError, "takes one dtype"),
        ({"value": torch.zeros(5, 2, 8)}, ValueError, "one shape"),
        ({"query": torch.zeros(4, 3, 8)}, ValueError, "3 query heads are no multiple of 2 key heads"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, ValueError, r"must be \[sequences \+ 1\]"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, TypeError, "mask must be boolean, got torch.float32"),
        ({"key_slots": torch.zeros(2, 4).long()}, ValueError, r"key_slots must be .* = \[1, 4\] .*, got \[2, 4\]"),
        ({"key_slots": torch.zeros(1, 4)}, ValueError, "int32 or int64, got .* torch.float32"),
        (
            {"key_slots": torch.zeros(1, 4).long(), "mask": torch.ones(1, 1, 4, 4).bool()},
            NotImplementedError,
            "takes no mask: gather the keys first",
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


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    length=st.integers(1, 600),
    cut=st.integers(0, 70),
    batch=st.integers(1, 3),
)
def test_products_of_any_shape_do_not_depend_on_where_the_batch_is_cut(rows, columns, length, cut, batch):
    a, b = randn(batch, rows, length), randn(batch, length, columns, seed=1)
    with batch_invariant_mode():
        whole = torch.bmm(a, b)
        cut_there = torch.cat([torch.bmm(a[:, :cut], b), torch.bmm(a[:, cut:], b)], dim=1)
        one_by_one = torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    assert equal_bits(cut_there, whole)
    assert equal_bits(one_by_one, whole)
    assert (whole - (a.double() @ b.double())).abs().max() <= tolerance(torch.float32, length) * math.sqrt(length)
