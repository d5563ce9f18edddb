# SPDX-License-Identifier: Apache-2.0
"""Device functions written from the formulas of a plan, and the kernels that call them, with their constants."""

from __future__ import annotations

import functools
import hashlib
import linecache
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import triton

from mis_ext.correction.formula import Column, Program, Symbol
from mis_ext.correction.metrics import GROUP_FORMULAS
from mis_ext.correction.plan import DECISIONS, SCALES, Plan
from mis_ext.correction.triton import kernels
from mis_ext.correction.triton.launch import BoundKernel, kernel
from mis_ext.correction.weights import SCALE_FORMULAS

_TOKEN_ARGUMENTS = "log_ratio, proximal, behavior, valid, response, given"
_TOKEN_SYMBOLS = {
    "log_ratio": Symbol("log_ratio", "float32"),
    "proximal": Symbol("proximal", "float32"),
    "behavior": Symbol("behavior", "float32"),
    "valid": Symbol("valid", "bool"),
    "response": Symbol("response", "bool"),
}
_ONE = "tl.full([], 1.0, tl.float32)"
_JOINED = 8


def row_names(plan: Plan) -> tuple[str, ...]:
    """What the rows ``[F, S]`` of the decisions kernel are."""
    return (*plan.columns, *DECISIONS)


def generate_namespace(plan: Plan) -> dict[str, Any]:
    """Everything that the kernels of a plan can name: what they always call, and what is generated for the plan."""
    source = generate_source(plan)
    name = f"<mis_ext kernels {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads the source of a function from its file.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = vars(kernels) | {"triton": triton, "__name__": f"{__name__}.{name}"}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def specialised(kernel: Callable[..., None], namespace: dict[str, Any]) -> Callable[..., None]:
    """A kernel whose global names are those of ``namespace``."""
    bound = types.FunctionType(kernel.__code__, namespace, kernel.__name__, kernel.__defaults__)
    bound.__annotations__ = kernel.__annotations__
    bound.__qualname__, bound.__module__ = kernel.__qualname__, kernel.__module__
    return bound


def generate_source(plan: Plan) -> str:
    """The device functions of a plan."""
    return "\n\n".join(
        [
            _store_columns(plan),
            _token_outputs(plan),
            _token_kept(plan),
            _decide(plan),
            _load_scale(plan),
            _store_metrics(plan),
        ]
    )


def _function(name: str, arguments: str, lines: Iterable[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines) or "    pass\n"
    return f"@triton.jit\ndef {name}({arguments}):\n{body}"


def _store_columns(plan: Plan) -> str:
    program = _token_program(plan)
    sums, minima = plan.columns[: plan.num_sum_columns], plan.columns[plan.num_sum_columns :]
    summed = [f"tl.where({_mask(program, column)}, {program[column.token].wide}, 0.0)" for column in sums]
    least = [
        f"tl.where({_mask(program, column)}, {'-' * (column.operation == 'max')}{program[column.token].wide}, INFINITY)"
        for column in minima
    ]
    lines = [*_reduce("tl.sum", summed, "0.0", first=0), *_reduce("tl.min", least, "INFINITY", first=len(sums))]
    return _function("store_columns", f"out, stride, {_TOKEN_ARGUMENTS}", program.lines + lines)


def _mask(program: Program, column: Column) -> str:
    return program[column.over].text


def _reduce(reduction: str, values: Sequence[str], padding: str, *, first: int, stride: str = "stride") -> list[str]:
    """Reduce values over the first axis and store the results, up to eight in one reduction."""
    lines = []
    for begin in range(0, len(values), _JOINED):
        chunk = list(values[begin : begin + _JOINED])
        width = 1 << (len(chunk) - 1).bit_length()
        filling = [f"tl.full(valid.shape, {padding}, tl.float64)"] * (width - len(chunk))
        chunk_text = ", ".join(chunk + filling)
        joined = f"join{width}({chunk_text})" if width > 1 else chunk_text
        lines.append(
            f"store{width}(out + {first + begin} * {stride}, {reduction}({joined}, 0), {stride}, {len(chunk)})"
        )
    return lines


def _token_outputs(plan: Plan) -> str:
    """Where the weight of output_kernel comes from: ``Weight.formula``, which the plan has as ``token_weight``.

    A weight of sequences is 1 here: :func:`_decide` writes it, and the kernel multiplies by it.
    """
    program = _token_program(plan)
    weight = program["token_weight"].wide if "token_weight" in plan.token else "tl.full(valid.shape, 1.0, tl.float64)"
    weighted, kept = program["weighted"].text, program["kept"].text
    return _function("token_outputs", _TOKEN_ARGUMENTS, [*program.lines, f"return {weight}, {weighted}, {kept}"])


def _token_kept(plan: Plan) -> str:
    program = _token_program(plan)
    kept = program["kept"].text
    return _function("token_kept", _TOKEN_ARGUMENTS, [*program.lines, f"return {kept}"])


def _decide(plan: Plan) -> str:
    columns, totals = plan.columns, plan.totals
    lines = [f"rank_stride = {len(columns) + 1} * num_sequences"]
    for index, column in enumerate(columns):
        sign = "-" * (column.operation == "max")
        merge = "merged_sum" if column.operation == "sum" else "merged_minimum"
        lines.append(f"{column} = {sign}{merge}(gathered + {index} * num_sequences, valid, rank_stride, NUM_RANKS)")
    lines.append(f"failed = merged_minimum(gathered + {len(columns)} * num_sequences, valid, rank_stride, NUM_RANKS)")
    given: dict[str, Symbol] = {column: Symbol(column, "float32") for column in columns}
    program = Program(given, plan.sequence)
    stored = [(name, program[name]) for name in row_names(plan)]
    sums = totals[: plan.num_sum_totals]
    # Places behind the last sequence count for nothing.
    summed = [f"tl.where(valid, {program[total.sequence].wide}, 0.0)" for total in sums]
    merging = []
    for place, count, total in plan.scatters:
        merging += [
            f"count_{place}, total_{place} = {summed[count]}, {summed[total]}",
            f"mean_{place} = tl.sum(total_{place}, 0) / tl.maximum(tl.sum(count_{place}, 0), 1.0)",
            f"distance_{place} = total_{place} / tl.maximum(count_{place}, 1.0) - mean_{place}",
        ]
        summed[place] += f" + count_{place} * distance_{place} * distance_{place}"
    least = [
        f"tl.where(valid & {program['measured'].text}, "
        f"{'-' * (total.operation == 'max')}{program[total.sequence].wide}, INFINITY)"
        for total in totals[len(sums) :]
    ] + ["tl.where(valid, failed.to(tl.float64), INFINITY)"]
    lines += program.lines + merging
    lines += [
        f"tl.store(rows + {index} * num_sequences, ({value.text}).to(tl.float32), mask=valid)"
        for index, (_, value) in enumerate(stored)
    ]
    lines.append(f"out = block_totals + block * {len(totals) + 1}")
    lines += _reduce("tl.sum", summed, "0.0", first=0, stride="1")
    lines += _reduce("tl.min", least, "INFINITY", first=len(sums), stride="1")
    arguments = "gathered, rows, block_totals, block, valid, num_sequences, NUM_RANKS: tl.constexpr"
    return _function("decide", arguments, lines)


def _load_scale(plan: Plan) -> str:
    config = plan.config
    totals = "over_group" if config.scope == "data_parallel" else "totals"
    program = Program(_total_symbols(plan, totals), SCALE_FORMULAS)
    results = dict.fromkeys(SCALE_FORMULAS, _ONE)
    for name in config.scale_factors:
        results[name] = f"({program[name].text}).to(tl.float32)"
    return _function("load_scale", "totals, over_group", [*program.lines, f"return {', '.join(results.values())}"])


def _store_metrics(plan: Plan) -> str:
    scales = {name: Symbol(name, "float64" if name == "scale_factor" else "float32") for name in SCALES}
    loads = {
        name: Symbol(f"tl.load(column + {index} * num_sequences)", "float32")
        for index, name in enumerate(row_names(plan))
    }
    masks = {name: Symbol(f"({loads[name].text} != 0)", "bool") for name in ("weighted_sequence", "kept_sequence")}
    of_call = _total_symbols(plan, "totals")
    # Loaded before anything is stored, behind which each would be loaded again.
    totals = {name: Symbol(name, "float32") for row in plan.metrics if row.is_of_call for name in row.call_totals}
    of_sequences = Program(loads | masks | scales | totals, {**plan.sequence, **plan.spread})
    of_group = Program(_total_symbols(plan, "over_group") | scales, GROUP_FORMULAS)
    lines = []
    for index, row in enumerate(plan.metrics):
        value = of_group.compute(row.formula) if row.over == "group" else of_sequences[row.spread_name]
        lines.append(
            f"tl.store(metrics + {index} * num_tokens, "
            f"tl.where(response, ({value.text}).to(tl.float32), 0.0), mask=is_token)"
        )
    arguments = (
        "metrics, num_tokens, is_token, response, column, num_sequences, totals, over_group, "
        "mean_weight, denominator_factor, scale_factor"
    )
    loaded = [f"{name} = {of_call[name].text}" for name in totals]
    return _function("store_metrics", arguments, [*loaded, *of_sequences.lines, *of_group.lines, *lines])


def _token_program(plan: Plan) -> Program:
    names = plan.given_names
    # Of one token side by side, so that its place says where they lie.
    given = {
        name: Symbol(f"tl.load(given + {index}, mask=valid, other=0.0)", "float32") for index, name in enumerate(names)
    }
    return Program(_TOKEN_SYMBOLS | given, plan.token)


def _total_symbols(plan: Plan, pointer: str) -> dict[str, Symbol]:
    return {
        total: Symbol(f"({'-' * (total.operation == 'max')}tl.load({pointer} + {index}))", "float32")
        for index, total in enumerate(plan.totals)
    }


SEQUENCES_PER_BLOCK = 256


class Programs(NamedTuple):
    """What the backend launches, and the sizes of the buffers between.

    ``rows`` are the plan's columns and decisions, one number per sequence each; ``keep_row`` is the place of the
    decision whether it stays in the mask.
    """

    token_statistics: BoundKernel
    sequence_statistics: BoundKernel
    keep_bits: BoundKernel
    decisions: Callable[[int], BoundKernel]
    merge_totals: BoundKernel
    outputs: BoundKernel
    rows: tuple[str, ...]
    keep_row: int


@functools.lru_cache(maxsize=32)
def programs_of(plan: Plan, *, is_whole: bool) -> Programs:
    """The kernels of ``plan``, for whole responses or parts of them."""
    namespace = generate_namespace(plan)
    rows = row_names(plan)

    def bound(function: Callable[..., None], **constants: object) -> BoundKernel:
        return BoundKernel(kernel(specialised(function, namespace)), **constants)

    def decisions(num_ranks: int) -> BoundKernel:
        return bound(kernels.decisions_kernel, NUM_RANKS=num_ranks, BLOCK=SEQUENCES_PER_BLOCK)

    num_columns, num_totals = len(plan.columns), len(plan.totals) + 1
    sizes = {"GIVEN": len(plan.given_names), "TILE": kernels.TILE}
    ((scatter, count, total),) = plan.scatters or ((-1, -1, -1),)
    return Programs(
        token_statistics=bound(kernels.token_statistics_kernel, **sizes),
        sequence_statistics=bound(
            kernels.sequence_statistics_kernel,
            NUM_SUMS=plan.num_sum_columns,
            NUM_COLUMNS=num_columns,
            ROWS=_power_of_two(num_columns + 1),
            BLOCK=64,
        ),
        keep_bits=bound(kernels.keep_bits_kernel, **sizes),
        decisions=functools.cache(decisions),
        merge_totals=bound(
            kernels.merge_totals_kernel,
            NUM_SUMS=plan.num_sum_totals,
            NUM_TOTALS=num_totals,
            SCATTER=scatter,
            COUNT=count,
            TOTAL=total,
            COLUMNS=_power_of_two(num_totals),
            BLOCK=64,
        ),
        outputs=bound(
            kernels.output_kernel,
            WEIGHTED_ROW=rows.index("weighted_sequence"),
            KEEP_ROW=rows.index("kept_sequence"),
            WEIGHT_ROW=rows.index("sequence_weight"),
            IS_CORRECTED=not plan.config.metrics_only,
            IS_WHOLE=is_whole,
            **sizes,
        ),
        rows=rows,
        keep_row=rows.index("kept_sequence"),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
