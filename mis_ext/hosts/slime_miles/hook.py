# SPDX-License-Identifier: Apache-2.0
"""The correction function that slime and Miles call inside their policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedStreams
from mis_ext.hosts.groups import device_of, find_groups
from mis_ext.hosts.packing import batch_layout, is_absent, pack, unpack
from mis_ext.hosts.session import shared_run


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor] | None,
    rollout_log_probs: list[Tensor] | None,
    loss_masks: list[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Multiply the policy loss by importance weights, reject tokens by gates, and measure the mismatch.

    For ``--custom-tis-function-path mis_ext.compute_mis_weights_with_cp``. Called once per micro-batch by both
    frameworks.

    Several samples can share a rollout, and therefore a denominator, but the frameworks do not pass this information.
    With such samples ``mis_denominator: kept`` is wrong; :func:`~mis_ext.hosts.slime_miles.rollout.prepare_rollout`
    raises an error for them.

    Args:
        args: The framework's arguments, with the keys of docs/reference/configuration.md among them.
        pg_loss: ``[T]``, this rank's response tokens of the micro-batch; may carry gradient.
        train_log_probs: Per sample, this rank's tokens: nats, scored by the trainer before the update (proximal).
        rollout_log_probs: Per sample, this rank's tokens: nats, from the inference engine (behavior).
        loss_masks: Per sample, the whole response; nonzero on tokens that the policy generated.
        total_lengths: Per sample, prompt and response tokens.
        response_lengths: Per sample, response tokens.
        **kwargs: ``parallel_state`` and ``max_seq_lens`` from Miles; anything else is ignored.

    Returns:
        Three values. ``pg_loss`` times the weights; its gradient with respect to the given ``pg_loss`` is the weight.
        One mask per sample over the whole response: the given value on kept tokens, else 0, equal on all
        context-parallel ranks. Detached metrics ``[T]``: every token has the value of its sequence, for the framework's
        reduction with the original masks. With ``get_mismatch_metrics`` and without ``use_tis`` the function returns
        the given ``pg_loss`` and ``loss_masks``.

    Raises:
        ValueError: A key, a length or the data of the first calls is wrong; the message says what to change.
        TypeError: A key or a sample has the wrong type.
        RuntimeError: Another rank failed. The message names it; see its own error.
    """
    groups = find_groups(kwargs.get("parallel_state"))
    device = device_of(pg_loss)
    run = shared_run(args, groups, device=device)
    session, streams = run.session, None
    lengths_or_masks = loss_masks if response_lengths is None else response_lengths
    with session.local_work(lengths_or_masks, groups=groups, device=device, failed=run.failed):
        run.check_rollout()
        if run.config.double_correction is not None:
            session.report("double_correction", run.config.double_correction)
        layout = batch_layout(
            is_padded=run.config.is_padded,
            groups=groups,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            max_seq_lens=kwargs.get("max_seq_lens"),
            device=device,
        )
        if not isinstance(pg_loss, Tensor):
            raise TypeError(f"pg_loss must be a 1-D tensor, got {type(pg_loss).__name__}")
        if pg_loss.shape != (layout.num_local_tokens,):
            raise ValueError(
                f"pg_loss has shape {list(pg_loss.shape)} on context-parallel rank {groups.cp_rank} of "
                f"{groups.cp_size}, but the lengths are [{layout.num_local_tokens}]"
            )
        mask_R = pack("loss_masks", loss_masks, layout.response_lengths, device=device)
        if layout.num_sequences > 0 and (is_absent(train_log_probs) or is_absent(rollout_log_probs)):
            session.report_missing("rollout_log_probs" if is_absent(rollout_log_probs) else "train_log_probs")
        else:
            proximal_T = pack("train_log_probs", train_log_probs, layout.local_lengths, device=device)
            behavior_T = pack("rollout_log_probs", rollout_log_probs, layout.local_lengths, device=device)
            lag_T = session.lags_of(rollout_log_probs, layout.local_lengths, device=device)
            streams = PackedStreams(proximal_T, behavior_T, mask_R, layout, lag_T)
    if streams is None:
        session.join_without_data(response_lengths, groups=groups, device=device)
        not_measured_T = torch.where(layout.local_part(mask_R) != 0, torch.nan, 0.0)
        return pg_loss, loss_masks, dict.fromkeys(run.config.correction.metric_names, not_measured_T)
    correction = session.correct(streams, groups=groups, token_metrics=True)
    if run.config.correction.metrics_only:
        return pg_loss, loss_masks, correction.token_metrics
    return correction.weigh(pg_loss), unpack(correction.loss_mask_R, layout), correction.token_metrics
