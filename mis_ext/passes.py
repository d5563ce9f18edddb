"""The passes of the pipeline: what any backend does between the collectives, and the eager backend.

The eager backend runs on every device, compiles with ``torch.compile(fullgraph=True)``, and says what the numbers are;
:mod:`mis_ext.kernels` computes the same with a few Triton kernels.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios, compute_log_ratio, mask_as_float, zero_outside
from mis_ext.metrics import Outcome, measure
from mis_ext.normalization import GroupTotals, WeightScale, group_totals, merge_totals, weight_scale
from mis_ext.rejection import sequence_keep, token_keep
from mis_ext.spread import spread_metrics
from mis_ext.statistics import SequenceStatistics, local_statistics, merge_statistics
from mis_ext.weights import sequence_weights, token_weights

_BITS = 8


class Streams(NamedTuple):
    """What comes in: log-probs of the local tokens ``[T]``, and the mask of whole responses ``[R]``, any dtype."""

    proximal_logprobs_T: Tensor
    behavior_logprobs_T: Tensor
    response_mask_R: Tensor

    def token_ratios(self, layout: PackedLayout) -> TokenRatios:
        """Log-ratios of the local tokens."""
        return compute_log_ratio(
            proximal_logprobs_T=self.proximal_logprobs_T,
            behavior_logprobs_T=self.behavior_logprobs_T,
            response_mask_T=layout.index.local_part(self.response_mask_R).bool(),
        )


class Decisions(NamedTuple):
    """Per sequence ``[S]``, equal on all context-parallel ranks.

    ``usable_S`` (bool) can carry a weight; ``keep_S`` (bool) of them pass the gates on sequences; ``sequence_weight_S``
    is the sequence-level part of the weight; ``kept_count_S`` counts the tokens that the sequence keeps.
    """

    usable_S: Tensor
    keep_S: Tensor
    sequence_weight_S: Tensor
    kept_count_S: Tensor


class Sequences(Protocol):
    """What the pass over sequences found."""

    @property
    def stats(self) -> SequenceStatistics:
        """Statistics of whole sequences."""

    @property
    def decisions(self) -> Decisions:
        """What becomes of each sequence."""

    @property
    def totals_K(self) -> Tensor:
        """:class:`GroupTotals` of this call, as one tensor."""


class Outputs(NamedTuple):
    """What the last pass writes; neither weights nor a mask where nothing is corrected (``metrics_only``).

    ``weights_T``: ``[T]`` float32, 0 where a token has none, and nowhere else. ``loss_mask_R``: ``[R]`` float32, 1
    where a token of the whole responses stays in the loss, else 0. ``host_metrics``: ``[T]`` by public name.
    """

    weights_T: Tensor | None
    loss_mask_R: Tensor | None
    host_metrics: dict[str, Tensor]


class Backend(Protocol):
    """One call's passes, in this order; between them :mod:`mis_ext.correction` communicates."""

    streams: Streams
    layout: PackedLayout
    config: CorrectionConfig

    def token_statistics(self) -> Tensor:
        """``[14, S]``, this rank's share of the sequences' statistics."""

    def keep_bits(self) -> Tensor:
        """uint8, one bit per token of the whole responses: set where a local token passes the gates on tokens."""

    def sequence_decisions(self, gathered_NKS: Tensor) -> Sequences:
        """What follows for sequences from the shares of all context-parallel ranks."""

    def merge_totals(self, gathered_NK: Tensor) -> Tensor:
        """``[K]`` totals of all data-parallel ranks from those of each."""

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_K: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        host_metrics: bool,
    ) -> Outputs:
        """Weights, masks, and where asked for the metrics as the hosts want them."""

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """``[T]`` values times weights, 0 where the weight is 0, whatever the value; the gradient is the weight."""


class EagerSequences(NamedTuple):
    """:class:`Sequences` as tensors."""

    stats: SequenceStatistics
    decisions: Decisions
    totals_K: Tensor


class EagerBackend:
    """PyTorch operations, on any device."""

    def __init__(self, streams: Streams, layout: PackedLayout, config: CorrectionConfig) -> None:
        self.streams, self.layout, self.config = streams, layout, config
        self._tokens = tokens = streams.token_ratios(layout)
        # 0 where a token has no ratio.
        self._token_weight_T = token_weights(tokens.log_ratio_T, config.weight) * mask_as_float(tokens.valid_mask_T)
        self._token_keep_T = token_keep(tokens, config.all_gates)

    def token_statistics(self) -> Tensor:
        """See :class:`Backend`."""
        return local_statistics(
            self._tokens,
            token_weight_T=self._token_weight_T,
            token_keep_T=self._token_keep_T,
            index=self.layout.index,
        )

    def keep_bits(self) -> Tensor:
        """See :class:`Backend`."""
        position_T = self.layout.index.position_T
        assert position_T is not None
        flags_R = torch.zeros(self.layout.num_whole_tokens, dtype=torch.uint8, device=position_T.device)
        flags_R = flags_R.index_copy(0, position_T, self._token_keep_T.to(torch.uint8))
        padded = torch.nn.functional.pad(flags_R, (0, -len(flags_R) % _BITS))
        return (padded.view(-1, _BITS) << _bit_numbers(padded.device)).sum(1, dtype=torch.uint8)

    def sequence_decisions(self, gathered_NKS: Tensor) -> EagerSequences:
        """See :class:`Backend`."""
        config = self.config
        stats = merge_statistics(gathered_NKS)
        usable_S = stats.num_valid_S > 0
        if config.rejects_whole_sequences:
            # A statistic of the sequence needs the ratio of every token.
            usable_S = usable_S & (stats.num_valid_S == stats.num_response_S)
        keep_S = usable_S & sequence_keep(stats, config.all_gates)
        decisions = Decisions(
            usable_S=usable_S,
            keep_S=keep_S,
            sequence_weight_S=sequence_weights(stats, config.weight),
            kept_count_S=torch.where(keep_S, stats.num_token_kept_S, 0.0),
        )
        totals_K = group_totals(
            stats, usable_S=usable_S, keep_S=keep_S, sequence_weight_S=decisions.sequence_weight_S, config=config
        )
        return EagerSequences(stats, decisions, totals_K)

    def merge_totals(self, gathered_NK: Tensor) -> Tensor:
        """See :class:`Backend`."""
        return merge_totals(gathered_NK)

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_K: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        host_metrics: bool,
    ) -> Outputs:
        """See :class:`Backend`."""
        config, index, tokens = self.config, self.layout.index, self._tokens
        decisions = sequences.decisions
        over_group = GroupTotals._make(over_group_K.unbind())
        scale = weight_scale(config, GroupTotals._make(sequences.totals_K.unbind()), over_group, rollout_scale)
        outcome = outcome_of(
            tokens,
            decisions,
            token_weight_T=self._token_weight_T,
            token_keep_T=self._token_keep_T,
            scale=scale,
            layout=self.layout,
        )
        metrics = {}
        if host_metrics:
            measured = measure(tokens, sequences.stats, over_group, outcome, config)
            metrics = spread_metrics(measured, index, sequences.stats, tokens.response_mask_T)
        if config.metrics_only:
            return Outputs(None, None, metrics)
        factor_S = torch.where(decisions.usable_S, decisions.sequence_weight_S * scale.factor, 0.0)
        loss_mask_R = outcome.keep_T
        if not self.layout.is_whole:
            keep_mask_R = self.streams.response_mask_R.bool() & index.to_whole(decisions.keep_S)
            if keep_bits is not None:
                keep_mask_R = keep_mask_R & _unpack_bits(keep_bits, len(keep_mask_R))
            loss_mask_R = mask_as_float(keep_mask_R)
        return Outputs(
            weights_T=self._token_weight_T * index.to_tokens(factor_S),
            loss_mask_R=loss_mask_R,
            host_metrics=metrics,
        )

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """See :class:`Backend`."""
        weighed_T = values_T * weights_T
        return zero_outside(weights_T.to(weighed_T.dtype), weighed_T)


def outcome_of(
    tokens: TokenRatios,
    decisions: Decisions,
    *,
    token_weight_T: Tensor,
    token_keep_T: Tensor,
    scale: WeightScale,
    layout: PackedLayout,
) -> Outcome:
    """Decisions about tokens and about sequences together, as the metrics need them."""
    return Outcome(
        layout=layout,
        usable_S=decisions.usable_S,
        keep_T=mask_as_float(token_keep_T) * layout.index.to_tokens(mask_as_float(decisions.keep_S)),
        kept_count_S=decisions.kept_count_S,
        token_weight_T=token_weight_T,
        sequence_weight_S=decisions.sequence_weight_S,
        scale=scale,
    )


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


def _unpack_bits(packed: Tensor, length: int) -> Tensor:
    return ((packed[:, None] >> _bit_numbers(packed.device)) & 1).flatten()[:length].bool()
