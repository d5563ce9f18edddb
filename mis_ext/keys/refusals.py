# SPDX-License-Identifier: Apache-2.0
"""Refused combinations: keys that have no effect with the others, and keys that contradict each other.

The legal values of a single key are in ``rows``, combinations of the full policy loss in ``loss_keys``, which the hook
does not load. ``check_setup`` refuses what needs the launch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mis_ext.correction.config import BOUNDS, CorrectionConfig
from mis_ext.correction.tokens import LAG
from mis_ext.keys.names import TIS_OF_FRAMEWORKS
from mis_ext.keys.rows import CORRECTION_ROWS, LOSS_ROWS, VETOES
from mis_ext.validation import Errors

# --- keys without effect


class Idle(NamedTuple):
    """Keys without effect, if ``when`` holds: the reason, and what to do."""

    keys: tuple[str, ...]
    when: bool
    because: str
    advice: str = "remove it"


REPORTED = ("mis_staleness", "mis_metrics", "mis_metric_max", "mis_guard", "mis_compile")
"""Keys of what is measured and watched."""
APPLIED = tuple(key for key in CORRECTION_ROWS if key not in (*REPORTED, "use_tis"))
"""Keys of what changes weights and masks."""
_OF_RS = ("rs_level", "rs_lower_bound", "rs_upper_bound")
_ON, _ON_RS = "set use_tis: true (the flag --use-tis), or remove it", "set use_rs: true, or remove it"
_ON_GATES = "set use_rs: true, with rs_level: none for these gates alone, or remove it"
_NO_BOUND, _NO_MEAN = "no weight and no gate has this bound", "tis_batch_normalize is not set"
_NO_LAG = "mis_metrics has none of its metrics, and neither weight nor gate looks at the lag"
_NO_VETO = "rs_veto_requires_rs is true and use_rs is not set"
ALL_KEPT = "nothing rejects a token, so that all are kept"


def idle_keys(given: Mapping[str, Any], *, corrects: bool, measures: bool = True) -> tuple[Idle, ...]:
    """The table for keys of a correction; those of the full policy loss are in ``loss_keys``.

    Args:
        given: The keys that are set; those of weights and masks are legal.
        corrects: The correction is applied.
        measures: Its metrics are computed.
    """
    values = {key: row.default for key, row in CORRECTION_ROWS.items()} | dict(given)
    has_weight, bound = values["tis_level"] != "none", BOUNDS[values["tis_mode"]]
    uses_low, uses_high = has_weight and bound.has_low, has_weight and bound.has_high
    low_of_gate, high_of_gate = (inherits_bound(given, side) for side in ("lower", "upper"))
    # The lower bound is by default 1 / the upper one.
    low_follows = "tis_lower_bound" not in given and (uses_low or low_of_gate)
    is_repeated = values["rs_level"] == values["tis_level"] and low_of_gate and high_of_gate and "rs_gates" not in given
    mode_rejects = has_weight and bound.rejects
    rejects = mode_rejects or values["use_rs"] or any(key in given for key in (*VETOES, "rs_max_staleness"))
    gates_lag = any(gate.get("statistic") == LAG for gate in values["rs_gates"])
    judges_lag = gates_lag or "rs_max_staleness" in given or values["tis_when"] == "stale"
    no_rs, is_scaled = "use_rs" not in given, "tis_batch_normalize" in given

    def reports(*words: str) -> bool:
        names = values["mis_metrics"]
        return not isinstance(names, (list, tuple)) or any(word in str(name) for name in names for word in words)

    return (
        Idle(APPLIED, not corrects, "use_tis is not true", _ON),
        Idle(REPORTED, not measures, "neither use_tis nor get_mismatch_metrics is true", _ON),
        Idle(("mis_staleness",), not judges_lag and not reports("lag_", "fresh", "stale"), _NO_LAG),
        Idle(("mis_metric_max",), not reports("k3_kl", "chi2_"), "mis_metrics has no k3_kl and no chi2"),
        Idle(("tis_mode", "tis_when", "tis_batch_normalize"), not has_weight, "tis_level is none"),
        # Existing files carry a lower bound with truncate, which warns.
        Idle(("tis_lower_bound",), not (uses_low or low_of_gate or uses_high), _NO_BOUND),
        Idle(("tis_upper_bound",), not (uses_high or high_of_gate or low_follows), _NO_BOUND),
        Idle(("tis_normalize_over",), not is_scaled, _NO_MEAN),
        Idle(("tis_normalize_scope",), not is_scaled and values["mis_denominator"] != "kept", _NO_MEAN),
        Idle(("use_rs",), mode_rejects and is_repeated, "tis_mode rejects the same tokens"),
        Idle(_OF_RS, no_rs, "use_rs is not set", _ON_RS),
        Idle(("rs_gates",), no_rs, "use_rs is not set", _ON_GATES),
        Idle(("rs_lower_bound", "rs_upper_bound"), values["rs_level"] == "none", "rs_level is none"),
        Idle(
            (*VETOES,),
            values["rs_veto_requires_rs"] and no_rs,
            _NO_VETO,
            "set use_rs: true, or remove rs_veto_requires_rs",
        ),
        Idle(("rs_veto_requires_rs",), not given.keys() & {*VETOES}, "no veto is set"),
        Idle(("rs_staleness_level",), "rs_max_staleness" not in given, "rs_max_staleness is not set"),
        Idle(("tis_normalize_over",), values["tis_normalize_over"] == "valid" and not rejects, ALL_KEPT),
    )


def idle_bounds(given: Mapping[str, Any]) -> Iterator[Idle]:
    """Bounds of the framework's built-in correction, which mis_ext replaces."""
    for key, (default, instead) in TIS_OF_FRAMEWORKS.items():
        is_set = given.get(key) not in (None, default)
        yield Idle((key,), is_set, "it belongs to the framework's built-in correction", f"write {instead}")


def inherits_bound(given: Mapping[str, Any], side: str) -> bool:
    """Return True if the filter of ``use_rs`` has the ``lower`` or ``upper`` bound of the weight."""
    return bool(given.get("use_rs")) and given.get("rs_level") != "none" and f"rs_{side}_bound" not in given


def refuse_idle(rows: Iterable[Idle], given: Mapping[str, Any]) -> None:
    """Refuse keys that have no effect. A key that is false is never refused, and a key in one row only.

    Raises:
        ValueError: There are such keys; the message has the reason, and what to write.
    """
    wrong, named = Errors(), set[str]()
    for row in rows:
        is_set = [key for key in row.keys if key not in named and given.get(key) is not None]
        idle = [key for key in is_set if given[key] is not False]
        if row.when and idle:
            named |= {*idle}
            shown = ", ".join(f"{key}={given[key]!r}" for key in idle)
            wrong.refuse([f"{shown}: no effect, because {row.because}; {row.advice}"])
    wrong.raise_all()


# --- keys and flags that contradict each other


def against_correction(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions among the keys of a correction; ``values`` has all of them."""
    low, high = values["tis_lower_bound"], values["tis_upper_bound"]
    bound = None if values["tis_level"] == "none" else BOUNDS[values["tis_mode"]]
    if bound is not None and bound.has_high and high == math.inf:
        yield "tis_upper_bound must be in (0, inf), got inf; write tis_mode: unbounded for no bound"
    if bound is not None and bound.has_low and low >= high:
        yield _disorder(given, "tis", low, high)
    if values["use_rs"] and values["rs_level"] == "none" and not values["rs_gates"]:
        yield "rs_level: none needs rs_gates; write use_rs: false for no gate"
    if values["use_rs"] and values["rs_level"] != "none":
        low, high = values["rs_lower_bound"], values["rs_upper_bound"]
        if low >= high:
            yield _disorder(given, "rs", low, high)
        if low == 0.0 and high == math.inf:
            yield "use_rs: rs_lower_bound=0 and rs_upper_bound=inf reject nothing"
    is_of_stale = values["rs_max_staleness"] is not None or values["tis_when"] == "stale"
    if not values["mis_staleness"] and (is_of_stale or any(gate.statistic == LAG for gate in values["rs_gates"])):
        yield (
            "rs_max_staleness, tis_when: stale, and a gate on the lag need mis_staleness: true, with which the rollout "
            "stores the version of each token"
        )


def _disorder(given: Mapping[str, Any], prefix: str, low: float, high: float) -> str:
    default = "" if f"{prefix}_lower_bound" in given else " (from tis_lower_bound, by default 1 / tis_upper_bound)"
    return f"{prefix}_lower_bound must be below {prefix}_upper_bound, got {low!r}{default} and {high!r}"


def refuse_loss_keys(given: Mapping[str, Any]) -> None:
    """Refuse keys of the full policy loss where the framework's own loss runs."""
    idle = [key for key in LOSS_ROWS if given.get(key) is not None]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: no effect, because --loss-type is {given.get('loss_type') or 'policy_loss'}; write "
            "--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"
        )


def refuse_group_keys(keys: Collection[str]) -> None:
    """Refuse keys that only a function of the whole rollout reads."""
    if keys:
        raise ValueError(
            f"{', '.join(keys)}: no effect here: slime and Miles alone show mis_ext the responses to a prompt; compute "
            "advantages with mis_ext.group_advantages, and give the loss divisors"
        )


def against_fsdp(given: Mapping[str, Any], correction: CorrectionConfig, *, has_loss: bool) -> Iterator[str]:
    """Corrections that are wrong with Miles' FSDP backend; ``has_loss``: they are in the full policy loss."""
    if given.get("train_backend") != "fsdp":
        return
    if correction.denominator == "kept":
        yield (
            "mis_denominator: kept with Miles' FSDP backend corrects twice: its reducer divides by the returned masks; "
            "remove mis_denominator"
        )
    if has_loss and any(gate.action == "reject" for gate in correction.all_gates.values()):
        yield (
            "train_backend: fsdp with a configuration that rejects: Miles' FSDP backend divides every term by the kept "
            "tokens, the loss of mis_ext by the original ones; write action: zero for the gates, or keep the "
            "framework's loss with --custom-tis-function-path mis_ext.compute_mis_weights_with_cp"
        )


def double_correction(given: Mapping[str, Any], correction: CorrectionConfig) -> str | None:
    """Why loss and correction together count the mismatch twice, or None. A guard: the user can allow it."""
    # The other modes of the loss do not count it twice, and say so where they are computed.
    is_mode = given.get("mis_loss_mode") in (None, "baseline") and given.get("mis_loss_method") is None
    is_baseline = is_mode and given.get("mis_loss_proximal") != "current"
    if correction.metrics_only or not is_baseline or not given.get("use_rollout_logprobs"):
        return None
    return (
        "--use-tis together with --use-rollout-logprobs (use_tis, use_rollout_logprobs) counts the mismatch "
        "twice: the PPO ratio already corrects it; drop one of them"
    )
