"""Files of several ranks into whole samples, each once.

A sample is known by its folder, rollout, number and ids. Ranks of tensor parallelism repeat each other's samples; those
of an earlier pipeline stage have no trainer log-probs; those of context parallelism have parts of responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.zigzag import owned_chunks
from mis_ext.dumps.sample import ContextPart, DumpedSample, Skipped

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HAS_NUMPY = find_spec("numpy") is not None
_ONE_MEMORY = (
    "the log-probs of both sides are the same memory in a context-parallel part: one was filled in from the other"
)


@dataclass
class _Known:
    """What came of one sample: parts by context-parallel rank, until it is whole, and what they held and where."""

    parts: dict[int, DumpedSample] = field(default_factory=dict)
    held: dict[int, tuple[Any, str]] = field(default_factory=dict)
    is_whole: bool = False


class Joiner:
    """Takes the samples of one file after another, and hands out each when it is whole; bits that repeat are skipped.

    Tensors of a sample that is whole are not kept.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._folders: dict[str, str] = {}
        self._skipped: Counter[tuple[str, str]] = Counter()

    @property
    def skipped(self) -> list[Skipped]:
        """What was skipped: an entry per file and reason, with the number of samples."""
        return [Skipped(path, count, reason) for (path, reason), count in self._skipped.items()]

    def add_file(self, samples: list[DumpedSample]) -> Iterator[DumpedSample]:
        """The samples that are whole with those of one more file.

        Raises:
            ValueError: Two files hold different log-probs for the same part of a response.
        """
        met: Counter[Any] = Counter()
        for sample in samples:
            key = self._identity(sample)
            # Samples of one file are all different ones.
            met[key] += 1
            if key is None:
                yield replace(sample, problem=sample.problem or _unnumbered(sample.part))
            else:
                yield from self._add(sample, self._known.setdefault((key, met[key]), _Known()))

    def rest(self) -> Iterator[DumpedSample]:
        """The samples of which something is missing."""
        for known in self._known.values():
            if not known.is_whole:
                yield _incomplete(known.parts)

    def _identity(self, sample: DumpedSample) -> Any:
        if sample.sample_index is None:
            return None
        if sample.path not in self._folders:
            self._folders[sample.path] = str(Path(sample.path).resolve().parent)
        return self._folders[sample.path], sample.rollout_id, sample.sample_index, fingerprint(sample.token_ids)

    def _add(self, sample: DumpedSample, known: _Known) -> Iterator[DumpedSample]:
        rank, size = (0, 1) if sample.part is None else sample.part[:2]
        held, path = known.held.get(rank, (None, ""))
        proximal, rest = _content(sample)
        if held == (proximal, rest):
            self._skipped[sample.path, f"the same numbers as in {path}"] += 1
            return
        if held is not None and held[1] == rest and None in (held[0], proximal):
            without, with_it = (sample.path, path) if proximal is None else (path, sample.path)
            self._skipped[without, f"no trainer log-probs; {with_it} has them"] += 1
            if proximal is None:
                return
        elif held is not None:
            if size > 1:
                raise ValueError(
                    f"{sample.name}: context-parallel rank {rank} has other numbers in {path}; give files of one run"
                )
            # Tensor-parallel ranks that disagree, or two runs in one folder: each has its say.
            yield sample
            return
        known.held[rank] = ((proximal, rest), sample.path)
        known.parts[rank] = sample
        if len(known.parts) == size and all(part.proximal_log_probs is not None for part in known.parts.values()):
            parts, known.parts, known.is_whole = known.parts, {}, True
            yield _joined(parts)


def _unnumbered(part: ContextPart | None) -> str | None:
    return None if part is None else "a part of a response without sample_indices: its other parts cannot be found"


def _content(sample: DumpedSample) -> tuple[Any, Any]:
    rest = fingerprint(sample.behavior_log_probs), fingerprint(sample.response_mask)
    return fingerprint(sample.proximal_log_probs), rest


def fingerprint(values: Any) -> int | None:
    """A number that is the same for the same bits, and so one for a NaN; None for nothing."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        tensor = values.detach().contiguous()
        bits = tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor
        # A tenth of the time of a tuple of numbers.
        content = bits.numpy().tobytes() if _HAS_NUMPY else tuple(bits.flatten().tolist())
        return hash((str(tensor.dtype), tuple(bits.shape), content))
    return hash(tuple(map(str, values)))


def _joined(parts: Mapping[int, DumpedSample]) -> DumpedSample:
    first = parts[min(parts)]
    if first.part is None:
        return first
    return replace(
        first,
        proximal_log_probs=_whole(first, {rank: part.proximal_log_probs for rank, part in parts.items()}),
        behavior_log_probs=_whole(first, {rank: part.behavior_log_probs for rank, part in parts.items()}),
        advantages=_whole_advantages(first, parts),
        part=None,
        # Joining makes two tensors of one.
        problem=_ONE_MEMORY if any(part.is_one_memory for part in parts.values()) else first.problem,
    )


def _whole(sample: DumpedSample, of_rank: Mapping[int, Tensor | None]) -> Tensor | None:
    part, length = sample.part, sample.response_length
    assert part is not None
    assert length is not None
    # The logits of a token, which decide who owns it, lie one position before it.
    first = part.total_length - length - 1
    whole: Tensor | None = None
    for rank, values in of_rank.items():
        if values is None:
            return None
        if whole is None:
            whole = values.new_full((length,), torch.nan)
        runs = owned_chunks(cp_rank=rank, cp_size=part.size).ranges(part.laid_out_length)
        pieces = [whole[max(0, run.start - first) : max(0, run.stop - first)] for run in runs]
        if sum(map(len, pieces)) != len(values):
            expected = sum(map(len, pieces))
            raise ValueError(f"{sample.name}: rank {rank} of {part.size} has {len(values)} log-probs, not {expected}")
        for piece, own in zip(pieces, torch.split(values, [len(piece) for piece in pieces]), strict=True):
            piece.copy_(own)
    return whole


def _whole_advantages(first: DumpedSample, parts: Mapping[int, DumpedSample]) -> Tensor | None:
    of_rank = {rank: part.advantages for rank, part in parts.items()}
    is_of_tokens = all(values is not None and values.dim() for values in of_rank.values())
    return _whole(first, of_rank) if is_of_tokens else first.advantages


def _incomplete(parts: Mapping[int, DumpedSample]) -> DumpedSample:
    first = parts[min(parts)]
    if first.part is None or len(parts) == first.part.size:
        return _joined(parts)
    missing = ", ".join(str(rank) for rank in range(first.part.size) if rank not in parts)
    return replace(
        first, problem=f"a part of the response: the files of context-parallel ranks {missing} are not given"
    )
