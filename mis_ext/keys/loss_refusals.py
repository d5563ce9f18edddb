# SPDX-License-Identifier: Apache-2.0
"""Refused combinations of the full policy loss, and of keys about the responses to one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mis_ext.loss.words import EPS_CLIP

if TYPE_CHECKING:
    from mis_ext.keys.group_keys import GroupConfig
    from mis_ext.keys.loss_keys import WholeLoss
    from mis_ext.loss.settings import LossSettings

# --- the full policy loss

_OUR_HOOK = "mis_ext.compute_mis_weights_with_cp"


def against_loss(given: Mapping[str, Any], loss: WholeLoss) -> Iterator[str]:
    """Contradictions among keys and flags of the full policy loss."""
    settings, scoring, kl = loss.settings, loss.scoring, bool(given.get("use_kl_loss"))
    yield from _against_mode(settings) if settings.method is None else _against_method(given, settings)
    if settings.proximal == "current" and not settings.uses_proximal:
        yield (
            f"mis_loss_proximal: current: no effect, because {settings.chosen_by} does not compare with the proximal "
            "policy; remove it"
        )
    if settings.proximal == "current" and settings.opsm_delta is not None:
        yield (
            "--use-opsm with mis_loss_proximal: current: the policies that it compares are then one; drop one of them"
        )
    yield from _against_denominator(given, loss)
    if scoring.said == "fused" and scores_of_framework(given, compares_with_stored=False):
        reason = scores_of_framework(given, compares_with_stored=False)
        yield f"mis_loss_scoring: fused with {reason}; write mis_loss_scoring: host, or remove the key"
    if scoring.inplace and scoring.by == "host":
        reason = scores_of_framework(given, compares_with_stored=settings.reads_stored) or "mis_loss_scoring: host"
        yield f"mis_loss_inplace: true: no effect, because the framework's function scores ({reason}); remove it"
    if settings.mode in ("decoupled", "reinforce") and not given.get("use_tis"):
        yield (
            f"mis_loss_mode: {settings.mode} needs a correction: set use_tis: true and the keys of a weight or a gate "
            "(tis_level: none for no weight)"
        )
    if given.get("use_score_centering"):
        yield "--use-score-centering: vime adds this term in its loss, which mis_ext.policy_loss replaces; remove one"
    path = given.get("custom_tis_function_path") or _OUR_HOOK
    if path != _OUR_HOOK and loss.has_correction:
        yield (
            f"--custom-tis-function-path {path}: mis_ext.policy_loss applies the correction of mis_ext, and calls no "
            "other; drop the flag, or keep the framework's loss"
        )
    steps = _steps_per_rollout(given)
    if settings.proximal == "current" and steps is not None and steps > 1:
        # From the second step on the current policy is no longer the one before the update.
        yield (
            f"mis_loss_proximal: current with {steps} optimizer steps per rollout (--num-steps-per-rollout, "
            "--global-batch-size): the ratio would be 1 in all of them, and nothing clips; use one step, or remove the "
            "key"
        )
    idle = [key for key in ("mis_loss_unbiased_kl", "mis_loss_kl_tokens") if given.get(key) is not None]
    if idle and not kl:
        yield f"{', '.join(idle)}: no effect, because --use-kl-loss is not set"
    if kl and given.get("use_unbiased_kl") and given.get("mis_loss_unbiased_kl"):
        yield (
            "mis_loss_unbiased_kl (ratio current / behavior) and --use-unbiased-kl (ratio current / old) are two "
            "ratios: drop one of them"
        )


def _against_method(given: Mapping[str, Any], settings: LossSettings) -> Iterator[str]:
    of = settings.chosen_by
    if given.get("mis_loss_mode") is not None:
        yield "mis_loss_method and mis_loss_mode both say what the policy gradient is: remove mis_loss_mode"
    # A default of the framework looks like a user's value: only other values are the user's.
    replaced = {
        f"--eps-clip {settings.eps_clip:g}": settings.eps_clip != EPS_CLIP,
        f"--eps-clip-high {settings.eps_clip_high}": settings.eps_clip_high not in (None, EPS_CLIP),
        f"--eps-clip-c {settings.eps_clip_c}": settings.eps_clip_c is not None,
        f"--advantage-estimator {given.get('advantage_estimator')}": settings.ratios != "token",
    }
    idle = [text for text, is_set in replaced.items() if is_set]
    if idle:
        yield (
            f"{', '.join(idle)}: no effect, because {of} defines the loss; remove it, and write what should differ as "
            f"{of.replace(': ', ': {name: ')}, ...}}"
        )
    if settings.use_behavior and settings.uses_proximal:
        yield (
            f"{of} compares with the proximal policy, --use-rollout-logprobs skips its scoring: drop the flag, or with "
            "one optimizer step per rollout write mis_loss_proximal: current"
        )
    if settings.needs_reference is not None and settings.kl is not None and settings.kl.coefficient != 0.0:
        yield (
            f"kl_loss_coef={settings.kl.coefficient!r}: {of} has a penalty against the reference policy of its own; "
            "write --kl-loss-coef 0, which keeps the reference log-probs"
        )


def _against_mode(settings: LossSettings) -> Iterator[str]:
    if settings.mode == "decoupled" and settings.use_behavior:
        yield (
            "mis_loss_mode: decoupled compares with the proximal policy, --use-rollout-logprobs makes the behavior "
            "policy the old one: drop the flag, or write mis_loss_mode: bypass"
        )
    if settings.mode == "reinforce" and settings.ratios != "token":
        yield (
            "mis_loss_mode: reinforce has no ratio with gradient: --advantage-estimator gspo and cispo have no effect "
            "there, write grpo"
        )
    if settings.eps_clip_c is not None and (settings.mode == "reinforce" or settings.ratios == "detached"):
        of = "mis_loss_mode: reinforce" if settings.mode == "reinforce" else "--advantage-estimator cispo"
        yield f"eps_clip_c={settings.eps_clip_c!r}: no effect, because {of} has no dual clip; remove it"


def _against_denominator(given: Mapping[str, Any], loss: WholeLoss) -> Iterator[str]:
    denominator, constant = loss.settings.denominator, loss.settings.constant
    if denominator == "constant" and constant is None:
        yield "mis_loss_denominator: constant needs mis_loss_constant, a number of tokens"
    if denominator != "constant" and constant is not None:
        yield f"mis_loss_constant={constant!r}: no effect, because mis_loss_denominator is {denominator}"
    if loss.settings.per_token_loss and denominator != "original":
        yield (
            f"mis_loss_denominator: {denominator}: no effect, because --calculate-per-token-loss divides by all tokens "
            "of the batch outside of the loss; for kept tokens there, write mis_denominator: kept"
        )
    if loss.reducer_path is not None and denominator != "original":
        yield (
            f"mis_loss_denominator: {denominator}: no effect, because --custom-pg-loss-reducer-function-path reduces "
            "the policy loss; drop one of them"
        )
    if given.get("mis_denominator") == "kept" and denominator in ("kept", "constant"):
        yield f"mis_denominator: kept and mis_loss_denominator: {denominator} are two denominators: drop one of them"


def scores_of_framework(given: Mapping[str, Any], *, compares_with_stored: bool) -> str | None:
    """Why only the framework's function gives the log-probs that are needed; None if fused scoring does too.

    ``compares_with_stored``: the loss compares them with log-probs that the framework scored.
    """
    if given.get("true_on_policy_mode"):
        return "--true-on-policy-mode: Miles' own function has the bits of SGLang's"
    # One rank has the whole sequence. Without context_parallel_size there may be several.
    if given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        return "--allgather-cp: the framework's function knows the contiguous parts of the ranks, and exchanges them"
    # Miles divides bfloat16 logits and rounds again: its log-probs are then 0.02 nats off on average.
    rounds = given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
    if compares_with_stored and rounds:
        return "--train-backend fsdp with a --rollout-temperature: Miles rounds their quotient"
    return None


def _steps_per_rollout(given: Mapping[str, Any]) -> int | None:
    """The optimizer steps of a rollout, None where the arguments do not say."""
    steps = given.get("num_steps_per_rollout")
    sizes = [given.get(name) for name in ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")]
    if steps is None and not given.get("use_dynamic_global_batch_size"):
        prompts, samples, per_step = sizes
        if prompts is not None and samples is not None and per_step is not None:
            steps = prompts * samples // per_step
    return steps


# --- responses to one prompt

_COMPARE_SIZES = ("clip_cov", "kl_cov", "maspo")
"""Methods in which the gradient of a token is not linear in its advantage."""
ESTIMATORS = ("grpo", "gspo", "cispo")
"""Of the frameworks, those in which the advantage of every token is the normalized reward."""


def against_groups(given: Mapping[str, Any], group: GroupConfig) -> Iterator[str]:
    """Flags with which keys of responses to one prompt are wrong or have no effect. An absent flag is not checked."""
    rewards, estimator = group.of_rewards, given.get("advantage_estimator") or ESTIMATORS[0]
    is_kept, method = group.over == "kept", given.get("mis_loss_method")
    method = method.get("name") if isinstance(method, Mapping) else method
    changes = [name for name in ("normalize_advantages", "custom_advantage_function_path") if given.get(name)]
    denominators = [
        f"{name}: {given[name]}"
        for name in ("mis_denominator", "mis_loss_denominator", "custom_pg_loss_reducer_function_path")
        if given.get(name) not in (None, "fixed", "original")
    ]

    def is_unset(flag: str) -> bool:
        return flag in given and given[flag] is None

    if group.needs_rollout and is_unset("rollout_data_postprocess_path"):
        yield (
            f"{group.needs_rollout} needs --rollout-data-postprocess-path mis_ext.prepare_rollout, in slime; Miles has "
            "nothing for it"
        )
    if rewards and not is_kept and is_unset("custom_reward_post_process_path"):
        yield f"{rewards} needs --custom-reward-post-process-path mis_ext.group_rewards"
    if rewards and estimator not in (*ESTIMATORS, "reinforce_plus_plus_baseline"):
        yield f"{rewards}: --advantage-estimator {estimator} compares no responses to one prompt"
    if rewards and given.get("rewards_normalization") is False:
        yield f"{rewards}: no effect with --disable-rewards-normalization; remove one of them"
    if is_kept and (changes or estimator not in ESTIMATORS):
        yield (
            f"mis_group_over: kept: with {', '.join(changes) or f'--advantage-estimator {estimator}'} an advantage is "
            "not what the rewards of a prompt say; write trained"
        )
    if group.prompt_mean and method in _COMPARE_SIZES:
        yield (
            f"mis_prompt_mean: true scales advantages, and mis_loss_method: {method} compares their size; remove one "
            "of them"
        )
    if group.prompt_mean and denominators:
        yield f"mis_prompt_mean: true and {', '.join(denominators)} are two denominators; remove one of them"
