"""Which operations a formula may use: those that can be written down for a GPU, checked where there is none.

The eager backend calls a formula with tensors, which have hundreds of operations more. So a formula that works on a CPU
is called once with symbols too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from mis_ext.correction.formula import Formula
from mis_ext.correction.triton.symbols import Symbol

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
        symbols = [Symbol(need, "float32") for need in formula.needs]
        try:
            found = formula.function(*cast(list[Tensor], symbols))
            if not isinstance(found, Symbol):
                raise TypeError(f"it gives a {type(found).__name__} whatever its arguments are")
        except Exception as error:
            raise ValueError(
                f"the formula {name}({', '.join(formula.needs)}) cannot be written as a kernel: {error}. It may use "
                f"{OPERATORS}, the methods {', '.join(METHODS)}, and where of mis_ext.correction.formula"
            ) from error
