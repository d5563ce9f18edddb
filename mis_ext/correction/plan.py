# SPDX-License-Identifier: Apache-2.0
"""What a configuration has to compute: formulas by name, and which reductions they need.

A formula names what it needs. A :class:`~mis_ext.correction.formula.Column` among these is a reduction over the tokens
of each sequence, a :class:`~mis_ext.correction.formula.Total` one over sequences, anything else another formula. So
what a configuration must reduce follows from the formulas that it uses; nothing else is computed or communicated.

Words that say how far a token or a sequence has come, each with one meaning:

=============  ====================================================  ===========================================
word           of a token                                            of a sequence
=============  ====================================================  ===========================================
``response``   the policy generated it                               ``has_response``: it has such a token
``valid``      of the response, and its log-ratio is finite          ``measured``: it has a valid token
``usable``                                                           every ratio that a statistic needs is valid
``kept``       valid, and no gate on tokens rejects it               ``kept_sequence``: usable, and no gate rejects
``weighted``   valid, and no gate on tokens sets its weight to 0     ``weighted_sequence``: usable, and no gate ...
``live``       kept and weighted                                     ``live_sequence``: kept and weighted
=============  ====================================================  ===========================================

A token stays in the mask if it is kept and its sequence too: there are ``num_kept`` of them. Given to all formulas are
the :data:`SCALES`, and of a token its ``lag``, ``known_segment``, ``segment_sum_<token formula>`` and
``segment_mean_...``, which are found before the passes.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.formula import (
    MAX_NATS,
    NUM_RESPONSE,
    NUM_VALID,
    Column,
    Formula,
    NamedValues,
    Total,
    bounded_exp,
    check_operations,
    needed_names,
    where,
    where_positive,
)
from mis_ext.correction.gates import KNOWN_SEGMENT, Gate
from mis_ext.correction.metrics import GROUP_FORMULAS, PREFIX, Kind, MetricRow
from mis_ext.correction.statistics import LAG, TOKEN_FORMULAS, reduced
from mis_ext.correction.weights import SCALE_FORMULAS, term_formulas

DECISIONS = ("weighted_sequence", "kept_sequence", "sequence_weight", "num_kept")
"""Per sequence, equal on all context-parallel ranks: whether it carries a weight, and whether it stays in the mask; the
sequence-level part of the weight; how many of its tokens stay in the mask."""

SCALES = ("mean_weight", "denominator_factor", "scale_factor")
"""Numbers that follow from the totals of the configured scope."""

WATCHED_TOTALS = tuple(Total("sum", name) for name in (NUM_RESPONSE, "num_kept", "has_response", "has_kept"))


class Segment(NamedTuple):
    """A reduction over the tokens of each segment, at each of them a number that formulas of tokens may name."""

    name: str
    token: str
    is_mean: bool


class MetricTable(NamedTuple):
    """The metrics of sequences, one below the other in the order of their kinds: names, and where those of a kind are.

    Attributes:
        amounts: Names of what a sequence adds.
        counts: Names of how many tokens of it count.
        shares: Names of the shares of sequences, of those of ``of_call``; ``total_shares``: of their totals.
        own: Rows whose value of a sequence is its own number, ...
        means: ... or a mean over its tokens.
        of_call: Rows that need a total of the call, the scaled ones first. Their terms are the last sums of the plan.
        num_scaled: How many of them are scaled.
    """

    amounts: tuple[str, ...]
    counts: tuple[str, ...]
    shares: tuple[str, ...]
    total_shares: tuple[str, ...]
    own: slice
    means: slice
    of_call: slice
    num_scaled: int

    @classmethod
    def of(cls, metrics: Iterable[MetricRow]) -> MetricTable:
        """The table of rows in the order of their kinds."""
        rows = [row for row in metrics if row.kind != Kind.GROUP]
        first = {kind: bisect.bisect_left(rows, kind, key=attrgetter("kind")) for kind in Kind}
        return cls(
            amounts=tuple(str(row.amount_name) for row in rows),
            counts=tuple(str(row.count_name) for row in rows),
            shares=tuple(row.share_name for row in rows if row.is_of_call),
            total_shares=tuple(str(row.call_totals[1]) for row in rows if row.is_of_call),
            own=slice(0, first[Kind.MEAN_OR_CALL]),
            means=slice(first[Kind.MEAN_OR_CALL], len(rows)),
            of_call=slice(first[Kind.SCALED_OR_CALL], first[Kind.MEAN]),
            num_scaled=first[Kind.OWN_OR_CALL] - first[Kind.SCALED_OR_CALL],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is computed for a configuration.

    Attributes:
        config: The configuration.
        token: Formulas of a token, by name.
        sequence: Formulas of a sequence.
        segments: Reductions over the tokens of segments, see :func:`~mis_ext.correction.segments.segment_values`.
        given_names: The rows of :func:`~mis_ext.correction.segments.given_rows`: the lag, and those of segments.
        columns: Reductions over tokens, sums first.
        column_names: All of their names.
        num_sum_columns: How many of the columns are sums.
        totals: Reductions over sequences, sums first.
        num_sum_totals: How many of the totals are sums, scatters among them.
        total_names: All of their names.
        summed: What is summed, of all sums but the terms of metrics, which are the last ones.
        extremes: Of each total that is one, its operation, and the name of what it is the least or greatest of.
        scatters: Places among the totals of each scatter, of its count and of its sum.
        metrics: Rows whose values are computed, without aliases, in the order of their kinds.
        table: Those of sequences, which come first.
        metric_index: Public name of each selected metric, and its place in ``metrics``.
        spread: Formulas of what each token of a sequence is given of a metric, from its numbers and totals.
        group: Formulas of the metrics of the group.
        scale_factors: The names among ``SCALE_FORMULAS`` by which weights are scaled.
        needs_group_totals: Whether totals of all data-parallel ranks are needed: one small all-gather per call.
    """

    config: CorrectionConfig
    token: Mapping[str, Formula]
    sequence: Mapping[str, Formula]
    segments: tuple[Segment, ...]
    given_names: tuple[str, ...]
    columns: tuple[Column, ...]
    column_names: tuple[str, ...]
    num_sum_columns: int
    totals: tuple[Total, ...]
    num_sum_totals: int
    total_names: tuple[str, ...]
    summed: tuple[str, ...]
    extremes: Mapping[str, tuple[str, str]]
    scatters: tuple[tuple[int, ...], ...]
    metrics: tuple[MetricRow, ...]
    table: MetricTable
    metric_index: Mapping[str, int]
    spread: Mapping[str, Formula]
    group: tuple[Formula, ...]
    scale_factors: tuple[str, ...]
    needs_group_totals: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """What is copied or pickled is the configuration, because functions are not."""
        return plan_of, (self.config,)


@functools.lru_cache(maxsize=32)
def plan_of(config: CorrectionConfig) -> Plan:
    """The columns, totals and metrics that ``config`` needs and no others; kept, so that equal ones share a plan.

    Raises:
        ValueError: A formula uses an operation that the Triton backend does not know.
    """
    selected = config.selected_rows
    originals = {row.alias_of or row.name for row in selected}
    metrics = tuple(sorted((row for row in config.available_rows if row.name in originals), key=attrgetter("kind")))
    of_sequences = [row for row in metrics if row.kind != Kind.GROUP]
    token, sequence = _token_formulas(config, metrics), _sequence_formulas(config)
    spread: dict[str, Formula] = {}
    for row in metrics:
        spread |= row.spread_formulas
    for row in of_sequences:
        sequence |= row.sequence_formulas
        if row.is_of_call:
            sequence[row.share_name] = row.share_formula(per_token_loss=config.per_token_loss)
    check_operations({**token, **sequence, **SCALE_FORMULAS, **GROUP_FORMULAS, **spread})
    given = {*SCALES}
    table = MetricTable.of(metrics)

    # The totals that formulas of the group need, and those of the scales and of the metrics.
    of_group = needed_names(
        [name for row in metrics[len(of_sequences) :] for name in row.formula.needs], GROUP_FORMULAS
    )
    of_group = [name for name in of_group if name not in given and name not in GROUP_FORMULAS]
    of_scale = [name for formula in SCALE_FORMULAS.values() for name in formula.needs] if config.is_scaled else []
    terms = [row.call_totals[0] for row in metrics[table.of_call]]
    shares = [row.call_totals[1] for row in of_sequences if row.is_of_call]
    needed = _typed(Total, [*WATCHED_TOTALS, *of_scale, *of_group, *shares, *terms])
    totals = _sums_first(dict.fromkeys(part for total in needed for part in total.parts))
    sums = [total for total in totals if total.operation in ("sum", "scatter")]

    # The columns that formulas of sequences need. A parameter called num_valid is the column of this name.
    wanted = [*DECISIONS, "measured", *(total.sequence for total in totals), *(row.value_name for row in of_sequences)]
    named = [*wanted, *(name for formula in sequence.values() for name in formula.needs)]
    known = {str(name): name for name in (NUM_VALID, NUM_RESPONSE, *named) if isinstance(name, Column)}
    leaves = [name for name in needed_names(wanted, sequence) if name not in sequence and name not in given]
    columns = _sums_first(_typed(Column, [known.get(name, name) for name in leaves]))

    place = {row.name: index for index, row in enumerate(metrics)}
    index = {total: index for index, total in enumerate(totals)}
    on_segments = [gate for gate in config.all_gates if gate.is_of_segments]
    segments = tuple(
        dict.fromkeys(Segment(x.value.names[0], x.row.token, x.reduce == "segment_mean") for x in on_segments)
    )
    return Plan(
        config=config,
        token=token,
        sequence=sequence,
        segments=segments,
        given_names=(
            *([LAG] if config.staleness else []),
            *([KNOWN_SEGMENT, *(segment.name for segment in segments)] if segments else []),
        ),
        columns=columns,
        column_names=tuple(map(str, columns)),
        num_sum_columns=sum(column.operation == "sum" for column in columns),
        totals=totals,
        num_sum_totals=len(sums),
        total_names=tuple(map(str, totals)),
        extremes={str(total): (total.operation, str(total.sequence)) for total in totals[len(sums) :]},
        summed=tuple(str(total.sequence) for total in sums[: len(sums) - len(terms)]),
        scatters=tuple(tuple(index[x] for x in total.parts) for total in totals if total.operation == "scatter"),
        metrics=metrics,
        table=table,
        metric_index={PREFIX + row.name: place[row.alias_of or row.name] for row in selected},
        spread=spread,
        group=tuple(row.formula for row in metrics[len(of_sequences) :]),
        scale_factors=config.scale_factors,
        needs_group_totals=bool(of_group) or (config.is_scaled and config.scope == "data_parallel"),
    )


_Reduction = TypeVar("_Reduction", Column, Total)


def _typed(kind: type[_Reduction], names: Iterable[str]) -> list[_Reduction]:
    """The names, each of which must be a reduction of this kind."""
    found = []
    for name in names:
        assert isinstance(name, kind), f"{name!r} is neither a formula nor a {kind.__name__.lower()}"
        found.append(name)
    return found


def _sums_first(reductions: Iterable[_Reduction]) -> tuple[_Reduction, ...]:
    return tuple(sorted(reductions, key=lambda reduction: reduction.operation in ("min", "max")))


def _token_formulas(config: CorrectionConfig, metrics: Iterable[MetricRow]) -> dict[str, Formula]:
    formulas = dict(TOKEN_FORMULAS)
    if config.weight is not None:
        formulas |= config.weight.token_formulas
    on_tokens = [gate for gate in config.all_gates if gate.is_of_tokens]
    formulas |= _outcome("valid", on_tokens, kept="kept", weighted="weighted", live="live")
    for name, gate in config.labelled_gates.items():
        if gate.is_of_tokens:
            formulas[f"kept_by_{name}"] = _all_pass("valid", [gate])
        elif gate.is_veto:
            formulas[f"vetoes_of_{name}"] = gate.vetoes
    return formulas | {
        row.token_name: row.formula for row in metrics if row.over == "valid_tokens" and not row.formula.is_name
    }


def _finite(mean: Formula) -> Formula:
    """A mean whose sum may have been too large for float32."""
    return mean.then(lambda value: value.clamp(-MAX_NATS, MAX_NATS))


SEQUENCE_FORMULAS: dict[str, Formula] = {
    "measured": Formula.of(lambda num_valid: num_valid > 0.0),
    "is_measured": Formula.of(lambda measured: where(measured, 1.0, 0.0)),
    "sequence_weight": Formula.of(lambda num_valid: num_valid * 0.0 + 1.0),
    "has_kept": Formula.of(lambda num_kept: where(num_kept > 0.0, 1.0, 0.0)),
    "has_response": Formula.of(lambda num_response: where(num_response > 0.0, 1.0, 0.0)),
    "log_ratio_mean": _finite(reduced("log_ratio", "mean")),
    "proximal_mean": _finite(reduced("proximal", "mean")),
    "behavior_mean": _finite(reduced("behavior", "mean")),
    # prod_t rho_t = exp(sum_t d_t), of each sequence: what `mis_ess_ratio_seq` is about.
    "sequence_ratio": Formula(
        lambda count, log_ratio: where_positive(count, bounded_exp(log_ratio)),
        (NUM_VALID, Column("sum", "log_ratio")),
    ),
    "squared_sequence_ratio": Formula.of(lambda sequence_ratio: sequence_ratio.square()),
}
"""What a name means of a sequence, whatever is configured; only a weight of sequences replaces ``sequence_weight``."""

_IS_WHOLE = Formula.of(lambda measured, num_valid, num_response: measured & (num_valid == num_response))


def _sequence_formulas(config: CorrectionConfig) -> dict[str, Formula]:
    weight = config.weight
    formulas = {
        **SEQUENCE_FORMULAS,
        "usable": _IS_WHOLE if config.needs_whole_sequences else Formula.named("measured"),
        **_outcome(
            "usable",
            [gate for gate in config.all_gates if not gate.is_of_tokens],
            kept="kept_sequence",
            weighted="weighted_sequence",
            live="live_sequence",
        ),
    }
    # One column less where everything in the mask has a weight.
    if any(gate.action == "zero" for gate in config.all_gates):
        kept = ("kept_sequence", Column("sum", "kept"))
    else:
        kept = ("live_sequence", Column("sum", "live", "live"))
    formulas["num_kept"] = Formula(lambda is_kept, count: where(is_kept, count, 0.0), kept)
    if weight is not None:
        formulas |= weight.sequence_formulas
    return formulas | term_formulas(weight, over=config.normalize_over, per_token_loss=config.per_token_loss)


def _outcome(mask: str, gates: list[Gate], *, kept: str, weighted: str, live: str) -> dict[str, Formula]:
    """What stays in the mask, what has a weight, and what both are true of, under these names."""
    rejecting = [gate for gate in gates if gate.action == "reject"]
    zeroing = [gate for gate in gates if gate.action == "zero"]
    return {
        kept: _all_pass(mask, rejecting),
        weighted: _all_pass(mask, zeroing),
        live: _all_pass(kept, zeroing),
    }


def _all_pass(mask: str, gates: Iterable[Gate]) -> Formula:
    """A mask without what a gate rejects."""
    tests = [gate.passes for gate in gates]
    if not tests:
        return Formula.named(mask)

    def passes(passing: Tensor, *values: Tensor) -> Tensor:
        rest = iter(values)
        for test in tests:
            passing = passing & test.function(*[next(rest) for _ in test.needs])
        return passing

    return Formula(passes, (mask, *(name for test in tests for name in test.needs)))


def total_values(plan: Plan, totals_A: Tensor) -> dict[str, Tensor]:
    """Totals by name, 0-dim; a maximum was stored as the minimum of negated values."""
    values = dict(zip(plan.total_names, totals_A.unbind()[:-1], strict=True))
    for name, (operation, _) in plan.extremes.items():
        if operation == "max":
            values[name] = -values[name]
    return values


def with_scatters(plan: Plan, sums_A: Tensor, *, of_rows_AN: Tensor) -> Tensor:
    """The sums of what sequences or ranks gave, changed in place: to a scatter those of their means are added.

    So it keeps its digits where all numbers are close to each other and far from 0; a difference of squares does not.

    References:
        Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    for place, count, total in plan.scatters:
        count_N, total_N = of_rows_AN[count], of_rows_AN[total]
        distance_N = total_N / count_N.clamp_min(1.0) - sums_A[total] / sums_A[count].clamp_min(1.0)
        sums_A[place].add_((count_N * distance_N.square()).sum())
    return sums_A


def scale_values(plan: Plan, *, totals: Mapping[str, Tensor], over_group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the weights of this call are scaled by, under the names that formulas use; 1 where it is not configured."""
    found = NamedValues(over_group if plan.config.scope == "data_parallel" else totals, SCALE_FORMULAS)
    factors = dict.fromkeys(SCALE_FORMULAS, torch.ones_like(totals["total_num_response"]))
    for name in plan.scale_factors:
        factors[name] = found[name]
    return factors | {"scale_factor": factors["denominator_factor"] / factors["mean_weight"]}
