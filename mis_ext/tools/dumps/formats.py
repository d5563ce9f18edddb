# SPDX-License-Identifier: Apache-2.0
"""Read files of every format as rows, then as samples: torch files of frameworks, and JSON lines."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.validation import did_you_mean

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
    "rollout_id": ("step",),
    "train_weight_version": (),
}
"""The keys of a row with their alternative names; the first name that exists is used."""
CANARY = "on_policy_tokens_canary"
"""A key of ``metadata``, written by :func:`mis_ext.rollout.generate`."""
OPTIONAL = ("advantages", "rewards", "group_indices", "metadata")
"""Optional columns: one of another length, such as that of a whole rollout in the file of one rank, is ignored."""
OF_FILE = ("rollout_id", "train_weight_version")
"""May also be one value for the whole file instead of a list."""


class Content(NamedTuple):
    """The samples of a file, one row each with the names of :data:`KEYS`, and properties of the file.

    ``keys`` are those of the file. ``has_trainer`` is false for data that a framework dumps before training. If
    ``cp_size`` is above 1, the file has the parts of responses of ``cp_rank``.
    """

    rows: Sequence[Mapping[str, Any]]
    keys: Sequence[str]
    has_trainer: bool = True
    cp_rank: int = 0
    cp_size: int = 1
    is_padded: bool = False


def _first(said: Mapping[str, Any], key: str) -> Any:
    return next((said[name] for name in (key, *KEYS[key]) if said.get(name) is not None), None)


def _content_of(samples: Sequence[Mapping[str, Any]], **of_all: Any) -> Content:
    """Content of samples which each have their own keys; ``of_all`` applies to all."""
    if not samples:
        raise ValueError("contains no sample")
    rows = [{key: _first(sample, key) for key in KEYS} | of_all for sample in samples]
    return Content(rows, [*dict.fromkeys(str(key) for sample in samples for key in sample)])


def read_torch(path: Path, *, trust_pickle: bool) -> Content:
    """Read a ``.pt`` file of a framework, in the old or new format."""
    content = _load(path, trust_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"contains a {type(content).__name__}, not a dict of lists")
    version, rollout_id = content.get("format_version"), _first(content, "rollout_id")
    if version not in (None, 2):
        raise ValueError(f"format_version must be 2 or absent, got {version!r}")
    if version == 2 or ("samples" in content and "rollout_data" not in content):
        samples = content.get("samples")
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise ValueError("its samples are not a list of dicts")
        return _content_of(samples, rollout_id=rollout_id)._replace(has_trainer=version == 2)
    columns = content.get("rollout_data", content)
    if not isinstance(columns, dict):
        raise ValueError(f"contains a {type(columns).__name__}, not a dict of lists")
    cp_size = _integer(content, "cp_size", low=1) or 1
    return Content(
        _rows_of({**columns, "rollout_id": rollout_id}, has_parts=cp_size > 1),
        [*map(str, columns)],
        cp_rank=_integer(content, "cp_rank", low=0) or 0,
        cp_size=cp_size,
        is_padded=content.get("qkv_format") == "bshd",
    )


def _rows_of(columns: Mapping[str, Any], *, has_parts: bool) -> list[dict[str, Any]]:
    """Convert lists with one value per sample to rows; without any known key, one empty row."""
    # Without parts, these keys may be for the whole rollout.
    unused = () if has_parts else ("total_lengths", "max_seq_lens")
    lists = {key: columns[key] for key in KEYS if key not in unused and columns.get(key) is not None}
    of_file = {key: lists.pop(key) for key in OF_FILE if not isinstance(lists.get(key, []), list)}
    for key, column in lists.items():
        if not _is_list(column):
            raise ValueError(f"{key} must be a list with a value per sample, got {reprlib.repr(column)}")
    lengths = {key: len(column) for key, column in lists.items() if key not in OPTIONAL}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"keys have different numbers of samples: {lengths}")
    num_samples = max(lengths.values(), default=1)
    lists = {key: column for key, column in lists.items() if len(column) == num_samples}
    return [of_file | {key: column[index] for key, column in lists.items()} for index in range(num_samples)]


def _is_list(value: Any) -> bool:
    """True for a list, array, or tensor with a length. Zero-dimensional ones have ``__len__`` but no length."""
    return hasattr(value, "__len__") and not isinstance(value, Mapping) and getattr(value, "ndim", 1) > 0


def _load(path: Path, trust_pickle: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:
        # A truncated file can raise any error. Only the error for a file that cannot be opened has the file name.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        lines = str(error).splitlines() or ["it ends early"]
        # From PyTorch's advice keep only the type.
        reason = next((line for line in lines if "Unsupported" in line), lines[0]).strip().partition(". ")[0]
        raise ValueError(
            f"cannot be read: {reason} (if it contains more than tensors and you trust its author, use --trust-pickle)"
        ) from error


def _harmless() -> list[Any]:
    """Harmless types in dumps of frameworks: a range, and NumPy's numbers and arrays."""
    if find_spec("numpy") is None:
        return [range]
    import numpy

    dtypes = {type(numpy.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")}
    makers: list[Any] = [numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    # NumPy 1 and NumPy 2 name the package differently, and a file may come from either.
    named = [(maker, f"numpy.{core}.multiarray.{maker.__name__}") for core in ("core", "_core") for maker in makers]
    return [range, numpy.ndarray, numpy.dtype, *dtypes, *named]


def read_json_lines(path: Path) -> Content:
    """Read a file of JSON lines with one object each."""
    rows: list[dict[str, Any]] = []
    # Read bytes, so that only a line feed ends a line: JSON strings may contain other line separators.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
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
    return _content_of(rows)


class ContextPart(NamedTuple):
    """Part of a response's log-probs on a context-parallel rank with the zigzag layout.

    ``laid_out_length`` is the length of the whole sequence, including padding.
    """

    rank: int
    size: int
    total_length: int
    laid_out_length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpedSample:
    """One sample; None for data that the file lacks. ``T`` is the number of response tokens.

    Lists of numbers may be tensors, NumPy arrays or lists, as in the file.

    Attributes:
        proximal_log_probs: Log-probs of the trainer, ``[T]``, in nats.
        behavior_log_probs: Log-probs of the inference engine, ``[T]``, in nats.
        response_mask: ``[T]``, nonzero for trained tokens. Ones if the file has only a length.
        response_length: ``T``, if the file has it.
        token_ids: Ids of prompt and response, as scored by the trainer.
        response_ids: The last ``T`` of them; all if there are fewer.
        sampled_ids: Ids of the response as sampled by the engine, ``[T]``.
        proximal_weight_version: Weight version of the trainer's scoring.
        behavior_weight_versions: All weight versions with which the engine sampled.
        rollout_id: The framework's number of the rollout.
        sample_index: The framework's number of the sample.
        part: Set if the log-probs are only a part of the response, because the other parts were not found.
        problem: Why the sample cannot be used, if its file shows it.
        path: The file, or the first of several joined files. Empty if not from a file.
        index: Index of the sample in the file.
        advantages: One per token, ``[T]``, or a 0-dim tensor for all tokens.
        reward: As dumped by the framework.
        group_index: Shared by the samples of one prompt, as dumped by the framework.
        canary: Result of the canary of :func:`mis_ext.rollout.generate` for the engine's weights.
        keys: All keys of the file.
    """

    proximal_log_probs: Tensor | None
    behavior_log_probs: Tensor | None
    response_mask: Any = None
    response_length: int | None = None
    token_ids: Any = None
    response_ids: Any = None
    sampled_ids: Any = None
    proximal_weight_version: str | int | None = None
    behavior_weight_versions: list[str] | None = None
    rollout_id: int | None = None
    sample_index: int | None = None
    part: ContextPart | None = None
    problem: str | None = None
    path: str = ""
    index: int = 0
    advantages: Tensor | None = None
    reward: float | None = None
    group_index: Any = None
    canary: str | None = None
    keys: Sequence[str] = ()

    @property
    def name(self) -> str:
        """File and index of the sample, for messages."""
        return f"{self.path}, its sample {self.index}"

    @property
    def step(self) -> str:
        """Name of its rollout; ``0`` if the file has none."""
        return "0" if self.rollout_id is None else str(self.rollout_id)

    @property
    def obstacle(self) -> str | None:
        """Why its two lists of log-probs cannot be compared; None if they can."""
        if self.problem is not None:
            return self.problem
        lists = {
            "log_probs": self.proximal_log_probs,
            "rollout_log_probs": self.behavior_log_probs,
            "loss_masks": self.response_mask,
        }
        for key, side in (("log_probs", "trainer"), ("rollout_log_probs", "engine")):
            if lists[key] is None:
                known = {*KEYS, *(name for names in KEYS.values() for name in names)}
                meant = did_you_mean(key, [each for each in self.keys if each not in known])
                found = ", ".join(map(repr, self.keys)) or "none"
                return f"no log-probs of the {side}: {key!r} is missing, the keys found are {found}{meant}"
        shapes = {key: torch.as_tensor(values).shape for key, values in lists.items() if values is not None}
        if len({*shapes.values()}) > 1 or any(len(shape) != 1 for shape in shapes.values()):
            lengths = (f"{key} {' x '.join(map(str, shape)) or 'a number'}" for key, shape in shapes.items())
            return f"lists of different lengths: {', '.join(lengths)}"
        return None

    @property
    def is_one_memory(self) -> bool:
        """True if the log-probs of both sides share memory in the file: one was copied from the other."""
        proximal, behavior = self.proximal_log_probs, self.behavior_log_probs
        if proximal is None or behavior is None or not proximal.numel():
            return False
        return proximal.data_ptr() == behavior.data_ptr()


class Skipped(NamedTuple):
    """Skipped data and the reason; ``num_samples`` is None for a whole file."""

    path: str
    num_samples: int | None
    reason: str

    def __str__(self) -> str:
        plural = "" if self.num_samples == 1 else "s"
        what = "the file" if self.num_samples is None else f"{self.num_samples} sample{plural}"
        return f"{self.path}: {what}: {self.reason}"


# Errors that torch, NumPy and Python raise for invalid numbers, or for a shape that is not a list.
_OF_CONTENT = (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError, KeyError)
_NO_TRAINER = (
    "the file was written before training: it has no trainer log-probs (the audit reads it with --engine-records)"
)


def read_file(path: Path, *, trust_pickle: bool) -> list[DumpedSample]:
    """Read the samples of a file. A ``.pt`` file without any known key gives one empty sample."""
    try:
        if path.suffix == ".pt":
            return _to_samples(read_torch(path, trust_pickle=trust_pickle), str(path))
        if path.suffix == ".jsonl":
            return _to_samples(read_json_lines(path), str(path))
        raise ValueError("the name must end in .pt or .jsonl")
    except _OF_CONTENT as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
        raise ValueError(f"{path}: {reason}") from error


def _to_samples(content: Content, path: str) -> list[DumpedSample]:
    dtype = _narrowest_dtype(content.rows)
    samples = []
    for index, row in enumerate(content.rows):
        for key in ("loss_masks", "tokens"):
            if row.get(key) is not None and not _is_list(row[key]):
                raise ValueError(f"{key} must be a list, got {reprlib.repr(row[key])}")
        length = _integer(row, "response_lengths", low=0)
        advantages = _numbers(row, "advantages", torch.float32, may_be_one=True)
        samples.append(
            DumpedSample(
                proximal_log_probs=_numbers(row, "log_probs", dtype),
                behavior_log_probs=_numbers(row, "rollout_log_probs", dtype),
                response_mask=_mask(row, length, index),
                response_length=length,
                token_ids=row.get("tokens"),
                response_ids=_response_ids(row, length),
                sampled_ids=row.get("rollout_token_ids"),
                proximal_weight_version=_version(row, "train_weight_version"),
                behavior_weight_versions=_flat_versions(row.get("weight_versions")) or None,
                rollout_id=_integer(row, "rollout_id"),
                sample_index=_integer(row, "sample_indices"),
                # One number per token, or one for the sample.
                advantages=None if advantages is None else advantages.float(),
                reward=_reward(row.get("rewards")),
                group_index=row.get("group_indices"),
                canary=metadata.get(CANARY) if isinstance(metadata := row.get("metadata"), Mapping) else None,
                part=_part(row, content),
                problem=_problem_of(row) if content.has_trainer else _NO_TRAINER,
                path=path,
                index=index,
                keys=content.keys,
            )
        )
    return samples


def _problem_of(row: Mapping[str, Any]) -> str | None:
    """Why the mask or the ids of a sample cannot be compared; None if they can."""
    numbers = {"loss_mask": row.get("loss_masks"), **{key: row.get(key) for key in ("tokens", "rollout_token_ids")}}
    for key, values in numbers.items():
        try:
            found = torch.ones(()) if values is None else torch.as_tensor(values).double()
        except _OF_CONTENT as error:
            return f"{key} is not comparable: {error}"
        # NaN is neither in a range nor an integer.
        if key == "loss_mask" and not bool(((found >= 0) & (found <= 1)).all()):
            return "loss_mask has values that are not in [0, 1]"
        if key != "loss_mask" and not torch.equal(found.long().double(), found):
            return f"{key} is not comparable: it has values that are not integers"
    return None


def _version(row: Mapping[str, Any], key: str) -> Any:
    version = row.get(key)
    try:
        if version is not None and not isinstance(version, str):
            float(version)
    except _OF_CONTENT as error:
        raise ValueError(f"{key} must be a number or a name, got {reprlib.repr(version)}") from error
    return version


def _integer(row: Mapping[str, Any], key: str, *, low: float = -math.inf) -> int | None:
    value = row.get(key)
    try:
        number = None if value is None else int(value)
    except _OF_CONTENT:
        number = None
    # A fraction is an error, also in torch or NumPy. Strings are excluded because they never equal their number.
    is_fraction = number is not None and not isinstance(value, str) and bool(value != number)
    if value is not None and (number is None or number < low or is_fraction):
        least = f" of at least {low:g}" if math.isfinite(low) else ""
        raise ValueError(f"{key} must be an integer{least}, got {reprlib.repr(value)}")
    return number


def _reward(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0) else None


def _part(row: Mapping[str, Any], content: Content) -> ContextPart | None:
    if content.cp_size == 1:
        return None
    total_length = _integer(row, "total_lengths")
    laid_out_length = _integer(row, "max_seq_lens") if content.is_padded else total_length
    if total_length is None or laid_out_length is None or row.get("response_lengths") is None:
        needed = f"response_lengths, total_lengths{' and max_seq_lens' if content.is_padded else ''}"
        raise ValueError(f"has parts of responses (cp_size {content.cp_size}) and needs {needed} to join them")
    return ContextPart(content.cp_rank, content.cp_size, total_length, laid_out_length)


def _narrowest_dtype(rows: Iterable[Mapping[str, Any]]) -> torch.dtype:
    """Return float32 if it represents all log-probs of lists exactly, else float64."""
    lists = [
        found
        for row in rows
        for key in ("log_probs", "rollout_log_probs")
        if not isinstance(row.get(key), Tensor) and (found := _numbers(row, key, torch.float64)) is not None
    ]
    flat = torch.cat(lists) if lists else torch.empty(0)
    flat = flat[~flat.isnan()]
    return torch.float32 if torch.equal(flat.float().double(), flat.double()) else torch.float64


def _numbers(row: Mapping[str, Any], key: str, dtype: torch.dtype, *, may_be_one: bool = False) -> Tensor | None:
    """Return a tensor unchanged; convert a list or a number to ``dtype``."""
    values = row.get(key)
    if values is None:
        return None
    if isinstance(values, Tensor):
        is_legal, found = not values.is_complex() and values.layout is torch.strided, values
    else:
        try:
            # Engines return None for tokens without a score. It becomes NaN, which is INVALID unless it is masked.
            many = isinstance(values, Iterable)
            found = torch.tensor(
                [math.nan if each is None else each for each in values] if many else values, dtype=dtype
            )
            is_legal = found.dim() == 1 or (found.dim() == 0 and may_be_one)
        except _OF_CONTENT:
            is_legal = False
    if not is_legal:
        raise ValueError(f"{key} must be numbers, got {reprlib.repr(values)}")
    return found


def _mask(row: Mapping[str, Any], length: int | None, index: int) -> Any:
    """The mask of the response. With only a length it is ones, so that the length is compared too."""
    mask = row.get("loss_masks")
    if mask is None:
        return None if length is None else torch.ones(length)
    if length is not None and len(mask) != length:
        raise ValueError(f"sample {index}: loss_masks has {len(mask)} values, but response_lengths is {length}")
    return mask


def _response_ids(row: Mapping[str, Any], length: int | None) -> Any:
    tokens = row.get("tokens")
    if tokens is None:
        return None
    if length is None:
        length = max((len(row[key]) for key in ("loss_masks", "log_probs") if row.get(key) is not None), default=0)
    return tokens[max(0, len(tokens) - length) :]


def _flat_versions(versions: Any) -> list[str]:
    """Flatten the versions of a framework: a version, a list of versions, or nested lists of ``{"version": ...}``."""
    if versions is None:
        return []
    if isinstance(versions, Mapping):
        return _flat_versions(versions.get("version"))
    if isinstance(versions, (list, tuple)):
        return [name for version in versions for name in _flat_versions(version)]
    return [str(versions)]
