# SPDX-License-Identifier: Apache-2.0
"""One response in the float64 reference: its statistics, the mask after gates, and its weights."""

import itertools
import math
from dataclasses import dataclass, field, replace

from reference_numbers import bounded_exp, log, mean
from reference_rules import BOUNDS, LOG_STATISTICS, STATISTICS, Gate, Rules


@dataclass
class Response:
    """One response during the correction."""

    train: list[float]
    rollout: list[float]
    response: list[bool]
    lags: list[float]
    rules: Rules
    margins: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = list(zip(self.response, self.train, self.rollout, strict=True))
        self.valid = [r and math.isfinite(a) and math.isfinite(b) for r, a, b in pairs]
        self.d = [a - b if v else 0.0 for v, (_, a, b) in zip(self.valid, pairs, strict=True)]
        self.valid_d = [d for d, v in zip(self.d, self.valid, strict=True) if v]
        # An unknown lag counts as the oldest.
        self.lags = [1e6 if math.isnan(lag) else lag for lag in self.lags]
        self.dated = [v and lag < 1e6 for v, lag in zip(self.valid, self.lags, strict=True)]
        levels = [gate.level for gate in self.rules.gates] + [self.rules.level]
        whole = any(level in ("sequence", "geometric") for level in levels)
        broken = any(r and not v for r, v in zip(self.response, self.valid, strict=True))
        self.usable = [v and not (whole and broken) for v in self.valid]
        self.broken = broken
        if self.rules.use_tis:
            self._reject()
            self._weigh()

    def __len__(self) -> int:
        return len(self.response)

    def statistic(self, level: str, name: str = "ratio", *, of: list[bool] | None = None) -> list[float]:
        """A statistic at a level, once per token; `of` selects the counted tokens, by default the valid ones."""
        tokens = zip(self.valid, self.d, self.train, self.rollout, strict=True)
        if name == "lag":
            values = [lag if v else 0.0 for v, lag in zip(self.valid, self.lags, strict=True)]
        else:
            values = [STATISTICS[name](d, t, r) if v else 0.0 for v, d, t, r in tokens]
        if level == "token":
            return values
        if level.startswith("segment"):
            for segment in self.segments():
                of_valid = [values[t] for t in segment if self.valid[t]]
                total = math.fsum(of_valid) if level == "segment_sum" else mean(of_valid)
                values = [total if t in segment else value for t, value in enumerate(values)]
            return values
        chosen = [x for x, c in zip(values, self.valid if of is None else of, strict=True) if c]
        reduced = {
            "sequence": lambda: math.fsum(chosen),
            "geometric": lambda: mean(chosen),
            "max": lambda: max(chosen, default=-math.inf),
            "min": lambda: min(chosen, default=math.inf),
        }[level]()
        return [reduced] * len(self)

    def segments(self) -> list[range]:
        """The runs of generated tokens."""
        runs, begin = [], 0
        for is_generated, run in itertools.groupby(self.response):
            size = len(list(run))
            runs += [range(begin, begin + size)] if is_generated else []
            begin += size
        return runs

    def below(self, x: float, bound: float, *, is_log: bool = True) -> bool:
        """x < log(bound); records how close it was. Bounds of 1 are exact on exact data."""
        self._note(x, bound, is_log=is_log)
        return x < (log(bound) if is_log else bound)

    def above(self, x: float, bound: float, *, is_log: bool = True) -> bool:
        """x > log(bound)."""
        self._note(x, bound, is_log=is_log)
        return x > (log(bound) if is_log else bound)

    def _note(self, x: float, bound: float, *, is_log: bool = True) -> None:
        edge = log(bound) if is_log else bound
        if not (is_log and bound == 1.0) and math.isfinite(edge) and math.isfinite(x):
            self.margins.append(abs(x - edge))

    def value(self, gate: Gate) -> list[float]:
        """The value that a gate compares with its bounds, once per token."""
        return self.statistic(gate.level, gate.statistic, of=self.valid)

    def sides(self, gate: Gate, values: list[float]) -> tuple[list[bool], list[bool]]:
        """Per token whether its value is below the bounds, and whether it is above; without tokens it is neither."""
        if not any(self.valid):
            return [False] * len(self), [False] * len(self)
        is_log = gate.statistic in LOG_STATISTICS
        pairs = list(zip(values, self.valid, strict=True))
        if gate.statistic == "lag" and gate.level in ("token", "max", "min"):
            # Integers, which float32 compares exactly.
            return [v and x < gate.low for x, v in pairs], [v and x > gate.high for x, v in pairs]
        too_low = [v and self.below(x, gate.low, is_log=is_log) for x, v in pairs]
        return too_low, [v and self.above(x, gate.high, is_log=is_log) for x, v in pairs]

    def outside(self, gate: Gate) -> list[bool]:
        """Per token whether it, or its sequence, is outside the bounds. A token without a ratio fails every veto."""
        if gate.is_veto and self.broken:
            return [True] * len(self)
        out = [low or high for low, high in zip(*self.sides(gate, self.value(gate)), strict=True)]
        broken = [segment for segment in self.segments() if not all(self.valid[t] for t in segment)]
        if gate.is_of_segments:
            # The statistic of this segment is unknown.
            out = [gone or any(t in segment for segment in broken) for t, gone in enumerate(out)]
        return out

    def _reject(self) -> None:
        self.too_low, self.too_high, self.hits = {}, {}, {}
        self.masked, self.weighted = list(self.usable), list(self.usable)
        for gate in self.rules.gates:
            self.too_low[gate.name], self.too_high[gate.name] = self.sides(gate, self.value(gate))
            if gate.is_veto:
                alone = self.outside(replace(gate, level="token"))
                seen = zip(alone, self.response, self.valid, strict=True)
                self.hits[gate.name] = [(hit and v) or (r and not v) for hit, r, v in seen]
            left = self.masked if gate.action == "reject" else self.weighted
            left[:] = [k and not gone for k, gone in zip(left, self.outside(gate), strict=True)]
        # The trained tokens.
        self.kept = [m and w for m, w in zip(self.masked, self.weighted, strict=True)]

    def _weigh(self) -> None:
        rules = self.rules
        if rules.level == "none":
            self.ratio = [float(v) for v in self.valid]
            self.bounded = list(self.ratio)
            self.weight = [float(u) for u in self.usable]
            return
        x = self.statistic(rules.level)
        if rules.when == "stale":
            x = [xi if lag > 0 else 0.0 for xi, lag in zip(x, self.lags, strict=True)]
        self.weighed = x
        self.beyond_low = [v and self.below(xi, rules.low) for xi, v in zip(x, self.valid, strict=True)]
        self.beyond_high = [v and self.above(xi, rules.high) for xi, v in zip(x, self.valid, strict=True)]
        self.ratio = [bounded_exp(xi) if v else 0.0 for xi, v in zip(x, self.valid, strict=True)]
        bound = BOUNDS[rules.mode]
        if bound.edges == "high":
            for xi in x:
                self._note(xi, 1.0 / rules.high)
        ratios = zip(self.ratio, self.valid, strict=True)
        self.bounded = [bound.weight(w, rules.low, rules.high) if v else 0.0 for w, v in ratios]
        self.weight = [w if u else 0.0 for w, u in zip(self.bounded, self.usable, strict=True)]
