# SPDX-License-Identifier: Apache-2.0
"""Files of every format as columns: what hosts write with torch, JSON lines, Parquet and safetensors."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEYS = {
    "log_probs": ("log_prob",),
    "rollout_log_probs": ("rollout_log_prob",),
    "loss_masks": ("loss_mask",),
    "response_lengths": ("response_length",),
    "total_lengths": ("total_length",),
    "max_seq_lens": (),
    "tokens": ("token",),
    "rollout_token_ids": ("rollout_token_id",),
    "weight_versions": ("weight_version",),
    "sample_indices": ("sample_index", "index"),
    "advantages": ("advantage",),
    "rewards": ("reward",),
    "group_indices": ("group_index", "group_id"),
    "metadata": (),
}
"""The other names that a key of a column has in a row."""
CANARY = "on_policy_tokens_canary"
"""Under ``metadata``, as :func:`mis_ext.rollout.generate` leaves it there."""
OPTIONAL = ("advantages", "rewards", "group_indices", "metadata")
"""Not what a sample is about: a column of another length, as of a whole rollout in the file of a rank, is left out."""
VERSION_OF_FILE = "train_weight_version"
"""May also be one for the whole file."""
_NAMES: dict[str, tuple[str, ...]] = {**KEYS, VERSION_OF_FILE: ()}

_MAX_LINE = 1 << 28
"""Bytes; no sample has as many."""
_PER_TOKEN = ("log_probs", "rollout_log_probs", "loss_masks", "tokens", "rollout_token_ids", "advantages")

ROLLOUT_IDS = ("rollout_id", "step")
"""Names of the rollout of a row, or of the whole file; the first that is there counts."""


class Columns(NamedTuple):
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


def read_columns(path: Path, *, trust_pickle: bool) -> Columns:
    """The columns of a file, by the ending of its name."""
    if path.suffix == ".pt":
        return read_torch(path, trust_pickle=trust_pickle)
    readers = {".jsonl": read_json_lines, ".parquet": read_parquet, ".safetensors": read_safetensors}
    if path.suffix not in readers:
        raise ValueError("the name must end in .pt, .jsonl, .parquet or .safetensors")
    return readers[path.suffix](path)


def rollout_of(said: Mapping[str, Any]) -> Any:
    """The rollout that a row, or a file, says; None where it says none."""
    return _first(said, ROLLOUT_IDS)


def _first(said: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((said[name] for name in names if said.get(name) is not None), None)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows, a sample each, as columns; None where a row lacks a key."""
    rows = list(rows)
    if not rows:
        raise ValueError("holds no sample")
    return {key: [_first(row, (key, *others)) for row in rows] for key, others in _NAMES.items()}


def read_torch(path: Path, *, trust_pickle: bool) -> Columns:
    """The columns of a host's ``.pt`` file, in the old format or the new one."""
    content = _load(path, trust_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a dict of lists")
    version, rollout_id = content.get("format_version"), rollout_of(content)
    if version not in (None, 2):
        raise ValueError(f"format_version is {version!r}; known are 2 and files without one")
    if version == 2 or ("samples" in content and "rollout_data" not in content):
        samples = content.get("samples")
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise ValueError("its samples are not a list of dicts")
        return Columns(columns_of(samples), rollout_id, has_trainer=version == 2)
    columns = content.get("rollout_data", content)
    if not isinstance(columns, dict):
        raise ValueError(f"holds a {type(columns).__name__}, not a dict of lists")
    return Columns(
        columns,
        rollout_id,
        cp_rank=int(content.get("cp_rank", 0)),
        cp_size=int(content.get("cp_size", 1)),
        is_padded=content.get("qkv_format") == "bshd",
    )


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
    # Whatever it was, torch says it better, and reads more.
    with suppress(Exception):
        return load_plain(path)
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


def read_json_lines(path: Path) -> Columns:
    """The columns of a file of JSON lines, an object each: lists of equal length, by key, and each line's rollout."""
    rows: list[dict[str, Any]] = []
    # As bytes, where only a line feed ends a line: JSON leaves other such characters as they are.
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE + 1), b""), start=1):
            if len(line) > _MAX_LINE:
                raise ValueError(f"line {number}: longer than {_MAX_LINE:,} bytes")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not text.strip():
                continue
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: a {type(row).__name__}, not an object")
            rows.append(row)
    return Columns(columns_of(rows), [rollout_of(row) for row in rows])


def read_parquet(path: Path) -> Columns:
    """The columns of a Parquet file, by any of their names, and the rollout of each row, if it says one."""
    parquet: Any = _needed("pyarrow.parquet", "pyarrow")
    names = {name: key for key, others in _NAMES.items() for name in (*others, key)}
    with path.open("rb") as file:
        found = parquet.ParquetFile(file)
        given = found.schema_arrow.names
        table = found.read(columns=[name for name in given if name in names or name in ROLLOUT_IDS])
    columns = {names[name]: _entries(table[name].combine_chunks()) for name in given if name in names}
    rollouts = table.select([name for name in given if name in ROLLOUT_IDS]).to_pylist()
    return Columns(columns, [*map(rollout_of, rollouts)] or None)


def read_safetensors(path: Path) -> Columns:
    """The columns of a file with the samples' tokens one after the other, and ``response_lengths`` ``[S]``.

    ``tokens`` are those of the responses. What is known of a sample is ``[S]``; the metadata may have ``rollout_id``.
    """
    module: Any = _needed("safetensors", "safetensors")
    path.open("rb").close()
    try:
        with module.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in KEYS}  # noqa: SIM118
            metadata = file.metadata() or {}
    except module.SafetensorError as error:
        raise ValueError(f"cannot be read: {error}") from error
    if "response_lengths" not in tensors:
        raise ValueError("has no response_lengths, by which its tokens are told apart")
    lengths = tensors["response_lengths"].tolist()
    rollout_id = rollout_of(metadata)
    return Columns(
        {key: _cut(key, values, lengths) for key, values in tensors.items()},
        None if rollout_id is None else int(rollout_id),
    )


def _entries(column: Any) -> list[Any]:
    numbers = column.flatten().to_numpy(zero_copy_only=False) if hasattr(column, "offsets") else None
    if numbers is None or numbers.dtype == object:
        values: list[Any] = column.to_pylist()
        return values
    lengths = column.value_lengths().fill_null(0).to_pylist()
    pieces = torch.split(torch.from_numpy(numbers.copy()), lengths)
    return [piece if is_there else None for piece, is_there in zip(pieces, column.is_valid().to_pylist(), strict=True)]


def _cut(key: str, values: Tensor, lengths: list[int]) -> list[Any]:
    if key not in _PER_TOKEN or (key == "advantages" and len(values) == len(lengths) != sum(lengths)):
        numbers: list[Any] = values.tolist()
        return numbers
    if len(values) != sum(lengths):
        raise ValueError(f"{key} has {len(values)} entries, response_lengths add up to {sum(lengths)}")
    # A copy each: samples that share memory look like one stream filled in from the other.
    return [piece.clone() for piece in torch.split(values, lengths)]


def _needed(module: str, requirement: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise OSError(f"reading such a file needs {requirement}: pip install {requirement}") from error
