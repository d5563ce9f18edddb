"""Probes of one function against one reference: compare bits, and judge what differs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.onpolicy.bits import FLOAT_DTYPES, as_real, same_bits, ulp_distance
from mis_ext.onpolicy.invariance.in_float64 import InFloat64
from mis_ext.onpolicy.invariance.invariance_report import InvarianceReport, Judge, Outcome, Probe

_REPEATS = 3
_EPS_64 = torch.finfo(torch.float64).eps
_T = TypeVar("_T")


class Piece(NamedTuple):
    """Outputs ``[n, ...]`` of one call, and which rows they are of, ``[n]``."""

    row_index: Tensor
    outputs: Tensor


Body = Callable[[Tensor], list[Piece]]
"""One probe: from the rows to the outputs of its calls."""


class Probing:
    """Runs probes over the same rows and collects what they found; a body that raises is a failed probe.

    Args:
        rows: ``[N, ...]``, given to every body; a body copies what it hands to the function.
        references: By name; the first that does not raise is what :meth:`compare` compares with.
    """

    def __init__(self, rows: Tensor, references: Mapping[str, Body]) -> None:
        self._rows = rows.detach()
        self._results: list[Probe] = []
        self._reference: Body | None = None
        self._repeatable = True
        for name, body in references.items():
            outputs = _attempt(partial(self._run, body))
            if not isinstance(outputs, Exception):
                self._reference, self._expected = body, outputs
                break
            self._results.append(_failed(name, outputs))

    @property
    def has_reference(self) -> bool:
        """Whether there is anything to compare with."""
        return self._reference is not None

    def report(self) -> InvarianceReport:
        """The report of all probes so far, those not run included."""
        return InvarianceReport(probes=tuple(self._results))

    def skip(self, name: str, why: str) -> None:
        """List a probe that cannot be run."""
        self._results.append(Probe(name=name, outcome="not run", note=why))

    def repeat(self, name: str, body: Body) -> None:
        """Compare more runs of ``body`` with its first; to be called before :meth:`compare`, which heeds the result."""

        def run_again() -> _Difference:
            expected = self._run(body)
            return _difference([piece for _ in range(_REPEATS) for piece in body(self._rows)], expected)

        found = _attempt(run_again)
        if not isinstance(found, Exception) and found.num_different:
            self._repeatable = False
        self._add(name, found, body)

    def compare(self, name: str, body: Body) -> None:
        """Compare the outputs of ``body`` with the reference."""
        self._add(name, _attempt(lambda: _difference(body(self._rows), self._expected)), body)

    def also(self, name: str, rows: Tensor, reference: Body, body: Body) -> None:
        """Compare the outputs of two bodies for other rows; to be called after :meth:`repeat`."""
        other = Probing(rows, {name: reference})
        other._repeatable = self._repeatable
        if other.has_reference:
            other.compare(name, body)
        self._results += other._results

    def _run(self, body: Body) -> Tensor:
        return _assemble(body(self._rows))

    def _add(self, name: str, found: _Difference | Exception, body: Body) -> None:
        if isinstance(found, Exception):
            self._results.append(_failed(name, found))
            return
        outcome, judged_by = self._judge(found, body)
        counts = {key: value for key, value in found._asdict().items() if key != "scale"}
        self._results.append(Probe(name=name, outcome=outcome, judged_by=judged_by, **counts))

    def _judge(self, found: _Difference, body: Body) -> tuple[Outcome, Judge | None]:
        if not found.num_different:
            return "equal", None
        if not self._repeatable:
            return "not repeatable", None
        if not math.isfinite(found.max_abs_diff):
            return "batch-dependent", "non-finite"
        eps = _coarsest_eps(self._rows.dtype, self._expected.dtype)
        exact = self._difference_in_float64(body, eps)
        if exact is None:
            is_rounding = found.max_abs_diff <= math.sqrt(eps) * found.scale
            return ("rounding" if is_rounding else "batch-dependent"), "magnitude"
        # Signed zeros differ in bits and by 0.
        limit = found.max_abs_diff * math.sqrt(_EPS_64 / eps)
        is_rounding = found.max_abs_diff == 0.0 or exact <= limit
        return ("rounding" if is_rounding else "batch-dependent"), "float64"

    def _difference_in_float64(self, body: Body, eps: float) -> float | None:
        expected = self._expected_64
        if eps <= _EPS_64 or isinstance(expected, Exception):
            return None
        found = _attempt(lambda: _difference(self._in_float64(body), expected))
        return None if isinstance(found, Exception) else found.max_abs_diff

    @cached_property
    def _expected_64(self) -> Tensor | Exception:
        reference = self._reference
        assert reference is not None
        return _attempt(lambda: _assemble(self._in_float64(reference)))

    def _in_float64(self, body: Body) -> list[Piece]:
        rows = self._rows.double() if self._rows.is_floating_point() else self._rows
        with torch.no_grad(), warnings.catch_warnings(), InFloat64():  # type: ignore[no-untyped-call]
            # Of mixed dtypes, for which some operators have no fused kernel.
            warnings.simplefilter("ignore")
            pieces = body(rows)
        outputs = [as_real(piece.outputs) for piece in pieces]
        if any(x.is_floating_point() and x.dtype != torch.float64 for x in outputs):
            raise TypeError("the function does not compute in float64")
        return pieces


def call_rows(fn: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """``[n, ...]``: a copy of the outputs of ``fn`` for the ``n`` rows of ``batch``.

    Raises:
        TypeError: ``fn`` returns no tensor.
        ValueError: ``fn`` does not return one row, with something in it, per row.
    """
    num_rows = len(batch)
    outputs = fn(batch)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the function must return a tensor, got {type(outputs).__name__}")
    if outputs.shape[:1] != (num_rows,) or outputs.numel() == 0:
        raise ValueError(f"the function must return {num_rows} rows for {num_rows} rows, got shape {[*outputs.shape]}")
    # The function may use the same memory again in its next call.
    return outputs.detach().clone()


class _Difference(NamedTuple):
    num_rows: int
    num_different: int
    first_different: int | None
    max_abs_diff: float
    max_ulp: int | None
    scale: float


def _difference(pieces: list[Piece], expected: Tensor) -> _Difference:
    index, outputs = _join(pieces)
    outputs, expected = as_real(outputs), as_real(expected[index])
    differs = ~same_bits(outputs, expected).reshape(len(index), -1).all(1)
    different = torch.unique(index[differs])
    max_ulp = None
    if outputs.dtype in FLOAT_DTYPES:
        comparable = outputs.isfinite() & expected.isfinite()
        max_ulp = int(torch.where(comparable, ulp_distance(outputs, expected), 0).max())
    return _Difference(
        num_rows=len(torch.unique(index)),
        num_different=len(different),
        first_different=int(different[0]) if len(different) else None,
        max_abs_diff=float(_distance(outputs, expected).max()),
        max_ulp=max_ulp,
        scale=max(_largest(outputs), _largest(expected)),
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, float64: 0 between equals and between NaNs, infinite where only one side is finite."""
    a, b = a.double(), b.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(equal, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _largest(x: Tensor) -> float:
    x = x.double()
    return float(torch.where(x.isfinite(), x, 0).abs().max())


def _assemble(pieces: list[Piece]) -> Tensor:
    """``[N, ...]``: the outputs in the order of the rows."""
    index, outputs = _join(pieces)
    return outputs[index.argsort()]


def _join(pieces: list[Piece]) -> Piece:
    dtypes = {piece.outputs.dtype for piece in pieces}
    if len(dtypes) > 1:
        # Concatenated, they would be cast to the widest.
        raise TypeError(f"the function returns {' and '.join(sorted(map(str, dtypes)))}")
    return Piece(torch.cat([piece.row_index for piece in pieces]), torch.cat([piece.outputs for piece in pieces]))


def _coarsest_eps(*dtypes: torch.dtype) -> float:
    """The largest machine epsilon of the floating-point dtypes; float32's where there is none."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((torch.finfo(dtype).eps for dtype in floats), default=2.0**-23)


def _attempt(run: Callable[[], _T]) -> _T | Exception:
    try:
        return run()
    except Exception as error:
        return error


def _failed(name: str, error: Exception) -> Probe:
    return Probe(name=name, outcome="failed", note=f"{type(error).__name__}: {error}".splitlines()[0])
