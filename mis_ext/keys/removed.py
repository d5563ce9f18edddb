# SPDX-License-Identifier: Apache-2.0
"""What 0.6 removed, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

REMOVED: dict[str, str] = {
    "mis_loss_compile": "remove the key",
    "--reasoning": "remove the flag: a turn without its reasoning is of the class different",
    "mis-ext panel": "import docs/guide/grafana.json into Grafana; for W&B see docs/guide/watch.md",
    "--log": "remove the flag: correlate logged metrics with mis_k3_kl on your dashboard",
    "mis_ext.diagnosis": "use mis_ext.tools.diagnosis",
    "mis_ext.cli": "use mis_ext.tools.cli",
    "mis_ext.dumps": "use mis_ext.tools.dumps",
    "mis_ext.explain": "use mis_ext.tools.explain",
    "mis_ext.report": "use mis_ext.tools.report",
    "--control": "use --engine-records, and audit a run that must differ by itself",
    "--provenance": "use --engine-records",
    "mis": "write flat keys",
    "mis.weight": "tis_level: none for no weight, else the keys below",
    "mis.weight.level": "tis_level",
    "mis.weight.mode": "tis_mode",
    "mis.weight.low": "tis_lower_bound",
    "mis.weight.high": "tis_upper_bound",
    "mis.weight.when": "tis_when",
    "mis.weight.only_outside": "nothing; drop it",
    "mis.gates": "use_rs: true, rs_level: none, and rs_gates",
    "mis.normalize_over": "tis_batch_normalize: true and tis_normalize_over",
    "mis.scope": "tis_normalize_scope",
    "mis.denominator": "mis_denominator",
    "mis.staleness": "mis_staleness",
    "mis.metrics": "mis_metrics",
    "mis.metric_max": "mis_metric_max",
    "mis.guard": "mis_guard",
    "mis.max_reject_fraction": "mis_max_reject_fraction",
    "rs_gates.target_accept": "write low and high; mis-ext report shows what share each bound keeps",
    "rs_gates.target_gain": "remove the key",
    "tis_normalize_scope: rollout": "write tis_normalize_scope: data_parallel",
    "preset gated_mis": (
        "write its keys: use_rs: true, rs_level: geometric, rs_lower_bound: 0.99, rs_upper_bound: 1.01, "
        "rs_veto_threshold: 1.0e-4, tis_batch_normalize: true"
    ),
    "preset token_tis": "take mis, which has its numbers",
    "mis_ext.dither_weights": "raise the learning rate two or three times, or round stochastically in your optimizer",
    "mis_ext.dither_master_weights": (
        "raise the learning rate two or three times, or round stochastically in your optimizer"
    ),
    "mis_ext.WeightScale": "use tis_normalize_scope: data_parallel",
}
"""What to write instead, by the name as users write it.

A key (``outer.inner`` in a mapping) or ``key: value`` as it is; ``preset NAME``; a flag with its dashes;
``mis_ext.NAME``; ``mis-ext COMMAND``.
"""


def sentence(name: str) -> str | None:
    """The error about a removed name, or None."""
    return f"{name} was removed in mis_ext 0.6: {REMOVED[name]}" if name in REMOVED else None


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Refuse removed keys, and removed values of keys.

    Raises:
        ValueError: A key or its value was removed.
    """
    found = [text for text in map(sentence, dict.fromkeys(_names(given))) if text is not None]
    if found:
        raise ValueError("; ".join(found))


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{prefix}{key}"
            yield from _names(inner, f"{prefix}{key}.")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner, prefix)
    else:
        yield f"{prefix[:-1]}: {value}"
