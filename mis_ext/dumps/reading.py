"""Files of samples, of any format, into samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.dumps.json_lines import read_json_lines
from mis_ext.dumps.sample import DumpedSample
from mis_ext.dumps.torch_files import read_torch

_PER_SAMPLE = (
    "log_probs",
    "rollout_log_probs",
    "loss_masks",
    "response_lengths",
    "tokens",
    "rollout_token_ids",
    "weight_versions",
)
_PER_SAMPLE_OR_FILE = "train_weight_version"


def read_dumps(paths: Iterable[str | Path], *, trust_pickle: bool = False) -> list[DumpedSample]:
    """The samples of all files, in their order; of a ``.pt`` file without any known key one that lacks everything.

    Log-probs that are Python floats become float32 if all of their file are float32 numbers, else float64.

    Args:
        paths: ``.pt`` and ``.jsonl`` files, see :mod:`mis_ext.dumps`.
        trust_pickle: Let a ``.pt`` file create any Python object, which can run any code in it.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The content of a file has no known format; the message names the file.
    """
    return [sample for path in paths for sample in _read(Path(path), trust_pickle)]


def _read(path: Path, trust_pickle: bool) -> list[DumpedSample]:
    try:
        if path.suffix == ".pt":
            columns = read_torch(path, trust_pickle=trust_pickle)
        elif path.suffix == ".jsonl":
            columns = read_json_lines(path, keys=(*_PER_SAMPLE, _PER_SAMPLE_OR_FILE))
        else:
            raise ValueError("the name must end in .pt or .jsonl")
        return _to_samples(columns, str(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _to_samples(columns: Mapping[str, Any], path: str) -> list[DumpedSample]:
    per_sample = {key: columns[key] for key in _PER_SAMPLE if columns.get(key) is not None}
    of_file = columns.get(_PER_SAMPLE_OR_FILE)
    if isinstance(of_file, list):
        per_sample[_PER_SAMPLE_OR_FILE], of_file = of_file, None
    lengths = {key: len(column) for key, column in per_sample.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"not the same number of samples for every key: {lengths}")
    dtype = _narrowest_dtype(per_sample)
    samples = []
    for index in range(max(lengths.values(), default=1)):
        row = {key: column[index] for key, column in per_sample.items()}
        length = row.get("response_lengths")
        samples.append(
            DumpedSample(
                proximal_log_probs=_to_tensor(row.get("log_probs"), dtype),
                behavior_log_probs=_to_tensor(row.get("rollout_log_probs"), dtype),
                response_mask=_mask(row),
                response_length=None if length is None else int(length),
                token_ids=row.get("tokens"),
                response_ids=_response_ids(row),
                sampled_ids=row.get("rollout_token_ids"),
                proximal_weight_version=row.get(_PER_SAMPLE_OR_FILE, of_file),
                behavior_weight_versions=_flat_versions(row.get("weight_versions")) or None,
                rollout_id=columns.get("rollout_id"),
                path=path,
                index=index,
            )
        )
    return samples


def _narrowest_dtype(columns: Mapping[str, Iterable[Any]]) -> torch.dtype:
    lists = [
        _to_tensor(values, torch.float64)
        for key in ("log_probs", "rollout_log_probs")
        for values in columns.get(key, ())
        if values is not None and not isinstance(values, Tensor)
    ]
    flat = torch.cat(lists) if lists else torch.empty(0)
    flat = flat[~flat.isnan()]
    return torch.float32 if torch.equal(flat.float().double(), flat.double()) else torch.float64


def _to_tensor(values: Any, dtype: torch.dtype) -> Any:
    # Engines return None where they scored nothing; as NaN it is INVALID unless it is masked.
    if values is None or isinstance(values, Tensor):
        return values
    return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)


def _mask(row: Mapping[str, Any]) -> Any:
    """The mask of the response; where there is none but a length, ones, so that the length is compared too."""
    mask, length = row.get("loss_masks"), row.get("response_lengths")
    if mask is None:
        return None if length is None else torch.ones(int(length))
    if length is not None and len(mask) != int(length):
        raise ValueError(f"{len(mask)} mask values for a response of {int(length)} tokens")
    return mask


def _response_ids(row: Mapping[str, Any]) -> Any:
    tokens, length = row.get("tokens"), row.get("response_lengths")
    if tokens is None:
        return None
    if length is None:
        length = max((len(row[key]) for key in ("loss_masks", "log_probs") if row.get(key) is not None), default=0)
    return tokens[max(0, len(tokens) - int(length)) :]


def _flat_versions(versions: Any) -> list[str]:
    """All versions in what hosts store: a version, a list of them, or nested lists of ``{"version": ...}``."""
    if versions is None:
        return []
    if isinstance(versions, Mapping):
        return _flat_versions(versions.get("version"))
    if isinstance(versions, (list, tuple)):
        return [name for version in versions for name in _flat_versions(version)]
    return [str(versions)]
