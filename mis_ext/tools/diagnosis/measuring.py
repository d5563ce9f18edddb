# SPDX-License-Identifier: Apache-2.0
"""From tokens to what the rules look at."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import compress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mis_ext.checks.token_sums import (
    BASES,
    CERTAIN,
    MAX_MEAN_ABS_DIFF,
    MIN_TOKENS,
    NOTHING,
    SAMPLED_ERRORS,
    SHIFT_FACTOR,
    Sorted,
    TokenSums,
    sort_out,
)
from mis_ext.correction.layout import PackedLayout, TokenRatios
from mis_ext.correction.tokens import is_open, k3
from mis_ext.tools.diagnosis.signals import Signals, Turns, turns_of

COLUMNS = (
    *("num_tokens", "gap", "k3", "num_open", "num_raised", "room", "versions_behind", "has_other_ids"),
    *("has_old_weights", "largest_id", "lag", "num_lagged", "k3_lagged", "num_zeros", "gap_zeros", "k3_zeros"),
    *("missing_proximal", "missing_behavior"),
)

PLACES = ("the last tokens of responses", "the first tokens of responses", "the last of turns", "the first of turns")
"""Where a framework appends or prepends a token that was not sampled."""

Kind = Literal["near", "far", "other_ids", "zeros"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Of tokens, each of which can be taken out: those of samples whose ids differ; of the other samples those that are far
apart, more than kernels explain; and zeros of any sample. A cut leaves some tokens without an alternative, but where
other zeros are no log-probs, these may be none either."""

MIN_LAGGED_DIFF = 0.1
"""Nats per token. Kernels in bfloat16 give at most as much: nearer samples are not shifted."""


@dataclass(eq=False)
class Samples:
    """``[S, len(COLUMNS)]`` float64 of each sample: sums over its tokens that have a log-prob, nats; NaN: not known.

    ``num_open`` are its tokens with a probability in ``OPEN`` of :mod:`mis_ext.correction.statistics` whose log-probs
    differ, and ``num_raised`` those of them that the trainer finds more probable than the engine. ``room`` is the sum
    of 1 - p. ``lag`` is by how many tokens the engine's log-probs come too late (below 0: too early), if by more than
    one: then ``num_lagged`` and ``k3_lagged`` are of its tokens, and the sums before are 0. What ends in ``_zeros`` is
    of those of its tokens of which one side is certain (a log-prob of 0) and the other is not. ``missing_proximal`` and
    ``missing_behavior`` are its trained tokens without a finite log-prob of that side.
    """

    columns: Tensor
    steps: list[str]

    def __getitem__(self, name: str) -> Tensor:
        """A column ``[S]`` by its name."""
        return self.columns[:, COLUMNS.index(name)]

    def __len__(self) -> int:
        return len(self.columns)

    def where(self, keep_S: Tensor) -> Samples:
        """The samples for which ``keep_S`` is true."""
        return Samples(self.columns[keep_S], [*compress(self.steps, keep_S.tolist())])

    def without_zeros(self) -> Samples:
        """The sums of the other tokens."""
        columns = self.columns.clone()
        for name, of_zeros in (("num_tokens", "num_zeros"), ("gap", "gap_zeros"), ("k3", "k3_zeros")):
            columns[:, COLUMNS.index(name)] -= self[of_zeros]
        return Samples(columns, self.steps)

    @property
    def measured(self) -> Samples:
        """Those with a token that has a log-prob."""
        return self.where(self["num_tokens"] > 0)

    @property
    def kinds(self) -> Tensor:
        """``[S]``: which of ``KINDS``."""
        far = torch.where(self.mean_gap > MAX_MEAN_ABS_DIFF, KINDS.index("far"), KINDS.index("near"))
        return torch.where(self["has_other_ids"] == 1.0, KINDS.index("other_ids"), far)

    @property
    def mean_gap(self) -> Tensor:
        """``[S]``, nats per token."""
        return self["gap"] / self["num_tokens"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What a consumer has measured, which is what rules look at; None where it cannot.

    Attributes:
        tokens: Cheap sums over all tokens.
        signals: Evidence of causes, of all tokens.
        kinds: The same of the tokens of each kind that there is.
        samples: Numbers of each sample.
        zeros: ``[len(PLACES), 2, 4]`` of uncertain tokens by their place, and by the side (behavior, proximal) that may
            be 0: at the place, zeros there, others that are as probable to the other side, zeros among these.
        typical_gaps: The median ``|d|`` of each step, nats, in the order of steps.
        explained: Share of k3 that causes which were found before explain.
        has_main: Whether one of them explains half of it, or tokens were taken out.
        found: Their names.
    """

    tokens: TokenSums
    signals: Signals | None = None
    kinds: Mapping[Kind, Signals] = field(default_factory=dict)
    samples: Samples | None = None
    zeros: Tensor | None = None
    typical_gaps: Mapping[str, float] | None = None
    explained: float = 0.0
    has_main: bool = False
    found: tuple[str, ...] = ()

    @property
    def k3(self) -> float:
        """Per token that is not taken out."""
        return self.tokens.k3_rest / self.tokens.num_rest if self.tokens.num_rest else math.nan

    @property
    def k3_left(self) -> float:
        """What no cause that was found before explains of it."""
        return self.k3 * (1.0 - self.explained)

    @property
    def are_policies(self) -> bool:
        """Whether one side may have sampled: the mean ratio is 1 to it, and the other is a power of it, above 0."""
        return any(may_be_zero(each.excess, each.excess_error) and each.slope > 0.0 for each in self.tokens.powers)

    def likely_base(self) -> tuple[float, str, float]:
        """How much of how the differences vary a base explains best, the side that has it, and the base."""
        return max((self.tokens.line.through_zero(1.0 / factor(*key) - 1.0), *key) for key in BASES)

    def without(self, kind: Kind) -> Measured:
        """What is left when the tokens of a kind are taken out."""
        if self.samples is None or kind not in self.kinds:
            return self
        left = {name: signals for name, signals in self.kinds.items() if name != kind}
        if kind == "zeros":
            samples = self.samples.without_zeros()
        else:
            samples = self.samples.where(self.samples.kinds != KINDS.index(kind))
        return replace(self, **_whole(left), kinds=left, samples=samples)


@dataclass(eq=False)
class Measuring:
    """Adds up what parts of a run show, so that their tokens need not be kept."""

    _kinds: dict[Kind, Signals] = field(default_factory=dict)
    _samples: list[Samples] = field(default_factory=list)
    _zeros: Tensor = field(default_factory=lambda: torch.zeros(len(PLACES), 2, 4, dtype=torch.float64))

    def add(
        self,
        tokens: TokenRatios,
        layout: PackedLayout,
        *,
        response_mask_R: Tensor,
        versions_behind: Sequence[float] | None = None,
        has_other_ids: Sequence[bool | None] | None = None,
        has_old_weights: Sequence[bool | None] | None = None,
        token_ids: Sequence[Any] | None = None,
        step: str = "0",
        position_T: Tensor | None = None,
        turns: Turns | None = None,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> Measuring:
        """Count the tokens of a part, whole responses of one step; what belongs to its samples has an entry of each.

        Args:
            tokens: Of this part, ``[T]``.
            layout: Where the responses lie.
            response_mask_R: Which tokens are trained.
            versions_behind: The trainer's weight version minus the engine's; NaN where it is not known.
            has_other_ids: Whether the engine sampled other ids than the trainer scored; None where it is not known.
            has_old_weights: Whether a canary says that the engine had older weights than it named; None likewise.
            token_ids: Of the response; None where they are not known.
            step: Its name.
            position_T: Of each token in its response, where it is known already.
            turns: Of the trained tokens, where they are known already.
            given: Log-probs of trainer and engine as they came, ``[T]``: those that are not finite are counted.
        """
        found = sort_out(tokens, layout)
        position_T = positions(layout) if position_T is None else position_T
        turns = turns_of(tokens.response_mask_T, position_T) if turns is None else turns
        sums = _sums(tokens, found.rest_T, layout)
        lag_S = _lags(tokens, found, layout, position_T, sums[1] > MIN_LAGGED_DIFF * sums[0])
        is_lagged_S = lag_S != 0.0
        is_lagged_T = layout.spread(is_lagged_S) & found.rest_T
        found = found._replace(shifted_T=found.shifted_T | is_lagged_T, rest_T=found.rest_T & ~is_lagged_T)
        sides = ((tokens.behavior_T, tokens.proximal_T), (tokens.proximal_T, tokens.behavior_T))
        of_engine_T, of_trainer_T = ((side_T == 0.0) & (other_T.exp() < CERTAIN) for side_T, other_T in sides)
        is_zero_T = found.rest_T & (of_engine_T | of_trainer_T)
        self._zeros += _zeros_by_place(tokens, found, layout, turns)
        missing = [tokens.response_mask_T & ~side_T.isfinite() for side_T in given or ()]
        largest_ids = None if token_ids is None else map(_largest_id, token_ids)
        known = [
            [math.nan if each is None else float(each) for each in ([None] * len(lag_S) if values is None else values)]
            for values in (versions_behind, has_other_ids, has_old_weights, largest_ids)
        ]
        columns = [
            *torch.where(is_lagged_S, 0.0, sums),
            *torch.tensor(known, dtype=torch.float64),
            *(lag_S, *torch.where(is_lagged_S, sums[[0, 2]], 0.0)),
            *_sums(tokens, is_zero_T, layout)[:3],
            *(layout.sums(missing) if missing else torch.zeros(2, len(lag_S), dtype=torch.float64)),
        ]
        samples = Samples(torch.stack(columns, dim=1), [step] * len(lag_S))
        self._samples.append(samples)
        has_zeros = bool(is_zero_T.any())
        for number, kind in enumerate(KINDS):
            is_kind_S = samples.kinds == number
            is_kind_T = is_zero_T if kind == "zeros" else layout.spread(is_kind_S) & ~is_zero_T
            if bool(is_kind_S.all()) and not has_zeros:
                chosen = tokens, found, response_mask_R
            elif bool(is_kind_T.any()):
                chosen = _only(is_kind_S, is_kind_T, tokens, found, response_mask_R, layout)
            else:
                continue
            self._add(kind, Signals.of(*chosen, layout=layout, position_T=position_T, turns=turns))
        return self

    @classmethod
    def joined(cls, parts: Iterable[Measuring]) -> Measuring:
        """What all parts have counted, in their order: the same numbers, however parts are spread over ranks."""
        whole = cls()
        for part in parts:
            whole._samples += part._samples
            whole._zeros += part._zeros
            for kind, signals in part._kinds.items():
                whole._add(kind, signals)
        return whole

    def _add(self, kind: Kind, signals: Signals) -> None:
        self._kinds[kind] = self._kinds[kind] + signals if kind in self._kinds else signals

    @classmethod
    def of_other_ids(cls) -> Measuring:
        """A sample whose ids differ: nothing of it is compared."""
        known = dict.fromkeys(("versions_behind", "has_old_weights", "largest_id"), math.nan) | {"has_other_ids": 1.0}
        columns = [known.get(name, 0.0) for name in COLUMNS]
        return cls(_samples=[Samples(torch.tensor([columns], dtype=torch.float64), ["0"])])

    def measured(self, typical_gaps: Mapping[str, float] | None = None) -> Measured:
        """Everything that was counted until now.

        Args:
            typical_gaps: The median ``|d|`` of each step, nats, where it is known.
        """
        columns = torch.cat([torch.empty(0, len(COLUMNS), dtype=torch.float64), *(x.columns for x in self._samples)])
        samples = Samples(columns, [step for each in self._samples for step in each.steps])
        return Measured(
            **_whole(self._kinds), kinds=self._kinds, samples=samples, zeros=self._zeros, typical_gaps=typical_gaps
        )


def may_be_zero(mean: float, error: float) -> bool:
    """Whether a mean with this standard error is no evidence of another one than 0."""
    return abs(mean) <= SAMPLED_ERRORS * error


def factor(side: str, base: float) -> float:
    """The engine's log-probs over the trainer's, if those of a side are to this base."""
    return 1.0 / math.log(base) if side == "engine" else math.log(base)


def positions(layout: PackedLayout) -> Tensor:
    """``[T]``: of each token in its whole response."""
    length_S = torch.tensor(layout.response_lengths, dtype=torch.int64)
    begin_S = length_S.cumsum(0) - length_S
    return torch.arange(layout.num_whole_tokens) - begin_S[layout.sequence_T]


def versions_behind(trainer: Any, engine: Sequence[Any] | None) -> float:
    """The trainer's weight version minus the oldest of the engine; 1 where they are other names, NaN where unknown."""
    if trainer is None or not engine:
        return math.nan
    try:
        return float(trainer) - min(map(float, engine))
    except ValueError:
        return float(any(str(version) != str(trainer) for version in engine))


def _whole(kinds: Mapping[Kind, Signals]) -> dict[str, Any]:
    """Tokens and signals of the samples of all kinds, in one order, whichever kind came first."""
    whole = reduce(operator.add, (kinds[kind] for kind in KINDS if kind in kinds)) if kinds else None
    return {"tokens": NOTHING if whole is None else whole.tokens, "signals": whole}


def _sums(tokens: TokenRatios, chosen_T: Tensor, layout: PackedLayout) -> Tensor:
    difference_T = tokens.log_ratio_T
    k3_T, is_open_T = k3(difference_T), is_open(tokens.behavior_T, difference_T).float()
    is_raised_T = torch.where(difference_T > 0.0, is_open_T, 0.0)
    room_T = -tokens.behavior_T.expm1()
    rows = (torch.ones_like(difference_T), difference_T.abs(), k3_T, is_open_T, is_raised_T, room_T)
    return layout.sums(torch.where(chosen_T, row, 0.0) for row in rows)


def _zeros_by_place(tokens: TokenRatios, found: Sorted, layout: PackedLayout, turns: Turns) -> Tensor:
    """The sums of :attr:`Measured.zeros`."""
    trained_T, (turn_T, place_T) = tokens.response_mask_T, turns
    usable_T = tokens.valid_mask_T & ~found.placeholder_T & ~found.shifted_T
    begins_T, ends_T = trained_T & (place_T == 0), trained_T.clone()
    ends_T[:-1] &= ~(trained_T & (place_T > 0))[1:]
    (last_S,) = layout.minima([-turn_T.float()])
    is_last_T = ends_T & (turn_T == -layout.spread(last_S))
    sums = []
    for is_place_T in (is_last_T, begins_T & (turn_T == 0), ends_T, begins_T):
        for side_T, other_T in ((tokens.behavior_T, tokens.proximal_T), (tokens.proximal_T, tokens.behavior_T)):
            open_T = usable_T & (other_T.exp() < CERTAIN)
            at_T = open_T & is_place_T
            is_zero_T = at_T & (side_T == 0.0)
            zero_S, of_zeros_S = layout.sums([is_zero_T, torch.where(is_zero_T, other_T, 0.0)])
            least_S = torch.where(zero_S > 0.0, of_zeros_S / zero_S, torch.inf)
            alike_T = open_T & ~is_place_T & (other_T >= layout.spread(least_S))
            sums.append(torch.stack([each.sum() for each in (at_T, is_zero_T, alike_T, alike_T & (side_T == 0.0))]))
    return torch.stack(sums).double().view(len(PLACES), 2, 4)


def _largest_id(token_ids: Any) -> float:
    # Unsigned integers of torch have no maximum of their own.
    return math.nan if token_ids is None or not len(token_ids) else float(torch.as_tensor(token_ids).double().max())


def _lags(tokens: TokenRatios, found: Sorted, layout: PackedLayout, position_T: Tensor, chosen_S: Tensor) -> Tensor:
    """``[S]`` by how many tokens the engine's log-probs of chosen samples come too late, if by more than one."""
    lag_S = torch.zeros(len(chosen_S), dtype=torch.float64)
    lengths = [*layout.response_lengths]
    columns = (tokens.proximal_T, tokens.behavior_T, position_T, found.rest_T)
    of_samples = [*zip(*(torch.split(column, lengths) for column in columns), strict=True)]
    for sample in chosen_S.nonzero().flatten().tolist():
        *mine, is_rest_T = of_samples[sample]
        lag_S[sample] = _lag(*(each[is_rest_T] for each in mine))
    return lag_S


def _lag(proximal: Tensor, behavior: Tensor, position: Tensor) -> float:
    """The shift, of all of more than a token, at which probabilities agree best, if they agree twice as well then.

    Squares of ``p_t - q_(t + lag)`` for all lags at once, by Fourier transforms. Tokens that both sides find certain
    agree at any lag, and do not count.
    """
    if len(position) < MIN_TOKENS:
        return 0.0
    size = 2 * int(position[-1] - position[0]) + 2
    dense = torch.zeros(8, size, dtype=torch.float64)
    p, q = proximal.double().exp(), behavior.double().exp()
    rows = (torch.ones_like(p), p, q, p * p, q * q, p > CERTAIN, q > CERTAIN, (p - q).square())
    dense[:, position - position[0]] = torch.stack([row.double() for row in rows])
    one, p, q, p_squared, q_squared, p_certain, q_certain, apart = torch.fft.rfft(dense)
    products = (
        p_squared.conj() * one + one.conj() * q_squared - 2.0 * p.conj() * q,
        one.conj() * one - p_certain.conj() * q_certain,
        apart.conj() * one,
        one.conj() * apart,
    )
    moved, num_uncertain, first, second = torch.fft.irfft(torch.stack(products), size)
    usable = num_uncertain.round() >= MIN_TOKENS
    usable[[0, 1, -1]] = False
    fit = torch.where(usable, moved / first.minimum(second), torch.inf)
    lag = int(fit.argmin())
    return float(lag if 2 * lag < size else lag - size) if fit[lag] < SHIFT_FACTOR**2 else 0.0


def _only(
    keep_S: Tensor, keep_T: Tensor, tokens: TokenRatios, found: Sorted, response_mask_R: Tensor, layout: PackedLayout
) -> tuple[TokenRatios, Sorted, Tensor]:
    masks = {name: getattr(found, name) & keep_T for name in Sorted._fields if name.endswith("_T")}
    difference_T, proximal_T, behavior_T = (torch.where(keep_T, each, 0.0) for each in tokens[:3])
    kept = TokenRatios(difference_T, proximal_T, behavior_T, tokens.response_mask_T, tokens.valid_mask_T & keep_T)
    mask_R = torch.where(keep_S.index_select(0, layout.sequence_R), response_mask_R, 0)
    return kept, found._replace(pairs_S=torch.where(keep_S, found.pairs_S, 0.0), **masks), mask_R
