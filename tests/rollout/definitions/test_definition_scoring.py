# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probs of a distribution: kept tokens, padding, dtypes."""

import math

import pytest
import torch
from log_prob_definitions import LOGITS, PROBABILITIES

from mis_ext.rollout.comparable_log_probs import kept_mask, trainer_log_probs
from mis_ext.rollout.definition import Distribution, Truncation


def score(token_ids, distribution, logits=LOGITS, **kwargs) -> list[float]:
    """Probabilities, from float64 logits."""
    logits_TV = torch.tensor([logits] * len(token_ids), dtype=torch.float64)
    return trainer_log_probs(logits_TV, token_ids, distribution, **kwargs).log_probs_T.exp().tolist()


def test_probabilities_by_hand() -> None:
    every = [0, 1, 2, 3]
    assert score(every, Distribution()) == pytest.approx(PROBABILITIES)
    assert score(every, Distribution(temperature=0.5)) == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])
    assert score(every, Distribution(truncation=Truncation(top_k=2))) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    bias = Distribution(logit_bias=((3, math.log(4)), (0, -math.log(2))))
    assert score(every, bias) == pytest.approx([2 / 9, 2 / 9, 1 / 9, 4 / 9])
    # The bias is divided by the temperature too: weights 2/8, 2/8, 1/8, 4/8 are squared.
    both = Distribution(logit_bias=bias.logit_bias, temperature=0.5)
    assert score(every, both) == pytest.approx([4 / 25, 4 / 25, 1 / 25, 16 / 25])
    # The temperature comes before the truncation: 16/22 and 4/22 are kept, 20/22 >= 0.9.
    tempered = Distribution(temperature=0.5, truncation=Truncation(top_p=0.9))
    assert score(every, tempered) == pytest.approx([16 / 20, 4 / 20, 0, 0])


KEPT = {
    "top_k": (Truncation(top_k=3), [0, 1, 2]),
    "top_k above the vocabulary": (Truncation(top_k=9), [0, 1, 2, 3]),
    "top_k with ties": (Truncation(top_k=3, keeps_ties="top_k"), [0, 1, 2, 3]),
    "top_p drops ties": (Truncation(top_p=0.8), [0, 1, 2]),
    "top_p drops ties that top_k keeps": (Truncation(top_k=3, top_p=0.8, keeps_ties="top_k"), [0, 1, 2]),
    "top_p with ties": (Truncation(top_p=0.8, keeps_ties="all"), [0, 1, 2, 3]),
    "both with ties": (Truncation(top_k=3, top_p=0.8, keeps_ties="all"), [0, 1, 2, 3]),
    "top_p": (Truncation(top_p=0.6), [0, 1]),
    "top_p below the first": (Truncation(top_p=0.1), [0]),
    "top_p met exactly": (Truncation(top_p=0.75), [0, 1]),
    "top_p met exactly, pytorch": (Truncation(top_p=0.75, keeps_next=True), [0, 1, 2]),
    "min_p": (Truncation(min_p=0.4), [0, 1]),
    "min_p met exactly": (Truncation(min_p=0.25), [0, 1, 2, 3]),
    "all three, joint": (Truncation(top_k=3, top_p=0.8, min_p=0.1), [0, 1, 2]),
    # Of the 3/4 within top_k=2, the first token has 2/3.
    "top_p of top_k": (Truncation(top_k=2, top_p=0.6, mass_of="top_k"), [0]),
    "top_p beside top_k": (Truncation(top_k=2, top_p=0.6), [0, 1]),
    "top_p of top_k, not of min_p": (Truncation(top_k=3, min_p=0.4, top_p=0.6, mass_of="top_k"), [0, 1]),
    "top_p of both": (Truncation(top_k=3, min_p=0.4, top_p=0.6, mass_of="top_k_and_min_p"), [0]),
}


@pytest.mark.parametrize(("truncation", "kept"), KEPT.values(), ids=KEPT)
def test_the_kept_tokens_by_hand(truncation, kept) -> None:
    # Exact in binary, so that equality at the edge is equality.
    probabilities = torch.tensor([PROBABILITIES])
    assert kept_mask(probabilities, truncation)[0].nonzero()[:, 0].tolist() == kept
    shuffled = kept_mask(probabilities[:, [2, 0, 1, 3]], truncation)[0]
    # Of two ties, a sort that is stable keeps the first.
    assert sorted([2, 0, 1, 3][i] for i in shuffled.nonzero()[:, 0]) == kept


def test_a_token_outside_the_kept_ones_is_reported_and_has_probability_0() -> None:
    logits = torch.tensor([LOGITS, LOGITS], requires_grad=True)
    scored = trainer_log_probs(logits, [1, 2], Distribution(truncation=Truncation(top_k=2)))
    assert scored.outside_T.tolist() == [False, True]
    assert scored.log_probs_T[1] == -torch.inf
    torch.where(scored.outside_T, 0.0, scored.log_probs_T).sum().backward()
    # d log p_1 = (0, 1) - (2/3, 1/3) within the kept tokens, nothing elsewhere.
    assert logits.grad == pytest.approx(torch.tensor([[-2 / 3, 2 / 3, 0, 0], [0, 0, 0, 0]]))


def test_the_kept_tokens_of_the_server_take_the_place_of_the_trainers() -> None:
    top_1 = Distribution(truncation=Truncation(top_k=1))
    assert score([2, 0], top_1, kept_ids=[[0, 2], [0]]) == pytest.approx([0.2, 1.0])
    for kept_ids, message in (
        ([[0]], "2 positions, but there are 1 lists of kept ids"),
        ([[], [0]], r"at least one, from 0 to 3, got \[\]"),
        ([[0, 4], [0]], r"from 0 to 3, got \[0, 4\]"),
        ([[-1], [0]], r"from 0 to 3, got \[-1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            score([2, 0], top_1, kept_ids=kept_ids)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_half_precision_is_scored_in_float32_and_float64_stays(dtype, expected) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scored = trainer_log_probs(logits, torch.tensor([1, 2, 3, 4]), Distribution(temperature=0.7)).log_probs_T
    assert scored.dtype == expected
    wide = (logits.double() / 0.7).log_softmax(-1)[range(4), [1, 2, 3, 4]]
    assert scored.tolist() == pytest.approx(wide.tolist(), abs=1e-6)


def test_what_cannot_be_scored_is_refused() -> None:
    logits = torch.tensor([LOGITS])
    with pytest.raises(
        ValueError, match=r"whole vocabulary .*, got shape \[4\]: .* cannot be converted to another temp"
    ):
        trainer_log_probs(logits[0], [1, 2, 3, 0], Distribution(temperature=0.7))
    with pytest.raises(ValueError, match=r"logits have 1 positions, but token ids have shape \[2\]"):
        trainer_log_probs(logits, [1, 2], Distribution())
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 3\], got 4 to 4"):
        trainer_log_probs(logits, [4], Distribution())
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 2\], got 3 to 3"):
        trainer_log_probs(logits, [3], Distribution(), vocab_size=3)
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 4\], the width of the logits, got 5"):
        trainer_log_probs(logits, [3], Distribution(), vocab_size=5)
    for distribution in (Distribution(logit_bias=((3, 1.0),)), Distribution(logit_bias=((-1, 1.0),))):
        with pytest.raises(ValueError, match=r"token ids of logit_bias must be in \[0, 2\], got (3|-1)"):
            trainer_log_probs(logits, [2], distribution, vocab_size=3)
    with pytest.raises(ValueError, match="the trainer cannot compute this: because"):
        trainer_log_probs(logits, [3], Distribution(unrepeatable=("because",)))


def test_columns_of_padding_take_no_part() -> None:
    # Weights 1/2, 1/4, 1/8, 1/8 and two columns of padding with 1/4 each: 3/2 instead of 1.
    padded = [math.log(p) for p in (*PROBABILITIES, 0.25, 0.25)]
    assert score([0], Distribution(), padded) == pytest.approx([1 / 3])
    assert score([0], Distribution(), padded, vocab_size=4) == pytest.approx([1 / 2])
    # The kept tokens are among the real ones, too.
    by_padding = Distribution(truncation=Truncation(top_k=3))
    assert score([2], by_padding, [math.log(p) for p in (*PROBABILITIES, 9.0)], vocab_size=4) == pytest.approx([1 / 7])
