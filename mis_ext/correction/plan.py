"""What a configuration has to compute: formulas by name, and which reductions they need.

A name tells where its value comes from. Of a sequence ``[S]``:

========================  ==============================================================================
``num_<mask>``            how many of its tokens are in a mask: ``num_valid``, ``num_response``
``sum_<token formula>``   sum over its valid tokens; ``sum_<token formula>_over_<mask>`` over others
``min_...``, ``max_...``  extremes over the same tokens; of none infinite
========================  ==============================================================================

Of all sequences of this call, or of the data-parallel group (0-dim):

=================================  =====================================================================
``total_<formula of a sequence>``  sum over sequences
``lowest_...``, ``highest_...``    extremes over sequences with a valid token
``scatter_<x>``                    squared distances of all ``num_<x>`` numbers, whose sum is ``total_<x>``, from
                                   their mean; the formula of a sequence is the same within it
=================================  =====================================================================

``band_scale_of_<gate>`` is given for a rollout; ``known_segment``, ``segment_sum_<token formula>`` and
``segment_mean_...`` of a token, before the passes.

Whatever is none of these is a formula. So what a configuration must reduce follows from the parameters of the formulas
that it uses; nothing else is computed or communicated.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.formula import MAX_NATS, Formula, NamedValues, bounded_exp, needed_names, where, where_positive
from mis_ext.correction.gates import KNOWN_SEGMENT, Gate
from mis_ext.correction.metrics import GROUP_FORMULAS, PREFIX, MetricRow
from mis_ext.correction.normalization import SCALE_FORMULAS, WeightScale, term_formulas
from mis_ext.correction.statistics import TOKEN_FORMULAS, reduced
from mis_ext.correction.triton.symbols import check_operations

Operation = Literal["sum", "scatter", "min", "max"]

DECISIONS = ("weighted_sequence", "keep_sequence", "sequence_weight", "num_kept")
"""Per sequence, equal on all context-parallel ranks: whether it carries a weight, and whether it stays in the mask; the
sequence-level part of the weight; how many of its tokens stay in the mask."""

SCALES = ("mean_weight", "denominator_factor", "scale_factor")
"""Numbers that follow from the totals of the configured scope."""

WATCHED_TOTALS = ("total_num_response", "total_num_kept", "total_has_response", "total_has_kept")


@dataclass(frozen=True, slots=True)
class Column:
    """A reduction over the tokens of each sequence; a maximum is stored as the minimum of negated values."""

    name: str
    operation: Operation
    token: str
    over: str

    @classmethod
    def of(cls, name: str, token_formulas: Collection[str]) -> Column:
        """The column that a name stands for, as ``sum_log_ratio``; the module says how names are made."""
        operation, _, rest = name.partition("_")
        if operation == "num":
            return cls(name, "sum", rest, rest)
        assert operation in ("sum", "min", "max"), f"{name!r} is neither a formula nor a reduction over tokens"
        # The metric of a gate has the gate's name in its own, and that may have any word in it.
        token, _, over = (rest, "", "") if rest in token_formulas else rest.partition("_over_")
        return cls(name, operation, token, over or "valid")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Total:
    """A reduction over sequences; a maximum is stored as the minimum of negated values."""

    name: str
    operation: Operation
    sequence: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The totals from which those of others are merged: of a scatter its own name, count and sum."""
        if self.operation != "scatter":
            return (self.name,)
        of_what = self.name.removeprefix("scatter_")
        return self.name, f"total_num_{of_what}", f"total_{of_what}"

    @classmethod
    def of(cls, name: str) -> Total:
        """The total that a name stands for; the module says how names are made."""
        prefix, _, sequence = name.partition("_")
        if prefix == "scatter":
            return cls(name, "scatter", name)
        operations: dict[str, Operation] = {"total": "sum", "lowest": "min", "highest": "max"}
        assert prefix in operations, f"{name!r} is neither a formula nor a reduction over sequences"
        return cls(name, operations[prefix], sequence)


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
        rows = [row for row in metrics if row.over != "group"]
        begin = [bisect.bisect_left(rows, kind, key=attrgetter("kind")) for kind in range(6)]
        return cls(
            amounts=tuple(row.amount_name for row in rows),
            counts=tuple(row.count_name for row in rows),
            shares=tuple(f"share_by_{row.count_name}" for row in rows if row.call_totals),
            total_shares=tuple(row.call_totals[1] for row in rows if row.call_totals),
            own=slice(begin[0], begin[3]),
            means=slice(begin[3], begin[5]),
            of_call=slice(begin[1], begin[4]),
            num_scaled=begin[2] - begin[1],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is computed for a configuration.

    Attributes:
        config: The configuration.
        token: Formulas of a token, by name.
        sequence: Formulas of a sequence.
        segments: Reductions over the tokens of segments, see :func:`~mis_ext.correction.segments.segment_values`.
        columns: Reductions over tokens, sums first.
        num_sum_columns: How many of the columns are sums.
        totals: Reductions over sequences, sums first.
        num_sum_totals: How many of the totals are sums, scatters among them.
        scatters: Places among the totals of each scatter, of its count and of its sum.
        metrics: Rows whose values are computed, without aliases, in the order of their kinds.
        table: Those of sequences, which come first.
        metric_index: Public name of each selected metric, and its place in ``metrics``.
        spread: Formulas of what each token of a sequence is given of a metric, from its numbers and totals.
        needs_group_totals: Whether totals of all data-parallel ranks are needed: one small all-gather per call.
        band_scales: Names of the numbers that each rollout gives: the scales of the bands that have a target.
    """

    config: CorrectionConfig
    token: Mapping[str, Formula]
    sequence: Mapping[str, Formula]
    segments: tuple[Segment, ...]
    columns: tuple[Column, ...]
    num_sum_columns: int
    totals: tuple[Total, ...]
    num_sum_totals: int
    scatters: tuple[tuple[int, ...], ...]
    metrics: tuple[MetricRow, ...]
    table: MetricTable
    metric_index: Mapping[str, int]
    spread: Mapping[str, Formula]
    needs_group_totals: bool
    band_scales: tuple[str, ...]

    @property
    def segment_names(self) -> tuple[str, ...]:
        """The rows of :func:`~mis_ext.correction.segments.segment_values`; none without a gate on segments."""
        return (KNOWN_SEGMENT, *(segment.name for segment in self.segments)) if self.segments else ()


_Reduction = TypeVar("_Reduction", Column, Total)


@functools.lru_cache(maxsize=32)
def plan_of(config: CorrectionConfig) -> Plan:
    """The columns, totals and metrics that ``config`` needs and no others; kept, so that equal ones share a plan.

    Raises:
        ValueError: A formula uses an operation that the Triton backend does not know.
    """
    selected = config.selected_rows
    originals = {row.alias_of or row.name for row in selected}
    metrics = tuple(sorted((row for row in config.available_rows if row.name in originals), key=attrgetter("kind")))
    place = {row.name: index for index, row in enumerate(metrics)}
    token, sequence = _token_formulas(config, metrics), _sequence_formulas(config)
    spread: dict[str, Formula] = {}
    for row in metrics:
        spread |= row.spread_formulas
        if row.over != "group":
            sequence |= row.sequence_formulas(per_token_loss=config.per_token_loss)
    check_operations({**token, **sequence, **SCALE_FORMULAS, **GROUP_FORMULAS, **spread})
    given = {*SCALES, *config.adapted_gates}
    of_group = [name for row in metrics if row.over == "group" for name in row.formula.needs]
    of_group = [name for name in needed_names(of_group, GROUP_FORMULAS) if name not in {*given, *GROUP_FORMULAS}]
    of_scale = [name for formula in SCALE_FORMULAS.values() for name in formula.needs] if config.is_scaled else []
    table = MetricTable.of(metrics)
    terms = [row.call_totals[0] for row in metrics[table.of_call]]
    names = [*WATCHED_TOTALS, *of_scale, *of_group, *table.total_shares, *terms]
    totals = _sums_first(map(Total.of, dict.fromkeys(part for name in names for part in Total.of(name).parts)))
    wanted = [*DECISIONS, "measured", *(total.sequence for total in totals)]
    wanted += [f"value_of_{row.name}" for row in metrics if row.over != "group"]
    leaves = [name for name in needed_names(wanted, sequence) if name not in sequence and name not in given]
    columns = _sums_first(Column.of(name, token) for name in leaves)
    return Plan(
        config=config,
        token=token,
        sequence=sequence,
        segments=_segments(config),
        columns=columns,
        num_sum_columns=_num_sums(columns),
        totals=totals,
        num_sum_totals=_num_sums(totals),
        scatters=_scatters(totals),
        metrics=metrics,
        table=table,
        metric_index={PREFIX + row.name: place[row.alias_of or row.name] for row in selected},
        spread=spread,
        needs_group_totals=bool(of_group) or (config.is_scaled and config.scope == "data_parallel"),
        band_scales=tuple(config.adapted_gates),
    )


def _sums_first(reductions: Iterable[_Reduction]) -> tuple[_Reduction, ...]:
    return tuple(sorted(reductions, key=_is_extreme))


def _num_sums(reductions: Iterable[Column] | Iterable[Total]) -> int:
    return sum(not _is_extreme(reduction) for reduction in reductions)


def _scatters(totals: Sequence[Total]) -> tuple[tuple[int, ...], ...]:
    place = {total.name: index for index, total in enumerate(totals)}
    return tuple(tuple(place[part] for part in total.parts) for total in totals if total.operation == "scatter")


def _is_extreme(reduction: Column | Total) -> bool:
    return reduction.operation in ("min", "max")


def _segments(config: CorrectionConfig) -> tuple[Segment, ...]:
    gates = [gate for gate in config.all_gates if gate.is_of_segments]
    found = (Segment(gate.value.needs[0], gate.row.token, gate.reduce == "segment_mean") for gate in gates)
    return tuple(dict.fromkeys(found))


def _token_formulas(config: CorrectionConfig, metrics: Iterable[MetricRow]) -> dict[str, Formula]:
    formulas = dict(TOKEN_FORMULAS)
    if config.weight is not None:
        formulas |= config.weight.token_formulas
    on_tokens = [gate for gate in config.all_gates if gate.is_of_tokens]
    formulas["kept"] = _all_pass("valid", [gate for gate in on_tokens if gate.action == "reject"])
    formulas["weighted"] = _all_pass("valid", [gate for gate in on_tokens if gate.action == "zero"])
    # What trains: in the mask, and with a weight.
    formulas["live"] = _all_pass("kept", [gate for gate in on_tokens if gate.action == "zero"])
    for name, gate in config.labelled_gates.items():
        if gate.is_of_tokens:
            formulas[f"kept_by_{name}"] = _all_pass("valid", [gate])
        elif gate.is_veto:
            formulas[f"vetoes_of_{name}"] = gate.vetoes
    return formulas | {
        row.token_name: row.formula for row in metrics if row.stage == "token" and not row.formula.is_name
    }


def _sequence_formulas(config: CorrectionConfig) -> dict[str, Formula]:
    weight = config.weight
    on_sequences = [gate for gate in config.all_gates if not gate.is_of_tokens]
    is_whole = Formula.of(lambda measured, num_valid, num_response: measured & (num_valid == num_response))
    one = Formula.of(lambda num_valid: num_valid * 0.0 + 1.0)
    formulas = {
        "measured": Formula.of(lambda num_valid: num_valid > 0.0),
        # A statistic of the sequence needs the ratio of every token.
        "usable": is_whole if config.needs_whole_sequences else Formula.named("measured"),
        "keep_sequence": _all_pass("usable", [gate for gate in on_sequences if gate.action == "reject"]),
        "weighted_sequence": _all_pass("usable", [gate for gate in on_sequences if gate.action == "zero"]),
        "live_sequence": _all_pass("keep_sequence", [gate for gate in on_sequences if gate.action == "zero"]),
        "sequence_weight": one,
        # One column less where everything in the mask has a weight.
        "num_kept": Formula.of(lambda keep_sequence, sum_kept: where(keep_sequence, sum_kept, 0.0))
        if any(gate.action == "zero" for gate in config.all_gates)
        else Formula.of(lambda live_sequence, num_live: where(live_sequence, num_live, 0.0)),
        "has_kept": Formula.of(lambda num_kept: where(num_kept > 0.0, 1.0, 0.0)),
        "has_response": Formula.of(lambda num_response: where(num_response > 0.0, 1.0, 0.0)),
        "log_ratio_mean": _finite(reduced("log_ratio", "mean")),
        "proximal_mean": _finite(reduced("proximal", "mean")),
        "behavior_mean": _finite(reduced("behavior", "mean")),
        "sequence_ratio": Formula.of(
            lambda num_valid, sum_log_ratio: where_positive(num_valid, bounded_exp(sum_log_ratio))
        ),
        "squared_sequence_ratio": Formula.of(lambda sequence_ratio: sequence_ratio.square()),
    }
    if weight is not None:
        formulas |= weight.sequence_formulas
    return formulas | term_formulas(weight, over=config.normalize_over, per_token_loss=config.per_token_loss)


def _finite(mean: Formula) -> Formula:
    """A mean whose sum may have been too large for float32."""
    return Formula(lambda *values: mean.function(*values).clamp(-MAX_NATS, MAX_NATS), mean.needs)


def _all_pass(mask: str, gates: Iterable[Gate]) -> Formula:
    """A mask without what a gate rejects."""
    tests = [gate.passes for gate in gates]

    def passes(kept: Tensor, *values: Tensor) -> Tensor:
        rest = iter(values)
        for test in tests:
            kept = kept & test.function(*[next(rest) for _ in test.needs])
        return kept

    return Formula(passes, (mask, *(name for test in tests for name in test.needs)))


def total_values(plan: Plan, totals_A: Tensor) -> dict[str, Tensor]:
    """Totals by name, 0-dim; a maximum was stored as the minimum of negated values."""
    return {
        total.name: -value if total.operation == "max" else value
        for total, value in zip(plan.totals, totals_A.unbind()[:-1], strict=True)
    }


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


def named_band_scales(plan: Plan, band_scales_N: Tensor) -> dict[str, Tensor]:
    """Scales of the bands that have a target, by the names that formulas use."""
    return dict(zip(plan.band_scales, band_scales_N.unbind(), strict=True))


def scale_values(
    plan: Plan,
    *,
    totals: Mapping[str, Tensor],
    over_group: Mapping[str, Tensor],
    rollout_scale: WeightScale | None,
) -> dict[str, Tensor]:
    """What the weights of this call are scaled by, under the names that formulas use; 1 where it is not configured."""
    config = plan.config
    found: Mapping[str, Tensor] | NamedValues
    if config.scope == "rollout" and rollout_scale is not None:
        found = rollout_scale._asdict()
    else:
        found = NamedValues(over_group if config.scope == "data_parallel" else totals, SCALE_FORMULAS)
    factors = dict.fromkeys(WeightScale._fields, torch.ones_like(totals["total_num_response"]))
    factors |= {name: found[name] for name in config.scale_factors}
    return factors | {"scale_factor": factors["denominator_factor"] / factors["mean_weight"]}
