"""The loss that the hosts' flags and our flat keys spell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from mis_ext.loss.settings import LOSS_KEYS, KlPenalty, KlRatio, LossSettings, PenaltyTokens, Ratios
from mis_ext.validation import check_bool, check_choice, check_number

if TYPE_CHECKING:
    from mis_ext.methods.catalogue import ChosenMethod

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
    "use_rollout_logprobs",
    "calculate_per_token_loss",
    "use_tis",
    "get_mismatch_metrics",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
    "mis_denominator",
)
"""Flags of the hosts that the loss honours or refuses, and one key of the correction."""

_KEYS = (*LOSS_KEYS, *HOST_KEYS)
_RATIOS: dict[str, Ratios] = {"gspo": "sequence", "cispo": "detached"}
_OUR_HOOK = "mis_ext.compute_mis_weights_with_cp"


def loss_settings(keys: Mapping[str, Any]) -> LossSettings:
    """The loss; every host flag that changes it is honoured here or refused by name. A key that is None is unset.

    Raises:
        ValueError: A flag or key is out of range, without effect, or contradicts another one.
        TypeError: One has the wrong type, as ``1e-4`` has in YAML.
    """
    given = {key: keys[key] for key in _KEYS if keys.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, (list, dict)) and key != "mis_loss_method":
            raise TypeError(f"{key} must be a single value, got {value!r}")
    corrects = check_bool("use_tis", given.get("use_tis", False))
    if "mis_loss_method" in given and "mis_loss_mode" in given:
        raise ValueError("mis_loss_method and mis_loss_mode both say what the policy gradient is: remove mis_loss_mode")
    skips_scoring = check_bool("use_rollout_logprobs", given.get("use_rollout_logprobs", False))
    settings = LossSettings(
        method=_method(given),
        ratios=_RATIOS.get(given.get("advantage_estimator", ""), "token"),
        # With a proximal policy that needs no scoring the flag says no more than that the host skips it.
        use_behavior=skips_scoring and given.get("mis_loss_proximal") != "current",
        kl=_kl_penalty(given),
        opsm_delta=_opsm_delta(given),
        per_token_loss=given.get("calculate_per_token_loss", False),
        **{
            field: given[key]
            for field, key in {
                "mode": "mis_loss_mode",
                "denominator": "mis_loss_denominator",
                "constant": "mis_loss_constant",
                "entropy_tokens": "mis_loss_entropy_tokens",
                "compiled": "mis_loss_compile",
                "proximal": "mis_loss_proximal",
                "eps_clip": "eps_clip",
                "eps_clip_high": "eps_clip_high",
                "eps_clip_c": "eps_clip_c",
                "entropy_coef": "entropy_coef",
            }.items()
            if key in given
        },
    )
    if settings.needs_correction and not corrects:
        raise ValueError(
            f"mis_loss_mode: {settings.mode} needs a correction: set use_tis: true and the keys of a weight or a gate "
            "(tis_level: none for no weight)"
        )
    if corrects or given.get("get_mismatch_metrics", False):
        _refuse_other_corrections(given)
    _refuse_two_denominators(given, settings)
    return settings


def _method(given: dict[str, Any]) -> ChosenMethod | None:
    if "mis_loss_method" not in given:
        return None
    from mis_ext.methods.catalogue import choose_method  # All methods: a loss without one needs none.

    return choose_method("mis_loss_method", given["mis_loss_method"])


def _kl_penalty(given: dict[str, Any]) -> KlPenalty | None:
    of_old = check_bool("use_unbiased_kl", given.get("use_unbiased_kl", False))
    of_behavior = check_bool("mis_loss_unbiased_kl", given.get("mis_loss_unbiased_kl", False))
    tokens = check_choice("mis_loss_kl_tokens", given.get("mis_loss_kl_tokens", "kept"), get_args(PenaltyTokens))
    if not check_bool("use_kl_loss", given.get("use_kl_loss", False)):
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


def _opsm_delta(given: dict[str, Any]) -> float | None:
    if not check_bool("use_opsm", given.get("use_opsm", False)):
        return None
    return check_number("opsm_delta", given.get("opsm_delta", 1e-4), low=-float("inf"), high=float("inf"))


def _refuse_other_corrections(given: dict[str, Any]) -> None:
    path = given.get("custom_tis_function_path", _OUR_HOOK)
    if path != _OUR_HOOK:
        raise ValueError(
            f"--custom-tis-function-path {path}: mis_ext.policy_loss applies the correction of mis_ext itself and "
            "calls no other; drop the flag, or keep the host's own loss"
        )


def _refuse_two_denominators(given: dict[str, Any], settings: LossSettings) -> None:
    if "custom_pg_loss_reducer_function_path" in given and settings.denominator != "original":
        raise ValueError(
            f"mis_loss_denominator: {settings.denominator}: no effect, because --custom-pg-loss-reducer-function-path "
            "reduces the policy loss; drop one of them"
        )
    if "custom_pg_loss_reducer_function_path" in given and settings.compiled:
        raise ValueError("mis_loss_compile: no effect, because --custom-pg-loss-reducer-function-path is not compiled")
    if given.get("mis_denominator") == "kept" and settings.denominator in ("kept", "constant"):
        raise ValueError(
            f"mis_denominator: kept and mis_loss_denominator: {settings.denominator} are two denominators: drop one of "
            "them (README, denominators)"
        )
