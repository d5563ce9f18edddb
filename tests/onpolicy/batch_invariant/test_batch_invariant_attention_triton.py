# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of attention: values against float64, and bits that depend on nothing but the row.

On a GPU where there is one; elsewhere Triton's interpreter runs the same kernels on small shapes, without bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from batch_invariant_support import assert_same_bits
from batch_invariant_support import exact_attention as exact_attention_of_one
from torch import Tensor
from triton_support import (
    DEVICE,
    HAS_GPU,
    MARKS,
    UNIT,
    each_dtype,
    each_dtype_of_a_gpu,
    random,
    rows_of_a_dot_do_not_meet,  # noqa: F401
)

from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing

pytest.importorskip("triton")
attention = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_attention")

pytestmark = MARKS

HEADS, GROUPS, HEAD_DIM = (8, 2, 64) if HAS_GPU else (2, 1, 16)
LONGEST = 1_000 if HAS_GPU else 129


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def keywords(lengths_q: list[int], lengths_k: list[int], **more: object) -> dict:
    return {
        "cu_seqlens_q": cu_seqlens(lengths_q),
        "cu_seqlens_k": cu_seqlens(lengths_k),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
        "scale": 0.3,
        "is_causal": True,
        **more,
    }


def streams(tokens_q: int, tokens_k: int, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (tokens_q, HEADS), (tokens_k, GROUPS), (tokens_k, GROUPS)
    return [random(*shape, HEAD_DIM, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def exact_attention(query: Tensor, key: Tensor, value: Tensor, settings: dict) -> Tensor:
    """In float64, a sequence at a time."""
    query, mask = settings["scale"] * query.shape[2] ** 0.5 * query, settings.get("mask")
    parts = zip(
        *(
            x.split(settings[name].diff().tolist())
            for x, name in ((query, "cu_seqlens_q"), (key, "cu_seqlens_k"), (value, "cu_seqlens_k"))
        ),
        strict=True,
    )
    outputs = []
    for sequence, (q, k, v) in enumerate(parts):
        offset = len(k) - len(q) if settings["is_causal"] else len(k)
        seen = None if mask is None else mask[sequence, :, : len(q), : len(k)]
        outputs.append(exact_attention_of_one(q, k, v, offset=offset, mask=seen))
    return torch.cat(outputs)


CASES = {
    "causal": ([34, 3], [34, 3], {}),
    "full": ([3, 2], [70, 5], {"is_causal": False}),
    "longer keys": ([2, 17], [3, 70], {}),
    "more queries than keys": ([35, 1], [4, 1], {}),
    "mask": ([17, 2], [66, 2], {"mask": 1}),
    "mask of each head": ([5, 2], [66, 5], {"mask": HEADS, "is_causal": False}),
}
if HAS_GPU:
    CASES["many"] = ([700, 1, 129], [1500, 1, 129], {"mask": 1})
each_case = pytest.mark.parametrize("case", CASES)


def case_of(case: str) -> dict:
    lengths_q, lengths_k, more = CASES[case]
    if "mask" in more:
        shape = (len(lengths_q), more["mask"], max(lengths_q), max(lengths_k))
        mask = random(*shape, seed=7) > -0.5
        mask[:, :, 1] = False
        more = {**more, "mask": mask}
    return keywords(lengths_q, lengths_k, **more)


def tokens_of(settings: dict) -> tuple[int, int]:
    return int(settings["cu_seqlens_q"][-1]), int(settings["cu_seqlens_k"][-1])


@each_case
@each_dtype
def test_attention_is_that_of_float64(case, dtype) -> None:
    settings = case_of(case)
    qkv = streams(*tokens_of(settings), dtype=dtype)
    output = attention.attention_forward(*qkv, Packing(**settings))
    exact = exact_attention(*(x.double() for x in qkv), settings)
    # The weights are rounded to the dtype before they meet the values.
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 8 * UNIT[dtype])
    sees_none = (exact == 0).all(-1)
    assert sees_none.any() == case.startswith(("more", "ma"))
    assert (output[sees_none] == 0).all()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (8, torch.float32),
        (24, torch.float32),
        *([(80, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)] if HAS_GPU else []),
    ],
)
def test_head_dimensions_that_are_no_power_of_two_are_padded(dim, dtype) -> None:
    settings = keywords([20], [20])
    # Two groups of two heads.
    qkv = [random(20, heads, dim, dtype=dtype, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    output = attention.attention_forward(*qkv, Packing(**settings))
    exact = exact_attention(*(x.double() for x in qkv), settings)
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 8 * UNIT[dtype])


@each_dtype_of_a_gpu
def test_prefill_chunks_and_decode_give_a_position_the_same_bits(dtype) -> None:
    q, k, v = streams(LONGEST, LONGEST, dtype=dtype)
    output = attention.attention_forward(q, k, v, Packing(**keywords([LONGEST], [LONGEST])))
    # The lengths at which a block of keys or a tile of queries begins or ends.
    borders = [length for block in range(0, LONGEST, 64) for length in (block + 1, block + 63, block + 64)]
    lengths = sorted({length for length in borders if length <= LONGEST} | {LONGEST})
    decode = attention.attention_forward(
        q[[length - 1 for length in lengths]],
        *(torch.cat([x[:length] for length in lengths]) for x in (k, v)),
        Packing(**keywords([1] * len(lengths), lengths)),
    )
    assert_same_bits(decode, output[[length - 1 for length in lengths]])
    begin = 0
    for end in (50, 65, LONGEST):
        chunk = attention.attention_forward(q[begin:end], k[:end], v[:end], Packing(**keywords([end - begin], [end])))
        assert_same_bits(chunk, output[begin:end])
        begin = end


@each_dtype_of_a_gpu
def test_a_sequence_has_its_bits_in_every_pack(dtype) -> None:
    length = 500 if HAS_GPU else 34
    q, k, v = streams(length + 5, length + 5, dtype=dtype)
    settings = keywords([3, length, 2], [3, length, 2])
    middle = slice(3, -2)
    own = (x[middle].clone() for x in (q, k, v))
    alone = attention.attention_forward(*own, Packing(**keywords([length], [length], max_seqlen_q=2 * length)))
    for x in (q, k, v):
        x[:3], x[-2:] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(attention.attention_forward(q, k, v, Packing(**settings))[middle], alone)


@each_dtype_of_a_gpu
@pytest.mark.parametrize("where", [0, 1], ids=["key", "value"])
def test_what_is_not_finite_reaches_no_tile_that_cannot_see_it(where, dtype) -> None:
    q, *kv = streams(129, 129, dtype=dtype)
    settings = Packing(**keywords([129], [129]))
    output = attention.attention_forward(q, *kv, settings)
    # The block of this key is read by tiles before its own, where these have fewer queries than a block has keys.
    kv[where][100] = float("nan")
    spoiled = attention.attention_forward(q, *kv, settings)
    rows = attention.choose_tile(dtype, HEAD_DIM).BLOCK_M
    first = 100 if where == 0 else 100 // rows * rows
    assert_same_bits(spoiled[:first], output[:first])
    assert spoiled[100:].isnan().all()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("in_slots", [True, False])
def test_queries_without_keys_get_zeros_and_read_nothing(in_slots, is_causal) -> None:
    q, *kv = streams(40, 70)
    more = {"key_slots": torch.arange(70, device=DEVICE).expand(3, 70)} if in_slots else {}
    settings = keywords([3, 35, 2], [0, 70, 0], is_causal=is_causal, **more)
    output = attention.attention_forward(q, *kv, Packing(**settings))
    alone = attention.attention_forward(q[3:38], *kv, Packing(**keywords([35], [70], is_causal=is_causal)))
    assert_same_bits(output, torch.cat([torch.zeros_like(q[:3]), alone, torch.zeros_like(q[:2])]))
    output = attention.attention_forward(q, kv[0][:0], kv[1][:0], Packing(**keywords([40], [0], **more)))
    assert_same_bits(output, torch.zeros_like(q))


def test_every_head_of_many_has_its_own_keys() -> None:
    # More heads than take turns, several tiles, and rows of no sequence.
    settings = keywords([34], [34])
    qkv = [random(70, heads, 8, seed=heads + i) for i, heads in enumerate((18, 6, 6))]
    torch.use_deterministic_algorithms(True)  # Fills new memory with NaN.
    try:
        output = attention.attention_forward(*qkv, Packing(**settings))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = exact_attention(*(x[:34].double() for x in qkv), settings)
    torch.testing.assert_close(output[:34].double(), exact, rtol=0, atol=1e-5)
    assert not output[34:].any()


@pytest.mark.parametrize(
    ("length", "stride"),
    [(3, 2**26), pytest.param(140, 2**24, marks=pytest.mark.skipif(not HAS_GPU, reason="takes 5 GB"))],
)
def test_rows_may_lie_far_apart(length, stride) -> None:
    q, *kv = streams(length, length, dtype=torch.float16)
    settings = Packing(**keywords([length], [length]))
    output = attention.attention_forward(q, *kv, settings)
    # Of these bytes only the rows are touched; their distances do not fit into 32 bits.
    memory = torch.empty(length * stride, dtype=torch.float16, device=DEVICE)
    apart = [
        memory[i * GROUPS * HEAD_DIM :].as_strided((length, GROUPS, HEAD_DIM), (stride, HEAD_DIM, 1)) for i in range(2)
    ]
    for x, far in zip(kv, apart, strict=True):
        far.copy_(x)
    assert_same_bits(attention.attention_forward(q, *apart, settings), output)


@each_dtype_of_a_gpu
def test_a_mask_that_says_causal_gives_the_bits_of_the_causal_flag(dtype) -> None:
    q, k, v = streams(34, 70, dtype=dtype)
    flagged = attention.attention_forward(q, k, v, Packing(**keywords([34], [70])))
    mask = torch.ones(34, 70, dtype=torch.bool, device=DEVICE).tril(36)
    for shaped in (mask[None, None], mask.expand(1, HEADS, 34, 70)):
        masked = attention.attention_forward(q, k, v, Packing(**keywords([34], [70], is_causal=False, mask=shaped)))
        assert_same_bits(masked, flagged)


@each_dtype_of_a_gpu
def test_packed_padded_and_windowed_by_a_mask_has_the_bits_of_its_own_keys(dtype) -> None:
    first, second, window = (300, 200, 150) if HAS_GPU else (19, 40, 30)
    total = first + second
    q, k, v = streams(total, total, dtype=dtype)
    position = torch.arange(total, device=DEVICE)
    causal = position >= position[:, None]
    in_first = position < first
    packed = causal.T & (in_first == in_first[:, None])
    settings = {"is_causal": False}
    output = attention.attention_forward(
        q, k, v, Packing(**keywords([total], [total], mask=packed[None, None], **settings))
    )
    apart = attention.attention_forward(q, k, v, Packing(**keywords([first, second], [first, second])))
    assert_same_bits(output, apart)
    # The mask may come on top of causality.
    mask = (in_first == in_first[:, None])[None, None]
    assert_same_bits(attention.attention_forward(q, k, v, Packing(**keywords([total], [total], mask=mask))), apart)
    windowed = (causal.T & (position > position[:, None] - window))[None, None].expand(1, HEADS, -1, -1)
    output = attention.attention_forward(q, k, v, Packing(**keywords([total], [total], mask=windowed, **settings)))
    for last in (0, window - 1, window, total - 1):
        seen = slice(max(0, last - window + 1), last + 1)
        length = seen.stop - seen.start
        step = attention.attention_forward(q[last : last + 1], k[seen], v[seen], Packing(**keywords([1], [length])))
        assert_same_bits(step, output[last : last + 1])


@each_dtype_of_a_gpu
def test_huge_scores_of_one_query_leave_the_others_alone(dtype) -> None:
    q, k, v = streams(70, 70, dtype=dtype)
    settings = keywords([70], [70])
    output = attention.attention_forward(q, k, v, Packing(**settings))
    q[::2] = float("nan")
    q[1::4] = torch.finfo(dtype).max
    assert_same_bits(attention.attention_forward(q, k, v, Packing(**settings))[3::4], output[3::4])


@each_dtype_of_a_gpu
def test_strides_change_no_bit_of_attention(dtype) -> None:
    q, k, v = streams(20, 20, dtype=dtype)
    settings = keywords([20], [20])
    output = attention.attention_forward(q, k, v, Packing(**settings))
    fused = torch.cat([q, k, v], 1)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    by_lane = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for strided in (fused.split([HEADS, GROUPS, GROUPS], 1), by_head, by_lane):
        assert_same_bits(attention.attention_forward(*strided, Packing(**settings)), output)


def test_attention_of_no_tokens_is_empty() -> None:
    output = attention.attention_forward(*streams(0, 0), Packing(**keywords([0], [0])))
    assert output.shape == (0, HEADS, HEAD_DIM)


def test_what_attention_cannot_take_is_named() -> None:
    q, k, v = streams(6, 6)
    settings = keywords([6], [6])

    def message(error: type[Exception], match: str, *tensors: Tensor, **more: object) -> None:
        with pytest.raises(error, match=match):
            attention.attention_forward(*tensors, Packing(**{**settings, **more}))

    message(ValueError, r"in \[1, 256\], got 300", *(x.repeat(1, 1, 20)[..., :300] for x in (q, k, v)))
    message(TypeError, "cu_seqlens_k must be int32", q, k, v, cu_seqlens_k=settings["cu_seqlens_k"].long())
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE)
    message(TypeError, "mask must be bool", q, k, v, mask=mask.int())


@each_dtype_of_a_gpu
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [([1, 1, 1], [1, 130, 64]), ([20, 3], [70, 3])])
def test_keys_in_the_slots_of_a_paged_cache_give_the_bits_of_keys_in_a_row(lengths_q, lengths_k, dtype) -> None:
    q, k, v = streams(sum(lengths_q), sum(lengths_k), dtype=dtype)
    expected = attention.attention_forward(q, k, v, Packing(**keywords(lengths_q, lengths_k)))
    # Other rows of the cache are NaN, and so are those that the table names after the end of a sequence.
    num_slots = sum(lengths_k) + 9
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    table = slots[-1].repeat(len(lengths_k), max(lengths_k) + 2)
    for row, own in zip(table, slots[: sum(lengths_k)].split(lengths_k), strict=True):
        row[: len(own)] = own
    paged_k, paged_v = (torch.full((num_slots, *x.shape[1:]), torch.nan, dtype=dtype, device=DEVICE) for x in (k, v))
    paged_k[slots[: len(k)]], paged_v[slots[: len(v)]] = k, v
    for key_slots in (table, table.int()):
        output = attention.attention_forward(
            q, paged_k, paged_v, Packing(**keywords(lengths_q, lengths_k, key_slots=key_slots))
        )
        assert_same_bits(output, expected)
