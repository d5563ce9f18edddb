# SPDX-License-Identifier: Apache-2.0
"""The settings of the float64 reference: statistics, bounds, gates, and the flat keys with their defaults."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reference_numbers import LOG_RATIO_LIMIT, bounded_exp, clamped

MAX_NATS = 1e6


def binary_kl(log_p: float, log_q: float) -> float:
    """KL of the events "this token" and "another one"."""
    log_p, log_q = min(log_p, 0.0), min(log_q, 0.0)
    other_p, other_q = -math.expm1(log_p), -math.expm1(log_q)
    if other_p > 0.0 and other_q == 0.0:
        return MAX_NATS
    of_others = other_p * math.log(other_p / other_q) if other_p > 0.0 else 0.0
    return max(math.exp(log_p) * (log_p - log_q) + of_others, 0.0)


# Statistics of a token from its log ratio and both log-probs; the bounds of the first ones are compared as logs.
LOG_STATISTICS: dict[str, Callable[[float, float, float], float]] = {
    "ratio": lambda d, train, rollout: d,
    "proximal_probability": lambda d, train, rollout: train,
    "behavior_probability": lambda d, train, rollout: rollout,
}
STATISTICS = LOG_STATISTICS | {
    "abs_log_ratio": lambda d, train, rollout: abs(d),
    "k1": lambda d, train, rollout: -d,
    "k2": lambda d, train, rollout: clamped(d) ** 2 / 2,
    "half_abs_ratio_excess": lambda d, train, rollout: abs(math.expm1(clamped(d))) / 2,
    "binary_kl": lambda d, train, rollout: binary_kl(train, rollout),
    "reverse_binary_kl": lambda d, train, rollout: binary_kl(rollout, train),
    "k3": lambda d, train, rollout: math.exp(clamped(d)) - 1 - min(d, LOG_RATIO_LIMIT),
    "exp_abs_log_ratio": lambda d, train, rollout: bounded_exp(abs(d)),
    "probability_gain": lambda d, train, rollout: bounded_exp(train) - bounded_exp(rollout),
    "probability_difference": lambda d, train, rollout: abs(bounded_exp(train) - bounded_exp(rollout)),
}


@dataclass(frozen=True)
class Bound:
    """The effect of a mode on a ratio w with bounds low and high; its bounds, and whether it rejects values outside."""

    weight: Callable[[float, float, float], float]
    edges: str = "none"
    rejects: bool = False


BOUNDS = {
    "truncate": Bound(lambda w, low, high: min(w, high), edges="high"),
    "clip": Bound(lambda w, low, high: min(max(w, low), high), edges="both"),
    "mask": Bound(lambda w, low, high: w, edges="both", rejects=True),
    "unbounded": Bound(lambda w, low, high: w),
}


@dataclass(frozen=True)
class Gate:
    """Keep values in [low, high] at `level`: token, sequence, geometric, max, min, segment_sum or segment_mean.

    Metrics begin with `name`.

    With `action` zero, values outside get weight 0 and stay in the mask.
    """

    name: str
    level: str
    low: float
    high: float
    statistic: str = "ratio"
    action: str = "reject"

    @property
    def is_of_segments(self) -> bool:
        """Each run of generated tokens separately."""
        return self.level.startswith("segment")

    @property
    def is_veto(self) -> bool:
        """One token can reject the sequence."""
        open_below = self.low == (0.0 if self.statistic in LOG_STATISTICS else -math.inf)
        return (self.level == "min" and self.high == math.inf) or (self.level == "max" and open_below)


@dataclass(frozen=True)
class Rules:
    """The flat keys, with the documented defaults filled in."""

    use_tis: bool
    level: str
    mode: str
    low: float
    high: float
    gates: list[Gate]
    normalize: bool
    scope: str
    over: str
    denominator: str
    metric_max: float
    when: str = "always"
    has_lags: bool = False

    @classmethod
    def from_keys(cls, keys: Mapping) -> "Rules":
        """Read the keys a user writes."""
        level = keys.get("tis_level", "token")
        mode = keys.get("tis_mode", "truncate")
        high = keys.get("tis_upper_bound", 2.0)
        low = keys.get("tis_lower_bound")
        low = 1 / high if low is None else low
        use_rs = bool(keys.get("use_rs", False))
        gates = []
        if BOUNDS[mode].rejects and level != "none":
            gates.append(Gate("tis_mask", level, low, high))
        if use_rs:
            rs_low, rs_high = keys.get("rs_lower_bound"), keys.get("rs_upper_bound")
            rs_low, rs_high = low if rs_low is None else rs_low, high if rs_high is None else rs_high
            gates.append(Gate("rs_mask", keys.get("rs_level", "token"), rs_low, rs_high))
        # The gate of the flat keys is the first one.
        levels = {"token": "token", "sum": "sequence", "mean": "geometric"}
        for index, extra in enumerate(keys.get("rs_gates") or [], start=2):
            gates.append(Gate(f"rs_gate{index}", levels[extra["reduce"]], extra["low"], extra["high"]))
        if use_rs or not keys.get("rs_veto_requires_rs", False):
            gates += vetoes_of(keys)
        if keys.get("rs_max_staleness") is not None:
            of_level = keys.get("rs_staleness_level", "token").removeprefix("sequence_")
            gates.append(Gate("rs_staleness", of_level, -math.inf, keys["rs_max_staleness"], statistic="lag"))
        return cls(
            use_tis=bool(keys.get("use_tis", False)),
            level=level,
            mode=mode,
            low=low,
            high=high,
            gates=gates,
            normalize=bool(keys.get("tis_batch_normalize", False)) and level != "none",
            scope=keys.get("tis_normalize_scope", "data_parallel"),
            over=keys.get("tis_normalize_over", "kept"),
            denominator=keys.get("mis_denominator", "fixed"),
            metric_max=keys.get("mis_metric_max", 10.0),
            when=keys.get("tis_when", "always"),
            has_lags=bool(keys.get("mis_staleness", False)),
        )


def vetoes_of(keys: Mapping) -> list[Gate]:
    """The vetoes among the flat keys."""
    vetoes = []
    if keys.get("rs_veto_threshold") is not None:
        vetoes.append(Gate("rs_catastrophic", "min", keys["rs_veto_threshold"], math.inf))
    if keys.get("rs_veto_upper_threshold") is not None:
        vetoes.append(Gate("rs_veto_upper", "max", 0.0, keys["rs_veto_upper_threshold"]))
    if keys.get("rs_veto_probability") is not None:
        low = keys["rs_veto_probability"]
        vetoes.append(Gate("rs_veto_probability", "min", low, math.inf, statistic="proximal_probability"))
    return vetoes
