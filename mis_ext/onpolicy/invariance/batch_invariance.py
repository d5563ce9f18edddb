"""Does a row of the output depend on what else is in the batch, and if it does: through rounding, or truly?

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mis_ext.onpolicy.invariance.probes import Body, InvarianceReport, Piece, Probing, call_rows

_CHUNK_SIZES = (2, 3, 5, 7, *(2**power for power in range(3, 13)))
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
    alone, whole = _chunks(fn, 1), _whole(fn)
    probing = Probing(rows, {"each row alone": alone, "full batch": whole})
    if not probing.has_reference:
        return probing.report()
    probing.repeat("each row alone, again", alone)
    probing.repeat("full batch, again", whole)
    probing.compare("full batch", whole)
    rng = random.Random(seed)
    drawn_sizes = _drawn(rng, [size for size in range(2, len(rows)) if size not in _CHUNK_SIZES])
    for size in [*filter(len(rows).__gt__, _CHUNK_SIZES), *drawn_sizes]:
        probing.compare(f"chunks of {size}", _chunks(fn, size))
    probing.compare("reversed", _permuted(fn, torch.arange(len(rows)).flip(0)))
    probing.compare("permuted", _permuted(fn, torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))))

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
            probing.compare(name, _threaded([alone, *(_chunks(fn, size) for size in sizes), whole], count))
        else:
            probing.skip(name, f"rows are on {rows.device.type}")
    if rows.dtype.is_floating_point:
        for factor in [rng.randint(2, _LARGEST_FACTOR) for _ in range(_NUM_DRAWN)]:
            probing.also(f"rows times {factor}", rows * factor, alone, whole)
    return probing.report()


def _drawn(rng: random.Random, choices: list[int]) -> list[int]:
    return sorted(rng.sample(choices, min(_NUM_DRAWN, len(choices))))


def _chunks(fn: Callable[[Tensor], Tensor], size: int) -> Body:
    def body(rows: Tensor) -> list[Piece]:
        return [Piece(index, call_rows(fn, rows[index])) for index in torch.split(_all(rows), size)]

    return body


def _whole(fn: Callable[[Tensor], Tensor], store: Callable[[Tensor], Tensor] = Tensor.clone) -> Body:
    return lambda rows: [Piece(_all(rows), call_rows(fn, store(rows)))]


def _permuted(fn: Callable[[Tensor], Tensor], order: Tensor) -> Body:
    def body(rows: Tensor) -> list[Piece]:
        index = order.to(rows.device)
        return [Piece(index, call_rows(fn, rows[index]))]

    return body


def _padded(fn: Callable[[Tensor], Tensor], value: float, *, before: bool) -> Body:
    def body(rows: Tensor) -> list[Piece]:
        padding, num_rows = torch.full_like(rows, value), len(rows)
        outputs = call_rows(fn, torch.cat([padding, rows] if before else [rows, padding]))
        return [Piece(_all(rows), outputs[num_rows:] if before else outputs[:num_rows])]

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


def _all(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)
