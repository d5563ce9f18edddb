"""Samples for the audit from files: what slime and Miles dump, and JSON lines.

``.pt``: as slime's ``--save-debug-train-data`` and Miles' ``--dump-details`` (its folder ``train_data``) write them,
one file per rank and rollout: ``{"rollout_id", "rank", "rollout_data"}`` with lists of one entry per sample. A bare
``rollout_data`` is read too. Only ranks of the last pipeline stage hold ``log_probs``, and only where the host scored
in a pass of its own; tensor-parallel ranks repeat each other's samples; under context parallelism a file holds parts
of responses but whole masks, which is INVALID.

``.jsonl``: one sample a line.

| key (in a line of JSON also without the plural) | |
|---|---|
| ``log_probs``, ``rollout_log_probs`` | nats, one per response token |
| ``loss_masks``, ``response_lengths`` | optional |
| ``tokens`` | optional: ids of prompt and response as the trainer scored them |
| ``rollout_token_ids`` | optional: ids of the response as the engine sampled them |
| ``weight_versions`` | optional: with which the engine sampled, one or several per sample |
| ``train_weight_version`` | optional: with which the trainer scored |
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.audit import Version, audit_logprobs
from mis_ext.onpolicy.audit_report import AuditReport, Provenance

_PER_SAMPLE = ("log_probs", "rollout_log_probs", "loss_masks", "response_lengths", "tokens", "rollout_token_ids")


class FileSample(NamedTuple):
    """One sample of a file; None for what the file does not hold."""

    train_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    mask: Any
    train_token_ids: Any
    rollout_token_ids: Any
    train_weight_version: Version | None
    rollout_weight_versions: list[str] | None
    name: str


def audit_samples(
    samples: Sequence[FileSample],
    *,
    provenance: Provenance = "unknown",
    train_weight_version: Version | None = None,
) -> AuditReport:
    """The audit of samples from files; a version given here stands for samples whose file names none."""
    return audit_logprobs(
        [sample.train_log_probs for sample in samples],
        [sample.rollout_log_probs for sample in samples],
        masks=[sample.mask for sample in samples],
        train_token_ids=[sample.train_token_ids for sample in samples],
        rollout_token_ids=[sample.rollout_token_ids for sample in samples],
        provenance=provenance,
        train_weight_version=[
            train_weight_version if sample.train_weight_version is None else sample.train_weight_version
            for sample in samples
        ],
        rollout_weight_versions=[sample.rollout_weight_versions for sample in samples],
        names=[sample.name for sample in samples],
    )


def read_samples(path: Path, *, trust_pickle: bool = False) -> list[FileSample]:
    """The samples of one file, at least one: a file without log-probs gives a sample that lacks them.

    Args:
        path: A ``.pt`` or ``.jsonl`` file.
        trust_pickle: Let a ``.pt`` file create any Python object, which can run any code in it.

    Raises:
        OSError: The file cannot be opened.
        ValueError: Its content is none of the formats above.
    """
    if path.suffix == ".pt":
        columns = _read_torch(path, trust_pickle)
    elif path.suffix == ".jsonl":
        columns = _read_json_lines(path)
    else:
        raise ValueError(f"{path}: the name must end in .pt or .jsonl")
    try:
        return _to_samples(columns, str(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _to_samples(columns: Mapping[str, Any], name: str) -> list[FileSample]:
    per_sample = {key: columns[key] for key in (*_PER_SAMPLE, "weight_versions") if columns.get(key) is not None}
    lengths = {key: len(column) for key, column in per_sample.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"not the same number of samples for every key: {lengths}")
    dtype = _narrowest_dtype(per_sample)
    train_versions = columns.get("train_weight_version")
    samples = []
    for index in range(max(lengths.values(), default=1)):
        row = {key: column[index] for key, column in per_sample.items()}
        samples.append(
            FileSample(
                train_log_probs=_to_tensor(row.get("log_probs"), dtype),
                rollout_log_probs=_to_tensor(row.get("rollout_log_probs"), dtype),
                mask=row.get("loss_masks"),
                train_token_ids=_response_ids(row),
                rollout_token_ids=row.get("rollout_token_ids"),
                train_weight_version=train_versions[index] if isinstance(train_versions, list) else train_versions,
                rollout_weight_versions=_flat_versions(row.get("weight_versions")) or None,
                name=f"{name}, its sample {index}",
            )
        )
    return samples


def _read_torch(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    try:
        # Some versions of the hosts leave a range among the tensors, which is harmless.
        with torch.serialization.safe_globals([range]):
            content = torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read: {str(error).splitlines()[0]} (if it holds more than tensors and you trust whoever "
            "wrote it: --trust-pickle)"
        ) from error
    content = content.get("rollout_data", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict of lists")
    return content


def _read_json_lines(path: Path) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a {type(row).__name__}, not an object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no sample")
    keys = (*_PER_SAMPLE, "weight_versions", "train_weight_version")
    return {key: [row.get(key, row.get(key.removesuffix("s"))) for row in rows] for key in keys}


def _narrowest_dtype(columns: Mapping[str, Iterable[Any]]) -> torch.dtype:
    """Of log-probs that are Python floats: float32 if all of them are float32 numbers, else float64."""
    lists = [
        _to_tensor(values, torch.float64)
        for key in ("log_probs", "rollout_log_probs")
        for values in columns.get(key, ())
        if isinstance(values, list)
    ]
    flat = torch.cat(lists) if lists else torch.empty(0)
    flat = flat[~flat.isnan()]
    return torch.float32 if torch.equal(flat.float().double(), flat.double()) else torch.float64


def _to_tensor(values: Any, dtype: torch.dtype) -> Any:
    # Engines return None where they scored nothing; as NaN it is INVALID unless it is masked.
    if isinstance(values, list):
        return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)
    return values


def _response_ids(row: Mapping[str, Any]) -> Any:
    """The last ids of prompt and response; None where its length is unknown."""
    tokens, length = row.get("tokens"), row.get("response_lengths")
    if length is None and row.get("loss_masks") is not None:
        length = len(row["loss_masks"])
    if tokens is None or length is None or not 0 < int(length) <= len(tokens):
        return None
    return tokens[-int(length) :]


def _flat_versions(versions: Any) -> list[str]:
    """All versions in what hosts store: a version, a list of them, or nested lists of ``{"version": ...}``."""
    if versions is None:
        return []
    if isinstance(versions, Mapping):
        return _flat_versions(versions.get("version"))
    if isinstance(versions, (list, tuple)):
        return [name for version in versions for name in _flat_versions(version)]
    return [str(versions)]
