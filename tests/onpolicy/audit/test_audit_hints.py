# SPDX-License-Identifier: Apache-2.0
"""The exactness audit: what a difference points to."""

import math

import pytest
import torch
from audit_lists import audit_logprobs, log_probs, tied_to


def test_versions_that_differ_on_the_samples_that_differ_point_to_stale_weights() -> None:
    train = log_probs(40, 40)
    rollout = [train[0].clone(), *tied_to(train[1:], noise=1e-3)]
    stale = audit_logprobs(train, rollout, train_weight_version=3, rollout_weight_versions=["3", ["3", 2]])
    assert [(found.cause, found.confidence) for found in stale.diagnoses] == [("stale_weights", "likely")]
    assert "50% of the tokens were sampled with other weights than the trainer's; k3 by version: fresh 0" in stale.hint
    # The sample with stale weights is the one that is equal: they are not the cause.
    other = audit_logprobs(train, rollout, train_weight_version=3, rollout_weight_versions=[2, 3])
    assert "stale" not in other.hint
    same = audit_logprobs(train, rollout, train_weight_version=["3", None], rollout_weight_versions=[3, 9])
    assert "stale" not in same.hint
    assert "stale" not in audit_logprobs(train, rollout, rollout_weight_versions=[2, 3]).hint


def test_a_few_tokens_that_are_all_stale_may_be_of_other_kernels_and_many_that_differ_little_may_be_stale() -> None:
    versions = {"train_weight_version": 3, "rollout_weight_versions": [2]}
    train = log_probs(40)
    (found,) = audit_logprobs(train, tied_to(train, noise=1e-3), **versions).diagnoses
    assert (found.cause, found.confidence, found.alternatives) == ("stale_weights", "possible", ("other kernels",))
    train = log_probs(400)
    (found,) = audit_logprobs(train, tied_to(train, noise=1e-3), **versions).diagnoses
    assert found.cause == "bf16_kernels"
    stale, small = found.alternatives
    assert stale == "stale weights: all 400 tokens were sampled with weights of another version"
    assert "low precision with little effect" in small


def of_signs(
    raised: list[int], *, of: int = 10, probability: float = 0.5, gap: float = 0.1
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Responses of so many tokens, of which so many are raised and the others lowered, behind 20 certain ones."""
    rollout = [torch.full((of + 20,), math.log(probability)) for _ in raised]
    train = []
    for number, of_engine in zip(raised, rollout, strict=True):
        of_engine[of:] = math.log(0.99)
        train.append(of_engine + torch.tensor([gap] * number + [-gap] * (of - number) + [gap / 100] * 20))
    return train, rollout


OPEN_ARE_RAISED = (
    "stale weights, or an adapter that one side lacks, or a penalty: the trainer finds 65% of 400 uncertain"
)
RAISED = [7, 6, 8, 5] * 10


@pytest.mark.parametrize(
    ("gap", "cause"),
    [(0.02, "bf16_kernels"), (0.05, "bf16_kernels"), (0.1, "bf16_or_low_precision"), (0.15, "low_precision")],
)
def test_where_most_open_tokens_are_raised_old_weights_come_first(gap, cause) -> None:
    (found,) = audit_logprobs(*of_signs(RAISED, gap=gap)).diagnoses
    assert found.cause == cause
    assert found.alternatives[0].startswith(OPEN_ARE_RAISED)
    assert sum("stale weights" in words for words in found.alternatives) == 1


@pytest.mark.parametrize(
    "signs",
    [
        {"raised": [5, 6, 4, 5] * 10},  # Half of them.
        {"raised": [3, 4, 2, 5] * 10},  # Most are lowered.
        {"raised": RAISED[:19]},  # 190 tokens.
        {"raised": [54] * 20, "of": 100},  # 54 %, without any spread.
        {"raised": [10, 10, 10, 0, 10, 10, 10, 0, 10, 0] * 4},  # Whole responses: 70 %, 2.8 standard errors.
        {"raised": RAISED, "probability": 0.04},
        {"raised": RAISED, "probability": 0.95},
    ],
)
def test_signs_that_chance_or_rounding_gives_name_no_weights(signs) -> None:
    found = audit_logprobs(*of_signs(**signs)).diagnoses
    assert not [words for each in found for words in each.alternatives if "uncertain tokens more" in words]


def test_where_versions_agree_signs_say_nothing() -> None:
    train, rollout = of_signs(RAISED)
    for versions in ({"train_weight_version": 3, "rollout_weight_versions": [3] * 40}, {}):
        (found,) = audit_logprobs(train, rollout, **versions).diagnoses
        assert any("uncertain tokens more" in words for words in found.alternatives) == (not versions)


def test_first_tokens_that_are_equal_by_chance_do_not_point_to_decoding() -> None:
    train = log_probs(*[20] * 8)
    rollout = tied_to(train, noise=1e-3)
    for x, y in zip(train, rollout, strict=True):
        y[:11] = x[:11]
    # Half of the later tokens differ: eight equal first tokens have a chance of 1 in 256.
    assert "decode" not in audit_logprobs(train, rollout).hint
