"""Where the inputs that a module got in two recordings are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.recording.recordings import Entry
from mis_ext.onpolicy.recording.row_difference import row_difference, row_size


class InputState(NamedTuple):
    """Of N rows: whether paired inputs have each of them, and whether they differ up to it."""

    is_there_N: Tensor
    differs_N: Tensor


class InputDifference:
    """Bitwise comparison of the inputs of one pair of modules.

    Inputs are paired by label. Of those without a counterpart the first is paired with the first, as parameters have
    other names in other engines, and one labelled by a number (a positional argument without a name) with the next;
    in both cases only with one whose rows have the same size.

    Inputs that are not by token are equal where their digests are. Where these differ nothing is said: a mask that is
    padded otherwise may mean the same.

    Args:
        a: The inputs in one recording, by label.
        b: In the other.
        others_a: The digests of a's inputs that are not by token, by label.
        others_b: Likewise.
        allow_dtype: Whether their dtypes may differ.

    Attributes:
        compared: Labels in a of the inputs that were compared.
        unpaired: Labels of the inputs that only one side has by token.
        uncompared: Labels of other inputs that were not compared.
    """

    def __init__(
        self,
        a: Mapping[str, Entry],
        b: Mapping[str, Entry],
        others_a: Mapping[str, str | None],
        others_b: Mapping[str, str | None],
        *,
        allow_dtype: bool,
    ) -> None:
        pairs = _pairs(a, b)
        paired_a, paired_b = {label for label, _ in pairs}, {label for _, label in pairs}
        self.unpaired = (*(x for x in a if x not in paired_a), *(x for x in b if x not in paired_b))
        equal = {label for label, told in others_a.items() if told is not None and told == others_b.get(label)}
        self.compared = (*(label for label, _ in pairs), *(label for label in others_a if label in equal - paired_a))
        rest = dict.fromkeys([*others_a, *others_b])
        self.uncompared = tuple(label for label in rest if label not in {*self.unpaired, *equal})
        self._compared = [_compare(a[x], b[y], allow_dtype=allow_dtype) for x, y in pairs]

    def up_to(self, sequence_N: Tensor, position_N: Tensor) -> InputState:
        """The inputs in the sequence of each row, up to and including it."""
        is_there_N = torch.full_like(position_N, bool(self.compared), dtype=torch.bool)
        differs_N = torch.zeros_like(is_there_N)
        for compared in self._compared:
            stride = 1 + int(torch.cat([compared.position_N, position_N, position_N.new_zeros(1)]).max())
            key_N, asked_N = (x * stride + y for x, y in (compared[:2], (sequence_N, position_N)))
            first_N, index_N, stop_N = (
                torch.searchsorted(key_N, sequence_N * stride),
                torch.searchsorted(key_N, asked_N),
                torch.searchsorted(key_N, asked_N, right=True),
            )
            num_different = torch.cat([position_N.new_zeros(1), compared.differs_N.cumsum(0)])
            is_there_N &= index_N < stop_N
            differs_N |= num_different[stop_N] > num_different[first_N]
        return InputState(is_there_N, differs_N)

    def all_rows(self) -> InputState:
        """Whether there are inputs, and whether any row of them differs, as one row."""
        differs = any(bool(compared.differs_N.any()) for compared in self._compared)
        return InputState(torch.tensor([bool(self.compared)]), torch.tensor([differs]))


class _Compared(NamedTuple):
    """Rows of one pair of inputs, sorted."""

    sequence_N: Tensor
    position_N: Tensor
    differs_N: Tensor


def _compare(a: Entry, b: Entry, *, allow_dtype: bool) -> _Compared:
    if row_size(a) != row_size(b):
        return _Compared(a.sequence_N, a.position_N, torch.ones(len(a.values), dtype=torch.bool))
    found = row_difference(a, b)
    is_other_float = a.dtype != b.dtype and any(dtype.is_floating_point for dtype in (a.dtype, b.dtype))
    return _Compared(found.sequence_N, found.position_N, found.differs_N | (is_other_float and not allow_dtype))


def _pairs(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> list[tuple[str, str]]:
    pairs = [(label, label) for label in a if label in b]
    rest = [label for label in b if label not in a]
    for label in (label for label in a if label not in b):
        for other in rest:
            are_first = (label, other) == (next(iter(a)), next(iter(b)))
            if (are_first or _is_number(label) or _is_number(other)) and row_size(a[label]) == row_size(b[other]):
                pairs.append((label, other))
                rest.remove(other)
                break
    return pairs


def _is_number(label: str) -> bool:
    return label.partition(".")[0].isdigit()
