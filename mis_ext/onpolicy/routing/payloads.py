"""The experts in the responses of SGLang and vLLM, decoded."""

from __future__ import annotations

import ast
import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mis_ext.checks import check_choice, check_integer, check_list, check_mapping

OTHER_ROWS = "RoutedExperts.from_rows(torch.tensor(rows), ...) takes lists"
_SGLANG_DTYPES = {"int32": torch.int32, "uint16": torch.uint16, "uint8": torch.uint8}
_NUMPY_DTYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i4": torch.int32}
# NumPy's file format, version 1: magic and version, two bytes with the header's length, the header, the values.
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = len(_MAGIC) + 2


def sglang_values(meta_info: Mapping[str, Any] | str) -> tuple[Tensor, int]:
    """All values in the order of rows, layers and choices, int32, and the position of the first row.

    Raises:
        TypeError: ``meta_info`` is no mapping, its ``routed_experts`` no string, or a count in it no integer.
        ValueError: Nothing was returned, it is no base64, a count is negative, or the request was retracted.
    """
    fields = {"routed_experts": meta_info} if isinstance(meta_info, str) else meta_info
    if not isinstance(fields, Mapping):
        raise TypeError(f"meta_info must be a mapping or its base64, got {type(fields).__name__}: {OTHER_ROWS}")
    encoded = fields.get("routed_experts")
    if not encoded:
        raise ValueError(
            "meta_info has no routed_experts: start SGLang with --enable-return-routed-experts and send "
            "return_routed_experts: true"
        )
    _check_not_retracted(fields)
    name = check_choice("routed_experts_dtype", _or(fields.get("routed_experts_dtype"), "int32"), _SGLANG_DTYPES)
    data, dtype = _bytes(encoded), _SGLANG_DTYPES[name]
    if not data or len(data) % dtype.itemsize:
        raise ValueError(f"routed_experts has {len(data)} bytes, which is no positive multiple of {dtype.itemsize}")
    values = torch.frombuffer(bytearray(data), dtype=dtype).to(torch.int32)
    return values, check_integer("routed_experts_start_len", _or(fields.get("routed_experts_start_len"), 0), low=0)


def vllm_rows(choice: Mapping[str, Any] | str) -> Tensor:
    """``[rows, layers, topk]``, int32, from base64 of a NumPy file.

    Raises:
        TypeError: ``choice`` is no mapping, or its ``routed_experts`` no string.
        ValueError: Nothing was returned, or it is no base64 of a NumPy file of experts.
    """
    fields = {"routed_experts": choice} if isinstance(choice, str) else choice
    if not isinstance(fields, Mapping):
        raise TypeError(f"choice must be a mapping or its base64, got {type(fields).__name__}: {OTHER_ROWS}")
    encoded = fields.get("routed_experts")
    if not encoded:
        raise ValueError("choice has no routed_experts: start vLLM with --enable-return-routed-experts")
    data = _bytes(encoded)
    end = _HEADER + int.from_bytes(data[len(_MAGIC) : _HEADER], "little")
    if not data.startswith(_MAGIC) or len(data) < end:
        raise ValueError("routed_experts is no NumPy file of version 1")
    try:
        header = ast.literal_eval(data[_HEADER:end].decode("latin-1").strip())
        name, is_fortran, shape = (header[key] for key in ("descr", "fortran_order", "shape"))
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise ValueError(f"routed_experts has a broken NumPy header: {data[_HEADER:end]!r}") from error
    dtype = _NUMPY_DTYPES[check_choice("dtype of routed_experts", name, _NUMPY_DTYPES)]
    shape = [check_integer("a size in the shape of routed_experts", size, low=0) for size in check_list("shape", shape)]
    if len(shape) != 3 or is_fortran or len(data) - end != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"routed_experts must be [rows, layers, topk] in C order, got {len(data) - end} bytes with {header}"
        )
    if 0 in shape:
        return torch.empty(shape, dtype=torch.int32)
    return torch.frombuffer(bytearray(data[end:]), dtype=dtype).to(torch.int32).view(shape)


def _check_not_retracted(fields: Mapping[str, Any]) -> None:
    """SGLang computes the prefix of a retracted request again, and with it the experts, not the log-probs.

    Miles issue 3277. SGLang before 0.5.23 does not count retractions: there several versions of the weights tell one.
    """
    spans = check_list("weight_versions", _or(fields.get("weight_versions"), []))
    versions = [*dict.fromkeys(str(check_mapping("weight_versions", span).get("version")) for span in spans)]
    count = _or(fields.get("num_retractions"), max(len(versions) - 1, 0))
    if check_integer("num_retractions", count, low=0) > 0:
        by = f" (weight versions {', '.join(versions)})" if len(versions) > 1 else ""
        raise ValueError(
            f"the request was retracted{by}: SGLang computed its experts again, and its log-probs are of the experts "
            "before; leave it out of the replay, or update weights with pause_generation in mode in_place or abort"
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _bytes(encoded: object) -> bytes:
    if not isinstance(encoded, str):
        raise TypeError(f"routed_experts must be base64, got {type(encoded).__name__}: {OTHER_ROWS}")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(f"routed_experts is no base64: {error}") from error
