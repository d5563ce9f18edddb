# SPDX-License-Identifier: Apache-2.0
"""Configuration of a correction: weight, filters, and scale of the weights. Frozen, checked at construction."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from mis_ext.correction.metrics import PREFIX, MetricRow, rows_of
from mis_ext.correction.tokens import LAG, MAX_LOG_RATIO, STATISTICS, Statistic
from mis_ext.validation import check_bool, check_choice, check_instance, check_known, check_number

Action = Literal["reject", "zero"]
Reduce = Literal["token", "sum", "mean", "max", "min", "segment_sum", "segment_mean"]
OF_SEGMENTS = ("segment_sum", "segment_mean")
Level = Literal["token", "sequence", "geometric"]
When = Literal["always", "stale"]
REDUCTIONS: dict[str, Reduce] = {"token": "token", "sequence": "sum", "geometric": "mean"}
"""Reduction of log-ratios by level: the sum is the product of ratios, the mean is the geometric mean."""

DEFAULT_UPPER_BOUND = 2.0
"""The default of the key ``tis_upper_bound`` (its row in ``keys/rows.py``), and so the cap of the ratio of each token
with ``use_tis: true`` alone. In Python it is the cap of ``Weight()``."""

Scope = Literal["micro_batch", "data_parallel"]
NormalizeOver = Literal["kept", "valid"]
Denominator = Literal["fixed", "kept"]
MetricChoice = Literal["core", "all"]
GuardName = Literal["double_correction", "missing_log_probs", "degenerate_behavior", "shifted_log_probs"]
GUARD_NAMES: tuple[str, ...] = get_args(GuardName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Keep the tokens or responses whose statistic lies in the closed interval ``[low, high]``.

    Args:
        statistic: A name of :data:`~mis_ext.correction.tokens.STATISTICS`.
        reduce: ``token``: the gate judges each token. ``sum``, ``mean``, ``max``, ``min``: it judges each response, by
            this reduction over its tokens. ``segment_sum``, ``segment_mean``: it judges each segment, a run of
            generated tokens such as a turn. For ratios ``sum`` is the product, and ``mean`` the geometric mean.
        low: Lower bound, or None.
        high: Upper bound, or None. A minimum with only a lower bound, or a maximum with only an upper bound, is a veto:
            it also finds every response in which a response token has no finite ratio.
        action: What happens to tokens or responses outside of the bounds. ``reject`` sets their mask to 0. ``zero``
            sets their weight to 0 and keeps the mask, so that the framework's KL and entropy terms keep the token.
        name: Prefix of its metric names; by default ``rs_...``, from its kind and its position among the gates.
    """

    statistic: str = "ratio"
    reduce: Reduce = "token"
    low: float | None = None
    high: float | None = None
    action: Action = "reject"
    name: str | None = None

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("action", self.action, get_args(Action))
        smallest, largest = self.row.low, self.row.high
        # A sum of logs is a product, within the same range; any other sum can leave the range of one token.
        if self.reduce in ("sum", "segment_sum") and not self.row.is_log:
            smallest, largest = -math.inf if smallest < 0.0 else smallest, math.inf
        for key, ends in (("low", (smallest, -math.inf)), ("high", (largest, math.inf))):
            bound = getattr(self, key)
            if bound is None:
                continue
            # Check the type first: False equals 0, which is no bound.
            if check_number(key, bound, low=-math.inf, high=math.inf) in ends:
                # A bound at the end of the legal range has no effect. Gates with and without it must be equal.
                object.__setattr__(self, key, None)
            else:
                check_number(key, bound, low=smallest, high=largest)
        if self.low is None and self.high is None:
            raise ValueError("a gate needs low or high: without bounds it rejects nothing")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low must be below high, got low={self.low} and high={self.high}")
        is_word = isinstance(self.name, str) and self.name.isascii() and self.name.isidentifier()
        if self.name is not None and not is_word:
            raise ValueError(f"name must be made of letters, digits and underscores, got {self.name!r}")

    @property
    def row(self) -> Statistic:
        """The compared statistic: formula, unit, and legal range."""
        return STATISTICS[self.statistic]

    @property
    def edges(self) -> tuple[float, float]:
        """The bounds on the scale of the statistic (the log of a ratio); ``-inf`` or ``inf`` without a bound."""
        low = -math.inf if self.low is None else self.row.edge(self.low)
        return low, math.inf if self.high is None else self.row.edge(self.high)

    @property
    def is_of_segments(self) -> bool:
        """True if it filters each run of generated tokens."""
        return self.reduce in OF_SEGMENTS

    @property
    def is_of_tokens(self) -> bool:
        """True if it can reject a part of a response: single tokens, or a segment."""
        return self.reduce == "token" or self.is_of_segments

    @property
    def is_veto(self) -> bool:
        """True if one token can reject its response. A token without a finite ratio always does."""
        return (self.reduce == "min" and self.high is None) or (self.reduce == "max" and self.low is None)


_VETO_NAMES = {
    ("ratio", "min"): "rs_catastrophic",
    ("ratio", "max"): "rs_veto_upper",
    ("proximal_probability", "min"): "rs_veto_probability",
    (LAG, "max"): "rs_staleness",
}
"""Prefixes of the metrics of vetoes. The first, for ``rs_veto_threshold``, is the name in the frameworks' example."""


class Bound(NamedTuple):
    """A ``mode`` of a weight: the bounds that it uses, whether it rejects values outside, and its description."""

    has_low: bool
    has_high: bool
    rejects: bool
    text: str


BOUNDS = {
    "truncate": Bound(False, True, False, "`min(ratio, high)`"),
    "clip": Bound(True, True, False, "`clamp(ratio, low, high)`"),
    "mask": Bound(True, True, True, "the ratio; outside `[low, high]` the token or sequence is rejected"),
    "unbounded": Bound(False, False, False, "the ratio"),
}
"""The bounds of a weight by name. Truncation: Ionides, Truncated Importance Sampling, 2008; masking: IcePop,
arXiv:2510.18855."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """Importance weight: the ratio at ``level``, bounded by ``mode``. It is detached, so a bound stops no gradient.

    The token ratio corrects the next token only; the prefix stays off-policy. The product over the response is
    unbiased, and its variance grows exponentially with the length. The geometric mean is biased, but its size does not
    depend on the length.

    Args:
        level: ``token``, ``sequence`` (product of ratios) or ``geometric`` (their geometric mean).
        mode: A name of :data:`BOUNDS`.
        low: Lower bound of the ratio, for modes that have one; 1 / ``high`` by default.
        high: Upper bound of the ratio, for modes that have one; :data:`DEFAULT_UPPER_BOUND` by default.
        when: Tokens that get this weight; all other tokens have weight 1. ``stale``: tokens whose lag is above 0 or
            unknown; it needs ``level: token``.

    References:
        Token: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Sequence: Liu,
        Li et al., When Speed Kills Stability, 2025. Geometric: Zheng et al., Group Sequence Policy Optimization,
        arXiv:2507.18071.
    """

    level: Level = "token"
    mode: str = "truncate"
    low: float | None = None
    high: float | None = None
    when: When = "always"

    def __post_init__(self) -> None:
        check_choice("level", self.level, REDUCTIONS)
        check_choice("mode", self.mode, BOUNDS)
        check_choice("when", self.when, get_args(When))
        bound = self.bound
        # A bound at the open end of the interval has no effect.
        low = None if not bound.has_low and self.low == 0.0 else self.low
        high = None if not bound.has_high and self.high == math.inf else self.high
        if not bound.has_high and (low, high) != (None, None):
            raise ValueError(f"mode: {self.mode} has no bounds, got low={low} and high={high}")
        if not bound.has_low and low is not None:
            raise ValueError(f"mode: {self.mode} has no low bound, got low={low}; use mode: clip")
        if bound.has_high:
            high = DEFAULT_UPPER_BOUND if high is None else high
            high = check_number("high", high, low=0.0, high=math.inf, open_low=True, open_high=True)
            if bound.has_low:
                default, low = ("", low) if low is not None else (" (1 / high by default)", 1.0 / high)
                low = check_number("low", low, low=0.0, high=math.inf)
                if low >= high:
                    raise ValueError(f"low must be below high, got low={low}{default} and high={high}")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        contains_1 = (low or 0.0) <= 1.0 <= (math.inf if high is None else high)
        if self.when == "stale" and not (self.level == "token" and contains_1 and not bound.rejects):
            raise ValueError(
                "when: stale gives fresh tokens weight 1 and rejects none: it needs level: token, bounds that "
                f"contain 1, and a mode other than mask, got level: {self.level}, mode: {self.mode}, low={low}, "
                f"high={high}"
            )

    @property
    def bound(self) -> Bound:
        """The row of ``mode``."""
        return BOUNDS[self.mode]

    @property
    def gate(self) -> Gate | None:
        """The gate that ``mode: mask`` implies."""
        return Gate(reduce=REDUCTIONS[self.level], low=self.low, high=self.high) if self.bound.rejects else None

    @property
    def edges(self) -> tuple[float, float]:
        """Logs of the bounds; ``-inf`` or ``inf`` without a bound."""
        return math.log(self.low) if self.low else -math.inf, math.log(self.high) if self.high else math.inf

    def bounded(self, log_ratio: Tensor) -> Tensor:
        """The weight of log-ratios (nats, any shape): their ``exp``, bounded by ``mode``."""
        # Values outside of these bounds are rejected by the gate.
        low, high = (-math.inf, math.inf) if self.bound.rejects else self.edges
        # max(low, min(rho, high))
        return log_ratio.clamp(max(low, -MAX_LOG_RATIO), min(high, MAX_LOG_RATIO)).exp()


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Configuration of a correction. Create it directly, from a mapping, from YAML or from a preset.

    Args:
        weight: The importance weight. None: only gates, and weight 1.
        gates: A token is kept only if all gates keep it. Each gate reads the original response mask.
        normalize_over: ``kept`` or ``valid``: divide the weights by their mean over kept or over all valid tokens
            (responses). None: do not divide.
        scope: The samples over which this mean and the factor of ``denominator: kept`` are computed.
        denominator: ``fixed``: rejected tokens still count in the framework's denominator. ``kept``: all weights are
            multiplied by (all terms) / (kept terms), see ``TERMS`` and ``KEPT_TERMS`` in
            :mod:`mis_ext.correction.correct`. The loss is then a mean over kept tokens; or, with a mean per response,
            each response counts by its kept share.
        per_token_loss: True if the framework averages over tokens, not over per-sample means.
        metrics: ``core``, ``all``, or names.
        metric_max: Largest value of a token in ``k3_kl``, and of a response in ``chi2_token`` and ``chi2_seq``.
        warn_only: Guards that warn instead of raising an error.
        max_reject_fraction: Warn when a larger share of tokens or responses is rejected.
        metrics_only: Compute metrics, and change neither weights nor masks.
        compile: Whether to run as graphs of ``torch.compile``: True, False, or ``auto`` (only on a GPU).
        staleness: Each token comes with its lag, and metrics distinguish fresh tokens from stale tokens. Becomes True
            if a gate reads the lag, or if the weight has ``when: stale``.
    """

    weight: Weight | None = Weight()
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

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_instance("weight", self.weight, Weight)
        check_instance("gates", self.gates, (tuple, list))
        for gate in self.gates:
            check_instance("each of gates", gate, Gate)
        check_instance("warn_only", self.warn_only, (frozenset, set, tuple, list))
        check_known("guards", self.warn_only, GUARD_NAMES)
        if self.normalize_over is not None:
            check_choice("normalize_over", self.normalize_over, get_args(NormalizeOver))
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("denominator", self.denominator, get_args(Denominator))
        for key in ("per_token_loss", "metrics_only", "staleness"):
            check_bool(key, getattr(self, key))
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ValueError(f"compile must be auto, true or false, got {self.compile!r}")
        check_number("metric_max", self.metric_max, low=0.0, high=math.inf)
        check_number("max_reject_fraction", self.max_reject_fraction, low=0.0, high=1.0)
        is_of_names = isinstance(self.metrics, tuple) and all(isinstance(name, str) for name in self.metrics)
        if self.metrics not in ("all", "core") and not is_of_names:
            raise ValueError(f"metrics must be all, core or a tuple of names, got {self.metrics!r}")
        object.__setattr__(self, "gates", tuple(self.gates))
        object.__setattr__(self, "warn_only", frozenset(self.warn_only))
        if self.normalize_over is not None and self.weight is None:
            raise ValueError("normalize_over has no effect without a weight")
        if self.metrics_only and (self.weight is not None or self.gates):
            raise ValueError("metrics_only cannot be combined with a weight or gates")
        if not self.metrics_only and self.weight is None and not self.gates:
            raise ValueError("a correction needs a weight or a gate. To measure only, set metrics_only")
        looks_at_lag = any(gate.statistic == LAG for gate in self.gates)
        if looks_at_lag or (self.weight is not None and self.weight.when == "stale"):
            object.__setattr__(self, "staleness", True)
        names = [row.name for row in rows_of(self)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"the name of a gate leads to duplicate metric names ({', '.join(twice)}): rename the gate"
            )
        _ = self.rows

    @functools.cached_property
    def labeled_gates(self) -> dict[str, Gate]:
        """``gates`` by the prefix of their metrics: their name, or a default from their kind and position."""
        labels: dict[str, Gate] = {}
        bands = 0
        for gate in self.gates:
            bands += not gate.is_veto
            band_name = "rs_mask" if bands == 1 else f"rs_gate{bands}"
            veto_name = _VETO_NAMES.get((gate.statistic, gate.reduce), f"rs_veto_{gate.statistic}_{gate.reduce}")
            name = gate.name or (veto_name if gate.is_veto else band_name)
            if name in labels and gate.is_veto:
                raise ValueError(f"duplicate veto ({name}): only the stricter one has an effect. Remove the other")
            if name in labels:
                raise ValueError(f"two gates have the name {name!r}: rename one of them")
            labels[name] = gate
        return labels

    @functools.cached_property
    def all_gates(self) -> dict[str, Gate]:
        """Every gate by label, including the gate that the weight implies."""
        implied = None if self.weight is None else self.weight.gate
        # No other label has a space.
        return self.labeled_gates if implied is None else {"of the weight": implied, **self.labeled_gates}

    @property
    def has_token_weights(self) -> bool:
        """True if each token has its own weight."""
        return self.weight is not None and self.weight.level == "token"

    @functools.cached_property
    def segment_gates(self) -> tuple[Gate, ...]:
        """The gates on segments."""
        return tuple(gate for gate in self.all_gates.values() if gate.is_of_segments)

    @functools.cached_property
    def needs_all_ratios(self) -> bool:
        """True if a token without a ratio makes a statistic of its response unknown: its response is not usable."""
        has_sequence_weight = self.weight is not None and not self.has_token_weights
        return has_sequence_weight or any(gate.reduce in ("sum", "mean") for gate in self.all_gates.values())

    @functools.cached_property
    def rejects_single_tokens(self) -> bool:
        """True if a kept response can lose tokens: by a filter on tokens, or because they have no ratio."""
        rejecting = [gate for gate in self.all_gates.values() if gate.action == "reject"]
        # Otherwise a token without a ratio masks its whole response.
        keeps_the_rest = not self.needs_all_ratios and not any(gate.is_veto for gate in rejecting)
        return not self.metrics_only and (keeps_the_rest or any(gate.is_of_tokens for gate in rejecting))

    @property
    def rows(self) -> dict[str, MetricRow]:
        """The metrics that are emitted, by public name, in order."""
        available = {PREFIX + row.name: row for row in rows_of(self)}
        if self.metrics == "all":
            return available
        if self.metrics == "core":
            return {name: row for name, row in available.items() if row.is_core}
        check_known("mis_metrics of this configuration", self.metrics, available)
        return {name: row for name, row in available.items() if name in self.metrics}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Public names of the metrics that are emitted, in order."""
        return tuple(self.rows)

    @property
    def is_scaled(self) -> bool:
        """True if weights are multiplied by a factor that is computed over all samples of the ``scope``."""
        return self.normalize_over is not None or self.denominator == "kept"

    @functools.cached_property
    def needs_group(self) -> bool:
        """True if a call needs the totals of other data-parallel ranks."""
        of_group = any(row.over == "group" for row in self.rows.values())
        return of_group or (self.is_scaled and self.scope == "data_parallel")

    def stops(self, guard: GuardName) -> bool:
        """Return True if a finding of the guard is an error, not a warning."""
        return guard not in self.warn_only and not self.metrics_only

    def replace(self, **changes: Any) -> CorrectionConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)
