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
    "preset gated_mis": (
        "write its keys: use_rs: true, rs_level: geometric, rs_lower_bound: 0.99, rs_upper_bound: 1.01, "
        "rs_veto_threshold: 1.0e-4, tis_batch_normalize: true"
    ),
    "preset token_tis": "take mis, which has its numbers",
    **dict.fromkeys(
        ("mis_ext.dither_weights", "mis_ext.dither_master_weights"),
        "raise the learning rate two or three times, or round stochastically in your optimizer",
    ),
    "mis_ext.log_mismatch": "use --get-mismatch-metrics, which logs the metrics of each step, or mis-ext report",
    "mis_ext.WeightScale": "use tis_normalize_scope: data_parallel",
}
"""Replacements, by the name as users write it.

A key, or ``rs_gates.KEY``; ``preset NAME``; a flag with its dashes;
``mis_ext.NAME``; ``mis-ext COMMAND``.
"""


def sentence(name: str) -> str | None:
    """The error about a removed name, or None."""
    return f"{name} was removed in mis_ext 0.6: {REMOVED[name]}" if name in REMOVED else None


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Refuse removed keys, also of filters.

    Raises:
        ValueError: A key was removed.
    """
    gates = given.get("rs_gates")
    of_gates = [gate for gate in gates if isinstance(gate, Mapping)] if isinstance(gates, (list, tuple)) else []
    names = [*given, *(f"rs_gates.{key}" for gate in of_gates for key in gate)]
    found = [text for text in map(sentence, dict.fromkeys(names)) if text is not None]
    if found:
        raise ValueError("; ".join(found))
