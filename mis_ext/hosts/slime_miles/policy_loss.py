"""The whole policy loss, which slime and Miles call in place of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.pipeline import Correction
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import PackedStreams, pack, unpack
from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.host import Host, find_host
from mis_ext.hosts.slime_miles.micro_batch import is_absent, layout_of, report_missing
from mis_ext.hosts.slime_miles.run_config import RunConfig, WholeLoss
from mis_ext.hosts.slime_miles.sessions import Run, run_of
from mis_ext.loss.denominators import num_tokens
from mis_ext.loss.policy import PolicyLoss, Reducer, compute_policy_loss
from mis_ext.loss.settings import LossSettings
from mis_ext.loss.tokens import LossTokens
from mis_ext.methods.batch import Policy


def policy_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch and its metrics.

    For ``--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss``. What it computes is said by the
    hosts' own flags, by the correction's keys and by ``mis_loss_*``, see docs/policy_loss.md.

    Args:
        args: The host's arguments with our keys among them.
        batch: The micro-batch as the host has it; lists per sample, under context parallelism this rank's parts.
        logits: ``[1, T, V / TP]`` packed, or padded ``[B, L, V / TP]``.
        sum_of_sample_mean: The host's reducer. Not called: all its sums are taken together, with the same denominators.

    Returns:
        This rank's sum over samples of per-sample means (or over tokens), with gradient, for the host to scale; and
        metrics of the same kind under the host's names, 0-dim and on the CPU: one copy for all of them.

    Raises:
        ValueError: A flag, a key, a length or the data of the first calls is wrong; the message says what to change.
        TypeError: A key or a sample has the wrong type.
        RuntimeError: Another rank failed; it is named, and its own error says why.
    """
    found = policy_loss_of(run_of(args, whole_loss=True), find_host(args), batch, logits)
    return found.loss, on_host(found.metrics)


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as elements of one tensor on the CPU."""
    values = torch.stack([*metrics.values()]).cpu()
    return dict(zip(metrics, values.unbind(), strict=True))


def policy_loss_of(run: Run, host: Host, batch: Mapping[str, Any], logits: Tensor) -> PolicyLoss:
    """The loss and its metrics, where the logits are."""
    (config, session), loss = run, run.config.whole_loss
    assert loss is not None
    settings = loss.settings
    groups, lengths = host.groups, batch["response_lengths"]
    with session.local_work(lengths, groups=groups, device=logits.device):
        tokens = _tokens(host, config, loss, batch, logits)
        streams = _streams(settings, session, tokens) if loss.has_correction else None
    correction, token_metrics = _correct(session, streams, tokens, groups) if loss.has_correction else (None, None)
    found = compute_policy_loss(
        settings,
        tokens,
        correction=correction,
        token_metrics=token_metrics,
        reducer=_reducer(loss, batch, tokens.layout, correction),
        extra_metrics=host.metrics,
    )
    if tokens.layout.num_local_tokens > 0:
        return found
    # The backward pass of context parallelism has collectives, in which a rank without tokens must take part.
    return found._replace(loss=found.loss + logits.reshape(-1)[:0].sum())


def _tokens(host: Host, config: RunConfig, loss: WholeLoss, batch: Mapping[str, Any], logits: Tensor) -> LossTokens:
    settings, device, groups = loss.settings, logits.device, host.groups
    layout = layout_of(
        is_padded=config.is_padded,
        groups=groups,
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        max_seq_lens=batch.get("max_seq_lens"),
        device=device,
    )

    def packed(key: str) -> Tensor:
        return pack(key, batch[key], layout.local_lengths, device=device)

    current_T, entropy_T = host.score(config, batch, logits, layout, groups)
    log_probs: dict[Policy, Tensor] = {"current": current_T}
    if not is_absent(batch.get("rollout_log_probs")):
        log_probs["behavior"] = packed("rollout_log_probs")
    elif layout.num_sequences == 0:
        log_probs["behavior"] = current_T.detach()
    elif settings.needs_behavior is not None:
        raise ValueError(
            f"rollout_log_probs are missing, with which {settings.needs_behavior} compares: the rollout function must "
            "store the inference engine's log-probs"
        )
    is_scored = not is_absent(batch.get("log_probs")) and not loss.skips_scoring
    log_probs["proximal"] = packed("log_probs") if is_scored else current_T.detach()
    if settings.kl is not None or settings.needs_reference is not None:
        if is_absent(batch.get("ref_log_probs")) and layout.num_sequences > 0:
            raise ValueError(_missing_reference(settings))
        log_probs["reference"] = packed("ref_log_probs")
    state_values_T = None
    if settings.needs_state_values:
        if is_absent(batch.get("state_values")) and layout.num_sequences > 0:
            raise ValueError(
                f"{settings.chosen_by} weighs the value of each token's state, the mean of its advantage there: no "
                "flag of slime or Miles gives it; add state_values to the batch of make_loss_func, or hand them to "
                "policy_loss_from_log_probs"
            )
        state_values_T = packed("state_values")
    if settings.entropy_coef == 0.0 and entropy_T is not None:
        entropy_T = entropy_T.detach()
    mask_R = pack("loss_masks", batch["loss_masks"], layout.response_lengths, device=device)
    has_reverse_kl = not is_absent(batch.get("opd_reverse_kl"))
    return LossTokens(
        log_probs=log_probs,
        advantages_T=packed("advantages"),
        entropy_T=entropy_T,
        response_mask_R=mask_R,
        divisor_S=_divisor(batch.get("rollout_mask_sums"), mask_R, layout, like=current_T),
        reverse_kl_T=packed("opd_reverse_kl") if has_reverse_kl else None,
        layout=layout,
        cp_group=groups.cp_group,
        cp_rank=groups.cp_rank,
        dp_group=groups.dp_group,
        state_values_T=state_values_T,
    )


def _missing_reference(settings: LossSettings) -> str:
    if settings.needs_reference is None:
        return "ref_log_probs are missing: --use-kl-loss needs a reference model (--ref-load)"
    return (
        f"ref_log_probs are missing, with which {settings.needs_reference} compares: --use-kl-loss --kl-loss-coef 0 "
        "--ref-load make the host score the rollout with a reference model"
    )


def _divisor(given: Any, mask_R: Tensor, layout: PackedLayout, *, like: Tensor) -> Tensor:
    """``[S]``: the tokens of each sample's rollout, and without them the sample's own."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if given is None:
        divisor_S = num_tokens(mask_R, layout)
    elif isinstance(given, Sequence) and any(isinstance(each, Tensor) for each in given):
        divisor_S = torch.stack([*given])
    else:
        divisor_S = torch.as_tensor(given)
    if divisor_S.shape != (layout.num_sequences,):
        raise ValueError(
            f"rollout_mask_sums has shape {list(divisor_S.shape)}, there are {layout.num_sequences} samples"
        )
    return divisor_S.to(mask_R.device, dtype, non_blocking=True).clamp_min(1.0)


def _streams(settings: LossSettings, session: Session, tokens: LossTokens) -> PackedStreams | None:
    """What the correction compares: the policy whose ratio is not in the loss yet with the behavior policy."""
    log_probs = tokens.log_probs
    if "behavior" not in log_probs:
        report_missing(session, is_rollout_missing=True)
        return None
    trainer: Policy = "proximal" if settings.uses_proximal else "current"
    return PackedStreams(log_probs[trainer].detach(), log_probs["behavior"], tokens.response_mask_R, tokens.layout)


def _correct(
    session: Session, streams: PackedStreams | None, tokens: LossTokens, groups: Groups
) -> tuple[Correction | None, Mapping[str, Tensor]]:
    """The correction, and its metrics of each token."""
    layout = tokens.layout
    if streams is None:
        device = tokens.response_mask_R.device
        session.measure_nothing(layout.response_lengths, groups=groups, device=device)
        not_measured_T = torch.where(layout.local_part(tokens.response_mask_R) != 0, torch.nan, 0.0)
        return None, dict.fromkeys(session.config.metric_names, not_measured_T)
    correction = session.correct(streams, groups=groups, token_metrics=True)
    return correction, correction.token_metrics


def _reducer(
    loss: WholeLoss, batch: Mapping[str, Any], layout: PackedLayout, correction: Correction | None
) -> Reducer | None:
    """The user's own, made from the returned masks as the hosts do."""
    if loss.reducer_path is None:
        return None
    module, _, name = loss.reducer_path.rpartition(".")
    make = getattr(import_module(module), name)
    masks = batch["loss_masks"]
    if correction is not None and not correction.plan.config.metrics_only:
        masks = unpack(correction.loss_mask_R, layout)
    reducer: Reducer = make(batch["total_lengths"], batch["response_lengths"], masks, loss.settings.per_token_loss)
    return reducer
