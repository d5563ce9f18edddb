"""What is computed: a weight, gates, and how the result is normalised. Frozen, checked at construction."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mis_ext import metric_names
from mis_ext.checks import check_bool, check_choice, check_known, check_number, did_you_mean

Level = Literal["token", "sequence", "geometric"]
GateLevel = Literal["token", "sequence", "geometric", "sequence_min", "sequence_max"]
Statistic = Literal["ratio", "proximal_probability"]
WeightMode = Literal["truncate", "clip", "mask", "unbounded"]
Scope = Literal["micro_batch", "data_parallel", "rollout"]
NormalizeOver = Literal["kept", "valid"]
Denominator = Literal["fixed", "kept"]
GuardName = Literal["double_correction", "missing_log_probs", "degenerate_behavior", "shifted_log_probs"]

DEFAULT_UPPER_BOUND = 2.0
GUARD_NAMES: tuple[str, ...] = get_args(GuardName)
_FAR_FROM_ONE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Closed interval of ratios; it contains 1, so an on-policy token is never changed or rejected."""

    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        check_number("low", self.low, low=0.0, high=1.0)
        check_number("high", self.high, low=1.0, high=math.inf)
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got low={self.low} and high={self.high}")

    @property
    def log_low(self) -> float:
        """Lower edge in log space, ``-inf`` when open."""
        return math.log(self.low) if self.low > 0.0 else -math.inf

    @property
    def log_high(self) -> float:
        """Upper edge in log space, ``inf`` when open."""
        return math.log(self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateFactor:
    """Keep what lies in ``band``; at the levels ``sequence_min`` and ``sequence_max`` one token vetoes its sequence.

    Args:
        level: What the statistic is aggregated over. ``sequence_min`` has only a low edge, ``sequence_max`` a high one.
        band: Legal values of the statistic.
        statistic: The ratio proximal / behavior, or the proximal probability of the token (``sequence_min`` only).
    """

    level: GateLevel
    band: Band
    statistic: Statistic = "ratio"

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(GateLevel))
        check_choice("statistic", self.statistic, get_args(Statistic))
        if self.statistic == "proximal_probability" and self.level != "sequence_min":
            raise ValueError(f"statistic: proximal_probability needs level: sequence_min, got {self.level!r}")
        if self.level == "sequence_min" and (self.band.low == 0.0 or self.band.high != math.inf):
            raise ValueError(f"level: sequence_min needs low in (0, 1] and no high, got {self.band}")
        if self.level == "sequence_max" and (self.band.low != 0.0 or self.band.high == math.inf):
            raise ValueError(f"level: sequence_max needs a finite high and no low, got {self.band}")
        if self.band == Band():
            raise ValueError("a gate needs low or high: an open band rejects nothing")
        if self.level == "geometric":
            _warn_far_from_one("a geometric gate", self.band)

    @property
    def is_veto(self) -> bool:
        """Whether one token decides about its sequence."""
        return self.level in ("sequence_min", "sequence_max")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFactor:
    """Importance weight: the ratio at ``level``, bounded as ``mode`` says.

    ``truncate`` caps at ``band.high``; ``clip`` clamps into ``band``; ``mask`` leaves the ratio and rejects what lies
    outside ``band``; ``unbounded`` leaves the ratio.
    """

    level: Level = "token"
    mode: WeightMode = "truncate"
    band: Band = Band(high=DEFAULT_UPPER_BOUND)

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(Level))
        check_choice("mode", self.mode, get_args(WeightMode))
        if self.mode == "unbounded" and self.band != Band():
            raise ValueError(f"mode: unbounded takes no bounds, got {self.band}")
        if self.mode != "unbounded" and self.band.high == math.inf:
            raise ValueError(f"mode: {self.mode} needs a finite high; write mode: unbounded for none")
        if self.mode == "truncate" and self.band.low != 0.0:
            raise ValueError(f"mode: truncate has no low bound, got low={self.band.low}; write mode: clip")
        if self.mode in ("clip", "mask") and self.level == "geometric":
            _warn_far_from_one(f"a geometric weight with mode: {self.mode}", self.band)

    @property
    def clip_band(self) -> Band:
        """Where the weight is clamped to."""
        return self.band if self.mode in ("truncate", "clip") else Band()

    @property
    def gate(self) -> GateFactor | None:
        """The gate that ``mode: mask`` implies."""
        return GateFactor(level=self.level, band=self.band) if self.mode == "mask" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """One point in the space of corrections. Build it by hand, from a mapping, from YAML or from a preset.

    Args:
        weight: The importance weight, or None: gates without reweighting.
        gates: All of them must keep a token; each looks at the original response mask.
        normalize_over: Divide the weights by their mean over kept or over all valid tokens (sequences); None: no.
        scope: The samples over which that mean, and ``kept`` denominators, are taken.
        denominator: ``fixed``: rejected terms stay in the host's denominator; ``kept``: survivors are scaled up to
            what they would weigh if the rejected had left it.
        per_token_loss: The host averages over tokens instead of over per-sample means.
        metrics: ``all``, ``core``, or names.
        metric_max: Largest value one token may add to ``k3_kl`` and one sequence to ``chi2_token`` and ``chi2_seq``.
        warn_only: Guards that warn instead of raising.
        max_reject_fraction: Warn when a larger share of tokens or sequences is rejected.
        metrics_only: Measure and change nothing.
    """

    weight: WeightFactor | None = WeightFactor()
    gates: tuple[GateFactor, ...] = ()
    normalize_over: NormalizeOver | None = None
    scope: Scope = "data_parallel"
    denominator: Denominator = "fixed"
    per_token_loss: bool = False
    metrics: Literal["all", "core"] | tuple[str, ...] = "all"
    metric_max: float = 10.0
    warn_only: frozenset[str] = frozenset()
    max_reject_fraction: float = 0.5
    metrics_only: bool = False

    def __post_init__(self) -> None:
        if self.normalize_over is not None:
            check_choice("normalize_over", self.normalize_over, get_args(NormalizeOver))
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("denominator", self.denominator, get_args(Denominator))
        check_bool("per_token_loss", self.per_token_loss)
        check_number("metric_max", self.metric_max, low=0.0, high=math.inf)
        check_number("max_reject_fraction", self.max_reject_fraction, low=0.0, high=1.0)
        check_known("guards", self.warn_only, GUARD_NAMES)
        if self.normalize_over is not None and self.weight is None:
            raise ValueError("normalize_over has no effect without a weight")
        if self.metrics_only and (self.weight is not None or self.gates):
            raise ValueError("metrics_only takes no weight and no gates")
        if not self.metrics_only and self.weight is None and not self.gates:
            raise ValueError("neither a weight nor a gate: nothing to correct; set metrics_only to measure")
        _ = self.selected_metrics

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> CorrectionConfig:
        """Build from the hosts' flat keys, or from ``{"mis": {...}}``, the native form.

        Raises:
            ValueError: A key is unknown, has no effect, or its value is out of range.
            TypeError: A value has the wrong type, as ``1e-4`` has in YAML.
        """
        # The parser of mappings imports this module.
        from mis_ext.flat_keys import config_from_flat_keys

        return config_from_flat_keys(mapping)

    @property
    def all_gates(self) -> tuple[GateFactor, ...]:
        """Every gate, with the one that the weight implies."""
        implied = self.weight.gate if self.weight is not None else None
        return self.gates if implied is None else (implied, *self.gates)

    @property
    def named_gates(self) -> tuple[tuple[str, GateFactor], ...]:
        """``gates`` with the names that their metrics carry."""
        named: list[tuple[str, GateFactor]] = []
        bands = 0
        for gate in self.gates:
            if gate.statistic == "proximal_probability":
                name = "rs_veto_probability"
            elif gate.level == "sequence_min":
                name = "rs_catastrophic"
            elif gate.level == "sequence_max":
                name = "rs_veto_upper"
            else:
                bands += 1
                name = "rs_mask" if bands == 1 else f"rs_gate{bands}"
            if any(name == other for other, _ in named):
                raise ValueError(f"two vetoes of the same kind ({name}): the stricter one decides, remove the other")
            named.append((name, gate))
        return tuple(named)

    @property
    def rejects_whole_sequences(self) -> bool:
        """Whether a token without a ratio takes its sequence with it: some statistic of the sequence is unknown."""
        levels: set[str] = {gate.level for gate in self.all_gates}
        if self.weight is not None:
            levels.add(self.weight.level)
        return bool(levels & {"sequence", "geometric"})

    @property
    def rejects_single_tokens(self) -> bool:
        """Whether a sequence that is kept can lose tokens: by a gate on tokens, or because they have no ratio."""
        gates_tokens = any(gate.level == "token" for gate in self.all_gates)
        return not self.metrics_only and (gates_tokens or not self.rejects_whole_sequences)

    @property
    def available_metrics(self) -> tuple[str, ...]:
        """Names, without prefix, that this configuration can emit, in the order of emission."""
        names = list(metric_names.MISMATCH)
        if self.metrics_only:
            return tuple(names)
        if self.weight is not None:
            names += ["tis_weight_before_bound", *metric_names.WEIGHT_BOUND[self.weight.mode]]
            names += ["tis_weight_after_bound", "is_ratio_mean_after_tis_rs"]
        for name, gate in self.named_gates:
            names += metric_names.gate_names(name, is_veto=gate.is_veto)
        if self.normalize_over is not None:
            names.append("batch_norm_factor")
        if self.weight is not None:
            names += ["is_ratio_mean_final", "is_ratio_min_final", "is_ratio_max_final"]
        names += ["kept_token_fraction", "kept_seq_fraction"]
        if self.denominator == "kept":
            names.append("denominator_factor")
        return tuple(names)

    @property
    def selected_metrics(self) -> tuple[str, ...]:
        """Names, without prefix, that are emitted, in order."""
        available = self.available_metrics
        if self.metrics == "all":
            return available
        if self.metrics == "core":
            return tuple(name for name in available if name in metric_names.CORE)
        if isinstance(self.metrics, str):
            raise ValueError(f"metrics must be all, core or a list of names, got {self.metrics!r}")
        prefixed = {metric_names.PREFIX + name: name for name in available}
        for name in self.metrics:
            if name not in prefixed:
                raise ValueError(
                    f"metrics: {name!r} is not emitted by this configuration{did_you_mean(name, prefixed)}. "
                    f"Emitted: {', '.join(prefixed)}"
                )
        return tuple(plain for name, plain in prefixed.items() if name in self.metrics)

    @property
    def needs_group_totals(self) -> bool:
        """Whether numbers from all data-parallel ranks are needed: one small all-gather per call."""
        scaled = self.normalize_over is not None or self.denominator == "kept"
        return (scaled and self.scope == "data_parallel") or any(n in metric_names.GROUP for n in self.selected_metrics)

    def replace(self, **changes: Any) -> CorrectionConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


def _warn_far_from_one(what: str, band: Band) -> None:
    edges = [edge for edge in (band.low, band.high) if edge not in (0.0, math.inf)]
    if any(abs(edge - 1.0) > _FAR_FROM_ONE for edge in edges):
        warnings.warn(
            f"{what} with bounds {band.low:g} to {band.high:g} almost never fires: the geometric mean of a response is "
            "about exp(-KL per token), so useful bounds are 1 -+ 0.0001 to 0.01",
            stacklevel=4,
        )
