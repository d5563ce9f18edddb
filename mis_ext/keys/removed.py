# SPDX-License-Identifier: Apache-2.0
"""Names that 0.6 removed, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: dict[str, str] = {
    "mis_loss_compile": "remove the key",
    "--reasoning": "remove the flag: a turn without its reasoning is of the class different",
    "mis-ext panel": "plot the logged metrics, mis_k3_kl first, in Grafana or W&B",
    "--log": "remove the flag: correlate logged metrics with mis_k3_kl on your dashboard",
    **{f"mis_ext.{name}": f"use mis_ext.tools.{name}" for name in ("cli", "diagnosis", "dumps", "explain", "report")},
    "--control": "use --engine-records, and audit a run that must differ by itself",
    "--provenance": "use --engine-records",
    "rs_gates.level": "write reduce: token, sum (for sequence), mean (geometric), min, or max",
    "rs_gates.after": "remove the key: a filter judges all tokens of the response mask",
    "rs_gates.target_accept": "write low and high; mis-ext report shows what share each bound keeps",
    "rs_gates.target_gain": "remove the key",
    "rs_gates.statistic: squared_log_ratio": "write statistic: k2, with half of the bound",
    "preset gated_mis": (
        "write its keys: use_rs: true, rs_level: geometric, rs_lower_bound: 0.99, rs_upper_bound: 1.01, "
        "rs_veto_threshold: 1.0e-4, tis_batch_normalize: true"
    ),
    "preset token_tis": "take mis, which has its numbers",
    **dict.fromkeys(
        ("mis_ext.dither_weights", "mis_ext.dither_master_weights"),
        "raise the learning rate two or three times, or round stochastically in your optimizer",
    ),
    "mis_ext.WeightScale": "use tis_normalize_scope: data_parallel",
    **{f"mis_lr_multiplier_{kind}": f"take the root of mis_ess_ratio_{kind}" for kind in ("token", "seq")},
    "mis_ratio_above_2_fraction": "use mis_tis_truncate_fraction, or mis_ratio_max",
    "mis_ratio_below_half_fraction": "use mis_tis_truncate_fraction_low, or mis_ratio_min",
    "mis_train_rollout_logprob_abs_diff_invalid": "use mis_nonfinite_token_fraction, which is the same",
    **dict.fromkeys(("mis_log_ppl_diff_min", "mis_log_ppl_diff_max"), "use mis_log_ppl_diff, or mis_ratio_max"),
    "mis_tis_weight_std": "use mis_tis_weight_ess: (standard deviation / mean)^2 is 1 / mis_tis_weight_ess - 1",
    **{f"mis_ess_ratio_token_{age}": f"use mis_k3_kl_{age}" for age in ("fresh", "stale")},
}
"""Replacements, by the name as users write it.

A key, ``rs_gates.KEY``, ``rs_gates.KEY: value``, or a metric as it is; ``preset NAME``; a flag with its dashes;
``mis_ext.NAME``; ``mis-ext COMMAND``.
"""


def sentence(name: str) -> str | None:
    """The error about a removed name, or None."""
    return f"{name} was removed in mis_ext 0.6: {REMOVED[name]}" if name in REMOVED else None


def removed_in(given: Mapping[str, Any]) -> list[str]:
    """The errors about removed keys, also of filters and their values, and removed metrics."""
    gates, metrics = given.get("rs_gates"), given.get("mis_metrics")
    of_gates = [gate for gate in gates if isinstance(gate, Mapping)] if isinstance(gates, (list, tuple)) else []
    names = [*given, *(f"rs_gates.{key}" for gate in of_gates for key in gate)]
    names += [f"rs_gates.{key}: {value}" for gate in of_gates for key, value in gate.items()]
    names += [name for name in metrics if isinstance(name, str)] if isinstance(metrics, (list, tuple)) else []
    return [text for text in map(sentence, dict.fromkeys(names)) if text is not None]
