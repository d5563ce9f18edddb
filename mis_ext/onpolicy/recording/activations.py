"""The activations that a module is given and returns: where they are, and what to call them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter


def positional_parameters(module: Module) -> list[str]:
    """The parameters of the forward that can be passed by position; none where it is not Python."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def tensors_in(value: Any, label: str = "", *, of_dataclasses: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Activations among nested tuples, lists and mappings, with their path; parameters are none."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if not isinstance(value, Parameter):
            yield label, value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif of_dataclasses and dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from tensors_in(item, f"{label}.{key}" if label else str(key), of_dataclasses=of_dataclasses)
