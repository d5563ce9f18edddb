# SPDX-License-Identifier: Apache-2.0
"""Torch's own attention keeps its meaning in the batch-invariant mode."""

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import equal_bits, randn

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.bits import same_bits

SDPA_CASES = {
    "causal": ((2, 4, 70, 16), (2, 4, 70, 16), {"is_causal": True}),
    "causal, fewer queries: aligned with the first key": ((2, 4, 3, 16), (2, 4, 70, 16), {"is_causal": True}),
    "causal, more queries than keys": ((2, 4, 70, 16), (2, 4, 3, 16), {"is_causal": True}),
    "grouped queries": ((2, 4, 7, 16), (2, 2, 70, 16), {"enable_gqa": True}),
    "no batch": ((3, 7, 16), (3, 9, 16), {"scale": 0.3}),
    "a mask for all": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (7, 9)}),
    "a mask per sequence": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (2, 1, 7, 9)}),
    "a mask per head": ((2, 4, 7, 16), (2, 4, 9, 16), {"attn_mask": (4, 7, 9)}),
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
    "one head of keys for all": ((3, 2, 4, 8), (3, 1, 5, 8), (3, 1, 5, 8)),
    "shorter values": ((2, 2, 4, 8), (2, 2, 70, 8), (2, 2, 70, 6)),
    "longer values": ((2, 2, 4, 8), (2, 2, 70, 8), (2, 2, 70, 12)),
    "no keys": ((1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "two dimensions": ((4, 8), (5, 8), (5, 8)),
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


@pytest.mark.parametrize("shapes", [((1, 3, 2, 4, 8), (1, 3, 2, 5, 8)), ((3, 2, 4, 8), (1, 2, 5, 8))])
def test_torch_attention_of_other_shapes_is_refused(shapes):
    query, key = (randn(*shape) for shape in shapes)
    with (
        pytest.raises(NotImplementedError, match=r"supports only \[batch, heads, tokens, dim\] of one"),
        batch_invariant_mode(),
    ):
        F.scaled_dot_product_attention(query, key, key)
