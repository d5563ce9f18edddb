"""The correction function that slime and Miles call inside their policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig
from mis_ext.correction import compute_correction
from mis_ext.hosts.groups import Groups, find_groups
from mis_ext.hosts.packing import pack, unpack
from mis_ext.hosts.session import Session, session_for, stored_rollout_scale
from mis_ext.layout import PackedLayout


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
    """Weigh the policy loss by importance weights, reject what a gate rejects, and measure the mismatch.

    For ``--custom-tis-function-path mis_ext.compute_mis_weights_with_cp``. Called once per micro-batch by both hosts.

    Args:
        args: The host's arguments with our keys among them, see the README.
        pg_loss: ``[T]``, this rank's response tokens of the micro-batch; may carry gradient.
        train_log_probs: Per sample, this rank's tokens: nats, scored by the trainer before the update (proximal).
        rollout_log_probs: The same as reported by the inference engine (behavior).
        loss_masks: Per sample, the whole response; nonzero on tokens that the policy generated.
        total_lengths: Per sample, prompt and response tokens.
        response_lengths: Per sample, response tokens.
        **kwargs: ``parallel_state`` and ``max_seq_lens`` from Miles; anything else is ignored.

    Returns:
        The weighted ``pg_loss``, whose gradient with respect to the given one is the weight; one mask per sample over
        the whole response, 1.0 where kept, equal on all context-parallel ranks; and detached metrics ``[T]`` for the
        host's reduction with the original masks. With ``get_mismatch_metrics`` and without ``use_tis`` the given
        ``pg_loss`` and ``loss_masks`` themselves come back.

    Raises:
        ValueError: A key, a length or the data of the first call is wrong; the message says what to change.
    """
    session = session_for(args)
    config = session.config
    groups = find_groups(kwargs.get("parallel_state"))
    layout = _layout(args, groups, total_lengths, response_lengths, kwargs.get("max_seq_lens"), pg_loss.device)
    if pg_loss.numel() != layout.num_local_tokens:
        raise ValueError(
            f"pg_loss has {pg_loss.numel()} tokens on context-parallel rank {groups.cp_rank} of {groups.cp_size}, the "
            f"lengths say {layout.num_local_tokens}"
        )
    if train_log_probs and rollout_log_probs:
        is_missing = False
        proximal_T = pack("train_log_probs", train_log_probs, layout.local_lengths, device=pg_loss.device)
        behavior_T = pack("rollout_log_probs", rollout_log_probs, layout.local_lengths, device=pg_loss.device)
    else:
        is_missing = True
        _report_missing(session, is_rollout_missing=not rollout_log_probs)
        # Nothing is measured, but the collectives run as on every other rank.
        proximal_T = behavior_T = torch.full_like(pg_loss, torch.nan)
    correction = compute_correction(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        response_mask_R=pack("loss_masks", loss_masks, response_lengths, device=pg_loss.device),
        layout=layout,
        config=config,
        cp_group=groups.cp_group,
        dp_group=groups.dp_group,
        rollout_scale=stored_rollout_scale(config) if config.scope == "rollout" else None,
        host_metrics=True,
    )
    if is_missing:
        not_measured_T = torch.where(correction.tokens.response_mask_T, torch.nan, 0.0)
        return pg_loss, loss_masks, dict.fromkeys(correction.host_metrics, not_measured_T)
    session.check(correction, layout, groups)
    if config.metrics_only:
        return pg_loss, loss_masks, correction.host_metrics
    return correction.weigh(pg_loss), unpack(correction.loss_mask_R, layout), correction.host_metrics


def compute_mis_weights(
    config_or_args: CorrectionConfig | Any,
    *,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Weights, keep masks and metrics of whole responses on one rank, for tests and analysis.

    Args:
        config_or_args: A configuration, or any object with the flat keys as attributes.
        train_log_probs: Per sample ``[R_i]``: nats, scored by the trainer before the update (proximal).
        rollout_log_probs: The same as reported by the inference engine (behavior).
        loss_masks: Per sample ``[R_i]``; nonzero on tokens that the policy generated.

    Returns:
        Per sample the weights (float32, 0 where a token has none) and the keep mask (1.0 or 0.0); and every metric as a
        0-dim tensor, a mean over what its row in the README's glossary says. These samples are the whole scope.
    """
    is_config = isinstance(config_or_args, CorrectionConfig)
    config = config_or_args if is_config else CorrectionConfig.from_mapping(vars(config_or_args))
    lengths = [mask.numel() for mask in loss_masks]
    device = loss_masks[0].device if loss_masks else torch.device("cpu")
    layout = PackedLayout.whole(lengths, device=device)
    proximal_T, behavior_T, response_mask_R = (
        pack(name, tensors, lengths, device=device)
        for name, tensors in (
            ("train_log_probs", train_log_probs),
            ("rollout_log_probs", rollout_log_probs),
            ("loss_masks", loss_masks),
        )
    )
    correction = compute_correction(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        response_mask_R=response_mask_R,
        layout=layout,
        config=config.replace(scope="micro_batch"),
    )
    metrics = {name: metric.value() for name, metric in correction.metrics.items()}
    return unpack(correction.weights_T, layout), unpack(correction.loss_mask_R, layout), metrics


def _layout(
    args: Any,
    groups: Groups,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None,
    device: torch.device,
) -> PackedLayout:
    is_padded = getattr(args, "qkv_format", "thd") == "bshd"
    if is_padded and groups.cp_size > 1 and max_seq_lens is None:
        raise ValueError("qkv_format: bshd with context parallelism needs max_seq_lens")
    return PackedLayout.context_parallel(
        response_lengths,
        total_lengths=total_lengths,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        padded_lengths=max_seq_lens if is_padded else None,
        device=device,
    )


def _report_missing(session: Session, *, is_rollout_missing: bool) -> None:
    if session.config.metrics_only:
        return  # The hosts may measure without log-probs: the metrics then say so by being NaN.
    if is_rollout_missing:
        message = "rollout_log_probs are missing: the rollout function must store the inference engine's log-probs"
    else:
        message = "train_log_probs are missing: the host must score the rollout with the trainer before training"
    session.report("missing_log_probs", message)
