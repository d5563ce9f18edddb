# SPDX-License-Identifier: Apache-2.0
"""What the hosts' ``args`` say about a run: read once, checked, typed. Whoever needs more asks for another field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mis_ext.correction.config import CorrectionConfig
from mis_ext.keys.effects import APPLIED, REPORTED, KeysInUse, refuse_idle_keys
from mis_ext.keys.flat import (
    CORRECTION_ROWS,
    GROUP_ROWS,
    LOSS_KEYS,
    READ_KEYS,
    Baseline,
    BaselineOver,
    config_from_mapping,
)
from mis_ext.keys.strays import HOST_CLIPS
from mis_ext.validation import Errors

if TYPE_CHECKING:
    from mis_ext.loss.settings import LossSettings
else:
    LossSettings = Any  # The hook's run has none, and loads no loss.

Scoring = Literal["fused", "host"]

HOST_KEYS = (
    "advantage_estimator",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "entropy_coef",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "use_unbiased_kl",
    "use_opsm",
    "opsm_delta",
    "use_score_centering",
    "use_rollout_logprobs",
    "calculate_per_token_loss",
    "use_tis",
    "get_mismatch_metrics",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
    "mis_denominator",
)
"""Flags of the hosts that the whole loss honours or refuses, and one key of the correction."""

SCORING_FACTS = (
    "allgather_cp",
    "context_parallel_size",
    "observe_training_entropy",
    "rollout_top_p",
    "true_on_policy_mode",
)
"""Flags of the hosts that say how they score."""

REWARD_FLAG, ROLLOUT_FLAG = "custom_reward_post_process_path", "rollout_data_postprocess_path"
_ADVANTAGE_FACTS = ("custom_advantage_function_path", "normalize_advantages", "rewards_normalization")
GROUP_FACTS = (REWARD_FLAG, ROLLOUT_FLAG, *_ADVANTAGE_FACTS, "grpo_std_normalization")
"""Flags of the hosts that say what becomes of the rewards of a prompt."""
ROLLOUT_KEY = "on_policy_tokens"
"""Key of the mapping that ``mis_ext.rollout.generate`` reads."""
GENERATE_FLAG = "custom_generate_function_path"
_GENERATE_FACTS = (ROLLOUT_KEY, GENERATE_FLAG, "load_debug_rollout_data")
ESTIMATORS = ("grpo", "gspo", "cispo")
"""Of the hosts, those in which the advantage of every token is the normalized reward."""

_FACTS = ("loss_type", "qkv_format", "rollout_temperature", "skip_actor_forward_only", "train_backend")
_BATCH_SIZES = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
_STEP_FACTS = ("num_steps_per_rollout", *_BATCH_SIZES, "use_dynamic_global_batch_size")

_ALL_FACTS = (*_FACTS, *SCORING_FACTS, *GROUP_FACTS, *_GENERATE_FACTS, *_STEP_FACTS)
ARGUMENTS = tuple(dict.fromkeys((*READ_KEYS, *HOST_CLIPS, *HOST_KEYS, *_ALL_FACTS)))
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
class GroupConfig:
    """What the answers to one prompt share.

    Attributes:
        baseline: ``mis_group_baseline``: what a reward is compared with.
        over: ``mis_group_over``: which trajectories count in it: ``all``, those that are ``trained``, or those of
            which the correction has ``kept`` a token.
        prompt_mean: ``mis_prompt_mean``: every prompt weighs the same.
        with_deviation: The difference is divided by the deviation (``grpo_std_normalization``).
        num_answers: ``n_samples_per_prompt``, or None.
        per_token_loss: The host divides by all tokens of a step.
        said: The keys that were given.
    """

    baseline: Baseline
    over: BaselineOver
    prompt_mean: bool
    with_deviation: bool
    num_answers: int | None
    per_token_loss: bool
    said: tuple[str, ...]

    @property
    def of_rewards(self) -> str:
        """What is said of the rewards: keys and values; nothing where it is not said."""
        values = {"mis_group_baseline": self.baseline, "mis_group_over": self.over}
        return ", ".join(f"{key}: {value}" for key, value in values.items() if key in self.said)

    @property
    def needs_rollout(self) -> str | None:
        """The key for which the scored rollout must be seen, or None."""
        if self.over == "kept":
            return "mis_group_over: kept"
        return "mis_prompt_mean: true" if self.prompt_mean else None

    @property
    def summary(self) -> str:
        """What is done, in a few words."""
        baseline = f"baseline of a prompt: {self.baseline} over {self.over}" if self.changes_baseline else ""
        return ", ".join(filter(None, (baseline, "every prompt weighs the same" * self.prompt_mean)))

    @property
    def changes_baseline(self) -> bool:
        """Whether a key says something about the baseline."""
        return self.said != ("mis_prompt_mean",)


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
        group: What answers to one prompt share; None where no key says anything about it.
        unplugged: What keys ask of a function that the host is not told to call: a warning each.
    """

    correction: CorrectionConfig
    is_padded: bool
    double_correction: str | None
    also_measures: bool
    divides_by_kept: bool
    whole_loss: WholeLoss | None
    group: GroupConfig | None
    unplugged: tuple[str, ...]


def read_config(given: Mapping[str, Any], *, whole_loss: bool) -> RunConfig:
    """The configuration that arguments spell."""
    wrong, loss, group = Errors(), None, None
    with wrong:
        correction = config_from_mapping(given)
    if whole_loss:
        from mis_ext.keys.loss_keys import read_whole_loss  # And the loss: no call of the hook needs it.

        with wrong:
            loss = read_whole_loss(given)
    if says_group(given):
        with wrong:
            group = read_group(given, denominator=given.get("mis_denominator") or "fixed")
    wrong.raise_all()
    if loss is not None:
        _refuse_idle_of_loss(given, correction, loss)
    config = RunConfig(
        correction=correction,
        is_padded=given.get("qkv_format") == "bshd",
        double_correction=_double_correction(given, correction, loss),
        also_measures=bool(given.get("get_mismatch_metrics")),
        divides_by_kept=given.get("train_backend") == "fsdp",
        whole_loss=loss,
        group=group,
        unplugged=tuple(_unplugged(given, group)),
    )
    if given.get("loss_type") not in (None, "custom_loss"):
        refuse_keys_of_loss(given)
    if config.divides_by_kept:
        _refuse_two_denominators(config)
    return config


def refuse_keys_of_loss(given: Mapping[str, Any]) -> None:
    """Refuse keys of the full policy loss where the host's own loss runs."""
    idle = [key for key in LOSS_KEYS if given.get(key) is not None]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: no effect, because --loss-type is {given.get('loss_type') or 'policy_loss'}; write "
            "--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"
        )


def _refuse_idle_of_loss(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss) -> None:
    method = loss.settings.method
    refuse_idle_keys(
        KeysInUse(
            {key: given[key] for key in (*APPLIED, *REPORTED, *LOSS_KEYS) if given.get(key) is not None},
            {key: row.default for key, row in CORRECTION_ROWS.items()} | dict(given),
            corrects=given.get("use_tis") is True,
            measures=loss.has_correction,
            method_rejects=method is not None and any(each.action == "reject" for each in method.method.factors),
            loses_tokens=correction.rejects_single_tokens,
        )
    )


def _unplugged(given: Mapping[str, Any], group: GroupConfig | None) -> Iterator[str]:
    """What happens in other processes, of which a loss sees nothing: a function of the user's may call ours, or none.

    Of the whole rollout it sees whether ours was called. A host without these flags has ways of its own.
    """
    asked = {}
    keys = given.get(ROLLOUT_KEY)
    if isinstance(keys, Mapping) and keys and not given.get("load_debug_rollout_data"):
        # What else it may be, and which keys there are, the function itself says.
        asked[f"{ROLLOUT_KEY} ({', '.join(map(str, keys))})"] = (GENERATE_FLAG, "mis_ext.rollout.generate")
    if group is not None and group.of_rewards and group.over != "kept":
        asked[group.of_rewards] = (REWARD_FLAG, "mis_ext.group_rewards")
    for what, (argument, function) in asked.items():
        path, flag = given.get(argument), f"--{argument.replace('_', '-')}"
        if path is None and argument in given:
            yield f"{what} does nothing unless a function of yours calls {function}: {flag} is not set"
        elif path is not None and not str(path).startswith("mis_ext."):
            yield f"{what} does nothing unless {flag} {path} calls {function}"


_COMPARE_SIZES = ("clip_cov", "kl_cov", "maspo")
"""Methods in which the gradient of a token is not linear in its advantage."""


def says_group(given: Mapping[str, Any]) -> bool:
    """Whether a key says what the answers to one prompt share."""
    return any(given.get(key) is not None for key in GROUP_ROWS)


def read_group(given: Mapping[str, Any], *, denominator: str = "fixed") -> GroupConfig:
    """What arguments say about the answers to one prompt; flags that are not there are not looked at.

    Args:
        given: Arguments by name.
        denominator: Of the correction.

    Raises:
        ValueError: A flag of the host makes a key wrong, or is needed for it and not set.
    """
    keys = {key: row.check(key, given[key]) for key, row in GROUP_ROWS.items() if given.get(key) is not None}
    estimator = given.get("advantage_estimator") or ESTIMATORS[0]
    config = GroupConfig(
        baseline=keys.get("mis_group_baseline", "mean"),
        over=keys.get("mis_group_over", "trained"),
        prompt_mean=keys.get("mis_prompt_mean", False),
        with_deviation=given.get("grpo_std_normalization") is not False and estimator in ESTIMATORS,
        num_answers=given.get("n_samples_per_prompt"),
        per_token_loss=bool(given.get("calculate_per_token_loss")),
        said=tuple(keys),
    )
    of_rewards = config.of_rewards
    if config.needs_rollout is not None and ROLLOUT_FLAG in given and given[ROLLOUT_FLAG] is None:
        flag = "--rollout-data-postprocess-path mis_ext.prepare_rollout"
        raise ValueError(f"{config.needs_rollout} needs {flag}, in slime; Miles has nothing for it")
    if of_rewards and config.over != "kept" and REWARD_FLAG in given and given[REWARD_FLAG] is None:
        raise ValueError(f"{of_rewards} needs --custom-reward-post-process-path mis_ext.group_rewards")
    if of_rewards and estimator not in (*ESTIMATORS, "reinforce_plus_plus_baseline"):
        raise ValueError(f"{of_rewards}: --advantage-estimator {estimator} compares no answers to one prompt")
    if of_rewards and given.get("rewards_normalization") is False:
        raise ValueError(f"{of_rewards}: no effect with --disable-rewards-normalization; remove one of them")
    changes = [name for name in ("normalize_advantages", "custom_advantage_function_path") if given.get(name)]
    if config.over == "kept" and (changes or estimator not in ESTIMATORS):
        raise ValueError(
            f"mis_group_over: kept: with {', '.join(changes) or f'--advantage-estimator {estimator}'} an advantage "
            "is not what the rewards of a prompt say; write trained"
        )
    method = given.get("mis_loss_method")
    method = method.get("name") if isinstance(method, Mapping) else method
    if config.prompt_mean and method in _COMPARE_SIZES:
        raise ValueError(
            f"mis_prompt_mean: true scales advantages, and mis_loss_method: {method} compares their size; remove one "
            "of them"
        )
    others = [f"mis_denominator: {denominator}"] * (denominator != "fixed")
    others += [
        f"{name}: {given[name]}"
        for name in ("mis_loss_denominator", "custom_pg_loss_reducer_function_path")
        if given.get(name) not in (None, "original")
    ]
    if config.prompt_mean and others:
        raise ValueError(f"mis_prompt_mean: true and {', '.join(others)} are two denominators; remove one of them")
    return config


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


def _refuse_two_denominators(config: RunConfig) -> None:
    if config.correction.denominator == "kept":
        raise ValueError(
            "mis_denominator: kept with Miles' FSDP backend corrects twice: its reducer divides by the returned masks; "
            "remove mis_denominator"
        )
    rejects = any(gate.action == "reject" for gate in config.correction.all_gates.values())
    if config.whole_loss is not None and config.whole_loss.has_correction and rejects:
        raise ValueError(
            "train_backend: fsdp with a configuration that rejects: Miles' FSDP backend divides every term by the "
            "kept tokens, the loss of mis_ext by the original ones; write action: zero for the gates, or keep the "
            "host's own loss with --custom-tis-function-path mis_ext.compute_mis_weights_with_cp"
        )


def steps_per_rollout(given: Mapping[str, Any]) -> int | None:
    """The optimizer steps of a rollout, None where the arguments do not say."""
    steps = given.get("num_steps_per_rollout")
    sizes = [size for size in map(given.get, _BATCH_SIZES) if isinstance(size, int)]
    if steps is None and len(sizes) == len(_BATCH_SIZES) and not given.get("use_dynamic_global_batch_size"):
        prompts, samples, per_step = sizes
        steps = prompts * samples // max(per_step, 1)
    return steps if isinstance(steps, int) else None
