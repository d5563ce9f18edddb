"""Which metrics exist, and which of them a configuration emits.

The hosts add metrics up by position, so the names and their order depend on the configuration alone.
"""

from __future__ import annotations

PREFIX = "mis_"

MISMATCH = (
    "training_log_ppl",
    "training_ppl",
    "rollout_log_ppl",
    "rollout_ppl",
    "kl",
    "k3_kl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
    "logprob_abs_diff",
    "tv",
    "ratio_above_2_fraction",
    "ratio_below_half_fraction",
    "ess_ratio_token",
    "ess_ratio_seq",
    "ratio_max",
    "ratio_min",
    "nonfinite_token_fraction",
    "train_rollout_logprob_abs_diff_max",
    "train_rollout_logprob_abs_diff_nonzero",
    "train_rollout_logprob_abs_diff_invalid",
)
"""Properties of the two engines' log-probs alone; no weight, gate or normalisation changes them."""

GROUP = frozenset({"ess_ratio_token", "ess_ratio_seq", "ratio_max", "ratio_min", "train_rollout_logprob_abs_diff_max"})
"""Mismatch metrics of the whole data-parallel group; asking for one of them costs the group's all-gather."""

CORE = (
    "k3_kl",
    "logprob_abs_diff",
    "ess_ratio_token",
    "ess_ratio_seq",
    "ratio_max",
    "nonfinite_token_fraction",
    "kept_token_fraction",
    "kept_seq_fraction",
    "is_ratio_mean_final",
)
"""The short list to watch; what a configuration does not emit is left out."""

WEIGHT_BOUND = {
    "truncate": ("tis_truncate_fraction",),
    "clip": ("tis_clip_fraction_low", "tis_clip_fraction_high"),
    "mask": ("tis_mask_fraction_low", "tis_mask_fraction_high"),
    "unbounded": (),
}
"""Per mode of the weight: the shares of weights outside its bounds."""


def gate_names(name: str, *, is_veto: bool) -> tuple[str, str]:
    """The two metrics of one gate: shares below and above a band, or shares of tokens and sequences that veto."""
    return (
        (f"{name}_token_fraction", f"{name}_seq_fraction")
        if is_veto
        else (
            f"{name}_fraction_low",
            f"{name}_fraction_high",
        )
    )
