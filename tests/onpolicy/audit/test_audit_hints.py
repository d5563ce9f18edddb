# SPDX-License-Identifier: Apache-2.0
"""The exactness audit: what a difference points to, and what a pass does not show."""

import math

import pytest
import torch
from audit_lists import GOOD, audit_logprobs, copies, log_probs, tensors, tied_to

from mis_ext.onpolicy.audit.audit_report import Verdict


def test_versions_that_differ_on_the_samples_that_differ_point_to_stale_weights() -> None:
    train = log_probs(40, 40)
    rollout = [train[0].clone(), *tied_to(train[1:], noise=1e-3)]
    stale = audit_logprobs(train, rollout, train_weight_version=3, rollout_weight_versions=["3", ["3", 2]])
    assert [(found.cause, found.confidence) for found in stale.diagnoses] == [("stale_weights", "likely")]
    assert "50% of the tokens were sampled with other weights than the trainer's; k3 by version: fresh 0" in stale.hint
    # The sample with the old weights is the one that is equal: they are not the cause.
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
    assert "low precision that hardly shows" in small


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


OPEN_ARE_RAISED = "stale weights, or an adapter that one side lacks, or a penalty: the trainer finds 65% of 400 open"
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
    assert not [words for each in found for words in each.alternatives if "open tokens" in words]


def test_where_versions_agree_signs_say_nothing() -> None:
    train, rollout = of_signs(RAISED)
    for versions in ({"train_weight_version": 3, "rollout_weight_versions": [3] * 40}, {}):
        (found,) = audit_logprobs(train, rollout, **versions).diagnoses
        assert any("open tokens" in words for words in found.alternatives) == (not versions)


@pytest.mark.parametrize(("noise", "is_stale"), [(5.5, True), (0.5, True), (0.1, False), (0.02, False)])
def test_without_versions_a_difference_beyond_all_kernels_points_to_stale_weights(noise, is_stale) -> None:
    train = log_probs(200, 200)
    hint = audit_logprobs(train, tied_to(train, noise=noise)).hint
    assert ("stale weights: tokens" in (hint or "")) == is_stale
    known = audit_logprobs(train, tied_to(train, noise=5.5), train_weight_version=1, rollout_weight_versions=[1, 1])
    assert "stale weights" in known.hint
    assert "although the weight versions agree" in known.hint


def test_a_difference_between_kernels_and_stale_weights_is_called_low_precision() -> None:
    train = [x - 1.0 for x in log_probs(200)]
    rollout = tied_to(train, noise=0.2)
    assert [found.cause for found in audit_logprobs(train, rollout).diagnoses] == ["low_precision"]


@pytest.mark.parametrize(
    ("noise", "cause"), [(0.04, "bf16_kernels"), (0.06, "bf16_or_low_precision"), (0.1, "low_precision")]
)
def test_where_a_pretrained_model_in_bfloat16_has_as_much_as_low_precision_both_are_named(noise, cause) -> None:
    train = [x - 1.0 for x in log_probs(2000)]
    (found,) = audit_logprobs(train, tied_to(train, noise=noise)).diagnoses
    assert found.cause == cause


@pytest.mark.parametrize("by", [1, -1])
def test_log_probs_moved_by_a_token_are_called_misaligned(by) -> None:
    train = log_probs(60, 60)
    report = audit_logprobs(train, [x.roll(by) for x in train])
    assert [found.cause for found in report.diagnoses] == ["shifted_log_probs"]
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
        x[-1], y[-1] = -3.5 - x[0], value
    for sides, name in (((train, rollout), "behavior"), ((rollout, train), "proximal")):
        report = audit_logprobs(*sides)
        assert [found.cause for found in report.diagnoses] == ["placeholder_log_probs"]
        assert f"the 8 {name} log-probs that differ from the other side's are all {value:g}" in report.hint
    # Two values, too few tokens, and differences that kernels explain.
    rollout[0][-1] = -0.25
    # But two zeros where the trainer is far below are placeholders by themselves.
    assert ("placeholder" in audit_logprobs(train, rollout).hint) == (value == 0.0)
    rollout[0][-1] = train[0][-1]
    assert ("placeholder" in audit_logprobs(train, rollout).hint) == (value == 0.0)
    near = [torch.full_like(x, value) for x in train]
    noisy = tied_to(near, noise=1e-2)
    noisy[0][0] = near[0][0] = -3.0
    assert "placeholder" not in (audit_logprobs(noisy, near).hint or "")


def test_one_token_far_apart_is_not_called_rounding() -> None:
    train = log_probs(*[200] * 8)
    rollout = copies(train)
    rollout[3][5] -= 9.0
    hint = audit_logprobs(train, rollout).hint
    assert "likely a few tokens only: 1 of 1591 uncertain tokens differ, the others are equal" in hint
    # Kernels move all tokens a little, and not one by half a nat.
    rollout[3][5] += 8.5
    assert "likely a few tokens only" in audit_logprobs(train, rollout).hint


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_constant_stream_is_called_a_placeholder(value) -> None:
    train = log_probs(20, 20)
    constant = [torch.full_like(x, value) for x in train]
    assert f"all 40 behavior log-probs on trainable tokens are {value:g}" in audit_logprobs(train, constant).hint
    assert "all 40 proximal log-probs" in audit_logprobs(constant, train).hint
    assert "placeholder" not in audit_logprobs(train[:1], tensors([-1.0] * 19 + [-2.0])).hint
    assert "placeholder" not in audit_logprobs(tensors(GOOD), tensors([value] * 3)).hint
    both = audit_logprobs(constant, copies(constant))
    assert both.passed


def test_bf16_on_one_side_only_is_seen_whatever_dtype_it_is_stored_in() -> None:
    train = log_probs(100)
    rounded = [x.bfloat16() for x in train]
    for rollout in (rounded, [x.float() for x in rounded]):
        report = audit_logprobs(train, rollout)
        assert report.verdict is Verdict.DIFFERENT
        assert "certain log-probs rounded to bfloat16: behavior log-probs are bfloat16 numbers" in report.hint
        # The rounding is all that differs.
        assert report.diagnoses[0].k3_share == pytest.approx(1.0, abs=0.2)
    assert "proximal log-probs are bfloat16 numbers" in audit_logprobs(rounded, train).hint
    noisy = audit_logprobs([x.bfloat16() for x in tied_to(train, noise=0.02)], train)
    assert "proximal log-probs are bfloat16 numbers" in noisy.hint
    assert noisy.diagnoses[0].k3_share < 0.1
    assert audit_logprobs([train[0][:20]], [rounded[0][:20]]).hint is None
    both = audit_logprobs(rounded, [x.bfloat16() for x in tied_to(train, noise=0.02)])
    assert "proximal and behavior log-probs are bfloat16 numbers" in both.hint
    neither = audit_logprobs(train, tied_to(train, noise=1e-4))
    assert "bfloat16 numbers" not in neither.hint


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
    assert "likely another formula for the same log-prob" in audit_logprobs([train], [formula]).hint
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
    plain = audit_logprobs(train, copies(train))
    assert (plain.cautions, plain.hint) == ((), None)
    low = [x.bfloat16() for x in train]
    moved = [x - 1 for x in low]
    assert audit_logprobs(low, moved, train_weight_version=2, rollout_weight_versions=[1]).cautions == ()
    stale = audit_logprobs(train, copies(train), train_weight_version=2, rollout_weight_versions=[1])
    assert stale.verdict is Verdict.EXACT
    assert "weight versions differ" in stale.cautions[0]
