"""Graphs of ``torch.compile`` that hold for micro-batches of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def graph_of(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, compiled for any sizes of its tensors; uncompiled where torch takes no further graph of it.

    Args:
        function: A Python function, which may be nested: what it closes over is part of its graph.
    """
    # torch counts the graphs of a code object, up to 8, and a nested function has one for all that it closes over.
    nested = cast("FunctionType", function)
    alone = FunctionType(
        nested.__code__.replace(), nested.__globals__, nested.__name__, nested.__defaults__, nested.__closure__
    )
    alone.__kwdefaults__ = nested.__kwdefaults__
    # Without fullgraph: beyond that number a call runs as it is written, where it would raise amid training.
    return cast("Callable[_P, _R]", torch.compile(alone, dynamic=True))
