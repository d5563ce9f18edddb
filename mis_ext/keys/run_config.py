"""What the hosts' ``args`` say about a run: read once, checked, typed. Whoever needs more asks for another field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mis_ext.correction.config import CorrectionConfig
from mis_ext.keys.flat import READ_KEYS, config_from_mapping
from mis_ext.keys.loss_keys import HOST_KEYS, loss_settings
from mis_ext.keys.stray import HOST_CLIPS
from mis_ext.loss.settings import LOSS_KEYS, LossSettings
from mis_ext.validation import check_bool, check_choice, check_number

Scoring = Literal["fused", "host"]

DEFAULT_SCORING: Scoring = "fused"
"""Where neither a key nor a flag of the host says who scores."""

SCORING_FACTS = (
    "allgather_cp",
    "context_parallel_size",
    "observe_training_entropy",
    "rollout_top_p",
    "true_on_policy_mode",
)
"""Flags of the hosts that say how they score."""

_FACTS = ("loss_type", "qkv_format", "rollout_temperature", "skip_actor_forward_only", "train_backend")
_BATCH_SIZES = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
_STEP_FACTS = ("num_steps_per_rollout", *_BATCH_SIZES, "use_dynamic_global_batch_size")

ARGUMENTS = tuple(dict.fromkeys((*READ_KEYS, *HOST_CLIPS, *HOST_KEYS, *_FACTS, *SCORING_FACTS, *_STEP_FACTS)))
"""Every argument that is read; the names of all others are only compared with ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringChoice:
    """How logits become log-probs and entropy. It does not change what the loss is.

    Attributes:
        by: Who scores, in slime and Miles.
        said: What ``mis_loss_scoring`` says, or None.
        inplace: The gradient takes the place of the logits.
        observes_entropy: Miles reports the entropy also where it is no part of the loss (``observe_training_entropy``).
        replays_top_p: slime normalises over the tokens that top-p kept (``rollout_top_p`` is not 1).
    """

    by: Scoring
    said: Scoring | None
    inplace: bool
    observes_entropy: bool
    replays_top_p: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLoss:
    """What only the whole loss reads.

    Attributes:
        settings: What it computes.
        has_correction: Whether a correction is applied or measured (``use_tis``, ``get_mismatch_metrics``).
        skips_scoring: The host has no scoring pass of its own (``skip_actor_forward_only``): its log-probs are stale.
        is_told_to_skip: The host was told to skip that pass (``use_rollout_logprobs``).
        scoring: Who turns logits into log-probs.
        temperature: Of the rollout, by which logits are divided (``rollout_temperature``); 0 is greedy sampling, for
            which Miles does not divide.
        reducer_path: ``custom_pg_loss_reducer_function_path``, or None.
    """

    settings: LossSettings
    has_correction: bool
    skips_scoring: bool
    is_told_to_skip: bool
    scoring: ScoringChoice
    temperature: float
    reducer_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run of slime, Miles, or a loop with their names.

    Attributes:
        correction: What the correction computes.
        is_padded: Logits are ``[B, L, V]`` (``qkv_format: bshd``), not packed.
        double_correction: How loss and correction together count the mismatch twice, or None.
        also_measures: ``get_mismatch_metrics`` is set.
        divides_by_kept: The host divides by the tokens that are left (Miles' FSDP backend).
        whole_loss: None where the host's own loss runs, and calls the hook.
    """

    correction: CorrectionConfig
    is_padded: bool
    double_correction: str | None
    also_measures: bool
    divides_by_kept: bool
    whole_loss: WholeLoss | None


def read_config(given: Mapping[str, Any], *, whole_loss: bool) -> RunConfig:
    """The configuration that arguments spell.

    Args:
        given: Every argument that is read, by name, and the names of all others.
        whole_loss: Whether the whole loss runs, whose flags then count too.

    Raises:
        ValueError: A key is unknown, out of range, without effect, or contradicts another one.
        TypeError: One has the wrong type, as ``1e-4`` has in YAML.
    """
    correction = config_from_mapping(given)
    loss = _whole_loss(given) if whole_loss else None
    config = RunConfig(
        correction=correction,
        is_padded=given.get("qkv_format") == "bshd",
        double_correction=_double_correction(given, correction, loss),
        also_measures=bool(given.get("get_mismatch_metrics")),
        divides_by_kept=given.get("train_backend") == "fsdp",
        whole_loss=loss,
    )
    _refuse_idle_loss_keys(given)
    _refuse_two_denominators(config)
    return config


def _whole_loss(given: Mapping[str, Any]) -> WholeLoss:
    settings, temperature = loss_settings(given), given.get("rollout_temperature")
    if settings.proximal == "current":
        _refuse_several_steps(given)
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


def _double_correction(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss | None) -> str | None:
    if given.get("mis_loss_method") is not None:
        chosen = None if loss is None or not loss.has_correction else loss.settings.method
        if chosen is None or correction.weight is None or not chosen.method.weighs_behavior:
            return None
        return (
            f"mis_loss_method: {chosen.name} already corrects for the behavior policy: a weight of the correction "
            "counts the mismatch twice; write tis_level: none for gates and vetoes alone, or use_tis: false with "
            "--get-mismatch-metrics to measure only"
        )
    # The other modes of the whole loss do not count it twice, and say so where they are computed.
    is_baseline = given.get("mis_loss_mode") in (None, "baseline") and given.get("mis_loss_proximal") != "current"
    if correction.metrics_only or not is_baseline or not given.get("use_rollout_logprobs"):
        return None
    return (
        "--use-tis together with --use-rollout-logprobs counts the mismatch twice: with the behavior log-probs as PPO "
        "denominator the ratio already corrects it; drop one of the two (also use_tis in the YAML)"
    )


def steps_per_rollout(given: Mapping[str, Any]) -> int | None:
    """The optimizer steps of a rollout, None where the arguments do not say."""
    steps = given.get("num_steps_per_rollout")
    sizes = [size for size in map(given.get, _BATCH_SIZES) if isinstance(size, int)]
    if steps is None and len(sizes) == len(_BATCH_SIZES) and not given.get("use_dynamic_global_batch_size"):
        prompts, samples, per_step = sizes
        steps = prompts * samples // max(per_step, 1)
    return steps if isinstance(steps, int) else None


def _refuse_several_steps(given: Mapping[str, Any]) -> None:
    """From the second step on the current policy is no longer the one before the update."""
    steps = steps_per_rollout(given)
    if steps is not None and steps > 1:
        raise ValueError(
            f"mis_loss_proximal: current with {steps} optimizer steps per rollout (--num-steps-per-rollout, "
            "--global-batch-size): the ratio would be 1 in all of them, and nothing clips; use one step, or remove the "
            "key"
        )


def _refuse_idle_loss_keys(given: Mapping[str, Any]) -> None:
    loss_type = given.get("loss_type")
    idle = [key for key in LOSS_KEYS if given.get(key) is not None]
    if idle and loss_type not in (None, "custom_loss"):
        raise ValueError(
            f"{', '.join(idle)}: no effect, because --loss-type is {loss_type}; write --loss-type custom_loss "
            "--custom-loss-function-path mis_ext.policy_loss"
        )


def _refuse_two_denominators(config: RunConfig) -> None:
    if not config.divides_by_kept:
        return
    if config.correction.denominator == "kept":
        raise ValueError(
            "mis_denominator: kept with Miles' FSDP backend corrects twice: its reducer divides by the returned masks; "
            "remove mis_denominator"
        )
    rejects = any(gate.action == "reject" for gate in config.correction.all_gates)
    if config.whole_loss is not None and config.whole_loss.has_correction and rejects:
        raise ValueError(
            "train_backend: fsdp with a configuration that rejects: Miles' FSDP backend divides every term by the "
            "kept tokens, the loss of mis_ext by the original ones; write action: zero for the gates, or keep the "
            "host's own loss with --custom-tis-function-path mis_ext.compute_mis_weights_with_cp"
        )


def scoring_choice(given: Mapping[str, Any], *, compares_with_stored: bool) -> ScoringChoice:
    """What keys and flags say about the scoring.

    Args:
        given: Arguments by name; None is unset.
        compares_with_stored: Whether the loss compares with log-probs that the host has scored before.

    Raises:
        ValueError: A key is out of range, has no effect, or asks for what only the host's function can do.
        TypeError: One has the wrong type.
    """
    said = given.get("mis_loss_scoring")
    if said is not None:
        said = check_choice("mis_loss_scoring", said, get_args(Scoring))
    inplace = given.get("mis_loss_inplace")
    inplace = inplace is not None and check_bool("mis_loss_inplace", inplace)
    only_host = _what_only_the_host_does(given)
    if said == "fused" and only_host is not None:
        raise ValueError(f"mis_loss_scoring: fused with {only_host}; write mis_loss_scoring: host, or remove the key")
    keeps_host = only_host
    if keeps_host is None and compares_with_stored and _rounds_quotients(given):
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


def _what_only_the_host_does(given: Mapping[str, Any]) -> str | None:
    """The flag with which fused scoring gives other numbers, or none, and why."""
    if given.get("true_on_policy_mode"):
        return "--true-on-policy-mode: Miles' own function has the bits of SGLang's"
    # Of one rank the parts are the whole. Whoever does not say how many there are is taken to have several.
    if given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        return "--allgather-cp: the host's own function knows the contiguous parts of the ranks, and exchanges them"
    return None


def _rounds_quotients(given: Mapping[str, Any]) -> bool:
    """Whether Miles divides bfloat16 logits and rounds again: its log-probs are then 0.02 nats off on average."""
    return given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
