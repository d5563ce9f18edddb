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
from importlib.util import find_spec
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
        _as_one_dtype([sample.train_log_probs for sample in samples]),
        _as_one_dtype([sample.rollout_log_probs for sample in samples]),
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


def _as_one_dtype(log_probs: list[Tensor | None]) -> list[Tensor | None]:
    """Float64 where some are: of two files of Python floats one may hold float32 numbers only."""
    dtypes = {x.dtype for x in log_probs if x is not None}
    return [x if x is None else x.double() for x in log_probs] if torch.float64 in dtypes else log_probs


def read_samples(path: Path, *, trust_pickle: bool = False) -> list[FileSample]:
    """The samples of one file, at least one: a file without log-probs gives a sample that lacks them.

    Args:
        path: A ``.pt`` or ``.jsonl`` file.
        trust_pickle: Let a ``.pt`` file create any Python object, which can run any code in it.

    Raises:
        OSError: The file cannot be opened.
        ValueError: Its content is none of the formats above.
    """
    try:
        if path.suffix == ".pt":
            columns = _read_torch(path, trust_pickle)
        elif path.suffix == ".jsonl":
            columns = _read_json_lines(path)
        else:
            raise ValueError("the name must end in .pt or .jsonl")
        return _to_samples(columns, str(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _to_samples(columns: Mapping[str, Any], name: str) -> list[FileSample]:
    per_sample = {key: columns[key] for key in (*_PER_SAMPLE, "weight_versions") if columns.get(key) is not None}
    train_versions = columns.get("train_weight_version")
    lengths = {key: len(column) for key, column in per_sample.items()}
    if isinstance(train_versions, list):
        lengths["train_weight_version"] = len(train_versions)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"not the same number of samples for every key: {lengths}")
    dtype = _narrowest_dtype(per_sample)
    samples = []
    for index in range(max(lengths.values(), default=1)):
        row = {key: column[index] for key, column in per_sample.items()}
        samples.append(
            FileSample(
                train_log_probs=_to_tensor(row.get("log_probs"), dtype),
                rollout_log_probs=_to_tensor(row.get("rollout_log_probs"), dtype),
                mask=_mask(row),
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
        with torch.serialization.safe_globals(_harmless()):
            content = torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        lines = str(error).splitlines() or ["it ends early"]
        # Of PyTorch's advice only which type it is.
        reason = next((line.strip().partition(". ")[0] for line in lines if "Unsupported" in line), lines[0])
        raise ValueError(
            f"cannot be read: {reason} (if it holds more than tensors and you trust whoever wrote it: --trust-pickle)"
        ) from error
    content = content.get("rollout_data", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a dict of lists")
    return content


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


def _read_json_lines(path: Path) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    # Not splitlines, which also splits at characters that JSON leaves as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: a {type(row).__name__}, not an object")
        rows.append(row)
    if not rows:
        raise ValueError("holds no sample")
    keys = (*_PER_SAMPLE, "weight_versions", "train_weight_version")
    return {key: [row.get(key, row.get(key.removesuffix("s"))) for row in rows] for key in keys}


def _narrowest_dtype(columns: Mapping[str, Iterable[Any]]) -> torch.dtype:
    """Of log-probs that are Python floats: float32 if all of them are float32 numbers, else float64."""
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
    """The last ids of prompt and response; all of them where they are fewer than the response has."""
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
