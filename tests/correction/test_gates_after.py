# SPDX-License-Identifier: Apache-2.0
"""A gate that looks at what another one leaves: of no token nothing is known, so an empty set passes."""

import itertools
import math

import pytest
import torch

import mis_ext
from mis_ext.correction.tokens import STATISTICS

pytestmark = pytest.mark.filterwarnings("ignore:a gate on", "ignore:a geometric")
# Of two responses the first has ratios of 4, which no band of tokens leaves, the second ratios of 1.
PROXIMAL = torch.tensor([-1.0, -1.0, -1.0, -1.5, -1.5])
BEHAVIOR = PROXIMAL - torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]) * math.log(4.0)
# The first gate leaves the mask as it is, so that the mask is that of the second.
FIRST = mis_ext.Gate(high=2.0, action="zero", name="first")
BOUNDS = [{"low": 0.1}, {"high": 0.9}, {"low": 0.1, "high": 0.9}]


def correct(*gates: mis_ext.Gate, lengths: tuple[int, ...] = (3, 2)) -> mis_ext.Correction:
    return mis_ext.compute_correction(
        proximal_logprobs_T=PROXIMAL[: sum(lengths)],
        behavior_logprobs_T=BEHAVIOR[: sum(lengths)],
        response_mask_R=torch.ones(sum(lengths)),
        layout=mis_ext.PackedLayout.whole(lengths),
        config=mis_ext.CorrectionConfig(gates=gates, metrics="all"),
        token_metrics=True,
        lag_T=torch.full((sum(lengths),), 0.5),
    )


def assert_passes(gate: mis_ext.Gate) -> None:
    found = correct(FIRST, gate)
    assert found.loss_mask_R[:3].tolist() == [1.0] * 3
    outside = [name for name in found.metrics if name.startswith("mis_second") and "fraction" in name]
    assert len(outside) == 2
    for name in outside:
        assert found.token_metrics[name][:3].tolist() == [0.0] * 3, name
    # The statistic is that of the other response alone.
    value = found.metrics["mis_second_value"]
    assert value.count == 1.0
    assert value.value() == found.token_metrics["mis_second_value"][3]
    # And of a call in which it looked at nothing there is none.
    nothing = correct(FIRST, gate, lengths=(3,))
    assert nothing.loss_mask_R.tolist() == [1.0] * 3
    assert nothing.metrics["mis_second_value"].value().isnan()
    assert nothing.token_metrics["mis_second_value"].isnan().all()


REDUCES = ["sum", "mean", "max", "min"]


# Each statistic with one reduction in turn, and each reduction with the ratio.
@pytest.mark.parametrize(
    ("statistic", "reduce"),
    dict.fromkeys([*zip(STATISTICS, itertools.cycle(REDUCES), strict=False), *(("ratio", each) for each in REDUCES)]),
)
def test_a_sequence_of_which_the_first_gate_leaves_nothing_passes_the_second(statistic, reduce) -> None:
    # Where a statistic begins at 1 its band does too.
    lowest = max(STATISTICS[statistic].low, 0.0)
    # With one side the extremes are vetoes, which ask something else than bands do.
    for bounds in BOUNDS if reduce in ("max", "min") else BOUNDS[2:]:
        band = {side: lowest + bound for side, bound in bounds.items()}
        assert_passes(mis_ext.Gate(statistic=statistic, reduce=reduce, after="first", name="second", **band))


def test_a_set_that_is_not_empty_is_judged() -> None:
    after = {"statistic": "proximal_probability", "reduce": "mean", "after": "first", "name": "second"}
    found = correct(FIRST, mis_ext.Gate(low=0.3, **after))
    # exp(-1.5) is 0.22.
    assert found.loss_mask_R.tolist() == [1.0] * 3 + [0.0] * 2
    assert found.token_metrics["mis_second_fraction_low"].tolist() == [0.0] * 3 + [1.0] * 2
