# SPDX-License-Identifier: Apache-2.0
"""Does a row depend on what else is in the batch, or on how its sequence was fed: through rounding, or truly?

The criterion of every probe is bitwise. Only where bits differ is the difference judged, by one principle: it is
rounding if, in orders of magnitude, it is nearer to what rounding explains than to the data itself.

- In float64: the probe is repeated with every operator of ``fn`` computing in float64. Rounding shrinks with the
  precision, by ``eps(float64) / eps`` (2**-29 for float32, 2**-45 for bfloat16); true dependence keeps its size. The
  limit is the geometric mean of the two factors, the square root of the former. A function with other code for
  float64 is judged by that code.
- By magnitude, where float64 is impossible (the input is float64, or ``fn`` calls a kernel that is not PyTorch's own,
  or writes into tensors of its own of lower precision): the limit is ``sqrt(eps)`` of the largest output. This is
  weaker: true dependence below 9 % of the output (bfloat16) or 0.03 % (float32) passes for rounding.
- A number that is finite in one call and not in the other is true dependence: a leaked NaN, not rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from mis_ext.onpolicy.invariance.probes import Body, InvarianceReport, Piece, Probing, call_rows

_BATCH_SIZES = (2, 3, 5, 7, *(2**power for power in range(3, 13)))
_THREAD_COUNTS = (1, 2, 4)
_NUM_DRAWN = 2
_MOST_THREADS, _LARGEST_FACTOR = 8, 1000


def check_batch_invariance(fn: Callable[[Tensor], Tensor], rows: Tensor, *, seed: int = 0) -> InvarianceReport:
    """Whether ``fn`` gives each row the same bits alone and in any company.

    The reference is each row alone; where ``fn`` cannot run on one row, that is a failed probe and the whole batch is
    the reference. Probed are: repeated runs, the whole batch, chunks of several sizes, permutations, rows of zeros,
    huge numbers and NaN before and after (their own output is ignored), non-contiguous storage, thread counts, and rows
    of up to 1,000 times the numbers. Beside those that are always tried, chunk sizes and thread counts are drawn, and
    the factors too: kernels have borders where nobody expects one. An ``fn`` that raises, or returns something else
    than one row per row, fails the probe.

    ``fn`` gets copies, so it may change its input. State of its own (a batch norm's running mean) advances as in any
    other call. On the CPU ``torch.set_num_threads`` is changed and restored, also after an exception; it is global to
    the process, so other Python threads see it meanwhile.

    Args:
        fn: Maps ``[n, ...]`` to ``[n, ...]`` for any ``n``: a module, or a function that closes over some.
        rows: ``[N, ...]`` with at least two rows; more rows try more batch sizes. Rows of integers (token ids) are
            padded with zeros only, and not multiplied.
        seed: Of what is drawn; another one tries others.

    Raises:
        ValueError: There are fewer than two rows.

    Based on: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), which names the property.
    """
    if rows.dim() == 0 or len(rows) < 2:
        raise ValueError(f"rows must have at least 2 rows to make a batch of, got shape {[*rows.shape]}")

    def chunks(size: int) -> Body:
        return _calls(fn, torch.split(_first(len(rows), rows), size))

    alone, whole = chunks(1), _whole(fn)
    probing = Probing(rows, {"each row alone": alone, "full batch": whole})
    if not probing.has_reference:
        return probing.report()
    probing.repeat("each row alone, again", alone)
    probing.repeat("full batch, again", whole)
    probing.compare("full batch", whole)
    rng = random.Random(seed)
    drawn_sizes = _drawn(rng, [size for size in range(2, len(rows)) if size not in _BATCH_SIZES])
    for size in [*filter(len(rows).__gt__, _BATCH_SIZES), *drawn_sizes]:
        probing.compare(f"chunks of {size}", chunks(size))
    permuted = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for name, order in {"reversed": torch.arange(len(rows)).flip(0), "permuted": permuted}.items():
        probing.compare(name, _calls(fn, [order.to(rows.device)]))

    paddings = {"zeros": 0.0}
    if rows.dtype.is_floating_point:
        # The square root, so that a huge row times numbers of ordinary size stays finite.
        paddings |= {"huge rows": math.sqrt(torch.finfo(rows.dtype).max), "NaN rows": math.nan}
    for what, value in paddings.items():
        for where in ("before", "after"):
            probing.compare(f"{what} {where}", _padded(fn, value, before=where == "before"))
    probing.compare("strided storage", _whole(fn, lambda x: torch.stack([x, x], 1)[:, 0]))
    probing.compare("transposed storage", _whole(fn, _transposed))
    drawn_counts = _drawn(rng, [count for count in range(2, _MOST_THREADS + 1) if count not in _THREAD_COUNTS])
    for count in [*_THREAD_COUNTS, *drawn_counts]:
        name = f"{count} thread{'s' * (count > 1)}"
        if rows.device.type == "cpu":
            sizes = (7, rng.randrange(1, len(rows)))
            probing.compare(name, _threaded([alone, *(chunks(size) for size in sizes), whole], count))
        else:
            probing.skip(name, f"rows are on {rows.device.type}")
    if rows.dtype.is_floating_point:
        for factor in [rng.randint(2, _LARGEST_FACTOR) for _ in range(_NUM_DRAWN)]:
            probing.also(f"rows times {factor}", rows * factor, alone, whole)
    return probing.report()


def _drawn(rng: random.Random, choices: list[int]) -> list[int]:
    return sorted(rng.sample(choices, min(_NUM_DRAWN, len(choices))))


def _calls(fn: Callable[[Tensor], Tensor], indices: Sequence[Tensor]) -> Body:
    """A call for each list of rows."""
    return lambda rows: [Piece(index, call_rows(fn, rows[index])) for index in indices]


def _whole(fn: Callable[[Tensor], Tensor], store: Callable[[Tensor], Tensor] = Tensor.clone) -> Body:
    return lambda rows: [Piece(_first(len(rows), rows), call_rows(fn, store(rows)))]


def _padded(fn: Callable[[Tensor], Tensor], value: float, *, before: bool) -> Body:
    def body(rows: Tensor) -> list[Piece]:
        padding, num_rows = torch.full_like(rows, value), len(rows)
        outputs = call_rows(fn, torch.cat([padding, rows] if before else [rows, padding]))
        return [Piece(_first(num_rows, rows), outputs[num_rows:] if before else outputs[:num_rows])]

    return body


def _threaded(bodies: list[Body], count: int) -> Body:
    def body(rows: Tensor) -> list[Piece]:
        with _num_threads(count):
            return [piece for inner in bodies for piece in inner(rows)]

    return body


@contextmanager
def _num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _transposed(rows: Tensor) -> Tensor:
    return rows.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)


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
    whole = _calls(fn, [_first(num_tokens, sequence)])
    probing = Probing(sequence, {"full forward": whole})
    if not probing.has_reference:
        return probing.report()
    probing.repeat("full forward, again", whole)
    # Around powers of two, where kernels change their tiling, and the last ones.
    near = {2**power + shift for power in range(num_tokens.bit_length()) for shift in (-1, 0, 1)} | {num_tokens - 1}
    lengths = sorted(length for length in near if 0 < length < num_tokens)
    probing.compare("prefixes", _calls(fn, [_first(length, sequence) for length in lengths]))

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
            probing.compare(f"{side} padding", _padded_batch(padded, side))
    return probing.report()


def _decoded(make_decoder: Callable[[], SequenceFunction], sizes: list[int]) -> Body:
    return lambda sequence: _calls(make_decoder(), torch.split(_first(len(sequence), sequence), sizes))(sequence)


def _padded_batch(padded: PaddedFunction, side: Side) -> Body:
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
