# SPDX-License-Identifier: Apache-2.0
"""Probes: does a row depend on the rest of the batch, or on the chunks of its sequence, by rounding or truly?

The criterion of every probe is bitwise. A difference counts as rounding if it is at most ``sqrt(eps)`` of the largest
output, so true dependence below 9 % of the output (bfloat16) or 0.03 % (float32) counts as rounding. A value that is
finite in only one call is true dependence: a leaked NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mis_ext.onpolicy.bits import as_real, same_bits
from mis_ext.validation import check_tensors

Kind = Literal["not repeatable", "batch-dependent", "failed", "rounding", "invariant"]
SequenceFunction = Callable[[Tensor], Tensor]
"""``[n, ...]`` tokens or hidden states to ``[n, ...]`` outputs."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of one probe; "equal" is the only pass.

    Attributes:
        name: The probe.
        outcome: As :attr:`InvarianceReport.kind`, or "equal".
        num_different: Number of rows that differ from the reference in any call of the probe.
        first_different: Index of the first of them.
        max_abs_diff: Largest difference; infinite if a value is finite on only one side.
        note: The error of a failed probe.
    """

    name: str
    outcome: str
    num_different: int = 0
    first_different: int | None = None
    max_abs_diff: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """All probes of a function, and their overall result."""

    probes: tuple[Probe, ...]

    @property
    def kind(self) -> Kind:
        """The worst outcome of all probes.

        - "not repeatable": the same calls gave different bits.
        - "batch-dependent": rows truly depend on the rest of the call.
        - "failed": a probe raised an error, there was nothing to compare, or all outputs were NaN.
        - "rounding": rows differ only by rounding.
        - "invariant": every probe found equal bits.
        """
        outcomes = {probe.outcome for probe in self.probes} or {"failed"}
        return next((kind for kind in get_args(Kind) if kind in outcomes), "invariant")

    @property
    def invariant(self) -> bool:
        """True if every probe found the bits of the reference, and none failed."""
        return self.kind == "invariant"

    def __str__(self) -> str:
        lines = [f"{self.kind}", f"{'probe':<28}{'outcome':<17}{'differ':>7}{'first':>7}{'max abs':>10}"]
        for probe in self.probes:
            first = "-" if probe.first_different is None else probe.first_different
            numbers = f"{probe.num_different:>7}{first:>7}{probe.max_abs_diff:>10.3g}"
            lines.append(f"{probe.name:<28}{probe.outcome:<17}{numbers}  {probe.note}".rstrip())
        return "\n".join(lines)


def check_batch_invariance(fn: Callable[[Tensor], Tensor], rows: Tensor) -> InvarianceReport:
    """Check that ``fn`` computes the same bits for a row alone and together with other rows.

    The reference is each row alone. The probes are: repeated runs, the whole batch, chunks of several sizes,
    permutations, rows of zeros, huge values and NaN before and after (whose output is ignored), and non-contiguous
    storage. If ``fn`` raises an error, or does not return one row per row, the probe fails. It gets copies, so it may
    change its input. On a CPU, call this function with several numbers of threads.

    Args:
        fn: Maps ``[n, ...]`` to ``[n, ...]`` for any ``n``: a module, or a function.
        rows: ``[N, ...]`` with at least two rows; more rows try more batch sizes. Rows of integers (token ids) are
            padded only with zeros.

    Raises:
        TypeError: ``rows`` is not a tensor.
        ValueError: There are fewer than two rows.

    Based on: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), which names the property.
    """
    check_tensors({"rows": rows})
    if rows.dim() == 0 or len(rows) < 2:
        raise ValueError(f"rows must have at least 2 rows to make a batch of, got shape {[*rows.shape]}")
    rows, num_rows = rows.detach(), len(rows)
    order: Any = torch.arange(num_rows, device=rows.device)
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(order)

    def between(before: Tensor, after: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: fn(torch.cat([before, x, after]))[len(before) :][:num_rows]

    probes: dict[str, _Fed] = {name: (fn, order.split(1)) for name in _REFERENCES}
    probes["full batch"] = fn, [order]
    for size in filter(num_rows.__gt__, (2, 3, 5, 7, *(2**power for power in range(3, 13)))):
        probes[f"chunks of {size}"] = fn, order.split(size)
    probes["reversed"] = fn, [order.flip(0)]
    probes["permuted"] = fn, [shuffled]
    paddings = {"zeros": 0.0}
    if rows.dtype.is_floating_point:
        # The square root, so that a huge row times ordinary values stays finite.
        paddings |= {"huge rows": math.sqrt(torch.finfo(rows.dtype).max), "NaN rows": math.nan}
    for what, value in paddings.items():
        padding = torch.full_like(rows, value)
        probes[f"{what} before"] = between(padding, padding[:0]), [order]
        probes[f"{what} after"] = between(padding[:0], padding), [order]
    probes["strided storage"] = lambda x: fn(torch.stack([x, x], 1)[:, 0]), [order]
    probes["transposed storage"] = lambda x: fn(x.movedim(0, -1).contiguous().movedim(-1, 0)), [order]
    return _report(rows, probes)


def check_sequence_invariance(
    fn: SequenceFunction,
    sequence: Tensor,
    *,
    make_decoder: Callable[[], SequenceFunction] | None = None,
) -> InvarianceReport:
    """Check that a causal ``fn`` computes the same bits for a position with any split of the sequence.

    The reference is ``fn(sequence)``, one forward over the whole sequence. The probes are: repeated runs, shorter
    prefixes, decoding token by token, chunked prefill with several chunk sizes, and half a prefill followed by
    decoding. Kinds are those of :attr:`~mis_ext.onpolicy.invariance.InvarianceReport.kind`; "batch-dependent" is an
    output that truly depends on later tokens, or on the end of a chunk.

    A transformers model, with ids as the sequence::

        def make_decoder():
            cache = DynamicCache(config=model.config)
            # Arguments: ids, mask, positions, and the cache, whose name depends on the version.
            return lambda ids: model(ids[None], None, None, cache, use_cache=True).logits[0]

        check_sequence_invariance(lambda ids: model(ids[None]).logits[0], ids, make_decoder=make_decoder)

    Args:
        fn: Outputs ``[n, ...]`` of a forward over ``n`` tokens or hidden states ``[n, ...]`` that start a sequence.
        sequence: ``[T, ...]`` with ``T`` at least 2; more tokens test more lengths.
        make_decoder: Creates a decoder with an empty cache. The decoder gets the next tokens, stores them, and returns
            their outputs. Without it, decoding and chunked prefill are not probed.

    Raises:
        TypeError: ``sequence`` is not a tensor.
        ValueError: The sequence has fewer than two tokens.
    """
    check_tensors({"sequence": sequence})
    if sequence.dim() == 0 or len(sequence) < 2:
        raise ValueError(f"sequence must have at least 2 tokens, got shape {[*sequence.shape]}")
    sequence, num_tokens, half = sequence.detach(), len(sequence), len(sequence) // 2
    order: Any = torch.arange(num_tokens, device=sequence.device)
    # Around powers of two, where kernels change their tiling, and the last lengths.
    near = {2**power + shift for power in range(num_tokens.bit_length()) for shift in (-1, 0, 1)} | {num_tokens - 1}
    probes: dict[str, _Fed] = {name: (fn, [order]) for name in _REFERENCES}
    probes["prefixes"] = fn, [order[:length] for length in sorted(near) if 0 < length < num_tokens]
    if make_decoder is not None:
        fed = {"decode": order.split(1), f"prefill {half}, then decode": [order[:half], *order[half:].split(1)]}
        sizes = filter(num_tokens.__gt__, (2, 3, 16, 64, 256, 1024))
        fed |= {f"chunked prefill of {size}": order.split(size) for size in sizes}
        probes |= {name: (_made_late(make_decoder), calls) for name, calls in fed.items()}
    return _report(sequence, probes)


def _made_late(make_decoder: Callable[[], SequenceFunction]) -> SequenceFunction:
    """A decoder that is created in the first call, so that an error fails only its probe."""
    decoder = cache(make_decoder)
    return lambda x: decoder()(x)


_REFERENCES = ("reference", "reference, again")
_Fed = tuple[Callable[[Tensor], Any], Sequence[Tensor]]
"""The function of a probe, and the indices of the rows of each of its calls."""


def _report(rows: Tensor, probes: Mapping[str, _Fed]) -> InvarianceReport:
    """Compare the outputs of each probe with the first, the reference. A probe that raises an error fails."""
    found: list[Probe] = []
    expected: Tensor | None = None
    for name, (fn, calls) in probes.items():
        try:
            # Indexing copies: the function may change its input.
            outputs, index = torch.cat([_call(fn, rows[call]) for call in calls]), torch.cat([*calls])
            if expected is None:
                if outputs.isnan().all():
                    raise ValueError("the function returns only NaN")
                expected = outputs
                continue
            probe = _difference(name, index, outputs, expected[index])
            if name in _REFERENCES and probe.num_different:
                probe = replace(probe, outcome="not repeatable")
        except Exception as error:
            probe = Probe(name=name, outcome="failed", note=f"{type(error).__name__}: {error}".splitlines()[0])
        found.append(probe)
        if expected is None:
            break
    return InvarianceReport(probes=tuple(found))


def _call(fn: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """``[n, ...]``: the outputs of ``fn`` for the ``n`` rows of ``batch``, copied, as ``fn`` may reuse their memory."""
    num_rows = len(batch)
    outputs = fn(batch)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the function must return a tensor, got {type(outputs).__name__}")
    if outputs.shape[:1] != (num_rows,) or outputs.numel() == 0:
        raise ValueError(f"the function must return {num_rows} rows for {num_rows} rows, got shape {[*outputs.shape]}")
    return as_real(outputs.detach()).clone()


def _difference(name: str, index: Tensor, outputs: Tensor, expected: Tensor) -> Probe:
    is_different = ~same_bits(outputs, expected).reshape(len(index), -1).all(1)
    different = sorted({*index[is_different].tolist()})
    if not different:
        return Probe(name=name, outcome="equal")
    limit = math.sqrt(torch.finfo(outputs.dtype).eps if outputs.is_floating_point() else 2.0**-23)
    outputs, expected = outputs.double(), expected.double()
    # The same NaN or infinity on both sides is not a difference.
    is_same = (outputs == expected) | (outputs.isnan() & expected.isnan())
    distance = torch.where(is_same, 0.0, (outputs - expected).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max()
    largest = expected.abs().nan_to_num(nan=0.0, posinf=0.0).max()
    return Probe(
        name=name,
        outcome="rounding" if distance <= limit * largest else "batch-dependent",
        num_different=len(different),
        first_different=different[0],
        max_abs_diff=float(distance),
    )
