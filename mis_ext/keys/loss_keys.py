# SPDX-License-Identifier: Apache-2.0
"""Read the keys and flags of the full policy loss into its settings, and reject wrong combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mis_ext.correction.config import CorrectionConfig
from mis_ext.keys.reading import ALL_KEPT, Idle, without_effect
from mis_ext.keys.rows import DEFAULT_SCORING, STEPS_OF_ROLLOUT
from mis_ext.loss.settings import KlPenalty, KlRatio, LossSettings, Ratios
from mis_ext.loss.words import EPS_CLIP, Scoring
from mis_ext.validation import Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLoss:
    """Keys and flags that only the full policy loss reads."""

    settings: LossSettings
    has_correction: bool  # A correction is applied or measured (use_tis, get_mismatch_metrics).
    skips_scoring: bool  # The framework runs no scoring pass (skip_actor_forward_only): its log-probs are stale.
    is_told_to_skip: bool  # A flag makes the framework skip that pass (use_rollout_logprobs).
    scoring: Scoring  # The function that turns logits into log-probs: of mis_ext, or of slime or Miles.
    asked_scoring: Scoring | None  # The value of mis_loss_scoring.
    inplace: bool  # The gradient overwrites the logits.
    observes_entropy: bool  # Miles reports the entropy even without an entropy term (observe_training_entropy).
    replays_top_p: bool  # slime normalizes over the top-p nucleus (rollout_top_p is not 1).
    temperature: float  # Divides the logits (rollout_temperature). At 0, greedy sampling, Miles does not divide.
    reducer_path: str | None  # The function of custom_pg_loss_reducer_function_path.


_RATIOS: dict[str, Ratios] = {"gspo": "sequence", "cispo": "detached"}
_FIELDS = (
    *("mis_loss_mode", "mis_loss_method", "mis_loss_proximal", "mis_loss_denominator", "mis_loss_constant"),
    *("mis_loss_entropy_tokens", "entropy_coef", "eps_clip", "eps_clip_high", "eps_clip_c"),
)
"""Keys and flags that are fields of :class:`LossSettings`, without their prefix."""


def read_whole_loss(given: Mapping[str, Any], correction: CorrectionConfig | None, wrong: Errors) -> WholeLoss:
    """Read the keys of the full policy loss, and collect those that contradict other keys or have no effect.

    Each argument is legal, and ``mis_loss_method`` is a method. ``correction`` is None if its keys are wrong.
    """
    settings, asked = _loss_settings(given), given.get("mis_loss_scoring")
    needs_framework = scores_of_framework(given, compares_with_stored=settings.reads_stored) is not None
    temperature = given.get("rollout_temperature")
    loss = WholeLoss(
        settings=settings,
        has_correction=bool(given.get("use_tis")) or bool(given.get("get_mismatch_metrics")),
        skips_scoring=bool(given.get("skip_actor_forward_only")),
        is_told_to_skip=bool(given.get("use_rollout_logprobs")),
        scoring=asked or ("host" if needs_framework else DEFAULT_SCORING),
        asked_scoring=asked,
        inplace=bool(given.get("mis_loss_inplace")),
        observes_entropy=bool(given.get("observe_training_entropy")),
        replays_top_p=given.get("rollout_top_p") not in (None, 1.0),
        temperature=1.0 if temperature is None else float(temperature),
        reducer_path=given.get("custom_pg_loss_reducer_function_path"),
    )
    wrong.refuse(_contradictions(given, loss))
    wrong.refuse(without_effect(_idle_keys(given, loss, correction), given))
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


def scores_of_framework(given: Mapping[str, Any], *, compares_with_stored: bool) -> str | None:
    """The reason why only the framework's function gives the required log-probs; None if fused scoring does too.

    ``compares_with_stored``: the loss compares them with log-probs that the framework scored.
    """
    if given.get("true_on_policy_mode"):
        return "--true-on-policy-mode: Miles' own function is bitwise equal to SGLang's"
    # One rank has the whole sequence. Without context_parallel_size there may be several.
    if given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        return "--allgather-cp: only the framework's function handles and exchanges the contiguous parts of the ranks"
    # Miles divides bfloat16 logits and rounds again. The average error of its log-probs is then 0.02 nats.
    rounds = given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
    if compares_with_stored and rounds:
        return "--train-backend fsdp with a --rollout-temperature: Miles rounds their quotient"
    return None


# --- keys without effect

_PER_TOKEN = "--calculate-per-token-loss divides by all tokens of the batch outside of the loss"


def _idle_keys(given: Mapping[str, Any], loss: WholeLoss, correction: CorrectionConfig | None) -> tuple[Idle, ...]:
    """Conditions under which keys of the loss, and flags that it replaces, have no effect."""
    settings, of, denominator = loss.settings, loss.settings.chosen_by, loss.settings.denominator
    is_mode, has_reducer = settings.method is None, loss.reducer_path is not None
    is_reinforce, is_cispo = is_mode and settings.mode == "reinforce", is_mode and settings.ratios == "detached"
    # A default of the framework looks like a value of the user, so only other values count as given.
    clips = tuple(key for key in ("eps_clip", "eps_clip_high", "eps_clip_c") if given.get(key) not in (None, EPS_CLIP))
    estimator = ("advantage_estimator",) if settings.ratios != "token" else ()
    host = scores_of_framework(given, compares_with_stored=settings.reads_stored) or "mis_loss_scoring: host"
    of_tokens = tuple(key for key in ("mis_loss_entropy_tokens", "mis_loss_kl_tokens") if given.get(key) == "all")
    actions = [] if correction is None else [gate.action for gate in correction.all_gates.values()]
    factors = () if settings.method is None else settings.method.method.factors
    actions += [factor.action for factor in factors if factor.action]
    is_scored_twice = settings.proximal == "current" and not settings.uses_proximal
    rejects_single_tokens = any(each.rejects_single_tokens for each in (correction, *factors) if each is not None)
    is_whole = denominator == "kept" and correction is not None and not rejects_single_tokens
    of_denominator = ("mis_loss_denominator",) if denominator != "original" else ()
    as_parameters = f"set different values as {{name: {of.partition(': ')[2]}, ...}}"
    return (
        Idle(("mis_loss_proximal",), is_scored_twice, f"{of} does not compare with the proximal policy"),
        Idle(("mis_loss_mode",), not is_mode, f"{of} defines the policy gradient"),
        Idle(("mis_loss_inplace",), loss.scoring == "host", f"the framework's function scores ({host})"),
        Idle(("mis_loss_constant",), denominator != "constant", f"mis_loss_denominator is {denominator}"),
        Idle(("mis_loss_unbiased_kl", "mis_loss_kl_tokens"), settings.kl is None, "--use-kl-loss is not set"),
        Idle(
            of_denominator,
            settings.per_token_loss,
            _PER_TOKEN,
            "to divide by kept tokens there, use mis_denominator: kept",
        ),
        Idle(of_denominator, has_reducer, "--custom-pg-loss-reducer-function-path reduces the policy loss"),
        Idle(of_denominator, is_whole, "no response keeps some of its tokens and loses others"),
        Idle((*clips, *estimator), not is_mode, f"{of} defines the loss", as_parameters),
        Idle(estimator, is_reinforce, "mis_loss_mode: reinforce has no ratio with gradient", "use grpo"),
        Idle(("eps_clip_c",), is_reinforce, "mis_loss_mode: reinforce has no dual clip"),
        Idle(("eps_clip_c",), is_cispo, "--advantage-estimator cispo has no dual clip"),
        Idle(of_tokens, correction is not None and "reject" not in actions, ALL_KEPT),
    )


# --- keys and flags that contradict each other

_OUR_HOOK = "mis_ext.compute_mis_weights_with_cp"
_SKIPPED = "compares with the proximal policy, which --use-rollout-logprobs does not score: drop the flag"


def _contradictions(given: Mapping[str, Any], loss: WholeLoss) -> Iterator[str]:
    """Keys and flags that contradict each other."""
    settings, of, denominator, kl = loss.settings, loss.settings.chosen_by, loss.settings.denominator, loss.settings.kl
    is_current = settings.proximal == "current"
    if settings.use_behavior and settings.method is not None and settings.uses_proximal:
        yield f"{of} {_SKIPPED}, or with one optimizer step per rollout use mis_loss_proximal: current"
    if settings.use_behavior and settings.method is None and settings.mode == "decoupled":
        yield f"{of} {_SKIPPED}, or use mis_loss_mode: bypass"
    if settings.needs_reference is not None and kl is not None and kl.coefficient != 0.0:
        cure = "set --kl-loss-coef 0, and keep --use-kl-loss, which scores the reference"
        yield f"kl_loss_coef={kl.coefficient!r}: {of} has this penalty itself; {cure}"
    if is_current and settings.opsm_delta is not None:
        yield "--use-opsm with mis_loss_proximal: current compares a policy with itself; drop one of them"
    # After the first step, the current policy is no longer the policy before the update.
    if is_current and (steps := _steps_per_rollout(given)) > 1:
        flags = "--num-steps-per-rollout, --global-batch-size"
        yield f"mis_loss_proximal: current with {steps} optimizer steps per rollout ({flags}) clips nothing; use 1"
    if denominator == "constant" and settings.constant is None:
        yield "mis_loss_denominator: constant needs mis_loss_constant, a number of tokens"
    if given.get("mis_denominator") == "kept" and denominator in ("kept", "constant"):
        yield f"mis_denominator: kept and mis_loss_denominator: {denominator} are two denominators: drop one of them"
    reason = scores_of_framework(given, compares_with_stored=False)
    if loss.asked_scoring == "fused" and reason is not None:
        yield f"mis_loss_scoring: fused with {reason}; use mis_loss_scoring: host, or remove the key"
    if settings.mode in ("decoupled", "reinforce") and not given.get("use_tis"):
        yield f"{of} needs a correction: set use_tis: true and the keys of a weight or, with tis_level: none, a gate"
    if given.get("use_score_centering"):
        yield "--use-score-centering: vime adds this term in its loss, which mis_ext.policy_loss replaces; remove one"
    path = given.get("custom_tis_function_path") or _OUR_HOOK
    if path != _OUR_HOOK and loss.has_correction:
        yield f"--custom-tis-function-path {path}: mis_ext.policy_loss calls no correction but its own; drop the flag"
    if kl is not None and given.get("use_unbiased_kl") and given.get("mis_loss_unbiased_kl"):
        yield "mis_loss_unbiased_kl (current / behavior) and --use-unbiased-kl (current / old) are two ratios; drop one"


def _steps_per_rollout(given: Mapping[str, Any]) -> int:
    """The optimizer steps of a rollout; 0 if the arguments do not determine them."""
    prompts, samples, per_step, steps = (given.get(name) or 0 for name in STEPS_OF_ROLLOUT)
    is_fixed = per_step and not given.get("use_dynamic_global_batch_size")
    return int(steps or (prompts * samples // per_step if is_fixed else 0))
