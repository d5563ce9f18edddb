# SPDX-License-Identifier: Apache-2.0
"""slime's other hook: the whole rollout before it is trained on."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.collectives import gather_rows
from mis_ext.correction.pipeline import Correction
from mis_ext.correction.weights import WeightScale, ratio_or_one
from mis_ext.hosts.groups import device_of, find_groups, initialized_megatron
from mis_ext.hosts.guards import raise_if_failed
from mis_ext.hosts.packing import PackedStreams, TokenLags, check_samples, is_absent, pack_rollout
from mis_ext.hosts.runs import session_for
from mis_ext.hosts.session import Session
from mis_ext.rollout.custom_generate.host import VERSIONS

_REMEDY = "use tis_normalize_scope: data_parallel and fixed bounds there"


def prepare_rollout(args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None) -> None:
    """Compute the numbers of the whole rollout on all ranks: adapted bounds of gates, scale of weights, lags of tokens.

    For ``--rollout-data-postprocess-path mis_ext.prepare_rollout``. With ``mis_staleness`` each token gets its lag, see
    :func:`_token_lags`. Gates with a ``target_accept`` get the bounds of
    this rollout, see :mod:`mis_ext.hosts.acceptance`. With ``tis_normalize_scope: rollout`` every micro-batch is then
    scaled by the same two numbers, for any split of the rollout into micro-batches and ranks. With ``mis_denominator:
    kept``, samples that share a rollout share its denominator, as in the host's reducer.

    Args:
        args: The host's arguments.
        rollout_id: Number of the rollout, for messages.
        rollout_data: This rank's samples: ``log_probs``, ``rollout_log_probs``, ``loss_masks``, ``total_lengths``,
            ``response_lengths``, and ``rollout_mask_sums`` where the host has them.

    Raises:
        ValueError: The host gives no rollout data (Miles), has not scored the rollout before training, or lets samples
            share denominators that ``mis_denominator: kept`` cannot know in another scope.
        RuntimeError: Another rank failed; it is named, and its own error says why.
    """
    session = session_for(args)
    session.rollout_scale = None
    config = session.config
    if config.staleness:
        session.token_lags = _token_lags(rollout_data)
    is_over_rollout = config.scope == "rollout" and config.is_scaled
    has_targets = bool(config.adapted_gates)
    if config.metrics_only or not (is_over_rollout or has_targets or config.denominator == "kept"):
        return
    if rollout_data is None:
        if has_targets:
            raise ValueError("target_accept: this host passes no rollout data; write fixed bounds")
        if is_over_rollout:
            raise ValueError("tis_normalize_scope: rollout: this host passes no rollout data; use data_parallel")
        return
    megatron = initialized_megatron()
    if megatron is not None and not megatron.is_pipeline_last_stage():
        return
    groups = find_groups()
    of_sequences = groups.without_data_parallelism
    lengths, device = rollout_data.get("response_lengths") or (), device_of(*rollout_data.get("loss_masks") or ())

    def packed(key: str) -> PackedStreams:
        streams = pack_rollout(rollout_data, groups, rollout_id, device=device, key=key, remedy=_REMEDY)
        sides = rollout_data["rollout_log_probs"], streams.layout.local_lengths
        return streams._replace(lag_T=session.lags_of(*sides, device=device))

    if has_targets:
        session.adapt_to(
            lambda: packed("target_accept"),
            lengths,
            groups=groups,
            device=device,
        )
    if not (is_over_rollout or config.denominator == "kept"):
        return
    over_rollout = Session(config.replace(scope="micro_batch", metrics=()))
    over_rollout.acceptance = session.acceptance
    denominator_S = streams = None
    try:
        if config.denominator == "kept" and not config.per_token_loss:
            denominator_S = _shared_denominators(rollout_data, device)
        if not is_over_rollout and denominator_S is not None:
            raise ValueError(
                "mis_denominator: kept: several samples of this rollout share a denominator, which is known to "
                "tis_normalize_scope: rollout only; use that, or mis_denominator: fixed"
            )
        if is_over_rollout:
            streams = packed("tis_normalize_scope: rollout")
    except Exception:
        gather_rows(
            _terms(over_rollout.neutral(lengths, groups=of_sequences, device=device, fails=True)), groups.dp_group
        )
        raise
    if streams is None:
        correction = over_rollout.neutral(lengths, groups=of_sequences, device=device)
    else:
        correction = over_rollout.compute(streams, groups=of_sequences)
    terms_W5 = gather_rows(_terms(correction, denominator_S), groups.dp_group)
    raise_if_failed(float(terms_W5[:, -1].amin()))
    if is_over_rollout:
        weight_sum, weight_count, original_terms, kept_terms, _ = terms_W5.sum(0).unbind()
        session.rollout_scale = WeightScale(
            mean_weight=ratio_or_one(weight_sum, weight_count),
            denominator_factor=ratio_or_one(original_terms, kept_terms),
        )


def _token_lags(rollout_data: dict[str, Any] | None) -> TokenLags | str:
    """The lags of this rank's tokens, or why there are none: the loss says it, where the other ranks hear of it.

    ``mis_ext.rollout.generate`` stores the version of each token where the hosts carry a number per token to the
    trainer, the log-probs of a teacher. The trainer's own version is the number of times that it has sent its weights
    to the engine. Neither host passes it on, nor Miles the rollout: both are read from the trainer that calls.
    """
    frame = sys._getframe(1)
    trainer: Any = None
    while frame is not None and trainer is None:
        found = frame.f_locals.get("self")
        if hasattr(getattr(found, "weight_updater", None), "weight_version"):
            trainer, rollout_data = found, frame.f_locals.get("rollout_data", rollout_data)
        frame = frame.f_back  # type: ignore[assignment]
    if trainer is None or rollout_data is None:
        return "mis_staleness: this trainer has no weight_updater with a weight_version, from which lags are counted"
    # Taken out: it is nobody's log-prob, and the host would report its mean.
    versions = rollout_data.pop(VERSIONS, None)
    if versions is None or is_absent(rollout_data.get("rollout_log_probs")):
        return (
            "mis_staleness: the rollout has no version for each token: give --custom-generate-function-path "
            "mis_ext.rollout.generate"
        )
    current = float(trainer.weight_updater.weight_version)
    return TokenLags(rollout_data["rollout_log_probs"], [current - version.float() for version in versions])


def _shared_denominators(rollout_data: dict[str, Any], device: torch.device) -> Tensor | None:
    """``[S]``, what the host divides each sample's sum by, if that is not its own number of tokens."""
    given = rollout_data.get("rollout_mask_sums")
    if given is None:
        return None
    masks = rollout_data["loss_masks"]
    check_samples("loss_masks", masks)
    shared_S = torch.as_tensor(given, dtype=torch.float32, device=device)
    own_S = torch.stack([mask.sum() for mask in masks]).float() if masks else shared_S.new_zeros(0)
    if shared_S.shape != own_S.shape:
        raise ValueError(f"rollout_mask_sums has shape {list(shared_S.shape)}, there are {len(masks)} loss_masks")
    # A sample without trainable tokens adds nothing, whatever it is divided by.
    is_own = bool(((shared_S == own_S) | (own_S == 0.0)).all())
    return None if is_own else shared_S.clamp_min(1.0)


def _terms(correction: Correction, denominator_S: Tensor | None = None) -> Tensor:
    """``[5]``: sum and number of weights; terms of the host's mean, all and kept; the status."""
    names = ("weight_sum", "weight_count", "original_terms", "kept_terms")
    terms = [correction.totals[f"total_{name}"] for name in names]
    if denominator_S is not None:
        # Samples of one rollout share a denominator, whichever micro-batch they are in.
        terms[2:] = [(correction.sequences[count] / denominator_S).sum() for count in ("num_response", "num_kept")]
    return torch.stack([*terms, correction.status])
