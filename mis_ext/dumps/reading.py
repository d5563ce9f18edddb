"""A file of samples, of any format, into samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.dumps.json_lines import read_json_lines
from mis_ext.dumps.keys import KEYS, OPTIONAL, VERSION_OF_FILE
from mis_ext.dumps.plain_files import READERS
from mis_ext.dumps.sample import ContextPart, DumpedSample
from mis_ext.dumps.torch_files import TorchFile, read_torch

# What torch, NumPy and Python raise over numbers that are none, or of another shape than a list of them.
_OF_CONTENT = (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError, KeyError)
_NO_TRAINER = (
    "the file is what the host dumped before training: it has no trainer log-probs (the audit takes it as "
    "--engine-records)"
)


def read_file(path: Path, *, trust_pickle: bool) -> list[DumpedSample]:
    """The samples of a file; of a ``.pt`` file without any known key one that lacks everything.

    Raises:
        OSError: The file cannot be opened.
        ValueError: Its content has no known format; the message names it.
    """
    try:
        if path.suffix == ".pt":
            content = read_torch(path, trust_pickle=trust_pickle)
        elif path.suffix == ".jsonl":
            content = read_json_lines(path)
        elif path.suffix in READERS:
            content = READERS[path.suffix](path)
        else:
            raise ValueError(f"the name must end in .pt, .jsonl, {' or '.join(READERS)}")
        return _to_samples(content, str(path))
    except _OF_CONTENT as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
        raise ValueError(f"{path}: {reason}") from error


def _to_samples(content: TorchFile, path: str) -> list[DumpedSample]:
    columns = content.columns
    # What only parts need may be of the whole rollout elsewhere.
    unused = () if content.cp_size > 1 else ("total_lengths", "max_seq_lens")
    per_sample = {key: columns[key] for key in KEYS if key not in unused and columns.get(key) is not None}
    of_file = columns.get(VERSION_OF_FILE)
    if isinstance(of_file, list):
        per_sample[VERSION_OF_FILE], of_file = of_file, None
    lengths = {key: len(column) for key, column in per_sample.items() if key not in OPTIONAL}
    for key in OPTIONAL:
        if key in per_sample and {len(per_sample[key])} != {*lengths.values()}:
            del per_sample[key]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"not the same number of samples for every key: {lengths}")
    for key, column in per_sample.items():
        _check_tensors(key, column)
    dtype = _narrowest_dtype(per_sample)
    samples = []
    for index in range(max(lengths.values(), default=1)):
        row = {key: column[index] for key, column in per_sample.items()}
        samples.append(
            DumpedSample(
                proximal_log_probs=_to_tensor(row.get("log_probs"), dtype),
                behavior_log_probs=_to_tensor(row.get("rollout_log_probs"), dtype),
                response_mask=_mask(row),
                response_length=_integer(row.get("response_lengths")),
                token_ids=row.get("tokens"),
                response_ids=_response_ids(row),
                sampled_ids=row.get("rollout_token_ids"),
                proximal_weight_version=row.get(VERSION_OF_FILE, of_file),
                behavior_weight_versions=_flat_versions(row.get("weight_versions")) or None,
                rollout_id=_rollout(content.rollout_id, index),
                sample_index=_integer(row.get("sample_indices")),
                advantages=_advantages(row.get("advantages")),
                reward=_reward(row.get("rewards")),
                group_index=row.get("group_indices"),
                part=_part(row, content),
                problem=_problem_of_mask(row.get("loss_masks")) if content.has_trainer else _NO_TRAINER,
                path=path,
                index=index,
            )
        )
    return samples


def _check_tensors(key: str, column: Any) -> None:
    """Refuse tensors that are no plain numbers in memory."""
    for values in (column,) if isinstance(column, Tensor) else column:
        if not isinstance(values, Tensor):
            continue
        kinds = {
            "nested": values.is_nested,
            "quantised": values.is_quantized,
            "sparse": values.layout is not torch.strided,
            "complex": values.is_complex(),
            f"on the device {values.device.type}": values.device.type != "cpu",
        }
        if found := [kind for kind, is_such in kinds.items() if is_such]:
            raise ValueError(f"{key}: expected a dense tensor of real numbers on the CPU, got a {found[0]} one")


def _problem_of_mask(mask: Any) -> str | None:
    if mask is None:
        return None
    try:
        values = torch.as_tensor(mask).double()
    except _OF_CONTENT as error:
        return f"loss_mask is not comparable: {error}"
    # NaN is in no range.
    if bool(((values >= 0) & (values <= 1)).all()):
        return None
    return "loss_mask has values that are not in [0, 1]"


def _rollout(of_file: int | Sequence[int | None] | None, index: int) -> int | None:
    return _integer(of_file[index]) if isinstance(of_file, Sequence) else of_file


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _advantages(values: Any) -> Any:
    """One number per token, or one for the sample."""
    return None if values is None else torch.as_tensor(values).float()


def _reward(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0) else None


def _part(row: Mapping[str, Any], content: TorchFile) -> ContextPart | None:
    if content.cp_size == 1:
        return None
    total_length = _integer(row.get("total_lengths"))
    laid_out_length = _integer(row.get("max_seq_lens")) if content.is_padded else total_length
    if total_length is None or laid_out_length is None or row.get("response_lengths") is None:
        needed = f"response_lengths, total_lengths{' and max_seq_lens' if content.is_padded else ''}"
        raise ValueError(f"has parts of responses (cp_size {content.cp_size}) and needs {needed} to join them")
    return ContextPart(content.cp_rank, content.cp_size, total_length, laid_out_length)


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
