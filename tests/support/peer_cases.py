# SPDX-License-Identifier: Apache-2.0
"""Losses of prime-rl, NeMo-RL and RLinf, and our keys for an equal loss."""

from typing import Any

import torch
import verl_cases
from flat_keys import keys_of

import mis_ext

PRIME_RL = {
    "default": ({"type": "default"}, {"mis_loss_method": {"name": "prime_rl"}}),
    "default, bounds": (
        {"type": "default", "dppo_mask_low": 0.02, "dppo_mask_high": 0.05, "kl_tau": 0.1},
        {"mis_loss_method": {"name": "prime_rl", "low": 0.02, "high": 0.05, "tau": 0.1}},
    ),
    "ipo": ({"type": "ipo"}, {"mis_loss_method": {"name": "ipo"}}),
    "ipo, bounds": (
        {"type": "ipo", "ipo_threshold": 0.03, "kl_tau": 0.05},
        {"mis_loss_method": {"name": "ipo", "delta": 0.03, "tau": 0.05}},
    ),
}
"""prime-rl's configuration, and our keys."""

_IS = {"use_importance_sampling_correction": True}
_TRUNCATED = "truncated_importance_sampling"


def _method(name: str, **parameters: object) -> dict:
    return {"mis_loss_method": {"name": name, **parameters}}


def _correction(mode: str, **parts: Any) -> dict:
    return {"mis_loss_mode": mode} | keys_of(**parts)


NEMO_RL = {
    "ppo": ({}, _method("ppo")),
    "ppo, sequences": ({"token_level_loss": False}, _method("ppo")),
    "dapo": ({"ratio_clip_max": 0.28}, _method("dapo")),
    "dual clip": ({"ratio_clip_c": 3.0}, _method("dual_clip")),
    "correction": (_IS, _method("decoupled")),
    "tis": (_IS | {f"{_TRUNCATED}_type": "tis", f"{_TRUNCATED}_ratio": 1.2}, _method("decoupled_token_tis", high=1.2)),
    "tis, low": (
        _IS | {f"{_TRUNCATED}_type": "tis", f"{_TRUNCATED}_ratio": 1.2, f"{_TRUNCATED}_ratio_min": 0.9},
        _method("decoupled_token_clip", low=0.9, high=1.2),
    ),
    "icepop": (
        _IS | {f"{_TRUNCATED}_type": "icepop", f"{_TRUNCATED}_ratio": 1.2, f"{_TRUNCATED}_ratio_min": 0.8},
        _method("icepop", low=0.8, high=1.2),
    ),
    "seq-mask-tis": (
        _IS | {f"{_TRUNCATED}_type": "seq-mask-tis", f"{_TRUNCATED}_ratio": 1.01, f"{_TRUNCATED}_ratio_min": 0.95},
        _method("sequence_mask_tis", low=0.95, high=1.01),
    ),
    "cispo": ({"use_cispo": True}, _method("cispo", low=0.8, high=1.2)),
    "cispo, tis": (
        _IS | {"use_cispo": True, f"{_TRUNCATED}_type": "tis", f"{_TRUNCATED}_ratio": 1.2},
        _method("cispo", low=0.8, high=1.2) | keys_of(weight={"level": "token", "mode": "truncate", "high": 1.2}),
    ),
    "reinforce": ({"disable_ppo_ratio": True}, _method("reinforce")),
    "gspo": (
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        _method("gspo", low=0.2, high=0.2),
    ),
    "gspo, sequence weights": (
        _IS | {"sequence_level_importance_ratios": True, "token_level_loss": False},
        _method("gspo", low=0.2, high=0.2) | keys_of(weight={"level": "sequence", "mode": "unbounded"}),
    ),
    "on-policy, tis": (
        _IS | {"force_on_policy_ratio": True, f"{_TRUNCATED}_type": "tis", f"{_TRUNCATED}_ratio": 1.2},
        _correction("decoupled", weight={"level": "token", "mode": "truncate", "high": 1.2}),
    ),
}
"""NeMo-RL's settings, and our keys."""

SIZES = {"global_valid_seqs": torch.tensor(14.0), "global_valid_toks": torch.tensor(100.0)}
RL_SCALE = 41


def weights_of(batch: dict) -> torch.Tensor:
    """A stream of prime-rl's weights: some tokens half, some twice."""
    pattern = torch.tensor([1.0, 0.5, 2.0])
    return pattern.repeat(verl_cases.WIDTH // 3).expand_as(batch["log_prob"]).contiguous()


def nemo_data(batch: dict) -> dict[str, torch.Tensor]:
    """A batch in the format of NeMo-RL: with an unscored first token, and a masked sample."""
    names = {"prev_logprobs": "old_log_prob", "generation_logprobs": "rollout_log_prob", "advantages": "advantages"}
    data = {name: torch.nn.functional.pad(batch[key], (1, 0)) for name, key in names.items()}
    data["token_mask"] = torch.nn.functional.pad(batch["response_mask"].float(), (1, 0))
    data["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    return data


_CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28, "calculate_per_token_loss": True}
_DECOUPLED = {"mis_loss_mode": "decoupled", "use_tis": True, "mis_metrics": [], **_CLIP}
RLINF = {
    "actor": ("actor", {}, {"mis_loss_mode": "bypass", **_CLIP}),
    "actor, dual clip": ("actor", {"clip_ratio_c": 1.5}, {"mis_loss_mode": "bypass", "eps_clip_c": 1.5, **_CLIP}),
    "decoupled": ("decoupled_actor_critic", {}, {"tis_upper_bound": 1e4, **_DECOUPLED}),
    "decoupled, dual clip, threshold": (
        "decoupled_actor_critic",
        {"clip_ratio_c": 1.5, "behave_weight_threshold": 1.1},
        {"eps_clip_c": 1.5, "tis_upper_bound": 1.1, "use_rs": True, "rs_lower_bound": 1e-6, "mis_denominator": "kept"}
        | _DECOUPLED,
    ),
}
"""RLinf's loss type, its settings, and our keys. A critic whose values are the returns adds nothing."""


def rlinf_loss(
    *,
    keys: dict[str, Any],
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, dict]:
    """Our loss with the interface of RLinf's registry. Its old log-probs are the engine's or the trainer's own."""
    found = mis_ext.policy_loss_from_log_probs(
        keys,
        current_logprobs=logprobs,
        behavior_logprobs=old_logprobs,
        proximal_logprobs=proximal_logprobs,
        advantages=advantages,
        response_mask=loss_mask,
    )
    return found.mean, {}
