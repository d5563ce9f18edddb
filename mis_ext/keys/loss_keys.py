# SPDX-License-Identifier: Apache-2.0
"""The whole loss that the hosts' flags and our flat keys spell, and who scores its log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from mis_ext.keys.flat import LOSS_KEYS
from mis_ext.keys.run_config import HOST_KEYS, Scoring, ScoringChoice, WholeLoss, steps_per_rollout
from mis_ext.loss.settings import (
    CHECKS,
    KlPenalty,
    KlRatio,
    LossDenominator,
    LossSettings,
    Mode,
    PenaltyTokens,
    Proximal,
    Ratios,
)
from mis_ext.validation import Errors, Key, check_bool, check_number, number, one_of

DEFAULT_SCORING: Scoring = "fused"
"""Where neither a key nor a flag of the host says who scores."""

_RATIOS: dict[str, Ratios] = {"gspo": "sequence", "cispo": "detached"}
_OUR_HOOK = "mis_ext.compute_mis_weights_with_cp"


def _method(key: str, value: Any) -> Any:
    from mis_ext.methods.catalogue import choose_method  # All methods: a loss without one needs none.

    return choose_method(key, value)


LOSS_ROWS: dict[str, Key] = {
    "mis_loss_method": Key(
        _method,
        None,
        "A published method that replaces mis_loss_mode, by its name or with parameters.",
    ),
    "mis_loss_mode": Key(one_of(*get_args(Mode)), "baseline", "What the full policy loss computes."),
    "mis_loss_denominator": Key(one_of(*get_args(LossDenominator)), "original", "The divisor of a response's sum."),
    "mis_loss_constant": Key(
        number(0.0, math.inf, open_low=True, open_high=True),
        None,
        "The divisor of mis_loss_denominator: constant.",
        "tokens",
    ),
    "mis_loss_kl_tokens": Key(one_of(*get_args(PenaltyTokens)), "kept", "Tokens that have a KL penalty."),
    "mis_loss_entropy_tokens": Key(one_of(*get_args(PenaltyTokens)), "kept", "Tokens that have an entropy bonus."),
    "mis_loss_unbiased_kl": Key(check_bool, False, "Multiplies the KL penalty by current / behavior."),
    "mis_loss_proximal": Key(one_of(*get_args(Proximal)), "stored", "Where the proximal log-probs come from."),
    "mis_loss_scoring": Key(one_of(*get_args(Scoring)), DEFAULT_SCORING, "Who turns logits into log-probs."),
    "mis_loss_inplace": Key(check_bool, False, "The gradient replaces the logits in memory."),
}
"""Keys of the full policy loss; what else it reads are flags of the frameworks."""


def read_whole_loss(given: Mapping[str, Any]) -> WholeLoss:
    """What only the whole loss reads of arguments."""
    settings, temperature = loss_settings(given), given.get("rollout_temperature")
    steps = steps_per_rollout(given)
    # From the second step on the current policy is no longer the one before the update.
    if settings.proximal == "current" and steps is not None and steps > 1:
        raise ValueError(
            f"mis_loss_proximal: current with {steps} optimizer steps per rollout (--num-steps-per-rollout, "
            "--global-batch-size): the ratio would be 1 in all of them, and nothing clips; use one step, or remove the "
            "key"
        )
    return WholeLoss(
        settings=settings,
        has_correction=bool(given.get("use_tis")) or bool(given.get("get_mismatch_metrics")),
        skips_scoring=bool(given.get("skip_actor_forward_only")),
        is_told_to_skip=bool(given.get("use_rollout_logprobs")),
        scoring=scoring_choice(given, compares_with_stored=settings.reads_stored),
        temperature=1.0
        if temperature is None
        else check_number("rollout_temperature", temperature, low=0.0, high=math.inf, open_high=True),
        reducer_path=given.get("custom_pg_loss_reducer_function_path"),
    )


def loss_settings(keys: Mapping[str, Any]) -> LossSettings:
    """The loss; every host flag that changes it is honoured here or refused by name. A key that is None is unset."""
    given = {key: keys[key] for key in (*LOSS_KEYS, *HOST_KEYS) if keys.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, (list, dict)) and key != "mis_loss_method":
            raise TypeError(f"{key} must be a single value, got {value!r}")
    wrong, flags = Errors(), dict(CHECKS.values()) | dict.fromkeys(("use_tis", "use_kl_loss", "use_opsm"), check_bool)
    for key, check in (flags | {key: row.check for key, row in LOSS_ROWS.items()}).items():
        if key in given:
            with wrong:
                given[key] = check(key, given[key])
    wrong.raise_all()
    corrects, skips_scoring = given.get("use_tis", False), given.get("use_rollout_logprobs", False)
    fields = {field: given[key] for field, (key, _) in CHECKS.items() if key in given} | {
        "ratios": _RATIOS.get(given.get("advantage_estimator", ""), "token"),
        # With a proximal policy that needs no scoring the flag says no more than that the host skips it.
        "use_behavior": skips_scoring and given.get("mis_loss_proximal") != "current",
        "kl": _kl_penalty(given),
        "opsm_delta": None,
        "constant": given.get("mis_loss_constant"),
    }
    if "mis_loss_method" in given:
        if "mis_loss_mode" in given:
            raise ValueError(
                "mis_loss_method and mis_loss_mode both say what the policy gradient is: remove mis_loss_mode"
            )
        fields["method"] = given["mis_loss_method"]
    if given.get("use_opsm"):
        fields["opsm_delta"] = given.get("opsm_delta", 1e-4)
    settings = LossSettings(**fields)
    if settings.needs_correction and not corrects:
        raise ValueError(
            f"mis_loss_mode: {settings.mode} needs a correction: set use_tis: true and the keys of a weight or a gate "
            "(tis_level: none for no weight)"
        )
    if given.get("use_score_centering"):
        raise ValueError(
            "--use-score-centering: vime adds this term in its own loss, which mis_ext.policy_loss replaces; remove one"
        )
    path = given.get("custom_tis_function_path", _OUR_HOOK)
    if path != _OUR_HOOK and (corrects or given.get("get_mismatch_metrics", False)):
        raise ValueError(
            f"--custom-tis-function-path {path}: mis_ext.policy_loss applies the correction of mis_ext itself and "
            "calls no other; drop the flag, or keep the host's own loss"
        )
    if "custom_pg_loss_reducer_function_path" in given and settings.denominator != "original":
        raise ValueError(
            f"mis_loss_denominator: {settings.denominator}: no effect, because --custom-pg-loss-reducer-function-path "
            "reduces the policy loss; drop one of them"
        )
    if given.get("mis_denominator") == "kept" and settings.denominator in ("kept", "constant"):
        raise ValueError(
            f"mis_denominator: kept and mis_loss_denominator: {settings.denominator} are two denominators: drop one of "
            "them (README, denominators)"
        )
    return settings


def _kl_penalty(given: dict[str, Any]) -> KlPenalty | None:
    of_old = check_bool("use_unbiased_kl", given.get("use_unbiased_kl", False))
    of_behavior, tokens = given.get("mis_loss_unbiased_kl", False), given.get("mis_loss_kl_tokens", "kept")
    if not given.get("use_kl_loss"):
        idle = [key for key in ("mis_loss_unbiased_kl", "mis_loss_kl_tokens") if key in given]
        if idle:
            raise ValueError(f"{', '.join(idle)}: no effect, because --use-kl-loss is not set")
        return None
    if of_old and of_behavior:
        raise ValueError(
            "mis_loss_unbiased_kl (ratio current / behavior) and --use-unbiased-kl (ratio current / old) are two "
            "ratios: drop one of them"
        )
    ratio: KlRatio = "old" if of_old else "behavior" if of_behavior else "none"
    return KlPenalty(
        coefficient=given.get("kl_loss_coef", 0.0), type=given.get("kl_loss_type", "k1"), ratio=ratio, tokens=tokens
    )


def scoring_choice(given: Mapping[str, Any], *, compares_with_stored: bool) -> ScoringChoice:
    """What keys and flags say about the scoring.

    Args:
        given: Arguments by name; None is unset.
        compares_with_stored: Whether the loss compares with log-probs that the host has scored before.
    """
    said, inplace = given.get("mis_loss_scoring"), bool(given.get("mis_loss_inplace"))
    # With these flags fused scoring gives other numbers, or none.
    keeps_host = None
    if given.get("true_on_policy_mode"):
        keeps_host = "--true-on-policy-mode: Miles' own function has the bits of SGLang's"
    # Of one rank the parts are the whole. Whoever does not say how many there are is taken to have several.
    elif given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        keeps_host = (
            "--allgather-cp: the host's own function knows the contiguous parts of the ranks, and exchanges them"
        )
    if said == "fused" and keeps_host is not None:
        raise ValueError(f"mis_loss_scoring: fused with {keeps_host}; write mis_loss_scoring: host, or remove the key")
    # Miles divides bfloat16 logits and rounds again: its log-probs are then 0.02 nats off on average.
    rounds = given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
    if keeps_host is None and compares_with_stored and rounds:
        keeps_host = "--train-backend fsdp with a --rollout-temperature: Miles rounds their quotient"
    by: Scoring = said or (DEFAULT_SCORING if keeps_host is None else "host")
    if inplace and by == "host":
        raise ValueError(
            "mis_loss_inplace: true: no effect, because the host's own function scores "
            f"({keeps_host or 'mis_loss_scoring: host'}); remove it"
        )
    return ScoringChoice(
        by=by,
        said=said,
        inplace=inplace,
        observes_entropy=bool(given.get("observe_training_entropy")),
        replays_top_p=given.get("rollout_top_p") not in (None, 1.0),
    )
