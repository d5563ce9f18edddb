# SPDX-License-Identifier: Apache-2.0
"""Check: does a sequence get the same log-probs alone and after other sequences in a packed row?

Hybrid models (GRU, Mamba, gated delta net) keep a state and a convolution window from token to token. If a packed row
does not reset them, a sequence reads the sequences before it. Attention without boundaries has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mis_ext.validation import check_tensors

PackedFunction = Callable[[Tensor, list[int]], Tensor]
"""``score(ids_T, lengths)``: token ids ``[T]`` of concatenated sequences, and the length of each.

Returns the model's logits ``[T, V]`` or ``[1, T, V]``; or ``[T]``, the log-prob of each token, where the first of a
sequence is ignored.
"""
# Rounding differs between positions, in correct bf16 and fp16 models by up to this factor. Leaks are larger.
_MARGIN = 4.0
# Nats. Rounding in float32, which may not be visible in a sequence that begins a row.
_LEAST = 1e-5
# Rounding of 16-bit logits, in units in the last place (eps) of the largest logit. A sequence that begins a row can
# have exactly the same bits as alone, and still differ by rounding after other sequences. In random models this
# rounding was up to 1.5 (bf16) and 8 (fp16), and leaks were at least 3 and 25.
_UNITS = {torch.bfloat16: 0.5, torch.float16: 2.0}
# Nats. A larger difference of a sequence that begins a row is not rounding, and a larger tolerance hides leaks.
_MOST_ROUNDING = 0.5


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """One sequence, in the row with its largest difference.

    Attributes:
        index: Its index in the list.
        length: Its number of tokens.
        max_abs_diff: Largest difference of its log-probs after other sequences and alone, in nats.
        first_position: First position in the sequence whose log-probs differ by more than rounding; None if there is
            none.
        last_position: The last such position.
    """

    index: int
    length: int
    max_abs_diff: float
    first_position: int | None
    last_position: int | None


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Results of all sequences, and the rounding that was allowed.

    Attributes:
        rounding: Largest difference, in nats, of a sequence that begins a row, or that is scored alone twice.
        allowed: The allowed difference of a sequence after others, from ``rounding`` and the bits of the logits.
        sequences: In the given order.
    """

    rounding: float
    allowed: float
    sequences: tuple[PackedSequence, ...]

    @property
    def differing(self) -> list[PackedSequence]:
        """The sequences whose log-probs after other sequences differ from those alone."""
        return [each for each in self.sequences if each.first_position is not None]

    @property
    def passed(self) -> bool:
        """True if packing only changes rounding."""
        return not self.differing and max(self.rounding, self.allowed) <= _MOST_ROUNDING

    def explain(self) -> str:
        """Describe the result in one sentence."""
        if self.rounding > _MOST_ROUNDING:
            return (
                "a sequence that begins a packed row, or is scored again, differs from itself alone by "
                f"{self.rounding:.2g} nats: the function keeps a state between calls, is random (dropout), or reads "
                "later tokens"
            )
        found = self.differing
        if not found and self.allowed > _MOST_ROUNDING:
            return f"too coarse to tell: {self.allowed:.2g} nats can be rounding; check in float32"
        if not found:
            return (
                f"no difference above {self.allowed:.2g} nats between sequences in packed rows and alone: less can "
                "be rounding"
            )
        reach = max(each.last_position or 0 for each in found)
        if reach < 8 and any(each.length > 2 * reach for each in found):
            return f"only positions up to {reach} differ: a window at the start of a sequence, such as a convolution's"
        return "sequences read earlier sequences, or have wrong positions: check state, attention, and position ids"

    def __str__(self) -> str:
        lines = [self.explain(), f"rounding {self.rounding:.2g} nats, allowed {self.allowed:.2g}"]
        for each in self.sequences:
            where = "" if each.first_position is None else f", positions {each.first_position} to {each.last_position}"
            lines.append(f"sequence {each.index}, {each.length} tokens: differs by {each.max_abs_diff:.2g}{where}")
        return "\n".join(lines)


def check_packing(score: PackedFunction, sequences: Sequence[Tensor]) -> PackingReport:
    """Compare each sequence's log-probs alone with those in packed rows of all sequences, in every rotation.

    Each sequence begins one row; a change there is rounding. In all other rows it follows other sequences: a change of
    more than four times the largest rounding, plus 1e-5 nats, is a difference. A sequence that begins a row can have
    exactly the same bits as alone, and still differ by rounding after other sequences. So if the logits have 16 bits,
    the rounding is at least that of the largest logit. The check fails if this allows more than 0.5 nats. ``score`` is
    called without gradient.

    Args:
        score: Calls the model on packed sequences, like the trainer; see :data:`PackedFunction`.
        sequences: Token ids ``[n]`` of at least two sequences of at least two tokens each.

    Raises:
        ValueError: There are too few sequences or tokens, a sequence is not ``[n]``, or ``score`` returns a wrong shape
            or a non-finite log-prob.
        TypeError: A sequence is not a tensor of int64 or int32, or ``score`` does not return a tensor.
    """
    named = {f"sequences[{index}]": ids for index, ids in enumerate(sequences)}
    check_tensors(named)
    for name, ids in named.items():
        if ids.dim() != 1:
            raise ValueError(f"{name} must be [n], got shape {[*ids.shape]}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} must be int64 or int32, got {ids.dtype}")
    if len(sequences) < 2 or min(map(len, sequences)) < 2:
        raise ValueError("check_packing needs at least 2 sequences of at least 2 tokens each")
    count = len(sequences)
    alone, least = [], 0.0
    for ids in sequences:
        (rows,) = _scored_rows(score, [ids])
        alone += _log_probs([rows], [ids])
        least = max(least, _rounding_of_logits(rows))
    again = [_log_probs(_scored_rows(score, [ids]), [ids])[0] for ids in sequences]
    rounding = max(map(_largest, again, alone))
    behind: list[list[Tensor]] = [[] for _ in sequences]
    for shift in range(count):
        order = [(shift + place) % count for place in range(count)]
        in_order = [sequences[index] for index in order]
        packed = _log_probs(_scored_rows(score, in_order), in_order)
        rounding = max(rounding, _largest(packed[0], alone[shift]))
        for place, index in enumerate(order[1:], start=1):
            behind[index].append((packed[place] - alone[index]).abs())
    allowed = _MARGIN * max(rounding, least) + _LEAST
    return PackingReport(
        rounding=rounding,
        allowed=allowed,
        sequences=tuple(_worst(index, len(each), behind[index], allowed) for index, each in enumerate(sequences)),
    )


def _worst(index: int, length: int, rows: list[Tensor], allowed: float) -> PackedSequence:
    diff = max(rows, key=lambda row: float(row.max()))
    # The first token has no log-prob.
    positions = ((diff > allowed).nonzero().flatten() + 1).tolist()
    return PackedSequence(
        index=index,
        length=length,
        max_abs_diff=float(diff.max()),
        first_position=positions[0] if positions else None,
        last_position=positions[-1] if positions else None,
    )


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _rounding_of_logits(rows: Tensor) -> float:
    """Rounding of the largest logit if all logits are bf16 or fp16 values, also in a wider dtype; 0 otherwise."""
    for dtype, units in _UNITS.items():
        if rows.dim() == 2 and rows.to(dtype).to(rows.dtype).equal(rows):
            # Not the largest absolute value: columns outside the vocabulary can be very negative.
            return units * torch.finfo(dtype).eps * float(rows.amax(-1).abs().max())
    return 0.0


def _scored_rows(score: PackedFunction, sequences: list[Tensor]) -> list[Tensor]:
    """Per sequence the rows that score its tokens: logits ``[n - 1, V]``, or log-probs ``[n - 1]``."""
    ids_T, lengths = torch.cat(sequences), [*map(len, sequences)]
    with torch.no_grad():
        found = score(ids_T, list(lengths))
    if not isinstance(found, Tensor):
        raise TypeError(f"the function must return a tensor, got {type(found).__name__}")
    found = found[0] if found.dim() == 3 and len(found) == 1 else found
    if found.dim() not in (1, 2) or len(found) != len(ids_T):
        raise ValueError(f"the function must return [T] or [T, V] with T = {len(ids_T)}, got shape {[*found.shape]}")
    return [each[1:] if found.dim() == 1 else each[:-1] for each in torch.split(found, lengths)]


def _log_probs(rows: list[Tensor], sequences: list[Tensor]) -> list[Tensor]:
    """Per sequence the log-probs of all tokens except the first, float64."""
    out = []
    for each, ids in zip(rows, sequences, strict=True):
        values = each.double()
        if values.dim() == 2:
            values = values.log_softmax(-1).gather(-1, ids[1:, None].to(values.device))[:, 0]
        if not values.isfinite().all():
            raise ValueError("the function returns a log-prob that is not finite")
        out.append(values.cpu())
    return out


def packed_transformers(model: Any) -> PackedFunction:
    """A score function for a transformers causal language model, called without padding like in trainers.

    The model gets ``position_ids`` that restart with each sequence, and no mask. If your trainer passes more, such as
    ``seq_idx``, write your own function.

    Args:
        model: A model in evaluation mode, on its device.
    """

    def score(ids_T: Tensor, lengths: list[int]) -> Tensor:
        ids_T = ids_T.to(next(model.parameters()).device)
        positions = _positions(lengths).to(ids_T.device)
        logits: Tensor = model(input_ids=ids_T[None], position_ids=positions[None], use_cache=False).logits
        return logits

    return score


def packed_megatron(model: Any) -> PackedFunction:
    """A score function for a Megatron-Core model with embedding and output layer, with ``PackedSeqParams`` (``thd``).

    All ranks of a tensor-parallel group must call it. Pipeline and context parallelism are not supported.

    Args:
        model: A ``GPTModel`` or ``MambaModel`` in evaluation mode, or a wrapper with its ``forward``.
    """
    packed_seq_params = import_module("megatron.core.packed_seq_params").PackedSeqParams

    def score(ids_T: Tensor, lengths: list[int]) -> Tensor:
        ids_T = ids_T.to(next(model.parameters()).device)
        ends = torch.tensor([0, *lengths], device=ids_T.device).cumsum(0).int()
        longest = max(lengths)
        params = packed_seq_params(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        positions = _positions(lengths).to(ids_T.device)[None]
        logits: Tensor = model(ids_T[None], positions, None, packed_seq_params=params, runtime_gather_output=True)
        return logits

    return score


def _positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])
