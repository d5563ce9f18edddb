"""A published method: its name, with its formula, its source and what is said about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mis_ext.methods.method import Method

SYMBOLS = (
    "A: advantage. rho = proximal / behavior, r = current / proximal, w = current / behavior, of a token. "
    "rho_1..T, w_1..T: product over the sequence. mean: over its tokens. p, q: probability under the current and under "
    "the behavior policy. sg: without gradient. 1[...]: 1 where it holds, else 0; it never carries gradient."
)
"""What the formulas mean."""


@dataclass(frozen=True, slots=True)
class PublishedMethod:
    """Called with its parameters, it gives a :class:`~mis_ext.methods.method.Method`.

    Attributes:
        name: By which it is known.
        family: The module that it stands in.
        formula: The objective of a token, in the symbols of :data:`SYMBOLS`.
        paper: Authors and title, and the arXiv id if there is one.
        make: The function; its defaults are those of the paper.
        text: What it is, when to use it, what is claimed and what speaks against it.
    """

    name: str
    family: str
    formula: str
    paper: str
    make: Callable[..., Method]
    text: str

    def __call__(self, **parameters: Any) -> Method:
        """The method with other parameters than the defaults."""
        return self.make(**parameters)

    @property
    def method(self) -> Method:
        """The method with its default parameters."""
        return self.make()

    @property
    def defaults(self) -> dict[str, Any]:
        """Its parameters by name, with their default values."""
        return {name: parameter.default for name, parameter in inspect.signature(self.make).parameters.items()}


def published(*, formula: str, paper: str) -> Callable[[Callable[..., Method]], PublishedMethod]:
    """Make a :class:`PublishedMethod` of a function that builds a method; its docstring is the method's text."""

    def decorate(make: Callable[..., Method]) -> PublishedMethod:
        text = inspect.getdoc(make)
        assert text is not None
        family = make.__module__.rpartition(".")[2]
        return PublishedMethod(make.__name__, family, formula, paper, make, text)

    return decorate
