# SPDX-License-Identifier: Apache-2.0
"""Methods with ``compiled=True``: the numbers of the eager ones, from graphs that hold for other lengths."""

import pytest
import torch
from method_cases import apply, make_data

from mis_ext import PackedLayout
from mis_ext.hosts.groups import Groups
from mis_ext.methods import METHODS

# Between them every way to reduce; what methods do token by token is the same code for all.
CHOSEN = ["ctpo", "segment_rs", "m2po", "veto", "trm", "reinforce_sequence_psis", "clip_cov", "kl_cov"]


def test_the_methods_here_reduce_in_every_way_that_a_preset_does() -> None:
    reduces = {name: preset.method.reduces for name, preset in METHODS.items()}
    assert set().union(*(reduces[name] for name in CHOSEN)) == set().union(*reduces.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ctpo" else pytest.mark.whole_run) for name in CHOSEN]
)
def test_one_graph_holds_for_any_lengths_and_has_the_gradient_of_the_eager_method(name, graphs) -> None:
    method = METHODS[name].method
    for seed, num_sequences in enumerate((32, 47)):
        data, mask, layout = make_data(seed=seed, num_sequences=num_sequences)
        found = []
        for compiled in (True, False):
            x = data.x.clone().requires_grad_()
            result = apply(method, data, mask, layout, compiled=compiled, current_logprobs_T=x)
            assert not result.coefficient_T.requires_grad
            found.append([*result, *torch.autograd.grad(result.loss_T.sum(), x)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), num_sequences
        assert found[0][-1].abs().sum() > 0.0
    assert len(graphs) == 1


def test_every_method_has_graphs_of_its_own(graphs) -> None:
    """torch counts those of a code object and gives up after eight, here after one."""
    data, mask, layout = make_data()
    with torch._dynamo.config.patch(recompile_limit=1):
        for high in (1, 2):
            apply(METHODS["aipo"](high=float(high)), data, mask, layout, compiled=True)
    assert len(graphs) == 2


def test_beyond_the_limit_of_graphs_a_method_runs_as_it_is(graphs) -> None:
    data, mask, several = make_data()
    with torch._dynamo.config.patch(recompile_limit=1):
        # A sequence alone has a graph of its own.
        for layout in (several, PackedLayout.whole([several.num_local_tokens])):
            found, wanted = (apply(METHODS["gspo"].method, data, mask, layout, compiled=each) for each in (True, False))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(graphs) == 1


def test_a_sequence_far_longer_than_the_others_is_not_compiled(graphs) -> None:
    data, mask, layout = make_data()
    lengths = [layout.num_local_tokens - 40] + [1] * 40
    found, wanted = (
        apply(METHODS["ctpo"].method, data, mask, PackedLayout.whole(lengths), compiled=compiled)
        for compiled in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert graphs == []


@pytest.mark.parametrize("group", ["cp_group", "dp_group"])
def test_ranks_that_share_the_data_are_refused(group) -> None:
    data, mask, layout = make_data()
    with pytest.raises(ValueError, match="compiled: ranks exchange numbers inside of the method; pass no cp_group"):
        apply(METHODS["gspo"].method, data, mask, layout, compiled=True, **{group: Groups()})
