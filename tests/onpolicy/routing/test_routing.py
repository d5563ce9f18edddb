# SPDX-License-Identifier: Apache-2.0
"""What an engine says about its experts: what is refused, and whose row is whose."""

import pytest
import torch
from zigzag import owner

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout

NOTHING = [[-1, -1], [-1, -1]]


def routed(rows: list, num_experts: int = 8) -> RoutedExperts:
    return RoutedExperts(experts_TLK=torch.tensor(rows, dtype=torch.int32), num_experts=num_experts)


def numbered(length: int, *, sample: int, num_experts: int = 1000) -> RoutedExperts:
    """Rows that tell their sample and position: [[100 s + p, 100 s + p + 50]]; the last one is not recorded."""
    first = torch.arange(length - 1) + 100 * sample
    return RoutedExperts.from_rows(
        torch.stack([first, first + 50], dim=1).unsqueeze(1), num_tokens=length, num_experts=num_experts
    )


def test_rows_are_recorded_or_not_as_a_whole() -> None:
    sample = routed([[[0, 7], [7, 0]], NOTHING, [[3, 2], [3, 2]]])
    assert sample.num_tokens == 3
    assert sample.recorded_T.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[[0, 1], [2, 8]]], r"expert 8 at token 0, layer 1 is outside \[0, 8\)"),
        ([[[0, 1], [2, 3]], [[-2, 1], [2, 3]]], "expert -2 at token 1, layer 0 is outside"),
        ([[[0, 1], [2, 3]], [[0, 1], [5, 5]]], "expert 5 is chosen twice at token 1, layer 1"),
        ([[[5, 2, 5]]], "expert 5 is chosen twice at token 0, layer 0"),
        ([[[0, 1], [-1, -1]]], "token 0 is only partly recorded"),
        ([[[0, 1], [2, -1]]], "token 0 is only partly recorded"),
        ([[0, 1], [2, 3]], r"must be \[tokens, layers, topk\], none of them 0, got \[2, 2\]"),
        ([[[], []]], r"none of them 0, got \[1, 2, 0\]"),
    ],
)
def test_impossible_routings_are_refused(rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        routed(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_dtypes_that_cannot_say_every_index_and_not_recorded_are_refused(dtype) -> None:
    with pytest.raises(TypeError, match=f"int16, int32 or int64, got {dtype}"):
        RoutedExperts(experts_TLK=torch.zeros(2, 1, 1).to(dtype), num_experts=4)


@pytest.mark.parametrize("rows", [[[[0, 1]]], torch.tensor([[[0, 1]]]).numpy()])
def test_what_is_no_tensor_is_refused_with_the_way_to_make_one(rows) -> None:
    kind = type(rows).__name__
    with pytest.raises(TypeError, match=rf"experts_TLK must be a tensor, got {kind}: use torch\.tensor"):
        RoutedExperts(experts_TLK=rows, num_experts=8)
    with pytest.raises(TypeError, match=f"rows_NLK must be a tensor, got {kind}"):
        RoutedExperts.from_rows(rows, num_tokens=2, num_experts=8)


def test_rows_lie_where_they_start_and_the_rest_is_not_recorded() -> None:
    rows = torch.tensor([[[1, 2]], [[3, 4]]])
    sample = RoutedExperts.from_rows(rows, num_tokens=5, num_experts=8, start=2)
    assert sample.experts_TLK.tolist() == [[[-1, -1]], [[-1, -1]], [[1, 2]], [[3, 4]], [[-1, -1]]]
    for start in (-1, 4):
        with pytest.raises(ValueError, match=f"2 rows starting at position {start} do not fit into 5 tokens"):
            RoutedExperts.from_rows(rows, num_tokens=5, num_experts=8, start=start)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("padded_length", [None, 19])
def test_rows_follow_the_context_parallel_layout_position_by_position(cp_size, padded_length) -> None:
    lengths = [7, 16, 2]
    samples = [numbered(length, sample=index) for index, length in enumerate(lengths)]
    for cp_rank in range(cp_size):
        expected, by_position = [], []
        for index, length in enumerate(lengths):
            whole = padded_length or length
            # Without context parallelism nothing is padded to equal chunks.
            chunked = -(-whole // (2 * cp_size)) * 2 * cp_size if cp_size > 1 else whole
            mine = [p for p in range(chunked) if owner(p, length=whole, cp_size=cp_size, partition="zigzag") == cp_rank]
            expected.append([100 * index + p if p < length - 1 else -1 for p in mine])
        if padded_length is None:
            layout = RoutingLayout.packed(lengths, cp_rank=cp_rank, cp_size=cp_size)
            by_position = [row for rows in expected for row in rows]
        else:
            layout = RoutingLayout.padded(lengths, padded_length=padded_length, cp_rank=cp_rank, cp_size=cp_size)
            by_position = [row for position in zip(*expected, strict=True) for row in position]
        local = layout.local(samples)
        assert local.experts_TLK[:, 0, 0].tolist() == by_position
        assert local.num_missing == 0


@pytest.mark.parametrize("num_local_tokens", [None, 12])
def test_a_stream_of_samples_is_cut_to_equal_parts_and_padded_at_its_end(num_local_tokens) -> None:
    lengths = [7, 16, 2]
    samples = [numbered(length, sample=index) for index, length in enumerate(lengths)]
    stream = [100 * index + p if p < n - 1 else -1 for index, n in enumerate(lengths) for p in range(n)]
    size = num_local_tokens or 9
    for cp_rank in range(3):
        layout = RoutingLayout.packed(
            lengths, cp_rank=cp_rank, cp_size=3, num_local_tokens=num_local_tokens, partition="stream"
        )
        rows = layout.local(samples).experts_TLK[:, 0, 0].tolist()
        assert rows == (stream + [-1] * 11)[cp_rank * size : (cp_rank + 1) * size]
    with pytest.raises(ValueError, match="num_local_tokens = 8 is less than the 9 needed"):
        RoutingLayout.packed(lengths, cp_size=3, num_local_tokens=8, partition="stream")
    with pytest.raises(ValueError, match="partition must be one of"):
        RoutingLayout.packed(lengths, partition="contiguous")


def test_sequence_parallel_ranks_hold_consecutive_rows() -> None:
    lengths, samples = [6, 4], [numbered(6, sample=0), numbered(4, sample=1)]
    whole = RoutingLayout.padded(lengths, padded_length=6).local(samples).experts_TLK
    parts = [RoutingLayout.padded(lengths, padded_length=6, tp_rank=r, tp_size=3).local(samples) for r in range(3)]
    assert torch.equal(torch.cat([part.experts_TLK for part in parts]), whole)
    with pytest.raises(ValueError, match="6 positions do not divide among tp_size = 4"):
        RoutingLayout.padded(lengths, padded_length=6, tp_size=4)
    with pytest.raises(ValueError, match="10 rows do not divide among tp_size = 4"):
        RoutingLayout.packed(lengths, tp_size=4)


def test_padding_at_the_end_of_a_packed_micro_batch_is_neither_replayed_nor_missing() -> None:
    local = RoutingLayout.packed([3, 2], num_local_tokens=8).local([numbered(3, sample=0), numbered(2, sample=1)])
    assert local.experts_TLK[:, 0, 0].tolist() == [0, 1, -1, 100, -1, -1, -1, -1]
    assert local.num_missing == 0
    with pytest.raises(ValueError, match="num_local_tokens = 4 is less than the 5 needed"):
        RoutingLayout.packed([3, 2], num_local_tokens=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoutingLayout.packed([4]).local([numbered(5, sample=0)]), "has experts of 5 tokens, but needs 4"),
        (
            lambda: RoutingLayout.packed([4, 4]).local([numbered(4, sample=0)]),
            "experts of 1 samples, but the layout has 2",
        ),
        (
            lambda: RoutingLayout.packed([2, 2]).local([numbered(2, sample=0), numbered(2, sample=0, num_experts=99)]),
            r"samples differ in \(layers, topk, num_experts\): \[\(1, 2, 99\), \(1, 2, 1000\)\]",
        ),
        (lambda: RoutingLayout.padded([4, 9], padded_length=8), "padded_length = 8 is less than the longest sample, 9"),
        (lambda: RoutingLayout.packed([]), r"lengths must be positive, one per sample, got \[\]"),
        (lambda: RoutingLayout.packed([3, 0]), "lengths must be positive"),
        (lambda: RoutingLayout.packed(torch.tensor([3, 0])), r"lengths must be positive, one per sample, got \[3, 0\]"),
        (lambda: RoutingLayout.packed([4], cp_rank=2, cp_size=2), r"cp_rank must be in \[0, cp_size = 2\), got 2"),
        (lambda: RoutingLayout.packed([4], tp_rank=-1), r"tp_rank must be in \[0, tp_size = 1\), got -1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layout_of_what_is_no_integer_is_an_error_that_names_it() -> None:
    for make, key in [
        (lambda wrong: RoutingLayout.packed([wrong]), "lengths"),
        (lambda wrong: RoutingLayout.packed([4], num_local_tokens=wrong), "num_local_tokens"),
        (lambda wrong: RoutingLayout.packed([4], cp_rank=wrong, cp_size=8), "cp_rank"),
        (lambda wrong: RoutingLayout.packed([4], tp_size=wrong), "tp_size"),
        (lambda wrong: RoutingLayout.padded([4], padded_length=wrong), "padded_length"),
    ]:
        for wrong in ("4", 4.0, True):
            with pytest.raises(TypeError, match=rf"{key}.* must be an integer.*, got {wrong!r}"):
                make(wrong)
