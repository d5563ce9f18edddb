"""How sequences lie in packed tensors, and which keys their queries may attend to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packing(NamedTuple):
    """What attention gets besides queries, keys and values.

    Attributes:
        cu_seqlens_q: ``[S + 1]`` int32, where each sequence's queries start, and ``T``.
        cu_seqlens_k: The same for its keys.
        max_seqlen_q: The most queries of a sequence.
        max_seqlen_k: The most keys of a sequence.
        scale: Multiplies the scores.
        is_causal: A sequence's last query sees its last key, the one before all but that, and so on.
        mask: ``[S, 1 or H, max_seqlen_q, max_seqlen_k]`` bool, True where a query may attend; on top of ``is_causal``.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    is_causal: bool
    mask: Tensor | None = None
