# SPDX-License-Identifier: Apache-2.0
"""What is computed: a weight, gates, and how the result is normalised. Frozen, checked at construction."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mis_ext.correction.gates import Gate, label_gates
from mis_ext.correction.metrics import PREFIX, MetricRow, rows_of
from mis_ext.correction.statistics import LAG
from mis_ext.correction.weights import Denominator, NormalizeOver, Scope, Weight
from mis_ext.validation import check_bool, check_choice, check_instance, check_known, check_number, did_you_mean

DEFAULT_WEIGHT = Weight()
MetricChoice = Literal["core", "all"]
GuardName = Literal["double_correction", "missing_log_probs", "degenerate_behavior", "shifted_log_probs"]

GUARD_NAMES: tuple[str, ...] = get_args(GuardName)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """One point in the space of corrections. Build it by hand, from a mapping, from YAML or from a preset.

    Args:
        weight: The importance weight. None: only gates, and weight 1.
        gates: A token is kept only if all gates keep it. Each gate looks at the original response mask.
        normalize_over: ``kept`` or ``valid``: divide the weights by their mean over kept or over all valid tokens
            (sequences). None: do not divide.
        scope: The samples over which this mean and the factor of ``denominator: kept`` are computed.
        denominator: ``fixed``: rejected tokens still count in the framework's denominator. ``kept``: all weights are
            multiplied by (all terms) / (kept terms), so that the loss is a mean over kept tokens or responses.
        per_token_loss: True if the host averages over tokens, not over per-sample means.
        metrics: ``core``, ``all``, or names.
        metric_max: Each token counts at most this much in ``k3_kl``, each sequence in ``chi2_token`` and ``chi2_seq``.
        warn_only: Guards that warn instead of raising an error.
        max_reject_fraction: Warn when a larger share of tokens or sequences is rejected.
        metrics_only: Measure, and change nothing.
        compile: Run as graphs of ``torch.compile``: ``auto``, on a GPU; True; False.
        staleness: Each token comes with its lag, and metrics tell fresh tokens from stale ones. True where a gate looks
            at the lag, or the weight has ``when: stale``.
    """

    weight: Weight | None = DEFAULT_WEIGHT
    gates: tuple[Gate, ...] = ()
    normalize_over: NormalizeOver | None = None
    scope: Scope = "data_parallel"
    denominator: Denominator = "fixed"
    per_token_loss: bool = False
    metrics: MetricChoice | tuple[str, ...] = "core"
    metric_max: float = 10.0
    warn_only: frozenset[str] = frozenset()
    max_reject_fraction: float = 0.1
    metrics_only: bool = False
    compile: Literal["auto"] | bool = "auto"
    staleness: bool = False
    _hash: int = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_instance("weight", self.weight, Weight)
        check_instance("gates", self.gates, (tuple, list))
        check_instance("warn_only", self.warn_only, (frozenset, set, tuple, list))
        for gate in self.gates:
            check_instance("each of gates", gate, Gate)
        parts: dict[str, Weight | Gate] = {} if self.weight is None else {"weight": self.weight}
        for key, part in (parts | {f"gates[{i}]": gate for i, gate in enumerate(self.gates)}).items():
            if part.hook_obstacle is not None:
                raise ValueError(f"{key}: {part.hook_obstacle}")
        for guard in self.warn_only:
            check_instance("each of warn_only", guard, str)
        label_gates(tuple(self.gates))
        object.__setattr__(self, "gates", tuple(self.gates))
        object.__setattr__(self, "warn_only", frozenset(self.warn_only))
        if self.normalize_over is not None:
            check_choice("normalize_over", self.normalize_over, get_args(NormalizeOver))
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("denominator", self.denominator, get_args(Denominator))
        check_bool("per_token_loss", self.per_token_loss)
        check_bool("metrics_only", self.metrics_only)
        check_bool("staleness", self.staleness)
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ValueError(f"compile must be auto, true or false, got {self.compile!r}")
        check_number("metric_max", self.metric_max, low=0.0, high=math.inf)
        check_number("max_reject_fraction", self.max_reject_fraction, low=0.0, high=1.0)
        check_known("guards", self.warn_only, GUARD_NAMES)
        is_of_names = isinstance(self.metrics, tuple) and all(isinstance(name, str) for name in self.metrics)
        if self.metrics not in ("all", "core") and not is_of_names:
            raise ValueError(f"metrics must be all, core or a tuple of names, got {self.metrics!r}")
        if self.normalize_over is not None and self.weight is None:
            raise ValueError("normalize_over has no effect without a weight")
        if self.metrics_only and (self.weight is not None or self.gates):
            raise ValueError("metrics_only takes no weight and no gates")
        if not self.metrics_only and self.weight is None and not self.gates:
            raise ValueError("neither a weight nor a gate: nothing to correct; set metrics_only to measure")
        looks_at_lag = any(gate.statistic == LAG for gate in self.gates)
        if looks_at_lag or (self.weight is not None and self.weight.when == "stale"):
            object.__setattr__(self, "staleness", True)
        # A configuration is looked up at every call.
        values = tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.compare)
        object.__setattr__(self, "_hash", hash(values))
        names = [row.name for row in self.available_rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"the name of a gate gives two metrics one name ({', '.join(twice)}): give it another name"
            )
        _ = self.selected_rows

    def __hash__(self) -> int:
        return self._hash

    @property
    def labelled_gates(self) -> dict[str, Gate]:
        """``gates`` by the stem of their metrics."""
        return label_gates(self.gates)

    @property
    def all_gates(self) -> dict[str, Gate]:
        """Every gate by label, with the one that the weight implies."""
        implied = None if self.weight is None else self.weight.gate
        # No label has a space.
        return self.labelled_gates if implied is None else {"of the weight": implied, **self.labelled_gates}

    @property
    def has_token_weights(self) -> bool:
        """Whether each token has a weight of its own."""
        return self.weight is not None and self.weight.level == "token"

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a token without a ratio leaves some statistic of its sequence unknown."""
        has_sequence_weight = self.weight is not None and not self.has_token_weights
        return has_sequence_weight or any(gate.reduce in ("sum", "mean") for gate in self.all_gates.values())

    @property
    def rejects_whole_sequences(self) -> bool:
        """Whether a token without a ratio takes its sequence out of the mask: it is unknown, or a veto finds it."""
        return self.needs_whole_sequences or any(gate.is_veto and gate.action == "reject" for gate in self.gates)

    @property
    def multiplies_ratios(self) -> bool:
        """Whether a weight or a gate is of the product of a response's ratios."""
        is_product = self.weight is not None and self.weight.level == "sequence"
        return is_product or any(gate.statistic == "ratio" and gate.reduce == "sum" for gate in self.all_gates.values())

    @property
    def rejects_single_tokens(self) -> bool:
        """Whether a sequence that is kept can lose tokens: by a gate on tokens, or because they have no ratio."""
        gates_tokens = any(gate.is_of_tokens and gate.action == "reject" for gate in self.all_gates.values())
        return not self.metrics_only and (gates_tokens or not self.rejects_whole_sequences)

    @property
    def available_rows(self) -> tuple[MetricRow, ...]:
        """The metrics that this configuration can emit, in the order of emission."""
        return rows_of(self)

    @property
    def selected_rows(self) -> tuple[MetricRow, ...]:
        """The metrics that are emitted, in order."""
        available = self.available_rows
        if self.metrics == "all":
            return available
        if self.metrics == "core":
            return tuple(row for row in available if row.is_core)
        by_public_name = {PREFIX + row.name: row for row in available}
        for name in self.metrics:
            if name not in by_public_name:
                raise ValueError(
                    f"metrics: {name!r} is not emitted by this configuration{did_you_mean(name, by_public_name)}. "
                    "metrics: all emits every metric"
                )
        return tuple(row for name, row in by_public_name.items() if name in self.metrics)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Public names of the metrics that are emitted, in order."""
        return tuple(PREFIX + row.name for row in self.selected_rows)

    @property
    def is_scaled(self) -> bool:
        """Whether weights are multiplied by a number that belongs to the whole ``scope``."""
        return self.normalize_over is not None or self.denominator == "kept"

    def stops(self, guard: GuardName) -> bool:
        """Whether what a guard finds is an error, and not a warning."""
        return guard not in self.warn_only and not self.metrics_only

    def replace(self, **changes: Any) -> CorrectionConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)
