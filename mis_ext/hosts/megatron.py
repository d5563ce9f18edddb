# SPDX-License-Identifier: Apache-2.0
"""Batches as slime, Miles and Megatron loops hold them, lists of tensors per sample: their scores and whole loss.

:func:`make_loss_func` is that for a plain Megatron-Core loop, whose ranks share sequences, batch and vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.pipeline import Correction
from mis_ext.hosts.groups import Groups, find_groups, initialized_megatron
from mis_ext.hosts.output_layer import NoLogits
from mis_ext.hosts.packing import batch_layout, is_absent, pack, unpack
from mis_ext.hosts.runs import Run, chosen_loss, current_run
from mis_ext.hosts.whole_loss import packed_loss, present, tokens_for
from mis_ext.keys.run_config import RunConfig, WholeLoss
from mis_ext.loss.objective import LossTokens
from mis_ext.loss.policy import PolicyLoss, Reducer, num_tokens
from mis_ext.scoring import EntropyUse, KeptColumns, Scores, score_hidden, score_tokens
from mis_ext.scoring.places import response_places
from mis_ext.validation import check_number

Batch = Mapping[str, Any]
LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
_MISSING = {
    "behavior": "rollout_log_probs are missing (the rollout function must store the inference engine's log-probs)",
    "reference": "ref_log_probs are missing (--use-kl-loss with --ref-load makes the host score them; a method with a "
    "penalty of its own takes --kl-loss-coef 0)",
    "state_values": "state_values are missing in the batch (no flag of slime or Miles gives them; a batch of "
    "make_loss_func may have them)",
}


class Host(NamedTuple):
    """``score(config, batch, logits, layout, groups)`` scores the tokens; ``metrics`` are names beyond slime's."""

    groups: Groups
    score: Callable[[RunConfig, Batch, Tensor, PackedLayout, Groups], Scores]
    metrics: frozenset[str] = frozenset()


def make_loss_func(args: Any, batch: Mapping[str, Any], *, groups: Groups | None = None) -> LossFunc:
    """``loss_func(output_tensor)`` of a micro-batch, which a ``forward_step`` returns together with the logits.

    Megatron-Core divides the loss by the number that ``loss_func`` returns, and averages over data- and
    context-parallel ranks. With ``calculate_per_token_loss`` it sums, and divides by the sum of the numbers. The loss
    is scaled for this. So the gradient is that of the mean over samples of per-sample means, or of the mean over
    tokens. Log-probs and entropy are computed here, with Megatron-Core's tensor-parallel group if it is initialised.

    Args:
        args: A namespace or a mapping with the keys of docs/reference/policy_loss.md; the same object for every
            micro-batch of a run. ``calculate_per_token_loss`` must have the same value as in Megatron-Core's
            configuration.
        batch: The batch of :func:`~mis_ext.policy_loss`: lists per sample of ``unconcat_tokens``, ``loss_masks``,
            ``advantages`` and log-probs, with ``total_lengths`` and ``response_lengths``.
        groups: The ranks; by default Megatron-Core's.

    Returns:
        A function of the logits, ``[1, T, V / TP]`` packed, or ``[B, L, V / TP]`` with ``qkv_format: bshd``. It returns
        the loss, the number of samples or of this rank's response tokens (0-dim, int32), and ``[total, count]`` of
        every metric. These are exact under any sum over micro-batches, data- and context-parallel ranks. Metrics of the
        correction count only the samples in which they were measured.
    """
    host = Host(find_groups() if groups is None else groups, plain_scores)
    run, cp_size = current_run(args, whole_loss=True), host.groups.cp_size
    per_token = run.config.correction.per_token_loss

    def loss_func(output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found = batch_loss(run, host, batch, output_tensor)
        number = found.response_T.sum()
        if per_token:
            loss, count = found.loss, number
        else:
            number = torch.full_like(number, len(batch["response_lengths"]))
            # Every context-parallel rank counts all samples, and Megatron-Core averages over these ranks.
            loss, count = found.loss * cp_size, number / cp_size
        values = torch.stack([*found.metrics.values()])
        pairs = torch.stack([values, count.to(values.dtype).expand_as(values)], dim=1)
        # Here no host divides by samples of which nothing is known.
        return loss, number.int(), dict(zip(found.metrics, pairs.unbind(), strict=True)) | found.measured()

    return loss_func


def batch_loss(run: Run, host: Host, batch: Batch, logits: Tensor) -> PolicyLoss:
    """The loss and its metrics, where the logits are."""
    config, loss, groups = run.config, run.loss, host.groups
    settings = loss.settings
    if not (settings.reads_stored or loss.is_told_to_skip or is_absent(batch.get("log_probs"))):
        reason = "mis_loss_proximal: current" if settings.uses_proximal else settings.chosen_by
        warnings.warn(
            f"{reason} does not use the trainer's own pass over the rollout: --use-rollout-logprobs makes the host "
            "skip it",
            stacklevel=4,
        )
    with run.session.local_work(batch["response_lengths"], groups=groups, device=logits.device):
        if config.group is not None:
            run.refuse_unseen_rollout()
        layout = batch_layout(
            is_padded=config.is_padded,
            groups=groups,
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            max_seq_lens=batch.get("max_seq_lens"),
            device=logits.device,
        )
        scores = host.score(config, batch, logits, layout, groups)
        device = scores.log_prob_T.device

        def packed(key: str) -> Tensor:
            return pack(key, batch[key], layout.local_lengths, device=device)

        def optional(key: str) -> Tensor | None:
            if layout.num_sequences == 0:
                return scores.log_prob_T.detach()
            return None if is_absent(batch.get(key)) else packed(key)

        mask_R = pack("loss_masks", batch["loss_masks"], layout.response_lengths, device=device)
        divisor_S = _divisor(batch.get("rollout_mask_sums"), layout)
        given = LossTokens(
            log_probs=present(
                {
                    "current": scores.log_prob_T,
                    "behavior": optional("rollout_log_probs"),
                    "proximal": None if loss.skips_scoring else optional("log_probs"),
                    "reference": optional("ref_log_probs"),
                }
            ),
            advantages_T=packed("advantages"),
            response_mask_R=mask_R,
            divisor_S=num_tokens(mask_R, layout) if divisor_S is None else divisor_S,
            layout=layout,
            entropy_T=scores.entropy_T,
            reverse_kl_T=None if is_absent(batch.get("opd_reverse_kl")) else packed("opd_reverse_kl"),
            state_values_T=optional("state_values"),
            lag_T=run.session.lags_of(batch.get("rollout_log_probs"), layout.local_lengths, device=device)
            if loss.has_correction
            else None,
        )
        run.session.check_mask(mask_R)
        tokens = tokens_for(settings, given, groups, missing=_MISSING)
        if loss.has_correction and "behavior" not in tokens.log_probs:
            run.session.report_missing(is_rollout_missing=True)
    found = packed_loss(
        settings,
        tokens,
        session=run.session if loss.has_correction else None,
        groups=groups,
        make_reducer=partial(_reducer, loss, batch, layout),
        extra_metrics=host.metrics,
    )
    if layout.num_local_tokens > 0 or scores.log_prob_T.requires_grad:
        return found
    # The backward pass of context parallelism has collectives, in which a rank without tokens must take part. Log-probs
    # of no tokens need not come from the logits.
    return found._replace(loss=found.loss + logits.reshape(-1)[:0].sum())


def _divisor(given: Any, layout: PackedLayout) -> Tensor | None:
    """``[S]``: the tokens of each sample's rollout, where the host knows them."""
    if given is None:
        return None
    is_list = isinstance(given, Sequence) and any(isinstance(each, Tensor) for each in given)
    divisor_S = torch.stack([*given]) if is_list else torch.as_tensor(given)
    if divisor_S.shape != (layout.num_sequences,):
        raise ValueError(
            f"rollout_mask_sums has shape {list(divisor_S.shape)}, there are {layout.num_sequences} samples"
        )
    return divisor_S


def _reducer(loss: WholeLoss, batch: Batch, layout: PackedLayout, correction: Correction | None) -> Reducer | None:
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


def positive_temperature(config: RunConfig) -> float:
    """By which logits are divided where greedy sampling is not known."""
    temperature = chosen_loss(config).temperature
    return check_number("rollout_temperature", temperature, low=0.0, high=float("inf"), open_low=True)


def entropy_use(loss: WholeLoss, *, is_observed: bool) -> EntropyUse:
    """What the loss wants of the entropy: a term of its own, a number to log, or nothing."""
    if loss.settings.entropy_coef != 0.0:
        return "gradient"
    return "value" if is_observed else "none"


class VocabularyPart(NamedTuple):
    """The tensor-parallel ranks, each of which has a part of the vocabulary, and this rank among them; None for one."""

    group: Group | None = None
    rank: int = 0


def megatron_vocabulary() -> VocabularyPart:
    """This rank's part of the vocabulary, where Megatron-Core is initialised; else all of it."""
    megatron = initialized_megatron()
    if megatron is None or megatron.get_tensor_model_parallel_world_size() == 1:
        return VocabularyPart()
    return VocabularyPart(megatron.get_tensor_model_parallel_group(), megatron.get_tensor_model_parallel_rank())


def plain_scores(config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups) -> Scores:
    """Log-probs and entropy from logits as the hosts compute them, for a batch outside of a host."""
    refuse_host_scoring(config)
    part, temperature = megatron_vocabulary(), positive_temperature(config)
    return fused_scores(config, batch, logits, layout, groups, part=part, temperature=temperature)


def refuse_host_scoring(config: RunConfig) -> None:
    """Refuse a key that asks for the function of a host."""
    if chosen_loss(config).scoring.said == "host":
        raise ValueError(
            "mis_loss_scoring: host: neither slime nor Miles runs here, so no host can score; remove the key"
        )


def fused_scores(
    config: RunConfig,
    batch: Batch,
    logits: Tensor,
    layout: PackedLayout,
    groups: Groups,
    *,
    part: VocabularyPart,
    temperature: float,
    observes_entropy: bool = True,
    kept: KeptColumns | None = None,
) -> Scores:
    """Log-probs and entropy of the response tokens, in one pass over the logits, or without any from hidden states.

    Args:
        config: What of them is wanted.
        batch: ``unconcat_tokens``, ``total_lengths``, and where samples are padded to other lengths ``max_seq_lens``.
        logits: ``[1, T, V]`` packed or ``[B, L, V]`` padded, this rank's parts of sequences and vocabulary; or what
            :func:`~mis_ext.hosts.output_layer.hand_over_hidden_states` has put in their place.
        layout: The local response tokens.
        groups: The ranks that share sequences.
        part: This rank's part of the vocabulary.
        temperature: Of the rollout, by which the logits are divided.
        observes_entropy: Whether the entropy is logged where the loss has no use for it.
        kept: The tokens among which each one was drawn; None for all.
    """
    loss = chosen_loss(config)
    padded_lengths = None
    if config.is_padded:
        padded_lengths = batch.get("max_seq_lens") or [logits.shape[1] * groups.cp_size] * len(logits)
    places = response_places(
        layout,
        total_lengths=batch["total_lengths"],
        padded_lengths=padded_lengths,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
    )
    all_tokens = pack("unconcat_tokens", batch["unconcat_tokens"], batch["total_lengths"], device=logits.device)
    # Of no samples at all there are no integers.
    token_T, row_T = all_tokens.long().index_select(0, places.token_T), places.row_T
    given: dict[str, Any] = {
        "temperature": temperature,
        "entropy": entropy_use(loss, is_observed=observes_entropy),
        "kept": kept,
        "tp_group": part.group,
        "tp_rank": part.rank,
    }
    if not isinstance(logits, NoLogits):
        if logits.shape[-1] == 0:
            raise ValueError(
                f"logits have shape {list(logits.shape)}: the output layer hands over hidden states, and what stands "
                "between it and the loss has lost them"
            )
        return score_tokens(logits, token_T, row_T=row_T, inplace=loss.scoring.inplace, **given)
    head = logits.head
    if len(logits) > 1:
        # Hidden states are [L, B, H].
        row_T = row_T % logits.shape[1] * len(logits) + row_T // logits.shape[1]
    return score_hidden(
        head.hidden_SBH,
        head.weight,
        token_T,
        row_T=row_T,
        bias=head.bias,
        sequence_parallel=head.sequence_parallel,
        gradient_accumulation_fusion=head.gradient_accumulation_fusion,
        **given,
    )
