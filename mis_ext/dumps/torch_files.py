"""The hosts' ``.pt`` files as columns."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def read_torch(path: Path, *, trust_pickle: bool) -> Mapping[str, Any]:
    """The columns of a file, whatever its format, and its ``rollout_id``.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It cannot be read, or its content is not known.
    """
    content = _load(path, trust_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a dict of lists")
    version = content.get("format_version")
    if version not in (None, 2):
        raise ValueError(f"format_version is {version!r}; known are 2 and files without one")
    columns = _transposed(content.get("samples")) if version == 2 else content.get("rollout_data", content)
    if not isinstance(columns, dict):
        raise ValueError(f"holds a {type(columns).__name__}, not a dict of lists")
    return columns | {"rollout_id": content.get("rollout_id")}


def _transposed(samples: Any) -> dict[str, list[Any]]:
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("its samples are not a list of dicts")
    keys = {key for sample in samples for key in sample}
    return {key: [sample.get(key) for sample in samples] for key in keys}


def _load(path: Path, trust_pickle: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        lines = str(error).splitlines() or ["it ends early"]
        # Of PyTorch's advice only which type it is.
        reason = next((line.strip().partition(". ")[0] for line in lines if "Unsupported" in line), lines[0])
        raise ValueError(
            f"cannot be read: {reason} (if it holds more than tensors and you trust whoever wrote it: --trust-pickle)"
        ) from error


def _harmless() -> list[Any]:
    """What hosts leave among the tensors: a range, and NumPy's numbers and arrays."""
    if find_spec("numpy") is None:
        return [range]
    import numpy

    dtypes = {type(numpy.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")}
    makers: list[Any] = [numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    # NumPy 2 calls the package by another name than NumPy 1, and a file may come from either.
    named = [(maker, f"numpy.{core}.multiarray.{maker.__name__}") for core in ("core", "_core") for maker in makers]
    return [range, numpy.ndarray, numpy.dtype, *dtypes, *named]
