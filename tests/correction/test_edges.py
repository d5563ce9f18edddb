# SPDX-License-Identifier: Apache-2.0
"""What no comparison with the float64 judge shows: edges of bands, masked tokens, gradients, and inputs."""

import itertools
import math

import pytest
import torch
from cases import GATES, WEIGHTS, args_of, call_hook, correction_keys, flat, gates_only, random_samples, sprinkle
from reference import Samples
from rows import for_each
from thread_ranks import run_ranks

import mis_ext
from mis_ext import CorrectionConfig, Gate, Weight, compute_mis_weights
from mis_ext.correction.config import REDUCTIONS
from mis_ext.correction.tokens import binary_kl

# These bounds are far apart or near for what a ratio does in practice, and the package says so.
LENGTHS = [5, 1, 9, 3, 12, 1, 2]
LEVELS = ["token", "sequence", "geometric"]
ALL = {"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"}
weights_of_grid = pytest.mark.parametrize("weight", WEIGHTS[::4], ids=" ".join)
# Each weight has one or two of the four gates, each gate four or five weights; the judge is asked of all.
points_of_grid = for_each("weight, gate", [*itertools.product(WEIGHTS, GATES)][::3])


def weights_masks(keys: dict, samples: Samples) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights, masks, _ = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(keys),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    return weights, masks


def assert_same(first: dict, second: dict) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(nan=-7.0), second[name].nan_to_num(nan=-7.0)), name


@pytest.mark.parametrize("level", LEVELS)
def test_bands_are_closed_a_ratio_on_the_edge_is_kept_and_not_counted_as_outside(level):
    samples = Samples([torch.tensor([-0.5, -1.0])], [torch.tensor([-0.5, -1.0])], [torch.ones(2)])
    for low, high in [(1.0, 1.09), (0.92, 1.0)]:
        gate = gates_only({"reduce": REDUCTIONS[level], "low": low, "high": high})
        mode = ALL | {"tis_level": level, "tis_mode": "mask"}
        for keys in [gate, mode | {"tis_lower_bound": low, "tis_upper_bound": high}]:
            _, masks, metrics = call_hook(keys, samples)
            assert torch.equal(masks[0], torch.ones(2))
            outside = [value for name, value in metrics.items() if name.endswith(("_low", "_high"))]
            assert len(outside) >= 2
            assert not any(value.any() for value in outside)


GARBAGE = [(math.nan, 0.0), (0.0, math.nan), (math.inf, -math.inf), (-math.inf, 0.0), (0.0, math.inf)]
GARBAGE += [(3e38, -3e38), (-1e4, 0.0)]


@points_of_grid
def test_what_lies_under_masked_tokens_changes_nothing_bit_for_bit(weight, gate):
    samples = random_samples(LENGTHS, seed=31, mask=0.6)
    samples.masks[4].zero_()

    def with_garbage(pairs: list[tuple[float, float]]) -> Samples:
        """Under each masked token the next of the pairs."""
        num_tokens = sum(LENGTHS)
        columns = torch.tensor(pairs).repeat(num_tokens, 1)[:num_tokens].T
        dirty = [
            torch.where(response, torch.cat(own), garbage).split(LENGTHS)
            for own, garbage in zip((samples.train, samples.rollout), columns, strict=True)
        ]
        return Samples(*map(list, dirty), samples.masks)

    response, pg_loss = torch.cat(samples.masks) != 0, torch.linspace(-1, 1, sum(LENGTHS))
    for veto, normalizer, denominator in [("all vetoes", "kept", "kept"), ("no veto", "valid", "fixed")]:
        keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
        loss, masks, metrics = call_hook(keys, with_garbage([(0.0, 0.0)]), pg_loss=pg_loss)
        for garbage in (GARBAGE, GARBAGE[-2:]):
            dirty_loss, dirty_masks, dirty_metrics = call_hook(keys, with_garbage(garbage), pg_loss=pg_loss)
            assert torch.equal(loss, dirty_loss), garbage
            assert all(torch.equal(a, b) for a, b in zip(masks, dirty_masks, strict=True)), garbage
            assert_same(
                {name: value[response] for name, value in metrics.items()},
                {name: value[response] for name, value in dirty_metrics.items()},
            )
            assert all(value.isfinite().all() for value in dirty_metrics.values()), garbage


@weights_of_grid
def test_a_loss_that_is_not_finite_under_the_mask_does_not_leak(weight):
    samples = random_samples(LENGTHS, seed=32, mask=0.6)
    response = torch.cat(samples.masks) != 0
    pg_loss = torch.where(response, 1.0, math.nan).requires_grad_()
    loss, _, _ = call_hook(correction_keys(weight), samples, pg_loss=pg_loss)
    assert torch.equal(loss.detach()[~response], torch.zeros(int((~response).sum())))
    loss.sum().backward()
    assert pg_loss.grad.isfinite().all()


@weights_of_grid
def test_inputs_are_never_changed_and_a_call_that_recomputes_gives_the_same(weight):
    samples = sprinkle(random_samples(LENGTHS, seed=49), seed=6)
    copies = [[x.clone() for x in column] for column in (samples.train, samples.rollout, samples.masks)]
    for gate in GATES:
        keys = correction_keys(weight, gate=gate, veto="all vetoes", normalizer="kept", mis_denominator="kept")
        args = args_of(keys)
        before = dict(vars(args))
        pg_loss = torch.linspace(-1, 1, sum(LENGTHS)).requires_grad_()
        with torch.no_grad():
            first = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        second = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        assert (first[0].requires_grad, second[0].requires_grad) == (False, True)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert_same(first[2], second[2])
        assert torch.equal(pg_loss.detach(), torch.linspace(-1, 1, sum(LENGTHS)))
        assert {key: vars(args)[key] for key in before} == before
        for copy, column in zip(copies, (samples.train, samples.rollout, samples.masks), strict=True):
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(copy, column, strict=True))
        for new in first[1]:
            new.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(copies[2], samples.masks, strict=True))


@points_of_grid
def test_on_policy_input_gives_weight_exactly_one_and_keeps_everything(weight, gate):
    generator = torch.Generator().manual_seed(37)
    scored = [torch.randn(length, generator=generator) - 3 for length in LENGTHS]
    masks = [m.clone() for m in random_samples(LENGTHS, seed=37, mask=0.7).masks]
    masks[5].zero_()
    samples = Samples(scored, [s.clone() for s in scored], masks)
    for normalizer, denominator in [("no normalizer", "fixed"), ("kept", "kept"), ("valid, micro-batch", "fixed")]:
        veto = {"rs_veto_threshold": 0.999, "rs_veto_upper_threshold": 1.001}
        keys = correction_keys(weight, gate=gate, normalizer=normalizer, mis_denominator=denominator) | veto
        pg_loss = torch.randn(sum(LENGTHS), generator=generator)
        loss, new_masks, metrics = call_hook(keys, samples, pg_loss=pg_loss)
        response = torch.cat(masks) != 0
        assert torch.equal(loss[response], pg_loss[response])
        assert all(torch.equal(new.float(), old.float()) for new, old in zip(new_masks, masks, strict=True))
        ones = [f"mis_{name}" for name in ("ess_ratio_token", "ess_ratio_seq", "ratio_max", "ratio_min", "ppl_ratio")]
        ones += ["mis_kept_token_fraction", "mis_kept_seq_fraction"]
        zeros = [f"mis_{name}" for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "tv", "logprob_abs_diff")]
        zeros += [f"mis_log_ppl_{name}" for name in ("diff", "abs_diff")]
        zeros += ["mis_nonfinite_token_fraction"]
        zeros += [f"mis_train_rollout_logprob_abs_diff_{name}" for name in ("max", "nonzero")]
        ones += [n for n in metrics if n.startswith("mis_is_ratio") or "factor" in n or n.endswith("_value")]
        ones += [n for n in metrics if "tis_weight" in n]
        zeros += [n for n in metrics if n.endswith("_fraction") and ("rs_" in n or "tis_" in n or "above" in n)]
        zeros += [n for n in metrics if n.endswith(("fraction_low", "fraction_high"))]
        assert all(torch.equal(metrics[n][response], torch.ones(int(response.sum()))) for n in ones)
        assert all(not metrics[n][response].any() for n in zeros)


@points_of_grid
def test_the_gradient_is_exactly_the_weight_and_nothing_else_carries_gradient(weight, gate):
    samples = sprinkle(random_samples(LENGTHS, seed=40), seed=3)
    samples = Samples(
        [t.requires_grad_() for t in samples.train], [r.requires_grad_() for r in samples.rollout], samples.masks
    )
    for normalizer, denominator in [("no normalizer", "fixed"), ("kept", "kept")]:
        keys = correction_keys(weight, gate=gate, normalizer=normalizer, mis_denominator=denominator)
        weights, standalone_masks = weights_masks(keys, samples)
        pg_loss = torch.linspace(-2, 2, sum(LENGTHS)).requires_grad_()
        loss, masks, metrics = call_hook(keys, samples, pg_loss=pg_loss)
        loss.sum().backward()
        assert torch.equal(pg_loss.grad, torch.cat(weights))
        assert all(t.grad is None for t in samples.train + samples.rollout)
        outputs = [*weights, *standalone_masks, *masks, *metrics.values()]
        assert not any(t.requires_grad for t in outputs)


def test_a_rejected_outlier_does_not_shrink_the_survivors():
    # The fault of the reference example: one rejected e^20 scales the others to 1e-8.
    samples = Samples(
        [torch.tensor([0.0]), torch.tensor([0.0])], [torch.tensor([-20.0]), torch.tensor([0.0])], [torch.ones(1)] * 2
    )
    for level in LEVELS:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": "mask", "tis_upper_bound": 2.0}
        keys |= {"tis_batch_normalize": True, "mis_guard": "warn"}
        weights, masks = weights_masks(keys, samples)
        assert flat(masks).tolist() == [0.0, 1.0]
        assert float(weights[1]) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_the_normalizer_of_a_batch_that_is_rejected_entirely_is_one(level):
    samples = Samples([torch.tensor([-1.0, -2.0])], [torch.tensor([-8.0, -9.0])], [torch.ones(2)])
    keys = {"use_tis": True, "tis_level": level, "tis_mode": "mask", "tis_batch_normalize": True}
    keys |= ALL | {"mis_denominator": "kept"}
    loss, masks, metrics = call_hook(keys, samples)
    assert not flat(masks).any()
    assert loss.isfinite().all()
    assert torch.equal(metrics["mis_batch_norm_factor"], torch.ones(2))
    assert torch.equal(metrics["mis_denominator_factor"], torch.ones(2))


def test_a_kept_denominator_counts_what_stays_in_the_mask() -> None:
    """Half of the tokens lose their weight and stay: the others are not scaled up. Rejected, they make a factor 2."""
    proximal = [torch.tensor([-1.0, -1.0, -1.0, -1.0])]
    behavior = [torch.tensor([-1.0, -3.0, -1.0, -3.0])]
    found = {}
    for action in ("zero", "reject"):
        config = CorrectionConfig(
            weight=None, gates=(Gate(low=0.5, high=2.0, action=action),), denominator="kept", metrics="all"
        )
        weights, masks, metrics = compute_mis_weights(
            config, train_log_probs=proximal, rollout_log_probs=behavior, loss_masks=[torch.ones(4)]
        )
        found[action] = weights[0].tolist(), masks[0].tolist(), float(metrics["mis_denominator_factor"])
    assert found["zero"] == ([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], 1.0)
    assert found["reject"][1:] == ([1.0, 0.0, 1.0, 0.0], 2.0)
    assert found["reject"][0][::2] == [2.0, 2.0]


def broken_streams() -> dict:
    """Of four responses one is kept, one rejected, one without a ratio, and one without a response token."""
    return {
        "proximal_logprobs_T": torch.tensor([-1.0, -1.0, -1.0, -1.0, math.nan, math.nan, -1.0]),
        "behavior_logprobs_T": torch.tensor([-1.0, -1.0, -9.0, -9.0, -1.0, -1.0, -1.0]),
        "response_mask_R": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        "layout": mis_ext.PackedLayout.whole([2, 2, 2, 1]),
    }


def test_rejection_is_watched_by_tokens_and_responses_of_the_rank() -> None:
    config = CorrectionConfig(weight=None, gates=(Gate(low=0.5, high=2.0),))

    def watched(rank):
        return mis_ext.compute_correction(**broken_streams(), config=config, dp_group=rank.groups.dp_group).watched

    # Response, valid, and kept tokens, responses with a kept and with a response token.
    assert [found.tolist() for found in run_ranks(watched, dp_size=2)] == [[6.0, 4.0, 2.0, 1.0, 3.0]] * 2


def test_where_one_only_measures_every_token_has_weight_1_and_its_mask() -> None:
    streams, config = broken_streams(), CorrectionConfig(weight=None, metrics_only=True)
    found = mis_ext.compute_correction(**streams, config=config)
    assert found.weights_T.tolist() == [1.0] * 7
    # No configuration requested these.
    in_session = mis_ext.Session(config).correct(mis_ext.PackedStreams(**streams))
    assert found.token_metrics == in_session.token_metrics == {}
    assert torch.equal(found.loss_mask_R, streams["response_mask_R"])
    assert mis_ext.compute_correction(**streams, config=CorrectionConfig(metrics=())).metrics == {}


def test_a_kl_of_almost_equal_policies_is_never_negative() -> None:
    log_p = -torch.linspace(0.01, 3.0, 1000)
    for log_q in (log_p - 1e-4, log_p + 1e-4):
        assert (binary_kl(log_p, log_q) >= 0.0).all()


def test_a_gate_called_weight_acts_beside_the_band_of_the_weight() -> None:
    config = CorrectionConfig(
        weight=Weight(mode="mask", low=0.5, high=2.0),
        gates=(Gate(name="weight", statistic="behavior_probability", low=0.01),),
    )
    behavior = torch.tensor([-1.0, -3.0, -9.0])
    _, masks, _ = compute_mis_weights(
        config,
        train_log_probs=[behavior + torch.tensor([0.0, 2.0, 0.0])],
        rollout_log_probs=[behavior],
        loss_masks=[torch.ones(3)],
    )
    assert masks[0].tolist() == [1.0, 0.0, 0.0]
