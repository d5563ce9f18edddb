# SPDX-License-Identifier: Apache-2.0
"""What methods satisfy whatever their numbers: limits, invariances, identities, and the absence of known defects."""

import dataclasses
import itertools
import math

import pytest
import torch
from method_cases import apply, each_preset, make_data, parameters
from rows import for_each

from mis_ext import PackedLayout, Weight
from mis_ext.correction.formula import MAX_NATS
from mis_ext.correction.statistics import MISMATCH, STALENESS, TOKEN_FORMULAS, TOTAL
from mis_ext.methods import METHODS, Keep, KlTerm, Method, Ratio, RatioWeight, Score
from mis_ext.methods.batch import WHOLE_SEQUENCE, mean_weights

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


@each_preset
def test_where_all_policies_agree_every_preset_is_the_plain_policy_gradient(name) -> None:
    data, mask, layout = make_data(token_advantages=METHODS[name].method.surrogate.spread == "token")
    equal = dataclasses.replace(data, x=data.behavior, proximal=data.behavior, reference=data.behavior)
    result = apply(METHODS[name].method, equal, mask, layout)
    # One of ten thousand tokens, at least one, is held back whatever the policies are.
    held_back = torch.zeros_like(mask) if name != "clip_cov" else mask & (result.coefficient_T == 0.0)
    assert int(held_back.sum()) == (name == "clip_cov")
    wanted = torch.where(mask & ~held_back, data.advantages, 0.0)
    torch.testing.assert_close(result.coefficient_T, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(result.kept_T, mask)
    assert not result.clipped_T.any()


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
    sequence_T = layout.index.sequence_T
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


@each_preset
def test_the_order_of_sequences_and_masked_padding_between_tokens_change_nothing(name) -> None:
    data, mask, layout = make_data(num_sequences=8)
    method = METHODS[name](**parameters(name))
    wanted = apply(method, data, mask, layout).coefficient_T
    lengths = list(layout.response_lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    place = torch.tensor([t for i in order for t in range(starts[i], starts[i] + lengths[i])])
    moved = dataclasses.replace(data, **{stream: getattr(data, stream)[place] for stream in STREAMS})
    found = apply(method, moved, mask[place], PackedLayout.whole([lengths[i] for i in order])).coefficient_T
    torch.testing.assert_close(found, wanted[place], rtol=1e-9, atol=1e-12)

    if method.reduces & {"segment_sum", "segment_mean"}:
        return
    wide = 2 * torch.arange(len(mask))
    holes = {stream: torch.full((2 * len(mask),), math.nan, dtype=torch.float64) for stream in STREAMS}
    for stream in STREAMS:
        holes[stream][wide] = getattr(data, stream)
    holed = torch.zeros(2 * len(mask), dtype=torch.bool)
    holed[wide] = mask
    wider = PackedLayout.whole([2 * length for length in lengths])
    found = apply(method, dataclasses.replace(data, **holes), holed, wider).coefficient_T
    torch.testing.assert_close(found[wide], wanted, rtol=1e-9, atol=1e-12)


@each_preset
def test_the_order_of_factors_does_not_matter(name) -> None:
    data, mask, layout = make_data()
    method = METHODS[name](**parameters(name))
    reversed_ = dataclasses.replace(method, factors=method.factors[::-1])
    found, wanted = (apply(m, data, mask, layout) for m in (reversed_, method))
    torch.testing.assert_close(found.coefficient_T, wanted.coefficient_T, rtol=1e-12, atol=0.0)
    assert torch.equal(found.kept_T, wanted.kept_T)


@each_preset
def test_one_token_sequences_make_all_levels_the_same(name) -> None:
    data, mask, _ = make_data(num_sequences=8)
    layout = PackedLayout.whole([1] * len(mask))
    method = METHODS[name](**parameters(name))

    def at_level(part, level, reduce):
        if isinstance(part, Keep) and not part.reduce.startswith("batch"):
            return dataclasses.replace(part, reduce=reduce)
        return dataclasses.replace(part, level=level) if isinstance(part, (Weight, Ratio)) else part

    wanted = apply(method, data, mask, layout).coefficient_T
    levels = {"token": "token", "prefix": "prefix", "segment": "segment_sum", "geometric": "mean", "sequence": "sum"}
    for level, reduce in levels.items():
        surrogate = at_level(method.surrogate, level, reduce)
        factors = tuple(at_level(factor, level, reduce) for factor in method.factors)
        found = apply(dataclasses.replace(method, surrogate=surrogate, factors=factors), data, mask, layout)
        # A sum of one number, and a mean of it, is that number.
        assert torch.equal(found.coefficient_T, wanted)


GATED = [name for name, row in METHODS.items() if any(isinstance(f, Keep) for f in row.method.factors)]


@for_each("name", GATED)
def test_widening_a_bound_never_drops_a_kept_token_and_an_open_one_drops_none(name) -> None:
    data, mask, layout = make_data()
    method = METHODS[name](**parameters(name))
    live = apply(dataclasses.replace(method, terms=()), data, mask, layout).coefficient_T != 0
    for i, factor in enumerate(method.factors):
        if not isinstance(factor, Keep):
            continue
        wider = {"high": None if factor.high is None else factor.high * 1.3}
        if factor.low is not None:
            wider["low"] = factor.low * (0.7 if factor.low > 0 else 1.3)
        for bounds in (wider, {"low": None, "high": math.inf}):
            factors = (*method.factors[:i], dataclasses.replace(factor, **bounds), *method.factors[i + 1 :])
            found = apply(dataclasses.replace(method, factors=factors, terms=()), data, mask, layout)
            assert bool(((found.coefficient_T != 0) | ~live).all())


# --- identities


def test_a_product_of_segments_is_the_sequence_and_segments_of_one_token_are_tokens() -> None:
    ratio = (1.25, 0.5, 1.1, 0.9, 2.0)
    by_level = {
        level: Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH, level=level),))
        for level in ("token", "segment", "sequence")
    }

    def weights(level, mask):
        return call(by_level[level], **ratios(*ratio), mask=mask).coefficient_T.tolist()

    assert weights("segment", [1, 1, 1, 1, 1]) == weights("sequence", [1, 1, 1, 1, 1])
    assert weights("segment", [1, 0, 1, 0, 1]) == weights("token", [1, 0, 1, 0, 1])
    assert weights("segment", [1, 1, 0, 1, 1]) == pytest.approx([0.625, 0.625, 0, 1.8, 1.8])


def test_sequence_means_the_product_and_geometric_the_mean() -> None:
    def weight(level):
        method = Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH, level=level),))
        return call(method, **ratios(2.0, 0.5, 4.0)).coefficient_T.tolist()

    assert weight("sequence") == pytest.approx([4.0] * 3)
    assert weight("geometric") == pytest.approx([4.0 ** (1 / 3)] * 3)
    assert weight("prefix") == pytest.approx([2.0, 1.0, 4.0])
    assert weight("token") == pytest.approx([2.0, 0.5, 4.0])


def test_a_truncated_product_is_no_product_of_truncated_ratios() -> None:
    found = call(METHODS["decoupled_sequence_tis"].method, **ratios(4.0, 0.25, 1.5)).coefficient_T
    assert found.tolist() == pytest.approx([1.5] * 3)


def test_a_bound_of_a_ratio_is_not_one_of_its_inverse() -> None:
    kept = call(METHODS["token_mis"](low=0.5, high=3.0), **ratios(2.5, 0.4, 0.6, 3.5)).kept_T
    assert kept.tolist() == [True, False, True, False]


def test_a_veto_works_alone_and_sees_one_token() -> None:
    result = call(METHODS["veto"](low=0.01), **ratios(1.0, 0.009, 1.0, 1.0, 0.011), lengths=[3, 2])
    assert result.kept_T.tolist() == [False] * 3 + [True] * 2


def test_icepop_and_token_mis_differ_in_denominators_only() -> None:
    data, mask, layout = make_data()
    zeroed, rejected = (apply(METHODS[name](low=0.5, high=2.0), data, mask, layout) for name in ("icepop", "token_mis"))
    assert torch.equal(zeroed.coefficient_T, rejected.coefficient_T)
    assert torch.equal(zeroed.kept_T, mask)
    assert rejected.kept_T.sum() < mask.sum()
    for over in ("tokens", "sequences"):
        fixed = mean_weights(mask, over=over, layout=layout).double()
        kept = mean_weights(rejected.kept_T, over=over, layout=layout).double()
        if over == "tokens":
            share = rejected.kept_T.sum() / mask.sum()
            torch.testing.assert_close((fixed * zeroed.loss_T).sum(), share * (kept * rejected.loss_T).sum())
        assert float((fixed * mask).sum()) == pytest.approx(1.0, rel=1e-6)
        assert float((kept * rejected.kept_T).sum()) == pytest.approx(1.0, rel=1e-6)


def test_a_fully_masked_response_is_no_term_of_a_mean() -> None:
    layout = PackedLayout.whole([2, 3, 4])
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    assert mean_weights(mask, over="tokens", layout=layout)[mask].tolist() == pytest.approx([0.2] * 5)
    of_sequences = mean_weights(mask, over="sequences", layout=layout)[mask]
    assert of_sequences.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)
    assert not mean_weights(torch.zeros_like(mask), over="tokens", layout=layout).any()


def test_a_penalty_is_paid_by_rejected_tokens_or_not_as_its_row_says() -> None:
    gate = Keep(pair=MISMATCH, low=0.5, high=2.0)
    for on, paid in (("valid", True), ("kept", False)):
        term = KlTerm(estimator="squared", scale=0.5, pair=MISMATCH[::-1], on=on)
        result = call(Method(surrogate=Score(), factors=(gate,), terms=(term,)), **ratios(4.0))
        assert bool(result.coefficient_T != 0.0) is paid


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage_and_gmpo_without_clips_has_its_ratio() -> None:
    data, mask, layout = make_data(token_advantages=False)
    found = [apply(METHODS[name](low=0.05, high=0.1), data, mask, layout) for name in ("gspo", "gspo_token")]
    torch.testing.assert_close(found[0].coefficient_T, found[1].coefficient_T, rtol=1e-12, atol=1e-15)
    open_ = apply(Method(surrogate=Ratio(level="geometric")), data, mask, layout)
    gmpo = apply(METHODS["gmpo"](low=1e-6, high=1e6), data, mask, layout)
    torch.testing.assert_close(gmpo.coefficient_T, open_.coefficient_T, rtol=1e-12, atol=1e-15)


def test_mismatch_times_staleness_is_the_total_ratio() -> None:
    data, mask, layout = make_data()
    whole = Method(surrogate=Score(), factors=(RatioWeight(pair=TOTAL),))
    split = Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH), RatioWeight(pair=STALENESS)))
    found = [apply(method, data, mask, layout).coefficient_T for method in (whole, split)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)


def test_open_bounds_make_every_weight_the_plain_ratio() -> None:
    data, mask, layout = make_data()
    plain = apply(METHODS["decoupled"].method, data, mask, layout).coefficient_T
    for name, bounds in {
        "decoupled_token_tis": {"high": 1e9},
        "decoupled_token_clip": {"low": 0.0, "high": 1e9},
        "decoupled_tempered": {"power": 1.0},
        "decoupled_mixed": {"mix": 1.0},
        "icepop": {"low": 0.0, "high": 1e9},
    }.items():
        found = apply(METHODS[name](**bounds), data, mask, layout).coefficient_T
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-15)


def test_opsm_never_touches_positive_advantages_and_sees_the_mismatch() -> None:
    data, mask, layout = make_data(token_advantages=False)
    without = apply(METHODS["opsm"](delta=1e9), data, mask, layout)
    assert torch.equal(without.coefficient_T, apply(METHODS["ppo"].method, data, mask, layout).coefficient_T)
    kept = [apply(METHODS["opsm"](delta=delta), data, mask, layout).kept_T for delta in (0.0, 0.2, 1.0)]
    assert kept[0].sum() < kept[1].sum() < kept[2].sum()
    for narrow, wide in itertools.pairwise(kept):
        assert bool((wide | ~narrow).all())
    assert torch.equal(kept[0][data.advantages > 0], mask[data.advantages > 0])
    # The trainer has not moved: only the engines differ.
    engines = call(METHODS["opsm"](delta=0.05), **ratios(0.9, 0.9), advantages=[-1.0, -1.0])
    assert not engines.kept_T.any()


def test_ppo_stops_no_token_that_a_band_on_both_sides_would_not() -> None:
    data, mask, layout = make_data()
    ppo, both = (
        apply(Method(surrogate=Ratio(low=0.8, high=1.2, sides=sides)), data, mask, layout).clipped_T
        for sides in ("outward", "both")
    )
    assert bool((both | ~ppo).all())
    assert both.sum() > ppo.sum() > 0


def test_m2po_keeps_as_many_tokens_as_any_choice_within_the_budget() -> None:
    for seed in range(5):
        data, mask, layout = make_data(seed=seed, num_sequences=4)
        squared = (data.x - data.behavior).square()
        outward = (mask & (data.advantages * (data.x - data.behavior) > 0)).nonzero().flatten().tolist()[:9]
        only = torch.zeros_like(mask)
        only[outward] = True
        kept = int((apply(METHODS["m2po"](budget=0.08), data, only, layout).coefficient_T != 0).sum())
        fits = [
            n
            for n in range(1, len(outward) + 1)
            if any(float(squared[list(c)].mean()) <= 0.08 for c in itertools.combinations(outward, n))
        ]
        assert kept == max(fits, default=0)


def test_dcpo_bounds_solve_their_equation_and_stop_at_the_cap() -> None:
    from mis_ext.methods.parts import ProbabilityBound

    class Fixed:
        log_probs = torch.tensor([1.0, 0.8, 0.5, 0.1, 1e-5], dtype=torch.float64).log()

        def log_prob(self, policy):
            return self.log_probs

    q = Fixed.log_probs.exp()
    for gain in (0.2, -0.05):
        ratio = ProbabilityBound(gain=gain, cap=10.0).log_edge(Fixed(), STALENESS).exp()
        solved = q * ratio * (ratio - 1)
        is_exact = (ratio < 10) & (1 + 4 * gain / q >= 0)
        torch.testing.assert_close(solved[is_exact], torch.full_like(q, gain)[is_exact])
        assert is_exact.sum() >= 3
        assert bool((ratio <= 10 + 1e-9).all() & (ratio >= 0.5).all())


def test_vespo_weighs_most_at_shape_over_scale_and_one_at_one() -> None:
    log_w = torch.linspace(-2, 2, 4001, dtype=torch.float64)
    for sign, (shape, scale) in ((1.0, (2.0, 3.0)), (-1.0, (3.0, 2.0))):
        found = call(
            METHODS["vespo"].method,
            behavior=torch.full_like(log_w, -3.0),
            proximal=log_w - 3.0,
            advantages=torch.full_like(log_w, sign),
            lengths=[1] * len(log_w),
        ).coefficient_T.abs()
        assert float(log_w[found.argmax()].exp()) == pytest.approx(shape / scale, rel=2e-3)
        assert float(found[2000]) == pytest.approx(1.0)


def test_binary_kl_bounds_the_squared_probability_difference_and_vanishes_where_policies_agree() -> None:
    p, q = torch.rand(2, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log()
    for name in ("binary_kl", "reverse_binary_kl"):
        kl = TOKEN_FORMULAS[name].function
        assert bool((kl(p, q) >= 2 * (p.exp() - q.exp()).square() - 1e-12).all())
        torch.testing.assert_close(kl(p, p), torch.zeros_like(p))
        certain = torch.zeros(1, dtype=torch.float64)
        assert kl(certain, certain) == 0.0
    assert TOKEN_FORMULAS["binary_kl"].function(p[:1], certain) == MAX_NATS


def test_self_normalised_weights_ignore_a_common_factor_and_one_sequence_is_not_corrected() -> None:
    data, mask, layout = make_data()
    method = Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH),), normalize_over="tokens")
    shifted = dataclasses.replace(data, behavior=data.behavior + 0.7)
    found = [apply(method, each, mask, layout).coefficient_T for each in (data, shifted)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    alone = call(METHODS["reinforce_sequence_snis"].method, **ratios(1.5, 0.5))
    assert alone.coefficient_T.tolist() == pytest.approx([1.0, 1.0])
    two = call(METHODS["reinforce_sequence_snis"].method, **ratios(1.5, 0.5), lengths=[1, 1])
    assert two.coefficient_T.tolist() == pytest.approx([1.5, 0.5])


def test_rejected_tokens_do_not_count_in_the_mean_weight() -> None:
    factors = (RatioWeight(pair=MISMATCH), Keep(pair=MISMATCH, high=3.0))
    method = Method(surrogate=Score(), factors=factors, normalize_over="tokens")
    found = call(method, **ratios(1.5, 0.5, math.exp(19.0)))
    assert found.coefficient_T.tolist() == pytest.approx([1.5, 0.5, 0.0])


def test_every_factor_acts_on_every_surrogate() -> None:
    data, mask, layout = make_data()
    for name in ("ppo", "bypass", "gspo", "gmpo", "sapo", "reinforce", "ctpo", "kimi_k2_5"):
        method = dataclasses.replace(METHODS[name].method, terms=())
        weighted = dataclasses.replace(method, factors=(*method.factors, RatioWeight(pair=MISMATCH, high=0.5, low=0.5)))
        found, wanted = (apply(m, data, mask, layout).coefficient_T for m in (weighted, method))
        # A half rounds nothing.
        assert torch.equal(found, 0.5 * wanted)


def test_log_probs_are_subtracted_in_float32_whatever_they_are_stored_in() -> None:
    behavior = torch.tensor([-2.0, -1.5])
    proximal = behavior + torch.tensor([0.0078125, -0.00390625])
    method = Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH),))
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
    with pytest.raises(ValueError, match=r"current has the shape \(3,\), the layout 2 tokens"):
        METHODS["reinforce"].method(
            **streams | dict.fromkeys(("advantages_T", "response_mask_T"), values[:2]), layout=PackedLayout.whole([2])
        )


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
