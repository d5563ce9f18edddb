# SPDX-License-Identifier: Apache-2.0
"""The exactness audit: bits, numbers worked out by hand, and the report that shows them."""

import json

import pytest
import torch
from audit_lists import INTEGER, NAN, audit_logprobs, copies, log_probs, next_number, tensors, tied_to
from hypothesis import given
from hypothesis import strategies as st
from searching import searching

from mis_ext.onpolicy.audit.audit_report import Verdict

# --- bits


@searching(20)
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
    # Positions count masked tokens too.
    masks, ids = [torch.ones(5), torch.tensor([0, 1, 1, 1, 1]), torch.ones(5)], [torch.arange(5)] * 3
    first = audit_logprobs(train, rollout, masks=masks, train_token_ids=ids).first_divergence
    assert (first.sample, first.position, first.token_id) == (1, 2, 2)
    assert (first.train, first.rollout) == (train[1][2].item(), rollout[1][2].item())


@pytest.mark.parametrize("dtype", list(INTEGER))
def test_both_zeros_are_the_same_number(dtype) -> None:
    train = torch.tensor([-0.0, -1.0, 0.0], dtype=dtype)
    report = audit_logprobs([train], [torch.tensor([0.0, -1.0, 0.0], dtype=dtype)])
    assert (report.verdict, report.num_nonzero, report.max_ulp) == (Verdict.EXACT, 0, 0)


def test_two_dtypes_are_compared_as_the_numbers_they_hold() -> None:
    exact = [torch.tensor([-0.5, -1.25]).bfloat16()]
    report = audit_logprobs([exact[0].float()], exact)
    assert report.verdict is Verdict.EXACT
    assert (report.train_dtype, report.rollout_dtype) == ("float32", "bfloat16")
    # The float32 neighbor of a bfloat16 number: bfloat16 on both sides would have hidden it.
    report = audit_logprobs([next_number(exact[0].float())], exact)
    assert (report.verdict, report.max_ulp) == (Verdict.DIFFERENT, 1)
    # Neither of float16 and bfloat16 holds the other's numbers.
    half = torch.tensor([-1.0 - 2**-10], dtype=torch.float16)
    assert audit_logprobs([half], [half.bfloat16()]).max_ulp == 2**13


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
    report = audit_logprobs(train, rollout, masks=masks)
    assert (report.num_samples, report.num_active_tokens, report.num_nonzero) == (2, 4, 3)
    assert report.mean_abs_diff == pytest.approx(1.75 / 4, rel=1e-6)
    assert report.max_abs_diff == 1.0
    # From 0 to -1.0 are as many float32 numbers as the bits of 1.0 say.
    assert report.max_ulp == 0x3F800000


def test_differences_are_those_of_float64() -> None:
    report = audit_logprobs(tensors([-1.0]), tensors([-1e-9]))
    assert report.max_abs_diff == 1.0 - torch.tensor(1e-9).double().item()
    assert report.max_abs_diff != 1.0


# --- the report


def test_the_report_survives_json_and_its_text_has_every_number() -> None:
    train = log_probs(30)
    rollout = tied_to(train, noise=1e-2)
    report = audit_logprobs(train, rollout, train_token_ids=[torch.arange(30)])
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (loaded["verdict"], loaded["passed"], loaded["mean_abs_diff"]) == ("DIFFERENT", False, report.mean_abs_diff)
    assert loaded["first_divergence"]["train"] == train[0][0].item()
    text = str(report)
    for part in ("DIFFERENT", f"{report.mean_abs_diff:.3g}", f"{report.max_ulp}", "1 of them", "(100 %)"):
        assert part in text
    assert "sample 0, position 0: token 0: train " in text


def test_a_long_list_of_problems_is_cut_in_the_text_only() -> None:
    report = audit_logprobs(tensors(*[[NAN]] * 20), tensors(*[[-1.0]] * 20))
    assert len(report.problems) == 20
    assert "and 12 more" in str(report)
    assert len(report.to_dict()["problems"]) == 20


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
