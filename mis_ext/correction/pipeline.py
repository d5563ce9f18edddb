# SPDX-License-Identifier: Apache-2.0
"""The pipeline: from two streams of log-probs to weights, keep masks and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group, gather_rows, group_size, mark_failed, merge_bits
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.formula import NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import PackedStreams
from mis_ext.correction.metrics import GROUP_FORMULAS, GroupNumber, Mean, Metric
from mis_ext.correction.plan import Plan, plan_of, scale_values, total_values
from mis_ext.correction.triton import wants_triton
from mis_ext.validation import check_instance, check_tensors

if TYPE_CHECKING:
    from mis_ext.correction.eager import EagerBackend, EagerSequences
    from mis_ext.correction.triton.fused import FusedSequences, TritonBackend

    Backend: TypeAlias = EagerBackend | TritonBackend
    Sequences: TypeAlias = EagerSequences | FusedSequences
else:
    # Importing mis_ext must not import Triton, and a call of one backend not the other.
    Backend = Sequences = object


class Outputs(NamedTuple):
    """What the last pass writes; neither weights nor a mask where nothing is corrected (``metrics_only``).

    ``weights_T``: ``[T]`` float32, 0 where a token has none. ``loss_mask_R``: ``[R]`` float32, the given mask where a
    token of the whole responses stays in the loss, else 0. ``token_metrics``: ``[T]`` by public name.
    """

    weights_T: Tensor | None
    loss_mask_R: Tensor | None
    token_metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Weights, keep masks and metrics of one call, detached.

    Attributes:
        token_metrics: ``[T]`` per selected metric, the number of the token's sequence; empty unless asked for.

            0 outside the response. Its mean over the response tokens of a sequence, and of that over sequences, is the
            metric; with a loss per token, its mean over all response tokens. So that this holds where a host divides by
            all of them, a sequence without a token of the metric's population has the mean of the others of this call:
            NaN where there are none.
        totals_A: ``[A]`` float32: sums and extremes over this call's sequences on this data-parallel rank.
    """

    _backend: Backend
    _outputs: Outputs
    _sequences: Sequences
    _over_group_A: Tensor
    token_metrics: dict[str, Tensor]
    totals_A: Tensor

    @property
    def weights_T(self) -> Tensor:
        """``[T]`` float32, what multiplies the loss of each local token.

        A rejected token keeps its weight, because the mask removes the token. The weight is 0 for a masked token, for a
        token without a finite ratio, and where a gate has ``action: zero``. With ``metrics_only`` all weights are 1.
        """
        if self._outputs.weights_T is None:
            return torch.ones_like(self._backend.streams.proximal_logprobs_T, dtype=torch.float32)
        return self._outputs.weights_T

    @property
    def keep_mask_T(self) -> Tensor:
        """``[T]`` bool, local tokens that stay in the loss."""
        return self._backend.layout.local_part(self.keep_mask_R)

    @property
    def keep_mask_R(self) -> Tensor:
        """``[R]`` bool, the same for whole responses, equal on all context-parallel ranks.

        With ``metrics_only`` that is the response mask.
        """
        return self.loss_mask_R != 0

    @property
    def loss_mask_R(self) -> Tensor:
        """``[R]`` float32, the given mask where :attr:`keep_mask_R`, else 0: what the hosts multiply by."""
        if self._outputs.loss_mask_R is None:
            return self._backend.streams.response_mask_R.float()
        return self._outputs.loss_mask_R

    @property
    def measured(self) -> dict[str, Tensor]:
        """``[S]`` bool per selected metric: those it counts; for one of the group those with a response token."""
        plan, values = self.plan, self._sequences.values
        counts = [*plan.table.counts, *["num_response"] * len(plan.group)]
        is_measured = {name: values[name] > 0 for name in {*counts}}
        return {name: is_measured[counts[place]] for name, place in plan.metric_index.items()}

    @property
    def metrics(self) -> dict[str, Metric]:
        """Selected metrics by public name: of this data-parallel rank, but those of the group of all of them."""
        plan, values = self.plan, self._sequences.values
        over_group = total_values(plan, self._over_group_A)
        scales = scale_values(plan, totals=self.totals, over_group=over_group)
        of_group = NamedValues(over_group | scales, GROUP_FORMULAS)
        # A sum over measured sequences, and their number, or that of the tokens.
        means: list[Metric] = []
        for row, amount, count in zip(plan.metrics, plan.table.amounts, plan.table.counts, strict=False):
            total_S, count_S = values[amount], values[count]
            is_measured_S = count_S > 0
            if row.over in ("sequences", "responses"):
                count_S = is_measured_S.float()
            total = torch.where(is_measured_S, total_S, 0.0).sum()
            means.append(Mean(total * of_group["scale_factor"] if row.is_scaled else total, count_S.sum()))
        found = [*means, *(GroupNumber(of_group.compute(formula)) for formula in plan.group)]
        return {name: found[place] for name, place in plan.metric_index.items()}

    @property
    def plan(self) -> Plan:
        """Which columns, totals and metrics the configuration needs."""
        return self._backend.plan

    @property
    def layout(self) -> PackedLayout:
        """Which local token belongs to which sequence."""
        return self._backend.layout

    @property
    def sequences(self) -> NamedValues:
        """Numbers of each sequence ``[S]`` by their names in :mod:`mis_ext.correction.plan`."""
        return self._sequences.values

    @property
    def totals(self) -> dict[str, Tensor]:
        """:attr:`totals_A` by their names in :mod:`mis_ext.correction.plan`, each 0-dim."""
        return total_values(self._backend.plan, self.totals_A)

    @property
    def status(self) -> Tensor:
        """0-dim, whether a rank failed whose data this call needed, see :mod:`mis_ext.correction.collectives`."""
        return self._over_group_A[-1]

    def weigh(self, loss_T: Tensor) -> Tensor:
        """``[T]``: the loss times the weights, 0 where a token has none; the gradient is the weight."""
        return self._backend.weigh(loss_T, self.weights_T)


@torch.no_grad()
def compute_correction(
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    response_mask_R: Tensor,
    layout: PackedLayout,
    config: CorrectionConfig | Plan,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    token_metrics: bool = False,
    failed_rank: int | None = None,
    lag_T: Tensor | None = None,
) -> Correction:
    """Correct for the difference between the policy that sampled and the policy that trains.

    Args:
        proximal_logprobs_T: ``[T]``, nats, the trainer's frozen scoring of this rank's tokens, any float dtype.
        behavior_logprobs_T: ``[T]``, nats, the log-probs of the same tokens that the inference engine reported.
        response_mask_R: ``[R]``, nonzero on tokens that the policy generated, whole responses on every rank.
        layout: Lengths of the sequences, and where the local tokens lie in them.
        config: The configuration. For ``torch.compile`` pass its plan (:func:`~mis_ext.correction.plan.plan_of`)
            instead, because a graph cannot make the plan.
        cp_group: Ranks that hold other parts of the same sequences; None for one rank.
        dp_group: Ranks that hold other sequences, without context parallelism; None for one rank.
        token_metrics: Also write the selected metrics per token.
        failed_rank: This rank's global number, if it has no data because of a local error. Every rank then reads the
            number in :attr:`Correction.status`.
        lag_T: ``[T]``, by how many weight updates the weights that sampled a local token are older than the trainer's;
            NaN where nobody knows. Needed, and used, with ``staleness`` alone.

    Raises:
        ValueError: Lengths disagree, the layout and ``cp_group`` have different ranks, lags are missing,
            or the backend of ``MIS_EXT_BACKEND`` does not run here.
    """
    streams = PackedStreams(proximal_logprobs_T, behavior_logprobs_T, response_mask_R, layout, lag_T)
    backend = prepare(streams, config, cp_group=cp_group)
    return run_passes(
        backend,
        cp_group=cp_group,
        dp_group=dp_group,
        token_metrics=token_metrics,
        failed_rank=failed_rank,
    )


def prepare(
    streams: PackedStreams,
    config: CorrectionConfig | Plan,
    *,
    cp_group: Group | None = None,
) -> Backend:
    """Everything of :func:`compute_correction` that can fail on one rank alone; nothing here communicates.

    For callers that have switched gradients off, as for :func:`run_passes`.
    """
    check_instance("config", config, (CorrectionConfig, Plan))
    plan = config if isinstance(config, Plan) else plan_of(config)
    _check(streams, plan, cp_group)
    device = streams.proximal_logprobs_T.device
    return choose_backend(device)(streams, plan)


def choose_backend(device: torch.device) -> type[Backend]:
    """The backend that runs the passes for tensors on ``device``: eager or Triton."""
    if wants_triton(device):
        from mis_ext.correction.triton.fused import TritonBackend

        return TritonBackend
    from mis_ext.correction.eager import EagerBackend

    return EagerBackend


def run_passes(
    backend: Backend,
    *,
    cp_group: Group | None,
    dp_group: Group | None,
    token_metrics: bool,
    failed_rank: int | None = None,
) -> Correction:
    """The passes of a call, and the collectives between them; arguments as of :func:`compute_correction`."""
    plan, layout = backend.plan, backend.layout
    if plan.given_names:
        # Most runs have no gate on turns, and no versions.
        from mis_ext.correction.segments import given_rows

        backend.take_given(given_rows(backend, cp_group=cp_group))
    statistics_FS = backend.token_statistics()
    if failed_rank is not None:
        mark_failed(statistics_FS, failed_rank)
    # A rank alone gathers nothing.
    gathered_WFS = statistics_FS.unsqueeze(0) if cp_group is None else gather_rows(statistics_FS, cp_group)
    # How context-parallel ranks agree on the keep mask: of sequences all decide the same from the same gathered
    # statistics; which single tokens are kept knows only the rank that has them, and sends a bit for each.
    others_reject = not layout.is_whole and plan.config.rejects_single_tokens
    keep_bits = merge_bits(backend.keep_bits(), cp_group) if others_reject else None
    sequences = backend.sequences(gathered_WFS)
    over_group_A = sequences.totals_A
    if failed_rank is not None:
        mark_failed(over_group_A, failed_rank)
    if dp_group is not None and plan.needs_group_totals:
        over_group_A = backend.merge_totals(gather_rows(sequences.totals_A, dp_group))
    outputs = backend.outputs(
        sequences,
        over_group_A=over_group_A,
        keep_bits=keep_bits,
        token_metrics=token_metrics,
    )
    return Correction(backend, outputs, sequences, over_group_A, outputs.token_metrics, sequences.totals_A)


def _check(
    streams: PackedStreams,
    plan: Plan,
    cp_group: Group | None,
) -> None:
    """Refuse what does not fit together."""
    *log_probs_and_mask, layout, lag_T = streams
    check_instance("layout", layout, PackedLayout)
    expected = layout.num_local_tokens, layout.num_local_tokens, layout.num_whole_tokens
    given = dict(zip(PackedStreams._fields, log_probs_and_mask, strict=False)) | (
        {} if lag_T is None else {"lag_T": lag_T}
    )
    check_tensors(given)
    for name, values in given.items():
        if values.dim() != 1:
            raise ValueError(f"{name} must be a 1-D tensor, got shape {list(values.shape)}")
    if tuple(map(Tensor.numel, log_probs_and_mask)) != expected:
        for name, stream, length in zip(PackedStreams._fields, log_probs_and_mask, expected, strict=False):
            if stream.numel() != length:
                raise ValueError(f"{name} has {stream.numel()} tokens, the layout says {length}")
    if layout.is_whole and cp_group is not None and group_size(cp_group) > 1:
        raise ValueError(
            f"the layout says that every rank holds whole responses, the cp_group has {group_size(cp_group)} ranks, "
            "over which their tokens would count more than once: use PackedLayout.context_parallel, or leave out "
            "cp_group"
        )
    if not layout.is_whole and group_size(cp_group) == 1:
        raise ValueError("the layout says that other ranks hold parts of the responses: pass their cp_group")
    # A rank without tokens takes part without scales.
    if layout.num_local_tokens == 0:
        return
    if plan.config.staleness and lag_T is None:
        raise ValueError(
            "staleness, a gate on the lag or a weight with when: stale: nobody gives the lag of the tokens. In slime "
            "and Miles mis_ext.rollout.generate and mis_ext.prepare_rollout do, elsewhere lag_T of the streams"
        )
    if lag_T is not None and lag_T.numel() != layout.num_local_tokens:
        raise ValueError(f"lag_T has {lag_T.numel()} tokens, the layout says {layout.num_local_tokens}")
