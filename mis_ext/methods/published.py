# SPDX-License-Identifier: Apache-2.0
"""A published method: name, formula, source and description."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mis_ext.methods.method import Method
from mis_ext.validation import check_choice, check_instance, check_known, check_number

SYMBOLS = (
    "A: advantage. rho = proximal / behavior, r = current / proximal, w = current / behavior, of a token. "
    "rho_1..T, w_1..T: product over the sequence. mean: over its tokens. p, q: probability under the current and under "
    "the behavior policy. sg: without gradient. 1[...]: 1 where it holds, else 0; it never carries gradient."
)
"""The symbols of the formulas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The legal numbers of a parameter.

    Args:
        low: Smallest number, or the name of an earlier parameter.
        high: Largest number. Infinity is excluded.
        open_low: Whether ``low`` is excluded.
        open_high: Whether ``high`` is excluded.
        is_bound: Whether it is an upper bound. In Python it may then be infinity, which means no bound. A file must
            give a number.
    """

    low: float | str = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    is_bound: bool = False

    def __str__(self) -> str:
        low = self.low if isinstance(self.low, str) else f"{self.low:g}"
        return f"{'(' if self._opens[0] else '['}{low}, {self.high:g}{')' if self._opens[1] else ']'}"

    @property
    def _opens(self) -> tuple[bool, bool]:
        return self.open_low or self.low == -math.inf, self.open_high or self.high == math.inf

    def checked(self, key: str, value: Any, others: Mapping[str, Any]) -> float:
        """``value`` as a float, if it is legal in a file together with the ``others``."""
        low, (open_low, open_high) = self.low, self._opens
        if isinstance(low, str):
            key, low = f"{key} (from {low}: {others[low]!r})", others[low]
        return check_number(key, value, low=low, high=self.high, open_low=open_low, open_high=open_high)


NotNegative = Annotated[float, Range()]
Positive = Annotated[float, Range(open_low=True)]
UpToOne = Annotated[float, Range(high=1.0)]
Bound = Annotated[float, Range(open_low=True, is_bound=True)]
ExcessBound = Annotated[float, Range(is_bound=True)]
FromOne = Annotated[float, Range(low=1.0, is_bound=True)]
AboveOne = Annotated[float, Range(low=1.0, open_low=True, is_bound=True)]


@dataclass(frozen=True, slots=True)
class PublishedMethod:
    """A function of its parameters that returns a :class:`~mis_ext.methods.method.Method`.

    Each parameter's annotation defines its legal values: a :class:`Range`, the words of a ``Literal``, or a ``tuple``
    of ranges, where later ranges refer to the first number as ``first``.

    Attributes:
        name: Its public name.
        family: Its group in lists.
        formula: The objective of a token, in the symbols of :data:`SYMBOLS`.
        paper: Authors and title, and the arXiv id if there is one.
        make: The function; its defaults are those of the paper.
        text: Description, use, claims and limitations.
    """

    name: str
    family: str
    formula: str
    paper: str
    make: Callable[..., Method]
    text: str

    def __call__(self, **parameters: Any) -> Method:
        """Return the method with the given parameters. None means the default, and infinity means no bound.

        Raises:
            ValueError: The method has no such parameter, or a value is not legal.
            TypeError: A value has the wrong type.
        """
        return self.make(**self.checked(self.name, parameters, infinity=True))

    def checked(self, where: str, given: Mapping[str, Any], *, infinity: bool = False) -> dict[str, Any]:
        """Check the ``given`` parameters, and return those that are not None.

        ``where`` is for messages. ``infinity``: whether an upper bound may be infinite.
        """
        check_known(f"parameters of {where}", given, self.defaults)
        values, hints = self.defaults, self.hints
        for name, default in values.items():
            value = default if given.get(name) is None else given[name]
            if value is not None:
                values[name] = _checked(f"{where}: {name}", value, hints[name], values, infinity=infinity)
        for name, high in values.items():
            low = name.replace("high", "low")
            # Bounds of a ratio: if both are 1, only tokens with equal log-probs remain.
            if name != low and hints[name] == FromOne and high == values.get(low):
                raise ValueError(f"{where}: {low} must be below {name}, got {values[low]!r} and {high!r}")
        return {name: values[name] for name, value in given.items() if value is not None}

    @property
    def method(self) -> Method:
        """The method with its default parameters."""
        return self.make()

    @property
    def defaults(self) -> dict[str, Any]:
        """Its parameters by name, with their default values."""
        return {name: parameter.default for name, parameter in inspect.signature(self.make).parameters.items()}

    @property
    def legal(self) -> dict[str, str]:
        """Legal values of each parameter as text: ``(0, 1]``, a list ``[0, inf) x (first, inf)``, or words."""
        return {name: _legal(self.hints[name]) for name in self.defaults}

    @property
    def hints(self) -> dict[str, Any]:
        """Annotations of the parameters by name."""
        return get_type_hints(self.make, include_extras=True)


@dataclass(frozen=True, slots=True)
class ChosenMethod:
    """``name`` of a published method, the given parameters, and the resulting method."""

    name: str
    parameters: tuple[tuple[str, Any], ...]
    method: Method


def words_of(hint: Any) -> tuple[str, ...]:
    """The words of a ``Literal``, also of an optional one."""
    return tuple(chain.from_iterable(get_args(each) for each in (hint, *get_args(hint)) if get_origin(each) is Literal))


def _range(hint: Any) -> Range | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)), None)


def _legal(hint: Any) -> str:
    """Return the legal values as text; empty if the hint has none."""
    if get_origin(hint) is tuple:
        kinds = [*map(_legal, get_args(hint))]
        return " x ".join(kinds) if all(kinds) else ""
    return " | ".join(words_of(hint)) or str(_range(hint) or "")


def _checked(key: str, value: Any, hint: Any, others: Mapping[str, Any], *, infinity: bool = False) -> Any:
    """The value after its check; ``others``: the earlier parameters."""
    if words := words_of(hint):
        return check_choice(key, value, words)
    if get_origin(hint) is tuple:
        kinds, values = get_args(hint), check_instance(key, value, (list, tuple))
        if len(values) != len(kinds):
            raise ValueError(f"{key} must be a list of {len(kinds)} numbers, got {value!r}")
        pairs = enumerate(zip(values, kinds, strict=True))
        return tuple(_checked(f"{key}[{i}]", each, kind, {"first": values[0]}) for i, (each, kind) in pairs)
    legal = _range(hint)
    assert legal is not None
    if infinity and legal.is_bound and isinstance(value, Real) and value == math.inf:
        return math.inf
    number = legal.checked(key, value, others)
    if hint.__origin__ is float:
        return number
    if number != int(number):
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    return int(number)


def published(
    *, formula: str, paper: str, family: str | None = None
) -> Callable[[Callable[..., Method]], PublishedMethod]:
    """Decorate a function that builds a method as a :class:`PublishedMethod`; its docstring becomes the text.

    The ``family`` is by default the name of the module.
    """

    def decorate(make: Callable[..., Method]) -> PublishedMethod:
        text = inspect.getdoc(make)
        assert text is not None
        row = PublishedMethod(make.__name__, family or make.__module__.rpartition(".")[2], formula, paper, make, text)
        for name in row.defaults:
            if not _legal(row.hints.get(name)):
                raise TypeError(f"{row.name}: {name}: annotate it with a Range, or a Literal of its words")
        return row

    return decorate
