# SPDX-License-Identifier: Apache-2.0
"""What a formula may do: nothing that a CPU computes and a GPU cannot, and it is said where there is no GPU."""

import dataclasses
import itertools
import sys
from typing import get_args

import pytest
import torch

import mis_ext
from mis_ext.correction.formula import METHODS, Formula, Symbol, check_operations, where
from mis_ext.correction.metrics import row
from mis_ext.correction.plan import plan_of
from mis_ext.correction.statistics import STATISTICS, TOKEN_FORMULAS, HookReduce, Statistic
from mis_ext.correction.weights import BOUNDS, Bound, HookLevel

pytestmark = pytest.mark.filterwarnings("ignore:a gate on", "ignore:a geometric")
UNKNOWN = {
    "tanh": lambda log_ratio: log_ratio.tanh(),
    "torch.tanh": lambda log_ratio: torch.tanh(log_ratio),
    "power": lambda log_ratio: log_ratio**2,
    "keyword": lambda log_ratio: log_ratio.clamp(min=0.0),
    "torch.where": lambda log_ratio: torch.where(log_ratio > 0.0, log_ratio, 0.0),
    "branch": lambda log_ratio: log_ratio if log_ratio > 0.0 else -log_ratio,
    "largest": lambda log_ratio: max(log_ratio, 0.0),
    "constant": lambda log_ratio: torch.ones(()),
}


def every_kind() -> list[mis_ext.CorrectionConfig]:
    """Every statistic and reduction as a gate, alone and behind another; every bound at every level."""
    first = mis_ext.Gate(high=2.0, name="first")
    gates = []
    # Each pair with one of the sides, each statistic and each reduction with all of them.
    for number, (name, reduce) in enumerate(itertools.product(STATISTICS, get_args(HookReduce))):
        sides = (("low", "high"), ("low",), ("high",))[number % 3]
        lowest = max(STATISTICS[name].low, -1.0)
        band = {side: {"low": lowest + 0.25, "high": lowest + 0.75}[side] for side in sides}
        alone = mis_ext.Gate(statistic=name, reduce=reduce, name="second", **band)
        behind = [] if alone.is_of_tokens else [dataclasses.replace(alone, after="first")]
        gates += [(first, gate) for gate in (alone, *behind)]
    weights = []
    for level, (mode, bound) in itertools.product(get_args(HookLevel), BOUNDS.items()):
        edges = {"high": 2.0} if bound.has_high else {}
        weights.append(mis_ext.Weight(level=level, mode=mode, **edges))
    gate = mis_ext.Gate(low=0.5, high=2.0)
    shared = {"metrics": "all", "denominator": "kept"}
    configs = [mis_ext.CorrectionConfig(weight=None, gates=each, **shared) for each in gates]
    for weight, over, per_token in itertools.product(weights, ("kept", "valid"), (False, True)):
        more = {"normalize_over": over, "per_token_loss": per_token}
        configs.append(mis_ext.CorrectionConfig(weight=weight, gates=(gate,), **more, **shared))
    return configs


def test_every_row_can_be_written_as_a_kernel_and_triton_is_not_needed_to_say_so(monkeypatch) -> None:
    # Whatever imports it from here on fails; that no import of ours does is said in the tests of the project.
    monkeypatch.setitem(sys.modules, "triton", None)
    for config in every_kind():
        plan_of(config)


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_a_statistic_with_an_operation_that_kernels_lack_is_refused_by_name(function, monkeypatch) -> None:
    tokens = torch.tensor([0.5, -0.5])
    if function not in (UNKNOWN["branch"], UNKNOWN["largest"]):
        assert isinstance(function(tokens), torch.Tensor), "a CPU computes it"
    monkeypatch.setitem(TOKEN_FORMULAS, "squashed", Formula.of(function))
    new = Statistic("squashed", "squashed", "none", "of a user", high=1.0)
    monkeypatch.setitem(STATISTICS, "squashed", new)
    config = mis_ext.CorrectionConfig(gates=(mis_ext.Gate(statistic="squashed", high=0.5),))
    with pytest.raises(ValueError, match=r"the formula squashed\(log_ratio\) cannot be written as a kernel") as found:
        plan_of(config)
    assert ", ".join(METHODS) in str(found.value)
    streams = torch.zeros(2)
    with pytest.raises(ValueError, match="squashed"):
        mis_ext.compute_correction(
            proximal_logprobs_T=streams,
            behavior_logprobs_T=streams,
            response_mask_R=torch.ones(2),
            layout=mis_ext.PackedLayout.whole([2]),
            config=config,
        )


def test_a_bound_and_a_metric_with_such_an_operation_are_refused_by_name(monkeypatch) -> None:
    soft = Bound("soft", lambda log_ratio, low, high: log_ratio.sigmoid() * 2.0, False, False, False, "of a user")
    monkeypatch.setitem(BOUNDS, "soft", soft)
    for level, name in (("token", "token_weight"), ("geometric", "sequence_weight")):
        with pytest.raises(ValueError, match=rf"the formula {name}\(.*has no attribute 'sigmoid'"):
            plan_of(mis_ext.CorrectionConfig(weight=mis_ext.Weight(level=level, mode="soft")))
    rows = [
        row(
            "spread",
            "sequences",
            lambda sum_log_ratio: sum_log_ratio.erf(),
            "of a user",
            core=True,
        )
    ]
    monkeypatch.setattr("mis_ext.correction.config.mismatch_rows", lambda metric_max: rows)
    with pytest.raises(ValueError, match=r"the formula amount_of_spread\(sum_log_ratio\).*'erf'"):
        # No other test has a plan of it, which would be kept.
        plan_of(mis_ext.CorrectionConfig(max_reject_fraction=0.12345))


def test_the_operations_that_a_message_offers_are_accepted() -> None:
    arguments = {"clamp": (0.0, 1.0), "clamp_min": (0.0,), "clamp_max": (1.0,)}
    x = Symbol("x", "float32")
    for name in METHODS:
        more = arguments.get(name, (x,) if name in ("minimum", "maximum") else ())
        check_operations({name: Formula(lambda x, name=name, more=more: getattr(x, name)(*more), ("x",))})
        tensors = [torch.ones(3) if isinstance(each, Symbol) else each for each in more]
        assert getattr(torch.ones(3), name)(*tensors).shape == (3,), "it means a tensor's own"
    check_operations({"where": Formula.of(lambda x: where((x > 0.0) & ~(x < 1.0), x, 0.0))})
