"""The samples of many files, one file in memory at a time."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from mis_ext.dumps.joining import Joiner
from mis_ext.dumps.reading import read_file
from mis_ext.dumps.sample import DumpedSample, Skipped
from mis_ext.files import regular_file

_SPOT = 1 << 16


class Dumps:
    """Samples of files, read anew by each iteration; of a host that wrote a file per rank, joined to whole samples.

    In memory are one file, and what still lacks a part that another rank's file may have.

    Args:
        paths: ``.pt`` and ``.jsonl`` files, see :mod:`mis_ext.dumps`.
        trust_pickle: Let a ``.pt`` file create any Python object, which can run any code in it.
        need_tokens: Whether it is an error if no token can be used.
        watch: Gets the paths and hands them out again, one when it is read: for a progress bar.

    Attributes:
        skipped: What the last iteration did not hand out, and why. Whatever is not here was handed out.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        *,
        trust_pickle: bool = False,
        need_tokens: bool = True,
        watch: Callable[[Sequence[Path]], Iterable[Path]] = iter,
    ) -> None:
        self._paths = [Path(path) for path in paths]
        self._trust_pickle = trust_pickle
        self._need_tokens = need_tokens
        self._watch = watch
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[DumpedSample]:
        """Each sample once, as soon as it is whole; those that lack something last.

        Raises:
            OSError: A file cannot be opened.
            ValueError: The content of a file has no known format, files contradict each other, or no token can be
                used: none has a log-prob of both sides, finite and under no mask. The message names the file.
        """
        joiner, files, is_usable = Joiner(), _Files(), False
        for sample in self._joined(joiner, files):
            is_usable = is_usable or (self._need_tokens and num_usable_tokens(sample) > 0)
            self.skipped = files.skipped + joiner.skipped
            yield sample
        self.skipped = files.skipped + joiner.skipped
        if self._need_tokens and not is_usable:
            raise ValueError(
                f"no token of {', '.join(map(str, self._paths)) or 'no file'} can be used: none has a finite log-prob "
                f"of trainer and engine under no mask{''.join(f'; {skipped}' for skipped in self.skipped)}"
            )

    def _joined(self, joiner: Joiner, files: _Files) -> Iterator[DumpedSample]:
        for path in self._watch(self._paths):
            if files.is_new(path):
                samples = read_file(path, trust_pickle=self._trust_pickle)
                if not samples:
                    files.skipped.append(Skipped(str(path), None, "holds no sample"))
                yield from joiner.add_file(samples)
                # Before the next file is read.
                del samples
        yield from joiner.rest()


def num_usable_tokens(sample: DumpedSample) -> int:
    """Tokens under no mask whose two log-probs are finite; 0 where the lists do not fit each other."""
    proximal, behavior = sample.proximal_log_probs, sample.behavior_log_probs
    if sample.problem is not None or proximal is None or behavior is None or proximal.shape != behavior.shape:
        return 0
    usable = proximal.isfinite() & behavior.isfinite()
    if sample.response_mask is not None:
        active = torch.as_tensor(sample.response_mask) != 0
        if active.shape != usable.shape:
            return 0
        usable &= active
    return int(usable.sum())


class _Files:
    """Which files were given already: by another path, or the same bytes."""

    def __init__(self) -> None:
        self.skipped: list[Skipped] = []
        self._seen: dict[tuple[int, bytes], list[Path]] = {}

    def is_new(self, path: Path) -> bool:
        """Whether the file has other bytes than all before; if not, it is among the skipped."""
        size = regular_file(path).stat().st_size
        with path.open("rb") as file:
            # The end of a .pt file has the checksums of all its tensors.
            file.seek(max(0, size - _SPOT))
            alike = self._seen.setdefault((size, file.read()), [])
        for other in alike:
            if filecmp.cmp(path, other, shallow=False):
                self.skipped.append(Skipped(str(path), None, f"the same bytes as {other}"))
                return False
        alike.append(path)
        return True
