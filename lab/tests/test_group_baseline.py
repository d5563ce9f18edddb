# SPDX-License-Identifier: Apache-2.0
"""The exact moments of a group's gradient against a list of all groups, and against autograd."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from evidence import group_baseline
from evidence.group_baseline import CASES, GROUP, Question

import mis_ext

PAGE = Path(__file__).parents[1] / "evidence" / "group_baseline.md"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Question:
    """Seven answers of at most two tokens, in groups of three."""
    monkeypatch.setattr(group_baseline, "MAX_LENGTH", 2)
    monkeypatch.setattr(group_baseline, "GROUP", 3)
    question = Question(0.5, seed=1, agreement=0.0)
    assert len(question.is_right) == 7
    question.is_right = torch.tensor([True, False, True, False, True, False, True])
    return question


@pytest.mark.parametrize("counts_rejected", [True, False])
def test_the_moments_are_those_of_all_groups(small: Question, counts_rejected: bool) -> None:
    kept = torch.tensor([True, True, False, True, True, False, True])
    gradient = small._gradients("token")
    mean, square = torch.zeros(gradient.shape[1], dtype=torch.float64), 0.0
    for group in itertools.product(range(7), repeat=3):
        members = [*group]
        counted = [each for each in members if counts_rejected or kept[each]]
        rewards = small.is_right[counted].double()
        total = torch.zeros_like(mean)
        if len(counted) > 1 and rewards.std() > 0:
            for each in members:
                if kept[each]:
                    total += (small.is_right[each].double() - rewards.mean()) / rewards.std() * gradient[each] / 3
        chance = small.probability[members].prod()
        mean += chance * total
        square += float(chance * total.square().sum())
    found = small._group(small.probability, gradient, kept, counts_rejected=counts_rejected)
    torch.testing.assert_close(found[0], mean)
    assert found[1] == pytest.approx(square)


def test_without_mismatch_and_gate_the_gradient_is_parallel_to_the_policy_gradient() -> None:
    question = Question(0.3, seed=2, agreement=1.0)
    logits = question._softmax.log().requires_grad_()
    reward = (question._log_probs(logits).sum(1).exp() * question.is_right).sum()
    (policy_gradient,) = torch.autograd.grad(reward, logits)
    cosine = torch.nn.functional.cosine_similarity(question._true, policy_gradient.flatten(), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-12)


def test_the_product_of_all_ratios_has_no_bias_without_a_gate() -> None:
    question = Question(0.3, seed=3, agreement=0.0)
    (found,) = question.moments([("sequence", None, None)])
    # mis_ext computes the weights in float32.
    assert found.bias < 1e-5
    assert found.noise > 0.5


@pytest.mark.filterwarnings("ignore:a .* gate with bounds")
@pytest.mark.parametrize(("gate", "reduce"), [("product", "sum"), ("geometric mean", "mean"), ("veto", "min")])
def test_a_gate_of_the_study_is_that_of_mis_ext(gate: str, reduce: str) -> None:
    question = Question(0.3, seed=4, agreement=0.0)
    width = question.bound(gate)
    edges = {"low": math.exp(-width)} | ({} if gate == "veto" else {"high": math.exp(width)})
    corrected = mis_ext.correct_padded(
        mis_ext.CorrectionConfig(weight=None, gates=(mis_ext.Gate(reduce=reduce, **edges),)),
        proximal_logprobs=question.proximal.float(),
        behavior_logprobs=question.behavior.float(),
        response_mask=question.mask.float(),
    )
    assert torch.equal(corrected.keep_mask[:, 0].bool(), question.kept(gate))
    assert float(question.probability[~question.kept(gate)].sum()) == pytest.approx(0.12, abs=0.03)


def test_the_page_has_the_numbers_of_the_law_and_a_row_for_every_setting() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(group_baseline._by_real_length()) in text
    rows = [line for line in text.splitlines() if re.fullmatch(r"\|.*\| (in|out|-) \|.*\|", line)]
    assert len(rows) == len(CASES) * len(group_baseline.AGREEMENTS) * len(group_baseline.NOISES)
    assert f"a group has {GROUP} answers" in text
