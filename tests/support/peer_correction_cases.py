# SPDX-License-Identifier: Apache-2.0
"""Corrections of SkyRL, OpenRLHF, ROLL, AReaL and ms-swift, and our keys for an equal correction."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from flat_keys import keys_of


def _weight(level: str, mode: str, **bounds: float) -> dict:
    return {"weight": {"level": level, "mode": mode, **bounds}}


def _gates(*gates: dict) -> dict:
    return {"weight": None, "gates": list(gates)}


def _dual_clip(**parts: Any) -> dict:
    return {"mis_loss_method": "ppo"} | keys_of(**parts)


_TOKEN = _weight("token", "truncate", high=1.2)
SKYRL = {
    "regular": ({}, {"mis_loss_method": "ppo"}),
    "tis": ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2}, _dual_clip(**_TOKEN)),
    "sequence tis": (
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
        _dual_clip(**_weight("sequence", "truncate", high=1.5)),
    ),
    "geometric mask": (
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.95, "geo_mask_high": 1.01},
        _dual_clip(**_gates({"reduce": "mean", "low": 0.95, "high": 1.01})),
    ),
    "product mask": (
        {"sequence_mask_metric": "product", "product_mask_low": 0.8, "product_mask_high": 1.5},
        _dual_clip(**_gates({"reduce": "sum", "low": 0.8, "high": 1.5})),
    ),
    "outlier mask": (
        {"outlier_token_is_threshold_low": 0.7, "outlier_token_is_threshold_high": 1.5},
        _dual_clip(**_gates({"reduce": "min", "low": 0.7}, {"reduce": "max", "high": 1.5})),
    ),
    "tis, token mask": (
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1.2,
            "token_mask_is_threshold_low": 0.8,
            "token_mask_is_threshold_high": 1.3,
        },
        _dual_clip(**_TOKEN, gates=[{"reduce": "token", "low": 0.8, "high": 1.3}]),
    ),
}
"""SkyRL's ``off_policy_correction``, and our keys."""

_ON = {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.9, 1.2]}
OPENRLHF = {
    "ppo": ({}, {"mis_loss_method": "ppo"}),
    "ppo, sequences": ({"token_level_loss": False}, {"mis_loss_method": "ppo"}),
    "dual clip": ({"dual_clip": 3.0}, {"mis_loss_method": "dual_clip"}),
    "gspo": ({"policy_loss_type": "gspo"}, {"mis_loss_method": {"name": "gspo", "low": 0.2, "high": 0.2}}),
    "tis": (_ON, {"mis_loss_method": {"name": "decoupled_token_clip", "low": 0.9, "high": 1.2}}),
    "icepop": (
        _ON | {"vllm_is_correction_type": "icepop"},
        {"mis_loss_method": {"name": "icepop", "low": 0.9, "high": 1.2}},
    ),
    "seq-mask-tis": (
        _ON | {"vllm_is_correction_type": "seq-mask-tis"},
        {"mis_loss_method": {"name": "sequence_mask_tis", "low": 0.9, "high": 1.2}},
    ),
}
"""Settings of OpenRLHF's ``PolicyLoss``, and our keys."""


def _on(level: str, mode: str, gating: str = "ratio", high: float = 1.2) -> dict:
    band = [0.9 if gating == "ratio" else 0.0, high]
    values = {"level": level, "mode": mode, "gating": gating, "threshold": band}
    return {f"is_correction_{name}": value for name, value in values.items()}


def _within(reduce: str) -> dict:
    gate = {"statistic": "probability_difference", "reduce": reduce, "high": 0.05, "action": "zero"}
    return _dual_clip(**_weight("token", "unbounded"), gates=[gate])


_GSPO = {"policy_loss_type": "gspo"}
_OF_ENGINE = {"mis_loss_mode": "bypass", "advantage_estimator": "gspo", "eps_clip": 0.2, "eps_clip_high": 0.2}
OPENRLHF["gspo, correction on"] = (_GSPO | _ON, _OF_ENGINE)
OPENRLHF_0_11_2 = {
    "off": ({}, {"mis_loss_method": "ppo"}),
    "clip": (_on("token", "clip"), OPENRLHF["tis"][1]),
    "mask": (_on("token", "mask"), OPENRLHF["icepop"][1]),
    "sequences": (_on("seq", "mask"), OPENRLHF["seq-mask-tis"][1]),
    "tv": (_on("token", "mask", "tv", 0.05), _within("token")),
    "tv, sequences": (_on("seq", "mask", "tv", 0.05), _within("mean")),
    "gspo": (_GSPO, OPENRLHF["gspo"][1]),
    "gspo, correction on": (_GSPO | _on("token", "mask"), _OF_ENGINE),
}
"""The same of version 0.11.2, which renamed them."""

ROLL = {
    "token": ({"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.2}}, keys_of(**_TOKEN)),
    "sequence": (
        {"is_weight": {"enabled": True, "weight_type": "sequence", "upper_bound": 1.5}},
        keys_of(**_weight("sequence", "truncate", high=1.5)),
    ),
    "geometric": (
        {"is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": 1.05}},
        keys_of(**_weight("geometric", "truncate", high=1.05)),
    ),
    "token filter": (
        {"filters": [{"agg_type": "token", "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 1.3}]},
        keys_of(**_gates({"reduce": "token", "low": 0.8, "high": 1.3})),
    ),
    "geometric filter": (
        {"filters": [{"agg_type": "geometric", "ratio_enabled": True, "ratio_low": 0.95, "ratio_high": 1.01}]},
        keys_of(**_gates({"reduce": "mean", "low": 0.95, "high": 1.01})),
    ),
    "sequence filter": (
        {"filters": [{"agg_type": "sequence", "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 1.5}]},
        keys_of(**_gates({"reduce": "sum", "low": 0.8, "high": 1.5})),
    ),
}
"""ROLL's ``train_infer_correction``, and our keys."""


def _bounded(**settings: object) -> dict:
    return {"rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", **settings}}


def _of_sequences(agg: str, *, metric: str = "ratio", **bounds: float) -> dict:
    return _bounded(level="sequence", agg=agg, metric=metric, **bounds)


def _geometric(*gates: dict) -> dict:
    return _dual_clip(**_weight("geometric", "unbounded"), gates=[{**gate, "action": "zero"} for gate in gates])


def _plain(*gates: dict) -> dict:
    return _dual_clip(**_weight("token", "unbounded"), gates=[{**gate, "action": "zero"} for gate in gates])


AREAL = {
    "off": ({}, {"mis_loss_method": "ppo"}),
    "clips": ({"eps_clip": 0.1, "eps_clip_higher": 0.28}, {"mis_loss_method": {"name": "dapo", "low": 0.1}}),
    "dual clip": ({"c_clip": 1.1}, {"mis_loss_method": {"name": "dual_clip", "dual": 1.1}}),
    "gspo": ({"importance_sampling_level": "sequence"}, OPENRLHF["gspo"][1]),
    "token mask": (_bounded(lower=0.8, upper=1.3), {"mis_loss_method": {"name": "icepop", "low": 0.8, "high": 1.3}}),
    "token mask, above": (_bounded(upper=1.3), _plain({"reduce": "token", "high": 1.3})),
    "token clamp": (
        _bounded(action="clamp", lower=0.9, upper=1.2),
        {"mis_loss_method": {"name": "decoupled_token_clip", "low": 0.9, "high": 1.2}},
    ),
    "token clamp, above": (
        _bounded(action="clamp", upper=1.2),
        {"mis_loss_method": {"name": "decoupled_token_tis", "high": 1.2}},
    ),
    "token mask, k1": (
        _bounded(metric="kl_k1", lower=-0.2, upper=0.25),
        _plain({"statistic": "k1", "reduce": "token", "low": -0.25, "high": 0.2}),
    ),
    "token mask, k2": (
        _bounded(metric="kl_k2", upper=0.02),
        _plain({"statistic": "k2", "reduce": "token", "high": 0.02}),
    ),
    "sequence mask": (
        _of_sequences("mean", lower=0.95, upper=1.01),
        _geometric({"reduce": "mean", "low": 0.95, "high": 1.01}),
    ),
    "sequence mask, product": (
        _of_sequences("sum", lower=0.8, upper=1.5),
        _geometric({"reduce": "sum", "low": 0.8, "high": 1.5}),
    ),
    "sequence mask, largest": (_of_sequences("max", upper=1.5), _geometric({"reduce": "max", "high": 1.5})),
    "sequence mask, k2": (
        _of_sequences("mean", metric="kl_k2", upper=0.03),
        _plain({"statistic": "k2", "reduce": "mean", "high": 0.03}),
    ),
    "sequence clamp": (
        _of_sequences("mean", action="clamp", lower=0.95, upper=1.05),
        _dual_clip(**_weight("geometric", "clip", low=0.95, high=1.05)),
    ),
}
"""Settings of AReaL's ``ppo_actor_loss_fn``, and our keys."""


def _up_to(reduce: str, high: float) -> dict:
    gate = {"reduce": reduce, "high": high, "action": "zero"}
    return keys_of(**_weight("token", "unbounded"), gates=[gate])


MS_SWIFT = {
    "token_truncate": (1.2, keys_of(**_TOKEN)),
    "token_mask": (1.2, _up_to("token", 1.2)),
    "sequence_truncate": (1.01, keys_of(**_weight("geometric", "truncate", high=1.01))),
    "sequence_mask": (1.01, _up_to("mean", 1.01)),
}
"""ms-swift's ``rollout_importance_sampling_mode``, its threshold, and our keys."""

SIZES = {"alone": {}, "of a batch": {"dp_size": 2, "batch_num_tokens": 100.0, "global_batch_size": 14.0}}
"""Data of OpenRLHF's trainer for the whole batch."""


def swift_trainer(trainer: object, mode: str | None) -> object:
    """The attributes of ms-swift's trainer that its correction and ours read."""
    log = {"train": defaultdict(list), "eval": defaultdict(list)}
    settings = {"rollout_importance_sampling_mode": mode, "disable_rollout_importance_sampling": False}
    settings |= {"rollout_importance_sampling_threshold": MS_SWIFT[mode][0] if mode else None, "_metrics": log}
    vars(trainer).update(settings, model=SimpleNamespace(training=True))
    return trainer


def cu_seqlens(batch: dict) -> torch.Tensor:
    """The starts of the rows of a padded batch after packing, in AReaL's format."""
    rows, width = batch["response_mask"].shape
    return torch.arange(rows + 1, dtype=torch.int32) * width


def roll_config(settings: dict) -> SimpleNamespace:
    """ROLL's ``TrainInferCorrectionConfig`` as a namespace, with its defaults for the fields in use."""
    weight = {"enabled": False, "weight_type": "token", "upper_bound": None, "detach": True}
    filter_ = {"enabled": True, "ratio_enabled": False, "diff_enabled": False}
    return SimpleNamespace(
        is_weight=SimpleNamespace(**weight | settings.get("is_weight", {})),
        filters=[SimpleNamespace(**filter_ | each) for each in settings.get("filters", ())],
    )
