# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts is made of, in the mode: grouped products, sums of a token's experts, choices among equals.

CPU and CUDA: on a machine with a GPU every test runs on both.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import assert_same_bits, each_device, randn
from hypothesis import given
from hypothesis import strategies as st
from searching import searching

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode, overrides
from mis_ext.onpolicy.bits import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# The name has changed with the versions of torch, and the oldest have none.
grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
needs_grouped_mm = pytest.mark.skipif(grouped_mm is None, reason="this torch has no grouped product")


def assert_right(actual, exact, terms):
    narrow = actual.dtype != torch.float32
    assert actual.shape == exact.shape
    error = torch.finfo(actual.dtype).eps * (2 if narrow else 4 * math.sqrt(terms))
    assert (actual.double() - exact).abs().max() <= error * max(exact.abs().max(), 1e-6)


def ends_of(sizes, device="cpu"):
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


@needs_grouped_mm
@each_device
@searching(10)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 3, 16, 17, 40]), min_size=1, max_size=6),
    length=st.sampled_from([8, 64, 136, 200]),
    columns=st.sampled_from([8, 24, 136]),
    spare=st.sampled_from([0, 3]),
    dtype=st.sampled_from(DTYPES),
    is_transposed=st.booleans(),
)
def test_a_row_of_a_grouped_product_depends_on_itself_and_its_matrix(
    device, sizes, length, columns, spare, dtype, is_transposed
):
    rows, ends = sum(sizes) + spare, ends_of(sizes, device)
    a = randn(rows, length, dtype=dtype, device=device)
    b = randn(len(sizes), columns, length, dtype=dtype, seed=1, device=device).transpose(1, 2)
    b = b if is_transposed else b.contiguous()
    group_of = torch.tensor([*itertools.chain(*([g] * n for g, n in enumerate(sizes)))], dtype=torch.long)
    with batch_invariant_mode():
        whole = grouped_mm(a, b, offs=ends)
        for row in {0, len(group_of) // 2, len(group_of) - 1} if sum(sizes) else ():
            group = int(group_of[row])
            assert_same_bits(a[row : row + 1] @ b[group], whole[row : row + 1])
            alone = a.clone()
            alone[torch.arange(rows) != row] = math.nan
            assert_same_bits(grouped_mm(alone, b, offs=ends)[row], whole[row])
            assert_same_bits(
                grouped_mm(a[row : row + 1], b[group : group + 1], offs=ends_of([1], device))[0], whole[row]
            )
        # As decoding in transformers multiplies: a matrix for each token.
        chosen = b.transpose(1, 2)[group_of.to(device)]
        assert_same_bits(torch.bmm(chosen, a[: len(group_of), :, None]).squeeze(-1), whole[: len(group_of)])
    assert_same_bits(whole[sum(sizes) :], torch.zeros_like(whole[sum(sizes) :]))
    exact = [x.double() @ y for x, y in zip(a[: sum(sizes)].split(sizes), b.double(), strict=True)]
    assert_right(whole[: sum(sizes)], torch.cat(exact), length) if sum(sizes) else None


@needs_grouped_mm
@each_device
@each_dtype
def test_the_gradient_of_a_grouped_product_is_right(device, dtype):
    sizes, ends = [3, 0, 20, 9], ends_of([3, 0, 20, 9], device)
    a, b, slope = (
        randn(*shape, dtype=dtype, seed=i, device=device) for i, shape in enumerate([(32, 64), (4, 48, 64), (32, 48)])
    )
    a.requires_grad_(), b.requires_grad_()
    with batch_invariant_mode():
        grad_a, grad_b = torch.autograd.grad(grouped_mm(a, b.transpose(1, 2), offs=ends), [a, b], slope)
    parts = list(zip(a.detach().double().split(sizes), slope.double().split(sizes), strict=True))
    assert_right(grad_a, torch.cat([g @ w for (_, g), w in zip(parts, b.detach().double(), strict=True)]), 48)
    assert_right(grad_b, torch.stack([g.t() @ x for x, g in parts]), 32)


@needs_grouped_mm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 9)}, r"got \[4, 9\] of .*, \[2, 8, 16\]"),
        ({"b": torch.zeros(3, 8, 16)}, r"got \[4, 8\] of .*, \[3, 8, 16\]"),
        ({"b": torch.zeros(2, 8, 16).bfloat16()}, r"the same dtype, .* of torch\.bfloat16"),
        ({"a": torch.zeros(2, 4, 8), "offs": None}, r"got \[2, 4, 8\] of .*, \[2, 8, 16\]"),
        ({"offs": None}, r"int32 offs \[G\]"),
        ({"offs": torch.tensor([2, 4])}, r"int32 offs \[G\]"),
        ({"offs": torch.tensor([3, 2], dtype=torch.int32)}, r"must not decrease, within \[0, 4\], got \[3, 2\]"),
        ({"offs": torch.tensor([3, 5], dtype=torch.int32)}, r"within \[0, 4\], got \[3, 5\]"),
        ({"bias": torch.zeros(2, 16)}, "no bias or other out_dtype"),
        ({"out_dtype": torch.bfloat16}, "and torch.bfloat16"),
    ],
)
def test_what_a_grouped_product_cannot_take_is_named(change, message):
    arguments = {"a": torch.zeros(4, 8), "b": torch.zeros(2, 8, 16), "offs": torch.tensor([2, 4], dtype=torch.int32)}
    arguments |= change
    more = [arguments.pop(name, None) for name in ("a", "b", "offs", "bias", "out_dtype")]
    with pytest.raises(RuntimeError, match=message), batch_invariant_mode():
        torch.ops.aten._grouped_mm(*more)


def test_the_grouped_product_of_transformers_for_older_torch_is_ours_and_never_runs_unseen():
    pytest.importorskip("transformers.integrations.moe")
    a, b, ends = randn(20, 64).requires_grad_(), randn(3, 64, 48, seed=1), ends_of([1, 12, 7])
    with batch_invariant_mode():
        output = torch.ops.transformers.grouped_mm_fallback(a, b, ends)
        assert_same_bits(output, torch.cat([x @ y for x, y in zip(a.split([1, 12, 7]), b, strict=True)]))
        # Its gradient writes products into given tensors.
        with pytest.raises(NotImplementedError, match=r"mm\.out"):
            output.sum().backward()


def one_after_the_other(out, places, source):
    """NumPy's unbuffered addition to a flat array, in float32, rounded once."""
    total = out.detach().cpu().float().flatten().numpy().copy()
    np.add.at(total, places.flatten().cpu().numpy(), source.detach().cpu().float().flatten().numpy())
    return torch.from_numpy(total).view(out.shape).to(out.dtype)


def every_place(shape):
    return torch.arange(math.prod(shape)).view(shape)


def draw(generator, low, high, shape):
    return torch.randint(low, high, shape, generator=generator)


index_put_ = torch.ops.aten.index_put_.default


def sums_of_rows(seed):
    """Calls of functions that add, with where each number goes: ``name: (shape of the target, places, call)``."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = int(draw(generator, 1, 12, ())), int(draw(generator, 1, 40, ()))
    shape, many = (tokens, width), int(draw(generator, 1, 60, ()))
    rows, columns = draw(generator, 0, tokens, (many,)), draw(generator, 0, width, (many,))
    anywhere = draw(generator, 0, tokens, (many, int(draw(generator, 1, width + 1, ()))))
    along = draw(generator, 0, width, (int(draw(generator, 1, tokens + 1, ())), many))
    deep, index = (3, tokens, 5, width), draw(generator, -tokens, tokens, (many,))
    grid, deep_grid = every_place(shape), every_place(deep)
    calls = {
        "index_add": (shape, grid[rows], lambda x, v, d: x.index_add(0, rows.to(d), v)),
        "index_add_": (shape, grid[rows], lambda x, v, d: x.index_add_(0, rows.to(d), v)),
        "index_add of columns": (shape, grid[:, columns], lambda x, v, d: x.index_add(1, columns.to(d), v)),
        "index_add of the middle": (deep, deep_grid[:, rows], lambda x, v, d: x.index_add(1, rows.to(d), v)),
        "scatter_add_ of rows": (
            shape,
            grid[rows],
            lambda x, v, d: x.scatter_add_(0, rows.to(d)[:, None].expand(-1, width), v),
        ),
        "scatter_add": (shape, grid.gather(0, anywhere), lambda x, v, d: x.scatter_add(0, anywhere.to(d), v)),
        "scatter_add along rows": (shape, grid.gather(1, along), lambda x, v, d: x.scatter_add(-1, along.to(d), v)),
        "index_put": (shape, grid[index], lambda x, v, d: x.index_put((index.to(d),), v, accumulate=True)),
        "index_put_ of elements": (
            shape,
            grid[rows, columns],
            lambda x, v, d: x.index_put_((rows.to(d), columns.to(d)), v, accumulate=True),
        ),
        "index_put_ of the middle": (
            deep,
            deep_grid[:, index],
            lambda x, v, d: index_put_(x, (None, index.to(d)), v, True),
        ),
        "index_put_ in two dimensions": (
            deep,
            deep_grid[:, index.view(1, -1), columns[:4].view(-1, 1) % 5],
            lambda x, v, d: index_put_(x, (None, index.view(1, -1).to(d), columns[:4].view(-1, 1).to(d) % 5), v, True),
        ),
        "index_add_ to a transposed tensor": (
            shape,
            grid[:, columns],
            lambda x, v, d: x.t().index_add_(0, columns.to(d), v.t()).t(),
        ),
    }
    return calls


@each_device
@each_dtype
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_one_destination_are_added_in_their_order(device, dtype, seed):
    for name, (shape, places, call) in sums_of_rows(seed).items():
        x, values = randn(*shape, dtype=dtype, device=device), randn(*places.shape, dtype=dtype, seed=1, device=device)
        before, expected = x.clone(), one_after_the_other(x, places, values)
        with batch_invariant_mode():
            output = call(x, values, device)
        assert output.shape == expected.shape, name
        assert same_bits(output.cpu(), expected).all(), name
        in_place = name.split()[0].endswith("_")
        assert same_bits(x, output if in_place else before).all(), name


@each_device
def test_a_factor_counts_and_a_number_without_dimensions_is_added(device):
    x = torch.zeros(3, 2, device=device)
    with batch_invariant_mode():
        x.index_add_(0, torch.tensor([2, 2], device=device), torch.ones(2, 2, device=device), alpha=0.5)
        assert x.tolist() == [[0, 0], [0, 0], [1, 1]]
        number, index = torch.tensor(1.0, device=device), torch.tensor(0, device=device)
        x.index_put_((index,), number, accumulate=True)
        assert x.tolist() == [[1, 1], [0, 0], [1, 1]]
        empty = torch.zeros(0, dtype=torch.long, device=device)
        assert torch.equal(x.index_add(0, empty, x[:0]), x)
        assert torch.equal(x.scatter_add(0, empty.view(0, 2), x[:0]), x)
        assert torch.zeros(0, 2, device=device).index_add(0, empty, x[:0]).shape == (0, 2)


def test_threads_add_in_one_order():
    tokens, topk, width = 256, 8, 512
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(tokens).repeat_interleave(topk)[torch.randperm(tokens * topk, generator=generator)]
    slope, before = randn(tokens * topk, width), torch.get_num_threads()

    def gradient():
        x = torch.zeros(tokens, width, requires_grad=True)
        return torch.autograd.grad(x[which], x, slope)[0]

    expected = one_after_the_other(torch.zeros(tokens, width), every_place((tokens, width))[which], slope)
    try:
        with batch_invariant_mode():
            for threads in (1, 2, 4, 4):
                torch.set_num_threads(threads)
                assert_same_bits(gradient(), expected)
    finally:
        torch.set_num_threads(before)


def test_a_mask_names_no_place_twice():
    x, mask = randn(5, 3), torch.tensor([True, False, True, True, False])
    with batch_invariant_mode():
        ours = x.index_put((mask,), x[:3], accumulate=True), x.index_put((torch.tensor([1]),), x[:1])
    plain = x.index_put((mask,), x[:3], accumulate=True), x.index_put((torch.tensor([1]),), x[:1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


WRONG_SUMS = {
    "index too large": lambda x, i: x.index_add(0, i + 5, x),
    "a negative index of index_add": lambda x, i: x.index_add(0, i - 1, x),
    "a row too few": lambda x, i: x.index_add(0, i, x[1:]),
    "another dtype": lambda x, i: x.index_add(0, i, x.double()),
    "another dtype of scatter_add": lambda x, i: x.scatter_add(0, i[:, None], x.double()),
    "an index too wide": lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 3), x),
    "an index with more dimensions": lambda x, i: x.scatter_add(0, i[:, None, None], x),
    "index_put far below": lambda x, i: x.index_put((i - 9,), x, accumulate=True),
    "values that do not broadcast": lambda x, i: x.index_put((i,), x.repeat(1, 3), accumulate=True),
}


@pytest.mark.parametrize("name", WRONG_SUMS)
def test_what_torch_does_not_add_is_an_error_in_the_mode_too(name):
    arguments = randn(4, 2), torch.arange(4)
    with pytest.raises((RuntimeError, IndexError)):
        WRONG_SUMS[name](*arguments)
    with pytest.raises((RuntimeError, IndexError)), batch_invariant_mode():
        WRONG_SUMS[name](*arguments)


REFUSED_SUMS = {
    "index_reduce": lambda x, i: x.index_reduce(0, i[:, 0], x, "prod"),
    "put": lambda x, i: x.put(i, x, accumulate=True),
    "index_add.out": lambda x, i: torch.index_add(x, 0, i[:, 0], x, out=x.clone()),
    "index_put_.default has no .* masks together with indices": lambda x, i: index_put_(
        x, (torch.ones(4, dtype=torch.bool), i[:, 0]), x[:, 0], True
    ),
    "index_put_.default has no .* gaps": lambda x, i: index_put_(x[None], (i[:1, 0], None, i[:1, 0]), x[:1], True),
    "topk.values": lambda x, i: torch.topk(x, 1, out=(x[:, :1].clone(), i[:, :1].clone())),
}


@pytest.mark.filterwarnings("ignore:index_reduce. is in beta")
@pytest.mark.parametrize("name", REFUSED_SUMS)
def test_a_sum_or_a_choice_without_a_fixed_order_is_an_error(name):
    with pytest.raises(NotImplementedError, match=name), batch_invariant_mode():
        REFUSED_SUMS[name](randn(4, 2), torch.zeros(4, 2, dtype=torch.long))


@each_device
@searching(10)
@given(
    columns=st.sampled_from([2, 8, 60, 64, 128, 300]),
    topk=st.integers(0, 9),
    kinds=st.integers(1, 4),
    largest=st.booleans(),
    dim=st.sampled_from([0, -1]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_of_equal_scores_the_first_are_chosen_in_their_order(device, columns, topk, kinds, largest, dim, dtype, seed):
    topk = min(topk, columns)
    scores = draw(torch.Generator().manual_seed(seed), 0, kinds, (7, columns)).to(dtype) - 1
    scores[3, columns // 2], scores[4] = math.nan, -0.0
    scores[4, ::2] = 0.0
    # NaN counts as the largest.
    key = scores.nan_to_num(nan=99.0).double() * (-1 if largest else 1)
    expected = torch.tensor([sorted(range(columns), key=row.__getitem__)[:topk] for row in key.tolist()]).view(7, topk)
    scores = (scores.t() if dim == 0 else scores).to(device)
    with batch_invariant_mode():
        values, chosen = scores.topk(topk, dim=dim, largest=largest, sorted=False)
        ordered, places = scores.sort(dim=dim, descending=largest)
    values, chosen, ordered, places = (x.t() if dim == 0 else x for x in (values, chosen, ordered, places))
    assert torch.equal(chosen.cpu(), expected.long())
    assert torch.equal(places[:, :topk], chosen)
    rows = scores.t() if dim == 0 else scores
    for actual, expected in ((ordered[:, :topk], values), (values, rows.gather(1, chosen))):
        assert (same_bits(actual.contiguous(), expected.contiguous()) | (actual.isnan() & expected.isnan())).all()


def test_a_choice_of_more_than_there_are_is_an_error():
    with batch_invariant_mode(), pytest.raises(RuntimeError, match=r"length \(4\) exceeds dimension size \(3\)"):
        randn(2, 3).topk(4)


def test_the_gradient_of_a_choice_goes_to_the_chosen():
    scores = torch.zeros(2, 5, requires_grad=True)
    with batch_invariant_mode():
        scores.topk(2).values.sum().backward()
    assert scores.grad.tolist() == [[1, 1, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("dims", "is_row"),
    [((1,), True), ((1, 2), True), ((-1,), True), ((0,), True), ((0, 1), False), ((-3, 2), True), ((0, 1, 2), False)],
)
def test_a_sum_that_leaves_a_dimension_before_the_last_is_that_of_a_row(dims, is_row, monkeypatch):
    seen = []
    monkeypatch.setattr(overrides.devices.cpu, "sum", lambda rows, is_mean: seen.append(rows) or rows[..., 0])
    with batch_invariant_mode():
        torch.ones(2, 3, 4).sum(dims)
    assert bool(seen) == is_row


@each_device
@each_dtype
@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.logsumexp])
def test_a_sum_over_experts_is_about_a_token(function, device, dtype):
    for width in (72, 80, 1):
        x = randn(16, 75, width, dtype=dtype, device=device)
        with batch_invariant_mode():
            whole = function(x, 0)
            for size in (1, 4):
                assert_same_bits(torch.cat([function(part, 0) for part in x.split(size, 1)]), whole)
        assert_right(whole, function(x.double(), 0), 16)
