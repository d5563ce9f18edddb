# SPDX-License-Identifier: Apache-2.0
"""The packed layout: any number of ranks deals out every token once, and reductions hold for any lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from searching import searching
from zigzag import local_tokens, owner

from mis_ext import PackedLayout
from mis_ext.correction.layout import owned_chunks

LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=5)


@searching(50)
@given(LENGTHS, st.integers(2, 7), st.sampled_from(["zigzag", "contiguous"]), st.integers(0, 9) | st.none())
def test_every_rank_gets_the_tokens_that_the_contract_says_and_together_all_of_them(samples, cp_size, partition, extra):
    responses = [response for response, _ in samples]
    totals = [response + prompt for response, prompt in samples]
    padded = None if extra is None else [max(totals) + extra] * len(totals)
    offsets = [sum(responses[:i]) for i in range(len(responses))]
    seen = []
    for cp_rank in range(cp_size):
        layout = PackedLayout.context_parallel(
            responses,
            total_lengths=totals,
            cp_rank=cp_rank,
            cp_size=cp_size,
            partition=partition,
            padded_lengths=padded,
        )
        own = [
            local_tokens(
                total_length=total,
                response_length=response,
                cp_rank=cp_rank,
                cp_size=cp_size,
                partition=partition,
                padded_length=None if padded is None else padded[i],
            )
            for i, (total, response) in enumerate(zip(totals, responses, strict=True))
        ]
        assert layout.local_lengths == tuple(map(len, own))
        assert layout.position_T.tolist() == [offsets[i] + t for i, tokens in enumerate(own) for t in tokens]
        assert layout.sequence_T.tolist() == [i for i, tokens in enumerate(own) for _ in tokens]
        seen += layout.position_T.tolist()
    assert sorted(seen) == list(range(sum(responses)))


@searching(50)
@given(st.integers(0, 90), st.integers(1, 7), st.sampled_from(["zigzag", "contiguous"]))
def test_every_position_lies_in_a_range_of_its_owner_up_to_the_least_padding(length, cp_size, partition) -> None:
    num_chunks = cp_size if partition == "contiguous" or cp_size == 1 else 2 * cp_size
    padded = min(n for n in range(length, length + num_chunks) if n % num_chunks == 0)
    for cp_rank in range(cp_size):
        chunks = owned_chunks(cp_rank=cp_rank, cp_size=cp_size, partition=partition)
        assert chunks.padded(length) == padded
        held = [position for run in chunks.ranges(length) for position in run]
        place = {"length": length, "cp_size": cp_size, "partition": partition}
        assert held == [position for position in range(padded) if owner(position, **place) == cp_rank]


def test_a_long_sequence_of_equal_numbers_is_summed_exactly() -> None:
    # Added one by one in float32, ones stop counting at 2**24 and tenths drift by a percent.
    ones = torch.full((1, 2_000_000), 0.1)
    total = PackedLayout.whole([2_000_000]).sums(ones).item()
    assert total == pytest.approx(2_000_000 * ones[0, 0].item(), rel=1e-12)


def test_values_of_sequences_reach_their_tokens() -> None:
    layout = PackedLayout.context_parallel([3, 0, 2], total_lengths=[4, 0, 3], cp_rank=0, cp_size=2)
    assert layout.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0] * 1 + [9.0] * 1
    assert layout.sequence_R.tolist() == [0] * 3 + [2] * 2
    assert layout.local_part(torch.tensor([0, 1, 2, 3, 4])).tolist() == [0, 3]


@pytest.mark.parametrize("num_tokens", [8, 11])
def test_the_part_of_a_rank_is_out_of_all_tokens_of_the_responses(num_tokens: int) -> None:
    layout = PackedLayout.context_parallel([2, 7], total_lengths=[3, 8], cp_rank=0, cp_size=2)
    for each in (layout, PackedLayout.whole([2, 7])):
        assert each.local_part(torch.arange(9)).shape == (each.num_local_tokens,)
        with pytest.raises(ValueError, match=f"values_R has {num_tokens} tokens, but the responses have 9"):
            each.local_part(torch.zeros(num_tokens))


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        layout = PackedLayout.context_parallel([5, 2], total_lengths=[9, 4], cp_rank=0, cp_size=2)
        found = layout.blocks.response_T, layout.sequence_T, layout.sequence_R, layout.position_T
    assert {each.device.type for each in found} == {"cpu"}
