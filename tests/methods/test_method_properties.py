# SPDX-License-Identifier: Apache-2.0
"""What methods satisfy whatever their numbers: limits, invariances, identities, and the absence of known defects."""

import dataclasses
import math
import re

import pytest
import torch
from method_cases import apply, each_preset, make_data, parameters
from rows import for_each

from mis_ext import PackedLayout
from mis_ext.methods import METHODS, KlTerm, Method, PairGate, PairWeight, Score
from mis_ext.methods.batch import MISMATCH, UPDATE, WHOLE_SEQUENCE

STREAMS = ("behavior", "proximal", "x", "reference", "advantages", "values")


def call(method: Method, *, behavior, proximal=None, current=None, advantages=None, lengths=None, mask=None, **more):
    """A method on few numbers; what is not given is the behavior policy, and advantage 1."""
    behavior = torch.as_tensor(behavior, dtype=torch.float64)
    proximal = behavior if proximal is None else torch.as_tensor(proximal, dtype=torch.float64)
    advantages = torch.ones_like(behavior) if advantages is None else torch.as_tensor(advantages, dtype=torch.float64)
    return method(
        behavior_logprobs_T=behavior,
        proximal_logprobs_T=proximal,
        current_logprobs_T=proximal if current is None else torch.as_tensor(current, dtype=torch.float64),
        reference_logprobs_T=behavior,
        advantages_T=advantages,
        response_mask_T=torch.ones_like(behavior) if mask is None else torch.as_tensor(mask),
        layout=PackedLayout.whole(lengths or [len(behavior)]),
        **more,
    )


def ratios(*values: float) -> dict:
    """Behavior log-probs, and proximal ones so that the ratios are `values`."""
    log_ratio = torch.tensor(values, dtype=torch.float64).log()
    return {"behavior": torch.full_like(log_ratio, -3.0), "proximal": log_ratio - 3.0}


# --- every preset


def test_each_heading_in_the_text_of_a_method_begins_a_line_for_the_terminal() -> None:
    for row in METHODS.values():
        assert not re.search(r"\S (When|Claims|Counter-claims): ", row.text), row.name


@each_preset
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e4])
def test_what_lies_under_a_masked_token_changes_nothing(name, junk) -> None:
    data, mask, layout = make_data()
    method = METHODS[name](**parameters(name))
    wanted = apply(method, data, mask, layout)
    for stream in STREAMS:
        dirty = dataclasses.replace(data, **{stream: torch.where(mask, getattr(data, stream), junk)})
        found = apply(method, dirty, mask, layout)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), stream


@each_preset
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_log_prob_is_rejected_and_counted_and_harms_no_other_sequence(name, broken) -> None:
    data, mask, layout = make_data()
    method = METHODS[name](**parameters(name))
    sequence_T = layout.sequence_T
    victim = data.sequences[4]
    at = int(victim[len(victim) // 2])
    for policy in (*method.policies, "advantages", *(["values"] if method.needs_state_values else [])):
        stream = "x" if policy == "current" else policy
        values = getattr(data, stream).clone()
        values[at] = broken
        current = values if stream == "x" else data.x
        current = current.clone().requires_grad_()
        dirty = dataclasses.replace(data, **{stream: values})
        found = apply(method, dirty, mask, layout, current_logprobs_T=current)
        found.loss_T.sum().backward()
        assert all(tensor.isfinite().all() for tensor in (found.loss_T, found.coefficient_T, current.grad))
        assert found.coefficient_T[at] == 0.0
        assert not found.kept_T[at]
        of_sequence = int((mask & (sequence_T == sequence_T[at])).sum())
        loses_sequence = bool(method.reduces & WHOLE_SEQUENCE)
        assert int(found.num_invalid) == (of_sequence if loses_sequence else 1)
        assert int(found.valid_T.sum()) + int(found.num_invalid) == int(mask.sum())
        assert of_sequence > 1
        if (
            not method.reduces & {"batch_mean", "batch_rank_mean"}
            and method.normalize_over is None
            and "psis" not in name
        ):
            others = mask & (sequence_T != sequence_T[at])
            whole = apply(method, data, mask, layout)
            assert torch.equal(found.coefficient_T[others], whole.coefficient_T[others])


@each_preset
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_absurd_log_ratios_give_finite_numbers_in_float32(name, distance) -> None:
    data, mask, layout = make_data()
    streams = {stream: getattr(data, stream).float() for stream in STREAMS}
    for stream in ("behavior", "proximal", "x", "reference"):
        far = dataclasses.replace(data, **streams | {stream: streams[stream] + distance})
        result = apply(METHODS[name].method, far, mask, layout)
        assert result.coefficient_T.isfinite().all()
        assert result.loss_T.isfinite().all()
        assert result.coefficient_T.dtype == torch.float32


@each_preset
def test_float32_log_probs_give_the_coefficients_of_float64(name) -> None:
    data, mask, layout = make_data()
    single = dataclasses.replace(data, **{stream: getattr(data, stream).float() for stream in STREAMS})
    method = METHODS[name](**parameters(name))
    found, wanted = (apply(method, each, mask, layout) for each in (single, data))
    torch.testing.assert_close(found.coefficient_T.double(), wanted.coefficient_T, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.kept_T, wanted.kept_T)
    assert found.loss_T.dtype == torch.float32


# --- identities


def test_a_product_of_segments_is_the_sequence_and_segments_of_one_token_are_tokens() -> None:
    ratio = (1.25, 0.5, 1.1, 0.9, 2.0)
    by_level = {
        level: Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH, level=level),))
        for level in ("token", "segment", "sequence")
    }

    def weights(level, mask):
        return call(by_level[level], **ratios(*ratio), mask=mask).coefficient_T.tolist()

    assert weights("segment", [1, 1, 1, 1, 1]) == weights("sequence", [1, 1, 1, 1, 1])
    assert weights("segment", [1, 0, 1, 0, 1]) == weights("token", [1, 0, 1, 0, 1])
    assert weights("segment", [1, 1, 0, 1, 1]) == pytest.approx([0.625, 0.625, 0, 1.8, 1.8])


def test_sequence_means_the_product_and_geometric_the_mean() -> None:
    def weight(level):
        method = Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH, level=level),))
        return call(method, **ratios(2.0, 0.5, 4.0)).coefficient_T.tolist()

    assert weight("sequence") == pytest.approx([4.0] * 3)
    assert weight("geometric") == pytest.approx([4.0 ** (1 / 3)] * 3)
    assert weight("prefix") == pytest.approx([2.0, 1.0, 4.0])
    assert weight("token") == pytest.approx([2.0, 0.5, 4.0])


def test_a_penalty_is_paid_by_rejected_tokens_too() -> None:
    gate = PairGate(pair=MISMATCH, low=0.5, high=2.0)
    term = KlTerm(estimator="squared", scale=0.5, pair=MISMATCH[::-1])
    result = call(Method(surrogate=Score(), factors=(gate,), terms=(term,)), **ratios(4.0))
    assert bool(result.coefficient_T != 0.0)


def test_dcpo_bounds_solve_their_equation_and_stop_at_the_cap() -> None:
    from mis_ext.methods.parts import ProbabilityBound

    class Fixed:
        log_probs = torch.tensor([1.0, 0.8, 0.5, 0.1, 1e-5], dtype=torch.float64).log()

        def log_prob(self, policy):
            return self.log_probs

    q = Fixed.log_probs.exp()
    for gain in (0.2, -0.05):
        ratio = ProbabilityBound(gain=gain, cap=10.0).log_edge(Fixed(), UPDATE).exp()
        solved = q * ratio * (ratio - 1)
        is_exact = (ratio < 10) & (1 + 4 * gain / q >= 0)
        torch.testing.assert_close(solved[is_exact], torch.full_like(q, gain)[is_exact])
        assert is_exact.sum() >= 3
        assert bool((ratio <= 10 + 1e-9).all() & (ratio >= 0.5).all())


def test_log_probs_are_subtracted_in_float32_whatever_they_are_stored_in() -> None:
    behavior = torch.tensor([-2.0, -1.5])
    proximal = behavior + torch.tensor([0.0078125, -0.00390625])
    method = Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH),))
    found = method(
        behavior_logprobs_T=behavior.bfloat16(),
        proximal_logprobs_T=proximal,
        current_logprobs_T=proximal,
        advantages_T=torch.ones(2),
        response_mask_T=torch.ones(2),
        layout=PackedLayout.whole([2]),
    )
    assert torch.equal(found.coefficient_T, (proximal - behavior).exp())


def test_missing_log_probs_and_wrong_lengths_are_named() -> None:
    values = torch.zeros(3)
    streams = {"current_logprobs_T": values, "advantages_T": values, "response_mask_T": values}
    layout = PackedLayout.whole([3])
    with pytest.raises(ValueError, match="pass proximal_logprobs_T"):
        METHODS["ppo"].method(**streams, layout=layout)
    with pytest.raises(ValueError, match="pass state_values_T"):
        METHODS["drift_control"].method(**streams, behavior_logprobs_T=values, layout=layout)
    for name in ("behavior_logprobs_T", "state_values_T"):
        given = streams | {"behavior_logprobs_T": values, "state_values_T": values, name: values[:2]}
        with pytest.raises(ValueError, match=rf"{name} has the shape \(2,\), but the layout has 3 tokens"):
            METHODS["drift_control"].method(**given, layout=layout)
    with pytest.raises(ValueError, match=r"current_logprobs_T has the shape \(3,\), but the layout has 2 tokens"):
        METHODS["reinforce"].method(
            **streams | dict.fromkeys(("advantages_T", "response_mask_T"), values[:2]), layout=PackedLayout.whole([2])
        )
    with pytest.raises(TypeError, match="advantages_T must be a tensor, got list"):
        METHODS["reinforce"].method(**streams | {"advantages_T": [1.0] * 3}, layout=layout)
    with pytest.raises(TypeError, match=r"layout must be a PackedLayout, got \[3\]"):
        METHODS["reinforce"].method(**streams, layout=[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_soft_gate_of_sapo_keeps_its_digits_where_it_is_nearly_closed(dtype, advantage) -> None:
    log_ratio = torch.linspace(-3.0, math.log(80.0), 200, dtype=dtype)
    proximal = torch.full_like(log_ratio, -5.0)
    current = proximal + log_ratio
    found = METHODS["sapo"].method(
        proximal_logprobs_T=proximal,
        current_logprobs_T=current,
        advantages_T=torch.full_like(proximal, advantage),
        response_mask_T=torch.ones_like(proximal),
        layout=PackedLayout.whole([len(proximal)]),
    )
    # The derivative of 4 / tau / (1 + exp(-x)) in float64, of the log-ratios that the dtype has.
    ratio = (current - proximal).double().exp()
    tau = 1.0 if advantage > 0.0 else 1.05
    decay = (-tau * (ratio - 1.0)).exp()
    wanted = advantage * 4.0 * ratio * decay / (1.0 + decay).square()
    assert wanted.abs().min() < 1e-30
    # A ratio of 80 is off by a few roundings, and the relative error of exp(-x) is 83 times that of x.
    torch.testing.assert_close(found.coefficient_T.double(), wanted, rtol=83 * 4 * torch.finfo(dtype).eps / 2, atol=0.0)


@for_each("name", [name for name, row in METHODS.items() if row.method.surrogate.pair is not None])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [26.0, -26.0])
def test_a_ratio_with_gradient_has_none_beyond_the_clamp_of_exponents(name, advantage, log_ratio) -> None:
    """As of `(x - old).clamp(-20, 20).exp()` in Miles; the penalties of a method still pull back."""
    current = torch.tensor([-1.0, -30.0] if log_ratio > 0.0 else [-30.0, -30.0], dtype=torch.float64)
    old = current - torch.tensor([log_ratio, 0.0])
    found = call(
        dataclasses.replace(METHODS[name].method, terms=()),
        behavior=old,
        proximal=old,
        current=current,
        advantages=[advantage] * 2,
        lengths=[1, 1],
    )
    assert float(found.coefficient_T[0]) == 0.0
    assert math.isfinite(float(found.loss_T[0]))
