# SPDX-License-Identifier: Apache-2.0
"""Random runs of torch's operators in the batch-invariant mode: a row alone must have the bits that it has in a batch.

``python lab/benchmarks/fuzz_operators.py --runs 10000`` draws operators of all that the mode does not refuse, operands
of mixed dtypes, odd widths, broadcast, without dimensions and of one element, layouts, a dimension of rows, and numbers
of threads. A run counts where the function is about rows: computed in float64 without the mode, the row alone is the
row of the batch within rounding.

``--samples`` takes the calls with which torch tests its own operators instead (``op_db``; needs ``expecttest``), each
as it is, with tensors without dimensions, and by keyword: in the mode it gives the same within rounding, or is refused.
"""

from __future__ import annotations

import argparse
import inspect
import platform
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_leaves, tree_map_only

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.batch_invariant.overrides import kind_of
from mis_ext.onpolicy.bits import as_real, same_bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
# A view may have more numbers than there is memory.
_MOST = 1 << 24
_MOST_MEMORY = 16 << 30
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, NotImplementedError)

# They draw numbers, use memory that nobody wrote, or are about the batch by their meaning.
_NOT_OF_ROWS = ("rand", "empty", "dropout", "batch_norm", "resize", "as_strided", "_fused_", "set_", "segment_reduce")
# With a bin for each combination of the columns' bins, one call takes all memory.
_NOT_OF_ROWS += ("histogram",)
# Inner operators, which begin with a low line, write outside of their memory where arguments do not fit: but for these.
_CHECKED = ("_foreach_", "_softmax", "_log_softmax", "_to_copy")
_OTHER_FORMATS = ("fbgemm", "quant", "sparse", "moving_avg")
# What they return has the square of the numbers that they get.
_SQUARES = ("diagflat", "diag_embed", "kron", "combinations", "cartesian_prod", "cov", "corrcoef", "vander")


OUTCOMES = ("same", "refused", "no call", "not of rows")


class Draw(NamedTuple):
    """One call: which of its operands have rows, and in which dimension."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    num_rows: int
    axis: int
    num_dims: int

    def of_rows(self, rows: slice) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of some rows; operands without a dimension of rows are shared."""

        def part(x: Tensor) -> Tensor:
            axis = self.axis - self.num_dims + x.dim()
            has_rows = axis >= 0 and x.shape[axis] == self.num_rows
            return x[(slice(None),) * axis + (rows,)] if has_rows else x

        return tree_map_only(Tensor, part, self.args), tree_map_only(Tensor, part, self.kwargs)


def operators() -> list[Any]:
    """All forms of torch's own that get a tensor, return one, and are not refused."""
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    packets = dict.fromkeys(getattr(torch.ops.aten, name[6:].split(".")[0], None) for name in names)
    forms = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    return [func for func in forms if _is_drawn(func)]


def _is_drawn(func: Any) -> bool:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    takes = [str(x.type) for x in arguments]
    if any(part in name for part in _NOT_OF_ROWS + _OTHER_FORMATS + _SQUARES):
        return False
    if name.startswith("_") and not name.startswith(_CHECKED):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or not torch._C._dispatch_has_kernel(func.name()):
        return False
    gives_memory = any(x.kwarg_only and x.alias_info is not None and x.alias_info.is_write for x in arguments)
    if gives_memory or "backward" in name or not any("Tensor" in kind for kind in takes):
        return False
    return kind_of(func) != "refused" or func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def draw(func: Any, rng: random.Random) -> Draw:
    """Arguments by the types of the schema."""
    # Of one dimension, a reduction is over the rows.
    has_dims = any("dim" in argument.name for argument in func._schema.arguments)
    num_dims = rng.choice([2 if has_dims else 1, 2, 2, 2, 3, 3, 4])
    axis = rng.randrange(max(1, num_dims - 1)) if num_dims > 2 else 0
    num_rows = rng.choice([2, 3, 5, 17, 33])
    shape = [rng.choice([1, 2, 3, 4, 7]) for _ in range(num_dims)]
    widths = [1, 3, 8, 31, 33, 63, 65, 127, 300, 1001]
    shape[-1] = rng.choice(widths)
    if num_dims == 2 and rng.random() < 0.02 and (torch.Tag.pointwise in func.tags or has_dims):
        # Alone, such a row is one that threads share.
        shape = [2, 33_001]
        num_rows = 2
    if rng.random() < 0.3:
        # A row alone is one number, as a length or a mean is.
        shape = [1] * num_dims
    shape[axis] = num_rows
    dtype, is_mixed = rng.choice(FLOATS), rng.random() < 0.6
    generator = torch.Generator().manual_seed(rng.randrange(10**6))

    def operand(first: bool) -> Tensor:
        own = dtype
        if is_mixed and not (first and rng.random() < 0.5):
            own = rng.choice(FLOATS + INTEGERS)
        own_shape = list(shape)
        if not first and rng.random() < 0.5:
            own_shape = [1 if rng.random() < 0.4 else n for n in shape][rng.choice([0, 0, 0, num_dims - 1, num_dims]) :]
        x = torch.randn(own_shape, generator=generator, dtype=torch.float64) * rng.choice([1.0, 1.0, 10.0, 2000.0])
        x = x.abs() if rng.random() < 0.4 else x
        x = x.to(own) if own.is_floating_point else x.abs().to(torch.int64).to(own)
        layout = rng.random()
        if layout < 0.15:
            return torch.stack([x, x], -1)[..., 0]
        return x.movedim(0, -1).contiguous().movedim(-1, 0) if layout < 0.3 else x

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    num_tensors = 0
    for argument in func._schema.arguments:
        value = _value(str(argument.type), argument, rng, num_dims, axis)
        if value is _TENSOR:
            value, num_tensors = operand(num_tensors == 0), num_tensors + 1
        elif value is _TENSORS:
            value, num_tensors = [operand(num_tensors == 0) for _ in range(2)], num_tensors + 1
        elif value is _DEFAULT:
            if not argument.kwarg_only:
                args.append(argument.default_value)
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Draw(func, args, kwargs, num_rows, axis, num_dims)


_TENSOR, _TENSORS, _DEFAULT = object(), object(), object()


def _value(kind: str, argument: Any, rng: random.Random, num_dims: int, axis: int) -> Any:
    """Of an argument: a mark where it is a tensor, or its default."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return _TENSOR if kind == "Tensor" or rng.random() < 0.5 else None
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return _TENSORS
    if argument.name in ("dtype", "layout", "device", "pin_memory", "memory_format"):
        wider = argument.name == "dtype" and rng.random() < 0.3
        return rng.choice(FLOATS) if wider else _DEFAULT if argument.has_default_value() else torch.float32
    others = [dim for dim in range(num_dims) if dim != axis] or [0]
    if "dim" in argument.name and kind in ("int", "Optional[int]"):
        dim = rng.choice([others[-1], rng.choice(others)])
        return dim - num_dims if rng.random() < 0.5 else dim
    if "dim" in argument.name and kind in ("List[int]", "Optional[List[int]]"):
        return rng.sample(others, rng.randint(1, len(others))) if rng.random() < 0.7 else [others[-1]]
    if argument.has_default_value() and rng.random() < 0.5:
        return _DEFAULT
    simple: dict[str, Any] = {
        "number": rng.choice([2, 0.7, -1.3, 3]),
        "float": rng.choice([0.7, 2.0, 0.1]),
        "int": rng.choice([1, 2, 3]),
        "bool": rng.random() < 0.5,
        "str": rng.choice(["floor", "trunc", "none", "tanh"]),
    }
    for name, value in simple.items():
        if kind in (name, f"Optional[{name}]"):
            return None if kind != name and rng.random() < 0.3 else value
    if kind in ("List[int]", "Optional[List[int]]"):
        return [rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 2]))]
    return _DEFAULT if argument.has_default_value() else None


def run(one: Draw, rng: random.Random) -> str:
    """One of ``OUTCOMES``, or what differs silently."""
    start = rng.randrange(one.num_rows)
    parts = [slice(start, start + 1), slice(0, rng.randint(1, one.num_rows))]
    whole = slice(None)
    torch.set_num_threads(1)
    try:
        exact = [_in_float64(one, rows) for rows in (whole, *parts)]
    except _ERRORS:
        exact = None
    try:
        with batch_invariant_mode():
            torch.set_num_threads(rng.randint(1, 3))
            expected = _call(one, whole)
            ours = []
            for rows in parts:
                torch.set_num_threads(rng.randint(1, 3))
                ours.append(_call(one, rows))
    except NotImplementedError as error:
        return "refused" if "batch-invariant" in str(error) else "no call"
    except _ERRORS:
        return "no call"
    judged = [_compare(expected, ours[i], rows, one, exact, i) for i, rows in enumerate(parts)]
    return next((x for x in judged if x not in ("same", "not of rows")), judged[0])


def _call(one: Draw, rows: slice) -> list[Tensor]:
    args, kwargs = one.of_rows(rows)
    if one.func._schema.is_mutable:
        args, kwargs = tree_map_only(Tensor, Tensor.clone, args), tree_map_only(Tensor, Tensor.clone, kwargs)
    returned = [x for x in tree_leaves(one.func(*args, **kwargs)) if isinstance(x, Tensor)]
    returned = [x for x in returned if x.layout == torch.strided]
    if any(x.numel() > _MOST for x in returned):
        raise ValueError(f"more than {_MOST} numbers")
    return returned


def _in_float64(one: Draw, rows: slice) -> list[Tensor]:
    wide = lambda x: x.double() if x.is_floating_point() else x  # noqa: E731
    args, kwargs = tree_map_only(Tensor, wide, one.args), tree_map_only(Tensor, wide, one.kwargs)
    kwargs = {name: torch.float64 if value in FLOATS else value for name, value in kwargs.items()}
    args = [torch.float64 if isinstance(x, torch.dtype) else x for x in args]
    return _call(one._replace(args=args, kwargs=kwargs), rows)


def _compare(
    batch: list[Tensor], part: list[Tensor], rows: slice, one: Draw, exact: list[list[Tensor]] | None, index: int
) -> str:
    if not batch:
        return "not of rows"
    found = "not of rows"
    num_part = rows.stop - rows.start
    for number, (whole, ours) in enumerate(zip(batch, part, strict=False)):
        axis = _axis_of_rows(whole, ours, one, num_part)
        if axis is None:
            continue
        theirs = whole[(slice(None),) * axis + (rows,)]
        truth = None
        if exact is not None and len(exact[0]) > number < len(exact[index + 1]):
            truth = exact[0][number], exact[index + 1][number]
        if not _is_of_rows(truth, theirs, ours, axis, rows):
            continue
        found = "same" if found == "not of rows" else found
        a, b = as_real(theirs.resolve_neg()), as_real(ours.resolve_neg())
        if a.dtype != b.dtype:
            return f"dtype {a.dtype} {b.dtype}"
        different = ~(same_bits(a, b) | (a != a) & (b != b)) if a.is_floating_point() else a != b
        if different.any():
            return f"{int(different.sum())} of {different.numel()} numbers"
    return found


def _axis_of_rows(whole: Tensor, ours: Tensor, one: Draw, num_part: int) -> int | None:
    if whole.dim() != ours.dim() or num_part == one.num_rows:
        return None
    axes = [i for i, (n, m) in enumerate(zip(whole.shape, ours.shape, strict=True)) if n != m]
    if len(axes) != 1 or (whole.shape[axes[0]], ours.shape[axes[0]]) != (one.num_rows, num_part):
        return None
    return axes[0]


def _is_of_rows(truth: tuple[Tensor, Tensor] | None, theirs: Tensor, ours: Tensor, axis: int, rows: slice) -> bool:
    """Whether the mathematics of the row alone is that of the row in the batch."""
    if truth is None:
        a, b, tolerance = theirs, ours, 3e-2
    else:
        whole, b = truth
        if whole.dim() != theirs.dim() or whole.shape[axis] < rows.stop:
            return False
        a, tolerance = whole[(slice(None),) * axis + (rows,)], 1e-7
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool((a == b).all())
    a, b = as_real(a).double(), as_real(b).double()
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def fuzz(num_runs: int, seed: int, *, seconds: float = float("inf")) -> Iterator[tuple[Draw, str]]:
    """Draws and their outcomes, until as many were of rows, or the time is over."""
    rng, forms, end, done = random.Random(seed), operators(), time.monotonic() + seconds, 0
    threads = torch.get_num_threads()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while done < num_runs and time.monotonic() < end:
                one = draw(rng.choice(forms), rng)
                outcome = run(one, rng)
                done += outcome not in OUTCOMES[1:]
                yield one, outcome
    finally:
        torch.set_num_threads(threads)


class Sample(NamedTuple):
    """One call with which torch tests itself; ``way`` says what was changed of it."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    way: str


def samples(names: str = "") -> Iterator[Sample]:
    """All calls of operators with ``names`` in theirs."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if names not in info.name or any(part in info.name for part in _NOT_OF_ROWS + _OTHER_FORMATS):
            continue
        for dtype in {torch.float32, torch.bfloat16, torch.int64} & info.supported_dtypes("cpu"):
            for sample in info.sample_inputs("cpu", dtype):
                yield from _ways(Sample(info.op, [sample.input, *sample.args], sample.kwargs, "as it is"))


def _ways(one: Sample) -> Iterator[Sample]:
    yield one
    if all(x.numel() for x in tree_leaves((one.args, one.kwargs)) if isinstance(x, Tensor)):
        args, kwargs = tree_map_only(Tensor, lambda x: x.reshape(-1)[0], (one.args, one.kwargs))
        yield Sample(one.func, args, kwargs, "without dimensions")
    if (signature := get_testing_overrides().get(one.func)) is not None:
        named = dict(zip(inspect.signature(signature).parameters, one.args, strict=False))
        yield Sample(one.func, [], {**named, **one.kwargs}, "by keyword")


def check(one: Sample) -> str:
    """One of ``OUTCOMES``, or how the call differs in the mode."""
    try:
        plain = _returned(one)
    except Exception:
        return "no call"
    try:
        with batch_invariant_mode():
            ours = _returned(one)
    except Exception as error:
        is_refused = isinstance(error, NotImplementedError) and "batch-invariant" in str(error)
        return "refused" if is_refused else f"{type(error).__name__}: {error}"
    operands = [x for x in tree_leaves((one.args, one.kwargs)) if isinstance(x, Tensor)]
    for a, b in zip(plain, ours, strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype} {[*a.shape]}, in the mode {b.dtype} {[*b.shape]}"
        if a.dtype == torch.int64 and any(x.is_floating_point() for x in operands):
            # Places, as a sort has: of equal numbers they may be others.
            continue
        wide, width = (x.double() if not x.is_complex() else torch.view_as_real(x).double() for x in (a, b))
        tolerance = 3e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
        if not torch.allclose(wide, width, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"another result, by {(wide - width).abs().max():.2g}"
    return "same"


def _returned(one: Sample) -> list[Tensor]:
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (one.args, one.kwargs))
    torch.manual_seed(0)
    returned = tree_leaves(one.func(*args, **kwargs))
    return [x for x in returned if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized]


def search(names: str, *, seconds: float) -> bool:
    """Print each way of a call that differs in the mode, once, and the counts."""
    end, counts, known = time.monotonic() + seconds, Counter[str](), set[tuple[str, str, str]]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in samples(names):
            if time.monotonic() > end:
                print(f"the time is over at {one.func}")
                break
            outcome = check(one)
            counts[outcome if outcome in OUTCOMES else "differs"] += 1
            name = getattr(one.func, "__name__", str(one.func))
            if outcome not in OUTCOMES and (name, one.way, outcome[:20]) not in known:
                known.add((name, one.way, outcome[:20]))
                print(f"{name} {one.way}: {outcome[:200]}: {_short((one.args, one.kwargs))}", flush=True)
    print(dict(counts))
    return bool(known)


def _short(operands: Any) -> Any:
    return tree_map_only(Tensor, lambda x: f"{str(x.dtype)[6:]}{[*x.shape]}", operands)


def described(one: Draw) -> str:
    """The operator, and its operands' dtypes and shapes."""
    return f"{one.func} {_short((one.args, one.kwargs))} rows in {one.axis}"


def main() -> None:
    """Run, and print what differs and the counts; exit with 1 where a row differs silently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="runs that are about rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--samples",
        nargs="?",
        const="",
        metavar="NAME",
        help="take torch's own samples; NAME: of some operators",
    )
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if options.samples is not None:
        sys.exit(search(options.samples, seconds=options.seconds))
    counts: Counter[str] = Counter()
    judged: Counter[Any] = Counter()
    silent: Counter[Any] = Counter()
    start = time.monotonic()
    for one, outcome in fuzz(options.runs, options.seed, seconds=options.seconds):
        kind = outcome if outcome in OUTCOMES else "silent"
        counts[kind] += 1
        if kind == "same":
            judged[one.func] += 1
        if kind == "silent":
            silent[one.func] += 1
            print(f"{outcome}: {described(one)}", flush=True)
    print(f"{platform.machine()} CPU, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{dict(counts)}; {len(judged | silent)} operators; {time.monotonic() - start:.0f} s")
    for func, number in silent.most_common():
        print(f"{func}: {number} silent, {judged[func]} same")
    sys.exit(bool(silent))


if __name__ == "__main__":
    main()
