"""slime's other hook: the whole rollout before it is trained on."""

from __future__ import annotations

from typing import Any

from mis_ext.collectives import gather_rows
from mis_ext.correction import compute_correction
from mis_ext.hosts.groups import find_groups, initialized_megatron
from mis_ext.hosts.packing import pack
from mis_ext.hosts.session import session_for, store_rollout_scale
from mis_ext.layout import PackedLayout
from mis_ext.normalization import GroupTotals, merge_totals


def prepare_rollout(args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None) -> None:
    """Compute the normaliser of the whole rollout over all ranks, for ``tis_normalize_scope: rollout``.

    For ``--rollout-data-postprocess-path mis_ext.hosts.slime.prepare_rollout``. Every micro-batch of the rollout
    is then scaled by the same two numbers, however the rollout is cut into micro-batches and ranks.

    Args:
        args: The host's arguments.
        rollout_id: Number of the rollout, for messages.
        rollout_data: This rank's samples: ``log_probs``, ``rollout_log_probs``, ``loss_masks``, ``total_lengths``,
            ``response_lengths``.

    Raises:
        ValueError: The host gives no rollout data (Miles), or has not scored the rollout before training.
    """
    config = session_for(args).config
    if config.scope != "rollout" or config.metrics_only:
        return
    if rollout_data is None:
        raise ValueError("tis_normalize_scope: rollout: this host passes no rollout data; use data_parallel")
    megatron = initialized_megatron()
    if megatron is not None and not megatron.is_pipeline_last_stage():
        return
    missing = [key for key in ("log_probs", "rollout_log_probs") if not rollout_data.get(key)]
    if missing:
        raise ValueError(
            f"tis_normalize_scope: rollout: rollout {rollout_id} has no {' and no '.join(missing)}; slime skips the "
            "separate scoring pass with one optimiser step per rollout: use tis_normalize_scope: data_parallel there"
        )
    groups = find_groups()
    device = rollout_data["log_probs"][0].device
    layout = PackedLayout.context_parallel(
        rollout_data["response_lengths"],
        total_lengths=rollout_data["total_lengths"],
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        device=device,
    )
    local_lengths = layout.local_lengths
    correction = compute_correction(
        proximal_logprobs_T=pack("log_probs", rollout_data["log_probs"], local_lengths, device=device),
        behavior_logprobs_T=pack("rollout_log_probs", rollout_data["rollout_log_probs"], local_lengths, device=device),
        response_mask_R=pack("loss_masks", rollout_data["loss_masks"], layout.response_lengths, device=device),
        layout=layout,
        config=config.replace(scope="micro_batch", metrics=()),
        cp_group=groups.cp_group,
    )
    totals_K = merge_totals(gather_rows(correction.totals_K, groups.dp_group))
    store_rollout_scale(config, GroupTotals._make(totals_K.unbind()).scale())
