# SPDX-License-Identifier: Apache-2.0
"""Attention under masks: packs, padding, windows, groups of heads and sinks leave the bits of a query on a CPU."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import equal_bits, randn

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.batch_invariant.overrides import refuse_masked_beginning


@pytest.fixture(autouse=True)
def _threads_are_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(query, key, value, **how):
    return F.scaled_dot_product_attention(query, key, value, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_packed_and_padded_sequences_have_the_bits_that_they_have_alone(seed, dtype):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 150) for _ in range(3)]
    total, padding = sum(lengths), rng.randint(1, 70)
    query, key, value = (randn(1, 4, total, 16, dtype=dtype, seed=seed) for seed in range(3))
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    with batch_invariant_mode():
        packed = attend(query, key, value, attn_mask=causal & (sequence[:, None] == sequence))
        starts = [0, lengths[0], lengths[0] + lengths[1]]
        for start, length in zip(starts, lengths, strict=True):
            own = [x[:, :, start : start + length] for x in (query, key, value)]
            alone = attend(*own, is_causal=True)
            assert equal_bits(packed[:, :, start : start + length], alone)
            on_left = [torch.cat([x[:, :, :1].expand(-1, -1, padding, -1) + 1, x], 2) for x in own]
            num_keys = length + padding
            mask = torch.ones(num_keys, num_keys, dtype=torch.bool).tril() & (torch.arange(num_keys) >= padding)
            assert equal_bits(attend(*on_left, attn_mask=mask)[:, :, padding:], alone)


@pytest.mark.parametrize("seed", range(3))
def test_a_window_whose_cache_drops_keys_has_the_bits_of_a_prefill(seed):
    rng = random.Random(seed)
    window, length = rng.randint(2, 100), 160
    query, key, value = (randn(1, 4, length, 16, seed=seed) for seed in range(3))
    position = torch.arange(length)
    mask = (position <= position[:, None]) & (position > position[:, None] - window)
    with batch_invariant_mode():
        whole = attend(query, key, value, attn_mask=mask)
        for last in rng.sample(range(length), 20):
            seen = slice(max(0, last - window + 1), last + 1)
            step = attend(query[:, :, last : last + 1], key[:, :, seen], value[:, :, seen])
            assert equal_bits(step, whole[:, :, last : last + 1])
        kept = slice(60 - window + 1 if window <= 60 else 0, 100)
        chunk = attend(query[:, :, 60:100], key[:, :, kept], value[:, :, kept], attn_mask=mask[60:100, kept])
        assert equal_bits(chunk, whole[:, :, 60:100])


@pytest.mark.parametrize("seed", range(4))
def test_keys_and_values_of_any_width_with_a_mask_and_groups_of_heads(seed):
    rng = random.Random(seed)
    dim, value_dim = rng.randint(1, 80), 1 if seed == 0 else rng.randint(1, 80)
    for groups, heads in ((1, 1), (2, 4)):
        length = rng.randint(2, 70)
        query = randn(3, heads, length, dim)
        key, value = randn(3, groups, length, dim, seed=1), randn(3, groups, length, value_dim, seed=2)
        mask = torch.rand(3, 1, length, length, generator=torch.Generator().manual_seed(3)) > 0.3
        with batch_invariant_mode():
            whole = attend(query, key, value, attn_mask=mask, enable_gqa=True)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for row in rng.sample(range(length), min(length, 12)):
                    index = rng.randrange(3)
                    one, of_one = slice(index, index + 1), slice(row, row + 1)
                    step = attend(
                        query[one, :, of_one], key[one], value[one], attn_mask=mask[one, :, of_one], enable_gqa=True
                    )
                    assert equal_bits(step, whole[one, :, of_one]), (index, row, heads)


def second_derivative(x):
    (slope,) = torch.autograd.grad(attend(x, x, x).square().sum(), x, create_graph=True)
    torch.autograd.grad(slope.sum(), x)


def flexible(x):
    # Takes seconds to import.
    from torch.nn.attention.flex_attention import flex_attention

    flex_attention(x.detach(), x.detach(), x.detach())


UNTOUCHED = {
    "flex_attention has no batch-invariant form": flexible,
    "functorch transforms": torch.func.grad(lambda x: attend(x, x, x).sum()),
    "not have been used in the graph": second_derivative,
}


@pytest.mark.parametrize("message", UNTOUCHED)
# Of torch, that flex attention is slow where it is not compiled, and of its own use of a module.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ways_around_the_attention_of_the_mode_are_errors(message):
    x = randn(1, 2, 8, 16).requires_grad_()
    with pytest.raises(RuntimeError, match=message), batch_invariant_mode():
        UNTOUCHED[message](x)


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min, -65504.0])
def test_eager_attention_on_cuda_whose_first_keys_are_masked_is_refused(masked):
    scores = randn(2, 4, 6, 9)
    scores[1, :, :, 5:] = masked
    refuse_masked_beginning(scores)
    # A query of padding, which sees nothing.
    scores[0, :, 0] = masked
    refuse_masked_beginning(scores)
    scores[0, 1, 3, :2] = masked
    with pytest.raises(NotImplementedError, match=r'use attn_implementation="sdpa"; .*no longer than its w'):
        refuse_masked_beginning(scores)


def eager_attention(query, key, value, mask, sink):
    """With an attention sink after the keys, as in GPT-OSS."""
    scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, torch.finfo(query.dtype).min)
    scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    shares = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return shares[..., :-1] @ value


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.bfloat16)])
def test_eager_attention_with_a_sink_has_the_bits_of_the_keys_that_a_query_sees(seed, dtype):
    rng, length = random.Random(seed), 150
    query, key, value = (randn(1, 4, length, 16, dtype=dtype, seed=seed) for seed in range(3))
    window, sink, position = rng.randint(2, 140), randn(4, 1, 1, dtype=dtype, seed=3), torch.arange(length)
    mask = (position <= position[:, None]) & (position > position[:, None] - window)
    with batch_invariant_mode():
        whole = eager_attention(query, key, value, mask, sink)
        for last in rng.sample(range(length), 8):
            torch.set_num_threads(rng.randint(1, 3))
            seen = slice(max(0, last - window + 1), last + 1)
            for own in (seen, slice(0, last + 1), slice(rng.randint(0, seen.start), rng.randint(last + 1, length))):
                row = slice(last, last + 1)
                step = eager_attention(query[:, :, row], key[:, :, own], value[:, :, own], mask[row, own], sink)
                assert equal_bits(step, whole[:, :, row]), (last, own, window)
    torch.set_num_threads(1)
    plain = eager_attention(*(x.double() for x in (query, key, value)), mask, sink.double())
    assert (whole.double() - plain).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
