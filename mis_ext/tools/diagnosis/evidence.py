# SPDX-License-Identifier: Apache-2.0
"""Input of the rules: tokens with log-probs of both sides, and properties of their responses and steps."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import MAX_LOG_RATIO, Tokens, is_open, k3
from mis_ext.tools.diagnosis import thresholds as limit

MAX_KEPT, BLOCK = 1 << 22, 64
"""The largest number of tokens that the rules use. In larger runs, evenly spaced blocks of 64 responses are omitted."""

_OF_TOKENS = ("trainer_T", "engine_T", "sample_T", "position_T", "turn_T", "place_T", "later_T", "repeated_T")
COLUMNS = ("versions_behind", "has_other_ids", "has_old_weights", "largest_id", "missing_trainer", "missing_engine")


class Origin(NamedTuple):
    """The source of a sample and its properties other than log-probs; None: unknown."""

    name: str = ""
    sample_index: int | None = None
    reward: float = math.nan
    versions_behind: float = math.nan
    """The trainer's weight version minus the oldest of the engine; 1 if they are different names."""
    token_ids: Any = None
    """The token ids of the response, ``[R]``."""
    has_other_ids: bool | None = None
    """Whether the ids that the engine sampled differ from those that the trainer scored."""
    group: Hashable = None
    """A label shared by all samples of one prompt."""
    has_old_weights: bool | None = None
    """Whether the canary found weights older than the version that the engine reported."""
    source: str = ""
    """The file."""

    @property
    def largest_id(self) -> float:
        """NaN if no id is known."""
        # torch has no maximum for unsigned integers.
        ids = self.token_ids
        return math.nan if ids is None or not len(ids) else float(torch.as_tensor(ids).double().max())


def step_order(name: str) -> tuple[bool, str]:
    """The key by which steps are sorted: numbers by their size, then names."""
    return not name.isdecimal(), name.zfill(20)


def turns_of(trained_T: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """For each trained token, the number of its turn (from 0 in each response) and its place in the turn; ``[T]`` each.

    A turn begins after a masked token, or with the response.
    """
    begins_T = trained_T & (position_T == 0)
    begins_T[1:] |= trained_T[1:] & ~trained_T[:-1]
    index_T = torch.arange(len(begins_T), device=begins_T.device)
    count_T = begins_T.long().cumsum(0)
    before_T = torch.cat([count_T.new_zeros(1), count_T])[index_T - position_T]
    last_begin_T = torch.where(begins_T, index_T, 0)
    place_T = index_T - (last_begin_T.cummax(0).values if len(index_T) else index_T)
    return (count_T - before_T - 1).clamp_min(0), place_T


def positions(layout: PackedLayout) -> Tensor:
    """The position of each token in its whole response, ``[T]``."""
    length_S = torch.tensor(layout.response_lengths, dtype=torch.int64)
    begin_S = length_S.cumsum(0) - length_S
    return torch.arange(layout.num_whole_tokens) - begin_S[layout.sequence_T]


def versions_behind(trainer: Any, engine: Sequence[Any] | None) -> float:
    """The trainer's weight version minus the oldest of the engine; 1 if they are different names, NaN if unknown."""
    if trainer is None or not engine:
        return math.nan
    try:
        return float(trainer) - min(map(float, engine))
    except ValueError:
        return float(any(str(version) != str(trainer) for version in engine))


@dataclass(frozen=True, eq=False)
class Evidence:
    """Valid tokens ``[T]`` of ``S`` responses: trained tokens with finite log-probs on both sides.

    Attributes:
        trainer_T: Log-probs of the trainer in nats, float64. ``engine_T``: of the engine.
        sample_T: The response of each token.
        position_T: Position in the response. ``turn_T``: the turn. ``place_T``: the position in the turn.
        later_T: For the last trained token of a turn, the number of later turns; -1 for other tokens.
        repeated_T: 1: the id occurred earlier in the response; 0: it did not; -1: ids are unknown.
        columns_S: ``[S, len(COLUMNS)]``; NaN: unknown. ``missing_...``: number of trained tokens without a finite
            log-prob.
        ordinal_S: Number of the response in its run.
        steps: The step of each response. ``sources``: its file.
    """

    trainer_T: Tensor
    engine_T: Tensor
    sample_T: Tensor
    position_T: Tensor
    turn_T: Tensor
    place_T: Tensor
    later_T: Tensor
    repeated_T: Tensor
    columns_S: Tensor
    ordinal_S: Tensor
    steps: Sequence[str]
    sources: Sequence[str]

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        layout: PackedLayout,
        origins: Sequence[Origin],
        *,
        step: str = "0",
        given: tuple[Tensor, Tensor] | None = None,
    ) -> Evidence:
        """Make it from the tokens of whole responses of one step.

        Args:
            tokens: All tokens, ``[T]``.
            layout: The positions of the responses.
            origins: Properties of each response.
            step: Name of the step.
            given: Unmodified log-probs of trainer and engine, ``[T]``, to count non-finite ones.
        """
        trained_T, position_T = tokens.generated, positions(layout)
        turn_T, place_T = turns_of(trained_T, position_T)
        behind_T = layout.spread(layout.length_S) - 1 - position_T
        later_T, rest_T = (each_T.flip(0) for each_T in turns_of(trained_T.flip(0), behind_T.flip(0)))
        missing = [trained_T & ~side_T.isfinite() for side_T in given or ()]
        known = [(each.versions_behind, each.has_other_ids, each.has_old_weights, each.largest_id) for each in origins]
        columns_S = torch.tensor(
            [[math.nan if value is None else float(value) for value in row] for row in known], dtype=torch.float64
        ).reshape(-1, 4)
        missing_S = layout.sums(missing).double().T if missing else columns_S.new_zeros(len(origins), 2)
        repeated = [
            _repeated(each.token_ids, length) for each, length in zip(origins, layout.response_lengths, strict=True)
        ]
        rows = (
            tokens.log_pi.double(),
            tokens.log_mu.double(),
            layout.sequence_T,
            position_T,
            turn_T,
            place_T,
            torch.where(rest_T == 0, later_T, -1),
            torch.cat([torch.empty(0, dtype=torch.int8), *repeated]),
        )
        valid = tokens.valid.nonzero().flatten()
        return cls(
            **_named(row.index_select(0, valid) for row in rows),
            columns_S=torch.cat([columns_S, missing_S], dim=1),
            ordinal_S=torch.arange(len(origins)),
            steps=[step] * len(origins),
            sources=[each.source for each in origins],
        )

    @classmethod
    def joined(cls, parts: Iterable[Evidence]) -> Evidence:
        """The tokens of all parts, in order."""
        parts = [*parts]
        first = accumulate((len(part.steps) for part in parts), initial=0)
        moved = [replace(part, sample_T=part.sample_T + number) for part, number in zip(parts, first, strict=False)]
        types = {"trainer_T": torch.float64, "engine_T": torch.float64, "repeated_T": torch.int8}
        rows = [
            torch.cat([torch.empty(0, dtype=types.get(name, torch.int64)), *(getattr(part, name) for part in moved)])
            for name in _OF_TOKENS
        ]
        return cls(
            **_named(rows),
            columns_S=torch.cat([torch.empty(0, len(COLUMNS), dtype=torch.float64), *(p.columns_S for p in parts)]),
            ordinal_S=torch.cat([torch.empty(0, dtype=torch.int64), *(part.ordinal_S for part in parts)]),
            steps=[step for part in parts for step in part.steps],
            sources=[source for part in parts for source in part.sources],
        )

    def __len__(self) -> int:
        return len(self.engine_T)

    def __getitem__(self, name: str) -> Tensor:
        """A column ``[S]`` by its name."""
        return self.columns_S[:, COLUMNS.index(name)]

    def where(self, keep_T: Tensor) -> Evidence:
        """The selected tokens. The table of responses is kept."""
        if bool(keep_T.all()):
            return self
        kept = keep_T.nonzero().flatten()
        return replace(self, **{name: getattr(self, name).index_select(0, kept) for name in _OF_TOKENS})

    def split(self, number_T: Tensor, size: int) -> list[Evidence]:
        """The tokens of each number from 0 to ``size - 1``. The table of responses is kept."""
        order = number_T.sort(stable=True).indices
        counts = torch.bincount(number_T, minlength=size).tolist()
        rows = (torch.split(getattr(self, name).index_select(0, order), counts) for name in _OF_TOKENS)
        return [replace(self, **_named(mine)) for mine in zip(*rows, strict=True)]

    def of_samples(self, keep_S: Tensor) -> Evidence:
        """The tokens of the selected responses."""
        return self.where(keep_S.index_select(0, self.sample_T))

    def without_samples(self, keep_S: Tensor) -> Evidence:
        """Only the selected responses, also in the table."""
        number_S = keep_S.long().cumsum(0) - 1
        kept = self.of_samples(keep_S)
        return replace(
            kept,
            sample_T=number_S.index_select(0, kept.sample_T),
            columns_S=self.columns_S[keep_S],
            ordinal_S=self.ordinal_S[keep_S],
            steps=[*compress(self.steps, keep_S.tolist())],
            sources=[*compress(self.sources, keep_S.tolist())],
        )

    # --- of each token

    @property
    def sides(self) -> dict[str, Tensor]:
        """Log-probs of engine and trainer, by the names of their policies."""
        return {"behavior": self.engine_T, "proximal": self.trainer_T}

    @cached_property
    def d_T(self) -> Tensor:
        """Log-prob of the trainer minus that of the engine, clamped like a ratio."""
        return (self.trainer_T - self.engine_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def k3_T(self) -> Tensor:
        """k3 of each token."""
        return k3(self.d_T)

    @cached_property
    def room_T(self) -> Tensor:
        """1 - p. Noise in the logits moves a log-prob by about the noise times this factor."""
        return -self.engine_T.clamp_max(0.0).expm1()

    @cached_property
    def uncertain_T(self) -> Tensor:
        """Mask of the tokens that were not nearly certain in the engine."""
        return self.engine_T < math.log(limit.CERTAIN)

    @cached_property
    def shift_T(self) -> Tensor:
        """``|d| / (1 - p)``: the size of the noise behind ``d``."""
        return self.d_T.abs() / self.room_T.clamp_min(1e-12)

    @cached_property
    def uncertain(self) -> Evidence:
        """The uncertain tokens."""
        return self.where(self.uncertain_T)

    @cached_property
    def typical_shift(self) -> float:
        """The median shift of uncertain tokens whose log-probs differ."""
        tokens = self.uncertain
        chosen = tokens.shift_T[tokens.d_T != 0.0]
        return float(chosen.median()) if len(chosen) else 0.0

    # --- of each response

    def per_sample(self, values_T: Tensor | None = None) -> Tensor:
        """``[S]`` sums over the tokens of each response; without values, the number of tokens."""
        weights = None if values_T is None else values_T.double()
        return torch.bincount(self.sample_T, weights, minlength=len(self.steps)).double()

    def least(self, values_T: Tensor) -> Tensor:
        """``[S]``: the smallest value of each response; infinity if it has no token."""
        start = values_T.new_full((len(self.steps),), math.inf)
        return start.scatter_reduce(0, self.sample_T, values_T, "amin")

    def spread(self, values_S: Tensor) -> Tensor:
        """``[T]``: the value of each token's response."""
        return values_S.index_select(0, self.sample_T)

    @cached_property
    def num_S(self) -> Tensor:
        """``[S]`` tokens of each response."""
        return self.per_sample()

    @cached_property
    def gap_S(self) -> Tensor:
        """``[S]`` mean ``|d|`` of each response, nats; NaN without a token."""
        return self.per_sample(self.d_T.abs()) / self.num_S

    @cached_property
    def shift_S(self) -> Tensor:
        """``[S]`` mean ``|d|`` over mean 1 - p; NaN if the response is too certain."""
        room_S = self.per_sample(self.room_T)
        return torch.where(room_S > limit.MIN_ROOM * self.num_S, self.gap_S * self.num_S / room_S, math.nan)

    # --- of all

    @cached_property
    def k3(self) -> float:
        """Mean per token; NaN without tokens."""
        return float(self.k3_T.mean()) if len(self) else math.nan

    @cached_property
    def num_ids(self) -> int:
        """An estimate of the vocabulary size. The real size is unknown and may be larger."""
        known = self["largest_id"][~self["largest_id"].isnan()]
        largest = int(known.max()) + 1 if len(known) else limit.USUAL_VOCABULARY
        return min(max(largest, limit.SMALLEST_VOCABULARY), limit.USUAL_VOCABULARY)

    @cached_property
    def mean_log_probs(self) -> dict[str, float]:
        """The mean of each side, over values clamped at minus ``MAX_LOG_RATIO``."""
        sides = {"trainer": self.trainer_T, "engine": self.engine_T}
        return {side: float(values.clamp_min(-MAX_LOG_RATIO).mean()) for side, values in sides.items()}

    @property
    def side_worse_than_a_guess(self) -> str:
        """The side that gives the sampled tokens less probability than a uniform guess; empty if neither does."""
        means, guess = self.mean_log_probs, -math.log(self.num_ids)
        for side, other in (("trainer", "engine"), ("engine", "trainer")):
            # If both sides have the same mean, the policy is nearly uniform.
            if len(self) >= limit.MIN_TOKENS and means[side] < min(guess, means[other] - limit.MAX_MEAN_ABS_DIFF):
                return side
        return ""

    @cached_property
    def raised(self) -> tuple[float, float, float]:
        """Number of open tokens, share that the trainer finds more probable, and its standard error over responses."""
        open_T = is_open(self.engine_T, self.d_T)
        open_S, raised_S = self.per_sample(open_T), self.per_sample(open_T & (self.d_T > 0.0))
        total = float(open_S.sum())
        share = float(raised_S.sum()) / total if total else math.nan
        error = float((raised_S - share * open_S).square().sum().sqrt()) / total if total else math.nan
        return total, share, error

    @cached_property
    def step_S(self) -> Tensor:
        """``[S]``: the index of each response's step, in the order of steps."""
        names = sorted({*self.steps}, key=step_order)
        numbers = {name: number for number, name in enumerate(names)}
        return torch.tensor([numbers[name] for name in self.steps], dtype=torch.int64)


class Power(NamedTuple):
    """Estimate of ``slope`` in q = p^slope / Z, from the log-probs s (of p) and o (of q) of tokens sampled from p.

    Logits divided by a temperature give ``o_t = slope s_t - log sum_v p_t(v)^slope``; the sum depends only on the
    position. At every position, ``w = exp(o - s) - 1`` has mean 0 over sampled tokens for any two distributions. So w
    is uncorrelated with any function of the position, and ``Cov(w, o) = slope Cov(w, s)`` is exact for any logits and
    any temperature. Noise in o adds its own square to the left side, and moves the slope away from 1.

    Attributes:
        excess: The mean of w; 0 unless the tokens were sampled from another distribution.
        excess_error: Its standard error.
        slope: The power.
        error: Its standard error.
        fit: The mean of w, weighted by the square of ``o - slope s``, in [-1, 1]; 0 for a power.
    """

    excess: float
    excess_error: float
    slope: float = math.nan
    error: float = math.inf
    fit: float = math.nan

    @classmethod
    def of(cls, s: Tensor, o: Tensor) -> Power:
        """Estimate it from log-probs of tokens."""
        w = (o - s).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()
        excess, excess_error = mean_and_error(w)
        s, o = s - s.mean(), o - o.mean()
        # 0 without tokens.
        along = float(w @ s)
        if not along:
            return cls(excess, excess_error)
        slope = float(w @ o) / along
        left = (o - slope * s).square()
        size = float(w.abs() @ left)
        return cls(
            excess,
            excess_error,
            slope,
            math.sqrt(float(w.square() @ left)) / abs(along),
            float(w @ left) / size if size else math.nan,
        )

    @property
    def loses_mass(self) -> bool:
        """Return True if the mean ratio is certainly below 1. A temperature does not cause this."""
        return -self.excess > max(limit.MIN_DEFICIT, limit.MIN_DEFICIT_ERRORS * self.excess_error)


def mean_and_error(w: Tensor) -> tuple[float, float]:
    """The mean, and its standard error under the hypothesis that the true mean is 0."""
    count = max(len(w), 1)
    return float(w.sum()) / count, math.sqrt(float(w.square().sum())) / count


def may_be_zero(mean: float, error: float) -> bool:
    """Return True if a mean with this standard error is compatible with 0."""
    return abs(mean) <= limit.SAMPLED_ERRORS * error


def t_quantile(z: float, freedom: float) -> float:
    """The quantile of Student's t with the same probability as ``z`` standard errors: Abramowitz and Stegun, 26.7.5.

    Accurate to 0.2 % at 0.975 from 3 degrees of freedom on; infinity below 1.
    """
    if freedom < 1:
        return math.inf
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))


@dataclass(eq=False)
class Gathering:
    """Keeps at most about ``MAX_KEPT`` tokens of a run, independently of how the run is split into parts."""

    _parts: list[Evidence] = field(default_factory=list)
    _num_samples: int = 0
    _num_tokens: int = 0
    _stride: int = 1

    def add(self, part: Evidence) -> Gathering:
        """Add the tokens of one part."""
        part = replace(part, ordinal_S=part.ordinal_S + self._num_samples)
        self._num_samples += len(part.steps)
        self._parts.append(self._thinned(part))
        self._num_tokens += len(self._parts[-1])
        while self._num_tokens > MAX_KEPT and self._stride * BLOCK < self._num_samples:
            self._stride *= 2
            self._parts = [*map(self._thinned, self._parts)]
            self._num_tokens = sum(map(len, self._parts))
        return self

    def _thinned(self, part: Evidence) -> Evidence:
        keep_S = part.ordinal_S // BLOCK % self._stride == 0
        return part if bool(keep_S.all()) else part.without_samples(keep_S)

    @property
    def evidence(self) -> Evidence:
        """The tokens kept so far."""
        return Evidence.joined(self._parts)


def _named(rows: Iterable[Tensor]) -> dict[str, Any]:
    return dict(zip(_OF_TOKENS, rows, strict=True))


def _repeated(ids: Any, length: int) -> Tensor:
    """``[R]`` int8: whether the id of each token occurred earlier in its response; -1 if unknown."""
    if ids is None or len(ids) != length:
        return torch.full((length,), -1, dtype=torch.int8)
    order = torch.as_tensor(ids).double().sort(stable=True)
    repeated = torch.zeros(length, dtype=torch.int8)
    repeated[order.indices[1:]] = (order.values[1:] == order.values[:-1]).to(torch.int8)
    return repeated
