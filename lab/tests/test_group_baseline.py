# SPDX-License-Identifier: Apache-2.0
"""The exact moments of a group's gradient against a list of all groups, and against autograd."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from evidence import group_baseline
from evidence.group_baseline import CASES, GROUP, RULES, Group, Kind, Question, Rule

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


def listed(kinds: list[Kind], gradient: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, float]:
    """Mean and mean squared length of the gradient, from every group of three answers, one after the other."""
    drawn = [(index, kind) for kind in kinds for index in range(len(gradient)) if kind.share[index] > 0.0]
    mean, square = torch.zeros(gradient.shape[1], dtype=torch.float64), 0.0
    for group in itertools.product(drawn, repeat=3):
        total = torch.zeros_like(mean)
        for me, (index, kind) in enumerate(group):
            voices = [
                (other, each.reward)
                for other, (_, each) in enumerate(group)
                if each.kept or rule.counts_rejected
                for _ in range(each.size)
            ]
            rewards = torch.tensor([reward for _, reward in voices], dtype=torch.float64)
            others = [reward for other, reward in voices if other != me or not rule.leaves_out]
            advantage = kind.reward - sum(others) / len(others) if others else 0.0
            if not rule.has_baseline:
                advantage = kind.reward
            if rule.deviation:
                advantage = advantage / float(rewards.std()) if len(rewards) > 1 and rewards.std() > 0 else 0.0
            divisor = sum(each.kept for _, each in group) if rule.divides_by_kept else 3
            if kind.kept:
                total += advantage * gradient[index] / divisor
        chance = math.prod(float(kind.share[index]) for index, kind in group)
        mean += chance * total
        square += float(chance * total.square().sum())
    return mean, square


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_moments_are_those_of_all_groups(small: Question, rule: Rule) -> None:
    kept = torch.tensor([True, True, False, True, True, False, True])
    gradient = small.gradients("token")
    kinds = group_baseline._kept_and_right(small.probability, kept, small.is_right)
    found, expected = Group(kinds, gradient).gradient(rule), listed(kinds, gradient, rule)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == pytest.approx(expected[1])


@pytest.mark.parametrize("rule", [Rule(), Rule(counts_rejected=False, deviation=False)])
def test_so_are_those_of_answers_that_may_fail_and_of_trajectories_of_several_samples(small, rule) -> None:
    alive = torch.where(small.is_right, small.probability, 0.0) * 0.75
    wrong = torch.where(small.is_right, 0.0, small.probability)
    failed = Kind(small.probability - alive - wrong, -1.0, kept=False)
    kinds, gradient = [Kind(alive, 1.0, size=2), Kind(wrong, 0.0), failed], small.gradients(None)
    found, expected = Group(kinds, gradient).gradient(rule), listed(kinds, gradient, rule)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == pytest.approx(expected[1])


def test_without_mismatch_and_gate_the_gradient_is_parallel_to_the_policy_gradient() -> None:
    question = Question(0.3, seed=2, agreement=1.0)
    logits = question._softmax.log().requires_grad_()
    reward = (question._log_probs(logits).sum(1).exp() * question.is_right).sum()
    (policy_gradient,) = torch.autograd.grad(reward, logits)
    cosine = torch.nn.functional.cosine_similarity(question._true.gradient(Rule())[0], policy_gradient.flatten(), dim=0)
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
