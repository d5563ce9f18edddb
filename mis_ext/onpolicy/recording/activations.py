"""What a module is given and returns: which of it are activations, and what to call them."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
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


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)


def others_in(value: Any, label: str = "") -> Iterator[tuple[str, Any]]:
    """What is no activation among nested tuples, lists and mappings, with its path: parameters, numbers, caches.

    A collection without tensors is one of them; None is none.
    """
    if value is None or (isinstance(value, Tensor) and not isinstance(value, Parameter)):
        return
    if not isinstance(value, (Mapping, tuple, list)) or next(tensors_in(value), None) is None:
        yield label, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from others_in(item, f"{label}.{key}" if label else str(key))


def digest(value: Any) -> str | None:
    """Equal for equal bits: what a plain value is, and a hash of a tensor; None of a parameter or another object."""
    if _is_plain(value):
        return repr(value)
    if type(value) is not Tensor or value.layout is not torch.strided or value.device.type == "meta":
        return None
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
    return f"{plain.dtype} {[*plain.shape]} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _is_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return value is None or (isinstance(value, (*_PLAIN, Mapping, tuple, list)) and all(map(_is_plain, items)))
