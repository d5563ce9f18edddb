"""Does the output at a position depend on how the sequence was fed: its length, chunks, a cache, padding?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from mis_ext.onpolicy.invariance.probes import Body, InvarianceReport, Piece, Probing, call_rows

_CHUNK_SIZES = (2, 3, 16, 64, 256, 1024)
# Odd, so that blocks of a kernel that starts counting at the padding never line up with those of the reference.
_NUM_PADDING = 3

Side = Literal["left", "right"]
SequenceFunction = Callable[[Tensor], Tensor]
"""``[n, ...]`` tokens or hidden states to ``[n, ...]`` outputs."""


class PaddedFunction(Protocol):
    """``[B, T, ...]`` to ``[B, T, ...]``; row ``b`` holds ``lengths_B[b]`` tokens and padding on one side."""

    def __call__(self, batch: Tensor, lengths_B: Tensor, side: Side) -> Tensor:
        """Outputs of all ``L`` positions; ``side`` is where the padding is, whose outputs are ignored."""


def check_sequence_invariance(
    fn: SequenceFunction,
    sequence: Tensor,
    *,
    make_decoder: Callable[[], SequenceFunction] | None = None,
    padded: PaddedFunction | None = None,
) -> InvarianceReport:
    """Whether a causal ``fn`` gives each position the same bits however the sequence is fed.

    The reference is ``fn(sequence)``, one forward over all of it. Probed are: repeated runs, shorter prefixes, decoding
    token by token, chunked prefill with several chunk sizes, half a prefill and then decoding, and a batch of three
    lengths padded on the left or right with tokens of the sequence. Kinds are those of
    :attr:`~mis_ext.onpolicy.invariance.probes.InvarianceReport.kind`; "batch-dependent" is an output that truly depends
    on later tokens, on padding, or on where a chunk ends.

    A transformers model, with ids as the sequence::

        def make_decoder():
            cache = DynamicCache(config=model.config)
            # ids, mask, positions, and the cache, whose name depends on the version.
            return lambda ids: model(ids[None], None, None, cache, use_cache=True).logits[0]

        check_sequence_invariance(lambda ids: model(ids[None]).logits[0], ids, make_decoder=make_decoder)

    Args:
        fn: Outputs ``[n, ...]`` of a forward over ``n`` tokens or hidden states ``[n, ...]`` that start a sequence.
        sequence: ``[T, ...]`` with ``T`` at least 2; more tokens try more lengths.
        make_decoder: Starts a decoder with an empty cache: called with the next tokens, it returns their outputs and
            remembers them. Without it, decoding and chunked prefill are listed as not run.
        padded: ``padded(batch, lengths_B, side)`` is a mask-aware forward over ``[B, T, ...]`` that returns
            ``[B, T, ...]``. Without it, padding is listed as not run.

    Raises:
        ValueError: The sequence has fewer than two tokens.
    """
    if sequence.dim() == 0 or len(sequence) < 2:
        raise ValueError(f"sequence must have at least 2 tokens, got shape {[*sequence.shape]}")
    num_tokens = len(sequence)
    whole = _prefixes(fn, [num_tokens])
    probing = Probing(sequence, {"full forward": whole})
    if not probing.has_reference:
        return probing.report()
    probing.repeat("full forward, again", whole)
    # Around powers of two, where kernels change their tiling, and the last ones.
    near = {2**power + shift for power in range(num_tokens.bit_length()) for shift in (-1, 0, 1)} | {num_tokens - 1}
    probing.compare("prefixes", _prefixes(fn, sorted(length for length in near if 0 < length < num_tokens)))

    half = num_tokens // 2
    splits = {"decode": [1] * num_tokens, f"prefill {half}, then decode": [half] + [1] * (num_tokens - half)}
    for size in filter(num_tokens.__gt__, _CHUNK_SIZES):
        splits[f"chunked prefill of {size}"] = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
    for name, sizes in splits.items():
        if make_decoder is None:
            probing.skip(name, "needs make_decoder")
        else:
            probing.compare(name, _decoded(make_decoder, sizes))
    for side in get_args(Side):
        if padded is None:
            probing.skip(f"{side} padding", "needs padded")
        else:
            probing.compare(f"{side} padding", _padded(padded, side))
    return probing.report()


def _prefixes(fn: SequenceFunction, lengths: list[int]) -> Body:
    def body(sequence: Tensor) -> list[Piece]:
        return [Piece(_first(length, sequence), call_rows(fn, sequence[:length].clone())) for length in lengths]

    return body


def _decoded(make_decoder: Callable[[], SequenceFunction], sizes: list[int]) -> Body:
    def body(sequence: Tensor) -> list[Piece]:
        decode = make_decoder()
        chunks = torch.split(_first(len(sequence), sequence), sizes)
        return [Piece(index, call_rows(decode, sequence[index])) for index in chunks]

    return body


def _padded(padded: PaddedFunction, side: Side) -> Body:
    def body(sequence: Tensor) -> list[Piece]:
        num_tokens = len(sequence)
        lengths = [num_tokens, (num_tokens + 1) // 2, 1]
        total = num_tokens + _NUM_PADDING
        spans = [slice(total - length, total) if side == "left" else slice(0, length) for length in lengths]
        # Tokens of the sequence: legal as ids, ordinary as hidden states, and visible where a mask forgets them.
        filler = sequence[-1 - _first(total, sequence) % num_tokens]
        batch = torch.stack([filler] * len(lengths))
        for row, span, length in zip(batch, spans, lengths, strict=True):
            row[span] = sequence[:length]
        lengths_B = torch.tensor(lengths, device=sequence.device)
        outputs = call_rows(lambda batch: padded(batch, lengths_B, side), batch)
        return [
            Piece(_first(length, sequence), row[span])
            for row, span, length in zip(outputs, spans, lengths, strict=True)
        ]

    return body


def _first(count: int, sequence: Tensor) -> Tensor:
    return torch.arange(count, device=sequence.device)
