"""The exactness audit: bits, numbers worked out by hand, what never passes, causes, and any number of ranks."""

import json
import math
import multiprocessing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from mis_ext.onpolicy.audit import log_probs as module
from mis_ext.onpolicy.audit.findings import Evidence, Verdict
from mis_ext.onpolicy.audit.report import AuditReport

NAN, INF = math.nan, math.inf
SHOWN = Evidence(rollout="a record", train="a control")
INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def audit_logprobs(*streams: object, **keywords: object) -> AuditReport:
    """With a statement of where the rollout log-probs came from, unless a test says otherwise."""
    return module.audit_logprobs(*streams, **{"provenance": "decode"} | keywords)


def log_probs(*lengths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(-0.01 - 3.0 * torch.rand(length, generator=generator)).to(dtype) for length in lengths]


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def next_number(x: torch.Tensor) -> torch.Tensor:
    """One away from zero."""
    return (x.view(INTEGER[x.dtype]) + 1).view(x.dtype)


def tensors(*lists: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(values) for values in lists]


# --- bits


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), dtype=st.sampled_from(list(INTEGER)), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4)
)
def test_one_ulp_in_one_log_prob_is_found_exactly_there_and_nowhere_under_the_mask(data, dtype, lengths) -> None:
    sample = data.draw(st.integers(0, len(lengths) - 1))
    position = data.draw(st.integers(0, lengths[sample] - 1))
    train = log_probs(*lengths, dtype=dtype)
    rollout = copies(train)
    rollout[sample][position] = next_number(rollout[sample])[position]
    ids = [torch.arange(length) + 100 * index for index, length in enumerate(lengths)]
    report = audit_logprobs(train, rollout, train_token_ids=ids)
    assert report.verdict is Verdict.DIFFERENT
    assert not report.passed
    assert (report.max_ulp, report.num_nonzero, report.num_active_tokens) == (1, 1, sum(lengths))
    first = report.first_divergence
    assert (first.sample, first.position, first.token_id, first.ulps) == (sample, position, position + 100 * sample, 1)
    assert (first.train, first.rollout) == (train[sample][position].item(), rollout[sample][position].item())
    masks = [torch.ones(length) for length in lengths] + [torch.ones(1)]
    masks[sample][position] = 0
    extra = log_probs(1, dtype=dtype)
    masked = audit_logprobs(train + extra, rollout + copies(extra), masks=masks)
    assert masked.verdict is Verdict.EXACT
    assert masked.num_active_tokens == sum(lengths)
    assert masked.first_divergence is None


def test_the_first_divergence_has_the_lowest_sample_and_then_the_lowest_position() -> None:
    train = log_probs(5, 5, 5)
    rollout = copies(train)
    for sample, position in ((2, 0), (1, 4), (1, 2)):
        rollout[sample][position] -= 1.0
    first = audit_logprobs(train, rollout).first_divergence
    assert (first.sample, first.position, first.token_id) == (1, 2, None)


@pytest.mark.parametrize("dtype", list(INTEGER))
def test_a_signed_zero_is_told_from_the_same_bits_and_from_another_number(dtype) -> None:
    train = torch.tensor([-0.0, -1.0, 0.0], dtype=dtype)
    report = audit_logprobs([train], [torch.tensor([0.0, -1.0, 0.0], dtype=dtype)])
    assert report.verdict is Verdict.EXACT_UP_TO_SIGNED_ZERO
    assert report.passed
    assert (report.num_signed_zero, report.num_nonzero, report.max_ulp, report.mean_abs_diff) == (1, 0, 0, 0.0)
    assert report.first_divergence is None
    assert audit_logprobs([train], [train.clone()]).verdict is Verdict.EXACT
    other = audit_logprobs([train], [torch.tensor([0.0, -1.5, 0.0], dtype=dtype)])
    assert (other.verdict, other.num_signed_zero, other.num_nonzero) == (Verdict.DIFFERENT, 1, 1)


def test_two_dtypes_are_compared_as_the_numbers_they_hold() -> None:
    exact = [torch.tensor([-0.5, -1.25]).bfloat16()]
    report = audit_logprobs([exact[0].float()], exact)
    assert report.verdict is Verdict.EXACT
    assert (report.train_dtype, report.rollout_dtype) == ("float32", "bfloat16")
    # The float32 neighbour of a bfloat16 number: bfloat16 on both sides would have hidden it.
    report = audit_logprobs([next_number(exact[0].float())], exact)
    assert (report.verdict, report.max_ulp) == (Verdict.DIFFERENT, 1)
    assert report.equal_after_bf16_rounding
    # Neither of float16 and bfloat16 holds the other's numbers.
    half = torch.tensor([-1.0 - 2**-10], dtype=torch.float16)
    assert audit_logprobs([half], [half.bfloat16()]).max_ulp == 2**13


def test_equal_after_rounding_to_bf16_needs_every_token_and_a_difference() -> None:
    train = tensors([-1.0, -2.0])
    assert audit_logprobs(train, tensors([-1.0001, -2.0])).equal_after_bf16_rounding
    assert not audit_logprobs(train, tensors([-1.0001, -2.1])).equal_after_bf16_rounding
    assert not audit_logprobs(train, copies(train)).equal_after_bf16_rounding
    samples = audit_logprobs(tensors([-1.0], [-2.0]), tensors([-1.0001], [-2.1]))
    assert not samples.equal_after_bf16_rounding


# --- numbers


def test_numbers_worked_out_by_hand() -> None:
    # Probabilities of the rollout: 0.05, 0.05, 0.55, 1, and a masked one.
    rollout = [torch.tensor([0.05, 0.55]).log(), torch.tensor([0.05, 1.0, 0.7]).log()]
    train = copies(rollout)
    train[0][0] += 0.25
    train[1][0] -= 0.5
    train[1][1] -= 1.0
    train[1][2] = NAN
    masks = [torch.tensor([1, 1]), torch.tensor([True, True, False])]
    report = audit_logprobs(train, rollout, masks=masks, provenance="decode")
    assert (report.num_samples, report.num_active_tokens, report.num_nonzero) == (2, 4, 3)
    assert report.nonzero_fraction == 0.75
    assert report.mean_abs_diff == pytest.approx(1.75 / 4, rel=1e-6)
    assert report.max_abs_diff == 1.0
    # From 0 to -1.0 are as many float32 numbers as the bits of 1.0 say.
    assert report.max_ulp == 0x3F800000
    rows = {row.low: row for row in report.deciles if row.num_tokens}
    assert [*rows] == [0.0, 0.5, 0.9]
    assert (rows[0.0].num_tokens, rows[0.0].num_nonzero) == (2, 2)
    assert rows[0.0].mean_abs_diff == pytest.approx(0.375, rel=1e-6)
    assert rows[0.0].max_abs_diff == pytest.approx(0.5, rel=1e-6)
    assert rows[0.5][2:] == (1, 0, 0.0, 0.0)
    assert rows[0.9][2:] == (1, 1, 1.0, 1.0)
    assert report.deciles[3][2:] == (0, 0, None, None)


def test_differences_are_those_of_float64() -> None:
    report = audit_logprobs(tensors([-1.0]), tensors([-1e-9]))
    assert report.max_abs_diff == 1.0 - torch.tensor(1e-9).double().item()
    assert report.max_abs_diff != 1.0


@pytest.mark.parametrize("in_one_sample", [True, False])
def test_the_mean_comes_from_the_exact_sum_in_any_order(in_one_sample) -> None:
    # A float64 near 2**60 moves in steps of 256: adding 100 to it changes nothing, adding 300 does.
    differences = [2.0**60, 100.0, 100.0, 100.0]
    for values in (differences, differences[::-1]):
        train, rollout = torch.tensor([-1.0 - x for x in values], dtype=torch.float64), torch.full((4,), -1.0).double()
        if in_one_sample:
            report = audit_logprobs([train], [rollout])
        else:
            report = audit_logprobs([*train.clone().split(1)], [*rollout.split(1)])
        assert report.mean_abs_diff == (2.0**60 + 256.0) / 4
        assert report.deciles[3].mean_abs_diff == report.mean_abs_diff


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), offset=st.sampled_from([0.0, 1e-3, 1.0, 1e4]))
def test_the_decile_table_sums_to_the_totals(seed, offset) -> None:
    train = log_probs(17, 1, 30, seed=seed)
    # Log-probs above 0 too, by mistake.
    rollout = [torch.where(torch.rand(x.shape) < 0.5, x, x + offset) for x in train]
    masks = [(torch.arange(len(x)) % 3 != 1).int() for x in train]
    report = audit_logprobs(train, rollout, masks=masks)
    rows = report.deciles
    assert len(rows) == 10
    assert sum(row.num_tokens for row in rows) == report.num_active_tokens
    assert sum(row.num_nonzero for row in rows) == report.num_nonzero
    total = math.fsum(row.mean_abs_diff * row.num_tokens for row in rows if row.num_tokens)
    assert total == pytest.approx(report.mean_abs_diff * report.num_active_tokens, rel=1e-12)
    assert max(row.max_abs_diff for row in rows if row.num_tokens) == report.max_abs_diff


# --- what never passes

GOOD = [-0.5, -1.0, -2.0]


def shared() -> dict:
    both = tensors(GOOD)
    return {"train": both, "rollout": both}


INVALID = {
    "no train list": ({"train": None}, "train log-probs are missing", None, None),
    "no rollout list": ({"rollout": None}, "rollout log-probs are missing", None, None),
    "no lists": ({"train": None, "rollout": None}, "train and rollout log-probs are missing", None, None),
    "empty lists": ({"train": [], "rollout": [], "masks": None}, "no active token", None, None),
    "missing rollout sample": ({"rollout": [None]}, "rollout log-probs are missing", 0, None),
    "missing train sample": ({"train": [None]}, "train log-probs are missing", 0, None),
    "fewer samples": ({"rollout": []}, "different lengths: 1 of train_log_probs, 0 of rollout_log_probs", None, None),
    "fewer masks": ({"masks": []}, "0 of masks", None, None),
    "fewer ids": ({"train_token_ids": []}, "0 of train_token_ids", None, None),
    "shorter sample": ({"rollout": tensors(GOOD[:2])}, "3 train and 2 rollout log-probs", 0, None),
    "shorter mask": ({"masks": tensors([1.0])}, r"3 log-probs, but mask values of shape \[1\]", 0, None),
    "mask with two dimensions": ({"masks": [torch.ones(3, 3)]}, r"mask values of shape \[3, 3\]", 0, None),
    "longer mask": ({"masks": tensors([1.0] * 4)}, r"of shape \[4\] \(a part of a response", 0, None),
    "shorter ids": (
        {"rollout_token_ids": [torch.tensor([1, 2])]},
        r"3 log-probs, but rollout token ids of shape \[2\]",
        0,
        None,
    ),
    "train nan": ({"train": tensors([-0.5, NAN, -2.0])}, "the train log-prob is nan", 0, 1),
    "rollout nan": ({"rollout": tensors([-0.5, -1.0, NAN])}, "the rollout log-prob is nan", 0, 2),
    "both nan": ({"train": tensors([NAN] * 3), "rollout": tensors([NAN] * 3)}, "train log-prob is nan", 0, 0),
    "infinity": ({"rollout": tensors([-INF, -1.0, -2.0])}, "the rollout log-prob is -inf", 0, 0),
    "both infinite": ({"train": tensors([-INF] * 3), "rollout": tensors([-INF] * 3)}, "is -inf", 0, 0),
    "integers": ({"train": [torch.tensor([-1, -1, -2])]}, "train log-probs are torch.int64", 0, None),
    "not a tensor": ({"rollout": [GOOD]}, "rollout log-probs are a list", 0, None),
    "two dimensions": ({"train": [torch.zeros(1, 3)]}, r"shape \[1, 3\]", 0, None),
    "masked out": ({"masks": tensors([0.0] * 3)}, "no active token", None, None),
    "no tokens": ({"train": [torch.zeros(0)], "rollout": [torch.zeros(0)], "masks": None}, "no active", None, None),
    "same memory": (shared(), "same memory", 0, None),
    "other ids": (
        {"train_token_ids": [torch.tensor([7, 8, 9])], "rollout_token_ids": [torch.tensor([7, 5, 9])]},
        "the token id is 8 in training and 5 in the rollout",
        0,
        1,
    ),
    "fractional train ids": (
        {"train_token_ids": [torch.tensor([7.0, 8.5, 9.0])], "rollout_token_ids": [torch.tensor([7, 8, 9])]},
        "the train token id is 8.5, no whole number",
        0,
        1,
    ),
    "fractional ids on both sides": (
        {"train_token_ids": [[7, 8.25, 9]], "rollout_token_ids": [[7, 8.75, 9]]},
        "token id is 8.25, no whole number",
        0,
        1,
    ),
    "fractional rollout ids alone": ({"rollout_token_ids": [[7, 8, NAN]]}, "rollout token id is nan", 0, 2),
    "one version for all samples": (
        {"rollout_weight_versions": 3},
        "rollout_weight_versions must be a list with an entry per sample: TypeError: 'int' object",
        None,
        None,
    ),
    "a mapping of versions": (
        {"rollout_weight_versions": {"version": 3}},
        "rollout_weight_versions must be a list with an entry per sample: TypeError: it is a dict",
        None,
        None,
    ),
    "a number of masks": ({"masks": 3}, "masks must be a list with an entry per sample", None, None),
    "a name": ({"names": "a"}, "names must be a list with an entry per sample", None, None),
    "other ids under the mask": (
        {
            "train_token_ids": [torch.tensor([7, 8, 9])],
            "rollout_token_ids": [torch.tensor([6, 8, 9])],
            "masks": tensors([0.0, 1.0, 1.0]),
        },
        "the token id is 7 in training and 6 in the rollout",
        0,
        0,
    ),
}


@pytest.mark.parametrize(("change", "reason", "sample", "position"), INVALID.values(), ids=INVALID)
def test_what_cannot_be_compared_is_invalid_and_says_why_and_where(change, reason, sample, position) -> None:
    inputs = {"train": tensors(GOOD), "rollout": tensors(GOOD), "masks": tensors([1.0] * 3)} | change
    report = audit_logprobs(inputs.pop("train"), inputs.pop("rollout"), **inputs)
    assert report.verdict is Verdict.INVALID
    assert not report.passed
    assert len(report.problems) == 1
    problem = report.problems[0]
    assert (problem.sample, problem.position) == (sample, position)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(str(problem))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"train_token_ids": [[1, 2, None]], "rollout_token_ids": [[1, 2, 3]]}, "RuntimeError"),
        ({"masks": [[1, 0, None]]}, "RuntimeError"),
        ({"train": [torch.tensor(GOOD, device="meta")]}, "NotImplementedError"),
        ({"train": [torch.full([3], -1.7e308, dtype=torch.float64)]}, "OverflowError"),
    ],
)
def test_what_cannot_even_be_read_is_invalid_and_no_exception(change, kind) -> None:
    inputs = {"train": tensors(GOOD, GOOD), "rollout": tensors(GOOD, GOOD), "masks": [None, None]}
    inputs |= {key: [inputs.get(key, [None])[0], *column] for key, column in change.items()}
    report = audit_logprobs(inputs.pop("train"), inputs.pop("rollout"), **inputs, names=["a", "b"])
    (problem,) = report.problems
    assert (problem.sample, problem.name) == (1, "b")
    assert f"not comparable: {kind}" in problem.reason


def test_rows_of_a_padded_tensor_and_versions_and_ids_of_any_integer_type_are_taken() -> None:
    train = torch.tensor([GOOD, GOOD])
    report = audit_logprobs(
        train,
        train.clone(),
        masks=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        train_token_ids=[torch.tensor([1, 2, 3], dtype=torch.uint16)] * 2,
        rollout_token_ids=torch.tensor([[1, 2, 3]] * 2),
        train_weight_version=np.int64(3),
    )
    assert report.verdict is Verdict.EXACT
    assert (report.num_active_tokens, report.train_weight_versions) == (5, ("3",))


def test_one_bad_sample_among_good_ones_is_invalid_and_the_numbers_are_those_of_the_rest() -> None:
    train, rollout = tensors(GOOD, GOOD, GOOD), tensors(GOOD, [-0.5, NAN, -2.0], [-0.5, -1.0, -2.5])
    report = audit_logprobs(
        train, rollout, names=["a", "b", "c"], train_weight_version=2, rollout_weight_versions=[2, 2, 1]
    )
    assert report.verdict is Verdict.INVALID
    assert (report.num_samples, report.num_active_tokens, report.num_nonzero) == (3, 6, 1)
    assert str(report.problems[0]) == "sample 1 (b), position 1: the rollout log-prob is nan"
    assert report.first_divergence[:2] == (2, 2)
    assert report.hint is None
    assert not report.equal_after_bf16_rounding


def test_a_side_with_two_dtypes_is_invalid_unless_the_odd_sample_has_no_active_token() -> None:
    train = [*tensors(GOOD), torch.tensor(GOOD).bfloat16()]
    rollout = tensors(GOOD, GOOD)
    assert "train log-probs of some samples are bfloat16 and of others float32" in str(
        audit_logprobs(train, rollout).problems[0]
    )
    assert "rollout log-probs of some" in str(audit_logprobs(rollout, train).problems[0])
    assert audit_logprobs(train, rollout, masks=tensors([1.0] * 3, [0.0] * 3)).passed


def test_what_lies_under_the_mask_and_samples_without_active_tokens_are_ignored() -> None:
    train = tensors([NAN, -1.0, 5.0], [INF], [])
    rollout = tensors([-3.0, -1.0, NAN], [-9999.0], [])
    report = audit_logprobs(train, rollout, masks=tensors([0.0, 2.0, 0.0], [0.0], []))
    assert report.verdict is Verdict.EXACT
    assert (report.num_samples, report.num_active_tokens) == (3, 1)
    # The mask of one sample may be left out: all its tokens are active.
    report = audit_logprobs(train, rollout, masks=[torch.tensor([0, 1, 0]), None, None])
    assert report.problems[0][1:3] == (1, 0)


def test_a_verdict_does_not_depend_on_how_the_processor_treats_the_smallest_numbers() -> None:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        report = audit_logprobs([smallest], [torch.zeros(1)])
    finally:
        torch.set_flush_denormal(False)
    assert (report.verdict, report.max_ulp, report.num_nonzero) == (Verdict.DIFFERENT, 1, 1)
    assert report.first_divergence.ulps == 1


def test_two_views_of_one_storage_are_two_streams() -> None:
    packed = torch.tensor(GOOD + GOOD)
    assert audit_logprobs([packed[:3]], [packed[3:]]).verdict is Verdict.EXACT


def test_log_probs_that_require_a_gradient_and_strided_ones_can_be_audited() -> None:
    pairs = torch.tensor([GOOD, GOOD]).t()
    assert audit_logprobs([pairs[:, 0].clone().requires_grad_()], [pairs[:, 1]]).verdict is Verdict.EXACT


@settings(max_examples=40, deadline=None)
@given(data=st.data(), length=st.integers(1, 9), fraction=st.floats(2**-8, 1 - 2**-8))
def test_ids_that_are_whole_numbers_in_another_type_are_equal_and_fractions_never(data, length, fraction) -> None:
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 2**15), min_size=length, max_size=length)))
    position = data.draw(st.integers(0, length - 1))
    train = log_probs(length)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.int32]))
    same = audit_logprobs(train, copies(train), train_token_ids=[ids.to(dtype)], rollout_token_ids=[ids])
    assert same.verdict is Verdict.EXACT
    broken = ids.double()
    broken[position] += fraction
    for sides in ((broken, ids), (ids, broken), (broken, broken), (None, broken), (broken, None)):
        given_ids = {key: None if x is None else [x] for key, x in zip(("train", "rollout"), sides, strict=True)}
        columns = {f"{key}_token_ids": column for key, column in given_ids.items()}
        report = audit_logprobs(train, copies(train), **columns)
        assert (report.verdict, report.problems[0].position) == (Verdict.INVALID, position)


@pytest.mark.parametrize("is_equal", [True, False])
def test_log_probs_above_zero_are_a_caution_of_any_verdict(is_equal) -> None:
    train = tensors([-1.1, 0.5, -2.1], [0.25, 3.0])
    rollout = copies(train) if is_equal else tensors([-1.1, 0.5, -2.5], [0.25, -3.0])
    report = audit_logprobs(train, rollout, masks=tensors([1.0] * 3, [1.0, 1.0]), evidence=SHOWN)
    assert report.passed == is_equal
    assert report.cautions == ("3 tokens have a log-prob above 0, 3 the largest: these are no log-probs",)
    masked = audit_logprobs(train, rollout, masks=tensors([1.0, 0.0, 1.0], [0.0, 0.0]), evidence=SHOWN)
    assert masked.cautions == ()


# --- a copy


@pytest.mark.parametrize("change", [lambda x: x.clone(), lambda x: torch.where(x == 0.0, 0.0, x)])
def test_a_copy_without_a_word_of_where_it_came_from_is_unproved(change) -> None:
    train = [torch.tensor([-0.0, -1.0, -2.0]), *log_probs(5)]
    report = module.audit_logprobs(train, [change(x) for x in train])
    assert (report.verdict, report.passed, report.num_nonzero) == (Verdict.UNPROVED, False, 0)
    assert "nothing says that the rollout log-probs come from the engine" in report.cautions[0]
    assert "nothing shows that the trainer computed its log-probs" in report.cautions[1]
    assert "UNPROVED" in str(report)
    other = [x - 1e-3 for x in train]
    assert module.audit_logprobs(train, other).verdict is Verdict.DIFFERENT
    assert module.audit_logprobs(train, train).verdict is Verdict.INVALID


@pytest.mark.parametrize("provenance", ["unknown", "decode"])
@pytest.mark.parametrize("evidence", [Evidence(), Evidence(rollout="a"), Evidence(train="b"), Evidence("a", "b")])
def test_a_caution_remains_for_each_stream_of_which_nothing_shows_the_source(provenance, evidence) -> None:
    train = log_probs(5)
    report = audit_logprobs(train, copies(train), provenance=provenance, evidence=evidence)
    unproved = provenance == "unknown" and evidence == Evidence()
    assert report.verdict is (Verdict.UNPROVED if unproved else Verdict.EXACT)
    assert len(report.cautions) == evidence.count(None)
    assert [name for name, _ in report.rows()].count("evidence, rollout") == (evidence.rollout is not None)
    assert report.to_dict()["evidence"] == {"rollout": evidence.rollout, "train": evidence.train}


def test_samples_that_were_filled_in_among_others_that_differ_are_seen() -> None:
    train = log_probs(*[30] * 6)
    rollout = tied_to(train, noise=1e-3)
    assert audit_logprobs(train, rollout).cautions == ()
    rollout[2], rollout[4] = train[2].clone(), train[4].clone()
    (caution,) = audit_logprobs(train, rollout).cautions
    assert "2 of 6 samples are equal on every token, while in the others 99% of the tokens differ" in caution
    assert "may have been filled in" in caution
    versions = [1 if sample in (2, 4) else 0 for sample in range(6)]
    assert audit_logprobs(train, rollout, train_weight_version=1, rollout_weight_versions=versions).cautions == ()
    # A forgotten sync makes all samples stale: it does not explain that some are equal.
    (caution,) = audit_logprobs(train, rollout, train_weight_version=1, rollout_weight_versions=[0] * 6).cautions
    assert "may have been filled in" in caution
    # One different token somewhere makes the others no copies; a short sample can be equal by chance.
    few = copies(train)
    few[0][3] -= 1e-3
    assert audit_logprobs(train, few).cautions == ()
    short = log_probs(30, 30, 2)
    assert audit_logprobs(short, [*tied_to(short[:2], noise=1e-3), short[2].clone()]).cautions == ()


def test_an_unknown_provenance_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"decode \| prefill \| unknown, got 'decoding'"):
        audit_logprobs(tensors(GOOD), tensors(GOOD), provenance="decoding")


# --- causes


def tied_to(train: list[torch.Tensor], *, noise: float, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [x + noise * torch.randn(x.shape, generator=generator) for x in train]


def test_versions_that_differ_on_the_samples_that_differ_point_to_stale_weights() -> None:
    train = log_probs(40, 40)
    rollout = [train[0].clone(), *tied_to(train[1:], noise=1e-3)]
    stale = audit_logprobs(train, rollout, train_weight_version=3, rollout_weight_versions=["3", ["3", 2]])
    assert "likely stale weights: 40 of 40 different tokens" in stale.hint
    assert (stale.train_weight_versions, stale.rollout_weight_versions) == (("3",), ("2", "3"))
    # The sample with the old weights is the one that is equal: they are not the cause.
    other = audit_logprobs(train, rollout, train_weight_version=3, rollout_weight_versions=[2, 3])
    assert "stale" not in other.hint
    same = audit_logprobs(train, rollout, train_weight_version=["3", None], rollout_weight_versions=[3, 9])
    assert "stale" not in same.hint
    assert "stale" not in audit_logprobs(train, rollout, rollout_weight_versions=[2, 3]).hint


def test_versions_are_listed_in_the_order_of_numbers() -> None:
    train = log_probs(1, 1, 1)
    report = audit_logprobs(train, copies(train), rollout_weight_versions=[10, 9, None])
    assert report.rollout_weight_versions == ("9", "10")


@pytest.mark.parametrize(("noise", "is_stale"), [(5.5, True), (0.5, True), (0.1, False), (0.02, False)])
def test_without_versions_a_difference_beyond_all_kernels_points_to_stale_weights(noise, is_stale) -> None:
    train = log_probs(200, 200)
    hint = audit_logprobs(train, tied_to(train, noise=noise)).hint
    assert ("stale weights" in (hint or "")) == is_stale
    known = audit_logprobs(train, tied_to(train, noise=5.5), train_weight_version=1, rollout_weight_versions=[1, 1])
    assert "stale weights" in known.hint
    assert "although the weight versions agree" in known.hint


def test_a_difference_between_kernels_and_stale_weights_gets_no_hint() -> None:
    train = log_probs(200)
    rollout = tied_to(train, noise=0.2)
    assert audit_logprobs(train, rollout).hint is None
    rollout[0][0] = -9.0
    assert audit_logprobs(train, rollout).hint is None


@pytest.mark.parametrize("by", [1, -1])
def test_log_probs_moved_by_a_token_are_called_misaligned(by) -> None:
    train = log_probs(60, 60)
    report = audit_logprobs(train, [x.roll(by) for x in train])
    assert "likely misaligned by one token" in report.hint
    unrelated = audit_logprobs(train, log_probs(60, 60, seed=5))
    assert "misaligned" not in unrelated.hint
    # The same shift over too few pairs, and pairs across masked tokens do not count.
    every_other = [torch.arange(60) % 2 for _ in train]
    assert "misaligned" not in audit_logprobs(train, [x.roll(by) for x in train], masks=every_other).hint
    assert "misaligned" not in audit_logprobs(log_probs(30), [x.roll(by) for x in log_probs(30)]).hint


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_stop_tokens_without_a_log_prob_are_called_placeholders(value) -> None:
    train = log_probs(*[200] * 8)
    rollout = copies(train)
    for x, y in zip(train, rollout, strict=True):
        x[-1], y[-1] = -2.5 - x[0], value
    assert f"the 8 rollout log-probs that differ are all {value:g}" in audit_logprobs(train, rollout).hint
    assert f"the 8 train log-probs that differ are all {value:g}" in audit_logprobs(rollout, train).hint
    # Two values, too few tokens, and differences that kernels explain.
    rollout[0][-1] = -0.25
    assert "placeholder" not in audit_logprobs(train, rollout).hint
    rollout[0][-1] = train[0][-1]
    assert "placeholder" not in audit_logprobs(train, rollout).hint
    near = [torch.full_like(x, value) for x in train]
    noisy = tied_to(near, noise=1e-2)
    noisy[0][0] = near[0][0] = -3.0
    assert "placeholder" not in (audit_logprobs(noisy, near).hint or "")


def test_one_token_far_apart_is_not_called_rounding() -> None:
    train = log_probs(*[200] * 8)
    rollout = copies(train)
    rollout[3][5] -= 9.0
    hint = audit_logprobs(train, rollout).hint
    assert "likely single tokens" in hint
    assert "1 of 1600 tokens differ, one by 9 nats" in hint
    rollout[3][5] += 8.5
    assert "likely other kernels" in audit_logprobs(train, rollout).hint


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_constant_stream_is_called_a_placeholder(value) -> None:
    train = log_probs(20, 20)
    constant = [torch.full_like(x, value) for x in train]
    assert f"all 40 rollout log-probs are {value:g}" in audit_logprobs(train, constant).hint
    assert "all 40 train log-probs" in audit_logprobs(constant, train).hint
    assert "placeholder" not in audit_logprobs(train[:1], tensors([-1.0] * 19 + [-2.0])).hint
    assert "placeholder" not in audit_logprobs(tensors(GOOD), tensors([value] * 3)).hint
    both = audit_logprobs(constant, copies(constant))
    assert both.passed
    assert any("all 40 rollout log-probs" in caution for caution in both.cautions)


def test_bf16_on_one_side_only_is_seen_whatever_dtype_it_is_stored_in() -> None:
    train = log_probs(100)
    rounded = [x.bfloat16() for x in train]
    for rollout in (rounded, [x.float() for x in rounded]):
        report = audit_logprobs(train, rollout)
        assert report.verdict is Verdict.DIFFERENT
        assert "likely log-probs in bfloat16 on one side: every rollout log-prob" in report.hint
        assert "all tokens are equal once both sides are rounded" in report.hint
        assert report.equal_after_bf16_rounding
    assert "every train log-prob" in audit_logprobs(rounded, train).hint
    noisy = audit_logprobs([x.bfloat16() for x in tied_to(train, noise=0.02)], train)
    assert "every train log-prob" in noisy.hint
    assert "tokens differ even" in noisy.hint
    assert audit_logprobs([train[0][:20]], [rounded[0][:20]]).hint is None
    both = audit_logprobs(rounded, [x.bfloat16() for x in tied_to(train, noise=0.02)])
    assert "bfloat16 on one side" not in both.hint
    neither = audit_logprobs(train, tied_to(train, noise=1e-4))
    assert "bfloat16 on one side" not in neither.hint


def scored(num_tokens: int = 400, vocabulary: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output weights and sampled tokens of a made-up model."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 128, generator=generator)
    weight = torch.randn(vocabulary, 128, generator=generator) * 3.0 / 128**0.5
    tokens = torch.multinomial((hidden @ weight.t()).softmax(-1), 1, generator=generator)
    return hidden, weight, tokens


def test_another_formula_of_the_same_log_prob_is_told_from_another_kernel() -> None:
    hidden, weight, tokens = scored()
    logits = hidden @ weight.t()
    train = logits.log_softmax(-1).gather(1, tokens).squeeze(1)
    formula = logits.softmax(-1).gather(1, tokens).squeeze(1).log()
    assert "likely another log-prob formula" in audit_logprobs([train], [formula]).hint
    halves = hidden[:, :64] @ weight[:, :64].t() + hidden[:, 64:] @ weight[:, 64:].t()
    split_k = halves.log_softmax(-1).gather(1, tokens).squeeze(1)
    assert "likely other kernels" in audit_logprobs([train], [split_k]).hint
    low = (hidden.bfloat16() @ weight.bfloat16().t()).float().log_softmax(-1).gather(1, tokens).squeeze(1)
    assert "likely other kernels" in audit_logprobs([train], [low]).hint
    few = audit_logprobs([train[:20]], [formula[:20]])
    assert few.verdict is Verdict.DIFFERENT
    assert few.hint is None


def test_first_tokens_equal_and_later_ones_different_points_to_decoding() -> None:
    train = log_probs(*[20] * 8)
    rollout = tied_to(train, noise=1e-3)
    assert "decode" not in audit_logprobs(train, rollout).hint
    for x, y in zip(train, rollout, strict=True):
        y[0] = x[0]
    report = audit_logprobs(train, rollout)
    assert "likely decode or prefix dependence" in report.hint
    # All 152 later ones differ: 152 of 153, with the one that keeps few tokens from making a certainty.
    assert "first tokens of 8 responses are all equal, later ones differ in 99%" in report.hint
    # One response proves nothing, nor do first tokens that are masked, or certain on both sides.
    assert audit_logprobs(train[:1], rollout[:1]).hint is None
    second = [torch.cat([y[:1], x[1:2], y[2:]]) for x, y in zip(train, rollout, strict=True)]
    masks = [torch.arange(20) > 0 for _ in train]
    assert "decode" not in audit_logprobs(train, second, masks=masks).hint
    for x, y in zip(train, rollout, strict=True):
        x[0] = y[0] = -1e-5
    assert "decode" not in audit_logprobs(train, rollout).hint


def test_first_tokens_that_are_equal_by_chance_do_not_point_to_decoding() -> None:
    train = log_probs(*[20] * 8)
    rollout = tied_to(train, noise=1e-3)
    for x, y in zip(train, rollout, strict=True):
        y[:11] = x[:11]
    # Half of the later tokens differ: eight equal first tokens have a chance of 1 in 256.
    assert "decode" not in audit_logprobs(train, rollout).hint


def test_cautions_say_what_a_pass_does_not_show() -> None:
    train = log_probs(10)
    plain = audit_logprobs(train, copies(train), evidence=SHOWN)
    assert plain.cautions == ()
    assert plain.hint is None
    assert "scoring the finished text again" in audit_logprobs(train, copies(train), provenance="prefill").cautions[0]
    low = [x.bfloat16() for x in train]
    assert "bfloat16 numbers only" in audit_logprobs(low, copies(low), evidence=SHOWN).cautions[0]
    moved = [x - 1 for x in low]
    assert audit_logprobs(low, moved, train_weight_version=2, rollout_weight_versions=[1]).cautions == ()
    stale = audit_logprobs(train, copies(train), train_weight_version=2, rollout_weight_versions=[1], evidence=SHOWN)
    assert stale.verdict is Verdict.EXACT
    assert "weight versions differ" in stale.cautions[0]


# --- the report


def test_the_report_survives_json_and_its_text_has_every_number() -> None:
    train = log_probs(30)
    rollout = tied_to(train, noise=1e-2)
    report = audit_logprobs(
        train, rollout, train_token_ids=[torch.arange(30)], provenance="prefill", rollout_weight_versions=[4]
    )
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["verdict"] == "DIFFERENT"
    assert loaded["passed"] is False
    assert loaded["mean_abs_diff"] == report.mean_abs_diff
    assert loaded["deciles"][2]["num_tokens"] == report.deciles[2].num_tokens
    assert loaded["first_divergence"]["train"] == train[0][0].item()
    text = str(report)
    assert text == report.summary()
    for part in ("DIFFERENT", f"{report.mean_abs_diff:.3g}", f"{report.max_ulp}", "prefill", "rollout 4", "0.9 - 1.0"):
        assert part in text
    assert "sample 0, position 0: token 0: train " in text


def test_a_long_list_of_problems_is_cut_in_the_text_only() -> None:
    report = audit_logprobs(tensors(*[[NAN]] * 20), tensors(*[[-1.0]] * 20))
    assert len(report.problems) == 20
    assert "and 12 more" in str(report)
    assert len(report.to_dict()["problems"]) == 20


# --- any number of ranks

SPREADS = {1: [6], 2: [4, 2], 4: [1, 0, 3, 2]}


def cases() -> dict[str, tuple[list, list, dict]]:
    train = log_probs(30, 20, 1, 40, 8, 25)
    noisy = tied_to(train, noise=1e-2)
    masks = [(torch.arange(len(x)) % 4 != 0).int() for x in train]
    masks[2][:] = 0
    broken = copies(noisy)
    broken[4][3] = NAN
    late = copies(train)
    late[5][7] = next_number(late[5])[7]
    return {
        "exact": (train, copies(train), {}),
        "one ulp": (train, late, {"train_token_ids": [torch.arange(len(x)) for x in train]}),
        "noisy": (train, noisy, {"masks": masks}),
        "broken": (train, broken, {"masks": masks}),
        "missing": (train, [*noisy[:5], None], {}),
        "no token": (train, noisy, {"masks": [torch.zeros(len(x)) for x in train]}),
        "stale": (train, noisy, {"train_weight_version": [2] * 6, "rollout_weight_versions": [1, 2, 1, 1, 2, 1]}),
        "two dtypes": ([*train[:3], *(x.double() for x in train[3:])], noisy, {}),
    }


def of_rank(column: list | None, spread: list[int], rank: int) -> list | None:
    start = sum(spread[:rank])
    return None if column is None else column[start : start + spread[rank]]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in SPREADS}
    out = {}
    for size, spread in SPREADS.items():
        if rank >= size:
            continue
        for name, (train, rollout, columns) in cases().items():
            report = audit_logprobs(
                of_rank(train, spread, rank),
                of_rank(rollout, spread, rank),
                **{key: of_rank(column, spread, rank) for key, column in columns.items()},
                group=groups[size],
            )
            out[f"{size} {name}"] = report.to_dict()
    # A rank without its lists does not leave the others waiting.
    broken = None if rank == 2 else log_probs(3)
    out["4 no list"] = audit_logprobs(broken, log_probs(3), group=groups[4]).to_dict()
    broken_ids = {"train_token_ids": [[1, 2, None if rank == 1 else 3]], "rollout_token_ids": [[1, 2, 3]]}
    out["4 broken ids"] = audit_logprobs(log_probs(3), log_probs(3), **broken_ids, group=groups[4]).to_dict()
    for name, column in {
        "4 versions": {"rollout_weight_versions": 5 if rank == 1 else [5]},
        "4 names": {"names": [lambda: None] if rank == 1 else ["a"]},
        "4 evidence": {"evidence": SHOWN if rank else Evidence(rollout="a record")},
    }.items():
        rollout = [x - 1.0 if name == "4 names" else x for x in log_probs(3)]
        out[name] = audit_logprobs(log_probs(3), rollout, **column, group=groups[4]).to_dict()
    try:
        audit_logprobs(log_probs(3), log_probs(3), provenance="wrong" if rank == 3 else "decode", group=groups[4])
    except ValueError as error:
        out["4 wrong provenance"] = str(error)
    said = "decode" if rank == 0 else "prefill"
    out["4 provenances"] = audit_logprobs(log_probs(3), log_probs(3), provenance=said, group=groups[4]).to_dict()
    Path(folder, f"{rank}.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_every_rank_gets_the_report_of_one_process_for_any_number_of_ranks(tmp_path) -> None:
    # One process imports torch and forks the four: their imports would take longer than all of the tests.
    multiprocessing.set_forkserver_preload(["mis_ext.onpolicy.audit.log_probs", "torch.distributed", __name__])
    mp.start_processes(work, args=(str(tmp_path),), nprocs=4, start_method="forkserver")
    found = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(4)]
    for name, (train, rollout, columns) in cases().items():
        expected = json.loads(json.dumps(audit_logprobs(train, rollout, **columns).to_dict()))
        for size in SPREADS:
            for rank in range(size):
                assert found[rank][f"{size} {name}"] == expected, (size, rank, name)
    assert [report["4 no list"]["verdict"] for report in found] == ["INVALID"] * 4
    assert found[0]["4 no list"] == found[3]["4 no list"]
    for name, problem in (("4 broken ids", "not comparable"), ("4 provenances", "provenance of their log-probs")):
        assert [report[name] for report in found] == [found[0][name]] * 4
        assert problem in found[0][name]["problems"][0]["reason"]
    for report in found:
        assert "rollout_weight_versions must be a list" in report["4 versions"]["problems"][0]["reason"]
        assert (report["4 names"]["verdict"], report["4 names"]["num_nonzero"]) == ("DIFFERENT", 12)
        assert report["4 evidence"]["evidence"] == {"rollout": "a record", "train": None}
        assert "provenance on rank 3 must be one of decode | prefill | unknown" in report["4 wrong provenance"]
    verdicts = [audit_logprobs(train, rollout, **columns).verdict.value for train, rollout, columns in cases().values()]
    assert set(verdicts) == {"EXACT", "DIFFERENT", "INVALID"}


def test_a_group_that_cannot_carry_a_report_is_refused() -> None:
    class FaultTolerant:
        _replica_id = 0

    with pytest.raises(TypeError, match="got a FaultTolerant"):
        audit_logprobs(tensors(GOOD), tensors(GOOD), group=FaultTolerant())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_report_does_not_depend_on_the_device_of_any_tensor() -> None:
    train = log_probs(30, 20)
    rollout = tied_to(train, noise=1e-3)
    columns = {
        "masks": [torch.arange(len(x)) % 3 for x in train],
        "train_token_ids": [torch.arange(len(x)) for x in train],
        "rollout_token_ids": [torch.arange(len(x)) for x in train],
    }
    expected = audit_logprobs(train, rollout, **columns)
    on_device = {key: [x.cuda() for x in column] for key, column in columns.items()}
    assert audit_logprobs([x.cuda() for x in train], [x.cuda() for x in rollout], **on_device) == expected
    assert audit_logprobs([x.cuda() for x in train], rollout, **columns) == expected
