# SPDX-License-Identifier: Apache-2.0
"""Does a row depend on what else is in the batch, or on how its sequence was fed: through rounding, or truly?

The criterion of every probe is bitwise. A difference is called rounding if it is at most ``sqrt(eps)`` of the largest
output: true dependence below 9 % of the output (bfloat16) or 0.03 % (float32) passes for rounding. A number that is
finite in one call and not in the other is true dependence: a leaked NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mis_ext.onpolicy.bits import as_real, same_bits

Kind = Literal["not repeatable", "batch-dependent", "failed", "rounding", "invariant"]
SequenceFunction = Callable[[Tensor], Tensor]
"""``[n, ...]`` tokens or hidden states to ``[n, ...]`` outputs."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of one probe; "equal" is the only pass.

    Attributes:
        name: What was done.
        outcome: As :attr:`InvarianceReport.kind`, or "equal".
        num_different: Rows with other bits than the reference, in any of the probe's calls.
        first_different: Index of the first of them.
        max_abs_diff: Largest difference; infinite where a number is finite on one side only.
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
    """All probes of a function, and what they add up to."""

    probes: tuple[Probe, ...]

    @property
    def kind(self) -> Kind:
        """The gravest outcome of all probes.

        - "not repeatable": the same calls gave other bits.
        - "batch-dependent": rows truly depend on what else is in the call.
        - "failed": a probe raised, or there was nothing to compare.
        - "rounding": rows differ by rounding only.
        - "invariant": every probe found equal bits.
        """
        outcomes = {probe.outcome for probe in self.probes} or {"failed"}
        return next((kind for kind in get_args(Kind) if kind in outcomes), "invariant")

    @property
    def invariant(self) -> bool:
        """Every probe found the bits of the reference, and none failed."""
        return self.kind == "invariant"

    def __str__(self) -> str:
        lines = [f"{self.kind}", f"{'probe':<28}{'outcome':<17}{'differ':>7}{'first':>7}{'max abs':>10}"]
        for probe in self.probes:
            first = "-" if probe.first_different is None else probe.first_different
            numbers = f"{probe.num_different:>7}{first:>7}{probe.max_abs_diff:>10.3g}"
            lines.append(f"{probe.name:<28}{probe.outcome:<17}{numbers}  {probe.note}".rstrip())
        return "\n".join(lines)


Calls = list[tuple[Tensor, Tensor]]
"""Inputs ``[n, ...]`` of each call, and of which row of the reference each output is, ``[n]``; below 0: of none."""


def check_batch_invariance(fn: Callable[[Tensor], Tensor], rows: Tensor) -> InvarianceReport:
    """Check that ``fn`` computes the same bits for a row alone and with any other rows.

    The reference is each row alone. Probed are: repeated runs, the whole batch, chunks of several sizes, permutations,
    rows of zeros, huge numbers and NaN before and after (their own output is ignored), and non-contiguous storage. An
    ``fn`` that raises, or returns something else than one row per row, fails the probe. It gets copies, so it may
    change its input. On a CPU call this with several numbers of threads.

    Args:
        fn: Maps ``[n, ...]`` to ``[n, ...]`` for any ``n``: a module, or a function that closes over some.
        rows: ``[N, ...]`` with at least two rows; more rows try more batch sizes. Rows of integers (token ids) are
            padded with zeros only.

    Raises:
        ValueError: There are fewer than two rows.

    Based on: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), which names the property.
    """
    if rows.dim() == 0 or len(rows) < 2:
        raise ValueError(f"rows must have at least 2 rows to make a batch of, got shape {[*rows.shape]}")
    rows, num_rows = rows.detach(), len(rows)
    order = torch.arange(num_rows, device=rows.device)

    def calls(*indices: Tensor) -> Calls:
        return [(rows[index], index) for index in indices]

    sizes = (num_rows, *filter(num_rows.__gt__, (2, 3, 5, 7, *(2**power for power in range(3, 13)))))
    probes = {
        "full batch" if size == num_rows else f"chunks of {size}": calls(*order.split(size))  # type: ignore[no-untyped-call]
        for size in sizes
    }
    probes["reversed"] = calls(order.flip(0))
    probes["permuted"] = calls(torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(order))
    paddings = {"zeros": 0.0}
    if rows.dtype.is_floating_point:
        # The square root, so that a huge row times numbers of ordinary size stays finite.
        paddings |= {"huge rows": math.sqrt(torch.finfo(rows.dtype).max), "NaN rows": math.nan}
    for what, value in paddings.items():
        padding, ignored = torch.full_like(rows, value), torch.full_like(order, -1)
        probes[f"{what} before"] = [(torch.cat([padding, rows]), torch.cat([ignored, order]))]
        probes[f"{what} after"] = [(torch.cat([rows, padding]), torch.cat([order, ignored]))]
    probes["strided storage"] = [(torch.stack([rows, rows], 1)[:, 0], order)]
    probes["transposed storage"] = [(rows.movedim(0, -1).contiguous().clone().movedim(-1, 0), order)]
    again = {name: calls(*order.split(1)) for name in _REFERENCES}  # type: ignore[no-untyped-call]
    return _report({name: (lambda: fn, found) for name, found in (again | probes).items()})


def check_sequence_invariance(
    fn: SequenceFunction,
    sequence: Tensor,
    *,
    make_decoder: Callable[[], SequenceFunction] | None = None,
) -> InvarianceReport:
    """Check that a causal ``fn`` computes the same bits for a position however the sequence is fed.

    The reference is ``fn(sequence)``, one forward over all of it. Probed are: repeated runs, shorter prefixes, decoding
    token by token, chunked prefill with several chunk sizes, and half a prefill and then decoding. Kinds are those of
    :attr:`~mis_ext.onpolicy.invariance.InvarianceReport.kind`; "batch-dependent" is an output that truly depends
    on later tokens, or on where a chunk ends.

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
            remembers them. Without it, decoding and chunked prefill are not probed.

    Raises:
        ValueError: The sequence has fewer than two tokens.
    """
    if sequence.dim() == 0 or len(sequence) < 2:
        raise ValueError(f"sequence must have at least 2 tokens, got shape {[*sequence.shape]}")
    sequence, num_tokens, half = sequence.detach(), len(sequence), len(sequence) // 2
    order = torch.arange(num_tokens, device=sequence.device)

    def prefixes(lengths: Iterable[int]) -> Calls:
        return [(sequence[order[:length]], order[:length]) for length in lengths]

    # Around powers of two, where kernels change their tiling, and the last ones.
    near = {2**power + shift for power in range(num_tokens.bit_length()) for shift in (-1, 0, 1)} | {num_tokens - 1}
    whole = {name: prefixes([num_tokens]) for name in _REFERENCES}
    whole["prefixes"] = prefixes(sorted(length for length in near if 0 < length < num_tokens))
    probes = {name: (lambda: fn, calls) for name, calls in whole.items()}
    if make_decoder is not None:
        splits = {"decode": [1] * num_tokens, f"prefill {half}, then decode": [half] + [1] * (num_tokens - half)}
        for size in filter(num_tokens.__gt__, (2, 3, 16, 64, 256, 1024)):
            starts = range(0, num_tokens, size)
            splits[f"chunked prefill of {size}"] = [min(size, num_tokens - start) for start in starts]
        for name, lengths in splits.items():
            indices = order.split(lengths)  # type: ignore[no-untyped-call]
            probes[name] = make_decoder, [(sequence[index], index) for index in indices]
    return _report(probes)


def _call(fn: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """``[n, ...]``: a copy of the outputs of ``fn`` for the ``n`` rows of ``batch``, which it may change."""
    num_rows = len(batch)
    outputs = fn(batch)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the function must return a tensor, got {type(outputs).__name__}")
    if outputs.shape[:1] != (num_rows,) or outputs.numel() == 0:
        raise ValueError(f"the function must return {num_rows} rows for {num_rows} rows, got shape {[*outputs.shape]}")
    # The function may use the same memory again in its next call.
    return outputs.detach().clone()


_REFERENCES = ("reference", "reference, again")


def _report(probes: Mapping[str, tuple[Callable[[], Callable[[Tensor], Tensor]], Calls]]) -> InvarianceReport:
    """Compare the outputs of each probe with those of the first, the reference; one that raises has failed."""
    found: list[Probe] = []
    expected: Tensor | None = None
    for name, (make, calls) in probes.items():
        try:
            fn = make()
            outputs = [_call(fn, batch)[index >= 0] for batch, index in calls]
            if len(dtypes := {each.dtype for each in outputs}) > 1:
                # Concatenated, they would be cast to the widest.
                raise TypeError(f"the function returns {' and '.join(sorted(map(str, dtypes)))}")
            index = torch.cat([index[index >= 0] for _, index in calls])
            if expected is None:
                expected = torch.cat(outputs)[index.argsort()]
                continue
            probe = _difference(name, index, torch.cat(outputs), expected[index])
            if name in _REFERENCES and probe.num_different:
                probe = replace(probe, outcome="not repeatable")
        except Exception as error:
            probe = Probe(name=name, outcome="failed", note=f"{type(error).__name__}: {error}".splitlines()[0])
        found.append(probe)
        if expected is None:
            break
    return InvarianceReport(probes=tuple(found))


def _difference(name: str, index: Tensor, outputs: Tensor, expected: Tensor) -> Probe:
    is_different = ~same_bits(outputs, expected)
    different = sorted({*index[is_different.flatten(1).any(1) if outputs.dim() > 1 else is_different].tolist()})
    if not different:
        return Probe(name=name, outcome="equal")
    eps = torch.finfo(outputs.dtype).eps if outputs.is_floating_point() or outputs.is_complex() else 2.0**-23
    outputs, expected = (as_real(x).double() for x in (outputs, expected))
    is_finite = outputs.isfinite() & expected.isfinite()
    distance = torch.where(is_finite, (outputs - expected).abs(), math.inf)
    # Of the same NaN or infinity on both sides there is no difference.
    distance = torch.where((outputs == expected) | (outputs.isnan() & expected.isnan()), 0.0, distance)
    largest = torch.where(is_finite, torch.maximum(outputs.abs(), expected.abs()), 0.0).max()
    return Probe(
        name=name,
        outcome="rounding" if distance.max() <= math.sqrt(eps) * largest else "batch-dependent",
        num_different=len(different),
        first_different=different[0],
        max_abs_diff=float(distance.max()),
    )
