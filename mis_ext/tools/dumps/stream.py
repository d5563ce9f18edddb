# SPDX-License-Identifier: Apache-2.0
"""Read samples of many files, with one file in memory at a time, and join the parts of several ranks.

Folder, rollout, number and ids identify a sample. Tensor-parallel ranks repeat the same samples; ranks of earlier
pipeline stages have no trainer log-probs; context-parallel ranks have parts of responses.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import owned_chunks
from mis_ext.files import regular_file
from mis_ext.tools.dumps.formats import DumpedSample, Skipped, read_file

_ONE_MEMORY = (
    "the log-probs of both sides are the same memory in a context-parallel part: one was filled in from the other"
)


class Dumps:
    """Samples of files. Each iteration reads them again, and joins the files of several ranks to whole samples.

    It keeps one file in memory, and samples that wait for the part of another rank.

    Args:
        paths: ``.pt`` and ``.jsonl`` files, see :mod:`mis_ext.tools.dumps`.
        trust_pickle: Let a ``.pt`` file create any Python object. This can run any code in the file.
        need_tokens: Whether it is an error if no token is usable.
        watch: Wraps the iteration over paths, for a progress bar.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        *,
        trust_pickle: bool = False,
        need_tokens: bool = True,
        watch: Callable[[Sequence[Path]], Iterable[Path]] = iter,
    ) -> None:
        self._paths = [*dict.fromkeys(map(Path, paths))]
        self._trust_pickle = trust_pickle
        self._need_tokens = need_tokens
        self._watch = watch
        self._joiner = Joiner()

    @property
    def skipped(self) -> list[Skipped]:
        """Data that the last iteration has not yielded so far, and why. All other data was yielded."""
        return self._joiner.skipped

    def __iter__(self) -> Iterator[DumpedSample]:
        """Yield each sample once, as soon as it is complete; incomplete samples come last.

        Raises:
            OSError: If a file cannot be opened.
            ValueError: If a file has an unknown format, files contradict each other, or no token is usable (unmasked,
                with finite log-probs of both sides). The message names the file.
        """
        self._joiner, is_usable, obstacle = Joiner(), False, ""
        for sample in self._samples():
            is_usable = is_usable or (self._need_tokens and num_usable_tokens(sample) > 0)
            if not obstacle and sample.obstacle is not None:
                obstacle = f"; {sample.name}: {sample.obstacle}"
            yield sample
        if self._need_tokens and not is_usable:
            raise ValueError(
                f"{', '.join(map(str, self._paths)) or 'no file'}: no usable tokens. Each sample needs log_probs "
                "(trainer) and rollout_log_probs (engine) of one length, with finite values where loss_mask is not 0"
                f"{obstacle}{''.join(f'; {skipped}' for skipped in self.skipped)}"
            )

    def _samples(self) -> Iterator[DumpedSample]:
        joiner = self._joiner
        for path in self._watch(self._paths):
            samples = read_file(regular_file(path), trust_pickle=self._trust_pickle)
            if not samples:
                joiner.empty.append(Skipped(str(path), None, "contains no sample"))
            yield from joiner.add_file(samples)
            # Free memory before the next file is read.
            del samples
        yield from joiner.rest()


def num_usable_tokens(sample: DumpedSample) -> int:
    """Count unmasked tokens with two finite log-probs; 0 if the lists have different lengths."""
    proximal, behavior, mask = sample.proximal_log_probs, sample.behavior_log_probs, sample.response_mask
    if sample.problem is not None or proximal is None or behavior is None or proximal.shape != behavior.shape:
        return 0
    is_usable = proximal.isfinite() & behavior.isfinite()
    is_trained = torch.ones_like(is_usable) if mask is None else torch.as_tensor(mask) != 0
    return int((is_usable & is_trained).sum()) if is_trained.shape == is_usable.shape else 0


@dataclass
class _Known:
    """Parts of one sample by context-parallel rank until it is complete, with their fingerprints and files."""

    parts: dict[int, DumpedSample] = field(default_factory=dict)
    held: dict[int, tuple[Any, str]] = field(default_factory=dict)
    is_whole: bool = False


class Joiner:
    """Takes the samples of one file after another, and yields each when it is complete. It skips bitwise repetitions.

    It does not keep the tensors of complete samples.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._folders: dict[str, str] = {}
        self._skipped: Counter[tuple[str, str]] = Counter()
        self.empty: list[Skipped] = []

    @property
    def skipped(self) -> list[Skipped]:
        """The skipped data: one entry per file and reason, with the number of samples."""
        return self.empty + [Skipped(path, count, reason) for (path, reason), count in self._skipped.items()]

    def add_file(self, samples: list[DumpedSample]) -> Iterator[DumpedSample]:
        """Add the samples of a file, and yield those that are now complete."""
        met: Counter[Any] = Counter()
        for sample in samples:
            key = self._identity(sample)
            # Samples of one file are always different samples.
            met[key] += 1
            if key is None:
                unnumbered = "a part of a response without sample_indices: its other parts cannot be found"
                yield replace(sample, problem=sample.problem or (None if sample.part is None else unnumbered))
            else:
                yield from self._add(sample, self._known.setdefault((key, met[key]), _Known()))

    def rest(self) -> Iterator[DumpedSample]:
        """Yield the incomplete samples."""
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
        proximal = fingerprint(sample.proximal_log_probs)
        rest = fingerprint(sample.behavior_log_probs), fingerprint(sample.response_mask)
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
                    f"{sample.name}: context-parallel rank {rank} has other values in {path}; pass files of one run"
                )
            # Tensor-parallel ranks disagree, or a folder has two runs: yield both.
            yield sample
            return
        known.held[rank] = ((proximal, rest), sample.path)
        known.parts[rank] = sample
        if len(known.parts) == size and all(part.proximal_log_probs is not None for part in known.parts.values()):
            parts, known.parts, known.is_whole = known.parts, {}, True
            yield _joined(parts)


def fingerprint(values: Any) -> int | None:
    """Hash of the bits of values, so equal NaNs have equal hashes; None for None."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        tensor = values.detach().contiguous()
        content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
        return hash((str(tensor.dtype), tuple(tensor.shape), content))
    return hash(tuple(map(str, values)))


def _joined(parts: Mapping[int, DumpedSample]) -> DumpedSample:
    first = parts[min(parts)]
    if first.part is None:
        return first
    advantages = {rank: part.advantages for rank, part in parts.items()}
    are_of_tokens = all(values is not None and values.dim() for values in advantages.values())
    return replace(
        first,
        proximal_log_probs=_whole(first, {rank: part.proximal_log_probs for rank, part in parts.items()}),
        behavior_log_probs=_whole(first, {rank: part.behavior_log_probs for rank, part in parts.items()}),
        advantages=_whole(first, advantages) if are_of_tokens else first.advantages,
        part=None,
        # Joining creates two tensors, so check for shared memory before.
        problem=_ONE_MEMORY if any(part.is_one_memory for part in parts.values()) else first.problem,
    )


def _whole(sample: DumpedSample, of_rank: Mapping[int, Tensor | None]) -> Tensor | None:
    part, length = sample.part, sample.response_length
    assert part is not None
    assert length is not None
    # The logits of a token, whose position decides its owner, are one position before it.
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


def _incomplete(parts: Mapping[int, DumpedSample]) -> DumpedSample:
    first = parts[min(parts)]
    if first.part is None or len(parts) == first.part.size:
        return _joined(parts)
    missing = ", ".join(str(rank) for rank in range(first.part.size) if rank not in parts)
    return replace(
        first, problem=f"a part of the response: the files of context-parallel ranks {missing} are not given"
    )
