# SPDX-License-Identifier: Apache-2.0
"""Batches, options and losses to compare verl's own code with ours."""

import torch

RATES = {"close": 0.002, "apart": 0.25, "far": 1.0}
"""Standard deviation of the log-ratio of trainer and engine."""
WIDTH = 12

CRITERIA = {
    "token_k1": ["0.8_1.3", "1.2"],
    "token_k2": ["0.02"],
    "token_k3": ["0.02"],
    "seq_sum_k1": ["0.5_1.5"],
    "seq_sum_k2": ["0.15"],
    "seq_sum_k3": ["0.15"],
    "seq_mean_k1": ["0.999_1.001", "0.9_1.2"],
    "seq_mean_k2": ["0.03"],
    "seq_mean_k3": ["0.03"],
    "seq_max_k2": ["0.1"],
    "seq_max_k3": ["0.1"],
}
OPTIONS = {
    f"{name} {threshold}": {"rollout_rs": name, "rollout_rs_threshold": threshold}
    for name, thresholds in CRITERIA.items()
    for threshold in thresholds
} | {
    "two criteria": {"rollout_rs": "token_k1, seq_max_k3,token_k1", "rollout_rs_threshold": "0.7_1.5,0.3"},
    "two criteria, one threshold": {"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": 0.05},
    "token, normalized": {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
    "sequence, normalized": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "normalized before rejection": {
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.8_1.25",
    },
    "token band": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.4"},
    "sequence band": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"},
    "bypass, band": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.8_1.4",
        "bypass_mode": True,
        "loss_type": "reinforce",
    },
    "bypass ignores the weight": {"rollout_is": "token", "bypass_mode": True, "loss_type": "ppo_clip"},
}
"""verl's options in addition to its presets."""

SEQUENCE = "seq-mean-token-mean"
LOSSES = {
    "vanilla": ({}, {"mis_loss_method": {"name": "dual_clip"}}, "token-mean"),
    "vanilla, sum": ({}, {"mis_loss_method": {"name": "dual_clip"}}, "token-sum"),
    "vanilla, sequences": ({}, {"mis_loss_method": {"name": "dual_clip"}}, SEQUENCE),
    "vanilla, sequence sums": ({}, {"mis_loss_method": {"name": "dual_clip"}}, "seq-mean-token-sum"),
    "vanilla, constant": ({}, {"mis_loss_method": {"name": "dual_clip"}}, "seq-mean-token-sum-norm"),
    "vanilla, clips": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0},
        {"mis_loss_method": {"name": "dual_clip", "low": 0.1, "high": 0.28, "dual": 2.0}},
        "token-mean",
    ),
    "dppo_tv": (
        {"clip_ratio_low": 0.03, "clip_ratio_high": 0.03},
        {"mis_loss_method": {"name": "dppo_tv", "delta": 0.03, "cap": 3.0}},
        "token-mean",
    ),
    "dppo_kl": (
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01},
        {"mis_loss_method": {"name": "dppo_kl", "delta": 0.01, "cap": 3.0}},
        "token-mean",
    ),
    "gspo": ({}, {"mis_loss_method": {"name": "gspo", "low": 0.2, "high": 0.2}}, SEQUENCE),
    "sapo": ({}, {"mis_loss_method": {"name": "sapo"}}, SEQUENCE),
    "gpg": ({}, {"mis_loss_method": {"name": "reinforce"}}, "token-mean"),
    "clip_cov": (
        {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}},
        {"mis_loss_method": {"name": "clip_cov", "share": 1.0, "cov_low": 0.2, "cov_high": 5.0}},
        "token-mean",
    ),
    "kl_cov": (
        {"policy_loss": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.1}},
        {"mis_loss_method": {"name": "kl_cov", "share": 0.25, "scale": 0.1}},
        "token-mean",
    ),
    "geo_mean": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
        {"mis_loss_method": {"name": "gmpo", "low": 0.9048374180359595, "high": 1.1051709180756477}},
        SEQUENCE,
    ),
    "dro": ({"policy_loss": {"dro_beta": 0.3}}, {"mis_loss_method": {"name": "dro", "beta": 0.3}}, "token-mean"),
    "cispo": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        {"mis_loss_method": {"name": "cispo", "low": 0.9, "high": 1.2}},
        "token-mean",
    ),
}
OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Losses that are a mean over sequences at the recorded revision, whatever ``loss_agg_mode`` says."""
LOSSES |= {
    f"{name}, {words}": (*LOSSES[name][:2], mode)
    for name in OF_SEQUENCES
    for words, mode in (("tokens", "token-mean"), ("sequence sums", "seq-mean-token-sum"))
}
"""By name, whose first word is verl's name: its settings, our keys, and its aggregation."""

OF_BYPASS = ("dppo_tv", "dppo_kl", "gpg", "dro")
"""Methods whose ratio is current / behavior: verl's old log-probs are those of the behavior policy."""
DIVIDES_BY_ROWS = ("geo_mean",)
"""verl divides by all rows of the micro-batch, also by empty ones, and not by those of the whole batch."""
GLOBAL = {"dp_size": 2, "batch_num_tokens": 100, "global_batch_size": 14, "loss_scale_factor": 20}
"""Data of verl's engines for the whole batch."""


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Padded batches, 6 rows: ragged masks, masks with holes, one with an empty row."""
    found = {}
    generator = torch.Generator().manual_seed(32)
    for number, (name, rate) in enumerate(RATES.items()):
        lengths = torch.tensor([12, 1, 7, 9, 4, 0 if name == "far" else 11])
        mask = torch.arange(WIDTH) < lengths[:, None]
        if number > 0:
            holes = torch.rand(mask.shape, generator=generator) < 0.3
            holes[:, 0] = False
            mask &= ~holes
        old = -torch.rand(mask.shape, generator=generator) * 3.0 - 0.05
        shift = 0.15 * torch.randn(6, 1, generator=generator) * rate
        found[name] = {
            "old_log_prob": old,
            "rollout_log_prob": (old + shift + rate * torch.randn(mask.shape, generator=generator)).clamp(max=-1e-3),
            "log_prob": (old + min(rate, 0.3) * torch.randn(mask.shape, generator=generator)).clamp(max=-1e-3),
            "advantages": torch.randn(6, 1, generator=generator).expand(6, WIDTH).contiguous(),
            "response_mask": mask,
        }
    return found


def beyond() -> dict[str, torch.Tensor]:
    """Log-ratios of 30, -25 and -0.1, and of 20, -20 and -0.1: verl bounds each by +-20 before it adds them."""
    old = torch.tensor([[-0.5, -30.0, -1.0], [-0.5, -30.0, -1.0]])
    rollout = torch.tensor([[-30.5, -5.0, -0.9], [-20.5, -10.0, -0.9]])
    return {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": torch.ones(2, 3, dtype=torch.bool)}
