"""Parquet, a sample per row, and safetensors, the samples one after the other: as columns."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.dumps.keys import KEYS, ROLLOUT_IDS, VERSION_OF_FILE, rollout_of
from mis_ext.dumps.torch_files import TorchFile

_PER_TOKEN = ("log_probs", "rollout_log_probs", "loss_masks", "tokens", "rollout_token_ids", "advantages")


def read_parquet(path: Path) -> TorchFile:
    """The columns of a Parquet file, by any of their names, and the rollout of each row, if it says one.

    Raises:
        OSError: It cannot be opened, or pyarrow is not installed.
        ValueError: It is no Parquet file.
    """
    parquet: Any = _needed("pyarrow.parquet", "pyarrow")
    names = {name: key for key, others in KEYS.items() for name in (*others, key)} | {VERSION_OF_FILE: VERSION_OF_FILE}
    with path.open("rb") as file:
        found = parquet.ParquetFile(file)
        given = found.schema_arrow.names
        table = found.read(columns=[name for name in given if name in names or name in ROLLOUT_IDS])
    columns = {names[name]: _entries(table[name].combine_chunks()) for name in given if name in names}
    rollouts = table.select([name for name in given if name in ROLLOUT_IDS]).to_pylist()
    return TorchFile(columns, [*map(rollout_of, rollouts)] or None)


def read_safetensors(path: Path) -> TorchFile:
    """The columns of a file with the samples' tokens one after the other, and ``response_lengths`` ``[S]``.

    ``tokens`` are those of the responses. What is known of a sample is ``[S]``; the metadata may have ``rollout_id``.

    Raises:
        OSError: It cannot be opened, or safetensors is not installed.
        ValueError: It is no such file, or the lengths do not fit.
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
    return TorchFile(
        {key: _cut(key, values, lengths) for key, values in tensors.items()},
        None if rollout_id is None else int(rollout_id),
    )


def _entries(column: Any) -> list[Any]:
    if not hasattr(column, "offsets"):
        values: list[Any] = column.to_pylist()
        return values
    numbers = column.flatten().to_numpy(zero_copy_only=False)
    if numbers.dtype == object:
        entries: list[Any] = column.to_pylist()
        return entries
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


READERS: Mapping[str, Any] = {".parquet": read_parquet, ".safetensors": read_safetensors}
"""Functions that read a file into columns, by the ending of its name."""
