# SPDX-License-Identifier: Apache-2.0
"""The exactness audit: what never passes, and what is only a copy."""

import numpy as np
import pytest
import torch
from audit_lists import GOOD, INF, NAN, audit_logprobs, copies, log_probs, tensors

from mis_ext.onpolicy.audit.audit_report import Verdict


def shared() -> dict:
    both = tensors(GOOD)
    return {"train": both, "rollout": both}


INVALID = {
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
    "fractional ids": (
        {"train_token_ids": [torch.tensor([7.0, 8.5, 9.0])], "rollout_token_ids": [torch.tensor([7, 8, 9])]},
        "the token id is 8.5 in training and 8 in",
        0,
        1,
    ),
    "another record of the engine": (
        {"engine_records": tensors([-0.5, -1.5, -2.0])},
        "the rollout log-prob is -1.0, and -1.5 in the engine's record",
        0,
        1,
    ),
    "a shorter record": ({"engine_records": tensors(GOOD[:2])}, "3 rollout log-probs, but 2 in the engine", 0, None),
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
    ],
)
def test_what_cannot_even_be_read_is_invalid_and_no_exception(change, kind) -> None:
    inputs = {"train": tensors(GOOD, GOOD), "rollout": tensors(GOOD, GOOD), "masks": [None, None]}
    inputs |= {key: [inputs.get(key, [None])[0], *column] for key, column in change.items()}
    report = audit_logprobs(inputs.pop("train"), inputs.pop("rollout"), **inputs)
    (problem,) = report.problems
    assert problem.sample == 1
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
    assert report.num_active_tokens == 5


def test_one_bad_sample_among_good_ones_is_invalid_and_the_numbers_are_those_of_the_rest() -> None:
    train, rollout = tensors(GOOD, GOOD, GOOD), tensors(GOOD, [-0.5, NAN, -2.0], [-0.5, -1.0, -2.5])
    report = audit_logprobs(train, rollout, train_weight_version=2, rollout_weight_versions=[2, 2, 1])
    assert report.verdict is Verdict.INVALID
    assert (report.num_samples, report.num_active_tokens, report.num_nonzero) == (3, 6, 1)
    assert str(report.problems[0]) == "sample 1, position 1: the rollout log-prob is nan"
    assert report.first_divergence[:2] == (2, 2)
    assert report.hint is None


def test_each_sample_is_compared_in_its_own_dtypes() -> None:
    train = [*tensors(GOOD), torch.tensor(GOOD).bfloat16()]
    report = audit_logprobs(train, tensors(GOOD, GOOD))
    assert (report.verdict, report.train_dtype, report.rollout_dtype) == (Verdict.EXACT, "bfloat16, float32", "float32")
    assert audit_logprobs(train, tensors(GOOD, [-0.5, -1.0, -2.001])).first_divergence[:2] == (1, 2)


def test_what_lies_under_the_mask_and_samples_without_active_tokens_are_ignored() -> None:
    # The last one is the same memory on both sides.
    shared = tensors([-1.0])
    train = tensors([NAN, -1.0, 5.0], [INF], []) + shared
    rollout = tensors([-3.0, -1.0, NAN], [-9999.0], []) + shared
    report = audit_logprobs(train, rollout, masks=tensors([0.0, 2.0, 0.0], [0.0], [], [0.0]))
    assert report.verdict is Verdict.EXACT
    assert (report.num_samples, report.num_active_tokens) == (4, 1)
    # The mask of one sample may be left out: all its tokens are active.
    report = audit_logprobs(train, rollout, masks=[torch.tensor([0, 1, 0]), None, None, torch.zeros(1)])
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


@pytest.mark.parametrize("is_equal", [True, False])
def test_log_probs_above_zero_are_a_mistake_under_any_verdict(is_equal) -> None:
    train = tensors([-1.1, 0.5, -2.1, -0.3, -0.7], [0.25, 3.0, -1.0])
    rollout = copies(train) if is_equal else tensors([-1.1, 0.5, -2.5, -0.3, -0.7], [0.25, -3.0, -1.0])
    report = audit_logprobs(train, rollout)
    assert report.passed == is_equal
    (found,) = report.diagnoses
    assert (found.cause, found.is_fault) == ("not_log_probs", True)
    assert f"{2 + is_equal} of 8 behavior log-probs and 3 of 8 proximal log-probs" in found.evidence
    masks = tensors([1.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0])
    assert audit_logprobs(train, rollout, masks=masks).diagnoses == ()


def test_lists_of_another_type_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"masks: .*int"):
        audit_logprobs(tensors(GOOD), tensors(GOOD), masks=3)
    # Every iterable does.
    train, rollout = tensors(GOOD), iter(tensors(GOOD))
    assert audit_logprobs(iter(train), rollout, train_weight_version="3").num_samples == len(train)


def test_equal_streams_are_unproved_if_one_sample_lacks_its_record() -> None:
    train = log_probs(5, 5)
    report = audit_logprobs(train, copies(train), engine_records=[train[0], None])
    assert (report.verdict, report.passed, report.num_recorded) == (Verdict.UNPROVED, False, 1)
    assert "--engine-records" in str(report)
    assert "UNPROVED" in str(report)
    assert audit_logprobs(train, copies(train), engine_records=None).verdict is Verdict.UNPROVED
    assert audit_logprobs(train, [x - 1e-3 for x in train], engine_records=None).verdict is Verdict.DIFFERENT
    # The framework may have rounded what the engine returned.
    rounded = [x.bfloat16() for x in train]
    assert audit_logprobs(rounded, copies(rounded), engine_records=train).verdict is Verdict.EXACT
