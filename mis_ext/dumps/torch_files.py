"""The hosts' ``.pt`` files as columns."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mis_ext.dumps.keys import columns_of, rollout_of


class TorchFile(NamedTuple):
    """The columns of a file, and what it says of all its samples.

    ``rollout_id`` is of the file, or one of each sample. ``has_trainer`` is false for what a host dumps before the
    trainer gets it. ``cp_rank`` holds parts of responses if ``cp_size`` is above 1.
    """

    columns: Mapping[str, Any]
    rollout_id: int | Sequence[int | None] | None = None
    has_trainer: bool = True
    cp_rank: int = 0
    cp_size: int = 1
    is_padded: bool = False


def read_torch(path: Path, *, trust_pickle: bool) -> TorchFile:
    """The columns of a host's ``.pt`` file, in the old format or the new one.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It cannot be read, or its content is not known.
    """
    content = _load(path, trust_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a dict of lists")
    version, rollout_id = content.get("format_version"), rollout_of(content)
    if version not in (None, 2):
        raise ValueError(f"format_version is {version!r}; known are 2 and files without one")
    if version == 2 or ("samples" in content and "rollout_data" not in content):
        return TorchFile(columns_of(_rows(content.get("samples"))), rollout_id, has_trainer=version == 2)
    columns = content.get("rollout_data", content)
    if not isinstance(columns, dict):
        raise ValueError(f"holds a {type(columns).__name__}, not a dict of lists")
    return TorchFile(
        columns,
        rollout_id,
        cp_rank=int(content.get("cp_rank", 0)),
        cp_size=int(content.get("cp_size", 1)),
        is_padded=content.get("qkv_format") == "bshd",
    )


def _rows(samples: Any) -> list[dict[str, Any]]:
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("its samples are not a list of dicts")
    return samples


class _PlainUnpickler(pickle.Unpickler):
    """Python's, in C. Names are looked up in a fixed table: nothing in a file can run."""

    def find_class(self, module: str, name: str) -> Any:
        return _PLAIN[f"{module}.{name}"]


class _Plain:
    """What :func:`torch.load` wants of a module."""

    Unpickler = _PlainUnpickler


_PLAIN = {
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "collections.OrderedDict": OrderedDict,
    "__builtin__.xrange": range,
}


def load_plain(path: Path) -> Any:
    """What a file of ``torch.save`` holds, if that is plain data and tensors.

    With ``weights_only`` torch unpickles in Python, which takes twice the time of all this for responses of 1,000
    tokens. The tensors are copies: a file that was mapped, and is cut short meanwhile, would end the process.

    Raises:
        Exception: Of any kind: the file is none, is not whole, or holds something else. ``torch.load`` may read it.
    """
    # torch.load would hand such a file to TorchScript, which runs what it holds.
    if "constants.pkl" in torch._C.PyTorchFileReader(os.fspath(path)).get_all_records():
        raise pickle.UnpicklingError("a program of TorchScript")
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Plain)


def _load(path: Path, trust_pickle: bool) -> Any:
    try:
        return load_plain(path)
    # Whatever it was, torch says it better, and reads more.
    except Exception:
        return _load_copied(path, trust_pickle)


def _load_copied(path: Path, trust_pickle: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:
        # A file that ends early can fail anywhere; only of one that cannot be opened the error has the name.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        lines = str(error).splitlines() or ["it ends early"]
        # Of PyTorch's advice only which type it is.
        reason = next((line for line in lines if "Unsupported" in line), lines[0]).strip().partition(". ")[0]
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
