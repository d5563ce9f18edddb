"""The pipeline: from two streams of log-probs to weights, keep masks and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mis_ext.backend import choose_backend
from mis_ext.collectives import Group, gather_rows, merge_bits
from mis_ext.config import CorrectionConfig
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios
from mis_ext.metrics import Metric, measure
from mis_ext.normalization import GroupTotals, WeightScale, weight_scale
from mis_ext.passes import Backend, Decisions, Outputs, Sequences, Streams, outcome_of
from mis_ext.rejection import token_keep
from mis_ext.statistics import SequenceStatistics
from mis_ext.weights import token_weights


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Weights and keep masks of one call, detached; everything else is computed when asked for."""

    _backend: Backend
    _outputs: Outputs
    _sequences: Sequences
    _over_group_K: Tensor
    _rollout_scale: WeightScale | None

    @property
    def weights_T(self) -> Tensor:
        """``[T]`` float32, what multiplies the loss of each local token.

        A token that a gate rejects keeps its weight: the mask removes it. A token that cannot have one (masked, or
        without a finite ratio) has 0. With ``metrics_only`` all weights are 1.
        """
        if self._outputs.weights_T is None:
            return torch.ones_like(self._backend.streams.proximal_logprobs_T, dtype=torch.float32)
        return self._outputs.weights_T

    @property
    def usable_mask_T(self) -> Tensor:
        """``[T]`` bool, tokens that have a weight."""
        return self.weights_T != 0

    @property
    def keep_mask_T(self) -> Tensor:
        """``[T]`` bool, local tokens that stay in the loss."""
        return self._backend.layout.index.local_part(self.keep_mask_R)

    @property
    def keep_mask_R(self) -> Tensor:
        """``[R]`` bool, the same for whole responses, equal on all context-parallel ranks.

        With ``metrics_only`` that is the response mask.
        """
        return self.loss_mask_R != 0

    @property
    def loss_mask_R(self) -> Tensor:
        """``[R]`` float32, :attr:`keep_mask_R` as 1 and 0: what the hosts multiply by."""
        if self._outputs.loss_mask_R is None:
            return self._backend.streams.response_mask_R.bool().float()
        return self._outputs.loss_mask_R

    @property
    def host_metrics(self) -> dict[str, Tensor]:
        """``[T]`` per selected metric, whose mean under the hosts' reduction is the metric; empty unless asked for."""
        return self._outputs.host_metrics

    def weigh(self, loss_T: Tensor) -> Tensor:
        """``[T]``: the loss times the weights, 0 where a token has none; the gradient is the weight."""
        return self._backend.weigh(loss_T, self.weights_T)

    @property
    def totals_K(self) -> Tensor:
        """``[K]`` float32, :attr:`totals` as one tensor."""
        return self._sequences.totals_K

    @property
    def totals(self) -> GroupTotals:
        """Sums over this call's sequences on this data-parallel rank."""
        return GroupTotals._make(self.totals_K.unbind())

    @property
    def stats(self) -> SequenceStatistics:
        """Statistics of each sequence."""
        return self._sequences.stats

    @property
    def decisions(self) -> Decisions:
        """What becomes of each sequence."""
        return self._sequences.decisions

    @property
    def tokens(self) -> TokenRatios:
        """Log-ratios of the local tokens."""
        return self._backend.streams.token_ratios(self._backend.layout)

    @property
    def metrics(self) -> dict[str, Metric]:
        """Selected metrics by public name."""
        tokens, config = self.tokens, self._backend.config
        over_group = GroupTotals._make(self._over_group_K.unbind())
        outcome = outcome_of(
            tokens,
            self.decisions,
            token_weight_T=token_weights(tokens.log_ratio_T, config.weight),
            token_keep_T=token_keep(tokens, config.all_gates),
            scale=weight_scale(config, self.totals, over_group, self._rollout_scale),
            layout=self._backend.layout,
        )
        return measure(tokens, self.stats, over_group, outcome, config)


@torch.no_grad()
def compute_correction(
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    response_mask_R: Tensor,
    layout: PackedLayout,
    config: CorrectionConfig,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    rollout_scale: WeightScale | None = None,
    host_metrics: bool = False,
) -> Correction:
    """Correct for the difference between the policy that sampled and the policy that trains.

    Args:
        proximal_logprobs_T: ``[T]``, nats, the trainer's frozen scoring of this rank's tokens, any float dtype.
        behavior_logprobs_T: ``[T]``, nats, what the inference engine reported for them.
        response_mask_R: ``[R]``, nonzero on tokens that the policy generated, whole responses on every rank.
        layout: Lengths, and where the local tokens lie.
        config: What to compute.
        cp_group: Ranks that hold other parts of the same sequences; None for one rank.
        dp_group: Ranks that hold other sequences, without context parallelism; None for one rank.
        rollout_scale: The factors of the whole rollout; needed, and used, with ``scope: rollout`` only.
        host_metrics: Also write the selected metrics as the hosts want them.

    Raises:
        ValueError: Lengths disagree, a rollout scale is missing, or ``MIS_EXT_BACKEND`` cannot be had.
    """
    streams = Streams(proximal_logprobs_T, behavior_logprobs_T, response_mask_R)
    _check_lengths(streams, layout)
    _check_scale(config, rollout_scale)
    backend = choose_backend(proximal_logprobs_T.device)(streams, layout, config)

    gathered_NKS = gather_rows(backend.token_statistics(), cp_group)
    others_reject = not layout.is_whole and config.rejects_single_tokens
    keep_bits = merge_bits(backend.keep_bits(), cp_group) if others_reject else None
    sequences = backend.sequence_decisions(gathered_NKS)
    over_group_K = sequences.totals_K
    if dp_group is not None and config.needs_group_totals:
        over_group_K = backend.merge_totals(gather_rows(sequences.totals_K, dp_group))
    outputs = backend.outputs(
        sequences,
        over_group_K=over_group_K,
        rollout_scale=rollout_scale,
        keep_bits=keep_bits,
        host_metrics=host_metrics,
    )
    return Correction(backend, outputs, sequences, over_group_K, rollout_scale)


def _check_lengths(streams: Streams, layout: PackedLayout) -> None:
    expected = layout.num_local_tokens, layout.num_local_tokens, layout.num_whole_tokens
    for name, stream, length in zip(Streams._fields, streams, expected, strict=True):
        if stream.numel() != length:
            raise ValueError(f"{name} has {stream.numel()} tokens, the layout says {length}")


def _check_scale(config: CorrectionConfig, rollout_scale: WeightScale | None) -> None:
    is_scaled = config.normalize_over is not None or config.denominator == "kept"
    if config.scope == "rollout" and is_scaled and rollout_scale is None:
        raise ValueError("scope: rollout needs the rollout's scale, see mis_ext.hosts.slime.prepare_rollout")
