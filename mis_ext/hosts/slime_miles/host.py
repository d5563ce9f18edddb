"""Which host this process is, and what the whole loss takes from it: its groups, and its log-probs of the logits."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.checks import check_number
from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups, find_groups
from mis_ext.hosts.packing import pack
from mis_ext.hosts.scoring import VocabularyPart, score_logits
from mis_ext.hosts.slime_miles.top_p import kept_columns
from mis_ext.keys.run_config import RunConfig, WholeLoss
from mis_ext.loss.policy import MILES_METRICS
from mis_ext.scoring import EntropyUse, KeptColumns, Scores

SLIME = "slime.backends.megatron_utils.loss"
MILES = "miles.backends.training_utils.loss_hub.logit_processors"
MILES_PARALLEL = "miles.backends.training_utils.parallel"

Batch = Mapping[str, Any]


class Host(NamedTuple):
    """``score(config, batch, logits, layout, groups)`` scores the tokens; ``metrics`` are names beyond slime's."""

    groups: Groups
    score: Callable[[RunConfig, Batch, Tensor, PackedLayout, Groups], Scores]
    metrics: frozenset[str] = frozenset()


def is_miles() -> bool:
    """Whether this process has imported Miles' training modules."""
    return MILES in sys.modules


def find_host(args: Any, config: RunConfig) -> Host:
    """Miles or slime, whose training modules this process has imported; else Megatron-Core, or nothing, by itself.

    The hosts' own functions for log-probs take their ``args``; nobody else sees them.
    """
    is_fused = _whole_loss(config).scoring.by == "fused"
    if is_miles():
        state = sys.modules[MILES_PARALLEL].get_parallel_state()
        score = partial(_miles_fused_scores, state) if is_fused else partial(_miles_scores, args)
        return Host(find_groups(state), score, MILES_METRICS)
    if SLIME in sys.modules:
        return Host(find_groups(), _slime_fused_scores if is_fused else partial(_slime_scores, args))
    return Host(find_groups(), plain_scores)


def host_without_ranks(config: RunConfig, groups: Groups) -> Host:
    """As :func:`find_host`, of one rank with the whole vocabulary and ``groups``: it asks the host for nothing.

    Where the host's own function scores, the fused pass of mis_ext stands for it.
    """
    if is_miles():
        alone = types.SimpleNamespace(tp=types.SimpleNamespace(rank=0, size=1, group=None))
        return Host(groups, partial(_miles_fused_scores, alone), MILES_METRICS)
    if SLIME not in sys.modules:
        _refuse_host_scoring(config)
    return Host(groups, partial(_divided_scores, VocabularyPart()))


def plain_scores(config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups) -> Scores:
    """Log-probs and entropy from logits as the hosts compute them, for a batch outside of a host.

    Raises:
        ValueError: A key asks for the function of a host.
    """
    _refuse_host_scoring(config)
    part, temperature = VocabularyPart.of_megatron(), _temperature(config)
    return _fused_scores(config, batch, logits, layout, groups, part=part, temperature=temperature)


def _refuse_host_scoring(config: RunConfig) -> None:
    if _whole_loss(config).scoring.said == "host":
        raise ValueError(
            "mis_loss_scoring: host: neither slime nor Miles runs here, so no host can score; remove the key"
        )


def _whole_loss(config: RunConfig) -> WholeLoss:
    assert config.whole_loss is not None
    return config.whole_loss


def _temperature(config: RunConfig) -> float:
    """By which slime divides, that knows no greedy sampling."""
    temperature = _whole_loss(config).temperature
    return check_number("rollout_temperature", temperature, low=0.0, high=float("inf"), open_low=True)


def _entropy_use(loss: WholeLoss, *, is_observed: bool) -> EntropyUse:
    if loss.settings.entropy_coef != 0.0:
        return "gradient"
    return "value" if is_observed else "none"


def _fused_scores(
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
    loss = _whole_loss(config)
    return score_logits(
        logits,
        batch,
        layout,
        groups=groups,
        part=part,
        is_padded=config.is_padded,
        temperature=temperature,
        entropy=_entropy_use(loss, is_observed=observes_entropy),
        kept=kept,
        inplace=loss.scoring.inplace,
    )


def _divided_scores(
    part: VocabularyPart, config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups
) -> Scores:
    """As slime's own function has them."""
    kept = kept_columns(batch, layout) if _whole_loss(config).scoring.replays_top_p else None
    temperature = _temperature(config)
    return _fused_scores(config, batch, logits, layout, groups, part=part, temperature=temperature, kept=kept)


def _slime_fused_scores(
    config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups
) -> Scores:
    scores = _divided_scores(VocabularyPart.of_megatron(), config, batch, logits, layout, groups)
    slime = sys.modules[SLIME]
    # None while slime captures nothing: then there is no tensor per sample on the way.
    if getattr(slime, "_LOG_PROB_CAPTURE", True) is not None:
        _capture(slime, batch, torch.split(scores.log_prob_T.detach(), [*layout.local_lengths]))
    return scores


def _miles_fused_scores(
    state: Any, config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups
) -> Scores:
    loss = _whole_loss(config)
    return _fused_scores(
        config,
        batch,
        logits,
        layout,
        groups,
        part=VocabularyPart.of_place(state.tp.rank, state.tp.size, state.tp.group),
        # Of greedy sampling Miles leaves the logits as they are.
        temperature=loss.temperature or 1.0,
        observes_entropy=loss.scoring.observes_entropy,
    )


def _slime_scores(
    args: Any, _config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, _groups: Groups
) -> Scores:
    slime = sys.modules[SLIME]
    _, found = slime.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **slime.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    _capture(slime, batch, found["log_probs"])
    return _packed(found, logits, layout)


def _capture(slime: Any, batch: Batch, log_probs: Sequence[Tensor]) -> None:
    """For the debug dump, which takes the log-probs from inside the loss where slime has skipped their own pass."""
    capture = getattr(slime, "_maybe_capture_log_probs", None)
    if capture is not None:
        capture(batch, log_probs)


def _miles_scores(
    args: Any, config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, _groups: Groups
) -> Scores:
    loss = _whole_loss(config)
    entropy = _entropy_use(loss, is_observed=loss.scoring.observes_entropy)
    found = sys.modules[MILES].get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=entropy != "none",
        entropy_requires_grad=entropy == "gradient",
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return _packed(found, logits, layout)


def _packed(found: dict[str, list[Tensor]], logits: Tensor, layout: PackedLayout) -> Scores:
    def packed(name: str) -> Tensor:
        return pack(name, found[name], layout.local_lengths, device=logits.device)

    return Scores(packed("log_probs"), packed("entropy") if found.get("entropy") else None)
