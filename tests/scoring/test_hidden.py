"""Log-probs, entropy and gradients from hidden states: against float64, in both backends, on drawn cases."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mis_ext.scoring import KeptColumns, hidden, score_hidden
from mis_ext.scoring.naive import naive_score_hidden

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["eager", "triton"])
def backend(request, monkeypatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("MIS_EXT_BACKEND", request.param)
    return request.param


class Case(NamedTuple):
    """Operands, what is asked of them, and the gradients that come in; ``naive`` asks the same of the naive page."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    token_T: Tensor
    keys: dict[str, Any]
    naive: dict[str, Any]
    grad_2T: Tensor


class Answer(NamedTuple):
    log_prob_T: Tensor
    entropy_T: Tensor | None
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None


def drawn(seed: int, *, dtypes: tuple[torch.dtype, ...] = DTYPES, ranks: int = 1) -> Case:
    """A case of random sizes, rows, strides, magnitudes and settings."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_rows, size, width = random.randint(1, 40), random.randint(1, 120) * ranks, random.randint(1, 24)
    dtype = random.choice(dtypes)
    magnitude = 10.0 ** random.uniform(-1, 0.5)
    hidden_NH = (torch.randn(num_rows, width + 3, generator=generator) * magnitude)[:, :width].to(dtype)
    if random.random() < 0.7:
        hidden_NH = hidden_NH.contiguous()
    weight_VH = torch.randn(size, width, generator=generator).to(dtype)
    bias_V = torch.randn(size, generator=generator).to(dtype) if random.random() < 0.3 else None
    same: dict[str, Any] = {}
    if random.random() < 0.6:
        same["temperature"] = random.choice([0.3, 0.7, 1.3, 2.0])
    if random.random() < 0.3:
        same["logit_scale"] = random.choice([0.25, 1.5])
    if random.random() < 0.3:
        same["soft_cap"] = random.choice([3.0, 30.0])
    if random.random() < 0.3:
        same["vocab_size"] = random.randint(1, size)
    keys, naive = dict(same), dict(same)
    keys["entropy"] = random.choice(["gradient", "gradient", "value", "none"])
    row_T = torch.arange(num_rows)
    if random.random() < 0.7:
        row_T = keys["row_T"] = torch.randperm(num_rows, generator=generator)[: random.randint(1, num_rows)]
        naive["rows"] = row_T.tolist()
    real = same.get("vocab_size", size)
    token_T = torch.randint(real, row_T.shape, generator=generator)
    if random.random() < 0.4:
        kept_TV = torch.rand(len(row_T), real, generator=generator) < random.choice([0.02, 0.5])
        is_recorded_T = torch.rand(len(row_T), generator=generator) < 0.8
        token_N, id_N = kept_TV.nonzero().unbind(-1)
        order_N = torch.cat([torch.randperm(len(id_N), generator=generator), torch.arange(len(id_N) // 3)])
        keys["kept"] = KeptColumns(id_N[order_N], token_N[order_N], is_recorded_T)
        naive["kept"] = [
            ids_V.nonzero().flatten().tolist() if is_recorded else None
            for ids_V, is_recorded in zip(kept_TV, is_recorded_T, strict=True)
        ]
    grad_2T = torch.randn(2, len(row_T), generator=generator)
    return Case(hidden_NH, weight_VH, bias_V, token_T, keys, naive, grad_2T)


def answered(case: Case, **more: Any) -> Answer:
    """What is tested."""
    leaves = [x.detach().requires_grad_() for x in (case.hidden_NH, case.weight_VH, case.bias_V) if x is not None]
    bias_V = leaves[2] if len(leaves) > 2 else None
    scores = score_hidden(leaves[0], leaves[1], case.token_T, bias=bias_V, **case.keys | more)
    outputs = [x for x in scores if x is not None and x.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [g.to(outputs[0].dtype) for g in case.grad_2T[: len(outputs)]])
    return Answer(*scores, *grads, *[None] * (3 - len(grads)))


def judged(case: Case) -> Answer:
    """The naive page in float64."""
    leaves = [
        x.detach().double().requires_grad_() for x in (case.hidden_NH, case.weight_VH, case.bias_V) if x is not None
    ]
    bias_V = leaves[2] if len(leaves) > 2 else None
    log_prob_T, entropy_T = naive_score_hidden(*leaves[:2], case.token_T.tolist(), bias=bias_V, **case.naive)
    total = (log_prob_T * case.grad_2T[0]).sum()
    if case.keys["entropy"] == "gradient":
        total = total + (entropy_T * case.grad_2T[1]).sum()
    grads = torch.autograd.grad(total, leaves)
    has_entropy = case.keys["entropy"] != "none"
    return Answer(log_prob_T, entropy_T if has_entropy else None, *grads, *[None] * (3 - len(grads)))


def assert_near(case: Case, found: Answer, wanted: Answer) -> None:
    """Within roundings of float32, and for gradients of the dtype of the operands.

    A logit is a sum of ``H`` products, each of which is off by half a unit of it. A gradient's terms are rounded to the
    dtype of the operands, and so is it itself: of terms that cancel the roundings stay.
    """
    unit = 2.0**-24
    scale = case.keys.get("logit_scale", 1.0) / case.keys.get("temperature", 1.0)
    products = case.hidden_NH.double().abs() @ case.weight_VH.double().abs().t()
    bias = 0.0 if case.bias_V is None else float(case.bias_V.double().abs().max())
    largest = scale * (float(products.max()) + bias) + 1.0
    near = 16 * unit * largest
    for name in ("log_prob_T", "entropy_T"):
        value, exact = getattr(found, name), getattr(wanted, name)
        assert (value is None) == (exact is None)
        if value is not None:
            torch.testing.assert_close(value.double(), exact, rtol=4 * unit, atol=near)
    # Of a slope: what is off in its exponent, and what its dtype rounds away, twice under a cap.
    rounding = 2 * torch.finfo(case.hidden_NH.dtype).eps + 4 * near
    slope = scale * float(case.grad_2T.abs().sum(0).max()) * (2.0 + largest)
    reach = {
        "hidden_grad": slope * float(case.weight_VH.double().abs().max()),
        "weight_grad": slope * float(case.hidden_NH.double().abs().max()) * len(case.token_T),
        "bias_grad": slope * len(case.token_T),
    }
    for name, atol in reach.items():
        value, exact = getattr(found, name), getattr(wanted, name)
        assert (value is None) == (exact is None)
        if value is not None:
            torch.testing.assert_close(value.double(), exact, rtol=rounding, atol=rounding * atol)


def with_tiles(monkeypatch: Any, *, tile: int, slopes: int, states: int) -> None:
    """Tiles as small as those of a vocabulary that is large."""
    for name, size in (("TILE", tile), ("SLOPES", slopes), ("STATES", states)):
        monkeypatch.setitem(getattr(hidden, name), "cpu", size)


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
@pytest.mark.parametrize("small", [False, True])
def test_drawn_cases_are_what_float64_says(backend, monkeypatch, first_seed, small) -> None:
    if small:
        with_tiles(monkeypatch, tile=200, slopes=500, states=100)
    # The interpreter takes a tenth of a second for each launch.
    for seed in range(first_seed, first_seed + (20 if backend == "eager" else 2)):
        case = drawn(seed)
        found = answered(case)
        assert found.weight_grad.dtype == found.hidden_grad.dtype == case.hidden_NH.dtype
        assert_near(case, found, judged(case))
