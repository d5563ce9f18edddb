# SPDX-License-Identifier: Apache-2.0
"""The worst token of all has no finite ratio: it fails every veto of its sequence, in the correction and in methods."""

import math
from argparse import Namespace

import pytest
import torch
from flat_keys import keys_of
from thread_ranks import Rank, run_ranks
from zigzag import take

import mis_ext
from mis_ext.methods import METHODS, KlTerm, Method, PairGate, PairWeight, ParetoWeight, Ratio, Score
from mis_ext.methods.batch import MISMATCH
from mis_ext.methods.first_update import as_correction

VETOES = {
    "rs_catastrophic": {"rs_veto_threshold": 1e-4},
    "rs_veto_upper": {"rs_veto_upper_threshold": 100.0},
    "rs_veto_probability": {"rs_veto_probability": 1e-6},
}
BROKEN = [("train", -math.inf), ("train", math.nan), ("rollout", math.inf), ("rollout", math.nan)]
LENGTHS = [10, 4]


def batch(stream: str = "train", value: float = -math.inf, *, at: int = 7) -> dict[str, list[torch.Tensor]]:
    """Two responses on which both engines agree, but for one token of the first."""
    columns = {name: [torch.full((length,), -1.0) for length in LENGTHS] for name in ("train", "rollout")}
    columns[stream][0][at] = value
    return columns


def gates(*gates: dict) -> dict:
    return keys_of(gates=gates)


def hook(keys: dict, columns: dict[str, list[torch.Tensor]], *, rank: Rank | None = None) -> tuple:
    totals = [length + 3 for length in LENGTHS]
    if rank is not None:
        place = {"cp_rank": rank.cp_rank, "cp_size": rank.groups.cp_size, "total_lengths": totals}
        columns = {name: take(column, **place) for name, column in columns.items()}
    return mis_ext.compute_mis_weights_with_cp(
        Namespace(**{"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"} | keys),
        pg_loss=torch.ones(sum(map(len, columns["train"]))),
        train_log_probs=columns["train"],
        rollout_log_probs=columns["rollout"],
        loss_masks=[torch.ones(length) for length in LENGTHS],
        total_lengths=totals,
        response_lengths=LENGTHS,
        parallel_state=None if rank is None else rank.parallel_state,
    )


@pytest.mark.parametrize(("veto", "stream", "value"), [(veto, *broken) for veto in VETOES for broken in BROKEN])
def test_a_token_without_a_finite_ratio_vetoes_its_sequence_and_no_other(veto, stream, value):
    _, masks, metrics = hook(VETOES[veto], batch(stream, value))
    assert [mask.tolist() for mask in masks] == [[0.0] * 10, [1.0] * 4]
    first, second = 0, 10
    assert metrics[f"mis_{veto}_token_fraction"][[first, second]].tolist() == pytest.approx([0.1, 0.0])
    assert metrics[f"mis_{veto}_seq_fraction"][[first, second]].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("stream", "value"), BROKEN)
def test_without_a_veto_the_other_tokens_of_its_sequence_train(stream, value) -> None:
    assert [int(mask.sum()) for mask in hook({}, batch(stream, value))[1]] == [9, 4]


def test_a_response_without_any_finite_ratio_counts_as_vetoed() -> None:
    columns = batch()
    columns["train"][0][:] = -math.inf
    metrics = hook(VETOES["rs_catastrophic"], columns)[2]
    assert metrics["mis_rs_catastrophic_token_fraction"][[0, 10]].tolist() == [1.0, 0.0]
    assert metrics["mis_rs_catastrophic_seq_fraction"][[0, 10]].tolist() == [1.0, 0.0]


def test_a_veto_that_zeroes_takes_the_weight_of_the_sequence_and_leaves_its_mask() -> None:
    gate = {"reduce": "min", "low": 1e-4, "action": "zero"}
    loss, masks, _ = hook(gates(gate), batch())
    assert loss.tolist() == [0.0] * 10 + [1.0] * 4
    assert masks[0].tolist() == [1.0] * 7 + [0.0] + [1.0] * 2


@pytest.mark.parametrize("gate", [{"reduce": "min", "low": 1e-4, "high": 9.0}, {"reduce": "max", "low": 1e-4}])
def test_a_gate_on_extremes_that_is_no_veto_looks_at_what_has_a_ratio(gate) -> None:
    assert [int(mask.sum()) for mask in hook(gates(gate), batch())[1]] == [9, 4]


@pytest.mark.parametrize(("cp_size", "at"), [(cp_size, at) for cp_size in (2, 4) for at in (0, 7)])
def test_every_context_parallel_rank_vetoes_what_one_of_them_sees(cp_size, at) -> None:
    found = run_ranks(lambda rank: hook(VETOES["rs_catastrophic"], batch(at=at), rank=rank), cp_size=cp_size)
    assert [[mask.tolist() for mask in masks] for _, masks, _ in found] == [[[0.0] * 10, [1.0] * 4]] * cp_size
    for name, of_each_token in {"token": 0.1, "seq": 1.0}.items():
        values = torch.cat([metrics[f"mis_rs_catastrophic_{name}_fraction"] for _, _, metrics in found])
        assert sorted(values.tolist()) == [0.0] * 4 + [pytest.approx(of_each_token)] * 10


# --- methods


def apply(method: Method, columns: dict[str, list[torch.Tensor]], *, rank: Rank | None = None):
    totals = [length + 3 for length in LENGTHS]
    layout, groups = mis_ext.PackedLayout.whole(LENGTHS), {}
    if rank is not None:
        place = {"cp_rank": rank.cp_rank, "cp_size": rank.groups.cp_size, "total_lengths": totals}
        columns = {name: take(column, **place) for name, column in columns.items()}
        layout = mis_ext.PackedLayout.context_parallel(LENGTHS, **place)
        groups = {"cp_group": rank.groups.cp_group}
    proximal_T, behavior_T = torch.cat(columns["train"]), torch.cat(columns["rollout"])
    return method(
        current_logprobs_T=proximal_T,
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        advantages_T=torch.ones_like(proximal_T),
        response_mask_T=torch.ones_like(proximal_T),
        layout=layout,
        **groups,
    )


@pytest.mark.parametrize("name", ["veto", "intellect_3"])
@pytest.mark.parametrize(("stream", "value"), BROKEN)
def test_a_method_with_a_veto_rejects_the_sequence_of_a_token_without_a_ratio(name, stream, value) -> None:
    found = apply(METHODS[name].method, batch(stream, value))
    assert found.kept_T.tolist() == [False] * 10 + [True] * 4
    assert found.coefficient_T.tolist() == [0.0] * 10 + [1.0] * 4
    assert found.valid_T.sum() == 13
    assert found.num_invalid == 1


def test_the_hook_and_the_method_veto_the_same() -> None:
    found = as_correction(METHODS["veto"].method)
    layout = mis_ext.PackedLayout.whole(LENGTHS)
    columns = {name: torch.cat(column) for name, column in batch().items()}
    streams = mis_ext.PackedStreams(columns["train"], columns["rollout"], torch.ones(14), layout)
    correction = mis_ext.Session(found.config).correct(streams)
    assert torch.equal(correction.keep_mask_T, apply(METHODS["veto"].method, batch()).kept_T)


@pytest.mark.parametrize(
    ("gate", "kept"),
    [
        ({"reduce": "max", "statistic": "k2", "high": 9.0}, 0),
        ({"reduce": "max", "statistic": "k2", "high": 9.0, "when": "negative"}, 9),
        ({"reduce": "min", "low": 0.5, "of_tokens": "negative"}, 0),
        ({"reduce": "min", "low": 0.0}, 0),
        ({"reduce": "min", "low": 0.5, "high": 9.0}, 9),
        ({"reduce": "max", "low": 0.5}, 9),
        ({"low": 0.5}, 9),
    ],
)
def test_of_the_gates_of_methods_only_one_sided_extremes_are_vetoes(gate, kept) -> None:
    method = Method(surrogate=Score(), factors=(PairGate(pair=MISMATCH, **gate),))
    assert apply(method, batch()).kept_T[:10].sum() == kept


@pytest.mark.parametrize("reduce", ["token", "mean", "min", "max"])
@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"low": 1.0}, 4),
        ({"high": 1.0}, 4),
        ({"low": 1.0, "high": 1.0}, 4),
        ({"low": 1.001}, 0),
        ({"high": 0.999}, 0),
        ({"low": 0.5, "high": 0.999}, 0),
        ({"low": 1.001, "high": 2.0}, 0),
    ],
)
def test_a_gate_of_a_method_keeps_what_lies_on_its_bounds(reduce, bounds, kept) -> None:
    """Of a response without a broken token: all ratios are 1."""
    method = Method(surrogate=Score(), factors=(PairGate(pair=MISMATCH, reduce=reduce, **bounds),))
    assert apply(method, batch()).kept_T[10:].sum() == kept


@pytest.mark.parametrize(("of_tokens", "kept"), [("always", 0), ("positive", 0), ("negative", 4)])
def test_a_veto_of_a_method_looks_at_the_tokens_that_it_counts(of_tokens, kept) -> None:
    """Of a response without a broken token: all ratios are 1, all advantages positive."""
    method = Method(surrogate=Score(), factors=(PairGate(pair=MISMATCH, reduce="min", low=2.0, of_tokens=of_tokens),))
    assert apply(method, batch()).kept_T[10:].sum() == kept


@pytest.mark.parametrize("cp_size", [2, 4])
def test_methods_veto_on_every_context_parallel_rank_what_one_of_them_sees(cp_size) -> None:
    for method in (METHODS["veto"].method, METHODS["intellect_3"].method):
        found = run_ranks(lambda rank, method=method: apply(method, batch(), rank=rank), cp_size=cp_size)
        assert sum(int(each.kept_T.sum()) for each in found) == 4


def test_a_bound_of_one_token_stays_a_bound_of_a_sum_up_to_the_token() -> None:
    """A sum of differences of probabilities may be larger than each."""
    gate = PairGate(pair=MISMATCH, statistic="probability_difference", reduce="prefix", high=1.0)
    streams = {"proximal_logprobs_T": torch.full((4,), 0.7).log(), "behavior_logprobs_T": torch.full((4,), 0.1).log()}
    found = Method(surrogate=Score(), factors=(gate,))(
        current_logprobs_T=streams["proximal_logprobs_T"],
        **streams,
        advantages_T=torch.ones(4),
        response_mask_T=torch.ones(4),
        layout=mis_ext.PackedLayout.whole([4]),
    )
    assert found.kept_T.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mis_ext.Gate(low=False), "low must be a number"),
        (lambda: mis_ext.Gate(reduce="prefix", high=2.0), "reduce must be one of .*, got 'prefix'"),
        (lambda: PairGate(when="stale"), "when must be one of .*, got 'stale'"),
        (lambda: PairGate(statistic="lag", high=1.0), "statistic must be one of .*, got 'lag'"),
        (lambda: PairGate(reduce="median", high=2.0), "reduce must be one of token .* batch_rank_mean, got 'median'"),
        (lambda: PairGate(action="rejct", high=2.0), "action must be one of .*, got 'rejct'"),
        (lambda: PairGate(low=3.0, high=2.0), "low must be at most high, got low=3.0 and high=2.0"),
        (lambda: PairWeight(low=math.nan), "low must be at most high, got low=nan and high=inf"),
        (
            lambda: Method(surrogate=Score(), factors=(mis_ext.Gate(name="x", high=2.0),)),
            r"factors\[0\] must be a Factor, got Gate",
        ),
        (lambda: Method(surrogate=Score), "surrogate must be a Surrogate, got <class"),
        (lambda: Method(surrogate=Score(), terms=KlTerm(estimator="k3", scale=1.0)), "terms must be a tuple, got Kl"),
        (lambda: Method(surrogate=Score(), terms=(Score(),)), r"terms\[0\] must be a Term, got Score"),
        (lambda: Method(surrogate=Score(), normalize_over="token"), "normalize_over must be one of .*, got 'token'"),
        (lambda: KlTerm(estimator="k4", scale=1.0), r"estimator must be one of k1 \| k2 \| .*, got 'k4'"),
        (lambda: KlTerm(estimator="k3", scale=1.0, importance=("current", "old")), "importance must be .*, got 'old'"),
        (lambda: Ratio(sides="inward"), r"sides must be one of outward \| both, got 'inward'"),
        (lambda: Ratio(spread="token_wise"), r"spread must be one of token \| sequence, got 'token_wise'"),
        (lambda: Ratio(level="tokens"), "level must be one of token .*, got 'tokens'"),
        (
            lambda: Ratio(level="sequence", spread="sequence"),
            "level must be geometric with spread='sequence', got 'seq",
        ),
        (lambda: Ratio(pair=MISMATCH), "pair: the numerator must be one of current, got 'proximal'"),
        (lambda: Ratio(low=1.2, high=0.8), "low must be at most high, got low=1.2 and high=0.8"),
        (lambda: PairGate(pair=("current", "old"), high=2.0), "pair must be one of behavior .*, got 'old'"),
        (lambda: PairWeight(pair=["current", "behavior"]), "pair must be a tuple of two policies, got"),
        (lambda: ParetoWeight(pair="current"), "pair must be a tuple of two policies, got 'current'"),
    ],
)
def test_what_would_be_ignored_is_refused_with_key_and_value(make, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
