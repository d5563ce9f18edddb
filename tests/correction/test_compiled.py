# SPDX-License-Identifier: Apache-2.0
"""The correction as graphs: few of them, the numbers of eager passes, one mode on all ranks."""

import random
import threading
import warnings

import pytest
import torch
from cases import args_of, random_samples
from thread_ranks import run_ranks

import mis_ext
from mis_ext.correction import compiled
from mis_ext.correction.correct import Inputs, plan_of, run_passes
from mis_ext.correction.layout import PackedLayout

CONFIGS = {
    "weights of tokens": mis_ext.CorrectionConfig(normalize_over="valid", denominator="kept"),
    "weights of responses": mis_ext.CorrectionConfig(
        weight=mis_ext.Weight(level="sequence", mode="clip", low=0.5, high=2.0),
        gates=(
            mis_ext.Gate(low=0.5, high=2.0, name="first"),
            mis_ext.Gate(statistic="k3", reduce="mean", high=0.1, name="second"),
            mis_ext.Gate(reduce="segment_mean", low=0.9, high=1.1, action="zero", name="turns"),
        ),
        metrics="all",
    ),
}


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that are captured as a whole and run as captured: Inductor takes half a minute."""
    captured = []

    def backend(graph, _inputs):
        captured.append(graph)
        return graph.forward

    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiles(function, backend=backend, **more))
    torch._dynamo.reset()
    forget = compiled.graphs_of.cache_clear
    forget()
    yield captured
    forget()


def correction_of(config, lengths, *, seed):
    generator = torch.Generator().manual_seed(seed)
    behavior_T = -3.0 * torch.rand(sum(lengths), generator=generator)
    proximal_T = behavior_T + 0.1 * torch.randn(sum(lengths), generator=generator)
    if seed == 3:
        proximal_T, behavior_T = proximal_T.bfloat16(), behavior_T.bfloat16()
    return mis_ext.compute_correction(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        response_mask_R=(torch.rand(sum(lengths), generator=generator) > 0.1).float(),
        layout=PackedLayout.whole(lengths),
        config=config,
        token_metrics=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_graph_holds_for_calls_of_any_lengths_and_has_the_numbers_of_eager_passes(
    config, graphs, monkeypatch
) -> None:
    compared, said, checked = [], [], []
    choose = compiled._guards_of_call

    def spy(guards):
        chosen = choose(guards)
        compared.extend(guard.name for guard, is_kept in zip(guards, chosen, strict=True) if is_kept)
        return chosen

    monkeypatch.setattr(compiled, "_guards_of_call", spy)
    monkeypatch.setattr(compiled._LOG, "info", lambda text, *_: said.append(text))
    check_equal = compiled._check_equal
    monkeypatch.setattr(compiled, "_check_equal", lambda *found: (checked.append(1), check_equal(*found)))
    draw = random.Random(0)
    # First as many tokens as responses.
    shapes = [[1, 1], [1], [40], [64, 64], [2000], [40, 0], [0, 0], []]
    shapes += [[draw.choice([1, 2, 30, 130, 1100]) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    for seed, lengths in enumerate(shapes):
        found, expected = (correction_of(config.replace(compile=mode), lengths, seed=seed) for mode in (True, False))
        torch.testing.assert_close(found.weights_T, expected.weights_T, rtol=1e-6, atol=0.0)
        assert torch.equal(found.loss_mask_R, expected.loss_mask_R)
        assert [x.shape for x in found._found] == [x.shape for x in expected._found]
        torch.testing.assert_close(found.token_metrics, expected.token_metrics, rtol=1e-5, atol=1e-6, equal_nan=True)
        for name, metric in expected.metrics.items():
            torch.testing.assert_close(
                found.metrics[name].value(), metric.value(), rtol=1e-5, atol=1e-6, equal_nan=True
            )
    # A call compares its own tensors and sizes, and not its configuration.
    assert {"x.proximal_T", "x.mask_T", "num_blocks"} <= {*compared}
    assert not [name for name in compared if "plan" in name]
    (graph,) = graphs
    assert not [node.name for node in graph.graph.nodes if node.op == "placeholder" and "plan" in node.name]
    # Every graph asks for the mode of gradients, and the like; without this choice there were 600.
    assert len(compared) < 40
    # In the first call alone.
    assert len(said) == len(checked) == 1
    # In a view, torch 2.11 searches from the start of its memory on a GPU: these are results.
    searched = [node.args[1].target for node in graph.graph.nodes if node.target is torch.bucketize]
    assert searched == ["cumsum"] * 2


def graphs_with(change, monkeypatch) -> None:
    """Graphs that are the passes themselves with a change."""

    def parts(self, x, layout, *exchanges):
        return change(run_passes(x, layout.blocks, self._plan, *exchanges))

    monkeypatch.setattr(compiled, "graphs_of", lambda *config, **more: compiled.Graphs(plan_of(*config, **more)))
    monkeypatch.setattr(compiled.Graphs, "parts", parts)


WRONG = {
    "weights": lambda p: p._replace(weights_T=1.1 * p.weights_T),
    "mask": lambda p: p._replace(loss_mask_T=torch.zeros_like(p.loss_mask_T)),
    "sums": lambda p: p._replace(own_A=1.1 * p.own_A),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_graphs_with_other_numbers_are_not_used(change, monkeypatch) -> None:
    graphs_with(change, monkeypatch)
    config = CONFIGS["weights of tokens"]
    expected = correction_of(config.replace(compile=False), [3, 50], seed=0)
    with pytest.warns(mis_ext.MismatchWarning, match="mis_compile: .*compiled and eager .* differ"):
        found = correction_of(config.replace(compile=True), [3, 50], seed=0)
    assert torch.equal(found.weights_T, expected.weights_T)
    assert torch.equal(found.loss_mask_R, expected.loss_mask_R)
    assert found.metrics["mis_k3_kl"].value() == expected.metrics["mis_k3_kl"].value()


def test_graphs_are_used_where_one_token_of_a_hundred_is_on_the_other_side_of_a_bound(monkeypatch) -> None:
    at_bound_T = torch.arange(100) == 7
    graphs_with(lambda p: p._replace(loss_mask_T=p.loss_mask_T.where(~at_bound_T, 2.0)), monkeypatch)
    found = correction_of(CONFIGS["weights of tokens"].replace(compile=True), [60, 40], seed=0)
    assert found.loss_mask_R[7] == 2.0


def test_too_little_memory_is_no_obstacle_to_graphs(monkeypatch) -> None:
    def change(_):
        raise torch.cuda.OutOfMemoryError("in a graph")

    graphs_with(change, monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="in a graph"):
        correction_of(CONFIGS["weights of tokens"].replace(compile=True), [3, 5], seed=0)


def test_outputs_follow_from_what_the_ranks_exchange_and_a_rank_that_fails_stops_no_graphs(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    layout, plan = PackedLayout.whole([3, 70]), plan_of(CONFIGS["weights of tokens"], token_metrics=True)
    x = Inputs(-torch.rand(73), -torch.rand(73), torch.ones(73), None, None)
    failed = 2.0

    def over(sums):
        others = torch.arange(1.0, len(sums) + 1.0, dtype=sums.dtype).view(-1, *[1] * (sums.ndim - 1))
        others[-1] = failed
        return torch.cat([sums[:-1] + others[:-1], torch.maximum(sums[-1:], others[-1:].expand_as(sums[-1:]))])

    graphs = compiled.Graphs(plan)
    for over_cp, over_dp in [(over, over), (over, None), (None, over)]:
        expected = run_passes(x, layout.blocks, plan, over_cp, over_dp)
        for _ in ("first", "later"):
            torch.testing.assert_close(graphs.run(x, layout, over_cp, over_dp), expected, equal_nan=True)
    assert graphs.obstacle is None


@pytest.mark.slow
def test_what_keeps_torch_from_compiling_is_told_and_the_call_has_its_numbers(monkeypatch) -> None:
    def backend(_graph, _inputs):
        raise RuntimeError("no compiler for this machine")

    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiles(function, backend=backend, **more))
    monkeypatch.setattr(compiled, "graphs_of", lambda *config, **more: compiled.Graphs(plan_of(*config, **more)))
    config = CONFIGS["weights of tokens"]
    with pytest.warns(mis_ext.MismatchWarning, match="mis_compile: .* no compiler for this machine"):
        found = correction_of(config.replace(compile=True), [3, 5], seed=0)
    assert torch.equal(found.weights_T, correction_of(config.replace(compile=False), [3, 5], seed=0).weights_T)


def test_in_a_graph_of_the_user_the_correction_makes_none(monkeypatch) -> None:
    config = CONFIGS["weights of tokens"]
    expected = correction_of(config.replace(compile=False), [3, 0, 70], seed=0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(compiled, "graphs_of", None)
    found = correction_of(config.replace(compile=True), [3, 0, 70], seed=0)
    torch.testing.assert_close(found.token_metrics, expected.token_metrics)


OF_CALLS = [9, 30, 4], [30, 1], [7]
"""Lengths. In the second call one rank has a single block, in the last both have a single response."""


def hook(rank, config_keys, seed):
    lengths = OF_CALLS[seed]
    samples, totals = random_samples(lengths, seed=seed), [length + 3 for length in lengths]
    layout = PackedLayout.context_parallel(
        lengths, total_lengths=totals, cp_rank=rank.cp_rank, cp_size=rank.groups.cp_size
    )
    local = [
        [*torch.split(layout.local_part(torch.cat(column)), layout.local_lengths)]
        for column in (samples.train, samples.rollout)
    ]
    return mis_ext.compute_mis_weights_with_cp(
        config_keys,
        pg_loss=torch.ones(layout.num_local_tokens),
        train_log_probs=local[0],
        rollout_log_probs=local[1],
        loss_masks=samples.masks,
        total_lengths=totals,
        response_lengths=lengths,
        parallel_state=rank.parallel_state,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["all compile", "one does not"])
def test_ranks_have_graphs_from_the_second_call_on_or_none_has(fails, graphs, monkeypatch) -> None:
    keys = {"use_tis": True, "tis_mode": "mask", "tis_lower_bound": 0.7, "tis_upper_bound": 1.5, "mis_guard": "warn"}
    keys |= {"mis_max_reject_fraction": 1.0}
    # Ranks are threads here: each has graphs and a number of its own, as processes do.
    here, of_rank, used, eager_passes = threading.local(), {}, [], []

    def graphs_of_rank(config, *, token_metrics):
        made = of_rank.setdefault(here.number, compiled.Graphs(plan_of(config, token_metrics=token_metrics)))
        if fails and here.number == 1 and not made.is_agreed:
            made.obstacle = "no compiler"
        return made

    def counted_passes(*args, **more):
        eager_passes.append(1)
        return run_passes(*args, **more)

    parts = compiled.Graphs.parts
    if fails:
        # What is compiled does not matter to what ranks tell each other.
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiled, "global_rank", lambda: here.number)
    monkeypatch.setattr(compiled.correct, "run_passes", counted_passes)
    monkeypatch.setattr(compiled, "graphs_of", graphs_of_rank)
    monkeypatch.setattr(compiled.Graphs, "parts", lambda *args: (used.append(1), parts(*args))[1])

    def work(rank):
        here.number = rank.number
        args = args_of(keys | {"mis_compile": True})
        return [hook(rank, args, seed) for seed in (0, 1, 2)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(work, cp_size=2)
    num_eager_passes = len(eager_passes)
    expected = run_ranks(
        lambda rank: [hook(rank, args_of(keys | {"mis_compile": False}), seed) for seed in (0, 1, 2)],
        cp_size=2,
    )
    for calls, eager in zip(found, expected, strict=True):
        for one, other in zip(calls, eager, strict=True):
            torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0.0)
            assert all(map(torch.equal, one[1], other[1]))
    said = [str(each.message) for each in caught if "mis_compile" in str(each.message)]
    if fails:
        # The trial of the rank that can, and no later call.
        assert len(used) == 1
        assert ["rank 1 could not compile" in text for text in said] == [True]
        assert {graphs.obstacle for graphs in of_rank.values()} == {"no compiler", "rank 1 could not compile"}
    else:
        # A trial, and two calls, of each rank; three graphs, which the trial has made.
        assert len(used) == 6
        # Of each rank the first call, and what its trial is compared with.
        assert num_eager_passes == 4
        assert len(graphs) == 6
        assert said == []
