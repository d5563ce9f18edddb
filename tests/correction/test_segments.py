# SPDX-License-Identifier: Apache-2.0
"""Gates on segments: each run of generated tokens for itself, the same on any number of context-parallel ranks."""

import math
from functools import cache
from random import Random

import pytest
import torch
from cases import args_of, flat, random_samples, sprinkle
from drawn_configs import Balanced, correct_point, draw_point
from reference import Samples, correct
from synchronization import ENOUGH, call, recorded
from thread_ranks import run_ranks
from zigzag import local_tokens

import mis_ext
from mis_ext import CorrectionConfig, Gate, PackedLayout
from mis_ext.correction.layout import segment_sums

SEGMENTS = ("segment_sum", "segment_mean")
LENGTHS, PROMPTS = [7, 1, 23, 2, 40, 12], [3, 1, 9, 2, 30, 5]
NAN = math.nan


def gated(log_ratio: list[float], mask: list[int], **gate) -> mis_ext.Correction:
    """One response whose behavior log-probs are 0."""
    return mis_ext.compute_correction(
        proximal_logprobs_T=torch.tensor(log_ratio),
        behavior_logprobs_T=torch.zeros(len(mask)),
        response_mask_R=torch.tensor(mask),
        layout=PackedLayout.whole([len(mask)]),
        config=CorrectionConfig(weight=None, gates=(Gate(**gate),), metrics="all"),
    )


TURNS = [1, 1, 0, 1, 1, 1]
EQUAL = [0.5, -0.5, 9.0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("log_ratio", "gate", "kept"),
    [
        # The first turn has a mean of 0, the second of a quarter.
        (EQUAL, {"reduce": "segment_mean", "high": math.exp(0.2)}, [1, 1, 0, 0, 0, 0]),
        (EQUAL, {"reduce": "segment_mean", "low": math.exp(0.2)}, [0, 0, 0, 1, 1, 1]),
        (EQUAL, {"reduce": "segment_mean", "high": math.exp(0.25 + 1e-6)}, TURNS),
        # Products are the exp of 0 and of three quarters.
        (EQUAL, {"reduce": "segment_sum", "high": 2.0}, [1, 1, 0, 0, 0, 0]),
        (EQUAL, {"reduce": "segment_sum", "high": 2.2}, TURNS),
        (EQUAL, {"reduce": "segment_mean", "statistic": "abs_log_ratio", "high": 0.3}, [0, 0, 0, 1, 1, 1]),
        # What is not known is not kept, and the other turn stays.
        ([0.0, NAN, 0.0, 0.0, 0.0, 0.0], {"reduce": "segment_mean", "high": 2.0}, [0, 0, 0, 1, 1, 1]),
        ([0.0, 0.0, 0.0, 0.0, -math.inf, 0.0], {"reduce": "segment_sum", "high": 2.0}, [1, 1, 0, 0, 0, 0]),
    ],
)
def test_a_segment_that_is_rejected_loses_its_tokens_and_no_other_does(log_ratio, gate, kept) -> None:
    correction = gated(log_ratio, TURNS, **gate)
    assert correction.loss_mask_R.tolist() == kept


def test_a_segment_that_is_zeroed_stays_in_the_mask() -> None:
    correction = gated(EQUAL, TURNS, reduce="segment_mean", high=math.exp(0.2), action="zero")
    assert correction.loss_mask_R.tolist() == TURNS
    assert correction.weights_T.tolist() == [1, 1, 0, 0, 0, 0]


def test_its_metrics_are_means_over_tokens() -> None:
    metrics = gated(EQUAL, TURNS, reduce="segment_mean", high=math.exp(0.2)).metrics
    assert float(metrics["mis_rs_mask_fraction_high"].value()) == pytest.approx(3 / 5)
    assert float(metrics["mis_rs_mask_fraction_low"].value()) == 0.0
    assert float(metrics["mis_rs_mask_value"].value()) == pytest.approx((2 + 3 * math.exp(0.25)) / 5)
    assert float(metrics["mis_kept_token_fraction"].value()) == pytest.approx(2 / 5)


def test_a_token_outside_of_the_mask_is_a_segment_of_its_own() -> None:
    mask_R, row_R = torch.tensor(TURNS) != 0, torch.arange(1.0, 7.0)
    (sums_R,) = segment_sums([row_R], mask_R, torch.zeros(6, dtype=torch.int64))
    assert sums_R.tolist() == [3.0, 3.0, 3.0, 15.0, 15.0, 15.0]


def test_a_segment_ends_with_its_response() -> None:
    config = CorrectionConfig(weight=None, gates=(Gate(reduce="segment_sum", high=2.0),))
    log_ratio_T = torch.tensor([0.5, 0.5, 0.5, 0.5])
    for lengths, kept in (([4], [0, 0, 0, 0]), ([1, 1, 2], [1, 1, 0, 0])):
        correction = mis_ext.compute_correction(
            proximal_logprobs_T=log_ratio_T,
            behavior_logprobs_T=torch.zeros(4),
            response_mask_R=torch.ones(4),
            layout=PackedLayout.whole(lengths),
            config=config,
        )
        assert correction.loss_mask_R.tolist() == kept


@cache
def points() -> list:
    """Configurations of which each has a gate on segments, and samples of several turns; the interpreter is slow."""
    count, random, found = 12, Random(5), []
    choose = Balanced(random)
    while len(found) < count:
        point = draw_point(choose)
        samples = sprinkle(random_samples(LENGTHS, seed=len(found), mask=0.7), seed=len(found), share=0.02)
        (expected,) = correct([samples], point.rules, per_token_loss=point.config.per_token_loss)
        has_segments = any(gate.reduce in SEGMENTS for gate in point.config.gates)
        if has_segments and expected.margin > 1e-5 and 0.0 < flat(expected.masks).mean() < 0.9:
            found.append((point, samples))
    return found


def on_ranks(point, samples: Samples, *, cp_size: int, partition: str) -> list:
    """The correction of each rank, and its number of collectives and tokens."""
    totals = [prompt + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]

    def on_rank(rank):
        place = {"cp_rank": rank.cp_rank, "cp_size": cp_size, "partition": partition}
        own = [
            local_tokens(total_length=total, response_length=length, **place)
            for total, length in zip(totals, LENGTHS, strict=True)
        ]
        streams = [
            torch.cat([column[t] for column, t in zip(columns, own, strict=True)])
            for columns in (samples.train, samples.rollout, samples.lags)
        ]
        correction = mis_ext.compute_correction(
            proximal_logprobs_T=streams[0],
            behavior_logprobs_T=streams[1],
            lag_T=streams[2] if point.config.staleness else None,
            response_mask_R=torch.cat(samples.masks),
            layout=PackedLayout.context_parallel(LENGTHS, total_lengths=totals, **place),
            config=point.config,
            cp_group=rank.groups.cp_group,
            token_metrics=True,
        )
        starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
        tokens = [start + t for start, ts in zip(starts, own, strict=True) for t in ts]
        return correction, rank.num_collectives, tokens

    found = run_ranks(on_rank, cp_size=cp_size)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.mark.parametrize(("cp_size", "partition"), [(2, "zigzag"), (4, "zigzag"), (4, "contiguous")])
def test_any_number_of_ranks_keeps_the_same_segments(cp_size, partition) -> None:
    for point, samples in points():
        whole = correct_point(point, samples)
        found = on_ranks(point, samples, cp_size=cp_size, partition=partition)
        # Segments, statistics of sequences, and bits of the tokens that are kept.
        assert {count for _, count, _ in found} <= ({3} if point.config.rejects_single_tokens else {2})
        for correction, _, tokens in found:
            assert torch.equal(correction.loss_mask_R, whole.loss_mask_R)
            torch.testing.assert_close(correction.weights_T, whole.weights_T[tokens], rtol=1e-6, atol=0.0)
            for name, values_T in correction.token_metrics.items():
                tolerance = {"rtol": 1e-3, "atol": 2e-3} if name.endswith("_std") else {"rtol": 1e-5, "atol": 2e-6}
                expected = whole.token_metrics[name][tokens]
                torch.testing.assert_close(values_T, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("reduce", SEGMENTS)
def test_the_host_never_waits_for_a_segment_and_its_work_does_not_depend_on_the_data(reduce, monkeypatch) -> None:
    keys = {"use_tis": True, "mis_guard": "warn", "mis_max_reject_fraction": 1.0}
    gates = [{"reduce": reduce, "low": 0.8, "high": 1.2}, {"reduce": reduce, "statistic": "k3", "high": 0.2}]
    args = args_of(keys | {"use_rs": True, "rs_upper_bound": 5.0, "rs_gates": gates})
    call(args, ENOUGH)
    names = []
    for seed, share in ((81, 0.0), (82, 0.1)):
        samples = sprinkle(random_samples([9, 1, 60, 17], seed=seed, mask=0.6), seed=seed, share=share)
        with recorded(monkeypatch, *samples.train, *samples.rollout, *samples.masks) as recorder:
            call(args, samples)
        names.append(recorder.names)
    assert names[0] == names[1]


def test_a_rank_that_fails_takes_part_in_the_gather_of_segments() -> None:
    config = CorrectionConfig(gates=(Gate(reduce="segment_mean", low=0.9, high=1.1),))

    def on_rank(rank):
        session = mis_ext.Session(config)
        device = torch.device("cpu")
        if rank.number == 1:
            with session.local_work([8, 3], groups=rank.groups, device=device):
                raise MemoryError("of rank 1")
        layout = PackedLayout.context_parallel([8, 3], total_lengths=[10, 6], cp_rank=0, cp_size=2)
        values_T = torch.zeros(layout.num_local_tokens)
        streams = mis_ext.PackedStreams(values_T, values_T, torch.ones(11), layout)
        return float(session.compute(streams, groups=rank.groups).status)

    status, error = run_ranks(on_rank, cp_size=2)
    assert status == 2.0
    assert isinstance(error, MemoryError)
