# SPDX-License-Identifier: Apache-2.0
"""Weights, keep mask, and metrics of one micro-batch: the passes, and what ranks exchange for them.

Read :mod:`mis_ext.correction.passes` for the formulas. :func:`correct` hands them the exchanges as functions.

Context-parallel ranks agree on the keep mask in two steps. They gather the sums of each response, and decide alike on
whole responses. Where single tokens can be rejected, they also gather one bit per token, which its owner sets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.collectives import STATUS_BYTES, Due, Group, Row, group_size
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.correction.metrics import GroupNumber, Mean, Metric, Responses, Totals
from mis_ext.correction.passes import Exchange, Inputs, add_scale, by_name, decide, plan_of, run_passes
from mis_ext.correction.segments import segment_values
from mis_ext.correction.tokens import Tokens
from mis_ext.validation import check_instance, check_tensors

_BITS = 8
_ALONE = Due((), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Correction:
    """Weights, keep masks, and metrics of one call, detached.

    Attributes:
        config: The configuration.
        layout: Which local token belongs to which response.
        weights_T: ``[T]`` float32, what multiplies the loss of each local token. A rejected token keeps its weight,
            because the mask removes it. The weight is 0 for a masked token, for a token without a finite ratio, and
            where a gate has ``action: zero``. With ``metrics_only`` all weights are 1.
        loss_mask_R: ``[R]`` float32, the given mask on tokens that stay in the loss, else 0: what the framework
            multiplies by. Equal on all context-parallel ranks. With ``metrics_only`` the given mask.
        token_metrics: ``[T]`` per selected metric, the number of the token's response; empty unless asked for.

            0 outside the response mask. Its mean over the response tokens of a response, and of that over responses,
            is the metric; with a loss per token, its mean over all response tokens. So that this holds where a
            framework divides by all of them, a response without a token of the metric's population has the mean of the
            others of this call: NaN where there are none.
        status: 0-dim, whether a rank failed whose data this call needed: see :mod:`mis_ext.correction.collectives`.
    """

    config: CorrectionConfig
    layout: PackedLayout
    weights_T: Tensor
    loss_mask_R: Tensor
    token_metrics: dict[str, Tensor]
    status: Tensor
    _merged_FS: Tensor
    _own_A: Tensor
    _group_A: Tensor

    @functools.cached_property
    def responses(self) -> Responses:
        """Numbers of each response ``[S]``, equal on all context-parallel ranks."""
        plan = plan_of(self.config)
        return decide(by_name(self._merged_FS, plan.sums, plan.maxima), plan)

    @functools.cached_property
    def totals(self) -> Totals:
        """Sums and maxima over the responses of this call on this data-parallel rank, 0-dim, by name."""
        plan = plan_of(self.config)
        return by_name(self._own_A, plan.totals, plan.extremes)

    @functools.cached_property
    def group_totals(self) -> Totals:
        """The totals of all data-parallel ranks where a metric or the scale needs them, and the scale."""
        plan = plan_of(self.config)
        return add_scale(by_name(self._group_A, plan.totals, plan.extremes), self.totals, self.config)

    @property
    def keep_mask_T(self) -> Tensor:
        """``[T]`` bool, local tokens that stay in the loss."""
        return self.layout.local_part(self.keep_mask_R)

    @property
    def keep_mask_R(self) -> Tensor:
        """``[R]`` bool, the same for whole responses."""
        return self.loss_mask_R != 0

    @property
    def measured(self) -> dict[str, Tensor]:
        """``[S]`` bool per selected metric: the responses that it counts; of one of the group, those with a token."""
        r, total = self.responses, self.group_totals
        return {name: row.measure(r, total)[1] > 0 for name, row in plan_of(self.config).rows.items()}

    @property
    def metrics(self) -> dict[str, Metric]:
        """Selected metrics by public name: of this data-parallel rank, but those of the group of all of them."""
        r, total = self.responses, self.group_totals
        found: dict[str, Metric] = {}
        for name, row in plan_of(self.config).rows.items():
            amount_S, count_S = row.measure(r, total)
            if row.over == "group":
                found[name] = GroupNumber(amount_S.float())
                continue
            if row.over in ("sequences", "responses"):
                count_S = (count_S > 0.0).double()
            amount = torch.where(count_S > 0.0, amount_S, 0.0).sum()
            amount = amount * self.scale if row.is_scaled else amount
            found[name] = Mean(amount.float(), count_S.sum().float())
        return found

    @property
    def scale(self) -> Tensor:
        """0-dim: what all weights are multiplied by, see ``normalize_over`` and ``denominator``."""
        return self.group_totals["scale"]

    def weigh(self, loss_T: Tensor) -> Tensor:
        """``[T]``: the loss times the weights, 0 where a token has none; the gradient is the weight."""
        return torch.where(self.weights_T != 0.0, loss_T * self.weights_T, 0.0)


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
    token_metrics: bool = False,
    lag_T: Tensor | None = None,
) -> Correction:
    """Correct for the difference between the policy that sampled and the policy that trains.

    Args:
        proximal_logprobs_T: ``[T]``, nats, the trainer's frozen scoring of this rank's tokens, any float dtype.
        behavior_logprobs_T: ``[T]``, nats, the log-probs of the same tokens from the inference engine.
        response_mask_R: ``[R]``, nonzero on tokens that the policy generated, whole responses on every rank.
        layout: Lengths of the responses, and where the local tokens lie in them.
        config: The configuration.
        cp_group: Ranks that hold other parts of the same responses; None for one rank.
        dp_group: Ranks that hold other responses, without context parallelism; None for one rank.
        token_metrics: Also compute the selected metrics per token.
        lag_T: ``[T]``, by how many weight updates the weights that sampled a local token are older than the trainer's;
            NaN where unknown. Needed, and used, with ``staleness`` alone.

    Raises:
        ValueError: Lengths disagree, the layout and ``cp_group`` have different ranks, or lags are missing.
    """
    streams = PackedStreams(proximal_logprobs_T, behavior_logprobs_T, response_mask_R, layout, lag_T)
    check_streams(streams, config, cp_group)
    return correct(streams, config, cp_group=cp_group, dp_group=dp_group, token_metrics=token_metrics)


@torch.no_grad()
def correct(
    streams: PackedStreams,
    config: CorrectionConfig,
    *,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    token_metrics: bool = False,
) -> Correction:
    """:func:`compute_correction` of a micro-batch that :func:`check_streams` has checked; the arguments are the same.

    Other ranks learn of an error in it by :attr:`Correction.status`, if a collective is still due.
    """
    layout, device = streams.layout, streams.response_mask_R.device
    due = _ALONE
    if cp_group is not None or dp_group is not None:
        due = due_of(config, layout.response_lengths, cp_group, dp_group, is_whole=layout.is_whole, device=device)
    # No rank waits for one that is alone.
    with contextlib.nullcontext() if due is _ALONE else due.told_of_errors():
        plan, mask_R = plan_of(config), streams.response_mask_R.float()
        mask_T = layout.local_part(mask_R)
        log_probs = streams.proximal_logprobs_T.detach().float(), streams.behavior_logprobs_T.detach().float()
        x = Inputs(*log_probs, mask_T, streams.lag_T, {})
        if plan.segment_gates:
            tokens = Tokens.read(x.proximal_T, x.behavior_T, mask_T != 0.0, x.lag_T)
            gates, gather = plan.segment_gates, due.gather
            x = x._replace(segments=segment_values(tokens, gates, layout, mask_R, cp_group=cp_group, gather=gather))
        over_cp: Exchange = None
        over_dp: Exchange = None
        if cp_group is not None:
            over_cp = functools.partial(_merged, due, cp_group, len(plan.sums))
        if dp_group is not None and plan.needs_group:
            over_dp = functools.partial(_merged, due, dp_group, len(plan.totals))
        wants_graphs = mask_R.is_cuda if config.compile == "auto" else config.compile
        if wants_graphs and not torch.compiler.is_compiling():
            # Loads the compiler's modules.
            from mis_ext.correction.compiled import graphs_of

            found = graphs_of(config).run(x, layout, over_cp, over_dp, token_metrics=token_metrics)
        else:
            found = run_passes(x, layout.blocks, plan, over_cp, over_dp, token_metrics=token_metrics)
        weights_T, loss_mask_R, status_1 = found.weights_T, mask_R, found.group_A[-1:]
        if config.metrics_only:
            weights_T = torch.ones_like(weights_T)
        elif layout.is_whole:
            loss_mask_R = found.loss_mask_T
        elif not config.rejects_single_tokens:
            # All ranks find the same for whole responses, from the same sums.
            loss_mask_R = torch.where(found.keep_S.index_select(0, layout.sequence_R), mask_R, 0.0)
        else:
            # Only the rank that has a token knows whether it stays. It sends a bit for each, and its status.
            own = torch.cat([pack_bits(layout, found.loss_mask_T != 0), status_1.float().view(torch.uint8)])
            bits_W, status_W = due.gather(own, cp_group).tensor_split([-STATUS_BYTES], dim=1)
            status_1 = torch.maximum(status_1, status_W.contiguous().view(torch.float32).amax(0))
            # At most one rank sets a bit: a sum has no carries.
            keep_R = unpack_bits(bits_W.sum(0, dtype=torch.uint8), layout.num_whole_tokens)
            loss_mask_R = torch.where(keep_R, mask_R, 0.0)
        metrics = {} if found.metrics_MT is None else dict(zip(plan.rows, found.metrics_MT.unbind(), strict=True))
        sums = found.merged_FS, found.own_A, found.group_A
        return Correction(config, layout, weights_T, loss_mask_R, metrics, status_1.squeeze(0), *sums)


def due_of(
    config: CorrectionConfig,
    response_lengths: Sequence[int],
    cp_group: Group | None,
    dp_group: Group | None,
    *,
    is_whole: bool,
    device: torch.device,
) -> Due:
    """The collectives of a call, in the order in which it joins them.

    A rank that could not read its lengths knows the right ones only as far as they are numbers. With other lengths, or
    fewer, than on the other context-parallel ranks, its rows have another shape than theirs.
    """
    plan, of_parts = plan_of(config), None if is_whole else cp_group
    num_sequences = num_tokens = 0
    if cp_group is not None:
        num_sequences, num_tokens = len(response_lengths), sum(map(_as_integer, response_lengths))
    rows = []
    if plan.segment_gates:
        rows.append(Row((1 + len(plan.segment_gates), num_tokens), torch.float32, of_parts, has_status=False))
    rows.append(Row((len(plan.sums) + len(plan.maxima) + 1, num_sequences), torch.float64, cp_group))
    if plan.needs_group:
        rows.append(Row((len(plan.totals) + len(plan.extremes) + 1,), torch.float64, dp_group))
    if config.rejects_single_tokens:
        rows.append(Row((-(-num_tokens // _BITS) + STATUS_BYTES,), torch.uint8, of_parts))
    return Due(rows, device)


def _as_integer(length: Any) -> int:
    try:
        return int(length)
    except (TypeError, ValueError, OverflowError):
        return 0


def _merged(due: Due, group: Group, num_sums: int, own: Tensor) -> Tensor:
    """``[F, ...]`` of all ranks of a group: sums, and after ``num_sums`` rows maxima."""
    parts = due.gather(own, group)
    return torch.cat([parts[:, :num_sums].sum(0), parts[:, num_sums:].amax(0)])


def pack_bits(layout: PackedLayout, flags_T: Tensor) -> Tensor:
    """uint8, one bit per token of the whole responses: set where a local token has a flag."""
    flags_R = torch.zeros(layout.num_whole_tokens, dtype=torch.uint8, device=flags_T.device)
    flags_R = flags_R.index_copy(0, layout.position_T, flags_T.to(torch.uint8))
    padded = torch.nn.functional.pad(flags_R, (0, -len(flags_R) % _BITS)).view(-1, _BITS)
    return (padded << torch.arange(_BITS, dtype=torch.uint8, device=padded.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """``[length]`` bool."""
    numbers = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> numbers) & 1).flatten()[:length].bool()


def check_streams(streams: PackedStreams, config: CorrectionConfig, cp_group: Group | None) -> None:
    """Refuse tensors that do not fit together, before any communication."""
    layout = streams.layout
    check_instance("config", config, CorrectionConfig)
    check_instance("layout", layout, PackedLayout)
    num_local, num_whole = layout.num_local_tokens, layout.num_whole_tokens
    sizes = {"proximal_logprobs_T": num_local, "behavior_logprobs_T": num_local, "response_mask_R": num_whole}
    sizes |= {} if streams.lag_T is None else {"lag_T": num_local}
    for name, size in sizes.items():
        values = getattr(streams, name)
        check_tensors({name: values})
        if values.dim() != 1:
            raise ValueError(f"{name} must be a 1-D tensor, got shape {list(values.shape)}")
        if len(values) != size:
            raise ValueError(f"{name} has {len(values)} tokens, the layout says {size}")
    ranks = 1 if cp_group is None else group_size(cp_group)
    if layout.is_whole and ranks > 1:
        raise ValueError(
            f"the layout says that every rank holds whole responses, the cp_group has {ranks} ranks, over which their "
            "tokens would count more than once: use PackedLayout.context_parallel, or pass no cp_group"
        )
    if not layout.is_whole and ranks == 1:
        raise ValueError("the layout says that other ranks hold parts of the responses: pass their cp_group")
    # A rank without tokens has no lags.
    if config.staleness and streams.lag_T is None and num_local > 0:
        raise ValueError(
            "staleness, a gate on the lag, or a weight with when: stale: nobody gives the lag of the tokens. In slime "
            "and Miles mis_ext.rollout.generate and mis_ext.prepare_rollout do, elsewhere lag_T of the streams"
        )
