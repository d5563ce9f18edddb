# SPDX-License-Identifier: Apache-2.0
"""Formulas: functions whose parameters name what they need, written once and computed by both backends.

A formula is ordinary tensor code of few operations: arithmetic, comparisons, ``& | ~``, the methods ``abs``, ``exp``,
``expm1``, ``log``, ``sqrt``, ``square``, ``clamp``, ``minimum`` and ``maximum``, and :func:`where`. The eager backend
calls it with tensors. The Triton backend calls it with :class:`Symbol`, which writes the kernel's source. So whatever a
formula says is said once. Tensors have hundreds of operations more: so each formula is called once with symbols too,
also where there is no GPU (:func:`check_operations`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

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
        if formula.function is _same:
            return known[formula.names[0]]
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


# --- what a formula is called with to write it down as Triton source
#
# A symbol is an expression and its type. Exponentials, roots, quotients and absolute values are float64 (the absolute
# value of a float32 would flush subnormal numbers); all else has the type of its operands.

Type = Literal["bool", "float32", "float64"]


def literal(number: float) -> str:
    """A number as Triton source."""
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    return f"({float(number)!r})"


def _binary(operator: str) -> Callable[[Symbol, Symbol | float], Symbol]:
    def apply(left: Symbol, right: Symbol | float) -> Symbol:
        text, kind = _operand(right, left.type)
        return Symbol(f"({left.text} {operator} {text})", kind)

    return apply


def _reversed(operator: str) -> Callable[[Symbol, float], Symbol]:
    return lambda right, left: Symbol(f"({literal(left)} {operator} {right.text})", right.type)


def _comparison(operator: str) -> Callable[[Symbol, object], Symbol]:
    def apply(left: Symbol, right: object) -> Symbol:
        return Symbol(f"({left.text} {operator} {_operand(cast('Symbol | float', right), left.type)[0]})", "bool")

    return apply


def _logical(operator: str) -> Callable[[Symbol, Symbol], Symbol]:
    return lambda left, right: Symbol(f"({left.text} {operator} {right.text})", "bool")


def _wide(template: str) -> Callable[[Symbol], Symbol]:
    return lambda x: Symbol(template.format(x.wide), "float64")


def _of_two(function: str) -> Callable[[Symbol, Symbol], Symbol]:
    return lambda x, y: Symbol(f"{function}({x.text}, {y.text})", _wider(x.type, y.type))


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """A Triton expression that takes the place of a tensor."""

    text: str
    type: Type

    @property
    def wide(self) -> str:
        """The expression as float64, a mask as 1 and 0."""
        return self.text if self.type == "float64" else f"({self.text}).to(tl.float64)"

    __add__, __sub__, __mul__ = _binary("+"), _binary("-"), _binary("*")
    __radd__, __rsub__, __rmul__ = _reversed("+"), _reversed("-"), _reversed("*")
    __lt__, __le__, __gt__, __ge__ = _comparison("<"), _comparison("<="), _comparison(">"), _comparison(">=")
    __eq__, __ne__ = _comparison("=="), _comparison("!=")  # type: ignore[assignment]
    __and__, __or__ = _logical("&"), _logical("|")
    exp, expm1, log = _wide("tl.exp({})"), _wide("(tl.exp({}) - 1.0)"), _wide("tl.log({})")
    sqrt, abs = _wide("tl.sqrt({})"), _wide("tl.abs({})")

    def __neg__(self) -> Symbol:
        return Symbol(f"(-{self.text})", self.type)

    def __invert__(self) -> Symbol:
        return Symbol(f"(~{self.text})", "bool")

    def __truediv__(self, other: Symbol | float) -> Symbol:
        return Symbol(f"({self.wide} / {other.wide if isinstance(other, Symbol) else literal(other)})", "float64")

    def __rtruediv__(self, other: float) -> Symbol:
        return Symbol(f"({literal(other)} / {self.wide})", "float64")

    def __bool__(self) -> bool:
        raise TypeError("a formula cannot branch on a value: write where(condition, value, otherwise)")

    def square(self) -> Symbol:
        """The square."""
        return self * self

    def clamp(self, low: float, high: float) -> Symbol:
        """The value, limited to ``[low, high]``; ``high`` where the interval is empty, as in torch."""
        text = self.text
        if low > -math.inf:
            text = f"tl.maximum({text}, {literal(low)})"
        # Last, as in torch: where low is above high, the value is high.
        if high < math.inf:
            text = f"tl.minimum({text}, {literal(high)})"
        return Symbol(text, self.type)

    def clamp_min(self, low: float) -> Symbol:
        """The larger of the value and ``low``."""
        return self.clamp(low, math.inf)

    def clamp_max(self, high: float) -> Symbol:
        """The smaller of the value and ``high``."""
        return self.clamp(-math.inf, high)

    minimum, maximum = _of_two("tl.minimum"), _of_two("tl.maximum")

    def choose(self, value: Symbol | float, otherwise: Symbol | float) -> Symbol:
        """``value`` where this boolean symbol is true, else ``otherwise``."""
        kinds: list[Type] = [x.type for x in (value, otherwise) if isinstance(x, Symbol)]
        kind: Type = "float64" if "float64" in kinds else "float32"
        first, second = (x.text if isinstance(x, Symbol) else literal(x) for x in (value, otherwise))
        return Symbol(f"tl.where({self.text}, {first}, {second})", kind)


def _wider(first: Type, second: Type) -> Type:
    return "float64" if "float64" in (first, second) else "float32"


def _operand(other: Symbol | float, kind: Type) -> tuple[str, Type]:
    if isinstance(other, Symbol):
        return other.text, _wider(kind, other.type)
    return literal(other), kind


class Program:
    """Lines of source that compute formulas by name, each once."""

    def __init__(self, given: Mapping[str, Symbol], formulas: Mapping[str, Formula]) -> None:
        self.lines: list[str] = []
        self._known = dict(given)
        self._formulas = {name: formula for name, formula in formulas.items() if name not in given}

    def __getitem__(self, name: str) -> Symbol:
        for needed in needed_names([name], self._formulas):
            if needed not in self._known:
                value = self.compute(self._formulas[needed])
                self.lines.append(f"{needed} = {value.text}")
                self._known[needed] = Symbol(needed, value.type)
        return self._known[name]

    def compute(self, formula: Formula) -> Symbol:
        """The expression of a formula; lines for what it needs."""
        symbols = cast(list[Tensor], [self[name] for name in formula.names])
        return cast(Symbol, formula.function(*symbols))


OPERATORS = "+ - * / < <= > >= == != & | ~"
METHODS = tuple(name for name, found in vars(Symbol).items() if callable(found) and name[0] != "_" and name != "choose")


def check_operations(formulas: Mapping[str, Formula]) -> None:
    """Refuse formulas that the Triton backend could not write down."""
    for name, formula in formulas.items():
        obstacle = _operation_obstacle(formula)
        if obstacle is not None:
            raise ValueError(
                f"the formula {name}({', '.join(formula.needs)}) cannot be written as a kernel: {obstacle}. It may use "
                f"{OPERATORS}, the methods {', '.join(METHODS)}, and where of mis_ext.correction.formula"
            ) from obstacle


@functools.lru_cache(maxsize=1024)
def _operation_obstacle(formula: Formula) -> Exception | None:
    """What a formula raises when it is called with symbols. Most formulas belong to no configuration: asked once."""
    try:
        found = formula.function(*cast(list[Tensor], [Symbol(need, "float32") for need in formula.names]))
        if not isinstance(found, Symbol):
            raise TypeError(f"it gives a {type(found).__name__} whatever its arguments are")
    except Exception as error:
        return error
    return None
