# SPDX-License-Identifier: Apache-2.0
"""What batch-invariant kernels cost: each Triton kernel against the torch operation that it stands in for.

    python lab/benchmarks/bench_batch_invariant.py [--repeats 20]
    python lab/benchmarks/bench_batch_invariant.py --smoke     # tiny shapes, no times; on a CPU in Triton's interpreter

Before a kernel is timed, rows of its result must be those of float64 within the rounding of the dtype, and have the
bits that they have when computed alone; a kernel that fails ends the run. Times are those of the device, which starts
when the host has handed over ten calls: medians, contenders in turn in the same run. What the host needs for a call
stands beside them; a decode that no CUDA graph has captured waits for it. Where Megatron-Core imports, its
``matmul_persistent`` is timed too, and its bits are compared with ours. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from device_time import device_milliseconds
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import triton
from interpreted import dot_row_by_row

from mis_ext.onpolicy.batch_invariant import triton_attention as attention
from mis_ext.onpolicy.batch_invariant import triton_products as products
from mis_ext.onpolicy.batch_invariant import triton_reductions as reductions
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing
from mis_ext.onpolicy.bits import same_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HOST_CALLS = 20
COLUMNS = [
    *("kernel", "shape", "dtype", "ours ms", "torch ms", "ours / torch", "Megatron-Core ms", "its bits"),
    *("ours host us", "torch host us"),
]


class Case(NamedTuple):
    """A kernel on one input, what it is compared with, and how some of its rows are checked."""

    name: str
    shape: str
    dtype: torch.dtype
    ours: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    checked: Callable[[Tensor], Tensor]
    alone: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    megatron: Callable[[], Tensor] | None = None


def main(arguments: list[str] | None = None) -> None:
    """Check, time and print, a kernel after the other."""
    options = _parse(arguments)
    torch.manual_seed(0)
    if DEVICE.type == "cpu":
        import_module("triton.runtime.interpreter").InterpreterBuilder.create_dot = dot_row_by_row
    hardware = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()} CPU, interpreted"
    print(f"{hardware}; torch {torch.__version__}, triton {triton.__version__}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for case in _cases(smoke=options.smoke):
        _check(case)
        times, host = (
            (["right", "", "", ""], ["", ""]) if options.smoke else (_times(case, options.repeats), _host_times(case))
        )
        cells = [case.name, case.shape, str(case.dtype)[6:], *times, _megatron_bits(case), *host]
        print(f"| {' | '.join(cells)} |", flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, checks only")
    parser.add_argument("--repeats", type=int, default=20, help="medians are over so many measurements")
    options = parser.parse_args(arguments)
    if DEVICE.type == "cpu" and not options.smoke:
        parser.error("times need a CUDA device; --smoke checks the kernels on a CPU")
    return options


def _check(case: Case) -> None:
    actual, exact = case.checked(case.ours()), case.exact()
    error = float((actual.double() - exact).norm() / exact.norm())
    if not error <= TOLERANCE[case.dtype]:
        sys.exit(f"{case.name} {case.shape} {case.dtype}: relative error {error:.1e}")
    if not same_bits(actual, case.alone()).all():
        sys.exit(f"{case.name} {case.shape} {case.dtype}: other bits in a batch than alone")


def _times(case: Case, repeats: int) -> list[str]:
    contenders = [case.ours, case.torch, *([case.megatron] if case.megatron else [])]
    # Each in turn; the first round compiles.
    rounds = [[device_milliseconds(contender) for contender in contenders] for _ in range(repeats + 1)][1:]
    ours, plain, *theirs = map(statistics.median, zip(*rounds, strict=True))
    return [f"{ours:.3f}", f"{plain:.3f}", f"{ours / plain:.2f}", f"{theirs[0]:.3f}" if theirs else ""]


def _host_times(case: Case) -> list[str]:
    return [f"{_host_microseconds(call):.0f}" for call in (case.ours, case.torch)]


def _host_microseconds(call: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - started) / HOST_CALLS * 1e6


def _megatron_bits(case: Case) -> str:
    if case.megatron is None:
        return ""
    return "ours" if same_bits(case.megatron(), case.ours()).all() else "others"


def _cases(*, smoke: bool) -> Iterator[Case]:
    half = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
    for dtype in (half, torch.float32):
        for M, K, N in (
            [(5, 40, 70)] if smoke else [(8192, 2048, 2048), (8192, 2048, 8192), (1, 2048, 8192), (16, 2048, 8192)]
        ):
            yield _product("mm", _random(M, K, dtype=dtype), _random(N, K, dtype=dtype).t())
        M, K, N = (40, 5, 70) if smoke else (2048, 8192, 2048)
        yield _product("mm, weight gradient", _random(K, M, dtype=dtype).t(), _random(K, N, dtype=dtype))
    M, K, N = (5, 40, 70) if smoke else (4096, 2048, 151_936)
    yield _product("mm, vocabulary", _random(M, K, dtype=half), _random(N, K, dtype=half).t())
    for dtype in (half, torch.float32):
        # Tokens, experts of each, experts, and the sizes of a matrix.
        sizes = (5, 2, 4, 40, 24) if smoke else (8192, 8, 128, 2048, 768)
        yield _experts(*sizes, dtype)
        yield _experts_gradient(*sizes, dtype)
        yield _combine(*sizes[:2], sizes[3], dtype)
    for dtype in (half, torch.float32):
        for batch, length, dim in [(2, 20, 16)] if smoke else [(8, 1024, 64), (8, 1024, 128)]:
            yield attention_case(batch, length, 2 if smoke else 16, dim, dtype)
            yield _attention_gradient(batch, length, 2 if smoke else 16, dim, dtype)
        yield _decode(*((2, 20, 2, 16) if smoke else (16, 2048, 16, 128)), dtype)
    rows, width = (3, 70) if smoke else (4096, 151_936)
    for dtype in (half, torch.float32):
        x, grad = _random(rows, width, dtype=dtype), _random(rows, width, dtype=dtype)
        yield _rows("log_softmax", x, lambda x: reductions.log_softmax(x, 1), lambda x: x.log_softmax(1))
        yield _rows("softmax", x, lambda x: reductions.softmax(x, 1), lambda x: x.softmax(1))
        yield _softmax_gradient(x, grad)
        x, weight = _random(rows, 70 if smoke else 2048, dtype=dtype), _random(70 if smoke else 2048, dtype=dtype)
        yield _rows("mean", x, lambda x: reductions.mean(x, 1), lambda x: x.mean(1))
        yield _norm(x, weight)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _some(count: int) -> list[int]:
    return sorted({0, count // 3, count // 2, count - 1})


def _product(name: str, a: Tensor, b: Tensor) -> Case:
    rows = _some(a.shape[0])
    return Case(
        name,
        f"{a.shape[0]} x {a.shape[1]} x {b.shape[1]}",
        a.dtype,
        ours=lambda: products.mm(a, b),
        torch=lambda: a @ b,
        checked=lambda out: out[rows],
        alone=lambda: torch.cat([products.mm(a[row : row + 1], b) for row in rows]),
        exact=lambda: a[rows].double() @ b.double(),
        megatron=_megatron_product(a, b),
    )


def _routed(tokens: int, topk: int, num_experts: int) -> Tensor:
    """How many tokens each expert gets."""
    chosen = torch.rand(tokens, num_experts, device=DEVICE).topk(topk).indices
    return chosen.flatten().bincount(minlength=num_experts)


def _experts(tokens: int, topk: int, num_experts: int, K: int, N: int, dtype: torch.dtype) -> Case:
    sizes = _routed(tokens, topk, num_experts)
    a, b = _random(tokens * topk, K, dtype=dtype), _random(num_experts, N, K, dtype=dtype).transpose(1, 2)
    ends, rows = sizes.cumsum(0).int(), _some(tokens * topk)
    experts = torch.arange(num_experts, device=DEVICE).repeat_interleave(sizes)[rows].tolist()
    return Case(
        "experts",
        f"{tokens} x {topk} of {num_experts}, {K} x {N}",
        dtype,
        ours=lambda: products.grouped_rows(a, b, ends),
        torch=lambda: torch._grouped_mm(a, b, offs=ends),
        checked=lambda out: out[rows],
        alone=lambda: torch.cat([products.mm(a[row : row + 1], b[e]) for row, e in zip(rows, experts, strict=True)]),
        exact=lambda: torch.stack([a[row].double() @ b[e].double() for row, e in zip(rows, experts, strict=True)]),
    )


def _experts_gradient(tokens: int, topk: int, num_experts: int, K: int, N: int, dtype: torch.dtype) -> Case:
    sizes = _routed(tokens, topk, num_experts)
    a, b = _random(tokens * topk, K, dtype=dtype).t(), _random(tokens * topk, N, dtype=dtype)
    ends, last = sizes.cumsum(0).int(), slice(tokens * topk - int(sizes[-1]), None)
    only = sizes[-1:].int()
    return Case(
        "experts, weight gradient",
        f"{tokens} x {topk} of {num_experts}, {K} x {N}",
        dtype,
        ours=lambda: products.grouped_sums(a, b, ends),
        torch=lambda: torch._grouped_mm(a, b, offs=ends),
        checked=lambda out: out[-1:],
        alone=lambda: products.grouped_sums(a[:, last], b[last], only),
        exact=lambda: (a[:, last].double() @ b[last].double()).unsqueeze(0),
    )


def _combine(tokens: int, topk: int, width: int, dtype: torch.dtype) -> Case:
    index = torch.arange(tokens, device=DEVICE).repeat(topk)
    source, rows = _random(tokens * topk, width, dtype=dtype), _some(tokens)

    def ours(index: Tensor, source: Tensor, length: int) -> Tensor:
        out = source.new_zeros(length, width)
        products.add_rows_(out, index, source)
        return out

    def alone(row: int) -> Tensor:
        mine = source[row::tokens]
        return ours(torch.zeros(topk, dtype=torch.long, device=DEVICE), mine, 1)

    return Case(
        "experts, sum",
        f"{tokens} x {topk} x {width}",
        dtype,
        ours=lambda: ours(index, source, tokens),
        torch=lambda: source.new_zeros(tokens, width).index_add_(0, index, source),
        checked=lambda out: out[rows],
        alone=lambda: torch.cat([alone(row) for row in rows]),
        exact=lambda: torch.stack([source[row::tokens].double().sum(0) for row in rows]),
    )


def _megatron_product(a: Tensor, b: Tensor) -> Callable[[], Tensor] | None:
    if DEVICE.type == "cpu":
        return None
    try:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent
    except ImportError:
        return None
    return lambda: matmul_persistent(a, b)


def _rows(name: str, x: Tensor, ours: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> Case:
    rows = _some(x.shape[0])
    return Case(
        name,
        " x ".join(map(str, x.shape)),
        x.dtype,
        ours=lambda: ours(x),
        torch=lambda: plain(x),
        checked=lambda out: out[rows],
        alone=lambda: torch.cat([ours(x[row : row + 1]) for row in rows]),
        exact=lambda: plain(x[rows].double()),
    )


def _norm(x: Tensor, weight: Tensor) -> Case:
    def plain(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], weight.to(x.dtype), 1e-6)

    return _rows("rms_norm", x, lambda x: reductions.rms_norm(x, weight, 1e-6), plain)


def _softmax_gradient(x: Tensor, grad: Tensor) -> Case:
    rows, output = _some(x.shape[0]), x.log_softmax(1)

    def ours(rows: list[int] | slice) -> Tensor:
        return reductions.log_softmax_backward(grad[rows], output[rows], 1, x.dtype)

    def plain(grad: Tensor, output: Tensor) -> Tensor:
        return torch.ops.aten._log_softmax_backward_data(grad, output, 1, grad.dtype)

    return Case(
        "log_softmax, gradient",
        " x ".join(map(str, x.shape)),
        x.dtype,
        ours=lambda: ours(slice(None)),
        torch=lambda: plain(grad, output),
        checked=lambda out: out[rows],
        alone=lambda: torch.cat([ours([row]) for row in rows]),
        exact=lambda: plain(grad[rows].double(), output[rows].double()),
    )


def _packing(lengths_q: list[int], lengths_k: list[int], dim: int) -> Packing:
    bounds = [torch.tensor([0, *x], device=DEVICE).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k)]
    return Packing(*bounds, max(lengths_q), max(lengths_k), scale=dim**-0.5, is_causal=True)


def _batched(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def attention_case(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    """Causal attention of ``batch`` packed sequences; some rows are checked against a decode of theirs."""
    q, k, v = (_random(batch * length, heads, dim, dtype=dtype) for _ in range(3))
    packing = _packing([length] * batch, [length] * batch, dim)
    positions = _some(length)

    def decode(position: int) -> Tensor:
        tensors = q[position : position + 1], k[: position + 1], v[: position + 1]
        return attention.attention_forward(*tensors, _packing([1], [position + 1], dim))[0]

    def plain(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    batched = [_batched(x, batch) for x in (q, k, v)]
    return Case(
        "attention",
        f"{batch} x {length}, {heads} heads of {dim}",
        dtype,
        ours=lambda: attention.attention_forward(q, k, v, packing)[0],
        torch=lambda: plain(*batched),
        checked=lambda out: out[positions],
        alone=lambda: torch.cat([decode(position) for position in positions]),
        exact=lambda: _packed(plain(*(x[:1].double() for x in batched)))[positions],
    )


def _attention_gradient(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    q, k, v, grad = (_random(batch * length, heads, dim, dtype=dtype) for _ in range(4))
    packing, alone_packing = (_packing([length] * count, [length] * count, dim) for count in (batch, 1))
    saved = attention.attention_forward(q, k, v, packing)
    leaves = [_batched(x, batch).detach().requires_grad_() for x in (q, k, v)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)

    def ours() -> Tensor:
        return torch.stack(attention.attention_backward(grad, q, k, v, *saved, packing))

    def alone() -> Tensor:
        first = [x[:length] for x in (grad, q, k, v, saved[0])]
        return torch.stack(attention.attention_backward(*first, saved[1][:, :length], alone_packing))

    def exact() -> Tensor:
        wide = [x[:1].detach().double().requires_grad_() for x in leaves]
        out = F.scaled_dot_product_attention(*wide, is_causal=True)
        return torch.stack([_packed(x) for x in torch.autograd.grad(out, wide, _batched(grad, batch)[:1].double())])

    def plain() -> Tensor:
        return torch.stack(torch.autograd.grad(output, leaves, _batched(grad, batch), retain_graph=True))

    shape = f"{batch} x {length}, {heads} heads of {dim}"
    return Case("attention, gradient", shape, dtype, ours, plain, lambda out: out[:, :length], alone, exact)


def _decode(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    q = _random(batch, heads, dim, dtype=dtype)
    k, v = (_random(batch * length, heads, dim, dtype=dtype) for _ in range(2))
    packing, alone_packing = (_packing([1] * count, [length] * count, dim) for count in (batch, 1))
    batched = [_batched(q, batch), _batched(k, batch), _batched(v, batch)]
    last = slice(-length, None)
    return Case(
        "attention, decode",
        f"{batch} x 1 of {length}, {heads} heads of {dim}",
        dtype,
        ours=lambda: attention.attention_forward(q, k, v, packing)[0],
        torch=lambda: F.scaled_dot_product_attention(*batched),
        checked=lambda out: out[-1:],
        alone=lambda: attention.attention_forward(q[-1:], k[last], v[last], alone_packing)[0],
        exact=lambda: _packed(F.scaled_dot_product_attention(*(x[-1:].double() for x in batched))),
    )


if __name__ == "__main__":
    main()
