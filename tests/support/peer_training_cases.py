# SPDX-License-Identifier: Apache-2.0
"""Runs of other frameworks' own trainers, ``lab/peers/*/train.py`` of 16a265ec: their options, and our keys.

A run with ``like`` must have the gradient norms and the weights of another one; one with ``unlike`` must not. What
``logs`` names must be in the framework's log. One with ``refused`` must end in an error with these words.
``weights`` is another tolerance of theirs.
"""

from __future__ import annotations

from typing import Any

from flat_keys import keys_of

TOKEN = {"rollout_is": "token", "rollout_is_threshold": 1.2}
GATED = TOKEN | {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
CLIP = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0", "bypass_mode": True}
_BAND = {"reduce": "token", "low": 0.5, "high": 2.0}
REINFORCE = GATED | {"bypass_mode": True, "loss_type": "reinforce"}
PLACE, LOSS = "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss"
BYPASS = {"loss_mode": "bypass_mode", "+rollout_correction": "${algorithm.rollout_correction}"}
LOGS = ["rollout_corr/mis_k3_kl", "rollout_corr/mis_kept_token_fraction"]
OLDER = {"use_v1": False}
VERL: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {"options": {PLACE: GATED}, "unlike": "none"},
    "ours": {"options": {PLACE: GATED}, "keys": "own", "like": "own", "logs": LOGS},
    "own bypass": {"options": {PLACE: REINFORCE, LOSS: BYPASS}, "unlike": "none"},
    "our bypass": {
        "options": {PLACE: REINFORCE, LOSS: BYPASS},
        "keys": "own bypass",
        "like": "own bypass",
        "logs": [f"actor/{name}" for name in LOGS],
    },
    "own bypass without loss_mode": {"options": {PLACE: REINFORCE}, "unlike": "own bypass"},
    "own tokens": {"options": {PLACE: TOKEN}, "unlike": "none"},
    "our whole loss": {
        "options": {PLACE: TOKEN, LOSS: {"loss_mode": "mis_ext"}},
        "keys": {"mis_loss_method": {"name": "decoupled_token_tis", "high": 1.2}},
        "like": "own tokens",
        "logs": ["actor/train_rollout_logprob_abs_diff"],
    },
    "own bypass clip": {"options": {PLACE: CLIP, LOSS: BYPASS}, "unlike": "own bypass"},
    "our bypass whole": {
        "options": {PLACE: CLIP, LOSS: {"loss_mode": "bypass_mode"}},
        "keys": {"mis_loss_mode": "bypass", "eps_clip_c": 3.0} | keys_of(gates=[_BAND]),
        "like": "own bypass clip",
        "logs": ["actor/mis_k3_kl"],
    },
    "own older": {"options": {PLACE: GATED, "trainer": OLDER}, "unlike": "none"},
    "ours older": {
        "options": {PLACE: GATED, "trainer": OLDER},
        "keys": "own older",
        "like": "own older",
        "logs": LOGS,
    },
    "own bypass older": {"options": {PLACE: REINFORCE, LOSS: BYPASS, "trainer": OLDER}, "unlike": "own older"},
    "own bypass without loss_mode older": {
        "options": {PLACE: REINFORCE, "trainer": OLDER},
        "unlike": "own bypass older",
    },
}
"""``main_ppo`` of verl: options beside those of the tiny run, and our keys, or the run whose options are converted."""
_REAL = {"actor_rollout_ref.rollout": {"name": "vllm_cpu"}}
_CLOSE = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.01,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.97_1.03",
}
VERL_VLLM: dict[str, dict[str, Any]] = {
    "vllm none": {"options": _REAL},
    "vllm own": {"options": _REAL | {PLACE: _CLOSE}, "unlike": "vllm none"},
    "vllm ours": {"options": _REAL | {PLACE: _CLOSE}, "keys": "vllm own", "like": "vllm own", "logs": LOGS},
}
"""The same with vLLM: bounds as narrow as its mismatch."""
_RLLM = {"rollout_correction.bypass_mode": True, "loss_fn": "bypass_mode"}
_RLLM_CLIP = {"rllm.algorithm": _RLLM, PLACE: CLIP, LOSS: {"+rollout_correction": "${algorithm.rollout_correction}"}}
# In the place of the others its rollout_is would be rLLM's tis_mode, which rLLM refuses with bypass_mode.
_RLLM_REINFORCE = {"rllm.algorithm": _RLLM, LOSS: {f"+rollout_correction.{key}": REINFORCE[key] for key in REINFORCE}}
# Sent in bfloat16: one that is rounded the other way changes a sum by 1.5e-5, in the same run again too.
_SENT = 4e-5
VERL_RLLM: dict[str, dict[str, Any]] = {
    "rllm none": {},
    "rllm own bypass clip": {"options": _RLLM_CLIP, "unlike": "rllm none"},
    "rllm our bypass whole": {
        "options": {"rllm.algorithm": _RLLM},
        "keys": VERL["our bypass whole"]["keys"],
        "like": "rllm own bypass clip",
        "weights": _SENT,
        "logs": ["actor/mis_k3_kl"],
    },
    "rllm own bypass": {"options": _RLLM_REINFORCE, "unlike": "rllm own bypass clip"},
    "rllm our bypass": {
        "options": _RLLM_REINFORCE,
        "keys": keys_of(weight={"level": "token", "mode": "truncate", "high": 1.2}, gates=[_BAND]),
        "like": "rllm own bypass",
        "weights": _SENT,
        "logs": LOGS,
    },
    "rllm keys without bypass": {"keys": keys_of(gates=[_BAND]), "like": "rllm none", "weights": _SENT},
    "rllm weights alone": {
        "options": {"rllm.algorithm": {"rollout_correction.tis_mode": "token"}},
        "keys": keys_of(gates=[_BAND]),
        "refused": "asks for weights alone",
    },
    "rllm three policies": {
        "options": {"rllm.algorithm": {"loss_fn": "mis_ext"}},
        "keys": VERL["our whole loss"]["keys"],
        "refused": "behavior",
    },
}
"""rLLM's trainer on verl: its bypass mode, what does nothing, and what is refused."""


_WEIGHT = {"level": "token", "mode": "truncate", "high": 1.2}
SKYRL: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {
        "options": {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1.2,
            "token_mask_is_threshold_low": 0.5,
            "token_mask_is_threshold_high": 2.0,
        },
        "unlike": "none",
    },
    "ours": {
        "keys": {"mis_loss_method": "ppo"} | keys_of(weight=_WEIGHT, gates=[_BAND]),
        "like": "own",
        "logs": ["loss_metrics/mis_k3_kl"],
    },
    "another method": {"keys": {"mis_loss_method": "dppo_tv"}, "unlike": "own", "logs": ["loss_metrics/ppo_kl"]},
}
"""SkyRL: settings of ``off_policy_correction``, or our keys."""
OPENRLHF: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {"own": "tis", "unlike": "none"},
    "ours": {
        "keys": {"mis_loss_method": {"name": "decoupled_token_clip", "low": 0.5, "high": 1.2}},
        "like": "own",
        "logs": ["train_rollout_logprob_abs_diff"],
    },
    "own icepop": {"own": "icepop", "unlike": "own"},
    "our icepop": {
        "keys": {"mis_loss_method": {"name": "icepop", "low": 0.5, "high": 1.2}},
        "like": "own icepop",
        "logs": ["train_rollout_logprob_abs_diff"],
    },
}
"""OpenRLHF: the type of its correction, with the thresholds 0.5 and 1.2, or our keys."""
_TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
NEMO_RL: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {"options": _TIS | {"truncated_importance_sampling_ratio": 1.2}, "unlike": "none"},
    "ours": {
        "keys": {"mis_loss_method": "ppo"} | keys_of(weight=_WEIGHT),
        "like": "own",
        "logs": ["mis_k3_kl", "mis_ratio_highest"],
    },
}
"""NeMo-RL: settings of its loss, or our keys."""
ROLL: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {
        "options": {
            "is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.2},
            "filters": [{"agg_type": "token", "ratio_enabled": True, "ratio_low": 0.5, "ratio_high": 2.0}],
        },
        "unlike": "none",
    },
    "ours": {
        "options": {"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.2}},
        "keys": keys_of(weight=_WEIGHT, gates=[_BAND]),
        "like": "own",
        "logs": ["actor/mis_k3_kl"],
    },
}
"""ROLL: settings of ``train_infer_correction``, or our keys."""
PRIME_RL: dict[str, dict[str, Any]] = {
    "none": {"options": {"type": "ipo", "ipo_threshold": 1e9, "kl_tau": 0.0}},
    "own default": {
        "options": {"type": "default", "dppo_mask_low": 0.015, "dppo_mask_high": 0.015},
        "unlike": "none",
    },
    "our default": {
        "keys": {"mis_loss_method": {"name": "prime_rl", "low": 0.015, "high": 0.015, "tau": 1e-3}},
        "like": "own default",
        "logs": ["pg_loss/mean"],
    },
    "own ipo": {"options": {"type": "ipo", "ipo_threshold": 0.015}, "unlike": "own default"},
    "our ipo": {
        "keys": {"mis_loss_method": {"name": "ipo", "delta": 0.015, "tau": 1e-3}},
        "like": "own ipo",
        "logs": ["pg_loss/mean"],
    },
}
"""prime-rl: its ``trainer.loss``, or the keys of ours."""
CASES = {"verl": VERL, "skyrl": SKYRL, "openrlhf": OPENRLHF, "nemo_rl": NEMO_RL, "roll": ROLL, "prime_rl": PRIME_RL}
