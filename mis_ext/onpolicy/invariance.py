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

import dataclasses
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mis_ext.onpolicy.bits import FLOAT_DTYPES, as_real, same_bits, ulp_distance

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
    :attr:`~mis_ext.onpolicy.invariance.InvarianceReport.kind`; "batch-dependent" is an output that truly depends
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


Kind = Literal["invariant", "rounding", "batch-dependent", "not repeatable", "failed"]
Outcome = Literal["equal", "rounding", "batch-dependent", "not repeatable", "failed", "not run"]
Judge = Literal["float64", "magnitude", "non-finite"]

_REPEATS = 3
_EPS_64 = torch.finfo(torch.float64).eps
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one probe found: its name, its outcome, and by how much rows differ.

    Attributes:
        name: What was done.
        outcome: "equal" is the only pass.
        num_rows: Distinct rows compared.
        num_different: Those of them with other bits than the reference, in any of the probe's calls.
        first_different: Index of the first of them.
        max_abs_diff: Largest difference; infinite where a number is finite on one side only. None: nothing compared.
        max_ulp: Largest distance in units in the last place, over finite numbers.
        judged_by: What told rounding from true dependence.
        note: The error of a failed probe; why a probe was not run.
    """

    name: str
    outcome: Outcome
    num_rows: int = 0
    num_different: int = 0
    first_different: int | None = None
    max_abs_diff: float | None = None
    max_ulp: int | None = None
    judged_by: Judge | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """All probes of a function, and what they add up to."""

    probes: tuple[Probe, ...]

    @property
    def kind(self) -> Kind:
        """The gravest outcome of all probes.

        - "not repeatable": the same call gave other bits, so nothing else can be told.
        - "batch-dependent": rows truly depend on what else is in the call.
        - "failed": a probe raised, or there was nothing to compare.
        - "rounding": rows differ by rounding only.
        - "invariant": every probe that ran found equal bits.
        """
        outcomes = {probe.outcome for probe in self.probes}
        grave: tuple[Kind, ...] = ("not repeatable", "batch-dependent", "failed", "rounding")
        for kind in grave:
            if kind in outcomes:
                return kind
        return "invariant" if "equal" in outcomes else "failed"

    @property
    def invariant(self) -> bool:
        """Every probe that ran found the bits of the reference, and none failed; see the table for those not run."""
        return self.kind == "invariant"

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON."""
        return {
            "kind": self.kind,
            "invariant": self.invariant,
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
        }

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [
            ("probe", "outcome", "rows", "differ", "first", "max abs", "max ulp", "judged by")
        ]
        for probe in self.probes:
            num_different = probe.num_different if probe.num_rows else None
            max_abs_diff = None if probe.max_abs_diff is None else f"{probe.max_abs_diff:.3g}"
            numbers = (probe.num_rows or None, num_different, probe.first_different, max_abs_diff, probe.max_ulp)
            shown = ["-" if number is None else str(number) for number in numbers]
            table.append((probe.name, probe.outcome, *shown, probe.note or probe.judged_by or ""))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, (*widths[:-1], 0))).rstrip() for row in table]
        count = {outcome: sum(probe.outcome == outcome for probe in self.probes) for outcome in ("equal", "not run")}
        ran = len(self.probes) - count["not run"]
        skipped = f", {count['not run']} not run" if count["not run"] else ""
        return "\n".join([f"{self.kind}: {count['equal']} of {ran} probes found equal bits{skipped}", *lines])


class Piece(NamedTuple):
    """Outputs ``[n, ...]`` of one call, and which rows they are of, ``[n]``."""

    row_index: Tensor
    outputs: Tensor


Body = Callable[[Tensor], list[Piece]]
"""One probe: from the rows to the outputs of its calls."""


class Probing:
    """Runs probes over the same rows and collects what they found; a body that raises is a failed probe.

    Args:
        rows: ``[N, ...]``, given to every body; a body copies what it hands to the function.
        references: By name; the first that does not raise is what :meth:`compare` compares with.
    """

    def __init__(self, rows: Tensor, references: Mapping[str, Body]) -> None:
        self._rows = rows.detach()
        self._results: list[Probe] = []
        self._reference: Body | None = None
        self._repeatable = True
        for name, body in references.items():
            outputs = _attempt(self._run, body)
            if not isinstance(outputs, Exception):
                self._reference, self._expected = body, outputs
                break
            self._results.append(_failed(name, outputs))

    @property
    def has_reference(self) -> bool:
        """Whether there is anything to compare with."""
        return self._reference is not None

    def report(self) -> InvarianceReport:
        """The report of all probes so far, those not run included."""
        return InvarianceReport(probes=tuple(self._results))

    def skip(self, name: str, why: str) -> None:
        """List a probe that cannot be run."""
        self._results.append(Probe(name=name, outcome="not run", note=why))

    def repeat(self, name: str, body: Body) -> None:
        """Compare more runs of ``body`` with its first; to be called before :meth:`compare`, which heeds the result."""

        def run_again() -> _Difference:
            expected = self._run(body)
            return _difference([piece for _ in range(_REPEATS) for piece in body(self._rows)], expected)

        found = _attempt(run_again)
        if not isinstance(found, Exception) and found.num_different:
            self._repeatable = False
        self._add(name, found, body)

    def compare(self, name: str, body: Body) -> None:
        """Compare the outputs of ``body`` with the reference."""
        self._add(name, _attempt(lambda: _difference(body(self._rows), self._expected)), body)

    def also(self, name: str, rows: Tensor, reference: Body, body: Body) -> None:
        """Compare the outputs of two bodies for other rows; to be called after :meth:`repeat`."""
        other = Probing(rows, {name: reference})
        other._repeatable = self._repeatable
        if other.has_reference:
            other.compare(name, body)
        self._results += other._results

    def _run(self, body: Body) -> Tensor:
        return _assemble(body(self._rows))

    def _add(self, name: str, found: _Difference | Exception, body: Body) -> None:
        if isinstance(found, Exception):
            self._results.append(_failed(name, found))
            return
        outcome, judged_by = self._judge(found, body)
        counts = found._asdict()
        del counts["scale"]
        self._results.append(Probe(name=name, outcome=outcome, judged_by=judged_by, **counts))

    def _judge(self, found: _Difference, body: Body) -> tuple[Outcome, Judge | None]:
        if not found.num_different:
            return "equal", None
        if not self._repeatable:
            return "not repeatable", None
        if not math.isfinite(found.max_abs_diff):
            return "batch-dependent", "non-finite"
        eps = _coarsest_eps(self._rows.dtype, self._expected.dtype)
        exact: _Difference | Exception | None = None
        if eps > _EPS_64 and not isinstance(expected := self._expected_64, Exception):
            exact = _attempt(lambda: _difference(self._in_float64(body), expected))
        if exact is None or isinstance(exact, Exception):
            is_rounding = found.max_abs_diff <= math.sqrt(eps) * found.scale
            return ("rounding" if is_rounding else "batch-dependent"), "magnitude"
        # Signed zeros differ in bits and by 0.
        limit = found.max_abs_diff * math.sqrt(_EPS_64 / eps)
        is_rounding = found.max_abs_diff == 0.0 or exact.max_abs_diff <= limit
        return ("rounding" if is_rounding else "batch-dependent"), "float64"

    @cached_property
    def _expected_64(self) -> Tensor | Exception:
        reference = self._reference
        assert reference is not None
        return _attempt(lambda: _assemble(self._in_float64(reference)))

    def _in_float64(self, body: Body) -> list[Piece]:
        rows = self._rows.double() if self._rows.is_floating_point() else self._rows
        with torch.no_grad(), warnings.catch_warnings(), InFloat64():  # type: ignore[no-untyped-call]
            # Of mixed dtypes, for which some operators have no fused kernel.
            warnings.simplefilter("ignore")
            pieces = body(rows)
        outputs = [as_real(piece.outputs) for piece in pieces]
        if any(x.is_floating_point() and x.dtype != torch.float64 for x in outputs):
            raise TypeError("the function does not compute in float64")
        return pieces


def call_rows(fn: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """``[n, ...]``: a copy of the outputs of ``fn`` for the ``n`` rows of ``batch``."""
    num_rows = len(batch)
    outputs = fn(batch)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the function must return a tensor, got {type(outputs).__name__}")
    if outputs.shape[:1] != (num_rows,) or outputs.numel() == 0:
        raise ValueError(f"the function must return {num_rows} rows for {num_rows} rows, got shape {[*outputs.shape]}")
    # The function may use the same memory again in its next call.
    return outputs.detach().clone()


class _Difference(NamedTuple):
    num_rows: int
    num_different: int
    first_different: int | None
    max_abs_diff: float
    max_ulp: int | None
    scale: float


def _difference(pieces: list[Piece], expected: Tensor) -> _Difference:
    index, outputs = _join(pieces)
    outputs, expected = as_real(outputs), as_real(expected[index])
    differs = ~same_bits(outputs, expected).reshape(len(index), -1).all(1)
    different = torch.unique(index[differs])
    max_ulp = None
    if outputs.dtype in FLOAT_DTYPES:
        comparable = outputs.isfinite() & expected.isfinite()
        max_ulp = int(torch.where(comparable, ulp_distance(outputs, expected), 0).max())
    return _Difference(
        num_rows=len(torch.unique(index)),
        num_different=len(different),
        first_different=int(different[0]) if len(different) else None,
        max_abs_diff=float(_distance(outputs, expected).max()),
        max_ulp=max_ulp,
        scale=max(_largest(outputs), _largest(expected)),
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, float64: 0 between equals and between NaNs, infinite where only one side is finite."""
    a, b = a.double(), b.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(equal, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _largest(x: Tensor) -> float:
    x = x.double()
    return float(torch.where(x.isfinite(), x, 0).abs().max())


def _assemble(pieces: list[Piece]) -> Tensor:
    """``[N, ...]``: the outputs in the order of the rows."""
    index, outputs = _join(pieces)
    return outputs[index.argsort()]


def _join(pieces: list[Piece]) -> Piece:
    dtypes = {piece.outputs.dtype for piece in pieces}
    if len(dtypes) > 1:
        # Concatenated, they would be cast to the widest.
        raise TypeError(f"the function returns {' and '.join(sorted(map(str, dtypes)))}")
    return Piece(torch.cat([piece.row_index for piece in pieces]), torch.cat([piece.outputs for piece in pieces]))


def _coarsest_eps(*dtypes: torch.dtype) -> float:
    """The largest machine epsilon of the floating-point dtypes; float32's where there is none."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((torch.finfo(dtype).eps for dtype in floats), default=2.0**-23)


def _attempt(run: Callable[..., _T], *arguments: Any) -> _T | Exception:
    try:
        return run(*arguments)
    except Exception as error:
        return error


def _failed(name: str, error: Exception) -> Probe:
    return Probe(name=name, outcome="failed", note=f"{type(error).__name__}: {error}".splitlines()[0])


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operator computes in float64 (complex128), whatever the dtype of its arguments.

    Parameters, closed-over tensors and explicit casts (``x.float()`` in a norm, ``.to(torch.bfloat16)`` after it) are
    widened operator by operator, which ``module.double()`` would not do. A kernel that is no operator at all (Triton's,
    called directly) is not reached.

    Raises:
        TypeError: An operator writes into a tensor of lower precision, which rounds, or is not PyTorch's own, so that
            nobody knows how precisely it computes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            raise TypeError(f"{func} is not known to compute in float64")
        # Without autograd (inference mode) casts arrive here before they are taken apart.
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        aliased = [argument for argument in func._schema.arguments if argument.alias_info is not None]
        if (aliased and not func._schema.is_mutable) or func is torch.ops.aten.clone.default:
            # A view or a copy stays what it is; whatever computes with it widens it.
            return func(*args, **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in aliased:
            value = given.get(argument.name)
            if isinstance(value, Tensor) and value.dtype != _wide(value.dtype):
                raise TypeError(f"{func} writes into a tensor of {value.dtype}")
        # Outputs too: a factory without a dtype makes the default one.
        return tree_map(_widen, func(*tree_map(_widen, args), **tree_map(_widen, kwargs)))


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(_wide(value.dtype))
    return _wide(value) if isinstance(value, torch.dtype) else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128; integers stay."""
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
