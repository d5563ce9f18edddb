# SPDX-License-Identifier: Apache-2.0
"""Gates: what leaves the mask, or loses its weight. Each looks at the original mask, so their order does not matter.

A gate of the correction compares proximal with behavior policy, of every token alike. A gate of a method may compare
any two policies, and may look at the sign of the advantage: see :attr:`Gate.hook_obstacle`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mis_ext.correction.statistics import (
    LAG,
    MISMATCH,
    OF_SEGMENTS,
    STATISTICS,
    HookReduce,
    Pair,
    Policy,
    Reduce,
    Statistic,
    When,
)
from mis_ext.validation import check_choice, check_number

Action = Literal["reject", "zero"]

REDUCES: tuple[Reduce, ...] = (*get_args(HookReduce), "prefix", "batch_mean", "batch_rank_mean")
_FAR_FROM_ONE = 0.1
_OPEN = "a gate needs low or high: an open band rejects nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Keep the tokens or sequences whose statistic lies in the closed interval ``[low, high]``.

    Args:
        statistic: A name of :data:`~mis_ext.correction.statistics.STATISTICS`.
        reduce: ``token``: the gate judges each token. ``sum``, ``mean``, ``max``, ``min``: it judges each sequence, by
            this reduction over its tokens. ``segment_sum``, ``segment_mean``: it judges each segment, a run of
            generated tokens such as a turn. For ratios ``sum`` is the product, and ``mean`` the geometric mean. In a
            method also ``prefix``, ``batch_mean`` and ``batch_rank_mean``, see
            :data:`~mis_ext.correction.statistics.Reduce`.
        low: Lower bound, or None.
        high: Upper bound, or None. A minimum with a lower bound alone, or a maximum with an upper one, is a veto: it
            also finds every sequence in which a response token has no finite ratio.
        action: What happens to tokens or sequences outside of the bounds. ``reject`` sets their mask to 0. ``zero``
            sets their weight to 0 and keeps the mask, so that the host's KL and entropy terms keep the token.
        after: Name of a gate on tokens. The statistic then ignores the tokens that this other gate removes, and is no
            longer a likelihood ratio of the sequence. If no token is left, the sequence passes.
        name: First part of the names of its metrics; by default ``rs_...``, from its place among the gates.
        pair: The policies that are compared: numerator and denominator of the ratio.
        when: Tokens that can be dropped; in a method alone.
        of_tokens: Tokens that the statistic counts, where it is one of the batch; in a method alone.
    """

    statistic: str = "ratio"
    reduce: Reduce = "token"
    low: float | None = None
    high: float | None = None
    action: Action = "reject"
    after: str | None = None
    name: str | None = None
    pair: Pair = MISMATCH
    when: When = "always"
    of_tokens: When = "always"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)
        check_choice("reduce", self.reduce, REDUCES)
        check_choice("action", self.action, get_args(Action))
        check_pair(self.pair)
        check_choice("when", self.when, get_args(When))
        check_choice("of_tokens", self.of_tokens, get_args(When))
        if self.of_tokens != "always" and self.reduce == "token":
            raise ValueError(f"of_tokens: {self.of_tokens} has no effect with reduce: token")
        if self.low is None and self.high is None:
            raise ValueError(_OPEN)
        # Types first: the truth value False equals 0, which is no bound.
        for key, bound in (("low", self.low), ("high", self.high)):
            if bound is not None:
                check_number(key, bound, low=-math.inf, high=math.inf)
        smallest, largest = self._open_idle_bounds()
        for key, bound in (("low", self.low), ("high", self.high)):
            if bound is not None:
                check_number(key, bound, low=smallest, high=largest)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low must be below high, got low={self.low} and high={self.high}")
        if self.after is not None and self.is_of_tokens:
            raise ValueError(f"after: {self.after!r} needs a reduction over the sequence, got reduce: {self.reduce}")
        if self.name is not None and not (
            isinstance(self.name, str) and self.name.isascii() and self.name.isidentifier()
        ):
            raise ValueError(f"name must be made of letters, digits and underscores, got {self.name!r}")
        if self.hook_obstacle is None:
            self._warn_unusual_bounds()

    @property
    def hook_obstacle(self) -> str | None:
        """Why the correction cannot have this gate, which a method can; None if it can."""
        if self.pair != MISMATCH:
            return f"it compares {' with '.join(self.pair)}: the hook sees proximal and behavior only"
        for key, when in (("when", self.when), ("of_tokens", self.of_tokens)):
            if when != "always":
                return f"{key} must be always, got {when}: the hook does not see the advantage"
        if self.reduce not in get_args(HookReduce):
            return f"the hook has no gate with reduce: {self.reduce}; it has {', '.join(get_args(HookReduce))}"
        if self.low is not None and self.low == self.high:
            return f"low must be below high, got low={self.low} and high={self.high}"
        return _OPEN if self.low is None and self.high is None else None

    @property
    def row(self) -> Statistic:
        """What is compared: formula, unit and legal range."""
        return STATISTICS[self.statistic]

    @property
    def log_low(self) -> float:
        """Lower bound on the scale of its statistic, ``-inf`` when open."""
        return -math.inf if self.low is None else self.row.edge(self.low)

    @property
    def log_high(self) -> float:
        """Upper bound on that scale, ``inf`` when open."""
        return math.inf if self.high is None else self.row.edge(self.high)

    @property
    def is_of_segments(self) -> bool:
        """Whether it judges each run of generated tokens for itself."""
        return self.reduce in OF_SEGMENTS

    @property
    def is_of_tokens(self) -> bool:
        """Whether a sequence can lose a part of its tokens by it: of a segment all, others none."""
        return self.reduce == "token" or self.is_of_segments

    @property
    def is_veto(self) -> bool:
        """Whether a single token can reject its sequence, and can be named; one without a finite ratio always does."""
        return (self.reduce == "min" and self.high is None) or (self.reduce == "max" and self.low is None)

    def _open_idle_bounds(self) -> tuple[float, float]:
        """The legal range of the bounds; one at its end says the same as none, and makes no other gate of it."""
        low, high = self.row.low, self.row.high
        # The product of probabilities is one, but the sum of probability differences is none.
        if self.reduce in ("sum", "segment_sum", "prefix") and not self.row.is_log:
            low, high = -math.inf if low < 0.0 else low, math.inf
        if self.low in (low, -math.inf):
            object.__setattr__(self, "low", None)
        if self.high in (high, math.inf):
            object.__setattr__(self, "high", None)
        return low, high

    def _warn_unusual_bounds(self) -> None:
        low, high = self.low, self.high
        center = self.row.on_policy
        if center is not None and ((low is not None and low > center) or (high is not None and high < center)):
            warnings.warn(
                f"a gate on {self.statistic} with bounds {_text(low)} to {_text(high)} rejects what is on-policy "
                f"(value {center:g})",
                stacklevel=4,
            )
        if self.statistic == "ratio" and self.reduce == "mean":
            warn_far_from_one("a geometric gate", low, high)


def check_pair(pair: Pair) -> None:
    """Refuse what is no pair of policies."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"pair must be two policies, numerator and denominator, got {pair!r}")
    for policy in pair:
        check_choice("pair", policy, get_args(Policy))


def warn_far_from_one(what: str, low: float | None, high: float | None) -> None:
    """Warn where the bounds of a geometric mean are too wide to do anything."""
    edges = [edge for edge in (low, high) if edge not in (None, 0.0, math.inf)]
    if any(abs(edge - 1.0) > _FAR_FROM_ONE for edge in edges if edge is not None):
        warnings.warn(
            f"{what} with bounds {_text(low)} to {_text(high)} almost never fires: the geometric mean of a response is "
            "about exp(-KL per token), far closer to 1",
            stacklevel=5,
        )


def _text(bound: float | None) -> str:
    return "none" if bound is None else f"{bound:g}"


VETO_NAMES = {
    ("ratio", "min"): "rs_catastrophic",
    ("ratio", "max"): "rs_veto_upper",
    ("proximal_probability", "min"): "rs_veto_probability",
    (LAG, "max"): "rs_staleness",
}


def label_gates(gates: Sequence[Gate]) -> dict[str, Gate]:
    """The gates by the stem of their metrics: their own name, else one after their kind and place."""
    labels: dict[str, Gate] = {}
    bands = 0
    for gate in gates:
        bands += not gate.is_veto
        band_name = "rs_mask" if bands == 1 else f"rs_gate{bands}"
        veto_name = VETO_NAMES.get((gate.statistic, gate.reduce), f"rs_veto_{gate.statistic}_{gate.reduce}")
        name = gate.name or (veto_name if gate.is_veto else band_name)
        if name in labels and gate.is_veto:
            raise ValueError(f"two vetoes of the same kind ({name}): the stricter one decides, remove the other")
        if name in labels:
            raise ValueError(f"two gates are called {name!r}: give one of them another name")
        labels[name] = gate
    on_tokens = [name for name, gate in labels.items() if gate.is_of_tokens]
    for name, gate in labels.items():
        if gate.after is not None and gate.after not in on_tokens:
            raise ValueError(
                f"{name} looks at what is left after {gate.after!r}, which is no gate on tokens; "
                f"there are {', '.join(on_tokens) or 'none'}"
            )
    return labels
