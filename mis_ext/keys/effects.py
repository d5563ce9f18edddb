# SPDX-License-Identifier: Apache-2.0
"""Keys that do nothing beside the others: one table of when, and what to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mis_ext.correction.config import BOUNDS
from mis_ext.validation import Errors


class KeysInUse(NamedTuple):
    """What is known of the other keys.

    ``given``: the keys that are set. ``values``: of every key of a correction its value or default. ``corrects``: the
    correction is applied. ``measures``: its metrics are computed. ``method_rejects``: the loss's method has a mask.
    ``loses_tokens``: a sequence of which the correction keeps a token can lose others.
    """

    given: Mapping[str, Any]
    values: Mapping[str, Any]
    corrects: bool = True
    measures: bool = True
    method_rejects: bool = False
    loses_tokens: bool = True

    @property
    def bound(self) -> Any:
        """The row of the weight's mode, None without a weight."""
        return None if self.values["tis_level"] == "none" else BOUNDS[self.values["tis_mode"]]

    @property
    def rejects(self) -> bool:
        """Whether tokens with a ratio can leave the mask."""
        gates = [key for key in (*_VETOES, "rs_max_staleness") if key in self.given]
        return bool(gates) or self.values["use_rs"] or bool(self.bound and self.bound.rejects)

    def reports(self, *words: str) -> bool:
        """Whether a metric with one of these words in its name is reported."""
        names = self.given.get("mis_metrics", "core")
        return isinstance(names, str) or any(word in name for name in names for word in words)

    def bounds_gate(self, side: str) -> bool:
        """Whether a bound of the weight is also one of the gate, which has none of its own."""
        has_band = self.values["use_rs"] and self.values["rs_level"] != "none"
        return bool(has_band) and f"rs_{side}_bound" not in self.given

    @property
    def reads_low(self) -> bool:
        """Whether a lower bound of the weight is looked at."""
        return self.bounds_gate("lower") or (self.bound is not None and self.bound.has_low)

    @property
    def reads_high(self) -> bool:
        """Whether an upper bound of the weight is: also where the lower one is 1 by it."""
        follows = self.reads_low and "tis_lower_bound" not in self.given
        return follows or self.bounds_gate("upper") or (self.bound is not None and self.bound.has_high)


class Idle(NamedTuple):
    """``keys``, at the value ``at`` or any, do nothing where ``when`` holds; ``because`` says why."""

    keys: tuple[str, ...]
    when: Callable[[KeysInUse], bool]
    because: str
    advice: str = "remove it"
    at: Any = None


_VETOES = ("rs_veto_threshold", "rs_veto_upper_threshold", "rs_veto_probability")
_BOUNDS = ("tis_lower_bound", "tis_upper_bound")
APPLIED = (
    *("use_rs", "tis_level", "tis_mode", *_BOUNDS, "tis_when", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *("rs_gates", *_VETOES, "rs_veto_requires_rs", "rs_max_staleness", "rs_staleness_level", "tis_batch_normalize"),
    *("tis_normalize_scope", "tis_normalize_over", "mis_denominator", "mis_max_reject_fraction"),
)
"""Keys of what changes weights and masks."""
REPORTED = ("mis_staleness", "mis_metrics", "mis_metric_max", "mis_guard", "mis_compile")
"""Keys of what is measured and watched."""
_ON = "set use_tis: true (the flag --use-tis), or remove it"
_ALL_KEPT = "nothing rejects a token, so that all are kept"
IDLE = (
    Idle(APPLIED, lambda keys: not keys.corrects, "use_tis is not true", _ON),
    Idle(REPORTED, lambda keys: not keys.measures, "neither use_tis nor get_mismatch_metrics is true", _ON),
    Idle(
        ("mis_staleness",),
        lambda keys: (
            not (
                keys.reports("lag_", "fresh", "stale")
                or "rs_max_staleness" in keys.given
                or keys.values["tis_when"] == "stale"
                or any(gate.get("statistic") == "lag" for gate in keys.given.get("rs_gates", ()))
            )
        ),
        "mis_metrics has none of its metrics, and neither weight nor gate looks at the lag",
    ),
    Idle(("mis_metric_max",), lambda keys: not keys.reports("k3_kl", "chi2_"), "mis_metrics has no k3_kl and no chi2"),
    Idle(("tis_mode", "tis_when"), lambda keys: keys.bound is None, "tis_level is none"),
    # Existing files carry a lower bound with truncate, which warns.
    Idle(
        ("tis_lower_bound",),
        lambda keys: not keys.reads_low and (keys.bound is None or not keys.bound.has_high),
        "no weight and no gate has this bound",
    ),
    Idle(("tis_upper_bound",), lambda keys: not keys.reads_high, "no weight and no gate has this bound"),
    Idle(
        ("tis_batch_normalize",),
        lambda keys: keys.bound is None,
        "tis_level is none",
    ),
    Idle(
        ("tis_normalize_over",), lambda keys: "tis_batch_normalize" not in keys.given, "tis_batch_normalize is not set"
    ),
    Idle(
        ("tis_normalize_scope",),
        lambda keys: "tis_batch_normalize" not in keys.given and keys.values["mis_denominator"] != "kept",
        "tis_batch_normalize is not set",
    ),
    Idle(
        ("use_rs",),
        lambda keys: bool(
            keys.bound
            and keys.bound.rejects
            and keys.values["rs_level"] == keys.values["tis_level"]
            and keys.bounds_gate("lower")
            and keys.bounds_gate("upper")
            and "rs_gates" not in keys.given
        ),
        "tis_mode rejects the same tokens",
    ),
    Idle(
        ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_gates"),
        lambda keys: "use_rs" not in keys.given,
        "use_rs is not set",
        "set use_rs: true, or remove it",
    ),
    Idle(("rs_lower_bound", "rs_upper_bound"), lambda keys: keys.values["rs_level"] == "none", "rs_level is none"),
    Idle(
        _VETOES,
        lambda keys: keys.values["rs_veto_requires_rs"] and "use_rs" not in keys.given,
        "rs_veto_requires_rs is true and use_rs is not set",
        "set use_rs: true, or remove rs_veto_requires_rs",
    ),
    Idle(
        ("rs_veto_requires_rs",),
        lambda keys: keys.values["rs_veto_requires_rs"] and not any(key in keys.given for key in _VETOES),
        "no veto is set",
    ),
    Idle(("rs_staleness_level",), lambda keys: "rs_max_staleness" not in keys.given, "rs_max_staleness is not set"),
    Idle(
        ("mis_loss_entropy_tokens", "mis_loss_kl_tokens"),
        lambda keys: not (keys.method_rejects or (keys.corrects and keys.rejects)),
        _ALL_KEPT,
        at="all",
    ),
    Idle(
        ("mis_loss_denominator",),
        lambda keys: not (keys.corrects and keys.loses_tokens),
        "no response keeps some of its tokens and loses others",
        at="kept",
    ),
    Idle(("tis_normalize_over",), lambda keys: not keys.rejects, _ALL_KEPT, at="valid"),
)
"""A key that is false is none that does nothing: it says so."""


def refuse_idle_keys(keys: KeysInUse) -> None:
    """Refuse keys that are set although they would have no effect.

    Raises:
        ValueError: There are such keys; the message says why, and what to write.
    """
    wrong, named = Errors(), set[str]()
    for row in IDLE:
        given = {key: keys.given.get(key) for key in row.keys if key not in named}
        idle = {
            key: f"{key}={value!r}"
            for key, value in given.items()
            if value is not None and value is not False and row.at in (None, value)
        }
        if idle and row.when(keys):
            named |= idle.keys()
            with wrong:
                raise ValueError(f"{', '.join(idle.values())}: no effect, because {row.because}; {row.advice}")
    wrong.raise_all()
