# SPDX-License-Identifier: Apache-2.0
"""Bounds that follow a target: exact over ranks, once per rollout, with a state; and what cannot follow one."""

import argparse
import dataclasses
import json
import math

import pytest
import torch
import yaml
from cases import flat, random_samples
from hook_batches import make_batch
from reference import Samples
from synchronisation import recorded
from thread_ranks import Rank, run_ranks
from triton_support import DEVICE, OBSTACLE
from zigzag import take

import mis_ext
from mis_ext import CorrectionConfig, Gate, PackedLayout, PackedStreams, Session, prepare_rollout
from mis_ext.correction.collectives import covering_value
from mis_ext.hosts.runs import session_for

LENGTHS = [7, 1, 40, 3, 19, 64, 2, 33]
PROMPTS = [3, 1, 9, 20, 2, 5, 1, 4]
# One of each kind: tokens and sequences, bands and vetoes, sides, logs and not.
GATES = {
    "band of ratios": Gate(low=0.5, high=4.0, target_accept=0.9, target_gain=1.0),
    "product": Gate(reduce="sum", low=0.5, high=2.0, target_accept=0.7, target_gain=1.0),
    "geometric": Gate(reduce="mean", low=0.99, high=1.001, target_accept=0.6, target_gain=1.0),
    "veto": Gate(reduce="min", low=1e-4, target_accept=0.8, target_gain=1.0),
    "mean of k3": Gate(statistic="k3", reduce="mean", high=0.01, target_accept=0.75, target_gain=1.0),
    "probabilities": Gate(
        statistic="probability_difference", high=0.2, action="zero", target_accept=0.8, target_gain=1.0
    ),
}
ALL = CorrectionConfig(gates=tuple(GATES.values()), metrics="all", scope="micro_batch")
LABELS = dict(zip(GATES, ALL.labelled_gates, strict=True))


def streams_of(samples: Samples) -> PackedStreams:
    return PackedStreams(
        flat(samples.train).float(),
        flat(samples.rollout).float(),
        flat(samples.masks).float(),
        PackedLayout.whole([mask.numel() for mask in samples.masks]),
    )


def on_device(streams: PackedStreams) -> PackedStreams:
    lengths = streams.layout.response_lengths
    return PackedStreams(*(stream.to(DEVICE) for stream in streams[:3]), PackedLayout.whole(lengths, device=DEVICE))


def rollout(*, seed: int, scale: float = 1.0, num: int = 64) -> PackedStreams:
    """A mismatch of `scale` tenths of a nat on tokens, heavy-tailed."""
    generator = torch.Generator().manual_seed(seed)
    proximal = -3 * torch.rand(num * 20, generator=generator)
    noise = torch.randn(num * 20, generator=generator) * (1 + torch.rand(num * 20, generator=generator).square())
    return PackedStreams(proximal, proximal - 0.1 * scale * noise, torch.ones(num * 20), PackedLayout.whole([20] * num))


def accepted(session: Session, streams: PackedStreams) -> dict[str, float]:
    """The share that each gate lets pass, by its metrics."""
    metrics = session.compute(streams, groups=mis_ext.Groups()).metrics
    outside = {}
    for name in session.config.labelled_gates:
        suffixes = ("_fraction_low", "_fraction_high", "_seq_fraction")
        keys = [f"mis_{name}{suffix}" for suffix in suffixes]
        outside[name] = sum(float(metrics[key].value()) for key in keys if key in metrics)
    return {name: 1.0 - share for name, share in outside.items()}


# --- the order statistic


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.5, 0.77, 1.0])
def test_the_order_statistic_is_that_of_a_sort(share) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(999, generator=generator) * 8).exp()
    values[::7] = values[3]
    values[5], values[6], values[8] = 0.0, -0.0, math.inf
    values[::5] *= -1.0
    values[7] = -math.inf
    counted = torch.rand(999, generator=generator) < 0.6
    counted[5:9] = True
    values[~counted] = math.nan
    ranked = sorted(values[counted].tolist())
    wanted = ranked[max(math.ceil(share * len(ranked) - 1e-9), 1) - 1]
    assert float(covering_value(values, counted, share=share, groups=())) == wanted


def test_the_order_statistic_of_nothing_is_not_a_number() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    assert covering_value(torch.ones(4), nothing, share=0.5, groups=()).isnan()
    assert covering_value(torch.ones(0), nothing[:0], share=0.5, groups=()).isnan()


def test_a_share_of_a_count_is_not_rounded_up() -> None:
    values = torch.arange(1.0, 101.0)
    # In float64 0.56 * 100 is 56.00000000000001.
    for percent in range(1, 101):
        found = covering_value(values, values > 0, share=percent / 100, groups=())
        assert float(found) == percent


# --- one rollout


def test_with_gain_one_every_gate_meets_its_target_in_this_rollout() -> None:
    session, streams = Session(ALL), rollout(seed=1)
    session.adapt(streams)
    shares = accepted(session, streams)
    for kind, gate in GATES.items():
        size = 64 * 20 if gate.reduce == "token" else 64
        least = math.ceil(gate.target_accept * size - 1e-9) / size
        # At least the target, and no more than what lies within the rounding of the bound.
        assert least - 1e-6 <= shares[LABELS[kind]] <= least + 1.5 / size, kind


def test_a_band_keeps_its_shape_and_the_metrics_say_where_it_is() -> None:
    session, streams = Session(ALL), rollout(seed=2)
    session.adapt(streams)
    bounds = session.acceptance.bounds()
    metrics = session.compute(streams, groups=mis_ext.Groups()).metrics
    for kind, gate in GATES.items():
        name = LABELS[kind]
        low, high = bounds[name]
        for side, bound, written in (("low", low, gate.low), ("high", high, gate.high)):
            key = f"mis_{name}_bound_{side}"
            assert (key in metrics) == (written is not None), key
            if written is not None:
                assert float(metrics[key].value()) == pytest.approx(bound, rel=1e-5)
        if gate.low is not None and gate.high is not None:
            assert math.log(high) / math.log(low) == pytest.approx(math.log(gate.high) / math.log(gate.low), rel=1e-6)


@pytest.mark.filterwarnings("ignore:a geometric gate")
def test_what_passes_is_what_passes_with_the_bounds_written_down() -> None:
    session, streams = Session(ALL), rollout(seed=3)
    session.adapt(streams)
    bounds = session.acceptance.bounds()
    written = [
        Gate(
            statistic=gate.statistic,
            reduce=gate.reduce,
            action=gate.action,
            low=bounds[name][0] if gate.low is not None else None,
            high=bounds[name][1] if gate.high is not None else None,
        )
        for name, gate in ALL.labelled_gates.items()
    ]
    fixed = Session(CorrectionConfig(gates=tuple(written), scope="micro_batch")).correct(streams)
    ours = session.correct(streams)
    assert torch.equal(ours.keep_mask_T, fixed.keep_mask_T)
    assert torch.equal(ours.weights_T, fixed.weights_T)
    assert 0.0 < float(ours.keep_mask_T.float().mean()) < 1.0


def test_tokens_without_a_ratio_and_masked_ones_do_not_count() -> None:
    streams = rollout(seed=4)
    mask = streams.response_mask_R.clone()
    mask[::3] = 0.0
    behavior = torch.where(mask > 0, streams.behavior_logprobs_T, math.nan)
    behavior[1] = -math.inf
    config = CorrectionConfig(gates=(GATES["band of ratios"],), scope="micro_batch")
    dirty, clean = Session(config), Session(config)
    dirty.adapt(streams._replace(response_mask_R=mask, behavior_logprobs_T=behavior))
    mask = mask.clone()
    mask[1] = 0.0
    clean.adapt(streams._replace(response_mask_R=mask))
    assert dirty.state_dict() == clean.state_dict()


def test_a_sequence_that_is_rejected_for_a_missing_ratio_does_not_count() -> None:
    streams = rollout(seed=4)
    behavior, mask = streams.behavior_logprobs_T.clone(), streams.response_mask_R.clone()
    # Of the first 32 sequences a token each is broken, and by what is left of them they would pass first.
    behavior[: 32 * 20] = streams.proximal_logprobs_T[: 32 * 20]
    behavior[: 32 * 20 : 20] = math.nan
    mask[: 32 * 20] = 0.0
    config = CorrectionConfig(gates=(GATES["geometric"], GATES["band of ratios"]), scope="micro_batch")
    broken, without = Session(config), Session(config)
    broken.adapt(streams._replace(behavior_logprobs_T=behavior))
    without.adapt(streams._replace(response_mask_R=mask))
    scales = [session.state_dict()["scales"] for session in (broken, without)]
    assert config.rejects_whole_sequences
    assert scales[0]["rs_mask"] == scales[1]["rs_mask"]
    # Tokens of a rejected sequence do count: their own gate says nothing about the others.
    assert scales[0]["rs_gate2"] < scales[1]["rs_gate2"]


def test_a_rollout_without_a_valid_token_moves_nothing() -> None:
    session = Session(ALL)
    streams = rollout(seed=4)
    session.adapt(streams._replace(response_mask_R=torch.zeros_like(streams.response_mask_R)))
    assert {*session.state_dict()["scales"].values()} == {1.0}


# --- the loop


@pytest.mark.parametrize("kind", ["band of ratios", "veto", "mean of k3"])
def test_the_loop_converges_and_follows_a_drifting_mismatch(kind) -> None:
    gate = mis_ext.Gate(**{f: getattr(GATES[kind], f) for f in ("statistic", "reduce", "low", "high", "target_accept")})
    session = Session(CorrectionConfig(gates=(gate,), metrics="all", scope="micro_batch"))
    (name,) = session.config.labelled_gates
    shares = []
    for step in range(30):
        # Three times as far apart in twelve rollouts, and then no further.
        streams = rollout(seed=step, scale=3 ** (min(step, 12) / 12), num=256)
        session.adapt(streams)
        shares.append(accepted(session, streams)[name])
    drifting, steady = torch.tensor(shares[6:12]).mean(), torch.tensor(shares[18:]).mean()
    # The scale is behind by what one rollout drifts, which for k3 is 20 %.
    assert abs(float(drifting) - gate.target_accept) < 0.2, shares
    assert abs(float(steady) - gate.target_accept) < 0.015, shares


@pytest.mark.parametrize("gain", [0.1, 0.5, 1.0])
def test_the_error_of_a_steady_mismatch_falls_by_one_minus_the_gain(gain) -> None:
    gate = Gate(low=0.5, high=4.0, target_accept=0.9)
    streams = rollout(seed=1)
    goal = Session(CorrectionConfig(gates=(dataclasses.replace(gate, target_gain=1.0),)))
    goal.adapt(streams)
    session = Session(CorrectionConfig(gates=(dataclasses.replace(gate, target_gain=gain),)))
    errors = [-math.log(goal.state_dict()["scales"]["rs_mask"])]
    for _ in range(4):
        session.adapt(streams)
        scale = session.state_dict()["scales"]["rs_mask"]
        errors.append(math.log(scale / goal.state_dict()["scales"]["rs_mask"]))
    assert errors[1:] == pytest.approx([(1 - gain) * error for error in errors[:-1]], rel=1e-3, abs=1e-5)
    assert abs(errors[0]) > 0.5


def test_a_burst_meets_the_bounds_from_before_and_moves_them_by_the_gain() -> None:
    def share_of_burst(gain: float) -> float:
        gate = Gate(low=0.8, high=1.25, target_accept=0.95, target_gain=gain)
        session = Session(CorrectionConfig(gates=(gate,), metrics="all", scope="micro_batch"))
        for step in range(40):
            session.adapt(rollout(seed=step))
        burst = rollout(seed=99, scale=8.0)
        session.adapt(burst)
        return accepted(session, burst)["rs_mask"]

    assert share_of_burst(1.0) == pytest.approx(0.95, abs=0.002)
    assert share_of_burst(0.1) < 0.5


def test_the_state_goes_through_json_and_the_next_step_is_the_same() -> None:
    first = Session(ALL)
    for step in range(3):
        first.adapt(rollout(seed=step))
    state = json.loads(json.dumps(first.state_dict()))
    second = Session(ALL)
    second.load_state_dict(state)
    streams = rollout(seed=7)
    assert torch.equal(second.correct(streams).weights_T, first.correct(streams).weights_T)
    first.adapt(streams)
    second.adapt(streams)
    assert second.state_dict() == first.state_dict()
    assert first.state_dict()["num_rollouts"] == 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"scales": {"other": 1.0}, "num_rollouts": 1}, "the state has scales of other, the configuration .* rs_mask"),
        ({"scales": {"rs_mask": 0.0}, "num_rollouts": 1}, r"scales.rs_mask must be in \[0.001, 1000\], got 0.0"),
        ({"scales": {"rs_mask": 1.0}, "num_rollouts": 1, "x": 0}, "unknown entries of the state: 'x'"),
    ],
)
def test_a_state_of_something_else_is_refused(state, message) -> None:
    session = Session(CorrectionConfig(gates=(Gate(low=0.5, high=2.0, target_accept=0.9),)))
    with pytest.raises(ValueError, match=message):
        session.load_state_dict(state)


# --- ranks


@pytest.mark.parametrize(("cp_size", "dp_size"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_has_the_bounds_of_one_rank_with_all_samples(cp_size, dp_size) -> None:
    samples = random_samples(LENGTHS, seed=5, outliers=0.1)
    alone = Session(ALL)
    alone.adapt(streams_of(samples))
    parts = [slice(0, 8)] if dp_size == 1 else [slice(0, 3), slice(3, 8)]

    def work(rank: Rank):
        part = parts[rank.dp_rank]
        mine = Samples(samples.train[part], samples.rollout[part], samples.masks[part])
        totals = [p + n for p, n in zip(PROMPTS[part], LENGTHS[part], strict=True)]
        local = {"total_lengths": totals, "cp_rank": rank.cp_rank, "cp_size": cp_size}
        streams = PackedStreams(
            flat(take(mine.train, **local)).float(),
            flat(take(mine.rollout, **local)).float(),
            flat(mine.masks).float(),
            PackedLayout.context_parallel(LENGTHS[part], **local),
        )
        session = Session(ALL)
        session.adapt(streams, groups=rank.groups)
        return session.state_dict()

    found = run_ranks(work, cp_size=cp_size, dp_size=dp_size)
    assert found == [found[0]] * len(found)
    for name, scale in alone.state_dict()["scales"].items():
        # Sums over two ranks are rounded twice.
        assert found[0]["scales"][name] == pytest.approx(scale, rel=1e-5), name


@pytest.mark.parametrize(("cp_size", "dp_size"), [(2, 1), (1, 2), (2, 2)])
def test_an_error_on_one_rank_is_known_to_all_and_moves_nothing(cp_size, dp_size) -> None:
    def work(rank: Rank):
        args = argparse.Namespace(use_tis=True, mis={"gates": [{"low": 0.5, "high": 2.0, "target_accept": 0.9}]})
        batch = make_batch(2, 8)
        local = {"total_lengths": batch["total_lengths"], "cp_rank": rank.cp_rank, "cp_size": cp_size}
        data = {"log_probs": take(batch["train_log_probs"], **local), **batch}
        data["rollout_log_probs"] = take(batch["rollout_log_probs"], **local) if rank.number else None
        with pytest.raises((ValueError, RuntimeError)) as caught:
            prepare_rollout(args, 3, data)
        return str(caught.value), session_for(args).state_dict()["num_rollouts"]

    first, *others = run_ranks(work, cp_size=cp_size, dp_size=dp_size)
    assert first[0].startswith("target_accept: rollout 3 has no rollout_log_probs")
    assert others == [("a call failed on rank 0; the error of that rank says why", 0)] * len(others)


# --- hosts


def keys(**gate: object) -> dict:
    return {
        "use_tis": True,
        "mis": {"gates": [{"low": 0.99, "high": 1.01, "target_accept": 0.8} | gate], "metrics": "all"},
    }


def test_slime_moves_the_bounds_before_each_rollout_and_the_hook_only_reads_them() -> None:
    args, batch = argparse.Namespace(**keys(target_gain=1.0)), make_batch(noise=0.2)
    prepare_rollout(args, 0, {"log_probs": batch["train_log_probs"], **batch})
    before = session_for(args).state_dict()
    first, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **batch)
    again, masks_again, _ = mis_ext.compute_mis_weights_with_cp(args, **batch)
    assert session_for(args).state_dict() == before
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(masks, masks_again, strict=True))
    assert torch.cat(masks).mean() == pytest.approx(0.8, abs=1e-6)
    low, high = session_for(args).acceptance.bounds()["rs_mask"]
    assert metrics["mis_rs_mask_bound_high"][0] == pytest.approx(high, rel=1e-5)
    assert low < 0.99
    assert high > 1.01


def test_the_normaliser_of_a_rollout_is_that_of_the_moved_bounds() -> None:
    mis = keys(target_gain=1.0)["mis"] | {"weight": {}, "normalize_over": "kept", "scope": "rollout"}
    args, batch = argparse.Namespace(use_tis=True, mis=mis), make_batch(noise=0.2)
    prepare_rollout(args, 0, {"log_probs": batch["train_log_probs"], **batch})
    log_ratio = torch.cat(batch["train_log_probs"]) - torch.cat(batch["rollout_log_probs"])
    low, high = map(math.log, session_for(args).acceptance.bounds()["rs_mask"])
    kept = (log_ratio >= low) & (log_ratio <= high)
    wanted = log_ratio.exp().clamp_max(2.0)[kept].mean()
    torch.testing.assert_close(session_for(args).rollout_scale.mean_weight, wanted, rtol=1e-5, atol=0.0)


def test_hosts_that_give_no_rollout_and_calls_before_the_first_one_are_refused_by_name() -> None:
    args, batch = argparse.Namespace(**keys()), make_batch()
    with pytest.raises(ValueError, match="target_accept: this host passes no rollout data"):
        prepare_rollout(args)
    with pytest.raises(ValueError, match=r"no rollout has set the bounds.*prepare_rollout.*Session\.adapt"):
        mis_ext.compute_mis_weights_with_cp(args, **batch)


def test_whole_samples_are_their_own_rollout() -> None:
    batch = make_batch(noise=0.2)
    lists = {name: batch[name] for name in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    _, masks, _ = mis_ext.compute_mis_weights(mis_ext.config_from_mapping(keys()), **lists)
    assert torch.cat(masks).mean() == pytest.approx(0.8, abs=1e-6)


def test_the_hook_reads_no_value_and_the_scales_are_there_before_it_is_called(monkeypatch) -> None:
    args, batch, enough = argparse.Namespace(**keys()), make_batch(noise=0.2), make_batch(4, 200)
    # The warning about too much rejection is given once, and then its watch ends.
    args.mis |= {"guard": "warn", "max_reject_fraction": 1.0}
    prepare_rollout(args, 0, {"log_probs": enough["train_log_probs"], **enough})
    mis_ext.compute_mis_weights_with_cp(args, **enough)
    prepare_rollout(args, 1, {"log_probs": batch["train_log_probs"], **batch})
    scales = session_for(args).acceptance.scales_on(torch.device("cpu"))
    with recorded(monkeypatch, scales, *batch["train_log_probs"], *batch["rollout_log_probs"]) as recorder:
        mis_ext.compute_mis_weights_with_cp(args, **batch)
    assert len(recorder.names) > 20


@pytest.mark.whole_run
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_both_backends_take_the_scales_and_a_new_bound_compiles_nothing(monkeypatch) -> None:
    first, second = (on_device(rollout(seed=seed, num=12)) for seed in (6, 7))
    found = []
    for backend in ("eager", "triton"):
        monkeypatch.setenv("MIS_EXT_BACKEND", backend)
        session = Session(ALL)
        session.adapt(first)
        correction = session.compute(first, groups=mis_ext.Groups(), token_metrics=True)
        bounds = {name: float(values[0]) for name, values in correction.token_metrics.items() if "_bound_" in name}
        found.append((correction.weights_T, correction.loss_mask_R, session.state_dict()["scales"], bounds))
    eager, triton = found
    assert torch.equal(eager[1], triton[1])
    torch.testing.assert_close(eager[0], triton[0], rtol=1e-6, atol=1e-7)
    assert eager[2] == pytest.approx(triton[2], rel=1e-5)
    assert eager[3] == pytest.approx(triton[3], rel=1e-5)
    assert len(eager[3]) == 9

    from mis_ext.correction.triton.generate import programs_of

    compiled, before = programs_of.cache_info().misses, session.state_dict()
    session.adapt(second)
    session.compute(second, groups=mis_ext.Groups())
    assert session.state_dict() != before
    assert programs_of.cache_info().misses == compiled


# --- what cannot follow a target


REFUSED = {
    "statistic: proximal_probability, reduce: min, low: 1.0e-6": "needs a statistic with an on-policy value",
    "statistic: exp_abs_log_ratio, reduce: mean, high: 1.1": "a statistic that is 0 on-policy .*exp_abs_log_ratio is 1",
    "low: 1.1, high: 2.0": "must lie inside: got low=1.1 and high=2.0",
    "statistic: k3, low: 0.1, high: 0.5": "must lie inside: got low=0.1",
    "reduce: sum, low: 0.5, high: 2.0, after: first": "does not go with after",
}


@pytest.mark.filterwarnings("ignore:a gate on")
@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=REFUSED)
def test_gates_that_cannot_follow_a_target_are_refused(text, message) -> None:
    gates = yaml.safe_load(f"[{{name: first, high: 3.0}}, {{{text}, target_accept: 0.9}}]")
    with pytest.raises(ValueError, match=message):
        mis_ext.config_from_mapping({"mis": {"gates": gates}})


@pytest.mark.parametrize("target", [0.0, 1.0, 1.5])
def test_a_target_is_a_share_between_nothing_and_all(target) -> None:
    with pytest.raises(ValueError, match=r"target_accept must be in \(0, 1\)"):
        Gate(low=0.5, target_accept=target)


def test_a_gain_without_a_target_and_a_target_of_a_condition_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target_gain=0\.2 has no effect without target_accept"):
        Gate(low=0.5, target_gain=0.2)
    condition = Gate(reduce="max", high=3.0, target_accept=0.9)
    with pytest.raises(ValueError, match="target_accept, action, after and name have no effect"):
        mis_ext.Weight(level="sequence", only_outside=condition)


def test_without_a_target_a_session_has_nothing_to_adapt_and_an_empty_state() -> None:
    session = Session(CorrectionConfig())
    session.adapt(rollout(seed=0))
    assert session.state_dict() == {"scales": {}, "num_rollouts": 0}
    session.load_state_dict(session.state_dict())
