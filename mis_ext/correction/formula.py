"""Formulas: functions whose parameters name what they need, written once and computed by both backends.

A formula is ordinary tensor code of few operations: arithmetic, comparisons, ``& | ~``, the methods ``abs``, ``exp``,
``expm1``, ``log``, ``sqrt``, ``square``, ``clamp``, ``minimum`` and ``maximum``, and :func:`where`. The eager backend
calls it with tensors. The Triton backend calls it with :class:`~mis_ext.correction.triton.symbols.Symbol`, which writes
the kernel's source. So whatever a formula says is said once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mis_ext.correction.log_ratio import mask_as_float, zero_outside

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to +-20 before ``exp``: a ratio of 4.9e8 is as extreme as any larger one, and finite."""


MAX_NATS = 1e6
"""Largest difference or mean of log-probs in a metric: so sums over tokens stay finite, whatever an engine returns."""


class Column(str):
    """A reduction over the tokens of each sequence, ``[S]``; as text its name: ``Column("sum", "k3")`` is ``sum_k3``.

    Args:
        operation: Of no token a sum is 0, an extreme infinite.
        token: Name of a token formula.
        over: Name of the mask of the tokens that count. A mask summed over itself is called ``num_<mask>``.
    """

    operation: Literal["sum", "min", "max"]
    token: str
    over: str

    def __new__(cls, operation: Literal["sum", "min", "max"], token: str, over: str = "valid") -> Column:
        """The reduction under its name."""
        suffix = "" if over == "valid" else f"_over_{over}"
        column = super().__new__(cls, f"num_{token}" if token == over else f"{operation}_{token}{suffix}")
        column.operation, column.token, column.over = operation, token, over
        return column

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        """For copies."""
        return self.operation, self.token, self.over


NUM_VALID, NUM_RESPONSE = Column("sum", "valid", "valid"), Column("sum", "response", "response")
"""Formulas of a sequence may name these two as parameters ``num_valid`` and ``num_response``."""


class Total(str):
    """A reduction over all sequences of a call, 0-dim; as text its name: ``Total("max", "x")`` is ``highest_x``.

    Args:
        operation: ``min`` and ``max`` are over sequences with a valid token. ``scatter``: the squared distances of
            ``num_x`` numbers, whose sum is ``x``, from their mean; the formula ``scatter_x`` says it of those within a
            sequence.
        of: Name of a formula of a sequence, or a :class:`Column`.
    """

    operation: Literal["sum", "scatter", "min", "max"]
    sequence: str
    parts: tuple[Total, ...]

    def __new__(cls, operation: Literal["sum", "scatter", "min", "max"], of: str) -> Total:
        """The reduction under its name."""
        prefix = {"sum": "total", "scatter": "scatter", "min": "lowest", "max": "highest"}[operation]
        total = super().__new__(cls, f"{prefix}_{of}")
        total.operation, total.sequence, total.parts = operation, of, (total,)
        if operation == "scatter":
            # Those of others are merged by their counts and sums.
            total.sequence, total.parts = str(total), (total, cls("sum", f"num_{of}"), cls("sum", of))
        return total

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """For copies."""
        return self.operation, self.parts[-1].sequence


@dataclass(frozen=True, slots=True)
class Formula:
    """A function, and the names of its arguments in order.

    Attributes:
        function: Of tensors, or of symbols.
        needs: The names; one that is a :class:`Column` or a :class:`Total` says what has to be reduced for it.
        names: The names as plain strings.
    """

    function: Callable[..., Tensor]
    needs: tuple[str, ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(map(str, self.needs)))

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Formula:
        """The formula that ``function`` is; its parameters are the names."""
        return cls(function, tuple(inspect.signature(function).parameters))

    @classmethod
    def named(cls, name: str) -> Formula:
        """The formula that hands on the value called ``name`` as it is."""
        return cls(_same, (name,))

    @property
    def is_name(self) -> bool:
        """Whether it is another name's value as it is."""
        return self.function is _same

    def then(self, function: Callable[..., Tensor], *before: str) -> Formula:
        """``function`` of the values called ``before``, and of this formula's value last."""
        if self.is_name:
            return Formula(function, (*before, *self.needs))
        inner, split = self.function, len(before)
        return Formula(lambda *values: function(*values[:split], inner(*values[split:])), (*before, *self.needs))


def _same(value: Tensor) -> Tensor:
    return value


class NamedValues:
    """Values by name: given, or computed by a formula when first asked for."""

    def __init__(self, given: Mapping[str, Any], formulas: Mapping[str, Formula]) -> None:
        self._known = dict(given)
        self._formulas = formulas

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            formula = self._formulas.get(name)
            if formula is None:
                raise KeyError(f"nothing is called {name!r}")
            self._known[name] = self.compute(formula)
        return self._known[name]

    def compute(self, formula: Formula) -> Any:
        """The value of a formula, which is not remembered."""
        known = self._known
        for name in formula.names:
            if name not in known:
                known[name] = self[name]
        return formula.function(*map(known.__getitem__, formula.names))


def needed_names(wanted: list[str], formulas: Mapping[str, Formula]) -> list[str]:
    """Every name that ``wanted`` leads to, formulas after what they need; names without a formula are leaves."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in order:
            return
        for other in formulas[name].needs if name in formulas else ():
            visit(other)
        order[name] = None

    for name in wanted:
        visit(name)
    return list(order)


def where(condition: Tensor, value: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """``torch.where``, of symbols too."""
    choose = getattr(condition, "choose", None)
    if choose is None and type(value) is type(otherwise) is float and (value, otherwise) == (1.0, 0.0):
        return mask_as_float(condition)
    chosen: Tensor = torch.where(condition, value, otherwise) if choose is None else choose(value, otherwise)
    return chosen


def where_positive(number: Tensor, value: Tensor) -> Tensor:
    """``value`` where a number is above 0, else 0; of symbols too."""
    return zero_outside(number, value) if isinstance(number, Tensor) else where(number > 0.0, value, 0.0)


def bounded_exp(log_value: Tensor) -> Tensor:
    """``exp(clamp(log_value, -20, 20))``, finite for every input but NaN."""
    return log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_expm1(log_value: Tensor) -> Tensor:
    """``exp(clamp(log_value, -20, 20)) - 1``, exact near 0."""
    return log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()


def inside(value: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Whether the closed interval contains a value."""
    return (value >= low) & (value <= high)
