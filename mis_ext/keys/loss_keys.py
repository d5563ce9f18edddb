# SPDX-License-Identifier: Apache-2.0
"""The full policy loss that the frameworks' flags and our keys spell, and who scores its log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mis_ext.keys.reading import ScoringChoice, WholeLoss
from mis_ext.keys.rows import DEFAULT_SCORING, FRAMEWORK_ROWS, LOSS_ROWS, check_flags, read_rows
from mis_ext.loss.settings import CHECKS, KlPenalty, KlRatio, LossSettings, Ratios
from mis_ext.loss.words import Scoring
from mis_ext.validation import Errors, check_bool

_RATIOS: dict[str, Ratios] = {"gspo": "sequence", "cispo": "detached"}


def read_whole_loss(given: Mapping[str, Any]) -> WholeLoss:
    """What only the full policy loss reads of arguments."""
    settings, temperature = loss_settings(given), given.get("rollout_temperature")
    return WholeLoss(
        settings=settings,
        has_correction=bool(given.get("use_tis")) or bool(given.get("get_mismatch_metrics")),
        skips_scoring=bool(given.get("skip_actor_forward_only")),
        is_told_to_skip=bool(given.get("use_rollout_logprobs")),
        scoring=_scoring(given, compares_with_stored=settings.reads_stored),
        temperature=1.0 if temperature is None else float(temperature),
        reducer_path=given.get("custom_pg_loss_reducer_function_path"),
    )


def loss_settings(given: Mapping[str, Any]) -> LossSettings:
    """The loss; every flag that changes it is honoured here or refused by name. A key that is None is unset."""
    wrong = Errors()
    check_flags(given, wrong)
    keys = read_rows(LOSS_ROWS | FRAMEWORK_ROWS, given, wrong)
    with wrong:
        check_bool("use_tis", given.get("use_tis") or False)
    wrong.raise_all()
    keys = {key: given[key] for key, _ in CHECKS.values() if given.get(key) is not None} | keys
    fields = {field: keys[key] for field, (key, _) in CHECKS.items() if key in keys} | {
        "ratios": _RATIOS.get(given.get("advantage_estimator") or "", "token"),
        # With a proximal policy that needs no scoring the flag says no more than that the framework skips it.
        "use_behavior": keys.get("use_rollout_logprobs", False) and keys.get("mis_loss_proximal") != "current",
        "kl": None,
        "opsm_delta": keys.get("opsm_delta", 1e-4) if given.get("use_opsm") else None,
        "constant": keys.get("mis_loss_constant"),
    }
    if given.get("use_kl_loss"):
        of_behavior: KlRatio = "behavior" if keys.get("mis_loss_unbiased_kl") else "none"
        fields["kl"] = KlPenalty(
            coefficient=given.get("kl_loss_coef") or 0.0,
            type=given.get("kl_loss_type") or "k1",
            ratio="old" if given.get("use_unbiased_kl") else of_behavior,
            tokens=keys.get("mis_loss_kl_tokens", "kept"),
        )
    if "method" in fields and "mode" in fields:
        raise ValueError("mis_loss_method and mis_loss_mode both say what the policy gradient is: remove mis_loss_mode")
    return LossSettings(**fields)


def _scoring(given: Mapping[str, Any], *, compares_with_stored: bool) -> ScoringChoice:
    """What keys and flags say about the scoring of a loss that may compare with log-probs of the framework."""
    said, inplace = given.get("mis_loss_scoring"), bool(given.get("mis_loss_inplace"))
    # With these flags fused scoring gives other numbers, or none.
    keeps = None
    if given.get("true_on_policy_mode"):
        keeps = "--true-on-policy-mode: Miles' own function has the bits of SGLang's"
    # Of one rank the parts are the whole. Whoever does not say how many there are is taken to have several.
    elif given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        keeps = "--allgather-cp: the framework's function knows the contiguous parts of the ranks, and exchanges them"
    if said == "fused" and keeps is not None:
        raise ValueError(f"mis_loss_scoring: fused with {keeps}; write mis_loss_scoring: host, or remove the key")
    # Miles divides bfloat16 logits and rounds again: its log-probs are then 0.02 nats off on average.
    rounds = given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
    if keeps is None and compares_with_stored and rounds:
        keeps = "--train-backend fsdp with a --rollout-temperature: Miles rounds their quotient"
    by: Scoring = said or (DEFAULT_SCORING if keeps is None else "host")
    if inplace and by == "host":
        raise ValueError(
            "mis_loss_inplace: true: no effect, because the framework's function scores "
            f"({keeps or 'mis_loss_scoring: host'}); remove it"
        )
    return ScoringChoice(
        by=by,
        said=said,
        inplace=inplace,
        observes_entropy=bool(given.get("observe_training_entropy")),
        replays_top_p=given.get("rollout_top_p") not in (None, 1.0),
    )
