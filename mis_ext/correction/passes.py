"""What a backend does between the collectives, and what the pipeline gets from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mis_ext.correction.formula import NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import TokenRatios, compute_log_ratio
from mis_ext.correction.normalization import SCALE_FORMULAS, WeightScale
from mis_ext.correction.plan import Plan


class Streams(NamedTuple):
    """What comes in: log-probs of the local tokens ``[T]``, and the mask of whole responses ``[R]``, any dtype."""

    proximal_logprobs_T: Tensor
    behavior_logprobs_T: Tensor
    response_mask_R: Tensor

    def token_ratios(self, layout: PackedLayout) -> TokenRatios:
        """``[T]`` log-ratios of the local tokens in nats, float32, with the masks that say which are valid."""
        return compute_log_ratio(
            proximal_logprobs_T=self.proximal_logprobs_T,
            behavior_logprobs_T=self.behavior_logprobs_T,
            response_mask_T=layout.local_part(self.response_mask_R).bool(),
        )


class Sequences(Protocol):
    """What the pass over sequences found: numbers of each sequence, and totals of this call."""

    @property
    def totals_A(self) -> Tensor:
        """Totals of this call, in the order of the plan; behind them the status of the ranks."""

    @property
    def values(self) -> NamedValues:
        """Numbers of each sequence ``[S]``, by the names of the plan."""


class Outputs(NamedTuple):
    """What the last pass writes; neither weights nor a mask where nothing is corrected (``metrics_only``).

    ``weights_T``: ``[T]`` float32, 0 where a token has none. ``loss_mask_R``: ``[R]`` float32, the given mask where a
    token of the whole responses stays in the loss, else 0. ``token_metrics``: ``[T]`` by public name.
    """

    weights_T: Tensor | None
    loss_mask_R: Tensor | None
    token_metrics: dict[str, Tensor]


class Backend(Protocol):
    """One call's passes, in this order; between them :mod:`mis_ext.correction.pipeline` communicates."""

    streams: Streams
    layout: PackedLayout
    plan: Plan
    band_scales_N: Tensor

    @property
    def tokens(self) -> TokenRatios:
        """Log-ratios of the local tokens, computed once where the passes need them as tensors too."""

    def take_segments(self, segments_FT: Tensor) -> None:
        """The plan's ``segment_names`` of each local token; before any other pass, where there are some."""

    def token_statistics(self) -> Tensor:
        """``[F + 1, S]``, this rank's share of the plan's columns, and a row for the status: ``inf``, no failure."""

    def keep_bits(self) -> Tensor:
        """uint8, one bit per token of the whole responses: set where a local token passes the gates on tokens."""

    def sequences(self, gathered_WFS: Tensor) -> Sequences:
        """What follows for sequences from the shares of all context-parallel ranks."""

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """``[A]`` totals of all data-parallel ranks from those of each."""

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_A: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        token_metrics: bool,
    ) -> Outputs:
        """Weights, masks, and where asked for the metrics of each token's sequence."""

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """``[T]`` values times weights, 0 where the weight is 0, whatever the value; the gradient is the weight."""


def total_values(plan: Plan, totals_A: Tensor) -> dict[str, Tensor]:
    """Totals by name, 0-dim; a maximum was stored as the minimum of negated values."""
    return {
        total.name: -value if total.operation == "max" else value
        for total, value in zip(plan.totals, totals_A.unbind()[:-1], strict=True)
    }


def with_scatters(plan: Plan, sums_A: Tensor, *, of_rows_AN: Tensor) -> Tensor:
    """The sums of what sequences or ranks gave, changed in place: to a scatter those of their means are added.

    So it keeps its digits where all numbers are close to each other and far from 0; a difference of squares does not.

    References:
        Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    for place, count, total in plan.scatters:
        count_N, total_N = of_rows_AN[count], of_rows_AN[total]
        distance_N = total_N / count_N.clamp_min(1.0) - sums_A[total] / sums_A[count].clamp_min(1.0)
        sums_A[place].add_((count_N * distance_N.square()).sum())
    return sums_A


def named_band_scales(plan: Plan, band_scales_N: Tensor) -> dict[str, Tensor]:
    """Scales of the bands that have a target, by the names that formulas use."""
    return dict(zip(plan.band_scales, band_scales_N.unbind(), strict=True))


def scale_values(
    plan: Plan,
    *,
    totals: Mapping[str, Tensor],
    over_group: Mapping[str, Tensor],
    rollout_scale: WeightScale | None,
) -> dict[str, Tensor]:
    """What the weights of this call are scaled by, under the names that formulas use; 1 where it is not configured."""
    config = plan.config
    found: Mapping[str, Tensor] | NamedValues
    if config.scope == "rollout" and rollout_scale is not None:
        found = rollout_scale._asdict()
    else:
        found = NamedValues(over_group if config.scope == "data_parallel" else totals, SCALE_FORMULAS)
    factors = dict.fromkeys(WeightScale._fields, torch.ones_like(totals["total_num_response"]))
    factors |= {name: found[name] for name in config.scale_factors}
    return factors | {"scale_factor": factors["denominator_factor"] / factors["mean_weight"]}
