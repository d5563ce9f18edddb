"""What a formula is called with to write it down as Triton source.

A symbol is an expression and its type. Exponentials, roots, quotients and absolute values are float64 (the absolute
value of a float32 would flush subnormal numbers); all else has the type of its operands.

The eager backend calls a formula with tensors, which have hundreds of operations more. So each formula is called once
with symbols too, also where there is no GPU: :func:`check_operations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from mis_ext.correction.formula import Formula, needed_names

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
    """Refuse formulas that the Triton backend could not write down.

    Args:
        formulas: By the name under which a user knows them.

    Raises:
        ValueError: A formula uses another operation; the message names it, and the operations that there are.
    """
    for name, formula in formulas.items():
        symbols = [Symbol(need, "float32") for need in formula.names]
        try:
            found = formula.function(*cast(list[Tensor], symbols))
            if not isinstance(found, Symbol):
                raise TypeError(f"it gives a {type(found).__name__} whatever its arguments are")
        except Exception as error:
            raise ValueError(
                f"the formula {name}({', '.join(formula.needs)}) cannot be written as a kernel: {error}. It may use "
                f"{OPERATORS}, the methods {', '.join(METHODS)}, and where of mis_ext.correction.formula"
            ) from error
