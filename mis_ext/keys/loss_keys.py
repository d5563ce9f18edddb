# SPDX-License-Identifier: Apache-2.0
"""The full policy loss: from keys and flags to its settings, and to the function that scores its log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mis_ext.keys.loss_refusals import against_loss, scores_of_framework
from mis_ext.keys.refusals import refuse_first
from mis_ext.keys.rows import DEFAULT_SCORING
from mis_ext.loss.settings import KlPenalty, KlRatio, LossSettings, Ratios
from mis_ext.loss.words import Scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringChoice:
    """Choice of the function from logits to log-probs and entropy.

    Attributes:
        by: That of mis_ext, or that of slime or Miles.
        said: The value of ``mis_loss_scoring``, or None.
        inplace: The gradient overwrites the logits.
        observes_entropy: Miles reports the entropy even if it is no part of the loss (``observe_training_entropy``).
        replays_top_p: slime normalizes over the tokens that top-p kept (``rollout_top_p`` is not 1).
    """

    by: Scoring
    said: Scoring | None
    inplace: bool
    observes_entropy: bool
    replays_top_p: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLoss:
    """Keys that only the full policy loss reads.

    Attributes:
        settings: What it computes.
        has_correction: Whether a correction is applied or measured (``use_tis``, ``get_mismatch_metrics``).
        skips_scoring: The framework has no scoring pass (``skip_actor_forward_only``): its log-probs are stale.
        is_told_to_skip: The framework was told to skip that pass (``use_rollout_logprobs``).
        scoring: Which function turns logits into log-probs.
        temperature: Divides the logits (``rollout_temperature``). At 0, greedy sampling, Miles does not divide.
        reducer_path: ``custom_pg_loss_reducer_function_path``, or None.
    """

    settings: LossSettings
    has_correction: bool
    skips_scoring: bool
    is_told_to_skip: bool
    scoring: ScoringChoice
    temperature: float
    reducer_path: str | None


_RATIOS: dict[str, Ratios] = {"gspo": "sequence", "cispo": "detached"}
_FIELDS = (
    *("mis_loss_mode", "mis_loss_method", "mis_loss_proximal", "mis_loss_denominator", "mis_loss_constant"),
    *("mis_loss_entropy_tokens", "entropy_coef", "eps_clip", "eps_clip_high", "eps_clip_c"),
)
"""Keys and flags that are fields of :class:`LossSettings`, without their prefix."""


def read_whole_loss(given: Mapping[str, Any]) -> WholeLoss:
    """Read what only the full policy loss needs. Each argument is legal, and ``mis_loss_method`` is a method.

    Raises:
        ValueError: Keys or flags contradict each other, or have no effect.
    """
    settings, temperature = _loss_settings(given), given.get("rollout_temperature")
    said, compares = given.get("mis_loss_scoring"), settings.reads_stored
    is_of_framework = scores_of_framework(given, compares_with_stored=compares) is not None
    loss = WholeLoss(
        settings=settings,
        has_correction=bool(given.get("use_tis")) or bool(given.get("get_mismatch_metrics")),
        skips_scoring=bool(given.get("skip_actor_forward_only")),
        is_told_to_skip=bool(given.get("use_rollout_logprobs")),
        scoring=ScoringChoice(
            by=said or ("host" if is_of_framework else DEFAULT_SCORING),
            said=said,
            inplace=bool(given.get("mis_loss_inplace")),
            observes_entropy=bool(given.get("observe_training_entropy")),
            replays_top_p=given.get("rollout_top_p") not in (None, 1.0),
        ),
        temperature=1.0 if temperature is None else float(temperature),
        reducer_path=given.get("custom_pg_loss_reducer_function_path"),
    )
    refuse_first(against_loss(given, loss))
    return loss


def _loss_settings(given: Mapping[str, Any]) -> LossSettings:
    kl = None
    if given.get("use_kl_loss"):
        of_behavior: KlRatio = "behavior" if given.get("mis_loss_unbiased_kl") else "none"
        kl = KlPenalty(
            coefficient=given.get("kl_loss_coef") or 0.0,
            type=given.get("kl_loss_type") or "k1",
            ratio="old" if given.get("use_unbiased_kl") else of_behavior,
            tokens=given.get("mis_loss_kl_tokens") or "kept",
        )
    opsm_delta = 1e-4 if given.get("opsm_delta") is None else given["opsm_delta"]
    return LossSettings(
        ratios=_RATIOS.get(given.get("advantage_estimator") or "", "token"),
        # With mis_loss_proximal: current the flag only means that the framework skips its scoring pass.
        use_behavior=bool(given.get("use_rollout_logprobs")) and given.get("mis_loss_proximal") != "current",
        kl=kl,
        opsm_delta=opsm_delta if given.get("use_opsm") else None,
        per_token_loss=bool(given.get("calculate_per_token_loss")),
        **{key.removeprefix("mis_loss_"): given[key] for key in _FIELDS if given.get(key) is not None},
    )
