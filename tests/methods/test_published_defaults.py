"""Every method's published defaults and the limits that users read of, once more: a table that no code computes."""

import inspect

import pytest

from mis_ext.checks import limits
from mis_ext.keys.flat import config_from_mapping
from mis_ext.loss.naive import naive_policy_loss
from mis_ext.loss.settings import LossSettings
from mis_ext.methods import METHODS

DEFAULTS = {
    "ppo": {"low": 0.2, "high": 0.2},
    "dapo": {"low": 0.2, "high": 0.28},
    "dual_clip": {"low": 0.2, "high": 0.2, "dual": 3.0},
    "bypass": {"low": 0.2, "high": 0.2},
    "kimi_k2_5": {"low": 0.5, "high": 2.0, "tau": 0.001},
    "dcpo": {"low": 0.1, "high": 0.2, "cap": 10.0},
    "decoupled": {},
    "decoupled_token_tis": {"high": 2.0},
    "decoupled_sequence_tis": {"high": 2.0},
    "decoupled_token_clip": {"low": 0.5, "high": 2.0},
    "decoupled_tempered": {"power": 0.5},
    "decoupled_mixed": {"mix": 0.5},
    "icepop": {"low": 0.5, "high": 5.0, "normalize_over": None},
    "glm_5_reasoning": {"beta": 2.0, "low": 0.2, "high": 0.28},
    "token_mis": {"low": 0.5, "high": 2.0},
    "sequence_mis": {"low": 0.5, "high": 2.0},
    "geometric_rs": {"low": 0.999, "high": 1.001},
    "segment_rs": {"low": 0.8, "high": 1.2},
    "geometric_rs_token_tis": {"low": 0.999, "high": 1.001, "bound": 2.0},
    "sequence_mask_tis": {"low": 0.999, "high": 1.002},
    "veto": {"low": 0.0001},
    "trm": {"high_max": 0.05, "high_mean": 0.001},
    "sequence_error": {"high": 1.05},
    "reinforce": {},
    "reinforce_token_is": {},
    "dro": {"beta": 0.05},
    "aipo": {"high": 4.0},
    "reinforce_sequence_tis": {"high": 2.0},
    "reinforce_sequence_snis": {},
    "reinforce_sequence_psis": {"high": 10.0},
    "cispo": {"low": 0.0, "high": 5.0},
    "dispo": {"positive": (0.5, 2.0), "negative": (0.2, 5.0)},
    "minirl": {"low": 0.2, "high": 0.27, "cap": 5.0},
    "topr": {"high": 1.0},
    "aspo": {"low": 0.2, "high": 0.28, "cap": 3.0},
    "ctpo": {"low": 0.025, "high": 0.05, "dual": 0.05, "power": 0.5},
    "kpop": {"phi": 0.1},
    "intellect_3": {"low": 0.5, "high": 5.0, "veto": 1e-05},
    "mis_po": {"low": 0.5, "high": 2.0, "low_sequence": 0.996, "high_sequence": 1.001},
    "dppo_tv": {"delta": 0.15, "cap": 20.0},
    "dppo_kl": {"delta": 0.05, "cap": 20.0},
    "prime_rl": {"low": 0.2, "high": 0.2, "tau": 0.001},
    "ipo": {"delta": 0.1, "tau": 0.001},
    "glm_5": {"low": 0.2, "high": 0.28},
    "mimo_mopd": {"low": 0.5, "high": 2.0},
    "opsm": {"delta": 0.05},
    "gspo": {"low": 0.0003, "high": 0.0004},
    "gspo_token": {"low": 0.0003, "high": 0.0004},
    "gmpo": {"low": 0.6703200460356393, "high": 1.4918246976412703},
    "luspo": {"low": 0.002, "high": 0.0025},
    "vespo": {"positive": (2.0, 3.0), "negative": (3.0, 2.0)},
    "sapo": {"positive": 1.0, "negative": 1.05},
    "maspo": {"scale": 1.0, "power": 0.3, "high": 10.0, "positive": 0.03, "negative": 0.03},
    "m2po": {"budget": 0.04},
    "vaco": {"delta": 0.02},
    "clip_cov": {"low": 0.2, "high": 0.2, "cov_low": 1.0, "cov_high": 5.0, "share": 0.0002, "seed": 0},
    "kl_cov": {"share": 0.0002, "scale": 1.0},
    "grpo_k3": {"beta": 0.001},
    "grpo_k2": {"beta": 0.001},
    "grpo_unbiased_kl": {"beta": 0.001},
    "drift_control": {},
}
"""The sources are in the rows, and in docs/methods.md."""

RANGES = {
    "[0, 1]": (
        "ppo low; dapo low; dual_clip low; bypass low; kimi_k2_5 low; decoupled_token_clip low; "
        "decoupled_tempered power; decoupled_mixed mix; icepop low; glm_5_reasoning low; token_mis low; "
        "sequence_mis low; geometric_rs low; segment_rs low; geometric_rs_token_tis low; sequence_mask_tis low; "
        "veto low; cispo low; minirl low; aspo low; ctpo power; intellect_3 low veto; mis_po low low_sequence; "
        "glm_5 low; mimo_mopd low; gspo low; gspo_token low; luspo low; clip_cov share; kl_cov share"
    ),
    "(0, inf)": (
        "dcpo high; decoupled_token_tis high; decoupled_sequence_tis high; geometric_rs_token_tis bound; "
        "trm high_max high_mean; aipo high; reinforce_sequence_tis high; reinforce_sequence_psis high; minirl cap; "
        "topr high; aspo cap; ctpo high dual; kpop phi; dppo_tv cap; dppo_kl delta cap; ipo delta; "
        "sapo positive negative; maspo scale"
    ),
    "[1, inf)": (
        "dual_clip dual; kimi_k2_5 high; dcpo cap; decoupled_token_clip high; icepop high; token_mis high; "
        "sequence_mis high; geometric_rs high; segment_rs high; geometric_rs_token_tis high; sequence_mask_tis high; "
        "cispo high; intellect_3 high; mis_po high high_sequence; mimo_mopd high; gmpo high"
    ),
    "(1, inf)": "glm_5_reasoning beta; sequence_error high",
    "[0, inf)": (
        "ppo high; dapo high; dual_clip high; bypass high; glm_5_reasoning high; minirl high; aspo high; "
        "dppo_tv delta; prime_rl low high; glm_5 high; gspo high; gspo_token high; luspo high; clip_cov high; "
        "kimi_k2_5 tau; dcpo low; dro beta; ctpo low; prime_rl tau; ipo tau; opsm delta; maspo power positive "
        "negative; m2po budget; vaco delta; kl_cov scale; grpo_k3 beta; grpo_k2 beta; grpo_unbiased_kl beta"
    ),
    "tokens | all_tokens | sequences": "icepop normalize_over",
    "[0, inf) x (first, inf)": "dispo positive negative",
    "(0, 1]": "gmpo low",
    "[0, inf) x (0, inf)": "vespo positive negative",
    "[scale, inf)": "maspo high",
    "[0, 1)": "clip_cov low",
    "(-inf, inf)": "clip_cov cov_low",
    "(cov_low, inf)": "clip_cov cov_high",
    "[-1e+15, 1e+15]": "clip_cov seed",
}
"""What is legal, and of whom."""


def test_every_method_has_the_defaults_of_this_table() -> None:
    assert {name: dict(row.defaults) for name, row in METHODS.items()} == DEFAULTS


def test_every_parameter_has_the_range_of_this_table() -> None:
    declared = {legal: [each.split() for each in names.split("; ")] for legal, names in RANGES.items()}
    wanted = {(name, key): legal for legal, rows in declared.items() for name, *keys in rows for key in keys}
    assert {(name, key): legal for name, row in METHODS.items() for key, legal in row.legal.items()} == wanted


def test_limits_of_the_guards() -> None:
    assert (limits.MAX_LOG_PROB, limits.MAX_MEAN_ABS_DIFF, limits.SHIFT_FACTOR) == (0.1, 0.3, 0.5)


def test_terms_beside_the_policy_are_off_unless_asked_for() -> None:
    assert LossSettings().entropy_coef == 0.0
    assert inspect.signature(naive_policy_loss).parameters["entropy_coef"].default == 0.0


def test_an_unknown_guard_in_a_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="shifted_logprobs"):
        config_from_mapping({"mis_guard": {"shifted_logprobs": "error"}})
